"""The model card of a run, README.md in its folder: how the model was made, what it reaches, and how to load it.

It is made of what lies in the folder (`run.json`, `trainer_state.json`), so that it can be written again at any time:
`python -m d1 card` adds the results of an evaluation. It shows only the last name of a local path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from d1.models.adapters import adapter_chain
from d1.models.kinds import KINDS, native_config
from d1.runs.console import METRICS_FILE
from d1.show.tables import markdown_table
from d1.show.uncertainty import wilson_interval

OPENING = "A masked diffusion language model, post-trained with d1."
SFT = "masked SFT with LLaDA's loss, arXiv 2502.09992, algorithm 2"
ACCURACY = "eval_rewards/accuracy/mean"
WATCHED = {  # what a card shows of a training log, under which names
    "sft": {"eval_loss": "loss on held-out rows", "train_loss": "mean training loss"},
    "rl": {
        ACCURACY: "accuracy on validation problems, sampled",
        "eval_reward": "reward on validation problems",
        "reward": "reward in training",
    },
}


def write_card(folder: str | Path, name: str | None = None, results: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Writes the README.md of a run's folder, over the one that is there; returns its path.

    Args:
        name: of the model on the hub; the folder's unless given.
        results: rows that `parse_and_get_acc.py --format json` prints, with accuracies and intervals in percent.

    Raises:
        FileNotFoundError: the folder holds no `run.json`.
        ValueError: `results` are no such rows.
    """
    folder, name = Path(folder), name or local_name(folder)
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} holds no run.json: it is no folder of an SFT or RL run")
    record = json.loads((folder / "run.json").read_text())
    settings = record["settings"]
    base = settings["model_path" if "method" in settings else "model_name"]
    changed = [[f"--{setting}", code(value)] for setting, value in sorted(settings.get("changed", {}).items())]
    changed_on_resume = [
        [f"--{setting}", *map(code, values), str(change["step"])]
        for change in record.get("changes", [])
        for setting, values in change.items()
        if setting != "step"
    ]
    seen = evaluation_table(results), watched_table(folder, settings)
    parts = [
        f"---\n{metadata(folder, settings, base, name, results).to_yaml()}\n---\n",
        f"# {name.rpartition('/')[2]}\n\n{OPENING}\n",
        table(["", ""], made_of(settings, base)),
        "## Settings that differ from the defaults\n",
        table(["setting", "value"], changed) or "None.\n",
        table(["setting changed on a resume", "before", "after", "from step"], changed_on_resume),
        "## Results\n",
        *(seen if any(seen) else ["None were recorded.\n"]),
        how_to_load(folder, name, local_name(base)),
    ]
    path = folder / "README.md"
    ModelCard("\n".join(filter(None, parts))).save(path)
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, rows) if rows else ""


def has_card(folder: str | Path) -> bool:
    """Whether the folder's README.md is a card of `write_card`, and not PEFT's or a user's own."""
    path = Path(folder) / "README.md"
    return path.is_file() and OPENING in path.read_text()


def local_name(path: str | Path) -> str:
    """The last name of a path, after the run's for a checkpoint or "merged"; a hub name stays as it is."""
    text, folder = str(path), Path(path).expanduser()
    if not (folder.exists() or text.startswith(("/", ".", "~"))):
        return text
    folder = folder.resolve()
    inside = folder.name.startswith("checkpoint-") or folder.name == "merged"
    return f"{folder.parent.name}/{folder.name}" if inside else folder.name


def is_local(path: str) -> bool:
    return local_name(path) != path or Path(path).exists()


def made_of(settings: Mapping[str, Any], base: str) -> list[list[str]]:
    """Base, method and data of a run."""
    if "method" not in settings:
        return [["base", code(local_name(base))], ["method", linked(SFT)], ["data", code(settings["train_data"])]]
    method = settings["method"]
    paper = ": " + linked(settings["paper"]) if settings.get("paper") else ""  # a run of version 0.1 has none
    name = code(method) if method.endswith(".py") else f"diffu-GRPO, `{method}`{paper}"
    data = ", ".join(code(one) for one in (settings["dataset"], settings["data_file"]) if one)
    return [["base", code(local_name(base))], ["method", name], ["data", f"task {data}"]]


