"""The client of a server of rollouts, for RL: it sends the policy's weights, and gets rows that were sampled with them.

The server is `d1 serve`, or SGLang with the plugin of `d1/serve/sglang.py`. No answer is trusted: `check_row` refuses
what no sampler gives. The same function checks what a user's `rollout_func` returns.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
import torch
import torch.nn.functional as F
from torch import Tensor

from d1.sampling.record import Rollout
from d1.sampling.settings import SamplingSettings
from d1.serve import KEY

# --- Checks of rows that another program sampled ----------------------------------------------------------------------

ROUNDING = 1e-3  # nats by which a log-probability may be above 0, or an entropy outside its range


@dataclass(frozen=True)
class Expected:
    """What is known of rows before they are sampled."""

    vocabulary: int  # tokens of the model
    mask_token_id: int  # which no completion holds
    ends: Sequence[int]  # token ids that end a completion
    settings: SamplingSettings  # how the rows are sampled; they say how many tokens a canvas has
    aligned: bool = False  # blocks are counted from a text's first token, as a block-causal model's are
    # This library's samplers reveal the tokens, so the number of tokens per step is known, and the EOS stop fills whole
    # blocks with the first of `ends`. Otherwise the steps need only lie in the right blocks.
    by_our_rules: bool = True

    def schedule(self, prompt: int) -> list[list[int]]:
        """Tokens per pass in each block, after `prompt` tokens."""
        return self.settings.schedule(prompt % self.settings.block_length if self.aligned else None)


def check_row(
    where: str, row: Mapping[str, Any], prompt: int, expected: Expected, whole: str = ""
) -> dict[str, Tensor]:
    """The lists of a row as tensors (tokens,).

    Args:
        where: begins each message: who sampled the row, and its number.
        row: lists with one value per token: `completion_ids`, and those of `steps`, `logprobs` and `entropies` that
            are known. `d1/serve/rescoring.py` checks whether the log-probabilities are the model's.
        prompt: number of tokens of its prompt.
        whole: why the canvas must be whole; "": it may be cut after its first EOS.

    Raises:
        ValueError: a token, step, log-probability or entropy that no sampler with the `expected` settings gives.
    """
    length, limit = expected.settings.gen_length, "max_completion_length"
    canvas = check_ids(row["completion_ids"], f"{where}completion_ids", expected.vocabulary, length, limit)
    is_end = torch.isin(canvas, torch.tensor([*expected.ends], dtype=torch.long))
    if (canvas == expected.mask_token_id).any():
        raise ValueError(f"{where}completion_ids hold the mask token, {expected.mask_token_id}: fill the canvas")
    if len(canvas) < length and (whole or not is_end.any()):
        why = whole if is_end.any() else "there is no EOS"
        raise ValueError(f"{where}{len(canvas)} completion_ids, and {why}: return the whole canvas of {length}")
    columns, most = {"completion_ids": canvas}, math.log(expected.vocabulary)
    for name in [name for name in ("steps", "logprobs", "entropies") if name in row]:
        columns[name] = values = numbers(row[name], f"{where}{name}", len(canvas))
        if name == "steps":
            check_steps(where, values, canvas, is_end, prompt, expected)
        elif name == "logprobs":
            refuse(where, name, values, ~values.isfinite() | (values > ROUNDING), "a finite log-probability, <= 0")
        else:
            wrong = ~values.isfinite() | (values < -ROUNDING) | (values > most + ROUNDING)
            refuse(where, name, values, wrong, f"a finite entropy, 0 to log({expected.vocabulary}) = {most:.2f}")
    return columns


def check_steps(where: str, steps: Tensor, canvas: Tensor, is_end: Tensor, prompt: int, expected: Expected) -> None:
    """Raises ValueError for steps (tokens,) that no sampler takes to fill a `canvas` after `prompt` tokens."""
    settings, by_our_rules = expected.settings, expected.by_our_rules
    schedule = expected.schedule(prompt)
    most = sum(len(counts) + settings.post_steps for counts in schedule)
    after_eos = is_end.cumsum(0) - is_end.int() > 0
    wrong = (steps != steps.round()) | (steps < -1) | (steps >= most) | ((steps < 0) & ~after_eos)
    refuse(where, "steps", steps, wrong, f"0 to {most - 1} (-1: filled in after the first EOS)")
    positions, first, before, ended = torch.arange(len(steps)), 0, 0, False
    for number, counts in enumerate(schedule):
        inside, first = (positions >= first) & (positions < first + sum(counts)), first + sum(counts)
        revealed = inside & (steps >= 0)
        why = f"{before} or more: block {number} (of {settings.block_length} tokens) is filled after those before it"
        refuse(where, "steps", steps, revealed & (steps < before), why)
        if by_our_rules and ended:
            why = f"-1 and token {expected.ends[0]}: the EOS stop fills the blocks after the EOS"
            refuse(where, "steps", steps, inside & ((steps >= 0) | (canvas != expected.ends[0])), why)
        elif by_our_rules:
            left, stops = inside & (steps < 0), torch.zeros_like(inside)
            if settings.first_token is not None:  # a causal context: a block ends once nothing before its EOS is hidden
                stops = left & after_eos & (canvas == expected.ends[0])
            refuse(where, "steps", steps, left & ~stops, "a step: the block of the first EOS is sampled whole")
            if settings.edits is None:
                taken, due = torch.bincount(steps[revealed].long() - before), torch.tensor(counts)
                due = due[: len(taken)] if stops.any() else due
                check_counts(f"{where}steps of block {number}", taken, due, settings.rule)
        before = int(steps[revealed].max()) + 1 if revealed.any() else before
        ended |= bool(is_end[inside].any())


def check_counts(what: str, taken: Tensor, due: Tensor, rule: str | None) -> None:
    """Raises ValueError unless the steps of a block revealed `due` tokens each or, with a `rule`, one or more each and
    after each step at least the sum of `due`."""
    possible = taken.tolist() == due.tolist()
    if rule is not None:
        enough = (taken > 0).all() and len(taken) <= len(due)
        possible = bool(enough and (taken.cumsum(0) >= due[: len(taken)].cumsum(0)).all())
    if not possible:
        words = "" if rule is None else f" at least, one or more in each (rule {rule})"
        raise ValueError(f"{what} reveal {taken.tolist()!s:.60} tokens: expected {due.tolist()!s:.60}{words}")


def refuse(where: str, name: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    """Raises ValueError for the first of the `values` that is `wrong`."""
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"{where}{name}[{at}] is {values[at]:g}: expected {expected}")


def numbers(values: Any, what: str, count: int | None = None) -> Tensor:
    """(count,) numbers. Raises ValueError for anything else."""
    try:
        tensor = torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.tensor(0)
    if tensor.dim() != 1 or tensor.dtype == torch.bool:
        raise ValueError(f"{what}: expected a list of numbers, got {values!r:.60}")
    if not tensor.is_floating_point():
        tensor = tensor.long()  # few operations take unsigned integers, such as uint16
    if count not in (None, len(tensor)):
        raise ValueError(f"{what} has {len(tensor)} entries for {count} completion_ids: expected one per token")
    return tensor


def check_ids(ids: Any, what: str, vocabulary: int, most: int, limit: str) -> Tensor:
    """Token ids as a tensor. Raises ValueError for ids outside of the vocabulary, none, or too many."""
    tensor = numbers(ids, what)
    if not 0 < len(tensor) <= most:
        raise ValueError(f"{what} has {len(tensor)} ids: expected 1 to {limit} ({most})")
    if tensor.is_floating_point() or ((tensor < 0) | (tensor >= vocabulary)).any():
        raise ValueError(f"{what}: the model has {vocabulary} tokens, numbered from 0, got {tensor.tolist()!r:.60}")
    return tensor


# --- SGLang's dialect: its requests, and its answers in the form of `d1 serve` ----------------------------------------


def request_of(
    prompts: Prompts, texts: Sequence[Sequence[int]], mask_token_id: int | None, own_batch: bool
) -> dict[str, Any]:
    """The body of `/generate` for the prompts without their padding; SGLang is told the `mask_token_id`, and `d1 serve`
    whether the rows are a batch of their own."""
    names = {name: value for name, value in asdict(prompts.settings).items() if value is not None}
    params: dict[str, Any] = {"max_new_tokens": names.pop("gen_length"), "ignore_eos": True}
    rids, seed, ends = ["-".join(map(str, key[1:])) for key in prompts.keys], prompts.keys[0][0], [*prompts.ends]
    if mask_token_id is None:
        params |= names | {"sampling_seed": seed, "eos_stop": ends}
        body = {"input_ids": [*texts], "rid": rids, "sampling_params": params, "return_logprob": True}
        return body | ({"padded_to": prompts.ids.shape[1]} if own_batch else {})
    custom = {"settings": names, "seed": seed, "eos_stop": ends, "mask_token_id": mask_token_id}
    params |= {"temperature": prompts.settings.temperature, "custom_params": custom}
    # SGLang refuses an `rid` that rows of an earlier, failed request still have. The plugin reads it up to the point.
    own = uuid.uuid4().hex
    return {"input_ids": [*texts], "rid": [f"{rid}.{own}" for rid in rids], "sampling_params": params}


def as_ours(row: dict[str, Any], settings: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """An answer of SGLang in the form of `d1 serve`: with the tokens after the EOS stop, and the sums of passes and of
    their tokens."""
    # Passes are the engine's own, with those that store keys and values; tokens of the prompt count if not cached.
    meta, left = row["meta_info"], settings.gen_length - len(row["output_ids"])
    passes, block = sum(meta["forward_passes"]), settings.block_length
    prompt = meta["prompt_tokens"] // block * block - meta["cached_tokens"]
    more = {
        "output_token_logprobs": meta["output_token_logprobs"] + [[0.0, *ends[:1], None]] * left,
        "output_token_entropies": meta["output_token_entropies"] + [0.0] * left,
        "step_maps": meta["step_maps"] + [0] * left,
        "forward_passes": passes,
        "forward_tokens": passes * block + max(prompt, 0),
    }
    return {"output_ids": row["output_ids"] + [*ends[:1]] * left, "meta_info": meta | more}


# --- The server, and its answers --------------------------------------------------------------------------------------

CONNECT = 10.0  # seconds to connect, and to say what is served
PATIENCE = 3600.0  # seconds for an answer: a rollout may take as long as it does in a trainer
DRAIN = 600  # seconds that SGLang may take until no row is at work
BUSY = (429, 502, 503, 504)  # of a server that may take the same request later
T = TypeVar("T")
FRESH = "default"  # `weight_version` of a server that was given no weights since it started


class Unavailable(OSError):
    """A server does not answer, is busy or does not have the policy's weights: another server may take the rows."""


