"""What `openrlhf-bapo doctor` says of the study's cells: which of those that fell apart it names, how early, and which
others it blames.

python studies/late_data/study_doctor.py

A run has fallen apart if the reward's mean over its last 10 rollouts is below 0.8 of the run's best such mean, or below
that of its first 10. The limits were chosen on even seeds, so odd seeds are their test.
"""

from statistics import median

import numpy as np
from study import HERE, Columns, markdown, read_parquet

from openrlhf_bapo.health.doctor import Finding, Scalars, diagnose

METRICS = {
    "reward": "rollout/reward_mean",
    "entropy": "entropy_loss",
    "ess": "offpolicy/ess",
    "clip_positive": "bapo/clip_frac_positive",
    "clip_negative": "bapo/clip_frac_negative",
    "ratio_max": "offpolicy/ratio_max",
}
"""The metrics of a run by the column of a cell."""


def scalars_of(columns: Columns, num_rollouts: int | None = None) -> Scalars:
    """Return the first rollouts of a cell as a run's metrics."""
    return {
        metric: (list(range(1, 1 + len(columns[name][:num_rollouts]))), columns[name][:num_rollouts])
        for name, metric in METRICS.items()
        if name in columns
    }


def has_fallen_apart(columns: Columns) -> bool:
    """Say whether a run lost a fifth of its best reward, or more than it had gained."""
    means = np.convolve(columns["reward"], np.full(10, 0.1), "valid")
    return bool(means[-1] < 0.8 * means.max() or means[-1] < means[0])


def wrong(columns: Columns, num_rollouts: int | None = None, without: str = "") -> list[Finding]:
    """Return what the doctor calls wrong after some rollouts."""
    found = diagnose(scalars_of(columns, num_rollouts))
    return [finding for finding in found if finding.is_wrong and finding.metric != without]


def first_named(columns: Columns, without: str = "") -> int | None:
    """Return the first rollout after which the doctor calls something wrong; None if it never does."""
    numbers = range(1, len(columns["reward"]) + 1)
    return next((number for number in numbers if wrong(columns, number, without)), None)


def main() -> None:
    """Print the table."""
    cells = read_parquet(HERE / "results.parquet")
    rows = []
    for seeds, parity in (("even seeds", 0), ("odd seeds", 1)):
        chosen = {name: columns for name, columns in cells.items() if int(name.rpartition("seed")[2]) % 2 == parity}
        fell = {name: columns for name, columns in chosen.items() if has_fallen_apart(columns)}
        for title, without in (("all rules", ""), ("without the reward's", "rollout/reward_mean")):
            named = [name for name, columns in fell.items() if wrong(columns, without=without)]
            blamed = [name for name in chosen.keys() - fell.keys() if wrong(chosen[name], without=without)]
            first = [first_named(fell[name], without) for name in named]
            falls = [_fell_at(fell[name]) for name in named]
            row = [seeds, title, f"{len(named)} of {len(fell)}", f"{len(blamed)} of {len(chosen) - len(fell)}"]
            rows.append([*row, f"{median(first):.0f}", f"{median(falls):.0f}"])
    head = ["seeds", "rules", "named", "blamed", "first named after rollout", "reward below 0.8 of its best after"]
    print("\n".join(markdown(head, rows)))


def _fell_at(columns: Columns) -> int:
    """Return the rollout after which the reward's mean over ten was first below 0.8 of its best, or the last."""
    means = np.convolve(columns["reward"], np.full(10, 0.1), "valid")
    below = means < 0.8 * np.maximum.accumulate(means)
    return int(np.argmax(below)) + 10 if below.any() else len(columns["reward"])


if __name__ == "__main__":
    main()
