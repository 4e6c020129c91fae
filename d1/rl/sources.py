"""Where rollouts come from: prompts and the keys of their random numbers in, a rollout out.

The trainer has one `RolloutSource`, and does not know which. `LocalRollouts` samples with the model that is trained.
The others are outside the core: servers (`d1/serve/rollouts.py`), servers that sample ahead of the updates
(`d1/serve/ahead.py`), and a user's function (`d1/serve/user.py`). Three wrappers sample by one of these:
`TreeRollouts` (`d1/rl/tree.py`) and `HintedRollouts` (`d1/rl/hinted.py`), which continue its rollouts, and
`StateRewards` (`d1/rl/state_rewards.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from d1 import extensions
from d1.masking import keyed_generator
from d1.models.merged import MergedCopy, copied_bytes, why_not_mergeable
from d1.rl.batch import Batch, RankView, evaluating
from d1.rl.checks import check_continuing
from d1.sampling import Rollout, RolloutStart, SamplingSettings, rollout
from d1.sampling.loop import Stops
from d1.sampling.passes import KVCacheRows

if TYPE_CHECKING:
    from d1.rl.config import DiffuGRPOConfig
    from d1.rl.trainer import DiffuGRPOTrainer

logger = logging.getLogger(__name__)


class RolloutRequest(NamedTuple):
    """What a source is asked for.

    Attributes:
        prompt_ids, prompt_mask: (rows, prompt), padded on the left.
        keys: of each row's generator, as `keyed_generator` takes it.
        stops, cache_rows: as in `d1.sampling.rollout`; servers have neither.
        start: the canvases to continue from, of sources that `can_continue`; None: canvases of mask tokens.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    keys: Sequence[Sequence[int]]
    stops: Stops | None = None
    cache_rows: Sequence[KVCacheRows | None] | None = None
    start: RolloutStart | None = None


