"""Properties of all parts of the published methods, on a real trainer with a tiny model; a test's name states one."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from d1.masking import keyed_generator
from d1.models import load_model
from d1.rl.batch import draw_updates, sampled_rows, views_of
from d1.rl.bridge import rollout_buffer
from d1.rl.losses import OBJECTIVES
from d1.rl.methods import METHODS
from d1.rl.trainer import DiffuGRPOTrainer
from d1.scoring import ESTIMATORS, Randomness, Views
from tests.rounding import LOGITS, TOKENS, assert_near, rounding
from tests.tiny_grpo import (
    PER_MICRO_BATCH,
    TWO_BATCHES_A_STEP,
    assert_same,
    is_even,
    logged,
    make_method,
    of_each_part,
    same_mean,
    weights,
)

ESTIMATOR = {name: ESTIMATORS[METHODS[name].values["estimator"]] for name in METHODS}
OBJECTIVE = {name: OBJECTIVES[METHODS[name].values["objective"]] for name in METHODS}
SCORED = {name: METHODS[name].values["scored_tokens"] for name in METHODS}
LINEAR = [name for name in METHODS if ESTIMATOR[name].linear]
STATES = "rldf"  # scores a token in several states; the other replays use only the state in which it was revealed
EDGES = "d-treerpo"  # scores the tokens of several steps in the state before them
REPLAYS = [name for name in METHODS if ESTIMATOR[name].clean_prompt and name not in (STATES, EDGES)]
# In all updates on a rollout
SAME_VIEWS = ("cj-grpo", "dipo", "igpo", "just-grpo", "just-grpo-blocks", "just-grpo-fast", "lightning-rl")
ALL_KEPT = {"right_share": None, "prompt_share": 1.0, "min_speed_spread": 0.0}  # no prompt is dropped from the loss
NONE_KEPT = ("slim-rl", "lightning-rl")  # whose own values would drop every prompt of a tiny rollout

ON_BLOCKS = [name for name in METHODS if not {"block_length", "kv_cache", "branches"} & METHODS[name].values.keys()]
EACH = of_each_part()  # its other properties follow from its parts; its loss is tested in test_published.py
MODELS = [("tiny_model_dir", name) for name in EACH]
MODELS += [("tiny_block_dir", name) for name in EACH if name in ON_BLOCKS]
CAUSAL = [("tiny_causal_dir", name) for name in ("cj-grpo", "d1", "just-grpo-fast")]  # each estimator that it has
MODELS += [*CAUSAL, ("tiny_canvas_dir", "cj-grpo")]

each_part = pytest.mark.parametrize("method", EACH)
each_part_and_attention = pytest.mark.parametrize(("folder", "method"), MODELS)


def first_rollout(model_dir, folder, method, **changes):
    """A trainer that has made one step without learning, and its rollout's first micro-batch."""
    trainer = make_method(model_dir, folder, method, **({"max_steps": 1, "learning_rate": 0.0} | ALL_KEPT | changes))
    trainer.train()
    return trainer, rollout_buffer(trainer)[0]


class Recorder(DiffuGRPOTrainer):
    """Records for each loss its batch, its views, the update for which they were drawn, and its scores.

    Padding before every prompt encodes the number of the update, as noise that does not affect the model, because
    methods may give all updates the same views.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cycle, self.losses, self.seen, self.pad_to_multiple_of = 0, [], [], 48

    def after_rollout(self, batch):
        super().after_rollout(batch)
        for update in range(self.num_iterations):
            batch["view_noise"][:, update, :, :update] = True
        self.cycle += self.model.training
        batch["uid"] = torch.arange(len(batch["canvas_ids"])) + 1000 * self.cycle

    def scores(self, model, batch, views, **options):
        scores = super().scores(model, batch, views, **options)
        if torch.is_grad_enabled():
            self.seen = [views, scores.view_logps.detach()]
        return scores

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if self.model.training:
            self.losses.append((batch, *self.seen))
        return loss


def update_of(batch, views, row):
    """The update that a row's views were drawn for."""
    padding = batch["prompt_mask"][row] == 0
    [update] = views.noise[row][:, : len(padding)][:, padding].sum(-1).unique().tolist()
    assert torch.equal(views.noise[row], batch["view_noise"][row, update])
    assert torch.equal(views.weights[row], batch["view_weights"][row, update])
    return update


