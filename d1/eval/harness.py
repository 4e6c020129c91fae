"""python harness.py --model_path PATH --tasks gsm8k,hellaswag [--num_fewshot 4] [--apply_chat_template] ...

Runs the tasks of lm-evaluation-harness (`pip install -e ..[harness]`) on a masked diffusion model. The flags below set
how the model samples and scores; all others are `lm_eval`'s own (`lm_eval run --help`): tasks, examples, chat template,
system prompt, --limit, --include_path, --output_path, --log_samples, --gen_kwargs. On several GPUs:
`accelerate launch harness.py ...`.

The task sets the temperature and the stop strings (change them with `--gen_kwargs temperature=0.9,do_sample=True`), and
the length of a completion, unless --gen_length is given. With `--use_cache PATH`, a killed run that is started again
does not recompute finished requests. The harness's cache does not name the model, but `PATH_identity.json` does:
another model or other settings need another PATH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from d1.eval.completions import (
    Prompt,
    SingleTurn,
    generate_rows,
    join_processes,
    leave_processes,
    load_model_for,
)
from d1.eval.flags import EvalModelFlags, StreamFlags
from d1.eval.run import parse_settings
from d1.files import read_object, write_atomically
from d1.masking import keyed_generator
from d1.models.attention import left_pad
from d1.models.head import NotFiniteError, why_not_finite
from d1.models.kinds import block_size, check_room, has_masks, max_positions
from d1.models.tokenizer import check_chat_template, cut_at_stop, encode_prompt, end_ids, render_prompt
from d1.ranges import COUNT, SEED, setting
from d1.runs.cli import SettingsParser
from d1.runs.record import CONTENTS, hash_model
from d1.sampling import SamplingSettings, rollout_steps
from d1.sampling.graphs import check_compile
from d1.sampling.settings import sampling_flag, sampling_settings
from d1.scoring import Views, score
from d1.scoring.inputs import rotation

if TYPE_CHECKING:  # an optional package
    from lm_eval.api.instance import Instance


# --- Log-likelihoods of given answers ---------------------------------------------------------------------------------

# LLaDA's lower bound of log p(answer | prompt) for an answer of L tokens: E[L / l x the sum of log p over the hidden
# tokens], where l is uniform on 1..L and l of the L tokens are hidden; the prompt never is (arXiv 2502.09992, equation
# 14 and appendix B.5).

Pair = tuple[list[int], list[int]]  # the ids of a prompt and of an answer


def llada_views(length: int, draws: int, generator: Generator) -> Views:
    """The masks of one answer of `length` tokens, on a canvas of the same length: (1, views, length) each.

    An answer of one token has only one mask, and its estimate is log p itself.
    """
    # The counts l of the draws are spread evenly, as in LLaDA's code.
    even = rotation(1, draws, torch.rand((), generator=generator, dtype=torch.float64))
    ranks = torch.rand(1, draws, length, generator=generator).argsort(dim=-1, stable=True).argsort(-1)
    counts = 1 + (even * length).long()
    drawn = (ranks < counts.unsqueeze(-1))[0]  # (draws, length)
    # Equal masks become one view with the sum of their weights.
    hidden, view_of_draw = drawn.unique(dim=0, return_inverse=True)
    draw_weights = drawn * (length / (draws * counts)).float().T
    weights = torch.zeros(hidden.shape).index_add(0, view_of_draw, draw_weights)
    return Views(hidden.unsqueeze(0), weights.unsqueeze(0))


def pair_seed(pair: Pair) -> int:
    """A number that depends on the pair's ids alone: so do the pair's masks."""
    return int.from_bytes(hashlib.sha256(json.dumps(pair).encode()).digest()[:8], "big")


def batches(
    pairs: Sequence[Pair], batch_size: int, pad_token_id: int, device: Any
) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
    """Per batch the numbers of its pairs, ids and attention mask of their left-padded prompts, and their answers.

    Answers in a batch have equal lengths; the longest come first, and empty ones are left out.
    """

    def by_length(number: int) -> tuple[int, int]:
        prompt, answer = pairs[number]
        return -len(answer), -len(prompt)

    order = [number for number, (_, answer) in enumerate(pairs) if answer]
    order.sort(key=by_length)
    while order:
        length = len(pairs[order[0]][1])
        batch = [number for number in order[:batch_size] if len(pairs[number][1]) == length]
        prompts = [pairs[number][0] for number in batch]
        answers = [pairs[number][1] for number in batch]
        ids, mask = left_pad(prompts, pad_token_id)
        yield batch, ids.to(device), mask.to(device), torch.tensor(answers, device=device)
        order = order[len(batch) :]


@torch.no_grad()
def log_likelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    mask_token_id: int,
    pad_token_id: int,
    draws: int,
    seed: int = 0,
    batch_size: int = 1,
) -> Iterator[tuple[int, float]]:
    """The estimated bound of each pair in nats, as (number of the pair, bound), in the order of computation.

    In fp32 an estimate depends only on `draws`, `seed` and its own pair.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        draws: masks per answer, each with a forward pass; equal masks share one.
        batch_size: sequences per forward pass.

    Raises:
        NotFiniteError: a pair's log-probabilities are not finite.
    """
    for numbers, ids, mask, answers in batches(pairs, batch_size, pad_token_id, model.device):
        length = answers.shape[1]
        noise, weights = [], []
        for number in numbers:
            generator = keyed_generator(seed, pair_seed(pairs[number]))
            row_views = llada_views(length, draws, generator)
            noise.append(row_views.noise[0])
            weights.append(row_views.weights[0])
        # One batch of views: rows with fewer of them get views of weight 0; no prompt token is hidden.
        answer_noise = pad_sequence(noise, batch_first=True)  # (rows, views, length)
        canvas_noise = torch.nn.functional.pad(answer_noise, (ids.shape[1], 0))
        views = Views(canvas_noise, pad_sequence(weights, batch_first=True))
        scores = score(
            model,
            ids,
            mask,
            answers,
            views.each(partial(torch.Tensor.to, device=ids.device)),
            mask_token_id=mask_token_id,
            gen_length=length,
            views_at_once=max(batch_size // len(numbers), 1),
        )
        bounds = scores.logps.double().sum(-1).tolist()
        check_finite(model, pairs, numbers, map(math.isfinite, bounds), mask_token_id)
        yield from zip(numbers, bounds, strict=True)


def check_finite(
    model: Any, pairs: Sequence[Pair], numbers: Sequence[int], finite: Iterable[bool], mask_token_id: int
) -> None:
    """Raise NotFiniteError, which names the layer, for the first pair of a batch that is not `finite`."""
    for number, is_finite in zip(numbers, finite, strict=True):
        if not is_finite:
            prompt, answer = pairs[number]
            masked = prompt + [mask_token_id] * len(answer)
            texts = torch.tensor([masked, prompt + answer], device=model.device)
            raise NotFiniteError(number, why_not_finite(model, texts))


def are_greedy(
    model: Any, pairs: Sequence[Pair], *, mask_token_id: int, pad_token_id: int, batch_size: int
) -> Iterator[tuple[int, bool]]:
    """Whether greedy sampling gives the answer, as (number of the pair, bool), on a canvas of the answer's length, with
    one token per step, the most probable first: `suffix_greedy_prediction` in LLaDA's evaluation code.

    Raises:
        NotFiniteError: a pair's log-probabilities are not finite.
    """
    for numbers, ids, mask, answers in batches(pairs, batch_size, pad_token_id, model.device):
        length = answers.shape[1]
        settings = SamplingSettings(gen_length=length, block_length=length, steps=length)
        right, finite = torch.ones(2, len(numbers), dtype=torch.bool, device=ids.device)
        for step in rollout_steps(model, ids, mask, settings, mask_token_id=mask_token_id):
            targets = answers[step.rows].gather(1, step.positions - ids.shape[1])
            is_wrong = (step.ids != targets) & step.revealed
            is_not_finite = ~step.logps.isfinite() & step.revealed
            right[step.rows] &= ~is_wrong.any(1)
            finite[step.rows] &= ~is_not_finite.any(1)
            if not right.any():  # each row has revealed a wrong token
                break
        check_finite(model, pairs, numbers, finite.tolist(), mask_token_id)
        yield from zip(numbers, right.tolist(), strict=True)


# --- The command ------------------------------------------------------------------------------------------------------

DEFAULT_LENGTH = 256  # tokens per completion if neither the flags nor the task name a number, as in the harness
SUPPORTED_KWARGS = (
    "until",
    "max_gen_toks",
    "do_sample",
    "temperature",
)  # the supported part of a task's generation_kwargs
SAMPLING_KWARGS = ("top_p", "top_k", "min_p", "typical_p")  # these have no effect on greedy decoding
NEUTRAL_VALUES = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "num_beams": 1}


@dataclass(frozen=True, kw_only=True)
class HarnessModelFlags(EvalModelFlags):
    batch_size: Annotated[int, COUNT] = setting(32, "sequences per forward pass of each process")


@dataclass(frozen=True, kw_only=True)
class HarnessFlags(StreamFlags, HarnessModelFlags):
    gen_length: int | None = sampling_flag(
        "gen_length", help="tokens per completion (default: the task's maximum)", group="tasks that generate"
    )
    # The task sets the temperature, and `draw_seed` the seed.
    temperature: float = 0.0
    seed: int = 0
    eos_stop: bool = True
    mc_num: Annotated[int, COUNT] = setting(
        128, "masks per answer (default: 128, as LLaDA)", group="tasks that compare log-likelihoods"
    )
    draw_seed: Annotated[int, SEED] = setting(0, "seed of masks and sampling; --seed is the harness's", group="")
    harness: tuple[str, ...] = ()  # the words of `lm_eval run`


class PassingParser(SettingsParser[HarnessFlags]):
    """A parser that keeps unknown flags, as `harness`."""

    passes_unknown = True

    def parse_args(self, args: Any = None, namespace: Any = None) -> HarnessFlags:  # type: ignore[override]
        known, rest = self.parse_known_args(args, namespace)
        return HarnessFlags(**vars(known), harness=tuple(rest))


def make_parser() -> PassingParser:
    return PassingParser(HarnessFlags, about=__doc__)


def main(args: HarnessFlags) -> None:
    """Register the model "d1" and run lm_eval's own command."""
    config = args.read_folder().config
    length, steps = args.gen_length, args.diffusion_steps
    if length is None:  # the task's own length is not known yet, nor how many steps it can have
        length = steps = 1024
    # Nor is its temperature. With uniform noise, and by the sampler scdd, tokens are only drawn.
    draws = not has_masks(config) or args.sampler == "scdd"
    longest = replace(args, gen_length=length, diffusion_steps=steps or length, temperature=1.0 if draws else 0.0)
    flags = {}
    for flag in fields(args):
        if flag.metadata and flag.name != "batch_size":  # the others are no flags
            flags[flag.name] = getattr(args, flag.name)
    flags["block_length"] = sampling_settings(longest, config).block_length
    check_compile(args.compile, config, kernel=args.attn_implementation)
    register()
    check_cache(args.harness, flags)
    from lm_eval.__main__ import cli_evaluate

    set_flags = {name: value for name, value in flags.items() if value is not None}
    command = ["lm_eval", "run", "--model", "d1", "--model_args", json.dumps(set_flags)]
    sys.argv = [*command, "--batch_size", str(args.batch_size), *args.harness]
    cli_evaluate()
    leave_processes()


