"""bash eval_checkpoints.sh RUN_DIR [--dataset sudoku --gen_length 32 ...] [further flags of eval.py]

Evaluates every `RUN_DIR/checkpoint-*` on the validation split, picks the one with the highest strict accuracy (the
earliest of equals), and evaluates that one on the test set. The choice is kept in `RUN_DIR/eval/selected.json`: started
again, the script finishes what is missing and never chooses a second time with the test result known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from d1.eval.files import read_setups
from d1.eval.scores import Row, score_setup, user_tasks
from d1.runs.entry import OneLineParser, run_script
from d1.runs.output_dir import write_atomically

TRAINED_WITH = {  # flags of eval.py: the training settings in run.json they default to
    "dataset": "dataset",
    "gen_length": "max_completion_length",
    "block_length": "block_length",
    "diffusion_steps": "diffusion_steps",
    "prompt_protocol": "prompt_protocol",
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="folder that holds checkpoint-* folders")
    for name in TRAINED_WITH:
        parser.add_argument(f"--{name}", help="as in eval.py")
    parser.add_argument("--validation_file", help="local file of the validation problems")
    parser.add_argument("--test_file", help="local file of the test problems")
    return parser


def main(args: argparse.Namespace, flags: list[str]) -> None:
    """Runs the selection; `flags` are passed on to eval.py.

    Raises:
        ValueError, FileNotFoundError: no checkpoints, no task named, or other checkpoints than were chosen from.
    """
    run = Path(args.run_dir)
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not checkpoints:
        raise FileNotFoundError(f"no checkpoint-* folder in {run}")
    fill_from_run(args, run)
    settings = {name: str(value) for name in TRAINED_WITH if (value := getattr(args, name)) is not None}
    common = [part for name, value in settings.items() for part in (f"--{name}", value)] + flags
    chosen = run / "eval" / "selected.json"
    names = [checkpoint.name for checkpoint in checkpoints]
    if not chosen.exists():
        rows = {one.name: evaluate(one, "validation", args.validation_file, common, args) for one in checkpoints}
        best = max(names, key=lambda name: (rows[name].accuracy or 0.0, -names.index(name)))
        selection = {"checkpoint": best, "settings": settings}
        selection["validation"] = {name: asdict(row) for name, row in rows.items()}
        write_atomically(chosen, json.dumps(selection, indent=1))
    selection = json.loads(chosen.read_text())
    if list(selection["validation"]) != names:
        raise ValueError(
            f"{chosen} chose from {', '.join(selection['validation'])}, now there are {', '.join(names)}: the test set "
            f"has been used for that choice. Move {chosen.parent} away to choose anew"
        )
    if selection["settings"] != settings:
        raise ValueError(
            f"{chosen} chose with {selection['settings']}, not {settings}: move {chosen.parent} away first"
        )
    best = selection["checkpoint"]
    row = evaluate(run / best, "test", args.test_file, common, args)
    write_atomically(chosen, json.dumps(selection | {"test": asdict(row)}, indent=1))
    for name, result in selection["validation"].items():
        sys.stdout.write(f"validation  {name:<20} {result['accuracy']:6.2f}{'  chosen' if name == best else ''}\n")
    sys.stdout.write(f"test        {best:<20} {row.accuracy:6.2f}  [{row.ci_low:.2f}, {row.ci_high:.2f}]  n={row.n}\n")


def fill_from_run(args: argparse.Namespace, run: Path) -> None:
    """Takes settings that were not given from the record of the training run, where there is one."""
    record = run / "run.json"
    settings = json.loads(record.read_text())["settings"] if record.exists() else {}
    other_length = args.gen_length is not None  # then the steps are eval.py's half of it, not those of training
    for name, trained in TRAINED_WITH.items():
        if getattr(args, name) is None and not (other_length and name == "diffusion_steps"):
            setattr(args, name, settings.get(trained))
    if args.dataset is None:
        raise ValueError(f"name the task with --dataset: {record} does not")


def evaluate(checkpoint: Path, split: str, data_file: str | None, common: list[str], args: argparse.Namespace) -> Row:
    """Runs eval.py on one checkpoint, with one process per GPU, and returns its strict result.

    Raises:
        ValueError: the evaluation failed, or its result is incomplete.
    """
    import torch  # takes seconds, which --help does without

    output_dir = checkpoint.parent / "eval" / split
    launch = [sys.executable]
    if torch.cuda.device_count() > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(torch.cuda.device_count())]
    command = [*launch, "-m", "d1.eval.run", "--model_path", str(checkpoint), "--split", split]
    command += ["--output_dir", str(output_dir), *(["--data_file", data_file] if data_file else []), *common]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"evaluating {checkpoint} failed (see above): {' '.join(command)}")
    setup = next(setup for setup in read_setups(output_dir) if f"_{checkpoint.name}_" in setup.name)
    row, _ = score_setup(setup, "strict", user_tasks(args.dataset))
    if not row.complete:
        raise ValueError(f"{setup.name} is incomplete: {'; '.join(row.errors)}")
    return row


if __name__ == "__main__":
    run_script("eval_checkpoints.sh", lambda: main(*make_parser().parse_known_args()))
