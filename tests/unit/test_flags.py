"""Our flags: mistakes are refused in one line before slow imports, and the others resolve to their settings."""

import argparse
import re
import subprocess
import sys
from dataclasses import astuple, replace

import pipeline
import pytest

from openrlhf_bapo import ClipConfig, SmoothingConfig
from openrlhf_bapo.flags import arguments
from openrlhf_bapo.flags.train_flags import add_flags, check_flags
from openrlhf_bapo.offpolicy.replay_pool import ReplayConfig
from openrlhf_bapo.openrlhf.settings import has_proximal_ratio, is_off_policy, replay_config_from_args
from openrlhf_bapo.openrlhf.trainer import evaluate_at_start
from openrlhf_bapo.rules.clip_config import SEARCH_FIELDS
from openrlhf_bapo.rules.other_rules import RULES, default_settings
from openrlhf_bapo.rules.settings import clip_config_from_args, clip_rule_from_args


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--policy_loss bapo --bapo.positive_contribution_target 1.5",
            r"--bapo.positive_contribution_target 1.5 .*(0, 1)",
        ),
        ("--policy_loss bapo --bapo.ratio_lower_start 0.95", "--bapo.ratio_lower_start 0.95 .*<= ratio_lower_max"),
        ("--policy_loss bapo --bapo.ratio_lower_max 1.2", "--bapo.ratio_lower_max 1.2 .*<= 1"),
        ("--policy_loss bapo --bapo.ratio_upper_start 0.8", "--bapo.ratio_upper_start 0.8 .*1 <= "),
        ("--policy_loss bapo --bapo.ratio_upper_step 0", "--bapo.ratio_upper_step 0.0 .*above 0"),
        ("--policy_loss bapo --bapo.ratio_upper_step -0.1", "--bapo.ratio_upper_step -0.1 .*above 0"),
        ("--policy_loss bapo --bapo.ratio_upper_max nan", "--bapo.ratio_upper_max nan .*finite"),
        ("--policy_loss bapo --bapo.ratio_upper_max two", "--bapo.ratio_upper_max: .*'two'"),
        ("--policy_loss bapo --bapo.preset best", "--bapo.preset: .*'best'.*readme"),
        ("--policy_loss bapo --bapo.scope epoch", "--bapo.scope: .*'epoch'.*update"),
        ("--policy_loss dapo", "--policy_loss: .*'dapo'.*ppo.*gspo.*bapo.*m2.*divergence.*topr.*balanced"),
        ("--policy_loss m2 --m2.budget 0", "--m2.budget 0.0 .*above 0"),
        ("--policy_loss m2 --m2.budget nan", "--m2.budget nan .*above 0"),
        ("--policy_loss m2 --m2.half_life -1", "--m2.half_life -1.0 .*0 or more"),
        ("--policy_loss divergence --divergence.threshold 1", "--divergence.threshold 1.0 .*(0, 1)"),
        ("--policy_loss topr --topr.level batch", "--topr.level: .*'batch'.*token.*sequence"),
        ("--policy_loss balanced --balanced.target 1", "--balanced.target 1.0 .*(0, 1)"),
        ("--policy_loss balanced --balanced.half_life inf", "--balanced.half_life inf .*finite"),
        ("--policy_loss balanced --balanced.level batch", "--balanced.level: .*'batch'.*token.*sequence"),
        ("--policy_loss bapo --m2.budget 0.1", "--m2.budget 0.1: .*--policy_loss m2, not bapo"),
        ("--policy_loss m2 --balanced.half_life 9", "--balanced.half_life 9.0: .*--policy_loss balanced, not m2"),
        ("--topr.level token", "--topr.level token: .*--policy_loss topr, not ppo"),
        ("--policy_loss m2 --bapo.preset paper", "--bapo.preset paper: .*--policy_loss bapo, not m2"),
        ("--policy_loss m2 --bapo.discard_saved", "--bapo.discard_saved: .*--m2.half_life or --balanced.half_life"),
        ("--policy_loss topr --bapo.dump_tokens 5", "--bapo.dump_tokens 5: .*ppo, bapo, m2 or divergence, not topr"),
        ("--policy_loss bapo --bapo.smoothing -1", "--bapo.smoothing -1.0: .*allowed: 0 and above"),
        ("--policy_loss bapo --bapo.smoothing nan", "--bapo.smoothing nan: .*allowed: 0 and above"),
        ("--policy_loss bapo --bapo.smoothing inf", "--bapo.smoothing inf: .*allowed: 0 and above"),
        ("--policy_loss bapo --bapo.smoothing_of tally", "--bapo.smoothing_of tally: .*--bapo.smoothing above 0"),
        ("--policy_loss bapo --bapo.smoothing_start 0.7 2", r"--bapo.smoothing_start \[0.7, 2.0\]: .*above 0"),
        ("--policy_loss bapo --bapo.discard_saved", "--bapo.discard_saved True: .*--bapo.smoothing above 0"),
        ("--policy_loss bapo --bapo.preset released --bapo.smoothing 9", "--bapo.smoothing 9.0: .*--bapo.scope update"),
        ("--policy_loss bapo --bapo.smoothing 9 --bapo.smoothing_of all", "--bapo.smoothing_of: .*'all'.*bounds"),
        (
            "--policy_loss bapo --bapo.preset steady --bapo.smoothing_start 0.5 2",
            r"--bapo.smoothing_start \(0.5, 2.0\) .*lower bound must lie in \[0.6, 0.9\]",
        ),
        ("--policy_loss ppo --bapo.smoothing 9", "--bapo.smoothing 9.0: .*--policy_loss bapo, not ppo"),
        ("--policy_loss gspo --bapo.preset paper", "--bapo.preset paper: .*--policy_loss bapo.*gspo"),
        ("--bapo.max_skipped_updates -1", "--bapo.max_skipped_updates -1: allowed: 0 or more"),
        ("--reward_fault.patience -1", "--reward_fault.patience -1: allowed: 0 or more seconds"),
        ("--reward_fault.patience inf", "--reward_fault.patience inf: allowed: 0 or more seconds"),
        ("--reward_fault.timeout 0", "--reward_fault.timeout 0: allowed: seconds above 0"),
        ("--reward_fault.timeout nan", "--reward_fault.timeout nan: allowed: seconds above 0"),
        ("--reward_fault.max_drop_rate 1", "--reward_fault.max_drop_rate 1: allowed: from 0, below 1"),
        ("--reward_fault.max_drop_rate -0.1", "--reward_fault.max_drop_rate -0.1: allowed: from 0, below 1"),
        ("--replay.ratio -1", "--replay.ratio -1.0 .*at least 0"),
        ("--replay.capacity 0", "--replay.capacity 0 .*at least 1"),
        ("--replay.ratio 1 --replay.max_staleness -1", "--replay.max_staleness -1 .*at least 0"),
        ("--replay.strategy best", "--replay.strategy: .*'best'.*uniform"),
        ("--partial.token_budget -1", "--partial.token_budget -1 .*at least 0"),
        ("--partial.token_budget 9 --partial.oversample 0.5", "--partial.oversample 0.5 .*at least 1"),
        ("--partial.token_budget 9 --partial.max_segments -1", "--partial.max_segments -1 .*at least 0"),
        ("--partial.token_budget 9 --partial.max_staleness -1", "--partial.max_staleness -1 .*at least 0"),
        ("--partial.on_stale keep", "--partial.on_stale: .*'keep'.*drop.*finish"),
        ("--policy_loss gspo --partial.token_budget 9", "--partial.token_budget 9: .*every --policy_loss but gspo"),
        (
            "--policy_loss bapo --partial.token_budget 9 --offpolicy.ratio_base recomputed",
            "--offpolicy.ratio_base recomputed: .*--partial.token_budget 9; allowed: auto, rollout; also recomputed "
            "with --policy_loss ppo",
        ),
        ("--policy_loss gspo --replay.ratio 1", "--replay.ratio 1.0: .*every --policy_loss but gspo"),
        (
            "--policy_loss gspo --offpolicy.ratio_base rollout",
            "--offpolicy.ratio_base rollout: .*every --policy_loss but gspo",
        ),
        (
            "--policy_loss gspo --offpolicy.objective decoupled",
            "--offpolicy.objective decoupled: .*ppo, bapo, m2 or divergence, not gspo",
        ),
        (
            "--policy_loss topr --offpolicy.objective decoupled",
            "--offpolicy.objective decoupled: .*ppo, bapo, m2 or divergence, not topr",
        ),
        (
            "--offpolicy.objective decoupled --offpolicy.ratio_base rollout",
            "--offpolicy.ratio_base rollout: allowed with --offpolicy.objective decoupled: auto, recomputed",
        ),
        ("--offpolicy.objective both", "--offpolicy.objective: .*'both'.*behavior.*decoupled"),
        ("--bapo.ratio_upper_max 2.5", "--bapo.ratio_upper_max 2.5: .*--policy_loss bapo.*ppo"),
    ],
)
def test_a_mistake_in_our_flags_is_one_line_with_flag_value_and_range(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        check_flags(argv.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message.replace("(0, 1)", r"\(0, 1\)"), error), error


def test_the_command_refuses_before_it_loads_ray_or_openrlhf():
    command = [sys.executable, "-X", "importtime", "-m", "openrlhf_bapo.cli.train_ppo_ray"]
    run = subprocess.run([*command, "--policy_loss", "bapo", "--bapo.preset", "best"], capture_output=True, text=True)
    assert run.returncode == 2
    loaded = {line.split("|")[-1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "openrlhf_bapo.flags.train_flags" in loaded
    assert not loaded & {"ray", "vllm", "deepspeed", "transformers", "openrlhf.models"}


DECOUPLED = dict(offpolicy__objective="decoupled")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(policy_loss="bapo", actor__policy_loss_type="gspo"), "--actor.policy_loss_type ppo, not gspo"),
        (dict(policy_loss="bapo", actor__eps_clip="0.3"), "--actor.eps_clip .*--bapo.ratio_lower_start"),
        (dict(policy_loss="m2", actor__eps_clip="0.3"), "--actor.eps_clip .*not allowed with --policy_loss m2"),
        (dict(policy_loss="topr", actor__eps_clip="0.3"), "--actor.eps_clip .*not allowed with --policy_loss topr"),
        (dict(policy_loss="topr", actor__dual_clip="3"), "--actor.dual_clip 3.0: .*allowed with ppo, bapo, m2, div"),
        (
            dict(policy_loss="balanced", algo__advantage__is_correction_level="seq"),
            "--algo.advantage.is_correction_level seq: .*--policy_loss balanced: off",
        ),
        (dict(policy_loss="m2", actor__policy_loss_type="gspo"), "--policy_loss m2: .*--actor.policy_loss_type ppo"),
        (dict(eval__at_start=True, train__async_enable=True), "--eval.at_start: .*--train.async_enable"),
        (
            dict(policy_loss="bapo", train__async_enable=True, offpolicy__ratio_base="recomputed"),
            "--offpolicy.ratio_base recomputed: .*--train.async_enable; allowed: auto, rollout",
        ),
        (
            dict(policy_loss="bapo", train__async_enable=True, algo__advantage__is_correction_level="token"),
            "--algo.advantage.is_correction_level token: .*second time.*: off",
        ),
        (
            dict(partial__token_budget=9, train__agent_func_path="agent.py"),
            "--partial.token_budget 9: .*allowed without --train.agent_func_path",
        ),
        (
            dict(partial__token_budget=9, algo__advantage__is_correction_level="token"),
            "--algo.advantage.is_correction_level token: .*second time.*: off",
        ),
        (
            dict(partial__token_budget=9, rollout__vllm_generate_batch_size=32, train__async_enable=True),
            "--rollout.vllm_generate_batch_size 32: --partial.token_budget.*--rollout.batch_size 16",
        ),
        (
            dict(partial__token_budget=9, data__max_images_per_prompt=1),
            "--partial.token_budget 9: allowed without --data.max_images_per_prompt",
        ),
        (dict(replay__ratio=0.25), "--replay.ratio 0.25: draws 4 groups .*at least 8"),
        (dict(replay__ratio=1, train__batch_size=48), "--train.batch_size 48: .*--replay.ratio.*64"),
        (
            dict(replay__ratio=1, rollout__n_samples_per_prompt=1, rollout__batch_size=64),
            "--replay.skip_uninformative: .*--no-replay.skip_uninformative",
        ),
        (
            dict(replay__ratio=0.5, rollout__n_samples_per_prompt=6),
            "--replay.ratio 0.5: draws 8 groups per training step; allowed: a ratio that draws at least 16",
        ),
        (dict(replay__ratio=1, data__max_images_per_prompt=1), "--replay.ratio 1.0: .*without --data.max_images"),
        (
            dict(offpolicy__ratio_base="rollout", algo__advantage__is_correction_level="seq"),
            "--algo.advantage.is_correction_level seq: .*second time",
        ),
        (
            dict(offpolicy__objective="decoupled", algo__advantage__is_correction_level="off"),
            "--algo.advantage.is_correction_level off: is --offpolicy.weight none or tapered; allowed: token, seq",
        ),
        (
            dict(offpolicy__weight="tapered"),
            "--offpolicy.weight tapered: would count staleness twice .*--offpolicy.objective decoupled",
        ),
        (
            dict(offpolicy__weight_level="token"),
            "--offpolicy.weight_level token: would count staleness twice .*--offpolicy.objective decoupled",
        ),
        (DECOUPLED | dict(offpolicy__weight_level="token"), "--offpolicy.weight_level token: .*masked or tapered"),
        (
            DECOUPLED | dict(offpolicy__weight="capped", offpolicy__weight_level="sequence"),
            "--offpolicy.weight_level sequence: allowed with --offpolicy.weight masked or tapered, not capped",
        ),
        (
            DECOUPLED | dict(offpolicy__weight="tapered", algo__advantage__is_correction_level="token"),
            "--algo.advantage.is_correction_level token: weighs tokens too; .*--offpolicy.weight tapered: off",
        ),
        (
            DECOUPLED | dict(offpolicy__weight="capped", algo__advantage__is_correction_mode="mask"),
            "--algo.advantage.is_correction_mode mask: allowed with --offpolicy.weight capped: clip",
        ),
        (
            DECOUPLED | dict(offpolicy__weight="masked", algo__advantage__is_correction_level="seq"),
            "--algo.advantage.is_correction_level seq: allowed with --offpolicy.weight masked: token",
        ),
        (
            DECOUPLED | dict(policy_loss="topr", offpolicy__weight="tapered"),
            "--offpolicy.objective decoupled: .*not topr",
        ),
        (
            dict(policy_loss="bapo", train__async_enable=True, rollout__top_p=0.9),
            "--rollout.top_p 0.9: changes the engine's log-probs, and --offpolicy.ratio_base rollout .*allowed: 1",
        ),
        (dict(offpolicy__lag=2, rollout__top_p=0.9), "--rollout.top_p 0.9: .*--offpolicy.ratio_base auto"),
        (DECOUPLED | dict(rollout__top_p=0.9), "--rollout.top_p 0.9: .*is_correction_level token"),
        (DECOUPLED | dict(offpolicy__weight="tapered", rollout__top_p=0.9), "--rollout.top_p 0.9: .*weight tapered"),
        (DECOUPLED | dict(offpolicy__weight="heavy"), "--offpolicy.weight: invalid choice: 'heavy'"),
        (dict(policy_loss="ppo", actor__policy_loss_type="gspo"), "--policy_loss ppo: .*--actor.policy_loss_type ppo"),
        (dict(actor__policy_loss_type="gspo", replay__ratio=1), "--replay.ratio 1.0: .*every --policy_loss but gspo"),
        (dict(policy_loss="bapo", no_such_flag="1"), "unrecognized arguments: --no.such.flag|--no_such_flag"),
    ],
)
def test_a_clash_with_openrlhfs_flags_is_refused_before_ray_starts(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        pipeline.parse(pipeline.flags(tmp_path, **flags))
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


DEFAULTS = {
    "policy_loss": None,
    "bapo.preset": None,
    "bapo.positive_contribution_target": None,
    "bapo.ratio_lower_start": None,
    "bapo.ratio_lower_max": None,
    "bapo.ratio_lower_step": None,
    "bapo.ratio_upper_start": None,
    "bapo.ratio_upper_max": None,
    "bapo.ratio_upper_step": None,
    "bapo.contribution": None,
    "bapo.scope": None,
    "bapo.token_weight": None,
    "bapo.smoothing": None,
    "bapo.smoothing_of": None,
    "bapo.smoothing_start": None,
    "bapo.discard_saved": None,
    "bapo.dump_tokens": None,
    "bapo.max_skipped_updates": 3,
    "m2.budget": None,
    "m2.half_life": None,
    "divergence.threshold": None,
    "topr.level": None,
    "balanced.target": None,
    "balanced.half_life": None,
    "balanced.level": None,
    "offpolicy.ratio_base": None,
    "offpolicy.objective": "behavior",
    "offpolicy.weight": None,
    "offpolicy.weight_level": None,
    "offpolicy.lag": 0,
    "replay.ratio": 0.0,
    "replay.capacity": 1024,
    "replay.max_staleness": 4,
    "replay.max_reuse": 1,
    "replay.strategy": "uniform",
    "replay.skip_uninformative": True,
    "replay.seed": 0,
    "replay.discard_saved": False,
    "reward_fault.patience": 600.0,
    "reward_fault.timeout": 300.0,
    "reward_fault.max_drop_rate": 0.1,
    "eval.at_start": False,
    "ckpt.on_interrupt": True,
    "partial.token_budget": 0,
    "partial.oversample": 1.5,
    "partial.max_segments": 0,
    "partial.max_staleness": 8,
    "partial.on_stale": "drop",
    "partial.discard_saved": False,
}


def test_every_flag_has_its_documented_default():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    found = vars(parser.parse_args([]))
    assert found == DEFAULTS
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in DEFAULTS.items()}


