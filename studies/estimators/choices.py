"""The estimators of the study with their settings, the comparisons of its page, and which method uses which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Choice:
    """An estimator with its settings.

    Attributes:
        views: views per row; `name` and `views` identify a choice.
        weight: the average sum of its weights for a token; its value is divided by this.
        is_mean: it gives a mean over tokens; others give a sum.
        random: its draws differ.
    """

    name: str
    estimator: str
    views: int
    settings: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    is_mean: bool = False
    random: bool = True

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.views


PAIRS = {"antithetic": True, "stratified": True}
TRAJECTORY = Choice("replay, every step", "replay", 16, random=False)
CHOICES = [
    Choice("one step, prompt hidden by .15", "one_step", 1, {"p_mask_prompt": 0.15}),
    Choice("one step", "one_step", 1, random=False),
    Choice("random mask", "random_masks", 35, {"num_views": 35}),
    Choice("coupled", "coupled", 3, weight=1.5),
    Choice("complements", "complements", 4, {"num_views": 2, "stratified": True}, weight=0.5),
    Choice("spg", "spg", 2, {"num_views": 2, "p_mask_prompt": 0.15}, is_mean=True),
    *(Choice("elbo", "elbo", n, {"num_views": n}) for n in (1, 4)),
    *(Choice("elbo, opposite, stratified", "elbo", 2 * n, {"num_views": n, **PAIRS}) for n in (1, 2, 4)),
    Choice("counts, stratified", "counts", 16, {"num_views": 16, "stratified": True}),
    Choice("gauss", "gauss", 3),
    Choice("espo, opposite, stratified", "espo", 4, {"num_views": 2, **PAIRS}),
    *(Choice("replay, drawn evenly", "replay", n, {"num_views": n}) for n in (1, 4, 24)),
    *(Choice("replay, drawn by entropy", "replay", n, {"num_views": n, "draw_steps": "entropy"}) for n in (1, 4, 24)),
    *(Choice("replay, merged", "replay", n, {"segment_steps": 16 // n}, random=False) for n in (2, 4, 8)),
    TRAJECTORY,
    Choice("segments, prompt hidden by .15", "segments", 16, {"segments": 16, "p_mask_prompt": 0.15}),
    Choice("states", "states", 4, {"num_views": 4}),
    Choice("left to right", "left_to_right", 32, random=False),
]
BY_KEY = {choice.key: choice for choice in CHOICES}


class Claim(NamedTuple):
    """A comparison of the page: a measure of one choice minus that of another one."""

    title: str
    choice: tuple[str, int]
    other: tuple[str, int]
    measure: str = "cosine_to_trajectory"


OPPOSITE, BY_ENTROPY = "elbo, opposite, stratified", "replay, drawn by entropy"
CLAIMS = (
    Claim("one view: prompt visible, not hidden by .15", ("one step", 1), ("one step, prompt hidden by .15", 1)),
    Claim("one step drawn by entropy, not all in one step", (BY_ENTROPY, 1), ("one step", 1)),
    Claim("two views: merged steps, not opposite masks", ("replay, merged", 2), (OPPOSITE, 2)),
    Claim("two views: opposite masks, not spg", (OPPOSITE, 2), ("spg", 2)),
    Claim("four views: steps drawn by entropy, not evenly", (BY_ENTROPY, 4), ("replay, drawn evenly", 4)),
    Claim("four views: steps drawn by entropy, not opposite masks", (BY_ENTROPY, 4), (OPPOSITE, 4)),
    Claim("four views, to the bound: opposite, not independent masks", (OPPOSITE, 4), ("elbo", 4), "cosine_to_bound"),
)
# Method -> the choice that is its estimator. Left out are just-grpo, which samples left to right and so has another
# trajectory, and methods that score a few chosen states.
CHOICE_OF = {
    "d1": ("one step, prompt hidden by .15", 1),
    "wd1": ("one step, prompt hidden by .15", 1),
    "coupled-grpo": ("coupled", 3),
    "espo": ("espo, opposite, stratified", 4),
    "spg": ("spg", 2),
    "agrpo": ("replay, drawn evenly", 24),
    "agrpo-entropy": (BY_ENTROPY, 24),
    "cj-grpo": TRAJECTORY.key,
    "d2": ("segments, prompt hidden by .15", 16),
    "tracerl": ("replay, merged", 2),
    "unigrpo": ("random mask", 35),
    "bgpo": ("counts, stratified", 16),
    "stable-drl": ("spg", 2),
    "gdpo": ("gauss", 3),
    "gdsd": ("complements", 4),
    "dipo": TRAJECTORY.key,
    "ebpo": ("counts, stratified", 16),
    "trajectory": (BY_ENTROPY, 24),
    "reinforce": (OPPOSITE, 8),
}
