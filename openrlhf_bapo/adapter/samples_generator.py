"""OpenRLHF's SamplesGenerator, whose samples carry policy versions and, where needed, the engine's log-probs."""

import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_bapo.adapter.flags import is_off_policy

_SamplingParams = samples_generator.SamplingParams


class VersionedSamplesGenerator(samples_generator.SamplesGenerator):
    """Upstream's; with any of our off-policy features on, every sample knows where its tokens come from."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if is_off_policy(self.args):
            # Upstream asks for log-probs only for its own IS correction, and offers no other way in.
            samples_generator.SamplingParams = lambda **params: _SamplingParams(**params | {"logprobs": 1})

    def _process_response_into_experience(self, response: dict, **generate_kwargs) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        if is_off_policy(self.args):
            versions = torch.zeros(len(response["observation_tokens"]), dtype=torch.int32)
            for (start, end), segment in zip(response["action_ranges"], response["versions"], strict=True):
                versions[start:end] = torch.tensor(segment, dtype=torch.int32)
            # Cut as upstream cuts the action mask: [1, T - 1].
            experience.versions = versions[1 : experience.sequences.shape[1]].unsqueeze(0)
        return experience
