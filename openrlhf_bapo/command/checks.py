"""What can be known of a command before Ray starts: what is allowed, flag by flag, then files, folders and machine.

A mistake that is found here costs seconds; found by an engine it costs minutes, or the run waits for ever. OpenRLHF and
our own flags alone are checked first (`FLAGS`), then what they name (`FILES`), then this machine (`MACHINE`).
"""

import argparse
import contextlib
import importlib.util
import math
import os
import re
import socket
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from openrlhf_bapo.command.flags import FlagError
from openrlhf_bapo.command.input_files import (
    LoadedFile,
    check_model,
    check_python_file,
    check_rows,
    is_hub_name,
    is_url,
    listed,
    model_length,
    warn,
)

FLAGS, FILES, MACHINE = range(3)
"""How far `check` goes; each includes those before. A dry run ends with the files that are there, training goes on."""

_NUMBERS = (
    (
        "1 or more",
        lambda v: v >= 1,
        "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.tensor_parallel_size "
        "ds.ring_attn_size ds.ring_attn_head_stride ds.zpg data.max_samples rollout.max_new_tokens rollout.batch_size "
        "rollout.vllm_generate_batch_size rollout.n_samples_per_prompt rollout.micro_batch_size "
        "rollout.max_tokens_per_gpu train.batch_size train.micro_batch_size train.max_tokens_per_gpu train.max_epochs "
        "train.num_episodes train.async_queue_size eval.n_samples_per_prompt logger.logging_steps ckpt.max_num "
        "algo.kl.horizon ds.lora.alpha",
    ),
    ("2 or more, for prompt and response", lambda v: v >= 2, "data.max_len"),
    ("0 or more", lambda v: v >= 0, "data.dataloader_num_workers data.max_images_per_prompt ds.lora.rank"),
    ("-1 (never), or 1 or more", lambda v: v == -1 or v >= 1, "eval.steps ckpt.save_steps"),
    ("-1 (none), or more", lambda v: v >= -1, "critic.freezing_steps"),
    ("from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32, "train.seed"),
    (
        "0 or more, and finite",
        lambda v: 0 <= v < math.inf,
        "actor.adam.lr critic.adam.lr actor.muon.lr critic.muon.lr actor.adam.weight_decay critic.adam.weight_decay "
        "actor.max_norm critic.max_norm actor.eps_clip actor.eps_clip_low_high actor.aux_loss_coef algo.kl.init_coef "
        "eval.temperature reward.overlong_buffer_len reward.overlong_penalty_factor",
    ),
    (
        "above 0, and finite",
        lambda v: 0 < v < math.inf,
        "rollout.temperature actor.adam.eps critic.adam.eps critic.value_clip algo.kl.target",
    ),
    ("above 0", lambda v: v > 0, "ckpt.max_mem"),
    ("above 1", lambda v: 1 < v < math.inf, "actor.dual_clip"),
    ("above 0, up to 1", lambda v: 0 < v <= 1, "rollout.top_p vllm.gpu_memory_utilization"),
    (
        "from 0 to 1",
        lambda v: 0 <= v <= 1,
        "actor.lr_warmup_ratio critic.lr_warmup_ratio actor.min_lr_ratio critic.min_lr_ratio algo.advantage.lambd "
        "algo.advantage.gamma train.ema_beta",
    ),
    (
        "from 0, below 1",
        lambda v: 0 <= v < 1,
        "actor.adam.betas critic.adam.betas actor.muon.momentum critic.muon.momentum ds.lora.dropout",
    ),
    ("up to 1", lambda v: -math.inf < v <= 1, "reward.stop_properly_penalty_coef"),
    ("a finite number", math.isfinite, "actor.entropy_coef"),
)
"""What is allowed, and for which of OpenRLHF's flags. Ours are checked by the settings that they make."""

# Those of transformers that need nothing that OpenRLHF does not give them.
_SCHEDULERS = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt cosine_with_min_lr "
    "cosine_warmup_with_min_lr"
).split()

