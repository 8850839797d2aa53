"""Checks of the labels in data files: the loader must keep their values, and a grader must be able to read them."""

import csv
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from openrlhf_bapo.flags.input_files import ENCODING, json_rows, warn
from openrlhf_bapo.flags.mistakes import FlagError

_EXACT = 2**53  # a float64 holds integers up to here
_MAY_BE_A_DATE = re.compile(r"\s*[+-]?\d{4}-\d")


def check_labels(file: Path, where: str, key: str) -> None:
    """Refuse a file with a label that OpenRLHF's loader changes, and warn of labels that are no text and no number.

    The loader infers one type for all labels of a file. An integer may become a rounded float, and a text a date. Of a
    large JSON file, only the labels at its ends are checked. `check_rows` has accepted the file, and messages begin
    with `where`.
    """
    if file.suffix == ".parquet":
        import pyarrow.compute
        import pyarrow.parquet

        column = pyarrow.parquet.read_table(file, columns=[key])[key]
        kinds = ("is_string", "is_large_string", "is_integer", "is_floating", "is_boolean")
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        has_empty = is_text and pyarrow.compute.any(pyarrow.compute.equal(column, "")).as_py()
        if not (column.null_count or has_empty) and any(getattr(pyarrow.types, kind)(column.type) for kind in kinds):
            return None  # millions of labels need not become Python objects
        labels = [(f"row {number}", label) for number, label in enumerate(column.to_pylist(), 1)]
        return warn_of_labels(labels, where)
    if file.suffix == ".csv":
        with open(file, newline="", encoding=ENCODING) as stream:
            rows: list[tuple[str, Any]] = [(f"row {n}", row[key]) for n, row in enumerate(csv.DictReader(stream), 1)]
        _refuse_changed(file, where, rows, key, _is_same_text)
    elif file.suffix in (".json", ".jsonl"):
        rows = [(place, row[key]) for place, row in json_rows(file, where)]
        if _may_change([label for _, label in rows]):
            _refuse_changed(file, where, rows, key, lambda label, read: label == read)
    else:
        return None
    return warn_of_labels(rows, where)


def warn_of_labels(labels: Sequence[tuple[str, Any]], where: str) -> None:
    """Warn on stderr if some of the (place, label) are not text and not a number, or are empty."""
    odd = [(place, label) for place, label in labels if not isinstance(label, str | int | float) or label == ""]
    if odd:
        place, label = odd[0]
        warn(
            f"{where}: {len(odd)} of {len(labels)} labels are empty, or not text and not a number ({place} has "
            f"{label!r}); the math grader refuses them, and a reward function of yours gets them like this"
        )


def _may_change(labels: list) -> bool:
    """Say whether the loader may change a label: kinds are mixed, an integer is large, or a text is like a date."""
    kinds = {type(label) for label in labels if label is not None}
    return len(kinds) > 1 or any(
        abs(label) > _EXACT if isinstance(label, int) else isinstance(label, str) and _MAY_BE_A_DATE.match(label)
        for label in labels
    )


def _refuse_changed(file: Path, where: str, rows: list[tuple[str, Any]], key: str, is_same: Any) -> None:
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        read = load_dataset(file.suffix[1:].removesuffix("l"), data_files=str(file), split="train")[key]
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise FlagError(f"{where}: cannot be loaded ({reason}); allowed: values of one type for each key") from None
    # Of a large file, `rows` has the ends only.
    pairs = zip(rows, read, strict=True) if len(read) == len(rows) else ()
    for (place, label), loaded in pairs:
        if not is_same(label, loaded):
            raise FlagError(
                f"{where}: {place} has the label {label!r}, which is loaded as {loaded!r}; allowed: labels that are "
                "loaded as they are, such as the texts of a Parquet file"
            )


def _is_same_text(label: str, loaded: object) -> bool:
    try:
        return label == loaded or Decimal(label) == Decimal(repr(loaded))
    except InvalidOperation:
        return False
