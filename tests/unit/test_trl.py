"""BAPO in TRL: real training of a tiny model on the CPU, against the search on all tokens of each optimizer step."""

import inspect
import os
import warnings
from dataclasses import replace
from functools import partial

import pipeline
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from datasets import Dataset
from ranks import on_ranks
from reference import expected_step
from trl import GRPOConfig, GRPOTrainer

from openrlhf_bapo import ClipConfig
from openrlhf_bapo import trl as adapter
from openrlhf_bapo.rules.bounds_metrics import bounds_metrics
from openrlhf_bapo.rules.clip_bounds import measure_clip_bounds, tally_at_bounds, tally_contributions
from openrlhf_bapo.rules.clip_config import SmoothingConfig
from openrlhf_bapo.rules.clip_rules import SteadyBounds, UpdateBounds
from openrlhf_bapo.trl import BapoGRPOTrainer

# TRL's import sets it, and the engines of other tests would inherit it and keep their configuration to themselves.
os.environ.pop("VLLM_LOGGING_LEVEL", None)

# A target that some of the tiny model's steps reach at once, some between the ends of the ranges, and some never.
SEARCH = ClipConfig(contribution="gradient", positive_contribution_target=0.65)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("trl"))


def num_odd(completions: list[str], **_) -> list[float]:
    return [sum(c in "13579" for c in text) / 4 for text in completions]


def arguments(directory, **overrides) -> dict:
    """The arguments of a trainer whose updates move ratios: two iterations per generation, 16 samples per step."""
    values = dict(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=12,
        max_steps=6,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=1,
    )
    prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]})
    return dict(
        model=pipeline.load_model(directory),
        reward_funcs=num_odd,
        args=GRPOConfig(**values | overrides),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(4)),
    )


class Recording(BapoGRPOTrainer):
    """Keeps each optimizer step's micro-batches, its weights, the bounds of each loss, and the number of forwards.

    Of TRL's off-policy mask it keeps the log-probs that the policy's are compared with, and the mask.

    With `uses_tools`, every third token is a tool's, and the tokens of a response have different advantages.
    """

    def __init__(self, *args, uses_tools: bool = False, **kwargs) -> None:
        self.windows, self.weights, self.bounds, self.masks, self.num_forwards = {}, {}, [], [], 0
        self.uses_tools = uses_tools
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if self.uses_tools:
            place = torch.arange(found["completion_ids"].shape[1]).expand_as(found["completion_ids"])
            found["tool_mask"] = (place % 3 != 1).long()
            found["advantages"] = found["advantages"][:, None] * (1 + place)
        return found

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        number = self.state.global_step
        if number not in self.windows:
            self.windows[number] = []
            self.weights[number] = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.windows[number].append(inputs)
        loss = super()._compute_loss(model, inputs)
        self.bounds.append((float(1 - self.epsilon_low), float(1 + self.epsilon_high)))
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        self.num_forwards += self.model.training and self._buffered_inputs is not None
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def get_off_policy_mask(self, **given):
        mask = super().get_off_policy_mask(**given)
        self.masks.append((given["sampling_per_token_logps"], mask))
        return mask


def trained(directory, bapo=SEARCH, uses_tools=False, **overrides) -> Recording:
    trainer = Recording(**arguments(directory, **overrides), bapo=bapo, uses_tools=uses_tools)
    trainer.train()
    return trainer


def logged_by(trainer: Recording) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "offpolicy/ess" in entry]