# rho_0; lower start, max, step; upper start, max, step; contribution; order and kind of the target, which have no flag;
# scope, token weight, --actor.dual_clip, smoothing.
PRESETS = {
    None: (0.4, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate", "upper_first", "share", "update", "none", None, 0.0),
    "readme": (0.5, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate", "upper_first", "share", "update", "none", None, 0.0),
    "paper": (0.4, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate", "upper_first", "share", "update", "none", None, 0.0),
    "octothinker": (
        0.45,
        0.8,
        0.9,
        0.02,
        1.2,
        2.0,
        0.05,
        "surrogate",
        "upper_first",
        "share",
        "update",
        "none",
        None,
        0.0,
    ),
    "released": (
        1.0,
        0.6,
        0.8,
        0.05,
        1.2,
        2.0,
        0.05,
        "surrogate",
        "lower_first",
        "ratio",
        "micro_batch",
        "none",
        3.0,
        0.0,
    ),
    "steady": (0.5, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "gradient", "upper_first", "share", "update", "none", 3.0, 20.0),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_every_field(tmp_path, preset):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset=preset))
    config = astuple(clip_config_from_args(args.bapo))[: len(SEARCH_FIELDS)]
    beside = args.bapo.scope, args.bapo.token_weight, args.actor.dual_clip, args.bapo.smoothing
    assert (*config, *beside) == PRESETS[preset]
    assert args.bapo.preset == (preset or "paper")


GIVEN = {
    "positive_contribution_target": 0.35,
    "ratio_lower_start": 0.5,
    "ratio_lower_max": 0.95,
    "ratio_lower_step": 0.03,
    "ratio_upper_start": 1.3,
    "ratio_upper_max": 2.5,
    "ratio_upper_step": 0.07,
    "contribution": "gradient",
}


@pytest.mark.parametrize("name", GIVEN)
def test_every_flag_of_the_search_changes_its_field_and_no_other(tmp_path, name):
    argv = pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset="octothinker", **{f"bapo__{name}": GIVEN[name]})
    expected = replace(ClipConfig.preset("octothinker"), **{name: GIVEN[name]})
    assert clip_config_from_args(pipeline.parse(argv).bapo) == expected


def test_every_smoothing_flag_reaches_its_setting(tmp_path):
    def smoothing(**given):
        argv = pipeline.flags(tmp_path, policy_loss="bapo", **{f"bapo__{name}": v for name, v in given.items()})
        return clip_config_from_args(pipeline.parse(argv).bapo).smoothing

    assert smoothing() is None and smoothing(preset="steady", smoothing=0) is None
    assert smoothing(smoothing=5) == SmoothingConfig(5.0)
    assert smoothing(preset="steady", smoothing_of="tally") == SmoothingConfig(20.0, of="tally")
    argv = [*pipeline.flags(tmp_path, policy_loss="bapo", bapo__smoothing=5), "--bapo.smoothing_start", "0.7", "2"]
    assert clip_config_from_args(pipeline.parse(argv).bapo).smoothing == SmoothingConfig(5.0, start=(0.7, 2.0))


RULE_SETTINGS = {
    "m2": dict(budget=0.1, half_life=5.0),
    "divergence": dict(threshold=0.15),
    "topr": dict(level="token"),
    "balanced": dict(target=0.4, half_life=5.0, level="sequence"),
}


@pytest.mark.parametrize("name", RULES)
def test_every_flag_of_another_rule_reaches_its_setting_and_without_it_has_the_classs_default(tmp_path, name):
    def rule(**given):
        argv = pipeline.flags(tmp_path, policy_loss=name, **{f"{name}__{key}": value for key, value in given.items()})
        return clip_rule_from_args(pipeline.parse(argv))

    assert RULE_SETTINGS[name].keys() == default_settings(name).keys()
    for given in ({}, RULE_SETTINGS[name]):
        assert type(rule(**given)) is RULES[name]
        assert vars(rule(**given)) == vars(RULES[name](**given))
    assert vars(rule()) != vars(rule(**RULE_SETTINGS[name]))


@pytest.mark.parametrize("name", RULES)
def test_another_rule_is_against_the_policy_that_generated_the_tokens_and_logs_entropy(tmp_path, name):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss=name))
    assert (args.policy_loss, args.actor.policy_loss_type, args.actor.entropy_coef) == (name, "ppo", 0.0)
    assert args.offpolicy.ratio_base == "recomputed"
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss=name, train__async_enable=True))
    assert (
        args.offpolicy.ratio_base
        == pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", train__async_enable=True)).offpolicy.ratio_base
        != "recomputed"
    )


