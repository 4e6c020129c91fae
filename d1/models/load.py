"""Load masked diffusion language models, whose logits score the token AT each position and see the whole text.

All kinds (`kinds.py`) run on classes of Transformers. `prepare` puts hooks (`attention.py`) on the model without its
head, where they work unchanged under PEFT, DDP, FSDP, DeepSpeed and TRL.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from d1.files import check_index, reading
from d1.models.adapters import add_adapter, mark_untied, merge_adapter
from d1.models.attention import (
    PREPARED,
    add_positions_and_mask,
    align_positions,
    align_states,
    apply_logits_to_keep,
    attention_of,
    check_attention,
    check_rule,
)
from d1.models.diffusion_gemma import share_weights
from d1.models.fingerprints import warn_of_other_base
from d1.models.folder import ModelFolder
from d1.models.head import accept_run_argument, select_state_positions, unwrapped
from d1.models.kinds import attend_both_ways, check_kind, check_since, experts, is_encoder, kind_of
from d1.models.packing import place_packed
from d1.models.selfcheck import check_environment
from d1.transformers_bridge import (
    checkpoint_dtype,
    converting,
    file_of,
    forget_renaming,
    needs_copy,
    reading_weights,
    stored_types,
)

FLOAT_TYPES = ("BF16", "F16", "F32", "F64")  # of weights that can be read, as safetensors names them
PICKLED = "pytorch_model*.bin"  # files of weights that PyTorch wrote
# Parts of names of weights that are only used in BERT's pretraining
PRETRAINING_WEIGHTS = ("pooler.", "cls.seq_relationship.", "position_ids")

GENERATION_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_new_tokens")

Model = TypeVar("Model", bound=torch.nn.Module)

# The `generate` of Transformers (5.17 to 5.24) writes from left to right and would print garbage for a model that sees
# both ways, and no field of its configs says so. A `sequence_bias` that is a text is saved and loaded with the weights,
# and `generate` refuses it with a ValueError that shows the text. Loading, training and forward passes ignore it.
REFUSAL = (
    "the text: this is a masked diffusion model, which fills in mask tokens and cannot write from left to right; "
    "sample it with `python -m d1 chat FOLDER` or with d1.sampling.generate"
)


def prepare(model: Model) -> Model:
    """Give a model that you built, of a supported kind, the calling convention of `load_model`; changes it in place.

    Its attention is not causal any more, whatever its config said. Copies, LoRA and a resized vocabulary keep all of
    this; a model that is already prepared is returned unchanged.

    Args:
        model: With its head, as `AutoModelForCausalLM` or `AutoModelForMaskedLM` build it, or a `PeftModel` of one.

    Raises:
        ValueError: The kind is not supported, the model has no head, or it is an encoder that was built to be causal.
    """
    inner = unwrapped(model)
    if getattr(inner, PREPARED, False):
        return model
    name = type(inner).__name__
    config = inner.config

    # What is not supported
    check_kind(config.model_type, name)
    kind = kind_of(config)
    backbone = inner.base_model
    check_since(kind, config.model_type, name)
    if kind.becomes:
        raise ValueError(f"{name} runs its own code for {config.model_type!r}: load_model(path) uses a native class")
    if kind.encoder and getattr(config, "is_decoder", False):
        raise ValueError(f"this {name} was built to be causal: build it from a config with is_decoder=False")
    sanitize_generation_config(inner)
    if kind.uniform_noise:
        attend_both_ways(config, name)
        share_weights(inner)
        accept_run_argument(inner)
        setattr(inner, PREPARED, True)
        return model
    check_attention(config, name)
    check_rule(config, name)
    missing = [module for module in kind.head if not hasattr(inner, module)]
    if missing or backbone is inner:
        raise ValueError(
            f"{name} does not split into a `base_model`, which gives hidden states, and the head "
            f"{', '.join(kind.head)}: sampling and scoring need a causal or masked LM with these names"
        )

    # Attention, positions and the states that score each token
    attend_both_ways(config, name)
    backbone.register_forward_pre_hook(place_packed, with_kwargs=True)
    backbone.register_forward_pre_hook(add_positions_and_mask, with_kwargs=True)
    if kind.shift:
        config.predicts_next_token = True
    if getattr(config, "predicts_next_token", False):
        backbone.register_forward_pre_hook(align_positions, with_kwargs=True)
        backbone.register_forward_hook(align_states, with_kwargs=True)
    if kind.encoder:
        backbone.register_forward_hook(apply_logits_to_keep, with_kwargs=True)
    else:
        backbone.layers[-1].register_forward_pre_hook(select_state_positions, with_kwargs=True)

    if getattr(inner, "generation_config", None) is None:  # masked-LM classes have none, but trainers read it
        inner.generation_config = GenerationConfig()
    if not kind.encoder:
        inner.generation_config.sequence_bias = REFUSAL
    # nn.Embedding gives the padding row no gradient, but in these models padding is often EOS, a token to learn.
    inner.get_input_embeddings().padding_idx = None
    accept_run_argument(inner)
    setattr(inner, PREPARED, True)
    return model


def sanitize_generation_config(model: Any) -> None:
    """Leave only token ids and `max_new_tokens` of a generation config that Transformers reads and refuses to save,
    such as a temperature without `do_sample`: a run would end at its first checkpoint. Nothing here reads the rest. A
    padding id below 0, which Transformers also refuses, becomes None."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        fields = {name: getattr(config, name) for name in GENERATION_FIELDS}
        if isinstance(fields["pad_token_id"], int) and fields["pad_token_id"] < 0:  # how some configs say "none"
            fields["pad_token_id"] = None
        model.generation_config = type(config)(**fields)