def joined(directory, trainer: Recording, number: int, loss_type: str = "dapo") -> tuple[torch.Tensor, ...]:
    """Ratio, advantages and weights of all tokens of an optimizer step, [tokens], by a model of transformers' own."""
    model, found = pipeline.load_model(directory, trainer.weights[number]), []
    for inputs in trainer.windows[number]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=attention, position_ids=positions).logits[:, :-1]
        new = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, -inputs["completion_ids"].shape[1] :, 0]
        old = inputs.get("old_per_token_logps")
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).double()
        per_response = mask / mask.sum(1, keepdim=True)
        weight = {"grpo": per_response, "bnpo": mask / mask.sum()}.get(loss_type, mask)
        ratio = torch.ones_like(new) if old is None else (new - old).exp()
        advantages = inputs["advantages"] if "tool_mask" in inputs else inputs["advantages"][:, None].expand_as(ratio)
        found.append([x[mask > 0] for x in (ratio, advantages, weight)])
    return tuple(torch.cat(columns) for columns in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("accumulation", "loss_type", "uses_tools"),
    [(4, "dapo", False), (1, "dapo", False), (4, "grpo", False), (4, "bnpo", False), (4, "grpo", True)],
)
def test_bounds_and_off_policy_metrics_are_those_of_all_tokens_of_the_optimizer_step(
    directory, accumulation, loss_type, uses_tools
):
    batch = 16 // accumulation
    trainer = trained(
        directory,
        uses_tools=uses_tools,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch,
        steps_per_generation=2 * accumulation,
        loss_type=loss_type,
    )
    assert len(trainer.windows) == 6 and {len(window) for window in trainer.windows.values()} == {accumulation}
    logged = logged_by(trainer)
    assert len(logged) == 6 and not any("staleness" in name for entry in logged for name in entry)
    # Two iterations over a generation of two windows are four optimizer steps.
    for name in ("max", "mean"):
        assert [entry[f"offpolicy/optimizer_steps_{name}"] for entry in logged] == [0, 1, 2, 3, 0, 1]
    found = set()
    for number, metrics in enumerate(logged):
        bounds, expected = expected_step(*joined(directory, trainer, number, loss_type), SEARCH)
        used = trainer.bounds[number * accumulation : (number + 1) * accumulation]
        assert used == [pytest.approx(bounds, abs=1e-9)] * accumulation
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-4)
        found.add(bounds)
    assert len(found) > 1  # the search had choices to make
    assert max(entry["clip_ratio/region_mean"] for entry in logged) > 0  # and TRL clipped by them
    # Two forwards a micro-batch, and one a generation for its log-probs, of which the first came before the buffer.
    assert trainer.num_forwards == 2 * 6 * accumulation + 1


def test_a_range_of_one_point_is_trls_own_loss_to_the_last_bit(directory):
    fixed = replace(SEARCH, ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2)
    found = []
    for make in (GRPOTrainer, partial(BapoGRPOTrainer, bapo=fixed)):
        trainer = make(**arguments(directory))  # seeds what sampling draws from
        trainer.train()
        found.append(trainer.model.state_dict())
    theirs, ours = found
    start = pipeline.load_model(directory).state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert any(not torch.equal(theirs[name], start[name]) for name in theirs)


def test_steady_bounds_follow_the_steps_before_and_need_no_forward_of_their_own_nor_see_an_evaluation(directory):
    smoothing = SmoothingConfig(half_life=2.0)
    trainer = trained(directory, replace(SEARCH, smoothing=smoothing), eval_strategy="steps", eval_steps=2)
    steady = SteadyBounds(SEARCH, smoothing)
    logged = logged_by(trainer)
    for number in range(6):
        bounds = steady.lower.item(), steady.upper.item()
        assert trainer.bounds[4 * number : 4 * number + 4] == [pytest.approx(bounds, abs=1e-6)] * 4
        tokens = joined(directory, trainer, number)
        now = steady.lower, steady.upper
        used = measure_clip_bounds(tally_at_bounds(*tokens, *now), *now, SEARCH)
        found = steady.follow(tally_contributions(*tokens, SEARCH))
        for name, value in bounds_metrics([UpdateBounds(used, found)]).items():
            assert logged[number][name] == pytest.approx(value, abs=1e-4)
    assert trainer.num_forwards == 6 * 4 + 1  # one of each generation, as above


def test_a_resumed_run_goes_on_between_the_steady_bounds_of_its_checkpoint(directory, tmp_path):
    config = replace(SEARCH, smoothing=SmoothingConfig(half_life=2.0))
    # A generation is trained on in four optimizer steps, so that step 4 ends one.
    settings = dict(output_dir=str(tmp_path), max_steps=8, save_strategy="steps", save_steps=4)

    def logged(checkpoint: str | None) -> list[dict]:
        trainer = Recording(**arguments(directory, **settings), bapo=config)
        trainer.train(resume_from_checkpoint=checkpoint)
        return logged_by(trainer)

    unbroken = logged(None)
    resumed = logged(str(tmp_path / "checkpoint-4"))
    assert len({entry["bapo/clip_high"] for entry in unbroken}) == 8
    for name in ("bapo/clip_low", "bapo/clip_high", "loss"):
        assert [entry[name] for entry in resumed] == [entry[name] for entry in unbroken]


