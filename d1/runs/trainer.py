"""What the trainers of all stages share: complete checkpoints, and a stop when numbers are no longer finite."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from d1.models.adapters import save_learnt
from d1.runs.checkpoints import check_sums, reading, staged_checkpoint
from d1.runs.data import GlobalBatchSampler
from d1.transformers_bridge import TrainerHooks


class RunTrainer(TrainerHooks):
    """Comes before Trainer, or a trainer made from it, among the bases of a class.

    - A checkpoint is either complete or absent. It holds what `save_extra` adds, and `load_extra` restores that.
    - `train_loss` is the mean over all steps of the run, also after a resume.
    - `save_model` refuses weights that are not finite (FloatingPointError); so does a log with such a gradient.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(LoadExtra(self))

    def require_one_gpu(self) -> None:
        """Refuse (ValueError) a process that would split its batches over several GPUs."""
        if self.args.n_gpu > 1:
            raise ValueError("one process trains on one GPU: use `accelerate launch`, or set CUDA_VISIBLE_DEVICES")

    def global_batches(self, lengths: Sequence[int], fill: bool = False) -> GlobalBatchSampler:
        """The order of rows with these `lengths`, for the batch size of this run."""
        args = self.args
        multiple = args.per_device_train_batch_size * args.world_size
        size, epoch = multiple * args.gradient_accumulation_steps, lambda: int(self.state.epoch or 0)
        return GlobalBatchSampler(lengths, size, multiple, args.seed, epoch, fill)

    def save_extra(self, folder: Path) -> None:
        """Add files to the checkpoint `folder`, on every process."""
        raise NotImplementedError

    def load_extra(self, folder: Path) -> None:
        """Restore what `save_extra` added, after the Trainer has set its own counters."""
        raise NotImplementedError

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        with staged_checkpoint(self) as folder:
            yield
            self.save_extra(folder)

    def check_best(self, checkpoint: Path) -> None:
        if not checkpoint.is_dir():
            raise ValueError(
                f"{checkpoint}, the best checkpoint of this run, is missing: put it back, or continue with --resume "
                "and without load_best_model_at_end (SFT: --keep_last)"
            )
        check_sums(checkpoint, self.args.process_index, self.args.world_size)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        check_weights(self.model, self.state.global_step)
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_learnt(self.model, str(output_dir or self.args.output_dir))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_loss" in logs:
            logs["train_loss"] = self.mean_loss()
        if not math.isfinite(float(logs.get("grad_norm") or 0)):  # then clipping may have spoilt every weight
            check_weights(self.model, self.state.global_step)
        super().log(logs, start_time)

    def require_finite(self, loss: Tensor, rows: Callable[[], list[dict[str, Any]]]) -> None:
        """End the run (FloatingPointError) if the loss is not finite; `rows()`, which caused it, go to a file."""
        if torch.isfinite(loss):
            return
        step = self.state.global_step
        path = Path(str(self.args.output_dir)) / f"bad_loss_step{step}_rank{self.args.process_index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows(), indent=1))
        raise FloatingPointError(
            f"the loss became {loss.item()} at step {step}; its rows are in {path}. Lower the learning rate, or look "
            "for what is unusual about these rows."
        )


class SummingTrainer(RunTrainer):
    """Sums what is logged next over rows and processes, and counts compute; a checkpoint holds both.

    Attributes:
        sums_file: its name in a checkpoint.
        sums: name -> (), float64, the sum in this process since the last log.
        compute: (), tokens that this process has computed so far.
    """

    sums_file: str
    sums: dict[str, Tensor]
    compute: Tensor

    def total_sums(self) -> dict[str, float]:
        """`sums` and the compute so far, of all processes. Every process has to call this."""
        everything = {**self.sums, "compute": self.compute.double().cpu()}
        table = torch.stack(list(everything.values())).to(self.args.device)
        return dict(zip(everything, self.accelerator.reduce(table, "sum").tolist(), strict=True))

    def save_extra(self, folder: Path) -> None:
        state = {"sums": self.total_sums(), "losses": self.loss_sums()}
        if self.args.should_save:
            (folder / self.sums_file).write_text(json.dumps(state))

    def load_extra(self, folder: Path) -> None:
        state = read_sums(folder / self.sums_file)
        self.set_loss_sums(state["losses"])
        share = float(self.args.process_index == 0)  # the first process has what all had counted
        self.sums = {name: torch.tensor(value * share, dtype=torch.float64) for name, value in state["sums"].items()}
        self.compute = self.sums.pop("compute").to(self.compute)


def read_sums(file: Path) -> dict[str, Any]:
    """The sums in a checkpoint's file: {"losses": `loss_sums()`, "sums": of `SummingTrainer`}; SFT's file has only the
    losses, without a name. Raises ValueError if the file is missing or damaged."""
    with reading(file):
        state = json.loads(file.read_text())
        state = state if "losses" in state else {"losses": state, "sums": {"compute": 0.0}}
        losses, sums = state["losses"], state["sums"]
        numbers = [losses["total"], losses["last_logged"], *losses["since_then"], sums["compute"], *sums.values()]
        if not losses["since_then"] or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("not the sums of a run")
        return state


class LoadExtra(TrainerCallback):
    """Calls `load_extra` when a resumed run begins to train."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if folder := self.trainer.resumed_from:
            self.trainer.load_extra(folder)


def own_part(weight: Any) -> Any:
    """The part of a weight that this process holds, if weights are split over processes; else the weight itself."""
    part = getattr(weight, "ds_tensor", weight)  # DeepSpeed's ZeRO-3
    return part.to_local() if hasattr(part, "to_local") else part  # FSDP2


def check_weights(model: Any, step: int) -> None:
    """Refuse (FloatingPointError) trained weights that are not finite, before they are saved.

    If weights are split over processes, each process checks its own part.
    """
    for name, weight in model.named_parameters():
        if weight.requires_grad and not torch.isfinite(own_part(weight)).all():
            raise FloatingPointError(
                f"the weights are no longer finite after step {step} (the first is {name}), so they are not saved. "
                "Lower the learning rate and start again from the last checkpoint."
            )
