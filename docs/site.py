"""Build the site from the files of the repository, so that a relative link works on GitHub and on the site.

By itself MkDocs knows only the files in docs/. This hook names them by their paths in the repository, adds every file
that a page links to (documents become pages, source files are shown as plain text), and writes one page per public
package from its docstrings.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from mkdocs.structure.files import File, Files, InclusionLevel

HOME = "README.md"
LINK = re.compile(r"\]\(([^)\s#]+)")
AS_TEXT = (".py", ".yaml", ".sh", ".csv", ".jsonl")  # a browser would download these, or run them
ROOMS = ("models", "sampling", "scoring", "masking", "tasks", "sft", "rl", "preference", "distill", "eval")
CONFIGS = {"sft": "SFTConfig", "rl": "DiffuGRPOConfig", "preference": "PreferenceConfig", "distill": "DistillConfig"}


def reference(room: str) -> str:
    """The text of a package's page: the names that the package exports, trainers first; for a file, all public ones.

    Classes of settings show no members, which are internal. Their fields are in the signature; a stage's config has a
    table at the end.
    """
    module = import_module(f"d1.{room}")
    names = sorted(getattr(module, "HOMES", ()), key=lambda name: "Trainer" not in name)
    text = f"# d1.{room}\n\n::: d1.{room}\n" + ("    options: {members: false}\n" if names else "")
    for name in names:
        members = ", members: false" if name.endswith(("Config", "Settings")) else ""
        text += f"\n::: d1.{room}.{name}\n    options: {{show_root_heading: true{members}}}\n"
    return text + (settings(getattr(module, CONFIGS[room])) if room in CONFIGS else "")


def settings(config: type) -> str:
    """A table of the fields that a dataclass of settings declares itself, from their defaults and help texts."""
    table = f"\n## Settings of {config.__name__}\n\n| setting | default | meaning |\n| --- | --- | --- |\n"
    for one in fields(config):
        if one.name in config.__annotations__:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            row = [f"`{one.name}`", f"`{default!r}`", one.metadata.get("help", "")]
            table += "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n"
    return table


def address(path: PurePosixPath) -> str:
    """The path on the site of a file of the repository."""
    shown = path.relative_to("docs") if path.parts[0] == "docs" else path
    if path.suffix != ".md":
        return f"{shown}.txt" if path.suffix in AS_TEXT else str(shown)
    shown = shown.parent if shown.name == "README.md" else shown.with_suffix("")
    return str(shown / "index.html")


def linked(path: Path, root: Path) -> set[str]:
    """The paths, from `root`, of the files that a document links to."""
    targets = [unquote(link) for link in LINK.findall(path.read_text())] if path.suffix == ".md" else []
    found = {(path.parent / link).resolve() for link in targets if not re.match(r"[a-z]+:|/", link)}
    return {str(file.relative_to(root)) for file in found if file.is_file() and file.is_relative_to(root)}


def on_files(files: Files, *, config: Any) -> Files:
    """The files of docs/ and the start page, the files that they link to, and the generated pages."""
    root = Path(config.config_file_path).resolve().parent
    docs = Path(config.docs_dir).resolve().relative_to(root)
    own = [file for file in files if file.src_dir == config.docs_dir]
    site = Files([file for file in files if file not in own])  # those of the theme
    todo = {HOME, *(str(docs / file.src_uri) for file in own if not file.inclusion.is_excluded())}
    while todo:
        path, shown = todo.pop(), InclusionLevel.INCLUDED
        to = address(PurePosixPath(path))
        site.append(File(path, str(root), config.site_dir, True, dest_uri=to, inclusion=shown))
        todo |= {found for found in linked(root / path, root) if found not in site.src_uris}
    for room in ROOMS:
        site.append(File.generated(config, f"api/d1.{room}.md", content=reference(room)))
    return site
