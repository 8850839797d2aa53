"""Hypothesis strategies: search settings and sets of tokens; and updates of a clip rule with them."""

import torch
from hypothesis import strategies as st

from openrlhf_bapo.rules.clip_config import CONTRIBUTIONS, ORDERS, TARGET_KINDS, ClipConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, UpdateBounds


@st.composite
def clip_configs(draw, **fixed) -> ClipConfig:
    """Any valid settings, including zero-width ranges and steps that do not divide the range."""
    target_kind = fixed.get("target_kind") or draw(st.sampled_from(TARGET_KINDS))
    lower = sorted(draw(st.tuples(*[st.floats(0.05, 1.0)] * 2)))
    upper = sorted(draw(st.tuples(*[st.floats(1.0, 4.0)] * 2)))
    settings = dict(
        positive_contribution_target=draw(st.floats(0.01, 0.99) if target_kind == "share" else st.floats(0.01, 5.0)),
        ratio_lower_start=lower[0],
        ratio_lower_max=lower[1],
        ratio_lower_step=draw(st.floats(0.01, 0.5)),
        ratio_upper_start=upper[0],
        ratio_upper_max=upper[1],
        ratio_upper_step=draw(st.floats(0.01, 1.0)),
        contribution=draw(st.sampled_from(CONTRIBUTIONS)),
        order=draw(st.sampled_from(ORDERS)),
        target_kind=target_kind,
    )
    return ClipConfig(**settings | fixed)


def tokens(min_size=0, max_size=40, **kwargs):
    """Lists of (ratio, advantage, weight), with ratios on both sides of every bound and weights of 0."""
    return st.lists(st.tuples(ratios(), advantages(**kwargs), weights()), min_size=min_size, max_size=max_size)


def ratios():
    """Importance ratios, including exactly 1 and values far outside of the bounds."""
    return st.one_of(st.just(1.0), st.floats(0.3, 4.0), st.floats(1e-6, 1e4))


def advantages(signs=(-1, 0, 1)):
    """Advantages of the given signs."""
    return st.tuples(st.sampled_from(signs), st.floats(0.01, 10.0)).map(lambda pair: pair[0] * pair[1])


def weights():
    """Weights of tokens: 0 (masked), 1, or 1 / length of the response."""
    return st.one_of(st.just(0.0), st.just(1.0), st.integers(1, 50).map(lambda length: 1 / length))


def as_tensors(token_list, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ratio, advantages, mask), each [num_tokens]."""
    return tuple(column.contiguous() for column in torch.tensor(token_list, dtype=dtype).reshape(-1, 3).unbind(1))


def as_tokens(token_list) -> Tokens:
    """Each token is a response of one token, [num_tokens, 1], with a probability at rollout that is its own."""
    ratio, advantages, weight = (x[:, None] for x in as_tensors(token_list))
    behavior_log_probs = -advantages.abs() / 4
    return Tokens(behavior_log_probs + ratio.log(), behavior_log_probs, advantages, weight)


def random_tokens(seed: int = 0, num: int = 4, dtype=torch.float64) -> Tokens:
    """Responses of both signs in turn, [num, 12], of 1 to 12 tokens each, with ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -2 * torch.rand(num, 12, generator=generator, dtype=torch.float64)
    log_probs = behavior + 0.7 * torch.randn(num, 12, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.arange(num) % 2 == 0, 1.0, -1.0)[:, None]
    advantages = sign * (0.1 + 2 * torch.rand(num, 1, generator=generator, dtype=torch.float64)).expand(num, 12)
    mask = torch.arange(12) < torch.randint(1, 13, (num, 1), generator=generator)
    return Tokens(log_probs.to(dtype), behavior.to(dtype), advantages.to(dtype), mask.double())


def closed(rule: ClipRule, *micro_batches: Tokens | list) -> UpdateBounds:
    """Tally the micro-batches of an update, and close it."""
    for each in micro_batches:
        rule.tally(each if isinstance(each, Tokens) else as_tokens(each))
    return rule.close_update()
