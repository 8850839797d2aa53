"""Our state beside OpenRLHF's checkpoints: for every CKPT_PATH/_actor/TAG the replay pool in CKPT_PATH/_replay/TAG,
under a token budget the unfinished responses in CKPT_PATH/_partial/TAG, and with `--bapo.smoothing` the bounds in
CKPT_PATH/_steady/TAG."""

import argparse
import hashlib
import json
import shutil
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch

from openrlhf_bapo.adapter.flags import clip_config_from_args, partial_config_from_args, replay_config_from_args
from openrlhf_bapo.core.partial_rollouts import DISCARD_FLAG, PartialPool
from openrlhf_bapo.core.replay_pool import ReplayPool, ReplayPoolError, read_directory, write_directory

KINDS = ("_replay", "_partial", "_steady")
STEADY_FORMAT_VERSION = 1


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
            saved = json.loads(record.read_text())
            if num_groups := len(saved["groups"]):
                lag = saved["fingerprint"].get("--offpolicy.lag")
                flag = f"--offpolicy.lag {lag}" if lag else "--partial.token_budget"
                raise ReplayPoolError(
                    f"{record} holds {num_groups} prompts with responses that were not trained on; give {flag}, or "
                    f"pass {DISCARD_FLAG} to train without them"
                )
        return None
    if directory is None:
        return None
    pool, state = PartialPool.load(directory, partial_config_from_args(args.partial), _partial_fingerprint(args))
    pool.shift_versions(state["version_offset"] - (state["policy_version"] - 1))
    return pool, state


def _partial_fingerprint(args: Namespace) -> dict[str, str]:
    shared = fingerprint(args) | {"--rollout.n_samples_per_prompt": str(args.rollout.n_samples_per_prompt)}
    return shared | {"--offpolicy.lag": str(args.offpolicy.lag)} if args.offpolicy.lag else shared


def check_saved_pools(args: argparse.Namespace) -> None:
    """Try the loads that the trainer will do, before Ray starts.

    Args:
        args: flat, names with dots.

    Raises:
        ReplayPoolError: as `load_saved_pool`, `load_unfinished` and `load_steady_bounds`.
    """
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(args)
    load_saved_pool(nested)
    load_unfinished(nested)
    load_steady_bounds(nested)


def save_pools(trainer, tag: str) -> None:
    """Write the pools for the checkpoint TAG that OpenRLHF is about to write.

    Before it, as `save_steady_bounds`: a run that is killed in between leaves a pool too many, and never a checkpoint
    without its own.
    """
    maker, args = trainer.experience_maker, trainer.args
    if args.ckpt.disable_ds:
        return  # no checkpoint to resume
    state = {"policy_version": maker.policy_version, "steps_by_version": maker.steps_by_version}
    if maker.pool is not None:
        maker.pool.save(Path(args.ckpt.path, "_replay", tag), state, _replay_fingerprint(args))
    if maker.unfinished is not None:
        state["version_offset"] = maker.version_offset
        maker.unfinished.save(Path(args.ckpt.path, "_partial", tag), state, _partial_fingerprint(args))


def save_steady_bounds(args: Namespace, tag: str, state: dict[str, torch.Tensor]) -> None:
    """Write `SteadyBounds.state_dict()` for the checkpoint TAG that OpenRLHF is about to write."""
    record = {"format_version": STEADY_FORMAT_VERSION, "fingerprint": _steady_fingerprint(args)}
    columns = {name: value.cpu().contiguous() for name, value in state.items()}
    write_directory(Path(args.ckpt.path, "_steady", tag), columns, record)


def load_steady_bounds(args: Namespace) -> dict[str, torch.Tensor] | None:
    """The state for the checkpoint that `--ckpt.load_enable` resumes; None where none is wanted.

    Raises:
        ReplayPoolError: if it cannot be used; one line that says what to do.
    """
    bapo = vars(args.bapo)
    if not (bapo.get("smoothing") and args.ckpt.load_enable) or bapo.get("discard_saved"):
        return None
    if (directory := pool_directory(args.ckpt.path, "_steady")) is None:
        return None
    return read_directory(directory, STEADY_FORMAT_VERSION, _steady_fingerprint(args), "--bapo.discard_saved")[0]


def _steady_fingerprint(args: Namespace) -> dict[str, str]:
    settings = asdict(clip_config_from_args(args.bapo)) | {"smoothing_of": args.bapo.smoothing_of}
    return {f"--bapo.{name}": str(value) for name, value in settings.items()}


def remove_pruned(args: Namespace) -> None:
    """Remove our state of checkpoints that OpenRLHF has pruned."""
    for kind in KINDS:
        for saved in Path(args.ckpt.path, kind).glob("*"):
            # X.old is what an interrupted save of X left (`write_directory`).
            if not Path(args.ckpt.path, "_actor", saved.name.removesuffix(".old")).exists():
                shutil.rmtree(saved)


def load_pools(trainer) -> None:
    """Give the trainer of a resumed run its pools and policy version back."""
    maker = trainer.experience_maker
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
