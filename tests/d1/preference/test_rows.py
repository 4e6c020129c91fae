"""The published shapes of preference rows: TRL's formats, Axolotl's strategies, and those of well-known data sets.

The table has one question and two answers in every shape. The expected tokens are the chat template's own.
"""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from trl import extract_prompt

from d1.models import load_tokenizer
from d1.preference.data import token_rows
from d1.preference.rows import answer_columns, conversations, sign_of
from d1.runs.data import load_rows
from tests.d1.sft.templates import byte_tokenizer

LIMITS = {"max_prompt_length": 200, "max_completion_length": 200}
ASKED, GOOD, BAD, RULE = "what is 1+1", "it is 2", "it is 3", "be short"


def message(role, content):
    return {"role": role, "content": content}


def test_a_template_that_reads_only_its_own_task_takes_its_pairs():
    """The pocket model's: it refuses a message without a puzzle."""
    puzzle = "Solve the following Sudoku puzzle: 0001142340300314"
    row = {"prompt": puzzle, "chosen": "a3 b2", "rejected": "a3 b1"}
    tokenizer = load_tokenizer(Path(__file__).parents[3] / "pocket" / "base")
    [found] = rows_of(row, tokenizer)
    assert len(found["prompt_ids"]) == 18
    with pytest.raises(ValueError, match=r"cannot read the text .*end the user message with 16 digits"):
        rows_of(row | {"prompt": "Hello"}, tokenizer)


def sharegpt(speaker, text):
    return {"from": speaker, "value": text}


