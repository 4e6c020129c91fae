"""The core is closed: its modules import no other room, and plain runs of its three stages execute none of them.

What a room outside adds is reached through `d1/extensions.py` alone, when a flag or an argument asks for it.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from d1 import extensions
from d1.runs.turns import FORMAT_NAMES, TOOL_NAMES
from d1.tools.calls import FORMATS
from d1.tools.functions import TOOLS
from tests.commands import ROOT

CORE = ("masking", "models", "sampling", "scoring", "tasks", "sft", "rl", "eval", "runs")
SHARED = ("files", "hub", "lazy", "ranges", "rows", "transformers_bridge", "versions")  # of all rooms
OUTER = ("tools", "serve", "sandbox", "preference", "distill", "show", "report", "commands", "eval.harness")
DOOR = "d1/extensions.py"
# The files of the core that import an outer room all the same -> the reason
KNOWN = {
    "d1/tasks/code.py": "a leaf that only `--dataset code` loads: its rewards run programs in the sandbox",
    "d1/tasks/programs.py": "a leaf that only `--dataset programs` loads: its rewards run programs in the sandbox",
}


def is_outer(module: str) -> bool:
    """Whether a dotted name is an outer room, or lies in one."""
    return any(module == f"d1.{room}" or module.startswith(f"d1.{room}.") for room in OUTER)


def core_files() -> list[Path]:
    folders = [path for room in CORE for path in (ROOT / "d1" / room).rglob("*.py")]
    files = [ROOT / "d1" / f"{name}.py" for name in (*CORE, *SHARED)]
    every = [path for path in (*folders, *files) if path.is_file()]
    return sorted(path for path in every if path != ROOT / "d1" / "eval" / "harness.py")


def names_in(path: Path) -> set[str]:
    """The modules that a file imports anywhere, and the modules that it names in a text other than a docstring."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)
    return found


def test_the_core_names_no_outer_room():
    """No import, for types either, and no name of a module for a later import."""
    found = {str(path.relative_to(ROOT)) for path in core_files() if any(map(is_outer, names_in(path)))}
    assert found == KNOWN.keys()


def test_names_behind_the_door_exist_and_are_of_outer_rooms():
    for name, home in extensions.HOMES.items():
        assert is_outer(f"d1.{home}"), name
        assert getattr(extensions, name) is getattr(importlib.import_module(f"d1.{home}"), name)


def test_help_of_flags_names_every_tool_and_every_format_of_calls():
    """The literal lists are there so that a plain run imports no tools."""
    assert tuple(TOOLS) == TOOL_NAMES
    assert tuple(FORMATS) == FORMAT_NAMES


PROGRAM = """
import json, sys, threading

root = sys.argv[1] + "/d1/"
called = set()

def note(frame, event, argument, root=root, called=called):  # threads may end after the module's names are gone
    if event == "call" and frame.f_code.co_filename.startswith(root):
        called.add((frame.f_code.co_filename[len(root):], frame.f_code.co_qualname))

sys.setprofile(note)
threading.setprofile(note)
stages = json.loads(sys.argv[2])
from d1.sft import train as sft
sft.main(sft.make_parser().parse_args(stages["sft"]))
from d1.eval import run as evaluation
evaluation.main(evaluation.make_parser().parse_args(stages["eval"]))
from d1.rl import train as rl
rl.main(*rl.make_parser().parse_args_and_config(stages["rl"]))
sys.setprofile(None)
modules = sorted(name for name in sys.modules if name.startswith("d1."))
print("\\n" + json.dumps({"called": sorted(called), "modules": modules}))
"""
# Files of the core for what a model or a setting asks for: their functions run for these alone.
LEAVES = (
    "d1.rl.hinted",
    "d1.rl.state_rewards",
    "d1.rl.tree",
    "d1.sampling.causal",
    "d1.sampling.edits",
    "d1.sampling.infilling",
    "d1.sampling.uniform",
    "d1.scoring.accepted",
    "d1.scoring.causal",
    "d1.scoring.uniform",
    "d1.sft.causal_context",
    "d1.sft.diffusion_gemma",
    "d1.sft.editing",
    "d1.sft.scdd",
)
POCKET = str(ROOT / "pocket" / "base")
CANVAS = ["--block_length", "8", "--diffusion_steps", "16"]
STAGES = {
    "sft": [
        *("--model_name", POCKET, "--train_data", str(ROOT / "dataset" / "sudoku_sft.jsonl")),
        *("--max_length", "64", "--batch_size", "2", "--grad_accum_steps", "1", "--max_steps", "2"),
        *("--full_finetuning", "--report_to", "none", "--num_proc", "1"),
    ],
    "rl": [
        *("--model_path", POCKET, "--dataset", "sudoku", "--max_completion_length", "32", *CANVAS),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--num_generations", "2"),
        *("--num_iterations", "2", "--max_steps", "2", "--report_to", "none"),
    ],
    "eval": ["--model_path", POCKET, "--dataset", "sudoku", "--gen_length", "32", *CANVAS, "--limit", "3"],
}


def classes(file: str) -> set[str]:
    """The classes of a file of `d1`, whose bodies run when it is imported."""
    tree = ast.parse((ROOT / "d1" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_plain_runs_execute_nothing_outside_the_core(tmp_path):
    """SFT, evaluation and RL in one process: of all functions that they call, in all threads, none is of an outer room;
    nor is a module of one imported. The same holds for the functions of `LEAVES`.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    stages = {stage: [*words, "--output_dir", str(tmp_path / stage)] for stage, words in STAGES.items()}
    words = [sys.executable, "-c", PROGRAM, str(ROOT), json.dumps(stages)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    called = {f"d1.{file.removesuffix('.py').replace('/', '.')}": name for file, name in found["called"]}
    assert {"d1.sft.trainer", "d1.rl.trainer", "d1.sampling.loop", "d1.eval.scores"} <= called.keys()
    assert {module: name for module, name in called.items() if is_outer(module)} == {}
    assert [name for name in found["modules"] if is_outer(name)] == []
    functions = {f"{file} {name}" for file, name in found["called"] if name != "<module>" and name not in classes(file)}
    leaves = tuple(f"{leaf.removeprefix('d1.').replace('.', '/')}.py" for leaf in LEAVES)
    assert [function for function in functions if function.startswith(leaves)] == []
