"""This library's samplers inside SGLang: exact and parallel decoding with the random numbers of `d1 serve`, and for RL
the log-probability, entropy and step of every token.

    python -m sglang.launch_server --model-path JetLM/SDAR-1.7B-Chat --dllm-algorithm D1 --max-running-requests 64

SGLang finds the plugin by the entry point `sglang.srt.plugins` of this package. A request sets its `SamplingSettings`
in `sampling_params["custom_params"]`, as `d1.serve.client` does; a plain request is sampled one token per pass, at its
own temperature. Answers have, per token, `output_token_logprobs`, `output_token_entropies`, `step_maps` and
`forward_passes` (of a block, at its first token) in `meta_info`.

SGLang makes one more pass per block than our sampler, to store the block's keys and values; our sampler leaves that to
the next block. SGLang fills whole blocks: if a canvas ends inside a block, the positions after its end stay masks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from d1.masking import keyed_generator
from d1.models.head import CHUNK_ELEMENTS, chunk_factor
from d1.sampling.edits import remaining_after_edits
from d1.sampling.loop import Row, select_confident
from d1.sampling.predict import predict_from
from d1.sampling.settings import POST_STEPS_RANGE, UNIFORM_NOISE_DEFAULTS, SamplingSettings, refuse_scdd
from d1.serve.engine import key_of

VERSION = "0.5.23"  # of SGLang: the only one that this plugin was tried with
NAME = "D1"  # of the algorithm
ANY_TOP_K = 1 << 30  # SGLang's
NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or float16 overflows (--dtype bfloat16); d1 serve and "
    "d1 eval name the layer"
)
NAMES = {setting.name for setting in fields(SamplingSettings)}

logger = logging.getLogger(__name__)

# --- What a forward pass does: this library's rules, on blocks of several rows. Needs no SGLang. ----------------------

# Lists with one value per token, in SGLang's `meta_info`.
META_LISTS = ("output_token_logprobs", "output_token_entropies", "step_maps", "forward_passes")


@dataclass
class Sampled:
    """A completion in progress, with the record of its finished blocks and of the open one."""

    row: Row
    settings: SamplingSettings
    generator: Generator
    ends: tuple[int, ...] = ()
    record: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in META_LISTS})
    is_open: bool = False  # whether a block is open
    start: int = 0  # the position in the block where the completion begins
    generator_state: Any = None  # at the start of the block
    block: Any = None  # (3, block): log-probs, entropies and steps
    passes: int = 0  # of the open block
    has_ended: bool = False  # a finished block holds one of `ends`
    is_nonfinite: bool = False  # a log-prob or an entropy was not finite

    @classmethod
    def create(
        cls, prompt: int, rid: str, seed: int, ends: Sequence[int], settings: SamplingSettings, device: Any
    ) -> Sampled:
        prompt_in_block = prompt % settings.block_length
        generator = keyed_generator(seed, *key_of(rid.partition(".")[0]), device=device)
        row = Row(0, prompt, prompt_in_block, settings.schedule(prompt_in_block), generator, settings=settings)
        return cls(row, settings, generator, tuple(ends))

    def begin(self, block_size: int) -> bool:
        """Begins the next block; if one is open (SGLang has dropped its tokens), begins it again and returns True."""
        row = self.row
        is_restart = self.is_open
        if is_restart:
            row.remaining = row.size
            row.hidden_count = row.size
            row.step = 0
            row.post_passes = 0
            self.generator.set_state(self.generator_state)
        else:
            row.open_block()
            self.is_open = True
            self.passes = 0
            self.generator_state = self.generator.get_state()
        self.start = row.prompt_in_block if row.block == 0 else 0
        self.block = torch.zeros(3, block_size, device=self.generator.device)
        return is_restart

    def close(self, ids: Sequence[int], values: Sequence[Sequence[float]]) -> None:
        """Adds the block's `ids` and (log-probs, entropies, steps) to the record."""
        completion = slice(self.start, self.start + self.row.size)
        completion_ids = ids[completion]
        logps, entropies, steps = (column[completion] for column in values)
        entries = [[logp, token, None] for logp, token in zip(logps, completion_ids, strict=True)]
        self.record["output_token_logprobs"].extend(entries)
        self.record["output_token_entropies"].extend(entropies)
        self.record["step_maps"].extend(map(int, steps))
        self.record["forward_passes"].extend([self.passes] + [0] * (self.row.size - 1))
        self.is_open = False
        self.has_ended = any(token in self.ends for token in completion_ids)


