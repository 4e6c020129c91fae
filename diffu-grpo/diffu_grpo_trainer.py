"""The trainer under d1's module name, for scripts written for d1's repository; it is defined in `d1.rl`."""

from d1.rl import DiffuGRPOTrainer

__all__ = ["DiffuGRPOTrainer"]
