r"""Answers in LaTeX or plain text as trees, in which two answers can be compared part by part.

A tree is a text without spaces (a number, an expression, a word), or a list: a kind, then the parts. Kinds are

- "," (values next to each other), "{}" (a set), "()" "[]" "(]" "[)" (tuples and intervals), "cup" (a union),
  "matrix R" (with R rows), ":" (a ratio): the parts are trees;
- "=" (a name, and the tree of what it is), "base" (digits and the base), "time" (hour, minute, "a", "p" or "").
"""

from __future__ import annotations

import re
import unicodedata
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
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "±": r"\pm ",
    "≈": r"\approx ",
    "º": "°",
    "⁄": "/",
}
FRACTION_SIGNS: dict[int, str] = {}  # LaTeX of the fractions of one character, for str.translate
for _code in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F)):
    _top, _, _bottom = unicodedata.normalize("NFKC", chr(_code)).partition("⁄")
    FRACTION_SIGNS[_code] = rf"\frac{{{_top}}}{{{_bottom}}}"
_SUBSCRIPTS = re.compile(r"[₀-₉]+")
_LOW_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUPERSCRIPTS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9A-Za-z]+))")
_FROM_CHARACTERS = str.maketrans(_CHARACTERS)
_FROM_SIGNS = str.maketrans(_SIGNS) | FRACTION_SIGNS


def plain_characters(text: str) -> str:
    """The text with one character for all dashes, spaces and apostrophes, and with ASCII for full-width characters."""
    return text.translate(_FROM_CHARACTERS)


def _latex_of_signs(text: str) -> str:
    """The text with LaTeX for the signs of mathematics: powers, roots, fractions, relations."""
    text = _SUPERSCRIPTS.sub(lambda digits: "^{" + digits[0].translate(_DIGITS) + "}", text)
    text = _SUBSCRIPTS.sub(lambda digits: "_{" + digits[0].translate(_LOW_DIGITS) + "}", text)
    return _ROOT.sub(_latex_of_root, text).translate(_FROM_SIGNS)


def _latex_of_root(root: re.Match[str]) -> str:
    sign, *radicands = root.groups(default="")
    command = r"\sqrt[3]" if sign == "∛" else r"\sqrt"
    return f"{command}{{{''.join(radicands)}}}"


# ---- What is written around an answer

