"""RL with uniform noise: the exact log-probability and a surrogate, from one pocket model; PROTOCOL.md says why.

    python -m studies.uniform_noise.run     # the search of the rates, then the test; a killed run is started anew

A line per run goes to data/.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from d1.sft import train as sft_train
from d1.tasks import load_task
from dataset.make_problems import write_rows
from pocket.tokenizer import CELLS, build_tokenizer
from studies.json_lines import Run, complete, read_lines
from studies.leaderboard.plan import best_rate
from studies.leaderboard.run import commit, evaluate, logs_of, train_from
from studies.samplers.measure import NEW

DATA = Path(__file__).resolve().parent / "data"
CANVAS, PASSES, PROMPT = 20, 6, 18  # tokens of the canvas, passes of the sampler, tokens of a prompt
SFT_SEED, SFT_STEPS = 0, 300
SURROGATE = str(Path(__file__).with_name("surrogate.py"))
# Arm -> the flags that only it has. `surrogate-rollouts` takes the optimizer steps of `exact`, the others the budget.
ARMS: dict[str, list[str]] = {
    "sft": [],
    "exact": ["--estimator", "accepted"],
    "surrogate": ["--method", SURROGATE],
    "surrogate-rollouts": ["--method", SURROGATE],
}
SEARCHED = ("exact", "surrogate")
RATES = (1e-5, 3e-5, 1e-4, 3e-4)
SEARCH_SEEDS, SEEDS = (10,), (0, 1, 2, 3, 4)
BUDGET = 2_000_000  # compute tokens of a run, over rollouts, scoring and updates
PROBLEMS, PROBLEM_SEED = 512, 47  # new ones, which judge the test
SAMPLER = "--sampler parallel --reveal entropy --temperature 0.8 --end_temperature 0.4"
POLICY = "--self_conditioning false --output draw"
SAME = f"{SAMPLER} {POLICY} --p_mask_prompt 0 --scored_tokens drawn --advantage leave_one_out --beta 0 --objective trl"
SAME += " --importance_sampling_level sequence --loss_type grpo --epsilon 0.2 --num_iterations 2 --num_generations 8"
SAME += " --per_device_train_batch_size 32 --max_grad_norm 1 --lr_scheduler_type linear --warmup_steps 0"
CURVES = ("reward", "accepted/flipped_passes", "accepted/flipped_positions", "ratio_max", "clip_ratio/region_mean")


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """A DiffusionGemma of 0.24M parameters, with random weights."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64}
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}
    text |= {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    text |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": 128}
    text |= {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 32, **ends}
    vision: dict[str, Any] = {"model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    vision["intermediate_size"] = 16
    images: Any = dict.fromkeys(("image_token_id", "boi_token_id", "eoi_token_id"), len(tokenizer) - 1)
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS, **images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DiffusionGemmaForBlockDiffusion(config)


def make_start(folder: Path, steps: int = SFT_STEPS) -> Path:
    """The SFT model: from random weights, on the right grids of the training puzzles."""
    start = folder / "sft"
    if (start / "config.json").exists():
        return start
    shutil.rmtree(start, ignore_errors=True)
    base, rows = folder / "base", folder / "sft.jsonl"
    tokenizer = build_tokenizer("sudoku")
    build_model(tokenizer, SFT_SEED).save_pretrained(base)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(base)
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations()))
    flags: list[object] = ["--model_name", base, "--train_data", rows, "--full_finetuning", "--output_dir", folder]
    flags += ["--job_name", "sft", "--batch_size", 64, "--grad_accum_steps", 1, "--learning_rate", 3e-3]
    flags += ["--max_steps", steps, "--warmup_steps", 50, "--max_length", 64, "--causal_weight", 0, "--keep_last"]
    flags += ["--seed", SFT_SEED, "--eval_steps", 300, "--num_proc", 1, "--report_to", "none"]
    sft_train.main(sft_train.make_parser().parse_args([*map(str, flags)]))
    return start


def conversations() -> list[list[dict[str, str]]]:
    """A question and the right grid, without reasoning, for each training puzzle."""
    found = []
    for row in load_task("sudoku").load_rows("train"):
        grid = " ".join(cell + digit for cell, digit in zip(CELLS, row["ground_truth"], strict=True))
        answer = {"role": "assistant", "content": f"<answer>{grid}</answer>"}
        found.append([{"role": "user", "content": row["question"]}, answer])
    return found


