"""`python -m d1 watch` shows what the sampler does, and writes it to files."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from d1.__main__ import main, make_parser
from d1.commands.watch import changed, titles
from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.runs.turns import TurnSettings
from d1.sampling import generate, rollout
from d1.tasks import load_task
from d1.tools.calls import FORMATS
from d1.tools.turns import Episode, Toolbox
from tests.commands import ROOT
from tests.d1.rl.tool_runs import CALLS, repeat

POCKET = str(ROOT / "pocket" / "base")


def watched(*flags: str) -> None:
    main(make_parser().parse_args(["watch", *flags]))


def films(page) -> list[dict]:
    (scene,) = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)[1])
    return scene["films"]


def test_two_runs_of_a_problem_are_those_of_the_sampler_and_every_file_shows_both(tmp_path, capsys):
    page, svg = tmp_path / "watch.html", tmp_path / "watch.svg"
    sampling = ["--gen_length", "32", "--block_length", "8", "--diffusion_steps", "16", "--temperature", "0.7"]
    problem = ["--dataset", "sudoku", "--index", "3", "--split", "validation", "--seed", "5"]
    files = ["--html", str(page), "--svg", str(svg)]
    watched("--model_path", POCKET, *problem, *sampling, *files, "--against", "sampler=parallel", "eos_stop")
    printed = capsys.readouterr().out
    tokenizer = load_tokenizer(POCKET)
    row = load_task("sudoku").load_rows("validation")[3]
    ids = torch.tensor([encode_prompt(tokenizer, render_prompt(tokenizer, row["prompt"]))])
    chosen = {"gen_length": 32, "block_length": 8, "steps": 16, "temperature": 0.7, "mask_token_id": 3}
    seeded = {"generator": [keyed_generator(5, 3, 0)]}
    expected = generate(load_model(POCKET), ids, torch.ones_like(ids), **chosen, **seeded)[0, ids.shape[1] :]
    exact, parallel = films(page)
    assert [label for _, label, _ in exact["tokens"]] == tokenizer.convert_ids_to_tokens(expected.tolist())
    assert (exact["title"], parallel["title"]) == ("sampler exact, no eos_stop", "sampler parallel, eos_stop")
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert exact["solved"] == (load_task("sudoku").score(text, row)["accuracy"] == 1)
    assert printed.startswith("sampler exact, no eos_stop:\nstep 1/16 ")  # what is piped names each run
    assert "\nsampler parallel, eos_stop:\nstep 1/16 " in printed
    assert printed.count("\nsolved\n") + printed.count("\nnot solved\n") == 2
    assert str(ROOT) not in page.read_text(encoding="utf-8")
    assert exact["passes"] == len(exact["fed"]) == 16 > parallel["passes"]
    assert exact["fed"][-1] == 16 * (ids.shape[1] + 32)
    assert svg.read_text().count('class="mask"') == 64
    assert sum(line.startswith("step ") for line in printed.splitlines()) == 16 + parallel["passes"]


def test_the_picture_of_the_readme_is_what_its_command_writes(monkeypatch, tmp_path):
    """Runs the command given in docs/watch.md."""
    monkeypatch.chdir(ROOT)
    command = next(line for line in Path("docs/watch.md").read_text().splitlines() if "--svg docs/denoise.svg" in line)
    picture = tmp_path / "denoise.svg"
    watched(*command.replace("docs/denoise.svg", str(picture)).split()[4:], "--pause", "0")
    assert picture.read_text(encoding="utf-8") == Path("docs/denoise.svg").read_text(encoding="utf-8")


def test_before_and_after_are_two_models_of_one_prompt(tiny_model_dir, tmp_path):
    page = tmp_path / "watch.html"
    flags = ["--model_path", POCKET, "--gen_length", "8", "--html", str(page)]
    watched(*flags, "--prompt", "0" * 16, "--against", f"model_path={tiny_model_dir}")
    before, after = films(page)
    assert (before["title"], after["title"]) == ("base", tiny_model_dir.name)
    assert before["prompt"] != after["prompt"]  # each in its own chat template
    assert len(before["tokens"]) == len(after["tokens"]) == 8


def test_a_title_has_the_number_zero():
    flags = ["--model_path", POCKET, "--prompt", "a", "--against", "seed=0", "temperature=0.5", "eos_stop"]
    args = make_parser().parse_args(["watch", "--seed", "5", *flags])
    assert [{*title.split(", ")} for title in titles([args, changed(args)])] == [
        {"seed 5", "temperature 0.0", "no eos_stop"},
        {"seed 0", "temperature 0.5", "eos_stop"},
    ]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("runs/a/checkpoint-10", "runs/b/checkpoint-10"), ["a/checkpoint-10", "b/checkpoint-10"]),
        (("one/Model-8B", "two/Model-8B"), ["one/Model-8B", "two/Model-8B"]),
        (("pocket/base", "runs/grpo"), ["base", "grpo"]),
    ],
)
def test_models_of_one_name_have_different_titles(paths, names):
    first, second = paths
    flags = ["--model_path", first, "--prompt", "a", "--against", f"model_path={second}"]
    args = make_parser().parse_args(["watch", *flags])
    assert titles([args, changed(args)]) == names


@pytest.mark.parametrize("blocks", [False, True])
def test_an_episode_is_watched_turn_after_turn(tiny_model_dir, tiny_block_dir, monkeypatch, tmp_path, capsys, blocks):
    """Its turns are those of the sampler, and given text is neither a mask nor a prediction."""
    monkeypatch.setitem(FORMATS, "test", CALLS)
    model_dir, tool, page = tiny_block_dir if blocks else tiny_model_dir, tmp_path / "mine.py", tmp_path / "watch.html"
    tool.write_text(inspect.getsource(repeat))
    sampling = ["--gen_length", "16", "--block_length", "4", "--temperature", "1.2", "--eos_stop"]
    turns = ["--tools", str(tool), "--max_turns", "3", "--tool_format", "test", "--pause", "0"]
    flags = ["--model_path", str(model_dir), "--prompt", "bc", *sampling, *turns]
    tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
    toolbox, found = Toolbox(tokenizer, [2, 0], TurnSettings(max_turns=3), "test"), []
    for seed in range(12):
        watched(*flags, "--seed", str(seed), "--html", str(page), "--svg", str(tmp_path / "watch.svg"))
        (film,) = films(page)
        functions = {"repeat": repeat}
        messages, _ = toolbox.add_tool_instructions([{"role": "user", "content": "bc"}], functions)
        episode = Episode(messages, encode_prompt(tokenizer, render_prompt(tokenizer, messages)), functions)
        passes = []

        def sample(rows, turn, episode=episode, seed=seed, passes=passes):
            ids = torch.tensor([episode.next_ids])
            random = [keyed_generator(seed, 0, 0, *[turn] * bool(turn))]
            how = {"gen_length": 16, "block_length": 4, "steps": 8, "temperature": 1.2, "mask_token_id": 3}
            how |= {"eos_token_ids": [2, 0], "stops": toolbox.stop_of(turn)}
            one = rollout(model, ids, torch.ones_like(ids), generator=random, **how)
            passes.append(int(one.passes))
            return one.ids[:, -16:].tolist()

        toolbox.run_episodes([episode], sample)
        found.append(len(episode.turns))
        labels = [label for _, label, _ in film["tokens"]]
        assert labels == tokenizer.convert_ids_to_tokens(episode.ids)
        assert [step != -3 for step in film["steps"]] == [bool(own) for own in episode.sampled]
        assert film["passes"] == sum(passes)
        assert sorted(film["fed"]) == film["fed"]
        before = 0
        for turn, count in zip(episode.turns, passes, strict=True):
            at = len(turn.prompt_ids) - len(episode.turns[0].prompt_ids)
            own = film["at"][at : at + len(turn.kept)]
            assert before < min(own) <= max(own) <= before + count
            before += count
        svg = (tmp_path / "watch.svg").read_text()
        assert svg.count('class="card"') == film["steps"].count(-3) + 1
    assert len({*found}) > 1  # numbers of turns
    assert "step 1/24  " in capsys.readouterr().out
    with pytest.raises(ValueError, match="--max_turns needs --tools"):
        watched("--model_path", str(model_dir), "--prompt", "bc", "--max_turns", "2")


def test_a_block_causal_model_is_watched_in_blocks_of_its_own(tiny_block_dir, tmp_path):
    page, tokenizer = tmp_path / "watch.html", load_tokenizer(tiny_block_dir)
    watched("--model_path", str(tiny_block_dir), "--prompt", "ab", "--gen_length", "11", "--html", str(page))
    (film,) = films(page)
    assert "blocks of 4 " in film["note"]
    prompt = len(encode_prompt(tokenizer, render_prompt(tokenizer, [{"role": "user", "content": "ab"}])))
    ends = [position for position in range(1, 11) if (prompt + position) % 4 == 0]
    assert len(ends) > 1
    assert all(max(film["steps"][:end]) < min(film["steps"][end:]) for end in ends)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--gen_length", "8"], "--prompt TEXT, or --dataset TASK"),
        (["--prompt", "a", "--dataset", "sudoku"], "--prompt TEXT, or --dataset TASK"),
        (["--dataset", "sudoku", "--index", "-1"], "--index -1"),
        (["--dataset", "sudoku", "--index", "9999"], "--index 9999: test has 512 problems"),
        (["--prompt", "a", "--html", "no/such/page.html"], "no folder no/such"),
        (["--prompt", "a", "--svg", "pocket"], "pocket is a folder: name a file, such as pocket/watch.html"),
        (["--prompt", "a", "--against", "html=pocket"], "pocket is a folder"),
        (["--prompt", "0" * 16, "--kv_cache", "dual"], "kv_cache='dual' would be ignored"),
        (["--prompt", "0" * 16, "--gen_length", "500"], "exceed the model's"),
        (["--prompt", "a", "--against", "gen_length=0"], "--gen_length 0"),
    ],
)
def test_what_makes_no_sense_is_refused(monkeypatch, flags, problem):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ValueError, OSError), match=re.escape(problem)):
        watched("--model_path", POCKET, *flags)
