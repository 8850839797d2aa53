"""Rollouts under a token budget: which groups are handed over, in which order, and that no prompt is lost.

Our samples generator, our methods of the engine actor, OpenRLHF's executor with its reward, and its data loader are
real. All of them run in this process without Ray, and `ScriptedEngine` stands for vLLM.
"""

import asyncio
import functools
import random
from argparse import Namespace
from collections import Counter

import pipeline
import pytest
import torch
from openrlhf.datasets import PromptDataset
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer

from openrlhf_bapo.openrlhf import partial_rollouts
from openrlhf_bapo.openrlhf.partial_rollouts import make_samples_generator
from openrlhf_bapo.openrlhf.replay_checkpoint import _partial_fingerprint, load_unfinished
from openrlhf_bapo.openrlhf.vllm_engine import _RESPONSE

NUM_SAMPLES = 3
SIZES = dict(
    policy_loss="bapo",
    rollout__batch_size=4,
    rollout__n_samples_per_prompt=NUM_SAMPLES,
    rollout__micro_batch_size=6,
    rollout__max_new_tokens=16,
    train__batch_size=6,
    train__micro_batch_size=1,
)


class ScriptedEngine:
    """An engine actor that generates "0123..." after each prompt, and ends each response at its length in `lengths`.

    A call is executed when its result is requested. Calls sent before `stop_growing` then end after any token.
    """

    def __init__(self, directory, lengths) -> None:
        from openrlhf_bapo.openrlhf import vllm_engine

        self.executor = SingleTurnAgentExecutor(str(directory / "reward.py"))
        under_way = Namespace(request_states={"under way": None})
        self.llm = Namespace(num_weight_updates=0, compared=None, output_processor=under_way, abort=self._abort)
        self.lengths, self.min_tokens, self.random = lengths, 1, random.Random(0)
        self.is_stopping, self.num_generated, self.seed_names, self.params = False, Counter(), [], []
        executed_at_once = {
            "stop_growing": lambda: asyncio.run(vllm_engine.stop_growing(self)),
            "num_weight_updates": lambda: vllm_engine.num_weight_updates(self),
            "limit_rewards": lambda *limits: vllm_engine.limit_rewards(self, *limits),
            "compare_log_probs": lambda *compared: vllm_engine.compare_log_probs(self, *compared),
            "get_num_unfinished_requests": lambda: 0,
        }
        for name, call in executed_at_once.items():
            setattr(self, name, Namespace(remote=functools.partial(self._execute, call)))
        for method in (vllm_engine.grow_responses, vllm_engine.generate_responses):
            setattr(self, method.__name__, Namespace(remote=functools.partial(self._send, method)))

    def _execute(self, call, *given):
        found = call(*given)
        return Ref(lambda: found)

    def _send(self, method, **request):
        self.is_stopping = False
        return Ref(lambda: asyncio.run(method(self, **request)))

    async def _abort(self, request_ids: list[str], internal: bool) -> None:
        assert request_ids == ["under way"] and internal
        self.is_stopping = True

    async def generate(self, prompt_tokens: list[int], params, multi_modal_data=None) -> Namespace:
        response = _RESPONSE.get()
        self.seed_names.append(response.seed_name)
        self.params.append(params)
        assert params.max_tokens > 0 and params.logprobs == 1
        prompt, kept = prompt_tokens[:4], prompt_tokens[4:]
        assert params.min_tokens == max(0, self.min_tokens - len(kept))
        num_left = self.lengths[tuple(prompt)] - len(kept)
        stop_at = self.random.randint(0, params.max_tokens) if self.is_stopping else params.max_tokens
        tokens = [3 + place % 10 for place in range(len(kept), len(kept) + min(num_left, stop_at))]
        reason = "abort" if stop_at < params.max_tokens else "length"
        if num_left <= stop_at:
            tokens[-1], reason = pipeline.EOS, "stop"
        self.num_generated[tuple(prompt)] += len(tokens)
        response.versions.append([self.llm.num_weight_updates] * len(tokens))
        log_probs = [{token: Namespace(logprob=-0.25 - self.llm.num_weight_updates)} for token in tokens]
        return Namespace(outputs=[Namespace(token_ids=tokens, logprobs=log_probs, finish_reason=reason)])


