"""Trainers of the second halves of SFT (`second_half.py`): what else a model with a causal context can learn from.

Each is made from the parts of a trainer of `d1 sft` (`parts_of`), so all other settings are those of its flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.models.attention import ATTENTION, CAUSAL_CONTEXT, Attention, Blocks
from d1.models.head import backbone_and_head, map_chunks, run_inside, target_logps
from d1.models.packing import enable_packed_rows
from d1.runs.data import IGNORED
from d1.sft import dLLMTrainer
from d1.sft.causal_context import ContextTokens, causal_context_states, context_tokens, sum_by_row
from d1.sft.data import row_numbers


def parts_of(trainer: dLLMTrainer) -> dict[str, Any]:
    """The arguments that make a trainer of the same model, rows and settings."""
    return {
        "model": trainer.model,
        "args": trainer.args,
        "data_collator": trainer.data_collator,
        "train_dataset": trainer.train_dataset,
        "processing_class": trainer.processing_class,
    }


# --- A frozen autoregressive model as the teacher ---------------------------------------------------------------------


class MaskedTokens(NamedTuple):
    """The n masks of a batch, as the model and its teacher read them."""

    targets: Tensor  # (n,) ids of the hidden tokens
    states: Tensor  # (n, hidden size) last hidden states, from which the head predicts the targets
    layers: list[Tensor]  # the same states after each layer but the last, (n, hidden size) each
    teacher_states: Tensor  # of the clean tokens before the masks, (n, hidden size)
    teacher_layers: list[Tensor]


class TeacherTrainer(dLLMTrainer):
    """Masked SFT with a frozen model that reads the clean text. Its subclasses have the losses of masks; those of the
    clean text stay the cross-entropies of the next tokens. Rows have to be packed.

    Args:
        teacher: a prepared model with a causal context and the layers and vocabulary of the model. It reads no masks,
            so it is an autoregressive model.
    """

    def __init__(self, teacher: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        enable_packed_rows(self.teacher)

    def row_losses(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        collator: Any = self.data_collator
        _, weights = collator.schedule(inputs["t"].double())
        tokens = context_tokens(inputs)
        with torch.no_grad(), layer_outputs(self.teacher) as teacher_layers:
            teacher_states = self.teacher_states(inputs, tokens)

        def compute_losses(inner: Any) -> Tensor:
            with layer_outputs(inner) as layers:
                states = causal_context_states(inner, inputs, tokens)
            clean_states, masked_states = states.split([len(tokens.clean_targets), len(tokens.masked_targets)])
            clean_losses = -target_logps(inner, clean_states, tokens.clean_targets)[0]
            # `states` has clean tokens first; the layers have each text's clean tokens and then its masks.
            numbers = row_numbers(inputs)
            texts = torch.cat([2 * numbers[tokens.clean_positions], 2 * numbers[tokens.masked_positions] + 1])
            masked_in_layers = texts.argsort(stable=True).argsort()[len(clean_states) :]
            masks = MaskedTokens(
                targets=tokens.masked_targets,
                states=masked_states,
                layers=[layer[masked_in_layers] for layer in layers],
                teacher_states=teacher_states,
                teacher_layers=teacher_layers,
            )
            return torch.cat([clean_losses, self.masked_losses(inner, masks)])

        losses = run_inside(model, compute_losses)
        return sum_by_row(inputs, tokens, losses, weights, collator.causal)

    def teacher_states(self, inputs: dict[str, Any], tokens: ContextTokens) -> Tensor:
        """The teacher's last hidden states (masks, hidden size) of the clean tokens before the masks."""
        labels = inputs["labels"]
        clean = torch.where(labels == IGNORED, inputs["input_ids"], labels)
        _, positions = tokens.masked_positions  # of the packed row
        before = (positions - 1).clamp(min=0)  # without any mask, the token 0 has the weight 0
        segments = [(length, 0) for length in inputs["lengths"]]
        backbone, _ = backbone_and_head(self.teacher)
        return backbone(clean, None, before.unsqueeze(0), segments=segments)[0]

    def masked_losses(self, model: Any, masks: MaskedTokens) -> Tensor:
        """(n,) losses of the n masks of a batch."""
        raise NotImplementedError


