"""Places large results of kernels without out arguments at their planned addresses while a CUDA graph is recorded.

Each such result gets a `torch.cuda.MemPool`, whose allocator returns the planned address for the request of that
result. A recorded kernel keeps its addresses, so this happens once. If a kernel requests its memory in another way, its
result is copied to the planned address as usual.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from memplan.recording.allocator import cuda_backing
from memplan.recording.places import PlaceAllocator, PlannedPlace
from memplan.runtime.kernels.kernel_selection import BoundOp


class Placer(Protocol):
    """Allocates a tensor at a given address."""

    def at(self, address: int, nbytes: int, *, alone: bool) -> AbstractContextManager[None]:
        """Within the context, allocate the first tensor of `nbytes` bytes at `address`, if possible.

        `alone`: nothing else that is allocated within is used after what runs next.
        """


class PoolPlacer:
    """A `Placer` that uses CUDA memory pools. `low` and `high` are the addresses where an arena begins and ends."""

    def __init__(self, device: torch.device, low: int, high: int) -> None:
        self._device = device
        self._made: PlaceAllocator | None = None
        self.low, self.high = low, high
        self.pools: list[Any] = []  # they must outlive the graphs that were recorded in them

    @contextmanager
    def at(self, address: int, nbytes: int, *, alone: bool) -> Iterator[None]:
        """Use a pool for this result alone, without splitting: no other tensor can follow the result in its block.

        Other tensors of its op get scratch of the allocator, which all ops share that are `alone`: recorded kernels run
        in their order.
        """
        allocator = self._allocator()
        # A custom allocator of its own for each pool, with the same functions: torch notes each address once for an
        # allocator, and two pools may place results at one address, one after the other.
        pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*allocator.pointers), no_split=True)
        self.pools.append(pool)
        with torch.cuda.use_mem_pool(pool, self._device), allocator.expecting(address, nbytes, alone=alone):
            yield

    def _allocator(self) -> PlaceAllocator:
        if self._made is None:
            runtime = cuda_runtime()
            exchange = runtime.cudaThreadExchangeStreamCaptureMode
            self._made = PlaceAllocator(cuda_backing(runtime), exchange, self.low, self.high)
            weakref.finalize(self, _delete_pools, self.pools, self._made)
        return self._made


def _delete_pools(pools: list[Any], allocator: PlaceAllocator) -> None:
    """Delete the pools before the allocator, through which they free their memory."""
    pools.clear()
    allocator.close()


def cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def placing(
    bound: Sequence[BoundOp],
    places: Mapping[int, PlannedPlace],
    tensors: Mapping[str, Any],
    placer: Placer,
    *,
    copied: Collection[int] = (),
) -> tuple[BoundOp, ...]:
    """Return `bound` (indexed like the ops of the graph), with the ops of `places` writing to their planned places.

    `tensors` are the values by name ("v12"). `copied`: those to which a new result is copied.
    """
    return tuple(
        replace(b, function=_placed(b, places[i], tensors[f"v{places[i].value}"], placer, copied)) if i in places else b
        for i, b in enumerate(bound)
    )


def _placed(
    bound: BoundOp, place: PlannedPlace, target: torch.Tensor, placer: Placer, copied: Collection[int]
) -> Callable[..., Any]:
    """Return a callable that returns `target` itself if the kernel wrote to its address, so that no copy is needed."""
    position = bound.outs.index(place.value)
    address = target.untyped_storage().data_ptr()
    alone = not bound.opaque_results and all(out is None or out in copied for out in bound.outs)

    def call(*args: Any, **kwargs: Any) -> Any:
        with placer.at(address, place.nbytes, alone=alone):
            results = bound.function(*args, **kwargs)
        made = results[position] if bound.returns_sequence else results
        same = (made.data_ptr(), made.shape, made.stride()) == (target.data_ptr(), target.shape, target.stride())
        if not same:
            return results
        if not bound.returns_sequence:
            return target
        return (*results[:position], target, *results[position + 1 :])

    return call
