"""The tokenizers of Dream and SDAR, from Qwen's real `vocab.json` and `merges.txt`, which stay outside the repository:
D1_FILES names the folder that holds them in `qwen/`."""

from __future__ import annotations

import json
import os
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from benchmarks.true_size import RELEASED, copy_vocabulary
from d1.models import load_tokenizer

QWEN = Path(os.environ.get("D1_FILES", "/nowhere")) / "qwen"
WORD = (  # the pattern of Qwen2's tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "Hello world",
    "def add(a, b):\n    return a + b  # 12345.678\n\n\n",
    "<answer>\n0x1F café naïve Ünïcode 你好，世界 😀 don't WE'LL\t\ttabs   spaces \r\n</answer>",
    "Solve: $\\frac{3}{4} \\times 2 = ?$",
)


def slow_bpe(text: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-level BPE, one merge at a time: of all neighbours, the leftmost pair of lowest rank."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters of bytes
    spare = (b for b in range(256) if b not in printable)
    letter = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(spare)}
    ids = []
    for word in regex.findall(WORD, unicodedata.normalize("NFC", text)):
        parts = [letter[b] for b in word.encode()]
        while pairs := [(ranks[pair], n) for n, pair in enumerate(pairwise(parts)) if pair in ranks]:
            _, at = min(pairs)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        ids += [vocab[part] for part in parts]
    return ids


@pytest.mark.skipif(not (QWEN / "vocab.json").is_file(), reason="set D1_FILES to a folder with qwen/vocab.json")
@pytest.mark.parametrize("model", ["dream-7b", "sdar-1.7b"])
def test_dream_and_sdar_tokenise_with_their_real_vocabulary(tmp_path, model):
    config, _, special = RELEASED[model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    copy_vocabulary(tmp_path, QWEN, special)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.eot_token_id) == (*special,)
    assert tokenizer.mask_token_id == config["mask_token_id"]
    vocab = json.loads((QWEN / "vocab.json").read_text(encoding="utf-8"))
    lines = (QWEN / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    ranks = {(first, second): n for n, (first, second) in enumerate(line.split(" ") for line in lines)}
    assert tokenizer(TEXTS[0]).input_ids == [9707, 1879]  # as Qwen publishes it
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == slow_bpe(text, vocab, ranks)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize("NFC", text)
    end = tokenizer.eot_token
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert prompt == f"user: Hello{end}"
    assert tokenizer(prompt).input_ids[-1] == tokenizer.eot_token_id
