"""The main job in miniature, through its real commands: interrupted, continued, reported."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from d1.eval import run as evaluation_script
from d1.rl import train as diffu_grpo_train
from d1.sft import train as sft_train
from d1.tasks import load_task
from pocket import phases
from pocket import report as pocket_report
from pocket.demo import arms_of, phases_of
from pocket.demo import main as demo
from pocket.demo import make_parser as demo_parser
from pocket.phases import ENVIRONMENT, Phase, PhaseError, run_phases
from pocket.recipes import RECIPES
from pocket.report import ARMS, FOUR_ARMS, job_of, shown_problem
from tests import forks

ROOT = Path(__file__).parents[2]
LENGTHS = RECIPES["sudoku"].lengths


class Forked:
    """A phase as a fork in place of a new Python, with what `run_phases` uses of a process."""

    def __init__(self, phase, log):
        _, path, *words = phase.command
        (self.process,) = forks.start(forks.script, path, *words, log=log, folder=phase.folder, **ENVIRONMENT)
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, patience=None):
        self.process.join(patience)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a phase", patience)


class Simulated:
    """A phase that takes `seconds` alone on a core. All running ones share the cores, in a time that sleep moves."""

    now, cores = 0.0, 2
    running: ClassVar = []
    seconds: ClassVar = {"sft": 9, "grpo": 153, "sft_grpo": 155, "shuffled": 196}  # of the phases, on two cores

    def __init__(self, phase, log):
        self.left = self.seconds.get(phase.name, 13)  # an evaluation
        log.write_text("")
        Simulated.running.append(self)

    @classmethod
    def sleep(cls, seconds):
        cls.now += seconds
        share = min(1, cls.cores / len(cls.running))
        for one in cls.running:
            one.left -= seconds * share
        cls.running = [one for one in cls.running if one.left > 0]

    def poll(self):
        return 0 if self.left <= 0 else None

    returncode = 0


@pytest.mark.parametrize(("jobs", "longest"), [(3, 300), (2, 335)])
def test_two_cores_are_busy_to_the_end(tmp_path, monkeypatch, jobs, longest):
    """Sudoku's phases take 578 seconds of a core. In the order SFT, RL, RL after SFT, control, two at a time, they took
    362, because the control then ran alone."""
    monkeypatch.setattr(phases, "_start", Simulated)
    monkeypatch.setattr(phases, "_contents", lambda phase, folder: ())
    monkeypatch.setattr(Simulated, "now", 0.0)
    clock = SimpleNamespace(sleep=Simulated.sleep, monotonic=lambda: Simulated.now)
    monkeypatch.setattr(phases, "time", clock)
    todo = phases_of(tmp_path, 0, miniature=False)
    seconds = run_phases(todo, tmp_path, jobs, Console(quiet=True))
    assert len(seconds) == 9
    assert 578 / 2 < Simulated.now < longest


def test_three_commands_at_a_time_where_there_are_two_cores(monkeypatch):
    for cores, jobs in ((1, 1), (2, 3), (16, 3)):
        monkeypatch.setattr("pocket.demo.os.cpu_count", lambda cores=cores: cores)
        assert demo_parser().parse_args([]).jobs == jobs


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """Result folder of a miniature job that was stopped by Ctrl-C after its first phase and then continued."""
    folder, said = tmp_path_factory.mktemp("demo"), io.StringIO()
    args = demo_parser().parse_args(["--miniature", "--seed", "3", "--output_dir", str(folder)])
    state = folder / "seed3" / "phases.json"

    asked = []

    class Stopped(Forked):
        """Ctrl-C while `run_phases` asks about this phase, once, after another is done."""

        def poll(self):
            if not asked and state.exists() and json.loads(state.read_text())["done"]:
                asked.append(self)
                signal.raise_signal(signal.SIGINT)
            return super().poll()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "_start", Stopped)
        with pytest.raises(KeyboardInterrupt):
            demo(args)
        done = json.loads(state.read_text())["done"]
        assert 1 <= len(done) < 9
        patch.setattr(phases, "_start", Forked)
        with contextlib.redirect_stdout(said):
            demo(args)
    signal.signal(signal.SIGINT, before)
    for name in json.loads(state.read_text())["done"]:
        assert (f"\n  {name} " in said.getvalue()) == (name not in done), "a phase was done and ran again"
    return folder / "seed3"


def test_every_arm_is_evaluated_at_both_lengths_and_in_the_report(miniature):
    table = json.loads((miniature / "table.json").read_text())
    assert set(table) == {f"sudoku_{name}_{length}_{length // 2}" for name in ARMS for length in LENGTHS}
    assert job_of(miniature).arms == [*ARMS]
    assert all(row["n"] == row["expected"] == 16 for row in table.values())
    report = (miniature / "report.md").read_text()
    for title in ARMS.values():
        assert f"| {title} |" in report
    for name in ("sft", "grpo", "sft_grpo", "shuffled", "sft_grpo_evaluated"):
        assert f"| {name} |" in report
    assert (miniature / "curves.png").read_bytes().startswith(b"\x89PNG")


def scenes_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)[1])


def test_the_report_links_pages_that_play(miniature):
    report, job = (miniature / "report.md").read_text(), job_of(miniature)
    for arm in ("grpo", "sft_grpo", "shuffled"):
        assert f"]({arm}/report.html)" in report
        found = scenes_of(miniature / arm / "report.html")
        assert [[film["title"] for film in scene["films"]] for scene in found] == [["before", "after"]] * 8
    number, rule = shown_problem(job)
    assert f"{rule}:\n" in report
    assert {"](watch.html)", "](watch.svg)"} <= {*re.findall(r"\]\(watch.\w+\)", report)}
    assert (miniature / "watch.svg").read_text().count('class="mask"') == 64
    assert f"sudoku, test problem {number}</h1>" in (miniature / "watch.html").read_text(encoding="utf-8")
    (scene,) = scenes_of(miniature / "watch.html")
    question = load_task("sudoku").load_rows("test", None)[number]["question"]
    scored = [{one["question"]: one for one in job.scored[arm, LENGTHS[0]][1]} for arm in ("base", "sft_grpo")]
    both = [of[question]["accuracy"] == 1 for of in scored]
    assert both[0] != both[1]
    assert [film["solved"] for film in scene["films"]] == both  # as in the evaluation


def test_the_tables_over_seeds_have_each_arm_and_pair(miniature, capsys):
    pocket_report.main(pocket_report.make_parser().parse_args([str(miniature)]))
    means, seeds, paired = capsys.readouterr().out.split("\n\n")
    table = json.loads((miniature / "table.json").read_text())
    for length in LENGTHS:
        cells = " | ".join(
            f"{table[f'sudoku_{arm}_{length}_{length // 2}']['accuracy']:.1f} ± 0.0" for arm in FOUR_ARMS
        )
        assert f"| sudoku, length {length} | {cells} | 1 |" in means
    rows = [row.strip("| ").split(" | ") for row in seeds.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[title, str(length)] for title in ARMS.values() for length in LENGTHS]
    assert all("| seed3 |" in table for table in (seeds, paired))
    assert "| sft_grpo - sft | 32 |" in paired
    gains = re.findall(r"\| \w+ - \w+ \| \d+ \| ([+-][\d.]+) \| ([+-][\d.]+) \[", paired)
    assert len(gains) == 10
    assert all(of_parser == mean for of_parser, mean in gains)  # one by the parser's marks, one by the task's score


def test_the_block_model_goes_through_the_same_phases_for_sudoku_alone(tmp_path):
    full, block = (phases_of(tmp_path, 0, miniature=False, model=model) for model in ("full", "block"))
    assert [phase.name for phase in block] == [phase.name for phase in full]
    for phase, other in zip(full, block, strict=True):
        assert [str(word).replace("pocket/base", "pocket/block_base") for word in phase.command] == other.command
    with pytest.raises(ValueError, match="only for Sudoku"):
        demo(demo_parser().parse_args(["--model", "block", "--task", "countdown"]))


@pytest.mark.parametrize("base", ["base", "block_base"])
def test_a_job_is_known_by_its_generations(base, tmp_path):
    (tmp_path / "generations").mkdir()
    for path in (ROOT / "eval" / "eval_baselines").glob("*.json"):
        name = path.name.replace("sudoku_base_", f"sudoku_{base}_")
        (tmp_path / "generations" / name).write_bytes(path.read_bytes())
    job = job_of(tmp_path)
    assert (job.task, job.base, job.arms) == ("sudoku", base, [*FOUR_ARMS])
    assert f"{job.row('sft_grpo', 32).accuracy:.1f}" == "76.2"  # docs/results.md
    solved = [[one["accuracy"] for one in job.scored[arm, 32][1]] for arm in ("base", "sft_grpo")]
    assert [one[:2] for one in solved] == [[0.0, 0.0], [0.0, 1.0]]  # neither solves the first, one the second
    assert shown_problem(job)[0] == 1
    (tmp_path / "generations" / f"sudoku_{base}_32_16_0_generations.json").write_text("{")
    with pytest.raises(ValueError, match=f"sudoku_{base}_32_16 is not complete: .*cut off"):
        job_of(tmp_path)


@pytest.mark.parametrize("task", RECIPES)
def test_each_arm_of_a_task_is_trained_and_judged_on_that_task(task, tmp_path, monkeypatch):
    recipe = RECIPES[task]
    phases = {phase.name: phase for phase in phases_of(tmp_path, 3, False, task)}
    monkeypatch.chdir(ROOT / "diffu-grpo")
    for arm, start in (("grpo", ROOT / "pocket" / recipe.base), ("sft_grpo", tmp_path / "sft")):
        config, _ = diffu_grpo_train.make_parser().parse_args_and_config(phases[arm].command[2:])
        assert (config.dataset, config.model_path, config.seed) == (recipe.task, str(start), 3)
        assert config.max_prompt_length == recipe.prompt_tokens
        assert config.max_completion_length == 2 * config.diffusion_steps == recipe.lengths[0]
    given = sft_train.make_parser().parse_args(phases["sft"].command[2:])
    assert (given.train_data, given.seed) == (str(ROOT / "dataset" / recipe.sft_file), 3)
    assert given.eos_padding == recipe.lengths[1]
    monkeypatch.chdir(ROOT / "eval")
    for arm in arms_of(task):
        asked = evaluation_script.make_parser().parse_args(phases[f"{arm}_evaluated"].command[2:])
        assert (asked.dataset, asked.split, tuple(asked.gen_length)) == (recipe.task, "test", recipe.lengths)
        model = ROOT / "pocket" / recipe.base if arm == "base" else tmp_path / arm
        assert Path(asked.model_path).resolve() == model


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in RECIPES if task != "sudoku"])
def test_another_task_in_miniature_gives_its_report_and_the_table_over_tasks(task, tmp_path, monkeypatch, capsys):
    flags = ["--task", task, "--miniature", "--seed", "1", "--output_dir", str(tmp_path)]
    demo(demo_parser().parse_args(flags))
    report = (tmp_path / "seed1" / "report.md").read_text()
    assert all(f"]({arm}/report.html)" in report for arm in ("grpo", "sft_grpo"))
    assert len(json.loads((tmp_path / "seed1" / "table.json").read_text())) == len(arms_of(task)) * 2
    monkeypatch.setattr(pocket_report, "demo_folder", lambda name: tmp_path / ("" if name == task else name))
    pocket_report.main(pocket_report.make_parser().parse_args([]))
    assert f"| {task}, length {RECIPES[task].lengths[0]} | " in capsys.readouterr().out


def test_phases_run_in_order_once_and_a_failure_shows_its_log(tmp_path):
    def phase(name, code, *flags, needs=()):
        (tmp_path / f"{name}.py").write_text(code)
        return Phase(name, [sys.executable, str(tmp_path / f"{name}.py"), *flags], tmp_path, weight=1, needs=needs)

    def run(phases, state):
        run_phases(phases, tmp_path / state, 2, Console(quiet=True))

    log = tmp_path / "order"
    write = f"open({str(log)!r}, 'a').write"
    good = [phase("b", f"{write}('b')", needs=("a",)), phase("a", f"{write}('a')")]
    run(good, "state")
    run(good, "state")
    assert log.read_text() == "ab"
    with pytest.raises(PhaseError, match="was made with another command of the stage a: to continue it"):
        run([phase("a", "", "--other")], "state")
    model = shutil.copytree(ROOT / "pocket/base", tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("1")
    named = [phase("n", "", "--model_path", str(model), "--train_data", "rows.jsonl", "x" * 5000), phase("m", "")]
    run(named, "named")
    for file, name in (model / "config.json", "base"), (tmp_path / "rows.jsonl", "rows.jsonl"):
        before = file.read_text()
        file.write_text(before + " ")
        with pytest.raises(PhaseError, match=f"was made with other contents of .*{name}: to continue it"):
            run(named, "named")
        file.write_text(before)
    run(named, "named")
    with pytest.raises(PhaseError, match=r"(?s)bad failed.*no such luck"):
        run([phase("bad", "raise SystemExit('no such luck')")], "other")


def test_sigterm_ends_the_phases_at_work(tmp_path):
    """They have sessions of their own, which a signal to the program does not reach."""
    child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    program = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from pocket.phases import Phase, run_phases\n"
        f"phase = Phase('long', [sys.executable, '-c', {child!r}], Path({str(tmp_path)!r}), weight=1)\n"
        f"run_phases([phase], Path({str(tmp_path / 'state')!r}), 1, Console(quiet=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
