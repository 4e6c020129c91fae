"""A mask token in the text that a model is given: every command refuses it, by one rule.

Tests of `d1 serve` (tests/d1/serve), SFT, distillation and `d1 fill` are with theirs.
"""

import json

import pytest
from datasets import Dataset

from d1.eval import run as evaluation
from d1.eval.completions import read_prompts
from d1.models import load_tokenizer
from d1.models.tokenizer import check_no_mask, encode_prompt, encode_prompts, render_prompt
from d1.rl.config import DiffuGRPOConfig
from d1.rl.stage import Tools, longest_prompt
from d1.tasks import load_task
from tests.tiny_grpo import make_trainer

REFUSED = "the mask token <mask> is in the text"
TASK = """
from datasets import Dataset
REWARDS = [lambda completions, **columns: [0.0] * len(completions)]
def load_rows(split, data_file=None):
    questions = ["a", QUESTION]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    return Dataset.from_list(
        [{"prompt": p, "question": q, "ground_truth": "a"} for p, q in zip(prompts, questions)]
    )
def extract(text):
    return text
def score(text, row):
    return {"accuracy": 0.0}
"""


def chats(*questions):
    return [[{"role": "user", "content": question}] for question in questions]


def test_text_with_a_mask_token_is_no_prompt(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    for text in ("<mask>", "a <mask> b", "a<mask>"):
        with pytest.raises(ValueError, match=REFUSED):
            encode_prompt(tokenizer, text)
    assert encode_prompt(tokenizer, "a < mask > b")
    assert encode_prompt(tokenizer, "<eos> a <user>")  # other special tokens, which templates write, too
    with pytest.raises(ValueError, match="the mask token b is in the text"):
        check_no_mask(tokenizer, encode_prompt(tokenizer, "a b"), tokenizer.convert_tokens_to_ids("b"))


@pytest.mark.parametrize("shot", ["a <mask>", "a"])
def test_evaluation_names_the_problem(tiny_model_dir, tmp_path, shot):
    task = tmp_path / "own.py"
    task.write_text(TASK.replace("QUESTION", json.dumps(shot)))
    flags = ["--model_path", str(tiny_model_dir), "--dataset", str(task), "--output_dir", str(tmp_path)]
    args = evaluation.make_parser().parse_args(flags)
    given = args, load_task(str(task)), load_tokenizer(tiny_model_dir)
    if "<mask>" not in shot:
        assert len(read_prompts(*given)) == 2
        return
    with pytest.raises(ValueError, match=rf"^problem 1 \(from 0\): {REFUSED}"):
        read_prompts(*given)


def test_rl_encodes_all_prompts_at_once(tiny_model_dir, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(tiny_model_dir)
    prompts = [*chats("a", "b c", "d" * 30), [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]]
    single = [encode_prompt(tokenizer, render_prompt(tokenizer, prompt)) for prompt in prompts]
    assert encode_prompts(tokenizer, prompts) == single
    assert encode_prompts(tokenizer, chats("a", "a <mask>")) is None
    assert encode_prompts(tokenizer, [*chats("a"), [{"role": "user", "content": [{"type": "image"}]}]]) is None
    args = DiffuGRPOConfig(output_dir=str(tmp_path), report_to="none")
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts[:3]])
    monkeypatch.setattr("d1.rl.stage.render_prompt", None)  # only after an error
    longest = longest_prompt(rows, tokenizer, args, Tools(args))
    assert longest == max(map(len, single[:3]))


def test_rl_names_the_problem_before_the_model_is_loaded(tiny_model_dir, tmp_path):
    tokenizer = load_tokenizer(tiny_model_dir)
    args = DiffuGRPOConfig(output_dir=str(tmp_path), report_to="none")
    rows = Dataset.from_list([{"prompt": prompt} for prompt in chats("a", "b", "a <mask>")])
    with pytest.raises(ValueError, match=rf"^problem 2 \(from 0\): {REFUSED}"):
        longest_prompt(rows, tokenizer, args, Tools(args))
    assert longest_prompt(rows.select([0, 1]), tokenizer, args, Tools(args)) > 0
    args.mask_id = tokenizer.convert_tokens_to_ids("b")
    with pytest.raises(ValueError, match=r"^problem 1 \(from 0\): the mask token b is in the text"):
        longest_prompt(rows, tokenizer, args, Tools(args))


def test_a_trainer_refuses_it_in_its_own_rows(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path)
    assert len(trainer.encoded(chats("a", "b"))) == 2
    with pytest.raises(ValueError, match=REFUSED):
        trainer.encoded(chats("a", "a <mask>"))
