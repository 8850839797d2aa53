"""Rules over several flags. A run that breaks one of them would fail only after Ray has started."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from openrlhf_bapo.flags.input_files import listed
from openrlhf_bapo.flags.mistakes import shown
from openrlhf_bapo.openrlhf.settings import (
    ESTIMATORS_OVER_SAMPLES,
    compares_engine,
    has_clip_rule,
    num_ranks_of,
    trained_models,
)

Problems = Iterator[tuple[str, str]]
"""Flags, separated by spaces, and what is wrong with their values or allowed."""


def find_clashes(args: Namespace, num_heads: int | None = None, num_positions: int | None = None) -> Iterator[str]:
    """Yield one line per clash.

    Args:
        args: OpenRLHF's flags and ours, nested.
        num_heads: attention heads of the actor's model; None: not known.
        num_positions: the actor's positions, in tokens; None: not known.
    """
    for flags, text in chain(
        _missing(args),
        _clashes_of_gpus(args, num_heads),
        _clashes_of_other_models(args),
        _clashes_of_token_budget(args),
        _clashes_of_replay(args),
        _clashes_of_batches(args),
        _clashes_of_shares(args),
        _clashes_of_lengths(args, num_positions),
        _clashes_of_data(args),
        _clashes_of_sampling(args),
        _clashes_of_corrections(args),
        _clashes_of_adapters(args),
        _clashes_of_muon(args),
    ):
        yield f"{_shown(args, flags)}: {text}"


def _shown(args: Namespace, flags: str) -> str:
    return " x ".join(shown(flag, attrgetter(flag)(args)) for flag in flags.split())


def num_actor_gpus(args: Namespace) -> int:
    """Count the GPUs of the actor, on all nodes."""
    return args.actor.num_nodes * args.actor.num_gpus_per_node


def _missing(args: Namespace) -> Problems:
    if not args.actor.model_name_or_path:
        yield "actor.model_name_or_path", "is missing; allowed: a model's folder, or its name on the hub"
    if not args.data.prompt_dataset:
        allowed = "a file or folder of prompts, or a data set's name on the hub"
        yield "data.prompt_dataset", f"is missing; allowed: {allowed}"
    if not (args.reward.remote_url or args.train.agent_func_path or args.reward.model_name_or_path):
        allowed = "a reward-function file or HTTP URLs, or --reward.model_name_or_path, or --train.agent_func_path"
        yield "reward.remote_url", f"is missing, and so are the other sources of rewards; allowed: {allowed}"
    if not args.vllm.num_engines:
        yield "vllm.num_engines", "is missing; allowed: 1 or more, since only vLLM generates rollouts"


def _clashes_of_gpus(args: Namespace, num_heads: int | None) -> Problems:
    train, ds, vllm, num_gpus = args.train, args.ds, args.vllm, num_actor_gpus(args)
    num_engine_gpus = (vllm.num_engines or 0) * vllm.tensor_parallel_size
    if train.colocate_all and not train.async_enable and num_engine_gpus != num_gpus:
        allowed = f"with --train.colocate_all the product must be the actor's {num_gpus} GPUs"
        yield "vllm.num_engines vllm.tensor_parallel_size", allowed
    if num_heads and num_heads % vllm.tensor_parallel_size:
        yield "vllm.tensor_parallel_size", f"must divide the model's {num_heads} attention heads"
    if num_gpus % (ds.ring_attn_size * ds.tensor_parallel_size):
        yield "ds.ring_attn_size ds.tensor_parallel_size", f"must divide the actor's {num_gpus} GPUs"
    if ds.zero_stage == 0 and _accumulates_in_another_type(ds):
        yield "ds.grad_accum_dtype", f"with --ds.zero_stage 0 it must be --ds.param_dtype {ds.param_dtype}"
    if train.dynamic_batch_enable and ds.zero_stage in (1, 2):
        # accumulate_dynamic_batches turns DeepSpeed's own counting of micro-batches off, which these need.
        if ds.deepcompile:
            yield "ds.deepcompile", "with --train.dynamic_batch_enable, allowed with --ds.zero_stage 0 and 3"
        if ds.overlap_comm and ds.zero_stage == 1:
            yield "ds.overlap_comm", "with --train.dynamic_batch_enable, allowed with all --ds.zero_stage but 1"
    if train.enable_ema and ds.zero_stage == 3:
        # DeepSpeed's GatheredParameters drops what OpenRLHF's moving_average writes into the gathered copy.
        effect = "OpenRLHF's average keeps the initial weights, and saves them"
        yield "train.enable_ema", f"with --ds.zero_stage 3 {effect}; allowed with --ds.zero_stage 0, 1 and 2"
    if num_gpus % ds.zpg:
        yield "ds.zpg", f"must divide the actor's {num_gpus} GPUs"


def _clashes_of_other_models(args: Namespace) -> Problems:
    """Find settings of reference model, critic and reward model that OpenRLHF or Ray would refuse, or train nothing."""
    train, ds, num_gpus = args.train, args.ds, num_actor_gpus(args)
    models = ("actor", "ref", "critic", "reward")
    kl, num_samples = args.algo.kl, args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if kl.target and kl.init_coef > 0 and num_samples >= 5 * kl.horizon:
        # AdaptiveKLController multiplies the coefficient by 1 + error x samples / horizon, the error from -0.2 to 0.2.
        effect = f"a rollout's {num_samples} samples can make the KL coefficient negative"
        yield "algo.kl.horizon", f"counts samples, and {effect}; allowed: {num_samples // 5 + 1} or more"
    grids = {name: (getattr(args, name).num_nodes, getattr(args, name).num_gpus_per_node) for name in models}
    flags = {name: f"{name}.num_nodes {name}.num_gpus_per_node" for name in models}
    used = {"ref"} if args.algo.kl.init_coef > 0 else set()
    used |= {*trained_models(args)} - {"actor"}
    if args.critic.freezing_steps >= 0 and "critic" not in used:
        estimator = f"--algo.advantage.estimator {args.algo.advantage.estimator}"
        yield "critic.freezing_steps", f"{estimator} has no critic, so that these steps train nothing; allowed: -1"
    if args.actor.aux_loss_coef > 1e-8 and "critic" in used:  # OpenRLHF's threshold
        effect = "OpenRLHF looks for this loss in the critic's outputs too, which have none"
        yield "actor.aux_loss_coef", f"{effect}; allowed without --algo.advantage.estimator gae"
    used |= set() if args.reward.remote_url or train.agent_func_path else {"reward"}
    has_pair = train.colocate_critic_reward and "critic" in used  # critic and reward model on GPUs of their own

    for name in sorted(used):
        if min(grids[name]) < 1:
            yield flags[name], "allowed: 1 or more"
        if math.prod(grids[name]) % (ds.ring_attn_size * ds.tensor_parallel_size):
            yield flags[name], f"must be a multiple of {_shown(args, 'ds.ring_attn_size ds.tensor_parallel_size')}"
        if name != "ref" and train.colocate_all and not has_pair and math.prod(grids[name]) > num_gpus:
            yield flags[name], f"allowed with --train.colocate_all: up to the actor's {num_gpus} GPUs"
    if "ref" in used and (train.colocate_all or train.colocate_actor_ref) and grids["ref"] != grids["actor"]:
        actors = "{} x {}".format(*grids["actor"])
        yield flags["ref"], f"where actor and reference model share GPUs, both must be the actor's {actors}"
    if has_pair and grids["reward"] != grids["critic"]:
        yield flags["reward"], f"must equal {_shown(args, flags['critic'])} with --train.colocate_critic_reward"


def _clashes_of_token_budget(args: Namespace) -> Problems:
    """Find flags that a token budget, or a lag, cannot be combined with."""
    if not args.partial.token_budget:
        return
    flag, size = "offpolicy.lag" if args.offpolicy.lag else "partial.token_budget", args.rollout.batch_size
    if args.data.max_images_per_prompt:
        yield flag, "allowed without --data.max_images_per_prompt"
    if args.train.agent_func_path:
        yield flag, "cannot keep an agent's turns; allowed without --train.agent_func_path"
    if args.rollout.vllm_generate_batch_size not in (None, size):
        reason = f"{_shown(args, flag)} decides how many prompts are in flight"
        yield "rollout.vllm_generate_batch_size", f"{reason}; allowed: --rollout.batch_size {size}"


def _clashes_of_batches(args: Namespace) -> Problems:
    rollout, train, size = args.rollout, args.train, args.train.batch_size
    num_samples = rollout.batch_size * rollout.n_samples_per_prompt
    micro_batch_size = 1 if train.dynamic_batch_enable else train.micro_batch_size
    per_rank = "" if train.dynamic_batch_enable else f"--train.micro_batch_size {micro_batch_size} on each of "
    if rollout.n_samples_per_prompt == 1 and args.algo.advantage.estimator in ESTIMATORS_OVER_SAMPLES:
        estimator = f"--algo.advantage.estimator {args.algo.advantage.estimator}"
        yield "rollout.n_samples_per_prompt", f"{estimator} compares the responses to a prompt; allowed: 2 or more"
    # A smaller --rollout.vllm_generate_batch_size makes smaller rollouts.
    num_made = min(rollout.batch_size, rollout.vllm_generate_batch_size or math.inf) * rollout.n_samples_per_prompt
    if size > num_made:
        yield "train.batch_size", f"a rollout has only {num_made} samples"
    num_ranks = num_ranks_of(args)
    for name, num in num_ranks.items():
        if not num or size % (num * micro_batch_size):
            ranks = f"the {num} data-parallel ranks of {_shown(args, f'{name}.num_gpus_per_node')}"
            yield "train.batch_size", f"must be a multiple of {num * micro_batch_size}, {per_rank}{ranks}"
    # A dynamic batch leaves out what fills no optimizer step, always the samples of middle length.
    whole = {
        "--replay.ratio": args.replay.ratio,
        f"--policy_loss {args.policy_loss}": has_clip_rule(args),
        "--train.dynamic_batch_enable": train.dynamic_batch_enable,
    }
    if (reason := next((flag for flag, is_given in whole.items() if is_given), None)) and num_samples % size:
        total = f"--rollout.batch_size x --rollout.n_samples_per_prompt, which is {num_samples}"
        yield "train.batch_size", f"with {reason} it must divide {total}"
    if num_samples // rollout.micro_batch_size < num_ranks["actor"]:
        yield (
            "rollout.micro_batch_size",
            f"leaves fewer than {num_ranks['actor']} micro-batches of a rollout's {num_samples} samples, one for each "
            f"rank; allowed: up to {num_samples // num_ranks['actor']}",
        )
    if (rollout.vllm_generate_batch_size or 0) > rollout.batch_size:
        limit = f"more than --rollout.batch_size {rollout.batch_size} is allowed only"
        if not train.async_enable:
            yield "rollout.vllm_generate_batch_size", f"{limit} with --train.async_enable"
        if args.data.max_images_per_prompt:
            reason = "because samples with images that wait cannot be saved"
            yield "rollout.vllm_generate_batch_size", f"{limit} without --data.max_images_per_prompt, {reason}"


def _clashes_of_shares(args: Namespace) -> Problems:
    """Find ranks that OpenRLHF would give other numbers of samples than the others, which wait for them."""
    num_samples, num_ranks = args.rollout.batch_size * args.rollout.n_samples_per_prompt, num_ranks_of(args)
    # There is then one batch per rank of the actor, also for the critic.
    splits = {"--replay.ratio": args.replay.ratio, "--train.dynamic_batch_enable": args.train.dynamic_batch_enable}
    reason = next((flag for flag, is_given in splits.items() if is_given), None)
    if reason and num_ranks["actor"] % num_ranks.get("critic", 1):
        allowed = f"its data-parallel ranks must divide the actor's {num_ranks['actor']}"
        yield "critic.num_gpus_per_node", f"with {reason} {allowed}"
    for name, num in num_ranks.items():
        if num > 1 and not args.train.dynamic_batch_enable and num_samples % (args.rollout.micro_batch_size * num):
            ranks = f"the {num} data-parallel ranks of {_shown(args, f'{name}.num_gpus_per_node')}"
            yield "rollout.micro_batch_size", f"gives {ranks} unequal shares of a rollout's {num_samples} samples"


def _clashes_of_lengths(args: Namespace, num_positions: int | None) -> Problems:
    max_len, response = args.data.max_len, args.rollout.max_new_tokens or 0
    if num_positions and max_len > num_positions:
        yield "data.max_len", f"the model has {num_positions} positions"
    if response >= max_len:
        yield "rollout.max_new_tokens", f"must be below --data.max_len {max_len}, which counts the prompt too"
    if (args.reward.overlong_buffer_len or 0) >= (response or max_len):
        yield "reward.overlong_buffer_len", f"must be below the {response or max_len} tokens of a response"


def _clashes_of_data(args: Namespace) -> Problems:
    data = args.data
    # OpenRLHF refuses --ds.packing_samples with images, and not these, which pack too.
    packs = {
        "train.dynamic_batch_enable": args.train.dynamic_batch_enable,
        "ds.ring_attn_size": args.ds.ring_attn_size > 1,
    }
    for name in (name for name, does in packs.items() if does and data.max_images_per_prompt):
        effect = "packs samples, in which tokens of images get the positions of text"
        yield name, f"{effect}; allowed without --data.max_images_per_prompt"
    if data.input_template is not None and not takes_an_input(data.input_template):
        yield "data.input_template", "allowed: a text with {} for the input, other braces doubled"
    if data.input_template and data.apply_chat_template:
        yield "data.input_template", "allowed only without --data.apply_chat_template, which OpenRLHF uses instead"
    if args.eval.dataset and not (args.reward.remote_url or args.train.agent_func_path):
        sources = "--reward.remote_url or --train.agent_func_path, not with a reward model"
        yield "eval.dataset", f"OpenRLHF evaluates with {sources}"
    if args.eval.at_start and not args.eval.dataset:
        yield "eval.at_start", "does nothing without --eval.dataset"
    if data.prompt_probs is not None:
        num_sets = len(listed(data.prompt_dataset))
        probabilities = []
        with contextlib.suppress(ValueError):
            probabilities = [float(one) for one in data.prompt_probs.split(",")]
        if len(probabilities) != num_sets or min(probabilities) < 0 or not math.isclose(sum(probabilities), 1):
            yield "data.prompt_probs", f"allowed: {num_sets} numbers, one for each data set, that add up to 1"


def takes_an_input(template: str) -> bool:
    """Return whether OpenRLHF's `template.format(input)` contains the input."""
    try:
        return "{}" in template and "an input" in template.format("an input")
    except (ValueError, LookupError):
        return False