_TEXTS = (
    ("0, 1, 2, 3", "[0-3]", "ds.zero_stage"),
    (", ".join(_SCHEDULERS), "|".join(_SCHEDULERS), "actor.lr_scheduler critic.lr_scheduler"),
    ("nccl, gloo", "nccl|gloo", "vllm.sync_backend"),
    ("bf16, fp16, fp32", "bf16|fp16|fp32|bfloat16|float16|float32", "ds.grad_accum_dtype"),
    (
        "eager, sdpa, flex_attention, flash_attention_2, flash_attention_3, or a kernel on the hub (OWNER/NAME)",
        r"eager|sdpa|flex_attention|flash_attention_[23]|[\w.-]+/\S+",
        "ds.attn_implementation",
    ),
    ("none, or a metric of the evaluation (eval_NAME_pass1)", r"|none|eval_\S+", "ckpt.best_metric_key"),
)

_PAIRS = ("reward.clip_range", "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold")

_IDLE = (
    ("replay.ratio", "capacity max_staleness max_reuse strategy skip_uninformative seed"),
    ("partial.token_budget", "oversample max_segments max_staleness on_stale"),
)
"""A flag, and those of its group that do nothing without it."""

_PACKAGES = {
    "logger.wandb.key": "wandb",
    "logger.tensorboard_dir": "tensorboard",
    "use_ms": "modelscope",
    "ds.use_liger_kernel": "liger_kernel",
    "ds.load_in_4bit": "bitsandbytes",
}
"""What a flag needs that OpenRLHF's installation may lack."""

_REWARDS = "a reward-function file (.py), or HTTP URLs, comma-separated"


def check(args: Namespace, given: set[str], depth: int, early: Iterable[LoadedFile] = ()) -> None:
    """Refuse what is wrong, and say in one line each on stderr what is probably not meant.

    Args:
        args: flat, names with dots; OpenRLHF's flags as it parsed them, ours as `resolve_flags` left them.
        given: the names of the flags on the command line.
        depth: `FLAGS`, `FILES` or `MACHINE`. Without the last, data and models may be missing.
        early: what `load_early` has started.

    Raises:
        FlagError: at the first mistake.
    """
    from openrlhf.utils.config import hierarchize

    nested = hierarchize(args)
    _check_values(vars(args))
    _check_idle(vars(args), given)
    _refuse_first(clashes(nested, None, None))
    _check_replay(nested)
    if depth >= FILES:
        is_training = depth == MACHINE
        loading = list(_start_loading(nested.train.agent_func_path, nested.reward.remote_url, early))
        try:
            _check_rows(nested, is_training)
            _check_models(nested, is_training)
            if is_training:
                _check_machine(nested, vars(args))
                _check_folders(nested)
                _check_resume(nested)
            for file in loading:
                file.finish()
        finally:
            for file in loading:
                file.end()


