"""Episodes in RL: each turn is scored given its true prefix on its own canvas, and an episode is one completion."""

import json
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from d1.masking import keyed_generator
from d1.models import load_model
from d1.report import ShowProblems
from d1.rl.batch import RankView, loss_inputs, sampled_rows, score_batch, views_of
from d1.rl.bridge import rollout_buffer
from d1.rl.losses import MEANS, OBJECTIVES, PENALTIES, LossInputs
from d1.sampling import rollout
from d1.scoring import ESTIMATORS, Randomness, ViewSettings
from d1.scoring.inputs import CanvasBlocks
from d1.show.film import GIVEN
from d1.tools.calls import FORMATS
from d1.tools.trainer import flatten_episodes, stack_turns
from d1.tools.turns import Episode
from tests import forks
from tests.d1.rl.tool_runs import EPISODES, TURNS, last_letters, make_turns, repeat, run_turns
from tests.rounding import LOGITS, TOKENS, assert_near, largest, rounding
from tests.tiny_grpo import assert_same, logged, make_trainer, rows, weights

HERE = Path(__file__)
AHEAD = {"rollout_mode": "server", "rollout_server_base_url": ["http://localhost:1"]}
AHEAD |= {"rollout_staleness": 1, "sampling_weight_cap": 3.0}
COSTS = ("forward_passes", "forward_tokens")


@pytest.fixture(autouse=True)
def formats():
    """Removes the format that `make_turns` adds."""
    yield
    FORMATS.pop("test", None)


# --- Layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full attention", "block-causal"])
def test_one_turn_is_a_run_without_tools_to_the_bit(tiny_model_dir, tiny_block_dir, tmp_path, kind):
    model_dir = tiny_model_dir if kind == "full attention" else tiny_block_dir
    own = ("max_turns", "tool_format")
    base = {name: value for name, value in TURNS.items() if name not in own}
    plain = make_trainer(model_dir, tmp_path, reward=last_letters, base=base, max_steps=3)
    plain.train()
    one = make_turns(model_dir, tmp_path, max_turns=1, max_steps=3)
    one.train()
    for first, other in zip(rollout_buffer(plain), rollout_buffer(one), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in first.items())
    found = weights(one.model)
    assert all(torch.equal(value, found[name]) for name, value in weights(plain.model).items())
    assert [entry["loss"] for entry in logged(plain)] == [entry["loss"] for entry in logged(one)]


@pytest.mark.parametrize("estimator", ["one_step", "replay"])
def test_results_are_neither_scored_nor_hidden_and_both_turns_have_ratio_1(tiny_model_dir, tmp_path, estimator):
    clean = {"p_mask_prompt": 0.0} if estimator == "replay" else {"p_mask_prompt": 0.5}
    objective = {"objective": "clipped_views", "estimator": estimator, "beta": 0.0, **clean}
    trainer = make_turns(tiny_model_dir, tmp_path, max_steps=1, **objective)
    trainer.train()
    entry, (batch,) = logged(trainer)[0], rollout_buffer(trainer)
    assert entry["ratio_max"] == pytest.approx(1.0, abs=rounding(LOGITS))
    if estimator == "replay":
        assert entry["sampling/logp_difference_abs"] == pytest.approx(0.0, abs=rounding(LOGITS))
    assert entry["tools/turns"] > 1.2
    assert entry["tools/call_frequency"] > 0.2
    second = (batch["turn"] == 1) & batch["completion_mask"].any(-1)
    assert 2 <= second.sum() < (batch["turn"] == 1).sum()  # some episodes have one turn
    prompts = batch["prompt_mask"].shape[1]
    noise, weights_ = batch["view_noise"][..., :prompts], batch["view_weights"]
    assert not noise[~batch["maskable"][:, None, None].expand_as(noise)].any()
    assert (estimator == "replay") != bool(noise[second].any())  # the first prompt may be hidden in later turns, too
    kept = torch.nn.functional.pad(
        batch["completion_mask"], (0, weights_.shape[-1] - batch["completion_mask"].shape[1])
    )
    assert not weights_[(kept == 0)[:, None, None].expand_as(weights_)].any()
    # What a row scores is what its episode kept: the prompt of its second turn goes on with it.
    ids, real = batch["prompt_ids"], batch["prompt_mask"].bool()
    for row in second.nonzero().flatten().tolist():
        first_prompt = ids[row][batch["maskable"][row]].tolist()
        whole = ids[row][real[row]].tolist()
        firsts = [
            other
            for other in (batch["turn"] == 0).nonzero().flatten().tolist()
            if ids[other][real[other]].tolist() == first_prompt
            and whole[len(first_prompt) :][: batch["completion_mask"][other].sum()]
            == batch["completion_ids"][other][batch["completion_mask"][other].bool()].tolist()
        ]
        assert firsts
        assert any(batch["advantages"][other] == batch["advantages"][row] for other in firsts)


