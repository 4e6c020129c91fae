"""Programs that sample instead of the trainer: servers, and a user's `rollout_func`.

From top to bottom: weights that processes share; the folder through which servers get them; rollouts by servers; the
check that log-probs of another program are the trainer's; the contract of `rollout_func`; and rollouts that servers
sample ahead of updates.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import get_last_checkpoint

from d1.models.adapters import base_digest
from d1.models.convert import write_weights
from d1.rl.batch import SCORED, Batch, RolloutRecord, sampled_rows
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import OBJECTIVES, PENALTIES
from d1.runs.cli import from_all, from_rank_0
from d1.sampling import Rollout
from d1.scoring import ESTIMATORS, Scores, Views
from d1.scoring.replay import Written, replay_views
from d1.scoring.rollouts import CanvasBlocks
from d1.serve.client import (
    CONNECT,
    Expected,
    Prompts,
    RolloutServer,
    Unavailable,
    Weights,
    check_ids,
    check_row,
    numbers,
    reveal_steps,
)

logger = logging.getLogger(__name__)

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


MEET = 5.0  # seconds after which waiting processes meet, so that no collective call of theirs times out


def result_of(future: Future[T] | None) -> T:
    """The result of a future of the first process, which all processes get; an error of it is raised in all."""
    first = cast("Future[T]", future)
    while not from_rank_0(lambda: bool(wait([first], MEET).done)):
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
            # An engine reads any folder of its own machine; on another machine, the run's folder must be shared.
            shared = [str(self.output_dir)]
            folders = [shared if one.folders is None and not one.is_local else one.folders for one in known]
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


# --- Servers ----------------------------------------------------------------------------------------------------------
# The first process sends the rows of all processes, through one queue; a server has the policy's weights before it gets
# rows. A server that fails is taken out, and its rows go to the others; it comes back with the current weights.
# Completions do not depend on who sampled them, because a row's random numbers depend on its key alone.

PAUSE = 1.0  # seconds until a server that failed is tried again
WATCH = 10.0  # seconds between questions to a server that has rows
REMIND = 60.0  # seconds between messages while the run waits

Part = tuple[Prompts, "Future[tuple[Rollout, Source]]"]  # rows; their rollout, and who sampled it


class Source(NamedTuple):
    """A server: its address, and the data type in which it computes (None: it does not say)."""

    url: str
    dtype: str | None


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """A rollout that servers sampled.

    Attributes:
        sources: the server that sampled each row.
    """

    sources: tuple[Source, ...] = ()

    def rows(self, some: slice, device: torch.device) -> ServedRollout:
        """Some of the rows, on a device."""
        columns: dict[str, Any] = {
            name: of[some].to(device) for name, of in vars(self).items() if isinstance(of, Tensor)
        }
        return ServedRollout(**columns, sources=self.sources[some])


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
        self.accelerator, self.mask_token_id = accelerator, mask_token_id
        self.servers = [RolloutServer(url, args.rollout_own_batch) for url in args.rollout_server_base_url or ()]
        self.size, self.patience = args.rollout_batch_size, args.rollout_server_timeout
        self.run: str = from_rank_0(lambda: uuid.uuid4().hex)  # an earlier run's weights have other names
        self.weights: Weights | None = None
        self.base: str | None = None  # what `base_of` found
        self.folder = WeightsFolder(Path(str(args.output_dir)))
        self.silent_since: float | None = None
        self.told = -REMIND  # when the last message about it was logged
        from_rank_0(self.connect)

    def connect(self) -> None:
        """Asks all servers what they serve, until one answers."""
        self.prepare_all(self.servers)
        while not self.someone_answers():
            time.sleep(PAUSE)
            self.prepare_all(self.servers)

    def someone_answers(self) -> bool:
        """False while no server answers. Raises ConnectionError, which names the last checkpoint, after `patience`."""
        if not all(server.problem for server in self.servers):
            return True
        now = time.monotonic()
        self.silent_since = now if self.silent_since is None else self.silent_since
        problems = "; ".join(str(server.problem) for server in self.servers)
        if now - self.silent_since >= self.patience:
            output_dir = self.folder.output_dir
            last = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
            way_on = f"continue from {last} with --resume" if last else "no checkpoint is complete: start again"
            raise ConnectionError(f"no rollout server has answered for {self.patience:g} seconds: {problems}. {way_on}")
        if now - self.told >= REMIND:
            self.told = now
            logger.warning("Waiting for a rollout server, for at most %g seconds: %s", self.patience, problems)
        return False

    def prepare_all(self, servers: Sequence[RolloutServer]) -> None:
        with ThreadPoolExecutor(len(self.servers)) as pool:
            [*pool.map(self.prepare, servers)]

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
            self.weights = Weights(self.run, version, folder, self.base_of(model, weights), self.folder.frozen)
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
        asked, future = from_all(prompts), None
        if self.accelerator.is_main_process:
            future = in_thread(lambda: self.sample(asked))
        return result_of(future)[self.accelerator.process_index].rows(slice(None), self.accelerator.device)

    def sample(self, asked: Sequence[Prompts]) -> list[ServedRollout]:
        """The rollout of each of several prompts by the servers that answer, with the weights of the last `publish`.
        Rows of several prompts share requests unless a server computes a request as a batch of its own. Raises
        ConnectionError if none has answered for `patience` seconds, ValueError if a server refuses the rows."""
        assert self.weights is not None
        size = self.size or -(-sum(len(prompts.keys) for prompts in asked) // len(self.servers))
        batches = asked if any(server.batches_alone for server in self.servers) else [Prompts.joined(asked)]
        parts: list[Part] = [(part, Future()) for prompts in batches for part in prompts.split(size)]
        futures = [future for _, future in parts]
        queue: SimpleQueue[Part | None] = SimpleQueue()
        # Each server gets its first part at once, so that equal shares do not depend on who is faster.
        held = dict(zip((server for server in self.servers if not server.problem), parts, strict=False))
        for part in parts[len(held) :]:
            queue.put(part)
        over = Event()
        for server in self.servers:
            Thread(target=self.work, args=(server, queue, held, over), name=server.url, daemon=True).start()
        Thread(target=watch, args=(queue, held, over), daemon=True).start()
        self.silent_since, left = None, {*futures}
        try:
            while left:
                done, left = wait(left, timeout=PAUSE, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    self.silent_since = None
                self.someone_answers()
            return rollouts_of(asked, [future.result() for future in futures])
        finally:
            over.set()
            for _ in self.servers:
                queue.put(None)

    def work(
        self, server: RolloutServer, queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event
    ) -> None:
        """A thread of `sample`: sends parts to a server, one at a time, first the one that is its own in `held`, the
        parts that servers have; if the server failed, tries it again after a pause."""
        assert self.weights is not None
        while not over.is_set():
            try:
                if server.problem or server.version != self.weights.version:
                    self.prepare(server)
            except Exception as error:  # it refuses the weights, but others may have taken them
                take_out(server, error)
            if server.problem:
                if own := held.pop(server, None):
                    queue.put(own)
                over.wait(PAUSE)
                continue
            part = held.get(server) or queue.get()
            if part is None:
                return
            held[server], (prompts, future) = part, part
            with contextlib.suppress(InvalidStateError):
                try:
                    future.set_result((server.sample(prompts, self.weights), Source(server.url, server.dtype)))
                except Unavailable as error:
                    take_out(server, error)
                    if server in held:  # else `watch` has put it back
                        queue.put(part)
                except Exception as error:
                    future.set_exception(error)
            held.pop(server, None)


def in_thread(compute: Callable[[], T]) -> Future[T]:
    """The result of a thread that does not outlive the process."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def rollouts_of(asked: Sequence[Prompts], sampled: Sequence[tuple[Rollout, Source]]) -> list[ServedRollout]:
    """The rollout of each of several prompts, from parts of their rows, in order, which may be padded otherwise."""
    canvases = [replace(part, ids=part.ids[:, -part.logps.shape[1] :]) for part, _ in sampled]
    sources = tuple(source for part, source in sampled for _ in part.passes)
    everything, rollouts, first = ServedRollout(**vars(Rollout.joined(canvases)), sources=sources), [], 0
    for prompts in asked:
        own = everything.rows(slice(first, first + len(prompts.keys)), prompts.ids.device)
        rollouts.append(replace(own, ids=torch.cat([prompts.ids, own.ids], dim=1)))
        first += len(prompts.keys)
    return rollouts


