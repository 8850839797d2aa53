"""verl's command with our checks: `python -m openrlhf_bapo.verl_main` has the settings of `verl.trainer.main_ppo`.

A policy loss whose settings are not allowed, and a checkpoint of another rule, end it in one line before Ray starts. In
GRPO, a group of equal rewards has advantages of exactly 0. In verl, eight rewards of 0.7 have 0.056 each, because the
rounding of their mean is divided by 1e-6.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from openrlhf_bapo.flags.mistakes import exit_with_one_line
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError, has_saved_state
from openrlhf_bapo.rules.clip_rules import ClipRule
from openrlhf_bapo.rules.own_rules import absolute
from openrlhf_bapo.rules.saved_rule import load_rule
from openrlhf_bapo.verl import VENDOR, BapoPolicyLossConfig

GRPO = ("grpo", "grpo_vectorized")
"""verl's estimators that divide by a group's deviation."""


def with_exact_zeros(estimator: Callable) -> Callable:
    """Return an estimator of verl that takes the rewards of a group of equal rewards for 0, as their deviations are."""

    @functools.wraps(estimator)
    def compute(*, token_level_rewards: torch.Tensor, index: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rewards, groups = token_level_rewards.clone(), defaultdict(list)
        for row, group in enumerate(index):
            groups[group].append(row)
        scores = rewards.sum(-1)
        for rows in groups.values():
            # verl leaves the reward of a group of one as it is.
            if len(rows) > 1 and bool((scores[rows] == scores[rows[0]]).all()):
                rewards[rows] = 0.0
        return estimator(token_level_rewards=rewards, index=index, **kwargs)

    return compute


class _TaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
    def __init__(self) -> None:
        super().__init__()
        for name in GRPO:
            ADV_ESTIMATOR_REGISTRY[name] = with_exact_zeros(ADV_ESTIMATOR_REGISTRY[name])
        # verl's trainer calls this one by its name in the module, and looks up only the others.
        core_algos.compute_grpo_outcome_advantage = ADV_ESTIMATOR_REGISTRY["grpo"]


TaskRunner = ray.remote(_TaskRunner)
"""verl's trainer, in whose process the advantages are computed."""


def _check(config: DictConfig) -> None:
    """Make the policy loss as each worker will, and load the rule's state that it resumes.

    Workers may run in another folder, so the file of a rule gets an absolute path.

    Raises:
        ValueError: for a setting that is not allowed.
        TypeError: for an unknown setting.
        SavedStateError: for a state that is damaged, or of a rule with other settings.
    """
    if not config.trainer.use_v1:
        raise ValueError("trainer.use_v1 False: only True is allowed; groups of equal rewards would have advantages")
    settings = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    assert isinstance(settings, dict)
    target = f"{BapoPolicyLossConfig.__module__}.{BapoPolicyLossConfig.__name__}"
    if settings.pop("_target_", "") != target:
        if settings.get("loss_mode") == "bapo":
            raise ValueError(f"policy_loss.loss_mode bapo: allowed only with policy_loss._target_ {target}")
        return
    loss = BapoPolicyLossConfig(**settings)
    rule = loss.update.rule
    correction = config.algorithm.get("rollout_correction") or {}
    if loss.tapered:
        _check_weights(correction)
    _check_others(config, rule, correction)
    if loss.tapered or correction.get("bypass_mode"):
        user = "policy_loss.tapered" if loss.tapered else "algorithm.rollout_correction.bypass_mode"
        rollout, processed = config.actor_rollout_ref.rollout, "processed_logprobs"
        # The engine's log-probs are those among the tokens kept. vLLM takes 0.01 for less, and the actor does not.
        for name, is_allowed, allowed in (
            ("top_p", rollout.top_p == 1, "1"),
            ("top_k", rollout.top_k in (-1, 0), "-1"),
            ("temperature", rollout.temperature is not None and 0.01 <= rollout.temperature <= 2, "from 0.01 to 2"),
            ("calculate_log_probs", rollout.calculate_log_probs, "True"),
            ("logprobs_mode", rollout.temperature == 1 or rollout.logprobs_mode == processed, processed),
        ):
            if not is_allowed:
                raise ValueError(
                    f"actor_rollout_ref.rollout.{name} {rollout[name]}: with {user} only {allowed} is allowed"
                )
    if settings.get("rule"):
        config.actor_rollout_ref.actor.policy_loss.rule = absolute(settings["rule"])
    # verl's ranks have the same state. Its trainer finds the checkpoint like this.
    folder = None
    if config.trainer.resume_mode == "auto":
        folder = find_latest_ckpt_path(os.path.abspath(config.trainer.default_local_dir))
    elif config.trainer.resume_mode == "resume_path":
        folder = config.trainer.resume_from_path
    if folder is not None and has_saved_state(saved := Path(folder, "actor", "clip_rule_rank_0")):
        load_rule(rule, saved)