def saying(said):
    def tool(text: str) -> str:
        """A text.

        Args:
            text: Any.
        """
        return said

    return tool


def test_another_result_changes_only_the_scores_of_the_second_turn(tiny_model_dir, tmp_path):
    batches = []
    for said in ("bc", "cb"):
        trainer = make_turns(tiny_model_dir, tmp_path, saying(said), max_steps=1)
        trainer.model.train()
        batches.append(trainer._generate_and_score_completions([rows()[0]] * EPISODES))
    one, other = batches
    first, second = one["turn"] == 0, (one["turn"] == 1) & one["completion_mask"].any(-1)
    assert second.any()
    canvases = dict.fromkeys(("canvas_ids", "completion_ids"))
    other = {name: one[name] if name in canvases else value for name, value in other.items()}  # score the same canvases
    scores = [score_batch(trainer.model, batch, views_of(one, 0), mask_token_id=3).logps for batch in (one, other)]
    assert torch.equal(scores[0][first], scores[1][first])
    assert torch.equal(one["prompt_ids"][first], other["prompt_ids"][first])
    assert (scores[0][second] != scores[1][second]).any(-1).all()


def test_means_over_rows_are_means_over_episodes(tiny_model_dir, tmp_path):
    """Of each mean: rows of turns, with empty ones, against the sums of each episode's turns."""
    random = keyed_generator(3)
    logps = -torch.rand(6, 1, 4, generator=random)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0, 0.5, 0.5])
    inputs = LossInputs(
        view_logps=logps * mask.unsqueeze(1),
        view_old=None,
        view_reference=None,
        weights=mask.unsqueeze(1).float(),
        advantages=advantages,
        mask=mask,
        tokens=mask.sum(),
        active=torch.tensor(3.0),
        turns=2,
    )
    settings = type("Settings", (), {"max_completion_length": 4})
    per_row = -(advantages.unsqueeze(1) * logps.squeeze(1) * mask)
    episodes = per_row.sum(-1).view(3, 2).sum(1)
    means = (per_row.sum(-1) / mask.sum(-1).clamp(min=1)).view(3, 2).sum(1)
    expected = {"sum": episodes.mean(), "grpo": means.mean()}
    expected |= {"bnpo": episodes.sum() / 14, "dapo": episodes.sum() / 14, "active": episodes.sum() / 12}
    for name, value in expected.items():
        found = MEANS[name](per_row.sum(-1, keepdim=True), inputs, settings)
        torch.testing.assert_close(found, value, msg=name)


