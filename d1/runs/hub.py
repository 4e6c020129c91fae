"""The end of a run: its model card, and the upload of its model to the hub, which fails without harm.

Trainer makes a repository before the first step, so that no run starts without a network, and uploads in the background
from the folder that a checkpoint is written to, which here is renamed at once. So a run uploads when all is saved.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import HubStrategy

from d1.runs.checkpoints import ONLY_TO_RESUME
from d1.runs.entry import one_line
from d1.runs.model_card import has_card, write_card

logger = logging.getLogger(__name__)

# What the folder of a run holds besides the model: its checkpoints, and files that name folders of this machine.
STAYS_HERE = (
    *(*ONLY_TO_RESUME, "checkpoint-*", "_*", ".*", "wandb/*", "completions/*", "merged/*"),
    *("run.json", "trainer_state.json", "training_args.bin"),
)


def hold_push(args: Any) -> bool:
    """Has a Trainer of these `TrainingArguments` not push; returns whether it would have.

    Raises:
        ValueError: the hub takes no such name, or checkpoints are to be pushed.
    """
    if not args.push_to_hub:
        return False
    strategy = HubStrategy(args.hub_strategy).value
    if strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(f"--hub_strategy {strategy}: a run uploads its model, at its end, and no checkpoints")
    try:
        validate_repo_id(repository(args))
    except ValueError as error:
        raise ValueError(f"--hub_model_id: {error}") from error
    args.push_to_hub = False
    return True


def repository(args: Any) -> str:
    """The name to upload to; that of the folder if none is given, as Trainer has it."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


def publish(args: Any, push: bool, started_again: bool = False) -> None:
    """Writes the card of a finished run, and uploads its model if `push`. A failed upload is logged and does no harm.

    Args:
        args: its `TrainingArguments`.
        started_again: it was finished before; a card that it has, with results that were added since, then stays.
    """
    folder, name = str(args.output_dir), repository(args)
    if not (started_again and has_card(folder)):
        write_card(folder, args.hub_model_id)
    if not push:
        return
    try:
        hub = HfApi(token=args.hub_token)
        name = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="A model trained with d1",
            ignore_patterns=[*STAYS_HERE],
            revision=args.hub_revision,
        )
    except Exception as error:  # whatever a network, a proxy or the hub comes up with: the run is done and saved
        logger.error(
            "%s is complete, but was not uploaded to %s: %s. The same command with --resume tries again.",
            *(folder, name, one_line(error).rstrip(".")),
        )
        return
    logger.info("Uploaded to %s", name)
