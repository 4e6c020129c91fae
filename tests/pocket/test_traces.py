"""Traces of all tasks: right by construction where they claim to be, wrong as described elsewhere."""

import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from d1.tasks import answer_block, load_task
from pocket.answers import MALFORMED, malform
from pocket.make_sft_data import WELL_FORMED
from pocket.recipes import RECIPES
from pocket.tokenizer import build_tokenizer
from tests.sandbox import SANDBOXED, skip_without_sandbox

DATASET = Path(__file__).resolve().parents[2] / "dataset"
SIGNS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


@pytest.fixture(scope="module", params=RECIPES)
def drawn(request):
    """A recipe and 300 of its training problems."""
    recipe = RECIPES[request.param]
    return recipe, recipe.traces.problems(DATASET / recipe.training_file)(300, np.random.default_rng(0))


def steps_of(text: str) -> list[tuple[Fraction, str, Fraction, Fraction]]:
    found = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text.partition("</reasoning>")[0])
    return [(Fraction(a), sign, Fraction(b), Fraction(value)) for a, sign, b, value in found]


def truth(recipe, problem):
    """The right answer of a problem: the grid, the target, all examples, or the amount that its sentences give."""
    if recipe.task == "sudoku":
        return "".join(map(str, problem[1]))
    if recipe.task == "pocket_countdown":
        return problem[1]
    if recipe.task == "programs":
        return [[x, "".join(x[place] for place in problem[0])] for x in ("abcde", "edcba", "vwxyz")]
    amount = problem.start
    for sign, k in problem.steps:
        amount = int(SIGNS[sign](Fraction(amount), Fraction(k)))
    return amount


def row_of(recipe, problem):
    value = truth(recipe, problem)
    given = [list(problem[0]), value] if recipe.task == "pocket_countdown" else value
    given = float(value) if recipe.task == "arithmetic" else given
    return {"question": recipe.traces.question(*problem), "ground_truth": given}


def test_careful_answers_are_right_step_by_step(drawn):
    recipe, problems = drawn
    skip_without_sandbox(recipe.task)
    task, rng = load_task(recipe.task), np.random.default_rng(1)
    for problem in problems[: 40 if recipe.task in SANDBOXED else None]:
        text = recipe.write(0, problem, rng)
        if recipe.task == "sudoku":
            assert "".join(re.findall(r"[a-p](\d)", answer_block(text))) == truth(recipe, problem)
        elif recipe.task == "programs":
            assert re.findall(r"y\[(\d)\]=x\[(\d)\]", text) == [(str(i), str(p)) for i, p in enumerate(problem[0])]
        else:
            steps = steps_of(text)
            assert len(steps) == (2 if recipe.task == "pocket_countdown" else 3)
            assert all(SIGNS[sign](a, b) == value for a, sign, b, value in steps)
            assert all(before[3] == after[0] for before, after in pairwise(steps))
            assert steps[-1][3] == truth(recipe, problem)
        assert task.score(text, row_of(recipe, problem))["accuracy"] == 1.0
        assert recipe.traces.quality(text, *problem) == 1.0


def test_answers_fit_the_shortest_canvas_and_survive_the_tokenizer(drawn):
    recipe, problems = drawn
    tokenizer, rng = build_tokenizer(recipe.task), np.random.default_rng(2)
    room, plain = min(recipe.completion_tokens), {}
    for problem in problems:
        careful = recipe.write(0, problem, rng)
        assert room - 1 <= len(tokenizer(careful)["input_ids"]) + 1 <= room
        text = recipe.write(1, problem, rng)
        ids = tokenizer(text)["input_ids"]
        back = tokenizer.decode(ids, skip_special_tokens=True)
        assert back.split() == re.sub("(</?[a-z]+>)", r" \1 ", text).split()
        assert load_task(recipe.task).extract(back) == load_task(recipe.task).extract(text)
        assert len(ids) < max(recipe.completion_tokens)
        plain[bool(WELL_FORMED.fullmatch(text))] = text
    assert len(plain) == 2


def test_prompts_have_as_many_tokens_as_the_recipe_says(drawn):
    recipe, problems = drawn
    tokenizer = build_tokenizer(recipe.task)
    skip_without_sandbox(recipe.task)
    asked = load_task(recipe.task).load_rows("validation")[0]["prompt"]
    questions = [recipe.traces.question(*problem) for problem in problems]
    for chat in (asked, *([{"role": "user", "content": question}] for question in questions)):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert len(ids) == recipe.prompt_tokens


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_answers_have_no_whole_answer(kind):
    text = malform("quick 7 + 5 = 12 ; 12 + 2 = 14", "( 7 + 5 ) + 2", kind, np.random.default_rng(4), hums=10)
    assert not WELL_FORMED.fullmatch(text)
    assert (answer_block(text) is not None) == (kind == "truncated")
