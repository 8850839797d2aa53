"""Numbers that are not finite, in OpenRLHF's real policy actor: tokens left out, updates skipped, the run ended."""

import math

import pipeline
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = [3, 5, 2, 7, 1, 4, 6, 2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("nonfinite"))


def train(
    directory, samples: list, num_ranks: int = 1, num_steps: int = 1, precision: str = "fp32", **flags
) -> list[dict]:
    """One optimizer step a training step; what each rank says."""
    settings = dict(
        policy_loss="bapo",
        actor__num_gpus_per_node=num_ranks,
        train__batch_size=8,
        train__micro_batch_size=8 // num_ranks,
        rollout__batch_size=2,
        rollout__micro_batch_size=1,
        replay__ratio=1,
    )
    size = len(samples) // num_ranks
    by_rank = [samples[start : start + size] for start in range(0, len(samples), size)]
    argv = pipeline.flags(directory, **settings | flags)
    return pipeline.train_policy_actors(directory, argv, by_rank, num_steps=num_steps, precision=precision)


def samples(**spoiled) -> list:
    """Eight, of which the third token of number 3's response, on rank 0 of 2, is given the values `spoiled`."""
    found = pipeline.make_experience(LENGTHS, positive=[True, False] * 4)
    for sample in found:
        sample.info["log_ratio"] = torch.zeros_like(sample.advantages)
    place = 0, -5
    found[3].staleness[place] = 9
    for name, value in spoiled.items():
        (found[3].info["log_ratio"] if name == "log_ratio" else getattr(found[3], name))[place] = value
    return found


def faults(status: dict) -> tuple[float, float]:
    return status["offpolicy/nonfinite_tokens"], status["offpolicy/updates_skipped"]


@pytest.fixture(scope="module")
def without_the_token(directory):
    """A token without an advantage takes no part; it counts in the loss's mean, as one that is left out does."""
    return {loss: train(directory, samples(advantages=0.0), policy_loss=loss)[0] for loss in ("bapo", "ppo")}


@pytest.mark.parametrize(
    ("spoiled", "flags"),
    [
        (dict(log_ratio=math.nan), {}),
        (dict(log_ratio=math.inf), dict(policy_loss="ppo")),
        (dict(advantages=math.nan), dict(policy_loss="ppo")),
        (dict(advantages=-math.inf), dict(train__micro_batch_size=2)),  # the window's own forward
        (dict(log_ratio=-math.inf), dict(num_ranks=2)),
    ],
    ids=lambda value: " ".join(f"{name} {one}" for name, one in value.items()) or "bapo",
)
def test_a_token_that_is_not_finite_is_left_out_of_the_update_and_its_search_and_counted(
    directory, without_the_token, spoiled, flags
):
    expected = without_the_token[flags.get("policy_loss", "bapo")]
    result = train(directory, samples(**spoiled), **flags)[0]
    assert faults(expected["status"]) == (0, 0) and faults(result["status"]) == (1, 0)
    assert expected["status"]["offpolicy/staleness_max"] == 9 and result["status"]["offpolicy/staleness_max"] == 0
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=2e-5)
    for name, value in expected["status"].items():
        if name.startswith("bapo/"):
            assert result["status"][name] == pytest.approx(value, rel=1e-4), name
    assert all(math.isfinite(value) for value in result["status"].values())


WARMUP = dict(actor__lr_scheduler="constant_with_warmup", actor__lr_warmup_ratio=0.003)  # over the first three steps
KL_LOSS = dict(algo__kl__use_loss=True, algo__kl__init_coef=0.01)


def with_reference(some: list, value: float = 0.0) -> list:
    """With a reference model's log-probs, of which one is `value`: the last sample's."""
    for sample in some:
        sample.base_action_log_probs = torch.zeros_like(sample.advantages)
    some[-1].base_action_log_probs[0, -1] = value
    return some


@pytest.mark.parametrize(
    "flags",
    [
        dict(ds__zero_stage=2),
        dict(ds__zero_stage=3),
        dict(ds__zero_stage=0),
        dict(ds__zero_stage=0, precision="bf16"),
        # DeepSpeed's optimizer for bf16 with fp32 sums, which has added up the micro-batches.
        dict(ds__zero_stage=1, precision="bf16", ds__grad_accum_dtype="fp32", train__micro_batch_size=1),
        dict(ds__zero_stage=2, train__dynamic_batch_enable=True, train__max_tokens_per_gpu=60),
        dict(ds__zero_stage=2, bapo__smoothing=1),
        dict(ds__zero_stage=2, policy_loss="balanced", balanced__half_life=1),
    ],
    ids=["2", "3", "0", "0 in bf16", "1 in bf16", "dynamic", "steady", "balanced"],
)
def test_an_update_whose_loss_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_no_trace(directory, flags):
    # The unbiased gradient of the KL loss takes the ratio, which is NaN on rank 1 in the first training step alone.
    flags = flags | KL_LOSS | WARMUP | dict(algo__kl__unbiased_gradient=True, ref__num_gpus_per_node=2, num_ranks=2)
    expected = train(directory, with_reference(samples()), num_steps=2, **flags)
    some = with_reference(samples())
    some[-1].info["log_ratio"][0, -1] = math.nan
    for result, other in zip(train(directory, some, num_steps=3, **flags), expected, strict=True):
        assert [faults(status) for status in result["statuses"]] == [(1, 1), (0, 0), (0, 0)]
        assert [status["offpolicy/optimizer_steps_taken"] for status in result["statuses"]] == [0, 1, 1]
        assert result["status"]["actor_lr"] == other["status"]["actor_lr"]
        for name, weight in other["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=2e-5)


def checks_of_a_rank(rank: int, num_ranks: int, port: int, argument) -> list[bool]:
    from openrlhf_bapo.openrlhf.nonfinite import _is_finite_everywhere

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=num_ranks, rank=rank)
    return [_is_finite_everywhere([torch.ones(3), torch.full((2,), value if rank else 1)]) for value in argument]


