"""The plan against real models, DeepSpeed's buffers, autograd's tensors, vLLM's pages and a replay pool."""

import copy
import functools
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pipeline
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing import start_processes

from openrlhf_bapo.planning import time
from openrlhf_bapo.planning.activations import (
    LogitsBytes,
    backward_bytes_per_token,
    forward_bytes_per_token,
    logits_bytes,
    outer_bytes_per_token,
    saved_bytes_per_token,
)
from openrlhf_bapo.planning.actor_memory import (
    TrainingSetup,
    bucket_terms,
    frozen_copy_terms,
    host_terms,
    idle_terms,
    optimizer_terms,
    training_phases,
    weight_terms,
)
from openrlhf_bapo.planning.checkpoints import replay_term
from openrlhf_bapo.planning.engine_memory import (
    EngineSetup,
    colocated_phases,
    engine_host_terms,
    kv_bytes_per_token,
    kv_cache,
)
from openrlhf_bapo.planning.model_shape import KNOWN_SHAPES, ModelShape
from openrlhf_bapo.planning.terms import Term
from openrlhf_bapo.run.plan import Machine, make_plan, num_ratio_forwards

GIB = 2**30


def bytes_of(terms: list[Term]) -> dict[str, int]:
    return {term.name: term.bytes for term in terms}


TINY = ModelShape(
    hidden_size=256,
    intermediate_size=704,
    num_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=64,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
    max_position_embeddings=4096,
)
BY_TYPE = {
    "llama": replace(TINY, attention_bias=False),
    "qwen2": TINY,
    "qwen3": replace(TINY, attention_bias=False, qk_norm=True),
}
TOKENS = 256


def config_of(shape: ModelShape):
    """Make transformers' config of a shape."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    values = asdict(shape)
    kinds = {(False, False): LlamaConfig, (True, False): Qwen2Config, (False, True): Qwen3Config}
    kind = kinds[values.pop("attention_bias"), values.pop("qk_norm")]
    return kind(num_hidden_layers=values.pop("num_layers"), **values)


def model_of(shape: ModelShape, device: str = "cpu"):
    """Make a real model of a shape, in bf16 with sdpa."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa", dtype=torch.bfloat16)


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_known_models_have_the_published_number_of_parameters_and_as_many_as_transformers_builds():
    published = {"32B": 32.76, "-7B": 7.62, "-3B": 3.21, "1.5B": 1.54}
    for name, shape in KNOWN_SHAPES.items():
        (billions,) = (billions for size, billions in published.items() if size in name)
        assert round(shape.num_parameters / 1e9, 2) == billions, name
    for shape in set(KNOWN_SHAPES.values()):
        assert count(model_of(shape, "meta")) == shape.num_parameters


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_shape_read_from_a_config_has_as_many_parameters_as_transformers_builds(data):
    draw = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    kv_heads = draw(1, 2, 4)
    shape = replace(
        BY_TYPE[draw(*BY_TYPE)],
        hidden_size=draw(24, 48),
        intermediate_size=draw(8, 40),
        num_layers=draw(1, 3),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw(1, 3),
        head_dim=draw(8, 16),
        vocab_size=draw(11, 32),
        tie_word_embeddings=draw(True, False),
    )
    assert ModelShape.from_config(config_of(shape).to_dict()) == shape
    assert count(model_of(shape, "meta")) == shape.num_parameters


def test_a_config_of_another_kind_is_refused_with_the_allowed_kinds():
    with pytest.raises(ValueError, match="'gemma3' is not supported; it must be one of llama, qwen2, qwen3"):
        ModelShape.from_config({"model_type": "gemma3"})
    with pytest.raises(ValueError, match="mlp_bias True is not supported"):
        ModelShape.from_config(config_of(BY_TYPE["llama"]).to_dict() | {"mlp_bias": True})


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "down_proj"], ["lm_head", "embed_tokens", "layers.0.mlp.up_proj"]], ids=str
)
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_an_adapter_has_the_trained_parameters_that_peft_makes(model_type, targets):
    from peft import LoraConfig, get_peft_model

    shape = BY_TYPE[model_type]
    adapted = get_peft_model(model_of(shape, "meta"), LoraConfig(r=4, target_modules=targets))
    setup = TrainingSetup(
        num_gpus=1,
        micro_batch_tokens=1,
        forward_tokens=1,
        lora_rank=4,
        lora_targets=() if targets == "all-linear" else tuple(targets),
    )
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == setup.num_trained(shape)
    assert max(parameter.numel() for parameter in trained) < setup.largest_trained(shape)
    assert sum(term.bytes for term in weight_terms(shape, setup)) == 2 * count(adapted)