def take_out(server: RolloutServer, error: Exception) -> None:
    """Stops sending rows to a server, and keeps the reason."""
    if not server.problem:
        logger.warning("No more rows go to a server until it answers: %s", error)
    server.problem = str(error)


def watch(queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event) -> None:
    """A thread of `sample`: gives the part of a server that no longer answers, without having closed its connection, to
    the others. If the server answers after all, the first answer counts."""
    while not over.wait(WATCH):
        for server in [*held]:
            try:
                server.ask("GET", "/model_info", seconds=CONNECT)
            except Unavailable as error:
                if part := held.pop(server, None):
                    take_out(server, error)
                    queue.put(part)


# --- Score a row again ------------------------------------------------------------------------------------------------
# Whether a server's or an engine's log-probabilities are the trainer's own (`DiffuGRPOTrainer.check_scores`).

STATES = 8  # in which a row is scored
EXACT = 1e-2  # largest difference in nats allowed in fp32, where rounding gives 1e-5 to 1e-3
CLOSE = 0.5  # largest median difference in nats allowed between data types, which usually gives about 0.02


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of prompts (rows, prompt), without their padding."""
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


def differences(one: Batch, scores: Scores, views: Views, exact: bool) -> str:
    """How the record of one row differs from the trainer's own `scores` of it in `views`; "" if it does not. `exact`:
    both programs compute in fp32 with the same weights, so that only rounding may differ."""
    scored = views.weights.ne(0).any(1)
    pairs = {"log-probabilities": (one["rollout_logps"], scores.logps)}
    if "rollout_entropies" in one and scores.entropies is not None:
        pairs["entropies"] = one["rollout_entropies"], scores.entropies
    for what, (told, own) in pairs.items():
        gaps = (own.float() - told)[scored].abs().cpu()
        at = int(gaps.argmax())
        if gaps.median() <= CLOSE and not (exact and gaps[at] > EXACT):
            continue
        position = int(scored[0].nonzero()[at])
        return (
            f"the {what} are not those of this run's model, which scored {len(gaps)} tokens again: the "
            f"difference is {gaps.median():.3g} nats in the median, and at token {position} they are "
            f"{told[0, position]:.4g} and {own[0, position]:.4g}"
        )
    return ""


def states_of(one: Batch, blocks: CanvasBlocks, number: int) -> Views:
    """Up to `STATES` views of one row, evenly spaced over its steps: the states in which it was sampled, and the tokens
    that were revealed there."""
    prompts, device = one["prompt_mask"], one["canvas_ids"].device
    sampled = sampled_rows(one | {"completion_mask": one["reveal_steps"] >= 0}, blocks)
    written = Written.of(sampled)
    steps = int(written.steps.max()) + 1
    count = min(STATES, steps)
    chosen = (torch.arange(count, device=device) * steps // count + number) % steps
    weights = torch.ones(1, count, device=device)
    return replay_views(torch.zeros_like(prompts, dtype=torch.bool).unsqueeze(1), written, chosen.unsqueeze(0), weights)


# --- A user's rollout_func --------------------------------------------------------------------------------------------
# TRL's `rollout_func(prompts, trainer)` gets the chats of this process's rows, and returns a dict of lists, one element
# per row, which docs/serve.md describes. `logprobs` and `entropies` are of the distribution that `Rollout` documents.
# A key of `RECORD` may be missing, or None, if no entry of the run reads it. Other keys go to the rewards.

UserRollout = Callable[[list, Any], dict[str, Any]]
TOKENS = ("prompt_ids", "completion_ids")
RECORD = {"steps": "reveal_steps", "logprobs": "rollout_logps", "entropies": "rollout_entropies"}
ALSO = ("reveal_steps", "step_maps")  # `steps` under that name; as a server's answer has them, from 1 in each block
READ = {"reveal_steps": "steps", "logps": "logprobs", "entropies": "entropies"}  # of `SampledRows`
KEYS = {"completion_ids": "canvas_ids", **RECORD}


def keys_read(args: DiffuGRPOConfig) -> dict[str, list[str]]:
    """For each key of `RECORD`, the settings of the run whose entries read it."""
    estimator, of_estimator = ESTIMATORS[args.estimator], f"estimator {args.estimator}"
    fields = {*["reveal_steps"] * estimator.replays, *estimator.reads(args.view_settings())}
    readers = [
        *((key, of_estimator, field in fields) for field, key in READ.items()),
        ("logprobs", "sampling_weight_cap", args.sampling_weight_cap is not None),
        ("steps", f"objective {args.objective}", OBJECTIVES[args.objective].reads_steps),
        ("steps", f"kl {args.kl}", PENALTIES[args.kl].reads_steps and args.beta and not args.has_trls_kl),
        ("steps", f"scored_tokens {args.scored_tokens}", SCORED[args.scored_tokens].reads_steps),
    ]
    return {key: [name for of, name, reads in readers if of == key and reads] for key in RECORD}


def check_rollout_func(args: DiffuGRPOConfig) -> None:
    """Raises ValueError for settings that no `rollout_func` can serve."""
    if args.rollout_mode == "server":
        raise ValueError("rollout_func samples the rollouts, and so would rollout_mode server: choose one of them")
    if args.sampling_settings().edits is not None:
        raise ValueError("edit_threshold: a rollout_func does not return what edits replaced: leave it out")
    if args.sampling_settings().noting:
        raise ValueError("a rollout_func returns no ranks or step_logps: no gumbel, log_places, trajectory_weight_cap")
    if args.max_compute_tokens is not None:
        raise ValueError("max_compute_tokens counts the tokens of rollouts, which a rollout_func does not tell")


def read_returned(returned: Any, rows: int, args: DiffuGRPOConfig) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Splits what a `rollout_func` returned for `rows` rows: the keys of a rollout, and the others. Raises ValueError
    if it is no dictionary of lists, or lacks a key that the run reads."""
    if not isinstance(returned, dict):
        raise ValueError(f"rollout_func returned {type(returned).__name__}: expected a dictionary of lists")
    if returned.get("env_mask") is not None:
        raise ValueError("rollout_func returned env_mask: every token of a canvas is the model's, so leave it out")
    given = {name: returned[name] for name in (*TOKENS, *RECORD, *ALSO) if returned.get(name) is not None}
    for name, values in given.items():
        if not isinstance(values, Sequence) or len(values) != rows:
            found = len(values) if isinstance(values, Sequence) else type(values).__name__
            raise ValueError(f"rollout_func got {rows} prompts: expected a list of as many {name}, got {found}")
    if len(of_steps := [name for name in ("steps", *ALSO) if name in given]) > 1:
        raise ValueError(f"rollout_func returned {' and '.join(of_steps)}: return one of them")
    if "reveal_steps" in given:
        given["steps"] = given.pop("reveal_steps")
    if missing := {*TOKENS}.difference(given):
        raise ValueError(f"rollout_func returned no {min(missing)}: every method needs them")
    for name, names in keys_read(args).items():
        if names and name not in given and not (name == "steps" and of_steps):
            raise ValueError(
                f"rollout_func returned no {name}, which --method {args.method} reads ({', '.join(names)}): "
                "return them, or choose a method that reads tokens alone, such as d1 or espo"
            )
    return given, {name: value for name, value in returned.items() if name not in (*TOKENS, *RECORD, *ALSO, "env_mask")}


