"""Helpers for tests of the real pipeline: a tiny model, OpenRLHF's real arguments, real policy actors, real runs.

Nothing here replaces OpenRLHF, DeepSpeed, Ray or vLLM. `train_policy_actors` runs OpenRLHF's PolicyModelActor without
Ray on experience that a test makes, so that the numbers of two runs can be compared.
"""

import atexit
import faulthandler
import functools
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch
from patience import PATIENCE

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parent.parent
TRAIN = ["-m", "openrlhf_bapo.cli.train_ppo_ray"]
CHARACTERS = "0123456789+-= "
EOS, PAD = 1, 0


@functools.cache
def warm_python(python: str | Path = sys.executable, *modules: str, python_path: str | None = None) -> str:
    """Return a replacement for `python` that has imported `modules`: tests/support/warm_start.py.

    Without modules: torch, DeepSpeed and vLLM. `python_path` is PYTHONPATH while they are imported.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-start-"))
    atexit.register(shutil.rmtree, folder)
    command = [python, SUPPORT / "warm_start.py", folder, *modules]
    environment = os.environ | ({} if python_path is None else {"PYTHONPATH": python_path})
    with open(folder / "log", "w") as log:
        template = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    wait_until((folder / "python").exists, template, folder / "log")
    return str(folder / "python")


@functools.cache
def warm_tree() -> Path:
    """Return a folder that looks like the repository to scripts, whose `.venv` starts processes by `warm_python`."""
    folder = Path(tempfile.mkdtemp(prefix="warm-tree-"))
    atexit.register(shutil.rmtree, folder)
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    programs, venv = folder / ".venv/bin", REPOSITORY / ".venv"
    programs.mkdir(parents=True)
    for name, words in (
        ("python", ""),
        ("openrlhf-bapo", "-m openrlhf_bapo.cli.main"),
        ("ray", str(venv / "bin/ray")),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec {warm_python()} {words} "$@"\n')
        (programs / name).chmod(0o755)
    stamp = "openrlhf-bapo.stamp"  # so that scripts/setup.sh finds nothing to do
    (folder / ".venv" / stamp).write_text((venv / stamp).read_text().replace(str(REPOSITORY), str(folder)))
    return folder


def make_model(directory: Path, num_prompts: int = 64) -> Path:
    """Make a random Qwen2 with a character tokenizer in `directory`/model, and train.jsonl and reward.py beside it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,  # a random policy that is far from uniform, so that updates move its ratios
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / "model")
    rng = random.Random(0)
    with open(directory / "train.jsonl", "w") as file:
        for _ in range(num_prompts):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            file.write(json.dumps({"input": f"{a}+{b}=", "label": str(a + b), "datasource": "sums"}) + "\n")
    (directory / "reward.py").write_text(
        "import torch\n\n\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    rewards = torch.tensor([sum(c in '13579' for c in q[len(p):]) / 8 for q, p in zip(queries, prompts)])\n"
        "    return {'rewards': rewards, 'scores': rewards, 'extra_logs': {}}\n"
    )
    return directory


