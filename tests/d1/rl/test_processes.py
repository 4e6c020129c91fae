"""diffu-GRPO as users start it: one and two real processes, killed and resumed."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from d1.rl.methods import METHODS
from tests.tiny_grpo import PER_MICRO_BATCH, logged, train_a_little, weights

ROOT = Path(__file__).parents[3]
TASK = Path(__file__).with_name("letters_task.py")
TRAIN_METHODS = Path(__file__).with_name("train_methods.py")
TIMES = ("seconds/", "rollout_tokens", "step_time", "train_runtime", "_per_second", "peak_memory", "profiling/")


LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--main_process_port", "0"]
LAUNCHERS = {
    "alone": [sys.executable],
    "ddp": [*LAUNCH, "--config_file", "../launch/ddp.yaml", "--num_processes", "2"],
    "ddp4": [*LAUNCH, "--config_file", "../launch/ddp.yaml", "--num_processes", "4"],
    "zero2": [*LAUNCH, "--config_file", "accelerate.yaml", "--num_processes", "2"],
    "zero3": [*LAUNCH, "--config_file", "../launch/zero3.yaml", "--num_processes", "2"],
}
KINDS = {"alone": "NO", "ddp": "MULTI_CPU", "ddp4": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def command(model_dir, output_dir, *extra, launcher="alone"):
    flags = {
        "model_path": model_dir,
        "task": TASK,
        "output_dir": output_dir,
        "per_device_train_batch_size": 8 if launcher == "alone" else 4,
        "num_generations": 4,
        "num_iterations": 3,
        "max_completion_length": 8,
        "block_length": 4,
        "diffusion_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 28,  # an epoch has 18
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 3,
        "gradient_checkpointing": "false",
        "report_to": "none",
        "loss_type": "dapo",
    }
    settings = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    if KINDS[launcher] == "DEEPSPEED":
        settings += ["--ddp_backend", "gloo"]
    return [*LAUNCHERS[launcher], "diffu_grpo_train.py", *settings, *extra]


def environment(**extra):
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def on(launcher):
    """The variables that keep a launcher's processes on the CPU and connect them."""
    return {"CUDA_VISIBLE_DEVICES": ""} if KINDS[launcher] == "DEEPSPEED" else {"ACCELERATE_USE_CPU": "true"}


