"""Packed samples do not see each other: models in which they would are refused."""

from types import SimpleNamespace

import pipeline  # noqa: F401  # with OpenRLHF on a CPU
import pytest
import torch
from openrlhf.models import Actor
from openrlhf.trainer.ray import ppo_actor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from openrlhf_bapo.openrlhf.settings import packing_problem

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16, mamba_n_groups=1)
MODELS = {
    **{kind: {} for kind in ("qwen2", "qwen3", "gemma2")},
    "qwen3_5_text": LINEAR | dict(layer_types=["linear_attention", "full_attention"]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "falcon_h1": MAMBA,
    "qwen2_5_vl": dict(
        text_config=SIZES | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])),
        vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=32, out_hidden_size=32),
    ),
}
NO_PACKING = dict(ds__packing_samples=False, ds__ring_attn_size=1, train__dynamic_batch_enable=False)


def settings(**given) -> SimpleNamespace:
    found: dict = {"ds": {}, "train": {}}
    for name, value in (NO_PACKING | given).items():
        group, flag = name.split("__")
        found[group][flag] = value
    return SimpleNamespace(**{group: SimpleNamespace(**flags) for group, flags in found.items()})


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_refused_for_packing_where_packed_samples_have_other_log_probs_than_alone(kind):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | MODELS[kind])
    loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = loader.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    actor = Actor(model)
    sequences, mask = torch.randint(3, 64, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    found = []
    for actor.packing_samples in (False, True):
        with torch.no_grad():
            found.append(actor(sequences, mask[:, 1:], mask))
    padded, packed = found
    is_independent = torch.allclose(padded, packed, atol=1e-4)
    assert is_independent == (packing_problem(settings(ds__packing_samples=True), config) is None)
    assert packing_problem(settings(), config) is None


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (dict(ds__packing_samples=True), "--ds.packing_samples:"),
        (dict(train__dynamic_batch_enable=True), "--train.dynamic_batch_enable:"),
        (dict(ds__ring_attn_size=2), "--ds.ring_attn_size 2:"),
    ],
)
def test_the_refusal_names_the_flag_that_packs(given, flag):
    config = CONFIG_MAPPING["qwen3_5_text"](**SIZES | MODELS["qwen3_5_text"])
    assert packing_problem(settings(**given), config).startswith(flag)


def test_an_actor_of_a_model_on_the_hub_is_refused_before_its_weights_are_loaded(tmp_path):
    CONFIG_MAPPING["qwen3_5_text"](**SIZES | MODELS["qwen3_5_text"]).save_pretrained(tmp_path)
    actor = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
    strategy = SimpleNamespace(args=settings(ds__packing_samples=True))
    with pytest.raises(RuntimeError, match="packing_samples: the layers of a qwen3_5_text would mix"):
        actor.init_model_from_pretrained(SimpleNamespace(), strategy, str(tmp_path))
