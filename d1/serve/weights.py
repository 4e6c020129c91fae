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
    first process reads it. All processes make one together; the others call `help_gather`, which returns after the
    first one has called `end_gather`."""

    def __init__(self, model: Any) -> None:
        self.parts = model.state_dict(keep_vars=True)
        self.is_split = any(isinstance(part, DTensor) or hasattr(part, "ds_id") for part in self.parts.values())

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        if not self.is_split:
            return part.detach()
        self.broadcast_name(name)
        with gather_weight(part) as weight:
            return weight.detach().to("cpu", copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def broadcast_name(self, name: str | None) -> str | None:
        """The name that the first process passes; None: it reads no more weights."""
        names = [name]
        if self.is_split:
            dist.broadcast_object_list(names)
        return names[0]

    def help_gather(self) -> None:
        """Takes part in gathering what the first process reads."""
        while True:
            name = self.broadcast_name(None)
            if name is None:
                return
            with gather_weight(self.parts[name]):
                pass

    def end_gather(self) -> None:
        self.broadcast_name(None)


@contextlib.contextmanager
def gather_weight(part: Tensor) -> Iterator[Tensor]:
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
            weights.end_gather()

    if not PartialState().is_main_process:
        weights.help_gather()
    return from_rank_0(in_first_process)


BARRIER_SECONDS = 5.0  # seconds after which waiting processes meet, so that no collective call of theirs times out


def result_of(future: Future[T] | None) -> T:
    """The result of a future of the first process, which all processes get; an error of it is raised in all."""
    rank_0_future = cast("Future[T]", future)
    while not from_rank_0(lambda: bool(wait([rank_0_future], BARRIER_SECONDS).done)):
        pass
    return from_rank_0(lambda: rank_0_future.result())


# --- The folder through which a run's weights reach its servers -------------------------------------------------------


class WeightsFolder:
    """A folder that holds one version of the weights at a time, on a RAM disk if there is one with room.

    Attributes:
        path: the folder; None until the first version is written.
        frozen: the folder of the weights that no version changes, written once; None: each version is whole.
    """

    def __init__(self, output_dir: Path, suffix: str = "") -> None:
        """`suffix` ends the folder's name: a run may have several folders."""
        self.output_dir = output_dir.resolve()
        self.suffix = suffix
        self.path: Path | None = None
        self.frozen: Path | None = None

    def write(
        self, model: Any, version: str, servers: Sequence[RolloutServer], weights: WholeWeights | Path | None = None
    ) -> Path:
        """Replaces the version by the weights of `model`, or its adapter if it has one, where all servers read it;
        returns the folder of the new version. An engine gets weights with the adapter merged; if all servers are
        engines, only those that it changes. `weights`: the weights, if processes share them; or a folder to copy."""
        loading_servers = [server for server in servers if server.folders != []]
        is_engine = [server.folders is None for server in loading_servers]
        has_adapter = hasattr(model, "peft_config")
        merges_adapter = has_adapter and any(is_engine)
        sends_changes_only = merges_adapter and all(is_engine)
        split_weights = weights if isinstance(weights, WholeWeights) and weights.is_split else None
        if merges_adapter and split_weights:
            raise ValueError(
                "SGLang takes no adapters, and one cannot be merged into weights that processes share: use `d1 serve`, "
                "train all weights, or train under DDP or ZeRO-2"
            )
        sends_all = merges_adapter or not has_adapter

        # The folder, for the first version
        if self.path is None:
            parameters = [weight for weight in model.parameters() if weight.requires_grad or sends_all]
            size = sum(getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in parameters)
            # An engine reads any folder of its own machine. On another machine, the run's folder must be shared, and a
            # RAM disk is not the one of this machine.
            folders: list[list[str] | None] = []
            for server in loading_servers:
                if server.is_local:
                    folders.append(server.folders)
                elif server.folders is None:
                    folders.append([str(self.output_dir)])
                else:
                    folders.append([name for name in server.folders if not Path(name).is_relative_to(RAM_DISK)])
            # The name is a function of the run, so that a resume removes what a killed run left.
            digest = hashlib.sha256(str(self.output_dir).encode()).hexdigest()[:12]
            self.path = folder_with_room(self.output_dir, folders, size) / f"d1-weights-{digest}{self.suffix}"

        # Remove the earlier version, but not the weights that no version changes.
        if not (sends_changes_only and self.frozen):
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700)  # fails if it is someone else's
            self.frozen = None
            if sends_changes_only:
                self.frozen = self.path / FROZEN
                write_weights(model, self.frozen, learnt=False)
        for folder in self.path.iterdir():
            if folder != self.frozen:
                shutil.rmtree(folder)

        # Write the new version.
        folder = self.path / version
        if isinstance(weights, Path):
            shutil.copytree(weights, folder)
        elif sends_all:
            write_weights(model, folder, learnt=True if sends_changes_only else None, weights=split_weights)
        else:
            state_dict: dict[str, Tensor] | None = None
            if split_weights is not None:
                trained_names = [name for name, weight in model.named_parameters() if weight.requires_grad]
                state_dict = {name: split_weights[name] for name in trained_names}
            model.save_pretrained(folder, state_dict=state_dict)
        return folder

    def remove(self) -> None:
        """Removes what this process wrote."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
            self.frozen = None


FROZEN = "frozen"  # a folder next to that of the version
RAM_DISK = Path("/dev/shm")
ROOM_FACTOR = 1.1  # free room needed, as a multiple of the weights' size


def folder_with_room(output_dir: Path, folders: Sequence[Sequence[str] | None], size: int) -> Path:
    """The RAM disk, else the run's own folder, for weights of `size` bytes. `folders` are those below which each server
    reads; None: everywhere. ValueError if neither is read by all servers and has room."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for folder in (RAM_DISK, output_dir):
        is_readable = True
        for server_folders in folders:
            if server_folders is not None and not any(folder.is_relative_to(name) for name in server_folders):
                is_readable = False
        is_writable = folder.is_dir() and os.access(folder, os.W_OK)
        if is_readable and is_writable and shutil.disk_usage(folder).free >= ROOM_FACTOR * size:
            return folder
    raise ValueError(
        f"neither {RAM_DISK} (for servers on this machine) nor {output_dir} lies in a --weights_dir of all servers and "
        f"has {size / 1e9:.1f} GB of room that this run can write to: start the servers with a --weights_dir that does"
    )
