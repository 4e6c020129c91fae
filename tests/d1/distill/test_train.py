"""Whole runs: traces, accumulation, real processes, kill and resume, what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from d1.distill import METHODS
from d1.distill.traces import Prompts, TraceSampler, prompt_ids, read_traces, sample_once
from d1.distill.train import main, make_parser
from d1.models import load_model, load_tokenizer
from d1.models.head import NotFiniteError
from d1.sampling import SamplingSettings
from tests import forks
from tests.faults import edit_json, with_nan, write_at_the_same_time

start = partial(forks.job, "d1.distill.train")
# Any text is an answer, and about two thirds of them are right.
TASK = """
from datasets import Dataset
def load_rows(split, data_file=None):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(11)])
def extract(text):
    return text
def score(text, row):
    return {"accuracy": float(sum(map(ord, text)) % 3 > 0)}
REWARDS = [lambda completions, **columns: [0.0 for _ in completions]]
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> list[str]:
    """Flags of every run here; traces of blocks of 4, two tokens per step."""
    task = tmp_path_factory.mktemp("task") / "odd.py"
    task.write_text(TASK)
    own = ["--model_name", str(tiny_model_dir), "--train_data", str(task), "--max_completion_length", "8"]
    own += ["--diffusion_steps", "4", "--block_length", "4", "--max_prompt_length", "16", "--lora_r", "4"]
    own += ["--debugging", "--num_epochs", "1", "--learning_rate", "1e-3", "--warmup_steps", "0"]
    return [*own, "--logging_steps", "1", "--sampling_batch_size", "4"]


def run(flags: list[str], folder: Path, *more: object) -> Any:
    words = [*flags, "--output_dir", folder, "--job_name", "job", *more]
    return main(make_parser().parse_args([*map(str, words)]))


