"""Whole optimizer steps by phase: the real trainers on small jobs, the same with the published pieces, the bare passes.

    rl    one rollout and its mu optimizer steps: sampling, rewards, old and reference log-probs, updates, AdamW
    sft   a few optimizer steps: collating, noise, loss and gradients, AdamW

`pocket` is the pocket model with its own task and data, as `diffu-grpo/pocket.yaml` trains it; the other sizes are
random models on random words.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback, TrainingArguments

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("", "SFT", "diffu-grpo"))

from diffu_grpo_config import DiffuGRPOConfig
from diffu_grpo_trainer import DiffuGRPOTrainer
from sft_data import preprocess_dataset
from sft_trainer import IGNORED, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer

from benchmarks import published
from benchmarks.machine import now, race, random_model
from d1.masking import noise_level
from d1.models import load_model, load_tokenizer
from d1.models.head import body_and_head, logit_parts
from d1.sampling import Rollout
from d1.sampling.reveal import reveal_schedule
from d1.tasks import load_task, text_of

ROOT = Path(__file__).parents[1]
POCKET_PROMPT = 18  # tokens of the pocket model's prompts
WORDS = ["<pad>", "<bos>", "<eos>", "<mask>"]  # ids 0 to 3, as in random_model's config
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<bos> {{ message['content'] }} "
    "{% else %}{{ message['content'] }} <eos>{% endif %}{% endfor %}"
)


class Clock:
    """Wall and processor seconds by phase. A phase entered within another stops the outer one's clock."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.open: list[str] = []
        self.since = 0.0, 0.0

    def turn(self) -> None:
        """Books the time since the last turn to the innermost open phase."""
        wall, cpu = now()
        if self.open:
            self.wall[self.open[-1]] += wall - self.since[0]
            self.cpu[self.open[-1]] += cpu - self.since[1]
        self.since = wall, cpu

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.turn()
        self.open.append(name)
        try:
            yield
        finally:
            self.turn()
            self.open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Books what `owner.method` takes to phase `name` from now on."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


class ClockedTraining(TrainerCallback):
    """Clocks a training run from its beginning to its end, setting up aside; the optimizer's steps are a phase."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hooked: Any = None

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if inner is not self.hooked:
            self.hooked, step = inner, contextlib.ExitStack()
            inner.register_step_pre_hook(lambda *_: step.enter_context(self.clock.phase("optimizer")))
            inner.register_step_post_hook(lambda *_: step.close())
        self.clock.turn()
        self.clock.open.append("trainer")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.turn()
        self.clock.open.pop()


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word: w4, w5, ..."""
    words = {word: index for index, word in enumerate([*WORDS, *(f"w{n}" for n in range(len(WORDS), vocabulary))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token"), WORDS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_words(count: int, vocabulary: int, source: random.Random) -> str:
    return " ".join(f"w{source.randrange(len(WORDS), vocabulary)}" for _ in range(count))


def different_words(completions: list, **columns: Any) -> list[float]:
    """The reward of random words: the share of them that differ."""
    texts = [text_of(completion).split() for completion in completions]
    return [len(set(words)) / max(len(words), 1) for words in texts]


# --- Reinforcement learning ------------------------------------------------------------------------------------------


class PublishedRL(DiffuGRPOTrainer):
    """The trainer with the published rollout, and scores of all masks in one forward pass with full logits."""

    def _sample(self, ids: Tensor, mask: Tensor) -> Rollout:
        """The record of the rollout, which d1 does not keep, is zeros."""
        sampled = published.generate(
            self.accelerator.unwrap_model(self.model),
            ids,
            mask,
            mask_token_id=self.mask_token_id,
            gen_length=self.max_completion_length,
            block_length=self.args.block_length,
            steps=self.args.diffusion_steps,
            temperature=self.args.temperature,
        )
        completions, steps = sampled[:, ids.shape[1] :], torch.full_like(ids[:, 0], self.args.diffusion_steps)
        zeros = torch.zeros(completions.shape, device=ids.device)
        return Rollout(completions, zeros, zeros.long(), zeros, steps, steps * sampled.shape[1])

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        """Entropies, which d1 does not compute, are zeros."""
        noise = self._prompt_noise if self._prompt_noise.dim() == 3 else self._prompt_noise.unsqueeze(1)
        logps = published.score(
            model,
            input_ids[:, :-logits_to_keep],
            attention_mask[:, :-logits_to_keep],
            input_ids[:, -logits_to_keep:],
            noise,
            mask_token_id=self.mask_token_id,
            gen_length=self.max_completion_length,
        )
        if self._prompt_noise.dim() == 3:
            return logps, None, None
        self._new_logps = logps[:, 0].detach()
        return logps[:, 0], torch.zeros_like(self._new_logps), None


def group_size(rows: int) -> int:
    """Completions a prompt in a rollout of `rows`: all of them, or about 8."""
    return rows // max(1, rows // 8)


def rl_trainer(kind: type[DiffuGRPOTrainer], args: Any, folder: Path, clock: Clock) -> Any:
    """A trainer whose every `train()` is one rollout with its mu optimizer steps, watched by `clock`."""
    if args.size == "pocket":
        path = str(ROOT / "pocket" / "base")
        task = load_task("sudoku")
        model, tokenizer, rewards, rows = load_model(path), load_tokenizer(path), task.REWARDS, task.load_rows("train")
    else:
        model, rewards, source = random_model(args.size), [different_words], random.Random(0)
        vocabulary = model.config.vocab_size
        tokenizer = word_tokenizer(vocabulary)
        questions = [random_words(args.prompt - 1, vocabulary, source) for _ in range(64)]  # and a <bos>
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question}]} for question in questions])
    config = DiffuGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=args.rows,
        num_generations=group_size(args.rows),
        max_prompt_length=args.prompt,
        max_completion_length=args.length,
        block_length=args.block,
        diffusion_steps=args.steps,
        num_iterations=args.mu,
        max_steps=args.mu,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=args.mu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer: Any = kind(model, list(rewards), config, rows, tokenizer, callbacks=[ClockedTraining(clock)])
    trainer.remove_callback(PrinterCallback)
    clock.watch(trainer, "_generate_and_score_completions", "bookkeeping")
    clock.watch(trainer, "_generate_single_turn", "rollout")
    clock.watch(trainer, "_calculate_rewards", "rewards")
    clock.watch(trainer, "training_step", "update")
    clock.watch(trainer, "_clip_grad_norm", "optimizer")
    score = trainer._get_per_token_logps_and_entropies

    def timed_score(*values: Any, **options: Any) -> Any:
        with clock.phase("scoring" if trainer._prompt_noise.dim() == 3 else "update"):
            return score(*values, **options)

    trainer._get_per_token_logps_and_entropies = timed_score
    return trainer


