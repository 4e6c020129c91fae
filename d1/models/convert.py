"""Make one checkpoint folder from another: merge adapters, write a released format, convert a causal decoder.

The commands `merge`, `export` and `a2d` of `python -m d1` call these functions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.utils import find_adapter_config_file

from d1.files import check_index, check_output_dir, give_usual_mode, read_object, writing
from d1.models.adapters import (
    adapter_chain,
    add_adapter,
    check_has_weights,
    check_model_path,
    export_adapter,
    merge_adapter,
    untie_adapted,
)
from d1.models.attention import CAUSAL_CONTEXT, check_attention
from d1.models.fingerprints import warn_of_other_base
from d1.models.formats.gguf import check_all_used, gguf_config, gguf_file, gguf_types, load_gguf
from d1.models.formats.released import as_released
from d1.models.head import unwrapped
from d1.models.kinds import (
    KINDS,
    Kind,
    is_encoder,
    kind_of,
    learnt_fields,
    native_config,
    raw_config,
    released_kind,
)
from d1.models.load import REFUSAL, check_loaded, load_model, prepare
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE, VOCABULARIES, check_mask_token, has_tokenizer, load_tokenizer
from d1.transformers_bridge import checkpoint_dtype, file_of, has_file, stored_weights

MASKED_FIELDS = ("mask_token_id", "block_size", "canvas_length")  # which only the config of a masked model has
GENERATION_CONFIG = "generation_config.json"
SHARD_BYTES = 5 * 10**9  # largest size of one file of weights

logger = logging.getLogger(__name__)


def fresh_folder(out: str) -> Path:
    """The output folder; FileExistsError if it is not empty (it may hold the model that is read), ValueError if it
    cannot be written."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: name a new one")
    check_output_dir(folder, "OUT")
    return folder


def merge(base: str, adapters: list[str], out: str, dtype: str = "auto", device: str | None = None) -> None:
    """Fold `adapters` into `base`, in order of training, and save the result to `out`, in the format of the base, with
    the tokenizer of the last adapter that has one, else that of the base. `dtype` "auto" is that of the base."""
    folder = fresh_folder(out)
    path, chain = adapter_chain(base, adapters)
    for adapter in chain:
        check_has_weights(adapter)
    warn_of_other_base(path, chain)
    tokenizer = read_tokenizer(path, chain)
    snapshot = snapshot_folder(path)
    model: Any = load_model(snapshot, dtype, device)
    for adapter in tqdm(chain, desc="merging", unit="adapter"):
        model = merge_adapter(add_adapter(model, adapter), adapter)
    model.name_or_path = path
    kind = released_kind(raw_config(path))
    if KINDS[kind].release_config is None:
        with saving(folder):
            model.save_pretrained(folder)
        save_tokenizer(tokenizer, path, folder)
    else:
        write_released(model, kind, snapshot, tokenizer, folder)


def snapshot_folder(source: str) -> str:
    """The folder of a model's files. Those of a hub name are downloaded to the hub's cache, because only its files say
    which dtype each weight has; a name without safetensors is unchanged."""
    if Path(source).is_dir():
        return source
    names = ["model.safetensors"]
    index = file_of(source, "model.safetensors.index.json")
    if index is not None and not has_file(source, names[0]):  # of both, Transformers takes the single file
        check_index(Path(index), complete=False)
        names = sorted({*read_object(Path(index))["weight_map"].values()})
    files = [file_of(source, name) for name in ("config.json", *names)]
    if None in files:
        return source
    file_of(source, GENERATION_CONFIG)  # downloaded too, if there is one
    return str(Path(str(files[0])).parent)


def read_tokenizer(base: str, adapters: Sequence[str] = ()) -> Any:
    """The tokenizer of the last adapter that has one, else that of the base; None if there is none."""
    for adapter in reversed(adapters):
        if has_tokenizer(adapter):
            return load_tokenizer(adapter, base=base)
    if has_tokenizer(base):
        return load_tokenizer(base)
    return None


