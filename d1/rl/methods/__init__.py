"""The published RL methods: one file per method, in the format of a user's own method file.

A file has the paper, the formula and what differs from the release; `METHOD`, with the source of each value; and what
only this paper uses: entries of `ESTIMATORS`, `OBJECTIVES`, `PENALTIES`, `ADVANTAGES` or `HINTS`, with the formula
above the code. What several methods use is in `d1/rl/losses.py` and `d1/scoring/`. `METHOD` chooses

- `estimator`: which views of a completion are scored, with which weights;
- `scored_tokens`: which of its tokens count in the loss (`d1/rl/batch.py`);
- `objective` and its `loss_type`, the divisor (`trl` is TRL's own loss);
- `kl`: the penalty that `beta` weighs;
- `advantage`: how TRL's advantages are changed;
- `hints`: what rollouts of wrong groups are given (`d1/rl/hints.py`);
- the number of updates per rollout, and the sampling temperature.

`--method NAME` sets all values of the entry. A new method is a file here, a line of `MODULES`, its formula in
`tests/d1/rl/test_published.py`, and its row of `docs/methods.md`, which `python -m d1 methods --markdown` prints.

In the files, after a value: its source, or what it means; values for other tasks in brackets. A: advantage. G: tokens
of the canvas. L: scored tokens of a completion. l: a log-probability. n: num_views. old, ref: l of the policy that
sampled, and of the reference. rho: a ratio of p to the old policy. r: reward. m, s: mean and standard deviation of a
group's rewards. z: (r - m) / (s + 1e-4). "d1's" is a value of d1.py or of d1's train.yaml.

With one optimizer step per rollout every ratio is 1, and clips, ratio caps and penalties to the old policy do
nothing: agrpo, agrpo-entropy, cj-grpo, just-grpo, just-grpo-blocks, just-grpo-fast, bgpo, dipo, ebpo, trajectory.
Divisors count over the whole rollout, on all processes, where releases count per micro-batch; except for `bnpo` (d1,
coupled-grpo, d2), rldf and igpo, which count per micro-batch here, too.

Nothing here imports torch before a formula runs, because `d1 methods` and the help of commands list the names: in
these files, functions that call torch by name import it themselves.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from types import ModuleType
from typing import Any

from d1.rl.methods import (
    agrpo,
    agrpo_entropy,
    bgpo,
    cj_grpo,
    coupled_grpo,
    d1,
    d2,
    d_treerpo,
    dipo,
    dmpo,
    ebpo,
    egspo,
    egspo_sa,
    espo,
    gdpo,
    gdsd,
    igpo,
    just_grpo,
    just_grpo_blocks,
    just_grpo_fast,
    lightning_rl,
    quick_replay,
    reinforce,
    rldf,
    slim_rl,
    spg,
    stable_drl,
    tracerl,
    trajectory,
    unigrpo,
    wd1,
)
from d1.rl.methods.entry import CANVAS as CANVAS
from d1.rl.methods.entry import SCHEDULE as SCHEDULE
from d1.rl.methods.entry import Method as Method
from d1.rl.methods.entry import Trained as Trained
from d1.rl.methods.entry import canvas_of as canvas_of

MODULES: dict[str, ModuleType] = {
    "d1": d1,
    "wd1": wd1,
    "coupled-grpo": coupled_grpo,
    "espo": espo,
    "spg": spg,
    "agrpo": agrpo,
    "agrpo-entropy": agrpo_entropy,
    "cj-grpo": cj_grpo,
    "d2": d2,
    "tracerl": tracerl,
    "just-grpo": just_grpo,
    "just-grpo-blocks": just_grpo_blocks,
    "just-grpo-fast": just_grpo_fast,
    "unigrpo": unigrpo,
    "bgpo": bgpo,
    "stable-drl": stable_drl,
    "egspo": egspo,
    "egspo-sa": egspo_sa,
    "gdpo": gdpo,
    "gdsd": gdsd,
    "rldf": rldf,
    "dipo": dipo,
    "ebpo": ebpo,
    "dmpo": dmpo,
    "igpo": igpo,
    "d-treerpo": d_treerpo,
    "slim-rl": slim_rl,
    "lightning-rl": lightning_rl,
    "trajectory": trajectory,
    "quick-replay": quick_replay,
    "reinforce": reinforce,
}
METHODS: dict[str, Method] = {name: module.METHOD for name, module in MODULES.items()}

# --- The parts that belong to one paper -------------------------------------------------------------------------------


def parts_of_papers(table: str) -> dict[str, Any]:
    """The entries of a table, `ESTIMATORS` for instance, that are in the methods' files."""
    entries: dict[str, Any] = {}
    for module in MODULES.values():
        entries |= getattr(module, table, {})
    return entries


def papers_of_parts(table: str) -> dict[str, str]:
    """The name of each such entry -> the method in whose file it is."""
    return {part: name for name, module in MODULES.items() for part in getattr(module, table, {})}


# Pairs of parts of two papers that no published method has together, and what shows that they fit
SHOWN_PAIRS = [
    ("segments", "k3_to_old"),  # studies/factorial
]


@cache
def pairs_of_papers() -> frozenset[frozenset[str]]:
    """The pairs of parts that may be chosen together although they belong to two papers."""
    pairs = [frozenset(pair) for pair in SHOWN_PAIRS]
    for method in METHODS.values():
        parts = [method.values[kind] for kind in ("estimator", "objective", "kl", "advantage", "hints")]
        pairs += [frozenset(pair) for pair in combinations(parts, 2)]
    return frozenset(pairs)
