"""The tokenizers of the pocket models, which `make_base.py` saves with them.

Sudoku: one token per cell and value of a 4x4 grid ("a3": cell a holds 3, "c.": cell c is empty; cells a to p in reading
order), because a small model cannot tell from rotary positions alone which cell a plain digit belongs to.
Programs: one token per letter of f(x); it names the example, the index in f(x) and the letter ("y0d").
Products: one token per digit, as in arithmetic, and the marks of calls and results of the format `plain`.
Countdown: one token per whole number from 0 to 60. Arithmetic: words, and one token per digit; "27" is "2" and "##7",
so that numbers are decoded without spaces.
The chat template builds the prompt from the end of a task's usual question: <bos>, the problem, "=>".
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import Sequence as InTurn
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from d1.tasks import programs
from d1.tasks.arithmetic import PEOPLE, THINGS, TIMES, VERBS
from d1.tasks.pocket_countdown import LARGEST

CELLS = "abcdefghijklmnop"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
WORDS = ["=>", "careful", "scan", "quick", "hmm"]
CALLS = ["<call>", "</call>", "<result>", "</result>"]
SIGNS = ["+", "-", "*", "/", "=", ";", "(", ")"]

SUDOKU_PROMPT = """\
{%- set puzzle = message['content'].strip()[-16:] -%}
{%- if puzzle | length != 16 -%}
{{ raise_exception('the pocket model reads a 4x4 Sudoku: end the user message with 16 digits 0-4, got ' ~ puzzle) }}
{%- endif -%}
{{ bos_token }}
{%- for digit in puzzle -%}
{%- if digit not in '01234' -%}
{{ raise_exception('the pocket model reads a 4x4 Sudoku: end the user message with 16 digits 0-4, got ' ~ puzzle) }}
{%- endif -%}
{{ ' ' ~ 'CELLS'[loop.index0] ~ ('.' if digit == '0' else digit) }}
{%- endfor -%}
{{ ' =>' }}
""".replace("CELLS", CELLS)
COUNTDOWN_PROMPT = """\
{%- set problem = message['content'].strip().split('Numbers: [')[-1] -%}
{%- set parts = problem.split(']\\nTarget: ') -%}
{%- if parts | length != 2 or parts[0].split(',') | length != 3 -%}
{{ raise_exception('the pocket model reads Countdown: end the user message with "Numbers: [7, 5, 2]" and on the next '
   ~ 'line "Target: 37", got ' ~ problem) }}
{%- endif -%}
{{ bos_token ~ ' ' ~ parts[0].replace(',', ' ') ~ ' ' ~ parts[1] ~ ' =>' }}
"""
ARITHMETIC_PROMPT = """\
{{ bos_token ~ ' ' ~ message['content'].strip().split('\\n')[-1] ~ ' =>' }}
"""
ORDINALS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUMBERED_PROMPT = """\
{%- set parts = message['content'].strip().split('\\n')[-1].split('. ') -%}
{{ bos_token ~ ' ' ~ parts[0] }}
{%- for part in parts[1:] -%}
{{ ' ' ~ 'ORDINALS'.split()[loop.index0] ~ ' ' ~ part }}
{%- endfor -%}
{{ ' =>' }}
""".replace("ORDINALS", " ".join(ORDINALS))
PRODUCTS_PROMPT = """\
{%- if '<result>' in message['content'] -%}
{{ ' ' ~ message['content'] ~ ' =>' }}
{%- else -%}
{{ bos_token ~ ' ' ~ message['content'].strip().split('\\n')[-1] ~ ' =>' }}
{%- endif -%}
"""
PROGRAMS_PROMPT = """\
{%- set lines = message['content'].strip().split('\\n')[-2:] -%}
{%- if lines | length != 2 or lines[0][:14] != "f('abcde') = '" or lines[1][:14] != "f('edcba') = '" -%}
{{ raise_exception('the pocket model reads two examples: end the user message with the lines '
   ~ "f('abcde') = 'daacb' and f('edcba') = 'beecd', got " ~ lines) }}
{%- endif -%}
{{ bos_token }}
{%- for i in range(5) -%}{{ ' y' ~ i ~ lines[0][14 + i] }}{%- endfor -%}
{%- for i in range(5) -%}{{ ' z' ~ i ~ lines[1][14 + i] }}{%- endfor -%}
{{ ' =>' }}
"""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
PROMPT
{%- elif message['role'] == 'assistant' -%}
{{ ' ' ~ message['content'].strip() ~ eos_token }}
{%- else -%}
{{ raise_exception('the pocket model takes user and assistant messages only, got ' ~ message['role']) }}
{%- endif -%}
{%- endfor -%}
"""


VERB_WORDS = [*sum(VERBS.values(), ()), *TIMES.values()]
ARITHMETIC_WORDS = [
    *(*SIGNS, "has", "them", "How", "many", ".", "?", *PEOPLE, *sorted({*PEOPLE.values()}), *THINGS),
    *(*VERB_WORDS, *"0123456789", *(f"##{digit}" for digit in range(10))),
]
# By task in d1's TASKS: the tokenizer's model, its words, the prompt, and a pattern for texts that are always a token.
TOKENIZERS: dict[str, tuple[type[WordLevel | WordPiece], list[str], str, str]] = {
    "sudoku": (WordLevel, [cell + value for cell in CELLS for value in ".1234"], SUDOKU_PROMPT, ""),
    "pocket_countdown": (WordLevel, [*SIGNS, *map(str, range(LARGEST + 1))], COUNTDOWN_PROMPT, "|=>|[-+*/=;()]"),
    "arithmetic": (WordPiece, ARITHMETIC_WORDS, ARITHMETIC_PROMPT, "|=>|[-+*/=;().?]"),
    "numbered_arithmetic": (WordPiece, [*ARITHMETIC_WORDS, *ORDINALS], NUMBERED_PROMPT, "|=>|[-+*/=;().?]"),
    "products": (
        WordPiece,
        [*SIGNS, *CALLS, *"0123456789", *(f"##{digit}" for digit in range(10))],
        PRODUCTS_PROMPT,
        "|</?(call|result)>|=>|[-+*/=;()]",
    ),
    "programs": (
        WordLevel,
        [
            *(f"{name}{index}{letter}" for name in "yz" for index in range(programs.LETTERS) for letter in "abcde"),
            *(f"y[{i}]=x[{index}]" for i in range(programs.LETTERS) for index in range(programs.LETTERS)),
            *("+", *(f"x[{index}]" for index in range(programs.LETTERS))),
        ],
        PROGRAMS_PROMPT,
        "",
    ),
}


def build_tokenizer(task: str = "sudoku") -> PreTrainedTokenizerFast:
    """The tokenizer of a task in d1's TASKS. It has no unknown token: text outside the vocabulary raises an error."""
    model, words, prompt, alone = TOKENIZERS[task]
    backend = Tokenizer(model({token: i for i, token in enumerate([*SPECIAL.values(), *TAGS, *WORDS, *words])}))
    if model is WordPiece:
        backend.decoder = decoders.WordPiece(cleanup=False)
    backend.pre_tokenizer = InTurn([WhitespaceSplit(), Split(Regex("</?(reasoning|answer)>" + alone), "isolated")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE.replace("PROMPT\n", prompt),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )
