"""Prompt groups without a reward are dropped, counted and replaced, and too many of them end the run.

The samples generators are those of tests/unit/test_partial_samples.py, with OpenRLHF's executor and a reward file.
"""

import copy
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path

import pipeline
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_partial_samples import GENERATE, NUM_SAMPLES, labels, make_generator, rollouts, without_ray  # noqa: F401

from openrlhf_bapo.offpolicy.partial_rollouts import PartialPool

REWARD = """
import math, torch

def reward_func(queries, prompts, labels, **kwargs):
    n = int(labels[0])
    if n in BAD:
        return {"rewards": BAD[n]}
    return {"rewards": torch.tensor([sum(c in "13579" for c in queries[0][len(prompts[0]):]) / 8])}
"""
NAN, NONE, TWO = "math.nan", "None", "[1.0, 2.0]"
MODES = [
    dict(partial__token_budget=3),
    dict(partial__token_budget=None),
    dict(partial__token_budget=None, replay__ratio=1),
]


@pytest.fixture
def generator_for(tmp_path):
    """A function that makes a generator over prompts 0, 1, ...; for those in `bad` the reward file answers as there."""

    def make(bad: dict[int, str], **flags):
        pipeline.make_model(tmp_path)
        answers = ", ".join(f"{n}: {answer}" for n, answer in bad.items())
        (tmp_path / "reward.py").write_text(REWARD + f"\nBAD = {{{answers}}}\n")
        return make_generator(tmp_path, **dict(reward_fault__max_drop_rate=0.9) | flags)

    return make


def faults(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if name.startswith("reward_fault/") and value}


@pytest.mark.parametrize("mode", MODES, ids=["partial", "plain", "replay"])
def test_a_group_with_a_response_without_a_reward_is_dropped_counted_and_replaced(generator_for, mode):
    generator = generator_for({1: NAN, 5: NONE, 6: NONE, 9: TWO}, **mode)
    trained, counts, num_drawn, has_ended = [], Counter(), 0, False
    while not has_ended:
        batch, _, num_prompts, has_ended = generator.generate_samples(**GENERATE)
        # Every drawn prompt is counted, those of dropped groups and their replacements too.
        num_drawn += num_prompts
        generated = set().union(*(engine.num_generated for engine in generator.vllm_engines))
        assert num_drawn == generator.num_prompts == len(generated)
        if not batch:  # OpenRLHF's own ends with an empty one
            continue
        assert len(batch) == 4 * NUM_SAMPLES  # whole to the end
        assert all(sample.rewards.isfinite() and sample.scores.isfinite() for sample in batch)
        counts.update(faults(batch.metrics))
        counts["partial"] += batch.metrics.get("partial/dropped_unrewarded", 0)
        trained += labels(batch)
    assert num_drawn == 20 and sorted(trained) == [n for n in range(20) if n not in (1, 5, 6, 9)]
    reasons = {"reward_fault/not_finite": 1, "reward_fault/none": 2, "reward_fault/wrong_length": 1}
    assert counts == Counter(
        reasons | {"reward_fault/dropped": 4, "partial": 4 if mode["partial__token_budget"] else 0}
    )


@pytest.mark.parametrize("mode", MODES, ids=["partial", "plain", "replay"])
@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5])
def test_more_groups_without_a_reward_than_the_rate_allows_end_the_run_with_the_cause(generator_for, mode, rate):
    # Batches of 4 groups; every one of these has a group without.
    generator = generator_for(dict.fromkeys(range(20), NAN), reward_fault__max_drop_rate=rate, **mode)
    with pytest.raises(RuntimeError) as error:
        generator.generate_samples(**GENERATE)
    file = generator.args.reward.remote_url[0]
    allowed = int(4 * rate)
    assert str(error.value) == (
        f"--reward.remote_url {file}: {file}: 'rewards' is nan; {allowed + 1} of a batch's 4 prompt groups have no "
        f"reward, --reward_fault.max_drop_rate {rate:g} allows {allowed}"
    )


