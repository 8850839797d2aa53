"""The rules of `openrlhf-bapo doctor`, which find from a run's metrics what is wrong with it.

The limits of reward, entropy, effective sample size and clip fractions were chosen on runs of the study of late data
with even seeds (studies/late_data/study_doctor.py); the others follow from the definition of the metric.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Scalars = Mapping[str, tuple[list[int], list[float]]]
"""Steps and values by the metric's name without "train/"."""

REMEDIES = {
    "offpolicy/updates_skipped": "a lower learning rate; `--bapo.max_skipped_updates` ends the run",
    "offpolicy/nonfinite_tokens": "check whether rewards or engines return NaN",
    "offpolicy/ess": "below 0.85: a lower learning rate, fewer updates per rollout, a shorter queue, a smaller "
    "`--replay.max_staleness`",
    "offpolicy/weight_negative": "below 0.1: stale responses hardly teach what to avoid; less staleness, or "
    "`--offpolicy.weight_level token`",
    "offpolicy/ratio_max": "above 20: `--actor.dual_clip 3` limits the tokens with $A < 0$",
    "offpolicy/engine_mismatch": "growing: engine and actor differ by more than rounding; give both the same "
    "precision, or `--offpolicy.ratio_base rollout`",
    "bapo/clip_low": "always at the start of the search: raise the target; always in the far corner: lower it, widen "
    "the ranges, or use `gradient`",
    "bapo/clip_frac_negative": "above 0.22: a lower learning rate or fewer updates per rollout",
    "bapo/clip_frac_positive": "above 0.1: a lower learning rate or fewer updates per rollout",
    "reward_fault/dropped": "read the reward's log; `--reward_fault.*`",
    "replay/samples_dropped": "batch sizes that divide without a remainder",
    "replay/groups_expired": "expired before they are sampled: a larger `--replay.max_staleness`, a smaller capacity",
    "partial/waiting": "growing: a larger `--partial.token_budget`",
    "partial/in_flight": "growing: a larger `--partial.token_budget`",
    "timing/bapo_search": "growing with the ranks: one is slow",
}
"""Remedies by metric, as in the last column of docs/metrics.md."""


