"""Public mathematics datasets become prompts that OpenRLHF reads, and every row that is left out is reported."""

import ast
import csv
import json
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline import make_model

from openrlhf_bapo.cli import data
from openrlhf_bapo.math_tasks import data as math_data
from openrlhf_bapo.math_tasks.answers import last_boxed
from openrlhf_bapo.math_tasks.data import (
    DATASETS,
    PROMPT_SUFFIX,
    UnusableRow,
    WrongDataset,
    read_problems,
)

# Rows as they are published, chosen among all of them; problems and solutions cut short.
EXCERPTS = Path(__file__).parents[1] / "data"
EXCERPTS_OF = {
    "aime24": ["rows_aime24.jsonl"],
    "amc23": ["rows_amc23.jsonl"],
    "minerva": ["rows_minerva.jsonl"],
    "olympiadbench": ["rows_olympiadbench.jsonl"],
    "gsm8k": ["rows_gsm8k_train.jsonl", "rows_gsm8k_test.jsonl"],
}

# Rows in the form in which these datasets are published, with other problems.
CHAT = [{"content": "Find $2+2$.", "role": "user"}]
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind $2+2$.\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
PUBLISHED_FORMS = {
    "skywork-or1": {
        "data_source": "train-math-deepscaler",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"ground_truth": '["4"]', "style": "rule"},
        "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
    },
    "dapo-math": {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_PROMPT, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    },
    "aime25": {"problem": "Find $2+2$.", "answer": "4", "id": "0"},
    "math500": {
        "problem": "Find $2+2$.",
        "solution": "It is $\\boxed{4}$.",
        "answer": "4",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
}


def write_rows(path, rows: list[dict]):
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def convert(tmp_path, name: str, source, *flags: str) -> list[dict]:
    out = tmp_path / "out.jsonl"
    data.main([name, str(out), "--source", str(source), *flags])
    return [json.loads(line) for line in out.read_text().splitlines()]


def mistake(capsys, *argv) -> str:
    """Return the one line that a user's mistake prints."""
    with pytest.raises(SystemExit) as ended:
        data.main([str(argument) for argument in argv])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and error.startswith("openrlhf-bapo: ")
    return error


def labels(rows: list[dict], name: str = "math500") -> list[str]:
    return [label for _, label in read_problems(rows, DATASETS[name]).usable]


def reasons(rows: list[dict], name: str = "math500") -> dict[str, list[str]]:
    return read_problems(rows, DATASETS[name]).left_out


_balanced = st.recursive(
    st.text(alphabet="ab1+", max_size=4) | st.just("\\{1\\}"),
    lambda inner: st.tuples(inner, inner, inner).map(lambda three: f"{three[0]}{{{three[1]}}}{three[2]}"),
)


@given(_balanced, st.lists(_balanced, max_size=2), st.sampled_from(["", ".", "$ km}", " {or so"]))
def test_a_boxed_answer_with_nested_braces_is_extracted_whole(answer, earlier, after):
    before = "".join(f"first \\boxed{{{text}}}, then " for text in earlier)
    assert last_boxed(f"{before}\\boxed{{{answer}}}{after}") == answer


@pytest.mark.parametrize("solution", ["4", "4}", "{4}", "\\boxed{}", "\\boxed{\\frac{1}{2}", "\\boxed{4\\}"])
def test_a_solution_without_a_whole_box_has_no_answer(solution):
    with pytest.raises(UnusableRow, match="no balanced"):
        math_data._answer_text("solution", solution)


_values = st.sampled_from(
    [
        *(None, "", "4", "$5$.", 4.0, 7, True, "$nan$", "1/2", "x=2\ny=3"),
        *(["4"], ["4", "5"], [], '["4"]', "proof", "\\boxed{4}", "['4']"),
    ]
)
_rows = st.lists(
    st.fixed_dictionaries(
        {
            "problem": st.sampled_from(
                [None, " ", "Find $x$.", "Find  $x$. ", "Find $y$.", "See <image>", CHAT, CHAT * 2]
            )
        },
        optional={
            "answer": _values,
            "Solution": _values,
            "reward_model": _values,
            "image": st.sampled_from([None, "x"]),
            "url": st.sampled_from([None, "https://host/2024_AIME_I_Problems", "https://host/2023_AMC_12A"]),
        },
    ),
    max_size=12,
)


