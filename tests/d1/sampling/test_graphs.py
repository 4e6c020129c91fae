"""Compiled passes: the static ones of graphs, run on a CPU without a capture, and those of torch.compile."""

import copy
import re
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.head import unwrapped
from d1.sampling import SamplingSettings, graphs, rollout, rollout_stream
from d1.sampling.graphs import CompiledLayers, PassGraphs, row_bucket, run_again
from tests.d1.sampling.reference import EDITORS, GIVEN, MASK, SAMPLERS, cases, check_against_the_reference, make_prompts
from tests.rounding import LOGITS, assert_near

EXACT, PREFIX, DUAL = SAMPLERS[:3]


@contextmanager
def compiled(model, made):
    """Sampling runs the passes of `model` by `made`, and not by what its setting would make."""
    setattr(model, graphs.COMPILED, "test")
    graphs.COMPILED_MODELS[model] = ("test", graphs.compile_key(model)), made
    try:
        yield made
    finally:
        delattr(model, graphs.COMPILED)
        del graphs.COMPILED_MODELS[model]


def sampled(model, rows, settings, ends=None, widths=None):
    ids, mask = make_prompts(widths or [3 + row for row in range(rows)], 0)
    draws = [keyed_generator(7, row) for row in range(rows)] if settings.draws else None
    return rollout(model, ids, mask, settings, mask_token_id=MASK, generator=draws, eos_token_ids=ends)


