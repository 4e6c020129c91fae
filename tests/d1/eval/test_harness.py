"""The model under lm-evaluation-harness: equal to eval.py and to direct scores, in any batch, on two processes."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from d1.eval import run as evaluation
from d1.eval.completions import read_prompts
from d1.eval.harness import (
    are_greedy,
    check_cache,
    generation_settings,
    llada_views,
    log_likelihoods,
    main,
    make_parser,
    pair_seed,
    register,
)
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer, prepare
from d1.models.tokenizer import encode_prompt
from d1.tasks import load_task
from tests import forks
from tests.commands import ROOT
from tests.d1.diffusion_gemma import needs_class
from tests.faults import edit_json

EVAL = ROOT / "eval"
CANVAS = {"gen_length": 12, "block_length": 4}


@pytest.fixture(scope="session")
def harness() -> Any:
    """The installed package, with "d1" registered."""
    found = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[harness]'")
    register()
    return found


@pytest.fixture
def start(harness, tiny_model_dir) -> Any:
    """start(batch_size=4, **settings) makes the model as the harness does."""
    return lambda **settings: register()(**{"model_path": str(tiny_model_dir), "batch_size": 4} | settings)


def requests(kind: str, *arguments: tuple) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def generating(texts: list[str], **kwargs: Any) -> list[Any]:
    return requests("generate_until", *((text, {"until": [], "do_sample": False, **kwargs}) for text in texts))


# ---- completions


SAMPLERS = {
    "exact": {},
    "parallel": {"sampler": "parallel", "reveal_level": 0.2},
    "cached": {"sampler": "cached"},
    "cached+parallel": {"sampler": "cached+parallel", "kv_cache": "prefix", "reveal": "factor", "reveal_level": 0.5},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_completions_are_those_of_eval_py_with_every_sampler(start, tiny_model_dir, tmp_path, capsys, name):
    flags = ["--model_path", str(tiny_model_dir), "--dataset", "sudoku", "--limit", "7", "--output_dir", str(tmp_path)]
    settings = {**CANVAS, **SAMPLERS[name]}
    flags += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    args = evaluation.make_parser().parse_args(flags)
    texts = [prompt.text for prompt in read_prompts(args, load_task("sudoku"), load_tokenizer(str(tiny_model_dir)))]
    evaluation.main(args)
    file = json.loads(next(tmp_path.glob("*_generations.json")).read_text())
    assert start(**settings).generate_until(generating(texts)) == [item["text"] for item in file["generations"]]


def test_stop_strings_and_a_tasks_own_length_and_temperature_shape_a_completion(start):
    texts = ["<bos>a b c", "<bos>1 2", "<bos>"]
    model = start(**CANVAS)
    whole = model.generate_until(generating(texts))
    stop = whole[0].split()[1]
    assert model.generate_until(generating(texts, until=[stop])) == [text.partition(stop)[0] for text in whole]
    model = start(block_length=4)
    assert model.generate_until(generating(texts, max_gen_toks=12)) == whole
    assert model.generate_until(generating(texts, max_gen_toks=8)) != whole
    hot = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    twice = model.generate_until(generating(texts[:1] * 2, **hot))
    assert twice[0] != twice[1] != whole[0]  # the samples of one request
    assert start(block_length=4, batch_size=1).generate_until(generating([texts[1], texts[0]], **hot))[1] == twice[0]


def test_what_a_task_asks_for_is_read_and_what_there_is_not_is_refused(harness):
    assert generation_settings({"until": "x", "max_gen_toks": 9}) == (9, 0.0, ("x",))
    assert generation_settings({"until": [], "do_sample": False, "temperature": 0.7, "top_p": 0.9}) == (256, 0.0, ())
    assert generation_settings({"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": None}) == (256, 0.7, ())
    for unknown in ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"num_beams": 4}, {"stop_tokens": [1]}):
        with pytest.raises(ValueError, match=f"{[*unknown][-1]}.*not supported"):
            generation_settings(unknown)


# ---- log-likelihoods


CHOICES = [("a b", " c"), ("a b", " c d e f"), ("1 + 1 =", " 2"), ("", "x y"), ("1 + 1 =", " 3 4"), ("q", " r s t")]


def test_log_likelihoods_are_those_of_the_ids_whatever_the_batch(start, tiny_model_dir):
    model, tokenizer = load_model(str(tiny_model_dir)), load_tokenizer(str(tiny_model_dir))
    special = {"mask_token_id": tokenizer.mask_token_id, "pad_token_id": tokenizer.pad_token_id}
    pairs = [(encode_prompt(tokenizer, a) or [tokenizer.bos_token_id], encode_prompt(tokenizer, b)) for a, b in CHOICES]
    direct = dict(log_likelihoods(model, pairs, **special, draws=16, seed=5))
    for batch_size in (1, 3, 64):
        lm = start(batch_size=batch_size, mc_num=16, draw_seed=5)
        found = lm.loglikelihood(requests("loglikelihood", *CHOICES[::-1]))[::-1]
        assert [value for value, _ in found] == pytest.approx([direct[i] for i in range(len(CHOICES))], abs=2e-5)
    with pytest.raises(NotImplementedError, match="perplexities are not supported"):
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("x y",)))


def test_an_answer_is_greedy_where_a_canvas_of_its_length_gives_it(start):
    lm = start(block_length=3, gen_length=3, diffusion_steps=3)
    (text,) = lm.generate_until(generating(["a b c"]))
    answers = [("a b c", " " + text), ("a b c", " ? ? ?")]
    assert len(encode_prompt(lm.tokenizer, text)) == 3  # no end token in it
    assert [greedy for _, greedy in lm.loglikelihood(requests("loglikelihood", *answers))] == [True, False]


@pytest.mark.parametrize(
    ("settings", "request_", "message"),
    [
        ({"cfg_scale": 1.0}, ("a", " b"), "have no guidance"),
        ({}, ("a " * 600, " b"), "have 601 tokens, the model reads 512"),
        ({"model_path": "blocks"}, ("a", " b"), "not for blocks of 4"),
    ],
)
def test_log_likelihoods_that_cannot_be_had_are_refused(start, tiny_block_dir, settings, request_, message):
    if settings.get("model_path"):
        settings = {"model_path": str(tiny_block_dir)}
    with pytest.raises(ValueError, match=message):
        start(**settings).loglikelihood(requests("loglikelihood", request_))


# ---- whole runs


WORDS = ["mask", "noise", "block", "step", "token", "prompt", "reward", "group", "sample", "policy"]


@pytest.fixture
def tasks(tmp_path) -> Path:
    """A folder with two tasks on local rows: one generates, one compares four answers."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"word": word, "choices": [f" {a}" for a in (word[::-1], word, word[0], word[:2])]} for word in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    source += 'doc_to_text: "Backwards: {{word}} ="\n'
    metric = "metric_list: [{metric: %s, aggregation: mean, higher_is_better: true}]\n"
    (folder / "words_gen.yaml").write_text(
        f'task: words_gen\noutput_type: generate_until\ndoc_to_target: "{{{{word}}}}"\n{source}'
        "generation_kwargs: {until: ['?'], do_sample: false, max_gen_toks: 12}\n" + metric % "exact_match"
    )
    (folder / "words_choice.yaml").write_text(
        f"task: words_choice\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: 0\n{source}"
        + metric % "acc"
    )
    return folder


