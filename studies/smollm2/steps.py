"""What the jobs of `run.py` do: the problems, conversion, SFT, RL, baselines, and the judgement of a model."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from studies.json_lines import lines_by_job, read_lines

TASK = Path(__file__).with_name("study_svamp.py")
LENGTH, BLOCK, EPOCHS = 48, 8, 4  # tokens of a completion, tokens of a block, epochs of the arms with two streams
ROWS_PER_STEP = 128
ROLLOUTS, GROUP, PROMPTS, MU = 40, 8, 16, 4
RATES = (3e-6, 1e-5, 3e-5)
SEEDS = (0, 1, 2)
SHOWN = 12  # completions that a line keeps as text

Lines = Mapping[str, Mapping[str, Any]]  # of the results, by job


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
        return lines_by_job(self.data)

    def failed(self) -> set[str]:
        """The names of the jobs that ended in an error, whose text is in failed/; remove a file to try it again."""
        return self.names("failed")

    def made(self) -> set[str]:
        """The names of the jobs whose files are in `folder`."""
        return self.names("made")

    def names(self, kind: str) -> set[str]:
        folder = self.path(kind)
        return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


# --- Data -------------------------------------------------------------------------------------------------------------


def write_rows(study: Study) -> dict[str, Any]:
    """The rows of SFT, and the problems of RL, validation and test, as files in `study.folder`."""
    from studies.smollm2 import study_svamp

    rows = [row for row in study_svamp.read_csv("train") if study_svamp.is_consistent(row)]
    random.Random(0).shuffle(rows)
    held_out, kept = rows[:300], rows[300:]
    test = study_svamp.read_csv("test")
    if study.tiny:
        held_out, kept, test = held_out[:4], kept[:16], test[:4]
    sft = study_svamp.with_new_numbers(kept, per_problem=4, seed=0)
    known = {problem["question"] for problem in sft}
    rl = [
        problem
        for problem in study_svamp.with_new_numbers(kept, per_problem=2, seed=1)
        if problem["question"] not in known
    ]
    random.Random(1).shuffle(rl)
    files = {
        "sft.jsonl": [study_svamp.as_messages(problem) for problem in sft],
        "rl.jsonl": rl,
        "validation.jsonl": [study_svamp.own_problem(row) for row in held_out],
        "test.jsonl": [study_svamp.own_problem(row) for row in test],
    }
    for name, lines in files.items():
        study.path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: len(lines) for name, lines in files.items()}


# --- Models and SFT ---------------------------------------------------------------------------------------------------


def convert_source(study: Study) -> dict[str, Any]:
    """The autoregressive model as a folder of Transformers, in fp32."""
    from transformers import AutoTokenizer

    from d1.models.formats.gguf import gguf_config, load_gguf

    out = study.path("ar")
    shutil.rmtree(out, ignore_errors=True)
    source = Path(study.model)
    if source.suffix == ".gguf":
        model, tokenizer, _ = load_gguf(source, gguf_config(source))
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


def sft_flags(study: Study, losses: Sequence[str], seed: int, out: str, rate: float) -> list[str]:
    flags: list[object] = ["--full_finetuning", "--output_dir", study.folder, "--job_name", out, "--seed", seed]
    flags += ["--batch_size", 4 if study.tiny else ROWS_PER_STEP, "--grad_accum_steps", 1, "--learning_rate", rate]
    flags += ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.05, "--weight_decay", 0, "--max_grad_norm", 1]
    flags += ["--eos_padding", LENGTH, "--max_length", study.longest, "--test_split", 0, "--logging_steps", 10]
    flags += ["--eval_steps", 100_000, "--num_proc", 1, "--debugging", *losses]
    if study.tiny:
        flags += ["--max_steps", 2]
    return [*map(str, flags)]


def train_sft(study: Study, name: str, seed: int) -> dict[str, Any]:
    """SFT of an arm on the rows with new numbers, then its judgement."""
    from d1.sft import train

    out = f"{name}-{seed}"
    shutil.rmtree(study.path(out), ignore_errors=True)
    flags = sft_flags(study, ARMS[name].sft, seed, out, rate=3e-4)
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
    return [round(log["loss"], 4) for log in read_lines(folder / "metrics.jsonl") if "loss" in log]


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


SPLITS = ("validation", "test")


def judge(
    study: Study, model: Path, arm: Arm, splits: Sequence[str] = SPLITS, sampler: Sequence[str] = ()
) -> dict[str, Any]:
    """Which validation and test problems a diffusion model solves, its lengths and forward passes, and some
    completions; `sampler`: flags of `d1 eval` in place of those of the protocol."""
    from d1.eval import run as evaluation

    found: dict[str, Any] = {}
    for split in splits:
        folder = study.path(f"judged-{model.name}-{split}")
        shutil.rmtree(folder, ignore_errors=True)
        flags: list[object] = ["--model_path", model, "--dataset", TASK, "--data_file", study.path(f"{split}.jsonl")]
        flags += ["--gen_length", LENGTH, "--block_length", arm.block, "--diffusion_steps", LENGTH, "--batch_size", 512]
        flags += ["--eos_stop", "--output_dir", folder, *sampler]
        evaluation.main(evaluation.make_parser().parse_args([*map(str, flags)]))
        (file,) = folder.glob("*_generations.json")
        problems = sorted(json.loads(file.read_text())["generations"], key=lambda problem: problem["index"])
        found[split] = verdicts([problem["text"] for problem in problems], [p["ground_truth"] for p in problems])
        found[split]["passes"] = round(fmean(problem["forward_passes"] for problem in problems), 2)
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
    twin = load_ar(model).eval()
    if on_gpu():
        twin = twin.to("cuda", torch.bfloat16)
    found: dict[str, Any] = {}
    for split in SPLITS:
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
    twin = load_ar(model).to(twin.device).eval()  # fp32, as for the diffusion arms
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
    return nats / math.log(2), len(row["solution"].encode())


def encoded(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids of a problem's prompt, and those of its gold answer with the end of the turn."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(row["solution"], add_special_tokens=False)["input_ids"]
    return list(prompt), [*answer, tokenizer.eos_token_id]


def bits_per_byte(study: Study, model: Path, arm: Arm) -> float:
    """Bits per byte of the gold answers, as `answer_bits` has them."""
    answers = answer_bits(study, model, arm)
    return sum(bits for bits, _ in answers) / sum(size for _, size in answers)


def answer_bits(study: Study, model: Path, arm: Arm) -> list[tuple[float, int]]:
    """For each validation problem, the bits of its gold answer, written from left to right in the arm's blocks, and the
    answer's bytes: the chain rule over views that hide a token and those after it in its block."""
    import torch

    from d1.models import load_model, load_tokenizer
    from d1.models.kinds import block_size
    from d1.scoring import Views, score

    tokenizer = load_tokenizer(str(model))
    judge_model = load_model(str(model), "float32", "cuda" if on_gpu() else "cpu").eval()
    size = arm.block
    if block_size(judge_model.config) is not None:
        judge_model.config.block_size = size
    answers = []
    for row in problem_rows(study, "validation"):
        prompt, answer = encoded(tokenizer, row)
        answer = answer[:LENGTH]
        length = -(-len(answer) // size) * size  # of its blocks, which see no later ones
        ids = torch.tensor([answer + [tokenizer.eos_token_id] * (length - len(answer))])
        views = min(size, len(answer))
        place = torch.arange(length) % size  # of a token in its block
        hidden = place >= torch.arange(views)[:, None]  # (views, canvas)
        weights = (place == torch.arange(views)[:, None]) & (torch.arange(length) < len(answer))
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
                gen_length=length,
                views_at_once=size,
            )
        bits = -scores.logps.sum().item() / math.log(2)
        answers.append((bits, len(row["solution"].encode())))
    return answers