SOURCE = ast.parse(Path(math_data.__file__).read_text())
WRITTEN = {node.value for node in ast.walk(SOURCE) if isinstance(node, ast.Constant)}


@given(_rows, st.sampled_from(sorted(DATASETS)))
def test_every_row_is_either_written_or_named_with_a_reason(rows, name):
    rows = [{"answer": None} | row for row in rows]
    problems = read_problems(rows, DATASETS[name])
    named = [row for names in problems.left_out.values() for row in names]
    assert problems.num_rows == len(rows) == len(problems.usable) + len(named)
    assert len(named) == len(set(named)) and set(named) <= {f"row {number + 1}" for number in range(len(rows))}
    assert all(problem.strip() and label.strip() for problem, label in problems.usable)
    assert problems.left_out.keys() <= WRITTEN | {math_data.OTHER_DATASET + other for other in DATASETS}


@given(_rows, st.sampled_from(sorted(DATASETS)))
def test_written_prompts_are_read_back_unchanged(rows, name):
    once = read_problems([{"answer": None} | row for row in rows], DATASETS[name])
    again = read_problems(({"problem": problem, "answer": label} for problem, label in once.usable), DATASETS[name])
    assert again.usable == once.usable and not again.left_out


@pytest.mark.parametrize(
    "name, file, num_rows, first_label, left_out",
    [
        ("aime24", "rows_aime24.jsonl", 30, "204", {}),
        ("amc23", "rows_amc23.jsonl", 40, "27", {}),
        ("minerva", "rows_minerva.jsonl", 56, "1.6", {}),
        ("olympiadbench", "rows_olympiadbench.jsonl", 76, "2", {"answer in words": ["row 10 (id 1965)"]}),
        ("gsm8k", "rows_gsm8k_train.jsonl", 54, "72", {}),
        ("gsm8k", "rows_gsm8k_test.jsonl", 35, "18", {}),
    ],
)
def test_published_rows_become_prompts(tmp_path, capsys, name, file, num_rows, first_label, left_out):
    lines = convert(tmp_path, name, EXCERPTS / file)
    said = capsys.readouterr()
    assert len(lines) == num_rows - sum(map(len, left_out.values()))
    assert lines[0]["label"] == first_label
    for line in lines:
        assert line.keys() == {"input", "label", "datasource"} and line["datasource"] == name
        assert line["label"].strip() and "$" not in line["label"].replace("\\$", "")
        assert line["input"].removesuffix("\n" + PROMPT_SUFFIX).strip() not in ("", line["input"])
    if name == "gsm8k":
        assert all(re.fullmatch(r"-?\d+", line["label"]) for line in lines)
    assert f"{num_rows} rows read" in said.out and f"{len(lines)} written" in said.out
    for reason, rows in left_out.items():
        assert f"left out: {len(rows)} {reason} ({', '.join(rows)})\n" in said.out
    assert said.err == "".join(f"left out: {row}: {reason}\n" for reason, rows in left_out.items() for row in rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", sorted(PUBLISHED_FORMS))
def test_a_row_as_published_becomes_a_bare_problem_and_answer(tmp_path, name, suffix):
    source = write_rows(tmp_path / f"rows{suffix}", [PUBLISHED_FORMS[name]])
    expected = {"input": f"Find $2+2$.\n{PROMPT_SUFFIX}", "label": "4", "datasource": name}
    assert convert(tmp_path, name, source) == [expected]


def test_every_dataset_has_a_tested_form():
    assert set(DATASETS) == set(EXCERPTS_OF) | set(PUBLISHED_FORMS)


def published_rows(name: str) -> list[dict]:
    files = [EXCERPTS / file for file in EXCERPTS_OF.get(name, [])]
    return [json.loads(line) for file in files for line in open(file)] or [PUBLISHED_FORMS[name]]


# AIME 2025 has the keys problem, answer and id, which any dataset could have.
@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"aime25"}))
def test_rows_of_one_dataset_are_left_out_of_every_other(name):
    rows = published_rows(name)
    for other in set(DATASETS) - {name}:
        (left_out,) = (problems := read_problems(rows, DATASETS[other])).left_out.items()
        assert not problems.usable and left_out[0] == f"row of {name}" and len(left_out[1]) == len(rows)
    assert not any(reason.startswith("row of") for reason in reasons(rows, name))


