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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from d1.files import check_files
from d1.masking import keyed_generator
from d1.models.adapters import add_adapter
from d1.models.kinds import block_size, max_positions, native_config
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
    batch_name: str = ""  # of a batch of its own; "": all rows that have none share passes
    prompt_width: int = 0  # the least width of its prompts, with their padding
    # In a batch of its own: tokens of the prompts in the block where they end, as `rollout` groups them
    prompt_in_block: int = 0


Event = Completed | Revealed | Finished | Stopped


class QueueFull(Exception):
    """The queue has no room for more rows."""


@dataclass(eq=False)
class Row:
    """A completion that was asked for.

    `on_event` gets its events, in the engine's thread: at the end `Completed` or `Stopped`; before that `Revealed` per
    forward pass if it watches "steps", and `Finished` per block if it watches "steps" or "blocks".
    """

    rid: str
    ids: Sequence[int]  # of the prompt
    settings: SamplingSettings
    ends: tuple[int, ...]  # the row leaves after the block that holds one of these; none: the whole canvas is sampled
    seed: int
    on_event: Callable[[Event], None] = lambda event: None
    watches: str = ""
    batch_name: str = ""  # as in `Lane`
    prompt_width: int = 0  # as in `Lane`
    prompt_in_block: int = 0  # as in `Lane`
    number: int = -1
    has_restarted: bool = field(default=False, init=False)  # after a failure
    streamed: int = field(default=0, init=False)  # tokens of full blocks
    reported_passes: int = field(default=0, init=False)  # of `Revealed`, if it watches "steps"

    @property
    def lane(self) -> Lane:
        return Lane(
            cache=self.settings.cache,
            guided=self.settings.cfg_scale > 0,
            batch_name=self.batch_name,
            prompt_width=self.prompt_width,
            prompt_in_block=self.prompt_in_block,
        )


# --- Weights from a folder --------------------------------------------------------------------------------------------


def weights_below(roots: Sequence[Path], path: str) -> Path:
    """The folder of weights that a request names; a relative name is looked for in each of `roots`. Raises ValueError
    unless it lies below one of `roots` with all of its files."""
    if not roots:
        raise ValueError("this server loads no weights: start it with --weights_dir FOLDER")
    for root in [root.resolve() for root in roots]:
        folder = (root / path).resolve()
        if folder.is_relative_to(root) and folder.is_dir():
            break
    else:
        raise ValueError(f"{path} lies in no folder of --weights_dir")
    if not all(file.resolve().is_relative_to(root) for file in folder.rglob("*")):
        raise ValueError(f"{path} holds links to files that do not lie below {root}")
    if not [*folder.glob("*.safetensors")]:
        raise ValueError(f"{path} holds no weights in safetensors")
    check_files(folder)
    return folder


@dataclass
class Loader:
    """Loads new weights; `load_base` loads the model that the server was started from, to which adapters are added."""

    load_base: Callable[[], Any]
    # Of each model that was loaded here, that model below its adapter; None: it has weights of its own
    bases: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)

    def load(self, folder: Path, model: Any) -> Any:
        """The model in `folder`, or with the adapter in it; `model`, which is in use, does not change."""
        if not (folder / "adapter_config.json").exists():
            new_model = load_like(folder, model)
            self.bases[new_model] = None
            return new_model
        base = self.bases.get(model, model)
        if base is None:
            base = self.load_base()
        memo = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        twin = copy.deepcopy(base, memo)  # which shares the weights of `base`
        new_model = add_adapter(twin, str(folder)).eval()
        self.bases[new_model] = base
        return new_model


def load_like(folder: Path, model: Any) -> Any:
    """The model in `folder`, on the CPU, loaded as `model` was. Raises ValueError for a model of another kind."""
    new_config, _ = native_config(str(folder))
    for name in ("model_type", "vocab_size", "block_size"):
        new_value = getattr(new_config, name, None)
        value = getattr(model.config, name, None)
        if new_value != value:
            raise ValueError(f"{folder}: {name} is {new_value}, not {value}")
    new_room, room = max_positions(new_config), max_positions(model.config)
    if new_room != room:  # requests that wait were checked for the old one
        raise ValueError(f"{folder}: the model has {new_room} positions, not {room}")
    new_model = load_model(folder, dtype=model.dtype, attn_implementation=attention_kernel(model.config))
    for tensor in (*new_model.parameters(), *new_model.buffers()):
        tensor.data = tensor.data.clone()  # else it is mapped from the file, which may be overwritten
    return set_compile(new_model, compile_of(model))


@dataclass(frozen=True)
class WeightUpdate:
    """New weights that wait until no row is at work."""

    load: Callable[[Any], Any]  # the present model -> the new one
    version: str
    source: str  # where they are from
    future: Future[None] = field(default_factory=Future)  # of the caller


