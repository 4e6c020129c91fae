"""The README of a pocket base model, with what was measured while it was made."""

from __future__ import annotations

from collections.abc import Sequence

from pocket.recipes import RECIPES

CARD = """\
# Pocket base model

A masked diffusion language model with {parameters:,} parameters that {does}: a {attention} Llama
(`{field}`) trained from scratch with {loss} loss. It exists so that the whole of d1 can be run and checked on
a CPU, and for nothing else.

It was made by `python -m pocket.make_base {flags}--seed {seed}{block_flags}`: \
{tokens:.1f}M tokens in {minutes:.0f} minutes on one thread.
Another CPU or version of torch rounds differently and ends at other weights with the same behaviour.

| {measure}, greedy | length {lengths[0]} | length {lengths[1]} |
| --- | --- | --- |
| after stage 1, {steps[0]} steps on careful answers | {first[0]:.3f} | {first[1]:.3f} |
| after stage 2, {steps[1]} steps on mixed answers (this model) | {last[0]:.3f} | {last[1]:.3f} |

**What it could do before its last stage.** Stage 1 taught it to solve. Stage 2 then buried that skill under answers of
mixed quality, as text of the web is mixed: half {mixture} \
SFT and RL on this model recover and sharpen a skill that the mixture hid. They do not create it.

{about}"""
FULL = {"attention": "bidirectional", "field": "is_causal: false", "loss": "LLaDA's", "block_flags": ""}
BLOCKS = {
    "attention": "block-causal",
    "field": "block_size: {size}",
    "loss": "BD3-LM's",
    "block_flags": " --block_size {size} --output_dir pocket/block_{base}",
}
SUDOKU = {
    "does": "fills in 4x4 Sudoku grids",
    "measure": "exact-solve rate, {problems} validation puzzles",
    "flags": "",
    "mixture": """\
`quick` (the smallest digit missing from the row; a third of these
truncated, without tags or rambling), 30% `scan` (the smallest digit missing from the row and the column), 20%
`careful` (right).""",
    "about": """\
**Data.** Puzzles with six empty cells and one solution, drawn on the fly from the 200 solution grids of
`dataset/sudoku_train.csv`; the grids of the validation and test puzzles were never seen. The model was judged on
validation puzzles only.

**Text.** One token a cell and value (`c3`: the third cell in reading order holds 3; `c.`: it is empty). A prompt is 18
tokens; the chat template makes it of the 16 digits that end a user's message. An answer is
`<reasoning> careful a3 ... </reasoning> <answer> a3 b1 ... p4 </answer>`, 28 tokens with its `<eos>`. There is no
unknown token: text outside this vocabulary is an error. Completions of 28, 32 and 40 tokens were trained.
""",
}
COUNTDOWN = {
    "does": "plays Countdown with three numbers",
    "measure": "solve rate, {problems} validation problems",
    "flags": "--task countdown ",
    "mixture": """\
`quick` (the sum of all three numbers; a third of these truncated,
without tags or rambling), 30% `scan` (as near to the target as + and - come), 20% `careful` (right, by the
plainest way).""",
    "about": """\
**Data.** Three numbers from 1 to 20 and a target up to 60, in two steps with + - * of whole numbers from 0 to 60: the
problems of `dataset/pocket_countdown_train.jsonl`. Its 1,400 sets of numbers occur in neither validation nor test. The
model was judged on validation problems only. Stage 1 hid most of each answer (t from 0.6 to 1): where less is hidden,
the rest gives the answer away, and there is nothing to solve.

**Text.** One token a whole number. A prompt is 6 tokens, `<bos> 7 5 2 37 =>`, which the chat template makes of
"Numbers: [7, 5, 2]" and "Target: 37" at the end of a user's message. An answer is `<reasoning> careful 7 * 5 = 35 ;
35 + 2 = 37 </reasoning> <answer> ( 7 * 5 ) + 2 </answer>`, 24 tokens with its `<eos>`. There is no unknown token: text
outside this vocabulary is an error. Completions of 24, 28 and 32 tokens were trained.
""",
}
ARITHMETIC = {
    "does": "solves word problems of three steps",
    "measure": "solve rate, {problems} validation problems",
    "flags": "--task arithmetic ",
    "mixture": """\
`quick` (sums without carrying; a third of these truncated, without tags
or rambling), 30% `scan` (differences without borrowing), 20%
`careful` (right).""",
    "about": """\
**Data.** Problems drawn on the fly from the numbers of `dataset/arithmetic_train.jsonl`: a start of two digits and
three operands, in any order and with any signs that keep to two digits. No start occurs with the same operands in
validation or test. The model was judged on validation problems only.

**Text.** Words, and one token a digit (27 is `2` and `##7`). A prompt is 24 tokens: the problem that ends a user's
message. An answer is `<reasoning> careful 27 + 8 = 35 ; 35 * 2 = 70 ; 70 - 5 = 65 </reasoning> <answer> 65 </answer>`,
31 tokens with its `<eos>`. There is no unknown token: text outside this vocabulary is an error. Completions of 32, 36
and 40 tokens were trained.
""",
}
TEXTS = {"sudoku": SUDOKU, "countdown": COUNTDOWN, "arithmetic": ARITHMETIC}


def model_card(
    task: str,
    parameters: int,
    problems: int,
    tokens: int,
    seconds: float,
    accuracy: Sequence[dict[int, float]],
    steps: Sequence[int],
    seed: int,
    block_size: int | None = None,
) -> str:
    """The card; `accuracy[stage][length]` is the share of `problems` validation problems solved after a stage."""
    attention = BLOCKS if block_size else FULL
    texts = TEXTS[task] | {"measure": TEXTS[task]["measure"].format(problems=problems)}
    kind = {name: text.format(size=block_size, base=RECIPES[task].base) for name, text in attention.items()}
    return CARD.format(
        **texts,
        **kind,
        parameters=parameters,
        seed=seed,
        tokens=tokens / 1e6,
        minutes=seconds / 60,
        lengths=[*accuracy[0]],
        steps=steps,
        first=[*accuracy[0].values()],
        last=[*accuracy[1].values()],
    )
