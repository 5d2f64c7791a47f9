"""The wrapper that records what Inductor's own wrapper writes, for memplan's compilations only.

Inductor makes one wrapper for each graph, from a class that is registered for the whole process. `recording` registers
`RecordingWrapper` under the lock that every compilation of torch takes, and restores the registration afterwards.
Meanwhile, compilations of other threads still get Inductor's own class.

It also decides which loops one generated kernel runs, and notes what they may overwrite. On the CPU, Inductor writes
loops that have nothing to do with each other into one kernel, as long as no other kernel has to run between them. All
that they touch is then alive at once. The same holds for loops over several blocks of rows. Inductor lets a kernel
write over a buffer that has its last use there, and over what the forward has saved where AOTAutograd donates it to
the backward. The latter is a choice of the plan: what is saved may have to be computed again later, or be read once
more. So Inductor generates such kernels with a result of its own, and the pairs that are found here become in-place
candidates.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config, ir
from torch._inductor.codegen import common
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import DeferredLineBase
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from memplan.core.graph import Origin
from memplan.devices.kinds import HOST
from memplan.torch_inside.versions import PLAIN_LINES, why_not_planned
from memplan.trace.capture.origins import origin_of
from memplan.trace.fused.deferred import DeferringCompile
from memplan.trace.fused.environment import refused
from memplan.trace.fused.kernel_runs import Allocation, KernelLine, Renaming, TensorSpec, WrittenCode, WrittenLine
from memplan.trace.fused.masked_reads import reads_where_it_writes
from memplan.trace.fused.row_parts import BLOCK

_DIVISIONS = (FloorDiv, ModularIndexing)  # Inductor simplifies indices without them by itself


class Overwriting:
    """Follows the loops that are written into one kernel after another.

    `found` are the buffers, by the name of a result, whose bytes it may take: the loop that writes the result reads
    such a buffer at the index that it writes, and no later loop of the kernel reads it. Of loops that were fused into
    one, those that read it do so at the same index.
    """

    def __init__(self, found: dict[str, tuple[str, ...]]) -> None:
        self._found = found
        self._pairs: dict[tuple[str, str], None] = {}  # of the present kernel: (result, buffer)

    def add(self, loops: Sequence[Any], elements: Any = None) -> None:
        """Follow loops that were fused into one, in their order.

        `elements`: how many a loop over all of the kernel's range has; a result of fewer gets bytes of its own. None:
        of any.
        """
        seen: dict[str, set[Any]] = {}
        users = Counter[str]()
        for loop in loops:
            for dep in loop.read_writes.reads_and_writes():
                seen.setdefault(dep.name, set()).add(dep)
            read = {dep.name for dep in loop.read_writes.reads}
            users.update(read)
            self._pairs = {pair: None for pair in self._pairs if pair[1] not in read}
            if elements is not None and any(dep.get_numel() != elements for dep in loop.read_writes.writes):
                continue
            for result, dep, masked in _same_index(loop):
                if len(seen[dep.name]) == 1 and not (masked and users[dep.name] > 1):
                    self._pairs[result, dep.name] = None

    def end(self) -> None:
        """End the present kernel."""
        for result, buffer in self._pairs:
            self._found[result] = (*self._found.get(result, ()), buffer)
        self._pairs = {}


def _same_index(loop: Any) -> Iterator[tuple[str, MemoryDep, bool]]:
    """Yield the result of a loop, and a read, for each that is at the index of the loop's only write.

    True with it: it is so only where the mask of the read holds.
    """
    if loop.is_template() or len(loop.read_writes.writes) != 1:
        return
    (write,) = loop.read_writes.writes
    (result, *others) = loop.get_outputs()
    fixed = V.graph.never_reuse_buffers
    if others or not isinstance(write, MemoryDep) or write.mode is not None or write.name != result.get_name():
        return
    if result.get_aliases() or result.get_mutations() or write.name in fixed:
        return
    for read in loop.read_writes.reads:
        if not isinstance(read, MemoryDep) or read.name in fixed or read.name in V.graph.scheduler.mutation_real_name:
            continue
        same = (read.index, read.size) == (write.index, write.size)
        ours = not config.allow_buffer_reuse  # else Inductor decides on the bytes, and looks at the indices only
        if same or (ours and read.index.has(*_DIVISIONS) and reads_where_it_writes(loop, read.name)):
            yield write.name, read, not same


def followed(make: Any, device_type: str, overwriting: Overwriting, *, in_blocks: bool = False) -> Any:
    """Return what makes the scheduling of a graph: as `make`, but `overwriting` follows the loops of its kernels.

    Each loop stays as it is, and so do its results.

    Args:
        make: Inductor's own.
        device_type: The kind of the device.
        overwriting: Is told of each loop.
        in_blocks: The graph was divided by rows: no kernel computes parts of two blocks.
    """
    follows = _FollowedGroups if device_type == HOST and config.cpu_backend == "cpp" else _FollowedKernels

    def made(scheduler: Any) -> Any:
        """Return the scheduling of a graph, which is of the class that Inductor has for the device."""
        own = make(scheduler)
        own.__class__ = type(type(own).__name__, (follows, type(own)), {})
        own.overwriting, own.in_blocks, own.blocks = overwriting, in_blocks, set()
        return own

    return made


class _FollowedKernels:
    """Scheduling of which each kernel is one loop, as Triton's: no kernel computes parts of two blocks of rows."""

    overwriting: Overwriting
    in_blocks: bool
    blocks: set[int]

    def codegen_node(self, node: Any) -> None:
        """Write the kernel of one node.

        Several threads may read an element of a tensor that is smaller than the kernel's range, and one writes it:
        Inductor puts a barrier there only where it knows that both are the same bytes.
        """
        self.overwriting.add(node.get_nodes(), sympy.prod(node.group[1]))
        super().codegen_node(node)  # type: ignore[misc]
        self.overwriting.end()

    def can_fuse_horizontal(self, node1: Any, node2: Any) -> bool:
        """Return whether two loops may become one."""
        return not self._apart(node1, node2) and bool(super().can_fuse_horizontal(node1, node2))  # type: ignore[misc]

    def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
        """Return whether a loop and one that reads its result may become one."""
        return not self._apart(node1, node2) and bool(super().can_fuse_vertical(node1, node2))  # type: ignore[misc]

    def _apart(self, one: Any, other: Any) -> bool:
        """Return whether two loops compute different blocks of rows."""
        if not self.in_blocks:
            return False
        mine, theirs = _blocks_of(one), _blocks_of(other)
        return bool(mine and theirs and mine != theirs)


