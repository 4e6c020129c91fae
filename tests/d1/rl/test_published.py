"""Every method's loss in a real trainer, compared with the loss function that its authors released, written out in
plain tensors with the constants of their code: values and gradients.

The trainer samples two prompts of four completions, which end early, late or never, and splits them into four
micro-batches. Its log-probabilities are replaced by others, which differ from the old ones, so that ratios, clips and
penalties act. A formula here gets rewards, tokens, the hidden positions of every view, and these log-probabilities. It
computes lengths, weights, advantages and divisors itself, following the method's released code (`docs/methods.md`,
which names the sources and the differences found). Small constants of a release, such as the 1e-6 in DARE's advantages,
are those of the release, not ours: they are most of the difference where it is above rounding.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from d1.rl.methods import METHODS
from d1.rl.trainer import DiffuGRPOTrainer
from d1.scoring import Scores
from tests.tiny_grpo import by_letter, make_method

ENDS, G, BATCHES = (2, 25, 28, 32), 8, 4
BLOCK = 4  # tokens per block of the models with block-causal attention
IN_BLOCKS = ("dipo", "slim-rl", "lightning-rl")  # releases whose states are those of such a model
DOCUMENT = Path(__file__).parents[3] / "docs" / "methods.md"


def has_even_letters(completions, **columns):
    """An accuracy: whether the letters' numbers have an even sum."""
    return [float(sum(map(ord, completion[0]["content"])) % 2 == 0) for completion in completions]


has_even_letters.is_accuracy = True


