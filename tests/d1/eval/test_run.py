"""eval.py and `d1.eval.evaluate` on a tiny model: prompts, settings, files, resuming, refusals."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import d1.eval
from d1.eval import completions, scores
from d1.eval import run as evaluation
from d1.eval.completions import Journal, Prompt, read_prompts, setup_name
from d1.eval.files import read_setups
from d1.eval.scores import score_setup
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.folder import ModelFolder
from d1.models.head import NotFiniteError
from d1.sampling import Rollout, graphs, rollout
from d1.sandbox import SandboxError
from d1.tasks import load_task, under_protocol
from tests import forks
from tests.faults import edit_json, flip_bit, with_nan

LENGTHS = ("--gen_length", "12", "--block_length", "4", "--batch_size", "3")


def evaluate(model: Path, output_dir: Path, *flags: str, task: str = "sudoku") -> dict[str, Any]:
    """Runs eval.py's main and returns the generation file it leaves."""
    arguments = ["--model_path", str(model), "--dataset", task, "--output_dir", str(output_dir), *LENGTHS, *flags]
    args = evaluation.make_parser().parse_args(arguments)
    evaluation.main(args)
    (run,) = evaluation.runs_of(args)
    return json.loads((output_dir / f"{setup_name(run)}_0_generations.json").read_text())


def texts(results: dict[str, Any]) -> list[tuple[int, str]]:
    return [(item["index"], item["generations"]) for item in results["generations"]]


def alone(folder: Path, item: dict[str, Any], **settings: Any) -> tuple[Rollout, str]:
    """An item's prompt in a batch of its own, under its random numbers: the rollout and the text of the completion."""
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    ids = torch.tensor([tokenizer(item["prompt_input"], add_special_tokens=False).input_ids])
    how = {"gen_length": 12, "block_length": 4, "steps": 6, "mask_token_id": tokenizer.mask_token_id} | settings
    own = [keyed_generator(0, item["index"], 0)]
    found = rollout(model, ids, torch.ones_like(ids), generator=own, **how)
    return found, tokenizer.decode(found.ids[0, ids.shape[1] :])


def prompts(model: Path, *flags: str, task: str = "sudoku") -> list[Prompt]:
    args = evaluation.make_parser().parse_args(["--model_path", str(model), "--dataset", task, *flags])
    return read_prompts(args, under_protocol(load_task(task), args.prompt_protocol), load_tokenizer(str(model)))


# ---- the file


