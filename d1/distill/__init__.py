"""Distillation for fewer sampling steps: dParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.distill.config import DistillConfig as DistillConfig
    from d1.distill.methods import METHODS as METHODS
    from d1.distill.trainer import DistillTrainer as DistillTrainer

HOMES = {"METHODS": "methods", "DistillConfig": "config", "DistillTrainer": "trainer"}
__getattr__ = lazily(__name__, HOMES)
