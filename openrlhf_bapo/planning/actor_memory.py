"""Memory of an actor's GPU and of its host, under DeepSpeed's ZeRO."""

from dataclasses import dataclass

from openrlhf_bapo.planning.activations import (
    backward_bytes_per_token,
    forward_bytes_per_token,
    logits_bytes,
    outer_bytes_per_token,
    saved_bytes_per_token,
)
from openrlhf_bapo.planning.model_shape import ModelShape
from openrlhf_bapo.planning.terms import Phase, Term, divide_up, process_term, shared_term

# DeepSpeed's defaults (runtime/zero/config.py), in elements. OpenRLHF passes "auto", which selects them.
REDUCE_BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How the actor is trained. Fields are named after OpenRLHF's flags, by their last part."""

    num_gpus: int
    """GPUs of the actor: --actor.num_nodes x --actor.num_gpus_per_node."""
    micro_batch_tokens: int
    """Maximum tokens of a training micro-batch, over its whole ring: micro_batch_size x max_len (padding counts), or
    `dynamic_batch_tokens`."""
    forward_tokens: int
    """The same for a micro-batch whose log-probs are computed without gradient."""
    zero_stage: int = 2
    adam_offload: bool = False
    zpg: int = 1
    grad_accum_bytes: int = 2
    """Bytes per element of --ds.grad_accum_dtype: 2, or 4 for fp32."""
    overlap_comm: bool = False
    ring_attn_size: int = 1
    tensor_parallel_size: int = 1
    gradient_checkpointing: bool = False
    enable_sleep: bool = False
    """--ds.enable_sleep: gradients, optimizer states and bucket are on the host unless the actor trains."""
    enable_ema: bool = False
    has_reference: bool = False
    """Whether a reference model is on the actor's GPUs."""
    reference_offload: bool = False
    temperature: float = 1.0
    entropy_coef: float | None = 0.0
    """None: no entropy; 0: the entropy is logged; otherwise it is part of the loss."""
    fused_kernels: bool = True
    """True: flash-attn's cross entropy and a compiled entropy, as on a GPU; False: torch's, as on a CPU."""
    lora_rank: int = 0
    """0: all weights are trained; otherwise only the adapter."""
    lora_targets: tuple[str, ...] = ()
    """As `ModelShape.adapter_sizes` takes them."""

    @property
    def zero_world_size(self) -> int:
        """GPUs that ZeRO shards over: data-parallel x ring.

        OpenRLHF passes no mesh to DeepSpeed (`deepspeed.initialize` in utils/deepspeed/deepspeed.py). So ZeRO's group
        is the world divided by tensor parallelism (DeepSpeed's utils/groups.py), and ring attention does not reduce it.
        """
        return self.num_gpus // self.tensor_parallel_size

    def num_trained(self, shape: ModelShape) -> int:
        """Count the parameters per rank that have gradients and optimizer states."""
        if self.lora_rank:
            return self.lora_rank * sum(shape.adapter_sizes(self.lora_targets))
        return shape.num_parameters_per_rank(self.tensor_parallel_size)

    def largest_trained(self, shape: ModelShape) -> int:
        """Count the elements of the largest weight that is trained; of an adapter, of its largest pair of weights."""
        if self.lora_rank:
            return self.lora_rank * max(shape.adapter_sizes(self.lora_targets))
        return shape.largest_parameter


def dynamic_batch_tokens(max_tokens_per_gpu: int, max_len: int, gpus_per_sample: int) -> int:
    """Return the tokens of a micro-batch under --train.dynamic_batch_enable: at least one sample, however long.

    OpenRLHF multiplies by ring_attn_size x tensor_parallel_size, the GPUs per sample (utils/seqlen_balancing.py).
    """
    return max(max_tokens_per_gpu * gpus_per_sample, max_len)


