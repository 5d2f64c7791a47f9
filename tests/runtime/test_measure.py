"""What the measurement of a thunk's bytes counts."""

from __future__ import annotations

import gc
from typing import Any

import torch

from memplan.devices.measure import peak_bytes

CPU = torch.device("cpu")


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
