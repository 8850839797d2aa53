"""examples/bapo_in_one_file.py: its search finds the package's bounds, and both methods learn."""

import importlib.util
import sys

import pipeline
import pytest
import torch

from openrlhf_bapo import ClipConfig, find_clip_bounds


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("one_file", pipeline.REPOSITORY / "examples/bapo_in_one_file.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ratios and advantages of 200 tokens, in float64; the spread and the positive share follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    ratio = (torch.randn(200, generator=generator, dtype=torch.float64) * (0.1 + seed % 8 / 10)).exp()
    return ratio, torch.randn(200, generator=generator, dtype=torch.float64) + (seed % 5 - 3) / 4


def test_the_search_finds_the_packages_bounds(one_file):
    found = set()
    for seed in range(40):
        ratio, advantage = tokens(seed)
        bounds = find_clip_bounds(ratio, advantage, torch.ones_like(ratio), ClipConfig())
        found.add(one_file.find_bounds(ratio, advantage))
        assert one_file.find_bounds(ratio, advantage) == (bounds.lower.item(), bounds.upper.item())
    start_and_end = {(0.6, 1.2), (0.9, 3.0)}
    assert start_and_end < {(round(lower, 9), round(upper, 9)) for lower, upper in found}


def test_both_methods_learn_the_task_from_late_samples(one_file, monkeypatch):
    monkeypatch.setattr(one_file, "ROLLOUTS", 60)
    for method in ("ppo", "bapo"):
        accuracy = one_file.train(method, seed=0)["accuracy"]
        assert accuracy[0] < 0.2 and accuracy[-1] > 0.8


def test_it_is_short_and_needs_only_torch_and_matplotlib():
    text = (pipeline.REPOSITORY / "examples/bapo_in_one_file.py").read_text()
    assert len(text.splitlines()) <= 150
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported - sys.stdlib_module_names == {"torch", "matplotlib"}
