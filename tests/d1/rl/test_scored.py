"""Which tokens of a rollout count, which update uses which view, and the distribution under which tokens are scored."""

from collections import Counter

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.batch import LOSS_MASKS, RankView, filter_groups, sampled_rows, select_prompt_share, views_of
from d1.rl.bridge import rollout_buffer
from d1.rl.methods import METHODS
from d1.rl.trainer import DiffuGRPOTrainer
from d1.scoring import ESTIMATORS, Randomness
from tests.rounding import LOGITS, assert_near, rounding
from tests.tiny_grpo import by_letter, logged, make_method

PAD, MASK, CANVAS = 0, 3, 8
ENDS = (PAD, 2, 25, 28, 32)
SPLIT = [name for name in METHODS if METHODS[name].values["split_views"]]


def sampled_batch(model_dir, folder, method, **changes):
    """A trainer after one step, and its rollout."""
    options = {"per_device_train_batch_size": 12, "max_steps": 1, "learning_rate": 0.0, "right_share": None}
    trainer = make_method(model_dir, folder, method, ends=ENDS, **(options | changes))
    trainer.train()
    return trainer, rollout_buffer(trainer)[0]


def scored_in_a_loop(name, ids, steps):
    """The value of `LOSS_MASKS[name]` for one row, token by token."""
    end = next((position for position, token in enumerate(ids) if token in ENDS), len(ids))
    last = max((step for token, step in zip(ids, steps, strict=True) if token not in ENDS), default=-1)
    for position, (token, step) in enumerate(zip(ids, steps, strict=True)):
        if name == "steps":
            yield 0 <= step <= last
        elif name == "drawn":
            yield step >= 0
        elif name == "text":
            yield position <= end and token != PAD
        elif name == "unpadded":
            yield token != PAD
        else:
            yield name == "canvas" or position <= end


@pytest.mark.parametrize("name", LOSS_MASKS)
def test_scored_tokens_are_those_of_a_loop_over_a_real_rollout(tiny_model_dir, tmp_path, name):
    trainer, batch = sampled_batch(tiny_model_dir, tmp_path, "agrpo", scored_tokens=name)
    after_the_end = name in ("steps", "canvas", "unpadded")
    assert trainer.eos_stop == (not after_the_end)
    assert (batch["reveal_steps"] < 0).any() == trainer.eos_stop
    columns = zip(batch["canvas_ids"].tolist(), batch["reveal_steps"].tolist(), strict=True)
    expected = torch.tensor([[*scored_in_a_loop(name, *row)] for row in columns])
    width = batch["completion_mask"].shape[1]
    assert torch.equal(batch["completion_mask"].bool(), expected[:, :width])
    assert not expected[:, width:].any()
    assert torch.equal(batch["completion_ids"][expected[:, :width]], batch["canvas_ids"][expected])
    assert batch["num_items_in_batch"] == expected.sum()
    ended = torch.tensor([[*scored_in_a_loop("ended", ids, ids)] for ids in batch["canvas_ids"].tolist()])
    assert torch.equal(expected, ended) == (name == "ended")
    if after_the_end:
        with pytest.raises(ValueError, match=f"scored_tokens {name} counts tokens after an EOS"):
            make_method(tiny_model_dir, tmp_path, "agrpo", scored_tokens=name, eos_stop=True)


def of_even_letters(completions, letter, **columns):
    return [float(ord(one) % 2 == 0) for one in letter]


of_even_letters.is_accuracy = True


