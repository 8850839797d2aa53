"""The last lines of runs whose engines end or do not start, and of runs that a signal ends."""

import os
import re
import signal
import sys

import endings
import pipeline

SLOW_REWARD = f"""
import pathlib, time


def reward_func(queries, prompts, labels, **kwargs):
    pathlib.Path(__file__).with_name("asked").touch()
    time.sleep({pipeline.PATIENCE})
"""

ENDS_ITS_ENGINE = """
import psutil, torch

calls = 0


def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls == 128:  # the second step's last: the next that meets the engine is the actor, with new weights
        for process in psutil.Process().parent().children():  # of the warm Python that both are forked from
            if process.name().startswith("VLLM"):
                process.kill()
    return {"rewards": torch.tensor([float(len(queries[0]) % 2)])}
"""

FAILS_IN_AN_ENGINE = """
import sys

if "vllm" in sys.modules:
    raise OSError("no licence on this node")


def reward_func(queries, prompts, labels, **kwargs): ...
"""

TWO_RUNS = """
import subprocess, sys, ray
from openrlhf_bapo.openrlhf.interrupts import is_interrupted, interrupt_trainer

if len(sys.argv) > 1:
    ray.init(sys.argv[1])
else:
    ray.init(num_cpus=1, include_dashboard=False)
    interrupt_trainer()
print(is_interrupted(), flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, ray.get_runtime_context().gcs_address], check=True)
"""


def test_a_signal_to_one_run_of_a_cluster_does_not_end_another(tmp_path):
    (tmp_path / "runs.py").write_text(TWO_RUNS)
    with pipeline.running([sys.executable, str(tmp_path / "runs.py")], tmp_path / "log") as process:
        assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
    said = [line for line in (tmp_path / "log").read_text().splitlines() if line in ("True", "False")]
    assert said == ["True", "False"]


def test_an_async_runs_failing_reward_is_the_last_thing_said_and_the_first_step_is_saved(tmp_path):
    endings.assert_a_failing_reward_is_said_and_the_first_step_is_saved(tmp_path, train__async_enable=True)


def test_a_reward_that_fails_in_an_evaluation_is_the_last_thing_said_and_the_first_step_is_saved(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(endings.FAILING_REWARD)  # after the 64 rewards of the first step
    with endings.Run(directory, eval__dataset=directory / "train.jsonl", eval__steps=1) as run:
        code, lines = run.end()
    assert code == 1
    cause = f"--reward.remote_url {directory}/reward.py: ValueError: the verifier has gone"
    endings.assert_says(lines, directory, cause, step="1")


def test_an_engine_that_does_not_start_ends_the_run(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(FAILS_IN_AN_ENGINE)
    # A cold start, in which the process that checks the reward file has not imported vLLM.
    with endings.Run(directory, python=sys.executable) as run:
        code, lines = run.end()
    assert code == 1
    said = r"the run has ended: a rollout engine \(RolloutRayActor.*\) did not start: OSError: no licence on this node"
    assert re.search(said, lines[-3]), lines[-10:]


def test_an_engine_that_is_killed_is_the_last_thing_said(tmp_path):
    endings.assert_a_killed_process_is_said(tmp_path, "RolloutRayActor", "a rollout engine")


def test_an_engine_that_dies_before_the_weights_are_sent_is_the_last_thing_said(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(ENDS_ITS_ENGINE)
    with endings.Run(directory, ckpt__save_steps=1) as run:
        run.wait_for("step    1")
        code, lines = run.end()
    assert code == 1
    endings.assert_says(lines, directory, r"a rollout engine \(vLLM's EngineCore\) died; killed from outside", step="1")
    assert "gloo" in (directory / "train.log").read_text()  # all that the actor knows


def test_a_signal_while_the_engines_start_ends_the_run_before_its_first_step(tmp_path):
    directory = pipeline.make_model(tmp_path)
    with endings.Run(directory) as run:
        pipeline.wait_until(lambda: run.processes("ray::RolloutRayActor"), run.process, directory / "train.log")
        os.kill(run.process.pid, signal.SIGTERM)
        code, lines = run.end()
    assert code == 143
    assert "the run has ended: SIGTERM, before its first step" in lines[-3] and "nothing is saved" in lines[-2]


def test_a_second_signal_ends_a_run_at_once(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(SLOW_REWARD)
    with endings.Run(directory) as run:
        pipeline.wait_until((directory / "asked").exists, run.process, directory / "train.log")
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait_for("SIGTERM: ends after this training step")
        os.kill(run.process.pid, signal.SIGTERM)
        code, lines = run.end()  # a reward takes longer than the test may
    assert code == 143
    assert re.search("the run has ended: SIGTERM, SIGTERM, at once", lines[-3])
    assert "nothing is saved" in lines[-2]


def test_sigterm_and_ctrl_c_finish_the_step_save_it_and_a_resumed_run_goes_on_from_there(tmp_path):
    directory = pipeline.make_model(tmp_path)
    with endings.Run(directory, train__async_enable=True, train__async_queue_size=2) as run:  # and resumed without
        run.wait_for("step    2")
        os.kill(run.process.pid, signal.SIGTERM)  # the script alone, as Kubernetes does
        code, lines = run.end()
    first = endings.step_said(lines)
    assert code == 143 and endings.last_step(lines) <= first
    endings.assert_says(lines, directory, f"SIGTERM, after step {first}", step=str(first))
    with endings.Run(directory, ckpt__load_enable=True) as run:
        run.wait_for(f"step {first + 1:4}")
        os.killpg(run.process.pid, signal.SIGINT)  # the terminal's whole group, as Ctrl-C does
        code, lines = run.end()
    second = endings.step_said(lines)
    assert code == 130 and endings.last_step(lines) <= second > first and f"step {first:4}" not in "\n".join(lines)
    endings.assert_says(lines, directory, f"SIGINT, after step {second}", step=str(second))
