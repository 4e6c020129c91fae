"""Every recipe is accepted by its stage's parser, and the comment at its top states what the run needs, as computed by
`d1 fit`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser

from benchmarks.true_size import DREAM, LLADA, LLADA2, NEMOTRON, SDAR
from d1.__main__ import main, make_parser
from d1.commands.fit import hours_of, with_config
from d1.commands.footprint import CARDS, total_and_active
from d1.models.kinds import block_size, has_masks, native_config, native_config_of
from d1.models.published import CONFIGS as PUBLISHED
from d1.rl.train import make_parser as rl_parser
from d1.sft.config import SFTConfig
from d1.sft.train import make_parser as sft_parser
from tests.commands import ROOT, check_script
from tests.d1.diffusion_gemma import HAS_CLASS, needs_class
from tests.d1.released import config_of

FOLDER = ROOT / "recipes"
# Those of the pocket models, for a CPU, have tests of their own.
RECIPES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.startswith("pocket-"))
# On a machine without a GPU, bf16 would be refused.
HERE = [] if torch.cuda.is_available() else ["--use_cpu", "true"]


def shape(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Fields of a config.json, with Qwen's names."""
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocab}
    return sizes | heads_of | {"max_position_embeddings": 32768} | more


MOE = {"num_experts": 64, "expert_intermediate_size": 1024, "dense_intermediate_size": 8192}
MOE |= {"num_experts_per_tok": 8, "moe_layer_freq": [1] * 16}
SMALL = {"model_type": "qwen2", "mask_token_id": 151665, "tie_word_embeddings": True}
SMALL |= shape(24, 896, 14, 2, 4864, 151936)
SMOLLM2 = {"model_type": "llama", "mask_token_id": 49152, "tie_word_embeddings": True}
SMOLLM2 |= {"attention_pattern": "causal-context", "block_size": 8, "predicts_next_token": True}
SMOLLM2 |= shape(30, 576, 9, 3, 1536, 49153)
TEXT = shape(30, 2816, 16, 8, 2112, 262144, model_type="diffusion_gemma_text", head_dim=256, global_head_dim=512)
TEXT |= {"num_global_key_value_heads": 2, "sliding_window": 1024, "num_experts": 128, "top_k_experts": 8}
TEXT |= {"moe_intermediate_size": 704, "use_bidirectional_attention": "vision", "tie_word_embeddings": True}
GEMMA = {"model_type": "diffusion_gemma", "canvas_length": 256, "tie_word_embeddings": True, "text_config": TEXT}
GEMMA |= {"vision_config": {"model_type": "gemma4_vision"}}
NEW = "google/diffusiongemma-26B-A4B-it"  # which an older Transformers has not
CONFIGS = {  # path of the model -> its config.json
    **dict.fromkeys(("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), LLADA),
    "Dream-org/Dream-v0-Instruct-7B": DREAM,
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct": config_of("lladamoe", **shape(16, 2048, 16, 16, 8192, 157184, **MOE)),
    "JetLM/SDAR-1.7B-Chat": SDAR,
    "JetLM/SDAR-8B-Chat": SDAR | shape(36, 4096, 32, 8, 12288, 151936, tie_word_embeddings=False),
    "inclusionAI/LLaDA2.0-mini": LLADA2,
    "nvidia/Nemotron-Labs-Diffusion-3B": NEMOTRON,
    NEW: GEMMA,
    "Efficient-Large-Model/Fast_dLLM_v2_7B": config_of(
        "Fast_dLLM_Qwen", **shape(28, 3584, 28, 4, 18944, 152064, bd_size=32)
    ),
    **dict.fromkeys(("runs/qwen2.5-0.5b-a2d", "runs/qwen2.5-0.5b-sft"), SMALL),
    **dict.fromkeys(("runs/smollm2-135m-a2d", "runs/smollm2-135m-sft"), SMOLLM2),
}
# Of models without a recipe, with the sizes that their cards state.
ILLADA = {"n_kv_heads": 8, "mlp_hidden_size": 14336, "vocab_size": 155136, "embedding_size": 155136}
ILLADA |= {"weight_tying": True, "mask_token_id": 5}
A3B = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
OTHER_CONFIGS = {
    "GSAI-ML/iLLaDA-8B-Instruct": LLADA | ILLADA,
    "JetLM/SDAR-4B-Chat": SDAR | shape(36, 2560, 32, 8, 9728, 151936),
    "JetLM/SDAR-30B-A3B-Chat": config_of(
        "sdar_moe", **shape(48, 2048, 32, 4, 6144, 151936, **A3B, mask_token_id=151669)
    ),
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": config_of(
        "Fast_dLLM_Qwen", **shape(28, 1536, 12, 2, 8960, 151936, bd_size=32, tie_word_embeddings=True)
    ),
    "nvidia/Nemotron-Labs-Diffusion-8B": NEMOTRON | shape(34, 4096, 32, 8, 14336, 131072),
    "nvidia/Nemotron-Labs-Diffusion-14B": NEMOTRON | shape(40, 5120, 32, 8, 16384, 131072),
    "inclusionAI/LLaDA2.0-flash": LLADA2 | shape(32, 4096, 32, 4, 9216, 157184, moe_intermediate_size=1024),
}
DOCUMENTED = {  # row of docs/models.md -> path
    "LLaDA-8B, LLaDA-1.5": "GSAI-ML/LLaDA-8B-Instruct",
    "iLLaDA-8B": "GSAI-ML/iLLaDA-8B-Instruct",
    "Dream-7B, DreamOn-7B": "Dream-org/Dream-v0-Instruct-7B",
    "SDAR-1.7B": "JetLM/SDAR-1.7B-Chat",
    "SDAR-4B": "JetLM/SDAR-4B-Chat",
    "SDAR-8B": "JetLM/SDAR-8B-Chat",
    "SDAR-30B-A3B": "JetLM/SDAR-30B-A3B-Chat",
    "Fast-dLLM v2 1.5B": "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
    "Fast-dLLM v2 7B": "Efficient-Large-Model/Fast_dLLM_v2_7B",
    "LLaDA-MoE-7B-A1B": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
    "LLaDA2 mini": "inclusionAI/LLaDA2.0-mini",
    "Nemotron-Labs-Diffusion-3B": "nvidia/Nemotron-Labs-Diffusion-3B",
    "Nemotron-Labs-Diffusion-8B": "nvidia/Nemotron-Labs-Diffusion-8B",
    "Nemotron-Labs-Diffusion-14B": "nvidia/Nemotron-Labs-Diffusion-14B",
    "DiffusionGemma": NEW,
    "LLaDA2 flash": "inclusionAI/LLaDA2.0-flash",
}
MODELS_PAGE = (ROOT / "docs" / "models.md").read_text()
# Rows of its table of memory: the model, its parameters in billions, those that are active, and GB of three stages.
MEMORY_ROWS = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]*) \| (\d+) \| (\d+) \| (\d+) \|$", MODELS_PAGE, re.MULTILINE)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which each model's path contains its config.json, so that the hub is not needed."""
    for name, config in (CONFIGS | OTHER_CONFIGS).items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Recipe:
    """A file of recipes/, and the facts in the comment at its top."""

    path: Path

    @property
    def stage(self) -> str:
        return self.path.stem.rpartition("-")[2]

    @cached_property
    def text(self) -> str:
        return re.sub(r" *\\\n# *", " ", self.path.read_text())  # commands on one line

    def found(self, pattern: str) -> tuple[str, ...]:
        """The groups of the one match of a pattern."""
        (match,) = re.finditer(pattern, self.text, re.MULTILINE)
        return match.groups()

    @property
    def hardware(self) -> tuple[int, int, str]:
        """GPUs, the memory of each in GB, and their name."""
        gpus, size, card = self.found(r"^# Hardware: (\d+) GPUs? with (\d+) GB(?: each)? \((.+)\)$")
        return int(gpus), int(size), card

    @property
    def memory(self) -> float:
        return float(self.found(r"^# Memory: ([\d.]+) GB per GPU$")[0])

    @property
    def time(self) -> str:
        return self.found(rf"^# (Time: .*) \(d1 fit --config recipes/{self.path.name}\)$")[0]

    @property
    def launch(self) -> Any:
        """Accelerate's arguments, those of its config file included."""
        words = shlex.split(self.found(r"^#   (accelerate .*)$")[0])
        given = launch_command_parser().parse_args(words[2:])
        config = yaml.safe_load((ROOT / given.config_file).read_text())
        given.num_processes = given.num_processes or config["num_processes"]
        given.zero_stage = config.get("deepspeed_config", {}).get("zero_stage", 0)
        return given

    def settings(self) -> Any:
        """The result of the stage's own parser for the file: SFTConfig, or RL's config and the model's."""
        if self.stage == "sft":
            return sft_parser().parse_args(["--config", str(self.path)])
        return rl_parser().parse_args_and_config(["--config", str(self.path), *HERE])


