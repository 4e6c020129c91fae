"""RL on a server: what goes there, and what is refused. Runs on several servers are in test_fleet.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from d1.models import load_model
from d1.rl.config import DiffuGRPOConfig
from d1.rl.servers import NoServer
from d1.scoring.rollouts import within_blocks
from d1.serve.client import Prompts, Weights, reveal_steps
from tests.commands import ROOT
from tests.d1.serve.serving import serving
from tests.tiny_grpo import make_method


def save_tiny_adapter(model_dir, folder):
    """An adapter with names that the model does not have."""
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    get_peft_model(load_model(model_dir), config).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.0", "layers.9"): weight for name, weight in load_file(file).items()}, file)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_step_maps_are_reveal_steps():
    steps = torch.tensor([[1, 0, 3, 2, 4, 4, 4, 4, -1, -1, -1, -1]])
    blocks = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    in_blocks = within_blocks(steps, blocks)[0]
    step_map = torch.where(in_blocks < 0, 0, in_blocks + 1).tolist()
    assert reveal_steps(step_map, [[1] * 4, [4], [2, 2]]) == steps[0].tolist()


def test_only_the_adapter_goes_to_the_server(tiny_model_dir, tmp_path):
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", peft_config=LORA, **where)
        trainer.servers.publish(trainer.model, 7)
        version = served.engine.version
        assert version == f"{trainer.servers.run}-7"
        assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["adapter_model.safetensors"]
        trainer.servers.close()
        assert not [*tmp_path.rglob("*.safetensors")]
        refused = served.post("/update_weights_from_disk", 400, model_path="wrong")
        assert "no folder below" in refused["message"]
        save_tiny_adapter(tiny_model_dir, tmp_path / "wrong")
        sampled = {"input_ids": [5, 6], "rid": "1", "sampling_params": {"max_new_tokens": 9, "temperature": 1.0}}
        before = served.post("/generate", **sampled)["output_ids"]
        assert "does not fit" in served.post("/update_weights_from_disk", 400, model_path="wrong")["message"]
        after = served.post("/generate", **sampled)
        assert (after["output_ids"], after["meta_info"]["weight_version"]) == (before, version)


def test_what_cannot_be_is_refused(tiny_model_dir, tmp_path):
    url = {"rollout_server_base_url": ["http://127.0.0.1:1"]}
    mode = {"rollout_mode": "server"}
    several = [(mode, "needs"), (url, "no other mode has any")]
    several += [(mode | {"rollout_server_base_url": urls}, "each once") for urls in (["http://a"] * 2, ["localhost:1"])]
    for wrong, words in several:
        with pytest.raises(ValueError, match=words):
            DiffuGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **wrong)
    with pytest.raises(NoServer, match=r"for 0\.1 seconds"):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", rollout_server_timeout=0.1, **url)
    with serving(tiny_model_dir) as served, pytest.raises(ValueError, match="--weights_dir"):
        make_method(tiny_model_dir, tmp_path, "d1", rollout_mode="server", rollout_server_base_url=[served.url])
    with serving(tiny_model_dir, weights_dir=tmp_path) as served:
        where = {"rollout_mode": "server", "rollout_server_base_url": [served.url]}
        trainer = make_method(tiny_model_dir, tmp_path / "run", "d1", **where)
        trainer.servers.publish(trainer.model, 0)
        prompts = Prompts(torch.tensor([[5]]), torch.ones(1, 1), [(0, 1, 2)], trainer.sampling, (), False)
        assert trainer.servers.sample(prompts).ids.shape == (1, 9)
        others = Weights("other", "other-0", tmp_path)
        with pytest.raises(ValueError, match="who else uses it"):
            trainer.servers.servers[0].sample(prompts, others)


@pytest.mark.slow
def test_two_processes_share_a_server(tmp_path):
    """`d1 rl` under torchrun: the trained weights are those of two processes that sample for themselves."""
    base, rows = ROOT / "pocket" / "base", ROOT / "dataset" / "sudoku_train.csv"
    flags = f"--model_path {base} --dataset sudoku --data_file {rows} --block_length 8 --max_completion_length 32 "
    flags += (
        "--num_generations 4 --per_device_train_batch_size 4 --num_iterations 2 --max_steps 4 --learning_rate 1e-4 "
    )
    flags += "--diffusion_steps 16 --use_cpu true --bf16 false --report_to none"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "d1", "rl", *flags.split()]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    with serving(base, batch_size=64, weights_dir=tmp_path) as served:
        server = ["--rollout_mode", "server", "--rollout_server_base_url", served.url]
        for port, (folder, words) in enumerate({"here": [], "there": server}.items(), start=29741):
            words = [
                *launch[:3],
                "--master_port",
                str(port),
                *launch[3:],
                *words,
                "--output_dir",
                str(tmp_path / folder),
            ]
            subprocess.run(words, env=environment, cwd=tmp_path, check=True, timeout=300)
        assert served.engine.version.endswith("-2")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("here", "there"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    start = load_file(base / "model.safetensors")
    assert any(not torch.equal(before[name], start[name]) for name in start)
