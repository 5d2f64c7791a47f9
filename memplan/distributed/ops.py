"""The collectives of a program as ops of torch, and what starts them and waits for them later.

They write into given memory (true `out=` variants): a plan has a place for each result. As ops they have their result
when they return, and what they read and write is free again. `StartedCollective` returns before that; memplan keeps
torch's work object and waits for it, so that nothing depends on which storage torch knows it by.
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
from memplan.torch_inside.versions import collective

GLOO = "gloo"
_DIVISOR = 16  # bytes at most of the number of ranks, as a tensor of torch's and cast to the type that is averaged


def is_gloo(group: Any) -> bool:
    """Return whether gloo runs the collectives of a process group."""
    return bool(distributed.get_backend(group) == GLOO)


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


_SCHEMAS = {
    "gather_parameter": "Tensor shard, int ranks, str group",
    "all_gather": "Tensor x, int ranks, str group",
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


class StartedCollectives:
    """The collectives that a program has started, and not waited for yet."""

    def __init__(self) -> None:
        self._running: dict[StartedCollective, None] = {}

    def collective(self, target: OpOverload) -> StartedCollective:
        """Return what starts a collective of memplan, and waits for it."""
        return StartedCollective(target._opname, self._running)

    def drain(self) -> None:
        """Return when none is running any more, because it is complete or has failed: a step has ended early."""
        while self._running:
            with contextlib.suppress(CollectiveFailed):
                next(iter(self._running)).wait()


class StartedCollective:
    """A planned collective, which runs once in each step between `start` and `wait`."""

    __slots__ = ("_group", "_name", "_running", "_work")

    def __init__(self, name: str, running: dict[StartedCollective, None]) -> None:
        self._name, self._running = name, running
        self._group, self._work = "", None

    def start(self, *args: Any, out: torch.Tensor) -> None:
        """Start it; `out` is not to be used, nor what it reads to be changed, before `wait` has returned.

        Raises `CollectiveFailed` if the process group cannot go on.
        """
        self._group = args[-1]
        with _raising(self._name, self._group):
            self._work = _BEGIN[self._name](*args, out=out, later=True)
        self._running[self] = None

    def wait(self) -> None:
        """Return when its result is there. Raises `CollectiveFailed` if a rank has left or the time is over."""
        self._running.pop(self, None)
        work, self._work = self._work, None
        with _raising(self._name, self._group):
            _wait(self._group, work)


def group_of(target: OpOverload, args: tuple[Any, ...]) -> str:
    """Return the name of the process group of a call; "" if the op is no collective of memplan."""
    return str(args[-1]) if target.namespace == NAMESPACE else ""


def bytes_beside(target: str, group: str, *, read: int, written: int) -> int:
    """Return the bytes that a collective takes beside those that it reads and writes, from its start to its wait.

    What libraries allocate without torch, gloo in C++ and NCCL on the device, is not known, and not in it.
    """
    found = process_group(group)
    if not is_gloo(found) or found.size() == 1:
        return 0
    copied = {"reduce_scatter": read + _DIVISOR, "gather_parameter": written, "all_gather": written}
    return copied.get(target.split(".")[1], 0)


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Say in the error of a collective that fails within that some parameters may be updated, and others not."""
    try:
        yield
    except CollectiveFailed as error:
        what = f"{error.what}; it failed in the backward, and some parameters may be updated, others not"
        hint = "load a checkpoint, in new processes on all ranks"
        raise CollectiveFailed(what, where=error.where, hint=hint) from error.__cause__


def _gather_parameter(shard: torch.Tensor, ranks: int, group: str, *, out: torch.Tensor, later: bool) -> Any:
    run = collective("all_gather_single", "all_gather_into_tensor")
    return run(out, shard, group=process_group(group), async_op=later)


def _reduce_scatter(whole: torch.Tensor, how: str, ranks: int, group: str, *, out: torch.Tensor, later: bool) -> Any:
    found = process_group(group)
    if later and is_gloo(found) and whole.device.type == "cpu":
        return ReduceScatter(out, whole, _reduction(how), found)
    run = collective("reduce_scatter_single", "reduce_scatter_tensor")
    return run(out, whole, op=_reduction(how), group=found, async_op=later)


def _all_reduce(x: torch.Tensor, how: str, group: str, *, out: torch.Tensor, later: bool) -> Any:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return distributed.all_reduce(out, _reduction(how), group=process_group(group), async_op=later)


def _broadcast(x: torch.Tensor, source: int, group: str, *, out: torch.Tensor, later: bool) -> Any:
    out.copy_(x)
    return distributed.broadcast(out, group=process_group(group), group_src=source, async_op=later)


def _wait(name: str, work: Any) -> None:
    """Return when a collective of a group has its result, or when a rank has left the group.

    Gloo gives no rank up before its timeout, and cannot be aborted: while it waits, the store is asked for a reason.
    """
    group = process_group(name)
    if work is None:  # torch has waited, or this rank is alone
        return
    if not is_gloo(group):
        work.wait()
        return
    until = time.monotonic() + timeout_of(group) + 1  # gloo's own error comes first
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


@contextlib.contextmanager
def _raising(name: str, group: str) -> Iterator[None]:
    """Raise the errors of a process group as errors of memplan."""
    hint = f"no parameter was changed by this step; {AGAIN}"
    try:
        yield
    except CollectiveFailed as error:
        raise CollectiveFailed(error.what, where=name, hint=hint) from None
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        reason = reason_of(process_group(group))
        why = f"a rank has left the others: {reason}" if reason else lines[0] if lines else type(error).__name__
        raise CollectiveFailed(f"a collective failed: {why}", where=name, hint=hint) from error


def _complete(name: str) -> Callable[..., torch.Tensor]:
    """Return the function that runs a collective and has its result in `out=` when it returns."""
    begin = _BEGIN[name]

    def collective(*args: Any, out: torch.Tensor) -> torch.Tensor:
        group = args[-1]
        with _raising(name, group):
            _wait(group, begin(*args, out=out, later=is_gloo(process_group(group))))
        return out

    return collective


_BEGIN: dict[str, Callable[..., Any]] = {
    "gather_parameter": _gather_parameter,
    "all_gather": _gather_parameter,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
}


def _define() -> dict[str, Callable[..., torch.Tensor]]:
    """Register the ops with torch, and return the function that runs each."""
    run = {name: _complete(name) for name in _BEGIN}
    like: dict[str, Callable[..., torch.Tensor]] = {
        "gather_parameter": _like_gather_parameter,
        "all_gather": _like_gather_parameter,
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
