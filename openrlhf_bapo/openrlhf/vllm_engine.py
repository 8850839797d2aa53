"""OpenRLHF's rollout engine actor, with the policy version of every generated token.

The engine counts the weight updates that it has loaded. A token's version is this count at the time when the token came
out. If OpenRLHF pauses a response for a weight update and then resumes it, its tokens have two versions.

Under a token budget (openrlhf/partial_rollouts.py) the actor generates responses in pieces. `grow_responses` continues
responses where earlier pieces ended, and `stop_growing` ends all pieces under way.
"""

import asyncio
import contextvars
import functools
import inspect
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf_bapo.openrlhf.registration import ENGINE_DTYPE, in_place_of
from openrlhf_bapo.openrlhf.reward_calls import RewardLimits


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt with its place in the run, passed to the engine actor in place of OpenRLHF's prompt text."""

    place: int
    """Training prompts are numbered from 0 in the order in which they are drawn, or started under a token budget. For
    evaluation prompts see `samples_generator.evaluation_place`."""

    text: str


@dataclass
class Piece:
    """The tokens that a response grew by in one call of `grow_responses`, and its outcome."""

    prompt_tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt as the engine received it."""

    tokens: list[int] = field(default_factory=list)
    """[n]: the new tokens of the response."""

    behavior_log_probs: list[float] = field(default_factory=list)
    """[n]: the log-probs that the engine sampled the tokens with."""

    versions: list[int] = field(default_factory=list)
    """[n]: the policy versions that generated the tokens."""

    outcome: dict | None = None
    """Reward, scores, truncated and extra_logs of the whole response, as `SingleTurnAgentExecutor.execute` returned
    them, as JSON values. None if the response is unfinished."""

    ended_at: float = 0.0
    """When the response stopped growing, in seconds since 1970."""


@dataclass
class _CurrentResponse:
    """The response that the running asyncio task generates."""

    seed_name: str | None = None
    """Determines the sampling seed of each of its `generate` calls, see `_seed_name`. None: the calls have no seed."""

    is_trained_on: bool = False
    """Whether it is not of an evaluation."""

    versions: list[list[int]] = field(default_factory=list)
    """For each of its `generate` calls, the policy version of each token."""

    tokens: list[list[int]] = field(default_factory=list)
    """For each of its `generate` calls, the tokens; [] before the call has ended."""


_RESPONSE: contextvars.ContextVar[_CurrentResponse] = contextvars.ContextVar("response")


_SHAPING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids "
    "bad_words structured_outputs"
).split()
"""Fields of vLLM's SamplingParams that change the distribution of the next token, and so the engine's log-probs.
`min_tokens` does so too, because it forbids the end of a response; OpenRLHF's own is 1."""


class VersionedEngine:
    """vLLM's engine, whose `generate` also records the version of every token that it yields."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_weight_updates = 0
        """Weight updates loaded so far in this run. Plus the maker's `version_offset` it is the policy version."""
        self.compared: tuple[str, Any] | None = None
        """If the loss compares the engine's log-probs with the actor's: the flag, and the run's sampling parameters."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate as vLLM's engine does. Its outputs are cumulative.

        Raises:
            RuntimeError: if an agent samples from another distribution than the run, whose log-probs the loss would
                compare with the actor's.
        """
        response = _RESPONSE.get()
        if self.compared is not None and response.is_trained_on:
            _refuse_other_distribution(sampling_params, *self.compared)
        versions: list[int] = []
        tokens: list[int] = []
        if response.seed_name is not None:
            # The turns of an agent are calls for one response, and must not use the same random numbers.
            call_name = f"{response.seed_name} {len(response.versions)}"
            sampling_params.seed = random.Random(call_name).getrandbits(62)
        response.versions.append(versions)
        response.tokens.append(tokens)
        async for output in self._engine.generate(prompt, sampling_params, **kwargs):
            num_new = len(output.outputs[0].token_ids) - len(versions)
            versions.extend([self.num_weight_updates] * num_new)
            yield output
        if versions:
            tokens += output.outputs[0].token_ids


