"""The bounds are those of the whole update, however it is split over micro-batches and data-parallel ranks."""

import json
import shutil
from argparse import Namespace

import pipeline
import presets
import pytest
import torch
import torch.distributed as dist

from openrlhf_bapo import BapoPolicyLoss, ClipConfig
from openrlhf_bapo.rules.clip_config import SmoothingConfig


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


# ---- The loss on its own, float64, two gloo processes against one ----

LENGTHS = [[1, 2, 9, 4], [7, 1, 1, 3]]  # response tokens of every sample, by rank


def joined_batch(contribution: str) -> tuple[dict[str, torch.Tensor], ClipConfig]:
    """Both ranks' samples; rank 1 has no positive token, so its own search would end in the far corner."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS).flatten()
    shape = (len(lengths), 9)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64)
    advantages = torch.rand(shape[0], 1, generator=generator, dtype=torch.float64) + 0.5
    advantages[1::2] *= -0.3
    advantages[4:] = -advantages[4:].abs()
    return {
        "log_probs": old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "old_log_probs": old,
        "advantages": advantages.expand(shape).contiguous(),
        "action_mask": torch.arange(9).expand(shape) < lengths[:, None],
    }, ClipConfig(positive_contribution_target=0.42, contribution=contribution)


def loss_and_gradient(batch, config, micro_batch_size: int, num_tokens: int, group=None) -> tuple:
    """One update as OpenRLHF and DeepSpeed make it: (bounds, loss summed over micro-batches, gradient)."""
    loss_fn = BapoPolicyLoss(clip_config=config, group=group)
    dp_size = 1 if group is None else dist.get_world_size(group)
    log_probs = batch["log_probs"].clone().requires_grad_()
    parts = [
        {name: x[i : i + micro_batch_size] for name, x in (batch | {"log_probs": log_probs}).items()}
        for i in range(0, len(log_probs), micro_batch_size)
    ]
    for part in parts:
        loss_fn.tally(*part.values())
    loss_fn.close_update()
    loss = sum(
        loss_fn(**part, dp_size=dp_size, batch_num_tokens=num_tokens / len(parts))[0] / len(parts) for part in parts
    )
    loss.backward()
    bounds = loss_fn.updates[0].used
    return (float(bounds.lower), float(bounds.upper)), loss.detach(), log_probs.grad


CASES = [(contribution, micro_batch_size) for contribution in ("surrogate", "gradient") for micro_batch_size in (4, 1)]


def updates_of_a_rank(rank: int, num_ranks: int, port: int, _) -> dict:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    results = {}
    for contribution, micro_batch_size in CASES:
        batch, config = joined_batch(contribution)
        half = {name: x[4 * rank : 4 * rank + 4] for name, x in batch.items()}
        num_tokens = int(batch["action_mask"].sum())
        bounds, loss, gradient = loss_and_gradient(half, config, micro_batch_size, num_tokens, dist.group.WORLD)
        dist.all_reduce(loss)
        # Data-parallel training averages losses and gradients over ranks.
        results[contribution, micro_batch_size] = bounds, float(loss) / 2, gradient / 2
    return results


@pytest.fixture(scope="module")
def by_rank(directory):
    return pipeline.run_in_ranks(directory, updates_of_a_rank, 2)


@pytest.mark.parametrize(("contribution", "micro_batch_size"), CASES)
def test_two_ranks_with_uneven_tokens_equal_one_process_on_the_joined_batch(by_rank, contribution, micro_batch_size):
    batch, config = joined_batch(contribution)
    bounds, loss, gradient = loss_and_gradient(batch, config, 8, int(batch["action_mask"].sum()))
    start, corner = (0.6, 1.2), (config.lower_grid()[-1], config.upper_grid()[-1])
    assert bounds not in (start, corner) or contribution == "surrogate"  # the search had a choice to make
    (first, first_loss, first_gradient), (second, _, second_gradient) = (
        results[contribution, micro_batch_size] for results in by_rank
    )
    assert first == second == bounds
    assert first_loss == pytest.approx(float(loss), rel=1e-12)
    torch.testing.assert_close(torch.cat([first_gradient, second_gradient]), gradient, rtol=1e-12, atol=0)


def collectives_of_a_rank(rank: int, num_ranks: int, port: int, _) -> list[list[int]]:
    """Bytes of every all-reduce in three updates of two micro-batches, with searched bounds and with steady bounds."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    upstream, counted = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        counted[-1].append(tensor.nbytes)
        return upstream(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    for smoothing in (None, SmoothingConfig(half_life=20.0)):
        counted.append([])
        loss = BapoPolicyLoss(clip_config=ClipConfig(smoothing=smoothing), group=dist.group.WORLD)
        for update in presets.make_updates():
            if smoothing is None:
                for micro_batch in update:
                    loss.tally(*micro_batch.values())
                loss.close_update()
            for micro_batch in update:
                loss(*micro_batch.values())
            loss.close_update()
    return counted


def test_an_update_has_one_collective_of_less_than_two_kilobytes(directory):
    for by_kind in pipeline.run_in_ranks(directory, collectives_of_a_rank, 2):
        assert [len(counted) for counted in by_kind] == [3, 3]
        assert all(0 < num_bytes < 2048 for counted in by_kind for num_bytes in counted)


# ---- OpenRLHF's own policy actor and DeepSpeed, float32 ----

SAMPLES = pipeline.make_experience([3, 15, 2, 17, 1, 14, 16, 2], positive=[True, False, True, True, *[False] * 4])
NUM_UPDATES = 4


def flags(directory, policy_loss="bapo", **overrides) -> list[str]:
    """Several epochs of one optimizer step over the eight samples: only the first is on-policy."""
    return pipeline.flags(
        directory,
        policy_loss=policy_loss,
        **dict(
            actor__adam__lr=0.05,
            actor__adam__eps=0.02,  # so that a gradient near zero does not decide over a whole step by its sign
            train__max_epochs=NUM_UPDATES,
            train__batch_size=8,
            train__micro_batch_size=8,
            rollout__batch_size=2,
            rollout__n_samples_per_prompt=4,
            rollout__micro_batch_size=1,
        )
        | overrides,
    )


GRADIENT = dict(bapo__contribution="gradient", bapo__positive_contribution_target=0.2)


@pytest.fixture(scope="module")
def one_micro_batch(directory):
    """One rank, one micro-batch: what every other split must equal."""
    return pipeline.train_policy_actors(directory, flags(directory, **GRADIENT), [SAMPLES])[0]


def same_updates(result: dict, expected: dict) -> None:
    assert result["bounds"] == expected["bounds"]
    for name in ("actor_grad_norm", "entropy_loss"):
        assert result["status"][name] == pytest.approx(expected["status"][name], rel=1e-3)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=1e-5, msg=name)


