"""The documents keep their word: every command parses, every path, link and import in them exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.commands import OUTPUTS, ROOMS, ROOT, check_script, parse_shell

ROOMS_READMES = ("SFT/README.md", "dataset/README.md", "pocket/base/README.md", "eval/eval_baselines/README.md")
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", *ROOMS_READMES, "benchmarks/RESULTS.md")]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
FILE = re.compile(r"(?<![\w/.*<-])[\w.-][\w./-]*\.(?:py|sh|sbatch|ya?ml|md|jsonl?|csv|safetensors|png|toml)\b")
INLINE = re.compile(r"(?<!`)`((?:make|bash|python|accelerate|pip) [^`]+)`(?!`)")
SHELLS = ("bash", "sh", "shell", "console")


def fences(document: Path, *languages: str) -> list[str]:
    """The fenced blocks of some languages ("" for those that name none), without the indentation of a list."""
    found = FENCE.findall(document.read_text())
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, kind, body in found if kind in languages]


def blocks(*languages: str) -> list:
    return [
        pytest.param(document, body, id=f"{document.relative_to(ROOT)}-{number}")
        for document in DOCUMENTS
        for number, body in enumerate(fences(document, *languages))
    ]


def folder_of(document: Path) -> Path:
    """Where its reader types its commands: in the stage's folder, as d1's users do, or at the top."""
    room = document.relative_to(ROOT).parts[0]
    return ROOT / room if room in ("SFT", "diffu-grpo", "eval") else ROOT


@pytest.mark.parametrize(("document", "text"), blocks(*SHELLS))
def test_commands_could_run_as_written(document, text):
    check_script(text, folder_of(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_within_sentences_could_run_as_written(document):
    for command in INLINE.findall(FENCE.sub("", document.read_text())):
        check_script(command.replace("\n", " "), folder_of(document))


def test_the_first_commands_are_there():
    commands = [words for text in fences(ROOT / "README.md", *SHELLS) for words in parse_shell(text)]
    for command in (["make", "demo"], ["make", "test"]):
        assert command in commands


@pytest.mark.parametrize(("document", "text"), blocks("python", "py"))
def test_python_parses_and_imports_what_exists(document, text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "WHAT_DID_NOT_WORK.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(document):
    for target in filter(None, (a or b for a, b in LINK.findall(document.read_text()))):
        if not re.match(r"[a-z]+:|#", target):
            assert (document.parent / target.partition("#")[0]).exists(), f"{document.name} links to {target}"


def tree_paths(text: str) -> list[str]:
    """The paths of a drawn tree: the first word of a line at its depth, and the file names after it in its folder."""
    found, above = [], [(-1, "")]
    for line in text.splitlines():
        drawn = re.match(r"[\s│├└─|+`-]*", line)
        assert drawn is not None
        depth, words = drawn.end(), line[drawn.end() :].split()
        if not words:
            continue
        while above[-1][0] >= depth:
            above.pop()
        folder, first = above[-1][1], words[0]
        if first.endswith("/"):
            above.append((depth, folder + first))
            found.append(folder + first)
            folder += first
            words = words[1:]
        found += [folder + name for name in FILE.findall(" ".join(words))]
    return found


def test_the_tree_names_what_exists():
    trees = [
        text for text in fences(ROOT / "README.md", "", "text") if re.search(r"^\W*diffu-grpo/", text, re.MULTILINE)
    ]
    assert trees, "the README says where things are in a fenced tree"
    for path in (path for text in trees for path in tree_paths(text)):
        assert (ROOT / path).exists() or OUTPUTS & set(Path(path).parts), f"the tree names {path}"
    named = {Path(path).parts[0] for text in trees for path in tree_paths(text)}
    assert named.issuperset(ROOMS)


def test_tree_paths_reads_nested_and_listed_names():
    text = (
        "d1/\n├── models.py      load\n└── tasks/  one file a task\n    └── a.py  reads b.csv\nSFT/  c.py (and d)\nx.md"
    )
    assert tree_paths(text) == [
        "d1/",
        "d1/models.py",
        "d1/tasks/",
        "d1/tasks/a.py",
        "d1/tasks/b.csv",
        "SFT/",
        "SFT/c.py",
        "x.md",
    ]
