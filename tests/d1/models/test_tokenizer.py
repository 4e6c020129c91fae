"""Special tokens: their sources, and what is refused; prompts, and those that a model cannot read."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d1.models import load_tokenizer
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE, check_chat_template, encode_prompt, encode_turns, render_prompt
from d1.tasks import few_shot_messages, load_task
from tests.faults import edit_json

WORDS = ["<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>", "<|eot_id|>", "<|im_end|>", "a", "b", "<pad>", "user", ":"]


def write(folder: Path, config: dict[str, Any] | None, words: list[str] = WORDS, **tokens: str) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, **tokens).save_pretrained(folder)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA = {"model_type": "llama", "vocab_size": 12}
LLADA = {"model_type": "llada", "auto_map": {"AutoConfig": "x.Y"}, "vocab_size": 12, "mask_token_id": 2}


def test_llada_names_its_mask_in_the_config_only(tmp_path):
    """Its tokenizer has no mask token; its config points to code that must not be needed."""
    tokenizer = load_tokenizer(write(tmp_path, LLADA, eos_token="<|endoftext|>"))
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mdm_mask|>", 2)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)
    assert (tokenizer.eot_token, tokenizer.eot_token_id) == ("<|eot_id|>", 3)
    assert tokenizer.padding_side == "left"
    assert tokenizer("a <|mdm_mask|> b").input_ids == [5, 2, 6]
    assert tokenizer.decode([5, 2, 0], skip_special_tokens=True) == "a"


NAMED = {"eos_token": "<|endoftext|>", "bos_token": "<|startoftext|>", "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        ({}, {"mask_token": "<|endoftext|>"}, r"the mask token '<\|endoftext\|>' is also the eos_token"),
        ({}, {"mask_token": "<|startoftext|>"}, "is also the bos_token"),
        ({}, {"mask_token": "<pad>"}, "is also the pad_token"),
        ({}, {"mask_token": "<|eot_id|>"}, "is also the eot_token"),
        ({"mask_token_id": 0}, {}, "is also the eos_token"),
        ({}, {"mask_token": "b"}, "the mask token 'b' is ordinary text"),
        ({}, {"mask_token": ":"}, "the mask token ':' is ordinary text"),
        ({}, {"mask_token": "user"}, "the mask token 'user' is ordinary text"),
        ({"mask_token_id": 6}, {}, "the mask token 'b' is ordinary text"),
        (
            {"mask_token_id": 2},
            {"mask_token": "<|im_end|>"},
            "id 4, but config.json says mask_token_id 2: correct",
        ),
        ({"mask_token_id": 11}, {}, "names a mask_token"),
        ({}, {}, "nor config.json names a mask_token: name one in .*, or add a mask token with `python -m d1 a2d`"),
        (
            {},
            {"mask_token": "<|mdm_mask|>", "eos_token": None},
            "names an eos_token: name one in special_tokens_map.json$",
        ),
        ({"vocab_size": 6}, {"mask_token": "<|eot_id|>", "eos_token": "a"}, "id 7, outside the model's embedding"),
    ],
)
def test_special_tokens_that_cannot_be_are_refused(tmp_path, config, tokens, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path, LLAMA | config, **(NAMED | tokens)))


def test_tokens_come_from_the_tokenizer_else_the_config_else_eos(tmp_path):
    """A new token is not in the vocabulary of the text, so it may look like a word."""
    tokens = {"eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = load_tokenizer(write(tmp_path / "both", LLADA | {"pad_token_id": 3}, **tokens))
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (2, 7)
    tokenizer = load_tokenizer(write(tmp_path / "new", LLAMA | {"vocab_size": 20}, **(NAMED | {"mask_token": "MASK"})))
    assert tokenizer.mask_token_id == len(WORDS)
    tokens = {"eos_token": "<eos>", "mask_token": "<mask>"}
    tokenizer = load_tokenizer(write(tmp_path / "plain", None, ["<eos>", "<mask>", "a"], **tokens))
    assert tokenizer.eot_token_id == tokenizer.eos_token_id == 0


def test_an_adapter_has_the_tokenizer_of_its_base_or_one_that_fits_it(tmp_path):
    base = write(tmp_path / "a", LLADA, eos_token="<|endoftext|>")
    adapter, own = (
        tmp_path / "adapter",
        write(tmp_path / "own", None, eos_token="<|endoftext|>", mask_token="<|im_end|>"),
    )
    adapter.mkdir()
    for folder in (adapter, own):
        config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    assert load_tokenizer(adapter).mask_token_id == 2
    with pytest.raises(ValueError, match=r"with id 4, but config\.json says mask_token_id 2"):
        load_tokenizer(own)
    edit_json(own / "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    assert load_tokenizer(own).mask_token_id == 4  # nothing contradicts it


@pytest.mark.parametrize("config", [{"vocab_size": 20}, {"embedding_size": None}, {"embedding_size": 20}])
def test_the_rows_of_the_embedding_are_those_that_the_config_states(tmp_path, config):
    """LLaDA's `embedding_size` may be null, and is then the vocabulary's size."""
    assert load_tokenizer(write(tmp_path, LLADA | config, eos_token="<|endoftext|>")).mask_token_id == 2
    small = LLADA | config | {"vocab_size": 2}
    if not config.get("embedding_size"):
        with pytest.raises(ValueError, match="outside the model's embedding"):
            load_tokenizer(write(tmp_path / "small", small, eos_token="<|endoftext|>", mask_token="<|mdm_mask|>"))


def test_of_several_ends_of_a_text_the_first_is_eos(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, LLADA | {"eos_token_id": [0, 3]}))
    assert tokenizer.eos_token == "<|endoftext|>"


def test_an_adapter_on_a_model_without_a_mask_may_have_its_own_tokenizer(tiny_canvas_dir, tmp_path):
    adapter = tmp_path / "adapter"
    load_tokenizer(tiny_canvas_dir).save_pretrained(adapter)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_canvas_dir)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert load_tokenizer(adapter).mask_token is None
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="/nowhere")
    assert load_tokenizer(adapter, base=str(tiny_canvas_dir)).mask_token is None


def test_berts_separator_ends_a_text(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    tokenizer = load_tokenizer(write(tmp_path, {"model_type": "bert", "vocab_size": 6}, words, **tokens))
    assert (tokenizer.eos_token, tokenizer.eot_token, tokenizer.pad_token_id) == ("[SEP]", "[SEP]", 0)


QWEN_KINDS = {  # model_type -> what its config.json says of the mask, the token, whether the tokenizer names it
    "Dream": ({"mask_token_id": 7}, "<|mask|>", True),
    "sdar": ({"mask_token_id": 7, "block_size": 4}, "<|MASK|>", False),
    "sdar_moe": ({"mask_token_id": 7}, "<|MASK|>", True),
    "Fast_dLLM_Qwen": ({"bd_size": 32}, "|<MASK>|", False),
}


@pytest.mark.parametrize("model_type", QWEN_KINDS)
def test_qwens_files_need_no_code_of_their_own(tmp_path, monkeypatch, model_type):
    """Vocabulary and merges of Qwen2, added tokens, a template in a file, and a class that only the hub has."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    config, mask, named = QWEN_KINDS[model_type]
    vocab = {word: i for i, word in enumerate(["a", "b", "ab", "Ġ", "Ġa"])}
    added = {"<|endoftext|>": 5, "<|im_end|>": 6, mask: 7}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|im_end|>")
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    special = {str(i): {"content": word, "special": True} | plain for word, i in added.items()}
    fields: dict[str, Any] = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    fields |= {"tokenizer_class": "OwnTokenizer", "added_tokens_decoder": special}
    fields |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"} | ({"mask_token": mask} if named else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    own = {"AutoConfig": "configuration_own.OwnConfig"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "vocab_size": 8, "auto_map": own} | config)
    )
    for tokenizer in (load_tokenizer(tmp_path), saved(load_tokenizer(tmp_path), tmp_path / "saved")):
        assert (tokenizer.mask_token, tokenizer.mask_token_id) == (mask, 7)
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.eot_token_id) == (5, 5, 6)
        assert tokenizer(f"ab a{mask}<|im_end|>").input_ids == [2, 4, 7, 6]
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"


