"""How much memory a training run needs per GPU, before it starts: sums of named terms from stated formulas.

A GPU goes through phases, one after another; each is a list of terms that are in memory at the same time:

    generation     vLLM's weights, KV cache, workspace            + what the actor leaves on the GPU
    log-probs      forward without gradient, of actor or reference
    backward through the logits, backward through a layer, optimizer step
    weight sync    vLLM's weights                                 + what the actor leaves on the GPU

The run fits where the largest phase does. Sources: the model states, 2 + 2 + 12 bytes a parameter, are ZeRO's
(Rajbhandari et al., arXiv 1910.02054, section 3.1), the way of counting activations that of Korthikanti et al. (arXiv
2205.05198, section 4.1). The rest was read from OpenRLHF 0.11.2, DeepSpeed 0.19.6, transformers 5.15, flash-attn 2.8.3
and vLLM 0.29; tests/unit/test_memory_plan.py measures at tiny size what can be measured without a GPU. Two things are
estimates, and say so in their formula: what a process takes outside of torch's tensors (`PROCESS_BYTES`), and vLLM's
workspace. Not counted: fragmentation of the allocator, ring attention's key-value buffers (well below 1 GiB), LoRA, and
mixture of experts. Leave some GiB free.

Counts are plain integers: bytes, tokens, parameters. bf16 has 2 bytes, as has fp16.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MODEL_TYPES = ("llama", "qwen2", "qwen3")

# DeepSpeed's defaults (runtime/zero/config.py), in elements. OpenRLHF says "auto", which means them.
REDUCE_BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000

# vLLM's defaults for an engine as OpenRLHF makes it (config/scheduler.py): neither is set there.
VLLM_BATCHED_TOKENS = 2048
VLLM_SEQUENCES = 128

REPLAY_BYTES_PER_TOKEN = 17
"""tokens 4, action_mask 1, behavior_log_probs 4, versions 4, advantages 4 (`replay_pool.SAMPLE_DTYPES`)."""

CHECKPOINT_BYTES_PER_PARAMETER = 14
"""bf16 weights, and AdamW's fp32 weights and two moments."""

PROCESS_BYTES = 2**30
"""CUDA context, NCCL and cuBLAS buffers of one process on a GPU: an estimate, not derived."""


@dataclass(frozen=True)
class Term:
    """One part of a phase: `formula` is the calculation of `bytes` with its numbers put in."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Phase:
    """Terms that are in memory at the same time."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True)
class Fit:
    """What decides whether a GPU is large enough: its largest phase."""

    phase: Phase
    overflow: int
    """Bytes that the phase needs beyond the GPU; negative: bytes left."""
    largest: tuple[Term, ...]
    """The phase's largest terms, the largest first."""


def check_fit(phases: Iterable[Phase], gpu_bytes: int, num_largest: int = 3) -> Fit:
    """The largest of a GPU's phases against its `gpu_bytes`."""
    phase = max(phases, key=lambda phase: phase.total)
    by_size = sorted(phase.terms, key=lambda term: term.bytes, reverse=True)
    return Fit(phase, phase.total - gpu_bytes, tuple(by_size[:num_largest]))


