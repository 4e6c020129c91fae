"""RL whose weights go to servers by broadcast, real processes: the run is that of weights from a folder, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from d1.__main__ import make_parser
from d1.commands import serve
from d1.models import load_model
from d1.rl.config import DiffuGRPOConfig
from d1.serve import KEY, broadcast
from d1.serve.broadcast import send
from d1.serve.client import FRESH, RolloutServer, Unavailable, Weights
from tests.d1.rl.fleet import LIMIT, PROCESSES, Fleet, trainers
from tests.d1.rl.test_fleet import LORA, PARTS, assert_same, in_background, trained
from tests.d1.serve.serving import serving
from tests.tiny_grpo import clockless

pytestmark = pytest.mark.usefixtures("server_key")
SENT = {"rollout_weights": "broadcast"}
AHEAD = {"rollout_staleness": 1, "sampling_weight_cap": 1.2, "max_steps": 7}


@pytest.fixture(scope="module")
def fleet(tiny_model_dir, folder):
    started = Fleet(tiny_model_dir, folder, words=["--take_broadcasts"])
    yield started
    started.close()


def updates(fleet, number, way):
    """Updates of a server's weights that succeeded."""
    name = f'd1_request_seconds_count{{path="/update_weights_from_{way}",status="200"}}'
    return fleet.metric(number, name) if name in fleet.ask(number, "/metrics").text else 0


@pytest.mark.parametrize("options", [{}, {"peft_config": LORA}, AHEAD], ids=["full", "lora", "ahead"])
def test_a_run_is_that_of_weights_from_a_folder(fleet, tiny_model_dir, folder, tmp_path, options):
    options = {"max_steps": 3} | options
    disk = trained(tiny_model_dir, folder / f"disk{len(options)}", **options, **fleet.flags)
    before = [[updates(fleet, number, way) for way in ("disk", "distributed")] for number in range(2)]
    sent = trained(tiny_model_dir, tmp_path / "sent", **options, **fleet.flags, **SENT)
    assert_same(disk, sent)
    for number in range(2):
        assert updates(fleet, number, "disk") == before[number][0] > 0
        assert updates(fleet, number, "distributed") >= before[number][1] + 2
        assert fleet.ask(number, "/model_info").json()["weight_version"].startswith(sent.servers.run)


def test_a_server_that_is_killed_comes_back_with_the_weights(fleet, tiny_model_dir, tmp_path):
    works = []

    def come_back():
        fleet.start(0)
        fleet.wait(0)
        fleet.pause(1)  # so that the other one gets rows
        works.append(in_background((fleet.until, 0, "d1_tokens_total", 8), (fleet.resume, 1)))

    options = {"max_steps": 6}
    here = trained(tiny_model_dir, tmp_path / "here", **options)
    before = {2: lambda: fleet.kill(0), 3: come_back}
    there = trained(tiny_model_dir, tmp_path / "there", before=before, **options, **fleet.flags, **SENT)
    works[0].join()
    assert_same(here, there)
    assert updates(fleet, 0, "distributed") >= 1
    assert fleet.ask(0, "/model_info").json()["weight_version"].startswith(there.servers.run)


@pytest.mark.slow
def test_two_trainers_send_to_a_server_that_comes_back(fleet, tiny_model_dir, folder, tmp_path):
    options = {**PARTS, "max_steps": 10, "optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1}
    there = tmp_path / "there"
    alone = trainers(tiny_model_dir, tmp_path / "here", **options)
    fleet.pause(0)
    both = trainers(tiny_model_dir, there, **options, **fleet.flags, **SENT)
    fleet.until(0, "d1_rows_waiting", 1)
    fleet.kill(0)  # the rows of both trainers go to the other server
    while not (there / "checkpoint-2").exists():
        assert all(process.is_alive() for process in both)
        time.sleep(0.02)
    fleet.pause(1)  # so that both trainers wait for the other one
    fleet.start(0)
    fleet.wait(0)
    fleet.until(0, "d1_tokens_total", 8)
    fleet.resume(1)
    for process in alone + both:
        process.join(LIMIT)
        assert process.exitcode == 0
    assert updates(fleet, 0, "distributed") >= 1
    before, after = (load_file(path / "end.safetensors") for path in (tmp_path / "here", there))
    assert all(torch.equal(before[name], after[name]) for name in before)
    (_, here), (processes, sent) = (
        json.loads((path / "logged.json").read_text()) for path in (tmp_path / "here", there)
    )
    assert (processes, clockless(here)) == (2, clockless(sent))


def saved(model_dir, folder, factor):
    """The model with all weights multiplied."""
    model = load_model(model_dir)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor)
    shutil.copytree(model_dir, folder)
    model.save_pretrained(folder)
    return folder