# --- Likelihood and gradient by enumeration ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["full", "block-causal"])
def test_the_likelihood_of_two_turns_and_its_gradient_equal_those_of_an_enumeration(
    tiny_model_dir, tiny_block_dir, tmp_path, attention
):
    """All episodes of canvases of three tokens out of eos, "a" and "b" (with blocks of four: some of them), whose tool
    is a function of the first turn. The sum of p r has the gradient that the trainer's parts give for the same
    episodes."""
    model_dir = tiny_model_dir if attention == "full" else tiny_block_dir
    length, block = (3, 1) if attention == "full" else (4, 4)
    model = load_model(str(model_dir)).double()
    options = {"max_completion_length": length, "block_length": block, "diffusion_steps": length}
    trainer = make_turns(model_dir, tmp_path, model=model, **options)
    prompt = [1, 5, 9, 10, 6]
    canvases = [*product((2, 8, 9), repeat=length)][:: 1 if attention == "full" else 7]
    found = {}
    for scripted in product(canvases, canvases):
        episode = Episode([{"role": "user", "content": "bc"}], prompt, {"repeat": repeat})
        trainer.toolbox.run_episodes([episode], lambda rows, turn, scripted=scripted: [list(scripted[turn])])
        # What follows a cut is no part of an episode.
        found.setdefault(tuple(tuple(turn.kept) for turn in episode.turns), (episode, scripted))
    episodes = [episode for episode, _ in found.values()]
    assert min(sum(len(one.turns) == turns for one in episodes) for turns in (1, 2)) > 2
    assert len({tuple(one.turns[1].prompt_ids[len(prompt) :]) for one in episodes if len(one.turns) > 1}) > 1
    rewards = torch.tensor([len(one.ids) % 3 + 0.3 * one.calls for one in episodes]).double()

    @cache
    def slow(prefix, kept):
        """log p of the first tokens of a canvas, from left to right, one forward pass per token."""
        total = torch.zeros((), dtype=torch.double)
        for at, token in enumerate(kept):
            ids = torch.tensor([[*prefix, *kept[:at], *[3] * (length - at)]])
            total = total + model(input_ids=ids).logits[0, len(prefix) + at].log_softmax(-1)[token]
        return total

    logps = torch.stack([sum(slow(tuple(of.prompt_ids), tuple(of.kept)) for of in one.turns) for one in episodes])
    (logps.exp() * rewards).sum().backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    # The trainer's way: rows of turns, views, scores, and REINFORCE with the advantage p r of each episode.
    parts, count = [], len(episodes)
    for turn in range(2):
        own = [row for row, one in enumerate(episodes) if len(one.turns) > turn]
        ids = torch.tensor([[*found.values()][row][1][turn] for row in own])
        parts.append((own, {"canvas_ids": ids, "reveal_steps": torch.arange(length).expand(len(own), -1)}))
    record = stack_turns(parts, count, 2, 2) | trainer.prompts_of_turns(episodes)
    ones = torch.ones(count, 1, dtype=torch.long)
    batch = {"advantages": logps.detach().exp() * rewards * count, "completion_mask": ones}
    batch = flatten_episodes(batch, record, 2, RankView(lambda value: value, 0))
    random = Randomness([keyed_generator(row) for row in range(2 * count)], keyed_generator(0), 0, 2 * count)
    settings = ViewSettings(gen_length=length, steps=length, block_length=block)
    views = ESTIMATORS["left_to_right"](sampled_rows(batch, CanvasBlocks.from_config(model.config)), random, settings)
    batch |= {"view_weights": views.weights.unsqueeze(1), "scoring_views": torch.ones(2 * count, 1)}
    counts = {"scored_pairs": torch.ones(2 * count, 1), "repeated_tokens": torch.ones(2 * count, 1)}
    batch |= {"active_rows": torch.ones(2 * count), **counts}
    scores = score_batch(model, batch, views, mask_token_id=3)
    inputs = loss_inputs(batch, scores, 0, turns=2)
    summed = (inputs.logps * inputs.mask).sum(-1).view(-1, 2).sum(1)
    assert_near(summed.double(), logps, least=LOGITS)
    model.zero_grad()
    (-OBJECTIVES["reinforce"](inputs, SimpleNamespace(loss_type="sum"))[0]).backward()
    for name, value in model.named_parameters():
        assert_near(value.grad, expected[name], least=largest([*expected.values()]), terms=TOKENS)


# --- Environments -----------------------------------------------------------------------------------------------------


class Counter:
    """An environment that counts: its state is its own, and it owns a reward."""

    made: ClassVar[list] = []

    def __init__(self):
        self.made.append(self)

    def reset(self, letter, **row):
        self.letter, self.said = letter, []
        return letter  # joins the prompt

    def get_reward(self):
        return 0.1 * len(self.said)

    def tell(self, text: str) -> str:
        """Tell something.

        Args:
            text: What.
        """
        self.said.append(text)
        while self.letter == "b" and len(self.said) == 1:  # hangs
            pass
        return self.letter * len(self.said)


def test_environments_keep_their_state_own_a_reward_and_leave_the_pool_if_they_hang(tiny_model_dir, tmp_path):
    Counter.made.clear()
    options = {"max_turns": 3, "max_steps": 3, "tool_seconds": 0.05}
    trainer = make_turns(tiny_model_dir, tmp_path, tool=None, environment_factory=Counter, **options)
    trainer.train()
    assert [entry["rewards/Counter/mean"] > 0 for entry in logged(trainer) if "tools/turns" in entry] == [True, True]
    hung = {one for one in Counter.made if one.letter == "b" and one.said}
    (pool,) = trainer._environment_pool.values()
    assert len(pool) + len(hung) >= EPISODES
    assert not hung & {*pool}
    trainer.model.train()
    given = [{**rows()[0], "letter": "q"}] * EPISODES
    batch = trainer._generate_and_score_completions(given)
    second = (batch["turn"] == 1) & batch["completion_mask"].any(-1)
    assert second.any()
    q = trainer.text_tokenizer.convert_tokens_to_ids("q")
    for row in second.nonzero().flatten().tolist():  # one q of the observation, and one of the first result
        assert (batch["prompt_ids"][row] == q).sum() >= 2
    with pytest.raises(ValueError, match="log_tool_results: an environment changes"):
        make_turns(tiny_model_dir, tmp_path, tool=None, environment_factory=Counter, log_tool_results=True)


