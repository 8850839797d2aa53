"""The wide study: many runs of walk.py, declared in study.toml; each cell leaves one CSV and is never run twice.

python studies/late_data/study.py run [--cells 'walk-lag8-*'] [--jobs 2]
python studies/late_data/study.py table [--cells PATTERN] [--against ppo] [--details]
python studies/late_data/study.py draw [--cells PATTERN] [--methods ppo,gradient_steady] [--out study.png]
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

import tomllib

HERE = Path(__file__).parent
AXES = ("task", "lag", "updates", "lr", "method", "seed")  # of the file's blocks; a cell has one value of each
LAST = 20  # rollouts that a run is judged by
DETAILS = (
    "entropy",
    "share_unclipped",
    "share",
    "lower",
    "upper",
    "clip_positive",
    "clip_negative",
    "ess",
    "grad_norm",
)


def read_cells(file: Path, pattern: str) -> dict[str, dict]:
    """Name of each cell to its settings, in the order in which they are run: by block, then by seed.

    Raises:
        ValueError: for a method that the file does not define.
    """
    study = tomllib.loads(file.read_text())
    cells = {}
    for block in study["block"]:
        if unknown := set(block["method"]) - set(study["methods"]):
            raise ValueError(f"{file}: method {', '.join(sorted(unknown))} is not among {', '.join(study['methods'])}")
        for seed, *rest in itertools.product(block["seed"], *(block[axis] for axis in AXES[:-1])):
            cell = dict(zip(AXES, (*rest, seed), strict=True)) | {"then": block.get("then", "")}
            change = f"-then{cell['then']}" if cell["then"] else ""
            name = "{task}-lag{lag}-updates{updates}-lr{lr:g}{}-{method}-seed{seed}".format(change, **cell)
            if fnmatch(name, pattern):
                cells[name] = cell | {"flags": study["methods"][cell["method"]]}
    return cells


def command(cell: dict, out: Path) -> list[str]:
    """The command that runs one cell."""
    flags = {name: value for name, value in cell.items() if name not in ("method", "flags") and value != ""}
    flags |= cell["flags"] | {"out": out}
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
    script = "through_pipeline.py" if cell["task"].startswith("pipeline") else "other_tasks.py"
    return [sys.executable, str(HERE / script), *itertools.chain(*words)]


def start_of(cell: dict) -> Path:
    """Where walk.py keeps the start policy of this cell."""
    return Path("runs/late_data/starts", f"{cell['task']}-seed{cell['seed']}.pt")


def run(cells: dict[str, dict], results: Path, jobs: int) -> int:
    """Run what has no result yet; returns how many failed."""
    results.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(results, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{results} is in use by another run")
    os.nice(19)
    waiting = [name for name in cells if not (results / f"{name}.csv").exists()]
    total, finished, failed, began = len(waiting), 0, 0, time.monotonic()
    print(f"{total} of {len(cells)} cells to run", flush=True)
    running: dict[str, tuple[subprocess.Popen, float]] = {}  # and when each began
    stopped: list[int] = []  # an exception could come between a process's start and its place in `running`
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    try:
        while (waiting or running) and not stopped:
            # Two runs that share a start policy must not both make it.
            busy = {start_of(cells[name]) for name in running}
            ready = [name for name in waiting if start_of(cells[name]).exists() or start_of(cells[name]) not in busy]
            if ready and len(running) < jobs:
                waiting.remove(ready[0])
                words = command(cells[ready[0]], results / f"{ready[0]}.part")
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
                    (results / f"{name}.part").rename(results / f"{name}.csv")
                    outcome = f"reward {summary(results / f'{name}.csv')['reward']:.3f}"
                left = (time.monotonic() - began) / finished * (total - finished)
                print(f"[{finished}/{total}] {name} {outcome} in {seconds:.0f} s, {left / 60:.0f} min left", flush=True)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
    if stopped:
        sys.exit("stopped")
    return failed


def summary(file: Path) -> dict[str, float | tuple]:
    """Means over a run's last rollouts, the accuracies at its end, and how it began, to know runs of one start by."""
    with open(file) as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    means = {name: fmean(row[name] for row in rows[-LAST:]) for name in ("reward", *DETAILS)}
    # In plain PyTorch the first rollout is a function of the start policy, and fine-tuned on another kind of processor
    # the same seed is another start policy. Through the pipeline no two first rollouts are alike.
    began = () if file.name.startswith("pipeline") else (rows[0]["reward"], rows[0]["entropy"])
    return means | {name: rows[-1].get(name, nan) for name in ("greedy", "pass1", "pass16")} | {"began": began}


