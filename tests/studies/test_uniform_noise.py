"""The study of uniform noise: its arms, its surrogate against Transformers' own class, its tables, and a short run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.train import make_parser
from d1.scoring import Estimator, Randomness, SampledRows, ViewSettings, score
from pocket.recipes import ROOT
from studies.uniform_noise import report, run, surrogate
from tests.d1.diffusion_gemma import CANVAS, needs_class, tiny, write_tiny

CORRUPTED: Estimator = surrogate.ESTIMATORS["corrupted"]


def sampled(canvas, prompt):
    """Rows of which only what the surrogate reads is real."""
    true, count = torch.ones_like(prompt, dtype=torch.bool), torch.zeros(canvas.shape)
    given = prompt, torch.ones_like(prompt), true, canvas, torch.ones_like(canvas, dtype=torch.bool)
    return SampledRows(*given, reveal_steps=torch.zeros_like(canvas), logps=count, entropies=count)


def views_of(rows, seed=0):
    count = len(rows.canvas_ids)
    random = Randomness([keyed_generator(seed, row) for row in range(count)], keyed_generator(seed), 0, count)
    return CORRUPTED(rows, random, ViewSettings(gen_length=rows.canvas_ids.shape[1]))


def test_the_arms_differ_in_their_estimator_alone():
    seen = {}
    for arm in ("exact", "surrogate"):
        flags = [*run.settings(arm, 3, 1e-4), "--output_dir", "x", "--model_path", "y"]
        config, _ = make_parser().parse_args_and_config(["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *flags])
        seen[arm] = vars(config)
    differ = {name for name, value in seen["exact"].items() if str(value) != str(seen["surrogate"][name])}
    assert differ == {"estimator", "method"}
    assert (seen["exact"]["estimator"], seen["surrogate"]["estimator"]) == ("accepted", "corrupted")
    shared = ("self_conditioning", "output", "scored_tokens", "importance_sampling_level", "num_iterations", "epsilon")
    assert [seen["exact"][name] for name in shared] == [False, "draw", "drawn", "sequence", 2, 0.2]


def test_corrupted_tokens_are_a_share_t_of_all_and_become_uniform_ids():
    length, count = 50, 4000
    rows = sampled(torch.full((count, length), 7), torch.ones(count, 2, dtype=torch.long))
    views = views_of(rows)
    taken = views.weights[:, 0]
    assert {*taken.unique().tolist()} == {0.0, 1.0}
    assert (views.shown[:, 0][taken == 0] == 7).all()
    # The share of a row is that of a t uniform on [.1, 1]: mean .55, variance .9^2 / 12 + E[t (1 - t)] / length.
    shares = taken.mean(1)
    of_t, inside = 0.9**2 / 12, (0.55 - (0.9**2 / 12 + 0.55**2)) / length
    assert shares.mean().item() == pytest.approx(0.55, abs=4 * ((of_t + inside) / count) ** 0.5)
    assert shares.var().item() == pytest.approx(of_t + inside, rel=0.05)
    ids = views.shown[:, 0][taken == 1]
    expected = len(ids) / surrogate.VOCABULARY
    counts = torch.bincount(ids, minlength=surrogate.VOCABULARY)
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


@needs_class
def test_the_surrogate_is_minus_the_cross_entropy_of_corrupted_tokens_given_clean_text(tmp_path):
    from transformers import DynamicCache

    size = surrogate.VOCABULARY
    model, random = load_model(write_tiny(tmp_path, vocab=size)), torch.Generator().manual_seed(0)
    prompt, canvas = (torch.randint(size - 1, (3, width), generator=random) for width in (5, CANVAS))
    rows = sampled(canvas, prompt)
    views = views_of(rows)
    found = score(
        model, prompt, rows.attention_mask, canvas, views, mask_token_id=None, gen_length=CANVAS, views_at_once=2
    )
    own, expected = tiny(vocab=size), []
    for ids, clean, shown, taken in zip(prompt, canvas, views.shown[:, 0], views.weights[:, 0], strict=True):
        cache = DynamicCache(config=own.config.text_config)
        with torch.no_grad():
            own.model.encoder(input_ids=ids[None], cache=cache)
            logits = own(decoder_input_ids=shown[None], cache=cache).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, clean, reduction="none")
        expected.append(-(losses * taken).sum())
    assert views.weights.sum() > 0
    torch.testing.assert_close(found.logps.sum(1), torch.stack(expected), atol=1e-5, rtol=0)


def test_the_rate_with_the_highest_mean_is_chosen_and_a_search_must_be_complete():
    right = dict(zip(run.RATES, ("1000", "1100", "0011", "1000"), strict=True))
    lines = [
        {"arm": "surrogate", "seed": seed, "rate": rate, "right": right[rate]}
        for seed in run.SEARCH_SEEDS
        for rate in run.RATES
    ]
    assert {run.chosen(arm, lines) for arm in ("surrogate", "surrogate-rollouts")} == {run.RATES[1]}
    with pytest.raises(ValueError, match="the search of exact is not complete"):
        run.chosen("exact", lines)


def made(generator, arm, seed, right):
    curves = {"ratio_max": [1.0, 1.5, 1.0, 2.0 + seed], "clip_ratio/region_mean": [0.0, 0.25, 0.0, 0.75]}
    flips = {"accepted/flipped_passes": [0.0, 0.1], "accepted/flipped_positions": [0.0, 0.02]}
    curves["reward"] = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.9, 0.7 + 0.1 * seed]
    curves |= flips if arm == "exact" else {name: [] for name in flips}
    costs = {"rollouts": 2, "compute": 5, "seconds": 7, "curves": curves}
    one = {"arm": arm, "seed": seed, "right": right, "right_as_trained": "".join(generator.choice(["0", "1"], 40))}
    return one if arm == "sft" else one | costs


def test_the_table_waits_for_all_arms_and_its_differences_are_paired_over_shared_seeds():
    generator, level = np.random.default_rng(0), {"exact": 30, "surrogate": 22, "surrogate-rollouts": 20}
    lines = [made(generator, "sft", 0, "1" * 10 + "0" * 30)]
    gains = []
    for seed in range(3):
        gains.append((level["exact"] - level["surrogate"] + seed) / 40)
        for arm, solved in level.items():
            solved += seed if arm == "exact" else 0
            lines.append(made(generator, arm, seed, "1" * solved + "0" * (40 - solved)))
    lines.append(made(generator, "exact", 3, "0" * 40))  # a seed without its partner
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in report.table([], lines).split("\n\n")[1].splitlines()[2:]
    }
    assert [*cells] == [*run.ARMS]
    numbers = [float(one) for one in cells["surrogate"][3].replace("[", "").replace("]", "").replace(",", "").split()]
    assert numbers[0] == pytest.approx(100 * np.mean(gains), abs=0.051)
    low, high = (100 * end for end in ttest_1samp(gains, 0).confidence_interval())
    assert numbers[1] <= low + 0.051, "the interval is at least Student's over seeds"
    assert numbers[2] >= high - 0.051
    assert cells["exact"][3] == cells["sft"][3] == ""
    assert report.updates("exact", lines)[1:] == ["1.000000", "5.00", "10.00", "2.00", "50.00", "0.550", "0.875"]
    assert report.updates("surrogate", lines)[1:] == ["1.000000", "4.00", "", "", "50.00", "0.550", "0.850"]
    few = [line for line in lines if line["arm"] != "surrogate-rollouts"]
    assert report.table([], few) == f"{len(few)} of {len(run.runs())} planned runs are done.\n"


@needs_class
def test_both_arms_train_from_the_start_and_are_judged(tmp_path):
    start = run.make_start(tmp_path, steps=20)
    assert sum(weight.numel() for weight in load_model(start).parameters()) == pytest.approx(0.24e6, rel=0.02)
    judge = ["--split", "validation", "--limit", "12"]
    for arm, most in (("exact", run.PASSES), ("surrogate", 1)):
        found = run.line({"arm": arm, "seed": 0}, 1e-3, ["--max_steps", "2"], tmp_path, judge)
        assert found["error"] is None
        assert len(found["right"]) == len(found["right_as_trained"]) == 12
        ratios = found["curves"]["ratio_max"]
        assert ratios[0] == pytest.approx(1, abs=1e-5)
        assert ratios[1] > 1.001
        assert len(found["curves"]["accepted/flipped_passes"]) == (2 if arm == "exact" else 0)
        # 32 rows: encoder and at most 6 passes in the rollout; old scores, once or twice, and two updates per view.
        old = 1 if arm == "exact" else 2
        row = run.PROMPT + run.PASSES * run.CANVAS + most * (old + 6) * (run.PROMPT + run.CANVAS)
        assert 0.5 * 32 * row < found["compute"] <= 32 * row
        assert json.dumps(found)
    assert not list(tmp_path.glob("exact-*"))
