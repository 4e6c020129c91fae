"""d1's name of the settings, for scripts written for d1's repository; they live in `d1.rl`."""

from d1.rl import DiffuGRPOConfig

__all__ = ["DiffuGRPOConfig"]
