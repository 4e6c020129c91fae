"""Hints: parts of a row's worked solution on the canvases of groups that are all wrong, and IGPO's use of them."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from d1.masking import keyed_generator
from d1.models import load_tokenizer
from d1.rl.bridge import ACCURACY, REWARD, rollout_buffer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.hinted import choose_replacements
from d1.rl.hints import HINTS, TRACE, Hint
from d1.rl.losses import OBJECTIVES, PENALTIES, LossInputs
from d1.rl.methods.igpo import draw_chunks, kept_tokens, place_chunks
from d1.rl.rewards import SPEED
from d1.rl.stage import WatchGroups, check_trace_texts, never_differed
from d1.rl.trainer import DiffuGRPOTrainer
from tests.commands import ROOT
from tests.losses import settings, trl_loss, trl_trainer
from tests.rounding import LOGITS, assert_near
from tests.tiny_grpo import SETTINGS, by_letter, logged, make_method, make_trainer, repeats_letter, rows

# --- Which parts, and where -------------------------------------------------------------------------------------------


def test_chunks_lie_where_the_release_puts_them():
    """A trace of 100 tokens on a canvas of 256 is stretched by 1.5: chunks (10, 16), (30, 37) at 15-20, 42-48."""
    given = place_chunks(range(1000, 1100), [(10, 16), (30, 37)], 256, 1.5)
    assert given[15:21].tolist() == [*range(1010, 1016)]
    assert given[42:49].tolist() == [*range(1030, 1037)]
    assert (given >= 0).sum() == 13
    assert place_chunks(range(400), [(0, 5), (200, 205)], 256, 1.0)[105:110].tolist() == [*range(200, 205)]  # gap 100


@pytest.mark.parametrize("length", [0, 4, 5, 40, 150, 226, 500])
def test_a_random_share_of_the_chunks_of_a_trace_is_shown_in_its_order(length):
    """Tokens are numbered by their place in the trace, so that places tell which chunks are shown."""
    shares = []
    for seed in range(60):
        given = draw_chunks(range(length), 256, keyed_generator(seed))
        assert torch.equal(given, draw_chunks(range(length), 256, keyed_generator(seed)))
        shown = given[given >= 0].tolist()
        assert shown == sorted(set(shown))  # each once, in the order of the trace
        assert all(k < min(length, 226) for k in shown)
        assert not (given[226:] >= 0).any()
        at = (given >= 0).nonzero().flatten().tolist()
        # Where consecutive tokens of the trace are neighbours on the canvas, they are of one chunk or of two.
        runs, before = [], None
        for position, token in zip(at, shown, strict=True):
            if before == (position - 1, token - 1):
                runs[-1] += 1
            else:
                runs.append(1)
            before = position, token
        assert all(run >= 5 for run in runs)
        shares.append(len(shown) / max(min(length, 226), 1))
    if length < 5:
        assert not any(shares)
    elif length >= 150:  # of n chunks, floor(n (1 - ratio)) are hidden: at least the ratio is shown
        assert min(shares) > 0.1
        assert max(shares) < 0.75
        assert 0.38 < sum(shares) / 60 < 0.5
    else:
        assert min(shares) > 0


def test_at_most_so_many_right_rows_replace_the_first_ones_of_unsolved_groups():
    unsolved = torch.tensor([True, False, True, True])
    right = torch.tensor([[False, True, True, True], [True] * 4, [False] * 4, [False, False, False, True]])
    drawn = set()
    for seed in range(50):
        source = choose_replacements(unsolved, right, 2, keyed_generator(seed)).view(4, 4).tolist()
        assert source[1] == source[2] == [-1] * 4
        assert source[3] == [15, -1, -1, -1]
        assert source[0][2:] == [-1, -1]
        assert {*source[0][:2]} < {1, 2, 3}
        drawn.add(tuple(source[0][:2]))
    assert len(drawn) == 6  # every ordered pair


def test_a_hint_function_that_returns_something_else_is_named():
    wrong = Hint(lambda trace, gen_length, generator: torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"<lambda> .* returned a tensor of shape \(3,\).*: expected int64 ids of shape"
    ):
        wrong([1, 2], 8, keyed_generator(0))


# --- IGPO's loss ------------------------------------------------------------------------------------------------------


def worked_example():
    """G 8, A 1.5 and -1.5, sums of log-ratios .8 and -.4; five tokens of the first row were given."""
    logps = torch.stack([torch.full((1, 8), 0.1), torch.full((1, 8), -0.05)]).double() - 1
    return LossInputs(
        view_logps=logps.requires_grad_(),
        view_old=-torch.ones(2, 1, 8, dtype=torch.float64),
        view_reference=torch.linspace(-2, -0.5, 16, dtype=torch.float64).view(2, 1, 8),
        weights=torch.ones(2, 1, 8, dtype=torch.float64),
        advantages=torch.tensor([1.5, -1.5], dtype=torch.float64),
        mask=torch.ones(2, 8),
        tokens=torch.tensor(16),
        given=torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1], [0] * 8]).bool(),
        old_entropies=torch.tensor([[9.0, 1, 2, 1, 9, 9, 3, 2], [1] * 8]),
    )


def test_the_loss_is_that_of_the_worked_example_and_its_filter_reaches_all_given_tokens_alike():
    inputs, run = worked_example(), settings(epsilon=0.2, epsilon_high=None)
    loss, _ = OBJECTIVES["igpo"](inputs, run)
    assert loss.item() == pytest.approx(0.398644, abs=1e-6)
    assert kept_tokens(inputs)[0].tolist() == [True, False, False, False, True, True, True, False]
    [slopes] = torch.autograd.grad(loss, inputs.view_logps)
    # As released: the ratio is over all tokens, and so is the gradient, whatever the filter keeps.
    assert torch.unique(slopes[0]).numel() == 1
    assert (slopes != 0).all()
    reference, logps = inputs.view_reference[:, 0], inputs.view_logps[:, 0]
    k3 = torch.exp(reference - logps) - (reference - logps) - 1
    kept = [k3[0, k].item() for k in (0, 4, 5, 6)] + [k3[1, k].item() for k in range(8)]
    assert PENALTIES["k3_kept"](inputs, run).item() == pytest.approx(sum(kept) / 12, rel=1e-12)


def test_the_penalty_of_one_token_is_its_k3_and_that_of_none_is_zero():
    inputs = replace(worked_example(), given=None)
    logps, reference = inputs.view_logps[0, 0, 2], inputs.view_reference[0, 0, 2]
    k3 = torch.exp(reference - logps) - (reference - logps) - 1
    mask = torch.zeros(2, 8)
    assert PENALTIES["k3_kept"](replace(inputs, mask=mask), settings()).item() == 0
    mask[0, 2] = 1
    assert PENALTIES["k3_kept"](replace(inputs, mask=mask), settings()).item() == pytest.approx(k3.item(), rel=1e-12)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (14, 2), (15, 3), (26, 5)])
def test_a_fifth_of_the_given_tokens_is_kept_but_at_least_one(count, kept):
    width = 30
    mask = torch.ones(1, width)
    given = (torch.arange(width) < count).unsqueeze(0)
    inputs = replace(
        worked_example(),
        view_logps=torch.zeros(1, 1, width),
        weights=torch.ones(1, 1, width),
        mask=mask,
        given=given,
        old_entropies=torch.arange(width).float().unsqueeze(0),
    )
    expected = {*range(count, width), *range(count - kept, count)}
    assert {*kept_tokens(inputs)[0].nonzero().flatten().tolist()} == expected
    assert kept == max(1, math.floor(0.2 * count))


def test_without_given_tokens_the_loss_is_trls_of_whole_rows(tiny_model_dir, tmp_path):
    from tests.losses import random_inputs

    inputs = replace(random_inputs(views=1, weights="one"), given=None)
    ours, _ = OBJECTIVES["igpo"](inputs, settings(epsilon=0.2, epsilon_high=0.35))
    trainer = trl_trainer(tiny_model_dir, tmp_path)
    trls, _ = trl_loss(trainer, inputs, importance_sampling_level="sequence", loss_type="bnpo")
    torch.testing.assert_close(ours, trls * trainer.current_gradient_accumulation_steps, rtol=1e-10, atol=0)


# --- Rollouts with hints ----------------------------------------------------------------------------------------------


class Recorder(DiffuGRPOTrainer):
    """Keeps the rollout's batch as it was before and after hints."""

    def complete_rows(self, batch):
        self.before = dict(batch)
        super().complete_rows(batch)
        self.after = dict(batch)


