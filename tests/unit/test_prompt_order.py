"""The order of prompts and samples and the samples' seeds follow from --train.seed, also after a resume."""

import asyncio
import inspect
import itertools
import json
from argparse import Namespace

import pipeline
import pytest
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer
from test_partial_samples import GENERATE, NUM_SAMPLES, labels, make_generator, without_ray  # noqa: F401

from openrlhf_bapo.openrlhf.trainer import _resume_generator
from openrlhf_bapo.openrlhf.vllm_engine import _RESPONSE, VersionedEngine, _CurrentResponse

NUM_PROMPTS = 50


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """A function that makes the loader of a run's prompts as OpenRLHF's trainers do."""
    directory = pipeline.make_model(tmp_path_factory.mktemp("order"))
    with open(directory / "train.jsonl", "w") as file:
        file.writelines(json.dumps({"input": str(n), "label": ""}) + "\n" for n in range(NUM_PROMPTS))

    def make(seed: int, num_prompts: int = NUM_PROMPTS):
        args = pipeline.parse(pipeline.flags(directory, train__seed=seed, data__max_samples=num_prompts))
        strategy = get_strategy(args)
        tokenizer = get_tokenizer(str(directory / "model"), None, "left", strategy)
        return ppo_trainer.prepare_datasets(strategy, tokenizer)[0]

    return make


def order(loader) -> list[str]:
    return [prompts[0] for _, prompts, _, _ in loader]


def test_the_order_of_prompts_follows_from_the_seed_and_differs_between_episodes_and_seeds(loader):
    first, again = loader(7), loader(7)
    episodes = [order(first), order(first)]
    assert episodes == [order(again), order(again)]
    assert sorted(episodes[0], key=int) == sorted(episodes[1], key=int) == [str(n) for n in range(NUM_PROMPTS)]
    assert len({tuple(o) for o in [*episodes, order(loader(8)), [str(n) for n in range(NUM_PROMPTS)]]}) == 4


def resumed_order(loader, num_before: int, num_prompts: int, num_drawn: int = 20) -> list[str]:
    """The prompts of a run with `num_prompts` that resumes one with `num_before`, of which some have been drawn."""
    before, resumed = loader(7, num_before), loader(7, num_prompts)
    assert len([*itertools.islice(before, num_drawn)]) == min(num_before, num_drawn)
    resumed.load_state_dict(before.state_dict())
    return order(resumed)


@pytest.mark.parametrize(
    ("before", "now", "num_drawn"), [(NUM_PROMPTS, NUM_PROMPTS - 1, 20), (NUM_PROMPTS, 15, 20), (30, NUM_PROMPTS, 31)]
)
def test_a_resumed_run_begins_other_prompts_at_the_start_and_more_after_the_end_of_the_data(
    loader, before, now, num_drawn, capsys
):
    prompts = resumed_order(loader, before, now, num_drawn)
    assert sorted(prompts, key=int) == [str(n) for n in range(now)]
    assert "warning: --data.prompt_dataset: the prompts are not those of the checkpoint" in capsys.readouterr().out


def test_a_resumed_run_with_more_prompts_goes_on(loader, capsys):
    assert len(resumed_order(loader, 30, NUM_PROMPTS)) == NUM_PROMPTS - 20
    assert "the prompts were 30 at the checkpoint and are 50" in capsys.readouterr().out


def test_a_resumed_run_continues_with_the_order_of_the_unbroken_run_also_in_the_next_episode(loader):
    unbroken, resumed = loader(7), loader(7)
    order(unbroken)
    iterator = iter(unbroken)
    for _ in range(20):
        next(iterator)
    state = unbroken.state_dict()
    rest = [prompts[0] for _, prompts, _, _ in iterator]
    resumed.load_state_dict(state)
    assert order(resumed) == rest
    assert order(resumed) == order(unbroken)


def requests(generator) -> list[str | None]:
    """The names that determine the seeds of all requests since the last call."""
    found = [name for engine in generator.vllm_engines for name in engine.seed_names]
    for engine in generator.vllm_engines:
        engine.seed_names.clear()
    return found


DETERMINISTIC = dict(partial__token_budget=0, train__full_determinism_enable=True, train__seed=7)
BUDGET = dict(partial__token_budget=3)


