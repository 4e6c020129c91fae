"""Rollouts by servers, which get the policy's weights before each of them.

The first process sends the rows of all processes, through one queue; a server has the policy's weights before it gets
rows. A server that fails is taken out, and its rows go to the others; it comes back with the current weights.
Completions do not depend on who sampled them, because a row's random numbers depend on its key alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

from d1.models.adapters import base_digest
from d1.models.kinds import block_size, vocabulary
from d1.rl.batch import Batch
from d1.rl.config import DiffuGRPOConfig
from d1.rl.sources import RolloutRequest, RolloutSource
from d1.runs.cli import from_all, from_rank_0, raise_together
from d1.sampling import Rollout
from d1.serve.client import CONNECT_SECONDS, Prompts, RolloutServer, Unavailable, Weights
from d1.serve.rescoring import Rescoring
from d1.serve.weights import WeightsFolder, WholeWeights, result_of, with_weights

if TYPE_CHECKING:
    from d1.rl.trainer import DiffuGRPOTrainer

logger = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 1.0  # until a server that failed is tried again
WATCH_SECONDS = 10.0  # between questions to a server that has rows
REMINDER_SECONDS = 60.0  # between messages while the run waits

Part = tuple[Prompts, "Future[tuple[Rollout, ServerInfo]]"]  # rows; their rollout, and who sampled it


class ServerInfo(NamedTuple):
    """A server: its address, and the data type in which it computes (None: it does not say)."""

    url: str
    dtype: str | None


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """A rollout that servers sampled.

    Attributes:
        sources: the server that sampled each row.
    """

    sources: tuple[ServerInfo, ...] = ()

    def rows(self, part: slice, device: torch.device) -> ServedRollout:
        """Some of the rows, on a device."""
        columns: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                columns[name] = column[part].to(device)
        return ServedRollout(**columns, sources=self.sources[part])


class PolicyServers:
    """The servers that sample a run's rollouts. The first process alone talks to them.

    `publish` and `rollout` are called by all processes together; `sample` by any thread of the first one, between two
    `publish`.

    Attributes:
        size: most rows per request; None: an equal share of a rollout for each server.
        patience: seconds to wait while no server answers.
        silent_since: the time since which none has answered or finished rows.
    """

    def __init__(self, args: DiffuGRPOConfig, accelerator: Accelerator, mask_token_id: int) -> None:
        if getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) == 1:
            raise ValueError("rollout_mode server does not send the weights of FSDP 1: set fsdp_version: 2")
        self.accelerator = accelerator
        self.mask_token_id = mask_token_id
        self.servers = [RolloutServer(url, args.rollout_own_batch) for url in args.rollout_server_base_url or ()]
        self.size = args.rollout_batch_size
        self.patience = args.rollout_server_timeout
        self.run: str = from_rank_0(lambda: uuid.uuid4().hex)  # an earlier run's weights have other names
        self.weights: Weights | None = None
        self.base: str | None = None  # the result of `base_of`
        self.folder = WeightsFolder(Path(str(args.output_dir)))
        self.silent_since: float | None = None
        self.last_reminder = -REMINDER_SECONDS  # when the last message about it was logged
        from_rank_0(self.connect)

    def connect(self) -> None:
        """Asks all servers what they serve, until one answers."""
        self.prepare_all(self.servers)
        while not self.any_server_alive():
            time.sleep(RETRY_SECONDS)
            self.prepare_all(self.servers)

    def any_server_alive(self) -> bool:
        """False while no server answers. Raises ConnectionError, which names the last checkpoint, after `patience`."""
        if not all(server.problem for server in self.servers):
            self.silent_since = None
            return True
        now = time.monotonic()
        if self.silent_since is None:
            self.silent_since = now
        problems = "; ".join(str(server.problem) for server in self.servers)
        if now - self.silent_since >= self.patience:
            output_dir = self.folder.output_dir
            checkpoint = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
            advice = "no checkpoint is complete: start again"
            if checkpoint:
                advice = f"continue from {checkpoint} with --resume"
            raise ConnectionError(f"no rollout server has answered for {self.patience:g} seconds: {problems}. {advice}")
        if now - self.last_reminder >= REMINDER_SECONDS:
            self.last_reminder = now
            logger.warning("Waiting for a rollout server, for at most %g seconds: %s", self.patience, problems)
        return False

    def prepare_all(self, servers: Sequence[RolloutServer]) -> None:
        with ThreadPoolExecutor(len(self.servers)) as pool:
            for _ in pool.map(self.prepare, servers):  # raises what `prepare` raises
                pass

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

    def publish(self, model: Any, step: int) -> None:
        """Gives servers the weights of `model`, or its adapter, after `step` optimizer steps, unless they have these.
        Nobody may be sampling."""
        version = f"{self.run}-{step}"
        if self.weights and self.weights.version == version:
            return

        def in_first_process(weights: WholeWeights) -> Weights:
            folder = self.folder.write(model, version, self.servers, weights)
            base = self.base_of(model, weights)
            self.weights = Weights(self.run, version, folder, base, self.folder.frozen)
            self.prepare_all([server for server in self.servers if not server.problem])
            return self.weights

        self.weights = with_weights(model, in_first_process)

    def base_of(self, model: Any, weights: WholeWeights) -> str | None:
        """`base_digest` of a model with an adapter, which is all that servers get, computed once, since training does
        not change it; None: they get whole weights."""
        if self.base is None and hasattr(model, "peft_config"):
            self.base = base_digest(model, weights)
        return self.base

    def close(self) -> None:
        """Removes the weights that were written; a later `publish` writes again."""
        self.weights = None
        self.folder.remove()

    def rollout(self, model: Any, step: int, prompts: Prompts) -> ServedRollout:
        """Samples the prompts of this process with the weights that `model` has after `step` optimizer steps."""
        self.publish(model, step)
        all_prompts = from_all(prompts)  # per process
        future = None
        if self.accelerator.is_main_process:
            future = run_in_thread(lambda: self.sample(all_prompts))
        rollouts = result_of(future)
        return rollouts[self.accelerator.process_index].rows(slice(None), self.accelerator.device)

    def sample(self, all_prompts: Sequence[Prompts]) -> list[ServedRollout]:
        """The rollout of each of several prompts by the servers that answer, with the weights of the last `publish`.
        Rows of several prompts share requests unless a server computes a request as a batch of its own. Raises
        ConnectionError if none has answered for `patience` seconds, ValueError if a server refuses the rows."""
        assert self.weights is not None
        # The rows of each request
        size = self.size or -(-sum(len(prompts.keys) for prompts in all_prompts) // len(self.servers))
        batches = all_prompts
        if not any(server.has_own_batches for server in self.servers):
            batches = [Prompts.join(all_prompts)]
        parts: list[Part] = [(part, Future()) for prompts in batches for part in prompts.split(size)]
        futures = [future for _, future in parts]

        # Each server gets its first part at once, so that equal shares do not depend on who is faster.
        queue: SimpleQueue[Part | None] = SimpleQueue()
        ready_servers = [server for server in self.servers if not server.problem]
        server_parts = dict(zip(ready_servers, parts, strict=False))
        for part in parts[len(server_parts) :]:
            queue.put(part)
        end = Event()
        for server in self.servers:
            Thread(target=self.work, args=(server, queue, server_parts, end), name=server.url, daemon=True).start()
        Thread(target=watch, args=(queue, server_parts, end), daemon=True).start()

        self.silent_since = None
        pending = {*futures}
        try:
            while pending:
                done, pending = wait(pending, timeout=RETRY_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    self.silent_since = None
                self.any_server_alive()
            return split_rollouts(all_prompts, [future.result() for future in futures])
        finally:
            end.set()
            for _ in self.servers:
                queue.put(None)

    def work(
        self,
        server: RolloutServer,
        queue: SimpleQueue[Part | None],
        server_parts: dict[RolloutServer, Part],
        end: Event,
    ) -> None:
        """A thread of `sample`: sends parts to a server, one at a time, first the one that it has in `server_parts`,
        which holds the part of each server; if the server failed, tries it again after a pause."""
        assert self.weights is not None
        while not end.is_set():
            try:
                if server.problem or server.version != self.weights.version:
                    self.prepare(server)
            except Exception as error:  # it refuses the weights, but others may have taken them
                take_out(server, error)
            if server.problem:
                unsent_part = server_parts.pop(server, None)
                if unsent_part:
                    queue.put(unsent_part)
                end.wait(RETRY_SECONDS)
                continue
            part = server_parts.get(server) or queue.get()
            if part is None:
                return
            server_parts[server] = part
            prompts, future = part
            with contextlib.suppress(InvalidStateError):  # another server answered first
                try:
                    rollout = server.sample(prompts, self.weights)
                    future.set_result((rollout, ServerInfo(server.url, server.dtype)))
                except Unavailable as error:
                    take_out(server, error)
                    if server in server_parts:  # else `watch` has put it back
                        queue.put(part)
                except Exception as error:
                    future.set_exception(error)
            server_parts.pop(server, None)


def run_in_thread(compute: Callable[[], T]) -> Future[T]:
    """The result of a thread that does not outlive the process."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def split_rollouts(all_prompts: Sequence[Prompts], parts: Sequence[tuple[Rollout, ServerInfo]]) -> list[ServedRollout]:
    """The rollout of each of several prompts, from parts of their rows, in order, which may be padded otherwise."""
    # All rows, without their prompts
    canvases = []
    sources: list[ServerInfo] = []
    for part, source in parts:
        canvases.append(replace(part, ids=part.ids[:, -part.logps.shape[1] :]))
        sources += [source] * len(part.passes)
    all_rows = ServedRollout(**vars(Rollout.concatenate(canvases)), sources=tuple(sources))

    rollouts = []
    start = 0
    for prompts in all_prompts:
        end = start + len(prompts.keys)
        rows = all_rows.rows(slice(start, end), prompts.ids.device)
        rollouts.append(replace(rows, ids=torch.cat([prompts.ids, rows.ids], dim=1)))
        start = end
    return rollouts


