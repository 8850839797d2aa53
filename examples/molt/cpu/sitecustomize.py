"""Lets Molt run on a CPU: torch.cuda's names as for OpenRLHF, gloo for NCCL. In every process with PYTHONPATH here."""

import functools
import importlib
import time
from types import SimpleNamespace

import wrapt

from openrlhf_bapo.openrlhf import cpu  # torch.cuda's names, vLLM's linear layers, and environment variables


class TorchOnCpu(cpu._TorchOnCpu):
    """Stands for torch in a module that names "cuda" as its device."""

    def __init__(self, torch) -> None:
        super().__init__(torch)
        self.device = lambda *_: torch.device("cpu")

    def __reduce__(self):  # Ray sends methods with their modules' names
        return importlib.import_module, ("torch",)


def _cuda(torch) -> None:
    if not torch.cuda.is_available():
        for name in ("reset_peak_memory_stats", "get_device_name"):
            setattr(torch.cuda, name, lambda *_: None)


def _strategy(strategy) -> None:
    setup = strategy.FsdpStrategy.setup_distributed

    @functools.wraps(setup)
    def over_gloo(self, *args, **kwargs):
        init = strategy.dist.init_process_group
        strategy.dist.init_process_group = lambda backend, **given: init(backend="gloo", **given)
        try:
            setup(self, *args, **kwargs)
        finally:
            strategy.dist.init_process_group = init

    strategy.FsdpStrategy.setup_distributed = over_gloo


def _ray(ray) -> None:
    # As many pretended GPUs as the tests ask for. CPUs are counts for Ray's scheduler, not cores.
    cluster = dict(
        num_gpus=3, num_cpus=16, include_dashboard=False, _system_config={"prestart_worker_first_driver": False}
    )
    ray.init = functools.partial(ray.init, **cluster)


def _patience(node) -> None:
    # Ray gives itself 30 s to start, which a loaded machine may need more of.
    node.time = SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() / 20})


def _device(module) -> None:
    module.torch = TorchOnCpu(module.torch)


def _engine(vllm_worker_wrap) -> None:
    import torch

    def update_weights_packed(self, metas):
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in metas]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self._model_update_group.broadcast(buffer, src=0)
        parts = zip(metas, buffer.split(sizes), strict=True)
        self.model_runner.model.load_weights([(name, part.view(t).view(*shape)) for (name, t, shape), part in parts])

    vllm_worker_wrap.WorkerWrap.update_weights_packed = update_weights_packed
    for name in ("begin_weight_update", "end_weight_update"):  # for kernels that pack their weights
        setattr(vllm_worker_wrap.WorkerWrap, name, lambda self: None)


for name, hook in {
    "torch": _cuda,
    "ray": _ray,
    "ray._private.node": _patience,
    "molt.trainer.fsdp.strategy": _strategy,
    "molt.trainer.workers.policy_actor": _device,
    "nemo_automodel._transformers.auto_model": _device,
    "molt.trainer.vllm.vllm_worker_wrap": _engine,
    "molt.utils.distributed_util": cpu._weight_sync_over_gloo,
}.items():
    wrapt.register_post_import_hook(hook, name)
