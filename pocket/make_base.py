"""Pretrain the pocket base model, some 5 minutes on one CPU core: python pocket/make_base.py --seed 0

A 0.2M-parameter bidirectional Llama learns 4x4 Sudoku by masked diffusion (LLaDA, arXiv 2502.09992), on puzzles drawn
on the fly from the solution grids of the training set alone. Stage 1 reads careful answers only and learns to solve;
stage 2 reads a mixture of quick, scanning and careful answers, as web text is mixed, which hides that skill.
Killed? The same command goes on from the last checkpoint and ends at the same weights. The model card is written from
what was measured on validation puzzles.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_tokenizer import PROMPT_TOKENS, build_tokenizer
from sudoku_traces import ROOT, as_digits, careful_completion, draw_puzzles, mixed_completion, training_grids
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from d1.masking import draw_mask, keyed_generator, noise_level
from d1.models import prepare
from d1.models.head import body_and_head
from d1.models.kinds import block_size
from d1.models.two_streams import two_stream_states
from d1.runs.entry import run_script
from d1.sampling import generate
from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids

Writer = Callable[[np.ndarray, np.ndarray, np.random.Generator], str]  # puzzle, solution -> answer

BATCH_SIZE = 64
COMPLETION_TOKENS = (28, 32, 40)  # a batch's canvas; what an answer does not fill is <eos>
STAGES = (("careful answers", careful_completion, 3e-3), ("mixed answers", mixed_completion, 1e-3))
WARMUP_STEPS = 50
EVAL_LENGTHS = (32, 40)
CHECKPOINT_EVERY = 200


@dataclass
class Progress:
    """How far a run is and what it has measured: seconds of the processor, and in `accuracy[stage][length]` the share
    of puzzles solved exactly."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: list[dict[int, float]] = field(default_factory=list)


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int, block_size: int | None = None) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.is_causal = False  # Transformers then attends both ways, here and wherever the saved config is loaded
    if block_size is not None:
        config.block_size = block_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return prepare(LlamaForCausalLM(config))


def draw_batch(
    tokenizer: PreTrainedTokenizerBase,
    write: Writer,
    solutions: np.ndarray,
    all_grids: np.ndarray,
    key: tuple[int, ...],
) -> Tensor:
    """Ids of prompts and answers, (BATCH_SIZE, PROMPT_TOKENS + one of COMPLETION_TOKENS), a function of `key`."""
    rng = np.random.default_rng(key)
    length = PROMPT_TOKENS + rng.choice(COMPLETION_TOKENS)
    conversations = [
        [
            {"role": "user", "content": "".join(map(str, puzzle))},
            {"role": "assistant", "content": write(puzzle, solution, rng)},
        ]
        for puzzle, solution in zip(*draw_puzzles(solutions, BATCH_SIZE, all_grids, rng), strict=True)
    ]
    ids = torch.full((BATCH_SIZE, length), tokenizer.eos_token_id)
    for row, tokens in enumerate(tokenizer.apply_chat_template(conversations, return_dict=False)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids


def diffusion_loss(model: LlamaForCausalLM, ids: Tensor, mask_token_id: int, key: tuple[int, ...]) -> Tensor:
    """LLaDA's loss: cross-entropy over t' of the masked answer tokens, over all answer tokens.

    Of a block-causal model each block has its own t' (BD3-LM, arXiv 2503.09573).
    """
    generator = keyed_generator(*key)
    rows, length = ids.shape
    block = torch.arange(length) // (block_size(model.config) or length)
    # Each row's t is uniform, but the batch covers (0, 1) evenly, which takes noise out of the loss.
    t = (torch.rand(1, int(block[-1]) + 1, generator=generator) + torch.arange(rows).unsqueeze(1) / rows) % 1
    p = noise_level(t)[:, block]
    answer = (torch.arange(length) >= PROMPT_TOKENS).expand(rows, -1)
    masked = draw_mask(answer, p, generator)
    logits = answer_logits(model, ids, ids.masked_fill(masked, mask_token_id))
    losses = cross_entropy(logits.transpose(1, 2), ids[:, PROMPT_TOKENS:], reduction="none")
    return (losses * masked[:, PROMPT_TOKENS:] / p[:, PROMPT_TOKENS:]).sum() / losses.numel()


def answer_logits(model: LlamaForCausalLM, clean: Tensor, noised: Tensor) -> Tensor:
    """Logits (rows, answer, vocabulary) of noised answers, of a block-causal model behind the clean text."""
    size = block_size(model.config)
    if size is None:
        return model(input_ids=noised, logits_to_keep=torch.arange(PROMPT_TOKENS, noised.shape[1])).logits
    states = two_stream_states(model, clean, noised[:, PROMPT_TOKENS // size * size :], None)
    return body_and_head(model)[1](states[:, PROMPT_TOKENS % size :])


def exact_solve_rate(model: Any, tokenizer: PreTrainedTokenizerBase, gen_length: int) -> float:
    """Share of the validation puzzles solved exactly: greedy, blocks of 8, gen_length / 2 steps."""
    task = load_task("sudoku")
    rows = task.load_rows("validation")
    prompts = torch.tensor(tokenizer.apply_chat_template(list(rows["prompt"]), return_dict=False))
    ids = generate(
        model.eval(),
        prompts,
        torch.ones_like(prompts),
        mask_token_id=tokenizer.mask_token_id,
        gen_length=gen_length,
        block_length=8,
        steps=gen_length // 2,
    )
    texts = tokenizer.batch_decode(ids[:, PROMPT_TOKENS:], skip_special_tokens=True)
    return sum(task.score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)) / len(texts)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.1)


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)  # a kill while writing leaves the previous one


