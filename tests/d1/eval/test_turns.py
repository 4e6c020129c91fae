"""eval.py with tools: episodes equal those played alone, whatever the batch, and the file says what happened."""

import json

import pytest
import torch

from d1.eval import run as evaluation
from d1.eval.completions import setup_name
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.folder import ModelFolder
from d1.runs.turns import TurnFlags, TurnSettings
from d1.sampling import SamplingSettings, rollout
from d1.tools.calls import FORMATS
from d1.tools.evaluation import tools_of
from d1.tools.turns import Episode, Toolbox
from tests.commands import ROOT
from tests.d1.rl.tool_runs import CALLS, repeat

TOOL = '''
def repeat(text: str) -> str:
    """The end of a text again.

    Args:
        text: The text.
    """
    return "z" + text.replace(" ", "")[-3:]
'''


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an evaluation of a few problems with a tool; returns its items."""
    monkeypatch.setitem(FORMATS, "test", CALLS)
    tool = tmp_path / "mine.py"
    tool.write_text(TOOL)

    def evaluate(model_dir, name, *flags):
        required = ["--model_path", str(model_dir), "--dataset", "sudoku", "--output_dir", str(tmp_path / name)]
        sampling = ["--gen_length", "16", "--block_length", "4", "--temperature", "1.2", "--limit", "9"]
        turns = ["--tools", str(tool), "--max_turns", "3", "--tool_format", "test"]
        args = evaluation.make_parser().parse_args([*required, *sampling, *turns, *flags])
        evaluation.main(args)
        (one,) = evaluation.runs_of(args)
        return json.loads((tmp_path / name / f"{setup_name(one)}_0_generations.json").read_text())["generations"]

    return evaluate


TIMES = ("seconds",)


def without_times(items):
    return [{name: value for name, value in item.items() if name not in TIMES} for item in items]


@pytest.mark.parametrize("blocks", [False, True])
def test_episodes_are_those_played_alone_in_any_batch(tiny_model_dir, tiny_block_dir, run, blocks, monkeypatch):
    model_dir = tiny_block_dir if blocks else tiny_model_dir
    found = [without_times(run(model_dir, f"of {size}", "--batch_size", size)) for size in "14"]
    stopped = run(model_dir, "stopped", "--eos_stop")
    assert found[0] == found[1]
    costs = ("forward_passes", "forward_tokens")
    for item, other in zip(found[0], without_times(stopped), strict=True):  # the stop saves passes alone
        assert {**item, **dict.fromkeys(costs)} == {**other, **dict.fromkeys(costs)}
        assert other["forward_passes"] <= item["forward_passes"]
    assert sum(item["forward_passes"] for item in stopped) < sum(item["forward_passes"] for item in found[0])
    monkeypatch.setattr(Toolbox, "cache_rows_of", lambda self, episode: None)
    recomputed = without_times(run(model_dir, "recomputed", "--eos_stop"))
    for item, other in zip(without_times(stopped), recomputed, strict=True):  # columns save tokens alone
        assert {**item, "forward_tokens": 0} == {**other, "forward_tokens": 0}
        assert (item["forward_tokens"] < other["forward_tokens"]) == (blocks and item["turns"] > 1)
    assert 1 < sum(item["turns"] for item in found[0]) / 9 < 3
    assert sum(item["calls"] for item in found[0]) >= 4
    model, tokenizer = load_model(str(model_dir)), load_tokenizer(str(model_dir))
    toolbox = Toolbox(tokenizer, [2, 0], TurnSettings(max_turns=3), "test")
    for item in found[0]:
        ids = tokenizer(item["prompt_input"], add_special_tokens=False).input_ids
        episode = Episode([{"role": "user", "content": "?"}], ids, {"repeat": repeat})

        def sample(rows, turn, episode=episode, index=item["index"]):
            prompt = torch.tensor([episode.next_ids])
            random = [keyed_generator(0, index, 0, *[turn] * bool(turn))]
            how = {"gen_length": 16, "block_length": 4, "steps": 8, "temperature": 1.2, "mask_token_id": 3}
            return rollout(model, prompt, torch.ones_like(prompt), generator=random, **how).ids[:, -16:].tolist()

        toolbox.run_episodes([episode], sample)
        assert item["messages"] == episode.messages
        assert item["text"] == episode.messages[-1]["content"]
        own = len(episode.turns), episode.calls, episode.failed, episode.end
        assert (item["turns"], item["calls"], item["failed_calls"], item["end"]) == own


def test_half_a_character_in_a_result_loses_no_evaluation(tiny_model_dir, run, tmp_path):
    (tmp_path / "mine.py").write_text(TOOL.replace('"z" +', '"z\\ud800" +'))
    items = run(tiny_model_dir, "halves")
    results = [message["content"] for item in items for message in item["messages"] if message["role"] == "tool"]
    assert results
    assert all(result.startswith("z\ufffd") for result in results)


def test_in_16_bits_parts_hold_whole_episodes(tiny_model_dir, run):
    flags = ("--dtype", "bfloat16", "--batch_size", "2")
    assert without_times(run(tiny_model_dir, "one", *flags)) == without_times(run(tiny_model_dir, "two", *flags))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tools", "calc"], "--tools calc: expected calculator, python"),
        (["--max_turns", "2"], "--max_turns needs --tools"),
        (["--tools", "calculator"], "its vocabulary cannot write '<call></call>', a call of the tool calculator: use"),
        (["--tools", "calculator", "--sampler", "parallel", "--editing", "quality"], "editing with --tools"),
    ],
)
def test_flags_that_contradict_tools_are_refused(tiny_model_dir, tmp_path, flags, said):
    required = ["--model_path", str(tiny_model_dir), "--dataset", "sudoku", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=said):
        evaluation.main(evaluation.make_parser().parse_args([*required, *flags]))


def test_a_sampler_without_turns_is_refused_before_the_weights_are_read():
    folder = ROOT / "pocket" / "products_base"
    sampling = SamplingSettings(gen_length=12, block_length=4, steps=6, sampler="scdd", temperature=1.0)
    with pytest.raises(ValueError, match=r"^a run with tools has no sampler scdd"):
        tools_of(TurnFlags(tools=["calculator"]), sampling, load_tokenizer(folder), ModelFolder.read(folder).config)