def rows_per_step(recipe: Recipe, full: bool) -> int:
    """The rows of an optimizer step: d1's, more where SFT trains all weights, and fewer for a CPU."""
    if recipe.path.stem.startswith("smollm2-"):
        return {"sft": 32, "rl": 64}[recipe.stage]
    if recipe.stage == "rl":
        return 96
    return 256 if full else 8


def expected_fit(recipe: Recipe) -> dict[str, Any]:
    """The flags of `d1 fit` that describe the run, from its settings and its launch line."""
    gpus, zero = recipe.launch.num_processes, recipe.launch.zero_stage
    found = {"stage": recipe.stage, "gpus": gpus, "zero": zero, "dtype": "bfloat16"}
    if recipe.stage == "sft":
        args = model = recipe.settings()
        found["batch"] = args.batch_size * (2 if args.complementary_masks else 1)
        found |= {"model_path": args.model_name, "length": args.max_length}
        full = args.full_finetuning
        assert gpus * args.batch_size * args.grad_accum_steps == rows_per_step(recipe, full)
    else:
        args, model = recipe.settings()
        found |= {"model_path": args.model_path, "batch": args.per_device_train_batch_size}
        found |= {
            "length": args.max_prompt_length + args.max_completion_length,
            "method": args.method,
            "beta": args.beta,
        }
        names = ("max_completion_length", "diffusion_steps", "steps_per_generation", "views_at_once")
        found |= {name: getattr(args, name) for name in names}
        full = not model.use_peft
        assert gpus * args.per_device_train_batch_size * args.gradient_accumulation_steps == rows_per_step(recipe, full)
        assert args.rollout_batch_size == args.per_device_train_batch_size  # else a rollout samples more rows at once
    found |= {"load_in_4bit": model.load_in_4bit, "gradient_checkpointing": bool(args.gradient_checkpointing)}
    targets = model.lora_target_modules  # TRL turns a list of one name into a text
    lora = {"lora_r": model.lora_r, "lora_targets": [targets] if isinstance(targets, str) else targets}
    return found | ({"lora_r": 0} if full else lora)


