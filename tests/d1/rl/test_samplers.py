"""RL's samplers: settings, the EOS stop, and the log-probs of rollouts compared with those of the trained policy."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.head import unwrapped
from d1.rl import bridge as trl_bridge
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_trainer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.trainer import DiffuGRPOTrainer
from d1.sampling import graphs, rollout
from tests import tiny_grpo
from tests.rounding import LOGITS, assert_near, rounding

WORDS = ["abc", "defgh", "ij", "klmn"]
SETTINGS = tiny_grpo.SETTINGS | {"per_device_train_batch_size": 8, "max_completion_length": 12, "diffusion_steps": 12}

# What a rollout records for each token of its canvas.
RECORD = {"canvas_ids": torch.int64, "reveal_steps": torch.int64}
RECORD |= {"rollout_logps": torch.float32, "rollout_entropies": torch.float32}


def vowels(completions, **columns):
    return [sum(map(completion[0]["content"].count, "aeiou")) for completion in completions]


def talkative(folder):
    """The tiny model with more certain predictions, which says end of text instead of a common token."""
    model = load_model(str(folder))
    with torch.no_grad():
        head = model.lm_head.weight.mul_(2)
        ids = torch.tensor([[1, 5, 6]])
        said = rollout(model, ids, torch.ones_like(ids), mask_token_id=3, gen_length=12, block_length=4, steps=12)
        swapped = torch.tensor([2, said.ids[0, 3:].mode().values.item()])
        head[swapped] = head[swapped.flip(0)].clone()
    return model


def make_trainer(model_dir, folder, cls=DiffuGRPOTrainer, reward=vowels, **changes):
    prompts = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    return cls(
        model=talkative(model_dir),
        reward_funcs=reward,
        args=DiffuGRPOConfig(**({"output_dir": str(folder), "max_steps": 2} | SETTINGS | changes)),
        train_dataset=Dataset.from_list(prompts),
        processing_class=load_tokenizer(str(model_dir)),
    )


def trained(trainer):
    """Logged entries, without times."""
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in e.items() if not re.search("second|time|memory", k)} for e in entries]


def test_the_eos_stop_changes_nothing_but_the_work(tiny_model_dir, tmp_path):
    stopped, full = (
        trained(make_trainer(tiny_model_dir, tmp_path, max_steps=4, eos_stop=stop)) for stop in (None, False)
    )
    assert stopped[0]["sampling/forward_tokens"] < full[0]["sampling/forward_tokens"]
    assert stopped[0]["sampling/forward_passes"] < full[0]["sampling/forward_passes"] == 12
    for entry, other in zip(stopped, full, strict=True):
        work = {"sampling/forward_tokens", "sampling/forward_passes", "compute_tokens"}
        work.add("sampling/tokens_per_forward_pass")
        expected = {name: value for name, value in other.items() if name not in work}
        found = {name: value for name, value in entry.items() if name not in work}
        assert found == pytest.approx(expected, rel=rounding(LOGITS), abs=rounding(LOGITS))


def test_compiled_passes_sample_the_same_rollout(tiny_model_dir, tmp_path, monkeypatch):
    """Layers as dynamo captured them, without inductor. Only sampling is compiled."""
    monkeypatch.setattr(graphs, "CompiledLayers", partial(graphs.CompiledLayers, "eager"))
    trainer = make_trainer(tiny_model_dir, tmp_path / "layers", compile="layers", max_steps=1)
    assert trainer.args.to_dict()["compile"] == "layers"
    (entry,), (plain,) = trained(trainer), trained(make_trainer(tiny_model_dir, tmp_path / "none", max_steps=1))
    assert entry == pytest.approx(plain, rel=rounding(LOGITS), abs=rounding(LOGITS))
    assert graphs.COMPILED_MODELS[unwrapped(trainer.model)][1].compiled
    assert not any("forward" in vars(layer) for layer in unwrapped(trainer.model).model.layers)


def test_servers_compile_on_their_own():
    servers = {"rollout_mode": "server", "rollout_server_base_url": ["http://localhost:1"]}
    with pytest.raises(ValueError, match="--compile layers compiles what the trainer samples: give it to `d1 serve`"):
        DiffuGRPOConfig(compile="layers", **servers)
    with pytest.raises(ValueError, match="--compile must be one of none, layers, graphs, got 'graph'"):
        DiffuGRPOConfig(compile="graph")


def test_weights_that_processes_share_are_not_compiled(tmp_path):
    args = DiffuGRPOConfig(output_dir=str(tmp_path), compile="layers", use_cpu=True)
    with pytest.raises(ValueError, match="--compile layers: each process holds only a part of the weights"):
        check_trainer(args, args.sampling_settings(), [vowels], False, True, False)
    check_trainer(args, args.sampling_settings(), [vowels], False, False, False)


class Spy(DiffuGRPOTrainer):
    """Keeps the results of each rollout and the inputs of each loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampled, self.seen, self.scored = {}, [], []

    def rollout(self, prompt_ids):
        completions, record = super().rollout(prompt_ids)
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completions, strict=True)):
            # Equal samples may have been revealed in different orders.
            numbers = [record[name][row].clone() for name in RECORD]
            self.sampled.setdefault((tuple(prompt), tuple(completion)), []).append(numbers)
        return completions, record

    def scores(self, model, batch, views, **options):
        self.scored.append((batch, views, super().scores(model, batch, views, **options)))
        return self.scored[-1][2]

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        update = self.micro_step // self.args.steps_per_generation % self.num_iterations
        self.seen.append((update, batch, self.scored[-1][2].logps.detach()))
        return loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rollout_log_probs_stay_with_their_samples_and_are_compared_where_scored(
    tiny_model_dir, tmp_path, accumulation
):
    trainer = make_trainer(tiny_model_dir, tmp_path, Spy, max_steps=4, gradient_accumulation_steps=accumulation)
    entries = trained(trainer)
    gaps = {}
    for number, (update, inputs, new) in enumerate(trainer.seen):
        for row, kept in enumerate(inputs["completion_mask"].bool()):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            completion = inputs["completion_ids"][row][kept].tolist()
            record = [inputs[name][row] for name in RECORD]
            assert [numbers.dtype for numbers in record] == list(RECORD.values())
            sampled = trainer.sampled[tuple(prompt), tuple(completion)]
            assert any(all(map(torch.equal, record, one)) for one in sampled)
            _, steps, logps, entropies = (numbers[: int(kept.sum())] for numbers in record)
            assert min(steps.min(), entropies.min()) >= 0
            if update == 0:
                gaps.setdefault(number // accumulation, []).append((logps - new[row][: len(logps)]).double())
    assert set(gaps) == {0, 2}
    for step, entry in enumerate(entries):
        assert ("sampling/ratio_max" in entry) == (step in gaps)
        if step in gaps and accumulation == 1:
            gap = torch.cat(gaps[step])
            assert entry["sampling/logp_difference_mean"] == pytest.approx(gap.mean().item(), abs=rounding(LOGITS))
            assert entry["sampling/logp_difference_abs"] == pytest.approx(gap.abs().mean().item(), abs=rounding(LOGITS))
            assert entry["sampling/ratio_max"] == pytest.approx((-gap).exp().max().item(), rel=rounding(LOGITS))


def test_integers_of_the_record_are_never_floats(tiny_model_dir, tmp_path):
    class Late(DiffuGRPOTrainer):
        def sample(self, ids, mask):
            sampled = super().sample(ids, mask)
            return replace(sampled, reveal_steps=sampled.reveal_steps + 2**24 + 1)  # fp32 has only even numbers there

    trainer = make_trainer(tiny_model_dir, tmp_path, Late, max_steps=1)
    trainer.train()
    steps = rollout_buffer(trainer)[0]["reveal_steps"]
    assert set(steps.unique().tolist()) <= set(range(2**24, 2**24 + 13))
    assert len(set(steps.unique().tolist())) > 6


def test_one_token_sampled_in_one_step_is_what_the_estimator_scores(tiny_model_dir, tmp_path):
    """Without prompt masks and earlier revealed tokens, the sampling policy equals the trained policy."""
    lengths = {"max_completion_length": 1, "block_length": 1, "diffusion_steps": 1, "p_mask_prompt": 0.0}
    entry = trained(make_trainer(tiny_model_dir, tmp_path, max_steps=1, **lengths))[0]
    assert entry["sampling/logp_difference_abs"] == pytest.approx(0.0, abs=rounding(LOGITS))
    assert entry["sampling/ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))
    assert entry["sampling/forward_passes"] == 1


def test_an_approximate_sampler_samples_the_rollout(tiny_model_dir, tmp_path):
    options = {"kv_cache": "prefix", "reveal": "factor", "reveal_level": 2.0}
    trainer = make_trainer(tiny_model_dir, tmp_path, sampler="cached+parallel", **options)
    trainer.model.train()
    prompts = [[1, 5, 9, 6], [1, 5, 20, 21, 22, 6]]
    completions, record = trainer.rollout(prompts)
    model = talkative(tiny_model_dir)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        alone = rollout(
            model,
            ids,
            torch.ones_like(ids),
            mask_token_id=trainer.mask_token_id,
            gen_length=12,
            block_length=4,
            steps=12,
            temperature=0.9,
            generator=[keyed_generator(42, 1, 0, row)],
            sampler="cached+parallel",
            eos_token_ids=[2],
            **options,
        )
        kept = len(completions[row])
        assert completions[row] == alone.ids[0, len(prompt) :][:kept].tolist()
        numbers = (alone.ids[:, len(prompt) :], alone.reveal_steps, alone.logps, alone.entropies)
        for name, number in zip(RECORD, numbers, strict=True):
            assert_near(record[name][row], number[0], least=LOGITS)
    entries = trained(trainer)
    assert entries[0]["sampling/forward_passes"] < 12
    assert torch.isfinite(torch.tensor([entry["loss"] for entry in entries])).all()


def test_what_asks_for_unequal_passes_is_refused_or_off_where_processes_keep_step(
    tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(trl_bridge.CanvasGRPOTrainer, "weights_are_split", True)
    assert make_trainer(tiny_model_dir, tmp_path).eos_stop  # a single process does not wait
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert not make_trainer(tiny_model_dir, tmp_path).eos_stop
    for change in ({"sampler": "parallel"}, {"eos_stop": True}):
        with pytest.raises(ValueError, match="must make the same number"):
            make_trainer(tiny_model_dir, tmp_path, **change)


def test_settings_that_do_not_go_with_the_kind_are_refused_at_the_start(tiny_block_dir, tmp_path):
    with pytest.raises(ValueError, match="has blocks of 4 tokens, so block_length must be 4, not 6"):
        make_trainer(tiny_block_dir, tmp_path, block_length=6)


def test_a_reward_reads_the_tokens_per_forward_pass_of_its_row(tiny_model_dir, tmp_path):
    """With a threshold, rows take different numbers of passes, and some end before their canvas is full."""
    passes, rewarded = [], []

    class Counting(DiffuGRPOTrainer):
        def sample(self, *args, **options):
            sampled = super().sample(*args, **options)
            passes.extend(sampled.passes.tolist())
            return sampled

    def speed(completions, completion_ids, tokens_per_forward_pass, **columns):
        rewarded.extend(zip(map(len, completion_ids), tokens_per_forward_pass, strict=True))
        return tokens_per_forward_pass

    options = {"sampler": "parallel", "reveal_level": 0.3, "max_steps": 1}
    trainer = make_trainer(tiny_model_dir, tmp_path, Counting, speed, **options)
    entry = trained(trainer)[0]
    assert len({*passes}) > 1
    expected = [length / count for (length, _), count in zip(rewarded, passes, strict=True)]
    assert [value for _, value in rewarded] == expected
    mean = sum(expected) / len(expected)
    assert entry["sampling/tokens_per_forward_pass"] == pytest.approx(mean)
    assert entry["reward"] == pytest.approx(mean)
