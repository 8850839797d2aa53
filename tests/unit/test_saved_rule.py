"""The state of clip rules in checkpoints of TRL and verl."""

import pytest
import torch

from openrlhf_bapo import ClipConfig, SmoothingConfig, Tokens
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError
from openrlhf_bapo.rules.clip_rules import SearchedBounds, SteadyBounds
from openrlhf_bapo.rules.other_rules import BalancedWeights, SecondMomentBounds
from openrlhf_bapo.rules.saved_rule import load_rule, save_rule

CONFIG = ClipConfig(contribution="gradient")
RULES = {
    "bounds": lambda half_life=3.0: SteadyBounds(CONFIG, SmoothingConfig(half_life)),
    "tally": lambda half_life=3.0: SteadyBounds(CONFIG, SmoothingConfig(half_life, "tally")),
    "m2": lambda half_life=3.0: SecondMomentBounds(half_life=half_life),
    "balanced": lambda half_life=3.0: BalancedWeights(target=0.7, half_life=half_life),
}


def follow(rule, *seeds: int) -> list[dict[str, torch.Tensor]]:
    """Close an update of random tokens for each seed; return the rule's state after each."""
    states = []
    for seed in seeds:
        new, old, advantages = torch.randn(3, 200, generator=torch.Generator().manual_seed(seed))
        rule.tally(Tokens(new / 2, old / 2, advantages, torch.ones(200)))
        rule.close_update()
        states.append(rule.state_dict())
    return states


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("half_life", [3.0, 5.0])
def test_a_loaded_rule_goes_on_as_the_saved_one_would_and_its_half_life_may_change(tmp_path, name, half_life):
    unbroken, saved, loaded = RULES[name](half_life), RULES[name](), RULES[name](half_life)
    state = follow(saved, 1, 2)[-1]
    save_rule(saved, tmp_path / "rule")
    load_rule(loaded, tmp_path / "rule")
    unbroken.load_state_dict(state)
    for ours, theirs in zip(follow(loaded, 3, 4), follow(unbroken, 3, 4), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert any(not torch.equal(value, follow(RULES[name](half_life), 3, 4)[-1][key]) for key, value in ours.items())


def test_the_state_that_an_interrupted_save_left_is_loaded(tmp_path):
    saved, loaded = RULES["bounds"](), RULES["bounds"]()
    state = follow(saved, 1, 2)[-1]
    save_rule(saved, tmp_path / "rule")
    (tmp_path / "rule").rename(tmp_path / "rule.old")
    load_rule(loaded, tmp_path / "rule")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in state.items())


def test_a_rule_that_follows_nothing_writes_and_reads_nothing(tmp_path):
    save_rule(SearchedBounds(CONFIG), tmp_path / "rule")
    load_rule(SearchedBounds(CONFIG), tmp_path / "rule")
    assert not (tmp_path / "rule").exists()


def test_a_checkpoint_without_a_state_lets_the_rule_begin_anew_and_says_so(tmp_path, capfd):
    rule = RULES["bounds"]()
    before = rule.state_dict()
    load_rule(rule, tmp_path / "rule")
    assert rule.state_dict() == before and f"{tmp_path}/rule is missing" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("saved", "other", "name"),
    [
        ("bounds", SteadyBounds(ClipConfig(), SmoothingConfig(3.0)), "config"),
        ("bounds", SteadyBounds(CONFIG, SmoothingConfig(3.0, "tally")), "smoothing of"),
        ("bounds", SecondMomentBounds(half_life=3.0), "rule"),
        ("balanced", BalancedWeights(target=0.6, half_life=3.0), "target"),
    ],
)
def test_a_state_of_a_rule_with_other_settings_is_refused_by_name(tmp_path, saved, other, name):
    save_rule(RULES[saved](), tmp_path / "rule")
    with pytest.raises(SavedStateError, match=rf"pool.json was saved with {name} .*; use the same {name} or remove"):
        load_rule(other, tmp_path / "rule")
