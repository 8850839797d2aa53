"""Samples that a rollout of async training made for later training steps.

With `--rollout.vllm_generate_batch_size` above `--rollout.batch_size`, a rollout has samples for more than one training
step. OpenRLHF keeps the rest in memory only, and its checkpoint counts their prompts as used. Here the rest is part of
the checkpoint, in the format of offpolicy/saved_pool.py, so that a resumed run trains on it.
"""

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from openrlhf_bapo.offpolicy.partial_rollouts import DISCARD_FLAG
from openrlhf_bapo.offpolicy.saved_pool import from_columns, read_directory, to_columns, write_directory

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.experience import Experience

FORMAT_VERSION = 1


@dataclass
class SampleBuffer:
    """The samples that wait after a rollout, one response each, in the order in which they will be trained on."""

    tensors: list[dict[str, torch.Tensor]]
    """The tensors of each sample's Experience without their batch dimension; those of `info` are named info.NAME."""

    texts: list[dict[str, list]]
    """The prompt and the label of each sample."""

    exhausted: bool
    """Whether all prompts of the current episode have been drawn."""

    @classmethod
    def of(cls, samples: "list[Experience]", exhausted: bool) -> "SampleBuffer":
        """Make a buffer of experiences of one sample each, without images."""
        texts = [{"prompts": sample.prompts, "labels": sample.labels} for sample in samples]
        tensors = [{name: value.squeeze(0) for name, value in to_tensors(sample).items()} for sample in samples]
        return cls(tensors, texts, exhausted)

    def experiences(self) -> "list[Experience]":
        """Return the samples as `of` received them."""
        from openrlhf.trainer.ppo_utils.experience import Experience  # a slow import, which must follow flag checks

        found = []
        for tensors, texts in zip(self.tensors, self.texts, strict=True):
            values = to_fields({name: tensor.unsqueeze(0) for name, tensor in tensors.items()})
            found.append(Experience(**values | texts))
        return found

    def save(self, path: str | os.PathLike, state: object, fingerprint: dict[str, str]) -> None:
        """Write the buffer as `ReplayPool.save` writes a pool."""
        record = {
            "format_version": FORMAT_VERSION,
            "state": state,
            "fingerprint": fingerprint,
            "exhausted": self.exhausted,
            "texts": self.texts,
        }
        write_directory(path, to_columns(self.tensors), record)

    @classmethod
    def load(cls, path: str | os.PathLike, fingerprint: dict[str, str]) -> tuple["SampleBuffer", Any]:
        """Load the buffer as `ReplayPool.load` loads a pool, and raise what it raises."""
        columns, record = read_directory(path, FORMAT_VERSION, fingerprint, f"pass {DISCARD_FLAG}")
        texts = record["texts"]
        return cls(from_columns(columns, len(texts)), texts, record["exhausted"]), record["state"]

    def shift_versions(self, difference: int) -> None:
        """Add `difference` to the version of every token, because the engines' count has started again."""
        for tensors in self.tensors:
            if "versions" in tensors:
                tensors["versions"] = tensors["versions"] + difference


def to_tensors(sample: "Experience") -> dict[str, torch.Tensor]:
    """Return the tensors of an experience by field; those of `info` as info.NAME."""
    tensors = {field.name: getattr(sample, field.name) for field in fields(sample)}
    tensors |= {f"info.{name}": torch.as_tensor(value) for name, value in sample.info.items()}
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def to_fields(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of an experience of one sample whose `to_tensors` are `tensors`, with empty texts."""
    info = {name.removeprefix("info."): value for name, value in tensors.items() if name.startswith("info.")}
    others = {name: value for name, value in tensors.items() if not name.startswith("info.")}
    return {"prompts": [""], "labels": [""], "images": [None], "mm_train_inputs": [None], "info": info, **others}
