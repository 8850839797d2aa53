"""--bapo.dump_tokens writes the trained tokens, and `openrlhf-bapo tokens` draws them.

tests/integration/test_lag.py has files from the real pipeline.
"""

import csv
import math
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pipeline
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from pyarrow import parquet
from test_off_policy_actor import LENGTHS, LOG_RATIOS, POSITIVE, STALENESS, one_update, stale_samples

from openrlhf_bapo.cli import tokens
from openrlhf_bapo.openrlhf import token_dump

# ---- The sample ----


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 2**33))
def test_a_sample_does_not_depend_on_the_split_over_calls_and_keeps_the_order(parts, size, seed):
    shown = torch.arange(sum(parts))
    whole, split = (token_dump.TokenSample(size, seed) for _ in range(2))
    whole.add({"token": shown, "double": 2 * shown})
    for part in shown.split(parts):
        split.add({"token": part, "double": 2 * part})
    kept = split.columns["token"]
    assert torch.equal(kept, whole.columns["token"]) and torch.equal(split.columns["double"], 2 * kept)
    assert len(kept) == min(size, len(shown)) and (kept.diff() > 0).all()


def test_every_token_is_equally_likely_to_be_kept():
    counts = torch.zeros(60)
    for seed in range(2000):
        sample = token_dump.TokenSample(15, seed)
        for part in torch.arange(60).split([5, 40, 15]):
            sample.add({"token": part})
        counts[sample.columns["token"]] += 1
    # 2000 draws of probability 1/4: six deviations.
    assert (counts - 500).abs().max() < 6 * math.sqrt(2000 * 0.25 * 0.75)


# ---- OpenRLHF's own policy actor and DeepSpeed, float32 ----


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


def dumped(folder: Path) -> dict[str, np.ndarray]:
    """Columns of a run's only file."""
    (file,) = folder.rglob("*.parquet")
    table = parquet.read_table(file)
    return {name: table[name].to_numpy() for name in table.column_names}


def bounds(lower: float, upper: float) -> dict:
    """Flags of a search that can find only these bounds."""
    found = dict(ratio_lower_start=lower, ratio_lower_max=lower, ratio_upper_start=upper, ratio_upper_max=upper)
    return {f"bapo__{name}": value for name, value in found.items()}


FLAGS = dict(bapo__dump_tokens=1, actor__dual_clip=None, train__max_epochs=1)


