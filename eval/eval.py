"""python eval.py --model_path PATH --dataset gsm8k [--gen_length 256] [--checkpoint_path ADAPTER] [--add_reasoning]

Generates a completion for every problem of a task and writes them as d1's generation files into `--output_dir`;
`parse_and_get_acc.py` scores them. On several GPUs: `torchrun --nproc_per_node 4 eval.py ...` (or `accelerate launch`).
Completions do not depend on the number of processes, the batch size or padding. A killed run, started again with the
same arguments, continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eval_journal import Journal, Key, weights_fingerprint
from generation_files import read_setups
from parse_and_get_acc import as_table
from score_setups import score_setup

from d1.runs.entry import run_script
from d1.runs.output_dir import check_output_dir
from d1.runs.ranges import check_ranges
from d1.runs.record import run_record
from d1.sampling.order import REMASKING
from d1.sampling.reveal import RULES
from d1.sampling.settings import CACHES, SAMPLERS
from d1.tasks import SPLITS, TASKS, few_shot_messages, load_task

if TYPE_CHECKING:  # what takes seconds to import, `--help` does without
    import torch
    from generate_completions import Problem

logger = logging.getLogger("eval")

BOX_REQUEST = re.compile(r" as \\boxed\{\w+\}")  # how the tasks' prompts ask for a boxed answer
DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model_path", "--model_name", required=True, help="folder or hub name of a model, or an adapter's folder"
    )
    model.add_argument("--checkpoint_path", default="", help="LoRA adapter to put on the model")
    model.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on a GPU, float32 on a CPU)")
    model.add_argument("--attn_implementation", help="sdpa, eager or flash_attention_2")
    model.add_argument("--plain_chat_template", action="store_true", help="for a tokenizer without a chat template")
    model.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    task = parser.add_argument_group("task")
    task.add_argument("--dataset", required=True, help=f"{', '.join(TASKS)}, or a task of your own as a .py file")
    task.add_argument("--split", choices=SPLITS, default="test")
    task.add_argument("--data_file", help="local .json, .jsonl, .csv or .parquet file to use for the split")
    task.add_argument("--limit", type=int, help="evaluate this many problems, drawn once and for all from the split")
    task.add_argument("--few_shot", type=int, default=0, help="solved training problems shown before each problem")
    task.add_argument("--few_shot_file", help="local file of the training problems for --few_shot")
    task.add_argument("--add_reasoning", action="store_true", help="start every completion with <reasoning>")
    task.add_argument("--dont_use_box", action="store_true", help=r"do not ask for the answer in \boxed{}")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--gen_length", type=int, default=128, help="tokens of a completion")
    sampling.add_argument("--block_length", type=int, default=32, help="tokens filled before moving right")
    sampling.add_argument("--diffusion_steps", type=int, help="forward passes a completion (default: gen_length / 2)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--cfg_scale", type=float, default=0.0, help="classifier-free guidance; 0 is off")
    sampling.add_argument("--remasking", choices=REMASKING, default="low_confidence")
    sampling.add_argument("--num_samples", type=int, default=1, help="completions a problem, for pass@k and majority")
    sampling.add_argument("--seed", type=int, default=0, help="of sampling and of the few-shot draw")
    sampling.add_argument(
        "--sampler", choices=SAMPLERS, default="exact", help="all but exact trade accuracy for speed (default: exact)"
    )
    sampling.add_argument("--kv_cache", choices=CACHES, help="what a cached sampler keeps (default: dual)")
    levels = ", ".join(f"{rule} {level}" for rule, (_, level) in RULES.items())
    sampling.add_argument("--reveal", choices=RULES, help="a parallel sampler's rule (default: threshold)")
    sampling.add_argument("--reveal_level", type=float, help=f"the rule's level (default: {levels})")
    sampling.add_argument(
        "--eos_stop", action="store_true", help="leave out the blocks after a completion's end: same answers, less work"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--batch_size", type=int, default=4, help="completions generated at a time by each process")
    run.add_argument("--output_dir", default="results/")
    run.add_argument("--suffix", default="", help="added to the model's name in the file names")
    run.add_argument("--overwrite", action="store_true", help="drop what is there of this setup and start again")
    run.add_argument("--dont_save", action="store_true", help="print the accuracy and leave no files")
    return parser


def main(args: argparse.Namespace) -> None:
    """Runs the evaluation on this process's share of the problems; rank 0 assembles the files.

    Raises:
        ValueError, FileNotFoundError: an argument, a file or a path makes no sense, before the model is loaded.
    """
    check_ranges(vars(args), "eval")
    if args.diffusion_steps is None:
        args.diffusion_steps = args.gen_length // 2
    check_output_dir(args.output_dir)

    import torch.distributed as dist
    from generate_completions import generate_all

    from d1.models import load_tokenizer
    from d1.models.tokenizer import check_chat_template

    check_arguments(args)
    rank, world = join_processes()
    task = load_task(args.dataset)
    tokenizer = load_tokenizer(
        tokenizer_path(args), plain_chat_template=args.plain_chat_template, trust_remote_code=args.trust_remote_code
    )
    check_chat_template(tokenizer, args.model_path)
    problems = read_problems(args, task, tokenizer)
    if args.dont_save:
        args.output_dir = from_rank_0(lambda: tempfile.mkdtemp(prefix="eval_"))
    journal = Journal(args.output_dir, setup_name(args), rank)
    identity = run_identity(args, problems)
    if from_rank_0(lambda: journal.prepare(identity, args.overwrite)):
        wanted = [(problem.index, sample) for problem in problems for sample in range(args.num_samples)]
        done = journal.read()
        wait_for_all()  # nobody writes before everybody has read
        if len(done) and rank == 0:
            logger.info("Resuming: %d of %d completions are there", len(done), len(wanted))
        # Longest prompts first: batches need little padding, and a batch that does not fit fails at once.
        by_index = {problem.index: problem for problem in problems}
        todo = sorted((key for key in wanted if key not in done), key=lambda key: -len(by_index[key[0]].ids))
        if mine := [(by_index[index], sample) for index, sample in todo[rank::world]]:
            generate_all(args, pick_dtype(args), tokenizer, mine, journal)
        wait_for_all()
        if rank == 0:
            journal.finish(results_file(args, problems, journal.read()), record_file(args, identity))
    elif rank == 0:
        logger.info("%s is complete already; --overwrite starts again", journal.results)
    if rank == 0:
        setup = next(setup for setup in read_setups(args.output_dir) if setup.name == journal.setup)
        user_tasks = {} if args.dataset in TASKS else {task_name(args): task}
        sys.stdout.write(as_table([score_setup(setup, "strict", user_tasks)[0]]))
        if args.dont_save:
            shutil.rmtree(args.output_dir)
    if dist.is_initialized():
        dist.destroy_process_group()


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses arguments that contradict each other or do not fit the model.

    Raises:
        ValueError, FileNotFoundError: says which, and what to use instead.
    """
    from generate_completions import sampling_settings

    from d1.models.adapters import adapter_chain
    from d1.models.kinds import native_config
    from d1.sampling.caching import check_cacheable

    settings = sampling_settings(args)
    if args.num_samples > 1 and args.temperature == 0 and args.remasking != "random":
        raise ValueError(
            "--num_samples needs a --temperature above 0 or random remasking: greedy samples are all alike"
        )
    if args.few_shot and args.dont_use_box:
        raise ValueError("--dont_use_box does not go with --few_shot: the problems shown have boxed answers")
    if args.few_shot and args.few_shot_file and args.few_shot_file == args.data_file:
        raise ValueError("--few_shot_file and --data_file are the same: the problems shown must not be those asked")
    if args.checkpoint_path and not Path(args.checkpoint_path, "adapter_config.json").is_file():
        raise FileNotFoundError(f"--checkpoint_path {args.checkpoint_path} has no adapter_config.json: not an adapter")
    if settings.cache and not args.trust_remote_code:
        check_cacheable(native_config(adapter_chain(args.model_path, args.checkpoint_path or None)[0])[0])


