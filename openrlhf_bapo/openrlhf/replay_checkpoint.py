"""Our state beside OpenRLHF's checkpoints.

A checkpoint CKPT_PATH/_actor/TAG comes with

    CKPT_PATH/_replay/TAG     the replay pool, with `--replay.ratio`
    CKPT_PATH/_partial/TAG    unfinished responses, with `--partial.token_budget` or `--offpolicy.lag`
    CKPT_PATH/_buffer/TAG     waiting samples, with `--rollout.vllm_generate_batch_size`
    CKPT_PATH/_rule/TAG       the clip rule's average over updates, with `--bapo.smoothing`, `--m2.half_life` or
                              `--balanced.half_life`

in the format of offpolicy/saved_pool.py.

The functions `load_*` take checkpoint `tag` or the latest, and return its state, and with a pool the state that
`save_pools` wrote: "policy_version", "version_offset" and "steps_by_version". They return None if the run resumes no
checkpoint or has no use for the state, and raise SavedStateError if it cannot be used, or would be lost.
"""

import argparse
import hashlib
import json
import re
import shutil
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from openrlhf_bapo.offpolicy.partial_rollouts import DISCARD_FLAG, PartialPool
from openrlhf_bapo.offpolicy.replay_pool import ReplayPool
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError, has_saved_state, read_directory, write_directory
from openrlhf_bapo.openrlhf.sample_buffer import SampleBuffer
from openrlhf_bapo.openrlhf.settings import partial_config_from_args, replay_config_from_args
from openrlhf_bapo.rules.clip_config import SEARCH_FIELDS
from openrlhf_bapo.rules.other_rules import default_settings
from openrlhf_bapo.rules.own_rules import is_own_rule
from openrlhf_bapo.rules.settings import clip_rule_from_args

KINDS = ("_replay", "_partial", "_buffer", "_rule")
RULE_FORMAT_VERSION = 1


def fingerprint(args: Namespace) -> dict[str, str]:
    """Return the properties that a saved pool and a run must share: model and tokenizer, by content if local."""
    model = args.actor.model_name_or_path

    def digest(name: str) -> str:
        file = Path(model, name)
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else model

    return {"model": digest("config.json"), "tokenizer": digest("tokenizer.json")}


def _replay_fingerprint(args: Namespace) -> dict[str, str]:
    # Replayed samples keep their advantages. They have reference log-probs only if their run had a KL loss.
    has_kl_loss = args.algo.kl.use_loss and args.algo.kl.init_coef > 0
    settings = {"--algo.advantage.estimator": args.algo.advantage.estimator, "--algo.kl.use_loss": str(has_kl_loss)}
    return fingerprint(args) | settings


def _resumed(args: Namespace, kind: str, tag: str | None, is_discarded: bool) -> Path | None:
    """Return the directory of our state that a run goes on from; None if it resumes no checkpoint, or discards it."""
    tag = tag or _latest(Path(args.ckpt.path, "_actor"))
    return Path(args.ckpt.path, kind, tag) if tag and args.ckpt.load_enable and not is_discarded else None


def load_saved_pool(args: Namespace, tag: str | None = None) -> tuple[ReplayPool, dict] | None:
    """Load the replay pool."""
    directory = _resumed(args, "_replay", tag, args.replay.discard_saved)
    if directory is None or not args.replay.ratio:
        return None
    return ReplayPool.load(directory, replay_config_from_args(args.replay), _replay_fingerprint(args))


def load_unfinished(args: Namespace, tag: str | None = None) -> tuple[PartialPool, dict] | None:
    """Load the unfinished responses, with versions shifted to the resumed engines' count."""
    directory = _resumed(args, "_partial", tag, args.partial.discard_saved)
    if directory is None:
        return None
    if not args.partial.token_budget:
        if (record := directory / "pool.json").exists():
            saved = json.loads(record.read_text())
            if num_groups := len(saved["groups"]):
                lag = saved["fingerprint"].get("--offpolicy.lag")
                flag = f"--offpolicy.lag {lag}" if lag else "--partial.token_budget"
                raise SavedStateError(
                    f"{record} holds {num_groups} prompts with responses that were not trained on; give {flag}, or "
                    f"pass {DISCARD_FLAG} to train without them"
                )
        return None
    pool, state = PartialPool.load(directory, partial_config_from_args(args.partial), _partial_fingerprint(args))
    pool.shift_versions(_version_shift(state))
    return pool, state


def _version_shift(state: dict) -> int:
    """Return the number to add to versions of the saved run's engines to get versions of the resumed run's engines."""
    return state["version_offset"] - (state["policy_version"] - 1)


