"""Tensors for losses, formulas of losses written out by loops, and TRL's loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from d1.rl.losses import LossInputs


@dataclass
class Settings:
    """The settings that a loss reads; no value is one that would hide a fault, such as 0 or 1."""

    loss_type: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.35
    delta: float | None = None
    max_completion_length: int = 7
    block_length: int = 3
    eubo_beta: float = 1.5
    eubo_share: float = 0.3
    ratio_cap: float = 1.3
    reward_temperature: float = 0.3
    nll_weight: float = 0.4


settings = Settings


def random_inputs(views: int = 3, weights: str = "random", spread: float = 0.5) -> LossInputs:
    """Six rows of two prompts in float64: of full, middle and single length, and one that takes no part.

    Args:
        weights: "random", a third of them 0; or "one", with every view scoring every token of the completion.
        spread: how far apart old, new and reference are; ratios then lie on both sides of the clipping range.
    """
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(5) < torch.tensor([5, 3, 1, 4, 0, 2]).unsqueeze(1)).long()
    shape = (6, views, 5)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight = torch.ones(shape, dtype=torch.float64)
    if weights == "random":
        weight = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        weight = weight.masked_fill(torch.rand(shape, generator=generator) < 1 / 3, 0.0)
    weight = weight * mask.unsqueeze(1)
    scored = weight != 0
    old = -2 + 0.7 * normal()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7, 0.0], dtype=torch.float64)
    return LossInputs(
        view_logps=((old + spread * normal()) * scored).requires_grad_(),
        view_old=old * scored,
        view_reference=(old + spread * normal()) * scored,
        weights=weight,
        advantages=advantages,
        mask=mask,
        tokens=mask.sum(),
        is_right=torch.tensor([True, False, True, True, False, False]),
        views=scored.any(-1).sum(),
        pairs=scored.sum(),
        repeats=(scored.any(-1).sum(1) * mask.sum(1)).sum(),
        active=torch.tensor(4),  # of five rows with an advantage, one takes no part
        reveal_steps=torch.rand(6, 5, generator=generator).argsort(-1),
    )


def micro_batches(inputs: LossInputs, rows: int) -> list[LossInputs]:
    """The same rows in another order, as after TRL's shuffling of a rollout, in parts, as a step gets them."""
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(1))
    parts = len(order) // rows
    of_rows = ("view_logps", "view_old", "view_reference", "weights", "advantages", "mask")
    names = (*of_rows, "reveal_steps", "view_advantages", "log_ratios", "is_right")
    given = [name for name in names if getattr(inputs, name) is not None]
    counts = {
        name: getattr(inputs, name).double() / parts for name in ("tokens", "views", "pairs", "repeats", "active")
    }
    return [
        replace(inputs, **counts, **{name: getattr(inputs, name)[some] for name in given}) for some in order.split(rows)
    ]


def in_parts(row: Any, inputs: LossInputs, settings: Any, rows: int) -> Tensor:
    """The mean of an objective's loss, or of a penalty, over micro-batches of this number of rows."""
    values = [row(part, settings) for part in micro_batches(inputs, rows)]
    return torch.stack([value[0] if isinstance(value, tuple) else value for value in values]).mean()


def divisor(inputs: LossInputs, row: int, view: int, settings: Any) -> float:
    """The divisor of the sum over the tokens of a row, in one view, in the mean that `loss_type` names."""
    rows, views, length = *inputs.weights.shape[:2], int(inputs.mask[row].sum())
    if settings.loss_type == "views":
        sums = [[sum(inputs.weights[i, v].tolist()) for v in range(views)] for i in range(rows)]
        return sum(one > 0 for of_row in sums for one in of_row) * (sums[row][view] or 1.0)
    samples = [(i, v) for i in range(rows) for v in range(views) if (inputs.weights[i, v] * inputs.mask[i]).any()]
    return {
        "sum": rows,
        "grpo": rows * max(length, 1),
        "bnpo": int(inputs.mask.sum()),
        "dapo": int(inputs.tokens),
        "active": 4 * settings.max_completion_length,
        "rounds": sum(int(inputs.mask[i].sum()) for i, _ in samples) / settings.block_length,
        "scored": int((inputs.weights * inputs.mask.unsqueeze(1)).ne(0).sum()),
    }[settings.loss_type]