def _refuse_other_distribution(asked: Any, flag: str, of_run: Any) -> None:
    wanted, given = _distribution(of_run), _distribution(asked)
    for name, value in given.items():
        if value != wanted[name]:
            raise RuntimeError(
                f"--train.agent_func_path: the agent samples with {name} {value}, which changes the engine's "
                f"log-probs, and {flag} uses them as the actor's; allowed: {wanted[name]}"
            )


def _refuse_other_log_probs(response: dict, sampled: list[list[int]], compared: tuple[str, Any] | None) -> None:
    """Refuse a response without one log-prob per token, or where they count, with tokens that were not sampled.

    An agent that makes tokens of the engine's text gets others than the engine sampled.

    Args:
        sampled: the tokens of each call of the engine.
        compared: as `VersionedEngine.compared`.
    """
    tokens, log_probs = response["observation_tokens"], response.get("rollout_log_probs")
    if log_probs is not None and len(log_probs) != len(tokens):
        raise RuntimeError(
            f"--train.agent_func_path: the agent returned {len(log_probs)} rollout_log_probs for {len(tokens)} "
            "observation_tokens; allowed: one per token, 0 for those that the engine did not sample"
        )
    actions = [list(tokens[start:end]) for start, end in response["action_ranges"]]
    if compared is not None and actions != sampled and [*map(len, actions)] == [*map(len, sampled)]:
        raise RuntimeError(
            "--train.agent_func_path: the agent's actions are not the tokens that the engine sampled, and "
            f"{compared[0]} compares the engine's log-probs with the actor's; allowed: its token_ids as they are"
        )


def _distribution(sampling_params: Any) -> dict[str, Any]:
    found = {name: getattr(sampling_params, name) for name in _SHAPING}
    # -1 and 0 are both off
    return found | {"top_k": max(found["top_k"], 0), "min_tokens": max(sampling_params.min_tokens, 1)}


