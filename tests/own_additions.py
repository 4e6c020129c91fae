"""Additions of a user's own: an estimator, an objective, a reveal rule and a model kind, and RL with them.

    python tests/own_additions.py --estimator halves --objective push --sampler parallel --reveal half ...

Every table of the library is a dictionary; a row added before `main` is called is a name like any other.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "diffu-grpo"))

import torch
from diffu_grpo_train import main, make_parser
from objectives import OBJECTIVES

from d1.masking import draw_mask
from d1.models.formats.names import key_mapping
from d1.models.kinds import DECODER_LORA, KINDS, Kind
from d1.sampling.reveal import RULES
from d1.scoring import ESTIMATORS, Estimator, Views


def halves(sampled, random, settings):
    """Each token scored once: with a random half of the canvas hidden, or with the other half."""
    canvas = torch.ones(sampled.gen_length, dtype=torch.bool)
    half = torch.stack([draw_mask(canvas, 0.5, generator) for generator in random.rows])
    hidden = torch.stack([half, ~half], dim=1)
    clean = torch.zeros(len(half), 2, sampled.prompt_ids.shape[1], dtype=torch.bool)
    return Views(torch.cat([clean, hidden], dim=-1), (hidden & sampled.scored.unsqueeze(1)).float())


def push(inputs, settings):
    """Completions that did better become likelier, the others less likely, whatever their length."""
    length = inputs.mask.sum(-1)
    per_row = (inputs.logps * inputs.mask).sum(-1) / length
    return -(inputs.advantages * per_row).mean(), {"pushed": inputs.advantages.abs().mean().item()}


def half(logps, entropies, level):
    """A share `level` of the tokens that are still hidden."""
    return (logps.isfinite().sum(-1) * level).ceil().long()


ESTIMATORS["halves"] = Estimator(halves, views=lambda settings: 2)
OBJECTIVES["push"] = push
RULES["half"] = (half, 0.5)
KINDS["own"] = Kind(becomes="llama", names=key_mapping((("net", "model"), ("out", "lm_head"))), lora=DECODER_LORA)

if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
