"""SFT's classes under d1's module name, for scripts written for d1's repository; they are defined in `d1.sft`."""

from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, preprocess_dataset
from d1.sft.data import SYSTEM_PROMPT

__all__ = ["SYSTEM_PROMPT", "dLLMDataCollator", "dLLMSFTDataset", "dLLMTrainer", "preprocess_dataset"]
