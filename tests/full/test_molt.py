"""BAPO in Molt, in Molt's environment: its cases, and a whole run."""

import pipeline
import pytest

from openrlhf_bapo.cli import plot

CPU = pipeline.python_path(pipeline.REPOSITORY / "examples/molt/cpu", pipeline.SUPPORT)
IMPORTS = ("torch", "transformers", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker")
TARGET = 0.56  # laptop.sh's


@pytest.fixture(scope="module")
def programs():
    return pipeline.framework_programs("molt")


def test_molts_cases_pass_in_its_environment(programs, tmp_path):
    pipeline.assert_cases_pass("molt", programs, tmp_path / "log", CPU)


def test_molts_command_learns_on_two_ranks_from_stale_rollouts_between_bounds_that_it_finds(programs, tmp_path):
    run = pipeline.run_laptop(
        "molt",
        pipeline.warm_python(programs / "python", *IMPORTS, python_path=CPU),
        tmp_path,
        *("--ckpt.save_steps", "4"),
    )
    scalars = {
        name.removeprefix("train/"): values for name, (_, values) in plot.read_scalars(run / "tensorboard").items()
    }
    rewards = scalars["reward"]
    assert len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.3
    # The first rollout has the weights that are trained; later ones begin before the step before them is trained.
    assert scalars["vllm_kl"][0] < 0.02 < max(scalars["vllm_kl"][1:4])
    assert max(scalars["offpolicy/ess"]) < 1 and scalars["is_filter_ratio"] == [0] * 8
    columns = ("clip_low", "clip_high", "positive_share", "initial_share", "target_reached")
    for lower, upper, share, before, reached in zip(*(scalars[f"bapo/{name}"] for name in columns), strict=True):
        assert 0.6 <= lower <= 0.9 and 1.2 <= upper <= 3.0
        assert share >= before and (reached < 1 or share >= TARGET)
    assert max(scalars["bapo/clip_high"]) > 1.21  # and there was something to find
    saved = run / "checkpoints" / "_actor"
    assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["global_step4", "global_step8"]
