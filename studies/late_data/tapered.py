"""The test of tapered weights that PROTOCOL.md plans: the cells of tapered.toml beside those of protocol.toml.

python studies/late_data/tapered.py   # H1, H2 and H4, for every regime that lacks no cell; and the means by rate

It reads finished cells from protocol.parquet, tapered.parquet and --runs, and writes TAPERED.md and the picture of
docs/study.md.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, fmean

from compare import (
    STAGES,
    Difference,
    Methods,
    Table,
    difference,
    draw_differences,
    holm,
    label,
    mean_accuracy,
    outcomes,
    pipeline_lines,
)
from study import HERE, markdown, mean_and_error, read_cells, read_results

CANDIDATES = ("tapered", "paper_tapered")
DESCRIBED = ("tapered_token", "steady_tapered")
SEEDS = range(210, 223)
RATE = 2.5e-5
MORE_THAN_PPO, BELOW_THE_BEST = 0.05, 0.01
H1, H2, H4 = "H1: above ppo by more than 0.05", "H2: not below the best other rule by more than 0.01", "H4"
ALL_LATE = ("walk lag 8", "walk lag 4 epochs 4 rollouts 30", "walk lag 8 wrong 0.75", "detour lag 8", "walk lag 4")


def sign_flip(differences: Sequence[float]) -> float:
    """Return the exact one-sided p-value of a mean above 0: the share of all changes of signs with a mean as high."""
    observed = sum(differences)
    sums = (sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in _signs(len(differences)))
    return sum(total >= observed - 1e-12 for total in sums) / 2 ** len(differences)


def two_sided(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of a mean that is not 0."""
    observed = abs(sum(differences))
    sums = (sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in _signs(len(differences)))
    return sum(abs(total) >= observed - 1e-12 for total in sums) / 2 ** len(differences)


def _signs(num: int) -> itertools.product:
    return itertools.product((1, -1), repeat=num)


def whole_regimes(runs: Path) -> tuple[Table, list[str]]:
    """Return the candidates' regimes with the outcomes of their seeds, and a line for each method that lacks a cell."""
    table: Table = {}
    lines: list[str] = []
    for name, folder in (("protocol", Path("runs/late_data/protocol")), ("tapered", runs)):
        cells = {key: c for key, c in read_cells(HERE / f"{name}.toml", "*").items() if not of_pipeline(c)}
        found, missing = outcomes(cells, read_results(HERE / f"{name}.parquet", folder), SEEDS)
        for regime, by_method in found.items():
            for method, by_rate in by_method.items():
                if RATE in by_rate:
                    table.setdefault(regime, {}).setdefault(method, {RATE: {}})[RATE] |= by_rate[RATE]
        lines += [line for of_regime in missing.values() for line in of_regime]
    planned = {regime for regime, by_method in table.items() if set(CANDIDATES) <= by_method.keys()}
    tested = [line for line in lines if not any(f": {method} in" in line for method in DESCRIBED)]
    whole = [regime for regime in planned if not any(f" in {regime}, which" in line for line in tested)]
    return {regime: with_seeds_of(CANDIDATES[0], table[regime]) for regime in table if regime in whole}, lines


def of_pipeline(cell: dict) -> bool:
    """Return whether a cell runs through OpenRLHF's pipeline."""
    return cell["task"].startswith("pipeline")


def with_seeds_of(method: str, by_method: Methods) -> Methods:
    """Return a regime's outcomes for the seeds of `method` only.

    Raises:
        KeyError: if another method lacks one of them.
    """
    seeds = by_method[method][RATE]
    return {name: {RATE: {seed: by_rate[RATE][seed] for seed in seeds}} for name, by_rate in by_method.items()}


def paired(table: Table, regime: str, method: str, other: str) -> list[float]:
    """Return the differences of two methods' first endpoints, by seed."""
    ours, theirs = (table[regime][name][RATE] for name in (method, other))
    return [ours[seed].accuracy - theirs[seed].accuracy for seed in sorted(ours)]


def best_other(table: Table, regime: str) -> str:
    """Return the rule with the highest mean of a regime that is no candidate and not described only."""
    others = table[regime].keys() - {*CANDIDATES, *DESCRIBED}
    return max(sorted(others), key=lambda method: mean_accuracy(table[regime][method][RATE]))


def decided(table: Table, comparisons: list[tuple[str, str, str]], limit: float) -> list[list[str]]:
    """Return a row per comparison (regime, method, other): whether the difference is above the limit.

    Both sides are corrected by Holm's method over the comparisons.
    """
    differences = [[d - limit for d in paired(table, *comparison)] for comparison in comparisons]
    above = holm([sign_flip(d) for d in differences])
    below = holm([sign_flip([-x for x in d]) for d in differences])
    rows = []
    for (regime, method, other), up, down in zip(comparisons, above, below, strict=True):
        verdict = "holds" if up < 0.05 else "refuted" if down < 0.05 else "undecided"
        d = difference(table[regime][method][RATE], table[regime][other][RATE])
        rows.append([label(regime), method, other, *_interval(d), f"{up:.4f}", f"{down:.4f}", verdict])
    return rows


def _interval(d: Difference) -> list[str]:
    return [f"{d.mean:+.3f}", f"[{d.low:+.3f}, {d.high:+.3f}]"]


