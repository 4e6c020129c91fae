"""Names, user tasks, reading of rows, splits, few-shot turns, and the extraction all tasks share."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet

from d1.runs.data import load_rows
from d1.tasks import TASKS, answer_block, few_shot_messages, final_answer, last_boxed, load_task, with_shots
from d1.tasks.data import HELD_OUT, read_file
from tests.faults import write_at_the_same_time
from tests.sandbox import skip_without_sandbox

USER_TASK = Path(__file__).parent / "reverse_task.py"
GSM8K = [
    {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(4)
]
MATH = [
    {"problem": f"Find ${i}+1$.", "solution": rf"It is $\boxed{{{i + 1}}}$.", "answer": str(i + 1)} for i in range(4)
]
COUNTDOWN = [{"input": "30,100,93", "output": "23"}, {"input": "1,2,3", "output": "6"}]
COUNTDOWN_HUB = [{"nums": [30, 100, 93], "target": 23}, {"nums": [1, 2, 3], "target": 6}]
COUNTDOWN_INPUT = [row | {"input": "Make the target."} for row in COUNTDOWN_HUB]  # a further column
SUDOKU = [{"Puzzle": "0102230010030400", "Solution": "4132231412433421"}]  # leading zero
LOCAL = {"gsm8k": [GSM8K], "math": [MATH], "countdown": [COUNTDOWN, COUNTDOWN_HUB, COUNTDOWN_INPUT], "sudoku": [SUDOKU]}
LOCAL |= {"pocket_countdown": [COUNTDOWN], "arithmetic": [GSM8K]}  # small versions of tasks, read and scored like these
HUMANEVAL = {"prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a disc of radius r."""\n'}
HUMANEVAL |= {"canonical_solution": "    return math.pi * r**2\n", "entry_point": "area"}
HUMANEVAL["test"] = (
    "METADATA = {}\n\n\ndef check(f):\n    assert f(0) == 0\n    assert abs(f(2) - 4 * math.pi) < 1e-9\n"
)
MBPP: dict[str, Any] = {"text": "Write a function to sort a list of pairs by their second values."}
MBPP["code"] = "def by_second(pairs):\n    pairs.sort(key=lambda pair: pair[1])\n    return pairs"
MBPP["test_list"] = ["assert by_second([(1, 2), (3, 1)]) == [(3, 1), (1, 2)]", "assert by_second([]) == []"]
KODCODE = {"question": "Write a class Stack with push and pop. An empty stack raises IndexError."}
KODCODE["solution"] = """class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
"""
KODCODE["test"] = """from solution import Stack
def test_last_in_first_out():
    stack = Stack()
    stack.push(1)
    stack.push([2])
    assert stack.pop() == [2] and stack.pop() == 1
def test_empty():
    try: Stack().pop()
    except IndexError: return
    assert False
"""
PROGRAMS = [{"input": "abdce,dbcae", "program": "x[3] + x[0] + x[0] + x[2] + x[1]"}]
LOCAL |= {"code": [[HUMANEVAL], [MBPP], [KODCODE]], "programs": [PROGRAMS]}
LOCAL |= {"products": [[{"input": "370 * 461", "output": "170570"}]]}
SVAMP = {"Question": "Ann has number0 pens in number1 boxes . How many ?", "Numbers": "4.0 6.0"}
SVAMP |= {"Equation": "* number0 number1", "Answer": "24.0"}
SVAMP_HUB = {
    "Body": "Ann has 8 pens.",
    "Question": "She loses 3. How many?",
    "Equation": "( 8.0 - 3.0 )",
    "Answer": "5.0",
}
LOCAL |= {"svamp": [[SVAMP], [SVAMP_HUB]]}
EXPRESSIONS = {23: "30 - (100 - 93)", 6: "1 + 2 + 3"}


def solution(task: ModuleType, row: dict[str, Any]) -> str:
    """A right completion: the task's own demonstration, if it has one."""
    if hasattr(task, "demonstrate"):
        return task.demonstrate(row)
    return f"<answer>{EXPRESSIONS[row['ground_truth'][1]]}</answer>"