class Ref:
    """A reference to a call that is executed when its result is requested."""

    def __init__(self, work) -> None:
        self.work = work


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("partial"))


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    def get(refs):
        return [ref.work() for ref in refs] if isinstance(refs, list) else refs.work()

    def wait(refs, **_):
        place = random.Random(len(refs)).randrange(len(refs))
        return [refs[place]], refs[:place] + refs[place + 1 :]

    for module in (partial_rollouts, samples_generator, vllm_engine):
        monkeypatch.setattr(module, "ray", Namespace(get=get, wait=wait))


def make_generator(directory, num_prompts=20, lengths=None, num_engines=2, **flags):
    """Make our samples generator with `num_prompts` prompts.

    The responses to prompt n have `lengths[n]` tokens, by default 1 + n % 10.
    """
    settings = SIZES | dict(train__batch_size=NUM_SAMPLES, partial__token_budget=3)
    args = pipeline.parse(pipeline.flags(directory, **settings | flags))
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    rows = [{"input": f"{n // 100}{n // 10 % 10}{n % 10}=", "label": str(n)} for n in range(num_prompts)]
    dataset = PromptDataset(rows, tokenizer, Namespace(args=args, is_rank_0=lambda: False))
    loader = StatefulDataLoader(dataset, 1, shuffle=True, collate_fn=dataset.collate_fn)
    lengths = lengths or [1 + n % 10 for n in range(num_prompts)]
    by_prompt = {tuple(tokenizer(row["input"])["input_ids"]): n for row, n in zip(rows, lengths, strict=True)}
    engines = [ScriptedEngine(directory, by_prompt) for _ in range(num_engines)]
    return make_samples_generator(Namespace(args=args), loader, None, tokenizer, engines)


GENERATE = dict(max_len=24, max_new_tokens=16)


def publish(generator) -> None:
    for engine in generator.vllm_engines:
        engine.llm.num_weight_updates += 1


def rollouts(generator):
    """Yield the batches of an episode. Weights are published after each of them."""
    while True:
        samples, _, _, is_exhausted = generator.generate_samples(**GENERATE)
        yield samples
        if is_exhausted:
            return
        publish(generator)


def labels(samples) -> list[int]:
    """Return one label per group, and assert that the samples of a group are next to each other."""
    found = [int(sample.labels[0]) for sample in samples]
    assert found == [label for label in found[::NUM_SAMPLES] for _ in range(NUM_SAMPLES)]
    return found[::NUM_SAMPLES]


def test_every_prompt_of_an_episode_is_trained_on_once_with_whole_responses_in_full_batches(directory):
    generator = make_generator(directory)
    for _ in range(2):  # episodes
        batches = list(rollouts(generator))
        assert [len(batch) for batch in batches] == [4 * NUM_SAMPLES] * 5
        assert sorted(label for batch in batches for label in labels(batch)) == list(range(20))
        for sample in (sample for batch in batches for sample in batch):
            length = 1 + int(sample.labels[0]) % 10
            tokens = sample.sequences[0, 4:].tolist()
            assert tokens == [3 + n for n in range(length - 1)] + [pipeline.EOS]
            assert sample.action_mask[0, 3:].tolist() == [1] * length
            assert sample.response_length.item() == length and not sample.truncated.item()
            # The reward is that of the whole response.
            odd = sum(token - 3 in (1, 3, 5, 7, 9) for token in tokens if token >= 3)
            assert sample.rewards.item() == odd / 8
            # Each log-prob is that of its token's version.
            versions = sample.versions[0, 3:]
            assert torch.equal(sample.rollout_log_probs[0, 3:], -0.25 - versions.float())
            assert versions.tolist() == sorted(versions.tolist())
    # No token was generated twice.
    generated = sum((engine.num_generated for engine in generator.vllm_engines), Counter())
    assert sum(generated.values()) == 2 * NUM_SAMPLES * sum(1 + n % 10 for n in range(20))


def test_as_many_groups_are_in_flight_as_oversampling_asks_for(directory):
    generator = make_generator(directory, lengths=[9] * 20, partial__oversample=2.0)
    samples, _, num_prompts, _ = generator.generate_samples(**GENERATE)
    assert num_prompts == 8 and len(samples) == 4 * NUM_SAMPLES
    assert samples.metrics["partial/started"] == 8 and samples.metrics["partial/taken"] == 4
    assert samples.metrics["partial/in_flight"] + samples.metrics["partial/waiting"] == 4
    assert samples.unfinished is generator.pool