def saved(tokenizer: Any, folder: Path) -> Any:
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llada2_moe"},
        {"model_type": "lladamoe", "mask_token_id": 2},
        {"model_type": "llada", "architectures": ["LLaDAMoEModelLM"]},
    ],
)
def test_the_mixtures_of_llada_bring_fast_files(tmp_path, config):
    """Their configs may not name a mask; their turns end with a special token."""
    words = ["a", "b", "<|mask|>", "<|endoftext|>", "<|role_end|>"]
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    folder = write(tmp_path, config | {"vocab_size": 6, "pad_token_id": 3, "auto_map": auto}, words)
    fields = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"auto_map": auto}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 3, 3)
    assert (tokenizer.eot_token, tokenizer.eot_token_id) == ("<|role_end|>", 4)


def test_the_plain_chat_template_comes_on_request_only(tmp_path):
    source = write(tmp_path / "a", LLADA, eos_token="<|endoftext|>")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="chat_template"):
        load_tokenizer(source).apply_chat_template(messages)
    plain = load_tokenizer(source, plain_chat_template=True)
    assert plain.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "user: a\nassistant: "
    plain.chat_template = "{{ messages[0]['content'] }}"
    plain.save_pretrained(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b", plain_chat_template=True).chat_template != PLAIN_CHAT_TEMPLATE


def test_a_template_that_writes_the_date_is_named(tmp_path, caplog):
    """As Llama 3.2's does; another date is another prompt."""
    tokenizer = load_tokenizer(write(tmp_path, LLADA, eos_token="<|endoftext|>"))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    check_chat_template(tokenizer, "a")
    assert not caplog.records
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}"
    assert render_prompt(tokenizer, [{"role": "user", "content": "a"}]).startswith(f"{datetime.now():%d %b %Y}")
    check_chat_template(tokenizer, "some/model")
    (record,) = caplog.records
    assert record.getMessage().startswith("The chat template of some/model writes today's date")


