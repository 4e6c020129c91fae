"""What a reader of a stream gets, piece by piece, is the text, however it was cut into blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d1.models.tokenizer import cut_at_stop
from d1.serve.answers import Choice


def of_bytes(decoder: Any) -> Any:
    """A tokenizer with a token per byte, and an end."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    if isinstance(decoder, decoders.ByteFallback):
        names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate([*names, "<eos>"])}, []))
    backend.decoder = (
        decoder if not isinstance(decoder, decoders.ByteFallback) else decoders.Sequence([decoder, decoders.Fuse()])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZERS = {"level": of_bytes(decoders.ByteLevel()), "fallback": of_bytes(decoders.ByteFallback())}
LETTERS = st.text("ab é😀\n", max_size=30)


def ids_of(name: str, text: str) -> list[int]:
    tokenizer, bytes_ = TOKENIZERS[name], text.encode()
    if name == "fallback":
        return [*bytes_]
    vocabulary = tokenizer.backend_tokenizer.get_vocab()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [vocabulary[char] for piece, _ in level.pre_tokenize_str(text) for char in piece]


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([*TOKENIZERS]),
    text=LETTERS,
    stops=st.lists(st.text("ab é😀", min_size=1, max_size=9), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    ended=st.booleans(),
)
def test_what_is_streamed_is_the_text(name: str, text: str, stops: list[str], sizes: list[int], ended: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids, end = ids_of(name, text), tokenizer.eos_token_id
    ids = [*ids, end, *ids] if ended else ids
    choice, sent, at, turn = Choice(tokenizer, (end,), stops), "", 0, 0
    while choice.reason is None:
        at, turn = at + sizes[turn % len(sizes)], turn + 1
        choice.update(ids[:at], at >= len(ids))
        sent += choice.pop_delta()
        assert cut_at_stop(text, stops).startswith(sent)
    assert sent == choice.text == cut_at_stop(text, stops)
    assert choice.reason == ("stop" if ended or len(sent) < len(text) else "length")


WORDS = ["it", "do", "n", "t", "ve", "s", "m", "re", "'", ".", ",", "?", "!"]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=12), clean_up=st.booleans())
def test_a_stream_of_words_is_the_text_without_the_spaces_that_a_tokenizer_removes(
    ids: list[int], clean_up: bool
) -> None:
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="it"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=clean_up)
    choice, sent = Choice(tokenizer, (), []), ""
    for count in range(1, len(ids) + 1):
        choice.update(ids[:count], is_last=count == len(ids))
        sent += choice.pop_delta()
    assert sent == choice.text == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["a", "abc"])
def test_a_text_that_may_begin_its_stop_string_waits_for_the_end(text: str) -> None:
    choice = Choice(TOKENIZERS["level"], (), ["abcde"])
    choice.update(ids_of("level", text), False)
    assert choice.pop_delta() == ""
    choice.update(ids_of("level", text), True)
    assert (choice.pop_delta(), choice.reason) == (text, "length")
