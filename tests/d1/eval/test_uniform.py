"""Evaluation of a model with uniform noise: its completions are those of `rollout`, whatever their batch."""

from __future__ import annotations

import json

import pytest
import torch

from d1.eval import run as evaluation
from d1.eval.completions import setup_name
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.sampling import SamplingSettings, rollout
from tests.d1.diffusion_gemma import needs_class, write_with_tokenizer

pytestmark = needs_class
HOW = {"gen_length": 12, "block_length": 4, "sampler": "parallel", "reveal": "entropy", "temperature": 0.8}
HOW |= {"end_temperature": 0.4, "output": "draw"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_model_dir):
    return write_with_tokenizer(tmp_path_factory.mktemp("gemma"), tiny_model_dir, max_position_embeddings=512)


def test_completions_are_those_of_rollout(model_dir, tmp_path):
    flags = [word for name, value in HOW.items() for word in (f"--{name}", str(value))]
    flags += ["--diffusion_steps", "9", "--no-self_conditioning", "--limit", "5", "--batch_size", "3"]
    flags += ["--model_path", str(model_dir), "--dataset", "sudoku", "--output_dir", str(tmp_path)]
    args = evaluation.make_parser().parse_args(flags)
    evaluation.main(args)
    (run,) = evaluation.runs_of(args)
    found = json.loads((tmp_path / f"{setup_name(run)}_0_generations.json").read_text())
    model, tokenizer = load_model(str(model_dir)), load_tokenizer(str(model_dir))
    assert tokenizer.mask_token is None
    how = SamplingSettings(**HOW, steps=9, self_conditioning=False)
    assert len(found["generations"]) == 5
    for item in found["generations"]:
        assert "first_text" not in item
        ids = torch.tensor([tokenizer(item["prompt_input"], add_special_tokens=False).input_ids])
        own = [keyed_generator(0, item["index"], 0)]
        alone = rollout(model, ids, torch.ones_like(ids), how, mask_token_id=None, generator=own)
        text = tokenizer.decode(alone.ids[0, ids.shape[1] :])
        assert text.startswith(item["generations"].partition("<eos>")[0])
