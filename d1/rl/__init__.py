"""Reinforcement learning: diffu-GRPO and the published methods that share its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.rl.config import DiffuGRPOConfig as DiffuGRPOConfig
    from d1.rl.hints import Hint as Hint
    from d1.rl.losses import Advantage as Advantage
    from d1.rl.losses import AdvantageInputs as AdvantageInputs
    from d1.rl.losses import LossInputs as LossInputs
    from d1.rl.losses import Objective as Objective
    from d1.rl.losses import Penalty as Penalty
    from d1.rl.methods import METHODS as METHODS
    from d1.rl.trainer import DiffuGRPOTrainer as DiffuGRPOTrainer

HOMES = {
    "Advantage": "losses",
    "AdvantageInputs": "losses",
    "DiffuGRPOConfig": "config",
    "DiffuGRPOTrainer": "trainer",
    "Hint": "hints",
    "LossInputs": "losses",
    "METHODS": "methods",
    "Objective": "losses",
    "Penalty": "losses",
}
__getattr__ = lazily(__name__, HOMES)
