"""SFT with masks and uniform ids: the loss against Bayes' rule and Automodel; the noise; one run."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from d1.models import head, load_model, load_tokenizer
from d1.models.kinds import native_config
from d1.runs.data import IGNORED
from d1.sampling.scdd import MixedNoise
from d1.sft import dLLMDataCollator, dLLMSFTDataset
from d1.sft.config import SFTConfig
from d1.sft.scdd import SCDDCollator, SCDDTrainer, grid_time, scdd_losses
from d1.sft.stage import check_noise
from tests import forks
from tests.d1.sft.test_loss import MASK, assert_same, found, model_of, rows_of_all_lengths, train_and_save

VOCAB, STEP = 60, 1 / 1000
NOISE = MixedNoise(0.1)


# --- The forward process and the loss, by matrices over a tiny vocabulary ---------------------------------------------


def masses(t, ratio):
    """clean, uniform and mask mass, by the formula."""
    c = 2 * ratio / (1 - ratio) * (t * (1 - t)) ** 0.5
    return (1 - t) / (1 + c), c / (1 + c), t / (1 + c)


def marginal(t, ratio, ids):
    """(ids + 1, ids + 1): from a clean id to what is seen at time t; the last state is the mask, which stays."""
    clean, uniform, mask = masses(t, ratio)
    matrix = torch.zeros(ids + 1, ids + 1, dtype=torch.float64)
    matrix[:ids, :ids] = uniform / ids + clean * torch.eye(ids, dtype=torch.float64)
    matrix[:ids, ids] = mask
    matrix[ids, ids] = 1
    return matrix


def transition(s, t, ratio, ids):
    """The step from time s to t > s, the quotient of both marginals."""
    return torch.linalg.solve(marginal(s, ratio, ids), marginal(t, ratio, ids))


def bayes_loss(p, x, z, t, ratio):
    """The bound's step at t for the id x seen as z, from the two marginals and the step between them alone."""
    ids, s = len(p), t - STEP
    before, after, step = marginal(s, ratio, ids), marginal(t, ratio, ids), transition(s, t, ratio, ids)
    posterior = before[x] * step[:, z] / after[x, z]
    visible = 1 - masses(s, ratio)[2]
    f = (p @ before[:ids, :ids] / visible).log()
    if z == ids:
        return -(posterior[:ids] * f).sum().item() / STEP
    denominator = (p @ after[:ids, z] / (1 - masses(t, ratio)[2])).log()
    return -(posterior[:ids] * (f - denominator)).sum().item() / STEP


def test_masses_are_the_published_ones():
    for t, expected in ((0.5, (0.45, 0.10, 0.45)), (0.25, (0.68417, 0.08778, 0.22806))):
        time = torch.tensor(t, dtype=torch.float64)
        mask, uniform = NOISE.mask_mass(time), NOISE.uniform_mass(time)
        assert (1 - mask - uniform, uniform, mask) == pytest.approx(expected, abs=5e-6)
        assert NOISE.rho(time).item() == pytest.approx((expected[0] / (1 - expected[2])), abs=2e-5)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    assert NOISE.uniform_mass(grid).argmax() == 500  # the peak is `uniform_ratio`, at t = 1/2
    assert NOISE.uniform_mass(grid).max().item() == pytest.approx(0.1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.6])
def test_the_marginals_compose(ratio):
    """Each step is a stochastic matrix, masks stay masks, and a redrawn token is uniform: so the marginals form one
    Markov process, whose steps also compose."""
    for r, s, t in ((0.1, 0.3, 0.7), (0.5, 0.501, 0.98)):
        step = transition(s, t, ratio, 4)
        assert step.min() > -1e-12
        assert torch.allclose(step.sum(1), torch.ones(5, dtype=torch.float64))
        assert torch.allclose(step[:4, :4] - step[0, 1], (step[0, 0] - step[0, 1]) * torch.eye(4).double())
        assert torch.allclose(transition(r, s, ratio, 4) @ step, transition(r, t, ratio, 4))


