"""The real thing end to end: OpenRLHF's Ray trainer, DeepSpeed actors and a vLLM engine, through our command."""

import json
from pathlib import Path

import pipeline
import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path)


def test_ppo_through_our_command_has_the_losses_of_openrlhfs_own(directory):
    # OpenRLHF's prompt order is not seeded, so all prompts are one and the same, and their responses scripted: every
    # order of the prompts makes the same rollouts.
    row = json.dumps({"input": "1+2=", "label": "", "datasource": "sums"}) + "\n"
    (directory / "train.jsonl").write_text(row * 12)
    flags = dict(
        train__agent_func_path=TESTS / "scripted_agent.py",
        reward__remote_url=None,
        actor__adam__lr=1e-2,
        actor__entropy_coef=0,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=16,
        train__max_epochs=2,
    )
    ours = pipeline.train(directory, pipeline.flags(directory, policy_loss="ppo", **flags), "ours")
    upstream_command = (str(TESTS / "upstream_train.py"),)
    upstream = pipeline.train(directory, pipeline.flags(directory, **flags), "upstream", upstream_command)
    assert "bapo=namespace(" in ours and "bapo=namespace(" not in upstream  # it really was OpenRLHF's own command

    ours, upstream = pipeline.steps(ours), pipeline.steps(upstream)
    assert len(ours) == len(upstream) == 3
    for mine, theirs in zip(ours, upstream, strict=True):
        assert theirs["policy_loss"] != 0 and theirs["ppo_clip_ratio"] > 0
        assert without_timing(mine) == without_timing(theirs)


def without_timing(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}
