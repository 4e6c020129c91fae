"""What only a GPU runs, compared with a CPU or with a plain kernel: `make test ARGS="-n 0 -m gpu"`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import SamplingSettings, rollout
from d1.sampling.graphs import COMPILED_MODELS, set_compile
from pocket.make_base import build_model, diffusion_loss
from pocket.tokenizer import build_tokenizer
from tests.commands import ROOT
from tests.d1.conftest import write_transformers
from tests.rounding import LOGITS, rounding

pytestmark = pytest.mark.gpu
IDS = torch.randint(4, 64, (2, 16), generator=keyed_generator(0))
VISIBLE = torch.ones_like(IDS)
VISIBLE[0, :5] = 0
MIXTURES = ("lladamoe", "llada2_moe", "sdar_moe")


def logits(model: Any) -> Tensor:
    ids, visible = IDS.to(model.device), VISIBLE.to(model.device)
    return model(input_ids=ids, attention_mask=visible).logits[visible.bool()]


def logits_and_gradients(model: Any) -> dict[str, Tensor]:
    """The logits and, for their mean square, the gradient of each weight, on the CPU."""
    found = logits(model)
    found.square().mean().backward()
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
    return gradients | {"logits": found.detach().cpu()}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor differs by less than `tolerance` of its own norm, or of a thousandth of the largest norm."""
    assert found.keys() == wanted.keys()
    largest = max(value.norm() for value in wanted.values())
    for name, value in wanted.items():
        assert (found[name] - value).norm() < tolerance * max(value.norm(), 1e-3 * largest), name


def test_logits_and_gradients_are_those_of_a_cpu(kind_dirs, kind):
    check(
        logits_and_gradients(load_model(kind_dirs[kind], device="cuda")),
        logits_and_gradients(load_model(kind_dirs[kind])),
        1e-4,
    )


@pytest.mark.parametrize("kind_", MIXTURES)
def test_grouped_experts_in_bf16(kind_dirs, kind_):
    """Against one expert after the other, in fp32: as close as bf16 allows."""
    grouped = load_model(kind_dirs[kind_], torch.bfloat16, "cuda")
    grouped.set_experts_implementation("grouped_mm")
    plain = load_model(kind_dirs[kind_], device="cuda")
    plain.set_experts_implementation("eager")
    difference = (logits(grouped) - logits(plain)).detach().float()
    assert difference.abs().mean() < 0.05 * logits(plain).std()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_attention_trains(tmp_path, checkpointing):
    folder = write_transformers(tmp_path / "qwen3", "qwen3", {"head_dim": 16})  # the kernel needs 16 or more

    def trained(kernel: str) -> dict[str, Tensor]:
        model = load_model(folder, device="cuda", attn_implementation=kernel).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        return logits_and_gradients(model)

    check(trained("flex_attention"), trained("sdpa"), 1e-4)


@pytest.mark.parametrize("blocks", [None, 8])
def test_the_loss_and_gradients_of_a_base_are_those_of_a_cpu(blocks):
    tokenizer = build_tokenizer("numbered_arithmetic")

    def found(device: str) -> dict[str, Tensor]:
        model: Any = build_model(tokenizer, 0, block_size=blocks)
        loss = diffusion_loss(model.to(device), torch.cat([IDS, IDS], 1), 12, tokenizer.mask_token_id, (0, 1))
        loss.backward()
        return {name: weight.grad.cpu() for name, weight in model.named_parameters()} | {"loss": loss.detach()}

    check(found("cuda"), found("cpu"), 1e-4)


def test_nf4_weights_compute_what_they_do_on_a_cpu(tmp_path, llada_writer):
    pytest.importorskip("bitsandbytes")
    folder = llada_writer(tmp_path / "llada", d_model=128, mlp_hidden_size=256)
    with torch.no_grad():
        models = (load_model(folder, device=device, quantization="nf4") for device in ("cuda", None))  # None: the CPU
        found, wanted = ({"logits": logits(model).cpu()} for model in models)
    check(found, wanted, 1e-3)


