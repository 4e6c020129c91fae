"""Find the settings of a method by its name or in a user's file, and try the chosen rows of the tables.

The trial calls each row's function on three completions of random numbers before any model is loaded. So a mistake in a
user's function is one line at the start, not a traceback after the first rollout. What this trial cannot show is
checked whenever a row is called (`rows.py`, `d1/scoring/estimators.py`).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d1.lazy import module_in
from d1.masking import keyed_generator
from d1.ranges import nearest
from d1.rl.advantages import ADVANTAGES
from d1.rl.methods import METHODS, Method
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.rl.rows import LossInputs
from d1.scoring import ESTIMATORS, Estimator, Randomness, SampledRows, Views, ViewSettings
from d1.scoring.estimators import called

# What a user's own file may define besides `METHOD`: rows of these tables.
TABLES: dict[str, dict[str, Any]] = {
    "ESTIMATORS": ESTIMATORS,
    "OBJECTIVES": OBJECTIVES,
    "PENALTIES": PENALTIES,
    "ADVANTAGES": ADVANTAGES,
}

# The three completions of the trial.
PROMPT, CANVAS = 3, 8
LENGTHS = torch.tensor([8, 3, 0])  # the last one is not part of the loss
SCORED = torch.arange(CANVAS) < LENGTHS.unsqueeze(1)


def find_method(name: str) -> Method:
    """The row of `METHODS` with this name, or the method that a user's `.py` file defines; the file's rows join the
    tables.

    Raises:
        ValueError: there is no such method; or the file fails, has no `METHOD`, has wrong rows in its tables, or uses a
            name that is taken.
        FileNotFoundError: there is no such file.
    """
    if name in METHODS:
        return METHODS[name]
    if not str(name).endswith(".py"):
        known, hint = ", ".join(METHODS), nearest(name, METHODS)
        raise ValueError(f"--method must be one of {known}, or a path to a .py file, got {name!r}{hint}")
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no method file {path}")
    try:
        module = sys.modules.get(f"d1_user_method_{path.stem}")
        if module is None or module.__file__ != str(path):  # the file runs once, so that its rows stay the same objects
            module = module_in(path, f"d1_user_method_{path.stem}")
        method = getattr(module, "METHOD", None)
        if not is_named(method):
            raise ValueError(f"METHOD must be a dictionary of settings, METHOD = {{...}}, got {method!r}")
        own = {table: getattr(module, table, {}) for table in TABLES}
        for table in TABLES:
            check_table(table, own[table])
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"method file {path}: {kind}{error}") from error
    for table, rows in TABLES.items():
        rows.update(own[table])
    return Method(str(path), module.METHOD)


def is_named(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(name, str) for name in values)


def check_table(table: str, own: Any) -> None:
    """Raises ValueError unless a user's table has new rows of the right class, with functions in them."""
    rows = TABLES[table]
    kind = type(next(iter(rows.values())))
    example = f'{table} = {{"name": {kind.__name__}(function)}}, with {kind.__name__} of {kind.__module__}'
    if not is_named(own):
        raise ValueError(f"{table} must be a dictionary from names to rows: write {example}; got {own!r}")
    for name, row in own.items():
        if not isinstance(row, kind):
            raise ValueError(f"{table}[{name!r}] must be a row: write {example}; got {row!r}")
        if rows.get(name, row) is not row:
            raise ValueError(f"{table} already has {name}; choose another name")
        for field in fields(row):
            value = getattr(row, field.name)
            if (field.default is MISSING or callable(field.default)) and not callable(value):
                raise ValueError(f"{table}[{name!r}]: {field.name} must be a function, got {value!r}")


def check_names(method: Method, settings: Iterable[str]) -> None:
    """Raises ValueError if a method or a row names something that is not one of the run's `settings`."""
    for table, rows in TABLES.items():
        for name, row in rows.items():
            if wrong := sorted({*(getattr(row, "settings", None) or ())} - {*settings}):
                raise ValueError(f"{table}[{name!r}] reads {', '.join(wrong)}, which is not a setting of diffu-GRPO")
    unknown = sorted({*method.scale, *method.values} - {*settings})
    if unknown:
        raise ValueError(f"method {method.paper}: METHOD has {', '.join(unknown)}, which is not a setting of RL")


