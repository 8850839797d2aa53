"""The cost of one training step in the replay pool, beside handing the same groups over through Ray.

A full pool takes up --step-groups fresh groups and draws as many, which is what a step with --replay.ratio 1 does.
The hand-over is ray.put of the drawn groups, or pickle.dumps where Ray is not installed. Prints medians.

    python benchmarks/replay_pool.py --groups 10000 --samples 8 --tokens 1000
"""

import argparse
import importlib.util
import pickle
import resource
import statistics
import sys
import time

import torch

from openrlhf_bapo.offpolicy.replay_pool import SAMPLE_DTYPES, STRATEGIES, Group, ReplayConfig, ReplayPool

MAX_GIB = 6
BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in SAMPLE_DTYPES.values())


def rollout(num_samples: int, num_tokens: int) -> dict[str, torch.Tensor]:
    """One group's tensors as a rollout makes them: [num_samples, num_tokens] or one less, in torch's default dtypes."""
    shape = (num_samples, num_tokens - 1)
    return {
        "tokens": torch.randint(150_000, (num_samples, num_tokens)),
        "action_mask": torch.ones(shape, dtype=torch.bool),
        "behavior_log_probs": -torch.rand(shape),
        "versions": torch.zeros(shape, dtype=torch.int64),
        "advantages": torch.randn(shape),
    }


def make_groups(batch: dict[str, torch.Tensor], num_groups: int, version: int) -> list[Group]:
    """Groups that own their memory: each is cut from `batch`, so that `Group` converts or clones every tensor."""
    batch["versions"].fill_(version)
    samples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    rewards = torch.arange(len(samples)).float()
    return [Group(samples, rewards) for _ in range(num_groups)]


def timed(function, *args) -> tuple[float, object]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    found = function(*args)
    return time.perf_counter() - start, found


def peak_resident_bytes() -> int:
    """The most memory that this process held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000, help="capacity of the pool, filled before the timing")
    parser.add_argument("--samples", type=int, default=8, help="samples per group")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per sample")
    parser.add_argument("--step-groups", type=int, default=128, help="fresh groups, and drawn groups, of a step")
    parser.add_argument("--strategy", choices=STRATEGIES, default="uniform")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    gib = (args.groups + args.step_groups) * args.samples * args.tokens * BYTES_PER_TOKEN / 2**30
    if gib > MAX_GIB:
        sys.exit(
            f"the pool would take {gib:.1f} GiB; lower --groups, --samples or --tokens to stay below {MAX_GIB} GiB"
        )

    num_fill_steps = -(-args.groups // args.step_groups)
    config = ReplayConfig(
        ratio=1.0, capacity=args.groups, max_staleness=num_fill_steps + args.repeats, strategy=args.strategy
    )
    pool, batch = ReplayPool(config), rollout(args.samples, args.tokens)
    at_start = peak_resident_bytes()
    for version in range(num_fill_steps):
        pool.add(make_groups(batch, args.step_groups, version))
    held = peak_resident_bytes() - at_start
    num_tokens = len(pool) * args.samples * args.tokens
    print(f"pool: {len(pool)} groups of {args.samples} samples of {args.tokens} tokens, strategy {args.strategy}")
    print(f"bytes per token: {pool.num_bytes / num_tokens:.2f} in tensors, {held / num_tokens:.2f} of process memory")

    if importlib.util.find_spec("ray"):
        import ray

        ray.init(num_cpus=1, include_dashboard=False)
        hand_over_name, hand_over = "ray.put", ray.put
    else:
        hand_over_name, hand_over = "pickle.dumps", lambda groups: pickle.dumps(groups, protocol=5)

    steps = []
    for version in range(num_fill_steps, num_fill_steps + args.repeats):
        make_seconds, fresh = timed(make_groups, batch, args.step_groups, version)
        add_seconds, _ = timed(pool.add, fresh)
        sample_seconds, drawn = timed(pool.sample, args.step_groups, version)
        hand_over_seconds, _ = timed(hand_over, drawn)
        steps.append((make_seconds, add_seconds, sample_seconds, add_seconds + sample_seconds, hand_over_seconds))
    if hand_over_name == "ray.put":
        ray.shutdown()

    names = ("make groups", "add", "sample", "add + sample", hand_over_name)
    medians = {name: statistics.median(values) for name, values in zip(names, zip(*steps, strict=True), strict=True)}
    print(f"a step of {args.step_groups} groups, medians of {args.repeats}:")
    for name, median in medians.items():
        print(f"  {name:<13} {1000 * median:8.1f} ms")
    print(f"  add + sample / {hand_over_name}: {medians['add + sample'] / medians[hand_over_name]:.3f}")


if __name__ == "__main__":
    main()
