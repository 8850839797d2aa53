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
from openrlhf_bapo.math_tasks.data import DATASETS, PROMPT_SUFFIX, UnusableRow, WrongDataset, read_problems

DATA = Path(__file__).parents[1] / "data"
# Rows as they are published, chosen among all of them; problems and solutions cut short. By file: the dataset, the
# number of rows, the first label, and the rows that are left out by reason.
EXCERPTS = {
    "rows_aime24.jsonl": ("aime24", 30, "204", {}),
    "rows_amc23.jsonl": ("amc23", 40, "27", {}),
    "rows_minerva.jsonl": ("minerva", 56, "1.6", {}),
    "rows_olympiadbench.jsonl": ("olympiadbench", 76, "2", {"answer in words": ["row 10 (id 1965)"]}),
    "rows_gsm8k_train.jsonl": ("gsm8k", 54, "72", {}),
    "rows_gsm8k_test.jsonl": ("gsm8k", 35, "18", {}),
}

# Rows in the form in which these datasets are published, with other problems.
PUBLISHED_FORMS = json.loads((DATA / "published_forms.json").read_text())
CHAT = PUBLISHED_FORMS["skywork-or1"]["prompt"]


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


@pytest.mark.parametrize("file", EXCERPTS)
def test_published_rows_become_prompts(tmp_path, capsys, file):
    name, num_rows, first_label, left_out = EXCERPTS[file]
    lines = convert(tmp_path, name, DATA / file)
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
    assert set(DATASETS) == {name for name, *_ in EXCERPTS.values()} | set(PUBLISHED_FORMS)


def published_rows(name: str) -> list[dict]:
    files = [DATA / file for file, (of, *_) in EXCERPTS.items() if of == name]
    return [json.loads(line) for file in files for line in open(file)] or [PUBLISHED_FORMS[name]]


# AIME 2025 has the keys problem, answer and id, which any dataset could have.
@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"aime25"}))
def test_rows_of_one_dataset_are_left_out_of_every_other(name):
    rows = published_rows(name)
    for other in set(DATASETS) - {name}:
        (left_out,) = (problems := read_problems(rows, DATASETS[other])).left_out.items()
        assert not problems.usable and left_out[0] == f"row of {name}" and len(left_out[1]) == len(rows)
    assert not any(reason.startswith("row of") for reason in reasons(rows, name))


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"gsm8k", "olympiadbench"}))
@pytest.mark.parametrize("text", ["x=2\ny=3", "First we find that x is 2, and then that the answer is 4"])
def test_a_worked_solution_is_not_a_label(name, text):
    rows = [{"problem": "Find $x$.", "answer": text}]
    assert reasons(rows, name) == {"worked solution in place of an answer": ["row 1"]}


