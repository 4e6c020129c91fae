"""Two nodes, simulated by two launchers on this machine: they connect, and one of them fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.forks import free_port

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "../launch/ddp.yaml"]
LAUNCH += ["--mixed_precision", "no", "--num_processes", "2"]


def start(model_dir, folder, nodes):
    """The launchers of a run with two processes, spread over this number of nodes."""
    flags = {
        "model_path": model_dir,
        "task": Path(__file__).with_name("letters_task.py"),
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "num_iterations": 3,
        "max_completion_length": 8,
        "block_length": 4,
        "diffusion_steps": 4,
        "learning_rate": 1e-3,
        "max_steps": 8,
        "save_steps": 2,
        "logging_steps": 1,
        "gradient_checkpointing": "false",
        "report_to": "none",
        "resume_from_checkpoint": "true",
    }
    script = ["diffu_grpo_train.py", *(str(word) for flag in flags.items() for word in (f"--{flag[0]}", flag[1]))]
    port = str(free_port())
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "LETTERS_SECONDS": "0.5"}
    started = []
    for node in range(nodes):
        machine = ["--num_machines", str(nodes), "--machine_rank", str(node)]
        machine += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        with (folder.parent / f"{folder.name}_node{node}.log").open("ab") as log:
            command = [*LAUNCH, *machine, *script]
            started.append(subprocess.Popen(command, cwd=ROOT / "diffu-grpo", env=environment, stdout=log, stderr=log))
    return started


def statuses(launchers):
    return [launcher.wait(timeout=300) for launcher in launchers]


@pytest.mark.slow
def test_two_nodes_are_as_two_processes_of_one_and_go_on_after_one_of_them_died(tiny_model_dir, tmp_path):
    assert statuses(start(tiny_model_dir, tmp_path / "one", nodes=1)) == [0]
    both = start(tiny_model_dir, tmp_path / "two", nodes=2)
    deadline = time.monotonic() + 300
    while not (tmp_path / "two" / "checkpoint-2").exists():
        assert all(launcher.poll() is None for launcher in both), (tmp_path / "two_node0.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lost = psutil.Process(both[1].pid)
    for member in [*lost.children(recursive=True), lost]:
        member.kill()
    assert 0 not in statuses(both)  # the other node does not wait forever
    assert not (tmp_path / "two" / "model.safetensors").exists()
    assert statuses(start(tiny_model_dir, tmp_path / "two", nodes=2)) == [0, 0]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
