"""SFT that diverges stops at once, says where, and saves only finite weights."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from d1.sft.train import main, make_parser
from d1.sft.trainer import dLLMTrainer
from tests import forks

SFT = Path(__file__).parents[3] / "SFT"


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_model_dir):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}", "completion": f"={2 * i}!"}) + "\n" for i in range(40)))
    flags = {"--model_name": tiny_model_dir, "--train_data": path, "--batch_size": 4, "--grad_accum_steps": 1}
    more = ["--test_split", "0", "--full_finetuning", "--debugging", "--job_name", "job"]
    return [str(word) for flag in flags.items() for word in flag] + more


def run(flags, folder, **changes):
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    return main(make_parser().parse_args([*flags, "--output_dir", str(folder), *words]))


@pytest.mark.parametrize("blocks", [False, True])
def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_its_rows(flags, tiny_block_dir, tmp_path, blocks):
    flags = [*flags, "--model_name", str(tiny_block_dir)] if blocks else flags
    with pytest.raises(FloatingPointError, match=r"the loss became (nan|inf) at step \d+; its rows are in .*bad_loss"):
        run(flags, tmp_path, learning_rate=1e30, max_steps=40, eval_steps=1000)
    (file,) = (tmp_path / "job").glob("bad_loss_step*_rank0.json")
    rows = json.loads(file.read_text())
    assert 1 <= len(rows) <= 4
    for row in rows:
        prompt, answer = row["text"].split("<assistant>")
        assert ("<user>" in prompt, answer.strip()[0]) == (True, "=")
        assert all(0 <= t <= 1 for t in (row["t"] if blocks else [row["t"]]))
        assert not math.isfinite(row["loss"])
    assert not list((tmp_path / "job").rglob("*.safetensors"))


def test_only_the_rows_to_blame_are_named(flags, tmp_path, monkeypatch):
    true_losses, seen = dLLMTrainer.row_losses, []

    def third_is_infinite(self, model, inputs):
        losses = true_losses(self, model, inputs)
        if self.state.global_step < 2:
            return losses
        seen.append(inputs["t"][2].item())
        return losses * torch.tensor([1.0, 1.0, torch.inf, 1.0])

    monkeypatch.setattr(dLLMTrainer, "row_losses", third_is_infinite)
    with pytest.raises(FloatingPointError, match=r"became inf at step 2"):
        run(flags, tmp_path, max_steps=40)
    (row,) = json.loads((tmp_path / "job/bad_loss_step2_rank0.json").read_text())
    assert row["t"] == seen[0]


def call_at_step(patch, step, act):
    """Makes trainers call `act(model)` after a step."""
    start = dLLMTrainer.__init__

    def on_step_end(self, args, state, control, model=None, **given):
        if state.global_step == step:
            act(model)

    def start_with_callback(self, **options):
        start(self, **options)
        self.add_callback(type("AtStep", (TrainerCallback,), {"on_step_end": on_step_end}))

    patch.setattr(dLLMTrainer, "__init__", start_with_callback)


def test_an_evaluation_that_is_not_finite_stops_the_run_too(flags, tmp_path, monkeypatch):
    call_at_step(monkeypatch, 2, lambda model: model.lm_head.weight.data.fill_(torch.nan))
    with pytest.raises(FloatingPointError, match=r"the loss became nan at step 2"):
        run([*flags, "--test_split", "0.2"], tmp_path, max_steps=40, eval_steps=2)
    assert not list((tmp_path / "job").rglob("*.safetensors"))


def test_two_processes_stop_as_well(flags, tmp_path):
    words = ["sft_train.py", *flags, "--learning_rate", "1e30", "--max_steps", "40", "--output_dir", str(tmp_path)]
    log, options = tmp_path / "log", {"processes": 2, "ACCELERATE_USE_CPU": "true"}
    said = forks.finish(forks.start(forks.script, *words, log=log, folder=SFT, **options), log, status=1)
    assert "the loss became" in said
    assert list((tmp_path / "job").glob("bad_loss_step*_rank*.json"))
    assert not list((tmp_path / "job").rglob("*.safetensors"))