class RolloutSource:
    """What a trainer asks of a source. A subclass has `sample`, and overrides what else it needs.

    Attributes:
        name: who samples, in messages.
        rollout_func: TRL's function, which also tokenises the prompts; None: the trainer tokenises.
        samples_here: each process samples its rows with its own part of the weights.
        can_continue: whether `sample` takes `RolloutRequest.start` (`require_continuing`).
    """

    name: str
    rollout_func: Callable[..., dict[str, Any]] | None = None
    samples_here = False
    can_continue = False
    trainer: DiffuGRPOTrainer

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        """Called once, at the end of the trainer's constructor."""
        self.trainer = trainer

    def sample(self, request: RolloutRequest) -> Rollout:
        """The rollout of this process's rows, without gradients or dropout. All processes call it together."""
        raise NotImplementedError

    def verify(self, batch: Batch, sampled: Rollout, keys: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if the rollout, with its prompts in `batch`, is not one of the policy."""

    def before_views(self, batch: Batch, ranks: RankView) -> None:
        """Changes a rewarded batch, before the tokens that count, the advantages and the views are set. All processes
        call it together."""

    def after_scoring(self, batch: Batch, ranks: RankView) -> None:
        """Changes a batch with views and their scores. All processes call it together."""

    def close(self) -> None:
        """Called at the end of training, or after an error; training may begin again."""

    def save(self, folder: Path) -> None:
        """Writes what a resumed run needs into a checkpoint."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""


class LocalRollouts(RolloutSource):
    """The source that samples with the trainer's own model, `rollout_batch_size` rows at a time.

    Attributes:
        merges: rollouts sample from `merged`, a copy of the weights with the adapter merged, which the first one makes.
    """

    name = "the trainer"
    samples_here = True
    can_continue = True
    merges = False
    merged: MergedCopy | None = None

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        super().connect(trainer)
        self.merges = merges_rollouts(trainer)

    @contextmanager
    def model(self) -> Iterator[Any]:
        """The model to sample from, with the present weights."""
        with self.trainer.sampling_model() as model:
            if not self.merges:
                yield model
                return
            if self.merged is None:
                size = copied_bytes(model) / 1e9
                logger.info("Rollouts sample from a copy of the weights with the adapter merged: %.2f GB.", size)
                self.merged = MergedCopy(model)
            self.merged.refresh()
            yield self.merged.model

    def sample(self, request: RolloutRequest) -> Rollout:
        trainer, rows = self.trainer, len(request.prompt_ids)
        size = trainer.args.rollout_batch_size or rows
        generators = [keyed_generator(*key, device=trainer.accelerator.device) for key in request.keys]
        parts = []
        with self.model() as model, evaluating(model), trainer.accelerator.autocast():
            for first in range(0, rows, size):
                part = slice(first, first + size)
                cache_rows = start = None
                if request.cache_rows is not None:
                    cache_rows = request.cache_rows[part]
                if request.start is not None:
                    start = request.start.select(part)
                sampled = rollout(
                    model,
                    request.prompt_ids[part],
                    request.prompt_mask[part],
                    trainer.sampling,
                    mask_token_id=trainer.mask_token_id,
                    generator=generators[part],
                    eos_token_ids=trainer.stop_token_ids or None,
                    stops=request.stops,
                    cache_rows=cache_rows,
                    start=start,
                )
                parts.append(sampled)
            return Rollout.concatenate(parts)


class SourceWrapper(RolloutSource):
    """A source that samples by another one, `source`. A subclass overrides what is different."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self.name, self.rollout_func = source.name, source.rollout_func
        self.samples_here, self.can_continue = source.samples_here, source.can_continue

    def connect(self, trainer: DiffuGRPOTrainer) -> None:
        super().connect(trainer)
        self.source.connect(trainer)

    def sample(self, request: RolloutRequest) -> Rollout:
        return self.source.sample(request)

    def verify(self, batch: Batch, sampled: Rollout, keys: Sequence[Sequence[int]]) -> None:
        self.source.verify(batch, sampled, keys)

    def before_views(self, batch: Batch, ranks: RankView) -> None:
        self.source.before_views(batch, ranks)

    def after_scoring(self, batch: Batch, ranks: RankView) -> None:
        self.source.after_scoring(batch, ranks)

    def close(self) -> None:
        self.source.close()

    def save(self, folder: Path) -> None:
        self.source.save(folder)

    def load(self, folder: Path) -> None:
        self.source.load(folder)


# --- The source of a run ----------------------------------------------------------------------------------------------


def require_continuing(source: RolloutSource, settings: SamplingSettings, config: Any, what: str) -> None:
    """Raises ValueError if the rollouts of a run cannot continue from canvases with tokens, which `what` needs: because
    of their source, the sampler's settings, or the model with this config. For the set-up of a run."""
    if not source.can_continue:
        raise ValueError(f"{what} continues rollouts, and {source.name} cannot: let the trainer sample")
    check_continuing(settings, config, what)


def merges_rollouts(trainer: DiffuGRPOTrainer) -> bool:
    """Whether rollouts of a trainer sample from a merged copy, on all processes. Raises ValueError if they should and
    cannot."""
    asked, device = trainer.args.merged_rollouts, trainer.accelerator.device
    model = trainer.accelerator.unwrap_model(trainer.model)
    against = why_not_mergeable(model)
    if trainer.weights_are_split:
        against = "each process holds only a part of the weights (ZeRO-3, FSDP)"
    if asked and against:
        raise ValueError(f"--merged_rollouts true: {against}: leave it out")
    is_gain = device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    if asked is not None or against or not is_gain:
        return bool(asked)
    return all(gather_object([has_room(trainer.args, model, device)]))


def has_room(args: DiffuGRPOConfig, model: Any, device: torch.device) -> bool:
    """Whether a GPU has room for a merged copy, by the estimate of `d1 fit`."""
    free, _ = torch.cuda.mem_get_info(device)
    return extensions.has_room_for_copy(args, model, free + torch.cuda.memory_reserved(device))
