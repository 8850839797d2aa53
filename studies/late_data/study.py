"""The study of late data: many runs of walk.py, the cells of study.toml.

python studies/late_data/study.py run [--cells 'walk-lag8-*'] [--jobs 2]
python studies/late_data/study.py add [--cells PATTERN]
python studies/late_data/study.py table [--cells PATTERN] [--against ppo] [--details]
python studies/late_data/study.py draw [--cells PATTERN] [--methods ppo,gradient_steady] [--out study.png]

`run` writes one CSV per cell, NAME.csv in --runs, and never runs a cell that has a result. `add` copies finished cells
from there into --results, a Parquet file with one row per rollout. `table` and `draw` read both.
"""

import argparse
import csv
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from fnmatch import fnmatch
from math import nan
from pathlib import Path
from statistics import fmean, stdev

import pyarrow
import tomllib
from pyarrow import parquet

HERE = Path(__file__).parent
AXES = ("task", "lag", "updates", "lr", "method", "seed")  # each block lists values of each; a cell has one of each
LAST = 20  # a cell's reward is the mean of its last 20 rollouts
DETAILS = "entropy share_unclipped share lower upper clip_positive clip_negative ess grad_norm".split()
Columns = dict[str, list[float]]  # a cell's result: the name of each column to one value per rollout


def read_cells(file: Path, pattern: str) -> dict[str, dict]:
    """Return each cell's settings by the cell's name: by block, then by seed.

    Raises:
        ValueError: if a block names a method that the file does not define.
    """
    study = tomllib.loads(file.read_text())
    cells = {}
    for block in study["block"]:
        if unknown := set(block["method"]) - set(study["methods"]):
            raise ValueError(f"{file}: method {', '.join(sorted(unknown))} is not among {', '.join(study['methods'])}")
        for seed, *rest in itertools.product(block["seed"], *(block[axis] for axis in AXES[:-1])):
            cell = dict(zip(AXES, (*rest, seed), strict=True)) | {"then": block.get("then", "")}
            regime = block.get("regime", {})
            changes = "".join(f"-{key}{value}" for key, value in regime.items())
            changes += f"-then{cell['then']}" if cell["then"] else ""
            name = "{task}-lag{lag}-updates{updates}-lr{lr:g}{}-{method}-seed{seed}".format(changes, **cell)
            if fnmatch(name, pattern):
                cells[name] = cell | {"regime": regime, "flags": study["methods"][cell["method"]]}
    return cells


def read_parquet(results: Path) -> dict[str, Columns]:
    """Return the cells of the Parquet file by name. Columns that a cell does not have are null there, and left out."""
    if not results.exists():
        return {}
    columns = parquet.read_table(results).to_pydict()
    names, cells = columns.pop("cell"), {}
    for name, rows in itertools.groupby(range(len(names)), names.__getitem__):
        rows = [*rows]
        cells[name] = {
            key: [values[row] for row in rows] for key, values in columns.items() if values[rows[0]] is not None
        }
    return cells


def read_csv(file: Path) -> Columns:
    """Return the result that a run of walk.py left."""
    with open(file) as lines:
        head, *rows = csv.reader(lines)
    return {key: [float(value) for value in values] for key, values in zip(head, zip(*rows, strict=True), strict=True)}


def read_results(results: Path, runs: Path) -> dict[str, Columns]:
    """Return every finished cell by name, from the Parquet file and from the CSVs that are not in it yet."""
    return {file.stem: read_csv(file) for file in sorted(runs.glob("*.csv"))} | read_parquet(results)


def lock(folder: Path) -> None:
    """Take `folder` for this process until it ends; exit if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another process of this study; wait for its end or give another --runs")


def add(cells: dict[str, dict], results: Path, runs: Path) -> int:
    """Copy finished cells from `runs` into the Parquet file; return how many were new.

    The file is replaced in one step, so that it is whole at any time. The CSVs stay where they are.
    """
    kept = read_parquet(results)
    new = {file.stem: read_csv(file) for file in runs.glob("*.csv") if file.stem in cells and file.stem not in kept}
    if new:
        tables = [
            pyarrow.table({"cell": [name] * len(columns["reward"]), **columns})
            for name, columns in sorted((kept | new).items())
        ]
        part = results.with_suffix(".part")
        parquet.write_table(pyarrow.concat_tables(tables, promote_options="default"), part, compression="zstd")
        part.replace(results)
    return len(new)


def command(cell: dict, out: Path) -> list[str]:
    """Return the command that runs one cell."""
    flags = {name: value for name, value in cell.items() if name not in ("method", "regime", "flags") and value != ""}
    flags |= cell["regime"] | cell["flags"] | {"out": out}
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
    script = "through_pipeline.py" if cell["task"].startswith("pipeline") else "other_tasks.py"
    return [sys.executable, str(HERE / script), *itertools.chain(*words)]


def start_of(cell: dict) -> Path:
    """Return where walk.py keeps this cell's start policy."""
    return Path("runs/late_data/starts", f"{cell['task']}-seed{cell['seed']}.pt")


