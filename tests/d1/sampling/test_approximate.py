"""The approximate samplers against one slow reference: a row alone, keys and values frozen by hooks, float rules."""

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import rollout
from d1.sampling.reveal import RULES, reveal_schedule
from d1.sampling.settings import SAMPLERS, Sampler, choose_sampler

MASK, VOCAB = 3, 64
GIVEN = {"max_examples": 25, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
LENGTHS = {"mask_token_id": MASK, "gen_length": 12, "block_length": 4, "steps": 6}


@pytest.fixture(params=["llama", "llada", "Dream"], scope="module")  # Dream's logits speak of the next token
def model(request, kind_dirs):
    return sharper(load_model(kind_dirs[request.param]))


def sharper(model):
    """Random weights are sure of nothing, and no rule would ever reveal more than one token."""
    model.lm_head.weight.data.mul_(4)
    return model


class Frozen:
    """Forward passes of one row, always over everything; outside a window, keys and values stay as first recorded."""

    def __init__(self, model):
        self.model, self.recorded, self.window = model, {}, None
        self.layers = [layer for name, layer in model.named_modules() if name.endswith(("k_proj", "v_proj"))]

    def replace(self, layer, args, output):
        if self.window is None:
            self.recorded[layer] = output.clone()
            return output
        mixed = self.recorded[layer].clone()
        mixed[:, self.window] = output[:, self.window]
        return mixed

    def logits(self, ids, window):
        self.window = window
        hooks = [layer.register_forward_hook(self.replace) for layer in self.layers]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        for hook in hooks:
            hook.remove()
        return logits


def count_by_rule(sampler, probabilities, entropies):
    """How many of the most confident tokens (given in that order) a rule reveals."""
    n = 0
    while n < len(probabilities):
        more = n + 1
        if sampler.reveal == "threshold":
            good = probabilities[n] > sampler.reveal_level
        elif sampler.reveal == "factor":
            good = (more + 1) * (1 - probabilities[n]) < sampler.reveal_level
        else:
            good = sum(entropies[:more]) - max(entropies[:more]) <= sampler.reveal_level
        if not good:
            break
        n = more
    return n


def reference(model, prompt, sampler, *, gen_length, block_length, steps, temperature, cfg_scale, generator):
    """(ids, log-probs, forward passes, tokens fed) of one row."""
    ids, logps, passes, fed = list(prompt) + [MASK] * gen_length, [0.0] * gen_length, 0, 0
    views = [Frozen(model)] + ([Frozen(model)] if cfg_scale else [])
    shift = int(getattr(model.config, "predicts_next_token", False))
    start = len(prompt)
    for reveals in reveal_schedule(gen_length, block_length, steps):
        end, scheduled = start + sum(reveals), 0
        last = end if sampler.kv_cache == "dual" else len(ids)
        for step, count in enumerate(reveals):
            scheduled += count
            left = [i for i in range(start, end) if ids[i] == MASK]
            if not left:
                break
            window = slice(max(0, start - shift), last) if sampler.kv_cache and step > 0 else None
            seen = [ids, [MASK] * len(prompt) + ids[len(prompt) :]]
            both = [view.logits(tokens, window) for view, tokens in zip(views, seen, strict=False)]
            passes += 1
            fed += len(views) * (len(ids) if window is None else window.stop - window.start)
            logits = both[1] + (cfg_scale + 1) * (both[0] - both[1]) if cfg_scale else both[0]
            if temperature:
                uniform = torch.rand(len(left), VOCAB, generator=generator).clamp(min=2.0**-25)
            guesses = []
            for place, i in enumerate(left):
                log_softmax = logits[i].log_softmax(-1)
                scores = logits[i].clone()
                if temperature:
                    scores -= temperature * (-torch.log1p(-uniform[place])).log()
                scores[MASK] = -math.inf
                token = scores.argmax().item()
                entropy = -(log_softmax.exp() * log_softmax).sum().item()
                guesses.append((-log_softmax[token].item(), i, token, entropy))
            guesses.sort()
            due = scheduled - (end - start - len(left))
            if sampler.reveal is not None:
                due = max(1, due, count_by_rule(sampler, [math.exp(-g[0]) for g in guesses], [g[3] for g in guesses]))
            for negative, i, token, _ in guesses[:due]:
                ids[i], logps[i - len(prompt)] = token, -negative
        start = end
    return ids, logps, passes, fed


SETTINGS = [  # all pairs of the two axes
    ("exact", {}),
    ("cached", {"kv_cache": "prefix"}),
    ("cached", {"kv_cache": "dual"}),
    ("parallel", {"reveal": "threshold", "reveal_level": 0.6}),
    ("parallel", {"reveal": "factor", "reveal_level": 1.2}),
    ("parallel", {"reveal": "entropy", "reveal_level": 0.6}),
    ("cached+parallel", {"kv_cache": "prefix", "reveal": "entropy", "reveal_level": 0.6}),
    ("cached+parallel", {"kv_cache": "dual", "reveal": "threshold", "reveal_level": 0.6}),
    ("cached+parallel", {"kv_cache": "dual", "reveal": "factor", "reveal_level": 1.2}),
]


@st.composite
def cases(draw):
    gen_length = draw(st.integers(1, 12))
    block_length = draw(st.integers(1, 14))
    name, options = draw(st.sampled_from(SETTINGS))
    return {
        "widths": draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)),
        "lengths": {
            "gen_length": gen_length,
            "block_length": block_length,
            "steps": draw(st.integers(-(-gen_length // block_length), gen_length)),
            "temperature": draw(st.sampled_from([0.0, 0.8])),
            "cfg_scale": draw(st.sampled_from([0.0, 0.0, 0.5])),
        },
        "sampler": choose_sampler(name, **options),
        "seed": draw(st.integers(0, 1000)),
    }


def make_prompts(widths, seed):
    ids, mask = torch.zeros(len(widths), max(widths), dtype=torch.long), torch.zeros(len(widths), max(widths))
    for row, width in enumerate(widths):
        ids[row, -width:] = torch.randint(4, VOCAB, (width,), generator=keyed_generator(seed, row))
        mask[row, -width:] = 1
    return ids, mask.long()


def check_against_the_reference(model, case):
    ids, mask = make_prompts(case["widths"], case["seed"])
    width = ids.shape[1]
    generators = [keyed_generator(case["seed"], 9, row) for row in range(len(ids))]
    got = rollout(
        model, ids, mask, mask_token_id=MASK, generator=generators, sampler=case["sampler"], **case["lengths"]
    )
    for row, size in enumerate(case["widths"]):
        twin = keyed_generator(case["seed"], 9, row)
        prompt = ids[row, width - size :].tolist()
        tokens, logps, passes, fed = reference(model, prompt, case["sampler"], generator=twin, **case["lengths"])
        assert got.ids[row, width - size :].tolist() == tokens
        torch.testing.assert_close(got.logps[row], torch.tensor(logps), rtol=0, atol=2e-5)
        assert (got.passes[row].item(), got.tokens[row].item()) == (passes, fed)
        assert torch.equal(generators[row].get_state(), twin.get_state())  # and drew not one number more


ALL_IS_WINDOW = {  # with Dream's shift, the window begins at the prompt's only token
    "widths": [1, 1],
    "lengths": {"gen_length": 3, "block_length": 3, "steps": 3, "temperature": 0.0, "cfg_scale": 0.0},
    "sampler": choose_sampler("cached+parallel", kv_cache="prefix", reveal="entropy"),
    "seed": 0,
}


@given(case=cases())
@example(case=ALL_IS_WINDOW)
@settings(**GIVEN)
def test_rows_of_a_padded_batch_equal_the_reference_on_each_row_alone(model, case):
    check_against_the_reference(model, case)


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_every_sampler_equals_the_reference_under_eager_attention(kind_dirs, name, options):
    model = sharper(load_model(kind_dirs["Dream"], attn_implementation="eager"))
    lengths = {"gen_length": 12, "block_length": 4, "steps": 9, "temperature": 0.0, "cfg_scale": 0.5}
    case = {"widths": [6, 1, 4], "lengths": lengths, "sampler": choose_sampler(name, **options), "seed": 3}
    check_against_the_reference(model, case)


def test_a_cache_renewed_in_every_step_is_exact(model):
    ids, mask = make_prompts([6, 2, 4], 0)
    lengths = {"mask_token_id": MASK, "gen_length": 8, "block_length": 1, "steps": 8}  # each block is one step
    exact = rollout(model, ids, mask, **lengths)
    for cache in ("prefix", "dual"):
        cached = rollout(model, ids, mask, sampler=choose_sampler("cached", kv_cache=cache), **lengths)
        assert torch.equal(cached.ids, exact.ids)
        torch.testing.assert_close(cached.logps, exact.logps, rtol=0, atol=1e-5)
        assert torch.equal(cached.tokens, exact.tokens)


@pytest.mark.parametrize("steps", [6, 12])
@pytest.mark.parametrize(("reveal", "level"), [("threshold", 1.0), ("factor", 0.0)])
def test_a_rule_that_nothing_meets_leaves_the_schedule(model, steps, reveal, level):
    ids, mask = make_prompts([6, 2, 4], 1)
    lengths = LENGTHS | {"steps": steps, "temperature": 0.7}
    runs = []
    for sampler in (Sampler(), choose_sampler("parallel", reveal=reveal, reveal_level=level)):
        generators = [keyed_generator(2, row) for row in range(3)]
        runs.append(rollout(model, ids, mask, generator=generators, sampler=sampler, **lengths))
    exact, parallel = runs
    assert torch.equal(exact.ids, parallel.ids)
    assert torch.equal(exact.passes, parallel.passes)
    assert exact.passes.tolist() == [steps] * 3


def test_log_probs_are_those_of_the_step_that_revealed_the_token(model):
    ids, mask = make_prompts([5], 2)
    got = rollout(model, ids, mask, mask_token_id=MASK, gen_length=6, block_length=6, steps=1)
    canvas = torch.cat([ids, torch.full((1, 6), MASK)], dim=1)
    with torch.no_grad():
        expected = model(input_ids=canvas).logits[:, 5:].log_softmax(-1).gather(-1, got.ids[:, 5:, None]).squeeze(-1)
    torch.testing.assert_close(got.logps, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), SETTINGS)
@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_counts_are_what_the_body_was_fed(model, name, options, cfg_scale):
    fed = []
    hook = model.base_model.register_forward_pre_hook(
        lambda body, args, kwargs: fed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, mask = make_prompts([6] * 5, 4)
    lengths = LENGTHS | {"steps": 12 if "parallel" in name else 6, "cfg_scale": cfg_scale}
    got = rollout(model, ids, mask, sampler=choose_sampler(name, **options), **lengths)
    hook.remove()
    assert got.tokens.sum() == sum(rows * length for rows, length in fed)
    assert got.passes.sum() * (2 if cfg_scale else 1) == sum(rows for rows, _ in fed)
    assert got.passes.max() <= lengths["steps"]
    if "parallel" in name:
        assert len(got.passes.unique()) > 1, "no row took fewer passes than another: the test shows nothing"
    if name == "cached":
        full, window = 18, {"prefix": (12 + 8 + 4), "dual": 3 * 4}[options["kv_cache"]]
        shift = 3 * int(getattr(model.config, "predicts_next_token", False))
        assert got.tokens.tolist() == [(3 * full + window + shift) * (2 if cfg_scale else 1)] * 5


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_the_eos_stop_changes_no_token_up_to_the_eos(model, name, options):
    ids, mask = make_prompts([6, 2, 4, 6, 6, 1], 1)
    sampler = choose_sampler(name, **options)

    def run(ends):
        generators = [keyed_generator(5, row) for row in range(6)]
        lengths = LENGTHS | {"temperature": 0.8}
        return rollout(model, ids, mask, generator=generators, sampler=sampler, eos_token_ids=ends, **lengths)

    full = run(None)
    words, counts = full.ids[:, 6:].unique(return_counts=True)
    ends = words[counts.argsort(descending=True)][:3]
    stopped = run(ends.tolist())
    is_end = torch.isin(full.ids[:, 6:], ends)
    before = is_end.cumsum(1) - is_end.long() == 0
    assert torch.equal(full.ids[:, 6:][before], stopped.ids[:, 6:][before])
    torch.testing.assert_close(full.logps[before], stopped.logps[before], rtol=0, atol=1e-5)
    assert stopped.tokens.sum() < full.tokens.sum()
    assert (stopped.tokens <= full.tokens).all()


@given(
    places=st.lists(st.tuples(st.integers(1, 97), st.integers(0, 89)), min_size=1, max_size=8), step=st.integers(0, 40)
)
@settings(max_examples=200, deadline=None)
def test_rules_count_as_their_papers_say(places, step):
    probabilities = sorted((place / 97 for place, _ in places), reverse=True)
    entropies = [place / 30 for _, place in places]
    level = step / 10 + math.pi / 1000  # no sum of these fractions lies on it, so rounding decides nothing
    for reveal, (rule, _) in RULES.items():
        logps, nats = torch.tensor([probabilities]).double().log(), torch.tensor([entropies]).double()
        expected = count_by_rule(Sampler(None, reveal, level), probabilities, entropies)
        assert rule(logps, nats, level).item() == expected


def test_a_threshold_is_met_by_what_exceeds_it():
    certain = torch.zeros(1, 3)
    assert RULES["threshold"][0](certain, None, 1.0).item() == 0
    assert RULES["threshold"][0](certain - 1e-3, None, 0.0).item() == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fast", {}, "sampler must be one of exact, cached, parallel, cached\\+parallel"),
        ("cached", {"kv_cache": "suffix"}, "prefix, dual"),
        ("parallel", {"reveal": "margin"}, "threshold, factor, entropy"),
        ("parallel", {"reveal_level": -1.0}, ">= 0"),
        ("parallel", {"kv_cache": "dual"}, "would be ignored"),
        ("exact", {"reveal": "factor"}, "would be ignored"),
        ("cached", {"reveal_level": 0.5}, "would be ignored"),
    ],
)
def test_a_sampler_that_makes_no_sense_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        choose_sampler(name, **options)


