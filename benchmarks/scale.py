"""What a training step costs the driver: OpenRLHF's trainer process, which holds all samples, alone and with our parts.

The driver is the real one (PPOTrainer.fit with its samples generator, experience maker, pools, batching and metrics).
Engines and ranks are stand-ins that answer at once: responses of made-up tokens with log-normal lengths, and log-probs
of 0. The flags are those of scripts/train_bapo_qwen32b.sh. Every case has its own process; the variants run in turn.
Printed are CPU seconds per step of each part, without those of the stand-ins, seconds of the clock with all of it, and
the driver's memory. The slope is that of log(CPU seconds) over log(tokens).

    python benchmarks/scale.py --samples 128 512 2048 --mean_tokens 1024 4096
    python benchmarks/scale.py --samples 512 --mean_tokens 4096 --ranks 64 512
"""

import argparse
import contextlib
import json
import os
import pickle
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

REPOSITORY = Path(__file__).parent.parent
sys.path.append(str(REPOSITORY / "tests" / "support"))
import pipeline  # noqa: E402

VARIANTS = {
    "openrlhf": [],
    "bapo": [],
    "replay": ["--replay.ratio", "1"],
    "token budget": ["--partial.token_budget", "{budget}", "--partial.oversample", "2"],
}
SAMPLES_PER_PROMPT = 16
SPREAD = 0.8  # standard deviation of the logarithm of a length
WARM_UP = 1  # steps


