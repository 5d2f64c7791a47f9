"""Reads the lines of an Inductor wrapper as changes of its Python variables: what makes, shares and drops memory."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import DeferredLineBase
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from memplan.errors import UnsupportedGraph
from memplan.integrations.inductor.temporaries import Temporaries
from memplan.torch_inside.versions import PLAIN_LINES, why_not_planned

_ASSIGNS = re.compile(r"^(\w+) = ")
# Beside those that touch no memory: kernels that write into their arguments, numbers, and pools, whose bytes count too.
_HARMLESS = PLAIN_LINES | {
    *("ExternKernelMultiOutLine", "ExternKernelOutLine", "IndexPutFallbackLine", "KernelCallLine"),
    *("KernelDefinitionLine", "ScatterFallbackLine"),
    *("DynamicScalarLine", "SymbolicCallArgLine", "UnbackedSymbolDefsLine"),
    *("EnterCudaMemPoolContextLine", "ExitCudaMemPoolContextLine"),
}
_BY_LIBRARIES = (
    *("ExternKernelAllocLine", "ExternKernelMultiOutLine", "ExternKernelOutLine"),
    *("IndexPutFallbackLine", "ScatterFallbackLine"),
)


class Act(enum.Enum):
    """The effect of a line on a variable."""

    MAKE = "makes a tensor in new memory"
    SHARE = "names the memory of another variable"
    DROP = "forgets a variable, and its items (`buf0[1]`) if it is a tuple"
    NEED = "needs memory while it runs, beside its operands and results"


class Change(NamedTuple):
    """One change: `name` is the variable. SHARE: `of` are the variables whose memory it names. MAKE, NEED: `nbytes`."""

    act: Act
    name: str
    nbytes: int = 0
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperChanges:
    """The work of one wrapper: it is called with `inputs`, makes `changes` and returns `outputs` (None: no tensor).

    `strides` are those of each output, None where it is no tensor.
    """

    inputs: tuple[str, ...]
    changes: tuple[Change, ...]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[int, ...] | None, ...]


def read_wrapper(graph: GraphLowering, temporaries: Temporaries) -> WrapperChanges:
    """Return what the wrapper of a lowered graph does; `temporaries` measures the kernels that allocate by themselves.

    Raises `UnsupportedGraph` for a line whose effect on memory is not known.

    Example:
        >>> read_wrapper(lowered.forward, Temporaries()).changes[0]
        Change(act=<Act.MAKE: 'makes a tensor in new memory'>, name='buf0', nbytes=4096, of=())
    """
    with V.set_graph_handler(graph):
        changes: list[Change] = []
        line: Any
        for line in graph.wrapper_code.lines:
            made = list(_changes(graph, line))
            if type(line).__name__ in _BY_LIBRARIES:
                results = sum(change.nbytes for change in made)
                changes.append(Change(Act.NEED, line.node.get_name(), temporaries.of(line.node) + results))
            changes += made
        return WrapperChanges(
            inputs=tuple(graph.graph_input_names),
            changes=tuple(changes),
            outputs=tuple(map(_variable, graph.graph_outputs)),
            strides=tuple(map(_strides, graph.graph_outputs)),
        )


def storage_bytes(graph: GraphLowering, buffer: Any) -> int:
    """Return the bytes of the memory that Inductor allocates for a buffer; 0 for what is no tensor.

    Raises `UnsupportedGraph` for a size that varies from call to call.
    """
    if not isinstance(buffer.get_output_spec(), ir.Layout) or isinstance(
        buffer.get_output_spec(), (ir.NoneLayout, ir.MultiOutputLayout)
    ):
        return 0
    count = graph.get_allocation_storage_size(buffer)
    try:
        return int(count) * int(buffer.get_dtype().itemsize)
    except TypeError as error:
        hint = "compile with torch.compile(model, dynamic=False): each shape is then partitioned for itself"
        what = "its size varies from call to call, so the bytes of a step are not known"
        raise UnsupportedGraph(buffer.get_name(), what, hint, see="partitioner") from error


def _changes(graph: GraphLowering, line: Any) -> Iterator[Change]:
    """Yield the changes that a line makes."""
    match type(line).__name__:
        case "AllocateLine":
            yield Change(Act.MAKE, line.node.get_name(), storage_bytes(graph, line.node))
        case "ReuseLine" | "ReinterpretLine" as kind:
            yield Change(Act.SHARE, line.reused_as.get_name(), of=(line.node.get_name(),))
            if kind == "ReuseLine" and line.delete_old:
                yield Change(Act.DROP, line.node.get_name())
        case "FreeIfNotReusedLine" | "FreeLine" as kind:
            if kind == "FreeLine" or not line.is_reused:
                yield Change(Act.DROP, line.node.get_name())
        case "MultiOutputLine":
            yield Change(Act.SHARE, line.result_name, of=(f"{line.arg_name}{_place(line.indices)}",))
        case "ExternKernelAllocLine":
            yield from _made_by_kernel(graph, line.node)
        case kind if isinstance(line, (str, DeferredLineBase)):
            yield from _made_by_text(graph, line if isinstance(line, str) else line.line)
        case kind if kind not in _HARMLESS:
            what = f"Inductor's wrapper has {why_not_planned(line)}, whose effect on memory is not known"
            hint = "use torch._functorch.config.activation_memory_budget, or memplan.compile"
            raise UnsupportedGraph(kind, what, hint, see="partitioner")


def _made_by_kernel(graph: GraphLowering, node: Any) -> Iterator[Change]:
    """Yield the results of a kernel that allocates them itself; those of several are named by their places."""
    name = node.get_name()
    shared = tuple(node.get_inputs_that_alias_output())
    if not isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        yield Change(Act.SHARE, name, of=shared) if shared else Change(Act.MAKE, name, storage_bytes(graph, node))
        return
    results = [one for one in pytree.tree_leaves(getattr(node, "outputs", ())) if isinstance(one, ir.MultiOutput)]
    places = []
    for one in results:
        places.append(f"{name}{_place(one.indices)}")
        if shared:
            yield Change(Act.SHARE, places[-1], of=shared)
        else:
            yield Change(Act.MAKE, places[-1], storage_bytes(graph, one))
    yield Change(Act.SHARE, name, of=tuple(places))


def _made_by_text(graph: GraphLowering, line: str) -> Iterator[Change]:
    """Yield the buffer that a line of plain text makes, if it makes one."""
    found = _ASSIGNS.match(line.strip())
    buffer = graph.name_to_buffer.get(found.group(1)) if found else None
    if buffer is not None:
        yield Change(Act.MAKE, buffer.get_name(), storage_bytes(graph, buffer))


def _place(indices: Any) -> str:
    return "".join(f"[{index}]" for _, index in indices)


def _variable(out: Any) -> str | None:
    """Return the variable whose memory a result is in."""
    if not isinstance(out, ir.IRNode) or not out.has_tensor_output():
        return None
    if isinstance(out, ir.ShapeAsConstantBuffer):
        return None
    return str(out.get_name())


def _strides(out: Any) -> tuple[int, ...] | None:
    if _variable(out) is None:
        return None
    return tuple(int(s) for s in out.get_layout().stride)
