"""Labels that the loader would change, and labels that a grader cannot read."""

import datetime
import json

import pandas
import pytest
from datasets import load_dataset

from openrlhf_bapo.flags.labels import check_labels
from openrlhf_bapo.flags.mistakes import FlagError
from openrlhf_bapo.math_tasks.reward import reward_func

KEPT = {
    "texts": ["3", "1/2", "x = 2024"],
    "numbers": [3, -4, 0],
    "floats": [0.5, 3.25],
    "small integers among floats": [3, 0.5],
    "texts, some of them like dates": ["2024-01-05", "3"],
    "large integers alone": [2**53 + 1, 2**62],
    "large numbers as texts": [str(2**70), "5"],
    "yes and no": [True, False],
    "months": ["2024-01", "1999-12"],
}
CHANGED = {
    "above 64 bits": [2**63 + 11, 3],
    "above 53 bits beside a float": [0.5, 2**53 + 1],
    "dates": ["2024-01-05", "2023-12-31"],
    "texts and numbers": ["3", 4],
}


def write(folder, labels, kind="jsonl"):
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"input": "q", "label": label}) + "\n" for label in labels))
    else:
        pandas.DataFrame({"input": ["q"] * len(labels), "label": labels}).to_parquet(file)
    return file


def loaded(file):
    kind = "parquet" if file.suffix == ".parquet" else "json"
    return load_dataset(kind, data_files=str(file), split="train")["label"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("labels", KEPT.values(), ids=KEPT)
def test_labels_that_the_loader_keeps_pass(labels, kind, tmp_path, capsys):
    file = write(tmp_path, labels, kind)
    check_labels(file, "--data.prompt_dataset rows.jsonl", "label")
    assert capsys.readouterr().err == ""
    assert list(loaded(file)) == labels


@pytest.mark.parametrize("labels", CHANGED.values(), ids=CHANGED)
def test_labels_that_the_loader_changes_are_refused_with_their_row(labels, tmp_path):
    file = write(tmp_path, labels)
    with pytest.raises(FlagError, match=r"--data.prompt_dataset rows.jsonl: (line \d has the label|cannot be loaded)"):
        check_labels(file, "--data.prompt_dataset rows.jsonl", "label")
    try:
        assert list(loaded(file)) != labels
    except AssertionError:
        raise
    except Exception as error:
        assert "DatasetGenerationError" in type(error).__name__


@pytest.mark.parametrize(
    ("label", "changes"), [("3", False), ("007", False), ("1/2", False), ("NA", True), ("TRUE", True), ("1e400", True)]
)
def test_a_csv_label_passes_if_its_text_or_its_number_stays(label, changes, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(f"input,label\nq,{label}\n")
    if changes:
        with pytest.raises(FlagError, match=f"row 1 has the label '{label}', which is loaded as"):
            check_labels(file, "--eval.dataset rows.csv", "label")
    else:
        check_labels(file, "--eval.dataset rows.csv", "label")


@pytest.mark.parametrize(
    ("kind", "label"),
    [(kind, label) for kind in ("jsonl", "parquet") for label in (None, "", ["3"], {"answer": "3"})]
    + [("parquet", datetime.date(2024, 1, 5))],
)
def test_a_label_that_is_not_text_and_not_a_number_is_warned_of_and_not_graded(kind, label, tmp_path, capsys):
    check_labels(write(tmp_path, [label, label], kind), "--data.prompt_dataset rows", "label")
    (line,) = capsys.readouterr().err.splitlines()
    assert "--data.prompt_dataset rows: 2 of 2 labels are empty, or not text and not a number" in line
    with pytest.raises(TypeError, match="the label is"):
        reward_func(["q \\boxed{None}"], ["q"], [label])


def test_a_missing_label_among_the_texts_of_a_parquet_file_is_warned_of(tmp_path, capsys):
    check_labels(write(tmp_path, ["3", None], "parquet"), "--data.prompt_dataset rows", "label")
    assert "1 of 2 labels are empty, or not text and not a number (row 2 has None)" in capsys.readouterr().err
