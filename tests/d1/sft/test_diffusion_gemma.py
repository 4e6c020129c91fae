"""SFT with uniform noise: TRL's loss, text beyond the window, draws, splits of a batch, and a whole run."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.models.diffusion_gemma import canvas_states
from d1.models.kinds import native_config
from d1.runs.data import IGNORED
from d1.sft import dLLMSFTDataset, dLLMTrainer
from d1.sft.config import SFTConfig
from d1.sft.diffusion_gemma import CanvasCollator, CanvasTrainer, next_tokens
from d1.sft.stage import check_noise
from d1.sft.train import main, make_parser
from tests import forks
from tests.d1.diffusion_gemma import CANVAS, needs_class, tiny, write_with_tokenizer
from tests.rounding import LOGITS, assert_near, rounding

pytestmark = needs_class
EOS, WIDE = 2, 64


@pytest.fixture(scope="module", params=[WIDE, 6], ids=["within the window", "beyond the window"])
def model_dir(request, tmp_path_factory, tiny_model_dir):
    return write_with_tokenizer(tmp_path_factory.mktemp("gemma"), tiny_model_dir, sliding_window=request.param)


def rows(count=8):
    sizes = [(2 + i % 5, 1 + (i * i) % 17) for i in range(count)]
    ids = [[8 + (7 * i + k) % 40 for k in range(sum(both) - 1)] + [EOS] for i, both in enumerate(sizes)]
    answer = [[False] * prompt + [True] * of for prompt, of in sizes]
    columns = {"input_ids": ids, "answer": answer, "length": [*map(sum, sizes)], "start": [one for one, _ in sizes]}
    return Dataset.from_dict(columns | {"status": ["ok"] * count})


def trainer_of(folder, output, batch=8, accumulation=1, model=None, **changes):
    model, tokenizer = load_model(str(folder)) if model is None else model, load_tokenizer(str(folder))
    own = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
    }
    own |= {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "remove_unused_columns": False}
    own |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "use_cpu": True}
    args = TrainingArguments(str(output), num_train_epochs=1, **own | changes)
    collate = CanvasCollator(tokenizer, CANVAS, model.config.text_config.vocab_size)
    data = dLLMSFTDataset(rows(), tokenizer, 64, eos_padding=0)
    return CanvasTrainer(model=model, args=args, data_collator=collate, train_dataset=data, processing_class=tokenizer)


def of_trl(model, batch):
    """The loss of TRL's script on Transformers' own class, for the batch's draws: decoder and encoder."""
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    starts, size = batch["starts"], labels.shape[1]
    seen = (torch.arange(ids.shape[1]) < starts[:, None]).long()
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": batch["canvas_ids"]}
    given["decoder_attention_mask"] = torch.cat([seen, torch.ones_like(labels)], dim=1)
    given["decoder_position_ids"] = starts[:, None] + torch.arange(size)
    with torch.no_grad():
        given["self_conditioning_logits"] = model(**given).logits
    output = model(**given, self_conditioning_mask=batch["conditioned"])
    canvas = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    cap = model.config.text_config.final_logit_softcapping
    text = torch.tanh(model.lm_head(output.encoder_last_hidden_state) / cap) * cap
    targets = torch.where(next_tokens(batch), ids[:, 1:], IGNORED)
    return canvas, F.cross_entropy(text[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def batch_of(trainer):
    return trainer.data_collator(trainer.train_dataset.__getitems__(list(range(8))))


def test_the_loss_and_its_gradient_equal_trls_where_the_text_fits_the_window(model_dir, tmp_path):
    trainer = trainer_of(model_dir, tmp_path)
    batch = batch_of(trainer)
    assert (batch["labels"] != IGNORED).all()  # no answer was cut off
    assert {*batch["conditioned"].tolist()} == {True, False}
    window = trainer.model.config.text_config.sliding_window
    fits = batch["input_ids"].shape[1] < window
    own = type(trainer.model).from_pretrained(model_dir)
    canvas, text = of_trl(own, batch)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    if not fits:  # the encoder's loss is the same; TRL's decoder lacks the text before the canvas
        assert abs((loss - text - canvas).item()) > 1e-4
        return
    assert_near(loss, canvas + text, least=LOGITS)
    loss.backward()
    (canvas + text).backward()
    theirs = dict(own.named_parameters(remove_duplicate=False))  # tied: it names the encoder first
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, theirs[name].grad, atol=rounding(LOGITS), rtol=1e-3)


@torch.no_grad()
def test_a_canvas_sees_the_text_before_it_as_generate_does(model_dir, tmp_path):
    """Each row alone: the clean text before its canvas is encoded by itself, with Transformers' own cache."""
    trainer = trainer_of(model_dir, tmp_path)
    batch, own = batch_of(trainer), type(trainer.model).from_pretrained(model_dir)
    expected = []
    for ids, start, canvas, labels in zip(
        *(batch[name] for name in ("input_ids", "starts", "canvas_ids", "labels")), strict=True
    ):
        logits = own(input_ids=ids[None, :start], decoder_input_ids=canvas[None]).logits[0]
        expected.append(F.cross_entropy(logits, labels, reduction="sum"))
    trainer.model.eval()  # evaluation has no self-conditioning
    assert_near(trainer.row_losses(trainer.model, batch), torch.stack(expected), least=4 * LOGITS)  # sums of 4 tokens


@pytest.mark.parametrize(("size", "accumulation"), [(4, 2), (1, 8), (2, 4)])
def test_splitting_the_batch_changes_nothing(tiny_canvas_dir, tmp_path, size, accumulation):
    whole, split = (
        trainer_of(tiny_canvas_dir, tmp_path / "a"),
        trainer_of(tiny_canvas_dir, tmp_path / "b", size, accumulation),
    )
    for trainer in (whole, split):
        trainer.train()
    losses = [trainer.state.log_history[0]["loss"] for trainer in (whole, split)]
    assert losses[0] == pytest.approx(losses[1], abs=rounding(LOGITS))
    expected = whole.model.state_dict()
    for name, weight in split.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], atol=2e-4, rtol=1e-3)


