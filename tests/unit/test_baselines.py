"""METHOD's baselines: which bounds each trains with, and that they log share, bounds and lengths as bapo does."""

import functools
import math
import shlex
import subprocess
from statistics import fmean
from types import SimpleNamespace

import pipeline
import pytest
import reference
import torch

from openrlhf_bapo.openrlhf.trainer import lengths_by_sign
from openrlhf_bapo.rules.other_rules import RULES, default_settings

SCRIPTS = ("qwen32b", "qwen7b", "octothinker3b", "async_partial", "partial")


@functools.cache
def script(name: str, **environment) -> subprocess.CompletedProcess:
    """The training command of one of scripts/train_bapo_*.sh, not run."""
    return subprocess.run(
        ["env", *(f"{key}={value}" for key, value in environment.items()), "bash", f"scripts/train_bapo_{name}.sh"],
        cwd=pipeline.REPOSITORY,
        capture_output=True,
        text=True,
    )


def arguments(name: str, **environment):
    """Return the arguments that a recipe would train with."""
    args = pipeline.parse(shlex.split(script(name, DRY_RUN="command", **environment).stdout)[2:])
    args.logger.wandb.run_name = None  # has the minute in which it was parsed
    return args


@pytest.mark.parametrize("recipe", SCRIPTS)
@pytest.mark.parametrize(
    ("environment", "eps"),
    [
        (dict(METHOD="grpo"), [0.2, 0.2]),
        (dict(METHOD="clip_higher"), [0.2, 0.28]),
        (dict(METHOD="static"), [0.2, 0.5]),
        (dict(METHOD="static", CLIP_EPS="0.5 0.2"), [0.5, 0.2]),
    ],
    ids=["grpo", "clip_higher", "static", "static, the other pair"],
)
def test_a_fixed_baseline_is_openrlhfs_loss_at_its_bounds_against_bapos_ratio(recipe, environment, eps):
    args = arguments(recipe, **environment)
    assert (args.policy_loss, args.actor.policy_loss_type) == ("ppo", "ppo")
    assert list(args.actor.eps_clip_low_high) == eps
    assert args.actor.entropy_coef == 0
    assert args.offpolicy.ratio_base == arguments(recipe, METHOD="bapo").offpolicy.ratio_base is not None


@pytest.mark.parametrize("recipe", SCRIPTS)
@pytest.mark.parametrize(("method", "level"), [("stock", "off"), ("stock_is", "token")])
def test_stock_is_openrlhfs_loss_against_its_own_denominator_and_stock_is_with_its_own_correction(
    recipe, method, level
):
    args, grpo = arguments(recipe, METHOD=method), arguments(recipe, METHOD="grpo")
    assert args.offpolicy.ratio_base == "recomputed"
    correction = args.algo.advantage
    assert (correction.is_correction_level, correction.is_correction_mode) == (level, "mask")
    assert (correction.is_correction_gating, correction.is_correction_threshold) == ("ratio", [0.5, 5.0])
    args.offpolicy.ratio_base, correction.is_correction_level = grpo.offpolicy.ratio_base, "off"
    assert args == grpo


@pytest.mark.parametrize("recipe", SCRIPTS)
@pytest.mark.parametrize(("method", "plain"), [("tapered", "grpo"), ("bapo_tapered", "bapo")])
def test_a_tapered_method_is_the_plain_one_on_the_decoupled_ratio_with_tapered_weights(recipe, method, plain):
    args, expected = arguments(recipe, METHOD=method), arguments(recipe, METHOD=plain)
    offpolicy = args.offpolicy
    assert (offpolicy.objective, offpolicy.weight, offpolicy.weight_level) == ("decoupled", "tapered", "sequence")
    args.offpolicy = expected.offpolicy
    assert args == expected


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_bapo_and_bapo_gradient_differ_in_the_contribution_alone(recipe):
    default, bapo, gradient = (
        arguments(recipe, **env) for env in ({}, {"METHOD": "bapo"}, {"METHOD": "bapo_gradient"})
    )
    assert bapo == (arguments(recipe, PRESET="paper") if "partial" in recipe else default) != gradient
    assert (bapo.bapo.contribution, gradient.bapo.contribution) == ("surrogate", "gradient")
    gradient.bapo.contribution = "surrogate"
    assert gradient == bapo