def evaluate(harness: Any, folder: Path, model: Path, **options: Any) -> dict[str, dict[int, Any]]:
    """task -> document -> what the model answered, of `lm_eval.simple_evaluate` in this process."""
    from lm_eval.tasks import TaskManager

    results = harness.simple_evaluate(
        model="d1",
        model_args={"model_path": str(model), "block_length": 4, "mc_num": 8} | options.pop("model_args", {}),
        tasks=["words_gen", "words_choice"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
        **options,
    )
    return {name: {one["doc_id"]: one["resps"] for one in samples} for name, samples in results["samples"].items()}


def test_a_run_that_was_cut_short_continues_from_the_harness_cache(harness, tasks, tiny_model_dir, tmp_path):
    cache = str(tmp_path / "cache")
    first = evaluate(harness, tasks, tiny_model_dir, limit=4, use_cache=cache)
    other = {"draw_seed": 1, "gen_length": 8}  # settings that give other answers
    resumed = evaluate(harness, tasks, tiny_model_dir, use_cache=cache, model_args=other)
    anew = evaluate(harness, tasks, tiny_model_dir, model_args=other)
    for name in ("words_gen", "words_choice"):
        assert {key: resumed[name][key] for key in first[name]} == first[name]
        assert all(resumed[name][key] != anew[name][key] for key in range(4))
    for key in range(4, 10):
        assert resumed["words_gen"][key] == anew["words_gen"][key]
        # The rest is scored in different batches, which round differently on some processors.
        scores = [[answers[0][0] for answers in run["words_choice"][key]] for run in (resumed, anew)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_answers_before_a_failure_are_in_the_cache(start, tmp_path):
    from lm_eval.api.model import CachingLM

    lm = start(**CANVAS)
    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    good, bad = generating(["<bos>a", "<bos>b"]), generating(["<bos>c"], num_beams=3)
    long = generating(["<bos>" + "a " * 600], do_sample=True, temperature=1.0)
    with pytest.raises(ValueError, match="exceed the model's 512 positions"):
        cached.generate_until([*good, *long])
    assert len(cached.dbdict) == 2
    assert cached.generate_until(good) == lm.generate_until(good)
    with pytest.raises(ValueError, match="num_beams"):
        cached.generate_until(bad)


def test_two_processes_answer_as_one_does(harness, tasks, tiny_model_dir, tmp_path):
    words = ["harness.py", "--model_path", str(tiny_model_dir), "--tasks", "words_gen,words_choice"]
    words += ["--include_path", str(tasks), "--block_length", "4", "--mc_num", "8", "--batch_size", "3", "--limit", "7"]
    words += ["--output_path", str(tmp_path / "out"), "--log_samples", "--use_cache", str(tmp_path / "cache")]
    log, options = tmp_path / "log", {"processes": 2, "ACCELERATE_USE_CPU": "true"}
    forks.finish(forks.start(forks.script, *words, log=log, folder=EVAL, **options), log)
    assert {path.name for path in tmp_path.glob("cache*")} == {
        *("cache_rank0.db", "cache_rank1.db", "cache_identity.json")
    }
    alone = evaluate(harness, tasks, tiny_model_dir, limit=7)
    for name, expected in alone.items():
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        found = {one["doc_id"]: one["resps"] for one in map(json.loads, file.read_text().splitlines())}
        assert found.keys() == expected.keys() == set(range(7))
        if name == "words_gen":
            assert {key: resps[0][0] for key, resps in found.items()} == {key: r[0][0] for key, r in expected.items()}
        else:
            for key, resps in found.items():
                values = [float(first[0]) for first, *_ in resps]  # the harness fills up the shorter share with repeats
                assert values == pytest.approx([value for ((value, _),) in expected[key]], abs=2e-5)


# ---- the command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv_cache", "dual"), "choose a cached one"),
        (("--mc_num", "0"), "--mc_num 0"),
        (("--block_length", "8"), "block_length must be 4, not 8"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_loaded(tiny_block_dir, flags, message):
    with pytest.raises(ValueError, match=message):
        main(make_parser().parse_args(["--model_path", str(tiny_block_dir), "--tasks", "x", *flags]))


@pytest.fixture
def without_evaluation(harness, monkeypatch) -> None:
    """`main` ends where the harness's own command would begin; its words are in `sys.argv`."""
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: None)
    monkeypatch.setattr(sys, "argv", ["harness.py"])


@needs_class
def test_a_temperature_that_only_the_task_knows_is_not_missed(without_evaluation, tiny_canvas_dir):
    settings = ["--model_path", str(tiny_canvas_dir), "--sampler", "parallel", "--reveal", "entropy", "--tasks", "x"]
    main(make_parser().parse_args(settings))
    assert '"reveal": "entropy"' in " ".join(sys.argv)


def test_steps_are_not_compared_with_a_length_that_only_the_task_knows(without_evaluation, tiny_model_dir):
    """6 steps fit a task of 12 tokens in blocks of 4."""
    settings = ["--model_path", str(tiny_model_dir), "--block_length", "4", "--diffusion_steps", "6", "--tasks", "x"]
    main(make_parser().parse_args(settings))
    assert '"diffusion_steps": 6' in " ".join(sys.argv)
    with pytest.raises(ValueError, match="64 tokens in 16 blocks need between 16 and 64 steps, got 6"):
        main(make_parser().parse_args([*settings, "--gen_length", "64"]))


def test_a_cache_of_another_model_or_settings_is_refused(tiny_model_dir, tmp_path):
    model, cache = shutil.copytree(tiny_model_dir, tmp_path / "m"), tmp_path / "caches" / "own"
    args = make_parser().parse_args(["--model_path", str(model), "--use_cache", str(cache), "--limit", "3"])
    own = {name: value for name, value in vars(args).items() if name != "harness"}
    for harness in args.harness, [f"--use_cache={cache}"]:
        check_cache(harness, own)
        assert [path.name for path in cache.parent.iterdir()] == ["own_identity.json"]
        check_cache(harness, own)
        with pytest.raises(ValueError, match=rf"--use_cache {cache} has answers of mc_num 128 \(now 7\): choose"):
            check_cache(harness, own | {"mc_num": 7})
        with pytest.raises(ValueError, match=r"has answers of compile none \(now layers\)"):
            check_cache(harness, own | {"compile": "layers"})
    config = (model / "config.json").read_text()
    edit_json(model / "config.json", rms_norm_eps=0.5)
    with pytest.raises(ValueError, match=r"has answers of contents of model_path \{.* \(now \{.*: choose another PATH"):
        check_cache(args.harness, own)
    (model / "config.json").write_text(config)
    check_cache(args.harness, own)
    check_cache(["--limit", "3"], own | {"mc_num": 7})  # without a cache


# ---- the bound and the greedy check by themselves: all masks, a plain loop over the same draws, one token at a time

MASK, PAD = 4, 0
IDS = {"mask_token_id": MASK, "pad_token_id": PAD}
PAIRS = [([1, 2, 3], [1, 3, 2, 1]), ([3], [2]), ([1, 1], [3, 3]), ([2, 3, 1, 1], [1, 2, 3]), ([2], [1, 1, 3, 2])]


@pytest.fixture(scope="module")
def five_tokens() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32, initializer_range=0.7)
    return prepare(LlamaForCausalLM(config)).double().eval()


@torch.no_grad()
def hidden_logps(model: Any, pair: tuple[list[int], list[int]], hidden: Any) -> float:
    """The sum of log p of the hidden tokens of an answer, in one forward pass over the sequence alone."""
    prompt, answer = pair
    ids = torch.tensor([prompt + [MASK if k in hidden else token for k, token in enumerate(answer)]])
    logps = model(input_ids=ids).logits[0, len(prompt) :].log_softmax(-1)
    return sum(float(logps[k, answer[k]]) for k in hidden)


def bound(model: Any, pair: tuple[list[int], list[int]]) -> float:
    """LLaDA's bound, over every set of hidden tokens."""
    length = len(pair[1])
    sets = [some for size in range(1, length + 1) for some in combinations(range(length), size)]
    return sum(hidden_logps(model, pair, some) / (len(some) * comb(length, len(some))) for some in sets)


def test_estimates_approach_the_bound_over_every_mask_and_are_exact_for_one_token(five_tokens):
    found = dict(log_likelihoods(five_tokens, PAIRS, **IDS, draws=40_000, batch_size=3))
    expected = [bound(five_tokens, pair) for pair in PAIRS]
    assert [found[i] for i in range(len(PAIRS))] == pytest.approx(expected, rel=5e-3)
    one = dict(log_likelihoods(five_tokens, PAIRS[1:2], **IDS, draws=3))
    assert one[0] == pytest.approx(hidden_logps(five_tokens, PAIRS[1], (0,)), abs=2e-7)


def test_an_estimate_is_the_weighted_sum_over_its_own_draws_whatever_its_batch(five_tokens):
    def direct(pair: tuple[list[int], list[int]]) -> float:
        views = llada_views(len(pair[1]), 6, keyed_generator(7, pair_seed(pair)))
        total = 0.0
        for noise, weights in zip(views.noise[0], views.weights[0], strict=True):
            assert not weights[~noise].any()
            (weight,) = {*weights[noise].tolist()}  # all hidden tokens of a mask have the same weight
            total += weight * hidden_logps(five_tokens, pair, noise.nonzero().flatten().tolist())
        return total

    expected = [direct(pair) for pair in PAIRS]
    for batch_size in (1, 2, 32):
        for order in (PAIRS, PAIRS[::-1]):
            found = dict(log_likelihoods(five_tokens, order, **IDS, draws=6, seed=7, batch_size=batch_size))
            assert [found[order.index(pair)] for pair in PAIRS] == pytest.approx(expected, rel=1e-6)
    assert dict(log_likelihoods(five_tokens, PAIRS, **IDS, draws=6, seed=8))[0] != pytest.approx(expected[0], rel=1e-3)


def test_the_counts_of_llada_are_spread_evenly_and_weigh_l_over_the_count():
    generator = keyed_generator(3)
    views = llada_views(5, 10, generator)
    counts = views.noise[0].sum(-1)
    shares = {int(count): float(views.weights[0][counts == count].sum() / count) for count in counts.unique()}
    assert shares == pytest.approx({count: 2 / 10 * 5 / count for count in range(1, 6)})  # two of ten draws each


@torch.no_grad()
def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """Reveals the most probable token of all hidden positions, one at a time."""
    answer: Tensor = torch.full((length,), MASK)
    while (answer == MASK).any():
        logps = (
            model(input_ids=torch.cat([torch.tensor(prompt), answer])[None]).logits[0, len(prompt) :].log_softmax(-1)
        )
        logps[:, MASK] = -torch.inf
        logps[answer != MASK] = -torch.inf
        position, token = divmod(int(logps.argmax()), logps.shape[1])
        answer[position] = token
    return answer.tolist()


def test_an_answer_is_greedy_where_the_surest_token_first_gives_it(five_tokens):
    own = [(prompt, greedy(five_tokens, prompt, len(answer))) for prompt, answer in PAIRS]
    changed = [(prompt, [*answer[:-1], (answer[-1] + 1) % 4]) for prompt, answer in own]
    pairs = [*own, *changed, ([1], [])]  # an empty answer has no entry
    for batch_size in (1, 4):
        found = dict(are_greedy(five_tokens, pairs, **IDS, batch_size=batch_size))
        assert found == dict(enumerate([True] * 5 + [False] * 5))
    assert not [*log_likelihoods(five_tokens, [([1], [])], **IDS, draws=2)]