_INTRODUCTION = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct|exact)\s+)?"
    r"(?:answer|result|solution|value)\s*(?:is\b|:|=)+\s*|(?:approximately|about|roughly)\s+|\\(?:approx|sim)(?![a-z])\s*|"
    # "The graph is an ellipse", "the sum of the roots is 5"
    r"(?!.*\b(?:no|not|none|neither|if)\b)[A-Za-z]{2,}(?:\s+[A-Za-z]+){0,6}\s+is\s+(?:equal\s+to\s+)?|"
    r"(?:an?|the)\s+(?=[A-Za-z]{3,}$)|(?:option|choice)\s+(?=\(?[A-Z](?![A-Za-z]))|\#+\s*|[=:]\s*",
    re.IGNORECASE,
)
_IS = re.compile(r"([A-Za-z])\s+is\s+(?!not\b)")  # x is 5
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
        r"(?:\\?boxed|\\(?:fbox|framebox|mathbf|textbf|boldsymbol|bm|mathit|textit|emph|ensuremath|underline|text|mbox|mathrm|"
        r"textrm|textnormal))\s*\{([^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}",
        r"\{\\(?:bf|it|rm)\s([^{}]+)\}",
        r"\\(?:mathbf|large|Large|LARGE|huge|Huge)\s+([^{}\s].*)",
        r"\\(?:textcolor|colorbox)\s*\{[a-zA-Z]+\}\s*\{([^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}",
        r"\\color\s*\{[a-zA-Z]+\}\s*(.+)",
    )
]
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{?")
_BOLD = re.compile(r"\*\*(?=[^\s*])([^*]+?)(?<=[^\s*])\*\*(?![0-9A-Za-z(\\])")  # never the power in 2**3**2


def unwrap(text: str) -> str:
    r"""The answer without what is around it: "**Answer:** $73$." is "73"."""
    text = _BOLD.sub(r"\1", text)
    for _ in range(20):
        before = text
        text = _strip_end(text)
        introduction = _INTRODUCTION.match(text)
        if introduction:
            text = text[introduction.end() :]
        name = _IS.match(text)
        if name:
            text = f"{name[1]}={text[name.end() :]}"
        for wrapper in _WRAPPERS:
            wrapped = wrapper.fullmatch(text)
            if wrapped:
                text = wrapped[1]
        if text == before:
            break
    return strip_open_box(text)


def strip_open_box(text: str) -> str:
    r"""The text without the "\boxed{" at its beginning if no brace closes this box: the answer is cut off."""
    if _OPEN_BOX.match(text) and text.count("{") > text.count("}"):
        return _OPEN_BOX.sub("", text, count=1)
    return text


def _strip_end(text: str) -> str:
    """The text without punctuation at its end; three dots stay, because more follows them."""
    text = text.strip()
    if text.endswith("..."):
        return text
    return text.rstrip(".,;").removesuffix("\\").strip()


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
    "mi/h": "mph",
    "unit": "unit",
}
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in (unit, *names.split())}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
# A command whose argument is words
TEXT = r"\\(?:text|mbox|mathrm|textrm|textnormal|textbf|mathbf|textit|operatorname)\s*"
_UNIT_IN_TEXT = re.compile(rf"(?<=[^\s_])\s*{TEXT}\{{([^{{}}]*)\}}\s*(?:\^\s*\{{?([0-9])\}}?)?$")
_POWER_IN_TEXT = re.compile(rf"({TEXT})\{{([^{{}}$^]*?)\s*\$?\^(?:\{{([23])\}}|([23]))\$?\s*\}}")
_WORDS_IN_BRACKETS = re.compile(rf"(?<=[0-9}}])\s*(?:{TEXT}\{{\s*)?\(([A-Za-z]{{3,}}(?: [A-Za-z]+)*)\)(?:\s*\}})?$")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_CURRENCY = re.compile(
    r"(?:US)?(?:\\text\{\\?\$\}|\\?\$)|[€£]|(?<![A-Za-z])(?:USD|EUR|GBP)\s*(?=[0-9])|\\(?:text|math)dollar(?![A-Za-z])"
)
_UNIT_IN_WORDS = re.compile(r"(?:(?<=[0-9}).])|(?<=\\pi))(\s*)([A-Za-z¢€£][A-Za-z. ]*)(?:\^\{?([0-9])\}?)?$")
_NUMBER_AND_WORDS = re.compile(
    r"(?:-?[0-9][0-9.,]*|-?[0-9]+/[0-9]+|-?[0-9]+ [0-9]+/[0-9]+|-?(?:[0-9]+ ?)?\\[dt]?frac\{[0-9]+\}\{[0-9]+\})"
    r"\s+((?:[A-Za-z]{3,})(?:(?:\s+|/)[A-Za-z]+)*)$"
)
_RATE = re.compile(r"(?<=[0-9}])\s+([A-Za-z]+)\s*/\s*([A-Za-z]+)$")  # "5 m/s"
_NO_UNIT = re.compile(
    r"\b(?:and|or|to|if|for|base|mod|plus|minus|times|over|point|sqrt|frac|pi|log|ln|sin|cos|tan|factorial|squared|"
    r"cubed|hal(?:f|ves)|thirds|quarters|fourths|fifths|sixths|eighths|tenths|hundredths|thousandths|"
    r"[ap]\.?\s?m)\b|\(",
    re.IGNORECASE,
)
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°")
_IN_DEGREES = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*(?:{DEGREES.pattern})")
# An expression of sines and numbers alone, without inverse functions. Each part is atomic: else n degree signs could be
# read in 2^n ways.
_SINE = r"\\?(?:sin|cos|tan|cot|sec|csc)(?!\s*\^\s*\{?\s*-)"
_OF_SINES = re.compile(
    rf"(?=.*{_SINE})(?>{_SINE}|\\(?:[dt]?frac|cdot|times|left|right|sqrt|pi|[,;! ])|{DEGREES.pattern}|[^A-Za-z\\=,])*"
)
_BLANKS = re.compile(r"\s{2,}")
_PERCENT = re.compile(rf"\s*(?:\\?%|(?:{TEXT}\{{)?\s*per\s?cent(?:age)?\s*\}}?)\s*$", re.IGNORECASE)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"(-?[0-9][0-9.,]*)\s*(?:{TEXT}\{{)?\s*({'|'.join(_SCALES)})\s*\}}?(?![A-Za-z])", re.IGNORECASE)


