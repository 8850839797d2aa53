"""The last lines of a run that ends before its time: the cause, the last saved step, and where the output is."""

import os
import signal

import endings
import pipeline


def test_a_reward_function_that_fails_in_the_second_step_is_the_last_thing_said_and_the_first_step_is_saved(tmp_path):
    endings.assert_a_failing_reward_is_said_and_the_first_step_is_saved(tmp_path)


def test_an_actor_that_is_killed_is_the_last_thing_said(tmp_path):
    endings.assert_a_killed_process_is_said(tmp_path, "PolicyModelActor", "an actor's process, which trains")


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
