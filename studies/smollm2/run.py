"""A real language model, from conversion to RL: PROTOCOL.md says what is run. A line per job in data/runs.jsonl.

    python -m studies.smollm2.run --model SmolLM2-135M-Instruct.Q4_1.gguf --minutes 10 --workers 3    # on a GPU
    python -m smollm.model tiny runs/tiny
    python -m studies.smollm2.run --model runs/tiny --tiny --workers 1                                # all jobs, tiny

$D1_FILES names the folder with svamp/. Jobs are taken in the order of `jobs`; none starts that is not expected to end
in the time that is left. If the command is killed, run it again: finished jobs are skipped. On another machine, jobs
are done again if later ones read their files; of two lines of a job, the last one counts.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from d1.ranges import COUNT, POSITIVE
from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import append_line
from studies.smollm2.steps import (
    DIFFUSION,
    RATES,
    SEEDS,
    Study,
    best_arm,
    choose_arm,
    convert,
    convert_source,
    judge_ar_start,
    judge_start,
    second_seed,
    train_ar,
    train_ar_grpo,
    train_more,
    train_own,
    train_rl,
    train_sft,
    write_rows,
)

DATA = Path(__file__).parent / "data" / "runs.jsonl"
SHUFFLED = Path(__file__).with_name("shuffled_svamp.py")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A piece of work with one line of results.

    Attributes:
        name: the line's name.
        do: computes the line.
        reads: jobs whose files it reads; if one fails, this one is left out.
        after: jobs that must be done first, or have failed.
        minutes: expected time on an H200 that other jobs use, too; with less time left, the job does not start.
    """

    name: str
    do: Callable[[Study], dict[str, Any]]
    reads: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    minutes: float = 1.0


def jobs(arm: str) -> list[Job]:
    """All jobs, most important first; `arm` is the best one, or the best so far."""
    pilots = tuple(f"sft-{name}-0" for name in DIFFUSION)
    rates = tuple(f"rate-{rate:g}" for rate in RATES)
    after_sft = ("rows", f"convert-{arm}", f"sft-{arm}-0")
    every = [Job("rows", write_rows, minutes=0.5), Job("source", convert_source, minutes=0.6)]
    every += [Job(f"convert-{name}", partial(convert, name=name), ("source",), minutes=0.4) for name in DIFFUSION]
    for name in DIFFUSION:
        every.append(
            Job(f"sft-{name}-0", partial(train_sft, name=name, seed=0), ("rows", f"convert-{name}"), minutes=5.5)
        )
    every.append(Job("sft-ar-0", partial(train_ar, seed=0), ("rows", "source"), minutes=3.3))
    every.append(Job("best", choose_arm, (), pilots, 0.1))
    for rate in RATES:
        name = f"rate-{rate:g}"
        every.append(Job(name, partial(train_rl, name=name, seed=0, rate=rate), after_sft, ("best",), 6.5))
    every.append(Job("sft-best-1", second_seed, ("rows", f"convert-{arm}"), ("best",), 5.5))
    every.append(Job("sft-ar-1", partial(train_ar, seed=1), ("rows", "source"), minutes=3.3))
    for seed in SEEDS[1:]:
        name = f"rl-{seed}"
        every.append(Job(name, partial(train_rl, name=name, seed=seed), after_sft, rates, 6.5))
    every.append(Job("more-0", partial(train_more, seed=0), after_sft, rates, 6.5))
    every.append(Job("base", judge_start, ("rows", f"convert-{arm}"), ("best",), 0.5))
    every.append(Job("ar-base", judge_ar_start, ("rows", "source"), minutes=0.5))
    shuffled = partial(train_rl, name="shuffled", seed=0, task=SHUFFLED)
    every.append(Job("shuffled", shuffled, after_sft, rates, 6.5))
    for seed in SEEDS[1:]:
        every.append(Job(f"more-{seed}", partial(train_more, seed=seed), after_sft, (*rates, f"rl-{seed}"), 6.5))
    without_sft = partial(train_rl, name="rl-base", seed=0, with_sft=False)
    every.append(Job("rl-base", without_sft, after_sft[:2], rates, 6.5))
    for seed in SEEDS:
        seconds_of = (f"rl-{seed}",) if seed else ()
        every.append(Job(f"own-{seed}", partial(train_own, seed=seed), after_sft, (*rates, *seconds_of), 7.0))
    for seed in SEEDS:
        every.append(Job(f"ar-rl-{seed}", partial(train_ar_grpo, seed=seed), ("rows", "sft-ar-0"), rates, 6.5))
    # Section 3 of the protocol. mu 4 at equal rollouts is RL of section 2.
    for seed in SEEDS:
        mu12, one_mask, mu1 = f"mu12-{seed}", f"mu12-one-mask-{seed}", f"mu1-{seed}"
        every.append(Job(mu12, partial(train_rl, name=mu12, seed=seed, mu=12), after_sft, rates, 8.0))
        with_one_mask = partial(train_rl, name=one_mask, seed=seed, mu=12, fresh_masks=False)
        every.append(Job(one_mask, with_one_mask, after_sft, rates, 8.0))
        every.append(Job(mu1, partial(train_rl, name=mu1, seed=seed, mu=1), after_sft, rates, 6.5))
        for mu, minutes in ((4, 13.5), (1, 21.0)):
            name = f"mu{mu}-compute-{seed}"
            at_equal_compute = partial(train_rl, name=name, seed=seed, mu=mu, compute_of=mu12)
            every.append(Job(name, at_equal_compute, after_sft, (*rates, mu12), minutes))
    return every