def linked(paper: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def code(value: Any) -> str:
    """A setting's value, in a cell of a table."""
    values = value if isinstance(value, (list, tuple)) else [value]
    text = " ".join(local_name(one) if isinstance(one, str) else str(one) for one in values)
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


def evaluation_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Accuracies on problems of evaluations."""
    rows = []
    try:
        for row in results:
            interval = f"{row['ci_low']:.1f} to {row['ci_high']:.1f}"
            problems = f"{row['n']}" if row["complete"] else f"{row['n']} (some are missing)"
            rows.append([row["task"], str(row["gen_length"]), f"{row['accuracy']:.1f}", interval, problems])
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no results of `parse_and_get_acc.py --format json`: {error!r}") from error
    header = ["task", "tokens", "accuracy, %", "95% interval", "problems"]
    return table(header, rows)


def watched_table(folder: Path, settings: Mapping[str, Any]) -> str:
    """What the run saw of itself, first and in the end: of the step whose weights were kept, where it kept the best."""
    file, stage = folder / "trainer_state.json", "rl" if "method" in settings else "sft"
    state = json.loads(file.read_text()) if file.is_file() else {"log_history": []}
    best = state.get("best_global_step") if settings.get("load_best_model_at_end", stage == "sft") else None
    problems = settings.get("validation_problems")
    rows = []
    for metric, what in WATCHED[stage].items():
        seen = [log for log in state["log_history"] if isinstance(log.get(metric), (int, float))]
        if seen:
            kept = [log for log in seen if log["step"] == best and metric.startswith("eval_")] or seen
            ends = [f"{shown(metric, log[metric], problems)} (step {log['step']})" for log in (seen[0], kept[-1])]
            rows.append([what, ends[0] if len(seen) > 1 else "", ends[1]])
    header = ["seen in training", "first", "this model"]
    return f"{table(header, rows)}\nEvery logged number: `{METRICS_FILE}`.\n" if rows else ""


def shown(metric: str, value: float, problems: int | None) -> str:
    """A number, an accuracy with its 95% interval (Wilson's) if it is known of how many problems."""
    if metric != ACCURACY:
        return f"{value:.4g}"
    if not problems or not 0 <= value <= 1:
        return f"{value:.1%}"
    low, high = wilson_interval(value, problems)
    return f"{value:.1%}, 95% interval {low:.1%} to {high:.1%} of {problems} problems"


def how_to_load(folder: Path, name: str, base: str) -> str:
    """Code and commands that load the model."""
    adapter = (folder / "adapter_config.json").is_file()
    loaded = f'load_model("{base}", adapter="{name}")' if adapter else f'load_model("{name}")'
    export = after = ""
    if formats := released_formats(folder):
        export = f"python -m d1 export {name} OUT --format {formats[0]}\n"
        whose = "LLaDA's own code" if formats[0] == "llada" else f"its own code ({', '.join(formats)})"
        after = f"\nThe last line writes the weights and the config of the released format, for {whose}"
        after += "; the adapter becomes part of its base.\n" if adapter else ".\n"
    return f"""## How to load it

A folder or a name on the hub, with [d1](https://arxiv.org/abs/2504.12216)'s library; no remote code is run.

```python
from d1.models import load_model, load_tokenizer

model, tokenizer = {loaded}, load_tokenizer("{name}")
```

```bash
python -m d1 chat {name}
{export}```
{after}"""


def released_formats(folder: Path) -> list[str]:
    """Released formats that models of this class were published in; none where the base is not at hand."""
    try:
        config, _ = native_config(adapter_chain(str(folder), None)[0])
    except (ValueError, OSError):
        return []
    return [kind for kind, row in KINDS.items() if row.release and config.model_type in (row.becomes, kind)]


def metadata(
    folder: Path, settings: Mapping[str, Any], base: str, name: str, results: Sequence[Mapping[str, Any]]
) -> ModelCardData:
    """What the hub reads of a card: a base or data that lie on this machine alone are left out."""
    data = settings.get("train_data")
    evaluated = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=f"{row['task']}, {row['gen_length']} tokens",
            metric_type="accuracy",
            metric_value=row["accuracy"],
        )
        for row in results
    ]
    return ModelCardData(
        base_model=base_on_hub(base),
        datasets=[data] if data and not is_local(data) and "/" in data else None,
        library_name="peft" if (folder / "adapter_config.json").is_file() else "transformers",
        pipeline_tag="text-generation",
        tags=["d1", "masked-diffusion", "diffu-grpo" if "method" in settings else "sft"],
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=evaluated or None,
    )


def base_on_hub(base: str) -> str | None:
    """The hub name of what a run started from: its own, or the one that its folder's card names."""
    if not is_local(base):
        return base
    card = Path(base).expanduser() / "README.md"
    if not card.is_file() or not card.read_text().startswith("---\n"):
        return None
    named = ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
    return named if isinstance(named, str) and not named.startswith("/") and not is_local(named) else None
