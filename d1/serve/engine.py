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
from d1.sampling.graphs import compile_of, set_compile
from d1.sampling.record import Rollout, Step
from d1.sampling.settings import SamplingSettings
from d1.sampling.stream import RowRequest, Stream
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
    """A row that ended; lists have one value per token of its canvas."""

    ids: list[int]
    logps: list[float]
    entropies: list[float]
    reveal_steps: list[int]  # as in `Rollout`
    blocks: list[int]  # the length of each block
    passes: int
    forward_tokens: int
    weight_version: str


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


@dataclass
class Stopped(Exception):
    """The end of a row without a completion."""

    reason: str
    status: int = 503  # of HTTP

    def __str__(self) -> str:
        return self.reason


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
    began_again: bool = field(default=False, init=False)  # after a failure
    streamed: int = field(default=0, init=False)  # tokens of full blocks
    told: set[int] = field(default_factory=set, init=False)  # positions of `Revealed`, if it watches "steps"

    @property
    def lane(self) -> Lane:
        return Lane(self.settings.cache, self.settings.cfg_scale > 0, self.own, self.prompt_width, self.after)


# --- Weights from a folder --------------------------------------------------------------------------------------------


def weights_below(roots: Sequence[Path], path: str) -> Path:
    """The folder of weights that a request names; a relative name is looked for in each of `roots`. Raises ValueError
    unless it lies below one of `roots` with all of its files."""
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
        found, served = (getattr(config, name, None) for config in (other, model.config))
        if found != served:
            raise ValueError(f"{folder}: {name} is {found}, not {served}")
    new = load_model(folder, dtype=model.dtype, attn_implementation=attention_kernel(model.config))
    for tensor in (*new.parameters(), *new.buffers()):
        tensor.data = tensor.data.clone()  # else it is mapped from the file, which may be overwritten
    return set_compile(new, compile_of(model))


@dataclass(frozen=True)
class WeightUpdate:
    """New weights that wait until no row is at work."""

    load: Callable[[Any], Any]  # the present model -> the new one
    version: str
    source: str  # where they are from
    done: Future[None] = field(default_factory=Future)


# --- The engine: its public methods, which any thread may call, and the thread that samples ---------------------------

PAUSED = "rows are paused in mid-completion: continue them first"