def losses_of(logits, x, z, t, ratio=0.1, mask=None):
    """`scdd_losses` of one distribution for several pairs, in fp64; the mask is the last id."""
    count, mask = len(x), logits.shape[-1] - 1 if mask is None else mask
    given = (
        logits.double().expand(count, -1),
        torch.tensor(x),
        torch.tensor(z),
        torch.full((count,), t, dtype=torch.float64),
    )
    return scdd_losses(*given, MixedNoise(ratio), mask)


@pytest.mark.parametrize(
    ("p", "ratio", "expected"),
    [
        ([0.2] * 5, 0.1, [3.2186, 0, 0]),
        ([0.5] + [0.125] * 4, 0.1, [1.9558, -0.1858, -1.8332]),
        ([0.5] + [0.125] * 4, 0.0, [1.3863, 0, 0]),
    ],
)
def test_numbers_of_five_ids(p, ratio, expected):
    """t = 1/2: hidden, kept, replaced by another id. Automodel, in fp32, has -1.8331 for the last."""
    logits = torch.cat([torch.tensor(p).double().log(), torch.tensor([1.5])])  # the mask's logit counts nowhere
    result = losses_of(logits, [0, 0, 0], [5, 0, 1], 0.5, ratio)
    assert result.tolist() == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("t", [0.002, 0.1, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.6])
def test_the_loss_is_that_of_bayes_rule_for_every_pair(ratio, t):
    ids = 4
    logits = torch.randn(ids + 1, generator=torch.Generator().manual_seed(int(t * 1000))).double() * 2
    p = logits[:ids].softmax(-1)
    pairs = [*itertools.product(range(ids), range(ids + 1))]
    result = losses_of(logits, *map(list, zip(*pairs, strict=True)), t, ratio)
    expected = [bayes_loss(p, x, z, t, ratio) for x, z in pairs]
    assert result.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)  # of numbers of some 1e-3, times 1000


def test_fp32_is_near_fp64_for_all_times_and_a_confident_model():
    generator = torch.Generator().manual_seed(0)
    count, vocabulary = 2000, 500
    logits = torch.randn(count, vocabulary, generator=generator) * 4
    clean = torch.randint(1, vocabulary, (count,), generator=generator)
    logits[torch.arange(count), clean] += 12
    noised = torch.where(torch.rand(count, generator=generator) < 0.5, clean, clean % (vocabulary - 1) + 1)
    t = grid_time(torch.rand(count, generator=generator))
    result = scdd_losses(logits, clean, noised, t, NOISE, 0)
    exact = scdd_losses(logits.double(), clean, noised, t, NOISE, 0)
    assert (result - exact).abs().max() < 1e-4 * exact.abs().max()
    kept = noised == clean
    assert (result - exact)[kept].abs().max() < 1e-4  # a difference of two logarithms in fp32 would be off by 1e-3


def test_the_gradient_is_finite_where_the_model_is_certain_and_wrong():
    for t in (0.002, 0.5, 0.999):
        logits = torch.full((3, 6), -200.0)
        logits[:, 4] = 200.0
        logits.requires_grad_()
        times = torch.full((3,), t).double()
        result = scdd_losses(logits, torch.tensor([0, 0, 0]), torch.tensor([5, 0, 1]), times, NOISE, 5)
        result.sum().backward()
        assert result.isfinite().all()
        assert logits.grad.isfinite().all()


def test_automodels_function_gives_the_same_loss_and_gradient():
    automodel = pytest.importorskip("nemo_automodel.components.loss.dllm_loss")
    generator = torch.Generator().manual_seed(0)
    for vocabulary, ratio in itertools.product((6, 64, 3000), (0.0, 0.1, 0.5)):
        rows, length = 64, 12
        t = grid_time(torch.rand(rows, generator=generator))
        ours = (torch.randn(rows, length, vocabulary, generator=generator) * 3).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        clean, other = torch.randint(vocabulary - 1, (2, rows, length), generator=generator)
        clean, other = (ids + (ids >= MASK) for ids in (clean, other))
        draws = torch.rand(rows, length, generator=generator)
        noised = torch.where(draws < 0.4, MASK, torch.where((draws > 0.7) & (ratio > 0), other, clean))
        loss = automodel.SCDDLoss(MASK, max_ratio=ratio)(
            theirs,
            clean,
            noised != clean,
            t.float().unsqueeze(1).expand(rows, length),
            torch.ones(rows, length),
            num_diffusion_tokens=rows * length,
            noisy_input_ids=noised,
        ).total_loss
        loss.backward()
        times = t.unsqueeze(1).expand(rows, length).flatten()
        given = ours.flatten(0, 1), clean.flatten(), noised.flatten(), times, MixedNoise(ratio), MASK
        result = scdd_losses(*given).sum() / (rows * length)
        result.backward()
        # Automodel subtracts masses of neighbouring times in fp32: 1e-3 with an error of 6e-8.
        assert result.item() == pytest.approx(loss.item(), rel=2e-4)
        assert (ours.grad - theirs.grad).abs().max() < 2e-4 * theirs.grad.abs().max()


