"""The real thing end to end: OpenRLHF's Ray trainer, DeepSpeed actors and a vLLM engine, through our command."""

import json
import socket

import pipeline
import pytest
import recordings
import torch

OUR_METRICS = ("bapo/", "entropy/", "reward_fault/", "rollout/response_length_", "rollout/equal_reward_groups")


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path)


def test_ppo_through_our_command_has_the_losses_of_openrlhfs_own(directory):
    # OpenRLHF's prompt order is not seeded, so all prompts are one and the same, and their responses scripted: every
    # order of the prompts makes the same rollouts.
    row = json.dumps({"input": "1+2=", "label": "", "datasource": "sums"}) + "\n"
    (directory / "train.jsonl").write_text(row * 12)
    flags = dict(
        train__agent_func_path=pipeline.SUPPORT / "scripted_agent.py",
        reward__remote_url=None,
        actor__adam__lr=1e-2,
        actor__entropy_coef=0,
        ds__param_dtype="bf16",  # OpenRLHF's
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=16,
        train__max_epochs=2,
    )
    ours = pipeline.train(directory, pipeline.flags(directory, policy_loss="ppo", **flags), "ours")
    upstream_command = (str(pipeline.SUPPORT / "upstream_train.py"),)
    upstream = pipeline.train(directory, pipeline.flags(directory, **flags), "upstream", upstream_command)
    assert "bapo=namespace(" in ours and "bapo=namespace(" not in upstream  # it really was OpenRLHF's own command
    # The engine has memory for its 128 sequences at full length and for vLLM's empty block, not 1 GiB.
    assert "for 24 tokens per request: 129.00x" in ours

    ours, upstream = pipeline.steps(ours), pipeline.steps(upstream)
    assert len(ours) == len(upstream) == 3
    for mine, theirs in zip(ours, upstream, strict=True):
        assert theirs["policy_loss"] != 0 and theirs["ppo_clip_ratio"] > 0
        added = mine.keys() - theirs.keys()
        assert all(name.startswith(OUR_METRICS) for name in added), added
        assert 0 < mine["bapo/positive_share"] < 1 and mine["bapo/clip_high"] == 1.2
        for name in theirs.keys() - {"entropy_loss"}:  # OpenRLHF weighs its micro-batches by their tokens twice
            assert name.startswith("timing/") or mine[name] == theirs[name], name


def odd_digits(asked: dict) -> list[float]:
    """The rewards of a request: the share of odd digits in each response."""
    responses = [query[len(prompt) :] for query, prompt in zip(asked["query"], asked["prompts"], strict=True)]
    return [sum(response.count(digit) for digit in "13579") / 8 for response in responses]


def test_the_port_at_which_ranks_are_to_meet_stays_theirs_until_they_do():
    from openrlhf.trainer.ray.launcher import BaseDistributedActor

    port = BaseDistributedActor._get_free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    ranks = torch.distributed.TCPStore("localhost", port, world_size=1, is_master=True)
    ranks.set("rank", "0")
    assert ranks.get("rank") == b"0"


def test_gspo_through_our_command_clips_sequences_and_learns_from_the_rewards_of_two_servers(tmp_path, serve):
    directory = pipeline.make_model(tmp_path, num_prompts=128)
    first, second = (serve(lambda asked: (200, json.dumps({"rewards": odd_digits(asked)}))) for _ in range(2))
    settings = dict(policy_loss="gspo", data__max_samples=128, actor__eps_clip=0.05)
    flags = pipeline.flags(directory, reward__remote_url=f"{first.url},{second.url}", **settings)
    steps, batch, _ = recordings.train(directory, flags)
    assert len(steps) == 8 and len(first.requests) == len(second.requests) == 8 * 64 / 2
    given = [reward for asked in first.requests + second.requests for reward in odd_digits(asked)]
    assert sum(step["rollout/reward_mean"] for step in steps) / 8 == pytest.approx(sum(given) / len(given))
    pipeline.assert_rewards_rise(steps)

    mask, advantages = batch["action_mask"] > 0, batch["loss_advantages"]
    log_ratio = (batch["log_probs"] - batch["denominators"]) * mask
    log_ratio = (log_ratio.sum(-1) / mask.sum(-1)).unsqueeze(-1).expand_as(mask)
    ratio = log_ratio.exp()
    clipped = mask & torch.where(advantages > 0, ratio > 1.05, (advantages < 0) & (ratio < 0.95))
    for version, place in set(zip(batch["version"].tolist(), batch["place"].tolist(), strict=True)):
        rows = (batch["version"] == version) & (batch["place"] == place)
        expected = clipped[rows].sum() / mask[rows].sum()
        assert batch["clip_ratio"][rows].tolist() == pytest.approx([float(expected)] * int(rows.sum()))
    assert 0 < clipped.sum() < mask.sum() / 2
