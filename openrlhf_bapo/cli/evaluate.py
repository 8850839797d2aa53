"""Evaluates a model on vLLM engines: the mean over n sampled responses to each problem (the paper's section 5.1: 16).

A killed run continues with the same --out. Exit code 1: some responses are ungraded; 2: a flag is wrong.
"""

import argparse
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tqdm import tqdm

from openrlhf_bapo import evaluation
from openrlhf_bapo.flags.clashes import takes_an_input
from openrlhf_bapo.flags.input_files import loading
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.flags.values import check_values
from openrlhf_bapo.math_tasks.metrics import CONFIDENCE, MACRO_AVERAGE, Estimate, GradedResponse, evaluation_metrics

_EVERY_ON_TERMINAL, _EVERY_IN_FILE = 0.2, 30
"""Seconds between two states of the progress bar."""


def main(argv: list[str] | None = None) -> None:
    """Evaluate. Flags from `argv`, or from the command line; a mistake ends with one line and exit code 2."""
    parser = make_parser()
    parser.error = exit_with_one_line
    args = parser.parse_args(argv)
    try:
        _check_flags(args)
        num_ungraded = _evaluate(args)
    except FlagError as error:
        exit_with_one_line(str(error))
    sys.exit(1 if num_ungraded else 0)


def make_parser() -> argparse.ArgumentParser:
    """Make the command line's parser."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder (from --ckpt.output_dir or --ckpt.save_hf), or name on the hub")
    add("--data", required=True, nargs="+", metavar="FILE", help="JSONL files; metrics are grouped by datasource")
    add("--out", required=True, metavar="DIR", help="folder of the results, from which a killed run continues")
    add("--input_key", default="input", help="key of the prompt (default: %(default)s)")
    add("--label_key", default="label", help="key of the label (default: %(default)s)")
    add("--apply_chat_template", action=argparse.BooleanOptionalAction, help="default: if the tokenizer has one")
    add("--input_template", help="OpenRLHF's --data.input_template, with {} for the input (default: none)")
    add("--max_problems", type=int, help="evaluate only the first problems of each file (default: all)")
    add("--n", type=int, default=16, help="responses per problem (default: %(default)s)")
    add("--temperature", type=float, default=0.6, help="sampling temperature (default: %(default)s)")
    add("--top_p", type=float, default=1.0, help="nucleus sampling (default: %(default)s)")
    longest = f"default: {evaluation.MAX_NEW_TOKENS}, or fewer if the model is too short for the longest prompt"
    add("--max_new_tokens", type=int, help=f"maximum tokens per response ({longest})")
    add("--seed", type=int, default=0, help="seed of sampling and of the confidence intervals (default: %(default)s)")
    add("--reward", help="reward-function file or URLs, like --reward.remote_url (default: the packaged math grader)")
    add("--pass_at", type=int, nargs="+", metavar="K", help="values of k in pass@k (default: powers of two up to n)")
    add("--num_engines", type=int, help="vLLM engines (default: as many as the GPUs allow; 1 on the CPU)")
    add("--tensor_parallel_size", type=int, default=1, help="GPUs per engine (default: %(default)s)")
    add("--gpu_memory_utilization", type=float, default=0.9, help="fraction of a GPU's memory (default: %(default)s)")
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse values out of range; fill in --pass_at."""
    check_values(vars(args))
    if args.input_template is not None and not takes_an_input(args.input_template):
        allowed = "a text with {} for the input, other braces doubled"
        raise FlagError(f"--input_template {args.input_template!r}: allowed: {allowed}")
    if args.input_template and args.apply_chat_template:
        raise FlagError("--input_template: allowed without --apply_chat_template, which OpenRLHF prefers")
    if args.pass_at is None:
        args.pass_at = [2**i for i in range(args.n.bit_length())]
    args.pass_at = sorted(set(args.pass_at))
    for k in args.pass_at:
        if not 1 <= k <= args.n:
            raise FlagError(f"--pass_at {k}: allowed: from 1 to --n {args.n}")