def use_versioned_engine(vllm_engine: Any) -> None:
    """Put our methods into `RolloutRayActor`, and let engines return the log-probs of the sampling distribution."""
    actor = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
    upstream_init = actor.__init__

    @functools.wraps(upstream_init)
    async def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # OpenRLHF's engines have bf16, whatever the policy's type is, and then cannot load its weights.
        kwargs["dtype"] = os.environ.get(ENGINE_DTYPE, kwargs["dtype"])
        await upstream_init(self, *args, **kwargs)
        self.llm = VersionedEngine(self.llm)

    actor.__init__ = init
    for name in ("update_weight", "update_weight_cuda_ipc"):
        setattr(actor, name, _counting_updates(getattr(actor, name)))
    new = (grow_responses, stop_growing, num_weight_updates, limit_rewards, compare_log_probs, check_health)
    for method in (generate_responses, reset_prefix_cache, *new):
        setattr(actor, method.__name__, method)
    # Ray listed the methods when the class was defined, so the list is made again.
    metadata = vllm_engine.RolloutRayActor.__ray_metadata__
    type(metadata.method_meta).reset_cache()
    metadata.method_meta = type(metadata.method_meta).create(actor, metadata.actor_creation_function_descriptor)

    # The behavior policy's log-probs are those after temperature and top-p. vLLM's default is those before.
    @in_place_of(vllm_engine, "create_vllm_engines")
    def create_with_processed_log_probs(create: Callable, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(create).bind(*args, **kwargs).arguments
        return create(**arguments | {"logprobs_mode": "processed_logprobs"})


def _counting_updates(update_weight: Callable) -> Callable:
    @functools.wraps(update_weight)
    async def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await update_weight(self, *args, **kwargs)
        # OpenRLHF sends one parameter per call. `empty_cache`, the last argument, is True for the last parameter of an
        # update only.
        is_last = kwargs.get("empty_cache", args[-1] if args else False)
        if is_last:
            self.llm.num_weight_updates += 1
            if self.llm.model_config.is_multimodal_model:
                # vLLM keeps what the visual encoder made of an image, which OpenRLHF trains too.
                await self.llm.reset_encoder_cache()
        return result

    return counting


async def generate_responses(
    self: Any,
    prompt: PlacedPrompt | str,
    label: object,
    sampling_params: Any,
    max_length: int,
    hf_tokenizer: Any,
    num_samples: int = 1,
    images: list | None = None,
) -> list[dict]:
    """Generate as `RolloutRayActor.generate_responses` does, with versions, and with a seed per response.

    Args:
        prompt: a `PlacedPrompt`, or the text alone for a prompt that has no place.
        sampling_params: as in upstream's method, but each response has its own copy, which an agent may change. If
            its `seed` is set, every response gets its own seed, which follows from this one, the prompt's place and the
            number of the response.
        max_length: maximum length of prompt and response together, in tokens.

    Raises:
        RuntimeError: if the log-probs of a response that is trained on are not those of its tokens.

    Returns:
        Upstream's dict per response, with two keys more: "versions", a list per action range with the version of each
        token, and "place", the prompt's place or None. "truncated" is True also if an agent's feedback left no room for
        its next action.
    """
    place, text = (prompt.place, prompt.text) if isinstance(prompt, PlacedPrompt) else (None, prompt)

    async def respond(index: int) -> dict:
        is_trained_on = place is not None and place >= 0
        current = _CurrentResponse(_seed_name(sampling_params, place, index), is_trained_on)
        _RESPONSE.set(current)  # for this task alone, because every task has its own context
        params = deepcopy(sampling_params)
        response = await self.executor.execute(
            prompt=text,
            label=label,
            sampling_params=params,
            max_length=max_length,
            hf_tokenizer=hf_tokenizer,
            llm_engine=self,
            images=images,
        )
        lengths = [end - start for start, end in response["action_ranges"]]
        # Tokens that an agent got from elsewhere have no version. They count as generated now.
        is_ours = [len(versions) for versions in current.versions] == lengths
        versions = current.versions if is_ours else [[self.llm.num_weight_updates] * n for n in lengths]
        if is_trained_on:
            _refuse_other_log_probs(response, current.tokens, self.llm.compared)
        # OpenRLHF's executor of agents sets max_tokens to the room that is left, and ends where there is none.
        has_no_room = params.max_tokens is not None and params.max_tokens <= 0
        is_truncated = response.get("truncated", False) or has_no_room
        return response | {"versions": versions, "place": place, "truncated": is_truncated}

    return await asyncio.gather(*map(respond, range(num_samples)))


def _seed_name(sampling_params: Any, *parts: object) -> str | None:
    """Return the `seed_name` of a response, or None without a seed.

    For example, "7 12 0" is response 0 to the prompt at place 12 in a run with seed 7. A piece of a response also has
    the number of tokens before it.
    """
    return None if sampling_params.seed is None else " ".join(map(str, (sampling_params.seed, *parts)))


class _Unfinished(Exception):
    """Ends an executor's work on a response that is not complete yet, and therefore gets no reward."""


class _PieceEngine:
    """Stands for the engine in `executor.execute`, and generates one piece of a response.

    The executor sees the whole response if this piece completes it. Otherwise `_Unfinished` ends the executor's work.

    Args:
        actor: the engine actor that generates the tokens.
        kept_tokens: the tokens of the earlier pieces.
        budget: the maximum number of new tokens, at least 1.
        finish: whether to end the response where it is, as truncated, without new tokens.
    """

    def __init__(self, actor: Any, kept_tokens: list[int], budget: int, finish: bool) -> None:
        self._actor, self._kept, self._budget, self._finish = actor, kept_tokens, budget, finish
        self.piece = Piece()

    async def generate(
        self, prompt_tokens: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> SimpleNamespace:
        """Generate as `RolloutRayActor.generate` does, after the tokens of the earlier pieces.

        Raises:
            _Unfinished: if the budget was spent, or `stop_growing` was called, before the response ended.
        """
        self.piece.prompt_tokens = list(prompt_tokens)
        finish_reason = "length"
        num_left = sampling_params.max_tokens - len(self._kept)  # below 1 after a resume with a lower limit
        if num_left > 0 and not self._finish:
            sampling_params.max_tokens = min(num_left, self._budget)
            sampling_params.min_tokens = max(0, sampling_params.min_tokens - len(self._kept))
            output = await self._actor.generate(self.piece.prompt_tokens + self._kept, sampling_params)
            (generated,) = output.outputs
            (self.piece.versions,) = _RESPONSE.get().versions
            self.piece.tokens = list(generated.token_ids)
            for token, log_probs in zip(self.piece.tokens, generated.logprobs or [], strict=True):
                self.piece.behavior_log_probs.append(log_probs[token].logprob)
            finish_reason = generated.finish_reason
            if finish_reason == "abort" or (finish_reason == "length" and len(self.piece.tokens) < num_left):
                raise _Unfinished
        token_ids = self._kept + self.piece.tokens
        whole = SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason, logprobs=None)
        return SimpleNamespace(outputs=[whole])


async def grow_responses(
    self: Any,
    prompt: PlacedPrompt,
    label: object,
    sampling_params: Any,
    max_length: int,
    hf_tokenizer: Any,
    kept_tokens: dict[int, list[int]],
    budget: int,
    finish: bool = False,
) -> list[Piece]:
    """Let responses to a prompt grow by at most `budget` tokens each. Responses that are then complete get a reward.

    Args:
        prompt: the prompt, with the key of its group as its place.
        sampling_params: as in `generate_responses`, but every piece gets its own seed.
        max_length: maximum length of prompt and response together, in tokens.
        kept_tokens: the tokens so far of each response, by its number; [] for a new response.
        budget: the maximum number of new tokens per response, at least 1.
        finish: whether to end the responses where they are, as truncated, without new tokens.

    Returns:
        One piece per response, in the order of `kept_tokens`.
    """

    async def grow(index: int, kept: list[int]) -> Piece:
        engine = _PieceEngine(self, kept, budget, finish)
        piece = engine.piece
        _RESPONSE.set(_CurrentResponse(_seed_name(sampling_params, prompt.place, index, len(kept))))
        try:
            response = await self.executor.execute(
                prompt=prompt.text,
                label=label,
                sampling_params=deepcopy(sampling_params),
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=engine,
            )
            piece.outcome = {name: _to_json(response[name]) for name in ("reward", "scores", "truncated")}
            piece.outcome["extra_logs"] = {name: _to_json(value) for name, value in response["extra_logs"].items()}
        except _Unfinished:
            pass
        piece.ended_at = time.time()
        return piece

    return await asyncio.gather(*(grow(index, kept) for index, kept in kept_tokens.items()))


async def stop_growing(self: Any) -> None:
    """End all requests of the engine. Each keeps the tokens that it has generated."""
    await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)


