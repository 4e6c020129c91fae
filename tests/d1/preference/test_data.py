"""TRL's formats, bad rows, and batches with views that depend on nothing but the row and the epoch."""

import pytest
import torch
from datasets import Dataset

from d1.models import load_tokenizer
from d1.preference.data import PreferenceCollator, PreferenceDataset, token_rows
from d1.runs.data import IGNORED, BatchRow
from d1.scoring import ESTIMATORS, ViewSettings

LIMITS = {"max_prompt_length": 12, "max_completion_length": 8}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return load_tokenizer(str(tiny_model_dir))


def rows_of(data, tokenizer, paired=True, **options):
    return list(token_rows(Dataset.from_list(data), tokenizer, **LIMITS, paired=paired, **options))


ASKED = [{"role": "user", "content": "1+1="}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("2", "three"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},  # the prompt is what both begin with
    ],
)
def test_trls_formats_give_the_same_tokens(row, tokenizer):
    (pair,) = rows_of([row], tokenizer)
    assert tokenizer.decode(pair["prompt_ids"]).replace(" ", "") == "<bos><user>1+1=<assistant>"
    texts = [tokenizer.decode(ids).replace(" ", "") for ids in pair["completions"]]
    assert texts == ["2<eos>", "three<eos>"]
    good, bad = rows_of([row], tokenizer, paired=False)
    assert ([good["completions"][0], bad["completions"][0]], good["label"], bad["label"]) == (
        pair["completions"],
        1,
        -1,
    )
    single = [{"prompt": "1+1=", "completion": text, "label": text == "2"} for text in ("2", "three")]
    assert rows_of(single, tokenizer, paired=False)[1]["completions"] == bad["completions"]


FINE = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"chosen": "3"}, "chosen and rejected are equal"),
        ({"chosen": " "}, "chosen is empty"),
        ({"rejected": None}, "rejected is null"),
        ({"prompt": "1" * 40}, "the prompt has 43 tokens, more than --max_prompt_length"),
        ({"rejected": "4" * 8}, "a completion of 9 tokens is longer than --max_completion_length"),
        ({"chosen": "<mask>"}, "the mask token <mask> is in the text"),
    ],
)
def test_bad_rows_are_an_error_or_counted(change, problem, tokenizer, caplog):
    data = [FINE, FINE | change, FINE]
    with pytest.raises(ValueError, match=rf"(?s)1 of 3 rows cannot be trained on.*row 1: .*{problem}"):
        rows_of(data, tokenizer)
    assert len(rows_of(data, tokenizer, bad_rows="skip")) == 2
    assert "skipped 1 of 3 rows" in caplog.text
    assert problem in caplog.text


@pytest.mark.parametrize(
    ("data", "paired", "problem"),
    [
        ([{"prompt": "a", "completion": "b", "label": True}], True, "needed are chosen and rejected"),
        ([{"text": "a"}], False, "or prompt, completion and label"),
        ([{"prompt": "a", "completion": "b", "label": "maybe"}], False, "the label is 'maybe', neither true nor false"),
        ([{"prompt": "a", "completion": "b", "label": 1}] * 2, False, "all completions have the same label"),
        ([{"prompt": ASKED, "chosen": ASKED, "rejected": GOOD}], True, "chosen does not end"),
        ([{"chosen": ASKED + GOOD, "rejected": GOOD + ASKED + BAD}], True, "answer different prompts"),
    ],
)
def test_data_that_makes_no_sense(data, paired, problem, tokenizer):
    with pytest.raises(ValueError, match=problem):
        rows_of(data, tokenizer, paired)


@pytest.mark.parametrize("block", [None, 4])
def test_views_depend_on_the_row_and_the_epoch_alone(tokenizer, block):
    """Neither on the batch, its padding or its order. What stands after a completion is hidden and not scored; an
    exact count of tokens is scored, and an empty row scores nothing."""
    data = [{"prompt": "1" * n, "chosen": "2" * n, "rejected": "3" * (7 - n)} for n in (1, 3, 6)]
    dataset = PreferenceDataset(token_rows(Dataset.from_list(data), tokenizer, **LIMITS, paired=True), seed=3)
    settings = ViewSettings(gen_length=8, num_views=4, stratified=True)
    collator = PreferenceCollator(tokenizer, ESTIMATORS["counts"], settings, block)
    batch = collator([dataset[BatchRow(row, 2)] for row in (2, 0, 1)])
    for place, row in enumerate((2, 0, 1)):
        alone = collator([dataset[BatchRow(row, 2)]])
        width = alone["prompt_ids"].shape[1]
        for side in (0, 1):
            both = batch["noise"][side * 3 + place, :, -width - 8 :], alone["noise"][side]
            assert torch.equal(*both)
            assert torch.equal(batch["weights"][side * 3 + place], alone["weights"][side])
            length = len(dataset.rows[row]["completions"][side])
            assert both[0][:, width + length :].all()
            assert not both[0][:, :width].any()
            if block is None:
                counts = alone["weights"][side].ne(0).sum(1)
                torch.testing.assert_close(alone["weights"][side].sum(1), torch.full((4,), length / 4))
                assert int(counts.max() - counts.min()) >= min(length - 1, 2)  # draws of a row are spread
    other = collator([dataset[BatchRow(row, 3)] for row in (2, 0, 1)])
    assert not torch.equal(batch["noise"], other["noise"])
    empty = collator([dataset[BatchRow(0, 2)], dataset[BatchRow(-1)]])
    assert empty["labels"].tolist() == [1, IGNORED]
    assert not empty["weights"][1::2].any()
    assert empty["weights"][::2].any()
