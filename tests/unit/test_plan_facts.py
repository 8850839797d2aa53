"""What `openrlhf-bapo plan` says of training steps, staleness and bytes, and the machines that it refuses."""

import json

import pipeline
import pytest
import torch
from test_data import write_rows
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf_bapo.cli import plan
from openrlhf_bapo.planning.model_shape import MODEL_TYPES
from openrlhf_bapo.run.plan import Machine, make_plan, read_shape, training_setup

ROWS = [{"input": f"{n}+1=\n", "label": str(n + 1)} for n in range(37)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("plan"))


def facts(directory, **flags) -> dict[str, str]:
    args = pipeline.parse(pipeline.flags(directory, data__max_samples=1000, **flags))
    return make_plan(args, read_shape(str(directory / "model")), Machine()).facts


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_each_episode_has_a_training_step_for_the_prompts_that_are_left(directory, kind):
    file = write_rows(directory / f"prompts.{kind}", ROWS)
    if kind == "jsonl":  # an object may have several lines
        file.write_text("\n\n".join(json.dumps(row, indent=1) for row in ROWS))
    planned = facts(directory, data__prompt_dataset=file, train__num_episodes=2)
    assert planned["training steps"] == "6 from 37 prompts"  # of 16, 16 and 5 prompts, twice


def test_large_files_of_lines_are_counted_and_large_arrays_are_not(directory):
    lines, array = directory / "large.jsonl", directory / "large.json"
    row = {"input": "1+2=", "label": "3", "more": "x" * 10_000_000}
    lines.write_text(f"{json.dumps(row)}\n\n{json.dumps(row)}\n")
    array.write_text(json.dumps([row, row]))
    assert facts(directory, data__prompt_dataset=lines)["training steps"] == "1 from 2 prompts"
    assert "training steps" not in facts(directory, data__prompt_dataset=array)


def test_the_first_step_of_the_full_lag_comes_after_as_many_steps(directory):
    planned = facts(directory, offpolicy__lag=3)["lag"]
    staleness = [min(3, step - 1) for step in range(1, 9)]  # as tests/integration/test_lag.py finds it
    assert planned.endswith(f"staleness is 3 from an episode's training step {1 + staleness.index(3)} on")


@pytest.mark.parametrize(("generated", "staleness"), [(None, 2), (16, 2), (24, 3), (32, 3), (40, 4), (48, 4)])
def test_samples_of_a_rollout_for_several_steps_wait_and_grow_older(directory, generated, staleness):
    flags = dict(train__async_enable=True, train__async_queue_size=2, rollout__vllm_generate_batch_size=generated)
    planned = facts(directory, **flags)["staleness in policy versions"]
    assert planned == f"fresh samples at most {staleness}"
    # The longest wait in a long run, in training steps: first in, first out.
    waiting, longest = [], 0
    for step in range(200):
        if len(waiting) < 16:
            waiting += [step] * (generated or 16)
        longest = max(longest, step - waiting[0], step - waiting[15])
        waiting = waiting[16:]
    assert staleness == 2 + longest


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path, model_type):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"model_type": model_type, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    shape = read_shape(str(tmp_path))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.max_position_embeddings == model.config.max_position_embeddings


def test_the_plan_says_that_it_leaves_out_the_memory_of_a_reference_model_on_gpus_of_its_own(directory):
    found = [facts(directory, algo__kl__init_coef=coef).get("not planned") for coef in (0, 0.01)]
    assert found == [None, "memory of the reference model's GPUs"]
    shared = facts(directory, algo__kl__init_coef=0.01, train__colocate_actor_ref=True)
    assert shared["GPUs"].endswith("1 engines") and "not planned" not in shared


def test_the_plan_says_what_each_model_beside_a_checkpoint_takes(directory):
    name, size = "disk, --ckpt.save_hf", "0.0 GiB more with each checkpoint, never removed"
    assert [facts(directory, ckpt__save_hf=given).get(name) for given in (None, True)] == [None, size]


def test_the_plan_names_the_model_that_it_plans_with(directory, tmp_path, capsys):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 32}))
    plan.main(["--plan.model", str(tmp_path), *pipeline.flags(directory, policy_loss="bapo")])
    assert f" {tmp_path}, 0.00 billion parameters" in capsys.readouterr().out


def test_gradients_in_float32_take_4_bytes_by_either_name(directory):
    for name, size in (("float32", 4), ("fp32", 4), ("bfloat16", 2), (None, 2)):
        args = pipeline.parse(pipeline.flags(directory, ds__grad_accum_dtype=name))
        assert training_setup(args).grad_accum_bytes == size


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("utilization", "40", "above 0, up to 1"),
        ("gpu_memory", "nan", "above 0, and finite"),
        ("gpu_tflops", "inf", "above 0, and finite"),
    ],
)
def test_a_machine_that_cannot_be_is_one_line(flag, value, allowed, capsys):
    line = pipeline.refusal([f"--plan.{flag}", value], capsys, plan.main)
    assert line == f"--plan.{flag} {float(value)}: allowed: {allowed}"


def test_a_mean_response_is_at_most_the_longest_one_and_the_time_says_how_long_its_prompts_are(directory, capsys):
    for longest, allowed, prompt in ((None, 24, 0), (8, 8, 16)):
        flags = pipeline.flags(directory, policy_loss="bapo", data__max_len=24, rollout__max_new_tokens=longest)
        line = pipeline.refusal(["--plan.response_tokens", "25", *flags], capsys, plan.main)
        assert line == f"--plan.response_tokens 25: allowed: up to {allowed}, the longest response of the run"
        plan.main(["--plan.response_tokens", "7", *flags])
        assert f", with prompts of {prompt} tokens" in capsys.readouterr().out


def test_a_plan_in_fp32_is_refused_because_its_bytes_are_those_of_gpus(directory, capsys):
    line = pipeline.refusal(pipeline.flags(directory, ds__param_dtype="fp32"), capsys, plan.main)
    assert line == "--ds.param_dtype fp32: is for CPUs, and the plan is for GPUs; allowed: bf16, fp16"
