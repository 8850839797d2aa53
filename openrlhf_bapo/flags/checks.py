"""Checks of a training command before Ray starts: every flag alone, flags together, files, and the machine.

A mistake costs seconds here. Found by an engine, it costs minutes, or the run waits forever.
"""

import contextlib
import importlib.util
import math
import os
import socket
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from openrlhf_bapo.flags.clashes import find_clashes, num_actor_gpus
from openrlhf_bapo.flags.input_files import (
    check_joined,
    check_model,
    check_python_file,
    check_rows,
    check_same_tokens,
    check_target_modules,
    count_rows,
    is_hub_name,
    is_reward_file,
    listed,
    listed_with_folders,
    loading,
    model_length,
    nearest_folder,
    warn,
)
from openrlhf_bapo.flags.labels import check_labels
from openrlhf_bapo.flags.mistakes import FlagError
from openrlhf_bapo.flags.train_flags import SETTINGS, source_of_staleness
from openrlhf_bapo.openrlhf.settings import has_clip_rule, has_proximal_ratio, packing_problem

FLAGS, FILES, MACHINE = range(3)
"""Depths of `check`: the flags; also the files that they name; also this machine, where data and models must exist."""

_REWARD_SOURCES = {
    "patience": ["reward.remote_url"],
    "timeout": ["reward.remote_url"],
    "max_drop_rate": ["reward.remote_url", "train.agent_func_path"],
}
"""For each flag of --reward_fault, the flags of which one must be given."""

_PACKAGES = {
    "logger.wandb.key": "wandb",
    "logger.tensorboard_dir": "tensorboard",
    "use_ms": "modelscope",
    "ds.use_liger_kernel": "liger_kernel",
}
"""Packages that flags need, by flag. OpenRLHF's installation may lack them."""


def check(args: Namespace, given: set[str], depth: int) -> None:
    """Refuse the first mistake, and warn on stderr of each value that is probably a mistake.

    Args:
        args: flat, names with dots; OpenRLHF's flags as it parsed them, ours as `resolve_flags` left them.
        given: names of the flags on the command line.
        depth: `FLAGS`, `FILES` or `MACHINE`. Without `MACHINE`, data and models may be missing.
    """
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(args)
    _check_useless(vars(args), given)
    _refuse_first(find_clashes(nested))
    _warn_of_values(vars(args), given)
    _warn_of_left_samples(nested)
    _say_what_the_ratio_is_against(vars(args), nested, given)
    if depth >= FILES:
        is_training = depth == MACHINE
        _check_rows(nested, is_training)
        _check_models(nested, is_training)
        if is_training:
            _check_machine(nested, vars(args))
            _check_folders(nested)
            _check_resume(nested)


def _refuse_first(problems: Iterable[str]) -> None:
    for problem in problems:
        raise FlagError(problem)


def _check_useless(values: dict, given: set[str]) -> None:
    """Refuse given flags of ours that do nothing."""
    for group, kind in SETTINGS.items():
        switch, *names = (f"{group}.{field.name}" for field in fields(kind))
        for name in names:
            # An explicit 0 disables a recipe's group and leaves its settings.
            if name in given and not values[switch] and switch not in given:
                raise FlagError(f"--{name} {values[name]}: does nothing without --{switch}")
    for name, sources in _REWARD_SOURCES.items():
        if f"reward_fault.{name}" in given and not any(values[source] for source in sources):
            value, needed = values[f"reward_fault.{name}"], " or ".join(f"--{source}" for source in sources)
            raise FlagError(f"--reward_fault.{name} {value:g}: does nothing without {needed}")


def _warn_of_left_samples(args: Namespace) -> None:
    """Warn of samples of each rollout that fill no optimizer step."""
    num_prompts = min(args.rollout.batch_size, args.rollout.vllm_generate_batch_size or math.inf)
    num_samples, size = num_prompts * args.rollout.n_samples_per_prompt, args.train.batch_size
    if num_samples % size:
        # With a clip rule, replay or a dynamic batch a short rollout is cut to whole steps; a long one was refused.
        is_cut = has_clip_rule(args) or args.replay.ratio or args.train.dynamic_batch_enable
        effect = "are left out" if is_cut else "add their gradients to the next rollout's first step"
        warn(
            f"--train.batch_size {size} does not divide a rollout's {num_samples} samples: those that fill no "
            f"optimizer step {effect}"
        )


