"""Lets OpenRLHF, DeepSpeed and vLLM run without CUDA, and OpenRLHF without flash-attn. Has no other effect on a GPU.

OpenRLHF calls CUDA by name, and DeepSpeed relies on the order of its streams. Hooks replace these places by CPU
counterparts after the import of their modules. Every process decides for itself when it loads torch, because a driver
without a GPU may control workers that have one.
"""

import functools
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from openrlhf_bapo.openrlhf.registration import in_place_of

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",  # processes share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs more time than it saves in short runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB per engine at most
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no further process per engine
}
"""Environment of every process. Variables that the user has set keep their values."""


@functools.cache
def register() -> None:
    """Register the hooks, which act when a process imports torch. A second call has no effect."""
    wrapt.register_post_import_hook(_activate, "torch")


def _activate(torch: ModuleType) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        from openrlhf_bapo.openrlhf.cpu import flash_attn

        flash_attn.install()
    if torch.cuda.is_available():
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # With --train.full_determinism_enable torch would fill DeepSpeed's reduce buckets, 2 GiB in every step. Nothing
    # reads what it fills.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("current_stream", "empty_cache", "set_device", "synchronize"):
        # A separate function for each name, because torch.compile requires distinct functions in its table.
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name, hook in {
        "deepspeed.ops.op_builder.builder": _no_compiled_ops,
        "deepspeed.runtime.zero.partition_parameters": _gather_parameters_in_turn,
        "openrlhf.utils.deepspeed.deepspeed": _strategy,
        "openrlhf.utils.distributed_util": _weight_sync_over_gloo,
        "openrlhf.trainer.ppo_utils.replay_buffer": _replay_buffer_device,
        "openrlhf.trainer.ray.vllm_worker_wrap": _worker_device,
        "transformers.modeling_utils": _sdpa_for_flash_attention,
        "vllm.model_executor.layers.utils": _unpacked_linear_layers,
        "vllm.v1.worker.cpu_worker": _kv_cache_without_unused_blocks,
    }.items():
        wrapt.register_post_import_hook(hook, name)


def adapt_flags(args: Namespace) -> None:
    """Set flags in place to the only values that work on a CPU. Print a line for each changed flag, and the precision.

    Args:
        args: flat, names with dots.
    """
    values = vars(args)
    for name, value in {
        "vllm.sync_backend": "gloo",  # there is no NCCL
        "vllm.enforce_eager": True,  # there are no CUDA graphs
        "vllm.enable_sleep": False,  # sleep frees GPU memory for other processes
        "ds.enable_sleep": False,
    }.items():
        if values[name] != value:
            print(f"openrlhf-bapo: on the CPU --{name} is {value}, not {values[name]}", flush=True)
            values[name] = value
    print(f"openrlhf-bapo: on the CPU all models compute in {values['ds.param_dtype']} (--ds.param_dtype)", flush=True)


def ray_resources(args: Namespace) -> dict:
    """Return arguments for `ray.init` that start a cluster with as many pretended GPUs as the flags ask for.

    Args:
        args: flat, names with dots.
    """
    values = vars(args)
    groups = ["actor"]
    if values["algo.kl.init_coef"] > 0:
        groups.append("ref")
    if not values["reward.remote_url"] and not values["train.agent_func_path"]:
        groups.append("reward")
    if values["algo.advantage.estimator"] == "gae":
        groups.append("critic")
    num_gpus = sum(values[f"{group}.num_nodes"] * values[f"{group}.num_gpus_per_node"] for group in groups)
    num_gpus += (values["vllm.num_engines"] or 0) * values["vllm.tensor_parallel_size"]
    # One CPU per GPU, and two for OpenRLHF's trainer actors. These are counts for Ray's scheduler, not cores. By
    # default, Ray would start that many idle workers in advance.
    system = {"prestart_worker_first_driver": False}
    return {"num_gpus": num_gpus, "num_cpus": num_gpus + 2, "include_dashboard": False, "_system_config": system}


def _no_compiled_ops(builder: Any) -> None:
    # Otherwise DeepSpeed tries the compiler for each op in every process, and compiles its shared-memory all-reduce at
    # first use. torch and gloo do not need them.
    builder.probe_is_compatible = lambda _: False


