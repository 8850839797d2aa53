"""Plans a training command on paper: GPUs, memory, tokens, time, staleness, disk, and problems."""

import contextlib
import json
import math
import os
import shutil
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path

from openrlhf_bapo.flags.checks import gpu_groups
from openrlhf_bapo.flags.clashes import find_clashes, num_actor_gpus
from openrlhf_bapo.flags.input_files import count_rows, model_length, nearest_folder, warn
from openrlhf_bapo.openrlhf.run_counts import planned_steps
from openrlhf_bapo.openrlhf.settings import is_decoupled
from openrlhf_bapo.planning.actor_memory import TrainingSetup, dynamic_batch_tokens, host_terms, training_phases
from openrlhf_bapo.planning.checkpoints import checkpoint_terms, replay_term
from openrlhf_bapo.planning.engine_memory import (
    EngineSetup,
    colocated_phases,
    engine_host_terms,
    engine_phase,
    kv_bytes_per_token,
    kv_cache,
)
from openrlhf_bapo.planning.model_shape import KNOWN_SHAPES, MODEL_TYPES, ModelShape
from openrlhf_bapo.planning.terms import Phase, Term
from openrlhf_bapo.planning.time import rollout_seconds, step_flops
from openrlhf_bapo.rules.settings import clip_rule_from_args

GIB = 2**30
_SMALLER_SAMPLES = (
    "raise --ds.ring_attn_size, or lower --{0}.max_tokens_per_gpu, --{0}.micro_batch_size or --data.max_len"
)
REMEDIES = {
    "generation": "lower --vllm.gpu_memory_utilization",
    "log-probs": _SMALLER_SAMPLES.format("rollout"),
    "backward through the logits": _SMALLER_SAMPLES.format("train"),
    "backward through a layer": _SMALLER_SAMPLES.format("train"),
    "optimizer step": "give --ds.zero_stage 3, more GPUs, or --ds.adam_offload",
    "weight sync": "give --vllm.enable_sleep and --ds.enable_sleep",
}
"""Remedy for each phase that may be too large."""


@dataclass(frozen=True)
class Machine:
    """One GPU, and how far a run uses it. Defaults are an H100 SXM's (NVIDIA's data sheet, without sparsity)."""

    gpu_memory: float = 80
    """GiB."""

    gpu_tflops: float = 989
    """10^12 bf16 operations per second."""

    gpu_bandwidth: float = 3350
    """Memory bandwidth, in 10^9 bytes per second."""

    utilization: float = 0.4
    """Fraction of `gpu_tflops` that training reaches: an assumption."""

    response_tokens: int | None = None
    """Mean length of a response; None: the longest."""


@dataclass
class Plan:
    """Facts to print, and problems."""

    facts: dict[str, str] = field(default_factory=dict)
    """Text by title."""

    phases: dict[str, list[Phase]] = field(default_factory=dict)
    """Phases by kind of GPU."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Planned seconds of a step's rollout and training."""

    host: list[Term] = field(default_factory=list)
    """Host memory, per GPU except for the replay pool."""

    problems: list[str] = field(default_factory=list)
    """One line each, with the flag to change."""


def read_shape(model: str) -> ModelShape:
    """Read a model's shape from a folder's config.json, from `KNOWN_SHAPES`, or from the hub; else ValueError."""
    try:
        if os.path.isdir(model):
            return _shape_of(Path(model) / "config.json")
        if model in KNOWN_SHAPES:
            return KNOWN_SHAPES[model]
        from huggingface_hub import hf_hub_download

        return _shape_of(Path(hf_hub_download(model, "config.json")))
    except Exception as error:  # no such folder, repository or network, or another architecture
        allowed = f"a folder with a config.json, a model on the hub, or without network {', '.join(KNOWN_SHAPES)}"
        raise ValueError(f"{model}: {str(error).splitlines()[0]}; allowed: {allowed}") from None


