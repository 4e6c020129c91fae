"""examples/pocket.ipynb is committed without outputs and runs from top to bottom, here with a few steps and puzzles."""

import base64
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.commands import ROOT

PATH = ROOT / "examples" / "pocket.ipynb"
MINIATURE = {"TEST_PROBLEMS": 16, "SFT_STEPS": 2, "RL_STEPS": 8}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(The outputs of each code cell by its id, the folder of its files.)"""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(PATH, as_version=4)
    settings = "\n".join(f"{name} = {value}" for name, value in MINIATURE.items()) + f"\nRUNS = Path({str(folder)!r})"
    (at,) = (i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", ()))
    for name in (*MINIATURE, "RUNS"):
        assert re.search(rf"^{name} = ", book.cells[at].source, re.MULTILINE)
    book.cells.insert(at + 1, nbformat.v4.new_code_cell(settings))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT))
        environment.setenv("IPYTHONDIR", str(folder / "ipython"))
        NotebookClient(book, timeout=300, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    return {cell.id: cell.outputs for cell in book.cells if cell.cell_type == "code"}, folder


def result(outputs, kind):
    """The value of a cell, from its last output."""
    assert outputs[-1].output_type == "execute_result"
    return outputs[-1].data[kind]


def test_it_is_committed_without_outputs_and_names_no_folder_of_a_machine():
    committed = nbformat.read(PATH, as_version=4)
    nbformat.validate(committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert not [cell for cell in committed.cells if re.search(r"(?<![\w.<])/\w+/|~/|[A-Z]:\\", cell.source)]


def test_the_table_has_the_accuracy_of_each_model_in_percent(executed):
    outputs, _ = executed
    _, _, *lines = result(outputs["table"], "text/markdown").splitlines()
    found = {}
    for line in lines:
        name, accuracy, interval = line.strip("| ").split(" | ")
        found[name] = float(accuracy)
        low, high = map(float, interval.split(" to "))
        assert 0 <= low <= found[name] <= high <= 100
    assert list(found) == ["base", "+ SFT", "+ SFT + RL"]
    assert found["base"] == 25.0  # the same 16 puzzles as in docs/api.md
    for cell, accuracy in zip(("base", "sft", "rl"), found.values(), strict=True):
        assert f"{accuracy:.1f}% of 16 puzzles" in result(outputs[cell], "text/plain")


def test_the_curves_and_the_film_of_the_three_models_are_shown(executed):
    outputs, folder = executed
    assert base64.b64decode(result(outputs["curves"], "image/png")) == (folder / "curves.png").read_bytes()
    shown = re.search(r"data:image/svg\+xml;base64,([\w+/=]+)", result(outputs["film"], "text/html"))[1]
    film = base64.b64decode(shown).decode()
    assert film.count('class="mask"') == 3 * 32
    assert re.findall(r">([^<>]*): (?:not )?solved<", film) == ["base", "+ SFT", "+ SFT + RL"]