def dump(directory, tmp_path, log_ratios=LOG_RATIOS, **flags) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Train a step on the eight stale samples; the tokens that it writes, and the output of the ranks."""
    given = FLAGS | dict(logger__tensorboard_dir=tmp_path / "tensorboard") | flags
    results = one_update(directory, STALENESS, log_ratios, **given)
    return dumped(tmp_path / "tensorboard/tokens"), results


def test_bounds_per_token_are_written_for_each_token_and_drawn(directory, tmp_path):
    found, _ = dump(directory, tmp_path, policy_loss="divergence", divergence__threshold=0.03)
    at_rollout = found["probability"] / found["ratio"]
    np.testing.assert_allclose(found["clip_low"], (1 - 0.03 / at_rollout).clip(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["clip_high"], 1 + 0.03 / at_rollout, rtol=1e-4)
    moved, positive = found["probability"] - at_rollout, found["advantage"] > 0
    clipped = np.where(positive, moved > 0.03, moved < -0.03)
    assert (found["clipped"] == clipped).all() and 0 < clipped.sum() < len(clipped)
    tokens.draw(tokens.read_tokens(tmp_path, None), tmp_path / "tokens.png")


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_update_without_bounds_has_0_and_inf_and_is_drawn(directory, tmp_path):
    found, _ = dump(directory, tmp_path, [0.0] * 8, policy_loss="m2")  # every ratio is 1
    assert set(found["clip_low"]) == {0.0} and set(found["clip_high"]) == {math.inf} and not found["clipped"].any()
    tokens.draw(tokens.read_tokens(tmp_path, None), tmp_path / "tokens.png")


def each_sample(found: dict[str, np.ndarray]):
    """Yield (place in LENGTHS, rows) of the samples. Training shuffles them; each has its own staleness and length."""
    for sample in range(8):
        rows = found["sample"] == sample
        (staleness,) = set(found["staleness"][rows])
        yield list(zip(STALENESS, LENGTHS, strict=True)).index((staleness, rows.sum())), rows


@pytest.mark.parametrize("policy_loss", ["bapo", "ppo"])
def test_every_token_is_written_with_its_ratio_bounds_and_clipping(directory, tmp_path, policy_loss):
    lower, upper = (0.85, 1.5) if policy_loss == "bapo" else (0.8, 1.2)
    limits = bounds(lower, upper) if policy_loss == "bapo" else {}
    found, (result,) = dump(directory, tmp_path, policy_loss=policy_loss, **limits)
    np.testing.assert_allclose(found["clip_low"], lower)
    np.testing.assert_allclose(found["clip_high"], upper)
    assert set(found["global_step"]) == {1} and set(found["update"]) == {0}
    assert not found["dual_clipped"].any()
    assert set(found["weight"]) == {1.0} and "start_over_behavior" not in found

    model_log_probs, model_entropy = of_the_model(directory)
    order = []
    for which, rows in each_sample(found):
        order.append(which)
        ratio = math.exp(LOG_RATIOS[which])
        np.testing.assert_allclose(found["ratio"][rows], ratio, atol=1e-3)
        advantage = float(stale_samples(STALENESS, LOG_RATIOS)[which].advantages[0, -1])
        assert found["position"][rows].tolist() == list(range(LENGTHS[which]))
        np.testing.assert_allclose(found["advantage"][rows], advantage, rtol=1e-6)
        np.testing.assert_allclose(found["probability"][rows], model_log_probs[which].exp(), rtol=1e-4)
        np.testing.assert_allclose(found["entropy"][rows], model_entropy[which], rtol=1e-4)
        beyond = ratio > upper if advantage > 0 else ratio < lower
        assert set(found["clipped"][rows]) == {beyond}
    assert sorted(order) == list(range(8)) and 0 < found["clipped"].mean() < 1
    for sign, name in ((1, "positive"), (-1, "negative")):
        of_sign = found["clipped"][found["advantage"] * sign > 0]
        assert result["status"][f"offpolicy/clip_frac_{name}"] == pytest.approx(of_sign.mean())
    assert len(found["entropy"]) == sum(LENGTHS)


LOG_WEIGHTS = [0, -0.1, -0.8, 0.9, -0.2, 1.7, 0.05, -0.4]  # log s by sample; 1, 3, 5 and 7 are negative
DECOUPLED = dict(offpolicy__objective="decoupled")
STOCK = dict(policy_loss="ppo", offpolicy__ratio_base="recomputed", offpolicy__lag=1, replay__ratio=None)


def masked(s: float, *_) -> float:
    return s if 0.5 <= s <= 5 else 0.0


@pytest.mark.parametrize(
    ("flags", "weigh"),
    [
        (DECOUPLED | dict(offpolicy__weight="none"), lambda *_: 1.0),
        (DECOUPLED | dict(offpolicy__weight="capped", policy_loss="ppo"), lambda s, *_: min(s, 2)),
        (DECOUPLED | dict(offpolicy__weight="masked"), masked),
        (STOCK | dict(algo__advantage__is_correction_level="token"), masked),
        (
            DECOUPLED | dict(offpolicy__weight="tapered", offpolicy__weight_level="token"),
            lambda s, length, is_positive: 1.0 if is_positive else min(s, 1),
        ),
        (
            DECOUPLED | dict(offpolicy__weight="tapered", policy_loss="ppo"),
            lambda s, length, is_positive: 1.0 if is_positive else min(s**length, 1),
        ),
    ],
    ids=["none", "capped", "masked", "IS correction", "tapered by token", "tapered by sequence"],
)
def test_every_token_is_written_with_the_weight_that_its_loss_has(directory, tmp_path, flags, weigh):
    found, (result,) = dump(directory, tmp_path, log_weights=LOG_WEIGHTS, **flags)
    status, weights = result["status"], []
    for which, rows in each_sample(found):
        s = math.exp(LOG_WEIGHTS[which])
        np.testing.assert_allclose(found["start_over_behavior"][rows], s, rtol=1e-4)
        weights.append(weigh(s, LENGTHS[which], POSITIVE[which]))
        np.testing.assert_allclose(found["weight"][rows], weights[-1], rtol=1e-3, err_msg=f"sample {which}")
    assert (len(set(weights)) > 1) == (flags.get("offpolicy__weight") != "none")
    negative = found["weight"][found["advantage"] < 0].mean()
    if flags.get("offpolicy__weight") == "tapered":
        assert status["offpolicy/weight_negative"] == pytest.approx(negative, rel=1e-5)
    signs = tokens.by_sign(tokens.read_tokens(tmp_path))
    rows = [row for row in tokens.measure(signs) if row["by"] == "quadrant" and row["group"].endswith(", trained")]
    change = sum(row["entropy_change"] for row in rows)
    assert change == pytest.approx(status["entropy/predicted_change"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "weigh"),
    [
        (dict(policy_loss="topr", topr__level="token"), lambda r, length, scale: min(r, 1)),
        (dict(policy_loss="topr"), lambda r, length, scale: min(r**length, 1)),
        (dict(policy_loss="balanced", balanced__target=0.9), lambda r, length, scale: scale * min(r, 1)),
    ],
    ids=["topr by token", "topr by sequence", "balanced"],
)
def test_every_token_is_written_with_the_weight_of_a_rule_without_a_ratio(directory, tmp_path, flags, weigh):
    found, (result,) = dump(directory, tmp_path, **flags)
    ratio, positive = found["ratio"].astype(float), found["advantage"] > 0
    lengths = np.bincount(found["sample"])[found["sample"]]
    scale = result["status"].get("bapo/negative_weight", 1.0)
    weights = [weigh(r, length, scale) for r, length in zip(ratio, lengths, strict=True)]
    np.testing.assert_allclose(found["rule_weight"], np.where(positive, 1, weights), rtol=1e-3)
    assert set(found["weight"]) == {1.0} and not found["clipped"].any()
    assert (scale < 1) == (flags["policy_loss"] == "balanced")
    rows = tokens.measure(tokens.by_sign(tokens.read_tokens(tmp_path)))
    trained = [row for row in rows if row["by"] == "quadrant" and row["group"].endswith(", trained")]
    change = sum(row["entropy_change"] for row in trained)
    assert change == pytest.approx(result["status"]["entropy/predicted_change"], rel=1e-4)
    drawn = [row["weight"] for row in rows if (row["sign"], row["by"], row["group"]) == ("negative", "staleness", "8+")]
    assert drawn == [pytest.approx(weigh(math.exp(-0.9), 2, scale), rel=1e-3)]  # the sample of 2 tokens that is 9 late
    tokens.draw(tokens.read_tokens(tmp_path), tmp_path / "tokens.png")


@torch.no_grad()
def of_the_model(directory) -> tuple[list, list]:
    """Log-probs and entropies of the eight samples under the policy before training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    log_probs, entropies = [], []
    for sample, length in zip(stale_samples(STALENESS, LOG_RATIOS), LENGTHS, strict=True):
        distribution = model(sample.sequences).logits[0, :-1].log_softmax(-1)
        chosen = distribution.gather(-1, sample.sequences[0, 1:, None]).squeeze(-1)
        log_probs.append(chosen[-length:])
        entropies.append(-(distribution.exp() * distribution).sum(-1)[-length:])
    return log_probs, entropies


