"""A run from start to end: damaged checkpoints are refused by name, changed settings are recorded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from d1.models.folder import ModelFolder
from d1.rl.train import main as rl_main
from d1.rl.train import make_parser as rl_parser
from d1.runs import stage
from d1.runs.checkpoints import SUMS, file_checksum
from d1.runs.record import hash_file, hash_model
from d1.runs.stage import check_trainer_arguments
from d1.runs.trainer import RunTrainer
from d1.sft.train import main as sft_main
from d1.sft.train import make_parser as sft_parser
from d1.show.report import read_run
from tests.faults import clock_steps_back, edit_json, flip_bit, full_disk

TASK = Path(__file__).parents[1] / "rl" / "letters_task.py"

RL = f"""--task {TASK} --per_device_train_batch_size 4 --num_generations 4 --num_iterations 1 --max_completion_length 8
    --block_length 4 --diffusion_steps 4 --save_steps 1 --report_to none --gradient_checkpointing false
    --use_cpu true --lr_scheduler_type linear"""
SFT = "--batch_size 4 --grad_accum_steps 1 --eval_steps 1 --lora_r 2 --test_split 0 --debugging --job_name ."


class Run:
    """A short run of one stage, started by its command line."""

    def __init__(self, stage: str, model: Path, data: Path) -> None:
        self.stage = stage
        self.flags = ["--learning_rate", "1e-3", "--logging_steps", "1", "--model_path", str(model)]
        more = RL if stage == "rl" else f"{SFT} --train_data {data}"
        self.flags += more.split()

    def __call__(self, folder: Path, *more: str, max_steps: int = 4) -> Any:
        flags = [*self.flags, "--output_dir", str(folder), "--max_steps", str(max_steps), *more]
        if self.stage == "rl":
            return rl_main(*rl_parser().parse_args_and_config(flags))
        return sft_main(sft_parser().parse_args(flags))


@pytest.fixture(scope="module", params=["sft", "rl"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Run:
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}", "completion": f"={2 * i}!"}) + "\n" for i in range(40)))
    return Run(request.param, tiny_model_dir, data)


@pytest.fixture(scope="module")
def two_steps(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoint-1 and checkpoint-2."""
    folder = tmp_path_factory.mktemp(run.stage)
    run(folder, "--lr_scheduler_type", "linear", max_steps=2)
    return folder


@pytest.fixture
def folder(two_steps: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(two_steps, tmp_path / "run")


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "trainer_state.json", SUMS, "{weights}"])
def test_a_checkpoint_that_lacks_a_file_is_refused_by_its_name(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before a model is loaded; the checkpoint before it is named, and the run continues from that one."""
    weights = "adapter_model.safetensors" if run.stage == "sft" else "model.safetensors"
    file = folder / "checkpoint-2" / name.format(weights=weights)
    file.unlink()
    loads = {"sft": "d1.runs.stage", "rl": "d1.rl.stage"}[run.stage]
    monkeypatch.setattr(f"{loads}.load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    earlier = folder / "checkpoint-1"
    with pytest.raises(ValueError, match=rf"{file} is missing.*; continue from .* --resume {earlier}$"):
        run(folder, "--resume")
    shutil.rmtree(earlier)
    with pytest.raises(ValueError, match=rf"{file} is missing.*; no earlier checkpoint is left"):
        run(folder, "--resume")


def test_one_bit_of_any_file_of_a_checkpoint_is_noticed(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a trainer in a program of one's own, and by a run that would only copy the model of its last
    checkpoint."""
    trainer = run(tmp_path / "other", max_steps=1)
    trainer.args.output_dir = str(folder)
    checkpoint = folder / "checkpoint-2"
    sums = json.loads((checkpoint / SUMS).read_text())
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SUMS)
    assert [*sums] == [str(file.relative_to(checkpoint)) for file in files]
    assert len(files) > 8
    weights = checkpoint / ("adapter_model.safetensors" if run.stage == "sft" else "model.safetensors")
    assert sums[weights.name] == [weights.stat().st_size, hashlib.sha256(weights.read_bytes()).hexdigest()]
    assert not list(folder.glob(SUMS))
    for file in files:
        flip_bit(file)
        with pytest.raises(ValueError, match=rf"{file} is damaged \(.*; continue from .*checkpoint-1$"):
            run(folder, "--resume")
        with pytest.raises(ValueError, match=rf"{file} is damaged \(.*; continue from .*checkpoint-1$"):
            trainer.train(str(checkpoint))
        flip_bit(file)
    (checkpoint / "optimizer.pt").rename(folder / "optimizer.pt")
    for resume in (True, checkpoint):
        with pytest.raises(ValueError, match=r"optimizer\.pt is missing; continue from .*checkpoint-1$"):
            trainer.train(resume_from_checkpoint=resume)
    (folder / "optimizer.pt").rename(checkpoint / "optimizer.pt")
    flip_bit(weights)
    (folder / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=rf"{weights} is damaged \(its checksum is not"):
        run(folder, "--resume", "--lr_scheduler_type", "linear", max_steps=2)
    flip_bit(weights)
    assert run(folder, "--resume", "--lr_scheduler_type", "linear", max_steps=2) is None
    assert not list(folder.glob(SUMS))
    hashed = []

    def record_and_hash(file: Path) -> list[int | str]:
        hashed.append(file)
        return file_checksum(file)

    monkeypatch.setattr("d1.runs.checkpoints.file_checksum", record_and_hash)
    run(folder, "--resume", "--lr_scheduler_type", "linear", max_steps=3)
    assert hashed.count(weights) == 1
    (folder / "checkpoint-3").rename(folder / "away")
    (checkpoint / SUMS).write_text("{")
    with pytest.raises(ValueError, match=rf"{SUMS} is damaged"):
        run(folder, "--resume")