def _warn_of_values(values: dict, given: set[str]) -> None:
    """Warn of OpenRLHF's flags that do nothing, or that are probably not meant."""
    for name in ("eval.steps", "eval.temperature", "eval.n_samples_per_prompt"):
        if name in given and not values["eval.dataset"] and values[name] != -1:
            warn(f"--{name} {values[name]} does nothing without --eval.dataset")
    evaluates = values["eval.dataset"] and values["eval.steps"] != -1
    if evaluates and values["train.async_enable"] and values["ckpt.best_metric_key"] != "none":
        warn(
            "--train.async_enable: OpenRLHF trains on while it evaluates, so that the best checkpoint has "
            "later weights than those that were evaluated; --ckpt.best_metric_key none writes none"
        )
    if values["train.agent_func_path"] and values["reward.remote_url"]:
        warn(f"--reward.remote_url {values['reward.remote_url']} does nothing with --train.agent_func_path")
    for name in ("actor", "critic"):
        scheduler = values[f"{name}.lr_scheduler"]
        without = {"lr_warmup_ratio": scheduler == "constant", "min_lr_ratio": "min_lr" not in scheduler}
        for flag in (f"{name}.{ratio}" for ratio, does_nothing in without.items() if does_nothing):
            if flag in given and values[flag]:
                warn(f"--{flag} {values[flag]} does nothing with --{name}.lr_scheduler {scheduler}")
    for name in ("actor.adam.lr", "critic.adam.lr"):
        if name in given and values[name] > 0.01:
            warn(f"--{name} {values[name]} is a high learning rate; usual: 1e-7 to 1e-4")
    if (buffer := values["reward.overlong_buffer_len"]) is not None and values["rollout.max_new_tokens"] is None:
        limit = values["data.max_len"]
        warn(
            f"--reward.overlong_buffer_len {buffer:g}: penalizes responses of more than {limit - buffer:g} tokens, and "
            f"--data.max_len {limit} cuts them earlier, by their prompts; usual: with --rollout.max_new_tokens"
        )
    if values["ckpt.max_num"] == 1 and values["ckpt.save_steps"] != -1:
        warn("--ckpt.max_num 1: OpenRLHF removes the only checkpoint before it writes the next; usual: 2 or more")


def _say_what_the_ratio_is_against(values: dict, args: Namespace, given: set[str]) -> None:
    """Warn if the ratio hides staleness, or differs from OpenRLHF's without a flag that asks for that."""
    source, level = source_of_staleness(values), args.algo.advantage.is_correction_level
    if args.offpolicy.objective == "decoupled":
        return
    if has_proximal_ratio(args):
        remedy = "--offpolicy.ratio_base auto is against the policy that generated each token"
        if level != "off":
            remedy = f"--algo.advantage.is_correction_level {level} alone corrects for it"
        warn(f"--offpolicy.ratio_base recomputed: the ratio does not see the staleness of {source}; {remedy}")
    elif args.policy_loss == "gspo" and source:
        warn(f"--policy_loss gspo: the ratio does not see the staleness of {source}; --policy_loss ppo and bapo can")
    elif args.policy_loss == "ppo" and args.train.async_enable and "offpolicy.ratio_base" not in given:
        warn(
            "--train.async_enable: the ratio is against the engine's log-probs, of the policy that generated each "
            "token; OpenRLHF's own, which does not see staleness, is --offpolicy.ratio_base recomputed"
        )


# Files that the flags name.


