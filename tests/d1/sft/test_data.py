"""Users' data: formats, the boundary between prompt and answer, bad rows, the cache."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from datasets.arrow_dataset import Column
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from d1.models import load_tokenizer
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE
from d1.runs import data as runs_data
from d1.runs.data import load_rows
from d1.runs.record import hash_rows
from d1.sft import data as sft_data
from d1.sft.data import dLLMSFTDataset, load_function, preprocess_dataset, tokenize_row
from tests.faults import write_at_the_same_time

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llada": (
        "<|startoftext|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
    ),
    "unasked": (  # LLaDA's own: it always continues to the next answer's header, whatever add_generation_prompt says
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    ),
    "plain": PLAIN_CHAT_TEMPLATE,
    "instruct": (  # no generation prompt, a space before the answer, EOS after it
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
    ),
    "glued": "{% for m in messages %}{{ m.content }}{% endfor %}",  # a token crosses this boundary
    "thinking": (  # the generation prompt is not in the finished conversation
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    ),
}
S1K = [{"question": "1+1=?", "thinking_trajectories": ["add them"], "attempt": "2"}]
PAIR = [{"prompt": "ab", "completion": "cd"}]


def byte_tokenizer(template):
    """Byte-level BPE with merges over spaces and newlines, trained on a line of text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>", "<mask>", "<|im_end|>", "<|im_start|>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "user\n\nassistant: abab\n\n abc  ab\nab: ba [INST] ab [/INST] ab\n\n\n"
    backend.train_from_iterator([text] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        pad_token="<pad>",
        eos_token="<eos>",
        mask_token="<mask>",
        extra_special_tokens={"eot_token": "<|im_end|>"},
        clean_up_tokenization_spaces=False,
    )


TOKENIZERS: dict[str, Any] = {name: byte_tokenizer(template) for name, template in TEMPLATES.items()}
TEXT = st.text(alphabet="ab c\n:é", min_size=1, max_size=12).filter(str.strip)


def prepare(rows, tokenizer=TOKENIZERS["chatml"], max_length=10000, **options):
    data = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return preprocess_dataset(data, tokenizer, max_length, 0.0, **options)[0]


def parts(row, tokenizer):
    """The row's text, split where training starts and stops."""
    cut: list[tuple[list[int], bool]] = []
    for token, answer in zip(row["input_ids"], row["answer"], strict=True):
        if not cut or cut[-1][1] != answer:
            cut.append(([], answer))
        cut[-1][0].append(token)
    return [(tokenizer.decode(ids), answer) for ids, answer in cut]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), answer=TEXT)
def test_boundary_is_exact(name, texts, answer):
    tokenizer = TOKENIZERS[name]
    messages = []
    for text in texts[:-1]:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
    messages += [{"role": "user", "content": texts[-1]}, {"role": "assistant", "content": answer}]
    row = tokenize_row({"messages": messages}, tokenizer, 10_000, "truncate", None, None)
    assert row["status"] == "ok", row["problem"]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if name == "thinking":  # the text parts from the prompt where that closes an empty thought
        prompt = prompt.removesuffix("<think>\n\n</think>\n\n")
    start = row["start"]
    assert row["answer"] == [False] * start + [True] * (row["length"] - start)
    prompt_ids, answer_ids = row["input_ids"][:start], row["input_ids"][start:]
    # The prompt equals that of RL and evaluation, where the template writes it, and the text is the template's.
    assert prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert answer_ids[-1] == tokenizer.eos_token_id
    assert answer_ids.count(tokenizer.eos_token_id) == 1
    text = tokenizer.decode(prompt_ids + answer_ids[:-1])
    expected = whole
    if name == "unasked":
        expected = whole.removesuffix("<|im_start|>assistant\n")
    assert text.rstrip() == expected.removesuffix("<eos>").rstrip()
    # The ids are those of the whole text, unless one of its tokens crosses the boundary.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(prompt) in {end for _, end in encoded["offset_mapping"]}:
        assert prompt_ids + answer_ids[:-1] == encoded["input_ids"]
    else:
        assert answer_ids[:-1] == tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]