def step_of_two(model_dir, folder):
    """What each of two processes runs; the first one saves the weights."""
    trainer = trainer_of(model_dir, folder, batch=2, accumulation=2)
    assert trainer.args.world_size == 2
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def test_two_processes_take_the_step_of_one(tiny_canvas_dir, tmp_path):
    log, environment = tmp_path / "log", {"ACCELERATE_USE_CPU": "true"}
    started = forks.start(step_of_two, tiny_canvas_dir, tmp_path, log=log, folder=tmp_path, processes=2, **environment)
    forks.finish(started, log)
    whole = trainer_of(tiny_canvas_dir, tmp_path / "whole")
    whole.train()
    loss = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"][0]["loss"]
    assert loss == pytest.approx(whole.state.log_history[0]["loss"], abs=rounding(LOGITS))
    found = load_model(str(tmp_path)).state_dict()
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=2e-4, rtol=1e-3)


def test_rows_keep_their_noise_in_any_batch_and_answers_that_were_cut_get_no_end(tiny_canvas_dir, tmp_path):
    trainer = trainer_of(tiny_canvas_dir, tmp_path)
    features, collate = trainer.train_dataset.__getitems__(list(range(8))), trainer.data_collator
    together = collate(features)
    for row, feature in enumerate(features):
        alone = collate([feature])
        for name in ("canvas_ids", "labels", "starts", "t", "conditioned"):
            assert torch.equal(alone[name][0], together[name][row])
    text, answer = (torch.tensor(features[3][name][:-1]) for name in ("input_ids", "answer"))
    assert answer.sum() % CANVAS
    ends = 0
    for seed in range(40):
        canvas = collate.draw_canvas(text, answer, None, (seed,))
        labels, start = canvas["labels"], canvas["starts"]
        ids = text[start : start + CANVAS]
        assert torch.equal(labels[: len(ids)], ids)
        assert (labels[len(ids) :] == IGNORED).all()
        ends += len(ids) < CANVAS
    assert 0 < ends < 40


def test_a_canvas_belongs_to_one_turn(tiny_canvas_dir):
    """Two turns of 1.5 canvases and of half a canvas, with a question before each: three canvases, equally often."""
    collate = CanvasCollator(load_tokenizer(str(tiny_canvas_dir)), CANVAS, 64)
    long, short = CANVAS + CANVAS // 2, CANVAS // 2
    text = torch.tensor([*range(8, 8 + 3 + long + 2 + short - 1), EOS])
    answer = torch.tensor([False] * 3 + [True] * long + [False] * 2 + [True] * short)
    wanted = {3: (3, 3 + CANVAS), 3 + CANVAS: (3 + CANVAS, 3 + long), 5 + long: (5 + long, len(text))}
    counts = dict.fromkeys(wanted, 0)
    for seed in range(300):
        canvas = collate.draw_canvas(text, answer, None, (seed,))
        labels, start = canvas["labels"], canvas["starts"]
        first, last = wanted[int(start)]
        assert labels.tolist() == text[first:last].tolist() + [EOS] * (CANVAS - (last - first))
        counts[int(start)] += 1
    assert min(counts.values()) > 60  # 100 +- 8.2 each