def test_every_replay_flag_reaches_the_pools_settings(tmp_path):
    given = dict(ratio=0.5, capacity=9, max_staleness=3, max_reuse=2, strategy="oldest", seed=5)
    argv = pipeline.flags(tmp_path, **{f"replay__{name}": value for name, value in given.items()})
    args = pipeline.parse([*argv, "--no-replay.skip_uninformative", "--replay.discard_saved"])
    assert replay_config_from_args(args.replay) == ReplayConfig(**given, skip_uninformative=False)
    assert args.replay.discard_saved is True


@pytest.mark.parametrize("given", ["--actor.eps_clip_low_high 0.2 0.2", "--actor.eps_clip 0.3"])
def test_openrlhfs_clip_bounds_are_refused_with_bapo(tmp_path, capsys, given):
    with pytest.raises(SystemExit):
        pipeline.parse([*pipeline.flags(tmp_path, policy_loss="bapo"), *given.split()])
    assert f"{given}: not allowed with --policy_loss bapo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        dict(policy_loss="bapo", actor__eps_clip="0.2"),
        dict(replay__ratio=0.5),  # 8 groups of 4, one optimizer step of 32
        dict(replay__ratio=1, rollout__n_samples_per_prompt=6),  # 16 groups of 6, three of 32
        dict(eval__at_start=True, eval__dataset="heldout.jsonl"),
        dict(train__async_enable=True),
        dict(policy_loss="m2", actor__dual_clip="3", algo__advantage__is_correction_level="token"),
        dict(policy_loss="divergence", bapo__dump_tokens=5),
        dict(policy_loss="balanced", balanced__half_life=3, bapo__discard_saved=True),
        dict(policy_loss="topr", replay__ratio=1, partial__token_budget=9),
        dict(reward__remote_url="http://somewhere/get_reward"),
        dict(policy_loss="bapo", algo__advantage__is_correction_level="token"),
        dict(train__async_enable=True, algo__advantage__is_correction_level="token"),
        dict(train__async_enable=True, offpolicy__ratio_base="rollout", policy_loss="ppo"),
        dict(policy_loss="gspo", offpolicy__ratio_base="recomputed"),
        dict(rollout__n_samples_per_prompt=1, rollout__batch_size=64, algo__advantage__estimator="reinforce"),
    ],
    ids=lambda given: " ".join(map(str, given.items())),
)
def test_allowed_combinations_are_accepted(tmp_path, given):
    pipeline.parse(pipeline.flags(tmp_path, **given))