def space_tokenizer(kind):
    """A tokenizer that writes a space as a mark, also before a text without one: with Metaspace, or as Llama 2's."""
    characters = ["\n", *[chr(number) for number in range(33, 127)]]
    pairs = [("\u2581", "c"), ("\u2581", "\u2581"), ("x", "c")]
    tokens = ["<unk>", "<eos>", "<mask>", "\u2581", *characters, *map("".join, pairs)]
    ids = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=pairs, unk_token="<unk>"))
    if kind == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=kind)
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=PLAIN_CHAT_TEMPLATE, **special)


@pytest.mark.parametrize("kind", ["always", "first", "never", "llama"])
@pytest.mark.parametrize("answer", ["cd c", "ab", " c", "  ab", "xc"])
def test_an_answer_gets_no_space_before_it(kind, answer):
    """The plain template's prompt ends in a space, which would be one token with the answer's first letter."""
    tokenizer = space_tokenizer(kind)
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": "d"}, {"role": "assistant", "content": answer}]
    for all_turns in (False, True):
        (row,) = prepare([{"messages": messages}], tokenizer, assistant_only_loss=all_turns)
        text = f"user: c\nassistant: {answer}\nuser: d\nassistant: {answer}"
        assert tokenizer.decode(row["input_ids"]).removesuffix("<eos>").rstrip("\n") == text
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        if not all_turns:
            assert row["input_ids"][: row["start"]] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
def test_local_files(suffix, tmp_path):
    file = tmp_path / f"rows{suffix}"
    rows = PAIR * 3 if suffix == ".csv" else S1K * 3
    data, how = Dataset.from_list(rows), {"lines": False} if suffix == ".json" else {}
    getattr(data, f"to_{suffix[1:].removesuffix('l')}")(file, **how)
    assert prepare(load_rows(str(file))).to_list() == prepare(rows).to_list()


def test_cells_of_csv_files_stay_what_they_are(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('prompt,completion\n0012,None\n1e5,"a, b\nNA"\n')
    assert load_rows(str(file)).to_dict() == {"prompt": ["0012", "1e5"], "completion": ["None", "a, b\nNA"]}


def test_schemas():
    tokenizer = TOKENIZERS["chatml"]
    (s1k,) = prepare(S1K)
    (prompt, _), (answer, _) = parts(s1k, tokenizer)
    assert prompt.endswith("\n\n1+1=?<|im_end|>\n<|im_start|>assistant\n")
    assert answer == "<reasoning>add them</reasoning>\n<answer>2</answer><|im_end|><eos>"
    chat = [{"prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "cd"}]}]
    conversation = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}]
    assert prepare(PAIR).to_list() == prepare(chat).to_list() == prepare(conversation).to_list()


def test_template_and_function(tmp_path):
    with pytest.raises(ValueError, match="there is no column 'absent'; the data has the columns completion, prompt"):
        prepare(PAIR, template=("{absent}", "{completion}"))
    with pytest.raises(ValueError, match="row 0: ZeroDivisionError"):
        prepare(PAIR, function=lambda row: 1 / 0)
    expected = prepare(PAIR).to_list()
    other = Dataset.from_list([{"prompt": "not this", "q": "ab", "a": "cd"}])
    assert prepare(other, template=("{q}", "{a}")).to_list() == expected
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\ndef convert(row):\n    return {'prompt': row['q'], 'completion': json.loads('\"cd\"')}\n"
    )
    assert prepare(other, function=load_function(f"{file}:convert")).to_list() == expected
    many = Dataset.from_list([{"q": f"q{i}", "a": "cd"} for i in range(1000)])  # the function goes to other processes
    parallel = prepare(many, function=load_function(f"{file}:convert"), num_proc=2)
    assert parallel.to_list() == prepare(many, template=("{q}", "{a}"), num_proc=1).to_list()
    with pytest.raises(ValueError, match="defines no function 'absent'"):
        load_function(f"{file}:absent")
    with pytest.raises(ValueError, match=r"FILE.py:FUNCTION with a file that exists"):
        load_function("absent.py:convert")


