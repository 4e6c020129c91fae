"""Library warnings that a user of this package cannot act on, silenced one by one."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable

# (raised by, what it says, why it says nothing to a user). Each to delete with the version that no longer says it.
WARNINGS = (
    ("transformers 5.23", "`gradient_checkpointing` is deprecated", "TRL 1.16 sets it by its old name"),
    ("transformers 5.23", "`is_gradient_checkpointing` is deprecated", "TRL 1.16 asks for it by its old name"),
    ("transformers 5.23", "`gradient_checkpointing_enable` is deprecated", "TRL 1.16 calls it by its old name"),
    ("transformers 5.23", "`gradient_checkpointing_disable` is deprecated", "TRL 1.16 calls it by its old name"),
    (
        "peft 0.21",
        "Could not find a config file in",
        "said where an adapter was merged before; no vocabulary grows here",
    ),
)

# (said by, its logger, what it says, why)
MESSAGES = (
    ("deepspeed 0.19", "DeepSpeed", "Setting accelerator to CPU", "said at import, whether it is used or not"),
    ("transformers 5.23", "transformers.trainer_utils", "mtime may not be reliable", "the order is right all the same"),
)


def silence() -> None:
    """Silences the warnings in the tables, without importing the libraries that raise them."""
    for _, text, _ in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(text))
    for _, logger, text, _ in MESSAGES:
        logging.getLogger(logger).addFilter(unless(text))


def unless(text: str) -> Callable[[logging.LogRecord], bool]:
    """A filter of log messages that drops those that start with `text`."""
    return lambda record: not record.getMessage().startswith(text)
