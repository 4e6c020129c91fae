"""Models published as block diffusion or as mixtures of experts: read, run and written back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from d1.__main__ import main, make_parser
from d1.models import convert, load_model
from d1.models.adapters import save_learnt
from d1.models.kinds import KINDS, kind_of
from tests.d1.released import (
    BLOCKS,
    CONFIGS,
    config_of,
    read_files,
    seen_in_blocks,
    twin_logits,
    write_files,
    write_released,
)

IDS = torch.randint(4, 64, (2, 11), generator=torch.Generator().manual_seed(0))
MIXTURES = ("sdar_moe", "lladamoe", "llada2_moe")


def run(*words: object) -> None:
    main(make_parser().parse_args([str(word) for word in words]))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


def assert_same_files(before: Path, after: Path, but: str = "nothing") -> None:
    """Every tensor equal byte for byte, except those with `but` in their name, and every field of the config."""
    old, new = read_files(before), read_files(after)
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert weight.dtype == new[name].dtype, name
        same = torch.equal(weight.view(torch.uint8), new[name].view(torch.uint8))
        assert same != (but in name), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    codes = [config.pop("auto_map", {}) for config in configs]
    assert configs[0] == configs[1]
    assert all(code.endswith(codes[0][name]) for name, code in codes[1].items())


@pytest.mark.parametrize("released", CONFIGS)
def test_logits_are_those_of_the_slow_twin(kind_dirs, released):
    model: Any = load_model(kind_dirs[released])
    assert isinstance(model, AutoModelForCausalLM.from_config(model.config).__class__)
    seen = seen_in_blocks(11, model.config.block_size) if released in BLOCKS else None
    logits, twin = logits_of(model), torch.stack([twin_logits(kind_dirs[released], row, seen) for row in IDS])
    if KINDS[released].shift:
        logits, twin = logits[:, 1:], twin[:, :-1]
    torch.testing.assert_close(logits, twin, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("released", "fields"),
    [
        ("lladamoe", {"norm_topk_prob": True, "model_type": "llada", "architectures": ["LLaDAMoEModelLM"]}),
        ("llada2_moe", {"first_k_dense_replace": 0, "num_shared_experts": 2, "n_group": 1, "topk_group": 1}),
    ],
)
def test_other_settings_equal_the_twin_too(tmp_path, released, fields):
    torch.manual_seed(3)
    folder = write_released(tmp_path / "a", released, **fields)
    model = load_model(folder)
    seen = seen_in_blocks(11, 3) if released in BLOCKS else None
    torch.testing.assert_close(logits_of(model, IDS[:1])[0], twin_logits(folder, IDS[0], seen), atol=1e-5, rtol=0)
    convert.export(str(folder), str(tmp_path / "b"), released)
    assert_same_files(folder, tmp_path / "b")


@pytest.mark.parametrize(
    ("released", "config", "expected"),
    [
        ("sdar", {"block_size": 64}, (64, 3)),
        ("sdar", {"block_size": None, "mask_token_id": None}, (4, 151669)),
        ("Fast_dLLM_Qwen", {"bd_size": 16, "mask_token_id": None}, (16, 151665)),
        ("llada2_moe", {"mask_token_id": None, "block_size": None}, (32, 156895)),
        ("lladamoe", {"mask_token_id": None}, (None, 156895)),
    ],
)
def test_block_size_and_mask_are_the_configs_or_else_the_kinds(tmp_path, released, config, expected):
    model: Any = load_model(write_released(tmp_path / "a", released, **config))
    assert (getattr(model.config, "block_size", None), model.config.mask_token_id) == expected
    model.save_pretrained(tmp_path / "b")
    again: Any = load_model(tmp_path / "b")
    assert (getattr(again.config, "block_size", None), again.config.mask_token_id) == expected
    assert kind_of(again.config) is KINDS[KINDS[released].becomes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("released", [*CONFIGS, "Dream"])
def test_what_is_read_and_written_again_is_the_same_byte_for_byte(kind_dirs, tmp_path, monkeypatch, released, dtype):
    """From the released files and from what training saves, with other sizes of files."""
    if dtype == torch.bfloat16 and released == "Dream":
        pytest.skip("its fixture is in float32")
    source = kind_dirs[released]
    if dtype == torch.bfloat16:
        torch.manual_seed(2)
        source = write_released(tmp_path / "bf16", released, dtype, torch_dtype="bfloat16")
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    run("export", source, tmp_path / "direct", "--format", released)
    files = list((tmp_path / "direct").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 30_000 for file in files)
    if released != "Dream":
        assert_same_files(source, tmp_path / "direct")
    assert torch.equal(logits_of(load_model(tmp_path / "direct")), logits_of(load_model(source)))
    load_model(source, "auto").save_pretrained(tmp_path / "native")
    assert json.loads((tmp_path / "native" / "config.json").read_text())["model_type"] == KINDS[released].becomes
    run("export", tmp_path / "native", tmp_path / "again", "--format", released)
    old, new = read_files(source), read_files(tmp_path / "again")
    assert old.keys() == new.keys()
    assert all(torch.equal(weight, new[name].to(weight.dtype)) for name, weight in old.items())


def test_weights_of_another_precision_than_the_rest_keep_it(tmp_path):
    """A router in float32 among weights of 16 bits, in the first file, whatever `config.json` says."""
    torch.manual_seed(0)
    first = write_released(tmp_path / "a", "llada2_moe", torch.bfloat16)
    config, weights = json.loads((first / "config.json").read_text()), read_files(first)
    routers = {name: torch.randn(w.shape) for name, w in weights.items() if ".mlp.gate." in name}
    source = write_files(tmp_path / "b", config | {"torch_dtype": "bfloat16"}, routers | weights | routers, shards=3)
    run("export", source, tmp_path / "c", "--format", "llada2_moe")
    assert_same_files(source, tmp_path / "c")
    assert load_model(source, "auto").dtype == torch.bfloat16
    load_model(source, "auto").save_pretrained(tmp_path / "native")
    run("export", tmp_path / "native", tmp_path / "d", "--format", "llada2_moe")
    biases = [name for name in routers if name.endswith("expert_bias")]
    assert all(torch.equal(routers[name], read_files(tmp_path / "d")[name]) for name in biases)


@pytest.mark.parametrize("released", [*CONFIGS, "llada"])
def test_merging_writes_the_format_of_the_base(kind_dirs, tmp_path, released):
    base = kind_dirs[released]
    torch.manual_seed(0)
    peft: Any = get_peft_model(load_model(base), LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    peft.save_pretrained(str(tmp_path / "adapter"))
    expected = logits_of(peft.eval())
    run("merge", base, tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits_of(load_model(tmp_path / "out")), expected, atol=1e-4, rtol=1e-4)
    if released != "llada":
        assert_same_files(base, tmp_path / "out", but="attention.dense" if released == "llada2_moe" else "o_proj")
    else:
        assert read_files(base).keys() == read_files(tmp_path / "out").keys()


def test_a_format_is_written_from_its_own_models_only(kind_dirs, tmp_path):
    with pytest.raises(ValueError, match="only a model that was read from this format"):
        run("export", kind_dirs["qwen3"], tmp_path / "out", "--format", "sdar")
    with pytest.raises(ValueError, match="was released as 'sdar', not as 'sdar_moe'"):
        run("export", kind_dirs["sdar"], tmp_path / "out", "--format", "sdar_moe")
    with pytest.raises(ValueError, match="'qwen3' is not a released format"):
        convert.export(str(kind_dirs["sdar"]), str(tmp_path / "out"), "qwen3")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("released", MIXTURES)
def test_experts_that_come_stacked(kind_dirs, tmp_path, released):
    """Stacked as in Transformers, gate before up."""
    weights, stacks = read_files(kind_dirs[released]), {}
    for name in [name for name in weights if ".experts.0." in name]:
        parts = (weights.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(8) if e < count(released))
        stacks[name.replace(".experts.0.", ".experts.").removesuffix(".weight")] = torch.stack(list(parts))
    for name in [name for name in stacks if name.endswith("gate_proj")]:
        both = stacks.pop(name), stacks.pop(name.replace("gate_proj", "up_proj"))
        stacks[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    config = json.loads((kind_dirs[released] / "config.json").read_text())
    folder = write_files(tmp_path / "stacked", config, weights | stacks)
    assert torch.equal(logits_of(load_model(folder)), logits_of(load_model(kind_dirs[released])))
    run("export", folder, tmp_path / "out", "--format", released)
    assert_same_files(kind_dirs[released], tmp_path / "out")


def count(released: str) -> int:
    return int(CONFIGS[released]["num_experts"])


def test_an_expert_that_is_missing_or_of_another_width_is_an_error(kind_dirs, tmp_path):
    config = json.loads((kind_dirs["llada2_moe"] / "config.json").read_text())
    weights = read_files(kind_dirs["llada2_moe"])
    lost = {name: w for name, w in weights.items() if ".1.mlp.experts.7." not in name}
    with pytest.raises(ValueError, match=r"do not fit(.|\n)*model\.layers\.1\.mlp\.experts"):
        load_model(write_files(tmp_path / "lost", config, lost))
    wide = weights | {"model.layers.2.mlp.experts.3.up_proj.weight": torch.zeros(17, 32)}
    with pytest.raises(ValueError, match=r"do not fit the config: some cannot be stacked"):
        load_model(write_files(tmp_path / "wide", config, wide))


def test_loading_one_kind_leaves_the_next_as_it_was(kind_dirs, tmp_path):
    """LLaDA2's converters apply to Glm4Moe only while a LLaDA2 is loaded."""
    model = load_model(kind_dirs["llada2_moe"])
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("query_key_value" in name for name in names)


