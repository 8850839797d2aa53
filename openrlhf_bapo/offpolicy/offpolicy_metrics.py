"""Importance ratios, clipping and effective sample size of an update's tokens, by their staleness.

The staleness of a token is the number of policy versions between the policy that generated it and the one that is
trained. A version is a publication of weights to the rollout engines, which can come after one or more optimizer steps.
Optimizer steps are counted too, including those within the current training step. The paper's staleness (section
4.2, Algorithm 1) counts rounds on the same samples; we take a round for an optimizer step. With r the importance ratio
of each of n tokens,

    effective sample size = (sum r)^2 / (n sum r^2)

It is 1 if all ratios are equal, and falls towards 1 / n as a few tokens outweigh the rest. All metrics follow from sums
and maxima. One pass over the tokens makes a small tally of them. Tallies add over micro-batches and are all-reduced
over data-parallel ranks. Every token counts once, whatever its weight in the loss.
"""

import functools
import math
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

_LANES = 256  # of buckets, as in rules/clip_bounds.py

# Label and lower edge (versions) of each staleness bucket, ascending. The last bucket has no upper edge.
STALENESS_BUCKETS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8+": 8}


@functools.lru_cache(maxsize=64)
def _edges(device: torch.device) -> torch.Tensor:
    # Cached, because the copy from the host would stall a GPU in every micro-batch.
    return torch.tensor(list(STALENESS_BUCKETS.values())[1:], device=device)


@dataclass(frozen=True)
class OffPolicyTally:
    """Sums and maxima over a set of tokens, from which `offpolicy_metrics` follow. Tallies of disjoint sets add.

    Each row is one of `STALENESS_BUCKETS`.
    """

    sums: torch.Tensor
    """float64 [num_buckets, 9]: number of tokens; sums of ratio, ratio^2, staleness and optimizer steps (NaN: unknown);
    number of tokens with A > 0; number of these with ratio > upper; number of tokens with A < 0; number of these with
    ratio < lower."""

    maxima: torch.Tensor
    """float64 [num_buckets, 3]: highest ratio, staleness and optimizer steps; -inf if the bucket has no token."""

    def __add__(self, other: "OffPolicyTally") -> "OffPolicyTally":
        return OffPolicyTally(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, group: dist.ProcessGroup | None) -> "OffPolicyTally":
        """Return the tally of the tokens on all ranks of `group` (None: all), equal on every rank.

        Takes two collectives.
        """
        sums, maxima = self.sums.clone(), self.maxima.clone()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return OffPolicyTally(sums, maxima)


@torch.no_grad()
def tally_offpolicy(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    staleness: torch.Tensor | None,
    optimizer_steps: torch.Tensor | None,
    lower: torch.Tensor | float,
    upper: torch.Tensor | float,
) -> OffPolicyTally:
    """Tally a set of tokens in one pass, on their device, without host synchronization.

    Where the mask is 0, the other arguments may have any value.

    Args:
        ratio: importance ratios pi_theta / pi_behavior, any shape.
        advantages: the same shape.
        mask: the same shape; above 0 for tokens, 0 or False elsewhere.
        staleness: the same shape, integer; versions, at least 0. None: unknown, so that all tokens are one bucket.
        optimizer_steps: the same shape, integer; optimizer steps between the weights that generated a token and those
            that train on it, at least 0. None: unknown.
        lower: the lower clip bound: a number, 0-dim, or the same shape.
        upper: the upper clip bound, likewise.
    """
    # Flattened, so that 0-dim bounds are compared in the ratio's precision, as in the loss, and not in their own.
    ratio, advantages, mask = (x.flatten() for x in (ratio, advantages, mask))
    lower, upper = (x.flatten() if torch.is_tensor(x) and x.dim() else x for x in (lower, upper))
    num_buckets = len(STALENESS_BUCKETS)

    active = mask > 0
    positive, negative = active & (advantages > 0), active & (advantages < 0)
    bucket = torch.zeros_like(active, dtype=torch.long)
    if staleness is not None:
        bucket = torch.bucketize(staleness.flatten(), _edges(staleness.device), right=True)
    r, s, o = (
        torch.full_like(ratio, math.nan, dtype=torch.float64)
        if x is None
        else torch.where(active, x.flatten().double(), 0.0)
        for x in (ratio, staleness, optimizer_steps)
    )
    counts = (active, positive, positive & (ratio > upper), negative, negative & (ratio < lower))
    num_tokens, *num_by_sign = (count.double() for count in counts)
    values = torch.stack([num_tokens, r, r * r, s, o, *num_by_sign])  # [9, num_tokens]
    highest = torch.where(active, torch.stack([r, s, o]), -math.inf)  # [3, num_tokens]

    # Masked tokens add zeros to an arbitrary bucket. Lanes spread the additions, because most tokens may share one
    # staleness.
    index = torch.arange(active.numel(), device=ratio.device) % _LANES * num_buckets + bucket
    sums = values.new_zeros(len(values), _LANES * num_buckets).index_add_(1, index, values)
    maxima = highest.new_full((len(highest), _LANES * num_buckets), -math.inf)
    maxima.scatter_reduce_(1, index.expand(len(highest), -1), highest, "amax")
    return OffPolicyTally(
        sums.view(-1, _LANES, num_buckets).sum(1).T.contiguous(),
        maxima.view(-1, _LANES, num_buckets).amax(1).T.contiguous(),
    )


def offpolicy_metrics(tally: OffPolicyTally) -> dict[str, float]:
    """Return the metrics of all tokens, and of each bucket that is not empty. Synchronizes with the device once.

    Returns:
        "offpolicy/" staleness_mean and staleness_max (versions), optimizer_steps_mean and optimizer_steps_max, ess
        (effective sample size as a fraction of the tokens; 0 if every ratio is 0), ratio_mean, ratio_max,
        clip_frac_positive and clip_frac_negative (fraction of the tokens with that sign whose ratio is above `upper` or
        below `lower`; 0 without such tokens). A bucket's metrics have the suffix "/staleness_LABEL". They include
        token_frac, the bucket's fraction of all tokens, but not staleness_* and optimizer_steps_*. {} without tokens.
        Without those that need the staleness or the optimizer steps, where these are unknown.
    """
    rows = torch.cat([tally.sums, tally.maxima], dim=1)
    total = torch.cat([tally.sums.sum(0), tally.maxima.amax(0)]).unsqueeze(0)
    table = torch.cat([total, rows]).tolist()
    num_all, *_ = table[0]
    knows_staleness, knows_steps = (not math.isnan(x) for x in table[0][3:5])

    found: dict[str, float] = {}
    for label, row in zip((None, *STALENESS_BUCKETS), table, strict=True):
        num, ratio, ratio_squared, staleness, steps, positive, above, negative, below, *highest = row
        ratio_max, staleness_max, steps_max = highest
        if num == 0 or (label is not None and not knows_staleness):
            continue
        metrics = {
            "ess": ratio * ratio / max(num * ratio_squared, sys.float_info.min),
            "ratio_mean": ratio / num,
            "ratio_max": ratio_max,
            "clip_frac_positive": above / max(positive, 1),
            "clip_frac_negative": below / max(negative, 1),
        }
        if label is not None:
            metrics["token_frac"] = num / num_all
        elif knows_staleness:
            metrics |= {"staleness_mean": staleness / num, "staleness_max": staleness_max}
        if label is None and knows_steps:
            metrics |= {"optimizer_steps_mean": steps / num, "optimizer_steps_max": steps_max}
        suffix = "" if label is None else f"/staleness_{label}"
        found |= {f"offpolicy/{name}{suffix}": value for name, value in metrics.items()}
    return found
