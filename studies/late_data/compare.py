"""The comparison that PROTOCOL.md plans, from the cells of protocol.toml.

python studies/late_data/compare.py screen   # stage 1: every rule by regime and learning rate, and which rules lead
python studies/late_data/compare.py test     # stage 2: differences from ppo with intervals, corrected for their number
python studies/late_data/compare.py overview # stage 2: regimes by rules, one number each
python studies/late_data/compare.py entropy  # the Entropy-Clip Rule's prediction beside the measured change of entropy
python studies/late_data/compare.py bounds   # mean bounds, and the positive share as Eq. 8 writes it
python studies/late_data/compare.py pipeline # the rules that ran through OpenRLHF's pipeline, described
python studies/late_data/compare.py draw     # stage 2: every difference from ppo with its interval, as a picture
python studies/late_data/compare.py pages    # writes these tables into the pages that show them, and the picture

They read finished cells from --results and --runs. `screen` leaves out, and names, every method that lacks a planned
cell of its regime. Stage 2 is not tested before all its cells are there.
"""

import argparse
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import correlation, fmean

from scipy import stats
from study import HERE, Columns, began, markdown, mean_and_error, read_cells, read_results
from walk import evenly_spaced

STAGES = {
    "screen": range(200, 205),
    "bounds": range(205, 208),
    "test": range(210, 220),
    "pipeline": range(220, 225),
}
ALWAYS_TESTED = ("ppo", "stock_is", "paper")
PAGES = [HERE / name for name in ("SCREENING.md", "TEST.md", "ENTROPY.md")] + [HERE.parents[1] / "docs" / "study.md"]
PICTURE = HERE.parents[1] / "docs" / "pictures" / "study.png"
OURS = ("steady", "balanced", "balanced_steady")
PRIMARY, OTHER_REGIMES = "primary: less ppo", "other regimes: less ppo"
OURS_AGAINST_BEST = "ours: less the best other rule of stage 1"
MARGIN = 0.01  # "never worse" allows for it
SAME_RULE = {"topr_sequence": "topr", "balanced_steady": "balanced"}
SAME_AS_IN_REGIME_A = {"stock": "ppo", "stock_is": "ppo", "decoupled": "ppo", "decoupled_paper": "paper"}


@dataclass(frozen=True)
class Outcome:
    """The endpoints of one cell."""

    accuracy: float
    """Held-out accuracy, the mean over the last fifth of the rollouts."""

    area: float
    """The mean of the evenly spaced checkpoints."""

    entropy: float
    """The mean over the last fifth of the rollouts."""

    pass16: float
    fell: bool
    """Whether the run ended below the reward of its start policy."""

    began: tuple[float, ...]
    """What tells start policies apart (study.began)."""


def outcome(name: str, columns: Columns) -> Outcome:
    """Return the endpoints of a finished cell."""
    heldout, rewards, entropy = columns["heldout"], columns["reward"], columns["entropy"]
    fifth = len(entropy) // 5
    accuracy = fmean(value for value in heldout[-fifth:] if value == value)  # the pipeline has three of them
    area = fmean(heldout[number] for number in evenly_spaced(len(heldout)))
    pass16 = columns.get("pass16", [nan])[-1]
    fell = accuracy < rewards[0]
    return Outcome(accuracy, area, fmean(entropy[-fifth:]), pass16, fell, began(name, columns))


WINDOW = 5  # rollouts
QUADRANTS = [f"{sign}_{side}" for sign in ("positive", "negative") for side in ("high", "low")]
PARTS = [f"{quadrant}_{fate}" for fate in ("trained", "left_out") for quadrant in QUADRANTS]


def predicted_and_measured(columns: Columns, window: int) -> list[tuple[float, float]]:
    """Return a run's predicted and measured changes of entropy, summed over as many rollouts as a window has.

    The updates after rollout n change the entropy between the rollouts n and n + 1.
    """
    predicted, entropy = columns["entropy/predicted_change"], columns["entropy"]
    first = next(n for n, value in enumerate(predicted) if value == value)  # training starts after the lag
    starts = range(first, len(entropy) - window, window)
    return [(sum(predicted[n : n + window]), entropy[n + window] - entropy[n]) for n in starts]