@contextmanager
def explained(row: str, function: object) -> Iterator[None]:
    """Turns an error of a row's function, or the row's complaint about what it returned, into one line."""
    try:
        yield
    except Exception as error:
        message, name = str(error).partition("\n")[0], called(function)
        if not isinstance(error, ValueError):
            lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename in name]
            message = f"{type(error).__name__} in line {lines[-1] if lines else '?'}: {message}"
        raise ValueError(f"{row}: {message if name in message else f'{name}: {message}'}") from error


def try_rows(settings: Any) -> None:
    """Calls the estimator, the objective, the penalty and the advantage of a `DiffuGRPOConfig` once. Raises ValueError,
    which says which of them returned what, and what was expected."""
    estimator, objective = ESTIMATORS[settings.estimator], OBJECTIVES[settings.objective]
    penalty, advantage = PENALTIES[settings.kl], ADVANTAGES[settings.advantage]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with explained(f"ESTIMATORS[{settings.estimator!r}]", estimator.draw):
            small, views = tried(estimator, settings.view_settings(), CANVAS)
            tried(estimator, settings.view_settings(), 3 * CANVAS)  # the number of views may depend on the length
        if objective.loss is not None:
            with explained(f"OBJECTIVES[{settings.objective!r}]", objective.loss):
                inputs = random_inputs(views, objective.reads_old, settings.needs_reference)
                ratios = torch.zeros(len(LENGTHS), settings.num_generations) if objective.over_group else None
                inputs = replace(inputs, log_ratios=ratios, views_per_draw=estimator.views_per_draw(small) or 1)
                objective(inputs, settings)[0].backward()
        if settings.beta and not settings.has_trls_kl:
            with explained(f"PENALTIES[{settings.kl!r}]", penalty.value):
                inputs = random_inputs(views, penalty.to == "old", penalty.to == "reference")
                penalty(inputs, settings).backward()
        if advantage.of is not None:
            with explained(f"ADVANTAGES[{settings.advantage!r}]", advantage.of):
                advantage(torch.linspace(-1, 1, 3 * settings.num_generations).view(3, -1))


def tried(estimator: Estimator, settings: ViewSettings, canvas: int) -> tuple[ViewSettings, Views]:
    """The settings for completions of `canvas` tokens, and the views of three of them. Raises ValueError if these are
    more than the estimator's row says."""
    small = replace(settings, gen_length=canvas, steps=canvas, block_length=canvas // 2)
    random = Randomness([keyed_generator(0, row) for row in range(3)], keyed_generator(0), 0, 3)
    views, most = estimator(left_to_right_rows(canvas), random, small), estimator.views(small)
    if views.noise.shape[1] > most:
        raise ValueError(
            f"gave {views.noise.shape[1]} views, but its row says at most {most}: "
            "write Estimator(..., views=lambda settings: ...)"
        )
    return small, views


def left_to_right_rows(canvas: int = CANVAS) -> SampledRows:
    """Three completions of `canvas` tokens that a sampler filled from left to right; the first prompt is padded."""
    places = torch.arange(canvas).repeat(len(LENGTHS), 1)
    visible = torch.arange(PROMPT) >= torch.tensor([1, 0, 0]).unsqueeze(1)
    return SampledRows(
        prompt_ids=torch.ones_like(visible, dtype=torch.long),
        attention_mask=visible.long(),
        maskable=visible,
        completion_ids=places,
        scored=torch.arange(canvas) < (LENGTHS * canvas // CANVAS).unsqueeze(1),
        reveal_steps=places,
        logps=-torch.ones(places.shape),
        entropies=torch.ones(places.shape),
    )


def random_inputs(views: Views, old: bool, reference: bool) -> LossInputs:
    """Random inputs of a loss under these views, with or without old and reference log-probabilities."""
    random = keyed_generator(1)

    def logps() -> Tensor:
        return -torch.rand(views.weights.shape, generator=random) * (views.weights != 0)

    return LossInputs(
        view_logps=logps().requires_grad_() * 1.0,  # not a leaf, like a model's output
        view_old=logps() if old else None,
        view_reference=logps() if reference else None,
        weights=views.weights,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        mask=SCORED.long(),
        tokens=LENGTHS.sum(),
        reveal_steps=torch.arange(CANVAS).repeat(len(LENGTHS), 1),
    )
