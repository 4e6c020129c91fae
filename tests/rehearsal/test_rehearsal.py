"""Samplers, estimators, losses, SFT and RL on the simulated device: the numbers of a run, and waits only where listed.

The host waits if it learns a number, a tensor or a shape from the device, or if an upload returns only after it has
finished. No wait is inside a loop over steps, except that of a parallel sampler.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from accelerate.test_utils.testing import AccelerateTestCase
from datasets import Dataset
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainingArguments

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.rl.batch import draw_updates, views_of
from d1.rl.losses import OBJECTIVES, PENALTIES, LossInputs
from d1.sampling import Rollout, SamplingSettings, infill, rollout
from d1.sampling.caches import CACHES
from d1.sampling.reveal import RULES
from d1.scoring import ESTIMATORS, Randomness, SampledRows, score
from d1.scoring.inputs import canvas_blocks
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from tests.d1.conftest import write_kind
from tests.d1.sampling.reference import MASK, SAMPLERS, make_prompts, sharper
from tests.d1.scoring import enumeration
from tests.d1.scoring.enumeration import CANVAS, SAMPLED, VISIBLE, settings, tiny
from tests.losses import settings as loss_settings
from tests.rehearsal.device import DEVICE, Misplaced, Waits, rehearsal
from tests.tiny_grpo import SETTINGS, TWO_BATCHES_A_STEP, logged, make_trainer, method_settings, weights

# Every allowed wait: place -> how often, per what. Any other wait is an error. The comment says why.
SAMPLING = {
    "d1/sampling/loop.py Sampler.check_finite": (1, "rollout"),  # after the last pass: are all values finite?
    "d1/sampling/rollouts.py rollout_steps": (1, "rollout"),  # is there padding? attention is fastest without a mask
    "d1/sampling/rollouts.py prompt_lengths": (1, "rollout of blocks"),  # which rows' blocks begin and end together
    "d1/sampling/loop.py Batch.finish_rows": (1, "block"),  # under the EOS stop: which rows have ended and leave
    "d1/sampling/loop.py Sampler.advance": (1, "parallel step"),  # which rows have more to reveal; is a step to follow?
}
INFILL = {
    "d1/sampling/loop.py Sampler.check_finite": (1, "fill"),
    "d1/sampling/infilling.py infill_steps": (2, "fill"),  # what is hidden and what is padding, before the first pass
}
SCORING = {
    "d1/models/attention.py padding_mask": (1, "scoring"),  # is there padding? attention is fastest without a mask
    "d1/scoring/views.py score": (1, "scoring"),  # which views score which tokens, for all its passes
    "d1/scoring/inputs.py SampledRows.to": (1, "column"),  # views are drawn where the generators are
}
LOSSES = {  # all for the log
    "d1/rl/losses.py clip_ratio_metric": (1, "loss with clipping"),
    "d1/rl/methods/stable_drl.py stable_drl": (1, "loss with a metric"),
    "d1/rl/methods/rldf.py rldf": (1, "loss with a metric"),
    "d1/rl/methods/lightning_rl.py clipped_views_nll": (1, "loss with a metric"),
}
SFT = {
    "d1/sft/trainer.py dLLMTrainer.row_losses": (1, "batch"),  # which tokens are hidden: the head is for these
    "d1/runs/trainer.py RunTrainer.require_finite": (1, "batch"),  # a loss that is not finite ends the run
    "d1/sft/trainer.py dLLMTrainer.log": (1, "log"),
}
RL = {**SAMPLING, **{place: times for place, times in SCORING.items() if "padding_mask" not in place}} | {
    "d1/rl/batch.py score_batch": (1, "scoring of whole batches"),  # is there padding in the rollout?
    "d1/rl/trainer.py DiffuGRPOTrainer.total_computed_tokens": (1, "log"),
    "d1/rl/batch.py record_and_costs": (1, "rollout"),  # passes, for the log
    "d1/rl/batch.py completion_ids_of": (1, "rollout"),
    "d1/runs/trainer.py RunTrainer.require_finite": (1, "batch"),
    "d1/rl/bridge.py CanvasGRPOTrainer._calculate_rewards": (1, "rollout"),  # the rewards, made on the host
    "d1/rl/bridge.py CanvasGRPOTrainer.sampled_batch": (1, "rollout"),  # groups with equal rewards, for the log
    "d1/rl/batch.py first_equal_updates": (1, "rollout"),  # are equal views to be scored once?
    "d1/rl/batch.py prompt_masked": (1, "rollout"),  # for the log, as the next four
    "d1/rl/batch.py sampling_gap": (2, "batch of a first update"),
    "d1/rl/batch.py largest_ratio": (1, "batch"),
    "d1/rl/batch.py mean_entropy": (1, "batch with a loss of ours"),
    "d1/rl/methods/stable_drl.py stable_drl": (1, "batch with a loss of ours"),
}


def expected(allowed, counts):
    """The number of waits at each place, given the number of each unit by which waits are counted."""
    return +Counter({place: times * counts.get(per, 0) for place, (times, per) in allowed.items()})


def upload(*parts):
    return [part.to(DEVICE, non_blocking=True) for part in parts]


def rehearse(run, allowed, counts):
    """`run(device)` gives the same tensors on the device as on a CPU, and waits `counts` times where it may."""
    with rehearsal(allowed) as waits:
        found = run(DEVICE)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = run("cpu")
    for one, other in zip(found, wanted, strict=True):
        assert one.device == DEVICE
        assert torch.equal(one.numbers, other)
    assert waits == expected(allowed, counts(wanted) if callable(counts) else counts)
    return wanted


# --- The device finds mistakes ----------------------------------------------------------------------------------------


def indexed(values):
    values[values > 1] = values[:2].clone()


NUMBERS = [1.0, 2.0, 3.0]
MISPLACED = {
    "plus a number from the CPU": lambda values: values + torch.tensor(1.0),
    "joined with the CPU": lambda values: torch.cat([values, torch.zeros(3)]),
    "filled in place from the CPU": lambda values: values.mul_(torch.ones(3)),
    "indexes a CPU tensor": lambda values: torch.zeros(3)[values.long()],
    "the CPU's generator": lambda values: torch.rand(3, generator=keyed_generator(0), device=values.device),
    "the device's generator": lambda values: torch.rand(3, generator=keyed_generator(0, device=values.device)),
}
WAITING = {
    "items in a loop": lambda values: values[0].item() + values[1].item() + values[2].item(),
    "listed": lambda values: values.tolist(),
    "copied to the CPU": lambda values: values.cpu(),
    "written to the CPU": lambda values: torch.zeros(3).copy_(values),
    "compared": lambda values: torch.equal(values, values),
    "boolean index": lambda values: values[values > 1],
    "boolean index written": indexed,
    "positions": lambda values: values.nonzero(),
    "selected": lambda values: values.masked_select(values > 1),
    "repeated": lambda values: values.repeat_interleave(values.long()),
    "upload that waits": lambda values: values + torch.tensor(NUMBERS).to(values.device),
    "upload of numbers": lambda values: values + torch.tensor(NUMBERS, device=values.device),
    "upload like another": lambda values: values + values.new_tensor(NUMBERS),
    "index on the CPU": lambda values: values[torch.tensor([2, 0])],
}


@pytest.mark.parametrize("name", [*MISPLACED, *WAITING])
def test_a_mistake_is_an_error_and_an_allowed_wait_is_counted(name):
    mistake, wrong = {**MISPLACED, **WAITING}[name], Misplaced if name in MISPLACED else Waits
    place = f"tests/rehearsal/test_rehearsal.py {mistake.__name__}"
    with rehearsal(()) as waits:
        [values] = upload(torch.tensor(NUMBERS))
        with pytest.raises(wrong, match=f"in {place}$" if wrong is Waits else None):
            mistake(values)
    assert not waits
    if wrong is Waits:
        with rehearsal({place}) as waits:
            mistake(*upload(torch.tensor(NUMBERS)))
        assert waits == {place: 3 if name == "items in a loop" else 1}
    with pytest.raises(RuntimeError, match="a rehearsal that is over"):
        values + 1


# --- Sampling and scoring ---------------------------------------------------------------------------------------------

LENGTHS = {"gen_length": 12, "block_length": 4, "steps": 9}
ENDS = list(range(4, 24))  # of 64 tokens: rows end early, and leave
DRAWN = {"temperature": 0.8, "cfg_scale": 0.5}
CASES = [  # kind of model, settings, what ends a row
    *(
        ("llada", SAMPLERS[n] | DRAWN, ENDS) for n in (0, 1, 2, 3, 6, 8, 10, 12, 13)
    ),  # each cache and rule, not each pair
    *(("llada", SAMPLERS[n], None) for n in (0, 12)),
    ("llada", {"remasking": "random", "temperature": 0.8}, ENDS),
    *(("Dream", sampler | DRAWN, ENDS) for sampler in SAMPLERS[2:4]),  # which predicts the next token
    ("sdar", DRAWN, ENDS),  # block-causal, with the cache of its finished blocks
    ("sdar", {"sampler": "parallel", "temperature": 0.8}, ENDS),
    ("sdar", {"sampler": "parallel", "reveal": "entropy"}, None),
]
COLUMNS = [field.name for field in fields(Rollout)][:-1]  # without `writes`


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp("rehearsed") / kind for kind in ("llada", "Dream", "sdar")}
    return {kind: sharper(load_model(write_kind(folder, kind))) for kind, folder in folders.items()}


def test_every_cache_and_rule_is_among_the_cases():
    chosen = [SamplingSettings(**LENGTHS, **settings) for _, settings, _ in CASES]
    assert {settings.cache for settings in chosen} == {None, *CACHES}
    assert {settings.rule for settings in chosen} == {None, *RULES}


def finished_blocks(reveal_steps, widths, blocks):
    """The number of filled blocks that are not the last: of all rows, or of rows whose `blocks` begin together."""
    after, count = [width % 4 if blocks else 0 for width in widths], 0
    for own in set(after):
        rows = [row for row, other in enumerate(after) if other == own]
        ends = range(4 - own, 12, 4)
        count += sum((reveal_steps[rows, max(end - 4, 0) : end] >= 0).any().item() for end in ends)
    return count


@pytest.mark.parametrize(("kind", "settings", "ends"), CASES, ids=range(len(CASES)))
def test_a_rollout(models, kind, settings, ends):
    widths = [6, 3, 4, 6] if ends else [6, 6, 6, 6]  # with padding and without
    prompts, passes = make_prompts(widths, 1), []

    def run(device):
        passes.clear()
        generators = [keyed_generator(1, row, device=device) for row in range(4)]
        model = deepcopy(models[kind]).to(device, non_blocking=True)
        model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
        options = {"mask_token_id": MASK, "generator": generators, "eos_token_ids": ends}
        given = [part.to(device, non_blocking=True) for part in prompts]
        sampled = rollout(model, *given, **LENGTHS, **settings, **options)
        return [part for name in COLUMNS if (part := getattr(sampled, name)) is not None]

    def counts(real):
        steps = real[COLUMNS.index("reveal_steps")]
        assert not ends or (steps < 0).any()  # some row has left
        parallel = len(passes) if "parallel" in settings.get("sampler", "") else 0
        blocks = finished_blocks(steps, widths, kind == "sdar") if ends else 0
        return {"rollout": 1, "rollout of blocks": kind == "sdar", "parallel step": parallel, "block": blocks}

    rehearse(run, SAMPLING, counts)


def test_filling_holes(models):
    ids, mask = make_prompts([12, 9, 12], 1)
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[0, 2:7] = hidden[1, 5:8] = hidden[2, ::3] = True

    def run(device):
        model, *given = (part.to(device, non_blocking=True) for part in (deepcopy(models["llada"]), ids, hidden, mask))
        filled = infill(model, *given, mask_token_id=MASK, block_length=2)
        return [part for name in COLUMNS if (part := getattr(filled, name)) is not None]

    rehearse(run, INFILL, {"fill": 1})


VIEWS = {"num_views": 3, "antithetic": True, "stratified": True, "draw_steps": "entropy", "p_mask_prompt": 0.5}


@pytest.mark.parametrize("block", [None, 2], ids=["full attention", "blocks"])
@pytest.mark.parametrize("name", [name for name, of in ESTIMATORS.items() if not of.uniform_noise])
def test_views_and_their_scores(name, block):
    """Log-probs, of each view and summed, the entropies, the computed tokens, and the gradient of each weight."""
    sampled = replace(SAMPLED, blocks=canvas_blocks(VISIBLE, CANVAS, block))

    def run(device):
        model = deepcopy(tiny(2, block=block)).to(device, non_blocking=True)
        rows = SampledRows(
            **{key: part if part is None else part.to(device, non_blocking=True) for key, part in vars(sampled).items()}
        )
        random = Randomness([keyed_generator(2, row) for row in range(4)], keyed_generator(2), 0, 4)
        batch = draw_updates(rows, random, 2, ESTIMATORS[name], settings(**VIEWS))
        given = rows.prompt_ids, rows.attention_mask, rows.canvas_ids, views_of(batch, 1)
        scores = score(model, *given, mask_token_id=enumeration.MASK, gen_length=CANVAS, with_entropies=True)
        scores.logps.sum().backward()
        found = [part.detach() for part in scores if part is not None]
        return [*batch.values(), *found, *(weight.grad for weight in model.parameters())]

    columns = sum(column is not None for column in vars(sampled).values())
    rehearse(run, SCORING, {"scoring": 1, "column": columns})


# --- Training ---------------------------------------------------------------------------------------------------------


def test_objectives_and_penalties():
    """Each one's value and gradient."""
    random = keyed_generator(0)
    drawn = [-torch.rand(4, 3, 6, generator=random) for _ in range(3)] + [torch.rand(4, 3, 6, generator=random)]
    mask, advantages = torch.ones(4, 6, dtype=torch.long), torch.tensor([1.0, -1.0, 0.5, -0.5])
    mask[1, 3:] = mask[2] = 0
    drawn += [mask.sum(), mask, advantages, torch.arange(6).repeat(4, 1)]
    objectives = (entry for entry in OBJECTIVES.values() if entry.loss is not None)
    functions = [*objectives, *PENALTIES.values()]

    def run(device):
        parts = (part.to(device, non_blocking=True) for part in drawn)
        logps, old, reference, weights, tokens, mask, advantages, steps = parts
        for function in functions:
            new = logps.clone().requires_grad_()
            given = (new, old, reference, weights * (weights > 0.5), advantages, mask, tokens)
            loss = function(LossInputs(*given, reveal_steps=steps, is_right=advantages > 0), loss_settings())
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            yield from (loss.detach(), new.grad)

    rehearse(lambda device: [*run(device)], LOSSES, {"loss with clipping": 9, "loss with a metric": 1})


