"""Archived studies: their commits exist, their tables are those of the pages there, the slopes are recomputed."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from studies.reports import holm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "studies.md"
ARCHIVED = re.compile(r"<!--archived (\w+) ([^>]+)-->")
COMPUTED = ("studies/ladder/README.md", "studies/editing/README.md")  # their tables are made from other ones


@cache
def shown(commit: str, path: str) -> str:
    found = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        history = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True)
        if history.returncode:
            pytest.skip(f"this clone has no commit {commit}")
        pytest.fail(f"{commit} has no {path}")
    return found.stdout


def sections() -> list[str]:
    return re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]


def test_every_archived_study_names_a_page_at_a_commit_and_has_limits():
    assert len(sections()) == 10
    for section in sections():
        assert len(ARCHIVED.findall(section)) == 1, section[:60]
        assert "**Limits.**" in section


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.splitlines()[0])
def test_its_table_is_that_of_the_page_at_the_commit(section):
    ((commit, path),) = ARCHIVED.findall(section)
    page = shown(commit, path)
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    if path not in COMPUTED:
        assert [row for row in rows if row not in page.splitlines()] == []


def lines_of(commit: str, path: str) -> list[dict]:
    return [json.loads(line) for line in shown(commit, path).splitlines()]


def test_the_slopes_of_the_ladder_have_the_six_bases_as_units():
    """Student's t with four degrees of freedom over six bases, from the archived outcomes."""
    section = next(section for section in sections() if "studies/ladder" in section)
    ((commit, _),) = ARCHIVED.findall(section)
    runs, again, bases = (lines_of(commit, f"studies/ladder/data/{name}.jsonl") for name in ("runs", "again", "bases"))
    octaves = {line["width"]: np.log2(line["parameters"]) for line in bases}

    def solved(lines, row, width, base):
        right = [line["right"] for line in lines if (line["row"], line["width"], line["base"]) == (row, width, base)]
        return np.mean([text.count("1") / len(text) for text in right])

    def slope(row, smallest):
        sizes, gains = [], []
        for width in octaves:
            for base in (0, 1):
                lines = smallest if width == 64 else runs
                sizes.append(octaves[width])
                gains.append(100 * (solved(lines, row, width, base) - solved(lines, "d1", width, base)))
        found = stats.linregress(sizes, gains)
        half = stats.t.ppf(0.975, len(gains) - 2) * found.stderr
        return f"{found.slope:+.1f} [{found.slope - half:+.1f}, {found.slope + half:+.1f}]", found.pvalue

    rows = [
        line.strip("| ").split(" | ")
        for line in section.splitlines()
        if re.match(r"\| .*\[", line) and "95" not in line
    ]
    assert len(rows) == 5
    p_values = []
    for row, points, p, in_fp32 in rows:
        found, p_value = slope(row, runs)
        assert (points, p) == (found, f"{p_value:.3f}")
        assert in_fp32 == slope(row, again)[0]
        p_values.append(p_value)
    assert f"{min(holm(p_values)):.3f} after Holm" in section
    last = [
        min({line["row"] for line in runs}, key=lambda row: solved(runs, row, width, base)) == "d1"
        for width in octaves
        for base in (0, 1)
    ]
    assert sum(last) == 5
    shown_prompt = [
        solved(runs, "d1, prompt shown", width, base) > solved(runs, "d1", width, base)
        for width in octaves
        for base in (0, 1)
    ]
    assert all(shown_prompt)


def test_most_ladders_without_an_effect_of_size_have_a_significant_slope_if_runs_are_the_unit():
    """The share that docs/studies.md states, simulated with the variation of bases and seeds of the archived runs."""
    section = next(section for section in sections() if "studies/ladder" in section)
    said = int(re.search(r"about (\d+)% have at least one", section)[1])
    ((commit, _),) = ARCHIVED.findall(section)
    runs, bases = (lines_of(commit, f"studies/ladder/data/{name}.jsonl") for name in ("runs", "bases"))
    solved = {
        (line["row"], line["width"], line["base"], line["seed"]): 100 * line["right"].count("1") / len(line["right"])
        for line in runs
    }
    rows = sorted({row for row, *_ in solved} - {"d1"})
    models = [(line["width"], line["base"]) for line in bases]  # two bases per width, next to each other
    seeds = range(400, 408)

    # gains (rows, models, seeds), and their variation: of seeds within a base, and of the two bases of a width.
    gains = np.empty((len(rows), len(models), len(seeds)))
    for row, name in enumerate(rows):
        for model, at in enumerate(models):
            gains[row, model] = [solved[name, *at, seed] - solved["d1", *at, seed] for seed in seeds]
    of_seeds = gains.var(axis=-1, ddof=1).mean()
    means = gains.mean(axis=-1)
    of_bases = ((means[:, ::2] - means[:, 1::2]) ** 2).mean() / 2 - of_seeds / len(seeds)
    assert of_bases > 0

    generator = np.random.default_rng(0)
    shape = (2000, *gains.shape)
    drawn = np.sqrt(of_bases) * generator.normal(size=(*shape[:-1], 1)) + np.sqrt(of_seeds) * generator.normal(
        size=shape
    )
    octaves = np.log2([line["parameters"] for line in bases])
    centred = octaves - octaves.mean()
    slopes = np.einsum("srbk,b->srk", drawn, centred / (centred**2).sum())  # one slope per seed, as the page had it
    t = slopes.mean(-1) / (slopes.std(-1, ddof=1) / np.sqrt(len(seeds)))
    significant = (abs(t) > stats.t.ppf(0.975, len(seeds) - 1)).any(axis=1).mean()
    assert 100 * significant == pytest.approx(said, abs=3)
