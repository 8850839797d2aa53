"""--ds.param_dtype: policy, engine, checkpoint and saved model have one type: on a CPU fp32, or bf16 if asked for."""

import pipeline
import pytest
from safetensors import safe_open


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = pipeline.make_model(tmp_path_factory.mktemp("precision"))
    with open(directory / "reward.py", "a") as reward:  # it runs in the engine's Ray worker
        reward.write("\n\nimport os\n\nprint(f'niceness {os.nice(0)}')\n")
    return directory


@pytest.mark.parametrize("given, used", [(None, "fp32"), ("bf16", "bf16")])
def test_the_cpus_default_is_fp32_and_bf16_is_used_if_it_is_asked_for(directory, given, used):
    # The engine ends a run whose weights have another type than its own.
    changes = dict(ds__param_dtype=given, ckpt__save_steps=1, ckpt__path=directory / used, data__max_samples=16)
    output = pipeline.train(directory, pipeline.flags(directory, policy_loss="bapo", **changes), used)
    assert f"all models compute in {used}" in output
    with safe_open(directory / "out/model.safetensors", "pt") as saved:
        types = {saved.get_slice(key).get_dtype() for key in saved.keys()}  # noqa: SIM118  (it is no dict)
    assert types == {used.upper().replace("FP", "F")}
    (states,) = directory.glob(f"{used}/_actor/global_step1/*zero_pp_rank_0_*_optim_states.pt")
    assert states.name.startswith("bf16") == (used == "bf16")
    assert "niceness 0" in output and "niceness 15" not in output  # of the command, and not Ray's own