def seed_by_seed(cells: dict[str, dict]) -> list[str]:
    """Return the names of cells by seed, so that an unfinished study has whole seeds; then as in the study's file."""
    return sorted(cells, key=lambda name: cells[name]["seed"])


def run(cells: dict[str, dict], results: Path, runs: Path, jobs: int) -> int:
    """Run every cell that has no result yet, seed by seed; return how many failed."""
    os.nice(19)
    done = read_results(results, runs)
    waiting = seed_by_seed({name: cell for name, cell in cells.items() if name not in done})
    total, finished, failed, start = len(waiting), 0, 0, time.monotonic()
    print(f"{total} of {len(cells)} cells to run", flush=True)
    running: dict[str, tuple[subprocess.Popen, float]] = {}  # by name: the process and the time of its start
    # A flag, because an exception could be raised between a process's start and its entry in `running`.
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    try:
        while (waiting or running) and not stopped:
            # Two cells that share a start policy must not make it at the same time.
            busy = {start_of(cells[name]) for name in running}
            ready = [name for name in waiting if start_of(cells[name]).exists() or start_of(cells[name]) not in busy]
            if ready and len(running) < jobs:
                waiting.remove(ready[0])
                words = command(cells[ready[0]], runs / f"{ready[0]}.part")
                process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                running[ready[0]] = process, time.monotonic()
                continue
            time.sleep(0.5)
            for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                process, since = running.pop(name)
                seconds, finished = time.monotonic() - since, finished + 1
                if process.returncode:
                    failed += 1
                    outcome = f"FAILED: {process.stderr.read().strip().splitlines()[-1:]}"
                else:
                    (runs / f"{name}.part").rename(runs / f"{name}.csv")
                    outcome = f"reward {summary(name, read_csv(runs / f'{name}.csv'))['reward']:.3f}"
                left = (time.monotonic() - start) / finished * (total - finished)
                print(f"[{finished}/{total}] {name} {outcome} in {seconds:.0f} s, {left / 60:.0f} min left", flush=True)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
    if stopped:
        sys.exit("stopped")
    return failed


def began(name: str, columns: Columns) -> tuple[float, ...]:
    """Return what tells a cell's start policy from others: one seed has several, on different kinds of processors.

    In plain PyTorch it is reward and entropy of the first rollout, which is a function of the start policy. Through the
    pipeline first rollouts always differ. There it is the start policy's checksum, or nothing in older cells, whose
    start policies cannot be told apart.
    """
    names = ("start",) if name.startswith("pipeline") else ("reward", "entropy")
    return tuple(columns[key][0] for key in names if key in columns)


def summary(name: str, columns: Columns) -> dict[str, float | tuple]:
    """Return a cell's means over its last rollouts, its accuracies at the end, and what `began` returns."""
    means = {key: fmean(columns[key][-LAST:]) for key in ("reward", *DETAILS)}
    ends = {key: columns.get(key, [nan])[-1] for key in ("greedy", "pass1", "pass16")}
    return means | ends | {"began": began(name, columns)}


def mean_and_error(values: list[float], digits: int = 3) -> str:
    """Format mean, standard error and number of seeds for a table; no seeds give ""."""
    if not values:
        return ""
    error = f" \u00b1 {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error} ({len(values)})"


def summaries(cells: dict[str, dict], found: dict[str, Columns]) -> dict[str, dict[float, dict[str, dict[int, dict]]]]:
    """Return the finished cells' summaries by setting (task, lag, updates), learning rate (ascending), method, seed."""
    tree = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for name, cell in cells.items():
        if name in found:
            setting = f"Task {cell['task']}, lag {cell['lag']}, updates per rollout {cell['updates']}"
            setting += "".join(f", {key} {value}" for key, value in cell["regime"].items())
            setting += f", then {cell['then']}" if cell["then"] else ""
            tree[setting][cell["lr"]][cell["method"]][cell["seed"]] = summary(name, found[name])
    return {setting: dict(sorted(by_lr.items())) for setting, by_lr in tree.items()}


def differences(ours: dict[int, dict], theirs: dict[int, dict]) -> list[float]:
    """Return the differences of rewards for the seeds whose two cells have the same start policy."""
    alike = [seed for seed in ours if seed in theirs and ours[seed]["began"] == theirs[seed]["began"]]
    return [ours[seed]["reward"] - theirs[seed]["reward"] for seed in alike]


