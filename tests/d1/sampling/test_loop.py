"""The sampler's schedule and invariances, and the distribution it draws from."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import d1.sampling.predict
from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import generate, rollout
from d1.sampling.predict import draw_ids
from d1.sampling.reveal import reveal_schedule, schedule_of, spread
from tests.d1.sampling.reference import left_of
from tests.d1.scoring.enumeration import assert_frequencies

MASK, VOCAB = 3, 8


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir))


def left_padded(prompts, width):
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


PROMPTS = [[1, 5, 9, 10, 11, 6], [1, 5, 20, 6], [1, 5, 30, 31, 32, 33, 34, 35, 6]]
LENGTHS = {"mask_token_id": MASK, "gen_length": 16, "block_length": 8, "steps": 6}


def test_a_sampled_row_does_not_depend_on_its_batch_when_it_has_its_own_generator(model):
    ids, mask = left_padded(PROMPTS, 12)
    generators = [[keyed_generator(0, row) for row in range(3)] for _ in range(4)]
    for number, remasking in enumerate(("low_confidence", "random")):
        options = {"temperature": 1.0, "remasking": remasking, **LENGTHS}
        batch = generate(model, ids, mask, generator=generators[number], **options)
        for row, prompt in enumerate(PROMPTS):
            own, seen = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
            alone = generate(model, own, seen, generator=generators[number + 2][row : row + 1], **options)
            assert alone[0, len(prompt) :].tolist() == batch[row, 12:].tolist()


class Recorder:
    """A model with fixed logits that counts calls and records the numbers of hidden and of scored tokens in each."""

    config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    d1_prepared = True

    def __init__(self, logits):
        self.logits, self.calls, self.hidden, self.scored = logits, 0, [], []

    def base_model(self, input_ids, attention_mask):
        self.calls += 1
        self.hidden.append((input_ids == MASK).sum(1).tolist())
        return SimpleNamespace(last_hidden_state=self.logits.expand(len(input_ids), -1, -1).clone())

    def lm_head(self, states):
        self.scored.append(states.shape[0] * states.shape[1])
        return states


def test_forward_passes_and_revealed_tokens_are_as_scheduled():
    recorder = Recorder(torch.randn(1, 2 + 13, VOCAB, generator=keyed_generator(1)))
    prompt = torch.tensor([[0, 1], [1, 2]])
    out = generate(
        recorder, prompt, torch.ones_like(prompt), mask_token_id=MASK, gen_length=13, block_length=5, steps=8
    )
    assert recorder.calls == 8
    # blocks 5, 4, 4 with 3, 3, 2 steps
    assert recorder.scored == [2 * n for n in [5, 3, 1, 4, 2, 1, 4, 2]]  # the head: only what the block still hides
    assert recorder.hidden == [[n, n] for n in [13, 11, 9, 8, 6, 5, 4, 2]]
    assert not (out == MASK).any()


@given(tokens=st.integers(1, 200), block=st.integers(1, 64), data=st.data())
@settings(max_examples=300, deadline=None)
def test_schedule_drops_neither_tokens_nor_steps(tokens, block, data):
    blocks = -(-tokens // block)
    steps = data.draw(st.integers(blocks, tokens))
    schedule = reveal_schedule(tokens, block, steps)
    assert len(schedule) == blocks
    assert sum(map(sum, schedule)) == tokens
    assert sum(map(len, schedule)) == steps
    assert all(count >= 1 for reveals in schedule for count in reveals)
    assert max(map(sum, schedule)) <= block
    assert all(max(reveals) - min(reveals) <= 1 for reveals in schedule)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 60))
def test_each_further_step_goes_to_the_slowest_block(sizes, steps):
    taken = [1] * len(sizes)
    for _ in range(steps - len(sizes)):
        speeds = [size / count for size, count in zip(sizes, taken, strict=True)]
        taken[speeds.index(max(speeds))] += 1
    assert schedule_of(sizes, steps) == [spread(*block) for block in zip(sizes, taken, strict=True)]


def test_a_schedule_of_many_blocks_takes_no_minute():
    began = time.process_time()
    assert sum(map(len, schedule_of([4] * 8192, 30_000))) == 30_000
    assert time.process_time() - began < 5


def test_spread_puts_the_remainder_first():
    assert spread(10, 4) == [3, 3, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_sampling_draws_from_the_tempered_softmax(dtype):
    logits = torch.tensor([[[0.0, 1.0, 2.0, -1.0]]]).expand(1, 40_000, 4)
    for temperature in (0.5, 1.0, 2.0):
        tokens = draw_ids(logits, temperature, keyed_generator(9), dtype)
        share = torch.bincount(tokens.flatten(), minlength=4) / 40_000
        expected = torch.softmax(logits[0, 0] / temperature, -1)
        assert (share - expected).abs().max() < 4 * (0.25 / 40_000) ** 0.5


def test_the_smallest_uniform_number_gives_no_freak_noise(monkeypatch):
    # torch.rand returns exactly 0 once in 2^24 draws; unguarded, that token would win with Gumbel noise of +87 or inf.
    def smallest(shape, generator, like, counts=None):
        return torch.tensor([[[0.0, 0.5]]], dtype=like.dtype)

    monkeypatch.setattr(d1.sampling.predict, "uniform", smallest)
    assert draw_ids(torch.tensor([[[0.0, 20.0]]]), 1.0).item() == 1


def test_low_precision_noise_is_refused():
    with pytest.raises(ValueError, match="float32 or float64"):
        draw_ids(torch.zeros(1, 1, 2), 1.0, noise_dtype=torch.bfloat16)


def test_saturated_confidences_reveal_left_to_right():
    logits = torch.full((1, 6, VOCAB), -1e4)
    logits[..., 5] = 1e4  # every position is certain
    hidden = Recorder(logits)
    generate(
        hidden, torch.tensor([[0, 1]]), torch.ones(1, 2), mask_token_id=MASK, gen_length=4, block_length=4, steps=4
    )
    assert hidden.hidden == [[4], [3], [2], [1]]


def test_random_remasking_reveals_every_position_first_equally_often():
    logits = torch.zeros(1, 6, VOCAB)
    logits[..., 5] = 3.0
    first = []

    class First(Recorder):
        def base_model(self, input_ids, attention_mask):
            if (input_ids == MASK).sum() == 3:
                first.append((input_ids[0, 2:] != MASK).nonzero().item())
            return super().base_model(input_ids, attention_mask)

    options = {"mask_token_id": MASK, "gen_length": 4, "block_length": 4, "steps": 4, "generator": keyed_generator(4)}
    for _ in range(400):
        generate(First(logits), torch.tensor([[0, 1]]), torch.ones(1, 2), remasking="random", **options)
    share = torch.bincount(torch.tensor(first), minlength=4) / 400
    assert (share - 0.25).abs().max() < 4 * (0.1875 / 400) ** 0.5


def test_the_mask_token_is_never_revealed_and_the_prompt_never_touched(model):
    prompt = torch.tensor([[1, MASK, 9, 6]])  # a prompt may contain the mask token
    logits = torch.zeros(1, 20, VOCAB)
    logits[..., MASK] = 50.0
    out = generate(Recorder(logits), prompt, torch.ones_like(prompt), **LENGTHS)
    assert out[0, :4].tolist() == prompt[0].tolist()
    assert not (out[0, 4:] == MASK).any()


@pytest.mark.parametrize("mask_logit", [-60.0, 9.0])
@pytest.mark.parametrize(
    "chosen",
    [{}, {"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}, {"top_p": 1e-6}, {"top_k": 4, "top_p": 0.9, "temperature": 0.5}],
    ids=str,
)
def test_tokens_are_drawn_from_what_is_left_and_recorded_with_these_chances(chosen, mask_logit):
    """The mask token is never chosen. If it is the most likely token (in no trained model), only the record includes
    it."""
    count, words = 3000, [0.0, 1.0, 0.5, mask_logit, 1.4, -1.0, -0.5, 0.2]
    chosen = {"temperature": 1.3, **chosen}
    prompt = torch.ones(count, 1, dtype=torch.long)
    options = {"mask_token_id": MASK, "gen_length": 1, "block_length": 1, "steps": 1}
    model = Recorder(torch.tensor(words).expand(1, 2, VOCAB))
    got, own = (
        rollout(model, prompt, prompt, generator=keyed_generator(5), **options | chosen | {"record_as_sampled": record})
        for record in (True, False)
    )
    of = [chosen.get(name, default) for name, default in (("temperature", 1), ("top_k", 0), ("top_p", 1.0))]
    left = left_of([-math.inf if token == MASK else word for token, word in enumerate(words)], *of)
    often = got.ids[:, 1].bincount(minlength=VOCAB)
    assert set(often.nonzero().flatten().tolist()) == set(left) - {MASK}
    chances = torch.tensor([left.get(token, 0.0) for token in range(VOCAB)])
    assert_frequencies(often, chances)
    assert got.logps.isfinite().all()
    if mask_logit < 0:
        torch.testing.assert_close(got.logps[:, 0].exp(), chances[got.ids[:, 1]])
    assert torch.equal(own.ids, got.ids)
    torch.testing.assert_close(own.logps[:, 0], torch.tensor(words).log_softmax(-1)[got.ids[:, 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"steps": 17}, "between 2 and 16 steps"), ({"generator": [keyed_generator(0)] * 2}, "one generator per row")],
)
def test_bad_arguments_are_refused_before_the_first_forward_pass(change, message):
    recorder = Recorder(torch.zeros(1, 20, VOCAB))
    with pytest.raises(ValueError, match=message):
        generate(recorder, torch.tensor([[0, 1]]), torch.ones(1, 2), **{**LENGTHS, **change})
    assert recorder.calls == 0
