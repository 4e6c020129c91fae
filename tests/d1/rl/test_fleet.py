"""RL on several servers, real processes that are killed: the run is that of rollouts in the trainer, to the bit."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from d1.models import load_model
from d1.rl.trainer import DiffuGRPOTrainer
from d1.serve import KEY, rollouts
from d1.serve.client import RolloutServer
from d1.serve.weights import WeightsFolder, folder_with_room
from d1.tools.calls import FORMATS
from tests.d1.rl.fleet import LIMIT, Fleet, trainers
from tests.d1.rl.tool_runs import make_turns
from tests.tiny_grpo import assert_same, clockless, logged, make_method, weights

pytestmark = pytest.mark.usefixtures("server_key")
PARTS = {"rollout_batch_size": 2}  # of four rows per process
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CASES = {
    "d1": ("d1", {}),
    "agrpo": ("agrpo", {"eos_stop": False}),
    "blocks": ("d1", {"block_length": 4}),
    "lora": ("d1", {"peft_config": LORA}),
}


@pytest.fixture(scope="module")
def fleet(tiny_model_dir, folder):
    started = Fleet(tiny_model_dir, folder)
    yield started
    started.close()


class Watched(DiffuGRPOTrainer):
    """Calls `before[n]` before its n-th rollout."""

    before: dict[int, Callable[[], object]]

    def sample(self, ids, mask):
        self.__dict__["rollouts"] = self.__dict__.get("rollouts", 0) + 1
        self.before.get(self.rollouts, lambda: None)()
        return super().sample(ids, mask)


def trained(model_dir, folder, method="d1", before=None, resume=None, **options):
    torch.manual_seed(0)  # of an adapter's first weights
    trainer = make_method(model_dir, folder, method, Watched, **(PARTS | options))
    trainer.before = before or {}
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def in_background(*steps):
    """Does the steps one after another in a thread."""

    def work():
        for step, *arguments in steps:
            step(*arguments)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_rollouts_in_the_trainer(fleet, tiny_model_dir, tiny_block_dir, folder, tmp_path, case):
    blocks = case == "blocks"
    model, urls = (tiny_block_dir, Fleet(tiny_block_dir, folder, 1)) if blocks else (tiny_model_dir, fleet)
    method, options = CASES[case]
    options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2} | options
    here = trained(model, tmp_path / "here", method, **options)
    there = trained(model, folder / case, method, **options, **urls.flags)
    assert_same(here, there)
    assert len(there.state.log_history) == 6
    for number in range(len(urls.ports)):
        assert urls.ask(number, "/model_info").json()["weight_version"].startswith(there.source.servers.run)
    assert not [*folder.rglob("d1-weights*")]
    if blocks:
        urls.close()


@pytest.mark.parametrize("estimator", ["one_step", "replay"])
def test_a_turn_is_a_request_with_a_longer_prompt(fleet, tiny_model_dir, folder, tmp_path, estimator):
    """Servers do not know of calls: what they sample after one is cut off, and changes no score."""
    options = {"max_steps": 4, "max_turns": 3, "rollout_batch_size": 5, "estimator": estimator, "p_mask_prompt": 0.0}
    options |= {"objective": "clipped_views", "beta": 0.0}
    here = make_turns(tiny_model_dir, tmp_path, **options)
    here.train()
    there = make_turns(tiny_model_dir, folder / f"turns_{estimator}", **options, **fleet.flags)
    there.train()
    FORMATS.pop("test")
    expected, found = weights(here.model), weights(there.model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    names = ("loss", "reward", "tools/turns", "tools/call_frequency")
    assert [[entry.get(name) for name in names] for entry in logged(here)] == [
        [entry.get(name) for name in names] for entry in logged(there)
    ]
    assert logged(there)[0]["tools/turns"] > 1.2
    assert logged(there)[0]["sampling/forward_passes"] > logged(here)[0]["sampling/forward_passes"]


def test_a_server_falls_silent_dies_and_comes_back_with_the_weights(
    fleet, tiny_model_dir, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollouts, "WATCH_SECONDS", 0.2)
    monkeypatch.setattr(rollouts, "CONNECT_SECONDS", 1.0)
    fleet.pause(0)  # so that it holds rows when it stops
    works = []

    def stop():
        halt = os.kill, fleet.processes[0].pid, signal.SIGSTOP
        works.append(in_background((fleet.until, 0, "d1_rows_waiting", 1), halt))

    def come_back():
        fleet.start(0)
        fleet.wait(0)
        fleet.pause(1)  # so that the other one gets rows
        works.append(in_background((fleet.until, 0, "d1_tokens_total", 8), (fleet.resume, 1)))

    options = {"max_steps": 6}
    here = trained(tiny_model_dir, tmp_path / "here", **options)
    events = {1: stop, 2: lambda: fleet.kill(0), 3: come_back}
    there = trained(tiny_model_dir, folder / "killed", before=events, **options, **fleet.flags)
    works[1].join()
    assert_same(here, there)
    assert fleet.ask(0, "/model_info").json()["weight_version"].startswith(there.source.servers.run)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_run_without_servers_ends_and_resumes(fleet, tiny_model_dir, folder, tmp_path, accumulated):
    """With four micro-batches per step, each step has two rollouts, and the second one fails."""
    options = {"max_steps": 4 if accumulated == 1 else 2, "gradient_accumulation_steps": accumulated}
    options |= {"steps_per_generation": 1, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    fleet.pause(0)  # so that no rollout ends before both are gone
    fleet.pause(1)
    works = []

    def go_on():
        fleet.resume(0)
        fleet.resume(1)

    def stop():
        fleet.pause(0)
        fleet.pause(1)
        works.append(in_background((fleet.until, 0, "d1_rows_waiting", 1), (fleet.kill, 0), (fleet.kill, 1)))

    ends = folder / f"ends{accumulated}"
    fails, step = (2, 2) if accumulated == 1 else (4, 1)
    impatient = fleet.flags | {"rollout_server_timeout": 1.0}
    with pytest.raises(ConnectionError, match=f"continue from .*/checkpoint-{step} with --resume"):
        trained(tiny_model_dir, ends, before={1: go_on, fails: stop}, **options, **impatient)
    works[0].join()
    assert not [*folder.rglob("d1-weights*")]
    for number in range(2):
        fleet.start(number)
        fleet.wait(number)
    here = trained(tiny_model_dir, tmp_path / "here", **options)
    there = trained(tiny_model_dir, ends, resume=str(ends / f"checkpoint-{step}"), **options, **fleet.flags)
    assert_same(here, there)


def finished(both):
    for process in both:
        process.join(LIMIT)
        assert process.exitcode == 0


def assert_ended_alike(*folders):
    """Two runs of two trainers have the same weights, to the bit, and logged the same."""
    before, after = (load_file(path / "end.safetensors") for path in folders)
    assert all(torch.equal(before[name], after[name]) for name in before)
    logs = [json.loads((path / "logged.json").read_text()) for path in folders]
    (processes, one), (_, other) = logs
    assert processes == 2
    assert clockless(one) == clockless(other)


def test_the_rows_of_two_trainers_are_spread_evenly_over_servers(fleet, tiny_model_dir, folder, tmp_path):
    """Two rollouts of four rows per trainer, four rows per request."""
    options, there = {**PARTS, "rollout_batch_size": 4, "max_steps": 4}, folder / "even"
    finished(trainers(tiny_model_dir, tmp_path, **options))
    before = [fleet.metric(number, "d1_tokens_total") for number in range(2)]
    finished(trainers(tiny_model_dir, there, **options, **fleet.flags))
    assert [fleet.metric(number, "d1_tokens_total") for number in range(2)] == [of + 2 * 4 * 8 for of in before]
    assert_ended_alike(tmp_path, there)


def test_two_trainers_share_servers_and_are_killed(fleet, tiny_model_dir, folder, tmp_path):
    options = {**PARTS, "max_steps": 10, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    finished(trainers(tiny_model_dir, tmp_path / "here", **options))
    there = folder / "two"
    fleet.pause(0)
    both = trainers(tiny_model_dir, there, **options, **fleet.flags)
    fleet.until(0, "d1_rows_waiting", 1)
    fleet.kill(0)  # its rows go to the other server
    while not (there / "checkpoint-2").exists():
        assert all(process.is_alive() for process in both)
    fleet.pause(1)
    fleet.until(1, "d1_rows_waiting", 1)
    for process in both:  # in mid-rollout; a launcher kills the second one
        process.kill()
        process.join()
    fleet.start(0)
    fleet.wait(0)
    fleet.resume(1)
    last = max(there.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert 2 <= int(last.name.removeprefix("checkpoint-")) < 10
    finished(trainers(tiny_model_dir, there, resume=str(last), **options, **fleet.flags))
    assert_ended_alike(tmp_path / "here", there)
    assert not [*folder.rglob("d1-weights*")]


def test_a_server_asks_for_the_key(fleet, monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(ValueError, match=f"401.*set {KEY}"):
        RolloutServer(fleet.url(0)).prepare(3, None)


def test_patience_counts_from_the_last_answer(monkeypatch, tmp_path):
    """A server that is silent now and then, each time for less than the patience."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rollouts, "time", SimpleNamespace(monotonic=lambda: clock.now))
    servers = object.__new__(rollouts.PolicyServers)
    servers.servers, servers.patience = [RolloutServer("http://127.0.0.1:1")], 2.0
    servers.silent_since, servers.last_reminder = None, -rollouts.REMINDER_SECONDS
    servers.folder = WeightsFolder(tmp_path)
    for clock.now, problem in ((0.0, "silent"), (1.0, None), (3.0, "silent"), (4.9, "silent")):
        servers.servers[0].problem = problem
        assert servers.any_server_alive() is (problem is None)
    clock.now = 5.0
    with pytest.raises(ConnectionError, match="has answered for 2 seconds: silent"):
        servers.any_server_alive()


