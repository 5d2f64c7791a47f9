"""Steps on a simulated device whose streams run their work as late, as early, or in as odd an order as they may."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.preloaded import start
from memplan.core.host_limit import host_memory
from tests.device.late import build, missing_compiler
from tests.device.scenarios import SCENARIOS
from tests.kernel_cache import CACHE
from tests.slow import slow

ROOT = Path(__file__).parents[2]
MISSING = missing_compiler()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="session")
def library() -> Path:
    return build(CACHE / "late_device")  # that of all checkouts


def _run(library: Path, name: str, folder: Path, seeds: int = 1) -> tuple[int | None, str]:
    """Run a scenario in a process of its own; returns its exit status and what it wrote."""
    log = folder / "scenario.log"
    process = start("tests.device.scenarios", [str(library), name, str(seeds)], log=log, folder=ROOT)
    process.join(300)
    process.kill()
    process.join()
    return process.exitcode, log.read_text(errors="replace")


_LONG = ("vit", "resnet", "llama", "larger gpt2", *(f"{n}, generated" for n in ("gpt2", "llama", "vit")))


@pytest.mark.parametrize("seeds", [1, slow(4)])
@pytest.mark.parametrize("name", [slow(n) if n.endswith(_LONG) else n for n in SCENARIOS if n != "host reads"])
def test_every_order_of_queued_work_gives_the_bits_of_eager(
    library: Path, name: str, seeds: int, tmp_path: Path
) -> None:
    status, said = _run(library, name, tmp_path, seeds)
    assert status == 0, said[-2000:]
    found: dict[str, Any] = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
    assert not found.pop("wrong", [])
    assert found.pop("tasks") > 80
    if name == "resident":
        assert found.pop("seen without settling"), "results must be there when the caller gets them"
        # Two inputs and the gradient of the loss, which the caller allocated, in each of two steps:
        assert {found[key] for key in found} == {6}, "results on the host are pinned"
    if name == "measured":  # each task of the device takes a millisecond
        (shown, given), (seconds, predicted) = found["costs"], found["seconds"]
        assert shown.startswith("measured on"), "on an accelerator, evictions are decided by measured costs"
        assert given == "a100", "costs that the user gives are taken"
        assert seconds > 1e-2 > predicted
    if name.startswith("larger"):
        for budget, (on_device, held, reloads, pinned) in found.items():
            assert on_device < held, f"{budget}: parameters and optimizer state alone are larger"
            assert reloads > 0
            assert pinned == (host_memory() or 0) // 4
    if name == "left on the host":
        assert found["evictions"]
    if name == "streams":
        assert found["seen without the order"], "steps that share an arena must wait for each other"
    if name == "updates on the host":
        assert found.pop("seen without the order"), "an update waits for its gradient"
        assert found.pop("None") > 0
        assert found.pop("min") > 0
    if name == "dropped":
        assert all(found.values()), "bytes that a stream still uses must not be given away"
        assert found, "each record_stream was left out in turn"
    if name.startswith("mutations"):
        assert found["seen"] == found["racy"], "the check calls racy exactly what can change results"
        assert len(found["racy"]) >= 10
        assert len(found["racy"]) < found["left out"], "some waits order nothing"
    if name == "mutations of two devices":
        assert found["between devices"]
        assert {"settle 0", "settle 1"} <= set(found["seen"])


def test_the_host_cannot_read_the_memory_of_the_device(library: Path, tmp_path: Path) -> None:
    status, said = _run(library, "host reads", tmp_path)
    assert status == -signal.SIGSEGV
    assert "reads" in said.splitlines()
