"""Rollouts on a server: the policy's weights go there before the first rollout after each change."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from torch import Tensor

from d1.models.kinds import block_size
from d1.sampling import Rollout, SamplingSettings
from d1.serve.client import RolloutServer


class PolicyServer(RolloutServer):
    """The server that samples a run's rollouts. All processes use it, and the first sends the weights."""

    def __init__(self, url: str, accelerator: Accelerator) -> None:
        super().__init__(url)
        self.accelerator = accelerator
        self.run = broadcast_object_list([uuid.uuid4().hex])[0]  # an earlier run's weights have other names

    def rollout(
        self,
        model: Any,
        step: int,
        ids: Tensor,
        mask: Tensor,
        key: Sequence[int],
        settings: SamplingSettings,
        mask_token_id: int,
        eos_token_ids: Sequence[int] | None,
    ) -> Rollout:
        """What `rollout` samples with the weights of `model` after so many optimizer steps, in the process that has the
        generators (*key, row)."""
        self.send(model, step)
        first = self.accelerator.process_index * len(ids)
        keys = [(*key, first + row) for row in range(len(ids))]
        if mask_token_id != self.mask_token_id:
            raise ValueError(f"{self.url} hides tokens by {self.mask_token_id}, and this run by {mask_token_id}")
        aligned = block_size(model.config) is not None
        return self.sample(ids, mask, keys, settings, eos_token_ids or (), aligned)

    def send(self, model: Any, step: int) -> None:
        """Has the server take the weights of `model`, or its adapter, unless it has them."""
        version = f"{self.run}-{step}"
        if version != self.version:
            if self.accelerator.is_main_process:
                folder = self.folder / ("adapter" if isinstance(model, PeftModel) else "policy")
                model.save_pretrained(folder)
                self.load(folder, version)
            self.accelerator.wait_for_everyone()
            self.version = version


def server_of(args: Any, accelerator: Accelerator) -> PolicyServer | None:
    """The server that `DiffuGRPOConfig.rollout_mode` asks for."""
    return PolicyServer(args.rollout_server_base_url[0], accelerator) if args.rollout_mode == "server" else None
