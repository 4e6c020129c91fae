"""This library's samplers inside SGLang: exact and parallel decoding with temperature, what RL needs of every token,
and the random numbers of `d1 serve`.

    python -m sglang.launch_server --model-path JetLM/SDAR-1.7B-Chat --dllm-algorithm D1 --max-running-requests 64

SGLang finds the plugin by the entry point `sglang.srt.plugins` of this package. A request sets its `SamplingSettings`
in `sampling_params["custom_params"]`, as `d1.serve.client` does; a plain request is sampled one token per pass, at its
own temperature. Answers have, per token, `output_token_logprobs`, `output_token_entropies`, `step_maps` and
`forward_passes` (of a block, at its first token) in `meta_info`.

The engine makes one more pass per block than our sampler, which stores the block's keys and values; our sampler leaves
that to the next block. It fills whole blocks: where a canvas ends inside one, the places after its end stay masks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from d1.sampling.settings import POST_STEPS_RANGE, SamplingSettings
from d1.serve.sglang_rules import Sampled, finish, step_of

VERSION = "0.5.23"  # of SGLang: the only one that this plugin was tried with
NAME = "D1"  # of the algorithm
ANY_TOP_K = 1 << 30  # SGLang's
NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or float16 overflows (--dtype bfloat16); d1 serve and "
    "d1 eval name the layer"
)
NAMES = {setting.name for setting in fields(SamplingSettings)}

logger = logging.getLogger(__name__)


def settings_of(params: Any, block_size: int, defaults: dict[str, Any]) -> SamplingSettings:
    """The settings that SGLang's sampling parameters ask for; `defaults` are those of plain requests.

    Raises:
        ValueError: they make no sense, or the engine does not do what they ask for.
    """
    custom, length = params.custom_params or {}, params.max_new_tokens
    given = custom.get("settings")
    if given is None:
        greedy = params.top_k == 1
        drawn = {"top_k": 0 if params.top_k == ANY_TOP_K else params.top_k, "top_p": params.top_p}
        given = {"temperature": 0.0} if greedy else {"temperature": params.temperature, **drawn}
        given = {"block_length": block_size, "steps": length, **defaults, **given}
    if unknown := given.keys() - NAMES:
        raise ValueError(f"{min(unknown)} is no setting of a sampler: known are {', '.join(sorted(NAMES))}")
    settings = SamplingSettings(**{**given, "gen_length": length})
    wrong = {
        f"this model's blocks have {block_size} tokens, so block_length must be {block_size}, not "
        f"{settings.block_length}": settings.block_length != block_size,
        "guidance needs a second, unconditional pass, which SGLang does not make: use d1 serve": settings.cfg_scale > 0,
        "SGLang has a cache of its own, which costs no accuracy: use the sampler exact or parallel": (
            settings.cache is not None
        ),
    }
    if any(wrong.values()):
        raise ValueError(next(message for message, is_so in wrong.items() if is_so))
    return settings


def register() -> None:
    """Adds the algorithm to SGLang; SGLang calls it in each of its processes."""
    if (found := version("sglang")) != VERSION:
        logger.warning(
            "the algorithm %s of d1 goes with sglang %s and is left out of %s: pip install sglang==%s",
            NAME,
            VERSION,
            found,
            VERSION,
        )
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
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.requests: Sequence[Any] = []
            self.defaults = defaults_of(config)

        @classmethod
        def validate_request(cls, request: Any) -> str | None:
            config, params = request.dllm_config, request.sampling_params
            asked = (params.custom_params or {}).get("mask_token_id", config.mask_id)
            if asked != config.mask_id:
                return f"this server hides tokens by {config.mask_id}, and the request by {asked}"
            try:
                settings_of(params, config.block_size, defaults_of(config))
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
            for place, (one, state) in enumerate(zip(at_work, states, strict=True)):
                if one is not None and state.begins:
                    state.begins = False
                    if one.begin(self.block_size):
                        ids[place, one.first : one.first + one.row.size] = self.mask_id
            done = step_of(ids, logits, at_work, self.mask_id)
            closing = [(place, one) for place, one in enumerate(at_work) if one is not None and done[place]]
            finish(ids, closing)
            for place, one in closing:
                states[place].finished, request = True, self.requests[place]
                if one.broken:
                    request.to_finish = FINISH_ABORT(NOT_FINITE, HTTPStatus.INTERNAL_SERVER_ERROR, "NotFiniteError")
                if one.ended:  # SGLang ends a request at its length
                    request.sampling_params.max_new_tokens = len(request.output_ids) + one.row.size
            return done

        def at_work(self, request: Any, state: Any, device: Any) -> Sampled | None:
            """What is sampled in the request's block; None if the block has no masks, or was finished before."""
            known = len(request.origin_input_ids) + len(request.output_ids)
            if state.finished or request.dllm_block_offset + self.block_size <= known:
                return None
            if not hasattr(request, "d1_sampled"):
                params = request.sampling_params
                custom = params.custom_params or {}
                settings = settings_of(params, self.block_size, self.defaults)
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


def defaults_of(config: Any) -> dict[str, Any]:
    """The settings of plain requests, from `--dllm-algorithm-config`."""
    return {name: value for name, value in config.algorithm_config.items() if name != "block_size"}
