"""Programs that sample instead of the trainer: servers, also ahead of updates, and a user's `rollout_func`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from d1.models.convert import write_weights
from d1.models.kinds import block_size
from d1.rl.batch import SCORED, Batch, evaluating, log_rollout, score_batch, texts_of
from d1.rl.bridge import EpochSampler
from d1.rl.losses import OBJECTIVES, PENALTIES
from d1.runs.checkpoints import reading
from d1.runs.processes import together
from d1.sampling import Rollout, SamplingSettings
from d1.scoring import ESTIMATORS, SampledRows, Views
from d1.scoring.replay import Written, replay_views
from d1.scoring.rollouts import blocks_of
from d1.serve.client import CONNECT, Expected, Prompts, RolloutServer, Unavailable, Weights, check_ids, check_row
from d1.serve.engine import RAM_DISK, has_room

# --- Weights folder ---------------------------------------------------------------------------------------------------
#
# The folder through which a run's weights reach its servers: on a RAM disk where there is one with room.


class WeightsFolder:
    """Holds one version at a time, in a folder of its own.

    Attributes:
        path: the folder; None until the first version is written.
    """

    def __init__(self, output_dir: Path, part: str = "") -> None:
        """`part` ends the name, of one of several folders of a run."""
        self.output_dir, self.path, self.part = output_dir.resolve(), Path(), part

    def write(
        self,
        model: Any,
        version: str,
        folders: Sequence[Sequence[str] | None],
        released: bool = False,
        copy: Path | None = None,
    ) -> None:
        """Replaces what is there by the weights of `model`, or its adapter, or by those of its kind in the folder
        `copy`. `folders` are those that each server reads, None for a server that reads all. `released`: whole weights,
        with the adapter folded in, in the format that they were released in, for an engine."""
        if self.path == Path():
            whole = released or not is_adapted(model)
            weights = [weight for weight in model.parameters() if weight.requires_grad or whole]
            size = sum(weight.numel() * weight.element_size() for weight in weights)
            # The name is a function of the run, so that a resume removes what a killed run left.
            name = "d1-weights-" + hashlib.sha256(str(self.output_dir).encode()).hexdigest()[:12] + self.part
            self.path = place(self.output_dir, folders, size) / name
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)  # fails if it is someone else's
        if copy is not None:
            shutil.copytree(copy, self.path / version)
        elif released:
            write_weights(model, self.path / version)
        else:
            model.save_pretrained(self.path / version)

    def remove(self) -> None:
        """Removes what this process wrote."""
        if self.path != Path():
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = Path()


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def place(output_dir: Path, folders: Sequence[Sequence[str] | None], size: int) -> Path:
    """The folder for weights of `size` bytes: the RAM disk, else the run's own, else one that the servers name.

    Raises:
        ValueError: there is no folder that all servers read and that has room.
    """
    named = [Path(folder) for readable in folders for folder in readable or ()]
    output_dir.mkdir(parents=True, exist_ok=True)

    def suits(folder: Path) -> bool:
        read = all(own is None or any(folder.is_relative_to(one) for one in own) for own in folders)
        return read and has_room(folder, size)

    for folder in (RAM_DISK, output_dir, *named):
        if suits(folder):
            return folder
    raise ValueError(
        f"the servers read weights below {', '.join(map(str, dict.fromkeys(named)))}, and none of these folders is one "
        f"that all of them name, that this run can write to, and that has {size / 1e9:.1f} GB of room: start them with "
        "a --weights_dir that is"
    )


# --- Servers ----------------------------------------------------------------------------------------------------------
#
# Rollouts on servers: rows go through a queue, and a server has the policy's weights before it gets rows.
#
# A server that fails is taken out, and its rows go to the others; it comes back with the current weights. Completions
# do not depend on who sampled them, because a row's random numbers depend on its key alone.

logger = logging.getLogger(__name__)

PAUSE = 1.0  # seconds until a server that failed is asked again
WATCH = 10.0  # seconds between questions to a server that has rows
REMIND = 60.0  # seconds between messages while the run waits

Part = tuple[Prompts, "Future[tuple[Rollout, str]]"]  # with the address of the server that sampled it


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """A rollout that servers sampled.

    Attributes:
        sources: the address of the server that sampled each row.
    """

    sources: tuple[str, ...] = ()


class NoServer(ConnectionError):
    """No server has answered for as long as the run waits."""


class PolicyServers:
    """The servers that sample a run's rollouts. Every process uses all of them; the first one writes the weights.

    `publish` and `rollout` are called by all processes together; `sample` by any thread, between two `publish`.

    Args:
        size: rows per request; None: an equal share of a rollout for each server.
        patience: seconds to wait while no server answers.
        broadcasts: weights go over the network, from a folder of this machine that no server reads.
    """

    def __init__(self, urls: Sequence[str], trainer: Any, size: int | None, patience: float, broadcasts: bool) -> None:
        self.accelerator, self.mask_token_id = trainer.accelerator, trainer.mask_token_id
        self.servers = [RolloutServer(url, broadcasts) for url in urls]
        self.size, self.patience, self.broadcasts = size, patience, broadcasts
        self.run = broadcast_object_list([uuid.uuid4().hex])[0]  # an earlier run's weights have other names
        self.weights: Weights | None = None
        self.folder = WeightsFolder(Path(str(trainer.args.output_dir)))
        with self.together():
            self.connect()

    def connect(self) -> None:
        """Asks all servers what they serve, until one answers."""
        waited = Waiting(self.servers, self.patience)
        while True:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                [*pool.map(self.prepare, self.servers)]
            if waited.someone_answers():
                return
            time.sleep(PAUSE)

    def prepare(self, server: RolloutServer) -> None:
        """Gives a server the current weights unless it has them, or takes it out."""
        try:
            server.prepare(self.mask_token_id, self.weights)
        except Unavailable as error:
            take_out(server, error)
        else:
            if server.problem and self.weights:
                logger.warning("%s is back, with the current weights.", server.url)
            server.problem = None

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Raise in all processes what one of them raises inside: otherwise the others would wait for it."""
        return together(first=NoServer)  # which waiting longer would not help

    def publish(self, model: Any, step: int) -> None:
        """Has the servers take the weights of `model` after so many optimizer steps, or its adapter, unless they have
        them. No process may be sampling."""
        version = f"{self.run}-{step}"
        if self.weights and self.weights.version == version:
            return
        self.accelerator.wait_for_everyone()
        with self.together():
            if self.accelerator.is_main_process:
                self.write(self.folder, model, version)
        self.weights = Weights(self.run, version, Path(broadcast_object_list([str(self.folder.path)])[0], version))
        with self.together():
            if self.accelerator.is_main_process:
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    [*pool.map(self.prepare, [server for server in self.servers if not server.problem])]

    def write(self, folder: WeightsFolder, model: Any, version: str, copy: Path | None = None) -> None:
        """Writes weights, as `WeightsFolder.write` does, where all servers read them and in a format that they read."""
        if self.broadcasts:
            folder.write(model, version, [None], copy=copy)
            return
        known = [one for one in self.servers if one.folders != []]
        # An engine reads any folder of its own machine, and the run's where machines share it.
        shared = [str(folder.output_dir)]
        readable = [shared if one.folders is None and not one.is_local else one.folders for one in known]
        folder.write(model, version, readable, any(one.folders is None for one in known), copy)

    def close(self) -> None:
        """Removes the weights that were written; a later `publish` writes again."""
        self.weights = None
        self.folder.remove()

    def sample(self, prompts: Prompts) -> ServedRollout:
        """The rollout of prompts by the servers that answer, with the weights of the last `publish`.

        Raises:
            NoServer: none has answered for `patience` seconds.
            ValueError: a server refuses the rows.
        """
        assert self.weights is not None
        parts = prompts.split(self.size or -(-len(prompts.ids) // len(self.servers)))
        queue: SimpleQueue[Part | None] = SimpleQueue()
        futures: list[Future[tuple[Rollout, str]]] = [Future() for _ in parts]
        for part in zip(parts, futures, strict=True):
            queue.put(part)
        over, held = Event(), dict[RolloutServer, Part]()
        for server in self.servers:
            Thread(target=self.work, args=(server, queue, held, over), name=server.url, daemon=True).start()
        Thread(target=watch, args=(queue, held, over), daemon=True).start()
        waited, left = Waiting(self.servers, self.patience), {*futures}
        try:
            while left:
                done, left = wait(left, timeout=PAUSE, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    waited.since = None
                waited.someone_answers()
            rollouts, urls = zip(*(future.result() for future in futures), strict=True)
            sources = (url for part, url in zip(parts, urls, strict=True) for _ in part.keys)
            return ServedRollout(**vars(Rollout.joined(rollouts)), sources=tuple(sources))
        finally:
            over.set()
            for _ in self.servers:
                queue.put(None)

    def work(
        self, server: RolloutServer, queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event
    ) -> None:
        """A thread of `sample`: sends parts to a server, one at a time, and asks a server that failed again. `held` are
        the parts that servers have."""
        assert self.weights is not None
        while not over.is_set():
            try:
                if server.problem or server.version != self.weights.version:
                    self.prepare(server)
            except Exception as error:  # it refuses the weights, but others may have taken them
                take_out(server, error)
            if server.problem:
                over.wait(PAUSE)
                continue
            part = queue.get()
            if part is None:
                return
            held[server], (prompts, future) = part, part
            with contextlib.suppress(InvalidStateError):
                try:
                    future.set_result((server.sample(prompts, self.weights), server.url))
                except Unavailable as error:
                    take_out(server, error)
                    if server in held:
                        queue.put(part)
                except Exception as error:
                    future.set_exception(error)
            held.pop(server, None)

    def rollout(
        self,
        model: Any,
        step: int,
        ids: Tensor,
        mask: Tensor,
        key: Sequence[int],
        settings: SamplingSettings,
        eos_token_ids: Sequence[int] | None,
    ) -> ServedRollout:
        """What `rollout` samples with the weights of `model` after so many optimizer steps, in the process that has the
        generators (*key, row)."""
        self.publish(model, step)
        with self.together():
            return self.sample(self.prompts(model, ids, mask, key, settings, eos_token_ids))

    def prompts(
        self,
        model: Any,
        ids: Tensor,
        mask: Tensor,
        key: Sequence[int],
        settings: SamplingSettings,
        eos_token_ids: Sequence[int] | None,
    ) -> Prompts:
        """The rows of this process."""
        first = self.accelerator.process_index * len(ids)
        keys = [(*key, first + row) for row in range(len(ids))]
        of_model = block_size(model.config) is not None, model.config.vocab_size, self.mask_token_id
        return Prompts(ids, mask, keys, settings, eos_token_ids or (), *of_model)


def take_out(server: RolloutServer, error: Exception) -> None:
    """Notes why no rows go to a server."""
    if not server.problem:
        logger.warning("No more rows go to a server until it answers: %s", error)
    server.problem = str(error)


def watch(queue: SimpleQueue[Part | None], held: dict[RolloutServer, Part], over: Event) -> None:
    """A thread of `sample`: the part of a server that has fallen silent without closing its connection, such as one
    whose machine is gone, goes to the others. Should it answer after all, the first answer counts."""
    while not over.wait(WATCH):
        for server in [*held]:
            try:
                server.ask("GET", "/model_info", seconds=CONNECT)
            except Unavailable as error:
                if part := held.pop(server, None):
                    take_out(server, error)
                    queue.put(part)


class Waiting:
    """How long no server has answered; `since`: from when on, None if one has answered or finished rows."""

    def __init__(self, servers: Sequence[RolloutServer], patience: float) -> None:
        self.servers, self.patience = servers, patience
        self.since: float | None = None
        self.told = 0.0

    def someone_answers(self) -> bool:
        """False while no server answers. Raises NoServer if this lasts too long."""
        if not all(server.problem for server in self.servers):
            return True
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        problems = "; ".join(str(server.problem) for server in self.servers)
        if now - self.since >= self.patience:
            raise NoServer(f"no rollout server has answered for {self.patience:g} seconds: {problems}")
        if now - self.told >= REMIND or not self.told:
            self.told = now
            logger.warning("Waiting for a rollout server, for at most %g seconds: %s", self.patience, problems)
        return False


def servers_of(trainer: Any) -> PolicyServers | None:
    """The servers that `DiffuGRPOConfig.rollout_mode` asks for."""
    args = trainer.args
    if args.rollout_mode != "server":
        return None
    limits = args.rollout_batch_size, args.rollout_server_timeout
    return PolicyServers(args.rollout_server_base_url, trainer, *limits, args.rollout_weights == "broadcast")


# --- Rescored ---------------------------------------------------------------------------------------------------------
#
# Score a sampled row again: whether a server's or an engine's log-probabilities are the trainer's own.
#
# Of each rollout that another program sampled, one row per process is scored in some of the states that it was sampled
# in, in one forward pass. The row and the states change from rollout to rollout. Nothing is drawn, the model and the
# batch do not change, and the cost is not part of `compute_tokens`.

STATES = 8  # that a row is scored in
EXACT = 1e-2  # nats between log-probabilities in fp32, the largest difference: their rounding is 1e-5 to 1e-3
CLOSE = 0.5  # nats, the median difference: what another data type changes is about 0.02


def check_servers(trainer: Any, batch: Batch, sources: Sequence[str]) -> None:
    """`check_scores` of a rollout whose rows these servers sampled."""
    dtypes = {server.url: server.dtype for server in trainer.servers.servers}
    stale = trainer.mode == "train" and trainer.ahead is not None and bool(trainer.ahead.behind)
    fp32 = trainer.accelerator.mixed_precision == "no" and trainer.model.dtype == torch.float32
    exact = fp32 and {dtypes[url] for url in sources} == {"float32"}

    def where(row: int) -> str:
        number = trainer.accelerator.process_index * len(sources) + row
        return f"{sources[row]}, row {row} (id {'-'.join(map(str, (*trainer.key('rollout')[1:], number)))}): "

    check_scores(trainer, batch, range(len(sources)), where, exact, certain=not stale)


def check_engine(trainer: Any, given: dict[str, Sequence[Any]], record: Batch) -> None:
    """`check_scores` of what a `rollout_func` returned. A canvas that is cut is left out: its states are not known."""
    rows = [row for row, ids in enumerate(given["completion_ids"]) if len(ids) == record["canvas_ids"].shape[1]]
    ids, mask = trainer.padded([[*prompt] for prompt in given["prompt_ids"]])
    batch = {"prompt_ids": ids, "prompt_mask": mask} | record
    check_scores(trainer, batch, rows, lambda row: f"rollout_func, row {row}: ", exact=False, certain=True)


def check_scores(
    trainer: Any, batch: Batch, rows: Sequence[int], where: Callable[[int], str], exact: bool, certain: bool
) -> None:
    """Scores one of the `rows` of a rollout again.

    Args:
        batch: `prompt_ids` and `prompt_mask` (rows, prompt), and the record of the rollout (rows, canvas):
            `canvas_ids`, `reveal_steps`, `rollout_logps` and, if known, `rollout_entropies`.
        where: from the number of a row, who sampled it.
        exact: both programs compute in fp32.
        certain: the weights are those that sampled. Then, unless the sampler approximates (a cache, or 4-bit weights in
            the trainer), a difference is an error; else a warning.

    Raises:
        ValueError: log-probabilities or entropies are not those of the model in the states that the steps say.
    """
    sampling = trainer.sampling
    if not rows or sampling.cfg_scale:  # guidance samples from other log-probabilities
        return
    certain &= sampling.cache is None and not getattr(trainer.model, "is_loaded_in_4bit", False)
    number = trainer.rollout_number if trainer.mode == "train" else trainer.evaluation_rollouts
    row = rows[number % len(rows)]
    one = {name: batch[name][row : row + 1] for name in batch}
    views = states_of(one, trainer.model.config, number)
    with trainer.without_checkpointing(), evaluating(trainer.model), trainer.accelerator.autocast():
        options = {"mask_token_id": trainer.mask_token_id, "distribution": sampling.record_distribution}
        scores = score_batch(trainer.model, one, views, views_at_once=STATES, with_entropies=True, **options)
    scored = views.weights.ne(0).any(1)
    pairs = {"log-probabilities": (one["rollout_logps"], scores.logps)}
    if "rollout_entropies" in one and scores.entropies is not None:
        pairs["entropies"] = one["rollout_entropies"], scores.entropies
    for what, (told, own) in pairs.items():
        gaps = (own.float() - told)[scored].abs().cpu()
        at = int(gaps.argmax())
        if gaps.median() <= CLOSE and not (exact and certain and gaps[at] > EXACT):
            continue
        place = int(scored[0].nonzero()[at])
        message = (
            f"{where(row)}the {what} are not those of this run's model, which scored {len(gaps)} tokens again: the "
            f"difference is {gaps.median():.3g} nats in the median, and at token {place} they are "
            f"{told[0, place]:.4g} and {own[0, place]:.4g}"
        )
        if certain:
            raise ValueError(f"{message}: other weights, settings or tokens than those of the rows sampled them")
        if not trainer.warned_of_scores:
            logger.warning("%s. The sampler approximates, or its weights are older; this is said once.", message)
            trainer.warned_of_scores = True


def states_of(one: Batch, config: Any, number: int) -> Views:
    """Up to `STATES` views of one row, evenly spaced over its steps: the states in which it was sampled, and the tokens
    that were revealed there."""
    prompts, canvas = one["prompt_mask"], one["canvas_ids"]
    sampled = SampledRows(
        prompt_ids=one["prompt_ids"],
        attention_mask=prompts,
        maskable=prompts.bool(),
        canvas_ids=canvas,
        scored=one["reveal_steps"] >= 0,
        reveal_steps=one["reveal_steps"],
        logps=one["rollout_logps"],
        entropies=one["rollout_logps"],
        blocks=blocks_of(prompts, canvas.shape[1], block_size(config)),
    )
    written = Written.of(sampled)
    steps = int(written.steps.max()) + 1
    count = min(STATES, steps)
    chosen = (torch.arange(count, device=canvas.device) * steps // count + number) % steps
    weights = torch.ones(1, count, device=canvas.device)
    return replay_views(torch.zeros_like(prompts, dtype=torch.bool).unsqueeze(1), written, chosen.unsqueeze(0), weights)


# --- Rollout func -----------------------------------------------------------------------------------------------------
#
# Rollouts of an engine of the user's own: TRL's `rollout_func(prompts, trainer)`, and the check of what it returns.
#
# It gets the prompts of this process's rows, chat messages, and returns a dictionary of lists, one entry per row:
#
#   unless the method replays the sampler's states or scores tokens after an EOS;
#   tokens after the first EOS that were filled in and not revealed;
#
# As in TRL, other keys go to the rewards, as columns. Keys are optional or None only if no row of the run reads them.

TOKENS = ("prompt_ids", "completion_ids")
RECORD = {"steps": "reveal_steps", "logprobs": "rollout_logps", "entropies": "rollout_entropies"}
READ = {"reveal_steps": "steps", "logps": "logprobs", "entropies": "entropies"}  # of `SampledRows`
COLUMNS = {"completion_ids": "canvas_ids", **RECORD}


def readers(args: Any) -> dict[str, list[str]]:
    """Which of `RECORD` the run's rows read: key -> settings that name these rows."""
    estimator, read = ESTIMATORS[args.estimator], {name: list[str]() for name in RECORD}
    for column in dict.fromkeys((*["reveal_steps"] * estimator.replays, *estimator.reads(args.view_settings()))):
        read[READ[column]].append(f"estimator {args.estimator}")
    if args.sampling_weight_cap is not None:
        read["logprobs"].append("sampling_weight_cap")
    of_steps = {
        f"objective {args.objective}": OBJECTIVES[args.objective].reads_steps,
        f"kl {args.kl}": PENALTIES[args.kl].reads_steps and args.beta and not args.has_trls_kl,
        f"scored_tokens {args.scored_tokens}": SCORED[args.scored_tokens].reads_steps,
    }
    read["steps"] += [name for name, reads in of_steps.items() if reads]
    return {key: names for key, names in read.items() if names}


def check_rollout_func(args: Any) -> None:
    """Raises ValueError for settings that no `rollout_func` can serve."""
    if args.rollout_mode == "server":
        raise ValueError("rollout_func samples the rollouts, and so would rollout_mode server: choose one of them")
    if args.sampling_settings().edits is not None:
        raise ValueError("edit_threshold: a rollout_func does not return what edits replaced: leave it out")
    if args.max_compute_tokens is not None:
        raise ValueError("max_compute_tokens counts the tokens of rollouts, which a rollout_func does not tell")


def user_rollout(function: Callable[[list, Any], dict[str, Any]], prompts: list, trainer: Any) -> dict[str, Any]:
    """What TRL expects of a `rollout_func`; the record of the canvases becomes the trainer's.

    Raises:
        ValueError: the function returned something else, or not what the method reads.
    """
    started = time.perf_counter()
    returned = function(prompts, trainer)
    if not isinstance(returned, dict):
        raise ValueError(f"rollout_func returned {type(returned).__name__}: expected a dictionary of lists")
    if returned.get("env_mask") is not None:
        raise ValueError("rollout_func returned env_mask: every token of a canvas is the model's, so leave it out")
    given = {name: returned[name] for name in (*TOKENS, *RECORD) if returned.get(name) is not None}
    for name, rows in given.items():
        if not isinstance(rows, Sequence) or len(rows) != len(prompts):
            found = len(rows) if isinstance(rows, Sequence) else type(rows).__name__
            raise ValueError(f"rollout_func got {len(prompts)} prompts: expected a list of as many {name}, got {found}")
    check_keys(given, trainer)
    record = record_of(given, trainer)
    completions = texts_of(record["canvas_ids"], trainer.eos_token_ids)
    trainer.record = {name: column.to(trainer.accelerator.device) for name, column in record.items()}
    log_rollout(trainer, started, record["canvas_ids"].numel(), {})
    if {"steps", "logprobs"} <= given.keys() and not trainer.weights_are_split:
        check_engine(trainer, given, trainer.record)
    others = {name: value for name, value in returned.items() if name not in (*TOKENS, *RECORD, "env_mask")}
    return {"prompt_ids": given["prompt_ids"], "completion_ids": completions, "logprobs": None} | others


def check_keys(given: Iterable[str], trainer: Any) -> None:
    """Raises ValueError if a key is missing that the run reads, or that other processes have."""
    if missing := {*TOKENS}.difference(given):
        raise ValueError(f"rollout_func returned no {min(missing)}: every method needs them")
    for name, names in readers(trainer.args).items():
        if name not in given:
            raise ValueError(
                f"rollout_func returned no {name}, which --method {trainer.args.method} reads ({', '.join(names)}): "
                "return them, or choose a method that reads tokens alone, such as d1 or espo"
            )
    own = torch.tensor([[name in given for name in RECORD]], device=trainer.accelerator.device)
    if not (trainer.accelerator.gather(own) == own).all():
        raise ValueError(f"rollout_func returned {', '.join(given)} here, and other keys in another process")


def record_of(given: dict[str, Sequence[Any]], trainer: Any) -> Batch:
    """The columns (rows, canvas) of the rows, checked: `canvas_ids`, `reveal_steps`, and those of `RECORD` given."""
    args, config, ends = trainer.args, trainer.model.config, trainer.eos_token_ids
    behind = ESTIMATORS[args.estimator].replays or SCORED[args.scored_tokens].behind_the_end
    whole = f"--method {args.method} reads what follows the EOS" if behind else ""
    aligned = block_size(config) is not None
    expected = Expected(config.vocab_size, trainer.mask_token_id, ends, trainer.sampling, aligned, by_our_rules=False)
    shape = len(given["completion_ids"]), int(args.max_completion_length)
    record = {"canvas_ids": torch.full(shape, ends[0]), "reveal_steps": torch.full(shape, -1)}
    record |= {column: torch.zeros(shape) for name, column in RECORD.items() if name in given and name != "steps"}
    for number, prompt in enumerate(given["prompt_ids"]):
        where = f"rollout_func, row {number}: "
        check_ids(prompt, f"{where}prompt_ids", config.vocab_size, args.max_prompt_length, "max_prompt_length")
        row = {name: rows[number] for name, rows in given.items() if name != "prompt_ids"}
        for name, values in check_row(where, row, len(prompt), expected, whole).items():
            column = record[COLUMNS[name]]
            column[number, : len(values)] = values.to(column.dtype)
    return record


# --- Ahead ------------------------------------------------------------------------------------------------------------
#
# Rollouts ahead of updates (`rollout_staleness` N): servers sample the next rollouts while the trainer learns.
#
# Rollout k is sampled with the weights before the updates on rollout max(0, k - N), however fast trainer and servers
# are. When rollout k is needed, the first process keeps a copy of the weights and asks for rollout k + N with it. One
# thread does what was asked in that order, so that all rows of a rollout have the same weights. It samples the rows of
# all processes; they wait for rollout k together. A checkpoint holds the copies that later rollouts need, and a resumed
# run asks for these rollouts again: they depend on weights and keys alone.

FOLDER = "rollouts_ahead"  # of a checkpoint


class Asked(NamedTuple):
    """A rollout that was asked for: the ids of its prompts, the step of its weights, and its result."""

    prompt_ids: list[list[int]]
    step: int
    result: Future[ServedRollout]


class Ahead:
    """The rollouts ahead of a trainer. All processes call its methods together.

    Attributes:
        kept: rollout number -> optimizer steps before it, and the folder with the weights from then.
        asked: rollout number -> what was asked for. Both are used in the first process alone.
        behind: optimizer steps since the weights that sampled the last rollout taken were the trainer's.
    """

    def __init__(self, trainer: Any, staleness: int) -> None:
        self.trainer, self.staleness = trainer, staleness
        output_dir = Path(str(trainer.args.output_dir))
        # A run that has lost its servers is saved as of the start of its step, which may have had several rollouts.
        of_a_step = -(-trainer.args.gradient_accumulation_steps // trainer.micro_steps_per_rollout)
        self.folders = [WeightsFolder(output_dir, f"-{slot}") for slot in range(staleness + of_a_step)]
        self.kept: dict[int, tuple[int, Path]] = {}
        self.asked: dict[int, Asked] = {}
        self.thread = ThreadPoolExecutor(1)
        self.at_work, self.behind = False, 0

    def weights_of(self, number: int) -> int:
        """The rollout before whose updates the weights of rollout `number` were those of the trainer."""
        return max(0, number - self.staleness)

    def take(self, ids: Tensor, mask: Tensor) -> ServedRollout:
        """The trainer's current rollout, the rows of this process, whose prompts (rows, prompt) must be these; asks for
        the one that the policy's present weights are to sample.

        Raises:
            NoServer, ValueError: as `PolicyServers.sample`.
        """
        trainer, number, found = self.trainer, self.trainer.rollout_number, None
        self.at_work = True
        with trainer.sampling_model() as model, trainer.servers.together():
            if trainer.accelerator.is_main_process:
                self.keep(number, trainer.state.global_step, model)
                for later in range(number, number + self.staleness + 1):
                    self.ask(model, later)
                asked = self.asked[number]
                found = asked.prompt_ids, asked.step, asked.result.result()
                del self.asked[number]
        prompt_ids, step, sampled = broadcast_object_list([found])[0]
        first = trainer.accelerator.process_index * len(ids)
        own = slice(first, first + len(ids))
        if prompt_ids[own] != [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]:
            raise ValueError("rollout_staleness: the training rows came in another order than the trainer's sampler's")
        trainer.log_metric("sampling/staleness", number - self.weights_of(number))
        self.behind = trainer.state.global_step - step
        trainer.log_metric("sampling/staleness_steps", self.behind)
        columns: dict[str, Any] = {
            name: of[own].to(ids.device) for name, of in vars(sampled).items() if isinstance(of, Tensor)
        }
        return ServedRollout(**columns, sources=sampled.sources[own])

    def keep(self, number: int, step: int, model: Any, copy: Path | None = None) -> None:
        """Keeps the weights of `model`, or those in the folder `copy`, from before the updates on a rollout."""
        servers, folder = self.trainer.servers, self.folders[number % len(self.folders)]
        servers.write(folder, model, f"{servers.run}-{step}", copy)
        self.kept = {one: where for one, where in self.kept.items() if one > number - len(self.folders)}
        self.kept[number] = step, folder.path / f"{servers.run}-{step}"

    def ask(self, model: Any, number: int) -> None:
        """Asks for a rollout, unless that was done or the run ends before it."""
        trainer, servers = self.trainer, self.trainer.servers
        start = number * trainer.micro_steps_per_rollout
        beyond = start // trainer.args.gradient_accumulation_steps >= trainer.state.max_steps
        if number in self.asked or (beyond and number > trainer.rollout_number):
            return
        prompt_ids = trainer.encoded([row["prompt"] for row in rows_of(trainer, number)])
        ids, mask = (part.cpu() for part in trainer.padded(prompt_ids))
        key, ends = trainer.key("rollout", start), trainer.eos_token_ids if trainer.eos_stop else None
        prompts = servers.prompts(model, ids, mask, key, trainer.sampling, ends)
        step, folder = self.kept[self.weights_of(number)]
        weights = Weights(servers.run, f"{servers.run}-{step}", folder)
        self.asked[number] = Asked(prompt_ids, step, self.thread.submit(self.sample, prompts, weights))

    def sample(self, prompts: Prompts, weights: Weights) -> ServedRollout:
        """In the thread: the servers take the weights before they get rows."""
        self.trainer.servers.weights = weights
        return self.trainer.servers.sample(prompts)

    def finish(self) -> None:
        """Waits for what was asked for, before something else is sampled with other weights."""
        if self.at_work:
            wait([one.result for one in self.asked.values()])
            self.trainer.servers.weights = None  # in all processes, so that all of them publish
            self.at_work = False

    def close(self) -> None:
        """Drops what was asked for and removes the weights that were kept."""
        self.thread.shutdown(cancel_futures=True)
        self.thread = ThreadPoolExecutor(1)
        self.asked.clear()
        self.kept.clear()
        for folder in self.folders:
            folder.remove()

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes the weights of the rollouts that follow the current one into a checkpoint."""
        trainer = self.trainer
        following = -(-trainer.micro_step // trainer.micro_steps_per_rollout)
        if trainer.accelerator.is_main_process:
            for number in {self.weights_of(later) for later in range(following, following + self.staleness)}:
                step, folder = self.kept[number]
                shutil.copytree(folder, checkpoint / FOLDER / f"{number}-{step}", dirs_exist_ok=True)

    def load(self, checkpoint: Path) -> None:
        """Takes what `save` wrote. Raises ValueError if it is missing."""
        if self.trainer.accelerator.is_main_process:
            for number, step, folder in saved(checkpoint):
                self.keep(number, step, self.trainer.accelerator.unwrap_model(self.trainer.model), folder)


def rows_of(trainer: Any, number: int) -> list[dict[str, Any]]:
    """The rows of the dataset, of all processes, of a training rollout before TRL asks for them."""
    args, dataset, prompts = trainer.args, trainer.train_dataset, trainer.args.generation_batch_size
    groups = prompts // trainer.num_generations
    epoch, place = divmod(number, len(dataset) // groups)
    order = EpochSampler(
        dataset,
        mini_repeat_count=trainer.num_generations,
        batch_size=groups,
        shuffle=trainer.shuffle_dataset,
        seed=args.seed,
        epoch=lambda: epoch,
    )
    return [dataset[index] for index in islice(order, place * prompts, (place + 1) * prompts)]


def saved(checkpoint: Path) -> list[tuple[int, int, Path]]:
    """The weights in a checkpoint: rollout number, optimizer steps, folder. Raises ValueError if there are none."""
    with reading(checkpoint / FOLDER):
        folders = sorted((checkpoint / FOLDER).iterdir())
        return [(*map(int, folder.name.split("-")), folder) for folder in folders]  # type: ignore[misc]


def ahead_of(trainer: Any) -> Ahead | None:
    """The rollouts ahead that `rollout_staleness` asks for."""
    staleness = trainer.args.rollout_staleness
    return Ahead(trainer, staleness) if staleness and trainer.servers is not None else None
