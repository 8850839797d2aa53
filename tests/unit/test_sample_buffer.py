"""Samples that wait for later training steps are part of the checkpoint, and a resumed run trains on them."""

from argparse import Namespace
from dataclasses import fields

import pipeline
import pytest
import torch
from test_partial_samples import GENERATE, NUM_SAMPLES, SIZES, directory, labels, make_generator, without_ray  # noqa: F401

from openrlhf_bapo.openrlhf.replay_checkpoint import _groups_fingerprint, load_sample_buffer, save_pools
from openrlhf_bapo.openrlhf.sample_buffer import SampleBuffer
from openrlhf_bapo.openrlhf.trainer import _prompts_of, _resume_after_the_data, _resume_generator

OVERSAMPLING = dict(
    partial__token_budget=None,
    train__async_enable=True,
    rollout__vllm_generate_batch_size=10,
    train__batch_size=12,
    train__micro_batch_size=6,
)


def rollouts(generator):
    """Return the rollouts of an episode until the data are exhausted, each with the state of the data after it."""
    has_ended = False
    while not has_ended:
        samples, *_, has_ended = generator.generate_samples(**GENERATE)
        yield samples, generator.prompts_dataloader.state_dict()


@pytest.mark.parametrize("killed_after", range(1, 7))
def test_a_run_resumed_at_any_step_trains_on_every_prompt_once(directory, tmp_path, killed_after):  # noqa: F811
    generator = make_generator(directory, num_prompts=28, **OVERSAMPLING)
    trained, waiting = [], []
    for step, (samples, data) in enumerate(rollouts(generator), start=1):
        assert samples.metrics["rollout/samples_waiting"] == len(samples.buffer.tensors if samples.buffer else [])
        if step <= killed_after:
            trained += labels(samples)
        if step == killed_after:
            kept = data
            if samples.buffer is not None:
                samples.buffer.save(tmp_path / "buffer", {}, {})
                waiting = [*generator._sample_buffer]
    # 10 prompts at first, 2 + 10, and 0 + the last 8, of which 4 wait after all have been drawn.
    assert step == 7 and (not waiting) == (killed_after == 5)

    resumed = make_generator(directory, num_prompts=28, **OVERSAMPLING)
    resumed.prompts_dataloader.load_state_dict(kept)
    if waiting:
        resumed.take_up_buffer(SampleBuffer.load(tmp_path / "buffer", {})[0])
    after = [samples for samples, _ in rollouts(resumed)]
    for before, found in zip(waiting, after[0], strict=False):
        for field in fields(before):
            ours, theirs = getattr(found, field.name), getattr(before, field.name)
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs, field.name
    trained += [label for samples in after for label in labels(samples)]
    assert sorted(trained) == list(range(28))
    again = [label for samples, _ in rollouts(resumed) for label in labels(samples)]
    assert sorted(again) == list(range(28))  # and the next episode is a whole one


@pytest.fixture
def resume(directory, tmp_path):  # noqa: F811
    """The flags of a run that resumes a checkpoint with samples that wait, which version 8 made."""
    generator = make_generator(directory, **OVERSAMPLING)
    for engine in generator.vllm_engines:
        engine.llm.num_weight_updates = 1
    samples, *_ = generator.generate_samples(**GENERATE)
    pipeline.make_checkpoint(tmp_path / "ckpt/_actor/global_step1")
    (tmp_path / "ckpt/_actor/latest").write_text("global_step1")
    state = {"policy_version": 9, "steps_by_version": [0] * 10, "version_offset": 7}
    samples.buffer.save(tmp_path / "ckpt/_buffer/global_step1", state, _groups_fingerprint(generator.args))
    return pipeline.flags(directory, ckpt__load_enable=True, ckpt__path=tmp_path / "ckpt", **SIZES)


def test_the_versions_of_samples_that_wait_are_shifted_to_the_resumed_engines_count(resume):
    buffer, state = load_sample_buffer(pipeline.parse(resume))
    assert state["policy_version"] == 9 and len(buffer.tensors) == 6 * NUM_SAMPLES
    for sample in buffer.experiences():  # the resumed weights are version 9 and their engines' first
        assert set(sample.versions[sample.action_mask > 0].tolist()) == {8 - (9 - 1)}


def test_samples_of_another_checkpoint_are_not_taken(resume, tmp_path):
    (tmp_path / "ckpt/_buffer/global_step1").rename(tmp_path / "ckpt/_buffer/global_step10")
    assert load_sample_buffer(pipeline.parse(resume)) is None
    (tmp_path / "ckpt/_buffer/global_step10").rename(tmp_path / "ckpt/_buffer/global_step1.old")
    assert load_sample_buffer(pipeline.parse(resume)) is not None  # what an interrupted save left