def test_rotation_keeps_the_newest_steps_after_the_clock_stepped_back(run: Run, folder: Path) -> None:
    clock_steps_back(folder)
    limit = [] if run.stage == "sft" else ["--save_total_limit", "2"]  # SFT's own limit
    run(folder, "--resume", *limit)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


def test_a_limit_of_one_keeps_the_last_checkpoint_next_to_the_best(tiny_model_dir: Path, tmp_path: Path) -> None:
    """At a rate of 0 all evaluations are equal, and the first is the best."""
    run = Run("rl", tiny_model_dir, tmp_path)
    best = "--load_best_model_at_end true --metric_for_best_model eval_reward --eval_strategy steps --eval_steps 1"
    flags = ["--learning_rate", "0", "--save_total_limit", "1", *best.split()]
    trainer = run(tmp_path / "run", *flags, max_steps=3)
    for _ in range(2):
        assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}
        assert run(tmp_path / "run", *flags, "--resume", max_steps=3) is None
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert trainer.args.save_total_limit == settings["save_total_limit"] == 1


def test_a_checkpoint_is_on_the_disk_before_an_older_one_is_deleted(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file under its name before the move, and then the folder of the run."""
    synced: list[str] = []
    original = os.fsync

    def record_and_sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    def rotate(saved: Path, limit: int | None, best: str | None) -> None:
        before_move = synced[: synced.index(str(folder))]
        staging = folder / ".saving" / "checkpoint-3"
        paths = [staging / path.relative_to(saved) for path in (saved, *saved.rglob("*"))]
        assert [str(path) for path in paths if str(path) not in before_move] == []

    monkeypatch.setattr(os, "fsync", record_and_sync)
    monkeypatch.setattr("d1.runs.checkpoints.rotate", rotate)
    run(folder, "--resume", "--lr_scheduler_type", "linear", max_steps=3)
    assert (folder / "checkpoint-3").is_dir()


@pytest.mark.parametrize("name", ["*model.safetensors", "optimizer.pt"])
def test_a_full_disk_is_one_line_and_the_run_continues_with_room(run: Run, folder: Path, name: str) -> None:
    """safetensors and PyTorch each have their own errors."""
    flags = ["--resume", "--lr_scheduler_type", "linear", "--report_to", "none"]  # wandb writes files, too
    (file,) = (folder / "checkpoint-2").glob(name)
    message = rf"^no room for checkpoint-3 in {folder} \(.*\d\.\d GB are free there\): checkpoint-2 is .* --resume$"
    with full_disk(file.stat().st_size - 1), pytest.raises(OSError, match=message):
        run(folder, *flags)
    assert not (folder / ".saving").exists()
    assert run(folder, *flags).state.global_step == 4
    assert (folder / "checkpoint-4").is_dir()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_saved_weights_have_the_mode_of_the_umask(run: Run, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        run(tmp_path / "run", max_steps=1)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 2
    assert {path.name for path in files if path.stat().st_mode & 0o777 != mode} == set()


def test_weights_that_are_not_finite_are_not_saved_and_end_the_run_at_its_next_log(run: Run, tmp_path: Path) -> None:
    """The last step made them infinite, or a gradient did: before an evaluation, and long before a checkpoint."""
    problem = "the weights are no longer finite after step 1"
    with pytest.raises(FloatingPointError, match=problem):
        run(tmp_path / "run", "--learning_rate", "1e39", "--warmup_steps", "0", max_steps=1)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    trainer = run(tmp_path / "other", max_steps=1)
    trainer.log({"loss": 1.0, "grad_norm": float("nan")})  # fp16's scaler skipped the step
    next(weight for weight in trainer.model.parameters() if weight.requires_grad).data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=problem):
        trainer.log({"loss": 1.0, "grad_norm": float("nan")})


def test_changed_settings_take_effect_and_are_recorded_from_their_step_on(
    run: Run, two_steps: Path, folder: Path
) -> None:
    """The new rate on the old schedule: linear from the peak to 0 in the steps of the run."""

    def logged() -> list[float]:
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        return [entry["learning_rate"] for entry in log if "learning_rate" in entry]

    def changes() -> list[dict[str, Any]]:
        return json.loads((folder / "run.json").read_text())["changes"]

    assert changes() == []
    resume = ["--resume", "--lr_scheduler_type", "linear", "--learning_rate"]
    run(folder, *resume, "4e-4")
    assert changes() == [{"step": 2, "learning_rate": [1e-3, 4e-4], "max_steps": [2, 4]}]
    assert logged()[2:] == pytest.approx([4e-4 * (1 - step / 4) for step in (2, 3)], rel=1e-12)
    first = changes()
    resume[1:1] = [str(folder / "checkpoint-3")]
    run(folder, *resume, "1e-3")  # from step 3 on, the first rate is used again
    assert changes() == [*first, {"step": 3, "learning_rate": [4e-4, 1e-3]}]
    assert logged()[3:] == pytest.approx([1e-3 / 4], rel=1e-12)
    resume[1] = str(folder / "checkpoint-2")
    shutil.copytree(two_steps / "checkpoint-2", resume[1], dirs_exist_ok=True)
    run(folder, *resume, "1e-3")  # what came after step 2 no longer counts
    assert changes() == [{"step": 2, "max_steps": [2, 4]}]
    assert logged()[2:] == pytest.approx([1e-3 * (1 - step / 4) for step in (2, 3)], rel=1e-12)


def remove_record(checkpoint: Path) -> None:
    """As versions up to 0.3 saved it."""
    (checkpoint / "run.json").unlink()
    sums = json.loads((checkpoint / SUMS).read_text())
    sums.pop("run.json")
    (checkpoint / SUMS).write_text(json.dumps(sums))


def test_a_new_rate_has_an_effect_on_a_resume_without_a_record(run: Run, folder: Path) -> None:
    (folder / "run.json").unlink()
    remove_record(folder / "checkpoint-2")
    trainer = run(folder, "--resume", "--lr_scheduler_type", "linear", "--learning_rate", "4e-4")
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[2:] == pytest.approx([4e-4 * (1 - step / 4) for step in (2, 3)], rel=1e-12)


def test_another_machine_is_recorded_from_its_step_on(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = json.loads((folder / "run.json").read_text())
    resume = ["--resume", str(folder / "checkpoint-2"), "--lr_scheduler_type", "linear"]
    with monkeypatch.context() as patch:
        patch.setattr("d1.runs.record.LIBRARIES", ("torch", "peft"))
        patch.setattr("d1.runs.record.version", lambda name: {"torch": "0.1"}.get(name, before["versions"][name]))
        patch.setattr("d1.runs.record.cpu_model", lambda: "another")
        run(folder, *resume, max_steps=3)
    changed = {"version of torch": [before["versions"]["torch"], "0.1"]}
    changed["cpu"] = [before["cpu"], {**before["cpu"], "model": "another"}]
    assert json.loads((folder / "run.json").read_text())["changes"] == [{"step": 2, "max_steps": [2, 3], **changed}]
    assert any(text.startswith("From step 2 on, version of torch is 0.1 (before: ") for text in caplog.messages)
    remove_record(folder / "checkpoint-2")
    run(folder, *resume, max_steps=3)  # what came after step 2 no longer counts
    assert json.loads((folder / "run.json").read_text())["changes"] == [{"step": 2, "max_steps": [2, 3]}]


def test_a_new_rate_has_an_effect_after_a_branch_without_a_checkpoint(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch wrote its rate into the run's record, and the last checkpoint is of the run before."""

    def kill(self: RunTrainer, *args: Any, **options: Any) -> None:
        raise RuntimeError("killed")

    linear = ["--lr_scheduler_type", "linear"]
    run(folder, "--resume", *linear)
    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "log", kill)
        with pytest.raises(RuntimeError, match="killed"):
            run(folder, "--resume", str(folder / "checkpoint-3"), *linear, "--learning_rate", "4e-4")
    trainer = run(folder, "--resume", *linear, "--learning_rate", "4e-4", max_steps=6)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[4:] == pytest.approx([4e-4 * (1 - step / 6) for step in (4, 5)], rel=1e-12)
    changes = [{"step": 2, "max_steps": [2, 4]}, {"step": 4, "learning_rate": [1e-3, 4e-4], "max_steps": [4, 6]}]
    assert json.loads((folder / "run.json").read_text())["changes"] == changes


