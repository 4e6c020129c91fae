"""python -m d1 watch --model_path M --prompt TEXT: show how a completion is filled in, in the terminal or as a page.

    python -m d1 watch --model_path pocket/base --dataset sudoku --index 3 --gen_length 32 --block_length 8
    python -m d1 watch --model_path pocket/base --dataset sudoku --html watch.html --against sampler=parallel eos_stop
    python -m d1 watch --model_path pocket/base --dataset sudoku --tools calculator --max_turns 3

The second command shows two runs side by side: --against lists the settings that differ, as NAME=VALUE or as the NAME
of a switch. For example, `--against model_path=runs/grpo` compares a model before and after RL.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from d1.commands.model import CompletionFlags, model_of, resolve_canvas
from d1.files import harmless, valid_unicode
from d1.ranges import AMOUNT, NATURAL, setting
from d1.runs.cli import SettingsParser
from d1.runs.turns import TurnFlags, check_turn_flags
from d1.sampling.settings import ModelFlags, sampling_settings
from d1.show.film import Film, Judge, filmed, judge_of, labels_of, piece, without_folders
from d1.tasks import SPLITS, TASKS, load_task

if TYPE_CHECKING:
    from d1.models.folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class QuestionFlags(ModelFlags):
    prompt: str | None = setting(
        None,
        "the user's message; the model's chat template is put around it",
        group="question: a prompt, or a problem of a task",
    )
    dataset: str | None = setting(None, f"{', '.join(TASKS)}, or a task of your own as a .py file")
    index: Annotated[int, NATURAL] = setting(0, "number of the problem in the split, from 0")
    split: str = setting("test", choices=SPLITS)
    data_file: str | None = setting(None, "local .json, .jsonl, .csv or .parquet file to use for the split")


@dataclass(frozen=True, kw_only=True)
class CanvasFlags(CompletionFlags):
    eos_stop: bool = setting(False, "skip the blocks after the completion's end")


@dataclass(frozen=True, kw_only=True)
class WatchFlags(TurnFlags, CanvasFlags, QuestionFlags):  # --help lists the last base first
    against: list[str] = setting([], "a second run, with these flags", nargs="+", metavar="NAME=VALUE", group="output")
    html: Path | None = setting(None, "write an animated web page for any browser", type=Path)
    svg: Path | None = setting(None, "write an animated picture for a document", type=Path)
    pause: Annotated[float, AMOUNT] = setting(0.08, "minimum time per step in the terminal, in seconds")


def run(args: WatchFlags) -> None:
    """Plays one run, or two after each other, and writes the files asked for."""
    runs = [args, changed(args)] if args.against else [args]
    for run_args in runs:
        check_arguments(run_args)
    from rich.console import Console

    from d1.models.folder import ModelFolder
    from d1.models.load import load_on_device
    from d1.runs.console import log_to_console
    from d1.show.terminal import play

    log_to_console()
    # Two runs of the same model read its folder and load it once.
    read = functools.cache(ModelFolder.read)
    loaded = functools.cache(load_on_device)
    console = Console()
    films = []
    for run_args, title in zip(runs, titles(runs), strict=True):
        growing, total = rehearse(run_args, title, read, loaded)
        if args.against and not console.is_terminal:
            console.out(f"{harmless(title)}:", highlight=False)
        films.append(play(growing, console, total, args.pause))
    write(args, films)


def changed(args: WatchFlags) -> WatchFlags:
    """The arguments of the second run: those of the first, changed by the words of --against."""
    parser = SettingsParser(WatchFlags, "d1 watch --against", add_help=False)
    parser.set_defaults(**vars(args))
    return parser.parse_args([f"--{word}" for word in (f"model_path={args.model_path}", *args.against)])


def titles(runs: list[WatchFlags]) -> list[str]:
    """A title per run: the flags that differ between the runs, or the model's name if there are none."""
    flags = [vars(args) | {"against": None} for args in runs]
    differing = [name for name in flags[0] if any(values[name] != flags[0][name] for values in flags)]
    columns = [describe(name, [values[name] for values in flags]) for name in differing or ["model_path"]]
    return [", ".join(texts) for texts in zip(*columns, strict=True)]


def describe(name: str, values: Sequence[Any]) -> list[str]:
    """A flag with its value in each run. Folders of the same name are told apart by those above them."""
    if name == "model_path":
        names = [Path(value).name or value for value in values]
        if len({*names}) < len({*values}):
            names = labels_of([Path(value) for value in values])
        return names
    texts = []
    for value in values:
        if value is True:
            texts.append(name)
        elif value is None or value is False:
            texts.append(f"no {name}")
        else:
            texts.append(f"{name} {without_folders(value)}")
    return texts


