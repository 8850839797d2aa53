"""Draws the tokens that a run clipped, and those that a fixed range would have clipped, from `--bapo.dump_tokens`."""

import argparse
import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_bapo.flags.input_files import warn
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.offpolicy.offpolicy_metrics import STALENESS_BUCKETS

FIXED = (0.8, 1.2)
"""The fixed range that a run is compared with: PPO's."""

RATIO_EDGES = (0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.01, 1.1, 1.2, 1.5, 2, 3, np.inf)
"""Edges of the bins of the importance ratio; a bin includes its lower edge."""

SIGNS = {"positive": 1, "negative": -1}

QUADRANTS = tuple(f"{height} probability, {fate}" for fate in ("trained", "left out") for height in ("high", "low"))

FATES = ("kept by both", "gained: only the fixed range clips", "lost: only the run clips", "clipped by both")

# The columns that are read.
_COLUMNS = (
    "global_step ratio probability entropy advantage weight rule_weight clipped dual_clipped clip_low clip_high "
    "staleness optimizer_steps"
).split()
_OPTIONAL = {"weight": 1.0, "rule_weight": np.nan}  # the value that stands for a column that a file does not have


def read_tokens(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Read the tokens that a run has dumped, one array per column; with `step`, only those of this global step.

    If several runs have dumped into the folder, the newest counts, and a line on stderr says so.
    """
    import pyarrow
    from pyarrow import parquet

    files = {file: int(file.stem.split("_")[1]) for file in sorted(run.rglob("tokens/step_[0-9]*_rank*.parquet"))}
    if not files:
        raise FlagError(f"RUN {run}: has no tokens/step_*_rank*.parquet; train with --bapo.dump_tokens N")
    if len(folders := dict.fromkeys(str(file.parent.parent) for file in files)) > 1:
        raise FlagError(f"RUN {run}: has the tokens of {len(folders)} runs; allowed: one of {', '.join(folders)}")
    newest = _of_newest_run(files)
    if len(newest) < len(files):
        earlier = "an earlier run, or of steps before a resume from an earlier checkpoint"
        warn(f"{run}: {len(files) - len(newest)} of {len(files)} token files are of {earlier}, and are left out")
    files = {file: files[file] for file in newest}
    if step is not None and step not in files.values():
        raise FlagError(f"--step {step}: allowed: one of {', '.join(map(str, files.values()))}, the dumped steps")
    tables = []
    for file, of_step in files.items():
        if step in (None, of_step):
            table = _read(parquet.read_table, file)
            for name in _OPTIONAL.keys() - table.column_names:
                table = table.append_column(name, pyarrow.array(np.full(len(table), _OPTIONAL[name], np.float32)))
            if missing := [name for name in _COLUMNS if name not in table.column_names]:
                raise FlagError(f"{file}: has no column {', '.join(missing)}; allowed: --bapo.dump_tokens' files")
            tables.append(table.select(_COLUMNS))
    table = pyarrow.concat_tables(tables)
    return {name: table[name].to_numpy() for name in _COLUMNS}


def _of_newest_run(files: dict[Path, int]) -> list[Path]:
    """Return the files of the newest run: those of the last process that began at the first step, or after it.

    `files` are the steps by file. A process that resumes the run goes on from its first step: files of later steps from
    before that do not count.
    """
    from pyarrow import parquet

    began: dict[Path, float] = {}
    first_steps: dict[float, int] = {}
    for file in files:
        metadata = _read(parquet.read_schema, file).metadata or {}
        began[file] = float(metadata.get(b"began", 0))
        first_steps[began[file]] = int(metadata.get(b"first_step", 1))
    newest = max(time for time, first in first_steps.items() if first == min(first_steps.values()))
    return [
        file
        for file, time in began.items()
        if time >= newest and not any(later > time and files[file] >= first for later, first in first_steps.items())
    ]


def _read(read: Callable[[Path], Any], file: Path) -> Any:
    import pyarrow

    try:
        return read(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise FlagError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None


def by_sign(tokens: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Split the tokens by the sign of their advantage, and add their fate under the run's range and the fixed one.

    The column "fate" is an index into `FATES`, and "quadrant" into `QUADRANTS`. "entropy_change" is the token's part in
    the change of entropy that the Entropy-Clip Rule predicts (rules/entropy_rule.py), per unit of learning rate, at
    w = r, or at the weight of a rule that gives weights. A token of weight 0 is not trained on, whatever the ranges.
    Dual clip counts in both ranges, since a run with a fixed range would use it too. Tokens with advantage 0, or
    without a finite ratio and entropy, are left out.
    """
    # Compare in the precision of the ratio, as the loss does.
    ratio, advantage = tokens["ratio"], tokens["advantage"]
    beyond = np.where(advantage > 0, ratio > FIXED[1], ratio < FIXED[0])
    ours, fixed = tokens["clipped"] | tokens["dual_clipped"], beyond | tokens["dual_clipped"]
    tokens = tokens | {"fate": np.select([~ours & ~fixed, ~ours & fixed, ours & ~fixed], [0, 1, 2], 3)}
    is_finite = np.isfinite(ratio) & np.isfinite(tokens["entropy"])
    m = np.where(is_finite, tokens["weight"], 0).astype(float)
    r = np.where(is_finite, ratio, 0).astype(float)
    log_prob = np.log(np.where(is_finite, tokens["probability"], 1).astype(float).clip(1e-38))
    # Each global step has its own mean of log pi, over samples of pi.
    step = np.unique(tokens["global_step"], return_inverse=True)[1]
    height = log_prob - (np.bincount(step, m * r * log_prob) / np.bincount(step, m * r).clip(1e-38))[step]
    w = np.where(np.isnan(tokens["rule_weight"]), 1, tokens["rule_weight"])
    is_left_out = ours | (tokens["weight"] * w == 0)
    tokens["quadrant"] = 2 * is_left_out + (height < 0)
    factor = np.where(np.isnan(tokens["rule_weight"]) | (w == 0), r, w)
    tokens["entropy_change"] = -m * factor * advantage * height / m.sum().clip(1e-38)
    tokens["weight"] = tokens["weight"] * w
    signs = {name: is_finite & (sign * advantage > 0) for name, sign in SIGNS.items()}
    return {name: {column: values[chosen] for column, values in tokens.items()} for name, chosen in signs.items()}


def measure(signs: dict[str, dict[str, np.ndarray]]) -> list[dict]:
    """Compute the numbers behind the picture: tokens of `by_sign` by bin of the ratio and by fate.

    Returns:
        Rows with "sign", "by" ("ratio", "fate", "quadrant" or "staleness"), "group" (the bin as LOW-HIGH, or a name in
        `FATES`, `QUADRANTS` or `STALENESS_BUCKETS`), "num_tokens", "fraction" (of the sign's tokens), the means
        "entropy" (nats), "probability" and "weight", "entropy_error" (standard error), and the sum "entropy_change".
        The means of a group without tokens are NaN, and so is the error of a group with fewer than two.
    """
    rows = []
    for sign, tokens in signs.items():
        bins = np.digitize(tokens["ratio"], np.array(RATIO_EDGES, dtype=tokens["ratio"].dtype)) - 1
        labels = [f"{low:g}-{high:g}" for low, high in itertools.pairwise(RATIO_EDGES)]
        for by, index, groups in (
            ("ratio", bins, labels),
            ("fate", tokens["fate"], FATES),
            ("quadrant", tokens["quadrant"], QUADRANTS),
            ("staleness", np.digitize(tokens["staleness"], list(STALENESS_BUCKETS.values())) - 1, STALENESS_BUCKETS),
        ):
            for place, group in enumerate(groups):
                chosen = {name: values[index == place] for name, values in tokens.items()}
                entropy, num = chosen["entropy"].astype(float), len(chosen["entropy"])
                row = {"sign": sign, "by": by, "group": group, "num_tokens": num, "fraction": num / max(len(index), 1)}
                row["entropy"] = entropy.mean() if num else np.nan
                row["entropy_error"] = entropy.std(ddof=1) / num**0.5 if num > 1 else np.nan
                row |= {
                    name: chosen[name].astype(float).mean() if num else np.nan for name in ("probability", "weight")
                }
                rows.append(row | {"entropy_change": chosen["entropy_change"].sum()})
    return rows


def draw(tokens: dict[str, np.ndarray], output: Path) -> None:
    """Write the picture of the tokens of `read_tokens` as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    signs = by_sign(tokens)
    rows = measure(signs)
    places: list[Any] = [["positive", "negative"], ["ratio", "fate"], ["quadrant", "quadrant"]]
    if any((of_sign["weight"] != 1).any() for of_sign in signs.values()):
        places.append(["staleness", "staleness"])
    figure, axes = pyplot.subplot_mosaic(places, figsize=(11, 4 * len(places)), layout="constrained")
    least = min(0.1, *(float(of_sign["probability"].min(initial=1)) for of_sign in signs.values()))
    for sign, of_sign in signs.items():
        _draw_density(axes[sign], sign, of_sign, max(least, 1e-6))
    draw_rows = {"ratio": _draw_entropy, "fate": _draw_fates, "quadrant": _draw_quadrants, "staleness": _draw_weights}
    for by in axes.keys() & draw_rows.keys():
        draw_rows[by](axes[by], [row for row in rows if row["by"] == by])
    figure.supxlabel(_caption(tokens, signs), fontsize="small", x=0.01, ha="left")
    figure.savefig(output, dpi=90, format="png")
    pyplot.close(figure)


def _draw_density(axis: Any, sign: str, tokens: dict[str, np.ndarray], least: float) -> None:
    """Draw probability against importance ratio, with the bound that clips this sign."""
    from matplotlib.colors import ListedColormap

    low, high = 1 / 8, 8
    # Values beyond the axes are drawn at their edges.
    ratio, probability = tokens["ratio"].clip(low, high), tokens["probability"].clip(least, 1)
    if num_tokens := len(ratio):
        extent = [np.log10(edge) for edge in (low, high, least, 1)]
        grays = ListedColormap([str(shade) for shade in np.linspace(0.75, 0, 256)])  # darker than the band
        density = axis.hexbin(
            ratio, probability, gridsize=(44, 26), xscale="log", yscale="log", bins="log", extent=extent, cmap=grays
        )
        axis.figure.colorbar(density, ax=axis, label="tokens")
    bound = tokens["clip_high" if sign == "positive" else "clip_low"]
    bound = bound[np.isfinite(bound) & (bound > 0)]  # others never clip
    if len(bound):
        lowest, median, highest = bound.min(), np.median(bound), bound.max()
        label = f"the run's bound, {median:.2f}" + (f" ({lowest:.2f} to {highest:.2f})" if lowest < highest else "")
        axis.axvline(median, color="tab:red", linewidth=2, label=label)
        axis.axvspan(lowest, highest, color="tab:red", alpha=0.15, linewidth=0, zorder=0)
    fixed, side = (FIXED[1], "right") if sign == "positive" else (FIXED[0], "left")
    axis.axvline(fixed, color="black", linestyle="--", linewidth=1.2, label=f"fixed {fixed:g}")
    axis.set(
        title=f"{num_tokens:,} tokens with a {sign} advantage",
        xlabel=f"importance ratio (clipped {side} of the bound)",
        ylabel="probability under the current policy",
    )
    axis.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axis.minorticks_off()
    axis.legend(fontsize="small", loc="lower left")


def _draw_entropy(axis: Any, rows: list[dict]) -> None:
    """Draw the mean entropy by bin of the ratio, with its standard error."""
    labels = list(dict.fromkeys(row["group"] for row in rows))
    for sign, style, shift in (("positive", "o-", -0.08), ("negative", "s--", 0.08)):
        means, errors = ([row[name] for row in rows if row["sign"] == sign] for name in ("entropy", "entropy_error"))
        fill = {"color": "black"} if sign == "positive" else {"color": "tab:orange", "markerfacecolor": "white"}
        places = np.arange(len(labels)) + shift
        axis.errorbar(places, means, errors, fmt=style, capsize=2, linewidth=1.2, label=f"{sign} advantage", **fill)
    for bound in FIXED:
        axis.axvline(RATIO_EDGES.index(bound) - 0.5, color="black", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(labels)), [label.replace("-inf", " and above") for label in labels])
    axis.tick_params(axis="x", labelsize="small", labelrotation=60)
    axis.set(
        title="entropy of the policy where the token was chosen",
        xlabel=f"importance ratio (dotted: {FIXED[0]:g} and {FIXED[1]:g})",
        ylabel="mean entropy (nats), with its standard error",
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _draw_bars(axis: Any, left: Any, heights: list[float], texts: list[str], width: float, **style: str) -> None:
    bars = axis.bar(left, heights, width * 0.92, edgecolor="black", linewidth=0.8, **style)
    axis.bar_label(bars, texts, fontsize="small", padding=2)


def _num_tokens(rows: list[dict]) -> list[str]:
    return [f"{row['num_tokens']:,}" for row in rows]


def _draw_fates(axis: Any, rows: list[dict]) -> None:
    """Draw the fate of the tokens that either range clips, in percent of all tokens of their sign."""
    width, names = 0.27, list(SIGNS)
    looks = zip(FATES[1:], ("//", "..", ""), ("white", "0.85", "0.4"), strict=True)
    for place, (fate, hatch, color) in enumerate(looks):
        of_fate = [row for sign in names for row in rows if (row["sign"], row["group"]) == (sign, fate)]
        left = np.arange(len(names)) + (place - 1) * width
        percents = [100 * row["fraction"] for row in of_fate]
        texts = [f"{row['num_tokens']:,}" + f"\nH {row['entropy']:.2f}" * (row["num_tokens"] > 0) for row in of_fate]
        _draw_bars(axis, left, percents, texts, width, label=fate, hatch=hatch, color=color)
    kept = [row for sign in names for row in rows if (row["sign"], row["group"]) == (sign, FATES[0])]
    texts = [f"{row['sign']} advantage\nkept by both: {row['fraction']:.1%}\nH {row['entropy']:.2f}" for row in kept]
    axis.set_xticks(range(len(names)), texts)
    axis.margins(y=0.25)
    axis.set(title=f"against a fixed [{FIXED[0]:g}, {FIXED[1]:g}]", ylabel="% of the tokens of that sign")
    axis.legend(fontsize="small")


def _draw_quadrants(axis: Any, rows: list[dict]) -> None:
    """Draw the change of entropy that each quadrant of the Entropy-Clip Rule predicts: trained on, and left out."""
    heights, width = ("high", "low"), 0.4
    for place, (fate, color) in enumerate((("trained", "0.4"), ("left out", "white"))):
        of_fate = [row for row in rows if row["group"].endswith(fate)]
        left, changes = np.arange(len(of_fate)) + (place - 0.5) * width, [row["entropy_change"] for row in of_fate]
        label = {"trained": "tokens trained on", "left out": "tokens left out, as if trained on"}[fate]
        _draw_bars(axis, left, changes, _num_tokens(of_fate), width, label=label, color=color)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(
        range(len(SIGNS) * len(heights)),
        [f"{sign} advantage,\n{height} probability" for sign in SIGNS for height in heights],
    )
    predicted = sum(row["entropy_change"] for row in rows if row["group"].endswith("trained"))
    axis.margins(y=0.15)
    axis.set(
        title=f"predicted change of entropy by quadrant; {predicted:+.3g} over all tokens trained on",
        ylabel="nats per unit of learning rate",
    )
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small")


def _draw_weights(axis: Any, rows: list[dict]) -> None:
    """Draw the mean weight of the tokens of each sign by their staleness."""
    labels, width = list(STALENESS_BUCKETS), 0.4
    for place, (sign, color) in enumerate(zip(SIGNS, ("0.4", "white"), strict=True)):
        of_sign = [row for row in rows if row["sign"] == sign and row["num_tokens"]]
        left = [labels.index(row["group"]) + (place - 0.5) * width for row in of_sign]
        weights = [row["weight"] for row in of_sign]
        _draw_bars(axis, left, weights, _num_tokens(of_sign), width, label=f"{sign} advantage", color=color)
    axis.axhline(1, color="black", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(labels)), labels)
    axis.margins(y=0.15)
    axis.set(
        title="weight of the loss: --offpolicy.weight, IS correction, or the rule's",
        xlabel="staleness (versions)",
        ylabel="mean weight",
    )
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small")


def _caption(tokens: dict[str, np.ndarray], signs: dict[str, dict[str, np.ndarray]]) -> str:
    steps = np.unique(tokens["global_step"])
    span = f"global step {steps[0]}" if len(steps) == 1 else f"{len(steps)} global steps, {steps[0]} to {steps[-1]}"
    num_tokens, drawn = len(tokens["ratio"]), sum(len(of_sign["ratio"]) for of_sign in signs.values())
    versions, optimizer_steps = (tokens[name].max() for name in ("staleness", "optimizer_steps"))
    return (
        f"{num_tokens:,} sampled tokens of {span}; {num_tokens - drawn:,} without an advantage, or without a finite "
        f"ratio and entropy, are left out. Staleness: up to\n{versions} versions, {optimizer_steps} optimizer steps. "
        "Band: the range of the bounds of all updates; each token is compared with the bounds of its update. H: mean\n"
        "entropy in nats. A point without an error bar is one token. After the paper's Figures 5 (section 3) and "
        "10 (section 4.3; arXiv 2510.18927), from this run's tokens;\nbins, errors and the comparison are ours. Below: "
        "the paper's Eq. 6 (section 3) and Table 4; high and low are log-probs above and below their mean.\n"
        "Numbers at the bars: tokens."
    )


def main(argv: list[str]) -> None:
    """Draw, and print the path of the picture."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo tokens", description=__doc__)
    parser.error = exit_with_one_line
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or its --logger.tensorboard_dir")
    parser.add_argument("-o", "--output", type=Path, help="path of the PNG (default: tokens.png in RUN)")
    parser.add_argument("--step", type=int, help="draw only the tokens of this global step")
    parser.add_argument("--csv", type=Path, help="also write the numbers behind the picture to this file")
    args = parser.parse_args(argv)
    output = args.output or args.run / "tokens.png"
    try:
        tokens = read_tokens(args.run, args.step)
        draw(tokens, output)
        if args.csv:
            _write_csv(measure(by_sign(tokens)), args.csv)
    except FlagError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: cannot be written ({error.strerror}); allowed: a file's path")
    print(output)


def _write_csv(rows: list[dict], file: Path) -> None:
    with open(file, "w", newline="") as output:
        writer = csv.DictWriter(output, rows[0])
        writer.writeheader()
        writer.writerows(rows)
