"""Prompt protocols: the prompt, the examples and the answer format of each."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from d1.tasks import PROTOCOLS, TASKS, load_task, shots_of, under_protocol, with_shots

ROWS = {
    "gsm8k": [{"question": f"{i} {{+}} 1?", "answer": f"{i} + 1 = <<1>>{i + 1}\n#### {i + 1}"} for i in range(9)],
    "math": [{"problem": f"Find ${i}+1$.", "solution": rf"It is $\boxed{{{i + 1}}}$."} for i in range(3)],
    "sudoku": [{"Puzzle": "0102230010030400", "Solution": "4132231412433421"}],
}
ASKED = {  # of the first row
    "gsm8k": "Question: 0 {+} 1?\nLet's think step by step.\nAnswer:",
    "math": "Find $0+1$.\nReason step by step and end with the answer in \\boxed{}.",
    "sudoku": "Solve the following Sudoku puzzle: 0102230010030400\n",
}


def rows_file(name: str, folder: Path) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_lladas_protocol_asks_the_question_alone_and_changes_nothing_else_of_a_row(name, tmp_path):
    task, file = load_task(name), rows_file(name, tmp_path)
    changed = under_protocol(task, "llada")
    before, after = (of.load_rows("test", file) for of in (task, changed))
    assert after[0]["prompt"] == [{"role": "user", "content": ASKED[name]}]
    assert after.features == before.features
    assert after.remove_columns("prompt").to_list() == before.remove_columns("prompt").to_list()
    for row in after:
        solved = changed.demonstrate(row)
        assert ("<answer>" in solved) == (name == "sudoku")  # the others' prompts ask for no tags
        assert changed.score(solved, row)["accuracy"] == 1.0
        assert changed.score("nothing", row)["accuracy"] == 0.0
        rewards = [reward([solved, "nothing"], **{k: [v] * 2 for k, v in row.items()}) for reward in changed.REWARDS]
        assert all(right > wrong == 0.0 for right, wrong in rewards)
    assert shots_of(changed) == {"gsm8k": 4, "math": 0, "sudoku": 0}[name]
    assert shots_of(changed, 2) == 2


def test_d1s_protocol_is_the_task_as_it_is_and_a_task_without_another_says_so():
    user = load_task(str(Path(__file__).parent / "reverse_task.py"))
    for task in (*map(load_task, TASKS), user):
        assert under_protocol(task, "d1") is task
        assert shots_of(task) == 0
    for task in (load_task("countdown"), user):
        with pytest.raises(ValueError, match=r"no prompt protocol 'llada': use one of d1$"):
            under_protocol(task, "llada")
    own = {name for task in map(load_task, TASKS) for name in getattr(task, "PROTOCOLS", ())}
    assert {*PROTOCOLS} == {"d1", *own}  # what --help lists
    with pytest.raises(ValueError, match=r"no prompt protocol 'dream': use one of " + ", ".join(PROTOCOLS)):
        under_protocol(load_task("gsm8k"), "dream")


def test_a_protocol_without_a_question_is_refused():
    task = ModuleType("my_task")
    task.PROTOCOLS = {"short": {"SHOTS": 2}}
    with pytest.raises(ValueError, match="prompt protocol 'short' of task my_task has no QUESTION"):
        under_protocol(task, "short")


@pytest.mark.parametrize("question", ["Solve it.", r"{question} Give \boxed{}.", "{question} {answer}", "{question} }"])
def test_a_question_with_no_place_for_the_problem_or_other_fields_is_refused(question):
    task = ModuleType("my_task")
    task.PROTOCOLS = {"short": {"QUESTION": question}}
    with pytest.raises(ValueError, match=r"QUESTION of prompt protocol 'short' of task my_task must have \{question\}"):
        under_protocol(task, "short")


def test_a_name_that_a_protocol_cannot_change_is_refused():
    task = ModuleType("my_task")
    task.PROTOCOLS = {"short": {"QUESTION": "{question}", "FEW_SHOT": 2}}
    with pytest.raises(ValueError, match="has FEW_SHOT: it may change QUESTION, SHOTS, demonstrate"):
        under_protocol(task, "short")


def test_a_task_file_may_have_protocols_of_its_own(tmp_path):
    file = tmp_path / "mine.py"
    own = "PROTOCOLS = {'bare': {'QUESTION': 'So: {question}', 'SHOTS': 1, 'extract': lambda text: text.strip()}}"
    file.write_text((Path(__file__).parent / "reverse_task.py").read_text() + own)
    task = under_protocol(load_task(str(file)), "bare")
    assert task.load_rows("test")[0]["prompt"][0]["content"].startswith("So: Spell backwards: ")
    assert (task.extract(" ksam "), shots_of(task)) == ("ksam", 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = 9, 9 * 2 = 18. The answer is 18.", 18.0),
        ("The answer is -1,234.5", -1234.5),
        (r"so \boxed{42}", 42.0),
        ("The answer is 7.\n\nQuestion: 8 + 8?\nAnswer: 16", 7.0),
        ("it costs $20", 20.0),
        ("The answer is 1.5 million.", 1.5e6),
        ("Total - 18", 18.0),
        ("none", None),
        ("", None),
    ],
)
def test_lladas_gsm8k_takes_the_last_number_before_a_next_question(text, number):
    assert under_protocol(load_task("gsm8k"), "llada").extract(text) == number
    assert load_task("gsm8k").extract(text) == (42.0 if "boxed" in text else None)  # d1 asks for a box or tags


def test_training_prompts_stand_behind_four_solved_problems_that_are_not_trained_on(tmp_path):
    task, file = under_protocol(load_task("gsm8k"), "llada"), rows_file("gsm8k", tmp_path)
    rows = task.load_rows("train", file)
    asked = rows.select([3])
    train, evaluation = with_shots(task, rows, file, asked)
    shots, last = train[0]["prompt"][:-1], [row["prompt"][-1] for row in train]
    assert [turn["role"] for turn in shots] == ["user", "assistant"] * 4
    assert all(row["prompt"][:-1] == shots for row in (*train, *evaluation))
    assert evaluation[0]["prompt"][-1] == asked[0]["prompt"][0]
    assert not [turn for turn in last if turn in shots]
    by_question = {row["prompt"][0]["content"]: row for row in rows}
    assert {turn["content"] for turn in (*shots[::2], *last)} == set(by_question)
    assert asked[0]["prompt"][0] not in shots
    for turn, solved in zip(shots[::2], shots[1::2], strict=True):
        assert task.score(solved["content"], by_question[turn["content"]]) == {"accuracy": 1.0}
    assert with_shots(task, rows, file, asked)[0].to_list() == train.to_list()
    plain = load_task("gsm8k")
    assert with_shots(plain, rows, file, asked) == (rows, asked)
