"""OpenRLHF's rollout engine actor, which says of every token which policy version generated it.

The engine itself counts the weight updates that it has loaded; a token's version is the count when it came out. A
response that OpenRLHF pauses for a weight update and then resumes carries both versions.

Under a token budget (openrlhf/partial_rollouts.py) the actor makes responses piece by piece: `grow_responses` goes on
where earlier pieces ended, and `stop_growing` ends all pieces under way.
"""

import asyncio
import contextvars
import functools
import inspect
import random
import time
from types import ModuleType, SimpleNamespace

import torch

from openrlhf_bapo.openrlhf.reward_calls import RewardLimits

# The versions of every `generate` call of the response that the running task makes, one list a call.
_SEGMENTS = contextvars.ContextVar("segments")

# What names that response in the run, and its sampling's seed follows from; None: the engine's own random numbers.
_NAME = contextvars.ContextVar("name", default=None)


class VersionedEngine:
    """vLLM's engine; `generate` also notes the version of every token that it yields."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.policy_version = 0
        """Weight updates loaded so far."""

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, prompt, sampling_params, **kwargs):
        """As vLLM's, whose outputs are cumulative."""
        versions, segments = [], _SEGMENTS.get()
        if (name := _NAME.get()) is not None:
            # An agent's turns are calls of one response, and must not have the same random numbers.
            sampling_params.seed = random.Random(f"{name} {len(segments)}").getrandbits(62)
        segments.append(versions)
        async for output in self._engine.generate(prompt, sampling_params, **kwargs):
            num_new = len(output.outputs[0].token_ids) - len(versions)
            versions.extend([self.policy_version] * num_new)
            yield output


def use_versioned_engine(vllm_engine: ModuleType) -> None:
    """Give `RolloutRayActor` its versions, and let its engines return log-probs of what they really sampled from."""
    actor = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
    upstream_init = actor.__init__

    @functools.wraps(upstream_init)
    async def init(self, *args, **kwargs) -> None:
        await upstream_init(self, *args, **kwargs)
        self.llm = VersionedEngine(self.llm)

    actor.__init__ = init
    for name in ("update_weight", "update_weight_cuda_ipc"):
        setattr(actor, name, _counting_updates(getattr(actor, name)))
    actor.generate_responses = generate_responses
    for method in (grow_responses, stop_growing, policy_version, limit_rewards, check_health):
        setattr(actor, method.__name__, method)
    # Ray has listed the class's methods when it was defined.
    metadata = vllm_engine.RolloutRayActor.__ray_metadata__
    type(metadata.method_meta).reset_cache()
    metadata.method_meta = type(metadata.method_meta).create(actor, metadata.actor_creation_function_descriptor)

    # Raw log-probs would be those before temperature and top-p; the behaviour policy's are those after.
    vllm_engine.create_vllm_engines = functools.wraps(vllm_engine.create_vllm_engines)(
        functools.partial(_create_with_processed_log_probs, vllm_engine.create_vllm_engines)
    )


def _create_with_processed_log_probs(create_vllm_engines, *args, **kwargs):
    arguments = inspect.signature(create_vllm_engines).bind(*args, **kwargs).arguments
    return create_vllm_engines(**arguments | {"logprobs_mode": "processed_logprobs"})


def _counting_updates(update_weight):
    @functools.wraps(update_weight)
    async def counting(self, *args, **kwargs):
        result = await update_weight(self, *args, **kwargs)
        # OpenRLHF sends one parameter a call and marks the last one of an update.
        last = kwargs.get("empty_cache", args[-1] if args else False)
        self.llm.policy_version += bool(last)
        return result

    return counting


async def generate_responses(
    self, prompt, label, sampling_params, max_length: int, hf_tokenizer, num_samples: int = 1, images=None
) -> list[dict]:
    """As `RolloutRayActor.generate_responses`; a response also has "versions", one list an action range.

    `prompt` may be a pair, with the prompt's place in the run first: it comes back as the response's "place", and with
    a seed in `sampling_params` each sample gets one of its own, made of this seed, the place and the sample's index.
    """
    place, prompt = prompt if isinstance(prompt, tuple) else (None, prompt)

    async def respond(index: int) -> dict:
        segments = []
        _SEGMENTS.set(segments)  # a task has a context of its own
        _NAME.set(_name(sampling_params, place, index))
        response = await self.executor.execute(
            prompt=prompt,
            label=label,
            sampling_params=sampling_params,
            max_length=max_length,
            hf_tokenizer=hf_tokenizer,
            llm_engine=self,
            images=images,
        )
        lengths = [end - start for start, end in response["action_ranges"]]
        # An agent that brings tokens from elsewhere has them from no version; they count as made now.
        made_here = [len(versions) for versions in segments] == lengths
        response["versions"] = segments if made_here else [[self.llm.policy_version] * n for n in lengths]
        return response | {"place": place}

    return await asyncio.gather(*map(respond, range(num_samples)))


