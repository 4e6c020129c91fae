"""Rollouts ahead of updates, compared with a slow loop that keeps every model; resumes, refusals, closed forms."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

from d1.models import load_model
from d1.rl.batch import evaluating, views_of
from d1.rl.bridge import rollout_buffer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.trainer import DiffuGRPOTrainer
from d1.sampling import rollout
from tests.commands import ROOT
from tests.d1.serve.serving import serving
from tests.rounding import LOGITS, TOKENS, assert_near, rounding
from tests.tiny_grpo import assert_same, by_letter, is_even, logged, make_method, weights

REPLAY = {"num_views": 3, "epsilon": 0.05}
WEIGHTED = {"sampling_weight_cap": 1.2}
STALE = ("sampling/staleness", "sampling/staleness_steps")


class Loop(DiffuGRPOTrainer):
    """Samples rollout k with a copy of the model from before the updates on rollout max(0, k - staleness)."""

    def sample(self, ids, mask):
        if self.mode == "eval":
            return super().sample(ids, mask)
        kept = self.__dict__.setdefault("kept", [])
        kept.append((self.state.global_step, deepcopy(self.model)))
        number = len(kept) - 1
        step, model = kept[max(0, number - self.args.rollout_staleness)]
        generators, ends = self.generators("rollout", len(ids)), self.eos_token_ids if self.eos_stop else None
        options = {"mask_token_id": self.mask_token_id, "eos_token_ids": ends, "generator": generators}
        with evaluating(model):
            sampled = rollout(model, ids, mask, self.sampling, **options)
        self.computed_tokens = self.computed_tokens + sampled.forward_tokens.sum()
        self.log_metric("sampling/staleness", min(number, self.args.rollout_staleness))
        self.log_metric("sampling/staleness_steps", self.state.global_step - step)
        return sampled


def stale(served, staleness, **changes):
    where = {"rollout_mode": "server", "rollout_server_base_url": [served.url], "rollout_server_timeout": 30.0}
    return where | {"rollout_staleness": staleness} | changes


def slowly(completions, **columns):
    time.sleep(0.3)  # a server that is faster than the trainer
    return by_letter(completions)


@pytest.mark.parametrize(
    ("method", "staleness", "changes"),
    [
        ("agrpo-entropy", 1, REPLAY | {"num_iterations": 1}),
        ("d1", 2, WEIGHTED | {"reward": [slowly, is_even], "reward_weights": [1.0, 0.0]}),
    ],
)
def test_a_run_is_that_of_a_loop_that_keeps_all_models(tiny_model_dir, tmp_path, method, staleness, changes):
    steps = {"max_steps": 7, "eval_strategy": "steps", "eval_steps": 3}
    here = make_method(tiny_model_dir, tmp_path / "here", method, Loop, **steps, **changes)
    here.args.rollout_staleness = staleness  # without a server a run may not ask for it
    here.train()
    with serving(tiny_model_dir, batch_size=64, weights_dir=tmp_path) as served:
        there = make_method(tiny_model_dir, tmp_path / "there", method, **steps, **stale(served, staleness), **changes)
        there.train()
    assert_same(here, there)
    found = [[entry[name] for entry in logged(there) if name in entry] for name in STALE]
    behind = [min(number, staleness) for number in range(7 if method == "agrpo-entropy" else 4)]
    assert found == [behind, [there.num_iterations * number for number in behind]]


class Kept(DiffuGRPOTrainer):
    """Keeps each training batch after its scoring, and the weights of that time."""

    def score_rollout(self, batch):
        super().score_rollout(batch)
        if self.mode == "train":
            self.__dict__.setdefault("seen", []).append((dict(batch), weights(self.model)))


def test_old_log_probs_and_weights_are_those_of_the_policy_that_sampled(tiny_model_dir, tmp_path):
    """Replay: the record's log-probs are the ones that the weights of a rollout ago give, and the weights of now give
    others. With a cap they are the divisor of the weights instead, and old ones are scored now."""
    with serving(tiny_model_dir, batch_size=64, weights_dir=tmp_path) as served:
        for method, cap in (("cj-grpo", None), ("just-grpo", None), ("cj-grpo", 1.2)):
            options = stale(served, 1, sampling_weight_cap=cap, max_steps=4, num_iterations=2)
            trainer = make_method(tiny_model_dir, tmp_path / "run", method, Kept, **options)
            trainer.train()
            (_, before), (batch, now) = trainer.seen
            model = load_model(tiny_model_dir).eval()

            def scored_by(weights, model=model, trainer=trainer, batch=batch):
                model.load_state_dict(weights, strict=False)
                return trainer.scores(model, batch, views_of(batch, 0)).view_logps.detach()

            then, own = scored_by(before), scored_by(now)
            old = batch["old_view_logps"][:, 0]
            assert (then - own).abs().max() > 1e-2
            assert_near(old, then if cap is None else own, least=LOGITS)
            if cap:
                scored = (batch["view_weights"][:, 0] != 0).any(1)
                assert torch.allclose(then.sum(1)[scored], batch["rollout_logps"][scored], atol=rounding(LOGITS))
                expected = (own.sum(1) - then.sum(1)).exp().clamp(max=cap)[scored & batch["completion_mask"].bool()]
                found = [entry["sampling/weight_mean"] for entry in logged(trainer) if "sampling/weight_mean" in entry]
                assert found[1] == pytest.approx(expected.mean().item(), abs=1e-4)
                assert (expected == cap).any()
                assert (expected < cap).any()


def test_a_resume_and_a_lost_server_change_nothing(tiny_model_dir, tmp_path):
    """Between two updates on a rollout, between two rollouts, and where all servers were lost."""
    steps = REPLAY | {"num_iterations": 2, "max_steps": 10, "save_strategy": "steps", "save_steps": 1}
    with serving(tiny_model_dir, batch_size=64, weights_dir=tmp_path) as served:
        whole = make_method(tiny_model_dir, tmp_path / "whole", "agrpo-entropy", **steps, **stale(served, 2))
        whole.train()
        for step in (4, 7):
            again = make_method(tiny_model_dir, tmp_path / f"{step}", "agrpo-entropy", **steps, **stale(served, 2))
            again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
            assert_same(whole, again)
    lost = make_lost(tiny_model_dir, tmp_path, steps)
    assert 0 < lost.state.global_step < 10
    with serving(tiny_model_dir, batch_size=64, weights_dir=tmp_path) as served:
        again = make_method(tiny_model_dir, tmp_path / "lost", "agrpo-entropy", **steps, **stale(served, 2))
        again.train(resume_from_checkpoint=str(tmp_path / "lost" / f"checkpoint-{lost.state.global_step}"))
        assert_same(whole, again)
    assert rollout_buffer(again)


def make_lost(model_dir, tmp_path, steps):
    """A run whose server ends after its first rollouts."""
    server = serving(model_dir, batch_size=64, weights_dir=tmp_path)
    served = server.__enter__()

    def last(completions, **columns):
        last.calls += 1
        if last.calls == 2:
            server.__exit__(None, None, None)
        return by_letter(completions)

    last.calls, last.__name__ = 0, "by_letter"
    where = stale(served, 2, rollout_server_timeout=0.5)
    rewards = {"reward": [last, is_even], "reward_weights": [1.0, 0.0]}
    trainer = make_method(model_dir, tmp_path / "lost", "agrpo-entropy", **steps, **where, **rewards)
    with pytest.raises(ConnectionError, match="--resume"):
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_mode": "trainer", "rollout_server_base_url": None}, "only servers sample while"),
        *(({"method": one}, "needs a correction: set --sampling_weight") for one in ("d1", "bgpo", "spg", "tracerl")),
        (
            {"estimator": "replay", "objective": "reinforce", "beta": 0.0, "p_mask_prompt": 0.0},
            "or --estimator replay.* with an objective that reads old log-probs",
        ),
        ({"rollout_staleness": -1}, "rollout_staleness -1"),
    ],
)
def test_what_no_weight_corrects_is_refused(tmp_path, changes, said):
    where = {"rollout_mode": "server", "rollout_server_base_url": ["http://127.0.0.1:1"], "rollout_staleness": 1}
    with pytest.raises(ValueError, match=said):
        DiffuGRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "num_generations": 4} | where | changes)


@pytest.mark.slow
def test_two_processes_share_the_rollouts_of_the_first(tmp_path):
    """`d1 rl` under torchrun: the trained weights are those of one process with all rows, up to rounding."""
    base, rows = ROOT / "pocket" / "base", ROOT / "dataset" / "sudoku_train.csv"
    flags = f"--model_path {base} --dataset sudoku --data_file {rows} --block_length 8 --max_completion_length 32 "
    flags += "--num_generations 4 --num_iterations 2 --max_steps 6 --learning_rate 1e-2 --optim sgd --loss_type grpo "
    flags += "--diffusion_steps 16 --use_cpu true --bf16 false --report_to none --rollout_staleness 1 "
    flags += "--sampling_weight_cap 2 --lr_scheduler_type constant --rollout_mode server --rollout_server_base_url "
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    with serving(base, batch_size=64, weights_dir=tmp_path) as served:
        for processes in (1, 2):
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
            words += ["--master_port", str(29750 + processes), "-m", "d1", "rl", *flags.split(), served.url]
            words += ["--per_device_train_batch_size", str(8 // processes), "--output_dir", f"{tmp_path}/{processes}"]
            subprocess.run(words, env=environment, cwd=tmp_path, check=True, timeout=300)
    one, two = (load_file(tmp_path / str(processes) / "model.safetensors") for processes in (1, 2))
    start = load_file(base / "model.safetensors")
    assert max((one[name] - start[name]).abs().max() for name in one) > 1e-4
    for name in one:
        assert_near(one[name], two[name], terms=TOKENS)