def bare_rl(trainer: Any, clock: Clock) -> None:
    """The passes that the trainer's last rollout and updates cannot do without, on the same rows.

    Sampling: each step, the body over prompt and canvas, its last layer and the head at the positions still hidden in
    the block; with the EOS stop, of the rows that have not ended before it.
    Scoring: body, and head at the positions up to each row's EOS, mu times for the policy and mu for the reference.
    Updates: the same mu times, and the backward pass from a given gradient of the logits.
    """
    args, [batch] = trainer.args, trainer._buffered_inputs
    prompt, hidden = batch["prompt_ids"], batch["completion_mask"].bool()
    canvas = prompt.new_full((len(prompt), args.max_completion_length), trainer.mask_token_id)
    ids = torch.cat([prompt, canvas], dim=1)
    mask = None
    if not batch["prompt_mask"].all():
        mask = torch.cat([batch["prompt_mask"], torch.ones_like(canvas)], dim=1)

    def logits(of: Any) -> Tensor:
        body, head = body_and_head(of)
        states = body(ids, mask)[:, prompt.shape[1] :]
        return head(states[:, : hidden.shape[1]][hidden])

    with clock.phase("rollout"), torch.no_grad(), trainer.accelerator.autocast():
        body, _ = body_and_head(trainer.model)
        end, lengths = prompt.shape[1], hidden.sum(1)
        for reveals in reveal_schedule(args.max_completion_length, args.block_length, args.diffusion_steps):
            live = lengths > end - prompt.shape[1] if trainer.eos_stop else torch.ones_like(lengths, dtype=torch.bool)
            if not live.any():
                break
            rows, visible = ids[live], None if mask is None else mask[live]
            end += sum(reveals)
            for left in itertools.accumulate(reveals[:-1], operator.sub, initial=sum(reveals)):
                states = body(rows, visible, torch.arange(end - left, end, device=ids.device).expand(len(rows), -1))
                for _ in logit_parts(trainer.model, states):  # as the sampler takes them: the faster way
                    pass
    with clock.phase("scoring"), torch.no_grad(), trainer.accelerator.autocast():
        for scored in [trainer.model, trainer.ref_model] * args.num_iterations:
            logits(scored)
    with clock.phase("update"):
        for _ in range(args.num_iterations):
            with trainer.accelerator.autocast():
                found = logits(trainer.model)
            found.backward(torch.ones_like(found))
            trainer.model.zero_grad()


# --- Fine-tuning -----------------------------------------------------------------------------------------------------