def test_a_file_of_another_dataset_is_refused_and_out_is_left_as_it_was(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    said = mistake(capsys, "aime24", out, "--source", EXCERPTS / "rows_gsm8k_test.jsonl")
    assert "none of 35 rows can be used as aime24: 35 row of gsm8k (row 1, " in said
    assert out.read_text() == "mine\n"


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"gsm8k", "olympiadbench"}))
@pytest.mark.parametrize("text", ["x=2\ny=3", "First we find that x is 2, and then that the answer is 4"])
def test_a_worked_solution_is_not_a_label(name, text):
    rows = [{"problem": "Find $x$.", "answer": text}]
    assert reasons(rows, name) == {"worked solution in place of an answer": ["row 1"]}


def test_the_label_of_a_worked_solution_is_the_content_of_its_box():
    text = "Two and two make four.\nSo it is $\\boxed{\\frac{8}{2}}$."
    assert labels([{"problem": "Find $x$.", "answer": text}]) == ["\\frac{8}{2}"]


def test_a_matrix_in_several_lines_is_an_answer():
    matrix = "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"
    assert labels([{"problem": "Find $x$.", "answer": matrix}]) == [matrix]


@pytest.mark.parametrize(
    "name, possible, impossible",
    [
        ("aime24", ["0", "007", "999", 30.0], ["1000", "-1", "1/2", "0.5", "x"]),
        ("aime25", ["0", "007", "999", 30.0], ["1000", "-1", "1/2", "0.5", "x"]),
        ("amc23", ["3159", "-1", 30.0], ["1/2", "0.5", "x"]),
        ("dapo-math", ["3159", "-1", "30"], ["1/2", "0.5", "x"]),
        ("gsm8k", ["#### 3,159", "#### -1", "0.5"], ["#### 5 dollars", "#### x"]),
    ],
)
def test_an_answer_that_the_dataset_cannot_have_is_left_out(name, possible, impossible):
    rows = [{"problem": f"Find $x_{i}$.", "answer": answer} for i, answer in enumerate([*possible, *impossible])]
    problems = read_problems(rows, DATASETS[name])
    assert len(problems.usable) == len(possible)
    names = [f"row {i + 1}" for i in range(len(possible), len(rows))]
    assert problems.left_out == {"answer that the dataset cannot have": names}


@pytest.mark.parametrize("name", sorted(name for name, dataset in DATASETS.items() if dataset.num_problems))
def test_more_problems_than_the_dataset_has_are_refused(name):
    num_problems = DATASETS[name].num_problems
    rows = [{"problem": f"Find $x_{{{i}}}$.", "answer": "4"} for i in range(num_problems)]
    assert len(read_problems(rows * 2, DATASETS[name]).usable) == num_problems
    with pytest.raises(WrongDataset, match=f"has {num_problems + 1} different problems; allowed: up to"):
        read_problems([*rows, {"problem": "Find $y$.", "answer": "4"}], DATASETS[name])


def test_a_file_with_too_many_problems_is_refused_in_one_line(tmp_path, capsys):
    rows = [{"problem": f"Find $x_{{{i}}}$.", "answer": "4"} for i in range(31)]
    said = mistake(capsys, "aime25", tmp_path / "out.jsonl", "--source", write_rows(tmp_path / "rows.jsonl", rows))
    assert "has 31 different problems; allowed: up to the 30 of math-ai/aime25" in said


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), True, False, "inf", "$-inf$", "NaN", "None", "null."])
def test_a_label_that_is_not_a_value_is_left_out(tmp_path, capsys, value, suffix):
    rows = [{"problem": "Find $x$.", "answer": value}]
    said = mistake(capsys, "math500", tmp_path / "out.jsonl", "--source", write_rows(tmp_path / f"rows{suffix}", rows))
    assert "1 answer that is not a value (inf, nan, true, false, none or null) (row 1)" in said


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_changes_nothing(tmp_path, suffix):
    source = write_rows(tmp_path / f"rows{suffix}", [{"problem": "Find $x$.", "answer": "4"}] * 2)
    without = convert(tmp_path, "math500", source)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    assert convert(tmp_path, "math500", source) == without != []


