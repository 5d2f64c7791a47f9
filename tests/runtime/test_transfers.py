"""Copies beside the step: in order, waited for, never lost, and gone when their arena is."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from memplan.runtime.copies import Direction, StreamCopies, ThreadCopies
from memplan.runtime.memory.arena import Arena

HOST = torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def copies() -> Iterator[ThreadCopies]:
    made = ThreadCopies()
    yield made
    made.close()


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("memplan copies")]


def _arena(sections: int, size: int) -> Arena:
    """Return an arena of this many blocks on the CPU, of `size` bytes each."""
    arena = Arena(size, *[torch.device("cpu")] * sections)
    for memory in arena.memories:
        memory.resize(size)
    return arena


def _slow(_: int) -> None:
    time.sleep(0.05)


def test_the_bytes_are_there_after_the_wait(copies: ThreadCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    clock = iter(range(100))

    def look_at_the_clock() -> int:
        gate.set()
        return next(clock)

    monkeypatch.setattr("memplan.runtime.copies.perf_counter", look_at_the_clock)  # by who has to wait
    copies.before = lambda _: gate.wait()
    source, host, back = torch.arange(1000.0), torch.zeros(1000), torch.zeros(1000)
    out, again = copies.copy(Direction.TO_HOST, HOST), copies.copy(Direction.TO_DEVICE, HOST)
    for run in (1, 2):
        for copy, destination, origin in ((out, host, source), (again, back, host)):
            gate.clear()
            copy.start(destination, origin)
            assert not destination.any()
            copy.wait()
            assert torch.equal(destination, source)
            assert copy.stalled == run
        host.zero_()
        back.zero_()


def test_directions_do_not_wait_for_each_other(copies: ThreadCopies) -> None:
    gate = threading.Event()
    copies.before = lambda nbytes: nbytes != 4 or gate.wait()
    held, free = copies.copy(Direction.TO_HOST, HOST), copies.copy(Direction.TO_DEVICE, HOST)
    target = torch.zeros(1)
    held.start(target, torch.ones(1))
    free.start(torch.empty(2), torch.ones(2))
    free.wait()
    assert not target.any()
    gate.set()
    held.wait()
    assert target.all()


def test_what_goes_wrong_is_raised_at_the_wait_and_forgotten(copies: ThreadCopies) -> None:
    def fail(_: int) -> None:
        raise OSError("no such link")

    copy = copies.copy(Direction.TO_HOST, HOST)
    target = torch.zeros(1)
    copies.before = fail
    copy.start(target, torch.ones(1))
    with pytest.raises(OSError, match="no such link"):
        copy.wait()
    copies.before = None
    copy.start(target, torch.ones(1))
    copy.wait()
    assert target.all()


def test_after_a_drain_nothing_is_under_way_and_a_wait_returns(copies: ThreadCopies) -> None:
    copies.before = _slow
    copy, target = copies.copy(Direction.TO_HOST, HOST), torch.zeros(1)
    for again in range(2):
        copy.start(target, torch.full((1,), again + 1.0))
        copies.drain()
        assert target == again + 1
    copy.wait()
    assert copy.stalled == 0


def test_an_arena_that_is_gone_leaves_no_thread() -> None:
    gc.collect()
    before = _threads()
    arena = Arena(64, torch.device("cpu"))
    host = arena.host(64)
    copy = arena.copies.copy(Direction.TO_HOST, host.memory)
    assert isinstance(arena.copies, ThreadCopies)
    arena.copies.before = _slow
    copy.start(host.memory, arena.memory)  # never waited for: the arena's bytes stay until it is done
    del arena, host, copy
    gc.collect()
    assert _threads() == before


@pytest.mark.parametrize("sections", [1, 2])
def test_an_arena_is_freed_after_its_copies(sections: int) -> None:
    size = 1 << 20
    arena = _arena(sections, size)
    host, source = arena.host(size), arena.memories[-1].memory.fill_(3)
    copy = arena.copies.copy(Direction.TO_HOST, host.memory)
    assert isinstance(arena.copies, ThreadCopies)
    arena.copies.before = _slow
    copy.start(host.memory, source)  # of a forward whose backward will not run
    arena.empty()
    assert bool((host.memory == 3).all())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_both_streams_wait_for_each_other() -> None:
    device = torch.device("cuda")
    arena = Arena(1 << 26, device)
    assert isinstance(arena.copies, StreamCopies)
    host = arena.host(1 << 26)
    assert host.memory.is_pinned()
    out = arena.copies.copy(Direction.TO_HOST, host.memory)
    back = arena.copies.copy(Direction.TO_DEVICE, host.memory)
    for value in (1, 2):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        arena.memory.fill_(value)
        out.start(host.memory, arena.memory)  # after the fill
        out.wait()
        arena.memory.fill_(0)  # after the copy
        back.start(arena.memory, host.memory)
        back.wait()
        assert bool((arena.memory == value).all())
    out.start(host.memory, arena.memory)
    arena.copies.drain()
    assert bool((host.memory == 2).all())
