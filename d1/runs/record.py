"""What a run leaves behind about itself: settings, versions, hardware."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")


def log_without_account(folder: str | Path) -> None:
    """Weights & Biases logs to local files where no account is set up or its server cannot be reached."""
    import wandb

    os.environ.setdefault("WANDB_DIR", str(folder))
    if "WANDB_MODE" in os.environ:
        return
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        socket.create_connection((server.hostname, server.port or 443), timeout=5).close()
        online = wandb.login(prompt=False)
    except OSError:
        online = False
    if not online:
        os.environ["WANDB_MODE"] = "offline"


def cpu_model() -> str:
    """As the system names it: "AMD EPYC 7763 64-Core Processor"; only the kind where it gives no name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def run_record() -> dict[str, Any]:
    """Versions and hardware, to be saved beside results."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    import torch  # only now: `eval.py --help` reads this module

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "versions": versions,
        "gpus": gpus,
        "cpu": {"machine": platform.machine(), "model": cpu_model(), "cores": os.cpu_count()},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def save_record(output_dir: str, name: str, settings: dict[str, Any]) -> Path:
    """Writes `output_dir/name` with the resolved settings of a run and `run_record()`."""
    path = Path(output_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings} | run_record(), indent=1, default=str) + "\n")
    return path


def changed(settings: Mapping[str, Any], defaults: Mapping[str, Any], leave_out: Collection[str]) -> dict[str, Any]:
    """The settings that differ from their defaults, save those to leave out."""
    kept = {name: value for name, value in settings.items() if name not in leave_out}
    return {name: value for name, value in kept.items() if value != defaults.get(name, value)}
