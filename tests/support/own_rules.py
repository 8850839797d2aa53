"""Clip rules of one's own, as a user has them in a file: BAPO's steady bounds, and some that are wrong."""

from dataclasses import replace

import torch

from openrlhf_bapo import ClipConfig, FixedBounds, SmoothingConfig, SteadyBounds, WeightRule


class Mine(SteadyBounds):
    def __init__(self, half_life: float = 9.0, contribution: str = "surrogate", target: float = 0.5):
        config = ClipConfig(contribution=contribution, positive_contribution_target=target)
        super().__init__(config, SmoothingConfig(half_life))
        self.contribution, self.target = contribution, target


class Switch(FixedBounds):
    def __init__(self, wide: bool = False):
        super().__init__(0.8, 2.0 if wide else 1.2)
        self.wide = wide


class NoRule:
    pass


class Unfinished(WeightRule):
    pass


class NoDefault(FixedBounds):
    def __init__(self, low):
        pass


class Broken(FixedBounds):
    def __init__(self, low: int = 0):
        raise KeyError(low)


class Flat(WeightRule):
    def weights(self, tokens):
        return tokens.ratio.mean(-1)


class PerToken(FixedBounds):
    def __init__(self):
        super().__init__(0.8, 1.2)

    def bounds(self, tokens):
        return self.lower.expand_as(tokens.ratio), self.upper.expand_as(tokens.ratio)


class Negative(WeightRule):
    def weights(self, tokens):
        return -tokens.ratio


class Failing(WeightRule):
    def weights(self, tokens):
        return 1 / 0


class Unkept(SteadyBounds):
    def __init__(self, low: float = 0.6):
        super().__init__(ClipConfig(ratio_lower_start=low), SmoothingConfig(9.0))


class Annealed(Mine):
    def _update(self, tally):
        self.target *= 0.9
        return super()._update(tally)


class Metric(Mine):
    def _update(self, tally):
        return replace(super()._update(tally), others={"mine": 1.0})


class Counting(Mine):
    num_updates = 0

    def state_dict(self):
        return super().state_dict() | {"num_updates": self.num_updates}


class Forgetful(Mine):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"upper": torch.tensor(1.5, dtype=torch.float64)})
