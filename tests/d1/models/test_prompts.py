"""A prompt that a model's template or vocabulary cannot express is one clear error; others give the template's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from d1.models import load_tokenizer
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.tasks import few_shot_messages, load_task

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
    message = r"pocket/base cannot read the prompt 'What is 2 \+ 2\?': the pocket model reads a 4x4 Sudoku: end the"
    with pytest.raises(ValueError, match=message):
        render_prompt(pocket, [user("What is 2 + 2?")])


def test_few_shot_examples_outside_the_vocabulary_name_the_word_and_the_tokens_there_are(pocket):
    task = load_task("sudoku")
    messages = [*few_shot_messages(task, 2, seed=0), user("0002403020033020")]
    message = r"cannot read the prompt .*: it has no token for 'Row'.*; its 93 tokens are <pad>, <bos>, <eos>, <mask>"
    with pytest.raises(ValueError, match=message):
        encode_prompt(pocket, render_prompt(pocket, messages))
