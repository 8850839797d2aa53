"""OpenRLHF's Experience with what off-policy training must know about every token."""

from dataclasses import dataclass
from types import ModuleType

import torch
from openrlhf.trainer.ppo_utils import experience

from openrlhf_bapo.openrlhf.registration import call_what_waits


@dataclass
class OffPolicyExperience(experience.Experience):
    """Adds policy versions; upstream's batching treats the new fields by their role, like its own."""

    versions: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: the policy version that generated each action token, 0 elsewhere."""

    staleness: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: versions published between generation and this training step, 0 elsewhere."""

    optimizer_steps: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: optimizer steps between the weights that generated each action token and those that this training
    step starts from, 0 elsewhere."""

    start_log_probs: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A): log pi of the weights that this training step starts from, as OpenRLHF has just computed them. None with
    replay, where it has not for some samples: whether a micro-batch needs a forward is then the same on all ranks."""


def use_experience(upstream: ModuleType) -> None:
    """Put the class into `openrlhf.trainer.ppo_utils.experience`."""
    upstream.Experience = OffPolicyExperience


call_what_waits(__name__)