def break_off(url, folder, kept):
    """Sends half of the tensors: then this process is killed or, with a list to keep the group in, falls silent."""
    whole = broadcast.broadcast

    def half(group, tensors):
        if group.rank() == 1:  # the server's side
            return whole(group, tensors)
        whole(group, tensors[: len(tensors) // 2])
        if kept is None:
            time.sleep(0.2)  # or they may not arrive
            os.kill(os.getpid(), signal.SIGKILL)
        kept.append(group)
        raise RuntimeError("half of it was sent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "broadcast", half)
        send(RolloutServer(url).ask, url, folder, "run-1")


@pytest.mark.parametrize("dies", [True, False])
def test_half_a_broadcast_leaves_the_old_weights_and_a_whole_one_follows(tiny_model_dir, tmp_path, monkeypatch, dies):
    body = {"input_ids": [5, 6], "rid": "1", "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    body |= {"return_logprob": True}
    new = saved(tiny_model_dir, tmp_path / "new", 1.5)
    with serving(new) as served:
        wanted = served.post("/generate", **body)
    receiver = broadcast.Receiver(1 << 30)
    with serving(tiny_model_dir, receiver=receiver) as served:
        before = served.post("/generate", **body)
        if dies:
            process = PROCESSES.Process(target=break_off, args=(served.url, new, None), daemon=True)
            process.start()
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL
        else:
            monkeypatch.setattr(broadcast, "SECONDS", 1.0)
            with pytest.raises(Unavailable, match=r"sender of the weights was lost.*Timed out"):
                break_off(served.url, new, [])
        with receiver.lock:  # the server has noticed
            assert receiver.store is None
        assert served.post("/generate", **body) == before
        assert before["meta_info"]["weight_version"] == FRESH
        assert "begin again" in served.post("/end_weight_update", 429)["error"]["message"]
        server = RolloutServer(served.url, broadcasts=True)
        server.prepare(served.tokenizer.mask_token_id, Weights("run", "run-2", new))
        after = served.post("/generate", **body)
        assert after["meta_info"].pop("weight_version") == server.version == "run-2"
        assert wanted["meta_info"].pop("weight_version") == FRESH
        assert after == wanted
        assert after["meta_info"]["output_token_logprobs"] != before["meta_info"]["output_token_logprobs"]


def test_a_server_that_stops_holds_nothing_up(fleet, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(broadcast, "SECONDS", 1.0)
    process, whole = fleet.processes[1].pid, broadcast.broadcast

    def stop_first(group, tensors):
        os.kill(process, signal.SIGSTOP)
        whole(group, tensors)

    monkeypatch.setattr(broadcast, "broadcast", stop_first)
    new = saved(tiny_model_dir, tmp_path / "new", 1.5)
    try:
        with pytest.raises(Unavailable):
            RolloutServer(fleet.url(1), broadcasts=True).give(Weights("run", "late", new))
    finally:
        os.kill(process, signal.SIGCONT)
    assert fleet.ask(1, "/model_info").json()["weight_version"] != "late"


def test_what_cannot_be_is_refused(tiny_model_dir, tmp_path, monkeypatch):
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        joins = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
        joins |= {"group_name": "g", "backend": "gloo"}
        words = served.post("/init_weights_update_group", 400, **joins)["error"]["message"]
        assert "--take_broadcasts" in words
        with pytest.raises(ValueError, match="--take_broadcasts"):
            RolloutServer(served.url, broadcasts=True).prepare(served.tokenizer.mask_token_id, None)
    with serving(tiny_model_dir, receiver=broadcast.Receiver(100)) as served:
        words = served.post("/init_weights_update_group", 400, **joins | {"master_address": "127.0.0.2"})
        assert "came from" in words["error"]["message"]
        weights = Weights("run", "run-1", saved(tiny_model_dir, tmp_path / "new", 1.5))
        with pytest.raises(ValueError, match="at most 100"):
            RolloutServer(served.url, broadcasts=True).prepare(served.tokenizer.mask_token_id, weights)
    with pytest.raises(ValueError, match="rollout_mode server"):
        DiffuGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **SENT)
    monkeypatch.delenv(KEY)
    words = ["serve", str(tiny_model_dir), "--host", "0.0.0.0", "--take_broadcasts"]
    with pytest.raises(ValueError, match="--api_key"):
        serve.run(make_parser().parse_args(words))