def test_a_file_holds_what_the_model_said_and_the_record_what_the_run_was(tiny_model_dir, tmp_path, capsys):
    started = time.perf_counter()
    results = evaluate(tiny_model_dir, tmp_path, "--limit", "5", "--seed", "7")
    assert 0 < results["metrics"]["wall_time"] < time.perf_counter() - started
    assert results["checkpoint_path"] == ""
    assert (results["gen_length"], results["diffusion_steps"], results["block_length"]) == (12, 6, 4)
    assert results["metrics"]["total_processed"] == results["expected_problems"] == len(results["generations"]) == 5
    assert results["metrics"]["wall_time"] == pytest.approx(sum(item["seconds"] for item in results["generations"]))
    tokenizer, rows = load_tokenizer(str(tiny_model_dir)), load_task("sudoku").load_rows("test")
    for item in results["generations"]:
        row = rows[item["index"]]
        assert (item["question"], item["ground_truth"]) == (row["question"], row["ground_truth"])
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert tokenizer(item["prompt_input"], add_special_tokens=False).input_ids == ids
        found, text = alone(tiny_model_dir, item)
        assert item["generations"] == text
        own = found.ids[0, len(ids) :].tolist()
        ends = [i for i, token in enumerate(own) if token in (tokenizer.eos_token_id, tokenizer.pad_token_id)]
        assert item["tokens"] == (ends[0] if ends else 12)
        assert item["text"] == tokenizer.decode(own[: item["tokens"]], skip_special_tokens=True)
        assert item["forward_passes"] == 6
    assert "sudoku_tiny_model0_12_6" in capsys.readouterr().out
    record = json.loads(next(tmp_path.glob("*_record.json")).read_text())
    assert (record["model_path"], record["checkpoint_path"], record["processes"]) == (str(tiny_model_dir), "", 1)
    assert (record["settings"]["diffusion_steps"], record["settings"]["seed"], record["identity"]["seed"]) == (6, 7, 7)
    assert record["identity"]["dtype"] == "torch.float32"
    assert record["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert {"python", "gpus", "cpu"} <= set(record)


def test_compiled_passes_are_the_same_and_recorded(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "CompiledLayers", partial(graphs.CompiledLayers, "eager"))
    plain = evaluate(tiny_model_dir, tmp_path / "plain", "--limit", "3")
    found = evaluate(tiny_model_dir, tmp_path / "layers", "--limit", "3", "--compile", "layers")
    assert texts(found) == texts(plain)
    records = [json.loads(next((tmp_path / name).glob("*_record.json")).read_text()) for name in ("plain", "layers")]
    assert [record["settings"]["compile"] for record in records] == ["none", "layers"]
    assert [record["identity"].get("compile") for record in records] == [None, "layers"]
    with pytest.raises(ValueError, match="--compile graphs needs a GPU"):
        evaluate(tiny_model_dir, tmp_path / "graphs", "--compile", "graphs")


def test_an_end_of_text_ends_text_and_count(tiny_model_dir, tmp_path):
    """If the model says end of text in place of a common token, later tokens are neither counted nor in the text."""
    model, tokenizer = load_model(str(tiny_model_dir)), load_tokenizer(str(tiny_model_dir))
    said = evaluate(tiny_model_dir, tmp_path, "--limit", "8")["generations"][0]["generations"]
    swapped = torch.tensor([tokenizer.eos_token_id, tokenizer(said, add_special_tokens=False).input_ids[4]])
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[swapped] = head[swapped.flip(0)].clone()
    model.save_pretrained(tmp_path / "ends")
    tokenizer.save_pretrained(tmp_path / "ends")
    items = evaluate(tmp_path / "ends", tmp_path, "--limit", "8")["generations"]
    assert any(item["tokens"] < 12 for item in items)
    for item in items:
        before, _, after = item["generations"].partition("<eos>")
        assert item["text"].split() == before.split()
        assert item["tokens"] == len(before.split())
        assert (item["tokens"] == 12) == (not after and "<eos>" not in item["generations"])
    stopped = evaluate(tmp_path / "ends", tmp_path / "stopped", "--limit", "8", "--eos_stop")["generations"]
    for item, whole in zip(stopped, items, strict=True):
        assert (item["text"], item["tokens"]) == (whole["text"], whole["tokens"])
        blocks = min(item["tokens"] // 4 + 1, 3)  # two steps each
        assert (item["forward_passes"], whole["forward_passes"]) == (2 * blocks, 6)


# ---- settings


def test_sampling_is_seeded_by_problem_whatever_the_batch(tiny_model_dir, tmp_path):
    file = tmp_path / "countdown.jsonl"  # numbers of many lengths: rows of a batch are padded differently
    numbers = [[3, 4, 5], [30, 4, 5], [30, 40, 5], [30, 40, 50], [300, 4, 5], [9, 9, 9], [1, 2, 3]]
    file.write_text("".join(json.dumps({"input": ",".join(map(str, n)), "output": "7"}) + "\n" for n in numbers))
    flags = ("--data_file", str(file), "--temperature", "1.0", "--batch_size")
    results = [evaluate(tiny_model_dir, tmp_path / size, *flags, size, task="countdown") for size in "147"]
    assert texts(results[0]) == texts(results[1]) == texts(results[2])
    items = results[0]["generations"]
    assert len({len(item["prompt_input"]) for item in items}) > 1
    assert [item["index"] for item in items] == list(range(7))
    assert [item["generations"] for item in items] == [
        alone(tiny_model_dir, item, temperature=1.0)[1] for item in items
    ]
    reseeded = evaluate(tiny_model_dir, tmp_path / "seed", *flags, "4", "--seed", "1", task="countdown")
    assert texts(reseeded) != texts(results[0])


def test_sampler_settings_reach_the_sampler(tiny_model_dir, tmp_path):
    plain = evaluate(tiny_model_dir, tmp_path / "plain", "--limit", "6")
    for flags in (("--cfg_scale", "2.0"), ("--remasking", "random"), ("--diffusion_steps", "12")):
        changed = evaluate(tiny_model_dir, tmp_path / flags[0], "--limit", "6", *flags)
        assert texts(plain) != texts(changed)
        assert changed["generations"][0]["forward_passes"] == changed["diffusion_steps"]


def test_limit_draws_the_same_problems_from_the_whole_split(tiny_model_dir):
    few, many = (prompts(tiny_model_dir, "--limit", count) for count in ("20", "100000"))
    again = prompts(tiny_model_dir, "--limit", "20", "--seed", "5")
    assert [p.index for p in few] == [p.index for p in again] == sorted({p.index for p in few})
    assert len(few) == 20
    assert few[-1].index > 100
    assert [p.index for p in many] == list(range(len(many)))
    assert all(many[p.index] == p for p in few)


def test_a_prefill_ends_the_prompt_and_a_box_is_asked_for_unless_told_otherwise(tiny_model_dir):
    plain, filled = (prompts(tiny_model_dir, "--limit", "2", *flag) for flag in ((), ("--add_reasoning",)))
    tag = load_tokenizer(str(tiny_model_dir)).convert_tokens_to_ids("<reasoning>")
    for before, after in zip(plain, filled, strict=True):
        assert (after.text, after.ids) == (before.text + "<reasoning>", [*before.ids, tag])
    boxed, plain = (
        prompts(tiny_model_dir, "--limit", "3", *flag, task="countdown") for flag in ((), ("--dont_use_box",))
    )
    for before, after in zip(boxed, plain, strict=True):
        assert before.text.replace(r" as \boxed{expression}", "") == after.text != before.text
        assert "boxed" not in after.text


def test_a_box_that_the_prompts_of_a_task_file_ask_for_in_other_words_is_named(tiny_model_dir, tmp_path):
    task = tmp_path / "my_task.py"
    task.write_text(
        "from datasets import Dataset\nfrom d1.tasks.gsm8k import REWARDS, extract, score\n\n"
        "def load_rows(split, data_file=None):\n"
        "    prompt = [{'role': 'user', 'content': r'Give \\boxed{number}. What is 2 + 2?'}]\n"
        "    return Dataset.from_list([{'prompt': prompt, 'question': '?', 'ground_truth': 4.0}])\n"
    )
    assert "boxed" in prompts(tiny_model_dir, task=str(task))[0].text
    with pytest.raises(ValueError, match=r"--dont_use_box: the prompts of .*my_task\.py ask for a box in other words"):
        prompts(tiny_model_dir, "--dont_use_box", task=str(task))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("'question': '?'", "my_task.py: its load_rows gives no column ground_truth"),
        ("'question': '?', 'ground_truth': None", r"problem 0 \(from 0\) has no ground_truth"),
        ("'question': 5, 'ground_truth': 1", r"problem 0 \(from 0\): its question must be text, got 5"),
        ("'question': '?', 'ground_truth': date(2024, 5, 1)", "its ground_truth must be a JSON value, got datetime"),
        ("'prompt': 'Is 1?', 'question': '?', 'ground_truth': 1", "its prompt must be chat messages, .* got 'Is 1"),
        ("'prompt': [], 'question': '?', 'ground_truth': 1", r"its prompt must be chat messages, .* got \[\]"),
    ],
)
def test_a_row_that_no_file_can_hold_is_named_before_anything_is_sampled(tiny_model_dir, tmp_path, row, message):
    task = tmp_path / "my_task.py"
    task.write_text(
        "from datetime import date\nfrom datasets import Dataset\nfrom d1.tasks.gsm8k import REWARDS, extract, score\n"
        "def load_rows(split, data_file=None):\n"
        f"    return Dataset.from_list([{{'prompt': [{{'role': 'user', 'content': 'is 1'}}], {row}}}])\n"
    )
    with pytest.raises(ValueError, match=message):
        prompts(tiny_model_dir, task=str(task))


