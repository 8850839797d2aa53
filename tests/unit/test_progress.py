"""The progress of a run for a person: one line per step."""

import io
import re
import subprocess
import sys

import chaos
import pytest

from openrlhf_bapo.cli import progress

STEP = (
    "(PPOTrainer pid=1) INFO 11-20 ppo_trainer.py:551] Global step 7: {'rollout/reward_mean': 0.25, "
    "'entropy_loss': 0.5, 'bapo/clip_low': 0.6, 'bapo/clip_high': 1.75, 'bapo/positive_share': nan, 'other': 1}\n"
)
EVALUATION = (
    "(PPOTrainer pid=1) INFO Evaluation completed in 0:00:01, global_step {}, eval_metrics: {{'eval_sums_pass4': 0.5, "
    "'eval_sums_pass1': {}, 'eval_num_samples': 8.0}}\n"
)


COMPLETE = "openrlhf-bapo: the run is complete; its model is in out\n"


def test_a_step_and_an_evaluation_become_one_line_each_and_other_lines_are_not_shown():
    assert progress.describe(STEP) == "step    7  reward 0.250  entropy 0.500  clip low 0.600  clip high 1.750"
    assert progress.describe(EVALUATION.format(3, 0.25)) == "evaluation at step 3: sums_pass4 0.500, sums_pass1 0.250"
    assert progress.describe("anything else\n") is None


def test_values_that_are_not_finite_or_not_numbers_are_never_an_error():
    step = "Global step 3: {'policy_loss': inf, 'rollout/reward_mean': -inf, 'entropy_loss': nan, 'actor_grad_norm': "
    assert progress.describe(step + "1e-05, 'a': tensor(1.)}\n") == "step    3  reward -inf  grad norm 0.000"
    evaluation = progress.accuracy(EVALUATION.format(3, "-inf").replace("0.5", "nan"))
    assert str(evaluation) == "(3, {'sums_pass4': nan, 'sums_pass1': -inf})"
    assert progress.describe("Global step 4: {what is this}\n") == "step    4  "


def test_a_data_source_with_an_apostrophe_is_shown():
    metrics = {"eval_hendrycks' math_pass1": 0.5, "eval_sums_pass1": 0.25}
    shown = progress.describe(f"Evaluation completed in 0:00:01, global_step 3, eval_metrics: {metrics}\n")
    assert shown == "evaluation at step 3: hendrycks' math_pass1 0.500, sums_pass1 0.250"


@pytest.mark.parametrize("line", [STEP, EVALUATION.format(3, 0.25)])
@pytest.mark.parametrize("prefix", ["{} ", "\x1b[36m{}\x1b[0m "])
def test_a_line_that_ray_cut_in_pieces_is_shown_as_if_it_were_whole(tmp_path, line, prefix):
    actor, other = prefix.format("(PPOTrainer pid=1)"), prefix.format("(PPOTrainer pid=2)")
    text, whole = line.removeprefix("(PPOTrainer pid=1) "), progress.describe(line)
    first = text.index("{") + 1
    for cut, again in ((first, first + 9), (first + 20, len(text) - 5), (len(text) - 3, len(text) - 2)):
        parts = text[:cut], text[cut:again], text[again:]
        pieces = progress.Pieces()
        shown = [pieces.join(f"{actor}{part.rstrip()}\n") for part in parts[:2]]
        assert not any(map(progress.describe, shown)) and pieces.join(f"{other}a line\n") == f"{other}a line\n"
        assert progress.describe(pieces.join(actor + parts[2])) == whole
        assert pieces.join(f"{actor}the next\n") == f"{actor}the next\n"


