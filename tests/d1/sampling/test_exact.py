"""The sampler gives the tokens of the published algorithm, draw for draw, at a fraction of its work."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import d1.models.head
from benchmarks import published
from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import eos_cut, generate
from tests.d1.sampling.reference import MASK, VOCAB, make_prompts

EOS = 2
GIVEN = {"max_examples": 20, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def same_draws(generators):
    """`rand` for the published sampler: numbers of the library's documented stream, in the positions where they are
    used.

    One number per word of the vocabulary for each token still hidden in the block, left to right, then (random
    remasking) one per token. The library's Gumbel noise is -log(-log(1 - u)).
    """

    def rand(hidden, shape):
        values = torch.full(shape, 0.5, dtype=torch.float64)
        per_row = int(hidden[0].sum())
        wide = (VOCAB,) if len(shape) == 3 else ()
        if isinstance(generators, list):
            drawn = torch.cat([torch.rand(per_row, *wide, generator=generator) for generator in generators])
        else:
            drawn = torch.rand(len(hidden) * per_row, *wide, generator=generators)
        drawn = drawn.double()
        values[hidden] = 1 - drawn.clamp(min=2.0**-25) if wide else drawn
        return values

    return rand


@st.composite
def cases(draw):
    gen_length = draw(st.integers(1, 12))
    block_length = draw(st.integers(1, 14))
    steps = draw(st.integers(-(-gen_length // block_length), gen_length))
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return {
        "widths": widths,
        "settings": {
            "mask_token_id": MASK,
            "gen_length": gen_length,
            "block_length": block_length,
            "steps": steps,
            "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
            "cfg_scale": draw(st.sampled_from([0.0, 0.5])),
            "remasking": draw(st.sampled_from(["low_confidence", "random"])),
        },
        "row_generators": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
        "chunk": draw(st.sampled_from([1, 3 * VOCAB, 2**23])),
    }


def make_generators(case):
    if case["row_generators"]:
        return [keyed_generator(case["seed"], 9, row) for row in range(len(case["widths"]))]
    return keyed_generator(case["seed"], 9)


@pytest.fixture(params=["llada", "Dream"], scope="module")  # without and with the shift
def model(request, kind_dirs):
    return load_model(kind_dirs[request.param])


@given(case=cases())
@settings(**GIVEN)
def test_tokens_and_draws_are_those_of_the_published_algorithm(model, monkeypatch, case):
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 2 * case["chunk"])
    ids, mask = make_prompts(case["widths"], case["seed"])
    ours, theirs = make_generators(case), make_generators(case)
    got = generate(model, ids, mask, generator=ours, **case["settings"])
    rand = same_draws(theirs)
    expected = published.generate(model, ids, mask, rand=rand, dtype=torch.float64, **case["settings"])
    assert got.tolist() == expected.tolist()
    for a, b in zip(*(g if isinstance(g, list) else [g] for g in (ours, theirs)), strict=True):
        assert torch.equal(a.get_state(), b.get_state())  # no further number was drawn


def ends_early(model):
    """A function that makes `eos_token_ids` from words that the model often says, so that rows end in different
    blocks."""
    ids, mask = make_prompts([6] * 8, 0)
    said = generate(model, ids, mask, mask_token_id=MASK, gen_length=8, block_length=2, steps=8)[:, 6:]
    words, counts = said.unique(return_counts=True)
    return words[counts.argsort(descending=True)][:4].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"remasking": "random"}, {"cfg_scale": 0.5}])
def test_the_eos_stop_changes_no_token_up_to_the_eos_and_saves_the_rest(model, options):
    ends = torch.tensor(ends_early(model))
    ids, mask = make_prompts([6, 2, 4, 6, 6, 1], 1)
    lengths = {"mask_token_id": MASK, "gen_length": 12, "block_length": 3, "steps": 8}
    sequences = 2 if "cfg_scale" in options else 1  # guidance runs every row twice

    def run(**changes):
        calls = []
        hook = model.base_model.register_forward_pre_hook(
            lambda body, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        generators = [keyed_generator(5, row) for row in range(6)]
        out = generate(model, ids, mask, generator=generators, **lengths, **options, **changes)
        hook.remove()
        return out[:, 6:], sum(calls)

    (full, all_rows), (stopped, fewer_rows) = run(), run(eos_token_ids=ends.tolist())
    is_end = torch.isin(full, ends)
    up_to_end = is_end.cumsum(1) - is_end.long() == 0
    assert torch.equal(full[up_to_end], stopped[up_to_end])
    last_block = torch.where(is_end.any(1), is_end.long().argmax(1), 11) // 3  # the block of the row's first EOS
    assert all_rows == 6 * 8 * sequences
    assert fewer_rows == (last_block + 1).sum() * 2 * sequences
    assert fewer_rows < all_rows
    for row, block in zip(stopped, last_block.tolist(), strict=True):
        assert (row[(block + 1) * 3 :] == ends[0]).all()


def test_a_completion_ends_before_or_with_its_first_eos():
    ids = torch.tensor([[7, 2, 8, 2], [7, 7, 7, 7], [2, 7, 7, 7]])
    assert eos_cut(ids, [2]).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert eos_cut(ids, torch.tensor([2, 8]), including=False).sum(1).tolist() == [1, 4, 0]


def test_the_eos_stop_refuses_draws_that_rows_would_share(model):
    ids, mask = make_prompts([3, 3], 0)
    lengths = {"mask_token_id": MASK, "gen_length": 4, "block_length": 2, "steps": 4}
    for options in ({"temperature": 1.0}, {"remasking": "random"}):
        with pytest.raises(ValueError, match="a list of generators"):
            generate(model, ids, mask, eos_token_ids=[EOS], generator=keyed_generator(0), **lengths, **options)


class Ops(TorchDispatchMode):
    """Counts reads back to the host, and the most elements of a tensor over the vocabulary."""

    def __init__(self):
        super().__init__()
        self.reads, self.largest, self.kinds = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCAB,) and out.shape != (32, VOCAB):
            self.largest = max(self.largest, out.numel() // VOCAB)
            self.kinds.add(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("widths", [[5] * 4, [5, 2, 4, 5]])  # without padding and with
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"remasking": "random"}, {"cfg_scale": 0.5}])
def test_a_block_reads_back_once_for_the_eos_stop_and_a_rollout_once_at_its_end(model, monkeypatch, widths, options):
    lists = []  # on a CPU `tolist` is not an operation
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(len(tensor)) or tolist(tensor))
    ids, mask = make_prompts(widths, 0)
    lengths = {"mask_token_id": MASK, "gen_length": 16, "block_length": 4, "steps": 16}
    for ends, blocks in ((None, 0), ([MASK], 3)):  # the mask token is never said, so no row ends
        lists.clear()
        generators = [keyed_generator(0, row) for row in range(4)]
        with Ops() as ops:
            generate(model, ids, mask, generator=generators, eos_token_ids=ends, **lengths, **options)
        assert lists == [4] * (blocks + 1)  # at the end: is everything finite?
        assert ops.reads == 1  # is there padding?


def test_a_step_reads_nothing_back_and_holds_few_logits(kind_dirs, monkeypatch):
    model = load_model(kind_dirs["llada"])
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 2 * 6 * VOCAB)
    ids, mask = make_prompts([5] * 4, 0)
    lengths = {"mask_token_id": MASK, "gen_length": 16, "block_length": 4, "steps": 16}
    with Ops() as ours:
        generate(model, ids, mask, **lengths)
    assert ours.reads == 1
    assert ours.largest == 6  # positions: 2 rows with 3 hidden tokens each, or 1 row with 4
    assert not {"_softmax", "sort", "topk", "_to_copy"} & ours.kinds
    with Ops() as theirs:
        published.generate(model, ids, mask, **lengths)
    assert theirs.largest == 4 * 21
