"""What a run says about itself: the fingerprints of what it reads, `run.json`, and the model card. Imports no torch.

A path says where something was, a fingerprint what it was (`d1/models/fingerprints.py`): a model, an adapter and a
tokenizer, the values of rows, and files of data and code. A user's `.py` file counts with the local files that its
`import` statements name. Not covered: other files that it reads, which count by the rows that they make, and the
versions of libraries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from d1.files import read_object, write_atomically
from d1.lazy import local_imports
from d1.models.fingerprints import CONTENTS as CONTENTS
from d1.models.fingerprints import DIGITS, MODEL_SETTINGS
from d1.models.fingerprints import RECORD as RECORD
from d1.models.fingerprints import TOKENIZER_FILES as TOKENIZER_FILES
from d1.models.fingerprints import hash_file as hash_file
from d1.models.fingerprints import hash_folder as hash_folder
from d1.models.fingerprints import hash_model as hash_model
from d1.models.fingerprints import hash_values as hash_values
from d1.models.fingerprints import model_files as model_files

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# --- Fingerprints -----------------------------------------------------------------------------------------------------

# + a setting's name: the name of its fingerprint in a record
IMPORTS, ROWS = "imports of ", "rows of "
FILES = (".py", ".json", ".jsonl", ".parquet", ".csv")  # of code and data


def setting_name(name: str) -> str:
    """The name of the setting that a fingerprint in a record belongs to; other names are unchanged."""
    return name.removeprefix(CONTENTS).removeprefix(IMPORTS).removeprefix(ROWS)


def hash_rows(rows: Dataset) -> str:
    """The fingerprint of the names and values of all columns, in the order of the rows."""
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(1000):
        digest.update(json.dumps(batch, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def hash_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints of the model and of the files of code and data that a run's settings name, by
    `contents of SETTING`, and those of the local files that its code imports, by `imports of SETTING`. Those of a list
    of paths are in the list's order."""
    fingerprints: dict[str, Any] = {}
    for name, value in settings.items():
        if name in MODEL_SETTINGS and value:
            fingerprints[CONTENTS + name] = hash_model(str(value))
            continue
        files = files_in(value)
        if files:
            contents = [hash_file(file) for file in files]
            fingerprints[CONTENTS + name] = contents if isinstance(value, list | tuple) else contents[0]
        imports = []
        for file in files:
            if file.suffix == ".py":
                imports += [hash_file(imported) for imported in local_imports(file)]
        if imports:
            fingerprints[IMPORTS + name] = hash_values(imports)
    return fingerprints


def files_in(value: Any) -> list[Path]:
    """The files of code and data that a setting names: a path, FILE.py:FUNCTION, or a list of them."""
    if isinstance(value, list | tuple):
        files = []
        for part in value:
            files += files_in(part)
        return files
    if not isinstance(value, str):
        return []
    path = value
    if not path.endswith(FILES):  # FILE.py:FUNCTION
        path = value.rpartition(":")[0]
    if path.endswith(FILES) and Path(path).is_file():
        return [Path(path)]
    return []


# --- run.json ---------------------------------------------------------------------------------------------------------

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")


@dataclass(frozen=True)
class RunHistory:
    """A resumed run up to the step of its checkpoint: its settings, without nesting, and how they had changed; and the
    machine that it ran on."""

    step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Mapping[str, Any]] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)  # as `machine_facts` returns them


@dataclass(frozen=True)
class OnResume:
    """What a resume may change in the settings of a stage. A setting in neither table may change; the record
    then notes the change. A setting's fingerprint (`contents of SETTING`, `imports of SETTING`, `rows of SETTING`) may
    change if it may."""

    fixed: Mapping[str, Callable[[Any], Any]]  # what must stay of a setting: all (`identity`), or whether it is 0
    free: Sequence[str]  # patterns of names that do not affect the model (output, logging, speed), and are not noted

    def changes(self, history: RunHistory, settings: Mapping[str, Any], folder: Path) -> dict[str, list[Any]]:
        """The settings that a resume changes, without free ones: {name: [before, now]}. ValueError for fixed ones."""
        before = history.settings
        now = flatten_settings(settings)
        changed = {}
        for name, value in now.items():
            if name in before and before[name] != value:
                changed[name] = [before[name], value]

        refused = []
        for setting, fixed_part in self.fixed.items():
            for name in (setting, CONTENTS + setting, IMPORTS + setting, ROWS + setting):
                if name in changed:
                    old, new = changed[name]
                    if fixed_part(old) != fixed_part(new):
                        refused.append(f"{name} {old} instead of {new}")
        if refused:
            todo = "continue it with its own settings and files, or choose another output_dir"
            raise ValueError(f"{folder} holds a run with {', '.join(refused)}: {todo}")

        noted = {}
        for name, values in changed.items():
            is_free = any(fnmatch(setting_name(name), pattern) for pattern in self.free)
            if name in self.fixed or not is_free:
                noted[name] = values
        return noted


