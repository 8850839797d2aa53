"""Lets TRL's asynchronous trainer run on a CPU: its attention in torch, and its weight transfer over gloo.

The trainer's process calls `run_on_cpu`. The vLLM server's processes load tests/support/trl_server/sitecustomize.py.
"""

from types import SimpleNamespace

import torch


def flash_attn_varlen_func(query, key, value, offsets_q, offsets_k, max_q, max_k, softmax_scale, causal, window_size):
    """Flash attention 3's, for TRL's packed rows: the queries of a segment are the last tokens of its keys.

    query is [tokens, heads, size], key and value [keys, key heads, size], offsets [segments + 1].
    """
    assert causal and window_size == (-1, -1)
    groups = query.shape[1] // key.shape[1]
    found = []
    for (q0, q1), (k0, k1) in zip(offsets_q.unfold(0, 2, 1).tolist(), offsets_k.unfold(0, 2, 1).tolist(), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
        visible = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = (q @ k.mT * softmax_scale).masked_fill(~visible, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


def run_on_cpu(monkeypatch) -> None:
    """Replace what needs CUDA in the trainer's process."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing, weight_transfer

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(weight_transfer, "open_trainer_endpoint", lambda info: join_group(info, rank=0))
    monkeypatch.setattr(weight_transfer, "packed_nccl_broadcast_producer", send)


def join_group(info: dict, rank: int) -> SimpleNamespace:
    """Return a gloo group, with the names of vLLM's NCCL communicator that TRL uses."""
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    from openrlhf_bapo.openrlhf.cpu import _GlooBroadcast

    place = info["master_address"], info["master_port"], rank, info["world_size"]
    group = _GlooBroadcast(stateless_init_torch_distributed_process_group(*place, "gloo"))
    return SimpleNamespace(broadcast=group.broadcast, group=SimpleNamespace(store=None, socket=None))


def send(iterator, group, src, post_iter_func) -> None:
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous(), src)


def receive(iterator, group, src, post_unpack_func, **_) -> None:
    for name, (shape, dtype) in iterator:
        weight = torch.empty(shape, dtype=dtype)
        group.broadcast(weight, src)
        post_unpack_func([(name, weight)])