def test_groups_of_one_sample_can_be_replayed_if_equal_rewards_are_kept(tmp_path):
    one = dict(rollout__n_samples_per_prompt=1, rollout__batch_size=64, algo__advantage__estimator="reinforce")
    argv = pipeline.flags(tmp_path, replay__ratio=1, **one)
    assert pipeline.parse([*argv, "--no-replay.skip_uninformative"]).replay.skip_uninformative is False


def test_samples_know_their_versions_wherever_the_ratio_has_a_base(tmp_path):
    for given, expected in (
        (dict(), False),
        (dict(policy_loss="bapo"), True),
        (dict(replay__ratio=1), True),
        (dict(offpolicy__ratio_base="recomputed"), True),
        (dict(train__async_enable=True), True),
        (dict(train__async_enable=True, policy_loss="gspo"), False),
    ):
        assert is_off_policy(pipeline.parse(pipeline.flags(tmp_path, **given))) == expected, given


def test_a_flag_given_wins_over_the_preset(tmp_path):
    args = pipeline.parse(
        pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset="octothinker", bapo__ratio_upper_max="2.5")
    )
    config = clip_config_from_args(args.bapo)
    assert (config.ratio_upper_max, config.positive_contribution_target) == (2.5, 0.45)
    assert (args.bapo.scope, args.actor.policy_loss_type, args.policy_loss) == ("update", "ppo", "bapo")


