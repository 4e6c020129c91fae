"""The benchmarks compare and count what they claim, and their formulas agree with measurements."""

from pathlib import Path

import pytest
import torch

from benchmarks import bench, published
from benchmarks.bench import MASK, SIZES, our_scores, random_model, random_prompts
from benchmarks.machine import multiply_adds, peak_bytes, race
from d1.models import head
from d1.models.head import backbone_and_head
from d1.sampling import generate
from d1.sampling.reveal import reveal_schedule

SMALL = ["--rows", "2", "--prompt", "6", "--length", "8", "--block", "4", "--steps", "4", "--mu", "2", "--repeats", "1"]


def results_of(what, *extra):
    """A benchmark's rows at the tiny size."""
    return bench.BENCHMARKS[what](bench.make_parser().parse_args([what, "--size", "tiny", *SMALL, *extra]))


def test_a_race_alternates_its_order_and_takes_ratios_within_a_round():
    order = []
    results = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, base="a")
    assert order == ["a", "b", *"ab", *"ba", *"ab"]
    assert results["a"]["ratio"] == results["a"]["ratio_low"] == results["a"]["ratio_high"] == 1


def test_a_block_models_cache_races_what_recomputes_everything():
    results = results_of("blocks")
    # Blocks end at 8, 12 and 14 and take 1, 2 and 1 steps; the first step of a block also computes the previous block.
    tokens = {"recomputed": 4 * 14, "cached": 8 + (8 + 4) + 6}
    assert {name: row["tokens per row"] for name, row in results.items()} == tokens
    assert results["cached"]["tokens / recomputed"] == tokens["cached"] / tokens["recomputed"]
    assert results["cached"]["multiply-adds / recomputed"] < 1 == results["recomputed"]["ratio"]


def test_the_exact_sampler_multiplies_for_hidden_positions_alone_after_the_last_keys_and_values():
    model = random_model("tiny")
    vocabulary, hidden, feed_forward, layers, _ = SIZES["tiny"]
    ids, mask = random_prompts(model, rows := 2, prompt := 5)
    token = 4 * hidden**2 + 3 * hidden * feed_forward  # in one layer
    tokens = rows * (prompt + 6)
    with torch.no_grad():
        backbone, _ = backbone_and_head(model)
        assert multiply_adds(lambda: backbone(torch.cat([ids, ids[:, :1].expand(-1, 6)], 1))) == tokens * layers * token
    expected = 0
    for left in (3, 2, 1) * 2:
        expected += tokens * ((layers - 1) * token + 2 * hidden**2)
        expected += rows * left * (token + hidden * vocabulary)
    options = {"mask_token_id": MASK, "gen_length": 6, "block_length": 3, "steps": 6}
    assert multiply_adds(lambda: generate(model, ids, mask, **options)) == expected


def test_the_published_log_probs_are_ours():
    model = random_model("tiny")
    ids, mask = random_prompts(model, 2, 6)
    mask[0, :2] = 0
    completion, _ = random_prompts(model, 2, 5)
    noise = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        theirs, ours = (score(model, ids, mask, completion, noise, MASK) for score in (published.score, our_scores))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_peak_bytes_counts_temporaries_too():
    x = torch.zeros(1000)
    assert peak_bytes(lambda: (x + 1) + 1) == pytest.approx(8000, rel=0.05)
    assert peak_bytes(lambda: torch.zeros(8, 50_000).logsumexp(-1)) == pytest.approx(2 * 1_600_000, rel=0.05)


def test_memory_holds_the_logits_of_all_positions_or_of_a_chunk(monkeypatch):
    """Published: fp32 logits and probabilities of every position, with all masks, and twice for the completion's
    positions. Ours: the fp32 logits of a chunk of positions, and the same amount again."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2**16)  # 32 positions of scoring and 16 of sampling
    results = results_of("memory", "--rows", "4", "--prompt", "16", "--length", "32", "--block", "16")
    position, mu = 2048 * 4, 2  # bytes of a position's logits
    assert results["sampler"]["published"] == pytest.approx(2 * 4 * 48 * position, rel=0.15)
    assert results["scoring"]["published"] == pytest.approx(4 * mu * (48 + 2 * 32) * position, rel=0.15)
    assert results["sampler, drawing"]["ours"] == pytest.approx(2 * 16 * position, rel=0.15)
    assert results["scoring"]["ours"] == pytest.approx(2 * 32 * position, rel=0.45)


def test_all_runs_the_commands_of_the_results_page(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        bench, "BENCHMARKS", dict.fromkeys(bench.BENCHMARKS, lambda args: ran.append(args) or {"a": {}})
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench.main(bench.make_parser().parse_args(["all"]))
    assert {args.what for args in ran} == {*bench.BENCHMARKS}
    assert all(args.size != "llada" for args in ran)  # which needs a GPU
    for args in ran:
        reveal_schedule(args.length, args.block, args.steps)
    text = (Path(bench.__file__).parent / "RESULTS.md").read_text()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m")]
    assert len(printed) == len(ran) == text.count("\npython -m benchmarks.bench ") - text.count("--size llada ")
