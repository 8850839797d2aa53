"""What stale tokens do to an update: importance ratios and clipping by staleness.

The staleness of a token is the number of policy versions between the one that is trained and the one that generated the
token. A version is a publication of weights to the rollout engines; between two of them lie one or more optimizer
steps, and those within the running training step too lie between a token's weights and those that train on it: the
paper's staleness (Algorithm 1, line 7) counts these. With r the importance ratio of each of n tokens,

    effective sample size = (sum r)^2 / (n sum r^2)

is 1 where all ratios are equal and falls towards 1 / n as few tokens outweigh the rest. It follows from sums alone, so
that one pass leaves a small tally, which adds over micro-batches and is all-reduced over data-parallel ranks. Every
token counts once, whatever its weight in the loss.
"""

import functools
import math
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from openrlhf_bapo.core.clip_bounds import _LANES

# Label of each bucket of staleness, and its lower edge in versions, ascending; the last bucket is open.
STALENESS_BUCKETS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8+": 8}


@functools.lru_cache(maxsize=64)
def _edges(device: torch.device) -> torch.Tensor:
    # Cached: building it copies from the host, which would stall a GPU in every micro-batch.
    return torch.tensor(list(STALENESS_BUCKETS.values())[1:], device=device)


@dataclass(frozen=True)
class OffPolicyTally:
    """What `offpolicy_metrics` needs to know of a set of tokens; tallies of disjoint sets add.

    A row is a bucket of `STALENESS_BUCKETS`.
    """

    sums: torch.Tensor
    """float64 [num_buckets, 9]: number of tokens; sums of ratio, ratio^2, staleness and optimizer steps; number of
    tokens with A > 0, of those with ratio > upper, of tokens with A < 0, of those with ratio < lower."""

    maxima: torch.Tensor
    """float64 [num_buckets, 3]: highest ratio, staleness and optimizer steps; -inf where the bucket has no token."""

    def __add__(self, other: "OffPolicyTally") -> "OffPolicyTally":
        return OffPolicyTally(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, group: dist.ProcessGroup) -> "OffPolicyTally":
        """The tally of all tokens on all ranks of `group`, the same on every rank. Two collectives."""
        sums, maxima = self.sums.clone(), self.maxima.clone()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return OffPolicyTally(sums, maxima)


@torch.no_grad()
def tally_offpolicy(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    staleness: torch.Tensor,
    optimizer_steps: torch.Tensor,
    lower: torch.Tensor | float,
    upper: torch.Tensor | float,
) -> OffPolicyTally:
    """Add up a set of tokens in one pass, on their device, without host synchronisation.

    Args:
        ratio: importance ratios pi_theta / pi_behaviour, any shape; what stands under a mask of 0 may be anything, in
            every argument.
        advantages: the same shape.
        mask: the same shape; 0 or False for "no token", anything above it for one token.
        staleness: the same shape, integer; versions, at least 0.
        optimizer_steps: the same shape, integer; optimizer steps between the weights that generated a token and those
            that train on it, at least 0.
        lower: the lower clip bound, 0-dim or a number.
        upper: the upper clip bound, 0-dim or a number.
    """
    # Flat, so that the bounds are compared in the ratio's own precision, as the loss clamps it, whatever their own.
    ratio, advantages, mask, staleness, optimizer_steps = (
        x.flatten() for x in (ratio, advantages, mask, staleness, optimizer_steps)
    )
    num_buckets = len(STALENESS_BUCKETS)

    active = mask > 0
    positive, negative = active & (advantages > 0), active & (advantages < 0)
    bucket = torch.bucketize(staleness, _edges(staleness.device), right=True)
    r, s, o = (torch.where(active, x.double(), 0.0) for x in (ratio, staleness, optimizer_steps))
    counts = (active, positive, positive & (ratio > upper), negative, negative & (ratio < lower))
    num_tokens, *num_by_sign = (count.double() for count in counts)
    values = torch.stack([num_tokens, r, r * r, s, o, *num_by_sign])  # [9, num_tokens]
    highest = torch.where(active, torch.stack([r, s, o]), -math.inf)  # [3, num_tokens]

    # Tokens that do not count add zeros to whatever bucket their garbage fell into. In lanes, as nearly all tokens may
    # have one staleness.
    index = torch.arange(active.numel(), device=ratio.device) % _LANES * num_buckets + bucket
    sums = values.new_zeros(len(values), _LANES * num_buckets).index_add_(1, index, values)
    maxima = highest.new_full((len(highest), _LANES * num_buckets), -math.inf)
    maxima.scatter_reduce_(1, index.expand(len(highest), -1), highest, "amax")
    return OffPolicyTally(
        sums.view(-1, _LANES, num_buckets).sum(1).T.contiguous(),
        maxima.view(-1, _LANES, num_buckets).amax(1).T.contiguous(),
    )


def offpolicy_metrics(tally: OffPolicyTally) -> dict[str, float]:
    """The metrics of all tokens, and of those of each bucket that has any; {} without a token. Synchronises once.

    Returns:
        "offpolicy/" staleness_mean and staleness_max (versions), optimizer_steps_mean and optimizer_steps_max, ess
        (effective sample size as a fraction of the tokens; 0 where every ratio is 0), ratio_mean, ratio_max,
        clip_frac_positive and clip_frac_negative (fraction of the tokens of that sign whose ratio lies above `upper` or
        below `lower`; 0 if none). A bucket's carry the suffix "/staleness_LABEL"; it has no staleness_* and
        optimizer_steps_*, but token_frac, its fraction of all tokens.
    """
    rows = torch.cat([tally.sums, tally.maxima], dim=1)
    total = torch.cat([tally.sums.sum(0), tally.maxima.amax(0)]).unsqueeze(0)
    (num_all, *_), *_ = everything = torch.cat([total, rows]).tolist()

    found: dict[str, float] = {}
    for label, row in zip((None, *STALENESS_BUCKETS), everything, strict=True):
        num, ratio, ratio_squared, staleness, steps, positive, above, negative, below, *highest = row
        ratio_max, staleness_max, steps_max = highest
        if num == 0:
            continue
        metrics = {
            "ess": ratio * ratio / max(num * ratio_squared, sys.float_info.min),
            "ratio_mean": ratio / num,
            "ratio_max": ratio_max,
            "clip_frac_positive": above / max(positive, 1),
            "clip_frac_negative": below / max(negative, 1),
        }
        if label is None:
            metrics |= {"staleness_mean": staleness / num, "staleness_max": staleness_max}
            metrics |= {"optimizer_steps_mean": steps / num, "optimizer_steps_max": steps_max}
        else:
            metrics["token_frac"] = num / num_all
        suffix = "" if label is None else f"/staleness_{label}"
        found |= {f"offpolicy/{name}{suffix}": value for name, value in metrics.items()}
    return found
