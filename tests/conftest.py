"""Shared by all tests: limits that only a hang breaks, since the machine that runs them may be busy."""

import pytest
from hypothesis import Phase, settings

from openrlhf_bapo import register

pytest.register_assert_rewrite("pipeline", "recordings", "partial", "endings")  # their assertions show their values too
settings.register_profile("project", deadline=None, max_examples=150)
# For tools/mutation.py: a planted fault that 50 examples do not find is no fault that a test can be said to notice.
settings.register_profile("mutation", deadline=None, max_examples=50, phases=(Phase.explicit, Phase.generate))
settings.load_profile("project")
register()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in ("integration", "full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture
def serve():
    """Makes a reward server that gives these answers, and ends it after the test."""
    from reward_server import Server

    servers = []

    def make(*answers):
        servers.append(Server(*answers).start())
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