def _divided(numerator: int, denominator: int) -> int:
    """Rounded up, as shards are padded."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class ModelShape:
    """What a dense Llama, Qwen2 or Qwen3 is made of."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Bias of the query, key and value projections (Qwen2)."""
    qk_norm: bool
    """RMSNorm over each head's query and key (Qwen3)."""
    max_position_embeddings: int

    @classmethod
    def from_config(cls, config: dict) -> "ModelShape":
        """From a Hugging Face config.json.

        Raises:
            ValueError: for another model type, or for biases that these models do not have by default.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported; it must be one of {', '.join(MODEL_TYPES)}")
        for name in ("attention_bias", "mlp_bias"):
            if model_type != "qwen2" and config.get(name):
                raise ValueError(
                    f"{name} {config[name]} is not supported with model_type {model_type!r}; it must be false"
                )
        num_heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            max_position_embeddings=config["max_position_embeddings"],
        )

    @property
    def query_size(self) -> int:
        """Elements of a token's queries in one layer."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of a token's keys in one layer, and of its values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest weight matrix."""
        h = self.hidden_size
        return h * max(self.vocab_size, self.intermediate_size, self.query_size)

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return self.num_parameters_per_rank(1)

    def num_parameters_per_rank(self, tensor_parallel_size: int) -> int:
        """Parameters of one tensor-parallel rank of DeepSpeed, which leaves embeddings and norms whole.

        The projections and an untied lm_head are split (module_inject/auto_tp.py).
        """
        h, q, kv = self.hidden_size, self.query_size, self.key_value_size
        split = 2 * h * q + 2 * h * kv + 3 * h * self.intermediate_size  # query and output, key and value, MLP
        split += (q + 2 * kv) * self.attention_bias
        whole = 2 * h + 2 * self.head_dim * self.qk_norm
        embedding = self.vocab_size * h
        lm_head = 0 if self.tie_word_embeddings else embedding
        split = self.num_layers * split + lm_head
        return _divided(split, tensor_parallel_size) + self.num_layers * whole + h + embedding


_QWEN2_32B = ModelShape(5120, 27648, 64, 40, 8, 128, 152064, False, True, False, 131072)
_QWEN2_7B = ModelShape(3584, 18944, 28, 28, 4, 128, 152064, False, True, False, 131072)
_QWEN2_MATH_7B = ModelShape(3584, 18944, 28, 28, 4, 128, 152064, False, True, False, 4096)
_LLAMA_3B = ModelShape(3072, 8192, 28, 24, 8, 128, 128256, True, False, False, 131072)

KNOWN_SHAPES = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _QWEN2_32B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN2_7B,
    "meta-llama/Llama-3.2-3B": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Hybrid-Base": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Hybrid-Zero": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Long-Base": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Long-Zero": _LLAMA_3B,
    "OctoThinker/OctoThinker-3B-Short-Base": _LLAMA_3B,
    "Qwen/Qwen2.5-32B": _QWEN2_32B,
    "Qwen/Qwen2.5-Math-7B": _QWEN2_MATH_7B,
    "Qwen/Qwen2.5-1.5B-Instruct": ModelShape(1536, 8960, 28, 12, 2, 128, 151936, True, True, False, 32768),
}
"""Shapes by hub id, from their config.json, so that a plan needs no network. OctoThinker's 3B models continue
Llama-3.2-3B's training (arXiv 2506.20512) and share its shape."""


@dataclass(frozen=True)
class TrainingSetup:
    """How the actor is trained: OpenRLHF's flags, under their last names."""

    num_gpus: int
    """Of the actor: --actor.num_nodes x --actor.num_gpus_per_node."""
    micro_batch_tokens: int
    """The most tokens of a training micro-batch, over its whole ring: micro_batch_size x max_len, as padding counts, or
    `dynamic_batch_tokens`."""
    forward_tokens: int
    """The same of a micro-batch whose log-probs are computed without gradient."""
    zero_stage: int = 2
    adam_offload: bool = False
    zpg: int = 1
    grad_accum_bytes: int = 2
    """Of one element of --ds.grad_accum_dtype: 2, or 4 for fp32."""
    overlap_comm: bool = False
    ring_attn_size: int = 1
    tensor_parallel_size: int = 1
    gradient_checkpointing: bool = False
    enable_sleep: bool = False
    """--ds.enable_sleep: gradients, optimizer states and bucket are on the host unless the actor trains."""
    enable_ema: bool = False
    has_reference: bool = False
    """A reference model on the actor's GPUs."""
    reference_offload: bool = False
    temperature: float = 1.0
    entropy_coef: float | None = 0.0
    """None: no entropy; 0: logged; else part of the loss."""
    fused_kernels: bool = True
    """flash-attn's cross entropy and a compiled entropy, as on a GPU; False: torch's, as on a CPU."""

    @property
    def zero_world_size(self) -> int:
        """GPUs that ZeRO shards over: data-parallel x ring.

        OpenRLHF hands DeepSpeed no mesh (`deepspeed.initialize` in utils/deepspeed/deepspeed.py), so that its group is
        the world, less tensor parallelism (utils/groups.py). Ring attention takes nothing away from it.
        """
        return self.num_gpus // self.tensor_parallel_size