def test_a_negative_token_beyond_dual_clip_is_marked(directory, tmp_path):
    # Samples 1, 3, 5, 7 are negative; 1 and 2 are above e.
    found, _ = dump(directory, tmp_path, [0, 1.5, 1.5, 0, 0, 0, 0, 0], actor__dual_clip=3.0, **bounds(0.7, 1.5))
    assert found["dual_clipped"].sum() == LENGTHS[1]
    assert found["clipped"].sum() == LENGTHS[2]


@pytest.mark.parametrize(
    "split",
    [
        dict(train__max_epochs=2, train__batch_size=4),
        dict(train__dynamic_batch_enable=True, train__max_tokens_per_gpu=26, ds__zero_stage=2),
        dict(bapo__scope="micro_batch"),
        dict(bapo__smoothing=3),
    ],
    ids=["two epochs of two updates", "dynamic batch", "micro-batch scope", "smoothing"],
)
def test_every_token_is_written_once_per_epoch_with_its_updates_bounds_however_the_step_is_split(
    directory, tmp_path, split
):
    found, (result,) = dump(directory, tmp_path, train__micro_batch_size=2, **split)
    num_epochs = split.get("train__max_epochs", 1)
    assert len(found["ratio"]) == num_epochs * sum(LENGTHS)
    lengths = np.bincount(found["sample"]).tolist()
    assert sorted(lengths) == sorted(LENGTHS * num_epochs)
    updates, num_micro_batches = 2 * num_epochs if num_epochs > 1 else 1, len(result["clamped"])
    assert set(found["update"]) == set(range(updates))
    # The loss's own bounds, a micro-batch each; in order of training.
    used = dict.fromkeys(zip(found["clip_low"].tolist(), found["clip_high"].tolist(), strict=True))
    assert list(used) == list(dict.fromkeys(result["clamped"]))
    if num_epochs > 1:
        assert num_micro_batches == 8 and len(used) > 1
        assert (found["optimizer_steps"] == found["update"]).all()