Slope = tuple[float, float]  # a value and its derivative


def summed(inputs: LossInputs, run: Settings, of: Callable[[float, int], Slope], to: Tensor) -> tuple[float, Tensor]:
    """A sum over the tokens of each view in the mean that `loss_type` names; and its gradient with respect to the
    policy's log-probabilities (rows, views, tokens).

    Args:
        of: (log-ratio, row) -> the function of it and its derivative.
        to: (rows, views, tokens), the log-probabilities with which the policy's are compared.
    """
    total, slope, log_ratios = 0.0, torch.zeros_like(inputs.weights), inputs.view_logps.detach() - to
    for row, view, token in (inputs.weights * inputs.mask.unsqueeze(1)).nonzero().tolist():
        share = inputs.weights[row, view, token].item() / divisor(inputs, row, view, run)
        value, derivative = of(log_ratios[row, view, token].item(), row)
        total += share * value
        slope[row, view, token] = share * derivative
    return total, slope


def clipped(ratio: float, advantage: float, run: Settings) -> Slope:
    """PPO's min(r A, clip(r) A), the first r at most `delta`; and its derivative with respect to r."""
    high = run.epsilon if run.epsilon_high is None else run.epsilon_high
    inside = min(max(ratio, 1 - run.epsilon), 1 + high)
    bounded = ratio if run.delta is None else min(ratio, run.delta)
    if bounded * advantage <= inside * advantage:
        return bounded * advantage, advantage if bounded == ratio else 0.0
    return inside * advantage, 0.0


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    """(rows, views, tokens), the gradient of a loss with respect to the policy's log-probabilities."""
    return torch.autograd.grad(loss, inputs.view_logps, retain_graph=True)[0]


def trl_trainer(model_dir: Any, folder: Any) -> Any:
    """A trainer whose `trl_loss` is TRL's; a test sets `loss_type`, `beta`, ... on it and calls it."""
    from datasets import Dataset

    from d1.models import load_model, load_tokenizer
    from d1.rl.config import DiffuGRPOConfig
    from d1.rl.trainer import DiffuGRPOTrainer

    trainer = DiffuGRPOTrainer(
        model=load_model(str(model_dir)),
        reward_funcs=lambda completions, **columns: [0.0 for _ in completions],
        args=DiffuGRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=6,
            max_completion_length=7,
            block_length=7,
            diffusion_steps=7,
            epsilon=Settings.epsilon,
            epsilon_high=Settings.epsilon_high,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "abc"}]}]),
        processing_class=load_tokenizer(str(model_dir)),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_loss(
    trainer: Any, inputs: LossInputs, importance_sampling_ratio: Tensor | None = None, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """TRL's loss of the weighted sums over views, and what it logs; with the weights that TRL uses for vLLM's
    rollouts."""
    trainer.args.delta = options.pop("delta", None)
    plain = {"beta": 0.0, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.35}
    for name, value in {**plain, **options}.items():
        setattr(trainer, name, value)
    ones = torch.ones(6, 3, dtype=torch.long)
    batch = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.ones_like(inputs.mask),
        "completion_mask": inputs.mask,
        "advantages": inputs.advantages,
        "num_items_in_batch": inputs.tokens,
        "importance_sampling_ratio": importance_sampling_ratio,
    }
    loss = trainer.trl_loss(inputs, torch.zeros_like(inputs.weights[:, 0]), batch)
    trainer.log({})
    return loss, trainer.state.log_history[-1]
