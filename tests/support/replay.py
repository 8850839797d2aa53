"""Flags of runs with replay."""

import pipeline


def flags(directory, **overrides) -> list[str]:
    """Flags of ten global steps of 16 fresh and 16 replayed groups of 4, with two micro-batches per optimizer step."""
    values = dict(
        policy_loss="bapo",
        data__max_samples=160,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        replay__ratio=1,
        replay__max_staleness=4,
        replay__max_reuse=2,
    )
    return pipeline.flags(directory, **values | overrides)


ASYNC = dict(data__max_len=72, rollout__max_new_tokens=64, train__async_enable=True, train__async_queue_size=2)
