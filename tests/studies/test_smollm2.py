"""The study of a real language model: its problems, its order of jobs, and its table."""

import hashlib
import os
from fractions import Fraction
from pathlib import Path

import pytest

from studies.smollm2 import run, svamp
from studies.smollm2.report import conversion_table, stages_table

ROW = {
    "Question": "A has number0 books in each of number1 boxes , and gives number2 away . How many are left ?",
    "Numbers": "6.0 9.0 4.0",
    "Equation": "- * number0 number1 number2",
    "Answer": "50.0",
}


def test_a_problem_has_its_steps_in_the_order_in_which_they_are_computed():
    assert svamp.own_problem(ROW) == {
        "question": "A has 6 books in each of 9 boxes, and gives 4 away. How many are left?",
        "solution": "6 * 9 = 54\n54 - 4 = 50\nThe answer is 50.",
        "ground_truth": 50.0,
    }
    assert svamp.is_consistent(ROW)
    assert not svamp.is_consistent({**ROW, "Answer": "49.0"})


def test_new_numbers_keep_their_digits_and_give_positive_whole_steps():
    problems = svamp.with_new_numbers([ROW], per_problem=5, seed=3)
    assert len({problem["question"] for problem in problems}) == 5
    for problem in problems:
        steps = [line.split() for line in problem["solution"].splitlines()[:-1]]
        for left, sign, right, _, result in steps:
            expected = {"*": int(left) * int(right), "-": int(left) - int(right)}[sign]
            assert int(result) == expected > 0
        assert problem["ground_truth"] == float(steps[-1][-1])
        assert len(steps[0][0]) == len(steps[0][2]) == 1
    assert problems == svamp.with_new_numbers([ROW], per_problem=5, seed=3)


def test_a_division_that_leaves_a_part_is_no_problem():
    row = {**ROW, "Equation": "/ number0 number1"}
    assert svamp.problem_of(row, [Fraction(9), Fraction(6), Fraction(1)]) is None
    assert svamp.problem_of(row, [Fraction(9), Fraction(0), Fraction(1)]) is None
    assert svamp.problem_of(row, [Fraction(12), Fraction(6), Fraction(1)])["ground_truth"] == 2


def test_every_job_is_needed_after_it_is_there_and_pilots_come_first():
    names = [job.name for job in run.jobs()]
    assert len({*names}) == len(names)
    for job in run.jobs():
        assert set(job.needs) <= set(names[: names.index(job.name)]), job.name
    pilots = [f"sft-{arm}-0" for arm in run.DIFFUSION]
    assert max(map(names.index, pilots)) < min(names.index(name) for name in names if name.startswith("rate-"))


def test_a_failed_job_does_not_stop_those_that_need_it_and_is_not_tried_again(tmp_path, monkeypatch):
    done = []

    def fail(study):
        raise ValueError("no memory")

    def do(study):
        done.append("second")
        return {}

    monkeypatch.setattr(run, "jobs", lambda: [run.Job("first", fail), run.Job("second", do, ("first",))])
    study = run.Study("", tmp_path, tmp_path / "runs.jsonl")
    run.work(study, until=None)
    assert done == ["second"]
    assert study.failed() == {"first"}
    assert "no memory" in (tmp_path / "failed" / "first").read_text()
    run.work(study, until=None)
    assert done == ["second"]
    assert list(study.lines()) == ["second"]


def test_another_machine_makes_again_what_later_jobs_build_on(tmp_path, monkeypatch):
    """The lines of a finished pilot are there, its models are not: only the best arm is trained again."""
    done = []

    def make(study, name, file):
        done.append(name)
        study.path(file).parent.mkdir(exist_ok=True, parents=True)
        study.path(file).write_text("")
        return {"validation": {"right": "0110"}}

    def job(name, file, *needs):
        return run.Job(name, lambda study: make(study, name, file), needs)

    arms = {"shift": "0110", "in_place": "0100", "full": "0000"}
    every = [job("rows", "test.jsonl"), job("source", "ar/model.safetensors")]
    every += [job(f"convert-{arm}", f"{arm}-base/model.safetensors", "source") for arm in arms]
    every += [job(f"sft-{arm}-0", f"{arm}-0/model.safetensors", f"convert-{arm}") for arm in arms]
    every.append(job("rl", "rl/model.safetensors", *(f"sft-{arm}-0" for arm in arms)))
    monkeypatch.setattr(run, "jobs", lambda: every)
    study = run.Study("", tmp_path, tmp_path / "runs.jsonl")
    for one in every[:-1]:
        arm = one.name.removeprefix("sft-").removesuffix("-0")
        run.append_line(study.data, {"job": one.name, "validation": {"right": arms.get(arm, "")}})
    run.work(study, until=None)
    assert done == ["rows", "source", "convert-shift", "sft-shift-0", "rl"]


