"""diffu-GRPO (d1, arXiv 2504.12216): GRPO whose completions are sampled and scored by masked diffusion.

The steps for each batch: `rollout` samples one canvas per prompt; TRL computes rewards and advantages; `after_rollout`
draws the views of every inner update (`d1/scoring/estimators.py`) and scores old and reference log-probabilities in
them; `loss` selects the views of the current update, scores the policy in them, and calls TRL's loss or one of
`objectives.py`. The overrides of TRL's own methods are in `bridge.py`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from d1.masking import keyed_generator
from d1.models.attention import require_prepared
from d1.models.kinds import block_size
from d1.rl.batch import (
    SCORED,
    Batch,
    Everyone,
    count,
    draw_updates,
    evaluating,
    in_parts,
    keep_prompts,
    largest_ratio,
    log_rollout,
    loss_inputs,
    mean_entropy,
    peak_memory_gb,
    prompt_masked,
    recorded,
    reshaped,
    rows_to_blame,
    sampled_logps,
    sampled_rows,
    sampling_gap,
    score_batch,
    score_more,
    score_updates,
    texts_of,
    updates_are_alike,
    view_logps_as_sampled,
    views_of,
)
from d1.rl.bridge import REWARD, CanvasGRPOTrainer, reference_from, restore_trl, rollout_buffer, trl_counters
from d1.rl.checks import check_trainer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.engines import (
    NoServer,
    ServedRollout,
    ahead_of,
    check_rollout_func,
    check_servers,
    saved,
    servers_of,
    user_rollout,
)
from d1.rl.losses import OBJECTIVES, PENALTIES, sequence_log_ratios
from d1.rl.rewards import guarded
from d1.runs.checkpoints import reading
from d1.sampling import Rollout, SamplingSettings, rollout
from d1.sampling.predict import predict
from d1.scoring import ESTIMATORS, Randomness, Scores, Views
from d1.scoring.views import hidden_states

# --- State rewards ----------------------------------------------------------------------------------------------------
#
# Advantages per state of a rollout, from the reward of the completion that the model would finish there in one pass.
#
# With lam = `state_reward`, a view's share of the reward is [r + lam (r - r_v)] / (1 + lam). Here r is the completion's
# reward, and r_v the reward of the completion in which each token hidden by the view is the most likely one. The
# advantage is this share minus its mean over the prompt's completions in the view with the same number (EGSPO-SA, arXiv
# 2603.12554). For a block-causal model, the state of a block contains the earlier blocks in their final form.


def compare_states(trainer: Any, batch: Batch, group: int, everyone: Everyone) -> Tensor:
    """(rows, views) advantages of the states of all updates' views, relative to the `group` rows of each prompt."""
    scoring = batch["view_weights"].ne(0).any(-1).any(1)
    rewards = []
    with trainer.sampling_model() as model, evaluating(model), trainer.accelerator.autocast():
        for view in range(scoring.shape[1]):
            ids, fed = finished_in_one_pass(model, batch, view, trainer.mask_token_id)
            trainer.compute = trainer.compute + fed
            rewards.append(trainer.rewards_of(texts_of(ids, trainer.eos_token_ids)))
    at_states = torch.stack(rewards, dim=1).to(scoring.device)
    return state_advantages(batch[REWARD], at_states, scoring, trainer.args.state_reward, group, everyone)


