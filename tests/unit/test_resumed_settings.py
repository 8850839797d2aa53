"""What a resumed run takes from its flags and from its checkpoint: OpenRLHF's policy actor, and averaged weights."""

import pipeline
import pytest
import torch
from openrlhf.utils import get_strategy

from openrlhf_bapo.openrlhf.workarounds import averaged_weights

SAMPLES = [pipeline.make_experience([3, 5, 2, 7] * 2)]
SIZES = dict(
    rollout__batch_size=2,
    rollout__micro_batch_size=8,
    train__batch_size=8,
    actor__lr_scheduler="linear",
    actor__adam__lr=0.01,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("resumed"))


@pytest.fixture(scope="module", params=[0, 2, 3])
def saved(request, directory):
    """Flags of a run, and two of its training steps; a checkpoint follows the first."""
    settings = SIZES | dict(ds__zero_stage=request.param, ckpt__path=directory / f"ckpt {request.param}")
    before, unbroken = (
        pipeline.train_policy_actors(directory, pipeline.flags(directory, **settings), SAMPLES, **steps)[0]
        for steps in (dict(num_steps=1, save_after=1), dict(num_steps=2))
    )
    return settings | dict(ckpt__load_enable=True), before, unbroken


def resumed(directory, settings: dict, **flags) -> dict:
    return pipeline.train_policy_actors(directory, pipeline.flags(directory, **settings | flags), SAMPLES)[0]


def test_a_resumed_run_goes_on_with_the_schedule_of_its_own_learning_rate(directory, saved):
    settings, before, unbroken = saved
    assert resumed(directory, settings)["status"]["actor_lr"] == unbroken["status"]["actor_lr"]
    lower = resumed(directory, settings, actor__adam__lr=0.001)["status"]["actor_lr"]
    assert lower == pytest.approx(unbroken["status"]["actor_lr"] / 10)
    still = resumed(directory, settings, actor__adam__lr=0)["weights"]
    assert all(torch.equal(weight, before["weights"][name]) for name, weight in still.items())


def test_a_resumed_run_has_its_own_weight_decay(directory, saved):
    settings, before, _ = saved
    decayed = resumed(directory, settings, actor__adam__weight_decay=50)["weights"]["lm_head.weight"]
    assert decayed.norm() < 0.9 * before["weights"]["lm_head.weight"].norm()


EMA = SIZES | dict(train__enable_ema=True, train__ema_beta=0.5)


def test_averaged_weights_go_on_from_the_checkpoint(directory):
    settings = EMA | dict(ckpt__path=directory / "ckpt ema")
    (before,) = pipeline.train_policy_actors(directory, pipeline.flags(directory, **settings), SAMPLES, save_after=1)
    after = resumed(directory, settings | dict(ckpt__load_enable=True), actor__adam__lr=0)
    pairs = zip(before["averages"], after["averages"], before["weights"].values(), strict=True)
    assert any((average - weight).abs().max() > 1e-4 for average, _, weight in pairs)
    for old, new, weight in zip(before["averages"], after["averages"], before["weights"].values(), strict=True):
        torch.testing.assert_close(new, (old + weight) / 2)


def test_a_checkpoint_without_averaged_weights_is_refused_with_enable_ema(directory, saved, capsys):
    settings, *_ = saved
    if settings["ds__zero_stage"] == 3:
        pytest.skip("ZeRO-3 has no average")
    with pytest.raises(SystemExit):
        pipeline.parse(pipeline.flags(directory, **settings, train__enable_ema=True))
    assert "has no averaged weights, and this run has --train.enable_ema" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_averaged_weights_follow_small_updates_in_any_type(directory, dtype):
    strategy = get_strategy(pipeline.parse(pipeline.flags(directory, **EMA)))
    strategy.accumulated_gradient, beta, num_updates = 1, 0.99, 600
    model, average = (torch.nn.Linear(40, 30, bias=False).to(dtype) for _ in range(2))
    with torch.no_grad():
        average.weight.copy_(model.weight)
        start = model.weight.float()
        model.weight.mul_(1.02)
    for _ in range(num_updates):
        strategy.moving_average(model, average, beta, "cpu")
    expected = model.weight.float().lerp(start, beta**num_updates)
    (exact,) = averaged_weights(average)
    torch.testing.assert_close(exact, expected.detach(), rtol=1e-4, atol=0)
    assert average.weight.dtype == dtype and torch.equal(average.weight, exact.to(dtype))
