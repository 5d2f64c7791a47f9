"""Every error that memplan raises: what is wrong, where, the limit that was met, and the next step.

All derive from `MemplanError`, so `except memplan.MemplanError` catches everything that memplan says on
purpose; anything else that escapes is a bug. The command line prints them without a traceback and exits 2.
"""

from __future__ import annotations

from typing import Any


class MemplanError(Exception):
    """Base class. `where` is a path into the input ("buffers[3].size"), `hint` the user's next step."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  next step: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, as between processes: subclasses take other arguments than `args`."""
        return _remade, (type(self), self.args), dict(self.__dict__)


def _remade(kind: type[MemplanError], args: tuple[Any, ...]) -> MemplanError:
    """An error whose attributes are still to be set."""
    return kind.__new__(kind, *args)


class InvalidProblem(MemplanError, ValueError):
    """A buffer or problem that cannot exist: negative size, an empty id, an end before its start."""


class InvalidSolution(MemplanError, ValueError):
    """A solution that the independent validator refuses; `violation` says why (see `validate.Violation`)."""

    def __init__(self, what: str, *, violation: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.violation = violation


class SolverFault(UserWarning):
    """A warning: a part of the solver gave a wrong answer, which was dropped. A bug to report; the plan is valid."""


class UnsupportedProblem(MemplanError, ValueError):
    """The named solver does not take this problem (pinned offsets, gaps, ...)."""


class UnreadableFile(MemplanError, ValueError):
    """A file that is not what it should be: a CSV without its header, JSON that does not parse."""


class InvalidPlan(UnreadableFile):
    """A plan file whose content contradicts its schema or itself."""


class InvalidOutput(MemplanError, ValueError):
    """An output file that would overwrite an input, Python source or another output of the same command."""


class InvalidSize(MemplanError, ValueError):
    """A size, share, step or option that means nothing: no "3GiB", no "2%", no number of blocks."""


class InvalidShapes(MemplanError, ValueError):
    """`dynamic_shapes` that make no sense for the model and its example, or that the model does not allow."""


class InvalidModel(MemplanError, ValueError):
    """A model that cannot be had: no such file or factory, or a factory that failed or does not do what it must."""


class PlanMismatch(MemplanError, ValueError):
    """A plan made for another graph; `where` names the first difference."""


class UnknownName(MemplanError, LookupError):
    """A name that a plan does not have, or that means several things; the hint lists what comes close."""


class UnsupportedGraph(MemplanError, ValueError):
    """A model that cannot be traced as one graph or holds an op that cannot be planned. Nothing was allocated."""

    def __init__(self, node: str, reason: str, hint: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(reason, where=node, hint=hint)


class UnsupportedDevice(MemplanError, ValueError):
    """A device that is not there, or on which the model cannot run this way."""


class InputMismatch(MemplanError, ValueError):
    """A call whose inputs, parameters or mode differ from those that the plan was made for."""


class ShapeOutOfRange(InputMismatch):
    """A size that a symbolic plan was not made for: outside its range, or under a condition that was traced."""


class StaleActivationsError(MemplanError, RuntimeError):
    """A backward whose saved activations are gone, or a forward that would destroy those of a step in flight."""


class UnsupportedCall(MemplanError, RuntimeError):
    """A use of autograd that a planned step cannot serve (double backward, a retained graph)."""


class ArenaCorruption(MemplanError, RuntimeError):
    """A guard found bytes changed that nobody may touch: a kernel wrote outside its buffer."""


class LimitExceeded(MemplanError, ValueError):
    """A limit given by the user that a plan does not keep (raised by the pytest plugin; the CLI exits 1)."""


class InvalidCosts(MemplanError, ValueError):
    """A cost model that is not known, or with a rate or a time that cannot be."""


class InvalidEviction(MemplanError, ValueError):
    """An eviction that would lose or change a number: what it needs is not there, or not what it was."""


class BudgetInfeasible(MemplanError, ValueError):
    """A budget that no plan keeps. `op` is the op whose working set is the floor, `smallest` the bytes that do."""

    def __init__(self, what: str, *, op: str, smallest: int, where: str | None = None, hint: str | None = None) -> None:
        self.op = op
        self.smallest = smallest
        super().__init__(what, where=where, hint=hint)