def take_out(server: RolloutServer, error: Exception) -> None:
    """Stops sending rows to a server, and keeps the reason."""
    if not server.problem:
        logger.warning("No more rows go to a server until it answers: %s", error)
    server.problem = str(error)


def watch(queue: SimpleQueue[Part | None], server_parts: dict[RolloutServer, Part], end: Event) -> None:
    """A thread of `sample`: gives the part of a server that no longer answers, without having closed its connection, to
    the others. If the server answers after all, the first answer counts."""
    while not end.wait(WATCH_SECONDS):
        for server in [*server_parts]:
            try:
                server.ask("GET", "/model_info", seconds=CONNECT_SECONDS)
            except Exception as error:  # no answer, or one that makes no sense
                part = server_parts.pop(server, None)
                if part:
                    take_out(server, error)
                    queue.put(part)


class ServerRollouts(RolloutSource):
    """The rollout source of `rollout_mode server`. A checkpoint keeps nothing of it: a resumed run publishes its
    weights again."""

    name = "rollout_mode server"

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        super().connect(trainer)
        self.rescoring = Rescoring(trainer)
        self.servers = PolicyServers(trainer.args, trainer.accelerator, trainer.mask_token_id)

    @property
    def is_stale(self) -> bool:
        """Whether older weights than the trainer's sampled the last rollout."""
        return False

    def sample(self, request: RolloutRequest) -> Rollout:
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        return self.servers.rollout(model, trainer.state.global_step, self.prompts(request))

    def prompts(self, request: RolloutRequest) -> Prompts:
        """The rows as servers get them."""
        trainer = self.trainer
        config = trainer.model.config
        return Prompts(
            request.prompt_ids.cpu(),
            request.prompt_mask.cpu(),
            request.keys,
            trainer.sampling,
            trainer.stop_token_ids,
            aligned=block_size(config) is not None,
            vocabulary=vocabulary(config),
            mask_token_id=trainer.mask_token_id,
        )

    def verify(self, batch: Batch, sampled: Rollout, keys: Sequence[Sequence[int]]) -> None:
        """Scores a row of the rollout again. All processes call it together."""
        sources = cast("ServedRollout", sampled).sources
        server_dtypes = {source.dtype for source in sources}
        in_fp32 = self.trainer.accelerator.mixed_precision == "no" and self.trainer.model.dtype == torch.float32

        def where(row: int) -> str:
            return f"{sources[row].url}, row {row} (id {'-'.join(map(str, keys[row][1:]))}): "

        with raise_together():
            self.rescoring.check(
                batch,
                range(len(sources)),
                where,
                exact=in_fp32 and server_dtypes == {"float32"},
                certain=not self.is_stale,
            )

    def close(self) -> None:
        self.servers.close()
