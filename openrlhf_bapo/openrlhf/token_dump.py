"""`--bapo.dump_tokens`: a sample of the tokens that a training step trained on, as a Parquet file of limited size.

Rank 0 writes one file per training step, from its own micro-batches. These are a fair sample, because every rank gets
an equal share of the fresh and of the replayed samples. A row is a token:

    global_step, update    the training step, and the number of its optimizer steps before this one
    sample, position       number of the sample in the order of rank 0's training, and position in the response
    ratio                  the importance ratio that the loss clips: against the behavior policy, or under the decoupled
                           objective against the policy that the training step starts from
    probability, entropy   probability of the token under the trained policy, and entropy of its distribution (nats)
    advantage
    clip_low, clip_high    the clip bounds of the update, or of the token; 0 and inf: none
    clipped                whether the ratio is above clip_high (advantage > 0) or below clip_low (advantage < 0)
    dual_clipped           whether the advantage is negative and the ratio above --actor.dual_clip
    weight                 the factor of the token's loss beside the clip, by --offpolicy.weight or IS correction; 1
                           without them
    start_over_behavior    s, from which that weight follows: the ratio's denominator over the policy that generated
                           the token. Only where the loss reads both, as under the decoupled objective
    rule_weight            w of a rule that gives weights, such as topr: the loss is -w A log pi, and has no ratio. Only
                           with such a rule
    staleness              versions since the token was generated
    optimizer_steps        optimizer steps since the token was generated

A folder may have the files of several runs. A file's metadata say when its process began, and from which training step
on: "began" in seconds since 1970, and "first_step".
"""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from openrlhf_bapo.openrlhf.settings import reads_engine_log_probs
from openrlhf_bapo.openrlhf.training_pass import PassPart
from openrlhf_bapo.rules.clip_rules import importance_ratio

MAX_TOKENS = 16_384
"""The maximum number of tokens in a file, which has about half a megabyte then."""


