"""Rollouts of a user's engine, TRL's `rollout_func`, and the check of what engines and servers return.

An engine that calls our own sampler gives the built-in run to the bit; what a method lacks is refused by name, and so
is what is malformed. A row of each rollout is scored again: the sampler's own numbers pass, others are an error or a
warning.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.batch import completion_ids_of, evaluating, record_and_costs
from d1.rl.checks import left_to_right_rows
from d1.sampling import SamplingSettings, rollout
from d1.scoring import ESTIMATORS, Randomness, ViewSettings
from d1.serve.rescoring import MAX_STATES, Rescoring, states_of
from d1.serve.user import RECORD, ROW_FIELDS, UserRollouts
from tests.tiny_grpo import clockless, logged, make_method, weights

# An engine does not say how many passes it made, and of how many tokens.
NOT_TOLD = ("tokens_per_forward_pass", "sampling/forward", "compute_tokens")


def engine(*keys, cut=False):
    """A `rollout_func` that samples with the library and returns these of `RECORD`."""

    def sample(prompts, trainer):
        prompt_ids = trainer.encoded(prompts)
        ids, mask = trainer.left_pad(prompt_ids)
        ends = trainer.eos_token_ids if trainer.eos_stop else None
        options = {"mask_token_id": trainer.mask_token_id, "eos_token_ids": ends}
        options |= {"generator": trainer.generators("rollout", len(prompts))}
        with evaluating(trainer.model):
            sampled = rollout(trainer.model, ids, mask, trainer.sampling, **options)
        canvas = sampled.ids[:, ids.shape[1] :]
        parts = {"steps": sampled.reveal_steps, "logprobs": sampled.logps, "entropies": sampled.entropies}
        returned = {"prompt_ids": prompt_ids, "completion_ids": canvas.tolist(), "topic": ["letters"] * len(prompts)}
        if cut:
            returned["completion_ids"] = completion_ids_of(canvas, trainer.eos_token_ids)
        return returned | {name: parts[name].tolist() for name in keys}

    return sample


@pytest.mark.parametrize(
    ("method", "keys", "changes"),
    [
        ("d1", (), {"eval_strategy": "steps", "eval_steps": 2}),  # tokens alone, cut after their EOS
        ("agrpo-entropy", ("steps", "entropies"), {}),
        ("rldf", ("steps", "logprobs"), {"sampler": "exact", "reveal": None, "reveal_level": None, "kv_cache": None}),
    ],
)
def test_our_own_sampler_behind_it_gives_the_built_in_run(tiny_model_dir, tmp_path, method, keys, changes):
    own, runs = engine(*keys, cut=not keys), {}
    for name, function in (("here", None), ("there", own)):
        runs[name] = make_method(tiny_model_dir, tmp_path / name, method, max_steps=3, rollout_func=function, **changes)
        runs[name].train()
    here, there = runs.values()
    before, after = weights(here.model), weights(there.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for one, other in zip(*(clockless(run.state.log_history) for run in (here, there)), strict=True):
        lacking = {name for name in one if any(part in name for part in NOT_TOLD)}
        lacking |= set() if "logprobs" in keys else {name for name in one if "sampling/" in name}
        assert {**one, **dict.fromkeys(lacking)} == {**dict.fromkeys(lacking), **other, **dict.fromkeys(lacking)}
    assert len(logged(there)) == 3


@pytest.mark.parametrize(
    ("method", "keys", "changes", "said"),
    [
        ("agrpo", ("logprobs",), {}, "no steps, which --method agrpo reads (estimator replay, scored_tokens steps)"),
        ("agrpo-entropy", ("steps",), {}, "no entropies, which --method agrpo-entropy reads (estimator replay)"),
        ("d2", (), {}, "no steps, which --method d2 reads (estimator segments)"),
        ("rldf", ("steps",), {}, "no logprobs, which --method rldf reads (estimator states)"),
        ("d1", ("steps",), {"sampling_weight_cap": 3.0}, "no logprobs, which --method d1 reads (sampling_weight_cap)"),
    ],
)
def test_a_method_that_needs_what_is_missing_is_refused_by_name(tiny_model_dir, tmp_path, method, keys, changes, said):
    trainer = make_method(tiny_model_dir, tmp_path, method, rollout_func=engine(*keys), **changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        trainer.train()


def test_settings_that_it_cannot_serve_are_refused_at_once(tiny_model_dir, tmp_path):
    where = {"rollout_mode": "server", "rollout_server_base_url": ["http://127.0.0.1:1"]}
    edits = {"sampler": "parallel", "edit_threshold": 0.9}
    for changes, said in ((where, "rollout_mode"), (edits, "edit_threshold"), ({"max_compute_tokens": 9}, "does not")):
        with pytest.raises(ValueError, match=said):
            make_method(tiny_model_dir, tmp_path, "d1", rollout_func=engine(), **changes)


END, MASK = 2, 3
GOOD = {"prompt_ids": [[1, 9], [1, 8]], "completion_ids": [[9, 8, END], [7] * 8]}
STEPS = {"steps": [[0, 0, 1], [0, 1, 0, 1, 2, 3, 2, 3]]}
SAME_STEPS = ({"reveal_steps": STEPS["steps"]}, {"step_maps": [[1, 1, 2], [1, 2, 1, 2, 1, 2, 1, 2]]})
MALFORMED = [
    (["no dictionary"], "returned list"),
    ({"completion_ids": GOOD["completion_ids"]}, "no prompt_ids"),
    (GOOD | {"completion_ids": [[7] * 8]}, "got 2 prompts: expected a list of as many completion_ids, got 1"),
    (GOOD | {"prompt_ids": torch.tensor([[1, 9], [1, 8]])}, "as many prompt_ids, got Tensor"),
    (GOOD | {"completion_ids": [[9, END], [7] * 9]}, "row 1: completion_ids has 9 ids: expected 1 to"),
    (GOOD | {"completion_ids": [[9, END], []]}, "row 1: completion_ids has 0 ids"),
    (GOOD | {"completion_ids": [[9, END], [7] * 7]}, "row 1: 7 completion_ids, and there is no EOS"),
    (GOOD | {"completion_ids": [[9, END], [999] * 8]}, "row 1: completion_ids: the model has"),
    (GOOD | {"completion_ids": [["a"], [7] * 8]}, "row 0: completion_ids: expected a list of numbers"),
    (GOOD | {"prompt_ids": [[], [1, 8]]}, "row 0: prompt_ids has 0 ids"),
    (GOOD | {"prompt_ids": [[1] * 999, [1, 8]]}, "row 0: prompt_ids has 999 ids: expected 1 to max_prompt_length"),
    (GOOD | {"steps": [[0, 0, 1]]}, "as many steps, got 1"),
    (GOOD | {"steps": [[0, 0], STEPS["steps"][1]]}, "row 0: steps has 2 entries for 3 completion_ids"),
    (GOOD | {"steps": [[0, 0.5, 1], STEPS["steps"][1]]}, r"row 0: steps\[1\] is 0.5"),
    (GOOD | {"steps": [[0, -1, 1], STEPS["steps"][1]]}, r"row 0: steps\[1\] is -1"),
    (GOOD | {"steps": [[0, 0, 1], [0, 1, 0, 1] * 2]}, r"row 1: steps\[4\] is 0: expected 2 or more"),
    (GOOD | {"logprobs": [[-1.0, 0.5, -1.0], [-1.0] * 8]}, r"row 0: logprobs\[1\] is 0.5: expected a finite log"),
    (GOOD | {"logprobs": [[-1.0, None, -1.0], [-1.0] * 8]}, "row 0: logprobs: expected a list of numbers"),
    (GOOD | {"entropies": [[float("nan")] * 3, [1.0] * 8]}, r"row 0: entropies\[0\] is nan"),
    (GOOD | {"entropies": [[1.0] * 3, [1.0, 9.0] * 4]}, r"row 1: entropies\[1\] is 9: expected .* 0 to log\("),
    (GOOD | STEPS | SAME_STEPS[0], "steps and reveal_steps: return one of them"),
    (GOOD | {"step_maps": [[1, 1], SAME_STEPS[1]["step_maps"][1]]}, "row 0: step_maps has 2 entries for 3"),
    (SAME_STEPS[1] | GOOD | {"completion_ids": [5, 6]}, "row 0: completion_ids: expected a list of numbers, got 5"),
    (GOOD | {"env_mask": [[1] * 3, [1] * 8]}, "env_mask"),
]


def called(trainer, returned):
    """What TRL gets of a function that returns this for two prompts."""
    source = UserRollouts(lambda prompts, trainer: returned, trainer.args, trainer.model.config)
    source.connect(trainer)
    return source.rollout_func(["a", "b"], trainer)


def test_malformed_returns_are_one_clear_line(tiny_model_dir, tmp_path):
    trainer = make_method(tiny_model_dir, tmp_path, "d1", diffusion_steps=4, ends=(END,))
    for returned, said in MALFORMED:
        with pytest.raises(ValueError, match=said) as caught:
            called(trainer, returned)
        assert "\n" not in str(caught.value)
    given = called(trainer, GOOD | STEPS | {"logprobs": None})
    assert given == GOOD | {"logprobs": None}
    assert trainer.record["canvas_ids"].tolist() == [[9, 8, *[END] * 6], [7] * 8]
    assert trainer.record["reveal_steps"].tolist() == [[0, 0, 1, *[-1] * 5], STEPS["steps"][1]]
    assert {*trainer.record} == {"canvas_ids", "reveal_steps"}
    for names in SAME_STEPS:  # a row's own passes, or a server's step map: blocks of four
        assert called(trainer, GOOD | names) == GOOD | {"logprobs": None}
        assert trainer.record["reveal_steps"].tolist() == [[0, 0, 1, *[-1] * 5], STEPS["steps"][1]]
    arrays = {name: [np.array(row, "uint16") for row in rows] for name, rows in (GOOD | STEPS).items()}
    given = called(trainer, arrays)
    assert given == GOOD | {"logprobs": None}
    assert trainer.record["canvas_ids"].tolist() == [[9, 8, *[END] * 6], [7] * 8]
    assert trainer.record["reveal_steps"].tolist() == [[0, 0, 1, *[-1] * 5], STEPS["steps"][1]]
    replays = make_method(tiny_model_dir, tmp_path, "cj-grpo", ends=(END,))
    with pytest.raises(ValueError, match="row 0: 3 completion_ids, and --method cj-grpo reads what follows the EOS"):
        called(replays, GOOD | STEPS)


@pytest.mark.parametrize("lie", ["tokens", "logprobs"])
def test_an_engine_that_lies_about_a_row_is_found_by_its_log_probabilities(tiny_model_dir, tmp_path, lie):
    honest = engine("steps", "logprobs")

    def lying(prompts, trainer):
        told = honest(prompts, trainer)
        if lie == "tokens":
            ids = told["completion_ids"]
            told["completion_ids"] = [[8 + (id * 7 + at) % 30 for at, id in enumerate(row)] for row in ids]
        else:
            told["logprobs"] = [[-0.01] * len(row) for row in told["logprobs"]]
        return told

    trainer = make_method(tiny_model_dir, tmp_path, "d1", rollout_func=lying, eos_stop=False)
    with pytest.raises(ValueError, match="rollout_func, row 0: the log-probabilities are not those of") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if not entry.uniform_noise])
def test_an_estimators_views_depend_on_what_it_says_alone(name):
    rows, rest = left_to_right_rows(), {}
    noise = torch.rand(3, *rows.logps.shape, generator=torch.Generator().manual_seed(0))
    rows = replace(rows, logps=-noise[0], entropies=noise[1])
    lengths = {"gen_length": rows.gen_length, "steps": rows.gen_length, "block_length": 4}
    base = ViewSettings(**lengths, sampling=SamplingSettings(**lengths, temperature=1.0))
    choices = [base, replace(base, num_views=2), replace(base, num_views=2, draw_steps="entropy")]
    for settings in [*choices, replace(base, num_views=2, draw_steps="top")]:
        read = {*ESTIMATORS[name].reads(settings)}
        rest = {"reveal_steps": torch.full_like(rows.reveal_steps, -1), "logps": noise[2] * torch.nan}
        rest["entropies"] = rest["logps"]
        assert rest.keys() == ROW_FIELDS.keys()
        assert {*ROW_FIELDS.values()} == {*RECORD}
        unknown = {column: value for column, value in rest.items() if column not in read}

        def draw(rows, settings=settings):
            random = Randomness([keyed_generator(0, row) for row in range(3)], keyed_generator(0), 0, 3)
            return ESTIMATORS[name](rows, random, settings)

        known, without = draw(rows), draw(replace(rows, **unknown))
        assert torch.equal(known.noise, without.noise)
        assert torch.equal(known.weights, without.weights)


# --- A row is scored again --------------------------------------------------------------------------------------------

NUCLEUS = {"temperature": 1.0, "top_p": 0.8, "score_as_sampled": True}
HOW = {"exact": {}, "nucleus": NUCLEUS, "parallel": {"sampler": "parallel", "reveal_level": 0.3}, "blocks": {}}


def sampled(trainer):
    """A rollout of the trainer's own, as `Rescoring` reads it."""
    ids, mask = trainer.left_pad(trainer.encoded([row["prompt"] for row in trainer.train_dataset][:4]))
    return {"prompt_ids": ids, "prompt_mask": mask, **record_and_costs(trainer.sample(ids, mask))[0]}


