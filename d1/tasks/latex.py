r"""Answers in LaTeX or plain text as trees, in which two answers can be compared part by part.

A tree is a text without spaces (a number, an expression, a word), or a list: a kind, then the parts. Kinds are

- "," (values next to each other), "{}" (a set), "()" "[]" "(]" "[)" (tuples and intervals), "cup" (a union),
  "matrix R" (with R rows), ":" (a ratio): the parts are trees;
- "=" (a name, and the tree of what it is), "base" (digits and the base), "time" (hour, minute, "a", "p" or "").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

MAX_DEPTH = 20  # of brackets; a text with more is not taken apart

Tree = str | list["Tree"]


class Answer(NamedTuple):
    """`text` is the answer in one spelling; `unit` is None if there is none that is known; `percent`: a percent sign
    stood behind the number."""

    text: str
    tree: Tree
    unit: str | None
    percent: bool


# ---- Characters

_CHARACTERS = {
    **dict.fromkeys("‐‑‒–—―−﹘﹣", "-"),
    **{chr(code): " " for code in (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)},
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("‘’ʼ", "'"),
    **dict.fromkeys("“”", '"'),
    **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},  # full-width forms
}
_SIGNS = {
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "∈": r"\in ",
    "±": r"\pm ",
    "≈": r"\approx ",
    "º": "°",
    "⁄": "/",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅛": r"\frac{1}{8}",
}
_SUPERSCRIPTS, _DIGITS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_ROOT = re.compile(r"√\s*\(?\s*([0-9A-Za-z]+)\s*\)?")
_FROM_CHARACTERS, _FROM_SIGNS = str.maketrans(_CHARACTERS), str.maketrans(_SIGNS)


def plain_characters(text: str) -> str:
    """The text with one character for all dashes, spaces and apostrophes, and with ASCII for full-width characters."""
    return text.translate(_FROM_CHARACTERS)


def _latex_of_signs(text: str) -> str:
    """The text with LaTeX for the signs of mathematics: powers, roots, fractions, relations."""
    text = _SUPERSCRIPTS.sub(lambda digits: "^{" + digits[0].translate(_DIGITS) + "}", text)
    return _ROOT.sub(r"\\sqrt{\1}", text).translate(_FROM_SIGNS)


# ---- What is written around an answer

_INTRODUCTION = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct|exact)\s+)?"
    r"(?:answer|result|solution|value)\s*(?:is\b|:|=)+\s*|(?:approximately|about|roughly)\s+|\\approx\s*|[=:]\s*",
    re.IGNORECASE,
)
_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*\*(.+?)\*\*",
        r"__(.+?)__",
        r"\*([^*]+)\*",
        r"_([^_]+)_",
        r"`+([^`]+)`+",
        r"\"([^\"]+)\"",
        r"'([^']+)'",
        r"\$\$([^$]+)\$\$",
        r"\$((?:\\.|[^$\\])+)\$",
        r"\\\(((?:(?!\\\)).)+)\\\)",
        r"\\\[((?:(?!\\\]).)+)\\\]",
        r"\\(?:boxed|fbox|mathbf|textbf|boldsymbol|bm|mathit|textit|emph|ensuremath|underline)\s*\{([^{}]*(?:\{[^{}]*"
        r"(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}",
        r"\{\\(?:bf|it|rm)\s([^{}]+)\}",
    )
]
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{?")
_BOLD = re.compile(r"\*\*(?=[^\s*])([^*]+?)(?<=[^\s*])\*\*(?![0-9A-Za-z(\\])")  # never the power in 2**3**2


def unwrap(text: str) -> str:
    r"""The answer without what is around it: "**Answer:** $73$." is "73"."""
    text = _BOLD.sub(r"\1", text)
    for _ in range(20):
        before = text
        text = text.strip().rstrip(".,;").removesuffix("\\").strip()
        introduction = _INTRODUCTION.match(text)
        if introduction:
            text = text[introduction.end() :]
        for wrapper in _WRAPPERS:
            whole = wrapper.fullmatch(text)
            if whole:
                text = whole[1]
        if text == before:
            break
    if _OPEN_BOX.match(text) and text.count("{") > text.count("}"):  # a box that is cut off
        text = _OPEN_BOX.sub("", text, count=1)
    return text


# ---- Units

_UNIT_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "degree": "deg degree",
    "radian": "rad radian",
    "dollar": "dollar usd buck",
    "cent": "cent ¢",
    "euro": "euro eur €",
    "£": "£ gbp",
    "mph": "mph",
    "unit": "unit",
}
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in (unit, *names.split())}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TEXT = r"\\(?:text|mbox|mathrm|textrm|textnormal|textbf|mathbf|textit|operatorname)\s*"
_UNIT_IN_TEXT = re.compile(rf"(?<=[^\s_])\s*{_TEXT}\{{([^{{}}]*)\}}\s*(?:\^\s*\{{?([0-9])\}}?)?$")
_UNIT_IN_WORDS = re.compile(r"(?<=[0-9}).])(\s*)([A-Za-z¢€£][A-Za-z. ]*)(?:\^\{?([0-9])\}?)?$")
_NUMBER_AND_WORDS = re.compile(r"-?[0-9][0-9.,]*\s+((?:[A-Za-z]{3,})(?:\s+[A-Za-z]+)*)$")
_NO_UNIT = re.compile(
    r"\b(?:and|or|to|if|for|base|mod|plus|minus|times|over|point|sqrt|frac|pi|log|ln|sin|cos|tan|factorial|squared|"
    r"cubed|hal(?:f|ves)|thirds|quarters|fourths|fifths|sixths|eighths|tenths|hundredths|thousandths|"
    r"[ap]\.?\s?m)\b|\(",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°")
_PERCENT = re.compile(rf"\s*(?:\\?%|(?:{_TEXT}\{{)?\s*per\s?cent(?:age)?\s*\}}?)\s*$", re.IGNORECASE)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"(-?[0-9][0-9.,]*)\s*(?:{_TEXT}\{{)?\s*({'|'.join(_SCALES)})\s*\}}?(?![A-Za-z])", re.IGNORECASE)


def unit_of(text: str, power: str | None = None) -> str | None:
    """One name for the unit, such as "cm^2" for "square centimeters", or None if it is not a known one."""
    words = re.findall(r"[a-z¢€£]+", text.lower())
    raised = int(power or 1)
    for word in words:
        raised *= _POWERS.get(word, 1)
    words = [word for word in words if word not in _POWERS]
    if len(words) != 1:
        return None
    unit = _UNITS.get(words[0]) or _UNITS.get(words[0].removesuffix("s"))
    if unit is None or raised == 1:
        return unit
    return f"{unit}^{raised}"


def _without_unit(text: str) -> tuple[str, str | None]:
    """The text without the unit at its end, and the unit: a known one, or None."""
    currency = re.search(r"\\\$|[$€£]", text)
    unit = None
    if currency:
        unit = _UNITS.get(currency[0], "dollar")
        text = re.sub(r"\\?\$|[€£]", "", text).strip()
    degrees = _DEGREES.search(text)
    if degrees:
        scale = re.search(rf"(?:{_DEGREES.pattern})\s*(?:{_TEXT}\{{)?\s*([CF])\s*\}}?$", text)
        unit = f"degree {scale[1]}" if scale else "degree"
        text = _DEGREES.sub("", text[: scale.start()] if scale else text)
        return text, unit
    # A unit in \text{} may have any name. Between the number and a bare one, "5 m", a single letter needs a space.
    in_text = _UNIT_IN_TEXT.search(text)
    if in_text and not _NO_UNIT.search(in_text[1]):
        return text[: in_text.start()], unit_of(in_text[1], in_text[2]) or unit
    in_words = _UNIT_IN_WORDS.search(text)
    if in_words and (in_words[1] or not re.fullmatch("[A-Za-z]", in_words[2].strip())):
        known = unit_of(in_words[2], in_words[3])
        if known:
            return text[: in_words.start()], known
    words = _NUMBER_AND_WORDS.match(text)
    if words and not _NO_UNIT.search(words[1]):
        return text[: words.start(1)], unit
    return text, unit


# ---- One spelling

_LAYOUT = re.compile(
    r"\\(?:left|right)(?![A-Za-z])\.?|\\(?:big[lr]?|Big[lr]?|bigg[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])|"
    r"(?<!\\)\\[()\[\]]"
)
_LATEX_SPACE = re.compile(
    r"(?<!\\)\\[!,;: ]|\\(?:quad|qquad|thinspace|enspace|space)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|~"
)
_GROUPS = re.compile(r"(?<=[0-9])(?:,\\!\s*|\{,\}\s*|\\!,|\\[,;: ])(?=[0-9]{3}(?![0-9]))")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+|(?:'[0-9]{3})+)(?:\.[0-9]+)?")
_SPELLINGS = [
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(rf"\s*,?\s*(?:{_TEXT}\{{\s*(?:and|or)\s*\}}|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*"), ","),
    (re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}"), r" \1 "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z]|\\[a-z]+)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*([0-9A-Za-z]|\\pi)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\^\s*\{([0-9A-Za-z])\}"), r"^\1"),
]


def normalize(latex: str) -> str:
    """`latex` in one spelling, without a unit; equal results mean equal answers."""
    return read(latex).text


def read(latex: str) -> Answer:
    """The answer that a text is; the text may have markup, an introduction and punctuation around it."""
    text = unwrap(_latex_of_signs(plain_characters(latex)))
    text = _GROUPS.sub("", _LAYOUT.sub("", text))
    text = _LATEX_SPACE.sub(" ", text).strip()
    text = _SCALE.sub(_scaled, text, count=1)
    sign = _PERCENT.search(text)
    if sign:
        text = text[: sign.start()]
    text, unit = _without_unit(text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _without_spaces(text.strip().rstrip(".").strip())
    tree = tree_of(text) if _depth(text) <= MAX_DEPTH else text
    return Answer(text, tree, unit, bool(sign))


def _depth(text: str) -> int:
    """How many brackets are open at a time, at most."""
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _scaled(match: re.Match[str]) -> str:
    """The number that "1.5 million" is."""
    number = number_of(match[1].replace(",", ""))
    if number is None:
        return match[0]
    return str(number * _SCALES[match[2].lower()])


def _without_spaces(text: str) -> str:
    """The text with no space but those between two digits, and between a command and a letter."""

    def kept(space: re.Match[str]) -> str:
        before, after = text[space.start() - 1 : space.start()], text[space.end() : space.end() + 1]
        if before.isdigit() and after.isdigit():
            return " "
        command = re.search(r"\\[A-Za-z]+$", text[max(0, space.start() - 20) : space.start()])
        return " " if command and after.isalpha() else ""

    return re.sub(r"\s+", kept, text)


# ---- Numbers

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SLASH = re.compile(rf"(-?{_DECIMAL})/(-?{_DECIMAL})")
_FRACTION = re.compile(
    rf"(?:([0-9]+) ?)??(?:\\frac\{{(-?{_DECIMAL})\}}\{{(-?{_DECIMAL})\}}|(?<=[0-9] )([0-9]+)/([0-9]+))"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_SCIENTIFIC = re.compile(
    rf"({_DECIMAL})(?:(?:\\times|\\cdot|\*|x)10(?:\^|\*\*)(?:\{{([+-]?[0-9]{{1,3}})\}}|([+-]?[0-9]{{1,3}}))|"
    r"[eE]([+-]?[0-9]{1,3}))"
)


def number_of(text: str) -> Fraction | None:
    """The exact number that a text in one spelling is: a decimal, a fraction, a mixed or a scientific number."""
    negative = text.startswith("-")
    text = text.removeprefix("-").removeprefix("+")
    try:
        value = _positive_number(text)
    except (ValueError, ZeroDivisionError):
        return None
    if value is None or not negative:
        return value
    return -value


def _positive_number(text: str) -> Fraction | None:
    if re.fullmatch(_DECIMAL, text):
        return Fraction(text.removesuffix("."))
    slash = _SLASH.fullmatch(text)
    if slash:
        return Fraction(slash[1]) / Fraction(slash[2])
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        whole, top, bottom, plain_top, plain_bottom = fraction.groups()
        return Fraction(whole or 0) + Fraction(top or plain_top) / Fraction(bottom or plain_bottom)
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        whole, first, again = repeating.groups()
        tail = Fraction(int(again), 10 ** len(again) - 1) / 10 ** len(first)
        return Fraction(int(whole or 0)) + Fraction(int(first or 0), 10 ** len(first)) + tail
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        exponent = int(scientific[2] or scientific[3] or scientific[4])
        return Fraction(scientific[1]) * Fraction(10) ** exponent
    return None


# ---- Structure

_NAME = re.compile(
    r"(\\?[A-Za-z]|\\[a-z]+|[A-Za-z]\([a-z](?:,[a-z])*\)|[A-Za-z]_\{?[0-9A-Za-z]\}?|\([a-z](?:,[a-z])+\))="
)
_NAME_BEHIND = re.compile(r"([^=<>]+)=([A-Za-z])")
_MEMBER = re.compile(r"[A-Za-z]\\in(?![A-Za-z])\s?")
_MATRIX = re.compile(r"\\begin\{([pb]?|small)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_BETWEEN = re.compile(r"([^<>=]+?)(<|\\le) ?([A-Za-z])(<|\\le)([^<>=]+)")
_ONE_SIDED = re.compile(r"[A-Za-z](<|>|\\le|\\ge)([^<>=]+)")
_BASES = {
    **{"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"},
    **{"ten": "10", "twelve": "12", "sixteen": "16"},
}
_BASE = re.compile(
    r"\(?(-?[0-9][0-9A-F]*(?:\.[0-9A-F]+)?)\)?"
    r"(?:_\{?\(?(?:base)?([0-9]+|[a-z]+)\)?\}?|\(?(?:in)?base-?([0-9]+|[a-z]+)\)?)"
)
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?([aApP])\.?[mM]\.?")
_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)


def tree_of(text: str) -> Tree:
    """The tree of a text in one spelling."""
    if _THOUSANDS.fullmatch(text):
        return re.sub("[, ']", "", text)
    parts = list(_split(text, {",", ";"}))
    if len(parts) > 1:
        return [",", *_values(parts)]
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    name = _NAME.match(text)
    if name:
        return ["=", name[1], tree_of(text[name.end() :].rpartition("=")[2])]
    name_behind = _NAME_BEHIND.fullmatch(text)
    if name_behind:
        return ["=", name_behind[2], tree_of(name_behind[1])]
    sets = list(_split(text, {r"\cup"}))
    if len(sets) > 1:
        return ["cup", *map(tree_of, sets)]
    return _enclosed(text) or _inequality(text) or _leaf(text)


def _split(text: str, separators: set[str]) -> Iterator[str]:
    """The parts between separators that stand in no brackets; half-open intervals are brackets, too."""
    depth, start = 0, 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in ("(", "[", "{", r"\{") or sign == r"\begin":
            depth += 1
        elif sign in (")", "]", "}", r"\}") or sign == r"\end":
            depth -= 1
        elif depth == 0 and sign in separators:
            yield text[start : token.start()]
            start = token.end()
    yield text[start:]


def _values(parts: list[str]) -> list[Tree]:
    r"""The trees of values; "1 \pm 2" is two."""
    values: list[Tree] = []
    for part in filter(None, parts):
        tree = tree_of(part)
        if isinstance(tree, list) and tree[0] == ",":
            values += tree[1:]
        else:
            values.append(tree)
    return values


def _enclosed(text: str) -> Tree | None:
    """The tree of what is in one pair of brackets, or in a matrix, as a whole."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and r"\begin" not in matrix[2]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].replace(r"\hline", "")) if row.strip()]
        return [f"matrix {len(rows)}", *(tree_of(cell.strip()) for row in rows for cell in row.split("&"))]
    tokens = [token[0] for token in _TOKEN.finditer(text)]
    if len(tokens) < 3 or tokens[0] not in _BRACKETS or tokens[-1] not in (")", "]", "}", r"\}"):
        return None
    inner = text[len(tokens[0]) : -len(tokens[-1])]
    depth = 0
    for token in tokens[1:-1]:
        depth += (token in _BRACKETS) - (token in _BRACKETS.values())
        if depth < 0:
            return None
    kind = tokens[0][-1] + tokens[-1][-1]
    if depth or kind not in ("()", "[]", "(]", "[)", "{}"):
        return None
    parts = _values(list(_split(inner, {",", ";"})))
    if len(parts) == 1 and (kind != "[]" or isinstance(parts[0], list)):
        return parts[0]
    if tokens[0] == "{":  # a group, which LaTeX does not print
        return None
    return [kind, *parts]


