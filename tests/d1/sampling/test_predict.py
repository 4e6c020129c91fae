"""The distribution that tokens are drawn from, and what is recorded of it."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import d1.sampling.predict
from d1.masking import keyed_generator
from d1.models import head
from d1.sampling import SamplingSettings, rollout
from d1.sampling.predict import draw_ids, predict
from tests.d1.sampling.reference import MASK
from tests.d1.scoring.enumeration import assert_frequencies
from tests.rounding import LOGITS, assert_near

VOCAB = 8


class Fixed:
    """A model with fixed logits that records, for each call, the hidden tokens of each row and the tokens scored."""

    config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    d1_prepared = True

    def __init__(self, logits):
        self.logits, self.hidden, self.scored = logits, [], []

    def base_model(self, input_ids, attention_mask):
        self.hidden.append(input_ids == MASK)
        return SimpleNamespace(last_hidden_state=self.logits.expand(len(input_ids), -1, -1).clone())

    def lm_head(self, states):
        self.scored.append(states.shape[0] * states.shape[1])
        return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_sampling_draws_from_the_tempered_softmax(dtype):
    logits = torch.tensor([[[0.0, 1.0, 2.0, -1.0]]]).expand(1, 40_000, 4)
    for temperature in (0.5, 1.0, 2.0):
        tokens = draw_ids(logits, temperature, keyed_generator(9), dtype)
        assert_frequencies(tokens.flatten().bincount(minlength=4), torch.softmax(logits[0, 0] / temperature, -1))
    with pytest.raises(ValueError, match="float32 or float64"):
        draw_ids(logits, 1.0, noise_dtype=torch.bfloat16)


def test_the_smallest_uniform_number_gives_no_freak_noise(monkeypatch):
    # torch.rand returns exactly 0 once in 2^24 draws; unguarded, that token would win with Gumbel noise of +87 or inf.
    def smallest(shape, generator, like, counts=None):
        return torch.tensor([[[0.0, 0.5]]], dtype=like.dtype)

    monkeypatch.setattr(d1.sampling.predict, "uniform", smallest)
    assert draw_ids(torch.tensor([[[0.0, 20.0]]]), 1.0).item() == 1


# --- Which positions a step predicts and reveals, with fixed logits ---------------------------------------------------


def complete(logits, prompt, **options):
    """The model after sampling, and the ids."""
    model, prompt = Fixed(logits), torch.tensor(prompt)
    got = rollout(model, prompt, torch.ones_like(prompt), mask_token_id=MASK, **options)
    return model, got.ids


def test_forward_passes_and_revealed_tokens_are_as_scheduled():
    logits = torch.randn(1, 2 + 13, VOCAB, generator=keyed_generator(1))
    logits[..., MASK] = 50.0  # the mask token is never revealed
    model, ids = complete(logits, [[0, MASK], [1, 2]], gen_length=13, block_length=5, steps=8)
    # Blocks of 5, 4 and 4 tokens with 3, 3 and 2 steps; the head runs only on what the block still hides.
    assert model.scored == [2 * n for n in [5, 3, 1, 4, 2, 1, 4, 2]]
    assert [hidden[1].sum() for hidden in model.hidden] == [13, 11, 9, 8, 6, 5, 4, 2]
    assert not (ids[:, 2:] == MASK).any()
    assert ids[:, :2].tolist() == [[0, MASK], [1, 2]]  # a prompt may contain the mask token


def test_saturated_confidences_reveal_left_to_right():
    logits = torch.full((1, 6, VOCAB), -1e4)
    logits[..., 5] = 1e4  # every position is certain
    model, _ = complete(logits, [[0, 1]], gen_length=4, block_length=4, steps=4)
    assert [hidden[0, 2:].tolist() for hidden in model.hidden] == [[i >= n for i in range(4)] for n in range(4)]


def test_random_remasking_reveals_every_position_first_equally_often():
    logits = torch.zeros(1, 6, VOCAB)
    logits[..., 5] = 3.0
    options = {"gen_length": 4, "block_length": 4, "steps": 4, "remasking": "random", "generator": keyed_generator(4)}
    model, _ = complete(logits, [[0, 1]] * 400, **options)
    first = (~model.hidden[1][:, 2:]).nonzero()[:, 1]
    assert_frequencies(first.bincount(minlength=4), torch.full((4,), 0.25))


# --- Chunks: how many logits are in memory at once --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(141e9, 16), (80e9, 16), (48e9, 8), (40e9, 8), (24e9, 4), (8e9, 1), (2e9, 1)],
)
def test_chunks_are_by_device_and_a_power_of_two(monkeypatch, memory, expected):
    card = SimpleNamespace(total_memory=int(memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    find = head.chunk_factor.__wrapped__
    assert find(torch.device("cpu")) == 1
    assert find(torch.device("cuda", 0)) == expected
    # Logits, noise and copies of a chunk in sampling: 4 bytes each, and half of `CHUNK_ELEMENTS` to a chunk
    assert expected == 1 or 4 * 4 * expected * head.CHUNK_ELEMENTS // 2 < 0.05 * memory


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("factor", "calls"), [(1, 32), (16, 2)])
def test_the_head_is_called_twice_for_64_rows_of_32_where_memory_allows(monkeypatch, temperature, factor, calls):
    """With LLaDA's vocabulary: 66 positions at a time, which are two rows, or 16 times as many rows."""
    monkeypatch.setattr(head, "chunk_factor", lambda device: factor)
    chosen = SamplingSettings(gen_length=32, block_length=32, steps=32, temperature=temperature)
    options = {"mask_token_id": MASK, "generator": None, "noise_dtype": torch.float32}
    with FakeTensorMode(), Subtractions() as entropies:
        model = Fixed(torch.zeros(1))
        model.config = SimpleNamespace(model_type="llama", vocab_size=126_464)
        ids, *_ = predict(model, torch.zeros(1, 64, 32, 126_464), [32] * 64, chosen, **options)
    assert len(model.scored) == calls
    assert ids.shape == (64, 32)
    if temperature:  # entropies: eight positions at a time, or a half of the chunk
        assert entropies.count == {1: 32 * 8, 16: 2 * 2}[factor]


