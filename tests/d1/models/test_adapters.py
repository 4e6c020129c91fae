"""LoRA adapters: named targets, both naming schemes of the weights, chains of adapters, 4-bit weights, both stages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d1.models import load_model, load_tokenizer
from d1.models.adapters import lora_targets, merge_adapter, skip_input_casts
from d1.models.convert import export, merge, write_weights
from d1.models.folder import ModelFolder
from d1.models.kinds import KINDS
from d1.rl import train as rl
from d1.sampling.settings import ModelFlags
from d1.sft import train as sft
from d1.transformers_bridge import stored_weights
from tests.commands import ROOT
from tests.d1.conftest import write_kind
from tests.d1.released import IDS, logits_of
from tests.faults import edit_json
from tests.rounding import assert_near

MLP_NAMES = {  # kind -> what "all-linear" adds to "attention", by hand from the model code
    "bert": {"intermediate.dense", "output.dense"},
    "roberta": {"intermediate.dense", "output.dense"},
    "modernbert": {"mlp.Wi", "mlp.Wo"},
}


def train_adapter(model: Any, folder: Path, name: str = "all-linear", seed: int = 0) -> Tensor:
    """Save an adapter with random weights on `model`; returns the logits it gives."""
    torch.manual_seed(seed)
    targets = lora_targets(model, name)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    peft.eval().save_pretrained(str(folder))
    return logits_of(peft)


@pytest.mark.parametrize("name", ["attention", "all-linear"])
def test_targets_are_the_linear_layers_of_each_block_and_nothing_else(kind_dirs, kind, name):
    model = load_model(kind_dirs[kind])
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    blocks = {n for n in linear if ".layers." in n or ".layer." in n}
    mlp = {n for n in blocks if ".mlp." in n or any(n.endswith(f".{end}") for end in MLP_NAMES.get(kind, ()))}
    mlp -= {n for n in mlp if "attention.output" in n}
    peft = get_peft_model(model, LoraConfig(target_modules=lora_targets(model, name)))
    adapted = {n.removesuffix(".lora_A") for n, _ in peft.named_modules() if n.endswith(".lora_A")}
    hit = {n.removeprefix("base_model.model.") for n in adapted}
    if name == "all-linear" and (stacks := {n for n, _ in model.named_modules() if n.endswith(".mlp.experts")}):
        # PEFT wraps both stacks of a layer's experts, one inside the other, and no other part of its feed-forward
        blocks = (blocks - mlp) | stacks | {f"{n}.base_layer" for n in stacks}
    assert hit == (blocks if name == "all-linear" else blocks - mlp)


def test_names_and_lists_of_targets(kind_dirs):
    model: Any = load_model(kind_dirs["llama"])
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora_targets(model, "attention") == lora_targets(model, ["attention"]) == attention
    assert lora_targets(model, "q_proj") == lora_targets(model, ["q_proj"]) == ["q_proj"]
    assert lora_targets(model, ["attention", "up_proj"]) == [*attention, "up_proj"]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no modules every for LoRA: use attention, all-linear"):
        lora_targets(model, "every")


def test_an_adapter_folder_loads_with_its_base(kind_dirs, kind, tmp_path):
    expected = train_adapter(load_model(kind_dirs[kind]), tmp_path)
    assert (expected - logits_of(load_model(kind_dirs[kind]))).abs().max() > 1e-3
    for model in (load_model(tmp_path), load_model(kind_dirs[kind], adapter=tmp_path)):
        assert isinstance(model, PeftModel)
        assert not model.training
        assert any(p.requires_grad for p in model.parameters()), "training must be able to go on"
        assert_near(logits_of(model), expected)


def test_an_adapter_that_is_given_twice_is_named(kind_dirs, tmp_path, monkeypatch):
    """However its path is spelt."""
    train_adapter(load_model(kind_dirs["llama"]), tmp_path / "a")
    train_adapter(merge_adapter(load_model(tmp_path / "a"), tmp_path / "a"), tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    message = "is given as the model and as an adapter: name its base, or leave the adapter out$"
    for spelling in (tmp_path / "a", f"{tmp_path}/a/", "a", "link"):
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / "a", adapter=spelling)
        with pytest.raises(ValueError, match=rf"adapter {spelling} is given twice"):
            merge(str(kind_dirs["llama"]), [str(tmp_path / "a"), str(spelling)], str(tmp_path / "out"))
        with pytest.raises(ValueError, match=r"a is given, and \S*b is on it already: name one of them$"):
            load_model(tmp_path / "b", adapter=spelling)
    assert not (tmp_path / "out").exists()
    edit_json(tmp_path / "a" / "adapter_config.json", base_model_name_or_path="link")
    with pytest.raises(ValueError, match=r"adapter link names itself as its base"):
        load_model(tmp_path / "a")


def remote_adapter(folder: Path, base: Path, modules: dict[str, tuple[int, int]], rank: int = 4) -> dict[str, Tensor]:
    """An adapter as PEFT saves it on LLaDA's own classes; returns the change of each weight, by original name."""
    torch.manual_seed(7)
    weights, deltas = {}, {}
    for block in range(3):
        for module, (out, width) in modules.items():
            name = f"model.transformer.blocks.{block}.{module}"
            a, b = torch.randn(rank, width) * 0.2, torch.randn(out, rank) * 0.2
            weights[f"base_model.model.{name}.lora_A.weight"] = a
            weights[f"base_model.model.{name}.lora_B.weight"] = b
            deltas[f"{name}.weight"] = 16 / rank * b @ a
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=sorted(modules), base_model_name_or_path=str(base))
    config.auto_mapping = {"base_model_class": "LLaDAModelLM", "parent_library": "transformers_modules.llada"}
    config.save_pretrained(str(folder))
    return deltas