def check_update_k_is_scored_in_view_k(model_dir, folder, method, accumulation, per_generation, mu):
    """Two full cycles, with an evaluation after every step, hence in mid-cycle."""
    micro_steps = 2 * per_generation * mu
    trainer = make_method(
        model_dir,
        folder,
        method,
        Recorder,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        num_generations=2,
        num_iterations=mu,
        max_steps=-(-micro_steps // accumulation),
        eval_strategy="steps",
        eval_steps=1,
        random_masking=True,
        learning_rate=1e-3,  # at the others' rate, five updates without clipping can make all weights infinite or NaN
        **ALL_KEPT,
    )
    trainer.train()
    met = {}
    for batch, views, _ in trainer.losses[:micro_steps]:
        for row, uid in enumerate(batch["uid"].tolist()):
            met.setdefault(uid, Counter())[update_of(batch, views, row)] += 1
    assert len(met) == 2 * per_generation * 2
    assert all(counts == Counter(range(mu)) for counts in met.values()), met


# Which update uses which views does not depend on the estimator: d1, several views, one set of views for all updates,
# shared out over updates, compared over groups; accumulation, per generation, mu.
FAST = [("d1", each) for each in ((2, 4, 2), (4, 1, 1), (3, 2, 2))]
FAST += [(name, (3, 2, 2)) for name in ("espo", "just-grpo", "tracerl", "rldf")] + [("stable-drl", (2, 1, 3))]


@pytest.mark.parametrize(("method", "combination"), FAST)
def test_each_sample_meets_each_updates_views_once(tiny_model_dir, tmp_path, method, combination):
    """An objective over groups is refused if a step ends within an update."""
    check_update_k_is_scored_in_view_k(tiny_model_dir, tmp_path, method, *combination)


def elsewhere(views, prompt):
    """The views with one change in the prompt: a visible token is hidden, or a hidden one is visible."""
    noise = views.noise.clone()
    noise[:, :, prompt - 3] ^= True
    return Views(noise, views.weights)


@each_part
def test_old_new_and_reference_agree_until_weights_change_and_only_in_their_own_views(tiny_model_dir, tmp_path, method):
    beta = {"beta": 0.1, "kl": "k3"} if method in LINEAR else {}
    trainer = make_method(
        tiny_model_dir,
        tmp_path,
        method,
        Recorder,
        learning_rate=0.0,
        num_iterations=3,
        max_steps=3,
        **beta,
        **ALL_KEPT,
    )
    trainer.train()
    for update, (batch, views, scores) in enumerate(trainer.losses):
        assert update_of(batch, views, 0) == update
        names = [name for name in ("old_view_logps", "ref_view_logps") if name in batch]
        assert len(names) == OBJECTIVE[method].reads_old + bool(beta)
        for stored in (batch[name] for name in names):
            assert_near(scores, stored[:, update], least=LOGITS)
            if method not in SAME_VIEWS:
                assert (scores - stored[:, (update + 1) % 3]).abs().max() > 1e-3
        with torch.no_grad():
            wrong = trainer.scores(trainer.model, batch, elsewhere(views, batch["prompt_ids"].shape[1])).view_logps
        assert (wrong - scores).abs().max() > 1e-3
    assert len(trainer.losses) == 3
    for entry in logged(trainer):
        assert entry.get("ratio_max", 1.0) == pytest.approx(1.0, abs=rounding(LOGITS))
        assert entry.get("weight_max", 1.0) == pytest.approx(
            1.0, abs=rounding(LOGITS)
        )  # noise of its masks is not a weight
        assert entry.get("kl", 0.0) == pytest.approx(0.0, abs=rounding(LOGITS) ** 2)


def row_of(batch, row):
    """A row of a batch, alone and without padding."""
    padding = int((batch["prompt_mask"][row] == 0).sum())
    alone = {name: value[row : row + 1] for name, value in batch.items() if value.dim()}
    cut = {name: alone[name][..., padding:] for name in ("prompt_ids", "prompt_mask", "view_noise")}
    return alone | cut, padding


def padded(batch):
    """A batch with more padding before its prompts; the views hide padding, too."""
    more = {name: F.pad(batch[name], (5, 0)) for name in ("prompt_ids", "prompt_mask")}
    return batch | more | {"view_noise": F.pad(batch["view_noise"], (5, 0), value=True)}


@pytest.mark.parametrize("method", [name for name in EACH if name in ON_BLOCKS])
def test_a_rows_scores_and_views_are_its_own(tiny_block_dir, tmp_path, method):
    """In blocks: alone, in its batch, with more padding. With full attention: `tests/d1/scoring/test_estimators.py`."""
    ends = range(16, 60) if SCORED[method] == "steps" else (2, 25, 28, 32)  # some last steps reveal nothing but EOS
    trainer, batch = first_rollout(tiny_block_dir, tmp_path, method, per_device_train_batch_size=8, ends=ends)
    assert SCORED[method] in ("canvas", "unpadded") or len(set(batch["completion_mask"].sum(1).tolist())) > 1

    def scores(batch, update=1):
        with torch.no_grad():
            return trainer.scores(trainer.model, batch, views_of(batch, update)).view_logps

    together = scores(batch)
    assert_near(scores(padded(batch)), together, least=LOGITS)

    def drawn(batch, first, rows):
        streams = [keyed_generator(7, row) for row in range(8)][first : first + rows]
        random = Randomness(streams, keyed_generator(8), first, 8)
        estimator, settings = ESTIMATORS[trainer.args.estimator], trainer.args.view_settings()
        return draw_updates(sampled_rows(batch, trainer.blocks), random, 2, estimator, settings)

    views, views_padded = drawn(batch, 0, 8), drawn(padded(batch), 0, 8)
    assert torch.equal(views["view_weights"], views_padded["view_weights"])
    assert torch.equal(views["view_noise"], views_padded["view_noise"][..., 5:])
    for row in range(8):
        alone, padding = row_of(batch, row)
        assert_near(scores(alone)[0], together[row], least=LOGITS)
        own = drawn(alone, row, 1)
        count = own["view_weights"].shape[2]  # a batch may have more views, none of which scores a token of the row
        assert torch.equal(own["view_weights"][0], views["view_weights"][row, :, :count])
        assert torch.equal(own["view_noise"][0], views["view_noise"][row, :, :count, padding:])
        assert not views["view_weights"][row, :, count:].any()


@each_part_and_attention
def test_micro_batches_of_rows_and_views_and_padding_change_no_weight(request, tmp_path, folder, method):
    """Also with groups that are spread over several of them."""

    def trainer(rows, **changes):
        rows = 1 if method in PER_MICRO_BATCH else rows
        cut = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows, "learning_rate": 0.01}
        model_dir = request.getfixturevalue(folder)
        kept = ALL_KEPT if method in NONE_KEPT else {}
        return make_method(model_dir, tmp_path, method, **(cut | same_mean(method) | kept | changes))

    start, whole = weights(load_model(str(request.getfixturevalue(folder)))), trainer(8, views_at_once=99)
    parts = trainer(2, views_at_once=2, pad_to_multiple_of=16, rollout_batch_size=3, eos_stop=False)
    whole.train()
    parts.train()
    expected = weights(whole.model)
    assert max((value - start[name]).abs().max() for name, value in expected.items()) > 1e-3
    for name, value in weights(parts.model).items():
        assert_near(value, expected[name], terms=TOKENS)


