"""Checks a training command without starting anything, and prints its configuration and a plan of its resources."""

import argparse
import contextlib
import io
import sys
import textwrap
from types import SimpleNamespace

from openrlhf_bapo.flags.input_files import warn
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.flags.values import check_values
from openrlhf_bapo.planning.terms import Term
from openrlhf_bapo.run.plan import GIB, Machine, Plan, disk_warnings, make_plan, read_shape

_MACHINE_HELP = {
    "gpu_memory": "memory of one GPU, in GiB",
    "gpu_tflops": "bf16 TFLOP/s of one GPU",
    "gpu_bandwidth": "memory bandwidth of one GPU, in GB/s",
    "utilization": "fraction of the TFLOP/s that training reaches",
}


def main(argv: list[str]) -> None:
    """Plan the training command with these flags. Exit code 2: a flag is wrong; 1: the run does not fit."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo plan", description=__doc__, allow_abbrev=False)
    parser.error = exit_with_one_line
    parser.add_argument("--plan.model", help="model to plan with (default: the actor's)")
    longest = "mean response length in tokens (default: the maximum)"
    parser.add_argument("--plan.response_tokens", type=int, help=longest)
    for name, text in _MACHINE_HELP.items():
        default = getattr(Machine, name)
        parser.add_argument(f"--plan.{name}", type=float, default=default, help=f"{text} (default: {default})")
    parsed, training = parser.parse_known_args(argv)
    try:
        check_values(vars(parsed))
    except FlagError as error:
        parser.error(str(error))
    ours = {name.removeprefix("plan."): value for name, value in vars(parsed).items()}
    given_model = ours.pop("model")

    from openrlhf_bapo.flags import checks
    from openrlhf_bapo.flags.arguments import parse

    with contextlib.redirect_stdout(io.StringIO()) as said:  # OpenRLHF prints remarks
        args = parse(training, checks.FILES)
    if args.ds.param_dtype == "fp32":
        parser.error("--ds.param_dtype fp32: is for CPUs, and the plan is for GPUs; allowed: bf16, fp16")
    longest = args.rollout.max_new_tokens or args.data.max_len
    if (mean := ours["response_tokens"]) and mean > longest:
        parser.error(f"--plan.response_tokens {mean}: allowed: up to {longest}, the longest response of the run")
    try:
        shape = read_shape(given_model or args.actor.model_name_or_path)
    except ValueError as error:
        parser.error(f"--{'plan.model' if given_model else 'actor.model_name_or_path'} {error}")
    print("configuration")
    print(configuration(args))
    for remark in said.getvalue().splitlines():
        print(f"OpenRLHF: {remark}")
    args.actor.model_name_or_path = given_model or args.actor.model_name_or_path  # which the plan names
    plan = make_plan(args, shape, Machine(**ours))
    print(describe(plan, ours["gpu_memory"]))
    for warning in disk_warnings(args, shape):
        warn(warning)
    if plan.problems:
        sys.exit(1)


def configuration(args: argparse.Namespace | SimpleNamespace) -> str:
    """Format all flags and values, one paragraph per group."""
    paragraphs = []
    for group, values in sorted(vars(args).items()):
        if group == "logger" and values.wandb.key:
            values.wandb.key = "(given)"  # it is a secret
        nested = _flatten(values) if isinstance(values, SimpleNamespace) else None
        text = " ".join(f"{name}={value}" for name, value in nested) if nested else str(values)
        paragraphs.append(textwrap.fill(f"{group}: {text}", 118, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(paragraphs)


def _flatten(values: SimpleNamespace, prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in sorted(vars(values).items()):
        found += _flatten(value, f"{prefix}{name}.") if isinstance(value, SimpleNamespace) else [(prefix + name, value)]
    return found


def describe(plan: Plan, gpu_memory: float) -> str:
    """Format a plan for GPUs with this many GiB as text."""
    width = max(map(len, plan.facts))
    lines = ["", "plan", *(f"  {what:{width}}  {text}" for what, text in plan.facts.items())]
    for gpu, phases in plan.phases.items():
        lines += ["", f"memory of {gpu}, of {gpu_memory:g} GiB"]
        lines += [f"  {phase.total / GIB:7.1f} GiB  {phase.name}" for phase in phases]
        largest = max(phases, key=lambda phase: phase.total)
        lines += [f"  the largest, {largest.name}:", *map(_described, largest.terms)]
    if plan.host:
        lines += ["", "host memory (per GPU; the replay pool once)", *map(_described, plan.host)]
    lines += ["", *(f"does not fit: {problem}" for problem in plan.problems)]
    return "\n".join(lines if plan.problems else [*lines, "everything fits"])


def _described(term: Term) -> str:
    return f"  {term.bytes / GIB:7.1f} GiB  {term.name} = {term.formula}"
