"""LoRA adapters: target modules per kind of model, loading (whatever classes they were trained on) and merging."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners import lora
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import find_adapter_config_file

from d1.files import check_files, give_usual_mode, read_object, reading
from d1.hub import closest, is_path, no_hub, use_cache
from d1.models.diffusion_gemma import freeze_vision
from d1.models.formats.released import rename
from d1.models.kinds import KINDS, has_masks, is_encoder, kind_of, learnt_fields, native_config
from d1.transformers_bridge import file_of

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."  # PEFT writes it before the name of each module
WEIGHTS_FILE = "adapter_model.safetensors"
OLD_WEIGHTS_FILE = "adapter_model.bin"
JOINED = "query_key_value"  # LLaDA2's projection of queries, keys and values in one
DRAFTS = ("linear_spec_lora",)  # adapters that come with Nemotron, for drafts that its causal mode would verify
LEARNT_FILE = "learnt.json"  # `learnt_fields` of an adapter, whose folder has no config.json


def lora_targets(model: Any, asked: str | Iterable[str]) -> list[str]:
    """PEFT's `target_modules` (endings of module names) for `--lora_target_modules`: "attention" (its projections),
    "all-linear" (also those of the feed-forward), endings of module names, or several of these. ValueError if no module
    of the model has such a name."""
    kind = kind_of(model.config)
    requested = [asked] if isinstance(asked, str) else list(asked)
    targets: list[str] = []
    for name in requested:
        for target in kind.lora.get(name, (name,)):
            if target not in targets:
                targets.append(target)

    endings = tuple(f".{target}" for target in targets)
    modules = [name for name, _ in model.named_modules() if f".{name}".endswith(endings)]
    if kind.lora_in:
        modules = [name for name in modules if kind.lora_in in f".{name}"]
        targets = modules
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no modules {', '.join(requested)} for LoRA: use {', '.join(kind.lora)} or "
            "endings of its module names"
        )
    return targets


def check_model_path(path: str) -> None:
    """Raise FileNotFoundError for a missing folder, and for a hub name that is neither cached nor can be downloaded;
    ValueError for a folder with damaged files of JSON.

    If the hub does not answer, its cache is used from then on; else its client would try to reach it for every file.
    """
    if Path(path).is_dir():
        check_files(Path(path))
        return
    if Path(path).suffix == ".gguf" and Path(path).is_file():
        raise ValueError(f"{path} is a GGUF file, which d1 reads to convert it: d1 a2d {path} OUT")
    if Path(path).is_file():
        raise ValueError(f"{path} is a file: name the folder of the model, which has config.json")
    if is_path(path):
        raise FileNotFoundError(f"there is no model folder {path}{closest(path)}")
    problem = no_hub()
    files = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
    if problem and not any(isinstance(try_to_load_from_cache(path, file), str) for file in files):
        raise FileNotFoundError(
            f"{path} is no folder here{closest(path)} and is not in the hub's cache, and it cannot be downloaded: "
            f"{problem}. Name a folder, or download it first: hf download {path}"
        )
    if problem:
        use_cache(path, problem)


def adapter_chain(path: str, adapter: str | Path | Sequence[str | Path] | None) -> tuple[str, list[str]]:
    """The base model of `path`, and the adapters to put on it, in order: each adapter names the model below it.
    ValueError or FileNotFoundError if one is missing or does not name the model it was trained on."""
    check_model_path(path)
    if isinstance(adapter, str | Path):
        adapter = [adapter]
    adapters = [str(folder) for folder in adapter or ()]
    for folder in (*adapters, path):
        if Path(folder).name in DRAFTS:
            raise ValueError(f"{folder} is an adapter for speculative decoding, which only drafts: leave it out")
    for folder in adapters:
        check_model_path(folder)
        if find_adapter_config_file(folder) is None:
            raise ValueError(f"{folder} has no adapter_config.json: it is not an adapter")
    locations = [location_of(folder) for folder in adapters]
    for number, folder in enumerate(adapters):
        if locations[number] in locations[:number]:
            raise ValueError(f"adapter {folder} is given twice, and would be put on the model twice: name it once")
    if location_of(path) in locations:
        raise ValueError(f"{path} is given as the model and as an adapter: name its base, or leave the adapter out")

    base_locations: list[str] = []  # of the adapters that are the base of another one
    while find_adapter_config_file(path) is not None:
        location = location_of(path)
        if location in base_locations:
            raise ValueError(f"adapter {path} names itself as its base")
        if location in locations:
            raise ValueError(f"adapter {path} is given, and {adapters[0]} is on it already: name one of them")
        base_locations.append(location)
        adapters.insert(0, path)
        base = peft_config(path).base_model_name_or_path
        if not base or not isinstance(base, str):
            raise ValueError(
                f"adapter {path} names no base model: base_model_name_or_path in adapter_config.json is {base!r}: use "
                "load_model(base, adapter=...)"
            )
        try:
            check_model_path(base)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"adapter {path} was trained on {base} (base_model_name_or_path in adapter_config.json), which is not "
                "there: correct that field, or name the base where the command takes its model, and the adapter with "
                f"--checkpoint_path ({error})"
            ) from error
        path = base
    return path, adapters


def check_has_weights(folder: str) -> None:
    """Raise FileNotFoundError for the folder of an adapter without weights, which PEFT would look for on the hub."""
    if Path(folder).is_dir() and not any(Path(folder, name).is_file() for name in (WEIGHTS_FILE, OLD_WEIGHTS_FILE)):
        raise FileNotFoundError(
            f"adapter {folder} has no weights, neither {WEIGHTS_FILE} nor {OLD_WEIGHTS_FILE}: copy or download it again"
        )


def location_of(path: str) -> str:
    """The same text for all spellings of a folder's path; a hub name is unchanged."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def peft_config(folder: str) -> LoraConfig:
    """The `adapter_config.json` of a folder or hub name; ValueError if PEFT cannot read it, or if it is no LoRA: other
    kinds may name further repositories, and PEFT would offer to run their code."""
    with reading(folder, "PEFT cannot read its adapter_config.json"):
        config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter {folder} is of the kind {config.peft_type}: only LoRA is supported")
    return config


