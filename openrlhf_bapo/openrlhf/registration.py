"""Puts our parts into OpenRLHF's modules, in every process that imports them.

OpenRLHF has no registry. It looks up its parts by module-level name at run time. Functions of ours replace these names
right after a module is imported. Heavy modules are imported only when OpenRLHF imports them.
"""

import functools
import importlib
from types import ModuleType

import wrapt

WORKER_SETUP_HOOK = "openrlhf_bapo.openrlhf.registration.register"
"""For `ray.init(runtime_env={"worker_process_setup_hook": ...})`, because Ray workers are separate processes."""

SEAMS = (
    ("openrlhf.utils.agent", "reward_calls.use_reward_calls"),
    ("openrlhf.utils.deepspeed.deepspeed", "workarounds.accumulate_dynamic_batches"),
    ("openrlhf.trainer.ray.launcher", "workarounds.hold_the_ranks_port"),
    ("openrlhf.trainer.ray.ppo_actor", "actor_trainer.use_actor_trainer"),
    ("openrlhf.trainer.ray.ppo_actor", "workarounds.shuffle_by_step"),
    ("openrlhf.trainer.ray.ppo_critic", "workarounds.shuffle_by_step"),
    ("openrlhf.trainer.ray.vllm_engine", "vllm_engine.use_versioned_engine"),
    ("openrlhf.trainer.ppo_utils.experience", "experience.use_experience"),
    ("openrlhf.trainer.ppo_trainer", "trainer.use_off_policy_parts"),
    ("openrlhf.trainer.ppo_trainer", "trainer.evaluate_at_start"),
    ("openrlhf.trainer.ppo_trainer_async", "trainer.use_off_policy_parts"),
    ("vllm.v1.engine.core", "workarounds.end_with_the_actor"),
)
"""(module, our function that is called with the module after its import), in the order of the calls."""


@functools.cache
def register() -> None:
    """Register with OpenRLHF in this process. This is cheap, and a second call has no effect."""
    for module, function in SEAMS:
        wrapt.register_post_import_hook(functools.partial(_call, function), module)


def _call(function: str, module: ModuleType) -> None:
    file, name = function.split(".")
    getattr(importlib.import_module(f"openrlhf_bapo.openrlhf.{file}"), name)(module)
