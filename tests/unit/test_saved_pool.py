"""The file format of saved state: round trips, damaged files, and saves that are interrupted."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_bapo.offpolicy import saved_pool
from openrlhf_bapo.offpolicy.saved_pool import (
    SavedStateError,
    from_columns,
    read_directory,
    to_columns,
    write_directory,
)

FORMAT_VERSION = 2
FINGERPRINT = {"model": "tiny", "tokenizer": "bytes"}
DISCARD = "or pass --discard to start without it"


def save(path, number: int) -> None:
    """Save a state that is about `number` in both files."""
    record = {"format_version": FORMAT_VERSION, "fingerprint": FINGERPRINT, "number": number}
    write_directory(path, {"column": torch.full((number,), number)}, record)


def load(path, fingerprint=FINGERPRINT) -> int:
    columns, record = read_directory(path, FORMAT_VERSION, fingerprint, "pass --discard")
    assert columns["column"].tolist() == [record["number"]] * record["number"]
    return record["number"]


# Columns

TENSORS = [
    torch.tensor(-0.0),
    torch.tensor([math.nan, -0.0]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([1.5], dtype=torch.bfloat16),
    torch.tensor(7, dtype=torch.uint8),
]


@given(st.lists(st.dictionaries(st.sampled_from(["x", "a/b:c", "values"]), st.sampled_from(TENSORS)), max_size=5))
def test_samples_come_back_from_columns_bit_for_bit(samples):
    columns = to_columns(samples) | {"rewards": torch.zeros(3)}  # a column of another kind
    found = from_columns(columns, len(samples))
    assert [sample.keys() for sample in found] == [sample.keys() for sample in samples]
    for sample, expected in zip(found, samples, strict=True):
        for name, tensor in expected.items():
            assert (sample[name].dtype, sample[name].shape) == (tensor.dtype, tensor.shape)
            # As bytes, because NaN is not equal to itself and 0.0 is equal to -0.0.
            assert torch.equal(sample[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_columns_are_those_of_the_docstrings_example():
    columns = to_columns([{"x": torch.tensor([5.0, 6.0]), "y": torch.tensor(1.0)}, {"x": torch.tensor([7.0])}])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "values/x:float32": [5, 6, 7],
        "lengths/x:float32": [2, 1],
        "values/y:float32": [1],
        "lengths/y:float32": [-2, -1],
    }


# Damaged files


def refusal(path, fingerprint=FINGERPRINT) -> str:
    with pytest.raises(SavedStateError) as refused:
        load(path, fingerprint)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(DISCARD)
    return str(refused.value)


def rewrite_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("pool.json", Path.unlink, "is missing"),
        ("pool.json", lambda file: os.truncate(file, 9), "is damaged (it is not JSON)"),
        ("pool.json", lambda file: file.write_bytes(b"\xff\xfe"), "is damaged (it is not JSON)"),
        ("pool.json", lambda file: file.write_text("[]"), "has format version None, but this release reads 2"),
        ("pool.json", lambda file: rewrite_json(file, format_version=1), "has format version 1, but this release"),
        ("pool.json", lambda file: rewrite_json(file, number=9), "is damaged (its checksum does not match"),
        ("groups.safetensors", Path.unlink, "is missing"),
        ("groups.safetensors", flip_a_bit, "is damaged (its checksum is not the one in pool.json)"),
        ("groups.safetensors", lambda file: (file.unlink(), file.mkdir()), "cannot be read (Is a directory)"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, damage, problem):
    save(tmp_path / "pool", 4)
    damage(tmp_path / "pool" / name)
    assert refusal(tmp_path / "pool").startswith(f"{tmp_path / 'pool' / name} {problem}")


def test_a_missing_directory_is_refused_in_one_line(tmp_path):
    assert refusal(tmp_path / "none").startswith(f"{tmp_path / 'none' / 'pool.json'} is missing; ")
    (tmp_path / "file").touch()
    assert "cannot be read (Not a directory)" in refusal(tmp_path / "file")


def test_another_fingerprint_is_refused_with_the_first_name_that_differs(tmp_path):
    save(tmp_path / "pool", 4)
    for fingerprint, problem in (
        ({"model": "tiny", "tokenizer": "words"}, "tokenizer 'bytes', but this run has tokenizer 'words'"),
        ({"tokenizer": "bytes"}, "model 'tiny', but this run has model None"),
        ({**FINGERPRINT, "chat": "x\ny"}, r"chat None, but this run has chat 'x\ny'"),
    ):
        assert f"was saved with {problem}; " in refusal(tmp_path / "pool", fingerprint)


# Interrupted saves


def interrupt_a_save(monkeypatch, stop_at: int, after: bool):
    """Interrupt a save before or `after` its `stop_at`-th change on disk."""
    num_calls = 0

    def interrupted(function):
        def wrapper(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls == stop_at and not after:
                raise KeyboardInterrupt
            function(*args, **kwargs)
            if num_calls == stop_at:
                raise KeyboardInterrupt

        return wrapper

    for owner, name in (
        (saved_pool, "save_file"),
        (saved_pool, "_sync"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (os, "rename"),
        (shutil, "rmtree"),
    ):
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))


@pytest.mark.parametrize("after", [False, True])
def test_a_save_interrupted_anywhere_leaves_the_old_state_or_the_new_one_and_the_next_save_works(tmp_path, after):
    loaded = []
    for stop_at in range(1, 100):
        path = tmp_path / str(stop_at) / "pool"
        save(path, 4)
        with pytest.MonkeyPatch.context() as monkeypatch:
            interrupt_a_save(monkeypatch, stop_at, after)
            try:
                save(path, 6)
                finished = True
            except KeyboardInterrupt:
                finished = False
        number = load(path)
        assert number in (4, 6)
        loaded.append(number)
        # Interrupt the next save too, at the worst place and with the files of the first interrupted save still there.
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save(path, 5)
        assert load(path) == number
        save(path, 3)
        assert load(path) == 3
        assert [entry.name for entry in path.parent.iterdir()] == ["pool"]
        if finished:
            break
    assert finished and loaded == sorted(loaded) and {4, 6} == set(loaded) and len(loaded) > 8


@pytest.mark.parametrize("is_first", [True, False], ids=["the first save", "a later save"])
def test_a_power_failure_loses_no_state_because_a_save_syncs_before_and_after_its_renames(
    tmp_path, monkeypatch, is_first
):
    """What is synced before the rename is whole; the rename itself is lost until its folder is synced."""
    calls = []

    def noted(function, describe):
        def wrapper(*args, **kwargs):
            calls.append((function.__name__, *describe(*args)))
            return function(*args, **kwargs)

        return wrapper

    path = tmp_path / "pool"
    if not is_first:
        save(path, 4)
    monkeypatch.setattr(os, "fsync", noted(os.fsync, lambda file: [Path(os.readlink(f"/proc/self/fd/{file}"))]))
    monkeypatch.setattr(os, "rename", noted(os.rename, lambda source, target: [Path(source), Path(target)]))
    monkeypatch.setattr(shutil, "rmtree", noted(shutil.rmtree, lambda folder: [Path(folder)]))
    save(path, 6)
    part, old = tmp_path / "pool.part", tmp_path / "pool.old"
    *written, folder = [("fsync", part / "groups.safetensors"), ("fsync", part / "pool.json"), ("fsync", part)]
    synced = calls.index(folder)
    assert set(calls[:synced]) == set(written)
    renamed, removed = ([], []) if is_first else ([("rename", path, old)], [("rmtree", old)])
    assert calls[synced + 1 :] == [*renamed, ("rename", part, path), ("fsync", tmp_path), *removed]
