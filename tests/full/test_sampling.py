"""An agent that samples from another distribution than the run."""

import endings
import pipeline

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


def test_a_nucleus_of_an_agent_ends_a_run_whose_loss_reads_the_engines_log_probs(tmp_path):
    pipeline.make_model(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    agent = dict(train__agent_func_path=tmp_path / "agent.py", reward__remote_url=None)
    with endings.Run(tmp_path, train__async_enable=True, **agent) as run:
        code, lines = run.end()
    assert code == 1
    assert lines[-3].endswith(
        "the run has ended: --train.agent_func_path: the agent samples with top_p 0.5, which changes the engine's "
        "log-probs, and --offpolicy.ratio_base rollout uses them as the actor's; allowed: 1.0"
    )
