"""Three updates of two micro-batches, and how a plain loop trains each of them, by preset and by other rule."""

import pipeline
import torch

from openrlhf_bapo.rules.clip_config import PRESETS
from openrlhf_bapo.rules.clip_rules import Tokens
from openrlhf_bapo.rules.other_rules import RULES, as_clip_rule

NUM_UPDATES, NUM_MICRO_BATCHES = 3, 2
SAPO, MINE = f"{pipeline.REPOSITORY}/examples/my_rule.py:Sapo", f"{pipeline.SUPPORT}/own_rules.py:Mine"
NAMES = (*PRESETS, *RULES, SAPO, MINE)


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


def plain_loop(name: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(lower, upper, gradient of the token-mean loss [8, 12]) of every micro-batch, from the rule's objects alone."""
    rule, found = as_clip_rule(name), []
    config = rule.config
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
            weights, mask = rule.gradient_weights(tokens), tokens.weight
            if config.dual_clip is not None:
                weights = weights * ((tokens.advantages > 0) | (tokens.ratio < config.dual_clip))
            found.append((*rule.bounds(tokens), -weights * tokens.advantages * mask / mask.sum()))
        if not rule.needs_tally_first:
            rule.close_update()
    return found


def assert_same(found: list[tuple], name: str) -> None:
    """Whether a framework's (lower, upper, gradient [8, 12]) of every micro-batch are the plain loop's."""
    has_weights = as_clip_rule(name).has_weights
    for (*bounds, gradient), (*plain_bounds, plain_gradient) in zip(found, plain_loop(name), strict=True):
        assert torch.equal(gradient != 0, plain_gradient != 0), name
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5, atol=0, msg=name)
        for bound, plain in zip(bounds, plain_bounds, strict=True):
            atol = 1e-12 if plain.dtype == torch.float64 else 1e-6
            if not has_weights:
                torch.testing.assert_close(torch.as_tensor(bound), plain, rtol=0, atol=atol, msg=name)