def training_phases(shape: ModelShape, setup: TrainingSetup) -> list[Phase]:
    """Return the phases of an actor's GPU in which the actor, or the reference model beside it, computes."""
    tensor_parallel_size, checkpoints = setup.tensor_parallel_size, setup.gradient_checkpointing
    tokens = divide_up(setup.micro_batch_tokens, setup.ring_attn_size)
    forward_tokens = divide_up(setup.forward_tokens, setup.ring_attn_size)
    per_logit = logits_bytes(
        temperature=setup.temperature, entropy_coef=setup.entropy_coef, fused_kernels=setup.fused_kernels
    )
    processes = training_process_term(setup)

    gathered, in_flight = gathered_terms(shape, setup), in_flight_gradient_terms(shape, setup)
    weights = weight_terms(shape, setup) + frozen_copy_terms(shape, setup)
    resident = weights + optimizer_terms(shape, setup) + bucket_terms(setup)
    stepping = weights + optimizer_terms(shape, setup, stepping=True) + step_terms(shape, setup)
    if setup.zero_stage == 3:
        stepping += bucket_terms(setup)
    saved = [
        _token_term(
            "layer inputs" if checkpoints else "activations of all layers",
            tokens,
            saved_bytes_per_token(shape, checkpoints, tensor_parallel_size),
        ),
        _token_term("activations outside of layers", tokens, outer_bytes_per_token(shape)),
    ]
    held = _logits_term("logits, kept", tokens, shape, per_logit.held)
    layer = _token_term(
        "a layer's backward", tokens, backward_bytes_per_token(shape, checkpoints, tensor_parallel_size)
    )
    log_probs = [
        _logits_term("logits", forward_tokens, shape, per_logit.forward),
        _token_term("a layer's forward", forward_tokens, forward_bytes_per_token(shape, tensor_parallel_size)),
    ]
    # The layers have freed their tensors before the logits are computed.
    largest = max(log_probs, key=lambda term: term.bytes)
    logits = _logits_term("logits and their gradients", tokens, shape, per_logit.backward)
    return [
        Phase("log-probs", (*idle_terms(shape, setup), *gathered, largest, processes)),
        Phase("backward through the logits", (*resident, *gathered, *in_flight, *saved, logits, processes)),
        Phase("backward through a layer", (*resident, *gathered, *in_flight, *saved, held, layer, processes)),
        Phase("optimizer step", (*stepping, held, processes)),
    ]


def idle_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return the memory of the actor, the reference model and the EMA copy while they are idle.

    A sleeping DeepSpeed keeps the bf16 weights (deepspeed_utils.offload_deepspeed_states leaves out lp_params); with
    adam_offload, sleep does nothing. Without sleep, the gradients are freed after a step, except for ZeRO-3's buffer,
    which stays together with its bucket.
    """
    terms = weight_terms(shape, setup) + frozen_copy_terms(shape, setup)
    if setup.enable_sleep and not setup.adam_offload:
        return terms
    states = optimizer_terms(shape, setup)
    if setup.zero_stage == 3:
        return terms + states + bucket_terms(setup)
    return terms + [term for term in states if term.name != "gradients"]


def weight_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return the actor's bf16 weights: sharded at ZeRO-3, whole below; with zpg above 1 a second copy over zpg GPUs.

    PEFT makes an adapter in fp32. DeepSpeed casts it to bf16, but not at ZeRO-3.
    """
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    num_gpus = setup.zero_world_size if setup.zero_stage == 3 else 1
    terms = [shared_term("weights", 2, elements, "parameters", num_gpus)]
    if setup.lora_rank:
        size = 4 if setup.zero_stage == 3 else 2
        terms.append(shared_term("adapter", size, setup.num_trained(shape), "parameters", num_gpus))
    if setup.zero_stage == 3 and setup.zpg > 1:
        terms.append(shared_term("weights, ZeRO++ copy", 2, elements, "parameters", setup.zpg))
    return terms


def optimizer_terms(shape: ModelShape, setup: TrainingSetup, stepping: bool = False) -> list[Term]:
    """Return the gradients and AdamW's states, during backward or, if `stepping`, in the optimizer step.

    | stage | gradients | fp32 weights and two moments |
    |---|---|---|
    | 0 | whole, bf16 | whole |
    | 1 | whole, with fp32 both copies; sharded in the step | sharded |
    | 2, 3 | sharded | sharded |

    adam_offload moves the states to the host, and at ZeRO-2 and 3 the gradients too. At ZeRO-1 and 2 one buffer of the
    largest weight's size stays on the GPU (stage_1_and_2.py).
    """
    stage, world = setup.zero_stage, setup.zero_world_size
    elements = setup.num_trained(shape)
    whole = stage == 0 or (stage == 1 and not stepping)
    factor = 6 if stage == 1 and setup.grad_accum_bytes == 4 else setup.grad_accum_bytes
    terms = []
    if stage <= 1 or not setup.adam_offload:
        terms.append(shared_term("gradients", factor, elements, "parameters", 1 if whole else world))
    if not setup.adam_offload:
        terms.append(shared_term("optimizer states", 12, elements, "parameters", world if stage else 1))
    elif stage < 3:
        terms.append(shared_term("gradient on its way to the host", 2, setup.largest_trained(shape), "elements"))
    return terms


