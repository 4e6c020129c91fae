"""A copy of a model with its adapter merged: equal to one merged by `merged_state_dict`, next to untouched weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from d1.models import load_model
from d1.models.adapters import lora_targets
from d1.models.convert import merged_state_dict
from d1.models.merged import MergedCopy, copied_bytes, why_not_mergeable
from tests.d1.released import IDS


def adapted(folder: Any, dtype: torch.dtype = torch.bfloat16, targets: Any = "attention", **options: Any) -> Any:
    """A model with a random adapter, which changes its logits."""
    model: Any = load_model(folder, dtype)
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=lora_targets(model, targets), **options))
    disturb(peft)
    return peft.train()


def disturb(model: Any) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_copy_is_the_merged_model_and_the_trained_weights_stay(kind_dirs, kind, dtype):
    model = adapted(kind_dirs[kind], dtype)
    before = bits(model)
    twin = MergedCopy(model)
    for _ in range(2):
        twin.refresh()
        assert_equal(bits(model), before)
        with merged_state_dict(model) as state:
            assert_equal(bits(twin.model), {name: weight.clone() for name, weight in state.items()})
        disturb(model)  # as an optimizer step does
        before = bits(model)
    twin.refresh()
    expected = load_model(kind_dirs[kind], dtype)
    with merged_state_dict(model) as state:
        expected.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(twin.model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert model.training
    assert not any(module.training for module in twin.model.modules())
    assert not any(isinstance(module, BaseTunerLayer) for module in twin.model.modules())


def test_what_the_adapter_leaves_alone_is_shared(kind_dirs):
    model = adapted(kind_dirs["llama"], targets=["q_proj", "down_proj"])
    twin = MergedCopy(model)
    own = {weight.data_ptr() for weight in model.parameters()}
    apart = {name: weight for name, weight in twin.model.named_parameters() if weight.data_ptr() not in own}
    layers = range(model.config.num_hidden_layers)
    places = ("self_attn.q_proj", "mlp.down_proj")
    assert apart.keys() == {f"model.layers.{layer}.{place}.weight" for layer in layers for place in places}
    assert copied_bytes(model) == sum(weight.nbytes for weight in apart.values())
    assert not any(weight.requires_grad for weight in apart.values())


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only", "lora_bias": True}]
)
def test_other_forms_of_lora_are_merged_by_peft(kind_dirs, options):
    model = adapted(kind_dirs["Dream"], targets=["q_proj", "v_proj"], **options)  # layers with a bias
    twin = MergedCopy(model)
    twin.refresh()
    with merged_state_dict(model) as state:
        assert_equal(bits(twin.model), {name: weight.clone() for name, weight in state.items()})


@pytest.mark.parametrize(
    ("kind_", "options", "reason"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}, "the adapter trains whole modules or single tokens"),
        ("llama", {"trainable_token_indices": [1]}, "the adapter trains whole modules or single tokens"),
        ("lladamoe", {"targets": "all-linear"}, "not LoRA on a linear layer: ParamWrapper"),
    ],
)
def test_adapters_that_cannot_be_copied_are_named(kind_dirs, kind_, options, reason):
    model = adapted(kind_dirs[kind_], **options)
    assert reason in why_not_mergeable(model)
    with pytest.raises(ValueError, match=reason):
        MergedCopy(model)
    assert why_not_mergeable(load_model(kind_dirs[kind_])) == "the model has no adapter to merge"


def test_weights_of_two_modules_and_weights_of_4_bits_are_refused(kind_dirs):
    model = adapted(kind_dirs["llama"], targets=["q_proj", "lm_head"])
    assert why_not_mergeable(model) is None
    head = model.get_base_model().lm_head.base_layer
    head.weight = model.get_base_model().model.embed_tokens.weight
    assert why_not_mergeable(model) == "the adapter is on weights that another module shares"
    model = adapted(kind_dirs["llama"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert why_not_mergeable(model) == "4-bit weights cannot absorb an adapter"