def add_adapter(model: PreTrainedModel, folder: str) -> PeftModel:
    """Put the LoRA adapter in `folder` on `model`, trainable; weight names are native or those of a released format.

    Raises:
        ValueError: The model does not have a weight of the adapter, or the adapter lacks one that the model expects.
    """
    config = peft_config(folder)
    with reading(folder, "a file of weights is damaged or cut off"):
        weights = load_peft_weights(folder, device="cpu")

    # Weights with names of a released format get those of the native class.
    joined: list[str] = []
    if any(f".{JOINED}.lora_" in name for name in weights):
        joined = joined_parts(folder)
    native = native_weights(weights, model.config, joined)
    if native.keys() != weights.keys():
        if not joined and (config.rank_pattern or config.alpha_pattern):
            raise ValueError(
                f"adapter {folder}: with names of a released format, only plain LoRA (one rank, one alpha) is supported"
            )
        weights = native
        config.auto_mapping = None
        config.rank_pattern = {}
        config.alpha_pattern = {}
        config.target_modules = adapted_modules(native)

    # What the model's kind does not have
    inside = kind_of(model.config).lora_in
    outside = [name for name in adapted_modules(native) if inside not in f".{name}"]
    if outside:
        raise ValueError(
            f"adapter {folder} has weights for {outside[0]} ({len(outside)} modules outside of {inside}): those of the "
            "encoder and of the decoder are two adapters on the same weights, which only one can be on here. Train it "
            "with d1, which has one for both"
        )
    if getattr(config, "trainable_token_indices", None) and is_encoder(model.config):
        raise ValueError(
            f"adapter {folder} trains single tokens (trainable_token_indices), and PEFT then leaves out the bias of "
            f"the head of a {model.config.model_type}: use modules_to_save for its embedding"
        )

    config.inference_mode = False
    with reading(folder, "PEFT cannot make the adapter of its adapter_config.json"):
        peft = get_peft_model(model, config)
    try:
        result: Any = set_peft_model_state_dict(peft, weights)
    except RuntimeError as error:  # a weight has another shape
        raise ValueError(f"adapter {folder} does not fit the model: {error}") from error
    missing = [name for name in result.missing_keys if "lora_" in name or "modules_to_save" in name]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"adapter {folder} does not fit the model: missing {missing}, unexpected {list(result.unexpected_keys)}"
        )

    learnt_file = file_of(folder, LEARNT_FILE, needs_answer=False)
    if learnt_file is not None:
        for name, value in learnt_fields(read_object(Path(learnt_file))).items():
            setattr(model.config, name, value)
    return peft


