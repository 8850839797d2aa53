"""Draws curves of runs from their TensorBoard logs: reward, entropy, gradient norm, clip bounds, shares, staleness."""

import argparse
import csv
import math
from itertools import cycle
from pathlib import Path

from openrlhf_bapo.flags.input_files import warn
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.offpolicy.offpolicy_metrics import STALENESS_BUCKETS
from openrlhf_bapo.rules.entropy_rule import QUADRANTS


def _quadrant(name: str) -> tuple[str, dict[str, str | None]]:
    sign, height = name.split("_")
    title = f"predicted for tokens with A {'>' if sign == 'positive' else '<'} 0 and a {height} probability"
    return title, {f"train/entropy/{name}_trained": "trained on", f"train/entropy/{name}_left_out": "left out"}


# (title, {tag: label}). Panels without data are left out, so runs without BAPO can be drawn too.
_PANELS: list[tuple[str, dict[str, str | None]]] = [
    ("reward of the rollouts", {"train/rollout/reward_mean": None}),
    ("held-out accuracy", {}),  # the tags depend on the data: all eval/*_pass1
    ("entropy of the policy (nats per token)", {"train/entropy_loss": None}),
    ("predicted change of entropy, per unit of learning rate", {"train/entropy/predicted_change": None}),
    *map(_quadrant, QUADRANTS),
    ("gradient norm", {"train/actor_grad_norm": None}),
    ("clip bounds (importance ratio)", {"train/bapo/clip_high": "upper", "train/bapo/clip_low": "lower"}),
    (
        "positive share of the objective",
        {"train/bapo/initial_share": "before the search", "train/bapo/positive_share": "at the bounds"},
    ),
    ("positive tokens (fraction)", {"train/bapo/positive_token_frac": None}),
    (
        "clipped tokens (fraction)",
        {"train/bapo/clip_frac_positive": "advantage > 0", "train/bapo/clip_frac_negative": "advantage < 0"},
    ),
    (
        "response length (tokens)",
        {
            "train/rollout/response_length_positive_mean": "advantage > 0",
            "train/rollout/response_length_negative_mean": "advantage < 0",
        },
    ),
    (
        "staleness of the tokens (versions)",
        {"train/offpolicy/staleness_max": "maximum", "train/offpolicy/staleness_mean": "mean"},
    ),
    (
        "staleness of the tokens (optimizer steps)",
        {"train/offpolicy/optimizer_steps_max": "maximum", "train/offpolicy/optimizer_steps_mean": "mean"},
    ),
    (
        "effective sample size of the ratios (fraction)",
        {f"train/offpolicy/ess/staleness_{label}": f"staleness {label}" for label in STALENESS_BUCKETS},
    ),
    (
        "weight of the tokens with advantage < 0",
        {
            "train/offpolicy/weight_negative": "mean tapered weight",
            "train/bapo/negative_weight": "factor that balances the weights",
        },
    ),
    ("tokens that IS correction caps or leaves out (fraction)", {"train/is_filter_ratio": None}),
]

# Names of the same metrics in TRL and verl. OpenRLHF also logs train/reward, beside the metric that is drawn.
_ELSEWHERE = {
    "train/reward": "train/rollout/reward_mean",
    "train/entropy": "train/entropy_loss",
    "train/reward_std": "train/rollout/reward_std",
    "train/grad_norm": "train/actor_grad_norm",
    "critic/score/mean": "train/rollout/reward_mean",
    "actor/entropy": "train/entropy_loss",
    "actor/entropy_loss": "train/entropy_loss",  # all that bypass_mode logs, with actor.calculate_entropy
    "actor/grad_norm": "train/actor_grad_norm",
}


_LINE_STYLES = ("-", "--", ":", "-.")


Scalars = dict[str, tuple[list[int], list[float]]]
"""Steps and values by tag."""


def read_scalars(directory: Path) -> Scalars:
    """Read all scalars of the newest run under a directory, as `read_runs`."""
    return read_runs(directory)[-1][1]


