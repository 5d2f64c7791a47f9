"""Tests of what numba compiles for the first plan under a budget, where nothing was compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

_FIRST_PLAN = """
from numba.core import event
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto
from tests.evict.judge import workload_of
from tests.samples import deep_graph

compiled = event.RecordingListener()
event.register("numba:compile", compiled)
workload = workload_of(deep_graph())
auto(workload.within(int(0.8 * measure(workload, workload.plain).peak)))
for _, e in compiled.buffer:
    if e.is_start:
        function = e.data["dispatcher"].py_func
        print(f"{function.__module__}.{function.__qualname__}")
"""


def test_a_first_plan_compiles_few_functions_each_for_one_kind_of_arguments(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0"}  # unoptimised code is soon made
    command = [sys.executable, "-c", _FIRST_PLAN]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    compiled = Counter(done.stdout.split())
    own = [times for name, times in compiled.items() if name.startswith("memplan.evict.")]
    assert len(own) > 3
    assert max(own) == 1, compiled
    assert compiled.total() - sum(own) <= 10, compiled  # numpy's functions, anew for each dtype
