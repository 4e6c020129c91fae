"""Models in GGUF, the format of llama.cpp: one file with config, weights in blocks of few bits, and tokenizer.

Transformers reads all three (its `gguf_file`), with the package `gguf`. The weights are unpacked: training needs them
as plain numbers, and a model saved from them needs no GGUF any more.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d1.files import reading
from d1.models.kinds import check_kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # the name that llama.cpp gives to a part of a split file
MISSING = "needs the package gguf: pip install -e '.[gguf]' in the checkout, or pip install gguf"


def gguf_file(source: str) -> Path | None:
    """The GGUF file that `source` is, or the only one of a folder without a `config.json`; None if there is none.
    ValueError for several files and for a part of a split one."""
    path = Path(source)
    files: list[Path] = []
    if path.is_file() and path.suffix == SUFFIX:
        files = [path]
    elif path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
    for file in files:
        part = PART.search(file.name)
        if part is not None:
            raise ValueError(
                f"{file} is one of {int(part[1])} parts of a split GGUF: join them first, with llama-gguf-split --merge"
            )
    if len(files) > 1:
        raise ValueError(f"{source} has {len(files)} GGUF files: name one of {', '.join(map(str, files))}")
    return files[0] if files else None


def gguf_reader(file: Path) -> Any:
    """The reader of a file's fields and tensors. ValueError for a damaged file, ImportError without the package
    gguf."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {file} {MISSING}") from error
    try:
        return GGUFReader(file)
    except Exception as error:  # of several classes: the package checks little
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{file}: the GGUF file is damaged or cut off: copy or download it again ({reason})"
        ) from error


def gguf_types(file: Path) -> str:
    """How the numbers of a file are stored, the most frequent type first: "Q4_1, F32 and Q8_0". Raises as
    `gguf_reader`."""
    numbers: Counter[str] = Counter()
    for tensor in gguf_reader(file).tensors:
        numbers[tensor.tensor_type.name] += int(tensor.n_elements)
    names = [name for name, _ in numbers.most_common()]
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


@contextmanager
def folder_with_only(file: Path) -> Iterator[str]:
    """A temporary folder with a link to the file: from the file's own folder, Transformers would also take other files,
    such as a tokenizer or an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield folder


def gguf_config(file: Path) -> PreTrainedConfig:
    """The config of the class of Transformers that a GGUF file is for; ValueError if it is for none."""
    from transformers import AutoConfig

    with reading(file, "Transformers finds no config in the GGUF file"), folder_with_only(file) as folder:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    vars(config).pop("_model_name_or_path", None)  # the file's title
    check_kind(config.model_type, str(file))
    scale_positions(config, file)
    return config


def scale_positions(config: PreTrainedConfig, file: Path) -> None:
    """Give a config the scaling of rotary positions that a file names, which Transformers (5.24) does not read. Only a
    linear one of all layers is supported: ValueError for others."""
    fields = gguf_reader(file).fields
    architecture = fields["general.architecture"].contents()
    values: dict[str, Any] = {}
    for name in ("type", "factor"):
        field = fields.get(f"{architecture}.rope.scaling.{name}")
        values[name] = None if field is None else field.contents()
    old_factor = fields.get(f"{architecture}.rope.scale_linear")  # in files of 2023
    if values["factor"] is None and old_factor is not None:
        values["factor"] = old_factor.contents()

    scaling = values["type"] or "linear"  # as llama.cpp has it
    factor = values["factor"] or 1.0
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return
    parameters = getattr(config, "rope_parameters", None) or {}
    if scaling != "linear" or "rope_theta" not in parameters:
        raise ValueError(
            f"{file} scales rotary positions ({architecture}.rope.scaling.type {scaling}, factor {factor:g}), which is "
            f"not supported for a GGUF with a {config.model_type}: convert the model's original folder instead"
        )
    config.rope_parameters = {**parameters, "rope_type": "linear", "factor": factor}


def load_gguf(file: Path, config: PreTrainedConfig) -> tuple[Any, Any, dict[str, Any]]:
    """The model with its weights unpacked to fp32, its tokenizer, and what Transformers reports about the weights, as
    with `output_loading_info`; `config` is from `gguf_config`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with folder_with_only(file) as folder:
        with reading(file, "Transformers cannot read the weights of the GGUF file"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                gguf_file=file.name,
            )
        with reading(file, "Transformers cannot read the tokenizer of the GGUF file"):
            tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", gguf_file=file.name)
    model, report = loaded
    tokenizer.name_or_path = str(file)
    return model, tokenizer, report


def check_all_used(file: Path, model: Any) -> None:
    """Raise ValueError for a file with tensors that are in none of the model's weights, all of which came from it:
    Transformers leaves out what its class does not have, such as biases or `rope_freqs.weight`."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    reader = gguf_reader(file)
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    if stored == sum(weight.numel() for weight in model.parameters()):
        return

    # The names that the package gguf has for the model's weights
    architecture = reader.fields["general.architecture"].contents()
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    used = {names.get_name(name, (".weight", ".bias")) for name in model.state_dict()}
    unused = [tensor.name for tensor in reader.tensors if tensor.name not in used]
    raise ValueError(
        f"{file} has {len(unused)} tensors that a {model.config.model_type} of Transformers does not use, such as "
        f"{', '.join(unused[:3])}: without them the model computes something else. Convert the model's original "
        "folder instead"
    )
