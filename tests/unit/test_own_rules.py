"""A clip rule of one's own, from a file: its flags, its training on ranks and from a checkpoint, and its mistakes."""

import argparse
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pipeline
import pytest
import torch
from presets import MINE, SAPO
from strategies import random_tokens

from openrlhf_bapo import BapoPolicyLoss
from openrlhf_bapo.flags.train_flags import add_flags
from openrlhf_bapo.rules.other_rules import as_clip_rule, make_rule
from openrlhf_bapo.rules.settings import clip_rule_from_args

OWN = MINE.removesuffix("Mine")


@pytest.mark.parametrize("settings", [{}, dict(positive=0.5, negative=2.0)])
def test_sapos_loss_has_the_gradient_of_its_paper(settings):
    tokens = random_tokens()
    log_probs = tokens.log_probs.clone().requires_grad_()
    loss = BapoPolicyLoss(rule=make_rule(SAPO, settings))
    loss(log_probs, tokens.behavior_log_probs, tokens.advantages, tokens.weight)[0].backward()
    for i, j in itertools.product(range(4), range(12)):
        t = settings.get("positive", 1.0) if tokens.advantages[i, j] > 0 else settings.get("negative", 1.05)
        ratio = math.exp(tokens.log_probs[i, j] - tokens.behavior_log_probs[i, j])
        # The paper's gate is f = 4 / t sigmoid(t (r - 1)); its slope in log pi is 4 sigma (1 - sigma) r.
        sigma = 1 / (1 + math.exp(-t * (ratio - 1)))
        expected = -4 * sigma * (1 - sigma) * ratio * tokens.advantages[i, j] / tokens.weight.sum()
        assert float(log_probs.grad[i, j]) == pytest.approx(float(expected * tokens.weight[i, j]), rel=1e-12, abs=1e-18)


def test_the_settings_of_a_rule_of_ones_own_are_flags(tmp_path):
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="examples/my_rule.py:Sapo", rule__negative=1.5))
    assert args.policy_loss == SAPO and vars(args.rule) == {"positive": 1.0, "negative": 1.5}
    rule = clip_rule_from_args(args)
    assert type(rule).__name__ == "Sapo" and (rule.positive, rule.negative) == (1.0, 1.5)
    assert args.actor.entropy_coef == 0  # so that the entropy is logged, as with every rule


@pytest.mark.parametrize(
    ("given", "wide"), [({}, False), ({"rule__wide": "true"}, True), ({"rule__wide": "False"}, False)]
)
def test_a_setting_may_be_true_or_false(tmp_path, given, wide):
    rule = clip_rule_from_args(pipeline.parse(pipeline.flags(tmp_path, policy_loss=f"{OWN}Switch", **given)))
    assert rule.wide is wide and rule.upper == (2.0 if wide else 1.2)


def test_help_shows_its_flags(capsys):
    with pytest.raises(SystemExit):
        pipeline.parse(["--policy_loss", SAPO, "--help"])
    shown = capsys.readouterr().out
    assert "--rule.negative" in shown and "FILE.py:CLASS" in shown
    assert "--rule." not in argparse_help([])


