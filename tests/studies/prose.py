"""Numbers and orders in a page's prose name the cells of tables that they come from, and are compared with them.

A name follows what it belongs to, in a comment that readers of the page do not see:

- `88.8 [86.6, 91.0]<!--arithmetic-5/tracerl/solved-->`: the numbers are those at the beginning of this cell. With
  `neg:` before the name, the sign is reversed and the ends are swapped; with `#2` after it, the cell's first number is
  left out. If the row's name is one word, it must be the last such name in the paragraph before the number.
- `<!--above:TABLE/ROW:TABLE/ROW-->`: the first row solves more than the second. `separated:`: the two share no letter
  in the column "rank", too. `tied:`: they share one.

TABLE is the beginning of the heading above a table; ROW and COLUMN are the first cell of a row and of a column or the
beginning of it. All are in lower case with "-" between words and "plus" for "+". COLUMN is "solved" if it is not given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
VALUE = rf"(?<!\w)[-+]?[\d,]*\.?\d+(?: \[[^\]]*\])?|\b(?:{'|'.join(WORDS)})"
# A comment with a space is none: claims (studies/claims.py) and other marks have one.
TAG = re.compile(rf"(?P<value>(?:{VALUE})%?)?<!--(?P<tag>[^\s>]+)-->", re.IGNORECASE)
ORDER = re.compile(r"\b(above|below|highest|lowest|ahead|better|worse|separated)\b")
Table = tuple[str, list[str], list[list[str]]]  # slugs of the heading and of the columns; rows


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("+", " plus ")).strip("-")


def tables_in(path: Path) -> list[Table]:
    """The tables of a page with the headings above them."""
    found: list[Table] = []
    heading, before = "", ""
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            heading = slug(line)
        elif line.startswith("| ---"):
            found.append((heading, [slug(cell) for cell in before.strip("|").split("|")], []))
        elif line.startswith("|") and before.startswith("|") and found:
            found[-1][2].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return found


def matching(name: str, names: Iterable[str]) -> list[int]:
    """The places of `name` in `names`, else of those that begin with it."""
    every = [*names]
    same = [i for i, one in enumerate(every) if one == name]
    return same or [i for i, one in enumerate(every) if one.startswith(name)]


def cell(tables: Iterable[Table], name: str) -> tuple[str, str, list[str]]:
    """The text of the cell TABLE/ROW or TABLE/ROW/COLUMN, the name of its row, and those of all rows of its table.

    Raises:
        ValueError: not exactly one cell has this name.
    """
    table, row, column = (*name.split("/"), "solved")[:3]
    every = [*tables]
    found = []
    for place in matching(table, (heading for heading, _, _ in every)):
        _, header, rows = every[place]
        names = [cells[0].strip("*`").lower() for cells in rows]
        if len({*names}) < len(names):
            names = [" ".join(cells[:2]) for cells in rows]
        places = matching(row, map(slug, names))
        found += [(rows[i][j], names[i], names) for i in places for j in matching(column, header)]
    if len(found) != 1:
        raise ValueError(f"{name} names {len(found)} cells, not one")
    return found[0]


def letters_of(tables: Iterable[Table], name: str) -> set[str]:
    """The letters of a row's ties: "ab" of "1-3, ab"."""
    return {*cell(tables, f"{name}/rank")[0].rpartition(" ")[2]}


def numbers(text: str) -> list[float]:
    """The numbers of a value: "6.2 [2.9, 9.5]", "1,500" or "six"."""
    if text.lower() in WORDS:
        return [float(WORDS.index(text.lower()))]
    return [float(one) for one in re.findall(r"[-+]?\d*\.?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text))]


def subject(before: str, rows: Iterable[str]) -> str:
    """The last name of a row in the last paragraph or item of a text; "" without one."""
    paragraph = TAG.sub("", re.split(r"\n\n|\n- ", before)[-1]).lower()
    names = "|".join(re.escape(row) for row in sorted(rows, key=len, reverse=True))
    return (re.findall(rf"(?<![\w-])(?:{names})(?![\w-])", paragraph) or [""])[-1]


def wrong(text: str, tables: Iterable[Table]) -> list[str]:
    """What is wrong with the named numbers and orders of a text."""
    every, found = [*tables], []
    for tag in TAG.finditer(text):
        kind, _, rest = tag["tag"].partition(":")
        try:
            if kind in ("above", "separated", "tied"):
                first, second = rest.split(":")
                values = [numbers(cell(every, name)[0])[0] for name in (first, second)]
                shared = kind == "above" or bool(letters_of(every, first) & letters_of(every, second))
                if values[0] <= values[1] or shared != (kind != "separated"):
                    found.append(f"{tag['tag']} does not hold")
                continue
            name, _, place = (rest if kind == "neg" else tag["tag"]).partition("#")
            said, row, rows = cell(every, name)
            own, expected = numbers(tag["value"] or ""), numbers(said)[int(place or 1) - 1 :]
            if kind == "neg":
                expected = [-expected[0], *sorted(-one for one in expected[1:3])]
            if not own or own != expected[: len(own)]:
                found.append(f"{tag['value']} is not {name}, which is {expected}")
            if " " not in row and len({*rows}) > 2 and subject(text[: tag.start()], rows) != row:
                found.append(f"{tag['value']} is of {row}, which is not the last name before it")
        except ValueError as error:
            found.append(str(error))
    return found


def unnamed(text: str) -> list[str]:
    """Decimal numbers (not sizes, such as 1.5M) without a name, and sentences that state an order without any name."""
    plain = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|^\|.*$", "", text, flags=re.DOTALL | re.MULTILINE)
    left = TAG.sub(lambda tag: "" if tag["value"] else tag[0], plain)
    sentences = re.split(r"(?<=[.:])\s+(?=[A-Z*-])", plain)
    decimals = re.findall(r"\d+\.\d+(?![\d.]*[MB]\b)", left)
    return decimals + [one for one in sentences if ORDER.search(one) and not TAG.search(one)]


def check(page: Path, others: Iterable[Path] = ()) -> list[str]:
    """What is wrong with a page, whose names are looked up in its own tables and in those of the other pages."""
    return wrong(page.read_text(), [table for path in (page, *others) for table in tables_in(path)])
