"""Traces of all tasks: right by construction where they claim to be, wrong as described elsewhere."""

import json
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from d1.tasks import answer_block, load_task
from d1.tasks.arithmetic import Step
from pocket import arithmetic_traces, countdown_traces, programs_traces
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


def test_prompts_spell_the_question_in_as_many_tokens_as_the_recipe_says(drawn):
    recipe, problems = drawn
    tokenizer = build_tokenizer(recipe.task)
    skip_without_sandbox(recipe.task)
    asked = load_task(recipe.task).load_rows("validation")[0]
    questions = [recipe.traces.question(*problem) for problem in problems]
    chats = [(asked["prompt"], asked["question"]), *(([{"role": "user", "content": q}], q) for q in questions)]
    for chat, question in chats:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert len(ids) == recipe.prompt_tokens
        words = tokenizer.decode(ids).removeprefix("<bos> ").removesuffix(" =>").split()
        if recipe.task == "sudoku":
            cells = zip("abcdefghijklmnop", question.strip()[-16:].replace("0", "."), strict=True)
            assert words == ["".join(cell) for cell in cells]
        elif recipe.task == "pocket_countdown":
            assert words == re.findall(r"\d+", question)
        elif recipe.task == "programs":
            texts = zip("yz", re.findall(r"= '(\w+)'", question), strict=True)
            assert words == [f"{name}{i}{letter}" for name, text in texts for i, letter in enumerate(text)]
        else:
            assert words == re.findall(r"\w+|[.?]", question)


def test_the_mixture_is_half_quick_a_third_of_it_malformed(drawn):
    (recipe, problems), rng = drawn, np.random.default_rng(3)
    texts = [recipe.write(1, problem, rng) for problem in problems for _ in range(10)]
    shares = [sum(style in text for text in texts) / len(texts) for style in ("careful", "scan", "quick")]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
    assert sum(not WELL_FORMED.fullmatch(text) for text in texts) / len(texts) == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_answers_have_no_whole_answer(kind):
    text = malform("quick 7 + 5 = 12 ; 12 + 2 = 14", "( 7 + 5 ) + 2", kind, np.random.default_rng(4), hums=10)
    assert not WELL_FORMED.fullmatch(text)
    assert (answer_block(text) is not None) == (kind == "truncated")


def test_countdown_styles_go_as_described():
    solve = countdown_traces.solve
    assert solve((7, 5, 2), 37, "quick")[:7] == (7, "+", 5, 12, "+", 2, 14)
    assert solve((7, 5, 2), 1, "scan").value == 0  # 7 - 5 - 2; 4, 10 and 14 are farther
    assert solve((7, 5, 2), 37, "careful")[:6] == (7, "*", 5, 35, "+", 2)
    assert solve((6, 2, 3), 36, "careful")[:7] == (3, "*", 2, 6, "*", 6, 36)  # of three ways by * and *, the first
    assert solve((6, 3, 2), 11, "careful").second == "+"  # 6 + 3 + 2, not (6 * 3) - 7
    assert countdown_traces.trace("scan", (7, 5, 2), 14) == ("scan 7 + 5 = 12 ; 12 + 2 = 14", "( 7 + 5 ) + 2")


def test_arithmetic_styles_go_as_described():
    steps = (Step("+", 8), Step("*", 2), Step("-", 5))
    told = {style: arithmetic_traces.trace(style, "", 27, steps)[0] for style in ("careful", "scan", "quick")}
    assert told == {
        "careful": "careful 27 + 8 = 35 ; 35 * 2 = 70 ; 70 - 5 = 65",
        "scan": "scan 27 + 8 = 35 ; 35 * 2 = 70 ; 70 - 5 = 75",
        "quick": "quick 27 + 8 = 25 ; 25 * 2 = 40 ; 40 - 5 = 45",
    }
    question = "Ann has 27 pens. She finds 8. She doubles them. She drops 5. How many pens?"
    quality = [arithmetic_traces.quality(f"<reasoning>{told[s]}</reasoning>", question, 27, steps) for s in told]
    assert quality == pytest.approx([1, 2 / 3, 0])


def test_program_styles_go_as_described():
    function = (3, 3, 4, 3, 1)
    told = {style: programs_traces.trace(style, function) for style in ("careful", "scan", "quick")}
    assert told == {
        "careful": ("careful y[0]=x[3] y[1]=x[3] y[2]=x[4] y[3]=x[3] y[4]=x[1]", "x[3] + x[3] + x[4] + x[3] + x[1]"),
        "scan": ("scan y[0]=x[3] y[1]=x[3] y[2]=x[4] y[3]=x[3] y[4]=x[3]", "x[3] + x[3] + x[4] + x[3] + x[3]"),
        "quick": ("quick y[0]=x[3] y[1]=x[3] y[2]=x[4] y[3]=x[1] y[4]=x[3]", "x[3] + x[3] + x[4] + x[1] + x[3]"),
    }
    quality = [programs_traces.quality(f"<answer>{attempt}</answer>", function) for _, attempt in told.values()]
    assert quality == [1, 0.8, 0.6]


def test_training_numbers_are_those_of_the_file():
    numbers = arithmetic_traces.training_numbers(DATASET / "arithmetic_train.jsonl")
    lines = (DATASET / "arithmetic_train.jsonl").read_text().splitlines()
    for found, line in zip(numbers, lines, strict=True):
        steps = [step.split() for step in json.loads(line)["answer"].splitlines()[:3]]
        assert found == (int(steps[0][0]), *(int(step[2]) for step in steps))