def _say(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _check_values(values: dict) -> None:
    for allowed, holds, names in _NUMBERS:
        for name in names.split():
            value = values[name]
            if value is not None and not all(map(holds, value if isinstance(value, list | tuple) else [value])):
                raise FlagError(f"--{name} {_say(value)}: allowed: {allowed}")
    for allowed, pattern, names in _TEXTS:
        for name in names.split():
            if values[name] is not None and not re.fullmatch(pattern, str(values[name]), re.DOTALL):
                raise FlagError(f"--{name} {values[name]}: allowed: {allowed}")
    for name in _PAIRS:
        bounds = values[name]
        if len(bounds) > 1 and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise FlagError(f"--{name} {_say(bounds)}: allowed: LOW HIGH, LOW below HIGH")


def _check_idle(values: dict, given: set[str]) -> None:
    """Refuse flags of ours that do nothing, as `--bapo.*` without bapo; name OpenRLHF's."""
    for needed, names in _IDLE:
        group, _ = needed.split(".")
        for name in names.split():
            # Who gives the value 0 has switched a recipe's replay off, and leaves its settings.
            if f"{group}.{name}" in given and not values[needed] and needed not in given:
                raise FlagError(f"--{group}.{name} {values[f'{group}.{name}']}: does nothing without --{needed}")
    asked = {"reward.remote_url": ("patience", "timeout", "max_drop_rate"), "train.agent_func_path": ("max_drop_rate",)}
    useful = {name for source, names in asked.items() if values[source] for name in names}
    for name in ("patience", "timeout", "max_drop_rate"):
        if f"reward_fault.{name}" in given and name not in useful:
            value = values[f"reward_fault.{name}"]
            raise FlagError(f"--reward_fault.{name} {value:g}: does nothing without --reward.remote_url")
    if values["eval.at_start"] and not values["eval.dataset"]:
        raise FlagError("--eval.at_start: does nothing without --eval.dataset")
    for name in ("eval.steps", "eval.temperature", "eval.n_samples_per_prompt"):
        if name in given and not values["eval.dataset"] and values[name] != -1:
            warn(f"--{name} {values[name]} does nothing without --eval.dataset")
    if values["train.agent_func_path"] and values["reward.remote_url"]:
        warn(f"--reward.remote_url {values['reward.remote_url']} does nothing with --train.agent_func_path")
    for name in ("actor.adam.lr", "critic.adam.lr"):
        if name in given and values[name] > 0.01:
            warn(f"--{name} {values[name]} is a high learning rate; usual: 1e-7 to 1e-4")
    if values["ckpt.max_num"] == 1 and values["ckpt.save_steps"] != -1:
        warn("--ckpt.max_num 1: OpenRLHF removes the only checkpoint before it writes the next; usual: 2 or more")


def clashes(args: Namespace, num_heads: int | None, length: int | None) -> list[str]:
    """What OpenRLHF, DeepSpeed or vLLM would refuse only after Ray has started, a line each.

    Args:
        args: nested.
        num_heads: attention heads of the actor's model; None: not known.
        length: its positions, in tokens; None: not known.
    """
    rollout, train, ds, vllm = args.rollout, args.train, args.ds, args.vllm
    num_gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    ranks_per_sample = ds.ring_attn_size * ds.tensor_parallel_size
    num_ranks = num_gpus // ranks_per_sample
    at_once = num_ranks * (1 if train.dynamic_batch_enable else train.micro_batch_size)
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    response = rollout.max_new_tokens or 0
    engine_gpus = (vllm.num_engines or 0) * vllm.tensor_parallel_size
    estimator = args.algo.advantage.estimator
    has_reference = args.algo.kl.init_coef > 0
    overlong = args.reward.overlong_buffer_len or 0
    accumulation = (ds.grad_accum_dtype or "").replace("bfloat", "bf").replace("float", "fp")
    template = args.data.input_template
    reward_sources = (args.reward.remote_url, train.agent_func_path, args.reward.model_name_or_path)
    found = {
        "--actor.model_name_or_path: is missing; allowed: a model's folder, or its name on the hub": (
            not args.actor.model_name_or_path
        ),
        "--data.prompt_dataset: is missing; allowed: a file or folder of prompts, or a dataset's name on the hub": (
            not args.data.prompt_dataset
        ),
        "--reward.remote_url: is missing, so nothing rewards a response; allowed: a reward-function file or HTTP URLs, "
        "or --reward.model_name_or_path, or --train.agent_func_path": not any(reward_sources),
        f"--vllm.num_engines {vllm.num_engines}: allowed: 1 or more; OpenRLHF rolls out with vLLM alone": (
            not vllm.num_engines
        ),
        f"--rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}: --algo.advantage.estimator {estimator} "
        "compares the responses to a prompt; allowed: 2 or more": (
            rollout.n_samples_per_prompt == 1 and estimator in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
        ),
        f"--vllm.num_engines {vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size}: "
        f"with --train.colocate_all it must be the actor's {num_gpus} GPUs": (
            train.colocate_all and not train.async_enable and engine_gpus != num_gpus
        ),
        f"--ref.num_nodes {args.ref.num_nodes} x --ref.num_gpus_per_node {args.ref.num_gpus_per_node}: where actor and "
        f"reference share GPUs both must be the actor's {args.actor.num_nodes} x {args.actor.num_gpus_per_node}": (
            has_reference
            and (train.colocate_all or train.colocate_actor_ref)
            and (args.ref.num_nodes, args.ref.num_gpus_per_node) != (args.actor.num_nodes, args.actor.num_gpus_per_node)
        ),
        f"--ref.num_nodes {args.ref.num_nodes} x --ref.num_gpus_per_node {args.ref.num_gpus_per_node}: allowed: 1 or "
        "more": has_reference and min(args.ref.num_nodes, args.ref.num_gpus_per_node) < 1,
        f"--critic.num_nodes {args.critic.num_nodes} x --critic.num_gpus_per_node {args.critic.num_gpus_per_node}: "
        "allowed: 1 or more": (estimator == "gae" and min(args.critic.num_nodes, args.critic.num_gpus_per_node) < 1),
        f"--vllm.tensor_parallel_size {vllm.tensor_parallel_size}: must divide the model's {num_heads} attention "
        "heads": num_heads and num_heads % vllm.tensor_parallel_size,
        f"--ds.ring_attn_size {ds.ring_attn_size} x --ds.tensor_parallel_size {ds.tensor_parallel_size}: must "
        f"divide the actor's {num_gpus} GPUs": num_gpus % ranks_per_sample,
        f"--ds.grad_accum_dtype {ds.grad_accum_dtype}: with --ds.zero_stage 0 it must be --ds.param_dtype "
        f"{ds.param_dtype}": ds.zero_stage == 0 and accumulation not in ("", ds.param_dtype),
        f"--ds.zpg {ds.zpg}: must divide the actor's {num_gpus} GPUs": num_gpus % ds.zpg,
        f"--train.batch_size {train.batch_size}: a rollout has only {samples} samples": train.batch_size > samples,
        f"--train.batch_size {train.batch_size}: must be a multiple of {at_once}, "
        + (f"--train.micro_batch_size {train.micro_batch_size} on each of " if not train.dynamic_batch_enable else "")
        + f"the {num_ranks} data-parallel ranks of --actor.num_gpus_per_node {args.actor.num_gpus_per_node}": (
            not num_ranks or train.batch_size % at_once
        ),
        f"--rollout.micro_batch_size {rollout.micro_batch_size}: leaves fewer than {num_ranks} micro-batches of a "
        f"rollout's {samples} samples, one for each rank; allowed: up to {samples // max(num_ranks, 1)}": (
            samples // rollout.micro_batch_size < num_ranks
        ),
        f"--data.max_len {args.data.max_len}: the model has {length} positions": length and args.data.max_len > length,
        f"--rollout.max_new_tokens {response}: must be below --data.max_len {args.data.max_len}, which counts the "
        "prompt too": response >= args.data.max_len,
        f"--reward.overlong_buffer_len {overlong}: must be below the {response or args.data.max_len} tokens of a "
        "response": overlong >= (response or args.data.max_len),
        f"--data.input_template {template}: allowed: a text with {{}} for the input, other braces doubled": (
            template is not None and not _takes_an_input(template)
        ),
        "--data.input_template: allowed without --data.apply_chat_template, which OpenRLHF prefers": (
            template and args.data.apply_chat_template
        ),
        f"--eval.dataset {args.eval.dataset}: OpenRLHF evaluates with --reward.remote_url or --train.agent_func_path, "
        "not with a reward model": args.eval.dataset and not any(reward_sources[:2]),
        f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size}: more than --rollout.batch_size "
        f"{rollout.batch_size} is allowed with --train.async_enable": (
            (rollout.vllm_generate_batch_size or 0) > rollout.batch_size and not train.async_enable
        ),
        **_clashes_of_data(args),
    }
    return [message for message, is_there in found.items() if is_there]


