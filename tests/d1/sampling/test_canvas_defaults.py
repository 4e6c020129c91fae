"""The canvas and the steps that nobody gave: one rule in every command, and the length that a model's folder names."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig

import d1.eval
from d1.__main__ import make_parser
from d1.commands.fit import method_sizes, with_recipe
from d1.commands.model import resolve_canvas
from d1.distill.config import DistillConfig
from d1.distill.stage import stage as distill_stage
from d1.eval import run as evaluation
from d1.models.kinds import default_gen_length, native_config
from d1.rl import train
from d1.rl.config import DiffuGRPOConfig
from d1.sampling.infilling import infill_settings
from d1.sampling.reveal import reveal_schedule
from d1.sampling.settings import SamplingSettings, default_steps, equal_blocks, sampling_settings
from tests.commands import ROOT

BASES = ["base", "arithmetic_base", "block_base", "causal_base", "countdown_base", "programs_base"]
POCKET = ROOT / "pocket" / "base"
# By hand: tokens, tokens per block -> half the tokens, or a step per block where that is more
STEPS = [(256, 32, 128), (512, 32, 256), (128, 32, 64), (32, 32, 16), (7, 32, 3), (1, 32, 1), (12, 1, 12), (9, 2, 5)]


@pytest.mark.parametrize(("length", "block", "steps"), STEPS)
def test_steps_that_nobody_gave_are_half_the_tokens_in_every_command(length: int, block: int, steps: int) -> None:
    assert default_steps(length, block) == steps
    words = ["--gen_length", str(length), "--block_length", str(block)]
    for command in (["chat", "MODEL"], ["serve", "MODEL"], ["watch", "--model_path", "MODEL", "--prompt", "x"]):
        parsed = make_parser().parse_args([*command, *words])
        assert sampling_settings(parsed, LlamaConfig()).steps == steps
    if length % block == 0 or block == 32:  # a block length that is given must divide the length in an evaluation
        required = ["--model_path", "x", "--dataset", "sudoku"]
        parsed = evaluation.make_parser().parse_args([*required, *words[: 2 if block == 32 else 4]])
        (run,) = evaluation.runs_of(parsed, BertConfig())
        assert run.diffusion_steps == steps
    if length % block == 0 and length > 1:  # RL's blocks are equal
        given = {"max_completion_length": length, "block_length": block}
        args = DiffuGRPOConfig(output_dir="x", use_cpu=True, bf16=False, **given)
        assert args.diffusion_steps == steps
        flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        parsed, _ = train.make_parser().parse_args_and_config([*flags, "--use_cpu", "true", "--bf16", "false"])
        assert parsed.diffusion_steps == steps


def test_the_default_is_enough_for_every_schedule() -> None:
    for length in range(1, 34):
        for block in range(1, 36):
            steps = default_steps(length, block)
            assert sum(map(sum, reveal_schedule(length, block, steps))) == length
            causal = default_steps(length, block, causal_first=True)
            settings = SamplingSettings(length, block, causal, first_token="causal")
            assert sum(map(sum, settings.schedule())) == length


def test_a_step_per_token_stays_where_it_was_the_default() -> None:
    assert infill_settings(LlamaConfig(), 5).steps == 5
    assert infill_settings(LlamaConfig(), 5, steps=2).steps == 2
    args = DiffuGRPOConfig(output_dir="x", method="just-grpo", max_completion_length=64, use_cpu=True, bf16=False)
    assert args.diffusion_steps == 64
    assert DiffuGRPOConfig(output_dir="x", diffusion_steps=None, use_cpu=True, bf16=False).diffusion_steps == 256


def test_the_length_of_the_command_line_decides_the_steps_of_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("max_completion_length: 64\nuse_cpu: true\nbf16: false\n")
    config = ["--config", str(tmp_path / "own.yaml")]
    for words, expected in (([], (64, 32)), (["--max_completion_length", "128"], (128, 64))):
        args, _ = train.make_parser().parse_args_and_config([*config, *words])
        assert (args.max_completion_length, args.diffusion_steps) == expected
    named = ["--method", "espo", "--max_completion_length", "128"]
    args, _ = train.make_parser().parse_args_and_config([*config, *named])
    assert (args.max_completion_length, args.diffusion_steps) == (128, 64)
    args, _ = train.make_parser().parse_args_and_config([*config, *named, "--diffusion_steps", "77"])
    assert (args.max_completion_length, args.diffusion_steps) == (128, 77)


@pytest.mark.parametrize(("length", "block"), [(256, 32), (48, 24), (200, 25), (12, 12), (7, 7), (34, 17)])
def test_blocks_that_nobody_gave_are_equal_in_rl(length: int, block: int) -> None:
    args = DiffuGRPOConfig(output_dir="x", max_completion_length=length, use_cpu=True, bf16=False)
    assert args.sampling_settings(LlamaConfig()).block_length == block == equal_blocks(length)
    # As other commands sample this length with blocks of at most 32, except where these are not equal (200).
    if length != 200:
        assert reveal_schedule(length, 32, length // 2) == reveal_schedule(length, block, length // 2)


def test_a_length_without_equal_blocks_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValueError, match="max_completion_length 97 has no equal blocks of 8 to 32 tokens: choose"):
        DiffuGRPOConfig(output_dir="x", max_completion_length=97, use_cpu=True, bf16=False)
    args = DiffuGRPOConfig(output_dir="x", max_completion_length=97, block_length=97, use_cpu=True, bf16=False)
    assert args.diffusion_steps == 48


def test_fit_counts_the_same_steps() -> None:
    found = {}
    for words in ([], ["--max_completion_length", "512", "--length", "712"], ["--diffusion_steps", "100"]):
        args = with_recipe(make_parser().parse_args(["fit", "--model_path", "x", "--stage", "rl", *words]))
        args = replace(args, method="cj-grpo")  # which scores every step
        found[" ".join(words[:2])] = method_sizes(args, None)["views"]
    assert found == {"": 128, "--max_completion_length 512": 256, "--diffusion_steps 100": 100}


# ---- the length that a model's folder names


def resolved(*words: str) -> Any:
    """The flags of a command with the length of its canvas."""
    args = make_parser().parse_args(words)
    return resolve_canvas(args, args.read_folder())


@pytest.mark.parametrize("name", BASES)
def test_a_pocket_model_is_sampled_on_a_length_it_was_trained_on(name: str) -> None:
    folder = str(ROOT / "pocket" / name)
    config, _ = native_config(folder)
    assert default_gen_length(folder, config) == 32
    args = resolved("chat", folder)
    settings = sampling_settings(args, config)
    assert (settings.gen_length, settings.steps) == (32, 16)
    rl = DiffuGRPOConfig(output_dir="x", use_cpu=True, bf16=False)
    rl.resolve_canvas(config, default_gen_length(folder, config))
    assert (rl.max_completion_length, rl.diffusion_steps) == (32, 16)


def test_a_model_that_names_no_length_has_that_of_the_command(tiny_model_dir: Path, tmp_path: Path) -> None:
    config, _ = native_config(str(tiny_model_dir))
    assert default_gen_length(str(tiny_model_dir), config) is None
    args = resolved("chat", str(tiny_model_dir))
    assert args.gen_length == 128
    given = resolved("chat", str(POCKET), "--gen_length", "40")
    assert given.gen_length == 40
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    for length, expected in ((24, 24), (512, None), (2048, None)):  # 512 positions leave no room for a prompt
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": length}))
        assert default_gen_length(str(folder), config) == expected
    for length in ("128", -1, [1]):
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": length}))
        with pytest.raises(ValueError, match=rf"generation_config.json of {folder} has a value that cannot be used"):
            default_gen_length(str(folder), config)


def test_evaluation_and_distillation_take_the_models_own_length(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 12}))
    (row,) = d1.eval.evaluate(folder, "sudoku", limit=2, output_dir=tmp_path / "results")
    assert row.gen_length == 12
    assert (tmp_path / "results" / "sudoku_model_12_6_0_generations.json").is_file()
    options: dict[str, Any] = {"model_name": str(folder), "train_data": "sudoku", "output_dir": str(tmp_path)}
    own = DistillConfig(report_to="none", **options)
    distill_stage(own)
    assert (own.max_completion_length, own.diffusion_steps) == (12, 6)
    other = DistillConfig(report_to="none", **options | {"model_name": str(tiny_model_dir)})
    distill_stage(other)
    assert (other.max_completion_length, other.diffusion_steps) == (256, 128)


# ---- extreme numbers

EXTREME = ["1e-300", "5e-324", "1e308", "inf", "-inf", "nan", "-1.0", "-0.0"]
SETTINGS = {  # what else the setting needs
    "temperature": "",
    "cfg_scale": "",
    "reveal_level": "--sampler parallel",
    "edit_threshold": "--sampler parallel",
    "end_temperature": "",
    "stop_entropy": "",
}


def choose(*words: str) -> SamplingSettings:
    return sampling_settings(replace(make_parser().parse_args(words), gen_length=8))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", EXTREME)
def test_an_extreme_number_of_a_sampler_is_refused_by_name(name: str, number: str) -> None:
    words = [f"--{name}={number}", *SETTINGS[name].split()]
    for command in (["chat", str(POCKET)], ["fill", str(POCKET), "[MASK]"]):
        with pytest.raises(ValueError, match=f"{name}.*must be in "):
            choose(*command, *words)
    with pytest.raises(ValueError, match=name):
        train.make_parser().parse_args_and_config([*words, "--use_cpu", "true", "--bf16", "false"])


def test_all_sampler_numbers_that_are_not_counts_are_tested_above() -> None:
    from d1.sampling.settings import RANGES

    assert {name for name, row in RANGES.items() if not row.integer} == {*SETTINGS, "top_p", "nucleus_p"}
    for value, name in product((1e-300, -0.0, 0.0, 5e-324, float("nan")), ("top_p", "nucleus_p")):
        sampler: dict[str, Any] = {"sampler": "scdd", name: value}
        with pytest.raises(ValueError, match=f"{name} must be in "):
            SamplingSettings(8, 8, 8, temperature=1.0, **sampler)
    for value in (1e-6, 1e4, 0.0):
        assert SamplingSettings(8, 8, 8, temperature=value).temperature == value
