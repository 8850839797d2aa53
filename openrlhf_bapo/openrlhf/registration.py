"""Puts our parts into OpenRLHF's seams, in every process that loads OpenRLHF, as soon as it does.

OpenRLHF has no registry. It looks its parts up by module-level name at run time, so a function of ours changes these
names after the import of such a module. Nothing heavy is imported until OpenRLHF imports it.
"""

import functools
import importlib
from types import ModuleType

import wrapt

WORKER_SETUP_HOOK = "openrlhf_bapo.openrlhf.registration.register"
"""For `ray.init(runtime_env={"worker_process_setup_hook": ...})`: Ray workers are separate processes."""

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
"""(module, our function that is called with it when it has been imported), in the order of the calls."""


@functools.cache
def register() -> None:
    """Register with OpenRLHF in this process. Cheap; a second call does nothing."""
    for module, function in SEAMS:
        wrapt.register_post_import_hook(functools.partial(_call, function), module)


def _call(function: str, module: ModuleType) -> None:
    file, name = function.split(".")
    ours = importlib.import_module(f"openrlhf_bapo.openrlhf.{file}")
    if hasattr(ours, name):
        getattr(ours, name)(module)
    else:
        _waiting.append((ours, name, module))


_waiting: list[tuple[ModuleType, str, ModuleType]] = []


def call_what_waits(ours: str) -> None:
    """Make the calls that came before a module of ours was complete; each seam's last line.

    A Ray worker that unpickles a class of ours imports our module first. That imports OpenRLHF's module, whose import
    then calls a function that our module has not yet defined.
    """
    for call in [call for call in _waiting if call[0].__name__ == ours]:
        _waiting.remove(call)
        module, name, upstream = call
        getattr(module, name)(upstream)
