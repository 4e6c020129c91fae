"""Masked supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.sft.config import SFTConfig as SFTConfig
    from d1.sft.data import dLLMDataCollator as dLLMDataCollator
    from d1.sft.data import dLLMSFTDataset as dLLMSFTDataset
    from d1.sft.data import preprocess_dataset as preprocess_dataset
    from d1.sft.trainer import dLLMTrainer as dLLMTrainer

HOMES = {
    "SFTConfig": "config",
    "dLLMDataCollator": "data",
    "dLLMSFTDataset": "data",
    "dLLMTrainer": "trainer",
    "preprocess_dataset": "data",
}
__getattr__ = lazily(__name__, HOMES)
