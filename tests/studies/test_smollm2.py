"""The study of a real language model: its problems, its order of jobs, and its table."""

import fcntl
import hashlib
import json
import os
import re
import time
from dataclasses import fields
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from d1.eval.scores import user_tasks
from d1.rl import DiffuGRPOConfig
from pocket.uncertainty import mean_of
from smollm import model as smollm_model
from studies.json_lines import append_line, read_lines
from studies.reports import points
from studies.smollm2 import (
    run,
    sampler_blocks,
    samplers,
    second_half,
    short_rl,
    short_sft,
    steps,
    study_svamp,
    three_seeds,
)
from studies.smollm2.report import (
    contrasts_table,
    conversion_table,
    cpu_rates_table,
    masks_table,
    prompt_masks_table,
    reasons_table,
    sampler_blocks_table,
    samplers_table,
    second_half_table,
    seed_contrasts_table,
    short_rl_rollouts_table,
    short_rl_table,
    short_sft_table,
    stages_table,
    three_seeds_table,
)
from tests.d1.models.test_gguf import write_gguf

ROW = {
    "Question": "A has number0 books in each of number1 boxes , and gives number2 away . How many are left ?",
    "Numbers": "6.0 9.0 4.0",
    "Equation": "- * number0 number1 number2",
    "Answer": "50.0",
}