def record_of(
    given: dict[str, Sequence[Any]], args: DiffuGRPOConfig, expected: Expected, device: torch.device
) -> RolloutRecord:
    """The record of the rows, checked: `canvas_ids`, `reveal_steps`, and those of `RECORD` that are given."""
    beyond_end = ESTIMATORS[args.estimator].replays or SCORED[args.scored_tokens].after_the_end
    whole = f"--method {args.method} reads what follows the EOS" if beyond_end else ""
    shape = len(given["completion_ids"]), int(args.max_completion_length or 0)
    # A canvas that is cut is filled with EOS, as under the EOS stop.
    record = {"canvas_ids": torch.full(shape, expected.ends[0]), "reveal_steps": torch.full(shape, -1)}
    record |= {key: torch.zeros(shape) for name, key in RECORD.items() if name in given and name != "steps"}
    for number, prompt in enumerate(given["prompt_ids"]):
        where = f"rollout_func, row {number}: "
        check_ids(prompt, f"{where}prompt_ids", expected.vocabulary, args.max_prompt_length, "max_prompt_length")
        row = {name: values[number] for name, values in given.items() if name != "prompt_ids"}
        if "step_maps" in row:
            steps = numbers(row.pop("step_maps"), f"{where}step_maps", len(row["completion_ids"]))
            row["steps"] = reveal_steps(steps.tolist(), expected.schedule(len(prompt)))
        for name, values in check_row(where, row, len(prompt), expected, whole).items():
            rows = record[KEYS[name]]
            rows[number, : len(values)] = values.to(rows.dtype)
    return cast("RolloutRecord", {name: rows.to(device) for name, rows in record.items()})