def load_sample_buffer(args: Namespace, tag: str | None = None) -> tuple[SampleBuffer, dict] | None:
    """Load the waiting samples, with versions shifted to the resumed engines' count."""
    directory = _resumed(args, "_buffer", tag, args.partial.discard_saved)
    if directory is None or not has_saved_state(directory):
        return None
    buffer, state = SampleBuffer.load(directory, _groups_fingerprint(args))
    if args.partial.token_budget:
        flag = "--offpolicy.lag" if args.offpolicy.lag else "--partial.token_budget"
        raise SavedStateError(
            f"{directory} holds {len(buffer.tensors)} samples that were not trained on; resume without {flag}, or pass "
            f"{DISCARD_FLAG} to train without them"
        )
    buffer.shift_versions(_version_shift(state))
    return buffer, state


def _groups_fingerprint(args: Namespace) -> dict[str, str]:
    return fingerprint(args) | {"--rollout.n_samples_per_prompt": str(args.rollout.n_samples_per_prompt)}


def _partial_fingerprint(args: Namespace) -> dict[str, str]:
    shared = _groups_fingerprint(args)
    return shared | {"--offpolicy.lag": str(args.offpolicy.lag)} if args.offpolicy.lag else shared


def find_whole_checkpoint(args: argparse.Namespace) -> str:
    """Find the checkpoint that `--ckpt.load_enable` resumes, before Ray starts.

    Its tag is stored in "ckpt.resume_from" of the flat `args`, for `use_checkpoint`.

    Returns:
        A line that says why OpenRLHF's latest checkpoint is not resumed. "" if it is resumed, or nothing is.

    Raises:
        SavedStateError: if no checkpoint can be resumed; the message is about the newest.
    """
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(args)
    vars(args)["ckpt.resume_from"] = None
    if not nested.ckpt.load_enable:
        return ""
    tag, problem = newest_whole_checkpoint(nested)
    vars(args)["ckpt.resume_from"] = tag
    if problem and not tag:
        raise SavedStateError(
            f"--ckpt.load_enable: no checkpoint of --ckpt.path {nested.ckpt.path} can be resumed, because {problem}; "
            "without the flag the run starts from the beginning"
        )
    return f"--ckpt.load_enable resumes {tag}, because {problem}" if problem else ""


def newest_whole_checkpoint(args: Namespace) -> tuple[str | None, str]:
    """Find the newest checkpoint that can be resumed: all its files are there and whole, and our state can be loaded.

    Returns:
        Its tag, None without one; and why OpenRLHF's latest checkpoint is not the one, "" if it is.
    """
    groups = ["_actor", "_critic"] if args.algo.advantage.estimator == "gae" else ["_actor"]
    folders = [Path(args.ckpt.path, group) for group in groups]
    latest = [tag for folder in folders if (tag := _existing_latest(folder))]
    # Actor and critic are written at the same time. If the run was killed then, one may be a checkpoint ahead.
    newest = min(latest, key=_step, default="")
    tags = [folder.name for folder in folders[0].glob("*") if folder.is_dir()]
    problem = ""
    for tag in sorted(tags, key=lambda tag: (_step(tag), tag == newest), reverse=True):
        if newest and _step(tag) > _step(newest):
            continue  # the run was killed while it wrote this checkpoint
        try:
            for folder in folders:
                _check_head(folder / tag, _check_files(folder / tag), args)
            for load in (load_saved_pool, load_sample_buffer, load_unfinished, load_clip_rule):
                load(args, tag)
        except SavedStateError as error:
            problem = problem or str(error)
        else:
            return tag, problem or _problem_of_latest(folders)
    return None, problem


def _problem_of_latest(folders: list[Path]) -> str:
    for folder in folders:
        if not _existing_latest(folder):
            tag = _latest(folder)
            return f"{folder / 'latest'} " + ("is missing" if tag is None else f"names {tag!r}, which does not exist")
    return ""


def adapter_settings(args: Namespace) -> dict[str, str]:
    """Return the flags that must not change when a LoRA adapter is resumed; DeepSpeed saves its weights alone."""
    lora = args.ds.lora
    if not lora.rank:
        return {"--ds.lora.rank": "0"}
    targets = lora.target_modules if isinstance(lora.target_modules, str) else " ".join(sorted(lora.target_modules))
    return {
        "--ds.lora.rank": str(lora.rank),
        "--ds.lora.alpha": str(lora.alpha),
        "--ds.lora.target_modules": targets,
    }


