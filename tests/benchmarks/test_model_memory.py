"""docs/models.md's table of memory is what `d1 fit` says of the released shapes."""

from benchmarks.model_memory import BEGIN, END, PAGE, SHAPES, STAGES, config_of, total_bytes
from d1.models.fit import GB, total_and_active
from d1.models.kinds import block_size


def test_the_documents_table_is_that_of_the_shapes():
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == [*SHAPES]
    for name, total, active, *sizes in rows:
        config = config_of(SHAPES[name])
        found = [number / GB for number in total_and_active(config)]
        assert [total, active] == [f"{found[0]:.2f}", f"{found[1]:.2f}" if found[1] < found[0] else ""]
        assert float(total) * 2 < float(sizes[0]) + 1  # GB of bf16 weights, rounded
        if name == "SDAR-1.7B":
            assert block_size(config) == 4
            assert sizes == [f"{total_bytes(config, stage) / GB:.0f}" for stage in STAGES.values()]
