"""The chunked losses of hidden tokens against all logits at once, for every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from sft_logits_memory import main, make_parser
from sft_loss import hidden_token_losses
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

from d1.models import attach_hooks

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
    return attach_hooks(auto.from_config(config, attn_implementation="eager")).double().eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (3, 20), generator=generator)
    visible = (torch.arange(20) < torch.tensor([[20], [13], [7]])).long()
    hidden = (torch.rand(3, 20, generator=generator) < 0.5) & visible.bool()
    return ids, visible, hidden, torch.randint(1, 50, (int(hidden.sum()),), generator=generator)


def gradients(model: Any, losses: torch.Tensor) -> list[torch.Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad((losses * torch.arange(1, len(losses) + 1)).sum(), weights))


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("kept", [0, 600, 2**25])  # all but the last chunk computed again, some, none
@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_and_gradients_are_those_of_all_logits(
    kind: str, kept: int, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft_loss.LOGITS_KEPT", kept)
    model = make(kind)
    ids, visible, hidden, targets = batch()
    naive = F.cross_entropy(model(input_ids=ids, attention_mask=visible).logits[hidden], targets, reduction="none")
    losses = hidden_token_losses(model, model, ids, visible, hidden, targets, chunk_size)
    torch.testing.assert_close(losses, naive)
    torch.testing.assert_close(gradients(model, losses), gradients(model, naive))
    again = model(input_ids=ids, attention_mask=visible).logits
    assert again.shape == (3, 20, 50)  # the model is as it was


def test_adapters_and_wrapped_heads() -> None:
    ids, visible, hidden, targets = batch()
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(make("llama"), config).eval()
    naive = F.cross_entropy(model(input_ids=ids, attention_mask=visible).logits[hidden], targets, reduction="none")
    losses = hidden_token_losses(model, model, ids, visible, hidden, targets, 5)
    torch.testing.assert_close(losses, naive)
    torch.testing.assert_close(gradients(model, losses), gradients(model, naive))


def test_output_layer_sees_hidden_tokens_only_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_loss.LOGITS_KEPT", 2 * 4 * 50)
    model = make("llama")
    ids, visible, hidden, targets = batch()
    project, calls = model.lm_head.forward, []

    def counted(states: torch.Tensor) -> torch.Tensor:
        calls.append(len(states))
        return project(states)

    model.lm_head.forward = counted
    losses = hidden_token_losses(model, model, ids, visible, hidden, targets, 4)
    assert max(calls) == 4
    assert sum(calls) == int(hidden.sum()) < visible.sum()
    losses.sum().backward()
    first_pass = calls[: -(-int(hidden.sum()) // 4)]
    assert sum(calls) == 2 * int(hidden.sum()) - sum(first_pass[-2:])  # the others again in the backward pass
    assert model.lm_head.forward is counted


def test_memory_script_prints_its_table() -> None:
    table = main(make_parser().parse_args(["--length", "64", "--vocabulary", "500"]))
    assert "| all logits | 64 | 64 |" in table
    assert "| hidden answer tokens, 256 at a time | 16 | 16 |" in table
