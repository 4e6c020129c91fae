"""python eval.py --model_path PATH --dataset gsm8k [--gen_length 256] [--checkpoint_path ADAPTER] [--add_reasoning]

Generates a completion for every problem of a task and writes them as d1's generation files into `--output_dir`;
`parse_and_get_acc.py` scores them. Several lengths (`--gen_length 128 256 512`) give one file each and load the model
once. On several GPUs: `torchrun --nproc_per_node 4 eval.py ...` (or `accelerate launch`).
A killed run continues when it is started again with the same arguments. When a completion is done, the next problem
joins the batch; all processes take their problems from one queue.

Completions do not depend on the number of processes or on interruptions, in any dtype. In float32 they also do not
depend on the batch size or on the other problems. In 16 bits (bfloat16 is the default on a GPU), the other rows and the
padding of a batch change the rounding of a row's logits, and sometimes a token (eval/README.md has figures). With
`--batch_size 1` a completion never depends on the other problems.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from d1.eval.files import generation_file, read_setups
from d1.eval.flags import EvalFlags, EvalRun
from d1.eval.scores import Row, as_table, row_reports, score_setup, user_tasks
from d1.files import check_output_dir
from d1.models.kinds import check_room
from d1.runs.cli import SettingsParser, quick_imports, run_script
from d1.runs.flag_names import hints_of_flags
from d1.runs.record import run_record
from d1.runs.turns import check_turn_flags
from d1.sampling.settings import GEN_LENGTH, sampling_settings
from d1.tasks import load_task, shots_of, under_protocol

if TYPE_CHECKING:
    from d1.eval.completions import Journal

logger = logging.getLogger("eval")


T = TypeVar("T")


def make_parser(prog: str | None = None) -> SettingsParser[EvalFlags]:
    return SettingsParser(EvalFlags, prog, __doc__)


def main(args: EvalFlags) -> int:
    """Run the evaluation and print its table; return the exit code, 1 if problems could not be scored."""
    rows = run(args)
    if rows:
        sys.stdout.write(as_table(rows))
    for row in rows:
        for line in row_reports(row):
            sys.stderr.write(f"{line}\n")
    return 0 if all(row.complete for row in rows) else 1


def evaluate(model_path: str | Path, dataset: str | Path, **settings: Any) -> list[Row]:
    """Evaluate a model on the problems of a task; write generation files into `output_dir`.

    If a call was interrupted, the next one continues where it stopped. Prints nothing to stdout.

    Args:
        model_path: folder or hub name of a model, or an adapter's folder.
        dataset: name of a task, or path of a task file.
        settings: flags of `d1 eval` by name, e.g. `gen_length=[128, 256]`, `split="validation"`, `dont_save=True`. None
            stands for the default; False turns a switch off.

    Returns:
        One row per length: accuracies and intervals in percent. Empty on every process but the first.

    Raises:
        TypeError: a setting is not a flag.
        ValueError, FileNotFoundError: a setting, a file or a path is wrong; raised before the model is loaded.
    """
    return run(parse_settings(make_parser(), {"model_path": model_path, "dataset": dataset} | settings))


def parse_settings(parser: SettingsParser[T], settings: Mapping[str, Any]) -> T:
    """The flags of a parser from Python values, checked and converted as on the command line.

    Raises:
        TypeError: a setting is not a flag.
        ValueError: a value is not allowed for its flag.
    """
    # The flags that also exist as --no-NAME: their default may be True
    switches: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            switches.update(action.option_strings)

    typed: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            if value:  # an empty one is the default, as None is
                typed += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            typed.append(f"--{name}={json.dumps(value)}")
        elif value is True:
            typed.append(f"--{name}")
        elif value is False:
            if f"--{name}" in switches:
                typed.append(f"--no-{name}")
        elif value is not None:
            typed.append(f"--{name}={value}")
    parser.exit_on_error = parser.allow_abbrev = False
    try:
        known, unknown = parser.parse_known_args(typed)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        words = f"{' '.join(unknown)}{hints_of_flags(unknown, parser)}"
        raise TypeError(f"no such setting: {words} (`d1 eval --help` lists the settings)")
    return parser.settings(**vars(known))


def run(args: EvalFlags) -> list[Row]:
    """Evaluate length by length, on the problems that this process takes from the queue. Rank 0 writes the files and
    returns their results; the others return an empty list."""
    check_output_dir(args.output_dir)

    # These imports take seconds, and `--help` does not need them.
    with quick_imports():
        from d1.eval import completions
        from d1.models.tokenizer import check_chat_template
        from d1.runs.cli import from_rank_0, require_equal, require_shared

    user_task_modules = user_tasks(args.dataset)
    as_d1 = user_task_modules.get(completions.task_name(args)) or load_task(args.dataset)
    task = under_protocol(as_d1, args.prompt_protocol)
    args = replace(args, few_shot=shots_of(task, args.few_shot))
    check_arguments(args)
    runs_of(args)  # refuses sampling settings that contradict each other
    folder = args.read_folder()
    config = folder.config
    lengths = args.gen_length or [folder.gen_length or GEN_LENGTH]
    args = replace(args, gen_length=lengths, dtype=args.dtype or completions.default_dtype(config))
    runs = runs_of(args, config)
    rank, _ = completions.join_processes()
    require_equal(
        args.dtype, "some processes would compute in bf16 and others not, by checks of their CPUs: pass --dtype"
    )
    journals: list[Journal] = []
    temporary_dir: str | None = None
    scored = []
    try:
        tokenizer = args.load_tokenizer()
        check_chat_template(tokenizer, args.model_path)
        prompts = completions.read_prompts(runs[0], task, tokenizer, config)
        check_room(config, max(len(prompt.ids) for prompt in prompts), max(lengths))
        output_dir = args.output_dir
        if args.dont_save:
            temporary_dir = from_rank_0(lambda: tempfile.mkdtemp(prefix="eval_"))
            output_dir = temporary_dir

        # Rank 0 checks all setups before the model is loaded; an error there ends every process.
        for length_run in runs:
            journals.append(completions.Journal(output_dir, completions.setup_name(length_run), rank))
        identities = from_rank_0(lambda: [completions.run_identity(length_run, prompts) for length_run in runs])
        setups = zip(journals, identities, strict=True)
        incomplete = from_rank_0(lambda: [journal.prepare(identity, args.overwrite) for journal, identity in setups])
        to_write = [journal for journal, to_do in zip(journals, incomplete, strict=True) if to_do]
        if to_write:  # all into one folder
            where = "--output_dir"
            if args.dont_save:
                where = "--dont_save writes to $TMPDIR"
            require_shared(to_write[0].identity_file, f"all machines must share the folder of completions, {where}")

        load = functools.cache(lambda: completions.load_model_for(args, folder))
        for length_run, journal, identity, to_do in zip(runs, journals, identities, incomplete, strict=True):
            if to_do:
                completions.complete(length_run, load, tokenizer, prompts, journal)
                if rank == 0:
                    task_name = completions.task_name(length_run)
                    results = generation_file(length_run, task_name, prompts, journal.read())
                    paths = {"model_path": length_run.model_path, "checkpoint_path": length_run.checkpoint_path}
                    record = {**paths, "settings": vars(length_run), "identity": identity, **run_record()}
                    journal.finish(results, record)
            elif rank == 0:
                logger.info("%s is already complete; use --overwrite to start again", journal.results)

        if rank == 0:
            setups_by_name = {setup.name: setup for setup in read_setups(output_dir)}
            for journal in journals:
                row, _ = score_setup(setups_by_name[journal.setup], "strict", user_task_modules)
                scored.append(row)
            if not args.dont_save:
                logger.info("Completions: %s", ", ".join(str(journal.results) for journal in journals))
    finally:
        for journal in journals:
            journal.close()
        if temporary_dir is not None and rank == 0:
            shutil.rmtree(temporary_dir, ignore_errors=True)
    # Not after an error: the other processes, which may wait for this one, would fail at once, and the launcher would
    # end this one before it has printed its message.
    completions.leave_processes()
    return scored


def runs_of(args: EvalFlags, model_config: Any = None) -> list[EvalRun]:
    """One run per length."""
    runs = []
    for length in dict.fromkeys(args.gen_length or [GEN_LENGTH]):
        values = vars(args) | {"gen_length": length}
        run = EvalRun(**values)
        settings = sampling_settings(run, model_config)
        if model_config is not None:
            from d1.sampling.graphs import check_compile  # here, because it imports torch, and help needs none

            check_compile(run.compile, model_config, kernel=run.attn_implementation)
        if args.block_length is not None and getattr(model_config, "block_size", None) is None:
            settings.require_whole_blocks()  # for a block-causal model, the prompt may end inside a block
        runs.append(replace(run, block_length=settings.block_length, diffusion_steps=settings.steps))
    return runs


def check_arguments(args: EvalFlags) -> None:
    """Refuse (ValueError, FileNotFoundError) arguments that contradict each other."""
    protocol = args.prompt_protocol
    check_turn_flags(args, args.edits)
    of_d1 = f"belongs to d1's prompts: leave it out with --prompt_protocol {protocol}"
    if args.add_reasoning and protocol != "d1":
        raise ValueError(f"--add_reasoning {of_d1}")
    if args.dont_use_box and protocol != "d1":
        raise ValueError(f"--dont_use_box {of_d1}")
    if args.dont_use_box and args.few_shot:
        raise ValueError("--dont_use_box contradicts --few_shot, which shows boxed answers")
    if args.few_shot_file and not args.few_shot:
        raise ValueError(f"--few_shot_file would do nothing: --few_shot is 0 with --prompt_protocol {protocol}")
    if args.num_samples > 1 and not args.temperature:
        raise ValueError("--num_samples above 1 needs --temperature above 0")
    if args.tools and args.add_reasoning:
        raise ValueError("--add_reasoning starts a single completion: leave it out with --tools")
    if args.checkpoint_path and not Path(args.checkpoint_path, "adapter_config.json").is_file():
        raise FileNotFoundError(f"--checkpoint_path {args.checkpoint_path} has no adapter_config.json: not an adapter")


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run an evaluation as the command `prog` with `arguments` (default: those of the command line), then exit."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.eval.run")
