"""The benchmarks run, and compare with what they say."""

import re
import subprocess
import sys

import clip_search
import pytest
import torch
from hypothesis import assume, given, settings
from pipeline import REPOSITORY
from reference import near_a_decision
from strategies import as_tensors, clip_configs, tokens

from openrlhf_bapo import find_clip_bounds


@given(tokens(min_size=1), clip_configs(contribution="surrogate", target_kind="share"))
@settings(max_examples=50)
def test_the_procedure_that_the_search_is_compared_with_finds_the_searchs_bounds(token_list, config):
    assume(any(weight > 0 and advantage != 0 for _, advantage, weight in token_list))
    assume(not near_a_decision(token_list, config, 1e-9))
    found = find_clip_bounds(*as_tensors(token_list), config)
    assert clip_search.procedure(*as_tensors(token_list), config) == (float(found.lower), float(found.upper))


def test_the_target_of_the_search_benchmark_is_out_of_reach_so_that_the_procedure_walks_the_whole_grid():
    for spread in (0.02, 0.2, 1.0):
        batch = clip_search.make_tokens(2**14, spread, "cpu")
        ratio = (batch["log_probs"] - batch["old_log_probs"]).exp()
        assert not find_clip_bounds(ratio, batch["advantages"], batch["action_mask"], clip_search.UNREACHED).reached


def test_the_most_memory_held_at_once_is_that_of_the_tensors():
    def three_quarters_of_a_mib_and_then_half():
        a = torch.empty(2**18, dtype=torch.uint8)
        b = torch.empty(2**19, dtype=torch.uint8)
        del a, b
        return torch.empty(2**19, dtype=torch.uint8)

    assert clip_search.peak_mib(three_quarters_of_a_mib_and_then_half, "cpu") == pytest.approx(0.75, abs=0.01)


def test_the_search_benchmark_prints_a_row_for_every_size_and_spread():
    command = [sys.executable, "benchmarks/clip_search.py", "--tokens", "10", "8", "--spreads", "0.1", "--repeats", "2"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    header, _, *rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["2^10", "2^8"]
    for row in rows:
        assert len(row.split("|")) == len(header.split("|")) == len(clip_search.HEADER) + 2
        assert len(re.findall(r"\d+\.\d\d \(\d+\.\d\d - \d+\.\d\d\)", row)) == 8  # eight timed functions
        assert "not measured" not in row


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "30"], "--tokens .30.: powers of two, each from 4 to 24"),
        (["--repeats", "1"], "--repeats 1: at least 2"),
        (["--clock", "cpu", "--threads", "2"], "--clock cpu is one thread's time; allowed with"),
    ],
)
def test_flags_of_the_search_benchmark_that_cannot_be_are_refused_in_one_line(flags, message):
    command = [sys.executable, "benchmarks/clip_search.py", *flags]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 1 and re.fullmatch(f"{message}.*\n", run.stderr)
