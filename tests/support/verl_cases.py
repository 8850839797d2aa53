"""BAPO in verl, on its real FSDP engine on the CPU; run by test_verl.py in verl's environment."""

import inspect
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process would wait for its parent's other threads

import numpy as np
import pipeline
import presets
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import trl.experimental.ppo
import verl
import verl_cpu  # noqa: F401
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from ranks import on_ranks
from reference import expected_entropy, expected_step
from tensordict import TensorDict
from transformers import AutoConfig
from verl.protocol import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.metric import Metric
from verl.utils.model import get_hf_auto_model_class
from verl.workers import engine_workers
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from openrlhf_bapo import ClipConfig, find_clip_bounds
from openrlhf_bapo.rules.clip_bounds import tally_contributions
from openrlhf_bapo.rules.clip_config import PRESETS, SmoothingConfig
from openrlhf_bapo.rules.clip_rules import SteadyBounds
from openrlhf_bapo.rules.saved_rule import save_rule
from openrlhf_bapo.verl import BapoFSDPEngine, BapoPolicyLossConfig, compute_policy_loss_bapo

NUM_SAMPLES, NUM_STEPS = 16, 3
SEARCH = dict(contribution="gradient", positive_contribution_target=0.35)
CONFIG = partial(BapoPolicyLossConfig, loss_mode="bapo")
SEARCHING = partial(CONFIG, search=SEARCH)


# The engine would import these in every forked process.
WARM = torch._dynamo, trl.experimental.ppo, verl


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = pipeline.make_model(tmp_path_factory.mktemp("verl"))
    get_hf_auto_model_class(AutoConfig.from_pretrained(found / "model"))  # imports every kind of model
    return found


def make_batch(directory) -> dict[str, torch.Tensor]:
    """Samples with responses of 1 to 10 tokens, whose behavior policy is close to the model."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 16, (NUM_SAMPLES, 6), generator=generator)
    mask = (torch.arange(10) < torch.randint(1, 11, (NUM_SAMPLES, 1), generator=generator)).long()
    responses = torch.randint(3, 16, (NUM_SAMPLES, 10), generator=generator) * mask
    attention = torch.cat([torch.ones_like(prompts), mask], 1)
    batch = dict(
        prompts=prompts,
        responses=responses,
        input_ids=torch.cat([prompts, responses], 1),
        attention_mask=attention,
        response_mask=mask,
        position_ids=attention.cumsum(1) - 1,
        advantages=torch.randn(NUM_SAMPLES, 1, generator=generator).expand(-1, 10).clone(),
        rollout_is_weights=torch.rand(NUM_SAMPLES, 10, generator=generator) + 0.5,
    )
    noise = 0.4 * torch.randn(NUM_SAMPLES, 10, generator=generator)
    batch["old_log_probs"] = log_probs(pipeline.load_model(directory), batch) + noise
    return batch


@torch.no_grad()
def log_probs(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probs of the responses' tokens, [samples, 10], by transformers alone."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 5:-1]
    return logits.log_softmax(-1).gather(2, batch["responses"][..., None])[..., 0]


def tokens_of(directory, batch, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Ratio, advantages and mask of a batch under a policy, [samples, 10]."""
    ratio = (log_probs(pipeline.load_model(directory, weights), batch) - batch["old_log_probs"]).exp()
    return ratio, batch["advantages"], batch["response_mask"]


def make_actor(policy_loss, **overrides) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=policy_loss, **overrides
    )


def choose_bounds(actor: FSDPActorConfig, micro_batches: list[tuple], **kwargs) -> None:
    """Tally micro-batches for a rule that needs that before training, as the engine does."""
    update = actor.policy_loss.update
    update.group = dist.group.WORLD
    if update.rule.needs_tally_first and update.rule.config.scope == "update":
        update.is_searching = True
        for tokens in micro_batches:
            compute_policy_loss_bapo(*tokens, loss_agg_mode=actor.loss_agg_mode, config=actor, **kwargs)
        update.is_searching = False
        update.close_update()


@pytest.fixture
def alone():
    """Make this process the only rank of a group, in which the loss can be called without an engine."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arguments(tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Old log-probs, log-probs that take a gradient, advantages and mask."""
    log_probs = tokens["log_probs"].clone().requires_grad_()
    return tokens["old_log_probs"], log_probs, tokens["advantages"], tokens["mask"]


class Counting(BapoFSDPEngine):
    num_forwards = 0

    def forward_step(self, *args, **kwargs):
        self.num_forwards += 1
        return super().forward_step(*args, **kwargs)


def plain(metric):
    """A metric's numbers: a list of the micro-batches', a list of one of ours, or the gradient norm."""
    if isinstance(metric, list):
        return [plain(part) for part in metric]
    return metric.values if isinstance(metric, Metric) else float(metric)


