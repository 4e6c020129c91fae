"""RL on servers where each process holds a part of the weights: real processes over gloo, a real server."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.sources import RolloutRequest
from d1.runs.cli import exit_process
from d1.sampling import rollout
from tests import forks
from tests.d1.rl.fleet import Fleet
from tests.rounding import LOGITS, assert_near, rounding
from tests.tiny_grpo import logged, make_method, weights

pytestmark = pytest.mark.usefixtures("server_key")
STEPS = {"max_steps": 4, "num_iterations": 1}
KEY = (7, 1, 0)  # of the rows that are sampled at the end
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def make(model, folder, adapter, **options):
    torch.manual_seed(0)
    peft = {"peft_config": LORA} if adapter else {}
    return make_method(model, folder, "agrpo", **STEPS, **peft, **options)


def train(launcher, model, folder, adapter, options):
    """One of two processes. After training, servers get the last weights and sample with them."""
    torch.set_num_threads(1)
    if launcher == "fsdp2":
        forks.use_fsdp2()
    trainer = make(model, folder, adapter, ddp_backend="gloo", **options)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    ids, mask = trainer.left_pad(trainer.encoded(trainer.train_dataset[:4]["prompt"]))
    keys = [(*KEY, trainer.first_row(4) + row) for row in range(4)]
    prompts = trainer.source.prompts(RolloutRequest(ids, mask, keys))
    sampled = trainer.source.servers.rollout(trainer.accelerator.unwrap_model(trainer.model), 99, prompts)
    rank = trainer.accelerator.process_index
    save_file({"prompt": ids, "mask": mask, "ids": sampled.ids, "logps": sampled.logps}, folder / f"{rank}.safetensors")
    if rank == 0:
        shutil.copytree(trainer.source.servers.weights.folder, folder / "sent")
        kind = trainer.accelerator.distributed_type.value
        (folder / "logged.json").write_text(json.dumps([kind, trainer.accelerator.num_processes, logged(trainer)]))
    trainer.accelerator.wait_for_everyone()
    exit_process()


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["weights", "adapter"])
@pytest.mark.parametrize("launcher", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_servers_get_the_weights_that_processes_share(tiny_model_dir, folder, tmp_path, launcher, adapter):
    """To the bit, those of the saved model; and they sample with them what this model does."""
    run = folder / f"{launcher}{adapter}"
    run.mkdir()
    fleet = Fleet(tiny_model_dir, folder, 1)
    environment = forks.fsdp2() if launcher == "fsdp2" else forks.deepspeed(3)
    given = launcher, tiny_model_dir, run, adapter, fleet.flags
    try:
        started = forks.start(train, *given, log=run / "log", folder=run, processes=2, **environment)
        forks.finish(started, run / "log")
    finally:
        fleet.close()
    kind, processes, found = json.loads((run / "logged.json").read_text())
    assert (kind, processes) == ("FSDP" if launcher == "fsdp2" else "DEEPSPEED", 2)
    assert [entry["ratio_max"] for entry in found] == pytest.approx([1] * 4, abs=rounding(LOGITS))
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    saved, sent = (load_file(run / name / file) for name in ("saved", "sent"))
    assert saved.keys() == sent.keys()
    assert all(torch.equal(weight, sent[name]) for name, weight in saved.items())
    here = make(tiny_model_dir, tmp_path, adapter, per_device_train_batch_size=8)
    before = weights(here.model)
    here.train()
    model = load_model(run / "saved").eval()
    after = dict(model.named_parameters())
    for name, weight in weights(here.model).items():
        assert (weight - before[name]).abs().max() > 1e-4, name
        assert_near(after[name], weight, least=LOGITS)  # Adam enlarges the rounding of a small gradient
    for rank in range(2):
        rows = load_file(run / f"{rank}.safetensors")
        draws = [keyed_generator(*KEY, 4 * rank + row) for row in range(4)]
        options = {"mask_token_id": here.mask_token_id, "eos_token_ids": here.stop_token_ids, "generator": draws}
        own = rollout(model, rows["prompt"], rows["mask"], here.sampling, **options)
        assert torch.equal(rows["ids"], own.ids)
        assert torch.equal(rows["logps"], own.logps)