@pytest.mark.parametrize(
    ("folder", "method"),
    [
        *(
            ("tiny_model_dir", name)
            for name in (
                *("d1", "espo", "tracerl", "stable-drl", "egspo-sa", "rldf", "dmpo", "igpo", EDGES),
                *("slim-rl", "lightning-rl"),
            )
        ),
        CAUSAL[0],
        ("tiny_canvas_dir", "cj-grpo"),
    ],
)
def test_a_run_resumes_bit_for_bit_in_mid_cycle(request, tmp_path, folder, method):
    """From the checkpoint between two updates on a rollout, which holds the tensors of the rollout whatever they are:
    views of each update, shared out or of states with rewards of their own, and ratios of groups, made anew.
    `test_processes.py` kills runs at any time."""
    model_dir = request.getfixturevalue(folder)
    whole, resumed = (
        make_method(model_dir, tmp_path / name, method, **TWO_BATCHES_A_STEP) for name in ("whole", "resumed")
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert_same(whole, resumed)


def token_number(completion_ids, **columns):
    return [ids[0] / 60 for ids in completion_ids]


UNEVEN = {"max_completion_length": 12, "diffusion_steps": 9, "per_device_train_batch_size": 8, "max_steps": 1}
UNMERGED = {"tracerl": {"segment_steps": 1}, **{name: {"diffusion_steps": None} for name in REPLAYS if "just" in name}}
UNMERGED["quick-replay"] = {"segment_steps": 1, "num_views": None}


def as_sampled(method):
    """The pairs of sampler and EOS stop that a method can have. It may name its sampler; a random order has no parallel
    one; what scores all tokens has no EOS stop."""
    values, choices = METHODS[method].values, (("exact", True), ("parallel", False))
    exact, stops = values["remasking"] in ("random", "leftmost"), SCORED[method] not in ("steps", "canvas")
    return {("exact" if exact else values.get("sampler", one), stop if stops else None) for one, stop in choices}


@pytest.mark.parametrize(
    ("method", "sampler", "eos_stop"), [(name, *how) for name in REPLAYS for how in sorted(as_sampled(name), key=str)]
)
def test_replay_scores_tokens_as_they_were_sampled(tiny_model_dir, tmp_path, method, sampler, eos_stop):
    """With 3 steps for each block of 4 tokens."""
    options = UNEVEN | {"sampler": sampler, "eos_stop": eos_stop} | UNMERGED.get(method, {}) | ALL_KEPT
    trainer, batch = first_rollout(tiny_model_dir, tmp_path, method, **options)
    [entry] = logged(trainer)
    assert entry["sampling/ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))
    assert entry["sampling/logp_difference_abs"] == pytest.approx(0.0, abs=rounding(LOGITS))
    assert (batch["view_weights"] != 0).sum() >= 8


def test_d1_and_merged_steps_score_tokens_in_other_states_than_they_were_sampled_in(tiny_model_dir, tmp_path):
    for method in ("d1", "tracerl"):
        trainer, _ = first_rollout(tiny_model_dir, tmp_path, method, **UNEVEN)
        assert logged(trainer)[0]["sampling/ratio_max"] > 1.01


@each_part
def test_completions_that_are_only_their_end_train(tiny_model_dir, tmp_path, method):
    """Except for AGRPO, which scores up to the last token that is not an EOS."""
    options = {
        "ends": range(60),
        "per_device_train_batch_size": 8,
        "reward": [token_number, is_even],
        "weight_decay": 0.0,
    }
    trainer = make_method(tiny_model_dir, tmp_path, method, **options, **ALL_KEPT)
    before = weights(trainer.model)
    trainer.train()
    scored = rollout_buffer(trainer)[0]["completion_mask"].sum(1)
    tokens = {"ended": {1}, "text": {0, 1}, "steps": {0}, "canvas": {8}, "unpadded": {*range(1, 9)}, "drawn": {4}}
    assert {*scored.tolist()} <= tokens[SCORED[method]]
    assert all(math.isfinite(entry["loss"]) for entry in logged(trainer))
    after = weights(trainer.model)
    assert all(torch.isfinite(value).all() for value in after.values())
    moved = max((value - after[name]).abs().max() for name, value in before.items())
    assert moved > 1e-6 if scored.any() else moved == 0
    assert scored.any() or SCORED[method] == "steps"


def test_dipo_divides_by_the_block_of_the_model_if_none_is_given(tiny_block_dir, tmp_path):
    """Its divisor needs a block: the check of settings has one of its own, and a run takes the model's."""
    trainer = make_method(tiny_block_dir, tmp_path, "dipo", block_length=None, right_share=None, max_steps=1)
    assert trainer.args.block_length == 4
    trainer.train()
    assert math.isfinite(logged(trainer)[0]["loss"])
