"""The README of a pocket base model: the shipped one of its task, with what was measured while the model was made."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pocket.recipes import RECIPES, ROOT


def model_card(
    task: str,
    parameters: int,
    problems: int,
    tokens: int,
    seconds: float,
    accuracy: Sequence[dict[int, float]],
    steps: Sequence[int],
    seed: int,
    block_size: int | None = None,
) -> str:
    """The card; `accuracy[stage][length]` is the share of `problems` validation problems solved after a stage.

    Raises:
        ValueError: the shipped card has no place for a figure.
    """
    base = RECIPES[task].base
    file = ROOT / "pocket" / base / "README.md"
    flags = f"--task {task} " * (task != "sudoku") + f"--seed {seed}"
    first, last = ("".join(f" {share:.3f} |" for share in stage.values()) for stage in accuracy)
    changes = {
        r"with [\d,]+ parameters": f"with {parameters:,} parameters",
        r"\d+( validation \w+, greedy \|).*": rf"{problems}\1" + "".join(f" length {n} |" for n in accuracy[0]),
        r"(after stage 1, )\d+( .*? \|).*": rf"\g<1>{steps[0]}\2{first}",
        r"(after stage 2, )\d+( .*? \|).*": rf"\g<1>{steps[1]}\2{last}",
    }
    if block_size:
        flags += f" --block_size {block_size} --output_dir pocket/block_{base}"
        changes[r"bidirectional( Llama\n\(`).*(`\).* with )LLaDA"] = rf"block-causal\1block_size: {block_size}\2BD3-LM"
    made = f"make_base {flags}`: {tokens / 1e6:.1f}M tokens in {seconds / 60:.0f} minutes on"
    text = file.read_text()
    for pattern, new in (changes | {r"make_base .*minutes on": made}).items():
        text, found = re.subn(pattern, new, text)
        if found != 1:
            raise ValueError(f"{file} must have one place that matches {pattern!r}, it has {found}")
    return text
