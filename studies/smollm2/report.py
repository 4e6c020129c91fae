"""The tables of README.md, from data/runs.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from d1.runs.tables import markdown_table
from pocket.uncertainty import Mean, mean_of, p_values
from studies.json_lines import lines_by_job, read_lines
from studies.reports import holm, paired_difference, percent, points, share_of_one_run
from studies.smollm2 import three_seeds
from studies.smollm2.run import DATA, jobs
from studies.smollm2.sampler_blocks import BLOCKS, MODELS
from studies.smollm2.sampler_blocks import DATA as BLOCKS_DATA
from studies.smollm2.samplers import DATA as SAMPLERS_DATA
from studies.smollm2.samplers import MODELS as SAMPLED_MODELS
from studies.smollm2.samplers import SAMPLERS
from studies.smollm2.second_half import DATA as HALF_DATA
from studies.smollm2.second_half import FIRST, HALVES
from studies.smollm2.short_rl import DATA as SHORT_RL_DATA
from studies.smollm2.short_rl import RL_ARMS, SHORT_RL_ARMS, START, block_of
from studies.smollm2.short_sft import DATA as SHORT_DATA
from studies.smollm2.short_sft import SHORT_ARMS
from studies.smollm2.steps import ARMS, BLOCK, RATES, SEEDS, Lines, best_arm, best_rate, rate_of_later_runs

TWIN = "ar"


def outcomes(line: Mapping[str, Any], split: str) -> np.ndarray:
    """(1, problems): 1 where the run's model solves a problem of the split."""
    return np.array([[float(one) for one in line[split]["right"]]])


def right_of(runs: Sequence[Mapping[str, Any]], split: str) -> np.ndarray:
    """(runs, problems): 1 where a run's model solves a problem of the split."""
    return np.concatenate([outcomes(line, split) for line in runs])


def share(runs: Sequence[Mapping[str, Any]], split: str) -> str:
    """The share of a split's problems that runs solve: Wilson's interval of one run, t over the seeds of several."""
    right = right_of(runs, split)
    if len(runs) > 1:
        return percent(mean_of(right))
    return percent(share_of_one_run(right))


def conversion_table(lines: Lines) -> str:
    """What each conversion solves after SFT with seed 0, compared with the twin on the same problems."""
    twin = lines.get(f"sft-{TWIN}-0")
    rows = []
    for arm in ARMS:
        line = lines.get(f"sft-{arm}-0")
        if line is None:
            rows.append([arm, *[""] * 7, "not run"])
            continue
        cells = [arm]
        for split in ("validation", "test"):
            gap = ""
            if twin is not None and arm != TWIN:
                gap = points(paired_difference(outcomes(line, split) - outcomes(twin, split)))
            cells += [share([line], split), gap]
        cells += [f"{line['bits']:.3f}", f"{line['seconds']:.0f}", *machine_cells(line)]
        rows.append(cells)
    head = ["arm", "validation, % [95%]", "minus ar [95%]", "test, % [95%]", "minus ar [95%]", "bits per byte"]
    return markdown_table([*head, "seconds of SFT", "peak, GB", "card"], rows)


def machine_cells(line: Mapping[str, Any]) -> list[str]:
    """The peak and the card of a job; a job on a CPU has neither."""
    if "card" not in line:
        return ["", "CPU"]
    return [f"{line['peak_gb']:.1f}", line["card"]]


def lines_of_arm(lines: Lines) -> Lines:
    """The lines without those of another conversion than the best one."""
    arm = best_arm(lines)
    return {name: line for name, line in lines.items() if line.get("arm", arm) in (arm, TWIN)}


def names_of_rl(lines: Lines) -> list[str]:
    """The jobs of RL after SFT, by seed. Seed 0 is the run of the search with the rate that was chosen.

    A rate whose run failed (it diverged, say) has no line. The search is also done if a later run took the best of the
    others.
    """
    searched = all(f"rate-{rate:g}" in lines for rate in RATES) or rate_of_later_runs(lines) is not None
    first = f"rate-{best_rate(lines):g}" if searched else "the search is not done"
    return [first, *(f"rl-{seed}" for seed in SEEDS[1:])]


