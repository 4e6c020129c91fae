"""The loop of the sampler: every rollout and its record compared with slow references, and how the loop ends."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import d1.models.head
from benchmarks import published
from d1.masking import keyed_generator
from d1.models import load_model, prepare
from d1.sampling import SamplingSettings, eos_cut, generate, rollout, rollout_steps
from tests.d1.released import CAUSAL
from tests.d1.sampling.reference import (
    EDITORS,
    GIVEN,
    MASK,
    SAMPLERS,
    TRUNCATED,
    VOCAB,
    cases,
    check_against_the_reference,
    make_prompts,
)

GOOD = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 9}
FULL = ["llama", "Dream"]  # LLaDA runs as a Llama; Dream's logits predict the next token


def generators(rows):
    return [keyed_generator(5, row) for row in range(rows)]


# --- Compared with the slow reference, row by row ---------------------------------------------------------------------

# With Dream's shift, the window begins at the prompt's only token.
WINDOW = SamplingSettings(3, 3, 3, **SAMPLERS[6] | {"reveal_level": 0.1})
ALL_IS_WINDOW = {"widths": [1, 1], "settings": WINDOW, "ends": None, "seed": 0}
# Guidance and a low temperature enlarge the rounding of logits.
SHARP = SamplingSettings(11, 11, 3, 0.8, 0.5, **SAMPLERS[10], **TRUNCATED[2])
ENLARGED = {"widths": [1, 1, 5], "settings": SHARP, "ends": None, "seed": 843, "chunk": 2}


@pytest.mark.parametrize("kind", FULL)
@given(case=cases(st.sampled_from(SAMPLERS)))
@example(case=ALL_IS_WINDOW)
@example(case=ENLARGED)
@settings(max_examples=25, **GIVEN)
def test_rows_of_a_padded_batch_equal_the_reference_on_each_row_alone(load, kind, case):
    check_against_the_reference(load(kind), case)


EDITING = st.fixed_dictionaries(
    {
        "sampler": st.just("parallel"),
        "reveal": st.sampled_from(["threshold", "factor", "entropy", "risk_budget"]),
        "reveal_level": st.floats(0.05, 0.99),
        "edit_threshold": st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9]),
        "max_post_steps": st.integers(0, 4),
    }
)


@pytest.mark.parametrize(("kind", "size"), [("llama", None), ("Dream", None), ("Fast_dLLM_Qwen", 5), ("sdar", 4)])
@given(data=st.data())
@settings(max_examples=20, **GIVEN)
def test_every_write_of_an_editor_is_the_references(load, kind, size, data):
    check_against_the_reference(load(kind), data.draw(cases(EDITING, block_length=size)))


RANDOM = [one | {"remasking": "random"} for one in SAMPLERS[:3]]
WARM: list[dict[str, Any]] = [{}, {"temperature": 0.8}]
WARMER = [one | {"temperature": 0.8, **TRUNCATED[2]} for one in (SAMPLERS[0], RANDOM[0], SAMPLERS[2], SAMPLERS[5])]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("sampler", [one | warm for one in SAMPLERS + RANDOM for warm in WARM] + WARMER, ids=str)
def test_the_record_of_every_sampler_is_the_references(load, kind, sampler):
    case = {"widths": [6, 1, 4], "settings": SamplingSettings(12, 4, 9, **sampler), "seed": 3}
    got = check_against_the_reference(load(kind), case)
    assert (got.reveal_steps >= 0).all()
    ends = got.ids[:, 6:10].unique()[:3].tolist()
    stopped = check_against_the_reference(load(kind), case | {"ends": ends})
    filled = stopped.reveal_steps == -1
    assert filled.any(), "no row stopped: the test shows nothing"
    assert (stopped.logps[filled] == 0).all()
    assert (stopped.entropies[filled] == 0).all()


OTHERS = [("Dream", {"attn_implementation": "eager"}, {"cfg_scale": 0.5} | sampler) for sampler in SAMPLERS]
OTHERS += [(kind, {}, sampler) for kind in ("qwen2", "qwen3", "gemma") for sampler in SAMPLERS if "kv_cache" in sampler]


@pytest.mark.parametrize(("kind", "options", "sampler"), OTHERS, ids=str)
def test_eager_attention_and_other_kinds_equal_the_reference(load, kind, options, sampler):
    case = {"widths": [6, 1, 4], "settings": SamplingSettings(12, 4, 9, **sampler), "seed": 3}
    check_against_the_reference(load(kind, **options), case)


OF_BLOCKS = [{"temperature": 0.8, **TRUNCATED[1]}, {"cfg_scale": 0.5, "remasking": "random"}]
OF_BLOCKS += [SAMPLERS[5], {"remasking": "entropy"}]


@pytest.mark.parametrize("kind", ["sdar", "Fast_dLLM_Qwen", "llada2_moe"])
@pytest.mark.parametrize("options", OF_BLOCKS, ids=str)
def test_blocks_end_where_a_block_causal_models_do(load, kind, options):
    """Prompts that end at every position of a block, one of them inside the first block."""
    model = load(kind)
    size = model.config.block_size
    widths = [size + n for n in range(size)] + [1]
    case = {"widths": widths, "settings": SamplingSettings(11, size, 6, **options), "seed": 2}
    got = check_against_the_reference(model, case)
    assert (got.reveal_steps >= 0).all()
    ends = got.ids[:, -11:-6].unique()[:6].tolist()
    assert (check_against_the_reference(model, case | {"ends": ends}).reveal_steps == -1).any()
    ids, mask = make_prompts(widths, 0)
    message = rf"has blocks of {size} tokens, so block_length must be {size}, not 2;.*other_blocks=True"
    with pytest.raises(ValueError, match=message):
        rollout(model, ids, mask, **GOOD | {"block_length": 2})


# --- Compared with the published algorithm, draw for draw -------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["llada", "Dream"])
@given(
    case=cases(st.just({"sampler": "exact"}), truncated=(), orders=("low_confidence", "random")), per_row=st.booleans()
)
@settings(max_examples=20, **GIVEN)
def test_tokens_and_draws_are_those_of_the_published_algorithm(load, kind, case, per_row):
    """Also with one generator for the whole batch."""
    chosen, (ids, mask) = case["settings"], make_prompts(case["widths"], case["seed"])
    ours, theirs = (generators(len(ids)) if per_row else keyed_generator(case["seed"]) for _ in range(2))
    with pytest.MonkeyPatch.context() as given:
        given.setattr(d1.models.head, "CHUNK_ELEMENTS", case["chunk"])
        got = generate(load(kind), ids, mask, chosen, mask_token_id=MASK, generator=ours)
    names = ("gen_length", "block_length", "steps", "temperature", "cfg_scale", "remasking")
    fields = {name: getattr(chosen, name) for name in names} | {"mask_token_id": MASK, "dtype": torch.float64}
    expected = published.generate(load(kind), ids, mask, rand=same_draws(theirs), **fields)
    assert got.tolist() == expected.tolist()
    for a, b in zip(*(g if isinstance(g, list) else [g] for g in (ours, theirs)), strict=True):
        assert torch.equal(a.get_state(), b.get_state())  # no further number was drawn


# --- The EOS stop, and memory -----------------------------------------------------------------------------------------


def test_a_completion_ends_before_or_with_its_first_eos():
    ids = torch.tensor([[7, 2, 8, 2], [7, 7, 7, 7], [2, 7, 7, 7]])
    assert eos_cut(ids, [2]).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert eos_cut(ids, torch.tensor([2, 8]), including=False).sum(1).tolist() == [1, 4, 0]


class Ops(TorchDispatchMode):
    """Notes the most elements of a tensor over the vocabulary, and what makes such tensors."""

    def __init__(self):
        super().__init__()
        self.largest, self.kinds = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCAB,) and out.shape != (32, VOCAB):
            self.largest = max(self.largest, out.numel() // VOCAB)
            self.kinds.add(func.overloadpacket.__name__)
        return out


def test_a_step_holds_few_logits(load, monkeypatch):
    monkeypatch.setattr(d1.models.head, "CHUNK_ELEMENTS", 2 * 6 * VOCAB)
    ids, mask = make_prompts([5] * 4, 0)
    lengths = {"mask_token_id": MASK, "gen_length": 16, "block_length": 4, "steps": 16}
    with Ops() as ours:
        generate(load("llada"), ids, mask, **lengths)
    assert ours.largest == 6  # positions: 2 rows with 3 hidden tokens each, or 1 row with 4
    assert not {"_softmax", "sort", "topk", "_to_copy"} & ours.kinds
    with Ops() as theirs:
        published.generate(load("llada"), ids, mask, **lengths)
    assert theirs.largest == 4 * 21


@pytest.mark.parametrize("kind", [torch.uint16, torch.int32])
def test_prompts_of_other_integers_are_those_of_int64(load, kind):
    ids, mask = make_prompts([6, 1], 5)
    expected = rollout(load("llama"), ids, mask, **GOOD)
    found = rollout(load("llama"), ids.to(kind), mask, **GOOD)
    assert found.ids.dtype == torch.int64
    assert torch.equal(found.ids, expected.ids)
    with pytest.raises(ValueError, match="token ids must be integers"):
        rollout(load("llama"), ids.float(), mask, **GOOD)


# --- Steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [*SAMPLERS, EDITORS[1]], ids=str)
@pytest.mark.parametrize("ends", [None, list(range(4, 24))])
def test_the_steps_add_up_to_the_rollout(load, sampler, ends):
    ids, mask = make_prompts([6, 1, 4, 3], 5)
    chosen = SamplingSettings(12, 4, 9, temperature=0.8, cfg_scale=0.5, **sampler)

    def options():
        return {"mask_token_id": MASK, "generator": generators(4), "eos_token_ids": ends}

    whole = rollout(load("Dream"), ids, mask, chosen, **options())
    canvas, passes = torch.cat([ids, torch.full((4, 12), MASK)], dim=1), torch.zeros(4, dtype=torch.long)
    logps, entropies, numbers = torch.zeros(4, 18), torch.zeros(4, 18), torch.full((4, 18), -1)
    for step in rollout_steps(load("Dream"), ids, mask, chosen, **options()):
        assert torch.is_grad_enabled()
        assert not step.logps.requires_grad
        assert torch.equal(step.numbers, passes[step.rows])
        passes[step.rows] += 1
        assert torch.equal(step.passes, passes)
        assert step.revealed.any(1).all() or chosen.edits is not None
        for i, row in enumerate(step.rows.tolist()):
            written = (of[i][step.revealed[i]] for of in (step.positions, step.ids, step.logps, step.entropies))
            at, ids_now, *values = written
            if chosen.edits is None:
                assert (canvas[row, at] == MASK).all()  # each is revealed once
            assert (canvas[row, at] != ids_now).all()  # an edit writes another token
            canvas[row, at], numbers[row, at] = ids_now, step.numbers[i]
            logps[row, at], entropies[row, at] = values
        assert torch.equal(step.canvas[step.rows], canvas[step.rows])
    stopped = canvas == MASK
    assert stopped.any() == (ends is not None)
    assert torch.equal(canvas.masked_fill(stopped, (ends or [0])[0]), whole.ids)
    found = step.canvas, logps[:, 6:], entropies[:, 6:], numbers[:, 6:], step.passes, step.forward_tokens
    names = ("ids", "logps", "entropies", "reveal_steps", "passes", "forward_tokens")
    assert all(torch.equal(one, getattr(whole, name)) for one, name in zip(found, names, strict=True))


# --- Editing ----------------------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    """A head that predicts at each pass what a script says, whatever it reads."""

    def __init__(self, model, script):
        super().__init__()
        self.script, self.calls, self.weight = script, 0, model.lm_head.weight

    def forward(self, states):
        rows = [
            [math.log(p) if token == k else math.log((1 - p) / 63) for k in range(64)]
            for token, p in self.script[min(self.calls, len(self.script) - 1)]
        ]
        self.calls += 1
        return torch.tensor(rows).expand(states.shape[0], -1, -1) if states.dim() == 3 else torch.tensor(rows)


def scripted(kind_dirs, script, **chosen):
    model = load_model(kind_dirs["llama"])
    model.lm_head = Scripted(model, script)
    ids, mask = make_prompts([3], 0)
    given = {"gen_length": 2, "block_length": 2, "steps": 2, "sampler": "parallel", "reveal_level": 0.5} | chosen
    return rollout(model, ids, mask, mask_token_id=MASK, **given)


def test_a_block_ends_after_a_pass_without_masks_and_edits(kind_dirs):
    script = [[(5, 0.9), (6, 0.2)], [(7, 0.8), (6, 0.9)], [(7, 0.9), (8, 0.4)]]
    got = scripted(kind_dirs, script, edit_threshold=0.5)
    # Pass 0 reveals a 5; pass 1 replaces it by a 7, with masks left, and reveals a 6; pass 2 would write an 8 of 0.4.
    assert got.ids[0, 3:].tolist() == [7, 6]
    assert (got.passes.item(), got.edits.item()) == (3, 1)
    assert got.writes.ids[0, :, :2].tolist() == [[5, 7], [6, 0]]
    assert got.first_ids[0].tolist() == [*got.ids[0, :3].tolist(), 5, 6]
    assert got.writes.steps[0, :, :2].tolist() == [[0, 1], [1, -1]]
    torch.testing.assert_close(got.writes.logps[0, 0, :2].exp(), torch.tensor([0.9, 0.8]))


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_block_ends_when_its_budget_is_spent(kind_dirs, budget):
    unsettled = [[(5 + n % 2, 0.9), (7 + n % 2, 0.9)] for n in range(40)]
    got = scripted(kind_dirs, unsettled, edit_threshold=0.5, max_post_steps=budget)
    assert (got.passes.item(), got.edits.item()) == (1 + budget, 2 * budget)


@pytest.mark.parametrize("editor", EDITORS, ids=str)
def test_the_editors_of_these_tests_do_edit(load, editor):
    ids, mask = make_prompts([6, 3, 1], 4)
    got = rollout(load("llama"), ids, mask, SamplingSettings(12, 4, 9, **editor), mask_token_id=MASK)
    assert got.edits.any() or editor.get("max_post_steps") == 0  # then only before the last mask


def test_a_model_that_does_not_say_that_it_learnt_to_edit_is_warned_of_once(kind_dirs, caplog):
    model, (ids, mask) = load_model(kind_dirs["llama"]), make_prompts([3], 0)
    model.config.edit_noise = "uniform"
    rollout(model, ids, mask, **GOOD, **EDITORS[0])
    assert not caplog.records
    del model.config.edit_noise
    model.config.name_or_path = "a model trained on masks"
    for _ in range(2):
        rollout(model, ids, mask, **GOOD, **EDITORS[0])
    (record,) = caplog.records
    assert "a model trained on masks: its config does not say that it learnt to correct" in record.getMessage()


# --- Arguments --------------------------------------------------------------------------------------------------------


def test_settings_and_their_fields_are_not_given_both(load):
    chosen, prompts = SamplingSettings(12, 4, 9), make_prompts([4], 0)
    with pytest.raises(ValueError, match="both settings and temperature"):
        rollout(load("Dream"), *prompts, chosen, temperature=0.7, mask_token_id=MASK)


SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def bare(make=LlamaForCausalLM, config=LlamaConfig):
    """A model whose first pass would fail the test."""
    model = make(config(**SHAPE)).eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran the model"))
    return model


@pytest.mark.parametrize("sample", [generate, rollout, rollout_steps])
def test_a_model_that_was_not_prepared_is_refused_before_its_first_pass(sample):
    ids, mask = make_prompts([4, 2], 0)
    for model in (bare(), bare(BertForMaskedLM, BertConfig)):
        with pytest.raises(ValueError, match=r"was not prepared.*d1\.models\.load_model"):
            sample(model, ids, mask, **GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 17}, "between 3 and 12 steps"),
        ({"generator": [keyed_generator(0)]}, "one generator per row"),
        ({"temperature": 1.0, "sampler": "parallel", "generator": keyed_generator(0)}, "a list of generators, one per"),
        ({"remasking": "random", "eos_token_ids": [2]}, "a list of generators, one per row"),
        ({"mask_token_id": None}, "one of the model's 64 ids, got None: the tokenizer of d1.models.load_tokenizer"),
        ({"mask_token_id": 64}, "one of the model's 64 ids, got 64"),
        ({"attention_mask": torch.ones(2, 3)}, r"must be \(rows, prompt\), got \(2, 4\) and \(2, 3\)"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_forward_pass(change, message):
    ids, mask = make_prompts([4, 2], 0)
    with pytest.raises(ValueError, match=message):
        rollout_steps(prepare(bare()), ids, **{"attention_mask": mask} | GOOD | change)


def test_a_rollout_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="there is no row to sample"):
        rollout(prepare(bare()), *(torch.zeros(0, 4).long() for _ in range(2)), **GOOD)


@pytest.mark.parametrize("kind", ["sdar", CAUSAL])
def test_a_model_with_blocks_refuses_padding_on_the_right(load, kind):
    """Its blocks are counted from the end of the prompt, so that the padding would be part of it."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    options = {"mask_token_id": MASK, "gen_length": 8, "block_length": 4, "steps": 8}
    with pytest.raises(ValueError, match="padded on the left"):
        rollout_steps(load(kind), torch.full((2, 3), 5), mask, **options)
