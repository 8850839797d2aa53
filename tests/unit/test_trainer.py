"""OpenRLHF's trainer from the first rollout to the last, with our generator and pools: endings, resumes, evaluations.

Trainer, data loader, experience maker and reward are real. The engines are those of test_partial_samples.py, and the
actors do not train.
"""

import json
import math
from argparse import Namespace
from collections import Counter
from itertools import groupby
from pathlib import Path

import pipeline
import pytest
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.utils import get_strategy
from test_experience_maker import recomputed
from test_experience_maker import without_ray as _experience_without_ray  # noqa: F401
from test_partial_samples import NUM_SAMPLES, SIZES, ScriptedEngine, without_ray  # noqa: F401
from transformers import AutoTokenizer

from openrlhf_bapo.cli.plot import read_scalars
from openrlhf_bapo.openrlhf import job_store

NUM_PROMPTS, NUM_EPISODES = 12, 2
TIMINGS = {"timing/bapo_ratio_forward": 1000.0, "timing/bapo_search": 500.0}
"""Timings that the actors report, as parts of their training time."""

REWARD = """
import pathlib, torch


def reward_func(queries, prompts, labels, **kwargs):
    if pathlib.Path(__file__).with_name("is_broken").exists():
        raise ValueError("the verifier has gone")
    return {"rewards": torch.tensor([float(len(queries[0]) % 2)])}
"""