def _check_others(config: DictConfig, rule: ClipRule, correction: Mapping) -> None:
    """Refuse settings of verl that the rule's loss would not use, or with which it would not be used."""
    if (vendor := os.environ["VERL_ENGINE_VENDOR"]) != VENDOR:
        raise ValueError(f"VERL_ENGINE_VENDOR {vendor}: with BAPO only {VENDOR} is allowed")
    actor, name, dual_clip = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.", rule.config.dual_clip
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"{name}strategy {actor.strategy}: with BAPO only fsdp and fsdp2 are allowed")
    for bound in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        if (given := actor[bound]) not in (0.2, None):
            raise ValueError(f"{name}{bound} {given}: with BAPO only verl's default 0.2 is allowed, which is not used")
    if type(given := actor.clip_ratio_c) not in (int, float) or not given > 1:
        raise ValueError(f"{name}clip_ratio_c {given}: only a number above 1 is allowed")
    if dual_clip is not None and given not in (3.0, dual_clip):
        raise ValueError(f"{name}clip_ratio_c {given}: allowed as policy_loss.search.dual_clip, here {dual_clip}")
    if correction.get("bypass_mode"):
        for option, allowed in (("rollout_is", None), ("rollout_rs", None), ("loss_type", "ppo_clip")):
            if (given := correction.get(option, allowed)) != allowed:
                raise ValueError(
                    f"algorithm.rollout_correction.{option} {given}: with BAPO in bypass_mode only {allowed} is allowed"
                )
    if config.distillation.enabled and not config.distillation.distillation_loss.use_task_rewards:
        raise ValueError(
            "distillation.distillation_loss.use_task_rewards False: with BAPO only True is allowed; "
            "verl would not use the policy loss"
        )


def _check_weights(correction: Mapping) -> None:
    """Refuse settings of verl's rollout correction without weights s, or from which the loss cannot take min(s, 1)."""
    name = "algorithm.rollout_correction."
    if (level := correction.get("rollout_is")) not in ("token", "sequence"):
        raise ValueError(f"{name}rollout_is {level}: with policy_loss.tapered only token and sequence are allowed")
    for wrong in ("bypass_mode", "rollout_is_batch_normalize"):
        if correction.get(wrong):
            raise ValueError(f"{name}{wrong} True: with policy_loss.tapered only False is allowed")
    threshold = correction.get("rollout_is_threshold", 2.0)
    try:
        is_allowed = float(threshold) >= 1
    except (ValueError, TypeError):  # "LOW_HIGH", which drops tokens, or null
        is_allowed = False
    if not is_allowed:
        raise ValueError(
            f"{name}rollout_is_threshold {threshold}: with policy_loss.tapered only a number of at least 1 is allowed"
        )


def main() -> None:
    """Check, and run `verl.trainer.main_ppo`."""
    validate, run = main_ppo.validate_config, main_ppo.run_ppo

    def validate_config(config: DictConfig, **kwargs: Any) -> None:
        try:
            _check(config)
        except (ValueError, TypeError, SavedStateError) as error:
            exit_with_one_line(str(error))
        validate(config=config, **kwargs)

    def run_ppo(config: DictConfig, task_runner_class: Any) -> None:
        run(config, TaskRunner if task_runner_class is main_ppo.TaskRunnerV1 else task_runner_class)

    main_ppo.validate_config, main_ppo.run_ppo = validate_config, run_ppo
    main_ppo.main()


if __name__ == "__main__":
    from openrlhf_bapo import verl_main  # Ray's workers find its classes by name, but not those of __main__

    verl_main.main()