def unit_of(text: str, power: str | None = None) -> str | None:
    """One name for the unit, such as "cm^2" for "square centimeters", or None if it is not a known one."""
    words = re.findall(r"[a-z¢€£]+", text.lower())
    exponent = int(power or 1)
    for word in words:
        exponent *= _POWERS.get(word, 1)
    words = [word for word in words if word not in _POWERS]
    if len(words) != 1:
        return None
    unit = _UNITS.get(words[0]) or _UNITS.get(words[0].removesuffix("s"))
    if unit is None or exponent == 1:
        return unit
    return f"{unit}^{exponent}"


def _split_unit(text: str) -> tuple[str, str | None]:
    """The text without the unit at its end, and the unit: a known one, or None."""
    currency = _CURRENCY.search(text)
    unit = None
    if currency:
        unit = _UNITS.get(currency[0].strip().lower(), "dollar")
        text = _CURRENCY.sub("", text).strip()
    if _OF_SINES.fullmatch(text.strip()):  # its degrees are no unit
        return _IN_DEGREES.sub(r"\\frac{\1\\pi}{180}", text), unit
    degrees = DEGREES.search(text)
    if degrees:
        scale = re.search(rf"(?:{DEGREES.pattern})\s*(?:{TEXT}\{{)?\s*([CF])\s*\}}?$", text)
        unit = f"degree {scale[1]}" if scale else "degree"
        text = DEGREES.sub("", text[: scale.start()] if scale else text)
        return text, unit
    # A unit in \text{} may have any name. Between the number and a bare one, "5 m", a single letter needs a space.
    text_unit = _UNIT_IN_TEXT.search(text)
    if text_unit and not _NO_UNIT.search(text_unit[1]):
        return text[: text_unit.start()], unit_of(text_unit[1], text_unit[2]) or unit
    bare_unit = _UNIT_IN_WORDS.search(text)
    # A unit follows a number: in "\pi r^2 h", h is no hour.
    is_product = bare_unit and _VARIABLE.search(text, text.rfind("=") + 1, bare_unit.start())
    if bare_unit and not is_product and (bare_unit[1] or not re.fullmatch("[A-Za-z]", bare_unit[2].strip())):
        known_unit = unit_of(bare_unit[2], bare_unit[3])
        if known_unit:
            return text[: bare_unit.start()], known_unit
    words = _NUMBER_AND_WORDS.match(text)
    if words and not _NO_UNIT.search(words[1]):
        return text[: words.start(1)], unit
    rate = _RATE.search(text)
    is_product = rate and _VARIABLE.search(text, text.rfind("=") + 1, rate.start())
    if rate and not is_product and unit_of(rate[1]) and unit_of(rate[2]):
        return text[: rate.start()], f"{unit_of(rate[1])}/{unit_of(rate[2])}"
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
_COMMAND_NAMES = "sqrt|pi|sin|cos|tan|cot|sec|csc|ln|log"  # that plain text has without a backslash
_LIST_COMMA = re.compile(r"(?<=[0-9]),\s+(?=[0-9]{3}(?![0-9]))")  # "5, 125" is two numbers
_SPELLINGS = [
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(rf"\s*,?\s*(?:{TEXT}\{{\s*(?:and|or)\s*\}}|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*"), ","),
    (re.compile(rf"{TEXT}\{{([^{{}}]*)\}}"), r" \1 "),
    (re.compile(rf"(?<![\\A-Za-z])({_COMMAND_NAMES})(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<=[0-9A-Za-z)}])\*\*(?=[-0-9A-Za-z({])"), "^"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\bigcup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])"), r"\\cup "),
    (re.compile(r"\{:\}|\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\{([0-9A-Za-z]+)\s*\\choose\s*([0-9A-Za-z]+)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\begin\s*\{array\}\s*\{[^{}]*\}"), r"\\begin{matrix}"),
    (re.compile(r"\\end\s*\{array\}"), r"\\end{matrix}"),
    (re.compile(r"\\cr(?![A-Za-z])"), r"\\\\ "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z]|\\[a-z]+)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*([0-9A-Za-z]|\\pi)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\^\s*\{([0-9A-Za-z])\}(?![0-9])"), r"^\1"),
]