def identity(value: Any) -> Any:
    """The value, for settings of which everything must stay."""
    return value


def cpu_model() -> str:
    """The processor's name, such as "AMD EPYC 7763 64-Core Processor", or its architecture if the name is unknown."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        match = re.search(r"^model name\s*:\s*(.*\S)", file.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def run_record() -> dict[str, Any]:
    """Versions and hardware, to be saved with results."""
    import torch  # imported late, because `eval.py --help` imports this module

    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES if find_spec(name)},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpu": {"machine": platform.machine(), "model": cpu_model(), "cores": os.cpu_count()},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def machine_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Versions and hardware in a `run_record()`, without nesting: `version of LIBRARY`, `python`, `gpus` and `cpu`. The
    number of processes is a setting."""
    facts = {f"version of {name}": number for name, number in record.get("versions", {}).items()}
    for name in ("python", "gpus", "cpu"):
        if name in record:
            facts[name] = record[name]
    return facts


def save_record(
    folder: Path, settings: Mapping[str, Any], history: RunHistory, changed: Mapping[str, list[Any]]
) -> None:
    """Write `run.json`: the resolved settings of a run, `run_record()`, and what a resume changed, which is logged:
    settings, versions and hardware."""
    machine = run_record()
    all_changed = dict(changed)
    for name, value in machine_facts(machine).items():
        if history.machine.get(name, value) != value:
            all_changed[name] = [history.machine[name], value]
    for name, (old, new) in all_changed.items():
        label = name
        if name in changed and setting_name(name) == name:  # no fingerprint
            label = f"--{name}"
        logger.warning("From step %d on, %s is %s (before: %s).", history.step, label, new, old)
    changes = list(history.changes)
    if all_changed:
        changes.append({"step": history.step, **all_changed})
    record = {"settings": settings, "changes": changes, "resumed_at": history.step, **machine}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps(record, indent=1, default=str) + "\n")


def read_history(checkpoint: Path | None) -> RunHistory:
    """The history of a checkpoint, from the run.json in it, or next to it for one of version 0.3 or before (without
    settings if there is none), or of a finished run, from the one in its folder. Changes after the checkpoint do not
    count: a run may continue from an earlier checkpoint than its last. ValueError if the file is damaged."""
    if checkpoint is None:
        return RunHistory()
    from d1.runs.checkpoints import check_record, read_state  # imported late: `eval.py --help` needs no Transformers

    check_record(checkpoint)
    file = checkpoint / RECORD
    if not file.is_file():
        file = checkpoint.parent / RECORD
    step = read_state(checkpoint).global_step
    if not file.is_file():
        return RunHistory(step)
    record = read_object(file, "delete it to continue without a record")
    settings = flatten_settings(record["settings"])
    machine = machine_facts(record)
    earlier_changes: list[Mapping[str, Any]] = []
    # Take back the later changes, the last one first.
    for change in reversed(record["changes"]):
        if change["step"] < step:
            earlier_changes.insert(0, change)
            continue
        for name, values in change.items():
            if name != "step":
                old, _ = values
                facts = machine if name in machine else settings
                facts[name] = old
    return RunHistory(step, settings, earlier_changes, machine)


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the types of JSON; those under "model" move to the top level."""
    flat = json.loads(json.dumps(settings, default=str))
    model_settings = flat.pop("model", None)
    if model_settings:
        flat.update(model_settings)
    return flat  # type: ignore[no-any-return]


# --- The model card: README.md in a run's folder, made from its `run.json` --------------------------------------------

SIGN = "diffusion language model, post-trained with d1."  # by which the cards of this library are known
CARD = """---
{metadata}
---

# {name}

A {sign} Every setting and the machine are in `run.json`, every logged number in `metrics.jsonl`.

| | |
| --- | --- |
| base | {base} |
| method | {method} |
| data | {data} |
| licence | weights: as the base and the data; library: Apache-2.0 |

## How to load it

