"""Before any training: gradients of what fast rollouts are scored by, compared with that of the exact trajectory.

For completions that an SFT model samples as in RL, the reference is the gradient of the sum of A x log P, with P the
probability of the whole trajectory in exact states: tokens as they are drawn, and places (`d1/sampling/places.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.distribution import OWN
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.rl.batch import SCORED, Sampled
from d1.rl.losses import standardised
from d1.runs.record import run_record
from d1.sampling import SamplingSettings, eos_cut, rollout
from d1.scoring import ESTIMATORS, Randomness, SampledRows, Scores, Views, ViewSettings, score
from d1.tasks import load_task
from studies.estimators.completions import texts_of
from studies.estimators.run import rounded
from studies.json_lines import Run
from studies.leaderboard.plan import TASKS, Setup
from studies.leaderboard.run import make_start
from studies.samplers.rollouts import TASK

DATA = Path(__file__).parent / "data" / "untrained.jsonl"
SEEDS, GROUPS, GROUP = range(80, 85), 32, 8
CAP = 2.0  # of the weights of trajectories, as in the arm C+w
FAST: dict[str, Any] = {"sampler": "parallel", "reveal_level": 0.95}
SAMPLERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "threshold": FAST,
    "gumbel": FAST | {"remasking": "gumbel", "order_temperature": 0.05},
    "prefix": FAST | {"sampler": "cached+parallel", "kv_cache": "prefix"},
    "lasting": FAST | {"sampler": "cached+parallel", "kv_cache": "lasting"},
}


def models(quick: bool = False) -> list[Run]:
    return [{"seed": seed, "sampler": name} for seed in (*SEEDS,)[: 1 if quick else None] for name in SAMPLERS]


def line_of(run: Run, folder: Path) -> dict[str, Any]:
    """What is measured of a model's completions by a sampler."""
    path, seed = make_start(folder, Setup(TASK, "sft"), run["seed"]), run["seed"]
    model, tokenizer = load_model(str(path)).eval(), load_tokenizer(str(path))
    module, length = load_task(TASKS[TASK].dataset), TASKS[TASK].length
    rows = [row for row in module.load_rows("train").select(range(GROUPS)) for _ in range(GROUP)]
    texts = [encode_prompt(tokenizer, render_prompt(tokenizer, row["prompt"])) for row in rows]
    longest = max(map(len, texts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    recorded: dict[str, Any] = {"record_exactly": True, "record_steps": True}
    settings = SamplingSettings(length, 8, length // 2, temperature=0.8, **SAMPLERS[run["sampler"]], **recorded)
    own = [keyed_generator(seed, row) for row in range(len(rows))]
    options: dict[str, Any] = {"mask_token_id": tokenizer.mask_token_id, "eos_token_ids": [tokenizer.eos_token_id]}
    taken = rollout(model, ids, mask, settings, generator=own, **options)
    canvas, steps = taken.ids[:, longest:], taken.reveal_steps
    ended = eos_cut(canvas, [tokenizer.eos_token_id])
    is_end = canvas == tokenizer.eos_token_id
    scored = SCORED["completed"].of(Sampled(canvas, ended, steps, is_end, is_end, steps))
    sampled = SampledRows(ids, mask, mask.bool(), canvas, scored, steps, taken.logps, taken.entropies)
    sampled = replace(sampled, ranks=taken.ranks)
    columns = {name: [row[name] for row in rows] for name in ("question", "ground_truth")}
    said = texts_of(replace(sampled, scored=ended), tokenizer)
    rewards = torch.as_tensor(sum(torch.tensor(reward(said, **columns)) for reward in module.REWARDS)).float()
    grouped = rewards.view(-1, GROUP)
    advantages = standardised(grouped - grouped.mean(1, keepdim=True)).flatten()
    case = Case(model, sampled, settings, tokenizer.mask_token_id, advantages, taken.step_logps, ended)
    return rounded({**case.measured(), "reward": rewards.mean().item(), **run_record()})


class Case:
    """A model's completions with their advantages, and gradients on them."""

    def __init__(
        self,
        model: Any,
        sampled: SampledRows,
        settings: SamplingSettings,
        mask_token_id: int,
        advantages: Tensor,
        step_logps: Tensor | None,
        ended: Tensor,
    ) -> None:
        self.model, self.sampled, self.settings, self.mask_token_id = model, sampled, settings, mask_token_id
        self.advantages, self.step_logps, self.ended = advantages, step_logps, ended

    def scores(
        self, sampled: SampledRows, estimator: str, exactly: bool, **how: Any
    ) -> Iterator[tuple[slice, Views, Scores]]:
        """The rows of each group with an advantage, their views and their scores."""
        view_settings = ViewSettings(sampled.gen_length, self.settings.most_passes(), 8, sampling=self.settings, **how)
        distribution = self.settings.drawn(self.mask_token_id) if exactly else OWN
        views = ESTIMATORS[estimator](sampled, Randomness([], torch.Generator(), 0, 0), view_settings)
        for start in range(0, len(self.advantages), GROUP):
            some = slice(start, start + GROUP)
            if not self.advantages[some].any():
                continue
            own = views.each(itemgetter(some))
            given = sampled.prompt_ids[some], sampled.attention_mask[some], sampled.canvas_ids[some], own
            sizes: dict[str, Any] = {"gen_length": sampled.gen_length, "views_at_once": own.weights.shape[1]}
            sizes |= {"mask_token_id": self.mask_token_id, "distribution": distribution, "sampling": self.settings}
            yield some, own, score(self.model, *given, **sizes)

    def gradient(self, values: Iterator[Tensor]) -> Tensor:
        """Of a sum of groups' sums."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        total = torch.zeros(sum(weight.numel() for weight in weights))
        for value in values:
            total += torch.cat([part.flatten() for part in torch.autograd.grad(value, weights)])
        return total

    def weighted(self, some: slice, views: Views, scores: Scores, weigh: bool, places: bool = True) -> Tensor:
        """The sum of A x log P of the possible steps of some rows; `weigh`: times the weight of the trajectory."""
        tokens, chosen = scores.view_logps.sum(-1), scores.place_logps
        assert chosen is not None
        possible = chosen.isfinite()
        steps = tokens + chosen.where(possible, 0.0) if places else tokens
        if weigh:
            steps = steps * self.log_weights(some, views, scores).cumsum(1).exp().clamp(max=CAP)
        return (self.advantages[some].unsqueeze(1) * steps * possible).sum()

    def log_weights(self, some: slice, views: Views, scores: Scores) -> Tensor:
        """(rows, views) log P - log P', P' as the sampler noted it."""
        assert self.step_logps is not None
        assert scores.place_logps is not None
        noted = torch.where(views.weights != 0, self.step_logps[some].unsqueeze(1), 0.0).sum(-1)
        return (scores.view_logps.sum(-1) + scores.place_logps - noted).where(views.scoring, 0.0).detach()

    def measured(self) -> dict[str, Any]:
        """Cosines and relative norms of gradients, and what the weights of trajectories are."""
        log_weights, places, tokens, views = [], 0.0, 0.0, 0
        with torch.no_grad():
            for some, own, scores in self.scores(self.sampled, "places", True):
                assert scores.place_logps is not None
                log_weights.append(self.log_weights(some, own, scores).sum(1).double())
                places -= scores.place_logps[scores.place_logps.isfinite()].sum().item()
                tokens -= scores.view_logps.sum().item()
                views = max(views, own.weights.shape[1])
        rows = sum(map(len, log_weights))
        weights_of = torch.cat(log_weights)
        finite = weights_of[weights_of.isfinite()]
        weights = (finite - finite.max()).exp()
        found: dict[str, Any] = {"rows": rows, "views": views, "places_nll": places / rows, "tokens_nll": tokens / rows}
        found["log_weight"] = finite.mean().item()
        found["effective"] = (weights.sum() ** 2 / weights.square().sum() / rows).item()
        found["no_support"] = 1 - len(finite) / rows
        text = replace(self.sampled, scored=self.ended)
        reference = self.gradient(self.whole(weigh=False))
        others = {
            "weighted": self.whole(weigh=True),
            "tokens as drawn": self.whole(weigh=False, places=False),
            "tokens (P, C)": self.plain(text, segment_steps=1),
            "two steps per view": self.plain(text, segment_steps=2),
            "eight steps per view (P8, C8)": self.plain(text, segment_steps=8),
        }
        for name, values in others.items():
            own_gradient = self.gradient(values)
            cosine = torch.nn.functional.cosine_similarity(own_gradient, reference, dim=0)
            found[name] = {"cosine": cosine.item(), "norm": (own_gradient.norm() / reference.norm()).item()}
        return found

    def whole(self, weigh: bool, places: bool = True) -> Iterator[Tensor]:
        """`weighted` of each group, one at a time, so that one group's states are in memory."""
        for some, views, scores in self.scores(self.sampled, "places", True):
            yield self.weighted(some, views, scores, weigh, places)

    def plain(self, sampled: SampledRows, **how: Any) -> Iterator[Tensor]:
        """Today's replay: tokens up to the EOS, under the model's own distribution."""
        for some, _, scores in self.scores(sampled, "replay", False, **how):
            yield (self.advantages[some].unsqueeze(1) * scores.logps).sum()