def _shape_of(file: Path) -> ModelShape:
    from transformers import AutoConfig

    values, length = json.loads(file.read_text()), None
    if values.get("model_type") in MODEL_TYPES:  # `ModelShape` refuses others
        config = AutoConfig.for_model(**values)
        values, length = config.to_dict(), model_length(config)  # with transformers' defaults
    shape = ModelShape.from_config(values)
    return replace(shape, max_position_embeddings=length or shape.max_position_embeddings)


def make_plan(args: Namespace, shape: ModelShape, machine: Machine) -> Plan:
    """Plan a run of the actor's model; `args` are from `arguments.parse`."""
    plan = Plan(problems=list(find_clashes(args, shape.num_attention_heads, shape.max_position_embeddings)))
    plan.facts["model"] = f"{args.actor.model_name_or_path}, {shape.num_parameters / 1e9:.2f} billion parameters"
    if adapter := _num_adapter(args, shape):
        plan.facts["trained"] = f"an adapter of rank {args.ds.lora.rank}, {adapter / 1e6:,.1f} million parameters"
    _count_gpus(plan, args)
    _count_steps(plan, args)
    if plan.problems:
        return plan  # with sizes that do not divide there is no memory to plan
    if args.partial.token_budget and not args.offpolicy.lag:
        _plan_token_budget(plan, args, shape)
    _plan_rollout(plan, args, shape, machine)
    _plan_disk(plan, args, shape)
    _plan_memory(plan, args, shape, machine)
    return plan


def _plan_rollout(plan: Plan, args: Namespace, shape: ModelShape, machine: Machine) -> None:
    engine = engine_setup(args)
    cache = kv_cache(shape, engine, int(machine.gpu_memory * GIB))
    if cache.fits:
        _plan_times(plan, args, shape, machine)
        sequences = f"{cache.num_sequences * args.vllm.num_engines:,.0f} sequences of {engine.max_len:,} tokens"
        plan.facts["KV cache of all engines"] = sequences
    else:
        left = f"{max(cache.budget, 0) / GIB:.1f} GiB are left for KV"
        plan.problems.append(
            f"--vllm.gpu_memory_utilization {args.vllm.gpu_memory_utilization}: {left}, not enough for one sequence of "
            f"--data.max_len {engine.max_len}; raise it, or --vllm.tensor_parallel_size {engine.tensor_parallel_size}"
        )


def _plan_disk(plan: Plan, args: Namespace, shape: ModelShape) -> None:
    for flag, terms in disk_terms(args, shape).items():
        size = sum(term.bytes for term in terms) / GIB
        parts = "; ".join(f"{term.name} {term.bytes / GIB:,.1f} GiB = {term.formula}" for term in terms)
        plan.facts[f"disk, {flag}"] = f"{size:,.1f} GiB ({parts}); free here: {_room(flag, args)[1] / GIB:,.1f} GiB"
    if args.ckpt.save_hf:
        size = sum(term.bytes for term in disk_terms(args, shape)["--ckpt.output_dir"]) / GIB
        plan.facts["disk, --ckpt.save_hf"] = f"{size:,.1f} GiB more with each checkpoint, never removed"


def _plan_memory(plan: Plan, args: Namespace, shape: ModelShape, machine: Machine) -> None:
    setup, engine, gpu_bytes = training_setup(args), engine_setup(args), int(machine.gpu_memory * GIB)
    plan.host = host_terms(shape, setup)
    if args.train.colocate_all and not args.train.async_enable:
        plan.phases["every GPU"] = colocated_phases(shape, setup, engine, gpu_bytes)
        plan.host += engine_host_terms(shape, engine)
    else:
        plan.phases["an actor's GPU"] = training_phases(shape, setup)
        plan.phases["an engine's GPU"] = [engine_phase(shape, engine, gpu_bytes)]
    if args.replay.ratio:
        plan.host.append(_full_pool(args))
    for gpu, phases in plan.phases.items():
        phase = max(phases, key=lambda phase: phase.total)
        if phase.total > gpu_bytes:
            terms = sorted(phase.terms, key=lambda term: term.bytes, reverse=True)
            largest = ", ".join(f"{term.name} {term.bytes / GIB:.1f}" for term in terms[:3])
            plan.problems.append(
                f"{gpu} needs {phase.total / GIB:.1f} GiB of {machine.gpu_memory:g} in the phase "
                f"{phase.name!r} (largest: {largest} GiB); {REMEDIES[phase.name]}"
            )


