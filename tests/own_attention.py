"""A user's own attention: block-causal, limited to the tokens within a window.

    python tests/own_attention.py --config diffu-grpo/pocket.yaml --model_path FOLDER ...

trains a checkpoint of the kind below. A model that it saves stores the attention's name: the row must be there when the
model is loaded again.
"""

from d1.models.attention import ATTENTION, Attention
from d1.models.kinds import KINDS, Kind


def window_within_blocks(config, query, key):
    """Tokens that are not in a later block and at most `window` positions away."""
    return (key // config.block_size <= query // config.block_size) & ((query - key).abs() <= config.window)


ATTENTION["window-within-blocks"] = Attention(window_within_blocks, fields=("block_size", "window"))
KINDS["own_window"] = Kind(becomes="llama", attention="window-within-blocks", block_size=4)

if __name__ == "__main__":
    from d1.rl.train import main, make_parser

    main(*make_parser().parse_args_and_config())
