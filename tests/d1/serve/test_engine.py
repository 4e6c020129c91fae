"""The engine by itself: rows whose moment is chosen, models that do not fit, and its end."""

from __future__ import annotations

import itertools
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from d1.models import load_model, load_tokenizer
from d1.models.head import unwrapped
from d1.sampling import SamplingSettings, graphs
from d1.sampling.stream import Stream
from d1.serve.engine import Completed, Engine, Event, Loader, QueueFull, Revealed, Row, Stopped
from tests.conftest import save_tiny_model
from tests.d1.serve.serving import alone
from tests.faults import failing_passes, no_room

HOW = SamplingSettings(16, 8, 16, temperature=0.9)
MASK = 3


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Engine]:
    sizes = {"batch_size": 4, "queue_size": 64} | options
    engine = Engine(load_model(folder), load_tokenizer(folder).mask_token_id, **sizes, version="default")
    engine.thread.start()
    try:
        yield engine
    finally:
        engine.close()


def rows_of(
    count: int, batch_name: str = "", prompt_width: int = 0, watches: str = ""
) -> tuple[list[Row], queue.Queue[Any]]:
    """Rows, and the queue of their events."""
    events: queue.Queue[tuple[int, Event]] = queue.Queue()
    rows = [
        Row(f"1-{n}", [5, 6 + n], HOW, (), 0, batch_name=batch_name, prompt_width=prompt_width, watches=watches)
        for n in range(count)
    ]
    for number, row in enumerate(rows):
        row.on_event = lambda event, number=number: events.put((number, event))  # type: ignore[misc]
    return rows, events


def last_of(rows: list[Row], events: queue.Queue[Any]) -> list[Event]:
    last: dict[int, Event] = {}
    while len(last) < len(rows):
        number, event = events.get(timeout=60)
        if isinstance(event, Completed | Stopped):
            assert number not in last, "a row ended twice"
            last[number] = event
    time.sleep(0.05)
    assert events.empty()
    return [last[number] for number in range(len(rows))]


def ids(model: Any, number: int) -> list[int]:
    return alone(model, MASK, [5, 6 + number], f"1-{number}", HOW).ids[0, -16:].tolist()


def check(engine: Engine, events: list[Event], model: Any = None) -> None:
    """All rows completed with the tokens that `rollout` gives for each alone."""
    for number, event in enumerate(events):
        assert isinstance(event, Completed), event
        assert event.ids == ids(model or engine.model, number)


@pytest.fixture(scope="module")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    save_tiny_model(root / "other", seed=1)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for name in ("adapter", "second"):
        get_peft_model(load_model(tiny_model_dir), lora).save_pretrained(root / name)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    with_head = get_peft_model(load_model(tiny_model_dir), lora)
    with torch.no_grad():
        with_head.get_output_embeddings().weight.normal_()
    with_head.save_pretrained(root / "with_head")
    shutil.copytree(root / "second", root / "damaged")
    (root / "damaged" / "adapter_model.safetensors").write_bytes(b"cut off")
    return root


def test_no_row_enters_once_the_engine_is_paused(tiny_model_dir, monkeypatch):
    """A pause that comes in the middle of a turn: rows at work would refuse the weights that follow it."""
    pop_finished, turn, paused, turned = Stream.pop_finished, Engine.run_turn, threading.Event(), threading.Event()
    with running(tiny_model_dir, batch_size=1) as engine:

        def leaving(self: Stream, dropped: Any = ()) -> Any:
            done = pop_finished(self, dropped)
            if done and not paused.is_set():  # the first row left, and the second could enter
                engine.pause()
                paused.set()
            return done

        def turning(self: Engine) -> None:
            turn(self)
            if paused.is_set():
                turned.set()

        monkeypatch.setattr(Stream, "pop_finished", leaving)
        monkeypatch.setattr(Engine, "run_turn", turning)
        rows, events = rows_of(2)
        engine.submit(rows)
        assert turned.wait(60)
        engine.replace_model(lambda model: model, "the same").result(60)
        engine.resume()
        check(engine, last_of(rows, events))


def test_an_error_of_one_row_ends_that_row_alone(tiny_model_dir):
    with running(tiny_model_dir) as engine, failing_passes(engine, lambda given: (given == 8).any()):  # of row 2
        rows, events = rows_of(6)
        engine.submit(rows)
        found = last_of(rows, events)
        assert found.pop(2) == Stopped("sampling failed: FloatingPointError: a pass that failed on purpose", 500)
        for number, event in zip((0, 1, 3, 4, 5), found, strict=True):
            assert isinstance(event, Completed)
            assert event.ids == ids(engine.model, number)
        together, events = rows_of(3, batch_name="one", prompt_width=2)
        engine.submit(together)
        assert [event.status for event in last_of(together, events)] == [500] * 3


