"""SFT with visible noise: the loss against a loop over tokens, however a batch is split; what is replaced; one run."""

import json

import pytest
import torch

from d1.models import load_model, load_tokenizer
from d1.runs.data import IGNORED
from d1.sft.config import SFTConfig
from d1.sft.data import dLLMDataCollator, dLLMSFTDataset
from d1.sft.editing import EditNoise
from tests.d1.sft.test_loss import MASK, WAYS, assert_same, by_hand, found, one_step, rows_of_all_lengths

NOISES = [
    EditNoise("uniform", 0.4, 2.0, 0.0, 1),
    EditNoise("draft", 0.4, 0.5, 0.7, 1),
    EditNoise("draft", 0.6, 1, 1, 2),
]
SOME_WAYS = ["full attention", "blocks", "packed", "packed blocks"]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: f"{noise.kind} {noise.turns}")
@pytest.mark.parametrize("way", SOME_WAYS)
def test_loss_and_gradient_are_those_of_a_loop_however_a_batch_is_split(tiny_model_dir, tmp_path, way, noise):
    expected = by_hand(tiny_model_dir, tmp_path, noise, **WAYS[way])
    for batch, accumulation in [(8, 1), (2, 4)]:
        folder = tmp_path / str(batch)
        one_step(tiny_model_dir, folder, batch, accumulation, edits=noise, **WAYS[way])
        assert_same(found(tiny_model_dir, folder), expected, atol=1e-5)  # norms are computed in fp32


def batches(noise, **options):
    """A batch with and one without the noise."""

    class Tokens:
        mask_token_id, eos_token_id, pad_token_id = MASK, 2, 0

        def __len__(self):
            return 60

    rows = dLLMSFTDataset(rows_of_all_lengths(64), Tokens(), 64, eos_padding=1)
    features = [rows[i] for i in range(64)]
    return [dLLMDataCollator(Tokens(), edits=one, **options)(features) for one in (noise, None)]


@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"complementary": True}], ids=str)
def test_masks_stay_and_a_share_of_the_visible_answer_is_replaced(options):
    noise = EditNoise("uniform", 0.25, 1.0, 1.0, 1)
    noisy, plain = batches(noise, **options)
    assert torch.equal(noisy["t"], plain["t"])
    assert torch.equal(noisy["labels"], plain["labels"])
    edited, answer, hidden = noisy["edited"], plain["labels"] != IGNORED, plain["input_ids"] == MASK
    assert torch.equal(noisy["input_ids"][~edited], plain["input_ids"][~edited])
    assert not (edited & (hidden | ~answer)).any()
    visible = int((answer & ~hidden).sum())
    assert abs(edited.sum().item() / visible - 0.25) < 4 * (0.25 * 0.75 / visible) ** 0.5
    ids = noisy["input_ids"][edited]
    assert (ids != MASK).all()
    assert 0 <= ids.min() < 8
    assert 50 < ids.max() < 60
    assert (ids != noisy["labels"][edited]).float().mean() > 0.9


def test_a_rows_noise_depends_on_the_row_alone():
    noise = EditNoise("uniform", 0.5, 1.0, 1.0, 1)
    padded, _ = batches(noise)
    packed, _ = batches(noise, packed=True)
    for name in ("input_ids", "edited", "draws"):
        assert torch.equal(padded[name][padded["attention_mask"].bool()], packed[name][0])


def test_evaluation_has_masks_alone(tiny_model_dir):
    tokenizer = load_tokenizer(str(tiny_model_dir))
    rows = dLLMSFTDataset(rows_of_all_lengths(4), tokenizer, 64, eval=True)
    assert "edited" not in dLLMDataCollator(tokenizer, edits=NOISES[1])([rows[i] for i in range(8)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"edit_share": 0.2}, "--edit_share 0.2 would do nothing: set --edit_noise"),
        ({"edit_noise": "noise"}, "edit_noise"),
        ({"edit_noise": "draft", "edit_share": 1.5}, "edit_share"),
    ],
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**given)


@pytest.mark.parametrize("full", [True, False])
def test_a_run_says_what_the_model_learnt(tiny_block_dir, tmp_path, full):
    from d1.sft.train import main

    rows = [{"prompt": "ab" * (1 + i % 3), "completion": "cd" * (1 + i % 4)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ways = {"full_finetuning": True} if full else {"lora_r": 2, "merge_at_end": True}
    files = {"model_name": str(tiny_block_dir), "train_data": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path)}
    steps = {"max_steps": 2, "batch_size": 4, "grad_accum_steps": 1, "test_split": 0.2, "num_proc": 1}
    main(SFTConfig(job_name="run", debugging=True, edit_noise="draft", edit_turns=2, **files, **steps, **ways))
    for folder in ("run", "run/merged")[: 2 - full]:  # the adapter, too
        assert load_model(str(tmp_path / folder)).config.edit_noise == "draft"
    assert (tmp_path / "run" / "learnt.json").exists() != full
    assert "draft" in (tmp_path / "run" / "README.md").read_text()