def _full_pool(args: Namespace) -> Term:
    # Returns and the engine's log-probs, with a KL loss the reference's log-probs, with GAE values.
    columns = 2 + (args.algo.kl.use_loss and args.algo.kl.init_coef > 0) + bool(args.critic.model_name_or_path)
    return replay_term(
        capacity=args.replay.capacity,
        samples_per_group=args.rollout.n_samples_per_prompt,
        tokens_per_sample=args.data.max_len,
        num_extra_columns=columns,
    )


def disk_terms(args: Namespace, shape: ModelShape) -> dict[str, list[Term]]:
    """Return the bytes that a run writes, by the flag of the folder. A critic counts as a model of the actor's size.

    Not counted: models in Hugging Face's format beside the checkpoints, unfinished responses.
    """
    n, weight_bytes = shape.num_parameters, 4 if args.ds.param_dtype == "fp32" else 2
    adapter = _num_adapter(args, shape)
    name, saved = ("the adapter", adapter) if adapter else ("the model", n)
    terms = {"--ckpt.output_dir": [Term(name, weight_bytes * saved, f"{saved:,} parameters x {weight_bytes} bytes")]}
    num_kept = (0 < args.ckpt.save_steps < math.inf) * args.ckpt.max_num + _keeps_the_best(args)
    if num_kept and not args.ckpt.disable_ds:
        models = {"actor": n} | ({"critic": n} if args.critic.model_name_or_path else {})
        pool = _full_pool(args) if args.replay.ratio else None
        terms["--ckpt.path"] = checkpoint_terms(models, num_kept, weight_bytes, pool, adapter)
        if args.train.enable_ema:
            size, formula = num_kept * 4 * n, f"{num_kept} x {n:,} parameters x 4 bytes"
            terms["--ckpt.path"].append(Term("averaged weights", size, formula))
    return terms


def _keeps_the_best(args: Namespace) -> bool:
    """Return whether OpenRLHF keeps the checkpoint of the best evaluation beside those of --ckpt.max_num."""
    evaluates = args.eval.dataset and 0 < args.eval.steps < math.inf
    return bool(evaluates and args.ckpt.best_metric_key != "none")


def _room(flag: str, args: Namespace) -> tuple[Path, int]:
    """Return the folder of a flag, and the bytes that are free on its disk or in files that the run replaces."""
    of_checkpoints = flag == "--ckpt.path"
    folder = Path(args.ckpt.path if of_checkpoints else args.ckpt.output_dir)
    replaced = (file for file in folder.glob("_*/**/*" if of_checkpoints else "*") if file.is_file())
    return folder, shutil.disk_usage(nearest_folder(folder)).free + sum(file.stat().st_size for file in replaced)


def disk_warnings(args: Namespace, shape: ModelShape) -> list[str]:
    """Return one line per folder whose disk, on this machine, is too small for the run's files, or for both folders."""
    found, terms_of_flags = [], disk_terms(args, shape)
    for flag, terms in terms_of_flags.items():
        folder, room = _room(flag, args)
        if (needed := sum(term.bytes for term in terms)) > room:
            best = " and the best evaluation's" * _keeps_the_best(args)
            of = f", with --ckpt.max_num {args.ckpt.max_num} checkpoints{best}" if flag == "--ckpt.path" else ""
            found.append(f"{flag} {folder}: a run writes {needed:,} bytes{of}, and {room:,} are free")
    rooms = [_room(flag, args) for flag in terms_of_flags]
    disks = [nearest_folder(folder) for folder, _ in rooms]
    if not found and len(disks) == 2 and disks[0].stat().st_dev == disks[1].stat().st_dev:
        room = sum(room for _, room in rooms) - shutil.disk_usage(disks[0]).free  # which both rooms have
        if (needed := sum(term.bytes for terms in terms_of_flags.values() for term in terms)) > room:
            both = " and ".join(f"{flag} {folder}" for flag, (folder, _) in zip(terms_of_flags, rooms, strict=True))
            found.append(f"{both}, on one disk: a run writes {needed:,} bytes, and {room:,} are free")
    return found