def test_an_adapter_made_on_lladas_own_classes(kind_dirs, tmp_path):
    shapes = {"q_proj": (32, 32), "v_proj": (16, 32), "attn_out": (32, 32), "ff_proj": (48, 32), "ff_out": (32, 48)}
    deltas = remote_adapter(tmp_path / "adapter", kind_dirs["llada"], shapes)
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text((kind_dirs["llada"] / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in kind_dirs["llada"].glob("*.safetensors"):
        weights |= load_file(file)
    save_file(
        {name: w + deltas.get(name, 0) for name, w in weights.items()},
        merged / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = logits_of(load_model(merged))
    assert (expected - logits_of(load_model(kind_dirs["llada"]))).abs().max() > 0.1
    torch.testing.assert_close(logits_of(load_model(tmp_path / "adapter")), expected, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_or_names_no_base_is_an_error(kind_dirs, tmp_path, llada_writer):
    base, folder = kind_dirs["llada"], tmp_path / "a"
    expected = train_adapter(load_model(base), folder)
    with pytest.raises(ValueError, match=r"does not fit the model: Error.*\n.*size mismatch"):
        load_model(llada_writer(tmp_path / "wide", d_model=64), adapter=folder)
    with pytest.raises(ValueError, match=r"llama has no adapter_config\.json"):
        load_model(tmp_path, adapter=kind_dirs["llama"])
    with pytest.raises(ValueError, match="only 'nf4' is supported"):
        load_model(base, quantization="int3")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(ValueError, match=r"load_model\(base, adapter=\.\.\.\)"):
        load_model(folder)
    assert_near(logits_of(load_model(base, adapter=folder)), expected)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    strange = weights.pop(next(iter(weights)))
    save_file(weights | {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": strange}, file)
    with pytest.raises(ValueError, match=r"does not fit the model: missing \['.*\], unexpected \['.*layers\.9"):
        load_model(base, adapter=folder)


@pytest.mark.parametrize("base", ["/home/alice/base", "../no/base", "some/base"])
def test_a_base_that_is_not_there_is_named_with_the_adapter_and_the_remedy(base, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    message = (
        rf"^adapter {tmp_path} was trained on {re.escape(base)} \(base_model_name_or_path in adapter_config.json\), "
        r"which is not there: correct that field, or name the base .* and the adapter with --checkpoint_path \(.*\)$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        load_model(tmp_path)


def test_an_adapter_without_a_tokenizer_is_read_with_that_of_the_model_that_is_named(tiny_model_dir, tmp_path):
    """PEFT saves none, and the base that it recorded may have moved."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    flags = ModelFlags(model_path=str(tiny_model_dir), checkpoint_path=str(tmp_path))
    assert flags.load_tokenizer().name_or_path == str(tiny_model_dir)
    load_tokenizer(tiny_model_dir).save_pretrained(tmp_path)
    assert flags.load_tokenizer().name_or_path == str(tmp_path)


def test_an_adapter_without_weights_is_refused_before_its_base_is_read(kind_dirs, tmp_path, monkeypatch):
    model: Any = load_model(kind_dirs["llama"])
    expected = train_adapter(model, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "adapter_model.bin")
    weights.unlink()
    assert_near(logits_of(load_model(tmp_path)), expected)
    (tmp_path / "adapter_model.bin").unlink()
    for folders in ([tmp_path], [kind_dirs["llama"], tmp_path]):
        with pytest.raises(FileNotFoundError, match=rf"^adapter {tmp_path} has no weights, neither adapter_model.safe"):
            ModelFolder.read(*folders)
    with pytest.raises(FileNotFoundError, match=r"has no weights"):
        merge(str(kind_dirs["llama"]), [str(tmp_path)], str(tmp_path / "out"))


def test_an_adapter_with_biases_is_not_merged(kind_dirs, tmp_path):
    model: Any = load_model(kind_dirs["llama"])
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=rf"adapter {tmp_path} has biases \(lora_bias in adapter_config.json\)"):
        merge_adapter(load_model(tmp_path), tmp_path)


def test_an_adapter_made_on_a_relative_path_loads_from_anywhere(kind_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(kind_dirs["llama"].parent)
    expected = train_adapter(load_model("llama"), tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    assert_near(logits_of(load_model(tmp_path / "first")), expected)
    first: Any = load_model("first")
    expected = train_adapter(merge_adapter(first, "first"), tmp_path / "second", seed=1)
    monkeypatch.chdir("/")
    assert_near(logits_of(load_model(tmp_path / "second")), expected)


def test_rl_on_top_of_sft_is_found_again_from_the_last_folder(kind_dirs, tmp_path):
    """The second adapter is trained on the merged first one; its folder alone is enough to load base + first +
    second."""
    base, sft, rl = kind_dirs["llada"], tmp_path / "sft", tmp_path / "rl"
    after_sft = train_adapter(load_model(base), sft, seed=1)
    start: Any = load_model(sft)
    start = merge_adapter(start, sft)
    torch.testing.assert_close(logits_of(start), after_sft, atol=1e-4, rtol=1e-4)
    expected = train_adapter(start, rl, seed=2)
    assert (expected - after_sft).abs().max() > 1e-3
    assert json.loads((rl / "adapter_config.json").read_text())["base_model_name_or_path"] == str(sft)
    for again in (load_model(rl), load_model(base, adapter=[sft, rl]), load_model(sft, adapter=rl)):
        assert_near(logits_of(again), expected)


def test_rl_on_top_of_an_adapter_on_the_hub_records_its_name(kind_dirs, tmp_path):
    train_adapter(load_model(kind_dirs["llada"]), tmp_path / "sft", seed=1)
    adapted: Any = load_model(tmp_path / "sft")
    start: Any = merge_adapter(adapted, "org/sft")  # as a stage does with `load_model("org/sft")`
    train_adapter(start, tmp_path / "rl", seed=2)
    recorded = json.loads((tmp_path / "rl" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert recorded == "org/sft"


def with_released_names(folder: Path) -> nn.Module:
    """Nothing but the modules of a released checkpoint, under its own names: what its own code has for PEFT."""
    root = nn.Module()
    for name, _, _, file in stored_weights(str(folder)):
        with safe_open(file, "pt") as weights:
            weight = weights.get_tensor(name)
        *path, last = name.removesuffix(".weight").split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if weight.ndim == 2:
            module.add_module(last, nn.Linear(*weight.shape[::-1], bias=False))
    return root


@pytest.mark.parametrize("kind", ["llada", "Dream", "sdar", "llada2_moe"])
@pytest.mark.parametrize("targets", ["attention", "v_proj"])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_with_released_names_changes_the_same_weights_and_comes_back(
    kind_dirs, tmp_path, kind, targets, rslora
):
    """PEFT alone puts it on the released modules; a joined projection changes by its parts' changes, one below the
    other."""
    base = kind_dirs[kind]
    model: Any = load_model(base)
    options = {"r": 4, "lora_alpha": 12, "use_rslora": rslora, "init_lora_weights": False}
    own = get_peft_model(model, LoraConfig(target_modules=lora_targets(model, targets), **options))
    own.save_pretrained(tmp_path / "own")
    export(str(tmp_path / "own"), str(tmp_path / "out"), kind)
    theirs: Any = PeftModel.from_pretrained(with_released_names(base), str(tmp_path / "out"))
    deltas = {name: of.get_delta_weight("default") for name, of in theirs.named_modules() if hasattr(of, "lora_A")}
    found: dict[str, Tensor] = {}
    for layer in range(3):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            found |= {new: of for new, of in KINDS[kind].release_weight(name, Deltas(own)) if of.any()}
    assert len(deltas) == len(found) == (3 if targets == "v_proj" else 6 if kind == "llada2_moe" else 12)
    for name, expected in found.items():
        delta = deltas[f"base_model.model.{name.removesuffix('.weight')}"]
        torch.testing.assert_close(delta, expected, atol=1e-6, rtol=1e-6)
    again = load_model(base, adapter=tmp_path / "out")
    for (name, weight), (other, same) in zip(own.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, same), name
    assert torch.equal(logits_of(again), logits_of(own.eval()))


class Deltas(dict):
    """The change of each weight of a model, by the weight's name; zeros without an adapter."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __missing__(self, name: str) -> Tensor:
        module = self.model.get_base_model().get_submodule(name.removesuffix(".weight"))
        return module.get_delta_weight("default") if hasattr(module, "lora_A") else torch.zeros_like(module.weight)


def test_nf4_weights_compute_what_their_dequantised_values_do(tmp_path, llada_writer):
    """QLoRA: blocks are 4-bit, norms, embeddings and head are not, and a LoRA on top gets gradients."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = llada_writer(tmp_path / "llada", d_model=128, mlp_hidden_size=256)
    model: Any = load_model(folder, quantization="nf4")
    plain: Any = load_model(folder)
    quantised = 0
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            quantised += 1
            assert module.weight.quant_type == "nf4"
            assert module.weight.quant_state.nested
            values = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            weight = plain.get_submodule(name).weight.data
            alike = torch.corrcoef(torch.stack([values.flatten(), weight.flatten()]))[0, 1]
            assert 0.9 < alike < 0.9999
            weight.copy_(values)
    assert quantised == 3 * 7
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=1e-4, rtol=1e-4)
    peft = get_peft_model(model, LoraConfig(target_modules=lora_targets(model, "attention")))
    peft(input_ids=IDS).logits.square().mean().backward()  # in eval mode, too: RL scores there
    assert all(p.grad is not None for p in peft.parameters() if p.requires_grad)
    for name in ("sft", "rl"):
        peft.save_pretrained(str(tmp_path / name))
    with pytest.raises(ValueError, match="4-bit weights cannot absorb an adapter"):
        load_model(folder, adapter=[tmp_path / "sft", tmp_path / "rl"], quantization="nf4")


HEADS = {"llama": ("embed_tokens", "lm_head"), "bert": ("word_embeddings", "decoder")}
HEADS |= dict.fromkeys(("llada", "Fast_dLLM_Qwen"), HEADS["llama"])
QUERY = {"bert": "query"}
TIED_CASES = [
    ("llama", {"target_modules": ["head"]}),
    ("llama", {"target_modules": ["embedding"]}),
    ("llama", {"target_modules": ["embedding", "head"]}),
    ("llama", {"target_modules": ["embedding"], "ensure_weight_tying": True}),
    ("llama", {"modules_to_save": ["head"]}),
    ("llama", {"modules_to_save": ["embedding"]}),
    ("llama", {"modules_to_save": ["embedding"], "ensure_weight_tying": True}),
    ("llama", {"trainable_token_indices": [5, 6]}),
    ("bert", {"target_modules": ["head"]}),
    ("bert", {"target_modules": ["embedding"]}),
    ("bert", {"modules_to_save": ["head"]}),
    ("llada", {"target_modules": ["head"]}),
    ("Fast_dLLM_Qwen", {"target_modules": ["head"]}),
]


def write_tied(folder: Path, kind: str) -> Path:
    """A checkpoint whose head is the embedding, and only the embedding is in its file."""
    write_kind(folder, kind)
    name = "weight_tying" if kind == "llada" else "tie_word_embeddings"
    edit_json(folder / "config.json", **{name: True})
    for index in folder.glob("*.index.json"):
        index.unlink()
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    for name in ("lm_head.weight", "model.transformer.ff_out.weight", "cls.predictions.decoder.weight"):
        weights.pop(name, None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(("kind", "options"), TIED_CASES)
def test_an_adapter_on_tied_weights_computes_the_same_merged_and_unmerged(tmp_path, kind, options):
    """In memory, in a merged checkpoint, and in what servers get, which also leaves the model as it was."""
    base, folder = write_tied(tmp_path / "base", kind), tmp_path / "adapter"
    names = dict(zip(("embedding", "head"), HEADS[kind], strict=True))
    fields: dict[str, Any] = {"target_modules": [QUERY.get(kind, "q_proj")], **options}
    for field in ("target_modules", "modules_to_save"):
        fields[field] = [names.get(name, name) for name in fields.get(field, ())] or None
    peft: Any = get_peft_model(load_model(base), LoraConfig(r=4, lora_alpha=8, **fields))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    peft.eval().save_pretrained(str(folder))
    unmerged = logits_of(load_model(folder))
    assert (unmerged - logits_of(load_model(base))).abs().max() > 0.1

    def check(model: Any) -> None:
        # Sums of 32 products of fp32, in another order; the logits are below 100.
        torch.testing.assert_close(logits_of(model), unmerged, atol=2e-4, rtol=1e-5)

    check(peft)
    check(merge_adapter(load_model(folder), folder))
    merge(str(base), [str(folder)], str(tmp_path / "merged"))
    check(load_model(tmp_path / "merged"))
    adapted = load_model(folder)
    write_weights(adapted, tmp_path / "sent")
    check(load_model(tmp_path / "sent"))
    assert torch.equal(logits_of(adapted), unmerged)
    parts = [tmp_path / f"{learnt}" for learnt in (False, True)]
    for learnt, part in zip((False, True), parts, strict=True):
        write_weights(adapted, part, learnt)
    whole = load_file(tmp_path / "sent" / "model.safetensors")
    pieces = [load_file(part / "model.safetensors") for part in parts]
    assert pieces[0].keys() | pieces[1].keys() == whole.keys()
    assert not pieces[0].keys() & pieces[1].keys()


def test_an_adapter_elsewhere_leaves_tied_weights_tied(tmp_path):
    base = write_tied(tmp_path / "base", "llama")
    train_adapter(load_model(base), tmp_path / "adapter")
    model: Any = merge_adapter(load_model(tmp_path / "adapter"), tmp_path)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_single_tokens_of_a_model_whose_head_has_a_bias_are_refused(kind_dirs, tmp_path):
    config = LoraConfig(target_modules=["query"], trainable_token_indices=[5])
    get_peft_model(load_model(kind_dirs["bert"]), config).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"trains single tokens .*use modules_to_save"):
        load_model(tmp_path)


SFT = {"job_name": "job", "max_length": 64, "test_split": 0, "batch_size": 2}
RL: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
RL |= {"diffusion_steps": 2, "block_length": 4, "report_to": "none", "use_peft": True}
RL |= {"task": ROOT / "tests/d1/rl/letters_task.py"}


def words_of(flags: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in flags.items() for word in (f"--{name}", *([value] if value != "" else []))]


def adapted(folder: Path) -> set[str]:
    """The modules for which an adapter's file has weights."""
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in list(file.keys())}


PROJECTIONS = {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("asked", "endings"),
    [
        ("all-linear", PROJECTIONS | {"mlp.experts", "mlp.experts.base_layer"}),
        ("attention", PROJECTIONS),
        ("q_proj", {"self_attn.q_proj"}),
        ("layers.1.self_attn.q_proj", {"self_attn.q_proj"}),
    ],
)
def test_both_stages_put_adapters_on_the_same_modules(tiny_model_dir, tmp_path, asked, endings):
    """PEFT's own "all-linear" would add the routers of a mixture."""
    model = write_kind(tmp_path / "lladamoe", "lladamoe")
    load_tokenizer(tiny_model_dir).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": "2"}) + "\n")
    lora = {"max_steps": 1, "lora_r": 2, "lora_dropout": 0, "lora_target_modules": asked}
    flags = {**SFT, **lora, "model_name": model, "train_data": tmp_path / "rows.jsonl", "output_dir": tmp_path}
    sft.main(sft.make_parser().parse_args(words_of({**flags, "debugging": ""})))
    flags = {**RL, **lora, "model_path": model, "output_dir": tmp_path / "rl"}
    rl.main(*rl.make_parser().parse_args_and_config(words_of(flags)))
    layers = (1,) if "layers" in asked else range(3)
    assert adapted(tmp_path / "job") == {f"model.layers.{layer}.{ending}" for layer in layers for ending in endings}
    assert adapted(tmp_path / "rl") == adapted(tmp_path / "job")


class Casts(TorchDispatchMode):
    """Count the casts of tensors to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def lora_in_bf16(folder: Path, **options: Any) -> Any:
    """A model in bf16 with an adapter in fp32 on all linear layers, whose weights are random."""
    model = load_model(folder, torch.bfloat16)
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=lora_targets(model, "all-linear"), **options))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
            assert parameter.dtype == torch.float32
    return peft


def outputs_of(model: Any, mixed: bool = True) -> list[Tensor]:
    """Logits, and the gradients of all weights that have one, under autocast if `mixed`."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = model(input_ids=IDS).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_inputs_of_lora_without_casts_give_equal_logits_and_gradients(kind_dirs, kind, checkpointing):
    found = {}
    for skips in (False, True):
        model = lora_in_bf16(kind_dirs[kind])
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if skips:
            skip_input_casts(model)
        found[skips] = [*outputs_of(model), *outputs_of(model, mixed=False), *outputs_of(model)]
    assert len(found[True]) == len(found[False]) > 3
    assert all(torch.equal(one, other) for one, other in zip(found[True], found[False], strict=True))


def test_two_casts_less_per_adapted_layer_under_autocast_and_none_outside(kind_dirs):
    model = lora_in_bf16(kind_dirs["llama"])
    layers = model.config.num_hidden_layers
    counts = []
    for _ in range(3):  # PEFT's own, and twice without casts
        for mixed in (True, False):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed), Casts() as casts:
                model(input_ids=IDS)
            counts.append(casts.count)
        skip_input_casts(model)
    assert [before - after for before, after in zip(counts, counts[2:], strict=False)] == [2 * 7 * layers, 0, 0, 0]
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    assert len(layer._forward_pre_hooks) == 1


def test_layers_that_compute_with_the_dtype_of_their_input_keep_its_cast(kind_dirs):
    """DoRA divides by the norm of a weight that it computes in this dtype."""
    found = {}
    for skips in (False, True):
        model = lora_in_bf16(kind_dirs["llama"], use_dora=True)
        if skips:
            skip_input_casts(model)
        found[skips] = outputs_of(model)
    assert all(torch.equal(one, other) for one, other in zip(found[True], found[False], strict=True))