def failing_once() -> Callable[[torch.Tensor], bool]:
    """For `failing_passes`: the fourth pass fails, and no other."""
    passes = itertools.count()
    return lambda given: next(passes) == 3


def test_a_stream_of_edits_that_begins_again_ends_with_the_completion(tiny_model_dir):
    edits = SamplingSettings(16, 16, 16, sampler="parallel", edit_threshold=0.02)
    with running(tiny_model_dir) as engine, failing_passes(engine, failing_once()):
        rows, events = rows_of(1)
        row = replace(rows[0], settings=edits, watches="steps")
        canvas: dict[int, int] = {}
        tokens: list[int] = []

        def follow(event: Event) -> None:
            if isinstance(event, Revealed):
                canvas.update(zip(event.positions, event.ids, strict=True))
                tokens.append(event.forward_tokens)
            elif isinstance(event, Completed | Stopped):
                events.put((0, event))

        row.on_event = follow  # type: ignore[method-assign]
        engine.submit([row])
        (completed,) = last_of([row], events)
        assert isinstance(completed, Completed)
        assert [canvas[position] for position in range(16)] == completed.ids
        assert tokens == sorted(set(tokens))  # each pass once


@pytest.mark.parametrize(("count", "group"), [(1, {}), (3, {}), (3, {"batch_name": "one", "prompt_width": 2})])
def test_a_pass_that_fails_once_costs_no_row(tiny_model_dir, count, group):
    """Rows begin again, and who watches their steps is told about each pass once."""
    with running(tiny_model_dir) as engine, failing_passes(engine, failing_once()):
        rows, events = rows_of(count, **group)
        told: dict[int, list[int]] = {number: [] for number in range(count)}
        for number, row in enumerate(rows):
            row.watches = "steps"
            row.on_event = partial(tell_or_collect, number, told[number], events)  # type: ignore[misc]
        engine.submit(rows)
        check(engine, last_of(rows, events))
        assert [sorted(positions) for positions in told.values()] == [list(range(16))] * count


def tell_or_collect(number: int, positions: list[int], events: queue.Queue[Any], event: Event) -> None:
    if isinstance(event, Revealed):
        positions += event.positions
    elif isinstance(event, Completed | Stopped):
        events.put((number, event))


