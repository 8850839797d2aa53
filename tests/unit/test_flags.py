"""Our flags: mistakes are refused in one line before slow imports, and the others resolve to their settings."""

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter

import pipeline
import pytest
import refusals
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

from openrlhf_bapo import ClipConfig, SmoothingConfig
from openrlhf_bapo.flags import arguments
from openrlhf_bapo.flags.train_flags import add_flags, check_flags
from openrlhf_bapo.offpolicy.replay_pool import ReplayConfig
from openrlhf_bapo.openrlhf.settings import has_proximal_ratio, is_off_policy, replay_config_from_args
from openrlhf_bapo.openrlhf.trainer import evaluate_at_start
from openrlhf_bapo.rules.clip_config import PRESETS
from openrlhf_bapo.rules.other_rules import RULES, default_settings
from openrlhf_bapo.rules.settings import clip_config_from_args, clip_rule_from_args

OWN = """
--policy_loss bapo --bapo.positive_contribution_target 1.5 => --bapo.positive_contribution_target 1.5 ... (0, 1)
--policy_loss bapo --bapo.ratio_upper_max two => --bapo.ratio_upper_max: ... 'two'
--policy_loss bapo --bapo.preset best => --bapo.preset: ... 'best' ... readme
--policy_loss bapo --bapo.scope epoch => --bapo.scope: ... 'epoch' ... update
--policy_loss dapo => --policy_loss: ... 'dapo' ... ppo ... gspo ... bapo ... m2 ... divergence ... topr ... balanced
--policy_loss m2 --m2.budget 0 => --m2.budget 0.0 ... above 0
--policy_loss topr --topr.level batch => --topr.level: ... 'batch' ... token ... sequence
--policy_loss bapo --m2.budget 0.1 => : ... --policy_loss m2, not bapo
--topr.level token => : ... --policy_loss topr, not ppo
--policy_loss m2 --bapo.preset paper => : ... --policy_loss bapo, not m2
--policy_loss m2 --bapo.discard_saved => : ... --m2.half_life or --balanced.half_life
--policy_loss ppo --bapo.dump_tokens 5 => : ... with ppo only if --offpolicy.ratio_base is given; this run has ppo
--policy_loss gspo --offpolicy.ratio_base auto --bapo.dump_tokens 5 => : ... every --policy_loss but gspo ... gspo
--policy_loss bapo --bapo.dump_tokens all => --bapo.dump_tokens: invalid int value: 'all'
--policy_loss bapo --bapo.smoothing -1 => --bapo.smoothing -1.0: ... allowed: 0 and above
--policy_loss bapo --bapo.smoothing nan => : ... allowed: 0 and above
--policy_loss bapo --bapo.smoothing inf => : ... allowed: 0 and above
--policy_loss bapo --bapo.smoothing_of tally => : ... --bapo.smoothing above 0
--policy_loss bapo --bapo.smoothing_start 0.7 2 => --bapo.smoothing_start [0.7, 2.0]: ... above 0
--policy_loss bapo --bapo.discard_saved => --bapo.discard_saved True: ... --bapo.smoothing above 0
--policy_loss bapo --bapo.preset released --bapo.smoothing 9 => --bapo.smoothing 9.0: ... --bapo.scope update
--policy_loss bapo --bapo.smoothing 9 --bapo.smoothing_of all => --bapo.smoothing_of: ... 'all' ... bounds
--policy_loss bapo --bapo.preset steady --bapo.smoothing_start 0.5 2
    => --bapo.smoothing_start (0.5, 2.0) ... lower bound must lie in [0.6, 0.9]
--replay.ratio -1 => --replay.ratio -1.0 ... at least 0
--replay.strategy best => --replay.strategy: ... 'best' ... uniform
--partial.token_budget -1 => --partial.token_budget -1 ... at least 0
--partial.on_stale keep => --partial.on_stale: ... 'keep' ... drop ... finish
--policy_loss gspo --partial.token_budget 9 => : ... every --policy_loss but gspo
--policy_loss bapo --partial.token_budget 9 --offpolicy.ratio_base recomputed
    => : ... --partial.token_budget 9; allowed: auto, rollout; also recomputed with --policy_loss ppo
--policy_loss gspo --replay.ratio 1 => --replay.ratio 1.0: ... every --policy_loss but gspo
--policy_loss gspo --offpolicy.ratio_base rollout => : ... every --policy_loss but gspo
--policy_loss gspo --offpolicy.objective decoupled => : ... ppo, bapo, m2 or divergence, not gspo
--policy_loss topr --offpolicy.objective decoupled => : ... ppo, bapo, m2 or divergence, not topr
--offpolicy.objective decoupled --offpolicy.ratio_base rollout
    => : allowed with --offpolicy.objective decoupled: auto, recomputed
--offpolicy.objective both => --offpolicy.objective: ... 'both' ... behavior ... decoupled
--bapo.ratio_upper_max 2.5 => : ... --policy_loss bapo ... ppo
"""


@pytest.mark.parametrize(("flags", "said"), refusals.rows(OWN))
def test_a_mistake_in_our_flags_is_one_line_with_flag_value_and_range(flags, said, capsys):
    line = pipeline.refusal(flags.split(), capsys, check_flags)
    assert refusals.says(line, said), line


