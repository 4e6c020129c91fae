"""The entry point: what it accepts, what it refuses before a model is loaded and with which message, what the scripts
around it launch, and its reports."""

import contextlib
import fnmatch
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, TrainerCallback
from trl import ModelConfig

from d1 import __main__ as d1_main
from d1.models import load_model
from d1.models.kinds import native_config
from d1.rl import checks as grpo_checks
from d1.rl import stage as grpo_stage
from d1.rl import train as diffu_grpo_train
from d1.rl.checks import check_config, check_prompts
from d1.rl.config import DiffuGRPOConfig
from d1.rl.methods import METHODS
from d1.runs.record import RunHistory
from d1.show.curves import panels
from d1.show.report import ORDER, PANELS, SHOWN_FILE, draw, draw_panel, read_run, report_page, running_mean, series
from d1.show.report import main as report_main
from d1.show.report import make_parser as report_parser
from tests import forks
from tests.commands import ROOT, calls_of, check_python
from tests.d1.released import write_wide
from tests.rounding import LOGITS, assert_near

STAGE = ROOT / "diffu-grpo"


def settings(tmp_path, **changes):
    return {
        "output_dir": str(tmp_path / "run"),
        "model_path": str(ROOT / "pocket" / "base"),
        "dataset": "sudoku",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 32,
        "diffusion_steps": 16,
        "report_to": "none",
        **changes,
    }


TINY = {
    "dataset": str(Path(__file__).with_name("letters_task.py")),
    "max_completion_length": 8,
    "block_length": 4,
    "diffusion_steps": 4,
    "gradient_checkpointing": False,
}


def bare(*words):
    """The settings of `d1 rl --model_path pocket/base --dataset sudoku` and more words."""
    words = ["--model_path", str(ROOT / "pocket" / "base"), "--dataset", "sudoku", *words]
    return diffu_grpo_train.make_parser().parse_args_and_config([*words, "--use_cpu", "true"])[0]


def test_the_line_of_the_help_runs_with_defaults_that_fit_together(tmp_path):
    """On a model whose 256 positions have no room for d1's canvas."""
    assert "python -m d1 rl --model_path X --dataset sudoku " in d1_main.__doc__
    assert bare().output_dir == "runs/rl"
    words = ["rl", "--model_path", str(ROOT / "pocket" / "base"), "--dataset", "sudoku", "--max_steps", "1"]
    words += ["--data_file", str(ROOT / "dataset" / "sudoku_train.csv"), "--report_to", "none"]
    log = tmp_path / "log"
    said = forks.finish(forks.start(forks.module, "d1", *words, log=log, folder=tmp_path), log)
    assert "max_completion_length is 32 and diffusion_steps 16: max_new_tokens of the model's generation_config" in said
    record = json.loads((tmp_path / "runs" / "rl" / "run.json").read_text())["settings"]
    expected = {"per_device_train_batch_size": 6, "num_generations": 6, "max_completion_length": 32}
    assert {name: record[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        ("", (6, 8)),
        ("--num_generations 4", (8, 8)),  # as before: 8 are two groups
        ("--gradient_accumulation_steps 3", (8, 8)),  # 24 completions per rollout
        ("--eval_strategy steps --eval_steps 1", (6, 6)),
        ("--eval_strategy steps --eval_steps 1 --num_generations_eval 1", (6, 8)),
        ("--method coupled-grpo", (10, 8)),
        ("--per_device_train_batch_size 12", (12, 8)),
    ],
)
def test_batches_that_nobody_gave_make_whole_groups(words, batches):
    args = bare(*words.split())
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == batches


def test_a_message_about_groups_names_what_was_given():
    for given, said in (("", "6, the default of method d1"), (" --num_generations 5", "5")):
        with pytest.raises(ValueError, match=f"--per_device_train_batch_size 8 .* num_generations {said}$"):
            bare(*f"--per_device_train_batch_size 8{given}".split())
    for size, given, said in (("6", "", "8, the default of method agrpo"), ("8", " --num_generations 6", "6")):
        with pytest.raises(ValueError, match=f"--per_device_train_batch_size {size} .* num_generations {said}$"):
            bare(*f"--method agrpo --per_device_train_batch_size {size}{given}".split())


