"""The settings of an evaluation, by which a killed one continues."""

import os

import pytest

from openrlhf_bapo.command import evaluation


def model_setting(folder) -> str:
    return evaluation.content_settings(str(folder), [], [])["model"]


@pytest.mark.parametrize("size", [100, 300 << 20], ids=["small", "large"])
def test_a_model_that_is_saved_again_is_the_same_and_one_with_other_weights_is_not(tmp_path, size):
    weights = tmp_path / "model.safetensors"
    weights.touch()
    os.truncate(weights, size)
    before = model_setting(tmp_path)
    os.utime(weights, (1, 1))
    (tmp_path / "a folder").mkdir()
    assert model_setting(tmp_path) == before
    layer = size // 40  # one that is trained, of 40
    with open(weights, "rb+") as file:
        file.seek(17 * layer)
        file.write(b"x" * layer)
    assert model_setting(tmp_path) != before
