"""When a CPU computes in bf16 by default, and what SFT, RL and evaluation then do."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from d1.eval.completions import default_dtype
from d1.models import load_model, precision
from d1.models.kinds import native_config
from d1.models.precision import (
    bf16_deviation,
    bf16_instructions,
    bf16_speedup,
    cpu_runs_bf16,
    number_of_parameters,
)
from d1.sft.train import main, make_parser

SMALL = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
# Those of SmolLM2-135M: 134,515,008 parameters with a tied head
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
LARGE = LlamaConfig(**SMOLLM2)


def test_instructions_are_read_from_the_processors_flags(tmp_path):
    for flags, expected in (
        ("fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx2 avx512f avx512_bf160", None),
    ):
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: amx_bf16\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        )
        assert bf16_instructions(tmp_path / "cpuinfo") == expected
    assert bf16_instructions(tmp_path / "missing") is None


def test_the_check_finds_rounding_and_nothing_else(monkeypatch):
    """bf16 has 8 bits, so that each factor is off by up to 2^-9 of its size; wrong kernels are off by more."""
    state = torch.random.get_rng_state()
    measured = bf16_deviation.__wrapped__()
    assert 2**-10 < measured < precision.MAX_DEVIATION
    assert torch.equal(torch.random.get_rng_state(), state)
    right = torch.nn.functional.linear

    def wrong(inputs: Any, weight: Any, bias: Any) -> Any:
        found = right(inputs, weight, bias)
        return found * 1.05 if found.dtype == torch.bfloat16 else found

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    assert bf16_deviation.__wrapped__() > precision.MAX_DEVIATION


def test_the_speedup_is_that_of_products(monkeypatch):
    """A clock that runs by itself: a product in fp32 takes three seconds and one in bf16 two."""
    clock = [0.0]
    linear = torch.nn.functional.linear

    def product(inputs: Any, weight: Any) -> Any:
        clock[0] += 3.0 if inputs.dtype == torch.float32 else 2.0
        return linear(inputs, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: clock[0])
    assert bf16_speedup.__wrapped__(size=8) == 1.5


def test_large_models_run_in_bf16_where_it_is_exact_and_faster(monkeypatch, caplog):
    assert number_of_parameters(LARGE) == 134_515_008
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(precision, "bf16_speedup", lambda: 2.5)
    monkeypatch.setattr(precision, "bf16_instructions", lambda: None)
    assert not cpu_runs_bf16(LARGE)
    assert precision.why_not_bf16() == "this processor has no instructions for bf16"
    monkeypatch.setattr(precision, "bf16_instructions", lambda: "amx_bf16")
    assert not cpu_runs_bf16(SMALL)
    assert not caplog.messages
    assert cpu_runs_bf16(LARGE)
    monkeypatch.setattr(precision, "bf16_speedup", lambda: 0.55)
    assert not cpu_runs_bf16(LARGE)
    monkeypatch.setattr(precision, "bf16_deviation", lambda: 0.3)
    assert not cpu_runs_bf16(LARGE)
    fast, slow, wrong = caplog.messages
    assert fast.startswith("This processor has amx_bf16. A check of bf16 differs from fp64 by 0.0")
    assert "and is 2.5 times as fast as fp32: the model runs in bf16" in fast
    assert slow.startswith(
        "This processor has amx_bf16, but it multiplies at 0.55 times the speed of fp32, less than 1.2"
    )
    assert slow.endswith(": the model runs in fp32.")
    assert "its numbers differ from fp64 by 0.3 of the norm, more than 0.02: the model runs in fp32" in wrong


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+{i}", "completion": str(2 * i) * (1 + i % 5)} for i in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trained(model_dir, rows, folder, *words):
    """The losses, the weights and the recorded precision of four steps of SFT of all weights."""
    flags = ["--model_name", str(model_dir), "--train_data", str(rows), "--output_dir", str(folder), "--job_name", "a"]
    flags += ["--full_finetuning", "--max_steps", "4", "--learning_rate", "1e-3", "--batch_size", "4", "--debugging"]
    flags += ["--test_split", "0", "--logging_steps", "1", "--grad_accum_steps", "1", *words]
    trainer: Any = main(make_parser().parse_args(flags))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    record = json.loads((folder / "a" / "run.json").read_text())["settings"]["bf16"]
    return losses, load_model(folder / "a", "auto").state_dict(), record


def test_sft_in_bf16_on_a_cpu_keeps_weights_in_fp32(tiny_model_dir, rows, tmp_path, monkeypatch):
    run = partial(trained, tiny_model_dir, rows)
    default, exact = run(tmp_path / "default"), run(tmp_path / "fp32", "--bf16", "false")
    mixed = run(tmp_path / "bf16", "--bf16", "true")
    assert (default[2], exact[2], mixed[2]) == ("false", "false", "true")
    assert default[0] == exact[0]
    assert all(torch.equal(weight, exact[1][name]) for name, weight in default[1].items())
    assert mixed[0] != exact[0]
    assert mixed[0] == pytest.approx(exact[0], rel=0.02)
    assert {weight.dtype for weight in mixed[1].values()} == {torch.float32}
    monkeypatch.setattr("d1.runs.stage.cpu_runs_bf16", lambda config: True)
    chosen = run(tmp_path / "chosen")
    assert chosen[0] == mixed[0]
    assert chosen[2] == "true"


def test_an_evaluation_takes_the_same_default(tiny_model_dir, monkeypatch):
    config = native_config(str(tiny_model_dir))[0]
    assert default_dtype(config) is None
    monkeypatch.setattr("d1.eval.completions.cpu_runs_bf16", lambda config: True)
    assert default_dtype(config) == "bfloat16"