def read_runs(directory: Path) -> list[tuple[Path, Scalars]]:
    """Read all scalars of the event files under a directory, by OpenRLHF's names.

    Several runs may have logged to one directory. A run that is resumed starts a file after the first step of the
    run's other files, and goes on from its checkpoint: values of later steps from before that do not count. A file that
    starts at the first step again is of another run.

    Returns:
        (folder of the first file, scalars) of each run, the newest last; FileNotFoundError if there is none.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = []
    for file in directory.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        if logged := {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}:
            files.append((min(events[0].wall_time for events in logged.values()), file, logged))
    runs: list[tuple[Path, dict[str, dict[int, tuple[float, float]]]]] = []
    for began, file, logged in sorted(files, key=lambda found: found[:2]):
        steps = {tag: {each.step: (each.wall_time, each.value) for each in events} for tag, events in logged.items()}
        if (run := _continued(steps, [run for _, run in runs])) is None:
            runs.append((file.parent, run := {}))
        first = min((min(steps[tag]) for tag in _of_training(steps.keys() & run.keys())), default=math.inf)
        for tag, known in list(run.items()):
            run[tag] = {step: found for step, found in known.items() if step < first or found[0] >= began}
            if not run[tag]:
                del run[tag]
        for tag, by_step in steps.items():
            known = run.setdefault(tag, {})
            known |= {step: found for step, found in by_step.items() if step not in known or found[0] >= known[step][0]}
    if not runs:
        raise FileNotFoundError(f"no TensorBoard scalars under {directory}")
    return [(folder, _by_openrlhfs_names(run)) for folder, run in runs]


def _continued(steps: dict, runs: list[dict]) -> dict | None:
    """Return the run that a file goes on with: a run that has reached the file's first step, else the newest."""
    found = []
    for place, run in enumerate(runs):
        common = steps.keys() & run.keys()
        common = _of_training(common) or common
        first, start, end = (
            edge(edge(of[tag]) for tag in common) if common else 0
            for edge, of in ((min, steps), (min, run), (max, run))
        )
        if not common or first > start:
            found.append((end + 1 >= first, place, run))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _of_training(tags: set[str]) -> set[str]:
    # Evaluations may be logged before the first step.
    return {tag for tag in tags if not tag.startswith(("eval/", "val"))}


def _by_openrlhfs_names(by_step: dict[str, dict[int, tuple[float, float]]]) -> Scalars:
    scalars = {tag: (sorted(logged), [logged[step][1] for step in sorted(logged)]) for tag, logged in by_step.items()}
    of_verl = [tag for tag in scalars if tag.startswith(("actor/bapo/", "actor/entropy/", "actor/offpolicy/"))]
    names = _ELSEWHERE | {tag: tag.replace("actor", "train", 1) for tag in of_verl}
    for name, ours in names.items():
        if name in scalars and ours not in scalars:
            scalars[ours] = scalars.pop(name)
    return scalars


def read_newest(directory: Path, done: str) -> Scalars:
    """Read the newest run under a directory; if there are others, a line says that only the newest is `done`."""
    *others, (folder, scalars) = read_runs(directory)
    if others:
        newest = f"only the newest is {done}, which began in {folder}"
        names = ", ".join(dict.fromkeys(str(other) for other, _ in others))
        warn(f"{directory}: has {len(others) + 1} runs; {newest}; the others began in {names}")
    return scalars


def draw(groups: dict[str, list[dict]], target: float | None, output: Path) -> None:
    """Write the curves as a PNG. A group of several runs is their mean, in a band from the lowest to the highest.

    `groups` are the scalars of `read_newest` by label. The search's target share becomes a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels_with_data(groups)
    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    # Colors from dark to light, and markers, so that groups differ in gray too.
    colors = pyplot.get_cmap("viridis")([i / max(len(groups), 2) for i in range(len(groups))])
    for axis, (title, tags) in zip(axes.flat, panels, strict=False):
        for place, (tag, tag_label) in enumerate(tags.items()):
            for (label, runs), color, marker in zip(groups.items(), colors, cycle("os^Dv*Px"), strict=False):
                if not (curves := [scalars[tag] for scalars in runs if tag in scalars]):
                    continue
                steps, mean, lowest, highest = _over_runs(curves)
                style = {"marker": marker, "markersize": 4, "markevery": max(1, len(steps) // 12)}
                if len(groups) > 1:
                    style |= {"color": color, "linestyle": _LINE_STYLES[place % len(_LINE_STYLES)]}
                elif len(steps) >= 25:
                    style = {}
                parts = [label] * (len(groups) > 1) + ([] if tag_label is None else [tag_label])
                (line,) = axis.plot(steps, mean, linewidth=1.2, label=", ".join(parts) or None, **style)
                if len(curves) > 1:
                    axis.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
        if "share" in title and target is not None:
            axis.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
        if "bounds" in title:
            axis.axhline(1.0, color="gray", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="global step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    figure.savefig(output, dpi=120, format="png")
    pyplot.close(figure)


def _panels_with_data(groups: dict[str, list[dict]]) -> list[tuple[str, dict[str, str | None]]]:
    logged = {tag: None for runs in groups.values() for scalars in runs for tag in scalars}
    panels = [(title, dict(tags)) for title, tags in _PANELS]
    panels[1][1].update({tag: None for tag in logged if tag.startswith("eval/") and tag.endswith("_pass1")})
    panels = [(title, {tag: label for tag, label in tags.items() if tag in logged}) for title, tags in panels]
    panels = [(title, tags) for title, tags in panels if tags]
    if not panels:
        shown = ", ".join(sorted(logged)[:3])
        raise FlagError(f"the logs have no metric that is drawn (they have {shown}, ...); allowed: a training")
    return panels


def _over_runs(curves: list[tuple[list[int], list[float]]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return (steps that all runs have, mean, lowest, highest)."""
    by_step = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, by_step)))
    values = [[values[step] for values in by_step] for step in steps]
    return steps, [sum(v) / len(v) for v in values], list(map(min, values)), list(map(max, values))