def train(
    rank,
    directory,
    batch,
    policy_loss,
    micro_batch_size=4,
    make=Counting,
    saved=None,
    first=0,
    skipped=None,
    **overrides,
):
    """Optimizer steps on this rank's part of a batch: (weights before, metrics) of each, then the last weights.

    With `saved`, a folder, each step is saved there; `first` is the step whose checkpoint a run resumes, 0 for none.
    The gradient of step `skipped` is not finite, so that verl skips it.
    """
    actor = make_actor(policy_loss(), **overrides)
    fp32 = dict(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    engine = make(
        model_config=HFModelConfig(path=str(directory / "model"), override_config=dict(attn_implementation="sdpa")),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=fp32),
        optimizer_config=FSDPOptimizerConfig(lr=5e-3, total_training_steps=NUM_STEPS),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    size = NUM_SAMPLES // dist.get_world_size()
    rows = {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}
    found = []
    if first:
        engine.load_checkpoint(f"{saved}/{first}", del_local_after_load=False)
    for number in range(first, NUM_STEPS):
        before = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
        data = {name: x.clone() for name, x in rows.items()}
        if number == skipped:
            data["rollout_is_weights"][-1] = math.nan
        data = left_right_2_no_padding(TensorDict(data, batch_size=size))
        tensordict_utils.assign_non_tensor(
            data,
            use_remove_padding=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro_batch_size,
            temperature=1.0,
            global_batch_size=NUM_SAMPLES,
        )
        with engine.train_mode():
            metrics = engine.train_batch(data, partial(ppo_loss, config=actor))["metrics"]
        found.append((before, {name: plain(value) for name, value in metrics.items()}))
        if saved and not first:
            engine.save_checkpoint(f"{saved}/{number + 1}")
    after = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
    return [*found, (after, {"num_forwards": getattr(engine, "num_forwards", None)})]


def bounds_of(steps) -> list[tuple[float, float]]:
    """The bounds of each optimizer step, as logged."""
    return [(metrics["bapo/clip_low"][0], metrics["bapo/clip_high"][0]) for _, metrics in steps[:-1]]


@pytest.fixture(scope="module")
def batch(directory):
    return make_batch(directory)


@pytest.fixture(scope="module")
def steps(directory, batch):
    """The optimizer steps of one rank, in micro-batches of 4."""
    return on_ranks(1, train, directory, batch, SEARCHING)[0]


def test_bounds_are_those_of_the_search_on_all_tokens_of_the_optimizer_step(directory, batch, steps):
    for weights, metrics in steps[:-1]:
        ratio, *others = tokens_of(directory, batch, weights)
        bounds, expected = expected_step(ratio, *others, ClipConfig(**SEARCH))
        # verl's dual clip of 3 is always on.
        expected |= expected_entropy(ratio, batch["old_log_probs"], *others, bounds, dual_clip=3.0)
        logged = {name: value for name, value in metrics.items() if name.startswith(("offpolicy/", "entropy/"))}
        logged |= {name: metrics[name] for name in expected}
        assert logged == {name: [pytest.approx(value, rel=1e-5, abs=1e-5)] for name, value in expected.items()}
    assert len(set(bounds_of(steps))) > 1  # the search had choices to make
    assert steps[-1][1]["num_forwards"] == 2 * NUM_STEPS * NUM_SAMPLES // 4


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_however_an_optimizer_step_is_split_its_bounds_and_gradient_are_the_same(
    directory, batch, steps, micro_batch_size
):
    for split in on_ranks(2, train, directory, batch, SEARCHING, micro_batch_size):
        assert bounds_of(split) == bounds_of(steps)
        for (_, theirs), (_, ours) in zip(steps[:-1], split[:-1], strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
            names = [name for name in theirs if name.startswith(("offpolicy/", "entropy/"))]
            assert len(names) > 10
            for name in names:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_a_range_of_one_point_is_verls_own_loss_to_the_last_bit(directory, batch):
    overrides = dict(clip_ratio_c=1.05, loss_agg_mode="seq-mean-token-mean")
    fixed = dict(ratio_lower_start=0.7, ratio_lower_max=0.7, ratio_upper_start=1.4, ratio_upper_max=1.4)
    bapo = partial(CONFIG, search=fixed)
    (ours,) = on_ranks(1, train, directory, batch, bapo, **overrides)
    overrides |= dict(clip_ratio_low=0.3, clip_ratio_high=0.4)
    (theirs,) = on_ranks(1, train, directory, batch, PolicyLossConfig, make=FSDPEngineWithLMHead, **overrides)
    for (our_weights, our_metrics), (their_weights, their_metrics) in zip(ours, theirs, strict=True):
        assert all(torch.equal(our_weights[name], their_weights[name]) for name in their_weights)
        their_metrics.pop("num_forwards", None)
        assert {name: our_metrics[name] for name in their_metrics} == their_metrics
    assert any(not torch.equal(ours[0][0][name], ours[-1][0][name]) for name in ours[0][0])
    assert max(ours[0][1]["actor/pg_clipfrac_lower"]) > 0  # the dual clip had something to do


@pytest.mark.parametrize(
    ("loss_agg_mode", "loss_scale_factor"),
    [
        ("token-mean", None),
        ("token-sum", None),
        ("seq-mean-token-mean", None),
        ("seq-mean-token-sum", None),
        ("seq-mean-token-sum-norm", None),  # verl divides by the length that it pads to
        ("seq-mean-token-sum-norm", 7),
    ],
)
@pytest.mark.usefixtures("alone")
def test_the_share_is_one_of_the_gradient_in_every_aggregation(loss_agg_mode, loss_scale_factor):
    actor = make_actor(SEARCHING(), loss_agg_mode=loss_agg_mode, loss_scale_factor=loss_scale_factor, clip_ratio_c=1e6)
    actor.global_batch_info.update(loss_scale_factor=loss_scale_factor, batch_num_tokens=160)  # as verl's ppo_loss does
    generator, micro_batches = torch.Generator().manual_seed(0), []
    for length, mean in (4, 1.0), (16, -1.0):
        old = torch.randn(8, length, generator=generator)
        new = old + 0.3 * torch.randn(8, length, generator=generator)
        advantages = (mean + torch.randn(8, 1, generator=generator)).expand(-1, length)
        micro_batches.append((old, new.requires_grad_(), advantages, torch.ones(8, length)))
    choose_bounds(actor, micro_batches)
    total = positive = 0.0
    for tokens in micro_batches:
        compute_policy_loss_bapo(*tokens, loss_agg_mode=actor.loss_agg_mode, config=actor)[0].backward()
        _, log_probs, advantages, _ = tokens
        total += float(log_probs.grad.abs().sum())
        positive += float(log_probs.grad[advantages > 0].abs().sum())
    share = actor.policy_loss.update.updates[0].used.positive_share.item()
    assert share == pytest.approx(positive / total, abs=1e-5)


def test_the_released_recipe_searches_each_micro_batch_over_the_ranks(directory, batch):
    released = partial(CONFIG, preset="released")
    ranks = on_ranks(2, train, directory, batch, released, loss_agg_mode="seq-mean-token-mean")
    weights, metrics = ranks[0][0]
    rows = torch.arange(NUM_SAMPLES).view(2, 2, 4)  # rank, micro-batch, sample
    found = []
    for number in range(2):
        here = rows[:, number].flatten()
        tokens = (x[here] for x in tokens_of(directory, batch, weights))
        found.append(find_clip_bounds(*tokens, ClipConfig.preset("released")))
    assert metrics["bapo/clip_high"] == [pytest.approx(sum(f.upper.item() for f in found) / 2)]
    assert metrics["bapo/initial_share"] == [pytest.approx(sum(f.initial_share.item() for f in found) / 2, abs=1e-5)]
    assert bounds_of(ranks[0]) == bounds_of(ranks[1])
    assert ranks[0][-1][1]["num_forwards"] == 2 * NUM_STEPS


@pytest.fixture(scope="module")
def steady_ranks(directory, batch):
    policy_loss = partial(CONFIG, search=SEARCH, smoothing=dict(half_life=2.0))
    return [on_ranks(2, train, directory, batch, policy_loss, skipped=number) for number in (None, 1)]


def test_steady_bounds_follow_the_steps_before_and_need_no_forward_of_their_own(directory, batch, steady_ranks):
    config = ClipConfig(**SEARCH)
    for steps in steady_ranks[0]:
        steady = SteadyBounds(config, SmoothingConfig(half_life=2.0))
        for weights, metrics in steps[:-1]:
            assert metrics["bapo/clip_low"] == [pytest.approx(steady.lower.item(), abs=1e-6)]
            assert metrics["bapo/clip_high"] == [pytest.approx(steady.upper.item(), abs=1e-6)]
            found = steady.follow(tally_contributions(*tokens_of(directory, batch, weights), config))
            assert metrics["bapo/found_high"] == [pytest.approx(found.upper.item(), abs=1e-9)]
        assert steps[-1][1]["num_forwards"] == 2 * NUM_STEPS


def test_a_resumed_engine_goes_on_with_the_state_of_a_rule_of_ones_own_in_its_checkpoint(
    directory, batch, steady_ranks, tmp_path
):
    settings = dict(half_life=2.0, contribution="gradient", target=SEARCH["positive_contribution_target"])
    policy_loss = partial(CONFIG, rule=presets.MINE, rule_settings=settings)
    unbroken = on_ranks(2, train, directory, batch, policy_loss, saved=tmp_path)
    resumed = on_ranks(2, train, directory, batch, policy_loss, saved=tmp_path, first=1)
    for before, after, built_in in zip(unbroken, resumed, steady_ranks[0], strict=True):
        assert bounds_of(before) == bounds_of(built_in) and len(set(bounds_of(before))) == NUM_STEPS
        assert bounds_of(after) == [pytest.approx(bounds, rel=1e-6) for bounds in bounds_of(before)[1:]]
        for (_, expected), (_, found) in zip(before[1:-1], after[:-1], strict=True):
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for tensor, value in before[-1][0].items():
            assert torch.allclose(after[-1][0][tensor], value, atol=1e-7)


def test_an_update_without_active_tokens_leaves_the_share_to_the_other_updates_of_the_rollout(directory, batch):
    idle = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    (_, metrics), *_ = on_ranks(1, train, directory, idle, SEARCHING)[0]
    assert "bapo/positive_share" not in metrics and metrics["bapo/clip_frac_positive"] == [0]


def test_an_optimizer_step_that_verl_skips_leaves_no_trace_in_a_rule_that_follows_steps(steady_ranks):
    for unbroken, (first, second, third, last) in zip(*steady_ranks, strict=True):
        assert not math.isfinite(second[1]["grad_norm"])
        assert all(torch.equal(second[0][tensor], weight) for tensor, weight in third[0].items())
        assert "entropy/predicted_change" not in second[1]
        # The third step is the second of the run without the skipped one.
        for (_, ours), (_, theirs) in ((first, unbroken[0]), (third, unbroken[1])):
            assert ours["bapo/clip_high"] == pytest.approx(theirs["bapo/clip_high"], rel=1e-6)
        for tensor, weight in unbroken[2][0].items():
            assert torch.allclose(last[0][tensor], weight, atol=1e-3), tensor  # a step earlier in the schedule


def one_line_of(argv: list[str], monkeypatch, capsys) -> tuple[int | str | None, str]:
    """Exit code (if Ray would start: the policy loss's rule) and errors of our command."""
    from openrlhf_bapo import verl_main

    started = []
    with monkeypatch.context() as patch:
        patch.setattr(verl_main.main_ppo, "validate_config", validate_config)  # both are put back
        patch.setattr(verl_main.main_ppo, "run_ppo", lambda *given: started.append(given))
        example = str(pipeline.REPOSITORY / "examples/verl")
        patch.setattr(sys, "argv", ["verl_main", "--config-path", example, "--config-name", "bapo", *argv])
        capsys.readouterr()
        try:
            verl_main.main()
            ((config, runner),) = started
            assert runner is verl_main.TaskRunner
            code = config.actor_rollout_ref.actor.policy_loss.get("rule")
        except SystemExit as exit_:
            assert not started
            code = exit_.code
    return code, capsys.readouterr().err


def test_our_command_refuses_a_wrong_setting_and_a_checkpoint_of_another_rule_in_one_line_before_ray_starts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    loss = "actor_rollout_ref.actor.policy_loss"
    ours = ["data.train_files=a", "data.val_files=b", f"hydra.run.dir={tmp_path}", f"{loss}.preset=paper"]
    steady = [*ours, f"{loss}.smoothing={{half_life: 2}}"]
    saved = tmp_path / "checkpoints/global_step_1"
    rule = CONFIG(preset="paper", smoothing=dict(half_life=2.0)).update.rule
    save_rule(rule, saved / "actor/clip_rule_rank_0")
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    found = f"trainer.default_local_dir={tmp_path}/checkpoints"
    given = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    assert one_line_of([*steady, found], monkeypatch, capsys) == (None, "")
    for resume in ([found], ["trainer.default_local_dir=checkpoints"], given):
        code, error = one_line_of([*steady, *resume, f"{loss}.preset=readme"], monkeypatch, capsys)
        assert code == 2 and error.count("\n") == 1 and "but this run has config " in error, error
    assert one_line_of([*ours, found], monkeypatch, capsys) == (None, "")  # a search follows no steps
    other = [*steady, found, f"{loss}.preset=readme", "trainer.resume_mode=disable"]
    assert one_line_of(other, monkeypatch, capsys) == (None, "")
    Path("mine.py").symlink_to(pipeline.SUPPORT / "own_rules.py")
    own = [*ours, f"+{loss}.rule=mine.py:Mine", f"+{loss}.rule_settings.target=0.4"]
    assert one_line_of(own, monkeypatch, capsys) == (f"{pipeline.SUPPORT}/own_rules.py:Mine", "")
    weights = "algorithm.rollout_correction"
    tapered = [*ours, f"{loss}.tapered=True", f"{weights}.rollout_is=sequence"]
    assert one_line_of([*tapered, f"{weights}.rollout_is_threshold=1"], monkeypatch, capsys) == (None, "")
    for wrong, allowed in (
        ("rollout_is_batch_normalize=True", "only False"),
        ("rollout_is_threshold=0.5", "only a number of at least 1"),
        ("rollout_is_threshold=0.5_2.0", "only a number of at least 1"),
        ("rollout_is_threshold=null", "only a number of at least 1"),
        ("rollout_is=null", "only token and sequence"),
        ("bypass_mode=True", "only False"),
    ):
        code, error = one_line_of([*tapered, f"{weights}.{wrong}"], monkeypatch, capsys)
        given = wrong.replace("=", " ").replace("null", "None")
        said = f"{weights}.{given}: with policy_loss.tapered {allowed} "
        assert code == 2 and error.count("\n") == 1 and said in error, error
    bypass, rollout = [*ours, f"{weights}.bypass_mode=True"], "actor_rollout_ref.rollout"
    for given, user, name, value, allowed in (
        (bypass, f"{weights}.bypass_mode", "top_p", "0.9", 1),
        (bypass, f"{weights}.bypass_mode", "top_k", "50", -1),
        (bypass, f"{weights}.bypass_mode", "temperature", "0.0", "from 0.01 to 2"),
        (bypass, f"{weights}.bypass_mode", "temperature", "null", "from 0.01 to 2"),
        (bypass, f"{weights}.bypass_mode", "calculate_log_probs", "False", True),
        (
            [*bypass, f"{rollout}.temperature=0.9"],
            f"{weights}.bypass_mode",
            "logprobs_mode",
            "raw_logprobs",
            "processed_logprobs",
        ),
        (tapered, "policy_loss.tapered", "top_p", "0.9", 1),
        (tapered, "policy_loss.tapered", "calculate_log_probs", "False", True),
    ):
        code, error = one_line_of([*given, f"{rollout}.{name}={value}"], monkeypatch, capsys)
        said = f"{rollout}.{name} {value.replace('null', 'None')}: with {user} only {allowed} is allowed"
        assert code == 2 and error.count("\n") == 1 and said in error, error
    for allowed in ("top_k=0", "logprobs_mode=raw_logprobs"):
        assert one_line_of([*bypass, f"{rollout}.{allowed}"], monkeypatch, capsys) == (None, "")
    assert one_line_of([*ours, f"{rollout}.top_p=0.9"], monkeypatch, capsys) == (None, "")
    actor, given = "actor_rollout_ref.actor", "distillation.distillation_loss.use_task_rewards"
    for wrong, said in (
        ([f"{actor}.clip_ratio=0.3"], f"{actor}.clip_ratio 0.3: with BAPO only verl's default 0.2"),
        ([f"{actor}.clip_ratio_high=0.28"], f"{actor}.clip_ratio_high 0.28: with BAPO only verl's default 0.2"),
        ([f"{actor}.clip_ratio_c=1"], f"{actor}.clip_ratio_c 1: only a number above 1"),
        ([f"{actor}.clip_ratio_c=null"], f"{actor}.clip_ratio_c None: only a number above 1"),
        ([f"{actor}.clip_ratio_c=10", f"{loss}.preset=steady"], "allowed as policy_loss.search.dual_clip, here 3.0"),
        (["distillation.enabled=True", f"{given}=False"], f"{given} False: with BAPO only True"),
    ):
        code, error = one_line_of([*ours[:3], *wrong], monkeypatch, capsys)
        assert code == 2 and error.count("\n") == 1 and said in error, error
    for option, value, allowed in (
        ("rollout_is", "token", None),
        ("rollout_rs", "token_k1", None),
        ("loss_type", "reinforce", "ppo_clip"),
    ):
        code, error = one_line_of([*bypass, f"{weights}.{option}={value}"], monkeypatch, capsys)
        said = f"{weights}.{option} {value}: with BAPO in bypass_mode only {allowed} "
        assert code == 2 and error.count("\n") == 1 and said in error, error
    for allowed in (f"{actor}.clip_ratio_c=1e6", f"{actor}.clip_ratio_low=null", "distillation.enabled=True"):
        assert one_line_of([*ours, allowed], monkeypatch, capsys) == (None, "")
    with monkeypatch.context() as patch:
        patch.setenv("VERL_ENGINE_VENDOR", "mine")
        code, error = one_line_of(ours, monkeypatch, capsys)
        assert code == 2 and "VERL_ENGINE_VENDOR mine: with BAPO only bapo is allowed" in error, error
    for wrong, said in (
        (f"{loss}.preset=mine", "preset 'mine' is unknown"),
        (f"{loss}.smoothing={{half_life: 5, start: [0.7]}}", "start [0.7] is not allowed; it must be two numbers"),
        (f"+{loss}.search.ratio_upper_max='3'", "ratio_upper_max '3' is not allowed; it must be a finite number"),
        (f"+{loss}.search.smoothing={{half_life: 5}}", "policy_loss.search smoothing {'half_life': 5}: allowed as"),
        ("trainer.use_v1=False", "trainer.use_v1 False: only True is allowed"),
        ("actor_rollout_ref.actor.strategy=veomni", "actor_rollout_ref.actor.strategy veomni: with BAPO only fsdp"),
        (f"+{loss}.rule=nowhere.py:Mine", "nowhere.py:Mine: no file nowhere.py"),
        (f"+{loss}.presett=paper", "unexpected keyword argument 'presett'"),
    ):
        code, error = one_line_of([*ours, wrong], monkeypatch, capsys)
        assert code == 2 and error.count("\n") == 1 and said in error, error


def test_our_command_refuses_the_loss_without_our_target_which_workers_would_not_know():
    from openrlhf_bapo import verl_main

    policy_loss = dict(_target_="verl.workers.config.PolicyLossConfig", loss_mode="bapo")
    config = OmegaConf.create(
        dict(trainer=dict(use_v1=True), actor_rollout_ref=dict(actor=dict(policy_loss=policy_loss)))
    )
    with pytest.raises(ValueError, match="loss_mode bapo: allowed only with policy_loss"):
        verl_main._check(config)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_in_our_task_runner_verls_trainer_gives_a_group_of_equal_rewards_advantages_of_exactly_0(name, monkeypatch):
    from openrlhf_bapo import verl_main

    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    changed = (vars(core_algos), "compute_grpo_outcome_advantage"), *((registry, key) for key in verl_main.GRPO)
    for place, key in changed:
        monkeypatch.setitem(place, key, place[key])  # which is put back
    scores = torch.tensor([0.7] * 8 + [0.7, 0.1] * 4 + [10.1] * 8 + [0.3])
    mask = torch.ones(len(scores), 3)
    mask[::2, 2] = 0
    rewards = scores[:, None] * torch.tensor([0.0, 1.0, 0.0])
    groups = np.array(["a"] * 8 + ["b"] * 8 + ["c"] * 8 + ["d"], dtype=object)
    data = DataProto.from_dict(dict(response_mask=mask, token_level_rewards=rewards), dict(uid=groups))

    def advantages() -> torch.Tensor:
        keys = [f"{group}_{number}_0" for number, group in enumerate(groups)]
        found = compute_advantage_for_multi_trajectories(
            data.select(deepcopy=True), keys, adv_estimator=name, config={}
        )
        return found.batch["advantages"]

    theirs = advantages()
    verl_main._TaskRunner()
    ours = advantages()
    assert theirs[:8].abs().max() > 0.05 and theirs[16:24].abs().max() > 0.4
    assert (ours[:8] == 0).all() and (ours[16:24] == 0).all()
    assert torch.equal(ours[8:16], theirs[8:16]) and torch.equal(ours[24:], theirs[24:])


def test_balanced_weighs_each_optimizer_step_by_all_of_its_tokens(directory, batch):
    policy_loss = partial(CONFIG, rule="balanced", rule_settings=dict(target=0.9))
    ranks = on_ranks(2, train, directory, batch, policy_loss)
    for weights, metrics in ranks[0][:-1]:
        ratio, advantages, mask = tokens_of(directory, batch, weights)
        tapered = torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0)) * advantages.abs() * mask
        scale = float(tapered[advantages > 0].sum() / tapered[advantages < 0].sum()) / 9
        assert scale < 1 and metrics["bapo/negative_weight"] == [pytest.approx(scale, rel=1e-4)]
        assert metrics["bapo/positive_share"] == [pytest.approx(0.9, abs=1e-4)]
        assert len(metrics["actor/ppo_kl"]) == 2 and all(metrics["actor/ppo_kl"])  # against the old policy
    assert ranks[0][-1][1]["num_forwards"] == 2 * 2 * NUM_STEPS
    assert any(not torch.equal(ranks[0][0][0][name], ranks[0][-1][0][name]) for name in ranks[0][0][0])


