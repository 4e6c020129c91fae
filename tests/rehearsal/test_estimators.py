"""Every estimator's views and their scores, with gradients, on a simulated device without visible data."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from d1.masking import keyed_generator
from d1.rl.batch import draw_updates, views_of
from d1.scoring import ESTIMATORS, Randomness, SampledRows, score
from d1.scoring.rollouts import blocks_of
from tests.d1.scoring.enumeration import CANVAS, MASK, SAMPLED, VISIBLE, settings, tiny
from tests.rehearsal.device import DEVICE, rehearsal
from tests.rehearsal.waits import SCORING, expected, places

DRAWN = {"num_views": 3, "antithetic": True, "stratified": True, "draw_steps": "entropy", "p_mask_prompt": 0.5}


def drawn_and_scored(device, model, name, sampled):
    """Log-probs, of each view and summed, the entropies, the computed tokens, and the gradient of each weight."""
    model = deepcopy(model).to(device, non_blocking=True)
    columns = {key: None if part is None else part.to(device, non_blocking=True) for key, part in vars(sampled).items()}
    random = Randomness([keyed_generator(2, row) for row in range(4)], keyed_generator(2), 0, 4)
    batch = draw_updates(SampledRows(**columns), random, 2, ESTIMATORS[name], settings(**DRAWN))
    given = [columns[key] for key in ("prompt_ids", "attention_mask", "completion_ids")]
    scores = score(model, *given, views_of(batch, 1), mask_token_id=MASK, gen_length=CANVAS, with_entropies=True)
    scores.logps.sum().backward()
    return [*batch.values(), *(part.detach() for part in scores), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("block", [None, 2], ids=["full attention", "blocks"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_views_and_scores_wait_where_listed_and_are_a_runs(name, block):
    model, sampled = tiny(2, block=block), replace(SAMPLED, blocks=blocks_of(VISIBLE, CANVAS, block))
    with rehearsal(places(SCORING)) as waits:
        rehearsed = drawn_and_scored(DEVICE, model, name, sampled)
    with sdpa_kernel(SDPBackend.MATH):
        real = drawn_and_scored("cpu", model, name, sampled)
    for found, wanted in zip(rehearsed, real, strict=True):
        assert found.device == DEVICE
        assert torch.equal(found.numbers, wanted)
    columns = sum(column is not None for column in vars(sampled).values())
    assert waits == expected(SCORING, {"scoring": 1, "column": columns})
