"""d1's name of the trainer, for scripts written for d1's repository; it lives in `d1.rl`."""

from d1.rl import DiffuGRPOTrainer

__all__ = ["DiffuGRPOTrainer"]