def test_responses_stop_on_every_engine_once_enough_groups_are_complete_and_calls_go_to_the_engine_that_grows_fewest(
    directory,
):
    torch.manual_seed(0)  # of the order of the prompts
    generator = make_generator(directory, 60, partial__oversample=3.0, algo__dynamic_filtering_enable=True)
    generator.args.algo.dynamic_filtering_range = (0.125, 0.5)  # drops groups, whose replacements start in mid-rollout
    growing = dict.fromkeys(generator.vllm_engines, 0)  # responses
    events, num_stops = [], Counter()

    def observe(engine) -> None:
        grow_responses, stop_growing = engine.grow_responses.remote, engine.stop_growing.remote

        def grow(kept_tokens, **request) -> Ref:
            assert growing[engine] == min(growing.values())
            growing[engine] += len(kept_tokens)
            work = grow_responses(kept_tokens=kept_tokens, **request).work
            events.append("grow")

            def ended():
                growing[engine] -= len(kept_tokens)
                events.append("end")
                return work()

            return Ref(ended)

        def stop() -> Ref:
            assert len(generator.pool.complete) >= 4
            events.append("stop")
            num_stops[engine] += 1
            return stop_growing()

        engine.grow_responses, engine.stop_growing = Namespace(remote=grow), Namespace(remote=stop)

    for engine in generator.vllm_engines:
        observe(engine)
    replaced = dropped_after_stop = 0
    for batch in rollouts(generator):
        before, _, after = " ".join(events).partition("stop")
        assert "grow" not in after
        replaced += "end grow" in before
        dropped_after_stop += "end" in after and batch.metrics["partial/dropped_filtered"]
        events.clear()
    assert replaced and dropped_after_stop
    assert len(num_stops) == len(growing) and len(set(num_stops.values())) == 1


@pytest.mark.parametrize("lag", [1, 3])
def test_with_a_lag_every_rollout_is_trained_on_that_many_rollouts_later(directory, lag):
    generator = make_generator(directory, offpolicy__lag=lag, partial__token_budget=None)
    trained, num_drawn, num_steps = [], [], 5
    for step in range(num_steps):
        samples, _, num_prompts, has_ended = generator.generate_samples(**GENERATE)
        publish(generator)
        assert {version for sample in samples for version in sample.versions[0, 3:].tolist()} == {max(0, step - lag)}
        assert samples.metrics["partial/waiting"] == 4 * min(lag, num_steps - 1 - step)
        assert has_ended == (step == num_steps - 1)
        num_drawn.append(num_prompts)
        trained += labels(samples)
    assert sorted(trained) == list(range(20))
    assert num_drawn == [4 * (1 + lag)] + [4] * (num_steps - 1 - lag) + [0] * lag


def test_a_response_grows_by_at_most_the_budget_at_once_and_to_the_limit_on_new_tokens_over_all_rollouts(directory):
    for batch in rollouts(make_generator(directory, lengths=[99] * 20)):
        assert all(sample.response_length.item() == 16 and sample.truncated.item() for sample in batch)
        assert batch.metrics["partial/segments_max"] >= 6  # 16 tokens by 3


@pytest.mark.parametrize("on_stale", ["drop", "finish"])
def test_no_group_above_max_staleness_is_handed_over_and_every_prompt_is_counted(directory, on_stale):
    flags = dict(partial__max_staleness=1, partial__on_stale=on_stale, partial__token_budget=1)
    generator = make_generator(directory, lengths=[14, 16] * 4 + [1] * 12, **flags)
    counts, trained = Counter(), []
    for version, batch in enumerate(rollouts(generator)):
        counts.update(batch.metrics)
        trained += labels(batch)
        for sample in batch:
            assert version - sample.versions[0, 3:].min().item() <= 1
    assert counts["partial/started"] == 20 == len(set(trained)) + counts["partial/dropped"]
    assert len(trained) == len(set(trained)) == counts["partial/taken"]
    assert counts["partial/dropped"] == counts["partial/dropped_stale"] + counts["partial/dropped_left_over"]
    if on_stale == "finish":
        assert counts["partial/finished"] > 0
    else:
        assert counts["partial/dropped_stale"] > 0 and counts["partial/tokens_wasted"] > 0