def load_model(directory: Path, weights: dict[str, torch.Tensor] | None = None):
    """Return the model of `make_model` in float32, by transformers alone; with these weights in place of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def make_checkpoint(folder: Path, zero_stage: int = 2, num_ranks: int = 1, prefix: str = "") -> Path:
    """Write the files of DeepSpeed's checkpoint, without weights; `prefix` is that of the optimizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"dp_world_size": num_ranks, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": zero_stage}}}
    for rank in range(num_ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(head, folder / name)
        if zero_stage:
            torch.save({}, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def flags(directory: Path, **overrides) -> list[str]:
    """Return the flags of a short run. Overrides have "__" for "."; None removes a flag, True gives it no value."""
    values = {
        "actor.model_name_or_path": directory / "model",
        "data.prompt_dataset": directory / "train.jsonl",
        "data.label_key": "label",
        "data.max_len": 24,
        "data.max_samples": 32,
        "reward.remote_url": directory / "reward.py",
        "reward.num_gpus_per_node": 1,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0.0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "vllm.num_engines": 1,
        "vllm.sync_backend": "gloo",
        "vllm.enforce_eager": True,
        "ds.attn_implementation": "sdpa",
        "rollout.batch_size": 16,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 16,
        "rollout.max_new_tokens": 8,
        "train.batch_size": 32,
        "train.micro_batch_size": 8,
        "ckpt.output_dir": directory / "out",
        "ckpt.path": directory / "ckpt",
        "logger.tensorboard_dir": directory / "tensorboard",
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    given = ((name, value) for name, value in values.items() if value is not None)
    return [text for name, value in given for text in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


def parse(argv: list[str]) -> Namespace:
    """Parse, check and nest OpenRLHF's flags and ours, as OpenRLHF's main block does."""
    from openrlhf_bapo.flags import arguments

    return arguments.parse(argv)


def refusal(argv: list, capsys, command: Callable[[list[str]], object] = parse) -> str:
    """Assert that a command ends with code 2 and says one line alone, on stderr; return it without our name."""
    import pytest

    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        command([str(argument) for argument in argv])
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert (exit_.value.code, said.out) == (2, "") and line.startswith("openrlhf-bapo: "), said
    return line.removeprefix("openrlhf-bapo: ")


def make_experience(lengths: list[int], seed: int = 0, positive=None) -> list:
    """Make experience of single samples with random tokens, as the experience maker passes it to the actors.

    Args:
        lengths: number of response tokens of each sample; the prompt has 4 tokens.
        seed: seed of tokens and advantages.
        positive: for each sample, whether its advantage is positive; None: random.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, length in enumerate(lengths):
        advantage = torch.randn((), generator=generator)
        if positive is not None:
            advantage = advantage.abs() if positive[i] else -advantage.abs()
        mask = torch.zeros(1, 3 + length, dtype=torch.long)
        mask[:, 3:] = 1
        samples.append(
            Experience(
                sequences=torch.randint(3, 3 + len(CHARACTERS), (1, 4 + length), generator=generator),
                attention_mask=torch.ones(1, 4 + length, dtype=torch.long),
                action_mask=mask,
                advantages=advantage * mask,
                returns=advantage * mask,
                staleness=torch.zeros_like(mask),
                optimizer_steps=torch.zeros_like(mask),
                total_length=torch.tensor([4 + length]),
                response_length=torch.tensor([length]),
                info={"reward": torch.tensor([float(advantage > 0)])},
            )
        )
    return samples


def response(num_tokens: int = 2, reward=0.5, version: int | list[int] = 0, log_prob: float | None = None) -> dict:
    """Make a response as our RolloutRayActor returns it, with a prompt of 2 tokens.

    Args:
        num_tokens: number of response tokens; their ids count up from 6.
        reward: the reward as its source gave it.
        version: the policy version of all tokens, or a list of one per token.
        log_prob: the engine's log-prob of every token; None: the agent returned none.
    """
    versions = version if isinstance(version, list) else [version] * num_tokens
    return {
        "prompt": "1+2=",
        "label": "3",
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": [4, 5, *range(6, 6 + num_tokens)],
        "action_ranges": [(2, 2 + num_tokens)],
        "versions": [versions],
        "rollout_log_probs": None if log_prob is None else [0.0] * 2 + [log_prob] * num_tokens,
        "truncated": False,
        "reward": reward,
        "scores": reward,
        "extra_logs": {},
    }


def samples_generator(args: Namespace):
    """Make our SamplesGenerator for `args`, without data and engines."""
    from openrlhf_bapo.openrlhf.samples_generator import VersionedSamplesGenerator

    return VersionedSamplesGenerator(Namespace(args=args), None, None, tokenizer=None, vllm_engines=None)


def train_policy_actors(
    directory: Path,
    argv: list[str],
    samples_by_rank: list[list],
    trainer: str = "ours",
    num_steps: int = 1,
    save_after: int | None = None,
    precision: str = "fp32",
) -> list:
    """Train OpenRLHF's PolicyModelActor, one process a data-parallel rank, on the samples given.

    As in a run, the samples' log-probs are those that the actor itself computes before it trains, less the "log_ratio"
    that a test may have put into a sample's `info`. The engine's are those less its "log_weight", if it has one.

    Args:
        directory: made by `make_model`.
        argv: flags for our command.
        samples_by_rank: what each rank's replay buffer is filled with.
        trainer: "ours", or "upstream" to leave OpenRLHF's own trainer in place.
        num_steps: training steps, all over the same samples; from the second on they are fresh, without "log_ratio".
        save_after: the training steps after which a checkpoint is written to `--ckpt.path`.
        precision: "fp32", or that of `--ds.param_dtype`, "bf16" or "fp16".

    Returns:
        One dict a rank: `statuses` (what `fit` reports, a training step each) and `status` (the last one), `weights`
        (the model's, by name), `averages` (of `--train.enable_ema`), `bounds` (per update: lower, upper), `searches`
        (per update: every field of ClipBounds, and num_tokens, those with an advantage on this rank), `clamped` (per
        micro-batch: the bounds of the loss), `behavior_log_probs` (per sample), `args` (as training left them),
        `num_hooks` (that watch the policy's and the loss's forward after it), `trainer` (its class's module),
        `peak_memory` (in bytes). Its clock ticks once a reading: what is reported in seconds counts what was timed.
    """
    # Parsed here: it registers our parts, which "upstream" must not have.
    work = parse(argv), samples_by_rank, num_steps, save_after, precision
    return run_in_ranks(directory, _train_policy_actor, len(samples_by_rank), work, trainer)


def run_in_ranks(directory: Path, function, num_ranks: int, argument=None, trainer: str = "ours") -> list:
    """Call `function(rank, num_ranks, port, argument)` in one process per rank; returns a list of the results.

    The processes have imported OpenRLHF. `function` must be at the top level of a module. `port` is for
    torch.distributed.
    """
    port = free_port()
    job = directory / f"job-{port}.pt"
    module = Path(sys.modules[function.__module__].__file__)  # this one may run as __main__
    torch.save((module, function.__name__, argument), job)
    ranks = range(num_ranks)
    server = _actor_server(trainer)
    print(json.dumps([str(job), len(ranks), port]), file=server.stdin, flush=True)
    codes = json.loads(server.stdout.readline())
    assert not any(codes), "\n".join(Path(f"{job}.{rank}.log").read_text()[-3000:] for rank in ranks)
    return [torch.load(f"{job}.{rank}", weights_only=False) for rank in ranks]


@functools.cache
def _actor_server(trainer: str) -> subprocess.Popen:
    """Start a process that imports OpenRLHF once, which takes seconds, and forks one for every rank of every job."""
    command = [warm_python(), __file__, trainer]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve_actors(trainer: str) -> None:
    import openrlhf_bapo.openrlhf  # noqa: F401  (OpenRLHF on CPU)
    from openrlhf_bapo import register

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of the frameworks is not taken for an answer
    if trainer == "ours":
        register()
    import openrlhf.trainer.ray.ppo_actor  # noqa: F401

    for line in sys.stdin:
        job, world_size, port = json.loads(line)
        ranks = [_fork_actor(job, rank, world_size, port) for rank in range(world_size)]
        print(json.dumps([os.waitpid(rank, 0)[1] for rank in ranks]), file=answers, flush=True)


def _fork_actor(job: str, rank: int, world_size: int, port: int) -> int:
    if process := os.fork():
        return process
    code = 1
    try:
        log = os.open(f"{job}.{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # A rank that hangs ends before its test does, so that later tests find the server free.
        faulthandler.dump_traceback_later(PATIENCE // 2, exit=True)
        module, function, argument = torch.load(job, weights_only=False)
        sys.path.append(str(module.parent))
        result = getattr(importlib.import_module(module.stem), function)(rank, world_size, port, argument)
        torch.save(result, f"{job}.{rank}")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH with these folders before the present ones, by which another copy of the tree may be tested."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """Return a free TCP port outside of the range from which Linux chooses ports for connections."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


def _train_policy_actor(rank: int, num_ranks: int, port: int, argument) -> dict:
    args, samples_by_rank, num_steps, save_after, precision = argument
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils import get_strategy, utils

    if precision == "fp32":  # which OpenRLHF does not offer
        utils.convert_to_torch_dtype = lambda _: torch.float32
    if our_loss := sys.modules.get("openrlhf_bapo.rules.rule_loss"):
        our_loss.time = Namespace(perf_counter=itertools.count(0.0).__next__)
    if precision == "fp16":  # DeepSpeed refuses it on CPUs on which it is slow
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    args.ds.param_dtype = precision
    actor = PolicyModelActor.__ray_metadata__.modified_class(num_ranks, rank, "127.0.0.1", port)
    actor.init_model_from_pretrained(get_strategy(args), str(args.actor.model_name_or_path), max_steps=1000)
    searches, clamped, loss = [], [], actor.trainer.actor_loss_fn
    if hasattr(loss, "rule"):
        update = loss.rule._update

        def recorded(tally):
            closed = update(tally)
            values = {field.name: float(getattr(closed.used, field.name)) for field in fields(closed.used)}
            searches.append(values | {"num_tokens": int(tally.sums[2].sum())})
            return closed

        if loss.rule.needs_tally_first:
            loss.rule._update = recorded
        loss.register_forward_hook(lambda *_: clamped.append((1 - loss.clip_eps_low, 1 + loss.clip_eps_high)))
    statuses, behavior_log_probs = [], []
    for _ in range(num_steps):
        for sample in samples_by_rank[rank]:
            log_probs = actor.forward(sample.sequences, sample.action_mask, sample.attention_mask)
            # "log_ratio" is how far the policy has moved since a sample was made; 0 where a test says nothing.
            log_ratio = sample.info.pop("log_ratio", torch.zeros(1))
            sample.action_log_probs = log_probs - log_ratio * sample.action_mask
            # "log_weight" is how far it had moved from the engine's policy until then.
            if (log_weight := sample.info.pop("log_weight", None)) is not None:
                sample.rollout_log_probs = sample.action_log_probs - log_weight * sample.action_mask
            sample.start_log_probs = None if args.replay.ratio else log_probs
            behavior_log_probs.append(sample.action_log_probs.clone())
            actor.append(sample)
        statuses.append(actor.fit(0.0))
        if len(statuses) == save_after:
            actor.save_checkpoint(f"global_step{save_after}", {"global_step": save_after})
    return {
        "statuses": statuses,
        "status": statuses[-1],
        "weights": {name: p.detach().clone() for name, p in actor.actor.model.module.named_parameters()},
        "averages": getattr(actor.ema_model, "averages", None),
        "bounds": [(found["lower"], found["upper"]) for found in searches],
        "searches": searches,
        "clamped": [tuple(torch.as_tensor(bound).tolist() for bound in bounds) for bounds in clamped],
        "behavior_log_probs": behavior_log_probs,
        "num_hooks": len(actor.actor._forward_hooks) + len(loss._forward_hooks),
        "args": args,
        "trainer": type(actor.trainer).__module__,
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


@contextmanager
def running(command: list[str], log: Path, **environment):
    """Run a command in the background in its own process group, which is ended when the context is left.

    An error in the context shows the last lines of the log too.
    """
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
            process_group=0,
        )
        try:
            yield process
        except BaseException as error:
            error.add_note(f"{command} wrote to {log}:\n{log.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(PATIENCE / 10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def wait_until(happened: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    """Wait until `happened()`. Fail with the end of the log if the process ends before."""
    while not happened():
        assert process.poll() is None, f"{process.args}:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)


def run_script(script: str, *flags: str, tree: Path = REPOSITORY, **environment) -> subprocess.CompletedProcess:
    """Run one of scripts/ to its end, with additional environment variables."""
    process = subprocess.Popen(
        ["bash", f"scripts/{script}", *flags],
        cwd=tree,
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # of this session, which the processes of a warm tree must share
    )
    try:
        stdout, stderr = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_laptop(framework: str, python: str, directory: Path, *arguments: str) -> Path:
    """Run examples/FRAMEWORK/laptop.sh with another `python`; return the folder of the run, with its picture."""
    programs = directory / "venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(python)
    command = ["bash", str(REPOSITORY / "examples" / framework / "laptop.sh"), *arguments]
    shown = directory / "shown"
    with running(command, shown, RUNS=str(directory), VENV=str(directory / "venv")) as process:
        code = process.wait()
    lines = shown.read_text().splitlines()
    assert code == 0, "\n".join(lines[-100:])
    picture = Path(lines[-1])
    assert picture.name == "curves.png" and picture.stat().st_size > 10_000
    assert re.fullmatch(r"step \d+: mean reward [01]\.\d+", lines[-2]), lines
    return picture.parent


def framework_programs(framework: str) -> Path:
    """Set up the environment of "verl" or "molt"; return the folder that has its `python`."""
    subprocess.run(["bash", str(REPOSITORY / "scripts/setup_framework.sh"), framework], check=True)
    return REPOSITORY / f".venv-{framework}" / "bin"


def assert_cases_pass(framework: str, programs: Path, log: Path, path: str) -> None:
    """Run tests/support/FRAMEWORK_cases.py in the framework's environment; no case may fail or be skipped."""
    command = [programs / "python", SUPPORT / f"{framework}_cases.py"]
    with running(command, log, PYTHONPATH=path) as process:
        code = process.wait()
    output = log.read_text()
    assert code == 0 and "skipped" not in output.splitlines()[-1], output[-20_000:]


def train(directory: Path, argv: list[str], name: str, command=TRAIN, **env) -> str:
    """Run a training command to its end, and return its output."""
    log = directory / f"{name}.log"
    with running([warm_python(), *command, *argv], log, **env) as process:
        code = process.wait()
    output = log.read_text()
    assert code == 0, f"{name} ended with {code}:\n{output[-5000:]}"
    return output


def steps(output: str) -> list[dict[str, float]]:
    """Return the metrics of every global step in a run's output."""
    from openrlhf_bapo.cli.progress import Pieces

    output = "".join(map(Pieces().join, output.splitlines(keepends=True)))
    found = re.findall(r"Global step \d+: \{(.*)\}", output)
    return [{key: float(value) for key, value in re.findall(r"'([^']+)': (-?[\d.e+-]+|nan)", line)} for line in found]


def assert_rewards_rise(steps: list[dict[str, float]]) -> None:
    """Assert that the mean reward rises from the first two steps to the last two by more than four standard errors."""
    first, last = steps[:2], steps[-2:]
    means = [sum(step["rollout/reward_mean"] for step in part) / 2 for part in (first, last)]
    variance = sum(step["rollout/reward_std"] ** 2 / step["rollout/num_samples"] / 4 for step in first + last)
    assert means[1] - means[0] > 4 * variance**0.5, means


if __name__ == "__main__":
    _serve_actors(sys.argv[1])