def _check_head(folder: Path, head: dict, args: Namespace) -> None:
    if args.train.enable_ema and folder.parent.name == "_actor" and "averages" not in head:
        raise SavedStateError(f"{folder} has no averaged weights, and this run has --train.enable_ema")
    now = adapter_settings(args)
    for flag, value in head.get("lora", now).items():
        if value != now.get(flag, value):
            raise SavedStateError(f"{folder} was trained with {flag} {value}, and this run has {now[flag]}")
    if args.ds.use_universal_ckpt:
        return
    stage = head["ds_config"]["zero_optimization"]["stage"]
    if {stage, args.ds.zero_stage} not in ({stage}, {1, 2}):  # stages 1 and 2 write the same files
        raise SavedStateError(f"{folder} has --ds.zero_stage {stage}, and this run has {args.ds.zero_stage}")
    model = folder.parent.name.removeprefix("_")
    grid = getattr(args, model)
    num_ranks = grid.num_nodes * grid.num_gpus_per_node
    # Each rank has its part of the optimizer's state. What DeepSpeed counts with tensor parallelism was not tried.
    if stage and args.ds.tensor_parallel_size == 1 and head["dp_world_size"] != num_ranks:
        gpus = f"--{model}.num_nodes x --{model}.num_gpus_per_node"
        raise SavedStateError(f"{folder} is of {head['dp_world_size']} ranks ({gpus}), and this run has {num_ranks}")


