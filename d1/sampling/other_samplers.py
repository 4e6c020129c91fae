"""Samplers whose rows fill their blocks together, instead of by the steps of `loop.py`: one file per noise.

A new one is a function like `scdd_steps`, and a line of `other_sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from d1.models.attention import left_pad
from d1.models.head import NotFiniteError
from d1.models.kinds import has_masks
from d1.sampling.record import Rollout, Step, rollout_of
from d1.sampling.scdd import scdd_steps
from d1.sampling.settings import SamplingSettings
from d1.sampling.uniform import uniform_steps

# Model, prompts and their attention mask, settings, a generator per row, ids of the EOS stop, the mask token or None
StepFunction = Callable[..., Iterator[Step]]


def other_sampler(model_config: Any, settings: SamplingSettings) -> StepFunction | None:
    """The function that fills the canvases; None: the steps of `loop.py` do."""
    if not has_masks(model_config):
        return uniform_steps
    if settings.sampler == "scdd":
        return scdd_steps
    return None


def sampler_name(settings: SamplingSettings) -> str:
    """Of one of these samplers, for a message."""
    if settings.sampler == "scdd":
        return "the sampler scdd"
    return "a model with uniform noise"


def stream_in_batches(
    steps: StepFunction,
    model: Any,
    prompts: Iterable[Any],
    settings: SamplingSettings,
    batch_size: int,
    eos_token_ids: Sequence[int],
    mask_token_id: int | None,
) -> Iterator[tuple[list[int], Rollout]]:
    """`rollout_stream`: `batch_size` prompts after the other. ValueError for a prompt with `stops`."""
    pad_id = mask_token_id
    if pad_id is None:
        pad_id = int(model.config.pad_token_id or 0)
    waiting = enumerate(prompts)
    while True:
        # The next prompts, with their numbers in the stream
        numbers, prompt_ids, generators = [], [], []
        for number, (ids, generator, *stops) in islice(waiting, batch_size):
            if any(stops):
                raise ValueError(f"{sampler_name(settings)} has no stops within a completion, which tools need")
            if generator is None:
                raise ValueError(f"prompt {number} of the stream has no generator, but its settings draw numbers")
            numbers.append(number)
            prompt_ids.append(list(ids))
            generators.append(generator)
        if not numbers:
            return

        # Their rollout
        padded_ids, mask = left_pad(prompt_ids, pad_id)
        padded_ids, mask = padded_ids.to(model.device), mask.to(model.device)
        filling = steps(model, padded_ids, mask, settings, generators, eos_token_ids, mask_token_id)
        try:
            sampled = rollout_of(filling, padded_ids.shape[1])
        except NotFiniteError as error:
            raise NotFiniteError(numbers[error.number], error.why) from error
        yield numbers, sampled
