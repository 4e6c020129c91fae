"""diffu-GRPO as users start it: one and two real processes, also on two nodes, killed and resumed."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import accelerate
import psutil
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

from d1.models import load_model
from d1.rl.methods import METHODS
from tests import forks
from tests.d1.rl.train_methods import train_methods
from tests.rounding import LOGITS, TOKENS, assert_near
from tests.tiny_grpo import PER_MICRO_BATCH, clockless, logged, train_a_little, weights

ROOT = Path(__file__).parents[3]
STAGE = ROOT / "diffu-grpo"
TASK = Path(__file__).with_name("letters_task.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--main_process_port", "0"]
LAUNCH += ["--num_processes", "2", "--config_file"]
CONFIGS = {"ddp": "../launch/ddp.yaml", "zero2": "accelerate.yaml", "zero3": "../launch/zero3.yaml"}
KINDS = {"alone": "NO", "ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def words(model_dir, output_dir, *extra, launcher="alone"):
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
    return ["diffu_grpo_train.py", *settings, *extra]


def on(launcher):
    """The variables of a launcher's processes on the CPU."""
    if launcher == "fsdp2":
        return forks.fsdp2()
    return forks.deepspeed(int(launcher[-1])) if launcher.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}


def launch(words, launcher):
    """The words as a command of Accelerate's launcher, in two processes of DeepSpeed."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(STAGE.parent)}
    variables["ACCELERATE_USE_CPU"] = "false"
    options = {"cwd": STAGE, "env": os.environ | variables, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run([*LAUNCH, CONFIGS[launcher], *words], check=False, **options)
    assert done.returncode == 0, done.stderr[-4000:]


def start(model_dir, folder, *extra, launcher="alone", **environment):
    """The run as one process or as two."""
    processes = 1 if launcher == "alone" else 2
    options = {"log": folder / "log", "folder": STAGE, "processes": processes, **on(launcher), **environment}
    work = forks.sharded if launcher == "fsdp2" else forks.script
    return forks.start(work, *words(model_dir, folder, *extra, launcher=launcher), **options)


def run(model_dir, folder, *extra, launcher="alone"):
    forks.finish(start(model_dir, folder, *extra, launcher=launcher), folder / "log")


@pytest.fixture(scope="module")
def alone(tiny_model_dir, tmp_path_factory):
    """The folder of a whole run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run(tiny_model_dir, folder)
    return folder


def final_weights(folder):
    return load_file(folder / "model.safetensors")


