"""Load the model and the tokenizer that the flags of `chat`, `watch`, `fill` and `serve` name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from d1.ranges import setting
from d1.sampling.settings import GEN_LENGTH, ModelFlags, SamplingFlags, sampling_settings

if TYPE_CHECKING:
    from d1.models.folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class CompletionFlags(SamplingFlags, ModelFlags):
    """Flags of a command that loads a model and samples completions."""


C = TypeVar("C", bound=CompletionFlags)


def model_argument() -> Any:
    """The field `model_path` of a command that takes the model without a flag."""
    return setting(help="folder or hub name of a model, or an adapter's folder", positional=True, metavar="MODEL")


def resolve_canvas(flags: C, folder: ModelFolder, masks_for: str = "") -> C:
    """The flags with a `gen_length`: where none is given, the model's own (`ModelFolder.gen_length`) or 128.

    Raise ValueError, before the weights are read, if a completion leaves no room for a prompt, other flags of sampling
    do not suit the model, or it lacks the mask token that `masks_for` needs."""
    from d1.models.kinds import check_room, require_masks
    from d1.sampling.graphs import check_compile

    config = folder.config
    check_compile(flags.compile, config, kernel=flags.attn_implementation)
    if masks_for:
        require_masks(config, masks_for)
    if flags.gen_length is None:
        flags = replace(flags, gen_length=folder.gen_length or GEN_LENGTH)
    check_room(config, 1, sampling_settings(flags, config).gen_length, ": lower --gen_length")
    return flags


def model_of(flags: ModelFlags, folder: ModelFolder, load: Callable[..., Any] | None = None) -> Any:
    """The model in a folder that was read, with its adapter, loaded by `load` (default: `load_on_device`)."""
    from d1.models.load import load_on_device
    from d1.models.memory import check_memory
    from d1.sampling.graphs import set_compile

    check_memory(folder, flags.dtype)
    load = load or load_on_device
    model = load(folder, flags.dtype, attn_implementation=flags.attn_implementation)
    return set_compile(model, flags.compile)
