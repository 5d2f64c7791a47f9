"""What the measurement of a thunk's bytes counts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.devices.measure import peak_bytes

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12 say so of any profile


def test_garbage_of_others_does_not_lower_what_a_thunk_is_seen_to_allocate() -> None:
    """A cycle with a tensor waits for the collector, which would run while the next thunk makes many objects."""

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.empty(1 << 20, dtype=torch.uint8)]
        cycle.append(cycle)

    def allocate() -> None:
        made = [[i] for i in range(10_000)]  # containers, whose number triggers the collector
        kept = torch.empty(1000, dtype=torch.uint8)
        del made, kept

    try:
        assert peak_bytes([leave_garbage, allocate], CPU) == [1 << 20, 1000]
        assert gc.isenabled()
    finally:
        gc.collect()


def test_a_model_that_is_compiled_under_a_profiler_has_a_plan_without_measured_temporaries() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.rand(2, 3, 8, 8)
    with torch.profiler.profile() as profiler:
        beside = memplan.compile(model, x)
        torch.ones(10)
    assert beside.plan.temporaries is None
    assert torch.equal(beside(x), model(x))
    assert "aten::ones" in [event.name for event in profiler.events()]
