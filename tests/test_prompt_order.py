"""The order of the prompts follows --train.seed, and a resumed run goes on in it."""

import json

import pipeline
import pytest
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer

NUM_PROMPTS = 50


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """Makes the loader of a run's prompts, as OpenRLHF's trainers do."""
    directory = pipeline.make_model(tmp_path_factory.mktemp("order"))
    with open(directory / "train.jsonl", "w") as file:
        file.writelines(json.dumps({"input": str(n), "label": ""}) + "\n" for n in range(NUM_PROMPTS))

    def make(seed: int):
        from openrlhf.trainer import ppo_trainer

        args = pipeline.parse(pipeline.flags(directory, train__seed=seed, data__max_samples=NUM_PROMPTS))
        strategy = get_strategy(args)
        tokenizer = get_tokenizer(str(directory / "model"), None, "left", strategy)
        return ppo_trainer.prepare_datasets(strategy, tokenizer)[0]

    return make


def order(loader) -> list[str]:
    return [prompts[0] for _, prompts, _, _ in loader]


def test_one_seed_is_one_order_in_every_episode_another_and_another_seed_is_another(loader):
    first, again = loader(7), loader(7)
    episodes = [order(first), order(first)]
    assert episodes == [order(again), order(again)]
    assert sorted(episodes[0], key=int) == sorted(episodes[1], key=int) == [str(n) for n in range(NUM_PROMPTS)]
    assert len({tuple(o) for o in [*episodes, order(loader(8)), [str(n) for n in range(NUM_PROMPTS)]]}) == 4


def test_a_resumed_run_goes_on_with_the_order_of_the_unbroken_one_in_the_next_episode_too(loader):
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