def save_learnt(model: Any, folder: str | Path) -> None:
    """Write what the model of an adapter learnt next to it, for `add_adapter`; other models save their own config."""
    if not isinstance(model, PeftModel):
        return
    fields = learnt_fields(model.config)
    if fields:
        (Path(folder) / LEARNT_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def native_name(name: str, model_type: str) -> str:
    """The name of an adapter's weight on the native class, also for names of formats that become `model_type`."""
    for kind in KINDS.values():
        if kind.becomes == model_type and kind.names and name.startswith(PREFIX):
            name = PREFIX + rename(name.removeprefix(PREFIX), kind.names)
    return name


def adapted_modules(weights: Iterable[str]) -> list[str]:
    """The modules on which an adapter with these names of weights is."""
    return sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in weights})


def native_weights(weights: Mapping[str, Tensor], config: Any, parts: Sequence[str]) -> dict[str, Tensor]:
    """An adapter's weights by the names of the native class. LoRA on a joined projection becomes one on each part: all
    have its A, and their own rows of its B; or, if `export_adapter` joined `parts`, what these were before."""
    native: dict[str, Tensor] = {}
    for released_name, weight in weights.items():
        name = native_name(released_name, config.model_type)
        if f".{JOINED}.lora_" not in name:
            native[name] = weight
            continue

        # A has no rows of the projections; B has those of each part.
        is_a = ".lora_A." in name
        sizes = joined_sizes(config)
        rows: dict[str, Tensor] = {}
        if not is_a:
            starts = list(accumulate(sizes.values()))[:-1]
            rows = dict(zip(sizes, weight.tensor_split(starts), strict=True))

        for number, part in enumerate(parts or sizes):
            piece = rows.get(part, weight)
            if parts:  # its own ranks: rows of A, columns of B
                piece = piece.tensor_split(len(parts), 0 if is_a else 1)[number]
            native[name.replace(JOINED, part)] = piece.contiguous()
    return native


def joined_sizes(config: Any) -> dict[str, int]:
    """The projections that a released format joins in `JOINED`, from the top, and the rows of each."""
    query_rows = config.num_attention_heads * config.head_dim
    key_rows = config.num_key_value_heads * config.head_dim
    return {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows}


def joined_parts(folder: str) -> list[str]:
    """The projections that `export_adapter` joined in an adapter's file; empty for other files."""
    path = file_of(folder, WEIGHTS_FILE, needs_answer=False)
    if path is None:
        return []
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("parts", "").split()