class PublishedSFT(dLLMTrainer):
    """The trainer with the logits of every position; its rows are filled to `max_length`."""

    def row_losses(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        labels = inputs["labels"].masked_fill(inputs["input_ids"] == inputs["labels"], IGNORED)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
        return losses.view(labels.shape).sum(1) / noise_level(inputs["t"])


def sft_trainer(kind: type[dLLMTrainer], args: Any, folder: Path, clock: Clock) -> Any:
    """A trainer whose every `train()` is `args.mu` optimizer steps of `args.rows` rows, watched by `clock`.

    Random rows have a prompt of `args.prompt` tokens and an answer of a quarter to all of `args.length`.
    """
    if args.size == "pocket":
        path = str(ROOT / "pocket" / "base")
        model, tokenizer = load_model(path), load_tokenizer(path)
        data = [json.loads(line) for line in (ROOT / "dataset" / "sudoku_sft.jsonl").read_text().splitlines()[:256]]
    else:
        model, source = random_model(args.size), random.Random(0)
        vocabulary = model.config.vocab_size
        tokenizer = word_tokenizer(vocabulary)
        data = [
            {
                "prompt": random_words(args.prompt - 1, vocabulary, source),
                "completion": random_words(source.randint(args.length // 4, args.length - 1), vocabulary, source),
            }
            for _ in range(128)
        ]
    max_length = args.prompt + args.length
    rows, _ = preprocess_dataset(Dataset.from_list(data), tokenizer, max_length, 0.0, num_proc=1)
    padding = "max" if kind is PublishedSFT else "batch"
    config = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=args.rows,
        max_steps=args.mu,
        learning_rate=1e-6,
        weight_decay=0.1,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        logging_steps=args.mu,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer: Any = kind(
        model=model,
        args=config,
        data_collator=dLLMDataCollator(tokenizer),
        train_dataset=dLLMSFTDataset(rows, tokenizer, max_length, eos_padding=padding),
        processing_class=tokenizer,
        callbacks=[ClockedTraining(clock)],
    )
    trainer.remove_callback(PrinterCallback)
    clock.watch(trainer, "get_batch_samples", "batches")
    clock.watch(trainer, "training_step", "update")
    clock.watch(trainer, "_clip_grad_norm", "optimizer")
    compute_loss = trainer.compute_loss

    def kept(model: Any, inputs: dict[str, Tensor], *values: Any, **options: Any) -> Any:
        trainer.seen.append(inputs)
        return compute_loss(model, inputs, *values, **options)

    trainer.seen, trainer.compute_loss = [], kept
    return trainer


def bare_sft(trainer: Any, clock: Clock) -> None:
    """Body, head at the hidden positions, and the backward pass from a given gradient of the logits, for the rows of
    the trainer's last steps."""
    body, head = body_and_head(trainer.model)
    with clock.phase("update"):
        for inputs in trainer.seen[-trainer.args.max_steps :]:
            hidden = (inputs["input_ids"] != inputs["labels"]) & (inputs["labels"] != IGNORED)
            mask = inputs["attention_mask"]
            with trainer.accelerator.autocast():
                logits = head(body(inputs["input_ids"], None if mask.all() else mask)[hidden])
            logits.backward(torch.ones_like(logits))
            trainer.model.zero_grad()


def race_steps(kind: str, args: Any, folder: Path) -> dict[str, Any]:
    """Ours, the bare passes and the published way: the race, seconds by phase (medians), and the share of the bare."""
    make, bare = (rl_trainer, bare_rl) if kind == "rl" else (sft_trainer, bare_sft)
    ways: Any = (DiffuGRPOTrainer, PublishedRL) if kind == "rl" else (dLLMTrainer, PublishedSFT)
    clocks = {name: Clock() for name in ("ours", "bare", "published")}
    ours: Any = make(ways[0], args, folder, clocks["ours"])
    theirs: Any = make(ways[1], args, folder, clocks["published"])
    runs = {"ours": ours.train, "bare": lambda: bare(ours, clocks["bare"]), "published": theirs.train}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}

    def timed(name: str) -> tuple[float, float]:
        clock = clocks[name]
        clock.wall.clear()
        clock.cpu.clear()
        runs[name]()
        rounds[name].append((clock.wall if torch.cuda.is_available() else clock.cpu).copy())
        return sum(clock.wall.values()), sum(clock.cpu.values())

    results = race({name: functools.partial(timed, name) for name in runs}, args.repeats, base="bare", clocked=True)
    phases = {
        phase: {name: statistics.median(seconds[phase] for seconds in found[1:]) for name, found in rounds.items()}
        for phase in rounds["ours"][0]
    }
    share, low, high = (1 / results["ours"][key] for key in ("ratio", "ratio_high", "ratio_low"))
    remark = f"Share of the bare forward and backward passes in our whole: {share:.1%} ({low:.1%} to {high:.1%})."
    return {"results": results, "seconds by phase": phases, "remarks": [remark]}
