"""The house: imports go one way, and importing the package stays cheap."""

import ast
import subprocess
import sys

import pytest
from pipeline import REPOSITORY

PACKAGE = REPOSITORY / "openrlhf_bapo"
# The imports that a layer below the seams may have, beside the standard library and itself.
LIBRARIES = {
    "rules": {"torch"},
    "offpolicy": {"safetensors", "torch"},
    "health": {"numpy"},
    "math_tasks": {"torch", "math_verify", "latex2sympy2_extended", "sympy"},
    "planning": set(),
}
# The parts of ours that a layer above them may import.
ALLOWED = {
    "rules": {"offpolicy", "rules"},
    "openrlhf": {"offpolicy", "openrlhf", "rules"},
    "flags": {"flags", "offpolicy", "openrlhf", "rules"},
    "run": {"flags", "openrlhf", "planning", "rules", "run"},
    "evaluation.py": {"flags", "math_tasks", "openrlhf"},
    "cli": {"cli", "evaluation", "flags", "health", "math_tasks", "offpolicy", "openrlhf", "planning", "rules", "run"},
}
FRAMEWORKS = {"openrlhf", "ray", "vllm", "deepspeed", "transformers", "trl", "verl", "molt"}


def imports(file) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_from_cli_to_runs_to_flags_to_seams_to_rules_to_samples(file):
    layer = file.relative_to(PACKAGE).parts[0]
    found = imports(file)
    roots = {name.split(".")[0] for name in found}
    if layer in LIBRARIES:
        assert roots <= {"openrlhf_bapo"} | LIBRARIES[layer] | set(sys.stdlib_module_names)
        ours = {name for name in found if name.startswith("openrlhf_bapo")}
        assert all(name.split(".")[1] in ALLOWED.get(layer, {layer}) for name in ours), ours
    if layer in ("trl.py", "trl_async.py", "verl.py", "verl_main.py", "molt.py"):
        framework = layer[:-3].split("_")[0]
        libraries = {"torch", "tensordict"} | {"molt.py": {"ray"}, "verl_main.py": {"omegaconf", "ray"}}.get(
            layer, set()
        )
        assert roots <= {"openrlhf_bapo", framework} | libraries | set(sys.stdlib_module_names)
        of_the_flags = {"molt.py": ("flags.loss_flags", "flags.mistakes"), "verl_main.py": ("flags.mistakes",)}
        allowed = tuple(
            f"openrlhf_bapo.{part}" for part in ("rules.", "offpolicy.", framework, *of_the_flags.get(layer, ()))
        )
        ours = {name for name in found if name.startswith("openrlhf_bapo.")}
        assert all(f"{name}.".startswith(allowed) for name in ours), ours
    if layer in ALLOWED:
        ours = {name for name in found if name.startswith("openrlhf_bapo.")}
        assert all(name.split(".")[1] in ALLOWED[layer] for name in ours), ours
    if layer == "cli":
        assert "openrlhf" not in roots
    if "cpu" not in file.parts and file.name not in ("__init__.py", "train_ppo_ray.py"):
        assert not any(name.startswith("openrlhf_bapo.openrlhf.cpu") for name in found)


def test_importing_the_package_loads_no_framework():
    code = f"import sys, openrlhf_bapo; print(*({FRAMEWORKS!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_the_loss_can_be_imported_without_registering_first():
    code = "from openrlhf_bapo import BapoPolicyLoss, ClipConfig; BapoPolicyLoss(clip_config=ClipConfig())"
    subprocess.run([sys.executable, "-c", code], check=True)
