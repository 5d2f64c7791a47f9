"""Recorders of a step's kernels, which they replay: by CUDA's graphs, and by those of torch's other accelerators.

Both capture a stream: what a function queues there is recorded instead of run, and meanwhile nothing may wait for the
device. On CUDA, a recording also has its own memory pool and cuBLAS workspaces.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from memplan.core.choices import Sanitize
from memplan.devices import graphs
from memplan.devices.streams import current_stream, new_stream
from memplan.errors import MemplanError, UnsupportedCall

Function = Callable[[], Any]
_CAPTURE = threading.Lock()  # torch captures in one thread of the process at a time


class Recorder(Protocol):
    """Records the kernels that a function launches. Recordings of one recorder share memory and run one at a time."""

    def warm_up(self, function: Function) -> None:
        """Run `function` once, so that libraries initialize before anything is recorded."""

    def record(self, function: Function) -> tuple[Callable[[], None], Any]:
        """Return a callable that replays `function` on the same memory, and the tensors that hold its results."""

    @property
    def pool_bytes(self) -> int:
        """Bytes that recordings keep outside the arena: results, and what kernels allocate by themselves."""


class CudaRecorder:
    """A `Recorder` that captures CUDA graphs with one private memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def warm_up(self, function: Function) -> None:
        """Run `function` on the side stream that recording uses."""
        _run_beside(self._stream, self._device, function)

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


class AcceleratorRecorder:
    """A `Recorder` that captures by torch's generic graphs (`torch.accelerator.Graph`), which share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # what each graph took

    def warm_up(self, function: Function) -> None:
        """Run `function` on the side stream that recording uses."""
        _run_beside(self._stream, self._device, function)

    def record(self, function: Function) -> tuple[Callable[[], None], Any]:
        """Capture `function` on the side stream."""
        pool = next((graph.pool() for graph in self._made), None)
        graph = graphs.new_graph(pool)
        with _CAPTURE, graphs.capturing(graph, self._device, self._stream):
            before = graphs.reserved_bytes(self._device)
            results = function()
            self._made[graph] = graphs.reserved_bytes(self._device) - before
        return partial(graphs.replay, graph, self._device), results

    @property
    def pool_bytes(self) -> int:
        """Bytes by which recordings made the allocator's memory grow."""
        return sum(self._made.values())


def _run_beside(stream: torch.Stream, device: torch.device, function: Function) -> None:
    """Run `function` on a side stream, after what is queued on the current one, and before what is queued later."""
    current = current_stream(device)
    stream.wait_stream(current)
    with stream:
        function()
    current.wait_stream(stream)


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
    if device.type != "cuda" and not graphs.can_record(device):
        raise UnsupportedCall(
            f"cuda_graph=True needs a CUDA device, or one that torch records graphs on; the model is on {device}",
            hint="leave cuda_graph out",
            see="cuda-graph",
        )
    if sanitize == "redzone":
        raise MemplanError(
            'sanitize="redzone" reads its patterns in every step, which cannot be recorded',
            hint='use sanitize="poison"',
        )
    return CudaRecorder(device) if device.type == "cuda" else AcceleratorRecorder(device)