@torch.no_grad()
def finished_in_one_pass(model: Any, batch: Batch, view: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """The canvas (rows, canvas) with the most likely token wherever a view hides one, and the number of tokens
    processed."""
    canvas, visible = batch["canvas_ids"], F.pad(batch["prompt_mask"], (0, batch["canvas_ids"].shape[1]), value=1)
    hidden = batch["view_noise"][:, 0, view] & visible.bool()
    clean, length = torch.cat([batch["prompt_ids"], canvas], dim=1), canvas.shape[1]
    if "view_shown" in batch:
        canvas = batch["view_shown"][:, 0, view]
    shown = torch.cat([batch["prompt_ids"], canvas], dim=1)
    options = {"gen_length": length, "mask_token_id": mask_token_id, "shown": shown}
    states = hidden_states(model, clean, hidden, visible, **options)
    ids, *_ = predict(
        model,
        states[None, :, -length:],
        [length] * len(canvas),
        SamplingSettings(gen_length=length, block_length=length, steps=length),
        mask_token_id=mask_token_id,
        generator=None,
        noise_dtype=torch.float32,
    )
    return torch.where(hidden[:, -length:], ids, canvas), visible.sum()


def state_advantages(
    rewards: Tensor, at_states: Tensor, scoring: Tensor, lam: float, group: int, everyone: Everyone
) -> Tensor:
    """The advantages (rows, views), 0 where a view scores nothing.

    Args:
        rewards: (rows,), of the completions.
        at_states: (rows, views), of the completions finished in one pass. All processes have the same number of views.
        scoring: (rows, views) bool, the views that score something.
        group: rows per prompt.
    """
    mixed = (rewards.unsqueeze(1) + lam * (rewards.unsqueeze(1) - at_states)) / (1 + lam)
    groups = everyone.gather(mixed.masked_fill(~scoring, torch.nan)).unflatten(0, (-1, group))
    centred = (groups - groups.nanmean(1, keepdim=True)).flatten(0, 1)
    return centred[everyone.first :][: len(rewards)].nan_to_num(0.0)


# --- Group ratios -----------------------------------------------------------------------------------------------------
#
# The log-ratios of all completions of a prompt, for objectives that weigh a completion against the others.


def compare_groups(trainer: Any, model: Any) -> None:
    """Adds `log_ratios`, those of all rows of each row's prompt, to a rollout's micro-batches at the start of an
    update. The rows were shuffled, and a group may be spread over several processes."""
    update, batches = trainer.update, rollout_buffer(trainer)

    def ratios(batch: Batch) -> Tensor:
        if update == 0 and not trainer.args.old_as_sampled:  # the policy is still the one of the old log-probs
            return torch.zeros_like(batch["advantages"])
        scores = trainer.scores(model, batch, views_of(batch, update))
        return sequence_log_ratios(loss_inputs(batch, scores, update))

    gather = trainer.accelerator.gather
    with trainer.without_checkpointing(), evaluating(model):
        everyone = gather(torch.cat([ratios(batch) for batch in batches]))
    order = gather(torch.cat([batch["group"] for batch in batches])).argsort()
    groups = everyone[order].view(-1, trainer.num_generations)
    for batch in batches:
        batch["log_ratios"] = groups[batch["group"]]


# --- Budget -----------------------------------------------------------------------------------------------------------
#
# End a run when it has processed a given number of tokens, to compare methods at equal compute.
#
# The budget counts what `compute_tokens` logs: 1 per token of a forward pass and 2 for its backward pass
# (`d1.scoring.views.Scores.compute`), in rollouts, scoring and updates, over all processes; evaluations do not count.
# The count survives a resume. The learning rate is constant or linear; a linear one falls to 0 with the budget.


def total_compute(trainer: Any) -> int:
    """Tokens processed so far, over all processes."""
    own = torch.as_tensor(trainer.compute, device=trainer.accelerator.device)
    return int(trainer.accelerator.gather(own).sum())


def is_spent(checkpoint: str | None, budget: int | None) -> bool:
    """Whether the run had reached its budget when it wrote `checkpoint`."""
    if checkpoint is None or budget is None:
        return False
    ranks = range(len([*Path(checkpoint).glob("rollout_rank*.json")]))
    return sum(read_counters(Path(checkpoint), rank).get("compute", 0) for rank in ranks) >= budget


def saved_at(output_dir: str | Path, share: float) -> Path:
    """The folder of the model saved at a share of the budget."""
    return Path(output_dir) / f"at_{share:g}"


class StopAtCompute(TrainerCallback):
    """Saves the model at the first step that reaches each of the `shares` of the budget (`saved_at`), and ends the run
    with a checkpoint at the first step that reaches all of it. A linear learning rate falls with the budget: a step's
    rate depends on what was spent before it. Runs after `LoadExtra`, which restores what was spent."""

    def __init__(self, trainer: Any, budget: int, shares: Sequence[float] = ()) -> None:
        self.trainer, self.budget, self.shares = trainer, budget, shares
        self.spent = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.spent = total_compute(self.trainer)
        if args.lr_scheduler_type.value == "linear":
            scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # Accelerate wraps it
            scheduler.lr_lambdas = [lambda step: self.unspent()] * len(scheduler.lr_lambdas)

    def unspent(self) -> float:
        """The share of the budget that is left; times the peak, it is the learning rate of the next step."""
        return max(0.0, 1 - total_compute(self.trainer) / self.budget)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, self.spent = self.spent, total_compute(self.trainer)
        for share in self.shares:
            if before < share * self.budget <= self.spent:  # equal on all processes; what is on a disk may not be
                save_aside(self.trainer, saved_at(args.output_dir, share))
        if self.spent >= self.budget:
            control.should_log = control.should_save = control.should_training_stop = True

    def last_step(self, state: Any) -> int:
        """The step that will spend the rest of the budget, if steps cost what they have cost so far."""
        if not self.spent:
            return int(state.max_steps)
        return min(math.ceil(state.global_step * self.budget / self.spent), int(state.max_steps))


def save_aside(trainer: Any, folder: Path) -> None:
    """Writes the model to `folder`, completely or not at all."""
    partial = folder.with_name(f".{folder.name}")
    trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    trainer.accelerator.wait_for_everyone()


# --- State ------------------------------------------------------------------------------------------------------------
#
# Save and restore what TRL's checkpoints leave out: the current rollout with its views, the position in the cycle of
# updates, a synced reference, and metrics that are not logged yet. A resumed run then equals an unbroken one bit for
# bit.

REFERENCE = "reference.safetensors"
FORMAT = 5  # of the files
COUNTERS = {"batches", "losses", "compute", "step", "metrics", "completions"}


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rollout_rank{rank}.safetensors", folder / f"rollout_rank{rank}.json"


def save_rollout(trainer: Any, folder: Path) -> None:
    """Writes this rank's buffered micro-batches and counters into the checkpoint `folder`."""
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    batches = rollout_buffer(trainer)
    # Micro-batches are views of one rollout and safetensors refuses shared storage, hence the clones.
    tensors = {
        f"{index}.{key}": value.detach().cpu().clone().contiguous()
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, tensors_file)
    counters = {"format": FORMAT, "batches": len(batches), "losses": trainer.loss_sums(), **trl_counters(trainer)}
    counters |= {"processes": trainer.accelerator.num_processes, "compute": int(trainer.compute)}
    counters_file.write_text(json.dumps(counters, default=list))  # the completions' columns are deques
    if trainer.args.sync_ref_model and trainer.args.should_save:
        reference = {name: value.detach().cpu().contiguous() for name, value in reference_weights(trainer)}
        save_file(reference, folder / REFERENCE)
    if trainer.ahead is not None:
        trainer.ahead.save(folder)


def reference_weights(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()


def read_counters(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The counters of one process in a checkpoint. Raises ValueError if the file is missing or damaged."""
    file = _files(folder, rank)[1]
    with reading(file):
        counters = json.loads(file.read_text())
        if not isinstance(counters, dict) or "step" not in counters:
            raise ValueError("not the counters of a run")
        if missing := COUNTERS - counters.keys() if counters.get("format") == FORMAT else ():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        return counters


def check_rollout(folder: Path, args: Any) -> None:
    """Raises ValueError for a checkpoint whose rollout is incomplete or that a run of `args` cannot continue."""
    counters = read_counters(folder)
    if counters.get("format") != FORMAT:
        raise ValueError(
            f"{folder} was written by another version, which stores rollouts in another format: finish the run with "
            "that version, or start a new run from its weights (--model_path, another --output_dir)"
        )
    processes = counters.get("processes", len([*folder.glob("rollout_rank*.json")]))
    if processes != args.world_size:
        raise ValueError(
            f"{folder} was written by {processes} processes, and a rollout in progress cannot continue with "
            f"{args.world_size}: start the run with {processes}"
        )
    for rank in range(processes):
        file, batches = _files(folder, rank)[0], read_counters(folder, rank)["batches"]
        with reading(file), safe_open(file, "pt") as tensors:
            names = {*tensors.keys()}
            columns = {name.partition(".")[2] for name in names} | {"canvas_ids", "view_noise", "view_weights"}
            if wrong := names ^ {f"{index}.{column}" for index in range(batches) for column in columns}:
                raise ValueError(f"{batches} micro-batches of a rollout have other tensors: {min(wrong)}")
    if args.rollout_staleness:
        saved(folder)
    if args.sync_ref_model:
        with reading(folder / REFERENCE), safe_open(folder / REFERENCE, "pt"):
            pass


def load_rollout(trainer: Any, folder: Path) -> None:
    """Puts back what `save_rollout` wrote. Raises ValueError as `check_rollout` does, or for a damaged file."""
    check_rollout(folder, trainer.args)
    rank = trainer.accelerator.process_index
    tensors_file, counters_file = _files(folder, rank)
    counters = read_counters(folder, rank)
    batches: list[Batch] = [{} for _ in range(counters["batches"])]
    with reading(tensors_file):
        for name, value in load_file(tensors_file).items():
            index, column = name.split(".", 1)
            batches[int(index)][column] = value.to(trainer.accelerator.device)
    with reading(counters_file):
        trainer.set_loss_sums(counters["losses"])
        trainer.compute = counters["compute"]
        restore_trl(trainer, batches, counters)
    if trainer.args.sync_ref_model:
        with reading(folder / REFERENCE):
            reference = load_file(folder / REFERENCE)
            for name, value in reference_weights(trainer):
                value.data.copy_(reference[name])
    if trainer.ahead is not None:
        trainer.ahead.load(folder)


# --- Without servers --------------------------------------------------------------------------------------------------
#
# How a run ends that has lost all of its rollout servers: with a checkpoint that continues it to the same bits.


class Ending(TrainerCallback):
    """Saves the state before the optimizer step that needed a server, and removes the weights written for servers."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.step = trainer, -1
        trainer.add_callback(self)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Keeps what the first micro-batches of a step change, if there are servers."""
        trainer = self.trainer
        if trainer.servers is None:
            return
        self.step, self.compute = trainer.state.global_step, trainer.compute
        self.tokens = trainer.state.num_input_tokens_seen
        self.batches, self.counters = rollout_buffer(trainer), copy.deepcopy(trl_counters(trainer))
        settings = trainer.args
        updates = settings.steps_per_generation * settings.num_iterations
        inside = updates % settings.gradient_accumulation_steps != 0  # rollouts begin in the middle of a step
        self.losses = trainer.loss_sums() if inside else None
        # TRL shuffles a rollout's rows.
        self.random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around `train`. Raises NoServer with the checkpoint's name."""
        trainer = self.trainer
        try:
            yield
        except NoServer as error:
            step = trainer.state.global_step
            if not step:
                raise
            checkpoint = Path(str(trainer.args.output_dir)) / f"checkpoint-{step}"
            if not checkpoint.exists():
                self.rewind()
                trainer.save_now()
            raise NoServer(f"{error}. The run is saved in {checkpoint}: continue it with --resume") from error
        finally:
            if trainer.ahead is not None:
                trainer.ahead.close()
            if trainer.servers is not None:
                trainer.servers.close()

    def rewind(self) -> None:
        """Goes back to the start of the step, unless the step was done and its evaluation lacked the server."""
        trainer = self.trainer
        if self.step != trainer.state.global_step:
            return
        trainer.compute, trainer.state.num_input_tokens_seen = self.compute, self.tokens
        restore_trl(trainer, self.batches, self.counters)
        if self.losses is not None:
            trainer.set_loss_sums(self.losses)
        own, numpys, torchs = self.random
        random.setstate(own)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)


# --- Trainer ----------------------------------------------------------------------------------------------------------

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

        rollout_func: TRL's `f(prompts, trainer)`, which samples instead of the trainer (`d1/rl/engines.py`).

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
        block_causal = block_size(self.model.config) is not None
        split = self.weights_are_split, self.samples_in_step
        check_trainer(args, self.sampling, self.reward_funcs, block_causal, *split)
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
            options["distribution"] = self.sampling.record_distribution
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