def test_the_last_turn_of_the_assistant_is_trained_on():
    tokenizer = TOKENIZERS["chatml"]
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "thanks")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    for name in ("chatml", "unasked"):
        (row,) = prepare(rows, TOKENIZERS[name])
        assert [text for text, answer in parts(row, tokenizer) if answer] == ["d<|im_end|><eos>"]


def test_earlier_turns_of_a_completion_are_counted(caplog):
    """The loss is on the last, and TRL's is on the whole completion."""
    turns = [("assistant", "b"), ("user", "c"), ("assistant", "d")]
    completion = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": "a", "completion": completion}, {"prompt": "a", "completion": completion[:1]}]
    tokenizer = TOKENIZERS["chatml"]
    trained = {text for row in prepare(rows) for text, answer in parts(row, tokenizer) if answer}
    assert trained == {"d<|im_end|><eos>", "b<|im_end|><eos>"}
    note = "completion has several turns of the assistant, and the last alone is trained on"
    assert next(message for message in caplog.messages if note in message).startswith(f"1 of 2 rows: {note}")
    caplog.clear()
    prepare(rows, assistant_only_loss=True)
    prepare([{"messages": [{"role": "user", "content": "a"}, *completion]}])
    prepare([{"prompt": "a", "completion": [completion[0] | {"weight": 0}, *completion[1:]]}])  # it says so itself
    assert note not in caplog.text


# Of the token rows of dataset/*_sft.jsonl with the tokenizer that a pocket model has: rows that were trained on since
# the models were made stay what they are, to the bit.
DIGESTS = {
    ("arithmetic_sft.jsonl", "arithmetic_base"): ("5b1064ea41f8fbf0", "ddfc7f53687b254d"),
    ("pocket_countdown_sft.jsonl", "countdown_base"): ("9e53d703684e7946", "e0df73cb005958a5"),
    ("programs_sft.jsonl", "programs_base"): ("64f7980427dea591", "81473f48d84d290d"),
    ("sudoku_sft.jsonl", "base"): ("cc8f4737b57bfd0a", "76891542aad956dd"),
    ("sudoku_sft.jsonl", "block_base"): ("cc8f4737b57bfd0a", "76891542aad956dd"),
    ("sudoku_sft.jsonl", "causal_base"): ("cc8f4737b57bfd0a", "76891542aad956dd"),
}


@pytest.mark.parametrize(("file", "model"), DIGESTS)
def test_the_ids_of_the_shipped_data_stay(file, model):
    root = Path(__file__).parents[3]
    data = load_rows(str(root / "dataset" / file)).select(range(600))
    rows, held_out = preprocess_dataset(data, load_tokenizer(root / "pocket" / model), 4096, num_proc=1)
    assert (digest(rows), digest(held_out)) == DIGESTS[file, model]


def digest(rows):
    columns = [list(rows[name]) for name in ("input_ids", "answer", "length", "start", "status")]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()[:16]


def test_rows_that_the_model_cannot_read_say_what_it_reads():
    tokenizer = load_tokenizer(Path(__file__).parents[3] / "pocket/base")
    rows = [{"prompt": "2 + 2?", "completion": "4"}, {"prompt": "1234341221430321", "completion": "Four"}]
    with pytest.raises(ValueError, match=r"(?s)row 0: .* reads a 4x4 Sudoku.* row 1: .* no token for 'Four"):
        prepare(rows, tokenizer)


