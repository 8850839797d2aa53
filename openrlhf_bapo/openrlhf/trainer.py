"""What OpenRLHF's trainers do around a training step: policy versions, logs, our pools' checkpoints."""

import functools
from types import ModuleType

import torch

from openrlhf_bapo.openrlhf.interrupts import end_when_interrupted
from openrlhf_bapo.openrlhf.replay_checkpoint import load_into_generator, load_pools, remove_pruned, save_pools


def use_off_policy_parts(trainer_module: ModuleType) -> None:
    """Put our parts into `openrlhf.trainer.ppo_trainer` or `ppo_trainer_async`."""
    from openrlhf_bapo.openrlhf.experience_maker import OffPolicyExperienceMaker
    from openrlhf_bapo.openrlhf.partial_rollouts import make_samples_generator
    from openrlhf_bapo.openrlhf.rollout_faults import save_when_a_rollout_fails, save_when_an_async_rollout_fails

    trainer_module.SamplesGenerator = make_samples_generator
    name = "TrainingActor"
    if hasattr(trainer_module, "PPOTrainer"):
        name = "PPOTrainer"
        trainer_module.RemoteExperienceMaker = OffPolicyExperienceMaker
        # The async module imports it from here, when this has already been done.
        trainer_module.prepare_datasets = _with_replayed_steps_in_the_seeds_order(trainer_module.prepare_datasets)
        of_sync = trainer_module.PPOTrainer.__ray_metadata__.modified_class
        of_sync.init_checkpoint_states = _counting_on_from_checkpoint(of_sync.init_checkpoint_states)
        of_sync.train_step = _with_our_timings_left_out_of_the_sum(of_sync.train_step)
        save_when_a_rollout_fails(of_sync)
    else:
        generator = trainer_module.GenerateSamplesActor.__ray_metadata__.modified_class
        _after(generator, "load_state_dict", load_into_generator)
        generator.fit = _counting_on_from_checkpoint_async(generator.fit)
        save_when_an_async_rollout_fails(trainer_module.TrainingActor.__ray_metadata__.modified_class, generator)
    # Ray copies inherited methods into the class behind an actor, so the base class is not the place.
    trainer = getattr(trainer_module, name).__ray_metadata__.modified_class
    trainer.ppo_train = _counting_optimizer_steps(trainer.ppo_train)
    _after(trainer, "broadcast_to_vllm", lambda trainer: trainer.experience_maker.count_version())
    _after(trainer, "init_checkpoint_states", load_pools)
    _after(trainer, "init_checkpoint_states", _save_pools_first)
    for name in ("save_logs_and_checkpoints", "save_best_checkpoint"):
        _after(trainer, name, lambda trainer: remove_pruned(trainer.args))
    end_when_interrupted(trainer)
    trainer._compute_rollout_stats = _of_fresh_samples(trainer._compute_rollout_stats)


def evaluate_at_start(ppo_trainer: ModuleType) -> None:
    """`--eval.at_start`: OpenRLHF's evaluation once more, before the first update of a new run.

    `fit` calls `init_checkpoint_states` first, when the engines still hold the weights that they were started with.
    """
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class  # the class behind Ray's actor class
    upstream = trainer.init_checkpoint_states

    @functools.wraps(upstream)
    def init_checkpoint_states(self) -> dict:
        states = upstream(self)
        if self.args.eval.at_start and states["global_step"] == 0 and self.eval_dataloader:
            sampling = {name: getattr(self.args.eval, name) for name in ("temperature", "n_samples_per_prompt")}
            self.evaluate(0, **self.generate_kwargs | sampling)
        return states

    trainer.init_checkpoint_states = init_checkpoint_states


class _Status(dict):
    """A training step's metrics, for whose seconds OpenRLHF's sync trainer takes the sum of all `timing/*`.

    Ours are parts of `timing/ppo_train`, which it has already counted.
    """

    def __setitem__(self, name: str, value) -> None:
        if name == "timing/step_total":
            value -= self.get("timing/bapo_ratio_forward", 0.0) + self.get("timing/bapo_search", 0.0)
        super().__setitem__(name, value)


