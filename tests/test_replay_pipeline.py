"""Replay through the real pipeline: staleness, the ratios that follow from the kept log-probs, and resuming."""

import os
import signal
import sys
import time
from collections import Counter

import pipeline
import pytest

from openrlhf_bapo.adapter.flags import replay_config_from_args
from openrlhf_bapo.adapter.replay_checkpoint import load_saved_pool, pool_directory


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path, num_prompts=160)


def replay_flags(directory, **overrides) -> list[str]:
    """Ten global steps of 16 fresh groups of 4 and as many replayed ones."""
    return pipeline.flags(
        directory,
        policy_loss="bapo",
        data__max_samples=160,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        replay__ratio=1,
        replay__max_staleness=4,
        replay__max_reuse=2,
        **overrides,
    )


def test_flags_fill_the_pools_settings(tmp_path):
    (tmp_path / "reward.py").touch()
    config = replay_config_from_args(pipeline.parse(replay_flags(tmp_path, replay__strategy="advantage")).replay)
    assert (config.ratio, config.max_staleness, config.max_reuse, config.strategy) == (1.0, 4, 2, "advantage")


def test_in_async_training_versions_come_from_the_engine_and_staleness_reaches_the_ratio(directory):
    flags = replay_flags(
        directory,
        data__max_len=72,
        rollout__max_new_tokens=64,
        train__async_enable=True,
        train__async_queue_size=2,
    )
    steps = pipeline.steps(pipeline.train(directory, flags, "async"))
    assert len(steps) == 10
    # OpenRLHF's queue of two: what it hands over is two versions old once it is full.
    assert any(step["offpolicy/staleness_mean"] >= 1 for step in steps)
    stale = [step for step in steps if step["offpolicy/staleness_mean"] > 0]
    assert any(abs(step[name] - 1) > 1e-3 for step in stale for name in step if "ratio_mean/staleness_" in name)
    # Partial rollouts, in which they can differ: tests/test_recipes.py.
    assert all(step["offpolicy/mixed_versions"] == 0 for step in steps)


def test_a_killed_run_resumes_with_its_pool_and_draws_what_it_would_have_drawn(directory, capsys):
    flags = replay_flags(directory, ckpt__save_steps=3, ckpt__max_num=1)
    log = directory / "killed.log"
    with pipeline.running([sys.executable, "-m", "openrlhf_bapo.cli.train_ppo_ray", *flags], log) as process:
        for _ in range(600):
            if "Global step 4" in log.read_text():
                break
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)

    resume = [*flags, "--ckpt.load_enable"]
    args = pipeline.parse(resume)
    pool, version = load_saved_pool(args)
    assert version == 3 and len(pool) >= 8
    pool.sample(0, version)
    num_groups = min(16, len(pool)) // 8 * 8  # whole optimizer steps of 32 samples
    drawn = pool.sample(num_groups, version)
    expected = Counter()
    for sample in (sample for group in drawn for sample in group.samples):
        expected.update((version - sample["versions"][sample["action_mask"]]).tolist())

    first, *_, last = steps = pipeline.steps(pipeline.train(directory, resume, "resumed"))
    assert len(steps) == 7  # 4 to 10
    assert first["replay/groups_sampled"] == len(drawn) > 0
    assert first["offpolicy/staleness_max"] == max(expected)
    one, two_and_three = (first.get(f"offpolicy/token_frac/staleness_{label}", 0.0) for label in ("1", "2-3"))
    assert one * (expected[2] + expected[3]) == pytest.approx(two_and_three * expected[1])
    assert one + two_and_three > 0
    assert last["offpolicy/staleness_max"] <= 4
    # Pruned together with OpenRLHF's own.
    assert {d.name for d in (directory / "ckpt/_replay").iterdir()} == {
        d.name for d in (directory / "ckpt/_actor").iterdir() if d.is_dir()
    }

    saved = pool_directory(args.ckpt.path) / "groups.safetensors"
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        pipeline.parse(resume)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_.value.code == 2 and str(saved) in error and "--replay.discard_saved" in error
    pipeline.parse([*resume, "--replay.discard_saved"])