def _takes_an_input(template: str) -> bool:
    """Whether OpenRLHF's `template.format(input)` has the input in it; it takes one without {} for none at all."""
    try:
        return "{}" in template and "an input" in template.format("an input")
    except (ValueError, LookupError):
        return False


def _clashes_of_data(args: Namespace) -> dict[str, bool]:
    given = args.data.prompt_probs
    if given is None:
        return {}
    num_sets = len(listed(args.data.prompt_dataset))
    probabilities = []
    with contextlib.suppress(ValueError):
        probabilities = [float(one) for one in given.split(",")]
    is_right = len(probabilities) == num_sets and min(probabilities) >= 0 and math.isclose(sum(probabilities), 1)
    message = f"--data.prompt_probs {given}: allowed: {num_sets} numbers, one for each data set, that add up to 1"
    return {message: not is_right}


def _refuse_first(problems: list[str]) -> None:
    for problem in problems:
        raise FlagError(problem)


def _check_replay(args: Namespace) -> None:
    """Settings with which no group is ever drawn again, or not as many as are asked for."""
    if not args.replay.ratio:
        return
    if args.replay.max_staleness < 1:
        raise FlagError(
            f"--replay.max_staleness {args.replay.max_staleness}: never replays, since a group is one version old in "
            "the next training step; allowed: 1 or more"
        )
    num_drawn = round(args.replay.ratio * args.rollout.batch_size)
    if args.replay.capacity < num_drawn:
        raise FlagError(
            f"--replay.capacity {args.replay.capacity}: keeps less than the {num_drawn} groups that --replay.ratio "
            f"{args.replay.ratio} draws a training step; allowed: {num_drawn} or more"
        )


