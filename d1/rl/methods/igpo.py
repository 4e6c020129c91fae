"""IGPO (arXiv 2509.10396): where a whole group is wrong, completions with parts of the solution inpainted take part.

    loss = -min(rho A, clip(rho) A) + beta k3, rho = exp(mean of (l - old) over all G tokens); A = r - m
    the sum over kept tokens / kept tokens of the micro-batch

Hints: the trace, cut to E = G - 30 tokens, is divided into chunks of 5 to 10 tokens. A row shows a random share,
uniform on [.2, .6], of its chunks, stretched over the canvas by E / (length of the trace), from 1 to 1.5. The shown
tokens stay; the others are sampled as usual. If all completions of a prompt are wrong, its group is sampled once more
in this way, and at most 4 right ones replace rows. Kept are all tokens that were sampled; of n given tokens, the n / 5
(at least one) with the highest entropy under the old policy, with the whole canvas hidden.

Release: facebookresearch/igpo@e85eaea: run_igpo.sh over train.yaml, trainer_igpo.py, utils/generate.py. Differs:
- A trace is the task's own solution in its own format, `<reasoning>` first; there, MetaMath's after "<reasoning>\\n".
- A prompt is wrong if all of its completions are, on however many devices; in the release, if all of a device's are.
- Every chunk may be hidden. In the release the last one, mostly the answer, is always shown, although the configuration
  says otherwise: the value is not passed on.
- New log-probabilities have no dropout, like the old ones.
As in the release, the filter of given tokens does not do what it is for: rho averages over all tokens, so the gradient
of the policy reaches all given tokens alike. The filter changes the weight of a row and which tokens the KL has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d1.rl.hints import Hint
from d1.rl.losses import CLIP, Objective, Penalty, clip, clip_ratio_metric, k3_of, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from d1.rl.losses import Loss, LossInputs

# --- Hints ------------------------------------------------------------------------------------------------------------

TAIL = 30  # tokens at the end of the canvas in which nothing is given
CHUNK = (5, 10)  # tokens, the smallest and largest
SHOWN = (0.2, 0.6)  # share of the chunks
LARGEST_STRETCH, LARGEST_GAP = 1.5, 100


def place_chunks(trace: Sequence[int], spans: Sequence[tuple[int, int]], gen_length: int, stretch: float) -> Tensor:
    """(canvas,) ids of the spans [start, end) of a trace, with gaps that are `stretch` times as long; -1 elsewhere."""
    import torch

    given = torch.full((gen_length,), -1, dtype=torch.long)
    position = before = 0
    for start, end in spans:
        gap = math.floor((start - before) * stretch)
        position += gap if before == 0 else min(gap, LARGEST_GAP)
        ids = torch.tensor(trace[start:end], dtype=torch.long)[: max(gen_length - position, 0)]
        given[position : position + len(ids)] = ids
        position, before = position + end - start, end
    return given


def draw_chunks(
    trace: Sequence[int],
    gen_length: int,
    generator: Generator,
    tail: int = TAIL,
    chunk: tuple[int, int] = CHUNK,
    shown: tuple[float, float] = SHOWN,
) -> Tensor:
    """(canvas,) ids of a random share of a trace's chunks; -1 elsewhere."""
    import torch

    room = max(gen_length - tail, 0)
    trace = trace[:room]
    stretch = min(max(room / max(len(trace), 1), 1.0), LARGEST_STRETCH)

    # Chunks of random length; a rest below the smallest one is left out
    spans, start = [], 0
    while len(trace) - start >= chunk[0]:
        size = int(torch.randint(chunk[0], chunk[1] + 1, (), generator=generator))
        spans.append((start, min(start + size, len(trace))))
        start += size

    low, high = shown
    ratio = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()
    hidden = math.floor(len(spans) * (1 - ratio))
    order = torch.randperm(len(spans), generator=generator)
    return place_chunks(trace, [spans[index] for index in sorted(order[hidden:].tolist())], gen_length, stretch)


# --- The loss, with the filter of given tokens ------------------------------------------------------------------------

KEPT = 5  # one of five given tokens is kept: hint_filter .2


def kept_tokens(inputs: LossInputs) -> Tensor:
    """(rows, tokens) bool, the tokens of the sum: those that were sampled, and of the given ones the share with the
    highest entropy."""
    import torch

    mask_RT = inputs.mask.bool()
    if inputs.given is None:
        return mask_RT
    given_RT = inputs.given & mask_RT
    entropies_RT = require_logps(inputs.old_entropies).masked_fill(~given_RT, -torch.inf)
    order_RT = entropies_RT.argsort(dim=1, descending=True, stable=True).argsort(1)
    counts_R1 = (given_RT.sum(1, keepdim=True) // KEPT).clamp(min=1)
    return mask_RT & (~given_RT | (order_RT < counts_R1))


def igpo(inputs: LossInputs, settings: Any) -> Loss:
    """GSPO's clipped ratio of a row, the geometric mean over all of its tokens; each row weighs as many tokens as it
    keeps. Without given tokens, TRL's loss with `importance_sampling_level` sequence and `loss_type` bnpo."""
    kept_R = kept_tokens(inputs).sum(1)
    log_ratios_R = ((inputs.logps - inputs.old) * inputs.mask).sum(1) / inputs.lengths
    gains_R, clipped_R = clip(log_ratios_R.exp(), inputs.advantages, settings)
    loss = -(gains_R * kept_R).sum() / kept_R.sum().clamp(min=1)
    return loss, clip_ratio_metric(clipped_R, inputs.mask.any(1))


def k3_kept(inputs: LossInputs, settings: Any) -> Tensor:
    """The mean of k3 over the kept tokens of the micro-batch."""
    kept_RT = kept_tokens(inputs)
    per_token_RT = k3_of(require_logps(inputs.reference) - inputs.logps)
    return (per_token_RT * kept_RT).sum() / kept_RT.sum().clamp(min=1)


HINTS = {"chunks": Hint(draw_chunks)}
OBJECTIVES = {
    "igpo": Objective(igpo, per_row=True, reads_given=True, loss_types=("bnpo",), settings=CLIP, idle=CLIP),
}
PENALTIES = {"k3_kept": Penalty(k3_kept, settings=())}


METHOD = method(
    "IGPO, arXiv 2509.10396",
    trained=Trained(64, lora_r=128),  # in bf16: load_in_4bit is not read; 8 GPUs x 8 x accumulation 8 / 8
    estimator="one_step",
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    objective="igpo",
    loss_type="bnpo",
    epsilon=0.2,
    kl="k3_kept",
    beta=0.01,
    hints="chunks",
    hint_rows=4,  # half of a group
    num_iterations=4,
    temperature=1.2,
    scale=dict(
        learning_rate=5e-07,
        num_generations=8,
        lr_scheduler_type="linear",  # the Trainer's default, as none is named
        warmup_steps=50,
        **canvas(tokens=256, steps=128, block=32),  # [train.yaml: 512, 256, 64]
    ),
    page=Page(
        paper="[2509.10396](https://arxiv.org/abs/2509.10396)",
        scores="as d1, prompt clean; sequence ratio; k3; given tokens in wrong groups",
        release="facebookresearch/igpo@e85eaea",
        largest_difference="2e-07",
        differs="the task's own solutions and rewards; the last chunk may be hidden; wrong groups over all devices",
    ),
)