def test_halves_of_characters_are_logged_and_kept(tiny_model_dir, tmp_path):
    """Of a tool's results, and of what a reward logs: TRL's files and tables refuse them."""

    def half(text: str) -> str:
        """Half of a character.

        Args:
            text: Any.
        """
        return "b\ud800"

    def reward(completions, log_extra, **columns):
        log_extra("note", ["\udc00 c"] * len(completions))
        return [float(len(said)) for said in completions]

    trainer = make_turns(tiny_model_dir, tmp_path, half, log_completions=True, logging_steps=1, max_steps=1)
    trainer.reward_funcs = [reward]
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = pq.read_table(file).to_pylist()
    results = [message["content"] for row in table for message in row["completion"] if message["role"] == "tool"]
    assert {*results} == {"b\ufffd"}
    assert {row["note"] for row in table} == {"\ufffd c"}


def test_a_vocabulary_that_cannot_write_a_call_is_refused_before_the_model_samples(tiny_model_dir, tmp_path):
    with pytest.raises(ValueError, match=r"cannot write '<call></call>', a call of the tool repeat"):
        make_turns(tiny_model_dir, tmp_path, tool_format="plain")


# --- Keys and processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full attention", "block-causal"])
def test_rows_depend_neither_on_the_subset_at_work_nor_on_its_batches(tiny_model_dir, tiny_block_dir, tmp_path, kind):
    model_dir = tiny_model_dir if kind == "full attention" else tiny_block_dir
    found = []
    for size in (None, 1, 3):
        trainer = make_turns(model_dir, tmp_path, max_turns=3, rollout_batch_size=size)
        trainer.model.train()
        found.append(trainer._generate_and_score_completions([rows()[row // 4] for row in range(EPISODES)]))
    for name in ("canvas_ids", "prompt_ids", "completion_mask", "reveal_steps", "view_noise"):
        assert torch.equal(found[0][name], found[1][name]), name
        assert torch.equal(found[0][name], found[2][name]), name
    batch, key, alone = found[0], trainer.key("rollout"), 0
    for row in batch["completion_mask"].any(-1).nonzero().flatten().tolist():
        episode, turn = divmod(row, 3)
        real = batch["prompt_mask"][row].bool()
        own = rollout(
            trainer.model.eval(),
            batch["prompt_ids"][row][real].unsqueeze(0),
            torch.ones(1, int(real.sum()), dtype=torch.long),
            trainer.sampling,
            mask_token_id=3,
            generator=[keyed_generator(*key, episode, *[turn] * bool(turn))],
            eos_token_ids=trainer.eos_token_ids,
        )
        kept = batch["completion_mask"][row].bool()
        canvas = own.ids[0, -batch["canvas_ids"].shape[1] :]
        assert torch.equal(canvas[: kept.shape[0]][kept], batch["completion_ids"][row][kept])
        alone += turn > 0
    assert alone > 3


@pytest.mark.parametrize("launcher", ["ddp", "fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_two_processes_with_unequal_turns_sample_the_episodes_of_one(tiny_model_dir, tmp_path, launcher):
    """Also where each process holds a part of the weights, and all make the same forward passes."""
    given = str(tiny_model_dir), str(tmp_path / "two"), "0", "", launcher
    run_turns(given[0], tmp_path / "one", launcher=launcher)
    environment = {"ddp": {"ACCELERATE_USE_CPU": "true"}, "fsdp2": forks.fsdp2(), "zero3": forks.deepspeed(3)}
    log = tmp_path / "log"
    started = forks.start(run_turns, *given, log=log, folder=HERE.parent, processes=2, **environment[launcher])
    forks.finish(started, log)
    one, two = (json.loads((tmp_path / name / "rollouts.json").read_text()) for name in ("one", "two"))
    assert one == two
    kind = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}[launcher]
    assert json.loads((tmp_path / "two" / "processes.json").read_text()) == [2, kind, launcher != "ddp"]
    # Turns that score something, of each process's episodes: in some rollouts, one process has more of them.
    turns = [[sum(any(row[2]) for row in half) for half in (rollout[:18], rollout[18:])] for rollout in two]
    assert any(first != second for first, second in turns)
    before, one, two = (
        load_file(folder / "model.safetensors") for folder in (tiny_model_dir, tmp_path / "one", tmp_path / "two")
    )
    for name, value in one.items():
        assert (value - before[name]).abs().max() > 5e-5
        assert_near(two[name], value, terms=TOKENS)


# --- Columns of earlier turns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["block-causal", "causal context"])
def test_turns_read_the_cached_tokens_of_those_before_and_episodes_are_those_of_recomputation(
    tiny_block_dir, tiny_causal_dir, tmp_path, kind
):
    """Exactly the whole clean blocks before the cut (with a causal context: those that were finished) are not processed
    again; an episode that has ended keeps nothing."""
    found = []
    for reads in (True, False):
        model_dir = tiny_block_dir if kind == "block-causal" else tiny_causal_dir
        clean = {"beta": 0.0, "p_mask_prompt": 0.0}
        trainer = make_turns(model_dir, tmp_path, max_turns=3, diffusion_steps=16, rollout_batch_size=8, **clean)
        trainer.model.train()
        box = trainer.toolbox
        if not reads:
            box.cache_rows_of = lambda episode: None
        kept = []

        def take(episode, canvas_ids, take=box.append_turn, kept=kept):
            calls, turn = take(episode, canvas_ids), episode.turns[-1]
            kept.append((len(turn.prompt_ids), len(turn.kept), episode.end, episode.cache_rows.tokens))
            return calls

        box.append_turn = take
        batch = trainer._generate_and_score_completions([rows()[row // 4] for row in range(EPISODES)])
        found.append((batch, kept, {name: trainer._metrics["train"][f"sampling/{name}"] for name in COSTS}))
        assert not any(episode.cache_rows.tokens for episode in trainer.episodes)
    (one, kept, costs), (other, _, whole) = found
    for name in ("canvas_ids", "prompt_ids", "completion_mask", "reveal_steps"):
        assert torch.equal(one[name], other[name]), name
    for name in ("rollout_logps", "rollout_entropies"):
        assert_near(one[name], other[name], least=LOGITS)
    assert costs["forward_passes"] == whole["forward_passes"]
    saved, cuts = 0, set()
    for prompt, length, end, tokens in kept:
        origin = 0 if kind == "block-causal" else prompt
        cuts.add((prompt + length - origin) % 4)
        # Rows leave with the block of the cut, which no pass has processed as finished text.
        expected = 0 if end else prompt + length - 1 - (prompt + length - origin - 1) % 4
        assert tokens == expected
        saved += expected
    assert saved > 0
    assert cuts == {0, 1, 2, 3}
    ((tokens,), (all_tokens,)) = costs["forward_tokens"], whole["forward_tokens"]
    assert (all_tokens - tokens) * EPISODES == pytest.approx(saved)


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_a_run_with_turns_resumed_in_mid_cycle_equals_an_unbroken_one(tiny_model_dir, tmp_path):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    options |= {"log_completions": True}
    whole = make_turns(tiny_model_dir, tmp_path / "whole", **options)
    whole.train()
    resumed = make_turns(tiny_model_dir, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(whole, resumed)


@pytest.mark.parametrize("chance", ["", "chance"])
def test_a_run_killed_within_an_episode_resumes_bit_for_bit(tiny_model_dir, tmp_path, chance):
    """With a deterministic tool, or with a tool of chance whose results are logged."""
    log, model_dir = tmp_path / "log", str(tiny_model_dir)

    def start(folder, kill_at):
        given = model_dir, str(tmp_path / folder), kill_at, chance
        return forks.start(run_turns, *given, log=log, folder=HERE.parent, ACCELERATE_USE_CPU="true")

    forks.finish(start("whole", "0"), log)
    calls = len((tmp_path / "whole" / "calls").read_text().split())
    assert calls > 12
    forks.wait_for_kill(start("killed", str(calls - 2)), log)
    assert [*(tmp_path / "killed").glob("checkpoint-*")]
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    forks.finish(start("killed", "0"), log)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    made = len((tmp_path / "killed" / "calls").read_text().split())
    assert (made == calls) if chance else (made > calls)  # logged results are not asked for again


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "ebpo"}, "the objective clipped_sequences has a ratio or bound per row: use --objective trl"),
        ({"method": "espo"}, "the penalty k2_sequence"),
        ({"method": "espo", "beta": 0.0}, "importance_sampling_level sequence weighs whole rows"),
        ({"method": "spg"}, "the objective spg"),
        ({"hints": "small_chunks"}, "--hints small_chunks are given on single canvases"),
        ({"method": "dmpo"}, "the advantage tilted_softmax would read bounds of single canvases"),
        ({"objective": "reinforce", "beta": 0.1, "kl": "k2_sequence"}, "the penalty k2_sequence"),
        ({"importance_sampling_level": "sequence"}, "weighs whole rows"),
        ({"scored_tokens": "steps"}, "counts what follows a call"),
        ({"scored_tokens": "drawn"}, "counts what follows a call, which is cut off: use ended, text$"),
        ({"truncate_prompts": True}, "truncate_prompts would cut"),
        (AHEAD, "rollout_staleness samples ahead of the trainer, which makes the calls"),
        ({"sampler": "parallel", "editing": "quality"}, "editing with tools is not supported"),
        ({"rollout_func": print}, "rollout_func samples whole completions"),
        ({"tools": [], "max_turns": 2}, "max_turns above 1 needs tools"),
        ({"tools": [], "tool_format": "xml"}, "--tool_format xml would do nothing: it needs tools: --tools, or the tr"),
        ({"tools": [], "calls_per_turn": 2}, "--calls_per_turn 2 would do nothing: it needs tools"),
        ({"tools": [], "tool_seconds": 3.0}, "--tool_seconds 3.0 would do nothing: it needs tools"),
        ({"tools": [], "result_length": 9}, "--result_length 9 would do nothing: it needs tools"),
        ({"tools": [], "max_turn_prompt": 99}, "--max_turn_prompt 99 would do nothing: it needs tools"),
        ({"tools": [], "log_tool_results": True}, "--log_tool_results True would do nothing: it needs tools"),
        ({"tool_format": "other"}, "--tool_format must be one of xml, json, plain"),
        ({"tools": [len]}, "tool len: .*docstring"),
    ],
)
def test_what_contradicts_turns_is_refused_by_name(tiny_model_dir, tmp_path, changes, said):
    of_trainer = {"rollout_func": changes.pop("rollout_func", None), "tools": changes.pop("tools", [repeat])}
    with pytest.raises(ValueError, match=said):
        make_trainer(tiny_model_dir, tmp_path, **of_trainer, **changes)
    assert {name for name, one in OBJECTIVES.items() if one.per_row} == {
        *("clipped_sequences", "bgpo", "gdsd", "spg", "stable_drl", "igpo")
    }
    assert {name for name, one in PENALTIES.items() if one.per_row} == {"k2_sequence", "k2_draws"}


# --- The report -------------------------------------------------------------------------------------------------------


def test_a_film_of_an_episode_shows_its_turns_one_after_the_other(tiny_model_dir, tmp_path):
    trainer = make_turns(tiny_model_dir, tmp_path, max_turns=3, eos_stop=False)
    task = SimpleNamespace(score=lambda text, row: {"accuracy": float(len(text) > 20)})
    show = ShowProblems(trainer, task, rows())
    films = show.films("before")
    assert [film.tokens for film in show.films("before")] == [film.tokens for film in films]
    trainer.model.eval()
    trainer.evaluation_rollouts = 0
    trainer.run_episodes(trainer.encoded(list(show.rows["prompt"])))
    assert len({len(episode.turns) for episode in trainer.episodes}) > 1
    for film, episode in zip(films, trainer.episodes, strict=True):
        lengths = [len(part) for part in (film.tokens, film.steps, film.logps, film.entropies)]
        assert lengths == [len(episode.ids)] * 4
        assert "".join(film.tokens).split() == trainer.text_tokenizer.decode(episode.ids).split()
        assert film.solved == (len(episode.messages[-1]["content"]) > 20)
        start, before = len(episode.turns[0].prompt_ids), 0
        for turn, following in pairwise([*episode.turns, None]):
            at = len(turn.prompt_ids) - start
            end = at + len(turn.kept)
            own = film.steps[at:end]
            assert before <= min(own)
            assert max(own) < before + 8
            before = max(own) + 1
            given = slice(end, len(following.prompt_ids) - start if following else None)
            assert {*film.steps[given]} == ({GIVEN} if following else set())
            assert {*film.shown_by()[given]} == ({before} if following else set())
    assert trainer._metrics["eval"] == {}
