"""diffu-GRPO (d1, arXiv 2504.12216): GRPO whose completions are sampled and scored by masked diffusion.

The class reads in the order of the work on a batch. *Sample*: one canvas per prompt. *Reward*: TRL computes rewards and
advantages, which some methods change. *Views*: those of every update are drawn (`d1/scoring/estimators.py`). *Score*:
old and reference log-probabilities in these views. *Loss*: the policy is scored in the views of the current update, for
TRL's loss or one of `OBJECTIVES`. Then come the loop, the checkpoint state and the budget. Overrides of TRL's
private methods, which call `rollout`, `after_rollout` and `loss`, are in `bridge.py`; the keys of a batch are listed in
`batch.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback, set_seed

from d1 import extensions
from d1.masking import keyed_generator
from d1.models.attention import require_prepared
from d1.models.kinds import block_size, has_masks
from d1.rl.batch import (
    LOSS_MASKS,
    Batch,
    RankView,
    RolloutRecord,
    completion_bounds,
    completion_ids_of,
    count_scored,
    draw_mini_batches,
    draw_updates,
    evaluating,
    filter_groups,
    first_equal_updates,
    largest_ratio,
    loss_inputs,
    mean_entropy,
    nonfinite_rows,
    pad_batch,
    peak_memory_gb,
    prompt_filter,
    prompt_masked,
    record_and_costs,
    replace_filtered_groups,
    sampled_logps,
    sampled_rows,
    sampling_gap,
    score_batch,
    score_updates,
    select_prompt_share,
    set_loss_mask,
    strip_padding,
    transform_advantages,
    view_logps_as_sampled,
    views_of,
)
from d1.rl.bridge import REWARD, CanvasGRPOTrainer, reference_from, rollout_buffer
from d1.rl.checks import check_datasets, check_noise, check_single_turn, check_trace_column, check_trainer
from d1.rl.choose_source import rollout_source
from d1.rl.config import DiffuGRPOConfig, count_rollouts
from d1.rl.losses import ADVANTAGES, OBJECTIVES, PENALTIES, TRLS_OVER_ROWS, sequence_log_ratios
from d1.rl.rewards import SPEED, guard_reward, names_of_rewards
from d1.rl.sources import RolloutRequest
from d1.runs.checkpoints import read_state, reading_checkpoint
from d1.runs.trainer import check_arguments, disable_dropout, loaded_model, tokenizer_of
from d1.sampling import Rollout, RolloutStart
from d1.sampling.graphs import set_compile
from d1.sampling.loop import Stops
from d1.sampling.passes import KVCacheRows
from d1.scoring import ESTIMATORS, Randomness, SampledRows, Scores, Views
from d1.scoring.inputs import CanvasBlocks

logger = logging.getLogger(__name__)

# Streams of random numbers: views and rollouts, in training and evaluation, never share one.
STREAMS = {("views", "train"): 0, ("rollout", "train"): 1, ("views", "eval"): 2, ("rollout", "eval"): 3}

SHARED_USES = ("prompt_share", "mini_batches", "views")  # of random numbers that all rows of a rollout share
BOUNDS = 1  # the last part of a row's key, after its number, in a draw of views for advantages

REFERENCE = "reference.safetensors"  # of a checkpoint whose run syncs the reference
FORMAT = 5  # of the checkpoint state


class DiffuGRPOTrainer(CanvasGRPOTrainer):
    """GRPO for masked diffusion language models.

    Args:
        model: from `d1.models.load_model`, or a path or hub name, which is loaded in fp32.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float]`.
        args: `DiffuGRPOConfig`; None: its defaults.
        train_dataset: rows with a `prompt` (chat messages) and the columns the rewards need.
        processing_class: the tokenizer; None: that of the model's path.
        task_name: the task's name in the error message when a reward raises an error.
        rollout_func: TRL's `f(prompts, trainer)`, which samples instead of the trainer (`d1/serve/user.py`).

    The remaining arguments are TRL's. With `tools` or `environment_factory`, the trainer is also an `EpisodeTrainer`
    (`d1/tools/trainer.py`), whose completions have several turns.
    """

    args: DiffuGRPOConfig
    rows_per_completion = 1

    def __new__(cls, *args: Any, tools: Any = None, environment_factory: Any = None, **kwargs: Any) -> Any:
        if not (tools or environment_factory) or issubclass(cls, extensions.EpisodeTrainer):
            return super().__new__(cls)
        bases = (extensions.EpisodeTrainer,) if cls is DiffuGRPOTrainer else (cls, extensions.EpisodeTrainer)
        return super().__new__(type(cls.__name__, bases, {}))

    def __init__(
        self,
        model: Any,
        reward_funcs: Callable | list[Callable],
        args: DiffuGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        task_name: str = "",
        rollout_func: Callable[[list, Any], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(args)
        if args is None:
            args = DiffuGRPOConfig()
        args.check_method()
        check_datasets(train_dataset, kwargs.get("eval_dataset"))
        check_trace_column(train_dataset, args)

        # The tokenizer, the model and its mask token; a model with uniform noise has none.
        processing_class = tokenizer_of(processing_class, model, plain_chat_template=args.plain_chat_template)
        model = loaded_model(model)
        self.check_completions(args, rollout_func is not None, kwargs.get("environment_factory"))
        require_prepared(model)
        set_compile(model, args.compile)
        self.mask_token_id: Any = None
        if has_masks(model.config):
            self.mask_token_id = args.mask_id
            if self.mask_token_id is None:
                self.mask_token_id = processing_class.mask_token_id
            if self.mask_token_id is None:
                raise ValueError("the tokenizer has no mask token: set its mask_token, or pass mask_id")
        check_noise(model.config, args)

        # How completions are sampled, where they come from, and what rewards them.
        self.sampling = args.sampling_settings(model.config)
        self.source = rollout_source(args, rollout_func, model.config, self.sampling)
        rewards = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        folder = Path(str(args.output_dir))
        guarded = [
            guard_reward(reward, task_name, folder, name)
            for reward, name in zip(rewards, names_of_rewards(rewards), strict=True)
        ]

        # The weights of a new adapter are drawn, and TRL's reference would be a second adapter.
        if kwargs.get("peft_config") is not None:
            set_seed(args.seed)
        if args.needs_reference and "ref" in getattr(model, "peft_config", {}):
            raise ValueError(
                "the model has the adapter ref, perhaps of an earlier trainer: model.delete_adapter('ref')"
            )

        # TRL's constructor. Inside `reference_from`, it makes the reference from this model, also for a beta of 0.
        with reference_from(model if args.needs_reference else None, args):
            super().__init__(
                model=model,
                reward_funcs=guarded,
                args=args,
                train_dataset=train_dataset,
                processing_class=processing_class,
                rollout_func=self.source.rollout_func,
                **kwargs,
            )
        if args.eval_strategy != "no":
            self.check_evaluated_rows()
        if args.disable_dropout:
            disable_dropout(self.model)
        # Unless the KL is TRL's, its beta is 0: then TRL adds no KL and reads no reference of its own.
        self.beta = args.beta if args.has_trls_kl else 0.0
        has_blocks = block_size(self.model.config) is not None
        check_trainer(args, self.sampling, self.reward_funcs, has_blocks, self.weights_are_split, self.samples_in_step)

        # The EOS stop is on unless all processes must make the same passes, or the loss reads what follows the EOS.
        self.eos_stop = args.eos_stop
        if self.eos_stop is None:
            self.eos_stop = not self.samples_in_step and not LOSS_MASKS[args.scored_tokens].after_the_end

        self.evaluation_rollouts = 0
        self.refill = 0  # the number of the current rollout's refill
        self.num_sampled_batches = 0  # of the whole run, counted with refills alone
        self.source.connect(self)
        # Of training, a sum on the device: `Scores.compute` and the rollouts' forward tokens.
        self.computed_tokens: Any = 0
        self.budget_share = 0.0  # the share of `max_compute_tokens` spent before the current step

    def check_completions(self, args: DiffuGRPOConfig, has_rollout_func: bool, environments: Any) -> None:
        """Raises ValueError for settings that do not fit how completions are made: of one canvas each.
        `has_rollout_func` and `environments` are for `EpisodeTrainer`."""
        check_single_turn(args)

    def check_evaluated_rows(self) -> None:
        """Logs how many rows evaluations leave out. Raises ValueError if there are fewer than in a batch."""
        sets: dict[str, Any] = {"eval_dataset": self.eval_dataset}
        if isinstance(self.eval_dataset, dict):
            sets = self.eval_dataset
        for name, rows in sets.items():
            left_out = len(rows) - len(self.whole_batches(rows))
            if left_out:
                logger.warning(
                    "Evaluations leave out the last %d of %d rows of %s, so that all processes have equal batches",
                    left_out,
                    len(rows),
                    name,
                )

    @property
    def update(self) -> int:
        """The current update, 0 to mu - 1. An evaluation uses only the first."""
        if self.mode == "eval":
            return 0
        return self.micro_step // self.args.steps_per_generation % self.num_iterations

    @property
    def is_sampling_policy(self) -> bool:
        """Whether, in the first update on a rollout, the weights are still those before its first optimizer step."""
        if self.mode == "eval" or self.mini_batches == 1:
            return True
        first = self.rollout_number * self.micro_steps_per_rollout
        return self.optimizer_step(self.micro_step) == self.optimizer_step(first)

    def optimizer_step(self, micro_step: int) -> int:
        """The optimizer step, from 0, of a micro-step. The last one of an epoch may have fewer micro-steps than the
        others."""
        accumulation = self.args.gradient_accumulation_steps
        per_epoch = self.rollouts_per_epoch * self.micro_steps_per_rollout
        epoch, number = divmod(micro_step, per_epoch)
        return epoch * math.ceil(per_epoch / accumulation) + number // accumulation

    def key(self, purpose: str, micro_step: int | None = None) -> tuple[int, int, int]:
        """(seed, stream, optimizer step) of the rollout at a micro-step (default: this one): the same for every split
        over processes and micro-batches."""
        seed, stream = self.args.seed, STREAMS[purpose, self.mode]
        if self.mode == "eval":
            return seed, stream, self.evaluation_rollouts
        if micro_step is None:
            micro_step = self.micro_step
        step, micro_batch = divmod(micro_step, self.args.gradient_accumulation_steps)
        # If one optimizer step has several rollouts, or a rollout is refilled, each has its own streams.
        rollouts = -(-self.args.gradient_accumulation_steps // self.micro_steps_per_rollout)
        number = micro_batch // self.micro_steps_per_rollout + self.refill * rollouts
        return seed, stream + number * len(STREAMS), step

    def row_keys(self, purpose: str, rows: int) -> list[tuple[int, ...]]:
        """The key of each row: that of the rollout, and the row's number over all processes."""
        key, first = self.key(purpose), self.first_row(rows)
        return [(*key, first + row) for row in range(rows)]

    def generators(self, purpose: str, rows: int) -> list[torch.Generator]:
        """One generator per row, by `row_keys`."""
        device = "cpu" if purpose == "views" else self.accelerator.device
        return [keyed_generator(*key, device=device) for key in self.row_keys(purpose, rows)]

    def shared_generator(self, use: str, rows: int) -> torch.Generator:
        """The generator of what all rows of a rollout share, with `rows` per process, for a use of `SHARED_USES`. Rows
        add their numbers to the key of the rollout (`row_keys`); these uses add the numbers after the last row's."""
        total_rows = rows * self.accelerator.num_processes
        return keyed_generator(*self.key("views"), total_rows + SHARED_USES.index(use))

    def first_row(self, rows: int) -> int:
        """The number over all processes of this process's first row: TRL assigns rows in the order of the ranks."""
        return self.accelerator.process_index * rows

    # --- Sample -------------------------------------------------------------------------------------------------------

    def rollout(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], RolloutRecord]:
        """Samples one canvas per prompt. Returns completions up to their first EOS, and the record of the canvases."""
        started = time.perf_counter()
        ids, mask = self.left_pad(prompt_ids)
        sampled = self.sample(ids, mask)
        record, costs, passes = record_and_costs(sampled)
        completions = completion_ids_of(record["canvas_ids"], self.eos_token_ids)  # this waits for the device

        # Tokens per forward pass of each row, which a reward may read.
        speeds = [len(completion) / count for completion, count in zip(completions, passes, strict=True)]
        self.rollout_fields = {SPEED: speeds}
        costs[f"sampling/{SPEED}"] = fmean(speeds)
        self.log_rollout(started, record, costs)

        # A source may compare what it received with what this model samples.
        keys = self.row_keys("rollout", len(ids))
        self.source.verify({"prompt_ids": ids, "prompt_mask": mask, **record}, sampled, keys)
        if self.args.min_speed_spread:
            record["tokens_per_forward_pass"] = torch.tensor(speeds, device=self.accelerator.device)
        return completions, record

    def sample(
        self,
        ids: Tensor,
        mask: Tensor,
        keys: Sequence[Sequence[int]] | None = None,
        stops: Stops | None = None,
        cache_rows: Sequence[KVCacheRows | None] | None = None,
        start: RolloutStart | None = None,
    ) -> Rollout:
        """The rollout of prompts (rows, prompt), without gradients or dropout. `keys` are those of the rows'
        generators; None: they are all rows of this process. `stops`, `cache_rows` and `start`: as in
        `d1.sampling.rollout`; what needs `start` calls `require_continuing` when it is set up."""
        if keys is None:
            keys = self.row_keys("rollout", len(ids))
        request = RolloutRequest(
            prompt_ids=ids,
            prompt_mask=mask,
            keys=keys,
            stops=stops,
            cache_rows=cache_rows,
            start=start,
        )
        sampled = self.source.sample(request)
        # Not in place: `evaluation_loop` restores it.
        self.computed_tokens = self.computed_tokens + sampled.forward_tokens.sum()
        return sampled

    @property
    def blocks(self) -> CanvasBlocks:
        """Where the blocks of the model lie on a canvas, as this run samples."""
        return CanvasBlocks.from_config(self.model.config, self.sampling.block_length, self.sampling.first_token)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that stop sampling; empty without the EOS stop."""
        return self.eos_token_ids if self.eos_stop else ()

    def log_rollout(self, started: float, record: RolloutRecord, costs: dict[str, float]) -> None:
        """Logs the seconds since `started`, the speed, and the other `costs` of the rollout."""
        seconds = time.perf_counter() - started
        speed = record["canvas_ids"].numel() * self.accelerator.num_processes / seconds
        self.log_metric("seconds/rollout", seconds)
        self.log_metric("rollout_tokens_per_second", speed)
        for name, value in costs.items():
            self.log_metric(name, value)

    # --- Reward and views ---------------------------------------------------------------------------------------------

    def sampled_batch(self, rows: list[dict[str, Any]]) -> Batch:
        """TRL's. With `refills`, prompts that would be dropped are replaced by the next ones of the order, which are
        sampled until enough are kept (dynamic sampling of DAPO, arXiv 2503.14476, equation 11)."""
        args, size = self.args, len(rows)
        if not (args.refills and args.drops_prompts) or self.mode == "eval":
            return super().sampled_batch(rows)
        ranks = RankView(self.accelerator.gather, self.first_row(size))

        def pad_to_canvas(batch: Batch) -> Batch:
            gen_length, pad_id = self.sampling.gen_length, self.text_tokenizer.pad_token_id
            return pad_batch(batch, prompt=args.max_prompt_length, canvas=gen_length, pad=pad_id)

        # Replace the prompts that are dropped, as long as there are any and refills are left.
        batch = self.next_batch(size)
        kept = self.prompts_to_keep(batch, ranks)
        while not kept.all() and self.refill < args.refills:
            self.refill += 1
            more = self.next_batch(size)
            new = self.prompts_to_keep(more, ranks)
            batch, kept = replace_filtered_groups(
                pad_to_canvas(batch), kept, pad_to_canvas(more), new, self.group, ranks
            )

        # Pad the prompts to the longest one again.
        if self.refill:
            prompt_ids = strip_padding(batch["prompt_ids"], batch["prompt_mask"])
            batch["prompt_ids"], batch["prompt_mask"] = self.left_pad(prompt_ids)
        self.log_metric("sampling/refills", self.refill)
        self.refill = 0
        return batch

    def prompts_to_keep(self, batch: Batch, ranks: RankView) -> Tensor:
        """(prompts,) bool, of all processes: those that neither `right_share` nor `min_speed_spread` drops."""
        return prompt_filter(batch, self.args.right_share, self.group, ranks, self.args.min_speed_spread)

    def next_batch(self, size: int) -> Batch:
        """A batch of the next prompts in the order, `size` rows of which are this process's."""
        rows = self.rows_of(self.num_sampled_batches)[self.first_row(size) :][:size]
        self.num_sampled_batches += 1
        return super().sampled_batch(rows)

    def after_rollout(self, batch: Batch) -> None:
        """Adds what belongs to the samples of a rollout: their views and the log-probs in these."""
        self.complete_rows(batch)
        ranks = self.rank_view(batch)
        self.draw_views(batch, ranks)
        if self.mode == "train" and self.mini_batches > 1:
            rows = len(batch["advantages"])
            generator = self.shared_generator("mini_batches", rows)
            numbers = draw_mini_batches(self.accelerator.num_processes * rows, self.mini_batches, generator)
            batch["mini_batch"] = ranks.local_slice(numbers, rows).to(self.accelerator.device)
        self.score_rollout(batch)
        self.source.after_scoring(batch, ranks)
        self.evaluation_rollouts += self.mode == "eval"

    def complete_rows(self, batch: Batch) -> None:
        """Makes the rows of the loss from TRL's batch: which of their tokens count, and their advantages."""
        ranks = self.rank_view(batch)
        self.source.before_views(batch, ranks)
        self.choose_scored_tokens(batch, ranks)
        self.change_advantages(batch, ranks)

    def rank_view(self, batch: Batch) -> RankView:
        """Access to the rows of all processes."""
        return RankView(self.accelerator.gather, self.first_row(len(batch["advantages"])))

    def change_advantages(self, batch: Batch, ranks: RankView) -> None:
        """Sets which prompts count in the loss, and turns TRL's advantages into the method's."""
        args = self.args

        # Which prompts count.
        if self.mode == "train":
            kept: Tensor | None = None
            if args.drops_prompts:
                kept = self.prompts_to_keep(batch, ranks)
            if args.prompt_share < 1:
                generator = self.shared_generator("prompt_share", len(batch["advantages"]))
                kept = select_prompt_share(batch, args.prompt_share, self.group, ranks, generator, candidates=kept)
            if kept is not None:
                self.log_metric("prompts_kept", filter_groups(batch, kept, self.group, ranks))

        # Their advantages.
        in_loss = batch["completion_mask"].bool().any(1)
        bounds = {}
        if ADVANTAGES[args.advantage].reads and self.group > 1:
            bounds = self.bounds(batch, ranks)
        missing = None
        if self.has_missing_rewards:
            missing = batch[REWARD].isnan()
        batch["advantages"] = transform_advantages(
            batch["advantages"],
            args.advantage,
            self.group,
            ranks,
            bounds=bounds,
            settings=args,
            in_loss=in_loss,
            missing=missing,
        )

    def bounds(self, batch: Batch, ranks: RankView) -> dict[str, Tensor]:
        """The fields of `AdvantageInputs`, (rows,) each, that the advantage reads: bounds of each completion under the
        policy and the reference, in one draw of views for both. The draw has random numbers of its own, so that the
        views of the updates do not depend on it."""
        started, args, score_one = time.perf_counter(), self.args, self.row_scorer()
        drawn = draw_updates(
            self.estimator_rows(batch),
            self.randomness(len(batch["canvas_ids"]), ranks, BOUNDS),
            updates=1,
            estimator=ESTIMATORS[args.estimator],
            settings=args.view_settings(),
        )
        viewed = self.with_padded(batch) | drawn
        bounds = {"lengths": batch["completion_mask"].sum(1).float()}
        with self.without_checkpointing():
            if "old" in ADVANTAGES[args.advantage].reads:
                logps = score_updates(self.model, viewed, score_one, [0])
                bounds["old_bounds"] = completion_bounds(logps, viewed)
            if "reference" in ADVANTAGES[args.advantage].reads:
                with self.reference() as model:
                    logps = score_updates(model, viewed, score_one, [0])
                bounds["reference_bounds"] = completion_bounds(logps, viewed)
        self.log_metric("seconds/bounds", time.perf_counter() - started)
        return bounds

    def choose_scored_tokens(self, batch: Batch, ranks: RankView) -> None:
        """Sets which tokens count in the loss: those of TRL's mask, up to the first EOS, or those of the setting."""
        name = self.args.scored_tokens
        if name != "ended":
            set_loss_mask(batch, name, self.eos_token_ids, self.text_tokenizer.pad_token_id, ranks)

    def draw_views(self, batch: Batch, ranks: RankView) -> None:
        """Adds the views of every update, and how many of them score something."""
        args, rows = self.args, len(batch["canvas_ids"])

        # The views, from random numbers of each row and of the whole rollout.
        views = draw_updates(
            self.estimator_rows(batch),
            self.randomness(rows, ranks),
            updates=self.num_iterations,
            estimator=ESTIMATORS[args.estimator],
            settings=args.view_settings(),
            shared=not args.random_masking,
            split=ranks if args.split_views else None,
        )
        batch.update(views)

        # What losses divide by, over all processes, and which rows share a prompt.
        batch.update(count_scored(batch, ranks, self.rows_per_completion))
        if OBJECTIVES[self.args.objective].over_group:
            batch["group"] = (torch.arange(rows, device=batch["canvas_ids"].device) + ranks.rank_offset) // self.group
        self.log_metric("prompt_masked", prompt_masked(batch))

    def estimator_rows(self, batch: Batch) -> SampledRows:
        """A batch as estimators see it."""
        protected = self.text_tokenizer if self.args.protect_special_tokens else None
        return sampled_rows(batch, self.blocks, protected)

    def randomness(self, rows: int, ranks: RankView, *purpose: int) -> Randomness:
        """The random numbers of a draw of views for `rows` rows of this process. A `purpose` gives other numbers than
        those of the updates' views."""
        total_rows = self.accelerator.num_processes * rows
        if purpose:
            generators = [keyed_generator(*row_key, *purpose) for row_key in self.row_keys("views", rows)]
            shared = keyed_generator(*self.key("views"), total_rows, *purpose)
        else:
            generators = self.generators("views", rows)
            shared = self.shared_generator("views", rows)
        return Randomness(generators=generators, shared=shared, first_row=ranks.rank_offset, total_rows=total_rows)

    # --- Score --------------------------------------------------------------------------------------------------------

    def score_rollout(self, batch: Batch) -> None:
        """Adds old and reference log-probs, (rows, mu, views, canvas) each, where the loss needs them."""
        started, args, score_one = time.perf_counter(), self.args, self.row_scorer()
        batch.update(self.with_padded(batch))

        # Equal views have equal scores.
        if self.mode == "eval":
            firsts = [0] * self.num_iterations
        else:
            firsts = first_equal_updates(batch, self.accelerator.gather)

        # Old log-probs: those of the sampler, or of the policy before the first update. Then those of the reference.
        # The first update has its own, too, although they equal the policy's without dropout: a first ratio that is
        # not 1 shows a fault, and the pass is one of 4 mu (scorings and updates, which count three times).
        with self.without_checkpointing():
            if args.old_as_sampled:
                batch["old_view_logps"] = view_logps_as_sampled(batch)
            elif args.needs_old_logps:
                batch["old_view_logps"] = score_updates(self.model, batch, score_one, firsts)
            if args.loss_reads_reference:
                with self.reference() as model:
                    batch["ref_view_logps"] = score_updates(model, batch, score_one, firsts)
        self.log_metric("seconds/scoring", time.perf_counter() - started)

    def with_padded(self, batch: Batch) -> Batch:
        """The batch with `padded`, whether any of its prompts has padding: TRL shuffles the rows before it splits them
        into micro-batches, and all scorings of a row need the same kernel."""
        return batch | {"padded": batch["prompt_mask"].eq(0).any().repeat(len(batch["prompt_mask"]))}

    def row_scorer(self) -> Callable[..., Scores]:
        """`scores` of the rows of a rollout, a micro-batch at a time. Call it before the model is put into evaluation
        mode for scoring: `mode` is the model's."""
        size = self.args.per_device_train_batch_size
        if self.mode == "eval":
            size = self.args.per_device_eval_batch_size
        return partial(self.scores, size=size)

    def scores(
        self, model: Any, batch: Batch, views: Views, *, views_at_once: int | None = None, **options: Any
    ) -> Scores:
        """`score_batch` with this run's mask token and precision; adds to `computed_tokens`."""
        with self.accelerator.autocast():
            scores = score_batch(
                model,
                batch,
                views,
                mask_token_id=self.mask_token_id,
                views_at_once=views_at_once or self.args.views_at_once,
                blocks=self.blocks,
                distribution=self.sampling.record_distribution,
                **options,
            )
        self.computed_tokens = self.computed_tokens + scores.compute
        return scores

    # --- Loss ---------------------------------------------------------------------------------------------------------

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The loss under the views, old and reference log-probs of the current update."""
        args, objective = self.args, OBJECTIVES[self.args.objective]
        gather = self.accelerator.gather
        is_training = self.mode == "train"

        # For an objective that compares the rows of a prompt: their ratios, once per update.
        if is_training and objective.over_group and self.micro_step % args.steps_per_generation == 0:
            self.compare_rows(model)

        # Log-probs of the current policy in the views of the update, next to old and reference log-probs.
        views = views_of(batch, self.update)
        scores = self.scores(model, batch, views, with_entropies=True)
        micro_batches = args.steps_per_generation if is_training else 1  # of the rollout, per process
        inputs = loss_inputs(
            batch,
            scores,
            self.update,
            parts=self.accelerator.num_processes * micro_batches,
            reads_old=args.reads_old_logps,
            sampling_weight_cap=args.sampling_weight_cap,
            views_per_draw=args.views_per_draw,
            blocks=self.blocks,
            turns=self.rows_per_completion,
            progress=max(self.state.global_step / max(self.state.max_steps, 1), min(self.budget_share, 1.0)),
        )

        # The objective: TRL's, whose mean is over completions, or ours. Trainer sums the micro-batches of a step, so
        # our losses are divided by their number; TRL's divides itself.
        accumulated = self.current_gradient_accumulation_steps if is_training else 1
        metrics: dict[str, float] = {}
        if objective.loss is None:
            loss = self.trl_loss(inputs, scores.entropies, batch)
            if args.loss_type in TRLS_OVER_ROWS:
                loss = loss * self.rows_per_completion
            if not ESTIMATORS[args.estimator].covers(args.view_settings()):
                # TRL's mean has tokens that no view scores, with an entropy of 0.
                self.replace_metric("entropy", mean_entropy(inputs, scores.entropies, gather))
        else:
            loss, metrics = objective(inputs, args)
            loss = loss / accumulated
            metrics["entropy"] = mean_entropy(inputs, scores.entropies, gather)

        # The KL penalty, unless it is TRL's and thus in the loss.
        if args.beta and not args.has_trls_kl:
            penalty = PENALTIES[args.kl](inputs, args)
            metrics["kl"] = gather(penalty.detach()).mean().item()
            loss = loss + args.beta * penalty / accumulated

        # A loss that is not finite ends the run, with the rows that made it so.
        decode = self.text_tokenizer.decode
        self.require_finite(loss.detach(), lambda: nonfinite_rows(batch, inputs.logps.detach(), decode))

        # Metrics: how far the policy has moved, and how far it is from the one that sampled.
        if args.reads_old_logps:
            metrics["ratio_max"] = largest_ratio(inputs, gather)
        metrics.update(ESTIMATORS[args.estimator].metrics(views, scores, self.sampling, gather))
        if self.update == 0 and self.is_sampling_policy and "rollout_logps" in batch:
            sampled = sampled_logps(batch, self.update)
            metrics.update(sampling_gap(sampled, inputs, gather, args.sampling_weight_cap))
        for name, value in metrics.items():
            self.log_metric(name, value)
        return loss

    def compare_rows(self, model: Any) -> None:
        """Adds `log_ratios`, those of all rows of each row's prompt, to a rollout's micro-batches at the start of an
        update, for objectives that weigh a row against the others of its prompt."""
        update, batches, gather = self.update, rollout_buffer(self), self.accelerator.gather

        # The ratios of the rows of this process, and of all processes.
        ratios = []
        with self.without_checkpointing(), evaluating(model):
            for batch in batches:
                if update == 0 and not self.args.old_as_sampled:  # the policy is still the one of the old log-probs
                    ratios.append(torch.zeros_like(batch["advantages"]))
                    continue
                scores = self.scores(model, batch, views_of(batch, update))
                ratios.append(sequence_log_ratios(loss_inputs(batch, scores, update)))
            all_ratios = gather(torch.cat(ratios))

        # TRL shuffled the rows, and a group may be spread over several processes: sort them by group.
        order = gather(torch.cat([batch["group"] for batch in batches])).argsort()
        groups = all_ratios[order].view(-1, self.num_generations)
        for batch in batches:
            batch["log_ratios"] = groups[batch["group"]]

    # --- The training loop --------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; at its end, or after an error, the rollout source is closed. Raises ValueError if there are too few
        prompts for a rollout."""
        dataset: Any = self.train_dataset
        count_rollouts(len(dataset), self.args.generation_batch_size // self.num_generations)
        try:
            return super().train(*args, **kwargs)
        finally:
            self.source.close()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started, processor_started, rollouts = time.perf_counter(), time.process_time(), len(self.rollout_seconds)
        loss = super().training_step(*args, **kwargs)
        of_rollouts = sum(self.rollout_seconds[rollouts:])
        self.log_metric("seconds/processor", time.process_time() - processor_started)
        self.log_metric("seconds/update", time.perf_counter() - started - of_rollouts)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation_rollouts = 0  # every evaluation uses the same random numbers, so that they are comparable
        self.evaluated_rows = []
        self.clear_evaluation_metrics()
        of_training = self.computed_tokens  # evaluations do not count
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.computed_tokens = of_training

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["peak_memory_gb"] = peak_memory_gb()
        logs["compute_tokens"] = self.total_computed_tokens()
        if self.mode == "eval":
            self.average_over_rows()
        with self.logging_completions_once(is_summary="train_loss" in logs):
            super().log(logs, start_time)

    def total_computed_tokens(self) -> int:
        """Tokens processed so far, over all processes: 1 per token of a forward pass and 2 for its backward pass
        (`Scores.compute`), in rollouts, scoring and updates, not in evaluations."""
        local_tokens = torch.as_tensor(self.computed_tokens, device=self.accelerator.device)
        return int(self.accelerator.gather(local_tokens).sum())

    # --- Checkpoint state ---------------------------------------------------------------------------------------------
    # What TRL's checkpoints leave out: the current rollout with its views, the position in the cycle of updates, a
    # synced reference, and metrics that are not logged yet. A resumed run then equals an unbroken one bit for bit.

    def save_extra(self, folder: Path) -> None:
        """Writes this rank's buffered micro-batches and counters into the checkpoint `folder`."""
        tensors_file, counters_file = state_files(folder, self.accelerator.process_index)
        batches = rollout_buffer(self)

        # Micro-batches share the storage of one rollout, which safetensors refuses: clone them.
        tensors = {}
        for index, batch in enumerate(batches):
            for key, value in batch.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}.{key}"] = value.detach().cpu().clone().contiguous()
        save_file(tensors, tensors_file)

        # Counters and sums of metrics; TRL's logs of completions are deques.
        counters = {
            "format": FORMAT,
            "batches": len(batches),
            "losses": self.loss_sums(),
            **self.trl_counters(),
            "processes": self.accelerator.num_processes,
            "compute": int(self.computed_tokens),
            "sampled": self.num_sampled_batches,
            "logged": self.logged_rollout,
        }
        counters_file.write_text(json.dumps(counters, default=list))

        # The reference, where it follows the policy, and what the rollout source keeps.
        if self.args.sync_ref_model and self.args.should_save:
            reference = {name: value.detach().cpu().contiguous() for name, value in self.reference_weights()}
            save_file(reference, folder / REFERENCE)
        self.source.save(folder)

    def load_extra(self, folder: Path) -> None:
        """Puts back what `save_extra` wrote. Raises ValueError for a checkpoint that this run cannot continue."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes

        # Is it a checkpoint that this run can continue?
        counters = read_counters(folder, rank)
        if counters.get("format") != FORMAT:
            raise ValueError(
                f"{folder} was written by another version, which stores rollouts in another format: finish the run "
                "with that version, or start a new run from its weights (--model_path, another --output_dir)"
            )
        if counters["processes"] != processes:
            raise ValueError(
                f"{folder} was written by {counters['processes']} processes, and a rollout in progress cannot continue "
                f"with {processes}: start the run with {counters['processes']}"
            )

        # The buffered micro-batches and counters.
        batches: list[Batch] = [{} for _ in range(counters["batches"])]
        for name, value in load_file(state_files(folder, rank)[0]).items():
            index, key = name.split(".", 1)
            batches[int(index)][key] = value.to(self.accelerator.device)
        self.set_loss_sums(counters["losses"])
        self.computed_tokens = counters["compute"]
        self.num_sampled_batches = counters.get("sampled", 0)
        self.logged_rollout = counters.get("logged", -1)
        self.restore_trl(batches, counters)

        # The reference and the rollout source.
        if self.args.sync_ref_model:
            reference = load_file(folder / REFERENCE)
            for name, value in self.reference_weights():
                value.data.copy_(reference[name])
        self.source.load(folder)

    def reference_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.accelerator.unwrap_model(self.ref_model).named_parameters()


# --- Checkpoint state, before there is a trainer ----------------------------------------------------------------------


def state_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """The tensors and the counters of one process in a checkpoint."""
    return folder / f"rollout_rank{rank}.safetensors", folder / f"rollout_rank{rank}.json"


def read_counters(folder: Path, rank: int) -> dict[str, Any]:
    """The counters of one process in a checkpoint. Raises ValueError if the file is missing or damaged."""
    file = state_files(folder, rank)[1]
    with reading_checkpoint(file):
        return dict(json.loads(file.read_text()))


# --- Budget -----------------------------------------------------------------------------------------------------------


def budget_exhausted(checkpoint: str | None, budget: int | None) -> bool:
    """Whether the run had reached its budget when it wrote `checkpoint`."""
    if checkpoint is None or budget is None:
        return False
    processes = len(list(Path(checkpoint).glob("rollout_rank*.json")))
    if processes == 0:  # the folder of a finished run without checkpoints, whose log alone says what was spent
        logged = [log["compute_tokens"] for log in read_state(Path(checkpoint)).log_history if "compute_tokens" in log]
        return bool(logged) and logged[-1] >= budget
    spent = sum(read_counters(Path(checkpoint), rank).get("compute", 0) for rank in range(processes))
    return spent >= budget


def saved_at(output_dir: str | Path, share: float) -> Path:
    """The folder of the model saved at a share of the budget."""
    return Path(output_dir) / f"at_{share:g}"


class StopAtCompute(TrainerCallback):
    """Ends a run at a budget of tokens (`DiffuGRPOTrainer.total_computed_tokens`), to compare methods at equal compute.

    Saves the model at the first step that reaches each of the `shares` of the budget (`saved_at`), and ends the run
    with a checkpoint at the first step that reaches all of it. A linear learning rate falls with the budget: a step's
    rate depends on what was spent before it. It must be added after `LoadExtra`, which restores what was spent."""

    def __init__(self, trainer: DiffuGRPOTrainer, budget: int, shares: Sequence[float] = ()) -> None:
        self.trainer, self.budget, self.shares = trainer, budget, shares
        self.spent = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.spent = self.trainer.total_computed_tokens()
        self.trainer.budget_share = self.spent / self.budget
        if args.lr_scheduler_type.value == "linear":
            scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # Accelerate wraps it
            scheduler.lr_lambdas = [lambda step: self.budget_left()] * len(scheduler.lr_lambdas)

    def budget_left(self) -> float:
        """The share of the budget that is left; times the peak, it is the learning rate of the next step."""
        return max(0.0, 1 - self.trainer.total_computed_tokens() / self.budget)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, self.spent = self.spent, self.trainer.total_computed_tokens()
        self.trainer.budget_share = self.spent / self.budget
        for share in self.shares:
            if before < share * self.budget <= self.spent:  # equal on all processes, unlike what they see on disk
                self.save_aside(saved_at(args.output_dir, share))
        if self.spent >= self.budget:
            control.should_log = control.should_save = control.should_training_stop = True

    def save_aside(self, folder: Path) -> None:
        """Writes the model to `folder`, completely or not at all."""
        partial = folder.with_name(f".{folder.name}")
        self.trainer.save_model(str(partial))
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        self.trainer.accelerator.wait_for_everyone()

    def last_step(self, state: Any) -> int:
        """The step that will spend the rest of the budget, if steps cost what they have cost so far."""
        if not self.spent:
            return int(state.max_steps)
        return min(math.ceil(state.global_step * self.budget / self.spent), int(state.max_steps))