def runs_of_stages(lines: Lines) -> dict[str, list[Mapping[str, Any]]]:
    """Stage -> its runs that are done, by seed."""
    arm = best_arm(lines)
    lines = lines_of_arm(lines)

    def done(*names: str) -> list[Mapping[str, Any]]:
        return [lines[name] for name in names if name in lines]

    return {
        "as released, autoregressive": done("ar-base"),
        f"converted (`{arm}`)": done("base"),
        "+ SFT": done(f"sft-{arm}-0"),
        "+ SFT + RL": done(*names_of_rl(lines)),
        "+ SFT + more SFT": done(*(f"more-{seed}" for seed in SEEDS)),
        "+ SFT + rejection sampling": done(*(f"own-{seed}" for seed in SEEDS)),
        "+ SFT + RL, shuffled rewards": done("shuffled"),
        "+ RL": done("rl-base"),
        "autoregressive + SFT": done(f"sft-{TWIN}-0"),
        "autoregressive + SFT + GRPO": done(*(f"ar-rl-{seed}" for seed in SEEDS)),
    }


def stages_table(lines: Lines) -> str:
    """What each stage solves, compared with the SFT that it starts from or that starts from it."""
    stages = runs_of_stages(lines)
    rows = []
    for stage, runs in stages.items():
        if not runs:
            rows.append([stage, "0", *[""] * 5])
            continue
        sft = "autoregressive + SFT" if stage.startswith("autoregressive") else "+ SFT"
        cells = [stage, str(len(runs))]
        for split in ("validation", "test"):
            gap = ""
            if stage != sft and stages[sft]:
                gap = points(paired_difference(right_of(runs, split) - right_of(stages[sft], split)))
            cells += [share(runs, split), gap]
        seconds = [line["seconds"] for line in runs if "seconds" in line]
        cells.append(f"{sum(seconds) / len(seconds):.0f}" if seconds else "")
        rows.append(cells)
    head = ["stage", "runs", "validation, % [95%]", "minus SFT [95%]", "test, % [95%]", "minus SFT [95%]", "seconds"]
    return markdown_table(head, rows)


def contrasts_table(lines: Lines) -> str:
    """The protocol's three contrasts on test problems, paired by problem, over the seeds with both runs."""
    arm = best_arm(lines)
    lines = lines_of_arm(lines)
    sft, twins, rl = f"sft-{arm}-0", [f"sft-{TWIN}-{seed}" for seed in SEEDS[:2]], names_of_rl(lines)
    contrasts = {
        "1. best arm minus the twin, both after SFT": [*zip((sft, "sft-best-1"), twins, strict=True)],
        "2. SFT + RL minus SFT": [(name, sft) for name in rl],
        "2. SFT + RL minus more SFT": [*zip(rl, (f"more-{seed}" for seed in SEEDS), strict=True)],
    }
    rows = []
    for name, pairs in contrasts.items():
        done = [(lines[a], lines[b]) for a, b in pairs if {a, b} <= {*lines}]
        difference = ""
        if done:
            a, b = (right_of(runs, "test") for runs in zip(*done, strict=True))
            difference = points(paired_difference(a - b))
        rows.append([name, f"{len(done)} of {len(pairs)}", difference])
    return markdown_table(["contrast", "seeds", "difference on test problems, points [95%]"], rows)


