"""The kinds of model: one entry of `KINDS` per `model_type` of a `config.json`, and what follows from an entry.

A new kind is one more entry, also from outside this package: `KINDS["mine"] = Kind(becomes="qwen3")`. It runs on a
class of Transformers; first register a class that Transformers does not know with its `AutoConfig` and
`AutoModelForCausalLM`. A released format whose config or weights need more than renaming has a file in `formats/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from d1.files import check_files, reading
from d1.models.formats.diffusion_gemma import check_config, copy_text_fields, diffusion_gemma_weights
from d1.models.formats.llada import (
    FROM_LLADA,
    FROM_LLADA2,
    glm4_moe_fields,
    llada2_weights,
    llada_from_llama,
    llada_weights,
    llama_fields,
    qwen3_moe_fields,
    split_projections,
)
from d1.models.formats.nemotron import FROM_NEMOTRON, ministral3_fields, nemotron_weights, without_window
from d1.models.formats.released import FILE_FIELDS, as_released, same_names, split_experts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

DECODER_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DECODER_LORA = {"attention": DECODER_ATTENTION, "all-linear": (*DECODER_ATTENTION, "gate_proj", "up_proj", "down_proj")}
BERT_ATTENTION = ("query", "key", "value", "attention.output.dense")
BERT_LORA = {"attention": BERT_ATTENTION, "all-linear": (*BERT_ATTENTION, "intermediate.dense", "output.dense")}
MODERNBERT_LORA = {"attention": ("Wqkv", "attn.Wo"), "all-linear": ("Wqkv", "Wo", "Wi")}


@dataclass(frozen=True)
class Kind:
    """What this library has to know about a `model_type`. The defaults are those of a Llama."""

    becomes: str = ""  # the `model_type` of the Transformers class that runs it; "" is its own
    fields: Callable[[dict[str, Any]], dict[str, Any]] = dict  # from the released config to that of the class
    names: Mapping[str, str] | None = None  # weight names of the checkpoint -> those of the class (`key_mapping`)
    converters: Callable[[], list[Any]] | None = None  # Transformers' converters of weights that are split or joined
    # For an export: the name of a weight of the class, and the state dict -> released names and weights.
    release_weight: Callable[[str, Mapping[str, Tensor]], Iterator[tuple[str, Tensor]]] = same_names
    # For an export: config of the class -> released `config.json`; None: there is no released format.
    release_config: Callable[[Any], dict[str, Any]] | None = None
    code: str = ""  # the hub repository of the code that an `auto_map` points to
    model: str = ""  # the auto class of Transformers with its head, if not that of causal or masked LMs
    since: str = ""  # the first version of Transformers with this class, if some supported versions lack it
    # True: hidden tokens become uniform ids, not mask tokens, and a text is an encoded context and a canvas, which a
    # decoder fills (`d1/models/diffusion_gemma.py`). Its `base_model` is then not called with a whole text.
    uniform_noise: bool = False
    encoder: bool = False  # a masked LM; others are decoders: causal LMs, which also have a key-value cache
    attention: str = "full"  # a name in `d1.models.attention.ATTENTION`; with "full", a `block_size` decides
    block_size: int | None = None  # tokens per block, if the released config does not say
    shift: bool = False  # the logits predict the next token, not the one at their own position
    mask_token_id: int | None = None  # the mask token, if the released config does not say
    head: tuple[str, ...] = ("lm_head",)  # the modules of the class that turn hidden states into logits, in order
    # Name -> endings of the names of the modules that get LoRA, never the head. In a mixture, PEFT 0.21 applies the
    # three names of the feed-forward to the stacks of experts, and not to dense layers and shared experts.
    lora: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DECODER_LORA)
    lora_in: str = ""  # LoRA goes into modules whose names contain this only
    positions_after_padding: bool = False  # position ids begin after the id of the padding token
    tokenizer: str = "AutoTokenizer"  # the Transformers class for a released tokenizer that has its own code


def fast_dllm_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Fast-dLLM v2 config, which has another name for `block_size`."""
    fields = {}
    for name, value in raw.items():
        fields["block_size" if name == "bd_size" else name] = value
    return fields