def logs(folder):
    """All logged values, except those that depend on the clock."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return clockless(json.loads((last / "trainer_state.json").read_text())["log_history"])


def test_an_evaluation_of_two_processes_counts_no_row_twice(tiny_model_dir, tmp_path):
    """Of 5 rows, two processes of 2 evaluate 4."""
    evaluation = ["--eval_strategy", "steps", "--eval_steps", "1", "--max_steps", "1"]
    evaluation += ["--num_generations_eval", "1", "--per_device_eval_batch_size"]
    found = {}
    for launcher, rows in (("alone", "4"), ("ddp", "5")):
        folder = tmp_path / launcher
        per_device = "4" if launcher == "alone" else "2"
        run(tiny_model_dir, folder, *evaluation, per_device, "--eval_limit", rows, launcher=launcher)
        (found[launcher],) = (log for log in logs(folder) if "eval_reward" in log)
    assert found["ddp"]["eval_reward"] == pytest.approx(found["alone"]["eval_reward"], rel=1e-6)
    assert "Evaluations leave out the last 1 of 5 rows of eval_dataset" in (tmp_path / "ddp" / "log").read_text()

    folder = tmp_path / "few"
    started = start(tiny_model_dir, folder, *evaluation, "2", "--eval_limit", "3", launcher="ddp")
    said = forks.finish(started, folder / "log", status=1)
    assert "3 rows to evaluate are fewer than the 4 prompts of a batch (2 processes x per_device_eval_batch" in said
    assert "Traceback" not in said


PHASES = {
    "sampling": "run.json",  # before the first rollout, whose reward takes a second
    "saving": ".saving/**/*.safetensors",  # the first checkpoint is half written: it does not have its name
    "updating": "checkpoint-10",  # in the middle of a cycle: a checkpoint's step is not a multiple of three
}


@pytest.mark.parametrize("launcher", ["alone", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_killed_in_each_phase_resumes_bit_for_bit(tiny_model_dir, alone, tmp_path, launcher):
    whole, killed = alone, tmp_path / "killed"
    if launcher != "alone":
        run(tiny_model_dir, whole := tmp_path / "whole", launcher=launcher)
    for phase, file in PHASES.items():
        options = {"LETTERS_SECONDS": "1" if phase == "sampling" else "0.05", "KILLED_AT": str(killed / file)}
        started = start(tiny_model_dir, killed, "--resume_from_checkpoint", "true", launcher=launcher, **options)
        forks.wait_for_kill(started, killed / "log")
        assert not (killed / "model.safetensors").exists()
    run(tiny_model_dir, killed, "--resume_from_checkpoint", "true", launcher=launcher)
    expected, found = final_weights(whole), final_weights(killed)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert logs(whole) == logs(killed)


@pytest.mark.parametrize(
    "launcher", ["ddp", "zero2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "fsdp2"))]
)
def test_two_processes_reach_the_weights_of_one_and_resume_bit_for_bit(tiny_model_dir, alone, tmp_path, launcher):
    if launcher == "zero3":  # Accelerate's own launcher, which imports the libraries three times
        launch(words(tiny_model_dir, tmp_path / "two", launcher=launcher), launcher)
    else:
        run(tiny_model_dir, tmp_path / "two", launcher=launcher)
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["processes"] == 2
    assert KINDS[launcher] in record["settings"]["distributed_type"]
    one, two = final_weights(alone), final_weights(tmp_path / "two")
    start = load_file(tiny_model_dir / "model.safetensors")
    for name, value in one.items():
        assert (value - start[name]).abs().max() > 1e-3
        assert_near(two[name], value, least=LOGITS)  # Adam enlarges the rounding of a small gradient
    again = tmp_path / "resumed"
    shutil.copytree(tmp_path / "two" / "checkpoint-26", again / "checkpoint-26")  # cycles end at 24, 27
    run(tiny_model_dir, again, "--resume_from_checkpoint", "true", launcher=launcher)
    resumed = final_weights(again)
    assert all(torch.equal(value, two[name]) for name, value in resumed.items())
    assert logs(again) == logs(tmp_path / "two")


# A rollout of 12 rows per optimizer step: 1 x 12 (processes x accumulation) against 2 x 6 and 4 x 3. Rows are shuffled,
# and groups of four lie in several micro-batches, some on two processes.
ACCUMULATED = ("d1+accumulated", "espo+accumulated", "stable-drl+accumulated", "rldf+accumulated", "igpo+accumulated")
# Two micro-batches of six rows, "+weights" with the sampler's log-probs; not for means over one micro-batch's tokens.
TOGETHER = (*(name for name in METHODS if name not in PER_MICRO_BATCH), "d1+weights", "d1+falling")
# Of these, one of each advantage, of each draw that depends on rows of other processes, of what compares groups, and of
# what moves rows between processes.
ACROSS = ("d1", "wd1", "espo", "agrpo", "tracerl", "bgpo", "stable-drl", "egspo", "gdsd", "reinforce", "dipo", "dmpo")
ACROSS += ("d-treerpo",)
ACROSS += ("lightning-rl", "egspo-sa+ended")
ACROSS += (*TOGETHER[-2:], "d1+mini-batches", "slim-rl+mini-batches")
AGREE = ("reward", "learning_rate", "kl", "ratio_max", "prompts_kept", "sampling/logp_difference_abs")
AGREE += ("sampling/weight_mean", "sampling/weight_capped")


@pytest.mark.parametrize(
    ("folder", "launcher", "processes", "methods"),
    [
        ("tiny_model_dir", "ddp", 2, ACROSS),
        ("tiny_model_dir", "ddp", 4, ACCUMULATED),
        ("tiny_causal_dir", "ddp", 2, ("cj-grpo",)),
        ("tiny_canvas_dir", "ddp", 2, ("cj-grpo",)),
        pytest.param("tiny_model_dir", "zero2", 2, TOGETHER, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp of four", "causal context", "uniform noise", "zero2"],
)
def test_processes_sample_the_rollouts_of_one_and_reach_its_weights_by_each_method(
    request, tmp_path, folder, launcher, processes, methods
):
    model_dir = request.getfixturevalue(folder)
    given = [str(model_dir), str(tmp_path), *methods]
    if launcher == "ddp":
        log = tmp_path / "log"
        started = forks.start(train_methods, *given, log=log, folder=STAGE, processes=processes, **on(launcher))
        forks.finish(started, log)
    else:
        launch([str(Path(__file__).with_name("train_methods.py")), *given], launcher)
    start = weights(load_model(str(model_dir)))
    for method in methods:
        record = json.loads((tmp_path / f"{method}.json").read_text())
        assert record["processes"] == processes
        assert KINDS[launcher] in record["kind"]
        one = train_a_little(model_dir, tmp_path / "one", method)
        several = load_file(tmp_path / f"{method}.safetensors")
        assert record["rollouts"] == one.rollouts
        assert len(one.rollouts) == 2
        if method == "egspo-sa+ended":
            views = [sum(scoring) for _, _, scoring, *_ in one.rollouts[1]]
            assert max(views[:6]) != max(views[6:])
        for name, value in weights(one.model).items():
            unused = name.endswith("self_conditioning.pre_norm.weight")  # RL has no self-conditioning
            assert (value - start[name]).abs().max() > 5e-5 or unused, name
            where = {"msg": lambda text, of=method: f"{of}: {text}"}
            assert_near(several[name], value, terms=TOKENS, **where)
        for entry, other in zip(logged(one), record["logged"], strict=True):
            # With accumulation the other metrics are means over micro-batches, each of which spans all processes.
            for name in {*(["reward"] if method in ACCUMULATED else AGREE)} & entry.keys():
                assert other[name] == pytest.approx(entry[name], rel=1e-4, abs=1e-6), (method, name)


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.15"), reason="an older Accelerate connects them")
def test_processes_that_would_each_train_alone_are_refused(tiny_model_dir, tmp_path):
    started = start(tiny_model_dir, tmp_path, launcher="ddp", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="false")
    said = forks.finish(started, tmp_path / "log", status=1)
    assert "2 processes were started, but each would train alone" in said


def test_a_single_process_where_several_were_asked_for_is_refused(tiny_model_dir, tmp_path):
    """`launch/cpu.yaml` has distributed_type NO: Accelerate starts one process, whatever --num_processes says."""
    train = [str(ROOT / "SFT" / "sft_train.py"), "--model_name", str(tiny_model_dir), "--debugging"]
    train += ["--train_data", str(ROOT / "dataset" / "sudoku_sft.jsonl"), "--output_dir", str(tmp_path)]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "2"]
    launch += ["--config_file", str(ROOT / "launch" / "cpu.yaml")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WORLD_", "MASTER_"))}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([*launch, *train], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "accelerate launch was asked for several processes and started one" in done.stderr
    assert not [*tmp_path.iterdir()]


def nodes(model_dir, folder, count):
    """The launchers of a run with two processes, spread over this number of nodes, all simulated by this machine."""
    extra = ["--max_steps", "8", "--logging_steps", "1", "--resume_from_checkpoint", "true"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "LETTERS_SECONDS": "0.5"}
    port, started = str(forks.free_port()), []
    for node in range(count):
        machine = ["--num_machines", str(count), "--machine_rank", str(node)]
        machine += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        command = [*LAUNCH, CONFIGS["ddp"], *machine, *words(model_dir, folder, *extra, launcher="ddp")]
        with (folder.parent / f"{folder.name}_node{node}.log").open("ab") as log:
            started.append(subprocess.Popen(command, cwd=STAGE, env=environment, stdout=log, stderr=log))
    return started


def statuses(launchers):
    return [launcher.wait(timeout=300) for launcher in launchers]


@pytest.mark.slow
def test_two_nodes_are_as_two_processes_of_one_and_resume_after_one_of_them_died(tiny_model_dir, tmp_path):
    assert statuses(nodes(tiny_model_dir, tmp_path / "one", 1)) == [0]
    both = nodes(tiny_model_dir, tmp_path / "two", 2)
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
    assert statuses(nodes(tiny_model_dir, tmp_path / "two", 2)) == [0, 0]
    one, two = (final_weights(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