def load_model(
    path: str | Path | ModelFolder,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    adapter: str | Path | Sequence[str | Path] | None = None,
    attn_implementation: str | None = None,
    quantization: str | None = None,
) -> PreTrainedModel | PeftModel:
    """Load a model in eval mode: `model(input_ids, attention_mask).logits[b, i]` scores the token AT position i.

    Every position sees all real positions, in a block-causal model those up to the end of its block; with a causal
    context, a position sees those before it, and its logits predict the next token. `attention_mask`
    (rows, length) may hide padding on either side; the model counts position ids itself. `logits_to_keep`, a 1-D
    LongTensor of positions, restricts the logits to (rows, len, vocab).

    Args:
        path: A checkpoint folder or hub name, or the folder of an adapter, whose base is then loaded first; or what
            `ModelFolder.read` read of one, with its adapters.
        dtype: Data type of the weights; None is float32, "auto" that of the checkpoint.
        device: Weights are loaded directly to it; None is the CPU.
        adapter: Adapter folder(s) to add, in order of training: all but the last are merged into the weights.
        attn_implementation: "sdpa", "eager" or "flash_attention_2"; None lets Transformers choose.
        quantization: "nf4" for 4-bit weights (QLoRA, arXiv 2305.14314), which needs bitsandbytes.

    Raises:
        ValueError: The kind is not supported, weights are missing, unexpected or of another shape, a file is damaged,
            or there is no such device.
    """
    check_environment(prepare)
    if device is not None:
        check_device(device)
    if isinstance(path, ModelFolder):
        folder = path
        if adapter is not None:
            raise ValueError(f"{folder.path} was read with its adapters: pass the others to ModelFolder.read")
    else:
        folder = ModelFolder.read(path, adapter)
    base, adapters = folder.base, folder.adapters
    if quantization is not None and len(adapters) > 1:
        raise ValueError("4-bit weights cannot absorb an adapter: run `python -m d1 merge` first")
    warn_of_other_base(base, adapters)

    # Arguments of `from_pretrained`
    if dtype == "auto":
        dtype = checkpoint_dtype(base)
        if quantization is not None and dtype == "auto":  # still unknown
            raise ValueError(
                f"{base}: which dtype its weights have is only known of a local folder of safetensors, and 4-bit "
                "weights compute in it: pass a dtype, such as torch.bfloat16, instead of 'auto'"
            )
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "dtype": dtype or torch.float32}
    if quantization is not None or (device is not None and torch.device(device).type != "cpu"):
        options["device_map"] = {"": device or "cpu"}  # by default, quantised weights go to a GPU
    if quantization is not None:
        if quantization != "nf4":
            raise ValueError(f"quantization {quantization!r} is unknown: only 'nf4' is supported")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options["dtype"],
        )

    model = load_base(folder, options)
    for module in model.modules():  # bitsandbytes 0.50 would repack weights on some CPUs, and lose their gradients
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    for merged_adapter in adapters[:-1]:
        model = merge_adapter(add_adapter(model, merged_adapter), merged_adapter)
    if adapters:
        model = add_adapter(model, adapters[-1])
    return model.eval()