@pytest.mark.usefixtures("alone")
def test_a_rules_weights_are_multiplied_by_verls_rollout_correction():
    actor = make_actor(CONFIG(rule="topr"), clip_ratio_c=1e6)
    choose_bounds(actor, [])
    tokens, found = presets.make_updates()[0][0], []
    correction = torch.linspace(0.5, 1.5, tokens["mask"].numel()).view(tokens["mask"].shape)
    for weights in (None, correction):
        given = arguments(tokens)
        compute_policy_loss_bapo(*given, config=actor, rollout_is_weights=weights)[0].backward()
        found.append(given[1].grad)
    plain, corrected = found
    torch.testing.assert_close(corrected, correction * plain)
    assert plain.abs().max() > 0


@pytest.mark.parametrize("preset", ["paper", "steady"])
@pytest.mark.usefixtures("alone")
def test_tapered_weights_are_the_openrlhf_commands(preset):
    actor = make_actor(CONFIG(preset=preset, tapered=True), clip_ratio_c=1e6)
    update, tokens = actor.policy_loss.update, presets.make_updates()[0][0]
    given, mask, advantages = arguments(tokens), tokens["mask"], tokens["advantages"]
    s = torch.linspace(0.3, 1.7, mask.numel()).view(mask.shape)
    choose_bounds(actor, [given], rollout_is_weights=s)
    with pytest.raises(RuntimeError, match=r"policy_loss.tapered True: there is no rollout correction"):
        compute_policy_loss_bapo(*given, config=actor)
    compute_policy_loss_bapo(*given, config=actor, rollout_is_weights=s)[0].backward()

    weights = torch.where(advantages > 0, 1.0, s.clamp(max=1.0))
    ratio = (tokens["log_probs"] - tokens["old_log_probs"]).exp()
    lower, upper = float(update.rule.lower), float(update.rule.upper)
    if update.rule.needs_tally_first:
        found = find_clip_bounds(ratio, advantages, weights * mask, update.rule.config)
        assert (float(found.lower), float(found.upper)) == (lower, upper)
    most = actor.clip_ratio_c  # the preset's dual clip
    inside = torch.where(advantages > 0, ratio <= upper, (ratio >= lower) & (ratio <= most))
    expected = -torch.where(inside, weights * ratio * advantages, 0.0) * mask / mask.sum()
    torch.testing.assert_close(given[1].grad, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", presets.NAMES)
@pytest.mark.usefixtures("alone")
def test_a_rule_has_the_plain_loops_bounds_and_gradient(name):
    policy_loss = CONFIG(**{"preset" if name in PRESETS else "rule": name})
    actor, found = make_actor(policy_loss, clip_ratio_c=1e6), []
    for update in presets.make_updates():
        parts = [arguments(tokens) for tokens in update]
        choose_bounds(actor, parts)
        for part in parts:
            compute_policy_loss_bapo(*part, config=actor)[0].backward()
            found.append((1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high, part[1].grad))
        if not policy_loss.update.rule.needs_tally_first:
            policy_loss.update.close_update()
    presets.assert_same(found, name)


def test_divergence_has_the_gradient_of_verls_own_dppo():
    found = []
    threshold = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)  # verl caps the ratio too
    for given in (arguments(each) for update in presets.make_updates() for each in update):
        actor = make_actor(PolicyLossConfig(), **threshold)
        core_algos.compute_policy_loss_dppo_tv(*given, config=actor)[0].backward()
        found.append(given[1].grad)
    for gradient, (*_, expected) in zip(found, presets.plain_loop("divergence"), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-8)


