"""A process that is forked from a template is the process that `python` would have started."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pipeline
import psutil
import pytest

SAYS_WHAT_IT_IS = """
import multiprocessing, os, sys
print(sys.argv, os.getcwd(), os.environ["GIVEN"], "HOME" in os.environ, sys.stdin.read(), os.read(int(sys.argv[2]), 9))
print(os.getpgrp() == int(sys.argv[1]), sys.path[0], __name__, file=sys.stderr)
sys.exit("the end")
"""


@pytest.mark.parametrize("kind", ["-c", "script", "-m"])
def test_a_warm_process_has_the_arguments_environment_files_group_and_exit_code_of_a_cold_one(tmp_path, kind):
    (tmp_path / "program.py").write_text(SAYS_WHAT_IT_IS)
    code = {"-c": ["-c", SAYS_WHAT_IT_IS], "script": [str(tmp_path / "program.py")], "-m": ["-m", "program"]}[kind]

    def run(python: str) -> subprocess.CompletedProcess:
        file, end = os.pipe()
        os.write(end, b"a file")
        os.close(end)
        environment = {"GIVEN": "value", "PATH": os.environ["PATH"]}
        command = [python, "-u", *code, str(os.getpgrp()), str(file)]
        options = dict(cwd=tmp_path, env=environment, pass_fds=[file], input="text", capture_output=True, text=True)
        try:
            return subprocess.run(command, **options)
        finally:
            os.close(file)

    warm, cold = run(pipeline.warm_python()), run(sys.executable)
    assert (warm.returncode, warm.stdout.replace("program.py", "")) == (1, cold.stdout.replace("program.py", ""))
    assert "a file" in warm.stdout and warm.stderr == cold.stderr and warm.stderr.endswith("the end\n")


WAITS = f"import os, time; print(os.getpid(), flush=True); time.sleep({pipeline.PATIENCE})"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_warm_process_ends_with_its_client(number):
    with subprocess.Popen([pipeline.warm_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as client:
        process = psutil.Process(int(client.stdout.readline()))
        client.send_signal(number)
        assert client.wait() == -number
        assert process.pid != client.pid and psutil.wait_procs([process])


def test_clients_that_are_killed_before_they_have_a_process_do_not_end_the_template():
    python = pipeline.warm_python()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(Path(python).with_name("socket")))
    assert subprocess.run([python, "-c", "print(1)"], capture_output=True).stdout == b"1\n"
