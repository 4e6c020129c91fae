"""diffu-GRPO (d1, arXiv 2504.12216): GRPO whose completions are sampled and scored by masked diffusion.

The steps for each batch: `rollout` samples one canvas per prompt; TRL computes rewards and advantages; `after_rollout`
draws the views of every inner update (`d1/scoring/estimators.py`) and scores old and reference log-probabilities in
them; `loss` selects the views of the current update, scores the policy in them, and calls TRL's loss or one of
`objectives.py`. The overrides of TRL's own methods are in `bridge.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models.attention import require_prepared
from d1.models.kinds import block_size
from d1.rl.ahead import ahead_of
from d1.rl.bridge import CanvasGRPOTrainer, reference_from
from d1.rl.budget import total_compute
from d1.rl.checks import check_trainer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.group_ratios import compare_groups
from d1.rl.metrics import largest_ratio, mean_entropy, peak_memory_gb, prompt_masked, rows_to_blame, sampling_gap
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.rl.record import log_rollout, recorded, sampled_logps, view_logps_as_sampled
from d1.rl.rescored import check_servers
from d1.rl.rewards import guarded
from d1.rl.rollout_func import check_rollout_func, user_rollout
from d1.rl.scored import SCORED, score_more
from d1.rl.servers import ServedRollout, servers_of
from d1.rl.state import load_rollout, save_rollout
from d1.rl.state_rewards import compare_states
from d1.rl.updates import (
    Batch,
    Everyone,
    count,
    draw_updates,
    evaluating,
    in_parts,
    keep_prompts,
    loss_inputs,
    reshaped,
    sampled_rows,
    score_batch,
    score_updates,
    texts_of,
    updates_are_alike,
    views_of,
)
from d1.rl.without_servers import Ending
from d1.sampling import Rollout, rollout
from d1.scoring import ESTIMATORS, Randomness, Scores, Views

# Streams of random numbers: views and rollouts, in training and evaluation, never share one.
STREAMS = {("views", "train"): 0, ("rollout", "train"): 1, ("views", "eval"): 2, ("rollout", "eval"): 3}


class DiffuGRPOTrainer(CanvasGRPOTrainer):
    """GRPO for masked diffusion language models.

    Args:
        model: from `d1.models.load_model`.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float]`.
        args: `DiffuGRPOConfig`.
        train_dataset: rows with a `prompt` (chat messages) and the columns the rewards need.
        task_name: the task's name in the error message when a reward raises an error.

        rollout_func: TRL's `f(prompts, trainer)`, which samples instead of the trainer (`d1/rl/rollout_func.py`).

    The remaining arguments are TRL's. Tools and environments are refused.
    """

    args: DiffuGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Callable | list[Callable],
        args: DiffuGRPOConfig,
        train_dataset: Any,
        processing_class: Any,
        task_name: str = "",
        rollout_func: Callable[[list, Any], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if refused := [name for name in ("tools", "environment_factory") if kwargs.get(name)]:
            raise ValueError(f"{refused[0]} is not supported: diffusion rollouts are sampled as one canvas")
        self.mask_token_id: Any = processing_class.mask_token_id if args.mask_id is None else args.mask_id
        if self.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token: set its mask_token, or pass mask_id")
        require_prepared(model)
        self.sampling = args.sampling_settings(model.config)
        if rollout_func is not None:
            check_rollout_func(args)
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        with reference_from(model if args.needs_reference else None):
            super().__init__(
                model=model,
                reward_funcs=[guarded(reward, task_name, Path(str(args.output_dir))) for reward in rewards],
                args=args,
                train_dataset=train_dataset,
                processing_class=processing_class,
                rollout_func=rollout_func and partial(user_rollout, rollout_func),
                **kwargs,
            )
        if not args.has_trls_kl:
            self.beta = 0.0  # so that TRL adds no KL and reads no reference of its own
        check_trainer(self)
        can_stop = not self.samples_in_step and not SCORED[args.scored_tokens].behind_the_end
        self.eos_stop = can_stop if args.eos_stop is None else args.eos_stop
        self.evaluation_rollouts = 0
        self.warned_of_scores = False
        self.servers, self.ending = servers_of(self), Ending(self)
        self.ahead = ahead_of(self)
        self.compute: Any = 0  # `Scores.compute` and the rollouts' forward tokens: a sum on the device

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def update(self) -> int:
        """The current inner update, 0 to mu - 1. An evaluation uses only the first."""
        return self.micro_step // self.args.steps_per_generation % self.num_iterations if self.mode == "train" else 0

    def key(self, purpose: str, micro_step: int | None = None) -> tuple[int, int, int]:
        """(seed, stream, optimizer step) of the rollout at a micro-step (default: this one): the same for every split
        over processes and micro-batches."""
        args, stream = self.args, STREAMS[purpose, self.mode]
        if self.mode == "eval":
            return args.seed, stream, self.evaluation_rollouts
        now = self.micro_step if micro_step is None else micro_step
        step, micro_batch = divmod(now, args.gradient_accumulation_steps)
        # With short cycles one step has several rollouts: each further rollout has its own streams.
        number = micro_batch // self.micro_steps_per_rollout
        return args.seed, stream + number * len(STREAMS), step

    def generators(self, purpose: str, rows: int) -> list[torch.Generator]:
        """One generator per row: a function of the rollout's key and of the row's number over all processes."""
        key, first = self.key(purpose), self.accelerator.process_index * rows  # TRL assigns rows in the ranks' order
        device = "cpu" if purpose == "views" else self.accelerator.device
        return [keyed_generator(*key, first + row, device=device) for row in range(rows)]

    # --- Rollout ------------------------------------------------------------------------------------------------------

    def rollout(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], Batch]:
        """Samples one canvas per prompt. Returns completions up to their first EOS, and a record of the whole canvas,
        (rows, canvas) each: `canvas_ids` and `reveal_steps`, int64; `rollout_logps` and `rollout_entropies`, fp32."""
        started = time.perf_counter()
        ids, mask = self.padded(prompt_ids)
        sampled = self.sample(ids, mask)
        record, costs = recorded(sampled)
        completions = texts_of(record["canvas_ids"], self.eos_token_ids)  # this waits for the device
        log_rollout(self, started, record["canvas_ids"].numel(), costs)
        if isinstance(sampled, ServedRollout) and self.servers is not None:
            with self.servers.together():
                check_servers(self, {"prompt_ids": ids, "prompt_mask": mask} | record, sampled.sources)
        return completions, record

    def sample(self, ids: Tensor, mask: Tensor) -> Rollout:
        """The rollout of prompts (rows, prompt), without gradients or dropout."""
        taken = self.ahead.take if self.ahead is not None and self.mode == "train" else self.sample_now
        sampled = taken(ids, mask)
        self.compute = self.compute + sampled.forward_tokens.sum()  # not in place: `evaluation_loop` restores it
        return sampled

    def sample_now(self, ids: Tensor, mask: Tensor) -> Rollout:
        """`sample` with the policy's own weights, `rollout_batch_size` rows at a time."""
        if self.ahead is not None:
            self.ahead.finish()
        key, generators = self.key("rollout"), self.generators("rollout", len(ids))  # before the model leaves this mode
        ends = self.eos_token_ids if self.eos_stop else None
        with self.sampling_model() as model, evaluating(model), self.accelerator.autocast():
            if self.servers is not None:
                return self.servers.rollout(model, self.state.global_step, ids, mask, key, self.sampling, ends)
            tokens = {"mask_token_id": self.mask_token_id, "eos_token_ids": ends}
            sample = partial(rollout, model, settings=self.sampling, **tokens)
            return in_parts(sample, ids, mask, generators, self.args.rollout_batch_size or len(ids))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation_rollouts = 0  # every evaluation uses the same random numbers, so that they are comparable
        compute = self.compute  # counts training only
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.compute = compute

    # --- Views and their scores ---------------------------------------------------------------------------------------

    def after_rollout(self, batch: Batch) -> None:
        """Adds views, old and reference log-probs of every update, (rows, mu, ...) each."""
        rows = len(batch["canvas_ids"])
        total, first = self.accelerator.num_processes * rows, self.accelerator.process_index * rows
        everyone = Everyone(self.accelerator.gather, first)
        group = self.num_generations if self.mode == "train" else self.num_generations_eval
        if self.args.scored_tokens != "ended":
            score_more(batch, self.args.scored_tokens, self.eos_token_ids, self.text_tokenizer.pad_token_id, everyone)
        if self.args.right_share and self.mode == "train":
            self.log_metric("prompts_kept", keep_prompts(batch, self.args.right_share, group, everyone))
        batch["advantages"] = reshaped(batch["advantages"], self.args.advantage, group, everyone)
        protected = self.text_tokenizer if self.args.protect_special_tokens else None
        batch |= draw_updates(
            sampled_rows(batch, self.model.config, protected),
            Randomness(self.generators("views", rows), keyed_generator(*self.key("views")), first, total),
            self.num_iterations,
            ESTIMATORS[self.args.estimator],
            self.args.view_settings(),
            shared=not self.args.random_masking,
            split=everyone if self.args.split_views else None,
        )
        batch |= count(batch, everyone)
        if self.args.state_reward:
            batch["view_advantages"] = compare_states(self, batch, group, everyone)
        if OBJECTIVES[self.args.objective].over_group:
            batch["group"] = (torch.arange(rows, device=batch["canvas_ids"].device) + first) // group
        self.log_metric("prompt_masked", prompt_masked(batch))
        self.score_rollout(batch)
        self.evaluation_rollouts += self.mode == "eval"

    def score_rollout(self, batch: Batch) -> None:
        """Adds old and reference log-probs, (rows, mu, views, canvas) each, where the loss needs them."""
        started, args = time.perf_counter(), self.args
        size = args.per_device_train_batch_size if self.mode == "train" else args.per_device_eval_batch_size
        score_one = partial(self.scores, size=size)
        only_first = self.mode == "eval" or updates_are_alike(batch, self.accelerator.gather)  # then they score alike
        with self.without_checkpointing():
            if args.old_as_sampled:
                batch["old_view_logps"] = view_logps_as_sampled(batch)
            elif args.needs_old_logps:
                batch["old_view_logps"] = score_updates(self.model, batch, score_one, only_first)
            if args.needs_reference:
                with self.reference() as model:
                    batch["ref_view_logps"] = score_updates(model, batch, score_one, only_first)
        self.log_metric("seconds/scoring", time.perf_counter() - started)

    def scores(self, model: Any, batch: Batch, views: Views, **options: Any) -> Scores:
        """`score_batch` with this run's mask token and precision; adds to `compute`."""
        with self.accelerator.autocast():
            options |= {"mask_token_id": self.mask_token_id, "views_at_once": self.args.views_at_once}
            options["distribution"] = self.sampling.recorded
            scores = score_batch(model, batch, views, **options)
        self.compute = self.compute + scores.compute
        return scores

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The loss under the views, old and reference log-probs of the current inner update."""
        training, args, objective = self.mode == "train", self.args, OBJECTIVES[self.args.objective]
        if training and objective.over_group and self.micro_step % args.steps_per_generation == 0:
            self.compare_rows(model)
        scores = self.scores(model, batch, views_of(batch, self.update), with_entropies=True)
        micro_batches = self.accelerator.num_processes * (args.steps_per_generation if training else 1)
        given = args.reads_old_logps, args.sampling_weight_cap, args.views_per_draw, block_size(self.model.config)
        inputs = loss_inputs(batch, scores, self.update, micro_batches, *given)
        accumulated = self.current_gradient_accumulation_steps if training else 1
        metrics: dict[str, float] = {}
        if objective.loss is None:
            loss = self.trl_loss(inputs, scores.entropies, batch)
        else:
            loss, metrics = objective(inputs, args)
            loss = loss / accumulated
            metrics["entropy"] = mean_entropy(inputs, scores.entropies, self.accelerator.gather)
        if args.beta and not args.has_trls_kl:
            penalty = PENALTIES[args.kl](inputs, args)
            metrics["kl"] = self.accelerator.gather(penalty.detach()).mean().item()
            loss = loss + args.beta * penalty / accumulated
        decode = self.text_tokenizer.decode
        self.require_finite(loss.detach(), lambda: rows_to_blame(batch, inputs.logps.detach(), decode))
        if args.reads_old_logps:
            metrics["ratio_max"] = largest_ratio(inputs, self.accelerator.gather)
        if self.update == 0 and "rollout_logps" in batch:
            logps = sampled_logps(batch, ESTIMATORS[args.estimator].replays_writes)
            metrics |= sampling_gap(logps, inputs, self.accelerator.gather, args.sampling_weight_cap)
        for name, value in metrics.items():
            self.log_metric(name, value)
        return loss

    compare_rows = compare_groups

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.ending.guard():
            return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started, processor, rollouts = time.perf_counter(), time.process_time(), len(self.rollout_seconds)
        loss = super().training_step(*args, **kwargs)
        self.log_metric("seconds/processor", time.process_time() - processor)
        self.log_metric("seconds/update", time.perf_counter() - started - sum(self.rollout_seconds[rollouts:]))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["peak_memory_gb"] = peak_memory_gb()
        logs["compute_tokens"] = total_compute(self)
        super().log(logs, start_time)

    def save_extra(self, folder: Path) -> None:
        save_rollout(self, folder)

    def load_extra(self, folder: Path) -> None:
        load_rollout(self, folder)
