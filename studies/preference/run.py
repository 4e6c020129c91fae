"""Preferences on pocket models, next to diffu-GRPO at equal compute: every run appends a line to data/runs.jsonl.

    python -m studies.preference.run                # what is missing of three tasks and three seeds
    python -m studies.preference.run --search       # the learning rates, on validation problems and another seed

All arms start from the same SFT model. The pairs are completions that this model samples for training problems: of each
problem that it answers both rightly and wrongly, one right answer and one wrong. What sampling them costs is part of
the budget of VRPO and ELBO-KTO; the latter trains on the same completions, each with its label.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from d1.models import load_tokenizer
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.preference import METHODS
from pocket.demo import GRPO
from pocket.recipes import ROOT
from studies.json_lines import append_line, read_lines
from studies.leaderboard.plan import TASKS, Setup, accuracy
from studies.leaderboard.run import evaluate, logs_of, make_start, train
from studies.preference.pairs import make_pairs

logger = logging.getLogger(__name__)

DATA = Path(__file__).resolve().parent / "data"
RUNS, SEARCH = DATA / "runs.jsonl", DATA / "search.jsonl"
BUDGET = 2_000_000  # compute tokens of an arm: 1 per token of a forward pass and 2 for its backward pass
PROBLEMS, SAMPLES = 256, 4  # that pairs are made of, and completions of each
STEP, DRAWS = 32, 4  # pairs (or completions) per optimizer step, and draws of a bound
SEEDS, SEARCH_TASK, SEARCH_SEED = (0, 1, 2), "sudoku", 100
RATES = (3e-5, 1e-4)
STUDIED = ("sudoku", "countdown", "arithmetic")
ARMS = ("sft", "vrpo", "elbo-kto", "diffu-grpo")
PASSES = {"vrpo": 1 + 3, "elbo-kto": 1 + 1 + 3}  # reference; policy without and with gradients: per draw


def prefer(method: str, task: str, seed: int, start: Path, pairs: Path, made: dict[str, int], rate: float) -> list[str]:
    """Flags of a run that spends what is left of the budget."""
    rows = STEP * (2 if METHODS[method].paired else 1)
    tokenizer = load_tokenizer(str(start))
    with pairs.open() as lines:
        prompt = json.loads(next(lines))["prompt"]
    width = len(encode_prompt(tokenizer, render_prompt(tokenizer, prompt))) + TASKS[task].length
    steps = (BUDGET - made["sampling"]) // (rows * width * DRAWS * PASSES[method])
    flags: list[object] = ["--method", method, "--model_name", start, "--train_data", pairs, "--full_finetuning"]
    flags += ["--debugging", "--max_completion_length", TASKS[task].length, "--batch_size", STEP, "--num_proc", 1]
    flags += ["--grad_accum_steps", 1, "--num_views", DRAWS, "--views_at_once", DRAWS, "--learning_rate", rate]
    flags += ["--max_steps", steps, "--warmup_steps", 0, "--lr_scheduler_type", "linear", "--seed", seed]
    return [*map(str, flags), "--logging_steps", "1", "--save_steps", "100000", "--bad_rows", "skip"]


def grpo(task: str, seed: int, start: Path, folder: Path) -> list[str]:
    flags: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", *GRPO[task], "--model_path", start]
    flags += ["--output_dir", folder, "--seed", seed, "--max_compute_tokens", BUDGET, "--max_steps", BUDGET]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", 1, "--views_at_once", 64]
    return [*map(str, flags)]


def one(arm: str, task: str, seed: int, folder: Path, rate: float | None, split: str) -> dict[str, Any]:
    """Trains an arm and judges it: greedy, the exact sampler."""
    from d1.preference import train as preference_train

    folder.mkdir(parents=True, exist_ok=True)
    start = make_start(folder.parent, Setup(task, "sft"), seed)
    own, spent = folder / f"{arm}{rate or ''}", {"compute": 0}
    made: dict[str, Any] = {}
    shutil.rmtree(own, ignore_errors=True)  # of a run that was killed
    if arm in METHODS:
        pairs = folder / "pairs.jsonl"
        if not (folder / "made.json").exists():
            found = make_pairs(TASKS[task].dataset, start, TASKS[task].length, PROBLEMS, SAMPLES, seed, pairs)
            (folder / "made.json").write_text(json.dumps(found))
        made = json.loads((folder / "made.json").read_text())
        flags = prefer(arm, task, seed, start, pairs, made, float(rate or 0))
        flags += ["--output_dir", str(own.parent), "--job_name", own.name]
        preference_train.main(preference_train.make_parser().parse_args(flags))
    elif arm == "diffu-grpo":
        train(arm, grpo(task, seed, start, own))
    if arm != "sft":
        spent = logs_of(own)
    judged = evaluate(task, start if arm == "sft" else own, own / "judged", ["--split", split])
    compute = int(spent["compute"]) + made.get("sampling", 0)
    return {"right": judged["right"], "steps": spent.get("steps", 0), **made, "compute": compute, "budget": BUDGET}


def runs(search: bool) -> Iterator[dict[str, Any]]:
    if search:
        for arm, rate in product(PASSES, RATES):
            yield {"arm": arm, "task": SEARCH_TASK, "seed": SEARCH_SEED, "rate": rate, "split": "validation"}
        return
    for seed, task, arm in product(SEEDS, STUDIED, ARMS):
        yield {"arm": arm, "task": task, "seed": seed, "rate": chosen_rate(arm), "split": "test"}


def chosen_rate(arm: str) -> float | None:
    """The searched learning rate that solves most validation problems; None for an arm that searches none.

    Raises:
        ValueError: the search is not complete.
    """
    if arm not in PASSES:
        return None
    found = {line["rate"]: accuracy(line["right"]) for line in read_lines(SEARCH) if line["arm"] == arm}
    if not {*RATES} <= {*found}:
        raise ValueError(f"{arm} has no learning rate yet: --search first")
    return max(found, key=found.__getitem__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="the learning rates")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="several processes can share the work")
    parser.add_argument("--output_dir", default="runs/preference")
    return parser


def main(args: argparse.Namespace) -> None:
    file = SEARCH if args.search else RUNS
    there = [{name: line[name] for name in ("arm", "task", "seed", "rate")} for line in read_lines(file)]
    for run in runs(args.search):
        if run["arm"] not in args.arms or {name: run[name] for name in ("arm", "task", "seed", "rate")} in there:
            continue
        folder = Path(args.output_dir).resolve() / f"{run['task']}_seed{run['seed']}"
        line = one(run["arm"], run["task"], run["seed"], folder, run["rate"], run["split"])
        append_line(file, run | line)
        logger.info("%s: %.3f", " ".join(map(str, run.values())), accuracy(line["right"]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(make_parser().parse_args())
