"""Changes to OpenRLHF's trainers around a training step: policy versions, logs, checkpoints of our pools."""

import hashlib
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from openrlhf_bapo.openrlhf.interrupts import end_when_interrupted
from openrlhf_bapo.openrlhf.registration import in_place_of
from openrlhf_bapo.openrlhf.replay_checkpoint import load_into_generator, load_pools, remove_pruned, save_pools
from openrlhf_bapo.openrlhf.run_counts import count_steps, note_groups


def use_off_policy_parts(trainer_module: Any) -> None:
    """Put our parts into `openrlhf.trainer.ppo_trainer` or `ppo_trainer_async`."""
    from openrlhf_bapo.openrlhf.async_evaluation import answer_with_the_last_step, evaluate_first_and_last_step
    from openrlhf_bapo.openrlhf.experience_maker import OffPolicyExperienceMaker
    from openrlhf_bapo.openrlhf.partial_rollouts import make_samples_generator
    from openrlhf_bapo.openrlhf.rollout_faults import save_when_a_rollout_fails, save_when_an_async_rollout_fails

    trainer_module.SamplesGenerator = make_samples_generator
    # Ray copies inherited methods into the class behind the actor, so changing the base class would have no effect.
    if hasattr(trainer_module, "PPOTrainer"):
        trainer_module.RemoteExperienceMaker = OffPolicyExperienceMaker
        _seed_the_order_and_plan_replayed_steps(trainer_module)
        _find_data_sources_by_place(trainer_module)
        trainer = trainer_module.PPOTrainer.__ray_metadata__.modified_class
        _count_our_timings_once(trainer)
        save_when_a_rollout_fails(trainer)
        _after(trainer, "fit", note_groups)
    else:
        trainer = trainer_module.TrainingActor.__ray_metadata__.modified_class
        generator = trainer_module.GenerateSamplesActor.__ray_metadata__.modified_class
        _resume_generator(generator)
        evaluate_first_and_last_step(generator)
        answer_with_the_last_step(trainer)
        _after(generator, "fit", note_groups)  # before the trainer learns that the rollouts have ended
        save_when_an_async_rollout_fails(trainer, generator)
    _after(trainer, "broadcast_to_vllm", lambda trainer: trainer.experience_maker.count_version())
    _resume_after_the_data(trainer)
    _resume_with_the_given_metric(trainer)
    _warn_of_a_missing_metric(trainer)
    _after(trainer, "init_checkpoint_states", _save_pools_first)
    _after(trainer, "init_checkpoint_states", _send_a_frozen_actor_no_samples)
    for name in ("save_logs_and_checkpoints", "save_best_checkpoint"):
        _after(trainer, name, lambda trainer: remove_pruned(trainer.args))
    end_when_interrupted(trainer)
    count_steps(trainer)
    _add_our_metrics(trainer)


def evaluate_at_start(ppo_trainer: ModuleType) -> None:
    """Run OpenRLHF's evaluation before the first update of a new run too (`--eval.at_start`).

    `fit` calls `init_checkpoint_states` first. The engines have the initial weights then.
    """
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class  # the class behind Ray's actor class

    @in_place_of(trainer, "init_checkpoint_states")
    def init_checkpoint_states(upstream: Any, self: Any) -> dict:
        states = upstream(self)
        if self.args.eval.at_start and states["global_step"] == 0 and self.eval_dataloader:
            sampling = {name: getattr(self.args.eval, name) for name in ("temperature", "n_samples_per_prompt")}
            self.evaluate(0, **self.generate_kwargs | sampling)
        return states


