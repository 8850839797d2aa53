"""flash_attn's padding helpers in torch, for a machine that cannot install it.

Only what `openrlhf/models/ring_attn_utils.py` imports, with flash_attn 2.8.3's signatures (`bert_padding.py`).
"""

import sys
from types import ModuleType

import torch
from einops import rearrange


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] of x [rows, ...]: [n, ...]."""
    return x[indices]


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> tuple:
    """Drop padding.

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
    """The inverse: tokens [total, ...] back to [batch, seqlen, ...], zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_copy(0, indices, hidden_states)
    return rearrange(padded, "(b s) ... -> b s ...", b=batch)


def all_gather(x: torch.Tensor, process_group) -> torch.Tensor:
    """Only ring attention calls it, and ring attention needs CUDA kernels."""
    raise RuntimeError("ring attention (--ds.ring_attn_size above 1) needs a GPU")


def install() -> None:
    """Let `from flash_attn.bert_padding import ...` find these functions.

    Only the submodules are made known, not `flash_attn` itself: transformers and vLLM ask for the package to decide
    whether its kernels are there, and must go on hearing that they are not.
    """
    bert_padding = ModuleType("flash_attn.bert_padding")
    for function in (index_first_axis, pad_input, rearrange, unpad_input):
        setattr(bert_padding, function.__name__, function)
    distributed = ModuleType("flash_attn.utils.distributed")
    distributed.all_gather = all_gather
    for module in (bert_padding, distributed):
        sys.modules.setdefault(module.__name__, module)
