"""The collectives of a program as ops of torch, each of which has its result when it returns.

They write into given memory (true `out=` variants): a plan has a place for each result. What they read and write is
free again as soon as they return, so nothing of a plan has to wait for them.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch._ops import OpOverload

from memplan.core.collectives import NAMESPACE
from memplan.distributed.ended import AGAIN, reason_of, require_going_on, timeout_of
from memplan.errors import CollectiveFailed

_SCHEMAS = {
    "gather_parameter": "Tensor shard, int ranks, str group",
    "reduce_scatter": "Tensor whole, str how, int ranks, str group",
    "all_reduce": "Tensor x, str how, str group",
    "broadcast": "Tensor x, int source, str group",
}
_LOOK = datetime.timedelta(seconds=0.5)  # between two looks for the reason of a rank that has left
_ANY_DEVICE = "CompositeExplicitAutograd"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def collective_of(target: OpOverload) -> Callable[..., torch.Tensor] | None:
    """Return the function that runs a collective of memplan, with its result in `out=`; None for any other op."""
    return _RUN[target._opname] if target.namespace == NAMESPACE else None


def group_of(target: OpOverload, args: tuple[Any, ...]) -> str:
    """Return the name of the process group of a call; "" if the op is no collective of memplan."""
    return str(args[-1]) if target.namespace == NAMESPACE else ""


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Say in the error of a collective that fails within that some parameters may be updated, and others not."""
    try:
        yield
    except CollectiveFailed as error:
        what = f"{error.what}; it failed in the backward, and some parameters may be updated, others not"
        hint = "load a checkpoint, in new processes on all ranks"
        raise CollectiveFailed(what, where=error.where, hint=hint) from error.__cause__


def _gather_parameter(shard: torch.Tensor, ranks: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    run = _named("all_gather_single", "all_gather_into_tensor")
    _finished(group, lambda found, later: run(out, shard, group=found, async_op=later))
    return out


def _reduce_scatter(whole: torch.Tensor, how: str, ranks: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    run = _named("reduce_scatter_single", "reduce_scatter_tensor")
    _finished(group, lambda found, later: run(out, whole, op=_reduction(how), group=found, async_op=later))
    return out


def _all_reduce(x: torch.Tensor, how: str, group: str, *, out: torch.Tensor) -> torch.Tensor:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    _finished(group, lambda found, later: distributed.all_reduce(out, _reduction(how), group=found, async_op=later))
    return out


def _broadcast(x: torch.Tensor, source: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x)
    _finished(group, lambda found, later: distributed.broadcast(out, group=found, group_src=source, async_op=later))
    return out


def _finished(name: str, start: Callable[[Any, bool], Any]) -> None:
    """Start a collective of a group and return when it has its result, or when a rank has left the group.

    Gloo gives no rank up before its timeout, and cannot be aborted: while it waits, the store is asked for a reason.
    """
    group = process_group(name)
    if distributed.get_backend(group) != "gloo":
        start(group, False)
        return
    work, until = start(group, True), time.monotonic() + timeout_of(group) + 1  # gloo's own error comes first
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error) or time.monotonic() > until:
                raise
            require_going_on(group)


def process_group(name: str) -> Any:
    """Return a process group by its name."""
    home: Any = distributed.distributed_c10d
    return home._resolve_process_group(name)


def _named(name: str, before: str) -> Callable[..., Any]:
    """Return a function of torch.distributed by its name, or by the one that it had before torch 2.13."""
    found: Callable[..., Any] = getattr(distributed, name, None) or getattr(distributed, before)
    return found


def _reduction(how: str) -> Any:
    return getattr(distributed.ReduceOp, how.upper())


def _like_gather_parameter(shard: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _like_reduce_scatter(whole: torch.Tensor, how: str, ranks: int, group: str) -> torch.Tensor:
    return whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))


def _like_all_reduce(x: torch.Tensor, how: str, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _like_broadcast(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _raising(name: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function with the errors of the process group as errors of memplan."""

    def collective(*args: Any, out: torch.Tensor) -> torch.Tensor:
        try:
            return run(*args, out=out)
        except CollectiveFailed as error:
            raise CollectiveFailed(
                error.what, where=name, hint=f"no parameter was changed by this step; {AGAIN}"
            ) from None
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            reason = reason_of(process_group(args[-1]))
            why = f"a rank has left the others: {reason}" if reason else lines[0] if lines else type(error).__name__
            what = f"a collective failed: {why}"
            hint = f"no parameter was changed by this step; {AGAIN}"
            raise CollectiveFailed(what, where=name, hint=hint) from error

    return collective


def _define() -> dict[str, Callable[..., torch.Tensor]]:
    """Register the ops with torch, and return the function that runs each."""
    run = {
        "gather_parameter": _raising("gather_parameter", _gather_parameter),
        "reduce_scatter": _raising("reduce_scatter", _reduce_scatter),
        "all_reduce": _raising("all_reduce", _all_reduce),
        "broadcast": _raising("broadcast", _broadcast),
    }
    like: dict[str, Callable[..., torch.Tensor]] = {
        "gather_parameter": _like_gather_parameter,
        "reduce_scatter": _like_reduce_scatter,
        "all_reduce": _like_all_reduce,
        "broadcast": _like_broadcast,
    }

    def fresh(name: str) -> Callable[..., torch.Tensor]:
        return lambda *args: run[name](*args, out=like[name](*args))

    for name, arguments in _SCHEMAS.items():
        _library.define(f"{name}({arguments}) -> Tensor")
        _library.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
        _library.impl(name, fresh(name), _ANY_DEVICE)
        _library.impl(f"{name}.out", run[name], _ANY_DEVICE)
        _library.impl(name, like[name], "Meta")
        _library.impl(f"{name}.out", lambda *_, out: out, "Meta")
    return run


_RUN = _define()
