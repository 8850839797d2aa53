"""Our pools beside OpenRLHF's checkpoints: for every CKPT_PATH/_actor/TAG the replay pool in CKPT_PATH/_replay/TAG, and
under a token budget the unfinished responses in CKPT_PATH/_partial/TAG."""

import argparse
import hashlib
import json
import shutil
from argparse import Namespace
from pathlib import Path

from openrlhf_bapo.adapter.flags import partial_config_from_args, replay_config_from_args
from openrlhf_bapo.core.partial_rollouts import DISCARD_FLAG, PartialPool
from openrlhf_bapo.core.replay_pool import ReplayPool, ReplayPoolError


def pool_directory(ckpt_path: str, kind: str = "_replay") -> Path | None:
    """Where the pool of OpenRLHF's latest checkpoint lies; None if there is no checkpoint."""
    latest = Path(ckpt_path, "_actor", "latest")
    return Path(ckpt_path, kind, latest.read_text().strip()) if latest.exists() else None


def fingerprint(args: Namespace) -> dict[str, str]:
    """What a saved pool must share with a run to be used in it: by content where the model is a local folder."""
    model = args.actor.model_name_or_path

    def digest(name: str) -> str:
        file = Path(model, name)
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else model

    return {"model": digest("config.json"), "tokenizer": digest("tokenizer.json")}


def _replay_fingerprint(args: Namespace) -> dict[str, str]:
    """A replayed sample keeps its advantages, and reference log-probs only where the run that made it had a KL loss."""
    has_kl_loss = args.algo.kl.use_loss and args.algo.kl.init_coef > 0
    settings = {"--algo.advantage.estimator": args.algo.advantage.estimator, "--algo.kl.use_loss": str(has_kl_loss)}
    return fingerprint(args) | settings


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
    return ReplayPool.load(directory, replay_config_from_args(args.replay), _replay_fingerprint(args))


def load_unfinished(args: Namespace) -> tuple[PartialPool, dict] | None:
    """As `load_saved_pool`, of the unfinished responses; their versions are counted as the resumed run's engines count.

    Raises:
        ReplayPoolError: if they cannot be used, or if they would be lost because the run has no token budget.
    """
    if not args.ckpt.load_enable or args.partial.discard_saved:
        return None
    directory = pool_directory(args.ckpt.path, "_partial")
    if not args.partial.token_budget:
        if directory is not None and (record := directory / "pool.json").exists():
            if num_groups := len(json.loads(record.read_text())["groups"]):
                raise ReplayPoolError(
                    f"{record} holds {num_groups} prompts with unfinished responses; give --partial.token_budget, or "
                    f"pass {DISCARD_FLAG} to train without them"
                )
        return None
    if directory is None:
        return None
    pool, state = PartialPool.load(directory, partial_config_from_args(args.partial), _partial_fingerprint(args))
    pool.shift_versions(state["version_offset"] - (state["policy_version"] - 1))
    return pool, state


def _partial_fingerprint(args: Namespace) -> dict[str, str]:
    return fingerprint(args) | {"--rollout.n_samples_per_prompt": str(args.rollout.n_samples_per_prompt)}


def check_saved_pools(args: argparse.Namespace) -> None:
    """Try the loads that the trainer will do, before Ray starts.

    Args:
        args: flat, names with dots.

    Raises:
        ReplayPoolError: as `load_saved_pool` and `load_unfinished`.
    """
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(args)
    load_saved_pool(nested)
    load_unfinished(nested)


def save_pools(trainer) -> None:
    """Beside every checkpoint that OpenRLHF has just written, known by a newer file `latest`."""
    maker, args = trainer.experience_maker, trainer.args
    path = args.ckpt.path
    written = last_checkpoint(path)
    if written == maker.last_checkpoint:
        return
    maker.last_checkpoint = written
    state = {"policy_version": maker.policy_version, "steps_by_version": maker.steps_by_version}
    if maker.pool is not None:
        _save(maker.pool, path, "_replay", state, _replay_fingerprint(args))
    if maker.unfinished is not None:
        state["version_offset"] = maker.version_offset
        _save(maker.unfinished, path, "_partial", state, _partial_fingerprint(args))


def _save(pool: ReplayPool | PartialPool, path: str, kind: str, state: dict, shared: dict[str, str]) -> None:
    directory = pool_directory(path, kind)
    pool.save(directory, state, shared)
    for saved in directory.parent.iterdir():
        if not Path(path, "_actor", saved.name).exists():
            shutil.rmtree(saved)  # OpenRLHF has pruned its checkpoint


def last_checkpoint(ckpt_path: str) -> int | None:
    """When OpenRLHF wrote its latest checkpoint (nanoseconds of the file system's clock); None: never."""
    latest = Path(ckpt_path, "_actor", "latest")
    return latest.stat().st_mtime_ns if latest.exists() else None


def load_pools(trainer) -> None:
    """Give the trainer of a resumed run its pools and policy version back."""
    maker = trainer.experience_maker
    maker.last_checkpoint = last_checkpoint(trainer.args.ckpt.path)
    state = None
    if (loaded := load_saved_pool(trainer.args)) is not None:
        maker.pool, state = loaded
    if (loaded := load_unfinished(trainer.args)) is not None:
        unfinished, state = loaded
        if hasattr(trainer, "samples_generator"):  # elsewhere in async training: `load_into_generator`
            trainer.samples_generator.pool = unfinished
    if state is not None:
        # OpenRLHF publishes the resumed weights once more: that is the saved version again, and the engines' first.
        maker.policy_version = maker.version_offset = state["policy_version"] - 1
        *maker.steps_by_version, maker.num_optimizer_steps = state["steps_by_version"]


def load_into_generator(actor) -> None:
    """Give async training's `GenerateSamplesActor` of a resumed run its unfinished responses back."""
    if (loaded := load_unfinished(actor.args)) is not None:
        actor.samples_generator.pool, _ = loaded