# What the flags name.


def _check_rows(args: Namespace, must_exist: bool) -> None:
    data = args.data
    keys = {"--data.input_key": data.input_key} | ({"--data.label_key": data.label_key} if data.label_key else {})
    for flag, names in (("--data.prompt_dataset", data.prompt_dataset), ("--eval.dataset", args.eval.dataset)):
        for name in listed(names):
            where = f"{flag} {name}"
            is_file = name.endswith((".json", ".jsonl", ".csv", ".parquet", ".arrow"))
            if "://" in name or Path(name).is_dir():
                continue
            if Path(name).is_file():
                check_rows(Path(name), where, keys, data.apply_chat_template)
            elif not is_file and is_hub_name(name):
                if must_exist:
                    warn(f"{where}: is no file or folder here, so it is taken for a data set on the hub; not checked")
            elif must_exist:
                raise FlagError(f"{where}: no such file; allowed: a JSONL file, or a data set's name on the hub")
            else:
                warn(f"{where}: is not there yet, so its rows are not checked")


def _check_models(args: Namespace, must_exist: bool) -> None:
    actor = args.actor.model_name_or_path
    others = [("--critic.model_name_or_path", args.critic.model_name_or_path)]
    if args.algo.advantage.estimator != "gae":
        others = []
    if not args.reward.remote_url:
        others += [("--reward.model_name_or_path", name) for name in listed(args.reward.model_name_or_path)]
    for flag, name in others:
        if name and name != actor:
            check_model(flag, name, must_exist)
    config = check_model("--actor.model_name_or_path", actor, must_exist, args.data.apply_chat_template)
    if config is not None:
        text = config.get_text_config()
        _refuse_first(clashes(args, getattr(text, "num_attention_heads", None), model_length(text)))


def load_early(argv: list[str]) -> list[LoadedFile]:
    """Start to load the command's reward-function or agent file, whose imports then go on beside OpenRLHF's.

    What is wrong with it is for `check` to say. Who calls must `end` it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--train.agent_func_path", dest="agent")
    parser.add_argument("--reward.remote_url", dest="reward")
    with contextlib.suppress(argparse.ArgumentError, FlagError):
        named = parser.parse_known_args(argv)[0]
        return list(_start_loading(named.agent, named.reward))
    return []


def _start_loading(agent: str | None, reward: str | None, early: Iterable[LoadedFile] = ()) -> Iterable[LoadedFile]:
    """The reward-function or agent file, if there is one; refuses what is neither a file nor URLs."""
    if agent:
        check_python_file("--train.agent_func_path", agent, "an agent file (.py)")
        what = "--train.agent_func_path", agent, "AgentExecutor"
    elif reward and reward.endswith(".py") and "," not in reward:
        check_python_file("--reward.remote_url", reward, _REWARDS)
        what = "--reward.remote_url", reward, "reward_func"
    elif reward and not all(is_url(one) for one in reward.split(",")):
        raise FlagError(f"--reward.remote_url {reward}: allowed: {_REWARDS}")
    else:
        return
    yield next((file for file in early if file.what == what), None) or LoadedFile(*what)


# The machine.


def gpu_groups(args: Namespace) -> dict[str, int]:
    """GPUs by who uses them; who shares another one's is left out."""
    train, critic_and_reward = args.train, 0
    groups = {"actor": args.actor.num_nodes * args.actor.num_gpus_per_node}
    if not train.colocate_all or train.async_enable:
        groups["engines"] = args.vllm.num_engines * args.vllm.tensor_parallel_size
    if args.algo.kl.init_coef > 0 and not (train.colocate_all or train.colocate_actor_ref):
        groups["reference"] = args.ref.num_nodes * args.ref.num_gpus_per_node
    if args.algo.advantage.estimator == "gae" and not train.colocate_all:
        groups["critic"] = critic_and_reward = args.critic.num_nodes * args.critic.num_gpus_per_node
    shares = train.colocate_all or (train.colocate_critic_reward and critic_and_reward)
    if not (args.reward.remote_url or train.agent_func_path) and not shares:
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
    else:
        for name in ("vllm.tensor_parallel_size", "ds.tensor_parallel_size", "ds.ring_attn_size"):
            if values[name] > 1:
                raise FlagError(f"--{name} {values[name]}: needs GPUs; allowed on the CPU: 1")


