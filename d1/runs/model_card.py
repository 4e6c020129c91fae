"""The model card of a run, README.md in its folder: how the model was made and how to load it.

It is made from the folder's `run.json`. Of a local path, it shows only the last part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from d1.show.tables import markdown_table
from d1.tasks import TASKS, load_task

OPENING = "A masked diffusion language model, post-trained with d1."
CARD = """---
{metadata}
---

# {title}

{opening}

{made_of}
Every setting is in `run.json`, every logged number in `metrics.jsonl`.

## How to load it

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
    """Write the README.md of a run's folder, replacing an existing one; returns its path."""
    settings: dict[str, Any] = json.loads((folder / "run.json").read_text())["settings"]
    name, rl, adapter = local_name(folder), "dataset" in settings, (folder / "adapter_config.json").is_file()
    base, data = str(settings["model_path" if rl else "model_name"]), settings["dataset" if rl else "train_data"]
    method = "masked SFT with LLaDA's loss, arXiv 2502.09992, algorithm 2"
    if settings.get("edit_noise"):
        method += f", and visible tokens to correct (--edit_noise {settings['edit_noise']})"
    if "method" in settings:
        method = f"method {local_name(settings['method'])}: {settings.get('paper', '')}"
        method = f"diffu-GRPO, {method}" if rl else f"preferences, {method}, {bounds(settings)}"
    linked = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", method)
    metadata = ModelCardData(
        base_model=base if on_hub(base) else None,
        datasets=[data] if not rl and on_hub(data) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["d1", "masked-diffusion", "diffu-grpo" if rl else "preference" if "method" in settings else "sft"],
    )
    made_of = [["base", local_name(base)], ["method", linked], ["data", local_name(data)]]
    if rl and data in TASKS and (judged := getattr(load_task(data), "JUDGED", "")):
        made_of.append(["answers judged by", judged])
    text = CARD.format(
        metadata=metadata.to_yaml(),
        title=name.rpartition("/")[2],
        opening=OPENING,
        made_of=markdown_table(["", ""], made_of),
        loaded=f'load_model("{local_name(base)}", adapter="{name}")' if adapter else f'load_model("{name}")',
        name=name,
    )
    ModelCard(text).save(folder / "README.md")
    return folder / "README.md"


def bounds(settings: Mapping[str, Any]) -> str:
    """How a preference run weighed and estimated its ratios."""
    draws = f"{settings['num_views']} draws of {settings['estimator']}{' and their opposites' * settings['antithetic']}"
    return f"beta {settings['beta']}, {draws}"


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
