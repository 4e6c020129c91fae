"""The last layer at chosen positions and the head at few rows, compared with the whole layer and the plain head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.adapters import lora_targets
from d1.models.head import backbone_and_head, most_likely
from d1.models.kinds import is_encoder
from d1.transformers_bridge import CACHE
from tests.rounding import TOKENS, assert_near, largest

LENGTH = 14
POSITIONS = torch.tensor([[13, 5, 9, 6], [4, 12, 4, 7], [8, 9, 10, 11]])  # of each row, unordered, one of them twice


def batch(padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(4, 64, (3, LENGTH), generator=keyed_generator(3))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :3], mask[1, 13:] = 0, 0, 0
    return ids, mask if padded else None


def build(folder: Any, attention: str, lora: bool = False) -> Any:
    model = load_model(folder, attn_implementation=attention)
    if lora:
        targets = lora_targets(model, "all-linear")
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    return model


def at(states: Tensor) -> Tensor:
    return torch.stack([row[places] for row, places in zip(states, POSITIONS, strict=True)])


def last_mlp(model: Any) -> list[tuple[int, ...]]:
    """Records the input shapes of the last layer's feed-forward."""
    seen: list[tuple[int, ...]] = []
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    layers[-1].mlp.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    return seen


@pytest.mark.parametrize(("padded", "lora"), [(False, False), (True, False), (True, True)])
def test_states_and_gradients_are_those_of_the_whole_layer(kind_dirs, kind, attention, padded, lora):
    model = build(kind_dirs[kind], attention, lora)
    ids, mask = batch(padded)
    backbone, _ = backbone_and_head(model)
    towards = torch.randn(*POSITIONS.shape, 32, generator=keyed_generator(4))

    def gradients(states: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (states * towards).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, states = at(backbone(ids, mask)), backbone(ids, mask, POSITIONS)
    assert_near(states, expected)
    found, wanted = gradients(states), gradients(expected)
    for name, gradient in wanted.items():
        assert_near(found[name], gradient, least=largest([*wanted.values()]), terms=TOKENS)


def test_the_last_feed_forward_sees_the_positions_asked_for_and_no_others(kind_dirs, kind):
    model = build(kind_dirs[kind], "eager")
    if is_encoder(model.config):
        pytest.skip("encoders run whole")
    seen, ids = last_mlp(model), batch(False)[0]
    backbone, _ = backbone_and_head(model)
    backbone(ids, None, POSITIONS)
    backbone(ids)
    model(input_ids=ids)
    assert seen == [(3, 4), (3, LENGTH), (3, LENGTH)]


@pytest.mark.parametrize("name", ["llada", "Dream", "qwen3", "gemma"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_pass_that_fills_and_one_that_reads_a_cache(kind_dirs, name, padded):
    model = build(kind_dirs[name], "sdpa")
    ids, mask = batch(padded)
    backbone, _ = backbone_and_head(model)
    caches: list[Any] = []
    states = []
    for positions in (None, POSITIONS):
        cache = DynamicCache()
        with torch.no_grad():
            first = backbone(ids, mask, positions, **{CACHE: cache})
            places = torch.arange(LENGTH, 2 * LENGTH).expand(3, -1)
            wide = None if mask is None else torch.cat([mask, torch.ones_like(mask)], dim=1)
            second = backbone(ids.flip(1), wide, positions, **{CACHE: cache}, position_ids=places)
        caches.append(cache)
        states.append((at(first), at(second)) if positions is None else (first, second))
    assert_near(states[1], states[0])
    for whole, narrow in zip(caches[0].layers, caches[1].layers, strict=True):
        assert narrow.keys.shape[2] == 2 * LENGTH
        assert_near((narrow.keys, narrow.values), (whole.keys, whole.values))


def test_checkpointed_layers_run_whole(kind_dirs):
    model = build(kind_dirs["llada"], "sdpa").train()
    seen, ids = last_mlp(model), batch(False)[0]
    backbone, _ = backbone_and_head(model)
    expected = backbone(ids, None, POSITIONS)
    model.gradient_checkpointing_enable()
    assert_near(backbone(ids, None, POSITIONS), expected)
    assert seen == [(3, 4), (3, LENGTH)]


@pytest.mark.parametrize("rows", [(0,), (1,), (10,), (2, 3)])
@pytest.mark.parametrize("excluded", [0, 130])
def test_the_most_likely_token(rows, excluded):
    torch.manual_seed(0)
    logits = torch.randn(*rows, 131) * 6
    tokens, logps, entropies = most_likely(logits.clone(), excluded)
    allowed = logits.clone()
    allowed[..., excluded] = -torch.inf
    assert torch.equal(tokens, allowed.argmax(-1))
    all_logps = logits.double().log_softmax(-1)
    assert_near(logps.double(), all_logps.gather(-1, tokens[..., None])[..., 0])
    assert_near(entropies.double(), -(all_logps.exp() * all_logps).sum(-1))


def test_the_most_likely_of_equals_is_the_first_and_no_logit_overflows():
    logits = torch.tensor([[1.0, 5.0, 5.0, 1e4, 5.0, -1e4]])
    for excluded, token, logp in ((3, 1, 5 - 1e4), (0, 3, 0.0)):
        tokens, logps, entropies = most_likely(logits.clone(), excluded)
        assert tokens.tolist() == [token]
        assert logps.item() == pytest.approx(logp)
        assert entropies.item() == 0.0