def of_config(recipe: Recipe, *words: str) -> tuple[Any, Any]:
    """The flags that `d1 fit --config` finds for a recipe, and its run."""
    return with_config(make_parser().parse_args(["fit", "--config", str(recipe.path), *words]))


def memory_of(shown: str) -> float:
    """The GB per GPU in the output of `d1 fit`."""
    return float(re.search(r"^total at batch \d+ +([\d.]+) GB$", shown, re.MULTILINE)[1])


def marks(path: Path) -> list[Any]:
    return [needs_class] if path.stem.startswith("diffusiongemma") else []


@pytest.mark.parametrize("name", CONFIGS)
def test_the_librarys_table_has_the_sizes_of_each_model(name: str) -> None:
    if name == NEW and not HAS_CLASS:
        pytest.skip("needs a newer Transformers")
    here, table = native_config_of(CONFIGS[name], name)[0], native_config_of(PUBLISHED[name], name)[0]
    assert total_and_active(here) == total_and_active(table)
    assert (block_size(here), has_masks(here)) == (block_size(table), has_masks(table))


def test_fit_of_a_shipped_recipe_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In a folder without any model, and without the network, as all tests are."""
    monkeypatch.chdir(tmp_path)
    assert {Recipe(path).found(r"^model_(?:path|name): (\S+)")[0] for path in RECIPES} <= PUBLISHED.keys()
    for name in ("llada-8b-instruct-rl.yaml", "smollm2-135m-sft.yaml", "smollm2-135m-rl.yaml"):
        recipe = Recipe(FOLDER / name)
        main(make_parser().parse_args(["fit", "--config", str(recipe.path)]))
        shown = capsys.readouterr().out
        assert recipe.memory == pytest.approx(memory_of(shown), rel=0.02)
        assert shown.splitlines()[-1] == recipe.time
    with pytest.raises(FileNotFoundError, match="mine/model is no folder here"):
        main(make_parser().parse_args(["fit", "--model_path", "mine/model", "--stage", "sft"]))


RUNS = [pytest.param(Recipe(path), id=path.stem, marks=marks(path)) for path in RECIPES]


@pytest.mark.parametrize("recipe", RUNS)
def test_the_head_has_the_commands_the_hardware_and_the_hours_of_the_recipe(recipe: Recipe, models: Path) -> None:
    for command in re.findall(r"^#   (.*)$", recipe.text, re.MULTILINE):
        check_script(command)
    assert recipe.launch.training_script_args == ["--config", f"recipes/{recipe.path.name}"]
    (args, run), expected = of_config(recipe), expected_fit(recipe)
    assert {name: getattr(args, name) for name in expected} == expected
    gpus, size, card = recipe.hardware
    assert (gpus, size in CARDS, card) == (recipe.launch.num_processes, True, args.card)
    assert recipe.memory <= 0.95 * size  # the rest is for what the estimate does not include
    assert recipe.time == hours_of(run, args)[1]


# The computation takes four seconds each: only those of a dense model and of a mixture in blocks are not slow.
QUICK = ("llada-8b-instruct", "llada2-mini")


COMPUTED = [
    pytest.param(
        Recipe(path), id=path.stem, marks=marks(path) + ([] if path.stem.startswith(QUICK) else [pytest.mark.slow])
    )
    for path in RECIPES
]


@pytest.mark.parametrize("recipe", COMPUTED)
def test_fit_shows_the_memory_and_the_hours_at_the_head_of_the_recipe(
    recipe: Recipe, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(make_parser().parse_args(["fit", "--config", str(recipe.path)]))
    shown = capsys.readouterr().out
    assert recipe.memory == pytest.approx(memory_of(shown), rel=0.02)
    assert shown.splitlines()[-1] == recipe.time


def test_the_hours_are_those_of_the_formula_written_out(models: Path) -> None:
    """LLaDA-1.5 on GSM8K: 10 epochs of 467 rollouts of 96 completions, 12 updates on each, 456 tokens per row."""
    args, run = of_config(Recipe(FOLDER / "llada-1.5-rl.yaml"), "--card", "H100", "--utilisation", "0.5")
    hours, line = hours_of(run, args)
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 126464 * 4096
    rows, each = 467 * 96 * 10, 456 * (2 * weights + 4 * 32 * 4096 * 456)
    passes = {"sampling": 128, "old log-probs": 12, "reference log-probs": 12, "updates, forward": 24}
    passes["updates, backward"] = 12  # frozen weights need the gradient of their input alone
    expected = {name: count * rows * each / (989e12 * 0.5 * 3600) for name, count in passes.items()}
    assert hours == pytest.approx(expected, rel=1e-3)
    steps = 467 * 12 * 10
    trial = int(2 * steps / sum(expected.values())) // 12 * 12
    assert (
        line == f"Time: {sum(expected.values()):.0f} hours for {steps} steps; a trial of two hours: --max_steps {trial}"
    )


def test_the_hours_of_sft_are_those_of_the_formula_written_out(models: Path) -> None:
    """990 of s1K's rows, and all weights of a model with tied embeddings, which backward passes train, too."""
    args, run = of_config(Recipe(FOLDER / "qwen2.5-0.5b-a2d-sft.yaml"), "--rows", "1000", "--card", "A100")
    weights = 151936 * 896 + 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    each = 2 * weights + 4 * 24 * 896 * 1024
    tokens = 4 * 256 * 1024  # 999 rows fill four steps of 256
    expected = {"forward": tokens * each, "backward": 2 * tokens * each, "evaluation": 0}
    assert run.steps == 4
    speed = 312e12 * 0.4 * 3600
    assert hours_of(run, args)[0] == pytest.approx({name: of / speed for name, of in expected.items()}, rel=1e-3)


