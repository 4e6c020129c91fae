"""diffu-GRPO's invariants, on a real trainer with a tiny model: masks, ratios, references, padding, random state."""

import json
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AddedToken, TrainerCallback

from d1.models import load_model
from d1.rl import trainer as diffu_grpo_trainer
from d1.rl.bridge import rollout_buffer
from d1.rl.state import save_rollout
from d1.rl.trainer import DiffuGRPOTrainer
from d1.rl.updates import special_tokens
from d1.runs.checkpoints import checkpoint_to_resume
from tests.tiny_grpo import clockless, logged, make_trainer, train_a_little, weights


class Recorder(DiffuGRPOTrainer):
    """Records which views each sample has in each loss, and the ratios."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.met, self.ratios, self.cycle, self.scored = [], [], 0, []

    def after_rollout(self, batch):
        super().after_rollout(batch)
        if self.model.training:
            self.cycle += 1
            batch["uid"] = torch.arange(len(batch["prompt_ids"])) + 1000 * self.cycle

    def scores(self, model, batch, views, **options):
        scores = super().scores(model, batch, views, **options)
        if torch.is_grad_enabled():
            self.scored.append((views, scores.logps.detach()))
        return scores

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if self.model.training:
            views, logps = self.scored.pop()
            for row, uid in enumerate(batch["uid"].tolist()):
                of = range(self.num_iterations)
                update = [k for k in of if torch.equal(batch["view_noise"][row, k], views.noise[row])]
                hidden = views.noise[row, :, : batch["prompt_ids"].shape[1]].sum().item()
                self.met.append((uid, update[0], hidden))
            update = self.micro_step // self.args.steps_per_generation % self.num_iterations
            old = batch.get("old_view_logps")
            if old is not None:
                ratio = (logps - old[:, update, 0]).exp()[:, : batch["completion_mask"].shape[1]][
                    batch["completion_mask"].bool()
                ]
                self.ratios.append((self.micro_step, self.state.global_step, update, ratio))
        return loss


COMBINATIONS = [(a, g, m) for a in (1, 2, 3, 4) for g in sorted({1, a, 2 * a}) for m in (1, 2, 4, 12)]
FAST = [(1, 1, 4), (2, 1, 2), (2, 2, 12), (2, 4, 2), (3, 3, 4), (4, 1, 1), (4, 8, 1)]


def check_each_sample_meets_each_mask_once(tiny_model_dir, folder, accumulation, per_generation, mu):
    """Two full cycles with an evaluation after every optimizer step, hence in mid-cycle."""
    micro_steps = 2 * per_generation * mu
    trainer = make_trainer(
        tiny_model_dir,
        folder,
        Recorder,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=mu,
        max_steps=-(-micro_steps // accumulation),
        eval_strategy="steps",
        eval_steps=1,
        p_mask_prompt=0.5,
    )
    trainer.train()
    cycles = {}
    for uid, index, _ in trainer.met[: micro_steps * 4]:
        cycles.setdefault(uid, Counter())[index] += 1
    assert len(cycles) == 2 * per_generation * 4
    for uid, met in cycles.items():
        assert met == Counter(range(mu)), f"sample {uid} met masks {dict(met)} in a cycle of {mu} updates"


@pytest.mark.parametrize(("accumulation", "per_generation", "mu"), FAST)
def test_each_sample_meets_each_mask_once_in_a_cycle(tiny_model_dir, tmp_path, accumulation, per_generation, mu):
    check_each_sample_meets_each_mask_once(tiny_model_dir, tmp_path, accumulation, per_generation, mu)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "per_generation", "mu"), [c for c in COMBINATIONS if c not in FAST])
def test_each_sample_meets_each_mask_once_in_every_combination(
    tiny_model_dir, tmp_path, accumulation, per_generation, mu
):
    check_each_sample_meets_each_mask_once(tiny_model_dir, tmp_path, accumulation, per_generation, mu)


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
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("accumulation", "per_generation", "mu"), COMBINATIONS)
def test_each_rollout_has_random_numbers_of_its_own_however_it_is_split(accumulation, per_generation, mu):
    def keys(split):
        """For twelve rollouts whose micro-batches are split into this number of parts."""
        args = {"gradient_accumulation_steps": split * accumulation, "steps_per_generation": split * per_generation}
        trainer = SimpleNamespace(mode="train", num_iterations=mu, args=SimpleNamespace(seed=42, **args))
        for rollout in range(12):
            trainer.micro_step = rollout * args["steps_per_generation"] * mu
            yield from (DiffuGRPOTrainer.key(trainer, purpose) for purpose in ("views", "rollout"))

    found = list(keys(1))
    assert len(set(found)) == 2 * 12
    assert list(keys(4)) == found
    assert [step for _, _, step in found[::2]] == [n * per_generation * mu // accumulation for n in range(12)]
    if accumulation == 1:  # unchanged from earlier versions
        cycle = per_generation * mu
        assert found == [(42, stream, n * cycle) for n in range(12) for stream in (0, 1)]


def test_the_ratio_is_one_at_the_first_inner_update_and_only_under_the_right_mask(tiny_model_dir, tmp_path):
    trainer = make_trainer(
        tiny_model_dir, tmp_path, Recorder, num_iterations=4, max_steps=8, gradient_accumulation_steps=1
    )
    trainer.train()
    first = [ratio for _, _, update, ratio in trainer.ratios if update == 0]
    later = [ratio for _, _, update, ratio in trainer.ratios if update > 0]
    assert len(first) == 2
    for ratio in first:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)
    assert min((ratio - 1).abs().max() for ratio in later) > 1e-4

    class WrongMask(Recorder):
        def loss(self, model, batch):
            if self.model.training:
                batch = {**batch, "view_noise": batch["view_noise"].roll(1, dims=1)}
            return super().loss(model, batch)

    trainer = make_trainer(tiny_model_dir, tmp_path, WrongMask, num_iterations=4, max_steps=1, p_mask_prompt=0.6)
    trainer.train()
    assert (trainer.ratios[0][3] - 1).abs().max() > 1e-3


def test_dropout_is_off_in_rollouts_and_scoring(tiny_model_dir, tmp_path):
    adapter = LoraConfig(
        r=4, lora_alpha=64, lora_dropout=0.5, init_lora_weights=False, target_modules=["q_proj", "v_proj"]
    )
    trainer = make_trainer(tiny_model_dir, tmp_path, Recorder, peft_config=adapter, max_steps=1)
    trainer.train()
    ratio = trainer.ratios[0][3]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)


def test_fixed_masking_uses_one_mask_for_all_updates(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, Recorder, random_masking=False, num_iterations=4, max_steps=4)
    trainer.train()
    assert {index for _, index, _ in trainer.met} == {0}
    assert sum(size for _, _, size in trainer.met) > 0
    masks = rollout_buffer(trainer)[0]["view_noise"]
    assert not torch.equal(masks[0], masks[1])  # but each sample has its own


def test_equal_masks_are_scored_once(tiny_model_dir, tmp_path):
    calls = []

    class Counting(DiffuGRPOTrainer):
        def scores(self, *args, **kwargs):
            calls.append(torch.is_grad_enabled())
            return super().scores(*args, **kwargs)

    counts = []
    for change in ({}, {"random_masking": False}, {"p_mask_prompt": 0.0}):
        make_trainer(tiny_model_dir, tmp_path, Counting, num_iterations=4, max_steps=1, **change).train()
        counts.append(calls.count(False))  # old and reference log-probs, before the update's own
        calls.clear()
    assert counts == [2 * 4, 2, 2]


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


METRICS = {
    "reward",
    "reward_std",
    "rewards/letter_share/mean",
    "rewards/letter_share/std",
    "frac_reward_zero_std",
    "kl",
    "clip_ratio/region_mean",
    "ratio_max",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "prompt_masked",
    "rollout_tokens_per_second",
    "seconds/rollout",
    "seconds/reward",
    "seconds/scoring",
    "seconds/update",
    "peak_memory_gb",
}


@pytest.mark.parametrize("lora", [False, True])
def test_ten_steps_change_every_parameter(tiny_model_dir, tmp_path, lora):
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if lora else None
    trainer = make_trainer(tiny_model_dir, tmp_path, peft_config=adapter, max_steps=10)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    assert before.keys() == after.keys()
    assert len(before) == (8 if lora else 21)
    for name, value in before.items():
        assert not torch.equal(value, after[name]), f"{name} did not change"
    entries = logged(trainer)
    assert len(entries) == 10
    assert entries[0].keys() >= METRICS
    assert entries[0]["ratio_max"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("beta", "mu"), [(0.0, 1), (0.0, 2), (0.1, 1), (0.1, 2)])
def test_every_beta_and_mu_works_and_the_reference_is_the_start(tiny_model_dir, tmp_path, beta, mu):
    trainer = make_trainer(tiny_model_dir, tmp_path, beta=beta, num_iterations=mu, max_steps=2 * mu)
    trainer.train()
    entries = logged(trainer)
    if beta == 0:
        assert trainer.ref_model is None
        return
    assert entries[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert entries[-1]["kl"] > 1e-6
    start = load_model(str(tiny_model_dir))
    for (name, value), reference in zip(start.named_parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(value, reference), name


def test_a_full_fine_tunes_reference_comes_from_the_model_in_memory(tiny_model_dir, tmp_path):
    class InMemory(DiffuGRPOTrainer):
        def __init__(self, model, **kwargs):
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)  # no longer equal to its folder's content
            super().__init__(model, **kwargs)

    trainer = make_trainer(tiny_model_dir, tmp_path, InMemory, beta=0.1, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-7)


def test_the_lora_reference_is_the_model_without_its_adapter(tiny_model_dir, tmp_path):
    adapter = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(tiny_model_dir, tmp_path, Recorder, peft_config=adapter, beta=0.1, max_steps=1)
    trainer.train()
    batch = rollout_buffer(trainer)[0]
    base = load_model(str(tiny_model_dir))
    from d1.scoring import mean_field_logps

    for update in range(2):
        expected = mean_field_logps(
            base,
            batch["prompt_ids"],
            batch["prompt_mask"],
            batch["completion_ids"],
            batch["view_noise"][:, update, 0, : batch["prompt_ids"].shape[1]],
            mask_token_id=trainer.mask_token_id,
            gen_length=8,
        )
        scored = batch["completion_mask"].bool()  # up to each row's EOS
        found = batch["ref_view_logps"][:, update, 0, : scored.shape[1]]
        torch.testing.assert_close(found[scored], expected[scored], rtol=0, atol=1e-5)


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
def test_a_run_goes_on_from_mid_cycle_as_if_it_had_not_stopped(tiny_model_dir, tmp_path, options):
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, **options}
    whole = make_trainer(tiny_model_dir, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(tiny_model_dir, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected = weights(whole.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed.model).items())
    assert clockless(resumed.state.log_history) == clockless(whole.state.log_history)
    for table in (tmp_path / "resumed" / "completions").glob("*.parquet"):
        assert table.read_bytes() == (tmp_path / "whole" / "completions" / table.name).read_bytes()


def test_a_half_written_checkpoint_is_never_picked(tiny_model_dir, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(trainer, folder):
        if trainer.state.global_step == 4:
            assert (folder / "model.safetensors").exists()  # the weights are written, but not the rollout
            raise Killed
        save_rollout(trainer, folder)

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tiny_model_dir, tmp_path / "whole", **options)
    whole.train()
    assert not (tmp_path / "whole" / ".saving").exists()
    killed = make_trainer(tiny_model_dir, tmp_path / "killed", **options)
    with monkeypatch.context() as patch:
        patch.setattr(diffu_grpo_trainer, "save_rollout", die)
        with pytest.raises(Killed):
            killed.train()
    checkpoint = str(checkpoint_to_resume(tmp_path / "killed", "true"))
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-2")
    resumed = make_trainer(tiny_model_dir, tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=checkpoint)
    expected = weights(whole.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed.model).items())


def test_the_loss_is_d1s_formula(tiny_model_dir, tmp_path):
    """-[sum_k m_k min(rho A, clip(rho) A) - beta KL3] / sum_k m_k, in plain Python floats."""
    seen = []

    class Spy(Recorder):
        def loss(self, model, batch):
            loss = DiffuGRPOTrainer.loss(self, model, batch)
            update = self.micro_step // self.args.steps_per_generation % self.num_iterations
            seen.append((loss.item(), update, self.scored.pop()[1], batch))
            return loss

    trainer = make_trainer(
        tiny_model_dir, tmp_path, Spy, num_iterations=4, max_steps=4, epsilon=0.05, learning_rate=2e-2
    )
    trainer.train()
    assert len(seen) == 4
    for loss, update, logps, inputs in seen:
        total, count = 0.0, 0
        for row in range(len(logps)):
            advantage = inputs["advantages"][row].item()
            for k in range(int(inputs["completion_mask"][row].sum())):
                new = logps[row, k].double()
                ratio = (new - inputs["old_view_logps"][row, update, 0, k]).exp().item()
                gap = (inputs["ref_view_logps"][row, update, 0, k] - new).item()
                clipped = min(max(ratio, 0.95), 1.05)
                kl = np.exp(gap) - gap - 1
                total += min(ratio * advantage, clipped * advantage) - 0.04 * kl
                count += 1
        assert loss == pytest.approx(-total / count, abs=1e-6)


def test_advantages_are_not_divided_by_the_groups_standard_deviation(tiny_model_dir, tmp_path):
    def by_length(completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    trainer = make_trainer(tiny_model_dir, tmp_path, reward=by_length, max_steps=1)
    trainer.train()
    batch = rollout_buffer(trainer)[0]
    texts = trainer.processing_class.batch_decode(
        [ids[mask.bool()] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)],
        skip_special_tokens=True,
    )
    lengths = torch.tensor([float(len(text)) for text in texts])
    torch.testing.assert_close(batch["advantages"], lengths - lengths.mean(), rtol=0, atol=1e-5)


def test_a_rollout_is_the_same_alone_in_its_batch_and_with_more_padding(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, temperature=0.0)
    prompts = [[1, 5, 9, 6], [1, 5, 20, 21, 22, 23, 24, 6]]
    together, _ = trainer.rollout(prompts)
    trainer.pad_to_multiple_of = 32
    padded, _ = trainer.rollout(prompts)
    alone = [trainer.rollout([prompt])[0][0] for prompt in prompts]
    assert together == padded == alone


def test_micro_batches_of_the_rollout_change_nothing(tiny_model_dir, tmp_path):
    results = []
    for size in (None, 1, 3):
        trainer = make_trainer(tiny_model_dir, tmp_path, rollout_batch_size=size)
        trainer.model.train()
        results.append(trainer.rollout([[1, 5, 9, 6]] * 4)[0])
    assert results[0] == results[1] == results[2]
    assert len(set(map(tuple, results[0]))) > 1


def test_two_evaluations_see_the_same_random_numbers(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_reward"] == second["eval_reward"]


def brittle(completions, letter, **columns):
    if "c" in letter:
        raise KeyError("no such letter")
    return [0.0] * len(completions)


async def later(completions, letter, **columns):
    return brittle(completions, letter)


class Brittle:
    def __call__(self, completions, letter, **columns):
        return brittle(completions, letter)


@pytest.mark.parametrize(
    ("reward", "name"), [(brittle, "brittle"), (later, "later"), (Brittle(), "Brittle"), (partial(brittle), "brittle")]
)
def test_a_reward_that_raises_names_itself_the_task_and_the_row(tiny_model_dir, tmp_path, reward, name):
    trainer = make_trainer(tiny_model_dir, tmp_path, reward=reward, max_steps=40)
    with pytest.raises(RuntimeError, match=rf"reward {name} of task .*no such letter.* on row 0 of its batch"):
        trainer.train()
    assert json.loads((tmp_path / f"reward_error_{name}.json").read_text())["letter"] == "c"


def test_rewards_see_what_trl_shows_them(tiny_model_dir, tmp_path):
    seen = {}

    def curious(**columns):
        seen.update(columns)
        return [0.0] * len(columns["completions"])

    make_trainer(tiny_model_dir, tmp_path, reward=curious, max_steps=1).train()
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    assert seen.keys() == {"letter"} | own
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


def test_weights_that_are_not_finite_stop_the_run_too(tiny_model_dir, tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                model.lm_head.weight.data[9] = float("nan")

    trainer = make_trainer(tiny_model_dir, tmp_path, callbacks=[Poison()], max_steps=4)
    with pytest.raises(FloatingPointError, match="became nan at step 1"):
        trainer.train()
    assert len(json.loads((tmp_path / "bad_loss_step1_rank0.json").read_text())) == 4
