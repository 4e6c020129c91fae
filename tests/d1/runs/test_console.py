"""What a run prints and writes, with a small Trainer and without one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from d1.runs.cli import MESSAGES, WARNINGS, silence
from d1.runs.console import json_line, show_row, train_with_console, write_metrics


class Line(torch.nn.Module):
    """y = a x, with the loss in the form that a Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.a * x - labels) ** 2).mean()}


class Letters:
    """Decodes 0 to <bos> and the others to letters."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join("<bos>" if token == 0 else chr(96 + token) for token in ids)


def test_a_row_is_shown_with_what_is_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    show_row([0, 1, 2, 3, 0, 4], [False, False, True, True, False, True], Letters())
    assert caplog.messages == [
        "The first row, 6 tokens, of which the 3 between [[ and ]] are trained on:\n<bos>a[[bc]]<bos>[[d]]"
    ]
    show_row([ord("\x1b") - 96], [False], Letters())
    assert caplog.messages[-1].endswith(":\n⟨1B⟩")  # a terminal would obey what follows an escape
    show_row([1] * 10 + [2] * 10 + [3] * 10, [False] * 30, Letters(), max_characters=12)
    assert caplog.messages[-1].endswith(":\naaaaaa [...] cccccc")


def train(folder: Path, steps: int, resume: Path | None = None, plain: bool = False) -> Trainer:
    often: dict[str, Any] = {"logging_steps": 1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    where: dict[str, Any] = {"output_dir": str(folder), "report_to": "none", "use_cpu": True}
    args = TrainingArguments(**where, **often, max_steps=steps, learning_rate=0.1)
    rows = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([2.0 * i])} for i in range(8)]
    trainer = Trainer(model=Line(), args=args, train_dataset=rows, eval_dataset=rows[:2])  # type: ignore[arg-type]
    if plain:  # Transformers' own console
        trainer.train()
    else:
        train_with_console(trainer, resume)
    trainer.save_state()
    return trainer


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_a_log_and_one_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    enable_progress_bar()
    train(tmp_path, 4)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "accelerator" not in line]  # DeepSpeed's import prints, once
    training = [line for line in lines if "evaluation" not in line and "mean loss" not in line]
    assert [line.split("  ")[0] for line in training] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert all(re.search(r"  loss .*  \d+\.\d s$", line) for line in training)
    assert sum("evaluation: loss" in line for line in lines) == 2
    assert "mean loss" in lines[-1]
    assert "{" not in out
    assert "100%|" in err  # which pocket/phases.py reads
    assert "Writing model shards" not in err
    assert is_progress_bar_enabled()


def values(run: Trainer) -> list[dict[str, Any]]:
    timing = ("train_runtime", "per_second", "eval_runtime")
    return [{k: v for k, v in log.items() if not any(t in k for t in timing)} for log in run.state.log_history]


def test_the_metrics_file_has_what_the_trainer_logs_and_after_a_resume_no_step_twice(tmp_path: Path) -> None:
    first = train(tmp_path, 5)
    assert values(first) == values(train(tmp_path / "plain", 5, plain=True))
    assert [log["step"] for log in metrics(tmp_path) if "loss" in log] == [1, 2, 3, 4, 5]
    bar = io.StringIO()
    with contextlib.redirect_stderr(bar):
        trainer = train(tmp_path, 6, resume=tmp_path / "checkpoint-2")
    assert "2/6" in bar.getvalue().split("3/6")[0]  # the bar starts where the run does
    assert [log["step"] for log in metrics(tmp_path) if "loss" in log] == [1, 2, 3, 4, 5, 6]
    assert metrics(tmp_path) == trainer.state.log_history


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    log = {"loss": math.nan, "ratio": math.inf, "kl": 0.1 + 0.2, "step": 3}
    assert json.loads(json_line(log)) == {"loss": None, "ratio": None, "kl": 0.1 + 0.2, "step": 3}
    write_metrics(tmp_path / "run", [log, log])
    assert len(metrics(tmp_path / "run")) == 2


def test_only_what_is_named_is_quiet() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence()
        for text in (*WARNINGS, "something a user should know"):
            warnings.warn(text, FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something a user should know"]
    for name, text in MESSAGES.items():
        records = [logging.LogRecord(name, logging.WARNING, "", 0, said, (), None) for said in (text, f"keep {text}")]
        assert [bool(logging.getLogger(name).filter(record)) for record in records] == [False, True]
