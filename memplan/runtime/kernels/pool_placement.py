"""Large results of kernels that cannot be told where to write, made at their planned address while they are recorded.

One `torch.cuda.MemPool` for each, whose allocator answers the request for the result with the address that was planned
for it. A recorded kernel keeps its addresses, so this is needed once. What does not work out, because the
kernel asks for its memory in another way, is copied to its place as ever.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from memplan.recording.allocator import cuda_backing
from memplan.recording.places import PlaceAllocator, PlannedPlace
from memplan.runtime.kernels.kernel_selection import BoundOp


class Placer(Protocol):
    """Lets a tensor be made at an address."""

    def at(self, address: int, nbytes: int) -> AbstractContextManager[None]:
        """Inside, the first tensor of `nbytes` bytes is made at `address`, if that can be."""


class PoolPlacer:
    """By pools of CUDA memory. `low` and `high` are the addresses of an arena and of its end."""

    def __init__(self, device: torch.device, low: int, high: int) -> None:
        self._device = device
        self._made: tuple[PlaceAllocator, Any] | None = None
        self.low, self.high = low, high
        self.pools: list[Any] = []  # which may not go before what was recorded in them

    @contextmanager
    def at(self, address: int, nbytes: int) -> Iterator[None]:
        """In a pool of its own, that is not split: nothing else can lie behind the result."""
        allocator, handle = self._ready()
        pool = torch.cuda.MemPool(handle, no_split=True)
        self.pools.append(pool)
        with torch.cuda.use_mem_pool(pool, self._device), allocator.expecting(address, nbytes):
            yield

    def _ready(self) -> tuple[PlaceAllocator, Any]:
        if self._made is None:
            runtime = cuda_runtime()
            exchange = runtime.cudaThreadExchangeStreamCaptureMode
            allocator = PlaceAllocator(cuda_backing(runtime), exchange, self.low, self.high)
            self._made = allocator, torch._C._cuda_customAllocator(*allocator.pointers)
            weakref.finalize(self, _give_up, self.pools, allocator)
        return self._made


def _give_up(pools: list[Any], allocator: PlaceAllocator) -> None:
    """Pools give their memory back through the allocator: it goes last."""
    pools.clear()
    del allocator


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def placing(
    bound: Sequence[BoundOp], places: Mapping[int, PlannedPlace], tensors: Mapping[str, Any], placer: Placer
) -> tuple[BoundOp, ...]:
    """`bound` (indexed like the graph's ops), with the ops of `places` making that result where it is planned.

    `tensors` are the values by name ("v12").
    """
    return tuple(
        replace(b, function=_placed(b, places[i], tensors[f"v{places[i].value}"], placer), overload=None)
        if i in places
        else b
        for i, b in enumerate(bound)
    )


def _placed(bound: BoundOp, place: PlannedPlace, target: torch.Tensor, placer: Placer) -> Callable[..., Any]:
    """Returns `target` itself where the kernel has written just there: copying it onto itself does nothing."""
    position = bound.outs.index(place.value)
    address = target.untyped_storage().data_ptr()

    def call(*args: Any, **kwargs: Any) -> Any:
        with placer.at(address, place.nbytes):
            results = bound.function(*args, **kwargs)
        made = results[position] if bound.several else results
        same = (made.data_ptr(), made.shape, made.stride()) == (target.data_ptr(), target.shape, target.stride())
        if not same:
            return results
        if not bound.several:
            return target
        return (*results[:position], target, *results[position + 1 :])

    return call
