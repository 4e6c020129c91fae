"""What trainers share: complete checkpoints, a stop when numbers are no longer finite, and logged means over rows."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.utils import disable_dropout_in_model

from d1.models import load_model, load_tokenizer
from d1.models.adapters import save_learnt, skip_input_casts
from d1.models.attention import require_prepared
from d1.runs.checkpoints import check_checkpoint, check_sums, require_best, staged_checkpoint
from d1.runs.cli import raise_together
from d1.runs.data import GlobalBatchSampler
from d1.transformers_bridge import TrainerHooks

CONFIGS = {"GRPOConfig": "d1.rl.DiffuGRPOConfig"}  # of TRL -> what a trainer here takes instead
UNREAD_ARGUMENTS = {  # settings of `TrainingArguments` that no trainer here reads, and why
    "label_smoothing_factor": "the losses here have no label smoothing",
    "data_seed": "seed also orders the rows",
    "train_sampling_strategy": "rows come in random order, in global batches",
    "length_column_name": "rows are not sorted by length",
    "batch_eval_metrics": "an evaluation is one mean over all rows",
    "eval_do_concat_batches": "an evaluation is one mean over all rows",
}
OWN_PARTS = {  # arguments of Trainer that are parts of the trainers here
    "model_init": "give model",
    "compute_loss_func": "the loss is the trainer's own: overwrite compute_loss in a subclass",
    "compute_metrics": "an evaluation is the mean of the loss: judge answers with `d1 eval`",
    "preprocess_logits_for_metrics": "an evaluation returns no logits",
}

logger = logging.getLogger(__name__)


def check_arguments(args: Any) -> None:
    """Refuse (ValueError) `args` of a trainer whose settings would not be read: a config of TRL or of this library's
    commands, and `UNREAD_ARGUMENTS` of Transformers' own."""
    if args is None:
        return
    library = type(args).__module__.partition(".")[0]
    if library not in ("trl", "d1"):
        check_unread_arguments(args)
        return
    if isinstance(args, TrainingArguments) and library == "d1":
        return
    config = type(args).__name__
    use = CONFIGS.get(config, "transformers.TrainingArguments")
    raise ValueError(f"args is {library}'s {config}, whose own settings this trainer does not read: use {use}(...)")


def check_unread_arguments(args: Any) -> None:
    """Refuse (ValueError) Transformers' arguments with one of `UNREAD_ARGUMENTS`."""
    for name, reason in UNREAD_ARGUMENTS.items():
        default = getattr(TrainingArguments, name)
        value = getattr(args, name, default)
        if value != default:
            raise ValueError(f"{name}={value!r} would do nothing: {reason}; leave it out of the TrainingArguments")


def check_own_parts(arguments: Mapping[str, Any]) -> None:
    """Refuse (ValueError) Trainer's arguments with one of `OWN_PARTS`."""
    for name, reason in OWN_PARTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is not an argument of this trainer: {reason}")


def loaded_model(model: Any) -> Any:
    """The model of a trainer's argument `model`, which may be a path or a hub name."""
    return load_model(model) if isinstance(model, str | Path) else model


def tokenizer_of(processing_class: Any, model: Any, **options: Any) -> Any:
    """A trainer's `processing_class`, or the tokenizer of `model`, a path or a loaded model. ValueError without one."""
    if processing_class is not None:
        if not isinstance(processing_class, PreTrainedTokenizerBase):
            kind = type(processing_class).__name__
            raise ValueError(f"processing_class is {kind}, not a tokenizer: use d1.models.load_tokenizer(path)")
        return processing_class
    path = model if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
    if not path:
        raise ValueError("processing_class is missing, and the model has no path: use d1.models.load_tokenizer(path)")
    return load_tokenizer(path, **options)


def disable_dropout(model: Any) -> None:
    """Turn off the dropout of a model; changes it in place. TRL's function leaves that of attention weights, whose
    probability is an attribute of Transformers' attention layers."""
    disable_dropout_in_model(model)
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):  # it may also be a module, which is off now
            module.attention_dropout = 0.0


