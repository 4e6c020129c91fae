"""The model card of a run, README.md in its folder: how the model was made and how to load it.

It is made of the folder's `run.json`, and shows only the last name of a local path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from d1.runs.console import METRICS_FILE
from d1.show.tables import markdown_table

OPENING = "A masked diffusion language model, post-trained with d1."
SFT = "masked SFT with LLaDA's loss, arXiv 2502.09992, algorithm 2"
HOW_TO_LOAD = """## How to load it

A folder or a name on the hub, with [d1](https://arxiv.org/abs/2504.12216)'s library; no remote code is run.

```python
from d1.models import load_model, load_tokenizer

model, tokenizer = {loaded}, load_tokenizer("{name}")
```

```bash
python -m d1 chat {name}
```
"""


def write_card(folder: Path) -> Path:
    """Writes the README.md of a run's folder, over the one that is there; returns its path."""
    record = json.loads((folder / "run.json").read_text())
    settings, name = record["settings"], local_name(folder)
    rl, adapter = "method" in settings, (folder / "adapter_config.json").is_file()
    base = str(settings["model_path" if rl else "model_name"])
    changed = [[f"--{setting}", code(value)] for setting, value in sorted(settings.get("changed", {}).items())]
    changed_on_resume = [
        [f"--{setting}", *map(code, values), str(change["step"])]
        for change in record.get("changes", [])
        for setting, values in change.items()
        if setting != "step"
    ]
    loaded = f'load_model("{local_name(base)}", adapter="{name}")' if adapter else f'load_model("{name}")'
    parts = [
        f"---\n{metadata(settings, base, rl, adapter).to_yaml()}\n---\n",
        f"# {name.rpartition('/')[2]}\n\n{OPENING}\n",
        table(["", ""], made_of(settings, base)),
        "## Settings that differ from the defaults\n",
        table(["setting", "value"], changed) or "None.\n",
        table(["setting changed on a resume", "before", "after", "from step"], changed_on_resume),
        f"Every logged number is in `{METRICS_FILE}`.\n",
        HOW_TO_LOAD.format(loaded=loaded, name=name),
    ]
    ModelCard("\n".join(filter(None, parts))).save(folder / "README.md")
    return folder / "README.md"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, rows) if rows else ""


def has_card(folder: Path) -> bool:
    """Whether the folder's README.md is a card of `write_card`, and not PEFT's or a user's own."""
    path = folder / "README.md"
    return path.is_file() and OPENING in path.read_text()


def local_name(path: str | Path) -> str:
    """The last name of a path, after the run's for a checkpoint or "merged"; a hub name stays as it is."""
    text, folder = str(path), Path(path).expanduser()
    if not (folder.exists() or text.startswith(("/", ".", "~"))):
        return text
    folder = folder.resolve()
    inside = folder.name.startswith("checkpoint-") or folder.name == "merged"
    return f"{folder.parent.name}/{folder.name}" if inside else folder.name


def made_of(settings: Mapping[str, Any], base: str) -> list[list[str]]:
    """Base, method and data of a run."""
    method, data = linked(SFT), code(settings.get("train_data"))
    if "method" in settings:
        used = settings["method"]
        method = code(used) if used.endswith(".py") else f"diffu-GRPO, `{used}`: {linked(settings['paper'])}"
        data = "task " + ", ".join(code(one) for one in (settings["dataset"], settings["data_file"]) if one)
    return [["base", code(local_name(base))], ["method", method], ["data", data]]


def linked(paper: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def code(value: Any) -> str:
    """A setting's value, in a cell of a table."""
    values = value if isinstance(value, (list, tuple)) else [value]
    text = " ".join(local_name(one) if isinstance(one, str) else str(one) for one in values)
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


def metadata(settings: Mapping[str, Any], base: str, rl: bool, adapter: bool) -> ModelCardData:
    """What the hub reads of a card: a base or data that lie on this machine alone are left out."""
    data = settings.get("train_data")
    return ModelCardData(
        base_model=base if on_hub(base) else None,
        datasets=[data] if data and on_hub(data) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["d1", "masked-diffusion", "diffu-grpo" if rl else "sft"],
    )


def on_hub(name: str) -> bool:
    """Whether this is the name of a model or of data on the hub, and not a path."""
    return "/" in name and local_name(name) == name and not Path(name).exists()