def test_only_the_first_of_two_ranks_writes_its_tokens(directory, tmp_path):
    found, _ = dump(directory, tmp_path, num_ranks=2)
    assert len(found["ratio"]) == sum(LENGTHS[:4]) and set(found["staleness"]) == set(STALENESS[:4])


def test_a_file_has_a_maximum_size_and_only_tokens_of_its_step(directory, tmp_path):
    many = pipeline.make_experience([512] * 40)
    assert token_dump.MAX_TOKENS < 40 * 512
    many[0].advantages *= 0
    many[0].info["log_ratio"] = torch.tensor([-1.0])
    argv = pipeline.flags(
        directory,
        policy_loss="bapo",
        bapo__dump_tokens=1,
        logger__tensorboard_dir=tmp_path / "tensorboard",
        train__batch_size=40,
        rollout__batch_size=10,
    )
    pipeline.train_policy_actors(directory, argv, [many])
    found = dumped(tmp_path)
    assert len(found["ratio"]) == token_dump.MAX_TOKENS
    assert len(set(zip(found["sample"].tolist(), found["position"].tolist(), strict=True))) == token_dump.MAX_TOKENS
    assert set(found["sample"]) == set(range(40)) and found["position"].max() > 500
    without_advantage = found["advantage"] == 0
    assert found["ratio"][without_advantage].max() < 0.4 and not found["clipped"][without_advantage].any()


def test_dumping_changes_neither_training_nor_logs_and_without_it_no_file_is_written(directory, tmp_path):
    def train(every: int) -> dict:
        given = dict(bapo__dump_tokens=every, logger__tensorboard_dir=tmp_path / str(every), train__max_epochs=2)
        (result,) = one_update(directory, STALENESS, LOG_RATIOS, num_steps=3, **given)
        return result

    off, on = train(0), train(2)
    assert not (tmp_path / "0").exists()
    assert [file.name for file in (tmp_path / "2").rglob("*")] == ["tokens", "step_000002_rank0.parquet"]
    assert set(dumped(tmp_path)["global_step"]) == {2}
    assert on["statuses"] == off["statuses"] and on["num_hooks"] == off["num_hooks"]
    assert all(torch.equal(on["weights"][name], weight) for name, weight in off["weights"].items())


