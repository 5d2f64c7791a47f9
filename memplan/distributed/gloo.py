"""Collectives on gloo, which copies what it is given: the bytes of the copies, and where they are freed.

Gloo's reduce-scatter copies all that it reads, sums that over the ranks, and copies a part of it to the result. Its
threads keep the copy until they get to drop it, after the result is there. Here the same is done, with the same bits,
by a copy that is freed as soon as the collective is complete, so that a plan can count it.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

GLOO = "gloo"
_DIVISOR = 16  # bytes at most of the number of ranks, as a tensor of torch's and cast to the type that is averaged


def is_gloo(group: Any) -> bool:
    """Return whether gloo runs the collectives of a process group."""
    return bool(distributed.get_backend(group) == GLOO)


def copied_bytes(kind: str, group: Any, *, read: int, written: int) -> int:
    """Return the bytes that a collective takes beside those that it reads and writes, until it is waited for.

    What libraries allocate without torch, gloo in C++ and NCCL on the device, is not known, and not in it.

    Args:
        kind: The name of the op.
        group: The process group.
        read: The bytes that it reads.
        written: The bytes of its result.
    """
    if not is_gloo(group) or group.size() == 1:
        return 0
    return {"reduce_scatter": read + _DIVISOR, "gather_parameter": written, "all_gather": written}.get(kind, 0)


class ReduceScatter:
    """A reduce-scatter that runs on gloo: a sum of a copy over all ranks, a part of which is this rank's result.

    Args:
        out: The result, which is there when `wait` has returned.
        whole: What is summed; it may be changed as soon as this is made.
        op: torch's reduction.
        group: The process group.
    """

    def __init__(self, out: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> None:
        self._out, self._copy = out, whole.clone()
        self._rank = distributed.get_rank(group)
        self._work: Any = distributed.all_reduce(self._copy, op, group=group, async_op=True)

    def wait(self, timeout: datetime.timedelta) -> None:
        """Return when the result is there, and the copy is freed; raise torch's error after the timeout."""
        self._work.wait(timeout)
        rows = self._out.shape[0]
        self._out.copy_(self._copy.narrow(0, self._rank * rows, rows))
        self._copy.untyped_storage().resize_(0)  # a thread of gloo may hold the tensor for a while