@pytest.mark.parametrize("kind_", ["llama", "Dream", "sdar"])
@pytest.mark.parametrize("sampler", [{}, {"sampler": "cached", "kv_cache": "dual"}, {"sampler": "parallel"}], ids=str)
@pytest.mark.parametrize("compile", ["graphs", "layers"])
def test_compiled_passes_sample_as_plain_ones(kind_dirs, kind_, sampler, compile):
    """Greedy and drawn, with rows that leave at an EOS; shapes that are new, captured and replayed."""
    if kind_ == "sdar" and "kv_cache" in sampler:
        pytest.skip("block-causal models have a cache of their own")
    model: Any = load_model(kind_dirs[kind_], device="cuda")
    ids, visible = IDS.cuda().repeat(3, 1), VISIBLE.cuda().repeat(3, 1)

    def sampled(temperature: float, ends: list[int] | None) -> Any:
        how = SamplingSettings(16, 4, 12, temperature, **sampler)
        draws = [keyed_generator(row, device="cuda") for row in range(6)] if temperature else None
        return rollout(model, ids, visible, how, mask_token_id=3, generator=draws, eos_token_ids=ends)

    cases = [(temperature, ends) for temperature in (0.0, 0.8) for ends in (None, [*range(10, 20)])]
    plain = [sampled(*case) for case in cases]
    set_compile(model, compile)
    for _ in range(3):
        for case, wanted in zip(cases, plain, strict=True):
            found = sampled(*case)
            assert torch.equal(found.ids, wanted.ids)
            torch.testing.assert_close(found.logps, wanted.logps, rtol=0, atol=rounding(LOGITS))
    if compile == "graphs":
        made = COMPILED_MODELS[model][1]
        assert made.replays > 4 * made.captures > 0
        assert not made.failed


def run(*words: str | Path, folder: str, **variables: str) -> str:
    """A command with `python` and `accelerate` of this environment; its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", **variables}
    options: dict[str, Any] = {"cwd": ROOT / folder, "env": environment, "timeout": 300, "text": True}
    done = subprocess.run([*map(str, words)], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_d1s_commands_train_and_evaluate_the_pocket_model(tmp_path):
    """SFT with ZeRO-2 and LoRA, RL by `run.sh` with ZeRO-2 on 4-bit weights, and `run_eval.sh`, in bf16. Prompts have
    several lengths, so some batches have padding, and others not."""
    pytest.importorskip("deepspeed")
    data = {split: f"../dataset/pocket_countdown_{split}.jsonl" for split in ("sft", "train", "test")}
    sft = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file")
    sft += ("ddp_config.yaml", "sft_train.py", "--model_name", "../pocket/countdown_base", "--train_data", data["sft"])
    sft += ("--output_dir", str(tmp_path), "--job_name", "sft", "--max_steps", "4", "--test_split", "0")
    run(*sft, "--merge_at_end", "--debugging", folder="SFT")
    rl = ("--max_completion_length", "24", "--block_length", "8", "--diffusion_steps", "12", "--max_steps", "4")
    rl += ("--learning_rate", "1e-3", "--report_to", "none", "--data_file", data["train"])
    settings = {"DATASET": "countdown", "COMPLETIONS": "48", "NUM_ITER": "4", "OUTPUT_DIR": str(tmp_path / "rl")}
    run("bash", "run.sh", *rl, folder="diffu-grpo", MODEL_PATH=str(tmp_path / "sft/merged"), GPUS="1", **settings)
    first, *_, last = map(json.loads, (tmp_path / "rl/metrics.jsonl").read_text().splitlines()[:4])
    assert (first["ratio_max"], last["ratio_max"] > 1.001) == (1, True)
    assert 0 < first["peak_memory_gb"] < 10
    settings = {"TASKS": "countdown", "GEN_LENGTHS": "24", "BLOCK_LENGTH": "8", "OUTPUT_DIR": str(tmp_path / "results")}
    extra = f"--limit 16 --data_file {data['test']}"
    run("bash", "run_eval.sh", "0", folder="eval", MODEL_PATH=str(tmp_path / "rl"), EXTRA=extra, **settings)
    assert "countdown" in run(sys.executable, "parse_and_get_acc.py", tmp_path / "results", folder="eval")
