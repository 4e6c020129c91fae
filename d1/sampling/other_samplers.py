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


def stream_in_batches(
    steps: StepFunction,
    model: Any,
    prompts: Iterable[Any],
    settings: SamplingSettings,
    batch_size: int,
    ends: Sequence[int],
    mask_token_id: int | None,
) -> Iterator[tuple[list[int], Rollout]]:
    """`rollout_stream`: `batch_size` prompts after the other. ValueError for a prompt with `stops`."""
    waiting, pad = enumerate(prompts), mask_token_id
    if pad is None:
        pad = model.config.pad_token_id or 0
    while batch := [*islice(waiting, batch_size)]:
        for number, (_, generator, *stops) in batch:
            if any(stops):
                noise = "a model with uniform noise" if mask_token_id is None else f"the sampler {settings.sampler}"
                raise ValueError(f"{noise} has no stops within a completion, which tools need")
            if generator is None:
                raise ValueError(f"prompt {number} of the stream has no generator, but its settings draw numbers")
        ids, mask = (values.to(model.device) for values in left_pad([[*prompt[0]] for _, prompt in batch], pad))
        generators = [prompt[1] for _, prompt in batch]
        try:
            sampled = rollout_of(steps(model, ids, mask, settings, generators, ends, mask_token_id), ids.shape[1])
        except NotFiniteError as error:
            raise NotFiniteError(batch[error.number][0], error.why) from error
        yield [number for number, _ in batch], sampled