def test_bapos_metrics_are_means_over_the_updates_whose_bounds_move(one_micro_batch):
    searches, status = one_micro_batch["searches"], one_micro_batch["status"]
    assert len(searches) == status["timing/bapo_search"] == NUM_UPDATES  # a tally and a walk
    assert status["timing/bapo_ratio_forward"] == 0
    means = {name: sum(found[name] for found in searches) / NUM_UPDATES for name in searches[0]}
    expected = {f"bapo/{name}": value for name, value in means.items() if f"bapo/{name}" in status}
    assert {"bapo/positive_share", "bapo/surrogate_share", "bapo/clip_frac_positive"} < expected.keys()
    expected |= {"bapo/clip_low": means["lower"], "bapo/clip_high": means["upper"]}
    expected |= {"bapo/target_reached": means["reached"]}
    assert {name: status[name] for name in expected} == pytest.approx(expected)
    for name in ("upper", "positive_share", "clip_frac_positive", "clip_frac_negative"):
        assert searches[-1][name] != pytest.approx(means[name], rel=1e-3), name  # the last one's would be another


def test_every_training_step_reports_its_own_updates_and_begins_on_policy(directory):
    split = flags(directory, **GRADIENT, train__micro_batch_size=2)
    (result,) = pipeline.train_policy_actors(directory, split, [SAMPLES], num_steps=2)
    assert len(result["searches"]) == 2 * NUM_UPDATES
    for step, status in enumerate(result["statuses"]):
        searches = result["searches"][step * NUM_UPDATES : (step + 1) * NUM_UPDATES]
        mean = sum(found["initial_share"] for found in searches) / NUM_UPDATES
        assert status["bapo/initial_share"] == pytest.approx(mean)
        assert status["timing/bapo_ratio_forward"] == 4 * (NUM_UPDATES - 1)
        assert status["timing/bapo_search"] == (4 + 1) * NUM_UPDATES  # four tallies and a walk
    first, second = (status["bapo/initial_share"] for status in result["statuses"])
    assert first != pytest.approx(second, rel=1e-3)