@pytest.mark.parametrize("method", RULES)
def test_another_rule_is_its_policy_loss_with_the_classs_settings(method):
    args = arguments("qwen7b", METHOD=method)
    assert args.policy_loss == method and vars(getattr(args, method)) == default_settings(method)
    assert args.actor.entropy_coef == 0
    assert args.offpolicy.ratio_base == arguments("qwen7b").offpolicy.ratio_base


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_updates_and_epochs_make_the_papers_staleness(recipe):
    args = arguments(recipe, UPDATES=8, EPOCHS=3)
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    assert (samples // args.train.batch_size, samples % args.train.batch_size, args.train.max_epochs) == (8, 0, 3)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            dict(METHOD="dapo"),
            "METHOD=dapo: allowed: grpo, clip_higher, static, stock, stock_is, tapered, bapo, bapo_gradient, "
            "bapo_tapered, m2, divergence, topr, balanced, FILE.py:CLASS\n",
        ),
        (dict(UPDATES=7), "UPDATES=7: allowed: divisors of the 2048 samples of a rollout (PROMPTS x SAMPLES)\n"),
        (dict(UPDATES=0), "UPDATES=0: allowed: whole numbers of 1 or more\n"),
    ],
)
def test_another_method_or_number_of_updates_is_refused_in_one_line(environment, message):
    run = script("qwen7b", DRY_RUN="command", **environment)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


# ---- OpenRLHF's policy actor, float32 ----

LENGTHS = [3, 5, 2, 7]
LOG_RATIOS = [0.3, -0.2, 0.1, -0.7]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


def samples_with_both_signs() -> list:
    """Four samples whose tokens have advantages of both signs and one 0, and a known distance from the policy."""
    samples = pipeline.make_experience(LENGTHS)
    for i, (sample, log_ratio) in enumerate(zip(samples, LOG_RATIOS, strict=True)):
        generator = torch.Generator().manual_seed(i)
        advantages = torch.randn(sample.action_mask.shape, generator=generator) * sample.action_mask
        advantages[:, -1] = 0
        advantages[:, 3] = advantages[:, 3].abs() * (-1) ** i
        sample.advantages = sample.returns = advantages
        sample.info["log_ratio"] = torch.tensor([log_ratio])
        sample.optimizer_steps = 10 * i * sample.action_mask
    return samples


def tokens(samples: list, log_ratios: list[float] = LOG_RATIOS) -> list[tuple[float, float, float]]:
    """(ratio, advantage, weight) of every action token."""
    return [
        (math.exp(log_ratio), advantage, 1.0)
        for sample, log_ratio in zip(samples, log_ratios, strict=True)
        for advantage in sample.advantages[sample.action_mask > 0].tolist()
    ]


def share(some_tokens: list, lower: float, upper: float, contribution: str) -> float:
    positive, negative = reference.contributions(some_tokens, lower, upper, contribution)
    return positive / (positive + negative)


def train(directory, samples_by_rank: list, **flags) -> dict:
    """Return the first rank's report of one training step."""
    return train_steps(directory, samples_by_rank, 1, **flags)[0]