# --- RL ---------------------------------------------------------------------------------------------------------------


def solved(line: Mapping[str, Any]) -> int:
    """The number of validation problems that the model of a line solves."""
    return int(line["validation"]["right"].count("1"))


def solved_by_arm(lines: Lines) -> dict[str, int]:
    """The validation problems that each diffusion arm solves with seed 0; arms that ended in an error are not there."""
    return {name: solved(lines[f"sft-{name}-0"]) for name in DIFFUSION if f"sft-{name}-0" in lines}


def best_arm(lines: Lines) -> str:
    """The arm that the job `best` chose; before it, the best one so far."""
    if "best" in lines:
        return str(lines["best"]["arm"])
    counts = solved_by_arm(lines)
    return max(counts, key=lambda name: counts[name], default=DIFFUSION[0])


def choose_arm(study: Study) -> dict[str, Any]:
    """The diffusion arm that solves most validation problems, for all later jobs.

    Raises:
        ValueError: no arm was trained.
    """
    lines = study.lines()
    solved_problems = solved_by_arm(lines)
    if not solved_problems:
        raise ValueError(f"none of {', '.join(DIFFUSION)} was trained, so none is the best: see why these jobs failed")
    return {"arm": best_arm(lines), "solved": solved_problems}


def rate_of_later_runs(lines: Lines) -> float | None:
    """The rate of the best arm's runs of RL after the search; None before them."""
    arm = best_arm(lines)
    for name, line in lines.items():
        if "rate" in line and not name.startswith("rate-") and line.get("arm", arm) == arm:
            return float(line["rate"])
    return None