class _FollowedGroups(_FollowedKernels):
    """Scheduling of C++, where one kernel may run several loops: it begins a new one for another block of rows."""

    def codegen_node(self, node: Any) -> None:
        """Write the loop of one node, into a new kernel if need be."""
        blocks = _blocks_of(node) if self.in_blocks else set()
        if self.blocks and blocks and blocks != self.blocks:
            self.flush()
        self.blocks |= blocks
        self.overwriting.add(node.get_nodes())
        super(_FollowedKernels, self).codegen_node(node)  # type: ignore[misc]

    def flush(self) -> None:
        """End the present kernel."""
        super().flush()  # type: ignore[misc]
        self.overwriting.end()
        self.blocks = set()


def _blocks_of(node: Any) -> set[int]:
    """Return the blocks of rows that a loop computes; none for a loop over whole tensors.

    A constant is of no block: Inductor makes one of equal ones.
    """
    origins = (origin for one in node.get_nodes() for origin in getattr(one.node, "origins", ()))
    return {origin.meta[BLOCK] for origin in origins if BLOCK in origin.meta and origin.all_input_nodes}


_current = threading.local()  # .code: what the compilation of this thread writes


@contextlib.contextmanager
def recording(device_type: str, *, in_blocks: bool = False) -> Iterator[WrittenCode]:
    """Record the code of the one graph that this thread compiles inside. The options are those of `followed`."""
    common.init_backend_registration()
    with compile_lock:
        own, code = common.device_codegens[device_type], WrittenCode()
        overwriting = Overwriting(code.overwritable)
        scheduling = followed(own.scheduling, device_type, overwriting, in_blocks=in_blocks)
        # not by register_backend_for_device, which forgets the passes and settings of the device
        common.device_codegens[device_type] = replace(own, scheduling=scheduling, wrapper_codegen=RecordingWrapper)
        _current.code = code
        try:
            yield code
        finally:
            _current.code = None
            common.device_codegens[device_type] = own


