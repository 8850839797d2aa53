"""--policy_loss m2, divergence, topr and balanced on OpenRLHF's policy actor, float32."""

import math
import shutil
from pathlib import Path

import pipeline
import pytest
from test_off_policy_actor import LENGTHS, LOG_RATIOS, STALENESS, one_update, share, stale_samples, tokens
from test_other_rules import exact_threshold, harmful_log_ratios
from test_update_scope import GRADIENT, NUM_UPDATES, SAMPLES, flags, same_updates

from openrlhf_bapo.rules.other_rules import RULES


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


# ---- The first optimizer step on stale samples, whose ratios are known ----


def weighed(level: str, scale: float = 1.0) -> list[tuple[float, float, float]]:
    """(weight, advantage, 1) of every token by TOPR, negative tokens scaled."""
    found = []
    for log_ratio, length, sample in zip(LOG_RATIOS, LENGTHS, stale_samples(STALENESS, LOG_RATIOS), strict=True):
        advantage = float(sample.advantages.sum()) / length
        ratio = math.exp(log_ratio * (length if level == "sequence" else 1))
        found += [(1.0 if advantage > 0 else scale * min(ratio, 1.0), advantage, 1.0)] * length
    return found


def test_m2s_bounds_are_those_of_the_second_moment_of_all_tokens_of_the_optimizer_step(directory):
    # A ratio of 1 would be harmful or not by its last bit, which follows from the machine.
    log_ratios = [0.05, -0.05, *LOG_RATIOS[2:]]
    (result,) = one_update(directory, [1, 1, *STALENESS[2:]], log_ratios, policy_loss="m2", m2__budget=0.02)
    found = tokens(log_ratios)
    status, bound = result["status"], math.exp(exact_threshold([harmful_log_ratios(found)], 0.02))
    assert 1.05 < bound < 1.5 and status["bapo/clip_high"] == pytest.approx(bound, rel=2e-3)
    assert status["bapo/clip_low"] == pytest.approx(1 / bound, rel=2e-3)
    assert status["bapo/positive_share"] == pytest.approx(share(found, 1 / bound, bound, "gradient"), rel=1e-3)
    assert set(result["clamped"]) == {(status["bapo/clip_low"], status["bapo/clip_high"])}
    assert "bapo/initial_share" not in status and status["timing/bapo_ratio_forward"] == 4


def test_divergence_clips_each_token_by_its_own_bounds(directory):
    (result,) = one_update(directory, STALENESS, LOG_RATIOS, policy_loss="divergence", divergence__threshold=0.03)
    counts = {True: [], False: []}
    for sample, behavior in zip(stale_samples(STALENESS, LOG_RATIOS), result["behavior_log_probs"], strict=True):
        is_positive = bool(sample.advantages.sum() > 0)
        probability = behavior[sample.action_mask > 0].exp()
        moved = probability * (math.exp(float(sample.info["log_ratio"])) - 1)
        counts[is_positive] += (moved > 0.03 if is_positive else moved < -0.03).tolist()
    status = result["status"]
    for name, clipped in (("positive", counts[True]), ("negative", counts[False])):
        assert 0 < sum(clipped) < len(clipped)
        for group in ("bapo", "offpolicy"):
            assert status[f"{group}/clip_frac_{name}"] == pytest.approx(sum(clipped) / len(clipped))
    assert not {"bapo/clip_low", "timing/bapo_search", "bapo/initial_share"} & status.keys()


def test_topr_weighs_negative_responses_by_their_ratio(directory):
    (result,) = one_update(directory, STALENESS, LOG_RATIOS, policy_loss="topr")
    status = result["status"]
    assert status["bapo/positive_share"] == pytest.approx(share(weighed("sequence"), 0, math.inf, "gradient"), rel=1e-4)
    assert status["ppo_clip_ratio"] == status["offpolicy/clip_frac_positive"] == 0
    assert set(result["clamped"]) == {(0.0, math.inf)}
    assert not {"bapo/clip_low", "timing/bapo_search", "bapo/initial_share"} & status.keys()


def test_balanced_scales_negative_tokens_of_all_micro_batches_to_the_target(directory):
    (result,) = one_update(directory, STALENESS, LOG_RATIOS, policy_loss="balanced", balanced__target=0.75)
    status, before = result["status"], share(weighed("token"), 0, math.inf, "gradient")
    scale = before / (1 - before) * 0.25 / 0.75
    assert scale < 1 and status["bapo/negative_weight"] == pytest.approx(scale, rel=1e-4)
    assert status["bapo/positive_share"] == pytest.approx(0.75, rel=1e-4)
    assert share(weighed("token", scale), 0, math.inf, "gradient") == pytest.approx(0.75)
    assert status["timing/bapo_ratio_forward"] == 4


# ---- Several optimizer steps ----

SETTINGS = {
    "m2": dict(m2__budget=0.001),
    "divergence": dict(divergence__threshold=0.02),
    "topr": {},
    "balanced": dict(balanced__target=0.6),
}


