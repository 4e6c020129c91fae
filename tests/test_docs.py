"""What docs/ says of names, shapes and results is so: glossary, stable names, snippets, fields of own functions."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from d1.__main__ import COMMANDS, STAGES
from d1.eval import run as evaluation
from d1.models import load_model
from d1.rl.losses import ADVANTAGES, OBJECTIVES, Advantage, AdvantageInputs, LossInputs, Objective
from d1.scoring import ESTIMATORS, Estimator, Randomness, SampledRows, Views, ViewSettings, views_of_canvas
from tests.commands import ROOT
from tests.tiny_grpo import make_trainer

API, OWN, STABLE = ((ROOT / f"docs/{name}.md").read_text() for name in ("api", "write_your_own", "stable"))
STABLE_ROOMS = ("d1.models", "d1.sampling", "d1.scoring", "d1.sft", "d1.rl", "d1.eval")  # what these export is stable
DTYPES = {"bool": (torch.bool,), "int": (torch.int32, torch.int64), "float": (torch.float32, torch.float64)}


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading, row by row."""
    lines = page.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def documented(heading: str) -> dict[str, str]:
    """The names in the first column of the table with this heading -> the second column."""
    return {name: row[1] for row in table(OWN, heading) for name in re.findall(r"`(\w+)`", row[0])}