def warn_of_small_disks(args: Namespace) -> None:
    """Print `disk_warnings` for a model in a local folder to stderr; `args` are flat, names with dots."""
    from openrlhf.utils.config import hierarchize

    model = vars(args)["actor.model_name_or_path"]
    with contextlib.suppress(ValueError):  # an architecture that is not supported
        for warning in disk_warnings(hierarchize(args), read_shape(model)) if os.path.isdir(model) else []:
            warn(warning)


def training_setup(args: Namespace) -> TrainingSetup:
    """Return the actor's training setup from `args`."""
    if args.train.dynamic_batch_enable:
        size = args.ds.ring_attn_size * args.ds.tensor_parallel_size
        train_tokens, forward_tokens = (
            dynamic_batch_tokens(limit, args.data.max_len, size)
            for limit in (args.train.max_tokens_per_gpu, args.rollout.max_tokens_per_gpu)
        )
    else:
        train_tokens, forward_tokens = (
            group.micro_batch_size * args.data.max_len for group in (args.train, args.rollout)
        )
    return TrainingSetup(
        num_gpus=num_actor_gpus(args),
        micro_batch_tokens=train_tokens,
        forward_tokens=forward_tokens,
        zero_stage=args.ds.zero_stage,
        adam_offload=args.ds.adam_offload,
        zpg=args.ds.zpg,
        grad_accum_bytes=4 if args.ds.grad_accum_dtype in ("fp32", "float32") else 2,
        overlap_comm=args.ds.overlap_comm,
        ring_attn_size=args.ds.ring_attn_size,
        tensor_parallel_size=args.ds.tensor_parallel_size,
        gradient_checkpointing=args.actor.gradient_checkpointing_enable,
        enable_sleep=args.ds.enable_sleep,
        enable_ema=args.train.enable_ema,
        has_reference=args.algo.kl.init_coef > 0 and (args.train.colocate_all or args.train.colocate_actor_ref),
        reference_offload=args.ref.offload,
        temperature=args.rollout.temperature,
        entropy_coef=args.actor.entropy_coef,
        lora_rank=args.ds.lora.rank,
        lora_targets=_lora_targets(args),
    )


def _lora_targets(args: Namespace) -> tuple[str, ...]:
    return () if args.ds.lora.target_modules == "all-linear" else tuple(args.ds.lora.target_modules)


def _num_adapter(args: Namespace, shape: ModelShape) -> int:
    """Count the parameters of the LoRA adapter; 0 without one."""
    return args.ds.lora.rank * sum(shape.adapter_sizes(_lora_targets(args)))


def engine_setup(args: Namespace) -> EngineSetup:
    """Return the setup of the rollout engines from `args`."""
    return EngineSetup(
        max_len=args.data.max_len,
        tensor_parallel_size=args.vllm.tensor_parallel_size,
        gpu_memory_utilization=args.vllm.gpu_memory_utilization,
        enforce_eager=args.vllm.enforce_eager,
        enable_sleep=args.vllm.enable_sleep,
    )


def _count_gpus(plan: Plan, args: Namespace) -> None:
    groups = gpu_groups(args)
    if "engines" not in groups:
        plan.facts["GPUs"] = f"{groups['actor']}, where training and rollout take turns"
    else:
        plan.facts["GPUs"] = f"{sum(groups.values())}: " + ", ".join(f"{n} {name}" for name, n in groups.items())
    unplanned = ["memory of the reference model's GPUs"] * ("reference" in groups)
    if args.critic.model_name_or_path or not args.reward.remote_url:
        unplanned.append("memory and time of critic and reward model")
    if unplanned:
        plan.facts["not planned"] = ", ".join(unplanned)


