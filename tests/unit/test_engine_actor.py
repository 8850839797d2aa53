"""The rollout engine actor: OpenRLHF's class with our methods, and vLLM's front end without its engine process."""

import asyncio
from argparse import Namespace

import pipeline
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from openrlhf_bapo.openrlhf.vllm_engine import _RESPONSE, PlacedPrompt, VersionedEngine, _CurrentResponse


class EngineCore:
    """Stands for vLLM's engine process."""

    def __init__(self) -> None:
        self.resets = []

    async def abort_requests_async(self, _): ...

    async def reset_prefix_cache_async(self, *arguments):
        self.resets.append(arguments)

    async def reset_encoder_cache_async(self):
        self.resets.append("encoder")

    def shutdown(self, timeout): ...


def make_actor():
    """Make an actor as Ray does, without its engine process."""

    async def loaded(*_, **__): ...

    engine = object.__new__(AsyncLLM)
    engine.output_processor = OutputProcessor(None, log_stats=False)
    engine.engine_core, engine.log_requests, engine.collective_rpc = EngineCore(), False, loaded
    engine.model_config = Namespace(is_multimodal_model=False)
    actor = object.__new__(RolloutRayActor.__ray_metadata__.modified_class)
    actor.llm = VersionedEngine(engine)
    return actor


def begin(actor, name: str, tokens: list[int]):
    """Start a request that has generated `tokens`, and return the collector of its outputs."""
    # As RolloutRayActor.generate's, whose outputs are cumulative.
    params = SamplingParams(max_tokens=9, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)
    request = EngineCoreRequest(name, [7, 8], None, params, None, 0.0, None, None, None, external_req_id=name)
    outputs = RequestOutputCollector(params.output_kind, name)
    actor.llm.output_processor.add_request(request, None, queue=outputs)
    actor.llm.output_processor.process_outputs([EngineCoreOutput(name, tokens)])
    return outputs


def test_stop_growing_ends_every_request_with_the_tokens_that_it_has():
    async def stopped() -> list:
        actor = make_actor()
        waiting = [begin(actor, f"request {n}", list(range(n))) for n in (1, 2, 3)]
        for outputs in waiting:
            assert not (await outputs.get()).finished
        await actor.stop_growing()
        assert not actor.llm.output_processor.has_unfinished_requests()
        return [await outputs.get() for outputs in waiting]

    for number, output in enumerate(asyncio.run(stopped()), start=1):
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert list(output.outputs[0].token_ids) == list(range(number))


@pytest.mark.parametrize("method", ["update_weight", "update_weight_cuda_ipc"])
@pytest.mark.parametrize("by_name", [True, False])
@given(num_parameters=st.lists(st.integers(1, 4), max_size=4))
def test_the_engine_counts_whole_weight_updates_and_not_parameters(method, by_name, num_parameters):
    actor, others = make_actor(), ["handles"] if method == "update_weight_cuda_ipc" else []

    async def load(number: int, is_last: bool) -> None:
        last = {"empty_cache": is_last} if by_name else {}
        positions = [] if by_name else [is_last]
        await getattr(actor, method)(f"weight {number}", "bfloat16", (2, 3), *others, *positions, **last)

    for version, count in enumerate(num_parameters):
        for number in range(count):
            assert actor.num_weight_updates() == version
            asyncio.run(load(number, number == count - 1))
    assert actor.num_weight_updates() == len(num_parameters)


@pytest.mark.parametrize("sees_images", [False, True])
def test_no_cache_outlives_the_weights_that_filled_it(sees_images):
    actor = make_actor()
    actor.llm.model_config.is_multimodal_model = sees_images
    for is_last in (False, True):
        asyncio.run(actor.update_weight("a weight", "bfloat16", (2, 3), empty_cache=is_last))
    asyncio.run(actor.reset_prefix_cache())
    # Running requests too: else vLLM keeps the whole cache.
    assert actor.llm.engine_core.resets == ["encoder"] * sees_images + [(True, False)]


def test_tokens_that_an_agent_got_elsewhere_have_the_engines_present_version():
    class Executor:
        """Stands for an agent that asks another server for two actions, while a weight update is loaded."""

        async def execute(self, **_) -> dict:
            actor.llm.num_weight_updates += 1
            return {"observation_tokens": [5] * 9, "action_ranges": [(2, 5), (7, 9)]}

    actor, params = make_actor(), Namespace(seed=None, max_tokens=None)
    actor.executor, actor.llm.num_weight_updates = Executor(), 3
    (response,) = asyncio.run(actor.generate_responses("1+2=", "3", params, 9, None))
    assert response["versions"] == [[4] * 3, [4] * 2]


ALIGNED = dict(observation_tokens=[4, 5, 6, 9], action_ranges=[(1, 3)], rollout_log_probs=[0.0, -1.0, -2.0, 0.0])
MISALIGNED = {
    "the actions' log-probs alone": (dict(rollout_log_probs=[-1.0, -2.0]), "2 rollout_log_probs for 4 obs"),
    "tokens made of text": (dict(observation_tokens=[4, 5, 7, 9]), "not the tokens that the engine sampled"),
}


def response_of_an_agent(place: int, **changes) -> dict:
    """Return a response in training (place 0) or in an evaluation (-1), for which the engine sampled tokens 5 and 6."""

    class Engine:
        async def generate(self, *_, **__):
            for tokens in ([5], [5, 6]):
                yield Namespace(outputs=[Namespace(token_ids=tokens)])

    class Executor:
        async def execute(self, llm_engine, sampling_params, **_) -> dict:
            await llm_engine.generate([4], sampling_params)
            return ALIGNED | changes

    actor = make_actor()
    actor.llm, actor.executor = VersionedEngine(Engine()), Executor()
    actor.llm.compared = "--offpolicy.ratio_base auto", SamplingParams()
    (response,) = asyncio.run(actor.generate_responses(PlacedPrompt(place, ""), "", SamplingParams(), 9, None))
    return response


