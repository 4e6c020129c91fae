"""RL on a server: completions, weights and metrics are those of rollouts inside the trainer, to the bit."""

from __future__ import annotations

import pytest
import requests
import torch

from d1.rl.config import DiffuGRPOConfig
from d1.scoring.rollouts import within_blocks
from d1.serve.client import reveal_steps
from tests.d1.serve.serving import serving
from tests.tiny_grpo import clockless, logged, make_method, weights


def test_step_maps_are_reveal_steps():
    steps = torch.tensor([[1, 0, 3, 2, 4, 4, 4, 4, -1, -1, -1, -1]])
    blocks = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    in_blocks = within_blocks(steps, blocks)[0]
    step_map = torch.where(in_blocks < 0, 0, in_blocks + 1).tolist()
    assert reveal_steps(step_map, [[1] * 4, [4], [2, 2]]) == steps[0].tolist()


@pytest.mark.parametrize(
    ("method", "blocks", "changes"),
    [("d1", False, {}), ("agrpo", False, {"eos_stop": False}), ("d1", True, {"block_length": 4})],
)
def test_a_run_is_that_of_rollouts_in_the_trainer(tiny_model_dir, tiny_block_dir, tmp_path, method, blocks, changes):
    folder = tiny_block_dir if blocks else tiny_model_dir
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    here = make_method(folder, tmp_path / "here", method, **steps, **changes)
    here.train()
    with serving(folder, batch_size=64, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        there = make_method(folder, tmp_path / "there", method, **steps, **changes, **where)
        there.train()
        assert served.engine.version == f"{there.server.run}-3" or served.engine.version == f"{there.server.run}-2"
        assert served.engine.tokens > 0
    assert len(logged(here)) == 3
    assert clockless(there.state.log_history) == clockless(here.state.log_history)
    before, after = weights(here.model), weights(there.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_is_refused(tiny_model_dir, tmp_path):
    url = {"rollout_server_base_url": ["http://127.0.0.1:1"]}
    for wrong in ({"rollout_mode": "server"}, url, {"rollout_mode": "server", "rollout_server_base_url": ["a", "b"]}):
        with pytest.raises(ValueError, match="one --rollout_server_base_url"):
            DiffuGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **wrong)
    with pytest.raises(requests.ConnectionError):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", **url)
    with serving(tiny_model_dir) as served, pytest.raises(ValueError, match="--weights_dir"):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", rollout_server_base_url=[served.url])
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", **where)
        trainer.train()
        trainer.server.version = "mine"
        with pytest.raises(ValueError, match="who else uses it"):
            trainer.server.sample(torch.tensor([[5]]), torch.ones(1, 1), [(0, 1, 2)], trainer.sampling, (), False)
