"""The package: the wheel without our scripts, commands that lack an extra, and the checks of a change."""

import ast
import inspect
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pipeline
import pytest
import torch
import yaml

import openrlhf_bapo

# The packages that the core needs, by their names in site-packages.
NEEDED = "torch torchgen functorch filelock fsspec jinja2 markupsafe mpmath networkx sympy numpy numpy.libs".split()

USE = """
import openrlhf_bapo, torch
ratio, advantages = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([1.0, -1.0, 1.0])
bounds = openrlhf_bapo.find_clip_bounds(ratio, advantages, torch.ones(3), openrlhf_bapo.ClipConfig.preset("paper"))
print(openrlhf_bapo.__file__, openrlhf_bapo.__version__, bounds.lower.item(), bounds.upper.item())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The programs of an environment that has the wheel, torch and numpy alone; the wheel and its source pass twine."""
    directory = tmp_path_factory.mktemp("package")
    python, packages = (sys.executable, "-m"), directory / "dist"
    build = *python, "build", "--no-isolation", "--outdir", packages, pipeline.REPOSITORY
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run([*python, "twine", "check", "--strict", *packages.iterdir()], check=True, capture_output=True)
    venv.create(directory / "venv", symlinks=True)
    (site_packages,) = (directory / "venv").glob("lib/python*/site-packages")
    for name in (*NEEDED, "typing_extensions.py"):
        (site_packages / name).symlink_to(Path(torch.__file__).parents[1] / name)
    found = directory / "venv" / "bin"
    install = *python, "pip", "--python", found / "python", "install", "--quiet", "--no-deps"
    subprocess.run([*install, *packages.glob("*.whl")], check=True)
    return found


def test_the_wheel_with_torch_and_numpy_alone_finds_clip_bounds_and_has_types_and_the_one_version(bare):
    run = subprocess.run([bare / "python", "-c", USE], capture_output=True, text=True, check=True, cwd=bare)
    file, *found = run.stdout.split()
    assert found == [openrlhf_bapo.__version__, "0.6", "1.2"] and metadata.version("openrlhf-bapo") == found[0]
    assert Path(file).is_relative_to(bare.parent) and (Path(file).parent / "py.typed").exists()


@pytest.mark.parametrize(("command", "extra"), [("train", "openrlhf"), ("data", "math"), ("plot", "plot")])
def test_a_command_that_lacks_an_extra_says_in_one_line_which_to_install(bare, command, extra):
    run = subprocess.run([bare / "openrlhf-bapo", command], capture_output=True, text=True)
    (line,) = run.stderr.splitlines()
    assert run.returncode == 1 and line.startswith(f"openrlhf-bapo {command} needs ")
    assert line.endswith(f": pip install 'openrlhf-bapo[{extra}]'")


def test_the_types_that_a_checker_sees_are_of_the_public_names():
    (block,) = (node for node in ast.parse(inspect.getsource(openrlhf_bapo)).body if isinstance(node, ast.If))
    typed = {alias.name: statement.module for statement in block.body for alias in statement.names}
    assert typed == openrlhf_bapo._MODULES


def test_the_workflow_runs_the_gate():
    workflow = yaml.safe_load((pipeline.REPOSITORY / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"} and (pipeline.REPOSITORY / ".ci/run").is_file()


def test_the_pre_commit_hooks_run_programs_that_setup_installs():
    (hooks,) = yaml.safe_load((pipeline.REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    programs = [Path(hook["entry"].split()[0]) for hook in hooks["hooks"]]
    assert hooks["repo"] == "local" and {str(program.parent) for program in programs} == {".venv/bin"}
    assert all(Path(sys.executable).with_name(program.name).exists() for program in programs)