class Clock:
    """CPU seconds of this process by part. A part within a part counts for itself alone."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._stack, self._since = ["other"], time.process_time()

    def _charge(self) -> None:
        now = time.process_time()
        self.parts[self._stack[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what runs in the context to a part."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Charge every call of a method to a part."""
        upstream = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.part(name):
                return upstream(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        self._charge()
        parts, self.parts = dict(self.parts), defaultdict(float)
        return parts


class Engine:
    """Answers for a rollout engine, in this process. Its seconds count as "stand-ins"."""

    def __init__(self, clock: Clock, mean_tokens: int, max_tokens: int) -> None:
        self._clock, self._random = clock, np.random.default_rng(0)
        self._mean, self._max = mean_tokens, max_tokens
        self._lengths: dict[tuple, int] = {}  # of responses under a token budget, by prompt and number

    def __getattr__(self, method: str) -> SimpleNamespace:
        import ray

        answer = {"generate_responses": self._generate, "grow_responses": self._grow}.get(method, lambda **_: 0)

        def remote(*args, **kwargs):
            with self._clock.part("stand-ins"):
                return ray.put(answer(**kwargs))

        return SimpleNamespace(remote=remote)

    def _length(self) -> int:
        length = self._random.lognormal(np.log(self._mean) - SPREAD**2 / 2, SPREAD)
        return int(min(max(1, length), self._max))

    def _generate(self, prompt, label, num_samples, **_) -> list[dict]:
        found = []
        for _ in range(num_samples):
            start, tokens = 4, self._length()
            reward = float(self._random.integers(2))
            response = {
                "prompt": getattr(prompt, "text", prompt),
                "place": getattr(prompt, "place", None),
                "label": label,
                "observation_tokens": self._random.integers(3, 15, start + tokens).tolist(),
                "action_ranges": [(start, start + tokens)],
                "rollout_log_probs": [0.0] * start + (-self._random.random(tokens)).tolist(),
                "versions": [[0] * tokens],
            }
            found.append(response | {"reward": reward, "scores": reward, "extra_logs": {}, "truncated": False})
        return found

    def _grow(self, prompt, kept_tokens, budget, finish, **_) -> list:
        from openrlhf_bapo.openrlhf.vllm_engine import Piece

        pieces = []
        for number, kept in kept_tokens.items():
            left = self._lengths.setdefault((prompt.place, number), self._length()) - len(kept)
            new = left if finish else min(left, budget)
            reward = float(self._random.integers(2))
            outcome = {"reward": reward, "scores": reward, "truncated": False, "extra_logs": {}}
            tokens, log_probs = self._random.integers(3, 15, new).tolist(), (-self._random.random(new)).tolist()
            is_complete = new == left
            pieces.append(
                Piece([3, 4, 5, 6], tokens, log_probs, [0] * new, outcome if is_complete else None, time.time())
            )
        return pieces


class Rank:
    """Answers for all ranks of the policy, in a process of its own."""

    def execute_batch(self, method: str, data: dict, start: int, end: int) -> list:
        import torch

        masks = data["action_mask"][start:end] if method == "forward" else [None] * (end - start)
        return [None if mask is None else torch.zeros(mask.shape) for mask in masks]

    def fit(self, kl_ctl: float) -> dict:
        return {"offpolicy/optimizer_steps_taken": 4}

    def _nothing(self) -> None:
        pass

    empty_cache = reload_states = offload_states = broadcast_to_vllm = _nothing


def recipe(directory: Path, case: dict) -> list[str]:
    """Return the flags of the 32B recipe with the sizes of a case, and a tiny model's tokenizer."""
    environment = os.environ | {"DRY_RUN": "command", "NUM_NODES": str(case["ranks"] // 8)}
    command = ["bash", str(REPOSITORY / "scripts/train_bapo_qwen32b.sh")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    samples = case["samples"]
    values = {
        "actor.model_name_or_path": directory / "model",
        "data.prompt_dataset": directory / "train.jsonl",
        "reward.remote_url": directory / "reward.py",
        "rollout.batch_size": samples // SAMPLES_PER_PROMPT,
        "train.batch_size": samples // 4,
        "logger.tensorboard_dir": directory / "tensorboard",
        "ckpt.path": directory / "ckpt",
        "ckpt.save_steps": -1,
    }
    flags = [flag for flag in shlex.split(printed)[2:] if flag != "--data.apply_chat_template"]
    at = flags.index("--eval.dataset")
    flags = flags[:at] + flags[at + 2 :]
    more = [text.format(budget=case["mean_tokens"]) for text in VARIANTS[case["variant"]]]
    return flags + [text for name, value in values.items() for text in (f"--{name}", str(value))] + more


def drive(directory: Path) -> None:
    """Run the driver of the case in a folder, and print its figures as JSON."""
    case = json.loads((directory / "case.json").read_text())
    import ray
    import torch

    from openrlhf_bapo.openrlhf import registration  # without CUDA, also the CPU backend

    hook = "openrlhf_bapo.openrlhf.cpu.register"
    if case["variant"] != "openrlhf":
        registration.register()
        hook = registration.WORKER_SETUP_HOOK
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray.launcher import RayActorGroup
    from openrlhf.utils import get_strategy

    args = pickle.loads((directory / "args.pickle").read_bytes())
    torch.set_num_threads(1)
    # Prompts x samples of one step need about 200 bytes per token in Ray's object store.
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook},
        log_to_driver=False,
        object_store_memory=12 << 30,
    )
    clock = Clock()
    handle = ray.remote(num_cpus=0)(Rank).remote()
    ranks = RayActorGroup.__new__(RayActorGroup)
    ranks._actor_handlers = [handle] * case["ranks"]
    ranks.duplicate_actors = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    engine = Engine(clock, case["mean_tokens"], args.rollout.max_new_tokens)
    sizes = {"max_new_tokens": args.rollout.max_new_tokens, "max_len": args.data.max_len}
    engines = [engine] * args.vllm.num_engines
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class(
        str(directory / "model"), get_strategy(args), ranks, None, None, None, engines, **sizes
    )
    clock.wrap(trainer.samples_generator, "generate_samples", "rollout's samples")
    clock.wrap(trainer.experience_maker, "make_experience_batch", "experience")
    clock.wrap(trainer.experience_maker, "_flatten_results", "results of the forward")
    clock.wrap(ranks, "async_run_method_batch", "handing over to the ranks")
    clock.wrap(trainer, "_compute_rollout_stats", "metrics")
    clock.wrap(ppo_trainer, "balance_experiences", "balancing")
    if pool := getattr(trainer.experience_maker, "pool", None):
        for name in ("add", "sample"):
            clock.wrap(pool, name, "replay pool")

    steps, began = [], [time.perf_counter()]

    def note(*_, **__) -> None:
        now = time.perf_counter()
        steps.append((clock.take(), now - began[0]))
        began[0] = now

    trainer.save_logs_and_checkpoints = note
    trainer.fit()
    steps = steps[WARM_UP:]
    names = {name for parts, _ in steps for name in parts} - {"stand-ins"}
    parts = {name: statistics.median(parts.get(name, 0.0) for parts, _ in steps) for name in names}
    clock_seconds = statistics.median(seconds - parts.get("stand-ins", 0.0) for parts, seconds in steps)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"parts": parts, "cpu": sum(parts.values()), "clock": clock_seconds, "gib": gib}))


