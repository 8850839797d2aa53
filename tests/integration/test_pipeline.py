"""The real thing end to end: OpenRLHF's Ray trainer, DeepSpeed actors and a vLLM engine, through our command."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator

import pipeline
import pytest
import recordings
import torch


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
        assert all(
            name.startswith(
                ("bapo/", "entropy/", "reward_fault/", "rollout/response_length_", "rollout/equal_reward_groups")
            )
            for name in added
        ), added
        assert 0 < mine["bapo/positive_share"] < 1 and mine["bapo/clip_high"] == 1.2
        for name in theirs:
            assert name.startswith("timing/") or mine[name] == theirs[name], name


@contextlib.contextmanager
def reward_server() -> Iterator[tuple[str, list[float]]]:
    """A server's URL and the rewards that it has given: the share of odd digits in the response."""
    given = []

    class Rewards(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            responses = [query[len(prompt) :] for query, prompt in zip(asked["query"], asked["prompts"], strict=True)]
            rewards = [sum(response.count(digit) for digit in "13579") / 8 for response in responses]
            given.extend(rewards)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {}}).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rewards) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/get_reward", given
        server.shutdown()


def test_the_port_at_which_ranks_are_to_meet_stays_theirs_until_they_do():
    from openrlhf.trainer.ray.launcher import BaseDistributedActor

    port = BaseDistributedActor._get_free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    ranks = torch.distributed.TCPStore("localhost", port, world_size=1, is_master=True)
    ranks.set("rank", "0")
    assert ranks.get("rank") == b"0"


def test_gspo_through_our_command_clips_sequences_and_learns_from_the_rewards_of_two_servers(tmp_path):
    directory = pipeline.make_model(tmp_path, num_prompts=128)
    with reward_server() as (first, given_first), reward_server() as (second, given_second):
        flags = pipeline.flags(
            directory,
            policy_loss="gspo",
            reward__remote_url=f"{first},{second}",
            data__max_samples=128,
            actor__eps_clip=0.05,
        )
        recorder = recordings.environment(directory / "recording")
        steps = pipeline.steps(pipeline.train(directory, flags, "gspo", **recorder))
    assert len(steps) == 8 and len(given_first) == len(given_second) == 8 * 64 / 2
    given = given_first + given_second
    assert sum(step["rollout/reward_mean"] for step in steps) / 8 == pytest.approx(sum(given) / len(given))
    pipeline.assert_rewards_rise(steps)

    batch = recordings.trained_on(directory / "recording")
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