def _clashes_of_replay(args: Namespace) -> Problems:
    """Find settings that never replay a group, fewer groups than asked for, or groups that fill no optimizer step."""
    replay = args.replay
    if not replay.ratio:
        return
    num_samples, size = args.rollout.n_samples_per_prompt, args.train.batch_size
    if num_samples == 1 and replay.skip_uninformative:
        reason = "skips every group of --rollout.n_samples_per_prompt 1"
        yield "replay.skip_uninformative", f"{reason}; allowed: --no-replay.skip_uninformative"
    num_drawn, least = round(replay.ratio * args.rollout.batch_size), size // math.gcd(size, num_samples)
    if num_drawn < least:
        allowed = f"a ratio that draws at least {least}, to fill whole optimizer steps of --train.batch_size {size}"
        yield "replay.ratio", f"draws {num_drawn} groups per training step; allowed: {allowed}"
    if args.data.max_images_per_prompt:
        yield "replay.ratio", "allowed without --data.max_images_per_prompt"
    if replay.max_staleness < (least := 1 + args.offpolicy.lag):
        lag = f" with {_shown(args, 'offpolicy.lag')}" if least > 1 else ""
        reason = f"never replays, since a group's staleness is {least} in the training step after its own{lag}"
        yield "replay.max_staleness", f"{reason}; allowed: {least} or more"
    if replay.capacity < num_drawn:
        drawn = f"the {num_drawn} groups that --replay.ratio {replay.ratio} draws per training step"
        yield "replay.capacity", f"keeps fewer than {drawn}; allowed: {num_drawn} or more"