def test_a_checkpoint_without_waiting_samples_removes_those_of_an_earlier_run_under_its_name(tmp_path):
    kinds = ("_replay", "_partial", "_buffer")
    for kind in kinds:
        for name in ("global_step1", "global_step10", "global_step10.old"):
            (tmp_path / kind / name).mkdir(parents=True)
    nothing = dict.fromkeys(("pool", "unfinished", "buffer"))
    maker = Namespace(policy_version=1, version_offset=0, steps_by_version=[0], **nothing)
    args = Namespace(ckpt=Namespace(path=tmp_path, disable_ds=False))
    save_pools(Namespace(experience_maker=maker, args=args), "global_step10")
    assert sorted(tmp_path.glob("*/*")) == sorted(tmp_path / kind / "global_step1" for kind in kinds)


def resumed_episode(args, data_loader_state) -> int:
    """The episode in which a run goes on that was in episode 0, in sync and in async training."""
    episodes, prompts = [], Namespace(dataset=PROMPTS)

    class Trainer(Namespace):
        def init_checkpoint_states(self) -> dict:
            return {"episode": 0, "data_loader_state_dict": data_loader_state, "total_consumed_prompts": 0}

    class Generator(Namespace):
        def load_state_dict(self, state: dict) -> None:
            pass

        def fit(self, episode: int, _: int) -> None:
            episodes.append(episode)

    _resume_after_the_data(Trainer)
    _resume_generator(Generator)
    taken_up = Namespace(take_up_buffer=lambda buffer: None, begin_other_prompts=lambda: None)
    has = dict(args=args, prompts_dataloader=prompts, samples_generator=taken_up)
    episodes.append(Trainer(experience_maker=Namespace(pool=None), **has).init_checkpoint_states()["episode"])
    generator = Generator(**has)
    generator.load_state_dict(data_loader_state)
    generator.fit(0, 0)
    (episode,) = set(episodes)
    return episode


PROMPTS = Namespace(prompts=["1+1="], labels=["2"])


def test_a_run_that_resumes_after_the_end_of_its_data_with_other_prompts_does_not_skip_their_episode(directory):  # noqa: F811
    args = make_generator(directory, **OVERSAMPLING).args
    for other, episode in ((PROMPTS, 1), (Namespace(prompts=["1+2="], labels=["3"]), 0)):
        state = {"_iterator_finished": True, "prompts": _prompts_of(Namespace(dataset=other))}
        assert resumed_episode(args, state) == episode


@pytest.mark.parametrize("num_prompts", [28, 26])
def test_the_end_of_the_data_ends_the_episode_of_a_resumed_run_too(directory, num_prompts):  # noqa: F811
    """With 26 prompts the last rollout is short, and OpenRLHF's data loader starts anew after a resume."""
    flags = OVERSAMPLING | dict(rollout__vllm_generate_batch_size=None, train__async_enable=None, train__batch_size=6)
    generator = make_generator(directory, num_prompts=num_prompts, **flags)
    *_, before, data = [state for samples, state in rollouts(generator) if samples]
    for state in (before, data):
        has_ended = state is data and num_prompts == 26
        assert resumed_episode(generator.args, state) == has_ended == state["_iterator_finished"]


def test_other_prompts_are_drawn_beside_what_waits_of_the_ended_data_of_a_resumed_run(directory):  # noqa: F811
    generator, resumed = (make_generator(directory, num_prompts=30, **OVERSAMPLING) for _ in range(2))
    buffer = generator.generate_samples(**GENERATE)[0].buffer
    resumed.take_up_buffer(SampleBuffer(buffer.tensors, buffer.texts, exhausted=True))
    resumed.begin_other_prompts()
    expected = sorted([*range(30), *labels(buffer.experiences())])
    assert sorted(label for samples, _ in rollouts(resumed) for label in labels(samples)) == expected
    resumed = make_generator(directory, num_prompts=28)
    resumed.pool.exhausted = True
    resumed.begin_other_prompts()
    assert sorted(label for samples, _ in rollouts(resumed) for label in labels(samples)) == list(range(28))


def test_an_episode_goes_on_after_the_end_of_its_data_while_its_samples_wait(resume):
    for flags, episode in (([], 0), (["--partial.discard_saved"], 1)):
        assert resumed_episode(pipeline.parse([*resume, *flags]), {"_iterator_finished": True}) == episode


def test_a_resume_that_would_lose_samples_that_wait_is_refused_in_one_line(resume, capsys, tmp_path):
    for flags in (["--partial.token_budget", "5"], ["--offpolicy.lag", "2"]):
        message = f"holds 18 samples that were not trained on; resume without {flags[0]}, or pass"
        assert message in pipeline.refusal([*resume, *flags], capsys)
        pipeline.parse([*resume, *flags, "--partial.discard_saved"])
    six = ["--rollout.n_samples_per_prompt", "6"]
    assert f"{six[0]} '3', but this run has {six[0]} '6'" in pipeline.refusal([*resume, *six], capsys)
    pipeline.parse([*resume, *six, "--partial.discard_saved"])
    (tmp_path / "ckpt/_buffer/global_step1/groups.safetensors").write_bytes(b"")
    assert "groups.safetensors is damaged" in pipeline.refusal(resume, capsys)
