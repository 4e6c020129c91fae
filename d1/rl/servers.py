"""Rollouts on servers: rows go through a queue, and a server has the policy's weights before it gets rows.

A server that fails is taken out, and its rows go to the others; it comes back with the current weights. Completions do
not depend on who sampled them, because a row's random numbers depend on its key alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from d1.models.kinds import block_size
from d1.rl.weights_folder import WeightsFolder
from d1.runs.entry import RunError
from d1.sampling import Rollout, SamplingSettings
from d1.serve.client import CONNECT, Prompts, RolloutServer, Unavailable, Weights

logger = logging.getLogger(__name__)

PAUSE = 1.0  # seconds until a server that failed is asked again
WATCH = 10.0  # seconds between questions to a server that has rows
REMIND = 60.0  # seconds between messages while the run waits

Part = tuple[Prompts, "Future[tuple[Rollout, str]]"]  # with the address of the server that sampled it


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """A rollout that servers sampled.

    Attributes:
        sources: the address of the server that sampled each row.
    """

    sources: tuple[str, ...] = ()


class NoServer(ConnectionError):
    """No server has answered for as long as the run waits."""


class PolicyServers:
    """The servers that sample a run's rollouts. Every process uses all of them; the first one writes the weights.

    `publish` and `rollout` are called by all processes together; `sample` by any thread, between two `publish`.

    Args:
        size: rows per request; None: an equal share of a rollout for each server.
        patience: seconds to wait while no server answers.
        broadcasts: weights go over the network, from a folder of this machine that no server reads.
    """

    def __init__(self, urls: Sequence[str], trainer: Any, size: int | None, patience: float, broadcasts: bool) -> None:
        self.accelerator, self.mask_token_id = trainer.accelerator, trainer.mask_token_id
        self.servers = [RolloutServer(url, broadcasts) for url in urls]
        self.size, self.patience, self.broadcasts = size, patience, broadcasts
        self.run = broadcast_object_list([uuid.uuid4().hex])[0]  # an earlier run's weights have other names
        self.weights: Weights | None = None
        self.folder = WeightsFolder(Path(str(trainer.args.output_dir)))
        with self.together():
            self.connect()

    def connect(self) -> None:
        """Asks all servers what they serve, until one answers."""
        waited = Waiting(self.servers, self.patience)
        while True:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                [*pool.map(self.prepare, self.servers)]
            if waited.someone_answers():
                return
            time.sleep(PAUSE)

    def prepare(self, server: RolloutServer) -> None:
        """Gives a server the current weights unless it has them, or takes it out."""
        try:
            server.prepare(self.mask_token_id, self.weights)
        except Unavailable as error:
            take_out(server, error)
        else:
            if server.problem and self.weights:
                logger.warning("%s is back, with the current weights.", server.url)
            server.problem = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raises in all processes what one of them raises inside: otherwise the others would wait for it."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        told = gather_object([None if problem is None else (isinstance(problem, NoServer), str(problem))])
        wrong = sorted(one for one in told if one is not None)  # first those that waiting longer would not help
        if problem is not None and isinstance(problem, NoServer) == wrong[0][0]:
            raise problem
        if wrong:
            raise (NoServer if wrong[0][0] else RunError)(wrong[0][1])

    def publish(self, model: Any, step: int) -> None:
        """Has the servers take the weights of `model` after so many optimizer steps, or its adapter, unless they have
        them. No process may be sampling."""
        version = f"{self.run}-{step}"
        if self.weights and self.weights.version == version:
            return
        self.accelerator.wait_for_everyone()
        with self.together():
            if self.accelerator.is_main_process:
                self.write(self.folder, model, version)
        self.weights = Weights(self.run, version, Path(broadcast_object_list([str(self.folder.path)])[0], version))
        with self.together():
            if self.accelerator.is_main_process:
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    [*pool.map(self.prepare, [server for server in self.servers if not server.problem])]

    def write(self, folder: WeightsFolder, model: Any, version: str, copy: Path | None = None) -> None:
        """Writes weights, as `WeightsFolder.write` does, where all servers read them and in a format that they read."""
        if self.broadcasts:
            folder.write(model, version, [None], copy=copy)
            return
        known = [one for one in self.servers if one.folders != []]
        # An engine reads any folder of its own machine, and the run's where machines share it.
        shared = [str(folder.output_dir)]
        readable = [shared if one.folders is None and not one.is_local else one.folders for one in known]
        folder.write(model, version, readable, any(one.folders is None for one in known), copy)

    def close(self) -> None:
        """Removes the weights that were written; a later `publish` writes again."""
        self.weights = None
        self.folder.remove()

    def sample(self, prompts: Prompts) -> ServedRollout:
        """The rollout of prompts by the servers that answer, with the weights of the last `publish`.

        Raises:
            NoServer: none has answered for `patience` seconds.
            ValueError: a server refuses the rows.
        """
        assert self.weights is not None
        parts = prompts.split(self.size or -(-len(prompts.ids) // len(self.servers)))
        queue: SimpleQueue[Part | None] = SimpleQueue()
        futures: list[Future[tuple[Rollout, str]]] = [Future() for _ in parts]
        for part in zip(parts, futures, strict=True):
            queue.put(part)
        over, held = Event(), dict[RolloutServer, Part]()
        for server in self.servers:
            Thread(target=self.work, args=(server, queue, held, over), name=server.url, daemon=True).start()
        Thread(target=watch, args=(queue, held, over), daemon=True).start()
        waited, left = Waiting(self.servers, self.patience), {*futures}
        try:
            while left:
                done, left = wait(left, timeout=PAUSE, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    waited.since = None
                waited.someone_answers()
            rollouts, urls = zip(*(future.result() for future in futures), strict=True)
            sources = (url for part, url in zip(parts, urls, strict=True) for _ in part.keys)
            return ServedRollout(**vars(Rollout.joined(rollouts)), sources=tuple(sources))
        finally:
            over.set()
            for _ in self.servers:
                queue.put(None)

    def work(
        self, server: RolloutServer, queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event
    ) -> None:
        """A thread of `sample`: sends parts to a server, one at a time, and asks a server that failed again. `held` are
        the parts that servers have."""
        assert self.weights is not None
        while not over.is_set():
            try:
                if server.problem or server.version != self.weights.version:
                    self.prepare(server)
            except Exception as error:  # it refuses the weights, but others may have taken them
                take_out(server, error)
            if server.problem:
                over.wait(PAUSE)
                continue
            part = queue.get()
            if part is None:
                return
            held[server], (prompts, future) = part, part
            with contextlib.suppress(InvalidStateError):
                try:
                    future.set_result((server.sample(prompts, self.weights), server.url))
                except Unavailable as error:
                    take_out(server, error)
                    if server in held:
                        queue.put(part)
                except Exception as error:
                    future.set_exception(error)
            held.pop(server, None)

    def rollout(
        self,
        model: Any,
        step: int,
        ids: Tensor,
        mask: Tensor,
        key: Sequence[int],
        settings: SamplingSettings,
        eos_token_ids: Sequence[int] | None,
    ) -> ServedRollout:
        """What `rollout` samples with the weights of `model` after so many optimizer steps, in the process that has the
        generators (*key, row)."""
        self.publish(model, step)
        with self.together():
            return self.sample(self.prompts(model, ids, mask, key, settings, eos_token_ids))

    def prompts(
        self,
        model: Any,
        ids: Tensor,
        mask: Tensor,
        key: Sequence[int],
        settings: SamplingSettings,
        eos_token_ids: Sequence[int] | None,
    ) -> Prompts:
        """The rows of this process."""
        first = self.accelerator.process_index * len(ids)
        keys = [(*key, first + row) for row in range(len(ids))]
        of_model = block_size(model.config) is not None, model.config.vocab_size, self.mask_token_id
        return Prompts(ids, mask, keys, settings, eos_token_ids or (), *of_model)


def take_out(server: RolloutServer, error: Exception) -> None:
    """Notes why no rows go to a server."""
    if not server.problem:
        logger.warning("No more rows go to a server until it answers: %s", error)
    server.problem = str(error)


def watch(queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event) -> None:
    """A thread of `sample`: the part of a server that has fallen silent without closing its connection, such as one
    whose machine is gone, goes to the others. Should it answer after all, the first answer counts."""
    while not over.wait(WATCH):
        for server in [*held]:
            try:
                server.ask("GET", "/model_info", seconds=CONNECT)
            except Unavailable as error:
                if part := held.pop(server, None):
                    take_out(server, error)
                    queue.put(part)


class Waiting:
    """How long no server has answered; `since`: from when on, None if one has answered or finished rows."""

    def __init__(self, servers: Sequence[RolloutServer], patience: float) -> None:
        self.servers, self.patience = servers, patience
        self.since: float | None = None
        self.told = 0.0

    def someone_answers(self) -> bool:
        """False while no server answers. Raises NoServer if this lasts too long."""
        if not all(server.problem for server in self.servers):
            return True
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        problems = "; ".join(str(server.problem) for server in self.servers)
        if now - self.since >= self.patience:
            raise NoServer(f"no rollout server has answered for {self.patience:g} seconds: {problems}")
        if now - self.told >= REMIND or not self.told:
            self.told = now
            logger.warning("Waiting for a rollout server, for at most %g seconds: %s", self.patience, problems)
        return False


def servers_of(trainer: Any) -> PolicyServers | None:
    """The servers that `DiffuGRPOConfig.rollout_mode` asks for."""
    args = trainer.args
    if args.rollout_mode != "server":
        return None
    limits = args.rollout_batch_size, args.rollout_server_timeout
    return PolicyServers(args.rollout_server_base_url, trainer, *limits, args.rollout_weights == "broadcast")