@pytest.fixture
def directory(tmp_path):
    pipeline.make_model(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    with open(tmp_path / "train.jsonl", "w") as file:
        file.writelines(json.dumps({"input": f"{n:03}=", "label": str(n)}) + "\n" for n in range(NUM_PROMPTS))
    return tmp_path


@pytest.fixture(autouse=True)
def without_ray_or_signals(monkeypatch):
    monkeypatch.setattr(job_store, "get", lambda key: None)
    monkeypatch.setattr(job_store, "put", lambda key, value=True: None)
    monkeypatch.setattr(ppo_trainer, "ray", Namespace(get=lambda refs: refs))


class Killed(BaseException):
    """Stands for a kill in the middle of a training step."""


class Actors:
    """Stands for RayActorGroup. Its actors do not train, but save and load the states of checkpoints like OpenRLHF's.

    Our pools must be written before a checkpoint: a run that is killed in between must not resume without them.

    `steps` has the prompt numbers of the samples of each training step. `before_step` is called with the number of
    steps of this run so far.
    """

    def __init__(self, folder: Path, engines: list, before_step) -> None:
        self.folder, self.engines, self.before_step, self.steps = folder, engines, before_step, []

    def async_run_method_batch(self, method_name: str, **batches) -> list:
        if method_name == "append":
            self.steps.append([int(label) for batch in batches["experience"] for label in batch.labels])
            return []
        names, columns = zip(*batches.items(), strict=True)
        return [[recomputed(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]]

    def async_run_method(self, method_name: str, **arguments) -> list:
        return getattr(self, method_name)(**arguments)

    def fit(self, kl_ctl: float) -> list[dict]:
        self.before_step(len(self.steps))
        return [{"optimizer_steps_taken": 2, **TIMINGS}]

    def broadcast_to_vllm(self) -> list:
        for engine in self.engines:
            engine.llm.num_weight_updates += 1
        return []

    def save_checkpoint(self, tag: str, client_states: dict, **_) -> list:
        assert all((kind / tag / "pool.json").exists() for kind in self.folder.parent.glob("_[bpr]*"))
        torch.save(client_states, pipeline.make_checkpoint(self.folder / tag) / "client_states.pt")
        (self.folder / "latest").write_text(tag)
        return []

    def get_checkpoint_states(self) -> list[dict]:
        return [torch.load(self.folder / (self.folder / "latest").read_text() / "client_states.pt")]


def make_trainer(directory, before_step=lambda _: None, **flags):
    """Make OpenRLHF's trainer with 4 prompts of 3 samples per step. The responses have 1 to 10 tokens."""
    settings = SIZES | dict(train__num_episodes=NUM_EPISODES, logger__tensorboard_dir=None)
    args = pipeline.parse(pipeline.flags(directory, **settings | flags))
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    lengths = {tuple(tokenizer(f"{n:03}=")["input_ids"]): 1 + n % 10 for n in range(NUM_PROMPTS)}
    engines = [ScriptedEngine(directory, lengths) for _ in range(2)]
    actors = Actors(directory / "ckpt/_actor", engines, before_step)
    sampling = {name: getattr(args.rollout, name) for name in ("max_new_tokens", "temperature", "top_p")}
    trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
    model = str(directory / "model")
    return trainer(model, get_strategy(args), actors, None, None, None, engines, max_len=args.data.max_len, **sampling)


MODES = {
    "budget": dict(partial__token_budget=3),
    "lag": dict(offpolicy__lag=1),
    "replay": dict(replay__ratio=1),
    "plain": {},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_steps", [1, 3, 4])
@pytest.mark.parametrize("ending", ["killed", "reward_fails"])
def test_a_run_that_ends_after_any_step_resumes_and_trains_on_every_prompt_once_per_episode(
    directory, mode, num_steps, ending
):
    def end(step: int) -> None:
        if ending == "killed" and step > num_steps:
            raise Killed
        if ending == "reward_fails" and step == num_steps:  # from the next rollout on
            (directory / "is_broken").touch()

    save_steps = dict(ckpt__save_steps=1) if ending == "killed" else {}
    ended = make_trainer(directory, end, **MODES[mode], **save_steps)
    with pytest.raises((Killed, RuntimeError)):
        ended.fit()
    assert (directory / "ckpt/_actor/latest").read_text() == f"global_step{num_steps}"
    (directory / "is_broken").unlink(missing_ok=True)
    resumed = make_trainer(directory, **MODES[mode], ckpt__load_enable=True)
    resumed.fit()
    steps = ended.actor_model_group.steps[:num_steps] + resumed.actor_model_group.steps
    assert Counter(n for step in steps for n in step) == dict.fromkeys(range(NUM_PROMPTS), NUM_EPISODES * NUM_SAMPLES)
    assert resumed.samples_generator.num_prompts == NUM_EPISODES * NUM_PROMPTS
    if mode != "plain":  # which counts from the resume
        assert resumed.experience_maker.policy_version == len(steps)
        assert resumed.experience_maker.steps_by_version == [2 * step for step in range(len(steps) + 1)]


@pytest.mark.parametrize(("flags", "expected"), [(dict(algo__kl__target=0.1), 0.3), ({}, 0.2)])
def test_a_resumed_run_goes_on_with_the_coefficient_that_a_kl_target_has_led_to(directory, flags, expected):
    def adapt(_) -> None:
        ended.kl_ctl.value = 0.3

    ended = make_trainer(directory, adapt, ckpt__save_steps=1, train__num_episodes=1, **flags)
    ended.fit()
    resumed = make_trainer(directory, ckpt__load_enable=True, algo__kl__init_coef=0.2, **flags)
    resumed.init_checkpoint_states()
    assert resumed.kl_ctl.value == expected


def test_the_actors_first_step_replays_no_samples_of_the_steps_in_which_the_critic_trained_alone(directory):
    flags = dict(replay__ratio=1, train__num_episodes=1)
    trainer = make_trainer(directory, **flags, **{"no-replay.skip_uninformative": True})
    trainer.args.critic.freezing_steps = 1  # which needs a critic on the command line
    trainer.fit()
    # Replayed samples have no label, and steps 0 and 1 send the actor no samples.
    assert [len(step) for step in trainer.actor_model_group.steps] == [4 * NUM_SAMPLES]


@pytest.mark.parametrize(
    ("given", "saved", "expected"),
    [
        ("", "eval_a_pass1", ("eval_a_pass1", 0.9)),
        ("eval_a_pass1", "eval_a_pass1", ("eval_a_pass1", 0.9)),
        ("eval_b_pass1", "eval_a_pass1", ("eval_b_pass1", -math.inf)),
        ("none", "eval_a_pass1", ("none", -math.inf)),
        ("", "none", ("", -math.inf)),
    ],
)
def test_a_resumed_run_chooses_its_best_checkpoint_by_its_own_metric(given, saved, expected):
    trainer = Namespace(
        args=Namespace(ckpt=Namespace(best_metric_key=given)),
        best_eval_metric_key=given,
        best_eval_metric_value=-math.inf,
    )
    states = {"best_eval_metric_key": saved, "best_eval_metric_value": 0.9 if saved != "none" else -math.inf}
    ppo_trainer.PPOTrainer.__ray_metadata__.modified_class.restore_best_checkpoint_state(trainer, states)
    assert (trainer.best_eval_metric_key, trainer.best_eval_metric_value) == expected


@pytest.mark.parametrize(("source", "warns"), [("default", False), ("typo", True)])
def test_a_best_metric_that_no_evaluation_has_is_said_with_those_that_it_has(directory, capfd, source, warns):
    key = f"eval_{source}_pass1"
    flags = dict(eval__dataset=directory / "train.jsonl", eval__steps=3, train__num_episodes=1)
    make_trainer(directory, **flags, ckpt__best_metric_key=key).fit()
    said = f"warning: --ckpt.best_metric_key {key}: the evaluation has no such metric, so no best checkpoint is written"
    out = capfd.readouterr().out
    assert out.count(said) == warns and (f"{said}; it has eval_default_pass" in out) == warns


@pytest.mark.parametrize("mode", ["budget", "plain"])
def test_rollouts_and_evaluations_are_sampled_at_their_own_temperatures(directory, mode):
    top_p = 0.9 if mode == "plain" else 1.0  # under a budget the ratio is against the engine's log-probs
    flags = dict(rollout__temperature=0.6, rollout__top_p=top_p, eval__temperature=0.3, train__num_episodes=1)
    flags |= dict(eval__dataset=directory / "train.jsonl", eval__at_start=True, eval__steps=1)
    trainer = make_trainer(directory, **MODES[mode], **flags)
    sampled = []
    for engine in trainer.vllm_engines:
        engine.params = sampled  # of both engines, in their order
    trainer.fit()
    temperatures = [temperature for temperature, _ in groupby(params.temperature for params in sampled)]
    assert temperatures == [0.3] + [0.6, 0.3] * 3
    assert {params.top_p for params in sampled} == {top_p}


def test_an_evaluation_counts_a_prompt_for_each_data_source_that_has_it(directory):
    def evaluate(*names: str) -> dict:
        trainer = make_trainer(directory, eval__dataset=",".join(str(directory / f"{name}.jsonl") for name in names))
        return trainer.evaluate(0, **trainer.generate_kwargs, n_samples_per_prompt=2)

    for name, numbers in dict(first=range(7), second=range(4, 12)).items():
        rows = [{"input": f"{n:03}=", "label": str(n), "datasource": name} for n in numbers]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, both = evaluate("first"), evaluate("second"), evaluate("first", "second")
    for name, alone in (("first", first), ("second", second)):
        of_source = {metric: value for metric, value in both.items() if metric.startswith(f"eval_{name}_")}
        assert of_source == {metric: value for metric, value in alone.items() if metric.startswith(f"eval_{name}_")}
        assert 0 < of_source[f"eval_{name}_pass1"] < 1
    assert first["eval_first_pass1"] != second["eval_second_pass1"]


def test_the_seconds_of_a_step_count_the_ratio_forward_and_the_search_once_as_parts_of_its_training(directory):
    make_trainer(directory, logger__tensorboard_dir=directory / "logs", train__num_episodes=1).fit()
    logged = {name: values for name, (_, values) in read_scalars(directory / "logs").items()}
    phases = [logged[f"train/timing/{phase}"] for phase in ("generation", "make_experience", "ppo_train", "broadcast")]
    seconds = [sum(step) for step in zip(*phases, strict=True)]
    assert logged["train/timing/step_total"] == pytest.approx(seconds, abs=1e-3)
    assert {name: logged[f"train/{name}"] for name in TIMINGS} == {name: [value] * 3 for name, value in TIMINGS.items()}
