"""The pipeline on a cluster of two nodes with addresses of their own."""

import re
import shutil

import endings
import nodes
import partial
import pipeline
import pytest
import recordings
from test_recipes import run_tiny, tiny  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """The folder of the recordings of what runs on the cluster, whose processes have the nodes' environment."""
    return tmp_path_factory.mktemp("cluster") / "recording"


@pytest.fixture(scope="module")
def cluster(recording):
    """A cluster and its head. Each node has one pretended GPU, so that two ranks are on two nodes."""
    options = dict(python=endings.WARM, dashboard=True)
    with nodes.cluster(recording.parent, options=options, **recordings.environment(recording)) as found:
        yield found


@pytest.fixture(scope="module")
def two_nodes(cluster):
    """The same after a second node has joined."""
    with cluster[0].joined():
        yield cluster


def are_on_two_nodes(actor: str, output: str) -> bool:
    """Return whether actors of a class wrote from two nodes. Ray names the address of each but the command's own."""
    return len(set(re.findall(rf"\({actor} pid=\d+(?:, ip=([\d.]+))?\)", output))) == 2


OTHERS = {
    "another copy": ("__version__ = '9.9'\n", r"node 10\.\S+: has openrlhf-bapo 9\.9 \(\w{8}\), but here it is 0\.\d"),
    "nothing": ("raise ImportError('not here')\n", r"node 10\.\S+: openrlhf-bapo does not start there"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_node_with_another_copy_of_the_package_or_none_is_named_before_anything_trains(cluster, tmp_path, other):
    (cluster, head), (change, message) = cluster, OTHERS[other]
    shutil.copytree(pipeline.REPOSITORY / "openrlhf_bapo", tmp_path / "copy/openrlhf_bapo")
    with open(tmp_path / "copy/openrlhf_bapo/__init__.py", "a") as file:
        file.write(change)
    with cluster.joined(PYTHONPATH=str(tmp_path / "copy")):
        code, output = cluster.run(head, tmp_path, pipeline.flags(pipeline.make_model(tmp_path)), "run")
    assert code == 2 and re.match(f"openrlhf-bapo: {message}.*; install the same", output.splitlines()[-1]), output


def test_a_checkpoint_folder_that_a_node_does_not_share_is_named_before_anything_trains(cluster, tmp_path):
    cluster, head = cluster
    argv = pipeline.flags(pipeline.make_model(tmp_path))
    (tmp_path / "ckpt").mkdir()
    with cluster.joined(hidden=tmp_path / "ckpt"):
        code, output = cluster.run(head, tmp_path, argv, "run")
    said = rf"openrlhf-bapo: --ckpt.path {tmp_path}/ckpt: node 10\.\S+ does not see a file that was written there; "
    assert code == 2 and re.match(said, output.splitlines()[-1]), output


def test_a_policy_on_two_nodes_trains_as_on_two_ranks_of_one_and_either_resumes_the_others_checkpoint(
    two_nodes, tmp_path
):
    cluster, head = two_nodes
    directory = pipeline.make_model(tmp_path, num_prompts=64)
    common = dict(policy_loss="bapo", replay__ratio=1, train__full_determinism_enable=True, data__max_samples=64)
    common |= dict(ckpt__save_steps=1, ckpt__max_num=9, train__colocate_all=True, vllm__num_engines=2)

    def flags(name: str, *more: str, **places) -> list[str]:
        folders = dict(ckpt__path=directory / name, ckpt__output_dir=directory / "out")
        return [*pipeline.flags(directory, **common | places | folders), *more]

    def end_after(step: int, name: str, copy: str) -> None:
        """Copy the checkpoints of a machine that dies after a step."""
        for part in (f"_actor/global_step{step}", f"_replay/global_step{step}"):
            shutil.copytree(directory / name / part, directory / copy / part)
        (directory / copy / "_actor/latest").write_text(f"global_step{step}")

    def on_one(name: str, *more: str) -> list[dict[str, float]]:
        recorder = recordings.environment(directory / f"{name}-recording") | {"TORCHDYNAMO_DISABLE": "1"}
        return recordings.metrics(
            pipeline.train(directory, flags(name, *more, actor__num_gpus_per_node=2), name, **recorder)
        )

    unbroken = on_one("one")
    end_after(1, "one", "two")
    end_after(2, "one", "two")
    (torn,) = (directory / "two/_actor/global_step2").glob("*zero_pp_rank_1_*_optim_states.pt")
    torn.unlink()  # as if its node could not write it
    code, output = cluster.run(head, directory, flags("two", "--ckpt.load_enable", actor__num_nodes=2), "two")
    assert code == 0, output[-5000:]
    assert f"--ckpt.load_enable resumes global_step1, because {torn.parent} lacks " in output
    assert are_on_two_nodes("PolicyModelActor", output) and are_on_two_nodes("RolloutRayActor", output)
    end_after(3, "two", "again")
    runs = {1: recordings.metrics(output), 3: on_one("again", "--ckpt.load_enable")}
    assert len(unbroken) == 4 and unbroken[3]["replay/groups_sampled"] > 0
    for first, resumed in runs.items():
        assert len(resumed) == 4 - first
        for step, expected in zip(resumed, unbroken[first:], strict=True):
            assert step == expected


def test_a_recipe_submitted_from_outside_trains_on_two_nodes_on_responses_of_a_third_once_against_their_own_weights(
    two_nodes,
    recording,
    tiny,  # noqa: F811
    tmp_path,
):
    cluster, _ = two_nodes
    directory = partial.make_model(tmp_path)
    shutil.copytree(tiny / "model", directory / "model", dirs_exist_ok=True)  # which has a chat template
    for file in recording.iterdir():  # of earlier runs
        file.unlink()
    sizes = dict(rollout__vllm_generate_batch_size=16, rollout__temperature=1, train__max_tokens_per_gpu=2048)
    of_recipe = dict(ckpt__path=None, ckpt__output_dir=None, logger__tensorboard_dir=None, reward__remote_url=None)
    flags = partial.flags(
        directory,
        partial__oversample=2,
        actor__num_nodes=2,
        ds__zero_stage=2,  # whose weights are recorded
        ds__param_dtype="fp32",
        **partial.ASYNC | sizes | of_recipe,
    )
    with cluster.joined():
        # The command starts cold where the job runs.
        steps = run_tiny(
            "async_partial",
            directory,
            "submitted",
            *flags,
            tree=pipeline.REPOSITORY,
            SUBMIT=cluster.jobs_url,
            METHOD="bapo",
            REWARD=directory / "reward.py",
        )
    (log,) = (directory / "submitted").glob("train-*.log")
    assert cluster.jobs_url in log.read_text().splitlines()[0]
    assert are_on_two_nodes("PolicyModelActor", log.read_text())
    batch = recordings.trained_on(recording)
    assert len(steps) == 6
    partial.assert_every_prompt_is_trained_on_once(batch)
    for name in ("started", "taken"):
        assert sum(step[f"partial/{name}"] for step in steps) == partial.NUM_PROMPTS
    policies = recordings.Policies(directory / "model", recording)
    partial.assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=True)
    assert max(partial.num_versions(batch)) >= 2
    # As old as --partial.max_staleness allows at hand-over, and the queue after it.
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 2