def test_without_tensorboard_the_tokens_are_beside_the_checkpoints(directory, tmp_path):
    paths = dict(logger__tensorboard_dir=None, ckpt__path=tmp_path / "ckpt")
    one_update(directory, STALENESS, LOG_RATIOS, bapo__dump_tokens=1, **paths)
    metadata = parquet.read_schema(tmp_path / "ckpt/tokens/step_000001_rank0.parquet").metadata
    assert metadata[b"first_step"] == b"1" and 0 < time.time() - float(metadata[b"began"]) < pipeline.PATIENCE


def test_a_resumed_run_continues_to_count_its_steps(directory, tmp_path):
    argv = pipeline.flags(directory, policy_loss="bapo", train__batch_size=8, ckpt__path=tmp_path / "ckpt")
    samples = [stale_samples(STALENESS, LOG_RATIOS)]
    pipeline.train_policy_actors(directory, argv, samples, num_steps=2, save_after=2)
    resume = [*argv, "--ckpt.load_enable", "--bapo.dump_tokens", "1", "--logger.tensorboard_dir", str(tmp_path / "tb")]
    pipeline.train_policy_actors(directory, resume, samples)
    assert [file.name for file in (tmp_path / "tb/tokens").iterdir()] == ["step_000003_rank0.parquet"]
    assert set(dumped(tmp_path / "tb")["global_step"]) == {3}


def test_steps_that_train_only_the_critic_are_counted(directory, tmp_path):
    dump(directory, tmp_path, algo__advantage__estimator="gae", critic__freezing_steps=4)  # of steps 0 to 4
    assert [file.name for file in tmp_path.rglob("*.parquet")] == ["step_000006_rank0.parquet"]


# ---- The picture and its numbers ----


def written(
    folder: Path, step: int = 5, num_tokens: int = 400, seed: int = 0, weighed: bool = False
) -> dict[str, np.ndarray]:
    """Write tokens of all kinds to a run's folder; the columns that were written."""
    rng = np.random.default_rng(seed)
    ratio = np.exp(rng.normal(0, 0.6, num_tokens)).astype(np.float32)
    advantage = rng.choice([-1.5, -0.5, 0.0, 0.5, 1.5], num_tokens).astype(np.float32)
    lower, upper = rng.choice([0.6, 0.9], num_tokens), rng.choice([1.2, 1.5, 3.0], num_tokens)
    entropy = rng.uniform(0, 2, num_tokens).astype(np.float32)
    entropy[:3] = np.nan
    columns = {
        "global_step": np.full(num_tokens, step, np.int32),
        "ratio": ratio,
        "probability": rng.uniform(0, 1, num_tokens).astype(np.float32),
        "entropy": entropy,
        "advantage": advantage,
        "weight": (rng.choice([0, 0.3, 1, 1.4], num_tokens) if weighed else np.ones(num_tokens)).astype(np.float32),
        "clipped": np.where(advantage > 0, ratio > upper, (advantage < 0) & (ratio < lower)),
        "dual_clipped": (advantage < 0) & (ratio > 3),
        "clip_low": lower,
        "clip_high": upper,
        "staleness": rng.integers(0, 8, num_tokens).astype(np.int32),
        "optimizer_steps": rng.integers(0, 20, num_tokens).astype(np.int32),
    }
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), folder / f"tokens/step_{step:06d}_rank0.parquet")
    return columns | {"rule_weight": np.full(num_tokens, np.nan)}