@dataclass(frozen=True)
class Weights:
    """Weights in a folder; the names of all versions of a run begin with `run`.

    Attributes:
        base: `base_digest` of the model that an adapter belongs to; None: the weights are whole.
        frozen: the folder of the weights that training leaves as they are, if `folder` holds only the others.
    """

    run: str
    version: str
    folder: Path
    base: str | None = None
    frozen: Path | None = None


@dataclass(frozen=True)
class Prompts:
    """Rows to sample: the arguments of `rollout`."""

    ids: Tensor  # (rows, prompt), padded on the left
    mask: Tensor  # (rows, prompt)
    keys: Sequence[Sequence[int]]  # of each row's generator, as `keyed_generator` takes it: the seed, then two or more
    settings: SamplingSettings
    ends: Sequence[int]  # of the EOS stop; none: no stop
    aligned: bool  # as in `Expected`
    vocabulary: int
    mask_token_id: int

    def split(self, size: int) -> list[Prompts]:
        """The same rows, `size` at a time."""
        parts = [slice(start, start + size) for start in range(0, len(self.ids), size)]
        return [replace(self, ids=self.ids[part], mask=self.mask[part], keys=self.keys[part]) for part in parts]

    @classmethod
    def joined(cls, parts: Sequence[Prompts]) -> Prompts:
        """The rows of several, padded to the widest."""
        width = max(part.ids.shape[1] for part in parts)
        ids, mask = (
            torch.cat([F.pad(rows, (width - rows.shape[1], 0)) for rows in column])
            for column in ([part.ids for part in parts], [part.mask for part in parts])
        )
        return replace(parts[0], ids=ids, mask=mask, keys=[key for part in parts for key in part.keys])


