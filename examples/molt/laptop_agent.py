"""The agent of laptop.sh: the reward of examples/digits.py."""

import sys
from pathlib import Path

from molt.agents import Env, Result
from molt.agents.base import StepEnvRunner

sys.path.append(str(Path(__file__).resolve().parents[1]))
from digits import reward


class DigitsEnv(Env):
    """Ends after the first response."""

    async def step(self, state: dict, **kwargs: object) -> Result:
        """Return the response's reward."""
        return Result(reward=reward(state["action_text"]))


class AgentRunner(StepEnvRunner):
    """The name that Molt looks for in the file of `--train.agent_path`."""

    def __init__(self) -> None:
        super().__init__(DigitsEnv)
