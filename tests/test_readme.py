"""The documents keep their word: every command parses, every path, link and import in them exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.commands import OUTPUTS, ROOMS, ROOT, check_script

HISTORY = [ROOT / "CHANGELOG.md", ROOT / "WHAT_DID_NOT_WORK.md"]  # which name commands that are gone, or fail
ROOM_DOCUMENTS = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.md") if not OUTPUTS & {*path.parts})
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOM_DOCUMENTS]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
FILE = re.compile(r"(?<![\w/.*<-])[\w.-][\w./-]*\.(?:py|sh|sbatch|ya?ml|md|jsonl?|csv|safetensors|png|svg|toml)\b")
INLINE = re.compile(r"(?<!`)`((?:make|bash|python|accelerate|pip) [^`]+)`(?!`)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(document: Path, *languages: str) -> list[str]:
    """The fenced blocks of some languages ("" for those that name none), without the indentation of a list."""
    found = FENCE.findall(document.read_text())
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, kind, body in found if kind in languages]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_could_run_as_written(document):
    """A reader types them in the stage's folder, as d1's users do, or at the top."""
    room = document.relative_to(ROOT).parts[0]
    folder = ROOT / room if room in ("SFT", "diffu-grpo", "eval") else ROOT
    inline = INLINE.findall(FENCE.sub("", document.read_text()))
    for text in [*fences(document, "bash", "sh", "shell"), *(command.replace("\n", " ") for command in inline)]:
        check_script(text, folder)


def test_the_first_commands_are_there():
    first = fences(ROOT / "README.md", "bash")[0]
    assert [line.partition(" #")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_parses_and_imports_what_exists(document):
    for node in (node for text in fences(document, "python", "py") for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def test_the_readmes_python_samples_and_scores(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = (text for text in fences(ROOT / "README.md", "python") if "mean_field_logps(" in text)
    exec(compile(example, "README.md", "exec"), names := {})
    assert names["completion"].shape == (1, 32)
    printed = capsys.readouterr().out
    assert "<answer>" in printed
    assert "tensor([[" in printed


@pytest.mark.parametrize("document", [*DOCUMENTS, *HISTORY], ids=name_of)
def test_links_lead_somewhere(document):
    for target in filter(None, (a or b for a, b in LINK.findall(document.read_text()))):
        if not re.match(r"[a-z]+:|#", target):
            assert (document.parent / target.partition("#")[0]).exists(), f"{document.name} links to {target}"


def tree_paths(text: str) -> list[str]:
    """The paths of a drawn tree: a line's first word below those that are indented less, and files named after it."""
    found, above = [], [(-1, "")]
    for line in filter(str.strip, text.splitlines()):
        depth, words = len(line) - len(line.lstrip()), line.split()
        while above[-1][0] >= depth:
            above.pop()
        folder = above[-1][1]
        if words[0].endswith("/"):
            folder += words.pop(0)
            above.append((depth, folder))
            found.append(folder)
        found += [folder + name for name in FILE.findall(" ".join(words))]
    return found


def test_the_tree_names_what_exists():
    (tree,) = (text for text in fences(ROOT / "README.md", "") if text.startswith("d1/"))
    paths = tree_paths(tree)
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert {Path(path).parts[0] for path in paths} >= set(ROOMS)
    assert {name_of(room) for room in (ROOT / "d1").iterdir() if (room / "__init__.py").exists()} <= {
        path.rstrip("/") for path in paths
    }


def test_tree_paths_reads_nested_and_listed_names():
    text = "d1/\n  models.py      load\n  tasks/  one file a task\n    a.py  reads b.csv\nSFT/  c.py (and d)\nx.md"
    nested = ["d1/", "d1/models.py", "d1/tasks/", "d1/tasks/a.py", "d1/tasks/b.csv"]
    assert tree_paths(text) == [*nested, "SFT/", "SFT/c.py", "x.md"]