def lines_of(table: Table) -> list[str]:
    """Return Markdown: the hypotheses in all regimes of the table, and the means."""
    head = ["data", "candidate", "less", "mean", "95% interval", "p above the limit", "p below", "verdict"]
    less_ppo = [(regime, method, "ppo") for regime in table if regime in ALL_LATE for method in CANDIDATES]
    less_best = [(regime, method, best_other(table, regime)) for regime in table for method in CANDIDATES]
    lines = [H1, "", *markdown(head, decided(table, less_ppo, MORE_THAN_PPO))] if less_ppo else []
    lines += [H2, "", *markdown(head, decided(table, less_best, -BELOW_THE_BEST))]
    between = [paired(table, regime, "paper_tapered", "tapered") for regime in table]
    rows = []
    for regime, p in zip(table, holm([two_sided(d) for d in between]), strict=True):
        d = difference(table[regime]["paper_tapered"][RATE], table[regime]["tapered"][RATE])
        rows.append([label(regime), *_interval(d), f"{p:.4f}", "differs" if p < 0.05 else "undecided"])
    head = ["data", "mean", "95% interval", "p after Holm", "verdict"]
    lines += [f"{H4}: paper_tapered less tapered", "", *markdown(head, rows)]
    rows = []
    for regime, by_method in table.items():
        for method in sorted(by_method, key=lambda m: -mean_accuracy(by_method[m][RATE])):
            cells = by_method[method][RATE].values()
            numbers = [mean_and_error([o.accuracy for o in cells]), f"{fmean(o.entropy for o in cells):.3f}"]
            rows.append([label(regime), method, *numbers])
    lines += ["Means", "", *markdown(["data", "method", "accuracy", "entropy"], rows)]
    shared = [
        f"{label(regime)} {correlation(*(paired(table, regime, method, 'ppo') for method in CANDIDATES)):.2f}"
        for regime in table
    ]
    return [*lines, f"Correlation of the two candidates' differences from ppo over seeds: {', '.join(shared)}."]


def rate_lines(runs: Path) -> list[str]:
    """Return Markdown: late by 8 at three rates, with the seeds of stage 1; described, not tested."""
    by_method: dict[str, dict[float, list[str]]] = {}
    for name, folder in (("protocol", Path("runs/late_data/protocol")), ("tapered", runs)):
        cells = {key: c for key, c in read_cells(HERE / f"{name}.toml", "walk-lag8-*").items() if not c["regime"]}
        found, _ = outcomes(cells, read_results(HERE / f"{name}.parquet", folder), STAGES["screen"])
        for method, by_rate in found.get("walk lag 8", {}).items():
            by_method[method] = {rate: mean_and_error([o.accuracy for o in r.values()]) for rate, r in by_rate.items()}
    rates = sorted({rate for by_rate in by_method.values() for rate in by_rate})
    rows = [[method, *(by_rate.get(rate, "") for rate in rates)] for method, by_rate in by_method.items()]
    return ["Late by 8 by rate, seeds 200 to 204", "", *markdown(["method", *(f"{r:g}" for r in rates)], rows)]


def through_pipeline_lines(runs: Path) -> tuple[list[str], list[str]]:
    """Return Markdown: the rules that ran through the pipeline, and a line for each method that lacks a cell.

    Those of protocol.toml began from other start policies: TEST.md has them.
    """
    cells = read_cells(HERE / "tapered.toml", "pipeline*")
    table, left_out = outcomes(cells, read_results(HERE / "tapered.parquet", runs), STAGES["pipeline"])
    return pipeline_lines(table), [line for of_regime in left_out.values() for line in of_regime]


def draw(table: Table, out: Path):
    """Draw every rule's difference from ppo, per regime; the candidates with dots."""
    (first, *_) = table.values()
    methods = [*CANDIDATES, *(method for method in first if method not in (*CANDIDATES, *DESCRIBED, "ppo"))]
    panels = {
        regime: [(m, difference(of[m][RATE], of["ppo"][RATE]), m in CANDIDATES) for m in methods if m in of]
        for regime, of in table.items()
    }
    caption = "held-out accuracy less ppo's, with the 95% interval of one comparison; blue: tapered weights"
    return draw_differences(panels, methods, caption, out)


PAGE = HERE / "TAPERED.md"
PICTURE = HERE.parents[1] / "docs" / "pictures" / "tapered.png"


def page(runs: Path) -> str:
    """Return TAPERED.md: the tables of the regimes that lack no cell, and which cells are missing."""
    table, left_out = whole_regimes(runs)
    through_pipeline, left_out_there = through_pipeline_lines(runs)
    left_out += left_out_there
    intro = "PROTOCOL.md has the plan. `tapered.py` writes this page."
    missing = ["Missing", "", *(f"- {line.removeprefix('Left out: ')}" for line in left_out)] if left_out else []
    lines = ["# Tapered weights: the planned tests", "", intro, "", *(lines_of(table) if table else []), ""]
    return "\n".join([*lines, *rate_lines(runs), *through_pipeline, *missing]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/late_data/tapered"), help="default: %(default)s")
    runs = parser.parse_args().runs
    PAGE.write_text(page(runs))
    print(PAGE.read_text())
    draw(whole_regimes(runs)[0], PICTURE)


if __name__ == "__main__":
    main()
