"""A decoder that `d1 a2d` gave a causal context, with and without the shift: SFT, RL and evaluation of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from d1.__main__ import make_parser as command_parser
from d1.commands.fit import method_sizes, with_config
from d1.eval import evaluate
from d1.models import load_model, load_tokenizer
from d1.models.convert import a2d
from d1.rl.config import DiffuGRPOConfig
from d1.rl.stage import load_problems, next_command
from d1.sft.train import main, make_parser
from d1.tasks import load_task, under_protocol
from tests.d1.rl.test_methods import ALL_KEPT, first_rollout, logged
from tests.tiny_grpo import make_method

SHIFTS = {"in place": False, "shift": True}


@pytest.fixture(scope="module", params=SHIFTS)
def converted(request: Any, tiny_model_dir: Path, tmp_path_factory: Any) -> Path:
    """Blocks of 4 tokens."""
    folder = tmp_path_factory.mktemp("converted")
    fields = json.loads((tiny_model_dir / "config.json").read_text())
    sizes = {name: fields[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder / "ar")
    load_tokenizer(str(tiny_model_dir)).save_pretrained(folder / "ar")
    options: dict[str, Any] = {"block_size": 4, "causal_context": True, "keep_shift": SHIFTS[request.param]}
    a2d(str(folder / "ar"), str(folder / "model"), mask_token="<mask>", **options)
    return folder / "model"


@pytest.mark.parametrize("method", ["d1", "tracerl", "cj-grpo"])
@pytest.mark.parametrize("sampler", ["exact", "parallel"])
def test_rl_scores_what_was_sampled_and_moves_weights(converted, tmp_path, method, sampler):
    """`cj-grpo` replays each step, so its scores are those that the sampler noted."""
    options: dict[str, Any] = {"max_completion_length": 12, "diffusion_steps": 12, "sampler": sampler, **ALL_KEPT}
    unmerged = {"segment_steps": 1} if method == "tracerl" else {}
    trainer, _ = first_rollout(converted, tmp_path / "first", method, **options, **unmerged)
    entry = logged(trainer)[0]
    if method != "d1":
        assert entry["sampling/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert entry["sampling/logp_difference_abs"] == pytest.approx(0.0, abs=1e-5)
    before = load_model(converted).state_dict()
    trained = make_method(
        converted, tmp_path / "run", method, max_steps=2, learning_rate=1e-2, bf16=True, use_cpu=True, **options
    )
    trained.train()
    assert all(entry.get("grad_norm", 1.0) > 0 for entry in logged(trained))
    assert all(torch.isfinite(weight).all() for weight in trained.model.state_dict().values())
    assert any(not torch.equal(weight, before[name]) for name, weight in trained.model.state_dict().items())


@pytest.mark.parametrize(
    "how", [[], ["--packing"], ["--masked_weight", "1", "--causal_weight", "0.3", "--bf16", "true"]]
)
def test_sft_teaches_and_the_result_is_evaluated(converted, tmp_path, how):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}", "completion": "7 7"}) + "\n" for i in range(24)))
    flags = [
        "--model_name",
        str(converted),
        "--train_data",
        str(rows),
        "--output_dir",
        str(tmp_path),
        "--job_name",
        "a",
    ]
    flags += ["--full_finetuning", "--max_steps", "40", "--learning_rate", "1e-2", "--batch_size", "8", "--debugging"]
    flags += ["--test_split", "0.2", "--eval_steps", "40", "--grad_accum_steps", "1", "--eos_padding", "6", *how]
    trainer: Any = main(make_parser().parse_args(flags))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < 0.2 * losses[0]
    for sampler in ("exact", "parallel"):
        options: dict[str, Any] = {"gen_length": [8], "sampler": sampler, "limit": 2, "dont_save": True}
        [found] = evaluate(tmp_path / "a", "sudoku", **options)
        assert found


def test_the_command_after_rl_asks_as_the_run_did_and_shots_are_those_asked_for(tmp_path):
    own: dict[str, Any] = {"output_dir": str(tmp_path), "dataset": "gsm8k", "use_cpu": True, "bf16": False}
    config = SimpleNamespace(model_type="llama")  # of a model with masks
    plain = next_command(DiffuGRPOConfig(**own), config)
    assert not {"--prompt_protocol", "--few_shot", "--data_file"} & {*plain.split()}
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"{i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(8)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = DiffuGRPOConfig(**own, prompt_protocol="llada", few_shot=0, data_file=str(rows))
    command = next_command(args, config)
    assert f"--split train --data_file {rows} --prompt_protocol llada --few_shot 0" in command
    assert "--few_shot_file" not in command
    args.eval_data_file = "validation.jsonl"
    assert "--split validation --data_file validation.jsonl" in next_command(args, config)
    task = under_protocol(load_task("gsm8k"), "llada")
    for asked_for, turns in ((None, 9), (0, 1), (2, 5)):
        args.few_shot = asked_for
        found, _ = load_problems(task, args)
        assert {len(prompt) for prompt in found["prompt"]} == {turns}


def test_fit_computes_an_rl_recipe_with_its_own_blocks(converted, tmp_path):
    """Also if the default, 32, does not divide the completion."""
    recipe = tmp_path / "rl.yaml"
    recipe.write_text(
        f"# Hardware: 1 GPU with 24 GB (RTX 4090)\nmodel_path: {converted}\ndataset: gsm8k\nblock_length: 8\n"
        "max_completion_length: 48\ndiffusion_steps: 48\nmax_prompt_length: 64\nmax_steps: 4\noutput_dir: runs/a\n"
    )
    args, _ = with_config(command_parser().parse_args(["fit", "--config", str(recipe), "--rows", "64"]))
    assert args.block_length == 8
    assert method_sizes(args, None)["canvas"] == 48
