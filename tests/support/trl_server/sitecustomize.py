"""Lets a vLLM server on a CPU receive weights from TRL over gloo: tests/support/trl_async_cpu.py."""

import wrapt


def _over_gloo(nccl_engine) -> None:
    import trl_async_cpu

    def join(info, parallel_config):
        return trl_async_cpu.join_group(vars(info), info.rank_offset + parallel_config.rank)

    nccl_engine.worker_init_process_group = join
    nccl_engine.packed_nccl_broadcast_consumer = trl_async_cpu.receive


wrapt.register_post_import_hook(_over_gloo, "vllm.distributed.weight_transfer.nccl_engine")


def _without_system_env(api_router) -> None:
    api_router._get_system_env_info_cached = dict  # it would ask pip, which takes seconds


wrapt.register_post_import_hook(_without_system_env, "vllm.entrypoints.serve.dev.server_info.api_router")