@needs_class
def test_sft_of_a_model_with_uniform_noise_reads_a_row_and_one_canvas(models: Path) -> None:
    """And in half of the batches, of one row each, the canvas a second time, without gradients."""
    _, run = of_config(Recipe(FOLDER / "diffusiongemma-26b-sft.yaml"))
    rows = run.steps * 8
    evaluated = 24 * 10 * 4  # 10 of 1,000 rows, four draws each, every 100 of 2,480 steps
    assert run.tokens == {
        "forward": rows * (1024 + 256 + 128),
        "backward": rows * (1024 + 256),
        "evaluation": evaluated * (1024 + 256),
    }


def test_hours_of_sft_have_its_evaluations(models: Path) -> None:
    """1% of 100,000 rows, with four draws each, every 100 steps of 8 rows: more rows than in training."""
    recipe = own_recipe((FOLDER / "sdar-8b-sft.yaml").read_text())
    run = of_config(recipe, "--rows", "100000")[1]
    settings = yaml.safe_load(Path("own/own.yaml").read_text())
    per_step = settings["batch_size"] * settings["grad_accum_steps"]
    evaluated = run.steps // 100 * 1000 * 4
    assert run.tokens["evaluation"] / (run.tokens["forward"] / 2) == pytest.approx(evaluated / (run.steps * per_step))


