"""BAPO in TRL's asynchronous trainer: its real training loop on samples that the test queues, without an engine.

tests/full/test_trl_async_run.py has a run with a vLLM server.
"""

import asyncio
import functools
import inspect
import os
import queue
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pipeline
import pytest
import torch
import trl_async_cpu
from accelerate.state import AcceleratorState
from datasets import Dataset
from ranks import on_ranks
from reference import expected_step
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, _AsyncRolloutLoop
from trl.experimental.async_grpo.packing import TreeRow

from openrlhf_bapo import ClipConfig
from openrlhf_bapo.rules.clip_bounds import tally_contributions
from openrlhf_bapo.rules.clip_config import SmoothingConfig
from openrlhf_bapo.rules.clip_rules import FixedBounds, SteadyBounds
from openrlhf_bapo.rules.other_rules import BalancedWeights, DivergenceBounds, TaperedWeights
from openrlhf_bapo.trl_async import BapoAsyncGRPOTrainer

# TRL's import sets it, and the engines of other tests would inherit it and keep their configuration to themselves.
os.environ.pop("VLLM_LOGGING_LEVEL", None)

# A target that some of the steps reach at once, some between the ends of the ranges, and some never.
SEARCH = ClipConfig(contribution="gradient", positive_contribution_target=0.6)
NUM_STEPS, SIZE = 4, 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("trl_async"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    trl_async_cpu.run_on_cpu(monkeypatch)


def make_samples(directory) -> list[RolloutSample]:
    return [replace(sample) for sample in _make_samples(directory)]


@functools.cache
def _make_samples(directory) -> list[RolloutSample]:
    """Samples of five steps, in groups of four, of a policy near the first one.

    The first two of a group begin alike, and every fifth token is not trained on.
    """
    model, rng, samples = pipeline.load_model(directory), np.random.default_rng(0), []
    for i in range((NUM_STEPS + 1) * SIZE):
        prompt = np.random.default_rng(1000 + i // 4).integers(3, 16, 3)
        shared = np.random.default_rng(2000 + i // 4).integers(3, 16, 2)
        ids = np.concatenate([prompt, shared[: 2 * (i % 4 < 2)], rng.integers(3, 16, rng.integers(2, 9))])
        place = np.arange(len(ids))
        log_probs = token_log_probs(model, ids).detach().numpy() + 0.5 * rng.normal(size=len(ids) - 1)
        samples.append(
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=ids.astype(np.int64),
                completion_mask=((place >= 3) & (place % 5 != 4)).astype(np.int64),
                old_log_probs=np.where(place >= 3, np.append(0, log_probs), 0).astype(np.float32),
                advantage=float(rng.normal() + 0.4),
                model_version=1 + i // (2 * SIZE),
                group_id=i // 4,
                metrics={"reward": 0.0},
            )
        )
    return samples


def token_log_probs(model, ids) -> torch.Tensor:
    """log pi of every token but the first."""
    ids = torch.as_tensor(ids)
    return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


class Worker:
    """A rollout worker whose samples are there from the beginning, and a weight transfer that transfers nothing."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self, *_, **__) -> None: ...

    stop = pause = resume = destroy = init_weight_transfer = start
    update_model_version = check_health = send_weights = start


def arguments(directory, samples: list[RolloutSample] | None = None, batch: int = 4, **overrides) -> dict:
    """The arguments of a trainer with steps of 16 samples."""
    worker = Worker(samples or make_samples(directory))
    values = dict(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=SIZE // batch,
        token_budget=0,
        max_steps=NUM_STEPS,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_grad_norm=0.0,
    )
    return dict(
        model=str(directory / "model"),
        args=AsyncGRPOConfig(**values | overrides),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="]}),
        rollout_worker=worker,
        weight_transfer=worker,
    )


class Recording(BapoAsyncGRPOTrainer):
    """Keeps the bounds, weights and gradients of each optimizer step, and counts forward passes."""

    def __init__(self, *args, **kwargs) -> None:
        self.weights, self.gradients, self.bounds, self.num_forwards = [], [], [], 0
        super().__init__(*args, **kwargs)
        self.model.register_forward_hook(self._count)

    def _count(self, *_) -> None:
        self.num_forwards += 1

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self._num_trained == 0:
            self.weights.append({name: value.clone() for name, value in self.model.state_dict().items()})
            self.bounds.append([])
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.bounds[-1].append((1 - self.epsilon_low, 1 + self.epsilon_high))
        return loss

    def training_step(self, *args):
        found = super().training_step(*args)
        if self._num_trained == len(self._micro_batches):
            self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters()})
        return found


def trained(directory, bapo, **overrides) -> Recording:
    trainer = Recording(**arguments(directory, **overrides), bapo=bapo)
    trainer.train()
    return trainer


def logged(trainer: Recording) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "offpolicy/ess" in entry]


def joined(directory, weights: dict, samples: list[RolloutSample], batch: int = 4):
    """Log-probs with a gradient, the engine's, advantages and weights in the loss of all tokens of a step, [tokens].

    The model is transformers' own, one sample at a time. TRL's loss is a mean over micro-batches of means over tokens.
    """
    model, found = pipeline.load_model(directory, weights), []
    for i in range(0, len(samples), batch):
        part = samples[i : i + batch]
        num_tokens = sum(int(sample.completion_mask.sum()) for sample in part)
        for sample in part:
            ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask)[1:] > 0
            new = token_log_probs(model, ids)[mask]
            old = torch.tensor(sample.old_log_probs)[1:][mask]
            found.append((new, old, torch.full_like(old, sample.advantage), torch.full_like(old, 1 / num_tokens)))
    return model, *(torch.cat(columns) for columns in zip(*found, strict=True))


def of_step(directory, number: int) -> list[RolloutSample]:
    return make_samples(directory)[number * SIZE : (number + 1) * SIZE]


def assert_gradient(found: dict, model, loss: torch.Tensor) -> None:
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch", [4, 16])
def test_bounds_gradient_and_off_policy_metrics_are_those_of_all_tokens_of_the_optimizer_step(directory, batch):
    trainer = trained(directory, replace(SEARCH, dual_clip=1.5), batch=batch)
    found = set()
    for number, entry in enumerate(logged(trainer)):
        model, new, old, advantages, weight = joined(
            directory, trainer.weights[number], of_step(directory, number), batch
        )
        ratio = (new - old).exp()
        bounds, expected = expected_step(ratio.detach(), advantages, weight, SEARCH)
        assert trainer.bounds[number] == [pytest.approx(bounds, abs=1e-9)] * (SIZE // batch)
        assert {name: entry[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert abs(entry["entropy/predicted_change"]) > 0
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
        dual = torch.where(advantages < 0, surrogate.maximum(1.5 * advantages), surrogate)
        assert (dual != surrogate).any()
        assert_gradient(trainer.gradients[number], model, -(weight * dual).sum() / (SIZE // batch))
        found.add(bounds)
    assert len(found) > 1  # the search had choices to make
    assert trainer.num_forwards == 2 * NUM_STEPS * SIZE // batch


def test_fixed_bounds_are_trls_own_loss_to_the_last_bit_and_need_no_forward_of_their_own(directory):
    theirs = AsyncGRPOTrainer(**arguments(directory))
    theirs.train()
    ours = trained(directory, FixedBounds(0.8, 1.2))
    start = pipeline.load_model(directory).state_dict()
    state = ours.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in theirs.model.state_dict().items())
    assert any(not torch.equal(value, start[name]) for name, value in state.items())
    assert ours.num_forwards == NUM_STEPS * 4


def test_bounds_per_token_go_to_their_tokens(directory):
    trainer = trained(directory, DivergenceBounds(0.05), max_steps=1)
    model, new, old, advantages, weight = joined(directory, trainer.weights[0], of_step(directory, 0))
    ratio, distance = (new - old).exp(), 0.05 / old.exp()
    clipped = ratio.minimum(1 + distance).maximum((1 - distance).clamp(min=0))
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    assert (surrogate != ratio * advantages).any()
    assert_gradient(trainer.gradients[0], model, -(weight * surrogate).sum() / 4)


def test_weights_by_sequence_weigh_the_tokens_of_their_sample(directory):
    trainer = trained(directory, TaperedWeights("sequence"), max_steps=1)
    samples = of_step(directory, 0)
    model, new, old, advantages, weight = joined(directory, trainer.weights[0], samples)
    lengths = [int(sample.completion_mask.sum()) for sample in samples]
    products = [part.sum().exp().clamp(max=1) for part in (new - old).detach().split(lengths)]
    tapered = torch.cat([product.expand(length) for product, length in zip(products, lengths, strict=True)])
    w = torch.where(advantages > 0, 1.0, tapered)
    assert_gradient(trainer.gradients[0], model, -(weight * w * advantages * new).sum() / 4)


def test_a_step_without_positive_tokens_has_weights_of_zero_and_finite_metrics(directory):
    samples = [replace(sample, advantage=-abs(sample.advantage)) for sample in make_samples(directory)]
    trainer = trained(directory, BalancedWeights(), samples=samples, max_steps=1)
    assert all(gradient.abs().max() < 1e-30 for gradient in trainer.gradients[0].values())
    (metrics,) = logged(trainer)
    assert metrics["bapo/negative_weight"] == 0
    assert [name for name, value in metrics.items() if isinstance(value, float) and not np.isfinite(value)] == []


def test_tokens_without_a_log_prob_of_the_engine_are_left_out_and_counted(directory):
    samples = make_samples(directory)
    for sample in samples[1:3]:
        place = sample.completion_mask.nonzero()[0][0]
        sample.old_log_probs = np.array([*sample.old_log_probs[:place], None, *sample.old_log_probs[place + 1 :]])
        sample.old_log_probs = sample.old_log_probs.astype(np.float32)  # as TRL makes NaN of vLLM's null
        assert np.isnan(sample.old_log_probs).sum() == 1
    masked = [replace(sample, old_log_probs=np.nan_to_num(sample.old_log_probs)) for sample in samples]
    for sample, other in zip(masked, samples, strict=True):
        sample.completion_mask = np.where(np.isnan(other.old_log_probs), 0, other.completion_mask)
    found, expected = (trained(directory, SEARCH, samples=given, max_steps=2) for given in (samples, masked))
    assert [entry.get("offpolicy/nonfinite_tokens") for entry in logged(found)] == [2, None]
    assert found.bounds == expected.bounds
    state = expected.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found.model.state_dict().items())
    assert all(value.isfinite().all() for value in state.values())


def test_steady_bounds_follow_the_steps_before_and_a_resumed_run_goes_on_with_them(directory, tmp_path):
    smoothing = SmoothingConfig(half_life=2.0)
    config = replace(SEARCH, smoothing=smoothing)
    trainer = trained(directory, config, output_dir=str(tmp_path), save_strategy="steps", save_steps=2)
    steady = SteadyBounds(SEARCH, smoothing)
    for number in range(NUM_STEPS):
        expected = steady.lower.item(), steady.upper.item()
        assert trainer.bounds[number] == [pytest.approx(expected, abs=1e-6)] * 4
        _, new, old, advantages, weight = joined(directory, trainer.weights[number], of_step(directory, number))
        steady.follow(tally_contributions((new - old).exp().detach(), advantages, weight, SEARCH))
    assert trainer.num_forwards == NUM_STEPS * 4

    # TRL's queue begins anew with the run.
    rest = make_samples(directory)[2 * SIZE :]
    resumed = Recording(**arguments(directory, rest, output_dir=str(tmp_path)), bapo=config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.bounds == trainer.bounds[2:]


def test_staleness_and_optimizer_steps_are_counted_from_the_version_of_each_sample(directory):
    trainer = trained(directory, SEARCH, weight_sync_steps=2)
    # Weights are transferred at the start and after step 2; the samples of steps 3 and 4 are of version 2.
    samples = make_samples(directory)
    samples[2 * SIZE].model_version = samples[3 * SIZE].model_version = 1
    entries = logged(trainer)
    assert [entry["offpolicy/staleness_max"] for entry in entries] == [0, 0, 0, 0]
    assert [entry["offpolicy/optimizer_steps_max"] for entry in entries] == [0, 1, 0, 1]
    trainer = trained(directory, SEARCH, weight_sync_steps=2, samples=samples)
    entries = logged(trainer)
    assert [entry["offpolicy/staleness_max"] for entry in entries] == [0, 0, 1, 1]
    assert [entry["offpolicy/optimizer_steps_max"] for entry in entries] == [0, 1, 2, 3]
    for number in (2, 3):
        lengths = [int(sample.completion_mask.sum()) for sample in of_step(directory, number)]
        assert entries[number]["offpolicy/staleness_mean"] == pytest.approx(lengths[0] / sum(lengths))
        assert entries[number]["offpolicy/token_frac/staleness_1"] == pytest.approx(lengths[0] / sum(lengths))
    (whole,) = logged(trained(directory, SEARCH, weight_sync_steps=2, samples=samples, logging_steps=NUM_STEPS))
    for name in ("ratio_max", "ratio_max/staleness_0", "ratio_max/staleness_1", "optimizer_steps_max"):
        of_steps = [entry[f"offpolicy/{name}"] for entry in entries if f"offpolicy/{name}" in entry]
        assert whole[f"offpolicy/{name}"] == max(of_steps) > min(of_steps)


def test_a_version_that_is_ahead_of_the_trainers_count_is_not_stale(directory):
    samples = [replace(sample, model_version=100) for sample in make_samples(directory)]
    (entry,) = logged(trained(directory, SEARCH, samples=samples, max_steps=1))
    assert entry["offpolicy/staleness_mean"] == entry["offpolicy/staleness_max"] == 0


def train_rank(rank: int, directory):
    os.environ["LOCAL_RANK"] = str(rank)
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one is forked from
    samples = make_samples(directory)
    samples[SIZE].model_version = 2
    trainer = trained(directory, SEARCH, gradient_accumulation_steps=2, samples=samples, max_steps=3)
    assert trainer.accelerator.num_processes == 2
    bounds = [[tuple(map(float, bounds)) for bounds in step] for step in trainer.bounds]
    entries = [entry["offpolicy/staleness_mean"] for entry in logged(trainer)]
    return trainer.weights, trainer.gradients, bounds, entries, trainer.model_version


def test_two_processes_train_between_the_bounds_of_the_tokens_of_both(directory):
    results = on_ranks(2, train_rank, directory)
    (weights, gradients, bounds, entries, version), (_, _, others_bounds, _, others_version) = results
    assert bounds == others_bounds and len({tuple(step) for step in bounds}) > 1
    assert version == others_version == 4
    for number in range(3):
        samples = of_step(directory, number)
        model, new, old, advantages, weight = joined(directory, weights[number], samples, batch=8)
        ratio = (new - old).exp()
        expected, _ = expected_step(ratio.detach(), advantages, weight, SEARCH)
        assert bounds[number] == [pytest.approx(expected, abs=1e-9)] * 2
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(*bounds[number][0]) * advantages)
        assert_gradient(gradients[number], model, -(weight * surrogate).sum() / 2)
    num_tokens = [int(sample.completion_mask.sum()) for sample in of_step(directory, 1)]
    assert entries == [0, pytest.approx(1 - num_tokens[0] / sum(num_tokens)), 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.005),
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("epsilon_high", 0.28),
    ],
)
def test_sampling_from_another_distribution_and_bounds_beside_the_rules_are_refused(directory, name, value):
    with pytest.raises(ValueError, match=f"{name} {value} is not allowed with BAPO; it must be"):
        BapoAsyncGRPOTrainer(**arguments(directory, **{name: value}), bapo=SEARCH)


def test_vllm_samples_without_the_min_p_of_the_models_generation_config(directory):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    given = arguments(directory)
    del given["rollout_worker"]
    trainer = BapoAsyncGRPOTrainer(**given, reward_funcs=len, bapo=SEARCH)
    loop, sent = object.__new__(_AsyncRolloutLoop), []
    vars(loop).update(trainer.rollout_worker._loop_kwargs)

    async def post(path: str, payload: dict, timeout: float) -> dict:
        sent.append(payload)
        return {"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}}]}

    loop._post = post
    asyncio.run(loop._generate_one_turn([3]))
    sampling = CompletionRequest(**sent[0]).to_sampling_params(8, {"min_p": 0.15, "top_p": 0.8, "top_k": 20})
    assert (sampling.min_p, sampling.top_p, sampling.top_k) == (0, 1, 0)


def test_a_temperature_is_refused_if_the_servers_log_probs_do_not_have_it(directory):
    given = arguments(directory, temperature=0.7)
    del given["rollout_worker"]
    trainer = BapoAsyncGRPOTrainer(**given, reward_funcs=len, bapo=SEARCH)
    info = {"model_config": {"logprobs_mode": "raw_logprobs"}}
    trainer.vllm_client = SimpleNamespace(wait_for_server_ready=lambda: None, get_server_info=lambda: info)
    message = "--logprobs-mode 'raw_logprobs' is not allowed with BAPO; it must be processed_logprobs"
    with pytest.raises(ValueError, match=message):
        trainer.get_train_dataloader()
    info["model_config"]["logprobs_mode"] = "processed_logprobs"
    trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (AsyncGRPOTrainer.compute_loss, "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"),
        (AsyncGRPOTrainer.compute_loss, "outputs.log_probs.flatten()[token_index]"),
        (AsyncGRPOTrainer.compute_loss, "outputs.entropy.flatten()[token_index]"),
        (AsyncGRPOTrainer.compute_loss, 'inputs["token_index"][selected]'),
        (AsyncGRPOTrainer.compute_loss, "(global_n_tokens / world_size)"),
        (AsyncGRPOTrainer.get_train_dataloader, "rollout_queue=self.rollout_queue"),
        (AsyncGRPOTrainer.__init__, "StepIntervalCallback(self._sync_weight"),
        (async_grpo_trainer.RolloutQueueDataset.__iter__, '"metrics": sample.metrics'),
        (TreeRow.pack, "segment_id.append(i)"),
    ],
)
def test_trl_has_what_the_adapter_relies_on(where, text):
    assert text in inspect.getsource(where)
