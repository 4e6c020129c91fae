"""The upload of a run: what reaches a hub, and that a hub that is out of reach costs nothing.

The hub is a server on this machine that speaks as much of its protocol as an upload needs.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from d1.runs.skeleton import hold_push, publish
from tests.conftest import save_tiny_model


def arguments(folder: Path, **changes: object) -> dict[str, object]:
    """Those of `TrainingArguments` that speak of the hub, and Trainer's defaults."""
    unset = dict.fromkeys(("hub_model_id", "hub_token", "hub_private_repo", "hub_revision"))
    return {"output_dir": str(folder), "push_to_hub": True, "hub_strategy": "every_save", **unset, **changes}


def finished_run(folder: Path) -> Path:
    save_tiny_model(folder)
    (folder / "model.safetensors").write_bytes(b"weights")  # few enough to travel in the commit
    (folder / "run.json").write_text(json.dumps({"settings": {"model_name": "base", "train_data": "rows"}}))
    for name in (
        "checkpoint-4/model.safetensors",
        "wandb/log",
        "training_args.bin",
        "trainer_state.json",
        "optimizer.pt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"log_history": []}')
    return folder


class Hub(BaseHTTPRequestHandler):
    """Makes a repository, takes every file as a part of the commit, and keeps what was asked of it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked[self.path] = body  # type: ignore[attr-defined]
        answer: dict = {"url": f"{constants.ENDPOINT}/me/run", "success": True}
        if "preupload" in self.path:
            answer = {
                "files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            }
        elif "commit" in self.path:
            answer |= {"commitUrl": f"{constants.ENDPOINT}/me/run/commit/0", "commitOid": "0", "hookOutput": ""}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


def test_the_model_its_card_and_its_metrics_are_uploaded_and_nothing_else(tmp_path, monkeypatch, caplog) -> None:
    folder = finished_run(tmp_path / "run")
    hub = HTTPServer(("127.0.0.1", 0), Hub)
    hub.asked = {}  # type: ignore[attr-defined]
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    settings = arguments(folder, hub_model_id="me/run", hub_token="hf_secret", hub_private_repo=True)
    with caplog.at_level(logging.INFO, "d1"):
        publish(SimpleNamespace(**settings), push=True)
    hub.shutdown()
    assert caplog.messages == ["Uploaded to me/run"]
    asked: dict[str, str] = hub.asked  # type: ignore[attr-defined]
    made = json.loads(asked["/api/repos/create"])
    assert (made["name"], made["organization"]) == ("run", "me")
    assert "private" in (made.get("visibility"), *(name for name, value in made.items() if value is True))
    (commit,) = (body for path, body in asked.items() if "/commit/" in path)
    _, *files = map(json.loads, commit.splitlines())
    sent = {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files}
    assert sent["README.md"].startswith(b"---\n")
    assert sent["model.safetensors"] == b"weights"
    local = {"checkpoint-4", "wandb", "training_args.bin", "trainer_state.json", "optimizer.pt", "run.json"}
    assert {*sent} == {path.name for path in folder.iterdir()} - local


def test_without_a_hub_the_run_is_whole_and_one_line_says_what_happened(tmp_path, caplog) -> None:
    folder = finished_run(tmp_path / "run")
    with caplog.at_level(logging.ERROR):
        publish(SimpleNamespace(**arguments(folder)), push=True)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder} is complete, but was not uploaded to run: ")
    assert record.getMessage().endswith("The same command with --resume tries again.")
    assert "offline mode" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert (folder / "README.md").is_file()


def test_a_trainer_does_not_push_and_names_that_the_hub_refuses_are_refused_at_once(tmp_path) -> None:
    args = SimpleNamespace(**arguments(tmp_path))
    assert hold_push(args)
    assert not args.push_to_hub
    assert not hold_push(args)
    with pytest.raises(ValueError, match="--hub_strategy all_checkpoints: a run uploads its model, at its end"):
        hold_push(SimpleNamespace(**arguments(tmp_path, hub_strategy="all_checkpoints")))
    with pytest.raises(ValueError, match=r"--hub_model_id: .*a/b/c"):
        hold_push(SimpleNamespace(**arguments(tmp_path, hub_model_id="a/b/c")))