def _check_rows(args: Namespace, must_exist: bool) -> None:
    data = args.data
    keys = {"--data.input_key": data.input_key} | ({"--data.label_key": data.label_key} if data.label_key else {})
    for flag, names, split in (
        ("--data.prompt_dataset", data.prompt_dataset, data.prompt_split),
        ("--eval.dataset", args.eval.dataset, args.eval.split),
    ):
        for name, folder in listed_with_folders(names):
            where = f"{flag} {name}"
            is_file = name.endswith((".json", ".jsonl", ".csv", ".parquet", ".arrow"))
            if "://" in name:
                continue
            if Path(name).exists():
                check_rows(Path(name), where, keys, data.apply_chat_template, split, folder)
                if data.label_key and Path(name).is_file():
                    check_labels(Path(name), where, data.label_key)
            elif not is_file and is_hub_name(name):
                if must_exist:
                    warn(f"{where}: is not a file or folder here, so it must be a data set on the hub; not checked")
            elif must_exist:
                raise FlagError(f"{where}: no such file; allowed: a JSONL file, or a data set's name on the hub")
            else:
                warn(f"{where}: does not exist yet, so its rows are not checked")
        check_joined(listed(names), f"{flag} {names}")
    _check_one_step_fits(args)
    _warn_of_cut_data(args)


def _warn_of_cut_data(args: Namespace) -> None:
    """Warn if `--data.max_samples` leaves out rows of the evaluation, or whole data sets. Other rows are meant."""
    most, num_rows = args.data.max_samples, {}
    for flag, names in (("--data.prompt_dataset", args.data.prompt_dataset), ("--eval.dataset", args.eval.dataset)):
        num_rows[flag] = [(name, count_rows(Path(name)) or 0 if Path(name).is_file() else 0) for name in listed(names)]
    if (found := sum(rows for _, rows in num_rows["--eval.dataset"])) > most:
        warn(f"--data.max_samples {most}: OpenRLHF evaluates on the first {most} of --eval.dataset's {found} rows too")
    *before, (last, _) = num_rows["--data.prompt_dataset"]
    if (found := sum(rows for _, rows in before)) >= most and not args.data.prompt_probs:
        warn(f"--data.max_samples {most}: the {found} rows before {last} in --data.prompt_dataset leave it out")


def _check_one_step_fits(args: Namespace) -> None:
    name, samples, size = args.data.prompt_dataset, args.rollout.n_samples_per_prompt, args.train.batch_size
    if not has_clip_rule(args) or not Path(name).is_file() or (rows := count_rows(Path(name))) is None:
        return
    if (num := min(rows, args.data.max_samples)) * samples < size:
        prompts = f"{num} prompts x --rollout.n_samples_per_prompt {samples}"
        step = f"optimizer step of --train.batch_size {size}"
        raise FlagError(f"--data.prompt_dataset {name}: {prompts} fill no {step}")


def _check_models(args: Namespace, must_exist: bool) -> None:
    actor = args.actor.model_name_or_path
    critics = [args.critic.model_name_or_path] if args.algo.advantage.estimator == "gae" else []
    rewards = [] if args.reward.remote_url else listed(args.reward.model_name_or_path)
    for kind, names in (("critic", critics), ("reward", rewards)):
        for name in names:
            if name and name != actor:
                check_model(f"--{kind}.model_name_or_path", name, must_exist)
    config = check_model("--actor.model_name_or_path", actor, must_exist, args.data.apply_chat_template)
    if config is not None:
        _refuse_first(filter(None, [packing_problem(args, config)]))
        coef = args.actor.aux_loss_coef
        if coef > 1e-8 and "output_router_logits" not in config.to_dict():  # as OpenRLHF's Actor asks
            raise FlagError(f"--actor.aux_loss_coef {coef}: a {config.model_type} has no such loss; allowed: 0")
        text = config.get_text_config()
        _refuse_first(find_clashes(args, getattr(text, "num_attention_heads", None), model_length(text)))
        for kind, names in (("critic", critics), ("reward", rewards)):
            for name in filter(None, names):
                check_same_tokens(f"--{kind}.model_name_or_path", name, actor)
        if args.ds.lora.rank and args.ds.lora.target_modules != "all-linear":
            check_target_modules(args.ds.lora.target_modules, config)


def loading_given(values: dict) -> contextlib.AbstractContextManager[None]:
    """Load the reward-function or agent file, if one is given; refuse a value that is neither file nor URL."""
    agent, reward = values["train.agent_func_path"], values["reward.remote_url"]
    if agent:
        check_python_file("--train.agent_func_path", agent, "an agent file (.py)")
        return loading("--train.agent_func_path", agent, "AgentExecutor")
    if reward and is_reward_file("--reward.remote_url", reward):
        return loading("--reward.remote_url", reward, "reward_func")
    return contextlib.nullcontext()


