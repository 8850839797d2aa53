"""OpenRLHF's ActorPPOTrainer with BAPO's loss and metrics, and clip bounds per optimizer step."""

import contextlib
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from transformers import AutoConfig

from openrlhf_bapo.openrlhf.lora import merged_for_engines
from openrlhf_bapo.openrlhf.nonfinite import NonfiniteTokens, SkippedUpdates
from openrlhf_bapo.openrlhf.offpolicy_tally import OffPolicyTallies
from openrlhf_bapo.openrlhf.registration import in_place_of
from openrlhf_bapo.openrlhf.replay_checkpoint import adapter_settings, save_clip_rule
from openrlhf_bapo.openrlhf.rule_windows import RuleWindows
from openrlhf_bapo.openrlhf.settings import is_off_policy, packing_problem
from openrlhf_bapo.openrlhf.token_dump import TokenDumps
from openrlhf_bapo.openrlhf.training_pass import PassPart
from openrlhf_bapo.openrlhf.workarounds import averaged_weights, set_averaged_weights
from openrlhf_bapo.rules.clip_rules import FixedBounds
from openrlhf_bapo.rules.settings import clip_rule_from_args
from openrlhf_bapo.rules.update_windows import UpdateWindowLoader


class BapoActorTrainer(ppo_actor.ActorPPOTrainer):
    """OpenRLHF's trainer of one data-parallel rank, with the clip rule that `--policy_loss` asks for.

    What is ours is a list of parts, each of one concern, which are told of a pass's moments (training_pass.py). gspo,
    which bounds each sequence's ratio, has no rule.
    """

    actor_loss_fn: Any
    """OpenRLHF's PolicyLoss, or BapoPolicyLoss around the same settings."""

    experience: Experience
    """The micro-batch of the running training step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_step = 0
        """The running training step, as OpenRLHF counts them in its logs."""
        self.group = self.strategy.ds_device_mesh["dp"].get_group()
        low, high = self.actor_loss_fn.clip_eps_low, self.actor_loss_fn.clip_eps_high
        is_ppo = self.args.policy_loss == "ppo"
        self.rule = FixedBounds(1 - low, 1 + high) if is_ppo else clip_rule_from_args(self.args)
        self._parts: list[PassPart] = [] if self.rule is None else [RuleWindows(self, self.rule)]
        self._parts += [TokenDumps(self)] if self.args.bapo.dump_tokens else []
        self._parts += [NonfiniteTokens(self), SkippedUpdates(self)]
        self._parts += [OffPolicyTallies(self)] if is_off_policy(self.args) else []
        self.actor_loss_fn.register_forward_pre_hook(self._before_loss, with_kwargs=True)
        self.actor_loss_fn.register_forward_hook(self._after_loss, with_kwargs=True)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Make OpenRLHF's pass over the replay buffer; add the metrics `bapo/*`, `entropy/*` and `offpolicy/*`.

        `bapo/*` and `entropy/*` are means over updates. `offpolicy/optimizer_steps_taken` counts this pass's steps.
        `offpolicy/nonfinite_tokens` and `offpolicy/updates_skipped` are logged with off-policy features, else if not 0.

        Raises RuntimeError on all ranks if more updates in a row are skipped than `--bapo.max_skipped_updates` allows,
        or if no token at all is finite.
        """
        self._steps_before = self._num_steps()
        self.global_step += 1
        for part in self._parts:
            part.begin()
        status = super().ppo_train(kl_ctl)
        for part in self._parts:
            status |= part.end()
        status["optimizer_steps_taken"] = self.steps_taken()  # for the trainer, which does not log it
        return status

    def training_step(self, experience: Experience, *args: Any, **kwargs: Any) -> dict:
        """Make OpenRLHF's training step of a micro-batch, which may be the last one of its optimizer step."""
        self.experience, engine = experience, self.actor.model
        num_updates, num_skipped = engine.global_steps, engine.skipped_steps
        status = super().training_step(experience, *args, **kwargs)
        self._make_means_over_tokens(status)
        if engine.global_steps > num_updates:
            for part in self._parts:
                part.after_update(engine.skipped_steps > num_skipped)
        return status

    def _make_means_over_tokens(self, status: dict) -> None:
        """Turn the entropy, and the KL of a KL loss, into the means of the micro-batch's tokens.

        OpenRLHF weighs them by tokens when it averages them, as if they were that. They are the micro-batch's share in
        the loss: tokens would weigh twice, and with a dynamic batch the mean would be too small by the number of
        micro-batches in a step.
        """
        num_tokens = self._loss_batch_info["dp_size"] * max(status["num_action_tokens"], 1)
        for name in {"entropy_loss", *(["kl"] if self.args.algo.kl.use_loss else [])} & status["metrics"].keys():
            status["metrics"][name] = status["metrics"][name] * self._loss_batch_info["batch_num_tokens"] / num_tokens

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines. A LoRA adapter (`--ds.lora.rank`) is merged into them on the way."""
        with merged_for_engines(self) if self.args.ds.lora.rank else contextlib.nullcontext():
            super().broadcast_to_vllm()

    def steps_taken(self) -> int:
        """Return the number of the pass's optimizer steps so far, not counting skipped ones."""
        return self._num_steps() - self._steps_before

    def _num_steps(self) -> int:
        return self.actor.model.global_steps - self.actor.model.skipped_steps

    def _before_loss(self, _: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for part in self._parts:
            args, kwargs = part.before_loss(args, kwargs)
        return args, kwargs

    def _after_loss(self, _: Any, args: tuple, kwargs: dict, __: Any) -> None:
        self._loss_batch_info = kwargs
        for part in self._parts:
            part.after_loss(args, kwargs)


def use_actor_trainer(upstream: Any) -> None:
    """Put our classes into `openrlhf.trainer.ray.ppo_actor`."""
    actor = upstream.PolicyModelActor.__ray_metadata__.modified_class  # the class behind Ray's actor class

    @in_place_of(actor, "init_model_from_pretrained")
    def init_model_from_pretrained(
        init: Any, self: Any, strategy: Any, pretrain: str, *args: Any, **kwargs: Any
    ) -> None:
        # Models on the hub, which the checks before the start do not read.
        if problem := packing_problem(strategy.args, AutoConfig.from_pretrained(pretrain, trust_remote_code=True)):
            raise RuntimeError(problem)
        init(self, strategy, pretrain, *args, **kwargs)
        # The actor's first step follows the checkpoint, and the steps that train the critic alone.
        averages = self.checkpoint_states.pop("averages", None)
        if averages is not None and self.ema_model is not None:
            set_averaged_weights(self.ema_model, averages)
        saved = self.checkpoint_states.get("global_step", 0)
        self.trainer.global_step = max(saved, strategy.args.critic.freezing_steps + 1)

    @in_place_of(actor, "save_checkpoint")
    def save_checkpoint(save: Any, self: Any, tag: str, client_states: dict | None = None, **kwargs: Any) -> Any:
        rule, args = self.trainer.rule, self.strategy.args
        if rule is not None and rule.follows_updates and self.strategy.is_rank_0():
            save_clip_rule(args, tag, rule.state_dict())
        ours: dict[str, Any] = {"lora": adapter_settings(args)}
        if self.ema_model is not None:
            ours["averages"] = averaged_weights(self.ema_model)
        return save(self, tag, (client_states or {}) | ours, **kwargs)

    upstream.ActorPPOTrainer = BapoActorTrainer
    upstream.DataLoader = UpdateWindowLoader