@pytest.mark.parametrize("out", ["rows.jsonl", "./folder/../rows.jsonl", "symlink.jsonl", "link.jsonl", "absolute"])
def test_the_source_is_not_overwritten_whatever_it_is_called(tmp_path, capsys, monkeypatch, out):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    (tmp_path / "symlink.jsonl").symlink_to(source)
    (tmp_path / "link.jsonl").hardlink_to(source)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    out = str(source) if out == "absolute" else out
    before = source.read_bytes()
    said = mistake(capsys, "aime25", out, "--source", "rows.jsonl")
    assert "OUT.jsonl" in said and "is --source rows.jsonl" in said and "allowed: another file" in said
    assert source.read_bytes() == before and (tmp_path / "symlink.jsonl").is_symlink()


@pytest.mark.parametrize("out", ["", ".", "..", "/"])
def test_an_out_that_is_not_a_file_name_is_refused_in_one_line(tmp_path, capsys, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    said = mistake(capsys, "aime25", out, "--source", source)
    assert "is a directory; allowed: a file's path" in said
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


DEEP = 100_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("depth", [600, 900, DEEP])
def test_deep_nesting_is_refused_in_one_line(tmp_path, capsys, name, depth):
    row = '{"problem": "Find $x$.", "answer": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / name).write_text(f"[{row}]" if name == "rows.json" else f"{row}\n")
    said = mistake(capsys, "aime25", tmp_path / "out.jsonl", "--source", tmp_path / name)
    assert f"--source {tmp_path / name}: " in said
    # Rows that the parser can still read are left out like other unusable rows.
    assert "1 list or dict written as text (row 1)" in said or (depth == DEEP and "cannot be read" in said)
    assert depth < DEEP or name == "rows.json" or "line 1 is not JSON" in said


@pytest.mark.parametrize("answer", ["[" * DEEP, "[" * DEEP + "]" * DEEP])
def test_an_answer_nested_deeply_in_its_text_is_left_out(answer):
    rows = [{"problem": "Find $x$.", "answer": answer}, {"problem": "Find $y$.", "answer": "4"}]
    assert labels(rows) == ["4"]
    assert reasons(rows) == {"list or dict written as text": ["row 1"]}


def test_csv_gives_the_same_as_json(tmp_path):
    rows = [{"problem": 'Say "2",\nthen', "answer": "027"}, {"problem": "and this", "answer": 27.0}]
    csv_file, json_file = (write_rows(tmp_path / f"rows{suffix}", rows) for suffix in (".csv", ".json"))
    csv_file.write_bytes(b"\xef\xbb\xbf" + csv_file.read_bytes())  # as spreadsheets write it
    by_suffix = [convert(tmp_path, "amc23", source) for source in (csv_file, json_file)]
    assert by_suffix[0] == by_suffix[1]
    assert [line["label"] for line in by_suffix[0]] == ["27", "27"]


def test_a_nested_value_that_csv_turned_into_text_is_left_out(tmp_path, capsys):
    row = {"prompt": CHAT, "reward_model": {"ground_truth": '["4"]'}}
    source = write_rows(tmp_path / "rows.csv", [row, {"prompt": "Find $x$.", "reward_model": {"ground_truth": "4"}}])
    assert "2 list or dict written as text (row 1, row 2)" in mistake(
        capsys, "skywork-or1", tmp_path / "out.jsonl", "--source", source
    )


def test_a_directory_made_by_save_to_disk_is_read(tmp_path, capsys):
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list([PUBLISHED_FORMS["skywork-or1"]])
    dataset.save_to_disk(tmp_path / "one")
    code = Dataset.from_list([{"prompt": CHAT, "reward_model": {"ground_truth": "5"}}])
    DatasetDict({"code": code, "math": dataset}).save_to_disk(tmp_path / "two")
    for directory in ("one", "two"):
        assert [line["label"] for line in convert(tmp_path, "skywork-or1", tmp_path / directory)] == ["4"]
    assert [line["label"] for line in convert(tmp_path, "skywork-or1", tmp_path / "two", "--split", "code")] == ["5"]
    capsys.readouterr()  # save_to_disk shows its progress
    said = mistake(capsys, "skywork-or1", tmp_path / "new.jsonl", "--source", tmp_path / "two", "--split", "train")
    assert "--split train" in said and "allowed: code, math" in said


def copy_of_hub_repository(directory):
    for config, split, answer in (("main", "train", 1), ("main", "test", 2), ("socratic", "train", 3)):
        (directory / config).mkdir(parents=True, exist_ok=True)
        row = {"question": "Find $x$.", "answer": f"So it is #### {answer}"}
        write_rows(directory / config / f"{split}-00000-of-00001.parquet", [row])
    return directory


def test_only_the_configuration_and_the_split_of_a_copied_repository_are_read(tmp_path, capsys):
    source = copy_of_hub_repository(tmp_path / "gsm8k")
    assert [line["label"] for line in convert(tmp_path, "gsm8k", source)] == ["1"]
    assert [line["label"] for line in convert(tmp_path, "gsm8k", source, "--split", "test")] == ["2"]
    said = mistake(capsys, "gsm8k", tmp_path / "new.jsonl", "--source", source, "--split", "dev")
    assert "--split dev" in said and "allowed: test, train" in said


@pytest.mark.parametrize(
    "names", [["rows.parquet"], ["0000.parquet", "0001.parquet"], ["train/0000.parquet", "test/0.parquet"]]
)
def test_parquet_files_are_distinguished_by_their_name_or_their_folder(tmp_path, names):
    for number, name in enumerate(names):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / "rows" / name, [{"question": f"Find $x_{number}$.", "answer": str(number)}])
    found = [line["label"] for line in convert(tmp_path, "gsm8k", tmp_path / "rows")]
    assert found == (["0"] if "train/0000.parquet" in names else [str(number) for number in range(len(names))])


