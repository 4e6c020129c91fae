"""A headless Chromium, controlled through its own pipe (the Chrome DevTools Protocol), without a package."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")
FLAGS += ("--remote-debugging-pipe",)
PATIENCE = 60.0  # seconds for an answer
KEYS = {" ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """A tab. `requests` are the addresses that it requested, `errors` the exceptions of its scripts."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes, self.buffer, self.numbers = reads, writes, b"", itertools.count(1)
        self.session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self.receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            self.buffer += os.read(self.reads, 1 << 16)
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(message["params"]))
        return message

    def open(self, path: Path, fragment: str = "", width: int = 1280, dark: bool = False, still: bool = True) -> None:
        """Loads a file on a screen of that width, for a user who prefers dark colours or no motion."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        wishes = {"prefers-color-scheme": "dark" if dark else "light"}
        wishes |= {"prefers-reduced-motion": "reduce" if still else "no-preference"}
        self.send("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in wishes.items()])
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{path.as_uri()}{fragment}")
        self.wait_for("document.readyState + location.protocol == 'completefile:'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until a JavaScript expression is true in the page."""
        until = time.monotonic() + PATIENCE
        while not self.ask(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Presses and releases a real key."""
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": " "} if key == " " else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def point(self, selector: str, click: bool = False) -> None:
        """Moves the mouse to the first element of a selector, and clicks if asked."""
        self.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.ask(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """A page of a Chromium with its own profile, which is deleted afterwards."""
    to_read, to_write, reads, writes = *os.pipe(), *os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{writes}'
        words = ["bash", "-c", command, str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            words, pass_fds=(to_read, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(writes)
        try:
            yield Page(reads, to_write)
        finally:
            process.terminate()
            process.wait(30)
            os.close(reads)
            os.close(to_write)
