"""What a model path names: read and checked once, when a command is set up, and then handed down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedConfig

from d1.models.adapters import adapter_chain, check_has_weights
from d1.models.kinds import Kind, default_gen_length, native_config


@dataclass(frozen=True)
class ModelFolder:
    """A model and its adapters, without their weights.

    Attributes:
        path: folder or hub name of a model or of an adapter, as it was given.
        base: folder or hub name of the base model.
        adapters: folders of the adapters, in the order in which they are put on it.
        config: the base model's, as a class of Transformers.
        kind: the entry of `KINDS` for it.
    """

    path: str
    base: str
    adapters: tuple[str, ...]
    config: PreTrainedConfig = field(compare=False)  # the same path has the same config
    kind: Kind = field(compare=False)

    @classmethod
    def read(cls, path: str | Path, adapter: str | Path | Sequence[str | Path] | None = None) -> ModelFolder:
        """The model at `path`, with the given adapters. ValueError or OSError if one is missing or not supported."""
        base, adapters = adapter_chain(str(path), adapter)
        for folder in adapters:
            check_has_weights(folder)
        config, kind = native_config(base)
        return cls(str(path), base, tuple(adapters), config, kind)

    @cached_property
    def gen_length(self) -> int | None:
        """The length of a completion that the model's folder names, if it does (`default_gen_length`)."""
        return default_gen_length(self.base, self.config)
