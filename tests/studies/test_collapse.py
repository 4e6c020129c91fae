"""The study of collapses: its arms are settings of RL, and its tests are those that the protocol names."""

import pytest

from d1.rl.train import make_parser
from pocket.recipes import ROOT
from studies.collapse import report
from studies.collapse.run import ARMS, STAGES, flags_of, runs


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_what_the_protocol_says(arm, tmp_path):
    places = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), "--model_path", str(ROOT), "--output_dir"]
    flags = flags_of(arm, 80, 2e-4, ["--max_steps", 96])
    args, _ = make_parser().parse_args_and_config([*places, str(tmp_path), *flags])
    sampling, merged, exact = args.sampling_settings(), arm in ("exact", "P8", "C8"), arm[-1] in "+wG"
    assert args.estimator == ("places" if exact else "replay")
    assert args.objective == ("clipped_places" if exact else "clipped_views")
    assert sampling.cache == ("prefix" if arm.startswith("C") else None)
    assert (sampling.rule, sampling.level) == ((None, 0.0) if arm == "exact" else ("threshold", 0.95))
    assert args.loss_type == ("views" if merged else "sum")
    assert not merged or args.segment_steps == 8
    assert arm not in ("P", "C") or args.segment_steps == 1
    assert (sampling.noise > 0) == (arm == "G")
    assert (args.trajectory_weight_cap is not None) == (arm == "C+w")
    assert args.num_iterations == 1


def test_collapses_are_counted_and_compared_as_registered():
    """13 against 3 of 20 is beyond chance after Holm's correction over seven tests, 6 against 1 is not."""
    bad = {"P8": 13, "P": 3, "C8": 6, "C": 1}
    lines = []
    for run in runs("test"):
        solved = 413 - (run["seed"] - 80 < bad.get(run["arm"], 0))  # of 512: 80.7% or 80.5%
        lines.append({"arm": run["arm"], "error": None, "right": "1" * solved + "0" * (512 - solved)})
    assert len(lines) == 160
    assert report.collapsed({"error": "not finite", "right": "1" * 512})
    rows = [row.split("|")[1:-1] for row in report.verdicts(lines).splitlines()[2:]]
    found = {tuple(cell.strip() for cell in row[:3]): float(row[3]) for row in rows}
    assert found["merging", "P: 3", "P8: 13"] == pytest.approx(7 * 0.00154, rel=0.05)
    assert found["merging, with a cache", "C: 1", "C8: 6"] > 0.05
    assert {(what, few, many) for what, few, many in report.TESTS} == {
        (what, few.split(":")[0], many.split(":")[0]) for what, few, many in found
    }
    assert {run["seed"] for run in runs("logs")} == {*range(40, 60)}
    assert not {*STAGES["rates"].seeds} & {*STAGES["test"].seeds}
