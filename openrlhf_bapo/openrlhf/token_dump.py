"""`--bapo.dump_tokens`: a bounded sample of the tokens that a training step trained on, as a Parquet file.

Rank 0 writes it, of its own micro-batches: every rank gets an equal share of a rollout, of fresh and replayed samples
alike, and one file a step stays bounded however many ranks there are. A row is a token:

    global_step, update    the training step, and how many optimizer steps of it came before
    sample, position       its sample, in the order of rank 0's training, and its place in the response
    ratio                  importance ratio against the behaviour policy
    probability, entropy   of the token under the policy that is trained, and of that policy where it was chosen (nats)
    advantage
    clip_low, clip_high    the bounds of its update
    clipped                beyond the one that is there for its sign
    dual_clipped           a negative one above --actor.dual_clip
    staleness              versions since it was generated
    optimizer_steps        optimizer steps since it was generated
"""

from argparse import Namespace
from pathlib import Path

import torch

MAX_TOKENS = 16_384
"""The most tokens in a file, which then has about half a megabyte."""


class TokenSample:
    """A uniform sample of the tokens that it is shown, without replacement, in the memory of the sample alone.

    Every token draws a number; those with the `size` smallest numbers are kept, in the order in which they were shown.
    How the tokens are split over calls does not matter.

    Args:
        size: the most tokens kept.
        seed: of the draws.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.columns: dict[str, torch.Tensor] = {}
        """What is kept, by name, [num_tokens] each."""
        self._size = size
        self._draws = torch.empty(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, columns: dict[str, torch.Tensor]) -> None:
        """Show it more tokens: [num_tokens] on the CPU by name, the same names in every call."""
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


class TokenDump:
    """Watches a `BapoActorTrainer` through one training step, from construction until `write`.

    Nothing is computed anew but the ratio: log-probs, bounds and entropy are those of the forward that is trained on.

    Args:
        trainer: of an off-policy run, whose entropy is logged.
    """

    def __init__(self, trainer) -> None:
        self._trainer = trainer
        self._sample = TokenSample(MAX_TOKENS, trainer.args.train.seed + trainer.global_step)
        self._num_samples = 0
        self._hooks = (
            trainer.actor.register_forward_hook(self._note_entropy),
            trainer.actor_loss_fn.register_forward_hook(self._add, with_kwargs=True),
        )

    def _note_entropy(self, _, __, outputs) -> None:
        if isinstance(outputs, tuple):  # the forward for the search has log-probs alone
            self._entropy = outputs[1].entropy.detach()

    def _add(self, loss_fn, args: tuple, kwargs: dict, _) -> None:
        log_probs, behaviour, advantages = (x.detach() for x in args)
        experience, update = self._trainer._experience, self._trainer._steps_taken()
        active = kwargs["action_mask"] > 0
        sample = torch.arange(len(active), device=active.device)[:, None] + self._num_samples
        self._num_samples += len(active)
        tokens = {
            "sample": sample.expand_as(active).int(),
            "position": (active.cumsum(-1) - 1).int(),
            "staleness": experience.staleness.int(),
            "optimizer_steps": (experience.optimizer_steps + update).int(),
            "ratio": (log_probs - behaviour).clamp(-20.0, 20.0).exp(),  # as PolicyLoss.forward has it
            "probability": log_probs.exp(),
            "entropy": self._entropy[:, -active.shape[1] :],
            "advantage": advantages,
        }
        tokens = {name: values[active] for name, values in tokens.items()}
        # Flat, so that the bounds are compared in the ratio's own precision, as the loss clamps it, whatever their own.
        ratio, advantage = tokens["ratio"], tokens["advantage"]
        lower, upper = 1 - loss_fn.clip_eps_low, 1 + loss_fn.clip_eps_high
        tokens["clipped"] = torch.where(advantage > 0, ratio > upper, (advantage < 0) & (ratio < lower))
        tokens["dual_clipped"] = (advantage < 0) & (ratio > (loss_fn.dual_clip or torch.inf))
        constants = {"global_step": self._trainer.global_step, "update": update}
        bounds = {"clip_low": float(lower), "clip_high": float(upper)}
        columns = {name: torch.full(ratio.shape, value, dtype=torch.int32) for name, value in constants.items()}
        columns |= {name: values.cpu() for name, values in tokens.items()}
        columns |= {name: torch.full(ratio.shape, value, dtype=torch.float64) for name, value in bounds.items()}
        self._sample.add(columns)

    def write(self) -> None:
        """Stop watching, and write what was sampled, if there was any token, to `tokens_directory`.

        Raises:
            OSError: if it cannot be written.
        """
        import pyarrow
        from pyarrow import parquet

        for hook in self._hooks:
            hook.remove()
        if not self._sample.columns:
            return
        name = f"step_{self._trainer.global_step:06d}_rank{torch.distributed.get_rank()}.parquet"
        file = tokens_directory(self._trainer.args) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")  # who draws meanwhile finds whole files alone
        columns = {name: column.numpy() for name, column in self._sample.columns.items()}
        parquet.write_table(pyarrow.table(columns), part)
        part.replace(file)


def tokens_directory(args: Namespace) -> Path:
    """Where a run's tokens lie: beside what it logs, or without TensorBoard beside its checkpoints."""
    return Path(args.logger.tensorboard_dir or args.ckpt.path, "tokens")