def jobs_to_do(study: Study) -> list[Job]:
    """Jobs without a line, or with a line of another arm than the best; before them, those whose files they read and
    another machine made. Jobs that failed are left out, and so are those that would read their files."""
    lines = study.lines()
    arm = best_arm(lines)
    every = jobs(arm)
    reads = {job.name: job.reads for job in every}

    missing = set()
    for job in every:
        of_arm = lines.get(job.name, {}).get("arm", arm)
        if job.name not in lines or of_arm not in (arm, "ar"):
            missing.add(job.name)
    made = study.made()
    for job in reversed(every):  # those that a job reads come before it
        if job.name in missing:
            missing.update(name for name in reads[job.name] if name not in made)

    lost = study.failed()
    for job in every:
        if lost.intersection(reads[job.name]):
            lost.add(job.name)
    return [job for job in every if job.name in missing and job.name not in lost]


def names_in_work(study: Study) -> set[str]:
    """The names of the jobs that some worker does now: it holds their locks."""
    found = set()
    folder = study.path("locks")
    for file in folder.iterdir() if folder.is_dir() else ():
        with file.open() as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(file.name)
    return found


def jobs_in_time(missing: Sequence[Job], in_work: set[str], until: float | None) -> list[Job]:
    """Those of the `missing` jobs that can start before `until` and are expected to end by then. A job that needs one
    which cannot start any more, and which nobody does now (`in_work`), cannot start either."""
    not_done = {job.name for job in missing}
    reachable = set(in_work)
    found = []
    for job in missing:  # those that it needs come before it
        in_time = until is None or time.time() + 60 * job.minutes < until
        if in_time and not_done.intersection((*job.reads, *job.after)) <= reachable:
            found.append(job)
            reachable.add(job.name)
    return found


def work(study: Study, until: float | None, only: str | None = None) -> None:
    """Does jobs that nobody else does, until none is left or startable in the time that is left; `only` names one."""
    while True:
        in_work = names_in_work(study)  # read first: a job that ends after it is among those that are done
        missing = jobs_to_do(study)
        not_done = {job.name for job in missing}
        candidates = jobs_in_time(missing, in_work, until)
        if only is not None:
            candidates = [job for job in candidates if job.name == only]
        if not candidates:
            return
        for job in candidates:
            if not_done.isdisjoint((*job.reads, *job.after)) and try_job(study, job):
                break
        else:
            time.sleep(0.5)