def masks_table(lines: Lines) -> str:
    """Section 3: updates per rollout, with a fresh prompt mask each or one for all."""
    lines = lines_of_arm(lines)
    arms = {
        "mu 12, fresh masks": [f"mu12-{seed}" for seed in SEEDS],
        "mu 12, one mask": [f"mu12-one-mask-{seed}" for seed in SEEDS],
        "mu 4, fresh masks": names_of_rl(lines),
        "mu 1": [f"mu1-{seed}" for seed in SEEDS],
        "mu 4, fresh masks, compute of mu 12": [f"mu4-compute-{seed}" for seed in SEEDS],
        "mu 1, compute of mu 12": [f"mu1-compute-{seed}" for seed in SEEDS],
    }
    reference = arms["mu 12, fresh masks"]
    gaps: dict[str, np.ndarray] = {}
    for arm, names in arms.items():
        pairs = [(other, name) for other, name in zip(reference, names, strict=True) if {other, name} <= {*lines}]
        if pairs and names != reference:
            of_reference, of_arm = ([lines[name] for name in of] for of in zip(*pairs, strict=True))
            gaps[arm] = right_of(of_reference, "test") - right_of(of_arm, "test")
    # The registered test: paired t over the seeds, if all are there
    adjusted: dict[str, float] = {}
    if len(gaps) == len(arms) - 1 and all(len(gap) == len(SEEDS) for gap in gaps.values()):
        p_values = [float(stats.ttest_1samp(gap.mean(1), 0).pvalue) for gap in gaps.values()]
        adjusted = dict(zip(gaps, holm(p_values), strict=True))

    rows = []
    for arm, names in arms.items():
        runs = [lines[name] for name in names if name in lines]
        if not runs:
            rows.append([arm, "0", *[""] * 5])
            continue
        last = np.mean([np.mean(line["rewards"][-5:]) for line in runs])
        highest = max(max(line["ratio_max"]) for line in runs)
        rows.append(
            [
                arm,
                str(len(runs)),
                share(runs, "test"),
                points(paired_difference(gaps[arm])) if arm in gaps else "",
                f"{adjusted[arm]:.2g}" if arm in adjusted else "",
                f"{last:.2f}",
                f"{highest:.2f}",
            ]
        )
    head = ["arm", "runs", "test, % [95%]", "mu 12 with fresh masks minus it [95%]", "p (Holm)"]
    return markdown_table([*head, "reward, last 5 rollouts", "largest ratio"], rows)


RATES_FILE = DATA.with_name("rates_on_cpu.jsonl")  # a line per rollout: rate, rollout, right (share), ratio_max
ROLLOUTS_ON_CPU, LAST_ROLLOUTS = 100, 25


def cpu_rates_table(rollouts: Sequence[Mapping[str, Any]]) -> str:
    """Section 4: the rates of RL in `make smollm`. Runs of one seed have the same prompts, so rollouts are paired."""
    by_rate: dict[float, dict[int, Mapping[str, Any]]] = {}
    for line in rollouts:
        by_rate.setdefault(line["rate"], {})[line["rollout"]] = line
    first_rate, first = next(iter(by_rate.items()))
    rows = []
    for rate, lines in sorted(by_rate.items()):
        right = np.array([line["right"] for line in lines.values()])
        gap = ""
        if rate != first_rate:
            gap = points(paired_difference(right[None] - np.array([[first[number]["right"] for number in lines]])))
        last = ""
        if len(lines) == ROLLOUTS_ON_CPU:
            last = f"{100 * right[-LAST_ROLLOUTS:].mean():.1f}"
        highest = max(line["ratio_max"] for line in lines.values())
        rows.append([f"{rate:g}", str(len(lines)), f"{100 * right.mean():.1f}", gap, last, f"{highest:.2f}"])
    head = ["rate", "rollouts", "right, %", f"minus {first_rate:g} in the same rollouts [95%]"]
    return markdown_table([*head, f"right in the last {LAST_ROLLOUTS} of {ROLLOUTS_ON_CPU}, %", "largest ratio"], rows)


def short_sft_table(lines: Lines) -> str:
    """Section 5: each arm's validation problems, compared with `shift` on the same ones."""
    shift = lines.get("shift")
    rows = []
    for arm in SHORT_ARMS:
        line = lines.get(arm)
        if line is None:
            rows.append([arm, *[""] * 4])
            continue
        gap = ""
        if shift is not None and arm != "shift":
            gap = points(paired_difference(outcomes(line, "validation") - outcomes(shift, "validation")))
        minutes = f"{line['seconds'] / 60:.0f}"
        rows.append([arm, share([line], "validation"), gap, f"{line['bits']:.3f}", minutes])
    head = ["arm", "validation, % [95%]", "minus shift [95%]", "bits per byte", "minutes of SFT"]
    return markdown_table(head, rows)