def expected_groups(columns: dict[str, np.ndarray]) -> dict[tuple, list[tuple[float, ...]]]:
    """Map (sign, by, group) to the (entropy, probability, weight, change of entropy) of each of its tokens."""
    found, sums = {}, {}
    finite = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    finite = [token for token in finite if not math.isnan(token["entropy"])]
    for token in finite:
        weighted, total = sums.get(token["global_step"], (0.0, 0.0))
        ratio = float(token["ratio"]) * float(token["weight"])
        sums[token["global_step"]] = weighted + ratio * math.log(token["probability"]), total + ratio
    edges = list(zip(tokens.RATIO_EDGES, tokens.RATIO_EDGES[1:], strict=False))
    for token in finite:
        if token["advantage"] == 0:
            continue
        sign = "positive" if token["advantage"] > 0 else "negative"
        fixed = token["ratio"] > 1.2 if sign == "positive" else token["ratio"] < 0.8
        ours, fixed = (clips or token["dual_clipped"] for clips in (token["clipped"], fixed))
        fate = {(0, 0): "kept by both", (0, 1): "gained", (1, 0): "lost", (1, 1): "clipped by both"}[ours, fixed]
        (low_high,) = [f"{low:g}-{high:g}" for low, high in edges if low <= token["ratio"] < high]
        weighted, total = sums[token["global_step"]]
        height = math.log(token["probability"]) - weighted / total
        is_trained = not ours and token["weight"] > 0
        quadrant = f"{'low' if height < 0 else 'high'} probability, {'trained' if is_trained else 'left out'}"
        change = -float(token["weight"]) * float(token["ratio"]) * float(token["advantage"]) * height
        change /= sum(float(token["weight"]) for token in finite)
        ages = {"4-7": 4, "2-3": 2, "1": 1, "0": 0}
        age = next(label for label, lowest in ages.items() if token["staleness"] >= lowest)
        for by, group in (("ratio", low_high), ("fate", fate), ("quadrant", quadrant), ("staleness", age)):
            numbers = float(token["entropy"]), float(token["probability"]), float(token["weight"]), change
            found.setdefault((sign, by, group), []).append(numbers)
    return found