def write(rows: list[dict], folder: Path, kind: str = "jsonl") -> str:
    path = folder / f"rows.{kind}"
    if kind in ("json", "jsonl"):
        path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        Dataset.from_list(rows).to_csv(str(path), index=False)
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("name", "schema", "kind"),
    [
        (name, i, kind)
        for name in LOCAL
        for i in range(len(LOCAL[name]))
        for kind in ("json", "jsonl", "csv", "parquet")
        if kind != "csv" or i == 0  # the lists of the hub's Countdown schema are not csv values
    ],
)
def test_local_rows_load_in_each_schema_and_a_right_completion_scores_full(name, schema, kind, tmp_path):
    skip_without_sandbox(name)
    task = load_task(name)
    rows = task.load_rows("test", write(LOCAL[name][schema], tmp_path, kind))
    assert len(rows) == len(LOCAL[name][schema])
    for row in rows:
        assert row["prompt"][-1]["content"].endswith(row["question"])
        scores = task.score(solution(task, row), {"question": row["question"], "ground_truth": row["ground_truth"]})
        assert next(iter(scores)) == "accuracy"
        assert set(scores.values()) == {1.0}
        assert set(task.score("I do not know", row).values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "question", "ground_truth"),
    [
        ("countdown", "Numbers: [30, 100, 93]\nTarget: 23", [[30, 100, 93], 23]),
        ("sudoku", "Solve the following Sudoku puzzle: 0102230010030400\n", "4132231412433421"),
        ("gsm8k", "What is 0 + 1?", 1.0),
        ("math", "Find $0+1$.", "1"),
    ],
)
def test_ground_truths_are_those_of_d1s_generation_files(name, question, ground_truth, tmp_path):
    row = load_task(name).load_rows("test", write(LOCAL[name][0], tmp_path))[0]
    assert (row["question"], row["ground_truth"]) == (question, ground_truth)


@pytest.mark.parametrize("name", TASKS)
def test_rewards_take_trls_arguments_as_text_or_messages_and_print_nothing(name, tmp_path, capsys):
    skip_without_sandbox(name)
    task = load_task(name)
    rows = task.load_rows("train", write(LOCAL[name][0], tmp_path))
    texts = [solution(task, row) for row in rows]
    capsys.readouterr()  # the progress bar of reading the file
    columns = {"prompts": rows["prompt"], "completion_ids": [[0]] * len(rows), "trainer_state": None, **rows.to_dict()}
    for reward in task.REWARDS:
        plain = reward(completions=texts, **columns)
        chat = reward(completions=[[{"role": "assistant", "content": text}] for text in texts], **columns)
        assert plain == chat
        assert all(type(value) is float for value in plain)
        assert reward(completions=[[]] * len(rows), **columns) == reward(completions=[""] * len(rows), **columns)
    assert capsys.readouterr() == ("", "")


# --- wrong files ---


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "rows.jsonl",
            '{"question": "?", "text": "1"}',
            r"rows\.jsonl lacks the columns answer; it has question, text",
        ),
        ("rows.txt", "x", r"\.json, \.jsonl, \.csv or \.parquet"),
        ("broken.json", '[{"question": "a", ', r"cannot read .*broken\.json"),
        ("empty.csv", "question,answer\n", r"empty\.csv has no rows"),
        ("empty.jsonl", "\n", r"empty\.jsonl has no rows"),
        ("empty.json", "[]", r"empty\.json has no rows"),
        ("cells.csv", "question,answer\na, b,3\n", "row 1 has 3 cells, the header 2: quote texts with commas"),
    ],
)
def test_a_wrong_file_is_named_with_what_it_lacks(file, content, message, tmp_path):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_task("gsm8k").load_rows("test", str(tmp_path / file))
    with pytest.raises(FileNotFoundError, match="no data file nowhere"):
        load_task("gsm8k").load_rows("test", "nowhere.jsonl")


