"""Tests of what numba compiles for the first plan under a budget, where nothing was compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

_FIRST_PLAN = """
import torch
from numba.core import event
import memplan
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto
from tests.evict.judge import workload_of

layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(6)]
graph = memplan.plan(torch.nn.Sequential(*layers), torch.ones(64, 8)).graph
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
workload = workload_of(graph)
auto(workload.within(int(0.8 * measure(workload, workload.plain).peak)))
for _, e in compiled.buffer:
    if e.is_start:
        function = e.data["dispatcher"].py_func
        print(f"{function.__module__}.{function.__qualname__}")
"""


def test_a_first_plan_compiles_few_functions_each_for_one_kind_of_arguments(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _FIRST_PLAN]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    compiled = Counter(done.stdout.split())
    own = [times for name, times in compiled.items() if name.startswith("memplan.evict.")]
    assert len(own) > 3
    assert max(own) == 1, compiled
    assert compiled.total() - sum(own) <= 10, compiled  # numpy's functions, anew for each dtype
