"""The walk through the real pipeline (Ray, a vLLM engine, a DeepSpeed actor), with the flags of walk.py.

    python studies/late_data/through_pipeline.py --task pipeline --lag 8 --clip ppo --out cell.csv

It runs scripts/train_bapo_quickstart.sh with TASK=walk and writes a CSV with those columns of walk.py that the pipeline
logs. A rollout has 32 prompts x 8 samples. The task names the source of stale samples: `pipeline` has --lag only,
`pipeline_replay` adds a replay pool, `pipeline_partial` adds responses that a token budget interrupts, and
`pipeline_async` is async training with its default queue.
"""

import os
import subprocess
import sys
import tempfile
import zlib
from math import nan
from pathlib import Path

from walk import CHECKPOINTS, Run, fixed_bounds, main

from openrlhf_bapo.cli.plot import read_scalars
from openrlhf_bapo.rules.clip_config import PRESETS
from openrlhf_bapo.rules.other_rules import RULES

REPOSITORY = Path(__file__).parents[2]
DATA = {
    "pipeline": [],
    "pipeline_replay": ["--replay.ratio", "1", "--replay.max_staleness", "16", "--replay.max_reuse", "2"],
    "pipeline_partial": ["--partial.token_budget", "8", "--partial.max_staleness", "16"],
    "pipeline_async": ["--train.async_enable"],
}
COLUMNS = {
    "reward": "rollout/reward_mean",
    "entropy": "entropy_loss",
    "length_positive": "rollout/response_length_positive_mean",
    "length_negative": "rollout/response_length_negative_mean",
    "lower": "bapo/clip_low",
    "upper": "bapo/clip_high",
    "share_unclipped": "bapo/initial_share",
    "share": "bapo/positive_share",
    "clip_positive": "bapo/clip_frac_positive",
    "clip_negative": "bapo/clip_frac_negative",
    "ess": "offpolicy/ess",
    "staleness": "offpolicy/staleness_mean",
    "grad_norm": "actor_grad_norm",
}


def method_of(run: Run) -> tuple[dict[str, str], list]:
    """Translate the rule: variables for scripts/method.sh, and flags of the training command.

    Raises:
        ValueError: for a rule or a setting that the pipeline does not have.
    """
    for name in ("step", "mixed", "wrong", "replay", "same_update", "smoothing_of"):
        if getattr(run, name) != getattr(Run(), name):
            raise ValueError(f"--{name} {getattr(run, name)} is not allowed: the pipeline does not have it")
    name, _, settings = run.clip.partition(":")
    weights = {
        "clip": "capped",
        "taper": "tapered --offpolicy.weight_level token",
        "taper_sequence": "tapered --offpolicy.weight_level sequence",
    }
    weight = weights.get(run.correction) if run.base == "start" else None
    flags = f"--offpolicy.objective decoupled --offpolicy.weight {weight}".split() if weight else []
    flags += ["--actor.dual_clip", run.dual_clip] if run.dual_clip else []
    if bounds := fixed_bounds(run.clip):
        low, high = bounds
        flags += ["--actor.eps_clip_low_high", f"{1 - low:.6g}", f"{high - 1:.6g}"]
        if run.base == "start" and not weight:
            return {"METHOD": {"": "stock", "mask": "stock_is"}[run.correction]}, flags
        return {"METHOD": "grpo"}, flags
    if run.base == "start" and not weight:
        raise ValueError(
            f"--base start is not allowed with --clip {run.clip}, but for --correction taper, taper_sequence, or clip"
        )
    if name in RULES:
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            flags += [f"--{name}.{key}", value]
        return {"METHOD": name}, flags
    if name not in PRESETS:
        raise ValueError(f"--clip {run.clip} is not allowed: the pipeline has no such rule")
    flags += ["--bapo.smoothing", run.half_life] if run.half_life else []
    flags += ["--bapo.contribution", run.contribution] if run.contribution else []
    flags += ["--bapo.positive_contribution_target", run.target] if run.target else []
    flags += ["--bapo.token_weight", run.token_weight] if run.token_weight else []
    return {"METHOD": "bapo", "PRESET": name}, flags


def flags_of(run: Run) -> list[str]:
    """Translate walk.py's flags into flags of the training command."""
    data = ["--train.seed", run.seed, "--actor.adam.lr", run.lr, "--offpolicy.lag", run.lag, *DATA[run.task]]
    return [str(flag) for flag in (*data, *method_of(run)[1])]


def rows_of(scalars: dict[str, tuple[list[int], list[float]]]) -> list[dict[str, float]]:
    """Return one row per rollout from a run's scalars: NaN where nothing was logged, `pass1` only in the last row."""
    logged = {name: dict(zip(*scalars.get(f"train/{tag}", ((), ())), strict=True)) for name, tag in COLUMNS.items()}
    ((steps, heldout),) = (logged for tag, logged in scalars.items() if tag.endswith("_pass1"))
    logged |= {"heldout": dict(zip(steps, heldout, strict=True)), "pass1": {steps[-1]: heldout[-1]}}
    return [
        {"rollout": step} | {name: values.get(step, nan) for name, values in logged.items()}
        for step in sorted(logged["reward"])
    ]


def train(run: Run) -> list[dict[str, float]]:
    """Train through the pipeline; return one row of metrics per rollout, and in each the start policy's checksum."""
    start = Path(run.starts, f"pipeline-seed{run.seed}").resolve()
    prepare = ["examples/quickstart/prepare.py", "--task", "walk", "--seed", str(run.seed), str(start)]
    subprocess.run([sys.executable, *prepare], cwd=REPOSITORY, check=True)
    method, _ = method_of(run)
    every = max(1, run.rollouts // CHECKPOINTS)
    sizes = {"STEPS": run.rollouts, "EVAL_STEPS": every, "UPDATES": run.updates, "EPOCHS": run.epochs}
    with tempfile.TemporaryDirectory(dir=start.parent) as folder:
        Path(folder, "start").symlink_to(start)
        settings = {"TASK": "walk", "SEED": run.seed, "RUNS": folder, "MAX_NEW_TOKENS": 40} | sizes | method
        environment = os.environ | {name: str(value) for name, value in settings.items()}
        script = ["bash", "scripts/train_bapo_quickstart.sh", *flags_of(run)]
        subprocess.run(script, cwd=REPOSITORY, env=environment, check=True)
        number = zlib.crc32(Path(start, "model", "model.safetensors").read_bytes()) % 10_000  # the CSV has four digits
        return [row | {"start": number} for row in rows_of(read_scalars(Path(folder)))]


if __name__ == "__main__":
    main(train, __doc__)
