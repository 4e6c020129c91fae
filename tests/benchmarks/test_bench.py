"""The benchmarks race what they say, count what they say, and their formulas hold where they can be measured."""

import argparse
import functools
import json
import os
import shlex
import subprocess

import pytest
import torch

from benchmarks import bench, gpu, published, results, steps
from benchmarks.machine import multiply_adds, peak_bytes, race
from benchmarks.random_models import MASK, ROOT, SIZES, our_scores, random_model, random_prompts, scoring_inputs, update
from benchmarks.results import as_markdown
from benchmarks.rl_steps import POCKET_PROMPT, group_size
from d1.models import head, load_tokenizer
from d1.models.head import body_and_head
from d1.rl.methods import METHODS
from d1.sampling import generate
from d1.sampling.reveal import reveal_schedule
from d1.tasks import load_task

SMALL = ["--rows", "2", "--prompt", "6", "--length", "8", "--block", "4", "--steps", "4", "--mu", "2", "--repeats", "1"]


def report(what, folder, *extra):
    bench.main(bench.make_parser().parse_args([what, "--size", "tiny", *SMALL, "--output_dir", str(folder), *extra]))
    assert (folder / f"{what}_tiny.md").read_text().count("\n| ") >= 3
    return json.loads((folder / f"{what}_tiny.json").read_text())


def test_a_race_alternates_its_order_and_takes_ratios_within_a_round():
    order = []
    results = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, base="a")
    assert order == ["a", "b", *"ab", *"ba", *"ab"]
    assert results["a"]["ratio"] == results["a"]["ratio_low"] == results["a"]["ratio_high"] == 1


