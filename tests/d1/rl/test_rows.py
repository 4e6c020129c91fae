"""A user's own rows: each mistake is one line at the start, and a row's attributes decide what is checked and
computed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d1.rl.batch import loss_inputs
from d1.rl.bridge import rollout_buffer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import ADVANTAGES, OBJECTIVES, PENALTIES, Advantage, Objective, Penalty
from d1.scoring import ESTIMATORS, Estimator, Scores
from d1.scoring.spg import draw as draw_blocks
from tests.losses import gradient, random_inputs, settings
from tests.tiny_grpo import SETTINGS, logged, make_method, make_trainer, weights

PUSH = Path(__file__).parents[2] / "my_method.py"
HEAD = """
import torch
from d1.rl.losses import Advantage, Objective, Penalty
from d1.scoring import Estimator, Views

def per_row(inputs): return (inputs.logps * inputs.mask).sum(-1)
"""


def config(**given):
    return DiffuGRPOConfig(**{"output_dir": "unused", "per_device_train_batch_size": 8, "num_generations": 4, **given})


# What a file defines around the expression that its function f returns.
LOSS = "def f(inputs, settings): {}\nMETHOD = {{'objective': 'mine', 'beta': 0}}\nOBJECTIVES = {{'mine': Objective(f)}}"
FREE = LOSS.replace("(f)", "(f, reads_old=False)")
KL = "def f(inputs, settings): {}\nMETHOD = {{'kl': 'mine', 'beta': 0.1}}\nPENALTIES = {{'mine': Penalty(f)}}"
TO_OLD = KL.replace("(f)", "(f, to='old')")
ADVANTAGE = "def f(groups): {}\nMETHOD = {{'advantage': 'mine'}}\nADVANTAGES = {{'mine': Advantage(f)}}"
VIEWS = "def f(sampled, random, settings): {}\nMETHOD = {{'estimator': 'mine'}}\nESTIMATORS = {{'mine': Estimator(f)}}"
TWO = "noise = torch.ones(3, 2, 11, dtype=bool); weights = torch.ones(3, 2, 8); "
GROWING = VIEWS.replace("(f)}", "(f, views=lambda settings: 2)}")
FOURTH = "size = sampled.gen_length; noise = torch.ones(3, size // 4, 3 + size, dtype=bool); "
FOURTH += "weights = torch.ones(3, size // 4, size); "
ROW = "[A-Z]+\\['mine'\\]: f \\(.*mine.py, line 7\\)"
MISTAKES = [
    (LOSS, "return None", "returned None: expected a pair"),
    (LOSS, "return per_row(inputs).mean()", r"returned a tensor of shape \(\): expected a pair \(loss, metrics\)"),
    (LOSS, "return per_row(inputs), {}", r"returned a tensor of shape \(3,\): expected a scalar tensor with"),
    (LOSS, "return per_row(inputs).mean().detach(), {}", r"returned a tensor of shape \(\) without gradient"),
    (LOSS, "return 0.0, {}", "returned float 0.0: expected a scalar tensor"),
    (LOSS, "return per_row(inputs).mean(), {'text': 'much'}", "gave the metric 'text': str 'much', expected a number"),
    (LOSS, "return per_row(inputs).mean(), {'mean': inputs.lengths}", r"the metric 'mean': a tensor of shape \(3,\)"),
    (LOSS, "return inputs.no_such_thing", "AttributeError in line 7: .* no attribute 'no_such_thing'"),
    (LOSS, "return settings.no_such_thing", "AttributeError in line 7: .* no attribute 'no_such_thing'"),
    (LOSS, "return inputs.view_logps.exp_().exp_().mean() * inputs.logps.mean(), {}", "RuntimeError in line"),
    (FREE, "return (per_row(inputs) - inputs.old).mean(), {}", "not scored: the entry must say reads_old=True"),
    (FREE, "return (inputs.view_logps - inputs.view_old).mean(), {}", "TypeError in line 7: unsupported operand"),
    (KL, "return None", "returned None: expected a scalar tensor with a gradient"),
    (KL, "return per_row(inputs)", r"returned a tensor of shape \(3,\): expected a scalar"),
    (KL, "return (inputs.logps - inputs.old).pow(2).mean()", "not scored: .* to='old' or 'reference'"),
    (TO_OLD, "return (inputs.logps - inputs.reference).pow(2).mean()", "TypeError in line 7"),
    (ADVANTAGE, "return None", r"returned None: expected floats of shape \(3, 4\)"),
    (ADVANTAGE, "return groups.mean(1)", r"returned a tensor of shape \(3,\).*: expected floats of shape \(3, 4\)"),
    (ADVANTAGE, "return groups > 0", "expected floats"),
    (VIEWS, "return None", "returned None: expected Views, of d1.scoring"),
    (VIEWS, TWO + "return Views(noise, weights)", "gave 2 views, but its entry says at most 1"),
    (GROWING, FOURTH + "return Views(noise, weights)", "gave 6 views, but its entry says at most 2"),
    (VIEWS, TWO + "return Views(noise, weights[:, :1])", "2 views have noise and 1 have weights"),
    (VIEWS, TWO + "return Views(noise[:, :, :8], weights)", r"views.noise must be \(3, views, 11\)"),
    (VIEWS, TWO + "return Views(noise[:, 0], weights)", r"views.noise must be \(3, views, 11\), got \(3, 11\)"),
    (VIEWS, TWO + "return Views(noise.float(), weights)", "views need bool noise and float weights, got torch.float32"),
]


@pytest.mark.parametrize(("file", "body", "message"), MISTAKES)
def test_a_mistake_in_a_users_function_is_one_line_before_anything_is_loaded(tmp_path, file, body, message):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + file.format(body))
    with pytest.raises(ValueError, match=f"^{ROW}.*{message}") as error:
        config(method=str(path))
    assert "\n" not in str(error.value)


def test_a_trial_leaves_the_global_generator_alone(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + LOSS.format("return (per_row(inputs) * torch.rand(len(inputs.mask))).mean(), {}"))
    before = torch.get_rng_state()
    config(method=str(path))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_trial_cannot_show_is_one_line_at_the_step_at_which_it_happens(tiny_model_dir, tmp_path, monkeypatch):
    calls = []

    def tires(inputs, settings):
        calls.append(inputs)
        loss = OBJECTIVES["reinforce"].loss(inputs, settings)[0]
        return (loss if len(calls) < 3 else loss.detach()), {}

    monkeypatch.setitem(OBJECTIVES, "mine", Objective(tires))
    trainer = make_method(tiny_model_dir, tmp_path, "d1", objective="mine", beta=0.0)
    with pytest.raises(ValueError, match=r"^tires \(.*\) returned a tensor of shape \(\) without gradient: expected a"):
        trainer.train()


def test_weights_that_would_be_broadcast_over_views_are_refused():
    inputs = random_inputs()
    with pytest.raises(ValueError, match=r"weights must be \(6, 3, 5\), got \(6, 1, 5\)"):
        replace(inputs, weights=inputs.weights[:, :1])


def test_what_a_loss_counts_is_an_average_over_micro_batches_and_at_least_one_in_all():
    """Six micro-batches of one row: four have an advantage, three views score something, or nothing does."""
    ones = torch.ones(1, 8)
    batch = {"prompt_mask": torch.ones(1, 4).long(), "completion_mask": ones.long(), "advantages": torch.ones(1)}
    batch |= {"view_weights": ones.view(1, 1, 1, 8), "reveal_steps": torch.tensor([[1, 0, 2, 3, 5, 4, 7, 6]])}
    scores = Scores(-ones, -ones.unsqueeze(1), torch.tensor(8))
    for counted, expected in (((4, 3, 20), (4 / 6, 3 / 6, 20 / 6)), ((0, 0, 0), (1 / 6, 1 / 6, 1 / 6))):
        active, views, tokens = map(torch.tensor, counted)
        batch |= {"active_rows": active[None], "scoring_views": views[None, None], "num_items_in_batch": tokens}
        inputs = loss_inputs(batch, scores, 0, parts=6)
        found = [inputs.active_rows.item(), inputs.scoring_views.item(), inputs.tokens.item()]
        assert found == pytest.approx(expected, rel=1e-6)
    assert torch.equal(inputs.reveal_steps, batch["reveal_steps"])
    in_blocks = loss_inputs(batch, scores, 0, block=4).reveal_steps  # two blocks of four tokens
    assert in_blocks.tolist() == [[1, 0, 2, 3, 1, 0, 3, 2]]


# --- What a row states ------------------------------------------------------------------------------------------------


def trained(model_dir, folder, method, **changes):
    trainer = make_method(model_dir, folder, method, **changes)
    trainer.train()
    return trainer


def assert_same_run(one, other):
    assert all(torch.equal(weight, weights(other.model)[name]) for name, weight in weights(one.model).items())
    assert [entry["compute_tokens"] for entry in logged(one)] == [entry["compute_tokens"] for entry in logged(other)]


def k3_by_hand(inputs, settings):
    d = (inputs.view_old - inputs.view_logps).exp()
    return ((d - d.log() - 1) * (inputs.weights != 0)).sum() / inputs.views


def test_a_users_penalty_to_the_sampling_policy_pulls_like_ours(tiny_model_dir, tmp_path, monkeypatch):
    inputs, run = random_inputs(), settings(loss_type="dapo")
    found, expected = Penalty(k3_by_hand, to="old")(inputs, run), PENALTIES["k3_to_old"](inputs, run)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(found, inputs), gradient(expected, inputs), rtol=1e-10, atol=1e-14)
    monkeypatch.setitem(PENALTIES, "mine", Penalty(PENALTIES["k3_to_old"].value, to="old"))
    given = {"objective": "reinforce", "beta": 10.0, "loss_type": "grpo"}  # alone it would score no old log-probs
    mine, ours = (trained(tiny_model_dir, tmp_path / kl, "d1", kl=kl, **given) for kl in ("mine", "k3_to_old"))
    assert_same_run(mine, ours)
    assert logged(mine)[1]["kl"] > 1e-4
    assert {"old_view_logps", "ref_view_logps"} & rollout_buffer(mine)[0].keys() == {"old_view_logps"}
    assert mine.ref_model is None
    without = trained(tiny_model_dir, tmp_path / "without", "d1", **{**given, "beta": 0.0})
    assert "old_view_logps" not in rollout_buffer(without)[0]
    assert any(not torch.equal(weight, weights(without.model)[name]) for name, weight in weights(mine.model).items())


def test_a_users_estimator_of_bounds_goes_with_objectives_of_bounds(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(draw_blocks, linear=False))
    for name, row in [*OBJECTIVES.items()]:
        for loss, kind in ((name, row), ("of mine", replace(row, loss=OBJECTIVES["spg"].loss, own_kl=None))):
            monkeypatch.setitem(OBJECTIVES, loss, kind)
            given = {"estimator": "mine", "objective": loss, "beta": 0.0}
            if kind.linear:
                with pytest.raises(ValueError, match=f"mine gives means .* needs --objective spg.* and {loss} needs"):
                    config(**given)
            else:
                assert config(**given).objective == loss
                with pytest.raises(ValueError, match="and no KL can be computed from bounds"):
                    config(**{**given, "beta": 0.1})
                with pytest.raises(
                    ValueError, match=f"{loss} computes its bounds from means .* --estimator spg or mine"
                ):
                    config(**{**given, "estimator": "elbo"})


def test_a_users_draws_with_inverse_chances_need_an_objective_of_views(monkeypatch):
    drawn = replace(ESTIMATORS["random_masks"], settings=None)
    monkeypatch.setitem(ESTIMATORS, "mine", drawn)
    for row, accepted in (
        (Objective(OBJECTIVES["clipped_views"].loss), False),
        (Objective(OBJECTIVES["clipped_views"].loss, per_view=True), True),
        (Objective(OBJECTIVES["reinforce"].loss, reads_old=False), True),
    ):
        monkeypatch.setitem(OBJECTIVES, "its", row)
        if accepted:
            assert config(estimator="mine", objective="its").objective == "its"
        else:
            with pytest.raises(ValueError, match="its would raise each ratio to the power of a draw's weight"):
                config(estimator="mine", objective="its")


def test_a_users_objective_over_a_group_gets_its_ratios(tiny_model_dir, tmp_path, monkeypatch):
    row = OBJECTIVES["stable_drl"]
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(row.loss, over_group=True, linear=False))
    mine, ours = (
        trained(tiny_model_dir, tmp_path / name, "stable-drl", objective=name) for name in ("mine", "stable_drl")
    )
    assert_same_run(mine, ours)
    assert logged(mine)[1]["weight_max"] == logged(ours)[1]["weight_max"] != 1.0
    with pytest.raises(ValueError, match="mine weighs a row against the others of its prompt"):
        make_method(tiny_model_dir, tmp_path, "stable-drl", objective="mine", steps_per_generation=2)


def test_a_users_advantage_of_plain_rewards_takes_any_scale(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", Advantage(lambda groups: groups.sign(), centred=False))
    monkeypatch.setitem(ADVANTAGES, "centred", Advantage(lambda groups: groups.sign()))
    assert config(advantage="mine", scale_rewards="group").advantage == "mine"
    with pytest.raises(
        ValueError, match="centred is computed from rewards minus their group's mean: set --scale_rewards"
    ):
        config(advantage="centred", scale_rewards="group")


def test_the_readmes_objective_pays_for_no_old_log_probs(tiny_model_dir, tmp_path):
    """Tokens computed: 4 passes in sampling, 3 times a view in each of two updates, and 2 views for both's old
    log-probs."""
    base = {name: value for name, value in SETTINGS.items() if name not in ("p_mask_prompt", "num_iterations")}
    paid, text = tmp_path / "paid.py", PUSH.read_text().replace("push, reads_old=False", "push")
    paid.write_text(text.replace('"push"', '"paid"').replace('"half"', '"halves"'))
    trainers = []
    for file, pays in ((PUSH, False), (paid, True)):
        trainers.append(make_trainer(tiny_model_dir, tmp_path / file.stem, base=base, method=str(file)))
        trainers[-1].train()
        assert ("old_view_logps" in rollout_buffer(trainers[-1])[0]) == pays
        assert ("ratio_max" in logged(trainers[-1])[-1]) == pays
    compute, more = (logged(trainer)[-1]["compute_tokens"] for trainer in trainers)
    assert more / compute == (4 + 6 + 2) / (4 + 6)
    free, paying = (weights(trainer.model) for trainer in trainers)
    assert all(torch.equal(weight, paying[name]) for name, weight in free.items())


def test_a_users_objective_reads_any_setting_of_the_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + LOSS.format("return per_row(inputs).mean(), {'t': settings.temperature}"))
    assert config(method=str(path), temperature=0.3).objective == "mine"
