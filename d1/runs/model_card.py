"""The model card of a run, README.md in its folder: how the model was made and how to load it.

It is made from the folder's `run.json`. It shows only the last part of a local path.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from d1.runs.fingerprint import of_setting
from d1.show.tables import markdown_table
from d1.tasks import TASKS, load_task

OPENING = "A masked diffusion language model, post-trained with d1."
# A stage's tag -> a setting by which it is known: the first of these that a run has.
STAGES = {"diffu-grpo": "dataset", "distillation": "keep", "preference": "method", "sft": "model_name"}
CARD = """---
{metadata}
---

# {title}

{opening}

{made_of}
Every setting is in `run.json`, every logged number in `metrics.jsonl`.

## How to load it

With the library d1 {version}, an independent rewrite of the code of [d1](https://arxiv.org/abs/2504.12216):

```bash
{install}
```

The name of the model is a folder or a name on the hub. No remote code is run.

```python
from d1.models import load_model, load_tokenizer

model, tokenizer = {loaded}, load_tokenizer("{name}")
```

```bash
python -m d1 chat {name}
```
"""


def write_card(folder: Path) -> Path:
    """Write the README.md of a run's folder, replacing an existing one; returns its path."""
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    settings = record["settings"]
    name, adapter = local_name(folder), (folder / "adapter_config.json").is_file()
    stage = next(stage for stage, setting in STAGES.items() if setting in settings)
    rl, distilled = stage == "diffu-grpo", stage == "distillation"
    base, data = str(settings["model_path" if rl else "model_name"]), settings["dataset" if rl else "train_data"]
    method = "masked SFT with LLaDA's loss, arXiv 2502.09992, algorithm 2"
    if settings.get("edit_noise"):
        method += f", and visible tokens to correct (--edit_noise {settings['edit_noise']})"
    if "method" in settings:
        method = f"method {local_name(settings['method'])}: {settings.get('paper', '')}"
        if rl:
            method = f"diffu-GRPO, {method}"
        elif distilled:
            method = f"distillation, {method}, {traces(settings)}"
        else:
            method = f"preferences, {method}, {bounds(settings)}"
    linked = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", method)
    metadata = ModelCardData(
        base_model=hub_origin(base),
        datasets=[data] if not rl and on_hub(data) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["d1", "masked-diffusion", stage],
    )
    made_of = [["base", base_row(base)], ["method", linked], ["data", local_name(data)]]
    if (rl or distilled) and data in TASKS and (judged := getattr(load_task(data), "JUDGED", "")):
        made_of.append(["answers judged by", judged])
    if known := fingerprints(settings):
        made_of.append(["fingerprints (SHA-256)", known])
    made_of += [["held-out result", held_out(folder)], *machine(folder, record)]
    made_of.append(["licence", f"weights: as {local_name(base)} and the data; library: Apache-2.0"])
    version, install = installation()
    text = CARD.format(
        metadata=metadata.to_yaml(),
        title=name.rpartition("/")[2],
        opening=OPENING,
        made_of=markdown_table(["", ""], made_of),
        version=version,
        install=install,
        loaded=f'load_model("{local_name(base)}", adapter="{name}")' if adapter else f'load_model("{name}")',
        name=name,
    )
    ModelCard(text).save(folder / "README.md")
    return folder / "README.md"


def base_row(base: str) -> str:
    """The base's name, and for a local folder the model on the hub that it was made from."""
    if on_hub(base):
        return base
    origin = hub_origin(base)
    made = f"made from {origin}" if origin else "which records no model of the hub that it was made from"
    return f"{local_name(base)}, a local folder, {made}"


def hub_origin(model: str, seen: tuple[str, ...] = ()) -> str | None:
    """The model on the hub that a model was made from, by the records of the local folders between; None if unknown."""
    if on_hub(model) or model in seen:
        return model if on_hub(model) else None
    folder = Path(model).expanduser()
    for file in ("adapter_config.json", "run.json", "config.json"):
        record = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        settings = record.get("settings", record)
        for name in ("base_model_name_or_path", "model_name", "model_path", "_name_or_path"):
            if before := settings.get(name):
                return hub_origin(from_folder(str(before), folder), (*seen, model))
    return None


def from_folder(name: str, folder: Path) -> str:
    """A name that a folder's record gives: as a path, if it was one when the run started above this folder; such a path
    may be gone."""
    first = Path(name).parts[0]
    places = [place for place in (Path(), *folder.resolve().parents) if (place / first).exists()]
    paths = sorted((place.resolve() / name for place in places), key=lambda path: not path.exists())
    return str(paths[0]) if paths else name


def bounds(settings: Mapping[str, Any]) -> str:
    """How a preference run weighed and estimated its ratios."""
    draws = f"{settings['num_views']} draws of {settings['estimator']}{' and their opposites' * settings['antithetic']}"
    return f"beta {settings['beta']}, {draws}"


def traces(settings: Mapping[str, Any]) -> str:
    """What a distillation was trained on."""
    kept = "of right answers" if settings["keep"] == "right" else "of all answers"
    return f"traces of {settings['diffusion_steps']} steps on {settings['max_completion_length']} tokens, {kept}"


def fingerprints(settings: Mapping[str, Any]) -> str:
    """What the run read, by content (`d1.runs.fingerprint`); empty for records of older versions."""
    known = [(name, value) for name, value in settings.items() if of_setting(name) != name]
    return "; ".join(
        f"{name}: {value if isinstance(value, str) else ' '.join(chain(*value.items()))}" for name, value in known
    )


def history(folder: Path) -> list[dict[str, Any]]:
    """The logs of the run, oldest first."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def held_out(folder: Path) -> str:
    """The evaluation of the saved weights on rows that were not trained on: the best of SFT, the last of RL."""
    logs = [log for log in history(folder) if log["step"] > 0]
    evaluations = [log for log in logs if log.get("eval_loss") is not None or "eval_reward" in log]
    if not evaluations:
        return "not measured"
    name = "eval_rewards/accuracy/mean"
    if name in evaluations[-1]:
        return f"accuracy {evaluations[-1][name]:.1%} at step {evaluations[-1]['step']}"
    best = min(evaluations, key=lambda log: log["eval_loss"])
    return f"loss {best['eval_loss']:.4g} at step {best['step']}"


def machine(folder: Path, record: Mapping[str, Any]) -> list[list[str]]:
    """Rows with the hardware and the duration of a run, as far as they are recorded."""
    rows = []
    if "cpu" in record:
        gpus = Counter(record["gpus"])
        cpu = f"{record['cpu']['model']}, {record['cpu']['cores']} cores"
        found = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or cpu
        rows.append(["hardware", f"{found} per machine; processes: {record['processes']}"])
    if seconds := [log["train_runtime"] for log in history(folder) if "train_runtime" in log]:
        since = f", from step {record['resumed_at']} on" if record.get("resumed_at") else ""
        rows.append(["duration", f"{timedelta(seconds=round(seconds[-1]))} (hours:minutes:seconds){since}"])
    return rows


def installation() -> tuple[str, str]:
    """The version of the library, and the command that installs it: from where pip took it, or the project's address.
    A copy that was not installed has no version."""
    by_hand = "pip install -e .  # in a copy of the library's repository"
    try:
        here = distribution("d1")
    except PackageNotFoundError:
        return "", by_hand
    source = json.loads(here.read_text("direct_url.json") or "{}")
    if git := source.get("vcs_info"):
        return here.version, f'pip install "d1 @ {git["vcs"]}+{source["url"]}@{git["commit_id"]}"'
    urls = dict(line.split(", ", 1) for line in here.metadata.get_all("Project-URL") or [])
    address = urls.get("Repository")
    return here.version, f'pip install "d1 @ git+{address}"' if address else by_hand


def has_card(folder: Path) -> bool:
    """Whether the folder's README.md is a card of `write_card`, and not PEFT's or a user's own."""
    path = folder / "README.md"
    return path.is_file() and OPENING in path.read_text()


def local_name(path: str | Path) -> str:
    """The last part of a path, preceded by the run's name for a checkpoint or "merged"; a hub name is unchanged."""
    text, folder = str(path), Path(path).expanduser()
    if not (folder.exists() or text.startswith(("/", ".", "~"))):
        return text
    folder = folder.resolve()
    inside = folder.name.startswith("checkpoint-") or folder.name == "merged"
    return f"{folder.parent.name}/{folder.name}" if inside else folder.name


def on_hub(name: str) -> bool:
    """Whether this is the name of a model or of data on the hub, and not a path."""
    return "/" in name and local_name(name) == name and not Path(name).exists()
