"""Shared by the tests of diffu-GRPO: a tiny trainer for any method, its task, and ways to compare two runs."""

import functools
import os

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from d1.models import load_model, load_tokenizer
from d1.models.kinds import has_masks
from d1.rl.config import DiffuGRPOConfig
from d1.rl.hints import HINTS, Hint
from d1.rl.methods import METHODS
from d1.rl.methods.igpo import draw_chunks
from d1.rl.trainer import DiffuGRPOTrainer, StopAtCompute

# Long enough that two random masks of one prompt are never equal by chance, each of another length.
WORDS = [letter * (24 + index) for index, letter in enumerate("abcdefghijkl")]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 8,
    "block_length": 4,
    "diffusion_steps": 4,
    "max_steps": 2,
    "p_mask_prompt": 0.4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}

# For a run that can be stopped in mid-cycle: each step has both micro-batches of a rollout, then a checkpoint.
TWO_BATCHES_A_STEP = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
}

# What a model with uniform noise needs on top, in canvases of 4 tokens.
UNIFORM = {"estimator": "accepted", "sampler": "parallel", "reveal": "entropy", "temperature": 0.8}
UNIFORM |= {"end_temperature": 0.4, "self_conditioning": False, "output": "draw", "reveal_level": 3.0}
UNIFORM |= {"p_mask_prompt": 0.0, "beta": 0.0, "block_length": 4, "max_completion_length": 12, "diffusion_steps": 9}
UNIFORM |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0}


@functools.cache
def rows(count=12):
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": WORDS[i % 12]}],
                "letter": WORDS[i % 12][0],
                "trace": WORDS[i % 12][:8],
            }
            for i in range(count)
        ]
    )


def letter_share(completions, letter, **columns):
    """Share of the completion that is the row's letter, plus a little for vowels, so that groups differ."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        (text.count(wanted) + 0.1 * sum(map(text.count, "aeiou"))) / max(len(text), 1)
        for text, wanted in zip(texts, letter, strict=True)
    ]


def by_letter(completions, **columns):
    """A different number for nearly every text: the mean place of its characters in the alphabet."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum((ord(one) - 97) / 26 for one in text) / max(len(text), 1) for text in texts]


def is_even(completions, **columns):
    """An accuracy that is not a reward: whether the text has an even number of characters."""
    return [float(len(completion[0]["content"]) % 2 == 0) for completion in completions]


is_even.is_accuracy = True