class RolloutServer:
    """A server at `url`, with the API key in the environment. What it refuses is a ValueError with its words."""

    def __init__(self, url: str, own_batch: bool | None = None) -> None:
        """With `own_batch`, rows of a request share no batch with others; None: in float32, where they then equal the
        trainer's to the bit. In 16 bits, fuller batches save passes."""
        self.url, self.version, self.own_batch = url.rstrip("/"), "", own_batch
        self.problem: str | None = "it was not asked yet"  # why no rows go to it now; None: it may get some
        self.folders: list[str] | None = []  # below which it loads weights; None: anywhere
        self.mask_token_id: int | None = None  # the run's, for SGLang, which is not asked for its own; else None
        self.dtype: str | None = None  # in which it computes, such as "float32"; None: it does not say
        self.lock = threading.Lock()  # one thread at a time talks about weights

    @property
    def batches_alone(self) -> bool:
        """Whether the rows of a request are a batch of their own."""
        return self.dtype == "float32" if self.own_batch is None else self.own_batch

    @property
    def is_local(self) -> bool:
        """Whether the address is one of this machine."""
        host = urlsplit(self.url).hostname
        return host in ("localhost", "::1", socket.gethostname()) or str(host).startswith("127.")

    def ask(self, method: str, path: str, body: Any = None, seconds: float = PATIENCE) -> Any:
        """The answer to a request. Raises Unavailable, or ValueError with the server's words."""
        key, url = os.environ.get(KEY), f"{self.url}{path}"
        headers = {"Authorization": f"Bearer {key}"} if key else None
        try:
            answer = requests.request(method, url, json=body, headers=headers, timeout=(CONNECT, seconds))
        except requests.RequestException as error:
            if isinstance(error, ValueError):  # not a URL
                raise
            raise Unavailable(f"{url} gives no answer ({type(error).__name__})") from error
        told = f"{url} answered {answer.status_code}: {answer.text[:500]}"
        if answer.status_code in BUSY:
            raise Unavailable(told)
        if answer.status_code != 200:
            raise ValueError(f"{told} (set {KEY} for this run)" if answer.status_code == 401 else told)
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        except ValueError as error:
            raise ValueError(f"{url} answered what is no JSON: {answer.text!r:.60}") from error

    def facts(self) -> dict[str, Any]:
        """What is served. Raises ValueError if the server says something else."""
        facts = self.ask("GET", "/model_info", seconds=CONNECT)
        if not isinstance(facts, dict) or not isinstance(facts.get("weight_version"), str):
            raise ValueError(f"{self.url}/model_info has no weight_version, only {facts!r:.60}: is it `d1 serve`?")
        return facts

    def prepare(self, mask_token_id: int, weights: Weights | None) -> None:
        """Asks what is served, and has the server take `weights` unless it has them."""
        with self.lock:
            facts = self.facts()
            self.dtype = facts.get("dtype")
            mask, self.folders = facts.get("mask_token_id", mask_token_id), facts.get("weights_dir")
            if mask != mask_token_id:
                raise ValueError(f"{self.url} hides tokens by {mask}, and this run by {mask_token_id}")
            if self.folders == []:
                told = "start it with `d1 serve MODEL --weights_dir FOLDER`, a folder that this run can write to"
                raise ValueError(f"{self.url} loads no weights: {told}")
            if "mask_token_id" not in facts and self.problem:  # SGLang, which may have restarted
                self.check_plugin(int(mask_token_id == 0))
            self.mask_token_id = None if "mask_token_id" in facts else mask_token_id
            if weights is None:
                return
            if weights.base is not None and facts.get("base", weights.base) != weights.base:  # SGLang does not say
                told = "start it with the model, and in the number of bits, that this run trains an adapter on"
                raise ValueError(f"{self.url} serves another model than that of this run: {told}")
            if facts["weight_version"] != weights.version:
                if self.mask_token_id is not None:  # SGLang would take them in mid-row, and then report a failure
                    self.ask("POST", f"/flush_cache?timeout={DRAIN}")
                updates = [(weights.folder, weights.version)]
                # What did not take weights of this run, or failed since, gets the frozen ones too.
                if weights.frozen and (self.problem or not facts["weight_version"].startswith(weights.run)):
                    updates.insert(0, (weights.frozen, f"{weights.run}-frozen"))
                for folder, version in updates:
                    body = {"model_path": str(folder), "weight_version": version}
                    self.ask("POST", "/update_weights_from_disk", body)
                if (found := self.facts()["weight_version"]) != weights.version:
                    raise Unavailable(f"{self.url} took weights and has {found} now, not {weights.version}")
            self.version = weights.version

    def check_plugin(self, token: int) -> None:
        """Raises ValueError, with the command that starts a right server, unless SGLang answers with the plugin."""
        params = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
        rows = self.ask("POST", "/generate", {"input_ids": [[token]], "sampling_params": params})
        if not explained(f"{self.url}: ", lambda where: "step_maps" in rows[0]["meta_info"]):
            raise ValueError(
                f"{self.url}: it does not sample by d1's rules: its answers have no step_maps. Install d1 into its "
                "environment (pip install --no-deps) and start it with: python -m sglang.launch_server --model-path "
                "MODEL --dllm-algorithm D1 --max-running-requests 64"
            )

    def sample(self, prompts: Prompts, weights: Weights) -> Rollout:
        """`rollout` of the prompts by the server, with these weights and no others."""
        ids, settings, ends = prompts.ids, prompts.settings, prompts.ends
        texts = [row[real.bool()].tolist() for row, real in zip(ids.cpu(), prompts.mask.cpu(), strict=True)]
        body = request_of(prompts, texts, self.mask_token_id, self.batches_alone)
        answers = self.ask("POST", "/generate", body)
        if not isinstance(answers, list) or len(answers) != len(texts):
            found = f"{len(answers)} rows" if isinstance(answers, list) else type(answers).__name__
            raise ValueError(f"{self.url} answered {len(texts)} prompts with {found}: expected a list of one row each")
        wheres = [f"{self.url}, row {number} (id {rid}): " for number, rid in enumerate(body["rid"])]
        given = zip(wheres, answers, body["rid"], texts, strict=True)
        metas = [explained(where, meta_of, *one) for where, *one in given]
        for version in {meta["weight_version"] for meta in metas} - {weights.version}:
            message = f"{self.url} sampled with the weights {version}, not {weights.version}"
            if version == FRESH or version.startswith(weights.run):  # it restarted, or an update came late
                raise Unavailable(message)
            raise ValueError(f"{message}: who else uses it?")
        if self.mask_token_id is not None:
            answers = [as_ours(row, settings, ends) for row in answers]
        expected = Expected(prompts.vocabulary, prompts.mask_token_id, ends, settings, prompts.aligned)
        read = partial(columns_of, expected=expected)
        rows = [explained(where, read, row, text) for where, row, text in zip(wheres, answers, texts, strict=True)]
        columns = {name: torch.stack([row[name] for row in rows]).to(ids.device) for name in rows[0]}
        return Rollout(
            ids=torch.cat([ids, columns["completion_ids"]], dim=1),
            logps=columns["logprobs"].float(),
            reveal_steps=columns["steps"].long(),
            entropies=columns["entropies"].float(),
            passes=columns["passes"],
            forward_tokens=columns["forward_tokens"],
        )


