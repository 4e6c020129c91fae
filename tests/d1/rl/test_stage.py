"""Problems that a run keeps for display: the same ones before and after training, and whether each is solved."""

import json
from types import SimpleNamespace

import pytest
import torch

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.report import ShowProblems
from d1.rl.trainer import STREAMS
from d1.sampling import generate
from d1.show.report import SHOWN_FILE
from tests.tiny_grpo import by_letter, logged, make_trainer, rows, weights

FEW = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.01}
LOGGED = ("loss", "reward", "compute_tokens", "completions/mean_length", "entropy")


def even(text):
    return len(text) % 2 == 0


TASK = SimpleNamespace(score=lambda text, row: {"accuracy": float(even(text))})


def trained(model_dir, folder, shown=True, resume=None, **changes):
    trainer = make_trainer(model_dir, folder, reward=by_letter, **(FEW | changes))
    if shown:
        trainer.add_callback(ShowProblems(trainer, TASK, rows()))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def kept_in(folder):
    return json.loads((folder / SHOWN_FILE).read_text())


def sampled(model, tokenizer, settings, seed):
    """The tokens of the first eight problems, sampled one by one with the random numbers of an evaluation."""
    found = []
    for number, row in enumerate(rows().select(range(8))):
        random = {"generator": [keyed_generator(seed, STREAMS["rollout", "eval"], 0, number)]}
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        random |= {"mask_token_id": tokenizer.mask_token_id}
        whole = generate(model.eval(), ids, torch.ones_like(ids), settings, **random)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def unbroken(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, trained(tiny_model_dir, folder)


def test_both_times_they_are_what_the_weights_sample_and_judged_by_the_task(unbroken, tiny_model_dir):
    folder, trainer = unbroken
    tokenizer, kept = load_tokenizer(tiny_model_dir), kept_in(folder)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert [film["tokens"] for film in kept["before"]] != [film["tokens"] for film in kept["after"]]
    for when, model in (("before", load_model(str(tiny_model_dir))), ("after", trainer.model)):
        expected = sampled(model, tokenizer, trainer.sampling, trainer.args.seed)
        for film, ids in zip(kept[when], expected, strict=True):
            end = next((position for position, token in enumerate(ids) if token in ends), len(ids))
            texts = [tokenizer.decode([token]).strip() for token in ids[:end]]
            assert [token.strip() for token in film["tokens"][:end]] == texts
            assert film["solved"] == even(tokenizer.decode(ids[:end], skip_special_tokens=True))
    assert [film["prompt"] for film in kept["before"]] == [film["prompt"] for film in kept["after"]]


def test_a_run_that_shows_problems_takes_the_steps_of_one_that_does_not(unbroken, tiny_model_dir, tmp_path):
    plain, (_, shown) = trained(tiny_model_dir, tmp_path, shown=False), unbroken
    for name, value in weights(plain.model).items():
        assert torch.equal(value, weights(shown.model)[name]), name
    for a, b in zip(logged(plain), logged(shown), strict=True):
        assert [a.get(name) for name in LOGGED] == [b.get(name) for name in LOGGED]


def test_a_resumed_run_keeps_the_problems_before_and_a_new_one_replaces_them(unbroken, tiny_model_dir, tmp_path):
    folder, _ = unbroken
    kept = kept_in(folder)
    (tmp_path / SHOWN_FILE).write_text(json.dumps({"before": kept["before"]}))
    trained(tiny_model_dir, tmp_path, resume=str(folder / "checkpoint-2"))
    assert kept_in(tmp_path) == kept
    (tmp_path / SHOWN_FILE).write_text(json.dumps({"before": kept["after"], "after": kept["before"]}))
    trained(tiny_model_dir, tmp_path)
    assert kept_in(tmp_path) == kept