def test_a_canvas_that_was_given_is_not_made_shorter():
    for given in (["--max_completion_length", "256"], ["--max_completion_length", "64", "--diffusion_steps", "32"]):
        args = bare(*given)
        args.resolve_canvas(native_config(args.model_path)[0])
        assert args.max_completion_length == int(given[1])
    with pytest.raises(ValueError, match=r"18 tokens of text and 256 .*: lower --max_completion_length$"):
        check_config(native_config(args.model_path)[0], 18, bare("--max_completion_length", "256"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_completion_length": 30, "block_length": 32}, "must be a multiple of block_length"),
        ({"max_completion_length": 128, "diffusion_steps": 3}, "between 4 and 128 steps, got 3"),
        ({"diffusion_steps": 33}, "between 1 and 32 steps, got 33"),
        ({"num_generations": 3}, "divisible by num_generations"),
        ({"remasking": "margin"}, "low_confidence, random, leftmost, entropy"),
        ({"kv_cache": "dual"}, "would be ignored by the sampler exact"),  # as of SamplingSettings
        ({"min_p": 0.1}, "min_p=0.1 would be ignored here: leave it at None"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 would"),
        ({"cache_implementation": "static"}, "cache_implementation='static' would"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs"),
        ({"use_vllm": True}, "use_vllm"),
        ({"transformers_continuous_batching_config": {"max_batch_tokens": 64}}, "continuous_batching_config={.* would"),
        ({"loss_type": "best"}, "the objective trl has no loss_type best: use one of grpo, bnpo"),
        ({"importance_sampling_level": "word"}, "must be one of token, sequence"),
        ({"scale_rewards": "std"}, "must be one of none, group, batch"),
        ({"generation_batch_size": 6}, "rollout_batch_size"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        DiffuGRPOConfig(**settings(tmp_path, **change))


def run_main(tmp_path, model_args=None, callbacks=None, **changes):
    args = DiffuGRPOConfig(**settings(tmp_path, **changes))
    return diffu_grpo_train.main(args, model_args or ModelConfig(), callbacks)


SERVED = {"rollout_mode": "server", "rollout_server_base_url": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "game24"}, "unknown task 'game24': use one of gsm8k, math, countdown, sudoku"),
        ({"dataset": "sudoko"}, r"unknown task 'sudoko' \(the nearest is sudoku\): use one of gsm8k"),
        ({"dataset": "gsm8k", "data_file": None, "model_path": "./missing"}, "there is no model folder ./missing"),
        ({"model_path": None}, "--model_path is missing"),
        ({"model_path": "no/model"}, "no/model is no folder here and is not in the hub's cache"),
        ({"model_path": "../SFT/runs/none/merged"}, "there is no model folder ../SFT/runs/none/merged"),
        ({"model_path": "no/such/model"}, "there is no model folder no/such/model"),
        ({"model_path": __file__}, "test_train_script.py is a file: name the folder of the model"),
        ({"data_file": "no_such.csv"}, "no data file no_such.csv"),
        ({"dataset": "countdown", "prompt_protocol": "llada"}, "has no prompt protocol 'llada': use one of d1"),
        ({"dataset": "no_such_task.py"}, "no task file"),
        ({"reward_weights": [1.0, 2.0]}, "task sudoku has 1 rewards, got 2"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True would be ignored"),
        ({"load_in_4bit": True, "use_peft": False}, "needs --use_peft"),
        ({"load_in_4bit": True, "use_peft": True} | SERVED, "another policy than 4-bit ones"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' would be ignored"),
        ({"use_peft": True, "sync_ref_model": True}, "sync_ref_model needs a reference model in memory"),
    ],
)
def test_what_cannot_work_is_named_before_a_model_is_loaded(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr("d1.rl.stage.load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    of_model = {name: change[name] for name in change.keys() & ModelConfig.__dataclass_fields__}
    own = {name: value for name, value in change.items() if name not in of_model}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_main(tmp_path, ModelConfig(**of_model), **own)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what there is to do without a GPU")
def test_a_recipe_says_what_it_needs_without_a_gpu(tmp_path):
    words = ["--config", str(STAGE.parent / "recipes/llada-1.5-rl.yaml"), "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=r"for a GPU \(bf16\), and PyTorch finds none .*: check `nvidia-smi`"):
        diffu_grpo_train.make_parser().parse_args_and_config(words)


def test_missing_validation_rows_are_asked_for_by_their_own_flag(tmp_path):
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 2)
    with pytest.raises(ConnectionError, match="pass --eval_data_file FILE"):
        run_main(tmp_path, dataset="gsm8k", data_file=str(rows), eval_strategy="steps", eval_steps=1)


TASK = """
from datasets import Dataset
def load_rows(split, data_file=None): return Dataset.from_list({row}[split == {empty!r}:])
def extract(text): return text
def score(text, row): return {{"accuracy": 1.0}}
def equal(completions, {reads}**columns): return [0.0]
REWARDS = [equal]
"""


def task_file(folder, empty="", reads=""):
    """A task whose split `empty` has no rows, and whose reward reads a column that the rows do not have."""
    row = [{"prompt": [{"role": "user", "content": "x"}], "question": "x"}]
    (folder / "own.py").write_text(TASK.format(row=row, empty=empty, reads=reads))
    return str(folder / "own.py")


@pytest.mark.parametrize(("split", "verb", "flag"), [("train", "train", ""), ("validation", "validate", "eval_")])
def test_a_task_without_rows_is_refused(tmp_path, split, verb, flag):
    """A data set without rows, as after a filter in a user's own task; the error names a file without rows."""
    with pytest.raises(ValueError, match=rf"task .*own.py has no rows to {verb} on \(--{flag}data_file"):
        run_main(tmp_path, dataset=task_file(tmp_path, split), eval_strategy="steps", eval_steps=1)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl has no rows"):
        run_main(tmp_path, dataset="sudoku", data_file=str(tmp_path / "empty.jsonl"))


def test_a_dataset_without_the_columns_of_a_reward_is_refused(tmp_path):
    says = r"reward equal .* cannot score its rows .*'ground_truth'.* columns prompt, question"
    with pytest.raises(ValueError, match=says):
        run_main(tmp_path, dataset=task_file(tmp_path, reads="ground_truth, "))


VALIDATED = """
from datasets import Dataset
TRAIN = {{"prompt": [{{"role": "user", "content": "x"}}], "question": "x", "ground_truth": "x", "hint": "x"}}
def load_rows(split, data_file=None):
    lacks = () if split == "train" else ({column!r},)
    return Dataset.from_list([{{name: value for name, value in TRAIN.items() if name not in lacks}}] * 4)
def extract(text): return text
def score(text, row): return {{"accuracy": 1.0}}
def needs_hint(completions, hint, **columns): return [0.0] * len(completions)
REWARDS = [needs_hint]
"""


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            "prompt",
            r"rows of task .* to validate on have no column 'prompt', only \['question', 'ground_truth', 'hi",
        ),
        # The line is that of the function, which cannot be called.
        ("hint", r"cannot score its validation rows \(it raised TypeError: .*'hint' \(.*own.py, line 9\)\); they have"),
    ],
)
def test_a_column_that_validation_rows_lack_is_named_at_the_start(tmp_path, column, said):
    """Without a column that a reward reads, the run ended at its first evaluation."""
    (tmp_path / "own.py").write_text(VALIDATED.format(column=column))
    with pytest.raises(ValueError, match=said):
        run_main(tmp_path, dataset=str(tmp_path / "own.py"), eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("lora", [False, True])
def test_an_sft_adapter_is_a_start_for_both_kinds_of_rl(tiny_model_dir, tmp_path, lora):
    base = load_model(str(tiny_model_dir))
    adapted = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "sft")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "sft")
    expected = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    seen = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            inner = model.get_base_model() if lora else model
            layer = inner.model.layers[0].self_attn.q_proj
            seen["start"] = (layer.base_layer if lora else layer).weight.detach().clone()

    options = TINY | {"model_path": str(tmp_path / "sft"), "max_steps": 1, "num_iterations": 1}
    run_main(tmp_path, ModelConfig(use_peft=lora, lora_target_modules=["q_proj", "v_proj"]), [Look()], **options)
    assert_near(seen["start"], expected, least=LOGITS)
    assert (tmp_path / "run" / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
    load_model(str(tmp_path / "run"))  # the result of RL is a valid path for eval


@pytest.mark.parametrize("causal_context", [False, True])
def test_qlora_and_bf16_train_on_a_cpu(tiny_model_dir, tmp_path, causal_context):
    """NF4 weights stay as they are, only the adapter is trained, in fp32, and the first ratio is 1."""
    pytest.importorskip("bitsandbytes")
    model = ModelConfig(use_peft=True, load_in_4bit=True, dtype="bfloat16", lora_target_modules=["q_proj", "v_proj"])
    options = {"data_file": str(ROOT / "dataset/sudoku_train.csv"), "num_iterations": 2, "max_steps": 2, "bf16": True}
    if causal_context:
        base = str(write_wide(tmp_path / "base", tiny_model_dir))
        options |= TINY | {"data_file": None, "model_path": base, "method": "cj-grpo"}
    trainer = run_main(tmp_path, model, use_cpu=True, logging_steps=1, learning_rate=1e-2, **options)
    weights = dict(trainer.model.named_parameters())
    layers = trainer.model.config.num_hidden_layers
    assert sum(weight.dtype == torch.uint8 for weight in weights.values()) == layers * 7
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    assert all("lora_" in name for name in trained)
    states = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert {value.dtype for value in (*trained.values(), *states)} == {torch.float32}  # as `d1 fit` counts them
    assert any("lora_B" in name and weight.abs().max() > 1e-3 for name, weight in trained.items())
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio_max"] == 1.0


def test_a_model_without_a_mask_token_is_refused(tiny_model_dir, tmp_path):
    folder = tmp_path / "maskless"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    with pytest.raises(ValueError, match="mask"):
        run_main(tmp_path, model_path=str(folder))


def test_a_plain_chat_template_comes_on_request(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template: --plain_chat_template true gives it one"):
        run_main(tmp_path, model_path=str(folder))
    with pytest.raises(ValueError, match=r"prompts are longer than max_prompt_length=1 tokens"):  # it continued
        run_main(tmp_path, model_path=str(folder), plain_chat_template=True, max_prompt_length=1)


def test_prompts_that_are_too_long_are_counted_and_truncated_only_if_asked(tmp_path):
    args = DiffuGRPOConfig(**settings(tmp_path, max_prompt_length=20))
    assert check_prompts([8, 20], args) == 20
    with pytest.raises(ValueError, match=r"2 of 3 prompts are longer .* first is row 1, the longest has 63"):
        check_prompts([8, 43, 63], args)
    args.truncate_prompts = True
    assert check_prompts([8, 43, 63], args) == 20


def test_one_name_of_a_module_is_a_name_and_no_pattern(tiny_model_dir):
    model = load_model(str(tiny_model_dir))
    given = {"q_proj": {"q_proj"}, "attention": {"q_proj", "k_proj", "v_proj", "o_proj"}}
    for typed, targets in given.items():
        config = grpo_stage.adapter_config(ModelConfig(use_peft=True, lora_target_modules=[typed]), model)
        assert config.target_modules == targets
    assert grpo_stage.adapter_config(ModelConfig(use_peft=True), model).target_modules is None
    assert grpo_stage.adapter_config(ModelConfig(), model) is None


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "mu", "epochs"), [(1, 1, 2, 1), (5, 1, 1, 1), (2, 4, 3, 1), (3, 3, 1, 1.5)]
)
def test_the_plan_is_what_happens(tiny_model_dir, tmp_path, capsys, accumulation, per_generation, mu, epochs):
    split = {"gradient_accumulation_steps": accumulation, "steps_per_generation": per_generation}
    length = {"num_iterations": mu, "num_train_epochs": epochs, "save_strategy": "no"}
    trainer = run_main(tmp_path, model_path=str(tiny_model_dir), **TINY, **split, **length)
    planned = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["plan"]
    assert planned["optimizer steps"] == trainer.state.global_step
    assert planned["rollouts"] == len(trainer.rollout_seconds)
    assert "mean loss" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "replaced_by"), [("torch_dtype", "dtype"), ("warmup_ratio", r"warmup_steps \(below 1 it is a share")]
)
def test_flags_that_are_gone_say_what_replaced_them(tmp_path, name, replaced_by, capsys):
    parser = diffu_grpo_train.make_parser()
    config = tmp_path / "old.yaml"
    config.write_text(f"{name}: 0.5\noutput_dir: {tmp_path}\n")
    words = ["--use_cpu", "true", "--per_device_train_batch_size", "6"]
    for arguments in (["--output_dir", "x", f"--{name}", "0.5"], [f"--{name}=0.5"]):
        with pytest.raises(SystemExit):
            parser.parse_args_and_config([*words, *arguments])
        assert re.search(f"--{name} is now --{replaced_by}", capsys.readouterr().err)
    with pytest.raises(ValueError, match=f"--{name} is now --{replaced_by}"):
        parser.parse_args_and_config([*words, "--config", str(config)])
    fields = DiffuGRPOConfig.__dataclass_fields__.keys() | ModelConfig.__dataclass_fields__.keys()
    assert not fields & diffu_grpo_train.RENAMED.keys()
    assert all(re.match(r"\w+", new)[0] in fields for new in diffu_grpo_train.RENAMED.values())