def test_without_a_source_the_hubs_dataset_is_loaded(tmp_path, monkeypatch, capsys):
    import datasets

    # load_dataset also takes a directory, so this tests everything except the network.
    repository = copy_of_hub_repository(tmp_path / "hub") / "main"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(DATASETS, "gsm8k", replace(DATASETS["gsm8k"], repository=str(repository), config=None))
    out = tmp_path / "out.jsonl"
    data.main(["gsm8k", str(out), "--split", "test"])
    assert json.loads(out.read_text())["label"] == "2"
    assert f"the hub's {repository}, split test" in capsys.readouterr().out
    assert "--split dev" in mistake(capsys, "gsm8k", out, "--split", "dev")


def test_without_a_hub_one_line_says_what_to_give_instead(tmp_path, monkeypatch, capsys):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as the environment variable sets it
    said = mistake(capsys, "gsm8k", tmp_path / "out.jsonl")
    assert "--source with a local copy of the hub's openai/gsm8k, configuration main, split train" in said


def test_the_module_is_a_command():
    command = [sys.executable, "-m", "openrlhf_bapo.cli.data", "aime99", "out.jsonl"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and "aime99" in run.stderr


def test_equal_rows_are_written_once_and_counted():
    row = PUBLISHED_FORMS["dapo-math"]
    problems = read_problems([row] * 100, DATASETS["dapo-math"])
    assert problems.usable == [("Find $2+2$.", "4")]
    assert problems.left_out == {"duplicate of an earlier row": [f"row {number}" for number in range(2, 101)]}


@pytest.mark.parametrize("end", [".", ""])
def test_the_instruction_around_a_dapo_problem_is_removed_with_and_without_its_full_stop(end):
    row = PUBLISHED_FORMS["dapo-math"] | {"prompt": DAPO_PROMPT.removesuffix(".") + end}
    assert read_problems([row], DATASETS["dapo-math"]).usable == [("Find $2+2$.", "4")]


@pytest.mark.parametrize("problem", ["Find $x$.", "Is $x<i$ in the image of $f$?"])
def test_a_problem_without_an_image_and_an_instruction_is_written_unchanged(problem):
    for name in ("math500", "dapo-math"):
        assert read_problems([{"problem": problem, "answer": "4"}], DATASETS[name]).usable == [(problem, "4")]


def test_problems_that_differ_only_in_white_space_are_the_same():
    rows = [{"problem": problem, "answer": "4"} for problem in ("Find $x$.", "Find\n $x$. ", "Find $y$.")]
    assert reasons(rows) == {"duplicate of an earlier row": ["row 2"]}


def test_duplicates_are_counted_but_not_listed_one_by_one(tmp_path, capsys):
    convert(tmp_path, "aime25", write_rows(tmp_path / "rows.jsonl", [{"problem": "Find $x$.", "answer": "4"}] * 10))
    said = capsys.readouterr()
    assert "left out: 9 duplicate of an earlier row (row 2, row 3, row 4, row 5, row 6, ...)\n" in said.out
    assert said.err == ""


def test_a_problem_with_two_answers_is_left_out():
    rows = [{"problem": "Find $x$.", "answer": answer} for answer in "455"] + [{"problem": "Find $y$.", "answer": "6"}]
    assert labels(rows) == ["6"]
    assert reasons(rows) == {"same problem with another answer": ["row 2", "row 3", "row 1"]}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"problem": None, "answer": "4"}, "no problem text"),
        ({"problem": CHAT + CHAT, "answer": "4"}, "chat that is not one user message"),
        ({"problem": [{"role": "system", "content": "Hi"}], "answer": "4"}, "chat that is not one user message"),
        ({"problem": "In ![](figure.png), find $x$.", "answer": "4"}, "needs an image"),
        ({"problem": "In ![the figure](figure.png), find $x$.", "answer": "4"}, "needs an image"),
        ({"problem": "See <image>. Find $x$.", "answer": "4"}, "needs an image"),
        ({"problem": "See <image_1>. Find $x$.", "answer": "4"}, "needs an image"),
        ({"problem": 'See <img src="figure.png">. Find $x$.', "answer": "4"}, "needs an image"),
        ({"problem": "See \\includegraphics{figure}. Find $x$.", "answer": "4"}, "needs an image"),
        ({"problem": "Find $x$.", "answer": "4", "Images": ["..."]}, "needs an image"),
        ({"problem": "Find $x$.", "answer": "4", "image_1": {"bytes": "..."}}, "needs an image"),
        ({"problem": "Find $x$.", "answer": None}, "no answer"),
        ({"problem": "Find $x$.", "answer": float("nan")}, "no answer"),
        ({"problem": "Find $x$.", "final_answer": []}, "no answer"),
        ({"problem": "Find $x$.", "reward_model": {"ground_truth": '[""]'}}, "no answer"),
        ({"problem": "Show it.", "answer": "Proof"}, "asks for a proof"),
        ({"problem": "Find $x$.", "reward_model": {"ground_truth": '["4", "5"]'}}, "list of several answers"),
        ({"problem": "Show it.", "final_answer": None, "solution": ["As"]}, "no answer, and no balanced \\boxed{}"),
    ],
)
def test_a_row_that_cannot_be_checked_is_left_out_with_its_reason(row, reason):
    ((found, names),) = reasons([row | {"id": 17}]).items()
    assert found.startswith(reason) and names == ["row 1 (id 17)"]


