"""A user's own additions: a reveal rule and a model kind, and RL with them.

    python tests/own_additions.py --sampler parallel --reveal half ...

Every table of the library is a dictionary; a row added before `main` is called works like any other name.
"""

from d1.models.formats.released import key_mapping
from d1.models.kinds import DECODER_LORA, KINDS, Kind
from d1.rl.train import main, make_parser
from d1.sampling.reveal import RULES, Rule


def half(logps, entropies, level):
    """A share `level` of the tokens that are still hidden."""
    return (logps.isfinite().sum(-1) * level).ceil().long()


RULES["half"] = Rule(half, 0.5)
KINDS["own"] = Kind(becomes="llama", names=key_mapping((("net", "model"), ("out", "lm_head"))), lora=DECODER_LORA)

if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
