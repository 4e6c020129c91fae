"""A learned order against the rules, and learned together with the tokens; PROTOCOL.md says what is run and judged.

    OMP_NUM_THREADS=1 python -m studies.order.run     # the search, then the runs: what is missing

A line per run goes to data/. If the command is killed, run it again; several processes share the work.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from d1.models import load_model, load_tokenizer
from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from d1.sampling import eos_cut
from d1.tasks import load_task
from studies.json_lines import Run, complete, read_lines
from studies.leaderboard.plan import SETUPS, TASKS
from studies.leaderboard.run import commit, make_start
from studies.order.learned import RULES, Head, Scores, Training, fill, train
from studies.samplers.measure import BATCH, FRESH, accuracy, measured, prompts_of, puzzles, rows_of, solved

DATA = Path(__file__).parent / "data"
STUDIED = ("sudoku-sft", "countdown-sft")
SPEEDS = (4, 8)  # tokens per pass; the canvas is one block
SEARCH_SEED, SEEDS = 330, (320, 321, 322)
CELLS = ((0.1, 1e-2), (0.1, 3e-2))  # of the search: noise, learning rate of the head
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # of the rule threshold
RATE = 3e-4  # of the model, from diffu-grpo/pocket.yaml
UPDATES = {"order": 60, "joint": 30, "tokens": 30}
VALIDATION, PROBLEMS, PROBLEM_SEED = 256, 300, 21  # Countdown is judged on all problems of its test split
ORDERS = {"confidence": "low_confidence", "entropy": "entropy", "leftmost": "leftmost"}
Found = dict[str, dict[str, Any]]


class Start:
    """The SFT model of a setup and a seed, with its task."""

    def __init__(self, setup: str, seed: int, folder: Path) -> None:
        path = str(make_start(folder, SETUPS[setup], seed))
        self.task, self.model, self.tokenizer = SETUPS[setup].task, load_model(path).eval(), load_tokenizer(path)
        self.module, self.length = load_task(TASKS[self.task].dataset), TASKS[self.task].length
        self.mask: int = self.tokenizer.mask_token_id

    def problems(self, judge: bool) -> Any:
        """New problems, or those that the search uses."""
        if not judge:
            return self.module.load_rows("validation").select(range(VALIDATION))
        if self.task == "sudoku":
            return rows_of("sudoku", puzzles(PROBLEMS, PROBLEM_SEED))
        return FRESH[self.task](PROBLEMS * PROBLEMS, PROBLEM_SEED)

    def batches(self, s: Training, seed: int) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Groups of training problems in an order that the seed decides, and their rewards."""
        rows = self.module.load_rows("train").shuffle(seed=seed)
        for first in count(0, s.prompts):
            some = rows.select([(first + i) % len(rows) for i in range(s.prompts)])
            each = [row for row in some for _ in range(s.group)]
            yield prompts_of(some, self.tokenizer, "cpu").repeat_interleave(s.group, 0), self.reward_of(each)

    def reward_of(self, rows: Sequence[Mapping[str, Any]]) -> Callable[[Tensor], Tensor]:
        columns = {name: [row[name] for row in rows] for name in ("question", "ground_truth")}

        def reward(ids: Tensor) -> Tensor:
            texts = [str(self.tokenizer.decode(row)).split(self.tokenizer.eos_token)[0] for row in ids.tolist()]
            said = [[{"role": "assistant", "content": text}] for text in texts]
            return torch.tensor([one(completions=said, **columns) for one in self.module.REWARDS]).sum(0)

        return reward

    def judged(self, scores: Scores, speed: int, rows: Any, **how: Any) -> dict[str, Any]:
        """Greedy completions in the order of these scores, as `studies.samplers.measure.measured` reports them."""
        prompts, steps = prompts_of(rows, self.tokenizer, "cpu"), self.length // speed
        filled = [fill(self.model, scores, some, self.length, steps, self.mask, **how) for some in prompts.split(BATCH)]
        ids = torch.cat([part[0] for part in filled])
        right = solved([SimpleNamespace(ids=ids)], self.tokenizer, 0, rows, self.task)  # type: ignore[list-item]
        tokens = int(eos_cut(ids, [self.tokenizer.eos_token_id]).sum()) / len(rows)
        return {"solved": "".join(str(int(one)) for one in right), "passes": float(steps), "tokens": round(tokens, 4)}


def levels_of(task: str) -> dict[int, float]:
    """Speed -> the level of the rule threshold that solves most validation problems with at most as many passes.

    Raises:
        ValueError: the search has not judged the rules.
    """
    found = searched(task)["found"]
    chosen = {}
    for speed in SPEEDS:
        able = [level for level in LEVELS if found[f"threshold {level}"]["passes"] <= TASKS[task].length / speed]
        chosen[speed] = max(able, key=lambda level: accuracy(found[f"threshold {level}"]))
    return chosen


def searched(task: str) -> dict[str, Any]:
    """The line of the search with the rules of a task; ValueError if it is missing."""
    for line in read_lines(DATA / "search.jsonl"):
        if (SETUPS[line["setup"]].task, line["arm"]) == (task, "rules"):
            return line
    raise ValueError(f"data/search.jsonl has no rules of {task}: run the search first")