def test_released_also_sets_scope_and_dual_clip_unless_given(tmp_path):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset="released"))
    assert clip_config_from_args(args.bapo) == replace(ClipConfig.preset("released"), dual_clip=None)
    assert (args.bapo.scope, args.actor.dual_clip) == ("micro_batch", 3.0)
    given = dict(bapo__scope="update", actor__dual_clip="5")
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", bapo__preset="released", **given))
    assert (args.bapo.scope, args.actor.dual_clip) == ("update", 5.0)


def test_entropy_is_logged_for_bapo_unless_the_user_set_it(tmp_path):
    def entropy_coef(**flags):
        return pipeline.parse(pipeline.flags(tmp_path, **flags)).actor.entropy_coef

    assert entropy_coef(policy_loss="bapo") == 0.0
    assert entropy_coef(policy_loss="bapo", actor__entropy_coef="0.01") == 0.01
    assert entropy_coef(policy_loss="ppo") is None


@pytest.mark.parametrize(
    "given", [{}, dict(policy_loss="ppo"), dict(policy_loss="gspo"), dict(actor__policy_loss_type="gspo")]
)
def test_without_bapo_openrlhfs_arguments_keep_their_values(tmp_path, given):
    args = pipeline.parse(pipeline.flags(tmp_path, **given))
    expected = "gspo" if "gspo" in given.values() else "ppo"
    assert args.actor.policy_loss_type == args.policy_loss == expected
    assert {name for name, value in vars(args.bapo).items() if value is not None} == {"max_skipped_updates"}


