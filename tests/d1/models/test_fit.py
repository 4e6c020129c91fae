"""The memory estimate against the peak that CPU allocations of real steps reach, and its arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import sft_loss
import torch
from peft import LoraConfig, get_peft_model
from sft_loss import hidden_token_losses
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig

from d1.__main__ import main, make_parser
from d1.models import attach_hooks
from d1.models import fit as memory
from d1.models.adapters import lora_targets
from d1.models.fit import BUCKET, Setup, activation_bytes, fit_table, resident_bytes
from d1.sampling import generate
from d1.scoring import mean_field_logps

TINY: dict[str, Any] = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=6)
TINY |= dict(num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
CONFIGS = {
    "llama": LlamaConfig(**TINY, num_key_value_heads=2, use_cache=False),
    "modernbert": CONFIG_MAPPING["modernbert"](**TINY),
}
LENGTH, PROMPT = 128, 32


def measured_peak(kind: str, setup: Setup) -> int:
    """Peak bytes of a step of the stage's own code, everything included, as the allocator reports them."""
    config = CONFIGS[kind]
    auto: Any = AutoModelForMaskedLM if kind == "modernbert" else AutoModelForCausalLM
    model: Any = attach_hooks(auto.from_config(config))
    model.train(setup.stage != "eval")
    if setup.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    inner = model
    if setup.stage != "eval" and setup.lora_r:
        targets = lora_targets(kind, setup.lora_targets)
        model = get_peft_model(model, LoraConfig(r=setup.lora_r, target_modules=targets))
        model.enable_input_require_grads()
    ids = torch.randint(3, 512, (setup.batch, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    prompt = ids[:, :PROMPT], mask[:, :PROMPT]
    options: dict[str, Any] = {"mask_token_id": 3, "gen_length": LENGTH - PROMPT}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step() -> None:
        if setup.stage == "eval":
            generate(model, *prompt, block_length=setup.block_length, steps=3, temperature=1.0, **options)
            return
        if setup.stage == "sft":
            hidden = torch.ones_like(ids, dtype=torch.bool)
            losses = hidden_token_losses(model, inner, ids, mask, hidden, ids[hidden])
        else:
            losses = mean_field_logps(model, *prompt, ids[:, PROMPT:], torch.zeros_like(prompt[0]).bool(), **options)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    resident = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    resident += [value for state in optimizer.state.values() for value in state.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(tensor.nbytes for tensor in resident) + max(accumulate(sizes))


CPU = Setup("sft", batch=4, length=LENGTH, dtype="float32", lora_r=0)
SETUPS = {
    "sft, all weights": CPU,
    "sft, all weights, checkpointing": replace(CPU, gradient_checkpointing=True),
    "sft, LoRA": replace(CPU, lora_r=8),
    "rl, LoRA on all linear layers": replace(CPU, stage="rl", lora_r=8, lora_targets="all-linear"),
    "eval": replace(CPU, stage="eval", batch=16),
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("kind_", CONFIGS)
def test_the_estimate_is_near_the_measured_peak(kind_, name):
    setup = SETUPS[name]
    constant, per_row = activation_bytes(CONFIGS[kind_], setup)
    resident = resident_bytes(CONFIGS[kind_], replace(setup, beta=0.0))
    estimated = sum(resident.values()) + constant + per_row * setup.batch
    assert estimated == pytest.approx(measured_peak(kind_, setup), rel=0.15)


def test_sft_holds_as_many_logits_as_the_estimate_says():
    assert (memory.SFT_ROWS, memory.SFT_LOGITS) == (sft_loss.LOGITS_CHUNK, sft_loss.LOGITS_KEPT)


LLADA = LlamaConfig(
    vocab_size=126464,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=32,
    use_cache=False,
)
PARAMETERS = 2 * 126464 * 4096 + 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 12288 + 2 * 4096)
LORA_QKVO = 32 * 4 * 128 * (4096 + 4096)


def test_what_stays_is_counted_by_hand_for_llada_8b():
    assert PARAMETERS == 8_015_581_184
    full = Setup("sft", lora_r=0, gpus=8)
    one = resident_bytes(LLADA, full)
    assert one == {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "reference": 0,
        "buffers": 0,
    }
    for stage, sharded in enumerate([["optimizer"], ["optimizer", "gradients"], ["optimizer", "gradients", "weights"]]):
        parts = resident_bytes(LLADA, replace(full, zero=stage + 1))
        whole = {"weights": 2 * PARAMETERS, "gradients": 2 * PARAMETERS, "optimizer": 12 * PARAMETERS}
        for part, size in whole.items():
            assert parts[part] == size / (8 if part in sharded else 1), (stage + 1, part)
        assert parts["buffers"] == 2 * (BUCKET + (126464 * 4096 if stage == 2 else 0))
    assert resident_bytes(LLADA, replace(full, stage="rl"))["reference"] == 2 * PARAMETERS
    assert resident_bytes(LLADA, replace(full, stage="rl", beta=0.0))["reference"] == 0


def test_lora_and_four_bits_for_llada_8b():
    lora = resident_bytes(LLADA, Setup("rl"))
    assert lora["weights"] == 2 * PARAMETERS + 4 * LORA_QKVO
    assert (lora["gradients"], lora["optimizer"], lora["reference"]) == (4 * LORA_QKVO, 8 * LORA_QKVO, 0)
    four = resident_bytes(LLADA, Setup("rl", load_in_4bit=True))
    linear = PARAMETERS - 2 * 126464 * 4096 - 4096 - 32 * 2 * 4096
    assert four["weights"] == pytest.approx(lora["weights"] - 2 * linear + linear * 4.127 / 8, rel=1e-3)
    assert resident_bytes(LLADA, Setup("eval"))["weights"] == 2 * PARAMETERS


def test_activations_grow_with_length_and_shrink_with_checkpointing():
    short, long = (activation_bytes(LLADA, Setup("sft", length=length))[1] for length in (1024, 2048))
    assert 1.9 * short < long < 2.5 * short
    assert activation_bytes(LLADA, Setup("sft", length=2048, gradient_checkpointing=True))[1] < 0.2 * long


def test_the_largest_batch_fits_and_the_next_does_not():
    setup = Setup("sft", length=1024, gradient_checkpointing=True)
    table = fit_table(LLADA, setup)
    rows = int(next(line for line in table.splitlines() if line.startswith("  80 GB")).split()[-1])
    totals = []
    for batch in (rows, rows + 1):
        lines = fit_table(LLADA, replace(setup, batch=batch)).splitlines()
        totals.append(float(next(line for line in lines if line.startswith("total")).split()[-2]))
    assert totals[0] <= 80 < totals[1]


def test_the_command_prints_the_table(kind_dirs, capsys):
    words = ["fit", "--model_path", str(kind_dirs["llada"]), "--stage", "rl", "--gpus", "8", "--length", "64"]
    main(make_parser().parse_args(words))
    assert "141 GB" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--batch 0 "):
        main(make_parser().parse_args([*words, "--batch", "0"]))