def test_an_update_without_a_share_is_left_out_of_the_mean_share_and_counts_as_reached(directory):
    nothing, negative = pipeline.make_experience([3, 5], positive=[False, False])
    nothing.advantages *= 0
    one_sample_a_step = flags(
        directory,
        train__max_epochs=1,
        train__batch_size=1,
        train__micro_batch_size=1,
        rollout__n_samples_per_prompt=1,
        algo__advantage__estimator="reinforce",
    )
    (result,) = pipeline.train_policy_actors(directory, one_sample_a_step, [[nothing, negative]])
    assert sorted(result["bounds"]) == [(0.6, 1.2), (pytest.approx(0.9), pytest.approx(3.0))]
    status = result["status"]
    assert status["bapo/positive_share"] == status["bapo/initial_share"] == 0  # the negative's, not NaN
    assert (status["bapo/clip_low"], status["bapo/clip_high"]) == (pytest.approx(0.75), pytest.approx(2.1))
    assert status["bapo/target_reached"] == 0.5
    assert all(weight.isfinite().all() for weight in result["weights"].values())


@pytest.mark.parametrize("num_samples", [12, 10], ids=["last_of_two", "last_of_one"])
def test_a_short_last_window_has_bounds_of_its_own(directory, num_samples):
    # Micro-batches of 2 and windows of 4: 4 + 2, or 4 + 1, which the loss serves from its own ratios.
    samples = pipeline.make_experience(list(range(1, num_samples + 1)), seed=3)
    num_epochs = 2
    split = flags(directory, **GRADIENT, train__micro_batch_size=2, train__max_epochs=num_epochs)
    (result,) = pipeline.train_policy_actors(directory, split, [samples])
    num_tokens = [found["num_tokens"] for found in result["searches"]]
    assert len(num_tokens) == 2 * num_epochs
    for whole, rest in zip(num_tokens[::2], num_tokens[1::2], strict=True):  # every token once an epoch
        assert whole + rest == num_samples * (num_samples + 1) / 2
    # The first step needs no ratio forward, a window of one micro-batch never does.
    assert result["status"]["timing/bapo_ratio_forward"] == (4 + 2 + 2 if num_samples == 12 else 4)
    assert result["searches"][0]["initial_share"] != result["searches"][1]["initial_share"]


