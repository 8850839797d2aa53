"""The allowed values of every flag alone, of `train`, `plan` and `evaluate`.

Those of `--replay.*`, `--partial.*` and the clip rules are in their classes.
"""

import math
import re

from openrlhf_bapo.flags.mistakes import FlagError, shown

_NUMBERS = (
    (
        "1 or more",
        lambda v: v >= 1,
        "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.tensor_parallel_size "
        "ds.ring_attn_size ds.ring_attn_head_stride ds.zpg data.max_samples rollout.max_new_tokens rollout.batch_size "
        "rollout.vllm_generate_batch_size rollout.n_samples_per_prompt rollout.micro_batch_size "
        "rollout.max_tokens_per_gpu train.batch_size train.micro_batch_size train.max_tokens_per_gpu train.max_epochs "
        "train.num_episodes train.async_queue_size eval.n_samples_per_prompt logger.logging_steps ckpt.max_num "
        "algo.kl.horizon ds.lora.alpha n max_problems max_new_tokens num_engines tensor_parallel_size",
    ),
    ("2 or more, for prompt and response", lambda v: v >= 2, "data.max_len"),
    (
        "0 or more",
        lambda v: v >= 0,
        "data.dataloader_num_workers data.max_images_per_prompt ds.lora.rank offpolicy.lag bapo.dump_tokens "
        "bapo.max_skipped_updates",
    ),
    ("-1 (never), or 1 or more", lambda v: v == -1 or v >= 1, "eval.steps ckpt.save_steps"),
    ("-1 (none), or more", lambda v: v >= -1, "critic.freezing_steps"),
    ("from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32, "train.seed"),
    (
        "0 or more, and finite",
        lambda v: 0 <= v < math.inf,
        "actor.adam.lr critic.adam.lr actor.muon.lr critic.muon.lr actor.adam.weight_decay critic.adam.weight_decay "
        "actor.max_norm critic.max_norm actor.eps_clip actor.eps_clip_low_high actor.aux_loss_coef algo.kl.init_coef "
        "reward.overlong_buffer_len reward.overlong_penalty_factor reward_fault.patience",
    ),
    (
        "above 0, and finite",
        lambda v: 0 < v < math.inf,
        "actor.adam.eps critic.adam.eps critic.value_clip algo.kl.target reward_fault.timeout plan.gpu_memory "
        "plan.gpu_tflops plan.gpu_bandwidth plan.response_tokens",
    ),
    # vLLM takes 0.01 for what is between 0 and 0.01, while the actor divides its logits by what was given.
    ("from 0.01 to 2", lambda v: 0.01 <= v <= 2, "rollout.temperature"),
    ("0, or from 0.01 to 2", lambda v: v == 0 or 0.01 <= v <= 2, "eval.temperature temperature"),
    ("above 0", lambda v: v > 0, "ckpt.max_mem"),
    ("above 1", lambda v: 1 < v < math.inf, "actor.dual_clip"),
    (
        "above 0, up to 1",
        lambda v: 0 < v <= 1,
        "rollout.top_p vllm.gpu_memory_utilization plan.utilization top_p gpu_memory_utilization",
    ),
    (
        "from 0 to 1",
        lambda v: 0 <= v <= 1,
        "actor.lr_warmup_ratio critic.lr_warmup_ratio actor.min_lr_ratio critic.min_lr_ratio algo.advantage.lambd "
        "algo.advantage.gamma train.ema_beta",
    ),
    (
        "from 0, below 1",
        lambda v: 0 <= v < 1,
        "actor.adam.betas critic.adam.betas actor.muon.momentum critic.muon.momentum ds.lora.dropout "
        "reward_fault.max_drop_rate",
    ),
    ("up to 1", lambda v: -math.inf < v <= 1, "reward.stop_properly_penalty_coef"),
    ("a finite number", math.isfinite, "actor.entropy_coef"),
)
"""The allowed values as text and as a test, and the flags."""

# The schedulers of transformers that work with the arguments that OpenRLHF passes.
_SCHEDULERS = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt cosine_with_min_lr "
    "cosine_warmup_with_min_lr"
).split()

_TEXTS = (
    ("0, 1, 2, 3", "[0-3]", "ds.zero_stage"),
    (", ".join(_SCHEDULERS), "|".join(_SCHEDULERS), "actor.lr_scheduler critic.lr_scheduler"),
    ("nccl, gloo", "nccl|gloo", "vllm.sync_backend"),
    ("bf16, fp16, fp32", "bf16|fp16|fp32|bfloat16|float16|float32", "ds.grad_accum_dtype"),
    (
        "eager, sdpa, flex_attention, flash_attention_2, flash_attention_3, or a kernel on the hub (OWNER/NAME)",
        r"eager|sdpa|flex_attention|flash_attention_[23]|[\w.-]+/\S+",
        "ds.attn_implementation",
    ),
    ("none, or a metric of the evaluation (eval_NAME_pass1)", r"|none|eval_\S+", "ckpt.best_metric_key"),
)

_PAIRS = ("reward.clip_range", "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold")


def check_values(values: dict) -> None:
    """Refuse a value outside its own range, whatever the other flags are; `values` are those of any flags."""
    for allowed, is_allowed, names in _NUMBERS:
        for name in names.split():
            value = values.get(name)
            if value is not None and not all(map(is_allowed, value if isinstance(value, list | tuple) else [value])):
                raise FlagError(f"{shown(name, value)}: allowed: {allowed}")
    for allowed, pattern, names in _TEXTS:
        for name in names.split():
            if values.get(name) is not None and not re.fullmatch(pattern, str(values[name]), re.DOTALL):
                raise FlagError(f"{shown(name, values[name])}: allowed: {allowed}")
    for name in _PAIRS:
        bounds = values.get(name, ())
        if len(bounds) > 1 and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise FlagError(f"{shown(name, bounds)}: allowed: LOW HIGH, LOW below HIGH")
