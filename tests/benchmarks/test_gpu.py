"""Every part of the benchmark of one GPU, with small shapes on a CPU."""

import re

import pytest
import torch

from benchmarks import gpu

NEEDS_A_GPU = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "flash_attention_2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the small shapes are for CPUs")
@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_prints_its_table(part, capsys):
    torch._dynamo.reset()
    gpu.main(gpu.make_parser().parse_args(["--tiny", "--parts", part]))
    lines = capsys.readouterr().out.splitlines()
    assert f"| {part} | ms | host ms | peak | tokens/s |" in lines
    rows = [line for line in lines if line.startswith("| ") and not line.startswith((f"| {part} |", "| --- |"))]
    measured = [line for line in rows if re.match(r"\| .+ \| \d+\.\d\d \| \d+\.\d\d \|", line)]
    failed = [line for line in rows if "Error" in line]
    assert len(measured) >= 2
    assert all(any(kernel in line for kernel in NEEDS_A_GPU) for line in failed), failed


def test_no_measurement_starts_after_the_limit(capsys):
    with pytest.raises(ValueError, match="there is no GPU here: add --tiny"):
        gpu.main(gpu.make_parser().parse_args([]))
    gpu.main(gpu.make_parser().parse_args(["--tiny", "--minutes", "1e-9", "--parts", "flash", "head"]))
    assert capsys.readouterr().out.splitlines()[-1] == "Left out, after 1e-09 minutes: flash; head"


def test_a_part_that_ends_in_an_error_does_not_stop_the_next(monkeypatch, capsys):
    def fail(bench):
        bench.rows.append(["first", "1.00", "1.00", "", ""])
        raise MemoryError

    monkeypatch.setitem(gpu.PARTS, "pass", fail)
    monkeypatch.setitem(gpu.PARTS, "head", lambda bench: bench.rows.append(["second", "2.00", "2.00", "", ""]))
    gpu.main(gpu.make_parser().parse_args(["--tiny", "--parts", "pass", "head"]))
    out = capsys.readouterr().out
    assert out.index("| first |") < out.index("| ended in MemoryError |") < out.index("| second |")
