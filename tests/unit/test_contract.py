"""Every upstream name and signature that our seams rely on exists in the installed OpenRLHF, DeepSpeed and vLLM.

They are read from the source files, because in memory our functions have already replaced them.
"""

import ast
import importlib.util
import inspect
import re

import pytest
from openrlhf.models import PolicyLoss

# A line for each callable: its module, its name there, and parameters that we pass or override.
CALLABLES = """\
openrlhf.models.loss PolicyLoss.__init__(clip_eps_low, clip_eps_high, dual_clip, token_level_loss)
openrlhf.models.loss PolicyLoss.forward(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs)
openrlhf.trainer.ray.launcher BaseDistributedActor._get_free_port()
openrlhf.trainer.ray.ppo_actor ActorPPOTrainer.ppo_train(kl_ctl)
openrlhf.trainer.ray.ppo_actor ActorPPOTrainer.broadcast_to_vllm()
openrlhf.trainer.ray.ppo_actor PolicyModelActor.init_model_from_pretrained(strategy, pretrain)
openrlhf.trainer.ppo_trainer compute_eval_metrics(eval_dataloader, samples_list, n_samples_per_prompt)
openrlhf.trainer.ppo_trainer prepare_datasets(strategy, tokenizer)
openrlhf.trainer.ppo_trainer BasePPOTrainer.ppo_train(global_steps)
openrlhf.trainer.ppo_trainer BasePPOTrainer.save_logs_and_checkpoints(global_step)
openrlhf.trainer.ppo_trainer BasePPOTrainer.save_best_checkpoint(eval_metrics, global_step)
openrlhf.trainer.ppo_trainer BasePPOTrainer.restore_best_checkpoint_state(checkpoint_states)
openrlhf.trainer.ppo_trainer BasePPOTrainer._compute_rollout_stats(experiences)
openrlhf.trainer.ppo_utils.replay_buffer NaiveReplayBuffer.setup_dynamic_batch(strategy)
openrlhf.utils.deepspeed.deepspeed DeepspeedStrategy.moving_average(model, model_ema, beta)
openrlhf.utils.distributed_util stateless_init_process_group(master_address, master_port, rank, world_size, device)
openrlhf.trainer.ray.vllm_worker_wrap WorkerWrap.update_weight(name, dtype, shape)
openrlhf.trainer.ppo_trainer_async GenerateSamplesActor.fit(episode, total_consumed_prompts)
openrlhf.trainer.ppo_trainer_async GenerateSamplesActor.load_state_dict(state_dict)
deepspeed.runtime.zero.partition_parameters Init._allgather_params_sequential(param_list, hierarchy)
openrlhf.trainer.ppo_utils.experience_maker RemoteExperienceMaker.make_experience(samples_list)
openrlhf.trainer.ppo_utils.experience_maker RemoteExperienceMaker._dispatch_forward(group, sync_condition)
openrlhf.trainer.ppo_utils.experience_maker RemoteExperienceMaker._flatten_results(refs, duplicate_factor)
openrlhf.trainer.ppo_utils.experience_maker RemoteExperienceMaker.make_experience_batch(rollout_samples)
openrlhf.trainer.ppo_utils.samples_generator SamplesGenerator._process_response_into_experience(response)
openrlhf.trainer.ppo_utils.samples_generator SamplesGenerator._generate_vllm(dataloader_iter, num_prompts, \
    dynamic_filtering)
openrlhf.trainer.ppo_utils.samples_generator SamplesGenerator._dispatch_prompts_to_vllm(prompts, labels, images)
openrlhf.trainer.ppo_utils.samples_generator _collect_prompt_batch(dataloader_iter, num_prompts)
openrlhf.trainer.ppo_utils.experience tensor_field(role)
openrlhf.trainer.ray.vllm_engine RolloutRayActor.generate_responses(prompt, label, sampling_params, max_length, \
    hf_tokenizer, num_samples, images)
openrlhf.trainer.ray.vllm_engine RolloutRayActor.generate(prompt_token_ids, sampling_params, multi_modal_data)
openrlhf.trainer.ray.vllm_engine RolloutRayActor.update_weight(empty_cache)
openrlhf.trainer.ray.vllm_engine RolloutRayActor.update_weight_cuda_ipc(empty_cache)
openrlhf.trainer.ray.vllm_engine create_vllm_engines(logprobs_mode)
openrlhf.utils.agent SingleTurnAgentExecutor.execute(prompt, label, sampling_params, max_length, hf_tokenizer, \
    llm_engine, images)
openrlhf.utils.agent SingleTurnAgentExecutor._fetch_rewards_via_func(queries_list, prompts_list, labels_list)
openrlhf.utils.agent SingleTurnAgentExecutor._fetch_rewards_via_http(queries_list, prompts_list, labels_list)
ray.experimental.internal_kv _internal_kv_put(key, value, namespace)
ray.experimental.internal_kv _internal_kv_get(key, namespace)
vllm.v1.engine.async_llm AsyncLLM.abort(request_id, internal)
ray.actor _ActorClassMethodMetadata.create(modified_class, actor_creation_function_descriptor)
ray.actor _ActorClassMethodMetadata.reset_cache()
openrlhf.utils.loss_utils iter_grad_accum_global_norm(data_iter, strategy, accumulated_gradient)
openrlhf.utils.config hierarchize(args)
vllm.model_executor.layers.utils dispatch_cpu_unquantized_gemm(layer, remove_weight)
vllm.distributed.utils stateless_init_torch_distributed_process_group(host, port, rank, world_size)
deepspeed.ops.op_builder.builder probe_is_compatible()
"""