@pytest.mark.parametrize("weighed", [False, True])
def test_the_numbers_agree_with_a_count_token_by_token(tmp_path, weighed):
    steps = [written(tmp_path, step, num_tokens=1000, seed=step, weighed=weighed) for step in (5, 10)]
    columns = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    rows = tokens.measure(tokens.by_sign(tokens.read_tokens(tmp_path)))
    expected = expected_groups(columns)
    assert len(expected) > 30  # all fates and nearly all bins of both signs
    by_group = {(row["sign"], row["by"], row["group"].split(":")[0]): row for row in rows}
    assert expected.keys() <= by_group.keys()
    for key, row in by_group.items():
        group = expected.get(key, [])
        assert row["num_tokens"] == len(group), key
        num_of_sign = sum(len(some) for (sign, by, _), some in expected.items() if (sign, by) == key[:2])
        assert row["fraction"] == pytest.approx(len(group) / num_of_sign)
        if not group:
            assert all(math.isnan(row[name]) for name in ("entropy", "probability", "weight"))
            continue
        entropies, probabilities, weights, changes = zip(*group, strict=True)
        assert row["entropy_change"] == pytest.approx(sum(changes), abs=1e-9)
        mean = sum(entropies) / len(group)
        assert (row["entropy"], row["probability"]) == pytest.approx((mean, sum(probabilities) / len(group)))
        assert row["weight"] == pytest.approx(sum(weights) / len(group))
        if len(group) > 1:
            variance = sum((entropy - mean) ** 2 for entropy in entropies) / (len(group) - 1)
            assert row["entropy_error"] == pytest.approx(math.sqrt(variance / len(group)))


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that were drawn."""
    found = []
    monkeypatch.setattr(pyplot, "close", found.append)
    return found


def test_the_picture_shows_every_token_with_an_advantage_the_bounds_and_the_numbers(tmp_path, figures):
    columns = written(tmp_path)
    tokens.main([str(tmp_path)])
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")
    signs = tokens.by_sign(columns)
    rows = tokens.measure(signs)
    positive, negative, entropy, fates, quadrants, *_ = figures[0].axes
    for axis, sign, bound, fixed in ((positive, "positive", "clip_high", 1.2), (negative, "negative", "clip_low", 0.8)):
        (density,) = [found for found in axis.collections if found.get_array() is not None]
        assert density.get_array().sum() == len(signs[sign]["ratio"])
        places = [float(line.get_xdata()[0]) for line in axis.lines]
        assert places == [np.median(signs[sign][bound]), fixed]
        (band,) = axis.patches
        assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx(
            (signs[sign][bound].min(), signs[sign][bound].max())
        )
    curves = [container.lines[0] for container in entropy.containers]
    for curve, sign in zip(curves, signs, strict=True):
        means = [row["entropy"] for row in rows if (row["sign"], row["by"]) == (sign, "ratio")]
        np.testing.assert_array_equal(curve.get_ydata(), means)
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in fates.containers}
    for fate in tokens.FATES[1:]:
        assert heights[fate] == [100 * row["fraction"] for row in rows if row["group"] == fate]
    drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in quadrants.containers}
    for fate, label in (("trained", "tokens trained on"), ("left out", "tokens left out, as if trained on")):
        assert drawn[label] == [row["entropy_change"] for row in rows if row["group"].endswith(f", {fate}")]
    num_left_out = int(((columns["advantage"] == 0) | np.isnan(columns["entropy"])).sum())
    caption = figures[0].get_supxlabel()
    assert f"400 sampled tokens of global step 5; {num_left_out} without an advantage" in caption
    assert "up to\n7 versions, 19 optimizer steps" in caption and "are ours" in caption

    # Distinguishable in gray: by marker and line, by hatch.
    assert len({(curve.get_marker(), curve.get_linestyle()) for curve in curves}) == 2
    assert len({bars[0].get_hatch() for bars in fates.containers}) == 3
    assert len({line.get_linestyle() for line in positive.lines}) == 2


def test_the_picture_shows_weights_by_staleness_only_where_a_token_has_another_weight_than_1(tmp_path, figures):
    for weighed in (False, True):
        signs = tokens.by_sign(written(tmp_path, weighed=weighed))
        tokens.main([str(tmp_path)])
        drawn = [axis for axis in figures[-1].axes if axis.get_ylabel() == "mean weight"]
        assert len(drawn) == weighed
    (axis,) = drawn
    ages = {"0": [0], "1": [1], "2-3": [2, 3], "4-7": [4, 5, 6, 7], "8+": []}
    assert [label.get_text() for label in axis.get_xticklabels()] == list(ages)
    for bars, of_sign in zip(axis.containers, signs.values(), strict=True):
        chosen = [of_sign["weight"][np.isin(of_sign["staleness"], versions)] for versions in list(ages.values())[:4]]
        assert [bar.get_height() for bar in bars] == pytest.approx([weights.mean() for weights in chosen])


def test_tokens_written_without_a_weight_have_weight_1(tmp_path):
    written(tmp_path)
    (file,) = tmp_path.rglob("*.parquet")
    parquet.write_table(parquet.read_table(file).drop_columns(["weight"]), file)
    assert set(tokens.read_tokens(tmp_path)["weight"]) == {1.0}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_run_with_tokens_of_one_sign_or_of_one_bound_is_drawn(tmp_path, sign):
    columns = written(tmp_path)
    columns["advantage"] = sign * np.abs(columns["advantage"])
    columns |= {name: np.full(400, value) for name, value in (("clip_low", 0.8), ("clip_high", 1.2))}
    tokens.draw(columns, tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


def test_all_steps_are_drawn_unless_one_is_chosen_and_the_table_has_the_numbers(tmp_path, capsys):
    of_step = {step: written(tmp_path / "run/tensorboard", step, seed=step) for step in (5, 10)}

    def table(*flags: str) -> list[dict]:
        output, file = tmp_path / "picture.png", tmp_path / "numbers.csv"
        tokens.main([str(tmp_path / "run"), "-o", str(output), "--csv", str(file), *flags])
        assert capsys.readouterr().out == f"{output}\n"
        return list(csv.DictReader(file.open()))

    both = {name: np.concatenate([columns[name] for columns in of_step.values()]) for name in of_step[5]}
    for flags, columns in (((), both), (("--step", "10"), of_step[10])):
        expected = [
            {name: str(value) for name, value in row.items()} for row in tokens.measure(tokens.by_sign(columns))
        ]
        assert table(*flags) == expected


def test_of_the_runs_that_dumped_into_a_folder_the_newest_is_drawn_with_its_resumes(tmp_path, capsys):
    def dump(steps: range, process: dict[str, str]) -> None:
        for step in steps:
            written(tmp_path, step)
            file = tmp_path / f"tokens/step_{step:06d}_rank0.parquet"
            parquet.write_table(parquet.read_table(file).replace_schema_metadata(process), file)

    def drawn() -> set[int]:
        return set(tokens.read_tokens(tmp_path)["global_step"].tolist())

    dump(range(5, 50, 5), {"began": "1e9", "first_step": "1"})
    dump(range(40, 60, 5), {"began": "1.1e9", "first_step": "37"})
    assert drawn() == set(range(5, 60, 5)) and capsys.readouterr().err == ""
    dump(range(25, 30, 5), {"began": "1.15e9", "first_step": "22"})  # from an earlier checkpoint
    assert drawn() == set(range(5, 30, 5))
    assert "6 of 11 token files are of an earlier run, or of steps before a resume" in capsys.readouterr().err
    dump(range(10, 30, 10), {"began": "1.2e9", "first_step": "1"})
    dump(range(30, 40, 10), {"began": "1.3e9", "first_step": "29"})
    assert drawn() == {10, 20, 30}
    (line,) = capsys.readouterr().err.splitlines()
    assert f"warning: {tmp_path}: 8 of 11 token files are of an earlier run, or of steps" in line


def test_mistakes_end_in_one_line(tmp_path, capsys):
    written(tmp_path / "a")
    written(tmp_path / "b/tensorboard")

    def refused(*argv) -> str:
        return pipeline.refusal(argv, capsys, tokens.main)

    empty = tmp_path / "nowhere"
    assert f"RUN {empty}: has no tokens/step_*_rank*.parquet; train with --bapo.dump_tokens N" in refused(empty)
    allowed = f"one of {tmp_path / 'a'}, {tmp_path / 'b/tensorboard'}"
    assert f"RUN {tmp_path}: has the tokens of 2 runs; allowed: {allowed}" in refused(tmp_path)
    assert "--step 7: allowed: one of 5" in refused(tmp_path / "a", "--step", 7)
    assert "--step: invalid int value: 'last'" in refused(tmp_path / "a", "--step", "last")
    for flag in ("-o", "--csv"):
        assert "nowhere/file: cannot be written (No such file" in refused(tmp_path / "a", flag, empty / "file")
    file = tmp_path / "a/tokens/step_000005_rank0.parquet"
    parquet.write_table(parquet.read_table(file).drop_columns(["entropy", "ratio"]), file)
    assert f"{file}: has no column ratio, entropy;" in refused(tmp_path / "a")
    file.write_bytes(b"no parquet")
    assert f"{file}: cannot be read as Parquet (" in refused(tmp_path / "a")


def test_every_step_draws_its_sample_with_another_seed():
    def seed(global_step: int) -> int:
        args = Namespace(train=Namespace(seed=7), bapo=Namespace(dump_tokens=1))
        strategy = Namespace(is_rank_0=lambda: True)
        trainer = Namespace(args=args, global_step=global_step, actor=torch.nn.Identity(), strategy=strategy)
        dumps = token_dump.TokenDumps(trainer)
        dumps.begin()
        return dumps._sample._generator.initial_seed()

    assert seed(3) == seed(3) != seed(4)
