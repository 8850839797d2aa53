"""The CPU backend: flash_attn's padding helpers, complete gathers, and no changes where they do not belong."""

import importlib.util
import os
import subprocess
import sys

import pipeline
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import is_flash_attn_2_available

from openrlhf_bapo.openrlhf.cpu import flash_attn

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is off where CUDA is available")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
def test_unpad_and_pad_are_inverse_and_keep_the_order_of_tokens(lengths, left_padded):
    seqlen = max(*lengths, 1, 1)
    mask = torch.arange(seqlen).expand(len(lengths), seqlen) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left_padded else mask
    hidden = torch.randn(len(lengths), seqlen, 3)
    tokens, indices, cu_seqlens, longest, counts = flash_attn.unpad_input(hidden, mask.int())
    assert torch.equal(tokens, hidden[mask])
    assert cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert (longest, counts.tolist()) == (max(lengths), lengths)
    padded = flash_attn.pad_input(tokens, indices, len(lengths), seqlen)
    assert torch.equal(padded, hidden * mask[..., None])


@without_cuda
def test_libraries_still_find_no_flash_attn_package():
    assert importlib.util.find_spec("flash_attn") is None
    assert not is_flash_attn_2_available()


def fill_under_zero3(rank: int, num_ranks: int, port: int, _) -> list[bool]:
    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(dtype=torch.float32):
        layer = torch.nn.Linear(1024, 1024)
    are_whole = []
    for value in range(40):
        with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
            for parameter in layer.parameters():
                parameter.data.fill_(value)
        with deepspeed.zero.GatheredParameters(list(layer.parameters())):
            are_whole.append(all(bool((parameter == value).all()) for parameter in layer.parameters()))
    torch.distributed.destroy_process_group()
    return are_whole


@without_cuda
def test_parameters_gathered_over_gloo_are_complete_when_they_are_written_and_read(tmp_path):
    assert pipeline.run_in_ranks(tmp_path, fill_under_zero3, 2) == [[True] * 40] * 2


@without_cuda
def test_a_training_step_of_a_tiny_model_takes_less_than_a_gib_for_buffers(tmp_path):
    directory = pipeline.make_model(tmp_path)
    # With this flag torch fills new buffers, so that all of their memory is taken.
    argv = pipeline.flags(directory, policy_loss="bapo", train__full_determinism_enable=True)
    (found,) = pipeline.train_policy_actors(directory, argv, [pipeline.make_experience([3] * 8)])
    assert found["peak_memory"] < 2 * 2**30


@without_cuda
def test_variables_that_the_user_has_set_keep_their_values():
    code = (
        "import os, openrlhf_bapo.openrlhf, torch;"
        "print(os.environ['VLLM_CPU_KVCACHE_SPACE'], os.environ['DS_ACCELERATOR'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"VLLM_CPU_KVCACHE_SPACE": "3", "PATH": ""},
    )
    assert run.stdout.split() == ["3", "cpu"]


def test_nothing_is_changed_where_cuda_is_available_but_that_a_missing_flash_attn_can_be_imported():
    code = """
import torch
torch.cuda.is_available = lambda: True
before = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "set_device")}
import openrlhf_bapo.openrlhf, os, sys
assert all(getattr(torch.cuda, name) is function for name, function in before.items())
assert "DS_ACCELERATOR" not in os.environ
import importlib.util
assert ("flash_attn.bert_padding" in sys.modules) == (importlib.util.find_spec("flash_attn") is None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""})
