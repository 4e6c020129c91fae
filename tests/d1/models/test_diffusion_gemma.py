"""DiffusionGemma's two passes against Transformers' own class: text beyond the window, padding, several canvases."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from d1.commands.footprint import FitSettings, build, depths, fake_step, total_and_active, with_layers
from d1.models import load_model
from d1.models.adapters import add_adapter, lora_targets, merge_adapter
from d1.models.attention import count_positions
from d1.models.convert import export, merge
from d1.models.diffusion_gemma import canvas_states, decode, encode, soft_embeddings, unwrapped
from d1.models.head import backbone_and_head
from d1.models.kinds import KINDS, Kind, check_since, native_config
from d1.models.load import prepare
from tests.d1.diffusion_gemma import CANVAS, VOCAB, WINDOW, needs_class, tiny, write_tiny
from tests.rounding import LOGITS, assert_near

pytestmark = needs_class
PROMPTS = (3, 11)  # tokens; the second is beyond the window
CANVASES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("gemma"))


def rows(seed=0):
    """Ids and visible tokens (rows, prompt + canvases), padded on the left, and what the decoder reads."""
    random, width = torch.Generator().manual_seed(seed), max(PROMPTS)
    ids = torch.randint(2, VOCAB - 1, (len(PROMPTS), width + CANVASES * CANVAS), generator=random)
    visible = torch.arange(ids.shape[1]) >= torch.tensor([[width - length] for length in PROMPTS])
    canvas = torch.randint(0, VOCAB, (len(PROMPTS), CANVASES * CANVAS), generator=random)
    return ids.masked_fill(~visible, 0), visible.long(), canvas


@torch.no_grad()
def of_transformers(model, ids, visible, canvas, conditioning=None):
    """Logits (rows, canvas, vocab) of the class itself: each row alone, canvas by canvas, with its own cache."""
    from transformers import DynamicCache

    found = []
    for row, real, noised in zip(ids, visible.bool(), canvas, strict=True):
        text, length = row[real], int(real.sum()) - canvas.shape[1]
        cache, logits = DynamicCache(config=model.config.text_config), []
        ends = [0, *range(length, len(text), CANVAS)]
        for number, (first, end) in enumerate(pairwise(ends)):
            model.model.encoder(input_ids=text[None, first:end], cache=cache)
            shown = noised[None, number * CANVAS :][:, :CANVAS]
            given = None if conditioning is None else conditioning[None, len(found), number * CANVAS :][:, :CANVAS]
            logits.append(model(decoder_input_ids=shown, cache=cache, self_conditioning_logits=given).logits[0])
        found.append(torch.cat(logits))
    return torch.stack(found)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_canvases_of_padded_rows_in_one_pass_equal_the_classs_own(folder, kernel):
    model = load_model(folder, attn_implementation=kernel)
    ids, visible, canvas = rows()
    states = canvas_states(model, ids, canvas, visible)
    assert_near(backbone_and_head(model)[1](states), of_transformers(tiny(), ids, visible, canvas))
    assert max(PROMPTS) > WINDOW > min(PROMPTS)


@torch.no_grad()
def test_a_context_read_in_parts_with_forgotten_keys_and_self_conditioning(folder):
    model, (ids, visible, canvas) = load_model(folder), rows()
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(*canvas.shape, VOCAB, generator=random) * 3
    expected = of_transformers(tiny(), ids, visible, canvas, logits)
    head, context, width = backbone_and_head(model)[1], None, max(PROMPTS)
    soft = soft_embeddings(model, logits.flatten(0, 1)).unflatten(0, canvas.shape)
    for number, first in enumerate(range(width, ids.shape[1], CANVAS)):
        new = slice(0 if context is None else first - CANVAS, first)
        context, _ = encode(model, ids[:, new], visible[:, new], context)
        context.forget(model.config)
        own = slice(number * CANVAS, (number + 1) * CANVAS)
        positions = count_positions(visible)[:, first : first + CANVAS]
        for live in (torch.arange(2), torch.tensor([1])):  # also when a row has left
            states = decode(
                model,
                canvas[live, own],
                positions[live],
                positions[live, :1].expand(-1, CANVAS),
                context.rows(live),
                soft[live, own],
            )
            assert_near(head(states), expected[live, own])


@torch.no_grad()
def test_encoder_states_predict_the_next_token_as_the_classs_own(folder):
    model, own, (ids, visible, _) = load_model(folder), tiny(), rows()
    states = encode(model, ids, visible)[1]
    for row, real, found in zip(ids, visible.bool(), states, strict=True):
        expected = own.model.encoder(input_ids=row[real][None]).last_hidden_state[0]
        assert_near(found[real], expected)


def test_export_gives_back_the_released_files(folder, tmp_path):
    export(str(folder), str(tmp_path / "out"), "diffusion_gemma")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")]
    assert {**configs[0], "dtype": 0} == {**configs[1], "dtype": 0}
    saved = load_model(folder)
    saved.tie_weights()  # as trainers may
    saved.save_pretrained(tmp_path / "saved")  # what training saves
    again = load_model(tmp_path / "saved")
    expected = saved.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in again.state_dict().items())


def adapted(model, seed=0):
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=lora_targets(model, "all-linear")))
    for name, weight in peft.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5)
    return peft


def test_one_adapter_serves_encoder_and_decoder_and_can_be_merged(folder, tmp_path):
    ids, visible, canvas = rows()
    plain, peft = canvas_states(load_model(folder), ids, canvas, visible), adapted(load_model(folder))
    names = [name for name, weight in peft.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * (4 + 3 + 3 + 9)  # q, k, v, o of one layer, which two lack v; and the feed-forwards
    assert all(".decoder.layers." in name for name in names)
    states = canvas_states(peft, ids, canvas, visible)
    peft.save_pretrained(tmp_path / "adapter")
    again = add_adapter(load_model(folder), str(tmp_path / "adapter"))
    assert torch.equal(canvas_states(again, ids, canvas, visible), states)
    merge(str(folder), [str(tmp_path / "adapter")], str(tmp_path / "merged"))
    merged = canvas_states(load_model(tmp_path / "merged"), ids, canvas, visible)
    assert_near(merged, states, least=4 * LOGITS)  # a merged weight is rounded once more, and the adapter is large
    assert (plain - states).abs().max() > 0.1
    # The encoder has the adapter, too.
    text = [encode(one, ids, visible)[1][visible.bool()] for one in (load_model(folder), peft)]
    assert (text[0] - text[1]).abs().max() > 0.1
    in_memory = merge_adapter(copy.deepcopy(peft), "x")
    assert_near(canvas_states(in_memory, ids, canvas, visible), states, least=4 * LOGITS)


def test_adapters_of_other_trainers_have_two_parts_and_are_refused(folder, tmp_path):
    model, ends = tiny(), r"model\.(encoder\.language_model|decoder)\.layers\.\d+\.self_attn\.[qkvo]_proj"
    get_peft_model(model, LoraConfig(r=2, target_modules=ends)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of the encoder and of the decoder"):
        add_adapter(load_model(folder), str(tmp_path))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_gradient_checkpointing_changes_no_gradient(folder, with_adapter):
    grads = []
    for checkpointing in (False, True):
        model = adapted(load_model(folder)) if with_adapter else load_model(folder)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids, visible, canvas = rows()
        canvas_states(model, ids, canvas, visible).square().sum().backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    used = {name for name, grad in grads[0].items() if grad is not None}
    assert used == grads[0].keys() - {"model.decoder.self_conditioning.pre_norm.weight"} or not with_adapter
    for name in used:
        torch.testing.assert_close(grads[1][name], grads[0][name], atol=1e-4, rtol=1e-4)


def test_gradients_reach_shared_weights_from_both_passes(folder):
    model, (ids, visible, canvas) = load_model(folder).double(), rows()
    model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    weight = model.model.decoder.layers[0].self_attn.k_proj.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)

    def value():
        return canvas_states(model, ids, canvas, visible).square().sum()

    slope = (torch.autograd.grad(value(), weight)[0] * direction).sum()
    with torch.no_grad():
        weight += 1e-5 * direction
        above = value()
        weight -= 2e-5 * direction
        below = value()
    torch.testing.assert_close(slope, (above - below) / 2e-5, rtol=1e-3, atol=0)  # norms compute in fp32


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "bidirectional"),
    ],
)
def test_configs_that_do_not_share_or_are_not_causal_are_refused(folder, tmp_path, change, problem):
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] | change.pop("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps(raw | change | {"text_config": text}))
    with pytest.raises(ValueError, match=problem):
        load_model(tmp_path)


def test_a_whole_text_is_not_a_pass_and_an_old_version_is_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"d1\.models\.diffusion_gemma"):
        backbone_and_head(load_model(folder))[0](torch.zeros(1, 3, dtype=torch.long))
    monkeypatch.setattr("d1.models.kinds.version", lambda name: "5.23.0")
    with pytest.raises(ValueError, match=r"needs Transformers 5\.24 or newer, and 5\.23\.0 is installed"):
        load_model(folder)
    check_since(Kind(), "llama", "other kinds run")
    assert KINDS["diffusion_gemma"].since == "5.24"
    monkeypatch.undo()
    assert prepare(tiny()).config.block_size == CANVAS


@pytest.mark.parametrize("stage", ["sft", "rl", "eval"])
def test_fit_repeats_the_pattern_of_layers_and_counts_what_a_step_makes(folder, stage):
    config = native_config(str(folder))[0]
    assert depths(config) == (2, 4)  # a windowed layer and a full one, whose heads are wider
    settings = FitSettings(stage, length=24, canvas=8, dtype="float32", lora_r=2)
    model = build(with_layers(config, 4), settings)
    layers = unwrapped(model).model.decoder.layers
    sizes = [{name: weight.shape for name, weight in layer.named_parameters()} for layer in layers]
    assert sizes[0] == sizes[2] != sizes[1] == sizes[3]
    peaks = [fake_step(config, settings, 2, rows).peak for rows in (16, 32, 48)]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.05)
    assert fake_step(config, settings, 4, 32).peak > peaks[1] or stage == "eval"


def test_the_number_of_parameters_is_that_of_the_formula(folder):
    config = native_config(str(folder))[0]
    total, active = total_and_active(config)
    width, mlp, experts, inner = 32, 48, 4, 8
    sliding, full = width * 8 * (4 + 2 + 2 + 4) + 2 * 8, width * 16 * (4 + 1 + 4) + 2 * 16  # q, k, v, o, two norms
    layer = 3 * width * mlp + 3 * experts * inner * width + experts * width + width + experts + 7 * width
    own = VOCAB * width + width + 3 * width * mlp + width  # embeddings, norm, self-conditioning
    vision = sum(
        weight.numel() for name, weight in tiny().named_parameters() if "vision_tower" in name or "embed_vision" in name
    )
    assert total == sliding + 2 * full + 3 * layer + own + vision
    assert total - active == 3 * 3 * (experts - 2) * inner * width