class RunTrainer(TrainerHooks):
    """Comes before Trainer, or a trainer made from it, among the bases of a class.

    - A checkpoint is either complete or absent. It holds what `save_extra` adds, and `load_extra` restores that.
    - `train` refuses a checkpoint with a missing or damaged file.
    - `train_loss` is the mean over all steps of the run, also after a resume.
    - `save_model` refuses weights that are not finite (FloatingPointError); so does a log with such a gradient.
    - In mixed precision, the inputs of LoRA layers are not cast (`skip_input_casts`).
    - Steps of the optimizer are not rounded away without a word (`set_trained_precision`).
    """

    def __init__(self, *, args: Any = None, **kwargs: Any) -> None:
        check_arguments(args)
        if args is None:
            args = TrainingArguments()
        args.remove_unused_columns = False  # Trainer would drop the columns that the model does not take
        super().__init__(args=args, **kwargs)
        skip_input_casts(self.model)
        self.set_trained_precision()
        self.add_callback(LoadExtra(self))
        self.checkpoint_limit: int | None = args.save_total_limit
        self.checked_checkpoint: Path | None = None  # whose files were compared with its checksums already
        self.resumed_step: int | None = None  # until the first checkpoint after a resume, the step it continues from

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. ValueError if a file of the checkpoint is missing or damaged."""
        # Of an earlier call, which may have continued a checkpoint.
        self.resumed_from = None
        self.resumed_sums = False
        self.check_resumed(resume_from_checkpoint)
        self.checkpoint_limit = self.args.save_total_limit
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.save_total_limit = self.checkpoint_limit

    def check_resumed(self, resume: Any) -> None:
        """Refuse (ValueError) the checkpoint that `train` is to continue, if a file is missing or damaged; True is the
        last one. Trainer itself refuses what is no folder."""
        if resume is True:
            resume = get_last_checkpoint(str(self.args.output_dir))
        if not resume or not Path(resume).is_dir() or Path(resume) == self.checked_checkpoint:
            return
        with raise_together():
            check_sums(Path(resume), self.args.process_index, self.args.world_size)
        check_checkpoint(Path(resume), self.args)

    def set_trained_precision(self) -> None:
        """Cast trained weights of 16 bits to fp32 if they belong to an adapter and passes are in mixed precision, and
        warn of others: in 16 bits, most steps of a small learning rate are rounded away.

        Such weights of an adapter are those on 4-bit weights, which TRL casts, and the `modules_to_save` of PEFT.
        DeepSpeed's optimizer has copies in fp32, and FSDP2 casts in mixed precision.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return
        parameters = cast(Any, self.model).parameters()
        trained = [weight for weight in parameters if weight.requires_grad and weight.dtype.itemsize == 2]
        if not trained:
            return
        if isinstance(self.model, PeftModel) and (self.args.bf16 or self.args.fp16):
            for weight in trained:
                weight.data = weight.data.float()
            return
        if not self.is_world_process_zero():
            return
        logger.warning(
            "Weights are trained in %s, where most steps of a learning rate of %g are rounded away: load the model in "
            "float32 (of `d1 rl`: --dtype float32), or train an adapter, both with bf16=True for passes in 16 bits.",
            *(str(trained[0].dtype).removeprefix("torch."), self.args.learning_rate),
        )

    def require_one_gpu(self) -> None:
        """Refuse (ValueError) a process that would split its batches over several GPUs."""
        if self.args.n_gpu > 1:
            raise ValueError("one process trains on one GPU: use `accelerate launch`, or set CUDA_VISIBLE_DEVICES")

    def global_batches(self, lengths: Sequence[int], fill: bool = False) -> GlobalBatchSampler:
        """The order of rows with these `lengths`, for the batch size of this run."""
        args = self.args
        multiple = args.per_device_train_batch_size * args.world_size

        def epoch() -> int:
            return int(self.state.epoch or 0)

        return GlobalBatchSampler(
            lengths,
            batch_size=multiple * args.gradient_accumulation_steps,
            multiple=multiple,
            seed=args.seed,
            epoch=epoch,
            fill=fill,
        )

    def save_extra(self, folder: Path) -> None:
        """Add files to the checkpoint `folder`, on every process."""
        raise NotImplementedError

    def load_extra(self, folder: Path) -> None:
        """Restore what `save_extra` added, after the Trainer has set its own counters."""
        raise NotImplementedError

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        with staged_checkpoint(self, self.checkpoint_limit, self.resumed_step) as folder:
            yield
            self.save_extra(folder)
        self.resumed_step = None

    def check_best(self, checkpoint: Path) -> None:
        require_best(checkpoint)
        check_sums(checkpoint, self.args.process_index, self.args.world_size)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        check_weights(self.model, self.state.global_step)
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_learnt(self.model, str(output_dir or self.args.output_dir))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_loss" in logs:
            logs["train_loss"] = self.mean_loss()
        if not math.isfinite(float(logs.get("grad_norm") or 0)):  # clipping by it may have spoilt every weight
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
        todo = "Lower the learning rate, or look for what is unusual about these rows."
        raise FloatingPointError(f"the loss became {loss.item()} at step {step}; its rows are in {path}. {todo}")


