"""A server of rollouts as RL uses it: it takes the policy's weights, and samples rows with them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor

from d1.sampling.checks import Expected, check_row
from d1.sampling.loop import Rollout
from d1.sampling.settings import SamplingSettings
from d1.serve import KEY, sglang_client
from d1.serve.broadcast import send

CONNECT = 10.0  # seconds to connect, and to say what is served
PATIENCE = 3600.0  # seconds for an answer: a rollout may take as long as it does in a trainer
DRAIN = 600  # seconds that SGLang may take until no row is at work
BUSY = (429, 502, 503, 504)  # of a server that may take the same request later
T = TypeVar("T")
FRESH = "default"  # `weight_version` of a server that was given no weights since it started


class Unavailable(OSError):
    """A server does not answer, is busy or has lost the policy's weights: another one may take the rows."""


@dataclass(frozen=True)
class Weights:
    """Weights that lie in a folder; `run` begins the name of all versions of a run."""

    run: str
    version: str
    folder: Path


@dataclass(frozen=True)
class Prompts:
    """Rows to sample: what `rollout` would be given.

    Attributes:
        ids, mask: (rows, prompt), padded on the left.
        keys: of each row's generator, as `keyed_generator` takes it: the seed, then two numbers at least.
        ends: of the EOS stop; none: no stop.
        aligned: the model's blocks are counted from a text's first token, as a block-causal model's are.
        vocabulary, mask_token_id: the model's number of tokens, and the one that no completion holds.
    """

    ids: Tensor
    mask: Tensor
    keys: Sequence[Sequence[int]]
    settings: SamplingSettings
    ends: Sequence[int]
    aligned: bool
    vocabulary: int
    mask_token_id: int

    def split(self, size: int) -> list[Prompts]:
        """The same rows, `size` at a time."""
        parts = [slice(start, start + size) for start in range(0, len(self.ids), size)]
        return [replace(self, ids=self.ids[part], mask=self.mask[part], keys=self.keys[part]) for part in parts]


class RolloutServer:
    """A server at `url`, with the API key in the environment. What it refuses is a ValueError with its words.

    Attributes:
        problem: why no rows go to it now; None: it may get some.
        folders: below which it loads weights; None: anywhere.
        broadcasts: whether weights are sent over the network instead of read from a folder.
        mask_token_id: that of the run, for SGLang, which is not asked for its own; None for `d1 serve`.
        dtype: what it says that it computes in, such as "float32"; None: it does not say.
    """

    def __init__(self, url: str, broadcasts: bool = False) -> None:
        self.url, self.version, self.broadcasts = url.rstrip("/"), "", broadcasts
        self.problem: str | None = "it was not asked yet"
        self.folders: list[str] | None = []
        self.mask_token_id: int | None = None
        self.dtype: str | None = None
        self.lock = threading.Lock()  # one thread at a time talks about weights

    @property
    def is_local(self) -> bool:
        """Whether the address is one of this machine."""
        host = urlsplit(self.url).hostname
        return host in ("localhost", socket.gethostname()) or str(host).startswith("127.")

    def ask(self, method: str, path: str, body: Any = None, seconds: float = PATIENCE) -> Any:
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        try:
            answer = requests.request(
                method, f"{self.url}{path}", json=body, headers=headers, timeout=(CONNECT, seconds)
            )
        except requests.RequestException as error:
            if isinstance(error, ValueError):  # the URL is none
                raise
            raise Unavailable(f"{self.url}{path} gives no answer ({type(error).__name__})") from error
        told = f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}"
        if answer.status_code in BUSY:
            raise Unavailable(told)
        if answer.status_code == 401:
            raise ValueError(f"{told} (set {KEY} for this run)")
        if answer.status_code != 200:
            raise ValueError(told)
        if "json" not in answer.headers.get("content-type", ""):
            return answer.text
        try:
            return answer.json()
        except ValueError as error:
            raise ValueError(f"{self.url}{path} answered what is no JSON: {answer.text!r:.60}") from error

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
            if self.broadcasts and not facts.get("takes_broadcasts"):
                raise ValueError(
                    f"{self.url} takes no weights by broadcast: start it with `d1 serve MODEL --take_broadcasts`, or "
                    "leave --rollout_weights broadcast out (SGLang reads weights from a folder)"
                )
            if not self.broadcasts and self.folders == []:
                raise ValueError(
                    f"{self.url} loads no weights: start it with `d1 serve MODEL --weights_dir FOLDER`, a folder that "
                    "this run can write to"
                )
            if "mask_token_id" not in facts and self.problem:  # SGLang, which may have started anew
                rows = self.ask("POST", "/generate", sglang_client.probe(mask_token_id))
                explained(f"{self.url}: ", sglang_client.check_answer, rows)
            self.mask_token_id = None if "mask_token_id" in facts else mask_token_id
            if weights is None:
                return
            if facts["weight_version"] != weights.version:
                if self.mask_token_id is not None:  # SGLang would take them in mid-row, and then report a failure
                    self.ask("POST", f"/flush_cache?timeout={DRAIN}")
                self.give(weights)
                if (found := self.facts()["weight_version"]) != weights.version:
                    raise Unavailable(f"{self.url} took weights and has {found} now, not {weights.version}")
            self.version = weights.version

    def give(self, weights: Weights) -> None:
        """Has the server take weights."""
        if not self.broadcasts:
            body = {"model_path": str(weights.folder), "weight_version": weights.version}
            self.ask("POST", "/update_weights_from_disk", body)
        elif not weights.folder.is_dir():
            raise Unavailable(f"{self.url} waits for the weights from the machine of the run's first process")
        else:
            try:
                send(self.ask, self.url, weights.folder, weights.version)
            except (RuntimeError, ConnectionError) as error:
                raise Unavailable(f"{self.url} was lost while it took weights: {error}") from error

    def sample(self, prompts: Prompts, weights: Weights) -> Rollout:
        """`rollout` of the prompts by the server, in a batch of their own, with these weights and no others."""
        ids, settings, keys, ends, aligned = (
            *(prompts.ids, prompts.settings, prompts.keys),
            *(prompts.ends, prompts.aligned),
        )
        texts = [row[real.bool()].tolist() for row, real in zip(ids.cpu(), prompts.mask.cpu(), strict=True)]
        if self.mask_token_id is None:
            body = request_of(prompts, texts)
        else:
            body = sglang_client.request_of(texts, keys, settings, ends, self.mask_token_id)
        answers = self.ask("POST", "/generate", body)
        if not isinstance(answers, list) or len(answers) != len(texts):
            found = f"{len(answers)} rows" if isinstance(answers, list) else type(answers).__name__
            raise ValueError(f"{self.url} answered {len(texts)} prompts with {found}: expected a list of as many rows")
        wheres = [f"{self.url}, row {number} (id {rid}): " for number, rid in enumerate(body["rid"])]
        metas = [meta_of(*one) for one in zip(wheres, answers, body["rid"], texts, strict=True)]
        for version in {meta["weight_version"] for meta in metas} - {weights.version}:
            message = f"{self.url} sampled with the weights {version}, not {weights.version}"
            if version == FRESH or version.startswith(weights.run):  # it started anew, or an update came late
                raise Unavailable(message)
            raise ValueError(f"{message}: who else uses it?")
        if self.mask_token_id is not None:
            answers = [sglang_client.as_ours(row, settings, ends) for row in answers]
        expected = Expected(prompts.vocabulary, prompts.mask_token_id, ends, settings, aligned)
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
    """`read(where, *of)`; ValueError if a part of an answer is missing or is something else."""
    try:
        return read(where, *of)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where}the answer is not of the form that RL reads ({error!r:.100})") from error