def test_an_optimizer_step_that_is_skipped_as_in_fp16_leaves_no_trace(directory, monkeypatch):
    step, calls = AcceleratedOptimizer.step, []

    def skip_the_second(optimizer, closure=None):
        calls.append(optimizer)
        optimizer._is_overflow = len(calls) == 2
        if not optimizer._is_overflow:
            step(optimizer, closure)

    monkeypatch.setattr(AcceleratedOptimizer, "step", skip_the_second)
    trainer = trained(directory, replace(SEARCH, smoothing=SmoothingConfig(half_life=2.0)), max_steps=4)
    assert len(calls) == 4
    bounds = trainer.bounds[::4]
    assert bounds[1] == bounds[2] and len(set(bounds)) == 3
    logged = logged_by(trainer)
    assert [entry["offpolicy/optimizer_steps_max"] for entry in logged] == [0, 1, 1, 2]
    assert ["entropy/predicted_change" in entry for entry in logged] == [True, False, True, True]


def test_a_log_of_several_steps_has_the_largest_of_their_maxima_and_the_mean_of_the_rest(directory):
    trainer = trained(directory, logging_steps=3)
    logged = logged_by(trainer)
    assert [entry["offpolicy/optimizer_steps_max"] for entry in logged] == [2, 3]
    assert [entry["offpolicy/optimizer_steps_mean"] for entry in logged] == pytest.approx([1, 4 / 3])
    highest = [float(joined(directory, trainer, number)[0].max()) for number in range(6)]
    assert [entry["offpolicy/ratio_max"] for entry in logged] == pytest.approx(
        [max(highest[:3]), max(highest[3:])], rel=1e-4
    )


def test_with_weights_trls_off_policy_mask_still_compares_with_the_old_log_probs(directory):
    trainer = trained(directory, "topr", off_policy_mask_threshold=1e-4, max_steps=2)
    micro_batches = [inputs for window in trainer.windows.values() for inputs in window]
    for inputs, (compared, _) in zip(micro_batches, trainer.masks, strict=True):
        assert torch.equal(compared, inputs["old_per_token_logps"])
    assert {bool(mask.all()) for _, mask in trainer.masks} == {True, False}


def test_without_old_log_probs_every_ratio_is_one_and_there_is_no_forward_of_our_own(directory):
    trainer = trained(directory, num_iterations=1, steps_per_generation=4, max_steps=2)
    assert all("old_per_token_logps" not in inputs for window in trainer.windows.values() for inputs in window)
    assert trainer.num_forwards == 2 * 4
    bounds, _ = expected_step(*joined(directory, trainer, 0), SEARCH)
    assert trainer.bounds[0] == pytest.approx(bounds, abs=1e-9)


@pytest.mark.parametrize(
    ("bapo", "per_generation", "num_iterations", "advised"),
    [
        ("paper", 4, 1, 2),
        ("paper", 2, 2, 4),
        ("paper", 8, 1, None),
        ("paper", 4, 2, None),
        ("topr", 4, 1, None),
    ],
)
def test_bounds_that_can_clip_nothing_are_warned_of(directory, bapo, per_generation, num_iterations, advised):
    given = arguments(directory, steps_per_generation=per_generation, num_iterations=num_iterations)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        BapoGRPOTrainer(**given, bapo=bapo)
    messages = [str(warning.message) for warning in found if "every ratio is 1" in str(warning.message)]
    advice = [] if advised is None else [f"set num_iterations={advised} or steps_per_generation=8"]
    assert [message.split("; ")[1] for message in messages] == advice


def test_an_evaluation_after_a_step_with_bounds_per_token_has_the_loss_of_ratios_of_one(directory):
    overrides = dict(max_steps=1, eval_strategy="steps", eval_steps=1, loss_type="grpo")
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides), bapo="divergence")
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert entry["eval_clip_ratio/region_mean"] == 0
    assert entry["eval_loss"] == pytest.approx(0, abs=1e-5)  # the advantages of a group add to 0


def test_an_epochs_last_window_may_be_shorter_and_one_that_crosses_a_generation_is_searched_in_part(directory):
    given = arguments(directory, steps_per_generation=3, num_iterations=2, max_steps=-1, num_train_epochs=2)
    given["train_dataset"] = given["train_dataset"].select(range(9))  # three generations an epoch, 18 micro-batches
    trainer = Recording(**given, bapo=SEARCH)
    with pytest.warns(UserWarning, match="gradient_accumulation_steps 4 reaches beyond a generation"):
        trainer.train()
    sizes = [len(window) for window in trainer.windows.values()]
    assert sizes == [4, 4, 4, 4, 2] * 2
    logged = logged_by(trainer)
    first, found = 0, set()
    for number, size in enumerate(sizes):
        del trainer.windows[number][6 - first % 6 :]  # those of the next generation are not searched
        bounds, expected = expected_step(*joined(directory, trainer, number), SEARCH)
        assert trainer.bounds[first : first + size] == [pytest.approx(bounds, abs=1e-9)] * size
        assert logged[number]["bapo/initial_share"] == pytest.approx(expected["bapo/initial_share"], abs=1e-4)
        found.add(bounds)
        first += size
    assert len(found) > 1
    assert [entry["offpolicy/optimizer_steps_max"] for entry in logged] == [0, 1, 1, 0, 1] * 2