def entropy_correlation(predicted: Columns, measured: Columns, window: int) -> float:
    """Return the correlation over windows between one run's predicted and another's measured change of entropy.

    Two runs share no more than the course of training, so a run's own correlation says more only where it is higher.
    """
    changes = (predicted_and_measured(run, window) for run in (predicted, measured))
    (first, _), (_, second) = (zip(*pairs, strict=True) for pairs in changes)
    return correlation(first, second)


def entropy_lines(cells: dict[str, dict], found: dict[str, Columns]) -> list[str]:
    """Return Markdown: by stage, regime and method the correlation and the mean part of each quadrant, over all cells.

    Below each table is the correlation of the two means over its methods, without those that ran in fewer cells.
    """
    tables: dict[tuple[str, str], dict[str, dict[float, list[Columns]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for name, cell in cells.items():
        for stage, seeds in STAGES.items():
            if cell["seed"] in seeds and "entropy/predicted_change" in found.get(name, {}):
                tables[stage, regime(cell)][cell["method"]][cell["lr"]].append(found[name])
    lines = []
    for (stage, name), by_method in tables.items():
        rows, means = [], []
        most = max(sum(map(len, by_rate.values())) for by_rate in by_method.values())
        for method, by_rate in by_method.items():
            runs = [run for group in by_rate.values() for run in group]
            correlations = [[entropy_correlation(run, run, window) for run in runs] for window in (1, WINDOW)]
            pairs = itertools.chain(*(itertools.permutations(group, 2) for group in by_rate.values()))
            others = [entropy_correlation(run, other, WINDOW) for run, other in pairs]
            numbers = [fmean((run["entropy"][-1] - run["entropy"][0]) / (len(run["entropy"]) - 1) for run in runs)]
            for part in ("predicted_change", *PARTS):
                numbers.append(fmean(value for run in runs for value in run[f"entropy/{part}"] if value == value))
            control = f"{fmean(others):.3f}" if others else ""
            rows.append(
                [method, *map(mean_and_error, correlations), control, *(f"{number:+.4f}" for number in numbers)]
            )
            if len(runs) == most:
                means.append(numbers[:2])
        head = ["method", "correlation per rollout", f"per {WINDOW} rollouts", "with other seeds"]
        head += ["measured", "predicted", *PARTS]
        lines += [f"{stage}, {label(name)}", "", *markdown(head, rows)]
        if len(means) > 2:
            across = correlation(*zip(*means, strict=True))
            lines += [
                f"Over {len(means)} methods the mean measured and predicted changes correlate at {across:.2f}.",
                "",
            ]
    return lines


def bounds_lines(cells: dict[str, dict], found: dict[str, Columns]) -> list[str]:
    """Return Markdown: mean bounds and positive shares over all updates of the cells that are described, not tested.

    The share of the gradient is taken without bounds and within them. Those of Eq. 8 weigh every token by its
    probability under the behavior policy. P / (P + N) is our reading; P / |P - N| is the formula as printed.
    """
    groups: dict[tuple[str, str, float], list[Columns]] = defaultdict(list)
    for name, cell in cells.items():
        if name in found and cell["seed"] in STAGES["bounds"]:
            groups[regime(cell), cell["method"], cell["lr"]].append(found[name])
    rows = []
    for (name, method, rate), runs in groups.items():
        keys = ("lower", "upper", "share_unclipped", "share", "eq8_positive", "eq8_negative")
        *means, p, n = [fmean(v for run in runs for v in run.get(key, [nan]) if v == v) for key in keys]
        numbers = [f"{value:.3f}" for value in (*means, p / (p + n), p / abs(p - n))]
        rows.append([label(name), method, f"{rate:g}", *numbers, str(len(runs))])
    head = ["regime", "method", "rate", "lower", "upper", "share without bounds", "within bounds"]
    return markdown([*head, "Eq. 8: P / (P + N)", "P / abs(P - N)", "seeds"], rows)


def regime(cell: dict) -> str:
    """Name a cell's regime: task, lag, and what else its block sets."""
    settings = (f"{key} {value}" for key, value in cell["regime"].items())
    return " ".join([cell["task"], f"lag {cell['lag']}", *settings])


Methods = dict[str, dict[float, dict[int, Outcome]]]  # by method, learning rate and seed
Table = dict[str, Methods]  # by regime


def outcomes(cells: dict[str, dict], found: dict[str, Columns], seeds: range) -> tuple[Table, dict[str, list[str]]]:
    """Return the outcomes of the cells with these seeds, and by regime a line per method that lacks any of them."""
    planned: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, cell in cells.items():
        if cell["seed"] in seeds:
            planned[regime(cell), cell["method"]].append(name)
    table: Table = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    left_out: dict[str, list[str]] = defaultdict(list)
    for (name, method), names in planned.items():
        if missing := sum(cell not in found for cell in names):
            left_out[name].append(f"Left out: {method} in {name}, which lacks {missing} of {len(names)} cells.")
            continue
        for cell in names:
            table[name][method][cells[cell]["lr"]][cells[cell]["seed"]] = outcome(cell, found[cell])
    return {name: dict(by_method) for name, by_method in table.items()}, dict(left_out)


def mean_accuracy(by_seed: dict[int, Outcome]) -> float:
    """Return the mean of the first endpoint over seeds."""
    return fmean(outcome.accuracy for outcome in by_seed.values())


def best_rates(by_rate: dict[float, dict[int, Outcome]]) -> list[float]:
    """Return the learning rates by the first endpoint, the best first."""
    return sorted(by_rate, key=lambda rate: -mean_accuracy(by_rate[rate]))


def ranking(table: Table) -> list[tuple[str, float]]:
    """Return the methods with their mean over regimes of the first endpoint at their best rate, the best first."""
    methods = {method for by_method in table.values() for method in by_method}
    means = {}
    for method in methods:
        values = []
        for name, by_method in table.items():
            ran = method if method in by_method else SAME_AS_IN_REGIME_A.get(method)
            if "lag 0" not in name and ran != method:
                ran = None
            if ran in by_method:
                values.append(mean_accuracy(by_method[ran][best_rates(by_method[ran])[0]]))
        if len(values) == len(table):
            means[method] = fmean(values)
    return sorted(means.items(), key=lambda pair: -pair[1])


def leaders(ranked: list[tuple[str, float]], num: int = 4) -> list[str]:
    """Return the rules that stage 2 tests: the best ones, one of each kind, beside those that it tests anyway.

    If none of them is ours, the best one of ours is one more.
    """
    chosen: list[str] = []
    kinds = set(ALWAYS_TESTED)
    for method, _ in ranked:
        kind = SAME_RULE.get(method, method)
        if kind not in kinds and len(chosen) < num:
            chosen.append(method)
            kinds.add(kind)
    if not set(chosen) & set(OURS):
        chosen += [method for method, _ in ranked if method in OURS][:1]
    return [*ALWAYS_TESTED, *chosen]


@dataclass(frozen=True)
class Difference:
    """A difference of two methods' first endpoints, paired by seed."""

    mean: float
    low: float
    """Lower end of the 95% interval."""

    high: float
    p: float


def difference(ours: dict[int, Outcome], theirs: dict[int, Outcome]) -> Difference:
    """Compare two methods seed by seed, by the paired t distribution. Two methods that are equal have a p of 1.

    Raises:
        ValueError: if their seeds differ, or if a seed began from two start policies.
    """
    seeds = sorted(ours)
    if seeds != sorted(theirs) or any(ours[seed].began != theirs[seed].began for seed in seeds):
        raise ValueError("the two methods have different seeds, or a seed has two start policies")
    pairs = [[method[seed].accuracy for seed in seeds] for method in (ours, theirs)]
    if pairs[0] == pairs[1]:
        return Difference(0.0, 0.0, 0.0, 1.0)
    result = stats.ttest_rel(*pairs)
    low, high = result.confidence_interval(0.95)
    mean = fmean(a - b for a, b in zip(*pairs, strict=True))
    return Difference(mean, float(low), float(high), float(result.pvalue))


def holm(p_values: list[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down method.

    Raises:
        ValueError: for a p-value that is not a number.
    """
    if any(p != p for p in p_values):
        raise ValueError("a p-value is not a number")
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def screen_lines(table: Table) -> list[str]:
    """Return Markdown: one table of endpoints per regime."""
    lines = []
    for name, by_method in table.items():
        rates = sorted({rate for by_rate in by_method.values() for rate in by_rate})
        rows = []
        for method in sorted(by_method, key=lambda m: -max(map(mean_accuracy, by_method[m].values()))):
            best = by_method[method][best_rates(by_method[method])[0]].values()
            details = [fmean(getattr(o, key) for o in best) for key in ("area", "entropy", "pass16")]
            fell = sum(outcome.fell for outcome in best)
            cells = [mean_and_error([o.accuracy for o in by_method[method].get(rate, {}).values()]) for rate in rates]
            rows.append([method, *cells, *(f"{value:.3f}" for value in details), str(fell)])
        head = ["method", *(f"{rate:g}" for rate in rates), "area", "entropy", "pass@16", "runs that fell"]
        lines += [f"{label(name)}: held-out accuracy, mean \u00b1 standard error (seeds)", "", *markdown(head, rows)]
    return lines


def with_ppo(table: Table) -> Table:
    """Return the regimes that ppo's planned cells complete."""
    return {name: by_method for name, by_method in table.items() if "ppo" in by_method}


def pairs_lines(table: Table) -> list[str]:
    """Return Markdown: differences from ppo at the same rate and seed, of accuracy and of entropy."""
    lines = []
    for name, by_method in with_ppo(table).items():
        rates = sorted(by_method["ppo"])
        rows = []
        for method in by_method:
            pairs = []
            for rate in rates:
                ours, theirs = by_method[method].get(rate, {}), by_method["ppo"][rate]
                for key in ("accuracy", "entropy") if ours.keys() == theirs.keys() else ():
                    pairs.append(mean_and_error([getattr(ours[s], key) - getattr(theirs[s], key) for s in ours]))
            if method != "ppo" and len(pairs) == 2 * len(rates):
                rows.append([method, *pairs])
        head = ["method", *(f"{key}, {rate:g}" for rate in rates for key in ("accuracy", "entropy"))]
        lines += [
            f"{label(name)}: less ppo at the same rate, mean \u00b1 standard error (seeds)",
            "",
            *markdown(head, rows),
        ]
    return lines


def pipeline_lines(table: Table) -> list[str]:
    """Return Markdown: one table per regime of the rules that ran through the pipeline, each at one rate.

    Differences are of the seeds whose two cells have the same start policy.
    """
    lines = []
    for name, by_method in with_ppo(table).items():
        rows = []
        for method in sorted(by_method, key=lambda m: -max(map(mean_accuracy, by_method[m].values()))):
            ((rate, ours),), ((_, theirs),) = (by_method[m].items() for m in (method, "ppo"))
            alike = [seed for seed in ours.keys() & theirs.keys() if ours[seed].began == theirs[seed].began]
            less = [ours[seed].accuracy - theirs[seed].accuracy for seed in alike]
            numbers = [mean_and_error([o.accuracy for o in ours.values()]), mean_and_error(less)]
            rows.append([method, f"{rate:g}", *numbers, f"{fmean(o.entropy for o in ours.values()):.3f}"])
        head = ["method", "rate", "held-out accuracy", "less ppo, by seed", "entropy"]
        lines += [f"{label(name)}: mean \u00b1 standard error (seeds)", "", *markdown(head, rows)]
    return lines


def ranking_lines(table: Table) -> list[str]:
    """Return Markdown: the ranking of stage 1, and which rules stage 2 tests."""
    ranked = ranking(table)
    lines = ["Mean over the regimes at each one's best rate", ""]
    lines += markdown(["method", "accuracy"], [[method, f"{mean:.3f}"] for method, mean in ranked])
    return [*lines, f"Stage 2 tests {', '.join(leaders(ranked))}."]


def screened_regime(screened: Table, name: str) -> str:
    """Return the regime of stage 1 that chooses for a regime of stage 2: a where there are several epochs, else b."""
    (chosen,) = [regime for regime in screened if ("epochs" in regime) == ("epochs" in name)]
    return chosen


def rate(table: Table, screened: Table, name: str, method: str) -> float:
    """Return the rate at which stage 2 compares a method in a regime.

    In the regimes of stage 1 that is the method's best rate there. In any other regime all methods have one rate.
    """
    if name in screened:
        return best_rates(screened[name][method])[0]
    (only,) = {rate for by_rate in table[name].values() for rate in by_rate}
    return only


def best_other(screened: Table, name: str, among: Collection[str]) -> str:
    """Return the method, of those in `among`, that stage 1 found best for a regime of stage 2."""
    by_method = screened[screened_regime(screened, name)]
    return max(by_method.keys() & set(among), key=lambda m: mean_accuracy(by_method[m][best_rates(by_method[m])[0]]))


Comparison = tuple[str, str, str]  # regime, method, the method that it is compared with


def families(table: Table, screened: Table) -> dict[str, list[Comparison]]:
    """Return the planned comparisons by family; each family is corrected for its number alone."""
    tested = {method for by_method in table.values() for method in by_method}
    ours = next(method for method, _ in ranking(screened) if method in OURS and method in tested)
    less_ppo = [(name, method, "ppo") for name, by_method in table.items() for method in by_method if method != "ppo"]
    others = [(name, ours, best_other(screened, name, tested - set(OURS))) for name in table]
    return {
        PRIMARY: [pair for pair in less_ppo if pair[0] in screened],
        OTHER_REGIMES: [pair for pair in less_ppo if pair[0] not in screened],
        OURS_AGAINST_BEST: others,
    }


@dataclass(frozen=True)
class Tested:
    """A planned comparison and its result."""

    regime: str
    method: str
    other: str
    difference: Difference
    p: float
    """Corrected by Holm's method over the family."""


def tested(table: Table, screened: Table) -> dict[str, list[Tested]]:
    """Return the planned comparisons by family."""
    results = {}
    for title, comparisons in families(table, screened).items():
        found = []
        for name, *methods in comparisons:
            found.append(difference(*(table[name][m][rate(table, screened, name, m)] for m in methods)))
        corrected = holm([d.p for d in found])
        results[title] = [Tested(*c, d, p) for c, d, p in zip(comparisons, found, corrected, strict=True)]
    return results


def verdict(d: Difference) -> str:
    """Say what an interval allows to say about our rule: "worse", "not worse" by more than the margin, or neither."""
    if d.high < 0:
        return "worse"
    return "not worse" if d.low > -MARGIN else "undecided"


def difference_lines(table: Table, screened: Table) -> list[str]:
    """Return Markdown: every planned difference, one table per family."""
    lines = []
    for title, results in tested(table, screened).items():
        rows = []
        for t in results:
            d = t.difference
            numbers = [f"{d.mean:+.3f}", f"[{d.low:+.3f}, {d.high:+.3f}]", "< 0.0001" if t.p < 1e-4 else f"{t.p:.4f}"]
            verdicts = [verdict(d)] if title == OURS_AGAINST_BEST else []
            rows.append([label(t.regime), t.method, t.other, *numbers, *verdicts])
        head = ["regime", "method", "less", "mean", "95% interval of this comparison", "p after Holm"]
        head += [f"margin {MARGIN}"] if title == OURS_AGAINST_BEST else []
        lines += [title, "", *markdown(head, rows)]
    return lines


def overview_lines(table: Table, screened: Table) -> list[str]:
    """Return Markdown: a row per regime, ppo's accuracy and every difference from it; * where p < 0.05 after Holm."""
    methods = tested_methods(table)
    less_ppo = {
        (t.regime, t.method): f"{t.difference.mean:+.3f}{'*' if t.p < 0.05 else ''}"
        for t in against_ppo(table, screened)
    }
    rows = []
    for name, by_method in table.items():
        accuracy = mean_accuracy(by_method["ppo"][rate(table, screened, name, "ppo")])
        rows.append([label(name), f"{accuracy:.3f}", *(less_ppo.get((name, m), "as `ppo`") for m in methods)])
    return markdown(["data", "`ppo`", *(f"`{method}`" for method in methods)], rows)


def against_ppo(table: Table, screened: Table) -> list[Tested]:
    """Return the comparisons with ppo in all regimes."""
    by_family = tested(table, screened)
    return by_family[PRIMARY] + by_family[OTHER_REGIMES]


def tested_methods(table: Table) -> list[str]:
    """Return every method but ppo, in the order of the cells."""
    return [*dict.fromkeys(method for by_method in table.values() for method in by_method if method != "ppo")]


TASKS = {"pipeline_partial": "pipeline, token budget", "pipeline_async": "pipeline, async"}


def label(name: str) -> str:
    """Return a regime's name as a reader needs it: "late by 8", "4 epochs"."""
    task, _, lag, *settings = name.split()
    given = dict(zip(settings[::2], settings[1::2], strict=True))
    words = [TASKS.get(task, task)] if task != "walk" else []
    if "mixed" in given:
        words.append(f"0 to {lag} late")
    elif lag != "0":
        words.append(f"late by {lag}")
    if "epochs" in given:
        words.append("1 epoch" if given["epochs"] == "1" else f"{given['epochs']} epochs")
    words += ["replay"] if "replay" in given else []
    words += ["more wrong"] if "wrong" in given else []
    return ", ".join(words)


def draw(table: Table, screened: Table, out: Path):
    """Draw every method's difference from ppo, per regime. A dot stands for p < 0.05 after Holm."""
    results = against_ppo(table, screened)
    panels = {name: [(t.method, t.difference, t.p < 0.05) for t in results if t.regime == name] for name in table}
    caption = "held-out accuracy less ppo's, with the 95% interval of one comparison; dot: p < 0.05 after Holm"
    return draw_differences(panels, tested_methods(table), caption, out)


def draw_differences(
    panels_of: dict[str, list[tuple[str, Difference, bool]]], methods: list[str], caption: str, out: Path
):
    """Draw differences with their 95% intervals: a panel per regime, a line per method; a dot where it is marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num = len(panels_of)
    rows = -(-num // 6)
    columns = -(-num // rows)
    size = (2 + 2 * columns, rows * (1 + 0.35 * len(methods)))
    figure, panels = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[num:]:
        panel.remove()
    for panel in panels.flat[num - columns : num]:  # the lowest one of each column
        panel.tick_params(labelbottom=True)
    for panel, (name, found) in zip(panels.flat, panels_of.items(), strict=False):
        for method, d, is_marked in found:
            row, color = methods.index(method), "C0" if is_marked else "gray"
            panel.plot([d.low, d.high], [row, row], color=color)
            panel.plot(d.mean, row, "o" if is_marked else "|", color=color)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set(title=label(name).replace(", ", "\n"), yticks=range(len(methods)), yticklabels=methods)
        panel.title.set_size("small")
    panels.flat[0].invert_yaxis()
    figure.supxlabel(caption, size="small")
    figure.savefig(out, dpi=110)
    return figure


def both_stages(cells: dict[str, dict], found: dict[str, Columns]) -> tuple[Table, Table]:
    """Return the outcomes that are tested, and those of stage 1. The program ends if a planned cell is missing."""
    screened, _ = outcomes(cells, found, STAGES["screen"])
    table, left_out = outcomes(cells, found, STAGES["test"])
    if left_out:
        sys.exit("\n".join(["No test before every planned cell is there.", *itertools.chain(*left_out.values())]))
    return table, screened


def stage_lines(stage: str, cells: dict[str, dict], found: dict[str, Columns]) -> list[str]:
    """Return what a command prints."""
    if stage in ("entropy", "bounds"):
        return (entropy_lines if stage == "entropy" else bounds_lines)(cells, found)
    if stage in ("screen", "pipeline"):
        table, left_out = outcomes(cells, found, STAGES[stage])
        lines = (
            [*screen_lines(table), *pairs_lines(table), *ranking_lines(table)]
            if stage == "screen"
            else pipeline_lines(table)
        )
        return [*lines, *itertools.chain(*left_out.values())]
    table, screened = both_stages(cells, found)
    if stage == "overview":
        return overview_lines(table, screened)
    return [*difference_lines(table, screened), "Means by method:", "", *screen_lines(table)]


MARKED = re.compile(r"(?<=<!-- compare.py )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def with_tables(page: str, cells: dict[str, dict], found: dict[str, Columns]) -> str:
    """Return a page whose tables, each between <!-- compare.py STAGE --> and <!-- end -->, are those of the cells."""

    def table(marked: re.Match) -> str:
        return "\n".join([f"{marked[1]} -->", "", *stage_lines(marked[1], cells, found)]).rstrip() + "\n\n"

    return MARKED.sub(table, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = ["screen", "test", "overview", "entropy", "bounds", "pipeline", "draw", "pages"]
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--study", type=Path, default=HERE / "protocol.toml", help="the cells (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=HERE / "protocol.parquet", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs/late_data/protocol"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=PICTURE, help="draw, pages: the picture (default: %(default)s)")
    args = parser.parse_args()
    cells, found = read_cells(args.study, "*"), read_results(args.results, args.runs)
    if args.stage in ("draw", "pages"):
        draw(*both_stages(cells, found), args.out)
    else:
        print("\n".join(stage_lines(args.stage, cells, found)))
    for page in PAGES if args.stage == "pages" else ():
        page.write_text(with_tables(page.read_text(), cells, found))


if __name__ == "__main__":
    main()