# --- Rollouts ahead of updates ----------------------------------------------------------------------------------------
# With `rollout_staleness` N, servers sample the next rollouts while the trainer learns.
#
# Rollout k is sampled with the weights before the updates on rollout max(0, k - N), however fast trainer and servers
# are. When rollout k is needed, the first process keeps a copy of the weights and requests rollout k + N with it. One
# thread works on the requests in order, so that all rows of a rollout have the same weights. It samples the rows of
# all processes; they wait for rollout k together. A checkpoint holds the copies that later rollouts need, and a resumed
# run requests these rollouts again: they depend on weights and keys alone.

FOLDER = "rollouts_ahead"  # of a checkpoint


class SampledAhead(NamedTuple):
    """A rollout that was requested: the rows of all processes, and the step of its weights."""

    prompts: Prompts
    rollout: ServedRollout
    step: int


class Ahead:
    """The rollouts ahead of a trainer.

    Args:
        prompts_of: from the number of a rollout, its rows of all processes; None if the run ends before it.

    Attributes:
        kept: rollout number -> optimizer steps before its updates, the folder with the weights of that time, and that
            with those that no version changes (`WeightsFolder.frozen`).
        requests: rollout number -> its request. Only the first process uses `kept` and `requests`.
        stale_steps: optimizer steps that the trainer is ahead of the weights that sampled the last rollout taken.
    """

    def __init__(self, servers: PolicyServers, staleness: int, prompts_of: Callable[[int], Prompts | None]) -> None:
        self.servers, self.staleness, self.prompts_of = servers, staleness, prompts_of
        self.folders = [WeightsFolder(servers.folder.output_dir, f"-{index}") for index in range(staleness + 1)]
        self.kept: dict[int, tuple[int, Path, Path | None]] = {}
        self.requests: dict[int, Future[SampledAhead]] = {}
        self.thread = ThreadPoolExecutor(1)
        self.at_work, self.stale_steps = False, 0

    def weights_of(self, number: int) -> int:
        """The number of the rollout before whose updates the trainer had the weights that sample rollout `number`."""
        return max(0, number - self.staleness)

    def take(self, model: Any, number: int, step: int) -> tuple[Prompts, ServedRollout]:
        """Rollout `number` of all processes and its rows, due after `step` optimizer steps; requests those up to the
        one that the present weights of `model` sample. All processes call it together. Raises as `sample`."""

        def in_first_process(weights: WholeWeights) -> None:
            self.keep(number, step, model, weights)
            for later in range(number, number + self.staleness + 1):
                if later not in self.requests and (prompts := self.prompts_of(later)):
                    of, folder, frozen = self.kept[self.weights_of(later)]
                    base = self.servers.base_of(model, weights)
                    sent = Weights(self.servers.run, folder.name, folder, base, frozen)
                    self.requests[later] = self.thread.submit(self.sample, prompts, sent, of)

        with_weights(model, in_first_process)
        self.at_work = True
        prompts, rollout, sampled_at = result_of(self.requests.pop(number, None))
        self.stale_steps = step - sampled_at
        return prompts, rollout

    def keep(self, number: int, step: int, model: Any, given: WholeWeights | Path) -> None:
        """Keeps the weights of `model`, or those in a folder, from before the updates on a rollout."""
        folder, version = self.folders[number % len(self.folders)], f"{self.servers.run}-{step}"
        self.kept = {one: where for one, where in self.kept.items() if one > number - len(self.folders)}
        written = folder.write(model, version, self.servers.servers, given)
        self.kept[number] = step, written, folder.frozen

    def sample(self, prompts: Prompts, weights: Weights, step: int) -> SampledAhead:
        """In the thread: the rollout of `prompts` by servers that take `weights`, those of a `step`, first."""
        self.servers.weights = weights
        return SampledAhead(prompts, self.servers.sample([prompts])[0], step)

    def finish(self) -> None:
        """Waits for all requests, so that something else can be sampled with other weights."""
        if self.at_work:
            wait(self.requests.values())
            self.servers.weights = None  # in all processes, so that all of them publish
            self.at_work = False

    def close(self) -> None:
        """Drops all requests and removes the weights that were kept."""
        self.thread.shutdown(cancel_futures=True)
        self.thread = ThreadPoolExecutor(1)
        self.requests.clear()
        self.kept.clear()
        for folder in self.folders:
            folder.remove()

    def save(self, checkpoint: Path, following: int) -> None:
        """Writes the weights of the rollouts from number `following` on into a checkpoint; in the first process."""
        for number in {self.weights_of(later) for later in range(following, following + self.staleness)}:
            step, folder, _ = self.kept[number]
            shutil.copytree(folder, checkpoint / FOLDER / f"{number}-{step}", dirs_exist_ok=True)

    def load(self, checkpoint: Path, model: Any) -> None:
        """Takes what `save` wrote, weights of `model`; in the first process."""
        for folder in (checkpoint / FOLDER).iterdir():
            number, step = map(int, folder.name.split("-"))
            self.keep(number, step, model, folder)