def settings(arm: str, seed: int, rate: float) -> list[str]:
    """The flags of RL that all arms but for the first share, and the arm's own."""
    flags: list[object] = ["--dataset", "sudoku", *SAME.split(), *ARMS[arm], "--block_length", CANVAS]
    flags += ["--max_completion_length", CANVAS, "--diffusion_steps", PASSES, "--max_prompt_length", PROMPT]
    return [*map(str, flags), "--seed", str(seed), "--learning_rate", str(rate), "--views_at_once", str(PASSES)]


def reinforce(start: Path, own: Path, flags: list[str], length: list[str]) -> dict[str, Any]:
    """Trains into the folder `own`; returns costs and curves, which have one value per optimizer step."""
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    error = train_from(start, own, [*flags, *length])
    logs = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    curves = {name: [round(of[name], 6) for of in logs if "loss" in of and name in of] for name in CURVES}
    return {"settings": flags, "error": error, **logs_of(own), "curves": curves}


def judged(model: Path, folder: Path, judge: list[str], how: str = "") -> str:
    """Which problems are solved ("0110..."), with the released sampler and what `how` changes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    flags: list[object] = ["--gen_length", CANVAS, "--block_length", CANVAS, "--diffusion_steps", PASSES]
    return evaluate("sudoku", model, folder, [*flags, *SAMPLER.split(), *how.split(), *judge])["right"]


def both(model: Path, folder: Path, judge: list[str]) -> dict[str, str]:
    """Judged with the released sampler, and with the sampler of the rollouts."""
    policy = "--no-self_conditioning --output draw"
    return {"right": judged(model, folder, judge), "right_as_trained": judged(model, folder, judge, policy)}


def line(run: Run, rate: float | None, length: list[str], folder: Path, judge: list[str]) -> dict[str, Any]:
    """Trains and judges a run; a model that did not stay finite has solved nothing."""
    began, start, own = time.process_time(), make_start(folder), folder / "-".join(map(str, run.values()))
    if rate is None:
        found = both(start, folder / "judged", judge)
    else:
        found = reinforce(start, own, settings(run["arm"], run["seed"], rate), length) | {"rate": rate}
        right = both(start if found["error"] else own, own / "judged", judge)
        found |= {name: "0" * len(of) if found["error"] else of for name, of in right.items()}
        shutil.rmtree(own)
    return found | {"seconds": time.process_time() - began, "commit": commit(), **run_record()}


def chosen(arm: str, lines: list[dict[str, Any]]) -> float:
    """The rate that the search found for an arm; ValueError if its search is not complete."""
    searched = arm if arm in SEARCHED else "surrogate"
    return best_rate((of for of in lines if of["arm"] == searched), RATES, len(SEARCH_SEEDS), searched)


def runs() -> list[Run]:
    """The runs of the test, seed by seed, so that an incomplete study has all arms."""
    trained = [{"arm": arm, "seed": seed} for seed, arm in product(SEEDS, ARMS) if arm != "sft"]
    return [{"arm": "sft", "seed": SEEDS[0]}, *trained]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/uniform_noise", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    spent = ["--max_compute_tokens", str(BUDGET), "--max_steps", str(BUDGET)]
    searches = [{"arm": arm, "seed": seed, "rate": rate} for seed, rate, arm in product(SEARCH_SEEDS, RATES, SEARCHED)]
    validation = ["--split", "validation"]
    complete(DATA / "search.jsonl", searches, folder, lambda run: line(run, run["rate"], spent, folder, validation))
    found, problems = read_lines(DATA / "search.jsonl"), folder / "problems.jsonl"
    write_rows(problems, NEW["sudoku"](PROBLEMS, PROBLEM_SEED))

    def tested(run: Run) -> dict[str, Any]:
        length, rate = spent, None if run["arm"] == "sft" else chosen(run["arm"], found)
        if run["arm"] == "surrogate-rollouts":
            own = {"arm": "exact", "seed": run["seed"]}
            (exact,) = (of for of in read_lines(DATA / "runs.jsonl") if own.items() <= of.items())
            length = ["--max_steps", str(exact["steps"])]
        return line(run, rate, length, folder, ["--data_file", str(problems)])

    complete(DATA / "runs.jsonl", runs(), folder, tested)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.uniform_noise.run", lambda: main(make_parser().parse_args()))
