"""A fork with its imports made runs a script as `python script` does, and can be stopped with all it has started."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_processes import ENVIRONMENT, IMPORTED, start, stop

SEEN = """
import atexit, json, os, sys
import torch
import beside
atexit.register(print, "last words")
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "name": __name__, "beside": beside.__file__, "in": sys.stdin.read(),
    "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OF_THE_CALLER")},
    "threads": torch.get_num_threads(), "leads": os.getsid(0) == os.getpid(),
}))
print("to stderr", file=sys.stderr, flush=True)
raise SystemExit(7)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").touch()
    file = tmp_path / "script.py"
    file.write_text(SEEN)
    return file


def test_a_script_sees_what_python_shows_it(script, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_CALLER", "seen")
    command, folder = [sys.executable, str(script), "--flag", "value"], tmp_path / "work"
    folder.mkdir()
    expected = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert expected.returncode == 7, expected.stderr
    log = tmp_path / "log"
    log.write_text("before\n")
    process = start(command, folder, log)
    process.join()
    assert process.exitcode == expected.returncode
    said = log.read_text().splitlines()
    assert said[0] == "before"
    shown, last = expected.stdout.splitlines()
    assert last == "last words"
    assert sorted(said[1:]) == sorted(["to stderr", shown, last])
    assert json.loads(shown)["environment"] == {"OMP_NUM_THREADS": "1", "OF_THE_CALLER": "seen"}


def test_what_is_stopped_takes_along_what_it_started(tmp_path):
    script, log = tmp_path / "parent.py", tmp_path / "log"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = start([sys.executable, script], tmp_path, log)
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.05)
    stop(process)
    assert process.exitcode < 0
    child = Path(f"/proc/{int(log.read_text())}/stat")
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


THREADS = """
import os
from pathlib import Path
tasks = Path("/proc/self/task")
names = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.exists() else []
print(len([name for name in names if name != "jemalloc_bg_thd"]))  # pyarrow's allocator, which starts it anew in a fork
"""


def test_what_all_forks_share_asks_for_no_gpu_and_starts_no_thread():
    """After a question to CUDA no fork can use it, and another thread's locks would stay locked."""
    asks = ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties")
    code = f"import torch\nfor name in {asks!r}: setattr(torch.cuda, name, None)\nimport {', '.join(IMPORTED)}{THREADS}"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) <= 1