@pytest.mark.parametrize(
    ("bapo", "overrides", "message"),
    [
        (SEARCH, dict(loss_type="cispo", epsilon_high=5.0), "loss_type 'cispo' is not allowed"),
        (SEARCH, dict(loss_type="sapo"), "loss_type 'sapo' is not allowed"),
        (SEARCH, dict(importance_sampling_level="sequence"), "importance_sampling_level 'sequence' is not allowed"),
        (SEARCH, dict(delta=2.0), "delta 2.0 is not allowed"),
        ("steady", dict(top_entropy_quantile=0.2), "top_entropy_quantile 0.2 is not allowed with BAPO; it must be 1.0"),
        (
            SEARCH,
            dict(epsilon=0.1),
            "epsilon 0.1 is not allowed with BAPO; it must be 0.2: the bounds",
        ),
        ("topr", dict(epsilon_high=0.28), "epsilon_high 0.28 is not allowed with BAPO; it must be None"),
        (replace(SEARCH, ratio_upper_max=3, dual_clip=2), {}, "dual_clip 2 is not allowed with BAPO"),
        ("topr", dict(beta=0.1, use_bias_correction_kl=True), "use_bias_correction_kl True is not allowed"),
    ],
)
def test_a_loss_whose_ratio_clip_or_kl_term_does_not_fit_is_refused(directory, bapo, overrides, message):
    with pytest.raises(ValueError, match=message):
        BapoGRPOTrainer(**arguments(directory, **overrides), bapo=bapo)


def test_a_dual_clip_leaves_the_callers_config_as_it_was_for_a_second_trainer(directory):
    given = arguments(directory)
    for _ in range(2):
        trainer = BapoGRPOTrainer(**given, bapo=replace(SEARCH, ratio_upper_max=3, dual_clip=3))
        assert trainer.args.delta == 3 and given["args"].delta is None


def train_rank(rank: int, directory):
    os.environ["LOCAL_RANK"] = str(rank)
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one is forked from
    saved = []
    adapter.save_rule = lambda rule, folder: saved.append(folder.parent.name)
    overrides = dict(output_dir=str(directory / "two"), save_strategy="steps", save_steps=3)
    trainer = trained(directory, max_steps=4, **overrides)
    assert trainer.accelerator.num_processes == 2
    logged = [[entry[name] for name in ("offpolicy/ess", "entropy/predicted_change")] for entry in logged_by(trainer)]
    return trainer.bounds, [joined(directory, trainer, number) for number in range(4)], logged, saved


def test_two_processes_find_the_bounds_of_the_tokens_of_both(directory):
    results = on_ranks(2, train_rank, directory)
    (bounds, first, logged, saved), (others_bounds, second, others_logged, others_saved) = results
    assert bounds == others_bounds and len(set(bounds)) > 1
    assert logged == others_logged and all(change != 0 for _, change in logged[1:])
    assert saved == ["checkpoint-3", "checkpoint-4"] and others_saved == []  # two would write the same files at once
    for number, parts in enumerate(zip(first, second, strict=True)):
        both, expected = expected_step(*(torch.cat(both) for both in zip(*parts, strict=True)), SEARCH)
        assert bounds[4 * number] == pytest.approx(both, abs=1e-9)
        assert logged[number][0] == pytest.approx(expected["offpolicy/ess"], rel=1e-4)
        _, alone = expected_step(*parts[0], SEARCH)
        assert number == 0 or alone["bapo/initial_share"] != expected["bapo/initial_share"]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("_compute_loss", "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"),
        ("_compute_loss", "self._get_per_token_logps_and_entropies("),
        ("_compute_loss", 'mask = completion_mask if "tool_mask" not in inputs'),
        ("_compute_loss", 'inputs.get("old_per_token_logps")'),
        ("_prepare_inputs", "self._buffered_inputs[self._step % self.args.steps_per_generation]"),
        ("_prepare_inputs", "self.args.steps_per_generation * self.num_iterations"),
        ("training_step", "self._step % self.current_gradient_accumulation_steps == 0"),
    ],
)
def test_trl_reads_the_clip_bounds_and_keeps_its_micro_batches_where_the_adapter_expects_them(where, text):
    assert text in inspect.getsource(getattr(GRPOTrainer, where))