def logged(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "job/metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


SAME = ("loss", "grad_norm", "compute_tokens")


def check_same(one: Path, other: Path, names: Sequence[str] = SAME, **near: float) -> None:
    """Two runs logged the same numbers, in several steps; equal to the bit unless `near` is given."""
    for name in names:
        found, expected = logged(one, name), logged(other, name)
        assert len(expected) >= (1 if name == "train_loss" else 2), name
        assert found == (pytest.approx(expected, **near) if near else expected), name


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_and_states_per_pass_change_nothing(method: str, flags: list[str], tmp_path: Path) -> None:
    """Steps of 4 rows, the last one short."""
    shared = [*flags, "--method", method]
    run(shared, tmp_path / "one", "--batch_size", 4, "--grad_accum_steps", 1, "--views_at_once", 8)
    run(shared, tmp_path / "parts", "--batch_size", 1, "--grad_accum_steps", 4)
    check_same(tmp_path / "parts", tmp_path / "one", rel=2e-3, abs=1e-5)


LAUNCHED = {"ddp": {"ACCELERATE_USE_CPU": "true"}, "zero2": forks.deepspeed(2), "zero3": forks.deepspeed(3)}
LAUNCHED["fsdp2"] = forks.fsdp2()
KINDS = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
SLOW = [("dparallel", "zero2"), ("dparallel", "zero3"), ("dparallel --full_finetuning", "zero3")]
SLOW += [("dparallel", "fsdp2"), ("dparallel --full_finetuning", "fsdp2")]


@pytest.mark.parametrize(
    ("method", "launcher"), [("dparallel", "ddp"), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_two_processes_give_the_run_of_one(method: str, launcher: str, flags: list[str], tmp_path: Path) -> None:
    """They share the sampling of the traces, and the counts that the loss divides by are those of both."""
    shared, two = [*flags, "--num_prompts", "9", "--method", *method.split()], tmp_path / "two"
    environment, zero = LAUNCHED[launcher], "zero" in launcher
    both = start([*shared, "--batch_size", "1", "--grad_accum_steps", "2"], two, 2, **environment)
    run(shared, tmp_path / "one", "--batch_size", 4, "--grad_accum_steps", 1)
    forks.finish(both, two / "log")
    settings = json.loads((two / "job/run.json").read_text())["settings"]
    assert (settings["world_size"], settings["distributed_type"]) == (2, KINDS[launcher])
    own = ("logps/own",) if zero else ("grad_norm",)
    check_same(two, tmp_path / "one", ("loss", "compute_tokens", *own), rel=5e-3 if zero else 2e-3, abs=1e-5)


def test_a_killed_run_repeats_an_unbroken_one(flags: list[str], tmp_path: Path) -> None:
    """SIGKILL between two checkpoints: all numbers and weights are equal to the bit."""
    shared = [*flags, "--save_steps", "2", "--num_epochs", "2"]
    shared += ["--batch_size", "4", "--grad_accum_steps", "1"]
    killed = tmp_path / "killed"
    forks.wait_for_kill(start(shared, killed, KILLED_AT=str(killed / "job/checkpoint-4")), killed / "log")
    run(shared, tmp_path / "whole")
    run([*shared, "--resume"], killed)
    check_same(killed, tmp_path / "whole", ("loss", "grad_norm", "compute_tokens", "train_loss"))
    weights = [(folder / "job/adapter_model.safetensors").read_bytes() for folder in (tmp_path / "whole", killed)]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match=r"a run with entropy_weight 2.0 instead of 1.0"):
        run([*shared, "--resume", "--entropy_weight", "1.0"], killed)


def test_traces_are_sampled_once(flags: list[str], tiny_block_dir: Path, tmp_path: Path, caplog) -> None:
    """A block-causal model; a trace file that a kill left out is sampled again, the others stay; a damaged one is
    named."""
    caplog.set_level(logging.INFO)
    how = [*flags, "--model_name", str(tiny_block_dir), "--max_steps", "2", "--merge_at_end", "--num_prompts", "9"]
    trainer = run(how, tmp_path)
    (traces,) = (tmp_path / "job/traces").iterdir()
    files = sorted(traces.iterdir())
    assert [file.name[:8] for file in files] == ["00000000", "00000004", "00000008"]
    assert f"left out because none was right: {9 - len(trainer.rows)}" in caplog.text
    assert 0 < len(trainer.rows) < 9
    assert load_model(str(tmp_path / "job/merged")).config.block_size == 4
    assert "distillation, method dparallel: dParallel, [arXiv 2509.26488]" in (tmp_path / "job/README.md").read_text()
    before = [file.read_bytes() for file in files]
    files[1].unlink()
    again = shutil.copytree(traces, tmp_path / "again/job/traces" / traces.name)
    stamps = [file.stat().st_mtime_ns for file in sorted(again.iterdir())]
    assert run(how, tmp_path / "again").rows == trainer.rows
    files = sorted(again.iterdir())
    assert [file.read_bytes() for file in files] == before
    assert [file.stat().st_mtime_ns for file in files][::2] == stamps
    files[0].write_bytes(before[0][:99])
    with pytest.raises(ValueError, match=rf"^{files[0]}: these traces are damaged: delete the file, and the same comm"):
        read_traces(files, [2])
    files[1].unlink()
    with pytest.raises(ValueError, match=rf"^{files[1]}: these traces are missing"):  # later rows would move up
        read_traces(files[1:], [2])


def test_prompts_of_similar_length_are_sampled_together_and_traces_keep_the_order_of_the_prompts(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Each trace is that of its prompt alone."""
    model, tokenizer = load_model(str(tiny_model_dir)), load_tokenizer(tiny_model_dir)
    settings = SamplingSettings(gen_length=8, block_length=4, steps=8, temperature=1.0)
    prompts = Prompts([[5] * length for length in (9, 1, 8, 2, 9)], None, "")
    sampler = TraceSampler(prompts, settings, tokenizer, None)
    files = sample_once(sampler, model, tmp_path, seed=0, batch=2, process=0, processes=1)
    assert [load_file(file)["numbers"].tolist() for file in files] == [[1, 3], [2, 0], [4]]
    traces, _ = read_traces(files, [2])
    for number in range(5):
        alone, _ = sampler.sample(model, [number], seed=0)
        assert traces.ids[number].tolist() == alone.ids[0].tolist()
        assert traces.steps[number].tolist() == alone.steps[0].tolist()
        assert traces.blocks[number].tolist() == alone.blocks[0].tolist()
    assert traces.ids[0].tolist() != traces.ids[4].tolist()  # of equal prompts, by their numbers


def test_a_trace_is_judged_up_to_its_first_end_as_an_evaluation_reads_it(tiny_model_dir: Path) -> None:
    """The end of a turn may come before the EOS, and what follows it is no part of the answer."""
    tokenizer: Any = load_tokenizer(tiny_model_dir)
    tokenizer.eot_token = "<user>"
    texts: list[str] = []

    def judge(text: str, number: int) -> bool:
        texts.append(text)
        return True

    settings = SamplingSettings(gen_length=4, block_length=4, steps=4)
    sampler = TraceSampler(Prompts([[5]], judge, ""), settings, tokenizer, judge)
    canvas_ids = tokenizer("4<user>9<eos>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert sampler.are_right(canvas_ids, [0]).tolist() == [True]
    assert texts == ["4"]


def test_a_trace_ends_where_an_evaluation_ends_it(tiny_model_dir: Path) -> None:
    """The EOS stop also ends a row at an end of turn; before, the model was trained on what it wrote after that."""
    model, tokenizer = load_model(str(tiny_model_dir)), load_tokenizer(tiny_model_dir)
    settings = SamplingSettings(gen_length=32, block_length=4, steps=32)
    prompts = Prompts([[5], [6], [7]], None, "")
    unstopped, _ = TraceSampler(prompts, settings, tokenizer, None).sample(model, range(3), seed=0)
    token = int(unstopped.ids[0, 5])  # written in the second of eight blocks
    tokenizer.eot_token = tokenizer.convert_ids_to_tokens(token)
    traces, _ = TraceSampler(prompts, settings, tokenizer, None).sample(model, range(3), seed=0)
    end = traces.ids[0].tolist().index(token)
    assert traces.filled[0, : end + 1].tolist() == unstopped.ids[0, : end + 1].tolist()
    assert set(traces.filled[0, end + 1 :].tolist()) == {tokenizer.eos_token_id}
    assert traces.steps[0, 8:].tolist() == [-1] * 24


def test_traces_of_other_contents_are_sampled_again(flags: list[str], tiny_model_dir: Path, tmp_path: Path) -> None:
    """Runs that died before their first checkpoint, and then met other prompts, another task or another model."""
    model, task, file = shutil.copytree(tiny_model_dir, tmp_path / "model"), tmp_path / "odd.py", tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    task.write_text(TASK)
    own = [*flags, "--model_name", str(model), "--max_steps", "1", "--resume"]

    def prompts_and_traces(data: Path) -> tuple[list[list[int]], list[list[int]]]:
        trainer = run([*own, "--train_data", str(data), "--keep", "all" if data == file else "right"], tmp_path)
        prompts, traces = trainer.sampler.prompts.ids, trainer.traces.ids.tolist()
        shutil.rmtree(tmp_path / "job/checkpoint-1")
        (tmp_path / "job/trainer_state.json").unlink()  # else the run is finished
        return prompts, traces

    def change(path: Path, old: str, new: str) -> None:
        write_at_the_same_time(path, path.read_text().replace(old, new).encode())

    first = prompts_and_traces(file)
    assert prompts_and_traces(file) == first
    change(file, "7+7", "6*9")
    other = prompts_and_traces(file)
    assert [a == b for a, b in zip(first[0], other[0], strict=True)] == [True] * 7 + [False]
    trainer = run([*own, "--train_data", str(file), "--keep", "all"], tmp_path / "fresh")
    assert other == (trainer.sampler.prompts.ids, trainer.traces.ids.tolist())
    judged = prompts_and_traces(task)
    change(task, "% 3 > 0", "% 3 < 2")
    assert prompts_and_traces(task)[1] != judged[1]
    edit_json(model / "config.json", rms_norm_eps=0.5)
    assert prompts_and_traces(file)[1] != other[1]


def test_a_resume_keeps_the_precision_that_its_traces_were_sampled_in(flags: list[str], tmp_path: Path) -> None:
    run(flags, tmp_path, "--max_steps", 1, "--num_prompts", 4)
    with pytest.raises(ValueError, match=r"a run with dtype None instead of bfloat16: continue it with its own"):
        run(flags, tmp_path, "--max_steps", 2, "--num_prompts", 4, "--resume", "--dtype", "bfloat16")
    assert len([*(tmp_path / "job/traces").iterdir()]) == 1


def test_weights_that_are_not_finite_leave_no_traces(flags: list[str], tiny_model_dir: Path, tmp_path: Path) -> None:
    damaged = with_nan(tiny_model_dir, tmp_path / "model", "lm_head.weight", (7, 1))
    with pytest.raises(
        NotFiniteError, match=r"^row 0: .*comes from .*lm_head, whose weight has 1 non-finite value out of"
    ):
        run([*flags, "--model_name", str(damaged)], tmp_path)
    assert not [*(tmp_path / "job").rglob("*.safetensors")]


def test_bad_prompts_are_an_error_or_counted(flags: list[str], tmp_path: Path, caplog) -> None:
    """A file of prompts cannot judge, so it is for --keep all; a prompt that fills the canvas is a bad row."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1+1=", "<mask>", "1" * 40)))
    own = [*flags, "--train_data", str(file), "--keep", "all", "--max_steps", "1"]
    with pytest.raises(
        ValueError, match=r"(?s)2 of 3 rows cannot .*line 2: the mask token.*line 3: the prompt has 43 "
    ):
        run(own, tmp_path / "error")
    run(own, tmp_path / "skip", "--bad_rows", "skip")
    assert "skipped 2 of 3 rows" in caplog.text
    with pytest.raises(ValueError, match="--keep right needs a task"):
        run([*flags, "--train_data", str(file), "--bad_rows", "skip"], tmp_path / "judge")
    never = tmp_path / "never.py"
    never.write_text(TASK.replace("% 3 > 0", "* 0"))
    with pytest.raises(ValueError, match="no completion of 11 prompts is right"):
        run([*flags, "--train_data", str(never)], tmp_path / "wrong")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--train_data", ""], "--train_data is missing"),
        (["--max_completion_length", "600", "--diffusion_steps", "300"], "512 positions: lower --max_prompt_length"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags: list[str], tmp_path: Path, more: list[str], problem: str) -> None:
    with pytest.raises((ValueError, OSError), match=problem):
        run(flags, tmp_path, *more)
    assert not list(tmp_path.iterdir())


def test_a_prompt_without_messages_is_empty(tiny_model_dir: Path) -> None:
    """The chat template's own error was an IndexError."""
    assert prompt_ids({"prompt": []}, load_tokenizer(tiny_model_dir), 16) == ([], "prompt is empty")
