"""The loop's steps add up to the rollout; models that were not prepared are refused."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from d1.masking import keyed_generator
from d1.models import load_model, prepare
from d1.sampling import SamplingSettings, generate, rollout, rollout_steps
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts, sharper

GOOD = {"gen_length": 12, "block_length": 4, "steps": 9}
SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model(kind_dirs):
    return sharper(load_model(kind_dirs["Dream"]))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("ends", [None, list(range(4, 24))])
def test_the_steps_add_up_to_the_rollout(model, sampler, ends):
    ids, mask = make_prompts([6, 1, 4, 3], 5)
    chosen = SamplingSettings(temperature=0.8, cfg_scale=0.5, **GOOD, **sampler)

    def options():
        return {"mask_token_id": MASK, "generator": [keyed_generator(1, r) for r in range(4)], "eos_token_ids": ends}

    whole = rollout(model, ids, mask, chosen, **options())
    canvas = torch.cat([ids, torch.full((4, 12), MASK)], dim=1)
    logps, entropies, numbers = torch.zeros(4, 18), torch.zeros(4, 18), torch.full((4, 18), -1)
    passes = torch.zeros(4, dtype=torch.long)
    for step in rollout_steps(model, ids, mask, chosen, **options()):
        assert torch.equal(step.numbers, passes[step.rows])
        passes[step.rows] += 1
        assert torch.equal(step.passes, passes)
        assert step.revealed.any(1).all()
        for i, row in enumerate(step.rows.tolist()):
            at = step.positions[i][step.revealed[i]]
            assert (canvas[row, at] == MASK).all()  # each is revealed once
            canvas[row, at] = step.ids[i][step.revealed[i]]
            logps[row, at] = step.logps[i][step.revealed[i]]
            entropies[row, at] = step.entropies[i][step.revealed[i]]
            numbers[row, at] = step.numbers[i]
        working = canvas[step.rows]
        assert torch.equal(step.canvas[step.rows], working)
    if ends is None:
        assert torch.equal(canvas, whole.ids)
    else:
        stopped = canvas == MASK
        assert stopped.any()
        assert torch.equal(canvas.masked_fill(stopped, ends[0]), whole.ids)
    assert torch.equal(step.canvas, whole.ids)
    assert torch.equal(logps[:, 6:], whole.logps)
    assert torch.equal(entropies[:, 6:], whole.entropies)
    assert torch.equal(numbers[:, 6:], whole.reveal_steps)
    assert torch.equal(step.passes, whole.passes)
    assert torch.equal(step.forward_tokens, whole.forward_tokens)


def test_steps_share_the_canvas_and_leave_gradients_as_they_were(model):
    ids, mask = make_prompts([4, 2], 0)
    seen = []
    for step in rollout_steps(model, ids, mask, mask_token_id=MASK, **GOOD):
        assert torch.is_grad_enabled()
        assert not step.logps.requires_grad
        seen.append(step)
    assert len(seen) == 9
    assert {step.canvas.data_ptr() for step in seen} == {seen[0].canvas.data_ptr()}
    assert not (seen[0].canvas == MASK).any()  # the first step's is the last one's


def test_settings_and_their_fields_give_the_same_rollout_and_not_both(model):
    ids, mask = make_prompts([4, 2], 0)
    options = {"mask_token_id": MASK, "temperature": 0.7, **GOOD}
    by_field = rollout(model, ids, mask, generator=keyed_generator(0), **options)
    chosen = SamplingSettings(temperature=0.7, **GOOD)
    whole = rollout(model, ids, mask, chosen, mask_token_id=MASK, generator=keyed_generator(0))
    assert torch.equal(by_field.ids, whole.ids)
    assert torch.equal(generate(model, ids, mask, chosen, mask_token_id=MASK, generator=keyed_generator(0)), whole.ids)
    with pytest.raises(ValueError, match="both settings and temperature"):
        rollout(model, ids, mask, chosen, mask_token_id=MASK, temperature=0.7)


@pytest.mark.parametrize("sample", [generate, rollout, rollout_steps])
def test_a_model_that_was_not_prepared_is_refused_before_its_first_pass(sample):
    ids, mask = make_prompts([4, 2], 0)
    for model in (LlamaForCausalLM(LlamaConfig(**SHAPE)), BertForMaskedLM(BertConfig(**SHAPE))):
        model.register_forward_pre_hook(lambda *_: pytest.fail("ran the model"))
        with pytest.raises(ValueError, match=r"was not prepared.*d1\.models\.load_model"):
            sample(model, ids, mask, mask_token_id=MASK, **GOOD)


def test_a_model_that_was_built_and_prepared_is_sampled():
    ids, mask = make_prompts([4, 2], 0)
    model = prepare(LlamaForCausalLM(LlamaConfig(is_causal=False, **SHAPE)).eval())
    assert rollout(model, ids, mask, mask_token_id=MASK, **GOOD).ids.shape == (2, 16)