def _count_steps(plan: Plan, args: Namespace) -> None:
    num_prompts, num_samples = args.rollout.batch_size, args.rollout.n_samples_per_prompt
    fresh, length = num_prompts * num_samples, args.data.max_len
    num_steps = _num_optimizer_steps(args)
    facts, size = plan.facts, args.train.batch_size
    tokens = f"at most {fresh * length / 1e6:,.1f} million tokens"
    facts["rollout"] = f"{num_prompts} prompts x {num_samples} samples, {tokens}"
    tokens = f"at most {size * length / 1e6:,.1f} million tokens"
    facts["optimizer steps per rollout"] = f"{num_steps}, each of {size} samples, {tokens}"
    if left := fresh % size:
        facts["samples left over"] = f"{left} of a rollout's {fresh} do not fill an optimizer step"
    queued = args.train.async_queue_size if args.train.async_enable else 0
    if args.train.async_enable:
        # Steps that a sample of a rollout for several steps waits, behind samples that do not fill a batch.
        generated = args.rollout.vllm_generate_batch_size
        queued += (num_prompts - math.gcd(num_prompts, generated) + generated - 1) // num_prompts
    staleness = {"fresh samples": queued + (args.partial.max_staleness if args.partial.token_budget else 0)}
    if args.replay.ratio:
        staleness["replayed samples"] = args.replay.max_staleness
    facts["staleness in policy versions"] = ", ".join(f"{what} at most {n}" for what, n in staleness.items())
    if lag := args.offpolicy.lag:
        waiting = f"{lag} rollouts wait ({lag * num_prompts:,} prompts)"
        facts["lag"] = f"{waiting}; staleness is {lag} from an episode's training step {lag + 1} on"
    if args.train.partial_rollout_enable:
        facts["partial rollouts"] = "a response continues across weight updates; each token knows its policy version"
    facts["the last optimizer step"] = f"trains on samples of a policy {num_steps - 1} optimizer steps ago, or older"
    dataset = args.data.prompt_dataset
    if dataset and os.path.isfile(dataset) and (rows := count_rows(Path(dataset))) is not None:
        rows = min(rows, args.data.max_samples)
        facts["training steps"] = f"{planned_steps(args, rows)} from {rows:,} prompts"


def _num_samples(args: Namespace) -> int:
    """Return the maximum number of samples in a training step, fresh and replayed."""
    fresh = args.rollout.batch_size
    return (fresh + round(args.replay.ratio * fresh)) * args.rollout.n_samples_per_prompt


def _num_optimizer_steps(args: Namespace) -> int:
    """Return the maximum number of optimizer steps in a training step."""
    return _num_samples(args) // args.train.batch_size * args.train.max_epochs