# ---- processes


def join_processes() -> tuple[int, int]:
    """(rank, number of processes), as torchrun or accelerate started them; they only ever wait for each other."""
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=7))  # a rank may be hours behind another
    return int(os.environ.get("RANK", "0")), world


def wait_for_all() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """What `compute` returns on rank 0; an exception there is raised on every rank, so that none waits for ever."""
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except ValueError as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


# ---- problems


def tokenizer_path(args: argparse.Namespace) -> str:
    own = args.checkpoint_path and Path(args.checkpoint_path, "tokenizer_config.json").is_file()
    return args.checkpoint_path if own else args.model_path


def read_problems(args: argparse.Namespace, task: ModuleType, tokenizer: Any) -> list[Problem]:
    """The problems to evaluate, in the order of their split, with their prompts as the model gets them."""
    rows = task.load_rows(args.split, args.data_file)
    chosen: Sequence[int] = range(len(rows))
    if args.limit is not None and args.limit < len(rows):
        chosen = sorted(random.Random(0).sample(chosen, args.limit))
    asked = rows.select(chosen)["question"]
    try:
        shots = few_shot_messages(task, args.few_shot, args.seed, args.few_shot_file, asked)
    except ConnectionError as error:  # which speaks of the flag for the problems asked
        raise ConnectionError(str(error).replace("--data_file", "--few_shot_file")) from error
    from generate_completions import Problem

    from d1.models.tokenizer import encode_prompt, render_prompt

    problems = []
    for index in chosen:
        row = rows[index]
        *before, last = row["prompt"]
        content = BOX_REQUEST.sub("", last["content"], count=1) if args.dont_use_box else last["content"]
        messages = [*shots, *before, {**last, "content": content}]
        prompt = render_prompt(tokenizer, messages) + ("<reasoning>" if args.add_reasoning else "")
        ids = encode_prompt(tokenizer, prompt)
        problems.append(Problem(index, prompt, ids, row["question"], row["ground_truth"]))
    return problems