def explained(where: str, read: Callable[..., T], *of: Any) -> T:
    """`read(where, *of)`, with a ValueError if a part of an answer is missing or of another type."""
    try:
        return read(where, *of)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where}the answer is not of the form that RL reads ({error!r:.100})") from error


def meta_of(where: str, row: Any, rid: str, text: Sequence[int]) -> dict[str, Any]:
    """The `meta_info` of an answer. Raises ValueError unless it answers the prompt `text` under the name `rid`."""
    meta: dict[str, Any] = row["meta_info"]
    if meta["id"] != rid:
        raise ValueError(f"{where}this is the answer for id {meta['id']!r:.40}: each row must be the one asked for")
    if meta["prompt_tokens"] != len(text):
        raise ValueError(f"{where}{meta['prompt_tokens']!r:.40} tokens of the prompt were read, of {len(text)}")
    if not isinstance(meta["weight_version"], str):
        raise ValueError(f"{where}weight_version is {meta['weight_version']!r:.40}: expected a name")
    return meta


def columns_of(where: str, row: Mapping[str, Any], text: Sequence[int], expected: Expected) -> dict[str, Tensor]:
    """What `check_row` returns for an answer to the prompt `text`, and the numbers of passes and of their tokens.
    Raises ValueError as `check_row` does, or if the parts of the answer contradict each other."""
    meta, ids, length = row["meta_info"], row["output_ids"], expected.settings.gen_length
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    steps = meta["step_maps"]
    if len(steps) == len(ids) == length:
        steps = reveal_steps(steps, expected.schedule(len(text)))
    given = {"completion_ids": ids, "steps": steps, "logprobs": logprobs, "entropies": meta["output_token_entropies"]}
    columns = check_row(where, given, len(text), expected, whole="RL reads all of it")
    if [entry[1] for entry in meta["output_token_logprobs"]] != ids:
        raise ValueError(f"{where}output_token_logprobs are those of other tokens than output_ids")
    passes, fed = meta["forward_passes"], meta["forward_tokens"]
    least, most = int(columns["steps"].max()) + 1, 2 * (len(text) + length)  # tokens per pass, with guidance
    if type(passes) is not int or passes < least:
        raise ValueError(f"{where}forward_passes is {passes!r:.40}: expected {least} at least, by its steps")
    if type(fed) is not int or not passes <= fed <= passes * most:
        raise ValueError(f"{where}forward_tokens is {fed!r:.40}: expected {passes} to {passes * most}")
    return columns | {"passes": torch.tensor(passes), "forward_tokens": torch.tensor(fed)}


def reveal_steps(step_map: Sequence[int], schedule: Sequence[Sequence[int]]) -> list[int]:
    """The row's own pass, from 0, that revealed each token, from a step map, which counts from 1 in each block of the
    `schedule`; -1 at its zeros."""
    # Each pass reveals a token, so the number of passes of a block is the largest number in it.
    steps: list[int] = []
    before = 0
    for start, end in pairwise(accumulate(map(sum, schedule), initial=0)):
        block = step_map[start:end]
        steps += [before + step - 1 if step else -1 for step in block]
        before += max(block, default=0)  # a map that is cut after its EOS has fewer blocks
    return steps