QWEN = Kind(release_config=as_released, tokenizer="Qwen2Tokenizer")
SDAR = replace(QWEN, becomes="qwen3", code="JetLM/SDAR-1.7B-Chat", block_size=4, mask_token_id=151669)
MIXTURE = Kind(release_config=as_released, mask_token_id=156895, tokenizer="PreTrainedTokenizerFast")  # of LLaDA
KINDS: dict[str, Kind] = {
    "llada": Kind(
        becomes="llama",
        fields=llama_fields,
        names=FROM_LLADA,
        release_weight=llada_weights,
        release_config=llada_from_llama,
        code="GSAI-ML/LLaDA-8B-Base",
        tokenizer="PreTrainedTokenizerFast",
    ),
    "Dream": replace(QWEN, becomes="qwen2", code="Dream-org/Dream-v0-Instruct-7B", shift=True),
    "sdar": SDAR,
    "sdar_moe": replace(SDAR, becomes="qwen3_moe", release_weight=split_experts, code="JetLM/SDAR-30B-A3B-Chat"),
    "Fast_dLLM_Qwen": replace(
        QWEN,
        becomes="qwen2",
        fields=fast_dllm_fields,
        code="Efficient-Large-Model/Fast_dLLM_v2_7B",
        block_size=32,
        shift=True,
        mask_token_id=151665,
    ),
    "lladamoe": replace(
        MIXTURE,
        becomes="qwen3_moe",
        fields=qwen3_moe_fields,
        release_weight=split_experts,
        code="inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
    ),
    "llada2_moe": replace(
        MIXTURE,
        becomes="glm4_moe",
        fields=glm4_moe_fields,
        names=FROM_LLADA2,
        converters=split_projections,
        release_weight=llada2_weights,
        code="inclusionAI/LLaDA2.0-mini",
        block_size=32,
    ),
    "nemotron_labs_diffusion": Kind(
        becomes="ministral3",
        fields=ministral3_fields,
        names=FROM_NEMOTRON,
        release_weight=nemotron_weights,
        release_config=as_released,
        code="nvidia/Nemotron-Labs-Diffusion-3B",
        attention="causal-context",
        block_size=32,
        mask_token_id=100,
        tokenizer="PreTrainedTokenizerFast",
    ),
    "diffusion_gemma": Kind(
        release_config=as_released,
        release_weight=diffusion_gemma_weights,
        model="AutoModelForImageTextToText",
        since="5.24",
        uniform_noise=True,
        attention="canvas",
        lora_in=".decoder.layers.",  # the encoder runs the same modules
    ),
    "llama": Kind(),
    "qwen2": Kind(),
    "qwen3": Kind(),
    "qwen3_moe": Kind(),
    "glm4_moe": Kind(),
    "gemma": Kind(),
    "gemma2": Kind(),
    "gemma3_text": Kind(),
    "ministral3": Kind(fields=without_window),
    "modernbert": Kind(encoder=True, head=("head", "decoder"), lora=MODERNBERT_LORA),
    "bert": Kind(encoder=True, head=("cls",), lora=BERT_LORA),
    "roberta": Kind(encoder=True, lora=BERT_LORA, positions_after_padding=True),
}

UNSUPPORTED_KINDS = {  # `model_type` -> why a model that looks like one of the table cannot be used
    "nemotron_labs_diffusion_vlm": "it reads images: use a text model, such as nvidia/Nemotron-Labs-Diffusion-8B",
}

# The author's choices for one machine; `load_model` has an argument for them.
KERNEL_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
LEARNT_FIELDS = ("edit_noise", "uniform_ratio")  # what training adds to a config, whatever the format


def kind_of(config: Any) -> Kind:
    """The entry of a loaded model, by the class of Transformers that runs it."""
    return KINDS[config.model_type]


def has_masks(config: Any) -> bool:
    """Whether hidden tokens are mask tokens; else they are uniform ids (`Kind.uniform_noise`)."""
    return not kind_of(config).uniform_noise


def require_masks(config: Any, what: str) -> None:
    """Raise ValueError if `what` is asked of a model without a mask token."""
    if not has_masks(config):
        raise ValueError(
            f"{what} hides tokens by a mask token, and {config.model_type} has none: its noise is uniform ids. It can "
            "be sampled (eval), fine-tuned (sft) and trained by rl with --estimator accepted"
        )


def is_encoder(config: Any) -> bool:
    """Whether this is the config of a masked LM, which has no key-value cache; others are causal LMs."""
    return kind_of(config).encoder


def vocabulary(config: Any) -> int:
    """The number of token ids."""
    return getattr(config, "vocab_size", None) or config.text_config.vocab_size  # type: ignore[no-any-return]


def block_size(config: Any) -> int | None:
    """Tokens per block of a model that finishes text block by block; None for others."""
    return getattr(config, "block_size", None) or None