# The machine.


def gpu_groups(args: Namespace) -> dict[str, int]:
    """Count the GPUs by the kind of model that uses them. A model that shares another one's GPUs is left out."""
    train, has_critic = args.train, args.algo.advantage.estimator == "gae"
    groups = {"actor": num_actor_gpus(args)}
    if not train.colocate_all or train.async_enable:
        groups["engines"] = args.vllm.num_engines * args.vllm.tensor_parallel_size
    if args.algo.kl.init_coef > 0 and not (train.colocate_all or train.colocate_actor_ref):
        groups["reference"] = args.ref.num_nodes * args.ref.num_gpus_per_node
    if has_critic and (train.colocate_critic_reward or not train.colocate_all):
        groups["critic"] = args.critic.num_nodes * args.critic.num_gpus_per_node
    reward_shares_gpus = train.colocate_all or (train.colocate_critic_reward and has_critic)
    if not (args.reward.remote_url or train.agent_func_path or reward_shares_gpus):
        groups["reward model"] = args.reward.num_nodes * args.reward.num_gpus_per_node
    return groups


def _check_machine(args: Namespace, values: dict) -> None:
    import torch

    for name, package in _PACKAGES.items():
        if values[name] and importlib.util.find_spec(package) is None:
            shown = "" if values[name] is True or "key" in name else f" {values[name]}"
            raise FlagError(f"--{name}{shown}: needs the package {package}, which is not installed")
    if address := os.environ.get("RAY_ADDRESS"):
        check_ray_address(address)
    elif torch.cuda.is_available():
        check_gpus(gpu_groups(args), torch.cuda.device_count())
        if args.ds.param_dtype == "fp32":
            raise FlagError("--ds.param_dtype fp32: is for CPUs; allowed with GPUs: bf16, fp16")
        _check_flash_attention(args)
    else:
        if args.ds.param_dtype == "fp16":
            raise FlagError("--ds.param_dtype fp16: DeepSpeed does not compute in fp16 on a CPU; allowed: fp32, bf16")
        for name in ("vllm.tensor_parallel_size", "ds.tensor_parallel_size", "ds.ring_attn_size"):
            if values[name] > 1:
                raise FlagError(f"--{name} {values[name]}: needs GPUs; allowed on the CPU: 1")


def _check_flash_attention(args: Namespace) -> None:
    """Refuse what needs the package flash-attn if it is not installed. OpenRLHF packs samples with flash attention."""
    kind, packs = args.ds.attn_implementation, args.ds.packing_samples or args.train.dynamic_batch_enable
    needs_it = (packs or args.ds.ring_attn_size > 1) and "flash_attention" not in kind
    if (needs_it or kind == "flash_attention_2") and importlib.util.find_spec("flash_attn") is None:
        raise FlagError(
            f"--ds.attn_implementation {kind}: needs the package flash-attn, which is not installed, for itself or for "
            "--ds.packing_samples, --train.dynamic_batch_enable or --ds.ring_attn_size; allowed without it and them: "
            "sdpa, eager"
        )


def check_gpus(groups: dict[str, int], num_gpus: int) -> None:
    """Refuse a run that asks for more GPUs than this machine has; Ray would wait for them."""
    if sum(groups.values()) > num_gpus:
        allowed = f"up to the {num_gpus} of this machine, or the RAY_ADDRESS of a larger cluster"
        raise FlagError(f"{largest_group(groups)}: the run asks for {describe_gpus(groups)}; allowed: {allowed}")


def largest_group(groups: dict[str, int]) -> str:
    """Return the flag that sets the number of GPUs of the largest group."""
    flags = {"actor": "actor", "engines": "vllm", "reference": "ref", "critic": "critic", "reward model": "reward"}
    name = max(groups, key=groups.__getitem__)
    return f"--{flags[name]}.{'num_engines' if name == 'engines' else 'num_gpus_per_node'}"


