"""`openrlhf-bapo evaluate`: the real engines, killed and resumed; prompts as OpenRLHF makes them; users' mistakes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import endings
import pipeline
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_bapo import evaluation
from openrlhf_bapo.cli import evaluate
from openrlhf_bapo.flags.input_files import loading
from openrlhf_bapo.math_tasks.metrics import GradedResponse, evaluation_metrics

# An engine has 128 problems of 4 responses in work, so that a killed one leaves others.
NUM_PROBLEMS, N, MAX_NEW_TOKENS, UNGRADED_LABEL = 120, 4, 24, "11"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The tiny model, sums.jsonl and differences.jsonl, and a reward that fails for one label."""
    directory = pipeline.make_model(tmp_path_factory.mktemp("evaluate"))
    for dataset, sign in (("sums", "+"), ("differences", "-")):
        rows = []
        for i in range(NUM_PROBLEMS):
            a, b = i % 10, i // 10 % 6  # every prompt twice
            rows.append({"input": f"{a}{sign}{b}=", "label": str(a + b if sign == "+" else a - b)})
        if dataset == "sums":
            rows = [row | {"datasource": "additions"} for row in rows]
        (directory / f"{dataset}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = (directory / "reward.py").read_text()
    failing = f"    assert labels != ['{UNGRADED_LABEL}'], 'no grade'\n    rewards ="
    (directory / "reward.py").write_text(reward.replace("    rewards =", failing))
    (directory / "broken.py").write_text("def reward_func(:\n")
    return directory


def flags(directory: Path, **overrides) -> list[str]:
    """A small evaluation's flags; None removes one."""
    values = {
        "model": directory / "model",
        "data": [directory / "sums.jsonl", directory / "differences.jsonl"],
        "out": directory / "out",
        "n": N,
        "temperature": 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "num_engines": 2,
        "reward": directory / "reward.py",
    }
    values |= overrides
    argv = []
    for name, value in values.items():
        if value is not None:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def call(argv: list[str]) -> int:
    """The exit code of the command in this process."""
    with pytest.raises(SystemExit) as ended:
        evaluate.main(argv)
    return ended.value.code


def processes_of(part: str) -> dict[int, str]:
    """Ids and names of the processes that inherited PART=`part` in their environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"PART={part}\0".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "comm").read_text().strip()
        except OSError:  # it has ended, or is another user's
            continue
    return found


def wait_for_end(part: str) -> None:
    while left := processes_of(part):
        # After SIGKILL of a driver these two of Ray's processes stay for a minute or two.
        if set(left.values()) <= {"ray::DashboardA", "ray::RuntimeEnv"} and part.endswith("killed"):
            for process in left:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def test_a_killed_evaluation_continues_and_ends_with_every_problem_once_and_metrics_of_its_responses(directory, capsys):
    evaluate = ["-m", "openrlhf_bapo.cli.evaluate"]
    # Only what the responses depend on must stay: the first part has one engine. It starts cold, so that the engine's
    # processes descend from its actor.
    first_command = [sys.executable, *evaluate, *flags(directory, num_engines=1)]
    command = [*endings.WARM, *evaluate, *flags(directory)]
    killed, resumed = f"{directory}/killed", f"{directory}/resumed"
    responses = directory / "out" / "responses.jsonl"

    with pipeline.running(first_command, directory / "first.log", PART=killed, RAY_DEDUP_LOGS="0") as process:
        while not responses.exists() or responses.read_bytes().count(b"\n") < 5:
            assert process.poll() is None, (directory / "first.log").read_text()
            time.sleep(0.01)
        # The engine's actor too: an engine must not outlive it.
        for one in [one for one, name in processes_of(killed).items() if name == "ray::RolloutRay"]:
            os.kill(one, signal.SIGKILL)
        process.kill()
        process.wait()
    wait_for_end(killed)
    first = responses.read_bytes()
    first = first[: first.rfind(b"\n") + 1]
    assert 5 <= first.count(b"\n") < 2 * NUM_PROBLEMS
    responses.write_bytes(first + b'{"problem": "torn')

    output = directory / "second.log"
    with pipeline.running(command, output, PART=resumed, RAY_DEDUP_LOGS="0") as process:
        code = process.wait()
    wait_for_end(resumed)
    output = output.read_text()
    assert code == 1, output  # for the ungraded ones

    # Every problem once, the first part as it was.
    assert responses.read_bytes().startswith(first)
    assert "dropped a torn last line of 17 bytes" in output
    assert f"{first.count(bytes([10]))} finished before" in output
    lines = [json.loads(line) for line in responses.read_text().splitlines()]
    files = [directory / "sums.jsonl", directory / "differences.jsonl"]
    assert sorted(line["problem"] for line in lines) == sorted(
        f"{f}:{i}" for f in files for i in range(1, NUM_PROBLEMS + 1)
    )
    assert all(len(line["responses"]) == N for line in lines)
    each = [response for line in lines for response in line["responses"]]
    assert all(1 <= one["num_tokens"] <= MAX_NEW_TOKENS for one in each)
    assert all(one["num_tokens"] == MAX_NEW_TOKENS for one in each if one["truncated"])
    # Truncated is what the model did not end itself, and no other.
    assert all(one["truncated"] != one["text"].endswith("<eos>") for one in each)
    assert {one["truncated"] for one in each} == {True, False}
    for line in lines:
        for one in line["responses"]:
            expected = None if line["label"] == UNGRADED_LABEL else sum(c in "13579" for c in one["text"]) / 8
            assert one["reward"] == expected

    # No two samples are copies: within a problem, between problems with the same prompt, engines and parts.
    together = Counter((line["prompt"], tuple(one["text"] for one in line["responses"])) for line in lines)
    assert len(together) > 0.9 * len(lines)
    assert fmean(len({one["text"] for one in line["responses"]}) for line in lines) > 0.8 * N
    log = (directory / "out" / "engines.log").read_text()
    assert set(re.findall(r"LLM engine .*\bdtype=torch\.(\w+)", log)) == {"float32"}  # on a CPU
    seeds = re.findall(r"LLM engine .*\bseed=(\d+)", log)
    assert len(seeds) == 3 and len(set(seeds)) == 3

    # The metrics are those of the responses.
    results = json.loads((directory / "out" / "results.json").read_text())
    assert results["problems"] == lines
    assert results["config"]["temperature"] == 1.0 and results["versions"]["vllm"]
    names = [field.name for field in fields(GradedResponse)]
    by_dataset = {"additions": [], "differences": []}
    for line in lines:
        by_dataset[line["dataset"]].append([GradedResponse(*map(one.get, names)) for one in line["responses"]])
    num_ungraded = N * sum(line["label"] == UNGRADED_LABEL for line in lines)
    metrics = evaluation_metrics(by_dataset, [1, 2, 4], seed=0)
    for dataset, ungraded in (("additions", num_ungraded), ("differences", 0)):
        found = results["datasets"][dataset]
        assert (found["num_problems"], found["num_responses"]) == (NUM_PROBLEMS, NUM_PROBLEMS * N)
        assert found["num_ungraded"] == ungraded
        means = {name: metric["mean"] for name, metric in found["metrics"].items()}
        assert means == pytest.approx({name: estimate.mean for name, estimate in metrics[dataset].items()})
        row = rf"^{dataset} +{NUM_PROBLEMS} +{means['avg@4']:.3f} \[0\.\d+, 0\.\d+\] "
        assert re.search(row, output, re.MULTILINE)
    macro = results["macro_average"]["avg@4"]["mean"]
    assert macro == pytest.approx(metrics["macro average"]["avg@4"].mean)
    assert re.search(rf"^macro average +{len(lines)} +{macro:.3f} ", output, re.MULTILINE)
    assert f"{num_ungraded} of {len(each)} responses are UNGRADED" in output and num_ungraded > 0
    # The bar counts the first part too.
    mean = sum(one["reward"] or 0.0 for one in each) / len(each)
    assert re.search(rf"100%.* {len(lines)}/{len(lines)} \[.* problems.*, mean reward {mean:.3f}\]", output)

    # Once more, with every response graded: nothing is left to generate.
    shutil.copytree(directory / "out", directory / "graded")
    graded = responses.read_text().replace('"reward": null', '"reward": 0.0')
    (directory / "graded" / "responses.jsonl").write_text(graded)
    assert call(flags(directory, out=directory / "graded", pass_at=[3])) == 0
    said = capsys.readouterr()
    assert "pass@3" in said.out and "pass@4" not in said.out
    assert "starting engines" not in said.err and "UNGRADED" not in said.err


@given(st.integers(0, 2**31), st.lists(st.integers(0, 10**5), min_size=2, max_size=2, unique=True))
def test_a_resumed_run_has_a_seed_of_its_own(seed, num_finished):
    first, second = (evaluation.engine_seed(seed, number) for number in num_finished)
    assert first != second and 0 <= first < 2**31


@pytest.mark.parametrize(
    ("apply_chat_template", "input_template", "first"),
    [(False, None, "0-0="), (True, None, "0-0=+1="), (False, "1+{}", "1+0-0=")],
    ids=["as they are", "chat template", "input template"],
)
def test_prompts_are_those_of_openrlhfs_dataset_and_the_chat_template_is_on_where_there_is_one(
    directory, tmp_path, apply_chat_template, input_template, first
):
    from datasets import load_dataset
    from openrlhf.datasets.prompts_dataset import PromptDataset
    from openrlhf.utils.utils import get_tokenizer

    model = tmp_path / "model"
    shutil.copytree(directory / "model", model)
    if apply_chat_template or input_template:
        template = "{% for m in messages %}{{ m.content }}+1{% endfor %}{% if add_generation_prompt %}={% endif %}"
        (model / "chat_template.jinja").write_text(template)
    file = str(directory / "differences.jsonl")
    problems = evaluation.read_problems([file], "input", "label", None)
    prompts = evaluation.make_prompts(problems, str(model), "input", "label", input_template=input_template)

    data = Namespace(input_key="input", label_key="label", apply_chat_template=apply_chat_template)
    strategy = Namespace(args=Namespace(data=data), is_rank_0=lambda: False)
    rows = load_dataset("json", data_files=file)["train"]
    upstream = PromptDataset(rows, get_tokenizer(str(model), None), strategy, input_template=input_template)
    assert list(prompts.texts.values()) == upstream.prompts
    assert [problem.row["label"] for problem in problems] == upstream.labels
    assert prompts.apply_chat_template == apply_chat_template
    assert upstream.prompts[0] == first
    # The model has 128 positions.
    assert (prompts.max_model_len, prompts.max_new_tokens) == (128, 128 - len(upstream.prompts[0]))


WRONG_FLAGS = [
    ({"n": 0}, "--n 0: "),
    ({"pass_at": [1, 5]}, "--pass_at 5: allowed: from 1 to --n 4"),
    ({"temperature": 0.005}, "--temperature 0.005: allowed: 0, or from 0.01 to 2"),
    ({"top_p": 0}, "--top_p 0.0: "),
    ({"max_problems": 0}, "--max_problems 0: "),
    ({"reward": "missing.py"}, "--reward missing.py: no such file; allowed: "),
    ({"reward": "broken.py"}, "--reward broken.py: cannot be loaded (SyntaxError"),
    ({"data": ["missing.jsonl"]}, "--data missing.jsonl: "),
    ({"data": ["sums.jsonl", "./sums.jsonl"]}, "is given twice"),
    ({"input_key": "question"}, "line 1 has no key 'question'; allowed for --input_key: one of input, label"),
    ({"model": "/missing"}, "--model /missing: "),
    ({"max_new_tokens": 125}, "--max_new_tokens 125: allowed beside the longest prompt's 4 tokens, in the model's 128"),
    ({"out": "/dev/null"}, "--out /dev/null: "),
    ({"apply_chat_template": []}, "--apply_chat_template: the tokenizer has none"),
    ({"num_engines": 1000} if torch.cuda.is_available() else {"tensor_parallel_size": 2}, "allowed"),
]


@pytest.mark.parametrize("overrides, message", WRONG_FLAGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_ends_in_one_line_before_anything_is_written(
    directory, tmp_path, monkeypatch, capsys, overrides, message
):
    monkeypatch.chdir(directory)
    assert_refused(flags(directory, **{"out": tmp_path / "new"} | overrides), message, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no problem"),
        ('{"input": "1+1=", "label": "2"}\n\n{"input": "1+1="}\n', "line 3 has no key 'label'"),
        (json.dumps({"input": "1" * 128, "label": "2"}), "has 128 tokens; allowed: fewer than the model's 128"),
        ('{"input": ["1+1="], "label": "2"}\n', "'input' is a list; allowed without chat template: a string"),
    ],
)
def test_a_mistake_in_the_data_is_named_with_its_line(directory, tmp_path, capsys, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    assert_refused(flags(directory, data=[file], max_new_tokens=None), message, capsys)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"temperature": 0.6}, "--temperature 0.6: OUT holds an evaluation with --temperature 1.0"),
        ({"n": 8}, "--n 8: OUT holds an evaluation with --n 4"),
        ({"max_new_tokens": None}, "--max_new_tokens 124: OUT holds an evaluation with --max_new_tokens 24"),
    ],
)
def test_a_resume_with_another_setting_is_refused_with_both_values(directory, tmp_path, capsys, overrides, message):
    out = begin(directory, tmp_path)
    assert_refused(flags(directory, **{"out": out} | overrides), message.replace("OUT", str(out)), capsys)


@pytest.mark.parametrize(
    "changed, flag", [("model/config.json", "model"), ("sums.jsonl", "data"), ("reward.py", "reward")]
)
def test_a_resume_with_changed_files_is_refused(directory, tmp_path, capsys, changed, flag):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    out = begin(copy, tmp_path)
    (copy / changed).write_text((copy / changed).read_text() + "\n")
    assert_refused(flags(copy, out=out), f"--{flag} ", capsys)


def test_a_reward_file_may_start_threads_and_processes_and_print(tmp_path):
    (tmp_path / "reward.py").write_text(
        f"import pathlib, subprocess, sys, threading, time\nPATIENCE = {pipeline.PATIENCE}\n"
        "print('hello'); print('hello', file=sys.stderr)\n"
        "threading.Thread(target=time.sleep, args=[PATIENCE]).start()\n"
        "child = subprocess.Popen(['sleep', str(PATIENCE)])\n"
        "pathlib.Path(__file__).with_name('child').write_text(str(child.pid))\n"
        "def reward_func(queries, prompts, labels): ...\n"
    )
    with loading("--reward", str(tmp_path / "reward.py"), "reward_func"):
        pass
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    while child.exists() and child.read_text().split()[2] != "Z":  # what it has started ends with it
        time.sleep(0.1)


HOLDER = f"""
import json, os, sys, time
from openrlhf_bapo.evaluation import EvaluationRecord
record = EvaluationRecord(sys.argv[1], {{}})
child = os.fork()
if child:
    print(child, flush=True)
time.sleep({pipeline.PATIENCE})
"""


def test_only_one_process_evaluates_into_a_folder_and_its_kill_lets_the_next_one(tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLDER, out], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())  # goes on when its parent is killed
        try:
            with pytest.raises(evaluation.FlagError, match=f"--out {out}: another process is evaluating into it"):
                evaluation.EvaluationRecord(str(out), {})
        finally:
            holder.kill()
            holder.wait()
            try:
                evaluation.EvaluationRecord(str(out), {})
                os.kill(child, 0)  # it was there all the time
            finally:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("content", ['{"model": "a"', "", "[]", "\0" * 30, "\xff"])
def test_a_damaged_config_is_one_line(tmp_path, content):
    config = evaluation.EvaluationRecord(str(tmp_path), {"n": N}).out / "config.json"
    config.write_text(content, encoding="latin1")
    with pytest.raises(evaluation.FlagError) as refused:
        evaluation.EvaluationRecord(str(tmp_path), {"n": N})
    assert f"--out {tmp_path}: {config} is damaged (" in str(refused.value) and "\n" not in str(refused.value)
    assert config.read_text(encoding="latin1") == content


GOOD_RESPONSE = {"text": "4", "num_tokens": 1, "truncated": False, "reward": 1.0, "answer": "4"}


def a_line(problem: str) -> str:
    return json.dumps(
        {"problem": problem, "dataset": "a", "prompt": "", "label": "4", "responses": [GOOD_RESPONSE] * N}
    )


@pytest.mark.parametrize(
    "damaged", [a_line("b")[:40], "", "\0" * 30, "[]", "{}", '{"problem": "b", "responses": [{}]}', a_line("a")]
)
def test_a_damaged_line_is_named_with_what_to_do_and_that_helps(tmp_path, damaged):
    record = evaluation.EvaluationRecord(str(tmp_path), {"n": N})
    content = f"{a_line('a')}\n{damaged}\n{a_line('c')}\n"
    record.responses_file.write_text(content)
    with pytest.raises(evaluation.FlagError) as refused:
        evaluation.EvaluationRecord(str(tmp_path), {"n": N})
    assert f"--out {tmp_path}: line 2 of {record.responses_file} is damaged (" in str(refused.value)
    assert "\n" not in str(refused.value) and record.responses_file.read_text() == content
    to_do = re.search(r"\((sed -i 2d .*)\)$", str(refused.value))[1]
    subprocess.run(to_do.split(), check=True)
    assert evaluation.EvaluationRecord(str(tmp_path), {"n": N}).finished.keys() == {"a", "c"}


def test_responses_that_no_config_describes_are_not_adopted(directory, tmp_path, capsys):
    out = begin(directory, tmp_path)
    (out / "responses.jsonl").write_text(a_line("a") + "\n")
    (out / "config.json").unlink()
    assert_refused(flags(directory, out=out), f"--out {out}: has responses.jsonl but not the config.json", capsys)
    assert not (out / "config.json").exists()


def test_the_table_has_every_metric_under_its_name():
    def problem(num_right: int, num_truncated: int, length: int) -> list[GradedResponse]:
        return [GradedResponse(float(i < num_right), str(i), i < num_truncated, length + i) for i in range(4)]

    datasets = {"sums": [problem(1, 1, 10), problem(4, 0, 20)], "roots": [problem(3, 3, 30)]}
    metrics = evaluation_metrics(datasets, [1, 2], seed=0)
    header, *rows = (
        re.split("  +", line.strip()) for line in evaluate.table(metrics, {"sums": 2, "roots": 1}).split("\n")
    )
    assert header == [
        "dataset", "problems", "avg@4 [95%]", "pass@1", "pass@2", "majority@4", "truncated", "mean length"
    ]  # fmt: skip
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert [(row["problems"], row["truncated"], row["mean length"]) for row in found.values()] == [
        ("2", "0.125", "16.5"),
        ("1", "0.750", "31.5"),
        ("3", "0.438", "24.0"),
    ]
    for dataset, row in found.items():
        estimates = metrics[dataset]
        first = estimates["avg@4"]
        assert row["avg@4 [95%]"] == f"{first.mean:.3f} [{first.low:.3f}, {first.high:.3f}]"
        for name in ("pass@1", "pass@2", "majority@4"):
            assert row[name] == f"{estimates[name].mean:.3f}"


def begin(directory: Path, tmp_path: Path) -> Path:
    """The folder of an evaluation that was killed before its first problem was finished."""
    files = [str(directory / name) for name in ("sums.jsonl", "differences.jsonl")]
    settings = evaluation.content_settings(str(directory / "model"), files, [str(directory / "reward.py")])
    settings |= {"input_key": "input", "label_key": "label", "max_problems": None, "n": N, "temperature": 1.0}
    settings |= {"top_p": 1.0, "seed": 0, "apply_chat_template": False, "max_new_tokens": MAX_NEW_TOKENS}
    return evaluation.EvaluationRecord(str(tmp_path / "out"), settings).out


def assert_refused(argv: list[str], message: str, capsys) -> None:
    assert call(argv) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def test_every_problem_is_asked_for_once_with_its_label_and_the_sampling_of_the_flags(monkeypatch):
    asked = []

    class Engine:
        """Stands for an engine's Ray actor, and Ray for itself: it notes what it is asked for."""

        class generate_responses:
            @staticmethod
            def remote(**arguments) -> int:
                asked.append(arguments)
                return len(asked)

    ray = Namespace(put=lambda value: value, get=lambda number: number, wait=lambda numbers: (numbers[:1], numbers[1:]))
    monkeypatch.setitem(sys.modules, "ray", ray)
    problems = [evaluation.Problem(f"file:{n}", "sums", {"label": str(n)}) for n in range(40)]
    texts = {problem.key: f"prompt {problem.key}" for problem in problems}
    prompts = evaluation.Prompts("tokenizer", texts, False, max_new_tokens=7, max_model_len=9)
    found = list(evaluation.generate([Engine, Engine], problems, prompts, "label", n=16, temperature=0.6, top_p=0.9))
    assert sorted(problem.key for problem, _ in found) == sorted(texts)
    assert {(each["prompt"], each["label"]) for each in asked} == {
        (texts[problem.key], problem.row["label"]) for problem in problems
    }
    for each in asked:
        sampling = each["sampling_params"]
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 7)
        assert (each["num_samples"], each["max_length"], each["hf_tokenizer"]) == (16, 9, "tokenizer")