def test_rows_that_are_out_of_the_loss_stay_out_when_the_canvas_is_scored(tiny_model_dir, tmp_path):
    """Completions without an end, which TRL drops, and those of prompts that are too easy."""
    trainer, batch = sampled_batch(
        tiny_model_dir,
        tmp_path,
        "egspo",
        mask_truncated_completions=True,
        right_share=[0.0, 0.5],
        reward=[by_letter, of_even_letters],
    )
    taking_part = []
    for row, ids in enumerate(batch["canvas_ids"].tolist()):
        prompt = trainer.processing_class.decode(batch["prompt_ids"][row], skip_special_tokens=True).replace(" ", "")
        taking_part.append(ord(prompt[-1]) % 2 == 1 and any(token in ENDS for token in ids))
    assert {True, False} == {*taking_part}
    assert batch["completion_mask"].tolist() == [[int(counts)] * CANVAS for counts in taking_part]
    assert batch["num_items_in_batch"] == sum(taking_part) * CANVAS
    weights = batch["view_weights"].tolist()
    for update in range(2):
        views = sum(any(view) for row in weights for view in row[update])
        assert batch["scoring_views"][:, update].tolist() == [views] * 12
        pairs = sum(weight != 0 for row in weights for view in row[update] for weight in view)
        assert batch["scored_pairs"][:, update].tolist() == [pairs] * 12
        assert batch["repeated_tokens"][:, update].tolist() == [views * CANVAS] * 12
    active = sum(counts and advantage != 0 for counts, advantage in zip(taking_part, batch["advantages"], strict=True))
    assert batch["active_rows"].tolist() == [active] * 12


