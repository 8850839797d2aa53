"""BAPO in TRL on a laptop: `BapoGRPOTrainer` trains a tiny policy that can nearly add, in two minutes.

    pip install '.[trl,plot]' reasoning-gym      # or bash scripts/setup.sh; then prefix the commands with .venv/bin/
    python examples/trl/train.py                  # or --method grpo, for TRL's fixed clip
    openrlhf-bapo plot runs/trl/bapo -o runs/trl/curves.png

All other flags are GRPOConfig's, such as --learning_rate 1e-4 or --num_iterations 4. Each generation of 256 samples is
used twice, in 8 optimizer steps each time, so that the later steps are off-policy.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from openrlhf_bapo import ClipConfig
from openrlhf_bapo.trl import BapoGRPOTrainer

EXAMPLES = Path(__file__).resolve().parents[1]
DEFAULTS = dict(
    per_device_train_batch_size=32,
    steps_per_generation=8,  # 8 x 32 samples per generation
    gradient_accumulation_steps=1,
    num_iterations=2,
    num_generations=8,
    max_completion_length=8,
    max_steps=480,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    logging_steps=16,
    save_strategy="no",
    report_to="tensorboard",
    use_cpu=True,
    bf16=False,
)


def is_right(completions: list[str], label: list[str], **_) -> list[float]:
    """Return 1 for the right sum, else 0."""
    answers = [json.loads(entry)["answer"] for entry in label]
    return [float(text == answer) for text, answer in zip(completions, answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["bapo", "steady", "grpo"], default="bapo", help="(%(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/trl"), help="folder (%(default)s)")
    args, flags = parser.parse_known_args()

    start = args.runs / "start"
    prepare = [str(EXAMPLES / "quickstart" / "prepare.py"), "--task", "chain_sum", str(start)]
    subprocess.run([sys.executable, *prepare], check=True)
    values = DEFAULTS | {"output_dir": args.runs / args.method}
    given = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([*given, *flags])

    make, ours = GRPOTrainer, {}
    if args.method != "grpo":
        searched = ClipConfig(positive_contribution_target=0.5, contribution="gradient")
        bapo = "steady" if args.method == "steady" else searched
        make, ours = BapoGRPOTrainer, {"bapo": bapo}
    trainer = make(
        model=AutoModelForCausalLM.from_pretrained(start / "model", dtype="float32"),
        reward_funcs=is_right,
        args=config,
        train_dataset=load_dataset("json", data_files=str(start / "train.jsonl"), split="train").rename_column(
            "input", "prompt"
        ),
        **ours,
    )
    trainer.train()


if __name__ == "__main__":
    main()