def call(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "openrlhf_bapo.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def follow(tmp_path, text: str, *flags: str) -> subprocess.CompletedProcess:
    return call("progress", "--log", str(tmp_path / "log"), *flags, input=text)


def test_the_whole_output_is_kept_and_the_accuracy_is_summarized(tmp_path):
    text = EVALUATION.format(0, 0.25) + "noise\n" + STEP + EVALUATION.format(7, 0.75) + COMPLETE
    run = follow(tmp_path, text)
    assert (tmp_path / "log").read_text() == text
    assert "noise" not in run.stdout
    assert run.stdout.splitlines()[-1].endswith("held-out sums_pass1: 0.250 at step 0, 0.750 at step 7")


def test_output_that_is_not_text_is_followed_to_its_end(tmp_path):
    (tmp_path / "output").write_bytes(b"\xff\xfe\n" + (STEP + COMPLETE).encode())
    with open(tmp_path / "output") as output:
        run = call("progress", "--log", str(tmp_path / "log"), stdin=output)
    assert run.returncode == 0 and [line[9:13] for line in run.stdout.splitlines()] == ["step", "open"]
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def test_every_n_shows_the_first_step_every_nth_after_it_and_all_evaluations(tmp_path):
    steps = [STEP.replace("step 7", f"step {number}") for number in range(1, 7)]
    run = follow(tmp_path, EVALUATION.format(0, 0.25).join(steps) + COMPLETE, "--every", "2")
    shown = [line[9:].split("  reward")[0] for line in run.stdout.splitlines() if " step  " in line]
    assert shown == ["step    1", "step    3", "step    5"]
    assert run.stdout.count("evaluation at step 0") == 5


def test_lines_after_the_end_of_a_run_do_not_make_it_a_failure(tmp_path):
    run = follow(tmp_path, STEP + COMPLETE + "Job succeeded\n" * 20)
    assert run.stderr == "" and run.stdout.splitlines()[-1].endswith(COMPLETE.rstrip())


@pytest.mark.parametrize("before", ["starting\n", STEP], ids=["no step", "a step"])
def test_a_run_that_ends_without_a_message_shows_its_last_lines_and_names_the_log(tmp_path, before):
    run = follow(tmp_path, before + "loading\nTerminated\n")
    assert run.stderr.splitlines()[-4:] == [
        "loading",
        "Terminated",
        "the command ended here without a message, so it was probably killed",
        f"openrlhf-bapo: the whole output is in {tmp_path / 'log'}",
    ]
    (killed,) = [fault for fault in chaos.FAULTS if fault.name == "SIGKILL: command"]
    assert re.search(killed.said, run.stderr)


def test_the_cause_of_a_failure_is_printed_last(tmp_path):
    cause, saved = "openrlhf-bapo: the run has ended: a disk is full", "openrlhf-bapo: saved is ckpt (global_step2)"
    run = follow(tmp_path, f"{STEP}noise\n{cause}\n{saved}\nJob failed\n")
    assert [line[9:] for line in run.stdout.splitlines()[-2:]] == [cause, saved]
    assert run.stderr == f"openrlhf-bapo: the whole output is in {tmp_path / 'log'}\n"
    refused = "openrlhf-bapo: --train.batch_size 0: allowed: 1 or more\n"
    run = follow(tmp_path, refused)
    assert refused in run.stdout and "without a message" not in run.stderr


def test_a_warning_is_shown_at_once_and_does_not_count_as_the_cause_of_a_failure(tmp_path):
    warning = "openrlhf-bapo: warning: --eval.steps 5 does nothing without --eval.dataset\n"
    run = follow(tmp_path, warning + "noise\n" * 50)
    assert warning in run.stdout and "ended here without a message" in run.stderr


BARS = (
    "(PPOTrainer pid=1) Generate samples:  25%|##5       | 16/64 [00:10<00:30,  1.6it/s, prompts_consumed=64]\n",
    "(PolicyModelActor pid=2) Train epoch [1/2]:   0%|          | 0/8 [00:00<?, ?it/s]"
    "Train epoch [1/2]:  12%|#2        | 1/8 [00:07<00:49,  7.1s/it, act_loss=-0.04]\n",
)


def test_a_step_of_several_minutes_shows_its_progress(tmp_path, monkeypatch, capsys):
    text = "".join(BARS) + STEP + "Loading: 50%|#####     | 1/2 [00:01<00:01]\n"
    for seconds, lines in (
        (0, ["  generate samples: 16 of 64 prompts", "  train epoch [1/2]: 1 of 8 micro-batches of a rank"]),
        (600, []),
    ):
        monkeypatch.setattr(progress, "_QUIET_SECONDS", seconds)
        monkeypatch.setattr(progress.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((text + COMPLETE).encode())))
        progress.main(["--log", str(tmp_path / "log")])
        *shown, step, _ = (line[9:] for line in capsys.readouterr().out.splitlines())
        assert shown == lines and step == progress.describe(STEP)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--every", "0"], "--every 0: allowed: 1 or more"),
        (["--every", "x"], "argument --every: invalid int value: 'x'"),
        (["--log", "nowhere/log"], "--log nowhere/log: cannot be written (No such file or directory); allowed: "),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    run = follow(tmp_path, STEP, *flags)
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith(f"openrlhf-bapo: {said}")


@pytest.mark.parametrize("arguments", [[], ["trian", "--x"]])
def test_an_unknown_command_is_one_line_with_the_commands(arguments):
    run = call(*arguments)
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2
    said = arguments[0] if arguments else "the command is missing"
    assert line.startswith(f"openrlhf-bapo: {said}: allowed: train, plan, ")


def test_help_lists_the_commands():
    run = call("--help")
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith("usage: openrlhf-bapo {train,plan,")
