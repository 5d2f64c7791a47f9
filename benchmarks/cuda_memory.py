"""What a contender needs on a CUDA device: measured peaks, and the largest batch that fits a set capacity.

Each measurement is made with nothing else on the device. A batch of k is the example k times over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import CONTENDERS, Step
from benchmarks.results import Cell
from benchmarks.zoo import ZOO, Size
from memplan.core.units import parse_size

MOST = 4096  # copies of the example; the search goes no further


def cuda_memory(name: str, size: Size, contender: str, capacity: str | None) -> dict[str, Cell]:
    """Peaks of a step of the plain example, and how many examples fit `capacity` ("8GiB"), if one is given.

    The search for the largest batch prepares the contender a dozen times: for compilers that takes minutes.
    """
    step = _fresh(name, size, contender, 1)
    torch.cuda.reset_peak_memory_stats()
    step.clear()
    step.run()
    torch.cuda.synchronize()
    found: dict[str, Cell] = {
        "allocated_mb": torch.cuda.max_memory_allocated() / 1e6,
        "reserved_mb": torch.cuda.max_memory_reserved() / 1e6,
        "pool_mb": None if step.pool is None else step.pool() / 1e6,
    }
    del step
    if capacity is None:
        return found
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(parse_size(capacity) / total, 1.0))
    try:
        found["max_batch"] = largest(lambda copies: _runs(name, size, contender, copies))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        _release()
    return found


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if none does, `MOST` at most; what fits a larger one fits a smaller one."""
    if not fits(1):
        return 0
    low = 1
    while low < MOST and fits(2 * low):
        low *= 2
    if low >= MOST:
        return MOST
    high = 2 * low  # does not fit
    while high - low > max(1, low // 32):  # to 3 %
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _runs(name: str, size: Size, contender: str, copies: int) -> bool:
    try:
        step = _fresh(name, size, contender, copies)
        step.run()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _fresh(name: str, size: Size, contender: str, copies: int) -> Step:
    """The contender's step after it has settled, alone on the device."""
    _release()
    model, inputs = ZOO[name](size)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t] * copies).to("cuda"), inputs)
    step = CONTENDERS[contender](model.to("cuda"), inputs)
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()
    return step


def _release() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that anybody used
    torch.cuda.empty_cache()
