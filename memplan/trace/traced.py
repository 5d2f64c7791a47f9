"""A traced step: the torch-free `Graph`, and beside it what torch needs to run it and to be called like the model."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from memplan.core.division import Division
from memplan.core.graph import Graph
from memplan.errors import UnsupportedProblem
from memplan.trace.capture.python_values import Reading


@dataclass(frozen=True, slots=True)
class Ref:
    """In a kernel's arguments: the tensor of this value (index into `Graph.values`)."""

    value: int


@dataclass(frozen=True, slots=True)
class OpaqueResult:
    """In a kernel's arguments: what an earlier kernel returned, as it is, by its number among all that is handed on.

    A random state is in the host's memory or in the device's, as the kernel pleases, and only its own backward
    understands it: it is no value of the graph, and no copy of it would do.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Live:
    """In a kernel's arguments: a hyperparameter, read from the optimizer's group at every call."""

    optimizer: torch.optim.Optimizer
    group: int
    key: str
    item: int | None = None

    def value(self) -> Any:
        """What it is now."""
        found = self.optimizer.param_groups[self.group][self.key]
        return found if self.item is None else found[self.item]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """What an op of the graph calls. `outs` are the values of its results (None where it returns none);
    empty for an op that only changes its arguments. `several`: it returns a sequence, even if of one.
    `opaque_results`: (position, number) of the results that are handed on as they are (see `OpaqueResult`).
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    several: bool = False
    opaque_results: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a copy between device and host does: `target` is one of `memplan.core.evictions.TRANSFERS`, `reads` and
    `writes` are its op's.
    """

    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Source(enum.Enum):
    """Where the bytes come from that the arena does not hold and no op makes."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    CONSTANT = "constant"
    STATE = "optimizer state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Value `value` is this tensor: a parameter or buffer by `name`, an input or tangent by `index`, a constant,
    or the optimizer's state `key` of the parameter `name`, or of the parameters `names`, an element each.

    `requires_grad` is an input's: it was traced with a gradient of its own. `written`: the step changes it.
    """

    source: Source
    value: int
    name: str = ""
    index: int = 0
    key: str = ""
    names: tuple[str, ...] = ()
    tensor: torch.Tensor | None = None
    requires_grad: bool = False
    written: bool = False


class ReturnKind(enum.Enum):
    """How a leaf of the module's result is made."""

    FRESH = "written by the step into memory that the caller owns"
    ALIAS = "a view of another leaf, an input or a parameter"
    CONSTANT = "not a tensor, or a tensor that never changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One leaf of the result. FRESH: `value`. ALIAS: the view `value` of `of` (a value index). CONSTANT: `constant`.

    An ALIAS that is not `differentiable` is detached, as eager's is.
    """

    kind: ReturnKind
    differentiable: bool = False
    value: int = -1
    of: int = -1
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What leaves a step; all numbers are value indices but those of `gradient_of`.

    `returned`: the leaves of the module's result, in order. `fresh`: what the forward hands to autograd, and
    `tangents[i]`: the gradient that comes back for `fresh[i]` (None: not differentiable). `gradients`: what
    the backward hands to autograd, `gradient_of[i]`: the binding (index) whose gradient `gradients[i]` is,
    `needs[i]`: the tangents (by index) without all of which it is None.
    """

    returned: tuple[Returned, ...]
    fresh: tuple[int, ...]
    tangents: tuple[int | None, ...]
    gradients: tuple[int, ...]
    gradient_of: tuple[int, ...]
    needs: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph, `kernels[i]` that runs `graph.ops[i]`, and how the step is fed and what it returns.

    `training`: it has a backward. `autocast`: the type it casts to, if traced under that. `readings`: which of Python's
    values are constants of it. `device` is where all planned storages are.
    `runs_on`: its name in plans (or those of several) when all else is on the host and copied by the plan
    (`offload_target.py`); none when it is not.
    `division`: how chains of rows were divided, with `over` settled; `compress`: how what waits is made smaller;
    `again` traces with others.
    """

    model: str
    graph: Graph
    kernels: tuple[KernelCall | Transfer, ...]
    bindings: tuple[Binding, ...]
    results: Results
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    example_inputs: tuple[Any, ...]
    training: bool
    autocast: torch.dtype | None
    device: torch.device
    readings: tuple[Reading, ...] = ()
    runs_on: tuple[str, ...] = ()
    division: Division | None = None
    compress: str = ""
    again: Callable[[Division | None, str], TracedGraph] | None = field(default=None, compare=False, repr=False)

    def divided(self, division: Division | None) -> TracedGraph:
        """The same step with its chains of rows divided so (None: whole)."""
        return self.rewritten(division, self.compress)

    def rewritten(self, division: Division | None, compress: str) -> TracedGraph:
        """The same, and with what waits for the backward compressed so ("": not)."""
        if (division, compress) == (self.division, self.compress):
            return self
        if self.again is None:
            hint = "leave out divide= and compress="
            raise UnsupportedProblem("this step cannot be traced once more", where="divide", hint=hint)
        return self.again(division, compress)

    def bound(self, source: Source) -> tuple[Binding, ...]:
        """The bindings of one source, in order."""
        return tuple(b for b in self.bindings if b.source is source)

    @property
    def handed(self) -> int:
        """How many results are handed on from kernel to kernel (see `OpaqueResult`)."""
        return 1 + max((n for k in self.kernels if isinstance(k, KernelCall) for _, n in k.opaque_results), default=-1)
