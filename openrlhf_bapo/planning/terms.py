"""How much memory a run needs per GPU: sums of named terms from stated formulas.

A GPU goes through phases, one after another. A phase lists the terms that are in memory at the same time. A run fits if
the largest phase does:

| phase | in memory at the same time |
|---|---|
| generation | vLLM's weights, KV cache and workspace; the idle actor's memory |
| log-probs | a forward without gradient, of the actor or the reference model |
| backward through the logits, backward through a layer, optimizer step | the actor's states and a micro-batch |
| weight sync | vLLM's weights; the idle actor's memory |

actor_memory.py and engine_memory.py make the phases. Sources: ZeRO's 2 + 2 + 12 bytes of model states per parameter
(Rajbhandari et al., arXiv 1910.02054, section 3.1), and activations counted as by Korthikanti et al. (arXiv 2205.05198,
section 4.1). The rest was read from OpenRLHF 0.11.2, DeepSpeed 0.19.6, transformers 5.15, flash-attn 2.8.3 and vLLM
0.29. tests/full/test_memory_plan.py measures, at tiny size, all that can be measured without a GPU.

Two terms are estimates and say so in their formula: the memory of a process outside torch's tensors (`PROCESS_BYTES`),
and vLLM's workspace. Not counted: the allocator's fragmentation, ring attention's key-value buffers (well below 1 GiB),
activations of a LoRA adapter (its rank per token and adapted weight), mixture of experts. Leave some GiB free.

All counts are integers: bytes, tokens, parameters. bf16 and fp16 have 2 bytes.
"""

from dataclasses import dataclass

PROCESS_BYTES = 2**30
"""CUDA context, NCCL and cuBLAS buffers of one process on a GPU: an estimate, not derived."""


@dataclass(frozen=True)
class Term:
    """One part of a phase; `formula` is the calculation of `bytes` in numbers."""

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


def divide_up(numerator: int, denominator: int) -> int:
    """Divide and round up; ZeRO and tensor parallelism pad their shards."""
    return -(-numerator // denominator)


def shared_term(name: str, factor: int, elements: int, what: str, num_gpus: int = 1) -> Term:
    """Return a term of `factor` bytes per element, with the elements shared by `num_gpus`."""
    formula = f"{factor} bytes x {elements:,} {what}" + (f" / {num_gpus} GPUs" if num_gpus > 1 else "")
    return Term(name, factor * divide_up(elements, num_gpus), formula)


def process_term(name: str, num_processes: int) -> Term:
    """Return the memory of processes outside torch's tensors."""
    return Term(name, num_processes * PROCESS_BYTES, f"{num_processes} x {PROCESS_BYTES:,} bytes (estimate)")