class Recorder(DiffuGRPOTrainer):
    """Trains on log-probabilities other than the model's, and stores them with everything needed to check their
    loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts, self.after_updates, self.for_advantages = [], False, None

    def bounds(self, batch, ranks):
        """Keeps what was scored for the advantages, with the rows that are shuffled later."""
        self.for_advantages = []
        bounds = super().bounds(batch, ranks)
        (views, old), (_, reference) = self.for_advantages
        batch |= {"bound_noise": views.noise, "bound_old": old, "bound_ref": reference}
        self.for_advantages = None
        return bounds

    def scores(self, model, batch, views, **options):
        scores = super().scores(model, batch, views, **options)
        if self.for_advantages is not None:
            logps = scores.view_logps
            if self.for_advantages:  # the reference, which would equal the policy before the first update
                noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
                logps = (logps + 0.3 * noise) * (views.weights != 0)
            self.for_advantages.append((views, logps.double()))
            return scores._replace(view_logps=logps)
        if not (torch.is_grad_enabled() or self.after_updates):
            return scores
        seeds = batch["canvas_ids"].sum(1).tolist()
        noise = [torch.Generator().manual_seed(seed) for seed in seeds]
        shape = scores.view_logps.shape[1:]
        moved = 0.4 * torch.stack([torch.randn(shape, generator=one, dtype=torch.float64) for one in noise])
        self.leaf = ((scores.view_logps.detach() + moved) * (views.weights != 0)).requires_grad_()
        return Scores((views.weights * self.leaf).sum(1), self.leaf, scores.compute, scores.entropies)

    def compare_rows(self, model):
        self.after_updates = True
        super().compare_rows(model)
        self.after_updates = False

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.parts.append(SimpleNamespace(batch=batch, update=self.update, logps=self.leaf, loss=loss.detach()))
        return loss


def rows_of(part, number, trainer):
    """The rows of a micro-batch, as the formulas get them."""
    batch, update = part.batch, part.update
    for row, ids in enumerate(batch["canvas_ids"].tolist()):
        ends = [position for position, token in enumerate(ids) if token in ENDS]
        used = range(batch["view_weights"].shape[2])

        def stored(name, row=row):
            return batch[name][row, update].double() if name in batch else None

        yield SimpleNamespace(
            micro_batch=number,
            group=tuple(batch["prompt_ids"][row].tolist()),
            reward=batch["completion_reward"][row].double(),
            is_right=batch["completion_is_right"][row].double(),
            ids=ids,
            prompt=int(batch["prompt_mask"][row].sum()),
            length=ends[0] + 1 if ends else G,
            text=[k for k in range(ends[0] + 1 if ends else G) if ids[k] != trainer.text_tokenizer.pad_token_id],
            unpadded=[k for k in range(G) if ids[k] != trainer.text_tokenizer.pad_token_id],
            steps=batch["reveal_steps"][row].tolist(),
            start=int(batch["start_steps"][row]) if "start_steps" in batch else 0,
            update=update,
            entropies=batch["rollout_entropies"][row].double(),
            surprisals=-batch["rollout_logps"][row].double(),
            hidden=[batch["view_noise"][row, update, v, -G:].nonzero().flatten().tolist() for v in used],
            used=[v for v in used if batch["view_weights"][row, update, v].any()],
            drawn=batch["view_weights"][row, update].double(),
            finished=finished(trainer, batch, row) if trainer.args.objective == "clipped_steps" else None,
            bounds={name: batch[f"bound_{name}"][row] for name in ("noise", "old", "ref") if f"bound_{name}" in batch},
            given=batch["given"][row].nonzero().flatten().tolist() if "given" in batch else [],
            old_entropies=batch["old_entropies"][row] if "old_entropies" in batch else None,
            l=part.logps[row],
            old=stored("old_view_logps"),
            ref=stored("ref_view_logps"),
        )


@torch.no_grad()
def finished(trainer, batch, row):
    """The rewards of a row's completion when the states of its views are finished in one pass."""
    kept = batch["prompt_mask"][row].bool()
    prompt, canvas, rewards = batch["prompt_ids"][row][kept], batch["canvas_ids"][row], []
    for noise in batch["view_noise"][row, 0, :, -G:]:
        state = torch.where(noise, trainer.mask_token_id, canvas)
        logits = trainer.model(input_ids=torch.cat([prompt, state]).unsqueeze(0)).logits[0, -G:]
        logits[:, trainer.mask_token_id] = -torch.inf
        ids = torch.where(noise, logits.argmax(-1), canvas).tolist()
        ends = [position for position, token in enumerate(ids) if token in ENDS]
        text = trainer.text_tokenizer.decode(ids[: ends[0] + 1 if ends else G], skip_special_tokens=True)
        rewards.append(torch.tensor(by_letter([[{"content": text}]])[0], dtype=torch.float64))
    return rewards


# --- Shared by formulas --------------------------------------------------------------------------------------------


def groups_of(rows):
    return [[row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)]


def set_advantages(rows, kind):
    for group in groups_of(rows):
        rewards = torch.stack([row.reward for row in group])
        mean, n = rewards.mean(), len(group)
        for row in group:
            row.A = {
                "r - m": row.reward - mean,
                "z": (row.reward - mean) / (rewards.std() + 1e-4),  # grpo.py, JustGRPO
                "z of DARE": (row.reward - mean) / (rewards.std() + 1e-6),  # verl's compute_grpo_outcome_advantage
                "z of n": (row.reward - mean) / rewards.std(correction=0),
                "leave one out": row.reward - (rewards.sum() - row.reward) / (n - 1),
                "floored": (row.reward - mean) / (rewards.std() + 1e-8).clamp(min=0.01),
            }[kind]


def ppo(ratio, A, low=0.2, high=0.2, dual=math.inf):
    gain = torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    return gain if A >= 0 else torch.max(gain, A * dual)


def k3(new, other):
    return torch.exp(other - new) - (other - new) - 1


def mean(values):
    return torch.stack(list(values)).mean()


def total(values):
    return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).sum()


def by_batch(rows, sums, counts):
    """The mean over micro-batches of sums over counts, each of one row."""
    batches = [[row for row in rows if row.micro_batch == number] for number in range(BATCHES)]
    return mean(total(map(sums, of)) / sum(map(counts, of)) for of in batches)


