"""Registration: our parts are in OpenRLHF's seams, in whichever order a process imports the modules."""

import subprocess
import sys

import pipeline
import pytest

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
    from openrlhf.utils.utils import get_strategy

    args = pipeline.parse(
        pipeline.flags(pipeline.make_model(tmp_path), ds__zero_stage=stage, train__dynamic_batch_enable=True)
    )
    config = get_strategy(args).get_ds_train_config()
    assert config.get("managed_gradient_accumulation", True) == is_counting
