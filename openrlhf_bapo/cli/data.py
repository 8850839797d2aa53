"""Writes a public mathematics data set as prompts for OpenRLHF: one line per problem, with input, label, datasource."""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from openrlhf_bapo.flags.mistakes import exit_with_one_line
from openrlhf_bapo.math_tasks.data import DATASETS, DUPLICATE, PROMPT_SUFFIX, MathDataset, WrongDataset, read_problems

_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_ALLOWED = f"{', '.join(_SUFFIXES)}, or a directory made by datasets' save_to_disk or with .parquet files"
_ENCODING = "utf-8-sig"  # accepts a byte order mark, which spreadsheets and Windows write
_NUM_NAMED = 5  # rows named per reason in the summary
_QUIET_SECONDS = 5  # before a progress bar appears


class SourceError(Exception):
    """Rows cannot be read; the message is one line with the mistake and the allowed sources."""


def read_hub(dataset: MathDataset, split: str) -> Iterable[dict]:
    """Read the rows of a data set on the hub, through its cache; raise SourceError if it or its split is not there."""
    import datasets
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would print each retry
    try:
        return datasets.load_dataset(dataset.repository, dataset.config, split=split)
    except OSError as error:
        problem = f"--source is not given, and the hub cannot be read ({_one_line(error)})"
        copy = f"--source with a local copy of the hub's {_described(dataset, split)}"
        raise SourceError(f"{problem}; allowed: {copy}") from error
    except ValueError as error:
        raise SourceError(f"--split {split}: {_one_line(error)}") from error


def read_local(path: Path, dataset: MathDataset, split: str) -> Iterator[dict]:
    """Read the rows of a local file or directory (see `_ALLOWED`).

    A copy of a hub repository may have several splits and configurations. Then only `split` and the data set's
    configuration are read. A path that cannot be read raises SourceError.
    """
    # pyarrow raises ValueErrors and OSErrors; json and decoders raise ValueErrors, and RecursionErrors at deep nesting.
    try:
        if path.is_dir():
            yield from _read_directory(path, dataset, split)
        elif path.suffix.lower() == ".parquet":
            yield from _read_parquet([path])
        elif path.suffix.lower() == ".csv":
            with open(path, encoding=_ENCODING, newline="") as file:
                for number, row in enumerate(csv.DictReader(file), start=1):
                    if None in row:  # an unquoted comma has moved its values
                        raise ValueError(f"row {number} has more values than the header")
                    yield row
        elif path.suffix.lower() in _SUFFIXES:
            yield from _read_json(path)
        else:
            raise SourceError(f"--source {path}: allowed: {_ALLOWED}")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise SourceError(f"--source {path}: cannot be read ({_one_line(error)}); allowed: {_ALLOWED}") from error


def _read_json(path: Path) -> Iterator[dict]:
    with open(path, encoding=_ENCODING) as file:
        is_array = path.suffix.lower() == ".json" and file.read().lstrip().startswith("[")
        file.seek(0)
        rows: Iterable[object] = json.load(file) if is_array else file
        for number, row in enumerate(rows, start=1):
            if isinstance(row, str) and not is_array:
                if not row.strip():
                    continue
                try:
                    row = json.loads(row)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not a JSON object")
            yield row


def _read_directory(path: Path, dataset: MathDataset, split: str) -> Iterator[dict]:
    import datasets

    if (path / "dataset_dict.json").exists():
        by_split = datasets.load_from_disk(str(path))
        if split not in by_split:
            raise SourceError(f"--split {split}: not in --source {path}; allowed: {', '.join(by_split)}")
        yield from by_split[split]
    elif (path / "dataset_info.json").exists():
        yield from datasets.load_from_disk(str(path))
    else:
        files = sorted(path.rglob("*.parquet"))
        files = [file for file in files if dataset.config in file.relative_to(path).parts] or files
        names = sorted({_split_name(file) for file in files})
        if not files:
            raise SourceError(f"--source {path}: has no dataset in it; allowed: {_ALLOWED}")
        if split not in names and len(names) > 1:
            raise SourceError(f"--split {split}: not in --source {path}; allowed: {', '.join(names)}")
        yield from _read_parquet([file for file in files if len(names) == 1 or _split_name(file) == split])