def test_the_command_refuses_before_it_loads_ray_or_openrlhf():
    command = [sys.executable, "-X", "importtime", "-m", "openrlhf_bapo.cli.train_ppo_ray"]
    run = subprocess.run([*command, "--policy_loss", "bapo", "--bapo.preset", "best"], capture_output=True, text=True)
    assert run.returncode == 2
    loaded = {line.split("|")[-1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "openrlhf_bapo.flags.train_flags" in loaded
    assert not loaded & {"ray", "vllm", "deepspeed", "transformers", "openrlhf.models"}


ONE_OR_MORE = (
    "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size ds.ring_attn_size "
    "ds.tensor_parallel_size ds.zpg data.max_samples rollout.max_new_tokens rollout.batch_size "
    "rollout.n_samples_per_prompt rollout.micro_batch_size rollout.max_tokens_per_gpu train.batch_size "
    "train.micro_batch_size train.max_tokens_per_gpu train.max_epochs train.num_episodes train.async_queue_size "
    "rollout.vllm_generate_batch_size eval.n_samples_per_prompt logger.logging_steps ckpt.max_num"
).split()
# Other values outside of their range, by what is allowed.
OUTSIDE = {
    "1 or more": "rollout.batch_size -16",
    "2 or more": "data.max_len 1",
    "0 or more": "data.dataloader_num_workers -1, data.max_images_per_prompt -1, ds.lora.rank -8, offpolicy.lag -1, "
    "bapo.dump_tokens -1, bapo.max_skipped_updates -1",
    "-1 (never), or 1 or more": "ckpt.save_steps 0, ckpt.save_steps -2, eval.steps 0",
    "-1 (none), or more": "critic.freezing_steps -2",
    "from 0 to 2**32 - 1": "train.seed -1",
    "0 or more, and finite": "actor.adam.lr -1.0, actor.adam.lr nan, actor.adam.lr inf, critic.adam.lr -1.0, "
    "actor.adam.weight_decay -0.1, actor.max_norm -1.0, actor.eps_clip -0.2, algo.kl.init_coef -0.01, "
    "reward_fault.patience -1.0",
    "above 0, and finite": "actor.adam.eps 0.0, critic.value_clip 0.0, reward_fault.timeout 0.0, "
    "reward_fault.timeout nan, reward_fault.timeout inf",
    "above 1": "actor.dual_clip 0.5",
    "above 0": "ckpt.max_mem 0.0",
    "up to 1": "reward.stop_properly_penalty_coef 2.0",
    "above 0, up to 1": "rollout.top_p 2.0, rollout.top_p 0.0, vllm.gpu_memory_utilization 1.5",
    "from 0 to 1": "actor.lr_warmup_ratio 3.0, actor.min_lr_ratio -0.1, algo.advantage.gamma 1.5, "
    "algo.advantage.lambd -1.0",
    "from 0, below 1": "reward_fault.max_drop_rate 1.0, reward_fault.max_drop_rate -0.1",
    "from 0.01 to 2": "rollout.temperature 0.0, rollout.temperature 0.005, rollout.temperature 2.5, "
    "rollout.temperature nan",
    "0, or from 0.01 to 2": "eval.temperature -0.5, eval.temperature 0.005",
    "a finite number": "actor.entropy_coef nan",
    "0, 1, 2, 3": "ds.zero_stage 7",
    "linear, cosine, ": "actor.lr_scheduler cosin, actor.lr_scheduler warmup_stable_decay",
    "nccl, gloo": "vllm.sync_backend ncll",
    "bf16, fp16, fp32": "ds.grad_accum_dtype fp8",
    "eager, sdpa, ": "ds.attn_implementation flash",
    "none, or a metric of the evaluation": "ckpt.best_metric_key reward",
}
# A run with all four models, each on two GPUs.
FOUR_MODELS = (
    "~reward.remote_url --reward.model_name_or_path {d}/model --algo.kl.init_coef 0.1 --algo.advantage.estimator gae "
    "--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2"
)
# The short run has one actor, which trains on rollouts of 16 prompts x 4 samples.
TOGETHER = r"""
--policy_loss bapo --actor.policy_loss_type gspo => --actor.policy_loss_type ppo, not gspo
--policy_loss bapo --actor.eps_clip 0.3 => : not allowed with --policy_loss bapo ... --bapo.ratio_lower_start
--policy_loss bapo --actor.eps_clip_low_high 0.2 0.2 => : not allowed with --policy_loss bapo
--policy_loss m2 --actor.eps_clip 0.3 => : not allowed with --policy_loss m2
--policy_loss topr --actor.dual_clip 3 => --actor.dual_clip 3.0: ... allowed with ppo, bapo, m2, div
--policy_loss balanced --algo.advantage.is_correction_level seq => : ... --policy_loss balanced: off
--partial.token_budget 9 --train.agent_func_path agent.py
    => --partial.token_budget 9: ... allowed without --train.agent_func_path
--partial.token_budget 9 --rollout.vllm_generate_batch_size 32 --train.async_enable
    => --rollout.vllm_generate_batch_size 32: --partial.token_budget ... --rollout.batch_size 16
--policy_loss bapo --offpolicy.lag 2 --rollout.vllm_generate_batch_size 8
    => --rollout.vllm_generate_batch_size 8: --offpolicy.lag 2 decides ... --rollout.batch_size 16
--partial.token_budget 9 --data.max_images_per_prompt 1
    => --partial.token_budget 9: allowed without --data.max_images_per_prompt
--replay.ratio 0.25 => : draws 4 groups ... at least 8
--replay.ratio 1 --train.batch_size 48 => : ... --replay.ratio ... 64
--replay.ratio 1 --rollout.n_samples_per_prompt 1 --rollout.batch_size 64
    => --replay.skip_uninformative: ... --no-replay.skip_uninformative
--replay.ratio 0.5 --rollout.n_samples_per_prompt 6
    => --replay.ratio 0.5: draws 8 groups per training step; allowed: a ratio that draws at least 16
--replay.ratio 1 --data.max_images_per_prompt 1 => --replay.ratio 1.0: ... without --data.max_images
--train.dynamic_batch_enable --data.max_images_per_prompt 1 => --train.dynamic_batch_enable: packs ... positions of text
--ds.ring_attn_size 2 --actor.num_gpus_per_node 2 --data.max_images_per_prompt 1 => --ds.ring_attn_size 2: packs samples
--offpolicy.ratio_base rollout --algo.advantage.is_correction_level seq => : ... second time
--offpolicy.objective decoupled --algo.advantage.is_correction_level off
    => : is --offpolicy.weight none or tapered; allowed: token, seq
--offpolicy.weight tapered => : would count staleness twice ... --offpolicy.objective decoupled
--offpolicy.weight_level token => : would count staleness twice ... --offpolicy.objective decoupled
--offpolicy.objective decoupled --offpolicy.weight_level token => : ... masked or tapered
--offpolicy.objective decoupled --offpolicy.weight capped --offpolicy.weight_level sequence
    => : allowed with --offpolicy.weight masked or tapered, not capped
--offpolicy.objective decoupled --offpolicy.weight tapered --algo.advantage.is_correction_level token
    => : weighs tokens too; ... --offpolicy.weight tapered: off
--offpolicy.objective decoupled --offpolicy.weight capped --algo.advantage.is_correction_mode mask
    => : allowed with --offpolicy.weight capped: clip
--offpolicy.objective decoupled --offpolicy.weight masked --algo.advantage.is_correction_level seq
    => : allowed with --offpolicy.weight masked: token
--policy_loss bapo --train.async_enable --rollout.top_p 0.9
    => : changes the engine's log-probs, and --offpolicy.ratio_base rollout ... allowed: 1
--offpolicy.lag 2 --rollout.top_p 0.9 => : ... --offpolicy.ratio_base auto
--offpolicy.objective decoupled --rollout.top_p 0.9 => : ... is_correction_level token
--offpolicy.objective decoupled --offpolicy.weight tapered --rollout.top_p 0.9 => : ... weight tapered
--policy_loss bapo --offpolicy.objective decoupled --offpolicy.weight none --bapo.token_weight rollout_prob
    --rollout.top_p 0.9 => : ... --bapo.token_weight rollout_prob uses them
--offpolicy.objective decoupled --offpolicy.weight heavy => --offpolicy.weight: invalid choice: 'heavy'
--policy_loss ppo --actor.policy_loss_type gspo => --policy_loss ppo: ... --actor.policy_loss_type ppo
--actor.policy_loss_type gspo --replay.ratio 1 => --replay.ratio 1.0: ... every --policy_loss but gspo
--policy_loss bapo --no_such_flag 1 => unrecognized arguments: --no_such_flag
--policy_loss bapo --offpolicy.lag 3 --train.async_enable
    => --offpolicy.lag 3: allowed only without --train.async_enable
--policy_loss bapo --offpolicy.lag 3 --partial.token_budget 16 => : allowed without --offpolicy.lag, which is 3
--policy_loss bapo --offpolicy.lag 3 --algo.advantage.is_correction_level token
    => is_correction_level token: ... with --offpolicy.lag 3: off
--data.input_template Question: => : allowed: a text with {} for the input
--data.input_template '\boxed{{}}' => : allowed: a text with {} for the input
--data.prompt_probs 0.5,0.5 => : allowed: 1 numbers, one for each data set, that add up to 1
--data.prompt_probs half => : allowed: 1 numbers, one for each data set, that add up to 1
--train.batch_size many => --train.batch_size ... many ... invalid int value
--ds.param_dtype fp64 => --ds.param_dtype ... fp64 ... fp32
--replay.capacity 7 => : does nothing without --replay.ratio
--replay.strategy newest => : does nothing without --replay.ratio
--partial.max_segments 2 => : does nothing without --partial.token_budget
--train.batch_size 20 => : must be a multiple of 8, --train.micro_batch_size 8 on each of the 1 data-
--train.batch_size 128 => : a rollout has only 64 samples
--rollout.vllm_generate_batch_size 6 => --train.batch_size 32: a rollout has only 24 samples
--rollout.micro_batch_size 65 => : leaves fewer than 1 micro-batches
--rollout.n_samples_per_prompt 1 => : --algo.advantage.estimator group_norm compares the responses
--rollout.max_new_tokens 24 => : must be below --data.max_len 24
--reward.overlong_buffer_len 9.0 => : must be below the 8 tokens of a response
--rollout.vllm_generate_batch_size 32 => : more than --rollout.batch_size 16 is allowed only with --train.async_enable
--actor.num_gpus_per_node 3 => --train.batch_size 32: must be a multiple of 24 ... --actor.num_gpus_per_node 3
~actor.model_name_or_path => --actor.model_name_or_path: is missing
~data.prompt_dataset => --data.prompt_dataset: is missing
~data.prompt_dataset --policy_loss bapo => --data.prompt_dataset: is missing
~reward.remote_url => --reward.remote_url: is missing
~vllm.num_engines => --vllm.num_engines: is missing ... 1 or more
--rollout.vllm_generate_batch_size 32 --train.async_enable --data.max_images_per_prompt 1
    => --rollout.vllm_generate_batch_size 32 ... allowed only without --data.max_images_per_prompt
--actor.adam.betas 0.9 1.5 => --actor.adam.betas 0.9 1.5 ... from 0, below 1
--reward.clip_range 10 -10 => --reward.clip_range 10.0 -10.0 ... LOW below HIGH
--algo.dynamic_filtering_range 1 0 --algo.dynamic_filtering_enable
    => --algo.dynamic_filtering_range 1.0 0.0 ... LOW below HIGH
--replay.ratio 1 --replay.max_staleness 0 => : never replays ... 1 or more
--replay.ratio 1 --offpolicy.lag 8
    => --replay.max_staleness 4: never replays ... 9 in the training step after its own ... --offpolicy.lag 8 ... 9 or
--replay.ratio 1 --replay.capacity 15 => : keeps fewer than the 16 groups ... allowed: 16 or more
--replay.ratio 1 --train.batch_size 0 => : allowed: 1 or more
--replay.ratio 0.01 => : draws 0 groups
~reward.remote_url --reward_fault.timeout 9 --reward.model_name_or_path {d}/model
    => --reward_fault.timeout 9: does nothing without --reward.remote_url
~reward.remote_url --reward_fault.max_drop_rate 0.5 --reward.model_name_or_path {d}/model
    => --reward_fault.max_drop_rate 0.5: does nothing without --reward.remote_url or --train.agent_func_path
--eval.at_start => : does nothing without --eval.dataset
~reward.remote_url --eval.dataset {d}/train.jsonl --reward.model_name_or_path {d}/model
    => --eval.dataset ... not with a reward model
--train.colocate_all --vllm.num_engines 2 => --vllm.num_engines 2 ... the actor's 1 GPUs
--policy_loss bapo --train.batch_size 24
    => : with --policy_loss bapo it must divide --rollout.batch_size x ... which is 64
--policy_loss bapo --train.dynamic_batch_enable --train.batch_size 24
    => : with --policy_loss bapo it must divide --rollout.batch_size x ... which is 64
--policy_loss ppo --train.dynamic_batch_enable --train.batch_size 24
    => : with --train.dynamic_batch_enable it must divide --rollout.batch_size x ... which is 64
--replay.ratio 1 --algo.advantage.estimator gae --critic.num_gpus_per_node 2
    => : with --replay.ratio its data-parallel ranks must divide the actor's 1
--train.dynamic_batch_enable --algo.advantage.estimator gae --critic.num_gpus_per_node 2
    => : with --train.dynamic_batch_enable its data-parallel ranks must divide the actor's 1
--actor.num_gpus_per_node 2 --rollout.micro_batch_size 12 => : gives the 2 data ... unequal shares ... 64 samples
--algo.advantage.estimator gae --critic.num_gpus_per_node 2 --rollout.micro_batch_size 12
    => : gives the 2 data-parallel ranks of --critic
--train.dynamic_batch_enable --ds.zero_stage 1 --ds.overlap_comm => : with --train.dynamic_batch_enable
--train.dynamic_batch_enable --ds.zero_stage 2 --ds.deepcompile => : with --train.dynamic_batch_enable
--train.colocate_actor_ref --algo.kl.init_coef 0.1 --ref.num_gpus_per_node 2
    => --ref.num_gpus_per_node 2 ... the actor's 1 x 1
--algo.advantage.estimator gae --critic.num_gpus_per_node 3
    => --train.batch_size 32: must be a multiple of 24 ... the 3 data-parallel ranks of --critic.num_gpus
--train.colocate_all --algo.advantage.estimator gae --critic.num_gpus_per_node 8
    => : allowed with --train.colocate_all: up to the actor's 1 GPUs
~reward.remote_url --reward.model_name_or_path {d}/model --train.colocate_all --reward.num_nodes 2
    => --reward.num_nodes 2 x --reward.num_gpus_per_node 1: allowed with --train.colocate_all: up to
~reward.remote_url --reward.model_name_or_path {d}/model --train.colocate_critic_reward --algo.advantage.estimator gae
    --critic.num_gpus_per_node 2
    => --reward.num_gpus_per_node 1: must equal --critic.num_nodes 1 x --critic.num_gpus_per_node 2
~reward.remote_url --reward.model_name_or_path {d}/model --reward.num_nodes 0
    => --reward.num_nodes 0 x --reward.num_gpus_per_node 1: allowed: 1 or more
--ds.ring_attn_size 2 --actor.num_gpus_per_node 3 => --ds.ring_attn_size 2 ... the actor's 3 GPUs
--train.partial_rollout_enable => --train.partial_rollout_enable
--algo.dynamic_filtering_enable --rollout.n_samples_per_prompt 1 --rollout.batch_size 64 --algo.advantage.estimator gae
    => n_samples_per_prompt must be greater than 1
--data.max_images_per_prompt 1 --algo.advantage.estimator gae => does not support critic
--ds.zero_stage 0 --ds.grad_accum_dtype float32 --ds.param_dtype bf16
    => --ds.grad_accum_dtype float32: with --ds.zero_stage 0 it must be --ds.param_dtype bf16
--data.input_template 'Q: {}' --data.apply_chat_template
    => --data.input_template Q: {}: allowed only without --data.apply_chat_template
--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip
    => : allowed with ... level token and ... not with seq and ratio
--algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv
    => --algo.advantage.is_correction_threshold 0.5 5.0: allowed with ... gating tv: one number
--train.enable_ema --ds.zero_stage 3
    => --train.enable_ema: with --ds.zero_stage 3 ... the initial weights ... allowed with --ds.zero_stage 0, 1 and 2
--actor.optim muon --ds.zero_stage 3 => --actor.optim muon: DeepSpeed does not have it with --ds.zero_stage 3
--algo.advantage.estimator gae --critic.optim muon --ds.adam_offload
    => --critic.optim muon: DeepSpeed does not have it with --ds.adam_offload
--actor.optim muon --ds.grad_accum_dtype fp32 --ds.param_dtype bf16
    => --actor.optim muon: DeepSpeed does not have it with --ds.grad_accum_dtype fp32
--actor.optim muon --ds.zero_stage 0 => --actor.optim muon: DeepSpeed does not have it with --ds.zero_stage 0
--actor.optim muon --ds.param_dtype fp16
    => --actor.optim muon: DeepSpeed does not have it with --ds.param_dtype fp16
--critic.freezing_steps 5
    => --critic.freezing_steps 5: --algo.advantage.estimator group_norm has no critic ... train nothing; allowed: -1
--algo.advantage.estimator gae --actor.aux_loss_coef 0.001
    => --actor.aux_loss_coef 0.001: ... the critic's outputs ... allowed without --algo.advantage.estimator gae
--algo.kl.init_coef 0.01 --algo.kl.target 0.1 --algo.kl.horizon 12
    => --algo.kl.horizon 12: ... 64 samples can make the KL coefficient negative; allowed: 13 or more
--ds.load_in_4bit => : ... weights of 4 bits
--ds.lora.rank 8 --train.enable_ema => --ds.lora.rank 8: allowed only without --train.enable_ema
--ds.lora.rank 8 --ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2
    => --ds.lora.rank 8: allowed only with --ds.tensor_parallel_size 1, not 2
--algo.advantage.estimator gae --ds.lora.rank 8 --ds.lora.target_modules q_proj
    => : the critic's new value head would stay random; allowed with ... gae: all-linear
--ds.lora.rank 8 --ds.lora.target_modules => : is empty; allowed: all-linear, or names of modules
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *((f"--{flag} 0", f"--{flag} 0: allowed: 1 or more") for flag in ONE_OR_MORE),
        *((f"--{flag}", f"--{flag}: allowed: {text}") for text, flags in OUTSIDE.items() for flag in flags.split(", ")),
        *refusals.rows(TOGETHER),
        *(
            (
                f"{FOUR_MODELS} --ds.ring_attn_size 2 --{name} 3",
                f"--{name} 3: must be a multiple of --ds.ring_attn_size 2",
            )
            for name in (f"{model}.num_gpus_per_node" for model in ("ref", "critic", "reward"))
        ),
    ],
)
def test_a_value_or_a_clash_with_openrlhfs_flags_is_refused_in_one_line_before_ray_starts(
    tmp_path, flags, said, capsys
):
    line = pipeline.refusal(refusals.argv(tmp_path, flags), capsys)
    assert refusals.says(line, said), line


def test_the_shortest_allowed_horizon_keeps_the_kl_coefficient_positive(tmp_path):
    args = pipeline.parse(refusals.argv(tmp_path, "--algo.kl.init_coef 0.01 --algo.kl.target 0.1 --algo.kl.horizon 13"))
    coefficients = []
    for horizon in (args.algo.kl.horizon - 1, args.algo.kl.horizon):
        controller = AdaptiveKLController(0.01, args.algo.kl.target, horizon)
        controller.update(0.0, args.rollout.batch_size * args.rollout.n_samples_per_prompt)
        coefficients.append(controller.value)
    assert coefficients[0] < 0 < coefficients[1]


def test_every_flag_has_its_documented_default():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    found = vars(parser.parse_args([]))
    # Where a preset, or the class of a rule, decides.
    groups = ("policy_loss", "bapo.", *(f"{name}." for name in RULES), "offpolicy.ratio_base", "offpolicy.weight")
    open_ones = {name for name in found if name.startswith(groups)} - {"bapo.max_skipped_updates"}
    assert {name for name, value in found.items() if value is None} == open_ones
    words = {"True": "on", "False": "off"}
    shown = {name: words.get(str(value), str(value)).removesuffix(".0") for name, value in found.items()}
    page = (pipeline.REPOSITORY / "docs/flags.md").read_text()
    documented = dict(re.findall(r"^\| `--([\w.]+).* \| `?([\w.]+)`? \|$", page, re.MULTILINE))
    assert {name: shown[name] for name in found.keys() - open_ones} == {
        name: text for name, text in documented.items() if name not in open_ones
    }


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_preset_sets_every_field(tmp_path, preset):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset=preset))
    config = replace(clip_config_from_args(args.bapo), dual_clip=args.actor.dual_clip)
    assert config == ClipConfig.preset(preset or "paper")  # tests/unit/test_clip_bounds.py has its numbers
    assert (args.bapo.preset, args.bapo.token_weight) == (preset or "paper", "none")


GIVEN = {
    "positive_contribution_target": 0.35,
    "ratio_lower_start": 0.5,
    "ratio_lower_max": 0.95,
    "ratio_lower_step": 0.03,
    "ratio_upper_start": 1.3,
    "ratio_upper_max": 2.5,
    "ratio_upper_step": 0.07,
    "contribution": "gradient",
}


@pytest.mark.parametrize("name", GIVEN)
def test_every_flag_of_the_search_changes_its_field_and_no_other(tmp_path, name):
    argv = pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset="octothinker", **{f"bapo__{name}": GIVEN[name]})
    expected = replace(ClipConfig.preset("octothinker"), **{name: GIVEN[name]})
    assert clip_config_from_args(pipeline.parse(argv).bapo) == expected


def test_every_smoothing_flag_reaches_its_setting(tmp_path):
    def smoothing(**given):
        argv = pipeline.flags(tmp_path, policy_loss="bapo", **{f"bapo__{name}": v for name, v in given.items()})
        return clip_config_from_args(pipeline.parse(argv).bapo).smoothing

    assert smoothing() is None and smoothing(preset="steady", smoothing=0) is None
    assert smoothing(smoothing=5) == SmoothingConfig(5.0)
    assert smoothing(preset="steady", smoothing_of="tally") == SmoothingConfig(20.0, of="tally")
    argv = [*pipeline.flags(tmp_path, policy_loss="bapo", bapo__smoothing=5), "--bapo.smoothing_start", "0.7", "2"]
    assert clip_config_from_args(pipeline.parse(argv).bapo).smoothing == SmoothingConfig(5.0, start=(0.7, 2.0))


RULE_SETTINGS = {
    "m2": dict(budget=0.1, half_life=5.0),
    "divergence": dict(threshold=0.15),
    "topr": dict(level="token"),
    "balanced": dict(target=0.4, half_life=5.0, level="sequence"),
}


@pytest.mark.parametrize("name", RULES)
def test_every_flag_of_another_rule_reaches_its_setting_and_without_it_has_the_classs_default(tmp_path, name):
    def rule(**given):
        argv = pipeline.flags(tmp_path, policy_loss=name, **{f"{name}__{key}": value for key, value in given.items()})
        return clip_rule_from_args(pipeline.parse(argv))

    assert RULE_SETTINGS[name].keys() == default_settings(name).keys()
    for given in ({}, RULE_SETTINGS[name]):
        assert type(rule(**given)) is RULES[name]
        assert vars(rule(**given)) == vars(RULES[name](**given))
    assert vars(rule()) != vars(rule(**RULE_SETTINGS[name]))


@pytest.mark.parametrize("name", RULES)
def test_another_rule_is_against_the_policy_that_generated_the_tokens_and_logs_entropy(tmp_path, name):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss=name))
    assert (args.policy_loss, args.actor.policy_loss_type, args.actor.entropy_coef) == (name, "ppo", 0.0)
    assert args.offpolicy.ratio_base == "recomputed"
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss=name, train__async_enable=True))
    assert args.offpolicy.ratio_base == "rollout"


def test_every_replay_flag_reaches_the_pools_settings(tmp_path):
    given = dict(ratio=0.5, capacity=9, max_staleness=3, max_reuse=2, strategy="oldest", seed=5)
    argv = pipeline.flags(tmp_path, **{f"replay__{name}": value for name, value in given.items()})
    args = pipeline.parse([*argv, "--no-replay.skip_uninformative", "--replay.discard_saved"])
    assert replay_config_from_args(args.replay) == ReplayConfig(**given, skip_uninformative=False)
    assert args.replay.discard_saved is True


@pytest.mark.parametrize(
    "flags",
    [
        "--policy_loss bapo --actor.eps_clip 0.2",
        "--replay.ratio 0.5",  # 8 groups of 4, one optimizer step of 32
        "--replay.ratio 1 --rollout.n_samples_per_prompt 6",  # 16 groups of 6, three of 32
        "--eval.at_start --eval.dataset heldout.jsonl",
        "--train.async_enable",
        "--policy_loss m2 --actor.dual_clip 3 --algo.advantage.is_correction_level token",
        "--policy_loss divergence --bapo.dump_tokens 5",
        "--policy_loss balanced --balanced.half_life 3 --bapo.discard_saved",
        "--policy_loss topr --replay.ratio 1 --partial.token_budget 9",
        "--reward.remote_url http://somewhere/get_reward",
        "--policy_loss bapo --algo.advantage.is_correction_level token",
        "--train.async_enable --algo.advantage.is_correction_level token",
        "--train.async_enable --offpolicy.ratio_base rollout --policy_loss ppo",
        "--policy_loss gspo --offpolicy.ratio_base recomputed",
        "--rollout.n_samples_per_prompt 1 --rollout.batch_size 64 --algo.advantage.estimator reinforce",
        # The ends of ranges.
        "--bapo.max_skipped_updates 0 --reward_fault.patience 0 --reward_fault.max_drop_rate 0",
        "--reward_fault.patience 0.5 --reward_fault.timeout 0.5",
    ],
)
def test_allowed_combinations_are_accepted(tmp_path, flags):
    pipeline.parse(refusals.argv(tmp_path, flags))


# A given flag wins over the preset. A lag is a queue of whole responses that many versions old.
RESOLVED = """
--policy_loss bapo => actor.entropy_coef=0.0
--policy_loss bapo --actor.entropy_coef 0.01 => actor.entropy_coef=0.01
--policy_loss ppo => actor.entropy_coef=None bapo.dump_tokens=None
--policy_loss ppo --offpolicy.ratio_base auto --bapo.dump_tokens 0 => actor.entropy_coef=None
--policy_loss ppo --offpolicy.ratio_base auto --bapo.dump_tokens 5 => actor.entropy_coef=0.0 bapo.dump_tokens=5
--policy_loss bapo --bapo.preset octothinker --bapo.ratio_upper_max 2.5
    => bapo.ratio_upper_max=2.5 bapo.positive_contribution_target=0.45 bapo.scope=update actor.policy_loss_type=ppo
--policy_loss bapo --bapo.preset released --bapo.scope update --actor.dual_clip 5
    => bapo.scope=update actor.dual_clip=5.0
--replay.ratio 1 --rollout.n_samples_per_prompt 1 --rollout.batch_size 64 --algo.advantage.estimator reinforce
    => replay.skip_uninformative=False
--replay.ratio 1 => replay.skip_uninformative=True
--replay.ratio 1 --no-replay.skip_uninformative => replay.skip_uninformative=False
--replay.ratio 1 --algo.advantage.estimator gae --replay.skip_uninformative => replay.skip_uninformative=True
--policy_loss bapo --offpolicy.lag 3
    => partial.token_budget=2147483647 partial.oversample=1.0 partial.max_staleness=3
"""


@pytest.mark.parametrize(("flags", "expected"), refusals.rows(RESOLVED))
def test_flags_resolve_to_settings(tmp_path, flags, expected):
    args = pipeline.parse(refusals.argv(tmp_path, flags))
    for setting in expected.split():
        name, value = setting.split("=")
        assert str(attrgetter(name)(args)) == value, name


def test_samples_know_their_versions_wherever_the_ratio_has_a_base(tmp_path):
    for given, expected in (
        (dict(), False),
        (dict(policy_loss="bapo"), True),
        (dict(replay__ratio=1), True),
        (dict(offpolicy__ratio_base="recomputed"), True),
        (dict(train__async_enable=True), True),
        (dict(train__async_enable=True, policy_loss="gspo"), False),
    ):
        assert is_off_policy(pipeline.parse(pipeline.flags(tmp_path, **given))) == expected, given


@pytest.mark.parametrize(
    "given", [{}, dict(policy_loss="ppo"), dict(policy_loss="gspo"), dict(actor__policy_loss_type="gspo")]
)
def test_without_bapo_openrlhfs_arguments_keep_their_values(tmp_path, given):
    args = pipeline.parse(pipeline.flags(tmp_path, **given))
    expected = "gspo" if "gspo" in given.values() else "ppo"
    assert args.actor.policy_loss_type == args.policy_loss == expected
    assert {name for name, value in vars(args.bapo).items() if value is not None} == {"max_skipped_updates"}


PROXIMAL = "--offpolicy.ratio_base recomputed: the ratio does not see the staleness of"
# The ratio's base, and what is said of it. OpenRLHF's own command with its correction stays what it is.
RATIOS = f"""
--policy_loss ppo => None
--policy_loss bapo --train.async_enable => rollout
--policy_loss ppo --train.async_enable --offpolicy.ratio_base auto => rollout
--policy_loss ppo --train.async_enable
    => rollout ... --train.async_enable: ... engine's log-probs, ... is --offpolicy.ratio_base recomputed
--policy_loss ppo --train.async_enable --algo.advantage.is_correction_level token
    => recomputed ... {PROXIMAL} --train.async_enable; ... is_correction_level token alone
--policy_loss ppo --train.async_enable --offpolicy.ratio_base recomputed
    => recomputed ... {PROXIMAL} --train.async_enable; --offpolicy.ratio_base auto is against the policy that generated
--policy_loss ppo --offpolicy.lag 3 --offpolicy.ratio_base recomputed --algo.advantage.is_correction_level token
    => recomputed ... {PROXIMAL} --offpolicy.lag 3;
--partial.token_budget 9 --offpolicy.ratio_base recomputed => recomputed ... {PROXIMAL} --partial.tok
--policy_loss ppo --offpolicy.ratio_base recomputed --replay.ratio 1 => recomputed
--policy_loss gspo --train.async_enable => None ... --policy_loss gspo: ... of --train.async_enable;
--policy_loss bapo => recomputed
--policy_loss bapo --offpolicy.ratio_base rollout => rollout
--replay.ratio 1 => recomputed
--replay.ratio 1 --train.async_enable => rollout ... --train.async_enable: the ratio is against
--policy_loss ppo --partial.token_budget 9 --train.async_enable => rollout ... --train.async_enable: the ratio is
--offpolicy.ratio_base auto => recomputed
--offpolicy.lag 1 => auto
--policy_loss bapo --offpolicy.lag 1 => auto
--policy_loss ppo --partial.token_budget 9 => auto
--policy_loss bapo --partial.token_budget 9 --train.async_enable => rollout
"""


@pytest.mark.parametrize(("flags", "expected"), refusals.rows(RATIOS))
def test_the_ratio_is_against_the_policy_that_generated_the_tokens_or_one_line_says_where_it_is_not(
    tmp_path, capsys, flags, expected
):
    args = pipeline.parse(refusals.argv(tmp_path, flags))
    said = capsys.readouterr().err
    base, _, line = expected.partition(" ... ")
    assert str(args.offpolicy.ratio_base) == base and said.count("\n") == bool(line)
    assert refusals.says(said, line) and (not said or said.startswith("openrlhf-bapo: warning: "))
    assert has_proximal_ratio(args) == (PROXIMAL in line)


STALE = ["--train.async_enable", "--offpolicy.lag 3", "--partial.token_budget 9", "--replay.ratio 1"]


@pytest.mark.parametrize("policy_loss", ["ppo", "bapo"])
@pytest.mark.parametrize("stale", ["", *STALE, f"{STALE[0]} {STALE[2]} {STALE[3]}"])
def test_decoupled_is_the_recomputed_ratio_with_openrlhfs_correction_capped_at_2(tmp_path, capsys, policy_loss, stale):
    argv = refusals.argv(tmp_path, f"--policy_loss {policy_loss} --offpolicy.objective decoupled {stale}")
    args = pipeline.parse(argv)
    assert args.offpolicy.ratio_base == "recomputed" and has_proximal_ratio(args) and not capsys.readouterr().err
    assert (args.offpolicy.weight, args.offpolicy.weight_level) == ("capped", None)
    assert correction(args) == ("token", "clip", "ratio", [0.0, 2.0])


def correction(args) -> tuple:
    return tuple(getattr(args.algo.advantage, f"is_correction_{x}") for x in ("level", "mode", "gating", "threshold"))


# --offpolicy.weight, its level, and OpenRLHF's correction.
WEIGHTS = """
--algo.advantage.is_correction_threshold 5 => capped None token clip ratio [0.0, 5.0]
--algo.advantage.is_correction_level token => capped None token clip ratio [0.0, 2.0]
--algo.advantage.is_correction_mode mask => masked None token mask ratio [0.5, 5.0]
--algo.advantage.is_correction_level seq => masked None seq mask ratio [0.5, 5.0]
--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.1
    => masked None token mask tv [0.0, 0.1]
--offpolicy.weight capped => capped None token clip ratio [0.0, 2.0]
--offpolicy.weight masked => masked None token mask ratio [0.5, 5.0]
--offpolicy.weight masked --offpolicy.weight_level sequence => masked sequence seq mask ratio [0.5, 5.0]
--offpolicy.weight none => none None off mask ratio [0.5, 5.0]
--offpolicy.weight tapered => tapered sequence off mask ratio [0.5, 5.0]
--offpolicy.weight tapered --offpolicy.weight_level token => tapered token off mask ratio [0.5, 5.0]
"""


@pytest.mark.parametrize(("flags", "expected"), refusals.rows(WEIGHTS))
def test_a_weight_sets_openrlhfs_correction_or_is_tapered_without_it_and_given_flags_of_the_correction_are_kept(
    tmp_path, flags, expected
):
    for stale in ("", *STALE):
        argv = refusals.argv(tmp_path, f"--policy_loss bapo --offpolicy.objective decoupled {flags} {stale}")
        args = pipeline.parse(argv)
        found = (args.offpolicy.weight, args.offpolicy.weight_level, *correction(args))
        assert " ".join(map(str, found)) == expected and args.offpolicy.ratio_base == "recomputed"


def test_with_the_behavior_objective_openrlhfs_correction_is_as_it_comes(tmp_path):
    assert correction(pipeline.parse(pipeline.flags(tmp_path))) == ("off", "mask", "ratio", [0.5, 5.0])


def test_the_arguments_are_those_of_openrlhfs_own_parser_and_the_given_ones_are_known(tmp_path, monkeypatch):
    parse, found = arguments._parse, []

    def parse_twice(parser: argparse.ArgumentParser):
        parsed, given = parse(parser)
        found.append((dict(vars(parsed)), given, vars(parser.parse_args())))
        return parsed, given

    monkeypatch.setattr(arguments, "_parse", parse_twice)
    argv = pipeline.flags(tmp_path, policy_loss="bapo", replay__ratio=1, ds__packing_samples=True)
    pipeline.parse([*argv, "--no-replay.skip_uninformative", "--actor.adam.betas", "0.9", "0.95"])
    ((parsed, given, expected),) = found
    assert parsed == expected
    names = {flag.removeprefix("--") for flag in argv if flag.startswith("--")}
    assert given == names | {"replay.skip_uninformative", "actor.adam.betas"}


def test_help_shows_openrlhfs_flags_and_ours():
    run = subprocess.run([pipeline.warm_python(), *pipeline.TRAIN, "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    for flag in ("--rollout.batch_size", "--policy_loss", "--bapo.preset", "--bapo.scope", "--eval.at_start"):
        assert flag in run.stdout


@pytest.mark.parametrize(("step", "given", "asked"), [(0, True, 1), (7, True, 0), (0, False, 0)])
def test_a_run_evaluates_at_its_start_if_asked_and_not_again_when_it_is_resumed(step, given, asked):
    evaluations = []

    class Trainer:  # stands for OpenRLHF's, which needs Ray
        args = argparse.Namespace(eval=argparse.Namespace(at_start=given, temperature=0.5, n_samples_per_prompt=3))
        eval_dataloader, generate_kwargs = ["a prompt"], {"temperature": 1.0, "top_p": 0.9}

        def init_checkpoint_states(self) -> dict:
            return {"global_step": step}

        def evaluate(self, *place, **sampling) -> None:
            evaluations.append((place, sampling))

    actor_class = argparse.Namespace(__ray_metadata__=argparse.Namespace(modified_class=Trainer))
    evaluate_at_start(argparse.Namespace(PPOTrainer=actor_class))
    assert Trainer().init_checkpoint_states() == {"global_step": step}
    assert evaluations == asked * [((0,), {"temperature": 0.5, "top_p": 0.9, "n_samples_per_prompt": 3})]


def test_a_lag_of_0_is_no_lag(tmp_path):
    given, not_given = (vars(pipeline.parse(refusals.argv(tmp_path, flags))) for flags in ("--offpolicy.lag 0", ""))
    assert given == not_given and given["partial"].token_budget == 0
