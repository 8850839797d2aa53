"""Every file of a checkpoint counts: DeepSpeed's own, on two ranks, cut off or missing."""

import os
import re
import shutil
from argparse import Namespace

import pipeline
import pytest

from openrlhf_bapo.cli.plan import _flatten
from openrlhf_bapo.flags.arguments import parse
from openrlhf_bapo.openrlhf.replay_checkpoint import use_checkpoint
from openrlhf_bapo.run.failures import describe_failure

STATES = {
    "0": dict(ds__zero_stage=0),
    "1 in bf16": dict(ds__zero_stage=1, ds__param_dtype="bf16", ds__grad_accum_dtype="fp32"),
    "2": dict(ds__zero_stage=2),
    "3": dict(ds__zero_stage=3),
}
NUM_FILES = {"0": 1, "1 in bf16": 1 + 2, "2": 1 + 2, "3": 2 + 2}


@pytest.fixture(scope="module", params=STATES)
def saved(request, tmp_path_factory):
    """A run's folder, flags and number of files per checkpoint; DeepSpeed wrote them, after steps 2 and 4."""
    directory = pipeline.make_model(tmp_path_factory.mktemp("saved"))
    settings = dict(policy_loss="bapo", actor__num_gpus_per_node=2, bapo__smoothing=3, ckpt__save_steps=2)
    argv = pipeline.flags(directory, **settings | STATES[request.param])
    samples = [pipeline.make_experience([3, 5, 2, 7] * 4, seed=rank) for rank in range(2)]
    precision = STATES[request.param].get("ds__param_dtype", "fp32")
    pipeline.train_policy_actors(directory, argv, samples, num_steps=2, save_after=2, precision=precision)
    for group in ("_actor", "_rule"):
        shutil.copytree(directory / f"ckpt/{group}/global_step2", directory / f"ckpt/{group}/global_step4")
    (directory / "ckpt/_actor/latest").write_text("global_step4")
    return directory, [*argv, "--ckpt.load_enable"], NUM_FILES[request.param]


@pytest.fixture
def restored(saved):
    """The same; the checkpoints are as before after the test."""
    directory = saved[0]
    shutil.copytree(directory / "ckpt", directory / "kept")
    yield saved
    shutil.rmtree(directory / "ckpt")
    (directory / "kept").rename(directory / "ckpt")


FAULTS = {
    "missing": lambda file: file.unlink(),
    "without its last byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),  # a file system after a power failure
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_file_that_deepspeed_wrote_must_be_there_and_whole_or_the_older_checkpoint_is_resumed(
    saved, capsys, fault
):
    directory, argv, num_files = saved
    assert parse(argv).ckpt.resume_from == "global_step4" and capsys.readouterr().err == ""
    files = sorted((directory / "ckpt/_actor/global_step4").glob("*.pt"))
    assert len(files) == num_files
    for file in files:
        content = file.read_bytes()
        FAULTS[fault](file)
        assert parse(argv).ckpt.resume_from == "global_step2"
        (line,) = capsys.readouterr().err.splitlines()
        name = re.escape(file.name.removeprefix("bf16_"))
        assert re.search(rf"--ckpt.load_enable resumes global_step2, because .*{name}", line), line
        file.write_bytes(content)


def test_a_checkpoint_of_another_zero_stage_or_number_of_ranks_is_refused_where_deepspeed_would(saved, capsys):
    directory, argv, _ = saved
    before = parse(argv).ds.zero_stage
    other, same = ("2", []) if before == 3 else ("3", ["1", "2"] if before else ["0"])
    for stage in same:
        assert parse([*argv, "--ds.zero_stage", stage]).ckpt.resume_from == "global_step4"
    refused = {f"has --ds.zero_stage {before}, and this run has {other}": ["--ds.zero_stage", other]}
    one_rank = ["--actor.num_gpus_per_node", "1"]
    if before:
        refused |= {"is of 2 ranks (--actor.num_nodes x --actor.num_gpus_per_node), and this run has 1": one_rank}
    else:
        assert parse([*argv, *one_rank]).ckpt.resume_from == "global_step4"
    for reason, given in refused.items():
        with pytest.raises(SystemExit):
            parse([*argv, *given])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"can be resumed, because {directory}/ckpt/_actor/global_step4 {reason}" in line
        parse([*argv, *given, "--ds.use_universal_ckpt"])


@pytest.mark.parametrize("latest", [None, "", "global_st", "global_step9"])
def test_a_name_of_the_latest_checkpoint_that_is_missing_or_cut_off_costs_no_checkpoint(restored, capsys, latest):
    directory, argv, _ = restored
    name, folder = directory / "ckpt/_actor/latest", directory / "ckpt/_actor"
    name.unlink() if latest is None else name.write_text(latest)
    args = parse(argv)
    assert args.ckpt.resume_from == "global_step4"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"openrlhf-bapo: warning: --ckpt.load_enable resumes global_step4, because {name} ")
    use_checkpoint(Namespace(**{"ckpt.resume_from": args.ckpt.resume_from, "ckpt.path": directory / "ckpt"}))
    assert name.read_text() == "global_step4"
    assert {tag.name for tag in folder.glob("global_step*")} == {"global_step2", "global_step4"}


