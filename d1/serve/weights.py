"""The weights of a policy on their way to rollout servers: gathered from all processes, written to a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor

from d1.models.convert import write_weights
from d1.runs.cli import from_rank_0
from d1.serve.client import RolloutServer

# --- Weights that processes share -------------------------------------------------------------------------------------

T = TypeVar("T")


class WholeWeights(Mapping[str, Tensor]):
    """The state dict of a model of which each process may hold a part (ZeRO-3, FSDP2): a weight is gathered when the
    first process reads it. All processes make one together, and the others `help` until the first one is `done`."""

    def __init__(self, model: Any) -> None:
        self.parts = model.state_dict(keep_vars=True)
        self.split = any(isinstance(part, DTensor) or hasattr(part, "ds_id") for part in self.parts.values())

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        if not self.split:
            return part.detach()
        self.tell(name)
        with whole(part) as weight:
            return weight.detach().to("cpu", copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def tell(self, name: str | None) -> str | None:
        """The name that the first process gives; None: it reads no more."""
        names = [name]
        if self.split:
            dist.broadcast_object_list(names)
        return names[0]

    def help(self) -> None:
        """Takes part in gathering what the first process reads."""
        while (name := self.tell(None)) is not None:
            with whole(self.parts[name]):
                pass

    def done(self) -> None:
        self.tell(None)


@contextlib.contextmanager
def whole(part: Tensor) -> Iterator[Tensor]:
    """A weight of which this process has a part; all processes call it together."""
    if isinstance(part, DTensor):
        yield cast("DTensor", part.detach().to(PartialState().device)).full_tensor()
    elif hasattr(part, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([part]):
            yield part
    else:
        yield part


def with_weights(model: Any, work: Callable[[WholeWeights], T]) -> T:
    """The result of `work` on the weights of `model` in the first process, which all processes get, as by
    `from_rank_0`. All call it together."""
    weights = WholeWeights(model)

    def in_first_process() -> T:
        try:
            return work(weights)
        finally:
            weights.done()

    if not PartialState().is_main_process:
        weights.help()
    return from_rank_0(in_first_process)


BARRIER_SECONDS = 5.0  # seconds after which waiting processes meet, so that no collective call of theirs times out


def result_of(future: Future[T] | None) -> T:
    """The result of a future of the first process, which all processes get; an error of it is raised in all."""
    first = cast("Future[T]", future)
    while not from_rank_0(lambda: bool(wait([first], BARRIER_SECONDS).done)):
        pass
    return from_rank_0(lambda: first.result())


# --- The folder through which a run's weights reach its servers -------------------------------------------------------


class WeightsFolder:
    """A folder that holds one version of the weights at a time, on a RAM disk if there is one with room.

    Attributes:
        path: the folder; None until the first version is written.
        frozen: the folder of the weights that no version changes, written once; None: each version is whole.
    """

    def __init__(self, output_dir: Path, part: str = "") -> None:
        """`part` ends the folder's name: a run may have several folders."""
        self.output_dir, self.part = output_dir.resolve(), part
        self.path: Path | None = None
        self.frozen: Path | None = None

    def write(
        self, model: Any, version: str, servers: Sequence[RolloutServer], given: WholeWeights | Path | None = None
    ) -> Path:
        """Replaces the version by the weights of `model`, or its adapter if it has one, where all servers read it;
        returns the folder of the new version. An engine gets weights with the adapter merged; if all servers are
        engines, only those that it changes. `given`: the weights, if processes share them; or a folder to copy."""
        known = [server for server in servers if server.folders != []]
        engines, has_adapter = [server.folders is None for server in known], hasattr(model, "peft_config")
        merges, changes = has_adapter and any(engines), has_adapter and any(engines) and all(engines)
        split = given if isinstance(given, WholeWeights) and given.split else None
        if merges and split:
            raise ValueError(
                "SGLang takes no adapters, and one cannot be merged into weights that processes share: use `d1 serve`, "
                "train all weights, or train under DDP or ZeRO-2"
            )
        if self.path is None:
            sent = [weight for weight in model.parameters() if weight.requires_grad or merges or not has_adapter]
            size = sum(getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in sent)
            # An engine reads any folder of its own machine. On another machine, the run's folder must be shared, and a
            # RAM disk is not the one of this machine.
            folders: list[list[str] | None] = []
            for server in known:
                if server.is_local:
                    folders.append(server.folders)
                elif server.folders is None:
                    folders.append([str(self.output_dir)])
                else:
                    folders.append([name for name in server.folders if not Path(name).is_relative_to(RAM_DISK)])
            # The name is a function of the run, so that a resume removes what a killed run left.
            name = "d1-weights-" + hashlib.sha256(str(self.output_dir).encode()).hexdigest()[:12] + self.part
            self.path = folder_with_room(self.output_dir, folders, size) / name
        if not (changes and self.frozen):
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700)  # fails if it is someone else's
            self.frozen = self.path / FROZEN if changes else None
            if self.frozen:
                write_weights(model, self.frozen, learnt=False)
        for old in self.path.iterdir():
            if old != self.frozen:
                shutil.rmtree(old)
        if isinstance(given, Path):
            shutil.copytree(given, self.path / version)
        elif has_adapter and not merges:
            learnt = [name for name, weight in model.named_parameters() if weight.requires_grad]
            model.save_pretrained(self.path / version, state_dict=split and {name: split[name] for name in learnt})
        else:
            write_weights(model, self.path / version, True if changes else None, split)
        return self.path / version

    def remove(self) -> None:
        """Removes what this process wrote."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = self.frozen = None


FROZEN = "frozen"  # a folder next to that of the version
RAM_DISK = Path("/dev/shm")
SPARE = 1.1  # free room needed, as a multiple of the weights' size


def folder_with_room(output_dir: Path, folders: Sequence[Sequence[str] | None], size: int) -> Path:
    """The RAM disk, else the run's own folder, for weights of `size` bytes. `folders` are those below which each server
    reads; None: everywhere. ValueError if neither is read by all servers and has room."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for folder in (RAM_DISK, output_dir):
        read = all(own is None or any(folder.is_relative_to(one) for one in own) for own in folders)
        writable = folder.is_dir() and os.access(folder, os.W_OK)
        if read and writable and shutil.disk_usage(folder).free >= SPARE * size:
            return folder
    raise ValueError(
        f"neither {RAM_DISK} nor {output_dir} lies in a --weights_dir of all servers and has {size / 1e9:.1f} GB of "
        "room that this run can write to: start the servers with a --weights_dir that does"
    )
