"""Completions that a run keeps for display: the best, median and worst of its first and of its latest rollout."""

import json

import pytest

from d1.models import load_tokenizer
from d1.rl.curves import SHOWN_FILE
from d1.rl.shown_rollouts import ShowRollouts
from tests.tiny_grpo import TWO_BATCHES_A_STEP, by_letter, make_trainer

FEW = {"max_steps": 3, "save_steps": 1}  # of two micro-batches of one rollout each, mu = 2: rollouts 1 and 2


class Noting:
    """A reward that records the texts of each rollout with their rewards."""

    __name__ = "by_letter"

    def __init__(self):
        self.rollouts = []

    def __call__(self, completions, **columns):
        rewards = by_letter(completions)
        self.rollouts.append(
            {completion[0]["content"]: reward for completion, reward in zip(completions, rewards, strict=True)}
        )
        return rewards


def trained(model_dir, folder, reward, resume=None, **changes):
    trainer = make_trainer(model_dir, folder, reward=reward, **(TWO_BATCHES_A_STEP | FEW | changes))
    trainer.add_callback(ShowRollouts(trainer))
    trainer.train(resume_from_checkpoint=resume)
    return json.loads((folder / SHOWN_FILE).read_text())


def text_of(film, tokenizer):
    """The text to which a film's reward belongs: up to the end, without special tokens."""
    ids = tokenizer.convert_tokens_to_ids([token.strip() for token in film["tokens"]])
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
    return tokenizer.decode(ids[:end], skip_special_tokens=True)


@pytest.fixture(scope="module")
def unbroken(tiny_model_dir, tmp_path_factory):
    folder, reward = tmp_path_factory.mktemp("run"), Noting()
    return folder, reward, trained(tiny_model_dir, folder, reward)


def test_first_and_latest_rollout_keep_the_extremes_by_reward_as_they_were_sampled(unbroken, tiny_model_dir):
    _, reward, kept = unbroken
    tokenizer = load_tokenizer(tiny_model_dir)
    assert (kept["first"]["rollout"], kept["last"]["rollout"]) == (1, len(reward.rollouts))
    assert len(reward.rollouts) == 2
    for end, texts in (("first", reward.rollouts[0]), ("last", reward.rollouts[-1])):
        films, order = kept[end]["films"], sorted(texts.values())
        expected = {"best": order[-1], "worst": order[0]}
        for name, value in expected.items():
            assert films[name]["note"] == f"reward {value:.3g}"
        for film in films.values():
            assert film["note"] == f"reward {texts[text_of(film, tokenizer)]:.3g}"
            assert len(film["tokens"]) == len(film["steps"]) == 8
            assert set(film["steps"]) <= {-1, 0, 1, 2, 3}
            assert all(logp <= 0 for logp in film["logps"])
            assert film["prompt"].startswith(tokenizer.bos_token)


def test_a_resumed_run_keeps_the_first_rollout_it_had(unbroken, tiny_model_dir, tmp_path):
    folder, _, kept = unbroken
    (tmp_path / SHOWN_FILE).write_text(json.dumps({"first": kept["first"], "last": kept["first"]}))
    again = trained(tiny_model_dir, tmp_path, by_letter, resume=str(folder / "checkpoint-1"))
    assert again == kept


def test_a_run_from_the_start_keeps_nothing_of_another(unbroken, tiny_model_dir, tmp_path):
    kept = unbroken[2]
    (tmp_path / SHOWN_FILE).write_text(json.dumps({"first": kept["last"], "last": kept["last"]}))
    assert trained(tiny_model_dir, tmp_path, by_letter) == kept
