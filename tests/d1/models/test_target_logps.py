"""Log-probabilities computed in chunks, compared with all logits at once, for every kind of model; and
distributions made from logits, compared with a slow softmax over the remaining tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    ModernBertConfig,
    Qwen2Config,
    RobertaConfig,
)

import d1.models.head
from d1.models import prepare
from d1.models.distribution import MODEL_DISTRIBUTION, Distribution
from d1.models.head import backbone_and_head, run_inside, target_logps, token_logps
from tests.d1.sampling.reference import left_of

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 1, "is_causal": False}
CONFIGS = {
    "llama": LlamaConfig(**DECODER),
    "next token": Qwen2Config(**DECODER | {"predicts_next_token": True}),
    "softcap": Gemma2Config(**DECODER, head_dim=8, final_logit_softcapping=2.0),
    "tied": Qwen2Config(**DECODER, tie_word_embeddings=True),
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES),
    "modernbert": ModernBertConfig(**SIZES),
}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]
    auto: Any = AutoModelForMaskedLM if config.model_type in ("bert", "roberta", "modernbert") else AutoModelForCausalLM
    return prepare(auto.from_config(config, attn_implementation="eager")).double().eval()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (3, 20), generator=generator)
    visible = (torch.arange(20) < torch.tensor([[20], [13], [7]])).long()
    hidden = (torch.rand(3, 20, generator=generator) < 0.5) & visible.bool()
    return ids, visible, hidden, torch.randint(1, 50, (int(hidden.sum()),), generator=generator)


def gradients(model: Any, losses: Tensor) -> list[Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad((losses * torch.arange(1, len(losses) + 1)).sum(), weights))


def chunked(model: Any, ids: Tensor, visible: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    def compute(inner: Any) -> Tensor:
        return target_logps(inner, backbone_and_head(inner)[0](ids, visible)[hidden], targets)[0]

    return run_inside(model, compute)


def naive(model: Any, ids: Tensor, visible: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=visible).logits[hidden]
    return -F.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_are_those_of_all_logits(
    kind: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", positions * 50)
    model = make(kind)
    found, expected = chunked(model, *batch()), naive(model, *batch())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_adapters_and_wrapped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 5 * 50)
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(make("llama"), config).eval()
    found, expected = chunked(model, *batch()), naive(model, *batch())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = make("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert run_inside(other, lambda inner: inner is other)
    torch.testing.assert_close(chunked(other, *batch()), naive(other, *batch()))


def test_the_head_sees_targets_only_a_chunk_at_a_time_and_all_but_the_last_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 4 * 50)
    model = make("llama")
    ids, visible, hidden, targets = batch()
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, states: calls.append(len(states[0])))
    logps = chunked(model, ids, visible, hidden, targets)
    assert max(calls) == calls[-1] == 4
    assert sum(calls) == int(hidden.sum()) < visible.sum()
    first_pass = list(calls)
    logps.sum().backward()
    assert sorted(calls[len(first_pass) :]) == sorted(first_pass[:-1])


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_k": 500},
    {"top_p": 0.7},
    {"top_p": 1e-9},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95},
]
each = pytest.mark.parametrize("chosen", SETTINGS, ids=str)


def logits(positions=12, vocab=20):
    return 2 * torch.randn(positions, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@each
def test_log_probs_are_the_slow_softmaxs_and_their_gradients_its_own(chosen):
    """Log-probabilities of every token: a token that was removed is added back, alone, to the remaining ones."""
    distribution, given = Distribution(**chosen), logits()
    temperature = chosen.get("temperature", 1.0)
    outside = 0
    for token in range(20):
        free = given.clone().requires_grad_()
        ids = torch.full((len(free),), token)
        found = token_logps(distribution.logits(free, ids), ids)
        assert found.isfinite().all()
        (found * torch.arange(1, len(free) + 1)).sum().backward()
        for row, values in enumerate(given.tolist()):
            left = {*left_of(values, **chosen)}
            outside += token not in left
            powers = {k: math.exp(values[k] / temperature) for k in left | {token}}
            total = math.fsum(powers.values())
            assert found[row].item() == pytest.approx(math.log(powers[token] / total), abs=1e-12)
            slope = [(row + 1) * ((k == token) - powers.get(k, 0) / total) / temperature for k in range(20)]
            torch.testing.assert_close(free.grad[row], torch.tensor(slope, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool(outside) == (distribution.truncates and chosen.get("top_k") != 500)


@each
def test_what_is_left_is_what_the_slow_softmax_leaves_with_its_logits_as_they_were(chosen):
    given = logits()
    kept = Distribution(**chosen).truncated(given.view(3, 4, 20)).view(12, 20)
    for row, values in enumerate(given.tolist()):
        left = left_of(values, **chosen)
        assert kept[row].isfinite().nonzero().flatten().tolist() == sorted(left)
        assert torch.equal(kept[row][list(left)], given[row][list(left)])
    assert torch.equal(given, logits())  # not overwritten


@each
@pytest.mark.parametrize("positions", [5, 1000])
def test_chunks_of_the_head_score_in_the_distribution_and_entropies_stay_the_models_own(chosen, positions, monkeypatch):
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", positions * 50)
    model, distribution = make("llama"), Distribution(**chosen)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 50, (12,), generator=generator)
    found, entropies = target_logps(model, states, targets, with_entropies=True, distribution=distribution)
    whole = model.lm_head(states)
    expected = token_logps(distribution.logits(whole, targets), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=whole).entropy())
    slopes = (torch.autograd.grad(values.sum(), [model.lm_head.weight])[0] for values in (found, expected))
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10)
    none = target_logps(model, states[:0], targets[:0], distribution=distribution)[0]
    assert none.shape == (0,)


def test_the_default_is_the_models_own_and_copies_nothing():
    given = logits()
    assert MODEL_DISTRIBUTION.logits(given, torch.zeros(12, dtype=torch.long)) is given
    assert Distribution(1.0, 0, 1.0) == MODEL_DISTRIBUTION
