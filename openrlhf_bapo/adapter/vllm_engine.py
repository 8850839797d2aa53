"""OpenRLHF's rollout engine actor, which says of every token which policy version generated it.

The engine itself counts the weight updates that it has loaded; a token's version is the count when it came out. A
response that OpenRLHF pauses for a weight update and then resumes carries both versions.
"""

import asyncio
import contextvars
import functools
import inspect
from types import ModuleType

# The versions of every `generate` call of the response that the running task makes, one list a call.
_SEGMENTS = contextvars.ContextVar("segments")


class VersionedEngine:
    """vLLM's engine; `generate` also notes the version of every token that it yields."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.policy_version = 0
        """Weight updates loaded so far."""

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, *args, **kwargs):
        """As vLLM's, whose outputs are cumulative."""
        versions = []
        _SEGMENTS.get().append(versions)
        async for output in self._engine.generate(*args, **kwargs):
            num_new = len(output.outputs[0].token_ids) - len(versions)
            versions.extend([self.policy_version] * num_new)
            yield output


def note_versions(vllm_engine: ModuleType) -> None:
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
    """As `RolloutRayActor.generate_responses`; a response also has "versions", one list an action range."""

    async def respond() -> dict:
        segments = []
        _SEGMENTS.set(segments)  # a task has a context of its own
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
        return response

    return await asyncio.gather(*(respond() for _ in range(num_samples)))
