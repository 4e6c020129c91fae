"""The last lines of a run: a complete command that evaluates the model, and whether anything was learnt."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl import ModelConfig

from d1.eval import run as evaluation
from d1.models.kinds import native_config
from d1.rl import train
from d1.rl.bridge import EQUAL_REWARDS
from d1.rl.config import DiffuGRPOConfig
from d1.rl.methods import METHODS, Trained
from d1.rl.stage import flag_words, learnt_nothing, never_differed, next_command
from tests.commands import ROOT

POCKET = ROOT / "pocket" / "base"
PRODUCTS, PROBLEMS = ROOT / "pocket" / "products_base", ROOT / "dataset" / "products_train.jsonl"  # which can call
TRAINING = str(ROOT / "dataset" / "sudoku_train.csv")
RUN = "--use_cpu true --report_to none --max_steps 1 --num_iterations 1 --per_device_train_batch_size 4"
RUN += " --num_generations 4 --logging_steps 1 --output_dir run"


def printed(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """The words of the command that a run ends with."""
    parser = train.make_parser()
    with caplog.at_level(logging.INFO):
        train.main(*parser.parse_args_and_config(["--model_path", str(POCKET), *RUN.split(), *words]))
    (line,) = [
        text for text in caplog.messages if text.startswith(("The model is in run: ", "The adapter is in run: "))
    ]
    return shlex.split(line.partition(" is in run: ")[2])


def evaluated(words: list[str]) -> dict[str, Any]:
    """The settings with which the printed command evaluated, and it is only shortened."""
    assert words[:4] == ["python", "-m", "d1", "eval"]
    evaluation.main(evaluation.make_parser().parse_args([*words[4:], "--limit", "2"]))
    (record,) = Path("results").glob("*_record.json")
    return json.loads(record.read_text())["settings"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--sampler parallel --reveal factor --reveal_level 1.5 --cfg_scale 0.5",
            {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.5, "cfg_scale": 0.5, "split": "train"},
        ),
        (
            f"--model_path {PRODUCTS} --dataset products --data_file {PROBLEMS} --max_completion_length 32 "
            "--tools calculator --tool_format plain --max_turns 3 --result_length 9 --max_prompt_length 100",
            {"tools": ["calculator"], "tool_format": "plain", "max_turns": 3, "result_length": 9},
        ),
        (
            '--plain_chat_template true --chat_template_kwargs {"enable_thinking":false} --eval_data_file VALIDATION '
            "--block_length 8",
            {
                "plain_chat_template": True,
                "chat_template_kwargs": {"enable_thinking": False},
                "data_file": str(ROOT / "dataset" / "sudoku_validation.csv"),
                "split": "validation",
                "block_length": 8,
            },
        ),
    ],
)
def test_the_command_at_the_end_of_a_run_has_its_settings_and_runs_as_printed(
    words: str, expected: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = words.replace("VALIDATION", str(ROOT / "dataset" / "sudoku_validation.csv"))
    found = printed(caplog, "--dataset", "sudoku", "--data_file", TRAINING, *words.split())
    settings = evaluated(found)
    assert {name: settings[name] for name in expected} == expected
    assert (settings["gen_length"], settings["diffusion_steps"], settings["temperature"]) == (32, 16, 0.0)


def test_the_command_asks_as_the_run_did(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """In another protocol, whose examples come from the training file."""
    monkeypatch.chdir(tmp_path)
    config, _ = native_config(str(POCKET))
    args = DiffuGRPOConfig(
        output_dir="my run",
        dataset="gsm8k",
        prompt_protocol="llada",
        data_file="mine.jsonl",
        eval_data_file="held out.jsonl",
        use_cpu=True,
        bf16=False,
    )
    words = next_command(args, config)
    assert words == (
        "python -m d1 eval --model_path 'my run' --dataset gsm8k --split validation --data_file 'held out.jsonl' "
        "--prompt_protocol llada --few_shot_file mine.jsonl --gen_length 256 --diffusion_steps 128"
    )
    evaluation.make_parser().parse_args(shlex.split(words)[4:])
    args.dataset = "math"  # which has no examples in this protocol
    assert "--few_shot" not in next_command(args, config)


def test_a_model_with_uniform_noise_is_evaluated_with_its_temperatures(tiny_canvas_dir: Path) -> None:
    config, _ = native_config(str(tiny_canvas_dir))
    noise = {"sampler": "parallel", "reveal": "entropy", "temperature": 0.8, "end_temperature": 0.4}
    more = {"max_completion_length": 8, "diffusion_steps": 4, "block_length": 4, "self_conditioning": False}
    args = DiffuGRPOConfig(
        output_dir="run", estimator="accepted", scored_tokens="drawn", p_mask_prompt=0.0, use_cpu=True, bf16=False,
        **noise, **more
    )  # fmt: skip
    parsed = evaluation.make_parser().parse_args(shlex.split(next_command(args, config))[4:])
    expected = noise | {"self_conditioning": False, "gen_length": [8]}
    assert {name: getattr(parsed, name) for name in expected} == expected


def test_flags_become_words() -> None:
    flags = {"on": True, "off": False, "none": None, "many": ["a b", 1], "object": {"x": 1}, "number": 0.5}
    assert flag_words(flags) == ["--on", "--no-off", "--many", "a b", "1", "--object", '{"x": 1}', "--number", "0.5"]


# ---- runs that learn nothing


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([], False), ([None], False), ([1.0, None, 1.0], True), ([1.0, 0.875], False), ([0.0], False)],
)
def test_a_run_learnt_nothing_if_no_group_ever_differed(shares: list[float | None], expected: bool) -> None:
    logs = [{"loss": 0.0} if share is None else {EQUAL_REWARDS: share} for share in shares]
    assert never_differed(logs) == expected


def test_a_run_whose_rewards_never_differ_says_so_while_it_runs_and_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.py").write_text("def nothing(completions, **columns):\n    return [0.0] * len(completions)\n")
    same = ["--reward_file", "zero.py", "--reward_weights", "0", "1", "--max_steps", "2"]
    command = printed(caplog, "--dataset", "sudoku", "--data_file", TRAINING, *same)
    assert command[:4] == ["python", "-m", "d1", "eval"]  # status 0, as after any run
    (end,) = [text for text in caplog.messages if text.startswith("Nothing was learnt")]
    assert "up to the last step, 2, the rewards were equal within every group" in end
    assert "The last mean reward is 0." in end
    assert any(text.startswith("Until step 1 the rewards were equal") for text in caplog.messages)
    state = tmp_path / "run" / "trainer_state.json"
    fields = json.loads(state.read_text())
    fields["log_history"][0][EQUAL_REWARDS] = 0.5
    state.write_text(json.dumps(fields))
    assert learnt_nothing(tmp_path / "run") == []


# ---- what a method's authors trained


def test_every_method_of_a_paper_says_what_its_authors_trained() -> None:
    own = {"trajectory", "quick-replay", "reinforce"}  # this library's
    assert {name for name, method in METHODS.items() if method.trained is None} == own
    for name in METHODS.keys() - own:
        # The authors of the first four take a step per 256 or 8 views, or 8 completions, less than one prompt has.
        few = {"tracerl": 256 / 64 / 8, "unigrpo": 256 / 35 / 8, "slim-rl": 8 / 3 / 8, "lightning-rl": 8 / 32}
        few |= dict.fromkeys(("egspo", "egspo-sa"), 8 * 6 / 8)  # 8 GPUs x 6 completions
        prompts = METHODS[name].trained.prompts
        if name in few:
            assert prompts == pytest.approx(few[name], rel=0.02)
        else:
            assert prompts >= 8
        assert METHODS[name].scale["num_generations"] >= 4
    # d1: 8 GPUs x 6 completions x accumulation 2 (shared by 6 of a prompt), LoRA 128 on NF4
    assert METHODS["d1"].trained == Trained(8 * 6 * 2 // 6, lora_r=128, in_4bit=True)


def test_a_run_says_what_it_does_instead_of_the_methods_authors(caplog: Any, tmp_path: Path, monkeypatch: Any) -> None:
    stable = METHODS["stable-drl"]
    assert stable.deviation(Trained(32), 16, 1e-6) == ""
    said = stable.deviation(Trained(12, lora_r=128, in_4bit=True), 8, 1e-6)
    assert said == (
        "its authors trained all weights with 32 prompts x 16 completions per optimizer step; this run trains LoRA 128 "
        "on 4 bits with 12 x 8, and --learning_rate 1e-06 is the authors' for all weights"
    )
    assert "learning_rate" not in stable.deviation(Trained(12, lora_r=128), 8, 1e-5)
    assert METHODS["reinforce"].deviation(Trained(1), 2, 1.0) == ""
    monkeypatch.chdir(tmp_path)
    printed(caplog, "--dataset", "sudoku", "--data_file", TRAINING, "--use_peft", "true", "--lora_r", "4")
    (line,) = [text for text in caplog.messages if text.startswith("Method d1: its authors trained")]
    assert line.endswith("with 16 prompts x 6 completions per optimizer step; this run trains LoRA 4 with 1 x 4.")


# ---- settings that others have


def test_a_setting_that_nothing_reads_names_the_one_that_does() -> None:
    for given, right in (
        ({"generation_batch_size": 6}, "rollout_batch_size says how many completions a device samples at once"),
        ({"use_vllm": True}, "rollout_mode server"),
        ({"max_tool_calling_iterations": 3}, "max_turns"),
        ({"entropy_coef": 0.5}, "entropies are computed for metrics, without a gradient"),
        ({"use_adaptive_entropy": True}, "entropies are computed for metrics, without a gradient"),
        ({"data_seed": 5}, "seed also orders the prompts"),
        ({"label_smoothing_factor": 0.1}, "the losses of RL have no labels"),
        ({"train_sampling_strategy": "group_by_length"}, "shuffle_dataset says whether prompts"),
        ({"model_init_kwargs": {"dtype": "float32"}}, "dtype, attn_implementation and load_in_4bit"),
    ):
        with pytest.raises(ValueError, match=f"would be ignored here: leave it at .*; .*{right}"):
            DiffuGRPOConfig(output_dir="run", use_cpu=True, bf16=False, **given)
    args = SimpleNamespace(model_path=None)
    with pytest.raises(ValueError, match="leave it at None; model_path names the model"):
        train_stage_check(args, ModelConfig(model_name_or_path="X"))


def train_stage_check(args: Any, model_args: ModelConfig) -> None:
    from d1.rl.checks import check_model_settings

    check_model_settings(args, model_args)
