"""The scripted agent with an engine's log-probs, for IS correction, and with responses that were cut."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("scripted_agent", Path(__file__).with_name("scripted_agent.py"))
_scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_scripted)


class AgentExecutor(_scripted.AgentExecutor):
    """Each token has the same log-prob, near the initial policy's mean. Every fourth response counts as cut."""

    num_different = 4

    async def execute(self, *args, **kwargs):
        """Return a scripted response, in the form of OpenRLHF's own executors."""
        response = await super().execute(*args, **kwargs)
        (start, end), num_tokens = response["action_ranges"][0], len(response["observation_tokens"])
        is_cut = self.num_seen[response["prompt"]] % 4 == 0
        log_probs = [0.0] * start + [-2.5] * (end - start) + [0.0] * (num_tokens - end)
        return response | {"rollout_log_probs": log_probs, "truncated": is_cut}