@pytest.mark.parametrize("fault", MISALIGNED)
def test_an_agents_log_probs_that_are_not_those_of_its_tokens_are_refused_in_training(fault):
    changes, said = MISALIGNED[fault]
    assert response_of_an_agent(0)["versions"] == [[0, 0]]
    assert response_of_an_agent(-1, **changes)["versions"] == [[0, 0]]
    with pytest.raises(RuntimeError, match=f"--train.agent_func_path: .*{said}"):
        response_of_an_agent(0, **changes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(pipeline.make_model(tmp_path_factory.mktemp("agent")) / "model")


def agent_responses(tokenizer, observations: list[int], feedback: int, num_turns: int, max_length: int) -> list[dict]:
    """Return the responses of OpenRLHF's executor of agents, each of `num_turns` actions of 3 tokens.

    Before its first action, agent i observes `observations[i]` tokens, and after each action `feedback` tokens.
    """
    lengths = iter(observations)

    class Agent(AgentInstanceBase):
        def __init__(self) -> None:
            self.num_actions = 0

        async def reset(self, states: dict, **_) -> dict:
            return {"observation": "1" * next(lengths)}

        async def step(self, states: dict, **_) -> dict:
            self.num_actions += 1
            is_done = self.num_actions == num_turns
            return {"rewards": torch.tensor(1.0), "environment_feedback": "2" * feedback, "done": is_done}

    async def generate(_, params, **__) -> Namespace:
        await asyncio.sleep(0)  # the other responses of the group begin meanwhile
        return Namespace(outputs=[Namespace(token_ids=[5] * 3, text="222", finish_reason="stop", logprobs=None)])

    actor = make_actor()
    actor.executor, actor.generate = MultiTurnAgentExecutor(Agent), generate
    params = SamplingParams(max_tokens=None)
    return asyncio.run(actor.generate_responses("", "", params, max_length, tokenizer, len(observations)))


def test_what_an_agent_observes_is_not_cut_to_the_length_that_another_one_of_its_group_observed(tokenizer):
    responses = agent_responses(tokenizer, [4, 8, 6], feedback=2, num_turns=2, max_length=40)
    assert [response["action_ranges"][0][0] for response in responses] == [4, 8, 6]


@pytest.mark.parametrize(
    ("num_turns", "max_length", "is_truncated"), [(1, 16, False), (2, 16, True), (2, 17, True), (2, 18, False)]
)
def test_a_response_whose_agent_has_no_room_for_its_next_action_is_truncated(
    tokenizer, num_turns, max_length, is_truncated
):
    (response,) = agent_responses(tokenizer, [4], feedback=10, num_turns=num_turns, max_length=max_length)
    assert response["truncated"] == is_truncated
    assert len(response["action_ranges"]) == (1 if is_truncated else num_turns)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5))
def test_every_token_has_the_version_whose_weights_were_loaded_when_it_came_out(pieces):
    class Engine:
        """Alternately loads weight updates and yields further tokens."""

        async def generate(self, *_, **__):
            num_tokens = 0
            for num_updates, num_new in pieces:
                versioned.num_weight_updates += num_updates
                num_tokens += num_new
                yield Namespace(outputs=[Namespace(token_ids=[0] * num_tokens)])

    async def generate() -> list[list[int]]:
        response = _CurrentResponse()
        _RESPONSE.set(response)
        async for _ in versioned.generate([], Namespace()):
            pass
        return response.versions

    versioned, expected, version = VersionedEngine(Engine()), [], 0
    for num_updates, num_new in pieces:
        version += num_updates
        expected += [version] * num_new
    assert asyncio.run(generate()) == [expected]


OTHER_DISTRIBUTIONS = dict(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.1)
OTHER_DISTRIBUTIONS |= dict(
    min_tokens=2, repetition_penalty=1.1, logit_bias={3: 1.0}, allowed_token_ids=[3, 4], bad_words=["no"]
)


@pytest.mark.parametrize("name", OTHER_DISTRIBUTIONS)
def test_an_agents_own_distribution_is_refused_in_training_where_the_engines_log_probs_count(name):
    class Engine:
        async def generate(self, prompt, sampling_params, request_id):
            return
            yield

    async def sample(engine, is_trained_on: bool, **params) -> None:
        _RESPONSE.set(_CurrentResponse(is_trained_on=is_trained_on))
        params = dict(temperature=0.7, top_k=-1, max_tokens=5, stop=["."], min_tokens=1, logprobs=1) | params
        async for _ in engine.generate([], SamplingParams(**params), request_id=""):
            pass

    change = {name: OTHER_DISTRIBUTIONS[name]}
    compared, free = VersionedEngine(Engine()), VersionedEngine(Engine())
    compared.compared = "--offpolicy.ratio_base auto", SamplingParams(temperature=0.7)
    asyncio.run(sample(compared, True))  # the run's distribution, with another length and stop
    asyncio.run(sample(compared, False, **change))  # in an evaluation
    asyncio.run(sample(free, True, **change))
    with pytest.raises(RuntimeError, match=f"--train.agent_func_path: .* {name} .*--offpolicy.ratio_base auto"):
        asyncio.run(sample(compared, True, **change))
