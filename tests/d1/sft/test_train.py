"""sft_train.py as users start it: real processes and whole runs on a small model and local data."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets.arrow_dataset import Column
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from d1.models import load_model, load_tokenizer
from d1.models.convert import a2d, export
from d1.models.tokenizer import PLAIN_CHAT_TEMPLATE
from d1.runs.checkpoints import write_sums
from d1.runs.stage import on_gpu
from d1.sft.train import main, make_parser
from tests import forks
from tests.d1.released import write_wide
from tests.faults import edit_json, flip_bit
from tests.rounding import LOGITS, assert_near, rounding

SFT = Path(__file__).parents[3] / "SFT"
start = partial(forks.job, SFT / "sft_train.py", ACCELERATE_USE_CPU="true")
ZERO2 = ["accelerate.commands.launch", "--config_file", "ddp_config.yaml", "--num_processes", "2"]
ZERO2 += ["--mixed_precision", "no"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_model_dir):
    """Flags of every run in this file; forty rows in s1K's schema, of very different lengths."""
    path = tmp_path_factory.mktemp("s1k") / "rows.jsonl"
    with path.open("w") as lines:
        for i in range(40):
            row = {"question": f"{i}+{i}=?", "thinking_trajectories": ["add " * (1 + i % 9)], "attempt": str(2 * i)}
            lines.write(json.dumps(row) + "\n")
    return ["--model_name", str(tiny_model_dir), "--train_data", str(path), "--test_split", "0.2", "--batch_size", "4"]


def run(flags, folder, *more):
    """The same in this process."""
    return main(
        make_parser().parse_args([*flags, "--output_dir", str(folder), "--job_name", "job", "--debugging", *more])
    )