def run(model_dir, output_dir, *extra, launcher="alone"):
    done = subprocess.run(
        command(model_dir, output_dir, *extra, launcher=launcher),
        cwd=ROOT / "diffu-grpo",
        env=environment(**on(launcher)),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def final_weights(folder):
    return load_file(folder / "model.safetensors")


def logs(folder):
    """All logged values, except those that depend on the clock."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in entry.items() if not any(t in key for t in TIMES)} for entry in history]


def until_written_after(path, process):
    """Waits until `path` is newer than now (the run is about to load its model) or the process has ended."""
    started = time.time()
    while process.poll() is None and not (path.exists() and path.stat().st_mtime >= started):
        time.sleep(0.02)


def killed_and_resumed(model_dir, folder, kills, launcher):
    """Kills the run `kills` times at random moments (SIGKILL, launcher and workers), then lets it finish."""
    chance = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen(
            command(model_dir, folder, "--resume_from_checkpoint", "true", launcher=launcher),
            cwd=ROOT / "diffu-grpo",
            env=environment(LETTERS_SECONDS="1", **on(launcher)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until_written_after(folder / "run.json", process)
        time.sleep(chance.uniform(0.0, 4.0))
        assert process.poll() is None, "the run ended before it was killed"
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()  # one by one: a launcher's workers have their own sessions
        process.wait()
    run(model_dir, folder, "--resume_from_checkpoint", "true", launcher=launcher)


@pytest.mark.parametrize("launcher", ["alone", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_killed_five_times_resumes_bit_for_bit(tiny_model_dir, tmp_path, launcher):
    run(tiny_model_dir, tmp_path / "whole", launcher=launcher)
    killed_and_resumed(tiny_model_dir, tmp_path / "killed", 5, launcher)
    whole, killed = final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed")
    for name, value in whole.items():
        assert torch.equal(value, killed[name]), name
    assert logs(tmp_path / "whole") == logs(tmp_path / "killed")


@pytest.mark.parametrize("launcher", ["ddp", "zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_two_processes_reach_the_weights_of_one_and_resume_bit_for_bit(tiny_model_dir, tmp_path, launcher):
    run(tiny_model_dir, tmp_path / "one")
    run(tiny_model_dir, tmp_path / "two", launcher=launcher)
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["processes"] == 2
    assert KINDS[launcher] in record["settings"]["distributed_type"]
    one, two = final_weights(tmp_path / "one"), final_weights(tmp_path / "two")
    start = load_file(tiny_model_dir / "model.safetensors")
    for name, value in one.items():
        assert (value - start[name]).abs().max() > 1e-3
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-5)
    shutil.copytree(tmp_path / "two" / "checkpoint-26", tmp_path / "resumed" / "checkpoint-26")  # cycles end at 24, 27
    run(tiny_model_dir, tmp_path / "resumed", "--resume_from_checkpoint", "true", launcher=launcher)
    resumed = final_weights(tmp_path / "resumed")
    assert all(torch.equal(value, two[name]) for name, value in resumed.items())
    assert logs(tmp_path / "resumed") == logs(tmp_path / "two")


# A rollout of 12 rows per optimizer step: 1 x 12 (processes x accumulation) against 2 x 6 and 4 x 3. Rows are shuffled,
# and groups of four lie in several micro-batches, some on two processes.
ACCUMULATED = ("d1+accumulated", "espo+accumulated", "stable-drl+accumulated", "rldf+accumulated")
# Two micro-batches of six rows, "+weights" with the sampler's log-probs; not for means over one micro-batch's tokens.
TOGETHER = (*(name for name in METHODS if name not in PER_MICRO_BATCH), "d1+weights", "d1+falling")
AGREE = ("reward", "learning_rate", "kl", "ratio_max", "prompts_kept", "sampling/logp_difference_abs")
AGREE += ("sampling/weight_mean", "sampling/weight_capped")


@pytest.mark.parametrize(
    ("launcher", "methods"),
    [
        ("ddp", (*TOGETHER, *ACCUMULATED)),
        ("ddp4", ACCUMULATED),
        pytest.param("zero2", TOGETHER, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp of four", "zero2"],
)
def test_processes_sample_the_rollouts_of_one_and_reach_its_weights_by_each_method(
    tiny_model_dir, tmp_path, launcher, methods
):
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(TRAIN_METHODS), str(tiny_model_dir), str(tmp_path), *methods],
        cwd=ROOT / "diffu-grpo",
        env=environment(PYTHONPATH=str(ROOT), **on(launcher)),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    start = load_file(tiny_model_dir / "model.safetensors")
    for method in methods:
        record = json.loads((tmp_path / f"{method}.json").read_text())
        assert record["processes"] == (4 if launcher == "ddp4" else 2)
        assert KINDS[launcher] in record["kind"]
        alone = train_a_little(tiny_model_dir, tmp_path / "alone", method)
        several = load_file(tmp_path / f"{method}.safetensors")
        assert record["rollouts"] == alone.rollouts
        assert len(alone.rollouts) == 2
        for name, value in weights(alone.model).items():
            assert (value - start[name]).abs().max() > 5e-5
            torch.testing.assert_close(
                several[name], value, rtol=1e-4, atol=2e-6, msg=lambda text, of=method: f"{of}: {text}"
            )
        for entry, other in zip(logged(alone), record["logged"], strict=True):
            # With accumulation the other metrics are means over micro-batches, each of which spans all processes.
            for name in {*(["reward"] if method in ACCUMULATED else AGREE)} & entry.keys():
                assert other[name] == pytest.approx(entry[name], rel=1e-4, abs=1e-6), (method, name)


def test_processes_that_would_each_train_alone_are_refused(tiny_model_dir, tmp_path):
    done = subprocess.run(
        command(tiny_model_dir, tmp_path, launcher="ddp"),
        cwd=ROOT / "diffu-grpo",
        env=environment(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="false"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "2 processes were started, but each would train alone" in done.stderr
