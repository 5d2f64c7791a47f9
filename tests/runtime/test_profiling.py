"""Measured costs: every op and both directions, with nothing of the user's changed."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

import memplan
from benchmarks import zoo
from memplan.errors import InputMismatch, InvalidCosts
from memplan.evict.costs import signature_of
from memplan.runtime.api import profiling
from memplan.runtime.copies.copies import Direction, StreamCopies, StreamCopy
from memplan.runtime.memory.arena import Arena
from memplan.runtime.profiling import op_timer
from memplan.trace import trace


def test_P1_every_op_is_timed() -> None:  # noqa: N802
    model, inputs = zoo.resnet("nano")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    costs = memplan.profile(model, inputs, rounds=2)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    graph = trace(model, inputs).graph
    ours = [
        op
        for op in graph.ops
        if all(graph.storages[s].planned or s not in graph.written(op) for s in graph.touched(op))
    ]
    assert len(ours) > 50
    assert {signature_of(graph, op) for op in ours} <= set(costs.measured)
    assert all(seconds > 0 for seconds in costs.measured.values())
    assert costs.to_host.bytes_per_second > 1e6
    assert costs.to_device.latency < 1


def test_measured_costs_go_where_costs_go() -> None:
    model, inputs = zoo.gpt2("nano")
    costs = memplan.profile(model, inputs, rounds=1)
    plan = memplan.plan(model, inputs, arena_budget=0.7, gradients="outside", costs=costs)
    assert plan.eviction is not None
    assert plan.eviction.costs == costs.name
    assert plan.eviction.seconds >= plan.eviction.base_seconds > 0


class _Device:
    """A device that runs what is launched one after another, in virtual seconds; a cycle takes a nanosecond."""

    def __init__(self) -> None:
        self.host = self.free = 0.0  # now, and when all that was launched is complete
        self.held: list[int] = []

    def hold_busy(self, device: torch.device, cycles: int) -> bool:
        self.held.append(cycles)
        self.run(cycles * 1e-9)
        return True

    def run(self, seconds: float, *, launch: float = 0.0) -> None:
        self.host += launch
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def new_event(self, device: torch.device, *, timed: bool) -> _Event:
        return _Event(self)


class _Event:
    def __init__(self, device: _Device) -> None:
        self.device = device
        self.at = 0.0

    def query(self) -> bool:
        return self.at <= self.device.host

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def _record(event: _Event, device: torch.device) -> None:
    event.at = max(event.device.free, event.device.host)


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> _Device:
    """A simulated device instead of an accelerator."""
    made = _Device()
    monkeypatch.setattr(profiling, "new_event", made.new_event)
    monkeypatch.setattr(profiling, "hold_busy", made.hold_busy)
    monkeypatch.setattr(profiling, "record", _record)
    return made


def test_a_launch_that_takes_longer_than_the_device_is_busy_is_hidden_by_a_longer_wait(virtual: _Device) -> None:
    clock = profiling.DeviceClock(torch.device("meta"))

    def kernels() -> None:
        for _ in range(3):
            virtual.run(10e-6, launch=400e-6)

    assert clock(kernels) == pytest.approx(30e-6)
    assert virtual.held == [200_000 * 2**k for k in range(4)], "until 1.6 ms hide the 1.2 ms of the launches"
    assert clock(kernels) == pytest.approx(30e-6)
    assert virtual.held[4:] == virtual.held[3:4], "the wait that was long enough is tried first"


def test_an_op_that_blocks_the_host_is_timed_with_its_launch(virtual: _Device) -> None:
    clock = profiling.DeviceClock(torch.device("meta"))

    def blocks() -> None:
        virtual.run(10e-6, launch=50e-6)
        virtual.wait()
        virtual.run(10e-6, launch=50e-6)

    assert clock(blocks) == pytest.approx(20e-6 + 100e-6)
    tried = len(virtual.held)
    assert max(virtual.held) == profiling._LONGEST
    clock(blocks)
    assert len(virtual.held) == tried, "nothing is waited for in vain again"


def test_bad_input() -> None:
    model, inputs = zoo.mlp("nano")
    with pytest.raises(InvalidCosts, match="rounds"):
        memplan.profile(model, inputs, rounds=0)
    with pytest.raises(InputMismatch, match="has no data"):
        memplan.profile(model.to("meta"), inputs)


def test_memory_of_trial_copies_is_not_kept_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's copies keep the host memory that they use alive, and torch keeps what is free for later."""
    hosts: list[weakref.ref[Any]] = []
    emptied: list[bool] = []
    copies = StreamCopies(torch.device("cpu"))
    copy = copies.copy

    def kept(direction: Direction, host: torch.Tensor) -> StreamCopy:
        storage: Any = host.untyped_storage()
        hosts.append(weakref.ref(storage))
        return copy(direction, host)

    monkeypatch.setattr(copies, "copy", kept)
    monkeypatch.setattr(StreamCopy, "start", lambda self, destination, source: destination.copy_(source))
    monkeypatch.setattr(StreamCopy, "wait", lambda self: None)
    monkeypatch.setattr("memplan.devices.host_memory.is_accelerator", lambda device: True)
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: emptied.append(any(ref() is not None for ref in hosts))
    )
    arena = Arena(1 << 13, torch.device("cpu"))
    arena.copies = copies
    assert len(op_timer.probe(arena, Direction.TO_HOST)) > 1
    assert len(hosts) == 2
    assert emptied == [False], "after nothing refers to it"
