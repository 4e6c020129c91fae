"""diffu-GRPO's invariants, on a real trainer with a tiny model: masks, ratios, references, padding, random state."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl.trainer.grpo_trainer as trl_grpo
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AddedToken

from d1.models import load_model
from d1.models.head import NotFiniteError
from d1.rl.batch import sampled_rows, special_tokens
from d1.rl.bridge import rollout_buffer
from d1.rl.trainer import DiffuGRPOTrainer
from d1.scoring import mean_field_logps
from tests.faults import with_nan
from tests.rounding import LOGITS, TOKENS, assert_near, rounding
from tests.tiny_grpo import assert_same, by_letter, logged, make_trainer, train_a_little, weights

COMBINATIONS = [(a, g, m) for a in (1, 2, 3, 4) for g in sorted({1, a, 2 * a}) for m in (1, 2, 4, 12)]


@pytest.mark.parametrize("mu", [1, 2])
def test_accumulation_changes_neither_rollouts_nor_updates(tiny_model_dir, tmp_path, mu):
    """Rows per micro-batch x micro-batches per step: the same 16 rows of each rollout, prompt by prompt."""
    runs = []
    for rows in (16, 4, 1):
        split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows}
        runs.append(train_a_little(tiny_model_dir, tmp_path, "d1", num_iterations=mu, max_steps=2 * mu + 1, **split))
    assert len(runs[0].rollouts) == 3
    assert runs[0].rollouts[1] != runs[0].rollouts[2]
    expected = weights(runs[0].model)
    for run in runs[1:]:
        assert run.rollouts == runs[0].rollouts
        for name, value in weights(run.model).items():
            assert_near(value, expected[name], terms=TOKENS)


@pytest.mark.parametrize(("prompts", "masked"), [(4, True), (1, False)])
def test_all_scorings_of_a_rollout_have_a_mask_or_none_has(tiny_model_dir, tmp_path, prompts, masked):
    """A GPU's kernels with and without a mask differ by rounding, and the first ratio would not be 1. Before TRL mixes
    the rows, a batch is the completions of one prompt: those of the longest have no padding."""
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 2}
    trainer = make_trainer(tiny_model_dir, tmp_path, num_generations=4 * 4 // prompts, **split)
    given, score = [], trainer.scores

    def note(_, args, kwargs):
        given.append(kwargs.get("attention_mask") is not None)

    def scores(*args, **kwargs):
        with trainer.model.base_model.register_forward_pre_hook(note, with_kwargs=True, prepend=True):
            return score(*args, **kwargs)

    trainer.scores = scores
    trainer.train()
    assert given == [masked] * 2 * (4 + 4)  # old and new log-probs, for both updates


@pytest.mark.parametrize(("accumulation", "per_generation", "mu"), COMBINATIONS)
def test_each_rollout_has_random_numbers_of_its_own_however_it_is_split(accumulation, per_generation, mu):
    def keys(split, refill=0):
        """For twelve rollouts whose micro-batches are split into this number of parts."""
        args = {"gradient_accumulation_steps": split * accumulation, "steps_per_generation": split * per_generation}
        cycle = args["steps_per_generation"] * mu
        trainer = SimpleNamespace(mode="train", micro_steps_per_rollout=cycle, args=SimpleNamespace(seed=42, **args))
        trainer.refill = refill
        for rollout in range(12):
            trainer.micro_step = rollout * cycle
            yield from (DiffuGRPOTrainer.key(trainer, purpose) for purpose in ("views", "rollout"))

    found = list(keys(1))
    assert len(set(found)) == 2 * 12
    assert list(keys(4)) == found
    again = [*keys(1, refill=1), *keys(1, refill=2)]
    assert len({*found, *again}) == 3 * 2 * 12
    assert [*keys(4, refill=1), *keys(4, refill=2)] == again
    assert [step for _, _, step in found[::2]] == [n * per_generation * mu // accumulation for n in range(12)]
    if accumulation == 1:  # unchanged from earlier versions
        cycle = per_generation * mu
        assert found == [(42, stream, n * cycle) for n in range(12) for stream in (0, 1)]


def test_what_rows_share_has_random_numbers_that_no_row_has(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    rows = 4
    ranks = trainer.rank_view({"advantages": torch.zeros(rows)})
    seeds = []
    for purpose in ((), (7,)):
        random_numbers = trainer.randomness(rows, ranks, *purpose)
        generators = [*random_numbers.generators, random_numbers.shared]
        seeds += [generator.initial_seed() for generator in generators]
    assert len({*seeds}) == 2 * (rows + 1)


def test_dropout_is_off_in_rollouts_and_scoring(tiny_model_dir, tmp_path):
    options = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]}
    adapter = LoraConfig(lora_dropout=0.5, **options)
    trainer = make_trainer(tiny_model_dir, tmp_path, peft_config=adapter, max_steps=1)
    trainer.train()
    assert logged(trainer)[0]["ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))


def test_training_in_mixed_precision_casts_no_input_of_lora(tiny_model_dir, tmp_path, monkeypatch):
    """Rollouts, scores and updates equal those with PEFT's casts, to the bit."""
    cast, inputs = BaseTunerLayer._cast_input_dtype, []

    def note(layer, x, dtype):
        done = cast(layer, x, dtype)
        inputs.append((x.dtype, done.dtype))
        return done

    monkeypatch.setattr(BaseTunerLayer, "_cast_input_dtype", note)
    runs = {}
    for skips in (True, False):
        if not skips:
            monkeypatch.setattr("d1.runs.trainer.skip_input_casts", lambda model: None)
        torch.manual_seed(0)
        adapter = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])
        options = {"bf16": True, "use_cpu": True, "learning_rate": 1e-2, "max_steps": 3}
        model = load_model(str(tiny_model_dir), torch.bfloat16)
        runs[skips] = make_trainer(tiny_model_dir, tmp_path, model=model, peft_config=adapter, **options)
        runs[skips].train()
        casts = {before != after for before, after in inputs if before == torch.bfloat16}
        assert casts == {not skips}
        inputs.clear()
    assert_same(runs[True], runs[False])
    assert all(value.any() for name, value in weights(runs[True].model).items() if "lora_B" in name)