def test_no_job_starts_that_does_not_fit_into_the_time_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "jobs", lambda: [run.Job("long", lambda study: {}, minutes=5)])
    study = run.Study("", tmp_path, tmp_path / "runs.jsonl")
    run.work(study, until=run.time.time() + 60)
    assert study.lines() == {}


def test_the_table_has_the_shares_of_the_lines_and_differences_paired_by_problem():
    def line(right):
        part = {"right": right, "texts": []}
        return {"validation": part, "test": part, "bits": 0.1, "seconds": 1, "peak_gb": 2, "card": "a card"}

    table = conversion_table({"sft-ar-0": line("1110"), "sft-shift-0": line("1000")})
    rows = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()}
    assert rows["ar"][0].startswith("75.0 [")
    assert rows["shift"][0].startswith("25.0 [")
    assert rows["shift"][1].startswith("-50.0 [")
    assert rows["full"][-1] == "not run"


def test_stages_are_compared_with_sft_and_rl_has_the_rate_of_the_search():
    def line(right, **more):
        part = {"right": right, "texts": []}
        return {"validation": part, "test": part, **more}

    lines = {"base": line("0000", arm="shift"), "sft-shift-0": line("1000"), "rl-1": line("1110")}
    for rate, right in zip(run.RATES, ("1000", "1111", "1100"), strict=True):
        lines[f"rate-{rate:g}"] = line(right)
    rows = {}
    for row in stages_table(lines).splitlines():
        stage, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        rows[stage] = cells
    assert rows["converted (`shift`)"][1] == "0.0 [0.0, 49.0]"  # Wilson's: z^2 / (n + z^2)
    assert rows["+ SFT"][:3] == ["1", "25.0 [4.6, 69.9]", ""]
    assert rows["+ SFT + RL"][0] == "2"
    assert rows["+ SFT + RL"][1].startswith("87.5 [")
    assert rows["+ SFT + RL"][2].startswith("+62.5 [")
    assert rows["+ RL"] == ["0", "", "", "", ""]


def test_one_job_can_be_named_and_needs_those_before_it(tmp_path, monkeypatch):
    every = [run.Job("first", lambda study: {}), run.Job("second", lambda study: {"n": 2}, ("first",))]
    monkeypatch.setattr(run, "jobs", lambda: every)
    flags = ["--model", "m", "--output_dir", str(tmp_path), "--data", str(tmp_path / "runs.jsonl"), "--job"]
    with pytest.raises(ValueError, match="--job second needs the lines of first"):
        run.main(run.make_parser().parse_args([*flags, "second"]))
    run.main(run.make_parser().parse_args([*flags, "first"]))
    assert [line["job"] for line in run.read_lines(tmp_path / "runs.jsonl")] == ["first"]
    run.main(run.make_parser().parse_args([*flags, "second"]))
    assert [line["job"] for line in run.read_lines(tmp_path / "runs.jsonl")] == ["first", "second"]


def test_the_files_of_problems_are_named_if_they_are_missing(monkeypatch):
    monkeypatch.setenv("D1_FILES", str(Path("nowhere")))
    with pytest.raises(FileNotFoundError, match="D1_FILES"):
        svamp.read_csv("train")


DIGESTS = {  # of the files whose rows the committed results come from
    "sft.jsonl": "cd2dfb297cf6327c984ae8b4d13d3f8dbce8a30329906724242c41c89fc24d64",
    "rl.jsonl": "f22fcad388d574aedb24f8b2d020869350fe18fe9f2649cd52fe9ff160d159b1",
    "validation.jsonl": "5400b24599b865036b2b99f9349270a27db83f205f393000e14986902cf6ba61",
    "test.jsonl": "b1ca0a94629fadfdc36f56187fd64d1eb6ef2478aa68a13cb14d1022d9e102d2",
}


def test_the_rows_of_the_committed_results_stay_equal_to_the_byte(tmp_path):
    if not (Path(os.environ.get("D1_FILES", "/nowhere")) / "svamp" / "train.csv").is_file():
        pytest.skip("D1_FILES names no folder with svamp/train.csv")
    rows = run.read_lines(run.DATA)[0]
    counts = run.write_rows(run.Study("", tmp_path, tmp_path / "runs.jsonl"))
    assert counts == {name: rows[name] for name in DIGESTS}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()} == DIGESTS
