"""`openrlhf-bapo doctor`: each check finds what is beyond its limit, since when, and nothing else."""

import json
import math
import re
import sys

import pipeline
import pytest
import study
from study_doctor import has_fallen_apart, wrong
from torch.utils.tensorboard import SummaryWriter

from openrlhf_bapo.cli import doctor as command
from openrlhf_bapo.cli import main
from openrlhf_bapo.health import doctor
from openrlhf_bapo.health.doctor import CHECKS, Finding, diagnose

CASES = {
    # metric: (healthy value, values at the end, is it wrong, since which step of 40)
    "offpolicy/updates_skipped": (0.0, [1.0, 0.0, 0.0], True, 38),
    "offpolicy/nonfinite_tokens": (0.0, [0.0, 3.0], False, 40),
    "rollout/reward_mean": (0.5, [0.1] * 4, True, 39),  # means over ten: 0.46, 0.42, 0.38, 0.34; the best is 0.5
    "rollout/reward_std": (0.4, [0.0] * 7, True, 38),
    "entropy_loss": (0.8, [0.1] * 6, True, 39),  # means over five: 0.66, 0.52, 0.38, 0.24, 0.1, 0.1
    "offpolicy/ess": (0.95, [0.3] * 5, True, 38),  # 0.82, 0.69, 0.56, 0.43, 0.3
    "offpolicy/weight_negative": (0.8, [0.0] * 6, False, 39),  # means over five: 0.64, 0.48, 0.32, 0.16, 0, 0
    "bapo/clip_frac_negative": (0.1, [0.5] * 5, True, 38),
    "bapo/clip_frac_positive": (0.02, [0.3] * 5, True, 38),
    "offpolicy/ratio_max": (4.0, [50.0] * 5, False, 37),
    "offpolicy/engine_mismatch": (0.005, [0.1] * 5, True, 38),
    "bapo/target_reached": (0.5, [0.0] * 12, False, 38),
    "reward_fault/dropped": (0.0, [2.0], False, 40),
    "replay/samples_dropped": (0.0, [2.0], False, 40),
    "partial/waiting": (4.0, [40.0] * 3, False, 39),
    "partial/in_flight": (9.0, [90.0] * 3, False, 39),
}
HEALTHY = {metric: healthy for metric, (healthy, *_) in CASES.items()}
HEALTHY |= {"replay/groups_expired": 1.0, "replay/groups_sampled": 8.0}
HEALTHY |= {"timing/bapo_search": 0.01, "timing/ppo_train": 1.0}


def run_of(num_steps: int = 40, **changes: list[float]) -> dict[str, tuple[list[int], list[float]]]:
    """A healthy run's metrics; changes, with "__" for "/", replace the last values."""
    values = {name: [value] * num_steps for name, value in HEALTHY.items()}
    for name, last in changes.items():
        column = values[name.replace("__", "/")]
        column[len(column) - len(last) :] = last
    return {name: (list(range(1, num_steps + 1)), column) for name, column in values.items()}


def test_a_healthy_run_has_no_findings_nor_has_one_that_has_just_begun_or_logs_nothing_of_ours():
    assert diagnose(run_of()) == diagnose(run_of(1)) == diagnose({}) == diagnose({"loss": ([1], [2.0])}) == []
    assert {check.metric for check in CHECKS} == CASES.keys()


@pytest.mark.parametrize("metric", CASES)
def test_a_check_finds_a_figure_beyond_its_limit_and_the_step_since_when(metric):
    _, last, is_wrong, since = CASES[metric]
    found = diagnose(run_of(**{metric.replace("/", "__"): last}))
    assert found[0].metric == metric and (found[0].is_wrong, found[0].since) == (is_wrong, since)
    assert {finding.metric for finding in found} == {metric} and found[0].remedy


def test_entropy_that_grows_and_a_mismatch_that_grows_are_found_too():
    (grown,) = diagnose(run_of(entropy_loss=[1.2] * 6))
    assert grown.is_wrong and "grown to 150%" in grown.text
    (mismatch,) = diagnose(run_of(offpolicy__engine_mismatch=[0.018] * 6))
    assert not mismatch.is_wrong and "3.6 times" in mismatch.text


def test_a_figure_beyond_its_limit_from_the_first_step_on_is_found_since_step_1():
    (found,) = diagnose(run_of(offpolicy__updates_skipped=[1.0] * 40))
    assert (found.is_wrong, found.since) == (True, 1) and found.text.startswith("40 optimizer steps were skipped")