def describe_gpus(groups: dict[str, int]) -> str:
    """Return the GPUs that a run asks for, in words."""
    listed = ", ".join(f"{count} {group}" for group, count in groups.items())
    return f"{sum(groups.values())} GPUs ({listed})"


def check_ray_address(address: str) -> None:
    """Refuse a RAY_ADDRESS where no cluster answers."""
    if address == "local":
        return
    known = address
    if address == "auto":
        running = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        known = running.read_text().strip() if running.is_file() else ""
    host, _, port = known.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError, OverflowError):
        allowed = "allowed: HOST:PORT of a running Ray head, auto, or unset to start Ray here"
        raise FlagError(f"RAY_ADDRESS {address}: no Ray cluster answers there; {allowed}") from None


def _check_folders(args: Namespace) -> None:
    """Refuse folders that cannot be written to; a run writes to the model's folder only after its last step."""
    for flag in ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir"):
        folder = attrgetter(flag)(args)
        if folder is not None and (problem := _why_not_writable(folder)):
            raise FlagError(f"--{flag} {folder}: cannot be written ({problem}); allowed: a folder")
    if not os.environ.get("RAY_ADDRESS"):  # otherwise the processes may run elsewhere
        for variable, folder in _cache_folders().items():
            if problem := _why_not_writable(folder):
                allowed = f"another {variable}, or a HOME that can be written"
                raise FlagError(f"{variable} {folder}: cannot be written ({problem}); allowed: {allowed}")


def _why_not_writable(folder: str | Path) -> str:
    there = nearest_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return ("" if there == Path(folder).absolute() else f"{there}: ") + str(error.strerror)


def _cache_folders() -> dict[str, str | Path]:
    """Return the folders of caches that a run on this machine writes to, by the variable that sets each."""
    import torch
    from datasets.config import HF_DATASETS_CACHE
    from torch.utils.cpp_extension import get_default_build_root
    from vllm import envs

    compiled = {"TORCH_EXTENSIONS_DIR": get_default_build_root()}  # by DeepSpeed
    if torch.cuda.is_available():
        compiled["TRITON_CACHE_DIR"] = str(Path.home() / ".triton")
    folders = {name: os.environ.get(name) or folder for name, folder in compiled.items()}
    # Every data file as Arrow, and what engines compile.
    return {"HF_DATASETS_CACHE": HF_DATASETS_CACHE, "VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT, **folders}


def _check_resume(args: Namespace) -> None:
    """Refuse a resume without a checkpoint. `find_whole_checkpoint` checks its files."""
    saved = Path(args.ckpt.path, "_actor")
    if not args.ckpt.load_enable:
        for name in ("replay", "partial", "bapo"):
            if getattr(args, name).discard_saved:
                raise FlagError(f"--{name}.discard_saved: does nothing without --ckpt.load_enable")
        if (saved / "latest").is_file():
            warn(f"--ckpt.path {args.ckpt.path}: has checkpoints, but without --ckpt.load_enable the run ignores them")
        return
    where = f"--ckpt.load_enable: --ckpt.path {args.ckpt.path}"
    if not saved.is_dir():
        warn(f"{where} has no checkpoint; the run starts from step 0")
    elif not any(folder.is_dir() for folder in saved.iterdir()):
        raise FlagError(f"{where} has no checkpoint in {saved}; start without --ckpt.load_enable")


def check_saved_type(args: Namespace) -> None:
    """Refuse to resume a checkpoint of another type; `args` are flat, after `find_whole_checkpoint`."""
    checkpoint, dtype = (vars(args)[name] for name in ("ckpt.resume_from", "ds.param_dtype"))
    if checkpoint is None:
        return
    folder = Path(vars(args)["ckpt.path"], "_actor", checkpoint)
    # DeepSpeed puts bf16 into the names of the optimizer's files.
    is_bf16 = {file.name.startswith("bf16") for file in folder.glob("*zero_pp_rank_*_optim_states.pt")}
    if is_bf16 == {dtype != "bf16"}:
        allowed = "bf16" if True in is_bf16 else "fp16 or fp32"
        raise FlagError(f"--ds.param_dtype {dtype}: {folder} is in {allowed}; allowed: {allowed}")
