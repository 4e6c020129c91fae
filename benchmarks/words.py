"""Random words for models of random weights: a tokenizer that reads them, and a reward for them."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d1.tasks import text_of

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>"]  # ids 0 to 3, as in the config of `random_model`
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<bos> {{ message['content'] }} "
    "{% else %}{{ message['content'] }} <eos>{% endif %}{% endfor %}"
)


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word: w4, w5, ..."""
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), vocabulary))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_words(count: int, vocabulary: int, source: random.Random) -> str:
    return " ".join(f"w{source.randrange(len(SPECIAL), vocabulary)}" for _ in range(count))


def different_words(completions: list, **columns: Any) -> list[float]:
    """The reward of random words: the share of them that differ."""
    texts = [text_of(completion).split() for completion in completions]
    return [len(set(words)) / max(len(words), 1) for words in texts]
