"""Shared by all tests: limits that only a hang breaks, since the machine that runs them may be busy."""

import pytest
from hypothesis import Phase, settings

from openrlhf_bapo import register

pytest.register_assert_rewrite("pipeline", "recordings")  # their assertions show their values too
settings.register_profile("project", deadline=None, max_examples=150)
# For tests/mutation.py: a planted fault that 50 examples do not find is no fault that a test can be said to notice.
settings.register_profile("mutation", deadline=None, max_examples=50, phases=(Phase.explicit, Phase.generate))
settings.load_profile("project")
register()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("pipeline") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