def dynamic_batch_tokens(max_tokens_per_gpu: int, max_len: int, gpus_per_sample: int) -> int:
    """Tokens of a micro-batch under --train.dynamic_batch_enable; at least one sample, however long.

    Args:
        gpus_per_sample: ring_attn_size x tensor_parallel_size; OpenRLHF multiplies by both (utils/seqlen_balancing.py).
    """
    return max(max_tokens_per_gpu * gpus_per_sample, max_len)


def _shared(factor: int, elements: int, what: str, world_size: int, name: str) -> Term:
    """A term of `factor` bytes an element, shared by `world_size` GPUs."""
    formula = f"{factor} bytes x {elements:,} {what}" + (f" / {world_size} GPUs" if world_size > 1 else "")
    return Term(name, factor * _divided(elements, world_size), formula)


def weight_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """bf16 weights of the actor: sharded at ZeRO-3, whole below; with zpg above 1 a second copy over zpg GPUs."""
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    sharded = setup.zero_stage == 3
    terms = [_shared(2, elements, "parameters", setup.zero_world_size if sharded else 1, "weights")]
    if sharded and setup.zpg > 1:
        terms.append(_shared(2, elements, "parameters", setup.zpg, "weights, ZeRO++ copy"))
    return terms


def optimizer_terms(shape: ModelShape, setup: TrainingSetup, stepping: bool = False) -> list[Term]:
    """Gradients and AdamW's states, during backward or, if `stepping`, in the optimizer step.

    | stage | gradients | fp32 weights and two moments |
    |---|---|---|
    | 0 | whole, bf16 | whole |
    | 1 | whole, with fp32 both copies; sharded in the step | sharded |
    | 2, 3 | sharded | sharded |

    adam_offload moves the states to the host, and at ZeRO-2 and 3 the gradients; at ZeRO-1 and 2 one buffer of the
    largest weight's size stays (stage_1_and_2.py).
    """
    stage, world = setup.zero_stage, setup.zero_world_size
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    whole = stage == 0 or (stage == 1 and not stepping)
    factor = 6 if stage == 1 and setup.grad_accum_bytes == 4 else setup.grad_accum_bytes
    terms = []
    if stage <= 1 or not setup.adam_offload:
        terms.append(_shared(factor, elements, "parameters", 1 if whole else world, "gradients"))
    if not setup.adam_offload:
        terms.append(_shared(12, elements, "parameters", world if stage else 1, "optimizer states"))
    elif stage < 3:
        terms.append(_shared(2, shape.largest_parameter, "elements", 1, "gradient on its way to the host"))
    return terms


def bucket_terms(setup: TrainingSetup) -> list[Term]:
    """The bucket that gradients are reduced from, in bf16; two with overlap_comm at ZeRO-1 and 2.

    ZeRO-3 allocates it at the start and keeps it, ZeRO-1 and 2 for every backward.
    """
    if setup.zero_stage == 0:
        return []
    num_buckets = 2 if setup.overlap_comm and setup.zero_stage < 3 else 1
    return [_shared(2 * num_buckets, REDUCE_BUCKET_ELEMENTS, "elements", 1, "reduce bucket")]


def gathered_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """ZeRO-3's whole weights around the layer at work: up to stage3_max_live_parameters and one more weight."""
    if setup.zero_stage < 3:
        return []
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    live = min(elements, MAX_LIVE_PARAMETERS + shape.largest_parameter)
    return [_shared(2, live, "parameters", 1, "gathered weights")]


def in_flight_gradient_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Gradients between backward and their reduction: a weight too large for the bucket, or the bucket's copy.

    ZeRO-3's reduce-scatter copies the bucket to interleave it (runtime/comm/coalesced_collectives.py).
    """
    if setup.zero_stage < 2:
        return []
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    largest = max(shape.largest_parameter, min(elements, REDUCE_BUCKET_ELEMENTS))
    return [_shared(2, largest, "elements", 1, "gradients being reduced")]


def step_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """The optimizer step's copies of the gradients: flat in bf16 and fp32; at ZeRO-3 one sub-group at a time."""
    if setup.adam_offload:
        return []
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    if setup.zero_stage:
        elements = _divided(elements, setup.zero_world_size)
    if setup.zero_stage == 3:
        elements = min(elements, SUB_GROUP_ELEMENTS)
    return [_shared(6, elements, "parameters of the step", 1, "flat and fp32 gradients")]