def check(trainer, batch, exact=True, certain=True, rescoring=None):
    rows = range(len(batch["canvas_ids"]))
    (rescoring or Rescoring(trainer)).check(batch, rows, lambda row: f"engine, row {row}: ", exact, certain)


def changed(batch, name, change):
    return {**batch, name: change(batch[name])}


@pytest.mark.parametrize("case", HOW)
def test_what_the_model_sampled_passes_and_anything_else_does_not(tiny_model_dir, tiny_block_dir, tmp_path, case):
    model = tiny_block_dir if case == "blocks" else tiny_model_dir
    trainer = make_method(model, tmp_path, "d1", eos_stop=False, **HOW[case])
    batch = sampled(trainer)
    before = trainer.computed_tokens.item(), torch.get_rng_state(), trainer.model.training
    check(trainer, batch)
    assert trainer.computed_tokens.item() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert trainer.model.training == before[2]
    wrong = {
        "canvas_ids": lambda ids: torch.where(batch["reveal_steps"] == 0, (ids + 1) % 50 + 8, ids),
        "reveal_steps": lambda steps: steps.max() - steps,
        "rollout_logps": lambda logps: logps - 0.02,
        "rollout_entropies": lambda entropies: entropies + 0.02,
    }
    for name, change in wrong.items():
        with pytest.raises(ValueError, match=re.escape("engine, row 0: the ")):
            check(trainer, changed(batch, name, change))