# ---- names and records


def task_name(args: argparse.Namespace) -> str:
    return args.dataset if args.dataset in TASKS else Path(args.dataset).stem


def setup_name(args: argparse.Namespace) -> str:
    """`{task}_{model}_{gen_length}_{steps}`, the model being named after its folder."""
    path = Path(args.checkpoint_path or args.model_path)
    within_run = path.name.startswith("checkpoint-") or path.name == "merged"
    parts = [path.resolve().parent.name, path.name] if within_run else [path.resolve().name]
    if args.split != "test":
        parts.append(args.split)
    if args.few_shot:
        parts.append(f"fs{args.few_shot}")
    model = re.sub(r"[^\w.-]+", "-", "_".join([*parts, *filter(None, [args.suffix])]))
    return f"{task_name(args)}_{model}_{args.gen_length}_{args.diffusion_steps}"


def pick_dtype(args: argparse.Namespace) -> torch.dtype:
    import torch

    return getattr(torch, args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32"))


def run_identity(args: argparse.Namespace, problems: list[Problem]) -> dict[str, Any]:
    """All that determines the completions: a run resumes only what agrees in it."""
    from generate_completions import sampling_settings

    from d1.models.adapters import adapter_chain

    base, adapters = adapter_chain(args.model_path, args.checkpoint_path or None)
    prompts = json.dumps([[problem.index, problem.prompt, problem.ground_truth] for problem in problems], default=str)
    names = ("gen_length", "diffusion_steps", "block_length", "temperature", "cfg_scale", "remasking", "num_samples")
    # What is off is left out, so that runs begun before there was a choice can still be resumed.
    sampling = sampling_settings(args)
    chosen = {"kv_cache": sampling.cache, "reveal": sampling.rule, "reveal_level": sampling.level}
    approximate = {"sampler": chosen} if args.sampler != "exact" else {}
    stop = {"eos_stop": True} if args.eos_stop else {}
    return {
        "weights": [weights_fingerprint(path) for path in (base, *adapters)],
        "problems": len(problems),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
        "seed": args.seed,
        "dtype": str(pick_dtype(args)),
        **{name: getattr(args, name) for name in names},
        **approximate,
        **stop,
    }


def results_file(args: argparse.Namespace, problems: list[Problem], done: dict[Key, dict[str, Any]]) -> dict[str, Any]:
    """The generation file in d1's format: of several samples, `generations` is the first, `samples` has all."""
    items = []
    for problem in problems:
        samples = [
            {name: value for name, value in done[problem.index, sample].items() if name not in ("index", "sample")}
            for sample in range(args.num_samples)
        ]
        items.append(
            {"question": problem.question, "prompt_input": problem.prompt}
            | samples[0]
            | {"ground_truth": problem.ground_truth, "index": problem.index}
            | ({"samples": samples} if len(samples) > 1 else {})
        )
    seconds = sum(entry["seconds"] for entry in done.values())
    names = ("model_path", "checkpoint_path", "gen_length", "diffusion_steps", "block_length", "split", "seed")
    return {
        "generations": items,
        "metrics": {"wall_time": seconds, "total_processed": len(items)},
        "task": task_name(args),
        "expected_problems": len(items),
    } | {name: getattr(args, name) for name in names}


def record_file(args: argparse.Namespace, identity: dict[str, Any]) -> dict[str, Any]:
    settings = {"model_path": args.model_path, "checkpoint_path": args.checkpoint_path, "settings": vars(args)}
    return settings | {"identity": identity} | run_record()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_script("eval.py", lambda: main(make_parser().parse_args()))
