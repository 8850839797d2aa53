"""Rules over several flags. A run that breaks one of them would fail only after Ray has started."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator

from openrlhf_bapo.command.input_files import listed
from openrlhf_bapo.openrlhf.settings import compares_engine, has_clip_rule

_ESTIMATORS_OVER_SAMPLES = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Advantage estimators that compare the responses to a prompt."""


def find_clashes(args: Namespace, num_heads: int | None = None, num_positions: int | None = None) -> Iterator[str]:
    """Yield one line per clash.

    Args:
        args: OpenRLHF's flags and ours, nested.
        num_heads: attention heads of the actor's model; None: not known.
        num_positions: the actor's positions, in tokens; None: not known.
    """
    yield from _missing(args)
    yield from _clashes_of_gpus(args, num_heads)
    yield from _clashes_of_other_models(args)
    yield from _clashes_of_batches(args)
    yield from _clashes_of_lengths(args, num_positions)
    yield from _clashes_of_data(args)
    yield from _clashes_of_replay(args)
    yield from _clashes_of_sampling(args)
    yield from _clashes_of_corrections(args)
    yield from _clashes_of_adapters(args)
    yield from _clashes_of_muon(args)


def num_actor_gpus(args: Namespace) -> int:
    """Count the GPUs of the actor, on all nodes."""
    return args.actor.num_nodes * args.actor.num_gpus_per_node


def _num_ranks(args: Namespace, name: str) -> int:
    """Count the data-parallel ranks of the actor or the critic."""
    model = getattr(args, name)
    return model.num_nodes * model.num_gpus_per_node // (args.ds.ring_attn_size * args.ds.tensor_parallel_size)


def _missing(args: Namespace) -> Iterator[str]:
    if not args.actor.model_name_or_path:
        yield "--actor.model_name_or_path: is missing; allowed: a model's folder, or its name on the hub"
    if not args.data.prompt_dataset:
        yield "--data.prompt_dataset: is missing; allowed: a file or folder of prompts, or a data set's name on the hub"
    if not (args.reward.remote_url or args.train.agent_func_path or args.reward.model_name_or_path):
        yield (
            "--reward.remote_url: is missing, and so are the other sources of rewards; allowed: a reward-function file "
            "or HTTP URLs, or --reward.model_name_or_path, or --train.agent_func_path"
        )
    if not args.vllm.num_engines:
        yield f"--vllm.num_engines {args.vllm.num_engines}: allowed: 1 or more, since only vLLM generates rollouts"


def _clashes_of_gpus(args: Namespace, num_heads: int | None) -> Iterator[str]:
    train, ds, vllm = args.train, args.ds, args.vllm
    num_gpus, num_engine_gpus = num_actor_gpus(args), (vllm.num_engines or 0) * vllm.tensor_parallel_size
    if train.colocate_all and not train.async_enable and num_engine_gpus != num_gpus:
        yield (
            f"--vllm.num_engines {vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size}: with "
            f"--train.colocate_all the product must be the actor's {num_gpus} GPUs"
        )
    if num_heads and num_heads % vllm.tensor_parallel_size:
        yield (
            f"--vllm.tensor_parallel_size {vllm.tensor_parallel_size}: must divide the model's {num_heads} attention "
            "heads"
        )
    if num_gpus % (ds.ring_attn_size * ds.tensor_parallel_size):
        yield (
            f"--ds.ring_attn_size {ds.ring_attn_size} x --ds.tensor_parallel_size {ds.tensor_parallel_size}: must "
            f"divide the actor's {num_gpus} GPUs"
        )
    if ds.zero_stage == 0 and _accumulates_in_another_type(ds):
        yield (
            f"--ds.grad_accum_dtype {ds.grad_accum_dtype}: with --ds.zero_stage 0 it must be --ds.param_dtype "
            f"{ds.param_dtype}"
        )
    if train.dynamic_batch_enable and ds.zero_stage in (1, 2):
        # accumulate_dynamic_batches turns DeepSpeed's own counting of micro-batches off, which these need.
        if ds.deepcompile:
            yield "--ds.deepcompile: with --train.dynamic_batch_enable, allowed with --ds.zero_stage 0 and 3"
        if ds.overlap_comm and ds.zero_stage == 1:
            yield "--ds.overlap_comm: with --train.dynamic_batch_enable, allowed with all --ds.zero_stage but 1"
    if train.enable_ema and ds.zero_stage == 3:
        # DeepSpeed's GatheredParameters drops what OpenRLHF's moving_average writes into the gathered copy.
        yield (
            "--train.enable_ema: with --ds.zero_stage 3 OpenRLHF's average keeps the initial weights, and saves them; "
            "allowed with --ds.zero_stage 0, 1 and 2"
        )
    if num_gpus % ds.zpg:
        yield f"--ds.zpg {ds.zpg}: must divide the actor's {num_gpus} GPUs"


