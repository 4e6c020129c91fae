"""The estimators of log-probabilities that several methods use, by name.

An estimator that one paper alone uses is in its method's file (`d1/rl/methods/`), and joins this table in
`d1/rl/tables.py`. An entry says what its views need and which settings they read. The checks of combinations, the
plan of a run and its scoring read only the entry, so a user's own entry is treated like the others.
"""

from __future__ import annotations

from d1.scoring import accepted, elbo, one_step, replay
from d1.scoring.entry import Estimator as Estimator
from d1.scoring.entry import always, draws_all, draws_some, one_per_draw, one_view, reveal_steps
from d1.scoring.inputs import ViewSettings


def steps_and_entropies(settings: ViewSettings) -> tuple[str, ...]:
    if draws_some(settings) and settings.draw_steps != "uniform":
        return ("reveal_steps", "entropies")
    return ("reveal_steps",)


def draws_by_entropy(settings: ViewSettings) -> bool:
    return draws_some(settings) and settings.draw_steps == "entropy"


def hides_prompt(settings: ViewSettings) -> bool:
    return settings.p_mask_prompt > 0


def draws_pairs(settings: ViewSettings) -> bool:
    return settings.antithetic


def draws_and_pairs(settings: ViewSettings) -> int:
    return settings.paired_draws


def one_or_its_pair(settings: ViewSettings) -> int:
    return 2 if settings.antithetic else 1


ESTIMATORS: dict[str, Estimator] = {
    # The only view hides the whole canvas: it is random only if prompt tokens are hidden, too.
    "one_step": Estimator(one_step.draw_one_step, draws=hides_prompt, covers=always, causal_first=True, settings=()),
    "elbo": Estimator(
        elbo.draw,
        views=draws_and_pairs,
        covers=draws_pairs,
        views_per_draw=one_or_its_pair,
        settings=("num_views", "antithetic", "stratified"),
    ),
    "espo": Estimator(
        elbo.draw_espo,
        views=draws_and_pairs,
        covers=draws_pairs,
        views_per_draw=one_or_its_pair,
        settings=("num_views", "antithetic", "stratified"),
    ),
    "counts": Estimator(elbo.draw_counts, one_per_draw, views_per_draw=one_view, settings=("num_views", "stratified")),
    "replay": Estimator(
        replay.draw,
        lambda settings: settings.num_views or -(-settings.steps // (settings.segment_steps or 1)),
        draws=draws_some,
        replays=True,
        replays_writes=True,
        clean_prompt=True,
        partial=draws_some,
        unequal=draws_by_entropy,
        covers=draws_all,
        reads=steps_and_entropies,
        as_sampled=lambda settings: settings.segment_steps in (None, 1),
        causal_first=True,
        settings=("num_views", "segment_steps", "draw_steps", "mean_step"),
    ),
    "accepted": Estimator(
        accepted.draw,
        lambda settings: settings.num_views or settings.sampler.passes_per_block,
        draws=draws_some,
        replays=True,
        replays_writes=True,
        uniform_noise=True,
        clean_prompt=True,
        partial=draws_some,
        reads=reveal_steps,
        metrics=accepted.accepted_flips,
        settings=("num_views",),
    ),
}
