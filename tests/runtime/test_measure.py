"""What the measurement of a thunk's bytes counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
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


def _kernels() -> list[Callable[[], None]]:
    image, weight, out = torch.rand(2, 3, 8, 8), torch.rand(5, 3, 3, 3), torch.empty(2, 3, 8, 8)
    calls = [partial(torch.conv2d, image, weight), partial(torch.neg, image, out=out), partial(torch.softmax, image, 1)]
    return [partial(_run, call) for call in calls]


def _run(call: Callable[[], object]) -> None:
    call()


def test_beside_the_users_profiler_the_same_bytes_are_measured_and_its_session_goes_on() -> None:
    alone = peak_bytes(_kernels(), CPU)
    with torch.profiler.profile(profile_memory=True) as profiler:
        torch.ones(10)
        beside = peak_bytes(_kernels(), CPU)
        torch.ones(20)
    assert beside == alone
    assert [n > 0 for n in alone] == [True, False, True]
    names = [event.name for event in profiler.events()]
    assert names.count("aten::ones") == 2
    assert "aten::conv2d" not in names


def test_a_model_that_is_compiled_under_a_profiler_has_the_plan_that_it_has_without() -> None:
    def plan() -> memplan.Plan:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        return memplan.compile(model, torch.rand(2, 3, 8, 8)).plan

    alone = plan()
    with torch.profiler.profile():
        beside = plan()
    assert alone.temporaries is not None
    assert any(alone.temporaries)
    assert beside.temporaries == alone.temporaries
    assert beside.total == alone.total
