"""Memory of a vLLM engine's GPU, alone or shared with the actor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from openrlhf_bapo.planning.activations import forward_bytes_per_token
from openrlhf_bapo.planning.actor_memory import TrainingSetup, idle_terms, training_phases, training_process_term
from openrlhf_bapo.planning.model_shape import ModelShape
from openrlhf_bapo.planning.terms import Phase, Term, process_term, shared_term

# vLLM's defaults (config/scheduler.py) for OpenRLHF's engines, which do not set them.
VLLM_BATCHED_TOKENS = 2048
VLLM_SEQUENCES = 128


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """How a vLLM engine runs. Fields are named after OpenRLHF's flags, by their last part."""

    max_len: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.95
    enforce_eager: bool = False
    enable_sleep: bool = False
    """--vllm.enable_sleep: weights and KV cache leave the GPU unless the engine generates."""


@dataclass(frozen=True)
class KvCache:
    """An engine's room for keys and values on each of its GPUs."""

    bytes_per_token: int
    budget: int
    """Bytes; negative if not even the weights fit."""
    num_tokens: int
    num_sequences: float
    """How many sequences of max_len tokens fit at the same time."""

    @property
    def fits(self) -> bool:
        """Whether one sequence of full length fits; otherwise vLLM refuses to start."""
        return self.num_sequences >= 1


def kv_bytes_per_token(shape: ModelShape, tensor_parallel_size: int) -> int:
    """Return the bytes per token of bf16 keys and values in all layers; vLLM keeps at least one head on each GPU."""
    heads = max(1, shape.num_key_value_heads // tensor_parallel_size)
    return 2 * shape.num_layers * heads * shape.head_dim * 2


def kv_cache(shape: ModelShape, engine: EngineSetup, gpu_bytes: int) -> KvCache:
    """Return the cache that vLLM allocates: its share of the GPU, less weights, workspace and its process."""
    share = math.ceil(gpu_bytes * engine.gpu_memory_utilization)
    others = (engine_weight_term(shape, engine), engine_workspace_term(shape, engine), engine_process_term(engine))
    budget = share - sum(term.bytes for term in others)
    per_token = kv_bytes_per_token(shape, engine.tensor_parallel_size)
    num_tokens = max(budget, 0) // per_token
    return KvCache(per_token, budget, num_tokens, num_tokens / engine.max_len)


def engine_weight_term(shape: ModelShape, engine: EngineSetup) -> Term:
    """Return vLLM's bf16 weights on one GPU; tensor parallelism splits the embeddings too."""
    return shared_term("vLLM weights", 2, shape.num_parameters, "parameters", engine.tensor_parallel_size)


def engine_workspace_term(shape: ModelShape, engine: EngineSetup) -> Term:
    """Estimate the peak of vLLM's profile run.

    A forward of VLLM_BATCHED_TOKENS, and 16 bytes per logit of VLLM_SEQUENCES (bf16, fp32, probabilities, sorting).
    """
    forward = VLLM_BATCHED_TOKENS * forward_bytes_per_token(shape, engine.tensor_parallel_size)
    sampler = VLLM_SEQUENCES * shape.vocab_size * 16
    return Term("vLLM workspace", forward + sampler, f"{forward:,} forward + {sampler:,} sampler (estimate)")


def engine_process_term(engine: EngineSetup) -> Term:
    """Return an engine's process and, unless --vllm.enforce_eager, its CUDA graphs; both stay while it sleeps."""
    return process_term("vLLM process, CUDA graphs", 1 if engine.enforce_eager else 2)


def engine_phase(shape: ModelShape, engine: EngineSetup, gpu_bytes: int, beside: Iterable[Term] = ()) -> Phase:
    """Return the generation phase, with the terms that are `beside` the engine on its GPU."""
    cache = kv_cache(shape, engine, gpu_bytes)
    formula = (
        f"{gpu_bytes:,} x {engine.gpu_memory_utilization} less the other vLLM terms: {cache.num_tokens:,} tokens x "
        f"{cache.bytes_per_token:,} bytes, {cache.num_sequences:.1f} sequences of {engine.max_len:,}"
    )
    terms = [
        engine_weight_term(shape, engine),
        engine_workspace_term(shape, engine),
        Term("vLLM KV cache", max(cache.budget, 0), formula),
        engine_process_term(engine),
    ]
    return Phase("generation", (*terms, *beside))


def colocated_phases(shape: ModelShape, setup: TrainingSetup, engine: EngineSetup, gpu_bytes: int) -> list[Phase]:
    """Return all phases of a GPU that has both actor and engine (--train.colocate_all in sync training).

    An engine without sleep keeps its whole share during training. A weight sync wakes only the weights, gathers one
    weight at a time and copies it for the engine (`_handle_cuda_ipc` in trainer/ray/ppo_actor.py). With LoRA,
    openrlhf/lora.py merges it in fp32 first.
    """
    idle, trainers = idle_terms(shape, setup), training_process_term(setup)
    generation = engine_phase(shape, engine, gpu_bytes, (*idle, trainers))
    process = engine_process_term(engine)
    awake = [term for term in generation.terms if term.name.startswith("vLLM")]
    beside = [process] if engine.enable_sleep else awake
    training = [Phase(phase.name, (*phase.terms, *beside)) for phase in training_phases(shape, setup)]
    # Gathered and copied, or gathered, in fp32 and merged.
    copies = shared_term(
        "a weight, gathered and copied", 8 if setup.lora_rank else 4, shape.largest_parameter, "elements"
    )
    syncing = [engine_weight_term(shape, engine), process] if engine.enable_sleep else awake
    return [generation, *training, Phase("weight sync", (*idle, copies, trainers, *syncing))]


def engine_host_terms(shape: ModelShape, engine: EngineSetup) -> list[Term]:
    """Return the pinned host memory per GPU of an engine on the actor's GPUs: its weights while it sleeps."""
    if not engine.enable_sleep:
        return []
    size = engine.tensor_parallel_size
    return [shared_term("sleeping vLLM weights", 2, shape.num_parameters, "parameters", size)]