def export_adapter(source: str, out: Path, kind: str) -> None:
    """Write the LoRA adapter `source` with the module names of a released format, for PEFT on that format's own code.

    LoRAs on projections that the format joins become one of their ranks together: A below A, and the Bs in blocks on
    the diagonal, which has the same effect. `add_adapter` gives back what `source` had, to the bit.

    Raises:
        ValueError: It is no plain LoRA, it is on the stacks of experts, which have no released name, or the format is
            not one of its model.
    """
    config = peft_config(source)
    weights = load_peft_weights(source, device="cpu")
    is_plain = not (config.rank_pattern or config.alpha_pattern)
    endings = (".lora_A.weight", ".lora_B.weight")  # not DoRA's, nor whole modules that were trained
    if not is_plain or any(".experts." in name or not name.endswith(endings) for name in weights):
        raise ValueError(f"adapter {source}: only plain LoRA (one rank, one alpha, no experts) has released names")
    entry = KINDS[kind]
    base, _ = adapter_chain(source, None)
    model_config, _ = native_config(base)
    if entry.becomes != model_config.model_type:
        raise ValueError(f"adapter {source} is on a {model_config.model_type}, which has no released format {kind!r}")

    # The projections with a LoRA that the format joins
    sizes: dict[str, int] = {}
    if entry.converters:
        sizes = joined_sizes(model_config)
    parts = [part for part in sizes if any(f".{part}.lora_" in name for name in weights)]

    written: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module, _, matrix = name.removeprefix(PREFIX).partition(".lora_")  # "A.weight" or "B.weight"
        parent, _, part = module.rpartition(".")
        if part in parts:
            if part != parts[0]:
                continue  # it goes with the first one
            module = f"{parent}.{JOINED}"
            pieces = {other: weights[name.replace(f".{part}.", f".{other}.")] for other in parts}
            if matrix.startswith("A"):
                weight = torch.cat(list(pieces.values()))
            else:
                weight = block_diagonal(pieces, sizes)
        native_weight = f"{module}.weight"
        released_weight, _ = next(entry.release_weight(native_weight, {native_weight: weight}))
        released = released_weight.removesuffix(".weight")
        written[f"{PREFIX}{released}.lora_{matrix}"] = weight.contiguous()

    modules = adapted_modules(written)
    if parts:
        factor = len(parts) ** (0.5 if config.use_rslora else 1.0)  # the scale stays alpha / r, or alpha / sqrt(r)
        joined = sorted(name for name in modules if name.rpartition(".")[2] == JOINED)
        config.rank_pattern = dict.fromkeys(joined, config.r * len(parts))
        config.alpha_pattern = dict.fromkeys(joined, config.lora_alpha * factor)
    config.target_modules = modules
    config.auto_mapping = None
    config.save_pretrained(str(out))
    save_file(written, out / WEIGHTS_FILE, metadata={"format": "pt", "parts": " ".join(parts)})
    learnt_file = file_of(source, LEARNT_FILE, needs_answer=False)
    if learnt_file is not None:
        shutil.copyfile(learnt_file, out / LEARNT_FILE)
    give_usual_mode([out / WEIGHTS_FILE])


