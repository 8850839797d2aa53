"""A clip rule of one's own, from a file: its flags, its training on ranks and from a checkpoint, and its mistakes."""

import argparse
import itertools
import math
import re
import subprocess
import sys

import pipeline
import pytest
import torch

from openrlhf_bapo import BapoPolicyLoss, Tokens
from openrlhf_bapo.flags.train_flags import add_flags
from openrlhf_bapo.rules.other_rules import as_clip_rule, make_rule
from openrlhf_bapo.rules.settings import clip_rule_from_args

SAPO = f"{pipeline.REPOSITORY}/examples/my_rule.py:Sapo"

STEADY = """
from openrlhf_bapo import ClipConfig, SmoothingConfig, SteadyBounds


class Mine(SteadyBounds):
    def __init__(self, half_life: float = 9.0, highest: float = 3.0):
        super().__init__(ClipConfig(ratio_upper_max=highest), SmoothingConfig(half_life))
        self.highest = highest
"""


def stale_tokens() -> Tokens:
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(4, 7, generator=generator, dtype=torch.float64)
    log_probs = behavior + 0.5 * torch.randn(4, 7, generator=generator, dtype=torch.float64)
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64).expand(4, 7).contiguous()
    return Tokens(log_probs, behavior, advantages, (torch.arange(7) < torch.tensor([[7], [4], [2], [6]])).double())


@pytest.mark.parametrize("settings", [{}, dict(positive=0.5, negative=2.0)])
def test_sapos_loss_has_the_gradient_of_its_paper(settings):
    tokens = stale_tokens()
    log_probs = tokens.log_probs.clone().requires_grad_()
    loss = BapoPolicyLoss(rule=make_rule(SAPO, settings))
    loss(log_probs, tokens.behavior_log_probs, tokens.advantages, tokens.weight)[0].backward()
    for i, j in itertools.product(range(4), range(7)):
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


def test_help_shows_its_flags():
    command = [sys.executable, "-m", "openrlhf_bapo.cli.main", "train", "--policy_loss", SAPO, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--rule.negative" in shown and "FILE.py:CLASS" in shown
    assert "--rule." not in argparse_help([])


def argparse_help(argv: list[str]) -> str:
    parser = argparse.ArgumentParser()
    add_flags(parser, argv)
    return parser.format_help()


def test_any_framework_takes_it_by_its_name():
    assert type(as_clip_rule(SAPO)).__name__ == "Sapo"


def test_an_installed_packages_class_is_a_rule_too(tmp_path, monkeypatch):
    (tmp_path / "a_package.py").write_text(STEADY)
    monkeypatch.syspath_prepend(tmp_path)
    args = pipeline.parse(pipeline.flags(tmp_path, policy_loss="a_package:Mine", rule__half_life=2))
    assert args.policy_loss == "a_package:Mine" and clip_rule_from_args(args).smoothing.half_life == 2


def test_on_two_ranks_and_from_a_checkpoint_it_trains_as_the_built_in_rule_to_the_bit(tmp_path):
    directory, file = pipeline.make_model(tmp_path), tmp_path / "mine.py"
    file.write_text(STEADY)
    samples = [pipeline.make_experience([3, 7, 5, 8], seed=seed) for seed in (3, 4)]
    sizes = dict(actor__num_gpus_per_node=2, train__batch_size=4, train__micro_batch_size=1, actor__adam__lr=1e-3)
    sizes |= dict(ckpt__save_steps=1, train__full_determinism_enable=True)
    built_in = dict(policy_loss="bapo", bapo__preset="readme", bapo__smoothing=2.0)
    own = dict(policy_loss=f"{file}:Mine", rule__half_life=2.0)
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
        pipeline.parse([*flags, "--rule.highest", "2.5"])


MISTAKES = {
    "no such file": (None, "nowhere.py:Mine", {}, "nowhere.py:Mine: no file nowhere.py"),
    "no such module": (None, "no_such_package:Mine", {}, "no_such_package: cannot be imported: ModuleNotFoundError: "),
    "no such class": (STEADY, "mine.py:Yours", {}, "mine.py has no class 'Yours'"),
    "a syntax error": ("class Mine(:", "mine.py:Mine", {}, "mine.py: cannot be imported: SyntaxError: "),
    "no rule": ("class Mine: pass", "mine.py:Mine", {}, "Mine is no subclass of openrlhf_bapo.ClipRule"),
    "a missing method": (
        "from openrlhf_bapo import WeightRule\nclass Mine(WeightRule): pass",
        "mine.py:Mine",
        {},
        "Mine lacks the method weights",
    ),
    "a setting without a default": (
        "from openrlhf_bapo import FixedBounds\nclass Mine(FixedBounds):\n    def __init__(self, low): pass",
        "mine.py:Mine",
        {},
        "Mine: its setting low has no default; allowed: defaults of the types bool, int, float, str",
    ),
    "a wrong setting": (
        None,
        SAPO,
        dict(rule__negative=-1.0),
        "positive 1.0 and negative -1.0 are not allowed; both must be above 0",
    ),
    "an unknown setting": (None, SAPO, dict(rule__low=1.0), "unrecognized arguments: --rule.low"),
    "a setting of another type": (
        None,
        SAPO,
        dict(rule__negative="much"),
        "--rule.negative: invalid float value: 'much'",
    ),
    "weights of a wrong shape": (
        "from openrlhf_bapo import WeightRule\nclass Mine(WeightRule):\n"
        "    def weights(self, tokens): return tokens.ratio.mean(-1)",
        "mine.py:Mine",
        {},
        "weights() has the shape (4,); allowed: that of the tokens, (4, 6)",
    ),
    "negative weights": (
        "from openrlhf_bapo import WeightRule\nclass Mine(WeightRule):\n"
        "    def weights(self, tokens): return -tokens.ratio",
        "mine.py:Mine",
        {},
        "weights() has values that are negative or not finite",
    ),
    "an exception": (
        "from openrlhf_bapo import WeightRule\nclass Mine(WeightRule):\n    def weights(self, tokens): return 1 / 0",
        "mine.py:Mine",
        {},
        "ZeroDivisionError: division by zero",
    ),
    "a clip beside it": (
        None,
        SAPO,
        dict(actor__eps_clip=0.1),
        "--actor.eps_clip 0.1: not allowed",
    ),
    "another's setting": (None, SAPO, dict(m2__budget=0.1), "--m2.budget 0.1: allowed only with --policy_loss m2"),
    "the decoupled objective": (
        None,
        SAPO,
        dict(offpolicy__objective="decoupled"),
        "--offpolicy.objective decoupled: clips each token's ratio",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_ray_starts(tmp_path, monkeypatch, capsys, mistake):
    text, name, flags, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit) as end:
        pipeline.parse(pipeline.flags(tmp_path, policy_loss=name, **flags))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and re.search(re.escape(message), error), error