def frozen_copy_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Reference model and EMA copy, bf16. Below ZeRO-3 DeepSpeed ignores their offload: they stay on the GPU.

    Both get stage 3 or 0 and `offload_param` (deepspeed_utils.get_eval_ds_config), which only stage 3 reads. The EMA
    copy is always made with it.
    """
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    sharded = setup.zero_stage == 3
    world = setup.zero_world_size if sharded else 1
    terms = []
    if setup.has_reference and not (sharded and setup.reference_offload):
        terms.append(_shared(2, elements, "parameters", world, "reference model"))
    if setup.enable_ema and not sharded:
        terms.append(_shared(2, elements, "parameters", 1, "EMA copy"))
    return terms


def layer_bytes_per_token(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Bytes that one layer saves for its backward, per token, in bf16 with flash attention.

    With hidden size h, queries q = heads x head_dim, keys k (and values) = key_value_heads x head_dim, MLP size i:

    | saved by | tensors | bytes |
    |---|---|---|
    | 2 RMSNorm | input in fp32, its inverse root mean square, normalised input in bf16 | 2 (4h + 4 + 2h) |
    | query, key and value projections | their common input | 2h |
    | attention, output projection | queries, keys, values, attention's output, fp32 log-sum-exp | 4q + 4k + 4 heads |
    | gate and up projection | their common input | 2h |
    | SwiGLU and down projection | gate, silu(gate), up, product | 8i |
    | RMSNorm of queries and keys (Qwen3) | as above, but over heads | 6 (q + k) + 4 (heads + key_value_heads) |

    Residual additions and rotary embeddings save nothing of their own. DeepSpeed's tensor parallelism splits what has
    q, k, i or heads in it.
    """
    h, q, k = shape.hidden_size, shape.query_size, shape.key_value_size
    heads, i = shape.num_attention_heads, shape.intermediate_size
    split = 4 * q + 4 * k + 4 * heads + 8 * i
    split += (6 * (q + k) + 4 * (heads + shape.num_key_value_heads)) * shape.qk_norm
    return 16 * h + 8 + _divided(split, tensor_parallel_size)


def saved_bytes_per_token(shape: ModelShape, gradient_checkpointing: bool, tensor_parallel_size: int = 1) -> int:
    """Bytes that a forward with gradient keeps for all layers: all that they save, or their inputs only."""
    if gradient_checkpointing:
        return 2 * shape.hidden_size * shape.num_layers
    return layer_bytes_per_token(shape, tensor_parallel_size) * shape.num_layers


def outer_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that the rest saves: final RMSNorm and lm_head's input (8h + 4), cosines and sines, token ids."""
    return 8 * shape.hidden_size + 4 + 4 * shape.head_dim + 8


def backward_bytes_per_token(shape: ModelShape, gradient_checkpointing: bool, tensor_parallel_size: int = 1) -> int:
    """Bytes at work in a layer's backward: gradients in its MLP and of the residual, and what was recomputed."""
    gradients = _divided(4 * shape.intermediate_size, tensor_parallel_size) + 2 * shape.hidden_size
    recomputed = layer_bytes_per_token(shape, tensor_parallel_size) if gradient_checkpointing else 0
    return gradients + recomputed