def attention_name(config: Any) -> str:
    """The name in `ATTENTION` of a model's pattern: the `attention_pattern` of its config, else that of its kind; a
    `block_size` implies "block-causal"."""
    name = kind_of(config).attention
    if name == "full" and getattr(config, "block_size", None) is not None:
        name = "block-causal"
    return getattr(config, "attention_pattern", None) or name


def windowed(config: Any) -> bool:
    """Whether some layers attend only within a window."""
    return set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}


def released_kind(raw: Mapping[str, Any]) -> str:
    """The name of the entry for a `config.json`; LLaDA-MoE was also published with the `model_type` of LLaDA."""
    name = raw.get("model_type", "")
    if name == "llada" and any("MoE" in architecture for architecture in raw.get("architectures") or ()):
        return "lladamoe"
    return name  # type: ignore[no-any-return]


def learnt_fields(config: Any) -> dict[str, Any]:
    """The fields of a config, or of a `config.json`, that training wrote."""
    fields = config if isinstance(config, dict) else vars(config)
    return {name: fields[name] for name in LEARNT_FIELDS if fields.get(name) is not None}


def experts(config: Any) -> int:
    """The number of routed experts in a layer of a mixture; 0 for other models."""
    text_config = config.get_text_config()
    count = getattr(text_config, "num_local_experts", 0)
    if not count and not has_masks(config):  # DiffusionGemma's name
        count = getattr(text_config, "num_experts", 0)
    return count or 0


def check_kind(model_type: str, name: str) -> None:
    """Raise ValueError for a kind without an entry; `name` is the model's name in the message."""
    if model_type in UNSUPPORTED_KINDS:
        raise ValueError(f"{name}: model_type {model_type!r} is not supported: {UNSUPPORTED_KINDS[model_type]}")
    if model_type not in KINDS:
        raise ValueError(f"{name}: model_type {model_type!r} is not supported: known are {', '.join(KINDS)}")


def check_since(kind: Kind, model_type: str, name: str) -> None:
    """Raise ValueError if the installed Transformers is too old for a kind."""
    installed = version("transformers")
    if kind.since and Version(installed) < Version(kind.since):
        raise ValueError(
            f"{name}: {model_type} needs Transformers {kind.since} or newer, and {installed} is installed: "
            f"pip install 'transformers>={kind.since}'"
        )


def max_positions(config: Any) -> int | None:
    """The largest number of tokens in a text of a model of this config; None if the config states none. Position ids
    of some kinds begin after the id of the padding token, which leaves fewer. With longrope, the frequencies of all
    positions change with the longest text of a batch beyond its original length: cached keys and rows that share a
    batch would be wrong, so this length is the largest."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and kind_of(config).positions_after_padding:
        positions -= config.pad_token_id + 1
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and "original_max_position_embeddings" in rope:
        positions = rope["original_max_position_embeddings"]
    return positions


def check_room(config: Any, shown: int, hidden: int, advice: str = "") -> None:
    """Raise ValueError, whose message ends with `advice`, if a row of `shown` tokens of text and `hidden` tokens to
    fill in is too long for a model of this config."""
    room = max_positions(config)
    if room is not None and shown + hidden > room:
        row = f"{shown} tokens of text"
        if hidden:
            row += f" and {hidden} to fill in"
        raise ValueError(f"too long: {row} exceed the model's {room} positions{advice}")


def attend_both_ways(config: Any, name: str) -> None:
    """Make the Transformers class of `config` attend in both directions; ValueError if every layer has a window.

    Decoders read `is_causal` in every forward pass (Transformers 5.23, `masking_utils.create_causal_mask`); encoders
    read `is_decoder` only when they are built.
    """
    if kind_of(config).uniform_noise:
        check_config(config, name)
        copy_text_fields(config)
        return  # its encoder is causal, and its decoder never is
    if windowed(config) and "full_attention" not in config.layer_types:
        raise ValueError(f"{name}: every layer attends to a window only, so no position could see the whole text")
    if is_encoder(config):
        config.is_decoder = False
    else:
        config.is_causal = False
        config.use_cache = False


def raw_config(path: str) -> dict[str, Any]:
    """The `config.json` at `path` (folder or hub name) as it is, or empty; ValueError if it is damaged."""
    from transformers import PreTrainedConfig

    if Path(path).is_dir():
        check_files(Path(path))
    with reading(path, "its config.json cannot be read"):
        raw: dict[str, Any] = PreTrainedConfig.get_config_dict(path)[0]
    raw.pop("_commit_hash", None)  # which Transformers 5.17 adds
    return raw


def default_gen_length(path: str, config: Any) -> int | None:
    """The length of a completion that the model's folder or hub repository names, `max_new_tokens` of its
    `generation_config.json`. None if it names none, or one without room for a prompt in a model of this `config`.
    ValueError for a file with values that cannot be."""
    from transformers import GenerationConfig

    try:
        length = GenerationConfig.from_pretrained(path).max_new_tokens
    except OSError:  # there is no such file
        return None
    except (TypeError, ValueError) as error:  # a text is compared with 0
        raise ValueError(
            f"generation_config.json of {path} has a value that cannot be used ({error}): correct or remove it; "
            "max_new_tokens is a whole number above 0"
        ) from error
    room = max_positions(config)
    if length is None or (room is not None and length >= room):
        return None
    return int(length)


def native_fields(kind: Kind, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Transformers config for a released `config.json` of this kind."""
    learnt = learnt_fields(raw)
    model_fields = {name: value for name, value in without_kernels(raw).items() if name not in learnt}
    fields = kind.fields(model_fields)
    if kind.becomes:
        fields = {name: value for name, value in fields.items() if name not in FILE_FIELDS}

    # What the kind says, where the file does not
    if kind.shift:
        fields["predicts_next_token"] = True
    if kind.mask_token_id is not None and fields.get("mask_token_id") is None:
        fields["mask_token_id"] = kind.mask_token_id
    # Blocks are called canvases in DiffusionGemma.
    size = fields.get("block_size") or raw.get("block_size") or raw.get("canvas_length") or kind.block_size
    if size:
        fields["block_size"] = size

    if kind.release_config is as_released:
        fields["released"] = raw
    fields.update(learnt)
    return fields