def test_the_ratio_base_is_the_policy_that_generated_the_tokens(tmp_path):
    def ratio_base(**flags):
        return pipeline.parse(pipeline.flags(tmp_path, **flags)).offpolicy.ratio_base

    assert ratio_base(policy_loss="bapo") == "recomputed"
    assert ratio_base(policy_loss="bapo", train__async_enable=True) == "rollout"
    assert ratio_base(policy_loss="bapo", offpolicy__ratio_base="rollout") == "rollout"
    assert ratio_base(replay__ratio=1) == "recomputed"
    assert ratio_base(replay__ratio=1, train__async_enable=True) == "rollout"
    assert ratio_base(offpolicy__ratio_base="auto") == "recomputed"
    assert ratio_base(policy_loss="ppo") is None
    assert ratio_base(policy_loss="gspo", train__async_enable=True) is None
    assert ratio_base(policy_loss="ppo", train__async_enable=True) == ratio_base(train__async_enable=True) == "rollout"
    assert ratio_base(offpolicy__lag=1) == "auto" and ratio_base(offpolicy__lag=1, policy_loss="bapo") == "auto"


ASYNC = dict(policy_loss="ppo", train__async_enable=True)
PROXIMAL = "--offpolicy.ratio_base recomputed: the ratio does not see the staleness of"
CORRECTED = dict(algo__advantage__is_correction_level="token")