def test_an_empty_parquet_file_has_no_rows(tmp_path):
    file = tmp_path / "empty.parquet"
    parquet.write_table(pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), file)
    with pytest.raises(ValueError, match=rf"^{file} has no rows$"):
        load_task("gsm8k").load_rows("test", str(file))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "?", "answer": "12"}, "row 1: answer must end with '#### number'"),
        ("gsm8k", {"question": " ", "answer": "#### 12"}, "row 1: question must be a text, got ' '"),
        ("gsm8k", {"question": "?", "answer": None}, "row 1: answer must be a text, got None"),
        ("math", {"problem": None, "answer": "3"}, "row 1: problem must be a text, got None"),
        ("math", {"problem": "?", "answer": math.nan}, "row 1: answer must be LaTeX text, a number.*got nan"),
        ("math", {"problem": "?", "answer": True}, "row 1: answer must be LaTeX text, a number.*got True"),
        ("math", {"problem": "?", "answer": "3", "solution": ["3"]}, "row 1: solution must be a text, got"),
        ("math", {"problem": "?", "solution": "so 3"}, "row 1: answer must be LaTeX text, a number.*got None"),
        ("countdown", {"nums": [1.0, 2.5], "target": 3}, "row 1: nums and target must be integers"),  # was 1, 2
        ("countdown", {"nums": [1, 2], "target": True}, "row 1: nums and target must be integers"),
        ("countdown", {"nums": [3, -4], "target": 7}, "row 1: nums must be numbers of 0 or more"),  # no answer has -4
        ("programs", {"input": None, "program": None}, "row 1: input must be two orders of abcde"),
        ("countdown", {"input": "1,x,3", "output": "6"}, "row 1: input and output must be integers"),
        ("sudoku", {"Puzzle": "102230010030400", "Solution": "4132231412433421"}, "row 1: Puzzle must be 16 digits"),
        ("sudoku", {"Puzzle": "0102230010030400", "Solution": "4132231412433412"}, "row 1: Solution .* does not solve"),
        ("programs", {"input": "abcde,bcdea", "program": "x[0]"}, r"row 1: program must be as in x\[3\] \+ x\[0\]"),
        ("code", {"prompt": "?", "test_list": []}, "no row can be used: row 1, test_list must be a list of tests, got"),
        ("code", {"question": "?", "test": "def ("}, "row 1, test is no Python: "),
        ("code", {"question": "?", "test": "def test(a): pass"}, "row 1, test takes parameters or has a decorator"),
        ("code", {"question": "?", "test": "class TestIt: pass"}, "row 1, TestIt: tests in classes do not run here"),
    ],
)
def test_a_wrong_row_is_named(name, row, message, tmp_path):
    skip_without_sandbox(name)
    with pytest.raises(ValueError, match=message):
        load_task(name).load_rows("test", write([row], tmp_path))


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        *(("countdown", truth) for truth in (None, [], "22", [[1, 2], None], {"target": 1})),
        *((name, None) for name in ("gsm8k", "math", "code", "programs")),
    ],
)
def test_a_malformed_ground_truth_is_refused_rather_than_counted(name, truth):
    with pytest.raises(ValueError, match="the ground truth must be "):
        load_task(name).score("<answer>1</answer>", {"question": "", "ground_truth": truth})


def test_an_unknown_split_is_refused():
    for name in TASKS:
        with pytest.raises(ValueError, match="unknown split 'dev': use one of train, validation, test"):
            load_task(name).load_rows("dev")


# --- the hub's datasets; a folder of that name stands in, read by the same load_dataset call ---


def make_hub(folder: Path, name: str, split: str, rows: list[dict], config: str = "default") -> None:
    root = folder / name
    root.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(str(root / f"{split}.parquet"))
    files = "".join(f"  - split: {p.stem}\n    path: {p.name}\n" for p in sorted(root.glob("*.parquet")))
    (root / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def hub_splits(name: str) -> dict[str, list[str]]:
    return {split: load_task(name).load_rows(split)["question"][:] for split in ("train", "validation", "test")}


def test_gsm8k_and_math_hold_out_the_end_of_a_shuffle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = HELD_OUT + 20
    make_hub(tmp_path, "openai/gsm8k", "train", [{**GSM8K[0], "question": f"q{i}"} for i in range(count)], "main")
    make_hub(tmp_path, "openai/gsm8k", "test", [{**GSM8K[0], "question": "test"}], "main")
    make_hub(tmp_path, "ankner/math-500", "train", [{**MATH[0], "problem": f"q{i}"} for i in range(count)])
    make_hub(tmp_path, "HuggingFaceH4/MATH-500", "test", [{**MATH[0], "problem": "test"}])
    order = [f"q{i}" for i in np.random.default_rng(42).permutation(count)]
    for name in ("gsm8k", "math"):
        assert hub_splits(name) == {"train": order[:20], "validation": order[20:], "test": ["test"]}


def test_data_file_may_be_a_name_on_the_hub(tmp_path, monkeypatch):
    skip_without_sandbox("code")
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation", "test"):
        make_hub(tmp_path, "Muennighoff/mbpp", split, [{**MBPP, "text": f"of {split}"}])
        (row,) = load_task("code").load_rows(split, "Muennighoff/mbpp")
        assert row["question"].startswith(f"of {split}\n")
    with pytest.raises(FileNotFoundError, match=r"no data file Muennighoff/rows\.jsonl"):
        load_task("code").load_rows("test", "Muennighoff/rows.jsonl")


def test_countdown_holds_out_500_three_number_problems_and_drops_test_problems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = load_task("countdown").load_rows("test")
    numbers, target = test[0]["ground_truth"]
    leaked = {"nums": numbers[::-1], "target": target}
    rows = [{"nums": [i, 1, 2], "target": i + 3} for i in range(1000, 1000 + HELD_OUT + 30)]
    four = [{"nums": [i, 1, 2, 3], "target": i + 6} for i in range(7)]
    make_hub(tmp_path, "Jiayi-Pan/Countdown-Tasks-3to4", "train", [*four, *rows, leaked])
    kept = [*rows, leaked]
    order = [kept[i] for i in np.random.default_rng(42).permutation(len(kept))]
    expected = [f"Numbers: {row['nums']}\nTarget: {row['target']}" for row in order]
    leak = f"Numbers: {numbers[::-1]}\nTarget: {target}"
    splits = hub_splits("countdown")
    assert splits["train"] == [q for q in expected[:-HELD_OUT] if q != leak]
    assert splits["validation"] == [q for q in expected[-HELD_OUT:] if q != leak]
    assert splits["test"] == test["question"][:]


def test_a_hub_out_of_reach_says_what_to_do(tmp_path, monkeypatch):
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"openai/gsm8k.*--data_file"):
        load_task("gsm8k").load_rows("test")