SAMPLING = dict(temperature=0.6, top_p=0.9, top_k=7, skip_special_tokens=True)


def sampled_from(generator) -> list[dict]:
    """The distinct sampling parameters of the engines' requests so far, without the limits on the number of tokens."""
    found = []
    for params in (params for engine in generator.vllm_engines for params in engine.params):
        names = set(params.__struct_fields__) - {"max_tokens", "min_tokens"}
        fields = {name: getattr(params, name) for name in names}
        found += [fields] if fields not in found else []
    return found


@pytest.mark.parametrize("flags", [dict(partial__token_budget=3), dict(partial__token_budget=0, offpolicy__lag=1)])
def test_the_sampling_parameters_with_a_budget_or_a_lag_are_those_of_a_plain_rollout(directory, flags):
    plain = make_generator(directory, partial__token_budget=0, replay__ratio=1)
    plain.generate_samples(**GENERATE, **SAMPLING)
    (expected,) = sampled_from(plain)
    assert expected.items() >= SAMPLING.items() and expected["logprobs"] == 1
    generator = make_generator(directory, lengths=[9] * 20, **flags)
    for engine in generator.vllm_engines:
        engine.min_tokens = 5
    for _ in range(2):
        generator.generate_samples(**GENERATE, **SAMPLING, min_new_tokens=5)
        publish(generator)
    assert sampled_from(generator) == [expected]


def test_a_finished_response_is_truncated_and_has_the_reward_of_its_tokens_so_far(directory):
    flags = dict(partial__max_segments=2, partial__on_stale="finish")
    generator = make_generator(directory, lengths=[12] * 4, num_prompts=4, **flags)
    (batch,) = rollouts(generator)
    for sample in batch:
        assert sample.response_length.item() == 6 and sample.truncated.item()
        assert sample.sequences[0, 4:].tolist() == [3, 4, 5, 6, 7, 8]
        assert sample.rewards.item() == 3 / 8
    assert batch.metrics["partial/finished"] == 4 * NUM_SAMPLES


def test_a_response_that_is_as_long_as_a_resumed_runs_lower_limit_ends_where_it_is(directory):
    generator = make_generator(directory, lengths=[16] * 20, rollout__batch_size=2)
    generator.generate_samples(**GENERATE)
    growing = {
        (group.label, i): response.num_tokens
        for group in generator.pool.unfinished
        for i, response in enumerate(group.responses)
        if response.outcome is None
    }
    batch, *_ = generator.generate_samples(**GENERATE | dict(max_new_tokens=4))
    keys = [(sample.labels[0], i % NUM_SAMPLES) for i, sample in enumerate(batch)]
    ended = {key: sample for key, sample in zip(keys, batch, strict=True) if key in growing}
    assert max(growing[key] for key in ended) > 4
    for key, sample in ended.items():
        assert sample.response_length.item() == max(4, growing[key]) and sample.truncated.item()