def test_an_answer_is_written_without_dollar_signs_and_full_stop():
    rows = [
        {"problem": "a", "answer": "$69$,$84$"},
        {"problem": "b", "answer": "\\$18.90"},
        {"problem": "c", "final_answer": ["$(-\\infty, 0) \\cup\\{1\\}$."]},
        {"problem": "d", "answer": "[0, 1]"},
        {"problem": "e", "answer": 2.5},
        {"problem": "f", "Answer": 70},
    ]
    assert labels(rows) == ["69,84", "\\$18.90", "(-\\infty, 0) \\cup\\{1\\}", "[0, 1]", "2.5", "70"]


def test_minerva_keeps_what_its_authors_call_a_nonessential_image():
    problem = "Find it.\n\\includegraphics[scale=0.5]{a.jpg}\n\\nonessentialimage\nNow"
    assert labels([{"problem": problem, "solution": "\\boxed{4}"}], "minerva") == ["4"]
    assert reasons([{"problem": problem.replace("nonessential", ""), "solution": "\\boxed{4}"}]) == {
        "needs an image": ["row 1"]
    }


def test_a_gsm8k_answer_is_what_follows_the_mark_without_thousands_commas():
    rows = [{"question": q, "answer": a} for q, a in (("a", "2 and\n#### 1,450,000"), ("b", "-3"), ("c", "It is 3."))]
    assert labels(rows, "gsm8k") == ["1450000", "-3"]
    assert reasons(rows, "gsm8k") == {'no "####" before the answer': ["row 3"]}