# --- Noise ------------------------------------------------------------------------------------------------------------


class Tokens:
    mask_token_id, eos_token_id, pad_token_id = MASK, 2, 0


def features(count, **options):
    rows = dLLMSFTDataset(rows_of_all_lengths(count), Tokens(), 64, eos_padding=1, **options)
    return [rows[i] for i in range(len(rows))]


def test_times_are_those_of_the_grid():
    assert grid_time(torch.tensor([0.0, 0.5, 0.9999, 1.0])).tolist() == [0.002, 0.501, 0.999, 0.999]
    times = grid_time(torch.linspace(0, 1, 100_000)) * 1000
    assert torch.equal(times, times.round())
    assert len(times.unique()) == 998


def test_answer_tokens_have_the_masses_of_their_time_and_replacements_are_uniform():
    collate = SCDDCollator(Tokens(), MixedNoise(0.3), 24)
    size = 4000
    text = torch.tensor([5] * 10 + [9] * size + [MASK] * 10)
    answer = torch.tensor([False] * 10 + [True] * (size + 10))
    counts = torch.zeros(24)
    for number, t in enumerate((0.05, 0.3, 0.5, 0.8, 0.99)):
        batch = collate([{"input_ids": text, "answer": answer, "key": (7, number), "t": t}])
        time = batch["t"].item()
        assert time == grid_time(torch.tensor(t)).item()
        noised = batch["input_ids"][0]
        assert torch.equal(noised[:10], text[:10])
        assert (noised[-10:] == MASK).all()
        noised = noised[10:-10]
        clean, uniform, mask = masses(time, 0.3)
        expected = {"mask": mask, "kept": clean + uniform / 23, "replaced": uniform * 22 / 23}
        kinds = {"mask": noised == MASK, "kept": noised == 9, "replaced": (noised != MASK) & (noised != 9)}
        for kind, share in expected.items():
            deviation = (share * (1 - share) / size) ** 0.5
            assert abs(kinds[kind].double().mean().item() - share) < 4 * deviation
        counts += noised[kinds["replaced"]].bincount(minlength=24)
    assert counts[MASK] == counts[9] == 0
    each = counts.sum() / 22
    drawn = torch.cat([counts[:MASK], counts[MASK + 1 : 9], counts[10:]])
    assert ((drawn - each) ** 2 / each).sum() < 21 + 4 * 42**0.5  # chi squared with 21 degrees of freedom


def test_a_rows_noise_depends_on_the_row_alone():
    rows = features(32)
    padded = SCDDCollator(Tokens(), NOISE, VOCAB)(rows)
    packed = SCDDCollator(Tokens(), NOISE, VOCAB, packed=True)(rows)
    assert torch.equal(padded["t"], packed["t"])
    for name in ("input_ids", "labels"):
        assert torch.equal(padded[name][padded["attention_mask"].bool()], packed[name][0])
    for number, row in enumerate(rows):
        alone = SCDDCollator(Tokens(), NOISE, VOCAB)([row])
        assert torch.equal(alone["input_ids"][0], padded["input_ids"][number][: alone["input_ids"].shape[1]])
    replaced = (padded["labels"] != IGNORED) & (padded["input_ids"] != MASK) & (padded["input_ids"] != padded["labels"])
    assert replaced.any()
    assert torch.equal(
        padded["input_ids"][padded["labels"] == IGNORED],
        dLLMDataCollator(Tokens())(rows)["input_ids"][padded["labels"] == IGNORED],
    )


