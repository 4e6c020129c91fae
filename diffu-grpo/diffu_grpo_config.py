"""The settings under d1's module name, for scripts written for d1's repository; they are defined in `d1.rl`."""

from d1.rl import DiffuGRPOConfig

__all__ = ["DiffuGRPOConfig"]