def second_half_table(lines: Lines) -> str:
    """Section 6: each second half's validation problems and bits per byte, compared with those of `ar_first`."""
    done = {name: lines[name] for name in HALVES if name in lines}
    others = [name for name in done if name != FIRST and FIRST in done]
    solved: dict[str, np.ndarray] = {}  # (1, problems), minus `ar_first`
    bits: dict[str, np.ndarray] = {}  # the same, in bits per byte
    for name in others:
        line, first = done[name], done[FIRST]
        solved[name] = outcomes(line, "validation") - outcomes(first, "validation")
        bits[name] = (np.array([line["bits"]]) - np.array([first["bits"]])) / np.mean(line["bytes"])
    # The registered tests, if all second halves are there
    adjusted: dict[str, tuple[float, float]] = {}
    if len(others) == len(HALVES) - 1:
        by_measure = [holm([float(p_values(gaps[name])) for name in others]) for gaps in (solved, bits)]
        adjusted = dict(zip(others, zip(*by_measure, strict=True), strict=True))

    rows = []
    for name in HALVES:
        if name not in done:
            rows.append([name, *[""] * 7])
            continue
        line = done[name]
        cells = [name, share([line], "validation")]
        cells += [points(paired_difference(solved[name])) if name in solved else ""]
        cells += [f"{adjusted[name][0]:.2g}" if name in adjusted else ""]
        cells += [f"{sum(line['bits']) / sum(line['bytes']):.4f}"]
        cells += [signed(mean_of(bits[name])) if name in bits else ""]
        cells += [f"{adjusted[name][1]:.2g}" if name in adjusted else "", f"{line['seconds'] / 60:.0f}"]
        rows.append(cells)
    head = ["second half", "validation, % [95%]", "minus ar_first [95%]", "p (Holm)"]
    return markdown_table([*head, "bits per byte", "minus ar_first [95%]", "p (Holm)", "minutes of SFT"], rows)


def sampler_blocks_table(lines: Lines, trained_blocks: Lines) -> str:
    """Section 7: the validation problems that models solve in shorter blocks, compared with those of their training,
    whose lines are `trained_blocks`."""
    rows = []
    for arm in MODELS:
        if arm not in trained_blocks:
            continue
        trained = trained_blocks[arm]
        cells = [arm]
        for block in BLOCKS:
            line = lines.get(f"{arm}-{block}")
            if line is None:
                cells += ["", ""]
                continue
            gap = points(paired_difference(outcomes(line, "validation") - outcomes(trained, "validation")))
            cells += [share([line], "validation"), gap]
        rows.append([*cells, share([trained], "validation")])
    head = ["model"]
    for block in BLOCKS:
        head += [f"blocks of {block}, % [95%]", f"minus blocks of {BLOCK} [95%]"]
    return markdown_table([*head, f"blocks of {BLOCK}, % [95%]"], rows)


def short_rl_table(lines: Lines, starts: Mapping[int, Mapping[str, Any]]) -> str:
    """Sections 8 and 10: the validation problems of RL and of more SFT, compared with each other and with the SFT that
    all continue. `starts`: its line for each block length of the sampler."""
    rows = [["SFT", "", str(BLOCK), share([starts[BLOCK]], "validation"), "", "", *cells_of_texts(starts[BLOCK])]]
    for name in SHORT_RL_ARMS:
        rate = f"{RL_ARMS[name].rate:g}" if name in RL_ARMS else ""
        cells = [f"+ {name}", rate, str(block_of(name))]
        if name not in lines:
            rows.append([*cells, *[""] * 6])
            continue
        line = lines[name]
        gap = points(paired_difference(gain_of_rl(lines, starts, name)))
        over_more = ""
        if block_of(name) == BLOCK and name != "more" and "more" in lines:
            over_more = points(paired_difference(outcomes(line, "validation") - outcomes(lines["more"], "validation")))
        rows.append([*cells, share([line], "validation"), gap, over_more, *cells_of_texts(line)])
    head = ["stages", "rate of RL", "tokens of a block", "validation, % [95%]", "minus SFT in these blocks [95%]"]
    return markdown_table([*head, "minus SFT + more [95%]", "bits per byte", "characters", "minutes"], rows)


def gain_of_rl(lines: Lines, starts: Mapping[int, Mapping[str, Any]], name: str) -> np.ndarray:
    """(1, problems): what an arm solves minus what its start solves, both with the arm's blocks."""
    return outcomes(lines[name], "validation") - outcomes(starts[block_of(name)], "validation")


def reasons_table(lines: Lines, starts: Mapping[int, Mapping[str, Any]]) -> str:
    """Section 10: its registered contrasts, with Holm's correction once all are there."""
    gains = {name: gain_of_rl(lines, starts, name) for name in RL_ARMS if name in lines}
    gaps: dict[str, np.ndarray] = {}
    if "blocks_of_1" in gains:
        gaps["1. blocks_of_1 minus SFT, in blocks of 1"] = gains["blocks_of_1"]
    if "low_rate" in gains:
        gaps["2. low_rate minus SFT"] = gains["low_rate"]
        gaps["3. low_rate minus rl"] = gains["low_rate"] - gains["rl"]
    if "blocks_of_1" in gains:
        gaps["4. gain of blocks_of_1 minus gain of rl"] = gains["blocks_of_1"] - gains["rl"]
    return holm_table(gaps, tests=4)