class RecordingWrapper(PythonWrapperCodegen):
    """Inductor's wrapper for Python, which also records the lines that it writes.

    Inductor's reuse of buffers is off: memplan decides which bytes each buffer has.
    """

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: str | None, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        """Return a recording wrapper for this thread's compilation, and Inductor's own for any other."""
        if getattr(_current, "code", None) is None:
            own: Any = PythonWrapperCodegen
            return cast(
                "PythonWrapperCodegen",
                own.create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures),
            )
        if is_subgraph:
            raise refused("a graph inside the graph (control flow, or a partition)")
        recorder: Any = RecordingWrapper
        return cast("PythonWrapperCodegen", recorder())

    def write_header(self) -> None:
        """Write the header, with which kernels are compiled later."""
        super().write_header()
        if getattr(_current, "code", None) is not None:
            self.header.writeline(f"from {DeferringCompile.__module__} import DeferringCompile")
            self.header.writeline("async_compile = DeferringCompile()")

    def run_wrapper_ir_passes(self, is_inference: bool) -> None:
        """Settle the lines, and record them."""
        code: WrittenCode | None = getattr(_current, "code", None)
        if code is None:
            super().run_wrapper_ir_passes(is_inference)
            return
        with config.patch(allow_buffer_reuse=False):
            self.memory_plan_reuse()  # type: ignore[no-untyped-call]
        code.inputs = tuple(V.graph.graph_input_names)
        for name, buffer in V.graph.name_to_buffer.items():
            spec = _spec_of(buffer)
            if spec is not None:
                code.specs[name] = spec
                node = buffer.get_origin_node()
                if node is not None:
                    code.nodes[name] = node.name
        self.lines = [_RecordedLine(line, code) for line in self.lines]  # type: ignore[misc]

    def get_output_refs(self) -> list[str]:  # type: ignore[override]
        """Return the sources of what the code returns, and record them."""
        found: list[str] = super().get_output_refs()
        code: WrittenCode | None = getattr(_current, "code", None)
        if code is not None:
            code.outputs = tuple(found)
        return found


class _RecordedLine(lines.WrapperLine):
    """A line that records what it writes."""

    def __init__(self, line: Any, code: WrittenCode) -> None:
        self._line, self._code = line, code

    def codegen(self, code: Any) -> None:
        """Write the line."""
        before = len(code._lines)
        if hasattr(self._line, "codegen"):
            self._line.codegen(code)
        else:
            code.writeline(self._line)
        made = [line() if isinstance(line, DeferredLineBase) else line for line in code._lines[before:]]
        written = [line.strip() for line in made if isinstance(line, str) and line.strip()]
        if isinstance(self._line, lines.KernelDefinitionLine):
            self._code.sources[self._line.kernel_name] = self._line.kernel_body
            return
        found = read_line(self._line, "\n".join(written))
        if found is not None:
            self._code.lines.append(found)


_ALIGNS = re.compile(r"(\w+) = copy_(?:if_)?misaligned\(\1\)")  # which `AligningKernel` does
_SILENT = PLAIN_LINES | {"FreeIfNotReusedLine", "FreeLine"}


def read_line(line: Any, text: str) -> WrittenLine | None:
    """Return what one of Inductor's lines does, given its text; None for one that does nothing.

    Raises `UnsupportedGraph` for a kind of line that is not known.
    """
    kind = type(line).__name__
    if kind in _SILENT or (kind == "UnbackedSymbolDefsLine" and not line.unbacked_bindings):  # it defines nothing
        return None
    if isinstance(line, (str, DeferredLineBase)):
        return _read_text(text)
    if kind == "AllocateLine" and not line.comm_buffer:
        return Allocation(name=line.node.get_name())
    if kind in ("ReuseLine", "ReinterpretLine", "MultiOutputLine"):
        return Renaming(text=text)
    read = _READERS.get(kind)
    if read is None:
        raise refused(why_not_planned(line))
    found: KernelLine = read(line)
    return replace(found, text=found.text or text)


def _read_text(line: str) -> WrittenLine | None:
    """Return what a line without an object does: some kernels write their calls as text."""
    text = line.strip()
    if not text or text.startswith(("#", "del ", "assert_")) or _ALIGNS.fullmatch(text):
        return None
    return KernelLine(text=text, known=False)


def _generated(line: lines.KernelCallLine) -> KernelLine:
    if line.triton:
        return _by_triton(line)
    if line.device.type != "cpu":
        raise refused(f"a kernel for {line.device.type} that Triton did not compile")
    written = [i for i, kind in enumerate(line.arg_types) if not str(kind).startswith("const ")]
    names = [str(line.call_args[i]) for i in written]
    return KernelLine(text="", kernel=line.kernel_name, written=frozenset(written), origin=_origin(names))


