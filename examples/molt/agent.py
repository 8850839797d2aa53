"""An agent for Molt with one turn per episode: the reward is 1 for a right final answer, and 0 for any other."""

import asyncio

from molt.agents import Env, Result
from molt.agents.base import StepEnvRunner

from openrlhf_bapo.math_tasks.reward import GRADER


class MathEnv(Env):
    """Ends after the first response, with the reward of `openrlhf_bapo.math_tasks`."""

    async def step(self, state: dict, **kwargs: object) -> Result:
        """Grade the response against the label."""
        grade = await asyncio.wrap_future(GRADER.submit(state["action_text"], str(state["label"])))
        return Result(reward=float(grade.is_correct))


class AgentRunner(StepEnvRunner):
    """The name that Molt looks for in the file of `--train.agent_path`."""

    def __init__(self) -> None:
        super().__init__(MathEnv)
