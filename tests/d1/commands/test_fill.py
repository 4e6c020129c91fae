"""`python -m d1 fill` prints the text with its placeholders filled in, and refuses by name what it cannot fill."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from d1.__main__ import main, make_parser
from d1.commands.fill import encoded, pieces_of
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.sampling import infill
from tests.commands import ROOT

POCKET = str(ROOT / "pocket" / "base")
TEXT = "<reasoning> a1 [MASK:3]b3[MASK] </reasoning>"


def printed(capsys, *words):
    main(make_parser().parse_args(["fill", POCKET, *words]))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {}),
        ("--steps 2 --temperature 0.9 --seed 4", {"steps": 2, "temperature": 0.9}),
        ("--sampler parallel --reveal entropy --reveal_level 2 --cfg_scale 0.5", {"reveal": "entropy"}),
    ],
)
def test_what_is_printed_is_the_library_s_filling(capsys, words, options):
    tokenizer, model = load_tokenizer(POCKET), load_model(POCKET)
    texts = ("<reasoning> a1 ", "b3", " </reasoning>")
    before, between, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    mask = tokenizer.mask_token_id
    ids = torch.tensor([[*before, mask, mask, mask, *between, mask, *after]])
    if "reveal" in options:
        options |= {"sampler": "parallel", "reveal_level": 2, "cfg_scale": 0.5}
    generator = [keyed_generator(4 if "seed" in words else 0)]
    wanted = infill(model, ids, ids == mask, mask_token_id=mask, generator=generator, **options).ids[0]
    assert printed(capsys, TEXT, *words.split()) == tokenizer.decode(wanted) + "\n"


def test_a_piece_is_read_alone_and_special_tokens_stand_around_the_whole():
    words = ["<pad>", "[MASK]", "[CLS]", "[SEP]", "a", "b", "ab"]
    rules = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    rules.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, mask_token="[MASK]", pad_token="<pad>")
    ids, hidden, before, after = encoded(tokenizer, pieces_of("a[MASK:2]b ab[MASK]"))
    assert ids == [2, 4, 1, 1, 5, 6, 1, 3]
    assert hidden == [False, False, True, True, False, False, True, False]
    assert (before, after) == (1, 1)
    assert encoded(tokenizer, pieces_of("[MASK:2]"))[0] == [2, 1, 1, 3]


def character_tokenizer(scheme, merges=()):
    """A tokenizer of SentencePiece's kind: it writes a space as a mark, also before a text without one."""
    characters = [chr(number) for number in range(33, 127)]
    joined = [left + right for left, right in merges]
    vocabulary = ["<unk>", "<s>", "</s>", "<mask>", "\u2581", *characters, *joined]
    ids = {token: number for number, token in enumerate(vocabulary)}
    rules = Tokenizer(models.BPE(vocab=ids, merges=list(merges), unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    rules.decoder = decoders.Metaspace(prepend_scheme=scheme)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=rules, **names)


@pytest.mark.parametrize("merges", [(), (("x", "a"), ("\u2581", "a"), (".", ","))])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    "text", ["The capital of [MASK:2], is Paris", "un[MASK]able [MASK] x", "[MASK]a[MASK:3]", "a[MASK]  two  [MASK]."]
)
def test_visible_text_stays_as_it_is(scheme, merges, text):
    tokenizer = character_tokenizer(scheme, merges)
    ids, hidden, before, after = encoded(tokenizer, pieces_of(text))
    shown = text.replace("[MASK:2]", "[MASK][MASK]").replace("[MASK:3]", "[MASK][MASK][MASK]")
    assert tokenizer.decode(ids[before : len(ids) - after]) == shown.replace("[MASK]", "<mask>")
    assert sum(hidden) == shown.count("[MASK]")
    assert all((number == tokenizer.mask_token_id) == is_hidden for number, is_hidden in zip(ids, hidden, strict=True))


def test_a_tokenizer_may_change_letters_but_no_space_after_a_placeholder():
    tokenizer = character_tokenizer("always")
    rules = tokenizer.backend_tokenizer
    rules.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("  ", " ")])
    ids, *_ = encoded(tokenizer, pieces_of("a [MASK]ABLE caf\u00e9"))
    assert tokenizer.decode(ids) == "a <mask>able caf<unk>"
    message = r"would write the text '  b' after a placeholder as ' b': change the text, or move"
    with pytest.raises(ValueError, match=message):
        encoded(tokenizer, pieces_of("a [MASK]  b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a1"], "the text has no placeholder: write"),
        (["a1 [MASK:0]"], r"\[MASK:0\] has no number of tokens: write \[MASK:3\] for three"),
        (["a1 [MASK:x]"], r"\[MASK:x\] has no number of tokens"),
        (["a1 [MASK:]"], r"\[MASK:\] has no number"),
        (["a1 [MASK:-2] [MASK]"], r"\[MASK:-2\] has no number"),
        (["Paris [MASK]"], "it has no token for 'Paris'"),
        (["a1 [MASK] <mask> b3"], "<mask>, the model's own mask token, .*: write .MASK. where a token is missing"),
        (["a1 [MASK:300]"], "1 tokens of text and 300 to fill in exceed the model's 256 positions"),
        (["a1 [MASK]", "--sampler", "cached"], "use the sampler exact or parallel"),
        (["a1 [MASK]", "--reveal", "factor"], "would be ignored by the sampler exact"),
        pytest.param(
            ["a1 [MASK]", "--compile", "graphs"],
            "--compile graphs needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
        (["a1 [MASK]", "--steps", "0"], "--diffusion_steps 0 .must be an integer"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_the_model_is_loaded(monkeypatch, words, message):
    monkeypatch.setattr("d1.models.load.load_on_device", lambda *_, **__: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match=message):
        main(make_parser().parse_args(["fill", POCKET, *words]))