def write_tokens(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled], mask_token_id: int) -> list[bool]:
    """Write what one forward pass reveals or edits into the blocks of rows, as `Sampler.step` does.

    Args:
        ids: (rows, block), changed in number.
        logits: (rows, block, vocab).

    Returns:
        Whether each row's pass wrote nothing, so that the engine's keys and values are those of the final tokens.
    """
    settings = sampled[0].settings
    rows = [completion.row for completion in sampled]
    generators = [completion.generator for completion in sampled]

    # positions (rows, n): those in the block that this pass may write, left to right; short rows are padded.
    column = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.tensor([completion.start for completion in sampled], device=ids.device).unsqueeze(1)
    sizes = torch.tensor([row.size for row in rows], device=ids.device).unsqueeze(1)
    in_completion = (column >= starts) & (column < starts + sizes)
    block_hidden = (ids == mask_token_id) & in_completion
    is_target = block_hidden if settings.edits is None else in_completion
    counts = [row.remaining for row in rows]
    positions = is_target.logical_not().byte().argsort(dim=1, stable=True)[:, : max(counts)]

    # Predict and choose. due (rows,): tokens to reveal in this step, so that the later steps of the schedule get
    # theirs.
    hidden = block_hidden.gather(1, positions)
    old_ids = ids.gather(1, positions).long()
    due = (hidden.sum(1) - torch.tensor([row.scheduled_later for row in rows], device=ids.device)).clamp(min=1)
    target_logits = logits.gather(1, positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1])).float()
    new_ids, logps, entropies, record_logps = predict_from(target_logits, counts, settings, mask_token_id, generators)
    chosen = select_confident(settings, logps, entropies, hidden, due, counts, generators)
    edited = torch.zeros_like(chosen)
    if settings.edits is not None:  # a visible token is replaced if another one is probable enough
        is_probable = logps.exp() > settings.edits
        edited = is_target.gather(1, positions) & ~hidden & (new_ids != old_ids) & is_probable
        chosen = chosen | edited

    # Write.
    ids.scatter_(1, positions, torch.where(chosen, new_ids, old_ids).to(ids.dtype))
    nonfinite = chosen & ~(record_logps + entropies).isfinite()
    # One transfer to the host for all counts of the pass.
    still_hidden = hidden.sum(1) - (hidden & chosen).sum(1)
    row_counts = torch.stack([still_hidden, edited.sum(1), chosen.sum(1), nonfinite.sum(1)], dim=1).tolist()
    for number, completion in enumerate(sampled):
        hidden_count, edit_count, _, nonfinite_count = row_counts[number]
        if nonfinite_count > 0:
            completion.is_nonfinite = True
        row = completion.row
        row.remaining = hidden_count
        if settings.edits is not None:
            row.remaining = remaining_after_edits(row, hidden_count, edit_count, settings.post_steps)
        row.step += 1
        # The last write of a position counts.
        steps = torch.full_like(record_logps[number], row.step)
        values = torch.stack([record_logps[number], entropies[number], steps])
        written = positions[number]
        completion.block[:, written] = torch.where(chosen[number], values, completion.block[:, written])
    return [write_count == 0 for _, _, write_count, _ in row_counts]


