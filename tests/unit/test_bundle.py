"""Offline installation: a bundle of an environment's packages becomes .venv elsewhere, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pipeline
import pytest

sys.path.append(str(pipeline.REPOSITORY / "tools"))
import bundle as bundle_tool

NEEDED = ("tools/bundle.py", "scripts/collect_bundle.sh", "scripts/install_bundle.sh", *bundle_tool._OF_SETUP)
PYTHON = sys._base_executable


def add_distribution(venv: Path, name: str, files: dict[str, bytes]) -> None:
    """Install a distribution by hand: its files, relative to site-packages, and the list of them."""
    (packages,) = venv.glob("lib/python*/site-packages")
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, content in files.items():
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_bytes(content)
        (packages / file).chmod(0o755)
    listed = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in listed))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The repository on the connected machine, and a bundle in three pieces of the environment there."""
    folder = tmp_path_factory.mktemp("bundle")
    repository, venv = folder / "connected", folder / "connected/.venv"
    copy_repository(repository)
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    program = f"#!{venv}/bin/python\nimport tiny; print(tiny.TEXT)\n".encode()
    files = {"tiny/__init__.py": b"TEXT = 'it works'\n", "tiny/data": os.urandom(2_500_000), "tiny/gpu.so": b"large"}
    add_distribution(venv, "tiny", files | {"../../../bin/tiny": program, "../../../bin/pip": b"none"})
    add_distribution(venv, "torch", {"torch/__init__.py": b""})
    add_distribution(venv, "On_The.Node", {"on_the_node.py": b""})
    (folder / "freeze").write_text("# of the node\ntorch==2.11.0\non-the-node @ file:///x\n")
    command = ["bash", "scripts/collect_bundle.sh", folder / "bundle", "--venv", venv, "--device", "gpu"]
    command += ["--piece_mb", "1", "--without", folder / "freeze", "--leave_out", "tiny/*.so"]
    subprocess.run(command, cwd=repository, check=True, env=os.environ | {"PYTHON": PYTHON})
    return folder / "bundle"


def copy_repository(to: Path) -> None:
    for name in NEEDED:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pipeline.REPOSITORY / name, to / name)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The node's environment, which has torch and another package beside it."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    add_distribution(folder, "torch", {"torch/__init__.py": b"__version__ = '2.11.0'\n"})
    return folder


@pytest.fixture
def node(tmp_path, base):
    """A repository on the node, beside its environment, with an old .venv."""
    copy_repository(tmp_path / "repository")
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "repository/.venv").mkdir()
    (tmp_path / "repository/.venv/old").touch()
    return tmp_path


def install(node: Path, bundle: Path, *options: object, python: str = PYTHON) -> subprocess.CompletedProcess:
    options = options or ("--on", node / "base/bin/python")
    return subprocess.run(
        ["bash", "scripts/install_bundle.sh", bundle, *options],
        cwd=node / "repository",
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
    )


def test_a_bundle_has_pieces_that_fit_and_nothing_that_was_left_out(made):
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["packages"] == ["tiny==1.0"] and manifest["device"] == "gpu"
    sizes = {file.name: file.stat().st_size for file in made.glob("packages.*")}
    assert sizes == {piece["name"]: piece["bytes"] for piece in manifest["pieces"]}
    assert len(sizes) == 3 and max(sizes.values()) == 2**20


