"""Trees of rollouts: their shape, values and advantages, the rows of a real trainer, and the distillation of
siblings."""

import math
from types import SimpleNamespace

import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.bridge import rollout_buffer
from d1.rl.checks import check_trainer
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import LossInputs
from d1.rl.methods.d_treerpo import clipped_edges, distillation, numbered_parents, parents_of_update, schedules
from d1.rl.trainer import DiffuGRPOTrainer
from d1.rl.tree import edge_advantages, first_level, leaves_below, level_steps, node_values, siblings
from d1.sampling import rollout
from tests.tiny_grpo import is_even, make_method

# Of the release's formulas: leaves, values of the root's children, and advantages of both levels
LEAVES = [1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
VALUES = [0.25, 0.5, 0, 1]
OF_CHILDREN = [-0.25, 1 / 12, -7 / 12, 0.75]
OF_LEAVES = [1, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3, *[0] * 8]


def test_values_are_means_of_children_and_advantages_leave_the_child_out():
    rewards = torch.tensor([LEAVES, LEAVES[::-1]])
    assert node_values(rewards, [4, 4], 1)[0].tolist() == VALUES
    found = edge_advantages(rewards, [4, 4])
    assert found.shape == (2, 16, 2)
    torch.testing.assert_close(found[0, ::4, 0], torch.tensor(OF_CHILDREN))
    torch.testing.assert_close(found[0, :, 1], torch.tensor(OF_LEAVES))
    assert torch.equal(found[0, :, 0], found[0, ::4, 0].repeat_interleave(4))
    torch.testing.assert_close(found[1], found[0].flip(0))


def children_of(node, branches):
    return [(*node, child) for child in range(branches[len(node)])]


@pytest.mark.parametrize("branches", [[4, 4], [2, 3], [3, 2, 2], [5]])
def test_the_arithmetic_of_leaves_is_that_of_a_walk_through_the_tree(branches):
    levels = [[()]]
    for _ in branches:
        levels.append([child for node in levels[-1] for child in children_of(node, branches)])
    leaves = levels[-1]
    rewards = torch.rand(1, len(leaves), generator=keyed_generator(3), dtype=torch.float64)
    value = {leaf: rewards[0, number].item() for number, leaf in enumerate(leaves)}
    for level in reversed(levels[:-1]):
        for node in level:
            of_children = [value[child] for child in children_of(node, branches)]
            value[node] = sum(of_children) / len(of_children)
    advantages = edge_advantages(rewards, branches)
    numbers = torch.arange(len(leaves)).unsqueeze(0)
    parents = [node for level in levels[:-1] for node in level]
    assert [number for of_level in numbered_parents(branches) for number in of_level] == [*range(len(parents))]
    for number, leaf in enumerate(leaves):
        # A leaf's own edges begin at the last node of its path that it is not the first leaf of.
        own = [level for level in range(len(branches)) if not any(leaf[level + 1 :])]
        assert first_level(branches, number) == own[0]
        for level in range(len(branches)):
            node, child = leaf[:level], leaf[: level + 1]
            others = [value[one] for one in children_of(node, branches) if one != child]
            assert advantages[0, number, level].item() == pytest.approx(value[child] - sum(others) / len(others))
            rows = [leaves.index(one + (0,) * (len(branches) - len(one))) for one in children_of(node, branches)]
            assert siblings(numbers, branches, level)[0, number].tolist() == rows
            parent = numbered_parents(branches)[level][0] + number // leaves_below(branches, level)
            assert parents[parent] == node


@pytest.mark.parametrize(("parents", "updates"), [(5, 60), (5, 5), (5, 3), (5, 1), (3, 7)])
def test_all_parents_are_dealt_to_the_updates(parents, updates):
    order = torch.randperm(parents, generator=keyed_generator(1)).tolist()
    dealt = [parents_of_update(order, update, updates) for update in range(updates)]
    flat = [parent for of_update in dealt for parent in of_update]
    assert [*dict.fromkeys(flat)] == order  # one after the other
    counts = [flat.count(parent) for parent in order]
    assert all(dealt)
    assert max(counts) - min(counts) <= 1
    assert len(flat) == max(parents, updates)


def tree_trainer(model_dir, folder, **changes):
    given = {"branches": [2, 2], "num_iterations": 6, "max_steps": 6, "per_device_train_batch_size": 8}
    return make_method(model_dir, folder, "d-treerpo", **(given | {"num_generations": 4} | changes))


class Watched(DiffuGRPOTrainer):
    """Keeps the sampled rollout and its batch."""

    def sample(self, ids, mask):
        sampled = super().sample(ids, mask)
        self.rollouts = [*getattr(self, "rollouts", []), SimpleNamespace(ids=ids, mask=mask, sampled=sampled)]
        return sampled

    def after_rollout(self, batch):
        super().after_rollout(batch)
        self.batches = [*getattr(self, "batches", []), {**batch}]


def test_the_rows_of_a_prompt_share_the_passes_of_their_nodes(tiny_model_dir, tmp_path):
    trainer = tree_trainer(tiny_model_dir, tmp_path, cls=Watched, max_steps=1, learning_rate=0.0, temperature=1.0)
    trainer.train()
    found, batch = trainer.rollouts[0], trainer.batches[0]
    sampled = found.sampled
    assert sampled.start_steps.tolist() == [0, 2, 0, 2] * 2
    canvases = sampled.ids[:, -8:]
    key = trainer.key("rollout", 0)
    trainer.model.eval()
    for first in (0, 2, 4, 6):
        # The first leaf is a plain run, with its own random numbers.
        alone = rollout(
            trainer.model,
            found.ids[[first]],
            found.mask[[first]],
            trainer.sampling,
            mask_token_id=trainer.mask_token_id,
            generator=[keyed_generator(*key, first)],
            eos_token_ids=trainer.stop_token_ids or None,
        )
        assert torch.equal(alone.ids[:, -8:], canvases[[first]])
        # Its neighbour has its first half, and goes another way then.
        shared = (sampled.reveal_steps[first] >= 0) & (sampled.reveal_steps[first] < 2)
        for name in ("reveal_steps", "logps", "entropies"):
            values = getattr(sampled, name)
            assert torch.equal(values[first, shared], values[first + 1, shared])
        assert torch.equal(canvases[first, shared], canvases[first + 1, shared])
        assert not ((sampled.reveal_steps[first + 1] < 2) & (sampled.reveal_steps[first + 1] >= 0) & ~shared).any()
    assert not torch.equal(canvases[0::2], canvases[1::2])
    assert not torch.equal(canvases[0::4], canvases[2::4])
    # Every update scores the edges of one parent: two per tree, each in one row.
    weights, hidden = batch["view_weights"], batch["view_noise"][..., -8:]
    parents = []
    for update in range(6):
        rows, views = weights[:, update].ne(0).any(-1).nonzero().unbind(1)
        assert len({*views.tolist()}) == 1
        view = int(views[0])
        parents.append((view, *sorted({row % 4 // 2 * view for row in rows.tolist()})))
        possible = {0, 2} if view == 0 else {0, 1} if parents[-1][1] == 0 else {2, 3}
        assert {row % 4 for row in rows.tolist()} <= possible
        # A token's weight is 1 / tokens of its edge, 1 / 2 edges, times 4 rows of a tree.
        for row in rows.tolist():
            own = weights[row, update, view]
            assert own.sum() == pytest.approx(2.0)
            assert own.unique().numel() == 2
            assert hidden[row, update, view][own > 0].all()
    assert parents[0::2] == parents[1::2]
    assert len({*parents}) == 3
    expected = edge_advantages(batch["completion_reward"].view(2, 4), [2, 2]).flatten(0, 1)
    assert torch.equal(batch["view_advantages"], expected)


def test_scores_of_equal_updates_are_computed_once(tiny_model_dir, tmp_path):
    class Counted(DiffuGRPOTrainer):
        scored = 0

        def scores(self, model, batch, views, **options):
            self.scored += not torch.is_grad_enabled()
            return super().scores(model, batch, views, **options)

    trainer = tree_trainer(tiny_model_dir, tmp_path, cls=Counted)
    trainer.train()
    assert trainer.scored == 2 * 3  # old and reference log-probs of three parents, for six updates
    batch = rollout_buffer(trainer)[0]
    for name in ("old_view_logps", "ref_view_logps"):
        assert torch.equal(batch[name][:, 0::2], batch[name][:, 1::2])
        assert (batch[name] != 0).eq(batch["view_weights"] != 0).all()


def test_the_distillation_is_the_divergence_from_the_better_siblings():
    lam, tau = schedules(0.5, 0.003)
    assert (lam, tau) == (pytest.approx(8.0682e-4, rel=1e-4), pytest.approx(1.23114, rel=1e-5))
    assert schedules(0.0, 0.003) == (0.0, 2.0)
    assert schedules(1.0, 0.003) == (pytest.approx(0.003), 1e-6)
    # Two better siblings with the tokens 5 and 6, of probabilities .5 and .2 at the parent; a worse one has 7.
    advantages = torch.tensor([1.0, 2 / 3, -1.0])
    logps = torch.tensor([0.5, 0.2, 0.9]).log().view(3, 1, 1).requires_grad_()
    inputs = LossInputs(
        view_logps=logps,
        view_old=logps.detach(),
        view_reference=None,
        weights=torch.ones(3, 1, 1),
        advantages=torch.zeros(3),
        mask=torch.ones(3, 1),
        tokens=torch.tensor(3),
        view_advantages=advantages.view(3, 1),
        sibling_advantages=advantages.expand(3, 1, 3),
        sibling_ids=torch.tensor([5, 6, 7]).view(1, 1, 3, 1).expand(3, 1, 3, 1),
        progress=0.5,
    )
    kl = distillation(inputs, tau)
    assert kl.item() == pytest.approx(0.40558, abs=1e-5)
    (slope,) = torch.autograd.grad(kl, logps)
    torch.testing.assert_close(slope.flatten(), torch.tensor([-0.56728, -0.43272, 0.0]), atol=1e-5, rtol=0)
    settings = SimpleNamespace(epsilon=0.4, epsilon_high=None, delta=None, loss_type="sum", sibling_weight=0.003)
    plain = clipped_edges(inputs, SimpleNamespace(**vars(settings) | {"sibling_weight": 0.0}))[0]
    both = clipped_edges(inputs, settings)[0]
    assert (both - plain).item() == pytest.approx(8.0682e-4 * 0.40558, rel=1e-3)


def test_siblings_with_one_token_share_it_and_positions_without_better_siblings_do_not_count():
    advantages = torch.tensor([1.0, 0.5, 0.25, -1.0])
    ids = torch.tensor([[5, 9, -1], [5, -1, -1], [6, -1, -1], [7, 8, 8]])  # siblings x positions
    probabilities = torch.tensor([[0.3, 0.1, 1], [0.3, 1, 1], [0.2, 1, 1], [0.1, 0.1, 0.1]])
    inputs = LossInputs(
        view_logps=probabilities.log().unsqueeze(1),
        view_old=None,
        view_reference=None,
        weights=(ids >= 0).float().unsqueeze(1),
        advantages=torch.zeros(4),
        mask=torch.ones(4, 3),
        tokens=torch.tensor(1),
        view_advantages=advantages.view(4, 1),
        sibling_advantages=advantages.expand(4, 1, 4),
        sibling_ids=ids.expand(4, 1, 4, 3),
    )
    powers = [math.exp(value / 0.7) for value in (1.0, 0.5, 0.25)]
    q = [(powers[0] + powers[1]) / sum(powers), powers[2] / sum(powers)]
    first = q[0] * math.log(q[0] / 0.3) + q[1] * math.log(q[1] / 0.2)
    second = -math.log(0.1)  # one better sibling
    assert distillation(inputs, 0.7).item() == pytest.approx((first + second) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 8}, "--branches 4 4 gives each prompt 16 completions, and num_generations is 8: set"),
        (
            {"estimator": "replay"},
            "branches 4 4 of method d-treerpo samples trees, which replay does not score: use ed",
        ),
        ({"mask_truncated_completions": True}, "and mask_truncated_completions would also drop the edges that a trun"),
        ({"branches": None}, "the estimator edges scores the edges of a tree: set --branches"),
        (
            {"objective": "reinforce", "beta": 0.0, "loss_type": "sum"},
            "advantages of their own, which reinforce does n",
        ),
        ({"rollout_mode": "server", "rollout_server_base_url": ["http://a:1"]}, "rollout_mode server cannot continue"),
        ({"max_completion_length": 8, "diffusion_steps": 1, "block_length": 8}, "2 levels, and diffusion_steps is 1"),
    ],
)
def test_what_contradicts_trees_is_refused_in_one_line(tmp_path, changes, message):
    given = {"method": "d-treerpo", "output_dir": str(tmp_path), "report_to": "none", "per_device_train_batch_size": 16}
    with pytest.raises(ValueError, match=message):
        DiffuGRPOConfig(**(given | changes))


def test_models_and_functions_that_have_no_trees_are_refused(tiny_block_dir, tiny_model_dir, tmp_path):
    with pytest.raises(
        ValueError, match=r"--branches scores edges in the state of their parent, and this .* sees finished"
    ):
        tree_trainer(tiny_block_dir, tmp_path)
    with pytest.raises(ValueError, match="--branches continues rollouts, and a rollout_func cannot: let the trainer"):
        tree_trainer(tiny_model_dir, tmp_path, rollout_func=lambda prompts, trainer: {})
    assert level_steps([4, 4], 128) == [0, 64, 128]


def test_weights_that_processes_share_have_no_trees(tmp_path):
    """Also if they are gathered for a rollout: the processes would gather them a different number of times."""
    args = DiffuGRPOConfig(method="d-treerpo", output_dir=str(tmp_path), report_to="none", num_generations=16)
    with pytest.raises(
        ValueError, match=r"--branches: processes make different numbers of forward passes.*: use DDP or"
    ):
        check_trainer(args, args.sampling_settings(), [is_even], False, True, False)
    check_trainer(args, args.sampling_settings(), [is_even], False, False, False)