def check_gpus(groups: dict[str, int], num_gpus: int) -> None:
    """Refuse a run that asks for more GPUs than there are; Ray would wait for them.

    Args:
        groups: as `gpu_groups` gives them.
        num_gpus: of this machine.

    Raises:
        FlagError
    """
    if sum(groups.values()) > num_gpus:
        flags = {"actor": "actor", "engines": "vllm", "reference": "ref", "critic": "critic", "reward model": "reward"}
        name = max(groups, key=groups.get)
        flag = "num_engines" if name == "engines" else "num_gpus_per_node"
        listed = ", ".join(f"{count} {group}" for group, count in groups.items())
        raise FlagError(
            f"--{flags[name]}.{flag}: the run asks for {sum(groups.values())} GPUs ({listed}); allowed: up to the "
            f"{num_gpus} of this machine, or RAY_ADDRESS of a cluster with more"
        )


def check_ray_address(address: str) -> None:
    """Refuse a RAY_ADDRESS that nothing answers at.

    Raises:
        FlagError
    """
    allowed = "allowed: the HOST:PORT of a Ray head that runs, auto, or nothing, to start Ray here"
    known = address
    if address == "local":
        return
    if address == "auto":
        running = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        known = running.read_text().strip() if running.is_file() else ""
    host, _, port = known.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError, OverflowError):
        raise FlagError(f"RAY_ADDRESS {address}: no Ray cluster answers there; {allowed}") from None


def _check_folders(args: Namespace) -> None:
    """By writing: the model's folder would be found out after the last step."""
    folders = {"--ckpt.path": args.ckpt.path, "--ckpt.output_dir": args.ckpt.output_dir}
    for flag, folder in (folders | {"--logger.tensorboard_dir": args.logger.tensorboard_dir}).items():
        if folder is None:
            continue
        there = Path(folder).absolute()
        while not there.exists():
            there = there.parent
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            at = "" if there == Path(folder).absolute() else f"{there}: "
            raise FlagError(f"{flag} {folder}: cannot be written ({at}{error.strerror}); allowed: a folder") from None


def _check_resume(args: Namespace) -> None:
    """The checkpoint that `--ckpt.load_enable` names; the pools' own is `find_whole_checkpoint`."""
    saved = Path(args.ckpt.path, "_actor")
    if not args.ckpt.load_enable:
        if (saved / "latest").is_file():
            warn(f"--ckpt.path {args.ckpt.path}: has checkpoints; without --ckpt.load_enable the run starts anew")
        return
    where = f"--ckpt.load_enable: --ckpt.path {args.ckpt.path}"
    if not saved.is_dir():
        warn(f"{where} has no checkpoint; the run starts anew")
        return
    latest = saved / "latest"
    if not latest.is_file():
        raise FlagError(f"{where} has no whole checkpoint ({latest} is missing); allowed: without --ckpt.load_enable")
    step = latest.read_text().strip()
    states = list((saved / step).glob("*model_states.pt"))
    if not step or not states:
        raise FlagError(
            f"{where} names {step!r} in {latest}, which is not there; allowed: {_steps(saved)} in that file, or "
            "without --ckpt.load_enable"
        )


def _steps(saved: Path) -> str:
    return ", ".join(sorted({str(file.parent.name) for file in saved.glob("*/*model_states.pt")})) or "none"
