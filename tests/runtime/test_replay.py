"""Recorded allocations, and their replay through the C functions of PyTorch's allocator hook, on the host's memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.core.validate import validate
from memplan.errors import UnsupportedCall
from memplan.recording.allocator import Allocator, Backing
from memplan.runtime.recorded import Recording, recording_of
from tests.cli.helpers import python
from tests.runtime.backing import counted, host_backing

# (size, 0): allocate; (0, i): release the i-th of those that are alive, as far as there is one
Action = tuple[int, int]


@cache
def _allocator() -> Allocator:
    return Allocator(host_backing())  # compiling it takes seconds; like the process's own, it is there for good


@dataclass
class Program:
    """Allocates and releases through the C functions as PyTorch would, and checks what it gets."""

    alive: list[tuple[int, int]] = field(default_factory=list)  # (address, size)
    given: list[int] = field(default_factory=list)

    def run(self, actions: Sequence[Action], stream: int = 0) -> None:
        made = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t)
        allocate = made(_allocator().pointers[0])
        for size, which in actions:
            if not size:
                if self.alive:
                    self.release(which % len(self.alive), stream)
                continue
            address = allocate(size, 0, stream)
            assert address
            assert all(address + size <= a or a + s <= address for a, s in self.alive), "memory is given out once"
            ctypes.memset(address, 0x5A, size)
            self.alive.append((address, size))
            self.given.append(address)

    def release(self, index: int, stream: int = 0) -> None:
        made = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t)
        address, size = self.alive.pop(index)
        made(_allocator().pointers[1])(address, size, 0, stream)

    def release_all(self) -> None:
        while self.alive:
            self.release(0)


def _record(actions: Sequence[Action], *, hold: bool = False) -> Recording:
    program = Program()
    _allocator().start_recording()
    program.run(actions)
    if not hold:
        program.release_all()
    events = _allocator().stop_recording()
    program.release_all()
    return recording_of(events, 512, _allocator(), solver="greedy")


def _replay(recording: Recording, actions: Sequence[Action], *, late: bool = False) -> Program:
    program = Program()
    with recording.replay():
        program.run(actions)
        if not late:
            program.release_all()
    program.release_all()
    return program


actions = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 500, 512, 3000, 70_000, 1 << 21]), st.integers(0, 7)), max_size=40
)


@given(actions)
def test_the_same_step_lies_where_it_was_planned(steps: list[Action]) -> None:
    recording = _record(steps)
    for count in (1, 2):
        program = _replay(recording, steps)
        assert counted(_allocator(), "STEPS") == count
        first = program.given[0] - recording.tape.offsets[0] if program.given else 0
        assert [address - first for address in program.given] == list(recording.tape.offsets)
        assert all(0 <= o < max(recording.arena_size, 1) for o in recording.tape.offsets)
    assert counted(_allocator(), "LIVE") == 0


@given(actions, actions, st.booleans(), st.booleans())
def test_no_other_step_ever_gets_memory_that_is_in_use(
    steps: list[Action], others: list[Action], late: bool, hold: bool
) -> None:
    """`Program` looks at every address: whatever differs, sizes, order or releases, nothing is given out twice."""
    recording = _record(steps, hold=hold)
    for one in (others, steps + others, steps[: len(steps) // 2] + others, steps):
        _replay(recording, one, late=late)
        assert counted(_allocator(), "LIVE") == 0
    assert _replay(recording, steps).given or not any(size for size, _ in steps)


def test_what_outlives_the_step_gets_memory_of_its_own() -> None:
    steps: list[Action] = [(4096, 0), (8192, 0), (0, 0)]
    recording = _record(steps, hold=True)
    assert recording.kept == 8192
    assert recording.tape.offsets == (0, -1)
    program = Program()
    with recording.replay():
        program.run(steps)
    kept = program.given[1]
    with recording.replay():  # as the parameters' gradients do, it is alive while the next step runs
        program.run([(4096, 0), (8192, 0), (0, 1)])
    assert counted(_allocator(), "STEPS") == 2
    assert program.given[1] == kept
    assert program.given[3] != kept
    program.release_all()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([(4096, 0), (0, 0), (9000, 0)], "allocation 1 asks for 9000 bytes, recorded were 8192"),
        ([(4096, 0), (8192, 0)], "allocation 1 would overwrite"),
        ([(4096, 0), (0, 0), (8192, 0), (0, 0), (1, 0)], "allocation 2 comes after the last"),
        ([(4096, 0)], "stopped before allocation 1 of 2"),
    ],
)
def test_the_first_difference_is_logged_once(other: list[Action], why: str, caplog: pytest.LogCaptureFixture) -> None:
    steps: list[Action] = [(4096, 0), (0, 0), (8192, 0), (0, 0)]
    recording = _record(steps)
    assert recording.tape.offsets == (0, 0)
    with caplog.at_level(logging.WARNING, "memplan"):
        for _ in range(3):
            _replay(recording, other)
        assert _replay(recording, steps).given[0] == _replay(recording, steps).given[1]
    assert len(caplog.records) == 1
    assert why in caplog.text
    assert (_allocator().differences, counted(_allocator(), "STEPS")) == (3, 2)


def test_released_memory_serves_the_next_of_its_stream() -> None:
    program = Program()
    program.run([(5000, 0), (0, 0), (5100, 0)], stream=8)
    assert program.given[0] == program.given[1]
    program.run([(5000, 0)], stream=16)
    program.release(0, stream=8)
    program.run([(5000, 0)], stream=16)
    assert len({*program.given[1:]}) == 3, "another stream may still be at work there"
    assert counted(_allocator(), "CACHED") >= 5000
    program.release_all()


def _on_two_streams(first: int, second: int) -> tuple[Program, Recording]:
    """A recording in which one stream releases bytes, and the next allocation is on another."""
    program = Program()
    _allocator().start_recording()
    for stream in (first, second, first):
        program.run([(4096, 0)], stream)
        program.release(0, stream)
    recording = recording_of(_allocator().stop_recording(), 512, _allocator(), solver="greedy")
    return program, recording


def test_two_streams_share_no_bytes_of_the_arena() -> None:
    _, recording = _on_two_streams(8, 16)
    assert recording.tape.offsets == (0, 4096, 0)
    assert recording.arena_size == 8192 > recording.max_live == 4096
    validate(recording.problem, recording.solution)
    program = Program()
    with recording.replay():
        for stream in (8, 16, 8):
            program.run([(4096, 0)], stream)
            program.release(0, stream)
    assert counted(_allocator(), "STEPS") == 1
    assert program.given[0] == program.given[2] != program.given[1]
    assert _on_two_streams(8, 8)[1].arena_size == 4096


def test_another_stream_than_when_recorded_gets_no_bytes_of_the_arena(caplog: pytest.LogCaptureFixture) -> None:
    """The stream that had the bytes may still read them when another one gets them."""
    _, recording = _on_two_streams(8, 8)
    program = Program()
    with caplog.at_level(logging.WARNING, "memplan"), recording.replay():
        for stream in (8, 16):
            program.run([(4096, 0)], stream)
            program.release(0, stream)
    assert program.given[0] != program.given[1]
    assert "allocation 1 is of another stream" in caplog.text


def test_out_of_memory_is_told_and_never_an_address_of_zero(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torch uses whatever address it gets: memory beside the device serves, and without that the process ends."""
    host, left, calls = host_backing(), {"device": 1, "beside": 1}, list[str]()

    def from_device(place: int, size: int) -> int:
        left["device"] -= 1
        return 2 if left["device"] < 0 else host.allocate(place, size)

    def beside(place: int, size: int, flags: int) -> int:
        left["beside"] -= 1
        return 2 if left["beside"] < 0 else host.allocate(place, size)

    def called(what: str) -> int:
        calls.append(what)
        return 0

    word, number = ctypes.c_size_t, ctypes.c_int
    backing = Backing(
        allocate=ctypes.CFUNCTYPE(number, word, word)(from_device),
        release=host.release,
        spill=ctypes.CFUNCTYPE(number, word, word, ctypes.c_uint)(beside),
        clear_error=ctypes.CFUNCTYPE(number)(partial(called, "cleared")),
        give_up=ctypes.CFUNCTYPE(number)(partial(called, "gave up")),
    )
    allocator = Allocator(backing)
    allocate = ctypes.CFUNCTYPE(word, word, number, word)(allocator.pointers[0])
    release = ctypes.CFUNCTYPE(None, word, word, number, word)(allocator.pointers[1])
    allocator.start_recording()
    inside, outside = allocate(4096, 0, 8), allocate(8192, 0, 8)
    assert inside
    assert outside
    release(inside, 4096, 0, 8)
    recording = recording_of(allocator.stop_recording(), 512, allocator)
    assert calls == ["cleared"], "or the next check of a kernel would report it"
    left["device"] = 1  # the arena
    with caplog.at_level(logging.WARNING, "memplan"), recording.replay():
        release(allocate(4096, 0, 8), 4096, 0, 8)
    assert "out of memory; 8.00 KiB are in managed memory" in caplog.text
    assert allocator.take_spilled() == 0
    left.update(device=0, beside=0)
    assert allocate(1 << 20, 0, 8) == 0
    assert calls[-2:] == ["cleared", "gave up"]
    assert "out of memory" in capfd.readouterr().err