def test_the_stable_names_are_those_that_the_packages_export():
    listed = {room.strip("`"): {*re.findall(r"`(.+?)`", names)} for room, names in table(STABLE, "import from")}
    assert listed == {room: {*importlib.import_module(room).HOMES} for room in STABLE_ROOMS}
    assert all(hasattr(importlib.import_module(room), name) for room, names in listed.items() for name in names)
    commands = re.search(r"`d1 NAME`.*?for: (.*?)\. ", STABLE, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", commands) == [*STAGES, *COMMANDS]
    for folder, files in table(STABLE, "folder"):
        assert all((ROOT / folder.strip("`") / file).is_file() for file in re.findall(r"`(.+?)`", files)), folder


def test_the_snippets_of_the_api_page_run_in_order(tmp_path, monkeypatch, capsys):
    (tmp_path / "pocket").symlink_to(ROOT / "pocket")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    seen = []
    for piece in re.findall(r"```python\n(.*?)```", API, re.DOTALL):
        exec(compile(piece, "docs/api.md", "exec"), names)
        seen.append(capsys.readouterr().out)
    sampled, watched, scored, evaluated, tuned, reinforced = seen
    assert re.fullmatch(r"\['<reasoning> .*</answer>', '<reasoning> .*</answer>'\]\n", sampled)
    assert [line.partition(":")[0] for line in watched.splitlines()] == [f"pass {number}" for number in range(1, 17)]
    assert "pass 16: 0 still hidden" in watched
    one_step, given_half = names["one_step"].sum(1), names["given_half"].sum(1)
    assert torch.all(given_half > one_step), scored  # half of the tokens are visible, so the rest is more certain
    assert evaluated == "25.0% of 16 puzzles solved, 95% interval [10.2, 49.5]\n"
    assert 0 < float(tuned.splitlines()[-1]) < 10
    (rewards,) = re.findall(r"\[[\d., ]+\]", reinforced)
    assert len(rewards) > 2
    trained = load_model("runs/api/model").state_dict()
    before = load_model("pocket/base").state_dict()
    assert all(not torch.equal(trained[name], before[name]) for name in before)


def test_the_examples_of_the_page_on_tools_call(tmp_path, monkeypatch, capsys):
    (tmp_path / "pocket").symlink_to(ROOT / "pocket")
    (tmp_path / "eval").mkdir()
    monkeypatch.chdir(tmp_path / "eval")
    page = (ROOT / "docs/tools.md").read_text()
    (command,) = re.findall(r"```bash\ncd eval\n(.*?)```", page, re.DOTALL)
    python, script, *flags = shlex.split(command.replace("\\\n", " "))
    assert (python, script) == ("python", "eval.py")
    evaluation.main(evaluation.make_parser().parse_args(flags))
    (file,) = Path().glob("**/*_generations.json")
    items = json.loads(file.read_text())["generations"]
    assert len(items) == 8
    assert sum(item["calls"] for item in items) >= 4
    results = [item["messages"][1]["content"] for item in items if item["calls"]]
    assert all(result.isdigit() or result.startswith("error: ") for result in results)

    monkeypatch.chdir(tmp_path)
    (piece,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(piece.splitlines()) <= 36
    exec(compile(piece, "docs/tools.md", "exec"), {})
    (turns,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1 < turns <= 2


def test_write_your_own_names_every_field_and_property():
    for kind in (SampledRows, Randomness, ViewSettings, Views, LossInputs, AdvantageInputs):
        assert list(documented(f"field of `{kind.__name__}`")) == [field.name for field in fields(kind)]
    own = [name for name, value in vars(LossInputs).items() if isinstance(value, property)]
    assert list(documented("property of `LossInputs`")) == own


def check_shapes(heading: str, record: object, sizes: dict[str, int], absent: set[str]) -> None:
    """Each documented value of `record` has the shape and type that its table says; those of `absent` are None."""
    for name, said in documented(heading).items():
        value = getattr(record, name)
        if name in absent:
            assert value is None, name
            assert said.endswith(" or None"), name
        elif said in ("int", "float"):
            assert type(value).__name__ == said, name
        else:
            parts = re.fullmatch(r"\((.*?)\)(?: (\w+))?(?:,? or None)?", said)
            assert parts, said
            named = [part for part in parts[1].split(", ") if part]
            shape = [sum(sizes[one.strip(",")] for one in part.split(" + ")) for part in named]
            assert list(value.shape) == shape, name
            assert parts[2] is None or value.dtype in DTYPES[parts[2]], name


@pytest.mark.parametrize("kind", ["tiny_model_dir", "tiny_block_dir"])
def test_a_run_gives_functions_what_write_your_own_says(kind, request, tmp_path, monkeypatch):
    """A run that computes every field but those of trees: three views, a reference, groups of two, state advantages,
    sampling weights."""
    seen: dict[str, object] = {}

    def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
        hidden = sampled.scored.unsqueeze(1).expand(-1, 3, -1)
        shown = torch.zeros_like(sampled.maskable).unsqueeze(1)
        views = views_of_canvas(shown, hidden, sampled.scored, torch.full((*hidden.shape[:2], 1), 1 / 3))
        seen.update(sampled=sampled, random=random, views=views)
        return views

    def loss(inputs: LossInputs, settings: object) -> tuple[torch.Tensor, dict[str, float]]:
        seen["inputs"] = inputs
        return -(inputs.advantages.unsqueeze(1) * inputs.logps * inputs.counted).mean(), {}

    def advantages(inputs: AdvantageInputs, settings: object) -> torch.Tensor:
        seen["groups"] = inputs
        return inputs.advantages

    monkeypatch.setitem(ADVANTAGES, "seen", Advantage(advantages, reads=("old", "reference")))
    monkeypatch.setitem(ESTIMATORS, "seen", Estimator(draw, views=lambda settings: 3))
    monkeypatch.setitem(OBJECTIVES, "seen", Objective(loss, over_group=True, per_view=True, by_view=True))
    own = {"estimator": "seen", "objective": "seen", "advantage": "seen", "beta": 0.1, "sampling_weight_cap": 2.0}
    own["state_reward"] = 0.5
    sizes = {"num_generations": 2, "num_iterations": 1, "max_steps": 1, "p_mask_prompt": 0.0}
    make_trainer(request.getfixturevalue(kind), tmp_path, **own, **sizes).train()

    sampled, random, views, inputs = (seen[name] for name in ("sampled", "random", "views", "inputs"))
    width = {"rows": 4, "prompt": sampled.prompt_ids.shape[1], "gen_length": 8, "tokens": 8, "views": 3, "group": 2}
    writes = {"write_ids", "write_steps", "write_entropies", "write_logps"}  # of samplers that edit
    blocks = {"blocks"} if kind == "tiny_model_dir" else set()
    check_shapes("field of `SampledRows`", sampled, width, writes | blocks | {"start_steps", "is_end"})
    optional = {"shown", "targets", "sampled_logps", "temperatures", "accepted"}
    check_shapes("field of `Views`", views, width, optional)
    assert (len(random.generators), random.first_row, random.total_rows) == (4, 0, 4)
    assert [tuple(getattr(random, name)(5).shape) for name in ("uniform", "evenly_spread", "rotated")] == [(4, 5)] * 3
    width["tokens"] = inputs.mask.shape[1]
    of_hints, of_trees = {"given", "old_entropies"}, {"sibling_advantages", "sibling_ids", "sibling_positions"}
    check_shapes("field of `LossInputs`", inputs, width, of_hints | of_trees | {"is_right"})  # there is no accuracy
    check_shapes("field of `AdvantageInputs`", seen["groups"], width | {"groups": 2}, set())
    check_shapes("property of `LossInputs`", inputs, width, set())
    assert tuple(inputs.by_draw(inputs.view_logps).shape) == (4, 1)


# One thing, one name (docs/concepts.md, "Words"). What these words meant has a name of its own now.
OLD_NAMES = {"place", "places", "recorded", "slot", "slots"}
OLD_NAMES |= {"body_and_head", "run_body", "left_padded", "feed", "feed_all", "feed_apart", "Columns", "leave_columns"}
OLD_WORDS = re.compile(r"\ba row of (the|a) table|\ba line of (the|a) table|\bso many (?!.*\bthat\b)", re.IGNORECASE)


def test_no_file_uses_an_old_name_of_the_vocabulary():
    words = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Words\n")[2]
    assert {"`canvas_ids`", "`completion_ids`", "**row**", "**entry**", "`RolloutRecord`"} <= set(
        re.findall(r"`\w+`|\*\*\w+\*\*", words)
    )
    for path in [*(ROOT / "d1").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        text = path.read_text()
        nodes = [*ast.walk(ast.parse(text))]
        names = {getattr(node, kind, None) for node in nodes for kind in ("id", "arg", "attr", "name")}
        assert not names & OLD_NAMES, (path, names & OLD_NAMES)
        assert not (found := OLD_WORDS.search(text)), (path, found)


@pytest.mark.parametrize("line", re.findall(r"^\|.*\]\(\.\./.*$", (ROOT / "docs/read_the_code.md").read_text(), re.M))
def test_the_map_of_the_code_names_what_is_there(line: str) -> None:
    """Each function, class or table in backticks is defined in the file that follows it."""
    where = line.split("|")[2]
    parts = re.findall(r"([^\[]*)\[[^\]]*\]\(\.\./([^)]+)\)", where)
    assert parts
    for words, file in parts:
        names = re.findall(r"`(\w+)`", words)
        code = (ROOT / file).read_text()
        assert names
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", code, re.M), (name, file)


def test_the_code_of_the_first_chapter_stands_in_the_examples() -> None:
    """Apart from spaces: lines of a shorter indentation are broken elsewhere."""
    loops = "".join((ROOT / "examples" / name).read_text() for name in ("sft_loop.py", "rl_loop.py"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/in_300_lines.md").read_text(), re.S)
    assert len(blocks) == 8
    for block in blocks:
        assert "".join(block.split()) in "".join(loops.split()), block
