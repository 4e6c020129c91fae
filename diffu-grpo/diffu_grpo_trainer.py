"""diffu-GRPO (d1, arXiv 2504.12216) on TRL's GRPOTrainer: diffusion rollouts and one-step mean-field log-probabilities.

What TRL does is left to TRL: rewards, advantages, losses, logging. What differs is five overrides:
`__init__`, `_generate_single_turn` (rollout and its prompt masks), `_generate_and_score_completions` (keeps the masks
with their samples), `_get_per_token_logps_and_entropies` (the estimator) and `_compute_loss` (picks mask k for inner
update k).
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffu_grpo_config import DiffuGRPOConfig
from reference_model import reference_from
from rewards import guarded, with_accuracy
from rollout_state import EpochSampler, RestoreRollout, save_rollout
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import _ForwardRedirection, unwrap_model_for_generation
from trl.trainer.utils import pad

from d1.masking import keyed_generator, prompt_masks
from d1.runs.checkpoints import staged_checkpoint
from d1.runs.processes import unwrapped
from d1.sampling import Rollout, rollout
from d1.sampling.caching import check_cacheable
from d1.scoring.views import mean_field_scores

# Streams of random numbers: masks and rollouts, in training and evaluation, never share one.
STREAMS = {("mask", "train"): 0, ("rollout", "train"): 1, ("mask", "eval"): 2, ("rollout", "eval"): 3}


def in_step_to_sample(dist: Any, ds3_gather_for_generation: bool) -> bool:
    """Whether every forward pass of a rollout waits for all processes, because each holds a part of the weights."""
    return dist.is_fsdp or (dist.is_zero3 and not ds3_gather_for_generation)


def eos_cut(completion_ids: Tensor, eos_token_ids: list[int]) -> Tensor:
    """(rows, tokens) bool, true up to and including each row's first EOS (all true without one)."""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() == 0