def cells_of_texts(line: Mapping[str, Any]) -> list[str]:
    """Bits per byte of gold answers, characters of a completion, and minutes of training."""
    characters = line["validation"]["characters"]
    return [f"{line['bits']:.3f}", f"{characters:.1f}", f"{line['seconds'] / 60:.0f}"]


def short_rl_rollouts_table(lines: Lines) -> str:
    """Sections 8, 10 and 11: what RL logged, in each quarter of its rollouts."""
    rows = []
    for name in RL_ARMS:
        if name in lines:
            right = np.array_split(np.array(lines[name]["right"]), 4)
            ratios = np.array_split(np.array(lines[name]["ratio_max"]), 4)
            entropies = np.array_split(np.array(lines[name]["entropy"]), 4)
            cells = [
                ", ".join(f"{100 * quarter.mean():.1f}" for quarter in right),
                ", ".join(f"{quarter.max():.2f}" for quarter in ratios),
                ", ".join(f"{quarter.mean():.2f}" for quarter in entropies),
            ]
            rows.append([name, *cells])
    return markdown_table(["in each quarter of RL", "right, %", "largest ratio", "entropy per token, nats"], rows)


def prompt_masks_table(lines: Lines, starts: Mapping[int, Mapping[str, Any]]) -> str:
    """Section 11: its registered contrasts, with Holm's correction once all are there."""
    gaps: dict[str, np.ndarray] = {}
    for name, hidden in {"shown_blocks_of_1": "blocks_of_1", "shown": "rl"}.items():
        if name in lines:
            number = len(gaps) + 1
            gaps[f"{number}. {name} minus SFT, in blocks of {block_of(name)}"] = gain_of_rl(lines, starts, name)
            gap = outcomes(lines[name], "validation") - outcomes(lines[hidden], "validation")
            gaps[f"{number + 1}. {name} minus {hidden}"] = gap
    return holm_table(gaps, tests=4)


def holm_table(gaps: Mapping[str, np.ndarray], tests: int) -> str:
    """A table of contrasts of one run, whose p values have Holm's correction if all `tests` are there."""
    adjusted = [""] * len(gaps)
    if len(gaps) == tests:
        adjusted = [f"{p:.2g}" for p in holm([float(p_values(gap)) for gap in gaps.values()])]
    rows = [[name, points(paired_difference(gap)), p] for (name, gap), p in zip(gaps.items(), adjusted, strict=True)]
    return markdown_table(["contrast", "points [95%]", "p (Holm)"], rows)


def samplers_table(lines: Lines) -> str:
    """Section 9: the validation problems that models solve with fewer passes, compared with `exact`."""
    gaps: dict[str, np.ndarray] = {}
    for model in SAMPLED_MODELS:
        exact = lines.get(f"{model}, exact")
        for sampler in SAMPLERS:
            name = f"{model}, {sampler}"
            if sampler != "exact" and exact is not None and name in lines:
                gaps[name] = outcomes(lines[name], "validation") - outcomes(exact, "validation")
    adjusted = dict(zip(gaps, holm([float(p_values(gap)) for gap in gaps.values()]), strict=True))

    rows = []
    for model in SAMPLED_MODELS:
        for sampler in SAMPLERS:
            name = f"{model}, {sampler}"
            if name not in lines:
                rows.append([model, sampler, *[""] * 4])
                continue
            cells = [model, sampler, share([lines[name]], "validation")]
            cells += [points(paired_difference(gaps[name])), f"{adjusted[name]:.2g}"] if name in gaps else ["", ""]
            rows.append([*cells, f"{lines[name]['validation']['passes']:.1f}"])
    head = ["model", "sampler", "validation, % [95%]", "minus exact [95%]", "p (Holm)", "passes"]
    return markdown_table(head, rows)


