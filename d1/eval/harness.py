"""python harness.py --model_path PATH --tasks gsm8k,hellaswag [--num_fewshot 4] [--apply_chat_template] ...

Runs the tasks of lm-evaluation-harness (`pip install -e ..[harness]`) on a masked diffusion model. The flags below say
how the model samples and scores; all others are `lm_eval`'s own (`lm_eval run --help`): tasks, examples, chat template,
system prompt, --limit, --include_path, --output_path, --log_samples, --gen_kwargs. On several GPUs:
`accelerate launch harness.py ...`.

Temperature and stop strings are the task's (`--gen_kwargs temperature=0.9,do_sample=True`). So is the length of a
completion, unless --gen_length is given. With `--use_cache PATH` a killed run, started again, does not recompute
finished requests; the harness's cache knows requests and not models, so use one PATH per model and settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from d1.eval.completions import generate_rows, join_processes, leave_processes, load_model_for
from d1.eval.likelihood import Pair, are_greedy, check_likelihood, log_likelihoods, seed_of
from d1.eval.run import parse_settings
from d1.eval.setup import Prompt, config_of, load_tokenizer_for
from d1.models.kinds import check_room
from d1.models.tokenizer import check_chat_template, encode_prompt, end_ids, render_prompt
from d1.ranges import COUNT, SEED
from d1.runs.entry import OneLineParser
from d1.sampling.flags import add_model_flags, add_sampling_flags, sampling_settings

if TYPE_CHECKING:  # an optional package
    from lm_eval.api.instance import Instance

MISSING = "lm-evaluation-harness is not installed: pip install -e '.[harness]' in the checkout, or pip install lm-eval"
DEFAULT_LENGTH = 256  # tokens of a completion where neither the flags nor the task name a number, as in the harness
READ = ("until", "max_gen_toks", "do_sample", "temperature")  # what is read of a task's generation_kwargs
ONLY_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")  # these change nothing where decoding is greedy
OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "num_beams": 1}


class PassingParser(OneLineParser):
    """Keeps the flags that it does not know, as `harness`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        known, rest = self.parse_known_args(args, namespace)
        known.harness = rest
        return known


def make_parser() -> argparse.ArgumentParser:
    parser = PassingParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = parser.add_argument_group("model")
    add_model_flags(model, checkpoint_path={"default": ""})
    model.add_argument("--batch_size", type=COUNT, default=32, help="sequences per forward pass of each process")
    sampling = parser.add_argument_group("tasks that generate")
    add_sampling_flags(
        sampling,
        leave_out=("temperature", "seed"),
        gen_length={"default": None, "help": "tokens per completion (default: what the task allows)"},
    )
    scoring = parser.add_argument_group("tasks that compare log-likelihoods")
    scoring.add_argument("--mc_num", type=COUNT, default=128, help="masks per answer (default: 128, as LLaDA)")
    parser.add_argument("--draw_seed", type=SEED, default=0, help="of masks and of sampling; --seed is the harness's")
    return parser


def main(args: argparse.Namespace) -> None:
    """Runs lm_eval's own command with the model "d1" known to it."""
    own = {name: value for name, value in vars(args).items() if name not in ("harness", "batch_size")}
    length = args.gen_length or 1024  # a task's own is not known yet
    of_a_task = {"gen_length": length, "diffusion_steps": args.diffusion_steps or length, "temperature": 0.0}
    config = config_of(args.model_path, args.checkpoint_path)
    own["block_length"] = sampling_settings(own | of_a_task, config).block_length
    register()
    from lm_eval.__main__ import cli_evaluate

    given = {name: value for name, value in own.items() if value is not None}
    sys.argv = ["lm_eval", "run", "--model", "d1", "--model_args", json.dumps(given)]
    sys.argv += ["--batch_size", str(args.batch_size), *args.harness]
    cli_evaluate()
    leave_processes()


