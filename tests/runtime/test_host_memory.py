"""The host's memory of a step: pages that are locked exactly, limits of control groups, parameters in files."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import memplan
from memplan.core.host_limit import host_memory
from memplan.devices import host_memory as host
from memplan.devices.host_memory import HostResults, host_bytes, in_files, pin
from memplan.errors import BudgetInfeasible

CUDA, PAGE = torch.device("cuda"), 4096


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes that are locked, by address, of a CUDA runtime that is not there; it locks nothing above 8 MiB."""
    found: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        return 2 if nbytes > 8 << 20 else int(found.setdefault(address, nbytes) != nbytes)

    def unregister(address: int) -> int:
        return int(found.pop(address) == 3 * PAGE + host.LARGE)  # such pages it does not unlock

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    return found


@pytest.mark.parametrize("nbytes", [host.LARGE, 5 * PAGE * 13 + 1, 999_999])
def test_large_requests_lock_their_own_bytes_and_no_more(nbytes: int, locked: dict[int, int]) -> None:
    made = host_bytes(nbytes, CUDA)
    view = made[PAGE:]
    assert locked == {made.data_ptr(): nbytes}
    assert made.data_ptr() % PAGE == 0
    del made
    gc.collect()
    view.fill_(7)
    assert len(locked) == 1, "a view keeps the bytes"
    del view
    assert not locked