def check_cache(harness: Sequence[str], flags: dict[str, Any]) -> None:
    """Refuse (ValueError) a `--use_cache` with answers of another model or other settings, which a file next to it
    names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--use_cache", "-c")
    prefix = parser.parse_known_args(list(harness))[0].use_cache
    if prefix is None:
        return

    identity: dict[str, Any] = {
        CONTENTS + "model_path": hash_model(flags["model_path"], flags["checkpoint_path"] or None)
    }
    for name, value in flags.items():
        if name not in ("model_path", "checkpoint_path"):
            identity[name] = value
    file = Path(f"{prefix}_identity.json")
    if file.is_file():
        cached = {"compile": "none"}  # files from before this setting say nothing of it
        cached.update(read_object(file, "it is damaged: choose another PATH"))
        changes = []
        for name, value in identity.items():
            if cached.get(name) != value:
                changes.append(f"{name} {cached.get(name)} (now {value})")
        if changes:
            raise ValueError(
                f"--use_cache {prefix} has answers of {', '.join(changes)}: choose another PATH, or delete it"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(identity, indent=1))


# --- The model that the harness calls ---------------------------------------------------------------------------------


@lru_cache
def register() -> type:
    """Register the model with the harness as "d1", for `lm_eval.simple_evaluate(model="d1", ...)`; return its class."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    return register_model("d1")(type("D1", (HarnessModel, TemplateLM), {}))


