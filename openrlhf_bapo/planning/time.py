"""How long a run's phases take: training by its operations, generation by the memory that it reads.

Operations are counted as by Kaplan et al. (arXiv 2001.08361, table 1), memory reads as by Pope et al. (arXiv
2211.05102, section 2).
"""

from openrlhf_bapo.planning.engine_memory import VLLM_SEQUENCES, EngineSetup, KvCache, engine_weight_term
from openrlhf_bapo.planning.model_shape import ModelShape


def step_flops(
    shape: ModelShape,
    *,
    trained_tokens: int,
    forward_tokens: int,
    length: int,
    gradient_checkpointing: bool,
    is_adapter: bool = False,
) -> int:
    """Count the FLOPs of a training step on all GPUs, causal attention included: 2P per token forward, 4P backward.

    Args:
        trained_tokens: tokens that go through a backward; checkpointing repeats nearly all of their forward.
        forward_tokens: tokens whose log-probs are computed without gradient.
        length: tokens per sample.
        gradient_checkpointing: whether the backward recomputes the forward.
        is_adapter: whether the weights are frozen, so that a backward has half of their products. LoRA's own are few.
    """
    lookup = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    weights, attention = 2 * (shape.num_parameters - lookup), 2 * shape.num_layers * length * shape.query_size
    passes = 4 if gradient_checkpointing else 3
    trained = weights * (passes - is_adapter) + attention * passes
    return trained * trained_tokens + (weights + attention) * forward_tokens


def rollout_seconds(
    shape: ModelShape,
    engine: EngineSetup,
    cache: KvCache,
    *,
    num_sequences: int,
    prompt_tokens: int,
    response_tokens: int,
    bytes_per_second: float,
) -> float:
    """Return the seconds that one engine takes to generate its sequences, if only memory reads take time.

    Each step generates one token per running sequence. It reads the weights once, and the keys and values of each
    sequence so far. Not counted: prefill, communication, the tail of long responses.

    Args:
        num_sequences: sequences of this engine in one rollout.
        prompt_tokens: mean length of a prompt.
        response_tokens: mean length of a response.
        bytes_per_second: memory bandwidth of one GPU.
    """
    length = prompt_tokens + response_tokens / 2  # mean length of a sequence while it is generated
    running = max(1, min(num_sequences, VLLM_SEQUENCES, int(cache.num_tokens / length)))
    read = engine_weight_term(shape, engine).bytes + running * length * cache.bytes_per_token
    return num_sequences / running * response_tokens * read / bytes_per_second
