"""The documents are correct: every command parses, and every path, link and import in them exists."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import OUTPUTS, ROOMS, ROOT, check_script, copy_checkout, folder_of

HISTORY = ("CHANGELOG.md", "WHAT_DID_NOT_WORK.md")  # these name commands that are removed or fail
FOUND = [*ROOT.glob("*.md"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))]
NAMES = [path.relative_to(ROOT) for path in FOUND]
DOCUMENTS = sorted(str(name) for name in NAMES if not OUTPUTS & {*name.parts})
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.*<-])[\w.-][\w./-]*\.(?:py|sh|ya?ml|md)\b")
# A file in a folder of the repository, as messages and docstrings name it.
POINTER = re.compile(r"(?<![\w/.*{}-])(?:[\w.-]+/)+[\w.-]+\.(?:md|py|yaml|sh|toml|ipynb)\b")
INLINE = re.compile(r"(?<!`)`((?:make|bash|python|accelerate|pip) [^`]+)`(?!`)")


def fences(document: str, language: str) -> list[str]:
    """The fenced blocks of a language ("" for those without one), without the indentation of a list."""
    found = FENCE.findall((ROOT / document).read_text())
    return [re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, kind, body in found if kind == language]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_could_run_links_lead_somewhere_and_python_imports_what_exists(document):
    text = (ROOT / document).read_text()
    for target in LINK.findall(text):
        if not re.match(r"[a-z]+:|#", target):
            assert (ROOT / document).parent.joinpath(target.partition("#")[0]).exists(), target
    for node in (node for code in fences(document, "python") for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(submodule), submodule
    if document in HISTORY:
        return
    prose = FENCE.sub("", text)
    for commands in [*fences(document, "bash"), *(command.replace("\n", " ") for command in INLINE.findall(prose))]:
        check_script(commands, folder_of(document.partition("/")[0]))
    for sentence in re.split(r"(?<=[.:;!?])\s+|\n\n|\n[|-]", prose):  # a page that is linked for a flag mentions it
        pages = [link for link in re.findall(r"\]\(([^)\s#]+\.md)", sentence) if "://" not in link]
        said = "".join((ROOT / document).parent.joinpath(page).read_text() for page in pages)
        assert not pages or not [flag for flag in re.findall(r"`(--\w+)", sentence) if flag not in said], sentence


def texts_of(path: Path) -> list[str]:
    """The texts in a Python file: docstrings, messages and help, with {} for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts))
    return found


def test_messages_name_files_that_exist_and_that_speak_of_their_flags():
    """Apart from the files of RL's methods, which name those of the released code."""
    for path in sorted({*(ROOT / "d1").rglob("*.py")} - {*(ROOT / "d1/rl/methods").glob("*.py")}):
        for text in texts_of(path):
            for name in {*POINTER.findall(text)} - {"path/to/file.py"}:
                assert (ROOT / name).is_file(), f"{path}: {name}"
                if name.endswith(".md"):
                    said = (ROOT / name).read_text()
                    near = " ".join(one for one in re.split(r"(?<=[.;:])\s", text) if name in one)
                    assert not [flag for flag in re.findall(r"--\w+", near) if flag not in said], path


def test_the_readmes_python_samples(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = (text for text in fences("README.md", "python") if "generate(" in text)
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"<answer>.*</answer>", capsys.readouterr().out)


def test_the_documents_own_method_is_the_file_that_trains():
    (example,) = (text for text in fences("CONTRIBUTING.md", "python") if "METHOD =" in text)
    assert example == (ROOT / "tests" / "my_method.py").read_text()  # tests/test_bring_your_own.py trains with it


def test_the_tree_names_what_exists_and_every_room():
    (tree,) = (text for text in fences("CONTRIBUTING.md", "") if text.startswith("d1/"))
    found = set()
    for line in tree.splitlines():  # one folder per line, d1's indented below it; files named after a folder are in it
        first, _, rest = line.strip().partition(" ")
        room = f"d1/{first}" if line[0] == " " else first
        found |= {room, *(room + name for name in FILE.findall(rest))}
    assert not [path for path in found if not (ROOT / path).exists()]
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "d1").glob("*/__init__.py")}
    assert found >= rooms | {f"{room}/" for room in ROOMS}


@pytest.mark.slow
def test_the_readmes_installation_and_every_command_for_any_machine_run_in_a_fresh_environment(tmp_path):
    """In a copy of the checkout: the installation, then the blocks that need neither a GPU nor a hub, in order."""
    folder = copy_checkout(tmp_path / "d1")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}"
    options = {"cwd": folder, "env": kept | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}}
    _, install, pocket, _, tools = fences("README.md", "bash")
    local = "".join(line for line in tools.splitlines(keepends=True) if "GSAI-ML" not in line)
    for commands in (install, pocket, local):
        subprocess.run(["bash", "-euo", "pipefail", "-c", commands], check=True, **options)
    assert "sudoku" in (folder / "watch.html").read_text()
    subprocess.run([tmp_path / "venv/bin/python", "-c", fences("README.md", "python")[0]], check=True, **options)