def test_illada_is_a_llada_with_fewer_key_heads_and_a_tied_head(tmp_path, llada_writer):
    def tie(folder: Path) -> Path:
        weights, config = read_files(folder), json.loads((folder / "config.json").read_text())
        del weights["model.transformer.ff_out.weight"]
        return write_files(tmp_path / "tied", config, weights)

    torch.manual_seed(0)
    fields = {"weight_tying": True, "n_kv_heads": 1, "mask_token_id": 5, "flash_attention": True}
    folder = tie(llada_writer(tmp_path / "own", **fields))
    model: Any = load_model(folder)
    assert (model.config.num_key_value_heads, model.config.mask_token_id) == (1, 5)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    weights = read_files(folder)
    weights["model.transformer.ff_out.weight"] = weights["model.transformer.wte.weight"].clone()
    config = json.loads((folder / "config.json").read_text()) | {"weight_tying": False}
    untied = load_model(write_files(tmp_path / "untied", config, weights))
    assert torch.equal(logits_of(model), logits_of(untied))
    run("export", folder, tmp_path / "out", "--format", "llada")
    old, new = read_files(folder), read_files(tmp_path / "out")
    assert old.keys() == new.keys()
    assert all(torch.equal(weight, new[name]) for name, weight in old.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["flash_attention"] is True


@pytest.mark.parametrize(
    ("released", "fields", "message"),
    [
        ("lladamoe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("lladamoe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ("lladamoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("lladamoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("lladamoe", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
        ("lladamoe", {"rope_theta": None}, "lacks rope_theta"),
        ("lladamoe", {"num_experts": None}, "lacks num_experts"),
        ("llada2_moe", {"use_bias": True}, "use_bias"),
        ("llada2_moe", {"num_shared_experts": 0}, "no shared expert"),
        ("llada2_moe", {"edit_threshold": 0.9}, "edit_threshold 0.9: its model edits .* Without this field it loads"),
        ("llada2_moe", {"enable_insertion": True}, "enable_insertion True: its model inserts .* with or without this"),
        ("llada2_moe", {"delete_token_id": 156930}, "delete_token_id 156930: .* deletes .* with or without this field"),
        ("llada2_moe", {"split_token_id": 156931}, "split_token_id 156931: its model inserts .* with or without this"),
        ("llada2_moe", {"expert_capacity": 48}, "expert_capacity 48: .*shares the experts .*LLaDA2.0 and 2.1 can be"),
    ],
)
def test_what_no_class_here_has_is_refused_by_name(tmp_path, released, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(config_of(released, **fields)))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_editing_that_is_turned_off_is_no_reason(tmp_path):
    fields = {"enable_editing": False, "insert_threshold": None, "expert_capacity": None}
    load_model(write_released(tmp_path, "llada2_moe", **fields))


def test_what_sft_learnt_goes_through_a_released_format(tmp_path):
    """Next to an adapter, into its merge and an export; there it asks no class for editing."""
    base = write_released(tmp_path / "base", "llada2_moe")
    peft = get_peft_model(load_model(base), LoraConfig(target_modules=["q_proj"]))
    peft.config.edit_noise = "draft"
    peft.save_pretrained(tmp_path / "adapter")
    save_learnt(peft, tmp_path / "adapter")
    run("merge", base, tmp_path / "adapter", tmp_path / "merged")
    run("export", tmp_path / "merged", tmp_path / "again", "--format", "llada2_moe")
    for folder in ("adapter", "merged", "again"):
        assert load_model(tmp_path / folder).config.edit_noise == "draft"
    assert not hasattr(load_model(base).config, "edit_noise")