def level(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Return at each point the mean over the last `window` points, NaN while there are fewer points."""
    found = np.full(len(values), math.nan)
    if len(values) >= window:
        found[window - 1 :] = np.convolve(values, np.full(window, 1 / window), "valid")
    return found


def to_start(values: np.ndarray) -> np.ndarray:
    """Return the level as a multiple of its first value."""
    levels = level(values)
    return levels / levels[4] if len(values) >= 5 and levels[4] > 0 else np.full(len(values), math.nan)


def to_best(values: np.ndarray) -> np.ndarray:
    """Return the level over ten points as a fraction of its best so far; NaN if a value is below 0.

    The fraction depends on the zero of the values, which for rewards of both signs is arbitrary.
    """
    levels = level(values, 10)
    best = np.fmax.accumulate(levels)
    return np.divide(levels, best, out=np.full(len(values), math.nan), where=(best > 0) & (values.min(initial=0) >= 0))


def total(values: np.ndarray) -> np.ndarray:
    """Return the sum of all points so far."""
    return np.cumsum(values)


@dataclass(frozen=True)
class Check:
    """A figure of a run with its limits. A limit of None is never passed."""

    metric: str
    says: str
    """The finding in words; {value} is the figure."""

    measure: Callable[[np.ndarray], np.ndarray] = level
    wrong: float | None = None
    """Beyond this limit something is wrong."""

    watch: float | None = None
    """Beyond this limit something is unusual."""

    is_above: bool = True
    """True: a figure above a limit is beyond it. False: a figure below it."""

    remedy: str = ""
    """The remedy; "": the one in `REMEDIES`."""


LOWER_RATE = "a lower learning rate (`--actor.adam.lr`), from a checkpoint before the change"

CHECKS = (
    Check(
        "offpolicy/updates_skipped",
        "{value:.0f} optimizer steps were skipped, because loss or gradient was not finite",
        total,
        wrong=0,
    ),
    Check(
        "offpolicy/nonfinite_tokens", "{value:.0f} tokens were left out, because they are not finite", total, watch=0
    ),
    Check(
        "rollout/reward_mean",
        "the reward has fallen to {value:.0%} of its best",
        to_best,
        wrong=0.8,
        watch=0.9,
        is_above=False,
        remedy=LOWER_RATE,
    ),
    Check(
        "entropy_loss",
        "entropy has fallen to {value:.0%} of its start",
        to_start,
        wrong=0.2,
        watch=0.4,
        is_above=False,
        remedy="which tokens lower it: `entropy/*` and `openrlhf-bapo tokens`; a higher `--bapo.ratio_upper_max`, or "
        "a lower learning rate",
    ),
    Check(
        "entropy_loss",
        "entropy has grown to {value:.0%} of its start",
        to_start,
        wrong=1.3,
        watch=1.15,
        remedy=LOWER_RATE,
    ),
    Check(
        "rollout/reward_std",
        "all rewards are equal, so that nothing can be learned from them",
        wrong=1e-6,
        is_above=False,
        remedy="read some responses and the log of the reward; prompts that are neither too hard nor too easy",
    ),
    Check(
        "offpolicy/ess",
        "the effective sample size is {value:.2f} of the tokens",
        wrong=0.65,
        watch=0.85,
        is_above=False,
    ),
    Check(
        "offpolicy/weight_negative",
        "with `--offpolicy.weight tapered` tokens with A < 0 have a mean weight of {value:.2f}",
        watch=0.1,  # most of these tokens then weigh less than 0.2, by Markov's inequality
        is_above=False,
    ),
    Check(
        "bapo/clip_frac_negative",
        "{value:.0%} of the tokens with A < 0 are below the lower bound",
        wrong=0.28,
        watch=0.22,
    ),
    Check(
        "bapo/clip_frac_positive",
        "{value:.0%} of the tokens with A > 0 are above the upper bound",
        wrong=0.15,
        watch=0.1,
    ),
    Check("offpolicy/ratio_max", "the largest ratio of a step is {value:.0f} on average", watch=20),
    Check("offpolicy/engine_mismatch", "log-probs of engine and actor differ by {value:.3f}", wrong=0.05, watch=0.02),
    Check(
        "offpolicy/engine_mismatch",
        "log-probs of engine and actor differ {value:.1f} times as much as at the start",
        to_start,
        watch=3,
    ),
    Check(
        "bapo/target_reached",
        "the target of the positive share is met in {value:.0%} of the updates",
        lambda values: level(values, 10),
        watch=1e-6,
        is_above=False,
        remedy=REMEDIES["bapo/clip_low"],
    ),
    Check("reward_fault/dropped", "{value:.0f} prompt groups were dropped without a reward", total, watch=0),
    Check("replay/samples_dropped", "{value:.0f} samples filled no optimizer step", total, watch=0),
    Check("partial/waiting", "{value:.1f} times as many groups wait as at the start", to_start, watch=3),
    Check("partial/in_flight", "{value:.1f} times as many groups are unfinished as at the start", to_start, watch=3),
)
"""The most important first."""


class Finding(NamedTuple):
    """The result of a check at the end of a run, or so far."""

    is_wrong: bool
    """True: something is wrong. False: something is unusual."""

    since: int
    """The figure has been beyond its limit at every step from this one on."""

    metric: str
    text: str
    remedy: str


def diagnose(scalars: Scalars) -> list[Finding]:
    """Return what is wrong with a run now, the most important first, then what is unusual."""
    found = [
        finding for metric in dict.fromkeys(check.metric for check in CHECKS) if (finding := _gone(metric, scalars))
    ]
    gone = {finding.metric for finding in found}
    found += [finding for check in CHECKS if check.metric not in gone and (finding := _find(check, scalars))]
    found += [finding for finding in (_unread(scalars), _waits_for_ranks(scalars), _unchecked(scalars)) if finding]
    return sorted(found, key=lambda finding: not finding.is_wrong)


def _gone(metric: str, scalars: Scalars) -> Finding | None:
    """Find a metric that has no finite value in the five points of a level."""
    steps, values = scalars.get(metric, ([], []))
    is_finite = np.isfinite(np.asarray(values, float))
    num_last = int(np.argmax(is_finite[::-1])) if is_finite.any() else len(values)
    if num_last < max(1, min(5, len(values))):
        return None
    text = f"the last {num_last} values are not finite ({values[-1]})"
    return Finding(True, steps[-num_last], metric, text, REMEDIES["offpolicy/nonfinite_tokens"])


def _find(check: Check, scalars: Scalars) -> Finding | None:
    if check.metric not in scalars:
        return None
    steps, values = (np.asarray(column) for column in scalars[check.metric])
    is_finite = np.isfinite(values.astype(float))
    steps, figures = steps[is_finite], check.measure(values[is_finite].astype(float))
    for limit, is_wrong in ((check.wrong, True), (check.watch, False)):
        if limit is None:
            continue
        is_beyond = figures > limit if check.is_above else figures < limit
        if len(figures) and is_beyond[-1]:
            since = len(is_beyond) - int(np.argmin(is_beyond[::-1])) if not is_beyond.all() else 0
            text = check.says.format(value=figures[-1])
            return Finding(is_wrong, int(steps[since]), check.metric, text, check.remedy or REMEDIES[check.metric])
    return None


def _sums(scalars: Scalars, *names: str) -> list[float]:
    return [float(np.nansum(scalars[name][1])) if name in scalars else 0.0 for name in names]


def _unread(scalars: Scalars) -> Finding | None:
    """Find replayed groups that mostly expire before they are drawn."""
    expired, sampled = _sums(scalars, "replay/groups_expired", "replay/groups_sampled")
    if expired <= max(sampled, 10.0):
        return None
    text = f"{expired:.0f} groups expired in the pool, and {sampled:.0f} were replayed"
    return _unusual("replay/groups_expired", text, scalars)


def _waits_for_ranks(scalars: Scalars) -> Finding | None:
    """Find a search that takes a visible part of training, because it waits for other ranks."""
    search, *phases = _sums(scalars, "timing/bapo_search", "timing/ppo_train", "timing/policy_train")
    training = sum(phases)  # as OpenRLHF or Molt names it
    if not training or search <= 0.1 * training:
        return None
    text = f"the search takes {search / training:.0%} of the training phase"
    return _unusual("timing/bapo_search", text, scalars)


def _unchecked(scalars: Scalars) -> Finding | None:
    """Say that a fall of the reward is not checked, because it has been below 0: see `to_best`."""
    metric, remedy = "rollout/reward_mean", "look at its curve (`openrlhf-bapo plot`)"
    steps, values = scalars.get(metric, ([], []))
    since = next((step for step, value in zip(steps, values, strict=True) if -math.inf < value < 0), None)
    text = "the reward has been below 0, so that a fall of it is not checked"
    return None if since is None else Finding(False, since, metric, text, remedy)


def _unusual(metric: str, text: str, scalars: Scalars) -> Finding:
    return Finding(False, scalars[metric][0][0], metric, text, REMEDIES[metric])