@pytest.fixture(scope="module")
def hinted(tiny_model_dir, tmp_path_factory):
    """A trainer of IGPO after one step on three groups, two of which can be solved with hints only."""

    def accuracy(completions, letter, **columns):
        is_right = repeats_letter(completions, letter)
        return [1.0 if wanted == solved else right for wanted, right in zip(letter, is_right, strict=True)]

    accuracy.is_accuracy = True
    order = Recorder.rows_of
    trainer = make_method(
        tiny_model_dir,
        tmp_path_factory.mktemp("hinted"),
        "igpo",
        Recorder,
        per_device_train_batch_size=12,
        max_steps=1,
        reward=[by_letter, accuracy],
        min_speed_spread=1e-6,
    )
    solved = order(trainer, 0)[4]["letter"]
    trainer.train()
    return trainer, solved


def test_wrong_groups_are_sampled_again_with_parts_of_their_traces(hinted):
    trainer, _ = hinted
    before, after = trainer.before, trainer.after
    right = before[ACCURACY].view(3, 4)
    assert right.sum(1).tolist() == [0, 4, 0]
    assert torch.equal(after["canvas_ids"][4:8], before["canvas_ids"][4:8])  # the solved group stays
    assert torch.equal(after["advantages"][4:8], before["advantages"][4:8])
    assert not after["given"][4:8].any()
    letters = [row["letter"] for row in trainer.rows]
    for group in (0, 2):
        replaced = after["given"][4 * group :][:4].any(1).tolist()
        assert replaced == [True, True, False, False]  # hint_rows 2
        for row in range(4 * group, 4 * group + 4):
            text = trainer.text_tokenizer.decode(after["canvas_ids"][row])
            given = after["given"][row]
            if not given.any():
                assert torch.equal(after["canvas_ids"][row], before["canvas_ids"][row])
                continue
            tokens = after["completion_mask"][row].sum().item()
            passes = after["reveal_steps"][row].max().item() + 1
            assert after[SPEED][row].item() == pytest.approx(tokens / passes)
            assert after[SPEED][row] != before[SPEED][row]
            assert after[ACCURACY][row] == 1
            assert text.count(letters[row]) >= 3
            hints = trainer.text_tokenizer.decode(after["canvas_ids"][row][given]).replace(" ", "")
            assert hints == letters[row] * int(given.sum())
            assert (after["reveal_steps"][row][given] == -1).all()
            assert (after["reveal_steps"][row][~given] >= 0).all()
        rewards = after[REWARD][4 * group :][:4]
        assert_near(after["advantages"][4 * group :][:4], rewards - rewards.mean())
    texts = [trainer.text_tokenizer.decode(ids, skip_special_tokens=True) for ids in after["canvas_ids"]]
    [first, *_] = by_letter([[{"content": texts[0]}]])
    assert after[REWARD][0].item() == pytest.approx(first)
    [entry] = logged(trainer)
    assert entry["hints/unsolved"] == pytest.approx(2 / 3)
    assert entry["hints/solved"] == 1
    assert entry["hints/rows"] == pytest.approx(4 / 12)


