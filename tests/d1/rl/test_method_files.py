"""Each published method is one file: what it has, what it needs, and which parts of two papers combine."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from d1.rl.methods import METHODS, MODULES, SHOWN_PAIRS, Method, papers_of_parts
from d1.rl.tables import TABLE_OF, TABLES, find_method, remove_method_file
from tests.d1.rl.test_checks import config, refusal

ROOT = Path(__file__).resolve().parents[3]
OWNERS = {kind: papers_of_parts(table) for kind, table in TABLE_OF.items()}


def test_every_file_of_the_folder_is_a_method_or_what_methods_share():
    files = {path.stem for path in (ROOT / "d1" / "rl" / "methods").glob("*.py")}
    assert files - {"__init__", "entry", "shared"} == {name.replace("-", "_") for name in MODULES}
    for name, module in MODULES.items():
        assert METHODS[name] is module.METHOD
        assert Path(module.__file__).stem == name.replace("-", "_")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_uses_the_parts_of_its_own_file(name):
    """So a part is where a reader looks for it; TraceRL's penalty is used by its own METHOD, too."""
    for kind, table in TABLE_OF.items():
        for part in getattr(MODULES[name], table, {}):
            assert METHODS[name].values[kind] == part
            assert TABLES[table][part] is getattr(MODULES[name], table)[part]


def test_the_table_of_methods_needs_no_torch():
    code = "import sys; from d1.rl.methods import METHODS, parts_of_papers; assert parts_of_papers('OBJECTIVES')"
    code += "; assert not {'torch', 'transformers', 'trl'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_parts_of_two_papers_are_refused_in_one_line():
    for change, belong in (
        (
            {"method": "rldf", "advantage": "signed_softmax"},
            ("states belongs to rldf", "signed_softmax belongs to wd1"),
        ),
        (
            {"method": "espo", "estimator": "coupled"},
            ("coupled belongs to coupled-grpo", "k2_sequence belongs to espo"),
        ),
        ({"method": "egspo", "kl": "k3_to_old"}, ("clipped_steps belongs to egspo", "k3_to_old belongs to tracerl")),
    ):
        said = refusal(**change)
        assert all(part in said for part in belong), said
        assert "no study or test has both: replace one of them" in said
        assert "\n" not in said


def test_shared_parts_shown_pairs_and_penalties_without_weight_combine():
    assert config(method="wd1", estimator="coupled", p_mask_prompt=0.0, advantage="trl").estimator == "coupled"
    assert config(method="espo", estimator="coupled", beta=0.0).estimator == "coupled"  # its penalty has no weight
    assert [set(pair) for pair in SHOWN_PAIRS] == [{"segments", "k3_to_old"}]
    assert (
        config(estimator="segments", objective="clipped_views", loss_type="views", kl="k3_to_old", num_iterations=2).kl
        == "k3_to_old"
    )


def test_every_pair_of_a_published_method_is_one_that_may_combine():
    for method in METHODS.values():
        parts = [(kind, method.values[kind]) for kind in OWNERS]
        for first, second in combinations(parts, 2):
            owners = {OWNERS[kind][part] for kind, part in (first, second) if part in OWNERS[kind]}
            assert len(owners) < 2 or method in (METHODS["stable-drl"], METHODS["unigrpo"])


def test_an_edited_file_runs_again_and_files_of_one_name_are_told_apart(tmp_path):
    text = "from d1.rl import Advantage\n\nMETHOD = {'num_iterations': ITERATIONS, 'advantage': 'NAME'}\n"
    text += "ADVANTAGES = {'NAME': Advantage(lambda inputs: inputs)}\n"
    files = []
    for folder, name in (("first", "one"), ("second", "two")):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "mine.py")
        files[-1].write_text(text.replace("NAME", name).replace("ITERATIONS", "2"))
    before = {table: dict(entries) for table, entries in TABLES.items()}
    try:
        for file, name in zip(files, ("one", "two"), strict=True):
            assert config(method=str(file)).advantage == name
        entry = TABLES["ADVANTAGES"]["one"]
        assert config(method=str(files[0])).num_iterations == 2
        assert TABLES["ADVANTAGES"]["one"] is entry  # it did not run again
        files[0].write_text(text.replace("NAME", "other").replace("ITERATIONS", "4"))
        assert config(method=str(files[0])).num_iterations == 4
        assert "one" not in TABLES["ADVANTAGES"]
    finally:
        for file in files:
            remove_method_file(file.resolve())
    assert before == TABLES


def test_a_method_cannot_be_assigned_later():
    settings = config(method="d1")
    settings.method = "wd1"
    with pytest.raises(
        ValueError, match=r"method was set to wd1 after the values of d1 .* DiffuGRPOConfig\(method='wd1'"
    ):
        settings.check_method()


def test_a_file_of_ones_own_combines_with_the_parts_of_one_paper(tmp_path):
    """A copy of a published file, with another name for its part, works like the original."""
    own = tmp_path / "own_wd1.py"
    text = (ROOT / "d1" / "rl" / "methods" / "wd1.py").read_text()
    own.write_text(text.replace('"signed_softmax"', '"own_softmax"'))
    assert isinstance(find_method(str(own)), Method)
    assert config(method=str(own)).advantage == "own_softmax"
    assert config(method=str(own), estimator="coupled", p_mask_prompt=0.0).estimator == "coupled"
    mixed = tmp_path / "own_mixed.py"
    mixed.write_text('METHOD = {"estimator": "coupled", "p_mask_prompt": 0.0, "advantage": "floored"}\n')
    assert "coupled belongs to coupled-grpo and --advantage floored belongs to rldf" in refusal(method=str(mixed))
    del TABLES["ADVANTAGES"]["own_softmax"]