def cells_of(table):
    """The cells of a Markdown table, by row, without its head."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def test_a_problem_has_its_steps_in_the_order_in_which_they_are_computed():
    assert study_svamp.own_problem(ROW) == {
        "question": "A has 6 books in each of 9 boxes, and gives 4 away. How many are left?",
        "solution": "6 * 9 = 54\n54 - 4 = 50\nThe answer is 50.",
        "ground_truth": 50.0,
    }
    assert study_svamp.is_consistent(ROW)
    assert not study_svamp.is_consistent({**ROW, "Answer": "49.0"})


def test_new_numbers_keep_their_digits_and_give_positive_whole_steps():
    problems = study_svamp.with_new_numbers([ROW], per_problem=5, seed=3)
    assert len({problem["question"] for problem in problems}) == 5
    for problem in problems:
        steps = [line.split() for line in problem["solution"].splitlines()[:-1]]
        for left, sign, right, _, result in steps:
            expected = {"*": int(left) * int(right), "-": int(left) - int(right)}[sign]
            assert int(result) == expected > 0
        assert problem["ground_truth"] == float(steps[-1][-1])
        assert len(steps[0][0]) == len(steps[0][2]) == 1
    assert problems == study_svamp.with_new_numbers([ROW], per_problem=5, seed=3)


def test_a_division_that_leaves_a_part_is_no_problem():
    row = {**ROW, "Equation": "/ number0 number1"}
    assert study_svamp.problem_of(row, [Fraction(9), Fraction(6), Fraction(1)]) is None
    assert study_svamp.problem_of(row, [Fraction(9), Fraction(0), Fraction(1)]) is None
    assert study_svamp.problem_of(row, [Fraction(12), Fraction(6), Fraction(1)])["ground_truth"] == 2


def test_the_autoregressive_model_of_a_gguf_is_a_folder_of_transformers(tmp_path):
    expected = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1).state_dict()
    study = steps.Study(str(tmp_path / "tiny.gguf"), tmp_path / "work", tmp_path / "runs.jsonl")
    assert steps.convert_source(study)["parameters"] == sum(weight.numel() for weight in expected.values())
    saved = AutoModelForCausalLM.from_pretrained(study.path("ar")).state_dict()
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert saved[name].equal(weight), name


@pytest.mark.parametrize("arm", steps.DIFFUSION)
def test_a_job_comes_after_those_that_it_needs_and_the_arm_is_chosen_before_rl(arm):
    every = run.jobs(arm)
    names = [job.name for job in every]
    assert len({*names}) == len(names)
    for job in every:
        assert {*job.reads, *job.after} <= set(names[: names.index(job.name)]), job.name
    assert names.index("best") < min(names.index(name) for name in names if name.startswith(("rate-", "rl-")))


def one_after_another(monkeypatch, *every):
    monkeypatch.setattr(run, "jobs", lambda arm: every)


def test_a_failed_job_stops_only_those_that_read_its_files_and_is_not_tried_again(tmp_path, monkeypatch):
    done = []

    def fail(study):
        raise ValueError("no memory")

    def refuse(study):
        raise SystemExit(2)

    def do(study, name):
        done.append(name)
        return {}

    first, refused = run.Job("first", fail), run.Job("refused", refuse)
    after = run.Job("after", lambda study: do(study, "after"), after=("first", "refused"))
    reader = run.Job("reader", lambda study: do(study, "reader"), reads=("first",))
    one_after_another(monkeypatch, first, refused, after, reader)
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    run.work(study, until=None)
    assert done == ["after"]
    assert study.failed() == {"first", "refused"}
    assert "no memory" in (tmp_path / "failed" / "first").read_text()
    run.work(study, until=None)
    assert done == ["after"]
    assert list(study.lines()) == ["after"]


def line_of(name, right):
    return {"job": name, "validation": {"right": right}}


def test_another_machine_makes_again_what_later_jobs_read(tmp_path, monkeypatch):
    """The lines of finished pilots are there, their models are not: only the best arm is trained again."""
    done = []

    def make(study, name):
        done.append(name)
        return line_of(name, "0110")

    real = run.jobs
    every = {}
    for arm in steps.DIFFUSION:
        every[arm] = [
            run.Job(
                job.name, steps.choose_arm if job.name == "best" else partial(make, name=job.name), job.reads, job.after
            )
            for job in real(arm)
        ]
    monkeypatch.setattr(run, "jobs", every.__getitem__)
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    first = ["rows", "source", *(f"convert-{arm}" for arm in steps.DIFFUSION)]
    for name in [*first, "sft-ar-0", "base", "ar-base"]:
        append_line(study.data, line_of(name, ""))
    append_line(study.data, line_of("sft-shift-0", "0100"))
    append_line(study.data, line_of("sft-full-0", "0000"))
    assert [job.name for job in run.jobs_to_do(study)][:6] == [
        "rows",
        "source",
        "convert-shift",
        "convert-in_place",
        "sft-shift-0",
        "sft-in_place-0",
    ]
    append_line(study.data, line_of("sft-in_place-0", "0110"))

    # `in_place` is the best one now, and stays it, although another run of `shift` solves more.
    assert "sft-shift-0" not in {job.name for job in run.jobs_to_do(study)}
    append_line(study.data, {"job": "best", "arm": "in_place"})
    append_line(study.data, line_of("sft-shift-0", "1111"))
    append_line(study.data, {**line_of("rate-3e-06", "1111"), "arm": "shift"})
    run.work(study, until=None)
    assert done[:4] == ["rows", "source", "convert-in_place", "sft-in_place-0"]
    assert "rate-3e-06" in done  # its line was of another arm
    assert not {"convert-shift", "sft-shift-0", "sft-full-0", "ar-base"} & {*done}
    assert done.index("sft-ar-0") < done.index("ar-rl-0")
    assert run.jobs_to_do(study) == []


def test_grpo_of_the_autoregressive_model_has_the_defaults_of_the_rl_of_d1(tmp_path, monkeypatch):
    """PROTOCOL.md says so."""

    class Made(Exception):
        pass

    def trainer(args, **others):
        raise Made(args)

    monkeypatch.setattr(trl, "GRPOTrainer", trainer)
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl", tiny=True)
    smollm_model.tiny(tmp_path / "ar-0")
    row = {"question": "?", "solution": "The answer is 1.", "ground_truth": 1.0}
    study.path("rl.jsonl").write_text(json.dumps(row) + "\n")
    for rate in steps.RATES:
        append_line(study.data, line_of(f"rate-{rate:g}", "0110"))
    with pytest.raises(Made) as made:
        steps.train_ar_grpo(study, seed=0)
    (args,) = made.value.args
    ours, theirs = ({f.name: f.default for f in fields(config)} for config in (DiffuGRPOConfig, trl.GRPOConfig))
    different = {name for name, value in theirs.items() if ours[name] != value}
    # Of the protocol or the machine; of other numbers of processes and of mixtures; and what is printed
    different -= {"learning_rate", "warmup_steps", "num_iterations", "num_generations", "max_completion_length"}
    different -= {"per_device_train_batch_size", "per_device_eval_batch_size"}
    different -= {"logging_nan_inf_filter", "ddp_find_unused_parameters", "router_aux_loss_coef"}
    different -= {"num_completions_to_print"}
    assert {"beta", "use_bias_correction_kl", "loss_type"} <= different
    assert {name: getattr(args, name) for name in different} == {name: ours[name] for name in different}


def test_no_arm_is_chosen_before_one_was_trained(tmp_path):
    """If all of them failed, such as without problems, a line would keep the choice for all later runs."""
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    with pytest.raises(ValueError, match="none of shift, in_place, full was trained"):
        steps.choose_arm(study)
    append_line(study.data, line_of("sft-full-0", "0110"))
    assert steps.choose_arm(study) == {"arm": "full", "solved": {"full": 2}}


def test_no_rate_is_chosen_before_a_run_of_the_search_has_ended():
    with pytest.raises(ValueError, match="none of rate-3e-06, rate-1e-05, rate-3e-05 has ended"):
        steps.best_rate({})


def test_right_answers_are_those_of_the_task_once_each(tmp_path):
    prompt = [{"role": "user", "content": "?"}]
    rows = [{"question": "a", "prompt": prompt}, {"question": "b", "prompt": prompt}]
    texts = {"a": ["The answer is 4.", "The answer is 4. ", "2 + 2 = 4", "The answer is 5."], "b": ["none"]}
    generations = [
        {"question": question, "text": text, "ground_truth": 4.0} for question, of in texts.items() for text in of
    ]
    (tmp_path / "x_generations.json").write_text(json.dumps({"generations": generations}))
    answers = [row["messages"][-1]["content"] for row in steps.right_answers(tmp_path, rows)]
    assert answers == ["The answer is 4.", "2 + 2 = 4"]


def test_no_job_starts_that_does_not_fit_into_the_time_that_is_left(tmp_path, monkeypatch):
    one_after_another(monkeypatch, run.Job("long", lambda study: {}, minutes=5))
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    run.work(study, until=time.time() + 60)
    assert study.lines() == {}


def names_in_time(study, until):
    found = run.jobs_in_time(run.jobs_to_do(study), run.names_in_work(study), until)
    return [job.name for job in found]


def test_a_worker_does_not_wait_for_jobs_that_need_one_that_cannot_start_any_more(tmp_path, monkeypatch):
    reader = run.Job("reader", lambda study: {}, reads=("long",), minutes=0.1)
    after = run.Job("after", lambda study: {}, after=("reader",), minutes=0.1)
    one_after_another(monkeypatch, run.Job("long", lambda study: {}, minutes=5), reader, after)
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    until = time.time() + 60
    assert names_in_time(study, until) == []
    run.work(study, until)
    assert time.time() < until - 30
    assert names_in_time(study, time.time() + 400) == ["long", "reader", "after"]

    # Another worker does it, so its end is waited for.
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks" / "long").open("a") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert names_in_time(study, until) == ["reader", "after"]


def test_the_peak_of_a_job_is_not_that_of_a_job_that_failed_before_it(tmp_path, monkeypatch):
    memory = {"peak": 0}

    def use(study, peak):
        memory["peak"] = max(memory["peak"], peak)
        if peak > 100e9:
            raise torch.cuda.OutOfMemoryError("no memory")
        return {}

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: memory.update(peak=0))
    monkeypatch.setattr(run, "run_record", dict)
    names = {"first": 140e9, "second": 2e9, "third": 1e9}
    one_after_another(monkeypatch, *(run.Job(name, partial(use, peak=peak)) for name, peak in names.items()))
    study = steps.Study("", tmp_path, tmp_path / "runs.jsonl")
    run.work(study, until=None)
    assert {name: line["peak_gb"] for name, line in study.lines().items()} == {"second": 2, "third": 1}


def test_the_command_ends_with_an_error_that_names_the_jobs_that_failed(tmp_path, monkeypatch, caplog):
    def fail(study):
        raise ValueError("no memory")

    other = run.Job("other", lambda study: {}, minutes=5)
    one_after_another(monkeypatch, run.Job("first", fail), run.Job("reader", fail, reads=("first",)), other)
    data = tmp_path / "copy.jsonl"
    flags = ["--model", "m", "--output_dir", str(tmp_path), "--tiny", "--data", str(data)]
    with pytest.raises(ValueError, match=r"jobs have failed: first \(ValueError: no memory\). To try one again"):
        run.main(run.make_parser().parse_args(flags))
    assert [line["job"] for line in read_lines(data)] == ["other"]  # --data is also read with --tiny
    data.unlink()
    (tmp_path / "failed" / "first").unlink()
    one_after_another(monkeypatch, other)
    with caplog.at_level("INFO"):
        run.main(run.make_parser().parse_args([*flags, "--minutes", "1"]))
    assert "jobs that are left: other" in caplog.text
    for wrong in (["--workers", "0"], ["--minutes", "-1"], ["--minutes", "nan"]):
        with pytest.raises(ValueError, match=wrong[0]):
            run.make_parser().parse_args([*flags, *wrong])


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
    on_cpu = {name: value for name, value in line("1000").items() if name not in ("peak_gb", "card")}
    assert conversion_table({"sft-in_place-0": on_cpu}).splitlines()[-2].endswith("| 1 |  | CPU |")


def test_rates_on_a_cpu_are_compared_rollout_by_rollout():
    rollouts = [{"rate": 1e-5, "rollout": number, "right": 0.5, "ratio_max": 1.1} for number in range(1, 101)]
    rollouts += [{"rate": 1e-4, "rollout": number, "right": 0.25, "ratio_max": number} for number in (1, 2)]
    *_, low, high = cpu_rates_table(rollouts).splitlines()
    assert [cell.strip() for cell in low.split("|")[1:-1]] == ["1e-05", "100", "50.0", "", "50.0", "1.10"]
    assert [cell.strip() for cell in high.split("|")[1:-1]][:3] == ["0.0001", "2", "25.0"]
    assert high.split("|")[4].strip().startswith("-25.0 [")
    assert high.split("|")[5].strip() == ""


def test_the_files_of_the_study_are_tasks_that_an_evaluation_takes():
    assert user_tasks(str(steps.TASK), str(run.SHUFFLED)).keys() == {"study_svamp", "shuffled_svamp"}


def test_stages_are_compared_with_sft_and_rl_has_the_rate_of_the_search():
    def line(right, **more):
        part = {"right": right, "texts": []}
        return {"validation": part, "test": part, **more}

    lines = {"base": line("0000", arm="shift"), "sft-shift-0": line("1000"), "rl-1": line("1110")}
    for rate, right in zip(steps.RATES, ("1000", "1111", "1100"), strict=True):
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
    assert rows["+ RL"] == ["0", "", "", "", "", ""]


def test_a_rate_that_diverged_does_not_hide_the_run_of_the_chosen_one():
    def line(right, **more):
        part = {"right": right, "texts": []}
        return {"validation": part, "test": part, **more}

    lines = {"sft-shift-0": line("1000"), "rate-3e-06": line("1000"), "rate-1e-05": line("1110", rate=1e-5)}
    assert "| + SFT + RL | 0 |" in stages_table(lines)  # the third rate may still be tried
    lines["rl-1"] = line("1100", rate=1e-5)
    assert "| + SFT + RL | 2 | 62.5 [" in stages_table(lines)
    # Tried again after the other seeds, it is too late to be chosen.
    lines["rate-3e-05"] = line("1111", rate=3e-5)
    assert steps.best_rate(lines) == 1e-5
    assert "| + SFT + RL | 2 | 62.5 [" in stages_table(lines)
    lines["rl-1"] |= {"arm": "full"}
    assert steps.best_rate(lines) == 3e-5


def test_contrasts_are_paired_by_seed_and_problem():
    def line(right, **more):
        return {"test": {"right": right}, "validation": {"right": right}, **more}

    lines = {"best": {"arm": "in_place"}, "sft-in_place-0": line("1100"), "sft-ar-0": line("1110")}
    lines |= {"sft-shift-0": line("1111"), "sft-best-1": line("1000"), "sft-ar-1": line("1000")}
    lines |= {"rl-1": line("1110", arm="in_place"), "rl-2": line("1111", arm="shift"), "more-1": line("0010")}
    rows = {}
    for row in contrasts_table(lines).splitlines():
        name, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        rows[name] = cells
    assert rows["1. best arm minus the twin, both after SFT"][0] == "2 of 2"
    assert rows["1. best arm minus the twin, both after SFT"][1].startswith("-12.5 [")  # of -25 and 0
    assert rows["2. SFT + RL minus SFT"][0] == "1 of 3"  # rl-2 is of another arm
    assert rows["2. SFT + RL minus SFT"][1].startswith("+25.0 [")
    assert rows["2. SFT + RL minus more SFT"][1].startswith("+50.0 [")
    del lines["rl-1"]
    assert "| 2. SFT + RL minus more SFT | 0 of 3 |" in contrasts_table(lines)  # more-1 belongs to rl-1


def test_prompt_masks_are_compared_with_a_fresh_one_in_twelve_updates():
    def line(right, **more):
        return {
            "test": {"right": right},
            "validation": {"right": right},
            "rewards": [1.0, 0.5],
            "ratio_max": [2.0],
            **more,
        }

    lines = {f"rate-{rate:g}": line("1000") for rate in steps.RATES}
    for seed, other in zip(steps.SEEDS, ("0000", "1000", "0100"), strict=True):
        lines |= {f"mu12-{seed}": line("1110"), f"mu12-one-mask-{seed}": line("0110", ratio_max=[9.0, 1.0])}
        lines |= {f"mu1-{seed}": line(other), f"mu4-compute-{seed}": line(other), f"mu1-compute-{seed}": line("1000")}
    lines |= {"rl-1": line("1110"), "rl-2": line("0110")}
    rows = {}
    for row in masks_table(lines).splitlines():
        name, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        rows[name] = cells
    assert rows["mu 12, fresh masks"][:1] + rows["mu 12, fresh masks"][2:] == ["3", "", "", "0.75", "2.00"]
    assert rows["mu 12, one mask"][2].startswith("+25.0 [")
    assert rows["mu 12, one mask"][5] == "9.00"
    assert rows["mu 4, fresh masks"][0] == "3"  # of the search, rl-1 and rl-2
    assert rows["mu 1, compute of mu 12"][2].startswith("+50.0 [")
    # Differences of 75, 50 and 50 points: t = 7 with two degrees of freedom, p 0.0198; two other p are smaller
    assert float(rows["mu 1"][3]) == pytest.approx(3 * 0.0198, rel=0.02)
    lines["rl-2"] |= {"arm": "full"}
    assert "| mu 4, fresh masks | 2 |" in masks_table(lines)  # the other arm does not count


def test_one_job_can_be_named_and_needs_those_before_it(tmp_path, monkeypatch):
    second = run.Job("second", lambda study: {"n": 2}, reads=("first",))
    one_after_another(monkeypatch, run.Job("first", lambda study: {}), second)
    flags = ["--model", "m", "--output_dir", str(tmp_path), "--data", str(tmp_path / "runs.jsonl"), "--job"]
    with pytest.raises(ValueError, match="--job second needs first"):
        run.main(run.make_parser().parse_args([*flags, "second"]))
    run.main(run.make_parser().parse_args([*flags, "first"]))
    assert [line["job"] for line in read_lines(tmp_path / "runs.jsonl")] == ["first"]
    run.main(run.make_parser().parse_args([*flags, "second"]))
    with pytest.raises(ValueError, match="--job second: it is done"):
        run.main(run.make_parser().parse_args([*flags, "second"]))
    assert [line["job"] for line in read_lines(tmp_path / "runs.jsonl")] == ["first", "second"]


def test_the_files_of_problems_are_named_if_they_are_missing(monkeypatch):
    monkeypatch.setenv("D1_FILES", str(Path("nowhere")))
    with pytest.raises(FileNotFoundError, match="D1_FILES"):
        study_svamp.read_csv("train")


DIGESTS = {  # of the files whose rows the committed results come from
    "sft.jsonl": "cd2dfb297cf6327c984ae8b4d13d3f8dbce8a30329906724242c41c89fc24d64",
    "rl.jsonl": "f22fcad388d574aedb24f8b2d020869350fe18fe9f2649cd52fe9ff160d159b1",
    "validation.jsonl": "5400b24599b865036b2b99f9349270a27db83f205f393000e14986902cf6ba61",
    "test.jsonl": "b1ca0a94629fadfdc36f56187fd64d1eb6ef2478aa68a13cb14d1022d9e102d2",
}


def test_the_rows_of_the_committed_results_stay_equal_to_the_byte(tmp_path):
    if not (Path(os.environ.get("D1_FILES", "/nowhere")) / "svamp" / "train.csv").is_file():
        pytest.skip("D1_FILES names no folder with svamp/train.csv")
    rows = read_lines(run.DATA)[0]
    counts = steps.write_rows(steps.Study("", tmp_path, tmp_path / "runs.jsonl"))

    def letters(name, key):
        texts = [key(row) for row in read_lines(tmp_path / f"{name}.jsonl")]
        return [re.sub("[^a-z]", "", text.lower()) for text in texts]

    def asked(row):
        return row["messages"][0]["content"].removeprefix("Question: ").partition("\nLet's think")[0]

    known = {*letters("sft", asked)}
    shared = {
        name: sum(text in known for text in letters(name, lambda row: row["question"]))
        for name in ("validation", "test")
    }
    assert shared == {"validation": 90, "test": 1}  # README.md
    assert counts == {name: rows[name] for name in DIGESTS}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()} == DIGESTS


def tiny_study(tmp_path) -> steps.Study:
    """A tiny model, converted with the shift, and two problems."""
    smollm_model.tiny(tmp_path / "ar")
    study = steps.Study("", tmp_path, tmp_path / "short.jsonl", tiny=True)
    problems = [study_svamp.own_problem(ROW), study_svamp.own_problem({**ROW, "Numbers": "3.0 8.0 5.0"})]
    study.path("validation.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    rows = "".join(json.dumps(study_svamp.as_messages(problem)) + "\n" for problem in problems)
    study.path("sft.jsonl").write_text(8 * rows)
    steps.convert(study, "shift")
    return study


def test_bits_per_byte_in_blocks_of_one_token_are_those_of_the_autoregressive_model(tmp_path):
    study = tiny_study(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(study.path("ar"))
    # The converted weights, read from left to right: their vocabulary has the mask token, too
    twin = AutoModelForCausalLM.from_pretrained(study.path("shift-base"), is_causal=True).eval()
    bits = [steps.bits_of_ar(twin, tokenizer, row) for row in steps.problem_rows(study, "validation")]
    expected = sum(bit for bit, _ in bits) / sum(size for _, size in bits)
    arm = steps.Arm(convert=None, streams=2, block=1)
    found = steps.bits_per_byte(study, study.path("shift-base"), arm)
    assert found == pytest.approx(expected, rel=1e-5)
    in_blocks = steps.bits_per_byte(study, study.path("shift-base"), steps.ARMS["shift"])
    assert abs(in_blocks - expected) > 1e-3


def test_an_arm_in_two_stages_trains_the_model_of_its_first_stage_and_a_stopped_one_continues(tmp_path):
    study = tiny_study(tmp_path)
    line = short_sft.train_short(study, "ar_first")
    first, second = line["settings"]
    assert first[first.index("--masked_weight") + 1] == "0"
    assert second[second.index("--model_name") + 1] == "OUTPUT_DIR/short-ar_first-0"
    assert len(line["validation"]["right"]) == 2
    again = short_sft.train_short(study, "ar_first")
    assert again == line


def test_short_runs_are_compared_by_problem():
    def line(name, right):
        return {"job": name, "validation": {"right": right}, "bits": 0.1, "seconds": 60.0}

    lines = {one["job"]: one for one in (line("shift", "1100"), line("in_place", "1000"), line("ar", "1111"))}
    by_arm = {}
    for row in short_sft_table(lines).splitlines():
        arm, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        by_arm[arm] = cells
    assert by_arm["shift"][0].startswith("50.0 [")
    assert by_arm["shift"][1:] == ["", "0.100", "1"]
    assert by_arm["in_place"][1].startswith("-25.0 [")
    assert by_arm["ar"][1].startswith("+50.0 [")
    assert by_arm["ar_first"] == ["", "", "", ""]


def test_second_halves_start_from_one_first_half_and_differ_as_they_say(tmp_path):
    study = tiny_study(tmp_path)
    (tmp_path / "ar" / "tokenizer_config.json").touch()
    reference = second_half.train_second_half(study, "ar_first")
    first, second = short_sft.train_short(study, "ar_first")["settings"]  # nothing is trained again
    assert reference["settings"] == second
    assert first[first.index("--job_name") + 1] == "short-ar_first-0"
    assert len(reference["bits"]) == len(reference["bytes"]) == len(reference["validation"]["right"]) == 2

    losses = {"ar_first": reference["losses"]}
    for name in second_half.HALVES[1:]:
        line = second_half.train_second_half(study, name)
        losses[name] = line["losses"]
        starts = "first-blocks_of_4" if name == "blocks_of_4" else "short-ar_first-0"
        assert line["settings"][line["settings"].index("--model_name") + 1] == f"OUTPUT_DIR/{starts}"
        config = json.loads(study.path(f"second-{name}/config.json").read_text())
        assert config["block_size"] == (4 if name == "blocks_of_4" else 8)
        assert config["attention_pattern"] == "causal-context"
    assert len({str(values) for values in losses.values()}) == len(second_half.HALVES)


def test_second_halves_are_compared_by_problem():
    def line(name, right, bits):
        validation = {"right": right}
        return {"job": name, "validation": validation, "bits": bits, "bytes": [10, 20, 10, 20], "seconds": 60.0}

    right = {"ar_first": "1100", "forward_kl": "1110", "blocks_of_4": "1100", "annealed": "0000", "aligned": "1111"}
    lines = {}
    for number, (name, verdicts) in enumerate(right.items()):
        lines[name] = line(name, verdicts, [3.0 + number, 6.0, 3.0, 6.0])
    rows = cells_of(second_half_table(lines))
    by_name = {name: cells for name, *cells in rows}
    assert by_name["ar_first"][1:3] == ["", ""]
    assert by_name["ar_first"][3] == f"{18 / 60:.4f}"
    assert by_name["forward_kl"][1].startswith("+25.0 [")
    assert by_name["forward_kl"][4].startswith(f"{1 / 60:+.4f} [")
    # Holm's correction over four, of the t test over problems
    gaps = [stats.ttest_1samp(gap, 0).pvalue for gap in ([0, 0, 1, 0], [-1, -1, 0, 0], [0, 0, 1, 1])]
    assert by_name["aligned"][2] == f"{min(1.0, 4 * gaps[2]):.2g}"
    assert by_name["blocks_of_4"][2] == "1"

    del lines["aligned"]
    rows = cells_of(second_half_table(lines))
    assert all(cells[2] == cells[5] == "" for _, *cells in rows)  # not all tests are there
    assert rows[-1] == ["aligned", *[""] * 7]


def test_shorter_blocks_are_compared_with_those_of_training(tmp_path, monkeypatch):
    study = tiny_study(tmp_path)
    monkeypatch.setattr(sampler_blocks, "MODELS", {"shift": "shift-base"})
    sampler_blocks.judge_with_blocks(study)
    lines = study.lines()
    assert [*lines] == ["shift-1", "shift-2", "shift-4"]
    sampler_blocks.judge_with_blocks(study)  # nothing is judged twice
    assert study.lines() == lines

    judged = {"shift-1": {"validation": {"right": "1100"}}, "shift-4": {"validation": {"right": "1000"}}}
    trained = {"shift": {"validation": {"right": "0100"}}}
    (row,) = sampler_blocks_table(judged, trained).splitlines()[2:]
    arm, one, one_gap, two, two_gap, four, four_gap, eight = (cell.strip() for cell in row.split("|")[1:-1])
    assert (arm, two, two_gap) == ("shift", "", "")
    assert one.startswith("50.0 [")
    assert one_gap.startswith("+25.0 [")
    assert four.startswith("25.0 [")
    assert four_gap.startswith("+0.0 [")
    assert eight.startswith("25.0 [")


def test_rl_and_more_sft_start_from_the_short_sft(tmp_path):
    study = tiny_study(tmp_path)
    (tmp_path / "ar" / "tokenizer_config.json").touch()
    study.path("rl.jsonl").write_text(4 * study.path("validation.jsonl").read_text())
    start = study.path("short-shift-0")
    rl = short_rl.train_and_judge(study, "rl")
    assert rl["settings"][rl["settings"].index("--model_path") + 1] == f"OUTPUT_DIR/{start.name}"
    assert rl["settings"][1] == "recipes/smollm2-135m-rl.yaml"  # no folder of this machine
    assert len(rl["right"]) == len(rl["ratio_max"]) == 2  # rollouts
    assert len(rl["validation"]["right"]) == 2
    assert json.loads(study.path("short-rl/trainer_state.json").read_text())["global_step"] == 4
    more = short_rl.train_and_judge(study, "more")
    assert more["settings"][more["settings"].index("--model_name") + 1] == f"OUTPUT_DIR/{start.name}"
    run = json.loads(study.path("short-more/trainer_state.json").read_text())
    assert run["global_step"] == run["max_steps"] == 8
    first, trained = (load_file(folder / "model.safetensors") for folder in (start, study.path("short-more")))
    assert any(not torch.equal(first[name], trained[name]) for name in first)


def test_in_blocks_of_one_token_rl_scores_what_was_sampled(tmp_path):
    """The estimator sees what the sampler saw if a block has one token and no prompt token is hidden."""
    study = tiny_study(tmp_path)
    (tmp_path / "ar" / "tokenizer_config.json").touch()
    study.path("rl.jsonl").write_text(4 * study.path("validation.jsonl").read_text())
    out = tmp_path / "run"
    short_rl.train_rl(study, short_rl.train_start(study), "shown_blocks_of_1", out)
    first = read_lines(out / "metrics.jsonl")[0]
    assert first["sampling/logp_difference_abs"] < 0.01  # bf16; in blocks of 8, it is .14


def test_rl_and_more_sft_are_compared_by_problem():
    def line(right, bits=0.3):
        return {"validation": {"right": right, "characters": 20.0}, "bits": bits, "seconds": 120.0}

    starts = {8: line("1000"), 1: line("1100")}
    lines = {"rl": line("1100", 0.2), "more": line("1111", 0.1)}
    sft, rl, more, *missing = cells_of(short_rl_table(lines, starts))
    assert sft[4:] == ["", "", "0.300", "20.0", "2"]
    assert rl[1:3] == ["3e-05", "8"]
    assert rl[4].startswith("+25.0 [")
    assert rl[5].startswith("-50.0 [")
    assert rl[6:] == ["0.200", "20.0", "2"]
    assert more[4].startswith("+75.0 [")
    assert more[5] == ""
    assert missing[:2] == [["+ blocks_of_1", "3e-05", "1", *[""] * 6], ["+ low_rate", "1e-05", "8", *[""] * 6]]

    lines |= {"blocks_of_1": line("0111"), "low_rate": line("1110")}
    assert cells_of(short_rl_table(lines, starts))[3][4].startswith("+25.0 [")  # minus the start in blocks of 1
    gaps = [[-1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0], [-1, -1, 1, 1]]
    reasons = cells_of(reasons_table(lines, starts))
    p_values = np.array([float(stats.ttest_1samp(gap, 0).pvalue) for gap in gaps])
    for row, gap, p in zip(reasons, gaps, p_values, strict=True):
        assert row[1].startswith(f"{25 * sum(gap):+.1f} [")
        # Holm: the largest of the products of the p values that are not larger
        assert row[2] == f"{min(1, max(q * sum(p_values >= q) for q in p_values if q <= p)):.2g}"
    del lines["low_rate"]
    assert [row[2] for row in cells_of(reasons_table(lines, starts))] == ["", ""]  # not all tests are there

    lines |= {"shown_blocks_of_1": line("1111"), "shown": line("1110")}
    first, *_, last = cells_of(prompt_masks_table(lines, starts))
    assert first[1].startswith("+50.0 [")  # minus the start in blocks of 1
    assert last[0] == "4. shown minus rl"
    assert last[1].startswith("+25.0 [")

    logged = {
        "right": [0.0, 0.5, 0.25, 0.75, 1.0],
        "ratio_max": [1.0, 3.0, 1.0, 2.0, 1.5],
        "entropy": [0.2, 0.4, 0.5, 0.1, 0.0],
    }
    assert cells_of(short_rl_rollouts_table({"rl": logged, "low_rate": logged})) == [
        [name, "25.0, 25.0, 75.0, 100.0", "3.00, 1.00, 2.00, 1.50", "0.30, 0.50, 0.10, 0.00"]
        for name in ("rl", "low_rate")
    ]


def test_seeds_of_the_short_study_continue_their_own_start(tmp_path):
    study = tiny_study(tmp_path)
    (tmp_path / "ar" / "tokenizer_config.json").touch()
    for name in ("rl.jsonl", "test.jsonl"):
        study.path(name).write_text(4 * study.path("validation.jsonl").read_text())
    shift = three_seeds.train_and_judge(study, "shift", 1)
    assert len(shift["test"]["right"]) == 8
    before = load_file(study.path("seed-1-shift/model.safetensors"))
    for arm, flag in {"low_rate": "--model_path", "more": "--model_name"}.items():
        line = three_seeds.train_and_judge(study, arm, 1)
        assert line["settings"][line["settings"].index(flag) + 1] == "OUTPUT_DIR/seed-1-shift"
        seeds = [value for name, value in pairwise(line["settings"]) if name == "--seed"]
        assert seeds[-1] == {"low_rate": "1", "more": "2"}[arm]
    after = load_file(study.path("seed-1-more/model.safetensors"))
    assert any(not torch.equal(before[name], after[name]) for name in before)

    # A model of seed 0 that the other scripts left is not trained again
    start = short_rl.train_start(study)
    kept = start.joinpath("model.safetensors").stat().st_mtime_ns
    again = three_seeds.train_and_judge(study, "shift", 0)
    assert start.joinpath("model.safetensors").stat().st_mtime_ns == kept
    assert again["losses"] == steps.losses_of(start)
    other = load_file(start / "model.safetensors")
    assert any(not torch.equal(before[name], other[name]) for name in before)  # of another seed


def test_three_seeds_are_compared_by_problem_and_seed():
    def line(arm, seed, right):
        part = {"right": right}
        return {"arm": arm, "seed": seed, "validation": part, "test": part, "bits": 0.25, "seconds": 60}

    lines = [line("shift", 2, "1000"), line("shift", 0, "1100"), line("ar", 1, "1111"), line("ar", 0, "1111")]
    lines += [line("ar", 2, "1110"), line("low_rate", 2, "0000")]
    by_job = {str(number): one for number, one in enumerate(lines)}
    shift, ar, rl, more = cells_of(three_seeds_table(by_job))
    assert shift[1] == "2"
    assert shift[2].startswith("37.5 [")
    assert ar[4:] == ["0.250", "1"]
    assert rl[2].startswith("0.0 [")
    assert more == ["more", "0", "", "", "", ""]
    first, second, third = cells_of(seed_contrasts_table(by_job))
    assert first[:2] == ["1. shift minus ar", "2 of 3"]
    mean = mean_of(np.array([[0, 0, -1, -1], [0, -1, -1, 0]], dtype=float))
    assert first[2] == first[3] == points(mean)
    assert second[1] == "1 of 3"  # seed 2 alone
    assert second[2].startswith("-25.0 [")
    assert third == ["3. low_rate minus more", "0 of 3", "", ""]


def test_samplers_are_compared_with_exact(tmp_path, monkeypatch):
    study = tiny_study(tmp_path)
    monkeypatch.setattr(samplers, "MODELS", {"shift": "shift-base"})
    samplers.judge_samplers(study)
    lines = study.lines()
    passes = {name: line["validation"]["passes"] for name, line in lines.items()}
    assert [*passes] == [f"shift, {name}" for name in samplers.SAMPLERS]
    assert passes["shift, exact"] == passes["shift, threshold 0.9"]  # a random model is sure of nothing
    assert passes["shift, two per pass"] == passes["shift, exact"] / 2
    samplers.judge_samplers(study)  # nothing is judged twice
    assert study.lines() == lines

    def line(right, passes):
        return {"validation": {"right": right, "passes": passes}}

    judged = {"shift, exact": line("1100", 20.0), "shift, threshold 0.7": line("0000", 8.0)}
    judged |= {"shift, threshold 0.9": line("1110", 10.0), "more, two per pass": line("1100", 9.0)}
    rows = cells_of(samplers_table(judged))
    by_name = {", ".join(cells[:2]): cells[2:] for cells in rows}
    assert by_name["shift, exact"][1:] == ["", "", "20.0"]
    assert by_name["shift, threshold 0.9"][1].startswith("+25.0 [")
    p_values = sorted(float(stats.ttest_1samp(gap, 0).pvalue) for gap in ([0, 0, 1, 0], [-1, -1, 0, 0]))
    # Holm's correction over two: the smaller one is doubled, and the other one is at least as large
    assert by_name["shift, threshold 0.7"][2] == f"{min(1, 2 * p_values[0]):.2g}"
    assert by_name["shift, threshold 0.9"][2] == f"{min(1, max(2 * p_values[0], p_values[1])):.2g}"
    assert by_name["more, two per pass"][1:] == ["", "", "9.0"]  # nothing to compare it with
    assert by_name["shift, two per pass"] == ["", "", "", ""]
