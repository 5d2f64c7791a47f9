"""The ranks of a compiled step: what they must have alike, what they have agreed to run, and what if one leaves alone.

`require_options` refuses options, and `ParallelGuards` checks on every call that torch's objects are as when compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import distributed, nn

from memplan.distributed.agreement import Agreement
from memplan.distributed.ended import AGAIN, end, is_alone, reason_of, require_going_on, store_of, timeout_of
from memplan.distributed.internals import groups_of
from memplan.distributed.ops import process_group
from memplan.distributed.parallelism import fsdp_modules, reducer_of
from memplan.distributed.refusals import require_group, require_reducer_options
from memplan.errors import CollectiveFailed, MemplanError, UnsupportedCall

_EAGERLY = ("eager", "passive")


def require_options(options: Any, *, replicated: bool) -> None:
    """Raise `UnsupportedCall` for options with which ranks could not be sure to run the same collectives.

    `replicated`: the model is a `DistributedDataParallel`.
    """
    if options.on_mismatch in _EAGERLY:
        what = "a step by torch alone runs other collectives than a compiled one, for which other ranks would wait"
        _refuse(what, f"on_mismatch={options.on_mismatch!r}", 'leave on_mismatch out, or pass "error"')
    if getattr(options, "allow_unsynchronized", False):
        what = "the model is trained by all ranks together, and a compiled step does that too"
        hint = "leave it out, or pass the module that DistributedDataParallel wraps"
        _refuse(what, "allow_unsynchronized=True", hint)
    if options.measures:
        what = "each rank would measure other costs, and make another plan"
        hint = "measure on one rank, save step.measurement.costs, and pass costs='costs.json' on all"
        _refuse(what, "costs='measure'", hint)
    if options.cuda_graph:
        _refuse("a recorded step of several ranks is not supported", "cuda_graph=True", "leave cuda_graph out")
    if options.device is not None:
        what = "parameters of several ranks stay on the device of each"
        _refuse(what, f"device={options.device!r}", "leave device out, and move the model before it is divided")
    if replicated and options.accumulate > 1:
        what = "sums of gradients would be averaged after each batch, and not once, as under no_sync()"
        _refuse(what, f"accumulate={options.accumulate}", "use fully_shard, or pass the batches as one")


def require_call_options(options: Any) -> None:
    """Raise `UnsupportedCall` for options of `memplan.compile` that a model of several ranks cannot have."""
    require_options(options, replicated=False)
    if options.kernels != "aten":
        hint = "leave kernels out, or compile the blocks within by torch.compile"
        _refuse("a model of several ranks runs the kernels of eager", f"kernels={options.kernels!r}", hint)
    if options.dynamic_shapes is not None:
        what = "a plan of several ranks is for one shape"
        _refuse(what, "dynamic_shapes", "leave it out: other shapes are planned when they come")


def option_lines(options: Any) -> list[str]:
    """Return the options that ranks have alike, a line each; functions have other addresses on each rank."""
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "costs"}
    return [f"{name}={value!r}" for name, value in values.items() if not callable(value)]


def batch_lines(batch: Any) -> list[str]:
    """Return the layout of each tensor of a batch, a line each."""
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return [f"input {i}: {x.dtype} {tuple(x.shape)}" for i, x in enumerate(leaves)]


def _refuse(what: str, where: str, hint: str) -> None:
    raise UnsupportedCall(what, where=where, hint=hint, see="ranks-refused")


def _refuse_unreduced(under: str) -> None:
    hint = "and pass accumulate= to compile_step to add gradients of several batches"
    _refuse("a compiled step reduces its gradients, and is not to be called there", under, f"call it outside, {hint}")


class ParallelGuards:
    """The states of a model's sharded modules, and of its `DistributedDataParallel`."""

    def __init__(self, model: nn.Module) -> None:
        self._reducer: Any = reducer_of(model)
        self._groups: list[tuple[Any, Any, Any]] = [
            (module, module._get_fsdp_state(), group)  # type: ignore[operator]
            for module in fsdp_modules(model)
            for group in groups_of(module._get_fsdp_state())  # type: ignore[operator]
        ]

    def check(self) -> None:
        """Free whole parameters that an eager forward has left, which a step would not update.

        Raises:
            UnsupportedCall: Gradients shall not be reduced, which a compiled step always does.
            UnsupportedGraph: An option was set after compiling that a compiled step does not follow.
        """
        for module, state, group in self._groups:
            if group.is_unsharded:
                module.reshard()
            if not group.reduce_grads:
                _refuse_unreduced("set_requires_gradient_sync(False)")
            require_group(module, state, group)
        if self._reducer is not None:
            if not self._reducer.require_backward_grad_sync:
                _refuse_unreduced("no_sync()")
            require_reducer_options(self._reducer)


_GRACE = 5.0  # seconds at most that a rank which raises waits for the others to raise too
_POLL = 0.02


class StepRanks:
    """A context for each call of a step, in which ranks that raise do so together.

    If one leaves a call by an error and the others do not within five seconds (or the timeout of the group, if that is
    less), the reason is posted for them, and no rank can go on.

    Args:
        group: The name of the process group; None: there are no other ranks.
    """

    def __init__(self, group: str | None) -> None:
        self._name = group
        found = None if group is None else process_group(group)
        self._group: Any = None if is_alone(found) else found
        self._agreed: frozenset[tuple[str, ...]] = frozenset()
        self._calls, self._agreement, self._ended = 0, "", False

    def begin(self, agreement: str, sequences: Sequence[tuple[str, ...]]) -> None:
        """Store the name of the agreement at compile time, and the collectives of the programs it was on."""
        self._agreement, self._agreed = agreement, frozenset(sequences)

    def agree(self, sequence: tuple[str, ...], all_of: Sequence[tuple[str, ...]]) -> None:
        """Let the ranks agree on other collectives than those of the last call, unless `sequence` is one of these.

        `all_of`: the collectives of all programs of the plan that runs now.

        Raises `RanksDiffer` on every rank, or on a rank that is alone with its change, within the group's timeout.
        """
        if self._group is None or sequence in self._agreed:
            return
        with Agreement(self._name) as ranks:
            ranks.compare([f"program {i}: {line}" for i, lines in enumerate(all_of) for line in lines])
        self._agreed = frozenset(all_of)

    def __enter__(self) -> None:
        if self._group is None:
            return
        if self._ended:
            require_going_on(self._group)
            what = "a step of this process has failed before"
            raise CollectiveFailed(what, where="the process group", hint=AGAIN)
        self._calls += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._group is None:
            return
        if isinstance(error, CollectiveFailed):
            self._ended = True
        elif not (isinstance(error, Exception) and self._all_raise()):
            self._ended = True
            why = error.summary if isinstance(error, MemplanError) else str(error)
            end(self._group, f"rank {distributed.get_rank()} raised {type(error).__name__}: {why}")

    def _all_raise(self) -> bool:
        """Return whether all ranks leave this call by an error, within the time that they have."""
        store = store_of(self._group)
        ranks = distributed.get_process_group_ranks(self._group)
        prefix = f"memplan/{self._agreement}/{self._calls}/raised by "
        try:
            store.set(f"{prefix}{distributed.get_rank()}", "")
            until = time.monotonic() + min(_GRACE, timeout_of(self._group))
            while not store.check([f"{prefix}{rank}" for rank in ranks]):
                if time.monotonic() > until or reason_of(self._group):
                    return False
                time.sleep(_POLL)
        except RuntimeError:  # the store is gone with the rank that held it
            return False
        return True
