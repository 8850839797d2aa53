"""The control flow of a recipe and of the set-up; a program that notes its arguments stands for those they start."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pipeline
import pytest

PROGRAM = r"""#!/usr/bin/env bash
if [ "$1" = progress ]; then exec cat; fi # beside the others
{ printf '%q ' "$(basename "$0")" "$@"; echo; } >>calls
if [ -e failing ] && [[ " $* " = *" $(<failing) "* ]]; then
  echo "the last words" >&2
  exit 7
fi
"""


class Tree:
    """A copy of the scripts with a virtual environment of such programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(pipeline.REPOSITORY / "scripts", folder / "scripts")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(pipeline.REPOSITORY / name, folder)
        for name in ("pip", "uv", "python", "openrlhf-bapo", "ray"):
            self.make(folder / ".venv/bin" / name, PROGRAM)
        for name in ("prompts.jsonl", "first.jsonl", "second.jsonl"):
            (folder / name).touch()

    @staticmethod
    def make(program: Path, text: str) -> None:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def fail(self, word: str) -> None:
        """Let the programs fail that have this among their arguments."""
        (self.folder / "failing").write_text(word)

    def run(self, script: str, *flags: str, **environment) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        """A script's run, and the programs that it started, with their arguments."""
        calls = self.folder / "calls"
        calls.write_text("")
        outside = {name: os.environ[name] for name in ("PATH", "HOME")}
        environment = outside | {name: str(value) for name, value in environment.items()}
        command = ["bash", f"scripts/{script}", *flags]
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        return run, [shlex.split(line) for line in calls.read_text().splitlines()]

    def train(self, *flags: str, **environment):
        """A recipe's run, and its calls of the command, or of Ray's, by what they do."""
        data = dict(DATA="prompts.jsonl", EVAL_DATA="first.jsonl second.jsonl", RUN="run", DEVICE="cpu")
        run, calls = self.run("train_bapo_qwen7b.sh", *flags, **data | environment)
        return run, {verb: call for call in calls for verb in ("train", "plot", "evaluate") if verb in call}


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def values_of(call: list[str], flag: str) -> list[str]:
    """The word after the flag, wherever the call has it."""
    return [value for word, value in itertools.pairwise(call) if word == flag]


def test_a_recipe_trains_draws_the_run_and_evaluates_the_model_on_every_file(tree):
    run, calls = tree.train()
    assert run.returncode == 0, run.stderr
    assert [*calls] == ["train", "plot", "evaluate"]
    place = calls["evaluate"].index("--data")
    assert calls["evaluate"][place : place + 4] == ["--data", "first.jsonl", "second.jsonl", "--n"]
    assert values_of(calls["evaluate"], "--model") == values_of(calls["train"], "--ckpt.output_dir") == ["run/model"]
    assert [*tree.train(EVAL_N=0)[1]] == ["train", "plot"]


def test_a_recipe_whose_training_fails_ends_with_its_exit_code_and_does_nothing_more(tree):
    tree.fail("train")
    run, calls = tree.train()
    assert run.returncode == 7 and [*calls] == ["train"]
    assert "the last words" in run.stdout


def test_a_recipe_that_is_run_again_resumes_where_a_whole_checkpoint_is_and_only_there(tree):
    checkpoints = tree.folder / "run/checkpoints/_actor"
    checkpoints.mkdir(parents=True)  # of a run that ended before its first checkpoint was whole
    run, calls = tree.train()
    assert "--ckpt.load_enable" not in calls["train"] and "resuming" not in run.stdout
    (checkpoints / "latest").write_text("global_step20")
    run, calls = tree.train()
    assert "--ckpt.load_enable" in calls["train"] and "resuming from run/checkpoints\n" in run.stdout


def test_overrides_win_over_the_recipe_and_the_command_lines_flags_over_them(tree):
    lines = ["# a comment", "", "--train.batch_size 128", "--train.async_enable", "--ckpt.max_num 5"]
    (tree.folder / "overrides").write_text("\n".join(lines))  # without a line end after the last
    _, calls = tree.train("--train.batch_size", "256", OVERRIDES="overrides")
    assert values_of(calls["train"], "--train.batch_size") == ["512", "128", "256"]
    assert values_of(calls["train"], "--train.async_enable") == ["--ckpt.max_num"]  # it has no value
    assert values_of(calls["train"], "--ckpt.max_num") == ["2", "5"]
    assert "comment" not in " ".join(calls["train"])


def test_a_submitted_recipe_trains_and_evaluates_on_the_cluster_and_draws_here(tree):
    _, calls = tree.train(SUBMIT="http://head:8265")
    command = ["ray", "job", "submit", "--address", "http://head:8265", "--", f"{tree.folder}/.venv/bin/openrlhf-bapo"]
    assert [calls[verb][:8] for verb in ("train", "evaluate")] == [[*command, verb] for verb in ("train", "evaluate")]
    assert calls["plot"][0] == "openrlhf-bapo"


def test_a_followed_command_ends_when_all_of_its_output_has_been_shown(tree):
    # The one that shows it is still at work when the command has ended.
    tree.make(tree.folder / ".venv/bin/openrlhf-bapo", "#!/usr/bin/env bash\ncat\nsleep 1\necho shown\n")
    (tree.folder / "scripts/followed.sh").write_text('source scripts/follow.sh; follow log 1 "$@"; echo after\n')
    run, _ = tree.run("followed.sh", "echo", "said")
    assert run.stdout.splitlines() == ["said", "shown", "after"]


def set_up(tree, **environment) -> tuple[subprocess.CompletedProcess, str]:
    """The set-up's run, and the device that it installed packages for, or "" if it installed none."""
    run, calls = tree.run("setup.sh", **environment)
    installed = " ".join(" ".join(call) for call in calls)
    return run, "gpu" if "flash-attn" in installed else "cpu" if "requirements-cpu" in installed else ""


def test_a_set_up_is_made_once_for_each_device(tree):
    assert [set_up(tree, DEVICE=device)[1] for device in ("cpu", "cpu", "gpu", "gpu", "cpu")] == [
        "cpu",
        "",
        "gpu",
        "",
        "cpu",
    ]


def test_a_set_up_is_made_for_the_device_that_is_there_unless_one_is_named(tree):
    programs = tree.folder / "programs"
    tree.make(programs / "nvidia-smi", "#!/bin/sh\n")
    path = f"{programs}:{os.environ['PATH']}"
    assert [set_up(tree, PATH=path, **named)[1] for named in ({}, {"DEVICE": "cpu"})] == ["gpu", "cpu"]
    tree.make(programs / "nvidia-smi", "#!/bin/sh\nexit 1\n")
    assert [set_up(tree, PATH=path, **named)[1] for named in ({"DEVICE": "gpu"}, {})] == ["gpu", "cpu"]


@pytest.mark.parametrize("at", ["scripts/requirements-cpu.txt", "compileall"])
def test_a_set_up_that_fails_shows_its_last_lines_and_is_made_again(tree, at):
    tree.fail(at)
    run, _ = set_up(tree, DEVICE="cpu")
    assert run.returncode == 7
    assert re.search("setup failed; its last lines:\n(.*\n)*the last words\n$", run.stdout)
    (tree.folder / "failing").unlink()
    run, device = set_up(tree, DEVICE="cpu")
    assert (run.returncode, device) == (0, "cpu")
