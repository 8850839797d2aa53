"""OpenRLHF's Experience with the policy version and the age of every token."""

from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.trainer.ppo_utils import experience


@dataclass
class OffPolicyExperience(experience.Experience):
    """Upstream's Experience with fields for off-policy training. Upstream batches each field by its role ("step")."""

    versions: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: the policy version that generated each action token; 0 elsewhere."""

    staleness: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: versions published between generation and this training step; 0 elsewhere."""

    optimizer_steps: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A) integer: optimizer steps between the weights that generated each action token and those that this training
    step starts from; 0 elsewhere."""

    start_log_probs: torch.Tensor = experience.tensor_field("step", default=None)
    """(B, A): log-probs of the weights that this training step starts from, as OpenRLHF has just computed them. With
    replay they are None for all samples: replayed samples have none, and all ranks must run the same forward passes."""


def use_experience(upstream: Any) -> None:
    """Put `OffPolicyExperience` into `openrlhf.trainer.ppo_utils.experience`."""
    upstream.Experience = OffPolicyExperience