class Subtractions(TorchDispatchMode):
    """Counts differences of logits and their normalisers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.sub.Tensor and args[0].shape[-1] == 126_464
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("per_row", [True, False])
def test_values_and_draws_do_not_depend_on_the_chunks(monkeypatch, temperature, per_row):
    """Chunks of five positions, and 2, 4 and 16 times as large; rows shorter and longer than a chunk."""
    chosen = SamplingSettings(gen_length=8, block_length=8, steps=8, temperature=temperature)
    options = {"mask_token_id": MASK, "noise_dtype": torch.float32}
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * 5 * VOCAB)
    for rows, positions in ((7, 2), (5, 5), (3, 13), (1, 64)):
        states = torch.randn(1, rows, positions, VOCAB, generator=keyed_generator(rows))
        counts = [max(1, positions - row) for row in range(rows)]
        found = {}
        for factor in (1, 2, 4, 16):
            monkeypatch.setattr(head, "chunk_factor", lambda device, factor=factor: factor)
            generators = [keyed_generator(3, row) for row in range(rows)] if per_row else keyed_generator(3)
            found[factor] = predict(Fixed(states), states.clone(), counts, chosen, generator=generators, **options)
        for factor in (2, 4, 16):
            ids, *values = found[factor]
            assert torch.equal(ids, found[1][0])
            for value, expected in zip(values, found[1][1:], strict=True):  # exp rounds a vector's tail in its own way
                assert_near(value, expected, least=LOGITS, terms=VOCAB)


@pytest.mark.parametrize("per_row", [True, False])
def test_each_call_for_random_numbers_is_as_large_as_a_chunk_on_a_cpu(monkeypatch, per_row):
    """A GPU gives other numbers to calls of another size, so that a larger card would draw other tokens."""
    sizes, draw, fill = {}, torch.rand, torch.Tensor.uniform_
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * 5 * VOCAB)
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: calls.append(shape) or draw(*shape, **kwargs))
    monkeypatch.setattr(
        torch.Tensor, "uniform_", lambda self, **kwargs: calls.append(self.shape) or fill(self, **kwargs)
    )
    chosen = SamplingSettings(gen_length=8, block_length=8, steps=8, temperature=1.0)
    for factor in (1, 4):
        monkeypatch.setattr(head, "chunk_factor", lambda device, factor=factor: factor)
        for rows, positions in ((7, 2), (3, 13)):
            calls = []
            states = torch.zeros(1, rows, positions, VOCAB)
            generators = [keyed_generator(3, row) for row in range(rows)] if per_row else keyed_generator(3)
            options = {"generator": generators, "mask_token_id": MASK, "noise_dtype": torch.float32}
            predict(Fixed(states), states, [positions] * rows, chosen, **options)
            sizes.setdefault((rows, positions), []).append(calls)
    for first, second in sizes.values():
        assert first == second
        assert len(first) > 1
