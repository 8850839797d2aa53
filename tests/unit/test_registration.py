"""Registration: our parts are in OpenRLHF's seams, in whichever order a process imports the modules."""

import importlib.util
import os
import subprocess
import sys

import pipeline
import pytest
import torch
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from openrlhf.utils.utils import get_strategy

from openrlhf_bapo.openrlhf import workarounds
from openrlhf_bapo.openrlhf.registration import HEAVY, SEAMS

FILES = sorted({function.split(".")[0] for _, function in SEAMS})
IMPORTS_OURS_FIRST = """
import importlib, sys
from openrlhf_bapo.openrlhf import registration
registration.register()
importlib.import_module("openrlhf_bapo.openrlhf." + sys.argv[1])
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils import experience
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine
from openrlhf.utils import agent
from openrlhf.utils.deepspeed import deepspeed
ours = (
    ppo_actor.ActorPPOTrainer, ppo_actor.DataLoader, experience.Experience, ppo_trainer.RemoteExperienceMaker,
    ppo_trainer.SamplesGenerator, ppo_trainer_async.SamplesGenerator, launcher.BaseDistributedActor._get_free_port,
)
assert all(part.__module__.startswith("openrlhf_bapo.") for part in ours), ours
wrapped = (
    ppo_actor.ActorPPOTrainer.ppo_train, ppo_critic.CriticPPOTrainer.ppo_train,
    deepspeed.DeepspeedStrategy.get_ds_train_config,
    vllm_engine.RolloutRayActor.__ray_metadata__.modified_class.__init__,
    ppo_trainer.PPOTrainer.__ray_metadata__.modified_class.init_checkpoint_states,
    ppo_trainer_async.TrainingActor.__ray_metadata__.modified_class.init_checkpoint_states,
)
assert all(hasattr(part, "__wrapped__") or part.__module__.startswith("openrlhf_bapo") for part in wrapped), wrapped
assert not registration._waiting
"""


@pytest.mark.parametrize("file", FILES)
def test_our_parts_are_in_place_if_a_process_imports_ours_before_openrlhfs(file):
    command = [pipeline.warm_python(), "-c", IMPORTS_OURS_FIRST, file]
    run = subprocess.run(command, capture_output=True, text=True, cwd=pipeline.REPOSITORY)
    assert run.returncode == 0, run.stderr[-2000:]


COUNTS_COLLECTIONS = """
import gc
from openrlhf_bapo.openrlhf import registration
large, before = [], gc.get_threshold()
gc.callbacks.append(lambda phase, info: info["generation"] == 2 and large.append(len(gc.get_objects()) > 250_000))
registration.register()
import openrlhf.trainer.ray.ppo_actor
assert not any(large), large
assert gc.get_threshold() == before and gc.isenabled()
assert gc.get_freeze_count() > 400_000
"""


def test_the_collector_does_not_look_through_what_is_imported():
    run = subprocess.run([sys.executable, "-c", COUNTS_COLLECTIONS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert set(HEAVY) <= {module for module, _ in SEAMS}


def test_the_collector_of_an_engines_process_is_left_alone():
    code = """
import gc, sys, types
sys.modules["vllm"], before = types.ModuleType("vllm"), gc.get_threshold()
from openrlhf_bapo.openrlhf import registration
registration.register()
assert gc.get_threshold() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("stage", "is_counting"), [(0, True), (1, False), (2, False), (3, True)])
def test_deepspeed_stops_counting_micro_batches_only_where_it_would_lose_their_gradients(tmp_path, stage, is_counting):
    args = pipeline.parse(
        pipeline.flags(pipeline.make_model(tmp_path), ds__zero_stage=stage, train__dynamic_batch_enable=True)
    )
    config = get_strategy(args).get_ds_train_config()
    assert config.get("managed_gradient_accumulation", True) == is_counting


IMPORTS_VLLMS_SAMPLER = """
import importlib, os
from openrlhf_bapo import register_in_vllm
register_in_vllm()  # as vLLM calls it in an engine's process
importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
from vllm import envs
print(envs.VLLM_USE_FLASHINFER_SAMPLER)
"""


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
@pytest.mark.parametrize(("given", "used"), [({}, "False"), ({"VLLM_USE_FLASHINFER_SAMPLER": "1"}, "True")])
def test_an_engine_samples_without_flashinfer_where_it_is_not_installed(given, used):
    variables = {name: value for name, value in os.environ.items() if name != "VLLM_USE_FLASHINFER_SAMPLER"}
    command = [pipeline.warm_python(), "-c", IMPORTS_VLLMS_SAMPLER]
    run = subprocess.run(command, capture_output=True, text=True, env=variables | given)
    assert run.stdout.split()[-1:] == [used], run.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed's optimizer cannot be compiled only without a GPU")
@pytest.mark.parametrize(("offload", "has_line"), [(None, True), (True, False)])
def test_torchs_adamw_trains_on_a_gpu_where_deepspeeds_cannot_be_compiled(
    tmp_path, monkeypatch, capsys, offload, has_line
):
    args = pipeline.parse(pipeline.flags(pipeline.make_model(tmp_path), ds__adam_offload=offload))
    strategy = get_strategy(args)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy.get_ds_train_config({"type": "AdamW", "params": {}})
    line = "openrlhf-bapo: torch's AdamW trains, because DeepSpeed's cannot be compiled ("
    assert (line in capsys.readouterr().out) == has_line


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed's optimizer cannot be compiled only without a GPU")
def test_only_adamw_is_replaced_by_torchs():
    adam, muon = ({"optimizer": {"type": name, "params": {}}} for name in ("AdamW", "Muon"))
    for config in (adam, muon, {}):
        workarounds.choose_adam(config)
    assert adam["optimizer"]["params"] == {"torch_adam": True} and muon["optimizer"]["params"] == {}


def test_deepspeed_compiles_its_adamw_where_the_environment_asks_for_an_architecture_with_a_letter(monkeypatch):
    flags = []

    def load(self, verbose):
        self.jit_mode = True
        self.compute_capability_args()
        flags.append(os.environ["TORCH_CUDA_ARCH_LIST"])

    monkeypatch.setattr(FusedAdamBuilder, "load", load)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0a+PTX")
    workarounds.compile_adam()
    assert flags == ["9.0;10.0+PTX"]