def mean_and_error(values: list[float], digits: int = 3) -> str:
    """Mean, standard error and number of seeds, as a table has it; "" without a seed."""
    if not values:
        return ""
    error = f" \u00b1 {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error} ({len(values)})"


def summaries(cells: dict[str, dict], results: Path) -> dict[str, dict[float, dict[str, dict[int, dict]]]]:
    """What is there: by setting (task, lag, updates), learning rate (in order), method and seed."""
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for name, cell in cells.items():
        if (results / f"{name}.csv").exists():
            setting = f"Task {cell['task']}, lag {cell['lag']}, updates per rollout {cell['updates']}"
            setting += f", then {cell['then']}" if cell["then"] else ""
            found[setting][cell["lr"]][cell["method"]][cell["seed"]] = summary(results / f"{name}.csv")
    return {setting: dict(sorted(by_lr.items())) for setting, by_lr in found.items()}


def differences(ours: dict[int, dict], theirs: dict[int, dict]) -> list[float]:
    """Of rewards, of each seed whose two runs are of one start policy."""
    alike = [seed for seed in ours if seed in theirs and ours[seed]["began"] == theirs[seed]["began"]]
    return [ours[seed]["reward"] - theirs[seed]["reward"] for seed in alike]


def tables(cells: dict[str, dict], results: Path, against: str, details: bool) -> list[str]:
    """Markdown: reward by method and learning rate, a table for each task, lag and number of updates.

    With `against`, a method, also what it is less that method's, seed by seed: of the seeds that both have and that
    began alike. With `details` a table for each learning rate too, of everything else that was measured.
    """
    lines = []
    for setting, by_lr in summaries(cells, results).items():
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


def draw(cells: dict[str, dict], results: Path, methods: list[str], out: Path):
    """The figure of reward by learning rate, mean and standard error over seeds: a line a method, a panel a setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {setting: by_lr for setting, by_lr in summaries(cells, results).items() if len(by_lr) > 1}
    figure, (panels,) = plt.subplots(
        1, len(found), figsize=(2 + 5 * len(found), 4), squeeze=False, layout="constrained"
    )
    for panel, (setting, by_lr) in zip(panels, found.items(), strict=True):
        styles = itertools.cycle(("-o", "--s", ":^", "-.D", "-v", "--x"))  # to be told apart in grey
        for method, style in zip(methods, styles, strict=False):
            by_seed = {lr: [s["reward"] for s in by_lr[lr][method].values()] for lr in by_lr if by_lr[lr][method]}
            errors = [stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0 for v in by_seed.values()]
            means = [fmean(v) for v in by_seed.values()]
            panel.errorbar([*by_seed], means, errors, fmt=style, capsize=3, markersize=5, label=method)
        panel.set(title=setting, xscale="log", xlabel="learning rate", ylabel=f"reward of the last {LAST} rollouts")
        panel.set_xticks([*by_lr], [f"{lr:g}" for lr in by_lr])
        panel.minorticks_off()
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(out, dpi=110)
    return figure


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table", "draw"))
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="only cells whose name matches (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--against", default="", metavar="METHOD", help="table: differences from it, seed by seed")
    parser.add_argument("--methods", default="", metavar="NAME,...", help="draw: these, in this order (default: all)")
    parser.add_argument("--out", type=Path, default=Path("study.png"), help="draw: the picture (default: %(default)s)")
    parser.add_argument("--details", action="store_true", help="tables of all that was measured")
    parser.add_argument("--study", type=Path, default=HERE / "study.toml")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    cells = read_cells(args.study, args.cells)
    if not cells:
        parser.error(f"--cells {args.cells!r} matches none of the study's cells")
    if args.command == "table":
        print("\n".join(tables(cells, args.results, args.against, args.details)))
    elif args.command == "draw":
        drawn = args.methods.split(",") if args.methods else [*dict.fromkeys(c["method"] for c in cells.values())]
        draw(cells, args.results, drawn, args.out)
    elif run(cells, args.results, args.jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