def _inequality(text: str) -> Tree | None:
    """The interval that an inequality for one letter is."""
    between = _BETWEEN.fullmatch(text)
    if between:
        low, left, _, right, high = between.groups()
        return [("(" if left == "<" else "[") + (")" if right == "<" else "]"), tree_of(low), tree_of(high)]
    one = _ONE_SIDED.fullmatch(text)
    if not one:
        return None
    bound = tree_of(one[2])
    return {
        "<": ["()", r"-\infty", bound],
        r"\le": ["(]", r"-\infty", bound],
        ">": ["()", bound, r"\infty"],
        r"\ge": ["[)", bound, r"\infty"],
    }[one[1]]


def _leaf(text: str) -> Tree:
    """A time, a number in a base, a ratio, the two values of a plus-minus sign, or the text."""
    time = _TIME.fullmatch(text)
    if time:
        return ["time", str(int(time[1]) % 12), time[2] or "00", time[3].lower()]
    base = _BASE.fullmatch(text)
    if base:
        name = base[2] or base[3]
        number = name if name.isdigit() else _BASES.get(name)
        if number:
            return ["base", base[1].lstrip("0") or "0", number]
    if ":" in text:
        return [":", *text.split(":")]
    if r"\pm" in text or r"\mp" in text:
        plus = re.sub(r"\\pm(?![A-Za-z])\s?", "+", re.sub(r"\\mp(?![A-Za-z])\s?", "-", text))
        minus = re.sub(r"\\pm(?![A-Za-z])\s?", "-", re.sub(r"\\mp(?![A-Za-z])\s?", "+", text))
        return [",", plus.removeprefix("+"), minus]
    return text.removeprefix("+").removesuffix(".")