def check_arguments(args: WatchFlags) -> None:
    """Raise ValueError or OSError, before anything is loaded, for no question or a file that cannot be written."""
    if (args.prompt is None) == (args.dataset is None):
        raise ValueError("d1 watch needs a question: either --prompt TEXT, or --dataset TASK and --index N")
    check_turn_flags(args, args.edits)
    for path in filter(None, (args.html, args.svg)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file, such as {path / 'watch.html'}")


def row_of(args: WatchFlags) -> dict[str, Any]:
    """The row of the problem; for --prompt, a row with nothing but the chat messages."""
    if args.dataset is None:
        return {"prompt": [{"role": "user", "content": args.prompt}]}
    rows = load_task(args.dataset).load_rows(args.split, args.data_file)
    if args.index >= len(rows):
        raise ValueError(f"--index {args.index}: {args.split} has {len(rows)} problems, numbered from 0")
    return dict(rows[args.index])


def rehearse(
    args: WatchFlags, title: str, read: Callable[..., ModelFolder], loaded: Callable[..., Any]
) -> tuple[Iterator[Film], int]:
    """The film of a run while it grows, and the maximum number of its steps."""
    import torch

    from d1.masking import keyed_generator
    from d1.models.kinds import block_size, check_room
    from d1.models.tokenizer import check_chat_template, encode_prompt, end_ids, render_prompt
    from d1.sampling import rollout_steps
    from d1.tools.evaluation import tools_of
    from d1.tools.turns import Episode

    tokenizer = args.load_tokenizer()
    check_chat_template(tokenizer, args.model_path)
    row = row_of(args)
    folder = read(args.model_path, args.checkpoint_path or None)
    args = resolve_canvas(args, folder)
    config = folder.config
    # Errors of tools come before the weights are read.
    toolbox, functions = tools_of(args, sampling_settings(args, config), tokenizer, config)
    model = model_of(args, folder, loaded)
    settings = sampling_settings(args, model.config)
    messages, template_options = toolbox.add_tool_instructions(row["prompt"], functions)
    text = render_prompt(tokenizer, messages, **template_options)
    episode = Episode(messages, encode_prompt(tokenizer, text), functions)
    check_room(model.config, len(episode.next_ids), settings.gen_length)
    blocks = settings.block_length
    ends = end_ids(tokenizer)
    edits = "" if settings.edits is None else f" · edits above {settings.edits:g}"
    name = without_folders(args.model_path)
    subtitle = f"{name} · {settings.sampler} · blocks of {blocks} · temperature {settings.temperature:g}{edits}"
    task = load_task(args.dataset) if args.dataset else None
    options: dict[str, Any] = {
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_ids": ends if args.eos_stop else None,
    }

    filled = len(episode.next_ids) % blocks if block_size(model.config) else None  # of the block where a prompt ends
    max_passes = settings.max_passes(filled)

    def turn(judge: Judge | None) -> Iterator[Film]:
        number = len(episode.turns)
        ids = torch.tensor([episode.next_ids]).to(model.device)
        key = [args.seed, args.index, 0]
        if number:
            key.append(number)
        options["generator"] = [keyed_generator(*key)]
        steps = rollout_steps(model, ids, torch.ones_like(ids), settings, **options)
        return filmed(steps, functools.partial(piece, tokenizer), ids.shape[1], title, text, subtitle, judge)

    if not args.tools:
        return turn(judge_of(task, row, tokenizer, ends) if task else None), max_passes

    def turns() -> Iterator[Film]:
        film = Film(title, text, subtitle, [], [], [], [])
        canvas: list[int] = []

        def collect(film: Film, canvas_ids: Sequence[int]) -> None:
            canvas[:] = canvas_ids

        while episode.end is None:
            options["stops"] = toolbox.stop_of(len(episode.turns))
            options["cache_rows"] = [toolbox.cache_rows_of(episode)]
            for part in turn(collect):
                yield film.followed(part, len(part.tokens))
            calls = toolbox.append_turn(episode, canvas)
            if calls:
                toolbox.append_results(episode, calls, at=[args.seed, args.index, 0])
            last = episode.turns[-1]
            result_ids = []
            if not episode.end:
                result_ids = episode.next_ids[len(last.prompt_ids) + len(last.kept) :]
            film = film.followed(part, len(last.kept), [piece(tokenizer, token) for token in result_ids])
        if task:
            film.solved = next(iter(task.score(episode.messages[-1]["content"], row).values())) == 1
        yield film

    return turns(), max_passes * toolbox.settings.max_turns


def write(args: WatchFlags, films: list[Film]) -> None:
    """Writes the files asked for and names them on stderr."""
    from d1.show.page import film_page, film_svg

    name = f"{Path(args.dataset).stem}, {args.split} problem {args.index}" if args.dataset else str(args.prompt)[:80]
    for path, text in ((args.html, lambda: film_page(name, [("", films)])), (args.svg, lambda: film_svg(films))):
        if path is not None:
            path.write_text(valid_unicode(text()), encoding="utf-8")
            sys.stderr.write(f"Written: {path}\n")
