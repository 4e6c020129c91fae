"""An attention from outside the package, in one file, compared with dense masks written out position by position."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.attention import ATTENTION, Attention
from d1.models.convert import export
from d1.models.head import backbone_and_head
from d1.models.kinds import KINDS, Kind
from d1.models.packing import enable_packed_rows, packed_two_stream_states, two_stream_states
from d1.rl.train import main, make_parser
from d1.sampling import SamplingSettings, rollout
from d1.sampling.settings import check_sampler
from d1.scoring.views import Views, score
from tests.commands import ROOT
from tests.d1.sampling.reference import check_row, sample
from tests.rounding import LOGITS, assert_near, rounding

SIZE, WINDOW, MASK, VOCAB = 4, 2, 3, 40
LENGTHS = [11, 1, 9]


@pytest.fixture(autouse=True)
def own_rows() -> Iterator[None]:
    """The rows of the user's file, gone after the test."""
    tables: tuple[dict[str, Any], ...] = (ATTENTION, KINDS)
    before = [dict(table) for table in tables]
    runpy.run_path(str(ROOT / "tests" / "own_attention.py"))
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model, released as the user's kind."""
    shutil.copytree(tiny_model_dir, tmp_path / "own")
    change_config(tmp_path / "own", model_type="own_window", window=WINDOW)
    return tmp_path / "own"


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class Dense:
    """Transformers' own model with a mask that says for each two positions whether one sees the other."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()

    def logits(self, ids: Tensor) -> Tensor:
        places = range(len(ids))
        seen = [[j // SIZE <= i // SIZE and abs(i - j) <= WINDOW for j in places] for i in places]
        with torch.no_grad():
            return self.model(input_ids=ids[None], attention_mask=torch.tensor(seen)[None, None]).logits[0]

    def block_by_block(self, clean: Tensor, noised: Tensor) -> Tensor:
        """Each noised block after the clean blocks that precede it."""
        starts = range(0, len(clean), SIZE)
        texts = [torch.cat([clean[:start], noised[start : start + SIZE]]) for start in starts]
        return torch.cat([self.logits(text)[start:] for start, text in zip(starts, texts, strict=True)])


def text(length: int, key: int) -> Tensor:
    return torch.randint(8, VOCAB, (length,), generator=keyed_generator(key))


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_logits_in_padded_batches_packed_rows_and_two_streams(folder, tiny_model_dir, kernel):
    model: Any = load_model(folder, attn_implementation=kernel)
    head, dense = backbone_and_head(model)[1], Dense(tiny_model_dir)
    clean = [text(length, length) for length in LENGTHS]
    noised = [ids.masked_fill(torch.rand(len(ids), generator=keyed_generator(0)) < 0.6, MASK) for ids in clean]
    ids, visible = torch.full((3, 13), 7), torch.zeros(3, 13, dtype=torch.long)
    copies = ids.clone()
    for row, own in enumerate(clean):
        at = slice(row, row + len(own))  # padding on one side, or on both
        ids[row, at], copies[row, at], visible[row, at] = own, noised[row], 1
    with torch.compiler.set_stance("force_eager"):
        batch = model(input_ids=ids, attention_mask=visible).logits
        streams = head(two_stream_states(model, ids, copies, visible))
        for row, own in enumerate(clean):
            at = slice(row, row + len(own))
            assert_near(batch[row, at], dense.logits(own))
            expected = dense.block_by_block(own, noised[row])
            assert_near(streams[row, at], expected)
        enable_packed_rows(model)
        row = torch.cat(clean)
        packed = head(backbone_and_head(model)[0](row[None], None, segments=[(n, 0) for n in LENGTHS]))[0]
        assert_near(packed, torch.cat([dense.logits(own) for own in clean]))
        hidden = torch.cat(noised) == MASK
        both = head(packed_two_stream_states(model, row[None], torch.cat(noised)[None], LENGTHS, hidden[None]))
        expected = torch.cat([dense.block_by_block(*pair) for pair in zip(clean, noised, strict=True)])[hidden]
        assert_near(both, expected)
    far = dense.logits(torch.cat([text(9, 9)[:1] + 1, text(9, 9)[1:]])) - dense.logits(text(9, 9))
    assert far[0].abs().max() > 1e-3 > far[7].abs().max() == 0, "two layers reach two windows, and no further"


def test_samples_are_those_of_a_slow_sampler_and_the_cache_of_finished_blocks_is_exact(folder):
    model: Any = load_model(folder)
    settings = SamplingSettings(gen_length=10, block_length=SIZE, steps=10)
    ids, visible = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
    for row, length in enumerate((6, 3)):
        ids[row, -length:], visible[row, -length:] = text(length, row), 1
    cached, whole = (rollout(model, ids, visible, settings, mask_token_id=MASK, recompute=of) for of in (False, True))
    assert torch.equal(cached.ids, whole.ids)
    assert (cached.forward_tokens < whole.forward_tokens).all()
    for row, length in enumerate((6, 3)):
        check_row(cached, row, length, sample(model, text(length, row).tolist(), settings, keyed_generator(0)))


@torch.no_grad()
def test_scores_are_those_of_dense_masks(folder, tiny_model_dir):
    model, dense, prompt, completion = load_model(folder), Dense(tiny_model_dir), text(5, 3), text(9, 4)
    hidden = torch.rand(9, generator=keyed_generator(6)) < 0.6
    noise = torch.cat([torch.zeros(5, dtype=torch.bool), hidden])[None, None]
    views, clean = Views(noise, hidden.float()[None, None]), torch.cat([prompt, completion])
    found = score(
        model, prompt[None], torch.ones(1, 5), completion[None], views, mask_token_id=MASK, gen_length=9
    ).logps[0]
    logps = dense.block_by_block(clean, clean.masked_fill(noise[0, 0], MASK)).log_softmax(-1)[5:]
    expected = logps.gather(1, completion[:, None])[:, 0] * hidden
    assert_near(found, expected)


def test_it_trains_and_what_is_saved_keeps_its_name(folder, tmp_path):
    settings: dict[str, Any] = {"model_path": folder, "output_dir": tmp_path / "run", "max_steps": 1, "seed": 1}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    settings |= {"diffusion_steps": 8, "learning_rate": 1e-3, "report_to": "none", "logging_steps": 1}
    settings |= {"task": ROOT / "tests/d1/rl/letters_task.py", "method": "cj-grpo"}
    main(
        *make_parser().parse_args_and_config([str(word) for name in settings for word in (f"--{name}", settings[name])])
    )
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["ratio_max"] == pytest.approx(1, abs=rounding(LOGITS))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["model_type"], saved["attention_pattern"]) == ("llama", "window-within-blocks")
    ids, trained = text(9, 1)[None], load_model(tmp_path / "run")
    expected = Dense(tmp_path / "run").logits(ids[0])
    assert_near(trained(input_ids=ids).logits[0], expected)
    del ATTENTION["window-within-blocks"]
    with pytest.raises(ValueError, match="run: unknown attention 'window-within-blocks': known are full, block-causal"):
        load_model(tmp_path / "run")


def test_what_it_asks_for_is_checked(folder):
    KINDS["own_window"] = Kind(becomes="llama", attention="windw")
    with pytest.raises(ValueError, match="own: unknown attention 'windw': known are full, block-causal, causal-cont"):
        load_model(folder)
    KINDS["own_window"] = Kind(becomes="llama", attention="window-within-blocks", block_size=SIZE)
    change_config(folder, window=0)
    with pytest.raises(ValueError, match="window must be positive and whole, got 0"):
        load_model(folder)
    ATTENTION["near"] = Attention(lambda config, query, key: (query - key).abs() <= 2)
    KINDS["own_window"] = Kind(becomes="llama", attention="near", block_size=SIZE)
    with pytest.raises(ValueError, match=r"near attention lets tokens see blocks after .* block_size \(4\)"):
        load_model(folder)


def test_a_cache_that_it_does_not_list_is_refused():
    """The caches of full attention store keys out of order."""
    near = ATTENTION["near"] = Attention(lambda config, query, key: (query - key).abs() <= 2)
    cached, config = SamplingSettings(8, 4, 8, sampler="cached"), LlamaConfig(attention_pattern="near")
    with pytest.raises(ValueError, match="the cache dual is wrong for near attention, which allows none"):
        check_sampler(cached, config)
    ATTENTION["near"] = Attention(near.sees, caches=("dual",))
    check_sampler(cached, config)


def test_llada_has_full_attention_alone(folder, tmp_path):
    ATTENTION["near"] = Attention(lambda config, query, key: (query - key).abs() <= 2)
    change_config(folder, model_type="llama", attention_pattern="near")
    with pytest.raises(ValueError, match=r"only a Llama with full attention .*'attention_pattern': 'near'"):
        export(str(folder), str(tmp_path / "out"), "llada")
    change_config(folder, attention_pattern="full")
    export(str(folder), str(tmp_path / "out"), "llada")
