"""BAPO in TRL's asynchronous trainer: `AsyncGRPOTrainer` with a clip rule for each optimizer step (for TRL 1.16).

    from openrlhf_bapo.trl_async import BapoAsyncGRPOTrainer

    trainer = BapoAsyncGRPOTrainer(model_id, reward_funcs, args=AsyncGRPOConfig(...), train_dataset=..., bapo="paper")

A vLLM server generates while the trainer trains. TRL takes the ratio against the log-probs of the engine, so staleness
and the engine's rounding are both in it. Its loss clips between two fixed bounds, which leave the ratio of a negative
token without a limit (TRL's issue 6945; its pull request 7120 proposes other corrections). Here the bounds come from a
rule, and the rule's dual clip is that limit.

TRL's loss reads its inputs, calls the model once, and clips afterwards to the trainer's epsilons. A function replaces
the model in that call. It gives the loss one log-prob per token, and sets the epsilons.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from openrlhf_bapo.rules.clip_config import ClipConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, share_weights
from openrlhf_bapo.trl import ClipRuleTrainer, require

VERSION = "sample/model_version"
"""Name of a sample's metric with its policy version. TRL hands the metrics from its queue to the collator, and logs
them."""


class BapoAsyncGRPOTrainer(ClipRuleTrainer, AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` between the bounds, or with the weights, of a clip rule; with one more argument.

    Logs what `BapoGRPOTrainer` logs, and staleness in versions. A version is a weight transfer to the vLLM server. TRL
    gives all samples of a prompt the version at which the first of them was requested. So a token that was generated
    after a later transfer is less stale than logged. The log-prob is always that of the policy that generated it.

    Args:
        bapo: as in `BapoGRPOTrainer`. The rule's dual clip limits the ratio of negative tokens. TRL's metrics `ratio`
            and `kl` are then those of the capped log-probs. With weights w, `ratio` is the mean of w, and `kl` that of
            w - 1 - log w.

    Raises:
        ValueError: if the engine samples from another distribution than that of the trainer's log-probs, and for
            another epsilon than TRL's default, which would have no effect.
    """

    rollout_queue: Any
    model_version: int

    def __init__(self, *args: Any, bapo: ClipConfig | ClipRule | str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_rule(bapo)
        given = self.args
        whole = "so that the engine samples from the distribution that the trainer computes log-probs of"
        for name, is_allowed, allowed in (
            ("temperature", 0.01 <= given.temperature <= 2, "from 0.01 to 2"),
            ("top_p", given.top_p == 1, "1.0"),
            ("top_k", given.top_k in (0, -1), "0"),
            ("min_p", not given.min_p, "None"),
            ("repetition_penalty", given.repetition_penalty == 1, "1.0"),
        ):
            require(is_allowed, name, getattr(given, name), f"{allowed}, {whole}")
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            # TRL sends no min_p of None, and vLLM would then take that of the model's generation_config.json.
            self.rollout_worker._loop_kwargs["min_p"] = 0.0
        if self.rollout_queue is not None:  # the main process
            self.rollout_queue = _VersionedQueue(self.rollout_queue, self._metrics["train"])
        self._published: dict[int, int] = {}  # version -> optimizer steps before it

    def get_train_dataloader(self) -> Any:
        """Return TRL's data loader, whose batches then also have "model_version" [processes, samples]."""
        # vLLM returns raw log-probs by default, which are those of temperature 1.
        if self.args.temperature != 1 and isinstance(self.rollout_worker, AsyncRolloutWorker):
            self.vllm_client.wait_for_server_ready()
            mode = self.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            allowed = "processed_logprobs with a temperature other than 1"
            require(mode == "processed_logprobs", "--logprobs-mode", mode, allowed)
        loader = super().get_train_dataloader()
        loader.base_dataloader.collate_fn = partial(_collate, loader.base_dataloader.collate_fn)
        return loader

    def compute_loss(self, model: torch.nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss of a micro-batch between the rule's bounds, or with its weights."""
        self._tally_first(model, inputs)
        loss = self._loss(model, inputs, partial(self._between_bounds, inputs))
        self._num_trained += 1
        return loss

    def _window(self) -> Iterable[dict]:
        return map(self._prepare_inputs, self._micro_batches)

    def _loss(self, model: torch.nn.Module, inputs: dict, change: Callable) -> torch.Tensor:
        """Return TRL's loss for `change(the model's log-probs)`; both log-probs are [tokens]."""
        selected = inputs["token_index"] >= 0
        # Samples with a common prefix share positions of the packed row, but each has its own tokens in the loss.
        positions = inputs["token_index"][selected]

        def forward(**kwargs: Any) -> Any:
            outputs = model(**kwargs)
            outputs.entropy = outputs.entropy.flatten()[positions]
            outputs.log_probs = change(outputs.log_probs.flatten()[positions])
            return outputs

        token_index = inputs["token_index"].clone()
        token_index[selected] = torch.arange(positions.numel(), device=positions.device)
        return super().compute_loss(forward, dict(inputs) | {"token_index": token_index})

    @torch.no_grad()
    def _tokens_before_training(self, model: torch.nn.Module, inputs: dict) -> Tokens:
        found: list[Tokens] = []

        def keep(log_probs: torch.Tensor) -> None:
            found.append(self._tokens(log_probs, inputs))
            raise _ForwardIsDone

        with contextlib.suppress(_ForwardIsDone):
            self._loss(model, inputs, keep)
        return found[0]

    def _between_bounds(self, inputs: dict, log_probs: torch.Tensor) -> torch.Tensor:
        """Set the bounds that TRL's loss clips to; returns the log-probs [tokens] for the loss."""
        tokens = self._tokens(log_probs.detach(), inputs)
        is_token = tokens.weight > 0
        lower, upper, weights = self._tally_training(tokens, *self._ages(tokens, inputs))
        behavior_log_probs, advantages = tokens.behavior_log_probs[is_token], tokens.advantages[is_token]
        if weights is not None:  # with a ratio of w, the surrogate's gradient is that of w A log pi
            self.epsilon_low, self.epsilon_high = 1.0, math.inf
            log_weights = weights[is_token].clamp(min=torch.finfo(log_probs.dtype).tiny).log()
            return behavior_log_probs + log_weights + (log_probs - log_probs.detach())
        lower, upper = (bound[is_token] if bound.dim() else bound for bound in (lower, upper))
        self.epsilon_low, self.epsilon_high = 1 - lower, upper - 1
        if (dual_clip := self.clip_rule.config.dual_clip) is None:
            return log_probs
        return torch.where(advantages < 0, log_probs.minimum(behavior_log_probs + math.log(dual_clip)), log_probs)

    def _tokens(self, log_probs: torch.Tensor, inputs: dict) -> Tokens:
        """Return a micro-batch's tokens, [samples, tokens], at the policy's log-probs [tokens]."""
        selected = inputs["token_index"] >= 0
        lengths = inputs["segment_id"][selected].bincount().tolist()

        def by_sample(values: torch.Tensor) -> torch.Tensor:
            return pad_sequence(values.split(lengths), batch_first=True)

        behavior_log_probs, advantages = (by_sample(inputs[name][selected]) for name in ("old_log_probs", "advantages"))
        mask, num_tokens = by_sample(torch.ones_like(log_probs)), inputs["global_n_tokens"][0]
        weight = share_weights(mask, self.clip_rule.config, "micro_batch", num_tokens)
        return Tokens(by_sample(log_probs), behavior_log_probs, advantages, weight)

    def _ages(self, tokens: Tokens, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the versions and the optimizer steps since the policy of each token, [samples, tokens]."""
        versions = inputs["model_version"][0, : len(tokens.ratio)]
        step, first = self.state.global_step, min(self._published.values())
        steps = versions.new_tensor([step - self._published.get(version, first) for version in versions.tolist()])
        staleness = (self.model_version - versions).clamp(min=0)
        return staleness[:, None].expand_as(tokens.ratio), steps[:, None].expand_as(tokens.ratio)

    def _sync_weight(self) -> None:
        super()._sync_weight()
        # TRL counts versions on the main process alone.
        counted = self.model_version if self.accelerator.is_main_process else 0
        version = self.accelerator.reduce(torch.tensor(counted, device=self.accelerator.device), reduction="sum")
        self.model_version = int(version)
        self._published[self.model_version] = self.state.global_step


class _ForwardIsDone(Exception):
    """Ends TRL's loss after its forward pass."""


class _VersionedQueue:
    """TRL's queue of rollout samples, which adds to each sample's metrics its policy version.

    It leaves out tokens without a log-prob of the engine, and counts them in `metrics`, TRL's. vLLM gives NaN if a
    distribution has collapsed (TRL's issue 6868), and one such token would make the loss and then all weights NaN.
    """

    def __init__(self, queue: Any, metrics: dict[str, list]) -> None:
        self._queue, self._metrics = queue, metrics

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        sample.metrics[VERSION] = float(sample.model_version)
        left_out = (sample.completion_mask > 0) & ~torch.as_tensor(sample.old_log_probs).isfinite().numpy()
        if left_out.any():
            sample.completion_mask = sample.completion_mask * ~left_out
            counted = self._metrics["offpolicy/nonfinite_tokens"]
            counted[:] = [sum(counted) + float(left_out.sum())]  # TRL logs the mean of the list
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _collate(collate: Callable, examples: list) -> dict:
    """Return TRL's batch of a micro-batch with "model_version" [processes, samples], padded with 0."""
    batch = collate(examples)
    (rows,) = examples
    versions = [torch.tensor([int(sample["metrics"][VERSION]) for sample in row.samples]) for row in rows]
    return batch | {"model_version": pad_sequence(versions, batch_first=True)}
