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
from d1.sampling.settings import POST_STEPS_RANGE, SamplingSettings
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
    open: bool = False  # whether a block is open
    first: int = 0  # the position in the block where the completion begins
    begun: Any = None  # the generator's state at the start of the block
    block: Any = None  # (3, block): log-probs, entropies and steps
    passes: int = 0  # of the open block
    ended: bool = False  # a finished block holds one of `ends`
    broken: bool = False  # a log-prob or an entropy was not finite

    @classmethod
    def of(
        cls, prompt: int, rid: str, seed: int, ends: Sequence[int], settings: SamplingSettings, device: Any
    ) -> Sampled:
        inside = prompt % settings.block_length
        generator = keyed_generator(seed, *key_of(rid.partition(".")[0]), device=device)
        row = Row(0, prompt, inside, settings.schedule(inside), generator, settings=settings)
        return cls(row, settings, generator, tuple(ends))

    def begin(self, block_size: int) -> bool:
        """Begins the next block; if one is open (SGLang has dropped its tokens), begins it again and returns True."""
        again, row = self.open, self.row
        if again:
            row.remaining, row.hidden_count, row.step, row.post_passes = row.size, row.size, 0, 0
            self.generator.set_state(self.begun)
        else:
            row.open_block()
            self.open, self.passes, self.begun = True, 0, self.generator.get_state()
        self.first = row.prompt_in_block if row.block == 0 else 0
        self.block = torch.zeros(3, block_size, device=self.generator.device)
        return again

    def close(self, ids: Sequence[int], values: Sequence[Sequence[float]]) -> None:
        """Adds the block's `ids` and (log-probs, entropies, steps) to the record."""
        own = slice(self.first, self.first + self.row.size)
        logps, entropies, steps = (of[own] for of in values)
        entries = [[logp, token, None] for logp, token in zip(logps, ids[own], strict=True)]
        passes = [self.passes] + [0] * (self.row.size - 1)
        new: tuple[list[Any], ...] = (entries, [*entropies], [*map(int, steps)], passes)
        for name, values_of_block in zip(META_LISTS, new, strict=True):
            self.record[name].extend(values_of_block)
        self.open, self.ended = False, any(token in self.ends for token in ids[own])


def pass_of(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled], mask_token_id: int) -> list[bool]:
    """Write what one forward pass reveals or edits into the blocks of rows, as `Sampler.step` does.

    Args:
        ids: (rows, block), changed in number.
        logits: (rows, block, vocab).

    Returns:
        Whether each row's pass wrote nothing, so that the engine's keys and values are those of the final tokens.
    """
    settings, rows = sampled[0].settings, [one.row for one in sampled]
    position = torch.arange(ids.shape[1], device=ids.device)
    firsts = torch.tensor([one.first for one in sampled], device=ids.device).unsqueeze(1)
    sizes = torch.tensor([row.size for row in rows], device=ids.device).unsqueeze(1)
    inside = (position >= firsts) & (position < firsts + sizes)
    hidden = (ids == mask_token_id) & inside
    asked = hidden if settings.edits is None else inside
    left = [row.remaining for row in rows]
    # within (rows, n): positions in the block that this pass may write, left to right; short rows are padded.
    within = asked.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
    still, before = hidden.gather(1, within), ids.gather(1, within).long()
    # due (rows,): tokens to reveal in this step, so that the later steps of the schedule get theirs.
    due = (still.sum(1) - torch.tensor([row.scheduled_later for row in rows], device=ids.device)).clamp(min=1)
    own = logits.gather(1, within.unsqueeze(-1).expand(-1, -1, logits.shape[-1])).float()
    generators = [one.generator for one in sampled]
    new, logps, entropies, record_logps = predict_from(own, left, settings, mask_token_id, generators)
    chosen = select_confident(settings, logps, entropies, still, due, left, generators)
    edited = torch.zeros_like(chosen)
    if settings.edits is not None:  # a visible token is replaced if another one is probable enough
        edited = asked.gather(1, within) & ~still & (new != before) & (logps.exp() > settings.edits)
        chosen = chosen | edited
    ids.scatter_(1, within, torch.where(chosen, new, before).to(ids.dtype))
    wrong = chosen & ~(record_logps + entropies).isfinite()
    # One transfer to the host for all counts of the pass.
    counts = [still.sum(1) - (still & chosen).sum(1), edited.sum(1), chosen.sum(1), wrong.sum(1)]
    counted = torch.stack(counts, dim=1).tolist()
    for number, (one, (hides, edits, _, wrongs)) in enumerate(zip(sampled, counted, strict=True)):
        row, one.broken = one.row, one.broken or wrongs > 0
        row.remaining = hides
        if settings.edits is not None:
            row.remaining = remaining_after_edits(row, hides, edits, settings.post_steps)
        row.step += 1
        # The last write of a position counts.
        now = torch.stack([record_logps[number], entropies[number], torch.full_like(record_logps[number], row.step)])
        at = within[number]
        one.block[:, at] = torch.where(chosen[number], now, one.block[:, at])
    return [writes == 0 for _, _, writes, _ in counted]