def best_rule(task: str, speed: int, schedule: bool = False) -> str:
    """The name in the lines of `runs` of the rule that solves most of the search's validation problems at a speed;
    `schedule`: without the rule threshold."""
    found, level = searched(task)["found"], levels_of(task)[speed]
    rights = {f"{rule}, {speed}": found[f"{rule}, {speed}"] for rule in (*ORDERS, "random")}
    if not schedule:
        rights[f"threshold, {speed}"] = found[f"threshold {level}"]
    return max(rights, key=lambda name: accuracy(rights[name]))


def cell_of(setup: str) -> tuple[float, float]:
    """Noise and learning rate of the head that solve most validation problems; of equal ones, the first of `CELLS`.

    Raises:
        ValueError: the search of the setup is not complete.
    """
    lines = [line for line in read_lines(DATA / "search.jsonl") if (line["setup"], line["arm"]) == (setup, "order")]
    found = {(line["noise"], line["rate"]): accuracy(line["found"]["order"]) for line in lines}
    if {*found} != {*CELLS}:
        raise ValueError(f"the search of {setup} has {len(found)} of {len(CELLS)} runs: run the search first")
    return max(CELLS, key=found.__getitem__)


def rules(start: Start, rows: Any, levels: Mapping[str, float]) -> Found:
    """Every rule at every speed; `levels`: name -> level of the rule threshold."""
    same: dict[str, Any] = {"block": start.length}
    samplers = {
        f"{name}, {speed}": {**same, "steps": start.length // speed, "remasking": order}
        for speed, (name, order) in product(SPEEDS, ORDERS.items())
    }
    fast: dict[str, Any] = {**same, "steps": start.length, "sampler": "parallel", "reveal": "threshold"}
    samplers |= {name: {**fast, "reveal_level": level} for name, level in levels.items()}
    found = measured(start.model, start.tokenizer, rows, start.task, start.length, samplers)
    for speed in SPEEDS:
        noise = {"noise": 1.0, "generator": torch.Generator().manual_seed(PROBLEM_SEED)}
        found[f"random, {speed}"] = start.judged(RULES["random"], speed, rows, **noise)
    return found


def line(run: Run, folder: Path, judge: bool) -> dict[str, Any]:
    """Trains an arm, if it is one that trains, and judges it."""
    began, start, arm = time.process_time(), Start(run["setup"], run["seed"], folder), run["arm"]
    rows, told = start.problems(judge), dict[str, Any]()
    if arm == "rules":
        names = {f"threshold, {speed}": level for speed, level in levels_of(start.task).items()} if judge else None
        found = rules(start, rows, names or {f"threshold {level}": level for level in LEVELS})
        told = {"levels": names}
    else:
        noise, rate = (run["noise"], run["rate"]) if "noise" in run else cell_of(run["setup"])
        own = {"arm": arm, "updates": UPDATES[arm], "noise": noise, "head_rate": rate, "rate": RATE}
        s = Training(length=start.length, steps=start.length // run["speed"], mask=start.mask, **own)
        head, generator = Head(start.model.config.hidden_size, run["seed"]), torch.Generator().manual_seed(run["seed"])
        told = {"cell": [noise, rate], "curve": train(start.model, head, start.batches(s, run["seed"]), s, generator)}
        told["trained_s"] = round(time.process_time() - began, 1)
        judges: dict[str, Scores] = {"order": head} if s.learns_places else {}
        judges |= {"confidence": RULES["confidence"]} if s.learns_tokens else {}
        found = {name: start.judged(scores, run["speed"], rows) for name, scores in judges.items()}
    seconds = round(time.process_time() - began, 1)
    return {"found": found, **told, "processor_s": seconds, "commit": commit(), **run_record()}


def searches() -> list[Run]:
    found: list[Run] = []
    for setup in STUDIED:
        same = {"setup": setup, "seed": SEARCH_SEED}
        found.append({**same, "arm": "rules", "speed": 0, "noise": 0.0, "rate": 0.0})
        found += [{**same, "arm": "order", "speed": SPEEDS[0], "noise": noise, "rate": rate} for noise, rate in CELLS]
    return found


def runs() -> list[Run]:
    """Rules and the head alone seed by seed, then the arms that train the model."""
    found: list[Run] = []
    for seed, setup in product(SEEDS, STUDIED):
        found.append({"setup": setup, "seed": seed, "arm": "rules", "speed": 0})  # at every speed
        found += [{"setup": setup, "seed": seed, "arm": "order", "speed": speed} for speed in SPEEDS]
    for seed, setup, arm in product(SEEDS, STUDIED, ("joint", "tokens")):
        found.append({"setup": setup, "seed": seed, "arm": arm, "speed": SPEEDS[-1]})
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/order", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    complete(DATA / "search.jsonl", searches(), folder, lambda run: line(run, folder, judge=False))
    complete(DATA / "runs.jsonl", runs(), folder, lambda run: line(run, folder, judge=True))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.order.run", lambda: main(make_parser().parse_args()))
