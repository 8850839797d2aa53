"""The last lines of a run that ends before its time: the cause, the last saved step, and where the output is."""

import endings


def test_a_reward_function_that_fails_in_the_second_step_is_the_last_thing_said_and_the_first_step_is_saved(tmp_path):
    endings.assert_a_failing_reward_is_said_and_the_first_step_is_saved(tmp_path)


def test_an_actor_that_is_killed_is_the_last_thing_said(tmp_path):
    endings.assert_a_killed_process_is_said(tmp_path, "PolicyModelActor", "an actor's process, which trains")