def test_the_noise_has_trls_distribution(tiny_canvas_dir, tmp_path):
    collate = trainer_of(tiny_canvas_dir, tmp_path).data_collator
    text, answer = torch.arange(8, 8 + 26), torch.arange(26) >= 2
    text[-1] = EOS
    drawn = [collate.draw_canvas(text, answer, None, (3, seed)) for seed in range(6000)]
    columns = ("canvas_ids", "labels", "starts", "t", "conditioned")
    canvases, labels, starts, times, conditioned = (torch.stack([row[name] for row in drawn]) for name in columns)
    assert starts.unique().tolist() == [2, 6, 10, 14, 18, 22]  # 24 tokens, 6 canvases, each as often
    assert (starts.bincount()[2::4] / 6000 - 1 / 6).abs().max() < 0.02
    replaced = (canvases != labels).double().mean(1)
    ids = collate.vocab
    for low in (0.0, 0.25, 0.5, 0.75):
        own = (times >= low) & (times < low + 0.25)
        expected = (0.001 + 0.999 * times[own].double().mean()) * (1 - 1 / ids)
        assert replaced[own].mean().item() == pytest.approx(expected.item(), abs=0.02)
    assert conditioned.double().mean().item() == pytest.approx(0.5, abs=0.03)
    noise = canvases[canvases != labels]
    assert (noise.bincount(minlength=ids) > 0).all()
    fixed = collate.draw_canvas(text, answer, 1.0, (3, 0))
    assert fixed["t"] == 1
    assert not fixed["conditioned"]


def test_a_run_lowers_the_loss_and_saves_one_adapter(tiny_canvas_dir, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+{i}", "completion": str(2 * i) * (1 + i % 5)} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        "--model_name",
        str(tiny_canvas_dir),
        "--train_data",
        str(path),
        "--test_split",
        "0.2",
        "--batch_size",
        "4",
    ]
    flags += ["--lora_r", "2", "--lora_target_modules", "all-linear", "--learning_rate", "1e-2", "--eval_steps", "1"]
    flags += ["--job_name", "job", "--debugging", "--lr_scheduler_type", "constant", "--keep_last"]

    flags += ["--max_steps", "4", "--output_dir", str(tmp_path)]
    trainer = main(make_parser().parse_args(flags))
    whole = load_file(tmp_path / "job" / "adapter_model.safetensors")
    assert all(".decoder.layers." in name for name in whole)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    adapted, plain = load_model(str(tmp_path / "job")), load_model(str(tiny_canvas_dir))
    ids, canvas = torch.arange(8, 20)[None], torch.arange(20, 24)[None]
    assert (canvas_states(adapted, ids, canvas, None) - canvas_states(plain, ids, canvas, None)).abs().max() > 1e-4


def test_the_trainer_of_masks_refuses_the_model_when_it_is_made(tiny_canvas_dir):
    model, tokenizer = load_model(str(tiny_canvas_dir)), load_tokenizer(str(tiny_canvas_dir))
    with pytest.raises(ValueError, match=r"^dLLMDataCollator hides tokens by a mask token, and diffusion_gemma has"):
        dLLMTrainer(model=model, processing_class=tokenizer)


def test_rows_to_blame_are_ids_without_a_tokenizer(tiny_canvas_dir, tmp_path):
    trainer = trainer_of(tiny_canvas_dir, tmp_path)
    batch = batch_of(trainer)
    losses = torch.tensor([0.0, torch.nan, *[0.0] * 6])
    (with_text,) = trainer.nonfinite_rows(losses, batch)
    trainer.processing_class = None
    (with_ids,) = trainer.nonfinite_rows(losses, batch)
    assert with_ids["text"] == trainer.train_dataset[1]["input_ids"]
    assert (with_text["t"], with_text["text"]) == (
        with_ids["t"],
        load_tokenizer(str(tiny_canvas_dir)).decode(with_ids["text"]),
    )


@pytest.mark.parametrize(
    "change", [{"packing": True}, {"complementary_masks": True}, {"edit_noise": "uniform"}, {"eos_padding": 8}]
)
def test_settings_of_masks_are_refused(tiny_canvas_dir, tiny_model_dir, change):
    args = SFTConfig(model_name=str(tiny_canvas_dir), train_data="x", **change)
    with pytest.raises(ValueError, match=f"--{next(iter(change))} .* would do nothing: diffusion_gemma has uniform"):
        check_noise(args, native_config(str(tiny_canvas_dir))[0])
    for name in ("self_conditioning", "causal_weight"):
        args = SFTConfig(model_name="x", train_data="x", **{name: 0.25})
        with pytest.raises(ValueError, match=f"--{name} 0.25 would do nothing: llama hides tokens"):
            check_noise(args, native_config(str(tiny_model_dir))[0])


def test_the_vision_tower_is_frozen_and_4_bits_are_refused(tiny_canvas_dir):
    model = load_model(str(tiny_canvas_dir))
    assert not any(weight.requires_grad for weight in model.model.encoder.vision_tower.parameters())
    with pytest.raises(ValueError, match="4-bit"):
        load_model(str(tiny_canvas_dir), quantization="nf4")
    assert tiny().model.encoder.vision_tower is not None