def test_the_examples_config_is_verls_with_bapos_loss_and_chooses_its_engine(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    example = pipeline.REPOSITORY / "examples" / "verl"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = subprocess.run(["bash", example / "train.sh"], env=environment, capture_output=True, text=True, check=True)
    with initialize_config_dir(str(example), version_base=None):
        config = compose("bapo", overrides=[word for word in given.stdout.split() if "=" in word])
    needs = need_reference_policy(config), need_critic(config)
    assert needs == (False, False)
    validate_config(config, *needs)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, BapoPolicyLossConfig)
    assert EngineRegistry.get_engine_cls("language_model", actor.strategy) is BapoFSDPEngine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(loss_mode="vanilla"), "policy_loss.loss_mode 'vanilla' is not allowed"),
        (dict(scope="rank"), "scope 'rank' is not allowed"),
        (dict(preset="mine"), "preset 'mine' is unknown"),
        (dict(rule="mine"), "policy_loss.rule 'mine' is unknown; allowed: m2, .*balanced"),
        (dict(rule="topr", preset="steady"), "policy_loss.rule 'topr' is allowed only without preset"),
        (dict(rule="topr", search=SEARCH), "policy_loss.rule 'topr' is allowed only without preset"),
        (dict(rule="topr", scope="update"), "policy_loss.rule 'topr' is allowed only without preset"),
        (dict(rule="topr", rule_settings=dict(budget=1.0)), "'budget' is unknown with rule topr; allowed: level"),
        (dict(rule="m2", rule_settings=dict(budget=0.0)), "budget 0.0 is not allowed"),
        (dict(rule="m2", rule_settings=dict(budget="much")), "budget 'much': allowed: float"),
        (dict(rule_settings=dict(budget=1.0)), "rule_settings .*not allowed without rule"),
        (dict(search=dict(ratio_lower_max=2.0)), "ratio_lower_max 2.0 is not allowed"),
        (dict(search=dict(ratio=2.0)), "policy_loss.search 'ratio' is unknown; allowed: positive_contribution_target"),
        (dict(search=dict(scope="update"), scope="micro_batch"), "search scope 'update': allowed as policy_loss.scope"),
        (dict(search=None), "policy_loss.search None is not allowed; it must be a mapping"),
        (dict(smoothing=20), "policy_loss.smoothing 20 is not allowed; it must be a mapping with half_life"),
        (dict(preset="steady", smoothing=False), "policy_loss.smoothing False is not allowed"),
        (dict(smoothing=dict(halflife=2)), "policy_loss.smoothing 'halflife' is unknown; allowed: half_life, of, "),
        (dict(smoothing=dict(of="tally")), "half_life None is not allowed"),
        (dict(rule="m2", rule_settings=None), "policy_loss.rule_settings None is not allowed"),
        (dict(rule=["m2"]), r"policy_loss.rule \['m2'\] is not allowed"),
        (dict(preset=["paper"]), r"preset \['paper'\] is unknown"),
        (dict(tapered="false"), "policy_loss.tapered 'false' is not allowed; it must be True or False"),
        (dict(rule="own_rules:Mines"), "own_rules has no class 'Mines'"),
        (dict(rule="topr", tapered=True), "policy_loss.tapered True is not allowed with rule topr"),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CONFIG(**settings)