# (module, text that its source must hold, what we rely on it for)
SOURCES = [
    ("openrlhf.models.loss", "ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)", "the loss's bounds"),
    ("openrlhf.models.loss", "clamp(min=-20.0, max=20.0)", "the ratio that the search sees is the loss's"),
    ("openrlhf.trainer.ray.ppo_actor", "self.trainer = ActorPPOTrainer(", "the trainer's seam"),
    ("openrlhf.trainer.ray.ppo_actor", "dataloader = DataLoader(\n            self.replay_buffer,", "windows"),
    ("openrlhf.trainer.ray.ppo_actor", "self.actor_loss_fn(", "the loss's seam"),
    ("openrlhf.trainer.ray.ppo_actor", "empty_cache=count == num_params", "the engine's count of weight updates"),
    ("openrlhf.trainer.ray.ppo_actor", "model = self.actor.model.module\n", "the plain model that LoRA's stands for"),
    ("openrlhf.trainer.ray.ppo_actor", "deepspeed.zero.GatheredParameters([param], enabled=", "the weights to merge"),
    ("openrlhf.trainer.ray.vllm_engine", "async for request_output in generator:", "the version of every token"),
    ("openrlhf.trainer.ppo_utils.samples_generator", "action_mask = action_mask[1:truncate_length]", "versions' shape"),
    ("openrlhf.trainer.ppo_utils.samples_generator", "sampling_params = SamplingParams(", "the engine's log-probs"),
    ("openrlhf.utils.agent", "request_output = await llm_engine.generate(", "responses made piece by piece"),
    ("openrlhf.utils.agent", "sampling_params.max_tokens = max_length - len(current_obs_tokens)", "an agent's room"),
    ("openrlhf.trainer.ppo_utils.experience_maker", "self.get_advantages_and_returns(", "GAE over an agent's actions"),
    ("openrlhf.trainer.ppo_utils.length_penalty", "response_lengths = experience.response_length", "actions' lengths"),
    ("openrlhf.utils.agent", 'extra_logs=rewards_info.get("extra_logs") or {}', "why a response has no reward"),
    ("openrlhf.cli.train_ppo_ray", "if not ray.is_initialized():", "where its checks end; our ray.init arguments"),
    ("openrlhf.trainer.ppo_trainer", "if global_step % self.args.ckpt.save_steps == 0:", "an interrupt's checkpoint"),
    ("openrlhf.trainer.ppo_trainer", "self.samples_generator = SamplesGenerator(", "rollouts under a token budget"),
    ("openrlhf.trainer.ppo_trainer_async", "self.samples_generator = SamplesGenerator(", "the same in async training"),
    ("openrlhf.trainer.ppo_trainer", "make_experience_batch(rollout_samples)", "what a rollout hands over stays one"),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "(rollout_samples, client_states, filter_pass_rate, generation_time)",
        "the same in async training",
    ),
    ("vllm.v1.engine.output_processor", "finish_reason=FinishReason.ABORT", "stopped responses keep their tokens"),
    ("openrlhf.trainer.ppo_trainer", "rollout_stats = self._compute_rollout_stats(experiences)", "fresh samples"),
    ("openrlhf.trainer.ppo_trainer", "self.experience_maker = RemoteExperienceMaker(", "the experience maker's seam"),
    ("openrlhf.trainer.ppo_utils.replay_buffer", "num_steps = min(expected_num_steps, len(sample_lengths)", "replay"),
    ("openrlhf.trainer.ppo_utils.replay_buffer", "self.dynamic_optimizer_step = optimizer_steps", "dynamic windows"),
    ("openrlhf.cli.train_ppo_ray", "args = parser.parse_args()", "our flags"),
    ("openrlhf.cli.train_ppo_ray", "from openrlhf.utils.config import hierarchize", "the plan's arguments"),
    ("openrlhf.trainer.ppo_trainer_async", "self.rollout_slots.get(block=True)", "the plan's bound on staleness"),
    ("openrlhf.trainer.ppo_trainer_async", 'self.rollout_queue.put("done", block=True)', "the last evaluation"),
    ("openrlhf.trainer.ppo_trainer", "checkpoint_states = self.init_checkpoint_states()", "--eval.at_start"),
    ("openrlhf.utils.deepspeed.deepspeed", 'init_device_mesh(\n            "cuda", ', "the device mesh on CPU"),
    ("openrlhf.trainer.ppo_utils.replay_buffer", 'torch.device(f"cuda:{', "the replay buffer's device on CPU"),
    ("deepspeed.runtime.engine", "managed_gradient_accumulation", "dynamic batch"),
    ("deepspeed.runtime.engine", "self.global_steps += 1", "staleness in optimizer steps"),
    ("openrlhf.trainer.ppo_trainer", "status = self.ppo_train(global_step)", "the count of optimizer steps"),
    ("openrlhf.trainer.ppo_utils.samples_generator", "= len(experiences) / prompts_consumed * 100", "the pass rate"),
    ("openrlhf.trainer.ppo_trainer", 'sum(v for k, v in status.items() if k.startswith("timing/"))', "step timings"),
    ("openrlhf.models.actor", 'setattr(output, "entropy", entropy[:, :-1])', "the entropy of --bapo.dump_tokens"),
    ("openrlhf.trainer.ray.ppo_actor", "self.checkpoint_states = states", "the steps of --bapo.dump_tokens"),
    ("openrlhf.trainer.ppo_trainer", "run_actor = global_steps > self.args.critic.freezing_steps", "the same"),
    ("deepspeed.runtime.zero.partition_parameters", "launch_handles[-1].wait()", "the CPU's own gather of parameters"),
    ("deepspeed.runtime.config", 'TORCH_ADAM_PARAM = "torch_adam"', "AdamW without a compiler"),
    ("vllm.v1.sample.ops.topk_topp_sampler", "if not envs.VLLM_USE_FLASHINFER_SAMPLER:", "engines without flashinfer"),
    ("vllm.v1.attention.backends.fa_utils", "    from vllm.vllm_flash_attn import (", "what a bundle for GPUs keeps"),
]