def block_diagonal(blocks: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """(rows of all `sizes`, ranks of all blocks): the B of each part in its own rows and columns."""
    like = next(iter(blocks.values()))
    diagonal = [blocks.get(part, like.new_zeros(size, 0)) for part, size in sizes.items()]
    return torch.block_diag(*diagonal)


def skip_input_casts(model: Any) -> None:
    """Make the LoRA layers of a model leave the dtype of their inputs to autocast, where it is on; changes it in place.

    PEFT casts an input of 16 bits to fp32, the dtype of the adapter, and autocast casts it back before the product.
    Without these casts, outputs and gradients are equal to the bit, except that dropout works in 16 bits. Outside of
    autocast, PEFT casts as before. Layers of other kinds, such as DoRA, which also compute with the dtype of their
    input, stay as they are.
    """
    for module in model.modules():
        if not isinstance(module, lora.Linear) or module.lora_variant:
            continue
        if cast_outside_autocast not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(cast_outside_autocast)


def cast_outside_autocast(layer: Any, args: tuple[Tensor, ...]) -> None:
    """Forward pre-hook of a LoRA layer: its input is cast to the dtype of the adapter only if autocast is off."""
    layer.cast_input_dtype_enabled = not torch.is_autocast_enabled(args[0].device.type)


def merge_adapter(model: PeftModel, folder: str | Path) -> PreTrainedModel:
    """Fold the active adapter into the weights; an adapter that is trained next records `folder`, or its hub name, as
    its base. An adapter on tied weights unties them. ValueError for one with biases, which PEFT cannot fold in."""
    if any(getattr(config, "lora_bias", False) for config in model.peft_config.values()):
        raise ValueError(
            f"adapter {folder} has biases (lora_bias in adapter_config.json), which PEFT cannot merge: keep it as an "
            "adapter, or train one without them"
        )
    untie_adapted(model)
    merged = model.merge_and_unload()
    merged.requires_grad_(True)  # PEFT froze the base's weights
    if not has_masks(merged.config):
        freeze_vision(merged)
    merged.name_or_path = location_of(str(folder))
    return merged


def untie_adapted(model: PeftModel) -> None:
    """Give each module its own copy of the tied weights, such as those of the embedding and the head, if the adapter is
    on one of these modules; changes the model in place. Its logits stay the same.

    Merging adds the adapter's change to the weight, and the other module would change, too. PEFT (0.21) only warns of
    this, in `_check_merge_allowed`, and advises to untie.
    """
    base: Any = model.get_base_model()
    if not has_masks(base.config):  # its modules are shared on purpose, and adapters are on none of the tied weights
        return
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in base.named_modules():
        if "modules_to_save" not in path.split("."):  # not the copies, which are trained
            for name, weight in module.named_parameters(recurse=False):
                holders.setdefault(id(weight), []).append((module, name))
    tied = [positions for positions in holders.values() if len(positions) > 1]
    if not any(is_adapter_on(model, [module for module, _ in positions]) for positions in tied):
        return
    for positions in tied:
        for module, name in positions[1:]:
            weight = getattr(module, name)
            setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
    mark_untied(base.config)


def mark_untied(config: Any) -> None:
    """Say in a config, and in the released one that it was read from, that embedding and head are two weights; changes
    it in place."""
    config.tie_word_embeddings = False
    released = getattr(config, "released", None)
    if released is not None:
        config.released = {**released, "tie_word_embeddings": False}


def is_adapter_on(model: PeftModel, tied: Sequence[nn.Module]) -> bool:
    """Whether the adapter is on one of these modules of the base, which share a weight. Not if it replaces all of them
    by copies that share theirs (`ensure_weight_tying` with `modules_to_save`)."""
    copies: dict[int, Any] = {}  # id of a module of the base -> the copy that replaces it
    adapted: set[int] = set()  # ids of modules of the base with a layer that adds something
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            copies[id(module.original_module)] = module.modules_to_save[module.active_adapters[0]]
        # Layers of single trained tokens set them in the weight, also in a tied one, and add nothing.
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            adapted.add(id(module.get_base_layer()))
    if all(id(module) in copies for module in tied):
        return len({id(copies[id(module)].weight) for module in tied}) > 1
    return any(id(module) in copies or id(module) in adapted for module in tied)


@torch.no_grad()
def base_digest(model: Any, weights: Mapping[str, Tensor] | None = None) -> str:
    """16 hexadecimal digits of the weights below an adapter, the same for all precisions of a checkpoint of 16 bits:
    of each weight its name, its shape, and 64 numbers as bf16. 4-bit weights have others. `weights`: the state dict, if
    the model has only a part of each."""
    digest = hashlib.sha256()
    for name, part in sorted(model.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            continue
        weight = part if weights is None else weights[name]
        base_name = name.removeprefix(PREFIX).replace(".base_layer", "").replace(".original_module", "")
        numbers = weight.flatten()[:: max(1, weight.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{base_name} {tuple(weight.shape)} {numbers.tolist()}".encode())
    return digest.hexdigest()[:16]
