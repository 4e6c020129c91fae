"""Stands for SGLang's compiled kernels, which are not published for CPUs. The engine imports their names; a model on a
CPU runs on torch's own operators and calls none of them, and one that is called raises an error."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return missing