def three_seeds_table(lines: Lines) -> str:
    """Section 12: each arm over its seeds, and bits per byte in the mean over them."""
    rows = []
    for arm, runs in runs_of_seeds(lines).items():
        if not runs:
            rows.append([arm, "0", *[""] * 4])
            continue
        shares = [share([*runs.values()], split) for split in ("validation", "test")]
        bits, seconds = (float(np.mean([line[name] for line in runs.values()])) for name in ("bits", "seconds"))
        rows.append([arm, str(len(runs)), *shares, f"{bits:.3f}", f"{seconds / 60:.0f}"])
    head = ["arm", "seeds", "validation, % [95%]", "test, % [95%]", "bits per byte", "minutes of training"]
    return markdown_table(head, rows)


def seed_contrasts_table(lines: Lines) -> str:
    """Section 12: its registered contrasts on test problems, and the same on validation problems, over the seeds that
    have both runs."""
    runs = runs_of_seeds(lines)
    rows = []
    for number, (arm, other) in enumerate([("shift", "ar"), ("low_rate", "shift"), ("low_rate", "more")], 1):
        seeds = [seed for seed in runs[arm] if seed in runs[other]]
        cells = [f"{number}. {arm} minus {other}", f"{len(seeds)} of {len(SEEDS)}"]
        for split in ("test", "validation"):
            gap = ""
            if seeds:
                ours, theirs = (right_of([runs[name][seed] for seed in seeds], split) for name in (arm, other))
                gap = points(paired_difference(ours - theirs))
            cells.append(gap)
        rows.append(cells)
    return markdown_table(["contrast", "seeds", "test, points [95%]", "validation, points [95%]"], rows)


def runs_of_seeds(lines: Lines) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Arm -> seed -> its line, in the order of seeds."""
    ordered = sorted(lines.values(), key=lambda line: line["seed"])
    return {
        arm: {line["seed"]: line for line in ordered if line["arm"] == arm} for arm in three_seeds.FOLDERS_OF_SEED_0
    }


def signed(mean: Mean) -> str:
    """A difference in bits per byte: "-0.0021 [-0.0040, -0.0002]"."""
    return f"{mean.value:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}]"


def texts_table(lines: Lines) -> str:
    """The first completions of test problems, by arm."""
    rows = []
    for arm in ARMS:
        line = lines.get(f"sft-{arm}-0")
        if line is not None:
            rows.append([arm, *("`" + text.replace("\n", " / ") + "`" for text in line["test"]["texts"][:3])])
    return markdown_table(["arm", "problem 1", "problem 2", "problem 3"], rows)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    lines = lines_by_job(DATA)
    names = [job.name for job in jobs(best_arm(lines))]
    missing = [name for name in names if name not in lines]
    text = f"{len(lines)} of {len(names)} jobs are done; missing: {', '.join(missing) or 'none'}.\n"
    text += f"\n## Conversion, seed 0\n\n{conversion_table(lines)}"
    text += f"\n## Stages\n\n{stages_table(lines)}"
    text += f"\n## Registered contrasts\n\n{contrasts_table(lines)}"
    text += f"\n## Prompt masks\n\n{masks_table(lines)}"
    text += f"\n## Rates of RL in `make smollm`\n\n{cpu_rates_table(read_lines(RATES_FILE))}"
    short = lines_by_job(SHORT_DATA)
    text += f"\n## A short SFT on two cores\n\n{short_sft_table(short)}"
    halves = lines_by_job(HALF_DATA)
    text += f"\n## Second halves of the short SFT\n\n{second_half_table(halves)}"
    blocks = lines_by_job(BLOCKS_DATA)
    text += f"\n## The block length of the sampler\n\n{sampler_blocks_table(blocks, short)}"
    rl = lines_by_job(SHORT_RL_DATA)
    starts = {BLOCK: short[START], 1: blocks[f"{START}-1"]}
    text += f"\n## RL or more SFT after the short SFT\n\n{short_rl_table(rl, starts)}"
    text += f"\n{reasons_table(rl, starts)}\n{prompt_masks_table(rl, starts)}\n{short_rl_rollouts_table(rl)}"
    seeds = lines_by_job(three_seeds.DATA)
    text += f"\n## Three seeds\n\n{three_seeds_table(seeds)}\n{seed_contrasts_table(seeds)}"
    samplers = lines_by_job(SAMPLERS_DATA)
    text += f"\n## Samplers with fewer passes\n\n{samplers_table(samplers)}"
    text += f"\n## Completions of the first test problems\n\n{texts_table(lines)}"
    return {Path(__file__).with_name("README.md"): text}