class ForwardKLTrainer(TeacherTrainer):
    """The targets at masks are the teacher's distributions, instead of tokens: forward KL, over the whole vocabulary,
    to the distribution of the next token after the clean text (OPDLM, arXiv 2606.06712)."""

    def masked_losses(self, model: Any, masks: MaskedTokens) -> Tensor:
        head = backbone_and_head(model)[1]
        teacher_head = backbone_and_head(self.teacher)[1]

        def divergences(states: Tensor, teacher_states: Tensor) -> Tensor:
            with torch.no_grad():
                teacher_logps = teacher_head(teacher_states).float().log_softmax(-1)
            logps = head(states).float().log_softmax(-1)
            return F.kl_div(logps, teacher_logps, reduction="none", log_target=True).sum(-1)

        return torch.cat(map_chunks(model, divergences, masks.states, masks.teacher_states, tensors_per_logit=4))


class AlignedTrainer(TeacherTrainer):
    """Cross-entropy at masks, plus `ALIGNMENT` times 1 minus the mean cosine, over layers, of the state that predicts a
    hidden token and the teacher's (REPR-ALIGN, arXiv 2605.06885; without its second cross-entropy term, and without the
    embeddings, which are those of the mask token)."""

    ALIGNMENT = 10.0  # REPR-ALIGN's

    def masked_losses(self, model: Any, masks: MaskedTokens) -> Tensor:
        cosines = []
        layers = [*masks.layers, masks.states]
        teacher_layers = [*masks.teacher_layers, masks.teacher_states]
        for states, teacher_states in zip(layers, teacher_layers, strict=True):
            cosines.append(F.cosine_similarity(states.float(), teacher_states.float(), dim=-1))
        cross_entropies = -target_logps(model, masks.states, masks.targets)[0]
        return cross_entropies + self.ALIGNMENT * (1 - torch.stack(cosines).mean(0))


@contextlib.contextmanager
def layer_outputs(model: Any) -> Iterator[list[Tensor]]:
    """A list that gets, in a forward pass of a packed row inside, the states (n, hidden size) after each layer but the
    last, at the positions whose last states are asked for, in the order of the row."""
    outputs: list[Tensor] = []
    *first_layers, last_layer = model.base_model.layers

    def collect(layer: Any, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    def choose(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["state_positions"][0]
        outputs[:] = [output[0, positions] for output in outputs]

    handles = [layer.register_forward_hook(collect) for layer in first_layers]
    # Before the library's own hook, which takes `state_positions` out of the arguments
    handles.append(last_layer.register_forward_pre_hook(choose, prepend=True, with_kwargs=True))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


# --- Annealing of attention -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnnealedContext(Attention):
    """A causal context in which a noised token sees each later token of its block with probability `share`
    (DiffuLLaMA, arXiv 2410.17891: the mask is causal or drawn, for each query and key). One draw per mask."""

    share: float = 1.0

    def mask(
        self,
        config: Any,
        visible: Tensor,
        noised: int,
        queries: int,
        blocks: Blocks | None = None,
        opened: Tensor | None = None,
    ) -> Tensor:
        mask = super().mask(config, visible, noised, queries, blocks=blocks, opened=opened)
        keys = mask.shape[-1]
        key = torch.arange(keys, device=mask.device)
        is_later = key > key[keys - queries :, None]  # only noised tokens see later ones
        is_hidden = torch.rand(queries, keys, device=mask.device) >= self.share
        return mask & ~(is_later & is_hidden)


@contextlib.contextmanager
def annealed_context(share: float) -> Iterator[None]:
    """Models with a causal context have an `AnnealedContext` inside."""
    usual = ATTENTION[CAUSAL_CONTEXT]
    ATTENTION[CAUSAL_CONTEXT] = AnnealedContext(usual.sees, usual.fields, causal_context=True, share=share)
    try:
        yield
    finally:
        ATTENTION[CAUSAL_CONTEXT] = usual


class AnnealedTrainer(dLLMTrainer):
    """Masked SFT whose blocks turn from causal to bidirectional over the first `anneal_steps` optimizer steps: in step
    s, from 1, a noised token sees each later token of its block with probability min(1, s / anneal_steps)."""

    def __init__(self, anneal_steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.anneal_steps = anneal_steps

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        share = min(1.0, (self.state.global_step + 1) / self.anneal_steps)
        with annealed_context(share):
            return super().training_step(*args, **kwargs)
