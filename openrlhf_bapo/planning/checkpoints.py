"""Bytes of the replay pool, and of the checkpoints on disk that contain it."""

from openrlhf_bapo.planning.terms import Term

REPLAY_BYTES_PER_TOKEN = 17
"""tokens 4, action_mask 1, behavior_log_probs 4, versions 4, advantages 4 (`SAMPLE_DTYPES` in replay_pool.py)."""

OPTIMIZER_BYTES_PER_PARAMETER = 12
"""AdamW's fp32 weights and two moments."""


def replay_term(*, capacity: int, samples_per_group: int, tokens_per_sample: int, num_extra_columns: int = 0) -> Term:
    """Return a full replay pool's memory on the trainer's host.

    Args:
        capacity: groups of the pool.
        num_extra_columns: further fp32 tensors with one value per token: returns and rollout_log_probs; with a KL loss
            base_action_log_probs; with GAE values.
    """
    tokens = capacity * samples_per_group * tokens_per_sample
    per_token = REPLAY_BYTES_PER_TOKEN + 4 * num_extra_columns
    counts = f"{capacity:,} groups x {samples_per_group} samples x {tokens_per_sample:,} tokens"
    return Term("replay pool", tokens * per_token, f"{counts} x {per_token} bytes")


def checkpoint_terms(
    num_parameters: dict[str, int],
    num_kept: int,
    weight_bytes: int,
    replay: Term | None = None,
    num_adapter: int = 0,
) -> list[Term]:
    """Return the checkpoints on disk as DeepSpeed writes them, and our replay pool beside each.

    Args:
        num_parameters: parameters of each trained model, by its name.
        num_kept: checkpoints kept at the same time.
        weight_bytes: bytes per weight of the models: 2, or 4 in fp32.
        num_adapter: parameters of a LoRA adapter, which alone is trained; 0: all parameters are trained.
        replay: a full pool. While a pool is written, it needs room beside the pools of all checkpoints.
    """
    per_trained, terms = weight_bytes + OPTIMIZER_BYTES_PER_PARAMETER, []
    for name, n in num_parameters.items():
        size, formula = n * per_trained, f"{num_kept} x {n:,} parameters x {per_trained} bytes"
        if num_adapter:
            size = n * weight_bytes + num_adapter * per_trained
            formula = f"{num_kept} x ({n:,} x {weight_bytes} + {num_adapter:,} of the adapter x {per_trained}) bytes"
        terms.append(Term(name, num_kept * size, formula))
    if replay is not None:
        terms.append(Term(replay.name, (num_kept + 1) * replay.bytes, f"{num_kept + 1} x {replay.formula}"))
    return terms
