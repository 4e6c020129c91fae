"""Requests to SGLang with the plugin, and its answers in the form of `d1 serve`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from d1.sampling.settings import SamplingSettings

START = "python -m sglang.launch_server --model-path MODEL --dllm-algorithm D1 --max-running-requests 64"


def probe(mask_token_id: int) -> dict[str, Any]:
    """A request whose answer shows whether SGLang runs the plugin: one prompt with two names, at temperature 1."""
    prompt, params = [int(mask_token_id == 0)], {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": [prompt, prompt], "rid": [uuid.uuid4().hex, uuid.uuid4().hex], "sampling_params": params}


def check_answer(where: str, rows: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError, with the command that starts a right server, unless these answers to `probe` come from SGLang
    with the plugin; `where` begins the message."""
    if all("step_maps" in row["meta_info"] for row in rows):
        return
    same = ", and two samples at temperature 1 are identical" if rows[0]["output_ids"] == rows[1]["output_ids"] else ""
    raise ValueError(
        f"{where}it does not sample by d1's rules: its answers have no step_maps{same}. Install d1 into its "
        f"environment (pip install --no-deps) and start it with: {START}"
    )


def request_of(
    texts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[int]],
    settings: SamplingSettings,
    ends: Sequence[int],
    mask_token_id: int,
) -> dict[str, Any]:
    """The body of `/generate` for prompts without padding; `keys` and `ends` as in `d1.serve.client.Prompts`."""
    names = {name: value for name, value in asdict(settings).items() if value is not None}
    length, seed = names.pop("gen_length"), keys[0][0]
    custom = {"settings": names, "seed": seed, "eos_stop": [*ends], "mask_token_id": mask_token_id}
    params = {"max_new_tokens": length, "temperature": settings.temperature, "ignore_eos": True}
    # SGLang refuses an `rid` while rows of an earlier request that failed have it. The plugin reads up to the point.
    own = uuid.uuid4().hex
    rids = [f"{'-'.join(map(str, key[1:]))}.{own}" for key in keys]
    return {"input_ids": [*texts], "rid": rids, "sampling_params": params | {"custom_params": custom}}


def as_ours(row: dict[str, Any], settings: SamplingSettings, ends: Sequence[int]) -> dict[str, Any]:
    """An answer with what `d1 serve` adds: tokens after the EOS stop, and the sums of passes and of their tokens.

    Passes are the engine's own, with those that store keys and values; tokens of the prompt count where they were not
    cached.
    """
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
