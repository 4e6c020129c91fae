"""d1's names of the parts of SFT, for scripts written for d1's repository; they live in `d1.sft`."""

from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer

__all__ = ["dLLMDataCollator", "dLLMSFTDataset", "dLLMTrainer"]