@pytest.mark.parametrize(
    ("flags", "base", "line"),
    [
        (dict(policy_loss="ppo"), None, None),
        (dict(policy_loss="bapo", train__async_enable=True), "rollout", None),
        (ASYNC | dict(offpolicy__ratio_base="auto"), "rollout", None),
        (ASYNC, "rollout", "--train.async_enable: .* engine's log-probs, .* is --offpolicy.ratio_base recomputed$"),
        # OpenRLHF's own command with its correction stays what it is.
        (ASYNC | CORRECTED, "recomputed", f"{PROXIMAL} --train.async_enable; .*is_correction_level token alone"),
        (
            ASYNC | dict(offpolicy__ratio_base="recomputed"),
            "recomputed",
            f"{PROXIMAL} --train.async_enable; --offpolicy.ratio_base auto is against the policy that generated",
        ),
        (
            dict(policy_loss="ppo", offpolicy__lag=3, offpolicy__ratio_base="recomputed") | CORRECTED,
            "recomputed",
            f"{PROXIMAL} --offpolicy.lag 3; ",
        ),
        (dict(partial__token_budget=9, offpolicy__ratio_base="recomputed"), "recomputed", f"{PROXIMAL} --partial.tok"),
        (dict(policy_loss="ppo", offpolicy__ratio_base="recomputed", replay__ratio=1), "recomputed", None),
        (dict(policy_loss="gspo", train__async_enable=True), None, "--policy_loss gspo: .* of --train.async_enable; "),
    ],
)
def test_one_line_says_where_the_ratio_does_not_see_staleness_and_where_it_is_not_openrlhfs(
    tmp_path, capsys, flags, base, line
):
    args = pipeline.parse(pipeline.flags(tmp_path, **flags))
    said = capsys.readouterr().err.splitlines()
    assert args.offpolicy.ratio_base == base and len(said) == (line is not None)
    assert not said or re.search(f"^openrlhf-bapo: warning: {line}", said[0]), said
    assert has_proximal_ratio(args) == bool(line and line.startswith(PROXIMAL))


STALE = [dict(train__async_enable=True), dict(offpolicy__lag=3), dict(partial__token_budget=9), dict(replay__ratio=1)]


@pytest.mark.parametrize("policy_loss", ["ppo", "bapo"])
@pytest.mark.parametrize("stale", [{}, *STALE, STALE[0] | STALE[2] | STALE[3]], ids=str)
def test_decoupled_is_the_recomputed_ratio_with_openrlhfs_correction_capped_at_2(tmp_path, capsys, policy_loss, stale):
    flags = dict(policy_loss=policy_loss, offpolicy__objective="decoupled", **stale)
    args = pipeline.parse(pipeline.flags(tmp_path, **flags))
    assert args.offpolicy.ratio_base == "recomputed" and has_proximal_ratio(args) and not capsys.readouterr().err
    assert correction(args) == ("token", "clip", "ratio", [0.0, 2.0])


def correction(args) -> tuple:
    return tuple(getattr(args.algo.advantage, f"is_correction_{x}") for x in ("level", "mode", "gating", "threshold"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(threshold=5), ("token", "clip", "ratio", [0.0, 5.0])),
        (dict(level="token"), ("token", "clip", "ratio", [0.0, 2.0])),
        (dict(mode="mask"), ("token", "mask", "ratio", [0.5, 5.0])),
        (dict(level="seq"), ("seq", "mask", "ratio", [0.5, 5.0])),
        (dict(gating="tv", threshold=0.1), ("token", "mask", "tv", [0.0, 0.1])),
    ],
    ids=str,
)
def test_with_decoupled_the_given_flags_of_the_correction_are_kept(tmp_path, given, expected):
    flags = {f"algo__advantage__is_correction_{name}": value for name, value in given.items()}
    args = pipeline.parse(pipeline.flags(tmp_path, offpolicy__objective="decoupled", **flags))
    assert correction(args) == expected


@pytest.mark.parametrize(
    ("given", "weight", "level", "expected"),
    [
        (dict(), "capped", None, ("token", "clip", "ratio", [0.0, 2.0])),
        (dict(offpolicy__weight="capped"), "capped", None, ("token", "clip", "ratio", [0.0, 2.0])),
        (dict(offpolicy__weight="masked"), "masked", None, ("token", "mask", "ratio", [0.5, 5.0])),
        (
            dict(offpolicy__weight="masked", offpolicy__weight_level="sequence"),
            "masked",
            "sequence",
            ("seq", "mask", "ratio", [0.5, 5.0]),
        ),
        (dict(algo__advantage__is_correction_mode="mask"), "masked", None, ("token", "mask", "ratio", [0.5, 5.0])),
        (dict(offpolicy__weight="none"), "none", None, ("off", "mask", "ratio", [0.5, 5.0])),
        (dict(offpolicy__weight="tapered"), "tapered", "sequence", ("off", "mask", "ratio", [0.5, 5.0])),
        (
            dict(offpolicy__weight="tapered", offpolicy__weight_level="token"),
            "tapered",
            "token",
            ("off", "mask", "ratio", [0.5, 5.0]),
        ),
    ],
    ids=str,
)
def test_a_weight_sets_openrlhfs_correction_or_is_tapered_without_it(tmp_path, given, weight, level, expected):
    for stale in ({}, *STALE):
        args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="bapo", **DECOUPLED, **given, **stale))
        assert (args.offpolicy.weight, args.offpolicy.weight_level) == (weight, level)
        assert correction(args) == expected and args.offpolicy.ratio_base == "recomputed"


def test_with_the_behavior_objective_openrlhfs_correction_is_as_it_comes(tmp_path):
    assert correction(pipeline.parse(pipeline.flags(tmp_path))) == ("off", "mask", "ratio", [0.5, 5.0])


