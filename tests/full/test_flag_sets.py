"""Random sets of OpenRLHF's flags through its command and ours. tools/flag_sets.py runs sixty; the table is kept."""

import re

import flag_sets
import pipeline
import pytest

FIVE = (0, 4, 14, 37, 58)  # two ranks with packing, async with LoRA, a critic at ZeRO-3, a refusal, colocation
TABLE = pipeline.REPOSITORY / "tools/flag_sets.md"


@pytest.fixture(scope="module")
def choices():
    return flag_sets.parsers_choices()


@pytest.mark.parametrize("seed", FIVE)
def test_a_set_of_flags_trains_openrlhfs_weights_with_ppo_and_with_bapo_trains_or_says_why_not(tmp_path, choices, seed):
    outcome = flag_sets.compare(tmp_path, seed, flag_sets.draw(seed, choices))
    assert outcome.is_fine, outcome


def test_the_sixty_sets_have_every_choice_of_the_parser_and_every_other_value(choices):
    sets = [flag_sets.draw(seed, choices) for seed in range(flag_sets.NUM_SETS)]
    wanted = {flag: choices[flag] for flag in flag_sets.CHOICES} | flag_sets.VALUES
    wanted |= dict.fromkeys(flag_sets.SWITCHES, (True, None))
    for flag, values in wanted.items():
        assert set(values) <= {drawn[flag] for drawn in sets} | {None}, flag


def test_the_table_has_the_sets_that_are_drawn_and_no_failure(choices):
    rows = re.findall(r"^\| (\d+) \| `(.*?)` \| (.*) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    assert [int(seed) for seed, *_ in rows] == list(range(flag_sets.NUM_SETS))
    for seed, flags, ppo, bapo in rows:
        assert flags == flag_sets.shown(flag_sets.draw(int(seed), choices))
        assert not ppo.startswith("fails") and not bapo.startswith("fails")