def test_defaults_are_those_of_the_tables():
    assert choose_sampler("exact") == Sampler(None, None, 0.0)
    assert choose_sampler("cached") == Sampler("dual", None, 0.0)
    assert choose_sampler("cached+parallel") == Sampler("dual", "threshold", RULES["threshold"][1])
    assert set(SAMPLERS) == {name for name, _ in SETTINGS}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", "no key-value cache"),
        ("roberta", "no key-value cache"),
        ("modernbert", "no key-value cache"),
        ("gemma2", "within a window"),
        ("gemma3_text", "within a window"),
    ],
)
def test_kinds_that_no_cache_is_right_for_are_refused_by_name(kind_dirs, kind, message):
    model = load_model(kind_dirs[kind])
    ids, mask = make_prompts([4, 2], 0)
    with pytest.raises(ValueError, match=f"{kind}.*{message}.*parallel"):
        rollout(model, ids, mask, sampler=choose_sampler("cached"), **LENGTHS)
    sampler = choose_sampler("parallel", reveal_level=0.2)
    assert rollout(model, ids, mask, sampler=sampler, **LENGTHS).ids.shape == (2, 16)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma"])
def test_other_kinds_with_caches_equal_the_reference(kind_dirs, kind):
    lengths = {"gen_length": 9, "block_length": 3, "steps": 6, "temperature": 0.0, "cfg_scale": 0.0}
    for cache in ("prefix", "dual"):
        case = {"widths": [5, 2], "lengths": lengths, "sampler": choose_sampler("cached", kv_cache=cache), "seed": 1}
        check_against_the_reference(load_model(kind_dirs[kind]), case)


def test_parallel_refuses_draws_that_rows_would_share_and_random_places(model):
    ids, mask = make_prompts([4, 2], 0)
    parallel = choose_sampler("parallel")
    with pytest.raises(ValueError, match="one a row"):
        rollout(model, ids, mask, temperature=1.0, generator=keyed_generator(0), sampler=parallel, **LENGTHS)
    with pytest.raises(ValueError, match="low_confidence"):
        rollout(model, ids, mask, remasking="random", sampler=parallel, **LENGTHS)
