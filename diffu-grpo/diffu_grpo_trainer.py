"""diffu-GRPO (d1, arXiv 2504.12216): GRPO whose completions are sampled and scored by masked diffusion.

A batch's way: `rollout` samples a canvas a prompt; TRL computes rewards and advantages; `after_rollout` draws the views
of every inner update (`d1/scoring/estimators.py`) and scores old and reference log-probabilities in them; `loss` picks
the views of the update at hand, scores the policy in them, and hands all of it to TRL's loss or one of `objectives.py`.
What this does to TRL's own methods is in `trl_bridge.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffu_grpo_config import DiffuGRPOConfig
from objectives import OBJECTIVES, LossInputs
from rewards import guarded
from rollout_state import RestoreRollout, save_rollout
from torch import Tensor
from trl.trainer.utils import pad
from trl_bridge import CanvasGRPOTrainer, TokenRecord, reference_from
from update_metrics import largest_ratio, peak_memory_gb, rows_to_blame, sampling_gap
from update_views import Batch, draw_updates, evaluating, score_batch, score_updates, updates_are_alike, views_of

from d1.masking import keyed_generator
from d1.models.attention import require_prepared
from d1.runs.checkpoints import staged_checkpoint
from d1.runs.divergence import bad_loss, check_weights
from d1.sampling import Rollout, rollout
from d1.sampling.caching import check_cacheable
from d1.scoring import SampledRows, Scores, Views

# Streams of random numbers: views and rollouts, in training and evaluation, never share one.
STREAMS = {("views", "train"): 0, ("rollout", "train"): 1, ("views", "eval"): 2, ("rollout", "eval"): 3}


def eos_cut(completion_ids: Tensor, eos_token_ids: list[int]) -> Tensor:
    """(rows, tokens) bool, true up to and including each row's first EOS (all true without one)."""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() == 0


