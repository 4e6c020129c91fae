"""The shape of a tree of rollouts (`d1/rl/tree.py`), from its `branches`: the children of a node of each level."""

from __future__ import annotations

import math
from collections.abc import Sequence


def leaves_below(branches: Sequence[int], level: int) -> int:
    """The number of leaves below a node of a level; the root has level 0."""
    return math.prod(branches[level:])


def first_level(branches: Sequence[int], leaf: int) -> int:
    """The level of the node at which a leaf's own edges begin: it is the first leaf of all nodes below."""
    for level in range(len(branches)):
        if leaf % leaves_below(branches, level + 1) == 0:
            return level
    raise ValueError(f"a tree with branches {[*branches]} has no leaf {leaf}")


def level_steps(branches: Sequence[int], steps: int) -> list[int]:
    """The forward pass at which each level's nodes are, from the root's 0 to the leaves' `steps`."""
    levels = len(branches)
    return [level * steps // levels for level in range(levels + 1)]
