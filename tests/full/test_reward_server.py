"""A reward server that restarts in the middle of async training."""

import pipeline

from openrlhf_bapo.openrlhf.reward_calls import KINDS


def test_async_training_outlasts_a_restart_of_the_server_and_drops_a_group_that_got_nan(tmp_path, serve):
    directory = pipeline.make_model(tmp_path)
    answers = [(200, f'{{"rewards": [{n % 3}]}}') for n in range(64 * 5)]
    server = serve(*answers[:20], (200, '{"rewards": [NaN]}'), *answers)
    flags = dict(reward__remote_url=server.url, train__async_enable=True, data__max_samples=64)
    command = [pipeline.warm_python(), *pipeline.TRAIN]
    command += pipeline.flags(directory, policy_loss="bapo", **flags)
    log = directory / "log"
    with pipeline.running(command, log) as process:
        pipeline.wait_until(lambda: len(server.requests) > 70, process, log)  # the second batch is under way
        server.stop()
        pipeline.wait_until(lambda: "reward server away" in log.read_text(), process, log)
        server.start()
        assert process.wait() == 0, log.read_text()[-3000:]
    steps = pipeline.steps(log.read_text())
    # 64 prompts make four batches of 16; one group is lost, and seven more make no whole optimizer step without it.
    assert [step["rollout/num_samples"] for step in steps] == [64, 64, 64, 32]
    counted = {name: sum(step.get(f"reward_fault/{name}", 0) for step in steps) for name in ("dropped", *KINDS)}
    assert {name: count for name, count in counted.items() if count} == {"dropped": 1, "not_finite": 1}
    assert sum(step.get("rollout/groups_left_over", 0) for step in steps) == 7
