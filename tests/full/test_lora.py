"""Training of a LoRA adapter (`--ds.lora.rank`) through the real pipeline: engines, checkpoints, the saved adapter."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pipeline
import pytest
import recordings
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf_bapo.flags import input_files
from openrlhf_bapo.openrlhf.lora import merged_for_engines

LORA = dict(ds__lora__rank=4, ds__lora__alpha=32, actor__adam__lr=1e-2)
KL = dict(algo__kl__init_coef=1e-4, algo__kl__use_loss=True, algo__kl__estimator="k3")
TWO_RANKS = dict(actor__num_gpus_per_node=2, ref__num_gpus_per_node=2)
RUNS = {
    "one rank, ZeRO-2": {},
    "two ranks, ZeRO-2, colocated": TWO_RANKS | dict(train__colocate_all=True, vllm__num_engines=2),
    "two ranks, ZeRO-3, chosen modules": TWO_RANKS
    | {"ds.zero_stage": 3, "ds.lora.target_modules": "o_proj", "actor.gradient_checkpointing_enable": True},
    "async": dict(train__async_enable=True),
}


@pytest.mark.parametrize("run", RUNS)
def test_engines_answer_with_the_adapter_of_their_version_and_the_reference_with_none(tmp_path, run):
    directory = pipeline.make_model(tmp_path)
    saving = dict(ckpt__save_steps=1, ckpt__save_hf=True, ckpt__disable_ds=True, data__max_samples=48)
    flags = pipeline.flags(directory, offpolicy__ratio_base="rollout", **LORA | KL | saving | RUNS[run])
    pipeline.train(directory, flags, "run", **recordings.environment(directory / "recording"))
    batch = recordings.trained_on(directory / "recording")
    (directory / "adapters").mkdir()
    for step in (1, 2, 3):
        weights = merged_adapter(directory, directory / f"ckpt/global_step{step}_hf")
        torch.save(weights, directory / f"adapters/weights-{step:03d}.pt")
    policies = recordings.Policies(directory / "model", directory / "adapters")
    mask, versions = batch["action_mask"] > 0, batch["versions"].long()
    assert versions[mask].max() >= 1

    def log_probs(versions: torch.Tensor, sampled: bool) -> torch.Tensor:
        return policies.log_probs(batch, versions, sampled)[mask]

    base = torch.zeros_like(versions)
    engine = log_probs(versions, sampled=True)
    assert (engine - batch["rollout_log_probs"][mask]).abs().max() < recordings.CLOSE
    assert (log_probs(base, sampled=False) - batch["base_action_log_probs"][mask]).abs().max() < recordings.CLOSE
    # Other weights would not do.
    assert (engine - log_probs(base, sampled=True))[versions[mask] > 0].abs().median() > recordings.APART
    last = merged_adapter(directory, directory / "out")
    assert all(torch.equal(last[name], weight) for name, weight in weights.items())


def test_in_bf16_at_zero_3_engines_load_merged_weights_and_the_adapter_makes_a_model_for_evaluation(tmp_path):
    directory = pipeline.make_model(tmp_path)
    sizes = dict(ds__param_dtype="bf16", ds__zero_stage=3, offpolicy__ratio_base="rollout")
    steps = pipeline.steps(pipeline.train(directory, pipeline.flags(directory, **LORA | KL | TWO_RANKS | sizes), "run"))
    # Rounded, beside a policy that has moved far from its start.
    assert len(steps) == 2 and max(step["offpolicy/engine_mismatch"] for step in steps) < 0.05 < steps[1]["kl"]
    last = merged_adapter(directory, directory / "out")
    adapter = ["--model_path", directory / "model", "--lora_path", directory / "out"]
    combine = [sys.executable, "-m", "openrlhf.cli.lora_combiner", *adapter, "--output_path", directory / "whole"]
    subprocess.run(combine, check=True)
    input_files.check_model("--model", str(directory / "whole"), must_exist=True)
    whole = load_file(directory / "whole/model.safetensors")
    torch.testing.assert_close(whole, {name: last[name].bfloat16() for name in whole}, rtol=0.02, atol=2e-3)


def merged_adapter(directory: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The weights that PEFT makes of the start model and a saved adapter."""
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_goes_on_with_its_adapter_and_optimizer(tmp_path, stage):
    directory = pipeline.make_model(tmp_path)
    sizes = dict(ds__zero_stage=stage, actor__num_gpus_per_node=2)
    saving = dict(ckpt__save_steps=1, ckpt__save_hf=True, train__full_determinism_enable=True)
    flags = pipeline.flags(directory, **LORA | sizes | saving)
    unbroken = pipeline.steps(pipeline.train(directory, flags, "unbroken"))
    adapter = load_adapter(directory / "out")
    first, second = (load_adapter(directory / f"ckpt/global_step{step}_hf") for step in (1, 2))
    assert all(torch.equal(second[name], adapter[name]) for name in second)
    assert first.keys() == adapter.keys() and not any(torch.equal(first[name], adapter[name]) for name in adapter)

    for folder in ("ckpt/_actor/global_step2", "out"):
        shutil.rmtree(directory / folder)
    (directory / "ckpt/_actor/latest").write_text("global_step1")
    resumed = pipeline.steps(pipeline.train(directory, [*flags, "--ckpt.load_enable"], "resumed"))
    assert [step["policy_loss"] for step in resumed] == [unbroken[1]["policy_loss"]]
    again = load_adapter(directory / "out")
    assert again.keys() == adapter.keys() and all(torch.equal(again[name], adapter[name]) for name in adapter)


def load_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's weights. OpenRLHF saves them as .bin at ZeRO-3."""
    file = folder / "adapter_model.bin"
    return torch.load(file) if file.exists() else load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"], ["lm_head"]], ids=str)
def test_a_merged_model_has_the_plain_models_names_and_the_trained_weights_keep_every_bit(tmp_path, dtype, targets):
    plain = AutoModelForCausalLM.from_pretrained(pipeline.make_model(tmp_path) / "model", dtype=dtype)
    names = [name for name, _ in plain.named_parameters()]
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=32, target_modules=targets, init_lora_weights=False))
    model.to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = copy.deepcopy(model).double().merge_and_unload().state_dict()
    trainer = SimpleNamespace(actor=SimpleNamespace(model=SimpleNamespace(module=model)))
    sent = {}
    with merged_for_engines(trainer):
        for name, weight in trainer.actor.model.module.named_parameters():
            with deepspeed.zero.GatheredParameters([weight], enabled=False):
                sent[name] = weight.data.clone()
    assert list(sent) == names
    for name, weight in sent.items():
        assert weight.dtype == dtype
        close = 4 * torch.finfo(dtype).eps  # the sum is rounded, and before it the product, which may be larger
        torch.testing.assert_close(weight.double(), expected[name], rtol=close, atol=8 * close)
    assert trainer.actor.model.module is model
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