def _clashes_of_other_models(args: Namespace) -> Iterator[str]:
    """Find numbers of GPUs for reference model, critic and reward model that OpenRLHF or Ray would refuse."""
    train, ds = args.train, args.ds
    grids = {
        name: (getattr(args, name).num_nodes, getattr(args, name).num_gpus_per_node)
        for name in ("actor", "ref", "critic", "reward")
    }
    shown = {name: f"--{name}.num_nodes {x} x --{name}.num_gpus_per_node {y}" for name, (x, y) in grids.items()}
    used = {"ref"} if args.algo.kl.init_coef > 0 else set()
    used |= {"critic"} if args.algo.advantage.estimator == "gae" else set()
    used |= set() if args.reward.remote_url or train.agent_func_path else {"reward"}
    has_pair = train.colocate_critic_reward and "critic" in used  # critic and reward model on GPUs of their own

    for name in sorted(used):
        if min(grids[name]) < 1:
            yield f"{shown[name]}: allowed: 1 or more"
        if math.prod(grids[name]) % (ds.ring_attn_size * ds.tensor_parallel_size):
            yield (
                f"{shown[name]}: must be a multiple of --ds.ring_attn_size {ds.ring_attn_size} x "
                f"--ds.tensor_parallel_size {ds.tensor_parallel_size}"
            )
        if name != "ref" and train.colocate_all and not has_pair and math.prod(grids[name]) > num_actor_gpus(args):
            yield f"{shown[name]}: allowed with --train.colocate_all: up to the actor's {num_actor_gpus(args)} GPUs"
    if "ref" in used and (train.colocate_all or train.colocate_actor_ref) and grids["ref"] != grids["actor"]:
        nodes, gpus = grids["actor"]
        yield (f"{shown['ref']}: where actor and reference model share GPUs, both must be the actor's {nodes} x {gpus}")
    if has_pair and grids["reward"] != grids["critic"]:
        yield f"{shown['reward']}: must equal {shown['critic']} with --train.colocate_critic_reward"


