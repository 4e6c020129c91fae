"""What the entry of a method says: its paper, its values, and what its authors trained. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from d1.sampling.settings import BLOCK_LENGTH, default_steps


@dataclass(frozen=True)
class Trained:
    """Which weights a method's authors trained, and on how many prompts per optimizer step; a learning rate belongs to
    both. The completions per prompt are the entry's `num_generations`."""

    prompts: float
    lora_r: int = 0  # rank of the adapter; 0: all weights
    in_4bit: bool = False  # the frozen weights below the adapter are in NF4

    @property
    def weights(self) -> str:
        """The trained weights in words."""
        if not self.lora_r:
            return "all weights"
        return f"LoRA {self.lora_r}{' on 4 bits' if self.in_4bit else ''}"


@dataclass(frozen=True)
class Page:
    """A method's row in the table of `docs/methods.md`, in Markdown."""

    paper: str  # a link
    scores: str  # where log-probabilities come from; the loss; the KL
    release: str  # the authors' code
    largest_difference: str  # of loss and gradient from the released loss function (`tests/d1/rl/test_published.py`)
    differs: str  # what differs on purpose


@dataclass(frozen=True)
class Method:
    """An entry of the table.

    Attributes:
        paper: the method's name and where it is published.
        values: the settings that define the method. With `--method` on the command line they override a config file.
        scale: the settings of its authors' run that depend on the model and its size: optimizer, schedule, group and
            canvas. A config file overrides them.
        trained: what its authors trained; None for a method of this library or of a user. It sets nothing, because
            memory decides it: `d1 rl` says where a run differs.
        page: what its row of `docs/methods.md` says; None: it has no row there.
    """

    paper: str
    values: dict[str, Any]
    scale: dict[str, Any] = field(default_factory=dict)
    trained: Trained | None = None
    page: Page | None = None

    def deviation(self, run: Trained, num_generations: int, learning_rate: float) -> str:
        """What a run with these weights, prompts and completions per prompt does instead of the authors' run, as a
        sentence; "" if nothing differs or the authors' run is not known."""
        authors, group = self.trained, self.scale.get("num_generations")
        if authors is None or (authors == run and group == num_generations):
            return ""
        prompts = round(authors.prompts, 2)
        text = (
            f"its authors trained {authors.weights} with {prompts:g} prompts x {group} completions per optimizer step; "
            f"this run trains {run.weights} with {run.prompts:g} x {num_generations}"
        )
        if (authors.lora_r > 0) != (run.lora_r > 0) and learning_rate == self.scale.get("learning_rate"):
            text += f", and --learning_rate {learning_rate:g} is the authors' for {authors.weights}"
        return text

    def under(self, given: dict[str, Any]) -> dict[str, Any]:
        """The method's settings: `given` overrides `scale`, and `values` override `given`. The canvas is one setting,
        because its length, steps and blocks must fit each other: if one of them is given, the others are d1's, with
        steps by the length. So is a schedule: another one has no warm-up and no arguments, unless they are given."""
        canvas = canvas_of(given) if CANVAS.keys() & given.keys() else {}
        schedule = PLAIN if SCHEDULE in given else {}
        return {**self.scale, **canvas, **schedule, **given, **self.values}


SCHEDULE, PLAIN = "lr_scheduler_type", {"warmup_steps": 0, "lr_scheduler_kwargs": None}
# d1, dllm-reasoning/d1@837888f diffu-grpo: slurm_scripts/train.yaml; block_length is 32 there
CANVAS = {"max_completion_length": 256, "diffusion_steps": 128, "block_length": None}


def canvas_of(given: dict[str, Any]) -> dict[str, Any]:
    """d1's canvas for a run in which some of its settings are given; the steps are those of the given length."""
    length = given.get("max_completion_length") or CANVAS["max_completion_length"]
    block, steps = given.get("block_length") or BLOCK_LENGTH, CANVAS["diffusion_steps"]
    if isinstance(length, int) and isinstance(block, int) and length > 0 and block > 0:  # ranges are checked later
        steps = default_steps(length, block)
    return {**CANVAS, "max_completion_length": None, "diffusion_steps": steps}