def source(module: str) -> str:
    """The installed module's text."""
    return open(importlib.util.find_spec(module).origin).read()


@pytest.mark.parametrize("line", CALLABLES.splitlines())
def test_a_name_that_we_rely_on_exists_with_its_parameters(line):
    module, name, *parameters = re.findall(r"[\w.]+", line)
    scope = ast.parse(source(module))
    for part in name.split("."):
        named = [node for node in scope.body if getattr(node, "name", None) == part]
        assert named, f"{module} no longer has {name}: our seams rely on it"
        scope = named[-1]
    have = [argument.arg for argument in scope.args.posonlyargs + scope.args.args + scope.args.kwonlyargs]
    missing = [parameter for parameter in parameters if parameter not in have]
    assert not missing, f"{module}.{name} no longer takes {missing}; it takes {have}"


@pytest.mark.parametrize(("module", "text", "purpose"), SOURCES)
def test_source_that_we_rely_on_is_unchanged(module, text, purpose):
    assert text in source(module), f"{module} no longer holds {text!r}, which carries {purpose}"


def test_policy_loss_keeps_every_argument_under_its_own_name():
    loss = PolicyLoss()
    missing = [name for name in inspect.signature(PolicyLoss).parameters if not hasattr(loss, name)]
    assert not missing, f"PolicyLoss no longer keeps {missing}: BapoPolicyLoss.from_policy_loss copies them"


def test_the_log_lines_that_progress_reads_are_still_written():
    for module in ("openrlhf.trainer.ppo_trainer", "openrlhf.trainer.ppo_trainer_async"):
        assert re.search(r'f"[^"]*Global step \{global_step\}: \{log_status\}"', source(module)), module
