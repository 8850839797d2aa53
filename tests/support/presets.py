"""Three updates of two micro-batches, and the bounds that a plain loop trains each of them between, by preset."""

import torch

from openrlhf_bapo.core.clip_config import ClipConfig
from openrlhf_bapo.core.clip_rules import Tokens, make_clip_rule

NUM_UPDATES, NUM_MICRO_BATCHES = 3, 2


def make_updates() -> list[list[dict[str, torch.Tensor]]]:
    """Micro-batches of 8 responses by update, each tensor [8, 12]; some ratios lie far from 1, beyond a dual clip."""
    generator, updates = torch.Generator().manual_seed(0), []
    for number in range(NUM_UPDATES):
        updates.append([])
        for _ in range(NUM_MICRO_BATCHES):
            old_log_probs = -2 * torch.rand(8, 12, generator=generator)
            shift = (0.8 + number) * torch.randn(8, 12, generator=generator)
            mask = torch.arange(12) < torch.randint(1, 13, (8, 1), generator=generator)
            updates[-1].append(
                dict(
                    log_probs=old_log_probs + shift,
                    old_log_probs=old_log_probs,
                    advantages=(torch.randn(8, 1, generator=generator) - 0.4).expand(8, 12).contiguous(),
                    mask=mask.long(),
                )
            )
    return updates


def plain_loop(preset: str) -> list[tuple[float, float, torch.Tensor]]:
    """(lower, upper, which tokens get a gradient [8, 12]) of every micro-batch, from the rule's objects alone."""
    config, found = ClipConfig.preset(preset), []
    rule = make_clip_rule(config)
    for update in make_updates():
        micro_batches = [
            Tokens(each["log_probs"], each["old_log_probs"], each["advantages"], each["mask"]) for each in update
        ]
        if rule.needs_tally_first and config.scope == "update":
            for tokens in micro_batches:
                rule.tally(tokens)
            rule.close_update()
        for tokens in micro_batches:
            if config.scope == "micro_batch" or not rule.needs_tally_first:
                rule.tally(tokens)
            if config.scope == "micro_batch":
                rule.close_update()
            lower, upper = rule.bounds(tokens)
            positive, ratio = tokens.advantages > 0, tokens.ratio
            trained = torch.where(positive, ratio <= upper.float(), ratio >= lower.float()) & (tokens.weight > 0)
            if config.dual_clip is not None:
                trained &= positive | (ratio < config.dual_clip)
            found.append((float(lower), float(upper), trained))
        if not rule.needs_tally_first:
            rule.close_update()
    return found


def assert_same(found: list[tuple], preset: str) -> None:
    """Whether a framework's (lower, upper, gradient [8, 12]) of every micro-batch are the plain loop's."""
    for (lower, upper, gradient), (plain_lower, plain_upper, trained) in zip(found, plain_loop(preset), strict=True):
        assert abs(float(lower) - plain_lower) < 1e-12 and abs(float(upper) - plain_upper) < 1e-12, preset
        assert torch.equal(gradient != 0, trained), preset
