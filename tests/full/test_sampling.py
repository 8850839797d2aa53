"""An agent that samples from another distribution than the run."""

import endings
import pipeline
import pytest

AGENT = """
from copy import deepcopy

from openrlhf.utils.agent import SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(self, prompt, label, sampling_params, **kwargs):
        sampling_params = deepcopy(sampling_params)
        sampling_params.top_p = 0.5
        response = await super().execute(prompt=prompt, label=label, sampling_params=sampling_params, **kwargs)
        return response | {"reward": float(len(response["observation_tokens"]) % 2)}
"""


@pytest.mark.parametrize("policy_loss", ["bapo", "ppo"])
def test_a_nucleus_of_an_agent_ends_the_run_only_if_the_engines_log_probs_count(tmp_path, policy_loss):
    pipeline.make_model(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    agent = dict(train__agent_func_path=tmp_path / "agent.py", reward__remote_url=None, policy_loss=policy_loss)
    base = dict(offpolicy__ratio_base="recomputed") if policy_loss == "ppo" else {}
    run = dict(train__async_enable=True, train__num_episodes=1, **agent, **base)
    with endings.Run(tmp_path, **run) as started:
        code, lines = started.end()
    refused = (
        "the run has ended: --train.agent_func_path: the agent samples with top_p 0.5, which changes the engine's "
        "log-probs, and --offpolicy.ratio_base rollout compares them with the actor's; allowed: 1.0"
    )
    assert [code, any(refused in line for line in lines)] == ([0, False] if policy_loss == "ppo" else [1, True])
