"""The pocket base models: tokenizers, the committed models and SFT sets, which the scripts reproduce; Sudoku's
traces."""

import csv
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from transformers import LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.kinds import block_size
from d1.tasks.sudoku import solution_grids
from pocket import make_base, make_sft_data
from pocket.answers import completion
from pocket.demo import BLOCK_BASE
from pocket.recipes import RECIPES
from pocket.sudoku_traces import problems
from pocket.tokenizer import build_tokenizer
from tests.d1.tasks.test_problem_sets import solutions
from tests.sandbox import skip_without_sandbox

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "pocket" / "base"
SUDOKU = RECIPES["sudoku"]
CAUSAL_BASE = "causal_base"
BASES = {recipe.base: recipe for recipe in RECIPES.values()} | {BLOCK_BASE: SUDOKU, CAUSAL_BASE: SUDOKU}
TRAIN = ROOT / "dataset" / "sudoku_train.csv"
QUESTION = "Solve the following Sudoku puzzle: 0002403020033024\n"
ANSWER = completion("careful a3 b1", "a3 b1 c4 d2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(BASE))


@pytest.fixture(scope="module")
def puzzles():
    return problems(TRAIN)(200, np.random.default_rng(0))


@pytest.mark.parametrize("base", BASES)
def test_shipped_tokenizer_is_the_one_the_script_makes(base):
    tokenizer, made = load_tokenizer(str(ROOT / "pocket" / base)), build_tokenizer(BASES[base].task)
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template
    ids = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id}
    assert len(ids) == 4
    assert None not in ids
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("content", ["What is 2 + 2?", "Sudoku: 000240302003302", "Sudoku: 0002403020033025"])
def test_a_prompt_that_is_no_puzzle_is_refused_and_unknown_words_are(tokenizer, content):
    with pytest.raises(TemplateError, match="16 digits 0-4"):
        tokenizer.apply_chat_template([{"role": "user", "content": content}])
    with pytest.raises(Exception, match="UNK"):
        tokenizer("hello")


def test_solution_grids_are_all_288_that_the_rules_allow():
    grids = solution_grids()
    assert grids == sorted(grids)
    assert len(set(grids)) == 288
    assert {"".join(map(str, grid)) for grid in solutions([0] * 16)} == {*grids}


def test_puzzles_have_six_holes_and_one_solution(puzzles):
    with open(TRAIN, newline="") as file:
        known = {row["Solution"] for row in csv.DictReader(file)}
    for puzzle, solution in puzzles:
        assert (puzzle == 0).sum() == 6
        assert (puzzle[puzzle > 0] == solution[puzzle > 0]).all()
        assert solutions(puzzle.tolist()) == [solution.tolist()]
        assert "".join(map(str, solution)) in known


@pytest.mark.parametrize("name", BASES)
def test_base_is_small_bidirectional_and_loads_exactly(name):
    """Also for blocks: the first token sees the eighth, where its block ends, and no later one. With a causal context,
    a clean token sees no later one."""
    base = ROOT / "pocket" / name
    assert sum(file.stat().st_size for file in base.rglob("*") if file.is_file()) <= 4_000_000
    model = load_model(str(base))
    assert model.num_parameters() <= 2_000_000
    assert model.config.is_causal is False
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt_tokens, blocks = BASES[name].prompt_tokens, block_size(model.config)
    assert blocks == (8 if name in (BLOCK_BASE, CAUSAL_BASE) else None)
    ids = torch.arange(4, 4 + prompt_tokens).unsqueeze(0)
    last = prompt_tokens - 1 if blocks is None else blocks - 1

    def first_token(changed: int | None = None) -> torch.Tensor:
        other = ids.clone()
        if changed is not None:
            other[0, changed] = 3
        with torch.no_grad():
            return model(input_ids=other, attention_mask=torch.ones_like(ids)).logits[0, 0]

    assert ((first_token(last) - first_token()).abs().max() > 1e-3) == (name != CAUSAL_BASE)
    assert blocks is None or torch.equal(first_token(last + 1), first_token())


# Each base at both lengths; the second is slow, and so is judging 512 programs.
CARDS = [
    pytest.param(name, at, marks=pytest.mark.slow if at or BASES[name].task == "programs" else ())
    for name, at in itertools.product(BASES, (0, 1))
]


@pytest.mark.parametrize(("name", "at"), CARDS)
def test_base_solves_what_its_card_says(name, at):
    base, recipe = ROOT / "pocket" / name, BASES[name]
    skip_without_sandbox(recipe.task)
    rate = make_base.solve_rate(load_model(str(base)), load_tokenizer(str(base)), recipe.task, recipe.lengths[at])
    row = next(line for line in (base / "README.md").read_text().splitlines() if "(this model)" in line)
    assert rate == pytest.approx(float(row.split("|")[2 + at]), abs=0.01)  # another CPU may break a few ties


