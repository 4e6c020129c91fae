"""Whole runs: the reference, accumulation, real processes, kill and resume, what is refused."""

import json
import shutil
from functools import partial

import pytest
import torch
from datasets import Dataset

from d1.models import load_model
from d1.preference.train import main, make_parser
from tests import forks
from tests.rounding import LOGITS, rounding

start = partial(forks.job, "d1.preference.train")
HALF = ["--batch_size", "1", "--grad_accum_steps", "2"]
STEP = ["--learning_rate", "1e-3", "--warmup_steps", "0", "--num_views", "2", "--logging_steps", "1"]
METHODS = ["vrpo", "vrpo-dare", "elbo-kto"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_model_dir):
    """Flags of every run here; nine pairs, so that the last step of an epoch is short and has empty rows."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "7" * (1 + i % 5)} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--model_name", str(tiny_model_dir), "--train_data", str(path), "--max_completion_length", "8"]
    own += ["--max_prompt_length", "16", "--lora_r", "4", "--debugging", "--num_proc", "1", "--num_epochs", "2"]
    return own + STEP


def run(flags, folder, *more):
    return main(make_parser().parse_args([*flags, "--output_dir", str(folder), "--job_name", "job", *more]))


def logged(folder, name):
    lines = [json.loads(line) for line in (folder / "job/metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def first_rewards(folder):
    """The rewards of the first log, of the sides that it has."""
    line = json.loads((folder / "job/metrics.jsonl").read_text().splitlines()[0])
    return [line[name] for name in ("rewards/chosen", "rewards/rejected") if name in line]


def weights(folder):
    return load_model(str(folder)).state_dict()


def assert_two_processes(folder, kind):
    settings = json.loads((folder / "job/run.json").read_text())["settings"]
    assert (settings["world_size"], settings["distributed_type"]) == (2, kind)


def test_a_resume_over_other_pairs_is_refused(flags, tmp_path):
    """A folder of `datasets`, which is no file with contents of its own: the rows themselves are compared."""
    data = Dataset.from_json(flags[flags.index("--train_data") + 1])
    data.save_to_disk(tmp_path / "rows")
    own = [*flags, "--train_data", str(tmp_path / "rows"), "--resume", "--batch_size", "4", "--grad_accum_steps", "1"]
    run(own, tmp_path, "--max_steps", "1")
    shutil.rmtree(tmp_path / "rows")
    data.select(range(8)).save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"a run with rows of train_data \w{16} instead of \w{16}: continue it with"):
        run(own, tmp_path, "--max_steps", "2")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_starts_neutral_learns_and_leaves_its_reference(method, flags, tiny_model_dir, tmp_path):
    """With LoRA there is no second model; without, the second one keeps the weights of the start."""
    how = ["--method", method, "--batch_size", "3", "--grad_accum_steps", "1", "--num_epochs", "8"]
    how += ["--beta", "3"] if method == "vrpo-dare" else []
    before = weights(tiny_model_dir)
    for full in ([], ["--full_finetuning"]):
        folder = tmp_path / f"full{len(full)}"
        trainer = run([*flags, *how, *full, "--learning_rate", "1e-2" if not full else "1e-3"], folder)
        losses, margins = logged(folder, "loss"), logged(folder, "rewards/margins")
        assert losses[0] == pytest.approx(0.5 if method == "elbo-kto" else 0.6931472, abs=rounding(LOGITS))
        assert first_rewards(folder)
        assert first_rewards(folder) == pytest.approx([0.0] * len(first_rewards(folder)), abs=rounding(LOGITS))
        assert losses[-1] < 0.9 * losses[0]
        assert margins[-1] > 0.01
        assert logged(folder, "rewards/accuracies")[-1] > 0.6
        with trainer.reference() as model:
            assert (trainer.reference_model is None) == (not full)
            kept = model.state_dict()
        assert all(torch.equal(kept[name], value) for name, value in before.items() if name in kept)
        if full:
            assert kept.keys() == before.keys()
            assert any(not torch.equal(value, before[name]) for name, value in weights(folder / "job").items())


def test_bf16_weights_start_neutral_and_learn(flags, tmp_path):
    trainer = run([*flags, "--dtype", "bfloat16", "--num_epochs", "8", "--learning_rate", "1e-2"], tmp_path)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.bfloat16, torch.float32}
    losses = logged(tmp_path, "loss")
    assert losses[0] == pytest.approx(0.6931472, abs=1e-6)
    assert losses[-1] < 0.9 * losses[0]


def test_neither_accumulation_nor_processes_change_a_run(flags, tmp_path):
    """Steps of 4 completions; KTO's mean ratio is that of the whole step."""
    shared, one, parts, both = [*flags, "--method", "elbo-kto"], tmp_path / "one", tmp_path / "parts", tmp_path / "both"
    run([*shared, "--batch_size", "4", "--grad_accum_steps", "1"], one)
    run([*shared, "--batch_size", "1", "--grad_accum_steps", "4", "--views_at_once", "2"], parts)
    forks.finish(start([*shared, *HALF], both, 2, ACCELERATE_USE_CPU="true"), both / "log")
    assert_two_processes(both, "MULTI_CPU")
    assert len(logged(one, "loss")) == 10
    for name in ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected", "compute_tokens"):
        assert logged(one, name)  # a step may have completions of one label only
        for folder in (parts, both):
            assert logged(folder, name) == pytest.approx(logged(one, name), rel=2e-3, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "how"), [(2, []), (3, []), (3, ["--full_finetuning"])])