USER, RIGHT, WRONG, SYSTEM = (
    message("user", ASKED),
    message("assistant", GOOD),
    message("assistant", BAD),
    message("system", RULE),
)
TEXTS = {"chosen": GOOD, "rejected": BAD}
WHOLE = {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
BOTH_MESSAGES = {"chosen": [RIGHT], "rejected": [WRONG]}
HISTORY = [SYSTEM, message("user", "hi"), message("assistant", "hello")]

PAIRS = {  # name -> a row with ASKED, GOOD and BAD
    "TRL, explicit prompt": TEXTS | {"prompt": ASKED},
    "TRL, conversational, explicit prompt": BOTH_MESSAGES | {"prompt": [USER]},
    "TRL, conversational, implicit prompt": WHOLE,
    "HuggingFaceH4/ultrafeedback_binarized": WHOLE
    | {"prompt": ASKED, "prompt_id": "f0", "messages": [USER, RIGHT], "score_chosen": 8.0, "score_rejected": 3.0},
    "Axolotl, chatml.ultra": WHOLE | {"prompt": ASKED, "system": ""},
    "argilla/dpo-mix-7k: chatml.argilla_chat": WHOLE | {"dataset": "x", "chosen_rating": 5.0},
    "mlabonne/orpo-dpo-mix-40k": WHOLE | {"prompt": f"{ASKED}\n", "question": ASKED, "source": "x"},
    "messages as prompt of whole conversations": WHOLE | {"prompt": [USER]},
    "Intel/orca_dpo_pairs: chatml.intel": TEXTS | {"question": ASKED, "system": ""},
    "chatml.icr": TEXTS | {"input": ASKED, "system": None},
    "chatml.argilla": {"instruction": ASKED, "chosen_response": GOOD, "rejected_response": BAD, "source": "x"},
    "chatml.prompt_pairs": TEXTS | {"prompt": ASKED, "system": None},
    "chat_template.default": {"messages": [USER], "chosen": RIGHT, "rejected": WRONG},
    "chat_template.default with whole conversations": WHOLE | {"messages": [USER]},
    "chat_template.default with texts": TEXTS | {"messages": [USER]},
    "Alpaca without an input": TEXTS | {"instruction": ASKED, "input": ""},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [sharegpt("human", ASKED)],
        "chosen": sharegpt("gpt", GOOD),
        "rejected": sharegpt("gpt", BAD),
    },
    "hh-rlhf with a prompt": TEXTS | {"prompt": f"\n\nHuman: {ASKED}\n\nAssistant:"},
}
SINGLE = {
    "TRL, unpaired": {"prompt": ASKED, "completion": GOOD},
    "TRL, unpaired and conversational": {"prompt": [USER], "completion": [RIGHT]},
    "argilla/kto-mix-15k: argilla_chat": {"completion": [USER, RIGHT]},
    "argilla/kto-mix-15k with its prompt": {"prompt": ASKED, "completion": [USER, RIGHT]},
    "KTO, chatml.argilla": {"instruction": ASKED, "completion": GOOD},
    "KTO, chatml.intel": {"question": ASKED, "completion": GOOD, "system": None},
    "KTO, chatml.ultra": {"prompt": ASKED, "completion": GOOD, "system": ""},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return load_tokenizer(str(tiny_model_dir))


def template_ids(tokenizer, messages, answer):
    """Ids of the prompt, and of the answer with its EOS, as the chat template writes them."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*messages, answer], tokenize=False)
    assert whole.startswith(prompt)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole[len(prompt) :])]


def rows_of(row, tokenizer, paired=True):
    return list(token_rows(Dataset.from_list([row]), tokenizer, **LIMITS, paired=paired))


def turns_of(row):
    """The conversations of a row as it comes out of a data set."""
    data = Dataset.from_list([row])
    return conversations(data[0], answer_columns(data.features, paired="completion" not in row))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rule", [None, RULE])
def test_each_shape_of_pairs_has_the_question_once_and_the_answers_whole(name, rule, tokenizer):
    row = PAIRS[name] | ({} if rule is None else {"system": rule})
    before = [SYSTEM] * (rule is not None)
    assert turns_of(row) == {"chosen": [*before, USER, RIGHT], "rejected": [*before, USER, WRONG]}
    (pair,) = rows_of(row, tokenizer)
    expected = [template_ids(tokenizer, [*before, USER], answer) for answer in (RIGHT, WRONG)]
    assert pair["prompt_ids"] == expected[0][0] == expected[1][0]
    assert pair["completions"] == [ids for _, ids in expected]
    taken_apart = rows_of(row, tokenizer, paired=False)
    assert [(one["prompt_ids"], one["completions"], one["label"]) for one in taken_apart] == [
        (expected[0][0], [expected[0][1]], 1),
        (expected[1][0], [expected[1][1]], -1),
    ]


@pytest.mark.parametrize("name", SINGLE)
def test_each_shape_of_completions_with_a_label(name, tokenizer):
    data = Dataset.from_list([SINGLE[name] | {"label": label} for label in (True, False)])
    assert turns_of(data[0]) == {"completion": [USER, RIGHT]}
    rows = list(token_rows(data, tokenizer, **LIMITS, paired=False))
    prompt, answer = template_ids(tokenizer, [USER], RIGHT)
    assert [(one["prompt_ids"], one["completions"]) for one in rows] == [(prompt, [answer])] * 2
    assert [one["label"] for one in rows] == [1, -1]


@pytest.mark.parametrize(("yes", "no"), [(1, 0), ("True", "false"), ("1", "0"), (1.0, 0.0), (" TRUE", "0 ")])
def test_labels_as_files_have_them(yes, no):
    assert (sign_of(yes), sign_of(no)) == (1, -1)


def test_a_conversation_of_several_turns_with_a_system_message():
    row = {"chosen": [*HISTORY, USER, RIGHT], "rejected": [*HISTORY, USER, WRONG]}
    expected = {"chosen": [*HISTORY, USER, RIGHT], "rejected": [*HISTORY, USER, WRONG]}
    assert turns_of(row) == expected
    for prompt in (ASKED, "hi", [*HISTORY, USER], [message("user", "hi")]):  # data sets name the first or last question
        assert turns_of(row | {"prompt": prompt}) == expected
    assert turns_of(row | {"system": RULE}) == expected
    assert turns_of(BOTH_MESSAGES | {"prompt": [*HISTORY, USER]}) == expected
    continued = {"prompt": [message("user", "hi")], "chosen": [*HISTORY[2:], USER, RIGHT]}
    continued |= {"rejected": [*HISTORY[2:], USER, WRONG]}
    assert turns_of(continued)["rejected"] == [*HISTORY[1:], USER, WRONG]


def test_a_system_message_of_the_prompt_or_of_a_column_alone_stays():
    for row in ({"prompt": [SYSTEM, USER]}, {"system_prompt": RULE}, {"system": RULE, "system_prompt": RULE}):
        assert turns_of(WHOLE | row)["chosen"] == [SYSTEM, USER, RIGHT]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("A.  One", "A.  Two", "A."),
        ("one two\nthree", "one two four", "one two"),
        ("pi is 3.14", "pi is 3.15", "pi is"),
    ],
)
def test_texts_that_share_their_beginning_are_split_between_words(chosen, rejected, prompt):
    turns = turns_of({"chosen": chosen, "rejected": rejected, "score": 1.0})
    expected = [[message("user", prompt), message("assistant", text[len(prompt) :])] for text in (chosen, rejected)]
    assert [turns["chosen"], turns["rejected"]] == expected
    theirs = extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"]
    assert theirs.startswith(prompt)
    if theirs == prompt:  # TRL splits between words, too
        assert extract_prompt({"chosen": chosen, "rejected": rejected})["chosen"] == expected[0][1]["content"]


def test_the_transcripts_of_hh_rlhf_are_conversations(tokenizer):
    turns = f"\n\nHuman: hi\n\nAssistant: hello\n\nHuman: {ASKED}\n\nAssistant: "
    row = {"chosen": turns + GOOD, "rejected": turns + BAD}
    assert turns_of(row) == {"chosen": [*HISTORY[1:], USER, RIGHT], "rejected": [*HISTORY[1:], USER, WRONG]}
    (pair,) = rows_of(row, tokenizer)
    assert [pair["prompt_ids"], pair["completions"][0]] == template_ids(tokenizer, [*HISTORY[1:], USER], RIGHT)


def test_the_transcripts_of_a_file_from_windows_are_conversations():
    turns = f"\r\n\r\nHuman: hi\r\n\r\nAssistant: hello\r\n\r\nHuman: {ASKED}\r\n\r\nAssistant:"
    expected = {"chosen": [*HISTORY[1:], USER, RIGHT], "rejected": [*HISTORY[1:], USER, WRONG]}
    assert turns_of({"chosen": f"{turns} {GOOD}", "rejected": f"{turns} {BAD}"}) == expected
    assert turns_of({"prompt": turns, "chosen": GOOD, "rejected": BAD}) == expected


def test_the_space_between_a_transcript_and_its_answer_is_no_part_of_the_answer():
    """As Dahoas/full-hh-rlhf cuts the texts of HH-RLHF: the answer begins with the space."""
    cut = {"prompt": f"\n\nHuman: {ASKED}\n\nAssistant:", "chosen": f" {GOOD}", "rejected": f" {BAD}"}
    whole = {answer: cut["prompt"] + cut[answer] for answer in ("chosen", "rejected")}
    assert turns_of(cut) == turns_of(whole) == {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    with pytest.raises(ValueError, match="chosen is empty"):
        turns_of(cut | {"chosen": " "})
    with pytest.raises(ValueError, match="chosen is a text that holds a list of messages"):
        turns_of(cut | {"chosen": '[{"role": "assistant", "content": "x"}]'})


def test_alpacas_columns_are_the_instruction_and_its_input():
    row = TEXTS | {"instruction": "add", "input": "1+1"}
    assert turns_of(row)["chosen"] == [message("user", "add\n1+1"), RIGHT]


def test_the_prompt_column_counts_before_other_columns():
    assert turns_of(TEXTS | {"prompt": ASKED, "question": "1+1", "input": "1"})["chosen"] == [USER, RIGHT]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "q", "answers": [{"answer": "a", "rank": 1}]},
            "has the columns answers, prompt; needed are chosen",
        ),
        ({"prompt": "q", "response_0": "a", "response_1": "b"}, "has the columns prompt, response_0, response_1"),
        ({"prompt": "q", "chosen": "a"}, "has the columns chosen, prompt; needed are"),
        (TEXTS | {"query": "q"}, r"no column prompt, .* but query: rename the one with the prompt to prompt"),
        (TEXTS | {"context": ["q"]}, "but context: rename"),
        (TEXTS | {"system": "s"}, "but system: rename"),
        ({"chosen": "The sky", "rejected": "The sky is blue"}, "one text is the beginning of the other"),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, "begin with no whole word in common: add a column prompt"),
        ({"chosen": "a b", "rejected": "a b"}, "chosen and rejected are equal"),
        (WHOLE | {"prompt": "another"}, "chosen is a conversation without the prompt 'another'"),
        (WHOLE | {"prompt": [message("user", "another")]}, "chosen is a conversation without the prompt 'another'"),
        (TEXTS | {"prompt": None}, r"there is no prompt \(empty: prompt\)"),
        (TEXTS | {"prompt": "", "question": None}, r"there is no prompt \(empty: prompt, question\)"),
        (BOTH_MESSAGES, r"there is no prompt \(no column prompt, question"),
        (TEXTS | {"question": "q", "instruction": "i"}, "question and instruction may both be the prompt"),
        (TEXTS | {"prompt": "q", "chosen": None}, "chosen is null"),
        (TEXTS | {"prompt": "q", "chosen": ""}, "chosen is empty"),
        (TEXTS | {"prompt": "q", "chosen": " "}, "chosen is empty"),
        (TEXTS | {"prompt": "q", "chosen": "Assistant:"}, "chosen is empty"),
        (TEXTS | {"prompt": "q", "chosen": 3}, "chosen is int, not text or messages"),
        ({"prompt": "q", "chosen": ["a"], "rejected": ["b"]}, "chosen is list, not text or messages"),
        ({"prompt": "q", "chosen": [], "rejected": []}, "chosen is empty"),
        (BOTH_MESSAGES | {"prompt": "q", "chosen": [message("assistant", "")]}, "the assistant message is empty"),
        (BOTH_MESSAGES | {"prompt": "q", "chosen": [message("assistant", None)]}, "the assistant message is NoneType"),
        (
            {"prompt": "q", "chosen": {"text": "a"}, "rejected": {"text": "b"}},
            "chosen: a message has no role, but text",
        ),
        (TEXTS | {"prompt": "q", "chosen": str([RIGHT])}, "chosen is a text that holds a list of messages"),
        (
            TEXTS | {"prompt": "q", "chosen": '[{"role": "assistant"}]'},
            "chosen is a text that holds a list of messages",
        ),
        (TEXTS | {"prompt": "q", "history": [["a", "b"]]}, "the column history is not supported"),
        (TEXTS | {"prompt": "q", "images": ["a.png"]}, "the column images would be lost"),
        (TEXTS | {"prompt": "q", "functions": [{"name": "f"}]}, "the column functions would be lost"),
        (TEXTS | {"messages": [USER, RIGHT]}, "the prompt ends with a message of the assistant, and chosen begins"),
        (
            {"chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG], "system": "other"},
            "differs from that of",
        ),
        ({"chosen": [USER], "rejected": [USER]}, "chosen does not end with a message of the assistant"),
        (WHOLE | {"rejected": [message("user", "x"), WRONG]}, "they answer different prompts"),
    ],
)
def test_what_no_shape_has_is_refused_by_name(row, problem, tokenizer):
    with pytest.raises(ValueError, match=problem):
        rows_of(row, tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"completion": GOOD, "label": 1}, r"there is no prompt \(no column prompt"),
        ({"prompt": None, "completion": GOOD, "label": 1}, r"there is no prompt \(empty: prompt\)"),
        ({"prompt": "q", "completion": GOOD, "label": None}, "the label is None, neither true nor false"),
        ({"prompt": "q", "completion": GOOD, "label": 0.5}, "the label is 0.5, neither true nor false"),
        ({"prompt": "q", "completion": None, "label": 1}, "completion is null"),
    ],
)
def test_completions_with_a_label_that_cannot_be_read(row, problem, tokenizer):
    with pytest.raises(ValueError, match=problem):
        rows_of(row, tokenizer, paired=False)


@pytest.mark.parametrize(
    "change", [{"prompt": f"<bos><user>{ASKED}<assistant>"}, {"chosen": f"{GOOD}<eos>"}, {"rejected": "<user>no"}]
)
def test_texts_with_a_chat_template_in_them_are_refused(change, tokenizer):
    with pytest.raises(ValueError, match="begins or ends with the special token <"):
        rows_of(TEXTS | {"prompt": ASKED} | change, tokenizer)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = message("assistant", "") | {"tool_calls": [CALL]}
RESULT = message("tool", "2")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CARRIED = {  # name -> a row, the messages before its answers, and the answers
    "a call as the answer": ({"chosen": [CALLED], "rejected": [WRONG]}, [USER], CALLED, WRONG),
    "a call before the answers": (
        {"chosen": [CALLED, RESULT, RIGHT], "rejected": [CALLED, RESULT, WRONG]},
        [USER, CALLED, RESULT],
        RIGHT,
        WRONG,
    ),
    "thoughts": (
        {"chosen": [RIGHT | {"reasoning": "hm"}], "rejected": [WRONG | {"thinking": "oh"}]},
        [USER],
        RIGHT | {"reasoning_content": "hm"},
        WRONG | {"reasoning_content": "oh"},
    ),
    "ShareGPT's call": (
        {
            "chosen": sharegpt("function_call", '{"name": "f", "arguments": {"x": 1}}'),
            "rejected": sharegpt("bing", BAD),
        },
        [USER],
        CALLED,
        WRONG,
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_tools_calls_and_thoughts_reach_the_template(name):
    answers, before, *expected = CARRIED[name]
    tokenizer = byte_tokenizer("qwen3")
    row = answers | {"prompt": ASKED, "tools": json.dumps(TOOLS), "chat_template_kwargs": {"enable_thinking": True}}
    (pair,) = token_rows(
        Dataset.from_list([row]), tokenizer, max_prompt_length=2000, max_completion_length=200, paired=True
    )
    for ids, answer in zip(pair["completions"], expected, strict=True):
        text = tokenizer.apply_chat_template([*before, answer], tools=TOOLS, tokenize=False)
        assert tokenizer.decode(pair["prompt_ids"] + ids) == f"{text.rstrip()}<eos>"
    prompt = tokenizer.apply_chat_template(before, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(pair["prompt_ids"]) == prompt


def test_what_the_template_leaves_out_is_refused(tokenizer):
    row = TEXTS | {"prompt": ASKED}
    with pytest.raises(ValueError, match=r"the chat template leaves out tools \(f\)"):
        rows_of(row | {"tools": TOOLS}, tokenizer)
    with pytest.raises(ValueError, match="the chat template leaves out reasoning_content of the assistant message"):
        rows_of(row | {"chosen": [RIGHT | {"reasoning": "hm"}], "rejected": [WRONG]}, tokenizer)


def test_one_answer_with_thoughts_where_the_prompt_opens_some():
    row = {"prompt": ASKED, "chosen": [message("assistant", f"<think>\nhm\n</think>\n\n{GOOD}")], "rejected": [WRONG]}
    tokenizer = byte_tokenizer("deepseek_r1_distill")
    with pytest.raises(
        ValueError, match="the chat template begins chosen and rejected differently: give both thoughts"
    ):
        rows_of(row, tokenizer)


def test_a_prompt_with_another_call_than_the_conversation_is_refused():
    other = CALLED | {"tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {"x": 1}}}]}
    row = {"prompt": [USER, other], "chosen": [USER, CALLED, RESULT, RIGHT], "rejected": [USER, CALLED, RESULT, WRONG]}
    with pytest.raises(ValueError, match="chosen is a conversation without the prompt"):
        turns_of(row)


def test_an_answer_that_goes_on_with_a_transcript_ends_with_its_last_turn():
    more = f" hello\n\nHuman: {ASKED}\n\nAssistant: "
    row = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": more + GOOD, "rejected": more + BAD}
    assert turns_of(row) == {"chosen": [*HISTORY[1:], USER, RIGHT], "rejected": [*HISTORY[1:], USER, WRONG]}
    story = "Here:\n\nHuman: hi\n\nAssistant: hello"
    assert turns_of({"prompt": ASKED, "chosen": story, "rejected": BAD})["chosen"][1]["content"] == story


def test_a_text_next_to_a_pair_may_be_its_prompt_in_a_column_of_messages_and_texts(tokenizer, tmp_path):
    """One row of messages turned off the check of the column, and the texts' first words became the prompt."""
    pair = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    file = tmp_path / "rows.jsonl"

    def write(row):
        file.write_text("".join(json.dumps(line) + "\n" for line in (WHOLE, row)))
        return load_rows(str(file))

    problem = "line 2: the row has a pair of texts and no column prompt, .* but text: rename the one with the prompt to"
    with pytest.raises(ValueError, match=problem):
        token_rows(write(pair | {"text": ASKED}), tokenizer, **LIMITS, paired=True)
    for more in ({}, {"text": None, "score": 3.5}):
        assert len(token_rows(write(pair | more), tokenizer, **LIMITS, paired=True)) == 2
