"""Turns runs of ops into one call of torch's TorchScript interpreter, which takes less time per op than Python.

A run becomes a TorchScript graph. Tensors in the arena are constants of the graph. Parameters and other tensors that
may move are in one list, which is passed in every call; tensors that change from call to call are arguments; tensors
that the caller will own are made in the graph and returned. No optimization pass may change the graph: it could fold
constants, whose contents change, or remove ops whose results are read elsewhere. So the generated code turns the
executor's optimization off for its thread. The interpreter releases the GIL.

Python runs the ops that the interpreter does not know (hyperparameters, opaque results, memplan's own functions), and
ops that may fail for some numbers with an error whose type cannot be restored: the interpreter raises a plain
`RuntimeError` for every error, and `raise_as_eager` restores the message of the kernel, and from it the type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

from memplan.runtime.codegen.step_ir import Call, CallbackLine, Empty, Layout, Line, View, refs
from memplan.runtime.codegen.torchscript_writer import TENSOR, TorchScriptWriter, overload_of
from memplan.trace.passes.randomness import draws
from memplan.trace.traced import Computed, Live, OpaqueResult, Ref

# Ops whose message for an index out of range is unambiguous, or that raise a plain RuntimeError in eager too.
_UNAMBIGUOUS = {"index_select", "nll_loss_forward", "nll_loss_backward", "max_pool2d_with_indices_backward"}
_UNAMBIGUOUS |= {"_unsafe_index", "_unsafe_index_put"}
_INDEX_ERROR = re.compile(r"index out of range in self$|Target -?\d+ is out of bounds\.$", re.MULTILINE)
# With the same message, the first ops raise an IndexError and the second a RuntimeError.
_RAISES_INDEX_ERROR = {"index", "index_put", "index_put_"}
_RAISES_RUNTIME_ERROR = {"index_add", "index_add_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"}
_OUT_OF_BOUNDS = re.compile(r"index -?\d+ is out of bounds for dimension \d+ with size \d+$", re.MULTILINE)
_INDEX_ARGUMENTS = {"index", "indices", "target", "repeats", "offsets", "mask_indices"}
_MAY_FAIL = ("linalg_", "_linalg_", "cholesky", "lu_", "_assert", "_cdist")
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
)  # raised by torch's bindings for arguments that they do not take
_UNSUPPORTED = object()  # stands for arguments that only Python can pass
_ERROR_PREFIX = (
    "The following operation failed in the TorchScript interpreter.\n"
    "Traceback of TorchScript (most recent call last):\nRuntimeError: "
)  # without a source location, which the error of a user's script has
_NEEDED = ("Graph", "ScriptList", "_create_function_from_graph", "_jit_interpret_graph")
AVAILABLE = all(hasattr(torch._C, name) for name in _NEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreted:
    """A run as a function, called as `function(tensors, *arguments)`.

    `arguments` are the values that change from call to call. `tensors` is the list of static tensors, whose values are
    `values` (None: a tensor that is no value).
    """

    function: Any
    tensors: Any
    values: tuple[int | None, ...]
    arguments: tuple[int, ...]


def can_interpret(line: Line, layout: Layout, asked: dict[Any, bool]) -> bool:
    """Return whether torch's interpreter runs the same kernel for a line, and it cannot fail if the trial run did not.

    `asked`: a cache of the answers, by overload and kinds of arguments.
    """
    if isinstance(line, CallbackLine):
        return False
    if isinstance(line, Empty):
        return True
    if isinstance(line, View):
        one, two = (layout.graph.values[i] for i in (line.base, line.value))
        return one.dtype == two.dtype and two.storage in layout.fresh_storages
    overload = overload_of(line)
    if overload is None or overload.namespace != "aten" or line.adopted or line.bound.opaque_results:
        return False
    kinds = _kinds(line.arguments)
    if _UNSUPPORTED in kinds:
        return False
    if overload._opname.startswith(_MAY_FAIL) or _index_may_fail(line, overload, layout):
        return False
    if any(
        r.type.kind() != "TensorType" for r in overload._schema.returns
    ):  # the interpreter returns a list of tensors as one result
        return False
    if draws(overload, *line.arguments) and "Tensor" in overload._overloadname:  # its probabilities are a tensor
        return False
    key = (overload, line.bound.out_names, kinds)
    if key not in asked:
        asked[key] = _finds_overload(line, layout)
    return asked[key]


def separate_index_errors(lines: Sequence[Line], fitting: Sequence[bool]) -> tuple[list[bool], bool]:
    """Return which of the fitting lines may run in one function, and whether "out of bounds" is an `IndexError` in it.

    Ops that raise different types with the same message are not combined (see `raise_as_eager`).
    """
    names = [o._opname if isinstance(line, Call) and (o := overload_of(line)) is not None else "" for line in lines]
    if not any(fit and name in _RAISES_RUNTIME_ERROR for fit, name in zip(fitting, names, strict=True)):
        return list(fitting), True
    return [fit and name not in _RAISES_INDEX_ERROR for fit, name in zip(fitting, names, strict=True)], False


def _kinds(thing: Any) -> tuple[Any, ...]:
    """Return what selects an overload in torch's interpreter: the types of numbers, and which arguments are tensors."""
    if isinstance(thing, (Ref, torch.Tensor)):
        return (torch.Tensor,)
    if isinstance(thing, (OpaqueResult, Live, Computed)):
        return (_UNSUPPORTED,)
    if isinstance(thing, (list, tuple)):
        return (type(thing), *(kind for item in thing for kind in _kinds(item)), None)
    if isinstance(thing, dict):
        return tuple(kind for name, item in thing.items() for kind in (name, *_kinds(item)))
    return (type(thing) if isinstance(thing, (int, float, str)) else thing,)