class Engine:
    """Samples the rows that are given to `submit`, at most `batch_size` at a time, in the order of their arrival. All
    public methods may be called from any thread."""

    def __init__(self, model: Any, mask_token_id: int, *, batch_size: int, queue_size: int, version: str) -> None:
        self.model, self.mask_token_id, self.version = model, mask_token_id, version
        self.batch_size, self.queue_size = batch_size, queue_size
        self.changed = threading.Condition()  # guards all that follows, up to `lanes`
        self.waiting: deque[Row] = deque()
        self.dropped: set[int] = set()  # rows at work that leave before the next pass
        self.update: WeightUpdate | None = None
        self.paused = self.closing = False
        self.over = ""  # why no rows are taken any more
        self.rows: dict[int, Row] = {}  # at work; only the engine's thread removes them
        self.lanes: dict[Lane, Stream] = {}
        self.numbers = count()
        self.passes = self.tokens = self.row_passes = 0  # so far
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

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
        if self.over or self.closing:
            raise ConnectionError(self.over or "the server is stopping")

    def drop(self, rows: Sequence[Row]) -> None:
        """Stops rows without an event; rows that ended stay as they are."""
        with self.changed:
            numbers = {row.number for row in rows}
            self.waiting = deque(row for row in self.waiting if row.number not in numbers)
            self.dropped |= numbers & self.rows.keys()
            self.changed.notify()

    def pause(self) -> None:
        """Stops sampling after the current pass (with a cache: block), until `resume`; new rows wait. An update that
        waits for rows at work fails: they would not end."""
        update = None
        with self.changed:
            self.paused = True
            if self.update is not None and not self.can_update:
                update = self.update
                self.update = None
        if update is not None:
            update.done.set_exception(ValueError(PAUSED))

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify()

    def replace_model(self, load: Callable[[Any], Any], version: str, source: str = "") -> Future[None]:
        """Replaces the model by `load(model)` once no row is at work; new rows wait until then. If `load` raises, the
        future does, and the old model stays. A second call with the same `source`, the place of the weights, and
        version gets the same future. Raises QueueFull during another update, ValueError if rows are paused,
        ConnectionError after the engine's end."""
        with self.changed:
            self.check_serves()
            if self.update is not None:
                if (self.update.source, self.update.version) == (source, version):
                    return self.update.done
                raise QueueFull("another update of the weights is under way: try again later")
            if self.paused and self.rows.keys() - self.dropped:
                raise ValueError(PAUSED)
            self.update = WeightUpdate(load, version, source)
            self.changed.notify()
            return self.update.done

    def close(self) -> None:
        """Ends the thread, which stops all rows; no rows are taken any more."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    # --- The engine's thread alone calls what follows -----------------------------------------------------------------

    def run(self) -> None:
        """Samples until the engine is closed or fails; then stops the rows that are left."""
        over = "the server has stopped"
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(self.has_work)
                    if self.closing:
                        return
                self.turn()
        except Exception as error:
            logger.exception("the engine ends")
            over = f"the server cannot sample any more: {type(error).__name__}: {error}"
        finally:
            with self.changed:
                self.over, update, self.update = over, self.update, None
                rows = [*self.waiting, *(row for number, row in self.rows.items() if number not in self.dropped)]
            if update is not None:
                update.done.set_exception(ConnectionError(over))
            for row in rows:
                row.tell(Stopped(over))

    def has_work(self) -> bool:
        samples = not self.paused and (self.rows or self.waiting)
        return bool(self.closing or samples or self.can_update)

    @property
    def can_update(self) -> bool:
        return self.update is not None and not self.rows.keys() - self.dropped

    def turn(self) -> None:
        """Lets rows leave and enter, and makes a pass of each lane (with a cache: fills a block)."""
        with self.changed:
            can_update = self.can_update
            if self.paused and not can_update:
                return
            dropped, self.dropped = self.dropped, set()
            for number in dropped:
                self.rows.pop(number, None)
        if can_update:
            self.exchange_model()
            return
        for key in [*self.lanes]:
            self.guarded(key, partial(self.leave, dropped=dropped))
        joining: dict[Lane, list[Row]] = {key: [] for key in self.lanes}
        with self.changed:
            held = self.update is not None or self.paused  # either may have come since `can_update` was read
            for row in () if held else self.admitted():
                self.rows[row.number] = row
                joining.setdefault(row.lane, []).append(row)
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
        """Does the work of a lane. If it fails, e.g. out of memory, each of the lane's rows begins again by itself, a
        batch of its own as a whole. A row that fails once more stops with the error."""
        try:
            work(key)
        except Exception as error:
            logger.exception("sampling failed")
            self.lanes.pop(key, None)
            with self.changed:
                rows = [row for row in self.rows.values() if row.lane == key]
                failed = [row for row in rows if row.number not in self.dropped]
                for row in rows:
                    del self.rows[row.number]
                    self.dropped.discard(row.number)
                first_failures = [row for row in failed if not row.began_again]
                for row in first_failures:
                    row.began_again = True
                    row.streamed = 0
                    if not key.prompt_width:
                        row.own = f"alone {row.number}"
                self.waiting.extendleft(reversed(first_failures))
            for row in failed:
                if row not in first_failures:
                    row.tell(Stopped(f"sampling failed: {type(error).__name__}: {error}", status=500))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize()  # fails where the GPU does not work any more, which ends the engine

    def leave(self, key: Lane, dropped: set[int]) -> None:
        lane = self.lanes[key]
        if done := lane.pop_finished(dropped):
            self.complete(lane, *done)

    def complete(self, lane: Stream, numbers: Sequence[int], sampled: Rollout) -> None:
        """Tells rows of a lane that they have ended. Rows whose logits were not finite stop with an error."""
        faults = lane.nonfinite_errors()
        by_token = sampled.ids, sampled.logps, sampled.entropies, sampled.reveal_steps
        columns = sampled.passes, sampled.forward_tokens, *by_token
        values = zip(*(of.tolist() for of in columns), strict=True)
        for number, (passes, forward_tokens, *lists) in zip(numbers, values, strict=True):
            with self.changed:
                row = self.rows.pop(number, None)
                if row is None or number in self.dropped:  # nobody waits for it
                    self.dropped.discard(number)
                    continue
            if number in faults:
                fault = str(faults[number].named(f"row {row.rid}"))
                logger.error("%s", fault)
                row.tell(Stopped(fault, status=500))
                continue
            inside = len(row.ids) % row.settings.block_length if block_size(self.model.config) else None
            blocks = [*map(sum, row.settings.schedule(inside))]
            ids, logps, entropies, steps = (of[-row.settings.gen_length :] for of in lists)
            self.tokens += row.settings.gen_length
            counts = passes, forward_tokens, self.version
            row.tell(Completed(ids, logps, entropies, steps, blocks, *counts))

    def advance(self, key: Lane, new: Sequence[Row]) -> None:
        """Lets `new` rows enter a lane and makes a pass (with a cache: fills a block)."""
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
        generators = [keyed_generator(row.seed, *key_of(row.rid), device=device) for row in new]
        asked = zip(new, generators, strict=True)
        lane.add_rows([RowRequest(row.number, row.ids, row.settings, own, row.ends) for row, own in asked])
        if not lane.rows:
            del self.lanes[key]
            return
        rows = [self.rows[state.number] for state in lane.rows]
        for step in lane.steps():
            self.passes, self.row_passes = self.passes + 1, self.row_passes + len(step.rows)
            if any(row.watches == "steps" for row in rows):
                tell_step(rows, step)
            if not lane.cache.together:
                break
        for index, (row, state) in enumerate(zip(rows, lane.rows, strict=True)):
            full = state.filled - state.offset  # tokens of finished blocks
            if state.remaining == 0:
                full += state.size
            if not row.watches or full <= row.streamed:
                continue
            if not lane.batch.canvas.sums[index].isfinite():  # the error is told when the row leaves
                continue
            row.streamed = full
            completion = lane.batch.canvas.ids[index, -row.settings.gen_length :]
            row.tell(Finished(completion[:full].tolist(), self.version))

    def exchange_model(self) -> None:
        """Does the update and answers its future. If it fails, the old model stays."""
        update = self.update
        assert update is not None
        self.lanes = {}
        gc.collect()  # an earlier model may be left in a reference cycle
        failure: Exception | None = None
        try:
            self.model = update.load(self.model).to(self.model.device)
            self.version = update.version
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was loaded
            failure = error
        with self.changed:
            self.update = None
        if failure is None:
            update.done.set_result(None)
        else:
            update.done.set_exception(failure)


def tell_step(rows: Sequence[Row], step: Step) -> None:
    """Tells the `rows` that watch their steps what a forward pass revealed. A row that began again is told about each
    position once."""
    for number, index in enumerate(step.rows.tolist()):
        row = rows[index]
        if row.watches != "steps":
            continue
        start = step.canvas.shape[1] - row.settings.gen_length  # of the completion
        news = step.revealed[number]
        if row.began_again:
            was_told = [position - start in row.told for position in step.positions[number].tolist()]
            news = news & ~torch.tensor(was_told, device=news.device)
        positions = [position - start for position in step.positions[number][news].tolist()]
        logps = step.logps[number][news].tolist()
        entropies = step.entropies[number][news].tolist()
        if not all(map(math.isfinite, (*logps, *entropies))):  # the error is told when the row leaves
            continue
        if row.began_again and not positions:
            continue
        row.told.update(positions)
        ids = step.ids[number][news].tolist()
        row.tell(Revealed(positions, ids, logps, entropies, int(step.forward_tokens[index])))
