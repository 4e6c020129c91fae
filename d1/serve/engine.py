"""The thread that samples: rows wait in a queue, share a batch, and report what happens to them.

Rows with the same cache, and with or without guidance, share forward passes, whatever else they ask for
(`d1.sampling.stream.Stream`), unless a request wants a batch of its own. Each such group is a lane; lanes take turns.
New weights are taken when no row is at work.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import logging
import math
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from peft import PeftModel

from d1.files import check_files
from d1.masking import keyed_generator
from d1.models.adapters import add_adapter
from d1.models.kinds import block_size, native_config
from d1.models.load import load_model
from d1.sampling.loop import Rollout, Step
from d1.sampling.settings import SamplingSettings, check_sampler
from d1.sampling.stream import Asked, Stream
from d1.transformers_bridge import attention_kernel

logger = logging.getLogger(__name__)

# --- A row: what is asked for, and its events -------------------------------------------------------------------------

KEY = re.compile(r"\d{1,9}(-\d{1,9})*")


def key_of(rid: str) -> tuple[int, ...]:
    """The key of a row's random numbers: the numbers of an `rid` such as "1-0-17", which then draws as
    `keyed_generator(seed, 1, 0, 17)` does; a hash of any other text."""
    if KEY.fullmatch(rid):
        return tuple(map(int, rid.split("-")))
    digest = hashlib.sha256(rid.encode(errors="surrogatepass")).digest()
    return tuple(int.from_bytes(digest[start : start + 4]) for start in range(0, 16, 4))


@dataclass(frozen=True)
class Completed:
    """A row that ended; lists have one value per token of its canvas or, if it was cut short, of the first tokens."""

    ids: list[int]
    logps: list[float]
    entropies: list[float]
    reveal_steps: list[int]  # as in `Rollout`
    blocks: list[int]  # the length of each block
    passes: int
    forward_tokens: int
    weight_version: str
    cut_short: bool = False  # because the server stops


@dataclass(frozen=True)
class Revealed:
    """What one forward pass revealed in a row."""

    positions: list[int]  # of the completion, from 0
    ids: list[int]
    logps: list[float]
    entropies: list[float]
    forward_tokens: int  # so far


@dataclass(frozen=True)
class Finished:
    """The blocks of a row that are full, from the first on."""

    ids: list[int]
    weight_version: str


@dataclass(frozen=True)
class Stopped:
    """The end of a row without a completion."""

    reason: str
    status: int = 503  # of HTTP


class Lane(NamedTuple):
    """What the rows that share forward passes have in common."""

    cache: str | None
    guided: bool
    own: str = ""  # names a batch of its own; "": all rows that have none share passes
    prompt_width: int = 0  # the least width of its prompts, with their padding
    after: int = 0  # in a batch of its own: tokens of the prompts in the block where they end, as `rollout` groups them


Event = Completed | Revealed | Finished | Stopped


class QueueFull(Exception):
    """The queue has no room for more rows."""


@dataclass(eq=False)
class Row:
    """A completion that was asked for.

    `tell` gets its events, in the engine's thread: at the end `Completed` or `Stopped`; before that `Revealed` per
    forward pass if it watches "steps", and `Finished` per block if it watches "steps" or "blocks".
    """

    rid: str
    ids: Sequence[int]  # of the prompt
    settings: SamplingSettings
    ends: tuple[int, ...]  # the row leaves after the block that holds one of these; none: the whole canvas is sampled
    seed: int
    tell: Callable[[Event], None] = lambda event: None
    watches: str = ""
    own: str = ""  # the batch of its own that the row belongs to, as in `Lane`
    prompt_width: int = 0  # as in `Lane`
    after: int = 0  # as in `Lane`
    number: int = -1
    told: int = field(default=0, init=False)  # tokens of full blocks

    @property
    def lane(self) -> Lane:
        return Lane(self.settings.cache, self.settings.cfg_scale > 0, self.own, self.prompt_width, self.after)


# --- Weights from a folder --------------------------------------------------------------------------------------------


def weights_below(roots: Sequence[Path], path: str) -> Path:
    """The folder of weights that a request names; a relative name is looked for in each of `roots`.

    Raises:
        ValueError: it does not lie below one of `roots` with all of its files.
    """
    if not roots:
        raise ValueError("this server loads no weights: start it with --weights_dir FOLDER")
    for top in [root.resolve() for root in roots]:
        folder = (top / path).resolve()
        if folder.is_relative_to(top) and folder.is_dir():
            break
    else:
        raise ValueError(f"{path} lies in no folder of --weights_dir")
    if not all(file.resolve().is_relative_to(top) for file in folder.rglob("*")):
        raise ValueError(f"{path} holds links to files that do not lie below {top}")
    if not [*folder.glob("*.safetensors")]:
        raise ValueError(f"{path} holds no weights in safetensors")
    check_files(folder)
    return folder


@dataclass
class Loader:
    """Loads new weights; `start` loads the model that the server was started from, to which adapters are added."""

    start: Callable[[], Any]
    others: WeakSet[Any] = field(default_factory=WeakSet)  # models with other weights than that one

    def load(self, folder: Path, model: Any) -> Any:
        """The model in `folder`, or with the adapter in it; `model`, which is in use, does not change."""
        if not (folder / "adapter_config.json").exists():
            new = loaded(folder, model)
            self.others.add(new)
            return new
        base = self.start() if model in self.others else model
        shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        twin = copy.deepcopy(base, shared)  # with the same weights
        return add_adapter(twin.unload() if isinstance(twin, PeftModel) else twin, str(folder)).eval()


def loaded(folder: Path, model: Any) -> Any:
    """The model in `folder`, on the CPU, loaded as `model` was. Raises ValueError for a model of another kind."""
    other, _ = native_config(str(folder))
    for name in ("model_type", "vocab_size", "block_size"):
        if getattr(other, name, None) != getattr(model.config, name, None):
            raise ValueError(
                f"{folder}: {name} is {getattr(other, name, None)}, not {getattr(model.config, name, None)}"
            )
    new = load_model(folder, dtype=model.dtype, attn_implementation=attention_kernel(model.config))
    for tensor in (*new.parameters(), *new.buffers()):
        tensor.data = tensor.data.clone()  # else it is mapped from the file, which may be overwritten
    return new


# --- The engine: its public methods, which any thread may call, and the thread that samples ---------------------------


class Engine:
    """Samples the rows that are given to `submit`, at most `batch_size` at a time, in the order of their arrival. All
    public methods may be called from any thread."""

    def __init__(self, model: Any, mask_token_id: int, *, batch_size: int, queue_size: int, version: str) -> None:
        self.model, self.mask_token_id, self.version = model, mask_token_id, version
        self.batch_size, self.queue_size = batch_size, queue_size
        self.changed = threading.Condition()  # guards all that follows, up to `lanes`
        self.waiting: deque[Row] = deque()
        self.dropped: set[int] = set()  # rows at work that leave before the next pass
        self.update: tuple[Callable[[Any], Any], str, Future[None]] | None = None
        self.paused = self.closing = self.finishing = False
        self.over = ""  # why no rows are taken any more
        # Rows at work. Only the engine's thread removes them; other threads add their numbers to `dropped`. A row that
        # was retracted stays here under its old number until the thread sees it, and waits under a new one.
        self.rows: dict[int, Row] = {}
        self.lanes: dict[Lane, Stream] = {}
        self.numbers = count()
        self.passes = self.forward_tokens = self.tokens = self.row_passes = 0  # so far
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def check(self, settings: SamplingSettings) -> None:
        """Raises ValueError for settings that the model does not support."""
        check_sampler(settings, self.model.config)

    def submit(self, rows: Sequence[Row]) -> None:
        """Puts rows into the queue. Raises QueueFull if they do not fit into it together, ConnectionError if the engine
        ends or has ended."""
        with self.changed:
            self.check_serves()
            if len(self.waiting) + len(rows) > self.queue_size:
                raise QueueFull(f"{len(self.waiting)} rows are waiting, of at most {self.queue_size}: try again later")
            for row in rows:
                row.number = next(self.numbers)
            self.waiting.extend(rows)
            self.changed.notify()

    def check_serves(self) -> None:
        """Raises ConnectionError if the engine ends or has ended."""
        if self.over or self.closing or self.finishing:
            raise ConnectionError(self.over or "the server is stopping")

    def drop(self, rows: Sequence[Row]) -> None:
        """Stops rows without an event; rows that ended stay as they are."""
        with self.changed:
            numbers = {row.number for row in rows}
            self.waiting = deque(row for row in self.waiting if row.number not in numbers)
            self.dropped |= numbers & self.rows.keys()
            self.changed.notify()

    def stop_all(self, reason: str) -> None:
        """Stops all rows; each gets the event `Stopped`."""
        with self.changed:
            rows = [*self.waiting, *(row for number, row in self.rows.items() if number not in self.dropped)]
        self.drop(rows)
        for row in rows:
            row.tell(Stopped(reason))

    def pause(self, mode: str) -> None:
        """Stops sampling after the current pass (with a cache: block). The rows at work stop ("abort"), begin again
        later with the same random numbers ("retract"), or stay as they are ("in_place"); new rows wait."""
        with self.changed:
            self.paused = True
            if mode == "retract":
                again = [row for number, row in sorted(self.rows.items()) if number not in self.dropped]
                self.dropped |= self.rows.keys()
                self.put_back(again)
        if mode == "abort":
            self.stop_all("aborted by the operator of the server")
        with self.changed:
            self.changed.notify()

    def put_back(self, rows: Sequence[Row]) -> None:
        """Puts rows back into the queue, before those that wait; the caller holds the lock."""
        for row in rows:
            row.number, row.told = next(self.numbers), 0
        self.waiting.extendleft(reversed(rows))

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify()

    def replace_model(self, load: Callable[[Any], Any], version: str) -> Future[None]:
        """Replaces the model by `load(model)` once no row is at work; new rows wait until then. If `load` raises, the
        future does, and the old model stays. A second call for the same version gets the same future.

        Raises:
            QueueFull: an update to another version is under way.
            ValueError: rows are at work and will stay there.
            ConnectionError: the engine has ended.
        """
        with self.changed:
            self.check_serves()
            if self.update is not None:
                if self.update[1] == version:
                    return self.update[2]
                raise QueueFull("another update of the weights is under way: try again later")
            if self.paused and self.rows.keys() - self.dropped:
                raise ValueError(
                    "rows are paused in mid-completion: continue them, or pause with mode retract or abort"
                )
            done: Future[None] = Future()
            self.update = load, version, done
            self.changed.notify()
            return done

    def finish(self) -> None:
        """Ends all rows: those at work get their tokens up to the first that is hidden; those that wait stop, and so
        do batches of their own, which are useless in part. No rows are taken any more."""
        with self.changed:
            self.finishing = True
            self.changed.notify()

    def close(self) -> None:
        """Ends the thread and stops its rows."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    # --- The engine's thread alone calls what follows -----------------------------------------------------------------

    def run(self) -> None:
        """Samples until the engine is closed, has finished or fails; then stops the rows that are left."""
        over = "the server has stopped"
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(self.has_work)
                    if self.closing:
                        return
                if self.finishing:
                    for key, lane in self.lanes.items():
                        if not key.prompt_width and lane.rows:
                            self.complete(lane, *lane.so_far(), cut_short=True)
                    return
                self.turn()
        except Exception as error:
            logger.exception("the engine ends")
            over = f"the server cannot sample any more: {type(error).__name__}: {error}"
        finally:
            with self.changed:
                self.over, update, self.update = over, self.update, None
            if update is not None:
                update[2].set_exception(ConnectionError(over))
            self.stop_all(over)

    def has_work(self) -> bool:
        samples = not self.paused and (self.rows or self.waiting)
        return bool(self.closing or self.finishing or samples or self.can_update)

    @property
    def can_update(self) -> bool:
        return self.update is not None and not self.rows.keys() - self.dropped

    def turn(self) -> None:
        """Lets rows leave and enter, and makes a pass of each lane (with a cache: fills a block)."""
        with self.changed:
            dropped, can_update = self.dropped, self.can_update
            if can_update:
                self.rows.clear()
            elif self.paused:
                return
            for number in dropped:
                self.rows.pop(number, None)
            self.dropped = set()
        if can_update:
            self.exchange_model()
            return
        for key in [*self.lanes]:
            self.guarded(key, partial(self.leave, dropped=dropped))
        with self.changed:
            held = self.update is not None or self.paused  # either may have come since `can_update` was read
            new = {} if held else {row.number: row for row in self.admitted()}
            self.rows |= new
        joining: dict[Lane, dict[int, Row]] = {key: {} for key in self.lanes}
        for number, row in new.items():
            joining.setdefault(row.lane, {})[number] = row
        for key, rows in joining.items():
            self.guarded(key, partial(self.advance, new=rows))

    def admitted(self) -> list[Row]:
        """The waiting rows that the batch has room for; a batch of its own enters as a whole."""
        new: list[Row] = []
        while self.waiting:
            first = self.waiting[0]
            size = sum(row.own == first.own for row in self.waiting) if first.own else 1
            if size > self.batch_size - len(self.rows) - len(new):
                break
            new += [self.waiting.popleft() for _ in range(size)]
        return new

    def guarded(self, key: Lane, work: Callable[[Lane], None]) -> None:
        """Does the work of a lane. If it fails, e.g. out of memory, each of the lane's rows begins again by itself, and
        stops with the error if it fails once more. A batch of its own stops as a whole."""
        try:
            work(key)
        except Exception as error:
            logger.exception("sampling failed")
            self.lanes.pop(key, None)
            with self.changed:
                numbers = {number for number, row in self.rows.items() if row.lane == key}
                failed = [self.rows[number] for number in sorted(numbers - self.dropped)]
                self.rows = {number: row for number, row in self.rows.items() if number not in numbers}
                self.dropped -= numbers
                if again := len(failed) > 1 and not key.prompt_width:
                    for row in failed:
                        row.own = f"alone {row.number}"
                    self.put_back(failed)
            for row in () if again else failed:
                row.tell(Stopped(f"sampling failed: {type(error).__name__}: {error}", status=500))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize()  # fails where the GPU does not work any more, which ends the engine

    def leave(self, key: Lane, dropped: set[int]) -> None:
        lane = self.lanes[key]
        if done := lane.leave(dropped):
            self.complete(lane, *done)

    def complete(self, lane: Stream, numbers: Sequence[int], sampled: Rollout, cut_short: bool = False) -> None:
        """Tells rows of a lane that they have ended, whole or `cut_short` before their first hidden token. Rows whose
        logits were not finite stop with an error."""
        faults = lane.faults()
        by_token = sampled.ids, sampled.logps, sampled.entropies, sampled.reveal_steps
        values = zip(*(of.tolist() for of in (*by_token, sampled.passes, sampled.forward_tokens)), strict=True)
        for number, (*lists, passes, forward_tokens) in zip(numbers, values, strict=True):
            with self.changed:
                row = self.rows.pop(number, None)
                if row is None or number in self.dropped:  # nobody waits for it, or it begins again
                    self.dropped.discard(number)
                    continue
            if number in faults:
                fault = str(faults[number].named(f"row {row.rid}"))
                logger.error("%s", fault)
                row.tell(Stopped(fault, status=500))
                continue
            inside = len(row.ids) % row.settings.block_length if block_size(self.model.config) else None
            blocks = [*map(sum, row.settings.schedule(inside))]
            lists = [of[-row.settings.gen_length :] for of in lists]
            short = cut_short and self.mask_token_id in lists[0]
            if short:
                lists = [of[: lists[0].index(self.mask_token_id)] for of in lists]
            self.tokens += len(lists[0])
            self.forward_tokens += forward_tokens
            ids, logps, entropies, steps = lists
            row.tell(Completed(ids, logps, entropies, steps, blocks, passes, forward_tokens, self.version, short))

    def advance(self, key: Lane, new: dict[int, Row]) -> None:
        """Lets `new` rows enter a lane and makes a pass (with a cache: fills a block). The rows come under the numbers
        that they were admitted with, because a retract may have changed their own since."""
        if key not in self.lanes:
            self.lanes[key] = Stream(
                self.model,
                mask_token_id=self.mask_token_id,
                cache=key.cache,
                guided=key.guided,
                prompt_width=key.prompt_width,
                alone=bool(key.own),
            )
        lane, device = self.lanes[key], self.model.device
        generators = [keyed_generator(row.seed, *key_of(row.rid), device=device) for row in new.values()]
        asked = zip(new.items(), generators, strict=True)
        lane.enter([Asked(number, row.ids, row.settings, own, row.ends) for (number, row), own in asked])
        if not lane.rows:
            del self.lanes[key]
            return
        rows = [self.rows[state.number] for state in lane.rows]
        for step in lane.steps():
            self.passes, self.row_passes = self.passes + 1, self.row_passes + len(step.rows)
            if any(row.watches == "steps" for row in rows):
                tell_step(rows, step)
            if not lane.cache.together or self.finishing:
                break
        for index, (row, state) in enumerate(zip(rows, lane.rows, strict=True)):
            full = state.filled - state.offset + (state.size if state.left == 0 else 0)  # tokens of finished blocks
            with self.changed:
                if not row.watches or full <= row.told or row.number != state.number:  # the last: it was put back
                    continue
                if not lane.batch.canvas.sums[index].isfinite():  # the error is told when the row leaves
                    continue
                row.told = full
            completion = lane.batch.canvas.ids[index, -row.settings.gen_length :]
            row.tell(Finished(completion[:full].tolist(), self.version))

    def exchange_model(self) -> None:
        """Does the update and answers its future; if the old model is lost, too, raises the error: the engine ends."""
        assert self.update is not None
        (load, version, done), self.lanes = self.update, {}
        old, device, failure = self.model, self.model.device, None
        try:
            self.model, self.version = exchanged(load, old), version
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was loaded
            failure = error
        with self.changed:
            self.update = None
        if failure is None:
            done.set_result(None)
            return
        done.set_exception(failure)
        if any(weight.device != device for weight in old.parameters()):  # the old model could not be put back
            raise failure


def exchanged(load: Callable[[Any], Any], old: Any) -> Any:
    """`load(old)`, on the device of `old`. If a GPU has no room for both, the old weights wait in the host's memory and
    are put back if `load` or the move then fails."""
    device = old.device
    try:
        return load(old).to(device)
    except torch.OutOfMemoryError:
        logger.warning("The GPU has no room for old and new weights: the old ones wait in the host's memory.")
    gc.collect()
    try:
        old.to("cpu")
        return load(old).to(device)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        old.to(device)
        raise


def tell_step(rows: Sequence[Row], step: Step) -> None:
    """Tells the `rows` that watch their steps what a forward pass revealed."""
    for number, index in enumerate(step.rows.tolist()):
        row, kept = rows[index], step.revealed[number]
        if row.watches == "steps":
            tensors = step.positions, step.ids, step.logps, step.entropies
            positions, ids, logps, entropies = (of[number][kept].tolist() for of in tensors)
            if not all(map(math.isfinite, (*logps, *entropies))):  # the error is told when the row leaves
                continue
            first, tokens = step.canvas.shape[1] - row.settings.gen_length, int(step.forward_tokens[index])
            row.tell(Revealed([position - first for position in positions], ids, logps, entropies, tokens))