def test_the_installed_environment_runs_sees_the_nodes_torch_and_counts_as_set_up(made, node):
    before = {file: file.stat().st_mtime_ns for file in (node / "base").rglob("*")}
    run = install(node, made)
    assert run.returncode == 0, run.stderr
    venv = node / "repository/.venv"
    assert [*venv.glob("lib/python*/site-packages/tiny/__pycache__/__init__.*.pyc")], "each process would compile it"
    assert not (venv / "old").exists() and not [*venv.parent.glob(".venv.*")]
    assert (venv / "bin/tiny").read_text().startswith(f"#!{venv}/bin/python\n")
    assert subprocess.run([venv / "bin/tiny"], capture_output=True).stdout == b"it works\n"
    ask = "import sys, torch, tiny, os; print(torch.__version__, os.listdir(os.path.dirname(tiny.__file__)), *sys.path)"
    said = subprocess.run([venv / "bin/python", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said.startswith("2.11.0 ") and "gpu.so" not in said and str(node / "repository") in said.split()
    assert f'VIRTUAL_ENV="{venv}"' in (venv / "bin/activate").read_text().replace("'", '"')
    # It would print its steps, and ask the network.
    setup = subprocess.run(["bash", "scripts/setup.sh"], cwd=venv.parent, capture_output=True, text=True)
    assert (setup.returncode, setup.stdout) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in (node / "base").rglob("*")} == before


def edit(**values):
    """A fault: a manifest with other values."""

    def fault(bundle: Path, _: Path) -> None:
        manifest = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(json.dumps(manifest | values))

    return fault


def damage(bundle: Path, _: Path) -> None:
    content = bytearray((bundle / "packages.001").read_bytes())
    content[1000] ^= 1
    (bundle / "packages.001").write_bytes(content)


FAULTS = {
    "a piece that is missing": (
        lambda b, _: (b / "packages.001").unlink(),
        "packages.001: is missing; the bundle has 3",
    ),
    "a piece that was cut": (lambda b, _: os.truncate(b / "packages.002", 9), "packages.002: has 9 bytes instead of "),
    "a piece that is damaged": (damage, "packages.001: is damaged (its checksum differs); copy it again"),
    "no manifest": (lambda b, _: (b / "manifest.json").unlink(), "no bundle (FileNotFoundError: manifest.json)"),
    "another format": (edit(format=1), "a bundle of format 1; allowed: 2"),
    "another Python": (edit(python="3.9"), "is for Python 3.9, here it is 3."),
    "another CPU": (edit(machine="aarch64"), "is for a CPU of kind aarch64, and this is "),
    "a full disk": (edit(bytes=2**60), " bytes are free on its disk, and the bundle needs 1,15"),
    "another state of the repository": (
        lambda _, node: (node / "repository/setup.cfg").write_text("other"),
        "was made by another version of this repository",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bundle_that_cannot_be_installed_is_one_line_and_leaves_the_old_environment(made, node, fault):
    change, said = FAULTS[fault]
    shutil.copytree(made, node / "copy")
    change(node / "copy", node)
    refused(node, install(node, node / "copy"), said)


def refused(node: Path, run: subprocess.CompletedProcess, said: str) -> None:
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith("openrlhf-bapo: ") and said in line, line
    assert [file.name for file in node.glob("repository/.venv*")] == [".venv"]
    assert [file.name for file in node.glob("repository/.venv/*")] == ["old"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--on", PYTHON], "has no torch; allowed: --on PYTHON"),
        (["--on", "/no/python"], "--on /no/python: is no Python interpreter that runs here"),
        (["--onto", "x"], "unrecognized arguments: --onto x"),
    ],
)
def test_a_wrong_option_of_the_installation_is_one_line(made, node, options, said):
    refused(node, install(node, made, *options), said)


def test_an_installation_that_is_interrupted_leaves_the_old_environment(made, node):
    # An interpreter that makes the environment and then stands still.
    slow = node / "slow"
    slow.write_text(f'#!/bin/sh\n{PYTHON} "$@"\ncase "$*" in *venv*) touch {node}/made; exec sleep 1000;; esac\n')
    slow.chmod(0o755)
    shutil.copytree(made, node / "copy")
    edit(without=[])(node / "copy", node)
    command = [PYTHON, "tools/bundle.py", "install", node / "copy", "--on", slow]
    with pipeline.running(["env", "-C", node / "repository", *map(str, command)], node / "log") as run:
        pipeline.wait_until((node / "made").exists, run, node / "log")
        assert (node / "repository/.venv.part").exists()
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 143
    assert [file.name for file in node.glob("repository/.venv*")] == [".venv"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--piece_mb", "0"], "--piece_mb 0: allowed: 1 or more"),
        (["--without", "nowhere"], "--without nowhere: no such file"),
        (["--venv", "nowhere"], "--venv nowhere: is no environment"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_option_of_the_collection_is_one_line(node, options, said):
    command = [PYTHON, "tools/bundle.py", "collect", node / "new", "--device", "cpu", "--venv", node / "base", *options]
    run = subprocess.run(command, cwd=node / "repository", capture_output=True, text=True)
    assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1
    assert not (node / "new").exists()
