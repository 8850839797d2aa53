"""What a token budget does to a training step on the CPU, where the longest of a rollout's responses holds it back.

The real command trains a random policy of 0.1 million parameters, which may end a response at any token, with and
without a budget by turns. Printed are medians over all steps but the first three of every run (the engine compiles, and
the first groups under a budget are begun): seconds of generation and of the step, response tokens trained a second.

    .venv/bin/python benchmarks/partial_rollouts.py
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import pipeline  # noqa: E402

WARM_UP = 3


def main() -> None:
    """Run `--turns` pairs of runs and print both medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=14, help="training steps of a run (%(default)s)")
    parser.add_argument("--token_budget", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--oversample", type=float, default=1.5, help="(%(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=480, help="(%(default)s)")
    args = parser.parse_args()

    found = {0: [], args.token_budget: []}
    with tempfile.TemporaryDirectory() as folder:
        directory = pipeline.make_model(Path(folder), num_prompts=16 * args.steps)
        config = directory / "model/config.json"
        config.write_text(
            config.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 512')
        )
        for turn in range(args.turns):
            for budget, steps in found.items():
                flags = pipeline.flags(
                    directory,
                    policy_loss="bapo",
                    data__max_samples=16 * args.steps,
                    data__max_len=args.max_new_tokens + 16,
                    rollout__max_new_tokens=args.max_new_tokens,
                    actor__adam__lr=1e-7,  # lengths stay as they are
                    partial__token_budget=budget,
                    partial__oversample=args.oversample,
                )
                output = pipeline.train(directory, flags, f"{budget}-{turn}")
                steps += pipeline.steps(output)[WARM_UP:]
                print(f"turn {turn}, budget {budget}: {len(steps)} steps", flush=True)
    for budget, steps in found.items():
        generation, step, length = (
            statistics.median(s[name] for s in steps)
            for name in ("timing/generation", "timing/step_total", "rollout/response_length_mean")
        )
        rates = [s["rollout/num_samples"] * s["rollout/response_length_mean"] / s["timing/step_total"] for s in steps]
        print(
            f"budget {budget:4}: generation {generation:.2f} s, step {step:.2f} s, "
            f"{statistics.median(rates):.0f} tokens trained a second, mean length {length:.0f}, {len(steps)} steps"
        )


if __name__ == "__main__":
    main()
