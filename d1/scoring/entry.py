"""What the entry of an estimator says. Imports no torch, so that the methods' files need none either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from d1.sampling.settings import SamplingSettings
    from d1.scoring.inputs import Randomness, SampledRows, ViewSettings
    from d1.scoring.views import Scores, Views

    Draw = Callable[[SampledRows, Randomness, ViewSettings], Views]
    SettingsTest = Callable[[ViewSettings], bool]
    Metrics = Callable[[Views, Scores, SamplingSettings, Callable[[Tensor], Tensor]], dict[str, float]]


# --- What many entries answer -----------------------------------------------------------------------------------------


def always(settings: ViewSettings) -> bool:
    return True


def never(settings: ViewSettings) -> bool:
    return False


def draws_some(settings: ViewSettings) -> bool:
    """Whether `num_views` is set, so that some of all views are drawn."""
    return settings.num_views is not None


def draws_all(settings: ViewSettings) -> bool:
    """Whether `num_views` is unset, so that all views are scored."""
    return settings.num_views is None


def one_view(settings: ViewSettings) -> int:
    return 1


def one_per_draw(settings: ViewSettings) -> int:
    return settings.draws


def two_per_draw(settings: ViewSettings) -> int:
    return 2 * settings.draws


def only_together(settings: ViewSettings) -> int:
    """No part of the views estimates the log-probability of the whole completion."""
    return 0


def no_record(settings: ViewSettings) -> tuple[str, ...]:
    return ()


def reveal_steps(settings: ViewSettings) -> tuple[str, ...]:
    return ("reveal_steps",)


def no_metrics(
    views: Views, scores: Scores, sampling: SamplingSettings, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    return {}


# --- The entry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """An entry of the table.

    Attributes:
        draw: gives the views in which the rows of a rollout are scored, for one update.
        views: the largest number of views per row.
        draws: whether the views are random: then each inner update has its own views; else old and reference
            log-probabilities are scored once.
        linear: whether the weighted sum over views estimates a log-probability; False for a bound that is no such sum.
        replays: whether tokens are scored in the sampler's own states, which must then be exact.
        replays_writes: of a rollout with edits, it replays all that was written, not what was written last.
        uniform_noise: whether it is for models with uniform noise, and for no others.
        clean_prompt: whether tokens are scored given the whole prompt; then `p_mask_prompt` must be 0.
        partial: whether a draw scores only some of the tokens, with the inverse of their probability to be drawn as
            weights. Such weights must multiply the loss of each view: in a ratio of weighted sums they would be
            exponents.
        unequal: whether views are drawn with unequal probabilities, whose inverse is in their weights: a mean that
            counts all views alike would be biased towards likely ones.
        contiguous: whether the tokens that count must be the first of the canvas, without gaps (`LossMask.has_gaps`).
        covers: whether every token that counts is scored in at least one view. False: random views may leave some out.
        reads: which of `reveal_steps`, `logps` and `entropies` of `SampledRows` the views depend on: a rollout that
            lacks one of these is refused.
        as_sampled: whether each token is scored once, in the state in which it was revealed, so that the record of the
            rollout has its log-probability.
        causal_first: whether the views suit a sampler that takes each block's first token from the clean text
            (`first_token`), so that it is visible wherever others of its block are scored.
        views_per_draw: how many views, n apart if there are n draws, estimate the log-probability of the whole
            completion without the other views; 0: only all views together do.
        metrics: what an update logs besides, from its views, their scores with entropies, the settings of the sampler,
            and a function that gathers tensors of all processes.
        settings: which of `num_views`, `antithetic`, ... it reads; to set another one is an error. None: unknown.
    """

    draw: Draw
    views: Callable[[ViewSettings], int] = one_view
    draws: SettingsTest = always
    linear: bool = True
    replays: bool = False
    replays_writes: bool = False
    uniform_noise: bool = False
    clean_prompt: bool = False
    partial: SettingsTest = never
    unequal: SettingsTest = never
    contiguous: bool = False
    covers: SettingsTest = never
    reads: Callable[[ViewSettings], tuple[str, ...]] = no_record
    as_sampled: SettingsTest = never
    causal_first: bool = False
    views_per_draw: Callable[[ViewSettings], int] = only_together
    metrics: Metrics = no_metrics
    settings: tuple[str, ...] | None = None

    def __call__(self, sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
        """Draw the views; raise ValueError if the function returned anything but views of these rows, or
        replays what was written last of rows with edits."""
        if self.replays and not self.replays_writes and sampled.write_steps is not None:
            function = describe_function(self.draw)
            raise ValueError(f"{function} replays the last write of each position, and these rows have edits")
        from d1.scoring.views import Views

        drawn = self.draw(sampled, random, settings)
        if not isinstance(drawn, Views):
            found = f"{describe_function(self.draw)} returned {describe_value(drawn)}"
            raise ValueError(f"{found}: expected Views, of d1.scoring")
        rows, prompt = sampled.prompt_ids.shape
        drawn.check(rows, prompt + sampled.gen_length, sampled.gen_length, sampled.gen_length)
        return drawn


def describe_function(function: object) -> str:
    """A function in an error message: its name, file and line."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", repr(function))
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def describe_value(value: object) -> str:
    """What a function returned, in an error message: the shape of a tensor, the type of anything else."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without gradient'}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
