"""What the core needs of private parts of TRL (1.15 and 1.16): its private methods and state, and a patch of its
constructor (`reference_from`). `d1/tools/trainer.py` has what episodes need.

`CanvasGRPOTrainer` is TRL's GRPOTrainer with its private methods reduced to three that a subclass defines: `rollout`,
`after_rollout`, `loss`. The parts can be deleted one by one when TRL offers
- sampling with a function that keeps TRL's tokenising, rewards and logging (`rollout_func`, of users' engines, is
  given prompts as text, and replaces tokenising too);
- log-probabilities as an argument of its loss;
- a reference model as an argument of its constructor;
- a RepeatSampler that does not return to the first epoch's order after a resume.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from trl import GRPOTrainer, is_conversational
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler, pad, use_adapter

from d1.files import valid_unicode_in
from d1.models import load_model
from d1.models.head import run_inside
from d1.models.tokenizer import check_ids
from d1.rl.batch import Batch, RolloutRecord, has_equal_rewards, mean_entropies, pad_to_width, sort_into_mini_batches
from d1.rl.losses import LossInputs
from d1.rl.rewards import weighted_sum
from d1.runs.cli import silence
from d1.runs.trainer import RunTrainer

if TYPE_CHECKING:
    from d1.rl.sources import RolloutSource

# Keys of a batch, (rows,) each: the task's accuracy, and the weighted sum of the rewards, NaN where none applies.
ACCURACY, REWARD = "completion_is_right", "completion_reward"
EQUAL_REWARDS = "frac_reward_zero_std"  # TRL's metric: the share of groups whose rewards are all equal


class TokenLogps(NamedTuple):
    """What TRL's loss gets instead of a model: log-probabilities and entropies, (rows, tokens) each."""

    logps: Tensor
    entropies: Tensor