def run(case: dict, num_steps: int) -> dict:
    """Run a case in a process of its own; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        directory = pipeline.make_model(Path(folder), case["samples"] // SAMPLES_PER_PROMPT * (num_steps + WARM_UP))
        (directory / "case.json").write_text(json.dumps(case))
        with contextlib.redirect_stdout(sys.stderr):
            (directory / "args.pickle").write_bytes(pickle.dumps(pipeline.parse(recipe(directory, case))))
        command = [sys.executable, __file__, "--drive", folder]
        with open(directory / "log", "w+") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
            if done.returncode:
                log.seek(0)
                sys.exit(f"{case} ended with {done.returncode}:\n{log.read()[-5000:]}")
    return case | json.loads(done.stdout.splitlines()[-1])


def planned_seconds(mean_tokens: int) -> float:
    """Return the planned seconds of a step of the 32B recipe with responses of this mean length."""
    command = ["bash", str(REPOSITORY / "scripts/train_bapo_qwen32b.sh")]
    environment = os.environ | {"DRY_RUN": "1"}
    run = subprocess.run(
        [*command, "--plan.response_tokens", str(mean_tokens)], env=environment, capture_output=True, text=True
    )
    rollout, training = re.search(r"rollout ([\d.,]+) min .*training ([\d.,]+) min", run.stdout).groups()
    return 60 * (float(rollout.replace(",", "")) + float(training.replace(",", "")))


def slope(found: list[dict]) -> float:
    """Return the slope of log(CPU seconds) over log(tokens) of a variant's cases."""
    tokens, seconds = ([np.log(value) for value in values] for values in zip(*map(_point, found), strict=True))
    return float(np.polyfit(tokens, seconds, 1)[0]) if len(set(tokens)) > 1 else float("nan")


def _point(case: dict) -> tuple[float, float]:
    return case["samples"] * case["mean_tokens"], case["cpu"]


def table(found: list[dict]) -> str:
    """Return the figures as markdown."""
    parts = list(dict.fromkeys(name for case in found for name in sorted(case["parts"])))
    header = ["variant", "samples", "mean tokens", "ranks", *parts, "CPU s", "/ openrlhf's", "clock s", "GiB"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    sizes = ("samples", "mean_tokens", "ranks")
    for case in found:
        alone = next((c for c in found if c["variant"] == "openrlhf" and all(c[s] == case[s] for s in sizes)), None)
        cells = [case["variant"], *(str(case[size]) for size in sizes)]
        cells += [f"{case['parts'].get(name, 0.0):.2f}" for name in parts]
        cells += [f"{case['cpu']:.2f}", f"{case['cpu'] / alone['cpu']:.2f}" if alone else "-"]
        cells += [f"{case['clock']:.2f}", f"{case['gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: list[dict], file: Path) -> None:
    """Draw CPU seconds over tokens, one line per variant."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for variant in dict.fromkeys(case["variant"] for case in found):
        cases = [case for case in found if case["variant"] == variant]
        points = sorted(map(_point, cases))
        axes.loglog(*zip(*points, strict=True), marker="o", label=f"{variant}, slope {slope(cases):.2f}")
    sizes = sorted({_point(case)[0] for case in found})
    axes.set_xticks(sizes, [f"{size / 1e6:.2g}" for size in sizes])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="million tokens of a step", ylabel="CPU seconds of the driver per step")
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run every case, by turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 512, 2048], help="of a step, multiples of 64")
    parser.add_argument("--mean_tokens", type=int, nargs="+", default=[1024], help="mean response lengths")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64], help="multiples of 8")
    parser.add_argument("--steps", type=int, default=3, help="after the first (%(default)s)")
    parser.add_argument("--plot", type=Path, help="file for the picture")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        drive(args.drive)
        return
    found = []
    for mean_tokens in args.mean_tokens:
        for samples in args.samples:
            for ranks in args.ranks:
                for variant in args.variants:
                    case = {"variant": variant, "samples": samples, "mean_tokens": mean_tokens, "ranks": ranks}
                    found.append(run(case, args.steps))
                    print(f"{case}: {found[-1]['cpu']:.2f} s", file=sys.stderr, flush=True)
    print(table(found))
    for variant in args.variants:
        print(f"slope, {variant}: {slope([case for case in found if case['variant'] == variant]):.2f}")
    for mean_tokens in args.mean_tokens:
        print(
            f"a step of the recipe with responses of {mean_tokens} tokens: {planned_seconds(mean_tokens):.0f} s planned"
        )
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