def _by_triton(line: lines.KernelCallLine) -> KernelLine:
    """Return the call of a Triton kernel. Its parameters have names that tell what it does with them."""
    signature, meta = (line.triton_meta or {}).get("signature", {}), line.inductor_meta or {}
    if len(signature) < len(line.call_args) or "mutated_arg_names" not in meta:
        raise refused(f"a Triton kernel that is not Inductor's own ({line.kernel_name})")
    changed, written = set(meta["mutated_arg_names"]), []
    for i, (name, kind) in enumerate(zip(signature, line.arg_types, strict=False)):
        if not isinstance(kind, torch.dtype):  # a number
            continue
        if not str(signature[name]).startswith("*"):
            raise refused(f"a number in the memory of the host ({name} of {line.kernel_name})")
        if name.startswith(("out_ptr", "in_out_ptr")) or name in changed:
            written.append(i)
        elif not name.startswith("in_ptr"):
            raise refused(f"a parameter of a Triton kernel that is not known ({name} of {line.kernel_name})")
    made = [str(line.call_args[i]) for i in written]
    text = f"{line.kernel_name}.run({', '.join(map(str, line.call_args))})"
    return KernelLine(text=text, kernel=line.kernel_name, written=frozenset(written), origin=_origin(made))


def _extern_alloc(line: lines.ExternKernelAllocLine) -> KernelLine:
    node: Any = line.node
    if node.get_inputs_that_alias_output():
        raise refused(f"{node.get_kernel_name()}, whose result is a view that Inductor did not resolve")
    overload = getattr(node, "op_overload", None)
    return KernelLine(
        text="",
        changed=frozenset(map(str, node.get_mutation_names())),
        overload=overload if isinstance(overload, torch._ops.OpOverload) else None,
        origin=_origin([node.get_name()]),
    )


def _writing(line: Any, written: Iterable[int | str]) -> KernelLine:
    return KernelLine(text="", written=frozenset(written), origin=_origin([line.node.get_name()]))


_READERS: dict[str, Any] = {
    "KernelCallLine": _generated,
    "ExternKernelOutLine": lambda line: _writing(line, ["out"]),
    "ExternKernelMultiOutLine": lambda line: _writing(line, map(str, line.node.out_arg_names)),
    "ExternKernelAllocLine": _extern_alloc,
    "IndexPutFallbackLine": lambda line: _writing(line, [0]),
    "ScatterFallbackLine": lambda line: _writing(line, [0]),
}


def _spec_of(buffer: Any) -> TensorSpec | None:
    """Return the layout of a buffer; None for one that is no tensor with bytes of its own, or has no fixed size."""
    layout = getattr(buffer, "layout", None)
    if not isinstance(layout, ir.Layout) or isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        return None
    numbers = [*layout.size, *layout.stride, layout.offset]
    if not all(isinstance(n, (int, sympy.Integer)) for n in numbers):
        raise refused("a size that varies from call to call")
    whole = V.graph.get_allocation_storage_size(buffer)
    return TensorSpec(
        dtype=layout.dtype,
        device=layout.device,
        shape=tuple(map(int, layout.size)),
        strides=tuple(map(int, layout.stride)),
        offset=int(layout.offset),
        nbytes=int(whole) * layout.dtype.itemsize,
    )


def _origin(names: list[str]) -> Origin:
    """Return where the buffers that a kernel writes come from: the ops in it, and the place of the last of them."""
    nodes: list[fx.Node] = []
    for name in names:
        buffer = V.graph.name_to_buffer.get(name)
        nodes += getattr(buffer, "origins", ())
    position = {node: i for i, node in enumerate(V.graph.graph.nodes)}
    nodes = sorted(dict.fromkeys(nodes), key=lambda n: position.get(n, -1))
    if not nodes:
        return Origin()
    ops = dict.fromkeys(_op_of(node) for node in nodes if node.op == "call_function")
    last = [origin_of(node) for node in nodes]
    return Origin(
        module=next((o.module for o in reversed(last) if o.module), ""),
        source=next((o.source for o in reversed(last) if o.source), ""),
        op=" + ".join(ops),
        node=nodes[-1].name,
    )


def _op_of(node: fx.Node) -> str:
    """Return the name of the ATen op that a node was traced from: "gelu"."""
    overload = node.meta.get("original_aten") or node.target
    packet = getattr(overload, "_overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(overload, "__name__", overload))
