"""The errors that memplan raises; each says what is wrong, where, the limit that was exceeded, and the next step.

All derive from `MemplanError`, so `except memplan.MemplanError` catches every error that memplan raises on purpose; any
other exception is a bug. The command line prints them without a traceback and exits 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class MemplanError(Exception):
    """The base class of all errors of memplan.

    Args:
        what: What is wrong.
        where: A path into the input, such as "buffers[3].size", or the op, file or option concerned.
        hint: The user's next step.
        see: What `memplan help` prints about it: a heading of docs/refused.md, by its id.

    Example:
        >>> try:
        ...     plan = memplan.plan(model, inputs, budget="1GiB")
        ... except memplan.MemplanError as error:
        ...     print(error.what, error.where, error.hint)
    """

    see: str | None = None

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None, see: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        if see is not None:  # otherwise that of the class
            self.see = see
        super().__init__(what, where, hint)

    @property
    def summary(self) -> str:
        """The error in one line: where and what, without the next step."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        lines = [self.summary]
        if self.hint:
            lines.append(f"next step: {self.hint}")
        if self.see:
            lines.append(f"more: memplan help {self.see}")
        return "\n  ".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copying and pickling need, since subclasses take other arguments than `args`."""
        return _remade, (type(self), self.args), dict(self.__dict__)


def _remade(kind: type[MemplanError], args: tuple[Any, ...]) -> MemplanError:
    """Return an error whose attributes are set afterwards."""
    return kind.__new__(kind, *args)


@contextmanager
def located(where: str, hint: str | None = None) -> Iterator[None]:
    """Say of errors that are raised inside where they are: in the file, or of the option, `where`; and the next step.

    Example:
        >>> with located("--capacity"):
        ...     parse_size("3 apples")
    """
    try:
        yield
    except MemplanError as error:
        error.where = f"{where}: {error.where}" if error.where else where
        error.hint = error.hint or hint
        raise


class InvalidProblem(MemplanError, ValueError):
    """A buffer or problem is invalid: it has a negative size, an empty id, or an end before its start."""


class InvalidSolution(MemplanError, ValueError):
    """The independent validator rejects a solution; `violation` says why (see `validate.Violation`)."""

    def __init__(self, what: str, *, violation: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.violation = violation


class UnsupportedProblem(MemplanError, ValueError):
    """The named solver does not support this problem (pinned offsets, gaps, ...)."""


class UnreadableFile(MemplanError, ValueError):
    """A file cannot be read or written, or is malformed: a CSV without its header, JSON that does not parse."""


class InvalidPlan(UnreadableFile):
    """The content of a plan file contradicts its schema or itself."""


class InvalidOutput(MemplanError, ValueError):
    """An output file would overwrite an input, Python source or another output of the same command."""


class InvalidSize(MemplanError, ValueError):
    """A size, share, step or option has no valid value, such as "3GiB", "2%" or a number of blocks."""


class InvalidShapes(MemplanError, ValueError):
    """`dynamic_shapes` do not match the model and its example, or the model does not allow them."""

    see = "dynamic-shapes"


class InvalidModel(MemplanError, ValueError):
    """A model cannot be loaded: there is no such file or factory, or the factory failed or returned something else."""


class TorchNotInstalled(MemplanError, ImportError):
    """Something that needs torch was used where torch is not installed; the hint has the command that installs it."""

    see = "torch"


class LibraryNotInstalled(MemplanError, ImportError):
    """A library that memplan works with, such as Lightning, is not installed; the hint has the command for it."""

    see = "library"


class PlanMismatch(MemplanError, ValueError):
    """A plan was made for another graph; `where` names the first difference."""

    see = "other-plan"


class UnknownName(MemplanError, LookupError):
    """A plan does not have this name, or the name is ambiguous; the hint lists similar names."""


class UnsupportedGraph(MemplanError, ValueError):
    """A model cannot be traced as one graph, or holds an op that cannot be planned. Nothing was allocated."""

    def __init__(self, node: str, reason: str, hint: str, *, see: str | None = None) -> None:
        self.node = node
        self.reason = reason
        super().__init__(reason, where=node, hint=hint, see=see)


class UnsupportedDevice(MemplanError, ValueError):
    """A device is not available, or the model cannot run on it this way."""


class InputMismatch(MemplanError, ValueError):
    """The inputs, parameters or mode of a call differ from those that the plan was made for."""

    see = "other-call"


class ShapeOutOfRange(InputMismatch):
    """A size is outside the range of a symbolic plan, or violates a condition that was traced."""

    see = "shape-out-of-range"


class StaleActivationsError(MemplanError, RuntimeError):
    """The saved activations of a backward are gone, or a forward would overwrite those of a step in flight."""


class UnsupportedCall(MemplanError, RuntimeError):
    """A planned step does not support this use of autograd (double backward, a retained graph)."""


class TornStep(MemplanError, RuntimeError):
    """The last step ended in the middle of its update, so that some parameters and states are updated, others not."""

    see = "torn-step"


class ArenaCorruption(MemplanError, RuntimeError):
    """A sanitizer found changed bytes in a red zone: a kernel wrote outside its buffer."""


class InvalidCosts(MemplanError, ValueError):
    """A cost model is unknown, or has an impossible rate or time."""


class InvalidEviction(MemplanError, ValueError):
    """An eviction would lose or change results: the bytes that an op needs are not there, or have changed."""


class BudgetInfeasible(MemplanError, ValueError):
    """No plan keeps a budget, which `where` names.

    `op` is the op that needs the most, `smallest` the smallest budget that can be kept, in bytes.
    """

    see = "budget"

    def __init__(self, what: str, *, op: str, smallest: int, where: str | None = None, hint: str | None = None) -> None:
        self.op = op
        self.smallest = smallest
        super().__init__(what, where=where, hint=hint)


class CollectiveFailed(MemplanError, RuntimeError):
    """A collective failed while a step ran: a rank died, or did not come in time.

    The process group cannot be used any more. What the step has changed is not undone; the message says whether some
    parameters may be updated, and others not.
    """

    see = "ranks-fail"


class RanksDiffer(MemplanError):
    """The ranks of a process group would run other collectives, or have other versions or options.

    It is raised on every rank before anything runs, and names the first difference.
    """

    see = "ranks-differ"