class SummingTrainer(RunTrainer):
    """The trainer of preference training and distillation: its model has no dropout, and it logs means over rows.

    Values are summed over rows and processes until the next log, and computed tokens are counted; a checkpoint holds
    both.
    `computed_tokens` starts at the tokens that all processes processed before the training.
    """

    sums_file: str  # its name in a checkpoint
    loss_is_scaled_for_ga = True  # compute_loss divides by the rows of the whole step

    def __init__(self, computed_tokens: int = 0, **kwargs: Any) -> None:
        check_own_parts(kwargs)
        super().__init__(**kwargs)
        if self.eval_dataset is not None:
            raise ValueError(f"{type(self).__name__} has no evaluation loss: leave eval_dataset out")
        require_prepared(self.model)
        self.require_one_gpu()
        disable_dropout(self.model)
        self.count_labels_of_step()
        self.sums: dict[str, Tensor] = {}  # name -> (), float64, the sum in this process since the last log
        share = float(self.args.process_index == 0)
        # (), float64, tokens that this process has computed so far
        self.computed_tokens = torch.tensor(computed_tokens * share, dtype=torch.float64, device=self.args.device)

    def train_sampler(self, dataset: Any) -> GlobalBatchSampler:
        return self.global_batches([0] * len(dataset))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{type(self).__name__} has no evaluation loss, and nothing to predict: use `d1 eval`")

    def add(self, name: str, values: Tensor) -> None:
        """Add values (any shape) to the sum of this name."""
        self.sums[name] = self.sums.get(name, torch.zeros((), dtype=torch.float64)) + values.double().sum().cpu()

    def total_sums(self) -> dict[str, float]:
        """`sums` and `computed_tokens`, summed over all processes. Every process has to call this."""
        local_sums = {**self.sums, "compute": self.computed_tokens.cpu()}
        totals = torch.stack(list(local_sums.values())).to(self.args.device)
        totals = self.accelerator.reduce(totals, "sum")
        return dict(zip(local_sums, totals.tolist(), strict=True))

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics to log, from the sums over all processes."""
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.sums:  # a log of training, which every process reaches
            sums = self.total_sums()
            logs["compute_tokens"] = sums.pop("compute")
            logs.update(self.means(sums))
            self.sums = {}
        super().log(logs, start_time)

    def save_extra(self, folder: Path) -> None:
        stored = {"sums": self.total_sums(), "losses": self.loss_sums()}
        if self.args.should_save:
            (folder / self.sums_file).write_text(json.dumps(stored))

    def load_extra(self, folder: Path) -> None:
        stored = json.loads((folder / self.sums_file).read_text())
        self.set_loss_sums(stored["losses"])
        share = float(self.args.process_index == 0)  # the first process continues with the sums of all
        self.sums = {}
        for name, value in stored["sums"].items():
            self.sums[name] = torch.tensor(value * share, dtype=torch.float64)
        self.computed_tokens = self.sums.pop("compute").to(self.computed_tokens)


class LoadExtra(TrainerCallback):
    """Calls `load_extra` when a resumed run begins to train.

    It also sets how often the run logs, evaluates and saves, because Trainer (5.23) goes by its state, which is that of
    the checkpoint; and it refuses (ValueError) a run whose best checkpoint is missing, which Trainer would forget.

    In every run, it takes the limit of checkpoints from Trainer, after other callbacks have logged the arguments:
    with a limit of 1, Trainer would delete the last checkpoint before the model is saved, if another one is the best.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = self.trainer.resumed_from
        self.trainer.resumed_step = None
        args.save_total_limit = None
        if folder:
            self.trainer.resumed_step = state.global_step  # known even if the checkpoint is deleted meanwhile
            state.compute_steps(args, state.max_steps)
            if args.load_best_model_at_end and state.best_global_step and state.best_model_checkpoint is None:
                require_best(Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}")
            self.trainer.load_extra(folder)


def local_part(weight: Any) -> Any:
    """The part of a weight that this process holds, if weights are split over processes; else the weight itself."""
    if hasattr(weight, "ds_tensor"):  # DeepSpeed's ZeRO-3
        return weight.ds_tensor
    if hasattr(weight, "to_local"):  # FSDP2
        return weight.to_local()
    return weight


def check_weights(model: Any, step: int) -> None:
    """Refuse (FloatingPointError) trained weights that are not finite, before they are saved; each process checks the
    part that it holds."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not torch.isfinite(local_part(weight)).all():
            problem = f"the weights are no longer finite after step {step} (the first is {name}), so they are not saved"
            todo = "Lower the learning rate and start again from the last checkpoint."
            raise FloatingPointError(f"{problem}. {todo}")