def _check_files(folder: Path) -> dict:
    """Refuse a checkpoint of DeepSpeed that lacks a rank's file, or has one that is cut off.

    Rank 0 writes `latest` even if another rank's node has lost the folder or the power. torch.save writes zip archives,
    whose directory is at their end. So little of each file is read.

    Returns:
        What a file of the model holds besides weights: the states that the run saved, and DeepSpeed's.

    Raises:
        SavedStateError
    """
    a_model = next(folder.glob("*mp_rank_*_model_states.pt"), None)
    if a_model is None:
        raise SavedStateError(f"{folder} lacks *mp_rank_00_model_states.pt")
    _check_archive(a_model)
    try:
        head = torch.load(a_model, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:  # torch.load raises many kinds where a file is damaged
        raise SavedStateError(f"{a_model} cannot be loaded ({type(error).__name__})") from None
    stage = head["ds_config"]["zero_optimization"]["stage"]
    ranks, parts = range(head["dp_world_size"]), range(head["mp_world_size"])
    # As DeepSpeed names them: every rank has its part of the optimizer from stage 1 on, and of the model in stage 3.
    optimizers = [f"zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt" for rank in ranks for part in parts]
    models = [f"zero_pp_rank_{rank}_mp_rank_{part:02d}_model_states.pt" for rank in ranks for part in parts]
    if stage < 3:
        models = [f"mp_rank_{part:02d}_model_states.pt" for part in parts]
    for name in models + (optimizers if stage else []):
        # The optimizer's files of a run in bf16 have another prefix.
        file = next((file for prefix in ("", "bf16_") if (file := folder / f"{prefix}{name}").exists()), None)
        if file is None:
            raise SavedStateError(f"{folder} lacks {name}, which a node could not write")
        _check_archive(file)
    return head


def _check_archive(file: Path) -> None:
    try:
        zipfile.ZipFile(file).close()
    except zipfile.BadZipFile:
        raise SavedStateError(f"{file} is cut off") from None
    except OSError as error:
        raise SavedStateError(f"{file} cannot be read ({error.strerror})") from None


def _step(tag: str) -> int:
    return int(re.findall(r"\d*$", tag)[0] or -1)


def use_checkpoint(args: argparse.Namespace) -> None:
    """Make OpenRLHF resume the checkpoint that `find_whole_checkpoint` found, by its files named `latest`.

    Checkpoints newer than `latest` are incomplete, because the run was killed while it wrote them, and are removed.
    Otherwise OpenRLHF would count them for `--ckpt.max_num`, and remove a complete checkpoint in their place.
    """
    if (tag := vars(args)["ckpt.resume_from"]) is None:
        return
    for group in ("_actor", "_critic"):
        folder = Path(vars(args)["ckpt.path"], group)
        if not (folder / tag).is_dir():
            continue  # a critic that this run does not have
        for torn in folder.glob("global_step*"):
            if _step(torn.name) > _step(_existing_latest(folder) or tag):
                shutil.rmtree(torn)
        if _latest(folder) != tag:
            (folder / "latest.part").write_text(tag)
            (folder / "latest.part").replace(folder / "latest")


def _latest(folder: Path) -> str | None:
    """Return the tag of the newest complete checkpoint of OpenRLHF's actor or critic."""
    return (folder / "latest").read_text().strip() if (folder / "latest").exists() else None


def _existing_latest(folder: Path) -> str:
    """Return the tag in `latest`; "" if the file is missing or cut off, or names no checkpoint that is there."""
    tag = _latest(folder) or ""
    return tag if tag and (folder / tag).is_dir() else ""


def save_pools(trainer: Any, tag: str) -> None:
    """Write the pools for checkpoint `tag`, before OpenRLHF writes the checkpoint.

    A run that is killed in between leaves a pool without a checkpoint, but no checkpoint without its pool.
    """
    maker, args = trainer.experience_maker, trainer.args
    if args.ckpt.disable_ds:
        return  # no checkpoint to resume
    state = {
        "policy_version": maker.policy_version,
        "version_offset": maker.version_offset,
        "steps_by_version": maker.steps_by_version,
    }
    for kind, pool, settings in (
        ("_replay", maker.pool, _replay_fingerprint),
        ("_partial", maker.unfinished, _partial_fingerprint),
        ("_buffer", maker.buffer, _groups_fingerprint),
    ):
        directory = Path(args.ckpt.path, kind, tag)
        if pool is not None:
            pool.save(directory, state, settings(args))
        else:  # what an earlier run saved under this tag
            for saved in (directory, directory.with_name(f"{tag}.old")):
                shutil.rmtree(saved, ignore_errors=True)


def save_clip_rule(args: Namespace, tag: str, state: dict[str, torch.Tensor]) -> None:
    """Write `ClipRule.state_dict()` for checkpoint `tag`, before OpenRLHF writes the checkpoint."""
    record = {"format_version": RULE_FORMAT_VERSION, "fingerprint": _rule_fingerprint(args)}
    columns = {name: value.cpu().contiguous() for name, value in state.items()}
    write_directory(Path(args.ckpt.path, "_rule", tag), columns, record)


def load_clip_rule(args: Namespace, tag: str | None = None) -> dict[str, torch.Tensor] | None:
    """Load the state for `ClipRule.load_state_dict`, if the rule follows earlier updates."""
    directory = _resumed(args, "_rule", tag, args.bapo.discard_saved)
    if directory is None or (rule := clip_rule_from_args(args)) is None or not rule.follows_updates:
        return None
    return read_directory(directory, RULE_FORMAT_VERSION, _rule_fingerprint(args), "pass --bapo.discard_saved")[0]


def _rule_fingerprint(args: Namespace) -> dict[str, str]:
    """Return the settings of the clip rule that must not change in a resumed run. The half-life may change."""
    name = args.policy_loss
    settings = (*SEARCH_FIELDS, "smoothing_of") if name == "bapo" else default_settings(name).keys() - {"half_life"}
    group = "rule" if is_own_rule(name) else name
    values = {f"--{group}.{setting}": str(getattr(getattr(args, group), setting)) for setting in sorted(settings)}
    # The file of a rule of one's own may lie elsewhere.
    return {"--policy_loss": Path(name).name} | values


def remove_pruned(args: Namespace) -> None:
    """Remove our state of checkpoints that OpenRLHF has removed."""
    for kind in KINDS:
        for saved in Path(args.ckpt.path, kind).glob("*"):
            # An interrupted save of X may leave X.old (`write_directory`).
            if not Path(args.ckpt.path, "_actor", saved.name.removesuffix(".old")).exists():
                shutil.rmtree(saved)


def load_pools(trainer: Any) -> bool:
    """Restore the pools and the policy version in the trainer of a resumed run.

    Returns:
        Whether responses wait that were made from the data before the checkpoint.
    """
    maker = trainer.experience_maker
    if (kept := load_saved_pool(trainer.args)) is not None:
        maker.pool = kept[0]
    waiting = load_into_generator(trainer)
    for _, state in filter(None, (kept, *waiting)):
        # OpenRLHF now publishes the resumed weights again, and `count_version` adds 1. So the saved version is the
        # current one again, and its optimizer steps, the last entry, are appended again.
        maker.policy_version = maker.version_offset = state["policy_version"] - 1
        maker.steps_by_version = state["steps_by_version"][:-1]
        maker.num_optimizer_steps = state["steps_by_version"][-1]
    return any(waiting)


def load_into_generator(owner: Any) -> tuple[tuple[PartialPool, dict] | None, tuple[SampleBuffer, dict] | None]:
    """Load unfinished responses and waiting samples, and restore them in the trainer or `GenerateSamplesActor`.

    In async training the actor has the generator, and the trainer needs only the states.
    """
    unfinished, waiting = load_unfinished(owner.args), load_sample_buffer(owner.args)
    generator = getattr(owner, "samples_generator", None)
    if generator is not None and unfinished is not None:
        generator.take_up(unfinished[0])
    if generator is not None and waiting is not None:
        generator.take_up_buffer(waiting[0])
    return unfinished, waiting
