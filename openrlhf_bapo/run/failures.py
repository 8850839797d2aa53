"""Describes why a run ended, in one line that its user can act on, and what is saved, in another.

Ray carries a failure as an exception from the process that raised it to this one.
"""

import errno
import re
import shutil
import signal
from argparse import Namespace
from pathlib import Path

from openrlhf_bapo.flags.input_files import nearest_folder
from openrlhf_bapo.openrlhf.interrupts import Interrupted
from openrlhf_bapo.openrlhf.replay_checkpoint import newest_whole_checkpoint
from openrlhf_bapo.openrlhf.run_counts import NothingTrained
from openrlhf_bapo.run.summary import describe_training

PROCESSES = {
    "RolloutRayActor": "a rollout engine",
    "PolicyModelActor": "an actor's process, which trains",
    "ReferenceModelActor": "a reference model's process",
    "CriticModelActor": "a critic's process",
    "RewardModelActor": "a reward model's process",
    "PPOTrainer": "the trainer",
    "TrainingActor": "the trainer",
    "GenerateSamplesActor": "the process that asks for rollouts",
}
"""OpenRLHF's Ray actors, by class name."""

_LITTLE_SPACE = 64 << 20  # bytes; a full disk often has a little space left


def describe_failure(error: BaseException, args: dict, signals: list[int]) -> list[str]:
    """Return two lines: the cause, and what is saved and how to continue.

    `args` are flat, names with dots; `signals` are the numbers of those that were caught before.
    """
    folders = (args[name] for name in ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir"))
    full = [name for folder in folders if folder and (name := _full_disk(folder, args))]
    error, names = _innermost(error), [signal.Signals(number).name for number in signals]
    cause = _in_words(error)
    if isinstance(error, NothingTrained):
        cause = f"nothing was trained: {describe_training(args)}"
    return [f"the run has ended: {'; '.join([', '.join([*names, cause]), *dict.fromkeys(full)])}", _what_is_saved(args)]


def _innermost(error: BaseException) -> BaseException:
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def _in_words(error: BaseException) -> str:
    from ray.exceptions import ActorUnavailableError, RayActorError

    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{_process(text)} did not start: {lines[-1]}"  # Ray appends the traceback to the text
    if isinstance(error, ActorUnavailableError):
        # Ray names neither the actor nor its node here, only what its connection said.
        said = re.sub(r".*unavailable: (.*?)\. The task .*", r"\1", " ".join(lines))
        return f"a Ray actor cannot be reached ({said}): it died, or its node died or was cut off"
    if isinstance(error, RayActorError) or type(error).__name__ == "EngineDeadError":  # vLLM's
        process = _process(text) if isinstance(error, RayActorError) else "a rollout engine (vLLM's EngineCore)"
        return f"{process} died; killed from outside, by a lack of memory (see dmesg), or crashed"
    if isinstance(error, KeyboardInterrupt):
        return "at once"
    if isinstance(error, Interrupted):
        return text
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"a disk is full: {text}"
    if type(error) is RuntimeError and text.startswith("--"):
        return lines[0]  # our own error, which names the flag
    return f"{type(error).__name__}: {lines[0]}"


def _process(text: str) -> str:
    """Name the process in Ray's message about a dead actor; the exception itself has only the actor's id."""
    found = {key: match[1] for key in ("class_name", "pid", "ip") if (match := re.search(rf"\b{key}: (\S+)", text))}
    name = found.get("class_name") or next((name for name in PROCESSES if name in text), "")
    which = [*filter(None, [name]), *(f"{key} {found[key]}" for key in ("pid", "ip") if key in found)]
    return PROCESSES.get(name, "a Ray actor, or its node's raylet,") + (f" ({', '.join(which)})" if which else "")


def _full_disk(folder: str, args: dict) -> str:
    there = nearest_folder(folder)
    if (free := shutil.disk_usage(there).free) >= _LITTLE_SPACE:
        return ""
    needed = _checkpoint_bytes(args) if folder == args["ckpt.path"] else None
    return f"the disk of {there} is full ({free:,} bytes free{f'; a checkpoint takes {needed:,}' if needed else ''})"


def _checkpoint_bytes(args: dict) -> int | None:
    """Return the bytes of the newest complete checkpoint with our state beside it; None if there is no checkpoint."""
    latest = Path(args["ckpt.path"], "_actor", "latest")
    if not latest.is_file():
        return None
    files = Path(args["ckpt.path"]).glob(f"*/{latest.read_text().strip()}/**/*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _what_is_saved(args: dict) -> str:
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(Namespace(**args | {"ckpt.load_enable": True}))
    tag, problem = newest_whole_checkpoint(nested)
    path, again = args["ckpt.path"], "the same command"
    if tag is None and problem:
        reason = f"no checkpoint in {path} that can be resumed, because {problem}"
        return f"saved is {reason}; {again} without --ckpt.load_enable starts from the beginning"
    if tag is None:
        steps = args["ckpt.save_steps"]
        every = f"every {steps} steps" if steps not in (-1, float("inf")) else "never, unless an evaluation is the best"
        return f"nothing is saved; {again} starts from the beginning (--ckpt.save_steps {steps}: {every})"
    saved = f"saved is {path} ({tag}, because {problem})" if problem else f"saved is {path} ({tag})"
    if tag == args.get("ckpt.resume_from"):  # the resume itself may be what failed
        return f"{saved}, from which this run started; {again} starts from there again"
    recipe = "a recipe other than the quickstart continues when it is run again"
    return f"{saved}; {again} with --ckpt.load_enable continues from there; {recipe}"