def scored_in(row, view, among):
    """The positions that a view hides, among those that count."""
    return [k for k in row.hidden[view] if k in among]


def first_step(row, view, merged=1):
    return min(row.steps[k] // merged for k in row.hidden[view] if row.steps[k] >= 0)  # -1: the EOS stop filled it


def revealed(row, view, among, merged=1):
    """The positions that a view's first step reveals, among those that count."""
    first = first_step(row, view, merged)
    return [k for k in among if row.steps[k] // merged == first]


# --- The formulas ---------------------------------------------------------------------------------------------------


def one_view(row):
    return row.l[0, : row.length], row.old[0, : row.length], None if row.ref is None else row.ref[0, : row.length]


def d1(rows):
    set_advantages(rows, "r - m")

    def loss(row):
        new, old, ref = one_view(row)
        return (-ppo(torch.exp(new - old), row.A, 0.5, 0.5) + 0.04 * k3(new, ref)).sum()

    return by_batch(rows, loss, lambda row: row.length)


def wd1(rows):
    set_advantages(rows, "r - m")
    groups = []
    for group in groups_of(rows):
        A, S = torch.stack([row.A for row in group]), torch.stack([row.l[0, : row.length].sum() for row in group])
        groups.append((-A.softmax(0) * S + (-A).softmax(0) * S).sum())
    return mean(groups)


def coupled(rows):
    set_advantages(rows, "leave one out")

    def loss(row):
        rho = 0.5 / row.drawn[1].max() if row.drawn[1].any() else 1 - 0.5 / row.drawn[2].max()
        sums = []
        for values in (row.l, row.old, row.ref):
            weighted = 0.5 * values[0]
            for view, share in ((1, rho), (2, 1 - rho)):
                own = torch.zeros(G, dtype=torch.float64)
                own[scored_in(row, view, range(row.length))] = 1.0
                weighted = weighted + own * values[view] / (2 * share)
            sums.append(weighted[: row.length])
        new, old, ref = sums
        return (-ppo(torch.exp(new - old), row.A, 0.5, 0.5) + 0.01 * k3(new, ref)).sum()

    return by_batch(rows, loss, lambda row: row.length)


def bound(row, values, among, weight):
    """The weighted sum over views; `weight` is a function of the number of tokens that a view hides."""
    hidden = [scored_in(row, view, among) for view in row.used]
    return total(
        weight(len(positions)) * values[view][positions].sum() for view, positions in zip(row.used, hidden, strict=True)
    )


def espo(rows):
    set_advantages(rows, "leave one out")

    def elbo(row, values):
        return bound(row, values, range(G), lambda x: (G + 1) / (2 * 2 * x))

    def loss(row):
        new = elbo(row, row.l)
        ratio = torch.exp((new - elbo(row, row.old)) / G)
        return -ppo(ratio, row.A) + 0.001 * (new - elbo(row, row.ref)) ** 2 / (2 * G)

    return mean(map(loss, rows))


def bounds(row, values):
    """SPG's lower and upper form, per token."""
    positions = [scored_in(row, view, range(row.length)) for view in range(2)]
    lower = mean(values[view][positions[view]].mean() for view in range(2))
    upper = []
    for k in sorted({*positions[0], *positions[1]}):
        terms = [
            torch.exp(1.5 * values[view][k]) * row.length / len(positions[view])
            for view in (0, 1)
            if k in positions[view]
        ]
        upper.append(torch.log(total(terms) / 2) / 1.5)
    return lower, mean(upper)


def sandwich(row):
    lower, upper = bounds(row, row.l)
    return lower if row.A > 0 else 0.5 * upper + 0.5 * lower


def spg(rows):
    set_advantages(rows, "r - m")
    return total(-row.A * sandwich(row) * row.length for row in rows) / sum(row.length for row in rows)


def stable_drl(rows):
    set_advantages(rows, "r - m")
    groups = []
    for group in groups_of(rows):
        with torch.no_grad():
            change = torch.stack([bounds(row, row.l)[0] - bounds(row, row.old)[0] for row in group])
            w = change.clamp(max=math.log(5)).softmax(0)
        groups.append(total(-w[i] * row.A * sandwich(row) for i, row in enumerate(group)))
    return mean(groups)


def token_ratios(row, view, positions, **clips):
    """The sum over tokens of PPO's gain."""
    return ppo(torch.exp(row.l[view][positions] - row.old[view][positions]), row.A, **clips).sum()


def agrpo(rows, by_entropy=False):
    """n = 4 draws; a step that is drawn twice is one view with twice the weight."""
    set_advantages(rows, "r - m")

    def loss(row):
        last = max(step for step, token in zip(row.steps, row.ids, strict=True) if token not in ENDS)
        among = [k for k in range(G) if row.steps[k] <= last]
        steps = {step: [k for k in among if row.steps[k] == step] for step in range(last + 1)}
        entropy = torch.stack([row.entropies[positions].clamp(min=0).sum() + 1e-6 for positions in steps.values()])
        chance = entropy / entropy.sum() if by_entropy else torch.full_like(entropy, 1 / len(steps))
        gains, draws = [], 0
        for view in row.used:
            step = first_step(row, view)
            weight = 1 / (len(steps) * 4 * chance[step])
            times = row.drawn[view].max() / weight
            assert abs(times - times.round()) < 1e-5
            draws += round(times.item())
            gains.append(times.round() * weight * token_ratios(row, view, steps[step]))
        assert draws == 4
        return -total(gains)

    return mean(map(loss, rows))


def cj_grpo(rows):
    set_advantages(rows, "z of DARE")
    views = [(row, view) for row in rows for view in row.used]
    losses = []
    for row, view in views:
        positions = revealed(row, view, range(G))
        losses.append(-token_ratios(row, view, positions, dual=3.0) / len(positions))
    return mean(losses)


def d2(rows):
    set_advantages(rows, "r - m")

    def loss(row):
        gains = []
        for view in row.used:  # four steps in four segments
            positions = [k for k in range(row.length) if row.steps[k] == view]
            kl = k3(row.l[view][positions], row.ref[view][positions]).sum()
            gains.append(-token_ratios(row, view, positions, low=0.5, high=0.5) + 0.04 * kl)
        return total(gains)

    return by_batch(rows, loss, lambda row: row.length)


def over_views(rows, positions_of):
    """TraceRL's: the mean over a view's tokens, then views, and the sum of k3 to the old policy over its tokens."""
    set_advantages(rows, "z of n")
    losses = []
    for row in rows:
        for view in row.used:
            positions = positions_of(row, view)
            kl = k3(row.l[view][positions], row.old[view][positions]).sum()
            losses.append(-token_ratios(row, view, positions) / len(positions) + 0.01 * kl)
    return mean(losses)


def tracerl(rows):
    return over_views(rows, lambda row, view: revealed(row, view, row.text, merged=8))


def unigrpo(rows):
    return over_views(rows, lambda row, view: scored_in(row, view, row.text))


def just_grpo(rows):
    set_advantages(rows, "z")
    gains = total(token_ratios(row, k, [k]) for row in rows for k in range(G))
    return -gains / G / (sum(bool(row.A != 0) for row in rows) + 1e-5)


def just_grpo_blocks(rows, least=None):
    """Weights of at most 2 between the policies that sampled and that are trained; KL is not weighed by them."""
    set_advantages(rows, "leave one out")
    terms = []
    for row in rows:
        chosen = sorted(sorted(range(row.length), key=lambda k, row=row: (-row.surprisals[k].item(), k))[:least])
        for view, k in enumerate(chosen):
            new, old = row.l[view][k], row.old[view][k]
            weight = torch.exp(old + row.surprisals[k]).clamp(max=2.0)
            terms.append(0.01 * k3(new, row.ref[view][k]) - weight * ppo(torch.exp(new - old), row.A))
    return mean(terms)


def draws_of(row, values, weight, among=range(G)):
    """The bound of each draw alone."""
    positions = [scored_in(row, view, among) for view in row.used]
    return [weight(len(of)) * values[view][of].sum() for view, of in zip(row.used, positions, strict=True)]


def bgpo(rows):
    set_advantages(rows, "z of DARE")

    def loss(row):
        new, old = (draws_of(row, values, lambda x: G / x) for values in (row.l, row.old))
        d = [(one - other) / G for one, other in zip(new, old, strict=True)]
        return -mean(ppo(1 + one if row.A > 0 else torch.exp(one), row.A, dual=3.0) for one in d)

    return mean(map(loss, rows))


def egspo(rows, lam=0.0):
    """With lam, the reward of a state is included; means are over a prompt's completions at states of equal rank."""
    losses = []
    for group in groups_of(rows):
        for view in range(len(rows[0].hidden)):
            mixed = [(row.reward + lam * (row.reward - row.finished[view])) / (1 + lam) for row in group]
            for row, one in zip(group, mixed, strict=True):
                row.__dict__.setdefault("states", {})[view] = one - mean(mixed)
    for row in rows:
        for view in row.used:
            positions = revealed(row, view, range(G))
            new, old, ref = (values[view][positions].sum() for values in (row.l, row.old, row.ref))
            gain = ppo(torch.exp(new - old), row.states[view], 0.2, 0.5) - 0.04 * k3(new, ref)
            losses.append(-gain / len(positions))
    return mean(losses)


def gdpo(rows):
    set_advantages(rows, "r - m")
    nodes = [(0.5 - math.sqrt(0.15), 5 / 18), (0.5, 4 / 9), (0.5 + math.sqrt(0.15), 5 / 18)]

    def loss(row):
        for view, (t, _) in enumerate(nodes):
            assert len(row.hidden[view]) == max(1, math.floor(t * G))  # the release: none for G below 9
        new, old = (
            total(w / t * values[v][row.hidden[v]].sum() for v, (t, w) in enumerate(nodes))
            for values in (row.l, row.old)
        )
        return -ppo(torch.exp((new - old) / G), row.A, 0.5, 0.5)

    return mean(map(loss, rows))


def gdsd(rows):
    set_advantages(rows, "leave one out")

    def loss(row):
        terms = []
        for draw in range(2):  # each with its complement, half and half
            masks = [(view, scored_in(row, view, range(G))) for view in (draw, draw + 2)]
            assert sorted(masks[0][1] + masks[1][1]) == [*range(G)]
            new, old, ref = (total(v[m][p].sum() for m, p in masks) / 2 for v in (row.l, row.old, row.ref))
            held = (new - old).clamp(math.log(1 - 4e-4), math.log(1 + 4e-4))
            terms.append((held / G - 10 * row.A) ** 2 + 0.001 * (new - ref) ** 2 / 2 / (2 * G))
        return total(terms)

    return mean(map(loss, rows))


def rldf(rows):
    set_advantages(rows, "floored")
    batches = []
    for number in range(BATCHES):
        states = []
        for view in range(4):
            losses = []
            for row in (row for row in rows if row.micro_batch == number):
                scored = scored_in(row, view, row.unpadded)
                now = min(row.steps[k] for k in scored)
                for k in scored:
                    new = row.l[view][k]
                    if row.steps[k] == now or new >= math.log(0.6):
                        losses.append(-row.A * new + 0.01 * k3(new, row.ref[view][k]))
            states.append(mean(losses))
        batches.append(mean(states))
    return mean(batches)


def rounds_of(row):
    """The positions that each round scores: of every block those of its earliest step that is left, up to the EOS
    (`generate_training_samples_for_one`). A round without any is left out."""
    left = {k: step for k, step in enumerate(row.steps) if step >= 0}
    rounds = []
    for _ in range(BLOCK):
        blocks = {}
        for k in left:
            blocks.setdefault((row.prompt + k) // BLOCK, []).append(k)
        now = [k for block in blocks.values() for k in block if left[k] == min(left[i] for i in block)]
        left = {k: step for k, step in left.items() if k not in now}
        rounds.append([k for k in now if k < row.length])
    return [positions for positions in rounds if positions]


def dipo(rows):
    """Every round is a training sample with all labels of its completion. The labels are counted over all samples, and
    their number is divided by the block (`group_token_counts`)."""
    set_advantages(rows, "z of n")
    gains, labels = [], 0
    for row in rows:
        rounds = rounds_of(row)
        assert len(rounds) == len(row.used)
        for view, positions in zip(row.used, rounds, strict=True):
            gains.append(token_ratios(row, view, positions, low=0.2, high=0.28))
            labels += row.length
    return -total(gains) / max(labels / BLOCK, 1)


def ebpo(rows):
    set_advantages(rows, "z of DARE")

    def loss(row):
        among = range(row.length)
        new, old = (mean(draws_of(row, values, lambda x: row.length / x, among)) for values in (row.l, row.old))
        return -ppo(torch.exp(new - old), row.A)

    return mean(map(loss, rows))


def dmpo(rows):
    losses = []
    for group in groups_of(rows):
        change, rewards = [], torch.stack([row.reward for row in group])
        for row in group:
            hidden = [noise.nonzero().flatten() for noise in row.bounds["noise"][:, -G:]]
            assert [sorted([*hidden[0].tolist(), *hidden[2].tolist()]), len(hidden)] == [[*range(G)], 4]
            old, ref = (
                mean(G / max(len(of), 1) * row.bounds[name][view][of].sum() for view, of in enumerate(hidden))
                for name in ("old", "ref")
            )
            change.append(ref - old)
        change = torch.stack(change)
        w_plus, w_minus = (change + rewards / 0.04).softmax(0), (change - rewards / 0.04).softmax(0)
        for row, A in zip(group, w_plus - w_minus, strict=True):
            ce = mean(-row.l[view][hidden].sum() / max(len(hidden), 1) for view, hidden in enumerate(row.hidden))
            losses.append(A * ce)
    return total(losses) / len(groups_of(rows))


def igpo(rows):
    """Of n given tokens, max(1, floor(n / 5)) count, those of highest entropy; ratios are over all G tokens."""
    set_advantages(rows, "r - m")
    assert any(row.given for row in rows)

    def kept(row):
        by_entropy = sorted(row.given, key=lambda k: (-row.old_entropies[k].item(), k))
        counted = by_entropy[: max(1, math.floor(0.2 * len(row.given)))]
        return [k for k in range(G) if k not in row.given or k in counted]

    def loss(row):
        gain = ppo(torch.exp((row.l[0] - row.old[0]).sum() / G), row.A)
        return total(0.01 * k3(row.l[0][k], row.ref[0][k]) - gain for k in kept(row))

    return by_batch(rows, loss, lambda row: len(kept(row)))


def trees_of(rows):
    """The completions of each prompt as a tree: for each child of the root, its first leaf and all of its leaves."""
    for group in groups_of(rows):
        nodes = []
        for first in (row for row in group if row.start == 0):
            early = [k for k in range(G) if 0 <= first.steps[k] < 2]
            others = [
                row
                for row in group
                if row.start == 2
                if [(row.ids[k], row.steps[k]) for k in early] == [(first.ids[k], first.steps[k]) for k in early]
            ]
            nodes.append((first, [first, *others]))
        assert [len(leaves) for _, leaves in nodes] == [2, 2]
        yield nodes


def revealed_by_edge(row, begin, end):
    """The positions that the steps of an edge reveal, up to the first EOS of its child."""
    there = [k for k in range(G) if 0 <= row.steps[k] < end]
    ends = [k for k in there if row.ids[k] in ENDS]
    return [k for k in there if row.steps[k] >= begin and (not ends or k <= ends[0])]


def d_treerpo(rows):
    """Trees of 2 x 2 leaves with 4 steps: the root and its two children are three parents, two of them in update 0."""
    update = rows[0].update
    progress, edges = update / 2, (4, 2)[update]
    lam = 0.003 * (math.exp(2 * progress) - 1) / (math.exp(2) - 1)
    tau = max(1e-6, 2 * (1 - progress) ** 0.7)
    losses, divergences = [], []
    for nodes in trees_of(rows):
        values = [mean(leaf.reward for leaf in leaves) for _, leaves in nodes]
        parents = [([first for first, _ in nodes], values, 0, 2)]
        parents += [(leaves, [leaf.reward for leaf in leaves], 2, 4) for _, leaves in nodes]
        taking_part = 0
        for children, value, begin, end in parents:
            view = begin // 2
            of_edges = [revealed_by_edge(child, begin, end) for child in children]
            scored = [child.drawn[view].nonzero().flatten().tolist() for child in children]
            if not any(scored):  # not in this update, or nothing to score
                continue
            assert scored == of_edges
            taking_part += 1
            advantages = [value[0] - value[1], value[1] - value[0]]
            for child, positions, advantage in zip(children, of_edges, advantages, strict=True):
                new, old, ref = (values[view][positions] for values in (child.l, child.old, child.ref))
                gain = ppo(torch.exp(new - old), advantage, 0.4, 0.4)
                losses.append((-gain + 0.01 * k3(new, ref)).sum() / max(len(positions), 1))
            better = [number for number in (0, 1) if advantages[number] > 0]
            for k in sorted({k for number in better for k in of_edges[number]}):
                here = [number for number in better if k in of_edges[number]]
                powers = torch.stack([torch.exp(advantages[number] / tau) for number in here])
                q = powers / powers.sum()
                by_token = {}
                for number, share in zip(here, q, strict=True):
                    token = children[number].ids[k]
                    by_token[token] = by_token.get(token, 0) + share
                kl = total(share * torch.log(share) for share in by_token.values())
                kl = kl - total(share * children[number].l[view][k] for number, share in zip(here, q, strict=True))
                divergences.append(kl)
        assert taking_part <= edges / 2
    return total(losses) / edges / 2 + lam * mean(divergences)


def slim_rl(rows):
    """A view is a row of the release's mean. Its prompt and its blocks do not matter to the loss."""
    set_advantages(rows, "r - m")
    views = []
    for row in rows:
        for view, node in enumerate((5 / 18, 4 / 9, 5 / 18)):
            positions = scored_in(row, view, row.text)
            d = row.l[view][positions] - row.old[view][positions]
            assert len(d)
            kl = k3(row.l[view][positions], row.old[view][positions]).sum() / G
            views.append(node * (0.01 * kl - ppo(torch.exp(d.mean()), row.A, 0.1, 0.1)))
    return mean(views)


def lightning_rl(rows):
    """Means over the tokens of a micro-batch are over one completion: a device has one row. z without TRL's 1e-4. The
    reward is the sum of being right and of a second number, which stands for the speed: here, speeds can be equal."""
    assert 0 < sum(row.is_right for row in rows) < len(rows)
    sums = []
    for group in groups_of(rows):
        z = 0.0
        for values in ([row.is_right for row in group], [row.reward - row.is_right for row in group]):
            values = torch.stack(values)
            s = values.std(correction=0)
            z = z + ((values - values.mean()) / s if s > 0 else torch.zeros(len(group)))
        sums.append(z)
    normalised = torch.cat(sums)
    normalised = (normalised - normalised.mean()) / normalised.std()
    losses = []
    for row, A in zip((row for group in groups_of(rows) for row in group), normalised, strict=True):
        row.A = A
        new, old, ref = one_view(row)
        tokens = -ppo(torch.exp(new - old), row.A) + 0.01 * k3(new, ref) - 0.1 * row.is_right * new
        losses.append(tokens.mean())
    return mean(losses)


PUBLISHED = {
    "d1": d1,
    "wd1": wd1,
    "coupled-grpo": coupled,
    "espo": espo,
    "spg": spg,
    "agrpo": agrpo,
    "agrpo-entropy": lambda rows: agrpo(rows, by_entropy=True),
    "cj-grpo": cj_grpo,
    "d2": d2,
    "tracerl": tracerl,
    "just-grpo": just_grpo,
    "just-grpo-blocks": just_grpo_blocks,
    "just-grpo-fast": lambda rows: just_grpo_blocks(rows, least=4),
    "unigrpo": unigrpo,
    "bgpo": bgpo,
    "stable-drl": stable_drl,
    "egspo": egspo,
    "egspo-sa": lambda rows: egspo(rows, lam=0.5),
    "gdpo": gdpo,
    "gdsd": gdsd,
    "rldf": rldf,
    "dipo": dipo,
    "ebpo": ebpo,
    "dmpo": dmpo,
    "igpo": igpo,
    "d-treerpo": d_treerpo,
    "slim-rl": slim_rl,
    "lightning-rl": lightning_rl,
}
# Options of the trainer: fewer or more views than the method's, or rewards of its own
OPTIONS = {
    "d2": {"segments": 4},
    "egspo": {"num_views": 8},
    "egspo-sa": {"num_views": 8},
    "lightning-rl": {
        "reward": [by_letter, has_even_letters],
        "reward_weights": [1.0, 1.0],
        "min_speed_spread": 0.0,
    },
}
OURS = {"trajectory", "reinforce", "quick-replay"}  # not published, see tests/d1/scoring and studies/leaderboard


def stated():
    """Method -> the bound of the relative difference of loss and gradient given in the document."""
    lines = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.e-]+) \|[^|]*\|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: float(largest) for name, largest in lines}


