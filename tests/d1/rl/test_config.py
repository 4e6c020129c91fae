"""The plan compared with real runs: arithmetic by hand, and the passes of every method counted in the model itself."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import ModelConfig

from d1.models import load_model, load_tokenizer
from d1.models.kinds import native_config
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_config
from d1.rl.config import DiffuGRPOConfig, inactive_settings, max_views, passes, plan
from d1.rl.methods import METHODS
from d1.rl.stage import stage
from d1.rl.trainer import DiffuGRPOTrainer
from d1.sampling.settings import check_sampler
from tests.tiny_grpo import is_even

ROWS = 4
SHAPE = {
    "per_device_train_batch_size": ROWS,
    "num_generations": ROWS,
    "max_completion_length": 8,
    "block_length": 4,
    "diffusion_steps": 4,
    "eos_stop": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def test_the_plan_counts_what_d1_does(tmp_path):
    batch = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 16, "num_train_epochs": 1}
    args = DiffuGRPOConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **batch)
    numbers = plan(args, num_prompts=160)
    assert numbers["completions per optimizer step"] == 96
    assert numbers["prompts per optimizer step"] == 16
    assert numbers["completions per rollout"] == 96
    assert numbers["rollouts"] == 10
    assert numbers["optimizer steps"] == 120
    assert numbers["views per completion and update (maximum)"] == 1
    assert {name.partition(": ")[2]: count for name, count in numbers.items() if name.startswith("passes per")} == {
        "sampling": 128,
        "old log-probs": 12,
        "reference log-probs": 12,
        "updates, forward": 12,
        "updates, backward": 12,
    }
    with pytest.raises(ValueError, match="a rollout needs 16 prompts and there are 15"):
        plan(args, num_prompts=15)


def test_the_documents_table_is_the_plan_of_every_method(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text().partition("## Methods")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    whats = ("old log-probs", "reference log-probs", "bounds that advantages read")
    whats += ("weights of rows, before each later update",)
    whats += ("updates, forward", "updates, backward")
    found = {}
    for name in METHODS:
        canvas = {"max_completion_length": 256, "per_device_train_batch_size": 240, "gradient_checkpointing": False}
        args = DiffuGRPOConfig(output_dir=str(tmp_path), method=name, **canvas)
        views = max_views(args, None)
        counts = [f"{passes(args, views)[what]:,}" if what in passes(args, views) else "" for what in whats]
        found[name] = [name, str(args.num_iterations), str(views), *counts]
    assert {row[0]: row for row in rows if row[0] in METHODS} == found


@pytest.mark.parametrize(("method", "sampler"), [("dmpo", "exact"), ("dmpo", "parallel"), ("rldf", "parallel")])
def test_methods_with_a_cache_train_models_with_blocks_as_the_documents_say(tiny_block_dir, tmp_path, method, sampler):
    """The method's own cache has to be left out, too."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert "`dmpo` and `rldf` need `--kv_cache none` and `--sampler parallel`, `dmpo` also takes `exact`" in page
    config, _ = native_config(str(tiny_block_dir))
    canvas = {"max_completion_length": 8, "diffusion_steps": 8, "block_length": 4}
    chosen = {"sampler": sampler, "kv_cache": "none"}
    args = DiffuGRPOConfig(output_dir=str(tmp_path), method=method, **canvas, **chosen)
    assert check_config(config, 4, args) == 4
    check_sampler(args.sampling_settings(config), config)