def test_without_the_allocator_there_is_nothing_to_replay() -> None:
    recording = memplan.record(lambda: torch.ones(1000))
    assert recording.tape.sizes
    with pytest.raises(UnsupportedCall, match="install_allocator"), recording.replay():
        pass
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedCall, match="no CUDA device"):
            memplan.install_allocator()


_ON_CUDA = """
import logging, torch, memplan
logging.basicConfig(level=logging.WARNING)
memplan.install_allocator()
memplan.install_allocator()  # once is enough
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).cuda()
eager = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).cuda()
eager.load_state_dict(model.state_dict())
x = torch.randn(512, 64, device="cuda")

def step(m):
    for p in m.parameters():
        p.grad = None
    loss = m(x).square().mean()
    loss.backward()
    return loss.detach()

recording = memplan.record(lambda: step(model), device="cuda", warm_up=3)
for _ in range(5):
    with recording.replay():
        ours = step(model)
    theirs = step(eager)
    assert torch.equal(ours, theirs), (ours, theirs)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters()))
torch.cuda.synchronize()
replayed = int(recording.allocator._m[recording.allocator._kernel.STEPS])
print("replayed", replayed, "different", recording.allocator.differences, recording.report())
assert replayed >= 4
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
def test_on_cuda_a_process_replays_its_step() -> None:
    done = python(_ON_CUDA)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
def test_on_cuda_it_can_be_too_late() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(UnsupportedCall, match="in use already"):
        memplan.install_allocator()


def test_known_allocations_are_found_and_placed() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        one = torch.ones(1000)
        two = torch.ones(2000)
        del one
        three = torch.ones(500)
        kept[:] = [two.sum(), three.clone()]

    recording = memplan.record(step)
    sizes = sorted(b.size for b in recording.problem.buffers)
    assert sizes[-3:] == [2048, 4032, 8000], "rounded up to 64 bytes"
    assert recording.kept == 4 + 2000
    assert recording.max_live == recording.arena_size == 4032 + 8000
    assert recording.peak >= recording.max_live - 64
    assert recording.fragmentation == 0
    validate(recording.problem, recording.solution)
    assert "aten::" in recording.report()
    assert recording.to_text()


class Experts(nn.Module):
    """Which expert runs depends on the data, which no tracer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (x.sum(1) % 4).long() == i
            if bool(chosen.any()):
                out[chosen] = expert(x[chosen])
        return out


def test_a_training_step_that_cannot_be_traced() -> None:
    model, x = Experts(), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(memplan.MemplanError):
        memplan.plan(model, x)
    recording = memplan.record(step, warm_up=2)
    assert recording.max_live <= recording.arena_size
    assert recording.max_live + recording.kept > 0
    validate(recording.problem, recording.solution)
    before = [p.clone() for p in model.parameters()]
    memplan.record(step, warm_up=0)
    assert not all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)), "the step really ran"
