"""How long a training run's phases take, on paper: training by its operations, generation by the memory it reads.

Operations are counted as by Kaplan et al. (arXiv 2001.08361, table 1), memory reads as by Pope et al. (arXiv
2211.05102, section 2).
"""

from openrlhf_bapo.planning.actor_memory import VLLM_SEQUENCES, EngineSetup, KvCache, ModelShape, engine_weight_term


def step_flops(
    shape: ModelShape, trained_tokens: int, forward_tokens: int, length: int, gradient_checkpointing: bool
) -> int:
    """FLOPs of a training step on all GPUs: 2P a token forward, twice that backward, and causal attention.

    Args:
        trained_tokens: that go through a backward; checkpointing repeats (nearly all of) their forward.
        forward_tokens: whose log-probs are computed without gradient.
        length: tokens of a sample.
    """
    lookup = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    forward = 2 * (shape.num_parameters - lookup) + 2 * shape.num_layers * length * shape.query_size
    return forward * (trained_tokens * (4 if gradient_checkpointing else 3) + forward_tokens)


def rollout_seconds(
    shape: ModelShape,
    engine: EngineSetup,
    cache: KvCache,
    num_sequences: int,
    prompt_tokens: int,
    response_tokens: int,
    bytes_per_second: float,
) -> float:
    """Seconds in which one engine generates its sequences, if reading memory is all that takes time.

    Every step makes one token of each running sequence; it reads the weights once, and each sequence's keys and values
    so far (Pope et al., arXiv 2211.05102, section 2). Left out: prefill, communication, the tail of long responses.

    Args:
        num_sequences: of this engine, in one rollout.
        prompt_tokens: mean.
        response_tokens: mean.
        bytes_per_second: of one GPU's memory.
    """
    length = prompt_tokens + response_tokens / 2  # of a sequence on average, while it is generated
    running = max(1, min(num_sequences, VLLM_SEQUENCES, int(cache.num_tokens / length)))
    read = engine_weight_term(shape, engine).bytes + running * length * cache.bytes_per_token
    return num_sequences / running * response_tokens * read / bytes_per_second