def _clashes_of_batches(args: Namespace) -> Iterator[str]:
    rollout, train = args.rollout, args.train
    num_samples = rollout.batch_size * rollout.n_samples_per_prompt
    trained = ("actor", "critic") if args.algo.advantage.estimator == "gae" else ("actor",)
    num_ranks = {name: _num_ranks(args, name) for name in trained}
    micro_batch_size, per_rank = 1, ""
    if not train.dynamic_batch_enable:
        micro_batch_size = train.micro_batch_size
        per_rank = f"--train.micro_batch_size {micro_batch_size} on each of "

    if rollout.n_samples_per_prompt == 1 and args.algo.advantage.estimator in _ESTIMATORS_OVER_SAMPLES:
        yield (
            f"--rollout.n_samples_per_prompt 1: --algo.advantage.estimator {args.algo.advantage.estimator} compares "
            "the responses to a prompt; allowed: 2 or more"
        )
    if train.batch_size > num_samples:
        yield f"--train.batch_size {train.batch_size}: a rollout has only {num_samples} samples"
    for name, num in num_ranks.items():
        if not num or train.batch_size % (num * micro_batch_size):
            yield (
                f"--train.batch_size {train.batch_size}: must be a multiple of {num * micro_batch_size}, {per_rank}"
                f"the {num} data-parallel ranks of --{name}.num_gpus_per_node {getattr(args, name).num_gpus_per_node}"
            )
    if has_clip_rule(args) and not train.dynamic_batch_enable and train.batch_size and num_samples % train.batch_size:
        yield (
            f"--train.batch_size {train.batch_size}: with --policy_loss {args.policy_loss} it must divide "
            f"--rollout.batch_size x --rollout.n_samples_per_prompt, which is {num_samples}"
        )
    if num_samples // rollout.micro_batch_size < num_ranks["actor"]:
        yield (
            f"--rollout.micro_batch_size {rollout.micro_batch_size}: leaves fewer than {num_ranks['actor']} "
            f"micro-batches of a rollout's {num_samples} samples, one for each rank; allowed: up to "
            f"{num_samples // num_ranks['actor']}"
        )
    if (rollout.vllm_generate_batch_size or 0) > rollout.batch_size and not train.async_enable:
        yield (
            f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size}: more than --rollout.batch_size "
            f"{rollout.batch_size} is allowed only with --train.async_enable"
        )
    if (rollout.vllm_generate_batch_size or 0) > rollout.batch_size and args.data.max_images_per_prompt:
        yield (
            f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size}: more than --rollout.batch_size "
            f"{rollout.batch_size} is allowed only without --data.max_images_per_prompt, because samples with images "
            "that wait cannot be saved"
        )


def _clashes_of_lengths(args: Namespace, num_positions: int | None) -> Iterator[str]:
    max_len, response = args.data.max_len, args.rollout.max_new_tokens or 0
    overlong = args.reward.overlong_buffer_len or 0
    if num_positions and max_len > num_positions:
        yield f"--data.max_len {max_len}: the model has {num_positions} positions"
    if response >= max_len:
        yield (
            f"--rollout.max_new_tokens {response}: must be below --data.max_len {max_len}, which counts the prompt too"
        )
    if overlong >= (response or max_len):
        yield (f"--reward.overlong_buffer_len {overlong}: must be below the {response or max_len} tokens of a response")


def _clashes_of_data(args: Namespace) -> Iterator[str]:
    data = args.data
    if data.input_template is not None and not takes_an_input(data.input_template):
        yield (
            f"--data.input_template {data.input_template}: allowed: a text with {{}} for the input, other braces "
            "doubled"
        )
    if data.input_template and data.apply_chat_template:
        yield "--data.input_template: allowed only without --data.apply_chat_template, which OpenRLHF uses instead"
    if args.eval.dataset and not (args.reward.remote_url or args.train.agent_func_path):
        yield (
            f"--eval.dataset {args.eval.dataset}: OpenRLHF evaluates with --reward.remote_url or "
            "--train.agent_func_path, not with a reward model"
        )
    if data.prompt_probs is not None:
        num_sets = len(listed(data.prompt_dataset))
        probabilities = []
        with contextlib.suppress(ValueError):
            probabilities = [float(one) for one in data.prompt_probs.split(",")]
        if len(probabilities) != num_sets or min(probabilities) < 0 or not math.isclose(sum(probabilities), 1):
            yield (
                f"--data.prompt_probs {data.prompt_probs}: allowed: {num_sets} numbers, one for each data set, that "
                "add up to 1"
            )


def takes_an_input(template: str) -> bool:
    """Return whether OpenRLHF's `template.format(input)` contains the input."""
    try:
        return "{}" in template and "an input" in template.format("an input")
    except (ValueError, LookupError):
        return False


