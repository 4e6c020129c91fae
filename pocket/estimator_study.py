"""What each estimator of log-probabilities does to the policy gradient of pocket models, by its number of views.

    python pocket/estimator_study.py                  # half an hour on one core; docs/estimators.md and its figure
    python pocket/estimator_study.py --models runs/demo/seed0/sft_grpo --output_dir runs/estimators_of_mine
    python pocket/estimator_study.py --only_report    # the tables of what is there

Models: each task's base, and SFT of it. Every figure is a line of `results.jsonl` in the output folder. Killed? The
same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from board_plan import ROOT, TASKS
from completions import sample_rows, texts_of
from demo import sft
from estimator_measures import CHOICES, Case, Target, long_run, measure
from json_lines import append_line, read_lines
from pages import reading
from phases import run_phases
from rich.console import Console
from safetensors.torch import load_file, save_file

from d1.models import load_model, load_tokenizer
from d1.runs.entry import OneLineParser, run_script
from d1.runs.record import run_record
from d1.show.curves import panels, save_figure
from d1.show.tables import markdown_table
from d1.tasks import load_task

RESULTS = "results.jsonl"
DOCUMENT = ROOT / "docs" / "estimators.md"
COLUMNS = {  # of the figure: title, and a result's value
    "deviation of a value, nats a token": lambda line: line["deviation"],
    "signal to noise, for a rollout's tokens": lambda line: signal_to_noise(line),
    "cosine to the bound's gradient": lambda line: line["cosine_to_bound"],
    "cosine to the trajectory's gradient": lambda line: line["cosine_to_trajectory"],
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["sudoku"], choices=[*TASKS])
    parser.add_argument("--models", nargs="+", type=Path, help="folders of one task's models; default: base and SFT")
    parser.add_argument("--groups", type=int, default=16, help="problems, with --group completions each")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--draws", type=int, default=4, help="of each estimator's views")
    parser.add_argument("--relative_error", type=float, default=0.01, help="of the any-order bound")
    parser.add_argument("--gradient_draws", type=int, default=8, help="of 32 views each, for the bound's gradient")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "estimators")
    parser.add_argument("--document", type=Path, help="default: docs/estimators.md; with --models in the output folder")
    parser.add_argument("--only_report", action="store_true", help="measure nothing, write what is there")
    return parser


def models_of(args: argparse.Namespace, task: str, console: Console) -> dict[str, Path]:
    """The models by their names in the tables; SFT is made where it is not there yet."""
    if args.models:
        return {f"{task}: {path.name}": path for path in args.models}
    folder = args.output_dir / task
    run_phases([sft(folder, 0, miniature=False, task=task)], folder, 1, console)
    return {f"{task}: base": ROOT / "pocket" / TASKS[task].base, f"{task}: SFT": folder / "sft"}


def advantages_of(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """(rows,) reward less its group's mean, as d1 has it. Where all rewards of all groups are alike, as those of an
    untrained model, every other completion counts as good."""
    centred = rewards.view(-1, group) - rewards.view(-1, group).mean(-1, keepdim=True)
    if not centred.any():
        centred = 0.5 - (torch.arange(group) % 2).float().expand_as(centred)
    return centred.flatten()


def make_case(task: str, path: Path, groups: int, group: int) -> Case:
    """Completions of training problems, as RL samples them, with their advantages."""
    module, length = load_task(TASKS[task].dataset), TASKS[task].length
    rows = [row for row in module.load_rows("train").select(range(groups)) for _ in range(group)]
    model, tokenizer = load_model(str(path)), load_tokenizer(str(path))
    sampled = sample_rows(model, tokenizer, [row["prompt"] for row in rows], length, seed=0)
    columns = {name: [row[name] for row in rows] for name in ("question", "ground_truth")}
    texts = texts_of(sampled, tokenizer)
    rewards = sum(torch.tensor(reward(texts, **columns)) for reward in module.REWARDS)
    return Case(model, sampled, advantages_of(torch.as_tensor(rewards), group), group, tokenizer.mask_token_id)


def target_of(case: Case, args: argparse.Namespace, file: Path) -> Target:
    """The long run, kept in a file, since it takes the most time."""
    if not file.exists():
        found = long_run(case, args.relative_error, gradient_draws=args.gradient_draws)
        tensors = {name: torch.as_tensor(value).contiguous() for name, value in found._asdict().items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(file)
    values: dict[str, Any] = {name: v if v.dim() else v.item() for name, v in load_file(file).items()}
    return Target(**values)


def identity(args: argparse.Namespace, name: str, path: Path) -> dict[str, Any]:
    """What a model's results are results of."""
    return {"model": name, "path": str(path)} | {key: getattr(args, key) for key in ("groups", "group", "draws")}


