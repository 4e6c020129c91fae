"""The ladder: its problems and bases in miniature, its rates, and its analysis on data with known slopes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import linregress, ttest_1samp

from d1.rl.train import make_parser
from d1.tasks import load_task
from pocket.answers import completion
from pocket.arithmetic_traces import training_numbers
from pocket.recipes import ROOT
from pocket.tokenizer import build_tokenizer
from studies.ladder import bases, report, run
from studies.ladder.bases import BASES, CANVAS, PROMPT, STEPS, WIDTHS
from studies.ladder.run import FACTORS, RATES, ROWS, SEARCH_SEEDS, SEEDS

OCTAVES = [0.0, 1.9, 3.8]
TINY = tuple(bases.replace(stage, rows=2, every=1, most=2, least=0.0, highest=1.0) for stage in bases.STAGES)
SHORT = (1, 2, 2)


@pytest.fixture
def few_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(bases, "PROBLEMS", {"train": 64, "validation": 4, "test": 8})
    return bases.problem_files(tmp_path)


def test_problems_have_eight_steps_and_no_numbers_twice_and_their_tokens_fill_the_canvas(few_problems):
    numbers = [tuple(sorted(own)) for file in few_problems.values() for own in training_numbers(file)]
    assert len(numbers) == len({*numbers}) == 76
    assert {len(own) for own in numbers} == {STEPS + 1}
    tokenizer, rng = build_tokenizer("numbered_arithmetic"), np.random.default_rng(0)
    problems = bases.arithmetic_traces.problems(few_problems["train"])(20, rng)
    for problem in problems:
        told = completion(*bases.trace("careful", *problem))
        chat = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": told}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        assert len(ids) == PROMPT + CANVAS
        text = tokenizer.decode(ids[PROMPT:], skip_special_tokens=True)
        amount = amount_after(problem)
        assert load_task("arithmetic").score(text, {"ground_truth": float(amount)})["accuracy"] == 1
        # Each step is told after its number, which also stands before its sentence.
        prompt, answer = (tokenizer.convert_ids_to_tokens(part) for part in (ids[:PROMPT], ids[PROMPT:]))
        for ordinal, step in zip(bases.ORDINALS, problem.steps, strict=False):
            assert answer[answer.index(ordinal) + 3 : answer.index(ordinal) + 5] == [step.sign, str(step.operand)]
            if step.sign != "*":
                assert prompt[prompt.index(ordinal) + 3] == str(step.operand)


def amount_after(problem):
    amount = problem.start
    for sign, operand in problem.steps:
        amount = {"+": amount + operand, "-": amount - operand, "*": amount * operand}[sign]
    return amount


def test_a_base_is_made_from_its_seed_and_a_run_trains_and_is_judged(few_problems, tmp_path, monkeypatch):
    monkeypatch.setattr(bases, "DATA", tmp_path / "data")
    monkeypatch.setattr(bases, "STAGES", TINY)
    monkeypatch.setattr(bases, "SHORT", SHORT)
    monkeypatch.setattr(bases, "LOWEST", 0.0)
    bases.make_bases(16, tmp_path)
    lines = bases.read_lines(tmp_path / "data" / "bases.jsonl")
    assert [line["base"] for line in lines] == [*BASES]
    assert [line["steps"] for line in lines] == [[2, 1, 1, 1]] * 2
    assert lines[0]["weights"] != lines[1]["weights"]
    bases.shutil.rmtree(bases.folder_of(16, 0, tmp_path))
    made = bases.base_model(16, 0, tmp_path)  # again, with the weights of its line
    assert bases.digest(made) == lines[0]["weights"]
    (made / "model.safetensors").write_bytes((bases.base_model(16, 1, tmp_path) / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="has other weights than its line"):
        bases.base_model(16, 0, tmp_path)
    found = run.line({"width": 16, "base": 1, "row": "rldf", "seed": 400}, 1e-4, tmp_path, "test", budget=20_000)
    assert len(found["right"]) == 8
    assert found["compute"] >= 20_000
    assert found["error"] is None
    assert not list(tmp_path.glob("16-*"))


def test_a_stage_that_misses_its_share_is_an_error(few_problems):
    hard = [bases.replace(stage, least=0.5) for stage in TINY[:2]]  # the first is not needed
    with pytest.raises(ValueError, match=r"width 16, base 0: 0\.000 solved after 2 steps, 0\.5 to 1\.0 wanted"):
        bases.pretrained(16, 0, few_problems, hard, SHORT)


def test_a_mixed_stage_that_ends_too_low_is_judged_again_step_by_step(few_problems, monkeypatch):
    def made(every, *shares):
        given = iter(shares)
        monkeypatch.setattr(bases, "solve_rate", lambda *_: next(given))
        stage = bases.replace(TINY[2], every=every, most=4, highest=0.35)
        model, _, found = bases.pretrained(16, 0, few_problems, [stage], SHORT)
        assert next(given, None) is None
        return model.state_dict(), found

    weights, found = made(2, 0.5, 0.1, 0.3)  # steps 2 and 4, then step 3 of the same steps
    assert (found["steps"], found["solved"]) == ([2, 3], [0.3])
    same, _ = made(3, 0.3)
    assert all(torch.equal(weights[name], same[name]) for name in same)


def test_rows_differ_in_what_they_are_compared_for(tmp_path):
    seen = {}
    for row in ROWS:
        flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings(row, 400, 1e-4)]
        seen[row], _ = make_parser().parse_args_and_config([*flags, "--output_dir", str(tmp_path)])
    own = ("estimator", "p_mask_prompt", "reveal", "num_iterations", "temperature")
    assert len({tuple(str(getattr(config, name)) for name in own) for config in seen.values()}) == len(ROWS)
    same = ("block_length", "diffusion_steps", "num_generations", "max_completion_length", "lr_scheduler_type")
    assert len({tuple(getattr(config, name) for name in same) for config in seen.values()}) == 1
    assert {*SEEDS}.isdisjoint(SEARCH_SEEDS)


def test_rates_are_scaled_by_width_and_replaced_only_if_another_is_clearly_better():
    right = {1e-5: "1000", 3e-5: "1100", 1e-4: "1110", 3e-4: "0111", 1e-3: "0001"}
    searched = [
        {"row": "d1", "seed": seed, "rate": rate, "right": right[rate]} for seed, rate in product(SEARCH_SEEDS, RATES)
    ]
    assert run.scaled_rate("d1", 64, searched) == 1e-4
    assert run.scaled_rate("d1", 240, searched) == pytest.approx(1e-4 * 64 / 240)

    def checked(*solved):
        found = {"row": "d1", "width": 240, "seed": SEARCH_SEEDS[0]}
        return [
            found | {"factor": factor, "right": "1" * count + "0" * (100 - count)}
            for factor, count in zip(FACTORS, solved, strict=True)
        ]

    scaled = 1e-4 * 64 / 240
    assert run.chosen_rate("d1", 240, searched, checked(50, 54, 52)) == pytest.approx(scaled)
    assert run.chosen_rate("d1", 240, searched, checked(50, 45, 55)) == pytest.approx(3 * scaled)
    assert run.chosen_rate("d1", 64, searched, []) == 1e-4
    with pytest.raises(ValueError, match="the search of rates is not complete: factor 3"):
        run.chosen_rate("d1", 240, searched, checked(50, 45, 55)[:-1])
    with pytest.raises(ValueError, match=r"the search of rates is not complete: rate 0\.001"):
        run.scaled_rate("d1", 64, searched[:-1])


def test_the_ladder_stops_after_its_search_if_no_row_gains():
    searched = [
        {
            "row": row,
            "seed": seed,
            "rate": rate,
            "right": "1" * (35 if row == "rldf" and rate == 1e-4 else 30) + "0" * 65,
        }
        for row, seed, rate in product(ROWS, SEARCH_SEEDS, RATES)
    ]
    run.check_headroom(searched, 0.30)
    with pytest.raises(ValueError, match=r"the best row of the search solves 0\.350, its base 0\.310: raise BUDGET"):
        run.check_headroom(searched, 0.31)


def simulated(generator, of_row, of_seed=0.05, problems=40):
    """Scores of all cells: levels of base and problem, a deviation per run, and gains linear in `OCTAVES`."""
    level = generator.uniform(size=problems)
    found = {}
    for row, (at, width), base in product(ROWS, enumerate(WIDTHS), BASES):
        first, slope = of_row.get(row, (0.0, 0.0))
        noise = of_seed * generator.normal(size=(len(SEEDS), 1)) + 0.3 * generator.normal(size=(len(SEEDS), problems))
        found[row, width, base] = level + 0.1 * base + first + slope * OCTAVES[at] + noise
    return found


def test_slopes_are_those_of_least_squares_per_base_and_seed():
    found = simulated(np.random.default_rng(5), {"tracerl": (0.02, 0.03)})
    each = report.slopes_of(found, OCTAVES, "tracerl")
    expected = np.array(
        [
            [
                linregress(OCTAVES, [(found["tracerl", w, b] - found["d1", w, b])[seed].mean() for w in WIDTHS]).slope
                for seed in range(len(SEEDS))
            ]
            for b in BASES
        ]
    )
    np.testing.assert_allclose([of.mean(-1) for of in each], expected)
    mean, _, _ = report.interactions(found, OCTAVES)["tracerl"]
    low, high = ttest_1samp(expected.mean(0), 0).confidence_interval()
    assert mean.value == pytest.approx(expected.mean())
    assert mean.low < low  # problems have a part, too
    assert mean.high > high


def test_known_slopes_are_found_and_equal_rows_are_seldom_separated():
    generator, count, real = np.random.default_rng(1), 300, {"tracerl": (0.05, 0.1)}
    inside, wrong, found_it = 0, 0, 0
    for _ in range(count):
        every = report.interactions(simulated(generator, real), OCTAVES)
        inside += every["tracerl"][0].low <= 0.1 <= every["tracerl"][0].high
        found_it += every["tracerl"][2] < 0.05
        wrong += any(p < 0.05 for row, (_, _, p) in every.items() if row != "tracerl")
    assert inside / count > 0.95 - 3 * (0.05 * 0.95 / count) ** 0.5
    assert found_it / count > 0.8
    assert wrong / count < 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5


def lines_of(generator, chance):
    return [
        {"row": row, "width": width, "base": base, "seed": seed}
        | {"right": "".join("01"[int(one)] for one in generator.uniform(size=60) < chance(row, width))}
        for row, width, base, seed in product(ROWS, WIDTHS, BASES, SEEDS)
    ]


def test_results_wait_for_all_runs_and_then_have_gains_slopes_order_and_a_figure(tmp_path):
    lines = lines_of(np.random.default_rng(2), lambda row, _: 0.3 + 0.6 * (row == "rldf"))
    text = report.results(lines, OCTAVES)
    assert "Gains that are above 0 at all sizes and with both bases: rldf.\n" in text
    done = f"{len(lines) - 1} of {len(lines)} planned runs are done"
    assert report.results(lines[:-1], []) == f"{done}. Gains wait for all of them.\n"
    report.figure(lines, {64: 220_000, 120: 770_000, 240: 3_000_000}, tmp_path / "gains.svg")
    drawn = (tmp_path / "gains.svg").read_text()
    assert all(row in drawn for row in ROWS if row != "d1")


def test_the_rates_of_the_page_are_those_of_the_runs():
    cells = [line.strip("| ").split(" | ") for line in report.rate_table().splitlines()[2:]]
    shown = {(row, width): cell for row, *of in cells for width, cell in zip(WIDTHS, of, strict=True)}
    lines = report.read_lines(run.RUNS)
    assert {(line["row"], line["width"]) for line in lines} == shown.keys()
    for line in lines:
        assert shown[line["row"], line["width"]].partition(",")[0] == f"{line['rate']:.1e}"


def test_runs_again_are_compared_with_the_same_seeds_of_the_test():
    lines = lines_of(np.random.default_rng(3), lambda row, _: 0.3 + 0.3 * (row == "rldf"))
    again = [line | {"right": "1" * 60 if line["row"] == "rldf" else "0" * 60} for line in lines if line["seed"] < 405]
    cells = [line.strip("| ").split(" | ") for line in report.again_table(lines, again).splitlines()[2:]]

    def solved(*of):
        own = [line for line in lines if (line["row"], line["width"], line["base"]) == of and line["seed"] < 405]
        return np.mean([line["right"].count("1") / 0.6 for line in own])

    for row, base, *shown in cells:
        expected = solved(row, 64, int(base) - 1) - solved("d1", 64, int(base) - 1), 100.0 * (row == "rldf")
        found = [float(cell.split(" ")[0]) for cell in shown]
        assert found == pytest.approx([*expected, expected[1] - expected[0]], abs=0.051)


def test_orders_are_compared_by_rank():
    up = {row: 0.1 * number for number, row in enumerate(ROWS)}
    cells = {(row, width, base): np.full((5, 4), up[row]) for row, width, base in product(ROWS, WIDTHS, BASES)}
    cells |= {(row, 240, 1): np.full((5, 4), -up[row]) for row in ROWS}
    table = [line.split("|")[2:4] for line in report.order_table(cells).splitlines()[2:]]
    assert [[float(one) for one in line] for line in table] == [[1, 1], [1, -1], [1, -1]]
