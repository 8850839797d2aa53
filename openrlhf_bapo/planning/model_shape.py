"""Shapes of the models that a plan knows: dense Llama, Qwen2 and Qwen3."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from openrlhf_bapo.planning.terms import divide_up

MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense Llama, Qwen2 or Qwen3."""

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
        """Read a Hugging Face config.json.

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
        """Elements of the queries per token and layer."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of the keys per token and layer; the values have as many."""
        return self.num_key_value_heads * self.head_dim

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest weight matrix."""
        h = self.hidden_size
        return h * max(self.vocab_size, self.intermediate_size, self.query_size)

    @property
    def num_parameters(self) -> int:
        """All parameters, tied embeddings counted once."""
        return self.num_parameters_per_rank(1)

    def num_parameters_per_rank(self, tensor_parallel_size: int) -> int:
        """Count the parameters of one tensor-parallel rank of DeepSpeed.

        The projections and an untied lm_head are split, embeddings and norms stay whole (module_inject/auto_tp.py).
        """
        h, q, kv = self.hidden_size, self.query_size, self.key_value_size
        split = 2 * h * q + 2 * h * kv + 3 * h * self.intermediate_size  # query and output, key and value, MLP
        split += (q + 2 * kv) * self.attention_bias
        whole = 2 * h + 2 * self.head_dim * self.qk_norm
        embedding = self.vocab_size * h
        lm_head = 0 if self.tie_word_embeddings else embedding
        split = self.num_layers * split + lm_head
        return divide_up(split, tensor_parallel_size) + self.num_layers * whole + h + embedding

    def adapter_sizes(self, targets: Collection[str]) -> list[int]:
        """Return input and output size, added up, of each weight that LoRA adapts. A rank has so many parameters.

        Args:
            targets: names of modules as `--ds.lora.target_modules` has them; empty: all linear layers but lm_head.
        """
        h, q, kv, i = self.hidden_size, self.query_size, self.key_value_size, self.intermediate_size
        attention = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        linear = {f"self_attn.{name}": size for name, size in attention.items()}
        linear |= {f"mlp.{name}": h + i for name in ("gate_proj", "up_proj", "down_proj")}
        sizes = {f".model.layers.{n}.{name}": size for n in range(self.num_layers) for name, size in linear.items()}
        if not targets:
            return list(sizes.values())
        sizes |= {".model.embed_tokens": self.vocab_size + h, ".lm_head": h + self.vocab_size}
        return [size for name, size in sizes.items() if name.endswith(tuple(f".{target}" for target in targets))]


def _known(model_type: str, *sizes: int, tied: bool) -> ModelShape:
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "max_position_embeddings"),
    )
    config = {"model_type": model_type, "tie_word_embeddings": tied}
    return ModelShape.from_config(config | dict(zip(names, sizes, strict=True)))


_QWEN2_7B = _known("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, tied=False)
_QWEN2_MATH_7B = replace(_QWEN2_7B, max_position_embeddings=4096)
_QWEN2_32B = _known("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, tied=False)
_QWEN2_1_5B = _known("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, tied=True)
_LLAMA_3B = _known("llama", 3072, 8192, 28, 24, 8, 128256, 131072, tied=True)

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
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_1_5B,
}
"""Shapes by hub id, from each model's config.json, so that a plan needs no network. OctoThinker's 3B models continue
the training of Llama-3.2-3B (arXiv 2506.20512) and have its shape."""