class CanvasGRPOTrainer(RunTrainer, GRPOTrainer):
    """TRL's GRPOTrainer for completions that are sampled as a canvas and scored in views that the subclass chooses.

    Tokenising, rewards, advantages, losses, metrics, logs and checkpoints stay TRL's. The class overrides
    - `_tokenize_prompts`, to refuse prompts of more than `max_prompt_length` tokens, or to cut them;
    - `_generate_single_turn`, to call `rollout`; `_generate_and_score_completions`, its caller, to add the rollout's
      record and its rows' rewards to the batch and to call `after_rollout`;
    - `_prepare_inputs`, to sort the rows that TRL shuffled into the mini-batches that `after_rollout` chose;
    - `_get_per_token_logps_and_entropies`, because TRL's scores in one state only: on a rollout it returns nothing, so
      TRL stores nothing, and in the loss it returns what `trl_loss` was given;
    - `_compute_loss`, to call `loss`;
    - `_get_eval_sampler`, so that several processes evaluate no row twice;
    - `_calculate_rewards`, to time it, to keep each row's weighted sum of rewards and its accuracy, and to leave out
      rows without a reward.
    Overrides of Trainer's own methods are in `RunTrainer`; `train_sampler` gives it an order that survives a resume.
    """

    model: Any  # Trainer's may be None
    args: Any  # GRPOConfig
    beta: float
    mask_token_id: Any  # None for a model without one
    source: RolloutSource
    _buffered_inputs: list[Batch] | None
    _pending_metrics: dict[str, list[float]]
    log_completions: bool
    _pending_extra_logs: dict[str, list[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        silence()  # in a notebook, too: TRL uses names that Transformers will remove
        super().__init__(*args, **kwargs)
        self.record: RolloutRecord = {}  # of the current rollout, until its batch is made
        self.row_rewards: Batch = {}  # `ACCURACY` and `REWARD`, likewise
        self.has_missing_rewards = False  # whether any row so far, of any process, had no reward
        self.rows: list[dict[str, Any]] = []  # the current rollout's rows of the dataset
        self.rollout_fields: dict[str, list[float]] = {}  # of the current rollout, per row, for the rewards
        self.rollout_seconds: list[float] = []  # per training rollout, including its rewards and `after_rollout`
        self.logged_rollout = -1  # the last training rollout whose completions were logged
        self.evaluated_rows: list[int] = []  # per batch of the current evaluation

    # --- What a subclass defines --------------------------------------------------------------------------------------

    def rollout(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], RolloutRecord]:
        """A completion for each prompt, cut after its first EOS, and the record of the canvases."""
        raise NotImplementedError

    def after_rollout(self, batch: Batch) -> None:
        """Adds tensors (rows, ...) to a sampled batch; TRL shuffles and splits them with it."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The loss of a micro-batch."""
        raise NotImplementedError

    # --- Token ids as tensors -----------------------------------------------------------------------------------------

    def encoded(self, prompts: list) -> list[list[int]]:
        """The ids of each prompt of chat messages, as in a rollout."""
        return self._tokenize_prompts(prompts)[0]

    def left_pad(self, prompt_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask, (rows, prompt) each, on the device; padded on the left."""
        return self.pad_ids(prompt_ids, side="left")

    def right_pad(self, completion_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask, (rows, completion) each, on the device; padded on the right."""
        return self.pad_ids(completion_ids, side="right")

    def pad_ids(self, ids_of_rows: list[list[int]], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
        rows = [torch.tensor(ids, dtype=torch.long) for ids in ids_of_rows]
        multiple = self.pad_to_multiple_of
        ids = pad(rows, self.text_tokenizer.pad_token_id, padding_side=side, pad_to_multiple_of=multiple)
        real = [torch.ones_like(row) for row in rows]
        mask = pad(real, padding_value=0, padding_side=side, pad_to_multiple_of=multiple)
        device = self.accelerator.device
        return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)

    # --- TRL's private methods ----------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        # Render each group's prompt once: with a small model, the chat template is the slowest step outside sampling.
        return self.tokenized_groups([(prompt, len(list(group))) for prompt, group in groupby(prompts)])

    def tokenized_groups(self, groups: Sequence[tuple[Any, int]]) -> tuple[list[list[int]], None, dict]:
        """What `_tokenize_prompts` returns for prompts, each of a number of rows."""
        prompt_ids, images, _ = super()._tokenize_prompts([prompt for prompt, _ in groups])
        if images is not None:
            raise ValueError("images are not supported: masked diffusion language models take text")
        for ids in prompt_ids:
            check_ids(self.text_tokenizer, ids, self.mask_token_id)
        repeated: list[list[int]] = []
        for ids, (_, rows) in zip(self.fit_prompts(prompt_ids), groups, strict=True):
            repeated += [ids] * rows
        return repeated, None, {}

    def fit_prompts(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The prompts; with `truncate_prompts`, the last `max_prompt_length` tokens of each. Raises ValueError for a
        longer one otherwise."""
        max_length, longest = self.args.max_prompt_length, max(len(ids) for ids in prompt_ids)
        if longest > max_length and not self.args.truncate_prompts:
            raise ValueError(
                f"a prompt has {longest} tokens, more than max_prompt_length={max_length}: raise max_prompt_length, or "
                "set truncate_prompts=True to keep only the end of such prompts"
            )
        return [ids[-max_length:] for ids in prompt_ids]

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        completions, self.record = self.rollout(prompt_ids)
        return completions, None

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if isinstance(model, TokenLogps):
            return model.logps, model.entropies, None
        return None, None, None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        started = time.perf_counter()
        batch = self.sampled_batch(inputs)
        self.after_rollout(batch)
        self.record, self.row_rewards = {}, {}
        if self.model.training:
            self.rollout_seconds.append(time.perf_counter() - started)
        else:
            self.evaluated_rows.append(len(inputs))
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        # TRL shuffles the rows of each process and cuts them into micro-batches. If an optimizer step has only some of
        # these, its rows would depend on the number of processes.
        samples = self.model.training and (self._step % self.micro_steps_per_rollout == 0 or not rollout_buffer(self))
        inputs: Batch = super()._prepare_inputs(generation_batch)
        if not samples or "mini_batch" not in inputs:
            return inputs
        batches = sort_into_mini_batches(rollout_buffer(self))
        self._buffered_inputs = batches
        return batches[self._step % self.args.steps_per_generation]

    def sampled_batch(self, rows: list[dict[str, Any]]) -> Batch:
        """TRL's batch of sampled and rewarded rows, with the record of the rollout and the rewards of its rows."""
        self.rows = rows
        batch = super()._generate_and_score_completions(rows)
        # TRL tests whether a standard deviation is 0. Rounding can prevent that for equal rewards; with scale_rewards
        # batch, it is that of all groups together. The other aggregation scales the rewards of each function.
        if self.multi_objective_aggregation == "sum_then_normalize":
            rewards = self.accelerator.gather(self.row_rewards[REWARD]).view(-1, self.group)
            self.replace_metric(EQUAL_REWARDS, has_equal_rewards(rewards).float().mean().item())
        return batch | self.row_record() | self.row_rewards

    def row_record(self) -> Batch:
        """The record of the rollout, which belongs to the rows of TRL's batch."""
        return {**self.record}

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        rewards = super()._calculate_rewards(self.with_rollout_fields(inputs), *args, **kwargs)
        self.mask_accuracy(rewards)
        # TRL returns the rewards of all processes.
        all_rewards = rewards.cpu()
        if all_rewards.isnan().all(dim=1).any():
            self.has_missing_rewards = True
        local_rewards = all_rewards[self.accelerator.process_index * len(inputs) :][: len(inputs)]
        total = weighted_sum(local_rewards, self.reward_weights.cpu())
        self.row_rewards = {REWARD: total.to(rewards.device, non_blocking=True)}
        if getattr(self.reward_funcs[-1], "is_accuracy", False):
            self.row_rewards[ACCURACY] = local_rewards[:, -1].to(rewards.device, non_blocking=True)
        self.log_metric("seconds/reward", time.perf_counter() - started)
        return rewards

    def mask_accuracy(self, rewards: Tensor) -> None:
        """Sets an accuracy that is only logged to NaN in the rows of `rewards` (rows, functions) to which no reward
        applies: TRL leaves out a row if all of its rewards are NaN, and the accuracy never is."""
        is_logged_only = getattr(self.reward_funcs[-1], "is_accuracy", False) and self.reward_weights[-1] == 0
        if is_logged_only and rewards.shape[1] > 1:
            rewards[:, -1].masked_fill_(rewards[:, :-1].isnan().all(dim=1), torch.nan)

    def with_rollout_fields(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the dataset with `rollout_fields`, which override columns of the same name."""
        extended = []
        for number, row in enumerate(rows):
            fields = {name: values[number] for name, values in self.rollout_fields.items()}
            extended.append({**row, **fields})
        return extended

    def rewards_and_accuracy(self, completion_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """(rows,) each, of other completions of the current rollout's rows: `weighted_sum` of the rewards, and the last
        of them. Nothing is logged."""
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        prompts = [row["prompt"] for row in self.rows]
        completions: list[Any] = texts  # in the form in which TRL gives them to the rewards
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        # What functions log of these completions is dropped: TRL would log it with those of the next rollout.
        pending = self._pending_metrics, self._pending_extra_logs
        self._pending_metrics, self._pending_extra_logs = defaultdict(list), defaultdict(list)
        try:
            rows = self.with_rollout_fields(self.rows)
            rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        finally:
            self._pending_metrics, self._pending_extra_logs = pending
        self.mask_accuracy(rewards)
        local_rewards = rewards[self.accelerator.process_index * len(texts) :][: len(texts)].cpu()
        total = weighted_sum(local_rewards, self.reward_weights.cpu())
        return total.to(rewards.device), local_rewards[:, -1].to(rewards.device)

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        return self.loss(model, inputs)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        # With several processes, Accelerate would fill the last batch with rows that the metrics count again.
        return super()._get_eval_sampler(self.whole_batches(eval_dataset))

    def whole_batches(self, eval_dataset: Any) -> Any:
        """The rows that an evaluation reads: with several processes, those of whole batches.

        Raises:
            ValueError: there are fewer rows than in a batch of all processes.
        """
        processes = self.accelerator.num_processes
        prompts = processes * self.args.eval_batch_size // self.num_generations_eval  # of a batch
        rows = len(eval_dataset)
        if processes == 1 or rows % prompts == 0:
            return eval_dataset
        if rows < prompts:
            size = f"{processes} processes x per_device_eval_batch_size {self.args.eval_batch_size}"
            raise ValueError(
                f"{rows} rows to evaluate are fewer than the {prompts} prompts of a batch ({size} completions): lower "
                "per_device_eval_batch_size"
            )
        return eval_dataset.select(range(rows - rows % prompts))

    def train_sampler(self, dataset: Any) -> EpochSampler:
        return self.order_of(dataset, lambda: int(self.state.epoch or 0), repeat_count=self.micro_steps_per_rollout)

    def order_of(self, dataset: Any, epoch: Callable[[], int], **options: Any) -> EpochSampler:
        """The order of the rows of an epoch."""
        return EpochSampler(
            dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=epoch,
            **options,
        )

    def rows_of(self, number: int) -> list[dict[str, Any]]:
        """The rows of the dataset, of all processes, of training rollout `number`, before TRL asks for them."""
        dataset: Any = self.train_dataset
        size = self.args.generation_batch_size
        epoch, before = divmod(number, self.rollouts_per_epoch)
        order = islice(self.order_of(dataset, lambda: epoch), before * size, (before + 1) * size)
        return [dataset[index] for index in order]

    # --- TRL's private state ------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def group(self) -> int:
        """Rows per prompt."""
        if self.mode == "eval":
            return self.num_generations_eval
        return self.num_generations

    @property
    def micro_step(self) -> int:
        """Number of micro-batches trained on; TRL increments it after the loss."""
        return self._step

    @property
    def micro_steps_per_rollout(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    @property
    def rollouts_per_epoch(self) -> int:
        """Prompts that are too few for a whole rollout are left out."""
        dataset: Any = self.train_dataset
        return len(dataset) // (self.args.generation_batch_size // self.num_generations)

    @property
    def mini_batches(self) -> int:
        """Parts of a rollout's rows: every optimizer step trains on all or on none of the rows of each."""
        steps = int(self.args.steps_per_generation)
        return steps // math.gcd(steps, self.args.gradient_accumulation_steps)

    @property
    def rollout_number(self) -> int:
        """The training rollout in use, or the next one between two rollouts, from 0."""
        return self.micro_step // self.micro_steps_per_rollout

    @property
    def text_tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def weights_are_split(self) -> bool:
        """Whether each process holds only a part of the weights."""
        return self._dist.is_zero3 or self._dist.is_fsdp

    @property
    def samples_in_step(self) -> bool:
        """Whether every forward pass of a rollout waits for all processes, because each holds a part of the weights."""
        gathered = self._dist.is_zero3 and self.args.ds3_gather_for_generation
        here = self.source.samples_here and not gathered
        return self.accelerator.num_processes > 1 and self.weights_are_split and here

    @contextlib.contextmanager
    def sampling_model(self) -> Iterator[Any]:
        """The model without wrappers; split weights are gathered if the settings ask for it."""
        options = {"gather_deepspeed3_params": self.args.ds3_gather_for_generation}
        if self._dist.is_fsdp:  # samplers call parts of the model, and FSDP2 refuses that before the whole was called
            # Before Accelerate 1.15 the weights outside the layers are split again after that. Delete this once 1.15 is
            # the oldest.
            if isinstance(self.model_wrapped, FSDPModule):
                self.model_wrapped.set_reshard_after_forward(False, recurse=False)
            run_inside(self.model_wrapped, lambda model: None)
        again = "gradient_checkpointing_kwargs"  # TRL 1.15 has no such argument. Delete this once 1.16 is the oldest
        if again in signature(unwrap_model_for_generation).parameters:
            options[again] = self.args.gradient_checkpointing_kwargs
        with (
            unwrap_model_for_generation(self.model_wrapped, self.accelerator, **options) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def trl_loss(self, inputs: LossInputs, entropies: Tensor | None, batch: Batch) -> Tensor:
        """TRL's loss on the given log-probabilities, with its KL and metrics; `entropies` (rows, canvas), weighted sums
        over views, are for the metrics and for `top_entropy_quantile`."""
        assert entropies is not None
        entropies = mean_entropies(pad_to_width(entropies, inputs.mask.shape[1]), inputs.weights)
        token_logps = TokenLogps(inputs.logps, entropies)
        stored = {"old_per_token_logps": inputs.old, "ref_per_token_logps": inputs.reference}
        if inputs.sampling_weights is not None:  # TRL takes (rows, tokens), and its KL does not use the advantages
            stored["advantages"] = inputs.advantages.unsqueeze(1) * inputs.sampling_weights
        return super()._compute_loss(token_logps, batch | stored)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The reference model: a second one, or the trained one without its adapter."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        inner = self.accelerator.unwrap_model(self.model)
        adapter_name = None
        if "ref" in inner.peft_config:
            adapter_name = "ref"
        with use_adapter(inner, adapter_name=adapter_name):
            yield self.model

    @contextlib.contextmanager
    def without_checkpointing(self) -> Iterator[None]:
        """Turns gradient checkpointing off inside, and gradients too."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            yield

    def trl_counters(self) -> dict[str, Any]:
        """State besides `rollout_buffer` that TRL keeps between steps and leaves out of a checkpoint, for JSON."""
        completions: dict[str, Any] = {}
        if self.log_completions:
            completions = self._logs
        return {"step": self._step, "metrics": self._metrics["train"], "completions": completions}

    def restore_trl(self, batches: list[Batch], counters: dict[str, Any]) -> None:
        """Puts back what `rollout_buffer` and `trl_counters` gave."""
        self._step, self._buffered_inputs = counters["step"], batches or None
        self._metrics["train"].clear()
        self._metrics["train"].update(counters["metrics"])
        for group, saved in counters["completions"].items():
            logs = self._logs[group]
            if not isinstance(saved, dict):
                logs.clear()
                logs.extend(saved)
                continue
            for name, values in saved.items():
                logs[name].clear()
                logs[name].extend(values)

    @contextlib.contextmanager
    def logging_completions_once(self, is_summary: bool) -> Iterator[None]:
        """Around TRL's `log`, which prints the completions of the last rollout and writes a file of them each time:
        those of a training rollout are logged once, although it has several updates.

        Args:
            is_summary: the log is that of the whole run, at its end.
        """
        logs_completions = self.log_completions
        if logs_completions:
            self.make_logs_writable()
            if is_summary:
                self.log_completions = False
            elif self.model.training:
                rollout = (self.micro_step - 1) // self.micro_steps_per_rollout
                self.log_completions = rollout != self.logged_rollout
                self.logged_rollout = rollout
        try:
            yield
        finally:
            self.log_completions = logs_completions

    def make_logs_writable(self) -> None:
        """Replaces halves of characters, which no file can hold, in TRL's logs of completions (`valid_unicode`)."""
        for logs in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
            texts = valid_unicode_in([*logs])
            logs.clear()
            logs.extend(texts)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value to the mean that is logged next as `name`, in an evaluation as `eval_name`."""
        self._metrics[self.mode][name].append(value)

    def replace_metric(self, name: str, value: float) -> None:
        """Replaces the value that TRL added last to the mean that is logged as `name`."""
        self._metrics[self.mode][name][-1] = value

    def clear_evaluation_metrics(self) -> None:
        """Removes the metrics of evaluations that ended without a log: of `predict`, or in an error."""
        self._metrics["eval"].clear()

    def average_over_rows(self) -> None:
        """Replaces the metrics of the batches of an evaluation by their means over rows, if the last batch is smaller:
        TRL logs the mean over batches."""
        rows, metrics = self.evaluated_rows, self._metrics["eval"]
        if len({*rows}) < 2:
            return
        for name, values in metrics.items():
            if len(values) != len(rows):  # not one of each batch
                continue
            weighted = [(value, count) for value, count in zip(values, rows, strict=True) if not math.isnan(value)]
            total = sum(count for _, count in weighted)
            if total:
                metrics[name] = [sum(value * count for value, count in weighted) / total]


class EpochSampler(RepeatSampler):
    """TRL's sampler with an order that is a function of (seed, epoch), so that a resumed run repeats it."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + self.epoch())
        return super().__iter__()


def rollout_buffer(trainer: GRPOTrainer) -> list[Batch]:
    """The micro-batches of the rollout in use."""
    return trainer._buffered_inputs or []


@contextlib.contextmanager
def reference_from(model: Any | None, args: Any) -> Iterator[None]:
    """Inside, TRL's constructor makes the reference model of a full fine-tune from `model`, which is in memory; None:
    the run needs no reference. Delete this when the constructor takes a reference model."""

    def copy_of_model(*_: Any, **__: Any) -> Any:
        # If ZeRO-3 split the weights over the ranks on loading, they are loaded again.
        if model is not None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            return load_model(model.name_or_path, dtype=model.dtype)
        return copy.deepcopy(model)

    # TRL would load the reference from its path, as a causal model: for the time of the constructor, the function that
    # does so is replaced by a copy of `model`.
    original = trl_grpo.create_model_from_path
    trl_grpo.create_model_from_path = copy_of_model

    # TRL makes a reference only if `beta`, the weight of its KL, is not 0. A run whose advantages alone read the
    # reference has a beta of 0: for the time of the constructor it is 1, so that TRL makes one. No loss sees this 1:
    # `args` get their beta back below, and the trainer sets its own `beta` after the constructor.
    beta = args.beta
    if model is not None and not beta:
        args.beta = 1.0
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original
        args.beta = beta