def test_zero_gives_the_run_of_one_process(zero, how, flags, tmp_path):
    shared, one, two = [*flags, *how, "--method", "elbo-kto"], tmp_path / "one", tmp_path / "two"
    run([*shared, "--batch_size", "4", "--grad_accum_steps", "1"], one)
    forks.finish(start([*shared, *HALF], two, 2, **forks.deepspeed(zero)), two / "log")
    assert_two_processes(two, "DEEPSPEED")
    for name in ("loss", "rewards/chosen", "rewards/margins", "compute_tokens"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=5e-3, abs=1e-5)


def test_deepspeed_in_bf16_compares_with_the_reference_as_it_was_scored(flags, tmp_path):
    """At the first step, policy and reference are equal. Rounded to bf16, a bound of -20 nats is off by up to 0.06,
    and KTO's centre is the mean over the step."""
    pytest.importorskip("deepspeed")
    bf16 = forks.deepspeed(2) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    for method, loss in (("vrpo", 0.6931472), ("elbo-kto", 0.5)):
        words = [*flags, *HALF, "--method", method, "--bf16", "true", "--max_steps", "1"]
        folder = tmp_path / method
        forks.finish(start(words, folder, 2, **bf16), folder / "log")
        assert_two_processes(folder, "DEEPSPEED")
        assert logged(folder, "loss") == [pytest.approx(loss, abs=1e-6)]
        assert {*first_rewards(folder)} == {0.0}


def test_a_killed_run_repeats_an_unbroken_one(flags, tmp_path):
    """SIGKILL in the second epoch, between two logs: the weights and every logged number are equal to the bit."""
    training = [*flags, "--batch_size", "1", "--grad_accum_steps", "2", "--save_steps", "3", "--logging_steps", "2"]
    training += ["--num_epochs", "4", "--method", "elbo-kto"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(training, whole)
    forks.wait_for_kill(start(training, killed, KILLED_AT=str(killed / "job/checkpoint-9")), killed / "log")
    run([*training, "--resume"], killed)
    names = ("loss", "grad_norm", "rewards/chosen", "logps/rejected", "rewards/accuracies", "compute_tokens")
    for name in (*names, "train_loss"):
        assert logged(killed, name) == logged(whole, name), name
    expected, found = weights(whole / "job"), weights(killed / "job")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"a run with beta 0.1 instead of 0.3"):
        run([*training, "--resume", "--beta", "0.3"], killed)


def test_a_log_without_completions_of_a_label_has_no_numbers_of_it(flags, tmp_path):
    """It had rewards and bounds of 0, and a margin to a reward of 0."""
    one_by_one = ["--method", "elbo-kto", "--batch_size", "1", "--grad_accum_steps", "1", "--max_steps", "6"]
    run([*flags, *one_by_one], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "job/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rewards/accuracies" in line]
    sides = [[side for side in ("chosen", "rejected") if f"rewards/{side}" in line] for line in steps]
    assert sorted({side for (side,) in sides}) == ["chosen", "rejected"]
    for line, (side,) in zip(steps, sides, strict=True):
        assert line[f"logps/{side}"] < -1
        assert not {"rewards/margins", "logps/chosen", "logps/rejected"} & line.keys() - {f"logps/{side}"}


def test_blocks_and_merging(flags, tiny_block_dir, tmp_path):
    """A block-causal model's bound is the sum of its blocks'. The card says how the model was made."""
    run([*flags, "--model_name", str(tiny_block_dir), "--max_steps", "2", "--merge_at_end"], tmp_path)
    assert load_model(str(tmp_path / "job/merged")).config.block_size == 4
    card = (tmp_path / "job/README.md").read_text()
    assert "preferences, method vrpo: LLaDA 1.5, [arXiv 2505.19223]" in card
    assert "- preference" in card


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--antithetic"], "--antithetic needs --estimator espo"),
        (["--train_data", ""], "--train_data is missing"),
        (["--max_completion_length", "600"], "512 positions: lower --max_prompt_length or --max_completion_length"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags, tmp_path, more, problem):
    with pytest.raises(ValueError, match=problem):
        run(flags, tmp_path, *more)
    assert not list(tmp_path.iterdir())