def test_evaluation_has_the_same_noise_at_a_grid_of_times():
    rows = features(16, eval=True)
    batch = SCDDCollator(Tokens(), MixedNoise(0.5), VOCAB)(rows)
    assert torch.equal(batch["t"], grid_time(torch.tensor([row["t"] for row in rows])))
    replaced = (batch["labels"] != IGNORED) & (batch["input_ids"] != MASK) & (batch["input_ids"] != batch["labels"])
    assert replaced.any()


# --- A step of training -----------------------------------------------------------------------------------------------


def make_trainer(model_dir, folder, batch, accumulation, noise=NOISE, rows=None, **options):
    tokenizer = load_tokenizer(str(model_dir))
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        num_train_epochs=1,
        logging_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
    )
    return SCDDTrainer(
        model=model_of(model_dir, None, dtype=torch.float64),
        args=args,
        data_collator=SCDDCollator(tokenizer, noise, VOCAB, **options),
        train_dataset=dLLMSFTDataset(rows or rows_of_all_lengths(), tokenizer, 64, eos_padding=1),
        processing_class=tokenizer,
    )


def one_step(model_dir, folder, batch, accumulation, **options):
    train_and_save(make_trainer(model_dir, folder, batch, accumulation, **options))


@pytest.fixture(scope="module")
def by_hand(tiny_model_dir, tmp_path_factory):
    """Loss and gradient of all rows, each alone and without padding, divided by all answer tokens."""
    model = model_of(tiny_model_dir, None, dtype=torch.float64).eval()
    (batch,) = make_trainer(tiny_model_dir, tmp_path_factory.mktemp("by_hand"), 8, 1).get_train_dataloader()
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, visible, t in zip(
        *(batch[name] for name in ("input_ids", "labels", "attention_mask", "t")), strict=True
    ):
        length = int(visible.sum())
        logits, at = model(input_ids=ids[None, :length]).logits[0], labels[:length] != IGNORED
        given = logits[at], labels[:length][at], ids[:length][at], t.expand(int(at.sum()))
        total = total + scdd_losses(*given, NOISE, MASK).sum()
    total = total / (batch["labels"] != IGNORED).sum()
    total.backward()
    return total.item(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", [(8, 1), (4, 2), (1, 8)])
def test_the_step_is_that_of_a_loop_however_it_is_split(tiny_model_dir, tmp_path, by_hand, split, packed):
    one_step(tiny_model_dir, tmp_path, *split, packed=packed)
    assert_same(found(tiny_model_dir, tmp_path), by_hand)


def test_chunks_of_positions_change_nothing(tiny_model_dir, tmp_path, by_hand, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4 * 3 * VOCAB)  # three positions at a time
    one_step(tiny_model_dir, tmp_path, 8, 1)
    assert_same(found(tiny_model_dir, tmp_path), by_hand)


def test_two_processes(tiny_model_dir, tmp_path, by_hand):
    log = tmp_path / "log"
    environment = {"ACCELERATE_USE_CPU": "true"}
    started = forks.start(
        one_step, tiny_model_dir, tmp_path, 2, 2, log=log, folder=tmp_path, processes=2, **environment
    )
    forks.finish(started, log)
    assert_same(found(tiny_model_dir, tmp_path), by_hand)


def test_without_uniform_ids_it_is_the_loss_of_masks_at_the_same_times(tiny_model_dir, tmp_path):
    """m = 0: the same masks as plain SFT with this schedule, and its cross-entropy over t, except that the mask itself
    is no id that the model can predict: log(1 - p(mask)) per token."""
    trainer = make_trainer(tiny_model_dir, tmp_path, 8, 1, noise=MixedNoise(0.0))
    (batch,) = trainer.get_train_dataloader()
    assert torch.equal(batch["input_ids"] == MASK, batch["masked"])
    assert torch.equal(
        batch["input_ids"][~batch["masked"]],
        batch["labels"].where(batch["labels"] != IGNORED, batch["input_ids"])[~batch["masked"]],
    )
    model = trainer.model.eval()
    with torch.no_grad():
        result = trainer.row_losses(model, batch)
        rows, positions = batch["masked"].nonzero().unbind(1)
        logps = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
        at_masks = logps[rows, positions]
        losses = -at_masks.gather(1, batch["labels"][rows, positions].unsqueeze(1)).squeeze(1)
        losses = losses + torch.log1p(-at_masks[:, MASK].exp())
    expected = torch.zeros_like(result).index_add(0, rows, losses / batch["t"][rows])
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


# --- Settings and a run -----------------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused(tiny_model_dir, tiny_block_dir, tiny_causal_dir):
    with pytest.raises(ValueError, match=r"--uniform_ratio 0\.2 would do nothing: set --noise scdd"):
        SFTConfig(uniform_ratio=0.2)
    for wrong in ({"noise": "other"}, {"noise": "scdd", "uniform_ratio": 1.0}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            SFTConfig(**wrong)
    folders = {"block-causal": tiny_block_dir, "causal-context": tiny_causal_dir}
    for attention, folder in folders.items():
        args = SFTConfig(model_name="x", train_data="x", noise="scdd")
        with pytest.raises(ValueError, match=f"--noise scdd needs masks and full attention, .* has {attention} atten"):
            check_noise(args, native_config(str(folder))[0])
    config = native_config(str(tiny_model_dir))[0]
    for other in ({"edit_noise": "uniform"}, {"complementary_masks": True}):
        with pytest.raises(ValueError, match=f"--{next(iter(other))}.*--noise scdd"):
            check_noise(SFTConfig(model_name="x", train_data="x", noise="scdd", **other), config)


def test_models_with_uniform_noise_alone_are_refused(tiny_canvas_dir):
    args = SFTConfig(model_name="x", train_data="x", noise="scdd")
    with pytest.raises(ValueError, match="diffusion_gemma has uniform noise alone"):
        check_noise(args, native_config(str(tiny_canvas_dir))[0])


@pytest.mark.parametrize("full", [True, False])
def test_a_run_lowers_the_loss_and_records_what_the_model_learnt(tiny_model_dir, tmp_path, full):
    from d1.sft.train import main

    rows = [{"prompt": "ab" * (1 + i % 3), "completion": "cd" * (1 + i % 4)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ways = {"full_finetuning": True} if full else {"lora_r": 4, "merge_at_end": True}
    files = {"model_name": str(tiny_model_dir), "train_data": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path)}
    steps = {"max_steps": 20, "batch_size": 8, "grad_accum_steps": 1, "test_split": 0.2, "num_proc": 1}
    steps |= {"learning_rate": 1e-2, "eval_steps": 10, "lr_scheduler_type": "constant"}
    trainer = main(SFTConfig(job_name="run", debugging=True, noise="scdd", uniform_ratio=0.2, **files, **steps, **ways))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    for folder in ("run", "run/merged")[: 2 - full]:  # the adapter, too
        assert load_model(str(tmp_path / folder)).config.uniform_ratio == 0.2
    assert (tmp_path / "run" / "learnt.json").exists() != full
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (settings["noise"], settings["uniform_ratio"]) == ("scdd", 0.2)
    assert "masks and uniform ids (--noise scdd)" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.slow
def test_a_pocket_model_learns_the_noise(tmp_path):
    """On Sudoku, from a base of plain masks: the bound falls from 3.4 to 1.2 in 150 steps."""
    from d1.sft.train import main

    root = Path(__file__).parents[3]
    files = {"model_name": str(root / "pocket/base"), "train_data": str(root / "dataset/sudoku_sft.jsonl")}
    steps = {"max_steps": 150, "batch_size": 32, "grad_accum_steps": 1, "learning_rate": 2e-4, "eval_steps": 50}
    rows = {"template": ("{question}", "<answer> {attempt} </answer>"), "eos_padding": 40, "num_proc": 1}
    where = {"output_dir": str(tmp_path), "job_name": "run", "debugging": True, "full_finetuning": True}
    trainer = main(SFTConfig(noise="scdd", **files, **steps, **rows, **where))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] > 2
    assert losses[-1] < 1.5
