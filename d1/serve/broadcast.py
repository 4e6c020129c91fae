"""Weights that go from a trainer to a server over the network, for machines that share no folder (gloo, on the CPU).

What is sent is a folder of weights: its tensors, and its JSON files as tensors of bytes. The requests and their fields
are SGLang's. The server puts the folder together again and loads it as it loads any other, so nothing of the model
changes before all of it has arrived. An update that breaks off is dropped; the server then keeps the old weights and
their version, and the trainer refuses completions of that version.

Each update makes a group of two, the trainer (rank 0) and one server, apart from the default group of a process, and
leaves it: a server that dies holds up no other one, and one that joins later needs nothing. No step waits longer than
`SECONDS` for the other side.

Safety: a server takes weights this way only if it was started with `--take_broadcasts`; beyond the local host that
needs an API key (`d1.commands.serve`), because whoever may send decides what the server says. It connects only to the
address that the request came from and names, and both sides listen only on the address by which they reach the other,
while an update lasts. As plain HTTP, the transfer is neither hidden nor signed: use a network that you trust.
"""

from __future__ import annotations

import math
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from d1.models.adapters import LEARNT_FILE
from d1.serve.engine import RAM_DISK, QueueFull, has_room

SECONDS = 60.0  # that a side waits for the other one, for each tensor
SLOWEST = 1e7  # bytes per second of a transfer that is not given up
WORDS = 5.0  # seconds until a server says why it broke off
FILES = ("config.json", "generation_config.json", "adapter_config.json", LEARNT_FILE)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES |= {"uint8": torch.uint8}


def group_of_two(store: TCPStore, name: str, rank: int, own: str) -> Any:
    """The group, once both sides are there; this one listens on its address `own`.

    Raises:
        RuntimeError: the other side did not come within SECONDS.
    """
    gloo: Any = ProcessGroupGloo  # the stubs of torch 2.13 lack these names
    options = gloo._Options()
    options._timeout, options._devices = timedelta(seconds=SECONDS), [gloo.create_device(hostname=own)]
    return gloo(PrefixStore(name, store), rank, 2, options)


def address_towards(host: str, port: int) -> str:
    """The address of this machine by which it reaches another one."""
    with socket.create_connection((host, port), SECONDS) as there:
        return str(there.getsockname()[0])