def step_blocks(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled | None], mask_token_id: int) -> list[bool]:
    """One forward pass of the engine over blocks; None for a row whose block holds only tokens of the prompt.

    Returns:
        Which blocks are finished: their tokens were final before the pass. Their record is complete.
    """
    is_finished = [True] * len(sampled)
    groups: dict[SamplingSettings, list[tuple[int, Sampled]]] = {}
    for number, completion in enumerate(sampled):
        if completion is None:
            continue
        completion.passes += 1
        if completion.row.remaining:
            groups.setdefault(completion.settings, []).append((number, completion))

    # Rows with equal settings share the arithmetic, a bounded number of logits at a time.
    elements = CHUNK_ELEMENTS // 2 * chunk_factor(logits.device)
    max_rows = max(1, elements // logits.shape[1:].numel())
    for group in groups.values():
        for start in range(0, len(group), max_rows):
            chunk = group[start : start + max_rows]
            numbers = [number for number, _ in chunk]
            chunk_ids = ids[numbers]
            is_unchanged = write_tokens(
                chunk_ids, logits[numbers], [completion for _, completion in chunk], mask_token_id
            )
            ids[numbers] = chunk_ids
            for index, (number, completion) in enumerate(chunk):
                is_finished[number] = is_unchanged[index] and completion.row.remaining == 0
    return is_finished


def record_blocks(ids: Tensor, finished: Sequence[tuple[int, Sampled]]) -> None:
    """Records the finished blocks of these rows of `ids`."""
    if not finished:
        return
    blocks = []
    for number, completion in finished:
        blocks.append(torch.cat([completion.block.double(), ids[number].double().unsqueeze(0)]))
    rows = torch.stack(blocks).tolist()  # one transfer to the host
    for (_, completion), (logps, entropies, steps, block_ids) in zip(finished, rows, strict=True):
        completion.close([*map(int, block_ids)], [logps, entropies, steps])


# --- The plugin -------------------------------------------------------------------------------------------------------


def read_ends(custom: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a row; ValueError if `eos_stop` is no list of ids."""
    ends = custom.get("eos_stop", [])
    if not isinstance(ends, list | tuple) or not all(isinstance(end, int) for end in ends):
        raise ValueError(f"eos_stop must be a list of token ids, got {ends!r:.60}")
    return tuple(ends)


def read_seed(params: Any) -> int:
    """The seed of a request; ValueError if it is none."""
    seed = (params.custom_params or {}).get("seed", params.sampling_seed or 0)
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"the seed must be an integer >= 0, got {seed!r:.60}")
    return seed


def settings_of(params: Any, block_size: int) -> SamplingSettings:
    """The settings that SGLang's sampling parameters ask for.

    Raises:
        ValueError: they make no sense, or the engine does not do what they ask for.
    """
    length = params.max_new_tokens
    custom = params.custom_params or {}
    values = custom.get("settings")
    if not isinstance(values, dict | None):
        raise ValueError(f"settings must be an object, got {values!r:.60}")
    read_ends(custom)
    read_seed(params)
    if values is None:
        values = {"block_length": block_size, "steps": length}
        if params.top_k != 1:  # which SGLang writes for temperature 0
            values["temperature"] = params.temperature
            values["top_k"] = 0 if params.top_k == ANY_TOP_K else params.top_k
            values["top_p"] = params.top_p
    unknown = values.keys() - NAMES
    if unknown:
        raise ValueError(f"{min(unknown)} is no setting of a sampler: known are {', '.join(sorted(NAMES))}")
    values = dict(values)  # the request stays as it is
    values["gen_length"] = length
    settings = SamplingSettings(**values)
    if settings.block_length != block_size:
        raise ValueError(f"block_length must be {block_size}, not {settings.block_length}: it is that of the model")
    refuse_scdd(settings, "SGLang")
    for name, unset in (UNIFORM_NOISE_DEFAULTS | {"first_token": None}).items():
        if getattr(settings, name) != unset:
            raise ValueError(f"{name} would be ignored: no model that SGLang samples with this plugin reads it")
    if settings.cfg_scale > 0 or settings.cache is not None:
        raise ValueError("SGLang does no guidance and has a cache of its own: use d1 serve for cfg_scale and kv_cache")
    return settings


def register() -> None:
    """Add the algorithm to SGLang, which calls this function in each of its processes."""
    installed = version("sglang")
    if installed != VERSION:
        logger.warning(
            "the algorithm %s of d1 is left out of sglang %s: it goes with %s alone", NAME, installed, VERSION
        )
        return
    from sglang.srt.dllm.algorithm import algo_name_to_cls
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    read_configs()
    algo_name_to_cls[NAME] = algorithm_class()
    worker = "sglang.srt.managers.tp_worker.TpModelWorker._forward_batch_generation_dllm"
    HookRegistry.register(worker, pass_requests, HookType.BEFORE)
    HookRegistry.register("sglang.srt.dllm.config.DllmConfig.from_server_args", set_model_sizes, HookType.AFTER)


class SDARConfig(PretrainedConfig):
    """The config as it was released. The fields keep their names: SGLang reads `rope_theta`, which newer classes of
    Transformers rename."""

    model_type = "sdar"


class SDARMoeConfig(PretrainedConfig):
    model_type = "sdar_moe"


class LLaDA2Config(PretrainedConfig):
    model_type = "llada2_moe"


def read_configs() -> None:
    """Lets Transformers read the configs of the models as released, so that no code that comes with a model runs."""
    for config in (SDARConfig, SDARMoeConfig, LLaDA2Config):
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)


def pass_requests(worker: Any, forward_batch: Any, batch: Any = None) -> None:
    """Before a forward pass: shows the algorithm the requests of its batch."""
    worker.dllm_algorithm.requests = [] if batch is None else batch.reqs


def set_model_sizes(config: Any, server_args: Any) -> None:
    """After SGLang has made a config with its own constants: takes the model's mask token and block size from the
    model's `config.json`, where it has them. DiffusionGemma has no mask token."""
    if config is None or config.mask_id < 0:
        return
    model_config, _ = PretrainedConfig.get_config_dict(server_args.model_path)
    config.mask_id = model_config.get("mask_token_id") or config.mask_id
    if "block_size" not in config.algorithm_config:
        config.block_size = model_config.get("block_size") or config.block_size


def algorithm_class() -> type:
    """The class that SGLang runs; it lies in a function because its base is SGLang's."""
    from sglang.srt.dllm.algorithm.base import DllmAlgorithm
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    class D1(DllmAlgorithm):
        requests: Sequence[Any] = ()

        @classmethod
        def validate_request(cls, request: Any) -> str | None:
            config = request.dllm_config
            params = request.sampling_params
            mask_token_id = (params.custom_params or {}).get("mask_token_id", config.mask_id)
            if mask_token_id != config.mask_id:
                return f"this server hides tokens by {config.mask_id}, and the request by {mask_token_id}"
            if params.max_new_tokens == 0:  # for `n` above 1, SGLang caches the prompt first
                return None
            try:
                settings_of(params, config.block_size)
            except (TypeError, ValueError) as error:
                return str(error)
            return None

        def max_steps(self, block_size: int) -> int:
            return block_size + int(POST_STEPS_RANGE.high) + 1

        def init_step_state(self, forward_batch: Any) -> list[Any]:
            return [Block() for _ in range(forward_batch.batch_size)]

        def step(self, forward_batch: Any, full_logits: Tensor, states: list[Any]) -> list[bool]:
            ids = forward_batch.input_ids.view(-1, self.block_size)
            logits = full_logits.view(len(ids), self.block_size, -1)
            completions = []
            for request, state in zip(self.requests, states, strict=True):
                completions.append(self.completion_of(request, state, ids.device))
            for number, (completion, state) in enumerate(zip(completions, states, strict=True)):
                if completion is not None and state.begins:
                    state.begins = False
                    is_restart = completion.begin(self.block_size)
                    if is_restart:
                        start = completion.start
                        ids[number, start : start + completion.row.size] = self.mask_id

            is_finished = step_blocks(ids, logits, completions, self.mask_id)
            finished = []
            for number, completion in enumerate(completions):
                if completion is not None and is_finished[number]:
                    finished.append((number, completion))
            record_blocks(ids, finished)
            for number, completion in finished:
                states[number].is_finished = True
                request = self.requests[number]
                if completion.is_nonfinite:
                    request.to_finish = FINISH_ABORT(NOT_FINITE, HTTPStatus.INTERNAL_SERVER_ERROR, "NotFiniteError")
                if completion.has_ended:  # SGLang ends a request at its length
                    request.sampling_params.max_new_tokens = len(request.output_ids) + completion.row.size
            return is_finished

        def completion_of(self, request: Any, state: Any, device: Any) -> Sampled | None:
            """What is sampled in the request's block; None if the block has no masks, or was finished before."""
            params = request.sampling_params
            visible_tokens = len(request.origin_input_ids) + len(request.output_ids)
            has_masks = params.max_new_tokens and request.dllm_block_offset + self.block_size > visible_tokens
            if state.is_finished or not has_masks:
                return None
            if not hasattr(request, "d1_sampled"):
                request.d1_sampled = Sampled.create(
                    prompt=len(request.origin_input_ids),
                    rid=request.rid,
                    seed=read_seed(params),
                    ends=read_ends(params.custom_params or {}),
                    settings=settings_of(params, self.block_size),
                    device=device,
                )
                request.customized_info = request.d1_sampled.record
            if request.retraction_count != state.retractions:
                state.begins = True
                state.retractions = request.retraction_count
            return request.d1_sampled

    return D1


@dataclass
class Block:
    """What SGLang carries along with a block."""

    begins: bool = True
    is_finished: bool = False
    retractions: int = 0