def tables(cells: dict[str, dict], found: dict[str, Columns], against: str, details: bool) -> list[str]:
    """Return Markdown lines: one table of rewards, by method and learning rate, per task, lag and number of updates.

    With `against`, the name of a method, each table also has the differences from it, over the seeds that both methods
    ran from the same start policy. With `details` a second table per learning rate has everything else that was
    measured.
    """
    lines = []
    for setting, by_lr in summaries(cells, found).items():
        methods = list(dict.fromkeys(method for lr in by_lr for method in by_lr[lr]))
        columns = {
            f"lr {lr:g}": [mean_and_error([s["reward"] for s in by_lr[lr][m].values()]) for m in methods]
            for lr in by_lr
        }
        for lr in by_lr if against in methods else ():
            pairs = [differences(by_lr[lr][m], by_lr[lr][against]) for m in methods]
            columns[f"lr {lr:g}, less {against}"] = [mean_and_error(pair) for pair in pairs]
        lines += [f"{setting}: reward of the last {LAST} rollouts, mean \u00b1 standard error (seeds)", ""]
        lines += markdown(["method", *columns], [*zip(methods, *columns.values(), strict=True)])
        for lr in by_lr if details else ():
            columns, done = ("reward", "pass1", "pass16", "greedy", *DETAILS), [m for m in methods if by_lr[lr][m]]
            rows = [[m, *(f"{fmean(s[c] for s in by_lr[lr][m].values()):.3f}" for c in columns)] for m in done]
            lines += [f"{setting}, lr {lr:g}", "", *markdown(["method", *columns], rows)]
    return lines


def draw(cells: dict[str, dict], found: dict[str, Columns], methods: list[str], out: Path):
    """Draw reward by learning rate, mean and standard error over seeds: one line per method, one panel per setting.

    A method is a name, or NAME=LABEL.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {setting: by_lr for setting, by_lr in summaries(cells, found).items() if len(by_lr) > 1}
    figure, (panels,) = plt.subplots(
        1, len(drawn), figsize=(2 + 5 * len(drawn), 4), squeeze=False, layout="constrained"
    )
    for panel, (setting, by_lr) in zip(panels, drawn.items(), strict=True):
        styles = itertools.cycle(("-o", "--s", ":^", "-.D", "-v", "--x"))  # distinct without color
        for named, style in zip(methods, styles, strict=False):
            method, _, label = named.partition("=")
            by_seed = {lr: [s["reward"] for s in by_lr[lr][method].values()] for lr in by_lr if by_lr[lr][method]}
            errors = [stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0 for v in by_seed.values()]
            means = [fmean(v) for v in by_seed.values()]
            panel.errorbar([*by_seed], means, errors, fmt=style, capsize=3, markersize=5, label=label or method)
        panel.set(title=setting, xscale="log", xlabel="learning rate", ylabel=f"reward of the last {LAST} rollouts")
        panel.set_xticks([*by_lr], [f"{lr:g}" for lr in by_lr])
        panel.minorticks_off()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(out, dpi=110)
    return figure


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "add", "table", "draw"))
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="only cells whose name matches (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="run: cells at a time, each on one core (default: 1)")
    parser.add_argument("--against", default="", metavar="METHOD", help="table: add differences from this method")
    parser.add_argument(
        "--methods", default="", metavar="NAME[=LABEL],...", help="draw: these, in this order (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("study.png"), help="draw: the picture (default: %(default)s)")
    parser.add_argument("--details", action="store_true", help="table: everything that was measured")
    parser.add_argument("--study", type=Path, default=HERE / "study.toml", help="the cells (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=HERE / "results.parquet", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs/late_data/cells"), help="default: %(default)s")
    args = parser.parse_args()
    cells = read_cells(args.study, args.cells)
    if not cells:
        example = next(iter(read_cells(args.study, "*")))
        parser.error(f"--cells {args.cells!r} matches no cell of {args.study}; a cell's name is like {example}")
    if args.command in ("run", "add"):
        lock(args.runs)
    if args.command == "run":
        sys.exit(1 if run(cells, args.results, args.runs, args.jobs) else 0)
    if args.command == "add":
        print(f"{add(cells, args.results, args.runs)} cells added to {args.results}")
        return
    found = read_results(args.results, args.runs)
    if args.command == "table":
        print("\n".join(tables(cells, found, args.against, args.details)))
    else:
        drawn = args.methods.split(",") if args.methods else [*dict.fromkeys(c["method"] for c in cells.values())]
        draw(cells, found, drawn, args.out)


if __name__ == "__main__":
    main()