def test_dropout_is_off_in_the_ratio_forward_and_on_in_the_training_step(directory, tmp_path):
    shutil.copytree(directory / "model", tmp_path / "model")
    shutil.copy(directory / "reward.py", tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    stale = flags(tmp_path, train__max_epochs=1, train__micro_batch_size=2, replay__ratio=1)
    (result,) = pipeline.train_policy_actors(tmp_path, stale, [SAMPLES])
    (search,) = result["searches"]
    sizes = [(sample.advantages.abs().sum().item(), (sample.advantages > 0).any()) for sample in SAMPLES]
    share = sum(size for size, positive in sizes if positive) / sum(size for size, _ in sizes)
    assert search["initial_share"] == pytest.approx(share, rel=1e-4)  # that of ratios of 1
    assert result["status"]["offpolicy/ess"] < 0.999  # dropout moves the loss's own ratios


DYNAMIC = dict(train__dynamic_batch_enable=True, train__max_tokens_per_gpu=26)


@pytest.mark.parametrize(
    ("split", "num_micro_batches"),
    [
        (dict(train__micro_batch_size=2), 4),
        (dict(train__micro_batch_size=2, actor__num_gpus_per_node=2), 2),  # one rank has no positive token
        (dict(ds__zero_stage=2, **DYNAMIC), 5),
        (dict(ds__zero_stage=3, **DYNAMIC), 5),
    ],
    ids=["accumulated", "two ranks", "dynamic batch", "dynamic batch under ZeRO-3"],
)
def test_however_an_update_is_split_it_is_the_update_of_one_micro_batch(
    directory, one_micro_batch, split, num_micro_batches
):
    by_rank = [SAMPLES[:4], SAMPLES[4:]] if "actor__num_gpus_per_node" in split else [SAMPLES]
    for result in pipeline.train_policy_actors(directory, flags(directory, **GRADIENT, **split), by_rank):
        same_updates(result, one_micro_batch)
        # One for each, but for the first update.
        assert result["status"]["timing/bapo_ratio_forward"] == num_micro_batches * (NUM_UPDATES - 1)


def test_micro_batch_scope_searches_for_every_micro_batch(directory):
    split = flags(directory, **GRADIENT, train__micro_batch_size=2, bapo__scope="micro_batch")
    (result,) = pipeline.train_policy_actors(directory, split, [SAMPLES])
    assert len(result["bounds"]) == 4 * NUM_UPDATES
    assert "timing/bapo_ratio_forward" not in result["status"]
    assert result["status"]["timing/bapo_search"] == 4 * NUM_UPDATES


@pytest.mark.parametrize("has_kl_loss", [True, False])
def test_the_entropy_and_the_kl_of_a_kl_loss_are_means_over_tokens(has_kl_loss):
    """Two ranks, and 10 of a step's 40 tokens in the micro-batch: the loss has a quarter of their mean, twice."""
    from openrlhf_bapo.openrlhf.actor_trainer import BapoActorTrainer

    args = Namespace(algo=Namespace(kl=Namespace(use_loss=has_kl_loss)))
    info = {"dp_size": 2, "batch_num_tokens": torch.tensor(40.0)}
    share = torch.tensor(2.0) * 10 / 40 * 2
    status = {"metrics": {"entropy_loss": share, "kl": share, "reward": share}, "num_action_tokens": 10.0}
    BapoActorTrainer._make_means_over_tokens(Namespace(args=args, _loss_batch_info=info), status)
    assert status["metrics"] == {"entropy_loss": 2.0, "kl": 2.0 if has_kl_loss else share, "reward": share}


# ---- OpenRLHF's own trainer on the same samples ----


def equal_but_for_bapos_metrics(result: dict, expected: dict) -> None:
    ours = ("bapo/", "entropy/", "entropy_loss", "offpolicy/", "timing/bapo", "optimizer_steps_taken")
    status, others = (
        {k: v for k, v in found["status"].items() if not k.startswith(ours)} for found in (result, expected)
    )
    assert status == others
    for name, weight in expected["weights"].items():
        assert torch.equal(result["weights"][name], weight), name


def test_ppo_and_zero_width_bapo_are_openrlhfs_ppo_bit_for_bit(directory):
    split = dict(train__micro_batch_size=2, actor__entropy_coef=0)
    ppo = flags(directory, "ppo", **split, actor__eps_clip_low_high=None)
    (expected,) = pipeline.train_policy_actors(directory, ppo, [SAMPLES], trainer="upstream")
    assert expected["trainer"] == "openrlhf.trainer.ray.ppo_actor" and expected["status"]["ppo_clip_ratio"] > 0
    (result,) = pipeline.train_policy_actors(directory, ppo, [SAMPLES])
    equal_but_for_bapos_metrics(result, expected)
    zero_width = dict(
        bapo__ratio_lower_start=0.8, bapo__ratio_lower_max=0.8, bapo__ratio_upper_start=1.2, bapo__ratio_upper_max=1.2
    )
    (result,) = pipeline.train_policy_actors(directory, flags(directory, **split, **zero_width), [SAMPLES])
    equal_but_for_bapos_metrics(result, expected)