def broadcast(group: Any, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()


# --- The trainer ------------------------------------------------------------------------------------------------------


def send(ask: Callable[..., Any], url: str, folder: Path, version: str) -> None:
    """Has the server at `url` take the weights in `folder`. `ask` as `d1.serve.client.RolloutServer.ask`.

    Raises:
        RuntimeError: the server was lost on the way.
        OSError, ValueError: as `ask`.
    """
    there = [file for file in FILES if (folder / file).exists()]
    contents = {file: torch.tensor([*(folder / file).read_bytes()], dtype=torch.uint8) for file in there}
    for file in sorted(folder.glob("*.safetensors")):
        contents |= load_file(file)
    tensors = [tensor.contiguous() for tensor in contents.values()]
    where = urlsplit(url)
    own = address_towards(str(where.hostname), where.port or (443 if where.scheme == "https" else 80))
    listener = socket.create_server((own, 0))
    port, name = listener.getsockname()[1], uuid.uuid4().hex
    patience = timedelta(seconds=SECONDS)
    store = TCPStore(own, port, 2, True, patience, wait_for_workers=False, master_listen_fd=listener.detach())
    joins = {"master_address": own, "master_port": port, "rank_offset": 1, "world_size": 2}
    joins |= {"group_name": name, "backend": "gloo"}
    ask("POST", "/init_weights_update_group", joins, 2 * SECONDS)
    ask("POST", "/begin_weight_update", {}, SECONDS)
    update: dict[str, Any] = {"names": [*contents]}
    update |= {"dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]}
    update |= {"shapes": [[*tensor.shape] for tensor in tensors], "group_name": name, "weight_version": version}
    seconds = 2 * SECONDS + sum(tensor.nbytes for tensor in tensors) / SLOWEST
    meanwhile(
        lambda: ask("POST", "/update_weights_from_distributed", update, seconds),
        lambda: broadcast(group_of_two(store, name, 0, own), tensors),
    )
    ask("POST", "/end_weight_update", {})


def meanwhile(request: Callable[[], Any], work: Callable[[], Any]) -> None:
    """Does `work` while a thread makes a request. If both fail, the server's words are raised."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        work()
    except RuntimeError:
        with suppress(TimeoutError):
            answer.result(WORDS)
        raise
    answer.result()


# --- The server -------------------------------------------------------------------------------------------------------


class Receiver:
    """What a server has of an update that is on its way. A new one takes the place of one that was not ended.

    Each method raises QueueFull if another update is at work or took the place. After any other error, ConnectionError
    if the sender was lost, the update is dropped.

    Args:
        room: the most bytes of an update.
    """

    def __init__(self, room: int) -> None:
        self.room, self.lock = room, threading.Lock()
        self.drop()

    def drop(self) -> None:
        self.store: TCPStore | None = None
        self.name, self.own, self.version, self.begun = "", "", "", False
        self.contents: dict[str, Tensor] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        if not self.lock.acquire(blocking=False):
            raise QueueFull("another update of the weights is under way: try again later")
        try:
            yield
        except Exception as error:
            if not isinstance(error, QueueFull):
                self.drop()
            if isinstance(error, RuntimeError):
                raise ConnectionError(f"the sender of the weights was lost: {error}") from error
            raise
        finally:
            self.lock.release()

    def join(self, host: str, port: int, name: str) -> None:
        """Connects to a sender at this address."""
        with self.alone():
            self.drop()
            self.name, self.own = name, address_towards(host, port)
            self.store = TCPStore(host, port, 2, False, timedelta(seconds=SECONDS), wait_for_workers=False)

    def begin(self) -> None:
        with self.alone():
            self.check(self.store is not None)
            self.begun = True

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], name: str, version: str
    ) -> None:
        """Receives tensors of these names, in this order. Raises ValueError if they cannot be a model's."""
        with self.alone():
            self.check(self.begun and name == self.name and not self.contents)
            assert self.store is not None
            group = group_of_two(self.store, name, 1, self.own)  # first, so that the sender hears of what is wrong
            if not len(names) == len(dtypes) == len(shapes) or len({*names}) < len(names):
                raise ValueError("each tensor needs a name of its own, a dtype and a shape")
            if wrong := [dtype for dtype in dtypes if dtype not in DTYPES]:
                raise ValueError(f"the dtype {wrong[0]} is none of {', '.join(DTYPES)}")
            sizes = [math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
            if min((size for shape in shapes for size in shape), default=1) < 1 or sum(sizes) > self.room:
                raise ValueError(f"{sum(sizes)} bytes are no weights of this model, which have at most {self.room}")
            new = [torch.empty(*shape, dtype=DTYPES[dtype]) for shape, dtype in zip(shapes, dtypes, strict=True)]
            broadcast(group, new)
            self.contents, self.version = dict(zip(names, new, strict=True)), version

    def take(self) -> tuple[TemporaryDirectory[str], str]:
        """The folder of weights that has arrived, and its version."""
        with self.alone():
            self.check(bool(self.contents))
            contents, version = self.contents, self.version
            self.drop()
            size = sum(tensor.nbytes for tensor in contents.values())
            there = RAM_DISK if has_room(RAM_DISK, size) else None
            folder = TemporaryDirectory(prefix="d1-received-", dir=there)
            for file in contents.keys() & {*FILES}:
                (Path(folder.name) / file).write_bytes(contents.pop(file).numpy().tobytes())
            adapter = (Path(folder.name) / "adapter_config.json").exists()
            file = f"{'adapter_' if adapter else ''}model.safetensors"
            save_file(contents, Path(folder.name) / file, metadata={"format": "pt"})
            return folder, version

    def check(self, right: bool) -> None:
        if not right:
            raise QueueFull("no such update is under way (another one took its place, or it failed): begin again")
