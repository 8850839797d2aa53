"""The change of entropy that the paper's Entropy-Clip Rule predicts for an update (section 3), by quadrant.

An update at learning rate eta changes the entropy by about -eta Cov(log pi(y), A(y) X(y)), with y sampled from pi (Eq.
6 and 7, without the constant; the quadrants are those of appendix B.4.2, Table 4). Our tokens are sampled from the
behavior policy. Each has an importance ratio r, a weight m in the loss, and a factor w: the update follows the sum of m
w A grad log pi. In PPO w is r for tokens trained on and 0 for the others, so w = r X. Means over the tokens, weighted
by m, are then expectations over pi:

    E[A X] = mean(w A)        E[A X log pi] = mean(w A log pi)        h = E[log pi] = mean(r log pi) / mean(r)
    -Cov(log pi, A X) = mean(change)        change = -w A (log pi - h)

A rule that gives weights has X = w / r. The sign of the change of each token is that of its quadrant in Table 4: "high"
and "low" are log pi above and below h. A token that is left out (w = 0) has the change that it would have at w = r.

The prediction is exact, to first order, for one table of logits that moves by eta A X, as in a natural gradient. A
language model has a distribution for each prefix, and moves all of them through shared weights; h is a mean over all
prefixes of an update; and eta is not known under Adam. So compare it with the measured entropy by correlation.

h is known at the end of an update, so tokens are added up by bins of log pi. A bin counts as high or low by the mean of
its tokens. All sums and signs are exact, but in the bin around h, 19% wide, tokens on both sides offset each other.
"""

from collections.abc import Callable

import torch

from openrlhf_bapo.rules.clip_bounds import _LANES
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens

QUADRANTS = ("positive_high", "positive_low", "negative_high", "negative_low")
"""Sign of the advantage, and log pi above or below h."""

FATES = ("trained", "left_out")

# Bins of -log pi (nats), four to an octave. The first reaches down to 0, and the last has no upper edge.
_LOWEST = 2.0**-11
_NUM_BINS = 64
_NUM_CELLS = len(FATES) * 2 * _NUM_BINS


@torch.no_grad()
def tally_entropy(
    log_probs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    gradient_weights: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Add up a set of tokens in one pass, on their device, without host synchronization. Tallies add.

    Args:
        log_probs: log pi_theta, any shape; where `weight` is 0, this and the other arguments may have any value.
        ratio: importance ratios pi_theta / pi_behavior, the same shape.
        advantages: the same shape.
        gradient_weights: w, the same shape, at least 0 (`ClipRule.gradient_weights`).
        weight: m, the same shape; the token's weight in the loss, 0 for "no token".

    Returns:
        float64 [515]: sums of m, of m r and of m r log pi; of m w A by fate, sign of A and bin of log pi; and of
        m w A log pi likewise. w is r for tokens that are left out.
    """
    values = (weight, log_probs, ratio, advantages, gradient_weights)
    is_token = (weight > 0).flatten()
    m, x, r, a, w = (torch.where(is_token, value.flatten().double(), 0.0) for value in values)
    is_left_out = w == 0
    size = m * torch.where(is_left_out, r, w) * a
    cell = (4 * (x.float() / -_LOWEST).clamp(min=1).log2()).int().clamp(0, _NUM_BINS - 1)  # clamps NaN too
    lane = torch.arange(x.numel(), dtype=torch.int32, device=x.device) % _LANES  # see clip_bounds.py
    cell += (2 * is_left_out + (a < 0).int()) * _NUM_BINS + lane * _NUM_CELLS
    in_lanes = (x.new_zeros(_LANES * _NUM_CELLS).index_add_(0, cell, part) for part in (size, size * x))
    moments = torch.stack([m.sum(), m @ r, (m * r) @ x])
    return torch.cat([moments, *(part.view(_LANES, _NUM_CELLS).sum(0) for part in in_lanes)])


@torch.no_grad()
def entropy_changes(tally: torch.Tensor) -> torch.Tensor:
    """Return the change of each quadrant, [..., 2 fates, 4 quadrants], in nats per token and unit of learning rate.

    Positive values raise entropy. The prediction is the sum over the quadrants of the tokens trained on.

    Args:
        tally: [..., 515], from `tally_entropy`. The changes of an update without tokens are NaN.
    """
    num, sum_r, sum_r_x = tally[..., :3, None, None, None].unbind(-4)
    size, size_x = tally[..., 3:].unflatten(-1, (2, len(FATES), 2, _NUM_BINS)).unbind(-4)
    change = (sum_r_x / sum_r * size - size_x) / num  # [..., fates, signs, bins]
    # The advantages of a bin have one sign, so the sign of its change says on which side of h its tokens are.
    falls, rises = change.clamp(max=0).sum(-1), change.clamp(min=0).sum(-1)
    return torch.stack([falls[..., 0], rises[..., 0], rises[..., 1], falls[..., 1]], -1)


class EntropyRule:
    """The predictions of the updates of one training process: tally every micro-batch, then `close_update`."""

    def __init__(self) -> None:
        self._running: torch.Tensor | None = None
        self._closed: list[torch.Tensor] = []

    def tally(self, rule: ClipRule, tokens: Tokens, dual_clip: float | None = None) -> None:
        """Add one micro-batch to the running update, as the rule trains on it between its bounds or with its weights.

        The loss leaves out tokens with A < 0 and a ratio above `dual_clip`; None: no dual clip.
        """
        weights = rule.gradient_weights(tokens)
        if dual_clip is not None and rule.weights(tokens) is None:
            weights = weights * ((tokens.advantages >= 0) | (tokens.ratio <= dual_clip))
        part = tally_entropy(tokens.log_probs, tokens.ratio, tokens.advantages, weights, tokens.weight)
        self._running = part if self._running is None else self._running + part

    def close_update(self, is_skipped: bool = False) -> None:
        """Close the running update after its optimizer step; forget it if the step was skipped."""
        if self._running is not None and not is_skipped:
            self._closed.append(self._running)
        self._running = None

    def take_metrics(self, all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, float]:
        """Return "entropy/predicted_change" and "entropy/QUADRANT_FATE", means over the updates since the last call.

        Synchronizes with the device once. {} without updates.

        Args:
            all_reduce: adds [num_updates, 515] over all ranks, all of which closed the same updates; None: one process.
        """
        closed, self._closed = self._closed, []
        if not closed:
            return {}
        tallies = torch.stack(closed)
        changes = entropy_changes(tallies if all_reduce is None else all_reduce(tallies)).nanmean(0)
        names = ["predicted_change", *(f"{quadrant}_{fate}" for fate in FATES for quadrant in QUADRANTS)]
        values = torch.cat([changes[:1].sum(1), changes.flatten()]).tolist()
        return {f"entropy/{name}": value for name, value in zip(names, values, strict=True)}