def without_kernels(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config's fields, and those of the configs in it, without `KERNEL_FIELDS`."""
    fields = {}
    for name, value in raw.items():
        if name not in KERNEL_FIELDS:
            fields[name] = without_kernels(value) if isinstance(value, Mapping) else value
    return fields


def check_quantization(raw: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for the config of a quantised checkpoint, whose weights need their scales to mean anything."""
    for name in ("quantization_config", "compression_config"):
        method = raw.get(name)
        if method:
            if isinstance(method, dict):
                method = method.get("quant_method", "")
            raise ValueError(
                f"{path}: config.json has a {name} ({method or 'without a quant_method'}), and quantised checkpoints "
                "cannot be read: use the original weights in 16 or 32 bits (load_in_4bit quantises these)"
            )


def check_token_ids(config: Any, path: str) -> None:
    """Raise ValueError for a `mask_token_id` that is no id of the vocabulary, and for a `pad_token_id` beyond it."""
    count = vocabulary(config)
    if count < 1:  # the class of the model refuses it
        return
    mask = getattr(config, "mask_token_id", None)
    pad = getattr(config, "pad_token_id", None)
    wrong = {}
    if mask is not None and (type(mask) is not int or not 0 <= mask < count):
        wrong["mask_token_id"] = mask
    if type(pad) is int and pad >= count:
        wrong["pad_token_id"] = pad
    for name, value in wrong.items():
        raise ValueError(
            f"{path}: config.json says {name} {value!r}, which is no id of its {count} tokens (0 to {count - 1}): "
            "correct it, or remove it if the tokenizer names this token"
        )


def native_config(path: str) -> tuple[PreTrainedConfig, Kind]:
    """The Transformers config of the checkpoint at `path` (folder or hub name), with attention in both directions, and
    the kind, which says how the weights are named. ValueError if the kind is not supported or `config.json`
    is damaged; OSError if there is none."""
    raw = raw_config(path)
    if not raw:
        raise FileNotFoundError(f"{path} has no config.json: it is not a model folder")
    return native_config_of(raw, path)


def native_config_of(raw: dict[str, Any], path: str) -> tuple[PreTrainedConfig, Kind]:
    """`native_config` of a `config.json` that was read already, or written in a table."""
    from transformers import CONFIG_MAPPING

    model_type = released_kind(raw)
    check_kind(model_type, path)
    kind = KINDS[model_type]
    check_since(kind, model_type, path)
    check_quantization(raw, path)
    with reading(path, f"its config.json describes no {model_type}"):
        config: PreTrainedConfig = CONFIG_MAPPING[kind.becomes or model_type].from_dict(native_fields(kind, raw))
    if kind.attention not in ("full", attention_name(config)) and not hasattr(config, "attention_pattern"):
        config.attention_pattern = kind.attention
    check_token_ids(config, path)
    attend_both_ways(config, path)
    config.name_or_path = path
    return config, kind