CLIP = ("epsilon", "epsilon_high", "delta")
IDLE = [
    ({"num_iterations": 1}, CLIP),
    ({"num_iterations": 2}, ()),
    ({"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 3}, ()),  # rows are cut in two
    ({"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 4}, CLIP),  # both in one step
    ({"num_iterations": 1, "loss_type": "cispo"}, ()),
    ({"num_iterations": 1, "kl": "k2_sequence"}, CLIP),
    ({"method": "stable-drl", "num_iterations": 1}, ("ratio_cap",)),
    ({"method": "tracerl", "num_iterations": 1}, (*CLIP, "beta", "kl")),
]


@pytest.mark.parametrize(("given", "expected"), IDLE)
def test_settings_are_idle_where_a_rollout_has_one_optimizer_step(tmp_path, given, expected):
    args = DiffuGRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=240, **given)
    assert inactive_settings(args) == expected
    assert args.needs_old_logps == (args.reads_old_logps and not args.is_on_policy)


@pytest.mark.parametrize(("mu", "said"), [(1, ["every ratio is 1: epsilon 0.5, delta 3.0"]), (2, [])])
def test_a_run_says_at_its_start_which_of_its_settings_are_idle(tiny_model_dir, caplog, mu, said):
    task = Path(__file__).with_name("letters_task.py")
    shape = {"per_device_train_batch_size": 48, "max_completion_length": 32, "diffusion_steps": 16}
    given = {"output_dir": "unused", "model_path": str(tiny_model_dir), "dataset": str(task), "num_iterations": mu}
    caplog.set_level("INFO", "d1.rl.stage")
    stage(DiffuGRPOConfig(**given, delta=3.0, **shape), ModelConfig(), None).prepare()
    lines = [record.getMessage() for record in caplog.records if record.name == "d1.rl.stage"]
    assert sum(line.startswith("Plan:") for line in lines) == 1
    assert [line.partition("optimizer step and ")[2] for line in lines if "Without effect" in line] == said


def test_a_run_without_evaluations_says_which_settings_of_them_it_has(tiny_model_dir, caplog):
    """`--eval_strategy no` next to a config file with evaluations is no mistake."""
    task = Path(__file__).with_name("letters_task.py")
    given = {"output_dir": "unused", "model_path": str(tiny_model_dir), "dataset": str(task)}
    given |= {"per_device_train_batch_size": 48, "max_completion_length": 32, "diffusion_steps": 16}
    evaluation = {"eval_steps": 5, "eval_limit": 8, "num_generations_eval": 1, "per_device_eval_batch_size": 6}
    caplog.set_level("INFO", "d1.rl.stage")
    for options in ({}, evaluation, evaluation | {"eval_strategy": "steps"}):
        stage(DiffuGRPOConfig(**given, **options), ModelConfig(), None).prepare()
    lines = [record.getMessage() for record in caplog.records if "eval" in record.getMessage()]
    assert lines == ["Without effect, because eval_strategy is no: eval_steps 5, eval_limit 8, num_generations_eval 1"]


def test_a_run_says_which_settings_of_an_adapter_have_no_effect(tiny_model_dir, caplog):
    """Without an adapter, and with dropout turned off."""
    task = Path(__file__).with_name("letters_task.py")
    given = {"output_dir": "unused", "model_path": str(tiny_model_dir), "dataset": str(task)}
    given |= {"per_device_train_batch_size": 48, "max_completion_length": 32, "diffusion_steps": 16}
    caplog.set_level("INFO", "d1.rl.stage")
    for options, model_options in (
        ({}, {"lora_r": 64, "lora_dropout": 0.05}),
        ({}, {"use_peft": True, "lora_r": 64, "lora_dropout": 0.1}),
        ({"disable_dropout": False}, {"use_peft": True, "lora_dropout": 0.1}),
        ({}, {"use_peft": True, "lora_dropout": 0.0}),
    ):
        stage(DiffuGRPOConfig(**given, **options), ModelConfig(**model_options), None).prepare()
    lines = [record.getMessage() for record in caplog.records if ": lora" in record.getMessage()]
    assert lines == [
        "Without effect, because use_peft is false: lora_r 64",
        "Without effect, because disable_dropout is true: lora_dropout 0.1",
    ]


BOUNDS = "bounds that advantages read"


class Counting(DiffuGRPOTrainer):
    """Counts the rows that pass forward through the first layer of model and reference, and backward, by purpose."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts, self.task, self.views_of_bounds = Counter(), None, 0
        for model, task in ((self.model, None), (self.ref_model, "reference log-probs")):
            if model is not None:
                inside = model.model.layers[0].mlp  # a layer's own hooks do not see it computed again
                inside.register_forward_pre_hook(lambda _, states, task=task: self.count(task, len(states[0])))
        self.model.model.norm.register_full_backward_hook(
            lambda _, __, states: self.counts.update({"updates, backward": len(states[0])})
        )

    def count(self, task, rows):
        if self.task == BOUNDS:
            task = BOUNDS
        self.counts[task or ("updates, forward" if torch.is_grad_enabled() else self.task)] += rows

    def sample(self, *args):
        self.task = "sampling"
        return super().sample(*args)

    def bounds(self, *args):
        self.task = BOUNDS
        return super().bounds(*args)

    def scores(self, model, batch, views, **options):
        self.views_of_bounds += int(views.scoring.sum()) * (self.task == BOUNDS)
        return super().scores(model, batch, views, **options)

    def score_rollout(self, batch):
        self.task = "old log-probs"
        super().score_rollout(batch)
        self.task = "rewards of states"

    def compare_rows(self, *args):
        self.task = "weights of rows, before each later update"
        super().compare_rows(*args)


# For these, every view scores something, whatever was sampled.
FIXED = ("d1", "wd1", "spg", "stable-drl", "bgpo", "ebpo", "gdpo")
CASES = [(name, {}) for name in METHODS]
BLOCKS = [(name, {"blocks": 4}) for name in ("d1", "cj-grpo", "agrpo", "espo")]
CASES += [
    *BLOCKS,
    ("espo", {"gradient_checkpointing": True}),
    ("bgpo", {"views_at_once": 16}),
    ("wd1", {"cfg_scale": 1.0}),
]


@pytest.mark.parametrize(("method", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_passes_of_every_method_are_those_of_the_plan(tiny_model_dir, tiny_block_dir, tmp_path, method, changes):
    values = {**METHODS[method].values, **changes}
    if values.get("num_views", 0) > 6:
        values["num_views"] = 6
    values["hints"] = "none"  # they sample what a rollout asks for: `test_hints.py`
    if "branches" in values:
        values["branches"] = [SHAPE["num_generations"] // 2, 2]
    blocks = values.pop("blocks", None)
    model_dir = tiny_block_dir if blocks else tiny_model_dir
    mu = min(2, values["num_iterations"])
    parts = values.get("num_mini_batches", 1)
    settings = {**SHAPE, **values, "method": method, "num_iterations": mu, "max_steps": mu * parts, "right_share": None}
    settings |= {"min_speed_spread": 0.0, "reward_weights": [1.0, 0.0]}
    args = DiffuGRPOConfig(output_dir=str(tmp_path), **settings)
    trainer = Counting(
        model=load_model(str(model_dir)),
        reward_funcs=[lambda completions, **_: [float(i) for i in range(len(completions))], is_even],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "abc"}]}] * ROWS),
        processing_class=load_tokenizer(str(tiny_model_dir)),
    )
    trainer.train()
    batches, rows = rollout_buffer(trainer), ROWS * parts
    assert len(batches) == parts
    scored = torch.cat([batch["view_weights"].ne(0).any(-1) for batch in batches])
    views = scored.sum().item() / (rows * mu)
    planned, most = passes(args, views), max_views(args, blocks)
    if BOUNDS in planned:  # in a draw of their own, in which other views may be empty
        del planned[BOUNDS]
        assert 0 < trainer.counts[BOUNDS] <= rows * passes(args, most)[BOUNDS]
        assert trainer.counts.pop(BOUNDS) == trainer.views_of_bounds
    if "branches" in values:  # half of the leaves continue from the middle of another one
        planned["sampling"] = planned["sampling"] * 3 // 4
    assert trainer.counts == {what: pytest.approx(rows * count) for what, count in planned.items()}
    assert views == most if method in FIXED else 0 < views <= most
    if method == "just-grpo":
        ends = batches[0]["completion_mask"].sum(1)
        assert trainer.counts["updates, backward"] == ends.sum()
