"""The minimal example learns between found bounds, is short, and needs only torch and the package."""

import ast
import re
import subprocess
import sys

from pipeline import REPOSITORY

FILE = REPOSITORY / "examples" / "minimal_torch" / "train.py"


def test_the_minimal_example_learns_between_bounds_that_move():
    run = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=True)
    rows = [[float(number) for number in re.findall(r"\d+\.\d+|nan", line)] for line in run.stdout.splitlines()]
    rewards, lower, upper, share = zip(*rows, strict=True)
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 > 0.8
    assert len(set(lower)) > 1 and len(set(upper)) > 1
    assert min(lower) >= 0.6 and max(lower) <= 0.9 and min(upper) >= 1.2 and max(upper) <= 3.0
    assert 0.3 < sum(share[:5]) / 5 < 0.5  # wrong responses are longer, as in the paper's Figure 6


def test_the_minimal_example_has_at_most_100_lines_and_imports_torch_and_the_package_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 100
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {getattr(node, "module", None) or node.names[0].name for node in nodes} == {"torch", "openrlhf_bapo"}
