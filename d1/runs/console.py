"""What a training run shows and logs: one progress bar, one short line per log above it, and every metric in a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from d1.files import harmless, write_atomically

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

# The metrics of a log that a line shows, in this order: metric, its name in the line, its format.
CONSOLE_METRICS = (
    ("loss", "loss", ".4g"),
    ("train_loss", "mean loss", ".4g"),
    ("reward", "reward", ".3f"),
    ("rewards/accuracy/mean", "accuracy", ".1%"),
    ("kl", "KL", ".3g"),
    ("num_tokens", "tokens", ",.0f"),
    ("answer_tokens_per_second", "answer tokens/s", ".0f"),
)


def log_to_console() -> None:
    """Send the messages of `logging` to stderr; if that is not a terminal, hide the bars of loading and saving."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not sys.stderr.isatty():
        disable_progress_bars()
        disable_progress_bar()


def log_without_account(folder: str | Path) -> None:
    """Make Weights & Biases log to local files if no account is set up or its server cannot be reached."""
    import wandb

    os.environ.setdefault("WANDB_DIR", str(folder))
    online = "WANDB_MODE" in os.environ
    if not online:
        with contextlib.suppress(wandb.Error):
            # Without `prompt`, as in 0.22, `login` asks on the terminal if no key is set. Delete this once 0.31 is the
            # oldest.
            if "prompt" in signature(wandb.login).parameters:
                online = wandb.login(prompt=False)
            elif wandb.api.api_key:
                online = wandb.login()
    if not online:
        os.environ["WANDB_MODE"] = "offline"
        wandb.teardown()  # it has read the variable already


def summarize_log(logs: Mapping[str, Any]) -> str:
    """The `CONSOLE_METRICS` of a log of training, or of an evaluation ("eval_..."), as in "loss 0.31  KL 0.002".

    If a reward did not apply to some rows, the line names the reward and the share of these rows.
    """
    prefix = ""
    if any(name.startswith("eval_") for name in logs):
        prefix = "eval_"
    values = {name.removeprefix(prefix): value for name, value in logs.items()}
    parts = []
    for name, label, number_format in CONSOLE_METRICS:
        if values.get(name) is not None:
            parts.append(f"{label} {values[name]:{number_format}}")
    missing_rewards = {}
    for name, share in values.items():
        if name.endswith("/none_share"):
            missing_rewards[name.split("/")[-2]] = share
    for name, share in missing_rewards.items():
        if share:
            parts.append(f"{name} None {share:.0%}")
    line = "  ".join(parts)
    return f"evaluation: {line}" if prefix else line


def write_metrics(folder: str | Path, log_history: Iterable[Mapping[str, Any]]) -> None:
    """Replace `folder/metrics.jsonl` by these logs, as a whole."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / METRICS_FILE, "".join(map(json_line, log_history)))


def json_line(log: Mapping[str, Any]) -> str:
    """One log as a line of JSON; numbers that are not finite become null, because JSON cannot express them."""
    finite = {}
    for name, value in log.items():
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        finite[name] = value
    return json.dumps(finite) + "\n"


def show_row(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any, max_characters: int = 2000) -> None:
    """Log the text of a tokenised row, special tokens included, with [[ and ]] around what is trained on. The
    middle of a part with more than `max_characters` characters is left out."""
    parts: list[str] = []
    for is_trained, group in itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        if len(text) > max_characters:
            half = max_characters // 2
            text = f"{text[:half]} [...] {text[-half:]}"
        if is_trained:
            text = f"[[{text}]]"
        parts.append(harmless(text))
    counts = f"{len(ids)} tokens, of which the {sum(trained)} between [[ and ]] are trained on"
    logger.info("The first row, %s:\n%s", counts, "".join(parts))


class RunConsole(TrainerCallback):
    """Replaces Transformers' callbacks that print logs; only the first process shows and writes.

    `metrics.jsonl` in the run's folder has one JSON object per log, the same as `log_history` in trainer_state.json. A
    resumed run starts the file with the logs of its checkpoint, so that no step occurs twice. `last_step` gives the
    step at which the run will end.
    """

    def __init__(self, last_step: Callable[[TrainerState], int]) -> None:
        self.last_step = last_step
        self.bar: tqdm | None = None
        self.last_log = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.last_log = time.perf_counter()
        if state.is_world_process_zero:
            write_metrics(args.output_dir, state.log_history)
            self.path = Path(args.output_dir) / METRICS_FILE
            self.bar = tqdm(
                total=self.last_step(state),
                initial=state.global_step,
                dynamic_ncols=True,
                disable=args.disable_tqdm,
                mininterval=0.1 if sys.stderr.isatty() else 5.0,  # seconds; a file keeps every state of the bar
            )

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.total = self.last_step(state)
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.bar is None:
            return
        with self.path.open("a") as file:
            file.write(json_line(state.log_history[-1]))
        now = time.perf_counter()
        parts = [f"step {state.global_step}/{self.last_step(state)}"]
        metrics = summarize_log(logs or {})
        if metrics:
            parts.append(metrics)
        parts.append(f"{now - self.last_log:.1f} s")
        self.last_log = now
        tqdm.write("  ".join(parts))
        sys.stdout.flush()


def train_with_console(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train, from `checkpoint` on if there is one, with a `RunConsole` instead of Transformers' own output.

    A callback that ends the run before `max_steps` has a `last_step`. If training raises, the bar is closed first, so
    that the message comes after it.
    """
    for callback_class in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback_class)

    def last_step(state: TrainerState) -> int:
        return state.max_steps

    for callback in trainer.callback_handler.callbacks:
        last_step = getattr(callback, "last_step", last_step)
    console = RunConsole(last_step)
    trainer.add_callback(console)

    had_progress_bars = is_progress_bar_enabled()
    disable_progress_bar()  # bars that libraries draw while saving would break the run's own
    try:
        with logging_redirect_tqdm():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        if console.bar is not None:
            console.bar.close()
        if had_progress_bars:
            enable_progress_bar()
