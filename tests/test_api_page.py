"""docs/api.md is correct: its snippets run in order, and its statements about their results are true."""

from __future__ import annotations

import re

import torch

from d1.models import load_model
from tests.commands import ROOT

PIECES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)


def test_the_pages_pieces_run_in_order(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "pocket").symlink_to(ROOT / "pocket")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    seen = []
    for number, piece in enumerate(PIECES):
        exec(compile(piece, f"docs/api.md, piece {number + 1}", "exec"), names)
        seen.append(capsys.readouterr().out)
    sampled, watched, scored, evaluated, tuned, reinforced = seen
    assert re.fullmatch(r"\['<reasoning> .*</answer>', '<reasoning> .*</answer>'\]\n", sampled)
    assert [line.partition(":")[0] for line in watched.splitlines()] == [f"pass {number}" for number in range(1, 17)]
    assert "pass 16: 0 still hidden" in watched
    one_step, given_half = names["one_step"].sum(1), names["given_half"].sum(1)
    assert torch.all(given_half > one_step), scored  # half of the tokens are visible, so the rest is more certain
    assert evaluated == "25.0% of 16 puzzles solved, 95% interval [10.2, 49.5]\n"
    assert 0 < float(tuned.splitlines()[-1]) < 10
    (rewards,) = re.findall(r"\[[\d., ]+\]", reinforced)
    assert len(rewards) > 2
    trained = load_model("runs/api/model").state_dict()
    before = load_model("pocket/base").state_dict()
    assert all(not torch.equal(trained[name], before[name]) for name in before)
