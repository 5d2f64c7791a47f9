"""`cuda_graph=True`: records a program once and replays it, so that a step runs no Python.

The addresses of a recorded kernel never change. So inputs and tangents are copied to fixed memory, and results are
copied from fixed memory to the caller; the arena, parameters and state have fixed addresses already. If parameters move
or hyperparameters change, the program is recorded again. Recording runs the step once or twice: what that changes
(buffers, parameters, optimizer state, the state of random generators) is restored.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memplan.core.choices import Sanitize
from memplan.core.graph import StorageKind
from memplan.devices.kinds import forked
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime.execute.program import Program
from memplan.runtime.memory.arena import dtype_of
from memplan.trace.passes.nodes import may_overlap
from memplan.trace.traced import KernelCall, Live, Source, TracedGraph, Transfer

Function = Callable[[], Any]
_CAPTURE = threading.Lock()  # torch captures in one thread of the process at a time


@dataclass(frozen=True, slots=True)
class _CapturedGraphs:
    forward: Callable[[], None]
    backward: Callable[[], None]
    fresh: tuple[torch.Tensor, ...]
    saved: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]
    live: list[Any]


class CudaGraphProgram:
    """A `Program` that is recorded at its first call and replayed.

    `whole`: forward and backward are one recording, because the backward always follows the forward.
    """

    def __init__(self, program: Program, recorder: Recorder, *, whole: bool) -> None:
        traced = program.traced
        for i in program.inputs:
            if traced.bindings[i].written:
                hint = "change a copy, or leave cuda_graph out"
                name = traced.input_name(traced.bindings[i].index)
                raise UnsupportedGraph(name, "is changed by the model", hint, see="cuda-graph")
        if any(isinstance(k, Transfer) for k in traced.kernels):
            what = "copies to the host run beside the step, and cannot be recorded with it"
            raise UnsupportedCall(
                what, where="cuda_graph=True", hint="use policy='recompute', or leave cuda_graph out", see="cuda-graph"
            )
        _require_on_device(traced)
        self.program = program
        self.recorder = recorder
        self._whole = whole
        self._inputs = [self._memory(traced.bindings[i].value) for i in program.inputs]
        self._tangents = [self._memory(b.value) for b in traced.bound(Source.TANGENT)]
        program.arena.uses.of((*self._inputs, *self._tangents))
        self._live = [
            x for k in traced.kernels if isinstance(k, KernelCall) for x in k.kwargs.values() if isinstance(x, Live)
        ]
        self._recording: _CapturedGraphs | None = None

    def forget(self) -> None:
        """Record again at the next call, because an address has changed."""
        self._recording = None

    def forward(self, *inputs: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Replay the forward. Returns copies of the results, and the saved tensors of the recording."""
        _copy_all(self._inputs, inputs)
        recording = self._ready()
        recording.forward()
        return tuple(map(_copied, recording.fresh)), recording.saved

    def backward(self, *saved_and_tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the backward, which reads only the tangents of its arguments. Returns copies of the gradients."""
        recording = self._recording
        assert recording is not None, "a backward follows its forward"
        _copy_all(self._tangents, saved_and_tangents[len(recording.saved) :])
        recording.backward()
        return tuple(t.clone() for t in recording.gradients)

    def step(self, inputs: Sequence[torch.Tensor], tangent: torch.Tensor) -> torch.Tensor:
        """Replay forward and backward as one recording. Returns a copy of the loss."""
        _copy_all(self._inputs, inputs)
        _copy_all(self._tangents, (tangent,))
        recording = self._ready()
        recording.forward()
        return recording.fresh[0].clone()

    # -- recording ---------------------------------------------------------------------------------------

    def _ready(self) -> _CapturedGraphs:
        live = [x.value() for x in self._live]
        if self._recording is None or self._recording.live != live:
            self._recording = None  # free its memory first
            self._recording = self._record(live)
        return self._recording

    def _record(self, live: list[Any]) -> _CapturedGraphs:
        program, recorder = self.program, self.recorder
        saved: tuple[torch.Tensor, ...] = ()
        run_forward, run_backward = program.forward, program.backward

        def forward() -> Any:
            return run_forward(*self._inputs)

        def backward() -> Any:
            return run_backward(*saved, *self._tangents) if run_backward is not None else ()

        def step() -> Any:
            nonlocal saved
            fresh, saved = forward()
            return fresh, saved, backward()

        with torch.no_grad(), self._restored():
            recorder.warm_up(step)
            if self._whole:
                replay, (fresh, saved, gradients) = recorder.record(step)
                return _CapturedGraphs(replay, _nothing, fresh, saved, gradients, live)
            replay, (fresh, saved) = recorder.record(forward)
            replay_backward, gradients = _nothing, ()
            if program.backward is not None:
                replay_backward, gradients = recorder.record(backward)
            return _CapturedGraphs(replay, replay_backward, fresh, saved, gradients, live)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore what the step changes on exit: parameters, buffers, state, and random generators.

        They are copied to the host meanwhile: the device may have no room for a second set of parameters and state.
        """
        names, traced = self.program.namespace.names, self.program.traced
        written = [names[f"v{b.value}"] for b in traced.bindings if b.written and b.source is not Source.INPUT]
        before = [torch.empty_like(t, device="cpu").copy_(t) for t in written]
        try:
            with forked(traced.device):
                yield
        finally:
            _copy_all(written, before)

    def _memory(self, value: int) -> torch.Tensor:
        v = self.program.traced.graph.values[value]
        device = self.program.traced.graph.storages[v.storage].device
        return torch.zeros(0, dtype=dtype_of(v), device=device).new_empty_strided(v.shape, v.strides).fill_(1)


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, even if they leave gaps; a dense one where elements share bytes."""
    if may_overlap(tensor.shape, tensor.stride()):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _nothing() -> None:
    """Does nothing: the backward of a step that is recorded as one."""


def _require_on_device(traced: TracedGraph) -> None:
    """Raise `UnsupportedGraph` for tensors in host memory and for ops that only check and raise.

    A recorded kernel would keep the value that a host tensor had when it was recorded. A check waits for the device,
    which is not allowed in a recording.
    """
    graph = traced.graph
    for op in graph.ops:
        if op.only_raises:
            where = " in ".join(part for part in (op.name, op.origin.module, op.origin.source) if part)
            hint = "use the _ex variant (torch.linalg.inv_ex), which checks nothing, or leave cuda_graph out"
            raise UnsupportedGraph(
                where, f"{op.target} would check a result on the host in a recorded step", hint, see="cuda-graph"
            )
        for v in (*op.reads, *op.writes):
            storage = graph.storages[graph.values[v].storage]
            if torch.device(storage.device).type != traced.device.type and storage.kind is not StorageKind.HOST:
                where = " in ".join(part for part in (op.name, op.origin.module, op.origin.source) if part)
                hint = f"create {storage.name!r} on {traced.device}, or leave cuda_graph out"
                raise UnsupportedGraph(
                    where, f"uses {storage.name!r} on {storage.device} in a recorded step", hint, see="cuda-graph"
                )


class Recorder:
    """Records the kernels that a function launches as CUDA graphs with one private memory pool; one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def warm_up(self, function: Function) -> None:
        """Run `function` on the side stream that recording uses."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Function) -> tuple[Callable[[], None], Any]:
        """Capture `function`. torch registers the random generators of the device with the graph.

        torch owns the cuBLAS workspaces, one per stream; recording or deleting another graph clears them, while
        recorded kernels still use them. So they are allocated again in the recording's own pool, by a separate
        recording of matrix products.
        """
        if not self._graphs:  # the pool of deleted graphs cannot be used again while a result of theirs is alive
            self._pool = torch.cuda.graph_pool_handle()
        with _separate_workspaces():
            products, _ = self._capture(partial(_multiply, torch.zeros(16, 16, device=self._device)))
            graph, results = self._capture(function)
        del products  # only now that the pool has another graph
        return graph.replay, results

    def _capture(self, function: Function) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capture:
            results = function()
        self._graphs.add(graph)
        return graph, results

    @property
    def pool_bytes(self) -> int:
        """Bytes of the segments of the pool, as the allocator lists them."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool))


@contextmanager
def _separate_workspaces() -> Iterator[None]:
    """Clear the cuBLAS workspaces around a recording, as torch.compile does, so that they are in its pool."""
    with _CAPTURE:
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def _multiply(square: torch.Tensor) -> None:
    """Run matrix products by cuBLAS and by cuBLASLt, each of which may have a workspace."""
    torch.mm(square, square)
    torch.addmm(square[0], square, square)


def make_recorder(device: torch.device, sanitize: Sanitize | None) -> Recorder:
    """Return a new recorder for a device. Raises `UnsupportedCall` or `MemplanError` if nothing can be recorded."""
    if device.type != "cuda":
        what = f"cuda_graph=True needs a CUDA device; the model is on {device}"
        raise UnsupportedCall(what, hint="leave cuda_graph out", see="cuda-graph")
    if sanitize == "redzone":
        raise MemplanError(
            'sanitize="redzone" reads its patterns in every step, which cannot be recorded',
            hint='use sanitize="poison"',
        )
    return Recorder(device)
