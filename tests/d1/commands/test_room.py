"""A canvas that leaves a model no room for a prompt is refused at the start, before its weights are read."""

import shutil

import pytest

from d1.__main__ import main, make_parser
from tests.commands import ROOT

POCKET = ROOT / "pocket" / "base"  # 256 positions
COMMANDS = [["serve", "MODEL"], ["chat", "MODEL"], ["watch", "--prompt", "0000000000000000", "--model_path", "MODEL"]]
COMMANDS += [["fill", "MODEL", "a1 [MASK:300]"]]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_it_is_refused_before_the_weights_are_read(tmp_path, words):
    folder = tmp_path / "model"
    shutil.copytree(POCKET, folder)
    (folder / "model.safetensors").unlink()
    words = [str(folder) if word == "MODEL" else word for word in words]
    more = [] if words[0] == "fill" else ["--gen_length", "300"]
    said = "too long: 1 tokens of text and 300 to fill in exceed the model's 256 positions" + ": lower --g" * bool(more)
    with pytest.raises(ValueError, match=said):
        main(make_parser().parse_args([*words, *more]))