def test_a_scope_is_taken_in_place_of_the_presets():
    rule = CONFIG(preset="paper", scope="micro_batch").update.rule
    assert rule.config == replace(ClipConfig.preset("paper"), scope="micro_batch")


@pytest.mark.usefixtures("alone")
def test_the_search_takes_a_ratio_as_verls_loss_does_between_e_to_the_minus_20_and_e_to_the_20():
    log_probs, advantages = torch.tensor([[0.0, 200.0]]), torch.tensor([[1.0, -1.0]])
    tokens = dict(log_probs=log_probs, old_log_probs=torch.zeros(1, 2), advantages=advantages, mask=torch.ones(1, 2))
    actor = make_actor(SEARCHING(), clip_ratio_c=1e6)
    choose_bounds(actor, [arguments(tokens)])
    share = actor.policy_loss.update.updates[0].used.initial_share.item()
    assert share == pytest.approx(1 / (1 + math.exp(20)), rel=1e-6)


def test_another_engine_than_bapos_is_refused_and_the_users_choice_of_one_stays(directory, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_ENGINE_VENDOR", "mine")
        assert on_ranks(1, refused, directory, batch, FSDPEngineWithLMHead) == [
            "mine; allowed: strategy fsdp or fsdp2, VERL_ENGINE_VENDOR bapo"
        ]


class Asking(BapoFSDPEngine):
    """Asks for the loss once more when an optimizer step is over."""

    def train_batch(self, data, loss_function):
        super().train_batch(data, loss_function)
        self.infer_batch(data, loss_function)


def test_a_loss_outside_an_optimizer_step_is_refused(directory, batch):
    steady = partial(CONFIG, preset="steady")
    assert on_ranks(1, refused, directory, batch, Asking, steady)


def refused(rank, directory, batch, make, policy_loss=SEARCHING):
    with pytest.raises(RuntimeError, match="policy loss bapo: strategy fsdp2, VERL_ENGINE_VENDOR ") as raised:
        train(rank, directory, batch, policy_loss, make=make)
    return str(raised.value).split("VERL_ENGINE_VENDOR ", 1)[1]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (BaseEngine.train_batch, "self.forward_backward_batch(data, loss_function, forward_only=False)"),
        (BaseEngine.infer_batch, "self.forward_backward_batch(data, loss_function, forward_only=True)"),
        (EngineRegistry.get_engine_cls, 'os.getenv("VERL_ENGINE_VENDOR")'),
        (FSDPEngineWithLMHead.forward_step, "if loss_function is not None:"),
        (core_algos.compute_policy_loss_vanilla, "config.clip_ratio_low if config.clip_ratio_low is not None"),
        (core_algos.compute_policy_loss_vanilla, "torch.clamp(negative_approx_kl, min=-20.0, max=20.0)"),
        (core_algos.compute_policy_loss_vanilla, "ratio, 1 - cliprange_low, 1 + cliprange_high"),
        (engine_workers, "self.loss_fn = partial(ppo_loss, config=actor_config)"),
        (engine_workers, "list(chain.from_iterable(val))"),
    ],
)
def test_verl_calls_the_loss_and_chooses_the_engine_where_the_adapter_expects_it(where, text):
    assert text in inspect.getsource(where)


if __name__ == "__main__":
    sys.exit(pytest.main(["--noconftest", "-q", "-rA", "-p", "no:cacheprovider", __file__, *sys.argv[1:]]))