def history(folder, name):
    log = json.loads((folder / "job/trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log if name in entry]


def weights(folder):
    return load_model(str(folder)).state_dict()


def assert_same_weights(one, other):
    found, expected = weights(one), weights(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def logits(folder):
    with torch.no_grad():
        return load_model(str(folder))(input_ids=torch.arange(8, 40)[None]).logits


def test_killed_run_repeats_an_uninterrupted_one(flags, tmp_path):
    """SIGKILL in the middle of the second epoch; dropout, noise, drafts, order and optimizer continue bit for bit.

    The first run has the flags of a user without an account: Weights & Biases logs to files.
    """
    training = ["--lora_dropout", "0.3", "--learning_rate", "1e-3", "--max_steps", "36", "--eval_steps", "5"]
    training += ["--grad_accum_steps", "1", "--logging_steps", "5", "--edit_noise", "draft", "--edit_turns", "2"]
    whole, killed, home = tmp_path / "whole", tmp_path / "killed", tmp_path / "home"
    home.mkdir()
    environment = {"WANDB_MODE": None, "WANDB_DIR": None, "WANDB_API_KEY": None, "HOME": str(home)}
    forks.finish(start([*flags, *training], whole, **environment), whole / "log")
    assert list((whole / "job/wandb").glob("offline-run-*"))
    assert len(history(whole, "answer_tokens_per_second")) > 1
    once = {"KILLED_AT": str(killed / "job/checkpoint-10")}
    forks.wait_for_kill(start([*flags, *training, "--debugging"], killed, **once), killed / "log")
    assert not (killed / "job/trainer_state.json").exists()
    assert (killed / "job/metrics.jsonl").exists()
    forks.finish(start([*flags, *training, "--debugging", "--resume"], killed), killed / "log")
    for name in ("loss", "grad_norm", "learning_rate"):
        assert history(killed, name) == history(whole, name)
    logs = [json.loads(line) for line in (killed / "job/metrics.jsonl").read_text().splitlines()]
    assert logs == json.loads((killed / "job/trainer_state.json").read_text())["log_history"]
    assert history(killed, "eval_loss")[-3:] == history(whole, "eval_loss")[-3:]
    assert_same_weights(killed / "job", whole / "job")


@pytest.mark.parametrize(
    ("family", "how"),
    [("causal", ["--packing", "--masked_weight", "0.5"]), ("canvas", []), ("model", ["--noise", "scdd"])],
)
def test_a_killed_run_of_another_noise_or_attention_repeats_an_uninterrupted_one(request, tmp_path, family, how):
    rows, killed = tmp_path / "rows.jsonl", tmp_path / "killed"
    lines = [{"prompt": f"{i}+{i}", "completion": str(2 * i) * (1 + i % 5)} for i in range(12)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--model_name", str(request.getfixturevalue(f"tiny_{family}_dir")), "--train_data", str(rows), *how]
    flags += ["--test_split", "0.2", "--batch_size", "2", "--grad_accum_steps", "2", "--lora_r", "2", "--debugging"]
    flags += [
        "--lora_dropout",
        "0.3",
        "--learning_rate",
        "1e-2",
        "--max_steps",
        "5",
        "--eval_steps",
        "2",
        "--keep_last",
    ]
    flags += ["--logging_steps", "1", "--keep_last"]
    run(flags, tmp_path / "whole")
    forks.wait_for_kill(start(flags, killed, KILLED_AT=str(killed / "job/checkpoint-2")), killed / "log")
    assert not (killed / "job/trainer_state.json").exists()
    run(flags, killed, "--resume")
    for name in ("loss", "grad_norm", "eval_loss"):
        assert history(killed, name) == history(tmp_path / "whole", name)
    found, expected = (load_file(folder / "job/adapter_model.safetensors") for folder in (killed, tmp_path / "whole"))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_two_processes_of_d1s_configuration(flags, tmp_path):
    """Told to stay off a GPU; it compiles DeepSpeed's CPU Adam, which takes minutes."""
    odd = [*flags, "--test_split", "0.13", "--eval_draws", "3"]  # 18 draws, which batches of 8 do not divide
    training = ["--max_steps", "3", "--learning_rate", "1e-3", "--merge_at_end", "--debugging"]
    command = [sys.executable, "-m", *ZERO2, "sft_train.py", *odd, *training, "--output_dir", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--job_name", "job"], cwd=SFT, env=environment, timeout=900, check=True)
    assert_two_processes(tmp_path, "DEEPSPEED")
    run([*odd, "--max_steps", "1"], tmp_path / "alone")
    first = history(tmp_path, "eval_loss")[0]
    assert first == pytest.approx(history(tmp_path / "alone", "eval_loss")[0], abs=rounding(LOGITS))


def test_evaluations_that_take_long_are_announced(flags, tmp_path, caplog):
    """A run of 40 rows in 10 steps of 4 that evaluates, after each second step, 10 rows in four draws."""
    words = [*flags, "--max_steps", "10", "--eval_steps", "2"]
    words += ["--batch_size", "4", "--grad_accum_steps", "1", "--eval_draws"]
    rows = run([*words, "4"], tmp_path / "many").eval_dataset.rows
    share = 5 * 4 * len(rows) / (3 * 40)
    assert (
        f"Evaluations take about {100 * share:.0f}% of the time of training: each 2 steps, {4 * len(rows)} forward"
        in caplog.text
    )
    caplog.clear()
    run([*words[:-1], "--eval_steps", "11"], tmp_path / "none")  # of which there is none
    assert "Evaluations take" not in caplog.text


@pytest.mark.parametrize("kind", [["--full_finetuning"], []], ids=["all weights", "lora"])
def test_two_processes_that_share_the_weights_equal_one(flags, tmp_path, kind):
    """FSDP2, with a checkpoint, a resume and an export."""
    words = [*flags, *kind, "--max_steps", "6", "--learning_rate", "1e-3", "--eval_steps", "2"]
    words += ["--lora_dropout", "0"]

    def two(folder, *more):
        work, options = forks.sharded, {"log": folder / "log", "folder": SFT, "processes": 2, **forks.fsdp2()}
        given = ["sft_train.py", *words, "--output_dir", str(folder), "--job_name", "job", *more]
        forks.finish(forks.start(work, *given, **options), folder / "log")

    run([*words, "--batch_size", "8"], tmp_path / "one")
    two(tmp_path / "two")
    found, expected = history(tmp_path / "two", "eval_loss"), history(tmp_path / "one", "eval_loss")
    assert len(found) == 4
    assert found == pytest.approx(expected, abs=rounding(LOGITS))
    one, both = weights(tmp_path / "one/job"), weights(tmp_path / "two/job")
    for name, weight in one.items():
        assert_near(both[name], weight, least=LOGITS)  # Adam enlarges the rounding of a small gradient
    shutil.copytree(tmp_path / "two/job/checkpoint-4", tmp_path / "again/job/checkpoint-4")
    two(tmp_path / "again", "--resume")
    assert_same_weights(tmp_path / "again/job", tmp_path / "two/job")
    export(tmp_path / "two/job", tmp_path / "released", "llada")
    assert_near(logits(tmp_path / "released"), logits(tmp_path / "two/job"))


def assert_two_processes(folder, kind):
    """Two processes made a run, and merged its adapter."""
    settings = json.loads((folder / "job/run.json").read_text())["settings"]
    assert (settings["world_size"], settings["distributed_type"]) == (2, kind)
    torch.testing.assert_close(logits(folder / "job"), logits(folder / "job/merged"), rtol=0, atol=1e-4)


def test_packing_changes_no_loss_over_two_processes_nor_after_a_resume(flags, tmp_path):
    """Steps and rates equal those of the same batches unpacked, with visible noise. Runs are resumed in the middle of
    an epoch, also with one process in place of two if the steps keep their rows. Batches of 4 do not divide the 18
    evaluation draws."""
    step = ["--learning_rate", "1e-3", "--grad_accum_steps", "2", "--logging_steps", "1", "--eos_padding", "1"]
    step += ["--eval_steps", "3", "--lora_dropout", "0", "--debugging", "--max_steps", "5"]
    step += ["--test_split", "0.13", "--eval_draws", "3", "--edit_noise", "uniform", "--edit_share", "0.5"]
    plain, packed, two = tmp_path / "plain", tmp_path / "packed", tmp_path / "two"
    run([*flags, *step], plain)
    run([*flags, *step, "--packing"], packed)
    shared = [*flags, *step, "--packing", "--batch_size", "2", "--merge_at_end"]
    forks.finish(start(shared, two, processes=2), two / "log")
    assert_two_processes(two, "MULTI_CPU")
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        expected = history(plain, name)
        assert len(expected) >= 2
        assert history(packed, name) == pytest.approx(expected, rel=1e-4)
        assert history(two, name) == pytest.approx(expected, rel=1e-4)
    assert load_model(str(two / "job")).config.edit_noise == load_model(str(two / "job/merged")).config.edit_noise
    assert "packed" not in (packed / "job/adapter_config.json").read_text()
    again = tmp_path / "again"
    shutil.copytree(packed / "job/checkpoint-3", again / "job/checkpoint-3")
    run([*flags, *step, "--packing", "--resume"], again)
    assert history(again, "loss") == history(packed, "loss")
    assert_same_weights(again / "job", packed / "job")
    fewer = tmp_path / "fewer"
    shutil.copytree(two / "job/checkpoint-3", fewer / "job/checkpoint-3")
    shutil.copy(two / "job/run.json", fewer / "job/run.json")
    with pytest.raises(ValueError, match=r"a run with batch_size x grad_accum_steps x world_size 8 instead of 4"):
        run([*flags, *step, "--packing", "--batch_size", "2", "--resume"], fewer)
    run([*flags, *step, "--packing", "--resume"], fewer)
    assert history(fewer, "loss") == pytest.approx(history(plain, "loss"), rel=1e-4)


def test_adapter_and_merged_model_are_model_paths(flags, tiny_model_dir, tmp_path):
    run(flags, tmp_path, "--max_steps", "3", "--learning_rate", "1e-2", "--merge_at_end", "--gradient_checkpointing")
    adapter, merged = tmp_path / "job", tmp_path / "job/merged"
    assert (logits(adapter) - logits(tiny_model_dir)).abs().max() > 0.01
    torch.testing.assert_close(logits(merged), logits(adapter), rtol=0, atol=1e-4)
    assert load_tokenizer(str(merged)).mask_token_id == load_tokenizer(str(adapter)).mask_token_id == 3
    # Further training from the adapter starts from the model with this adapter.
    run([*flags, "--model_name", str(adapter)], tmp_path / "on", "--max_steps", "1", "--learning_rate", "0")
    torch.testing.assert_close(logits(tmp_path / "on/job"), logits(adapter), rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", [["--full_finetuning"], ["--lora_r", "8", "--complementary_masks"]])
def test_a_model_made_block_causal_learns(flags, tiny_model_dir, tmp_path, how):
    torch.manual_seed(0)
    fields = json.loads((tiny_model_dir / "config.json").read_text())
    sizes = {name: fields[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "causal")
    load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path / "causal")
    a2d(str(tmp_path / "causal"), str(tmp_path / "base"), mask_token="<mask>", block_size=4)
    training = ["--model_name", str(tmp_path / "base"), "--learning_rate", "1e-2", "--max_steps", "20", *how]
    run([*flags, *training, "--eval_steps", "10"], tmp_path)
    losses = history(tmp_path, "eval_loss")
    assert losses[-1] < 0.7 * losses[0]
    assert load_model(str(tmp_path / "job")).config.block_size == 4


def test_twenty_steps_lower_the_loss_and_the_best_checkpoint_is_kept(flags, tiny_model_dir, tmp_path, caplog):
    """Weight decay makes a trained model worse: the first evaluation is the best."""
    caplog.set_level("INFO")
    learning = ["--max_steps", "20", "--eval_steps", "10", "--learning_rate", "3e-3", "--eos_padding", "40"]
    run([*flags, *learning, "--full_finetuning"], tmp_path / "good")
    losses = history(tmp_path / "good", "eval_loss")
    assert losses[-1] < 0.8 * losses[0]
    before, after = weights(tiny_model_dir), weights(tmp_path / "good/job")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    ruin = ["--max_steps", "12", "--eval_steps", "2", "--learning_rate", "1e-3", "--weight_decay", "100"]
    trainer = run([*flags, "--model_name", str(tmp_path / "good/job"), "--full_finetuning", *ruin], tmp_path)
    losses = history(tmp_path, "eval_loss")[1:]
    assert trainer.state.best_metric == min(losses) < losses[-1]
    assert_same_weights(tmp_path / "job", Path(str(trainer.state.best_model_checkpoint)))
    final, last = weights(tmp_path / "job"), weights(tmp_path / "job/checkpoint-12")
    assert any(not torch.equal(final[name], last[name]) for name in last)
    step = trainer.state.best_global_step
    known = f"of 12. Loss on 8 held-out rows: {min(losses):.4f} at step {step}, {losses[-1]:.4f} at step 12"
    assert caplog.messages[-2].startswith(f"Saved: the weights of step {step} {known}; --keep_last saves")
    run([*flags, "--model_name", str(tmp_path / "good/job"), "--full_finetuning", *ruin, "--keep_last"], tmp_path / "2")
    assert_same_weights(tmp_path / "2/job", tmp_path / "job/checkpoint-12")
    assert caplog.messages[-2] == f"Saved: the weights of step 12 {known}."
    assert (tmp_path / f"2/job/checkpoint-{step}").is_dir()
    again = [*flags, "--model_name", str(tmp_path / "good/job"), "--full_finetuning", *ruin, "--resume"]
    for keep_last, saved in (["--keep_last"], "job/checkpoint-12"), ([], f"job/checkpoint-{step}"):
        assert run([*again, *keep_last], tmp_path) is None
        assert_same_weights(tmp_path / "job", tmp_path / saved)
        assert caplog.messages[-2].startswith(f"Saved: the weights of step {saved.partition('-')[2]} of 12.")


def test_a_best_checkpoint_that_was_damaged_since_is_not_taken_for_the_model(flags, tmp_path):
    """It is read at the end of the run, long after it was written."""
    ruin = ["--max_steps", "6", "--eval_steps", "2", "--learning_rate", "1e-2", "--lora_r", "2"]
    trainer = run([*flags, *ruin, "--weight_decay", "0"], tmp_path)
    best = Path(str(trainer.state.best_model_checkpoint))
    trainer.check_best(best)
    flip_bit(best / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged \(its checksum is not that of what"):
        trainer.check_best(best)
    with pytest.raises(ValueError, match=r"checkpoint-99, the best checkpoint of this run, is missing"):
        trainer.check_best(best.with_name("checkpoint-99"))
    (tmp_path / "job/trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged"):
        run([*flags, *ruin, "--weight_decay", "0", "--resume"], tmp_path)


def test_a_resume_needs_the_best_checkpoint_and_finds_it_in_a_folder_that_was_moved(flags, tmp_path, caplog):
    """At a rate of 0 all evaluations are equal, and the first is the best."""
    caplog.set_level("INFO")
    still = ["--learning_rate", "0", "--eval_steps", "2", "--lora_r", "2"]
    run(flags, tmp_path / "before", *still, "--max_steps", "4")
    (tmp_path / "before").rename(tmp_path / "after")
    trainer = run(flags, tmp_path / "after", *still, "--max_steps", "6", "--resume")
    best = tmp_path / "after/job/checkpoint-2"
    assert Path(trainer.state.best_model_checkpoint) == best
    assert caplog.messages[-2].startswith("Saved: the weights of step 2 of 6.")
    shutil.rmtree(best)
    again = [*still, "--max_steps", "8", "--resume"]
    with pytest.raises(ValueError, match=r"checkpoint-2, the best checkpoint of this run, is missing: .* --keep_last"):
        run(flags, tmp_path / "after", *again)
    assert run(flags, tmp_path / "after", *again, "--keep_last").state.global_step == 8
    assert run(flags, tmp_path / "after", *again) is None  # finished: the model stays that of the last step
    saved = [message for message in caplog.messages if message.startswith("Saved: ")]
    assert [message.partition(".")[0] for message in saved[-2:]] == ["Saved: the weights of step 8 of 8"] * 2


def test_a_run_that_continues_in_another_folder_takes_the_best_checkpoint_of_the_first(flags, tmp_path):
    """It was killed before it saved its model."""
    still = ["--learning_rate", "0", "--eval_steps", "2", "--lora_r", "2"]
    run(flags, tmp_path / "first", *still, "--max_steps", "2")
    best = tmp_path / "first/job/checkpoint-2"
    trainer = run(flags, tmp_path, *still, "--max_steps", "4", "--resume", str(best))
    assert Path(trainer.state.best_model_checkpoint) == best
    again = [*still, "--max_steps", "4", "--resume"]
    weights_file = tmp_path / "job/adapter_model.safetensors"
    weights_file.unlink()
    assert run(flags, tmp_path, *again) is None
    assert weights_file.read_bytes() == (best / weights_file.name).read_bytes()
    shutil.rmtree(best)
    assert run(flags, tmp_path, *again) is None
    weights_file.unlink()
    with pytest.raises(ValueError, match=rf"{best}, the best checkpoint of this run, is missing: .* --keep_last"):
        run(flags, tmp_path, *again)


def test_an_adapter_gets_a_card_which_a_finished_run_keeps(flags, tiny_model_dir, tmp_path):
    """PEFT's own card names folders of this machine."""
    short, card = ["--max_steps", "2", "--eval_steps", "2", "--lora_r", "2"], tmp_path / "job/README.md"
    run(flags, tmp_path, *short)
    assert not [path for path in (tmp_path, tiny_model_dir) if str(path) in card.read_text()]
    card.write_text(f"{card.read_text()}With results that were added since.")
    run(flags, tmp_path, *short, "--resume")
    assert card.read_text().endswith("added since.")


def test_resume_of_a_finished_run(flags, tmp_path):
    moving = [*flags, "--learning_rate", "1e-3", "--max_steps", "2", "--full_finetuning"]
    run(moving, tmp_path / "done")
    expected = weights(tmp_path / "done/job")
    (tmp_path / "done/job/trainer_state.json").unlink()  # as if it had been killed right after its last checkpoint
    (tmp_path / "done/job/model.safetensors").write_bytes(b"")
    assert run(moving, tmp_path / "done", "--resume") is None
    assert len(history(tmp_path / "done", "train_loss")) == 0
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(tmp_path / "done/job").items())


def test_a_tied_head_is_no_missing_weight_and_any_other_is_an_error(flags, tiny_model_dir, tmp_path, caplog):
    """The best checkpoint is loaded at the end, and the last one for a resume."""
    shutil.copytree(tiny_model_dir, tmp_path / "tied")
    edit_json(tmp_path / "tied/config.json", tie_word_embeddings=True)
    parts = load_file(tiny_model_dir / "model.safetensors")
    del parts["lm_head.weight"]
    save_file(parts, tmp_path / "tied/model.safetensors", metadata={"format": "pt"})
    moving = [*flags, "--model_name", str(tmp_path / "tied"), "--full_finetuning", "--eval_steps", "2"]
    run(moving, tmp_path, "--max_steps", "2")
    trainer = run(moving, tmp_path, "--max_steps", "4", "--resume")
    assert "missing" not in caplog.text
    parts = load_file(tmp_path / "job/checkpoint-4/model.safetensors")
    assert "lm_head.weight" not in parts
    del parts["model.norm.weight"]
    save_file(parts, tmp_path / "job/checkpoint-4/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "job/checkpoint-4/checksums.json").unlink()
    write_sums(tmp_path / "job/checkpoint-4", trainer.args)
    with pytest.raises(ValueError, match=r"missing \['model\.norm\.weight'\], unexpected \[\]"):
        run(moving, tmp_path, "--max_steps", "6", "--resume")


def test_an_adapter_on_a_released_format_alarms_nobody(flags, tiny_model_dir, tmp_path):
    """PEFT reads the base's config.json as that of the class that runs it."""
    export(str(tiny_model_dir), str(tmp_path / "llada"), "llada")
    short = [*flags, "--model_name", str(tmp_path / "llada"), "--max_steps", "1", "--lora_r", "2", "--debugging"]
    log = forks.finish(start(short, tmp_path), tmp_path / "log")
    assert (tmp_path / "job/adapter_model.safetensors").exists()
    assert "You are using a model of type" not in log


NO_GPU = pytest.mark.skipif(on_gpu(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--template", "{question}", "{attempt}", "--data_function", "a.py:b"], "use one of"),
        (["--full_finetuning", "--merge_at_end"], "need LoRA"),
        (["--test_split", "0", "--eval_draws", "8"], "--eval_draws 8 would do nothing: --test_split 0 holds out"),
        (["--full_finetuning", "--dtype", "bfloat16"], "--full_finetuning trains all weights in float32"),
        pytest.param(["--packing", "--attn_implementation", "flex_attention"], "trains on a GPU only", marks=NO_GPU),
    ],
)
def test_arguments_that_cannot_work_are_refused(flags, tmp_path, more, problem):
    with pytest.raises(ValueError, match=problem):
        run(flags, tmp_path, *more)
    assert not list(tmp_path.iterdir())


def test_a_batch_is_no_larger_than_the_data(flags, tmp_path):
    """32 rows are trained on: in larger batches nothing is computed for the rows that they leave empty."""
    how = ["--num_epochs", "2", "--grad_accum_steps", "2", "--logging_steps", "1", "--lora_r", "2"]
    for batch in ("32", "640"):
        run(flags, tmp_path / batch, *how, "--batch_size", batch)
    assert len(history(tmp_path / "640", "loss")) == 2
    assert_same_weights(tmp_path / "640/job", tmp_path / "32/job")


def test_the_first_row_is_shown_unless_the_run_is_quiet(flags, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = tmp_path / "rows.jsonl"
    turns = [("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    own = [*flags, "--train_data", str(rows), "--test_split", "0", "--max_steps", "1", "--assistant_only_loss"]
    run(own, tmp_path / "loud")
    (shown,) = [message for message in caplog.messages if message.startswith("The first row, ")]
    text = shown.partition("\n")[2]
    assert [part.partition("]]")[0].split("<")[0].strip() for part in text.split("[[")[1:]] == ["b c", "e"]
    caplog.clear()
    run(own, tmp_path / "quiet", "--quiet")
    assert not [message for message in caplog.messages if message.startswith("The first row, ")]


def test_a_run_reads_columns_as_a_whole(flags, tmp_path, monkeypatch):
    """Cell by cell, a start with many rows took several times as long."""

    def fail(column):
        raise AssertionError("read cell by cell")

    monkeypatch.setattr(Column, "__iter__", fail)
    assert run(flags, tmp_path, "--max_steps", "1", "--lora_r", "2").state.global_step == 1


def test_a_plain_chat_template_comes_on_request(flags, tiny_model_dir, tmp_path):
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    without = [*flags, "--model_name", str(base), "--max_steps", "1"]
    with pytest.raises(ValueError, match="has no chat template: --plain_chat_template gives it one"):
        run(without, tmp_path)
    run(without, tmp_path, "--plain_chat_template")
    assert load_tokenizer(str(tmp_path / "job")).chat_template == PLAIN_CHAT_TEMPLATE


def test_rows_and_names_that_do_not_fit_the_model_are_refused(flags, tmp_path):
    for padding in ("max", "9999"):
        with pytest.raises(ValueError, match=rf"4096 tokens of text exceed .* --eos_padding {padding} fills rows"):
            run(flags, tmp_path, "--eos_padding", padding)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 600, "completion": "b"}) + "\n")
    with pytest.raises(ValueError, match=r"60\d tokens of text exceed the model's 512 positions: lower --max_length"):
        run(flags, tmp_path, "--train_data", str(tmp_path / "long.jsonl"), "--test_split", "0")
    for name, content in (("a.jsonl", "\n\n"), ("c.json", "[]"), ("d.csv", "prompt,completion\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name} has no rows|cannot read .*{name}: Expected object"):
            run(flags, tmp_path, "--train_data", str(tmp_path / name))
    with pytest.raises(ValueError, match=r"has no modules c_attn for LoRA: use attention, all-linear or"):
        run(flags, tmp_path, "--lora_target_modules", "c_attn")


def test_bf16_weights_with_an_fp32_adapter(flags, tmp_path):
    for dtype in ("float32", "bfloat16"):
        trainer: Any = run(flags, tmp_path / dtype, "--max_steps", "3", "--learning_rate", "1e-3", "--dtype", dtype)
    assert {weight.dtype for weight in trainer.model.parameters() if not weight.requires_grad} == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    found, expected = (history(tmp_path / dtype, "eval_loss") for dtype in ("bfloat16", "float32"))
    assert found == pytest.approx(expected, rel=5e-3)
    assert found[-1] < found[0]


def test_qlora_with_a_causal_context(tiny_model_dir, tmp_path):
    pytest.importorskip("bitsandbytes")
    write_wide(tmp_path / "base", tiny_model_dir)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "completion": "2 2 2 2"}\n' * 10)
    flags = ["--model_name", str(tmp_path / "base"), "--train_data", str(tmp_path / "rows.jsonl"), "--load_in_4bit"]
    flags += ["--test_split", "0.2", "--batch_size", "4", "--max_steps", "6", "--learning_rate", "3e-3"]
    trainer: Any = run(flags, tmp_path)
    assert trainer.model.get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    losses = history(tmp_path, "eval_loss")
    assert losses[-1] < 0.9 * losses[0]
    assert all(".lora_" in name for name, weight in trainer.model.named_parameters() if weight.requires_grad)


def test_qlora(flags, tiny_model_dir, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = tmp_path / "base"  # 4-bit blocks have 64 weights: the tiny model's layers are too small
    config = LlamaConfig.from_pretrained(tiny_model_dir)
    config.update({"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32})
    LlamaForCausalLM(config).save_pretrained(base)
    load_tokenizer(str(tiny_model_dir)).save_pretrained(base)
    more = ["--load_in_4bit", "--max_steps", "12", "--learning_rate", "3e-3"]
    trainer: Any = run([*flags, "--model_name", str(base)], tmp_path, *more)
    assert trainer.model.get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    losses = history(tmp_path, "eval_loss")
    assert losses[-1] < 0.9 * losses[0]
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert (logits(tmp_path / "job") - logits(base)).abs().max() > 0.01
