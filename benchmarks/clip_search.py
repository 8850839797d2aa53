"""The cost of finding the clip bounds, beside the loss that uses them and a procedure with one pass per grid point.

Every function runs on the same tokens in turn, --repeats times, in one process. The target share is one that no point
reaches, so that the procedure walks the whole grid: 52 passes. Prints one markdown table: medians in ms with
quartiles, and the most MiB that were allocated at once beside the inputs.

    python benchmarks/clip_search.py --device cpu --tokens 14 17 20

Needs torch and numpy alone. OpenRLHF's PolicyLoss is measured where openrlhf is installed.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch

if importlib.util.find_spec("openrlhf_bapo") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openrlhf_bapo import ClipConfig, find_clip_bounds

NOT_MEASURED = "not measured"
UNREACHED = ClipConfig(positive_contribution_target=0.999)


def make_tokens(num_tokens: int, spread: float, device: str) -> dict[str, torch.Tensor]:
    """A loss's arguments, each [sequences, tokens]: log-ratios from a normal, an advantage a sequence, padding."""
    generator = torch.Generator().manual_seed(0)
    shape = (-1, min(num_tokens // 16, 1024))  # at least 16 sequences, so that both signs are there
    old_log_probs = -torch.rand(num_tokens, generator=generator).view(shape)
    log_ratio = spread * torch.randn(old_log_probs.shape, generator=generator)
    advantages = torch.randn(len(old_log_probs), 1, generator=generator).expand_as(old_log_probs)
    lengths = torch.randint(shape[1] // 2, shape[1] + 1, (len(old_log_probs), 1), generator=generator)
    tokens = {
        "log_probs": old_log_probs + log_ratio,
        "old_log_probs": old_log_probs,
        "advantages": advantages.contiguous(),
        "action_mask": torch.arange(shape[1]).expand_as(old_log_probs) < lengths,
    }
    return {name: tensor.to(device) for name, tensor in tokens.items()}


def contributions(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lower: float, upper: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """P and N of the paper's Eq. 8 at one pair of bounds: one pass over all tokens."""
    clipped = torch.where(advantages > 0, ratio.clamp(max=upper), ratio.clamp(min=lower))
    contribution = mask * advantages * clipped
    return contribution.clamp(min=0).sum(), -contribution.clamp(max=0).sum()


def procedure(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ClipConfig
) -> tuple[float, float]:
    """Algorithm 1 as it is written: a pass at every point of the walk, until the share reaches the target."""
    lower_grid, upper_grid = config.lower_grid(), config.upper_grid()
    for at_lower, at_upper in config.path():
        lower, upper = lower_grid[at_lower], upper_grid[at_upper]
        p, n = contributions(ratio, advantages, mask, lower, upper)
        if p / (p + n) >= config.positive_contribution_target:
            break
    return lower, upper


def clipped_surrogate(tokens: dict[str, torch.Tensor], config: ClipConfig | None = None) -> None:
    """Forward and backward of PPO's loss in plain torch: between fixed bounds, or those that the search finds."""
    log_probs = tokens["log_probs"].detach().requires_grad_()
    ratio = (log_probs - tokens["old_log_probs"]).clamp(-20.0, 20.0).exp()
    advantages, mask = tokens["advantages"], tokens["action_mask"]
    lower, upper = 0.8, 1.2
    if config is not None:
        bounds = find_clip_bounds(ratio.detach(), advantages, mask, config)
        lower, upper = bounds.lower, bounds.upper
    loss = -torch.min(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    ((loss * mask).sum() / mask.sum()).backward()


def openrlhf_losses() -> dict[str, torch.nn.Module]:
    """OpenRLHF's loss and ours on top of it, if OpenRLHF can be imported."""
    try:
        from openrlhf_bapo import BapoPolicyLoss
    except ImportError:
        return {}
    from openrlhf.models import PolicyLoss

    return {"PolicyLoss": PolicyLoss(), "BapoPolicyLoss": BapoPolicyLoss(clip_config=UNREACHED)}


def run_loss(loss: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> None:
    """Forward and backward."""
    tokens = tokens | {"log_probs": tokens["log_probs"].detach().requires_grad_()}
    loss(**tokens)[0].backward()


def seconds(function: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    """Return the seconds of one call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = clock()
    function()
    wait()
    return clock() - start


def peak_mib(function: Callable[[], object], device: str) -> float:
    """The most that one call had allocated at once, beside what there was before it; torch's and numpy's most added."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    tracemalloc.start()
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held_by_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    allocations = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = peak = 0
    for _, num_bytes in allocations:
        held += num_bytes
        peak = max(peak, held)
    return (peak + held_by_numpy) / 2**20


def measure(num_tokens: int, spread: float, args: argparse.Namespace) -> list[str]:
    """One row of the table."""
    tokens = make_tokens(num_tokens, spread, args.device)
    ratio = (tokens["log_probs"] - tokens["old_log_probs"]).exp()
    inputs = (ratio, tokens["advantages"], tokens["action_mask"])
    in_double = (ratio.double(), tokens["advantages"].double(), tokens["action_mask"])
    functions = {
        "read": lambda: [x.sum() for x in inputs],
        "search": lambda: find_clip_bounds(*inputs, UNREACHED),
        "procedure": lambda: procedure(*in_double, UNREACHED),  # in the precision in which the search adds up
        "in float32": lambda: procedure(*inputs, UNREACHED),
        "surrogate": lambda: clipped_surrogate(tokens),
        "both": lambda: clipped_surrogate(tokens, UNREACHED),
    }
    functions |= {name: lambda loss=loss: run_loss(loss, tokens) for name, loss in openrlhf_losses().items()}
    clock = {"wall": time.perf_counter, "cpu": time.thread_time}[args.clock]
    times = {name: [] for name in functions}
    for repeat in range(args.warmup + args.repeats):
        for name, function in functions.items():
            taken = seconds(function, args.device, clock)
            if repeat >= args.warmup:
                times[name].append(1000 * taken)
    medians = {name: statistics.median(values) for name, values in times.items()}

    def cell(name: str) -> str:
        if name not in times:
            return NOT_MEASURED
        low, _, high = statistics.quantiles(times[name], n=4, method="inclusive")
        return f"{medians[name]:.2f} ({low:.2f} - {high:.2f})"

    def times_as_long(name: str, as_name: str) -> str:
        return f"{medians[name] / medians[as_name]:.2f}" if name in times else NOT_MEASURED

    return [
        f"2^{math.log2(num_tokens):g}",
        f"{spread:g}",
        *(cell(name) for name in ("read", "search", "procedure")),
        times_as_long("procedure", "search"),
        cell("in float32"),
        times_as_long("in float32", "search"),
        *(cell(name) for name in ("surrogate", "both")),
        times_as_long("both", "surrogate"),
        *(cell(name) for name in ("PolicyLoss", "BapoPolicyLoss")),
        times_as_long("BapoPolicyLoss", "PolicyLoss"),
        *(f"{peak_mib(functions[name], args.device):.1f}" for name in ("search", "procedure", "surrogate")),
    ]


HEADER = [
    *("tokens", "spread of log r", "inputs read once", "search", "52 passes", "ratio", "52 in float32", "ratio"),
    *("surrogate", "search + surrogate", "ratio", "PolicyLoss", "BapoPolicyLoss", "ratio"),
    *("search, MiB", "52 passes, MiB", "surrogate, MiB"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[14, 17, 20], help="powers of two, 4 to 24")
    parser.add_argument(
        "--spreads", type=float, nargs="+", default=[0.02, 0.2, 1.0], help="standard deviation of log r"
    )
    parser.add_argument("--repeats", type=int, default=21, help="at least 2")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: this thread's time; for --device cpu, one thread"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU here; allowed: cpu")
    if args.clock == "cpu" and (args.device, args.threads) != ("cpu", 1):
        sys.exit("--clock cpu is one thread's time; allowed with --device cpu --threads 1")
    if not all(4 <= exponent <= 24 for exponent in args.tokens):
        sys.exit(f"--tokens {args.tokens}: powers of two, each from 4 to 24")
    if args.repeats < 2:
        sys.exit(f"--repeats {args.repeats}: at least 2, for the quartiles")
    torch.set_num_threads(args.threads)

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} thread(s), {args.clock} clock"
    print(f"torch {torch.__version__}, {args.device}: {name}; {args.repeats} repeats; ms: median (quartiles)\n")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for exponent in args.tokens:
        for spread in args.spreads:
            print(f"| {' | '.join(measure(2**exponent, spread, args))} |", flush=True)


if __name__ == "__main__":
    main()
