"""Puts our parts into OpenRLHF's modules, in every process that imports them.

OpenRLHF has no registry. It looks up its parts by module-level name at run time. Our functions replace these names
right after a module is imported. Heavy modules are imported only when OpenRLHF imports them.
"""

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

WORKER_SETUP_HOOK = "openrlhf_bapo.openrlhf.registration.register"
"""For `ray.init(runtime_env={"worker_process_setup_hook": ...})`, because Ray workers are separate processes."""

ENGINE_DTYPE = "OPENRLHF_BAPO_ENGINE_DTYPE"
"""Environment variable of Ray's workers with the engines' type, "bfloat16", "float16" or "float32"."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

SEAMS = (
    ("openrlhf.utils.agent", "reward_calls.use_reward_calls"),
    ("openrlhf.utils.utils", "workarounds.know_fp32"),
    ("openrlhf.utils.deepspeed.deepspeed", "workarounds.accumulate_dynamic_batches"),
    ("openrlhf.utils.deepspeed.deepspeed", "workarounds.average_in_float32"),
    ("openrlhf.utils.deepspeed.deepspeed", "workarounds.resume_with_the_given_settings"),
    ("openrlhf.utils.deepspeed.deepspeed", "workarounds.train_without_a_compiler"),
    ("openrlhf.trainer.ppo_utils.replay_buffer", "workarounds.plan_steps_for_all_samples"),
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
    ("vllm.v1.sample.ops.topk_topp_sampler", "workarounds.sample_without_flashinfer"),
)
"""(module, our function that is called with the module after its import), in the order of the calls."""


HEAVY = (
    "openrlhf.trainer.ppo_trainer",
    "openrlhf.trainer.ppo_trainer_async",
    "openrlhf.trainer.ray.ppo_actor",
    "openrlhf.trainer.ray.ppo_critic",
    "openrlhf.trainer.ray.vllm_engine",
)
"""After the import of one of these modules, a process has imported torch, DeepSpeed, vLLM and the rest of OpenRLHF."""

_waiting: list[tuple[str, str, ModuleType]] = []
"""(our module, our function, upstream module) of the calls that wait until our module is imported."""


@functools.cache
def register() -> None:
    """Register with OpenRLHF in this process. This is cheap, and a second call has no effect."""
    _spare_imports_the_collector()
    for module, function in SEAMS:
        file, name = function.split(".")
        ours = f"{__package__}.{file}"
        wrapt.register_post_import_hook(functools.partial(_call, ours, name), module)
        wrapt.register_post_import_hook(_call_waiting, ours)


def in_place_of(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that puts a function in place of `owner.name`. Its first argument is the one it replaces."""
    upstream = getattr(owner, name)

    def put(function: Callable) -> Callable:
        @functools.wraps(upstream)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(upstream, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put


def runs_on_cpu() -> bool:
    """Say whether the workers of a run have no CUDA. Those of a cluster that it joins may have it."""
    import torch

    return not (torch.cuda.is_available() or os.environ.get("RAY_ADDRESS"))


def start_ray_at_equal_priority() -> None:
    """Let a Ray cluster that this process starts run at this process's priority, unless the user has set another.

    By default, Ray gives its workers niceness 15. Another program then takes most of the time of a core that both use.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")


def runtime_env(param_dtype: str, given: dict | None = None) -> dict:
    """Return `runtime_env` for `ray.init`: OpenRLHF's `given`, our registration, and the type of the engines.

    `param_dtype` is that of `--ds.param_dtype`: "bf16", "fp16" or "fp32".
    """
    given = given or {}
    variables = {**given.get("env_vars", {}), ENGINE_DTYPE: _DTYPES[param_dtype]}
    return {**given, "worker_process_setup_hook": WORKER_SETUP_HOOK, "env_vars": variables}


def _spare_imports_the_collector() -> None:
    """Keep Python's garbage collector out of the imports that follow.

    The imports make a million objects, which stay. Whenever their number has grown by a quarter, Python would search
    all of them for garbage, which takes a fifth of the imports' time. Every later search would take as long again.
    """
    if "vllm" in sys.modules:  # an engine's process, which has imported everything
        return
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])

    def leave_out(_: ModuleType) -> None:
        gc.freeze()
        gc.set_threshold(*before)

    for module in HEAVY:
        wrapt.register_post_import_hook(leave_out, module)


def _call(ours: str, name: str, module: ModuleType) -> None:
    function = getattr(importlib.import_module(ours), name, None)
    if function is not None:
        function(module)
    else:
        # Our module was imported first, as in a process that unpickles objects of ours, and is importing `module` now.
        _waiting.append((ours, name, module))


def _call_waiting(ours: ModuleType) -> None:
    for waiting in [waiting for waiting in _waiting if waiting[0] == ours.__name__]:
        _waiting.remove(waiting)
        _, name, module = waiting
        getattr(ours, name)(module)