def load_on_device(path: str | ModelFolder, dtype: str | None = None, **options: Any) -> Any:
    """`load_model` on the GPU of this process, or on the CPU if there is none, in `named_dtype(dtype)`."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return load_model(path, named_dtype(dtype), device, **options)


def check_device(device: str | torch.device) -> None:
    """Raise ValueError for a device that PyTorch does not know, and for a GPU that is not there."""
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown to PyTorch: use cpu, cuda or cuda:NUMBER") from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} is not there: PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs; use cpu"
        )


def named_dtype(name: str | None) -> torch.dtype:
    """A dtype by its name; None is bfloat16 on a GPU and float32 on a CPU."""
    if name:
        return getattr(torch, name)  # type: ignore[no-any-return]
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def load_base(folder: ModelFolder, options: dict[str, Any]) -> Any:
    """The model without adapters; `options` are for `from_pretrained`."""
    path = folder.base
    config = folder.config
    kind = folder.kind
    is_local = Path(path).is_dir()
    quantised = "quantization_config" in options
    if kind.uniform_noise and quantised:
        raise ValueError(
            f"{path}: 4-bit weights are for linear layers, and most weights of a {config.model_type} are stacks of "
            "experts, which would stay in 16 bits: leave load_in_4bit out"
        )
    check_stored_types(path)
    check_pickled_files(path)
    attention_of(config)  # an unknown name is an error before the weights are read
    if not is_local:
        index = file_of(path, "model.safetensors.index.json")
        if index is not None:
            check_index(Path(index), complete=False)

    # Experts are stacked layer by layer: files are read in order, or threads would read the whole checkpoint ahead.
    stacked = experts(config) > 0
    copies = stacked or quantised or needs_copy(path, options["dtype"], options.get("device_map"))
    try:
        with reading_weights(copies, in_order=stacked), converting(config.model_type, kind.converters):
            model, report = auto_class(config).from_pretrained(
                path,
                config=config,
                key_mapping=None if kind.names is None else dict(kind.names),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except SafetensorError as error:
        raise ValueError(f"{path}: a file of weights is damaged or cut off ({error})") from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path}: a file {PICKLED} is damaged or cut off: copy or download it again") from error
    except (RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        if str(error).startswith("unexpected EOF"):  # PyTorch's, of a file without an archive
            raise ValueError(f"{path}: a file {PICKLED} is damaged or cut off: copy or download it again") from error
        if "conversion of the weights" in str(error):  # of experts, for example: Transformers' report names them
            raise ValueError(f"{path}: the weights do not fit the config: some cannot be stacked or split") from error
        with torch.device("meta"), reading(path, "its config.json describes no model that can be built"):
            auto_class(config).from_config(config)
        raise
    check_loaded(path, report)
    if not is_local:  # its weights are downloaded now
        config_file = file_of(path, "config.json")
        if config_file is not None:
            check_stored_types(str(Path(config_file).parent))
    # Transformers reads a head of its own, with a warning, if the file has one and the config says that it is tied.
    head = model.get_output_embeddings()
    has_own_head = head is not None and head.weight is not model.get_input_embeddings().weight
    if not kind.uniform_noise and model.config.tie_word_embeddings and has_own_head:
        mark_untied(model.config)
    if kind.names is not None or stacked:
        forget_renaming(model)
    if is_local:  # adapters trained on this model record it as their base
        model.name_or_path = str(Path(path).resolve())
    return prepare(model)


def check_stored_types(path: str) -> None:
    """Raise ValueError for a folder with weights that are not floating-point numbers of at least 16 bits: integers and
    8-bit floats are quantised, and would be read without their scales."""
    for name, dtype, _, file in stored_types(path):
        if dtype not in FLOAT_TYPES and not any(part in name for part in PRETRAINING_WEIGHTS):
            raise ValueError(
                f"{file} stores {name} as {dtype}, not as one of {', '.join(FLOAT_TYPES)}: quantised weights would be "
                "read without their scales. Use the original weights (load_in_4bit quantises these)"
            )


def check_pickled_files(path: str) -> None:
    """Raise ValueError for a folder whose weights are in `pytorch_model*.bin` if one of these files is something else,
    such as an error page, or cut off."""
    if any(Path(path).glob("*.safetensors")):
        return
    for file in sorted(Path(path).glob(PICKLED)):
        with file.open("rb") as opened:
            begins_as_pickle = opened.read(1) == b"\x80"  # before PyTorch 1.6
        if not begins_as_pickle and not zipfile.is_zipfile(file):
            raise ValueError(f"{file} holds no weights of PyTorch, or is cut off: copy or download it again")


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of Transformers that builds a model of this config with its head."""
    class_name = kind_of(config).model
    if class_name:
        return getattr(transformers, class_name)
    if is_encoder(config):
        return AutoModelForMaskedLM
    return AutoModelForCausalLM


def check_loaded(path: str, report: dict[str, Any]) -> None:
    """Raise ValueError, with a list of all weights that were missing, unexpected or of another shape."""
    unexpected = [name for name in report["unexpected_keys"] if not any(part in name for part in PRETRAINING_WEIGHTS)]
    mismatched = [(name, tuple(stored), tuple(expected)) for name, stored, expected in report["mismatched_keys"]]
    wrong: dict[str, list[Any]] = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(unexpected),
        "mis-shaped (name, file, model)": sorted(mismatched),
        "errors": list(report["error_msgs"]),
    }
    lines = [f"{len(names)} {problem}: {names}" for problem, names in wrong.items() if names]
    if lines:
        lists = "\n".join(lines)
        raise ValueError(f"{path}: the weights do not fit the model that config.json describes\n{lists}")