def test_overlong_rows(caplog):
    tokenizer = TOKENIZERS["plain"]
    rows = [{"prompt": "a", "completion": "b" * 30}, {"prompt": "a", "completion": "c"}]
    (long,) = [row for row in prepare(rows, tokenizer) if "b" in tokenizer.decode(row["input_ids"][-2:])]
    cut = [row for row in prepare(rows, tokenizer, max_length=20) if row["status"] == "truncated"]
    assert [row["input_ids"] for row in cut] == [long["input_ids"][:20]]
    assert cut[0]["input_ids"][-1] != tokenizer.eos_token_id
    assert "truncated 1 of 2 rows" in caplog.text
    assert len(prepare(rows, tokenizer, max_length=20, overlong="drop")) == 1
    assert "dropped 1 of 2 rows" in caplog.text
    with pytest.raises(ValueError, match=r"row 0: \d+ tokens are more than --max_length 20"):
        prepare(rows, tokenizer, max_length=20, overlong="refuse")


def test_a_cut_row_keeps_at_least_one_answer_token():
    row = {"prompt": "a", "completion": "b" * 30}
    (whole,) = prepare([row])
    first = whole["answer"].index(True)
    (cut,) = prepare([row], max_length=first + 1)
    assert cut["answer"] == [False] * first + [True]
    with pytest.raises(ValueError, match=f"no answer tokens left: the prompt has {first}, --max_length is {first}"):
        prepare([row], max_length=first)


BAD = {
    "completion is empty": {"prompt": "a", "completion": " "},
    "completion is NoneType, not text": {"prompt": "a", "completion": None},
    "prompt is NoneType, not text": {"prompt": None, "completion": "a"},
    "the mask token <mask> is in the text": {"prompt": "a <mask>", "completion": "b"},
    "no answer tokens left: the prompt has": {"prompt": "a" * 300, "completion": "b"},
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_rows_are_named_or_skipped(problem, caplog):
    rows = [*PAIR, BAD[problem], *PAIR]
    with pytest.raises(ValueError, match=r"1 of 3 rows cannot be trained on") as raised:
        prepare(rows, max_length=100)
    assert f"row 1: {problem}" in str(raised.value)
    assert "--bad_rows skip" in str(raised.value)
    assert len(prepare(rows, max_length=100, bad_rows="skip")) == 2
    assert f"row 1: {problem}" in caplog.text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a", "thinking_trajectories": [], "attempt": "b"}, "thinking_trajectories is not a list with"),
        ({"question": "a", "thinking_trajectories": ["c"], "attempt": ""}, "attempt is empty"),
        ({"prompt": 3, "completion": "a"}, "prompt is int, not text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ({"messages": "text"}, "messages is not a list"),
        ({"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}, "a message has no role, but content"),
    ],
)
def test_malformed_rows(row, problem):
    with pytest.raises(ValueError, match=f"row 0: .*{problem}"):
        prepare([row])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bad_rows": "raise"}, "bad_rows must be one of error, skip, not 'raise'"),
        ({"overlong": "Drop"}, "overlong must be one of truncate, drop, refuse, not 'Drop'"),
        ({"data": [{"prompt": "1", "completion": "2"}]}, r"the data is list, not datasets\.Dataset"),
        ({"data": DatasetDict({"train": Dataset.from_list([{"prompt": "1"}])})}, "choose one of its splits, train"),
        ({"data": Dataset.from_dict({"prompt": [], "completion": []})}, "the data has no rows"),
    ],
)
def test_wrong_choices_and_data_of_other_classes_are_refused(change, problem):
    given = {"data": Dataset.from_list([{"prompt": "1", "completion": "2"}]), "tokenizer": None, "max_length": 8}
    with pytest.raises(ValueError, match=problem):
        preprocess_dataset(**(given | change))


def test_unknown_columns_are_refused():
    with pytest.raises(ValueError, match="the data has the columns answer, text; supported are"):
        prepare([{"text": "a", "answer": "b"}])


def test_unreachable_data_says_how_to_give_a_local_file():
    with pytest.raises(FileNotFoundError, match=r"--train_data rows.jsonl"):
        load_rows("nobody/no-such-data")


def test_split_holds_out_and_keeps_every_row_once():
    rows = [{"prompt": f"q{i}", "completion": "a"} for i in range(250)]
    train, held_out = preprocess_dataset(Dataset.from_list(rows), TOKENIZERS["chatml"], 100, 0.01)
    assert (len(train), len(held_out)) == (247, 3)
    texts = [TOKENIZERS["chatml"].decode(row["input_ids"]) for row in [*train, *held_out]]
    assert len(set(texts)) == 250


