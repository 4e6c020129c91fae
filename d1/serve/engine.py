"""The thread that samples: rows wait in a queue, share a batch, and tell what happens to them.

Rows with the same cache, and with or without guidance, share forward passes, whatever else they ask for
(`d1.sampling.stream.Stream`), unless a request wants a batch of its own. Each such group is a lane; lanes take turns.
All methods but `run` may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from d1.masking import keyed_generator
from d1.models.kinds import block_size
from d1.sampling.blocks import Step, check_sampler
from d1.sampling.settings import SamplingSettings
from d1.sampling.stream import Asked, Stream
from d1.serve.rows import Completed, Finished, Lane, QueueFull, Revealed, Row, Stopped, key_of

logger = logging.getLogger(__name__)


class Engine:
    """Samples the rows that are handed to `submit`, at most `batch_size` at a time, the first to come first."""

    def __init__(self, model: Any, mask_token_id: int, *, batch_size: int, queue_size: int, version: str) -> None:
        self.model, self.mask_token_id, self.version = model, mask_token_id, version
        self.batch_size, self.queue_size = batch_size, queue_size
        self.changed = threading.Condition()  # guards all that follows, up to `lanes`
        self.waiting: deque[Row] = deque()
        self.dropped: set[int] = set()
        self.update: tuple[Callable[[Any], Any], str, Future[None]] | None = None
        self.paused = self.closing = False
        self.rows: dict[int, Row] = {}  # at work
        self.lanes: dict[Lane, Stream] = {}
        self.numbers = count()
        self.passes = self.forward_tokens = self.tokens = self.row_passes = 0  # so far
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def check(self, settings: SamplingSettings) -> None:
        """Raises ValueError for settings that do not go with the model."""
        check_sampler(settings, self.model.config)

    def submit(self, rows: Sequence[Row]) -> None:
        """Raises QueueFull if they do not fit into the queue together."""
        with self.changed:
            if len(self.waiting) + len(rows) > self.queue_size:
                raise QueueFull(f"{len(self.waiting)} rows are waiting, of at most {self.queue_size}: try again later")
            for row in rows:
                row.number = next(self.numbers)
            self.waiting.extend(rows)
            self.changed.notify()

    def drop(self, rows: Sequence[Row]) -> None:
        """Stops rows that nobody waits for; nothing happens to those that ended."""
        with self.changed:
            numbers = {row.number for row in rows}
            self.waiting = deque(row for row in self.waiting if row.number not in numbers)
            self.dropped |= numbers & self.rows.keys()
            self.changed.notify()

    def stop_all(self, reason: str) -> None:
        """Stops all rows, with a word to those who wait for them."""
        with self.changed:
            rows = [*self.waiting, *(row for number, row in self.rows.items() if number not in self.dropped)]
        self.drop(rows)
        for row in rows:
            row.tell(Stopped(reason))

    def pause(self, mode: str) -> None:
        """No pass follows the one at hand (with a cache: no block), and new rows wait. The rows at work stop ("abort"),
        begin again later with the same random numbers ("retract"), or stay as they are ("in_place")."""
        with self.changed:
            self.paused = True
            if mode == "retract":
                again = [row for number, row in sorted(self.rows.items()) if number not in self.dropped]
                self.dropped |= self.rows.keys()
                for row in again:
                    row.number, row.told = next(self.numbers), 0
                self.waiting.extendleft(reversed(again))
        if mode == "abort":
            self.stop_all("aborted by the operator of the server")
        with self.changed:
            self.changed.notify()

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify()

    def replace_model(self, load: Callable[[Any], Any], version: str) -> Future[None]:
        """Takes what `load` makes of the model once no row is at work; new rows wait until then. If `load` raises, the
        future does, and the old model stays. Whoever asks for the version that is on its way gets the same future.

        Raises:
            QueueFull: an update to another version is under way.
            ValueError: rows are at work and will stay there.
        """
        with self.changed:
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

    def close(self) -> None:
        """Ends the thread; rows in it are lost."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    # --- The thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(self.has_work)
                    if self.closing:
                        return
                self.turn()
        except Exception:
            logger.exception("the engine ends")
            raise
        finally:
            self.stop_all("the server has stopped")

    def has_work(self) -> bool:
        samples = not self.paused and (self.rows or self.waiting)
        return bool(self.closing or samples or self.can_update)

    @property
    def can_update(self) -> bool:
        return self.update is not None and not self.rows.keys() - self.dropped

    def turn(self) -> None:
        """Rows leave and enter, and each lane makes a pass or, with a cache, fills a block."""
        with self.changed:
            dropped, can_update = self.dropped, self.can_update
            if can_update:
                self.rows.clear()
            elif self.paused:
                return
            self.dropped = set()
        if can_update:
            self.exchange_model()
            return
        for key in [*self.lanes]:
            self.guarded(key, partial(self.leave, dropped=dropped))
        with self.changed:
            for number in dropped:
                self.rows.pop(number, None)
            new = [] if self.update else self.admitted()
            self.rows |= {row.number: row for row in new}
        joining: dict[Lane, list[Row]] = {key: [] for key in self.lanes}
        for row in new:
            joining.setdefault(row.lane, []).append(row)
        for key, rows in joining.items():
            self.guarded(key, partial(self.advance, new=rows))

    def admitted(self) -> list[Row]:
        """The waiting rows that there is room for; a batch of its own enters as a whole."""
        new: list[Row] = []
        while self.waiting:
            first = self.waiting[0]
            size = sum(row.own == first.own for row in self.waiting) if first.own else 1
            if size > self.batch_size - len(self.rows) - len(new):
                break
            new += [self.waiting.popleft() for _ in range(size)]
        return new

    def guarded(self, key: Lane, work: Callable[[Lane], None]) -> None:
        """Does the work of a lane. If it fails, out of memory, say, only the lane's rows do."""
        try:
            work(key)
        except Exception as error:
            logger.exception("sampling failed")
            self.lanes.pop(key, None)
            with self.changed:
                failed = [row for row in self.rows.values() if row.lane == key]
                self.rows = {number: row for number, row in self.rows.items() if row not in failed}
            for row in failed:
                row.tell(Stopped(f"sampling failed: {type(error).__name__}: {error}", status=500))

    def leave(self, key: Lane, dropped: set[int]) -> None:
        numbers, sampled = self.lanes[key].leave(dropped) or ([], None)
        if sampled is None:
            return
        columns = sampled.ids, sampled.logps, sampled.entropies, sampled.reveal_steps
        values = zip(*(of.tolist() for of in (*columns, sampled.passes, sampled.forward_tokens)), strict=True)
        for number, (*lists, passes, forward_tokens) in zip(numbers, values, strict=True):
            with self.changed:
                row = self.rows.pop(number)
            if number in dropped:
                continue
            inside = len(row.ids) % row.settings.block_length if block_size(self.model.config) else None
            blocks = [*map(sum, row.settings.schedule(inside))]
            ids, logps, entropies, reveal_steps = (of[-row.settings.gen_length :] for of in lists)
            self.tokens += row.settings.gen_length
            self.forward_tokens += forward_tokens
            row.tell(Completed(ids, logps, entropies, reveal_steps, blocks, passes, forward_tokens, self.version))

    def advance(self, key: Lane, new: list[Row]) -> None:
        if key not in self.lanes:
            self.lanes[key] = Stream(
                self.model,
                mask_token_id=self.mask_token_id,
                cache=key.cache,
                guided=key.guided,
                columns=key.columns,
                alone=bool(key.own),
            )
        lane, device = self.lanes[key], self.model.device
        generators = [keyed_generator(row.seed, *key_of(row.rid), device=device) for row in new]
        pairs = zip(new, generators, strict=True)
        lane.enter([Asked(row.number, row.ids, row.settings, generator, row.ends) for row, generator in pairs])
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
            full = state.filled - state.offset + (state.size if state.left == 0 else 0)
            if row.watches and full > row.told:
                row.told = full
                completion = lane.batch.canvas.ids[index, -row.settings.gen_length :]
                row.tell(Finished(completion[:full].tolist()))

    def exchange_model(self) -> None:
        assert self.update is not None
        (load, version, done), self.lanes = self.update, {}
        try:
            model = load(self.model)
            device, self.model = self.model.device, None  # the old weights make room for the new
            self.model, self.version = model.to(device), version
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        with self.changed:
            self.update = None


def tell_step(rows: Sequence[Row], step: Step) -> None:
    """Tells the `rows` that watch their steps what was revealed in them."""
    for place, index in enumerate(step.rows.tolist()):
        row, kept = rows[index], step.revealed[place]
        if row.watches == "steps":
            columns = step.positions, step.ids, step.logps, step.entropies
            positions, ids, logps, entropies = (of[place][kept].tolist() for of in columns)
            first, fed = step.canvas.shape[1] - row.settings.gen_length, int(step.forward_tokens[index])
            row.tell(Revealed([column - first for column in positions], ids, logps, entropies, fed))