def test_a_resume_computes_in_the_precision_of_its_record(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's speed is measured once: another answer, as of a busy moment, does not change the run."""
    assert json.loads((folder / "run.json").read_text())["settings"]["bf16"] in (False, "false")
    monkeypatch.setattr("d1.runs.stage.cpu_runs_bf16", lambda config: True)
    resume = ["--resume", "--lr_scheduler_type", "linear"]
    assert not run(folder, *resume, max_steps=3).args.bf16
    assert run(folder, *resume, "--bf16", "true", max_steps=4).args.bf16
    monkeypatch.setattr("d1.runs.stage.cpu_runs_bf16", lambda config: False)
    assert run(folder, "--resume", str(folder / "checkpoint-4"), *resume[1:], max_steps=5).args.bf16


def kill_before_the_final_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run ends with an error after its last checkpoint, before it saves the model in its folder."""
    original = RunTrainer.save_model

    def save_model(self: RunTrainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if output_dir is None:
            raise RuntimeError("killed")
        original(self, output_dir, _internal_call)

    monkeypatch.setattr(RunTrainer, "save_model", save_model)


def test_the_branch_that_a_resume_leaves_is_set_aside(
    run: Run, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later --resume takes the new branch, which has fewer steps; with a limit of 2, no checkpoint is lost. The model
    in the folder is that of the new branch, also if the run was killed before it saved it."""
    linear = ["--lr_scheduler_type", "linear"]
    if run.stage == "rl":
        linear += ["--save_total_limit", "2"]  # SFT's own limit
    run(folder, "--resume", *linear)
    assert {path.name for path in folder.glob("checkpoint-*")} >= {"checkpoint-3", "checkpoint-4"}

    def weights(path: Path) -> str:
        (file,) = path.glob("*model.safetensors")
        return hash_file(file)

    old = weights(folder / "checkpoint-4")
    every = {"sft": "--eval_steps", "rl": "--save_steps"}[run.stage]
    caplog.set_level("INFO")
    branch = [*linear, every, "2", "--learning_rate", "1e-4"]
    with monkeypatch.context() as patch:
        kill_before_the_final_save(patch)
        with pytest.raises(RuntimeError, match="killed"):
            run(folder, "--resume", str(folder / "checkpoint-3"), *branch, max_steps=4)
    new = weights(folder / "checkpoint-4")
    assert weights(folder / "abandoned" / "checkpoint-4") == weights(folder) == old != new
    assert "from step 3: checkpoint-4 of the run before are now in" in caplog.text
    shutil.copy(folder / "abandoned" / "checkpoint-4" / "trainer_state.json", folder)  # as versions up to 0.3 left it
    assert run(folder, "--resume", *branch, max_steps=4) is None
    assert weights(folder) == new


def test_a_report_shows_the_branch_that_continues(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new branch was killed after its first checkpoint, and has fewer logs than the one before."""
    run, folder = Run("rl", tiny_model_dir, tmp_path), tmp_path / "run"
    original = RunTrainer.log

    def log_or_kill(self: RunTrainer, *args: Any, **options: Any) -> None:
        if self.state.global_step == 3:
            raise RuntimeError("killed")
        original(self, *args, **options)

    run(folder, max_steps=4)
    monkeypatch.setattr(RunTrainer, "log", log_or_kill)
    with pytest.raises(RuntimeError, match="killed"):
        run(folder, "--resume", str(folder / "checkpoint-1"), "--learning_rate", "1e-4", max_steps=4)
    logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert read_run(folder)[0] == logs
    assert [log["step"] for log in logs] == [1, 2]


def test_the_checkpoint_that_a_run_continues_from_may_be_deleted_meanwhile(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RunTrainer.log

    def delete_and_log(self: RunTrainer, *args: Any, **options: Any) -> None:
        shutil.rmtree(folder / "checkpoint-1", ignore_errors=True)
        original(self, *args, **options)

    monkeypatch.setattr(RunTrainer, "log", delete_and_log)
    last = ["--keep_last"] if run.stage == "sft" else []
    run(folder, "--resume", str(folder / "checkpoint-1"), "--lr_scheduler_type", "linear", *last, max_steps=3)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert [path.name for path in (folder / "abandoned").iterdir()] == ["checkpoint-2"]


def test_a_run_never_writes_over_the_model_that_it_starts_from(
    run: Run, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its path is spelt; an adapter's base and the adapter below it count, too."""
    loads = {"sft": "d1.runs.stage", "rl": "d1.rl.stage"}[run.stage]
    monkeypatch.setattr(f"{loads}.load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    for name, below in (("first", base), ("second", tmp_path / "first")):
        config = {"peft_type": "LORA", "base_model_name_or_path": str(below)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        (tmp_path / name / "adapter_model.safetensors").touch()
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "run").mkdir()
    merged = shutil.copytree(tiny_model_dir, tmp_path / "run" / "merged")
    before = sorted(path for path in tmp_path.rglob("*"))
    for model, folder in (
        (base, base),
        (base, tmp_path / "link"),
        (tmp_path / "second", base),
        (tmp_path / "second", tmp_path / "first"),
        (merged, tmp_path / "run"),
    ):
        for resume in ([], ["--resume"]):
            with pytest.raises(ValueError, match=r"is the model that the run starts from, .* write to another folder"):
                run(folder, "--model_path", str(model), *resume)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_resume_logs_and_saves_as_often_as_its_new_settings_say(run: Run, folder: Path) -> None:
    saves = {"sft": "--eval_steps", "rl": "--save_steps"}[run.stage]
    run(folder, "--resume", "--lr_scheduler_type", "linear", "--logging_steps", "2", saves, "3", max_steps=6)
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 4, 6]
    steps = {int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")}
    assert {step for step in steps if step > 2} == {3, 6}


def test_a_run_is_finished_at_the_last_step_of_its_own_settings(run: Run, two_steps: Path, folder: Path) -> None:
    """A trial of two steps that is continued: for a part of an epoch, which Trainer's state has as a whole one; and for
    the epoch that its steps reached into."""
    epochs = {"sft": "--num_epochs", "rl": "--num_train_epochs"}[run.stage]
    resume = ["--resume", "--lr_scheduler_type", "linear"]
    assert run(folder, *resume, epochs, "0.3", max_steps=-1).state.global_step == {"sft": 3, "rl": 4}[run.stage]
    weights = hash_model(str(folder))
    for max_steps in (-1, 2, 3):
        assert run(folder, *resume, epochs, "0.3", max_steps=max_steps) is None
    (folder / "run.json").unlink()
    assert run(folder, *resume, epochs, "0.3", max_steps=-1) is None
    assert run(folder, *resume, epochs, "0.1", max_steps=-1) is None  # it is past this end
    assert hash_model(str(folder)) == weights
    shutil.copytree(two_steps, folder, dirs_exist_ok=True)
    resume[1:1] = [str(folder / "checkpoint-2")]
    assert run(folder, *resume, epochs, "1", max_steps=-1).state.global_step == {"sft": 10, "rl": 12}[run.stage]


def test_a_state_without_its_end_is_written_again(run: Run, folder: Path) -> None:
    """Of a run that was killed while it saved its state, after the model."""
    state = folder / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert run(folder, "--resume", "--lr_scheduler_type", "linear", max_steps=2) is None
    assert state.read_text() == (folder / "checkpoint-2" / state.name).read_text()


def test_the_folder_of_a_run_stands_for_its_last_checkpoint(run: Run, folder: Path) -> None:
    resume = ["--resume", str(folder), "--lr_scheduler_type", "linear"]
    assert run(folder, *resume, max_steps=3).state.global_step == 3


def test_a_finished_run_without_checkpoints_is_not_trained_anew(run: Run, folder: Path) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    weights, resume = hash_model(str(folder)), ["--resume", "--lr_scheduler_type", "linear"]
    (file,) = folder.glob("*model.safetensors")
    file.rename(folder.parent / file.name)
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; no earlier checkpoint is left"):
        run(folder, *resume, max_steps=2)
    (folder.parent / file.name).rename(file)
    assert run(folder, *resume, max_steps=2) is None
    with pytest.raises(ValueError, match="is finished, and no checkpoint is left to continue from: use another folder"):
        run(folder, *resume, max_steps=4)
    with pytest.raises(ValueError, match="holds a run with seed 42 instead of 1"):
        run(folder, *resume, "--seed", "1", max_steps=4)
    assert hash_model(str(folder)) == weights


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr_scheduler_type", "warmup_stable_decay"], "--lr_scheduler_type warmup_stable_decay: .*num_decay_steps"),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "--lr_scheduler_type cosine_with_min_lr: .*min_lr"),
    ],
)
def test_what_a_trainer_would_refuse_is_refused_before_the_data_are_read(
    run: Run, tmp_path: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("d1.runs.stage.is_tensorboard_available", lambda: False)
    with pytest.raises(ValueError, match=r"--report_to tensorboard: pip install -e '.\[tensorboard\]'"):
        check_trainer_arguments(TrainingArguments(str(tmp_path), report_to="tensorboard"))


def test_a_change_that_the_checkpoint_speaks_against_is_refused(run: Run, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a run with (?=.*seed 42 instead of 7).*weight_decay 0\.\d instead of 0\.5"):
        run(folder, "--resume", "--seed", "7", "--weight_decay", "0.5")
    remove_record(folder / "checkpoint-2")
    (folder / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is no JSON .* delete it to continue without a record"):
        run(folder, "--resume")


def test_a_resume_over_other_contents_is_refused(run: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Model and data keep their paths: the checkpoint goes with what they held, also when the run is finished."""
    model, folder = shutil.copytree(tiny_model_dir, tmp_path / "model"), tmp_path / "run"
    named = "dataset" if run.stage == "rl" else "train_data"
    flag = "--task" if run.stage == "rl" else "--train_data"
    data = Path(shutil.copy(run.flags[run.flags.index(flag) + 1], tmp_path))
    own = ["--model_path", str(model), flag, str(data), "--resume"]
    run(folder, *own, max_steps=1)
    record = json.loads((folder / "run.json").read_text())
    setting = "model_path" if run.stage == "rl" else "model_name"
    assert record["settings"][f"contents of {setting}"] == hash_model(str(model))
    assert record["settings"][f"contents of {named}"] == hash_file(data)
    for path, name in (model / "config.json", setting), (model / "tokenizer_config.json", setting), (data, named):
        before = path.read_bytes()
        if path == data:
            path.write_bytes(before.replace(b"4", b"5"))
        else:
            edit_json(path, **({"rms_norm_eps": 1e-2} if path.name == "config.json" else {"model_max_length": 99}))
        for max_steps in (1, 2):
            with pytest.raises(ValueError, match=rf"a run with contents of {name} [^ ].* instead of .*settings and f"):
                run(folder, *own, max_steps=max_steps)
        path.write_bytes(before)
    assert run(folder, *own, max_steps=2).state.global_step == 2


def test_another_reward_under_the_same_path_is_recorded(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A setting that may change: so may what it names, which the record then says."""
    rewards = tmp_path / "more.py"
    rewards.write_text("def short(completions, **columns):\n    return [0.0 for _ in completions]\n")
    run, own = Run("rl", tiny_model_dir, tmp_path), ["--reward_file", str(rewards)]
    run(tmp_path / "run", *own, max_steps=1)
    before = hash_file(rewards)
    rewards.write_text(rewards.read_text().replace("0.0", "1.0"))
    run(tmp_path / "run", *own, "--resume", max_steps=2)
    changed = {"step": 1, "max_steps": [1, 2], "contents of reward_file": [before, hash_file(rewards)]}
    assert json.loads((tmp_path / "run/run.json").read_text())["changes"] == [changed]


def test_an_adapter_below_4_bit_weights_is_refused_before_a_model_is_loaded(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*args: Any, **options: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(stage, "load_model", load_model)
    args = sft_parser().parse_args(["--model_name", "me/adapter", "--load_in_4bit"])
    folder = replace(ModelFolder.read(tiny_model_dir), adapters=("me/adapter",))
    with pytest.raises(ValueError, match=r"merged into 4-bit weights: run `python -m d1 merge` on me/adapter$"):
        stage.prepare_model(args, folder)
