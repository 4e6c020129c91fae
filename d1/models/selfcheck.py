"""A check of the installed libraries: a decoder of Transformers computes the same with a cache as without one.

It runs with the first model that is loaded in an environment. A release that renames what `d1.transformers_bridge`
names would otherwise give wrong numbers without an error, as Transformers 5.24 did with `past_key_values`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from d1.models.head import backbone_and_head
from d1.transformers_bridge import CACHE

LIBRARIES = ("torch", "transformers")


def check_environment(prepare: Callable[[Any], Any], marks: Path = Path(HF_HOME) / "d1") -> None:
    """Raise RuntimeError if a cache changes a tiny model's states; `prepare` is that of `d1.models`. A file in `marks`
    says for which versions it does not: these are not checked again. Random numbers stay as they are."""
    mark = marks / "-".join(f"{name}_{version(name)}" for name in LIBRARIES)
    if mark.is_file():
        return
    difference = difference_with_cache(prepare)
    if not difference < 1e-5:
        raise RuntimeError(
            f"with these versions ({mark.name}), a model's states with a cache differ from those without by "
            f"{difference:.2g}, so numbers would be wrong: install the versions of constraints.txt"
        )
    with contextlib.suppress(OSError):  # read-only: the next process checks again
        marks.mkdir(parents=True, exist_ok=True)
        mark.touch()


@torch.no_grad()
def difference_with_cache(prepare: Callable[[Any], Any]) -> float:
    """The largest difference between states of one pass over 8 tokens and of a pass over the last 4 of them, with the
    keys and values of the first 4 in a cache and the last layer at two positions only."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = prepare(LlamaForCausalLM(config).float()).eval()
        backbone, _ = backbone_and_head(model)
        ids = torch.arange(8).unsqueeze(0)
        mask = torch.ones(1, 8).long()
        positions = torch.tensor([[1, 3]])
        cache = DynamicCache()
        whole = backbone(ids, mask, **{CACHE: cache})
        cache.crop(-4)
        part = backbone(ids[:, 4:], mask, positions, position_ids=torch.arange(4, 8).unsqueeze(0), **{CACHE: cache})
        return float((whole[:, 4 + positions[0]] - part).abs().max())
