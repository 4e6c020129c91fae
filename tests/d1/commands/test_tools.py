"""`python -m d1 methods` prints the table's content; a canvas without room is refused; a tool of one's own is a row."""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module

import pytest

from d1.__main__ import COMMANDS, STAGES, Command, main, make_parser
from d1.models import folder as model_folder
from d1.models import load as model_load
from d1.models.kinds import native_config
from d1.ranges import setting
from d1.rl.methods import METHODS
from tests.commands import ROOT

POCKET = ROOT / "pocket" / "base"  # 256 positions
ASKED = ["watch", "--prompt", "0000000000000000", "--model_path", "MODEL"]


def run(*words: str) -> None:
    main(make_parser().parse_args([*words]))


def printed(capsys, *words: str) -> list[list[str]]:
    """The cells of the table that `d1 methods` prints."""
    run("methods", *words)
    return [re.split("  +", line) for line in capsys.readouterr().out.splitlines() if "  " in line]


def test_every_method_has_a_row_with_its_values(capsys):
    header, *rows = printed(capsys)
    shown = ["method", "estimator", "objective", "loss_type", "KL", "beta", "advantage", "mu"]
    assert header == [*shown, "trained by its authors", "paper"]
    assert {row[0]: row[-2] for row in rows}["tracerl"] == "all weights, 0.5 x 8"
    assert [row[0] for row in rows] == [*METHODS]
    by_name = {row[0]: row[1:-2] for row in rows}
    assert by_name["espo"] == ["espo", "trl", "grpo", "k2_sequence", "0.001", "leave_one_out", "8"]
    assert by_name["bgpo"] == ["counts", "bgpo", "sum", "-", "0.0", "(r - mean) / std", "1"]
    assert by_name["d1"] == ["one_step", "trl", "bnpo", "k3", "0.04", "r - mean", "12"]


