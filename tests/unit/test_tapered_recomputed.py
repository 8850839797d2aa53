"""TAPERED.md recomputed from the raw cells, with pandas and numpy and no code of the study."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

STUDY = Path(__file__).parents[2] / "studies" / "late_data"
DATA = {  # the label in the page: the cells, and whether all of their data are late
    "late by 8": ("walk-lag8-updates8-lr2.5e-05", True),
    "0 to 4 late": ("walk-lag4-updates8-lr2.5e-05-mixedTrue", False),
    "detour, late by 8": ("detour-lag8-updates8-lr2.5e-05", True),
    "late by 4, 4 epochs": ("walk-lag4-updates8-lr2.5e-05-epochs4-rollouts30", True),
    "late by 8, more wrong": ("walk-lag8-updates8-lr2.5e-05-wrong0.75", True),
    "replay": ("walk-lag0-updates8-lr2.5e-05-replay8", False),
    "late by 4": ("walk-lag4-updates8-lr2.5e-05", True),
    "late by 1": ("walk-lag1-updates8-lr2.5e-05", False),
}
PIPELINE = {
    "pipeline, late by 8": "pipeline-lag8-updates8-lr2.5e-05",
    "pipeline, token budget": "pipeline_partial-lag0-updates8-lr2.5e-05",
    "pipeline, async": "pipeline_async-lag0-updates8-lr2.5e-05",
}
OTHERS = ["ppo", "stock_is", "paper", "topr_sequence", "balanced", "lower_0.5", "decoupled"]


def endpoints() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per cell of the study and of protocol.toml: accuracy, entropy and start of the cell."""
    frames = []
    for name in ("tapered", "protocol"):
        cells = pd.read_parquet(STUDY / f"{name}.parquet").sort_values(["cell", "rollout"]).groupby("cell")
        rows = {}
        for cell, of in cells:
            end = of.tail(len(of) // 5)
            prefix, method, seed = re.fullmatch(r"(.*)-([^-]+)-seed(\d+)", cell).groups()
            start = of["start"].iloc[0] if "start" in of else np.nan
            rows[cell] = (prefix, method, int(seed), end["heldout"].mean(), end["entropy"].mean(), start)
        columns = ["data", "method", "seed", "accuracy", "entropy", "start"]
        frames.append(pd.DataFrame.from_dict(rows, orient="index", columns=columns))
    return frames[0], frames[1]


def tables(page: str) -> dict[str, list[list[str]]]:
    """Return the page's tables by the line above each."""
    found = re.findall(r"^([^|\n]+)\n\n\|[^\n]*\n\| ---[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    return {
        head.strip(): [[w.strip() for w in line[1:-1].split("|")] for line in body.splitlines()] for head, body in found
    }


def flips(d: np.ndarray) -> np.ndarray:
    """Return the means under all changes of signs."""
    signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
    return signs @ d / len(d)


def step_down(p: list[float]) -> np.ndarray:
    """Return p-values corrected by Holm's method."""
    p, order = np.array(p), np.argsort(p, kind="stable")
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def interval(d: np.ndarray) -> list[str]:
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    return [f"{d.mean():+.3f}", f"[{d.mean() - half:+.3f}, {d.mean() + half:+.3f}]"]


def test_the_page_of_tapered_weights_agrees_with_a_recomputation_that_shares_no_code_with_the_study():
    ours, protocol = endpoints()
    page = tables((STUDY / "TAPERED.md").read_text())
    cells = pd.concat([ours, protocol[~protocol.data.str.startswith("pipeline")]])
    wide = {}
    for label, (data, _) in DATA.items():
        of = cells[(cells.data == data) & cells.seed.between(210, 222)]
        wide[label] = of.pivot(index="seed", columns="method", values=["accuracy", "entropy"])
    whole = list(dict.fromkeys(row[0] for row in page["Means"]))
    assert len(whole) >= 6
    accuracy = {label: wide[label]["accuracy"].dropna(subset=["tapered"]) for label in whole}
    assert all(len(of) == 10 for of in accuracy.values())

    mean = {label: of.mean() for label, of in accuracy.items()}
    best = {label: max(set(OTHERS) & set(mean[label].index), key=mean[label].get) for label in whole}
    for title, limit, pairs in (
        ("H1: above ppo by more than 0.05", 0.05, {label: "ppo" for label in whole if DATA[label][1]}),
        ("H2: not below the best other rule by more than 0.01", -0.01, best),
    ):
        comparisons = [
            (label, method, other) for label, other in pairs.items() for method in ("tapered", "paper_tapered")
        ]
        differences = [(accuracy[label][a] - accuracy[label][b]).to_numpy() for label, a, b in comparisons]
        shifted = [d - limit for d in differences]
        above = step_down([(flips(d) >= d.mean() - 1e-12).mean() for d in shifted])
        below = step_down([(flips(d) <= d.mean() + 1e-12).mean() for d in shifted])
        rows = []
        for comparison, d, up, down in zip(comparisons, differences, above, below, strict=True):
            verdict = "holds" if up < 0.05 else "refuted" if down < 0.05 else "undecided"
            rows.append([*comparison, *interval(d), f"{up:.4f}", f"{down:.4f}", verdict])
        assert rows == page[title]

    differences = [(accuracy[label]["paper_tapered"] - accuracy[label]["tapered"]).to_numpy() for label in whole]
    corrected = step_down([(abs(flips(d)) >= abs(d.mean()) - 1e-12).mean() for d in differences])
    rows = [
        [label, *interval(d), f"{p:.4f}", "differs" if p < 0.05 else "undecided"]
        for label, d, p in zip(whole, differences, corrected, strict=True)
    ]
    assert rows == page["H4: paper_tapered less tapered"]

    for label, method, shown, entropy in page["Means"]:
        of = wide[label].loc[accuracy[label].index]
        values = of["accuracy"][method]
        assert shown == f"{values.mean():.3f} \u00b1 {values.sem():.3f} ({len(values)})"
        assert entropy == f"{of['entropy'][method].mean():.3f}"

    for method, *shown in page["Late by 8 by rate, seeds 200 to 204"]:
        for rate, number in zip(("1.25e-05", "2.5e-05", "5e-05"), shown, strict=True):
            of = cells[(cells.data == f"walk-lag8-updates8-lr{rate}") & (cells.method == method)]
            of = of[of.seed.between(200, 204)].accuracy
            assert number == ("" if of.empty else f"{of.mean():.3f} \u00b1 {of.sem():.3f} ({len(of)})")

    for label, data in PIPELINE.items():
        title = f"{label}: mean \u00b1 standard error (seeds)"
        ppo = ours[(ours.data == data) & (ours.method == "ppo")].set_index("seed").fillna({"start": 0})
        for method, _, shown, less, entropy in page[title]:
            of = ours[(ours.data == data) & (ours.method == method)].set_index("seed").fillna({"start": 0})
            pairs = (of.accuracy - ppo.accuracy)[of.start == ppo.start.reindex(of.index)]
            assert shown == f"{of.accuracy.mean():.3f} \u00b1 {of.accuracy.sem():.3f} ({len(of)})"
            assert less == f"{pairs.mean():.3f} \u00b1 {pairs.sem():.3f} ({len(pairs)})"
            assert entropy == f"{of.entropy.mean():.3f}"