def test_a_task_file_with_the_name_of_a_built_in_task_is_refused(tiny_model_dir, tmp_path):
    """Its completions would be scored by the built-in task, once the file is forgotten."""
    task = tmp_path / "gsm8k.py"
    task.write_text("from d1.tasks.gsm8k import REWARDS, extract, load_rows, score\n")
    message = r"gsm8k\.py: gsm8k is the name of a task of this library; rename the file"
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_model_dir, tmp_path / "out", task=str(task))
    with pytest.raises(ValueError, match=message):
        scores.user_tasks("math", str(task))


def test_few_shot_never_shows_what_is_asked(tiny_model_dir, tmp_path):
    for name, words in (("asked", "abc"), ("shown", "abcde")):
        rows = [json.dumps({"question": f"what is {w} ?", "answer": "so\n#### 3"}) for w in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    flags = ["--data_file", str(tmp_path / "asked.jsonl"), "--few_shot_file", str(tmp_path / "shown.jsonl")]
    for problem in prompts(tiny_model_dir, *flags, "--few_shot", "2", task="gsm8k"):
        *shown, last = problem.text.split("<user>")[1:]
        assert {turn.partition("what is ")[2][0] for turn in shown} == {"d", "e"}
        assert last.partition("what is ")[2][0] in "abc"
    with pytest.raises(ValueError, match="the 2 training rows"):
        prompts(tiny_model_dir, *flags, "--few_shot", "3", task="gsm8k")
    with pytest.raises(ConnectionError, match=r"--few_shot_file FILE for eval\.py's examples"):
        prompts(tiny_model_dir, *flags[:2], "--few_shot", "1", task="gsm8k")


# ---- models


def test_an_adapter_its_merged_model_and_its_folder_alone_agree(tiny_model_dir, tmp_path):
    torch.manual_seed(0)
    base = load_model(str(tiny_model_dir))
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    merged: Any = model.merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(tmp_path / "merged")
    load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path / "merged")
    plain = texts(evaluate(tiny_model_dir, tmp_path / "0", "--limit", "6"))
    outputs = [
        texts(evaluate(tiny_model_dir, tmp_path / "1", "--limit", "6", "--checkpoint_path", str(tmp_path / "adapter"))),
        texts(evaluate(tmp_path / "adapter", tmp_path / "2", "--limit", "6")),
        texts(evaluate(tmp_path / "merged", tmp_path / "3", "--limit", "6")),
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] != plain


def test_an_approximate_sampler_is_sampled_counted_and_recorded_row_by_row(tiny_model_dir, tmp_path):
    flags = ("--limit", "6", "--temperature", "1.0", "--sampler", "cached+parallel", "--kv_cache", "prefix")
    flags += ("--reveal", "factor", "--reveal_level", "2.9", "--diffusion_steps", "12")
    items = evaluate(tiny_model_dir, tmp_path, *flags)["generations"]
    assert len({item["forward_passes"] for item in items}) > 1
    how: dict[str, Any] = {"sampler": "cached+parallel", "kv_cache": "prefix", "reveal": "factor", "reveal_level": 2.9}
    for item in items:
        found, text = alone(tiny_model_dir, item, steps=12, temperature=1.0, **how)
        assert item["generations"] == text
        assert (item["forward_passes"], item["forward_tokens"]) == (found.passes.item(), found.forward_tokens.item())
        assert item["reveal_steps"] == found.reveal_steps[0, : item["tokens"]].tolist()
    record = json.loads(next(tmp_path.glob("*_record.json")).read_text())
    assert record["settings"]["sampler"] == "cached+parallel"
    with pytest.raises(ValueError, match=r"different run \(.*sampler: 'cached\+parallel' there, 'exact' now.*'factor'"):
        evaluate(tiny_model_dir, tmp_path, "--limit", "6", "--temperature", "1.0", "--diffusion_steps", "12")


