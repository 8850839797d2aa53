"""The settings of an evaluation: those by which a killed one continues, and the lengths that the model allows."""

import json
import os
import shutil

import pipeline
import pytest

from openrlhf_bapo import evaluation
from openrlhf_bapo.cli import evaluate
from openrlhf_bapo.flags.mistakes import FlagError
from openrlhf_bapo.openrlhf.reward_calls import FAILED_REWARD
from openrlhf_bapo.run.plan import read_shape


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("evaluation"))


def model_setting(folder) -> str:
    return evaluation.content_settings(str(folder), [], [])["model"]


@pytest.mark.parametrize("size", [100, 300 << 20], ids=["small", "large"])
def test_a_model_that_is_saved_again_is_the_same_and_one_with_other_weights_is_not(tmp_path, size):
    weights = tmp_path / "model.safetensors"
    weights.touch()
    os.truncate(weights, size)
    before = model_setting(tmp_path)
    os.utime(weights, (1, 1))
    (tmp_path / "a folder").mkdir()
    assert model_setting(tmp_path) == before
    layer = size // 40  # one that is trained, of 40
    with open(weights, "rb+") as file:
        file.seek(17 * layer)
        file.write(b"x" * layer)
    assert model_setting(tmp_path) != before


def test_an_evaluation_by_a_grader_with_other_rules_is_another_one(tmp_path, monkeypatch):
    package = shutil.copytree(evaluation._GRADER.parent, tmp_path / "math_tasks")
    monkeypatch.setattr(evaluation, "_GRADER", package / "reward.py")
    before = evaluation.content_settings("model", [], evaluation.reward_endpoints(None))
    assert evaluation.content_settings("model", [], evaluation.reward_endpoints(None)) == before
    with open(package / "answers.py", "a") as file:
        file.write("# another rule\n")
    after = evaluation.content_settings("model", [], evaluation.reward_endpoints(None))
    assert {name for name in before if before[name] != after[name]} == {"reward"}


def test_files_of_one_name_are_several_datasets(tmp_path):
    files = [tmp_path / name for name in ("gsm8k/test.jsonl", "math/test.jsonl", "sums.jsonl")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"input": "1+2=", "label": "3"}\n{"input": "1+3=", "label": "4", "datasource": "own"}\n')
    problems = evaluation.read_problems([*map(str, files)], "input", "label", None)
    names = [str(tmp_path / "gsm8k/test"), str(tmp_path / "math/test"), "sums"]
    assert [problem.dataset for problem in problems] == [name for file in names for name in (file, "own")]


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_plan_and_an_evaluation_take_the_length_of_a_yarn_model_as_vllm_does(directory, name):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    config = directory / "model/config.json"
    before = config.read_text()
    values = {key: value for key, value in json.loads(before).items() if key != "rope_parameters"}
    config.write_text(json.dumps(values | {name: rope}))
    assert read_shape(str(directory / "model")).max_position_embeddings == 512
    problems = [evaluation.Problem("file:1", "sums", {"input": "1+2=", "label": "3"})]
    prompts = evaluation.make_prompts(problems, str(directory / "model"), "input", "label", max_new_tokens=500)
    assert prompts.max_model_len == 504
    config.write_text(before)


def test_problems_are_read_with_a_byte_order_mark_and_refused_with_half_of_a_character_or_a_key_twice(tmp_path):
    file, row = tmp_path / "data.jsonl", '{"input": "1+2=", "label": "3"}\n'
    file.write_text(f"\ufeff{row}{row}")
    problems = evaluation.read_problems([str(file)], "input", "label", None)
    assert [problem.row for problem in problems] == [{"input": "1+2=", "label": "3"}] * 2
    for wrong, said in (
        ('{"input": "\\ud835", "label": "3"}', r"has \\ud835, half of a character"),
        ('{"input": "1", "input": "2", "label": "3"}', "has the key 'input' twice"),
    ):
        file.write_text(row + wrong)
        with pytest.raises(FlagError, match=f"^--data {file}: line 2 {said}"):
            evaluation.read_problems([str(file)], "input", "label", None)


def test_an_empty_prompt_which_no_engine_can_continue_is_refused_with_its_line(directory, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"input": "1+2=", "label": "3"}\n{"input": "", "label": "3"}\n')
    problems = evaluation.read_problems([str(file)], "input", "label", None)
    with pytest.raises(FlagError, match=f"^--data {file}:2: 'input' is empty; allowed: a text"):
        evaluation.make_prompts(problems, str(directory / "model"), "input", "label")


@pytest.mark.parametrize("template", ["{} Put it into \\boxed{}.", "{} {name}", "Q:", ""])
def test_a_template_that_cannot_take_the_input_is_refused_as_train_refuses_it(directory, tmp_path, template, capsys):
    flags = ["--model", directory / "model", "--data", directory / "train.jsonl", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit) as end:
        evaluate.main([*map(str, flags), "--input_template", template])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert line.startswith(f"openrlhf-bapo: --input_template {template!r}: allowed: a text with {{}} for the input")
    assert not (tmp_path / "out").exists()


def test_answers_on_which_the_grader_failed_are_counted(directory, tmp_path, monkeypatch, capsys):
    tokens = {"observation_tokens": [4, 5, 6, 7], "action_ranges": [(2, 4)], "prompt": "1+", "truncated": False}
    outcomes = [
        tokens | {"reward": [0.0], "extra_logs": {"graded_timeouts": [timeouts], "graded_crashes": [0.0]}}
        for timeouts in (1.0, 0.0)
    ]
    outcomes.append(tokens | {"reward": None, "extra_logs": {FAILED_REWARD: "timeout: reward.py"}})

    def generate(args, endpoints, waiting, prompts, record) -> None:
        for problem in waiting:
            responses = [evaluation.describe_response(outcome, prompts.tokenizer) for outcome in outcomes]
            record.append(problem, prompts.texts[problem.key], "3", responses)

    monkeypatch.setattr(evaluate, "_generate", generate)
    flags = ["--model", directory / "model", "--data", directory / "train.jsonl", "--out", tmp_path / "out"]
    for _ in range(2):  # from the engines, then from the record
        with pytest.raises(SystemExit):
            evaluate.main([*map(str, flags), "--n", "3", "--max_problems", "5"])
        said = capsys.readouterr().err
        failed = "5 of 15 responses count as wrong, because the grader failed on them (graded_timeouts)\n"
        assert failed in said and "graded_crashes" not in said
        results = json.loads((tmp_path / "out/results.json").read_text())
        assert results["extra_logs"] == {"graded_timeouts": 1 / 2, "graded_crashes": 0}  # of the graded ones
