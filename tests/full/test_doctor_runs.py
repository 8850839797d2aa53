"""The doctor on real runs with a planted fault, and on one without."""

import json

import pipeline
import pytest

from openrlhf_bapo.cli import doctor

CONSTANT_REWARD = """
import torch


def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.full((len(queries),), 0.5)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""
# In every process of a run; an engine has its weights in fp8 from the first broadcast on.
ENGINE_IN_FP8 = """
import torch, wrapt


def hook(vllm_worker_wrap):
    upstream = vllm_worker_wrap.WorkerWrap.update_weight

    def update_weight(self, *args, **kwargs):
        upstream(self, *args, **kwargs)
        for weight in self.model_runner.model.parameters():
            weight.data = weight.data.to(torch.float8_e4m3fn).to(weight.dtype)

    vllm_worker_wrap.WorkerWrap.update_weight = update_weight


wrapt.register_post_import_hook(hook, "openrlhf.trainer.ray.vllm_worker_wrap")
"""
BAPO = dict(policy_loss="bapo", actor__adam__lr=3e-4)
SMALL_POOL = BAPO | dict(replay__ratio=0.25, replay__max_staleness=1, train__batch_size=16)


@pytest.mark.parametrize(
    ("flags", "files", "is_wrong", "metric", "advice"),
    [
        (BAPO, {}, False, None, ""),
        # After two updates every token is certain. The mean reward may then fall too, and is named first.
        (BAPO | dict(actor__adam__lr=1.0), {}, True, "entropy_loss", "a lower learning rate"),
        (BAPO, {"reward.py": CONSTANT_REWARD}, True, "rollout/reward_std", "read some responses"),
        (SMALL_POOL, {}, False, "replay/groups_expired", "replay.max_staleness"),
        (BAPO, {"sitecustomize.py": ENGINE_IN_FP8}, True, "offpolicy/engine_mismatch", "more than rounding"),
    ],
    ids=["no fault", "too high a learning rate", "a constant reward", "groups that expire unread", "an engine in fp8"],
)
def test_the_doctor_names_the_fault_of_a_run(flags, files, is_wrong, metric, advice, tmp_path, capsys):
    directory = pipeline.make_model(tmp_path)
    for name, text in files.items():
        (directory / name).write_text(text)
    argv = pipeline.flags(directory, data__max_samples=48, train__num_episodes=4, **flags)
    pipeline.train(directory, argv, "run", PYTHONPATH=pipeline.python_path(directory))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        doctor.main([str(directory / "tensorboard"), "--json"])
    (findings,) = json.loads(capsys.readouterr().out).values()
    assert bool(end.value.code) == any(finding["is_wrong"] for finding in findings) == is_wrong
    if metric is not None:
        (named,) = [finding for finding in findings if finding["metric"] == metric]
        assert named["is_wrong"] == is_wrong, findings
        first = findings[0] if is_wrong else named
        assert advice in first["remedy"], findings
