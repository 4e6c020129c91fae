"""Make the pocket model's tokenizer: python pocket/make_tokenizer.py --output_dir pocket/base

One token a cell and value of a 4x4 Sudoku ("a3": cell a holds 3, "c.": cell c is empty; cells a to p in reading
order), because rotary positions alone hide from a small model which cell a bare digit stands in.
The chat template turns the 16 digits that end a user's message into those tokens, so that the task's usual question
is a prompt of 18 tokens: <bos>, the 16 cells, "=>".
"""

from __future__ import annotations

import argparse

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from d1.runs.entry import run_script

CELLS = "abcdefghijklmnop"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
PROMPT_TOKENS = 18  # <bos>, 16 cells, =>
WORDS = ["=>", "careful", "scan", "quick", "hmm"]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
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
{%- elif message['role'] == 'assistant' -%}
{{ ' ' ~ message['content'].strip() ~ eos_token }}
{%- else -%}
{{ raise_exception('the pocket model takes user and assistant messages only, got ' ~ message['role']) }}
{%- endif -%}
{%- endfor -%}
""".replace("CELLS", CELLS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer. It has no unknown token: text outside the vocabulary is an error, never a silent loss."""
    cells = [cell + value for cell in CELLS for value in ".1234"]
    vocab = {token: i for i, token in enumerate([*SPECIAL.values(), *TAGS, *WORDS, *cells])}
    backend = Tokenizer(WordLevel(vocab))
    backend.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("</?(reasoning|answer)>"), "isolated")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="pocket/base", help="folder the tokenizer files are written to")
    return parser


def main(args: argparse.Namespace) -> None:
    build_tokenizer().save_pretrained(args.output_dir)


if __name__ == "__main__":
    run_script("make_tokenizer.py", lambda: main(make_parser().parse_args()))