def meta_of(where: str, row: Any, rid: str, text: Sequence[int]) -> dict[str, Any]:
    """The `meta_info` of an answer to the prompt `text` under the name `rid`. Raises ValueError if it answers another
    one."""

    def read(where: str) -> dict[str, Any]:
        meta: dict[str, Any] = row["meta_info"]
        if meta["id"] != rid:
            raise ValueError(f"{where}this is the answer for id {meta['id']!r:.40}: each row must be the one asked for")
        if meta["prompt_tokens"] != len(text):
            raise ValueError(f"{where}{meta['prompt_tokens']!r:.40} tokens of the prompt were read, of {len(text)}")
        if not isinstance(meta["weight_version"], str):
            raise ValueError(f"{where}weight_version is {meta['weight_version']!r:.40}: expected a name")
        return meta

    return explained(where, read)


def columns_of(where: str, row: Mapping[str, Any], text: Sequence[int], expected: Expected) -> dict[str, Tensor]:
    """What `check_row` returns for an answer to the prompt `text`, and the numbers of passes and of their tokens.

    Raises:
        ValueError: as `check_row`; or the parts of the answer contradict each other.
    """
    meta, ids, length = row["meta_info"], row["output_ids"], expected.settings.gen_length
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    steps = meta["step_maps"]
    if len(steps) == len(ids) == length:
        aligned = len(text) % expected.settings.block_length if expected.aligned else None
        steps = reveal_steps(steps, expected.settings.schedule(aligned))
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


def request_of(prompts: Prompts, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The body of `/generate` of `d1 serve`, for the prompts without their padding."""
    names = {name: value for name, value in asdict(prompts.settings).items() if value is not None}
    params = names | {"max_new_tokens": names.pop("gen_length"), "sampling_seed": prompts.keys[0][0]}
    params |= {"ignore_eos": True, "eos_stop": [*prompts.ends]}
    rids = ["-".join(map(str, key[1:])) for key in prompts.keys]
    body = {"input_ids": [*texts], "rid": rids, "sampling_params": params, "padded_to": prompts.ids.shape[1]}
    return body | {"return_logprob": True, "return_step_maps": True}


def reveal_steps(step_map: Sequence[int], schedule: Sequence[Sequence[int]]) -> list[int]:
    """The row's own pass, from 0, that revealed each token, from a step map, which counts from 1 in each block; -1 at
    its zeros. Each pass reveals a token, so a block took as many as its largest number."""
    steps: list[int] = []
    before = 0
    for start, end in pairwise(accumulate(map(sum, schedule), initial=0)):
        block = step_map[start:end]
        steps += [before + step - 1 if step else -1 for step in block]
        before += max(block)
    return steps