# --- names and user files ---


def test_unknown_tasks_list_the_known_ones():
    with pytest.raises(ValueError, match=f"unknown task 'game24': use one of {', '.join(TASKS)}, or a path"):
        load_task("game24")
    with pytest.raises(FileNotFoundError, match=r"no task file .*missing\.py"):
        load_task("missing.py")


@pytest.mark.parametrize("name", [str(USER_TASK), "reverse"])
def test_a_users_task_loads_from_its_path_or_by_a_line_of_the_table(name, monkeypatch):
    monkeypatch.setitem(TASKS, "reverse", "tests.d1.tasks.reverse_task")
    task = load_task(name)
    rows = task.load_rows("train")
    answers = [f"<answer>{row['ground_truth']}</answer>" for row in rows]
    assert task.REWARDS[0](answers, **rows.to_dict()) == [1.0] * len(rows)
    assert task.score(answers[0], rows[0]) == {"accuracy": 1.0}
    assert task.score(answers[0], rows[1]) == {"accuracy": 0.0}
    with pytest.raises(ValueError, match="no demonstrate"):
        few_shot_messages(task, 1, seed=0)


def test_a_users_task_that_is_incomplete_names_every_missing_part(tmp_path):
    path = tmp_path / "half.py"
    path.write_text("def extract(text): return text\nREWARDS = []\n")
    with pytest.raises(ValueError, match=r"does not define load_rows .*score .*REWARDS"):
        load_task(str(path))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("ROWS", r"returned list, not datasets\.Dataset: return Dataset\.from_list\(rows\)"),
        ("None", r"returned NoneType, not datasets\.Dataset: return Dataset\.from_list\(rows\)"),
        (
            "DatasetDict(train=Dataset.from_list(ROWS))",
            r"returned DatasetDict, not datasets\.Dataset: return one of its splits, train",
        ),
        ("Dataset.from_list(ROWS)", ""),
    ],
)
def test_a_users_task_returns_a_dataset(rows, problem, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from datasets import Dataset, DatasetDict\n"
        'ROWS = [{"prompt": [{"role": "user", "content": "q"}], "question": "q", "ground_truth": "a"}]\n'
        "REWARDS = [lambda completions, **columns: [0.0] * len(completions)]\n"
        "def extract(text): return text\n"
        'def score(text, row): return {"accuracy": 0.0}\n'
        f"def load_rows(split, data_file=None): return {rows}\n"
    )
    task = load_task(str(path))
    if not problem:
        assert task.load_rows("test")["question"][:] == ["q"]
        return
    with pytest.raises(ValueError, match=f"^load_rows of {path} {problem}$"):
        task.load_rows("test", data_file=None)


# --- few-shot ---