def _count_our_timings_once(trainer: type) -> None:
    @in_place_of(trainer, "train_step")
    def train_step(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> tuple[dict, int]:
        status, global_step = upstream(self, *args, **kwargs)
        # OpenRLHF's `fit` now replaces timing/step_total by the sum of all timing/*, this entry included. Our timings
        # are parts of timing/ppo_train and must not be added again, so the entry starts at minus their sum.
        parts = ("timing/bapo_ratio_forward", "timing/bapo_search")
        status["timing/step_total"] = -sum(status.get(name, 0.0) for name in parts)
        return status, global_step


def _seed_the_order_and_plan_replayed_steps(ppo_trainer: Any) -> None:
    # The async module imports `prepare_datasets` from this one, after it has been replaced.
    @in_place_of(ppo_trainer, "prepare_datasets")
    def prepare_datasets(upstream: Any, strategy: Any, tokenizer: Any) -> tuple:
        prompts, *rest, max_steps = upstream(strategy, tokenizer)
        # OpenRLHF's loader seeds its generator from the clock. A resumed run then loads the generator's saved state.
        prompts.sampler.generator.manual_seed(strategy.args.train.seed)
        _begin_other_data_at_the_start(prompts)
        # The length of the learning-rate schedule. OpenRLHF computes it from the fresh samples alone.
        return prompts, *rest, int(max_steps * (1 + strategy.args.replay.ratio))


def _find_data_sources_by_place(ppo_trainer: Any) -> None:
    """Count each evaluated sample for the data source of its row.

    OpenRLHF finds the data source by the prompt's text. If several sources have a prompt, the last one gets all its
    samples.
    """
    from openrlhf_bapo.openrlhf.samples_generator import evaluation_row

    # The async module imports this function too, after it has been replaced.
    @in_place_of(ppo_trainer, "compute_eval_metrics")
    def compute_eval_metrics(upstream: Any, eval_dataloader: Any, samples: list, n_samples_per_prompt: int) -> dict:
        sources = [source for batch, *_ in eval_dataloader for source in batch]
        rows = [(sources, [*map(str, range(len(sources)))], None, None)]
        placed = [
            SimpleNamespace(
                prompts=[str(evaluation_row(sample.place))],
                rewards=sample.rewards,
                response_length=sample.response_length,
                truncated=sample.truncated,
            )
            for sample in samples
        ]
        return upstream(rows, placed, n_samples_per_prompt)


def _begin_other_data_at_the_start(loader: Any) -> None:
    """Let a resumed run begin its prompts at the start if they do not begin with those of the checkpoint.

    OpenRLHF's loader would leave out as many of the new prompts, in a random order, as had been drawn before. To data
    that have only grown it does the same, which keeps the number of training steps.
    """
    state_dict, load_state_dict = loader.state_dict, loader.load_state_dict
    prompts = _prompts_of(loader)

    def load(state: dict) -> None:
        before = state.get("prompts", prompts)
        num, has_grown = before["num"], before != prompts
        if _prompts_of(loader, num) != before or (has_grown and state.get("_iterator_finished")):
            warn("are not those of the checkpoint, or their template, so this run begins them at the start")
            return
        if has_grown:
            now = prompts["num"]
            warn(f"were {num} at the checkpoint and are {now}, so this episode draws some twice, others never")
        load_state_dict({name: value for name, value in state.items() if name != "prompts"})

    def warn(effect: str) -> None:
        print(f"openrlhf-bapo: warning: --data.prompt_dataset: the prompts {effect}", flush=True)

    loader.state_dict = lambda: state_dict() | {"prompts": prompts}
    loader.load_state_dict = load


def _prompts_of(loader: Any, num: int | None = None) -> dict[str, Any]:
    """Return the number of prompts, of the first `num` ones, and a digest of them."""
    rows = [*zip(loader.dataset.prompts, loader.dataset.labels, strict=True)][:num]
    return {"num": len(rows), "digest": hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:16]}


def _has_ended(owner: Any, state: dict, has_waiting: bool) -> bool:
    """Return whether a resumed run has ended its episode, by the state of its data loader.

    OpenRLHF would run the episode again, because its data loader starts anew after the end of its data.
    """
    if state.get("prompts") not in (None, _prompts_of(owner.prompts_dataloader)):
        owner.samples_generator.begin_other_prompts()
        return False
    return bool(state.get("_iterator_finished")) and not has_waiting


def _resume_after_the_data(trainer: type) -> None:
    @in_place_of(trainer, "init_checkpoint_states")
    def init_checkpoint_states(upstream: Any, self: Any) -> dict:
        states = upstream(self)
        has_waiting = load_pools(self)
        if hasattr(self, "samples_generator"):  # not in async training, see `_resume_generator`
            self.samples_generator.num_prompts = states["total_consumed_prompts"]
            states["episode"] += _has_ended(self, states["data_loader_state_dict"], has_waiting)
        if self.args.algo.kl.target:  # else the coefficient is that of the flag
            self.kl_ctl.value = states.get("kl_coef", self.kl_ctl.value)
        return states