def study(args: argparse.Namespace, task: str, name: str, path: Path, console: Console) -> None:
    """Measures what is not there yet of one model."""
    of, file = identity(args, name, path), args.output_dir / RESULTS
    done = {(line["name"], line["views"]) for line in read_lines(file) if line["of"] == of}
    missing = [choice for choice in CHOICES if (choice.name, choice.views) not in done]
    if not missing:
        return
    case = make_case(task, path, args.groups, args.group)
    stem = "_".join([name.replace(": ", "_"), str(args.groups), str(args.group), str(args.gradient_draws)])
    target = target_of(case, args, args.output_dir / f"{stem}.safetensors")
    prompts = case.sampled.attention_mask.sum(-1).float().mean().item()
    common = {
        "of": of,
        "tokens_of_rollout": case.steps * (prompts + case.sampled.gen_length),
        "bound": target.bound.mean().item(),
        "trajectory": target.trajectory.mean().item(),
        "bound_error": target.bound_error,
        "gradient_error": target.gradient_error,
        "record": run_record(),
    }
    for choice in missing:
        console.print(f"{name}: {choice.name}, {choice.views} views")
        found = measure(case, choice, target, args.draws)
        append_line(file, {"name": choice.name, "views": choice.views, **found, **common})


def signal_to_noise(line: dict[str, Any]) -> float | None:
    """Of the gradient on the completions at hand: its square over the variance that the draw of views gives it, of as
    many draws as the tokens of one rollout buy. None where nothing is drawn."""
    if not line["within"]:
        return None
    draws = line["tokens_of_rollout"] / line["tokens_of_update"]
    return max(0.0, line["signal"]) / (line["within"] / line["of"]["groups"]) * draws


def share_of_views(line: dict[str, Any]) -> float:
    """Of that variance, what the draw of views adds."""
    return line["within"] / (line["between"] + line["within"])


def table(lines: list[dict[str, Any]]) -> str:
    """One row a choice."""
    rows = [
        [
            line["name"],
            str(line["views"]),
            f"{line['tokens_of_update'] / line['tokens_of_rollout']:.2f}",
            f"{line['bias_to_bound']:+.3f}",
            f"{line['bias_to_trajectory']:+.3f}",
            f"{line['deviation']:.3f}",
            two_digits(signal_to_noise(line)),
            f"{100 * share_of_views(line):.0f}%",
            *(two_digits(line[f"{kind}cosine_to_{to}"]) for to in ("bound", "trajectory") for kind in ("", "long_")),
        ]
        for line in lines
    ]
    header = ["estimator", "views", "update / rollout", "bias to bound", "to trajectory", "deviation", "SNR"]
    header += ["of views", "cosine to bound", "in the mean", "to trajectory", "in the mean"]
    return markdown_table(header, rows)


