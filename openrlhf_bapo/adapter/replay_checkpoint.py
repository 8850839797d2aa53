"""The replay pool beside OpenRLHF's checkpoints: CKPT_PATH/_replay/TAG for every CKPT_PATH/_actor/TAG."""

import argparse
import hashlib
import shutil
from argparse import Namespace
from pathlib import Path

from openrlhf_bapo.adapter.flags import replay_config_from_args
from openrlhf_bapo.core.replay_pool import ReplayPool


def pool_directory(ckpt_path: str) -> Path | None:
    """Where the pool of OpenRLHF's latest checkpoint lies; None if there is no checkpoint."""
    latest = Path(ckpt_path, "_actor", "latest")
    return Path(ckpt_path, "_replay", latest.read_text().strip()) if latest.exists() else None


def fingerprint(args: Namespace) -> dict[str, str]:
    """What a saved pool must share with a run to be used in it: by content where the model is a local folder."""
    model = args.actor.model_name_or_path

    def digest(name: str) -> str:
        file = Path(model, name)
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else model

    return {"model": digest("config.json"), "tokenizer": digest("tokenizer.json")}


def load_saved_pool(args: Namespace) -> tuple[ReplayPool, dict] | None:
    """The pool of the checkpoint that `--ckpt.load_enable` resumes, and what `save_pool` wrote beside it: its
    "policy_version" and its "steps_by_version"; None where there is none.

    Raises:
        ReplayPoolError: if it cannot be used; one line that says what to do.
    """
    if not (args.replay.ratio and args.ckpt.load_enable) or args.replay.discard_saved:
        return None
    directory = pool_directory(args.ckpt.path)
    if directory is None:
        return None
    return ReplayPool.load(directory, replay_config_from_args(args.replay), fingerprint(args))


def check_saved_pool(args: argparse.Namespace) -> None:
    """Try the load that the trainer will do, before Ray starts.

    Args:
        args: flat, names with dots.

    Raises:
        ReplayPoolError: as `load_saved_pool`.
    """
    from openrlhf.utils.config import hierarchize

    load_saved_pool(hierarchize(args))


def save_pool(trainer) -> None:
    """Beside every checkpoint that OpenRLHF has just written, known by a newer file `latest`."""
    maker, path = trainer.experience_maker, trainer.args.ckpt.path
    written = last_checkpoint(path)
    if maker.pool is None or written == maker.last_checkpoint:
        return
    maker.last_checkpoint = written
    directory = pool_directory(path)
    state = {"policy_version": maker.policy_version, "steps_by_version": maker.steps_by_version}
    maker.pool.save(directory, state, fingerprint(trainer.args))
    for saved in directory.parent.iterdir():
        if not Path(path, "_actor", saved.name).exists():
            shutil.rmtree(saved)  # OpenRLHF has pruned its checkpoint


def last_checkpoint(ckpt_path: str) -> int | None:
    """When OpenRLHF wrote its latest checkpoint (nanoseconds of the file system's clock); None: never."""
    latest = Path(ckpt_path, "_actor", "latest")
    return latest.stat().st_mtime_ns if latest.exists() else None


def load_pool(trainer) -> None:
    """Give the trainer of a resumed run its pool and policy version back."""
    maker = trainer.experience_maker
    maker.last_checkpoint = last_checkpoint(trainer.args.ckpt.path)
    if (loaded := load_saved_pool(trainer.args)) is not None:
        maker.pool, state = loaded
        # OpenRLHF publishes the resumed weights once more: that is the saved version again, and the engines' first.
        maker.policy_version = maker.version_offset = state["policy_version"] - 1
        *maker.steps_by_version, maker.num_optimizer_steps = state["steps_by_version"]