@pytest.mark.parametrize("task", RECIPES)
def test_make_base_in_miniature_is_deterministic(task, monkeypatch):
    recipe = dataclasses.replace(RECIPES[task], batch_size=8)
    draw = recipe.traces.problems(ROOT / "dataset" / recipe.training_file)
    monkeypatch.setattr(make_base, "solve_rate", lambda *_: 0.0)

    def weights(seed: int) -> torch.Tensor:
        model, _ = make_base.pretrain(recipe, draw, (2, 3), seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = weights(5)
    assert torch.equal(whole, weights(5))
    assert not torch.equal(whole, weights(6))


@pytest.mark.parametrize("flags", [["--block_size", "8"], ["--hidden_size", "128"]])
def test_a_model_of_another_kind_or_size_does_not_replace_the_base(flags, monkeypatch):
    monkeypatch.setattr(make_base, "pretrain", lambda *_: pytest.fail("the training began"))
    with pytest.raises(ValueError, match=r"would replace .*pocket/base: give --output_dir"):
        make_base.main(make_base.make_parser().parse_args(flags))


@pytest.mark.parametrize(("size", "least_noise"), [(None, 0.0), (8, 0.0), (None, 0.6)])
def test_diffusion_loss_is_llada_s(tokenizer, size, least_noise):
    """Compared with the sum written out token by token with the same mask; with blocks, one at a time after clean
    text."""
    model = make_base.build_model(tokenizer, seed=0, block_size=size).eval()
    assert make_base.solve_rate(model, tokenizer, "sudoku", 8) == 0  # it has learned nothing, and can be sampled
    key, draw = (3, 1, 7), SUDOKU.traces.problems(TRAIN)
    ids = make_base.draw_batch(tokenizer, SUDOKU, draw, key)[:6]
    seen = []
    model.base_model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"]), with_kwargs=True)
    loss = make_base.diffusion_loss(model, ids, SUDOKU.prompt_tokens, tokenizer.mask_token_id, key, least_noise)
    length = ids.shape[1]
    # With blocks, the model's input is two streams; the second begins with the block in which the prompt ends.
    noised = seen[0] if size is None else torch.cat([ids[:, :16], seen[0][:, length:]], dim=1)
    masked = noised == tokenizer.mask_token_id
    assert not masked[:, : SUDOKU.prompt_tokens].any()
    size = size or length
    starts = torch.rand(-(-length // size), generator=keyed_generator(*key)).tolist()
    total = 0.0
    for block, start in enumerate(starts):
        place = slice(size * block, size * (block + 1))
        text = torch.cat([ids[:, : place.start], noised[:, place]], dim=1)
        logp = model(input_ids=text).logits.log_softmax(-1)
        for row, i in masked[:, : text.shape[1]].nonzero().tolist():
            if i >= place.start:
                t = least_noise + (1 - least_noise) * ((start + row / 6) % 1)
                total -= logp[row, i, ids[row, i]].item() / (0.999 * t + 0.001)
    assert loss.item() == pytest.approx(total / (6 * (ids.shape[1] - SUDOKU.prompt_tokens)), rel=1e-5)


def test_the_loss_with_a_causal_context_is_that_of_masks_written_out(tokenizer):
    """Blocks begin with the answer; each follows the clean text before it, whose own next tokens count, too."""
    model = make_base.build_model(tokenizer, seed=0, block_size=8, causal_context=True).eval()
    key, start = (3, 1, 7), SUDOKU.prompt_tokens
    ids = make_base.draw_batch(tokenizer, SUDOKU, SUDOKU.traces.problems(TRAIN), key)[:4]
    seen = []
    hook = model.base_model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"]), with_kwargs=True)
    loss = make_base.diffusion_loss(model, ids, start, tokenizer.mask_token_id, key)
    hook.remove()
    length = ids.shape[1]
    noised = torch.cat([ids[:, :start], seen[0][:, length:]], dim=1)
    masked, total = noised == tokenizer.mask_token_id, 0.0
    plain = LlamaForCausalLM(model.config).eval()  # without this library's masks
    plain.load_state_dict(model.state_dict())
    places = torch.arange(length)
    causal = plain(input_ids=ids, attention_mask=(places <= places[:, None])[None, None]).logits.log_softmax(-1)
    total -= causal[:, start - 1 : -1].gather(2, ids[:, start:, None]).sum().item()
    u = torch.rand(-(-(length - start) // 8), generator=keyed_generator(*key)).tolist()
    for block, first in enumerate(range(start, length, 8)):
        text = torch.cat([ids[:, :first], noised[:, first : first + 8]], dim=1)
        place = torch.arange(text.shape[1])
        sees = (place <= place[:, None]) | (place >= first) & (place[:, None] >= first)
        logp = plain(input_ids=text, attention_mask=sees[None, None]).logits.log_softmax(-1)
        for row, i in masked[:, : text.shape[1]].nonzero().tolist():
            if i >= first:
                total -= 0.3 * logp[row, i, ids[row, i]].item() / (0.999 * ((u[block] + row / 4) % 1) + 0.001)
    assert masked.any()
    assert loss.item() == pytest.approx(total / (4 * (length - start)), rel=1e-5)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=[*RECIPES])
def test_sft_set_is_what_the_script_makes(recipe):
    lines = (ROOT / "dataset" / recipe.sft_file).read_text().splitlines()
    made = make_sft_data.curated_rows(recipe, recipe.traces.problems(ROOT / "dataset" / recipe.training_file), seed=0)
    assert [json.loads(line) for line in lines[:100]] == [next(made) for _ in range(100)]
    assert len(lines) == len({json.loads(line)["question"] for line in lines}) == 1000