def _clashes_of_sampling(args: Namespace) -> Problems:
    """Refuse a nucleus where the engine's log-probs count: they are of the nucleus alone, and the actor's are not."""
    if args.rollout.top_p != 1 and (flag := compares_engine(args)):
        reason = f"changes the engine's log-probs, and {flag} uses them as the actor's"
        yield "rollout.top_p", f"{reason}; allowed: 1"


def _clashes_of_corrections(args: Namespace) -> Problems:
    """Find settings of IS correction that OpenRLHF's loss refuses, in its actors."""
    advantage, group = args.algo.advantage, "algo.advantage.is_correction_"
    level, mode, gating = (getattr(advantage, f"is_correction_{name}") for name in ("level", "mode", "gating"))
    if mode == "clip" and (level == "seq" or gating != "ratio"):
        allowed = f"--{group}level token and --{group}gating ratio"
        yield f"{group}mode", f"allowed with {allowed}, not with {level} and {gating}"
    threshold = advantage.is_correction_threshold
    if level != "off" and gating != "ratio" and len(threshold) == 2 and threshold[0] > 0:
        yield f"{group}threshold", f"allowed with --{group}gating {gating}: one number, the largest {gating}"


def _clashes_of_adapters(args: Namespace) -> Problems:
    """Find settings with which OpenRLHF cannot train an adapter, or the engines cannot load the weights."""
    ds = args.ds
    if ds.load_in_4bit:
        yield "ds.load_in_4bit", "is not allowed, because the engines cannot load weights of 4 bits"
    if not ds.lora.rank:
        return
    actor, critic = args.actor.model_name_or_path, args.critic.model_name_or_path
    is_new = critic == actor or (not critic and (args.reward.remote_url or args.train.agent_func_path))
    if args.algo.advantage.estimator == "gae" and is_new and ds.lora.target_modules != "all-linear":
        effect = "the critic's new value head would stay random"  # PEFT freezes a layer without an adapter
        yield "ds.lora.target_modules", f"{effect}; allowed with --algo.advantage.estimator gae: all-linear"
    if not ds.lora.target_modules:
        yield "ds.lora.target_modules", "is empty; allowed: all-linear, or names of modules, such as q_proj v_proj"
    if args.train.enable_ema:
        yield "ds.lora.rank", "allowed only without --train.enable_ema, because the averaged model has no adapter"
    if ds.tensor_parallel_size > 1:
        yield "ds.lora.rank", f"allowed only with --ds.tensor_parallel_size 1, not {ds.tensor_parallel_size}"


def _clashes_of_muon(args: Namespace) -> Problems:
    """Find settings of OpenRLHF's with which DeepSpeed refuses Muon, fails at its first step, or computes another."""
    ds, stage = args.ds, args.ds.zero_stage
    fails = {
        f"--ds.zero_stage {stage}": stage in (0, 3),  # with 0, the weights' step is their gradient: plain SGD
        "--ds.adam_offload": stage in (1, 2) and ds.adam_offload,
        f"--ds.grad_accum_dtype {ds.grad_accum_dtype}": stage in (1, 2) and _accumulates_in_another_type(ds),
        # It divides Muon's updates by the scale of the loss, 65536 at first, which they no longer have.
        "--ds.param_dtype fp16": stage in (1, 2) and ds.param_dtype == "fp16",
    }
    for name in trained_models(args):
        if getattr(args, name).optim == "muon":
            for other in (flag for flag, does in fails.items() if does):
                yield f"{name}.optim", f"DeepSpeed does not have it with {other}; allowed: adam, or muon without it"


def _accumulates_in_another_type(ds: Namespace) -> bool:
    return (ds.grad_accum_dtype or "").replace("bfloat", "bf").replace("float", "fp") not in ("", ds.param_dtype)
