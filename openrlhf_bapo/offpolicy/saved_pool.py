"""The file format of saved state: the replay pool, unfinished responses, waiting samples, and the clip rule's state.

A saved state is a directory with two files. groups.safetensors holds named tensors, the columns. pool.json holds any
JSON values, the record, and a checksum of each file. Loading them cannot execute code.

A pool saves its samples, each a dict of tensors, as few columns. A column is one name and dtype. Its values are the
samples' tensors one after another, and its lengths have one entry per sample:

    samples                                       columns
    {"x": tensor([5., 6.]), "y": tensor(1.)}      values/x:float32   [5., 6., 7.]
    {"x": tensor([7.])}                           lengths/x:float32  [2, 1]
                                                  values/y:float32   [1.]
                                                  lengths/y:float32  [-2, -1]

A length of -2 stands for a 0-dim tensor, and -1 for a sample without the name.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_ABSENT, _SCALAR = -1, -2


class SavedStateError(Exception):
    """Saved state cannot be used; the message is one line with the file, the problem and what to do."""


def write_directory(path: str | os.PathLike, columns: dict[str, torch.Tensor], record: dict) -> None:
    """Write a saved state to directory `path`, in place of what is there.

    The files are first written to `path`.part. An existing `path` is then renamed to `path`.old, `path`.part takes its
    place, and `path`.old is removed. If a save is interrupted, `read_directory` finds the old state or the new one,
    and always a whole one.

    Args:
        path: the directory; its parents are made.
        columns: tensors by name.
        record: JSON values, with "format_version" and "fingerprint" among them.

    Raises:
        OSError: if writing fails.
    """
    path = Path(path)
    part, old = _beside(path, ".part"), _beside(path, ".old")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    save_file(columns, part / "groups.safetensors")
    record = {**record, "groups_sha256": _sha256_of_file(part / "groups.safetensors")}
    record["sha256"] = _sha256_of_record(record)
    (part / "pool.json").write_text(json.dumps(record))
    # Without these, a power failure could lose both the old state and the new one.
    for written in (part / "groups.safetensors", part / "pool.json", part):
        _sync(written)
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(path, old)
    os.rename(part, path)
    _sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def has_saved_state(path: str | os.PathLike) -> bool:
    """Say whether `read_directory` finds a state, also after an interrupted save."""
    return Path(path).exists() or _beside(Path(path), ".old").exists()


def read_directory(
    path: str | os.PathLike, format_version: int, fingerprint: dict[str, str], way_out: str
) -> tuple[dict[str, torch.Tensor], dict]:
    """Read what `write_directory` wrote, also after an interrupted save.

    Args:
        path: the directory.
        format_version: the only value of the record's "format_version" that is accepted.
        fingerprint: the required value of the record's "fingerprint".
        way_out: how to start a run without the saved state, such as "pass --FLAG"; errors name it.

    Returns:
        The columns, and the record.

    Raises:
        SavedStateError: if a file is missing or damaged, or if the format version or the fingerprint differs.
    """
    directory = Path(path)
    # A save that was interrupted between its two renames left only the old state.
    if not directory.exists() and _beside(directory, ".old").exists():
        directory = _beside(directory, ".old")
    try:
        record = _read_record(directory / "pool.json", format_version)
        file = directory / "groups.safetensors"
        with _readable(file):
            checksum = _sha256_of_file(file)
        if checksum != record["groups_sha256"]:
            raise _refusal(file, "is damaged (its checksum is not the one in pool.json)", "restore it")
        saved = record["fingerprint"]
        for name in [*fingerprint, *saved]:
            ours, theirs = fingerprint.get(name), saved.get(name)
            if ours != theirs:
                problem = f"was saved with {name} {theirs!r}, but this run has {name} {ours!r}"
                raise _refusal(directory / "pool.json", problem, f"use the same {name}")
    except SavedStateError as error:
        raise SavedStateError(f"{error} or {way_out} to start without it") from error.__cause__
    return load_file(file), record


def to_columns(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Flatten samples into columns.

    Args:
        samples: dicts of 1-D or 0-dim tensors.

    Returns:
        For each column "values/NAME:DTYPE" [sum of its lengths] and "lengths/NAME:DTYPE" [num_samples], int32.
    """
    tensors: dict[str, list[torch.Tensor]] = {}
    lengths: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        for name, tensor in sample.items():
            column = f"{name}:{str(tensor.dtype).removeprefix('torch.')}"
            if column not in tensors:
                tensors[column], lengths[column] = [], [_ABSENT] * len(samples)
            tensors[column].append(tensor if tensor.dim() else tensor.unsqueeze(0))
            lengths[column][row] = tensor.numel() if tensor.dim() else _SCALAR
    return {
        **{f"values/{column}": torch.cat(parts) for column, parts in tensors.items()},
        **{f"lengths/{column}": torch.tensor(column_lengths).int() for column, column_lengths in lengths.items()},
    }


def from_columns(columns: dict[str, torch.Tensor], num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Rebuild the samples that `to_columns` flattened, as views into the columns.

    Columns that are not from `to_columns` are ignored.
    """
    samples: list[dict[str, torch.Tensor]] = [{} for _ in range(num_samples)]
    for label, column_lengths in columns.items():
        kind, _, column = label.partition("/")
        if kind != "lengths":
            continue
        name = column.rpartition(":")[0]
        rows = [(row, length) for row, length in enumerate(column_lengths.tolist()) if length != _ABSENT]
        parts = columns[f"values/{column}"].split([1 if length == _SCALAR else length for _, length in rows])
        for (row, length), part in zip(rows, parts, strict=True):
            samples[row][name] = part.squeeze(0) if length == _SCALAR else part
    return samples


def _read_record(file: Path, format_version: int) -> dict:
    with _readable(file):
        content = file.read_bytes()
    try:
        record = json.loads(content)
    except ValueError as error:
        raise _refusal(file, "is damaged (it is not JSON)", "restore it") from error
    found = record.get("format_version") if isinstance(record, dict) else None
    if found != format_version:
        problem = f"has format version {found!r}, but this release reads {format_version}"
        raise _refusal(file, problem, "use the release that saved it")
    if record.pop("sha256", None) != _sha256_of_record(record):
        raise _refusal(file, "is damaged (its checksum does not match its content)", "restore it")
    return record


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _refusal(file, "is missing", "restore it") from error
    except OSError as error:
        raise _refusal(file, f"cannot be read ({error.strerror})", "make it readable") from error


def _refusal(file: Path, problem: str, remedy: str) -> SavedStateError:
    return SavedStateError(f"{file} {problem}; {remedy}")


def _sha256_of_record(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256_of_file(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