class HarnessModel:
    """The methods that a subclass of the harness's `TemplateLM` needs (`register`); the arguments are `harness.py`'s
    flags. The harness makes the model from their text, also where nothing of this file ran before, so the model reads
    its folder here and not in `main`.

    The harness distributes the requests over processes (accelerate launch, torchrun). In float32 no answer depends on
    `batch_size`, on the order of the requests or on the number of processes.
    """

    cache_hook: Any  # the harness defines these three
    rank: int
    world_size: int

    def __init__(
        self,
        model_path: str,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **flags: Any,
    ) -> None:
        super().__init__()
        self.args = parse_settings(make_parser(), {"model_path": model_path, **flags})
        self.batch_size = int(batch_size)
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        else:
            self._rank, self._world_size = join_processes()
        self.tokenizer = self.args.load_tokenizer()
        self.model = load_model_for(self.args, self.args.read_folder())
        if device == "cpu":  # else each process uses the GPU of its rank; the harness names the first GPU for all
            self.model.to(device)
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty prompt."""
        if self.tokenizer.bos_token_id is None:
            return self.eot_token_id
        return int(self.tokenizer.bos_token_id)

    @property
    def max_length(self) -> int:
        positions = max_positions(self.model.config)
        assert positions is not None
        return positions

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, without added special tokens: a chat template writes its own."""
        return encode_prompt(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        check_chat_template(self.tokenizer, self.args.model_path)
        if add_generation_prompt:
            return render_prompt(self.tokenizer, chat_history)
        return render_prompt(self.tokenizer, chat_history, add_generation_prompt=False, continue_final_message=True)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A completion for each request, up to its first stop string or end token.

        The task's generation_kwargs give the length of the canvas (unless `gen_length` is set) and the temperature.
        """
        # Requests with the same settings share batches.
        samples: Counter[str] = Counter()
        groups: dict[tuple[int, float, tuple[str, ...]], list[tuple[int, Prompt]]] = {}
        for number, request in enumerate(requests):
            context, kwargs = request.args
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompt = Prompt(pair_seed((ids, [])), context, ids, sample=samples[context])
            groups.setdefault(generation_settings(kwargs), []).append((number, prompt))
            samples[context] += 1  # the harness repeats a request for several samples

        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="completions", disable=disable_tqdm or self.rank != 0) as progress:
            for (length, temperature, until), rows in groups.items():
                args = replace(
                    self.args,
                    gen_length=self.args.gen_length or length,
                    temperature=temperature,
                    seed=self.args.draw_seed,
                )
                for number, text in self.complete(rows, args, until):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    progress.update()
        return texts

    def complete(
        self, rows: list[tuple[int, Prompt]], args: HarnessFlags, until: tuple[str, ...]
    ) -> Iterator[tuple[int, str]]:
        """The text of each row up to its end, as soon as the row ends; the longest prompts come first."""
        tokenizer = self.tokenizer
        stop_ids = list(end_ids(tokenizer))
        for stop in until:
            if stop in tokenizer.all_special_tokens:
                stop_ids.append(tokenizer.convert_tokens_to_ids(stop))
        ends = torch.tensor(stop_ids, device=self.model.device)
        rows = sorted(rows, key=lambda row: -len(row[1].ids))
        prompts = [prompt for _, prompt in rows]
        check_room(self.model.config, len(prompts[0].ids), sampling_settings(args, self.model.config).gen_length)
        turns = SingleTurn(args, tokenizer)
        for number, entry in generate_rows(args, turns, self.model, tokenizer, prompts, ends, self.batch_size):
            yield rows[number][0], cut_at_stop(entry["text"], until)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """LLaDA's bound for each (texts, prompt, answer), and whether greedy sampling gives the answer."""
        size = block_size(self.model.config)
        if size:
            raise ValueError(f"the bound is for any order of tokens, not for blocks of {size}: use tasks that generate")
        if self.args.cfg_scale:
            raise ValueError("--cfg_scale works only with tasks that generate: log-likelihoods have no guidance")
        pairs: list[Pair] = [(prompt, answer) for _, prompt, answer in requests]
        longest = max((len(prompt) + len(answer) for prompt, answer in pairs), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"prompt and answer have {longest} tokens, the model reads {self.max_length} (--num_fewshot)"
            )
        bounds = log_likelihoods(
            self.model,
            pairs,
            mask_token_id=self.tokenizer.mask_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            draws=self.args.mc_num,
            seed=self.args.draw_seed,
            batch_size=self.batch_size,
        )
        greedy = are_greedy(
            self.model,
            pairs,
            mask_token_id=self.tokenizer.mask_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            batch_size=self.batch_size,
        )
        answers = zip(bounds, greedy, strict=True)  # both compute in the same order
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)  # what stays for an empty answer
        for (number, bound), (_, is_greedy) in tqdm(answers, total=len(pairs), disable=disable_tqdm or self.rank != 0):
            results[number] = (bound, is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[number][0], results[number])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("perplexities are not supported: the bound is for answers, not for whole texts")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on all processes, one after the other."""
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, tensor.cpu().reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst)
        return parts

    def barrier(self) -> None:
        dist.barrier()


def generation_settings(generation_kwargs: dict[str, Any]) -> tuple[int, float, tuple[str, ...]]:
    """A task's (tokens per completion, temperature, stop strings)."""
    from lm_eval.models.utils import normalize_gen_kwargs

    kwargs: dict[str, Any] = {**normalize_gen_kwargs(generation_kwargs, DEFAULT_LENGTH)}
    temperature = 0.0
    if kwargs["do_sample"]:
        temperature = float(kwargs.get("temperature", 0.0))
    unknown = {}
    for name, value in kwargs.items():
        has_no_effect = temperature == 0 and name in SAMPLING_KWARGS
        is_off = name in NEUTRAL_VALUES and value in (None, NEUTRAL_VALUES[name])
        if name not in SUPPORTED_KWARGS and not has_no_effect and not is_off:
            unknown[name] = value
    if unknown:
        raise ValueError(f"generation_kwargs: {unknown} is not supported here: turn it off with --gen_kwargs")
    return kwargs["max_gen_toks"], temperature, tuple(kwargs["until"])