def test_a_server_whose_answers_make_no_sense_gives_back_its_part(monkeypatch):
    monkeypatch.setattr(rollouts, "WATCH_SECONDS", 0.01)
    server = RolloutServer("http://127.0.0.1:1")
    server.problem = None
    monkeypatch.setattr(server, "ask", lambda *_, **__: int("no number"))
    parts: SimpleQueue = SimpleQueue()
    over = threading.Event()
    watcher = threading.Thread(target=rollouts.watch, args=(parts, {server: "the part"}, over), daemon=True)
    watcher.start()
    assert parts.get(timeout=60) == "the part"
    assert "invalid literal" in str(server.problem)
    over.set()
    watcher.join(60)


@pytest.mark.parametrize(("url", "is_there"), [("http://127.0.0.1:1", True), ("http://[::1]:1", True)])
def test_this_machines_addresses_are_local(url, is_there):
    assert RolloutServer(url).is_local is is_there


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a RAM disk")
def test_a_server_of_another_machine_reads_no_ram_disk_of_this_one(tiny_model_dir, tmp_path):
    model = load_model(tiny_model_dir)
    folder = WeightsFolder(tmp_path / "run")
    server = RolloutServer("http://203.0.113.1:1")
    server.folders = ["/dev/shm", str(tmp_path)]
    assert folder.write(model, "0", [server]).is_relative_to(tmp_path / "run")
    folder.remove()


def test_weights_lie_where_all_servers_read_and_there_is_room(tmp_path):
    run, ram = tmp_path / "runs" / "one", Path("/dev/shm")
    assert folder_with_room(run, [None, ["/"]], 1) == (ram if ram.is_dir() else run)
    assert folder_with_room(run, [[str(tmp_path)], None], 1) == run
    for folders, size in (([[str(tmp_path / "other")], [str(run)]], 1), ([None, ["/"]], 1 << 60)):
        with pytest.raises(ValueError, match="--weights_dir"):
            folder_with_room(run, folders, size)
