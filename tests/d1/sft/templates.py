"""The chat templates of the installed TRL, each with a tokenizer that has one token per byte and the special ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d1.models.tokenizer import END_OF_TURN

OF_TRL = Path(trl.__file__).parent / "chat_templates"
OWN = Path(__file__).parents[2] / "real_files"
NAMES = sorted(path.stem for path in OF_TRL.glob("*.jinja") if not path.stem.endswith("_training"))
SPECIAL = re.compile(r"<[|｜][^<>{}\s]+>|<[a-z_]+\|>|<end_of_[a-z]+>|<start_of_[a-z]+>|</?think>")


def byte_tokenizer(template: str) -> Any:
    """A tokenizer with the template of this name, of TRL or of tests/real_files, and the special tokens in its text."""
    text = next(path for folder in (OF_TRL, OWN) if (path := folder / f"{template}.jinja").is_file()).read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    turn_ends = [token for token in END_OF_TURN if token in text]  # as `load_tokenizer` finds them
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=text,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
        extra_special_tokens={"eot_token": turn_ends[0] if turn_ends else "<eos>"},
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(dict.fromkeys(SPECIAL.findall(text))), special_tokens=True)
    return tokenizer


def trained_texts(tokenizer: Any, ids: list[int], trained: list[bool]) -> list[str]:
    """The texts that are trained on, in order, without the EOS that ends the row."""
    assert trained[-1]
    assert ids[-1] == tokenizer.eos_token_id
    runs: list[list[int]] = []
    for at, (token, is_trained) in enumerate(zip(ids[:-1], trained[:-1], strict=True)):
        if is_trained and (at == 0 or not trained[at - 1]):
            runs.append([])
        if is_trained:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]