def argparse_help(argv: list[str]) -> str:
    parser = argparse.ArgumentParser()
    add_flags(parser, argv)
    return parser.format_help()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with tests/support/own_rules.py and entry points, into a folder of the path."""

    def install(package: str, **rules: str) -> None:
        source, site = tmp_path / package, tmp_path / "site"
        source.mkdir()
        shutil.copy(pipeline.SUPPORT / "own_rules.py", source / f"{package}.py")
        lines = ["[project]", f'name = "{package}"', 'version = "1.0"', '[project.entry-points."openrlhf_bapo.rules"]']
        lines += [f'{name} = "{package}:{class_name}"' for name, class_name in rules.items()]
        lines += ["[tool.setuptools]", f'py-modules = ["{package}"]']
        (source / "pyproject.toml").write_text("\n".join(lines))
        uv = [Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--python", sys.executable]
        options = ["--offline", "--no-deps", "--no-build-isolation", "--target", site]
        subprocess.run([*uv, *options, source], check=True)
        monkeypatch.syspath_prepend(site)

    return install


def test_an_installed_packages_entry_point_names_a_rule_and_a_mistake_in_the_name_is_one_line(
    install, tmp_path, capsys
):
    install("a_package", steadier="Mine", topr="Mine", flat="Flat")
    args = pipeline.parse(pipeline.flags(pipeline.SUPPORT, policy_loss="steadier", rule__half_life=2))
    assert args.policy_loss == "a_package:Mine" and clip_rule_from_args(args).smoothing.half_life == 2
    for rule in (clip_rule_from_args(args), as_clip_rule("steadier")):
        assert type(rule).__module__ == "a_package"
    assert pipeline.parse(pipeline.flags(pipeline.SUPPORT, policy_loss="topr")).policy_loss == "topr"  # this package's
    for name, message in {
        "steady": r"--policy_loss: invalid choice: 'steady' .*topr\W+balanced\W+flat\W+steadier\W+$",
        "flat": r"--policy_loss a_package:Flat: weights\(\) has the shape",
    }.items():
        assert_is_one_line(pipeline.flags(pipeline.SUPPORT, policy_loss=name), message, capsys)
    source = 'METHOD=steadier; source scripts/method.sh; echo "${METHOD_FLAGS[@]}"'
    path = pipeline.python_path(tmp_path / "site")
    words = subprocess.check_output(
        ["bash", "-c", source], cwd=pipeline.REPOSITORY, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert words.startswith("--policy_loss steadier --offpolicy.ratio_base auto")
    with pytest.raises(ValueError, match=r"clip rule 'steadyer' is unknown; .*, flat, steadier, topr, FILE.py"):
        as_clip_rule("steadyer")

    install("b_package", steadier="Mine")
    message = "steadier: several installed rules have this name; allowed: a_package:Mine, b_package:Mine"
    assert_is_one_line(pipeline.flags(pipeline.SUPPORT, policy_loss="steadier"), message, capsys)


def test_on_two_ranks_and_from_a_checkpoint_it_trains_as_the_built_in_rule_to_the_bit(tmp_path):
    directory = pipeline.make_model(tmp_path)
    samples = [pipeline.make_experience([3, 7, 5, 8], seed=seed) for seed in (3, 4)]
    sizes = dict(actor__num_gpus_per_node=2, train__batch_size=4, train__micro_batch_size=1, actor__adam__lr=1e-3)
    sizes |= dict(ckpt__save_steps=1, train__full_determinism_enable=True)
    built_in = dict(policy_loss="bapo", bapo__preset="readme", bapo__smoothing=2.0)
    own = dict(policy_loss=MINE, rule__half_life=2.0)
    results = [
        pipeline.train_policy_actors(directory, pipeline.flags(directory, **sizes | rule), samples, num_steps=2, **save)
        for rule, save in ((built_in, {}), (own, dict(save_after=1)))
    ]
    for first, second in zip(*results, strict=True):
        assert first["clamped"] == second["clamped"] and len(set(map(str, first["clamped"]))) > 2
        assert all(torch.equal(second["weights"][name], weight) for name, weight in first["weights"].items())

    flags = [*pipeline.flags(directory, **sizes | own), "--ckpt.load_enable"]
    resumed = pipeline.train_policy_actors(directory, flags, samples)
    for unbroken, rest in zip(results[1], resumed, strict=True):
        assert rest["clamped"] == unbroken["clamped"][-len(rest["clamped"]) :]
        assert all(torch.equal(rest["weights"][name], weight) for name, weight in unbroken["weights"].items())
    with pytest.raises(SystemExit):
        pipeline.parse([*flags, "--rule.target", "0.4"])


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("nowhere.py:Mine", {}, "nowhere.py:Mine: no file nowhere.py"),
        ("no_such_package:Mine", {}, "no_such_package: cannot be imported: ModuleNotFoundError: "),
        ("unfinished.py:Mine", {}, "unfinished.py: cannot be imported: SyntaxError: "),
        (f"{OWN}Yours", {}, "own_rules.py has no class 'Yours'"),
        (f"{OWN}NoRule", {}, "NoRule is no subclass of openrlhf_bapo.ClipRule"),
        (f"{OWN}Unfinished", {}, "Unfinished lacks the method weights"),
        (f"{OWN}NoDefault", {}, "its setting low has no default; allowed: defaults of the types bool, int, float, str"),
        (f"{OWN}Broken", {}, "Broken: KeyError: 0"),
        (f"{OWN}Flat", {}, "weights() has the shape (4,); allowed: that of the tokens, (4, 6)"),
        (f"{OWN}PerToken", {}, "bounds() has a bound per token; allowed with the base TokenBounds"),
        (f"{OWN}Negative", {}, "weights() has values that are negative or not finite"),
        (f"{OWN}Failing", {}, "ZeroDivisionError: division by zero"),
        (f"{OWN}Unkept", {}, "follows_updates is set, and its setting low is no attribute of the same name"),
        (f"{OWN}Annealed", {}, "an update changed its setting target from 0.5; allowed: in another attribute"),
        (f"{OWN}Metric", {}, "its metric mine is 1.0; allowed: a 0-dim Tensor"),
        (f"{OWN}Counting", {}, "state_dict() has num_updates of the type int; allowed: Tensor"),
        (f"{OWN}Forgetful", {}, "a rule with its state_dict() has other bounds or weights"),
        (SAPO, dict(rule__negative=-1.0), "Sapo: positive 1.0 and negative -1.0 are not allowed; both must be above 0"),
        (SAPO, dict(rule__low=1.0), "unrecognized arguments: --rule.low"),
        (SAPO, dict(rule__negative="much"), "--rule.negative: invalid float value: 'much'"),
        (f"{OWN}Switch", dict(rule__wide="maybe"), "--rule.wide: 'maybe': allowed: true, false"),
        (SAPO, dict(actor__eps_clip=0.1), "Sapo: a rule of one's own has its own bounds or weights"),
        (SAPO, dict(actor__dual_clip=3.0), f"with --policy_loss {SAPO}, which has weights in place of the ratio;"),
        (SAPO, dict(m2__budget=0.1), "--m2.budget 0.1: allowed only with --policy_loss m2"),
        (SAPO, dict(offpolicy__objective="decoupled"), "--offpolicy.objective decoupled: clips each token's ratio"),
    ],
)
def test_a_mistake_is_one_line_before_ray_starts(tmp_path, monkeypatch, capsys, name, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfinished.py").write_text("class Mine(:")
    assert_is_one_line(pipeline.flags(tmp_path, policy_loss=name, **flags), re.escape(message), capsys)


def assert_is_one_line(flags: list[str], message: str, capsys) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        pipeline.parse(flags)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and re.search(message, error), error