def save_tokenizer(tokenizer: Any, source: str, folder: Path) -> None:
    """Write a tokenizer, with its special tokens resolved; a model without a tokenizer (None) is not an error."""
    if tokenizer is None:
        logger.warning("%s has no tokenizer: %s holds only the weights", source, folder)
    else:
        tokenizer.save_pretrained(folder)


def export(source: str, out: str, kind: str) -> None:
    """Write a model with the config and weight names of a released format (an entry of `KINDS`), or an adapter with its
    module names and its own tokenizer, for the format's own code; ValueError if the format cannot represent it."""
    folder = fresh_folder(out)
    check_model_path(source)
    if find_adapter_config_file(source) is not None:
        tokenizer = None
        if has_tokenizer(source):
            try:
                tokenizer = load_tokenizer(source)
            except ValueError as error:
                logger.warning("The tokenizer of the adapter is left out: %s", error)
        export_adapter(source, folder, kind)
        if tokenizer is not None:
            save_released_tokenizer(tokenizer, folder)
        return
    tokenizer = read_tokenizer(source)
    snapshot = snapshot_folder(source)
    write_released(load_model(snapshot, "auto"), kind, snapshot, tokenizer, folder)


def write_released(model: Any, kind: str, source: str, tokenizer: Any, folder: Path) -> None:
    """Write the weights and config of `model`, the generation config in the folder `source`, and the tokenizer (None:
    there is none) in the released format `kind`."""
    config = released_config(model, kind, source, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(released_weights(model, kind, source), folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    # The length of a completion and token ids, without what only this library's models have
    generation_config = Path(source) / GENERATION_CONFIG
    if generation_config.is_file():
        fields = read_object(generation_config)
        if fields.get("sequence_bias") == REFUSAL:
            del fields["sequence_bias"]
        (folder / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")

    if tokenizer is None:
        save_tokenizer(None, source, folder)
    else:
        save_released_tokenizer(tokenizer, folder)


def save_released_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer for released code, which runs on Transformers 4 and knows the class and the list of further
    special tokens by their older names."""
    tokenizer.save_pretrained(folder)
    tokenizer_config = folder / "tokenizer_config.json"
    fields = read_object(tokenizer_config)
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    fields.pop("auto_map", None)  # a class whose code is in another folder, and which reads other files
    tokenizer_config.write_text(json.dumps(fields, indent=2) + "\n")


def released_config(model: Any, kind: str, source: str, tokenizer: Any) -> dict[str, Any]:
    """The released `config.json`; its code comes from the hub, and token ids that it lacks from the tokenizer."""
    entry = KINDS[kind]
    if entry.release_config is None:
        raise ValueError(f"{kind!r} is not a released format: its weights and config are Transformers' own")
    config = entry.release_config(model.config) | learnt_fields(model.config)
    if released_kind(config) != kind:
        raise ValueError(f"{source} was released as {released_kind(config)!r}, not as {kind!r}: name that format")
    dtype_field = "dtype" if "dtype" in config else "torch_dtype"
    config[dtype_field] = str(model.dtype).removeprefix("torch.")

    # The code, in its repository on the hub
    if entry.code and "auto_map" in config:
        auto_map = {}
        for name, code in config["auto_map"].items():
            if isinstance(code, str):
                auto_map[name] = code if "--" in code else f"{entry.code}--{code}"
        config["auto_map"] = auto_map

    # Token ids
    if tokenizer is not None:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            if name in config and config[name] is None:
                config[name] = getattr(tokenizer, name)
    elif config.get("mask_token_id", 0) is None:
        raise ValueError(
            f"{source} names no mask token, which the format {kind} needs: set mask_token_id in its "
            "config.json, or put its tokenizer into the folder"
        )
    return config


def released_weights(model: Any, kind: str, source: str) -> Iterator[tuple[str, Tensor]]:
    """Each weight with its released name, in the precision of `source`; a tied head only if `source` has it."""
    stored = {name: (dtype, file) for name, dtype, _, file in stored_weights(source)}
    state = model.state_dict()
    has_dtype_of_source = checkpoint_dtype(source) == model.dtype
    for native_name in state:
        is_tied_head = native_name == "lm_head.weight" and model.config.tie_word_embeddings
        for name, weight in KINDS[kind].release_weight(native_name, state):
            if is_tied_head and name not in stored:
                continue
            # A weight that is as it was read is written in the precision of its file: 16 bits would cut a router in
            # float32.
            dtype, file = stored.get(name, (weight.dtype, None))
            if has_dtype_of_source and file is not None and dtype != weight.dtype:
                with safe_open(file, framework="pt") as opened:
                    original = opened.get_tensor(name)
                if torch.equal(original.to(weight), weight):
                    weight = original
            if is_tied_head:
                weight = weight.clone()  # files hold no two names of one memory
            yield name, weight


@contextmanager
def merged_state_dict(model: Any) -> Iterator[dict[str, Tensor]]:
    """The state dict of `model` with its adapter folded in, which then leaves the weights as they were, to the bit. An
    adapter on tied weights unties them."""
    if not isinstance(model, PeftModel):
        yield model.state_dict()
        return
    untie_adapted(model)
    weights: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            weights.extend(module.get_base_layer().parameters(recurse=False))
    if any(weight.dtype in (torch.uint8, torch.int8) for weight in weights):
        raise ValueError("an adapter cannot be folded into quantised weights: use `d1 serve`, which takes adapters")
    before = [weight.detach().to("cpu", copy=True) for weight in weights]
    model.merge_adapter()
    state: dict[str, Tensor] = {}
    for peft_name, weight in model.get_base_model().state_dict().items():
        name = merged_name(peft_name)
        if name is not None:
            state[name] = weight
    try:
        yield state
    finally:
        model.unmerge_adapter()
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)


PEFT_PARTS = (".base_layer", ".token_adapter", ".modules_to_save.default")  # of a name, before the weight's own
ADAPTER_PARTS = ("lora_", "trainable_tokens_", ".modules_to_save.", ".original_module.")


def merged_name(name: str) -> str | None:
    """The name, in a model without an adapter, of a weight of PEFT's model; None for weights that it does not have."""
    for part in PEFT_PARTS:
        name = name.replace(part, "")
    if any(part in name for part in ADAPTER_PARTS):
        return None
    return name


class ReadRecorder(Mapping[str, Tensor]):
    """A state dict that records the names of the weights that were read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names_read.add(name)
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def learnt_names(model: Any, state: Mapping[str, Tensor]) -> set[str]:
    """Names in `state`, as `merged_state_dict` gives it, of the weights that training changes."""
    base = unwrapped(model)
    trained = {name for name, weight in base.named_parameters() if weight.requires_grad}
    layers = tuple(f"{name}." for name, module in base.named_modules() if isinstance(module, BaseTunerLayer))
    # By their memory, which tied weights share
    memory = {weight.data_ptr() for name, weight in state.items() if name in trained or name.startswith(layers)}
    return {name for name, weight in state.items() if weight.data_ptr() in memory}


def write_weights(
    model: Any, folder: Path, learnt: bool | None = None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the weights of a model, with its adapter folded in, and its config, in its released format or else that of
    its class: what a server takes as an update.

    Args:
        learnt: True: only what training changes; False: only the rest; None: everything.
        weights: the state dict of a model without an adapter; each weight is read when it is written.
    """
    released = getattr(model.config, "released", None)
    if released is None:
        to_released = Kind().release_weight  # the names of the class
    else:
        to_released = KINDS[released_kind(released)].release_weight
    folder.mkdir(parents=True)

    def chosen_weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        # The names after the first one of each tied weight
        base = unwrapped(model)
        all_names = dict(base.named_parameters(remove_duplicate=False)).keys()
        tied = {merged_name(name) for name in all_names - dict(base.named_parameters()).keys()}

        changed: set[str] = set()
        if learnt is not None:
            changed = learnt_names(model, state)
        recorder = ReadRecorder(state)
        for name in state:
            if name in tied:
                continue
            recorder.names_read.clear()
            written = list(to_released(name, recorder))
            is_changed = not changed.isdisjoint(recorder.names_read)
            if learnt is None or learnt == is_changed:
                yield from written

    with merged_state_dict(model) if weights is None else nullcontext(weights) as state:
        save_shards(chosen_weights(state), folder)
    if released is None:
        config = model.config.to_dict()
    else:
        config = as_released(model.config) | learnt_fields(model.config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Inside, weights are written to `folder`. Raises OSError if the disk is full."""
    with writing(folder, "the model", "make room, delete that folder and start the same command again"):
        yield
    give_usual_mode(folder.glob("*.safetensors"))


def save_shards(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Save weights, by name, in files of up to `SHARD_BYTES`, with an index if there are several. If `weights` makes
    them one by one, only those of one file are in memory."""
    files: list[list[str]] = []
    total = 0
    for part in in_shards(weights):
        files.append(list(part))
        total += sum(weight.nbytes for weight in part.values())
        with saving(folder):
            save_file(part, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        part.clear()
    file_of: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        for name in names:
            file_of[name] = file
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def in_shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The weights of each file. The caller must clear each dictionary before it asks for the next one."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        if part and size + weight.nbytes > SHARD_BYTES:
            yield part
            size = 0
        part[name] = weight.contiguous()
        size += weight.nbytes
    yield part


def refuse_masked_model(
    source: str, config: Any, kind: Kind, raw: Mapping[str, Any], tokenizer_mask: str | None, mask_token: str
) -> None:
    """Raise ValueError if the config or the mask token of the tokenizer say that a model is a masked one already."""
    reason = ""
    fields = [name for name in MASKED_FIELDS if raw.get(name) is not None]
    if is_encoder(config):
        reason = f"it is an encoder, {config.model_type}"
    elif kind.becomes:
        reason = f"its kind is {released_kind(raw)}"
    elif fields:
        reason = f"its config.json has a {fields[0]}"
    elif raw.get("is_causal") is False:
        reason = "its config.json says is_causal false"
    elif tokenizer_mask not in (None, mask_token):
        reason = f"its tokenizer has a mask token (if it is autoregressive, name it: --mask_token '{tokenizer_mask}')"
    if reason:
        raise ValueError(f"{source} is a masked model already, not an autoregressive decoder: {reason}")


def read_autoregressive(source: str, mask_token: str) -> tuple[Any, Any]:
    """The model and the tokenizer of an autoregressive decoder in a model folder or a GGUF file, whose weights are
    unpacked to fp32; ValueError if it is a masked model."""
    file = gguf_file(source)
    if file is None:
        base, adapters = adapter_chain(source, None)
        if adapters:
            raise ValueError(
                f"{source} is an adapter, and a2d converts whole models: fold it into {base} with PEFT's "
                "merge_and_unload, and name the folder of the result (d1 merge is for masked models)"
            )
        # A masked model, and one without a tokenizer, are refused before the weights are read.
        config, kind = native_config(source)
        tokenizer = None
        if has_tokenizer(source):
            tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", trust_remote_code=False)
        tokenizer_mask = getattr(tokenizer, "mask_token", None)
        refuse_masked_model(source, config, kind, raw_config(source), tokenizer_mask, mask_token)
        if tokenizer is None:
            raise FileNotFoundError(f"{source} has no tokenizer, which a2d needs: none of {', '.join(VOCABULARIES)}")
        check_has_eos(source, tokenizer, config)
        return load_model(snapshot_folder(source), "auto"), tokenizer
    gguf_types(file)  # raises first: the errors of Transformers for a damaged file are less clear
    config = gguf_config(file)
    model, tokenizer, report = load_gguf(file, config)
    check_loaded(str(file), report)
    check_all_used(file, model)
    refuse_masked_model(str(file), config, kind_of(config), vars(config), tokenizer.mask_token, mask_token)
    check_has_eos(source, tokenizer, config)
    return prepare(model), tokenizer


def check_has_eos(source: str, tokenizer: Any, config: Any) -> None:
    """Raise ValueError if nothing names the token that ends a text: `load_tokenizer` would refuse the result."""
    if tokenizer.eos_token is None and tokenizer.sep_token is None and config.eos_token_id in (None, []):
        raise ValueError(
            f"{source}: neither the tokenizer nor config.json names an eos_token, which ends an answer: name one in "
            "tokenizer_config.json"
        )


def check_new_id(tokenizer: Any, mask_token: str, rows: int) -> None:
    """Raise ValueError if the id that a tokenizer gave its mask token is that of another token, or none of an embedding
    of `rows` rows. The tokenizers library takes the number of tokens, which is a used id if some ids below are free."""
    number = tokenizer.mask_token_id
    others = [token for token, token_id in tokenizer.get_vocab().items() if token_id == number and token != mask_token]
    problem = ""
    if others:
        problem = f"which is that of {others[0]!r}"
    elif number >= rows:
        problem = f"and the embedding has {rows} rows"
    if problem:
        raise ValueError(
            f"{tokenizer.name_or_path}: its tokens have ids with holes, so a new token {mask_token!r} gets the id "
            f"{number}, {problem}: name a spare token of the vocabulary with --mask_token"
        )


def a2d(
    source: str,
    out: str,
    mask_token: str = "<|mask|>",
    keep_shift: bool = False,
    plain_chat_template: bool = False,
    block_size: int | None = None,
    causal_context: bool = False,
) -> None:
    """Turn an autoregressive decoder into a masked diffusion model, ready for SFT.

    Args:
        source: A model folder or hub name; or a GGUF file, or a folder with one, whose weights become fp32.
        mask_token: A spare token of the tokenizer, or a new name. Its embedding starts as the mean of all tokens.
        keep_shift: Keep predicting the next position, as Dream does (arXiv 2508.15487), instead of the masked one.
        plain_chat_template: As in `load_tokenizer`.
        block_size: Tokens per block of block-causal attention (BD3-LM, arXiv 2503.09573); None is full attention.
        causal_context: Read finished text from left to right, as before, and only the block that is being filled in
            both directions (Nemotron-Labs-Diffusion). It needs a `block_size`.

    Raises:
        ValueError: The checkpoint is not a decoder, already has a mask token, or cannot attend in such blocks; or
            `mask_token` is another special token or ordinary text; or `causal_context` has no `block_size`.
        ImportError: A GGUF file needs the package gguf.
    """
    folder = fresh_folder(out)
    if causal_context and block_size is None:
        raise ValueError("--causal_context needs --block_size: the tokens per block that is filled at once, such as 8")
    model, tokenizer = read_autoregressive(source, mask_token)
    config = model.config
    if block_size is not None:
        config.block_size = block_size
        if causal_context:
            config.attention_pattern = CAUSAL_CONTEXT
        check_attention(config, source)

    # The mask token, whose embedding starts as the mean of all tokens
    rows = model.get_input_embeddings().num_embeddings
    token_count = min(rows, len(tokenizer))  # rows beyond the tokenizer are padding
    check_mask_token(tokenizer, mask_token)
    tokenizer.add_special_tokens({"mask_token": mask_token})
    check_new_id(tokenizer, mask_token, max(rows, len(tokenizer)))
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config.mask_token_id = tokenizer.mask_token_id
    for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:  # one where they are tied
        new = [config.mask_token_id, *range(rows, len(table))]
        others = [row for row in range(token_count) if row not in new]
        table.data[new] = table.data[others].float().mean(0).to(table.dtype)

    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None and plain_chat_template:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    config.pad_token_id = tokenizer.pad_token_id
    if keep_shift:
        config.predicts_next_token = True
    # A limit of the source, not the length of a canvas (`default_gen_length`)
    model.generation_config.max_new_tokens = None

    with saving(folder):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
