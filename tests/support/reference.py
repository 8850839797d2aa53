"""What tests compare with: Algorithm 1 as a plain loop over Python floats, and the metrics of an optimizer step."""

import math

import torch

from openrlhf_bapo import ClipConfig, find_clip_bounds
from openrlhf_bapo.rules.clip_rules import FixedBounds, Tokens
from openrlhf_bapo.rules.entropy_rule import EntropyRule


def contributions(tokens, lower: float, upper: float, contribution: str) -> tuple[float, float]:
    """(P, N) of tokens [(ratio, advantage, weight)] at one pair of bounds."""
    positive = negative = 0.0
    for ratio, advantage, weight in tokens:
        if advantage > 0:
            if contribution == "surrogate":
                positive += weight * advantage * min(ratio, upper)
            elif ratio <= upper:
                positive += weight * advantage * ratio
        elif advantage < 0:
            if contribution == "surrogate":
                negative += weight * -advantage * max(ratio, lower)
            elif ratio >= lower:
                negative += weight * -advantage * ratio
    return positive, negative


def walk(config: ClipConfig):
    """Yield the points (lower, upper) of the search path, in order."""
    lower = [config.ratio_lower_start]
    upper = [config.ratio_upper_start]

    def values(start, stop, step):
        return [min(start + k * step, stop) for k in range(1, math.floor((stop - start) / step + 1e-6) + 1)]

    yield lower[-1], upper[-1]
    raises = {
        "upper": (upper, values(config.ratio_upper_start, config.ratio_upper_max, config.ratio_upper_step)),
        "lower": (lower, values(config.ratio_lower_start, config.ratio_lower_max, config.ratio_lower_step)),
    }
    for side in ("upper", "lower") if config.order == "upper_first" else ("lower", "upper"):
        bound, raised = raises[side]
        for value in raised:
            bound.append(value)
            yield lower[-1], upper[-1]


def search(tokens, config: ClipConfig) -> dict:
    """Return the fields of ClipBounds: the chosen bounds, the shares there and at the start, and the other metrics."""
    tokens = [token for token in tokens if token[2] > 0]
    initial = None
    for lower, upper in walk(config):
        positive, negative = contributions(tokens, lower, upper, config.contribution)
        share = positive / (positive + negative) if positive + negative > 0 else math.nan
        if initial is None:
            initial = share
            if math.isnan(share):
                reached = True
                break
        value = share if config.target_kind == "share" else positive / (negative + 1e-8)
        reached = value >= config.positive_contribution_target
        if reached:
            break
    found = dict(lower=lower, upper=upper, positive_share=share, initial_share=initial, reached=reached)
    for contribution in ("surrogate", "gradient"):
        positive, negative = contributions(tokens, lower, upper, contribution)
        found[f"{contribution}_share"] = positive / (positive + negative) if positive + negative > 0 else math.nan
    signs = [advantage > 0 for _, advantage, _ in tokens if advantage != 0]
    found["positive_token_frac"] = sum(signs) / len(signs) if signs else math.nan
    clipped = {
        "positive": [ratio > upper for ratio, advantage, _ in tokens if advantage > 0],
        "negative": [ratio < lower for ratio, advantage, _ in tokens if advantage < 0],
    }
    for sign, of_sign in clipped.items():
        found[f"clip_frac_{sign}"] = sum(of_sign) / max(len(of_sign), 1)
    return found


def near_a_decision(token_list, config, margin: float) -> bool:
    """Return whether rounding may change the result, because a share is near the target or a ratio near a bound."""
    active = [token for token in token_list if token[2] > 0 and token[1] != 0]
    target = config.positive_contribution_target
    for lower, upper in walk(config):
        p, n = contributions(active, lower, upper, config.contribution)
        value = (p / (p + n) if p + n else math.nan) if config.target_kind == "share" else p / (n + 1e-8)
        if abs(value - target) <= margin * max(1, target) or (p + n and min(p, n) / (p + n) < margin):
            return True
        if any(abs(ratio - bound) <= margin * bound for ratio, _, _ in active for bound in (lower, upper)):
            return True
    return False


def expected_step(
    ratio: torch.Tensor, advantages: torch.Tensor, weight: torch.Tensor, config: ClipConfig
) -> tuple[tuple[float, float], dict[str, float]]:
    """Return (lower, upper) of the search on all tokens of an optimizer step, and the metrics that a trainer logs.

    The tensors have one shape. A token of weight 0 does not count.
    """
    found = find_clip_bounds(ratio, advantages, weight, config)
    lower, upper = found.lower.item(), found.upper.item()
    metrics = {"bapo/clip_low": lower, "bapo/clip_high": upper}
    for name in ("positive_share", "initial_share", "clip_frac_positive", "clip_frac_negative"):
        metrics[f"bapo/{name}"] = getattr(found, name).item()
    ratio, advantages = ratio[weight > 0], advantages[weight > 0]
    offpolicy = {
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_frac_positive": (ratio[advantages > 0] > upper).float().mean(),
        "clip_frac_negative": (ratio[advantages < 0] < lower).float().mean(),
    }
    return (lower, upper), metrics | {f"offpolicy/{name}": value.item() for name, value in offpolicy.items()}


def expected_entropy(
    ratio: torch.Tensor,
    behavior_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weight: torch.Tensor,
    bounds: tuple[float, float],
    dual_clip: float | None = None,
) -> dict[str, float]:
    """Return the metrics of the Entropy-Clip Rule on the tokens of one optimizer step between these bounds."""
    rule, tokens = EntropyRule(), Tokens(behavior_log_probs + ratio.log(), behavior_log_probs, advantages, weight)
    rule.tally(FixedBounds(*bounds), tokens, dual_clip)
    rule.close_update()
    return rule.take_metrics()