def allocations(function) -> tuple[int, int]:
    """Bytes that torch's CPU allocator gives out during a call: the peak, and the bytes that the result keeps.

    Temporary buffers of a matrix product are left out: a CPU without bfloat16 instructions (or with
    ``ONEDNN_MAX_CPU_ISA=AVX512_CORE``) copies the operands to float32, which a GPU does not.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    changes = []

    def collect(event, product):
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, product))
        elif event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            product = event.id
        for child in event.children:
            collect(child, product)

    for event in profiler.profiler.kineto_results.experimental_event_tree():
        collect(event, None)
    del result
    made_by, taken = {}, []
    for _, pointer, change, product in sorted(changes):
        if change > 0:
            made_by[pointer] = len(taken), product
        elif product is not None and made_by.get(pointer, (0, None))[1] == product:
            taken[made_by[pointer][0]] = change = 0
        taken.append(change)
    sums = list(itertools.accumulate(taken, initial=0))
    return max(sums), sums[-1]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("model_type", BY_TYPE)
def test_a_forward_keeps_the_bytes_of_the_table(model_type, gradient_checkpointing):
    # The CPU's sdpa is also a flash attention: it saves queries, keys, values, output and log-sum-exp.
    shape = BY_TYPE[model_type]
    model = model_of(shape).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    _, kept = allocations(lambda: model(ids, use_cache=False))
    kept -= TOKENS * shape.vocab_size * 2  # the logits
    if gradient_checkpointing:
        kept -= shape.num_layers * torch.get_rng_state().nbytes  # nearly nothing on a GPU
    per_token = saved_bytes_per_token(shape, gradient_checkpointing) + outer_bytes_per_token(shape)
    assert kept == pytest.approx(TOKENS * per_token, rel=0.01)


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_a_checkpointed_layers_backward_peaks_where_the_plan_says(model_type):
    # The difference of two lengths, in which constant parts (gradients of weights) cancel.
    shape = BY_TYPE[model_type]
    model = model_of(shape).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(tokens):
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits.sum().backward()

    step(8)  # makes the weights' gradients
    peak = allocations(lambda: step(4 * TOKENS))[0] - allocations(lambda: step(2 * TOKENS))[0]
    per_token = saved_bytes_per_token(shape, True) + backward_bytes_per_token(shape, True)
    assert peak / (2 * TOKENS) == pytest.approx(per_token, rel=0.04)


def test_a_forward_without_gradient_peaks_where_the_plan_says():
    model = model_of(TINY).eval()
    with torch.no_grad():
        peak, _ = allocations(lambda: model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False))
    assert peak == pytest.approx(TOKENS * forward_bytes_per_token(TINY), rel=0.01)


WIDE = replace(
    TINY,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=2000,
)


@pytest.mark.parametrize("entropy_coef", [None, 0.0, 0.1])
def test_logits_take_the_bytes_of_the_plan_in_openrlhfs_actor(entropy_coef, monkeypatch):
    importlib.import_module("openrlhf_bapo.openrlhf")  # OpenRLHF on CPU
    from openrlhf.models import Actor, actor

    # Another test in this process may have torch.compile on, which saves other tensors.
    monkeypatch.setattr(actor, "compute_entropy", torch.compiler.disable(actor.compute_entropy))
    policy = Actor(model_of(WIDE), temperature=0.7)
    policy.packing_samples = False
    tokens = 3072  # three chunks of the log-sum-exp
    ids, mask = torch.randint(WIDE.vocab_size, (1, tokens)), torch.ones(1, tokens, dtype=torch.long)
    logged = entropy_coef is not None

    def forward():
        return policy(ids, mask[:, 1:], mask, return_output=True, return_entropy=logged)

    def step():
        log_probs, output = forward()
        loss = log_probs.sum() - (entropy_coef * output.entropy.sum() if entropy_coef else 0)
        loss.backward()

    def log_probs_only():
        with torch.no_grad():
            policy(ids, mask[:, 1:], mask)

    expected = logits_bytes(temperature=0.7, entropy_coef=entropy_coef, fused_kernels=False)
    num_logits = tokens * WIDE.vocab_size
    for function in (step, log_probs_only):
        function()
    assert allocations(step)[0] / num_logits == pytest.approx(expected.backward, rel=0.05)
    assert allocations(log_probs_only)[0] / num_logits == pytest.approx(expected.forward, rel=0.05)
    assert allocations(forward)[1] / num_logits == pytest.approx(expected.held, rel=0.1)


def test_a_token_takes_as_many_bytes_as_vllms_cache_gives_it():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for shape in set(KNOWN_SHAPES.values()):
        for size in (1, 2, 4, 8):
            heads = max(1, shape.num_key_value_heads // size)  # vllm.config.ModelConfig.get_num_kv_heads
            layer = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=shape.head_dim, dtype=torch.bfloat16)
            assert kv_bytes_per_token(shape, size) * 16 == layer.page_size_bytes * shape.num_layers


def test_a_full_replay_pool_takes_the_bytes_of_the_plan():
    from openrlhf_bapo.offpolicy.replay_pool import SAMPLE_DTYPES, Group, ReplayConfig, ReplayPool

    capacity, num_samples, num_tokens = 5, 4, 300
    pool = ReplayPool(ReplayConfig(capacity=capacity))
    for _ in range(capacity + 2):
        sample = {name: torch.ones(num_tokens, dtype=dtype) for name, dtype in SAMPLE_DTYPES.items()}
        samples = [sample | {"returns": torch.ones(num_tokens)} for _ in range(num_samples)]
        pool.add([Group(samples, torch.arange(num_samples))])
    planned = replay_term(
        capacity=capacity, samples_per_group=num_samples, tokens_per_sample=num_tokens, num_extra_columns=1
    )
    assert pool.num_bytes == pytest.approx(planned.bytes, rel=0.01)  # and a reward a sample


SHAPE_32B = KNOWN_SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"]
SETUP_32B = TrainingSetup(
    num_gpus=64,
    micro_batch_tokens=66560,
    forward_tokens=66560,
    zero_stage=3,
    ring_attn_size=8,
    gradient_checkpointing=True,
    enable_sleep=True,
)
ENGINE_32B = EngineSetup(max_len=66560, tensor_parallel_size=4, gpu_memory_utilization=0.8, enable_sleep=True)


# Each flag is for saving memory: without it, the peak of the training phases must be higher.
COSTLY = dict(num_gpus=32, ring_attn_size=4, micro_batch_tokens=2 * 66560, gradient_checkpointing=False, zero_stage=2)
COSTLY |= dict(temperature=0.7, has_reference=True, zpg=8, grad_accum_bytes=4, adam_offload=False)


@pytest.mark.parametrize("flag", COSTLY)
def test_training_needs_more_with_fewer_gpus_longer_micro_batches_and_without_memory_saving_flags(flag):
    training = lambda setup: max(p.total for p in training_phases(SHAPE_32B, setup))  # noqa: E731
    cheap = replace(SETUP_32B, adam_offload=flag == "adam_offload")
    assert training(replace(cheap, **{flag: COSTLY[flag]})) > training(cheap)


def test_an_engine_that_cannot_hold_one_sequence_does_not_fit():
    for size, fits in ((1, False), (2, True), (4, True)):
        cache = kv_cache(SHAPE_32B, replace(ENGINE_32B, tensor_parallel_size=size), 80 * GIB)
        assert cache.fits is fits
        assert cache.num_tokens * cache.bytes_per_token <= max(cache.budget, 0)


# LARGE has more elements than ZeRO-3 gathers, reduces and steps over at a time. SMALL has fewer, and its largest weight
# is smaller than the bucket.
LARGE = replace(SHAPE_32B, num_layers=6)
SMALL = replace(SHAPE_32B, num_layers=1, hidden_size=512, intermediate_size=1024)


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_phase_of_training_has_all_its_terms(shape, stage, offloads, overlaps):
    setup = TrainingSetup(
        num_gpus=4,
        micro_batch_tokens=1000,
        forward_tokens=3000,
        zero_stage=stage,
        adam_offload=offloads,
        overlap_comm=overlaps,
        zpg=2,
        has_reference=True,
        enable_ema=True,
    )
    n, largest, vocabulary = shape.num_parameters, shape.largest_parameter, shape.vocab_size
    shared, quarter = stage == 3, -(-n // 4)
    weights = 2 * (quarter if shared else n) + shared * 2 * -(-n // 2)  # with ZeRO++'s copy
    frozen = 2 * quarter if shared else (2 + 6) * n  # the reference, and below ZeRO-3 the EMA copy
    bucket = 2 * (2 if overlaps and stage < 3 else 1) * 500_000_000 * (stage > 0)
    states = 12 * (n if stage == 0 else quarter)
    gradients = {0: 2 * n, 1: 2 * n}.get(stage, 2 * quarter)
    if offloads:
        states, gradients = 2 * largest * (stage < 3), gradients * (stage < 2)
    gathered = 2 * min(n, 10**9 + largest) * shared
    in_flight = 2 * max(largest, min(n, 500_000_000)) * (stage >= 2)
    saved = 1000 * (saved_bytes_per_token(shape, False) + outer_bytes_per_token(shape))
    layer = 1000 * backward_bytes_per_token(shape, False)
    in_step = 0 if offloads else 6 * (n if stage == 0 else min(quarter, 10**9) if shared else quarter)
    in_step += states + (2 * (n if stage == 0 else quarter) if stage < 2 else gradients)
    idle = weights + frozen + states + (gradients + bucket) * shared
    forward = 3000 * max(6 * vocabulary, forward_bytes_per_token(shape))
    processes = 2 * GIB
    resident = weights + frozen + gradients + states + bucket + gathered + in_flight + saved + processes
    assert {phase.name: phase.total for phase in training_phases(shape, setup)} == {
        "log-probs": idle + gathered + forward + processes,
        "backward through the logits": resident + 1000 * 10 * vocabulary,
        "backward through a layer": resident + 1000 * 4 * vocabulary + layer,
        "optimizer step": weights + frozen + in_step + bucket * shared + 1000 * 4 * vocabulary + processes,
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_coef", [None, 0.0, 0.1])
def test_a_temperature_or_an_entropy_in_the_loss_is_one_more_gradient_of_fused_logits(temperature, entropy_coef):
    found = logits_bytes(temperature=temperature, entropy_coef=entropy_coef, fused_kernels=True)
    assert found == LogitsBytes(6, 12 if temperature == 0.7 or entropy_coef == 0.1 else 10, 4)


@pytest.mark.parametrize("lora_rank", [0, 64])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_beside_the_actor_has_all_its_terms_while_it_generates_and_gets_new_weights(
    sleeps, enforce_eager, lora_rank
):
    setup = replace(SETUP_32B, has_reference=True, lora_rank=lora_rank)
    engine = replace(ENGINE_32B, enable_sleep=sleeps, enforce_eager=enforce_eager)
    weights = 2 * SHAPE_32B.num_parameters // 4
    workspace = 2048 * forward_bytes_per_token(SHAPE_32B, 4) + 128 * SHAPE_32B.vocab_size * 16
    process, share = (1 if enforce_eager else 2) * GIB, 64 * GIB  # 0.8 of 80
    cache = kv_cache(SHAPE_32B, engine, 80 * GIB)
    assert cache.budget == share - weights - workspace - process
    idle = sum(term.bytes for term in idle_terms(SHAPE_32B, setup)) + 2 * GIB
    phases = {p.name: p.total for p in colocated_phases(SHAPE_32B, setup, engine, 80 * GIB)}
    in_training = {p.name: p.total + (process if sleeps else share) for p in training_phases(SHAPE_32B, setup)}
    assert {name: phases[name] for name in in_training} == in_training
    assert phases["generation"] == share + idle
    copies = (8 if lora_rank else 4) * SHAPE_32B.largest_parameter
    assert phases["weight sync"] == idle + copies + (weights + process if sleeps else share)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("sleeps", [False, True])
def test_the_host_has_the_terms_that_leave_the_gpu(stage, offloads, sleeps):
    setup = replace(SETUP_32B, zero_stage=stage, adam_offload=offloads, enable_sleep=sleeps, enable_ema=True)
    setup = replace(setup, has_reference=True, reference_offload=True, grad_accum_bytes=4)
    shard = SHAPE_32B.num_parameters // 64
    expected = {"sleeping vLLM weights": 2 * SHAPE_32B.num_parameters // 4} if sleeps else {}
    if offloads:
        expected["optimizer states and gradients"] = (12 + (4 if stage == 3 else 6)) * shard
    elif sleeps:
        expected["sleeping optimizer states"] = (12 + (4 if stage == 3 else 0)) * shard
    if stage == 3:
        expected |= {"EMA copy": 2 * shard, "reference model": 2 * shard}
    engine = replace(ENGINE_32B, enable_sleep=sleeps)
    found = bytes_of(host_terms(SHAPE_32B, setup) + engine_host_terms(SHAPE_32B, engine))
    assert found == pytest.approx(expected, rel=1e-6)
    frozen = [] if stage == 3 else ["reference model", "EMA copy"]
    assert [term.name for term in frozen_copy_terms(SHAPE_32B, setup)] == frozen
    on_gpu = idle_terms(SHAPE_32B, setup)
    if offloads:  # DeepSpeed's sleep has nothing left to move
        assert on_gpu == idle_terms(SHAPE_32B, replace(setup, enable_sleep=not sleeps))
    elif sleeps:
        assert [term.name for term in on_gpu] == ["weights", *frozen]


@pytest.mark.parametrize("passes", ["forward", "backward", "checkpointed", "adapter"])
def test_flops_are_those_that_torch_counts(passes):
    from torch.utils.flop_counter import FlopCounterMode

    shape = replace(TINY, vocab_size=640)
    model = model_of(shape).train()
    model.set_attn_implementation("eager")  # torch counts nothing for the CPU's fused kernel
    if passes == "adapter":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear"))
        model.enable_input_require_grads()
    if passes == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits
        if passes != "forward":
            logits.sum().backward()
    trained, forwarded = (0, TOKENS) if passes == "forward" else (TOKENS, 0)
    causal, whole = (
        time.step_flops(
            shape,
            trained_tokens=trained,
            forward_tokens=forwarded,
            length=length,
            gradient_checkpointing=passes == "checkpointed",
            is_adapter=passes == "adapter",
        )
        for length in (TOKENS, 2 * TOKENS)
    )
    assert causal < whole
    # Eager attention computes the masked half too; lm_head and each layer's last product are not computed again.
    assert counter.get_total_flops() == pytest.approx(
        whole, rel={"checkpointed": 0.08, "adapter": 0.03}.get(passes, 0.01)
    )


# Weights of more than 1e5 elements. ZeRO-3 keeps smaller ones whole once they are gathered.
SHARDED = replace(TINY, hidden_size=384, intermediate_size=768, num_layers=2, num_key_value_heads=8, vocab_size=640)
STAGES = (0, 1, 2, 3)
LORA_RANK = 64

# 24 samples of 8 tokens in a rollout, 8 in an optimizer step, 2 epochs.
RATIO_LENGTH, RATIO_BATCH = 8, 8
RATIO_FLAGS = {
    "rollout__micro_batch_size": 4,
    "policy_loss": "bapo",
    "rollout__batch_size": 6,
    "rollout__n_samples_per_prompt": 4,
    "train__batch_size": RATIO_BATCH,
    "train__micro_batch_size": 2,
    "train__max_epochs": 2,
}
DYNAMIC = {"train__dynamic_batch_enable": True, "rollout__max_tokens_per_gpu": 64, "ds__packing_samples": True}
# By name: ranks, flags, and the number of optimizer steps with a forward for the ratios.
RATIO_CASES = {
    "several micro-batches": (1, {}, 5),
    "several micro-batches on 2 ranks": (2, {}, 5),
    "one micro-batch": (1, {"train__micro_batch_size": 8}, 0),
    "one micro-batch on 2 ranks": (2, {"train__micro_batch_size": 4}, 0),
    "the engine's log-probs": (1, {"offpolicy__ratio_base": "rollout"}, 5),
    "replay": (1, {"replay__ratio": 1}, 12),
    "per micro-batch": (1, {"bapo__scope": "micro_batch"}, 0),
    "steady bounds": (1, {"bapo__smoothing": 20, "replay__ratio": 1}, 0),
    "ppo": (1, {"policy_loss": "ppo"}, 0),
    "m2": (1, {"policy_loss": "m2"}, 5),
    "balanced with a half-life": (1, {"policy_loss": "balanced", "balanced__half_life": 9}, 0),
    "topr": (1, {"policy_loss": "topr"}, 0),
    "dynamic batch": (1, DYNAMIC | {"train__max_tokens_per_gpu": 63}, 5),
    "dynamic batch, all in one": (1, DYNAMIC | {"train__max_tokens_per_gpu": 64}, 0),
    "dynamic batch, all in one on 2 ranks": (2, DYNAMIC | {"train__max_tokens_per_gpu": 63}, 0),
}


def ratio_argv(directory: Path, case: str) -> list[str]:
    world_size, flags, _ = RATIO_CASES[case]
    return pipeline.flags(directory, **RATIO_FLAGS | {"actor__num_gpus_per_node": world_size} | flags)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results of `_measure` on rank 0, by world size."""
    directory = pipeline.make_model(tmp_path_factory.mktemp("memory"))
    model_of(SHARDED).save_pretrained(directory / "model")
    command = [pipeline.warm_python(), __file__, str(directory)]
    environment = os.environ | {"PYTHONPATH": pipeline.python_path(pipeline.SUPPORT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    return {size: json.loads((directory / f"bytes-{size}.json").read_text()) for size in (1, 2)}


@pytest.mark.parametrize(
    ("world_size", "stage", "lora_rank"),
    [*((size, stage, 0) for size in (1, 2) for stage in STAGES), (2, 2, LORA_RANK), (2, 3, LORA_RANK)],
)
def test_openrlhfs_actor_allocates_the_model_states_of_the_plan_with_lora_those_of_the_adapter(
    measured, world_size, stage, lora_rank
):
    sizes = dict(num_gpus=world_size, micro_batch_tokens=32, forward_tokens=32)
    setup = TrainingSetup(**sizes, zero_stage=stage, lora_rank=lora_rank)
    planned = bytes_of(weight_terms(SHARDED, setup) + optimizer_terms(SHARDED, setup) + bucket_terms(setup))
    planned["weights"] += planned.pop("adapter", 0)
    found = measured[world_size][f"{stage}{' lora' * (lora_rank > 0)}"]
    for name in ("weights", "gradients", "optimizer states", "reduce bucket"):
        assert found[name] == pytest.approx(planned.get(name, 0), rel=0.01), name


@pytest.mark.parametrize("stage", STAGES)
def test_in_and_between_steps_the_actor_keeps_the_gradients_and_the_bucket_of_the_plan(measured, stage):
    setup = TrainingSetup(num_gpus=2, micro_batch_tokens=32, forward_tokens=32, zero_stage=stage)
    step = next(phase for phase in training_phases(SHARDED, setup) if phase.name == "optimizer step")
    for name, terms in (("stepping", step.terms), ("idle", idle_terms(SHARDED, setup))):
        planned = bytes_of(terms)
        expected = [planned.get("gradients", 0), planned.get("reduce bucket", 0)]
        assert measured[2][str(stage)][name] == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize("case", RATIO_CASES)
def test_the_actor_makes_as_many_ratio_forwards_as_the_plan_says(measured, tmp_path, case):
    (tmp_path / "reward.py").touch()
    forwards = num_ratio_forwards(pipeline.parse(ratio_argv(tmp_path, case)), RATIO_LENGTH)
    world_size, _, expected = RATIO_CASES[case]
    assert forwards == expected
    assert measured[world_size]["ratio samples"][case] == forwards * RATIO_BATCH / world_size


@given(st.integers(1, 6), st.integers(1, 50), st.integers(1, 200), st.sampled_from([1, 2]))
def test_a_dynamic_batch_is_one_micro_batch_where_openrlhf_makes_one(num_samples, length, limit, ring_attn_size):
    from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size

    args = copy.deepcopy(dynamic_args())
    args.train.batch_size, args.train.max_tokens_per_gpu = num_samples, limit
    args.ds.ring_attn_size = args.actor.num_gpus_per_node = ring_attn_size
    num_micro_batches = get_minimum_num_micro_batch_size([length] * num_samples, limit, ring_attn_size, 1)
    assert (num_ratio_forwards(args, length) > 0) == (num_micro_batches > 1)


@functools.cache
def dynamic_args():
    """Arguments of a run with dynamic batches, of 24 samples a rollout."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "reward.py").touch()
        return pipeline.parse(ratio_argv(Path(directory), "dynamic batch"))


TIMED_SHAPE = KNOWN_SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"]


def facts_of_2048_samples(tmp_path, **flags) -> dict[str, str]:
    """The facts of a plan with samples of 4,096 tokens and four optimizer steps."""
    (tmp_path / "reward.py").touch()
    sizes = {"data__max_len": 8192, "rollout__max_new_tokens": 7168, "rollout__batch_size": 128}
    sizes |= {"rollout__n_samples_per_prompt": 16, "train__batch_size": 512, "actor__num_gpus_per_node": 8}
    argv = pipeline.flags(tmp_path, policy_loss="bapo", **sizes | flags)
    return make_plan(pipeline.parse(argv), TIMED_SHAPE, Machine(gpu_memory=400, response_tokens=3072)).facts


def minutes_and_eflop(text: str) -> tuple[float, float]:
    return tuple(map(float, re.search(r"([\d.]+) min \(([\d.]+) EFLOP", text).groups()))


def forward_flops(num_samples: int) -> int:
    flags = dict(trained_tokens=0, length=4096, gradient_checkpointing=False)
    return time.step_flops(TIMED_SHAPE, forward_tokens=num_samples * 4096, **flags)


def test_a_decoupled_runs_plan_has_a_forward_of_replayed_samples(tmp_path):
    found = [
        minutes_and_eflop(
            facts_of_2048_samples(
                tmp_path, bapo__scope="micro_batch", replay__ratio=0.5, offpolicy__objective=objective
            )["time with responses of 3,072 tokens"].split("training")[1]
        )[1]
        for objective in ("behavior", "decoupled")
    ]
    more = forward_flops(1024)
    assert found[1] - found[0] == pytest.approx(more / 1e18, abs=0.011) and more > 1e16


@pytest.mark.parametrize("shared", [{"train__colocate_actor_ref": True, "ref__num_gpus_per_node": 8}, {}])
def test_a_reference_model_on_the_actors_gpus_adds_its_forward_to_the_plans_training_time(tmp_path, shared):
    flags = dict(bapo__scope="micro_batch", **shared)
    found = [
        minutes_and_eflop(
            facts_of_2048_samples(tmp_path, algo__kl__init_coef=coef, **flags)[
                "time with responses of 3,072 tokens"
            ].split("training")[1]
        )[1]
        for coef in (0, 0.01)
    ]
    assert found[1] - found[0] == pytest.approx(forward_flops(2048) / 1e18 if shared else 0, abs=0.011)


@pytest.mark.parametrize("replay, num_forwards", [(0, 3), (1, 8)])
def test_the_ratio_forward_is_in_the_plans_training_time_and_has_its_own_line(tmp_path, replay, num_forwards):
    name, time_fact = "of which the ratio forward", "time with responses of 3,072 tokens"
    with_it, without = (
        facts_of_2048_samples(tmp_path, bapo__scope=scope, replay__ratio=replay) for scope in ("update", "micro_batch")
    )
    assert name not in without and with_it[name].endswith(f"before {num_forwards} of {4 + 4 * replay} optimizer steps")
    flops = forward_flops(num_forwards * 512)
    found = minutes_and_eflop(with_it[name])
    assert found == (round(flops / (8 * 989e12 * 0.4) / 60, 1), round(flops / 1e18, 2)) and found[1] > 0
    for after, before, part in zip(
        *(minutes_and_eflop(one[time_fact].split("training")[1]) for one in (with_it, without)), found, strict=True
    ):
        assert after - before == pytest.approx(part, abs=0.11 if part == found[0] else 0.011)


def _count_ratio_samples(directory: Path, rank: int, world_size: int, port: int, case: str) -> int:
    """Count the samples of this rank that pass the actor without gradient while it trains."""
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils import get_strategy

    args = pipeline.parse(ratio_argv(directory, case))
    actor = PolicyModelActor.__ray_metadata__.modified_class(world_size, rank, "127.0.0.1", port)
    actor.init_model_from_pretrained(get_strategy(args), str(directory / "model"), max_steps=1000)
    num_samples = 24 * (2 if args.replay.ratio else 1) // world_size
    for sample in pipeline.make_experience([RATIO_LENGTH - 4] * num_samples, seed=rank):
        sample.start_log_probs = actor.forward(sample.sequences, sample.action_mask, sample.attention_mask)
        sample.action_log_probs = sample.start_log_probs
        if args.replay.ratio:
            sample.start_log_probs = None
        actor.append(sample)
    counted = []

    def count(module, inputs, _):
        if not torch.is_grad_enabled():
            counted.append(inputs[0].shape[0])

    actor.actor.register_forward_hook(count)
    actor.fit(0.0)
    return sum(counted)


def _measure(rank: int, directory: Path, world_size: int, port: int) -> None:
    """Train OpenRLHF's PolicyModelActor, and write the results of rank 0 to bytes-WORLD_SIZE.json.

    The results are the bytes of DeepSpeed's tensors for each stage, and the samples of each case of the ratio forward.
    """
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils import get_strategy

    cases = [case for case, (size, *_) in RATIO_CASES.items() if size == world_size]
    found = {"ratio samples": {case: _count_ratio_samples(directory, rank, world_size, port, case) for case in cases}}
    with_lora = [(stage, LORA_RANK) for stage in (2, 3) if world_size == 2]
    for stage, lora_rank in sorted([(stage, 0) for stage in STAGES] + with_lora):
        # 3 last: transformers remembers its DeepSpeed config
        flags = dict(ds__zero_stage=stage, ds__lora__rank=lora_rank, train__batch_size=8, train__micro_batch_size=2)
        argv = pipeline.flags(directory, **flags)
        strategy = get_strategy(pipeline.parse(argv))
        actor = PolicyModelActor.__ray_metadata__.modified_class(world_size, rank, "127.0.0.1", port)
        actor.init_model_from_pretrained(strategy, str(directory / "model"), max_steps=1000)
        for sample in pipeline.make_experience([4] * (8 // world_size), seed=rank):
            sample.start_log_probs = actor.forward(sample.sequences, sample.action_mask, sample.attention_mask)
            sample.action_log_probs = sample.start_log_probs
            actor.append(sample)
        engine, step, before_step, in_backward = actor.actor.model, strategy.optimizer_step, [], []

        def measured_step(*args, step=step, engine=engine, before_step=before_step, **kwargs):
            before_step.append(_gradients_and_bucket(engine))
            step(*args, **kwargs)

        def measured_backward(_, engine=engine, in_backward=in_backward):
            in_backward.append(_gradients_and_bucket(engine))

        strategy.optimizer_step = measured_step
        # The first weight is the last one to get its gradient.
        next(weight for weight in engine.module.parameters() if weight.requires_grad).register_hook(measured_backward)
        actor.fit(0.0)
        found[f"{stage}{' lora' * (lora_rank > 0)}"] = {
            "weights": _bytes(getattr(p, "ds_tensor", p) for p in engine.module.parameters()),
            "optimizer states": _bytes(_optimizer_tensors(engine.optimizer)),
            "gradients": max(gradients for gradients, _ in before_step),  # of all micro-batches
            "reduce bucket": max(bucket for _, bucket in in_backward),
            "stepping": before_step[-1],
            "idle": _gradients_and_bucket(engine),
        }
    if rank == 0:
        (directory / f"bytes-{world_size}.json").write_text(json.dumps(found))


def _bytes(tensors) -> int:
    """Bytes of the distinct storages of tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _optimizer_tensors(optimizer) -> list[torch.Tensor]:
    inner = optimizer.optimizer
    masters = [p for group in inner.param_groups for p in group["params"]]
    masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    moments = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return masters + moments


def _gradients_and_bucket(engine) -> tuple[int, int]:
    optimizer = engine.optimizer
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += averaged or []
    if getattr(optimizer, "grad_partitions_flat_buffer", None) is not None:
        gradients.append(optimizer.grad_partitions_flat_buffer)
    buckets = []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    return _bytes(gradients), _bytes(buckets)


def _measure_all(directory: Path) -> None:
    """Fork every rank of a world of one and of two after the imports, which take longest."""
    importlib.import_module("openrlhf_bapo.openrlhf")  # OpenRLHF on CPU
    importlib.import_module("openrlhf.trainer.ray.ppo_actor")
    worlds = [
        start_processes(_measure, (directory, size, pipeline.free_port()), size, join=False, start_method="fork")
        for size in (1, 2)
    ]
    for ranks in worlds:
        while not ranks.join():  # raises a rank's error, after it has ended the others
            pass


if __name__ == "__main__":
    _measure_all(Path(sys.argv[1]))


def test_rollout_time_is_bound_by_weights_with_few_sequences_and_by_kv_with_many():
    shape = KNOWN_SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"]
    engine = EngineSetup(max_len=9216, gpu_memory_utilization=0.9)
    cache = kv_cache(shape, engine, 80 * GIB)

    def seconds(num_sequences, response_tokens=1000):
        return time.rollout_seconds(
            shape,
            engine,
            cache,
            num_sequences=num_sequences,
            prompt_tokens=0,
            response_tokens=response_tokens,
            bytes_per_second=1e12,
        )

    weights, kv = 2 * shape.num_parameters, 500 * cache.bytes_per_token  # half a response is there on average
    assert seconds(1) == pytest.approx(1000 * (weights + kv) / 1e12)
    assert seconds(64) == pytest.approx(1000 * (weights + 64 * kv) / 1e12)
    # 128 sequences at a time, one set after the other.
    assert seconds(256) == pytest.approx(2 * seconds(128))
    # A cache that holds few long sequences makes more sets of them.
    assert seconds(128, 100_000) > 100 * seconds(128) * 5