def test_ranks_that_hold_different_gradients_as_with_tensor_parallelism_skip_together(tmp_path):
    values = [2.0, math.nan, math.inf, -math.inf]
    assert pipeline.run_in_ranks(tmp_path, checks_of_a_rank, 2, values) == [[True, False, False, False]] * 2


@pytest.fixture(scope="module")
def nan_reference():
    """A loss of NaN, whose own gradient is finite, in every update."""
    return dict(samples=with_reference(samples(), math.nan), **KL_LOSS)


def test_as_many_updates_in_a_row_as_allowed_are_skipped(directory, nan_reference):
    (untrained,) = train(directory, samples(), actor__adam__lr=0.0)
    (result,) = train(directory, num_steps=2, bapo__max_skipped_updates=2, **nan_reference)
    assert [faults(status) for status in result["statuses"]] == [(0, 1), (0, 1)]
    for name, weight in untrained["weights"].items():
        assert torch.equal(result["weights"][name], weight), name


@pytest.mark.parametrize(
    "flags", [dict(policy_loss="bapo"), dict(policy_loss="ppo"), dict(train__micro_batch_size=2)], ids=str
)
def test_one_more_ends_the_run(directory, nan_reference, flags):
    cause = "--bapo.max_skipped_updates 2: 3 updates in a row had a loss or a gradient that is not finite"
    with pytest.raises(AssertionError, match=f"RuntimeError: {cause}"):
        train(directory, num_steps=3, bapo__max_skipped_updates=2, **flags, **nan_reference)


def test_skipped_updates_with_others_in_between_do_not_end_the_run(directory, nan_reference):
    # One of the two updates of each training step: three are skipped, at most two of them in a row.
    flags = dict(train__batch_size=4, train__micro_batch_size=4, bapo__max_skipped_updates=2)
    (result,) = train(directory, num_steps=3, **nan_reference | flags)
    assert [faults(status) for status in result["statuses"]] == [(0, 1)] * 3


def test_in_fp16_the_updates_skipped_in_the_search_for_the_loss_scale_do_not_end_the_run(directory):
    some = samples()
    for sample in some:
        sample.advantages *= 30  # gradients that overflow at the scales that DeepSpeed tries first
    (result,) = train(directory, some, num_steps=8, precision="fp16", bapo__max_skipped_updates=2)
    skipped = [status["offpolicy/updates_skipped"] for status in result["statuses"]]
    assert skipped == sorted(skipped, reverse=True) and sum(skipped) > 2 and skipped[-1] == 0


def test_a_training_step_without_any_finite_token_ends_the_run(directory):
    some = samples()
    for sample in some:
        sample.advantages[:] = math.nan
    with pytest.raises(AssertionError, match="RuntimeError: no token of a training step has a finite log-prob, ratio"):
        train(directory, some)


@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([torch.long, torch.bool]))
def test_what_is_finite_stays_as_it_is_bit_for_bit_and_what_is_not_is_left_out(seed, dtype, mask_dtype):
    from openrlhf_bapo.rules.rule_loss import leave_out_nonfinite

    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 3, 5, generator=generator, dtype=dtype)
    mask = torch.randint(0, 2, (3, 5), generator=generator).to(mask_dtype)
    same_mask, values, number = leave_out_nonfinite(mask, first, second)
    assert number == 0 and same_mask.dtype == mask.dtype and torch.equal(same_mask, mask)
    assert torch.equal(values[0], first) and torch.equal(values[1], second)
    first[0, 0], second[1, 2], second[2, 4] = math.nan, math.inf, -math.inf
    left, values, number = leave_out_nonfinite(mask, first, second)
    bad = torch.zeros(3, 5, dtype=torch.bool)
    bad[0, 0] = bad[1, 2] = bad[2, 4] = True
    assert number == mask[bad].sum() and torch.equal(left > 0, (mask > 0) & ~bad)
    assert all(
        (value[bad] == 0).all() and torch.equal(value[~bad], old[~bad])
        for value, old in zip(values, (first, second), strict=True)
    )
