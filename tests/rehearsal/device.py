"""A device whose data nobody can see: the library runs on it as on a GPU, and each wait for the device is counted.

Its tensors say that they are on the meta device, where there is no data. Their numbers lie aside, on the CPU: an
operation on such tensors is carried out there and its result is put aside, too, so that a rehearsal computes what a run
computes. An error is
- an operation on a tensor of the device and one that was left on the CPU, even a single number;
- a draw for the device from a generator of another;
- a wait for the device in a place that is not allowed: a value or a tensor read back to the host, a shape that depends
  on data (as with a boolean index), or an upload that is not `non_blocking`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import d1.masking

DEVICE = torch.device("meta")
HERE = Path(__file__)
ROOT = HERE.parents[2]
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Misplaced(RuntimeError):
    """Tensors or generators of two devices meet in one operation."""


class Waits(RuntimeError):
    """The host waits for the device where it must not."""


class Aside(Tensor):
    """A tensor of the device, whose numbers are `numbers`, on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Aside:
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=DEVICE, **layout)
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of a rehearsal that is over")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone()
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied


class Generator(torch.Generator):
    """A generator of the device, with the stream of a CPU's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.of = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:
        return self.of


class Constructors(TorchFunctionMode):
    """What does not reach the operations: tensors made of Python's numbers, and where a draw's generator is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and torch.device(kwargs.get("device") or "cpu") != generator.device:
            raise Misplaced(f"{func.__name__} for {kwargs.get('device', 'cpu')} with a generator of {generator.device}")
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.new_tensor and isinstance(args[0], Aside):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):
    """Carries operations out on the numbers that lie aside, and counts waits by place."""

    def __init__(self, allowed: Mapping[str, str] | None) -> None:
        super().__init__()
        self.allowed, self.waits = allowed, Counter[str]()

    def wait(self, what: Any) -> None:
        where = place()
        if self.allowed is not None and where not in self.allowed:
            raise Waits(f"{what} waits for the device in {where}")
        self.waits[where] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [isinstance(tensor, Aside) for tensor in tensors]
        target = kwargs.get("device")
        if not any(ours) and target != DEVICE:
            return func(*args, **kwargs)
        here = any(ours) if target is None else target == DEVICE  # where the result will be
        if func in (aten._to_copy.default, aten.copy_.default):
            if not all(ours) and not is_free(func, args, kwargs):
                self.wait("an upload")
            elif all(ours) and not here:
                self.wait("a read-back")
            here = isinstance(args[0], Aside) if func is aten.copy_.default else here
        elif (
            func in INDEXING
            and isinstance(args[0], Aside)
            and not all(index is None or isinstance(index, Aside) for index in args[1])
        ):
            self.wait("an index on the CPU, which is uploaded,")
        elif not all(ours):
            raise Misplaced(f"{func} of tensors on {[str(tensor.device) for tensor in tensors]}")
        elif depends_on_data(func, args):
            self.wait(func)
        if target is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        given, named = tree_map_only(Aside, lambda tensor: tensor.numbers, (args, kwargs))
        result = func(*given, **named)
        if func._schema.is_mutable:
            return written(func, args, kwargs, result)
        return tree_map_only(Tensor, Aside, result) if here else result


def is_free(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an upload does not wait: if it is asked not to, or there is nothing to copy."""
    return (
        not args[func is aten.copy_.default].numel()
        or kwargs.get("non_blocking", False)
        or (func is aten.copy_.default and len(args) > 2 and args[2])
    )


def depends_on_data(func: Any, args: Any) -> bool:
    """Whether the operation gives a number to the host, or a tensor whose shape the host learns from the data."""
    if func in INDEXING:
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and (func is aten.index.Tensor or args[2].numel() > 1)  # a single value is filled in where true
    return any(tag in func.tags for tag in WAITING)


def written(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """What an operation that writes to its arguments returns: these."""
    if result is None:
        return None
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    targets = [
        by_name[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert len(targets) == 1, func
    assert targets[0].shape == targets[0].numbers.shape, func
    return targets[0]


def place() -> str:
    """The function that an operation is asked for in, outside PyTorch: its file, and its name."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path != HERE and "torch" not in path.parts and path.suffix == ".py":
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts
            if "site-packages" in parts:
                parts = parts[parts.index("site-packages") + 1 :]
            if parts[0] not in ("usr", "lib"):
                return f"{'/'.join(parts)} {name}"
        frame = frame.f_back
    raise AssertionError("no frame")


@contextlib.contextmanager
def rehearsal(allowed: Mapping[str, str] | None) -> Iterator[Counter[str]]:
    """Inside, "meta" is the device of a rehearsal. Gives the waits so far, by place.

    Args:
        allowed: place -> why the host may wait there.
    """
    operations = Operations(allowed)
    with mock.patch.object(d1.masking, "Generator", Generator), Constructors(), operations:
        yield operations.waits