# --- The engine: its public methods, which any thread may call, and the thread that samples ---------------------------

PAUSED = "rows are paused in mid-completion: continue them first"
STOPPING = "the server is stopping"


class Engine:
    """Samples the rows that are given to `submit`, at most `batch_size` at a time, in the order of their arrival. All
    public methods may be called from any thread."""

    def __init__(self, model: Any, mask_token_id: int, *, batch_size: int, queue_size: int, version: str) -> None:
        self.model = model
        self.mask_token_id = mask_token_id
        self.version = version
        self.batch_size = batch_size
        self.queue_size = queue_size
        self.condition = threading.Condition()  # guards all that follows, up to `streams`
        self.waiting: deque[Row] = deque()
        self.dropped: set[int] = set()  # rows at work that leave as soon as their lane lets them
        self.update: WeightUpdate | None = None
        self.is_paused = False
        self.is_draining = False
        self.is_closing = False
        self.end_reason = ""  # why no rows are taken any more
        self.rows: dict[int, Row] = {}  # at work; only the engine's thread removes them
        self.streams: dict[Lane, Stream] = {}
        # Of lanes whose rows are in the middle of blocks that they fill together: the passes that are left
        self.steps: dict[Lane, Iterator[Step]] = {}
        self.numbers = count()
        # Totals for /metrics
        self.passes = 0
        self.tokens = 0
        self.row_passes = 0
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def submit(self, rows: Sequence[Row]) -> None:
        """Puts rows into the queue. Raises QueueFull if they do not fit into it together, ConnectionError if the engine
        ends or has ended."""
        with self.condition:
            self.check_serves()
            if len(self.waiting) + len(rows) > self.queue_size:
                raise QueueFull(f"{len(self.waiting)} rows are waiting, of at most {self.queue_size}: try again later")
            for row in rows:
                row.number = next(self.numbers)
            self.waiting.extend(rows)
            self.condition.notify()

    def check_serves(self) -> None:
        """Raises ConnectionError if the engine ends or has ended."""
        if self.end_reason or self.is_closing:
            raise ConnectionError(self.end_reason or STOPPING)

    def drop(self, rows: Sequence[Row]) -> None:
        """Stops rows without an event; rows that ended stay as they are."""
        with self.condition:
            numbers = {row.number for row in rows}
            self.waiting = deque(row for row in self.waiting if row.number not in numbers)
            self.dropped |= numbers & self.rows.keys()
            self.condition.notify()

    def pause(self) -> None:
        """Stops sampling after the current pass, until `resume`; new rows wait. An update that waits for rows at work
        fails: they would not end. Raises ConnectionError after `drain`."""
        update = None
        with self.condition:
            if self.is_draining:
                raise ConnectionError(STOPPING)
            self.is_paused = True
            if self.update is not None and not self.can_update:
                update = self.update
                self.update = None
        if update is not None:
            update.future.set_exception(ValueError(PAUSED))

    def resume(self) -> None:
        with self.condition:
            self.is_paused = False
            self.condition.notify()

    def drain(self) -> None:
        """Resumes for good, because the server ends after the rows that it has: they cannot be paused any more."""
        with self.condition:
            self.is_draining = True
            self.resume()

    def replace_model(self, load: Callable[[Any], Any], version: str, source: str = "") -> Future[None]:
        """Replaces the model by `load(model)` once no row is at work; new rows wait until then. If `load` raises, the
        future does, and the old model stays. A second call with the same `source`, the place of the weights, and
        version gets the same future. Raises QueueFull during another update, ValueError if rows are paused,
        ConnectionError after the engine's end."""
        with self.condition:
            self.check_serves()
            if self.update is not None:
                if (self.update.source, self.update.version) == (source, version):
                    return self.update.future
                raise QueueFull("another update of the weights is under way: try again later")
            if self.is_paused and self.rows.keys() - self.dropped:
                raise ValueError(PAUSED)
            self.update = WeightUpdate(load, version, source)
            self.condition.notify()
            return self.update.future

    def stop(self) -> None:
        """Lets the thread end after its current turn, which stops all rows; no rows are taken any more."""
        with self.condition:
            self.is_closing = True
            self.condition.notify()

    def close(self) -> None:
        """Stops, and waits for the end of the thread."""
        self.stop()
        self.thread.join()

    @property
    def is_busy(self) -> bool:
        """Whether there are rows, or weights to load."""
        return self.thread.is_alive() and bool(self.rows or self.waiting or self.update)

    # --- The engine's thread alone calls what follows -----------------------------------------------------------------

    def run(self) -> None:
        """Samples until the engine is closed or fails; then stops the rows that are left."""
        end_reason = "the server has stopped"
        try:
            while True:
                with self.condition:
                    self.condition.wait_for(self.has_work)
                    if self.is_closing:
                        return
                self.run_turn()
        except Exception as error:
            logger.exception("the engine ends")
            end_reason = f"the server cannot sample any more: {type(error).__name__}: {error}"
        finally:
            with self.condition:
                self.end_reason = end_reason
                update = self.update
                self.update = None
                rows = [*self.waiting, *(row for number, row in self.rows.items() if number not in self.dropped)]
            if update is not None:
                update.future.set_exception(ConnectionError(end_reason))
            for row in rows:
                row.on_event(Stopped(end_reason))

    def has_work(self) -> bool:
        can_sample = not self.is_paused and (self.rows or self.waiting)
        return bool(self.is_closing or can_sample or self.can_update)

    @property
    def can_update(self) -> bool:
        return self.update is not None and not self.rows.keys() - self.dropped

    def run_turn(self) -> None:
        """Lets rows leave and enter, and makes a pass of each lane. Rows that fill their blocks together, such as those
        with a cache, leave and enter between blocks."""
        with self.condition:
            can_update = self.can_update
            if self.is_paused and not can_update:
                return

            # Dropped rows leave, in the middle of a block if no other row fills it.
            for lane in [*self.steps]:
                if self.dropped.issuperset(state.number for state in self.streams[lane].rows):
                    del self.streams[lane], self.steps[lane]
            dropped = {number for number in self.dropped if self.rows[number].lane not in self.steps}
            self.dropped -= dropped
            for number in dropped:
                del self.rows[number]
        if can_update:
            self.exchange_model()
            return

        # Finished rows leave.
        for lane in [*self.streams]:
            if lane not in self.steps:
                self.run_or_restart(lane, partial(self.remove_finished, dropped=dropped))

        # Waiting rows take their places, unless an update or a pause has come since `can_update` was read.
        with self.condition:
            if self.update is None and not self.is_paused:
                for row in self.admit_rows():
                    self.rows[row.number] = row
            lanes = dict.fromkeys([*self.streams, *(row.lane for row in self.rows.values())])
        for lane in lanes:
            self.run_or_restart(lane, self.advance)

    def admit_rows(self) -> list[Row]:
        """Takes the rows that the batch has room for out of the queue; a batch of its own enters as a whole."""
        admitted: list[Row] = []
        while self.waiting:
            first = self.waiting[0]
            size = 1
            if first.batch_name:
                size = sum(row.batch_name == first.batch_name for row in self.waiting)
            if size > self.batch_size - len(self.rows) - len(admitted):
                break
            admitted += [self.waiting.popleft() for _ in range(size)]
        return admitted

    def run_or_restart(self, lane: Lane, work: Callable[[Lane], None]) -> None:
        """Does the work of a lane. If it fails, e.g. out of memory, each of the lane's rows begins again by itself, a
        batch of its own as a whole. A row that fails once more stops with the error."""
        try:
            work(lane)
        except Exception as error:
            logger.exception("sampling failed")
            self.streams.pop(lane, None)
            self.steps.pop(lane, None)
            with self.condition:
                rows = [row for row in self.rows.values() if row.lane == lane]
                failed = [row for row in rows if row.number not in self.dropped]
                for row in rows:
                    del self.rows[row.number]
                    self.dropped.discard(row.number)
                first_failures = [row for row in failed if not row.has_restarted]
                second_failures = [row for row in failed if row.has_restarted]
                for row in first_failures:
                    row.has_restarted = True
                    row.streamed = 0
                    if not lane.prompt_width:
                        row.batch_name = f"alone {row.number}"
                self.waiting.extendleft(reversed(first_failures))
            for row in second_failures:
                row.on_event(Stopped(f"sampling failed: {type(error).__name__}: {error}", status=500))
            if self.model.device.type == "cuda":
                torch.cuda.synchronize()  # fails where the GPU does not work any more, which ends the engine

    def remove_finished(self, lane: Lane, dropped: set[int]) -> None:
        stream = self.streams[lane]
        finished = stream.pop_finished(dropped)
        if finished:
            numbers, sampled = finished
            self.report_completed(stream, numbers, sampled)

    def report_completed(self, stream: Stream, numbers: Sequence[int], sampled: Rollout) -> None:
        """Tells rows of a lane that they have ended. Rows whose logits were not finite stop with an error."""
        errors = stream.nonfinite_errors()
        passes = sampled.passes.tolist()
        forward_tokens = sampled.forward_tokens.tolist()
        ids = sampled.ids.tolist()
        logps = sampled.logps.tolist()
        entropies = sampled.entropies.tolist()
        reveal_steps = sampled.reveal_steps.tolist()
        for index, number in enumerate(numbers):
            with self.condition:
                row = self.rows.pop(number, None)
                if row is None or number in self.dropped:  # nobody waits for it
                    self.dropped.discard(number)
                    continue
            if number in errors:
                message = str(errors[number].named(f"row {row.rid}"))
                logger.error("%s", message)
                row.on_event(Stopped(message, status=500))
                continue
            prompt_in_block = None
            if block_size(self.model.config):
                prompt_in_block = len(row.ids) % row.settings.block_length
            canvas = slice(-row.settings.gen_length, None)
            event = Completed(
                ids=ids[index][canvas],
                logps=logps[index][canvas],
                entropies=entropies[index][canvas],
                reveal_steps=reveal_steps[index][canvas],
                blocks=[sum(counts) for counts in row.settings.schedule(prompt_in_block)],
                passes=passes[index],
                forward_tokens=forward_tokens[index],
                weight_version=self.version,
            )
            self.tokens += row.settings.gen_length
            row.on_event(event)

    def begin_steps(self, lane: Lane) -> Iterator[Step] | None:
        """Lets new rows enter a lane; its next passes. None: no rows are left, and the lane ends."""
        if lane not in self.streams:
            self.streams[lane] = Stream(
                self.model,
                mask_token_id=self.mask_token_id,
                cache=lane.cache,
                guided=lane.guided,
                prompt_width=lane.prompt_width,
                alone=bool(lane.batch_name),
            )
        stream = self.streams[lane]
        old_numbers = {state.number for state in stream.rows}
        requests = []
        for row in self.rows.values():
            if row.lane == lane and row.number not in old_numbers:
                generator = keyed_generator(row.seed, *key_of(row.rid), device=self.model.device)
                requests.append(RowRequest(row.number, row.ids, row.settings, generator, row.ends))
        stream.add_rows(requests)
        if not stream.rows:
            del self.streams[lane]
            return None
        return stream.steps()

    def advance(self, lane: Lane) -> None:
        """Makes a pass of a lane, with its new rows unless it is in the middle of blocks that are filled together."""
        steps = self.steps.pop(lane, None) or self.begin_steps(lane)
        if steps is None:
            return
        step = next(steps)
        stream = self.streams[lane]
        if stream.cache.together and any(state.remaining for state in stream.rows):
            self.steps[lane] = steps
        rows = [self.rows[state.number] for state in stream.rows]
        self.passes += 1
        self.row_passes += len(step.rows)
        if any(row.watches == "steps" for row in rows):
            report_step(rows, step)
        for index, (row, state) in enumerate(zip(rows, stream.rows, strict=True)):
            finished_tokens = state.filled - state.offset  # of full blocks
            if state.remaining == 0:
                finished_tokens += state.size
            if not row.watches or finished_tokens <= row.streamed:
                continue
            if not stream.batch.canvas.sums[index].isfinite():  # the error is reported when the row leaves
                continue
            row.streamed = finished_tokens
            completion = stream.batch.canvas.ids[index, -row.settings.gen_length :]
            row.on_event(Finished(completion[:finished_tokens].tolist(), self.version))

    def exchange_model(self) -> None:
        """Does the update and answers its future. If it fails, the old model stays."""
        update = self.update
        assert update is not None
        self.streams = {}
        gc.collect()  # an earlier model may be left in a reference cycle
        failure: Exception | None = None
        try:
            model = update.load(self.model)
            new_mask = getattr(model.config, "mask_token_id", None)
            if new_mask not in (None, self.mask_token_id):
                raise ValueError(f"{update.source}: mask_token_id is {new_mask}, not {self.mask_token_id}")
            self.model = model.to(self.model.device)
            self.version = update.version
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was loaded
            failure = error
        with self.condition:
            self.update = None
        if failure is None:
            update.future.set_result(None)
        else:
            update.future.set_exception(failure)


def report_step(rows: Sequence[Row], step: Step) -> None:
    """Tells the `rows` that watch their steps what a forward pass wrote. A row that began again is told about each pass
    once."""
    passes = step.numbers.tolist()
    for number, index in enumerate(step.rows.tolist()):
        row = rows[index]
        if row.watches != "steps" or passes[number] < row.reported_passes:
            continue
        start = step.canvas.shape[1] - row.settings.gen_length  # of the completion
        revealed = step.revealed[number]
        positions = [position - start for position in step.positions[number][revealed].tolist()]
        ids = step.ids[number][revealed].tolist()
        logps = step.logps[number][revealed].tolist()
        entropies = step.entropies[number][revealed].tolist()
        if not all(map(math.isfinite, (*logps, *entropies))):  # the error is reported when the row leaves
            continue
        row.reported_passes = passes[number] + 1
        row.on_event(Revealed(positions, ids, logps, entropies, int(step.forward_tokens[index])))