def _clashes_of_replay(args: Namespace) -> Iterator[str]:
    """Find settings that never replay a group, or fewer groups than asked for."""
    replay = args.replay
    if not replay.ratio:
        return
    if replay.max_staleness < 1:
        yield (
            f"--replay.max_staleness {replay.max_staleness}: never replays, since a group is one version old in the "
            "next training step; allowed: 1 or more"
        )
    num_critic_gpus = args.critic.num_nodes * args.critic.num_gpus_per_node
    if args.algo.advantage.estimator == "gae" and num_critic_gpus > num_actor_gpus(args):
        yield (
            f"--critic.num_gpus_per_node {args.critic.num_gpus_per_node}: with --replay.ratio the critic may have at "
            f"most as many GPUs as the actor, {num_actor_gpus(args)}"
        )
    num_drawn = round(replay.ratio * args.rollout.batch_size)
    if replay.capacity < num_drawn:
        yield (
            f"--replay.capacity {replay.capacity}: keeps fewer than the {num_drawn} groups that --replay.ratio "
            f"{replay.ratio} draws per training step; allowed: {num_drawn} or more"
        )


def _clashes_of_sampling(args: Namespace) -> Iterator[str]:
    """Refuse a nucleus where the engine's log-probs count: they are of the nucleus alone, and the actor's are not."""
    top_p, flag = args.rollout.top_p, compares_engine(args)
    if top_p != 1 and flag:
        yield (
            f"--rollout.top_p {top_p}: changes the engine's log-probs, and {flag} compares them with the actor's; "
            "allowed: 1"
        )


def _clashes_of_corrections(args: Namespace) -> Iterator[str]:
    """Find settings of IS correction that OpenRLHF's loss refuses, in its actors."""
    advantage, group = args.algo.advantage, "--algo.advantage.is_correction_"
    level, mode, gating = (getattr(advantage, f"is_correction_{name}") for name in ("level", "mode", "gating"))
    if mode == "clip" and (level == "seq" or gating != "ratio"):
        allowed = f"{group}level token and {group}gating ratio"
        yield f"{group}mode clip: allowed with {allowed}, not with {level} and {gating}"
    threshold = advantage.is_correction_threshold
    if level != "off" and gating != "ratio" and len(threshold) == 2 and threshold[0] > 0:
        shown = " ".join(map(str, threshold))
        yield f"{group}threshold {shown}: allowed with {group}gating {gating}: one number, the largest {gating}"


def _clashes_of_adapters(args: Namespace) -> Iterator[str]:
    """Find settings with which OpenRLHF cannot train an adapter, or the engines cannot load the weights."""
    ds = args.ds
    if ds.load_in_4bit:
        yield "--ds.load_in_4bit: is not allowed, because the engines cannot load weights of 4 bits"
    if not ds.lora.rank:
        return
    if not ds.lora.target_modules:
        yield "--ds.lora.target_modules: is empty; allowed: all-linear, or names of modules, such as q_proj v_proj"
    where = f"--ds.lora.rank {ds.lora.rank}"
    if args.train.enable_ema:
        yield f"{where}: allowed only without --train.enable_ema, because the averaged model has no adapter"
    if ds.tensor_parallel_size > 1:
        yield f"{where}: allowed only with --ds.tensor_parallel_size 1, not {ds.tensor_parallel_size}"


def _clashes_of_muon(args: Namespace) -> Iterator[str]:
    """Find settings of OpenRLHF's with which DeepSpeed refuses Muon, or fails at its first step."""
    ds, stage = args.ds, args.ds.zero_stage
    fails = {
        "--ds.zero_stage 3": stage == 3,
        "--ds.adam_offload": stage in (1, 2) and ds.adam_offload,
        f"--ds.grad_accum_dtype {ds.grad_accum_dtype}": stage in (1, 2) and _accumulates_in_another_type(ds),
    }
    for name in ("actor", "critic") if args.algo.advantage.estimator == "gae" else ("actor",):
        if getattr(args, name).optim == "muon":
            for other in (flag for flag, does in fails.items() if does):
                yield f"--{name}.optim muon: DeepSpeed does not have it with {other}; allowed: adam, or muon without it"


def _accumulates_in_another_type(ds: Namespace) -> bool:
    return (ds.grad_accum_dtype or "").replace("bfloat", "bf").replace("float", "fp") not in ("", ds.param_dtype)