def test_rewards_of_both_signs_have_no_fraction_of_their_best_which_is_said():
    rewards = [0.05] * 30 + [-0.02] * 10
    (unchecked,) = diagnose(run_of(rollout__reward_mean=rewards))
    assert (unchecked.is_wrong, unchecked.since) == (False, 31) and "a fall of it is not checked" in unchecked.text
    (fallen,) = diagnose(run_of(rollout__reward_mean=[reward + 0.02 for reward in rewards]))
    assert fallen.metric == "rollout/reward_mean" and fallen.is_wrong


def test_what_was_wrong_and_is_no_longer_is_not_found_and_non_finite_values_do_not_count():
    assert diagnose(run_of(offpolicy__ess=[0.3] * 20 + [0.95] * 10)) == []
    values = [math.nan, 0.3, math.nan, 0.3, 0.3, math.inf, 0.3, 0.3, math.nan]
    (found,) = diagnose(run_of(offpolicy__ess=values))
    assert (found.is_wrong, found.since) == (True, 36)  # of the finite values the third, a mean of 0.56


@pytest.mark.parametrize("metric", CASES)
def test_a_metric_without_a_finite_value_any_more_is_wrong_since_the_first_of_them(metric):
    name = metric.replace("/", "__")
    (found,) = diagnose(run_of(**{name: [math.nan] * 18 + [math.inf, math.nan]}))
    assert (found.metric, found.is_wrong, found.since) == (metric, True, 21) and found.remedy
    assert found.text == "the last 20 values are not finite (nan)"
    (found,) = diagnose(run_of(3, **{name: [math.nan] * 3}))
    assert (found.metric, found.since) == (metric, 1)
    assert diagnose(run_of(**{name: [math.nan] * 4})) == []  # a level is of five


def test_wrong_findings_come_before_unusual_ones():
    found = diagnose(run_of(offpolicy__nonfinite_tokens=[3.0], bapo__clip_frac_positive=[0.3] * 6))
    assert [finding.is_wrong for finding in found] == [True, False]  # the other way round in CHECKS


def test_replayed_groups_that_expire_unread_and_a_search_that_waits_are_found():
    (found,) = diagnose(run_of(replay__groups_expired=[20.0] * 40))
    assert found.text == "800 groups expired in the pool, and 320 were replayed" and not found.is_wrong
    few = dict(replay__groups_expired=[2.0] * 5, replay__groups_sampled=[0.0] * 5)
    assert diagnose(run_of(5, **few)) == []  # ten groups say little
    (found,) = diagnose(run_of(timing__bapo_search=[0.2] * 40))
    assert found.text == "the search takes 20% of the training phase"
    run = run_of(timing__bapo_search=[0.2] * 40)
    run["timing/policy_train"] = run.pop("timing/ppo_train")  # as Molt names it
    assert diagnose(run) == [found]
    assert diagnose({name: run[name] for name in run if name != "timing/policy_train"}) == []


def write(folder, scalars) -> None:
    writer = SummaryWriter(folder)
    for name, (steps, values) in scalars.items():
        for step, value in zip(steps, values, strict=True):
            writer.add_scalar(f"train/{name}", value, step)
    writer.close()


def call(*arguments: object) -> int:
    """Return the command's exit code."""
    with pytest.raises(SystemExit) as end:
        command.main([str(argument) for argument in arguments])
    return end.value.code or 0


def test_the_command_prints_findings_with_remedies_as_text_or_json_and_exits_with_1_if_something_is_wrong(
    tmp_path, capsys
):
    write(tmp_path / "good/tensorboard", run_of())
    write(tmp_path / "bad/tensorboard", run_of(offpolicy__ess=[0.3] * 5))
    assert call(tmp_path / "good") == 0 and capsys.readouterr().out == f"{tmp_path / 'good'}: nothing found\n"
    assert call(tmp_path / "good", tmp_path / "bad") == 1
    said = capsys.readouterr().out
    assert "wrong: the effective sample size is 0.30 of the tokens (`offpolicy/ess`, since step 38)" in said
    assert doctor.REMEDIES["offpolicy/ess"] in said
    assert call(tmp_path / "bad", "--json") == 1
    ((finding,),) = json.loads(capsys.readouterr().out).values()
    assert finding["metric"] == "offpolicy/ess" and finding["since"] == 38 and finding["is_wrong"] is True


