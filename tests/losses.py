"""Tensors for losses, and TRL's loss of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from d1.rl.rows import LossInputs


@dataclass
class Settings:
    """What a loss reads of a run's settings; each value differs from those that would hide a fault, such as 0 or 1."""

    loss_type: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = 0.35
    max_completion_length: int = 7
    eubo_beta: float = 1.5
    eubo_share: float = 0.3
    ratio_cap: float = 1.3


settings = Settings


def random_inputs(views: int = 3, weights: str = "random", spread: float = 0.5) -> LossInputs:
    """Six rows in float64: of full, middle and single length, and one that takes no part.

    Args:
        weights: "random", a third of them 0; or "one", where every view scores every token of the completion.
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
    return LossInputs(
        view_logps=((old + spread * normal()) * scored).requires_grad_(),
        view_old=old * scored,
        view_reference=(old + spread * normal()) * scored,
        weights=weight,
        advantages=torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7, 0.0], dtype=torch.float64),
        mask=mask,
        tokens=mask.sum(),
    )


def micro_batches(inputs: LossInputs, rows: int) -> list[LossInputs]:
    """The same rows in parts, as a step gets them."""
    parts = len(inputs.mask) // rows
    names = ("view_logps", "view_old", "view_reference", "weights", "advantages", "mask")
    split = {name: getattr(inputs, name).split(rows) for name in names}
    return [
        replace(inputs, tokens=inputs.tokens / parts, **{name: split[name][part] for name in names})
        for part in range(parts)
    ]


def divisor(inputs: LossInputs, row: int, settings: Any) -> float:
    """What the sum over a row's tokens is divided by, in the mean that `loss_type` names."""
    rows, length = inputs.mask.shape[0], int(inputs.mask[row].sum())
    return {
        "sum": rows,
        "grpo": rows * max(length, 1),
        "dr_grpo": rows * settings.max_completion_length,
        "bnpo": int(inputs.mask.sum()),
        "dapo": int(inputs.tokens),
    }[settings.loss_type]


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    """(rows, views, tokens), of a loss by the policy's log-probabilities."""
    return torch.autograd.grad(loss, inputs.view_logps, retain_graph=True)[0]


def trl_trainer(model_dir: Any, folder: Any) -> Any:
    """A trainer whose `trl_loss` is TRL's, to be asked with the `loss_type`, `beta`, ... that a test sets on it."""
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
    """TRL's loss of the weighted sums over views, and what it logs; with the weights that TRL gives vLLM's rollouts."""
    for name, value in {"beta": 0.0, "importance_sampling_level": "token", **options}.items():
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
