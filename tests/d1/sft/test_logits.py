"""The script that measures what chunks of logits save."""

from sft_logits_memory import main, make_parser


def test_memory_script_prints_its_table() -> None:
    table = main(make_parser().parse_args(["--length", "64", "--vocabulary", "500"]))
    assert "| all logits | 64 | 64 |" in table
    assert "| hidden answer tokens, in chunks | 16 | 16 |" in table