def try_job(study: Study, job: Job) -> bool:
    """Does a job and appends its line; False if another worker has it, or it is done or has failed."""
    for folder in ("locks", "made", "failed"):
        study.path(folder).mkdir(exist_ok=True)
    with study.path(f"locks/{job.name}").open("a+") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if job.name not in {job.name for job in jobs_to_do(study)}:
            return False
        logger.info("%s: %s starts", time.strftime("%H:%M:%S"), job.name)
        began = time.monotonic()
        try:
            line = job.do(study)
        except (Exception, SystemExit):  # a command that refuses its flags exits
            study.path(f"failed/{job.name}").write_text(traceback.format_exc())
            logger.exception("%s failed", job.name)
            free_memory()
            return True
        line = {"job": job.name, **line, "wall": round(time.monotonic() - began, 1), **machine(), **run_record()}
        append_line(study.data, line)
        study.path(f"made/{job.name}").touch()
        logger.info("%s: %s took %.0f s", time.strftime("%H:%M:%S"), job.name, line["wall"])
        free_memory()
        return True


def machine() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    peak = torch.cuda.max_memory_allocated()
    return {"card": torch.cuda.get_device_name(), "peak_gb": round(peak / 1e9, 2)}


def free_memory() -> None:
    """What a job leaves; the next one has a peak of its own. After an error that breaks the device for this process, it
    raises and so ends the worker."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the .gguf file, or a folder of a Llama")
    parser.add_argument("--output_dir", default="runs/smollm2", help="of the models (default: %(default)s)")
    data = "the file of lines (default: the study's data/runs.jsonl; with --tiny, OUTPUT_DIR/tiny.jsonl)"
    parser.add_argument("--data", type=Path, help=data)
    parser.add_argument("--minutes", type=POSITIVE, help="start no job that is not expected to end in this time")
    parser.add_argument("--workers", type=COUNT, default=1, help="jobs at the same time")
    parser.add_argument(
        "--job", choices=[job.name for job in jobs(DIFFUSION[0])], help="do this one alone, after those it needs"
    )
    parser.add_argument("--tiny", action="store_true", help="every job with a few rows and steps, in OUTPUT_DIR")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = args.data
    if data is None:
        data = folder / "tiny.jsonl" if args.tiny else DATA
    study = Study(args.model, folder, data, args.tiny)
    if args.job is not None:
        not_done = {job.name for job in jobs_to_do(study)}
        if args.job not in not_done:
            failure = study.path(f"failed/{args.job}")
            if failure.exists():
                raise ValueError(f"--job {args.job}: it failed; to try it again, remove {failure}")
            raise ValueError(f"--job {args.job}: it is done, or reads files of a job that failed")
        (job,) = (job for job in jobs(best_arm(study.lines())) if job.name == args.job)
        absent = [name for name in (*job.reads, *job.after) if name in not_done]
        if absent:
            raise ValueError(
                f"--job {job.name} needs {', '.join(absent)}, with the line in {data}: do these jobs first"
            )
    until = None if args.minutes is None else time.time() + 60 * args.minutes
    if args.workers == 1 or args.job is not None:
        work(study, until, args.job)
    else:
        work_together(study, until, args.workers)
    left = [job.name for job in jobs_to_do(study)]
    logger.info("jobs that are left: %s", ", ".join(left) or "none")
    check_failures(study)


def check_failures(study: Study) -> None:
    """Raise ValueError if jobs have failed, now or in an earlier command, with the last line of each one's error."""
    failed = []
    for name in sorted(study.failed()):
        *_, error = study.path(f"failed/{name}").read_text().splitlines()
        failed.append(f"{name} ({error})")
    if failed:
        folder = study.path("failed")
        raise ValueError(f"jobs have failed: {'; '.join(failed)}. To try one again, remove its file in {folder}")


def work_together(study: Study, until: float | None, count: int) -> None:
    """`work` in `count` processes; those that have not ended by `until` are stopped."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work_alone, args=(study, until, number)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(None if until is None else max(0.0, until - time.time()))
    for worker in workers:  # what has not ended in time is stopped: its job has no line
        worker.kill()


def work_alone(study: Study, until: float | None, number: int) -> None:
    """`work` in a process of its own, with a log."""
    with study.path(f"worker{number}.log").open("a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        work(study, until)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.smollm2.run", lambda: main(make_parser().parse_args()))