class TokenSample:
    """A uniform sample, without replacement, of all tokens added so far. Only the sample is kept in memory.

    Every token draws a random number. The tokens with the `size` smallest numbers are kept, in the order in which they
    were added. The result does not depend on how the tokens are split over calls.

    Args:
        size: the maximum number of tokens to keep.
        seed: seed of the random numbers.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.columns: dict[str, torch.Tensor] = {}
        """The kept tokens: columns [num_tokens] by name."""
        self._size = size
        self._draws = torch.empty(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, columns: dict[str, torch.Tensor]) -> None:
        """Add tokens: columns [num_tokens] on the CPU by name, with the same names in every call."""
        num_tokens = len(next(iter(columns.values())))
        draws = torch.rand(num_tokens, generator=self._generator, dtype=torch.float64)
        self._draws = torch.cat([self._draws, draws])
        if self.columns:
            columns = {name: torch.cat([self.columns[name], column]) for name, column in columns.items()}
        if len(self._draws) > self._size:
            kept = self._draws.topk(self._size, largest=False).indices.sort().values
            self._draws = self._draws[kept]
            columns = {name: column[kept] for name, column in columns.items()}
        self.columns = columns


class TokenDumps(PassPart):
    """Samples the tokens of every N-th training step, on rank 0.

    Log-probs, bounds and entropy are those of the training forward. Only ratio and weight are computed again.

    Args:
        trainer: a trainer with an off-policy feature and logged entropy.
    """

    _sample: TokenSample | None = None  # of the running pass, if its tokens are dumped
    _process: dict[str, str] | None = None  # the metadata of this process's files

    def begin(self) -> None:
        """Begin a sample, if this training step has one."""
        trainer = self.trainer
        self._process = self._process or {"began": str(time.time()), "first_step": str(trainer.global_step)}
        if trainer.global_step % trainer.args.bapo.dump_tokens == 0 and trainer.strategy.is_rank_0():
            self._sample = TokenSample(MAX_TOKENS, trainer.args.train.seed + trainer.global_step)
            self._num_samples = 0
            self._hook = trainer.actor.register_forward_hook(self._note_entropy)

    def _note_entropy(self, _: object, __: object, outputs: Any) -> None:
        if isinstance(outputs, tuple):  # not in the forward for the search, which returns log-probs alone
            self._entropy = outputs[1].entropy.detach()

    def after_loss(self, args: tuple, kwargs: dict) -> None:
        """Add the micro-batch's tokens to the sample."""
        if self._sample is None:
            return
        loss_fn, experience, update = self.trainer.actor_loss_fn, self.trainer.experience, self.trainer.steps_taken()
        log_probs, behavior_log_probs, advantages = (x.detach() for x in args)
        active = kwargs["action_mask"] > 0
        sample = torch.arange(len(active), device=active.device)[:, None] + self._num_samples
        self._num_samples += len(active)
        tokens = {
            "sample": sample.expand_as(active).int(),
            "position": (active.cumsum(-1) - 1).int(),
            "staleness": experience.staleness.int(),
            "optimizer_steps": (experience.optimizer_steps + update).int(),
            "ratio": importance_ratio(log_probs, behavior_log_probs),
            "probability": log_probs.exp(),
            "entropy": self._entropy[:, -active.shape[1] :],
            "advantage": advantages,
            "weight": torch.ones_like(log_probs),
        }
        engines = kwargs["rollout_log_probs"]
        if engines is not None and reads_engine_log_probs(self.trainer.args):
            tokens["start_over_behavior"] = importance_ratio(behavior_log_probs, engines)
        if loss_fn.rule.has_weights:
            tokens["rule_weight"] = loss_fn.rule_weights
        if loss_fn.weighs_staleness:
            mask = kwargs["action_mask"]
            tokens["weight"] = loss_fn.staleness_weights(behavior_log_probs, engines, advantages, mask)
        tokens = {name: values[active] for name, values in tokens.items()}
        # Flattened, so that 0-dim bounds are compared in the ratio's precision, as in the loss, and not in their own.
        ratio, advantage = tokens["ratio"], tokens["advantage"]
        lower, upper = map(torch.as_tensor, (1 - loss_fn.clip_eps_low, 1 + loss_fn.clip_eps_high))
        lower, upper = (bound[active] if bound.dim() else bound for bound in (lower, upper))
        tokens["clipped"] = torch.where(advantage > 0, ratio > upper, (advantage < 0) & (ratio < lower))
        tokens["dual_clipped"] = (advantage < 0) & (ratio > (loss_fn.dual_clip or torch.inf))
        constants = {"global_step": self.trainer.global_step, "update": update}
        columns = {name: torch.full(ratio.shape, value, dtype=torch.int32) for name, value in constants.items()}
        columns |= {name: values.cpu() for name, values in tokens.items()}
        bounds = {"clip_low": lower, "clip_high": upper}
        columns |= {name: bound.double().cpu().expand(ratio.shape).contiguous() for name, bound in bounds.items()}
        self._sample.add(columns)

    def end(self) -> dict[str, float]:
        """Write the tokens, if there are any, to `tokens_directory`.

        Raises:
            OSError: if the file cannot be written.
        """
        sample, self._sample = self._sample, None
        if sample is None:
            return {}
        self._hook.remove()
        if sample.columns:
            self._write(sample)
        return {}

    def _write(self, sample: TokenSample) -> None:
        import pyarrow
        from pyarrow import parquet

        name = f"step_{self.trainer.global_step:06d}_rank{torch.distributed.get_rank()}.parquet"
        file = tokens_directory(self.trainer.args) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")  # readers find complete files only
        columns = {name: column.numpy() for name, column in sample.columns.items()}
        parquet.write_table(pyarrow.table(columns, metadata=self._process), part)
        part.replace(file)


def tokens_directory(args: Namespace) -> Path:
    """Return the directory of a run's token files: in the TensorBoard directory, or else beside the checkpoints."""
    return Path(args.logger.tensorboard_dir or args.ckpt.path, "tokens")