def check_equal(got, wanted):
    for name in ("ids", "logps", "entropies", "reveal_steps", "passes", "forward_tokens"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name


# --- Graphs -----------------------------------------------------------------------------------------------------------

# In fp64 the last bits of a sum, which depend on the number of rows and keys, are lost when logits become fp32.
WIDE = {"dtype": torch.float64}
KINDS = ["llama", "Dream", "sdar", "Fast_dLLM_Qwen", "nemotron_labs_diffusion"]


@pytest.mark.parametrize(
    ("kind", "temperature", "guidance"),
    [
        ("llama", 0.0, 0.0),
        ("llama", 0.8, 0.5),
        ("Dream", 0.8, 0.0),
        ("sdar", 0.0, 0.0),
        ("sdar", 0.8, 0.5),
        ("Fast_dLLM_Qwen", 0.8, 0.0),
        ("nemotron_labs_diffusion", 0.8, 0.0),
    ],
)
def test_static_passes_give_rollouts_to_the_bit(load, kind, temperature, guidance):
    """Prompts of five lengths; rows leave at an EOS, so that there are fewer rows than a graph has."""
    model = load(kind, **WIDE)
    size = getattr(model.config, "block_size", None) or 4
    how = SamplingSettings(4 * size, size, 3 * size, temperature, guidance)
    ends = sampled(model, 5, how).ids[:, -3 * size : -2 * size].unique()[:2].tolist()
    wanted = [sampled(model, 5, how), sampled(model, 5, how, ends)]
    assert (wanted[1].reveal_steps == -1).any(), "no row stopped: the test shows nothing"
    with compiled(model, PassGraphs(run_again)) as made:
        for _ in range(2):  # the second time, no shape is new
            for stop, result in zip((None, ends), wanted, strict=True):
                check_equal(sampled(model, 5, how, stop), result)
    assert made.replays > made.eager_passes > 0
    assert not made.failed


@pytest.mark.parametrize("sampler", [*SAMPLERS[1:], EDITORS[0]], ids=str)
def test_every_sampler_and_cache_gives_the_same_to_the_bit(load, sampler):
    model, how = load("llama", **WIDE), SamplingSettings(12, 4, 9, 0.8, **sampler)
    wanted = sampled(model, 3, how)
    with compiled(model, PassGraphs(run_again)) as made:
        for _ in range(2):
            check_equal(sampled(model, 3, how), wanted)
    assert made.replays > 0


@pytest.mark.parametrize(("kind", "size"), [("llama", None), ("Fast_dLLM_Qwen", 5)])
@given(data=st.data())
@settings(max_examples=8, **GIVEN)
def test_static_passes_in_fp32_equal_the_slow_reference(load, kind, size, data):
    model, samplers = load(kind), SAMPLERS if size is None else SAMPLERS[:1]
    with compiled(model, PassGraphs(run_again)):
        check_against_the_reference(model, data.draw(cases(st.sampled_from(samplers), block_length=size)))


def test_rows_of_a_stream_are_the_same(load):
    model, how = load("sdar", **WIDE), SamplingSettings(12, 4, 9, 0.8)
    prompts = [([5 + row, 6, 7, 8][: 1 + row % 4], row) for row in range(9)]

    def completions():
        stream = ((ids, keyed_generator(7, row)) for ids, row in prompts)
        finished = rollout_stream(model, stream, how, batch_size=3, mask_token_id=MASK)
        return {
            number: (result.ids[row, -12:].tolist(), result.logps[row].tolist())
            for numbers, result in finished
            for row, number in enumerate(numbers)
        }

    wanted = completions()
    with compiled(model, PassGraphs(run_again)) as made:
        assert completions() == wanted
    assert made.replays > made.captures > 0


def test_a_graph_serves_all_blocks_steps_and_prompts_of_a_bucket(load):
    """Per rollout, 4 blocks of 8 tokens in 4 steps, which predict 8, 6, 4 and 2 tokens."""
    model, how = load("llama"), {"gen_length": 32, "block_length": 8, "steps": 16}
    with compiled(model, PassGraphs(run_again)) as made:
        for _ in range(2):
            sampled(model, 5, SamplingSettings(**how))
        assert (made.eager_passes, made.captures, made.replays) == (1, 1, 31)
    with compiled(model, PassGraphs(run_again)) as made:  # first passes of a block, and windows
        for last in (9, 10):
            sampled(model, 5, SamplingSettings(**how, **DUAL), widths=[3, 4, 5, 6, last])
        # First passes of a block have a shape per width of the prompts, windows have one.
        assert (made.eager_passes, made.captures, made.replays) == (3, 3, 29)
    sdar = load("sdar")
    with compiled(sdar, PassGraphs(run_again)) as made:  # 8 blocks of 4 tokens in 2 steps, with up to 41 cached keys
        for _ in range(2):
            sampled(sdar, 4, SamplingSettings(32, 4, 16), widths=[9, 9, 9, 9])
        assert made.captures == len(made.graphs) <= 4
        assert made.eager_passes <= 6
        assert made.replays + made.eager_passes == 2 * 16


def test_row_buckets_are_at_most_a_quarter_larger():
    assert [row_bucket(rows) for rows in (1, 5, 8, 9, 11, 13, 16, 17, 33, 64, 65)] == [
        *(1, 5, 8, 10, 12, 14, 16, 20, 40, 64, 80)
    ]


def test_the_cached_keys_of_a_window_are_copied_once(load, monkeypatch):
    model, how = load("llama"), SamplingSettings(16, 8, 16, **DUAL)
    with compiled(model, PassGraphs(run_again)) as made:
        sampled(model, 2, how)
        copies = []
        monkeypatch.setattr(
            torch, "_foreach_copy_", lambda to, of, copy=torch._foreach_copy_: copies.append(copy(to, of))
        )
        sampled(model, 2, how)
        assert made.replays > 20
        assert len(copies) == 2  # of 14 passes over windows: once per block


@contextmanager
def traced():
    """A capture that dynamo makes of the computation as one graph, and the number of graphs that it compiled."""
    counter = CompileCounter()

    def capture(compute):
        return run_again(torch.compile(compute, backend=counter, fullgraph=True))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # all computations have the same code
        yield capture, counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "sampler", "graphs_"),
    [("llama", EXACT, 1), ("llama", DUAL, 2), pytest.param("sdar", EXACT, 4, marks=pytest.mark.slow)],
)
def test_dynamo_takes_a_static_pass_as_one_graph(load, kind, sampler, graphs_):
    """No break and no host sync; over blocks, steps and rollouts nothing is compiled again."""
    model, how = load(kind), SamplingSettings(16, 4, 12, 0.8, **sampler)
    wanted = sampled(model, 4, how, widths=[5, 5, 5, 1])
    with traced() as (capture, counter), compiled(model, PassGraphs(capture)) as made:
        for _ in range(3):
            got = sampled(model, 4, how, widths=[5, 5, 5, 1])
        assert torch.equal(got.ids, wanted.ids)
        assert_near(got.logps, wanted.logps, least=LOGITS)
        assert not made.failed
        assert counter.frame_count == made.captures == graphs_


