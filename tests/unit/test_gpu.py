"""Properties of the search that only a GPU can show: no host synchronization, and the CPU's result."""

import pytest
import torch

from openrlhf_bapo import ClipConfig, find_clip_bounds, solve_clip_bounds, tally_contributions
from openrlhf_bapo.rules.clip_config import PRESETS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is false"
)


def update(num_sequences: int = 64, num_tokens: int = 2048, seed: int = 0) -> list[torch.Tensor]:
    """(ratio, advantages, mask) of a stale update on the GPU, each [num_sequences, num_tokens]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (num_sequences, num_tokens)
    ratio = (0.3 * torch.randn(shape, generator=generator, device="cuda")).exp()
    advantages = torch.randn(num_sequences, 1, generator=generator, device="cuda").expand(shape).contiguous()
    lengths = torch.randint(1, num_tokens, (num_sequences, 1), generator=generator, device="cuda")
    return [ratio, advantages, torch.arange(num_tokens, device="cuda").expand(shape) < lengths]


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_the_search_does_not_synchronise_with_the_host(config):
    tokens = update()
    find_clip_bounds(*tokens, config)  # the grids are copied to the device once a process
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = [tally_contributions(*(x[half] for x in tokens), config) for half in (slice(0, 32), slice(32, 64))]
        bounds = solve_clip_bounds(parts[0] + parts[1], config)
        (tokens[0].clamp(bounds.lower, bounds.upper) * tokens[1]).sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("target", [0.1, 0.3, 0.45, 0.5, 0.55])
def test_the_gpu_finds_the_cpus_bounds(contribution, target):
    config = ClipConfig(contribution=contribution, positive_contribution_target=target)
    for seed in range(5):
        tokens = update(seed=seed)
        on_gpu, on_cpu = find_clip_bounds(*tokens, config), find_clip_bounds(*(x.cpu() for x in tokens), config)
        assert (float(on_gpu.lower), float(on_gpu.upper)) == (float(on_cpu.lower), float(on_cpu.upper))
        assert float(on_gpu.positive_share) == pytest.approx(float(on_cpu.positive_share), rel=1e-9)