def train_steps(directory, samples_by_rank: list, num_steps: int, **flags) -> list[dict]:
    """The same of several training steps; a learning rate of 0 keeps every ratio as it was made."""
    defaults = dict(
        policy_loss="ppo",
        offpolicy__ratio_base="auto",
        actor__adam__lr=0,
        actor__num_gpus_per_node=len(samples_by_rank),
        train__batch_size=4,
        train__micro_batch_size=1,
        rollout__batch_size=1,
        rollout__n_samples_per_prompt=4,
        rollout__micro_batch_size=1,
    )
    argv = pipeline.flags(directory, **defaults | flags)
    return pipeline.train_policy_actors(directory, argv, samples_by_rank, num_steps=num_steps)[0]["statuses"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ppo_logs_the_share_of_the_whole_update_at_its_fixed_bounds(directory, num_ranks):
    samples = samples_with_both_signs()
    by_rank = [samples[rank::num_ranks] for rank in range(num_ranks)]
    status = train(directory, by_rank, actor__eps_clip="0.25")
    everything = tokens(samples)
    for contribution in ("surrogate", "gradient"):
        expected = share(everything, 0.75, 1.25, contribution)
        assert status[f"bapo/{contribution}_share"] == pytest.approx(expected, rel=1e-5)
    assert status["bapo/positive_share"] == status["bapo/surrogate_share"]
    assert (status["bapo/clip_low"], status["bapo/clip_high"]) == (0.75, 1.25)
    positive = [ratio for ratio, advantage, _ in everything if advantage > 0]
    negative = [ratio for ratio, advantage, _ in everything if advantage < 0]
    assert status["bapo/positive_token_frac"] == pytest.approx(len(positive) / len(positive + negative))
    assert status["bapo/clip_frac_positive"] == pytest.approx(fmean(ratio > 1.25 for ratio in positive))
    assert status["bapo/clip_frac_negative"] == pytest.approx(fmean(ratio < 0.75 for ratio in negative))
    assert not {"bapo/target_reached", "bapo/initial_share"} & status.keys()  # nothing was searched for


def test_ppos_share_is_the_mean_over_the_updates_of_a_training_step(directory):
    samples = samples_with_both_signs()
    status = train(directory, [samples], train__batch_size=1)  # four updates, in whatever order
    shares = [
        share(tokens([sample], [log_ratio]), 0.8, 1.2, "surrogate")
        for sample, log_ratio in zip(samples, LOG_RATIOS, strict=True)
    ]
    assert status["bapo/positive_share"] == pytest.approx(fmean(shares), rel=1e-5)
    assert status["bapo/positive_share"] != pytest.approx(share(tokens(samples), 0.8, 1.2, "surrogate"), rel=1e-3)


def test_a_lower_distance_of_one_or_more_is_measured_as_a_bound_that_never_clips(directory):
    status = train(directory, [samples_with_both_signs()], actor__eps_clip="1.5")
    assert status["bapo/clip_frac_negative"] == 0 and status["bapo/clip_low"] < 1e-8


# ---- Staleness in optimizer steps ----

NUM_BEHIND = [10 * i for i, length in enumerate(LENGTHS) for _ in range(length)]


@pytest.mark.parametrize(
    "flags",
    [
        {},  # micro-batches of one update are no steps
        dict(train__dynamic_batch_enable=True, train__max_tokens_per_gpu=12),
        dict(ds__zero_stage=3),
        dict(policy_loss="bapo"),
    ],
    ids=["accumulated", "dynamic batch", "ZeRO-3", "bapo"],
)
def test_a_tokens_optimizer_steps_count_those_before_and_within_the_training_step(directory, flags):
    status = train(directory, [samples_with_both_signs()], train__max_epochs=3, **flags)
    assert status["offpolicy/optimizer_steps_taken"] == 3
    assert status["offpolicy/optimizer_steps_max"] == 30 + 2
    assert status["offpolicy/optimizer_steps_mean"] == pytest.approx(fmean(NUM_BEHIND) + 1)


def test_eight_updates_a_rollout_are_no_version_and_up_to_seven_optimizer_steps(directory):
    samples = samples_with_both_signs()
    for sample in samples:
        sample.optimizer_steps = 0 * sample.action_mask
    for status in train_steps(directory, [samples], 2, train__batch_size=1, train__max_epochs=2):
        assert status["offpolicy/optimizer_steps_taken"] == 8
        assert (status["offpolicy/staleness_max"], status["offpolicy/optimizer_steps_max"]) == (0, 7)


# ---- Response lengths by sign ----


def test_lengths_by_sign_are_means_over_samples_and_a_sign_without_samples_is_left_out():
    def batch(advantages, lengths):
        mask = torch.arange(9).expand(len(lengths), 9) < torch.tensor(lengths)[:, None]
        garbage = torch.where(mask, torch.tensor(advantages)[:, None], -1e9)  # what padding holds does not count
        return SimpleNamespace(advantages=garbage * mask, action_mask=mask, response_length=torch.tensor(lengths))

    found = lengths_by_sign([batch([1.0, -0.5, 0.0], [3, 8, 9]), batch([2.0, -1.0], [4, 5])])
    assert found == {
        "rollout/response_length_positive_mean": 3.5,
        "rollout/response_length_negative_mean": 6.5,
    }
    assert lengths_by_sign([batch([0.0, 1.0], [3, 4])]) == {"rollout/response_length_positive_mean": 4.0}


def test_gaes_advantages_decide_by_their_sum_over_the_response():
    advantages = torch.tensor([[3.0, -1.0, -1.0, 5.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    sample = SimpleNamespace(advantages=advantages, action_mask=mask, response_length=torch.tensor([3]))
    assert lengths_by_sign([sample]) == {"rollout/response_length_positive_mean": 3.0}