def test_a_shape_that_cannot_be_captured_runs_as_always(load, caplog):
    def fail(compute):
        compute()
        raise RuntimeError("operation not permitted when stream is capturing")

    model, how = load("llama"), SamplingSettings(12, 4, 9, 0.8, **DUAL)
    wanted = sampled(model, 3, how)
    with compiled(model, PassGraphs(fail)) as made:
        check_equal(sampled(model, 3, how), wanted)
    assert (made.replays, len(made.failed)) == (0, 2)
    assert len(caplog.records) == 2
    assert "operation not permitted" in caplog.text


def test_a_graph_reads_weights_that_change_and_none_that_were_exchanged(kind_dirs, monkeypatch):
    monkeypatch.setattr(graphs, "GPUCapture", lambda: run_again)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, how = load_model(kind_dirs["llama"]), SamplingSettings(12, 4, 9)
    graphs.set_compile(model, "graphs")
    first = sampled(model, 3, how)
    made = graphs.COMPILED_MODELS[model][1]
    assert made.replays > 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)
    changed = sampled(model, 3, how)
    assert graphs.COMPILED_MODELS[model][1] is made
    assert not torch.equal(changed.ids, first.ids)
    with torch.no_grad():  # another tensor with the first values
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight / -2
    check_equal(sampled(model, 3, how), first)
    assert graphs.COMPILED_MODELS[model][1] is not made
    with torch.enable_grad():  # what needs gradients runs as always
        run = graphs.forward_pass(model)
        assert run(torch.ones(1, 4, dtype=torch.long), None, torch.ones(1, 1, dtype=torch.long)).requires_grad


# --- Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "with_adapter"), [(EXACT, True), (DUAL, False), (PREFIX, False)], ids=str)
def test_layers_share_their_compiled_code(kind_dirs, sampler, with_adapter):
    """Two versions, of a whole layer and of one that processes the asked positions alone, and with other widths of the
    prompts one more each, whose sizes are variables. With the cache "prefix", windows vary already in one rollout."""
    model = load_model(kind_dirs["llama"], **WIDE)  # dynamo changes the form of some products
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    inner, how = unwrapped(model.eval()), SamplingSettings(16, 4, 12, 0.8, **sampler)
    widths = [[3, 4, 5, longest] for longest in (6, 7, 9)]
    wanted = [sampled(model, 4, how, widths=each) for each in widths]
    counter = CompileCounter()
    torch._dynamo.reset()
    with compiled(inner, CompiledLayers(counter)):
        counts = []
        for each, result in zip(widths, wanted, strict=True):
            check_equal(sampled(model, 4, how, widths=each), result)
            counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert 2 <= counts[0] <= 4
    assert counts[1] == counts[-1] < 8  # torch's own limit
    assert not any("forward" in vars(layer) for layer in inner.model.layers)


# --- The setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "compile", "options", "message"),
    [
        ("llama", "graph", {}, "must be one of none, layers, graphs, got 'graph'"),
        ("llama", "graphs", {}, "--compile graphs needs a GPU"),
        ("lladamoe", "layers", {}, "--compile layers: qwen3_moe is a mixture"),
        ("bert", "layers", {}, "--compile layers is for decoders, and bert is an encoder"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(load, kind, compile, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        graphs.set_compile(load(kind, **options), compile)


def test_kernels_and_weights_with_other_needs_are_refused(load, monkeypatch):
    config = copy.deepcopy(load("llama").config)
    with pytest.raises(ValueError, match="4-bit weights have kernels of their own"):
        graphs.check_compile("layers", config, quantized=True)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 reads the lengths of padded rows on the host"):
        graphs.check_compile("layers", config)
    graphs.check_compile("none", config, quantized=True)


def test_a_copy_of_a_model_keeps_the_setting_and_shares_no_graph(load, monkeypatch):
    monkeypatch.setattr(graphs, "GPUCapture", lambda: run_again)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = copy.deepcopy(load("llama"))
    graphs.set_compile(model, "graphs")
    graphs.forward_pass(model)
    other = copy.deepcopy(model)
    graphs.forward_pass(other)
    assert graphs.compile_of(other) == "graphs"
    assert graphs.COMPILED_MODELS[model][1] is not graphs.COMPILED_MODELS[other][1]