def _with_our_timings_left_out_of_the_sum(train_step):
    @functools.wraps(train_step)
    def step(self, *args, **kwargs) -> tuple[dict, int]:
        status, global_step = train_step(self, *args, **kwargs)
        return _Status(status), global_step

    return step


def _with_replayed_steps_in_the_seeds_order(prepare_datasets):
    @functools.wraps(prepare_datasets)
    def prepare(strategy, tokenizer):
        prompts, *rest, max_steps = prepare_datasets(strategy, tokenizer)
        # OpenRLHF gives the loader no generator, so that it makes one with a seed from the clock. A resumed run gets
        # the state of its checkpoint's in place of this.
        prompts.sampler.generator.manual_seed(strategy.args.train.seed)
        # The learning-rate schedule's length, which OpenRLHF reckons from the fresh samples.
        return prompts, *rest, int(max_steps * (1 + strategy.args.replay.ratio))

    return prepare


def _counting_on_from_checkpoint(init_checkpoint_states):
    @functools.wraps(init_checkpoint_states)
    def counting_on(self) -> dict:
        states = init_checkpoint_states(self)
        self.samples_generator.num_prompts = states["total_consumed_prompts"]
        return states

    return counting_on


def _counting_on_from_checkpoint_async(fit):
    @functools.wraps(fit)
    def counting_on(self, episode: int, total_consumed_prompts: int) -> None:
        self.samples_generator.num_prompts = total_consumed_prompts
        fit(self, episode, total_consumed_prompts)

    return counting_on


def _after(trainer: type, name: str, action) -> None:
    """Let `action(trainer)` follow a method of the trainer."""
    upstream = getattr(trainer, name)

    @functools.wraps(upstream)
    def method(self, *args, **kwargs):
        result = upstream(self, *args, **kwargs)
        action(self)
        return result

    setattr(trainer, name, method)


def _save_pools_first(trainer) -> None:
    """Let our pools be written before each of OpenRLHF's checkpoints."""
    actors = trainer.actor_model_group
    upstream = actors.async_run_method

    def async_run_method(method_name: str, *args, **kwargs):
        if method_name == "save_checkpoint":
            save_pools(trainer, kwargs["tag"])
        return upstream(method_name, *args, **kwargs)

    actors.async_run_method = async_run_method


def _counting_optimizer_steps(ppo_train):
    @functools.wraps(ppo_train)
    def counting(self, *args, **kwargs) -> dict:
        status = ppo_train(self, *args, **kwargs)
        # None while --critic.freezing_steps lets the critic train alone.
        self.experience_maker.num_optimizer_steps += status.get("offpolicy/optimizer_steps_taken", 0)
        return status

    return counting


def _of_fresh_samples(compute_rollout_stats):
    @functools.wraps(compute_rollout_stats)
    def of_fresh_samples(self, experiences) -> dict[str, float]:
        maker = self.experience_maker
        return compute_rollout_stats(self, maker.fresh) | lengths_by_sign(maker.fresh) | maker.metrics()

    return of_fresh_samples


def lengths_by_sign(experiences) -> dict[str, float]:
    """Mean response length, in tokens, of the samples with positive and with negative advantage (the paper's Figure 6).

    Where a sample's tokens differ in their advantage (GAE) their mean decides; a sign that no sample has is left out.
    """
    advantage = torch.cat([(e.advantages * e.action_mask).sum(-1) for e in experiences])
    length = torch.cat([e.response_length for e in experiences]).float()
    of_sign = {"positive": length[advantage > 0], "negative": length[advantage < 0]}
    return {
        f"rollout/response_length_{sign}_mean": lengths.mean().item()
        for sign, lengths in of_sign.items()
        if len(lengths)
    }