def test_edits_are_counted_and_belong_to_the_identity_of_a_run(tiny_model_dir, tmp_path):
    flags = ("--limit", "3", "--sampler", "parallel", "--reveal_level", "0.1")
    plain = evaluate(tiny_model_dir, tmp_path / "plain", *flags)
    assert not any("edits" in item for item in plain["generations"])
    edited = evaluate(tiny_model_dir, tmp_path / "edited", *flags, "--edit_threshold", "0.1", "--max_post_steps", "2")
    assert sum(item["edits"] for item in edited["generations"]) > 0
    assert any(item["first_text"] != item["text"] for item in edited["generations"])
    with pytest.raises(ValueError, match="different run"):
        evaluate(tiny_model_dir, tmp_path / "edited", *flags, "--edit_threshold", "0.2", "--max_post_steps", "2")


def without_blocks(model: Path, output_dir: Path, *flags: str) -> dict[str, Any]:
    """The generation file and the record's settings of a run without a block length."""
    required = ["--model_path", str(model), "--dataset", "sudoku", "--output_dir", str(output_dir), "--limit", "3"]
    evaluation.main(evaluation.make_parser().parse_args([*required, "--gen_length", "12", *flags]))
    (record,) = (json.loads(path.read_text()) for path in output_dir.glob("*_record.json"))
    (results,) = (json.loads(path.read_text()) for path in output_dir.glob("*_generations.json"))
    assert record["settings"]["block_length"] == record["identity"]["block_length"] == results["block_length"]
    return results


def test_a_block_causal_model_is_sampled_in_its_own_blocks_and_others_in_those_of_d1(
    tiny_model_dir, tiny_block_dir, tmp_path, monkeypatch
):
    own = without_blocks(tiny_block_dir, tmp_path / "own")
    assert own["block_length"] == 4
    assert texts(own) == texts(evaluate(tiny_block_dir, tmp_path / "told", "--limit", "3"))  # that it has blocks of 4
    assert without_blocks(tiny_model_dir, tmp_path / "whole")["block_length"] == 32
    monkeypatch.setattr(completions, "load_model_for", lambda *_: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match="has blocks of 4 tokens, so block_length must be 4, not 6"):
        without_blocks(tiny_block_dir, tmp_path / "other", "--block_length", "6")
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())


def test_several_lengths_give_a_file_each_as_alone_and_load_the_model_once(tiny_model_dir, tmp_path, monkeypatch):
    required = ["--model_path", str(tiny_model_dir), "--dataset", "sudoku", "--limit", "5", "--block_length", "4"]

    def files(folder: str, *lengths: str) -> dict[str, list[tuple[int, str]]]:
        flags = [*required, "--output_dir", str(tmp_path / folder), "--gen_length", *lengths]
        evaluation.main(evaluation.make_parser().parse_args(flags))
        found = (tmp_path / folder).glob("*_generations.json")
        return {path.name: texts(json.loads(path.read_text())) for path in found}

    alone = {length: files(length, length) for length in ("8", "12")}
    loaded: list[str] = []
    load = completions.load_model_for
    monkeypatch.setattr(completions, "load_model_for", lambda *asked: loaded.append("model") or load(*asked))
    assert files("8", "8", "12", "8") == alone["8"] | alone["12"]  # one length exists already
    assert files("both", "12", "8") == alone["8"] | alone["12"]
    assert loaded == ["model", "model"]
    assert files("both", "12", "8") == alone["8"] | alone["12"]
    assert loaded == ["model", "model"]
    # One of them is refused before a completion of the other is made.
    for lengths in (("8", "500"), ("8", "0")):
        with pytest.raises(ValueError, match=r"exceed the model's 512|out of range: --gen_length 8 0"):
            files("refused", *lengths)
    assert not (tmp_path / "refused").exists()


FAILS = """
from d1.tasks.sudoku import *
from d1.tasks import load_task
TASK = load_task("sudoku")
REWARDS, load_rows, extract = TASK.REWARDS, TASK.load_rows, TASK.extract


def score(text, row):
    raise {error}
"""


def test_problems_that_cannot_be_scored_are_named_and_end_the_command_with_status_1(tiny_model_dir, tmp_path, capsys):
    task = tmp_path / "fails.py"
    task.write_text(FAILS.format(error='KeyError("level")'))
    flags = ["--model_path", str(tiny_model_dir), "--output_dir", str(tmp_path / "out"), "--limit", "2", *LENGTHS]
    args = evaluation.make_parser().parse_args([*flags, "--dataset", str(task)])
    assert evaluation.main(args) == 1
    printed = capsys.readouterr()
    assert "0/2 (!)" in printed.out
    assert "KeyError: 'level'" in printed.err
    assert "0 of 2 completions scored" in printed.err
    assert evaluation.main(evaluation.make_parser().parse_args([*flags, "--dataset", "sudoku"])) == 0
    assert "ERROR" not in capsys.readouterr().err