def test_a_prompt_suffix_replaces_ours_and_an_empty_one_adds_nothing(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    for suffix, text in (("Box it.", "Find $2+2$.\nBox it."), ("", "Find $2+2$.")):
        assert convert(tmp_path, "aime25", source, "--prompt_suffix", suffix)[0]["input"] == text


def test_the_same_command_writes_the_same_file_again_over_itself(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    assert convert(tmp_path, "aime25", source) == convert(tmp_path, "aime25", source)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_the_folder_of_the_file_is_created(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    data.main(["aime25", str(tmp_path / "new/folder/out.jsonl"), "--source", str(source)])
    assert (tmp_path / "new/folder/out.jsonl").is_file()


@pytest.mark.parametrize("apply_chat_template", [False, True])
def test_openrlhfs_prompt_dataset_reads_the_result(tmp_path, apply_chat_template):
    from openrlhf.datasets import PromptDataset
    from openrlhf.datasets.utils import blending_datasets
    from transformers import AutoTokenizer

    rows = [PUBLISHED_FORMS["aime25"], {"problem": "Find $3+3$.", "answer": "2026-01-01"}]
    convert(tmp_path, "math500", write_rows(tmp_path / "rows.jsonl", rows))
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path) / "model")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    keys = Namespace(input_key="input", label_key="label", apply_chat_template=apply_chat_template)
    strategy = Namespace(args=Namespace(data=keys), is_rank_0=lambda: True, print=print)
    rows = blending_datasets(str(tmp_path / "out.jsonl"), strategy=strategy)
    dataset = PromptDataset(rows, tokenizer, strategy)
    problem = f"Find $2+2$.\n{PROMPT_SUFFIX}"
    assert dataset[0] == ("math500", f"<user>{problem}<assistant>" if apply_chat_template else problem, "4", None)
    assert dataset[1][2] == "2026-01-01"


def test_mistakes_end_in_one_line_that_says_what_is_allowed(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    good = write_rows(tmp_path / "good.jsonl", [PUBLISHED_FORMS["aime25"]])
    assert "'aime99'" in (said := mistake(capsys, "aime99", out)) and "olympiadbench" in said

    missing, empty_directory = tmp_path / "missing.jsonl", tmp_path / "directory"
    empty_directory.mkdir()
    (tmp_path / "rows.txt").write_text("4\n")
    (tmp_path / "broken.jsonl").write_text('{"problem": "a", "answer": "4"}\n{"problem"\n')
    (tmp_path / "numbers.json").write_text("[1, 2]")
    (tmp_path / "broken.parquet").write_text("not parquet")
    (tmp_path / "latin.csv").write_bytes(b"problem,answer\n\xe9,4\n")
    for source, words in (
        (missing, "No such file"),
        (empty_directory, "no dataset in it"),
        (tmp_path / "rows.txt", ".parquet"),
        (tmp_path / "broken.jsonl", "line 2 is not JSON"),
        (tmp_path / "numbers.json", "row 1 is not a JSON object"),
        (tmp_path / "broken.parquet", "cannot be read"),
        (tmp_path / "latin.csv", "cannot be read"),
    ):
        said = mistake(capsys, "aime25", out, "--source", source)
        assert f"--source {source}" in said and words in said and "allowed: " in said

    for row, words in (
        ({"text": "a", "answer": "4"}, "keys text, answer; allowed: one of problem, question, prompt"),
        ({"problem": "a", "result": "4"}, "keys problem, result; allowed: one of answer, final_answer"),
        ({"problem": "a", "answer": ""}, "none of 1 rows can be used as aime25: 1 no answer (row 1)"),
    ):
        assert words in mistake(capsys, "aime25", out, "--source", write_rows(tmp_path / "bad.jsonl", [row]))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "long.csv").write_text(f"problem,answer\n{'a' * 200_000},4\n")
    assert "field larger" in mistake(capsys, "aime25", out, "--source", tmp_path / "long.csv")
    assert "none of 0 rows" in mistake(capsys, "aime25", out, "--source", tmp_path / "empty.jsonl")
    for bad_out in (good / "out.jsonl", empty_directory):
        assert f"OUT.jsonl {bad_out}" in mistake(capsys, "aime25", bad_out, "--source", good)
    assert "--split dev" in mistake(capsys, "aime25", out, "--source", good, "--split", "dev")
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob("*.part"))
