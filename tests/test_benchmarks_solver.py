"""The instances of the offset solver's benchmarks, and its table of large traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import solver_traces
from benchmarks.instances import LIVES
from benchmarks.solver_traces import graphs, of_nodes, read

pytestmark = pytest.mark.slow

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
