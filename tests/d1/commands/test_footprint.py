"""The memory estimate, compared with the peak of CPU allocations in real steps, and its arithmetic."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig

from d1.__main__ import main, make_parser
from d1.commands import footprint
from d1.commands.fit import method_sizes, window_tokens, with_recipe
from d1.commands.footprint import (
    BUCKET,
    RESERVED,
    FitSettings,
    Moment,
    activation_bytes,
    activation_moments,
    build,
    fake_step,
    fit_table,
    resident_bytes,
    total_and_active,
    with_layers,
)
from d1.models import load_model, prepare
from d1.models.adapters import lora_targets
from d1.models.folder import ModelFolder
from d1.models.head import MAX_CHUNK_FACTOR, backbone_and_head, target_logps
from d1.models.kinds import block_size, native_config, native_config_of
from d1.models.packing import two_stream_states
from d1.models.published import CONFIGS as PUBLISHED
from d1.rl.methods import METHODS
from d1.rl.train import make_parser as rl_parser
from d1.runs.stage import prepare_model
from d1.sampling import SamplingSettings, generate, rollout
from d1.scoring import Views, score
from d1.sft.train import make_parser as sft_parser
from tests.commands import ROOT
from tests.d1.released import config_of

TINY: dict[str, Any] = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=6)
TINY |= dict(num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
MIXTURE: dict[str, Any] = dict(n_routed_experts=8, num_experts_per_tok=3, n_group=2, moe_intermediate_size=48)
MIXTURE |= dict(head_dim=16, num_key_value_heads=2, use_cache=False, use_qk_norm=True, num_mtp_layers=0)
CONTEXT: dict[str, Any] = dict(attention_pattern="causal-context", block_size=8, sliding_window=None)
CONTEXT |= dict(head_dim=16, num_key_value_heads=2, use_cache=False)
CONFIGS = {
    "llama": LlamaConfig(**TINY, num_key_value_heads=2, use_cache=False),
    "blocks": LlamaConfig(**TINY, num_key_value_heads=2, use_cache=False, block_size=8),
    "modernbert": CONFIG_MAPPING["modernbert"](**TINY),
    "glm4_moe": CONFIG_MAPPING["glm4_moe"](**TINY, **MIXTURE),
    "qwen3": CONFIG_MAPPING["qwen3"](**TINY, head_dim=16, num_key_value_heads=4, use_cache=False, block_size=32),
    "ministral3": CONFIG_MAPPING["ministral3"](**TINY, **CONTEXT),
}
SOME = {  # what is asked of all others
    "modernbert": ("sft, all weights, checkpointing", "eval"),
    "glm4_moe": ("sft, LoRA", "eval"),
    "blocks": ("sft, all weights", "sft, LoRA"),
    "qwen3": ("eval", "rl, LoRA on all linear layers"),
    "ministral3": ("sft, LoRA", "rl, LoRA on all linear layers"),
}
LENGTH, PROMPT = 128, 32


def measured_peak(kind: str, settings: FitSettings) -> int:
    """Peak bytes of a step of the stage's own code, everything included, as the allocator reports them."""
    config = CONFIGS[kind]
    auto: Any = AutoModelForMaskedLM if kind == "modernbert" else AutoModelForCausalLM
    model: Any = prepare(auto.from_config(config))
    model.train(settings.stage != "eval")
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    inner = model
    if settings.stage != "eval" and settings.lora_r:
        targets = lora_targets(model, settings.lora_targets)
        model = get_peft_model(model, LoraConfig(r=settings.lora_r, target_modules=targets))
        model.enable_input_require_grads()
    ids = torch.randint(3, 512, (settings.batch, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    width = LENGTH - 32 if (kind, settings.stage) == ("qwen3", "eval") else PROMPT
    prompt = ids[:, :width], mask[:, :width]
    noise = torch.zeros(settings.batch, settings.views, LENGTH, dtype=torch.bool)
    noise[..., PROMPT:] = True
    views = Views(noise, noise[..., PROMPT:].float())
    options: dict[str, Any] = {"mask_token_id": 3, "gen_length": LENGTH - width}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def step() -> None:
        if settings.stage == "eval":
            generate(model, *prompt, block_length=settings.block_length, steps=3, temperature=1.0, **options)
            return
        if settings.stage == "sft":
            targets = ids
            if kind == "ministral3":  # the clean stream is trained, too
                clean_at, targets = torch.arange(LENGTH).expand(len(ids), -1), torch.cat([ids, ids], dim=1)
                states = two_stream_states(inner, ids, ids, mask, clean_at=clean_at)
            elif kind == "blocks":
                states = two_stream_states(inner, ids, ids, mask)
            else:
                states = backbone_and_head(inner)[0](ids, mask)
            losses, _ = target_logps(inner, states.flatten(0, 1), targets.flatten())
        else:
            at_once = settings.views_at_once
            losses = score(model, *prompt, ids[:, PROMPT:], views, views_at_once=at_once, **options).logps
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    resident = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    resident += [views.noise, views.weights] if settings.stored else []
    resident += [value for state in optimizer.state.values() for value in state.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        marker = torch.empty(12345, dtype=torch.uint8)
        step()
    # Every event contains the allocator's own running total. Times are not used: a busy machine's clock may jump, and
    # events in another order give another peak.
    events = allocations(profile.profiler.kineto_results.experimental_event_tree())
    before = next(total - size for size, total in events if size == marker.nbytes)
    return sum(tensor.nbytes for tensor in resident) + max(total for _, total in events) - before


def allocations(events: list[Any]) -> list[tuple[int, int]]:
    """Bytes allocated (or, if negative, freed) and the total, for each allocation in a tree of events."""
    found = [
        (event.typed[1].alloc_size, event.typed[1].total_allocated)
        for event in events
        if event.tag.name == "Allocation"
    ]
    return found + [allocation for event in events for allocation in allocations(event.children)]


CPU = FitSettings("sft", batch=4, length=LENGTH, dtype="float32", lora_r=0, canvas=LENGTH - PROMPT)
SETTINGS = {
    "sft, all weights": CPU,
    "sft, all weights, checkpointing": replace(CPU, gradient_checkpointing=True),
    "sft, LoRA": replace(CPU, lora_r=8),
    "rl, LoRA on all linear layers": replace(CPU, stage="rl", lora_r=8, lora_targets="all-linear"),
    "rl, six views, three at once, LoRA": replace(CPU, stage="rl", views=6, views_at_once=3, lora_r=8),
    "prefer, six views, LoRA": replace(CPU, stage="prefer", views=6, lora_r=8),
    "eval": replace(CPU, stage="eval", batch=16),
}


@pytest.mark.parametrize(("kind_", "name"), [(kind, name) for kind in CONFIGS for name in SOME.get(kind, SETTINGS)])
def test_the_estimate_is_near_the_measured_peak(kind_, name):
    settings = SETTINGS[name]
    constant, per_row = activation_bytes(CONFIGS[kind_], settings)
    resident = resident_bytes(CONFIGS[kind_], replace(settings, beta=0.0))
    estimated = sum(resident.values()) + constant + (per_row + settings.stored) * settings.batch
    assert estimated == pytest.approx(measured_peak(kind_, settings), rel=0.15)


def test_more_views_take_their_own_bytes_and_the_sum_of_their_gradients():
    one = replace(CPU, stage="rl", batch=1, beta=0.0)
    six = replace(one, views=6, stored=6 * (LENGTH + 4 * (LENGTH - PROMPT)))
    constant, per_row = activation_bytes(CONFIGS["llama"], six)
    assert (constant, per_row) == activation_bytes(CONFIGS["llama"], one)
    resident = [sum(resident_bytes(CONFIGS["llama"], settings).values()) for settings in (one, six)]
    more = measured_peak("llama", six) - measured_peak("llama", one)
    assert resident[1] - resident[0] + six.stored == pytest.approx(more, rel=0.05)


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
    full = FitSettings("sft", lora_r=0, gpus=8)
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
    lora = resident_bytes(LLADA, FitSettings("rl"))
    assert lora["weights"] == 2 * PARAMETERS + 4 * LORA_QKVO
    assert (lora["gradients"], lora["optimizer"], lora["reference"]) == (4 * LORA_QKVO, 8 * LORA_QKVO, 0)
    four = resident_bytes(LLADA, FitSettings("rl", load_in_4bit=True))
    assert four["buffers"] == 2 * 12288 * 4096  # the largest weight, dequantised
    linear = PARAMETERS - 2 * 126464 * 4096 - 4096 - 32 * 2 * 4096
    assert four["weights"] == pytest.approx(lora["weights"] - 2 * linear + linear * 4.127 / 8, rel=1e-3)
    assert (four["gradients"], four["optimizer"]) == (4 * LORA_QKVO, 8 * LORA_QKVO)
    assert resident_bytes(LLADA, FitSettings("eval"))["weights"] == 2 * PARAMETERS


@pytest.mark.parametrize("in_4bit", [False, True])
def test_rl_of_llada_8b_takes_what_it_did_on_a_gpu(in_4bit, monkeypatch):
    """The peaks of one H200, of benchmarks/RESULTS.md, by a version whose LoRA layers cast inputs of 16 bits to fp32;
    those of 4-bit weights never did, and had weights of 16 bits."""
    if in_4bit:
        monkeypatch.setattr(footprint, "build", lambda *given: build(*given).to(torch.bfloat16))
    else:
        monkeypatch.setattr(footprint, "skip_input_casts", lambda model: None)
    _, table = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("one H200 | stage |")
    row = rf"^\| ?{'NF4' * in_4bit} \| rl \| ([\d.]+) \| ([\d.]+) \|"
    measured, computed = map(float, re.search(row, table, re.MULTILINE).groups())
    settings = FitSettings("rl", batch=6, length=412, lora_targets="all-linear", load_in_4bit=in_4bit)
    constant, per_row = activation_bytes(LLADA, settings)
    total = (sum(resident_bytes(LLADA, settings).values()) + constant + 6 * per_row) / 1e9
    assert computed == pytest.approx(total, abs=0.02)
    assert measured == pytest.approx(total, rel=0.01)


def test_evaluation_of_llada_8b_takes_what_it_did_on_a_gpu():
    """8 rows of 200 + 512 tokens, whose peak is in the transformer and not in the logits."""
    _, table = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("one H200 | stage |")
    measured = float(re.search(r"^\| \| eval \| ([\d.]+) \|", table, re.MULTILINE)[1])
    settings = FitSettings("eval", batch=8, length=712)
    total = sum(resident_bytes(LLADA, settings).values()) + peak_of(LLADA, settings)
    assert measured == pytest.approx(total / 1e9, rel=0.01)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_4bit_weights_take_the_bytes_of_a_model_that_was_loaded(tmp_path, llada_writer, stage):
    """SFT's own preparation keeps embeddings, head and norms in fp32; RL keeps them in 16 bits."""
    sizes = {"d_model": 256, "mlp_hidden_size": 512, "vocab_size": 2048, "embedding_size": 2048}
    folder = llada_writer(tmp_path, torch.bfloat16, **sizes)
    if stage == "sft":
        words = ["--model_name", str(folder), "--dtype", "bfloat16", "--lora_r", "8", "--load_in_4bit"]
        words += ["--lora_target_modules", "attention"]
        args = sft_parser().parse_args(words)
        model = prepare_model(args, ModelFolder.read(args.model_name))
    else:
        model = load_model(folder, torch.bfloat16, quantization="nf4")
        model = get_peft_model(model, LoraConfig(r=8, target_modules=lora_targets(model, "attention")))
    names = {name for name, p in model.named_parameters() if "lora_" not in name and p.dtype == torch.float32}
    assert bool(names) == (stage == "sft")
    found = 0
    for parameter in model.parameters():
        found += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            found += state.absmax.nbytes + state.state2.absmax.nbytes
    settings = FitSettings(stage, lora_r=8, load_in_4bit=True)
    assert resident_bytes(native_config(str(folder))[0], settings)["weights"] == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_small_models_with_many_tokens_are_extrapolated_to_their_depth(batch, checkpointing):
    """If all weights are trained, the gradient of the embeddings is larger than the activations of a few layers."""
    sizes: dict[str, Any] = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    config = LlamaConfig(**sizes, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)
    config.use_cache = False
    settings = FitSettings("sft", batch=batch, length=1024, lora_r=0, gradient_checkpointing=checkpointing)
    constant, per_row = activation_bytes(config, settings)
    whole = fake_step(config, settings, 24, batch).peak
    assert 0.9 * whole <= constant + per_row * batch <= 1.4 * whole


def test_preference_training_keeps_a_reference_without_lora_alone(kind_dirs, capsys):
    """The second model has the weights' own precision. Eight draws cost the sum of their gradients, not more passes."""
    found = {}
    for words in ("--lora_r 0", "--lora_r 4", "--lora_r 0 --num_views 1"):
        command = ["fit", "--model_path", str(kind_dirs["llama"]), "--stage", "prefer", "--length", "64"]
        main(make_parser().parse_args([*command, *words.split()]))
        assert "total at batch 2" in capsys.readouterr().out  # a pair
    settings = FitSettings("prefer", lora_r=0, views=8, beta=1.0)
    for stage in ("sft", "prefer"):
        found[stage] = resident_bytes(LLADA, replace(settings, stage=stage))
    assert (found["sft"].pop("reference"), found["prefer"].pop("reference")) == (0, 4 * PARAMETERS)
    assert found["sft"] == found["prefer"]
    assert resident_bytes(LLADA, replace(settings, lora_r=8))["reference"] == 0


def test_inputs_of_lora_take_16_bits(monkeypatch):
    """Projections keep their inputs for the backward pass in bf16, and not in fp32 as well: a layer adds less to the
    peak of a step."""
    settings = replace(
        FitSettings("rl", batch=8, length=LENGTH, canvas=LENGTH - PROMPT, lora_r=4), lora_targets="all-linear"
    )
    found = {}
    for casts in (False, True):
        with monkeypatch.context() as patched:
            if casts:
                patched.setattr("d1.commands.footprint.skip_input_casts", lambda model: None)
            found[casts] = (
                fake_step(CONFIGS["llama"], settings, 6, 8).peak - fake_step(CONFIGS["llama"], settings, 3, 8).peak
            )
    assert found[False] < found[True]


def test_a_merged_copy_is_counted_by_hand_for_llada_8b(tmp_path, capsys):
    """All seven projections of each layer in bf16, 14 GB; those of attention alone, 4.3 GB."""
    for targets, each in (("all-linear", 4 * 4096**2 + 3 * 4096 * 12288), ("attention", 4 * 4096**2)):
        settings = FitSettings("rl", lora_targets=targets)
        own = resident_bytes(LLADA, replace(settings, merged_rollouts=True))
        assert own.pop("merged copy") == 2 * 32 * each
        assert own == resident_bytes(LLADA, settings)
    LLADA.save_pretrained(tmp_path)
    command = ["fit", "--model_path", str(tmp_path), "--stage", "rl", "--no-load_in_4bit", "--length", "64"]
    totals, shown = [], []
    for more in ([], ["--no-merged_rollouts"], ["--merged_rollouts"]):
        main(make_parser().parse_args([*command, *more]))
        shown.append(capsys.readouterr().out)
        totals.append(float(re.search(r"^total at batch 6 +([\d.]+) GB$", shown[-1], re.MULTILINE)[1]))
    assert totals[0] == totals[1] == pytest.approx(totals[2] - 13.96, abs=0.011)
    assert "A merged copy for rollouts (merged_rollouts) takes 13.96 GB more, where there is room." in shown[0]
    assert ["merged copy" in text for text in shown] == [True, False, True]
    with pytest.raises(ValueError, match="needs RL with a LoRA adapter on weights of 16 or 32 bits"):
        main(make_parser().parse_args([*command, "--load_in_4bit", "--merged_rollouts"]))


SDAR = native_config_of(PUBLISHED["JetLM/SDAR-1.7B-Chat"], "SDAR-1.7B")[0]


def peak_of(config: Any, settings: FitSettings) -> float:
    """Bytes of activations and logits at the batch of the settings."""
    constant, per_row = activation_bytes(config, settings)
    return constant + per_row * settings.batch


def test_logits_of_sampling_are_those_of_a_chunk_on_a_large_card():
    """The logits of a row in fp32, their log-probs and their probabilities. The last two are made for 2^26 logits at a
    time, and a chunk has 2^27: with LLaDA's vocabulary 32 rows of 32 tokens."""
    settings = FitSettings("eval", length=64)
    row = 32 * 126464
    expected = {1: 12 * row, 16: 12 * 16 * row, 32: 4 * 32 * row + 8 * 2**26, 64: 4 * 32 * row + 8 * 2**26}
    for rows, size in expected.items():
        assert fake_step(LLADA, settings, 1, rows).logits == pytest.approx(size, rel=2e-3), rows


@pytest.mark.parametrize("batch", [1, 8])
def test_a_small_batch_has_the_logits_of_its_own_rows(batch, monkeypatch):
    """With a vocabulary whose logits are larger than all other activations, and chunks of a large card."""
    monkeypatch.setitem(CONFIGS, "many words", LlamaConfig(**(TINY | {"vocab_size": 50_000}), use_cache=False))
    monkeypatch.setattr("d1.models.head.chunk_factor", lambda device: MAX_CHUNK_FACTOR)
    settings = replace(SETTINGS["eval"], batch=batch)
    resident = sum(resident_bytes(CONFIGS["many words"], settings).values())
    measured = measured_peak("many words", settings) - resident
    assert peak_of(CONFIGS["many words"], settings) == pytest.approx(measured, rel=0.02)


def test_the_peak_of_evaluation_is_counted_by_hand_for_sdar():
    """When tokens are drawn, a model with blocks holds the keys and values of the text, its states and the logits of
    one of its own blocks, 12 bytes for each. With short blocks, the first pass over the text takes more."""
    settings = FitSettings("eval", batch=8, length=512, block_length=8)
    cache, states, position = 28 * 2 * 8 * 128 * 2 * 512, 2 * 2048 * 512, 12 * 151936
    config = copy.deepcopy(SDAR)
    config.block_size = 32
    assert peak_of(config, settings) == pytest.approx(8 * (cache + states + 32 * position), rel=1e-3)
    assert block_size(SDAR) == 4
    assert fake_step(SDAR, settings, 1, 8).logits == pytest.approx(8 * 4 * position, rel=1e-3)
    assert 8 * (cache + states + 4 * position) < peak_of(SDAR, settings) < peak_of(config, settings)


def test_the_peak_of_evaluation_is_counted_by_hand_for_llada_8b():
    """With few tokens per row, the logits of one block per row, and 16-bit states of all tokens."""
    settings = FitSettings("eval", batch=8, length=64)
    assert peak_of(LLADA, settings) == pytest.approx(8 * (2 * 4096 * 64 + 12 * 32 * 126464), rel=1e-3)


@pytest.mark.parametrize("config", [LLADA, SDAR], ids=["all at once", "blocks"])
def test_evaluation_takes_more_with_every_row_and_every_token(config):
    settings = FitSettings("eval")
    batches, lengths = (1, 33, 200), (16, 456, 4096)
    peaks = torch.tensor(
        [[peak_of(config, replace(settings, batch=batch, length=length)) for batch in batches] for length in lengths]
    )
    assert (peaks.diff(dim=0) > 0).all()
    assert (peaks.diff(dim=1) > 0).all()

    # The table's largest batches are read from the peaks of all numbers of rows, of which one batch was asked for.
    moments = activation_moments(config, replace(settings, length=456))
    sizes = [max(moment.bytes_at(rows) for moment in moments) for rows in range(1, 300)]
    assert sizes == sorted(sizes)
    assert [sizes[batch - 1] for batch in batches] == pytest.approx(peaks[1].tolist(), rel=0.02)


def test_rl_takes_the_larger_of_an_update_and_a_rollout():
    """Their activations are never in memory together."""
    settings = FitSettings("rl", batch=6, length=456, gradient_checkpointing=True)
    update, *rollout = activation_moments(SDAR, settings)
    evaluation = replace(settings, stage="eval")
    assert rollout == activation_moments(SDAR, evaluation)
    assert peak_of(SDAR, settings) == max(update.bytes_at(6), peak_of(SDAR, evaluation))


@pytest.mark.parametrize(
    "settings",
    [FitSettings("sft", length=1024, gradient_checkpointing=True), FitSettings("eval", length=1024)],
    ids=lambda settings: settings.stage,
)
def test_the_largest_batch_fits_and_the_next_does_not(settings):
    table = fit_table(LLADA, settings)
    rows = int(next(line for line in table.splitlines() if line.startswith("  80 GB")).split()[-1])
    totals = []
    for batch in (rows, rows + 1):
        parts = resident_bytes(LLADA, settings) | {"CUDA and libraries": RESERVED}
        totals.append((sum(parts.values()) + peak_of(LLADA, replace(settings, batch=batch))) / 1e9)
        shown = fit_table(LLADA, replace(settings, batch=batch)).splitlines()
        assert f"{totals[-1]:.2f}" == next(line for line in shown if line.startswith("total")).split()[-2]
    assert totals[0] <= 80 < totals[1]


def test_rl_is_computed_for_its_recipe_and_says_so(tmp_path, capsys):
    LLADA.save_pretrained(tmp_path)
    short = ["fit", "--model_path", str(tmp_path), "--stage", "rl", "--gpus", "8", "--zero", "2"]
    main(make_parser().parse_args(short))
    head, _, table = capsys.readouterr().out.partition("\n\n")
    assert {"batch 6", "length 456", "load_in_4bit True", "lora_targets all-linear"} < {*head.split(", ")}
    words = ["--config", str(ROOT / "diffu-grpo" / "slurm_scripts" / "train.yaml"), "--output_dir", "x"]
    settings, model = rl_parser().parse_args_and_config([*words, "--use_cpu", "true", "--bf16", "false"])
    whole = f"--batch {settings.per_device_train_batch_size} --method {settings.method} --lora_r {model.lora_r}".split()
    whole += ["--length", str(settings.max_prompt_length + settings.max_completion_length), "--load_in_4bit"]
    whole += [
        "--lora_targets",
        *model.lora_target_modules,
        "--steps_per_generation",
        str(settings.steps_per_generation),
    ]
    main(make_parser().parse_args([*short, *whole]))
    assert capsys.readouterr().out.partition("\n\n")[2] == table


def test_every_method_says_what_is_stored_of_its_views():
    for method in METHODS:
        args = make_parser().parse_args(["fit", "--model_path", "m", "--stage", "rl", "--method", method])
        assert method_sizes(with_recipe(args), None)["stored"] > 0, method


def test_a_method_says_what_is_stored_of_its_views_and_whether_there_is_a_reference(tmp_path, capsys):
    def found(*words, block_size=None):
        args = make_parser().parse_args(["fit", "--model_path", "m", "--stage", "rl", *words])
        return method_sizes(with_recipe(args), block_size)

    canvas = ("--length", "40", "--max_completion_length", "32", "--diffusion_steps", "16", "--gpus", "16")
    token = 40 + 32 * 4  # noise, weights; old and reference log-probs are as large as weights
    assert found("--beta", "0.04", *canvas) == {
        "beta": 0.04,
        "views": 1,
        "canvas": 32,
        "stored": 12 * (token + 2 * 32 * 4),
    }
    assert found("--beta", "0.0", *canvas)["stored"] == 12 * (token + 32 * 4)
    with pytest.raises(ValueError, match="4-bit weights are frozen"):
        main(make_parser().parse_args(["fit", "--model_path", "m", "--stage", "rl", "--load_in_4bit", "--lora_r", "0"]))
    twice = found("--method", "espo", "--beta", "1.0", "--steps_per_generation", "2", *canvas)
    assert (twice["views"], twice["stored"]) == (4, 2 * 8 * 4 * (token + 2 * 32 * 4))
    split = found("--method", "unigrpo", "--beta", "1.0", *canvas)  # 35 views in four updates, KL to the old policy
    assert (split["beta"], split["views"], split["stored"]) == (0.0, 9, 4 * 35 * (token + 32 * 4))
    assert found("--method", "wd1", *canvas)["stored"] == 12 * token  # reads no old log-probs
    with pytest.raises(ValueError, match=r"max_completion_length \(32\) must be a multiple of block_length \(24\)"):
        found("--block_length", "24", *canvas)
    assert found("--method", "just-grpo", "--beta", "0.0", *canvas)["views"] == 32
    stepwise = ("--method", "cj-grpo", "--beta", "0.0")
    assert found(*stepwise, *canvas)["views"] == 16
    assert found(*stepwise, *canvas, block_size=8)["views"] == 4  # a step of every block
    edits = found(*stepwise, *canvas, "--edit_threshold", "0.5")
    passes = 16 + 16  # those after the last mask, too; ids and log-probs of each
    assert (edits["views"], edits["stored"]) == (passes, passes * (token + 32 * 20))
    LLADA.save_pretrained(tmp_path)
    for method, kept in (("espo", True), ("tracerl", False)):
        words = ["--stage", "rl", "--method", method, "--lora_r", "0", "--length", "64"]
        main(make_parser().parse_args(["fit", "--model_path", str(tmp_path), *words]))
        assert ("reference" in capsys.readouterr().out) == kept


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_the_tokens_of_passes_with_a_cache_are_those_that_a_rollout_processes(tiny_model_dir, cache, shift):
    model: Any = load_model(tiny_model_dir)
    if shift:
        config = model.config
        config.predicts_next_token = True
        model = prepare(AutoModelForCausalLM.from_config(config)).eval()
    sampling = SamplingSettings(16, 4, 8, sampler="cached", kv_cache=cache)
    processed = []

    def note(module: Any, args: Any, options: Any) -> None:
        processed.append(options["input_ids"].numel() if "input_ids" in options else args[0].numel())

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    prompt = torch.randint(8, 50, (1, 10), generator=torch.Generator().manual_seed(0))
    rollout(model, prompt, torch.ones_like(prompt), sampling, mask_token_id=3)
    assert len(processed) == sampling.max_passes() == 8
    assert sum(processed) == window_tokens(sampling, 26, shift)


def test_turns_of_sft_keep_the_activations_of_each(kind_dirs, capsys):
    def largest(*words):
        command = ["fit", "--model_path", str(kind_dirs["llama"]), "--stage", "sft", "--length", "64", *words]
        main(make_parser().parse_args(command))
        return int(capsys.readouterr().out.split()[-1])

    assert largest() // 2 == pytest.approx(largest("--edit_turns", "2"), rel=1e-3)


def test_a_mixtures_parameters_are_counted_by_hand_for_llada2_mini(tmp_path, monkeypatch):
    sizes: dict[str, Any] = dict(
        hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512, num_hidden_layers=20
    )
    sizes |= dict(num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=256, num_experts_per_tok=8)
    raw = config_of("llada2_moe", **sizes, n_group=8, topk_group=4, vocab_size=157184, mask_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, _ = native_config(str(tmp_path))
    expert = 3 * 2048 * 512
    layer = 2048 * (16 + 4 + 4) * 128 + 16 * 128 * 2048 + 2 * 128 + 2 * 2048
    shared = 2 * 157184 * 2048 + 2048 + 20 * layer + 3 * 2048 * 5120 + 19 * (256 * 2048 + expert)
    total, active = total_and_active(config)
    assert total == shared + 19 * 256 * expert == 16_255_638_528
    assert active == shared + 19 * 8 * expert == 1_432_968_192
    monkeypatch.setattr("d1.commands.footprint.activation_moments", lambda *_: [Moment(0.0, 1.0)])
    first = fit_table(config, FitSettings("eval")).splitlines()[0]
    assert first.split() == ["parameters", "16.26", "billion,", "1.43", "active", "per", "token"]
    assert "active" not in fit_table(LLADA, FitSettings("eval"))


@pytest.mark.parametrize(("layers", "kernel"), [(1, "flex_attention"), (2, "flash_attention_2")])
def test_short_models_whatever_kernel_their_config_names(kind_dirs, kind, tmp_path, layers, kernel):
    """Released configs name the kernel that their authors used; `layer_types` has one entry per layer."""
    config = json.loads((kind_dirs[kind] / "config.json").read_text())
    if layers == 2 and "layer_types" not in config:
        pytest.skip("one length is enough where layers have no types")
    config["n_layers" if kind == "llada" else "num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = ["full_attention", "sliding_attention"][:layers]
    config |= {"attn_implementation": kernel, "_attn_implementation": kernel}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, _ = native_config(str(tmp_path))
    settings = FitSettings("sft", length=64, dtype="float32", lora_r=0)
    activations = activation_bytes(read, settings)
    assert sum(activations) > 0
    sizes = [resident_bytes(with_layers(read, layers + more), settings)["weights"] for more in range(3)]
    assert sizes[0] == resident_bytes(read, settings)["weights"]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
    named = type(read)(**(read.to_dict() | {"attn_implementation": kernel}))
    assert activation_bytes(named, settings) == activations
