"""A simulated device without visible data: the library runs on it as on a GPU, and each wait for the device is counted.

Its tensors report the meta device, where tensors have no data. Their numbers are kept on the CPU, and operations run
there, so a rehearsal gives the numbers of a run. Errors are: an operation on tensors of the device and others, even a
single number left on the CPU; a draw with another device's generator; and a wait where none is allowed: a tensor or
number read back, a shape that depends on data (a boolean index, say), an upload that is not `non_blocking`.

Not covered: kernels that only a GPU has (the fused optimizer, flash attention, grouped experts), and several devices.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Container, Iterator
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
ROOT = Path(__file__).parents[2]
SITE = Path(torch.__file__).parents[1]
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
WRITES = ("index_put", "index_put_", "_index_put_impl_")
INDEXING = (torch.ops.aten.index.Tensor, *(getattr(torch.ops.aten, name).default for name in WRITES))
DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Misplaced(RuntimeError): ...  # tensors, or a generator, of two devices in one operation


class Waits(RuntimeError): ...  # the host waits for the device where it must not


class Aside(Tensor):
    """A tensor on the device; its data are those of `numbers`, on the CPU."""

    numbers: Tensor
    __torch_function__ = torch.nn.Parameter.__torch_function__  # results keep their own type

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Aside:
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, device=DEVICE, **layout)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of a rehearsal that is over")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone()
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied


class Generator(torch.Generator):
    """A generator of any device, with a CPU's stream."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.own_device = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None:  # a CPU generator takes no device argument
        pass

    @property
    def device(self) -> torch.device:
        return self.own_device


class Constructors(TorchFunctionMode):
    """Tracks what operations do not report: the device of a generator, and uploads of Python's numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, generator = torch.device(kwargs.get("device") or "cpu"), kwargs.get("generator")
        if generator is not None and generator.device != device:
            raise Misplaced(f"{func.__name__} on {device} with a generator of {generator.device}")
        if func in (torch.tensor, torch.as_tensor) and device == DEVICE and not isinstance(args[0], Tensor):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.new_tensor and isinstance(args[0], Aside):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):
    """Runs operations on the separate numbers, and counts waits by place; not those of other packages."""

    def __init__(self, allowed: Container[str] | None) -> None:
        super().__init__()
        self.allowed, self.waits = allowed, Counter[str]()

    def wait(self, what: Any) -> None:
        where = place()
        if where is None:
            return
        if self.allowed is not None and where not in self.allowed:
            raise Waits(f"{what} waits for the device in {where}")
        self.waits[where] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours, target = [tensor for tensor in tensors if isinstance(tensor, Aside)], kwargs.get("device")
        if not ours and target != DEVICE:
            return func(*args, **kwargs)
        here = bool(ours) if target is None else target == DEVICE  # is the result on the device?
        if func in COPIES:
            here = isinstance(args[0], Aside) if func is torch.ops.aten.copy_.default else here
            self.copied(here, *args[func is torch.ops.aten.copy_.default :], **kwargs)
        elif len(ours) < len(tensors):
            self.misplaced(func, args, tensors)
        elif depends_on_data(func, args):
            self.wait(func)
        given, named = tree_map_only(Aside, lambda tensor: tensor.numbers, (args, kwargs))
        result = func(*given, **(named if target is None else named | {"device": torch.device("cpu")}))
        written = {id(tensor.numbers): tensor for tensor in ours}  # an in-place operation returns its argument
        assert all(tensor.shape == tensor.numbers.shape for tensor in ours), func

        def put_aside(made: Tensor) -> Tensor:
            return written[id(made)] if id(made) in written else Aside(made)

        return tree_map_only(Tensor, put_aside, result) if here else result

    def copied(self, here: bool, source: Tensor, non_blocking: bool = False, **options: Any) -> None:
        if isinstance(source, Aside) and not here:
            self.wait("a read-back")
        elif not isinstance(source, Aside) and here and source.numel() and not non_blocking:
            self.wait("an upload")

    def misplaced(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """An index on the CPU is uploaded, which waits; anything else that is not on the device is an error."""
        indices = [id(index) for index in args[1]] if func in INDEXING else []
        if not all(isinstance(tensor, Aside) or id(tensor) in indices for tensor in tensors):
            raise Misplaced(f"{func} of tensors on {', '.join(str(tensor.device) for tensor in tensors)}, in {place()}")
        self.wait("the upload of an index")


def depends_on_data(func: Any, args: Any) -> bool:
    """Whether the host learns a number, or the shape of a result, from the data."""
    if func in INDEXING:  # with a single value, a boolean index only fills in where it is true
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and (func is torch.ops.aten.index.Tensor or args[2].numel() != 1)
    return any(tag in func.tags for tag in DEPENDS_ON_DATA)


def place() -> str | None:
    """The function outside PyTorch and this file that called an operation: its file and its name; None if it is one of
    another package."""
    frame = inspect.currentframe()
    while frame := frame.f_back if frame else None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SITE) and not path.is_relative_to(SITE / "torch"):
            return None
        if path.is_relative_to(ROOT) and not path.is_relative_to(SITE) and path != Path(__file__):
            return f"{path.relative_to(ROOT)} {re.sub(r'[.]<[a-z]+>', '', frame.f_code.co_qualname)}"
    raise AssertionError("nobody asked")


@contextlib.contextmanager
def rehearsal(allowed: Container[str] | None) -> Iterator[Counter[str]]:
    """Inside, the meta device is that of a rehearsal. Yields the waits so far, by place; the host may wait at those
    `allowed` (None: everywhere)."""
    operations = Operations(allowed)
    with mock.patch.object(d1.masking, "Generator", Generator), Constructors(), operations:
        yield operations.waits