@pytest.mark.parametrize(
    "name, possible, impossible",
    [
        ("aime24", ["0", "007", "999", 30.0], ["1000", "-1", "1/2", "0.5", "x"]),
        ("aime25", ["0", "007", "999", 30.0, r"336^\circ", r"$14^{\circ}$"], ["1000", "-1", "1/2", "0.5", "x"]),
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


def test_duplicates_are_counted_but_not_listed_one_by_one(tmp_path, capsys):
    convert(tmp_path, "aime25", write_rows(tmp_path / "rows.jsonl", [{"problem": "Find $x$.", "answer": "4"}] * 10))
    said = capsys.readouterr()
    assert "left out: 9 duplicate of an earlier row (row 2, row 3, row 4, row 5, row 6, ...)\n" in said.out
    assert said.err == ""


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


def test_a_prompt_suffix_replaces_ours_and_an_empty_one_adds_nothing(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    for suffix, text in (("Box it.", "Find $2+2$.\nBox it."), ("", "Find $2+2$.")):
        assert convert(tmp_path, "aime25", source, "--prompt_suffix", suffix)[0]["input"] == text


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


def answers(*answers, **more) -> list[dict]:
    return [{"problem": f"Find $x_{{{i}}}$.", "answer": answer} | more for i, answer in enumerate(answers)]


MATRIX = "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"
# By what they show: dataset, rows, the labels of those that are written, and the rows that are left out by reason.
ROWS = {
    "equal rows are written once": (
        "dapo-math",
        [PUBLISHED_FORMS["dapo-math"]] * 100,
        ["4"],
        {"duplicate of an earlier row": [f"row {number}" for number in range(2, 101)]},
    ),
    "problems that differ only in white space are the same": (
        "math500",
        [{"problem": problem, "answer": "4"} for problem in ("Find $x$.", "Find\n $x$. ", "Find $y$.")],
        ["4", "4"],
        {"duplicate of an earlier row": ["row 2"]},
    ),
    "a problem with two answers is left out": (
        "math500",
        [*({"problem": "Find $x$.", "answer": answer} for answer in "455"), {"problem": "Find $y$.", "answer": "6"}],
        ["6"],
        {"same problem with another answer": ["row 2", "row 3", "row 1"]},
    ),
    "an answer nested deeply in its text is left out": (
        "math500",
        answers("[" * DEEP, "[" * DEEP + "]" * DEEP, "4"),
        ["4"],
        {"list or dict written as text": ["row 1", "row 2"]},
    ),
    "a matrix in several lines is an answer": ("math500", answers(MATRIX), [MATRIX], {}),
    "the label of a worked solution is the content of its box": (
        "math500",
        answers("Two and two make four.\nSo it is $\\boxed{\\frac{8}{2}}$."),
        ["\\frac{8}{2}"],
        {},
    ),
    "an answer is written without dollar signs and full stop": (
        "math500",
        [
            *answers("$69$,$84$", "\\$18.90", "[0, 1]", 2.5, "0.333..."),
            {"problem": "a", "final_answer": ["$(-\\infty, 0) \\cup\\{1\\}$."]},
            {"problem": "b", "Answer": 70},
        ],
        ["69,84", "\\$18.90", "[0, 1]", "2.5", "0.333...", "(-\\infty, 0) \\cup\\{1\\}", "70"],
        {},
    ),
    "Minerva keeps what its authors call a nonessential image": (
        "minerva",
        [
            {"problem": f"\\includegraphics[scale=0.5]{{a.jpg}}\n\\{image}\n", "solution": "\\boxed{4}"}
            for image in ("nonessentialimage", "image")
        ],
        ["4"],
        {"needs an image": ["row 2"]},
    ),
    "a GSM8K answer is what follows the mark, without commas of thousands": (
        "gsm8k",
        answers("2 and\n#### 1,450,000", "-3", "It is 3."),
        ["1450000", "-3"],
        {'no "####" before the answer': ["row 3"]},
    ),
}


@pytest.mark.parametrize("claim", ROWS)
def test_rows_become_labels_or_are_left_out_with_a_reason(claim):
    name, rows, expected, left_out = ROWS[claim]
    assert (labels(rows, name), reasons(rows, name)) == (expected, left_out)


DAPO_PROMPT = PUBLISHED_FORMS["dapo-math"]["prompt"][0]["content"]


@pytest.mark.parametrize(
    "problem, written",
    [
        (DAPO_PROMPT, "Find $2+2$."),
        (DAPO_PROMPT.removesuffix("."), "Find $2+2$."),
        ("Find $x$.", "Find $x$."),
        ("Is $x<i$ in the image of $f$?", "Is $x<i$ in the image of $f$?"),
    ],
)
def test_a_problem_is_written_without_dapos_instruction_and_otherwise_unchanged(problem, written):
    assert read_problems([{"problem": problem, "answer": "4"}], DATASETS["dapo-math"]).usable == [(written, "4")]


@pytest.mark.parametrize(("context", "start"), [("Let $x=4$.", "Let $x=4$.\n"), (None, ""), ("", "")])
def test_a_problem_is_written_after_its_context(context, start):
    row = {"context": context, "question": "Find $x$.", "final_answer": ["$4$"]}
    assert read_problems([row], DATASETS["olympiadbench"]).usable == [(f"{start}Find $x$.", "4")]


def test_csv_gives_the_same_as_json(tmp_path):
    rows = [{"problem": 'Say "2",\nthen', "answer": "027"}, {"problem": "and this", "answer": 27.0}]
    as_csv, as_json = (convert(tmp_path, "amc23", write_rows(tmp_path / f"rows{x}", rows)) for x in (".csv", ".json"))
    assert as_csv == as_json and [line["label"] for line in as_csv] == ["27", "27"]


def test_the_same_command_writes_the_same_file_again_over_itself_and_makes_its_folder(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [PUBLISHED_FORMS["aime25"]])
    folder = tmp_path / "new/folder"
    assert convert(folder, "aime25", source) == convert(folder, "aime25", source)
    assert [file.name for file in folder.iterdir()] == ["out.jsonl"]


# Each source as its file's name and content, and the words of the mistake.
BAD_SOURCES = [
    ("missing.jsonl", None, "No such file"),
    (".", None, "no dataset in it"),
    ("rows.txt", b"4\n", ".parquet"),
    ("broken.jsonl", b'{"problem": "a", "answer": "4"}\n{"problem"\n', "line 2 is not JSON"),
    ("numbers.json", b"[1, 2]", "row 1 is not a JSON object"),
    ("broken.parquet", b"not parquet", "cannot be read"),
    ("latin.csv", b"problem,answer\n\xe9,4\n", "cannot be read"),
    ("long.csv", b"problem,answer\n" + b"a" * 200_000 + b",4\n", "field larger"),
    ("comma.csv", b"problem,answer\nFind x,4\nFind x, y,4\n", "row 2 has more values than the header"),
    ("empty.jsonl", b"", "none of 0 rows"),
    ("bad.json", [{"text": "a", "answer": "4"}], "keys text, answer; allowed: one of problem, question, prompt"),
    ("bad.json", [{"problem": "a", "result": "4"}], "keys problem, result; allowed: one of answer, final_answer"),
    ("bad.json", answers(""), "none of 1 rows can be used as aime25: 1 no answer (row 1)"),
    ("bad.json", answers(*"4" * 31), "has 31 different problems; allowed: up to the 30 of math-ai/aime25"),
    ("bad.json", answers(*["#### 4"] * 9), "none of 9 rows can be used as aime25: 9 row of gsm8k (row 1, row 2, "),
]


@pytest.mark.parametrize("name, content, words", BAD_SOURCES)
def test_a_bad_source_ends_in_one_line_and_out_stays_as_it_was(tmp_path, capsys, name, content, words):
    source, out = tmp_path / "sources" / name, tmp_path / "out.jsonl"
    (tmp_path / "sources").mkdir()
    out.write_text("mine\n")
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    said = mistake(capsys, "aime25", out, "--source", source)
    assert f"--source {source}: " in said and words in said
    assert out.read_text() == "mine\n" and {file.name for file in tmp_path.iterdir()} == {"sources", "out.jsonl"}


def test_mistakes_in_the_flags_end_in_one_line_that_says_what_is_allowed(tmp_path, capsys):
    good = write_rows(tmp_path / "good.jsonl", [PUBLISHED_FORMS["aime25"]])
    assert "'aime99'" in (said := mistake(capsys, "aime99", tmp_path / "out.jsonl")) and "olympiadbench" in said
    assert f"OUT.jsonl {good}/out.jsonl" in mistake(capsys, "aime25", good / "out.jsonl", "--source", good)
    assert "--split dev" in mistake(capsys, "aime25", tmp_path / "out.jsonl", "--source", good, "--split", "dev")
    assert list(tmp_path.iterdir()) == [good]