def test_a_finished_run_started_again_is_left_alone_or_gets_the_model_it_lacks(tiny_model_dir, tmp_path):
    """It has a model card. A push to the hub is refused."""
    once = {"model_path": str(tiny_model_dir), "max_steps": 2, "num_iterations": 2, "save_steps": 2, **TINY}
    once |= {"method": "wd1"}
    again = {"resume_from_checkpoint": "true", **once}
    run_main(tmp_path, **once)
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="--push_to_hub: upload the finished run instead, with `hf upload NAME"):
        run_main(tmp_path, push_to_hub=True, **again)
    assert str(tmp_path) not in (folder / "README.md").read_text()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert run_main(tmp_path, **again) is None
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files
    # The weights alone are lost; or it was killed right after its last checkpoint.
    for lost in ({"model.safetensors"}, files.keys() - {"run.json"}):
        for name in lost:
            (folder / name).unlink()
        assert run_main(tmp_path, **again) is None
        assert {path.name for path in folder.iterdir() if path.is_file()} == files.keys()
        assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert run_main(tmp_path, **{**again, "max_steps": 3}).state.global_step == 3


SCORED = {"score_as_sampled": True}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"method": "wd1"}, r"method d1 instead of wd1, .*objective trl .*, beta 0.04 instead of 0.0"),
        ({"method": "espo"}, {"method": "espo", "num_views": 3}, r"with num_views 2 instead of 3: continue"),
        ({"beta": 0.0}, {"beta": 0.04}, r"with beta 0.0 instead of 0.04: continue"),  # no reference was scored
        ({}, {"weight_decay": 0.2}, r"with weight_decay 0.1 instead of 0.2: continue"),
        ({"prompt_protocol": "llada"}, {}, r"with prompt_protocol llada instead of d1: continue"),
        ({"block_length": 8}, {"block_length": 16}, r"with block_length 8 instead of 16: continue"),
        ({"first_token": "causal"}, {"first_token": "masked"}, r"with first_token causal instead of masked: continue"),
        (SCORED, SCORED | {"temperature": 0.7}, r"with temperature 0.9 instead of 0.7: continue"),
        (SCORED, SCORED | {"top_k": 5, "top_p": 0.9}, r"with top_k 0 instead of 5, top_p 1.0 instead of 0.9: continue"),
        ({}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"temperature", "top_k", "top_p"}),
        ({}, {"beta": 0.01, "epsilon": 0.2, "learning_rate": 1.0}, {"beta", "epsilon", "learning_rate"}),
        ({}, {"loss_type": "grpo", "reward_weights": [2.0]}, {"loss_type", "reward_weights"}),
        ({}, {"sampler": "cached"}, {"sampler"}),
        ({"method": "tracerl"}, {"method": "tracerl", "logging_steps": 3, "save_total_limit": 2}, set()),
    ],
)
def test_a_resume_keeps_the_method_that_its_rollout_was_made_for(tmp_path, before, now, message):
    def flat(changes):
        return {**DiffuGRPOConfig(**settings(tmp_path, **changes)).to_dict(), **vars(ModelConfig())}

    given = RunHistory(4, flat(before)), flat(now), tmp_path
    rules = grpo_checks.resume_rules(DiffuGRPOConfig(**settings(tmp_path, **now)))
    if isinstance(message, set):
        assert rules.changes(*given).keys() == message
    else:
        with pytest.raises(ValueError, match=message):
            rules.changes(*given)


