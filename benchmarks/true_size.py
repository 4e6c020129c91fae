"""All stages on a model of a published size, with random weights.

python -m benchmarks.true_size --model llada-8b --output_dir runs/true_size   # 16 GB of disk, 17 GB of memory

Writes a checkpoint in the released format (fields of its `config.json`, names and shapes of its weights, number of
files, size of its vocabulary), then runs the stages' own commands on it, each in a process of its own: two steps of
LoRA SFT, RL from that adapter (one rollout, two updates), an evaluation of two problems, and the export of the adapter.
For each stage it prints the peak memory, the estimate of `d1 fit` for it, seconds, and the size of what it saved.
Finished parts are not run again. With `--load_in_4bit`, SFT and RL train on NF4 weights (QLoRA), and nothing else runs.
With `--d1`, on a GPU of 80 GB, the settings are d1's: SFT of rows of 4,096 tokens, RL from the base with mu 12 and
canvases of 256 tokens, but 12 instead of 96 completions per step (4-bit weights: RL alone), evaluation of 512 tokens.
A model whose weights exceed the machine's memory is only built on the meta device, for `d1 fit`; `--layers 8` runs all
stages on its first eight layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from benchmarks.machine import describe
from d1.models.kinds import native_config
from d1.models.load import auto_class
from d1.models.published import DREAM, LLADA, LLADA2, NEMOTRON, SDAR
from d1.runs.cli import run_script
from d1.runs.record import RECORD
from d1.runs.tables import markdown_table

ROOT = Path(__file__).parents[1]
# config.json; number of files; ids of the tokens for the end of a text, the mask and the end of a turn
RELEASED: dict[str, tuple[dict[str, Any], int, dict[int, str]]] = {
    "llada-8b": (LLADA, 6, {126081: "<|endoftext|>", 126336: "<|mdm_mask|>", 126348: "<|eot_id|>"}),
    "dream-7b": (DREAM, 4, {151643: "<|endoftext|>", 151666: "<|mask|>", 151645: "<|im_end|>"}),
    "sdar-1.7b": (SDAR, 1, {151643: "<|endoftext|>", 151669: "<|MASK|>", 151645: "<|im_end|>"}),
    "llada2-mini": (LLADA2, 7, {156892: "<|endoftext|>", 156895: "<|mask|>", 156900: "<|role_end|>"}),
    "nemotron-3b": (NEMOTRON, 2, {11: "<|im_end|>", 100: "<SPECIAL_100>", 12: "<SPECIAL_12>"}),
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}END{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The released name and the shape of each weight of the model whose `config.json` is in `folder`."""
    config, kind = native_config(str(folder))
    with torch.device("meta"):
        state = auto_class(config).from_config(config).state_dict()
    for native in state:
        if native != "lm_head.weight" or not config.tie_word_embeddings:
            yield from ((name, tuple(weight.shape)) for name, weight in kind.release_weight(native, state))


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A bf16 weight as at the start of training: ones for norms, else small numbers."""
    if "norm" in name or "ln_f" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return drawn.normal_(0, 0.02, generator=generator).cpu()


def write_weights(folder: Path, files: int, todo: list[tuple[str, tuple[int, ...]]]) -> None:
    """Write random weights of these names and shapes, in `files` files of about the same size, and their index."""
    total = sum(torch.Size(shape).numel() for _, shape in todo)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    done, parts = 0, [dict[str, tuple[int, ...]]() for _ in range(files)]
    for name, shape in todo:
        parts[min(done * files // total, files - 1)][name] = shape
        done += torch.Size(shape).numel()
    where: dict[str, str] = {}
    for number, part in enumerate(tqdm(parts, desc="writing weights", unit="file"), 1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        weights = {name: random_weight(name, shape, generator) for name, shape in part.items()}
        save_file(weights, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, config: dict[str, Any], special: dict[int, str]) -> None:
    """A vocabulary as large as the released one. Its words are those of the task's source, which has the prompt."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train([str(ROOT / "d1/tasks/sudoku.py")], trainer)
    known, size = backend.get_vocab(), max(max(special) + 1, config["vocab_size"] - 115)
    free = (i for i in itertools.count() if i not in special)  # Nemotron's special tokens come before all words
    known = {token: next(free) for token in sorted(known, key=known.__getitem__)}
    spare = {f"unused {i}": i for i in range(max(known.values()) + 1, size) if i not in special}
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    backend.model = models.BPE(known | spare | {token: i for i, token in special.items()}, merges)
    backend.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    backend.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, special, {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_tokenizer_config(folder: Path, special: dict[int, str], fields: dict[str, Any]) -> None:
    end, mask, turn = special.values()
    fields = fields | {"eos_token": end, "pad_token": end, "mask_token": mask}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": TEMPLATE.replace("END", turn)}))


def copy_vocabulary(folder: Path, vocabulary: Path, special: dict[int, str]) -> None:
    """Copy Qwen's `vocab.json` and `merges.txt`, the files of Dream and SDAR, and name the special tokens in
    `tokenizer_config.json`. Names of other tokens after the vocabulary, up to the mask, are made up."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(vocabulary / name, folder)
    ids = range(len(json.loads((folder / "vocab.json").read_text(encoding="utf-8"))), max(special) + 1)
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(i): {"content": special.get(i, f"<|unused {i}|>"), "special": True} | plain for i in ids}
    write_tokenizer_config(folder, special, {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added})


def write_checkpoint(folder: Path, model: str, config: dict[str, Any], vocabulary: Path | None) -> None:
    """Write the whole checkpoint, or nothing: an unfinished one is made anew. Weights that exceed the machine's memory
    are left out."""
    _, files, special = RELEASED[model]
    shutil.rmtree(folder, ignore_errors=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2))
    if vocabulary is None:
        write_tokenizer(unfinished, config, special)
    else:
        copy_vocabulary(unfinished, vocabulary, special)
    todo = [*shapes(unfinished)]
    if 2 * sum(torch.Size(shape).numel() for _, shape in todo) < psutil.virtual_memory().total:
        write_weights(unfinished, files, todo)
    unfinished.rename(folder)


def commands(checkpoint: Path, folder: Path, block: int, kind: str, in_4bit: bool) -> dict[str, list[str]]:
    """Stage -> its command, as a user would type it."""
    canvas = ["--block_length", str(block), "--diffusion_steps", str(32 // block * min(block, 4))]
    small = ["--use_cpu", "true", "--report_to", "none", "--dtype", "bfloat16"]
    of_adapter = ["--use_peft", "--lora_r", "128", "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj"]
    stages = {
        "sft": [
            *("sft", "--model_name", str(checkpoint), "--train_data", str(ROOT / "dataset/sudoku_sft.jsonl")),
            *("--output_dir", str(folder), "--job_name", "sft", "--dtype", "bfloat16", "--debugging"),
            *("--batch_size", "1", "--grad_accum_steps", "1", "--max_steps", "2", "--max_length", "256"),
            *("--test_split", "0"),
        ],
        "rl": [
            *("rl", "--model_path", str(folder / "sft"), "--dataset", "sudoku", "--output_dir", str(folder / "rl")),
            *("--data_file", str(ROOT / "dataset/sudoku_train.csv"), *small, "--max_steps", "2", *canvas),
            *("--per_device_train_batch_size", "2", "--num_generations", "2", "--num_iterations", "2"),
            *("--max_prompt_length", "160", "--max_completion_length", "32", *of_adapter),
        ],
        "eval": [
            *("eval", "--model_path", str(folder / "rl"), "--dataset", "sudoku", "--limit", "2", "--dtype", "bfloat16"),
            *("--gen_length", "32", *canvas, "--batch_size", "2", "--output_dir", str(folder / "eval")),
        ],
        "export": ["export", str(folder / "rl"), str(folder / "export"), "--format", kind],
    }
    if not in_4bit:
        return stages
    rl = [str(checkpoint) if word == str(folder / "sft") else word for word in stages["rl"]]  # 4-bit takes no adapter
    return {"sft": [*stages["sft"], "--load_in_4bit"], "rl": [*rl, "--load_in_4bit", "true"]}


def d1_commands(checkpoint: Path, folder: Path, in_4bit: bool) -> dict[str, list[str]]:
    """Stage -> its command with d1's settings for one GPU. Rows of SFT are filled up to 4,096 tokens; prompts of RL
    have about 156 here, of at most 200."""
    rl = [
        *("rl", "--config", str(ROOT / "diffu-grpo/slurm_scripts/train.yaml"), "--model_path", str(checkpoint)),
        *("--dataset", "countdown", "--data_file", str(ROOT / "dataset/countdown_train.jsonl"), "--report_to", "none"),
        *("--output_dir", str(folder / "rl"), "--load_in_4bit", str(in_4bit).lower(), "--temperature", "0.9"),
        *("--max_steps", "12", "--num_iterations", "12", "--gradient_accumulation_steps", "2"),
    ]
    if in_4bit:
        return {"rl": rl}
    sft = [
        *("sft", "--model_name", str(checkpoint), "--train_data", str(ROOT / "dataset/sudoku_sft.jsonl")),
        *("--output_dir", str(folder), "--job_name", "sft", "--debugging", "--max_steps", "3"),
        *("--max_length", "4096", "--eos_padding", "4096", "--test_split", "0"),
    ]
    evaluation = [
        *("eval", "--model_path", str(checkpoint), "--dataset", "countdown", "--gen_length", "512", "--limit", "8"),
        *("--data_file", str(ROOT / "dataset/countdown_test.jsonl"), "--block_length", "32", "--batch_size", "8"),
        *("--output_dir", str(folder / "eval")),
    ]
    return {"sft": sft, "rl": rl, "eval": evaluation}


# Runs `d1`, then prints the bytes that PyTorch's allocator held at most.
ON_GPU = """
import atexit, runpy, torch
atexit.register(lambda: print("peak bytes", torch.cuda.max_memory_allocated()))
runpy.run_module("d1", run_name="__main__", alter_sys=True)
"""


def peak_of(command: list[str], log: Path, on_gpu: bool) -> tuple[float, float]:
    """Run `python -m d1 ...`; its peak memory in GB, resident or of the GPU, and its seconds. RuntimeError, with its
    last lines, if it fails."""
    started = time.perf_counter()
    settings = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"} | ({} if on_gpu else {"ACCELERATE_USE_CPU": "true"})
    words = [sys.executable, *(["-c", ON_GPU] if on_gpu else ["-m", "d1"]), *command]
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=os.environ | settings, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"d1 {' '.join(command)} failed: {log.read_text()[-2000:]}")
    held = re.findall(r"^peak bytes (\d+)$", log.read_text(), re.MULTILINE) if on_gpu else [used.ru_maxrss * 1024]
    return int(held[-1]) / 1e9, time.perf_counter() - started


SHAPES = {"sft": ("1", "256"), "rl": ("2", "192"), "eval": ("2", "192")}  # rows and tokens of a batch


def estimate(checkpoint: Path, stage: str, args: argparse.Namespace) -> float | None:
    """GB that `d1 fit` computes for a stage's command, without those of CUDA; None if it knows no such stage."""
    if stage not in SHAPES:
        return None
    shape = SHAPES[stage]
    words = ["fit", "--model_path", str(checkpoint), "--stage", stage]
    words += [] if args.d1 else ["--batch", shape[0], "--length", shape[1]]
    if stage != "eval":
        words += ["--load_in_4bit" if args.load_in_4bit else "--no-load_in_4bit"]
    if stage == "rl" and args.d1:
        words += ["--steps_per_generation", "2", "--length", "412"]
        words += [] if args.load_in_4bit else ["--merged_rollouts"]  # for which 80 GB are enough
    elif stage == "rl":
        words += ["--lora_targets", "attention", "--max_completion_length", "32"]
        words += ["--steps_per_generation", "1", "--block_length", "8", "--diffusion_steps", "16"]
    done = subprocess.run([sys.executable, "-m", "d1", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"^(CUDA|total).*?([\d.]+) GB$", done.stdout, re.MULTILINE))
    return float(numbers["total"]) - float(numbers["CUDA"])


def speeds(folder: Path) -> dict[str, float]:
    """Of RL, from its log: seconds of a forward pass over the rows that are sampled at once, and of the last step, an
    update alone."""
    log = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    steps = [line for line in lines if "step_time" in line]
    if not steps:
        return {}
    settings = json.loads((folder / RECORD).read_text())["settings"]
    rows = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
    batches = math.ceil(rows / (settings["rollout_batch_size"] or rows))
    passes = batches * steps[0]["sampling/forward_passes"]  # the metric is the passes of a row
    return {"seconds/pass": steps[0]["seconds/rollout"] / passes, "seconds/update": steps[-1]["step_time"]}


def size_of(folder: Path) -> float:
    """GB of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9


def run_stages(args: argparse.Namespace, checkpoint: Path) -> dict[str, dict[str, float | None]]:
    """Stage -> what was measured; also kept in `results.json`."""
    name = "-".join(["d1"] * args.d1 + ["4bit"] * args.load_in_4bit)
    folder = checkpoint.with_name(name) if name else checkpoint.parent
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    found: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
    if args.d1:
        todo = d1_commands(checkpoint, folder, args.load_in_4bit)
    else:
        block = getattr(native_config(str(checkpoint))[0], "block_size", None) or 8
        todo = commands(checkpoint, folder, block, RELEASED[args.model][0]["model_type"], args.load_in_4bit)
    for stage, command in tqdm(todo.items(), desc="stages"):
        if stage in found:
            continue
        shutil.rmtree(folder / stage, ignore_errors=True)  # of an attempt that was stopped
        peak, seconds = peak_of(command, folder / f"{stage}.log", on_gpu=args.d1)
        found[stage] = {"peak GB": peak, "d1 fit": estimate(checkpoint, stage, args), "seconds": seconds}
        found[stage] |= {"seconds/pass": None, "seconds/update": None} | speeds(folder / stage)
        found[stage]["saved GB"] = size_of(folder / stage)
        results.write_text(json.dumps(found, indent=2))
    return found


def main(args: argparse.Namespace) -> None:
    if args.d1 and not torch.cuda.is_available():
        raise ValueError("--d1 needs a GPU: leave it out")
    checkpoint = args.output_dir / (f"{args.model}-{args.layers}" if args.layers else args.model) / "checkpoint"
    config = RELEASED[args.model][0]
    if args.layers:
        config = config | {"n_layers" if "n_layers" in config else "num_hidden_layers": args.layers}
    if not checkpoint.is_dir():
        write_checkpoint(checkpoint, args.model, config, args.vocabulary)
    size = sum(2 * torch.Size(shape).numel() for _, shape in shapes(checkpoint))
    if size < psutil.virtual_memory().total:
        found = run_stages(args, checkpoint)
    else:
        found = {stage: {"d1 fit": estimate(checkpoint, stage, args)} for stage in SHAPES}
    rows = [
        [stage, *("" if value is None else f"{value:.2f}" for value in numbers.values())]
        for stage, numbers in found.items()
    ]
    machine = ", ".join(f"{what} {value}" for what, value in describe().items())
    head = f"{checkpoint.parent.name}, {size / 1e9:.2f} GB, on {machine}"
    sys.stdout.write(f"{head}\n\n{markdown_table(['stage', *next(iter(found.values()))], rows)}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=RELEASED, required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/true_size"))
    parser.add_argument("--layers", type=int, help="keep only the first layers, for a model that exceeds the memory")
    parser.add_argument("--load_in_4bit", action="store_true", help="train on NF4 weights: SFT and RL alone")
    parser.add_argument("--d1", action="store_true", help="with d1's settings, on one GPU of 80 GB")
    parser.add_argument("--vocabulary", type=Path, help="dream-7b, sdar-1.7b: folder of vocab.json and merges.txt")
    return parser


if __name__ == "__main__":
    run_script("true_size", lambda: main(make_parser().parse_args()))