def test_a_share_of_the_prompts_is_kept_by_spread_then_solved_then_the_longest():
    """Eight prompts of three completions: 3 with different rewards, 2 solved, 3 not, of 1 + n steps (RLDF's filter)."""
    reward = [[0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [2, 0, 1], [0.5] * 3, [0, 0, 0], [1, 0, 0]]
    differ, solved, unsolved = [0, 4, 7], [1, 5], [3, 6, 2]  # the longest first
    steps = torch.zeros(24, 6, dtype=torch.long)
    for number, most in ((2, 1), (3, 3), (6, 2), (1, 5)):
        for row in range(3 * number, 3 * number + 3):
            steps[row] = torch.arange(6).clamp(max=most + row % 3)
    mask = torch.ones(24, 6, dtype=torch.long)
    mask[9:12, 4:], steps[9:12, 4:] = 0, 9  # not scored: these steps do not count
    for kept in range(1, 9):
        chosen = Counter()
        for seed in range(200):
            batch = {"completion_reward": torch.tensor(reward).flatten(), "reveal_steps": steps}
            batch |= {"completion_mask": mask.clone(), "advantages": torch.zeros(24)}
            ranks = RankView(all_gather=lambda values: values, rank_offset=0)
            selected = select_prompt_share(batch, kept / 8 - 0.01, 3, ranks, keyed_generator(seed))
            assert filter_groups(batch, selected, 3, ranks) == kept / 8
            rows = batch["completion_mask"].any(1).view(8, 3)
            assert torch.equal(rows.all(1), rows.any(1))
            assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
            chosen.update(rows.all(1).nonzero().flatten().tolist())
        ordered = [differ[:kept], solved[: max(0, kept - 3)], unsolved[: max(0, kept - 5)]]
        for kind, some in zip((differ, solved), ordered, strict=False):
            for prompt in kind:  # at random
                assert abs(chosen[prompt] / 200 - len(some) / len(kind)) < 0.15
        assert {prompt for prompt in unsolved if chosen[prompt]} == {*ordered[2]}


def test_a_share_of_the_prompts_is_chosen_among_those_that_are_not_dropped(tiny_model_dir, tmp_path):
    """Half of four prompts, of which two are too easy although their rewards differ; then of which three are."""

    class Kept(DiffuGRPOTrainer):
        def after_rollout(self, batch):
            super().after_rollout(batch)
            self.kept = batch["completion_mask"].any(1).view(4, 4).any(1).tolist()

    for easy, share in ((2, 0.5), (3, 0.25)):

        def accuracy(completions, easy=easy, **columns):
            return [1.0] * 4 * easy + [1.0, 0.0, 1.0, 0.0] * (4 - easy)

        def reward(completions, **columns):
            return [1.0, 2.0, 3.0, 4.0] * 4

        accuracy.is_accuracy = True
        options = {"right_share": [0.2, 0.8], "prompt_share": 0.5, "max_steps": 1, "per_device_train_batch_size": 16}
        options |= {"reward": [reward, accuracy], "num_generations": 4, "seed": easy, "num_iterations": 1}
        trainer, _ = sampled_batch(tiny_model_dir, tmp_path / str(easy), "rldf", cls=Kept, **options)
        assert trainer.kept == [False] * easy + [True] * (4 - easy)
        assert logged(trainer)[0]["prompts_kept"] == share


class Watched(DiffuGRPOTrainer):
    """Keeps the views of all updates together, and the inputs of each loss."""

    def after_rollout(self, batch):
        super().after_rollout(batch)
        rows = len(batch["canvas_ids"])
        random = Randomness(self.generators("views", rows), keyed_generator(*self.key("views"), rows + 2), 0, rows)
        self.whole = ESTIMATORS[self.args.estimator](
            sampled_rows(batch, self.blocks), random, self.args.view_settings()
        )
        batch["uid"] = torch.arange(rows)
        self.met = []

    def loss(self, model, batch):
        self.met.append((self.update, batch))
        return super().loss(model, batch)


def scoring(views, row):
    """The views of a row that score something, as a multiset."""
    return Counter(
        (str(noise.tolist()), str(weights.tolist()))
        for noise, weights in zip(views.noise[row], views.weights[row], strict=True)
        if weights.any()
    )


@pytest.mark.parametrize("method", SPLIT)
def test_the_updates_on_a_rollout_share_its_views_out(tiny_model_dir, tmp_path, method):
    """Three optimizer steps of two micro-batches: ratio, clip and a KL to the old policy act from the second on."""
    changes = {"num_iterations": 3, "max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    changes |= {"epsilon": 1e-4, "epsilon_high": 1e-4, "right_share": None}
    changes |= {"segment_steps": 2} if "segment_steps" in METHODS[method].values else {}
    trainer = make_method(tiny_model_dir, tmp_path, method, Watched, **changes)
    trainer.train()
    assert [update for update, _ in trainer.met] == [0, 0, 1, 1, 2, 2]
    found, per_update = [Counter() for _ in range(8)], Counter()
    for update, batch in trainer.met:
        for row, uid in enumerate(batch["uid"].tolist()):
            own = scoring(views_of(batch, update), row)
            found[uid] += own
            per_update[update] += own.total()
    assert found == [scoring(trainer.whole, row) for row in range(8)]
    assert max(per_update.values()) - min(per_update.values()) <= 1

    start = load_model(str(tiny_model_dir)).eval()
    for update, batch in trainer.met:
        with torch.no_grad():
            old = trainer.scores(start, batch, views_of(batch, update)).view_logps
        assert_near(batch["old_view_logps"][:, update], old, least=LOGITS)
    first, *later = logged(trainer)
    assert first["ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))
    assert first["clip_ratio/region_mean"] == 0
    assert min(abs(entry["ratio_max"] - 1) for entry in later) > 1e-3
    assert min(entry["clip_ratio/region_mean"] for entry in later) > 0
    assert first["kl"] == pytest.approx(0.0, abs=rounding(LOGITS) ** 2)
    assert min(entry["kl"] for entry in later) > 1e-9


@pytest.mark.parametrize("method", ["agrpo", "agrpo-entropy"])
def test_only_scoring_as_sampled_has_ratios_of_one(tiny_model_dir, tmp_path, method):
    """With steps drawn, and the method's own temperature, nucleus and random order."""
    largest = {}
    for as_sampled in (True, False):
        change = {"top_k": 20, "score_as_sampled": as_sampled, "sampling_weight_cap": 1.5}
        trainer, _ = sampled_batch(tiny_model_dir, tmp_path, method, **change)
        assert (trainer.args.temperature, trainer.args.top_p, trainer.args.remasking) == (0.6, 0.99, "random")
        [entry] = logged(trainer)
        largest[as_sampled] = entry["ratio_max"], entry["sampling/ratio_max"]
    assert largest[True] == pytest.approx((1.0, 1.0), abs=rounding(LOGITS))