def _split_name(file: Path) -> str:
    # The hub's layouts: data/train-00000-of-00001.parquet, main/train-00000-of-00001.parquet, main/train/0000.parquet.
    name = file.stem.split("-")[0]
    return file.parent.name if name.isdigit() else name


def _read_parquet(files: list[Path]) -> Iterator[dict]:
    from pyarrow import parquet

    for file in files:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from batch.to_pylist()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _described(dataset: MathDataset, split: str) -> str:
    config = f", configuration {dataset.config}" if dataset.config else ""
    return f"{dataset.repository}{config}, split {split}"


def _write(path: Path, lines: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def make_parser() -> argparse.ArgumentParser:
    """Make the command line's parser."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo data", description=__doc__)
    parser.error = exit_with_one_line
    parser.add_argument("name", metavar="NAME", choices=tuple(DATASETS), help=", ".join(DATASETS))
    parser.add_argument("out", metavar="OUT.jsonl", type=Path, help="file to write; an existing file is replaced")
    parser.add_argument("--source", type=Path, help=f"local copy to read instead of the hub: {_ALLOWED}")
    parser.add_argument("--split", help="split of the hub's data set, or of a directory with several")
    parser.add_argument("--prompt_suffix", default=PROMPT_SUFFIX, help='line after the problem; "": none (%(default)s)')
    return parser


def main(argv: list[str]) -> None:
    """Read and write rows; list the rows that are left out on standard error, and count them on standard output."""
    parser = make_parser()
    args = parser.parse_args(argv)
    dataset = DATASETS[args.name]
    split = args.split or dataset.split
    if args.split and args.source and not args.source.is_dir():
        parser.error(f"--split {args.split}: --source {args.source} is not a directory; allowed: without --split")
    if args.out.is_dir():
        parser.error(f"OUT.jsonl {args.out}: is a directory; allowed: a file's path")
    if args.source and args.source.exists() and args.out.exists() and args.out.samefile(args.source):
        parser.error(f"OUT.jsonl {args.out}: is --source {args.source}, which would be lost; allowed: another file")
    try:
        rows = read_hub(dataset, split) if args.source is None else read_local(args.source, dataset, split)
        problems = read_problems(tqdm(rows, unit=" rows", delay=_QUIET_SECONDS), dataset)
    except SourceError as error:
        parser.error(str(error))
    except WrongDataset as error:
        parser.error(f"--source {args.source or dataset.repository}: {error}")

    summary = []
    for reason, names in problems.left_out.items():
        more = ", ..." if len(names) > _NUM_NAMED else ""
        summary.append(f"{len(names)} {reason} ({', '.join(names[:_NUM_NAMED])}{more})")
    source = args.source or f"the hub's {_described(dataset, split)}"
    if not problems.usable:
        left_out = "; ".join(summary) or "it is empty"
        parser.error(f"--source {source}: none of {problems.num_rows} rows can be used as {args.name}: {left_out}")
    for reason, names in problems.left_out.items():
        if reason != DUPLICATE:  # duplicates lose nothing, and there may be a million
            sys.stderr.writelines(f"left out: {name}: {reason}\n" for name in names)
    suffix = f"\n{args.prompt_suffix}" if args.prompt_suffix else ""
    lines = ({"input": problem + suffix, "label": label, "datasource": args.name} for problem, label in problems.usable)
    try:
        _write(args.out, lines)
    except OSError as error:
        parser.error(f"OUT.jsonl {args.out}: cannot be written ({error.strerror}); allowed: a file's path")
    print(f"{args.name}: {problems.num_rows} rows read from {source}, {len(problems.usable)} written to {args.out}")
    for line in summary:
        print(f"left out: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
