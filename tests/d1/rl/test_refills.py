"""Prompts that are dropped from a rollout are replaced by the next ones: against the rule written out, and a resume."""

from __future__ import annotations

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.batch import completion_ids_of, strip_padding
from d1.rl.trainer import DiffuGRPOTrainer
from d1.sampling import rollout
from tests.tiny_grpo import TWO_BATCHES_A_STEP, assert_same, is_even, make_method, weights

GROUP, PROMPTS = 4, 3  # of a rollout


class Kept(DiffuGRPOTrainer):
    """Keeps the prompts and canvases of each rollout's rows, and which rows count."""

    def after_rollout(self, batch):
        super().after_rollout(batch)
        prompts = strip_padding(batch["prompt_ids"], batch["prompt_mask"])
        counts = batch["completion_mask"].any(1).tolist()
        rows = [*zip(prompts, batch["canvas_ids"].tolist(), counts, strict=True)]
        self.__dict__.setdefault("rollouts", []).append(rows)


def kept_prompts(trainer, model, number, refill):
    """Of batch `number` of the order, sampled as a refill of the first rollout: the rows of prompts that are kept."""
    rows = trainer.rows_of(number)
    ids, mask = trainer.left_pad(trainer.encoded([row["prompt"] for row in rows]))
    draws = [keyed_generator(trainer.args.seed, 1 + 4 * refill, 0, row) for row in range(len(rows))]
    options = {"mask_token_id": trainer.mask_token_id, "eos_token_ids": trainer.stop_token_ids or None}
    options |= {"generator": draws}
    canvas = rollout(model, ids, mask, trainer.sampling, **options).ids[:, ids.shape[1] :]
    texts = trainer.text_tokenizer.batch_decode(
        completion_ids_of(canvas, trainer.eos_token_ids), skip_special_tokens=True
    )
    right = is_even([[{"role": "assistant", "content": text}] for text in texts])
    found = [*zip(strip_padding(ids, mask), canvas.tolist(), strict=True)]
    groups = [slice(start, start + GROUP) for start in range(0, len(found), GROUP)]
    return [found[group] for group in groups], [0 < sum(right[group]) < GROUP for group in groups]


@pytest.mark.parametrize("refills", [1, 12])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_dropped_prompts_are_replaced_by_the_next_ones_that_are_kept(tiny_block_dir, tmp_path, refills, seed):
    options = {"per_device_train_batch_size": GROUP * PROMPTS, "num_generations": GROUP, "max_steps": 1, "seed": seed}
    trainer = make_method(tiny_block_dir, tmp_path, "dipo", Kept, **options, refills=refills, num_iterations=1)
    model = load_model(str(tiny_block_dir)).eval()
    groups, kept = kept_prompts(trainer, model, 0, 0)
    used = 0
    while not all(kept) and used < refills:
        used += 1
        for group, keep in zip(*kept_prompts(trainer, model, used, used), strict=True):
            if keep and not all(kept):
                free = kept.index(False)
                groups[free], kept[free] = group, True
    trainer.train()
    (rows,) = trainer.rollouts
    assert [(prompt, canvas) for prompt, canvas, _ in rows] == [row for group in groups for row in group]
    assert [counts for *_, counts in rows] == [keep for keep in kept for _ in range(GROUP)]
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert (entry["sampling/refills"], entry["prompts_kept"]) == (used, pytest.approx(sum(kept) / PROMPTS))
    assert trainer.num_sampled_batches == 1 + used


def test_a_resumed_run_goes_on_with_the_next_prompts(tiny_block_dir, tmp_path):
    options = TWO_BATCHES_A_STEP | {"per_device_train_batch_size": 6, "num_iterations": 1, "max_steps": 4}

    whole = make_method(tiny_block_dir, tmp_path / "whole", "dipo", Kept, **options)
    whole.train()
    resumed = make_method(tiny_block_dir, tmp_path / "resumed", "dipo", Kept, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert whole.num_sampled_batches > 4
    assert resumed.rollouts == whole.rollouts[2:]
    assert_same(whole, resumed)


def test_the_prompts_of_a_run_follow_the_order_whatever_is_dropped(tiny_block_dir, tmp_path):
    """All are kept if the shares allow it; then refills change nothing, to the bit."""
    options = {"per_device_train_batch_size": 12, "right_share": [0.0, 1.0], "max_steps": 3, "num_iterations": 1}
    runs = []
    for refills in (0, 3):
        runs.append(make_method(tiny_block_dir, tmp_path / str(refills), "dipo", Kept, refills=refills, **options))
        runs[-1].train()
    assert runs[0].rollouts == runs[1].rollouts
    expected, found = (weights(trainer.model) for trainer in runs)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