def test_entropies_of_given_tokens_are_those_of_a_canvas_that_is_all_hidden(hinted, tiny_model_dir, tmp_path):
    """Under the policy before the first update, with an independent forward pass per row."""
    trainer, _ = hinted
    trainer = make_method(tiny_model_dir, tmp_path, "igpo", max_steps=1, learning_rate=0.0)
    trainer.train()
    [batch] = rollout_buffer(trainer)
    assert batch["given"].any()
    for row, mask in enumerate(batch["prompt_mask"].bool()):
        prompt = batch["prompt_ids"][row][mask]
        ids = torch.cat([prompt, torch.full((8,), trainer.mask_token_id)])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids.unsqueeze(0)).logits[0, -8:].double()
        logps = logits.log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1)
        assert_near(batch["old_entropies"][row].double(), entropies, least=LOGITS)


def test_a_run_that_learns_from_hints_is_not_said_to_learn_nothing(tiny_model_dir, tmp_path, caplog):
    """The only reward is the accuracy: each group is wrong until hints replace some of its rows."""

    def reward(completions, letter, **columns):
        return repeats_letter(completions, letter)

    trainer = make_method(tiny_model_dir, tmp_path, "igpo", max_steps=2, reward=[reward, repeats_letter])
    trainer.add_callback(WatchGroups())
    trainer.train()
    batch = torch.cat([batch["advantages"] for batch in rollout_buffer(trainer)])
    assert batch.any()
    assert logged(trainer)[0]["hints/unsolved"] == 1
    assert logged(trainer)[0]["hints/solved"] == 1
    assert logged(trainer)[0]["frac_reward_zero_std"] == 0
    assert not never_differed(trainer.state.log_history)
    assert "does not learn" not in caplog.text