def test_filtered_groups_are_replaced_and_counted(directory):
    # The reward of n tokens is odd digits / 8: of "012" 0.125. All samples of a group are alike.
    generator = make_generator(directory, algo__dynamic_filtering_enable=True)
    generator.args.algo.dynamic_filtering_range = (0.125, 0.5)
    counts, trained = Counter(), []
    for batch in rollouts(generator):
        counts.update(batch.metrics)
        trained += labels(batch)
    # 1 + n % 10 tokens, the last one EOS: two odd digits from a length of 5, four from one of 9.
    passing = [n for n in range(20) if 0.125 < (n % 10) // 2 / 8 < 0.5]
    left_over = int(counts["partial/dropped_left_over"])
    assert set(trained) <= set(passing) and len(trained) == len(passing) - left_over
    assert counts["partial/dropped_filtered"] == 20 - len(passing)
    assert counts["partial/started"] == 20


def test_the_groups_that_fill_no_optimizer_step_are_those_that_were_started_last_and_are_counted(directory):
    generator = make_generator(directory, num_prompts=7, lengths=[2] * 7, train__batch_size=2 * NUM_SAMPLES)
    generator.prompts_dataloader = [([""], [f"{n:03}="], [str(n)], [None]) for n in range(7)]
    first, last = rollouts(generator)
    assert (len(first), len(last)) == (12, 6) and sorted(labels(first) + labels(last)) == [*range(6)]
    assert last.metrics["partial/dropped_left_over"] == 1


def test_an_evaluation_has_no_budget_and_does_not_change_unfinished_responses(directory):
    generator = make_generator(directory, lengths=[13] * 20)
    generator.generate_samples(**GENERATE)
    groups = generator.pool.unfinished + generator.pool.complete
    before = [(group.key, group.num_tokens) for group in groups]
    generator.eval_dataloader = generator.prompts_dataloader
    samples = generator.generate_eval_samples(**GENERATE, n_samples_per_prompt=2)
    assert len(samples) == 2 * 20 and {sample.response_length.item() for sample in samples} == {13}
    assert groups == generator.pool.unfinished + generator.pool.complete
    assert before == [(group.key, group.num_tokens) for group in groups]


def saved_beside_a_checkpoint(directory, generator, state) -> list[str]:
    """Save the generator's unfinished responses with a checkpoint, and return the flags of a run that resumes it."""
    pipeline.make_checkpoint(directory / "ckpt/_actor/global_step1")
    (directory / "ckpt/_actor/latest").write_text("global_step1")
    generator.pool.save(directory / "ckpt/_partial/global_step1", state, _partial_fingerprint(generator.args))
    return pipeline.flags(directory, ckpt__load_enable=True, ckpt__path=directory / "ckpt", **SIZES)


def test_the_versions_of_loaded_responses_are_shifted_to_the_resumed_engines_count(directory, tmp_path_factory):
    generator = make_generator(directory, lengths=[16] * 20, rollout__batch_size=2)
    publish(generator)
    generator.generate_samples(**GENERATE)
    state = {"policy_version": 9, "steps_by_version": [0] * 10, "version_offset": 7}
    flags = saved_beside_a_checkpoint(directory, generator, state)
    pool, loaded = load_unfinished(pipeline.parse([*flags, "--partial.token_budget", "5"]))
    assert loaded == state and len(pool) == len(generator.pool) > 0
    # 1 + 7 is version 8; the resumed weights are version 9 and their engines' first.
    kept = [r.versions for group in pool.unfinished + pool.complete for r in group.responses]
    assert set(torch.cat(kept).tolist()) == {8 - (9 - 1)}


def test_a_resume_that_would_lose_unfinished_responses_is_refused_in_one_line(directory, capsys):
    generator = make_generator(directory, lengths=[16] * 20, rollout__batch_size=2)
    generator.generate_samples(**GENERATE)
    flags = saved_beside_a_checkpoint(directory, generator, {"policy_version": 1, "version_offset": 0})
    said = f"{len(generator.pool)} prompts with responses that were not trained on; give --partial.token_budget"
    budget, six = ["--partial.token_budget", "5"], ["--rollout.n_samples_per_prompt", "6"]
    pipeline.parse([*flags, *budget])
    for other, message in (([], said), (budget + six, f"{six[0]} '3', but this run has {six[0]} '6'")):
        refused = pipeline.refusal([*flags, *other], capsys)
        assert message in refused and "--partial.discard_saved" in refused
        pipeline.parse([*flags, *other, "--partial.discard_saved"])


def test_a_resume_with_another_lag_is_refused_in_one_line(directory, capsys):
    generator = make_generator(directory, offpolicy__lag=2, partial__token_budget=None)
    generator.generate_samples(**GENERATE)
    flags = saved_beside_a_checkpoint(directory, generator, {"policy_version": 1, "version_offset": 0})
    pipeline.parse([*flags, "--offpolicy.lag", "2"])
    for other, message in {
        (): "prompts with responses that were not trained on; give --offpolicy.lag 2, or pass",
        ("--offpolicy.lag", "3"): "--offpolicy.lag '2', but this run has --offpolicy.lag '3'",
        ("--partial.token_budget", "5"): "--offpolicy.lag '2', but this run has --offpolicy.lag None",
    }.items():
        assert message in pipeline.refusal([*flags, *other], capsys)