def test_a_sandbox_that_does_not_work_is_no_verdict(tiny_model_dir, tmp_path):
    task = tmp_path / "fails.py"
    task.write_text("from d1.sandbox import SandboxError\n" + FAILS.format(error='SandboxError("no bwrap")'))
    with pytest.raises(SandboxError, match="no bwrap"):
        d1.eval.evaluate(
            tiny_model_dir, task, output_dir=str(tmp_path / "out"), limit=2, gen_length=[12], block_length=4
        )


# ---- resuming


def test_a_complete_run_is_left_alone_and_another_is_not_mixed_in(tiny_model_dir, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    first = evaluate(tiny_model_dir, tmp_path, "--limit", "4")
    assert f"Loading {tiny_model_dir} as float32, on a CPU" in caplog.text
    (file,) = tmp_path.glob("*_generations.json")
    assert caplog.messages[-1] == f"Completions: {file}"
    monkeypatch.setattr(completions, "load_model_for", lambda *_: pytest.fail("loaded a model for nothing"))
    assert evaluate(tiny_model_dir, tmp_path, "--limit", "4") == first
    with pytest.raises(ValueError, match=r"different run \(.*temperature: 0.0 there, 0.5 now"):
        evaluate(tiny_model_dir, tmp_path, "--limit", "4", "--temperature", "0.5")
    with pytest.raises(ValueError, match=r"eos_stop: False there, True now"):
        evaluate(tiny_model_dir, tmp_path, "--limit", "4", "--eos_stop")
    with pytest.raises(ValueError, match=r"problems: 4 there, 5 now"):
        evaluate(tiny_model_dir, tmp_path, "--limit", "5")
    monkeypatch.undo()
    assert texts(evaluate(tiny_model_dir, tmp_path, "--limit", "5", "--overwrite"))


@pytest.mark.parametrize("complete", [True, False])
def test_other_contents_under_the_same_paths_are_another_run(tiny_model_dir, tmp_path, complete):
    """Of weights, config, tokenizer, adapter and task: neither results nor completions so far are taken for theirs."""
    model, results = shutil.copytree(tiny_model_dir, tmp_path / "m"), tmp_path / "results"
    adapter, task = tmp_path / "adapter", tmp_path / "own_task.py"
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(load_model(str(model)), config).save_pretrained(adapter)
    task.write_text(Path(load_task("sudoku").__file__).read_text())
    again = partial(evaluate, model, results, "--limit", "4", "--checkpoint_path", str(adapter), task=str(task))
    first = again()
    if not complete:
        (record,) = results.glob("*_record.json")
        (folder := results / record.name.replace("_record.json", ".partial")).mkdir()
        (folder / "identity.json").write_text(json.dumps(json.loads(record.read_text())["identity"]))
        items = [item for item in first["generations"] if item["index"] > first["generations"][0]["index"]]
        (folder / "rank_0.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        record.unlink()
    weights = (model / "model.safetensors").read_bytes()
    flip_bit(model / "model.safetensors")
    with pytest.raises(ValueError, match=r"different run \(contents of model_path: .*'model'"):
        again()
    (model / "model.safetensors").write_bytes(weights)
    for path, name, changes in (
        (model / "config.json", "model_path: .*'model'", {"rms_norm_eps": 0.5}),
        (model / "tokenizer_config.json", "model_path: .*'tokenizer'", {"model_max_length": 99}),
        (adapter / "adapter_config.json", "model_path: .*'adapter'", {"lora_alpha": 128}),
        (task, "dataset", {}),
    ):
        before = path.read_bytes()
        edit_json(path, **changes) if changes else path.write_bytes(before + b"# other\n")
        with pytest.raises(ValueError, match=rf"different run \(contents of {name}.* there, .* now\): choose another"):
            again()
        path.write_bytes(before)
    assert texts(again()) == texts(first)


def test_a_run_that_died_before_its_first_completion_blocks_no_other(tiny_model_dir, tmp_path, monkeypatch):
    """An error while the model is loaded, and then a start with other settings."""
    with monkeypatch.context() as patch:
        patch.setattr(completions, "load_model_for", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(tiny_model_dir, tmp_path, "--limit", "2")
    assert evaluate(tiny_model_dir, tmp_path, "--limit", "2", "--dtype", "bfloat16", "--temperature", "0.5")
    (record,) = tmp_path.glob("*_record.json")
    assert json.loads(record.read_text())["identity"]["temperature"] == 0.5


def write_sums(path: Path, count: int) -> Path:
    """Problems in GSM8K's format with prompts of many lengths."""
    sums = ["+".join("1" * (1 + 37 * i % 101)) for i in range(count)]
    path.write_text("".join(json.dumps({"question": f"what is {s} ?", "answer": "#### 3"}) + "\n" for s in sums))
    return path


@pytest.mark.parametrize("sampler", [(), ("--sampler", "parallel", "--reveal_level", "0.1")], ids=str)
def test_in_16_bits_a_resume_and_other_processes_change_no_completion(tiny_model_dir, tmp_path, monkeypatch, sampler):
    """If the remaining rows form their own batches, some completions do change, so this test could see a change."""
    flags = ("--data_file", str(write_sums(tmp_path / "sums.jsonl", 80)), "--dtype", "bfloat16", "--batch_size", "4")
    flags += ("--block_length", "8", "--gen_length", "24", *sampler)
    whole = evaluate(tiny_model_dir, tmp_path / "whole", *flags, task="gsm8k")
    required = ["--model_path", str(tiny_model_dir), "--dataset", "gsm8k", "--output_dir", str(tmp_path / "parts")]
    (args,) = evaluation.runs_of(evaluation.make_parser().parse_args([*required, *flags]))
    tokenizer = load_tokenizer(str(tiny_model_dir))
    prompts = read_prompts(args, load_task("gsm8k"), tokenizer)

    def generate_by(world: int, asked: list[Prompt], done: dict) -> Journal:
        """The items that each of the processes takes from the queue, one process after the other, for the journal of
        one setup."""
        journals = [Journal(args.output_dir, setup_name(args), rank) for rank in range(world)]
        assert journals[0].prepare(completions.run_identity(args, prompts), overwrite=not done)
        model = partial(completions.load_model_for, args, args.read_folder())
        for rank, journal in enumerate(journals):
            for entry in done.values() if rank == 0 else ():
                journal.append(entry)
            share = world - rank  # from the items that earlier processes have left
            with monkeypatch.context() as patch:
                patch.setattr(completions, "take_from_queue", lambda left, _, n=share: left[::n])
                completions.complete(args, model, tokenizer, asked, journal)
        return journals[0]

    expected = dict(texts(whole))
    if sampler:
        assert len({item["forward_passes"] for item in whole["generations"]}) > 1
    left = [prompt for prompt in prompts if prompt.index % 3]
    anew = generate_by(1, left, {}).read()
    assert any(entry["generations"] != expected[index] for index, entry in anew.items())

    kept = {key: entry for key, entry in generate_by(2, prompts, {}).read().items() if key % 3 == 0}
    for path in Path(args.output_dir).glob("*.partial/rank_*.jsonl"):
        path.unlink()
    found = generate_by(3, prompts, kept).read()
    assert found == found | kept
    assert {index: entry["generations"] for index, entry in found.items()} == expected


def test_the_identity_holds_what_moves_a_logit_where_that_may_change_a_token(tiny_model_dir):
    def identity(*flags: str) -> dict[str, Any]:
        required = ["--model_path", str(tiny_model_dir), "--dataset", "sudoku", "--diffusion_steps", "64"]
        (run,) = evaluation.runs_of(evaluation.make_parser().parse_args([*required, *flags]))
        return completions.run_identity(run, [])

    in_fp32 = identity("--dtype", "float32")
    assert in_fp32 == identity("--dtype", "float32", "--batch_size", "7", "--attn_implementation", "eager")
    in_bf16 = identity("--dtype", "bfloat16")
    assert in_bf16["libraries"].startswith(f"torch {torch.__version__}, transformers ")
    assert {"device", "libraries", "batch_size", "attn_implementation"} == set(in_bf16) - set(in_fp32)
    for flags in (("--batch_size", "7"), ("--attn_implementation", "eager")):
        assert identity("--dtype", "bfloat16", *flags) != in_bf16


def test_dont_save_leaves_nothing(tiny_model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation.tempfile, "tempdir", str(tmp_path))
    arguments = ["--model_path", str(tiny_model_dir), "--dataset", "sudoku", *LENGTHS, "--limit", "2", "--dont_save"]
    evaluation.main(evaluation.make_parser().parse_args(arguments))
    assert "2/2" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(completions, "load_model_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluation.main(evaluation.make_parser().parse_args(arguments))
    assert not list(tmp_path.iterdir())


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_call_leaves_nothing_open(tiny_model_dir, tmp_path, monkeypatch):
    append, journals = Journal.append, []

    def append_one(journal: Journal, entry: dict[str, Any]) -> None:
        if journals:
            raise KeyboardInterrupt
        journals.append(journal)
        append(journal, entry)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", append_one)
        with pytest.raises(KeyboardInterrupt) as stopped:
            evaluate(tiny_model_dir, tmp_path, "--limit", "3")
    assert stopped.tb is not None  # refers to the journal, which is nevertheless closed
    assert (journals[0].lines, journals[0].lock.file) == (None, None)
    assert len(evaluate(tiny_model_dir, tmp_path, "--limit", "3")["generations"]) == 3


# ---- refusals

LLADA = ("--prompt_protocol", "llada")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gen_length", "0"), "--gen_length 0 "),
        (("--diffusion_steps", "2", "--gen_length", "12"), "need between 3 and 12 steps"),
        (("--temperature", "-1"), r"--temperature -1\.0 \(must be in \[0, inf\)"),
        (("--sampler", "cached", "--reveal", "factor"), "would be ignored by the sampler cached"),
        (("--few_shot", "1", "--dont_use_box"), "contradicts --few_shot"),
        (("--few_shot", "100000"), "training rows"),
        (("--few_shot_file", "nowhere.csv"), "--few_shot_file would do nothing: --few_shot is 0"),
        (("--tool_format", "json"), "--tool_format would do nothing: there are no turns without --tools"),
        (("--calls_per_turn", "3"), "--calls_per_turn would do nothing"),
        (("--checkpoint_path", "nowhere"), "not an adapter"),
        (("--data_file", "nowhere.csv"), "nowhere.csv"),
        (("--gen_length", "500"), "exceed the model's 512"),
        (("--block_length", "7"), r"gen_length \(12\) must be a multiple of block_length \(7\)"),  # as in RL
        (("--gen_length", "16", "24", "--block_length", "16"), r"gen_length \(24\) must be a multiple"),
        (("--num_samples", "2"), "--num_samples above 1 needs --temperature above 0"),
        ((*LLADA, "--dataset", "countdown"), "countdown has no prompt protocol 'llada': use one of d1"),
        ((*LLADA, "--add_reasoning"), "--add_reasoning belongs to d1's prompts"),
        ((*LLADA, "--dont_use_box"), "--dont_use_box belongs to d1's prompts"),
    ],
)
def test_bad_settings_are_refused(tiny_model_dir, tmp_path, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(tiny_model_dir, tmp_path, *flags)


def test_a_block_length_that_nobody_gave_need_not_divide_the_length(tiny_model_dir, tiny_block_dir):
    """It is the largest one; and in a block-causal model, a prompt may end inside a block anyway."""
    required = ["--model_path", "m", "--dataset", "sudoku", "--gen_length", "48", "30"]
    for folder, own in (tiny_model_dir, []), (tiny_block_dir, []), (tiny_block_dir, ["--block_length", "4"]):
        args = evaluation.make_parser().parse_args([*required, *own])
        runs = evaluation.runs_of(args, ModelFolder.read(folder).config)
        assert [run.gen_length for run in runs] == [48, 30]


def test_weights_that_no_memory_holds_are_refused_before_they_are_read(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    edit_json(folder / "config.json", hidden_size=1 << 16, intermediate_size=1 << 18, num_hidden_layers=8)
    message = r"m: its weights take {} GB as {}, and [\d.]+ GB of memory are free: {}use a machine with a GPU"
    for flags, size, dtype, advice in (
        (("--dtype", "float32"), r"1649\.5", "float32", "pass --dtype bfloat16, which takes half, or "),
        (("--dtype", "bfloat16"), r"824\.8", "bfloat16", ""),
    ):
        with pytest.raises(ValueError, match=message.format(size, dtype, advice)):
            evaluate(folder, tmp_path, "--limit", "1", *flags)


def test_file_names_tell_setups_apart(tmp_path):
    def name(*flags: str) -> str:
        required = ["--model_path", "runs/sft/checkpoint-20/", "--dataset", "math", "--diffusion_steps", "64"]
        (run,) = evaluation.runs_of(evaluation.make_parser().parse_args([*required, *flags]))
        return setup_name(run)

    assert name() == "math_sft_checkpoint-20_128_64"
    assert name("--model_path", "runs/sft/merged") == "math_sft_merged_128_64"
    assert name("--model_path", "GSAI-ML/LLaDA-8B-Instruct") == "math_LLaDA-8B-Instruct_128_64"
    assert name("--split", "validation", "--few_shot", "2", "--suffix", "a b") == (
        "math_sft_checkpoint-20_validation_fs2_a-b_128_64"
    )
    assert name("--model_path", "m", "--checkpoint_path", "rl/checkpoint-5") == "math_rl_checkpoint-5_128_64"


# ---- prompt protocols


def test_a_run_is_named_recorded_and_scored_by_its_prompt_protocol(tiny_model_dir, tmp_path, capsys):
    row = {"question": "1+1?", "answer": "1+1=2\n#### 2"}
    for name, count in (("asked", 1), ("shown", 5)):
        lines = [json.dumps({**row, "question": f"{i}{row['question']} {name}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    asked_file = ("--data_file", str(tmp_path / "asked.jsonl"))
    files = (*asked_file, "--few_shot_file", str(tmp_path / "shown.jsonl"))
    out = tmp_path / "results"
    llada = evaluate(tiny_model_dir, out, *files, "--prompt_protocol", "llada", "--few_shot", "4", task="gsm8k")
    d1 = evaluate(tiny_model_dir, out, *asked_file, task="gsm8k")
    assert [results["prompt_protocol"] for results in (llada, d1)] == ["llada", "d1"]
    asked = llada["generations"][0]["prompt_input"]
    assert asked.count("Question: ") == 5
    assert "<reasoning>" not in asked
    assert asked.endswith("Answer:<assistant>")
    by_default = prompts(tiny_model_dir, *files, "--prompt_protocol", "llada", task="gsm8k")
    assert [prompt.text for prompt in by_default] == [asked]
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*_record.json"))]
    assert [record["settings"]["prompt_protocol"] for record in records] == ["d1", "llada"]
    assert [record["identity"]["prompt_protocol"] for record in records] == ["d1", "llada"]

    path = next(out.glob("*_llada_fs4_*_generations.json"))  # the last number counts here, and only here
    for results, accuracy in ((llada, 100.0), (d1, 0.0)):
        results["generations"][0] |= {"generations": "It is 2.", "text": "It is 2."}
        path.write_text(json.dumps(results))
        setup = next(setup for setup in read_setups(out) if setup.name in path.name)
        assert score_setup(setup, "strict", {})[0].accuracy == accuracy
    path.write_text(json.dumps(llada))
    setup = next(setup for setup in read_setups(out) if setup.name in path.name)
    assert "d1's prompts" in score_setup(setup, "published", {})[0].errors[0]


def test_weights_that_are_not_finite_end_an_evaluation_with_the_problem_and_the_layer(tiny_model_dir, tmp_path):
    model = with_nan(tiny_model_dir, tmp_path / "model", "model.layers.0.mlp.up_proj.weight", (1, 2))
    with pytest.raises(NotFiniteError, match=r"^problem \d+: .*comes from model\.layers\.0\.mlp\.up_proj, whose"):
        evaluate(model, tmp_path / "results", "--limit", "5")
    assert not [*(tmp_path / "results").glob("*_generations.json")]
    samples = ("--limit", "1", "--temperature", "1", "--num_samples", "3")
    (prompt, *_) = prompts(tiny_model_dir, *samples)
    with pytest.raises(NotFiniteError, match=rf"^problem {prompt.index}, sample 0: "):
        evaluate(model, tmp_path / "samples", *samples)


# ---- several completions per problem

SAMPLED: dict[str, Any] = {"gen_length": 8, "block_length": 4, "batch_size": 3, "temperature": 1.0, "limit": 3}


def items_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*_generations.json")
    items = json.loads(path.read_text())["generations"]
    return [{name: value for name, value in item.items() if name != "seconds"} for item in items]


def test_each_sample_has_its_own_draws_also_after_a_kill_and_the_first_is_that_of_a_run_with_one(
    tiny_model_dir, tmp_path, monkeypatch
):
    whole, one, broken = tmp_path / "whole", tmp_path / "one", tmp_path / "broken"
    d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=whole, num_samples=2, **SAMPLED)
    d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=one, **SAMPLED)
    items, alone = items_of(whole), items_of(one)
    assert [item["sample"] for item in items] == [0, 1] * 3
    assert [item["index"] for item in items[::2]] == [item["index"] for item in alone]
    assert [item["generations"] for item in items[::2]] == [item["generations"] for item in alone]
    assert len({item["generations"] for item in items}) == 6
    assert not any("sample" in item for item in alone)

    append, written = Journal.append, []

    def kill(journal: Journal, entry: dict[str, Any]) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(entry)
        append(journal, entry)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", kill)
        with pytest.raises(KeyboardInterrupt):
            d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=2, **SAMPLED)
    for journal in (*broken.glob("*.partial"),):
        assert sum(len(path.read_text().splitlines()) for path in journal.glob("rank_*.jsonl")) == 4
    with pytest.raises(ValueError, match="num_samples: 2 there, 3 now"):
        d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=3, **SAMPLED)
    d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=broken, num_samples=2, **SAMPLED)
    assert items_of(broken) == items


# ---- `d1.eval.evaluate`, `d1 eval` and `d1 parse`

SETTINGS = {"gen_length": (12, 8), "block_length": 4, "batch_size": 3, "limit": 4, "temperature": 0.5}
FLAGS = [part for name, value in SETTINGS.items() for part in (f"--{name}", *str(value).strip("()").split(", "))]


def test_evaluate_returns_in_silence_the_rows_that_the_commands_print(tiny_model_dir, tmp_path, capsys):
    rows = [asdict(row) for row in d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=tmp_path / "api", **SETTINGS)]
    assert not capsys.readouterr().out
    assert [(row["gen_length"], row["n"], row["complete"]) for row in rows] == [(12, 4, True), (8, 4, True)]
    folder = tmp_path / "command"
    flags = ["--model_path", tiny_model_dir, "--dataset", "sudoku", "--output_dir", folder, *FLAGS]
    log = tmp_path / "log"
    said = forks.finish(forks.start(forks.module, "d1", "eval", *map(str, flags), log=log, folder=tmp_path), log)
    with pytest.raises(SystemExit, match="0"):
        scores.cli("d1 parse", [str(folder), "--format", "json"])
    assert sorted(json.loads(capsys.readouterr().out), key=lambda row: -row["gen_length"]) == rows
    assert said.endswith(evaluation.as_table(d1.eval.evaluate(tiny_model_dir, "sudoku", output_dir=folder, **SETTINGS)))
    for first, second in zip(sorted((tmp_path / "api").iterdir()), sorted(folder.iterdir()), strict=True):
        assert first.name == second.name
        one, two = (json.loads(path.read_text()) for path in (first, second))
        if "identity" in one:
            assert one["identity"] == two["identity"]
            assert one["settings"] | {"output_dir": ""} == two["settings"] | {"output_dir": ""}
        else:
            texts = [[item["generations"] for item in file["generations"]] for file in (one, two)]
            assert texts[0] == texts[1]


def test_false_turns_a_switch_off_and_none_is_the_default():
    parser = evaluation.make_parser()
    required = {"model_path": "m", "dataset": "sudoku"}
    for value, expected in ((False, False), (None, True), (True, True)):
        assert evaluation.parse_settings(parser, {**required, "self_conditioning": value}).self_conditioning is expected
    assert evaluation.parse_settings(parser, {**required, "eos_stop": False}).eos_stop is False
    assert evaluation.parse_settings(parser, {**required, "tools": []}).tools is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gen_len": 12}, TypeError, r"no such setting: --gen_len=12"),  # not as an abbreviation either
        ({"split": "dev"}, ValueError, "argument --split: invalid choice: 'dev'"),
        ({"limit": "many"}, ValueError, "argument --limit: must be an integer"),
        ({"gen_length": [12, 0]}, ValueError, "out of range: --gen_length 12 0"),
        ({"limit": 0}, ValueError, "out of range: --limit 0"),
    ],
)
def test_settings_are_checked_as_on_the_command_line_before_anything_is_loaded(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        d1.eval.evaluate("no model", "sudoku", output_dir=tmp_path, **settings)
    assert not list(tmp_path.iterdir())
