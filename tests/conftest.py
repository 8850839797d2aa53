"""Settings and fixtures of all tests."""

import subprocess

import pytest
from hypothesis import Phase, settings
from patience import PATIENCE
from xdist.scheduler import LoadFileScheduling

from openrlhf_bapo import register

pytest.register_assert_rewrite("pipeline", "recordings", "partial", "endings")  # so that their assertions show values
settings.register_profile("project", deadline=None, max_examples=150)
# For tools/mutation.py: a test notices a planted fault only if it finds the fault within 50 examples.
settings.register_profile("mutation", deadline=None, max_examples=50, phases=(Phase.explicit, Phase.generate))
settings.load_profile("project")
register()


# A run takes up to half of the memory that CI has. One process runs them one by one, and first: they take long.
LARGE = ("tests/full/test_two_nodes.py", "tests/full/test_verl.py")


class ByFile(LoadFileScheduling):
    """Gives each process whole files, and one process all that are large."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "large" if file in LARGE else file


@pytest.hookimpl(optionalhook=True)  # tools/mutation.py runs without xdist
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LARGE))
    for item in items:
        item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Show what a process that failed has written: its error says only the command and the exit code."""
    report = yield
    if call.excinfo and isinstance(error := call.excinfo.value, subprocess.CalledProcessError):
        for name in ("stdout", "stderr"):
            report.sections.append((f"{name} of {error.cmd}"[:200], str(getattr(error, name))[-5000:]))
    return report


@pytest.fixture
def serve():
    """A function that starts a reward server with the given answers. The server is stopped after the test."""
    from reward_server import Server

    servers = []

    def make(*answers):
        servers.append(Server(*answers).start())
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
