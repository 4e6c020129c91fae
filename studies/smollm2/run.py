"""A real language model, from conversion to RL: PROTOCOL.md says what is run. A line per job in data/runs.jsonl.

    python -m studies.smollm2.run --model SmolLM2-135M-Instruct.Q4_1.gguf --minutes 10 --workers 8    # on a GPU
    python -m smollm.model tiny runs/tiny
    python -m studies.smollm2.run --model runs/tiny --tiny --workers 1                                # all jobs, tiny

$D1_FILES names the folder with svamp/. Jobs are taken in the order of the protocol; none starts that is not expected to
end in the time that is left. If the command is killed, run it again: finished jobs are skipped. On another machine,
those whose models are needed are done again; of two lines of a job, the last one counts.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import append_line, read_lines

DATA = Path(__file__).parent / "data" / "runs.jsonl"
TASK = Path(__file__).with_name("svamp.py")
LENGTH, BLOCK, EPOCHS = 48, 8, 4  # tokens of a completion, tokens of a block, epochs of the arms with two streams
ROWS_PER_STEP = 128
ROLLOUTS, GROUP, PROMPTS, MU = 40, 8, 16, 4
RATES = (3e-6, 1e-5, 3e-5)
SEEDS = (0, 1, 2)
SHOWN = 12  # completions that a line keeps as text

Lines = Mapping[str, Mapping[str, Any]]  # of the results, by job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """A way to convert the model.

    Attributes:
        convert: flags of `d1 a2d`; None leaves the model autoregressive.
        streams: how often a token of a row is computed in a training pass.
        sft: flags of `d1 sft` beyond those of all arms.
        block: tokens of a block of the sampler.
    """

    convert: tuple[str, ...] | None
    streams: int
    sft: tuple[str, ...] = ()
    block: int = BLOCK


CO_LOSS = ("--masked_weight", "1", "--causal_weight", "0.3")
ARMS: dict[str, Arm] = {
    "ar": Arm(convert=None, streams=1),
    "shift": Arm(convert=("--causal_context", "--keep_shift", "--block_size", str(BLOCK)), streams=2, sft=CO_LOSS),
    "in_place": Arm(convert=("--causal_context", "--block_size", str(BLOCK)), streams=2, sft=CO_LOSS),
    "full": Arm(convert=("--keep_shift",), streams=1, block=LENGTH),
}
DIFFUSION = [name for name, arm in ARMS.items() if arm.convert is not None]


@dataclass(frozen=True)
class Job:
    """A piece of work with one line of results.

    Attributes:
        name: the line's name.
        do: computes the line.
        needs: jobs whose lines must be there first.
        minutes: expected time; with less left, the job is not started.
    """

    name: str
    do: Callable[[Study], dict[str, Any]]
    needs: tuple[str, ...] = ()
    minutes: float = 1.0


@dataclass(frozen=True)
class Study:
    """Where the study reads and writes, and its size.

    Attributes:
        model: the .gguf file, or a folder of a Llama.
        folder: models and working files.
        data: the file of lines.
        tiny: run every job with a few rows and steps.
    """

    model: str
    folder: Path
    data: Path
    tiny: bool = False

    @property
    def longest(self) -> int:
        """Tokens of a row of SFT; the tokens of the tiny model of `smollm.model` are bytes."""
        return 1024 if self.tiny else 384

    def path(self, name: str) -> Path:
        return self.folder / name

    def lines(self) -> dict[str, dict[str, Any]]:
        return {line["job"]: line for line in read_lines(self.data)}

    def failed(self) -> set[str]:
        """The names of the jobs that ended in an error, whose text is in failed/; remove a file to try it again."""
        folder = self.path("failed")
        return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


# --- Data -------------------------------------------------------------------------------------------------------------


def write_rows(study: Study) -> dict[str, Any]:
    """The rows of SFT, and the problems of RL, validation and test, as files in `study.folder`."""
    from studies.smollm2 import svamp

    rows = [row for row in svamp.read_csv("train") if svamp.is_consistent(row)]
    random.Random(0).shuffle(rows)
    held_out, kept = rows[:300], rows[300:]
    test = svamp.read_csv("test")
    if study.tiny:
        held_out, kept, test = held_out[:4], kept[:16], test[:4]
    sft = svamp.with_new_numbers(kept, per_problem=4, seed=0)
    known = {problem["question"] for problem in sft}
    rl = [
        problem for problem in svamp.with_new_numbers(kept, per_problem=2, seed=1) if problem["question"] not in known
    ]
    random.Random(1).shuffle(rl)
    files = {
        "sft.jsonl": [svamp.as_messages(problem) for problem in sft],
        "rl.jsonl": rl,
        "validation.jsonl": [svamp.own_problem(row) for row in held_out],
        "test.jsonl": [svamp.own_problem(row) for row in test],
    }
    for name, lines in files.items():
        study.path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: len(lines) for name, lines in files.items()}


# --- Models and SFT ---------------------------------------------------------------------------------------------------


def convert_source(study: Study) -> dict[str, Any]:
    """The autoregressive model as a folder of Transformers, in fp32."""
    from transformers import AutoTokenizer

    from d1.models.formats.gguf import load_gguf

    out = study.path("ar")
    shutil.rmtree(out, ignore_errors=True)
    source = Path(study.model)
    if source.suffix == ".gguf":
        model, tokenizer, _ = load_gguf(source)
    else:
        model = load_ar(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"parameters": sum(weight.numel() for weight in model.parameters())}


def convert(study: Study, name: str) -> dict[str, Any]:
    """The model of an arm before SFT."""
    from d1 import __main__ as command

    shutil.rmtree(study.path(f"{name}-base"), ignore_errors=True)
    flags = [*(ARMS[name].convert or ()), str(study.path("ar")), str(study.path(f"{name}-base"))]
    command.main(command.make_parser().parse_args(["a2d", *flags]))
    return {"settings": flags}


def epochs_of(name: str, study: Study) -> float:
    """Epochs with equal stream tokens; the twin has the epochs of the arms with two streams."""
    if study.tiny:
        return 1
    return EPOCHS if name == "ar" else EPOCHS * 2 // ARMS[name].streams


def sft_flags(study: Study, name: str, seed: int, out: str, rate: float) -> list[str]:
    flags: list[object] = ["--full_finetuning", "--output_dir", study.folder, "--job_name", out, "--seed", seed]
    flags += ["--batch_size", 4 if study.tiny else ROWS_PER_STEP, "--grad_accum_steps", 1, "--learning_rate", rate]
    flags += ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.05, "--weight_decay", 0, "--max_grad_norm", 1]
    flags += ["--eos_padding", LENGTH, "--max_length", study.longest, "--test_split", 0, "--logging_steps", 10]
    flags += ["--eval_steps", 100_000, "--num_proc", 1, "--debugging", *ARMS[name].sft]
    if study.tiny:
        flags += ["--max_steps", 2]
    return [*map(str, flags)]


def train_sft(study: Study, name: str, seed: int) -> dict[str, Any]:
    """SFT of an arm on the rows with new numbers, then its judgement."""
    from d1.sft import train

    out = f"{name}-{seed}"
    shutil.rmtree(study.path(out), ignore_errors=True)
    flags = sft_flags(study, name, seed, out, rate=3e-4)
    flags += ["--model_name", str(study.path(f"{name}-base")), "--train_data", str(study.path("sft.jsonl"))]
    flags += ["--num_epochs", str(epochs_of(name, study))]
    began = time.monotonic()
    train.main(train.make_parser().parse_args(flags))
    seconds = time.monotonic() - began
    line = {"settings": flags, "seconds": round(seconds, 1), "losses": losses_of(study.path(out))}
    return (
        line | judge(study, study.path(out), ARMS[name]) | {"bits": bits_per_byte(study, study.path(out), ARMS[name])}
    )


def losses_of(folder: Path) -> list[float]:
    logs = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [round(log["loss"], 4) for log in logs if "loss" in log]


def train_ar(study: Study, seed: int) -> dict[str, Any]:
    """SFT of the twin by TRL, on the same rows as often."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    out = study.path(f"ar-{seed}")
    shutil.rmtree(out, ignore_errors=True)
    rows = load_dataset("json", data_files=str(study.path("sft.jsonl")), split="train")
    rows = rows.map(as_chat, remove_columns=rows.column_names)
    settings: dict[str, Any] = {
        "num_train_epochs": epochs_of("ar", study),
        "per_device_train_batch_size": 4 if study.tiny else ROWS_PER_STEP,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": study.longest,
        "completion_only_loss": True,
        "bf16": on_gpu(),
        "gradient_checkpointing": False,
        "seed": seed,
        "max_steps": 2 if study.tiny else -1,
        "use_cpu": not on_gpu(),
    }
    config = SFTConfig(output_dir=str(out / "work"), report_to="none", save_strategy="no", logging_steps=10, **settings)
    tokenizer = AutoTokenizer.from_pretrained(study.path("ar"))
    trainer = SFTTrainer(model=load_ar(study.path("ar")), args=config, train_dataset=rows, processing_class=tokenizer)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    losses = [round(log["loss"], 4) for log in trainer.state.log_history if "loss" in log]
    trainer.save_model(str(out))
    line = {"settings": settings, "seconds": round(seconds, 1), "losses": losses}
    return line | judge_ar(study, out)


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `sft.jsonl` as TRL's conversational prompt and completion."""
    question, answer = row["messages"]
    return {"prompt": [question], "completion": [answer]}


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def load_ar(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


# --- Judging ----------------------------------------------------------------------------------------------------------


def judge(study: Study, model: Path, arm: Arm) -> dict[str, Any]:
    """Which validation and test problems a diffusion model solves, its lengths, and some completions."""
    from d1.eval import run as evaluation

    found: dict[str, Any] = {}
    for split in ("validation", "test"):
        folder = study.path(f"judged-{model.name}-{split}")
        shutil.rmtree(folder, ignore_errors=True)
        flags: list[object] = ["--model_path", model, "--dataset", TASK, "--data_file", study.path(f"{split}.jsonl")]
        flags += ["--gen_length", LENGTH, "--block_length", arm.block, "--diffusion_steps", LENGTH, "--batch_size", 512]
        flags += ["--eos_stop", "--output_dir", folder]
        evaluation.main(evaluation.make_parser().parse_args([*map(str, flags)]))
        (file,) = folder.glob("*_generations.json")
        problems = sorted(json.loads(file.read_text())["generations"], key=lambda problem: problem["index"])
        found[split] = verdicts([problem["text"] for problem in problems], [p["ground_truth"] for p in problems])
        shutil.rmtree(folder)
    return found


def verdicts(texts: Sequence[str], golds: Sequence[float]) -> dict[str, Any]:
    from d1.tasks import load_task

    score = load_task(str(TASK)).score
    right = [score(text, {"ground_truth": gold})["accuracy"] for text, gold in zip(texts, golds, strict=True)]
    characters = [len(text) for text in texts]
    return {
        "right": "".join(str(round(value)) for value in right),
        "characters": round(fmean(characters), 1),
        "texts": list(texts[:SHOWN]),
    }


def judge_ar(study: Study, model: Path) -> dict[str, Any]:
    """The same of the twin, by Transformers' `generate`; and its bits per byte."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    twin = load_ar(model).to("cuda" if on_gpu() else "cpu", torch.bfloat16 if on_gpu() else torch.float32).eval()
    found: dict[str, Any] = {}
    for split in ("validation", "test"):
        rows = problem_rows(study, split)
        texts: list[str] = []
        for start in range(0, len(rows), 256):
            prompts = [row["prompt"] for row in rows[start : start + 256]]
            batch: Any = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            batch = batch.to(twin.device)
            with torch.no_grad():
                ids = twin.generate(**batch, max_new_tokens=LENGTH, do_sample=False)
            texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found[split] = verdicts(texts, [row["ground_truth"] for row in rows])
    twin = twin.float()
    bits = [bits_of_ar(twin, tokenizer, row) for row in problem_rows(study, "validation")]
    return found | {"bits": sum(bit for bit, _ in bits) / sum(size for _, size in bits)}


def problem_rows(study: Study, split: str) -> list[dict[str, Any]]:
    from d1.tasks import load_task

    return list(load_task(str(TASK)).load_rows(split, str(study.path(f"{split}.jsonl"))))


def bits_of_ar(twin: Any, tokenizer: Any, row: dict[str, Any]) -> tuple[float, int]:
    """Bits of a gold answer and its end-of-turn token under the twin, and the answer's bytes."""
    import torch

    prompt, answer = encoded(tokenizer, row)
    ids = torch.tensor([prompt + answer], device=twin.device)
    with torch.no_grad():
        logps = twin(ids).logits.float().log_softmax(-1)
    nats = -logps[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).sum().item()
    return nats / 0.6931471805599453, len(row["solution"].encode())


def encoded(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids of a problem's prompt, and those of its gold answer with the end of the turn."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(row["solution"], add_special_tokens=False)["input_ids"]
    return list(prompt), [*answer, tokenizer.eos_token_id]


def bits_per_byte(study: Study, model: Path, arm: Arm) -> float:
    """Bits per byte of the gold answers, written from left to right in the model's blocks: the chain rule over views
    that hide a token and those after it in its block."""
    import torch

    from d1.models import load_model, load_tokenizer
    from d1.models.kinds import block_size
    from d1.scoring import Views, score

    tokenizer = load_tokenizer(str(model))
    judge_model = load_model(str(model), "float32", "cuda" if on_gpu() else "cpu").eval()
    size = block_size(judge_model.config) or LENGTH
    nats, count = 0.0, 0
    place = torch.arange(LENGTH) % size  # of a token in its block
    for row in problem_rows(study, "validation"):
        prompt, answer = encoded(tokenizer, row)
        answer = answer[:LENGTH]
        ids = torch.tensor([answer + [tokenizer.eos_token_id] * (LENGTH - len(answer))])
        views = min(size, len(answer))
        hidden = place >= torch.arange(views)[:, None]  # (views, canvas)
        weights = (place == torch.arange(views)[:, None]) & (torch.arange(LENGTH) < len(answer))
        noise = torch.cat([torch.zeros(views, len(prompt), dtype=torch.bool), hidden], dim=1)
        device = judge_model.device
        with torch.no_grad():
            scores = score(
                judge_model,
                torch.tensor([prompt], device=device),
                torch.ones(1, len(prompt), dtype=torch.long, device=device),
                ids.to(device),
                Views(noise.unsqueeze(0).to(device), weights.unsqueeze(0).float().to(device)),
                mask_token_id=tokenizer.mask_token_id,
                gen_length=LENGTH,
                views_at_once=size,
            )
        nats -= scores.logps.sum().item()
        count += len(row["solution"].encode())
    return nats / 0.6931471805599453 / count


# --- RL ---------------------------------------------------------------------------------------------------------------


def best_arm(lines: Lines) -> str:
    """The diffusion arm that solves most validation problems with seed 0, of those that ended without an error."""
    trained = [name for name in DIFFUSION if f"sft-{name}-0" in lines]
    return max(trained, key=lambda name: lines[f"sft-{name}-0"]["validation"]["right"].count("1"))


def best_rate(lines: Lines) -> float:
    """The rate of RL that solves most validation problems with seed 0."""
    return max(RATES, key=lambda rate: lines[f"rate-{rate:g}"]["validation"]["right"].count("1"))


def train_rl(study: Study, name: str, seed: int, rate: float | None = None, **changes: Any) -> dict[str, Any]:
    """RL of the best arm by d1's method, then its judgement.

    Args:
        rate: None is the best one of the search.
        changes: `start` "base" leaves out SFT; `reward_file` adds rewards; `shuffled` permutes them.
    """
    from d1.rl import train

    arm = best_arm(study.lines())
    chosen = best_rate(study.lines()) if rate is None else rate
    start = study.path(f"{arm}-base" if changes.get("start") == "base" else f"{arm}-0")
    out = study.path(name)
    shutil.rmtree(out, ignore_errors=True)
    task = Path(__file__).with_name("shuffled_svamp.py") if changes.get("shuffled") else TASK
    flags: list[object] = ["--model_path", start, "--dataset", task, "--data_file", study.path("rl.jsonl")]
    flags += ["--output_dir", out, "--seed", seed, "--learning_rate", chosen, "--num_iterations", MU]
    flags += ["--num_generations", GROUP, "--max_prompt_length", study.longest - 64, "--max_completion_length", LENGTH]
    flags += ["--per_device_train_batch_size", 16 if study.tiny else GROUP * PROMPTS, "--block_length", ARMS[arm].block]
    flags += ["--diffusion_steps", LENGTH, "--temperature", 0.9, "--max_steps", MU * (1 if study.tiny else ROLLOUTS)]
    flags += ["--gradient_checkpointing", "false", "--eval_strategy", "no", "--save_strategy", "no"]
    flags += ["--logging_steps", 1, "--report_to", "none", "--bf16", str(on_gpu()).lower()]
    args, model_args = train.make_parser().parse_args_and_config([*map(str, flags)])
    began = time.monotonic()
    train.main(args, model_args)
    seconds = time.monotonic() - began
    logs = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [round(log["reward"], 4) for log in logs if "reward" in log]
    line = {"arm": arm, "rate": chosen, "settings": [*map(str, flags)], "seconds": round(seconds, 1)}
    return line | {"rewards": rewards[::MU]} | judge(study, out, ARMS[arm])


def train_more(study: Study, seed: int) -> dict[str, Any]:
    """More SFT from the best arm's model, for the seconds that its RL with this seed took."""
    from d1.sft import train

    lines = study.lines()
    arm = best_arm(lines)
    seconds_of_rl = lines[f"rl-{seed}"]["seconds"] if seed else lines[f"rate-{best_rate(lines):g}"]["seconds"]
    first = lines[f"sft-{arm}-0"]
    epochs = max(0.1, seconds_of_rl / first["seconds"] * epochs_of(arm, study))
    out = f"more-{seed}"
    shutil.rmtree(study.path(out), ignore_errors=True)
    flags = sft_flags(study, arm, seed + 100, out, rate=3e-5)
    flags += ["--model_name", str(study.path(f"{arm}-0")), "--train_data", str(study.path("sft.jsonl"))]
    flags += ["--num_epochs", f"{1 if study.tiny else epochs:.2f}"]
    began = time.monotonic()
    train.main(train.make_parser().parse_args(flags))
    seconds = time.monotonic() - began
    line = {"arm": arm, "settings": flags, "seconds": round(seconds, 1), "losses": losses_of(study.path(out))}
    return line | judge(study, study.path(out), ARMS[arm])


def judge_start(study: Study) -> dict[str, Any]:
    """The best arm's model before SFT."""
    arm = best_arm(study.lines())
    return {"arm": arm} | judge(study, study.path(f"{arm}-base"), ARMS[arm])


def judge_ar_start(study: Study) -> dict[str, Any]:
    """The autoregressive model as it was released."""
    return judge_ar(study, study.path("ar"))


def second_seed(study: Study) -> dict[str, Any]:
    arm = best_arm(study.lines())
    return train_sft(study, arm, seed=1) | {"arm": arm}


# --- The jobs and their workers ---------------------------------------------------------------------------------------


def jobs() -> list[Job]:
    """All jobs, most important first."""
    pilots = tuple(f"sft-{name}-0" for name in DIFFUSION)
    searched = tuple(f"rate-{rate:g}" for rate in RATES)
    every = [Job("rows", write_rows, minutes=0.5), Job("source", convert_source, minutes=0.5)]
    every += [Job(f"convert-{name}", partial(convert, name=name), ("source",), 0.3) for name in DIFFUSION]
    every += [
        Job(f"sft-{name}-0", partial(train_sft, name=name, seed=0), ("rows", f"convert-{name}"), 2.0)
        for name in DIFFUSION
    ]
    every.append(Job("sft-ar-0", partial(train_ar, seed=0), ("rows", "source"), 1.5))
    every += [
        Job(f"rate-{rate:g}", partial(train_rl, name=f"rate-{rate:g}", seed=0, rate=rate), pilots, 2.5)
        for rate in RATES
    ]
    every.append(Job("sft-best-1", second_seed, pilots, 2.0))
    every.append(Job("sft-ar-1", partial(train_ar, seed=1), pilots, 1.5))
    every += [
        Job(f"rl-{seed}", partial(train_rl, name=f"rl-{seed}", seed=seed), searched, 2.5) for seed in SEEDS if seed
    ]
    every.append(Job("more-0", partial(train_more, seed=0), searched, 2.5))
    every.append(Job("base", judge_start, pilots, 0.5))
    every.append(Job("ar-base", judge_ar_start, ("rows", "source"), 0.5))
    every.append(Job("shuffled", partial(train_rl, name="shuffled", seed=0, shuffled=True), searched, 2.5))
    every += [
        Job(f"more-{seed}", partial(train_more, seed=seed), (*searched, f"rl-{seed}"), 2.5) for seed in SEEDS if seed
    ]
    every.append(Job("rl-base", partial(train_rl, name="rl-base", seed=0, start="base"), searched, 2.5))
    return every


def done_jobs(study: Study) -> set[str]:
    """Jobs with a line, without those to do again: later jobs build on their files (the problems, the source, the best
    arm so far with its conversion), which are not in `study.folder`, because another machine did them."""
    lines = study.lines()
    files = {"rows": "test.jsonl", "source": "ar/model.safetensors"}
    for arm in DIFFUSION:
        if f"sft-{arm}-0" not in lines:
            files[f"convert-{arm}"] = f"{arm}-base/model.safetensors"
    if any(f"sft-{arm}-0" in lines for arm in DIFFUSION):
        arm = best_arm(lines)
        files[f"convert-{arm}"] = f"{arm}-base/model.safetensors"
        files[f"sft-{arm}-0"] = f"{arm}-0/model.safetensors"
    lost = {job for job, file in files.items() if not study.path(file).is_file()}
    return lines.keys() - lost


def work(study: Study, until: float | None, only: str | None = None) -> None:
    """Does jobs that nobody else does, until none is left or startable in the time that is left; `only` names one."""
    while True:
        done = done_jobs(study)
        missing = [job for job in jobs() if job.name not in done and job.name not in study.failed()]
        if only is not None:
            missing = [job for job in missing if job.name == only]
        fits = [job for job in missing if until is None or time.time() + 60 * job.minutes < until]
        if not fits:
            return
        ended = {*done, *study.failed()}
        for job in fits:
            if ended.issuperset(job.needs) and try_job(study, job):
                break
        else:
            time.sleep(0.5)


def try_job(study: Study, job: Job) -> bool:
    """Does a job and appends its line; False if another worker has it, or it failed before."""
    lock = study.path(f"locks/{job.name}")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if job.name in done_jobs(study) or job.name in study.failed():
            return False
        logger.info("%s: %s starts", time.strftime("%H:%M:%S"), job.name)
        began = time.monotonic()
        try:
            line = job.do(study)
        except Exception:
            study.path("failed").mkdir(exist_ok=True)
            study.path(f"failed/{job.name}").write_text(traceback.format_exc())
            logger.exception("%s failed", job.name)
            return True
        line = {"job": job.name, **line, "wall": round(time.monotonic() - began, 1), **machine(), **run_record()}
        append_line(study.data, line)
        logger.info("%s: %s took %.0f s", time.strftime("%H:%M:%S"), job.name, line["wall"])
        free_memory()
        return True


def machine() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"card": torch.cuda.get_device_name(), "peak_gb": round(peak / 1e9, 2)}


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the .gguf file, or a folder of a Llama")
    parser.add_argument("--output_dir", default="runs/smollm2", help="of the models (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="the file of lines (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="start no job that is not expected to end in this time")
    parser.add_argument("--workers", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--job", choices=[job.name for job in jobs()], help="do this one alone, after those it needs")
    parser.add_argument("--tiny", action="store_true", help="every job with a few rows and steps, in OUTPUT_DIR")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "tiny.jsonl" if args.tiny else args.data
    study = Study(args.model, folder, data, args.tiny)
    if args.job is not None:
        (job,) = (job for job in jobs() if job.name == args.job)
        ended = done_jobs(study) | study.failed()
        absent = [name for name in job.needs if name not in ended]
        if absent:
            raise ValueError(f"--job {job.name} needs the lines of {', '.join(absent)} in {data}: do these jobs first")
    until = None if args.minutes is None else time.time() + 60 * args.minutes
    if args.workers == 1 or args.job is not None:
        work(study, until, args.job)
        return
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work_alone, args=(study, until, number)) for number in range(args.workers)]
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
