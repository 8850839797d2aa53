"""Sends a policy with a LoRA adapter to the engines as a plain model, with the adapter merged into its weights.

OpenRLHF 0.11.2 sends PEFT's parameters, whose names vLLM does not know.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from peft.tuners.lora import LoraLayer


@contextlib.contextmanager
def merged_for_engines(trainer: Any) -> Iterator[None]:
    """Let OpenRLHF's `broadcast_to_vllm` find a plain model: its names, and its weights with the adapter merged.

    OpenRLHF gathers the weights one by one. A gathered weight is exchanged for its merged copy, and put back after it
    was sent. So the trained weights do not change, and one copy is in memory at a time.
    """
    actor, gathered_parameters = trainer.actor, deepspeed.zero.GatheredParameters
    model = actor.model.module
    layers: dict[Any, Any] = {
        layer.get_base_layer().weight: layer for layer in model.modules() if isinstance(layer, LoraLayer)
    }
    # The adapter is all that is trained. A vision encoder has adapters too, so its weights are sent as well.
    weights = [
        (name.replace(".base_layer.", "."), weight)
        for name, weight in model.get_base_model().named_parameters()
        if not weight.requires_grad
    ]

    @contextlib.contextmanager
    def gathered(parameters: list[torch.nn.Parameter], enabled: bool) -> Iterator[None]:
        (weight,) = parameters
        layer = layers.get(weight)
        adapter = [] if layer is None else [each for each in layer.parameters() if each.requires_grad]
        with gathered_parameters([weight, *adapter], enabled=enabled):
            trained = weight.data
            if layer is not None:
                weight.data = merged(layer)
            try:
                yield
            finally:
                weight.data = trained

    trainer.actor = SimpleNamespace(model=SimpleNamespace(module=SimpleNamespace(named_parameters=lambda: weights)))
    deepspeed.zero.GatheredParameters = gathered
    try:
        yield
    finally:
        trainer.actor, deepspeed.zero.GatheredParameters = actor, gathered_parameters


@torch.no_grad()
def merged(layer: Any) -> torch.Tensor:
    """Return W + scale B A, a copy: added in float32 and rounded once to the type of W, which is the engine's."""
    weight = layer.get_base_layer().weight.data
    return layer.get_delta_weight(*layer.active_adapters).float().add_(weight).to(weight.dtype)
