"""Tells which tensors nothing but a running backward refers to, so that their bytes can be freed early, or changed.

They are gradients of outputs, outputs that were saved for the backward, and gradients that wait for others.

Autograd holds what it has handed to a node until the node's backward returns. In eager that is one op. A planned step
is one node, whose backward reads the gradient of an output at its beginning, and would hold it to the end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from memplan.runtime.memory.handed_gradients import HandedGradients

Free = list[weakref.ref[torch.Tensor]]
LEAST = 64  # bytes of a tensor that are worth it


def note_held_by_autograd_alone(free: Free | None, gradients: Sequence[torch.Tensor | None]) -> None:
    """Put those of the gradients into `free` that were handed to a running backward and to which nothing else refers.

    It is called right in the `backward` of a `torch.autograd.Function`, with all that it has got. No other tensor,
    name, hook, buffer of autograd or array has the bytes of what is put there, and they can be resized.
    """
    if free is not None:
        alone = _counts_alone()
        free[:] = [
            weakref.ref(g) for g in gradients if type(g) is torch.Tensor and _is_plain(g) and _counts(g) in alone
        ]


def note_unshared(free: Free | None, saved: Iterable[torch.Tensor]) -> None:
    """Put those of the saved outputs into `free` whose bytes no other tensor, and no storage in Python, has any more.

    Nobody else has the saved tensors, which were detached from what the caller got.
    """
    if free is not None:
        alone = _owners_alone()
        free += [weakref.ref(t) for t in saved if _is_plain(t) and _owners(t) == alone]


def note_own(free: Free | None, gradient: torch.Tensor) -> None:
    """Put a gradient into `free` that the caller has made, and that nothing else has."""
    if free is not None and _is_plain(gradient):
        free[:] = [*(one for one in free if one() is not None), weakref.ref(gradient)]


def are_in_buffers_alone(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing but a buffer of autograd has each of these gradients, and their list."""
    alone = _counts_in_buffers()
    return bool(alone) and all(found == alone for found in _counts_of_waiting(gradients))


def drop(free: Free, gradient: torch.Tensor) -> None:
    """Free the bytes of a gradient that will not be read again, if it is one of `free`."""
    if any(one() is gradient for one in free):
        gradient.untyped_storage().resize_(0)


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a tensor with memory that can be resized, and enough of it."""
    if gradient.layout is not torch.strided or not torch._C._has_storage(gradient):  # torch.func's wrappers have none
        return False
    storage = gradient.untyped_storage()
    return storage.resizable() and storage.nbytes() >= LEAST


def _counts(gradient: torch.Tensor) -> tuple[int, ...]:
    """Return the references to a tensor and to its storage, in Python and in C++.

    Those of a view, as `view` in a model's loss makes one of the gradient, are followed by those to its base.
    """
    storage = gradient.untyped_storage()
    in_python = sys.getrefcount(gradient), sys.getrefcount(storage)
    found = (*in_python, gradient._use_count(), torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]
    base = gradient._base
    return found if base is None else (*found, sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the references to the storage of a tensor, in Python and in C++."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


@cache
def _owners_alone() -> tuple[int, int]:
    """Return the references to the storage of a detached tensor that nothing else has, counted as `_counts_alone`."""
    found = _counted_apart(_count_owners)
    return found[0] if len(found) == 1 else (0, 0)


def _count_owners(found: list[Any]) -> None:
    detached = torch.zeros(LEAST, dtype=torch.uint8, device="cpu").detach()
    found.append(_owners(detached))


def _counted_apart(count: Callable[[list[Any]], None]) -> list[Any]:
    """Return what is counted in a thread of its own.

    The caller's modes, hooks, tracer and profiler, any of which may hold a tensor, are not there.
    """

    def run() -> None:
        sys.settrace(None)  # of `threading.settrace`
        sys.setprofile(None)
        count(found)

    found: list[Any] = []
    thread = threading.Thread(target=run, name="memplan counts references")
    thread.start()
    thread.join()
    return found


def _counts_of_waiting(gradients: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [_counts(gradient) for gradient in gradients]


@cache
def _counts_in_buffers() -> tuple[int, ...]:
    """Return the counts of gradients that a buffer of autograd alone holds; none if they vary. They are counted apart.

    None too if what is added to a gradient there is lost.
    """
    found = _counted_apart(_count_waiting)
    return found[0] if len(found) == 3 and found[0] == found[1] and found[2] else ()


class _Waits(torch.autograd.Function):
    """Adds to the gradient that another call has handed to autograd, and counts the references to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handed: HandedGradients, found: list[Any]) -> torch.Tensor:
        ctx.parameter, ctx.handed, ctx.found = x, handed, found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        waiting = ctx.handed.waiting([ctx.parameter])
        if waiting is None:
            gradient = torch.ones(LEAST, dtype=torch.float32, device="cpu")
            ctx.handed.note([ctx.parameter], [gradient])
            return gradient, None, None
        ctx.found += _counts_of_waiting(waiting)
        waiting[0].add_(1)
        return None, None, None


def _count_waiting(found: list[Any]) -> None:
    """Put into `found` the counts of a waiting gradient, twice, and whether what was added to it is in the sum."""
    x = torch.zeros(LEAST, dtype=torch.float32, device="cpu", requires_grad=True)
    handed = HandedGradients()
    results: list[Any] = [_Waits.apply(x, handed, found) for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.autograd.backward([result.sum() for result in results])
    found.append(x.grad is not None and bool((x.grad == 3).all()))


class _Probe(torch.autograd.Function):
    """Counts the references to a gradient to which nothing else can refer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[Any]) -> torch.Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.found += _counts_of_each(grads)
        return None, None


def _counts_of_each(gradients: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the counts of each gradient, from as deep in calls as `note_held_by_autograd_alone` takes them."""
    return [_counts(g) for g in gradients if type(g) is torch.Tensor and _is_plain(g)]


@cache
def _counts_alone() -> tuple[tuple[int, ...], ...]:
    """Return the counts of gradients that autograd alone holds, in this build of torch; none if they vary.

    They are counted apart.
    """
    found = _counted_apart(_count)
    return tuple(found[:2]) if len(found) == 4 and found[:2] == found[2:] else ()


def _count(found: list[Any]) -> None:
    """Put into `found` the counts of a gradient and of a view of one, both twice."""
    for viewed in (False, True) * 2:
        x = torch.zeros(LEAST, dtype=torch.float32, device="cpu", requires_grad=True)
        result: Any = _Probe.apply(x, found)  # type: ignore[no-untyped-call]
        (result.view(-1, 1) if viewed else result).square().sum().backward()