def own_recipe(text: str) -> Recipe:
    """A file of settings in a folder next to the launch configs."""
    Path("own").mkdir()
    Path("launch").symlink_to(ROOT / "launch")
    Path("own/own.yaml").write_text(text)
    return Recipe(Path("own/own.yaml"))


@pytest.mark.parametrize(("launch", "zero"), [("zero3", 3), ("fsdp2", 3), ("ddp", 0)])
def test_fsdp_splits_what_zero_3_splits(models: Path, launch: str, zero: int) -> None:
    text = (FOLDER / "qwen2.5-0.5b-a2d-sft.yaml").read_text()
    recipe = own_recipe(re.sub(r"launch/\w+\.yaml", f"launch/{launch}.yaml", text))
    assert of_config(recipe)[0].zero == zero


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_hours_of_rollouts_with_a_cache_are_those_of_its_windows(models: Path, cache: str) -> None:
    """256 tokens in blocks of 32 and 128 steps after 200 of a prompt: all of the text once in each of eight blocks."""
    plain = of_config(Recipe(FOLDER / "llada-1.5-rl.yaml"))[1].tokens
    text = (FOLDER / "llada-1.5-rl.yaml").read_text()
    tokens = of_config(own_recipe(f"{text}\nsampler: cached\nkv_cache: {cache}\n"))[1].tokens
    windows = {"dual": [32] * 8, "prefix": range(256, 0, -32)}[cache]
    once = sum(456 + 15 * window for window in windows)
    assert tokens.pop("sampling") == pytest.approx(plain.pop("sampling") / (128 * 456) * once)
    assert tokens == plain


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ("--batch 3", {}, r"--batch 3: with --config, .*own.yaml says what the run is"),
        ("", {"RTX 4090": "RTX 9"}, "the speed of RTX 9 is not known: use --card"),
        (
            "--card A100",
            {"simplescaling/s1K": "mine.jsonl"},
            "number of rows of mine.jsonl is not known",
        ),
    ],
)
def test_what_fit_cannot_read_from_a_file_is_named(
    flags: str, changes: dict[str, str], message: str, models: Path
) -> None:
    text = (FOLDER / "llada-1.5-sft.yaml").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    Path("own.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        main(make_parser().parse_args(["fit", "--config", "own.yaml", *flags.split()]))


def test_a_file_may_name_its_model_either_way_and_one_of_rl_names_one(models: Path) -> None:
    for stage, old, new in (("sft", "model_name", "model_path"), ("rl", "model_path", "model_name")):
        text = (FOLDER / f"llada-1.5-{stage}.yaml").read_text()
        Path("own.yaml").write_text(text.replace(f"{old}:", f"{new}:"))
        assert with_config(make_parser().parse_args(["fit", "--config", "own.yaml"]))[0].stage == stage
    d1_file = ROOT / "diffu-grpo" / "slurm_scripts" / "train.yaml"
    with pytest.raises(ValueError, match=r"train.yaml names no model: add a line model_path"):
        main(make_parser().parse_args(["fit", "--config", str(d1_file)]))
    Path("own.yaml").write_text("model_path: x\nlora_target_modules: [")
    with pytest.raises(ValueError, match=r"own.yaml is no yaml"):
        main(make_parser().parse_args(["fit", "--config", "own.yaml"]))


def test_the_views_of_a_file_are_those_of_its_own_settings(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four views per row and update, which are summed, instead of d1's one; two updates on four micro-batches of each
    GPU. A view has a byte per token of its row, and on the canvas fp32 weights, old and reference log-probabilities."""
    text = (FOLDER / "qwen2.5-0.5b-a2d-rl.yaml").read_text()
    text = text.replace("gradient_accumulation_steps: 16", "gradient_accumulation_steps: 4")
    Path("own.yaml").write_text(f"{text}\nestimator: elbo\nnum_views: 4\nnum_iterations: 2\n")
    main(make_parser().parse_args(["fit", "--config", "own.yaml", "--gpus", "4"]))
    stored = 2 * 4 * 4 * (456 + 3 * 4 * 256)
    assert f"views 4, views_at_once 1, canvas 256, stored {stored}, " in capsys.readouterr().out


def test_a_copy_of_a_recipe_finds_the_launch_config(models: Path) -> None:
    text = (FOLDER / "qwen2.5-0.5b-a2d-sft.yaml").read_text()
    Path("own.yaml").write_text(text.replace("single_gpu", "zero3"))
    assert of_config(Recipe(Path("own.yaml")))[0].zero == 3


@pytest.mark.parametrize(
    "flags",
    [
        "eval --card A100",
        "eval --lora_r 8",
        "sft --method espo",
        "rl --num_views 4",
        "prefer --edit_turns 2",
        "eval --rows 5",
    ],
)
def test_flags_that_a_stage_does_not_read_are_refused(flags: str) -> None:
    _, flag, _ = flags.split()
    with pytest.raises(ValueError, match=f"^{flag} would do nothing: "):
        main(make_parser().parse_args(["fit", "--model_path", "m", "--stage", *flags.split()]))


def test_the_tables_list_every_recipe_and_every_model_has_one_of_each_stage() -> None:
    page, models, hours = (FOLDER / "README.md").read_text(), set(), set()
    for one in map(Recipe, RECIPES):
        gpus, _, card = one.hardware
        time, steps, trial = re.fullmatch(r"Time: (\S+) hours for (\d+) .*: (--max_steps \d+)", one.time).groups()
        hours.add((one.path.name, f"{gpus} x {card}", steps, time, trial))
        models.add((one.stage.upper(), one.path.name, one.found(r"^# Hardware: (.*)$")[0], f"{one.memory:.1f}"))
    found = re.findall(r"^\| \[(.+?)\]\(\1\) \| (.+) \| (\d+) \| ([\d.]+) \| `(.+)` \|$", page, re.MULTILINE)
    assert sorted(found) == sorted(hours)
    found = re.findall(r"^\| .* \| (\w+) \| .* \| \[(.+?)\]\(\2\) \| (.*) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert sorted(found) == sorted(models)
    assert len(found) == 24
    names = [path.stem.rpartition("-") for path in RECIPES]
    assert {(name, stage) for name, _, stage in names} == {(name, s) for name, *_ in names for s in ("sft", "rl")}
    assert {expected_fit(Recipe(path))["model_path"] for path in RECIPES} == {*CONFIGS}


def test_the_configs_of_this_test_have_the_published_sizes(models: Path) -> None:
    assert [row for row, *_ in MEMORY_ROWS] == [*DOCUMENTED]
    for row, billions, active, *_ in MEMORY_ROWS:
        name = DOCUMENTED[row]
        if name == NEW and not HAS_CLASS:
            continue
        total, used = total_and_active(native_config(str(models / name))[0])
        assert (f"{total / 1e9:.2f}", f"{used / 1e9:.2f}") == (billions, active or billions), row
    total, _ = total_and_active(native_config(str(models / "runs/qwen2.5-0.5b-a2d"))[0])
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 896 + 2 * 128 + 3 * 896 * 4864 + 2 * 896  # q, o, k, v, biases, mlp, norms
    assert total == 151936 * 896 + 24 * layer + 896
    total, _ = total_and_active(native_config(str(models / "runs/smollm2-135m-a2d"))[0])
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576  # q, o, k, v, mlp, norms
    assert total == 49153 * 576 + 30 * layer + 576 == 134_515_584


def documented_marks(row: str) -> list[Any]:
    if row == "DiffusionGemma":
        return [needs_class, pytest.mark.slow]
    return [] if row in ("LLaDA-8B, LLaDA-1.5", "SDAR-1.7B") else [pytest.mark.slow]


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0], marks=documented_marks(row[0])) for row in MEMORY_ROWS])
def test_the_memory_of_a_documented_model_is_that_of_the_commands_next_to_the_table(
    row: tuple[str, ...], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command per column, without the share of CUDA."""
    name, _, _, *cells = row
    commands = re.findall(r"^python -m d1 (fit --model_path \S+ --stage .*)$", MODELS_PAGE, re.MULTILINE)
    assert len(commands) == len(cells)
    for command, cell in zip(commands, cells, strict=True):
        words = shlex.split(command)
        words[2] = DOCUMENTED[name]
        main(make_parser().parse_args(words))
        shown = capsys.readouterr().out
        cuda = float(re.search(r"^CUDA and libraries +([\d.]+) GB$", shown, re.MULTILINE)[1])
        assert memory_of(shown) - cuda == pytest.approx(float(cell), abs=0.51), command


def test_the_recipes_of_llada_8b_are_d1s_runs() -> None:
    sft = vars(Recipe(FOLDER / "llada-8b-instruct-sft.yaml").settings())
    assert sft == vars(SFTConfig(job_name="llada-8b-instruct-sft", merge_at_end=True))
    rl, model = Recipe(FOLDER / "llada-8b-instruct-rl.yaml").settings()
    words = ["--config", str(ROOT / "diffu-grpo" / "slurm_scripts" / "train.yaml"), *HERE]
    words += ["--model_path", rl.model_path, "--output_dir", rl.output_dir, "--dataset", rl.dataset]
    released, released_model = rl_parser().parse_args_and_config(words)
    assert (rl.to_dict(), vars(model)) == (released.to_dict(), vars(released_model))
