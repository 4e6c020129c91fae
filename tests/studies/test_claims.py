"""Sentences with numbers say what the data say: each claim is computed again, and today's wrong sentences fail."""

from __future__ import annotations

import re
from statistics import fmean

import pytest

from d1.models import load_tokenizer
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies import claims
from studies.claims import CLAIM, wrong_claims
from studies.collapse.report import below_limit
from studies.json_lines import read_lines
from studies.training import accuracy

PAGES = {
    "README.md": 6,
    "docs/studies.md": 2,
    "docs/convert.md": 4,
    "studies/smollm2/README.md": 20,
    "docs/samplers.md": 4,
    "docs/leaderboard.md": 13,
    "docs/fast_rollouts.md": 14,
    "docs/tools.md": 2,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_claims_of_a_page_hold(page):
    text = (ROOT / page).read_text()
    assert wrong_claims(text) == []
    assert len(CLAIM.findall(text)) >= PAGES[page]


@pytest.mark.parametrize(
    ("right", "planted"),
    [
        (
            "P solves 13.6 [8.2, 19.1]<!--claim: collapse/test: P > P8--> points more.",
            "P solves 12.6 [8.2, 19.1]<!--claim: collapse/test: P > P8--> points more.",
        ),
        (
            "P solves more<!--claim: collapse/test: P > P8--> than P8.",
            "P8 solves more<!--claim: collapse/test: P8 > P--> than P.",
        ),
        (
            "Replay loses 3.0<!--claim: factorial/sudoku-sft: effect replay < 0--> points.",
            "Replay gains 3.0<!--claim: factorial/sudoku-sft: effect replay < 0--> points.",
        ),
        (
            "P+ is not separated from P<!--claim: collapse/test: P+ ~ P-->.",
            "P is not separated from P8<!--claim: collapse/test: P ~ P8-->.",
        ),
        (
            "P+ is not separated from P<!--claim: collapse/test: P+ ~ P-->.",
            "P+ is equal to P<!--claim: collapse/test: P+ ~ P-->.",
        ),
        (
            "0.9 is equal within 2 points<!--claim: smollm2/samplers: shift, threshold 0.9 = shift, exact--> to exact.",
            "0.7 is equal within 2 points<!--claim: smollm2/samplers: more, threshold 0.7 = more, exact--> to exact.",
        ),
        (
            "0.9 is equal within 2 points<!--claim: smollm2/samplers: shift, threshold 0.9 = shift, exact--> to exact.",
            "0.9 is equal<!--claim: smollm2/samplers: shift, threshold 0.9 = shift, exact--> to exact.",
        ),
        (
            "At the same updates, P solves more<!--claim: collapse/test: P > P8--> than P8.",
            "At equal tokens, P solves more<!--claim: collapse/test: P > P8--> than P8.",
        ),
    ],
)
def test_a_wrong_number_direction_verb_or_cost_is_found(right, planted):
    assert wrong_claims(right) == []
    assert len(wrong_claims(planted)) >= 1


# What the pages said before, with the comparison that the sentence makes.
WRONG = [
    "At equal processor seconds, C loses 9.9 [6.0, 13.7]<!--claim: collapse/tokens: C < exact--> points.",
    "Merging is the cause: P solves more<!--claim: collapse/tokens: P > P8--> at equal tokens.",
    "Each difference excludes zero: Countdown gains +8.2<!--claim: pocket/countdown-32: sft_grpo > grpo--> points.",
    "Start with tracerl: with replay, models solve more"
    "<!--claim: factorial/sudoku-sft: prompt+advantages+rollouts+replay > prompt+advantages+rollouts-->.",
    "Gains shrink with the size: tracerl loses 1.7"
    "<!--claim: archived/Do gains shrink as models grow?: cell tracerl/points per doubling [95%] < 0--> per doubling.",
    "Start with vrpo: on Countdown it gains<!--claim: archived/Preferences: cell VRPO/countdown > 0--> over SFT.",
    "Replay is better<!--claim: factorial/sudoku-sft: effect replay > 0--> on Sudoku.",
    "At equal updates, replay loses 3.0<!--claim: factorial/sudoku-sft: effect replay < 0--> points.",
    "Exact is above<!--claim: collapse/test: exact > C--> C.",
]


@pytest.mark.parametrize("sentence", WRONG)
def test_a_sentence_that_was_wrong_fails(sentence):
    assert wrong_claims(sentence)


def mark(page: str, name: str) -> float:
    """The number before `<!--computed: NAME-->` of a page."""
    (found,) = re.findall(rf"([\d.]+)%?<!--computed: {name}-->", (ROOT / page).read_text())
    return float(found)


def test_the_share_of_prompts_with_a_hidden_number_or_operation_is_that_of_independent_masks():
    tokenizer = load_tokenizer(str(ROOT / "pocket" / "arithmetic_base"))
    prompts = load_task("arithmetic").load_rows("test")["prompt"]
    counts = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        verbs = ("finds", "buys", "gets", "loses", "sells", "drops", "doubles", "triples")
        # "doubles them": the word is operation and operand.
        counts.append(sum(token.strip("#").isdigit() or token in verbs for token in tokens))
    hidden = fmean(1 - 0.85**count for count in counts)
    assert mark("docs/leaderboard.md", "prompt-mask") == round(100 * hidden)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        *((page, "44 grids") for page in ("docs/leaderboard.md", "docs/samplers.md", "pocket/RESULTS.md")),
        *((f"studies/{study}/README.md", "44 grids") for study in ("distill", "factorial", "samplers")),
        ("pocket/RESULTS.md", "70 sets of numbers"),
    ],
)
def test_pages_with_intervals_over_problems_say_that_these_share_grids_or_numbers(page, words):
    assert words in (ROOT / page).read_text()
    grids = {*load_task("sudoku").load_rows("test")["ground_truth"]}
    sets = {tuple(numbers) for numbers, _ in load_task("pocket_countdown").load_rows("test")["ground_truth"]}
    assert words in (f"{len(grids)} grids", f"{len(sets)} sets of numbers")


