"""OpenRLHF's SamplesGenerator, whose samples carry policy versions and, where needed, the engine's log-probs."""

import math

import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_bapo.adapter.failures import FAILED_REWARD
from openrlhf_bapo.adapter.flags import is_off_policy

_SamplingParams = samples_generator.SamplingParams


class VersionedSamplesGenerator(samples_generator.SamplesGenerator):
    """Upstream's; with any of our off-policy features on, every sample knows where its tokens come from.

    Samples come in the order of their prompts, whichever was there first; with `--train.full_determinism_enable` each
    is drawn with a seed that follows from `--train.seed` and the prompt's place in the run.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_prompts = 0
        """Prompts drawn for training so far, those before a resume included."""
        # Upstream asks for log-probs only for its own IS correction, and offers no other way in.
        ours = {"logprobs": 1} if is_off_policy(self.args) else {}
        if self.args.train.full_determinism_enable:
            ours["seed"] = self.args.train.seed
        samples_generator.SamplingParams = lambda **params: _SamplingParams(**params | ours)

    def generate_eval_samples(self, **generate_kwargs) -> list[Experience]:
        """As upstream's; the prompts have places of their own, which follow from how far training has come."""
        drawn, self.num_prompts = self.num_prompts, -(self.num_prompts + 1) << 32
        try:
            return super().generate_eval_samples(**generate_kwargs)
        finally:
            self.num_prompts = drawn

    def _generate_vllm(self, *args, **kwargs) -> tuple[list[Experience], int, bool]:
        experiences, *rest = super()._generate_vllm(*args, **kwargs)
        return [*sorted(experiences, key=lambda experience: experience.place)], *rest

    def _dispatch_prompts_to_vllm(self, prompts: list[str], *args, **kwargs) -> list:
        placed = [*enumerate(prompts, start=self.num_prompts)]
        self.num_prompts += len(prompts)
        return super()._dispatch_prompts_to_vllm(placed, *args, **kwargs)

    def _process_response_into_experience(self, response: dict, **generate_kwargs) -> Experience:
        response = response | {name: _first(response[name]) for name in ("reward", "scores")}
        response["extra_logs"] = {name: _first(value) for name, value in response["extra_logs"].items()}
        if self.args.reward.remote_url and not _is_number(response["reward"]):
            # Upstream would go on with None or NaN, and die elsewhere or train on it.
            why = response["extra_logs"].get(FAILED_REWARD, "the engine's log (RolloutRayActor) may say why")
            raise RuntimeError(
                f"--reward.remote_url {','.join(self.args.reward.remote_url)}: the reward of a response is "
                f"{response['reward']!r}: {why}"
            )
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.place = response.get("place")
        if is_off_policy(self.args):
            versions = torch.zeros(len(response["observation_tokens"]), dtype=torch.int32)
            for (start, end), segment in zip(response["action_ranges"], response["versions"], strict=True):
                versions[start:end] = torch.tensor(segment, dtype=torch.int32)
            # Cut as upstream cuts the action mask: [1, T - 1].
            experience.versions = versions[1 : experience.sequences.shape[1]].unsqueeze(0)
        return experience


def _first(value):
    """A reward server answers one response with lists of one."""
    return value[0] if isinstance(value, list) else value


def _is_number(reward) -> bool:
    return isinstance(reward, int | float | torch.Tensor) and math.isfinite(reward)