def forward_bytes_per_token(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Bytes of a forward without gradient, largest in an MLP: silu(gate), up, product, and four hidden states."""
    outer = 4 * shape.head_dim + 8
    return _divided(6 * shape.intermediate_size, tensor_parallel_size) + 8 * shape.hidden_size + outer


@dataclass(frozen=True)
class LogitsBytes:
    """Bytes per logit, that is per token and vocabulary entry, as models/actor.py and models/utils.py handle them."""

    forward: int
    """Without gradient: bf16 from lm_head, and the copy in fp32."""
    backward: int
    """The peak of the backward through the loss."""
    held: int
    """From the forward to the end of the step: `training_step` keeps the model's output, fp32 logits included."""


def logits_bytes(setup: TrainingSetup) -> LogitsBytes:
    """Bytes per logit; never chunked, so that this is the largest term with long samples.

    Fused: flash-attn's cross entropy makes fp32 gradients beside the fp32 logits (4 + 4) and casts them to bf16 (2).
    Gradients of a division by the temperature, or of the entropy, are one more fp32 tensor before that (4 + 4 + 4). The
    compiled entropy saves only sums per token.

    Not fused: torch's chunked log-sum-exp adds up the chunks' gradients in full size (16). The entropy saves its
    probabilities (4), and its backward needs two more (8).
    """
    logged, in_loss = setup.entropy_coef is not None, bool(setup.entropy_coef)
    if setup.fused_kernels:
        return LogitsBytes(forward=6, backward=12 if in_loss or setup.temperature != 1 else 10, held=4)
    return LogitsBytes(forward=6, backward=16 + 4 * logged + 8 * in_loss, held=4 + 4 * logged)


def _per_token(name: str, tokens: int, bytes_per_token: int) -> Term:
    return Term(name, tokens * bytes_per_token, f"{tokens:,} tokens x {bytes_per_token:,} bytes")


def _logits_term(name: str, tokens: int, shape: ModelShape, factor: int) -> Term:
    formula = f"{tokens:,} tokens x {shape.vocab_size:,} logits x {factor} bytes"
    return Term(name, tokens * shape.vocab_size * factor, formula)


def _process_term(num_processes: int) -> Term:
    return Term("processes", num_processes * PROCESS_BYTES, f"{num_processes} x {PROCESS_BYTES:,} bytes (estimate)")


def idle_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """What the actor and the frozen copies leave on the GPU while they do nothing.

    Sleeping, DeepSpeed keeps the bf16 weights (deepspeed_utils.offload_deepspeed_states leaves out lp_params; with
    adam_offload it does nothing). Awake, the gradients are gone after a step but for ZeRO-3's buffer, which stays with
    its bucket.
    """
    terms = weight_terms(shape, setup) + frozen_copy_terms(shape, setup)
    if setup.enable_sleep and not setup.adam_offload:
        return terms
    states = optimizer_terms(shape, setup)
    if setup.zero_stage == 3:
        return terms + states + bucket_terms(setup)
    return terms + [term for term in states if term.name != "gradients"]


def training_phases(shape: ModelShape, setup: TrainingSetup) -> list[Phase]:
    """The phases of an actor's GPU in which the actor, or a reference model beside it, computes."""
    tp = setup.tensor_parallel_size
    tokens = _divided(setup.micro_batch_tokens, setup.ring_attn_size)
    forward_tokens = _divided(setup.forward_tokens, setup.ring_attn_size)
    per_logit = logits_bytes(setup)
    processes = _process_term(1 + setup.has_reference)

    gathered, in_flight = gathered_terms(shape, setup), in_flight_gradient_terms(shape, setup)
    weights = weight_terms(shape, setup) + frozen_copy_terms(shape, setup)
    resident = weights + optimizer_terms(shape, setup) + bucket_terms(setup)
    stepping = weights + optimizer_terms(shape, setup, stepping=True) + step_terms(shape, setup)
    if setup.zero_stage == 3:
        stepping += bucket_terms(setup)
    saved = [
        _per_token(
            "layer inputs" if setup.gradient_checkpointing else "activations of all layers",
            tokens,
            saved_bytes_per_token(shape, setup.gradient_checkpointing, tp),
        ),
        _per_token("activations outside of layers", tokens, outer_bytes_per_token(shape)),
    ]
    held = _logits_term("logits, kept", tokens, shape, per_logit.held)
    layer = _per_token("a layer's backward", tokens, backward_bytes_per_token(shape, setup.gradient_checkpointing, tp))
    log_probs = [
        _logits_term("logits", forward_tokens, shape, per_logit.forward),
        _per_token("a layer's forward", forward_tokens, forward_bytes_per_token(shape, tp)),
    ]
    # Layers have let go of their tensors when the logits come.
    largest = max(log_probs, key=lambda term: term.bytes)
    logits = _logits_term("logits and their gradients", tokens, shape, per_logit.backward)
    return [
        Phase("log-probs", (*idle_terms(shape, setup), *gathered, largest, processes)),
        Phase("backward through the logits", (*resident, *gathered, *in_flight, *saved, logits, processes)),
        Phase("backward through a layer", (*resident, *gathered, *in_flight, *saved, held, layer, processes)),
        Phase("optimizer step", (*stepping, held, processes)),
    ]


@dataclass(frozen=True)
class EngineSetup:
    """A vLLM engine: OpenRLHF's flags, under their last names."""

    max_len: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.95
    enforce_eager: bool = False
    enable_sleep: bool = False
    """--vllm.enable_sleep: weights and KV cache leave the GPU unless the engine generates."""


@dataclass(frozen=True)
class KvCache:
    """An engine's room for keys and values, on each of its GPUs."""

    bytes_per_token: int
    budget: int
    """Bytes; below 0 where not even the weights fit."""
    num_tokens: int
    num_sequences: float
    """How many sequences of max_len tokens fit at the same time."""

    @property
    def fits(self) -> bool:
        """Whether one full-length sequence fits: vLLM refuses to start otherwise."""
        return self.num_sequences >= 1


def kv_bytes_per_token(shape: ModelShape, tensor_parallel_size: int) -> int:
    """bf16 keys and values of all layers; vLLM keeps at least one head on each GPU."""
    heads = max(1, shape.num_key_value_heads // tensor_parallel_size)
    return 2 * shape.num_layers * heads * shape.head_dim * 2


def engine_weight_term(shape: ModelShape, engine: EngineSetup) -> Term:
    """vLLM's bf16 weights on one GPU; embeddings are split too."""
    return _shared(2, shape.num_parameters, "parameters", engine.tensor_parallel_size, "vLLM weights")


def engine_workspace_term(shape: ModelShape, engine: EngineSetup) -> Term:
    """What vLLM finds in its profile run: an estimate.

    A forward of VLLM_BATCHED_TOKENS, and 16 bytes a logit of VLLM_SEQUENCES (bf16, fp32, probabilities, sorting).
    """
    forward = VLLM_BATCHED_TOKENS * forward_bytes_per_token(shape, engine.tensor_parallel_size)
    sampler = VLLM_SEQUENCES * shape.vocab_size * 16
    return Term("vLLM workspace", forward + sampler, f"{forward:,} forward + {sampler:,} sampler (estimate)")


def engine_process_term(engine: EngineSetup) -> Term:
    """An engine's process and, unless --vllm.enforce_eager, its CUDA graphs; both stay while it sleeps."""
    number = 1 if engine.enforce_eager else 2
    return Term("vLLM process, CUDA graphs", number * PROCESS_BYTES, f"{number} x {PROCESS_BYTES:,} bytes (estimate)")


def kv_cache(shape: ModelShape, engine: EngineSetup, gpu_bytes: int) -> KvCache:
    """The cache that vLLM allocates: its share of the GPU less weights, workspace and its process."""
    share = math.ceil(gpu_bytes * engine.gpu_memory_utilization)
    others = (engine_weight_term(shape, engine), engine_workspace_term(shape, engine), engine_process_term(engine))
    budget = share - sum(term.bytes for term in others)
    per_token = kv_bytes_per_token(shape, engine.tensor_parallel_size)
    num_tokens = max(budget, 0) // per_token
    return KvCache(per_token, budget, num_tokens, num_tokens / engine.max_len)


def engine_phase(shape: ModelShape, engine: EngineSetup, gpu_bytes: int, beside: Iterable[Term] = ()) -> Phase:
    """Generation, with what lies `beside` the engine on its GPU."""
    cache = kv_cache(shape, engine, gpu_bytes)
    formula = (
        f"{gpu_bytes:,} x {engine.gpu_memory_utilization} less the other vLLM terms: {cache.num_tokens:,} tokens x "
        f"{cache.bytes_per_token:,} bytes, {cache.num_sequences:.1f} sequences of {engine.max_len:,}"
    )
    terms = [
        engine_weight_term(shape, engine),
        engine_workspace_term(shape, engine),
        Term("vLLM KV cache", max(cache.budget, 0), formula),
        engine_process_term(engine),
    ]
    return Phase("generation", (*terms, *beside))


def colocated_phases(shape: ModelShape, setup: TrainingSetup, engine: EngineSetup, gpu_bytes: int) -> list[Phase]:
    """All phases of a GPU that has actor and engine on it (--train.colocate_all in sync training).

    An engine without sleep keeps its whole share during training. A weight sync wakes the weights alone, gathers one
    weight and copies it for the engine (`_handle_cuda_ipc` in trainer/ray/ppo_actor.py).
    """
    idle, trainers = idle_terms(shape, setup), _process_term(1 + setup.has_reference)
    generation = engine_phase(shape, engine, gpu_bytes, (*idle, trainers))
    process = engine_process_term(engine)
    awake = [term for term in generation.terms if term.name.startswith("vLLM")]
    beside = [process] if engine.enable_sleep else awake
    training = [Phase(phase.name, (*phase.terms, *beside)) for phase in training_phases(shape, setup)]
    copies = _shared(4, shape.largest_parameter, "elements", 1, "a weight, gathered and copied")
    syncing = [engine_weight_term(shape, engine), process] if engine.enable_sleep else awake
    return [generation, *training, Phase("weight sync", (*idle, copies, trainers, *syncing))]


def host_terms(shape: ModelShape, setup: TrainingSetup, engine: EngineSetup | None) -> list[Term]:
    """Pinned host memory per GPU: offloaded or sleeping states, EMA and reference, a sleeping engine's weights.

    Args:
        engine: colocated with the actor; None: elsewhere.
    """
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    world = setup.zero_world_size
    terms = []
    if setup.adam_offload:
        # ZeRO-1 and 2 keep fp32 gradients and a bf16 buffer beside the states, ZeRO-3 gradients of the given dtype.
        factor = 12 + (setup.grad_accum_bytes if setup.zero_stage == 3 else 6)
        terms.append(_shared(factor, elements, "parameters", world, "optimizer states and gradients"))
    elif setup.enable_sleep:
        factor = 12 + (setup.grad_accum_bytes if setup.zero_stage == 3 else 0)
        terms.append(_shared(factor, elements, "parameters", world, "sleeping optimizer states"))
    if setup.zero_stage == 3:
        copies = {"EMA copy": setup.enable_ema, "reference model": setup.has_reference and setup.reference_offload}
        terms += [_shared(2, elements, "parameters", world, name) for name, on_host in copies.items() if on_host]
    if engine is not None and engine.enable_sleep:
        size = engine.tensor_parallel_size
        terms.append(_shared(2, shape.num_parameters, "parameters", size, "sleeping vLLM weights"))
    return terms


def replay_term(capacity: int, samples_per_group: int, tokens_per_sample: int, num_extra_columns: int = 0) -> Term:
    """A full replay pool on the host of the trainer.

    Args:
        capacity: groups.
        num_extra_columns: further fp32 tensors with one value a token: returns always; rollout_log_probs, with a KL
            loss base_action_log_probs, with GAE values.
    """
    tokens = capacity * samples_per_group * tokens_per_sample
    per_token = REPLAY_BYTES_PER_TOKEN + 4 * num_extra_columns
    counts = f"{capacity:,} groups x {samples_per_group} samples x {tokens_per_sample:,} tokens"
    return Term("replay pool", tokens * per_token, f"{counts} x {per_token} bytes")


def checkpoint_terms(num_parameters: dict[str, int], num_kept: int, replay: Term | None = None) -> list[Term]:
    """On disk, checkpoints as DeepSpeed writes them, and our replay pool beside each.

    Args:
        num_parameters: of every model that is trained, by its name.
        num_kept: checkpoints that are there at the same time.
        replay: a full pool. While one is written anew the one that it replaces is still there.
    """
    per_parameter = CHECKPOINT_BYTES_PER_PARAMETER
    terms = [
        Term(name, num_kept * n * per_parameter, f"{num_kept} x {n:,} parameters x {per_parameter} bytes")
        for name, n in num_parameters.items()
    ]
    if replay is not None:
        terms.append(Term(replay.name, (num_kept + 1) * replay.bytes, f"{num_kept + 1} x {replay.formula}"))
    return terms