def test_cells_with_replay_have_as_many_fewer_updates_as_the_page_says():
    lines = [line for line in claims.data("factorial/data/runs.jsonl") if line["setup"] == "sudoku-sft"]
    steps = [fmean(line["steps"] for line in lines if ("replay" in line["cell"]) == there) for there in (True, False)]
    assert mark("docs/leaderboard.md", "replay-updates") == round(100 * (1 - steps[0] / steps[1]))


def test_the_share_of_rollouts_in_the_compute_is_that_of_the_runs():
    lines = read_lines(ROOT / "studies" / "collapse" / "data" / "reference.jsonl")
    share = fmean(64 * line["completion_tokens"] * line["rollouts"] / line["compute"] for line in lines)
    assert mark("docs/fast_rollouts.md", "rollout-share") == round(100 * share)


def test_most_runs_below_the_limit_end_above_their_own_start():
    starts = {line["seed"]: accuracy(line["right"]) for line in claims.data("collapse/data/start.jsonl")}
    stages = [claims.data(f"collapse/data/{stage}.jsonl") for stage in ("test", "tokens", "third")]
    below = [line for lines in stages for line in lines if below_limit(line)]
    above = [line for line in below if accuracy(line["right"]) > starts[line["seed"]]]
    assert mark("docs/fast_rollouts.md", "below-limit") == len(below)
    assert mark("docs/fast_rollouts.md", "above-start") == len(above)


def test_the_controls_of_the_tools_study_solve_at_most_what_the_page_says():
    lines = [line for line in claims.data("tools/data/runs.jsonl") if line["arm"] != "tool"]
    by_arm: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for name in ("right", "right_with_tool"):
            if name in line:
                share = 100 * line[name].count("1") / len(line[name])
                by_arm.setdefault((line["attention"], line["arm"] + name), []).append(share)
    assert mark("docs/tools.md", "tools-controls") == pytest.approx(max(map(fmean, by_arm.values())), abs=0.051)


def test_the_second_seed_of_the_best_arm_counts_for_that_arm(monkeypatch):
    lines = [{"job": f"sft-{name}-0", "test": {"right": "0110"}} for name in ("ar", "shift", "full")]
    lines.append({"job": "sft-best-1", "arm": "shift", "test": {"right": "1110"}})
    monkeypatch.setattr(claims, "data", lambda path: lines)
    found = claims.arms_of("smollm2/test")
    assert {arm: [line["seed"] for line in own] for arm, own in found.items()} == {
        "ar": [0],
        "shift": [0, 1],
        "full": [0],
    }
