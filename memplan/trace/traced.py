"""The traced step: a torch-free `Graph`, with what torch needs to run it and to call it like the model."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from memplan.core.division import Division
from memplan.core.graph import Graph
from memplan.trace.capture.python_values import Reading


@dataclass(frozen=True, slots=True)
class Ref:
    """A kernel argument: the tensor of a value (index into `Graph.values`)."""

    value: int


@dataclass(frozen=True, slots=True)
class OpaqueResult:
    """A kernel argument: an opaque result of an earlier kernel, by its number among all opaque results of the step.

    A random state is in the host's or the device's memory, as the kernel chooses, and only the kernel's own backward
    understands it. It is no value of the graph, and a copy of it would not do.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Live:
    """A kernel argument: a hyperparameter that is read from the optimizer's group at every call."""

    optimizer: torch.optim.Optimizer
    group: int
    key: str
    item: int | None = None

    def value(self) -> Any:
        """Return its current value."""
        found = self.optimizer.param_groups[self.group][self.key]
        return found if self.item is None else found[self.item]


class CompiledLater(Protocol):
    """A kernel that has been generated, and is compiled when a program needs it."""

    def start(self) -> None:
        """Begin to compile it, beside the caller."""

    def compiled(self) -> Callable[..., Any]:
        """Return the function that runs it, when it is compiled."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratedKernel:
    """A kernel that a compiler generated, or that its code calls, in place of an ATen op.

    It writes into its arguments and returns no tensor that is used. `name` is the target of its ops, and has a digest
    of its `source`, if it was generated. `function` runs it; None: `later` has it. `draws`: it draws random numbers.
    """

    name: str
    function: Callable[..., Any] | None
    later: CompiledLater | None = None
    source: str = field(default="", repr=False)
    draws: bool = False

    def __str__(self) -> str:
        return self.name

    def start(self) -> None:
        """Begin to compile it, unless it is compiled."""
        if self.later is not None:
            self.later.start()

    def ready(self) -> Callable[..., Any]:
        """Return the function that runs it, when it is compiled."""
        if self.function is not None:
            return self.function
        assert self.later is not None
        return self.later.compiled()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """The call that an op of the graph makes: a kernel and its arguments.

    `outs`: the values of its results (None where it returns none); empty for an op that only changes its arguments.
    `returns_sequence`: it returns a sequence, even if of one result. `opaque_results`: (position, number) of each
    opaque result (see `OpaqueResult`). `state`: the value of the generator state with which it draws the same random
    numbers again; None: it draws from the generator, or not at all.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    returns_sequence: bool = False
    opaque_results: tuple[tuple[int, int], ...] = ()
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCall:
    """The call of a kernel that a compiler generated, which writes into its arguments. `state`: as in `KernelCall`."""

    kernel: GeneratedKernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Saves the state of the CPU's random generator in value `value`."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy between device and host.

    `target` is one of `memplan.core.evictions.TRANSFERS`; `reads` and `writes` are the values that its op reads and
    writes.
    """

    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


Kernel = KernelCall | GeneratedCall | SaveState | Transfer


class Source(enum.Enum):
    """The origin of a tensor that the arena does not hold and that no op makes."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    CONSTANT = "constant"
    STATE = "optimizer state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The tensor that value `value` of the graph is bound to.

    A parameter or buffer is bound by `name`, an input or tangent by `index`, a constant by `tensor`, and optimizer
    state by its `key` and the parameter `name`. `requires_grad`: the input, parameter or buffer required a gradient
    when it was traced. `written`: the step changes the tensor.
    """

    source: Source
    value: int
    name: str = ""
    index: int = 0
    key: str = ""
    tensor: torch.Tensor | None = None
    requires_grad: bool = False
    written: bool = False


class ReturnKind(enum.Enum):
    """The way in which a leaf of the module's result is made."""

    FRESH = "written by the step into memory that the caller owns"
    ALIAS = "a view of another leaf, an input or a parameter"
    CONSTANT = "not a tensor, or a tensor that never changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One output of the module.

    FRESH: `value`. ALIAS: the view `value` of `of` (a value index), which is made from output `view_of` if there is
    one. CONSTANT: `constant`. `detached`: eager's is detached. One that is not `differentiable` requires no gradient.
    """

    kind: ReturnKind
    differentiable: bool = False
    value: int = -1
    of: int = -1
    view_of: int | None = None
    detached: bool = False
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The values that leave a step. All numbers are value indices, except those of `gradient_of` and `needs`.

    `returned`: the outputs of the module, each tensor once; `leaves`: the output that each leaf of its result is.
    `fresh`: the outputs that the forward returns to autograd; `tangents[i]`: the gradient that comes in for `fresh[i]`
    (None: not differentiable). `gradients`: what the backward returns to autograd; `gradient_of[i]`: the index of the
    binding whose gradient `gradients[i]` is; `needs[i]`: the tangents (by index) that it depends on; it is None where
    none of them arrives.
    """

    returned: tuple[Returned, ...]
    leaves: tuple[int, ...]
    fresh: tuple[int, ...]
    tangents: tuple[int | None, ...]
    gradients: tuple[int, ...]
    gradient_of: tuple[int, ...]
    needs: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph, the kernel call of each of its ops, its inputs and its results.

    `kernels[i]` runs `graph.ops[i]`. `training`: the step has a backward. `autocast`: the type that autocast casts to,
    if the step was traced under it. `readings`: the Python values that are constants of the step. `device`: where all
    planned storages are. `runs_on`: the names of the devices in plans where everything else is on the host and the plan
    copies it; empty otherwise. `division`: how chains of rows were divided, with `over` settled. `compress`: how saved
    activations are compressed. `attention`: why attention runs in single ops on a GPU, or "".
    """

    model: str
    graph: Graph
    kernels: tuple[Kernel, ...]
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
    attention: str = ""

    def without_data(self) -> TracedGraph:
        """Return the graph with tensors on the meta device in place of the example's."""
        return replace(self, example_inputs=without_data(self.example_inputs))

    def bound(self, source: Source) -> tuple[Binding, ...]:
        """Return the bindings of one source, in order."""
        return tuple(b for b in self.bindings if b.source is source)

    def input_name(self, index: int) -> str:
        """Return the name of a leaf of the example's inputs, for messages (see `named_leaves`)."""
        return named_leaves(*pytree.tree_unflatten(list(self.example_inputs), self.in_spec))[index][0]

    def with_outside(self, storages: Collection[int]) -> TracedGraph:
        """Return the step with these storages outside the arena."""
        return replace(self, graph=self.graph.with_outside(storages))

    @property
    def opaque_count(self) -> int:
        """The number of opaque results, which go from kernel to kernel (see `OpaqueResult`)."""
        return 1 + max((n for k in self.kernels if isinstance(k, KernelCall) for _, n in k.opaque_results), default=-1)


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(function: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, by name; none for what has no signature."""
    with suppress(TypeError, ValueError):
        return inspect.signature(function).parameters  # type: ignore[arg-type]
    return {}


def named_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
) -> list[tuple[str, Any]]:
    """Return the leaves of a call, each with a name for messages: that of the argument, as `forward` calls it.

    Such as "input 'mask'", "input 'batch'['labels']" or, where there is no name, "input 0".
    """
    names = [name for name, p in parameters_of(forward).items() if p.kind in POSITIONAL]
    given = [(names[i] if i < len(names) else i, x) for i, x in enumerate(args)]
    return [(f"input {name!r}{place}", leaf) for name, x in (*given, *kwargs.items()) for place, leaf in _placed(x)]


def _placed(x: Any) -> list[tuple[str, Any]]:
    """Return the leaves of an argument, each with its place in it, such as "['labels']"."""
    try:
        return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(x)[0]]
    except ValueError:  # a class whose parts have no names
        return [(f"[{i}]", leaf) for i, leaf in enumerate(pytree.tree_leaves(x))]


def without_data(leaves: Collection[Any]) -> tuple[Any, ...]:
    """Return leaves with a tensor on the meta device in place of each tensor."""
    return tuple(_meta(x) if isinstance(x, torch.Tensor) else x for x in leaves)


def _meta(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return made.requires_grad_() if x.requires_grad else made