def test_pages_that_stay_locked_stay_mapped(locked: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[mmap.mmap] = []
    monkeypatch.setattr(host, "_STILL_LOCKED", kept)
    for extra in (2, 3):
        host_bytes(extra * PAGE + host.LARGE, CUDA)
    assert [len(pages) for pages in kept] == [3 * PAGE + host.LARGE]


def test_what_cuda_does_not_lock_and_small_requests_are_torchs(
    locked: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = torch.empty, list[int]()

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        asked.append(nbytes)
        return real(nbytes, dtype=dtype)

    def zeros(size: int, *, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")  # the last error, which a launch raises and resets

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", zeros)
    for nbytes in (host.LARGE - 1, 9 << 20):
        assert host_bytes(nbytes, CUDA).nbytes == nbytes
    assert (asked, locked) == ([host.LARGE - 1, 9 << 20], {})
    monkeypatch.setattr(host, "LARGE", 1)
    host_bytes(PAGE, CUDA)
    assert len(asked) == 2


def test_bytes_of_results_that_are_gone_serve_the_next_ones(locked: dict[int, int]) -> None:
    results = HostResults(CUDA)
    layout = ((300, 200), (1, 300), torch.float32)
    one = results.empty(*layout)
    assert (one.shape, one.stride(), one.dtype) == layout
    kept, address = one[3:], one.data_ptr()
    del one
    two = results.empty(*layout)
    assert two.data_ptr() != address, "somebody may still read the first"
    del kept
    three = results.empty(*layout)
    assert three.data_ptr() == address
    assert len(locked) == 2
    del results, three
    assert two.data_ptr() in locked, "a result outlives what made it"
    del two
    assert not locked


def test_bytes_of_results_of_other_sizes_are_given_back(locked: dict[int, int]) -> None:
    results = HostResults(CUDA)
    for rows in range(300, 310):
        results.empty((rows, 200), (200, 1), torch.float32)
    assert list(locked.values()) == [309 * 200 * 4]


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "12345\n"}, 12345),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "777\n"}, 777),
        ("5:cpu:/a\n4:memory:/a\n0::/\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "999"}, 999),
        ("4:memory:/docker/x\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "888"}, 888),
        ("5:cpu:/a\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "999"}, None),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (None, {}, None),
    ],
)
def test_limits_of_control_groups_hold(
    groups: str | None, limits: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in ({} if groups is None else {"proc/self/cgroup": groups} | limits).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = host_memory(tmp_path / "nothing")
    assert machine is not None
    assert host_memory(tmp_path) == (machine if expected is None else expected)


def test_what_an_optimizers_own_step_needs_is_counted_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step() -> Any:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        optimizer = torch.optim.Adagrad(model.parameters(), foreach=False)
        return memplan.compile_step(model, optimizer, lambda y: y.square().mean(), torch.randn(4, 256), device="cpu")

    def at_most(nbytes: int) -> None:
        monkeypatch.setattr("memplan.runtime.builder.host_memory", lambda: nbytes)

    plan = step().plan
    state = 4 * (257 * 256 + 257 * 8)
    assert plan.reserve == 0, "it is not on the device"
    assert plan.eviction.updating >= state
    assert plan.on_host > 3 * state, "parameters, their gradients, and state"
    at_most(plan.on_host - 1)
    with pytest.raises(BudgetInfeasible, match="of the host's memory"):
        step()
    at_most(plan.on_host)
    step()


# -- files ------------------------------------------------------------------------------------------------------------

WIDE, LAYERS = 1024, 8


def _stored(path: Path, kind: str) -> nn.Module:
    """Return a model of 32 MiB whose parameters lie in a file."""
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    if kind == "safetensors":
        save_file(model.state_dict(), path)
        state = load_file(path)
    else:
        torch.save(model.state_dict(), path)
        state = torch.load(path, mmap=True)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    model.load_state_dict(state, assign=True)
    return model


def _resident(path: Path, line: str) -> int:
    """Return a figure of /proc/self/smaps of the pages of a file, bytes."""
    found, inside = 0, False
    for text in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = text.split()
        if not name.endswith(":"):
            inside = bool(rest) and rest[-1] == str(path)
        elif inside and name == f"{line}:":
            found += int(rest[0]) << 10
    return found


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")


@needs_smaps
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_parameters_in_a_file_are_not_read_to_be_planned_nor_copied_to_run(kind: str, tmp_path: Path) -> None:
    path, x = tmp_path / kind, torch.randn(4, WIDE)
    model, whole = _stored(path, kind), 4 * WIDE * WIDE * LAYERS
    memplan.plan(model, x, train=False, device="cpu", budget="min")
    optimizer = torch.optim.AdamW(model.parameters())
    memplan.plan_step(model, optimizer, lambda y: y.square().mean(), x, device="cpu", budget="min")
    assert _resident(path, "Rss") < whole // 8
    places = [p.data_ptr() for p in model.parameters()]
    compiled = memplan.compile(model, x, train=False, device="cpu", budget="min")
    with torch.no_grad():
        found, expected = compiled(x), model(x)
    assert torch.equal(found, expected)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert _resident(path, "Rss") >= whole, "they were read there"
    assert _resident(path, "Anonymous") == 0, "and nowhere else"


@needs_smaps
def test_parameters_in_a_file_are_moved_once_they_are_to_be_written(tmp_path: Path, locked: dict[int, int]) -> None:
    """Tensors that an accelerator's step writes are locked; frozen parameters in files and shared memory stay."""
    own, shared = _stored(tmp_path / "own", "safetensors"), nn.Linear(WIDE, 8).share_memory()
    tensors = [*own.parameters(), *shared.parameters()]
    found = in_files(tensors)
    assert found == {p.data_ptr(): p.nbytes < WIDE * WIDE for p in tensors}
    assert not in_files([torch.empty(1 << 20)])
    stay = {p.data_ptr() for p in tensors[1:]}
    expected = [p.detach().clone() for p in tensors]
    pin(tensors, CUDA, stay)
    assert all(map(torch.equal, tensors, expected))
    assert [p.data_ptr() in stay for p in tensors] == [False] + [True] * (len(tensors) - 1)
    assert locked == {tensors[0].data_ptr(): 4 * WIDE * WIDE}


@needs_smaps
def test_the_host_needs_no_room_for_what_lies_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, x = tmp_path / "model", torch.randn(4, WIDE)
    model, whole = _stored(path, "safetensors"), 4 * WIDE * WIDE * LAYERS
    monkeypatch.setattr("memplan.runtime.builder.host_memory", lambda: whole // 2)
    plan = memplan.compile(model, x, train=False, device="cpu", budget="min").plan
    assert plan.on_host > whole
    for p in model.parameters():
        p.data = p.data.clone()
    with pytest.raises(BudgetInfeasible, match="of the host's memory"):
        memplan.compile(model, x, train=False, device="cpu", budget="min")
    model = _stored(path, "safetensors")
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    with pytest.raises(BudgetInfeasible, match="of the host's memory"):  # updated parameters take memory of their own
        memplan.compile_step(model, optimizer, lambda y: y.square().mean(), x, device="cpu", budget="min")