def _warn_of_fewer_runs(label: str, runs: list[Scalars], drawn: list[str]) -> None:
    """Say which steps the means of several runs leave out, and which of the `drawn` tags only some of the runs have."""
    *_, last = ends = sorted(max(steps[-1] for steps, _ in scalars.values()) for scalars in runs)
    if ends[0] < last:
        warn(f"{label}: its {len(runs)} runs end at steps {', '.join(map(str, ends))}; the mean ends at {ends[0]}")
    curves = {tag: [set(scalars[tag][0]) for scalars in runs if tag in scalars] for tag in drawn}
    logged = {tag: steps for tag, steps in curves.items() if steps}
    if some := [tag for tag, steps in logged.items() if len(steps) < len(runs)]:
        warn(f"{label}: not all of its {len(runs)} runs have {', '.join(some)}; the mean is of those that have it")
    missing = {tag: steps[0].union(*steps) - steps[0].intersection(*steps) for tag, steps in logged.items()}
    left_out = {tag: sum(step <= ends[0] for step in steps) for tag, steps in missing.items()}
    if most := max(left_out.values(), default=0):
        tags = ", ".join(tag for tag, num in left_out.items() if num == most)
        warn(f"{label}: the mean leaves out up to {most} other steps, which not all of its runs have (of {tags})")


def _write_csv(groups: dict[str, list[dict]], file: Path) -> None:
    """Write one row per logged number: label, index of the run in its label, tag, global step, value."""
    with open(file, "w", newline="") as output:
        rows = csv.writer(output)
        rows.writerow(["label", "run", "tag", "step", "value"])
        for label, runs in groups.items():
            for run, scalars in enumerate(runs):
                for tag, curve in scalars.items():
                    rows.writerows([label, run, tag, step, value] for step, value in zip(*curve, strict=True))


def _folder_name(folder: str) -> str:
    path = Path(folder).absolute()
    return (path.parent if path.name == "tensorboard" else path).name


def main(argv: list[str]) -> None:
    """Draw, and print the path of the picture."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo plot", description=__doc__)
    parser.error = exit_with_one_line
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[LABEL=]RUN",
        help="folder of a run, or its --logger.tensorboard_dir; runs of one label, such as seeds, become one line",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="path of the PNG")
    parser.add_argument("--target", type=float, help="target of the positive share, drawn as a line")
    parser.add_argument("--csv", type=Path, help="also write all logged numbers to this file")
    args = parser.parse_args(argv)
    parts = [run.rpartition("=") if not Path(run).exists() else ("", "", run) for run in args.runs]
    names = [label or _folder_name(folder) for label, _, folder in parts]
    groups: dict[str, list[dict]] = {}
    for run, name, (label, _, folder) in zip(args.runs, names, parts, strict=True):
        try:
            scalars = read_newest(Path(folder), "drawn")
        except FileNotFoundError as error:
            parser.error(f"RUN {run}: {error}; allowed: a folder with events.out.tfevents files")
        # Only a label makes runs one line: folders of one name may be of several methods.
        groups.setdefault(label or (name if names.count(name) == 1 else folder), []).append(scalars)
    try:
        drawn = [tag for _, tags in _panels_with_data(groups) for tag in tags]
        for label, runs in groups.items():
            _warn_of_fewer_runs(label, runs, drawn)
        draw(groups, args.target, args.output)
        if args.csv:
            _write_csv(groups, args.csv)
    except FlagError as error:
        parser.error(f"RUN {' '.join(args.runs)}: {error}")
    except OSError as error:
        parser.error(f"{error.filename}: cannot be written ({error.strerror}); allowed: a file's path")
    print(args.output)
