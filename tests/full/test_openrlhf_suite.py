"""OpenRLHF's own tests, which its wheel ships, pass with our plugin registered."""

import importlib.metadata
import re
import subprocess
import sys

NUM_TESTS = 221


def test_openrlhfs_own_suite_passes_with_the_plugin_registered(tmp_path):
    files = importlib.metadata.files("openrlhf")
    suite = next(file for file in files if file.parts[0] == "tests" and file.suffix == ".py").locate().parent
    code = "import sys, openrlhf_bapo, pytest; openrlhf_bapo.register(); sys.exit(pytest.main(sys.argv[1:]))"
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={suite}",
            "-c",
            "/dev/null",
            str(suite),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) == NUM_TESTS