OPTIMIZER = {"optim": "adamw_torch", "learning_rate": 1e-2}  # the fused one is a kernel of real devices


@pytest.fixture
def trained(monkeypatch):
    """`trained(allowed, make)`: a trainer, trained on the device and on a CPU to the same weights; its waits."""

    def on(device):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        AccelerateTestCase().tearDown()  # Accelerate keeps the device for the process

    def train(allowed, make):
        on(DEVICE)
        with rehearsal(()):
            rehearsed = make("rehearsed")
        with rehearsal(allowed) as waits:
            rehearsed.train()
            found = weights(rehearsed.model)
        on("cpu")
        with sdpa_kernel(SDPBackend.MATH):
            real = make("real")
            before = weights(real.model)
            real.train()
        for name, weight in weights(real.model).items():
            assert not torch.equal(weight, before[name]), name
            assert torch.equal(found[name].numbers, weight), name
        assert [entry["loss"] for entry in logged(rehearsed)] == [entry["loss"] for entry in logged(real)]
        return waits

    yield train
    AccelerateTestCase().tearDown()


@pytest.mark.parametrize("block", [None, 4], ids=["full attention", "two streams"])
def test_sft(block, trained, tiny_model_dir, tiny_block_dir, tmp_path):
    folder = str(tiny_block_dir if block else tiny_model_dir)
    tokenizer, rows = load_tokenizer(folder), []
    for length in range(6, 14):  # of a prompt of three tokens and an answer
        answer = {"answer": [False] * 3 + [True] * (length - 3), "length": length, "start": 3, "status": "ok"}
        rows.append({"input_ids": [*range(8, 8 + length)]} | answer)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    options |= {"logging_nan_inf_filter": False, "remove_unused_columns": False}  # as in SFT: else it waits
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, **OPTIMIZER}

    def make(name):
        return dLLMTrainer(
            model=load_model(folder),
            args=TrainingArguments(output_dir=str(tmp_path / name), **options),
            data_collator=dLLMDataCollator(tokenizer, block_size=block),
            train_dataset=dLLMSFTDataset(Dataset.from_list(rows), tokenizer, 64, eos_padding=1),
            processing_class=tokenizer,
        )

    assert trained(SFT, make) == expected(SFT, {"log": 2, "batch": 4})


@pytest.mark.parametrize(("method", "at_first", "later"), [("d1", 4, 6), ("stable-drl", 2, 2 + 6)])
def test_rl(method, at_first, later, trained, tiny_model_dir, tmp_path):
    """Two rollouts of two batches: both updates on the first, one step each, and the first update on the second.

    Scorings: of each rollout's two batches old and, with d1, reference log-probs under the views of both updates, then
    each batch's own and, with StableDRL, those with which all rows are compared before each later update.
    """
    base = (SETTINGS if method == "d1" else method_settings(method)) | TWO_BATCHES_A_STEP | OPTIMIZER
    make = partial(make_trainer, tiny_model_dir, base=base, save_strategy="no")
    waits = trained(RL, lambda name: make(tmp_path / name))
    counts = {"rollout": 2, "block": 2, "log": 4, "batch": 6, "batch of a first update": 4}
    counts |= {"scoring": 2 * 2 * at_first + later, "scoring of whole batches": 2 * at_first + later}
    counts |= {"column": 2 * 8, "batch with a loss of ours": 0 if method == "d1" else 6}
    assert waits == expected(RL, counts)
