"""Draws a run's curves from its TensorBoard log: reward, entropy, gradient norm, clip bounds, shares, staleness."""

import argparse
from pathlib import Path

from openrlhf_bapo.core.offpolicy_metrics import STALENESS_BUCKETS

# (title, {tag: label}); a panel without data is left out, so that runs without BAPO can be drawn too.
_PANELS = [
    ("reward of the rollouts", {"train/rollout/reward_mean": None}),
    ("held-out accuracy", {}),  # tags depend on the data: every eval/*_pass1
    ("entropy of the policy (nats per token)", {"train/entropy_loss": None}),
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
]


def read_scalars(directory: Path) -> dict[str, tuple[list[int], list[float]]]:
    """All scalars of the event files under a directory: tag -> (steps, values).

    Raises:
        FileNotFoundError: if there is none.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = {}
    for file in sorted(directory.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            steps, values = scalars.setdefault(tag, ([], []))
            for event in events.Scalars(tag):
                steps.append(event.step)
                values.append(event.value)
    if not scalars:
        raise FileNotFoundError(f"no TensorBoard scalars under {directory}")
    return scalars


def draw(scalars: dict[str, tuple[list[int], list[float]]], target: float | None, output: Path) -> None:
    """Write the curves as a PNG.

    Args:
        scalars: as `read_scalars` gives them.
        target: the share that the search aims at, drawn as a line; None for no line.
        output: path of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(title, dict(tags)) for title, tags in _PANELS]
    panels[1][1].update({tag: None for tag in scalars if tag.startswith("eval/") and tag.endswith("_pass1")})
    panels = [(title, {tag: label for tag, label in tags.items() if tag in scalars}) for title, tags in panels]
    panels = [(title, tags) for title, tags in panels if tags]

    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, tags) in zip(axes.flat, panels, strict=False):
        for tag, label in tags.items():
            steps, values = scalars[tag]
            axis.plot(steps, values, marker="o" if len(steps) < 25 else None, markersize=4, linewidth=1.2, label=label)
        if "share" in title and target is not None:
            axis.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
        if "bounds" in title:
            axis.axhline(1.0, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="global step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main(argv: list[str]) -> None:
    """Draw and print the picture's path."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo plot", description=__doc__)
    parser.add_argument("tensorboard_dir", type=Path, help="the run's --logger.tensorboard_dir")
    parser.add_argument("output", type=Path, help="path of the PNG")
    parser.add_argument("--target", type=float, default=None, help="the run's positive contribution target")
    args = parser.parse_args(argv)
    try:
        scalars = read_scalars(args.tensorboard_dir)
    except FileNotFoundError as error:
        parser.error(str(error))
    draw(scalars, args.target, args.output)
    print(args.output)
