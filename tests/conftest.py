"""Shared by all tests: limits that only a hang breaks, since the machine that runs them may be busy."""

import pytest
from hypothesis import settings

from openrlhf_bapo import register

settings.register_profile("project", deadline=None, max_examples=150)
settings.load_profile("project")
register()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("pipeline") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