def best_rate(lines: Lines) -> float:
    """The rate of RL that solves most validation problems with seed 0, of those that ended without an error. A run of
    the search that is done later does not change it: all seeds have one rate.

    Raises:
        ValueError: no run of the search has ended.
    """
    later = rate_of_later_runs(lines)
    if later is not None:
        return later
    tried = [rate for rate in RATES if f"rate-{rate:g}" in lines]
    if not tried:
        names = ", ".join(f"rate-{rate:g}" for rate in RATES)
        raise ValueError(f"none of {names} has ended, so RL has no rate: see why these jobs failed")
    return max(tried, key=lambda rate: solved(lines[f"rate-{rate:g}"]))


def train_rl(
    study: Study,
    name: str,
    seed: int,
    *,
    rate: float | None = None,
    with_sft: bool = True,
    task: Path = TASK,
    mu: int = MU,
    fresh_masks: bool = True,
    compute_of: str | None = None,
) -> dict[str, Any]:
    """RL of the best arm by d1's method, then its judgement.

    Args:
        rate: None is the best one of the search.
        with_sft: start from the arm's model after SFT, not from its conversion.
        mu: updates per rollout.
        fresh_masks: a prompt mask for each update; False: one for all updates of a rollout.
        compute_of: a job with as many tokens in forward and backward passes; None: 40 rollouts.
    """
    from d1.rl import train

    lines = study.lines()
    arm = best_arm(lines)
    chosen = best_rate(lines) if rate is None else rate
    out = study.path(name)
    shutil.rmtree(out, ignore_errors=True)
    flags: list[object] = ["--model_path", study.path(f"{arm}-0" if with_sft else f"{arm}-base")]
    flags += ["--dataset", task, "--data_file", study.path("rl.jsonl")]
    flags += ["--output_dir", out, "--seed", seed, "--learning_rate", chosen, "--num_iterations", mu]
    flags += ["--num_generations", GROUP, "--max_prompt_length", study.longest - 64, "--max_completion_length", LENGTH]
    flags += ["--per_device_train_batch_size", 16 if study.tiny else GROUP * PROMPTS, "--block_length", ARMS[arm].block]
    flags += ["--diffusion_steps", LENGTH, "--temperature", 0.9, "--random_masking", str(fresh_masks).lower()]
    flags += ["--warmup_steps", 1]
    flags += ["--gradient_checkpointing", "false", "--eval_strategy", "no", "--save_strategy", "no"]
    flags += ["--logging_steps", 1, "--report_to", "none", "--bf16", str(on_gpu()).lower()]
    if compute_of is None:
        flags += ["--max_steps", mu * (1 if study.tiny else ROLLOUTS)]
    else:
        if compute_of not in lines:
            raise ValueError(f"{name} takes the compute of {compute_of}, which has no line")
        flags += ["--max_steps", 100_000, "--max_compute_tokens", lines[compute_of]["compute_tokens"]]
    args, model_args = train.make_parser().parse_args_and_config([*map(str, flags)])
    began = time.monotonic()
    train.main(args, model_args)
    seconds = time.monotonic() - began
    steps = [log for log in read_lines(out / "metrics.jsonl") if "loss" in log]
    line = {
        "arm": arm,
        "rate": chosen,
        "settings": [*map(str, flags)],
        "seconds": round(seconds, 1),
        "compute_tokens": steps[-1]["compute_tokens"],
        "rewards": [round(log["reward"], 4) for log in steps if "reward" in log],
        "ratio_max": [round(log["ratio_max"], 4) for log in steps],
    }
    return line | judge(study, out, ARMS[arm])


def train_more(study: Study, seed: int) -> dict[str, Any]:
    """More SFT from the best arm's model, for the seconds that its RL with this seed took."""
    return continue_sft(study, f"more-{seed}", seed, study.path("sft.jsonl"), seconds_of_rl(study.lines(), seed))