def _name(sampling_params, *parts) -> str | None:
    return None if sampling_params.seed is None else " ".join(map(str, (sampling_params.seed, *parts)))


class _Unfinished(Exception):
    """Ends an executor's work on a response that is not whole yet: it has no reward."""


class _Piece:
    """Stands for the engine in `executor.execute`, which sees the whole response, or nothing of it."""

    def __init__(self, actor, kept_tokens: list[int], budget: int) -> None:
        self._actor, self._kept, self._budget = actor, kept_tokens, budget
        self.prompt_tokens: list[int] = []
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []

    async def generate(self, prompt_tokens: list[int], sampling_params, multi_modal_data=None) -> SimpleNamespace:
        """As `RolloutRayActor.generate`, from where the response has come to; a budget of 0 ends it there.

        Raises:
            _Unfinished: if the budget was spent, or the growing stopped, before the response ended.
        """
        self.prompt_tokens = list(prompt_tokens)
        left = sampling_params.max_tokens - len(self._kept)
        finish_reason = "length"
        if self._budget:
            sampling_params.max_tokens = min(left, self._budget)
            sampling_params.min_tokens = max(0, sampling_params.min_tokens - len(self._kept))
            segments = []
            _SEGMENTS.set(segments)
            output = await self._actor.generate(self.prompt_tokens + self._kept, sampling_params)
            (self.versions,), (piece,) = segments, output.outputs
            self.tokens = list(piece.token_ids)
            for token, log_probs in zip(self.tokens, piece.logprobs or [], strict=True):
                self.log_probs.append(log_probs[token].logprob)
            finish_reason = piece.finish_reason
            if finish_reason == "abort" or (finish_reason == "length" and len(self.tokens) < left):
                raise _Unfinished
        whole = SimpleNamespace(token_ids=self._kept + self.tokens, finish_reason=finish_reason, logprobs=None)
        return SimpleNamespace(outputs=[whole])


async def grow_responses(
    self,
    prompt,
    label,
    sampling_params,
    max_length: int,
    hf_tokenizer,
    kept_tokens: dict[int, list[int]],
    budget: int,
) -> list[dict]:
    """Let every response to a prompt grow by at most `budget` tokens; a reward is asked for when a response is whole.

    Args:
        prompt: a pair, as in `generate_responses`; a seed also follows from what is kept of a response.
        kept_tokens: of every response so far, by its index among those to the prompt, [] for a new one.
        budget: 0 to end every response where it is, as truncated.

    Returns:
        One dict a response: its new "tokens", "log_probs" and "versions", the "prompt_tokens", "outcome" (None, or of
        the whole response reward, scores, truncated and extra_logs as `SingleTurnAgentExecutor.execute` found them),
        and "ended", when it stopped growing, in seconds since 1970.
    """

    place, prompt = prompt

    async def grow(index: int, kept: list[int]) -> dict:
        piece, outcome = _Piece(self, kept, budget), None
        _NAME.set(_name(sampling_params, place, index, len(kept)))
        try:
            response = await self.executor.execute(
                prompt=prompt,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=piece,
            )
            outcome = {name: _plain(response[name]) for name in ("reward", "scores", "truncated")}
            outcome["extra_logs"] = {name: _plain(value) for name, value in response["extra_logs"].items()}
        except _Unfinished:
            pass
        found = {name: getattr(piece, name) for name in ("prompt_tokens", "tokens", "log_probs", "versions")}
        return found | {"outcome": outcome, "ended": time.time()}

    return await asyncio.gather(*(grow(index, kept) for index, kept in kept_tokens.items()))


async def stop_growing(self) -> None:
    """End all requests that the engine has; each keeps the tokens that it has made."""
    await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)


def policy_version(self) -> int:
    """Weight updates loaded so far."""
    return self.llm.policy_version


def limit_rewards(self, patience: float, timeout: float) -> None:
    """Set `--reward_fault.patience` and `--reward_fault.timeout`, in seconds."""
    self.executor.reward_limits = RewardLimits(patience, timeout)


async def check_health(self) -> None:
    """Raises vLLM's EngineDeadError if the engine's own process has ended."""
    await self.llm.check_health()


def _plain(value):
    """A JSON value: a reward is a number, a tensor of one, or from a server a list of one."""
    if isinstance(value, list):
        value = value[0]
    return value.flatten()[0].item() if isinstance(value, torch.Tensor) else value
