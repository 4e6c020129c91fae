"""The client of a server of rollouts, for RL: it sends the policy's weights, and gets rows that were sampled with them.

The server is `d1 serve`, or SGLang with the plugin of `d1/serve/sglang.py`. No answer is trusted: `check_row` refuses
what no sampler gives. The same function checks what a user's `rollout_func` returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    length = expected.settings.gen_length
    name = f"{where}completion_ids"
    canvas = check_ids(row["completion_ids"], name, expected.vocabulary, length, "max_completion_length")
    is_end = torch.isin(canvas, torch.tensor([*expected.ends], dtype=torch.long))
    if (canvas == expected.mask_token_id).any():
        raise ValueError(f"{where}completion_ids hold the mask token, {expected.mask_token_id}: fill the canvas")
    if len(canvas) < length and (whole or not is_end.any()):
        why = whole if is_end.any() else "there is no EOS"
        raise ValueError(f"{where}{len(canvas)} completion_ids, and {why}: return the whole canvas of {length}")
    max_entropy = math.log(expected.vocabulary)
    columns = {"completion_ids": canvas}
    for name in ("steps", "logprobs", "entropies"):
        if name not in row:
            continue
        values = check_numbers(row[name], f"{where}{name}", len(canvas))
        columns[name] = values
        if name == "steps":
            check_steps(where, values, canvas, is_end, prompt, expected)
        elif name == "logprobs":
            is_wrong = ~values.isfinite() | (values > ROUNDING)
            refuse(where, name, values, is_wrong, "a finite log-probability, <= 0")
        else:
            is_wrong = ~values.isfinite() | (values < -ROUNDING) | (values > max_entropy + ROUNDING)
            allowed = f"a finite entropy, 0 to log({expected.vocabulary}) = {max_entropy:.2f}"
            refuse(where, name, values, is_wrong, allowed)
    return columns


def check_steps(where: str, steps: Tensor, canvas: Tensor, is_end: Tensor, prompt: int, expected: Expected) -> None:
    """Raises ValueError for steps (tokens,) that no sampler takes to fill a `canvas` after `prompt` tokens."""
    settings = expected.settings
    schedule = expected.schedule(prompt)
    max_steps = sum(len(counts) + settings.post_steps for counts in schedule)
    after_eos = is_end.cumsum(0) - is_end.int() > 0
    is_wrong = (steps != steps.round()) | (steps < -1) | (steps >= max_steps) | ((steps < 0) & ~after_eos)
    refuse(where, "steps", steps, is_wrong, f"0 to {max_steps - 1} (-1: filled in after the first EOS)")

    positions = torch.arange(len(steps))
    block_end = 0
    first_step = 0  # the first one that may fill the block
    has_ended = False  # a block before this one holds an EOS
    for number, counts in enumerate(schedule):
        block_start = block_end
        block_end = block_start + sum(counts)
        in_block = (positions >= block_start) & (positions < block_end)
        is_revealed = in_block & (steps >= 0)
        allowed = (
            f"{first_step} or more: block {number} (of {settings.block_length} tokens) is filled after those before it"
        )
        refuse(where, "steps", steps, is_revealed & (steps < first_step), allowed)
        if expected.by_our_rules and has_ended:
            is_wrong = in_block & ((steps >= 0) | (canvas != expected.ends[0]))
            allowed = f"-1 and token {expected.ends[0]}: the EOS stop fills the blocks after the EOS"
            refuse(where, "steps", steps, is_wrong, allowed)
        elif expected.by_our_rules:
            is_hidden = in_block & (steps < 0)
            is_stopped = torch.zeros_like(in_block)
            if settings.first_token is not None:  # a causal context: a block ends once nothing before its EOS is hidden
                is_stopped = is_hidden & after_eos & (canvas == expected.ends[0])
            allowed = "a step: the block of the first EOS is sampled whole"
            refuse(where, "steps", steps, is_hidden & ~is_stopped, allowed)
            if settings.edits is None:
                revealed = torch.bincount(steps[is_revealed].long() - first_step)
                scheduled = torch.tensor(counts)
                if is_stopped.any():
                    scheduled = scheduled[: len(revealed)]
                check_counts(f"{where}steps of block {number}", revealed, scheduled, settings.rule)
        if is_revealed.any():
            first_step = int(steps[is_revealed].max()) + 1
        has_ended |= bool(is_end[in_block].any())


def check_counts(what: str, revealed: Tensor, scheduled: Tensor, rule: str | None) -> None:
    """Raises ValueError unless the steps of a block revealed as many tokens as `scheduled` or, with a `rule`, one or
    more each and after each step at least the sum of `scheduled`. Both are (steps,) numbers of tokens."""
    if rule is None:
        is_possible = revealed.tolist() == scheduled.tolist()
        condition = ""
    else:
        is_possible = bool((revealed > 0).all()) and len(revealed) <= len(scheduled)
        if is_possible:
            is_possible = bool((revealed.cumsum(0) >= scheduled[: len(revealed)].cumsum(0)).all())
        condition = f" at least, one or more in each (rule {rule})"
    if not is_possible:
        raise ValueError(
            f"{what} reveal {revealed.tolist()!s:.60} tokens: expected {scheduled.tolist()!s:.60}{condition}"
        )


def refuse(where: str, name: str, values: Tensor, is_wrong: Tensor, expected: str) -> None:
    """Raises ValueError for the first of the `values` that `is_wrong`."""
    if is_wrong.any():
        index = int(is_wrong.nonzero()[0])
        raise ValueError(f"{where}{name}[{index}] is {values[index]:g}: expected {expected}")


def check_numbers(values: Any, what: str, count: int | None = None) -> Tensor:
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


def check_ids(ids: Any, what: str, vocabulary: int, max_count: int, limit: str) -> Tensor:
    """Token ids as a tensor. Raises ValueError for ids outside of the vocabulary, none, or more than `max_count`, the
    value of the setting `limit`."""
    tensor = check_numbers(ids, what)
    if not 0 < len(tensor) <= max_count:
        raise ValueError(f"{what} has {len(tensor)} ids: expected 1 to {limit} ({max_count})")
    if tensor.is_floating_point() or ((tensor < 0) | (tensor >= vocabulary)).any():
        raise ValueError(f"{what}: the model has {vocabulary} tokens, numbered from 0, got {tensor.tolist()!r:.60}")
    return tensor


# --- SGLang's dialect: its requests, and its answers in the form of `d1 serve` ----------------------------------------


def make_request(
    prompts: Prompts, texts: Sequence[Sequence[int]], mask_token_id: int | None, own_batch: bool
) -> dict[str, Any]:
    """The body of `/generate` for the prompts without their padding; SGLang is told the `mask_token_id`, and `d1 serve`
    whether the rows are a batch of their own."""
    settings = {name: value for name, value in asdict(prompts.settings).items() if value is not None}
    params: dict[str, Any] = {"max_new_tokens": settings.pop("gen_length"), "ignore_eos": True}
    rids = ["-".join(map(str, key[1:])) for key in prompts.keys]
    seed = prompts.keys[0][0]
    ends = [*prompts.ends]

    # `d1 serve`
    if mask_token_id is None:
        params |= {**settings, "sampling_seed": seed, "eos_stop": ends}
        body = {"input_ids": [*texts], "rid": rids, "sampling_params": params, "return_logprob": True}
        if own_batch:
            body["padded_to"] = prompts.ids.shape[1]
        return body

    # SGLang. It refuses an `rid` that rows of an earlier, failed request still have; the plugin reads it up to the
    # point.
    params["temperature"] = prompts.settings.temperature
    params["custom_params"] = {"settings": settings, "seed": seed, "eos_stop": ends, "mask_token_id": mask_token_id}
    suffix = uuid.uuid4().hex
    return {"input_ids": [*texts], "rid": [f"{rid}.{suffix}" for rid in rids], "sampling_params": params}


def convert_sglang_answer(row: dict[str, Any], settings: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """An answer of SGLang in the form of `d1 serve`: with the tokens after the EOS stop, and the sums of passes and of
    their tokens."""
    # Passes are the engine's own, with those that store keys and values; tokens of the prompt count if not cached.
    meta = row["meta_info"]
    missing = settings.gen_length - len(row["output_ids"])  # tokens after the EOS stop
    passes = sum(meta["forward_passes"])
    block = settings.block_length
    prompt_tokens = meta["prompt_tokens"] // block * block - meta["cached_tokens"]
    converted = {
        "output_token_logprobs": meta["output_token_logprobs"] + [[0.0, *ends[:1], None]] * missing,
        "output_token_entropies": meta["output_token_entropies"] + [0.0] * missing,
        "step_maps": meta["step_maps"] + [0] * missing,
        "forward_passes": passes,
        "forward_tokens": passes * block + max(prompt_tokens, 0),
    }
    return {"output_ids": row["output_ids"] + [*ends[:1]] * missing, "meta_info": meta | converted}


# --- The server, and its answers --------------------------------------------------------------------------------------

CONNECT_SECONDS = 10.0  # to connect, and to say what is served
ANSWER_SECONDS = 3600.0  # for an answer: a rollout may take as long as it does in a trainer
FLUSH_SECONDS = 600  # that SGLang may take until no row is at work
BUSY_STATUSES = (429, 502, 503, 504)  # of a server that may take the same request later
T = TypeVar("T")
FRESH_VERSION = "default"  # `weight_version` of a server that was given no weights since it started


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
    def join(cls, parts: Sequence[Prompts]) -> Prompts:
        """The rows of several, padded to the widest."""
        width = max(part.ids.shape[1] for part in parts)
        ids: list[Tensor] = []
        masks: list[Tensor] = []
        keys: list[Sequence[int]] = []
        for part in parts:
            padding = (width - part.ids.shape[1], 0)
            ids.append(F.pad(part.ids, padding))
            masks.append(F.pad(part.mask, padding))
            keys.extend(part.keys)
        return replace(parts[0], ids=torch.cat(ids), mask=torch.cat(masks), keys=keys)


class RolloutServer:
    """A server at `url`, with the API key in the environment. What it refuses is a ValueError with its words."""

    def __init__(self, url: str, own_batch: bool | None = None) -> None:
        """With `own_batch`, rows of a request share no batch with others; None: in float32, where they then equal the
        trainer's to the bit. In 16 bits, fuller batches save passes."""
        self.url = url.rstrip("/")
        self.own_batch = own_batch
        self.version = ""  # of the weights that it has
        self.problem: str | None = "it was not asked yet"  # why no rows go to it now; None: it may get some
        self.folders: list[str] | None = []  # below which it loads weights; None: anywhere
        self.mask_token_id: int | None = None  # the run's, for SGLang, which is not asked for its own; else None
        self.dtype: str | None = None  # in which it computes, such as "float32"; None: it does not say
        self.lock = threading.Lock()  # one thread at a time talks about weights

    @property
    def has_own_batches(self) -> bool:
        """Whether the rows of a request are a batch of their own."""
        return self.dtype == "float32" if self.own_batch is None else self.own_batch

    @property
    def is_local(self) -> bool:
        """Whether the address is one of this machine: a socket can be bound to it."""
        try:
            addresses = socket.getaddrinfo(urlsplit(self.url).hostname, 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, address in addresses:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        return False

    def ask(self, method: str, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to a request. Raises Unavailable, or ValueError with the server's words."""
        url = f"{self.url}{path}"
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        try:
            answer = requests.request(method, url, json=body, headers=headers, timeout=(CONNECT_SECONDS, seconds))
        except requests.RequestException as error:
            if isinstance(error, ValueError):  # not a URL
                raise
            raise Unavailable(f"{url} gives no answer ({type(error).__name__})") from error
        message = f"{url} answered {answer.status_code}: {answer.text[:500]}"
        if answer.status_code in BUSY_STATUSES:
            raise Unavailable(message)
        if answer.status_code == 401:
            raise ValueError(f"{message} (set {KEY} for this run)")
        if answer.status_code != 200:
            raise ValueError(message)
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        except ValueError as error:
            raise ValueError(f"{url} answered what is no JSON: {answer.text!r:.60}") from error

    def facts(self) -> dict[str, Any]:
        """What is served. Raises ValueError if the server says something else."""
        facts = self.ask("GET", "/model_info", seconds=CONNECT_SECONDS)
        if not isinstance(facts, dict) or not isinstance(facts.get("weight_version"), str):
            raise ValueError(f"{self.url}/model_info has no weight_version, only {facts!r:.60}: is it `d1 serve`?")
        return facts

    def prepare(self, mask_token_id: int, weights: Weights | None) -> None:
        """Asks what is served, and has the server take `weights` unless it has them."""
        with self.lock:
            facts = self.facts()
            self.dtype = facts.get("dtype")
            server_mask = facts.get("mask_token_id", mask_token_id)
            self.folders = facts.get("weights_dir")
            if server_mask != mask_token_id:
                raise ValueError(f"{self.url} hides tokens by {server_mask}, and this run by {mask_token_id}")
            if self.folders == []:
                advice = "start it with `d1 serve MODEL --weights_dir FOLDER`, a folder that this run can write to"
                raise ValueError(f"{self.url} loads no weights: {advice}")
            if "mask_token_id" not in facts and self.problem:  # SGLang, which may have restarted
                self.check_plugin(int(mask_token_id == 0))
            self.mask_token_id = None if "mask_token_id" in facts else mask_token_id
            if weights is None:
                return
            if weights.base is not None and facts.get("base", weights.base) != weights.base:  # SGLang does not say
                advice = "start it with the model, and in the number of bits, that this run trains an adapter on"
                raise ValueError(f"{self.url} serves another model than that of this run: {advice}")
            if facts["weight_version"] != weights.version:
                if self.mask_token_id is not None:  # SGLang would take them in mid-row, and then report a failure
                    self.ask("POST", f"/flush_cache?timeout={FLUSH_SECONDS}")
                updates = [(weights.folder, weights.version)]
                # What did not take weights of this run, or failed since, gets the frozen ones too.
                if weights.frozen and (self.problem or not facts["weight_version"].startswith(weights.run)):
                    updates.insert(0, (weights.frozen, f"{weights.run}-frozen"))
                for folder, version in updates:
                    body = {"model_path": str(folder), "weight_version": version}
                    self.ask("POST", "/update_weights_from_disk", body)
                new_version = self.facts()["weight_version"]
                if new_version != weights.version:
                    raise Unavailable(f"{self.url} took weights and has {new_version} now, not {weights.version}")
            self.version = weights.version

    def check_plugin(self, token: int) -> None:
        """Raises ValueError, with the command that starts a right server, unless SGLang answers with the plugin."""
        params = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
        rows = self.ask("POST", "/generate", {"input_ids": [[token]], "sampling_params": params})
        if not explain_errors(f"{self.url}: ", lambda where: "step_maps" in rows[0]["meta_info"]):
            raise ValueError(
                f"{self.url}: it does not sample by d1's rules: its answers have no step_maps. Install d1 into its "
                "environment (pip install --no-deps) and start it with: python -m sglang.launch_server --model-path "
                "MODEL --dllm-algorithm D1 --max-running-requests 64"
            )

    def sample(self, prompts: Prompts, weights: Weights) -> Rollout:
        """`rollout` of the prompts by the server, with these weights and no others."""
        texts = [ids[mask.bool()].tolist() for ids, mask in zip(prompts.ids.cpu(), prompts.mask.cpu(), strict=True)]
        body = make_request(prompts, texts, self.mask_token_id, self.has_own_batches)
        rids = body["rid"]
        answers = self.ask("POST", "/generate", body)
        if not isinstance(answers, list) or len(answers) != len(texts):
            actual = f"{len(answers)} rows" if isinstance(answers, list) else type(answers).__name__
            raise ValueError(f"{self.url} answered {len(texts)} prompts with {actual}: expected a list of one row each")

        # Each answer is of the right row, and all are of the right weights.
        labels = [f"{self.url}, row {number} (id {rid}): " for number, rid in enumerate(rids)]
        versions = set()
        for label, answer, rid, text in zip(labels, answers, rids, texts, strict=True):
            meta = explain_errors(label, check_meta, answer, rid, text)
            versions.add(meta["weight_version"])
        for version in versions - {weights.version}:
            message = f"{self.url} sampled with the weights {version}, not {weights.version}"
            if version == FRESH_VERSION or version.startswith(weights.run):  # it restarted, or an update came late
                raise Unavailable(message)
            raise ValueError(f"{message}: who else uses it?")

        # The columns of the rollout
        expected = Expected(
            prompts.vocabulary, prompts.mask_token_id, prompts.ends, prompts.settings, aligned=prompts.aligned
        )

        def read_answer(where: str, answer: dict[str, Any], text: Sequence[int]) -> dict[str, Tensor]:
            if self.mask_token_id is not None:
                answer = convert_sglang_answer(answer, prompts.settings, prompts.ends)
            return check_answer(where, answer, text, expected)

        rows = []
        for label, answer, text in zip(labels, answers, texts, strict=True):
            rows.append(explain_errors(label, read_answer, answer, text))
        columns = {name: torch.stack([row[name] for row in rows]).to(prompts.ids.device) for name in rows[0]}
        return Rollout(
            ids=torch.cat([prompts.ids, columns["completion_ids"]], dim=1),
            logps=columns["logprobs"].float(),
            reveal_steps=columns["steps"].long(),
            entropies=columns["entropies"].float(),
            passes=columns["passes"],
            forward_tokens=columns["forward_tokens"],
        )


def explain_errors(where: str, read: Callable[..., T], *arguments: Any) -> T:
    """`read(where, *arguments)`, with a ValueError if a part of an answer is missing or of another type."""
    try:
        return read(where, *arguments)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where}the answer is not of the form that RL reads ({error!r:.100})") from error


def check_meta(where: str, row: Any, rid: str, text: Sequence[int]) -> dict[str, Any]:
    """The `meta_info` of an answer. Raises ValueError unless it answers the prompt `text` under the name `rid`."""
    meta: dict[str, Any] = row["meta_info"]
    if meta["id"] != rid:
        raise ValueError(f"{where}this is the answer for id {meta['id']!r:.40}: each row must be the one asked for")
    if meta["prompt_tokens"] != len(text):
        raise ValueError(f"{where}{meta['prompt_tokens']!r:.40} tokens of the prompt were read, of {len(text)}")
    if not isinstance(meta["weight_version"], str):
        raise ValueError(f"{where}weight_version is {meta['weight_version']!r:.40}: expected a name")
    return meta


def check_answer(where: str, row: Mapping[str, Any], text: Sequence[int], expected: Expected) -> dict[str, Tensor]:
    """What `check_row` returns for an answer to the prompt `text`, and the numbers of passes and of their tokens.
    Raises ValueError as `check_row` does, or if the parts of the answer contradict each other."""
    meta = row["meta_info"]
    ids = row["output_ids"]
    length = expected.settings.gen_length
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    steps = meta["step_maps"]
    if len(steps) == len(ids) == length:
        steps = reveal_steps(steps, expected.schedule(len(text)))
    lists = {"completion_ids": ids, "steps": steps, "logprobs": logprobs, "entropies": meta["output_token_entropies"]}
    columns = check_row(where, lists, len(text), expected, whole="RL reads all of it")
    if [entry[1] for entry in meta["output_token_logprobs"]] != ids:
        raise ValueError(f"{where}output_token_logprobs are those of other tokens than output_ids")

    passes = meta["forward_passes"]
    forward_tokens = meta["forward_tokens"]
    min_passes = int(columns["steps"].max()) + 1
    if type(passes) is not int or passes < min_passes:
        raise ValueError(f"{where}forward_passes is {passes!r:.40}: expected {min_passes} at least, by its steps")
    max_tokens = passes * 2 * (len(text) + length)  # with guidance, a pass computes each token twice
    if type(forward_tokens) is not int or not passes <= forward_tokens <= max_tokens:
        raise ValueError(f"{where}forward_tokens is {forward_tokens!r:.40}: expected {passes} to {max_tokens}")
    return columns | {"passes": torch.tensor(passes), "forward_tokens": torch.tensor(forward_tokens)}


def reveal_steps(step_map: Sequence[int], schedule: Sequence[Sequence[int]]) -> list[int]:
    """The row's own pass, from 0, that revealed each token, from a step map, which counts from 1 in each block of the
    `schedule`; -1 at its zeros."""
    # Each pass reveals a token, so the number of passes of a block is the largest number in it.
    steps: list[int] = []
    first_step = 0  # of the block
    for start, end in pairwise(accumulate(map(sum, schedule), initial=0)):
        block = step_map[start:end]
        steps += [first_step + step - 1 if step else -1 for step in block]
        first_step += max(block, default=0)  # a map that is cut after its EOS has fewer blocks
    return steps