def num_ratio_forwards(args: Namespace, length: int) -> int:
    """Count the optimizer steps in a training step that need a forward without gradient over all their tokens first.

    With `--bapo.scope update`, m2 and balanced these are the steps of several micro-batches. Without replay, the first
    step needs no forward: the same weights have just computed its log-probs (`UpdateWindows`). With
    `--bapo.smoothing` or a half-life no step needs one. `length` is the mean number of tokens per sample.
    """
    rule = clip_rule_from_args(args)
    if rule is None or not rule.needs_tally_first or rule.config.scope != "update":
        return 0
    setup = training_setup(args)
    gpus_per_sample = setup.ring_attn_size * setup.tensor_parallel_size
    samples_per_rank = args.train.batch_size // (setup.num_gpus // gpus_per_sample)
    at_once = args.train.micro_batch_size
    if args.train.dynamic_batch_enable:
        at_once = max(1, args.train.max_tokens_per_gpu * gpus_per_sample // length)
    return 0 if samples_per_rank <= at_once else _num_optimizer_steps(args) - (not args.replay.ratio)


def _plan_token_budget(plan: Plan, args: Namespace, shape: ModelShape) -> None:
    budget, longest = args.partial.token_budget, args.rollout.max_new_tokens or args.data.max_len
    num_rollouts = math.ceil(longest / budget)
    num_in_flight = math.ceil(args.partial.oversample * args.rollout.batch_size)
    rollouts = f"a response of {longest:,} takes {num_rollouts} rollouts or more"
    in_flight = f"at most {num_in_flight} prompts in flight for {args.rollout.batch_size}"
    plan.facts["token budget"] = f"{budget:,} per rollout: {rollouts}; {in_flight}"
    if 0 < args.partial.max_segments < num_rollouts:
        what = {"drop": "dropped with their groups", "finish": "ended there, as truncated ones"}[args.partial.on_stale]
        limit = f"--partial.max_segments {args.partial.max_segments} x {budget:,} tokens"
        plan.facts["responses cut"] = f"after {limit} they are {what}"
    # The prefix of the longest response grows by the budget from rollout to rollout.
    prompt = max(args.data.max_len - longest, 0)
    again = sum(prompt + budget * past for past in range(1, num_rollouts))
    size = again * kv_bytes_per_token(shape, args.vllm.tensor_parallel_size) / GIB
    prefix = f"{again:,} tokens of prompt and prefix for a response of {longest:,}"
    plan.facts["prefilled again"] = f"{prefix}, {size:,.2f} GiB of KV per GPU"


def _plan_times(plan: Plan, args: Namespace, shape: ModelShape, machine: Machine) -> None:
    setup, engine = training_setup(args), engine_setup(args)
    fresh = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    longest = args.rollout.max_new_tokens or args.data.max_len
    response = machine.response_tokens or longest
    prompt = max(args.data.max_len - longest, 0)
    length = prompt + response
    trained = _num_samples(args) * length * args.train.max_epochs
    num_forwards = num_ratio_forwards(args, length)
    ratio_tokens = num_forwards * args.train.batch_size * length
    recomputed = _num_samples(args) if is_decoupled(args) else fresh  # replayed samples keep their log-probs otherwise
    of_reference = fresh if setup.has_reference else 0  # on GPUs of its own it takes none of the actor's time

    def training_time(trained_tokens: int, forward_tokens: int) -> tuple[float, int]:
        flops = step_flops(
            shape,
            trained_tokens=trained_tokens,
            forward_tokens=forward_tokens,
            length=length,
            gradient_checkpointing=setup.gradient_checkpointing,
            is_adapter=setup.lora_rank > 0,
        )
        return flops / (setup.num_gpus * machine.gpu_tflops * 1e12 * machine.utilization), flops

    training, flops = training_time(trained, (recomputed + of_reference) * length + ratio_tokens)
    cache = kv_cache(shape, engine, int(machine.gpu_memory * GIB))
    rollout = rollout_seconds(
        shape,
        engine,
        cache,
        num_sequences=math.ceil(fresh / args.vllm.num_engines),
        prompt_tokens=prompt,
        response_tokens=response,
        bytes_per_second=machine.gpu_bandwidth * 1e9,
    )
    plan.seconds = {"rollout": rollout, "training": training}
    speed = f"{machine.utilization:.0%} of {machine.gpu_tflops:g} TFLOP/s per GPU"
    plan.facts[f"time with responses of {response:,} tokens"] = (
        f"rollout {rollout / 60:,.1f} min (memory read at {machine.gpu_bandwidth:g} GB/s), "
        f"training {training / 60:,.1f} min ({flops / 1e18:,.2f} EFLOP at {speed}), with prompts of {prompt:,} tokens"
    )
    if num_forwards:
        seconds, flops = training_time(0, ratio_tokens)
        steps = f"before {num_forwards} of {_num_optimizer_steps(args)} optimizer steps"
        cost = f"{seconds / 60:,.1f} min ({flops / 1e18:,.2f} EFLOP)"
        plan.facts["of which the ratio forward"] = f"{cost} for the clip bounds, {steps}"
