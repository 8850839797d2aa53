"""The metrics `offpolicy/*` of a pass: how old the tokens trained on are, and how far their ratios are from 1."""

from openrlhf_bapo.offpolicy.offpolicy_metrics import OffPolicyTally, offpolicy_metrics, tally_offpolicy
from openrlhf_bapo.openrlhf.settings import has_proximal_ratio
from openrlhf_bapo.openrlhf.training_pass import PassPart
from openrlhf_bapo.rules.clip_rules import importance_ratio


class OffPolicyTallies(PassPart):
    """Tallies every call of the loss; with any loss, gspo's too."""

    _tally: OffPolicyTally | None = None

    def after_loss(self, args: tuple, kwargs: dict) -> None:
        """Tally the micro-batch's ratios against the behavior policy."""
        trainer, loss = self.trainer, self.trainer.actor_loss_fn
        log_probs, denominators, advantages = (x.detach() for x in args)
        behavior_log_probs, lower, upper = denominators, 1 - loss.clip_eps_low, 1 + loss.clip_eps_high
        if has_proximal_ratio(trainer.args) and kwargs["rollout_log_probs"] is not None:
            behavior_log_probs = kwargs["rollout_log_probs"]
            # Where the loss's ratio exceeds a bound, the ratio against the behavior policy exceeds the shifted bound.
            shift = importance_ratio(denominators, behavior_log_probs)
            lower, upper = lower * shift, upper * shift
        tally = tally_offpolicy(
            importance_ratio(log_probs, behavior_log_probs),
            advantages,
            kwargs["action_mask"],
            trainer.experience.staleness,
            trainer.experience.optimizer_steps + trainer.steps_taken(),
            lower,
            upper,
        )
        self._tally = tally if self._tally is None else self._tally + tally

    def end(self) -> dict[str, float]:
        """Return `offpolicy_metrics` over all ranks, and the optimizer steps that the pass took."""
        tally, self._tally = self._tally, None
        if tally is None:
            return {}
        metrics = offpolicy_metrics(tally.all_reduce(self.trainer.group))
        return metrics | {"offpolicy/optimizer_steps_taken": self.trainer.steps_taken()}