def train_own(study: Study, seed: int) -> dict[str, Any]:
    """Rejection sampling: SFT of the best arm's model on its own right answers to as many prompts and completions as RL
    has. Sampling and SFT together take the seconds of RL with this seed."""
    from d1.eval import run as evaluation

    lines = study.lines()
    arm = best_arm(lines)
    began = time.monotonic()
    prompts = ROLLOUTS * PROMPTS
    folder, rows = study.path(f"sampled-{seed}"), study.path(f"own-{seed}.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    flags: list[object] = ["--model_path", study.path(f"{arm}-0"), "--dataset", TASK]
    flags += ["--data_file", study.path("rl.jsonl"), "--limit", 4 if study.tiny else prompts, "--num_samples", GROUP]
    flags += ["--temperature", 0.9, "--seed", seed, "--gen_length", LENGTH, "--block_length", ARMS[arm].block]
    flags += ["--diffusion_steps", LENGTH, "--batch_size", 512, "--eos_stop", "--output_dir", folder]
    evaluation.main(evaluation.make_parser().parse_args([*map(str, flags)]))
    right = right_answers(folder, problem_rows(study, "rl"))
    if study.tiny and not right:  # a random model solves nothing
        right = [json.loads(line) for line in study.path("sft.jsonl").read_text().splitlines()[:4]]
    rows.write_text("".join(json.dumps(row) + "\n" for row in right))
    shutil.rmtree(folder)
    sampling = time.monotonic() - began
    line = continue_sft(study, f"own-{seed}", seed, rows, seconds_of_rl(lines, seed) - sampling)
    line["seconds"] = round(line["seconds"] + sampling, 1)
    return {"rows": len(right), "sampling": round(sampling, 1)} | line


def right_answers(folder: Path, problems: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row of SFT for each completion in `folder` that is right and differs from the others of its problem."""
    prompts = {problem["question"]: problem["prompt"] for problem in problems}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(folder.glob("*_generations.json")):
        for one in json.loads(file.read_text())["generations"]:
            text = one["text"].strip()
            if verdicts([text], [one["ground_truth"]])["right"] == "1":
                answer = {"role": "assistant", "content": text}
                found[one["question"], text] = {"messages": [*prompts[one["question"]], answer]}
    return [*found.values()]


def seconds_of_rl(lines: Lines, seed: int) -> float:
    """Those of training with this seed; of seed 0, it is the run of the search with the best rate."""
    line = lines[f"rl-{seed}"] if seed else lines[f"rate-{best_rate(lines):g}"]
    return float(line["seconds"])


def continue_sft(study: Study, name: str, seed: int, rows: Path, seconds: float) -> dict[str, Any]:
    """SFT from the best arm's model for about `seconds`, by those per row of its first SFT; then its judgement."""
    from d1.sft import train

    lines = study.lines()
    arm = best_arm(lines)
    first = lines[f"sft-{arm}-0"]
    rows_of_first = lines["rows"]["sft.jsonl"] * epochs_of(arm, study)
    count = len(rows.read_text().splitlines())
    epochs = max(0.1, seconds / first["seconds"] * rows_of_first / count)
    shutil.rmtree(study.path(name), ignore_errors=True)
    flags = sft_flags(study, ARMS[arm].sft, seed + 100, name, rate=3e-5)
    flags += ["--model_name", str(study.path(f"{arm}-0")), "--train_data", str(rows)]
    flags += ["--num_epochs", f"{1 if study.tiny else epochs:.2f}"]
    began = time.monotonic()
    train.main(train.make_parser().parse_args(flags))
    taken = time.monotonic() - began
    line = {"arm": arm, "settings": flags, "seconds": round(taken, 1), "losses": losses_of(study.path(name))}
    return line | judge(study, study.path(name), ARMS[arm])


def train_ar_grpo(study: Study, seed: int) -> dict[str, Any]:
    """RL of the twin by TRL: the prompts, groups, rewards, updates, rate and temperature of RL of the best arm."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from studies.smollm2.study_svamp import REWARDS

    name = f"ar-rl-{seed}"
    out = study.path(name)
    shutil.rmtree(out, ignore_errors=True)
    rows = problem_rows(study, "rl")
    data = Dataset.from_list([{"prompt": row["prompt"], "ground_truth": row["ground_truth"]} for row in rows])
    size = 16 if study.tiny else GROUP * PROMPTS
    settings: dict[str, Any] = {
        "learning_rate": best_rate(study.lines()),
        "num_iterations": MU,
        "num_generations": GROUP,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": LENGTH,
        "max_steps": MU * (1 if study.tiny else ROLLOUTS),
        # The defaults of d1's RL
        "temperature": 0.9,
        "beta": 0.04,
        "epsilon": 0.5,
        "loss_type": "bnpo",
        "scale_rewards": "none",
        "use_bias_correction_kl": False,
        "disable_dropout": True,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "adam_beta2": 0.99,
        "max_grad_norm": 0.2,
        "bf16": on_gpu(),
        "use_cpu": not on_gpu(),
        "gradient_checkpointing": False,
        "seed": seed,
    }
    config = GRPOConfig(output_dir=str(out / "work"), report_to="none", save_strategy="no", logging_steps=1, **settings)
    tokenizer = AutoTokenizer.from_pretrained(study.path("ar-0"), padding_side="left")
    trainer = GRPOTrainer(
        model=load_ar(study.path("ar-0")),
        reward_funcs=[*REWARDS],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    rewards = [round(log["reward"], 4) for log in trainer.state.log_history if "reward" in log]
    trainer.save_model(str(out))
    tokenizer.save_pretrained(out)
    line = {"arm": "ar", "settings": settings, "seconds": round(seconds, 1), "rewards": rewards}
    return line | judge_ar(study, out)


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
