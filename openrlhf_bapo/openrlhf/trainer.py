"""Changes to OpenRLHF's trainers around a training step: policy versions, logs, checkpoints of our pools."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from openrlhf_bapo.openrlhf.interrupts import end_when_interrupted
from openrlhf_bapo.openrlhf.replay_checkpoint import load_into_generator, load_pools, remove_pruned, save_pools
from openrlhf_bapo.openrlhf.run_counts import count_steps, note_groups


def use_off_policy_parts(trainer_module: Any) -> None:
    """Put our parts into `openrlhf.trainer.ppo_trainer` or `ppo_trainer_async`."""
    from openrlhf_bapo.openrlhf.experience_maker import OffPolicyExperienceMaker
    from openrlhf_bapo.openrlhf.partial_rollouts import make_samples_generator
    from openrlhf_bapo.openrlhf.rollout_faults import save_when_a_rollout_fails, save_when_an_async_rollout_fails

    trainer_module.SamplesGenerator = make_samples_generator
    name = "TrainingActor"
    if hasattr(trainer_module, "PPOTrainer"):
        name = "PPOTrainer"
        trainer_module.RemoteExperienceMaker = OffPolicyExperienceMaker
        # The async module imports this function from here, after it has been replaced.
        trainer_module.prepare_datasets = _with_seeded_order_and_replayed_steps(trainer_module.prepare_datasets)
        sync_trainer = trainer_module.PPOTrainer.__ray_metadata__.modified_class
        sync_trainer.init_checkpoint_states = _restoring_num_prompts(sync_trainer.init_checkpoint_states)
        sync_trainer.train_step = _counting_our_timings_once(sync_trainer.train_step)
        save_when_a_rollout_fails(sync_trainer)
        _after(sync_trainer, "fit", note_groups)
    else:
        generator = trainer_module.GenerateSamplesActor.__ray_metadata__.modified_class
        _after(generator, "load_state_dict", load_into_generator)
        generator.fit = _restoring_num_prompts_async(generator.fit)
        _after(generator, "fit", note_groups)  # before the trainer learns that the rollouts have ended
        save_when_an_async_rollout_fails(trainer_module.TrainingActor.__ray_metadata__.modified_class, generator)
    # Ray copies inherited methods into the class behind the actor, so changing the base class would have no effect.
    trainer = getattr(trainer_module, name).__ray_metadata__.modified_class
    _after(trainer, "broadcast_to_vllm", lambda trainer: trainer.experience_maker.count_version())
    trainer.init_checkpoint_states = _resuming_after_the_data(trainer.init_checkpoint_states)
    _after(trainer, "init_checkpoint_states", _save_pools_first)
    _after(trainer, "init_checkpoint_states", _send_a_frozen_actor_no_samples)
    for name in ("save_logs_and_checkpoints", "save_best_checkpoint"):
        _after(trainer, name, lambda trainer: remove_pruned(trainer.args))
    end_when_interrupted(trainer)
    count_steps(trainer)
    trainer._compute_rollout_stats = _with_our_metrics(trainer._compute_rollout_stats)


def evaluate_at_start(ppo_trainer: ModuleType) -> None:
    """Run OpenRLHF's evaluation before the first update of a new run too (`--eval.at_start`).

    `fit` calls `init_checkpoint_states` first. The engines have the initial weights then.
    """
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class  # the class behind Ray's actor class
    upstream = trainer.init_checkpoint_states

    @functools.wraps(upstream)
    def init_checkpoint_states(self: Any) -> dict:
        states = upstream(self)
        if self.args.eval.at_start and states["global_step"] == 0 and self.eval_dataloader:
            sampling = {name: getattr(self.args.eval, name) for name in ("temperature", "n_samples_per_prompt")}
            self.evaluate(0, **self.generate_kwargs | sampling)
        return states

    trainer.init_checkpoint_states = init_checkpoint_states


def _counting_our_timings_once(train_step: Callable) -> Callable:
    @functools.wraps(train_step)
    def counting_once(self: Any, *args: Any, **kwargs: Any) -> tuple[dict, int]:
        status, global_step = train_step(self, *args, **kwargs)
        # OpenRLHF's `fit` now replaces timing/step_total by the sum of all timing/*, this entry included. Our timings
        # are parts of timing/ppo_train and must not be added again, so the entry starts at minus their sum.
        parts = ("timing/bapo_ratio_forward", "timing/bapo_search")
        status["timing/step_total"] = -sum(status.get(name, 0.0) for name in parts)
        return status, global_step

    return counting_once


def _with_seeded_order_and_replayed_steps(prepare_datasets: Callable) -> Callable:
    @functools.wraps(prepare_datasets)
    def prepare(strategy: Any, tokenizer: Any) -> tuple:
        prompts, *rest, max_steps = prepare_datasets(strategy, tokenizer)
        # OpenRLHF's loader seeds its generator from the clock. A resumed run then loads the generator's saved state.
        prompts.sampler.generator.manual_seed(strategy.args.train.seed)
        # The length of the learning-rate schedule. OpenRLHF computes it from the fresh samples alone.
        return prompts, *rest, int(max_steps * (1 + strategy.args.replay.ratio))

    return prepare


def _resuming_after_the_data(init_checkpoint_states: Callable) -> Callable:
    @functools.wraps(init_checkpoint_states)
    def resuming(self: Any) -> dict:
        states = init_checkpoint_states(self)
        has_waiting = load_pools(self)
        # OpenRLHF would run the episode again, because its data loader starts anew after the end of its data.
        if states["data_loader_state_dict"].get("_iterator_finished") and not has_waiting:
            states["episode"] += 1
        return states

    return resuming


def _restoring_num_prompts(init_checkpoint_states: Callable) -> Callable:
    @functools.wraps(init_checkpoint_states)
    def restoring(self: Any) -> dict:
        states = init_checkpoint_states(self)
        self.samples_generator.num_prompts = states["total_consumed_prompts"]
        return states

    return restoring


def _restoring_num_prompts_async(fit: Callable) -> Callable:
    @functools.wraps(fit)
    def restoring(self: Any, episode: int, total_consumed_prompts: int) -> None:
        self.samples_generator.num_prompts = total_consumed_prompts
        fit(self, episode, total_consumed_prompts)

    return restoring


def _after(trainer: type, name: str, action: Callable) -> None:
    """Call `action(trainer)` after each call of a method of the trainer."""
    upstream = getattr(trainer, name)

    @functools.wraps(upstream)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = upstream(self, *args, **kwargs)
        action(self)
        return result

    setattr(trainer, name, method)


def _save_pools_first(trainer: Any) -> None:
    """Write our pools before each of OpenRLHF's checkpoints."""
    actors = trainer.actor_model_group
    upstream = actors.async_run_method

    def async_run_method(method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name == "save_checkpoint":
            save_pools(trainer, kwargs["tag"])
        return upstream(method_name, *args, **kwargs)

    actors.async_run_method = async_run_method


def _send_a_frozen_actor_no_samples(trainer: Any) -> None:
    """Leave the actor's buffer empty while the critic trains alone (`--critic.freezing_steps`).

    OpenRLHF empties it only after the actor has trained. So the actor's first step would train on the samples of all
    steps before it, with the advantages of a critic that had not learned yet.
    """
    actors = trainer.actor_model_group
    upstream = actors.async_run_method_batch

    def async_run_method_batch(method_name: str, **batches: Any) -> list:
        global_step = trainer.counted["before"] + trainer.counted["made"]
        is_frozen = global_step <= trainer.args.critic.freezing_steps
        return [] if method_name == "append" and is_frozen else upstream(method_name, **batches)

    actors.async_run_method_batch = async_run_method_batch


def _with_our_metrics(compute_rollout_stats: Callable) -> Callable:
    @functools.wraps(compute_rollout_stats)
    def with_our_metrics(self: Any, experiences: list) -> dict[str, float]:
        maker = self.experience_maker
        # `experiences` have the replayed samples too, which are not part of the rollout.
        return compute_rollout_stats(self, maker.fresh) | lengths_by_sign(maker.fresh) | maker.metrics()

    return with_our_metrics


def lengths_by_sign(experiences: list) -> dict[str, float]:
    """Return the mean response length (tokens) by the sign of the sample's advantage (the paper's Figure 6).

    If the advantages of a sample's tokens differ (GAE), their mean is taken. A sign without samples has no entry.
    """
    advantage = torch.cat([(e.advantages * e.action_mask).sum(-1) for e in experiences])
    length = torch.cat([e.response_length for e in experiences]).float()
    lengths_of = {"positive": length[advantage > 0], "negative": length[advantage < 0]}
    return {
        f"rollout/response_length_{sign}_mean": lengths.mean().item()
        for sign, lengths in lengths_of.items()
        if len(lengths)
    }