def num_weight_updates(self: Any) -> int:
    """Return the number of weight updates loaded so far."""
    return self.llm.num_weight_updates


def limit_rewards(self: Any, patience: float, timeout: float) -> None:
    """Set `--reward_fault.patience` and `--reward_fault.timeout`, in seconds."""
    self.executor.reward_limits = RewardLimits(patience, timeout)


def compare_log_probs(self: Any, flag: str, sampling_params: Any) -> None:
    """Refuse other distributions than that of `sampling_params`, because of a flag: see `VersionedEngine.compared`."""
    self.llm.compared = flag, sampling_params


async def reset_prefix_cache(self: Any) -> None:
    """Forget the keys and values of all tokens, which the weights before an update made.

    OpenRLHF's method keeps all of them if a request is running. Here such a request begins again.
    """
    await self.llm.reset_prefix_cache(reset_running_requests=True)


async def check_health(self: Any) -> None:
    """Raise vLLM's EngineDeadError if the engine's own process has ended."""
    await self.llm.check_health()


def _to_json(value: Any) -> Any:
    """Return a reward as a JSON value. It is a number, a tensor of one number, or a reward server's list of one."""
    if isinstance(value, list):
        value = value[0]
    return value.flatten()[0].item() if isinstance(value, torch.Tensor) else value