def test_truncated_completions_with_hints_are_masked_like_the_others(tiny_model_dir, tmp_path):
    class Kept(DiffuGRPOTrainer):
        def after_rollout(self, batch):
            super().after_rollout(batch)
            self.batches = [*getattr(self, "batches", []), batch]

    options = {"max_steps": 4, "num_iterations": 1, "mask_truncated_completions": True, "ends": (2, 25, 28, 32)}
    trainer = make_method(tiny_model_dir, tmp_path, "igpo", Kept, **options)
    trainer.train()
    ends, counted = torch.tensor([2, 25, 28, 32]), []
    for batch in trainer.batches:
        is_complete = torch.isin(batch["canvas_ids"], ends).any(1)
        assert torch.equal(batch["completion_mask"].bool().any(1), is_complete)
        if "given" in batch:
            counted += is_complete[batch["given"].any(1)].tolist()
    assert {*counted} == {True, False}


def test_without_wrong_groups_a_run_is_the_same_with_hints(tiny_model_dir, tmp_path):
    """To the bit: hints have random numbers of their own."""

    def always(completions, **columns):
        return [1.0] * len(completions)

    always.is_accuracy = True
    found = []
    for hints in ("small_chunks", "none"):
        trainer = make_method(
            tiny_model_dir, tmp_path / hints, "igpo", hints=hints, hint_rows=4, reward=[by_letter, always]
        )
        trainer.train()
        found.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


REFUSED = [
    ({"hints": "few"}, "--hints must be one of none, chunks"),
    ({"estimator": "replay", "p_mask_prompt": 0.0}, "no step revealed the given tokens, which replay replays"),
    ({"scale_rewards": "group"}, "computes advantages of changed groups as rewards minus their mean"),
    ({"refills": 2, "right_share": [0.1, 0.9]}, "refills 2 replaces prompts: set --refills 0"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_contradicts_hints_is_refused_before_a_model_is_loaded(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        DiffuGRPOConfig(output_dir=str(tmp_path), **{"hints": "small_chunks", **changes})


def test_a_solution_that_the_model_cannot_read_is_named():
    rows = Dataset.from_dict({TRACE: ["a1 b1", "a1 €"]})
    tokenizer = load_tokenizer(ROOT / "pocket/base")  # without a token for unknown characters
    with pytest.raises(ValueError, match=r"row 1, column 'trace': .*pocket/base.* no token for '€'"):
        check_trace_texts(rows, tokenizer, DiffuGRPOConfig(hints="small_chunks", **SETTINGS))


def test_a_row_without_a_solution_is_named(tiny_model_dir, tmp_path):
    """A missing one was read as the text None."""
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 2, TRACE: ["a", None]})
    args = DiffuGRPOConfig(output_dir=str(tmp_path), hints="small_chunks", **SETTINGS)
    message = "row 1, column 'trace': None is no text: write the row's worked solution, or leave the row out"
    with pytest.raises(ValueError, match=message):
        check_trace_texts(rows, load_tokenizer(tiny_model_dir), args)
    rewards = [by_letter, repeats_letter]
    with pytest.raises(ValueError, match=message):
        DiffuGRPOTrainer(model=str(tiny_model_dir), reward_funcs=rewards, args=args, train_dataset=rows)


def test_a_trainer_without_traces_or_an_accuracy_is_refused(tiny_model_dir, tmp_path):
    plain = {"hints": "small_chunks", "max_steps": 1}
    with pytest.raises(ValueError, match="hints need to know which completions are right"):
        make_trainer(tiny_model_dir, tmp_path, **plain)
    without = functools.partial(make_trainer, tiny_model_dir, tmp_path, reward=[by_letter, repeats_letter], **plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tiny_grpo.rows", lambda count=12: rows(count).remove_columns("trace"))
        with pytest.raises(ValueError, match=r"takes hints from the column 'trace' of train_dataset.*prompt, letter"):
            without()
    with pytest.raises(ValueError, match=r"--hints small_chunks.* cannot: let the trainer sample"):
        without(rollout_func=lambda prompts, trainer: {})


def test_a_file_of_ones_own_adds_hints(tiny_model_dir, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom d1.rl.hints import Hint\n\n\ndef first_token(trace, gen_length, generator):\n"
        "    given = torch.full((gen_length,), -1)\n    given[0] = trace[0]\n    return given\n\n\n"
        'HINTS = {"first": Hint(first_token)}\nMETHOD = {"hints": "first"}\n'
    )
    config = DiffuGRPOConfig(output_dir=str(tmp_path), method=str(file))
    assert config.hints == "first"
    assert HINTS["first"]([5, 6], 4, keyed_generator(0)).tolist() == [5, -1, -1, -1]