def test_a_run_whose_record_hides_first_token_can_be_resumed(tmp_path):
    """As Transformers hides every setting with such a name; the record of a run now has it."""
    assert DiffuGRPOConfig(**settings(tmp_path, first_token="masked")).to_dict()["first_token"] == "masked"
    history = RunHistory(4, {"first_token": "<FIRST_TOKEN>"})
    assert grpo_checks.ON_RESUME.changes(history, {"first_token": "causal"}, tmp_path).keys() == {"first_token"}


def test_a_resume_has_the_blocks_of_its_rollout(tiny_model_dir, tiny_block_dir, tmp_path):
    """A block length that nobody gave is, in both runs, that of the model or one that fits the canvas."""
    for model in (tiny_model_dir, tiny_block_dir):
        folder = tmp_path / model.name
        given = {"model_path": str(model), "num_iterations": 2, "save_steps": 3, **TINY}
        given |= {"block_length": None, "resume_from_checkpoint": "true"}
        assert run_main(folder, max_steps=3, **given).state.global_step == 3
        if model == tiny_model_dir:
            with pytest.raises(ValueError, match=r"holds a run with block_length 8 instead of 2: continue it"):
                run_main(folder, max_steps=5, **given | {"block_length": 2})
        assert run_main(folder, max_steps=5, **given).state.global_step == 5


def test_every_rule_names_a_setting():
    known = {*DiffuGRPOConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__, "world_size"}
    assert grpo_checks.ON_RESUME.fixed.keys() <= known
    unknown = {pattern for pattern in grpo_checks.ON_RESUME.free if not fnmatch.filter(known, pattern)}
    assert unknown <= {"activation_checkpointing*"}  # its name from Transformers 5.23 on


# --- Reports and figures ----------------------------------------------------------------------------------------------