@lru_cache
def register() -> type:
    """Makes the model known to the harness as "d1", for `lm_eval.simple_evaluate(model="d1", ...)`: its class."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "lm_eval":
            raise
        raise ImportError(MISSING) from error
    return register_model("d1")(type("D1", (HarnessModel, TemplateLM), {}))


class HarnessModel:
    """What a subclass of the harness's `TemplateLM` needs (`register`); the arguments are `harness.py`'s flags.

    Several processes (accelerate launch, torchrun) share the requests as the harness deals them out. In float32 no
    answer depends on `batch_size`, on the order of the requests or on the number of processes.
    """

    cache_hook: Any  # these three are the harness's
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
        if not str(batch_size).isdecimal() or max_batch_size is not None:
            raise ValueError(f"--batch_size must be a number, got {batch_size!r}: no batch size is searched for here")
        self.args = parse_settings(make_parser(), {"model_path": model_path, **flags})
        self.batch_size = int(batch_size)
        known = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        self._rank, self._world_size = known or join_processes()
        self.tokenizer = load_tokenizer_for(self.args)
        self.model = load_model_for(self.args)
        if device == "cpu":  # else each process has the GPU of its rank: the harness would name the first for all
            self.model.to(device)
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty prompt."""
        return int(self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id)

    @property
    def max_length(self) -> int:
        return int(self.model.config.max_position_embeddings)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text as it is: a chat template writes its own special tokens."""
        return encode_prompt(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        check_chat_template(self.tokenizer, self.args.model_path)
        begun = {} if add_generation_prompt else {"add_generation_prompt": False, "continue_final_message": True}
        return render_prompt(self.tokenizer, chat_history, **begun)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A completion for each request, up to its first stop string or end token.

        Of a task's generation_kwargs the canvas takes its length (unless `gen_length` says another) and temperature.
        """
        seen: Counter[str] = Counter()
        kinds: dict[tuple[int, float, tuple[str, ...]], list[tuple[int, Prompt]]] = {}
        for place, (context, kwargs) in enumerate(request.args for request in requests):
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompt = Prompt(seed_of((ids, [])), context, ids, sample=seen[context])
            kinds.setdefault(how_to_generate(kwargs), []).append((place, prompt))
            seen[context] += 1  # the harness repeats a request for several samples
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="completions", disable=disable_tqdm or self.rank != 0) as progress:
            for (length, temperature, until), rows in kinds.items():
                of_the_task = {"gen_length": self.args.gen_length or length, "temperature": temperature}
                for place, text in self.complete(rows, of_the_task, until):
                    texts[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
                    progress.update()
        return texts

    def complete(
        self, rows: list[tuple[int, Prompt]], of_the_task: dict[str, Any], until: tuple[str, ...]
    ) -> Iterator[tuple[int, str]]:
        """The text of each row up to its end, as it ends, the longest prompts first."""
        args = argparse.Namespace(**vars(self.args) | of_the_task | {"seed": self.args.draw_seed, "eos_stop": True})
        tokenizer = self.tokenizer
        special = [tokenizer.convert_tokens_to_ids(stop) for stop in until if stop in tokenizer.all_special_tokens]
        ends = torch.tensor([*end_ids(tokenizer), *special], device=self.model.device)
        rows = sorted(rows, key=lambda row: -len(row[1].ids))
        check_room(self.model.config, len(rows[0][1].ids), args.gen_length)
        prompts = (prompt for _, prompt in rows)
        for number, entry in generate_rows(args, self.model, tokenizer, prompts, ends, self.batch_size):
            yield rows[number][0], cut(entry["text"], until)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """LLaDA's bound for each (texts, prompt, answer), and whether greedy sampling gives the answer."""
        check_likelihood(self.model.config)
        if self.args.cfg_scale:
            raise ValueError("--cfg_scale is for tasks that generate: log-likelihoods are computed without guidance")
        pairs: list[Pair] = [(prompt, answer) for _, prompt, answer in requests]
        longest = max((len(prompt) + len(answer) for prompt, answer in pairs), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"a prompt and its answer have {longest} tokens, and the model reads {self.max_length}: take fewer "
                "examples (--num_fewshot)"
            )
        ids = {"mask_token_id": self.tokenizer.mask_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        how: dict[str, Any] = {**ids, "batch_size": self.batch_size}
        bounds = log_likelihoods(self.model, pairs, draws=self.args.mc_num, seed=self.args.draw_seed, **how)
        both = zip(bounds, are_greedy(self.model, pairs, **how), strict=True)  # in the same order
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for (place, value), (_, is_greedy) in tqdm(both, total=len(pairs), disable=disable_tqdm or self.rank != 0):
            results[place] = (value, is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no perplexities: the bound is for answers, not for whole texts")

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


def how_to_generate(generation_kwargs: dict[str, Any]) -> tuple[int, float, tuple[str, ...]]:
    """(tokens, temperature, stop strings) that a task asks for."""
    from lm_eval.models.utils import normalize_gen_kwargs

    kwargs: dict[str, Any] = {**normalize_gen_kwargs(generation_kwargs, DEFAULT_LENGTH)}
    temperature = float(kwargs.get("temperature", 0.0)) if kwargs["do_sample"] else 0.0
    read = {*READ, *(ONLY_SAMPLING if temperature == 0 else ())}
    read |= {name for name, off in OFF.items() if name in kwargs and kwargs[name] in (None, off)}
    unknown = {name: value for name, value in kwargs.items() if name not in read}
    if unknown:
        raise ValueError(
            f"the task's generation_kwargs ask for {unknown}, which a masked diffusion model does not do: set them in "
            "the task's file, or with --gen_kwargs, to what turns them off"
        )
    return kwargs["max_gen_toks"], temperature, tuple(kwargs["until"])


def cut(text: str, until: Iterable[str]) -> str:
    """`text` up to the first of the stop strings in it."""
    return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]