def repeats_letter(completions, letter, **columns):
    """An accuracy that is hardly ever 1 without hints: whether the text has the row's letter three times."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.count(wanted) >= 3) for text, wanted in zip(texts, letter, strict=True)]


repeats_letter.is_accuracy = True

# Hints of a method on canvases of 8 tokens
HINTS["small_chunks"] = Hint(functools.partial(draw_chunks, tail=0, chunk=(2, 3)))
WITH_HINTS = {"hints": "small_chunks", "hint_rows": 2, "reward": [by_letter, repeats_letter]}


def make_trainer(model_dir, folder, cls=DiffuGRPOTrainer, reward=letter_share, model=None, base=SETTINGS, **changes):
    of_trainer = {name: changes.pop(name, None) for name in ("peft_config", "callbacks", "rollout_func", "tools")}
    return cls(
        model=load_model(str(model_dir)) if model is None else model,
        reward_funcs=reward,
        args=DiffuGRPOConfig(**({"output_dir": str(folder)} | base | changes)),
        train_dataset=rows(),
        eval_dataset=rows(4),
        processing_class=load_tokenizer(str(model_dir)),
        **of_trainer,
    )


def method_settings(method):
    """The tiny settings, except those of the method itself, with few views. With SGD and no clipping, steps differ only
    as much as gradients do; Adam turns the rounding of a gradient that is almost 0 into a full step."""
    own = METHODS[method].values
    settings = {name: value for name, value in SETTINGS.items() if name not in own}
    settings |= {"method": method, "num_iterations": 2, "num_mini_batches": 1}
    settings |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    if "branches" in own:
        settings["branches"] = [2, 2]  # of the tiny settings' four completions
    return settings | ({"num_views": 4} if own.get("num_views", 0) > 4 else {})


def make_method(model_dir, folder, method, cls=DiffuGRPOTrainer, ends=(2, 25, 28, 32), **changes):
    """A trainer of a published method, with texts that are right or wrong and end early, late or never.

    Args:
        ends: the tokens that end a text.
    """
    model = load_model(str(model_dir))
    model.generation_config.eos_token_id = list(ends)
    own = {} if has_masks(model.config) else {name: UNIFORM[name] for name in UNIFORM if name != "learning_rate"}
    given = {"model": model, "base": method_settings(method) | own}
    given |= {"reward": [by_letter, is_even], "reward_weights": [1.0, 0.0]}
    given |= WITH_HINTS if METHODS[method].values["hints"] != "none" else {}
    return make_trainer(model_dir, folder, cls, **(given | changes))


class Recorded(DiffuGRPOTrainer):
    """Keeps the rows of each training rollout, of all processes in order: prompt, canvas, the number of scoring views
    in each update, and what these hide."""

    def after_rollout(self, batch):
        super().after_rollout(batch)
        if self.mode == "train":
            kept, used = batch["prompt_mask"].bool(), batch["view_weights"].ne(0).any(-1)
            prompts, rows = kept.shape[1], []
            for row, (own, scoring) in enumerate(zip(kept, used, strict=True)):
                hidden = batch["view_noise"][row][scoring]
                parts = batch["prompt_ids"][row][own], batch["canvas_ids"][row], scoring.sum(-1)
                rows.append([part.tolist() for part in (*parts, hidden[:, :prompts][:, own], hidden[:, prompts:])])
            self.__dict__.setdefault("rollouts", []).append(gather_object(rows))


def train_a_little(model_dir, folder, method, **changes):
    """A trainer after two updates on a rollout and one on the next, of three groups: two processes share the second.
    "d1+weights" is d1 with `sampling_weight_cap`, with which most tokens have different weights. "+accumulated" is a
    rollout of 12 micro-batches of one row, divided among the processes: 1 x 12, 2 x 6 or 4 x 3. "+mini-batches" has two
    optimizer steps per rollout, each with half of its 24 rows. "+ended" has texts that end early, so that the processes
    replay different numbers of steps. "+falling" has a rate that falls with the compute that
    all processes have spent."""
    method, _, variant = method.partition("+")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"per_device_train_batch_size": 12 // processes, "max_steps": 3, "learning_rate": 0.01}
    if variant == "accumulated":
        options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12 // processes}
    options |= {"learning_rate": LARGER_RATES[method]} if method in LARGER_RATES else {}
    options |= {"num_mini_batches": 2, "num_iterations": 1} if variant == "mini-batches" else {}
    options |= {"ddp_backend": "gloo"} if processes > 1 else {}
    options |= {"sampling_weight_cap": 1.5} if variant == "weights" else {}
    options |= {"scored_tokens": "ended", "ends": range(20, 34)} if variant == "ended" else {}
    options |= {"lr_scheduler_type": "linear", "max_compute_tokens": 20_000} if variant == "falling" else {}
    trainer = make_method(model_dir, folder, method, Recorded, **(options | changes), **same_mean(method))
    if variant == "falling":
        trainer.add_callback(StopAtCompute(trainer, 20_000))
    trainer.train()
    return trainer


LARGER_RATES = {"slim-rl": 0.1}  # its loss is a third of the quadrature's, and some rollouts keep no prompt
PER_MICRO_BATCH = ("rldf", "igpo")  # their mean is over the tokens of a micro-batch, as published


def same_mean(method):
    """Replaces the mean over the tokens of a micro-batch, which depends on how a rollout is split."""
    is_replaced = METHODS[method].values["loss_type"] == "bnpo" and method not in PER_MICRO_BATCH
    return {"loss_type": "grpo"} if is_replaced else {}


def of_each_part():
    """Methods that together have every estimator, objective, advantage, rule of scored tokens and use of views."""
    seen, found = set(), []
    for name, method in METHODS.items():
        chosen = ("estimator", "objective", "advantage", "scored_tokens", "split_views")
        parts = {(part, method.values[part]) for part in chosen}
        if not parts <= seen:
            found.append(name)
        seen |= parts
    return found


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def logged(trainer):
    """The logs of each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def clockless(log_history):
    clocks = ("seconds/", "_per_second", "step_time", "runtime", "peak_memory", "profiling/")
    return [{k: v for k, v in entry.items() if not any(clock in k for clock in clocks)} for entry in log_history]


def assert_same(one, other):
    """Two trainers have the same weights, to the bit, and logged the same."""
    expected, found = weights(one.model), weights(other.model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert clockless(one.state.log_history) == clockless(other.state.log_history)