def logged(folder, *entries, updates=1):
    """A run's folder with these log entries, one per rollout, of `updates` optimizer steps each."""
    folder.mkdir()
    history = [{"step": updates * number, **entry} for number, entry in enumerate(entries, 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": len(entries), "log_history": history}))
    record = {"steps_per_generation": 1, "num_iterations": updates, "gradient_accumulation_steps": 1}
    (folder / "run.json").write_text(json.dumps({"settings": record | {"data_file": "/home/me/data.csv"}}))
    return folder


def written_in(path):
    return re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8"))


def test_curves_are_drawn_against_rollouts(tmp_path):
    entries = [{"reward": i / 10, "eval_reward": None if i % 2 else i / 20} for i in range(6)]
    run = logged(tmp_path / "run", *entries, updates=4)
    older = run / "checkpoint-4" / "trainer_state.json"
    older.parent.mkdir()
    older.write_text(json.dumps({"global_step": 4, "log_history": [{"step": 1, "reward": 0.9}] * 9}))
    history, steps = read_run(run)
    assert series(history, "reward", steps) == ([1, 2, 3, 4, 5, 6], [0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert series(history, "eval_reward", steps) == ([1, 3, 5], [0, 0.1, 0.2])
    assert running_mean([1, 2, 6], 2) == [1, 1.5, 4]
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_run(tmp_path)
    sft = logged(tmp_path / "sft", {"loss": 1.0})
    (sft / "run.json").write_text('{"settings": {}}')
    with pytest.raises(ValueError, match="sft holds a run of another stage"):
        read_run(sft)
    (sft / "run.json").write_text('{"settings": ')
    with pytest.raises(ValueError, match=r"run\.json is no JSON"):
        read_run(sft)
    page = report_page([run], ["<a>"])
    assert page.count("<figure><svg ") == 1  # only the reward was logged
    said = ["What RL did: &lt;a&gt;</h1>", "<span>reward</span> <b>0 → 0.5</b>", "<b>num_iterations</b> 4"]
    assert [part for part in (*said, "--report true") if part not in page] == []
    assert "/home/me" not in page


def test_the_report_shows_problems_whose_verdict_changed_first(tmp_path):
    run = logged(tmp_path / "run", {"reward": 0.5})
    film = {"title": "before", "prompt": "", "note": "", "tokens": ["</script>"], "solved": False}
    film |= {"steps": [0], "logps": [0], "entropies": [0]}
    after = [film | {"title": "after", "solved": solved} for solved in (False, True)]
    (run / SHOWN_FILE).write_text(json.dumps({"before": [film] * 2, "after": after}))
    page = report_page([run], ["a"])
    scenes = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    titles = ["a, problem 2: not solved before, solved after", "a, problem 1: not solved before, not solved after"]
    assert [scene["title"] for scene in scenes] == titles
    assert [film["title"] for film in scenes[0]["films"]] == ["before", "after"]
    assert "solved of the 2 problems below</span> <b>0 → 1</b>" in page
    assert ORDER in page
    assert "--report true" not in page
    (run / SHOWN_FILE).write_text(json.dumps({"before": [film] * 2}))
    page = report_page([run], ["a"])
    assert "No problems are shown, because these runs stopped before their last films: a." in page
    assert "--report true" not in page


def test_a_spike_is_drawn_as_high_as_it_is_next_to_the_mean(tmp_path):
    values = [0.1, 0.1, 2.29, 0.1, 0.1, 0.1]
    run = logged(tmp_path / "run", *({"kl": value} for value in values))
    _, (axis,) = panels(1, 1, size=(4, 3))
    draw_panel(axis, "kl", [run], ["run"])
    assert [list(line.get_ydata()) for line in axis.lines] == [running_mean(values, 5), values]
    draw([run], ["run"], tmp_path / "curves.svg")
    assert {"run", "each logged value", "mean of the last 5"} <= {*written_in(tmp_path / "curves.svg")}


def test_a_metric_that_no_run_logged_has_no_panel_and_one_value_is_a_point(tmp_path):
    run = logged(tmp_path / "run", {"reward": 0.5, "completions/mean_length": 28.0}, {"eval_reward": 0.25})
    draw([run], ["run"], tmp_path / "curves.svg")
    texts = written_in(tmp_path / "curves.svg")
    assert [title for title in PANELS.values() if title in texts] == ["reward", "tokens to the first EOS"]
    _, (axis,) = panels(1, 1, size=(4, 3))
    draw_panel(axis, "reward", [run], ["run"])
    assert [(line.get_marker(), list(line.get_ydata())) for line in axis.lines[1:]] == [("o", [0.5]), ("o", [0.25])]
    nothing = logged(tmp_path / "nothing", {"loss": 1.0})
    with pytest.raises(ValueError, match=f"nothing to plot: {nothing} logged none of reward, "):
        draw([nothing], ["nothing"], tmp_path / "none.png")
    assert "<figure>" not in report_page([nothing], ["nothing"])


def test_a_users_panel_is_in_the_picture_and_in_the_report(tmp_path, monkeypatch):
    """A fifth entry of `PANELS`, as CONTRIBUTING says."""
    monkeypatch.setitem(PANELS, "metric", "title")
    run, picture, page = logged(tmp_path / "run", *[dict.fromkeys(PANELS, 1.0)] * 3), tmp_path / "a.svg", tmp_path / "a"
    report_main(report_parser().parse_args([str(run), "--output", str(picture), "--html", str(page)]))
    texts = written_in(picture)
    assert [text for text in texts if text in PANELS.values()] == [*PANELS.values()]
    assert texts.count("rollouts") == page.read_text().count("<figure>") == 5


def test_curves_go_into_the_folder_of_the_run_and_not_into_the_current_one(tmp_path):
    run, here = logged(tmp_path / "run", {"reward": 0.5}), tmp_path / "here"
    here.mkdir()
    started = forks.start(forks.script, str(STAGE / "plot_curves.py"), "../run", log=tmp_path / "log", folder=here)
    said = forks.finish(started, tmp_path / "log")
    assert said == f"Written: {run / 'curves.png'}\n"
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not [*here.iterdir()]


def test_d1s_flags_come_first_and_all_others_behind_help_all(capsys):
    parser = diffu_grpo_train.make_parser()
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["--help_all"])
    everything, short = capsys.readouterr().out, parser.format_help()
    own = [f"  --{name}" for name in DiffuGRPOConfig.__annotations__]
    assert [flag for flag in own if flag not in short] == []
    assert max(short.index(f"{flag} ") for flag in own) < short.index("  --output_dir ")
    shown = {*re.findall(r"^  (--\w+)", everything, re.MULTILINE)}
    assert {f"--{one.name}" for config in (DiffuGRPOConfig, ModelConfig) for one in fields(config) if one.init} < shown
    assert len(short) < len(everything) / 3
    assert "--adam_epsilon" not in short
    assert {f"--{name}" for name in ("task", "use_peft", "load_in_4bit")} <= {*short.split()}


@pytest.mark.parametrize(("flag", "meant"), [("--output_di", "--output_dir"), ("--learning", "--learning_rate")])
def test_abbreviated_flags_are_refused_and_the_whole_one_is_named(flag, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        diffu_grpo_train.make_parser().parse_args_and_config(["--output_dir", "x", flag, "1"])
    assert ended.value.code == 2  # as any other command line that is wrong
    says = f": there is no such setting: {flag} 1 (the nearest is {meant}) (--help_all lists them)\n"
    assert capsys.readouterr().err.endswith(says)


@pytest.mark.parametrize("second", [["--config", "mine.yaml"], ["--config=mine.yaml"]])
def test_a_second_config_is_refused_by_its_name(second, capsys):
    with pytest.raises(SystemExit):
        diffu_grpo_train.make_parser().parse_args_and_config(["--config", "a.yaml", "--max_steps", "1", *second])
    assert "give --config once, got a.yaml and mine.yaml (with run.sh: CONFIG=FILE)" in capsys.readouterr().err


# --- What run.sh and the sbatch scripts launch ------------------------------------------------------------------------


def flags_of(call: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(call) if flag.startswith("--")}


def test_without_a_gpu_and_a_model_run_sh_shows_the_pocket_command():
    environment = {"PATH": "/usr/bin:/bin", "GPUS": "0"}
    done = subprocess.run(["bash", "run.sh"], cwd=STAGE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "CONFIG=pocket.yaml bash run.sh" in done.stderr


@pytest.mark.parametrize(
    ("task", "temperature", "mu"),
    [("gsm8k", "0.9", "12"), ("math", "0.9", "12"), ("countdown", "0.9", "8"), ("sudoku", "0.3", "8")],
)
@pytest.mark.parametrize("script", ["run.sh", "slurm_scripts/{task}_base.sbatch", "slurm_scripts/{task}_sft.sbatch"])
def test_each_task_gets_d1s_temperature_and_mu_unless_the_environment_says_otherwise(
    tmp_path, script, task, temperature, mu
):
    own = {"NUM_ITER": "3", "TEMPERATURE": "0.5"}
    for environment, expected in (({}, (mu, temperature)), (own, ("3", "0.5"))):
        *_, call = calls_of(STAGE / script.format(task=task), [], {"DATASET": task, **environment}, tmp_path, gpus=8)
        flags = flags_of(call)
        assert (flags["--dataset"], flags["--num_iterations"], flags["--temperature"]) == (task, *expected)


@pytest.mark.parametrize(
    ("script", "gpus", "processes"),
    [("run.sh", 1, 1), ("run.sh", 2, 2), ("run.sh", 4, 4), ("run.sh", 8, 8), ("*2nodes.sbatch", 8, 16)],
)
def test_the_effective_batch_does_not_depend_on_the_number_of_gpus(script, gpus, processes, tmp_path):
    for path in STAGE.rglob(script):
        tmp_path.joinpath("calls.jsonl").unlink(missing_ok=True)
        (call,) = calls_of(path, [], {}, tmp_path, gpus)
        flags = flags_of(call)
        rows, accumulation = int(flags["--per_device_train_batch_size"]), int(flags["--gradient_accumulation_steps"])
        assert (int(flags["--num_processes"]), processes * rows * accumulation) == (processes, 96)
    assert tmp_path.joinpath("calls.jsonl").exists()


def test_a_named_model_runs_without_a_gpu_and_a_config_of_its_own_keeps_its_batch(tmp_path):
    run = STAGE / "run.sh"
    settings = {"GPUS": "0", "MODEL_PATH": "../pocket/base", "DATASET": "sudoku"}
    (call,) = calls_of(run, ["--max_steps", "1"], settings, tmp_path)
    found = flags_of(call)
    assert (Path(found["--config_file"]).name, found["--load_in_4bit"], found["--bf16"]) == ("cpu.yaml", *["false"] * 2)
    assert (found["--num_processes"], found["--max_steps"]) == ("1", "1")
    assert "--quiet" in call  # else the launcher adds a traceback to a message of one line
    *_, call = calls_of(run, [], {"CONFIG": "pocket.yaml"}, tmp_path, gpus=8)
    assert flags_of(call)["--num_processes"] == "1"
    assert "--quiet" in call


@pytest.mark.parametrize(
    ("gpus", "processes", "kind"), [("", "1", "NO"), ("0", "1", "NO"), ("1", "1", "NO"), ("2", "2", "MULTI_GPU")]
)
def test_a_config_of_its_own_does_not_read_the_users_default_of_accelerate(gpus, processes, kind, tmp_path):
    (call,) = calls_of(STAGE / "run.sh", [], {"CONFIG": "pocket.yaml", "GPUS": gpus}, tmp_path)
    flags = flags_of(call)
    launch = yaml.safe_load((STAGE / flags["--config_file"]).read_text())
    assert (flags["--num_processes"], launch["distributed_type"], launch["use_cpu"]) == (processes, kind, False)
    check_python("python", call[1:], STAGE)


@pytest.mark.parametrize("engine", ["d1", "sglang"])
def test_trainers_and_servers_have_nodes_of_their_own(engine, tmp_path):
    """Of three nodes two train; a GPU of the third serves the model to all of them."""
    settings = {"TRAINERS": "2", "ENGINE": engine, "GPUS": "4", "OUTPUT_DIR": str(tmp_path / "out")}
    settings |= {"D1_API_KEY": "secret", "TMPDIR": str(tmp_path)}
    calls = calls_of(STAGE / "slurm_scripts" / "gsm8k_servers.sbatch", ["--seed", "3"], settings, tmp_path, gpus=4)
    (train,) = [call for call in calls if "accelerate.commands.launch" in call]
    (serve,) = [call for call in calls if call != train]
    flags, urls = flags_of(train), [word for word in train if word.startswith("http")]
    assert urls == [f"http://node2:{port}" for port in range(30000, 30004)]
    assert (flags["--num_processes"], flags["--main_process_ip"], flags["--seed"]) == ("8", "node0", "3")
    assert serve[2] == {"d1": "d1", "sglang": "sglang.launch_server"}[engine]
    assert "secret" not in " ".join(serve)  # every user of a node can read command lines
    if engine == "sglang":
        config = Path(flags_of(serve)["--config"])
        assert (yaml.safe_load(config.read_text()), config.stat().st_mode & 0o77) == ({"api-key": "secret"}, 0)
    if engine == "d1":
        check_python("python", serve[1:], STAGE)
        assert flags_of(serve)["--weights_dir"] == flags["--output_dir"]


def refusal(script, words=(), **environment):
    """What a script prints when it refuses its flags or variables."""
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(STAGE)} | environment
    command = ["bash", str(STAGE / script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize(
    ("script", "flag", "variable"),
    [
        ("gsm8k_servers", "--model_path", "MODEL_PATH"),
        ("gsm8k_servers", "--model-path", "MODEL_PATH"),
        ("gsm8k_servers", "--model_name", "MODEL_PATH"),
        ("gsm8k_servers", "--dataset", "DATASET"),
        ("gsm8k_servers", "--task", "DATASET"),
        ("gsm8k_servers", "--method", "METHOD"),
        ("gsm8k_servers", "--output_dir", "OUTPUT_DIR"),
        ("gsm8k_base_2nodes", "--dataset", "DATASET"),
        ("gsm8k_base_2nodes", "--task", "DATASET"),
        ("gsm8k_base_2nodes", "--method", "METHOD"),
    ],
)
def test_jobs_of_several_nodes_refuse_flags_that_they_would_read_too_late(script, flag, variable):
    for words in ([flag, "x"], [f"{flag}=x"]):
        said = refusal(f"slurm_scripts/{script}.sbatch", ["--seed", "3", *words])
        assert said.startswith(f"{script}.sbatch: {flag} would ")
        assert said.endswith(f": set the variable {variable} instead\n")


@pytest.mark.parametrize("script", sorted(path.name for path in (STAGE / "slurm_scripts").glob("*.sbatch")))
def test_jobs_may_be_submitted_from_the_root(script, tmp_path):
    settings = {"SLURM_SUBMIT_DIR": str(ROOT), "OUTPUT_DIR": str(tmp_path / "out")}
    calls = calls_of(STAGE / "slurm_scripts" / script, [], settings, tmp_path)
    assert any("diffu_grpo_train.py" in call for call in calls)


def settings_of(script, tmp_path, words=(), **environment):
    """The settings that the training script gets with further words, on a machine with one GPU."""
    tmp_path.joinpath("calls.jsonl").unlink(missing_ok=True)
    (call,) = calls_of(STAGE / script, [*words], environment, tmp_path, gpus=1)
    arguments = call[call.index("diffu_grpo_train.py") + 1 :]
    here = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false"]
    with contextlib.chdir(STAGE):
        return diffu_grpo_train.make_parser().parse_args_and_config([*arguments, *here])[0]


# What `run.sh` does with a method depends on its name, the size of its groups, and whether it has a step per token.
OF_RUN = {
    method.scale.get("num_generations"): name for name, method in METHODS.items() if "branches" not in method.values
}
OF_RUN = dict.fromkeys(["d1", "coupled-grpo", "just-grpo", *OF_RUN.values()])


@pytest.mark.parametrize("name", OF_RUN)
def test_a_method_from_the_environment_is_the_whole_method(name, tmp_path):
    """With its authors' optimizer, schedule, group and canvas, unless other flags are given."""
    method = METHODS[name]
    args = settings_of("run.sh", tmp_path, METHOD=name, DATASET="sudoku")
    given = {"max_completion_length": 256} | method.scale | method.values
    if name == "d1":
        given |= {"num_iterations": 8, "temperature": 0.3}  # d1's values for this task
    if given.get("diffusion_steps", 0) is None:
        given["diffusion_steps"] = given["max_completion_length"]  # one per token
    assert {setting: getattr(args, setting) for setting in given} == given
    own = {"learning_rate": 0.5, "lr_scheduler_type": "linear", "weight_decay": 0.3, "adam_beta2": 0.7, "top_k": 9}
    own |= {"max_grad_norm": 0.9, "num_generations": 2, "max_completion_length": 128, "block_length": 16}
    words = [str(word) for setting, value in own.items() for word in (f"--{setting}", value)]
    other = settings_of("run.sh", tmp_path, words, METHOD=name, DATASET="sudoku")
    # Two tokens per step, or one in methods that say so; a method's own blocks of one token need as many steps.
    steps = 128 if "diffusion_steps" in method.values or method.values.get("block_length") == 1 else 64
    own |= {"warmup_steps": 0, "lr_scheduler_kwargs": None, "diffusion_steps": steps}
    assert {setting: getattr(other, setting) for setting in own} == own
    assert args.output_dir == f"../runs/sudoku_LLaDA-8B-Instruct_{'mu8' if name == 'd1' else name}"
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size % args.num_generations == 0


def test_what_the_environment_says_overrides_its_method(tmp_path):
    args = settings_of("run.sh", tmp_path, METHOD="espo", NUM_ITER="3", MODEL_PATH="a/model")
    assert (args.num_iterations, args.run_name) == (3, "gsm8k_model_espo_mu3")
    own = str(ROOT / "tests" / "my_method.py")
    args = settings_of("slurm_scripts/math_sft.sbatch", tmp_path, METHOD=own)
    assert (args.objective, args.num_iterations, args.run_name) == ("push", 2, "math_sft_my_method")
    args = settings_of("run.sh", tmp_path, CONFIG="pocket.yaml", METHOD="coupled-grpo")
    assert (args.estimator, args.num_iterations, args.learning_rate, args.num_generations) == ("coupled", 2, 3e-4, 8)


@pytest.mark.parametrize("name", ["DATASET", "MODEL_PATH", "OUTPUT_DIR", "NUM_ITER", "COMPLETIONS"])
def test_a_variable_that_a_config_leaves_unread_is_refused(name):
    environment = {"PATH": "/usr/bin:/bin", "CONFIG": "pocket.yaml", name: "1"}
    done = subprocess.run(["bash", "run.sh"], cwd=STAGE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"run.sh: {name} is not read with CONFIG: give the flag instead" in done.stderr


@pytest.mark.parametrize("equals_sign", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("--dataset", "--model_path", "--num_iterations", "--per_device_train_batch_size"),
        ("--task", "--model_name", "--num-iterations", "--per-device-train-batch-size"),
        ("--task", "--model-path", "--num_iterations", "--per-device-train-batch-size"),
    ],
)
def test_every_spelling_of_a_flag_chooses_the_settings_of_run_sh(names, equals_sign, tmp_path):
    for chosen in ({}, {"NUM_ITER": "4", "PER_DEVICE": "12"}):
        variables = {"DATASET": "sudoku", "MODEL_PATH": "a/model"} | chosen
        words = []
        for name, value in zip(names, variables.values(), strict=False):
            words += [f"{name}={value}"] if equals_sign else [name, value]
        assert settings_of("run.sh", tmp_path, words) == settings_of("run.sh", tmp_path, **variables)
    found = settings_of("run.sh", tmp_path, words)
    assert (found.num_iterations, found.temperature, found.run_name) == (4, 0.3, "sudoku_model_mu4")
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (12, 8)
    assert found.output_dir == "../runs/sudoku_model_mu4"
    named = ["--run-name=mine"] if equals_sign else ["--run_name", "mine"]
    assert settings_of("run.sh", tmp_path, [*words, *named]).output_dir == "../runs/mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"GPUS": "all"}, "GPUS must be a whole number of at least 0, got all"),
        ({"GPUS": "all", "CONFIG": "pocket.yaml"}, "GPUS must be a whole number of at least 0, got all"),
        ({"PER_DEVICE": "0"}, "PER_DEVICE must be a whole number of at least 1, got 0"),
        ({"COMPLETIONS": "0"}, "COMPLETIONS must be a whole number of at least 1, got 0"),
        ({"COMPLETIONS": "9.6"}, "COMPLETIONS must be a whole number of at least 1, got 9.6"),
        ({"NODES": "two"}, "NODES must be a whole number of at least 1, got two"),
        ({"NODES": "2", "GPUS": "0"}, "NODES=2 needs GPUs, and GPUS is 0: set GPUS to the number of GPUs per node"),
    ],
)
def test_run_sh_names_a_number_that_makes_no_sense(settings, message):
    given = {"GPUS": "1"} | settings
    if "CONFIG" not in settings:
        given["MODEL_PATH"] = "a/model"
    assert refusal("run.sh", **given) == f"run.sh: {message}\n"


def test_run_sh_derives_the_accumulation():
    for flag in ("--gradient_accumulation_steps", "--gradient-accumulation-steps"):
        for words in ([flag, "4"], [f"{flag}=4"]):
            assert refusal("run.sh", words, GPUS="1").startswith(f"run.sh: {flag} follows from COMPLETIONS")


@pytest.mark.parametrize("form", ["words", "equals signs"])
def test_flags_choose_the_settings_of_run_sh_as_variables_do(form, tmp_path):
    flags = {"--dataset": "sudoku", "--method": "espo", "--model_path": "a/model"}
    words = [part for pair in flags.items() for part in pair]
    if form == "equals signs":
        words = ["=".join(pair) for pair in flags.items()]
    found = settings_of("run.sh", tmp_path, words)
    expected = settings_of("run.sh", tmp_path, DATASET="sudoku", METHOD="espo", MODEL_PATH="a/model")
    for name in ("dataset", "method", "model_path", "num_iterations", "temperature", "run_name", "output_dir"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.output_dir == "../runs/sudoku_model_espo"
    found = settings_of("run.sh", tmp_path, ["--dataset", "../tests/own_task.py"])
    assert found.output_dir == "../runs/own_task_LLaDA-8B-Instruct_mu12"


@pytest.mark.parametrize(
    ("visible", "processes"), [("", 0), ("-1", 0), (",", 0), ("0", 1), ("3,1", 2), ("0,-1,2", 1), ("GPU-a,GPU-b", 2)]
)
def test_run_sh_counts_gpus_as_cuda_does(visible, processes, tmp_path):
    settings = {"CUDA_VISIBLE_DEVICES": visible, "MODEL_PATH": "a/model"}
    (call,) = calls_of(STAGE / "run.sh", [], settings, tmp_path)
    flags = flags_of(call)
    assert flags["--num_processes"] == str(max(processes, 1))
    assert (Path(flags["--config_file"]).name == "cpu.yaml") == (processes == 0)


def test_several_nodes_with_a_config_are_refused():
    environment = {"PATH": "/usr/bin:/bin", "CONFIG": "pocket.yaml", "NODES": "2"}
    done = subprocess.run(["bash", "run.sh"], cwd=STAGE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run.sh: NODES is not read with CONFIG, which runs on this machine alone" in done.stderr


def test_without_a_method_all_is_d1s(tmp_path):
    args = settings_of("run.sh", tmp_path)
    expected = {"method": "d1", "run_name": "gsm8k_LLaDA-8B-Instruct_mu12", "objective": "trl", "estimator": "one_step"}
    expected |= {"learning_rate": 3e-6, "num_generations": 6, "num_iterations": 12, "temperature": 0.9, "beta": 0.04}
    expected |= {"epsilon": 0.5, "p_mask_prompt": 0.15, "random_masking": True, "loss_type": "bnpo"}
    expected |= {"max_completion_length": 256, "diffusion_steps": 128, "weight_decay": 0.1, "max_grad_norm": 0.2}
    expected |= {"scale_rewards": "none", "use_bias_correction_kl": False, "max_prompt_length": 200}
    expected |= {"remasking": "low_confidence", "disable_dropout": True, "lr_scheduler_type": "constant_with_warmup"}
    expected |= {"warmup_steps": 0.0001, "adam_beta1": 0.9, "adam_beta2": 0.99, "lr_scheduler_kwargs": None}
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.sampling_settings().block_length == 32
    assert settings_of("slurm_scripts/sudoku_base.sbatch", tmp_path).run_name == "sudoku_base_mu8"