TOGETHER = {
    "dual": {"settings": replace(HOW, sampler="cached", kv_cache="dual")},
    "lasting": {"settings": replace(HOW, sampler="cached", kv_cache="lasting")},
    "alone": {"batch_name": "one", "prompt_width": 2},
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_rows_that_fill_their_blocks_together_keep_no_other_waiting(tiny_model_dir, kind):
    """A short row ends long before a block of 200 passes; rows that are dropped leave in the middle of that block."""
    with running(tiny_model_dir) as engine:
        (short,), events = rows_of(1)
        together = []
        for row in rows_of(3)[0]:
            row = replace(row, **TOGETHER[kind])
            row.settings = replace(row.settings, gen_length=200, block_length=200, steps=200)
            together.append(row)
        engine.submit([*together[:2], short])
        check(engine, last_of([short], events))
        engine.drop(together[:2])
        third = replace(together[2], batch_name="")  # which waits for the end of the block, if it has a cache
        third.on_event = lambda event: events.put((0, event))  # type: ignore[method-assign]
        engine.submit([third])
        (completed,) = last_of([third], events)
        assert engine.passes < 16 + 150 + 200
        assert isinstance(completed, Completed)
        assert completed.ids == alone(engine.model, MASK, [5, 8], "1-2", third.settings).ids[0, -200:].tolist()


def test_an_update_is_that_of_its_own_folder(tiny_model_dir):
    with running(tiny_model_dir) as engine:
        with engine.condition:
            first = engine.replace_model(lambda model: model, "one", source="here")
            assert engine.replace_model(lambda model: model, "one", source="here") is first
            with pytest.raises(QueueFull, match="another update"):
                engine.replace_model(lambda model: model, "one", source="there")
        first.result(60)


def test_a_pause_ends_an_update_that_waits_for_rows(tiny_model_dir):
    with running(tiny_model_dir) as engine:
        rows, events = rows_of(2)
        engine.submit(rows)
        with engine.condition:
            while engine.waiting and not engine.rows:
                engine.condition.wait(0.001)  # nothing is notified when rows enter
            update = engine.replace_model(lambda model: model, "new")
            if engine.rows:  # else they have ended already
                engine.pause()
                with pytest.raises(ValueError, match="paused in mid-completion: continue them first"):
                    update.result(0)
                assert engine.update is None
        engine.resume()
        check(engine, last_of(rows, events))


@pytest.mark.parametrize("kind", ["other", "adapter", "second", "damaged"])
def test_weights_that_cannot_be_loaded_leave_the_old_ones(tiny_model_dir, folders, kind):
    loader = Loader(lambda: load_model(tiny_model_dir))
    with running(tiny_model_dir) as engine:

        def update(name: str) -> None:
            engine.replace_model(lambda model: loader.load(folders / name, model), name).result(60)

        if kind in ("second", "damaged"):  # on top of an adapter, for which the start's weights are loaded anew
            update("other")
            update("adapter")
        old, version = engine.model, engine.version
        before = {name: weight.clone() for name, weight in old.state_dict().items()}
        said, times = ("header", 0) if kind == "damaged" else ("on purpose", 1)
        with no_room(old, times), pytest.raises(Exception, match=said):
            update(kind)
        assert (engine.model, engine.version) == (old, version)
        after = old.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        rows, events = rows_of(3)
        engine.submit(rows)
        check(engine, last_of(rows, events), old)
        if kind != "damaged":
            update(kind)
            folder, adapter = (folders / kind, None) if kind == "other" else (tiny_model_dir, folders / kind)
            rows, events = rows_of(3)
            engine.submit(rows)
            check(engine, last_of(rows, events), load_model(folder, adapter=adapter))


def test_an_adapter_has_nothing_of_the_one_before(tiny_model_dir, folders):
    """Neither its LoRA nor the modules that it trained whole."""
    loader = Loader(lambda: load_model(tiny_model_dir))
    model = load_model(tiny_model_dir)
    for name in ("with_head", "adapter", "with_head", "other", "with_head", "second"):
        model = loader.load(folders / name, model)
        if name in ("adapter", "second"):
            expected = load_model(tiny_model_dir, adapter=folders / name)
            given = torch.arange(5, 17)[None]
            assert torch.equal(model(given).logits, expected(given).logits)


def test_rows_are_refused_after_the_engines_end(tiny_model_dir, monkeypatch):
    with running(tiny_model_dir) as engine:
        rows, events = rows_of(3)
        monkeypatch.setattr(engine, "admit_rows", lambda: 1 / 0)
        engine.submit(rows)
        found = last_of(rows, events)
        assert {event.status for event in found} == {503}
        assert "ZeroDivisionError" in found[0].reason
        engine.thread.join(60)
        assert not engine.thread.is_alive()
        with pytest.raises(ConnectionError, match="cannot sample any more"):
            engine.submit(rows)
        with pytest.raises(ConnectionError, match="cannot sample any more"):
            engine.replace_model(lambda model: model, "new")


def test_an_update_that_nobody_waits_for_any_more(tiny_model_dir, folders):
    loader = Loader(lambda: load_model(tiny_model_dir))
    with running(tiny_model_dir) as engine:
        with engine.condition:
            update = engine.replace_model(lambda model: loader.load(folders / "other", model), "one")
            with pytest.raises(QueueFull, match="another update"):
                engine.replace_model(lambda model: model, "two")
        update.result(60)
        assert engine.version == "one"


def test_a_server_samples_by_graphs_with_any_weights(tiny_model_dir, folders, monkeypatch):
    """Rows of several lanes and of new weights are those of the plain pass; each model has its own graphs."""
    monkeypatch.setattr(graphs, "GPUCapture", lambda: graphs.run_again)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loader = Loader(lambda: graphs.set_compile(load_model(tiny_model_dir), "graphs"))
    with running(tiny_model_dir) as engine:
        graphs.set_compile(engine.model, "graphs")
        for name in (None, "other", "adapter"):
            if name is not None:
                engine.replace_model(lambda model, name=name: loader.load(folders / name, model), name).result(60)
            rows, events = rows_of(4)
            engine.submit(rows)
            sampled = last_of(rows, events)
            assert graphs.compile_of(engine.model) == "graphs"
            assert graphs.COMPILED_MODELS[unwrapped(engine.model)][1].replays > 0
            graphs.set_compile(engine.model, "none")
            check(engine, sampled)
            graphs.set_compile(engine.model, "graphs")