def test_nothing_found_in_few_logged_steps_says_how_few(tmp_path, capsys):
    write(tmp_path, {"reward": ([100, 200, 300], [0.5, 0.4, 0.0])})
    assert call(tmp_path) == 0
    said = f"{tmp_path}: nothing found in 3 logged steps, of which some checks need 10\n"
    assert capsys.readouterr().out == said


def test_equal_rewards_are_found_in_trls_logs_too(tmp_path, capsys):
    write(tmp_path, {"reward": ([*range(6)], [1.0] * 6), "reward_std": ([*range(6)], [0.0] * 6)})
    assert call(tmp_path) == 1 and "all rewards are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["."], "no TensorBoard scalars under"),
        ([".", "--watch", "0"], "--watch 0: allowed: above 0"),
        ([".", "--watch", "1", "--json"], "--watch and --json"),
        (["other"], "other: its logs have no metric that is checked (they have loss, ...); allowed: a folder with a"),
    ],
)
def test_a_mistake_is_one_line(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "other" in flags:
        write(tmp_path / "other", {"loss": ([1], [2.0])})
    assert said in pipeline.refusal(flags, capsys, command.main)


def test_of_two_runs_in_one_folder_the_newest_is_diagnosed_and_a_line_says_so(tmp_path, capsys):
    bad, good = run_of(offpolicy__ess=[0.3] * 5), run_of(30)
    for name, run in (("ppo_1", bad), ("ppo_2", good)):
        write(tmp_path / name, run)
    assert call(tmp_path) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}: nothing found\n"
    assert said.err == (
        f"openrlhf-bapo: warning: {tmp_path}: has 2 runs; only the newest is diagnosed, which began in "
        f"{tmp_path}/ppo_2; the others began in {tmp_path}/ppo_1\n"
    )
    assert call(tmp_path / "ppo_1") == 1 and capsys.readouterr().err == ""


def test_watch_prints_what_comes_and_what_goes_while_a_run_goes_on(tmp_path):
    watch = [sys.executable, "-m", "openrlhf_bapo.cli.main", "doctor", str(tmp_path / "run"), "--watch", "0.2"]
    log = tmp_path / "log"
    (tmp_path / "run").mkdir()
    with pipeline.running(watch, log) as process:
        write(tmp_path / "run", run_of(offpolicy__ess=[0.3] * 5))
        pipeline.wait_until(lambda: "wrong: the effective sample size" in log.read_text(), process, log)
        writer = SummaryWriter(tmp_path / "run", filename_suffix=".more")
        for step in range(41, 50):
            writer.add_scalar("train/offpolicy/ess", 0.95, step)
        writer.close()
        pipeline.wait_until(lambda: "gone: `offpolicy/ess`" in log.read_text(), process, log)


def test_ctrl_c_ends_a_watch_without_a_traceback(tmp_path, monkeypatch, capsys):
    def interrupt(_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupt)
    monkeypatch.setattr(sys, "argv", ["openrlhf-bapo", "doctor", str(tmp_path), "--watch", "1"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 130 and capsys.readouterr().err == ""


def test_a_finding_that_only_changes_its_figure_is_not_said_again():
    before = [Finding(True, 3, "offpolicy/ess", "0.5", "")]
    assert command._changes(before, [Finding(True, 3, "offpolicy/ess", "0.4", "")]) == []


def test_of_the_studys_runs_those_that_fell_apart_are_named_and_few_others_are():
    cells = study.read_parquet(study.HERE / "results.parquet")
    odd = {name: columns for name, columns in cells.items() if int(name.rpartition("seed")[2]) % 2}
    fell = {name for name, columns in odd.items() if has_fallen_apart(columns)}
    named = {name for name, columns in odd.items() if wrong(columns)}
    page = (pipeline.REPOSITORY / "docs/metrics.md").read_text()
    assert f"| {len(named & fell)} of {len(fell)} | {len(named - fell)} of {len(odd) - len(fell)} |" in page
    others = [name for name in fell if wrong(odd[name], without="rollout/reward_mean")]
    assert f"{len(others)} of the {len(fell)} are named" in page.replace("\n", " ")


def test_the_remedies_are_those_of_the_metrics_page():
    page = (pipeline.REPOSITORY / "docs/metrics.md").read_text()
    rows = [line.removesuffix(" |").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {name: row[3] for row in rows for name in re.findall("`([^`]+)`", row[0]) if name in doctor.REMEDIES}
    assert found == doctor.REMEDIES