def test_without_random_masking_updates_share_a_mask_and_equal_masks_are_scored_once(tiny_model_dir, tmp_path):
    calls = []

    class Counting(DiffuGRPOTrainer):
        def scores(self, *args, **kwargs):
            calls.append(torch.is_grad_enabled())
            return super().scores(*args, **kwargs)

    counts = []
    for change in ({}, {"p_mask_prompt": 0.0}, {"random_masking": False}):
        trainer = make_trainer(tiny_model_dir, tmp_path, Counting, num_iterations=4, max_steps=1, **change)
        trainer.train()
        counts.append(calls.count(False))  # old and reference log-probs, before the update's own
        calls.clear()
    assert counts == [2 * 4, 2, 2]
    masks = rollout_buffer(trainer)[0]["view_noise"]
    assert (masks == masks[:, :1]).all()
    assert masks[..., : rollout_buffer(trainer)[0]["prompt_ids"].shape[1]].any()
    assert not torch.equal(masks[0], masks[1])  # each sample has its own


def test_masks_and_rollouts_leave_the_global_random_state_alone(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    trainer.model.train()
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    trainer.rollout([[1, 5, 9, 6], [1, 5, 6]])
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_special_tokens_are_masked_unless_protected(tiny_model_dir, tmp_path):
    for protect in (False, True):
        options = {"p_mask_prompt": 0.9, "max_steps": 1, "protect_special_tokens": protect}
        trainer = make_trainer(tiny_model_dir, tmp_path, **options)
        trainer.processing_class.add_tokens(AddedToken("<header>", special=True))  # flagged, but without effect
        header = trainer.processing_class.convert_tokens_to_ids("<header>")
        assert header not in trainer.processing_class.all_special_ids
        found = special_tokens(torch.tensor([[1, 9, header]]), trainer.processing_class)
        assert found.tolist() == [[True, False, True]]
        trainer.train()
        batch = rollout_buffer(trainer)[0]
        hidden = batch["view_noise"][:, 0, 0, : batch["prompt_ids"].shape[1]]
        special = torch.isin(batch["prompt_ids"], torch.tensor(trainer.processing_class.all_special_ids))
        padding = batch["prompt_mask"] == 0
        assert not hidden[padding].any()
        assert hidden[~special & ~padding].any()
        assert hidden[special & ~padding].any().item() is not protect

    # With tools, the batch says which tokens are maskable: it stays as it is.
    maskable = batch["prompt_mask"].bool()
    rows = sampled_rows(batch | {"maskable": maskable}, trainer.blocks, trainer.processing_class)
    assert torch.equal(rows.maskable, maskable & ~special)
    assert torch.equal(maskable, batch["prompt_mask"].bool())


METRICS = {"reward", "reward_std", "frac_reward_zero_std", "kl", "ratio_max", "entropy", "prompt_masked"}
METRICS |= {"rewards/letter_share/mean", "rewards/letter_share/std", "clip_ratio/region_mean", "peak_memory_gb"}
METRICS |= {"completions/mean_length", "completions/clipped_ratio", "rollout_tokens_per_second"}
METRICS |= {f"seconds/{part}" for part in ("rollout", "reward", "scoring", "update")}


@pytest.mark.parametrize("lora", [False, True])
def test_three_steps_change_every_parameter_and_pull_to_the_model_in_memory(tiny_model_dir, tmp_path, lora):
    """Its head is no longer that of its folder, from which the reference must not come."""
    model = load_model(str(tiny_model_dir))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if lora else None
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(tiny_model_dir, tmp_path, model=model, peft_config=adapter, max_steps=3, beta=0.1)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    assert before.keys() == after.keys()
    assert len(before) == (8 if lora else 21)
    for name, value in before.items():
        assert not torch.equal(value, after[name]), f"{name} did not change"
    entries = logged(trainer)
    assert len(entries) == 3
    assert entries[0].keys() >= METRICS
    assert entries[0]["ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))
    assert entries[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert entries[-1]["kl"] > 1e-6
    if not lora:
        assert all(torch.equal(start[name], value) for name, value in trainer.ref_model.named_parameters())
    assert make_trainer(tiny_model_dir, tmp_path, beta=0.0).ref_model is None


def test_the_lora_reference_is_the_model_without_its_adapter(tiny_model_dir, tmp_path):
    adapter = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(tiny_model_dir, tmp_path, peft_config=adapter, beta=0.1, max_steps=1)
    trainer.train()
    batch = rollout_buffer(trainer)[0]
    base = load_model(str(tiny_model_dir))
    for update in range(2):
        ids = [batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids")]
        noise = batch["view_noise"][:, update, 0, : batch["prompt_ids"].shape[1]]
        expected = mean_field_logps(base, *ids, noise, mask_token_id=trainer.mask_token_id, gen_length=8)
        scored = batch["completion_mask"].bool()  # up to each row's EOS
        found = batch["ref_view_logps"][:, update, 0, : scored.shape[1]]
        assert_near(found[scored], expected[scored], least=LOGITS)


def test_syncing_the_reference_works_in_full_fine_tuning_and_is_refused_with_lora(tiny_model_dir, tmp_path):
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "beta": 0.1}
    trainer = make_trainer(tiny_model_dir, tmp_path, max_steps=2, **sync)
    trainer.train()
    for value, reference in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(value, reference)
    with pytest.raises(NotImplementedError, match="PEFT"):
        make_trainer(tiny_model_dir, tmp_path, peft_config=LoraConfig(target_modules=["q_proj"]), **sync)


@pytest.mark.parametrize(
    "options",
    [
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "beta": 0.1},
        {"log_completions": True, "num_iterations": 3, "gradient_accumulation_steps": 2, "logging_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 3, "steps_per_generation": 1},
    ],
    ids=["a synced reference", "completions", "evaluations"],
)
def test_a_run_resumed_in_mid_cycle_equals_an_unbroken_one(tiny_model_dir, tmp_path, options):
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, **options}
    whole = make_trainer(tiny_model_dir, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(tiny_model_dir, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(whole, resumed)
    for table in (tmp_path / "resumed" / "completions").glob("*.parquet"):
        assert table.read_bytes() == (tmp_path / "whole" / "completions" / table.name).read_bytes()


def test_the_completions_of_a_rollout_are_logged_once(tiny_model_dir, tmp_path, monkeypatch):
    """Two rollouts with three updates each, and an evaluation after the third update."""
    printed = []
    monkeypatch.setattr(trl_grpo, "print_prompt_completions_sample", lambda *given, **_: printed.append(given[4:6]))
    options = {"log_completions": True, "num_iterations": 3, "logging_steps": 1, "max_steps": 6}
    trainer = make_trainer(tiny_model_dir, tmp_path, eval_strategy="steps", eval_steps=3, **options)
    trainer.train()
    assert printed == [(1, 4), (3, 4), (4, 4), (6, 4)]  # the step, and at most how many are printed
    assert sorted(path.name[-13:-8] for path in (tmp_path / "completions").iterdir()) == [
        "00001",
        "00003",
        "00004",
        "00006",
    ]
    assert len([log for log in trainer.state.log_history if "loss" in log]) == 6  # numbers are logged each time


def test_two_evaluations_see_the_same_random_numbers(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_reward"] == second["eval_reward"]


def test_predictions_and_failed_evaluations_change_no_later_evaluation(tiny_model_dir, tmp_path):
    fails = []

    def constant_or_letter(completions, **columns):
        if fails:
            raise ZeroDivisionError
        return [1.0] * len(completions) if columns["constant"][0] else by_letter(completions, **columns)

    trainer = make_trainer(tiny_model_dir, tmp_path, reward=constant_or_letter)
    rows = trainer.eval_dataset.add_column("constant", [False] * len(trainer.eval_dataset))
    expected = trainer.evaluate(rows)["eval_reward"]
    trainer.predict(rows.remove_columns("constant").add_column("constant", [True] * len(rows)))
    assert trainer.evaluate(rows)["eval_reward"] == expected
    fails.append(True)
    with pytest.raises(RuntimeError):
        trainer.evaluate(rows)
    fails.clear()
    assert trainer.evaluate(rows)["eval_reward"] == expected


def test_training_again_after_a_resume_begins_anew(tiny_model_dir, tmp_path):
    """The second call does not return to the checkpoint's rollout."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    unbroken = make_trainer(tiny_model_dir, tmp_path, **options)
    unbroken.train()
    resumed = make_trainer(tiny_model_dir, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for run in (unbroken, resumed):
        run.train()
    assert [log["step"] for log in resumed.state.log_history if "loss" in log] == [1, 2]
    for name, value in weights(resumed.model).items():
        assert_near(value, weights(unbroken.model)[name], terms=TOKENS)


def test_an_evaluation_is_a_mean_over_rows_also_if_its_last_batch_is_smaller(tiny_model_dir, tmp_path):
    """Four problems of four completions: a batch of 12 and one of 4."""
    rewards = []

    class Kept(DiffuGRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            rewards.append(super()._calculate_rewards(*args, **kwargs))
            return rewards[-1]

    trainer = make_trainer(tiny_model_dir, tmp_path, Kept, reward=by_letter, per_device_eval_batch_size=12)
    evaluation = trainer.evaluate()
    assert [len(of_batch) for of_batch in rewards] == [12, 4]
    assert evaluation["eval_reward"] == pytest.approx(torch.cat(rewards).mean().item())
    assert evaluation["eval_rewards/by_letter/mean"] == evaluation["eval_reward"]


def test_a_prompt_that_is_too_long_is_refused_unless_it_may_be_cut(tiny_model_dir, tmp_path):
    """Prompts have 26 tokens and more: the beginning of each would be missing."""
    short = {"max_prompt_length": 20, "max_steps": 1}
    with pytest.raises(ValueError, match=r"a prompt has \d\d tokens, more than max_prompt_length=20: raise .*, or set"):
        make_trainer(tiny_model_dir, tmp_path, **short).train()
    trainer = make_trainer(tiny_model_dir, tmp_path, truncate_prompts=True, **short)
    trainer.train()
    assert rollout_buffer(trainer)[0]["prompt_mask"].sum(1).tolist() == [20] * 4


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 1}])
def test_too_few_prompts_for_a_rollout_are_refused(tiny_model_dir, tmp_path, length):
    """Trainer would end at step 0, or ask for a positive max_steps."""
    trainer = make_trainer(tiny_model_dir, tmp_path, per_device_train_batch_size=52, **length)
    with pytest.raises(ValueError, match="a rollout needs 13 prompts and there are 12: lower per_device_train_batch"):
        trainer.train()


def test_rewards_see_what_trl_shows_them(tiny_model_dir, tmp_path):
    seen = {}

    def curious(**columns):
        seen.update(columns)
        return [0.0] * len(columns["completions"])

    make_trainer(tiny_model_dir, tmp_path, reward=curious, max_steps=1).train()
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    own.add("tokens_per_forward_pass")  # which TRL has not
    assert seen.keys() == {"letter", "trace"} | own
    assert all(len(seen[name]) == 4 for name in ("prompts", "completions", "completion_ids", "letter"))


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_its_rows(tiny_model_dir, tmp_path):
    class Poison(DiffuGRPOTrainer):
        """Makes the third row of the second step's batch infinite."""

        def loss(self, model, batch):
            if self.state.global_step == 1:
                batch = {**batch, "advantages": batch["advantages"].clone()}
                batch["advantages"][2] = torch.inf
                kept = batch["completion_mask"][2].bool()
                self.poisoned = self.text_tokenizer.decode(batch["completion_ids"][2][kept])
            return super().loss(model, batch)

    trainer = make_trainer(tiny_model_dir, tmp_path, Poison, max_steps=4)
    with pytest.raises(FloatingPointError, match=r"became (nan|-?inf) at step 1"):
        trainer.train()
    [row] = json.loads((tmp_path / "bad_loss_step1_rank0.json").read_text())
    assert row["completion"] == trainer.poisoned
    assert row["prompt"].startswith("<bos>")


def test_weights_that_are_not_finite_stop_the_run_at_its_next_rollout(tiny_model_dir, tmp_path):
    damaged = with_nan(tiny_model_dir, tmp_path / "model", "model.layers.1.self_attn.o_proj.weight", (0, 0))
    with pytest.raises(NotFiniteError, match=r"^row 0: .*comes from model\.layers\.1\.self_attn\.o_proj, whose weight"):
        make_trainer(damaged, tmp_path / "run").train()