def two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(by_model: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A row a model, a column for each of `COLUMNS`, against views; a line or a point an estimator."""
    figure, axes = panels(len(by_model), len(COLUMNS), size=(4 * len(COLUMNS), 3.4 * len(by_model)))
    places = iter(axes)
    names = [*dict.fromkeys(choice.name for choice in CHOICES)]
    for model, lines in by_model.items():
        for title, value in COLUMNS.items():
            axis = next(places)
            for number, name in enumerate(names):
                found = ((line["views"], value(line)) for line in lines if line["name"] == name)
                own = sorted(pair for pair in found if pair[1] is not None)
                marker = "os^Dv<>Pp*Xh"[number % 12]
                axis.plot(*zip(*own, strict=True), marker=marker, color=f"C{number % 10}", label=name) if own else None
            axis.set(title=f"{model}\n{title}", xlabel="views", xscale="log")
            axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes[0].legend(fontsize=6)
    save_figure(figure, path)


def write_report(lines: list[dict[str, Any]], path: Path) -> str:
    """The page and the figure beside it."""
    order = {(choice.name, choice.views): place for place, choice in enumerate(CHOICES)}
    by_model: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: order[line["name"], line["views"]]):
        by_model.setdefault(line["of"]["model"], []).append(line)
    if not by_model:
        return "Nothing has been measured yet."
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = path.with_suffix(".png")
    draw(by_model, figure)
    text = PAGE.format(figure=figure.name, reading=reading(path))
    for model, own in sorted(by_model.items()):
        text += heading(model, own) + table(own) + "\n"
    path.write_text(text.rstrip() + "\n")
    return f"Tables: {path}"


def heading(model: str, lines: list[dict[str, Any]]) -> str:
    first, of = lines[0], lines[0]["of"]
    partial = "" if len(lines) == len(CHOICES) else f" **Partial: {len(lines)} of {len(CHOICES)} rows.**"
    errors = f"relative error {100 * first['bound_error']:.2f}%, of its gradient {100 * first['gradient_error']:.1f}%"
    return (
        f"## {model}\n\n{of['groups']} training problems with {of['group']} completions each.{partial} The any-order "
        f"bound is {first['bound']:.3f} nats a token ({errors}), the sampler's own trajectory "
        f"{first['trajectory']:.3f}; a rollout feeds {first['tokens_of_rollout']:.0f} tokens a completion.\n\n"
    )


PAGE = """# Which estimator of log-probabilities, with how many views?

Written by `python pocket/estimator_study.py`. For completions that a pocket model sampled as RL does, every estimator
of `d1/scoring/` is held against two values of log p: the any-order bound, by many draws, and the sampler's own
trajectory, which replay of every step gives exactly.

{reading}

![Deviation, signal to noise and cosines against views]({figure})

- update / rollout: tokens of one update, backward counted twice, over those of the rollout it is made on.
- bias: mean value less the bound's, and less the trajectory's, nats a token. `coupled` is divided by its 1.5.
- deviation: of a completion's value between draws, nats a token.
- SNR: square of the policy gradient on these completions over the variance that the draw of views gives it, for as many
  draws as the tokens of one rollout buy. Empty where nothing is drawn: there is bias alone.
- of views: the share of the variance of one group's gradient that the draw of views makes; the rest is between groups.
- cosine: of the gradient on these completions from one draw, and from all draws with their noise taken out, to those
  of the bound and of the trajectory. Empty where noise is most of the mean of all draws.

"""


def main(args: argparse.Namespace) -> None:
    if args.groups < 2 or args.group < 2 or args.draws < 2:
        raise ValueError("--groups, --group and --draws must be at least 2: there is no variance of one")
    if args.models and len(args.tasks) > 1:
        raise ValueError("--models are models of one task: name it with --tasks")
    console = Console()
    args.output_dir = args.output_dir.resolve()
    path = args.document or (args.output_dir / "estimators.md" if args.models else DOCUMENT)
    if not args.only_report:
        for task in args.tasks:
            for name, model in models_of(args, task, console).items():
                study(args, task, name, model, console)
    latest = {
        (line["of"]["model"], line["name"], line["views"]): line for line in read_lines(args.output_dir / RESULTS)
    }
    console.print(write_report([*latest.values()], path.resolve()), markup=False)


if __name__ == "__main__":
    run_script("estimator_study.py", lambda: main(make_parser().parse_args()))