def test_a_report_shows_ratios_with_the_ends_of_their_rounds():
    row = {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    results = {"a": row | {"wall_seconds": 2}, "b": {"ratio": 1.5, "ratio_low": 1.25, "ratio_high": 2.0}}
    report = {"machine": {"cores": 2}, "settings": {"size": "tiny"}, "results": results, "remarks": ["Words."]}
    assert as_markdown(report) == (
        "cores 2  \nsize tiny  \n\n|  | ratio | wall seconds |\n| --- | --- | --- |\n| a | 1.000 | 2 |\n"
        "| b | 1.500 (1.25 to 2) |  |\n\nWords.\n"
    )


def test_samplers_race_the_published_one_and_the_bare_transformer(tmp_path, capsys):
    written = report("sampler", tmp_path)
    assert set(written["results"]) == {"bare body", "exact", "published"}
    assert set(written["machine"]) >= {"processor", "cores", "threads", "PyTorch"}


def test_a_block_models_cache_races_what_recomputes_everything(tmp_path, capsys):
    results = report("blocks", tmp_path)["results"]
    # Blocks end at 8, 12 and 14 and take 1, 2 and 1 steps; the first step of a block also feeds the block before.
    tokens = {"recomputed": 4 * 14, "cached": 8 + (8 + 4) + 6}
    assert {name: row["tokens per row"] for name, row in results.items()} == tokens
    assert results["cached"]["tokens / recomputed"] == tokens["cached"] / tokens["recomputed"]
    assert results["cached"]["multiply-adds / recomputed"] < 1 == results["recomputed"]["ratio"]


@pytest.mark.parametrize(
    ("what", "flags", "message"),
    [
        *(
            (what, f"--{name} 0", f"--{name} must be at least 1")
            for what in bench.BENCHMARKS
            for name in ("rows", "mu")
        ),
        ("sampler", "--repeats 0", "--repeats must be at least 1"),
        ("scoring", "--prompt 0", "--prompt must be at least 1"),
        ("sampler", "--block 16", "longer than the canvas"),
        ("memory", "--block 16", "longer than the canvas"),
        ("gpu", "--steps 9", "between 2 and 8 steps"),
        ("rl", "--length 10", "multiple of --block"),
        ("rl", "--rows 1", "equal groups"),
        ("rl", "--rows 17", "equal groups"),
        ("methods", "--length 10", "multiple of --block"),
        ("methods", "--rows 17", "equal groups"),
        ("rl", "--size pocket", "prompts have 18 tokens"),
        ("sft", "--prompt 1", "a word on either side"),
        ("sft", "--compile", "sft would ignore it"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_a_model_is_built(what, flags, message, tmp_path, monkeypatch):
    monkeypatch.setitem(bench.BENCHMARKS, what, (None, bench.BENCHMARKS[what][1]))
    with pytest.raises(ValueError, match=message):
        report(what, tmp_path, *flags.split())


def test_settings_that_do_not_matter_are_not_asked_about():
    bench.check_race(bench.make_parser().parse_args(["scoring", "--length", "16"]))  # fewer than the default steps


@pytest.mark.parametrize("rows", [2, 4, 8, 12, 20, 64])
def test_groups_of_a_rollout_are_equal_and_of_about_eight(rows):
    assert rows % group_size(rows) == 0
    assert min(rows, 8) <= group_size(rows) <= 15


def test_the_pocket_models_prompts_have_the_length_that_is_asked_for():
    tokenizer, rows = load_tokenizer(str(ROOT / "pocket" / "base")), load_task("sudoku").load_rows("train")
    prompt = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=False)
    assert len(prompt) == POCKET_PROMPT


def test_the_exact_sampler_multiplies_for_hidden_positions_alone_after_the_last_keys_and_values():
    model = random_model("tiny", vocabulary := 100)
    _, hidden, feed_forward, layers, _ = SIZES["tiny"]
    ids, mask = random_prompts(model, rows := 2, prompt := 5)
    token = 4 * hidden**2 + 3 * hidden * feed_forward  # in one layer
    tokens = rows * (prompt + 6)
    with torch.no_grad():
        body, _ = body_and_head(model)
        assert multiply_adds(lambda: body(torch.cat([ids, ids[:, :1].expand(-1, 6)], 1))) == tokens * layers * token
    expected = 0
    for left in (3, 2, 1) * 2:
        expected += tokens * ((layers - 1) * token + 2 * hidden**2)
        expected += rows * left * (token + hidden * vocabulary)
    options = {"mask_token_id": MASK, "gen_length": 6, "block_length": 3, "steps": 6}
    assert multiply_adds(lambda: generate(model, ids, mask, **options)) == expected


def test_scoring_races_both_ways(tmp_path, capsys):
    found = report("scoring", tmp_path)["results"]
    assert {name.split(",")[0] for name in found} == {"published", "ours"}


def test_the_published_log_probs_are_ours():
    model = random_model("tiny")
    ids, mask = random_prompts(model, 2, 6)
    mask[0, :2] = 0
    completion, _ = random_prompts(model, 2, 5)
    noise = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        theirs = published.score(model, ids, mask, completion, noise, mask_token_id=MASK)
        torch.testing.assert_close(our_scores(model, ids, mask, completion, noise), theirs, rtol=0, atol=1e-5)


def test_peak_bytes_counts_temporaries_too():
    x = torch.zeros(1000)
    assert peak_bytes(lambda: (x + 1) + 1) == pytest.approx(8000, rel=0.05)
    assert peak_bytes(lambda: torch.zeros(8, 50_000).logsumexp(-1)) == pytest.approx(2 * 1_600_000, rel=0.05)


def test_memory_holds_the_logits_of_all_positions_or_of_a_chunk(tmp_path, capsys, monkeypatch):
    """Published: fp32 logits and probabilities of every position; those under all masks, twice for the completion's.
    Ours: the fp32 logits of a chunk of positions, and as much again."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2**16)  # 32 positions of scoring and 16 of sampling
    results = report("memory", tmp_path, "--rows", "4", "--prompt", "16", "--length", "32", "--block", "16")["results"]
    position, mu = 2048 * 4, 2  # bytes of a position's logits
    assert results["sampler"]["published"] == pytest.approx(2 * 4 * 48 * position, rel=0.15)
    assert results["scoring"]["published"] == pytest.approx(4 * mu * (48 + 2 * 32) * position, rel=0.15)
    assert results["sampler, drawing"]["ours"] == pytest.approx(2 * 16 * position, rel=0.15)
    assert results["scoring"]["ours"] == pytest.approx(2 * 32 * position, rel=0.45)


def test_the_gpu_race_covers_every_way_and_refuses_lladas_size_without_one(tmp_path, capsys):
    found = report("gpu", tmp_path)["results"]
    both = {"published", "ours"}
    tasks = {"rollout": {"published", "exact", *gpu.APPROXIMATE}, "scoring": both, "update": both}
    for mode in ("flash", "no flash"):
        for task, ways in tasks.items():
            rows = {way: found[f"{task}, {way}, {mode}"] for way in ways}
            assert rows["published"]["ratio"] == 1
            assert all(row["peak_gb"] > 0 and row["tokens_per_second"] > 0 for row in rows.values())
    assert len(found) == 2 * (5 + 2 + 2)
    if not torch.cuda.is_available():
        for what in ("gpu", "sampler", "scoring"):
            with pytest.raises(ValueError, match="no CUDA device"):
                bench.main(bench.make_parser().parse_args([what, "--size", "llada", "--output_dir", str(tmp_path)]))


@pytest.mark.parametrize("error", gpu.FAILURES)
def test_a_way_that_runs_out_of_memory_is_left_out_and_named(tmp_path, capsys, monkeypatch, error):
    def too_large(*args, **options):
        raise error("CUDA out of memory. Tried to allocate 8 GiB.\nMore.")

    monkeypatch.setattr(published, "score", too_large)
    written = report("gpu", tmp_path)
    assert "scoring, published, flash" not in written["results"]
    assert written["results"]["scoring, ours, flash"]["ratio"] == 1  # to itself: there is nothing else
    assert written["results"]["rollout, exact, flash"]["ratio"] != 1
    assert (
        f"- scoring, published, flash, stopped by {error.__name__}: CUDA out of memory. Tried to allocate 8 GiB."
        in (tmp_path / "gpu_tiny.md").read_text().split("\n")
    )


def test_an_updates_peak_holds_its_gradients_every_time():
    model = random_model("tiny")
    inputs = scoring_inputs(model, argparse.Namespace(rows=1, prompt=4, length=4, mu=1))
    score = functools.partial(published.score, mask_token_id=MASK)
    first, second = (peak_bytes(lambda: update(model, score, inputs)) for _ in range(2))
    assert second == pytest.approx(first, rel=0.02)
    assert second > sum(weight.numel() * 4 for weight in model.parameters())


@pytest.mark.slow
def test_the_compiled_race_compiles_every_way(tmp_path, capsys):
    written = report("gpu", tmp_path, "--compile")
    assert sum(name.endswith(", compiled") for name in written["results"]) == 5 + 2 + 2
    assert len(written["remarks"]) == 1


def test_methods_race_their_bare_passes_and_say_how_many_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "METHODS", {name: METHODS[name] for name in ("d1", "stable-drl")})
    found = report("methods", tmp_path)
    columns = ("updates", "forward passes per row", "backward passes per row")
    passes = {name: tuple(row[column] for column in columns) for name, row in found["results"].items()}
    # Sampling, old and reference log-probs, updates; sampling, old log-probs, weights of rows, updates twice computed.
    assert passes == {"d1": (2, 4 + 2 + 2 + 2, 2), "stable-drl": (2, 4 + 4 + 2 + 2 * 4, 4)}
    for row in found["results"].values():
        assert row["lowest"] <= row["bare share, %"] <= row["highest"]


TEXT = """Words.

```bash
python a.py --b \\
    1
```

<!-- a_1.md -->
old
<!-- end -->

```bash
python -m benchmarks.bench gpu
```

<!-- gpu.md -->
kept
<!-- end -->
"""


def test_results_replaces_a_commands_table_and_nothing_else(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks" / "RESULTS.md")
    monkeypatch.setattr(results, "run", ran.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "benchmark_results").mkdir()
    (tmp_path / "benchmark_results" / "a_1.md").write_text("| new |\n")
    results.RESULTS.parent.mkdir()
    results.RESULTS.write_text(TEXT)
    results.main(results.make_parser().parse_args([]))
    assert results.RESULTS.read_text() == TEXT.replace("old\n", "\n| new |\n\n")
    assert ran == ["python a.py --b \\\n    1"]
    with pytest.raises(ValueError, match=r"no command .* that can run here"):
        results.main(results.make_parser().parse_args(["--only", "benchmarks.bench gpu"]))


def test_a_command_that_fails_loses_neither_tables_nor_what_was_written_meanwhile(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks" / "RESULTS.md")
    second = TEXT.split("Words.\n")[1].replace("a.py --b \\\n    1", "b.py").replace("a_1", "b_1")
    results.RESULTS.parent.mkdir()
    results.RESULTS.write_text(TEXT + second)
    (tmp_path / "benchmark_results").mkdir()
    (tmp_path / "benchmark_results" / "a_1.md").write_text("| new |\n")

    def run(command):
        if command == "python b.py":
            raise subprocess.CalledProcessError(1, command)
        results.RESULTS.write_text(results.RESULTS.read_text().replace("Words.", "Other words."))

    monkeypatch.setattr(results, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        results.main(results.make_parser().parse_args([]))
    made = (TEXT + second).replace("Words.", "Other words.").replace("old\n", "\n| new |\n\n", 1)
    assert results.RESULTS.read_text() == made


def test_only_the_gpu_race_sees_a_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(results.subprocess, "run", lambda *args, env, **options: seen.append(env))
    results.run("python -m benchmarks.bench gpu --size llada")
    results.run("python -m benchmarks.bench sampler --size goal")
    assert seen[0].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert seen[1]["CUDA_VISIBLE_DEVICES"] == ""


def test_every_command_of_the_results_writes_the_table_below_it():
    text = results.RESULTS.read_text()
    found = list(results.COMMAND.finditer(text))
    assert len(found) == text.count("<!-- end -->") > 0
    for match in found:
        words = shlex.split(match["command"].replace("\\\n", " "))[1:]
        if words[:2] == ["-m", "benchmarks.bench"]:
            args = bench.make_parser().parse_args(words[2:])
            assert match["table"] == f"{args.what}_{args.size}.md"
            reveal_schedule(args.length, args.block, args.steps)
