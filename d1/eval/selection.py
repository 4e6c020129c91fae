"""bash eval_checkpoints.sh RUN_DIR [--dataset sudoku --gen_length 32 ...] [further flags of eval.py]

Evaluates every `RUN_DIR/checkpoint-*` on the validation split, selects the one with the highest strict accuracy (the
earliest, if several are equal), and evaluates it on the test set. The choice is kept in `RUN_DIR/eval/selected.json`.
If the script is started again, it finishes what is missing, but it never chooses a second time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from d1.eval.files import read_setups
from d1.eval.scores import Row, score_setup, user_tasks
from d1.files import write_atomically
from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import of_file, of_model

TRAINED_WITH = ("dataset", "gen_length", "block_length", "diffusion_steps", "prompt_protocol")  # eval.py's flags


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="folder that holds checkpoint-* folders")
    for name in TRAINED_WITH:
        parser.add_argument(f"--{name}", help="as in eval.py")
    parser.add_argument("--validation_file", help="local file of the validation problems")
    parser.add_argument("--test_file", help="local file of the test problems")
    return parser


def main(args: argparse.Namespace, flags: list[str]) -> None:
    """Run the selection; `flags` are forwarded to eval.py."""
    run = Path(args.run_dir)
    names = [path.name for path in sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))]
    if not names:
        raise FileNotFoundError(f"no checkpoint-* folder in {run}")
    settings = settings_of(args, run)
    common = [part for name, value in settings.items() for part in (f"--{name}", value)] + flags
    chosen = run / "eval" / "selected.json"
    contents: dict[str, Any] = {name: of_model(str(run / name)) for name in names}
    files = {"validation_file": args.validation_file, "dataset": settings["dataset"]}
    contents |= {name: of_file(file) for name, file in files.items() if file and Path(file).is_file()}
    if not chosen.exists():
        rows = {name: evaluate(run / name, "validation", args.validation_file, common, settings) for name in names}
        best = max(names, key=lambda name: rows[name].accuracy or 0.0)  # the first of equals
        selection: dict[str, Any] = {"checkpoint": best, "settings": settings, "contents": contents}
        selection["validation"] = {name: asdict(row) for name, row in rows.items()}
        write_atomically(chosen, json.dumps(selection, indent=1))
    # A choice that was made stays: a second one could be made by the test results.
    selection = json.loads(chosen.read_text())
    if (list(selection["validation"]), selection["settings"]) != (names, settings):
        raise ValueError(
            f"{chosen} is a choice from {', '.join(selection['validation'])} with {selection['settings']}, not from "
            f"{', '.join(names)} with {settings}, and the test set was used. Move {chosen.parent} away to choose again"
        )
    known = selection.get("contents", contents)  # older versions noted none
    if other := [name for name in known | contents if known.get(name) != contents.get(name)]:
        raise ValueError(
            f"{chosen} is a choice from other contents of {', '.join(other)}. Move {chosen.parent} away to choose again"
        )
    best = selection["checkpoint"]
    row = evaluate(run / best, "test", args.test_file, common, settings)
    write_atomically(chosen, json.dumps(selection | {"test": asdict(row)}, indent=1))
    for name, result in selection["validation"].items():
        sys.stdout.write(f"validation  {name:<20} {result['accuracy']:6.2f}{'  chosen' if name == best else ''}\n")
    sys.stdout.write(f"test        {best:<20} {row.accuracy:6.2f}  [{row.ci_low:.2f}, {row.ci_high:.2f}]  n={row.n}\n")


def settings_of(args: argparse.Namespace, run: Path) -> dict[str, str]:
    """The given settings; for the others, those in the record of the training run, if there is one."""
    record = run / "run.json"
    trained = json.loads(record.read_text())["settings"] if record.exists() else {}
    if args.gen_length is not None:
        trained.pop("diffusion_steps", None)  # the steps are eval.py's half of the length, not those of training
    trained["gen_length"] = trained.get("max_completion_length")
    both = {name: (getattr(args, name), trained.get(name)) for name in TRAINED_WITH}
    settings = {name: str(own or found) for name, (own, found) in both.items() if own or found}
    if "dataset" not in settings:
        raise ValueError(f"name the task with --dataset: it is not in {record}")
    return settings


def evaluate(checkpoint: Path, split: str, data_file: str | None, common: list[str], settings: dict[str, str]) -> Row:
    """Run eval.py on one checkpoint, with one process per GPU; return its strict result."""
    import torch  # takes seconds and is not needed by --help

    output_dir = checkpoint.parent / "eval" / split
    launch = [sys.executable]
    if torch.cuda.device_count() > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(torch.cuda.device_count())]
    command = [*launch, "-m", "d1.eval.run", "--model_path", str(checkpoint), "--split", split]
    command += ["--output_dir", str(output_dir), *(["--data_file", data_file] if data_file else []), *common]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"evaluating {checkpoint} failed (see above): {' '.join(command)}")
    setup = next(setup for setup in read_setups(output_dir) if f"_{checkpoint.name}_" in setup.name)
    row, _ = score_setup(setup, "strict", user_tasks(settings["dataset"]))
    if not row.complete:
        raise ValueError(f"{setup.name} is incomplete: {'; '.join(row.errors)}")
    return row


if __name__ == "__main__":
    run_script("eval_checkpoints.sh", lambda: main(*make_parser().parse_known_args()))