def pretrain(
    tokenizer: PreTrainedTokenizerBase,
    solutions: np.ndarray,
    steps: tuple[int, int],
    seed: int,
    checkpoint: Path,
    checkpoint_every: int = CHECKPOINT_EVERY,
    blocks: int | None = None,
) -> tuple[LlamaForCausalLM, Progress]:
    """Both stages, `steps` of them each; goes on from `checkpoint` where that file exists."""
    model, progress = build_model(tokenizer, seed, blocks), Progress()
    optimizer = new_optimizer(model)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    all_grids = as_digits(solution_grids())
    bar = tqdm(total=sum(steps), initial=sum(steps[: progress.stage]) + progress.step, unit="step")
    while progress.stage < len(STAGES):
        name, write, peak_lr = STAGES[progress.stage]
        bar.set_description(name)
        while progress.step < steps[progress.stage]:
            started = time.process_time()
            key = (seed, progress.stage, progress.step)
            rate = min(1.0, (progress.step + 1) / WARMUP_STEPS)
            rate *= 0.5 * (1 + math.cos(math.pi * progress.step / steps[progress.stage]))
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * rate
            ids = draw_batch(tokenizer, write, solutions, all_grids, key)
            loss = diffusion_loss(model.train(), ids, tokenizer.mask_token_id, key)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.tokens += ids.numel()
            progress.seconds += time.process_time() - started
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if progress.step % checkpoint_every == 0:
                save_checkpoint(checkpoint, model, optimizer, progress)
        progress.accuracy.append({n: exact_solve_rate(model, tokenizer, n) for n in EVAL_LENGTHS})
        bar.write(f"after {name}: exact-solve rate on validation puzzles {progress.accuracy[-1]}")
        progress.stage, progress.step, optimizer = progress.stage + 1, 0, new_optimizer(model)
        save_checkpoint(checkpoint, model, optimizer, progress)
    bar.close()
    return model, progress


