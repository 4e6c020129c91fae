"""A slow reference for the library's sampler: one row alone, one position at a time, Python's own numbers.

It always runs the whole model over the whole text. For an approximate cache, hooks keep old keys and values; for an
exact cache, only the tokens are counted. It is separate from `benchmarks/published.py`, the baseline of the benchmarks,
which has neither caches nor rules and keeps no record.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

from d1.masking import keyed_generator
from d1.models import head
from d1.sampling import SamplingSettings, rollout
from d1.sampling.reveal import REMASKING
from tests.rounding import LOGITS, rounding

MASK, VOCAB = 3, 64
SAMPLERS: list[dict[str, Any]] = [  # all pairs of a cache and a reveal rule that a sampler may have
    {"sampler": "exact"},
    {"sampler": "cached", "kv_cache": "prefix"},
    {"sampler": "cached", "kv_cache": "dual"},
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.6},
    {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.2},
    {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.6},
    {"sampler": "cached+parallel", "kv_cache": "prefix", "reveal": "entropy", "reveal_level": 0.6},
    {"sampler": "cached+parallel", "kv_cache": "dual", "reveal": "threshold", "reveal_level": 0.6},
    {"sampler": "cached+parallel", "kv_cache": "dual", "reveal": "factor", "reveal_level": 1.2},
    {"sampler": "cached", "kv_cache": "delayed"},
    {"sampler": "cached+parallel", "kv_cache": "delayed", "reveal": "threshold", "reveal_level": 0.6},
    {"sampler": "cached", "kv_cache": "lasting"},
    {"sampler": "cached+parallel", "kv_cache": "lasting", "reveal": "factor", "reveal_level": 1.2},
    {"sampler": "parallel", "reveal": "risk_budget", "reveal_level": 0.5},
]
EDITORS: list[dict[str, Any]] = [  # random models never agree with themselves: budgets end their blocks
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.4, "edit_threshold": 0.6},
    {"sampler": "parallel", "reveal": "threshold", "reveal_level": 0.3, "edit_threshold": 0.3, "max_post_steps": 3},
    {"sampler": "parallel", "reveal": "factor", "reveal_level": 1.2, "edit_threshold": 0.0, "max_post_steps": 2},
    {"sampler": "parallel", "reveal": "entropy", "reveal_level": 0.6, "edit_threshold": 0.5, "max_post_steps": 0},
    {"sampler": "parallel", "reveal": "threshold", "editing": "quality"},
]
WITHOUT_CACHE = [sampler for sampler in SAMPLERS if "cached" not in sampler["sampler"]]
TRUNCATED: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.7, "record_as_sampled": True}]
TRUNCATED += [{"top_k": 5, "top_p": 0.9, "record_as_sampled": True}, {"record_as_sampled": True}]
GIVEN: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@st.composite
def cases(draw, samplers, longest=12, block_length=None, truncated=TRUNCATED, orders=tuple(REMASKING)):
    """A batch of prompts and the settings to complete them: lengths, noise, guidance, EOS stop, size of a chunk."""
    gen_length, block_length = draw(st.integers(1, longest)), block_length or draw(st.integers(1, longest + 2))
    sampler, temperature = draw(samplers), draw(st.sampled_from([0.0, 0.8]))
    settings = SamplingSettings(
        gen_length,
        block_length,
        draw(st.integers(-(-gen_length // block_length), gen_length)),
        temperature,
        draw(st.sampled_from([0.0, 0.0, 0.5])),
        **{"remasking": "low_confidence" if "reveal_level" in sampler else draw(st.sampled_from(orders)), **sampler},
        **draw(st.sampled_from([{}, *truncated] if temperature else [{}])),
    )
    return {
        "widths": draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)),
        "settings": settings,
        "ends": draw(st.sampled_from([None, list(range(4, 20))])),
        "seed": draw(st.integers(0, 1000)),
        "chunk": draw(st.sampled_from([2, 6 * VOCAB, 2**24])),
    }


@dataclass
class Row:
    """The content of `Rollout` for one row."""

    ids: list[int]
    logps: list[float]
    entropies: list[float]
    reveal_steps: list[int]
    writes: list[list[tuple[int, int, float, float]]]  # of each position: pass, id, log-probability, entropy
    passes: int = 0
    tokens: int = 0


class Frozen:
    """Forward passes of one row, always over all tokens. Outside a window (a list of positions), keys and values stay
    as recorded: in the first pass or, with `anew`, in the last pass with them in its window."""

    def __init__(self, model, anew=False):
        self.model, self.recorded, self.window, self.anew = model, {}, None, anew
        self.layers = [layer for name, layer in model.named_modules() if name.endswith(("k_proj", "v_proj"))]

    def replace(self, layer, args, output):
        if self.window is None:
            self.recorded[layer] = output.clone()
            return output
        mixed = self.recorded[layer].clone()
        mixed[:, self.window] = output[:, self.window]
        if self.anew:
            self.recorded[layer] = mixed
        return mixed

    def logits(self, ids, window):
        self.window = window
        hooks = [layer.register_forward_hook(self.replace) for layer in self.layers]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0].double()
        for hook in hooks:
            hook.remove()
        return logits


def parts(total, count):
    return [total // count + (part < total % count) for part in range(count)]


def blocks_of(positions, settings, model):
    """The tokens and steps of each block of the positions to fill."""
    length = len(positions)
    if not getattr(model.config, "block_size", None):
        count = -(-length // settings.block_length)
        return list(zip(parts(length, count), parts(settings.steps, count), strict=True))
    sizes = list(Counter(position // settings.block_length for position in positions).values())
    steps = [1 for _ in sizes]
    while sum(steps) < settings.steps:
        rates = [size / count for size, count in zip(sizes, steps, strict=True)]
        steps[rates.index(max(rates))] += 1
    return list(zip(sizes, steps, strict=True))


def count_by_rule(rule, level, probabilities, entropies):
    """The number of the most confident tokens (given in that order) that a rule reveals."""
    n = 0
    while rule is not None and n < len(probabilities):
        more = n + 1
        if rule == "threshold":
            good = probabilities[n] > level
        elif rule == "factor":
            good = (more + 1) * (1 - probabilities[n]) < level
        elif rule == "risk_budget":
            risk = sum(1 - probability for probability in probabilities[:more])
            good = probabilities[n] > level and risk <= 1 - level
        else:
            good = sum(entropies[:more]) - max(entropies[:more]) <= level
        if not good:
            break
        n = more
    return n


def left_of(logits, temperature=1.0, top_k=0, top_p=1.0):
    """{id: probability} of the tokens of one position that may be drawn: the `top_k` most likely and, after
    renormalising, the smallest number of most likely ones among them with a total of `top_p`."""
    best = max(logits)
    powers = {token: math.exp((value - best) / temperature) for token, value in enumerate(logits)}
    for wanted in ("top_k", "top_p"):
        total, kept, so_far = math.fsum(powers.values()), {}, 0.0
        for token, power in sorted(powers.items(), key=lambda item: -item[1]):
            if (wanted == "top_k" and top_k and len(kept) == top_k) or (wanted == "top_p" and so_far >= top_p):
                break
            kept[token] = power
            so_far += power / total
        powers = kept
    total = math.fsum(powers.values())
    return {token: power / total for token, power in powers.items()}


def recorded(logits, token, settings):
    """The log-probability to record for a token, which itself always counts as allowed."""
    if not settings.record_as_sampled:
        return math.log(left_of(logits)[token])
    left = {*left_of(logits, settings.temperature, settings.top_k, settings.top_p), token}
    powers = {k: math.exp((logits[k] - logits[token]) / settings.temperature) for k in left}
    return -math.log(math.fsum(powers.values()))


def sample(model, text, settings, generator, ends=None, holes=None):
    """The row that `rollout` must give for the prompt `text` and this generator, whatever else is in the batch; with
    `holes`, the row that `infill` must give for these positions of `text`."""
    length, cfg_scale, temperature = settings.gen_length, settings.cfg_scale, settings.temperature
    ids = [*text, *[MASK] * length] if holes is None else [MASK if i in holes else id for i, id in enumerate(text)]
    positions = list(range(len(text), len(ids))) if holes is None else holes
    row = Row(ids, [0.0] * length, [0.0] * length, [-1] * length, [[] for _ in range(length)])
    above, budget = settings.edits, settings.post_steps
    lasting = settings.kv_cache == "lasting"
    delayed = settings.kv_cache == "delayed" or lasting
    branches = [Frozen(model, delayed) for _ in range(2 if cfg_scale else 1)]
    cached, parallel = "cached" in settings.sampler, "parallel" in settings.sampler
    shift = int(getattr(model.config, "predicts_next_token", False))
    of_model = getattr(model.config, "block_size", None) if holes is None else None
    filled, stored = 0, 0
    before: list[int] = []
    for size, steps in blocks_of(positions, settings, model):
        own, scheduled, post = positions[filled : filled + size], 0, 0
        start, end, filled = own[0], own[-1] + 1, filled + size
        last = end if settings.kv_cache == "dual" else len(ids)
        before = before if lasting else []
        for step, count in enumerate(parts(size, steps) + [0] * (above is not None) * (budget + 1)):
            scheduled += count
            left = masked = [i for i in own if ids[i] == MASK]
            if not masked:
                post += 1
                if above is None or post > budget:
                    break
            if above is not None:
                left = own
            window = list(range(max(0, start - shift), last)) if cached and step > 0 else None
            if delayed and row.passes > 0 and (lasting or step > 0):
                window = sorted({*before, *(left if lasting else [])})  # tokens hidden in the last pass or in this one
            before = left
            seen = [ids, [token if i in positions else MASK for i, token in enumerate(ids)]]
            both = [branch.logits(tokens, window) for branch, tokens in zip(branches, seen, strict=False)]
            computed = len(ids) if window is None else len(window) + (len(left) if delayed and shift else 0)
            if of_model:  # the model's blocks that overlap this one; in its first step also what is not cached
                begins = start // of_model * of_model
                computed = min(-(-end // of_model) * of_model, len(ids)) - (begins if step else stored)
                stored = begins
            row.tokens += len(branches) * computed
            logits = both[1] + (cfg_scale + 1) * (both[0] - both[1]) if cfg_scale else both[0]
            # One number per word of the vocabulary for each hidden token, left to right, then one per token for its
            # position.
            if temperature:
                uniform = torch.rand(len(left), VOCAB, generator=generator).clamp(min=2.0**-25)
            drawn = settings.remasking == "random"
            ranks = torch.rand(len(left), generator=generator).tolist() if drawn else None
            guesses = []
            for number, i in enumerate(left):
                log_softmax = logits[i].log_softmax(-1)
                scores = logits[i].clone()
                if temperature:
                    scores -= temperature * (-torch.log1p(-uniform[number])).log()
                scores[MASK] = -math.inf
                if settings.top_k or settings.top_p < 1:
                    words = [-math.inf if k == MASK else value for k, value in enumerate(logits[i].tolist())]
                    left_over = left_of(words, temperature, settings.top_k, settings.top_p)
                    scores[[k for k in range(VOCAB) if k not in left_over]] = -math.inf
                token = int(scores.argmax())
                logp, entropy = log_softmax[token].item(), -(log_softmax.exp() * log_softmax).sum().item()
                rank = {"low_confidence": -logp, "entropy": entropy, "leftmost": i}.get(settings.remasking)
                if settings.remasking == "random":
                    rank = -ranks[number]
                guesses.append((rank, i, token, logp, entropy))
            other = [guess for guess in guesses if guess[1] not in masked]
            edits = [guess for guess in other if guess[2] != ids[guess[1]] and math.exp(guess[3]) > above]
            guesses = sorted(guess for guess in guesses if guess[1] in masked)
            due = scheduled - (size - len(masked))
            if parallel:
                confidences, entropies = [math.exp(-guess[0]) for guess in guesses], [guess[4] for guess in guesses]
                due = max(1, due, count_by_rule(settings.rule, settings.level, confidences, entropies))
            for _, i, token, _, entropy in guesses[:due] + edits:
                at, ids[i] = positions.index(i), token
                row.logps[at] = recorded(logits[i].tolist(), token, settings)
                row.entropies[at], row.reveal_steps[at] = entropy, row.passes
                row.writes[at].append((row.passes, token, row.logps[at], entropy))
            row.passes += 1
            if above is not None and not masked and not edits:
                break
        if ends and set(ids[positions[0] : end]) & set(ends):
            ids[end:] = [ends[0]] * (len(ids) - end)
            break
    return row


def make_prompts(widths, seed):
    """Random prompts of these widths, padded on the left, and their attention mask."""
    ids, mask = torch.zeros(len(widths), max(widths), dtype=torch.long), torch.zeros(len(widths), max(widths))
    for row, width in enumerate(widths):
        ids[row, max(widths) - width :] = torch.randint(4, VOCAB, (width,), generator=keyed_generator(seed, row))
        mask[row, max(widths) - width :] = 1
    return ids, mask.long()


SHARPER = 4
SHARP_LOGITS = SHARPER * LOGITS


def sharper(model):
    """With random weights nothing is certain, and no rule would ever reveal more than one token."""
    model.get_output_embeddings().weight.data.mul_(SHARPER)
    return model


def enlargement(settings):
    """By how much the guidance and the temperature of a recorded log-probability enlarge the rounding of logits."""
    drawn = settings.temperature if settings.record_as_sampled else 1.0
    return (1 + 2 * settings.cfg_scale) / min(drawn, 1.0)


def check_row(got, row, width, expected, enlarged=1.0):
    """Compares row `row` of a rollout with the reference; its prompt has `width` tokens without padding."""
    length, close = got.logps.shape[1], {"rtol": 0, "atol": rounding(SHARP_LOGITS) * enlarged}
    assert got.ids[row, -length - width :].tolist() == expected.ids
    assert got.reveal_steps[row].tolist() == expected.reveal_steps
    for found, wanted in ((got.logps, expected.logps), (got.entropies, expected.entropies)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found[row], torch.tensor(wanted), **close)
    assert (got.passes[row].item(), got.forward_tokens[row].item()) == (expected.passes, expected.tokens)
    if got.writes is not None:
        there = got.writes.steps[row] >= 0
        wanted = [write for position in expected.writes for write in position]
        assert there.sum(-1).tolist() == [len(position) for position in expected.writes]
        assert got.writes.steps[row][there].tolist() == [write[0] for write in wanted]
        assert got.writes.ids[row][there].tolist() == [write[1] for write in wanted]
        for field, name in enumerate(("logps", "entropies"), start=2):
            values = torch.tensor([write[field] for write in wanted])
            torch.testing.assert_close(getattr(got.writes, name)[row][there], values, **close)
        assert got.edits[row].item() == sum(len(position) - 1 for position in expected.writes if position)


def check_against_the_reference(model, case, **options):
    """Compares a padded batch with each row alone, and returns the rollout."""
    widths, settings, ends = case["widths"], case["settings"], case.get("ends")
    ids, mask = make_prompts(widths, case["seed"])
    generators = [keyed_generator(case["seed"], 9, row) for row in range(len(ids))]
    options |= {"mask_token_id": MASK, "generator": generators, "eos_token_ids": ends}
    with patch.object(head, "CHUNK_ELEMENTS", case.get("chunk", head.CHUNK_ELEMENTS)):
        got = rollout(model, ids, mask, settings, **options)
    assert got.reveal_steps.dtype == torch.long
    for row, width in enumerate(widths):
        twin = keyed_generator(case["seed"], 9, row)
        alone = sample(model, ids[row, ids.shape[1] - width :].tolist(), settings, twin, ends)
        check_row(got, row, width, alone, enlargement(settings))
        assert torch.equal(generators[row].get_state(), twin.get_state())  # and drew no further number
    return got
