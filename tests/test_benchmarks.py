"""Tests what the benchmarks compute from their measurements, and the tables that they write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import fits, solver_traces
from benchmarks.full_size import row as step_memory_row
from benchmarks.instances import LIVES
from benchmarks.runtime import main
from benchmarks.solver_traces import graphs, of_nodes, read
from benchmarks.zoo import ZOO

pytestmark = pytest.mark.slow


def test_the_command_line_writes_a_table_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--rounds", "2", "--threads", "1", "--directory", str(tmp_path), "--keep", str(tmp_path / "lines")]
    assert main(["--models", "mlp", *options]) == 0
    assert set(ZOO) >= {"mlp"}
    table = (tmp_path / "runtime.md").read_text()
    assert table.startswith("# Runtime")
    monkeypatch.setattr("benchmarks.runtime.measure", None)  # another measurement would fail
    assert main(["--models", "mlp", *options]) == 0
    assert (tmp_path / "runtime.md").read_text() == table
    with pytest.raises(SystemExit, match="made by other sources"):
        main(["--models", "mlp", *options, "--rounds", "3"])


def test_a_whole_step_is_compared_with_eagers_peak() -> None:
    found = step_memory_row("mlp", ZOO["mlp"]("nano"))
    bound, live, peak = (float(str(found[key])) for key in ("bound_ratio", "max_live_ratio", "ratio"))
    assert 0 < bound <= live <= peak < 1
    assert found["ratio"] == pytest.approx(float(str(found["peak_mb"])) / float(str(found["eager_mb"])))


def test_what_fits_predicts_is_what_training_takes() -> None:
    found = fits.measured_apart("mlp", "nano", "memplan")
    # `compile` may make an idle arena smaller for less than the 5 % from which `fits` counts on it
    assert 0 <= found["predicted"] - found["measured"] <= 0.05 * found["measured"]


# A graph in the contest's format: a node that lives for no step there is alive at one here.
NODES = {"intervals": [[0, 4], [2, 2], [4, 6]], "usages": [[7], [3, 9, 5], [1, 2]]}


def test_a_graph_of_iopddl_is_a_buffer_for_each_node(tmp_path: Path) -> None:
    content = json.dumps({"problem": {"name": "x", "nodes": NODES, "edges": {}, "usage_limit": 9}}).encode()
    (tmp_path / "asplos-2025-iopddl-Q.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "R.json").write_bytes(content)
    assert [name for name, _ in graphs(tmp_path)] == ["R", "Q"]
    for _, path in graphs(tmp_path):
        problem = read(path)
        assert [(b.live.start, b.live.end, b.size) for b in problem.buffers] == [(0, 5, 8), (2, 3, 10), (4, 7, 3)]
        assert problem.max_live == 18
    assert [b.size for b in of_nodes(NODES, usage="smallest").buffers] == [8, 4, 2]


def test_the_table_of_traces_has_the_solver_beside_plain_heuristics(tmp_path: Path) -> None:
    assert solver_traces.main(["--sizes", "300", "--seconds", "0", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "solver-traces.json").read_text())["rows"]
    assert [row["instance"] for row in rows] == [f"{lives}-0" for lives in LIVES]
    for row in rows:
        assert 0 <= row["default"] <= row["greedy"]
        assert row["proven"] == (row["default"] == 0)