def test_preprocessing_is_parallel_and_cached(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": "a"}) + "\n" for i in range(1100)))
    alone = prepare(load_rows(str(file)), num_proc=1)
    assert prepare(Dataset.from_list(load_rows(str(file)).to_list()), num_proc=2).to_list() == alone.to_list()

    def fail(*args, **options):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(sft_data, "tokenize_row", fail)
    assert prepare(load_rows(str(file)), num_proc=1).to_list() == alone.to_list()
    with pytest.raises(AssertionError, match="tokenised again"):
        prepare(load_rows(str(file)), max_length=99, num_proc=1)


def test_rows_are_tokenised_again_by_other_versions_and_with_another_text_before_questions(tmp_path, monkeypatch):
    """Chat templates for training come from TRL, and s1K's system prompt from another module."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in S1K))
    expected = prepare(load_rows(str(file))).to_list()

    def fail(*args, **options):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(sft_data, "tokenize_row", fail)
    assert prepare(load_rows(str(file))).to_list() == expected
    for library in ("trl", "transformers", "tokenizers"):
        with monkeypatch.context() as other:
            other.setattr(runs_data, "version", lambda name, changed=library: "9" if name == changed else version(name))
            with pytest.raises(AssertionError, match="tokenised again"):
                prepare(load_rows(str(file)))
    monkeypatch.setattr(sft_data, "SYSTEM_PROMPT", "Another one.")
    with pytest.raises(AssertionError, match="tokenised again"):
        prepare(load_rows(str(file)))


def test_columns_are_read_as_a_whole(monkeypatch):
    """Cell by cell, 60,000 rows took seconds longer."""

    def fail(column):
        raise AssertionError("read cell by cell")

    monkeypatch.setattr(Column, "__iter__", fail)
    rows = [{"prompt": f"q{i}", "completion": "a" * (1 + i)} for i in range(9)]
    tokenizer = TOKENIZERS["chatml"]
    train, held_out = preprocess_dataset(
        Dataset.from_list([*rows, BAD["completion is empty"]]), tokenizer, 100, 0.5, bad_rows="skip"
    )
    dataset = dLLMSFTDataset(held_out, tokenizer, 100, eval=True)
    assert dataset.lengths == [len(row["input_ids"]) for row in held_out.to_list()]
    assert len(train) == 4


CONVERT = """import {module}
def convert(row):
    with open({table!r}) as file:
        return {{"prompt": row["prompt"], "completion": file.read() + {module}.suffix(row)}}
"""


def test_a_function_is_called_again_whatever_it_reads(tmp_path, monkeypatch):
    """A module that it imports, one that this imports, and a file that it reads; sizes and times stay the same."""
    monkeypatch.syspath_prepend(tmp_path)
    table, inner, outer = tmp_path / "table.txt", tmp_path / "inner_of_rows.py", tmp_path / "outer_of_rows.py"
    rows, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(3)))
    mine.write_text(CONVERT.format(module="outer_of_rows", table=str(table)))
    table.write_text("a")
    inner.write_text("text = 'b'\n")
    outer.write_text("def suffix(row):\n    import inner_of_rows\n    return inner_of_rows.text + 'c'\n")

    def answers() -> set[str]:
        made = prepare(load_rows(str(rows)), function=load_function(f"{mine}:convert"))
        prints.append(hash_rows(made))
        return {parts(row, TOKENIZERS["chatml"])[1][0].removesuffix("<|im_end|><eos>") for row in made}

    prints: list[str] = []
    assert answers() == answers() == {"abc"}
    write_at_the_same_time(table, b"x")
    assert answers() == {"xbc"}
    write_at_the_same_time(inner, b"text = 'y'\n")
    assert answers() == {"xyc"}
    write_at_the_same_time(outer, outer.read_bytes().replace(b"'c'", b"'z'"))
    assert answers() == {"xyz"}
    assert len({*prints}) == 4
