"""The entries that the board ran, and entries with some settings changed: the way from one method to another, the
search of a candidate.

The board is a record: `data/methods.json` has each entry of `METHODS` as it was run, so that its runs and pages do not
change with `d1/rl/methods.py`.

The name of a variant says what it is, so a line of data needs no table: "d1 > tracerl: prompt, advantages" is d1 with
tracerl's settings of two `IDEAS`; "tracerl, beta=0" is tracerl with another value (in JSON).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d1.rl.methods import METHODS

# Name -> the values of the entry, and its authors' learning rate ("" without one).
BOARD: dict[str, Any] = json.loads(Path(__file__).with_name("data").joinpath("methods.json").read_text())
# Settings that belong together, in the order of the way. All others are `REST`: an estimator often needs its own
# objective, penalty and mean.
IDEAS = {
    "prompt": ("p_mask_prompt",),
    "advantages": ("advantage", "scale_rewards", "right_share"),
    "rollouts": ("temperature", "top_k", "top_p", "remasking", "sampler", "reveal", "reveal_level"),
    "clipping": ("epsilon", "epsilon_high", "delta", "max_grad_norm"),
}
REST = "scores and loss"
# The updates of tracerl and of reinforce, in place of another entry's.
TRACERL = 'estimator="replay", scored_tokens="text", segment_steps=8, objective="clipped_views", loss_type="views", '
TRACERL += 'kl="k3_to_old", advantage="standardised", right_share=[0.2,0.8], num_iterations=4, split_views=true'
REINFORCE = 'estimator="elbo", antithetic=true, stratified=true, objective="reinforce", loss_type="grpo", beta=0'


def entry_of(name: str) -> str:
    """The entry of `BOARD` that a name, also of a variant, begins with."""
    return name.partition(" > ")[0].partition(", ")[0]


def is_changed(name: str) -> bool:
    """Whether a name says an entry with other values, not a step of the way between two entries."""
    return " > " not in name and ", " in name


def values_of(name: str) -> dict[str, Any]:
    """The settings of an entry of `BOARD` or of a variant of it.

    Raises:
        KeyError: there is no such entry or idea.
        ValueError: a variant's value is not JSON.
    """
    values = dict(BOARD[entry_of(name)]["values"])
    if " > " in name:
        entries, _, ideas = name.partition(": ")
        found = changes(*entries.split(" > "))
        for idea in ideas.split(", "):
            values |= found[idea]
    else:
        pairs = (one.split("=") for one in name.split(", ")[1:])
        values |= {setting: json.loads(value) for setting, value in pairs}
    return values


def changes(start: str, end: str) -> dict[str, dict[str, Any]]:
    """Idea -> the settings of an entry `end` that `start` has otherwise, in the order of the way."""
    own = BOARD[start]["values"]
    found: dict[str, dict[str, Any]] = {idea: {} for idea in (*IDEAS, REST)}
    for name, value in BOARD[end]["values"].items():
        if own.get(name) != value:
            found[next((idea for idea, settings in IDEAS.items() if name in settings), REST)][name] = value
    return {idea: values for idea, values in found.items() if values}


def way(start: str, end: str) -> tuple[str, ...]:
    """The variants between two entries: `start` with one idea of `end` each, then with the first two, three and so on.

    `REST` alone has "prompt" too, because estimators that replay need the whole prompt. With all ideas a variant would
    be `end` itself, so it is left out.
    """
    ideas = [*changes(start, end)]
    alone = [["prompt", idea] if idea == REST and "prompt" in ideas else [idea] for idea in ideas]
    together = [ideas[:count] for count in range(2, len(ideas))]
    return tuple(dict.fromkeys(f"{start} > {end}: {', '.join(of)}" for of in (*alone, *together)))


def flags_of(name: str) -> list[str]:
    """Flags of RL for an entry or a variant, without the number of updates, which each run sets.

    Raises:
        ValueError: `METHODS` gave the entry further settings since, so flags cannot repeat its runs.
    """
    entry = entry_of(name)
    if further := METHODS[entry].values.keys() - BOARD[entry]["values"].keys():
        raise ValueError(
            f"the board ran {entry} without {', '.join(sorted(further))}, which METHODS has now: repeat its runs with "
            "the version of this repository that wrote their data"
        )
    found = ["--method", entry]
    for setting, value in values_of(name).items():
        if setting != "num_iterations" and METHODS[entry].values.get(setting) != value:
            words = value if isinstance(value, (list, tuple)) else [value]
            found += [f"--{setting}", *(str(word).lower() if isinstance(word, bool) else str(word) for word in words)]
    return found


def changed_since() -> list[str]:
    """The entries of the board that `METHODS` no longer has, or has with other values."""
    current = {name: json.loads(json.dumps(method.values)) for name, method in METHODS.items()}
    return [name for name, of in BOARD.items() if of["values"] != current.get(name)]