def test_every_published_method_has_its_formula_and_its_row_in_the_document():
    assert set(PUBLISHED) == set(METHODS) - OURS == set(stated())


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_methods_loss_and_gradient_are_its_authors(tiny_model_dir, tiny_block_dir, tmp_path, method):
    trainer = make_method(
        tiny_block_dir if method in IN_BLOCKS else tiny_model_dir,
        tmp_path,
        method,
        Recorder,
        ends=ENDS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=BATCHES,
        steps_per_generation=BATCHES,
        learning_rate=0.0,
        right_share=None,
        prompt_share=1.0,
        **OPTIONS.get(method, {}),
    )
    trainer.train()
    assert len(trainer.parts) == 2 * BATCHES
    largest = 0.0
    # Before the first update, rows are not compared: real ones are known to be equal, unlike the replaced ones here.
    for update in (1,) if method == "stable-drl" else (0, 1):
        parts = trainer.parts[update * BATCHES :][:BATCHES]
        rows = [row for number, part in enumerate(parts) for row in rows_of(part, number, trainer)]
        assert len(groups_of(rows)) == 2
        assert len({row.length for row in rows}) > 1
        expected = PUBLISHED[method](rows)
        leaves = [part.logps for part in parts]
        slopes = torch.autograd.grad(expected, leaves, materialize_grads=True)
        found = sum(part.loss for part in parts)
        size = max(slope.abs().max() for slope in slopes)
        assert size > 1e-6
        differences = [(found - expected).abs() / max(1.0, abs(expected.item()))]
        differences += [(leaf.grad - slope).abs().max() / size for leaf, slope in zip(leaves, slopes, strict=True)]
        largest = max(largest, *(difference.item() for difference in differences))
    assert stated()[method] / 10 < largest <= stated()[method]  # a larger bound would say nothing
