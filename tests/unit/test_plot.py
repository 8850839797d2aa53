"""The curves of runs: the picture and the table show every logged number."""

import csv
from pathlib import Path

import pipeline
import pytest
from matplotlib import pyplot
from torch.utils.tensorboard import SummaryWriter

from openrlhf_bapo.cli import plot

TAGS = [tag for _, panel in plot._PANELS for tag in panel] + ["eval/eval_sums_pass1"]


def log(folder: Path, offset: float = 0.0, num_steps: int = 5) -> dict[str, list[float]]:
    """Log every tag of a run; the logged values by tag."""
    curves = {tag: [offset + place + step / 8 for step in range(num_steps)] for place, tag in enumerate(TAGS)}
    writer = SummaryWriter(folder / "tensorboard")
    for tag, values in curves.items():
        for step, value in enumerate(values):
            writer.add_scalar(tag, value, step)
    writer.close()
    return curves


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that were drawn."""
    found = []
    monkeypatch.setattr(pyplot, "close", found.append)
    return found


def test_the_picture_of_a_run_shows_every_logged_curve_and_the_target(tmp_path, figures):
    curves = log(tmp_path)
    assert plot.read_scalars(tmp_path) == {tag: ([0, 1, 2, 3, 4], values) for tag, values in curves.items()}
    plot.main([str(tmp_path / "tensorboard"), "-o", str(tmp_path / "curves.png"), "--target", "0.45"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    drawn = [line for axis in figures[0].axes for line in axis.lines]
    assert all(any(list(line.get_ydata()) == values for line in drawn) for values in curves.values())
    assert any(list(line.get_ydata()) == [0.45, 0.45] for line in drawn)


@pytest.mark.parametrize(("before", "after"), ["az", "za"])
def test_of_a_step_that_a_resumed_run_repeated_the_last_value_counts(tmp_path, before, after):
    # Whichever run's folder comes first in the alphabet.
    for folder, first, offset, time in ((before, 0, 0.0, 100), (after, 3, 50.0, 200)):
        with SummaryWriter(tmp_path / folder) as writer:
            for step in range(first, first + 5):
                writer.add_scalar("train/rollout/reward_mean", offset + step, step, walltime=time + step)
    assert plot.read_scalars(tmp_path)["train/rollout/reward_mean"] == (list(range(8)), [0, 1, 2, 53, 54, 55, 56, 57])


def test_each_file_belongs_to_the_run_that_it_goes_on_with(tmp_path, capsys):
    # (folder, first step, last step), in the order of time; logs at 0 are an evaluation's.
    files = [
        ("a", 1, 9),  # 0: a run
        ("b", 1, 3),  # 1: another
        ("a", 7, 12),  # the first, resumed; the second had not got there
        ("c", 4, 6),  # the second, resumed
        ("c", 2, 5),  # again, from an earlier checkpoint: the second has not got to step 6 again
        ("d", 20, 21),  # the newest with these steps before it, whose last steps were never written
        ("c", 1, 2),  # 2: a third
    ]
    for time, (folder, first, last) in enumerate(files):
        writer = SummaryWriter(tmp_path / folder, filename_suffix=f".{time}")
        if first == 1:
            writer.add_scalar("eval/eval_sums_pass1", 0.5, 0, walltime=100 * time)
        for step in range(first, last + 1):
            writer.add_scalar("train/rollout/reward_mean", time, step, walltime=100 * time + step)
        if time == 3:
            writer.add_scalar("eval/eval_sums_pass1", 1.0, last, walltime=100 * time + last)
        writer.close()
    runs = plot.read_runs(tmp_path)
    assert [run["eval/eval_sums_pass1"] for _, run in runs] == [([0], [0.5])] * 3  # the one of step 6 does not count
    found = [(folder.name, dict(zip(*run["train/rollout/reward_mean"], strict=True))) for folder, run in runs]
    assert found == [
        ("a", dict.fromkeys(range(1, 7), 0) | dict.fromkeys(range(7, 13), 2)),
        ("b", {1: 1} | dict.fromkeys(range(2, 6), 4) | {20: 5, 21: 5}),
        ("c", {1: 6, 2: 6}),
    ]
    plot.main([str(tmp_path), "-o", str(tmp_path / "curves.png")])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}: has 3 runs; only the newest is drawn, which began in {tmp_path}/c; the others began in" in line


def test_runs_of_one_label_become_a_mean_with_a_band_and_labels_differ_in_more_than_their_hue(
    tmp_path, figures, capsys
):
    for name, offset, num_steps in (("a", 0.0, 5), ("b", 2.0, 4), ("c", 10.0, 5)):
        log(tmp_path / name, offset, num_steps)
    runs = [f"bapo={tmp_path / 'a'}", f"bapo={tmp_path / 'b'}", str(tmp_path / "c")]
    plot.main([*runs, "-o", str(tmp_path / "curves.png")])
    reward = figures[0].axes[0]
    mean, other = reward.lines
    assert (mean.get_label(), other.get_label()) == ("bapo", "c")
    assert list(mean.get_xdata()) == [0, 1, 2, 3]  # the steps that both runs have
    assert capsys.readouterr().err == "openrlhf-bapo: warning: bapo: its 2 runs end at steps 3, 4; the mean ends at 3\n"
    assert list(mean.get_ydata()) == [1 + step / 8 for step in range(4)]
    assert list(other.get_ydata()) == [10 + step / 8 for step in range(5)]
    (band,) = reward.collections
    low, high = band.get_paths()[0].get_extents().get_points()[:, 1]
    assert (low, high) == (0.0, 2 + 3 / 8)
    assert mean.get_marker() != other.get_marker()
    luminance = [
        sum(w * c for w, c in zip((0.3, 0.6, 0.1), line.get_color()[:3], strict=True)) for line in reward.lines
    ]
    assert abs(luminance[0] - luminance[1]) > 0.15
    bounds = next(axis for axis in figures[0].axes if "bounds" in axis.get_title())
    assert [line.get_label() for line in bounds.lines[:4]] == ["bapo, upper", "c, upper", "bapo, lower", "c, lower"]
    assert bounds.lines[0].get_linestyle() != bounds.lines[2].get_linestyle()


def test_a_line_says_of_which_steps_and_curves_a_mean_is_not_of_all_runs(tmp_path, capsys):
    for every in (10, 7):
        with SummaryWriter(tmp_path / f"{every}") as writer:
            for step in range(every, 106, every):
                writer.add_scalar("train/reward", 0.5, step)
                if every == 7:
                    writer.add_scalar("train/entropy", 0.5, step)
    plot.main([*(f"a={tmp_path / run}" for run in ("10", "7")), "-o", str(tmp_path / "x.png")])
    _, lacking, steps = capsys.readouterr().err.splitlines()  # the first: where the mean ends
    assert lacking.endswith("a: not all of its 2 runs have train/entropy_loss; the mean is of those that have it")
    # Up to 100, 10 and 14 steps, of which both have 70.
    left_out = "a: the mean leaves out up to 22 other steps, which not all of its runs have"
    assert steps.endswith(f"{left_out} (of train/rollout/reward_mean)")


def test_metrics_of_trl_and_verl_are_drawn_and_no_metric_is_drawn_twice(tmp_path, figures):
    log(tmp_path / "ours")
    trls = ["train/reward", "train/entropy", "train/grad_norm"]
    verls = ["critic/score/mean", "actor/entropy", "actor/grad_norm"]
    verls += ["actor/bapo/clip_high", "actor/bapo/initial_share"]
    bypassing = ["critic/score/mean", "actor/entropy_loss", "actor/grad_norm"]  # verl's names with bypass_mode
    for run, names in (("ours", ["train/reward"]), ("trl", trls), ("verl", verls), ("bypass", bypassing)):
        writer = SummaryWriter(tmp_path / run)
        for name in names:
            writer.add_scalar(name, 0.25, 1)
        writer.close()
        plot.main([str(tmp_path / run), "-o", str(tmp_path / f"{run}.png")])
    titles = [[axis.get_title() for axis in figure.axes if axis.lines] for figure in figures]
    assert len(titles[0]) == len(plot._PANELS) == len(set(titles[0]))
    assert len(figures[0].axes[0].lines[0].get_ydata()) == 5  # of the rollouts, not OpenRLHF's train/reward
    assert titles[1] == ["reward of the rollouts", "entropy of the policy (nats per token)", "gradient norm"]
    assert titles[2] == [*titles[1], "clip bounds (importance ratio)", "positive share of the objective"]
    assert titles[3] == titles[1]


def test_the_table_has_every_logged_number(tmp_path):
    expected = []
    for run, offset in enumerate((0.0, 2.0)):
        curves = log(tmp_path / str(run), offset)
        expected += [("seeds", run, tag, step, value) for tag, ys in curves.items() for step, value in enumerate(ys)]
    runs = [f"seeds={tmp_path / str(run)}" for run in range(2)]
    plot.main([*runs, "-o", str(tmp_path / "curves.png"), "--csv", str(tmp_path / "curves.csv")])
    header, *rows = csv.reader((tmp_path / "curves.csv").read_text().splitlines())
    assert header == ["label", "run", "tag", "step", "value"]
    found = [(label, int(run), tag, int(step), float(value)) for label, run, tag, step, value in rows]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["empty", "-o", "x.png"], "RUN empty: no TensorBoard scalars under empty; allowed: a folder with"),
        (["a=empty", "-o", "x.png"], "RUN a=empty: no TensorBoard scalars under empty; allowed: a folder with"),
        (["run", "-o", "nowhere/x.png"], "nowhere/x.png: cannot be written (No such file or directory); allowed: "),
        (["run", "-o", "x.png", "--csv", "nowhere/x"], "nowhere/x: cannot be written (No such file or directory); "),
        (["other", "-o", "x.png"], "RUN other: the logs have no metric that is drawn (they have loss, ...); allowed: "),
        (["run"], "the following arguments are required: -o/--output"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    log(Path("run"), num_steps=1)
    with SummaryWriter("other") as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert pipeline.refusal(flags, capsys, plot.main).startswith(said)


def test_a_run_without_a_label_has_its_folders_name_equals_signs_are_allowed_and_any_name_is_a_png(tmp_path, figures):
    for name in ("a", "b", "lr=1e-4"):
        log(tmp_path / name)
    runs = [tmp_path / "a", tmp_path / "b/tensorboard", tmp_path / "lr=1e-4", f"lr=2={tmp_path / 'b'}"]
    plot.main([*map(str, runs), "-o", str(tmp_path / "x.foo")])
    assert (tmp_path / "x.foo").read_bytes().startswith(b"\x89PNG")
    assert [line.get_label() for line in figures[0].axes[0].lines] == ["a", "b", "lr=1e-4", "lr=2"]


def test_runs_without_a_label_are_several_lines_also_if_their_folders_have_one_name(tmp_path, figures, monkeypatch):
    for name in ("ppo/seed1", "bapo/seed1", "bapo/seed2"):
        log(tmp_path / name)
    monkeypatch.chdir(tmp_path / "bapo/seed2")
    runs = [f"{tmp_path}/ppo/seed1", "../seed1", ".", f"two={tmp_path}/ppo/seed1", "two=../seed1"]
    plot.main([*runs, "-o", "x.png"])
    labels = [line.get_label() for line in figures[0].axes[0].lines]
    assert labels == [f"{tmp_path}/ppo/seed1", "../seed1", "seed2", "two"]