def step_of(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled | None], mask_token_id: int) -> list[bool]:
    """One forward pass of the engine over blocks; None for a row whose block holds only tokens of the prompt.

    Returns:
        Which blocks are finished: their tokens were final before the pass. Their record is complete.
    """
    done = [True] * len(sampled)
    alike: dict[SamplingSettings, list[int]] = {}
    for number, one in enumerate(sampled):
        if one is not None:
            one.passes += 1
        if one is not None and one.row.remaining:
            alike.setdefault(one.settings, []).append(number)
    # Rows with equal settings share the arithmetic, a bounded number of logits at a time.
    elements = CHUNK_ELEMENTS // 2 * chunk_factor(logits.device)
    at_once = max(1, elements // logits.shape[1:].numel())
    for alike_rows in alike.values():
        for start in range(0, len(alike_rows), at_once):
            numbers = alike_rows[start : start + at_once]
            some, rows = ids[numbers], [one for number in numbers if (one := sampled[number]) is not None]
            unchanged = pass_of(some, logits[numbers], rows, mask_token_id)
            ids[numbers] = some
            for number, one, same in zip(numbers, rows, unchanged, strict=True):
                done[number] = same and one.row.remaining == 0
    return done


def finish(ids: Tensor, closing: Sequence[tuple[int, Sampled]]) -> None:
    """Records the finished blocks of these rows of `ids`."""
    if closing:
        blocks = [torch.cat([one.block.double(), ids[number].double().unsqueeze(0)]) for number, one in closing]
        for (_, one), (*values, tokens) in zip(closing, torch.stack(blocks).tolist(), strict=True):
            one.close([*map(int, tokens)], values)


# --- The plugin -------------------------------------------------------------------------------------------------------


def settings_of(params: Any, block_size: int) -> SamplingSettings:
    """The settings that SGLang's sampling parameters ask for.

    Raises:
        ValueError: they make no sense, or the engine does not do what they ask for.
    """
    length, given = params.max_new_tokens, (params.custom_params or {}).get("settings")
    if given is None:
        given = {"block_length": block_size, "steps": length}
        if params.top_k != 1:  # which SGLang writes for temperature 0
            top_k = 0 if params.top_k == ANY_TOP_K else params.top_k
            given |= {"temperature": params.temperature, "top_k": top_k, "top_p": params.top_p}
    if unknown := given.keys() - NAMES:
        raise ValueError(f"{min(unknown)} is no setting of a sampler: known are {', '.join(sorted(NAMES))}")
    settings = SamplingSettings(**{**given, "gen_length": length})
    if settings.block_length != block_size:
        raise ValueError(f"block_length must be {block_size}, not {settings.block_length}: it is that of the model")
    if settings.cfg_scale > 0 or settings.cache is not None:
        raise ValueError("SGLang does no guidance and has a cache of its own: use d1 serve for cfg_scale and kv_cache")
    return settings


def register() -> None:
    """Add the algorithm to SGLang, which calls this function in each of its processes."""
    if (found := version("sglang")) != VERSION:
        logger.warning("the algorithm %s of d1 is left out of sglang %s: it goes with %s alone", NAME, found, VERSION)
        return
    from sglang.srt.dllm.algorithm import algo_name_to_cls
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    read_configs()
    algo_name_to_cls[NAME] = algorithm()
    worker = "sglang.srt.managers.tp_worker.TpModelWorker._forward_batch_generation_dllm"
    HookRegistry.register(worker, give_requests, HookType.BEFORE)
    HookRegistry.register("sglang.srt.dllm.config.DllmConfig.from_server_args", own_sizes, HookType.AFTER)


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


def give_requests(worker: Any, forward_batch: Any, batch: Any = None) -> None:
    """Before a forward pass: shows the algorithm the requests of its batch."""
    worker.dllm_algorithm.requests = [] if batch is None else batch.reqs


def own_sizes(config: Any, server_args: Any) -> None:
    """After SGLang has made a config with its own constants: takes the model's mask token and block size from the
    model's `config.json`, where it has them. DiffusionGemma has no mask token."""
    if config is None or config.mask_id < 0:
        return
    model, _ = PretrainedConfig.get_config_dict(server_args.model_path)
    config.mask_id = model.get("mask_token_id") or config.mask_id
    if "block_size" not in config.algorithm_config:
        config.block_size = model.get("block_size") or config.block_size


def algorithm() -> type:
    """The class that SGLang runs; it lies in a function because its base is SGLang's."""
    from sglang.srt.dllm.algorithm.base import DllmAlgorithm
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    class D1(DllmAlgorithm):
        requests: Sequence[Any] = ()

        @classmethod
        def validate_request(cls, request: Any) -> str | None:
            config, params = request.dllm_config, request.sampling_params
            asked = (params.custom_params or {}).get("mask_token_id", config.mask_id)
            if asked != config.mask_id:
                return f"this server hides tokens by {config.mask_id}, and the request by {asked}"
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
            at_work = [self.at_work(*pair, ids.device) for pair in zip(self.requests, states, strict=True)]
            for number, (one, state) in enumerate(zip(at_work, states, strict=True)):
                if one is not None and state.begins:
                    state.begins = False
                    if one.begin(self.block_size):
                        ids[number, one.first : one.first + one.row.size] = self.mask_id
            done = step_of(ids, logits, at_work, self.mask_id)
            closing = [(number, one) for number, one in enumerate(at_work) if one is not None and done[number]]
            finish(ids, closing)
            for number, one in closing:
                states[number].finished, request = True, self.requests[number]
                if one.broken:
                    request.to_finish = FINISH_ABORT(NOT_FINITE, HTTPStatus.INTERNAL_SERVER_ERROR, "NotFiniteError")
                if one.ended:  # SGLang ends a request at its length
                    request.sampling_params.max_new_tokens = len(request.output_ids) + one.row.size
            return done

        def at_work(self, request: Any, state: Any, device: Any) -> Sampled | None:
            """What is sampled in the request's block; None if the block has no masks, or was finished before."""
            known = len(request.origin_input_ids) + len(request.output_ids)
            nothing = not request.sampling_params.max_new_tokens or request.dllm_block_offset + self.block_size <= known
            if state.finished or nothing:
                return None
            if not hasattr(request, "d1_sampled"):
                params = request.sampling_params
                custom = params.custom_params or {}
                settings = settings_of(params, self.block_size)
                seed = custom.get("seed", params.sampling_seed or 0)
                asked = request.rid, seed, custom.get("eos_stop", ()), settings, device
                request.d1_sampled = Sampled.of(len(request.origin_input_ids), *asked)
                request.customized_info = request.d1_sampled.record
            if request.retraction_count != state.retractions:
                state.begins, state.retractions = True, request.retraction_count
            return request.d1_sampled

    return D1


@dataclass
class Block:
    """What SGLang carries along with a block."""

    begins: bool = True
    finished: bool = False
    retractions: int = 0
