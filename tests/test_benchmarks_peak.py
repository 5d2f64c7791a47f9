"""`benchmarks.peak` measures what was allocated, and says which promises a row breaks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.peak import main
from benchmarks.peak_measure import Step, live_bytes, peak_growth

MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so of any profile


def _step(run: Callable[[], object]) -> Step:
    return Step(run=run, clear=lambda: None)


@pytest.fixture(autouse=True)
def _what_earlier_tests_left_is_collected() -> None:
    """Collect garbage several times: finalizers of what is freed leave more."""
    for _ in range(3):
        gc.collect()


def test_the_peak_by_events_is_of_what_is_alive_at_once() -> None:
    def run() -> None:
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first, second
        torch.empty(4 * MIB, dtype=torch.uint8)

    assert peak_growth(_step(run)) == 5 * MIB


def test_live_bytes_count_storages_once_and_views_not_at_all() -> None:
    before = live_bytes()
    whole = torch.empty(MIB, dtype=torch.uint8)
    pieces = [whole[: MIB // 2], whole[MIB // 4 :]]
    inner = torch._C._construct_storage_from_data_pointer(whole.data_ptr() + 64, torch.device("cpu"), 128)
    within = torch.empty(0, dtype=torch.uint8).set_(inner)
    assert live_bytes() - before == MIB
    del whole, pieces, within
    assert live_bytes() == before


@pytest.mark.slow
def test_the_command_line_writes_a_table(tmp_path: Path) -> None:
    arguments = ["--models", "mlp", "--size", "nano", "--contenders", "eager,memplan", "--rounds", "1"]
    assert main([*arguments, "--directory", str(tmp_path)]) == 0
    eager, planned = json.loads((tmp_path / "peak-nano.json").read_text())["rows"]
    assert eager["ratio"] == eager["resident_ratio"] == 1
    assert eager["total_mb"] is None
    assert planned["peak_mb"] == pytest.approx(planned["total_mb"], rel=0.003)
    assert planned["standing_mb"] > eager["standing_mb"]  # the arena