def _evaluate(args: argparse.Namespace) -> int:
    """Evaluate the unfinished problems, write and print the results, and return the number of ungraded responses."""
    endpoints = evaluation.reward_endpoints(args.reward)
    problems = evaluation.read_problems(args.data, args.input_key, args.label_key, args.max_problems)
    evaluation.check_gpus(args.num_engines, args.tensor_parallel_size)
    prompts = evaluation.make_prompts(
        problems,
        args.model,
        args.input_key,
        args.label_key,
        apply_chat_template=args.apply_chat_template,
        input_template=args.input_template,
        max_new_tokens=args.max_new_tokens,
    )
    if args.reward and Path(args.reward).is_file():
        with loading("--reward", args.reward, "reward_func"):
            pass
    settings = evaluation.content_settings(args.model, args.data, endpoints)
    names = "input_key label_key input_template max_problems n temperature top_p seed".split()
    settings |= {name: getattr(args, name) for name in names}
    settings |= {name: getattr(prompts, name) for name in ("apply_chat_template", "max_new_tokens")}
    record = evaluation.EvaluationRecord(args.out, settings)
    if record.num_torn_bytes:
        _say(f"dropped a torn last line of {record.num_torn_bytes} bytes from {record.responses_file}")
    waiting = [problem for problem in problems if problem.key not in record.finished]
    _say(
        f"{len(problems)} problems x {args.n} responses of up to {prompts.max_new_tokens} tokens, "
        f"{'with' if prompts.apply_chat_template else 'without'} chat template; {len(record.finished)} finished before"
    )
    if waiting:
        _generate(args, endpoints, waiting, prompts, record)

    by_dataset: dict[str, list[list[GradedResponse]]] = {}
    for problem in problems:
        by_dataset.setdefault(problem.dataset, []).append(record.finished[problem.key])
    metrics = evaluation_metrics(by_dataset, args.pass_at, args.seed)
    num_responses = len(problems) * args.n
    logs = {name: total / record.num_logged[name] for name, total in record.logs.items()}
    summary = evaluation.summarize(metrics, by_dataset) | {"extra_logs": logs}
    results = record.write_results(summary)
    print(table(metrics, {dataset: len(problems) for dataset, problems in by_dataset.items()}))
    print(f"results: {results}")
    for name in ("graded_timeouts", "graded_crashes"):
        if count := round(record.logs[name]):
            _say(f"{count} of {num_responses} responses count as wrong, because the grader failed on them ({name})")
    ungraded = {dataset: counts["num_ungraded"] for dataset, counts in summary["datasets"].items()}
    if num_ungraded := sum(ungraded.values()):
        where = ", ".join(f"{dataset} {count}" for dataset, count in ungraded.items() if count)
        counted = f"{num_ungraded} of {num_responses} responses are UNGRADED, the reward failed ({where})"
        _say(f"{counted}; each counts as 0; see {record.out / 'engines.log'}")
    return num_ungraded


def _generate(
    args: argparse.Namespace,
    endpoints: list[str],
    waiting: list[evaluation.Problem],
    prompts: evaluation.Prompts,
    record: evaluation.EvaluationRecord,
) -> None:
    """Generate the responses to the `waiting` problems and append them to `record`."""
    log_file = record.out / "engines.log"
    _say(f"starting engines, which log to {log_file}")
    before = [response.reward or 0.0 for responses in record.finished.values() for response in responses]
    num_before, sum_of_rewards, terminal = len(record.finished), sum(before), sys.stderr
    with (
        open(log_file, "a") as log,
        redirect_stdout(log),
        redirect_stderr(log),
        evaluation.running_engines(
            args.model,
            num_engines=args.num_engines,
            tensor_parallel_size=args.tensor_parallel_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            seed=evaluation.engine_seed(args.seed, num_before),
            max_model_len=prompts.max_model_len,
            endpoints=endpoints,
        ) as engines,
    ):
        every = _EVERY_ON_TERMINAL if terminal.isatty() else _EVERY_IN_FILE
        total = num_before + len(waiting)
        bar = tqdm(total=total, initial=num_before, unit=" problems", file=terminal, mininterval=every)
        for problem, responses in evaluation.generate(
            engines, waiting, prompts, args.label_key, args.n, args.temperature, args.top_p
        ):
            described = [evaluation.describe_response(response, prompts.tokenizer) for response in responses]
            graded = record.append(problem, prompts.texts[problem.key], problem.row[args.label_key], described)
            sum_of_rewards += sum(response.reward or 0.0 for response in graded)
            mean = sum_of_rewards / (len(record.finished) * args.n)
            bar.set_postfix_str(f"mean reward {mean:.3f}", refresh=False)
            bar.update()
        bar.close()


def table(metrics: dict[str, dict[str, Estimate | None]], num_problems: dict[str, int]) -> str:
    """Format the metrics as aligned text: one row per dataset, with an interval at the first metric."""
    names = list(metrics[MACRO_AVERAGE])
    rows = [["dataset", "problems", f"{names[0]} [{CONFIDENCE:.0%}]", *names[1:-1], "mean length"]]
    for dataset, estimates in metrics.items():
        if dataset == MACRO_AVERAGE and len(num_problems) == 1:
            continue
        cells = ["-" if estimate is None else f"{estimate.mean:.3f}" for estimate in map(estimates.get, names)]
        first, length = estimates[names[0]], estimates[names[-1]]
        assert first and length  # only majority@n may be None
        cells[0] += f" [{first.low:.3f}, {first.high:.3f}]"
        cells[-1] = f"{length.mean:.1f}"
        rows.append([dataset, str(num_problems.get(dataset, sum(num_problems.values()))), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line) for line in lines)


def _say(message: str) -> None:
    print(f"openrlhf-bapo: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
