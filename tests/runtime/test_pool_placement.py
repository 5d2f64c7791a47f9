"""Large fallback results at their planned address: who may, the allocator's two C functions, and the way back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.planning.options import PlanOptions
from memplan.recording.allocator import host_backing
from memplan.recording.places import LEAST, PlaceAllocator, PlannedPlace, places, segment
from memplan.runtime.kernels import pool_placement
from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm
from memplan.runtime.kernels.pool_placement import placing
from memplan.trace import plan

MB = 1 << 20


class Convolutions(nn.Module):
    """Its convolutions are fallbacks of 16 MiB, its norm one of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.two(self.one(x).relu()).relu()[:, :1]).square().mean()
        return loss


@cache
def _plan() -> Plan:
    options = PlanOptions(schedule="traced", solver="greedy")
    with torch.device("meta"):
        return plan(Convolutions(), torch.empty(2, 1, 1024, 512), options=options)


def test_only_what_has_its_whole_segment_to_itself_has_a_place() -> None:
    made = _plan()
    graph = made.placed
    found = places(made)
    assert found
    for index, place in found.items():
        op = graph.ops[index]
        assert not op.direct
        assert place.nbytes >= LEAST
        step = made.schedule.order.index(index)
        name = graph.storages[graph.values[place.value].storage].name
        assert graph.values[place.value].storage not in {graph.values[v].storage for v in op.reads}
        end = place.offset + segment(place.nbytes)
        assert end <= made.arena_size
        for b in made.problem.alive_at(step):
            low = made.solution.offsets[b.id]
            assert b.id == name or low + b.size <= place.offset or end <= low, "neither inputs nor neighbours"
    small = replace(made, graph=replace(made.graph, ops=tuple(replace(op, direct=True) for op in made.graph.ops)))
    assert not places(small)


def test_ops_that_run_one_after_another_share_the_memory_of_their_other_results() -> None:
    freed: list[int] = []
    host = host_backing()

    def release(address: int) -> int:
        freed.append(address)
        return host.release(address)

    word, number = ctypes.c_size_t, ctypes.c_int
    backing = replace(host, release=ctypes.CFUNCTYPE(number, word)(release))
    exchange = ctypes.CFUNCTYPE(number, word)(lambda mode: 0)
    allocator = PlaceAllocator(backing, exchange, 0, 0)
    allocate = ctypes.CFUNCTYPE(word, word, number, word)(allocator.pointers[0])
    release_one = ctypes.CFUNCTYPE(None, word, word, number, word)(allocator.pointers[1])
    asked: list[list[int]] = []
    for alone in (True, True, False, True):
        with allocator.expecting(1 << 40, 11 * MB, alone=alone):
            assert allocate(12 * MB, 0, 0) == 1 << 40
            asked.append([allocate(nbytes, 0, 0) for nbytes in (2 * MB, 2 * MB, 20 * MB)])
    assert asked[0] == asked[1] == asked[3], "scratch of one size after another, the same for each op"
    assert len({*asked[0], *asked[2]}) == 6, "not shared by what is used later, nor within an op"
    assert allocator.scratch == 24 * MB
    for address in asked[0]:
        release_one(address, 2 * MB, 0, 0)
    assert not freed, "other pools have it too"
    for address in asked[2]:
        release_one(address, 2 * MB, 0, 0)
    assert freed == asked[2]
    allocator.close()
    assert sorted(freed) == sorted({*asked[0], *asked[2]})
    assert allocator.scratch == 0


def test_a_segment_is_what_the_caching_allocator_asks_for() -> None:
    assert [segment(n) for n in (LEAST, LEAST + 1, 11 * MB, 12 * MB)] == [10 * MB, 12 * MB, 12 * MB, 12 * MB]