@pytest.mark.parametrize("num_unfinished", [0, 1], ids=["complete groups", "unfinished groups"])
def test_a_run_that_missing_rewards_ended_resumes_and_trains_on_every_prompt_once_rewards_work(
    generator_for, tmp_path, num_unfinished
):
    flags = dict(partial__token_budget=3, reward_fault__max_drop_rate=0.0)
    ended = generator_for(dict.fromkeys(range(20), NAN), **flags)
    with pytest.raises(RuntimeError, match="have no reward"):
        ended.generate_samples(**GENERATE)
    for response in [group.responses[0] for group in ended.pool.complete][:num_unfinished]:
        ended.pool.restart(response)  # the others of its group have ended, without a reward
    ended.pool.save(tmp_path / "pool", None, {})
    resumed = generator_for({}, **flags)
    resumed.prompts_dataloader.load_state_dict(ended.prompts_dataloader.state_dict())
    resumed.take_up(PartialPool.load(tmp_path / "pool", ended.pool.config, {})[0])
    batches = list(rollouts(resumed))
    assert sorted(label for batch in batches for label in labels(batch)) == list(range(20))
    assert all(sample.rewards is not None for batch in batches for sample in batch)


def test_groups_that_an_evaluation_drops_are_no_groups_that_are_not_trained_on(generator_for):
    generator = generator_for({1: NAN}, partial__token_budget=None)
    generator.eval_dataloader = generator.prompts_dataloader
    samples = generator.generate_eval_samples(**GENERATE)
    assert len(samples) == 19 * NUM_SAMPLES and generator.untrained["unrewarded"] == 0


def test_max_drop_rate_applies_to_each_batch_separately(generator_for):
    generator = generator_for({n: NAN for n in range(20) if n % 5 == 0}, reward_fault__max_drop_rate=0.5)
    assert len([*rollouts(generator)]) == 4


def test_under_a_lag_max_drop_rate_is_of_all_groups_that_the_first_rollout_needs(generator_for):
    flags = dict(partial__token_budget=None, offpolicy__lag=1, num_prompts=11)  # it needs 8 groups and draws all 11
    generator = generator_for(dict.fromkeys(range(3), NAN), reward_fault__max_drop_rate=0.4, **flags)
    generator.generate_samples(**GENERATE)
    generator = generator_for(dict.fromkeys(range(3), NAN), reward_fault__max_drop_rate=0.3, **flags)
    with pytest.raises(RuntimeError, match="3 of a batch's 8 prompt groups have no reward"):
        generator.generate_samples(**GENERATE)


@pytest.mark.parametrize(("policy_loss", "is_dynamic"), [("bapo", False), ("ppo", False), ("ppo", True)])
@pytest.mark.parametrize("bad", [{3: NAN}, {}], ids=["a dropped group", "no fault"])
def test_a_short_last_batch_is_cut_to_whole_optimizer_steps_and_counted(generator_for, policy_loss, is_dynamic, bad):
    """With OpenRLHF's own losses only if a group was dropped, or with a dynamic batch."""
    flags = dict(partial__token_budget=None, train__batch_size=6, num_prompts=8 if bad else 7)
    flags |= dict(policy_loss="ppo", train__async_enable=True) if policy_loss == "ppo" else {}
    flags |= dict(train__dynamic_batch_enable=True, train__max_tokens_per_gpu=64) if is_dynamic else {}
    batches = [*rollouts(generator_for(bad, **flags))]
    is_cut = bool(bad) or policy_loss == "bapo" or is_dynamic
    assert [len(batch) for batch in batches] == [12, 6 if is_cut else 9]
    if not bad:  # the last prompts are left over
        assert [sample.place for batch in batches for sample in batch[::NUM_SAMPLES]] == [*range(6 if is_cut else 7)]
    assert batches[1].metrics.get("rollout/groups_left_over") == (1.0 if is_cut else None)
    counts = Counter(faults(batches[0].metrics)) + Counter(faults(batches[1].metrics))
    assert counts == ({"reward_fault/dropped": 1.0, "reward_fault/not_finite": 1.0} if bad else {})


def test_a_short_last_batch_gives_all_ranks_of_actor_and_critic_as_many_samples(generator_for):
    flags = dict(policy_loss="ppo", partial__token_budget=None, num_prompts=7, train__batch_size=6)
    flags |= dict(rollout__micro_batch_size=1, train__async_enable=True)
    critic = dict(algo__advantage__estimator="gae", critic__num_gpus_per_node=2)
    for ranks in (dict(actor__num_gpus_per_node=2), critic):
        *_, last = rollouts(generator_for({}, **flags | ranks))
        assert len(last) == 6 and last.metrics["rollout/groups_left_over"] == 1.0