def normalize(latex: str) -> str:
    """`latex` in one spelling, without a unit; equal results mean equal answers."""
    return read_answer(latex).text


def read_answer(latex: str) -> Answer:
    """The answer that a text is; the text may have markup, an introduction and punctuation around it."""
    text = unwrap(_latex_of_signs(plain_characters(latex)))
    text = _BLANKS.sub(" ", text)  # the patterns below take cubic time of a run of blanks
    text = _GROUPS.sub("", _LAYOUT.sub("", text))
    text = _LATEX_SPACE.sub(" ", text).strip()
    text = _SCALE.sub(_scale_number, text, count=1)
    text = _words_as_time(text)
    text = _POWER_IN_TEXT.sub(r"\1{\2}^{\3\4}", text)
    words = _WORDS_IN_BRACKETS.search(text)
    if words and not _NO_UNIT.search(words[1]):
        text = text[: words.start()]
    text = _LIST_COMMA.sub(";", text)
    sign = _PERCENT.search(text)
    if sign:
        text = text[: sign.start()]
    text, unit = _split_unit(text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _without_spaces(_strip_end(text))
    tree = tree_of(text) if _depth(text) <= MAX_DEPTH else text
    return Answer(text, tree, unit, bool(sign))


_HALVES_OF_DAY = (
    (re.compile(rf"\s*(?:{TEXT}\{{)?\s*o'clock\s*(?:\}}(?=\s*$))?", re.IGNORECASE), " "),
    (re.compile(rf"(?<=[0-9])\s*(?:{TEXT}\{{)?\s*in the morning\s*\}}?$", re.IGNORECASE), " a.m."),
    (
        re.compile(rf"(?<=[0-9])\s*(?:{TEXT}\{{)?\s*(?:in the (?:afternoon|evening)|at night)\s*\}}?$", re.IGNORECASE),
        " p.m.",
    ),
)


def _words_as_time(text: str) -> str:
    """The text with "8 o'clock in the evening" as "8 p.m."."""
    for pattern, spelling in _HALVES_OF_DAY:
        text = pattern.sub(spelling, text)
    return text.strip()


def _depth(text: str) -> int:
    """How many brackets are open at a time, at most."""
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _scale_number(match: re.Match[str]) -> str:
    """The number that "1.5 million" is."""
    number = number_of(match[1].replace(",", ""))
    if number is None:
        return match[0]
    return str(number * _SCALES[match[2].lower()])


def _without_spaces(text: str) -> str:
    """The text with no space but those between two digits, and between a command and a letter."""

    def shorten(space: re.Match[str]) -> str:
        before, after = text[space.start() - 1 : space.start()], text[space.end() : space.end() + 1]
        if before.isdigit() and after.isdigit():
            return " "
        command = re.search(r"\\[A-Za-z]+$", text[max(0, space.start() - 20) : space.start()])
        return " " if command and after.isalpha() else ""

    return re.sub(r"\s+", shorten, text)


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
        whole, decimals, period = repeating.groups()
        tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(decimals)
        return Fraction(int(whole or 0)) + Fraction(int(decimals or 0), 10 ** len(decimals)) + tail
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
_ALL_REALS = re.compile(r"\\(?:mathbb|Bbb) ?\{?R\}?|\\R|ℝ|allrealnumbers", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\{([pbB]?|small)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_BETWEEN = re.compile(r"([^<>=]+?)(<|\\le(?![a-z])) ?([A-Za-z])(<|\\le(?![a-z]))([^<>=]+)")
_DESCENDING = re.compile(r"([^<>=]+?)(>|\\ge(?![a-z])) ?([A-Za-z])(>|\\ge(?![a-z]))([^<>=]+)")
_ONE_SIDED = re.compile(r"[A-Za-z](<|>|\\le(?![a-z])|\\ge(?![a-z]))([^<>=]+)")
_BOUND_FIRST = re.compile(r"([^<>=A-Za-z]+)(<|>|\\le(?![a-z])|\\ge(?![a-z])) ?([A-Za-z])")
_REVERSED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_SET_BUILDER = re.compile(r"\\?\{([A-Za-z])(?:\\in\\mathbb(?:\{R\}|R))?(?:\||:|\\mid ?)(.*)\\?\}")
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
    set_builder = _SET_BUILDER.fullmatch(text)
    if set_builder and set_builder[1] in set_builder[2]:
        return tree_of(set_builder[2])
    parts = list(_split(text, {",", ";"}))
    if len(parts) > 1:
        return [",", *_values(parts)]
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if _ALL_REALS.fullmatch(text):
        return ["()", r"-\infty", r"\infty"]
    name = _NAME.match(text)
    if name:
        plain_name = re.sub("[{}]", "", name[1])  # a_{n} is a_n
        return ["=", plain_name, tree_of(text[name.end() :].rpartition("=")[2])]
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
        lines = re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].replace(r"\hline", ""))
        rows = [line for line in lines if line.strip()]
        cells = [cell.strip() for row in rows for cell in row.split("&")]
        return [f"matrix {len(rows)}", *map(tree_of, cells)]
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
    if tokens[0] == "{" and (len(parts) < 2 or _THOUSANDS.fullmatch(inner)):  # a group, which LaTeX does not print
        return None
    return [kind, *parts]


def _inequality(text: str) -> Tree | None:
    """The interval that an inequality for one letter is."""
    between = _BETWEEN.fullmatch(text)
    if between:
        low, left, _, right, high = between.groups()
        opening = "(" if left == "<" else "["
        closing = ")" if right == "<" else "]"
        return [opening + closing, tree_of(low), tree_of(high)]
    descending = _DESCENDING.fullmatch(text)
    if descending:
        high, right, name, left, low = descending.groups()
        return _inequality(f"{low}{_REVERSED[left]} {name}{_REVERSED[right]}{high}")
    bound_first = _BOUND_FIRST.fullmatch(text)
    if bound_first:
        return _inequality(f"{bound_first[3]}{_REVERSED[bound_first[2]]}{bound_first[1]}")
    one_sided = _ONE_SIDED.fullmatch(text)
    if not one_sided:
        return None
    bound = tree_of(one_sided[2])
    return {
        "<": ["()", r"-\infty", bound],
        r"\le": ["(]", r"-\infty", bound],
        ">": ["()", bound, r"\infty"],
        r"\ge": ["[)", bound, r"\infty"],
    }[one_sided[1]]


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
    return _strip_end(text.removeprefix("+"))