def make_interpreted(
    run: Sequence[Line], results: Sequence[int], layout: Layout, names: Mapping[str, Any]
) -> Interpreted:
    """Return one function for a run of lines that `can_interpret` accepts. `names` has the static values, as `v12`."""
    used = {v for line in run for v in line.uses} & layout.placed if _constants_are_memory() else set()
    placed = {v: names[f"v{v}"] for v in sorted(used)}
    writer = TorchScriptWriter(run, layout, placed)
    for line in run:
        writer.write(line)
    tensors = [thing if isinstance(thing, torch.Tensor) else names[f"v{thing}"] for thing in writer.static]
    return Interpreted(
        function=_function_of("memplan_run", writer.returning(results)),
        tensors=torch._C.ScriptList(tensors),
        values=tuple(None if isinstance(thing, torch.Tensor) else thing for thing in writer.static),
        arguments=tuple(writer.arguments),
    )


def _function_of(name: str, graph: Any) -> Any:
    made: Any = torch._C._create_function_from_graph(name, graph)
    made._torchdynamo_inline = partial(_interpret, graph)  # torch calls this while any thread exports a model
    return made


def _interpret(graph: Any, *given: Any) -> Any:
    """Run the graph by the same interpreter, without the function; `given` begins with the tensors of the run."""
    tensors = [list(tensors) for tensors in given[:1]]
    return torch._C._jit_interpret_graph(graph, (*tensors, *given[1:]))  # type: ignore[attr-defined]


def raise_as_eager(error: RuntimeError, *, indexed: bool) -> None:
    """Raise an error of a run as the kernel in eager would; return for other errors.

    `indexed`: the second result of `separate_index_errors`.
    """
    words = str(error)
    if words.startswith(_ERROR_PREFIX):
        said = words.removeprefix(_ERROR_PREFIX).removesuffix("\n")
        by_index = _INDEX_ERROR.match(said) or (indexed and _OUT_OF_BOUNDS.match(said))
        raise (IndexError if by_index else RuntimeError)(said) from None


@cache
def _constants_are_memory() -> bool:
    """Return whether this version of torch reads and writes the memory of a graph's constants at every run.

    It must not fold constants, nor remove ops whose results the graph itself does not read.
    """
    graph: Any = torch._C.Graph()

    def call(name: str, *inputs: Any) -> Any:
        made = graph.insertNode(graph.create(name, list(inputs), 1)).output()
        made.setType(TENSOR)
        return made

    read, written = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    x, one = graph.insertConstant(read), graph.insertConstant(1)
    made = call("aten::add", call("aten::mul", call("aten::neg", x), x), x, one)
    call("aten::add", made, x, one, graph.insertConstant(written))
    graph.registerOutput(made)
    run = _function_of("memplan_probe", graph)
    was = torch._C._get_graph_executor_optimize()
    try:
        torch._C._set_graph_executor_optimize(False)
        found = [(run(), written.clone()) for i in range(4) if read.fill_(i) is read]
    finally:
        torch._C._set_graph_executor_optimize(was)
    return all((one.item(), two.item()) == (i - i * i, 2 * i - i * i) for i, (one, two) in enumerate(found))


def _index_may_fail(line: Call, overload: OpOverload, layout: Layout) -> bool:
    """Return whether an op takes indices, and its error for an index out of range cannot be restored."""
    if overload._opname in _UNAMBIGUOUS | _RAISES_INDEX_ERROR | _RAISES_RUNTIME_ERROR:
        return False
    args, kwargs = line.arguments
    named = {**dict(zip((a.name for a in overload._schema.arguments), args, strict=False)), **kwargs}
    indices = [v for name, thing in named.items() if name in _INDEX_ARGUMENTS for v in refs(thing)]
    return any(layout.graph.values[v].dtype in ("int64", "int32") for v in indices)


def _finds_overload(line: Call, layout: Layout) -> bool:
    """Return whether torch's interpreter finds the same overload from the arguments of a call."""
    overload = overload_of(line)
    try:
        writer = TorchScriptWriter([line], layout, {})  # its graph must outlive the nodes that are read here
        return bool(writer.call(line).schema() == str(overload._schema))  # type: ignore[union-attr]
    except _FAILURES:
        return False
