"""RL of a model with a causal context, in the trainer and on a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from d1.models import load_model
from d1.models.kinds import native_config
from d1.rl.checks import check_config
from d1.rl.config import DiffuGRPOConfig
from d1.rl.trainer import DiffuGRPOTrainer
from tests.d1.serve.serving import serving
from tests.rounding import TOKENS, assert_near
from tests.tiny_grpo import logged, make_method

RUN: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.01, "block_length": None}
THRESHOLD: dict[str, Any] = {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.1}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "replay": ("cj-grpo", {}),
    "replay, in blocks of 2": ("dipo", {"block_length": 2, "diffusion_steps": 8, "right_share": None}),
    "replay by threshold": ("cj-grpo", THRESHOLD | {"scored_tokens": "ended"}),
    "one step": ("d1", {"beta": 0.0, "p_mask_prompt": 0.0}),
    "JustGRPO": ("just-grpo-blocks", {"sampling_weight_cap": None}),
    "the least likely tokens": ("just-grpo-fast", {"num_views": 2}),
    "autoregressive": ("just-grpo", {"block_length": 1}),
}


class Watched(DiffuGRPOTrainer):
    """Keeps the record of the first rollout."""

    first: dict[str, Any] | None = None

    def after_rollout(self, batch: Any) -> None:
        super().after_rollout(batch)
        names = ("canvas_ids", "reveal_steps", "rollout_logps", "rollout_entropies")
        self.first = self.first or {name: batch[name].clone() for name in names}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_and_the_first_ratio_is_one(tiny_causal_dir, tmp_path, way):
    method, changes = WAYS[way]
    trainer = make_method(tiny_causal_dir, tmp_path, method, **RUN | changes)
    before = trainer.model.get_output_embeddings().weight.detach().clone()
    trainer.train()
    first = logged(trainer)[0]
    if method != "d1":
        assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    if method in ("cj-grpo", "dipo"):
        assert first["sampling/logp_difference_abs"] < 1e-4, "each token is scored where it was sampled"
    assert (trainer.model.get_output_embeddings().weight - before).abs().max() > 1e-6
    trainer.save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["attention_pattern"]) == ("ministral3", "causal-context")
    again: Any = load_model(tmp_path)
    assert torch.equal(again.get_output_embeddings().weight, trainer.model.get_output_embeddings().weight)


@pytest.mark.parametrize("way", ["replay by threshold", "JustGRPO"])
def test_a_server_samples_the_same_rollouts(tiny_causal_dir, tmp_path, way):
    """To the bit, EOS stop and early stop included; the trainer scores the server's rows again and finds its own."""
    method, changes = WAYS[way]
    options = RUN | changes | {"eos_stop": True, "scored_tokens": "ended", "ends": range(8, 30)}
    runs = []
    with serving(tiny_causal_dir, weights_dir=tmp_path / "weights") as served:
        for name in ("trainer", "server"):
            where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]} if name == "server" else {}
            trainer = make_method(tiny_causal_dir, tmp_path / "weights" / name, method, Watched, **options | where)
            trainer.train()
            runs.append((trainer.first, [weight.detach() for weight in trainer.model.parameters()]))
    (alone, weights), (shared, others) = runs
    assert (alone["reveal_steps"] < 0).any(), "no row ended early: the test shows little"
    for name in alone:
        assert torch.equal(alone[name], shared[name]), name
    for one, other in zip(weights, others, strict=True):
        assert_near(one, other, terms=TOKENS)


def test_what_does_not_suit_it_is_refused(tiny_causal_dir, tmp_path):
    for method, changes, message in (
        (
            "coupled-grpo",
            {"top_p": 1.0},
            r"--estimator coupled hides the first token.*: use one_step, replay, left_to_right",
        ),
        ("d1", {"cfg_scale": 1.0}, "cannot sample with guidance"),
        ("cj-grpo", {"sampler": "cached"}, "needs no cached sampler"),
        ("cj-grpo", THRESHOLD | {"edit_threshold": 0.6}, "cannot sample with editing"),
    ):
        config = DiffuGRPOConfig(output_dir=str(tmp_path), method=method, use_cpu=True, bf16=False, **changes)
        with pytest.raises(ValueError, match=message):
            check_config(native_config(str(tiny_causal_dir))[0], 8, config)


def test_hints_are_refused_before_the_model_is_loaded(tiny_causal_dir, tmp_path):
    args = DiffuGRPOConfig(output_dir=str(tmp_path), report_to="none", hints="small_chunks", max_completion_length=8)
    with pytest.raises(ValueError, match="--hints small_chunks: "):
        check_config(native_config(str(tiny_causal_dir))[0], 8, args)
