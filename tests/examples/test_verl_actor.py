"""verl's engine makes the update of the one-file loop. Skipped where verl is not installed (docs/engines.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from d1.models import load_model, load_tokenizer
from d1.scoring import mean_field_logps
from examples import rl_loop
from tests.commands import ROOT

pytest.importorskip("verl")
BASE = str(ROOT / "pocket" / "base")
S = replace(rl_loop.Settings(), num_generations=2)
ROWS, PROMPT, CANVAS = 4, 12, 32


def test_one_update_equals_the_loops(tmp_path):
    """Two micro-batches of rows with padding, completions of four lengths, clipped ratios, and a reference."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import no_padding_2_padding

    from examples import verl_actor

    torch.manual_seed(0)
    text = torch.randint(5, 20, (ROWS, PROMPT + CANVAS))
    padding = torch.tensor([[0], [3], [1], [0]])
    seen = (torch.arange(PROMPT + CANVAS) >= padding).long()
    noise = (torch.rand(ROWS, PROMPT) < 0.3) & seen[:, :PROMPT].bool()
    counted = (torch.arange(CANVAS) < torch.tensor([[20], [32], [5], [9]])).long()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    model, start = load_model(BASE).train(), load_model(BASE)
    options = {"mask_token_id": load_tokenizer(BASE).mask_token_id, "gen_length": CANVAS}
    logps = mean_field_logps(model, text[:, :PROMPT], seen[:, :PROMPT], text[:, PROMPT:], noise, **options)
    old, reference = (logps.detach() + spread * torch.randn_like(logps) for spread in (0.8, 0.3))
    ratio = (logps.detach() - old).exp()[counted.bool()]
    assert ((ratio < 1 - S.epsilon) | (ratio > 1 + S.epsilon)).float().mean() > 0.1  # clipping matters

    optimizer = torch.optim.AdamW(model.parameters(), S.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    loss = rl_loop.clipped_loss(logps, old, reference, advantages, counted.bool(), S)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), S.max_grad_norm)
    optimizer.step()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine = verl_actor.make_engine(BASE, S)
        batch = {"prompts": text[:, :PROMPT], "responses": text[:, PROMPT:], "attention_mask": seen}
        batch["prompt_noise"] = noise
        data = TensorDict({**batch, "loss_mask": counted}, batch_size=ROWS)
        tensordict_utils.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=S.num_generations)
        with engine.eval_mode():
            found = engine.infer_batch(data)["model_output"]["log_probs"]
        assert torch.equal(no_padding_2_padding(found, data), logps)

        batch |= {"old_log_probs": old, "ref_log_prob": reference, "response_mask": counted}
        batch["advantages"] = advantages.unsqueeze(1).expand(ROWS, CANVAS).contiguous()
        metrics = verl_actor.update(engine, batch, S)
        weights = {name: weight.full_tensor() for name, weight in engine.module.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert sum(metrics["actor/pg_loss"].values) + S.beta * sum(metrics["kl_loss"].values) == pytest.approx(loss.item())
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=1e-6)
    assert max((weights[name] - before).abs().max() for name, before in start.named_parameters()) > 5e-5