class DiffuGRPOTrainer(CanvasGRPOTrainer):
    """GRPO for masked diffusion language models.

    Args:
        model: from `d1.models.load_model`, so that logits score the token at their own position.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float]`.
        args: `DiffuGRPOConfig`.
        train_dataset: rows with a `prompt` (chat messages) and the columns the rewards need.
        task_name: named in the error when a reward raises.

    The remaining arguments are TRL's. Tools, environments and `rollout_func` are refused.
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
        **kwargs: Any,
    ) -> None:
        for name in ("tools", "rollout_func", "environment_factory"):
            if kwargs.get(name):
                raise ValueError(f"{name} is not supported: diffusion rollouts are sampled as one canvas")
        mask_id = args.mask_id if args.mask_id is not None else processing_class.mask_token_id
        if mask_id is None:
            raise ValueError("the tokenizer has no mask token: set its mask_token, or pass mask_id")
        require_prepared(model)
        self.mask_token_id = mask_id
        self.sampling = args.sampling_settings()
        if self.sampling.cache:
            check_cacheable(model.config)
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        functions = [guarded(function, task_name, Path(args.output_dir)) for function in functions]
        with reference_from(model):
            super().__init__(
                model=model,
                reward_funcs=functions,
                args=args,
                train_dataset=train_dataset,
                processing_class=processing_class,
                **kwargs,
            )
        if args.sync_ref_model and self.weights_are_split:
            raise ValueError(
                "sync_ref_model keeps a reference that no folder holds, and under ZeRO-3 or FSDP a checkpoint cannot "
                "carry it: use DDP or ZeRO-2, or leave sync_ref_model off"
            )
        if self.samples_in_step and (self.sampling.rule or args.eos_stop):
            raise ValueError(
                "a parallel sampler and eos_stop take as many forward passes as the text asks for, but processes that "
                "each hold a part of the weights must take equally many: use DDP, ZeRO-2, or ZeRO-3 with "
                "ds3_gather_for_generation, or leave both off"
            )
        self.eos_stop = not self.samples_in_step if args.eos_stop is None else args.eos_stop
        self.evaluation_rollouts = 0
        self.rollout_seconds: list[float] = []  # of each rollout, its rewards and its scoring
        self.add_callback(RestoreRollout(self))

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    def generators(self, purpose: str, rows: int) -> list[torch.Generator]:
        """One generator a row, a function of (seed, stream, rollout, row over all ranks) alone."""
        rollout = self.micro_step if self.mode == "train" else self.evaluation_rollouts
        first = self.accelerator.process_index * rows
        stream = STREAMS[purpose, self.mode]
        device = "cpu" if purpose == "views" else self.accelerator.device
        return [keyed_generator(self.args.seed, stream, rollout, first + row, device=device) for row in range(rows)]

    # --- Rollout ------------------------------------------------------------------------------------------------------

    def tokenized(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The end of each prompt; the training script lets none through that is too long unless asked to."""
        return [ids[-self.args.max_prompt_length :] for ids in prompt_ids]

    def rollout(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[TokenRecord]]:
        """Samples one canvas a prompt; of each token the record has log-prob, entropy and step of its reveal."""
        started = time.perf_counter()
        tensors = [torch.tensor(ids) for ids in prompt_ids]
        padding = {"padding_side": "left", "pad_to_multiple_of": self.pad_to_multiple_of}
        ids = pad(tensors, padding_value=self.text_tokenizer.pad_token_id, **padding).to(self.accelerator.device)
        mask = pad([torch.ones_like(row) for row in tensors], padding_value=0, **padding).to(ids.device)
        sampled = self.sample(ids, mask)
        record = torch.stack([sampled.logps, sampled.entropies, sampled.reveal_steps.to(sampled.logps.dtype)], dim=-1)
        completions, record = sampled.ids[:, ids.shape[1] :].cpu(), record.cpu()  # these two wait for the device
        kept = eos_cut(completions, self.eos_token_ids)
        seconds = time.perf_counter() - started
        self.log_metric("seconds/rollout", seconds)
        self.log_metric("sampling/forward_passes", sampled.passes.float().mean().item())
        self.log_metric("sampling/forward_tokens", sampled.forward_tokens.float().mean().item())
        self.log_metric("rollout_tokens_per_second", completions.numel() * self.accelerator.num_processes / seconds)
        rows = list(zip(completions, record, kept, strict=True))
        return [row[keep].tolist() for row, _, keep in rows], [numbers[keep].tolist() for _, numbers, keep in rows]

    def sample(self, ids: Tensor, mask: Tensor) -> Rollout:
        """The rollout of prompts (rows, prompt), without gradients or dropout, `rollout_batch_size` rows at a time."""
        generators = self.generators("rollout", len(ids))
        size = self.args.rollout_batch_size or len(ids)
        with self.sampling_model() as model, evaluating(model), self.accelerator.autocast():
            parts = [
                rollout(
                    model,
                    ids[start : start + size],
                    mask[start : start + size],
                    self.sampling,
                    mask_token_id=self.mask_token_id,
                    generator=generators[start : start + size],
                    eos_token_ids=self.eos_token_ids if self.eos_stop else None,
                )
                for start in range(0, len(ids), size)
            ]
        return Rollout(**{field.name: torch.cat([getattr(p, field.name) for p in parts]) for field in fields(Rollout)})

    def rollout_finished(self, seconds: float) -> None:
        if self.mode == "train":
            self.rollout_seconds.append(seconds)
        else:
            self.evaluation_rollouts += 1

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation_rollouts = 0  # every evaluation sees the same random numbers, so that two are comparable
        return super().evaluation_loop(*args, **kwargs)

    # --- Views and their scores ---------------------------------------------------------------------------------------

    def after_rollout(self, batch: Batch, record: Tensor) -> None:
        """Adds the record and, (rows, mu, ...) each, views, old and reference log-probabilities of every update."""
        prompt, scored = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
        logps, entropies, steps = record.unbind(-1)
        steps = steps.long().masked_fill(~scored, -1)
        batch |= {"rollout_logps": logps, "rollout_entropies": entropies, "reveal_steps": steps}
        sampled = SampledRows(
            prompt_ids=batch["prompt_ids"],
            attention_mask=batch["prompt_mask"],
            maskable=prompt & ~self.protected(batch["prompt_ids"]),
            completion_ids=batch["completion_ids"],
            scored=scored,
            reveal_steps=steps,
            logps=logps,
            entropies=entropies,
            gen_length=self.max_completion_length,
        )
        batch |= draw_updates(sampled, self.generators("views", len(prompt)), self.args)
        noise = batch["view_noise"]
        hidden = noise[..., : prompt.shape[1]].sum() / (prompt.sum() * noise.shape[1:3].numel())
        self.log_metric("prompt_masked", hidden.item())
        self.score_rollout(batch)

    def protected(self, prompt_ids: Tensor) -> Tensor:
        """(rows, prompt) bool, the special tokens if they are never to be hidden."""
        if not self.args.protect_special_tokens:
            return torch.zeros_like(prompt_ids, dtype=torch.bool)
        # Those without a role of their own are only flagged, such as LLaDA's header tokens.
        flagged = [index for index, token in self.text_tokenizer.added_tokens_decoder.items() if token.special]
        special = torch.tensor([*self.text_tokenizer.all_special_ids, *flagged], device=prompt_ids.device)
        return torch.isin(prompt_ids, special)

    def score_rollout(self, batch: Batch) -> None:
        """Adds old and reference log-probs, (rows, mu, tokens) each, where the loss needs them."""
        started, args = time.perf_counter(), self.args
        size = args.per_device_train_batch_size if self.mode == "train" else args.per_device_eval_batch_size
        score_one = partial(self.scores, size=size)
        # An evaluation looks at the first update alone, and equal views have equal scores.
        only_first = self.mode == "eval" or updates_are_alike(batch)
        with self.without_checkpointing():
            if self.needs_old_logps:
                batch["old_per_token_logps"] = score_updates(self.model, batch, score_one, only_first)
            if self.beta != 0.0:
                with self.reference() as model:
                    batch["ref_per_token_logps"] = score_updates(model, batch, score_one, only_first)
        self.log_metric("seconds/scoring", time.perf_counter() - started)

    def scores(self, model: Any, batch: Batch, views: Views, **options: Any) -> Scores:
        """`score_batch` with this run's mask token, canvas and precision."""
        with self.accelerator.autocast():
            return score_batch(
                model,
                batch,
                views,
                mask_token_id=self.mask_token_id,
                gen_length=self.max_completion_length,
                **options,
            )

    # --- Loss ---------------------------------------------------------------------------------------------------------

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The loss under the views, old and reference log-probs of the inner update at hand."""
        update = self.micro_step // self.args.steps_per_generation % self.num_iterations if self.mode == "train" else 0
        scores = self.scores(model, batch, views_of(batch, update), with_entropies=True)
        names = [name for name in ("old_per_token_logps", "ref_per_token_logps") if name in batch]
        stored = {name: batch[name][:, update] for name in names}
        old = stored.get("old_per_token_logps", scores.logps.detach())
        if self.args.objective == "trl":
            loss = self.trl_loss(scores, batch | stored)
        else:
            inputs = LossInputs(
                scores.logps, old, stored.get("ref_per_token_logps"), batch["advantages"], batch["completion_mask"]
            )
            loss, metrics = OBJECTIVES[self.args.objective](inputs, self.args)
            for name, value in metrics.items():
                self.log_metric(name, value)
            loss = loss / (self.current_gradient_accumulation_steps if self.mode == "train" else 1)
        self.measure(loss.detach(), scores.logps.detach(), old, batch, first=update == 0)
        return loss

    def measure(self, loss: Tensor, logps: Tensor, old: Tensor, batch: Batch, *, first: bool) -> None:
        """Logs ratios, and stops the run at a loss that is not finite."""
        if not torch.isfinite(loss):
            rows = rows_to_blame(batch, logps, self.text_tokenizer.decode)
            step, rank = self.state.global_step, self.args.process_index
            raise bad_loss(loss.item(), rows, str(self.args.output_dir), step, rank)
        gather = self.accelerator.gather
        metrics = {"ratio_max": largest_ratio(logps, old, batch["completion_mask"], gather)}
        for name, value in (metrics | (sampling_gap(batch, logps, gather) if first else {})).items():
            self.log_metric(name, value)

    # --- Logs and checkpoints -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started, rollouts = time.perf_counter(), len(self.rollout_seconds)
        loss = super().training_step(*args, **kwargs)
        self.log_metric("seconds/update", time.perf_counter() - started - sum(self.rollout_seconds[rollouts:]))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["peak_memory_gb"] = peak_memory_gb()
        if "train_loss" in logs:
            logs["train_loss"] = self.mean_loss()
        super().log(logs, start_time)

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        """A checkpoint appears whole or not at all, and holds the rollout in use."""
        with staged_checkpoint(self) as folder:
            yield
            save_rollout(self, folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        check_weights(self.model, self.state.global_step)
        super().save_model(output_dir, _internal_call)