def _resume_with_the_given_metric(trainer: type) -> None:
    """Let a resumed run choose its best checkpoint by its own `--ckpt.best_metric_key`.

    OpenRLHF goes on with the metric of the run that wrote the checkpoint, and with its best value.
    """

    @in_place_of(trainer, "restore_best_checkpoint_state")
    def restore_best_checkpoint_state(upstream: Any, self: Any, states: dict) -> None:
        given, saved = self.args.ckpt.best_metric_key, states.get("best_eval_metric_key")
        if saved != "none" and given in ("", saved):
            upstream(self, states)


def _warn_of_a_missing_metric(trainer: type) -> None:
    """Warn if an evaluation lacks `--ckpt.best_metric_key`: OpenRLHF then writes no best checkpoint, without a word."""

    @in_place_of(trainer, "save_best_checkpoint")
    def save_best_checkpoint(upstream: Any, self: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        if (key := self.args.ckpt.best_metric_key) not in {"", "none", *metrics}:
            print(
                f"openrlhf-bapo: warning: --ckpt.best_metric_key {key}: the evaluation has no such metric, so no best "
                f"checkpoint is written; it has {', '.join(metrics)}",
                flush=True,
            )
        upstream(self, metrics, *args, **kwargs)


def _resume_generator(generator: type) -> None:
    @in_place_of(generator, "load_state_dict")
    def load_state_dict(upstream: Any, self: Any, state: dict) -> None:
        upstream(self, state)
        self.num_ended = _has_ended(self, state, any(load_into_generator(self)))

    @in_place_of(generator, "fit")
    def fit(upstream: Any, self: Any, episode: int, total_consumed_prompts: int) -> None:
        self.samples_generator.num_prompts = total_consumed_prompts
        upstream(self, episode + getattr(self, "num_ended", 0), total_consumed_prompts)


def _after(trainer: type, name: str, action: Callable) -> None:
    """Call `action(trainer)` after each call of a method of the trainer."""

    @in_place_of(trainer, name)
    def method(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = upstream(self, *args, **kwargs)
        action(self)
        return result


def _save_pools_first(trainer: Any) -> None:
    """Write our pools before each of OpenRLHF's checkpoints."""

    @in_place_of(trainer.actor_model_group, "async_run_method")
    def async_run_method(upstream: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name == "save_checkpoint":
            save_pools(trainer, kwargs["tag"])
            kwargs["client_states"] = kwargs["client_states"] | {"kl_coef": trainer.kl_ctl.value}
        return upstream(method_name, *args, **kwargs)


def _send_a_frozen_actor_no_samples(trainer: Any) -> None:
    """Leave the actor's buffer empty while the critic trains alone (`--critic.freezing_steps`).

    OpenRLHF empties it only after the actor has trained. So the actor's first step would train on the samples of all
    steps before it, with the advantages of a critic that had not learned yet.
    """

    @in_place_of(trainer.actor_model_group, "async_run_method_batch")
    def async_run_method_batch(upstream: Any, method_name: str, **batches: Any) -> list:
        global_step = trainer.counted["before"] + trainer.counted["made"]
        if method_name != "append" or global_step > trainer.args.critic.freezing_steps:
            return upstream(method_name, **batches)
        maker = trainer.experience_maker
        if maker.pool is not None:  # its groups have these advantages too; one version later all are expired
            maker.pool.sample(0, maker.policy_version + trainer.args.replay.max_staleness + 1)
        return []


def _add_our_metrics(trainer: type) -> None:
    @in_place_of(trainer, "_compute_rollout_stats")
    def compute_rollout_stats(upstream: Any, self: Any, experiences: list) -> dict[str, float]:
        maker = self.experience_maker
        # `experiences` have the replayed samples too, which are not part of the rollout.
        return upstream(self, maker.fresh) | lengths_by_sign(maker.fresh) | maker.metrics()


def lengths_by_sign(experiences: list) -> dict[str, float]:
    """Return the mean response length (tokens) by the sign of the sample's advantage (section 3, Figure 6).

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