class DiffuGRPOTrainer(GRPOTrainer):
    """GRPO for masked diffusion language models.

    Args:
        model: from `d1.models.load_model`, so that logits score the token at their own position.
        reward_funcs: TRL's signature, `f(prompts, completions, **columns) -> list[float]`.
        args: `DiffuGRPOConfig`.
        train_dataset: rows with a `prompt` (chat messages) and the columns the rewards need.
        task_name: named in the error when a reward raises.

    The remaining arguments are TRL's. Tools, environments and `rollout_func` do not exist for a canvas of masks.
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
        self.mask_token_id = mask_id
        sampler = args.chosen_sampler()
        if sampler.kv_cache:
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
        if args.sync_ref_model and (self._dist.is_zero3 or self._dist.is_fsdp):
            raise ValueError(
                "sync_ref_model keeps a reference that no folder holds, and under ZeRO-3 or FSDP a checkpoint cannot "
                "carry it: use DDP or ZeRO-2, or leave sync_ref_model off"
            )
        in_step = self.accelerator.num_processes > 1 and in_step_to_sample(self._dist, args.ds3_gather_for_generation)
        if in_step and (sampler.reveal or args.eos_stop):
            raise ValueError(
                "a parallel sampler and eos_stop take as many forward passes as the text asks for, but processes that "
                "each hold a part of the weights must take equally many: use DDP, ZeRO-2, or ZeRO-3 with "
                "ds3_gather_for_generation, or leave both off"
            )
        self.eos_stop = not in_step if args.eos_stop is None else args.eos_stop
        self._eval_rollouts = 0
        self.rollout_seconds: list[float] = []  # of each rollout, its rewards and its scoring
        self.resumed_from: Path | None = None
        self.add_callback(RestoreRollout(self))

    # --- Rollout ---------------------------------------------------------------------------------------------------

    def _generators(self, purpose: str, rows: int) -> list[torch.Generator]:
        """One generator a row, a function of (seed, stream, rollout, row over all ranks) alone."""
        mode = "train" if self.model.training else "eval"
        rollout = self._step if mode == "train" else self._eval_rollouts
        first = self.accelerator.process_index * rows
        stream = STREAMS[purpose, mode]
        device = "cpu" if purpose == "mask" else self.accelerator.device
        return [keyed_generator(self.args.seed, stream, rollout, first + row, device=device) for row in range(rows)]

    def _draw_prompt_masks(self, prompt_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(rows, mu, prompt) bool: mask k is the one of inner update k."""
        maskable = attention_mask.bool()
        if self.args.protect_special_tokens:
            # Those without a role of their own are only flagged, such as LLaDA's header tokens.
            flagged = [index for index, token in self._tokenizer.added_tokens_decoder.items() if token.special]
            special = torch.tensor([*self._tokenizer.all_special_ids, *flagged], device=prompt_ids.device)
            maskable &= ~torch.isin(prompt_ids, special)
        return prompt_masks(
            maskable,
            self.num_iterations,
            self.args.p_mask_prompt,
            self._generators("mask", len(prompt_ids)),
            fixed=not self.args.random_masking,
        )

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], Any, Any]:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("images are not supported: masked diffusion language models take text")
        # Only the end of a prompt that is too long is kept; the training script lets none through unless asked to.
        return [ids[-self.args.max_prompt_length :] for ids in prompt_ids], images, fields

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[list[int]], None]:
        """Samples one canvas a prompt; completions are cut after their first EOS."""
        started = time.perf_counter()
        tensors = [torch.tensor(ids) for ids in prompt_ids]
        padding = {"padding_side": "left", "pad_to_multiple_of": self.pad_to_multiple_of}
        ids = pad(tensors, padding_value=self._tokenizer.pad_token_id, **padding).to(self.accelerator.device)
        mask = pad([torch.ones_like(row) for row in tensors], padding_value=0, **padding).to(ids.device)
        self._prompt_noise = self._draw_prompt_masks(ids, mask)

        sampled = self._sample(ids, mask)
        completions = sampled.ids.cpu()  # which waits for the device, so that the clock below is right
        self._rollout_logps = sampled.logps
        kept = eos_cut(completions, self.eos_token_ids)
        seconds = time.perf_counter() - started
        self._log("prompt_masked", (self._prompt_noise.sum() / (mask.sum() * self.num_iterations)).item())
        self._log("seconds/rollout", seconds)
        self._log("sampling/forward_passes", sampled.passes.float().mean().item())
        self._log("sampling/forward_tokens", sampled.tokens.float().mean().item())
        self._log("rollout_tokens_per_second", completions.numel() * self.accelerator.num_processes / seconds)
        return [row[keep].tolist() for row, keep in zip(completions, kept, strict=True)], None

    def _sample(self, ids: Tensor, mask: Tensor) -> Rollout:
        """Completions, ids (rows, max_completion_length), sampled without gradients or dropout."""
        generators = self._generators("rollout", len(ids))
        size = self.args.rollout_batch_size or len(ids)
        parts = []
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
            evaluating(model),
            self.accelerator.autocast(),
        ):
            for start in range(0, len(ids), size):
                rows = slice(start, start + size)
                part = rollout(
                    model,
                    ids[rows],
                    mask[rows],
                    mask_token_id=self.mask_token_id,
                    generator=generators[rows],
                    eos_token_ids=self.eos_token_ids if self.eos_stop else None,
                    **self.args.sampling_settings(),
                )
                parts.append((part.ids[:, ids.shape[1] :], part.logps, part.passes, part.tokens))
        return Rollout(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with this rollout's prompt masks and log-probs added, to be shuffled and split with their samples."""
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        masks, prompts = self._prompt_noise.shape, output["prompt_ids"].shape
        if masks[::2] != prompts:
            raise RuntimeError(f"prompt masks {tuple(masks)} do not fit the prompts {tuple(prompts)}")
        output["prompt_noise"] = self._prompt_noise
        # To the width of the completions, which end where the longest does.
        beyond = output["completion_ids"].shape[1] - self._rollout_logps.shape[1]
        output["rollout_logps"] = F.pad(self._rollout_logps, (0, beyond))
        self._generation_seconds = time.perf_counter() - started
        if self.model.training:
            self.rollout_seconds.append(self._generation_seconds)
        else:
            self._eval_rollouts += 1
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        rewards = with_accuracy(self, super()._calculate_rewards, *args, **kwargs)
        self._log("seconds/reward", time.perf_counter() - started)
        return rewards

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._eval_rollouts = 0  # every evaluation sees the same random numbers, so that two are comparable
        return super().evaluation_loop(*args, **kwargs)

    # --- Estimator -------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Mean-field log-probs under `self._prompt_noise`.

        In the loss the noise is (rows, prompt), that of one inner update, and the log-probs are (rows, tokens). On the
        rollout it is (rows, mu, prompt), all of them, and the log-probs are (rows, mu, tokens).
        """
        prompt_ids, completion_ids = input_ids[:, :-logits_to_keep], input_ids[:, -logits_to_keep:]
        prompt_mask = attention_mask[:, :-logits_to_keep]
        if self._prompt_noise.dim() == 3:
            started = time.perf_counter()
            # Equal masks (fixed, or empty) give the same log-probs, and an evaluation looks at the first mask alone.
            differ = self.args.random_masking and self.args.p_mask_prompt > 0
            masks = self.num_iterations if differ and self.model.training else 1
            with evaluating(model):
                scored = [
                    self._score(model, prompt_ids, prompt_mask, completion_ids, noise, batch_size)[0]
                    for noise in self._prompt_noise.unbind(1)[:masks]
                ]
            self._log("seconds/scoring", time.perf_counter() - started)
            return torch.stack(scored, dim=1).expand(-1, self.num_iterations, -1), None, None
        logps, entropies = self._score(
            model, prompt_ids, prompt_mask, completion_ids, self._prompt_noise, batch_size, compute_entropy
        )
        self._new_logps = logps.detach()
        return logps, entropies, None

    def _score(
        self,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        noise: Tensor,
        batch_size: int | None,
        compute_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (rows, tokens) in fp32, and entropies, in micro-batches of `batch_size`; 0 after a row's EOS."""
        size = batch_size or len(prompt_ids)
        # TRL may pad completions past the canvas (pad_to_multiple_of); nothing is scored there, its mask is 0.
        width = min(completion_ids.shape[1], self.max_completion_length)
        scored = eos_cut(completion_ids, self.eos_token_ids)
        bare = unwrapped(self.accelerator, model)
        score = functools.partial(
            mean_field_scores,
            bare,
            mask_token_id=self.mask_token_id,
            gen_length=self.max_completion_length,
            with_entropies=compute_entropy,
        )
        logps, entropies = [], []
        for start in range(0, len(prompt_ids), size):
            rows = slice(start, start + size)
            ids, mask, completion = prompt_ids[rows], prompt_mask[rows], completion_ids[rows, :width]
            with self.accelerator.autocast():
                # Through the wrapper's forward: DDP, FSDP and DeepSpeed prepare gradients and weights there.
                row_logps, row_entropies = _ForwardRedirection()(
                    model, bare, score, ids, mask, completion, noise[rows], scored=scored[rows, :width]
                )
            logps.append(row_logps)
            entropies.append(row_entropies)
        beyond = (0, completion_ids.shape[1] - width)
        return F.pad(torch.cat(logps), beyond), F.pad(torch.cat(entropies), beyond) if compute_entropy else None

    # --- Loss ------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss under the mask, old and reference log-probs of this inner update."""
        training = self.model.training
        update = self._step // self.args.steps_per_generation % self.num_iterations if training else 0
        inputs = dict(inputs)
        for key in ("old_per_token_logps", "ref_per_token_logps"):
            if inputs.get(key) is not None:
                inputs[key] = inputs[key][:, update]
        self._prompt_noise = inputs["prompt_noise"][:, update]
        loss = super()._compute_loss(model, inputs)
        self._check_finite(loss, inputs)
        old = inputs.get("old_per_token_logps")
        ratios = torch.ones_like(self._new_logps) if old is None else (self._new_logps - old).exp()
        largest = ratios.masked_fill(~inputs["completion_mask"].bool(), 0.0).max()
        self._log("ratio_max", self.accelerator.gather(largest).max().item())
        if update == 0:
            self._log_mismatch(inputs["rollout_logps"], inputs["completion_mask"].bool())
        return loss

    def _log_mismatch(self, rollout_logps: Tensor, scored: Tensor) -> None:
        """How far the policy that sampled is from the one that is trained, before the first inner update.

        The mean difference of log-probs estimates the KL from the first to the second (Schulman's k1). Even the exact
        sampler's is not zero: its tokens were revealed in the light of others, the estimator scores each alone.
        """
        gap = (rollout_logps - self._new_logps).masked_fill(~scored, 0.0)
        sums = torch.stack([gap.sum(), gap.abs().sum(), scored.sum()])
        total, absolute, count = self.accelerator.gather(sums).view(-1, 3).sum(0).tolist()
        largest = self.accelerator.gather((-gap).masked_fill(~scored, -torch.inf).max().exp()).max().item()
        self._log("sampling/logp_difference_mean", total / max(count, 1))
        self._log("sampling/logp_difference_abs", absolute / max(count, 1))
        self._log("sampling/ratio_max", largest)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started, self._generation_seconds = time.perf_counter(), 0.0
        loss = super().training_step(*args, **kwargs)
        self._log("seconds/update", time.perf_counter() - started - self._generation_seconds)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["peak_memory_gb"] = peak_memory_gb()
        if "train_loss" in logs:  # Trainer's is the mean since the last resume
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _check_finite(self, loss: Tensor, inputs: dict[str, Any]) -> None:
        if torch.isfinite(loss):
            return
        path = Path(self.args.output_dir) / f"bad_loss_step{self.state.global_step}_rank{self.args.process_index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        bad = ~(torch.isfinite(self._new_logps).all(-1) & torch.isfinite(inputs["advantages"]))
        offending = bad if bad.any() else torch.ones_like(bad)  # the sum may overflow where no row does

        def text(part: str, row: int) -> str:
            return self._tokenizer.decode(inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()])

        rows = [
            {
                "prompt": text("prompt", row),
                "completion": text("completion", row),
                "advantage": inputs["advantages"][row].item(),
                "logps": self._new_logps[row].tolist(),
            }
            for row in offending.nonzero().flatten().tolist()
        ]
        path.write_text(json.dumps(rows, indent=1))
        raise FloatingPointError(
            f"the loss became {loss.item()} at step {self.state.global_step}; its rows are in {path}. Lower the "
            "learning rate, or look there for what is special about them."
        )

    def _log(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    # --- Checkpoints: the rollout in use is part of the state ---------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with staged_checkpoint(self) as folder:
            super()._save_checkpoint(model, trial)
            save_rollout(self, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.resumed_from = Path(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(
            dataset if dataset is not None else self.train_dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )


def peak_memory_gb() -> float:
    """The most memory this process has held so far: on its GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside, the former mode back after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
