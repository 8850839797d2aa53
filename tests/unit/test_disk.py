"""Disk space that a run needs, on paper, against the free space."""

import math
import os
import re
import shutil
from types import SimpleNamespace

import pipeline
import pytest

from openrlhf_bapo.cli import plan
from openrlhf_bapo.planning.checkpoints import replay_term
from openrlhf_bapo.planning.model_shape import ModelShape
from openrlhf_bapo.run import failures
from openrlhf_bapo.run.plan import disk_terms, disk_warnings, read_shape


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("disk"))


def parse(directory, **flags):
    return pipeline.parse(pipeline.flags(directory, **{"ckpt__save_steps": 5, "policy_loss": "bapo"} | flags))


def test_each_checkpoint_takes_14_bytes_per_parameter_and_a_pool_and_one_more_pool_is_written(directory):
    shape = read_shape(str(directory / "model"))
    n = shape.num_parameters

    def sizes(**flags) -> dict[str, dict[str, int]]:
        terms = disk_terms(parse(directory, **flags), shape)
        return {flag: {term.name: term.bytes for term in of_flag} for flag, of_flag in terms.items()}

    model = {"--ckpt.output_dir": {"the model": 2 * n}}
    assert sizes() == model | {"--ckpt.path": {"actor": 3 * 14 * n}}
    assert sizes(ds__param_dtype="fp32") == {
        "--ckpt.output_dir": {"the model": 4 * n},
        "--ckpt.path": {"actor": 3 * 16 * n},
    }
    assert sizes(ckpt__max_num=5) == model | {"--ckpt.path": {"actor": 5 * 14 * n}}
    averaged = {"--ckpt.path": {"actor": 3 * 14 * n, "averaged weights": 3 * 4 * n}}
    assert sizes(train__enable_ema=True) == model | averaged
    for without in (dict(ckpt__save_steps=None), dict(ckpt__disable_ds=True)):
        assert sizes(**without) == model
    with_gae = sizes(algo__advantage__estimator="gae", replay__ratio=1, replay__capacity=100)["--ckpt.path"]
    pool = replay_term(capacity=100, samples_per_group=4, tokens_per_sample=24, num_extra_columns=3).bytes
    assert with_gae == {"actor": 3 * 14 * n, "critic": 3 * 14 * n, "replay pool": 4 * pool}


def test_the_checkpoint_of_the_best_evaluation_is_one_more(directory):
    shape = read_shape(str(directory / "model"))
    n, dataset = shape.num_parameters, str(directory / "train.jsonl")

    def size(**flags) -> int:
        args = parse(directory, eval__dataset=dataset, **flags)
        return sum(term.bytes for term in disk_terms(args, shape).get("--ckpt.path", []))

    assert size(eval__steps=5) == 4 * 14 * n
    assert size(eval__steps=5, train__enable_ema=True) == 4 * 18 * n
    assert size(eval__steps=5, ckpt__save_steps=None) == 14 * n
    assert size(eval__steps=5, ckpt__best_metric_key="none") == size(eval__steps=-1) == 3 * 14 * n


def test_with_lora_the_saved_model_is_the_adapter_also_before_openrlhf_has_filled_in_its_flags(directory):
    shape, adapter = read_shape(str(directory / "model")), 8 * (2 * (4 * 128 + 3 * 160))
    args = parse(directory, ds__lora__rank=8, ckpt__max_num=1, train__dynamic_batch_enable=True)
    args.rollout.max_tokens_per_gpu = None  # the command asks before OpenRLHF does
    found = {flag: {term.name: term.bytes for term in terms} for flag, terms in disk_terms(args, shape).items()}
    expected = {"actor": 2 * shape.num_parameters + 14 * adapter}
    assert found == {"--ckpt.output_dir": {"the adapter": 2 * adapter}, "--ckpt.path": expected}


def test_a_disk_that_is_too_small_is_one_line_with_the_flag_and_the_bytes(directory, tmp_path):
    args = parse(directory, ckpt__path=tmp_path / "new/ckpt", ckpt__output_dir=tmp_path / "out")
    shape = read_shape(str(directory / "model"))
    assert disk_warnings(args, shape) == []
    free = shutil.disk_usage(tmp_path).free
    layers = math.ceil(free / 14 / 3 / (shape.num_parameters / shape.num_layers)) * 2  # too many for the checkpoints
    large = ModelShape(**vars(shape) | {"num_layers": layers})
    assert free < 3 * 14 * large.num_parameters and 2 * large.num_parameters < free / 2
    (line,) = disk_warnings(args, large)
    needed = f"{3 * 14 * large.num_parameters:,}"
    assert f"--ckpt.path {tmp_path}/new/ckpt: a run writes {needed} bytes, with --ckpt.max_num 3" in line
    # Files that a run replaces count as free.
    old = tmp_path / "new/ckpt/_actor/global_step5/old.pt"
    old.parent.mkdir(parents=True)
    old.touch()
    os.truncate(old, 3 * 14 * large.num_parameters)  # takes no blocks
    assert disk_warnings(args, large) == []


def test_a_disk_with_room_for_the_checkpoints_or_the_model_but_not_for_both_is_one_line(
    directory, tmp_path, monkeypatch
):
    args = parse(directory, ckpt__path=tmp_path / "ckpt", ckpt__output_dir=tmp_path / "out", ckpt__max_num=2)
    shape = read_shape(str(directory / "model"))
    n = shape.num_parameters
    for free, found in ((29 * n, 1), (30 * n, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        lines = disk_warnings(args, shape)
        assert len(lines) == found
        for line in lines:
            both = f"--ckpt.output_dir {tmp_path}/out and --ckpt.path {tmp_path}/ckpt, on one disk"
            assert line == f"{both}: a run writes {30 * n:,} bytes, and {free:,} are free"


def test_a_plan_gives_the_size_of_checkpoints_and_warns_if_it_exceeds_the_free_space(directory, capsys):
    plan.main(pipeline.flags(directory, ckpt__save_steps=5, ckpt__max_num=10**9))
    said = capsys.readouterr()
    assert re.search(r"disk, --ckpt.path +[\d,.]+ GiB \(actor .* parameters x 14 .*; free here: [\d,.]+ GiB", said.out)
    (warning,) = (line for line in said.err.splitlines() if "--ckpt.path" in line)
    assert warning.startswith(f"openrlhf-bapo: warning: --ckpt.path {directory}/ckpt: a run writes 1")


def test_a_full_disk_is_named_with_the_size_of_a_checkpoint(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    args = {"ckpt.path": str(tmp_path), "ckpt.output_dir": str(model), "logger.tensorboard_dir": None}
    args |= {"ckpt.save_steps": 1, "algo.advantage.estimator": "group_norm"}
    for kind, size in (("_actor", 700), ("_replay", 50), ("_critic", 7)):
        for step in (1, 2):
            (tmp_path / kind / f"global_step{step}").mkdir(parents=True)
            (tmp_path / kind / f"global_step{step}/file").write_bytes(bytes(step * size))
    (tmp_path / "_actor/latest").write_text("global_step2")
    monkeypatch.setattr(failures, "_LITTLE_SPACE", math.inf)  # any disk counts as full
    ended, _ = failures.describe_failure(RuntimeError("iostream error"), args, [])
    free = r"is full \([\d,]+ bytes free"
    assert re.search(
        rf"; the disk of {tmp_path} {free}; a checkpoint takes 1,514\); the disk of {model} {free}\)$", ended
    )
