"""The tests of studies/late_data/tapered.py: exact sign-flip p-values, and the planned cells."""

import importlib
import itertools
import sys

import pipeline
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

FOLDER = pipeline.REPOSITORY / "studies" / "late_data"
sys.path.append(str(FOLDER))
study, tapered = map(importlib.import_module, ("study", "tapered"))

numbers = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=6)


@given(numbers)
def test_a_sign_flip_tests_p_is_that_of_all_changes_of_signs(differences):
    result = stats.permutation_test(
        (differences,),
        lambda x, axis: x.sum(axis),
        permutation_type="samples",
        n_resamples=10**6,
        alternative="greater",
    )
    assert tapered.sign_flip(differences) == pytest.approx(result.pvalue)
    result = stats.permutation_test(
        (differences,), lambda x, axis: abs(x.sum(axis)), permutation_type="samples", n_resamples=10**6,
        alternative="greater",
    )  # fmt: skip
    assert tapered.two_sided(differences) == pytest.approx(result.pvalue)


def test_ten_differences_of_one_sign_have_the_lowest_p_there_is():
    assert tapered.sign_flip([0.1, 0.2] * 5) == 1 / 1024 and tapered.two_sided([0.1, 0.2] * 5) == 2 / 1024


def test_the_plan_has_310_cells_whose_seeds_are_not_those_of_the_first_looks():
    cells = study.read_cells(FOLDER / "tapered.toml", "*")
    assert len(cells) == 310 and {cell["seed"] for cell in cells.values()} == {*range(200, 205), *range(210, 220)}
    assert study.read_parquet(FOLDER / "tapered.parquet").keys() <= cells.keys()


def test_a_candidates_pairs_began_from_the_same_start_policies():
    table, _ = tapered.whole_regimes(FOLDER)
    for by_method in table.values():
        for by_rate, seed in itertools.product(by_method.values(), range(210, 220)):
            ours, ppo = by_rate[tapered.RATE][seed], by_method["ppo"][tapered.RATE][seed]
            assert ours.began == pytest.approx(ppo.began, abs=1e-3)


def test_the_page_is_that_of_the_cells():
    assert tapered.PAGE.read_text() == tapered.page(FOLDER)