def _gather_parameters_in_turn(partition_parameters: ModuleType) -> None:
    # DeepSpeed 0.19.6 gathers a module's parameters together and waits for the last gather only (`launch_handles[-1]`).
    # On a CUDA stream the others have finished by then. With gloo they may not have, and overwrite parameters that are
    # loaded meanwhile (its pull request 8539).
    init = partition_parameters.Init

    def in_turn(self: Any, param_list: Any, hierarchy: int = 0, quantize: bool = False) -> None:
        self._allgather_params_sequential(param_list, hierarchy)

    init._allgather_params_coalesced = in_turn


def _strategy(deepspeed_strategy: Any) -> None:
    deepspeed_strategy.init_device_mesh = _on_cpu(deepspeed_strategy.init_device_mesh)
    strategy = deepspeed_strategy.DeepspeedStrategy
    moving_average = strategy.moving_average

    @in_place_of(strategy, "get_ds_train_config")
    def get_ds_train_config(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        config = upstream(self, *args, **kwargs)
        if config.get("optimizer", {}).get("type") == "AdamW":
            # torch's AdamW is equal to DeepSpeed's, which would take most of a minute to compile at first use.
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    strategy.moving_average = lambda self, model, ema, beta=0.992, device="cpu": moving_average(self, model, ema, beta)


def _on_cpu(function: Callable) -> Callable:
    """Replace the first argument of `function`, a CUDA device, by the CPU."""
    return lambda _, *args, **kwargs: function("cpu", *args, **kwargs)


class _TorchOnCpu(ModuleType):
    """Stands for torch in a module that names "cuda" as its device."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch
        self.device = _on_cpu(torch.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _replay_buffer_device(replay_buffer: Any) -> None:
    replay_buffer.torch = _TorchOnCpu(replay_buffer.torch)


class _GlooBroadcast:
    """Implements over gloo the only method of vLLM's PyNcclCommunicator that OpenRLHF calls."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def _weight_sync_over_gloo(distributed_util: Any) -> None:
    def stateless_init_process_group(
        master_address: str, master_port: int, rank: int, world_size: int, device: Any
    ) -> _GlooBroadcast:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        return _GlooBroadcast(
            stateless_init_torch_distributed_process_group(master_address, master_port, rank, world_size, "gloo")
        )

    distributed_util.stateless_init_process_group = stateless_init_process_group


def _worker_device(vllm_worker_wrap: ModuleType) -> None:
    def update_weight(self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        import torch

        if dtype != self.model_config.dtype:
            raise TypeError(f"{name} is sent as {dtype}, the engine holds {self.model_config.dtype}")
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    vllm_worker_wrap.WorkerWrap.update_weight = update_weight


def _sdpa_for_flash_attention(modeling_utils: Any) -> None:
    # OpenRLHF forces flash_attention_2 for packed samples. For sdpa, transformers makes the block-diagonal mask.
    @in_place_of(modeling_utils.PreTrainedModel, "_check_and_adjust_attn_implementation")
    def check(upstream: Any, self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation is not None and "flash_attention" in attn_implementation:
            attn_implementation = "sdpa"
        return upstream(self, attn_implementation, *args, **kwargs)


def _unpacked_linear_layers(layers_utils: Any) -> None:
    # vLLM repacks linear weights for its CPU kernels when it loads them, and cannot load new weights into them.
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    layers_utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _kv_cache_without_unused_blocks(cpu_worker: Any) -> None:
    # vLLM fills its whole cache with zeros when it starts. The engines of small models use a small part of it.
    @in_place_of(cpu_worker.CPUWorker, "determine_available_memory")
    def determine_available_memory(upstream: Any, self: Any) -> int:
        config, layers = self.vllm_config, self.get_kv_cache_spec().values()
        per_sequence = sum(layer.max_memory_usage_bytes(config) for layer in layers)
        empty_block = sum(layer.page_size_bytes for layer in layers)
        return min(upstream(self), config.scheduler_config.max_num_seqs * per_sequence + empty_block)