POCKET = Path(__file__).parents[3] / "pocket" / "base"


@pytest.fixture(scope="module")
def pocket() -> Any:
    return load_tokenizer(POCKET)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_a_prompt_is_what_the_template_writes_and_the_tokenizer_reads(pocket, tiny_model_dir):
    tiny: Any = load_tokenizer(tiny_model_dir)
    for tokenizer, messages in ((pocket, [user("0002403020033020")]), (tiny, [user("ab 1"), user("Unknown")])):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert render_prompt(tokenizer, messages) == text
        assert encode_prompt(tokenizer, text) == ids
    asked, told = (render_prompt(tiny, [user("a")], add_generation_prompt=ask) for ask in (True, False))
    assert asked == told + "<assistant>"


def test_the_ids_of_the_pocket_models_prompts_stay(pocket):
    """<bos>, cells a to p, =>: what its weights were trained on."""
    cells = [13 + 5 * place + int(digit) for place, digit in enumerate("0002403020033020")]
    assert encode_prompt(pocket, render_prompt(pocket, [user("Solve 0002403020033020")])) == [1, *cells, 8]


def test_a_question_that_the_template_refuses_names_the_model_and_what_it_reads(pocket):
    message = r"pocket/base cannot read the text 'What is 2 \+ 2\?': the pocket model reads a 4x4 Sudoku: end the"
    with pytest.raises(ValueError, match=message):
        render_prompt(pocket, [user("What is 2 + 2?")])


def test_images_are_refused(pocket):
    parts: Any = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "0002403020033020"}]
    with pytest.raises(ValueError, match="a message is a list of parts, such as images, not text"):
        render_prompt(pocket, [{"role": "user", "content": parts}])


def test_few_shot_examples_outside_the_vocabulary_name_the_word_and_the_tokens_there_are(pocket):
    task = load_task("sudoku")
    messages = [*few_shot_messages(task, 2, seed=0), user("0002403020033020")]
    message = r"cannot read the text .*: it has no token for 'Row'.*; its 93 tokens are <pad>, <bos>, <eos>, <mask>"
    with pytest.raises(ValueError, match=message):
        encode_prompt(pocket, render_prompt(pocket, messages))


@pytest.mark.parametrize("number", [-1, 1000])
def test_an_id_that_no_token_has_names_no_token(tiny_model_dir, tmp_path, number):
    """Many configs have a padding id of -1, which means none."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    edit_json(folder / "config.json", pad_token_id=number)
    assert load_tokenizer(folder).pad_token == "<eos>"
    edit_json(folder / "tokenizer_config.json", mask_token=None)
    edit_json(folder / "config.json", mask_token_id=number)
    with pytest.raises(ValueError, match="names a mask_token: name one"):
        load_tokenizer(folder)


@pytest.mark.parametrize("all_turns", [False, True])
@pytest.mark.parametrize("marks", [False, True])
def test_of_templates_with_names_the_one_that_writes_the_conversation_counts(tiny_model_dir, all_turns, marks):
    """Hermes and Command R have a template `default` and one for tools."""
    tokenizer: Any = load_tokenizer(tiny_model_dir)
    if not marks:
        tokenizer.chat_template = re.sub(r"{% (end)?generation %}", "", tokenizer.chat_template)
    chat = [user("ab"), {"role": "assistant", "content": "c"}, user("d"), {"role": "assistant", "content": "e"}]
    unread = [*chat[:-1], {**chat[-1], "reasoning_content": "f"}]
    expected = encode_turns(chat, tokenizer, "the answer", {"depth": 1}, all_turns=all_turns)
    with pytest.raises(ValueError, match=r": the chat template writes it in|leaves out reasoning_content") as error:
        encode_turns(unread, tokenizer, "the answer", all_turns=all_turns)

    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ depth }}"}
    assert encode_turns(chat, tokenizer, "the answer", {"depth": 1}, all_turns=all_turns) == expected
    with pytest.raises(ValueError, match=re.escape(str(error.value))):
        encode_turns(unread, tokenizer, "the answer", all_turns=all_turns)
