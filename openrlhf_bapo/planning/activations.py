"""Bytes that a forward and a backward take: activations per token, and logits."""

from dataclasses import dataclass

from openrlhf_bapo.planning.model_shape import ModelShape
from openrlhf_bapo.planning.terms import divide_up


def layer_bytes_per_token(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return the bytes that one layer saves for its backward, per token, in bf16 with flash attention.

    With hidden size h, queries q = heads x head_dim, keys k (and values) = key_value_heads x head_dim, MLP size i:

    | saved by | tensors | bytes |
    |---|---|---|
    | 2 RMSNorm | input in fp32, its inverse root mean square, normalized input in bf16 | 2 (4h + 4 + 2h) |
    | query, key and value projections | their common input | 2h |
    | attention, output projection | queries, keys, values, attention's output, fp32 log-sum-exp | 4q + 4k + 4 heads |
    | gate and up projection | their common input | 2h |
    | SwiGLU and down projection | gate, silu(gate), up, product | 8i |
    | RMSNorm of queries and keys (Qwen3) | as above, but over heads | 6 (q + k) + 4 (heads + key_value_heads) |

    Residual additions and rotary embeddings save nothing more. DeepSpeed's tensor parallelism splits the tensors whose
    size contains q, k, i or heads.
    """
    h, q, k = shape.hidden_size, shape.query_size, shape.key_value_size
    heads, i = shape.num_attention_heads, shape.intermediate_size
    split = 4 * q + 4 * k + 4 * heads + 8 * i
    split += (6 * (q + k) + 4 * (heads + shape.num_key_value_heads)) * shape.qk_norm
    return 16 * h + 8 + divide_up(split, tensor_parallel_size)


def saved_bytes_per_token(shape: ModelShape, gradient_checkpointing: bool, tensor_parallel_size: int = 1) -> int:
    """Return the bytes that a forward with gradient keeps in all layers; with checkpointing, the layers' inputs."""
    if gradient_checkpointing:
        return 2 * shape.hidden_size * shape.num_layers
    return layer_bytes_per_token(shape, tensor_parallel_size) * shape.num_layers


def outer_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes saved outside layers: final RMSNorm and lm_head's input (8h + 4), cosines, sines, token ids."""
    return 8 * shape.hidden_size + 4 + 4 * shape.head_dim + 8


def backward_bytes_per_token(shape: ModelShape, gradient_checkpointing: bool, tensor_parallel_size: int = 1) -> int:
    """Return the bytes at work in a layer's backward: gradients of MLP and residual, and recomputed activations."""
    gradients = divide_up(4 * shape.intermediate_size, tensor_parallel_size) + 2 * shape.hidden_size
    recomputed = layer_bytes_per_token(shape, tensor_parallel_size) if gradient_checkpointing else 0
    return gradients + recomputed


def forward_bytes_per_token(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return the bytes of a forward without gradient, which peaks in an MLP: silu(gate), up, product, 4 states."""
    outer = 4 * shape.head_dim + 8
    return divide_up(6 * shape.intermediate_size, tensor_parallel_size) + 8 * shape.hidden_size + outer


@dataclass(frozen=True)
class LogitsBytes:
    """Bytes per logit (token and vocabulary entry) in OpenRLHF's models/actor.py and models/utils.py."""

    forward: int
    """Without gradient: lm_head's bf16 output and its copy in fp32."""
    backward: int
    """The peak of the backward through the loss."""
    held: int
    """From the forward to the end of the step: `training_step` keeps the model's output with its fp32 logits."""


def logits_bytes(*, temperature: float, entropy_coef: float | None, fused_kernels: bool) -> LogitsBytes:
    """Return the bytes per logit. Logits are never chunked, so they are the largest term with long samples.

    Fused kernels: flash-attn's cross entropy makes fp32 gradients beside the fp32 logits (4 + 4) and casts them to bf16
    (2). A division by the temperature, or an entropy in the loss, adds one fp32 tensor before that cast (4 + 4 + 4).
    The compiled entropy saves only sums per token.

    Otherwise: torch's chunked log-sum-exp adds up the chunks' gradients in full size (16). The entropy saves its
    probabilities (4), and its backward needs two more such tensors (8).

    Args:
        temperature: the rollouts' temperature, which divides the logits.
        entropy_coef: None: no entropy; 0: the entropy is logged; otherwise it is part of the loss.
        fused_kernels: as in `TrainingSetup`.
    """
    logged, in_loss = entropy_coef is not None, bool(entropy_coef)
    if fused_kernels:
        return LogitsBytes(forward=6, backward=12 if in_loss or temperature != 1 else 10, held=4)
    return LogitsBytes(forward=6, backward=16 + 4 * logged + 8 * in_loss, held=4 + 4 * logged)