def test_samples_are_in_the_order_of_their_prompts_and_their_seeds_follow_from_the_prompts_places(tmp_path):
    generator = make_generator(pipeline.make_model(tmp_path), **DETERMINISTIC)
    generator.prompts_dataloader = [([""], [f"{n:03}="], [str(n)], [None]) for n in range(20)]
    for step in range(5):
        samples, *_ = generator.generate_samples(**GENERATE)
        places = range(4 * step, 4 * step + 4)
        assert labels(samples) == [*places]
        assert sorted(requests(generator)) == sorted(f"7 {n} {i}" for n in places for i in range(NUM_SAMPLES))


def test_an_evaluation_has_its_own_seeds_and_does_not_change_those_of_training(tmp_path):
    generator = make_generator(pipeline.make_model(tmp_path), **DETERMINISTIC)
    generator.eval_dataloader = generator.prompts_dataloader
    named = []
    for _ in range(2):
        generator.generate_samples(**GENERATE)
        generator.generate_eval_samples(**GENERATE)
        generator.generate_eval_samples(**GENERATE)
        named.append(requests(generator))
    assert sorted(named[1])[-12:] == sorted(f"7 {n} {i}" for n in range(4, 8) for i in range(NUM_SAMPLES))
    assert not set(named[0]) & set(named[1]) and all(len(names) == (4 + 2 * 20) * NUM_SAMPLES for names in named)


def test_without_full_determinism_the_engines_own_random_numbers_are_used(tmp_path):
    generator = make_generator(pipeline.make_model(tmp_path), partial__token_budget=0)
    generator.generate_samples(**GENERATE)
    assert requests(generator) == [None] * 4 * NUM_SAMPLES


def test_every_segment_of_every_response_has_its_own_seed(tmp_path):
    generator = make_generator(pipeline.make_model(tmp_path), lengths=[14] * 20, **DETERMINISTIC | BUDGET)
    generator.generate_samples(**GENERATE)
    names = requests(generator)
    assert len(names) == len(set(names)) and {f"7 0 {i} {kept}" for i in range(3) for kept in range(0, 14, 3)} < {
        *names
    }


def test_a_response_keeps_its_number_and_so_its_seeds_when_others_of_its_group_are_complete(tmp_path):
    generator = make_generator(pipeline.make_model(tmp_path), lengths=[14], num_prompts=1, **DETERMINISTIC | BUDGET)
    group = generator.pool.start("000=", "0", NUM_SAMPLES)
    outcome = {"reward": 1.0, "scores": 1.0, "truncated": False, "extra_logs": {}}
    generator.pool.grow(group.responses[0], [pipeline.EOS], [-0.1], [0], outcome)
    for kept in (0, 3):
        generator._grow([group], 1, GENERATE)
        assert sorted(requests(generator)) == [f"7 0 {i} {kept}" for i in range(1, NUM_SAMPLES)]


def test_every_call_of_every_response_has_its_own_seed_which_is_always_the_same():
    seeds = []

    class Engine:
        async def generate(self, prompt, sampling_params, request_id):
            seeds.append(sampling_params.seed)
            return
            yield

    async def call(name: str | None) -> None:
        _RESPONSE.set(_CurrentResponse(name))
        for _ in range(2):  # an agent's turns
            async for _ in VersionedEngine(Engine()).generate([], Namespace(seed=None), request_id=""):
                pass

    for name in ("7 0 0", "7 0 1", "7 1 0", "8 0 0", "7 0 0", None):
        asyncio.run(call(name))
    assert seeds[8:10] == seeds[:2] and seeds[10:] == [None, None]
    assert len(set(seeds[:8])) == 8 and all(0 <= seed < 2**63 for seed in seeds[:8])


def codes_around(method) -> set:
    """The functions that `in_place_of` put around a method."""
    codes = set()
    while hasattr(method, "__wrapped__"):
        function = inspect.getclosurevars(method).nonlocals.get("function")
        codes |= {function.__code__} if function else set()
        method = method.__wrapped__
    return codes


def test_a_resumed_async_run_continues_the_numbers_of_its_prompts():
    numbers = []

    class Generator(Namespace):
        def load_state_dict(self, state: dict) -> None:
            pass

        def fit(self, episode: int, total_consumed_prompts: int) -> None:
            numbers.append((episode, self.samples_generator.num_prompts))

    _resume_generator(Generator)
    Generator(samples_generator=Namespace(num_prompts=0)).fit(1, 37)
    assert numbers == [(1, 37)]
    ours = codes_around(Generator.fit)
    assert ours and ours <= codes_around(ppo_trainer_async.GenerateSamplesActor.__ray_metadata__.modified_class.fit)