{sampling} Use the library d1, an independent rewrite of the code of [d1](https://arxiv.org/abs/2504.12216):

```bash
pip install -e .  # in a copy of the library's repository
python -m d1 chat {name}
```

```python
from d1.models import load_model, load_tokenizer

model, tokenizer = {loaded}, load_tokenizer("{name}")
```
"""
SFT = "masked SFT with LLaDA's loss, arXiv 2502.09992, algorithm 2"
CAUSAL_SFT = (
    f"{SFT}, x {{masked_weight}}, after a causal context, whose next tokens have the cross-entropy x {{causal_weight}}"
)
UNIFORM_SFT = "SFT with uniform noise, the loss of TRL's sft_diffusion_gemma.py"
MASK_SAMPLING = "It fills in mask tokens; the `generate` of Transformers, which writes from left to right, refuses it."
UNIFORM_SAMPLING = "It starts from random tokens, and replaces those of one canvas after the other."
STAGES = {  # a setting that no stage below has -> the tag of the stage, and how it trains; the first that is set counts
    "dataset": ("diffu-grpo", "diffu-GRPO, method {method}: {paper}"),
    "keep": ("distillation", "distillation, method {method}: {paper}"),
    "method": ("preference", "preferences, method {method}: {paper}"),
    "uniform_noise": ("sft", UNIFORM_SFT),
    "causal_context": ("sft", CAUSAL_SFT),
    "edit_noise": ("sft", f"{SFT}, and visible tokens to correct (--edit_noise {{edit_noise}})"),
    "noise": ("sft", "SFT with masks and uniform ids (--noise {noise}), openreview.net/forum?id=zQKlzKB6I9"),
    "model_name": ("sft", SFT),
}


def write_card(folder: Path) -> None:
    """Write the README.md of a run's folder, replacing an existing one. It shows only the last part of a local path."""
    settings = json.loads((folder / RECORD).read_text())["settings"]
    name = local_name(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    tag, how = next(stage for setting, stage in STAGES.items() if settings.get(setting))

    base = str(settings.get("model_path") or settings["model_name"])
    base_name = local_name(base)
    origin = hub_origin(base)
    base_cell = base_name
    if origin not in (None, base):
        base_cell = f"{base_name}, made from {origin}"

    data = settings.get("dataset") or settings["train_data"]
    method = how.format_map({"paper": "", **settings, "method": local_name(settings.get("method") or "")})
    method = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", method)
    sampling, noise = MASK_SAMPLING, "masked-diffusion"
    if settings.get("uniform_noise"):
        sampling, noise = UNIFORM_SAMPLING, "discrete-diffusion"
    load_call = f'load_model("{name}")'
    if is_adapter:
        load_call = f'load_model("{base_name}", adapter="{name}")'
    metadata = ModelCardData(
        base_model=origin,
        datasets=[data] if on_hub(data) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["d1", noise, tag],
    )
    card = CARD.format(
        metadata=metadata.to_yaml(),
        sign=SIGN,
        base=base_cell,
        method=method,
        data=local_name(data),
        sampling=sampling,
        loaded=load_call,
        name=name,
    )
    (folder / "README.md").write_text(card)


def hub_origin(model: str, max_folders: int = 20) -> str | None:
    """The model on the hub that a model was made from, by the records of at most `max_folders` folders between; or
    None."""
    if on_hub(model):
        return model
    if not max_folders:  # records may form a circle
        return None
    base = read_base(Path(model).expanduser())
    if base is None:
        return None

    # A path, maybe of a folder that is gone, if the run was started in a folder above; else a name on the hub.
    paths = []
    for top in (Path.cwd(), *Path(model).expanduser().resolve().parents):
        if (top / Path(base).parts[0]).exists():
            paths.append(top / base)
    existing = [path for path in paths if path.exists()]
    if existing:
        base = str(existing[0])
    elif paths:
        base = str(paths[0])
    return hub_origin(base, max_folders - 1)


def read_base(folder: Path) -> str | None:
    """The model that the one in a folder was made from, by the first of the folder's files that names it."""
    for file_name in ("adapter_config.json", RECORD, "config.json"):
        if (folder / file_name).is_file():
            record = json.loads((folder / file_name).read_text())
            settings = record.get("settings", record)
            for setting in ("base_model_name_or_path", "model_name", "model_path", "_name_or_path"):
                if settings.get(setting):
                    return str(settings[setting])
    return None


def local_name(path: str | Path) -> str:
    """The last part of a path, preceded by the run's name for a checkpoint or "merged"; a hub name is unchanged."""
    folder = Path(path).expanduser()
    if not (folder.exists() or str(path).startswith(("/", ".", "~"))):
        return str(path)
    *_, parent, name = folder.resolve().parts
    if name == "merged" or name.startswith("checkpoint-"):
        return f"{parent}/{name}"
    return name


def on_hub(name: str) -> bool:
    """Whether this is the name of a model or of data on the hub, and not a path."""
    return "/" in name and local_name(name) == name and not Path(name).exists()
