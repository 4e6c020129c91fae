"""Models in GGUF, the format of llama.cpp: one file with config, weights in blocks of few bits, and tokenizer.

Transformers reads all three (its `gguf_file`), with the package `gguf`. The weights are unpacked: training needs them
as plain numbers, and a model saved from them needs no GGUF any more.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d1.files import reading

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


def gguf_types(file: Path) -> str:
    """How the numbers of a file are stored, the most frequent type first: "Q4_1, F32 and Q8_0". ValueError for a
    damaged file, ImportError without the package gguf."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {file} {MISSING}") from error
    try:
        tensors = GGUFReader(file).tensors
    except Exception as error:  # of several classes: the package checks little
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{file}: the GGUF file is damaged or cut off: copy or download it again ({reason})"
        ) from error
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        numbers[tensor.tensor_type.name] += int(tensor.n_elements)
    names = [name for name, _ in numbers.most_common()]
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def gguf_config(file: Path) -> PreTrainedConfig:
    """The config of the class of Transformers that a GGUF file is for; ValueError if it is for none."""
    from transformers import AutoConfig

    with reading(file, "Transformers finds no config in the GGUF file"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    vars(config).pop("_model_name_or_path", None)  # the file's title
    return config


def load_gguf(file: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The model with its weights unpacked to fp32, its tokenizer, and what Transformers reports about the weights, as
    with `output_loading_info`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with reading(file, "Transformers cannot read the weights of the GGUF file"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=gguf_config(file),
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            gguf_file=file.name,
        )
    with reading(file, "Transformers cannot read the tokenizer of the GGUF file"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, padding_side="left", gguf_file=file.name)
    model, report = loaded
    return model, tokenizer, report