MODEL_CARD = """\
# Pocket base model

A masked diffusion language model with {parameters:,} parameters that fills in 4x4 Sudoku grids: a {attention} Llama
(`{field}`) trained from scratch with {loss} loss. It exists so that the whole of d1 can be run and checked on
a CPU, and for nothing else.

It was made by `python pocket/make_base.py --seed {seed}{flags}`: \
{tokens:.1f}M tokens in {minutes:.0f} minutes on one thread.
Another CPU or version of torch rounds differently and ends at other weights with the same behaviour.

| exact-solve rate, {puzzles} validation puzzles, greedy | length {lengths[0]} | length {lengths[1]} |
| --- | --- | --- |
| after stage 1, {steps[0]} steps on careful answers | {first[0]:.3f} | {first[1]:.3f} |
| after stage 2, {steps[1]} steps on mixed answers (this model) | {last[0]:.3f} | {last[1]:.3f} |

**What it could do before its last stage.** Stage 1 taught it to solve. Stage 2 then buried that skill under answers of
mixed quality, as text of the web is mixed: half `quick` (the smallest digit missing from the row; a third of these
truncated, without tags or rambling), 30% `scan` (the smallest digit missing from the row and the column), 20%
`careful` (right). SFT and RL on this model recover and sharpen a skill that the mixture hid. They do not create it.

**Data.** Puzzles with six empty cells and one solution, drawn on the fly from the {grids} solution grids of
`dataset/sudoku_train.csv`; the grids of the validation and test puzzles were never seen. The model was judged on
validation puzzles only.

**Text.** One token a cell and value (`c3`: the third cell in reading order holds 3; `c.`: it is empty). A prompt is 18
tokens; the chat template makes it of the 16 digits that end a user's message. An answer is
`<reasoning> careful a3 ... </reasoning> <answer> a3 b1 ... p4 </answer>`, 28 tokens with its `<eos>`. There is no
unknown token: text outside this vocabulary is an error. Completions of 28, 32 and 40 tokens were trained.
"""


FULL = {"attention": "bidirectional", "field": "is_causal: false", "loss": "LLaDA's", "flags": ""}
BLOCKS = {
    "attention": "block-causal",
    "field": "block_size: {size}",
    "loss": "BD3-LM's",
    "flags": " --block_size {size} --output_dir pocket/block_base",
}


def model_card(model: LlamaForCausalLM, progress: Progress, steps: tuple[int, int], seed: int, grids: int) -> str:
    size = block_size(model.config)
    kind = {name: text.format(size=size) for name, text in (BLOCKS if size else FULL).items()}
    first, last = ([stage[length] for length in EVAL_LENGTHS] for stage in progress.accuracy)
    return MODEL_CARD.format(
        parameters=model.num_parameters(),
        seed=seed,
        tokens=progress.tokens / 1e6,
        minutes=progress.seconds / 60,
        puzzles=len(load_task("sudoku").load_rows("validation")),
        lengths=EVAL_LENGTHS,
        steps=steps,
        first=first,
        last=last,
        grids=grids,
        **kind,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs=2, default=(2000, 400), metavar=("STAGE1", "STAGE2"))
    parser.add_argument("--block_size", type=int, help="attend block-causally, to blocks of so many tokens")
    parser.add_argument("--data_file", type=Path, default=ROOT / "dataset" / "sudoku_train.csv")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "pocket" / "base")
    parser.add_argument("--checkpoint_dir", type=Path, default=ROOT / "runs" / "pocket-base")
    parser.add_argument("--threads", type=int, default=1, help="more than 2 only slow so small a model down")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    steps, solutions, tokenizer = tuple(args.steps), training_grids(args.data_file), build_tokenizer()
    blocks = f"-blocks{args.block_size}" if args.block_size else ""
    checkpoint = args.checkpoint_dir / f"seed{args.seed}-{steps[0]}-{steps[1]}{blocks}.pt"
    model, progress = pretrain(tokenizer, solutions, steps, args.seed, checkpoint, blocks=args.block_size)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    card = model_card(model, progress, steps, args.seed, len(solutions))
    (args.output_dir / "README.md").write_text(card)
    checkpoint.unlink()


if __name__ == "__main__":
    run_script("make_base.py", lambda: main(make_parser().parse_args()))