def test_the_address_is_handed_out_once_for_the_expected_size() -> None:
    libc = ctypes.CDLL(None)
    exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(lambda mode: 0)
    del libc
    arena = torch.empty(64 * MB, dtype=torch.uint8)
    low = arena.data_ptr()
    allocator = PlaceAllocator(host_backing(), exchange, low, low + arena.nbytes)
    word = ctypes.c_size_t
    allocate = ctypes.CFUNCTYPE(word, word, ctypes.c_int, word)(allocator.pointers[0])
    release = ctypes.CFUNCTYPE(None, word, word, ctypes.c_int, word)(allocator.pointers[1])
    with allocator.expecting(low + 512, 11 * MB):
        workspace = allocate(2 * MB, 0, 0)
        assert not low <= workspace < low + arena.nbytes, "another size is forwarded"
        assert allocate(12 * MB, 0, 0) == low + 512
        second = allocate(12 * MB, 0, 0)
        assert not low <= second < low + arena.nbytes, "and so is the second of that size"
    release(low + 512, 12 * MB, 0, 0)  # the arena's: nothing happens
    arena.fill_(1)
    with allocator.expecting(low, 11 * MB):
        pass
    late = allocate(12 * MB, 0, 0)
    assert not low <= late < low + arena.nbytes, "nothing is expected any more"
    for pointer in (workspace, second, late):
        release(pointer, 0, 0, 0)


def test_each_pool_has_an_allocator_of_its_own_and_is_gone_before_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch notes an address once for an allocator, and two results may be at one; without a device: what is made."""
    made: list[tuple[object, tuple[int, int]]] = []
    gone: list[str] = []

    class Pool:
        def __init__(self, allocator: object, *, no_split: bool) -> None:
            assert no_split
            self.allocator = allocator

        def __del__(self) -> None:
            gone.append("pool")

    def allocator_of(*pointers: int) -> object:
        made.append((object(), (pointers[0], pointers[1])))
        return made[-1][0]

    close = PlaceAllocator.close

    def closed(allocator: PlaceAllocator) -> None:
        gone.append("memory")
        close(allocator)

    exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(lambda mode: 0)
    runtime = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", allocator_of, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext())
    monkeypatch.setattr(pool_placement, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(pool_placement, "cuda_backing", lambda library: host_backing())
    monkeypatch.setattr(PlaceAllocator, "close", closed)
    placer = pool_placement.PoolPlacer(torch.device("cpu"), 1 << 40, 1 << 41)
    for _ in range(2):
        with placer.at(1 << 40, 11 * MB, alone=True):
            pass
    assert [pool.allocator for pool in placer.pools] == [one for one, _ in made]
    assert made[0][0] is not made[1][0]
    assert made[0][1] == made[1][1], "the same functions, which know what is expected where"
    del placer
    gc.collect()
    assert gone == ["pool", "pool", "memory"]


class Here:
    """As a pool: what is made inside `at` lies there, if the kernel of the test asks."""

    def __init__(self) -> None:
        self.address = 0
        self.alone: list[bool] = []

    @contextmanager
    def at(self, address: int, nbytes: int, *, alone: bool) -> Iterator[None]:
        self.address = address
        self.alone.append(alone)
        yield
        self.address = 0


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("cooperates", [True, False])
def test_a_result_that_is_there_is_not_copied(cooperates: bool, several: bool) -> None:
    """With a stand-in for a kernel that makes its result where the pool is told to, or elsewhere."""
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + 512, memory.device, 4096)
    target = torch.empty(0).set_(storage, 0, (32, 32), (32, 1))
    placer = Here()

    def kernel(x: torch.Tensor) -> Any:
        result = x + 1
        if cooperates:
            there: Any = torch._C._construct_storage_from_data_pointer(placer.address, memory.device, 4096)
            result = torch.empty(0).set_(there, 0, (32, 32), (32, 1)).copy_(result)
        return (x, result) if several else result

    outs = (3, 7) if several else (7,)
    bound = BoundOp(form=CallForm.FUNCTIONAL, function=kernel, args=(), kwargs={}, outs=outs, returns_sequence=several)
    other = replace(bound, function=torch.abs)
    placed = placing((other, bound), {1: PlannedPlace(7, 512, 4096)}, {"v7": target}, placer, copied={7})
    assert placed[0] is other
    results = placed[1].function(torch.ones(32, 32))
    result = results[-1] if several else results
    assert torch.equal(result, torch.full((32, 32), 2.0))
    assert (result is target) is cooperates, "copying it onto itself does nothing"
    assert not placer.address, "nothing is expected outside of the call"
    assert placer.alone == [not several], "the other result is used as it is"