def test_in_16_bits_small_differences_pass_and_wrong_rows_do_not(tiny_model_dir, tmp_path):
    trainer = make_method(tiny_model_dir, tmp_path, "d1", eos_stop=False)
    batch = sampled(trainer)
    check(trainer, changed(batch, "rollout_logps", lambda logps: logps - 0.1), exact=False)
    with pytest.raises(ValueError, match="other weights, settings or tokens"):
        check(trainer, changed(batch, "rollout_logps", lambda logps: logps * 0.1), exact=False)


@pytest.mark.parametrize("why", ["older weights", "a cache", "guidance"])
def test_where_a_difference_is_expected_it_is_at_most_a_warning(tiny_model_dir, tmp_path, caplog, why):
    changes = {"a cache": {"sampler": "cached"}, "guidance": {"cfg_scale": 1.0}}.get(why, {})
    trainer = make_method(tiny_model_dir, tmp_path, "d1", eos_stop=False, **changes)
    batch = changed(sampled(trainer), "rollout_logps", lambda logps: logps * 0.1)
    rescoring = Rescoring(trainer)
    with caplog.at_level(logging.WARNING, "d1.serve.rescoring"):
        for _ in range(2):
            check(trainer, batch, certain=why != "older weights", rescoring=rescoring)
    assert sum("engine, row 0" in message for message in caplog.messages) == (why != "guidance")


def test_every_state_of_a_row_has_its_turn(tiny_model_dir, tiny_block_dir, tmp_path):
    longer = {"max_completion_length": 24, "diffusion_steps": 24}
    for model in (tiny_model_dir, tiny_block_dir):
        trainer = make_method(model, tmp_path, "d1", eos_stop=False, **longer)
        one = {name: column[:1] for name, column in sampled(trainer).items()}
        scored = [states_of(one, trainer.blocks, number).weights for number in range(24)]
        assert all(weights.shape[1] <= MAX_STATES for weights in scored)
        assert all((weights.sum(1) <= 1).all() for weights in scored)
        assert torch.stack([weights.sum(1) for weights in scored]).amax(0).min() == 1
