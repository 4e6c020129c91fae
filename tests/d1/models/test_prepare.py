"""A model that the user built: refused without preparation, equal to `load_model`'s after it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
)

from d1.models import load_model, prepare
from d1.models.adapters import lora_targets
from d1.models.attention import require_prepared

MASKED_LM = ("modernbert", "bert", "roberta")


def left_padded() -> tuple[Tensor, Tensor]:
    ids = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    ids, mask = left_padded()
    return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


def build_plain(folder: Path, source: Path, kind: str) -> Any:
    """A model of Transformers alone, with the weights in `source`: decoders attend causally, as they do by default."""
    load_model(source).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("is_causal", None)
    config.pop("use_cache", None)
    (folder / "config.json").write_text(json.dumps(config))
    auto: Any = AutoModelForMaskedLM if kind in MASKED_LM else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


def test_a_plain_model_is_refused_and_equals_load_models_once_prepared(kind_dirs, kind, tmp_path):
    plain, expected = build_plain(tmp_path, kind_dirs[kind], kind), logits_of(load_model(kind_dirs[kind]))
    with pytest.raises(ValueError, match=r"was not prepared for masked diffusion.*d1\.models\.prepare\(model\)"):
        require_prepared(plain)
    if kind != "modernbert":  # its rotary positions do not depend on where a text begins
        assert (logits_of(plain) - expected).abs().max() > 1e-3
    assert prepare(plain) is plain
    require_prepared(plain)
    assert torch.equal(logits_of(plain), expected)


@pytest.mark.parametrize("name", ["Dream", "bert", "gemma2"])
def test_preparing_twice_is_preparing_once(kind_dirs, name, tmp_path):
    """Two shifts would move Dream's logits by two positions."""
    plain = build_plain(tmp_path, kind_dirs[name], name)
    assert torch.equal(logits_of(prepare(prepare(plain))), logits_of(load_model(kind_dirs[name])))
    loaded = load_model(kind_dirs[name])
    assert torch.equal(logits_of(prepare(loaded)), logits_of(plain))


@pytest.mark.parametrize("name", ["Dream", "bert"])
def test_copies_adapters_and_a_resized_vocabulary_stay_prepared(kind_dirs, name, tmp_path):
    expected = logits_of(load_model(kind_dirs[name]))
    model: Any = prepare(build_plain(tmp_path, kind_dirs[name], name))
    copied = copy.deepcopy(model)
    require_prepared(copied)
    assert torch.equal(logits_of(copied), expected)
    targets = lora_targets(model, "attention")
    peft: Any = get_peft_model(copied, LoraConfig(target_modules=targets)).eval()
    require_prepared(peft)
    assert prepare(peft) is peft
    assert torch.equal(logits_of(peft), expected)
    require_prepared(peft.merge_and_unload())
    model.resize_token_embeddings(70, mean_resizing=False)
    require_prepared(model)
    torch.testing.assert_close(logits_of(model)[:, :64], expected, atol=1e-6, rtol=0)
    model(input_ids=torch.tensor([[5, 0, 6]])).logits.square().mean().backward()
    assert model.get_input_embeddings().weight.grad[0].abs().sum() > 0, "the padding token can be learned"


def test_a_plain_model_under_an_adapter_can_be_prepared(kind_dirs, tmp_path):
    plain = build_plain(tmp_path, kind_dirs["llama"], "llama")
    peft: Any = get_peft_model(plain, LoraConfig(target_modules=["q_proj"])).eval()
    with pytest.raises(ValueError, match="LlamaForCausalLM was not prepared"):
        require_prepared(peft)
    require_prepared(prepare(peft))
    assert torch.equal(logits_of(peft), logits_of(load_model(kind_dirs["llama"])))


def test_what_cannot_be_prepared_is_refused(kind_dirs):
    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    causal = BertForMaskedLM(BertConfig(**sizes, is_decoder=True))
    other: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    headless: Any = LlamaModel(load_model(kind_dirs["llama"]).config)
    windows: Any = AutoModelForCausalLM.from_config(load_model(kind_dirs["gemma2"]).config)
    windows.config.layer_types = ["sliding_attention"] * 3
    for model, message in (
        (causal, "BertForMaskedLM was built to be causal: build it from a config with is_decoder=False"),
        (other, "GPT2LMHeadModel: model_type 'gpt2' is not supported: known are llada, Dream"),
        (headless, "LlamaModel does not split into a `base_model`.* and the head lm_head"),
        (windows, "Gemma2ForCausalLM: every layer attends to a window only"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(model)
        with pytest.raises(ValueError, match="was not prepared"):
            require_prepared(model)
