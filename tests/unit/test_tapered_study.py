"""The tests of studies/late_data/tapered.py: exact sign-flip p-values, and the planned cells."""

import itertools
import statistics

import pytest
import study
import tapered
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=6))
def test_a_sign_flip_tests_p_is_that_of_all_changes_of_signs(differences):
    def p_value(statistic) -> float:
        settings = dict(permutation_type="samples", n_resamples=10**6, alternative="greater")
        return stats.permutation_test((differences,), statistic, **settings).pvalue

    assert tapered.sign_flip(differences) == pytest.approx(p_value(lambda x, axis: x.sum(axis)))
    assert tapered.two_sided(differences) == pytest.approx(p_value(lambda x, axis: abs(x.sum(axis))))


def test_the_planned_seeds_are_those_of_the_protocols_stages():
    seeds = {cell["seed"] for cell in study.read_cells(study.HERE / "tapered.toml", "*").values()}
    assert seeds == {*range(200, 205), *range(210, 225)}


def test_a_candidates_pairs_began_from_the_same_start_policies():
    table, _ = tapered.whole_regimes(study.HERE)
    for by_method in table.values():
        seeds = by_method["tapered"][tapered.RATE]
        assert len(seeds) == 10
        for by_rate, seed in itertools.product(by_method.values(), seeds):
            assert by_rate[tapered.RATE].keys() == seeds.keys()
            ours, ppo = by_rate[tapered.RATE][seed], by_method["ppo"][tapered.RATE][seed]
            assert ours.began == pytest.approx(ppo.began, abs=1e-3)


def test_the_picture_has_every_rules_difference_from_ppo(tmp_path):
    table, _ = tapered.whole_regimes(study.HERE)
    figure = tapered.draw(table, tmp_path / "tapered.png")
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    for panel, (regime, by_method) in zip(figure.axes, table.items(), strict=True):
        means = [line.get_xdata()[0] for line in panel.lines[1::2]]
        methods = [label for label in labels if label in by_method]
        assert {*methods} == by_method.keys() - {"ppo", *tapered.DESCRIBED} and methods[0] == "tapered"
        expected = [statistics.fmean(tapered.paired(table, regime, method, "ppo")) for method in methods]
        assert means == pytest.approx(expected, abs=1e-12)


def test_the_page_is_that_of_the_cells():
    assert tapered.PAGE.read_text() == tapered.page(study.HERE)


def test_all_planned_cells_ran_and_the_studys_page_says_so():
    planned = study.read_cells(study.HERE / "tapered.toml", "*")
    assert study.read_parquet(study.HERE / "tapered.parquet").keys() == planned.keys()
    assert f"All {len(planned)} planned cells ran." in (study.HERE.parents[1] / "docs/study.md").read_text()