@given(
    num_groups=st.integers(0, 60),
    size=st.integers(1, 6),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    sharing=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    train_batch=st.integers(1, 6),
    rollout_batch=st.integers(1, 6),
    accumulated=st.integers(1, 3),
    is_dynamic=st.booleans(),
    needs_whole_steps=st.booleans(),
)
def test_a_short_batch_is_cut_to_the_most_groups_that_fill_whole_optimizer_steps(
    num_groups, size, num_ranks, sharing, train_batch, rollout_batch, accumulated, is_dynamic, needs_whole_steps
):
    """If OpenRLHF splits the micro-batches of the log-probs over ranks, these are whole too, also with its own loss."""
    ring, tensor = sharing
    args = copy.deepcopy(arguments())
    args.actor.num_nodes, args.actor.num_gpus_per_node = num_ranks, ring * tensor
    args.ds.ring_attn_size, args.ds.tensor_parallel_size = ring, tensor
    args.rollout.n_samples_per_prompt, args.rollout.micro_batch_size = size, rollout_batch
    args.train.micro_batch_size, args.train.dynamic_batch_enable = train_batch, is_dynamic
    args.train.batch_size = num_ranks * train_batch * accumulated
    batches = [train_batch * accumulated] * needs_whole_steps + [rollout_batch] * (num_ranks > 1 and not is_dynamic)

    def is_whole(num: int) -> bool:
        return all(num * size % (num_ranks * batch) == 0 for batch in batches)

    found = pipeline.samples_generator(args)._num_trainable(num_groups, needs_whole_steps)
    assert found == max(filter(is_whole, range(num_groups + 1)))


@functools.cache
def arguments():
    """Arguments of an arbitrary run."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "reward.py").touch()
        return pipeline.parse(pipeline.flags(Path(directory), policy_loss="bapo"))


def test_an_evaluation_leaves_out_whole_prompts(generator_for):
    generator = generator_for({3: NAN}, partial__token_budget=None)
    generator.eval_dataloader = generator.prompts_dataloader
    samples = generator.generate_eval_samples(**GENERATE, n_samples_per_prompt=2)
    assert sorted(int(sample.labels[0]) for sample in samples) == sorted([n for n in range(20) if n != 3] * 2)
    assert generator.untrained.total() == 0  # it is not a group that training lost


def test_an_engine_gets_the_reward_limits_of_the_flags(generator_for):
    generator = generator_for({}, reward_fault__patience=7, reward_fault__timeout=2.5)
    for engine in generator.vllm_engines:
        limits = engine.executor.reward_limits
        assert (limits.patience, limits.timeout) == (7.0, 2.5)


def test_the_error_about_an_agents_invalid_reward_names_the_agent(tmp_path):
    argv = pipeline.flags(tmp_path, reward__remote_url=None, train__agent_func_path="agent.py")
    generator = pipeline.samples_generator(pipeline.parse(argv))
    sample = generator._process_response_into_experience(pipeline.response(reward=float("nan")), max_len=8)
    assert sample.rewards is None
    with pytest.raises(RuntimeError, match=r"^--train.agent_func_path agent.py: the reward of a response is nan; the"):
        generator._lose(sample.reward_fault, 9, 9)


ECHO = """
import json

def reward_func(queries, prompts, labels, **kwargs):
    with open(FILE, "a") as file:
        file.write(json.dumps({"query": queries, "prompts": prompts, "labels": labels}) + chr(10))
    return {"rewards": [0.5]}
"""


@pytest.mark.parametrize("mode", MODES[:2], ids=["partial", "plain"])
@pytest.mark.parametrize("source", ["function", "server"])
def test_a_reward_request_has_the_whole_text_the_prompt_and_the_label(generator_for, tmp_path, serve, mode, source):
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    generator, server = generator_for({}, **mode), serve((200, '{"rewards": [0.5]}'))
    (tmp_path / "echo.py").write_text(ECHO + f"\nFILE = {str(tmp_path / 'asked')!r}\n")
    for engine in generator.vllm_engines:
        engine.executor = SingleTurnAgentExecutor(str(tmp_path / "echo.py") if source == "function" else [server.url])
    trained = [sample for batch in rollouts(generator) for sample in batch]
    asked = server.requests
    if source == "function":
        asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    expected = []
    for sample in trained:
        (label,), text = sample.labels, generator.tokenizer.decode(sample.sequences[0])
        expected.append({"query": [text], "prompts": [f"{int(label):03}="], "labels": [label]})
        assert text.startswith(f"{int(label):03}=0") or sample.response_length == 1
    in_order = functools.partial(sorted, key=json.dumps)
    assert in_order(asked) == in_order(expected) and len(asked) == 20 * NUM_SAMPLES