def test_the_last_line_of_a_run_promises_what_the_same_command_does(restored, capsys):
    directory, argv, _ = restored
    path = directory / "ckpt"

    ended = dict(_flatten(parse(argv)))

    def said(**changes) -> str:
        return describe_failure(OSError(), ended | changes, [])[1]

    assert said(**{"ckpt.resume_from": "global_step2"}) == (
        f"saved is {path} (global_step4); the same command with --ckpt.load_enable continues from there; a recipe "
        "other than the quickstart continues when it is run again"
    )
    # The run that resumed it ended before its next checkpoint: the resume may be what failed.
    again = "from which this run started; the same command starts from there again"
    assert said() == f"saved is {path} (global_step4), {again}"
    file = next((path / "_actor/global_step4").glob("*.pt"))
    os.truncate(file, 10)
    line = said()
    assert line.startswith(f"saved is {path} (global_step2, because {file} is cut off); the same command with ")
    shutil.rmtree(path / "_rule/global_step2")
    line = said()
    assert line.startswith(f"saved is no checkpoint in {path} that can be resumed, because {file} is cut off; ")
    with pytest.raises(SystemExit):
        parse(argv)
    assert f"no checkpoint of --ckpt.path {path} can be resumed, because {file}" in capsys.readouterr().err


ADAPTER = ["--ds.lora.rank", "4", "--ds.lora.alpha", "32", "--ds.lora.target_modules", "v_proj", "q_proj"]
OTHERS = {
    "another rank": ("adapter", [*ADAPTER, "--ds.lora.rank", "8"], "rank 4, and this run has 8"),
    "another alpha": ("adapter", [*ADAPTER, "--ds.lora.alpha", "16"], "alpha 32, and this run has 16"),
    "other modules": (
        "adapter",
        [*ADAPTER, "--ds.lora.target_modules", "all-linear"],
        "target_modules q_proj v_proj, and this run has all-linear",
    ),
    "no adapter": ("adapter", [], "rank 4, and this run has 0"),
    "an adapter on a whole model": ("whole", ADAPTER, "rank 0, and this run has 4"),
}


@pytest.fixture(scope="module")
def with_and_without_adapter(tmp_path_factory):
    directory = pipeline.make_model(tmp_path_factory.mktemp("adapter"))
    commands = {folder: pipeline.flags(directory, ckpt__path=directory / folder) for folder in ("adapter", "whole")}
    samples = [pipeline.make_experience([3, 5, 2, 7] * 8)]
    pipeline.train_policy_actors(directory, commands["adapter"] + ADAPTER, samples, save_after=1)
    pipeline.train_policy_actors(directory, commands["whole"], samples, save_after=1)
    return {folder: [*command, "--ckpt.load_enable"] for folder, command in commands.items()}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_adapter_is_refused(with_and_without_adapter, capsys, other):
    folder, given, reason = OTHERS[other]
    with pytest.raises(SystemExit):
        parse(with_and_without_adapter[folder] + given)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder}/_actor/global_step1 was trained with --ds.lora.{reason}; without the flag the run starts" in line


@pytest.mark.parametrize(
    ("folder", "given"), [("adapter", [*ADAPTER, "--ds.lora.target_modules", "q_proj", "v_proj"]), ("whole", [])]
)
def test_a_checkpoint_of_the_same_adapter_is_resumed(with_and_without_adapter, folder, given):
    assert parse(with_and_without_adapter[folder] + given).ckpt.resume_from == "global_step1"