@pytest.mark.parametrize("policy_loss", RULES)
def test_an_update_split_over_ranks_and_micro_batches_is_the_update_of_one(directory, policy_loss):
    settings = dict(policy_loss=policy_loss, **SETTINGS[policy_loss])
    (expected,) = pipeline.train_policy_actors(directory, flags(directory, **settings), [SAMPLES])
    split = flags(directory, **settings, train__micro_batch_size=2, actor__num_gpus_per_node=2)
    needs_tally_first = RULES[policy_loss]().needs_tally_first
    for result in pipeline.train_policy_actors(directory, split, [SAMPLES[:4], SAMPLES[4:]]):
        same_updates(result | {"bounds": []}, expected | {"bounds": []})
        metrics = {name: value for name, value in expected["status"].items() if name.startswith("bapo/")}
        assert {name: result["status"][name] for name in metrics} == pytest.approx(metrics, rel=2e-3, nan_ok=True)
        if needs_tally_first:  # no forward in the first update
            assert result["status"]["timing/bapo_ratio_forward"] == 2 * (NUM_UPDATES - 1)


# ---- Saved and restored, BAPO's own steady bounds too ----

AVERAGED = {
    "bapo": GRADIENT | dict(bapo__smoothing=1.5),
    "m2": dict(m2__half_life=1.5, m2__budget=0.001),
    "balanced": dict(balanced__half_life=1.5),
}
HALF_LIFE = {"bapo": "--bapo.smoothing", "m2": "--m2.half_life", "balanced": "--balanced.half_life"}
OTHERS = {
    "bapo": (("--bapo.ratio_upper_max", "2.5"), ("--bapo.smoothing_of", "tally")),
    "m2": (("--m2.budget", "0.5"),),
    "balanced": (("--balanced.level", "sequence"),),
}


@pytest.fixture(scope="module", params=AVERAGED)
def saved(request, directory, tmp_path_factory) -> tuple[str, list[str], dict]:
    """The rule, flags of a run whose first training step was saved, and the statuses of the run that went on."""
    name, path = request.param, tmp_path_factory.mktemp("saved") / "ckpt"
    argv = flags(directory, policy_loss=name, ckpt__path=path, train__micro_batch_size=2, **AVERAGED[name])
    (unbroken,) = pipeline.train_policy_actors(directory, argv, [SAMPLES], num_steps=2, save_after=1)
    return name, [*argv, "--ckpt.load_enable"], unbroken


def test_a_resumed_run_goes_on_with_the_saved_average(directory, saved):
    name, resume, unbroken = saved
    assert [status["timing/bapo_ratio_forward"] for status in unbroken["statuses"]] == [0, 0]
    (resumed,) = pipeline.train_policy_actors(directory, resume, [SAMPLES])
    metrics = {key: value for key, value in unbroken["status"].items() if key.startswith("bapo/")}
    assert {key: resumed["status"][key] for key in metrics} == pytest.approx(metrics, rel=1e-3)  # m2's grid
    expected = unbroken["clamped"][len(resumed["clamped"]) :]
    assert resumed["clamped"][0] == expected[0] and (name != "bapo" or resumed["clamped"] == expected)
    (again,) = pipeline.train_policy_actors(directory, [*resume, "--bapo.discard_saved"], [SAMPLES])
    if name == "balanced":
        assert abs(again["status"]["bapo/negative_weight"] - metrics["bapo/negative_weight"]) > 0.01
    else:  # m2 has no bounds in the first update
        first = (0.75, 2.1) if name == "bapo" else (0, pytest.approx(math.exp(21)))
        assert again["clamped"][0] == first != resumed["clamped"][0]


def test_a_state_that_cannot_be_used_is_refused_in_one_line(saved, capsys):
    name, resume, _ = saved
    folder = Path(resume[resume.index("--ckpt.path") + 1]) / "_rule"
    (file,) = folder.glob("*/groups.safetensors")
    assert file.parent.name == "global_step1"

    def refused(*changes: str, argv: list[str] = resume) -> str:
        with pytest.raises(SystemExit) as exit_:
            pipeline.parse([*argv, *changes])
        assert exit_.value.code == 2
        *others, line = capsys.readouterr().err.splitlines()
        assert all(other.startswith("openrlhf-bapo: warning: ") for other in others)
        assert "--bapo.discard_saved" in line
        pipeline.parse([*argv, *changes, "--bapo.discard_saved"])
        return line

    pipeline.parse(resume)
    pipeline.parse([*resume, HALF_LIFE[name], "7"])
    for flag, value in OTHERS[name]:
        assert f"{flag} {value!r}" in refused(flag, value)
    loss = "balanced" if name == "m2" else "m2"
    own = {i for i, flag in enumerate(resume) if flag.startswith(f"--{name}.")}
    kept = [flag for i, flag in enumerate(resume) if not {i, i - 1} & own]
    assert f"--policy_loss '{loss}'" in refused("--policy_loss", loss, f"--{loss}.half_life", "2", argv=kept)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{file} is damaged" in refused()
    file.unlink()
    assert str(file) in refused()
    shutil.rmtree(folder)
    assert str(folder) in refused()
    pipeline.parse([*resume, HALF_LIFE[name], "0"])  # which wants no state
