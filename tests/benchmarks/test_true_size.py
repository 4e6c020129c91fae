"""Speeds in the log of a run, and the tables computed from them; and the tokenizers of Dream and SDAR, from Qwen's real
`vocab.json` and `merges.txt`. These stay outside the repository: D1_FILES names the folder that holds them in `qwen/`.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from benchmarks.true_size import RELEASED, copy_vocabulary, speeds
from d1.commands.fit import UTILISATION
from d1.models import load_tokenizer
from d1.rl.config import DiffuGRPOConfig
from tests.commands import ROOT

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


# --- Speeds, and the tables that are computed from them ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_once", "rows", "seconds"), [(6, 12, 0.12), (None, 12, 0.24), (4, 12, 0.08), (8, 12, 0.12)]
)
def test_a_pass_is_one_over_the_rows_that_are_sampled_at_once(tmp_path, at_once, rows, seconds):
    """A rollout of 12 rows in 128 steps took 30.72 s: one batch of 12 rows, two (of 6, or of 8 and 4) or three."""
    settings = {"per_device_train_batch_size": 6, "steps_per_generation": rows // 6, "rollout_batch_size": at_once}
    assert settings.keys() <= {field.name for field in fields(DiffuGRPOConfig)}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    first = {"step_time": 33.0, "seconds/rollout": 30.72, "sampling/forward_passes": 128.0}
    steps = [first, {"step_time": 0.6}, {"step_time": 0.51}, {"train_loss": 0.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert speeds(tmp_path) == pytest.approx({"seconds/pass": seconds, "seconds/update": 0.51})
    assert speeds(tmp_path / "sft") == {}


def test_the_table_of_more_gpus_has_the_measured_seconds():
    """Per optimizer step: 128 / 12 passes of the rollout, an update, and a pass each for old and reference scores."""
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    measured = page[page.index("\n## GPU") : page.index("\n## More GPUs")]
    table = page[page.index("\n## More GPUs") :]
    one_pass, update = map(
        float, re.search(r"\| rl \| [\d.]+ \| [\d.]+ \| \d+ \| ([\d.]+) \| ([\d.]+) \|", measured).groups()
    )
    scores = float(re.search(r"\| ours, mu masks \| ([\d.]+) \|", measured)[1])
    longer = (200 + 256) / (156 + 256)
    lines = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \| (\d+)% \| (\d+) \|$", table, re.MULTILINE)
    assert [int(gpus) for gpus, *_ in lines] == [1, 8, 16, 32, 64]
    for line in lines:
        gpus, speed, seconds, share, hours = (float(number.replace(",", "")) for number in line)
        rows = math.ceil(96 / gpus)
        rollout = 128 / 12 * one_pass / 6 * longer * rows
        reduced = 2 * (gpus - 1) / gpus * 336e6 * 4 / 50e9
        total = rollout + update / 12 * longer * rows + 2 * scores / 12 / 6 * rows + reduced
        assert speed == pytest.approx(96 * 256 / (12 * rollout), rel=0.01)
        assert seconds == pytest.approx(total, rel=0.02)
        assert share / 100 == pytest.approx(rollout / total, abs=0.006)
        assert hours == pytest.approx(gpus * total * 10_000 / 3600, rel=0.01)


def test_rl_on_the_h200_reached_the_share_of_its_peak_that_fit_assumes():
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    row = re.search(r"\| rl \| [\d.]+ \| [\d.]+ \| \d+ \| ([\d.]+) \| ([\d.]+) \|", page[page.index("\n## GPU") :])
    one_pass, update = map(float, row.groups())
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 126464 * 4096
    token = 2 * weights + 4 * 32 * 4096 * 412
    shares = [6 * 412 * token / one_pass / 989e12, 2 * 12 * 412 * token / update / 989e12]
    assert shares == pytest.approx([UTILISATION["rl"]] * 2, abs=0.02)