def test_the_table_of_the_document_is_written_from_the_files(capsys):
    run("methods", "--markdown")
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + sum(method.page is not None for method in METHODS.values())
    assert f"\n{table}\n" in (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", ["espo", str(ROOT / "tests" / "my_method.py")])
def test_a_method_by_its_name_or_file_has_all_its_values(capsys, name):
    header, *rows = printed(capsys, name)
    assert header == ["setting", "value"]
    if name in METHODS:
        method = METHODS[name]
        assert dict(rows) == {
            f"--{setting}": str(value) for setting, value in {**method.values, **method.scale}.items()
        }
    else:
        assert {("--estimator", "half"), ("--num_iterations", "2")} <= {*map(tuple, rows)}


@pytest.mark.parametrize("words", [["serve", "MODEL"], ["chat", "MODEL"], ASKED, ["fill", "MODEL", "a1 [MASK:300]"]])
def test_a_canvas_without_room_is_refused_before_the_weights_are_read(tmp_path, words):
    folder = tmp_path / "model"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    words = [str(folder) if word == "MODEL" else word for word in words]
    more = [] if words[0] == "fill" else ["--gen_length", "300"]
    said = "too long: 1 tokens of text and 300 to fill in exceed the model's 256 positions" + ": lower --g" * bool(more)
    with pytest.raises(ValueError, match=said):
        run(*words, *more)


@pytest.mark.parametrize("words", [["--max_gen_length", "31"], ["--max_gen_length", "8", "--gen_length", "9"]])
def test_a_server_that_would_refuse_its_own_canvas_does_not_start(words):
    with pytest.raises(ValueError, match=f"--max_gen_length {words[1]}: .* give a lower --gen_length"):
        run("serve", str(POCKET), "--port", "0", *words)


def start(command: str, *words: str) -> None:
    """A command of the table, or a stage."""
    if command not in STAGES:
        return run(command, *words)
    stage = import_module(STAGES[command])
    parser = stage.make_parser()
    if command == "rl":
        return stage.main(*parser.parse_args_and_config([*words, "--bf16", "false"]))
    return stage.main(parser.parse_args(words))


TRAIN = ["--train_data", "none.jsonl", "--max_prompt_length", "8", "--output_dir", "OUT"]
PREFER, DISTILL = (["prefer", "--method", "vrpo"], ["distill", "--method", "dparallel"])
NOISE = ["--sampler", "parallel", "--reveal", "entropy", "--temperature", "0.8", "--gen_length", "8"]


@pytest.mark.parametrize(
    ("family", "words", "said"),
    [
        ("causal", ["fill", "MODEL", "a1 [MASK]"], "has a causal context: .* cannot fill a gap"),
        (
            "causal",
            [*PREFER, "--model_name", "MODEL", *TRAIN],
            "preference training is not there for models with a",
        ),
        ("causal", [*DISTILL, "--model_name", "MODEL", *TRAIN], "distillation is not there for models with a causal"),
        ("canvas", ["fill", "MODEL", "a1 [MASK]"], "filling in hides tokens by a mask token, and diffusion_gemma has"),
        ("canvas", ["serve", "MODEL", "--port", "0"], "the server hides tokens by a mask token"),
        ("canvas", [*PREFER, "--model_name", "MODEL", *TRAIN], "preference training hides tokens by a mask token"),
        ("canvas", [*DISTILL, "--model_name", "MODEL", *TRAIN], "distillation hides tokens by a mask token"),
        (
            "canvas",
            ["eval", "--model_path", "MODEL", "--dataset", "sudoku", *NOISE, "--tools", "calculator", "--dont_save"],
            "a run with tools hides tokens by a mask token",
        ),
    ],
)
def test_what_a_model_lacks_is_refused_before_its_weights_are_read(request, tmp_path, family, words, said):
    shutil.copytree(
        request.getfixturevalue(f"tiny_{family}_dir"), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    own = {"MODEL": str(tmp_path / "m"), "OUT": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=said):
        start(*(own.get(word, word) for word in words))


class FirstWeightsError(Exception):
    """Ends a command when it would read weights."""


ROWS = {
    "sft": {"prompt": "1+1", "completion": "2"},
    "prefer": {"prompt": "1+1=", "chosen": "2", "rejected": "7"},
}
FEW = ["--output_dir", "OUT", "--report_to", "none"]
TRAINED = ["--model_name", "MODEL", "--train_data", "DATA", *FEW]
LETTERS = ["--dataset", str(ROOT / "tests" / "d1" / "rl" / "letters_task.py"), "--max_completion_length", "4"]


@pytest.mark.parametrize(
    "words",
    [
        ["sft", *TRAINED, "--test_split", "0"],
        [*PREFER, *TRAINED, "--full_finetuning"],
        [*DISTILL, "--model_name", "MODEL", "--train_data", "sudoku", "--max_completion_length", "8", *FEW],
        ["rl", "--model_path", "MODEL", *LETTERS, "--per_device_train_batch_size", "6", *FEW, "--use_cpu", "true"],
        ["eval", "--model_path", "MODEL", "--dataset", "sudoku", "--limit", "2", "--output_dir", "OUT"],
        ["chat", "MODEL"],
        ["serve", "MODEL", "--port", "0"],
        ["watch", "--model_path", "MODEL", "--prompt", "a", "--against", "eos_stop"],
        ["fill", "MODEL", "a1 [MASK]"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_reads_the_folder_of_its_model_once(tiny_model_dir, tmp_path, monkeypatch, words):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS.get(words[0], {})) + "\n")
    read, loaded = [], []

    def config_once(path):
        read.append(path)
        return native_config(path)

    def load(folder, options):
        loaded.append(folder.path)
        raise FirstWeightsError

    monkeypatch.setattr(model_folder, "native_config", config_once)
    monkeypatch.setattr(model_load, "load_base", load)
    own = {"MODEL": str(tiny_model_dir), "OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "rows.jsonl")}
    with pytest.raises(FirstWeightsError):
        start(*(own.get(word, word) for word in words))
    assert read == loaded == [str(tiny_model_dir)]


def test_two_runs_of_one_model_read_and_load_it_once(tiny_model_dir, monkeypatch):
    read, loaded, load = [], [], model_load.load_base
    monkeypatch.setattr(model_folder, "native_config", lambda path: read.append(path) or native_config(path))
    monkeypatch.setattr(model_load, "load_base", lambda *given: loaded.append(given[0].path) or load(*given))
    words = ["--prompt", "a", "--gen_length", "8", "--against", "eos_stop"]
    run("watch", "--model_path", str(tiny_model_dir), *words)
    assert read == loaded == [str(tiny_model_dir)]


def test_a_row_of_the_table_is_a_command_with_its_help(monkeypatch, capsys):
    @dataclass(frozen=True)
    class CountFlags:
        words: list[str] = setting(positional=True, nargs="+")

    own = Command("count words", CountFlags, lambda args: sys.stdout.write(f"{len(args.words)}\n"))
    monkeypatch.setitem(COMMANDS, "count", own)
    run("count", "one", "two")
    assert capsys.readouterr().out == "2\n"
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    assert re.search(r"count +count words", capsys.readouterr().out)
