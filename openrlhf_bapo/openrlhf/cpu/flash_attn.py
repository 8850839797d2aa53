"""flash_attn's padding helpers in torch, for machines where it is not installed. Without CUDA it cannot be.

These are the functions that `openrlhf/models/ring_attn_utils.py` imports, with the signatures of flash_attn 2.8.3
(`bert_padding.py`).
"""

import sys
from types import ModuleType
from typing import Any

import torch
from einops import rearrange


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows `indices` [n] of x [rows, ...] as [n, ...]."""
    return x[indices]


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> tuple:
    """Remove the padding of a batch.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], 1 for tokens.

    Returns:
        The tokens [total, ...], their positions in the flat batch [total], cumulative lengths [batch + 1] (int32), the
        greatest length, and the lengths [batch].
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices)
    return tokens, indices, cu_seqlens, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Invert `unpad_input`: return tokens [total, ...] as [batch, seqlen, ...], with zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_copy(0, indices, hidden_states)
    return rearrange(padded, "(b s) ... -> b s ...", b=batch)


def all_gather(x: torch.Tensor, process_group: Any) -> torch.Tensor:
    """Raise RuntimeError. Only ring attention calls this function, and it needs CUDA kernels."""
    raise RuntimeError("ring attention (--ds.ring_attn_size above 1) needs a GPU and the package flash-attn")


def install() -> None:
    """Make `from flash_attn.bert_padding import ...` find these functions.

    Only the submodules are installed, and not `flash_attn` itself, because transformers and vLLM look for the package
    to decide whether its kernels are available.
    """
    for name, functions in {
        "flash_attn.bert_padding": (index_first_axis, pad_input, rearrange, unpad_input),
        "flash_attn.utils.distributed": (all_gather,),
    }.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        sys.modules.setdefault(name, module)
