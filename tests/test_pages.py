"""Every command of the pages that any machine can run really runs, in the page's order, in a copy of the checkout."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.commands import ROOT, copy_checkout, folder_of
from tests.forks import free_port
from tests.test_readme import DOCUMENTS, FENCE, HISTORY

# Results name the commands that gave them, of hours; recipes need a GPU; test_readme.py runs the README's commands.
RECORDS = ("studies/", "benchmarks/", "recipes/", "docs/results.md", "docs/leaderboard.md", "README.md")
PAGES = [page for page in DOCUMENTS if not page.startswith(RECORDS) and page not in HISTORY]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").glob("*.py"))]
ELSEWHERE = {  # commands that are not run here -> why
    r"(GSAI-ML|JetLM|Dream-org|inclusionAI|Efficient-Large-Model)/": "a model of the hub",
    r"^((DATASET|METHOD|MODEL_PATH)=\S+ )*bash run\.sh": "LLaDA-8B, the script's own model",
    r"--num_processes (2|8|16)": "several GPUs",
    r"^(pip|\.venv/bin/pip) ": "an installation",
    r"^(make|bash \.ci/run)": "of the checkout; `make demo` has its own test",
    r"sbatch": "a cluster",
    r"rows\.jsonl": "rows of the reader's own",
    r"^python -m pocket\.demo": "ten minutes and more; tests/pocket/test_demo.py runs it",
    r"^cd \.\. && python -m pytest": "a test of this suite",
}
NOT_HERE = "|".join(f"(?:{pattern})" for pattern in ELSEWHERE)
LONGEST = 900  # seconds for one command; those of the pages take up to four minutes on two idle cores
Command = tuple[int, str]  # the number of its block, and the command


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block; for a script, the launch lines of its docstring as one block."""
    text = (ROOT / page).read_text()
    if page.endswith(".py"):
        said = ast.get_docstring(ast.parse(text)) or ""
        return [("bash", "\n".join(line.strip() for line in said.splitlines() if re.match(" +python ", line)))]
    return [(kind, re.sub(f"^{indent}", "", body, flags=re.MULTILINE)) for indent, kind, body in FENCE.findall(text)]


def commands_of(page: str) -> list[Command]:
    """The commands of a page's shell blocks, without comments; a command may have several lines."""
    found = []
    for number, (kind, body) in enumerate(blocks_of(page)):
        lines = re.sub(r"[ \t]+#.*$", "", body, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
        found += [(number, line) for line in lines if kind == "bash" and line.strip() and not line.startswith("#")]
    return found


def runnable(page: str) -> list[Command]:
    """The commands of blocks with something to run here; `cd` is part of its block."""
    here = [(number, command) for number, command in commands_of(page) if not re.search(NOT_HERE, command)]
    working = {number for number, command in here if not re.fullmatch(r"cd \S+\s*", command)}
    return [(number, command) for number, command in here if number in working]


def test_each_reason_to_leave_a_command_out_is_needed():
    every = [command for page in PAGES for _, command in commands_of(page)]
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, command) for command in every), pattern
    assert sum(len(runnable(page)) for page in PAGES) > 40


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


Servers = dict[int, "subprocess.Popen[bytes]"]  # by port


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(60)


def serve(command: str, environment: dict[str, str], folder: Path, servers: Servers) -> None:
    """Start a server and wait until it listens. One that an earlier command started on its port is stopped before."""
    port = int((re.search(r"--port (\d+)", command) or ["", "30000"])[1])
    if port in servers:
        stop(servers.pop(port))
    assert not answers(port), f"port {port} is in use"
    server = servers[port] = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=environment)
    end = time.monotonic() + LONGEST
    while not answers(port):
        assert server.poll() is None, f"{command} ended"
        assert time.monotonic() < end, f"{command} does not listen on port {port}"
        time.sleep(0.2)


@pytest.fixture
def servers() -> Iterator[Servers]:
    started: Servers = {}
    yield started
    for server in started.values():
        stop(server)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path, servers):
    """One session per page: files stay, each block starts in the page's folder, and servers run until its end.

    A Python block that begins with the comment "# NAME.py" is the file NAME.py.
    """
    copy = copy_checkout(tmp_path)
    kept = {**os.environ, "PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    kept |= {"WANDB_MODE": "disabled", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    start = copy / folder_of(page.partition("/")[0]).relative_to(ROOT)
    for kind, body in blocks_of(page):
        if kind == "python" and (named := re.match(r"# (\w+\.py)\b", body)):
            (start / named[1]).write_text(body)
    block, folder = -1, start
    for number, command in runnable(page):
        block, folder = number, folder if number == block else start
        if re.match(r"python -m d1 serve\b", command):
            serve(command, kept, folder, servers)
            continue
        began = time.monotonic()
        script = f"set -euo pipefail\n{command}\npwd >{copy}/.folder"
        subprocess.run(["bash", "-c", script], cwd=folder, env=kept, check=True, timeout=LONGEST)
        sys.stdout.write(f"{page}: {time.monotonic() - began:.0f} s: {command}\n")
        folder = Path((copy / ".folder").read_text().strip())


@pytest.mark.slow
def test_four_trainers_and_four_servers_share_a_machine(tmp_path):
    """The lines of docs/engines.md as they stand, with another model, task and ports, and CPUs in place of cards."""
    ports = {f"3000{gpu}": str(free_port()) for gpu in range(4, 8)}
    (text,) = (body for _, body in blocks_of("docs/engines.md") if "CUDA_VISIBLE_DEVICES" in body)
    for before, after in (ports | {"JetLM/SDAR-1.7B-Chat": f"{ROOT}/pocket/base"}).items():
        text = text.replace(before, after)
    here = os.environ | {"ACCELERATE_CONFIG": "../launch/ddp.yaml", "ACCELERATE_USE_CPU": "true", "DATASET": "sudoku"}
    here |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    here |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "OUTPUT_DIR": str(tmp_path), "PORT": str(free_port())}
    size = "--max_steps 1 --max_completion_length 32 --diffusion_steps 16 --block_length 8 --num_iterations 1"
    script = f"set -eu\n{text.rstrip()} --use_cpu true --bf16 false --dtype float32 --ddp_backend gloo {size}"
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, env=here, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            assert shell.wait(LONGEST) == 0, (tmp_path / "log").read_text()[-5000:]
            asked = [requests.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text for port in ports.values()]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert "run.sh: 4 processes x 6 completions x 4 accumulation = 96" in (tmp_path / "log").read_text()
    assert (tmp_path / "checkpoint-1").is_dir()
    tokens = [int(re.findall(r"tokens_total (\d+)", text)[0]) for text in asked]
    assert sum(tokens) == 96 * 32
    assert min(tokens) > 0
