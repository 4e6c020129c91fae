"""Preference training on bounds of log-probabilities: VRPO and ELBO-KTO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.preference.config import PreferenceConfig as PreferenceConfig
    from d1.preference.methods import METHODS as METHODS
    from d1.preference.trainer import PreferenceTrainer as PreferenceTrainer

HOMES = {"METHODS": "methods", "PreferenceConfig": "config", "PreferenceTrainer": "trainer"}
__getattr__ = lazily(__name__, HOMES)