def test_under_a_token_budget_tokens_know_their_versions_with_any_loss(tmp_path):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="ppo", partial__token_budget=9))
    assert args.offpolicy.ratio_base == "auto"
    args = pipeline.parse(
        pipeline.flags(tmp_path, policy_loss="ppo", partial__token_budget=9, train__async_enable=True)
    )
    assert args.offpolicy.ratio_base == "rollout"


def test_the_arguments_are_those_of_openrlhfs_own_parser_and_the_given_ones_are_known(tmp_path, monkeypatch):
    parse, found = arguments._parse, []

    def parse_twice(parser: argparse.ArgumentParser):
        parsed, given = parse(parser)
        found.append((dict(vars(parsed)), given, vars(parser.parse_args())))
        return parsed, given

    monkeypatch.setattr(arguments, "_parse", parse_twice)
    argv = pipeline.flags(tmp_path, policy_loss="bapo", replay__ratio=1, ds__packing_samples=True)
    pipeline.parse([*argv, "--no-replay.skip_uninformative", "--actor.adam.betas", "0.9", "0.95"])
    ((parsed, given, expected),) = found
    assert parsed == expected
    names = {flag.removeprefix("--") for flag in argv if flag.startswith("--")}
    assert given == names | {"replay.skip_uninformative", "actor.adam.betas"}


def test_help_shows_openrlhfs_flags_and_ours():
    run = subprocess.run(
        [pipeline.warm_python(), *pipeline.TRAIN, "--help"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0
    for flag in ("--rollout.batch_size", "--policy_loss", "--bapo.preset", "--bapo.scope", "--eval.at_start"):
        assert flag in run.stdout


@pytest.mark.parametrize(("step", "given", "asked"), [(0, True, 1), (7, True, 0), (0, False, 0)])
def test_a_run_evaluates_at_its_start_if_asked_and_not_again_when_it_is_resumed(step, given, asked):
    evaluations = []

    class Trainer:  # stands for OpenRLHF's, which needs Ray
        args = argparse.Namespace(eval=argparse.Namespace(at_start=given, temperature=0.5, n_samples_per_prompt=3))
        eval_dataloader, generate_kwargs = ["a prompt"], {"temperature": 1.0, "top_p": 0.9}

        def init_checkpoint_states(self) -> dict:
            return {"global_step": step}

        def evaluate(self, *place, **sampling) -> None:
            evaluations.append((place, sampling))

    actor_class = argparse.Namespace(__ray_metadata__=argparse.Namespace(modified_class=Trainer))
    evaluate_at_start(argparse.Namespace(PPOTrainer=actor_class))
    assert Trainer().init_checkpoint_states() == {"global_step": step}
    assert evaluations == asked * [((0,), {"temperature": 0.5, "top_p": 0.9, "n_samples_per_prompt": 3})]


def lag_args(tmp_path, **given):
    return pipeline.parse(pipeline.flags(tmp_path, **dict(policy_loss="bapo", offpolicy__lag=3) | given))


def test_a_lag_of_0_is_no_lag(tmp_path):
    given, not_given = (vars(lag_args(tmp_path, offpolicy__lag=lag)) for lag in (0, None))
    assert given == not_given and given["partial"].token_budget == 0


def test_a_lag_is_a_queue_of_whole_responses_that_many_versions_old(tmp_path):
    partial = lag_args(tmp_path).partial
    assert (partial.token_budget, partial.oversample, partial.max_staleness) == (2**31 - 1, 1.0, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(offpolicy__lag=-1), "--offpolicy.lag -1: allowed: .* 0 or more"),
        (dict(train__async_enable=True), "--offpolicy.lag 3: allowed only without --train.async_enable"),
        (dict(partial__token_budget=16), "--partial.token_budget 16: allowed without --offpolicy.lag, which is 3"),
        (dict(partial__max_staleness=2), "--partial.max_staleness 2: allowed without --offpolicy.lag, which is 3"),
        (dict(offpolicy__ratio_base="recomputed"), "--offpolicy.ratio_base recomputed: .*staleness of --offpolicy.lag"),
        (dict(policy_loss="gspo"), "--offpolicy.lag 3: allowed with every --policy_loss but gspo"),
        (
            dict(algo__advantage__is_correction_level="token"),
            "is_correction_level token: .*with --offpolicy.lag 3: off",
        ),
    ],
)
def test_flags_that_a_lag_excludes_are_refused_in_one_line(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        lag_args(tmp_path, **flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and re.search(message, line)


def test_the_ends_of_the_allowed_ranges_are_allowed(tmp_path):
    edges = dict(bapo__max_skipped_updates=0, reward_fault__patience=0, reward_fault__max_drop_rate=0)
    args = pipeline.parse(pipeline.flags(tmp_path, reward_fault__timeout=0.5, **edges))
    faults = args.reward_fault
    assert (args.bapo.max_skipped_updates, faults.patience, faults.timeout, faults.max_drop_rate) == (0, 0, 0.5, 0)
    assert pipeline.parse(pipeline.flags(tmp_path, reward_fault__patience=0.5)).reward_fault.patience == 0.5
    with pytest.raises(SystemExit):
        pipeline.parse(pipeline.flags(tmp_path, reward_fault__timeout="inf"))
