"""The tests' only time limit is tests/support/patience.py, and what hangs or fails says why."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import conftest
import pipeline
import pytest
from ranks import on_ranks

WAITS = set("alarm call check_call check_output communicate join result run timeout urlopen wait wait_for".split())
CLOCKS = {"monotonic", "perf_counter", "time"}
FILES = sorted((pipeline.REPOSITORY / "tests").rglob("*.py"))


def limits(source: str) -> list[str]:
    """Return the expressions that wait, or compute when to stop waiting, with a number as the limit."""
    found = []
    for node in ast.walk(ast.parse(source)):
        numbers: list[ast.AST] = []
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WAITS:
            numbers = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
        elif isinstance(node, ast.BinOp) and getattr(getattr(node.left, "func", None), "attr", "") in CLOCKS:
            numbers = [node.right]
        if any(isinstance(one, ast.Constant) and isinstance(one.value, int | float) for one in numbers):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(pipeline.REPOSITORY)))
def test_no_test_has_a_time_limit_of_its_own(file):
    assert limits(file.read_text()) == [], "a test waits without a limit; see tests/support/patience.py"


def test_a_number_as_a_time_limit_is_found():
    sources = [
        "process.wait(9)",
        "subprocess.run(['a'], timeout=9.5)",
        "time.monotonic() + 9",
        "asyncio.wait_for(x, 9)",
    ]
    assert [limits(source) for source in sources] == [[source] for source in sources]
    assert limits("process.wait(); ','.join(words); Limits(timeout=9); time.monotonic() + left") == []


def test_an_error_beside_a_running_process_shows_its_last_lines(tmp_path):
    log = tmp_path / "log"
    with (
        pytest.raises(AssertionError, match="the test's own") as failed,
        pipeline.running(["sh", "-c", "echo the cause; exec sleep 1000"], log) as process,
    ):
        pipeline.wait_until(lambda: log.read_text() != "", process, log)
        raise AssertionError("the test's own words")
    assert failed.value.__notes__[0].endswith("the cause\n") and process.returncode == -15


def test_a_failed_command_shows_what_it_wrote():
    command = [sys.executable, "-c", "import sys; sys.exit('the cause')"]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        subprocess.run(command, capture_output=True, text=True, check=True)
    report = SimpleNamespace(sections=[])
    hook = conftest.pytest_runtest_makereport(SimpleNamespace(excinfo=failed))
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)
    assert [text for name, text in report.sections if name.startswith("stderr of ")] == ["the cause\n"]


def fail_on_one_rank(rank: int) -> None:
    import torch

    if rank == 1:
        raise ValueError("the cause")
    torch.distributed.barrier()


def test_a_rank_that_fails_ends_the_others_and_says_why():
    with pytest.raises(Exception, match="ValueError: the cause"):
        on_ranks(2, fail_on_one_rank)