def bucket_terms(setup: TrainingSetup) -> list[Term]:
    """Return the bf16 bucket from which gradients are reduced; two of them with overlap_comm at ZeRO-1 and 2.

    ZeRO-3 allocates it at the start and keeps it, ZeRO-1 and 2 allocate it for each backward.
    """
    if setup.zero_stage == 0:
        return []
    num_buckets = 2 if setup.overlap_comm and setup.zero_stage < 3 else 1
    return [shared_term("reduce bucket", 2 * num_buckets, REDUCE_BUCKET_ELEMENTS, "elements")]


def gathered_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return ZeRO-3's whole weights around the current layer: up to stage3_max_live_parameters and one weight more."""
    if setup.zero_stage < 3:
        return []
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    live = min(elements, MAX_LIVE_PARAMETERS + shape.largest_parameter)
    return [shared_term("gathered weights", 2, live, "parameters")]


def in_flight_gradient_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return gradients between backward and reduction: a weight too large for the bucket, or the bucket's copy.

    ZeRO-3's reduce-scatter copies the bucket to interleave it (runtime/comm/coalesced_collectives.py).
    """
    if setup.zero_stage < 2:
        return []
    elements = setup.num_trained(shape)
    largest = max(setup.largest_trained(shape), min(elements, REDUCE_BUCKET_ELEMENTS))
    return [shared_term("gradients being reduced", 2, largest, "elements")]


def step_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return the optimizer step's copies of gradients: flat in bf16 and in fp32; at ZeRO-3 one sub-group at a time."""
    if setup.adam_offload:
        return []
    elements = setup.num_trained(shape)
    if setup.zero_stage:
        elements = divide_up(elements, setup.zero_world_size)
    if setup.zero_stage == 3:
        elements = min(elements, SUB_GROUP_ELEMENTS)
    return [shared_term("flat and fp32 gradients", 6, elements, "parameters of the step")]


def frozen_copy_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return the bf16 reference model and EMA copy; the averages are in float32 too.

    Both have ZeRO stage 3 or 0 and `offload_param` (deepspeed_utils.get_eval_ds_config), always on for the EMA copy.
    Only stage 3 reads `offload_param`, so below ZeRO-3 both copies stay on the GPU.
    """
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    sharded = setup.zero_stage == 3
    terms = []
    if setup.has_reference and not (sharded and setup.reference_offload):
        world = setup.zero_world_size if sharded else 1
        terms.append(shared_term("reference model", 2, elements, "parameters", world))
    if setup.enable_ema and not sharded:
        terms.append(shared_term("EMA copy", 6, elements, "parameters"))
    return terms


def training_process_term(setup: TrainingSetup) -> Term:
    """Return the actor's process and the reference model's."""
    return process_term("processes", 1 + setup.has_reference)


def host_terms(shape: ModelShape, setup: TrainingSetup) -> list[Term]:
    """Return the pinned host memory per GPU: offloaded or sleeping states, EMA copy and reference model."""
    elements = shape.num_parameters_per_rank(setup.tensor_parallel_size)
    world, trained = setup.zero_world_size, setup.num_trained(shape)
    terms = []
    if setup.adam_offload:
        # Beside the states, ZeRO-1 and 2 keep fp32 gradients and a bf16 buffer; ZeRO-3 keeps gradients of
        # --ds.grad_accum_dtype.
        factor = 12 + (setup.grad_accum_bytes if setup.zero_stage == 3 else 6)
        terms.append(shared_term("optimizer states and gradients", factor, trained, "parameters", world))
    elif setup.enable_sleep:
        factor = 12 + (setup.grad_accum_bytes if setup.zero_stage == 3 else 0)
        terms.append(shared_term("sleeping optimizer states", factor, trained, "parameters", world))
    if setup.zero_stage == 3:
        copies = {"EMA copy": setup.enable_ema, "reference model": setup.has_reference and setup.reference_offload}
        terms += [shared_term(name, 2, elements, "parameters", world) for name, on_host in copies.items() if on_host]
    return terms


def _token_term(name: str, tokens: int, bytes_per_token: int) -> Term:
    return Term(name, tokens * bytes_per_token, f"{tokens:,} tokens x {bytes_per_token:,} bytes")


def _logits_term(name: str, tokens: int, shape: ModelShape, factor: int) -> Term:
    formula = f"{tokens:,} tokens x {shape.vocab_size:,} logits x {factor} bytes"
    return Term(name, tokens * shape.vocab_size * factor, formula)