def test_few_shot_turns_are_seeded_solved_training_problems():
    task = load_task("sudoku")
    messages = few_shot_messages(task, 3, seed=5)
    assert messages == few_shot_messages(task, 3, seed=5)
    assert messages != few_shot_messages(task, 3, seed=6)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    train = {row["prompt"][0]["content"]: row for row in task.load_rows("train")}
    for shown, solved in zip(messages[::2], messages[1::2], strict=True):
        assert task.score(solved["content"], train[shown["content"]])["accuracy"] == 1.0
    test = {row["prompt"][0]["content"] for row in task.load_rows("test")}
    assert not test & {m["content"] for m in messages}
    assert few_shot_messages(task, 0, seed=5) == []
    with pytest.raises(ValueError, match="between 0 and the 4000 training rows, got 4001"):
        few_shot_messages(task, 4001, seed=5)


def test_a_system_message_stays_alone_at_the_beginning_of_a_few_shot_prompt():
    task = ModuleType("my_task")
    system = {"role": "system", "content": "Be brief."}
    users = [{"role": "user", "content": f"{number}?"} for number in range(3)]
    rows = [{"prompt": [system, user], "question": user["content"], "ground_truth": "yes"} for user in users]
    task.load_rows = lambda split, data_file: Dataset.from_list(rows)
    task.demonstrate = lambda row: row["ground_truth"]
    train, validation = with_shots(task, Dataset.from_list(rows), None, Dataset.from_list(rows[:1]), 2)
    assert len(train) == 1
    for row in (*train, *validation):
        assert [message["role"] for message in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
        assert [row["prompt"][0], row["prompt"][-1]] == [system, users[0]]


# --- extraction ---


@pytest.mark.parametrize(
    ("text", "block", "boxed", "answer"),
    [
        (r"<answer> \boxed{5} </answer>", r"\boxed{5}", "5", "5"),
        ("<answer>1</answer> no: <answer>2</answer>", "2", None, "2"),
        ("<answer>\n7<|eot_id|><|endoftext|>", "7", None, "7"),
        (r"\boxed{1} <answer> 2 </answer>", "2", "1", "2"),
        (r"so \boxed{\frac{1}{2}} or \boxed{3}", None, "3", "3"),
        (r"\boxed{\boxed{4}}", None, "4", "4"),
        (r"\boxed{1 + \boxed{2}}", None, r"1 + \boxed{2}", r"1 + \boxed{2}"),
        (r"\boxed{\boxed{}}", None, "", None),
        (r"\boxed{\{1, 2\}}", None, r"\{1, 2\}", r"\{1, 2\}"),
        (r"\boxed{5} then \boxed{\frac{1}{2}", None, "5", "5"),
        (r"} } \boxed {6}", None, "6", "6"),
        (r"\boxed 5", None, "5", "5"),
        (r"<answer>$\boxed -73$ </answer>", r"$\boxed -73$", "-73", "-73"),
        (r"\boxed{5}, so \boxed \frac{1}{2}", None, r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{\boxed 5}", None, "5", "5"),
        (r"\boxed{5}, in \boxed form", None, "5", "5"),
        (r"<answer>\boxed{}8</answer>", r"\boxed{}8", "", r"\boxed{}8"),
        ("\boxed{9}", None, None, None),  # a backspace and "oxed", what d1 looked for
        ("nothing", None, None, None),
        ("", None, None, None),
    ],
)
def test_answer_blocks_and_boxes(text, block, boxed, answer):
    assert answer_block(text) == block
    assert last_boxed(text) == boxed
    assert final_answer(text) == answer


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_that_changed_is_read_again_whatever_its_time_says(tmp_path: Path, suffix: str) -> None:
    """Also what is made from its rows; `datasets` itself would take both from its cache."""
    file, found = tmp_path / f"rows{suffix}", []
    file.touch()
    for text in ("aaa", "bbb"):
        written = tmp_path / f"{text}{suffix}"
        rows = Dataset.from_dict({"prompt": [text]})
        writers = {".jsonl": rows.to_json, ".csv": rows.to_csv, ".parquet": rows.to_parquet}
        writers[suffix](written)
        write_at_the_same_time(file, written.read_bytes())
        doubled = load_rows(str(file)).map(lambda row: {"twice": 2 * row["prompt"]}, new_fingerprint="twice")
        found.append((read_file(str(file), ())["prompt"][0], doubled["twice"][0]))
    assert found == [("aaa", "aaaaaa"), ("bbb", "bbbbbb")]
