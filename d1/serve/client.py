"""Rollouts of RL on a server: `d1 serve`, given the weights of the policy before it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import requests
import torch
from torch import Tensor

from d1.sampling.loop import Rollout
from d1.sampling.settings import SamplingSettings

PATIENCE = 3600.0  # seconds for an answer: a rollout may take as long as it does in a trainer


class RolloutServer:
    """A server at `url`. What it refuses is a ValueError with its words; without an answer, an OSError."""

    def __init__(self, url: str) -> None:
        self.url, self.version = url.rstrip("/"), ""
        facts = self.ask("GET", "/model_info")
        self.mask_token_id, folder = facts.get("mask_token_id"), facts.get("weights_dir")
        if not folder or not Path(folder).is_dir():
            raise ValueError(
                f"{url} loads no weights that this process could write: start it with `d1 serve MODEL --weights_dir "
                "FOLDER`, a folder that both can reach"
            )
        self.folder = Path(folder)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = requests.request(method, f"{self.url}{path}", json=body, timeout=PATIENCE)
        if answer.status_code != 200:
            raise ValueError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    def load(self, folder: Path, version: str) -> None:
        """Has the server take the weights in `folder`."""
        self.ask("POST", "/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})

    def sample(
        self,
        ids: Tensor,
        mask: Tensor,
        keys: Sequence[Sequence[int]],
        settings: SamplingSettings,
        ends: Sequence[int],
        aligned: bool,
    ) -> Rollout:
        """`rollout` of prompts (rows, prompt) by the server.

        Args:
            keys: of each row's generator, as `keyed_generator` takes it: the seed, then two numbers at least.
            ends: of the EOS stop; none: no stop.
            aligned: the model's blocks are counted from a text's first token, as a block-causal model's are.
        """
        names = {name: value for name, value in asdict(settings).items() if value is not None}
        params = names | {"max_new_tokens": names.pop("gen_length"), "sampling_seed": keys[0][0]}
        params |= {"ignore_eos": True, "eos_stop": list(ends)}
        prompts = [row[real.bool()].tolist() for row, real in zip(ids.cpu(), mask.cpu(), strict=True)]
        rids = ["-".join(map(str, key[1:])) for key in keys]
        body = {"input_ids": prompts, "rid": rids, "sampling_params": params}
        rows = self.ask("POST", "/generate", body | {"return_logprob": True, "return_step_maps": True})
        metas = [row["meta_info"] for row in rows]
        if wrong := {meta["weight_version"] for meta in metas} - {self.version}:
            raise ValueError(f"{self.url} sampled with the weights {min(wrong)}, not {self.version}: who else uses it?")
        canvases = torch.tensor([row["output_ids"] for row in rows], device=ids.device)
        logps = [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas]
        steps = [
            reveal_steps(meta["step_maps"], settings.schedule(len(prompt) % settings.block_length if aligned else None))
            for meta, prompt in zip(metas, prompts, strict=True)
        ]
        counts = [[meta[name] for meta in metas] for name in ("forward_passes", "forward_tokens")]
        passes, forward_tokens = torch.tensor(counts, device=ids.device)
        return Rollout(
            ids=torch.cat([ids, canvases], dim=1),
            logps=torch.tensor(logps, device=ids.device),
            reveal_steps=torch.tensor(steps, device=ids.device),
            entropies=torch.tensor([meta["output_token_entropies"] for meta in metas], device=ids.device),
            passes=passes,
            forward_tokens=forward_tokens,
        )


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
