"""An OpenRLHF agent (`--train.agent_func_path`) whose responses depend only on the prompt and are equal in all runs."""

import collections
import random

from openrlhf.utils.agent import AgentExecutorBase

EOS = 1


class AgentExecutor(AgentExecutorBase):
    """Returns different responses per prompt, in a fixed order. The reward is 1 if the second token is odd."""

    num_different = 16
    """Responses before the first comes again: as many as a group has, because groups come back in any order."""

    def __init__(self):
        self.num_seen = collections.Counter()

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        """Return one scripted response, in the form of OpenRLHF's own executors."""
        rng = random.Random(f"{prompt} {self.num_seen[prompt] % self.num_different}")
        self.num_seen[prompt] += 1
        prompt_tokens = hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        response = [rng.randint(3, 12) for _ in range(rng.randint(2, 7))] + [EOS]
        reward = float(response[1] % 2)
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "reward": reward,
            "scores": reward,
            "observation_tokens": prompt_tokens + response,
            "action_ranges": [(len(prompt_tokens), len(prompt_tokens) + len(response))],
            "rollout_log_probs": None,
            "truncated": False,
            "extra_logs": {},
        }
