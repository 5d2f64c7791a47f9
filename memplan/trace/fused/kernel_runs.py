"""Replay the code of Inductor's wrapper with stand-ins for tensors, to learn what each kernel reads and writes.

The lines are Python. Run with `BlockView`s in place of tensors, strided views of blocks of bytes, and with kernels
that only note how they were called, they tell the arguments of each call exactly, views included, without a parser and
without computing anything.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from memplan.core.graph import Origin
from memplan.errors import MemplanError
from memplan.trace.fused.environment import refused
from memplan.trace.graph.values import is_random_state


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """The bytes behind one or more of Inductor's buffers, which share them in place or as views.

    `given`: the step's caller or model owns them. `constant`: the tensor, if the generated code holds it. `node`: the
    node of the graph that they hold, "" if none is known. `touched`: a kernel has used them already.
    """

    name: str
    device: torch.device
    nbytes: int
    given: bool = False
    constant: torch.Tensor | None = None
    node: str = ""
    touched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """The stand-in for a tensor: a strided view of a block."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> BlockView:
        """Return what `reinterpret_tensor` does: another view, `offset` elements behind this one."""
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=self.offset + offset)


def piece_of(block: Block, tensor: torch.Tensor) -> BlockView:
    """Return the piece that stands for a real or fake tensor whose bytes are `block`."""
    return BlockView(
        block=block,
        dtype=tensor.dtype,
        shape=tuple(map(int, tensor.shape)),
        strides=tuple(map(int, tensor.stride())),
        offset=int(tensor.storage_offset()),
    )


def extent(piece: BlockView) -> int:
    """Return the bytes from the start of its block to the end of a piece."""
    if not math.prod(piece.shape):
        return 0
    last = sum((n - 1) * stride for n, stride in zip(piece.shape, piece.strides, strict=True))
    return int((piece.offset + last + 1) * piece.dtype.itemsize)


def fills(piece: BlockView) -> bool:
    """Return whether a piece begins and ends where its block does."""
    return piece.offset == 0 and extent(piece) == piece.block.nbytes


def pieces_of(thing: Any) -> list[BlockView]:
    """Return the views in nested arguments."""
    leaves = pytree.tree_leaves(thing, is_leaf=lambda leaf: isinstance(leaf, BlockView))
    return [leaf for leaf in leaves if isinstance(leaf, BlockView)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The layout of one of Inductor's buffers. `nbytes` are those of its whole allocation."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Allocates the buffer `name`."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """Gives a buffer's bytes, or a view of them, another name: its `text` assigns it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """Calls a kernel.

    `text` is the source of the call. `kernel` is the name of a kernel that Inductor generated, "" for another one.
    `written` are the positions and names of the arguments that the kernel writes, and `changed` the buffers among the
    others that it changes. `known`: these two are complete; otherwise, any argument may be changed. `overload` is the
    op that is called, where its results are new tensors.
    """

    text: str
    kernel: str = ""
    written: frozenset[int | str] = frozenset()
    changed: frozenset[str] = frozenset()
    known: bool = True
    overload: OpOverload | None = None
    origin: Origin = field(default_factory=Origin)


WrittenLine = Allocation | Renaming | KernelLine


@dataclass(slots=True, kw_only=True)
class WrittenCode:
    """The code of one graph. `inputs` are the names of its arguments, `outputs` the sources of what it returns.

    `specs` are the layouts of its buffers by name, and `sources` the source code of its generated kernels by name.
    `nodes` are the nodes of the graph that its buffers hold, by name. `overwritable` are the buffers, by the name of a
    result, whose bytes it may take where nothing reads them afterwards. `namespace` are the globals of the loaded code.
    """

    lines: list[WrittenLine] = field(default_factory=list)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    overwritable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    namespace: Mapping[str, Any] = field(default_factory=dict)


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The stand-in for a random state that one kernel returns and its backward takes (see `OpaqueResult`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """One call of a kernel.

    `function` is called with `args` and `kwargs`, where `BlockView`s stand for tensors. `results` are those of its
    results that are new tensors, by position; empty for a kernel that writes into its arguments. `states` are those of
    its results that are random states, by position. `overload` is the op
    that returns them. `source` is the source code of a generated kernel. `overwritable` are pairs (written, read): what
    is written first may take the bytes of what is read for the last time.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[BlockView, ...]
    writes: tuple[BlockView, ...]
    results: dict[int, BlockView]
    overload: OpOverload | None
    source: str
    origin: Origin
    known: bool
    overwritable: tuple[tuple[BlockView, BlockView], ...] = ()
    states: dict[int, RandomState] = field(default_factory=dict)


@dataclass(slots=True)
class _Call:
    """A call while it is replayed. `results` and `states`: as in `KernelRun`, filled as the code takes them."""

    path: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: dict[int, BlockView] = field(default_factory=dict)
    states: dict[int, RandomState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Result:
    """The stand-in for what a call returns, before the code says which buffer it is."""

    call: _Call
    position: int = 0

    def __getitem__(self, position: int) -> _Result:
        return _Result(self.call, position)


class _Callee:
    """The stand-in for a kernel, or for a module that has kernels: it notes calls instead of making them."""

    def __init__(self, thing: Any, path: str, calls: list[_Call]) -> None:
        self._thing, self._path, self._calls = thing, path, calls

    def __getattr__(self, name: str) -> Any:
        return _stand_in(getattr(self._thing, name), f"{self._path}.{name}", self._calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path == "aten.view.dtype":
            return _as_type(*args)
        call = _Call(self._path, self._thing, args, kwargs)
        self._calls.append(call)
        return _Result(call)


def _stand_in(thing: Any, path: str, calls: list[_Call]) -> Any:
    """Return what the code finds under a name: plain values and classes as they are, and a callee for all else."""
    return thing if isinstance(thing, _PLAIN) else _Callee(thing, path, calls)


def _as_type(piece: BlockView, dtype: torch.dtype) -> BlockView:
    """Return the piece as another type of the same size."""
    if piece.dtype.itemsize != dtype.itemsize:
        raise refused("a view as a type of another size")
    return replace(piece, dtype=dtype)


class Replay(MutableMapping[str, Any]):
    """The names of the generated code while it is replayed.

    `tensors` are what stands for its inputs, by name. `label` begins the names of the blocks that it allocates.
    """

    def __init__(self, code: WrittenCode, tensors: Mapping[str, BlockView | RandomState], label: str = "") -> None:
        self._code, self._label = code, label
        self._names: dict[str, Any] = {**tensors, "reinterpret_tensor": BlockView.view}
        self._calls: list[_Call] = []
        self.constants: dict[str, Block] = {}

    def run(self) -> tuple[KernelRun, ...]:
        """Return the calls of the code, in order."""
        pending: list[tuple[KernelLine, _Call]] = []
        for line in self._code.lines:
            if isinstance(line, Allocation):
                spec = self._code.specs[line.name]
                self._names[line.name] = _piece(self._new_block(line.name, spec), spec)
                continue
            before = len(self._calls)
            with _replaying(line.text):
                exec(line.text, {}, self)
            made = self._calls[before:]
            if isinstance(line, Renaming):
                if made:
                    raise refused("a call where a buffer gets a name")
                continue
            if len(made) != 1:
                raise refused(f"{len(made)} calls in one line ({_shortened(line.text)})")
            pending.append((line, made[0]))
        return tuple(self._finished(line, call) for line, call in pending)

    def outputs(self) -> tuple[Any, ...]:
        """Return what the code returns: a piece, or a plain value, for each output."""
        found = []
        for source in self._code.outputs:
            with _replaying(source):
                found.append(eval(source, {}, self))
        return tuple(found)

    def _new_block(self, name: str, spec: TensorSpec) -> Block:
        node = self._code.nodes.get(name, "")
        return Block(name=f"{self._label}{name}", device=spec.device, nbytes=spec.nbytes, node=node)

    def _finished(self, line: KernelLine, call: _Call) -> KernelRun:
        """Return a call with what it reads and writes, once all of its results are known."""
        given = dict[int | str, Any]((*enumerate(call.args), *call.kwargs.items()))
        if any(isinstance(leaf, _Result) for leaf in pytree.tree_leaves((call.args, call.kwargs))):
            raise refused(f"a call of what another call returned ({_shortened(line.text)})")
        changed = {self._changed(line, name).block for name in line.changed}
        reads: dict[BlockView, None] = {}
        writes: dict[BlockView, None] = {}
        for place, thing in given.items():
            for piece in pieces_of(thing):
                written = not line.known or place in line.written or piece.block in changed
                if written:
                    writes[piece] = None
                if not written or piece.block.touched or piece.block.given:
                    reads[piece] = None
        writes.update(dict.fromkeys(call.results.values()))
        first = {piece.block for piece in writes if not piece.block.touched and not piece.block.given}
        for piece in [piece for piece in reads if piece.block in first]:  # written just before, under another name
            del reads[piece]
            writes[piece] = None
        for piece in (*reads, *writes):
            piece.block.touched = True
        new = [piece for piece in writes if piece.block in first]
        overload = call.function if isinstance(call.function, OpOverload) else line.overload
        return KernelRun(
            name=line.kernel or call.path,
            function=call.function,
            args=call.args,
            kwargs=call.kwargs,
            reads=tuple(reads),
            writes=tuple(writes),
            results=dict(call.results),
            states=dict(call.states),
            overload=overload,
            source=self._source(line.kernel),
            origin=line.origin,
            known=line.known,
            overwritable=tuple(self._overwritable(call, new, [*reads])) if line.kernel else (),
        )

    def _overwritable(
        self, call: _Call, new: Sequence[BlockView], reads: Sequence[BlockView]
    ) -> Iterator[tuple[BlockView, BlockView]]:
        """Yield the pairs of `KernelRun.overwritable` of a generated kernel that makes the blocks of `new`."""
        uses = Counter(piece.block for piece in pieces_of(call.args))
        for made in new:
            names = self._code.overwritable.get(made.block.name.removeprefix(self._label), ())
            named = (self._names.get(name) for name in names)
            donors = {view.block for view in named if isinstance(view, BlockView)}
            for read in reads:
                alone = uses[made.block] == uses[read.block] == 1 and read.dtype == made.dtype
                if read.block in donors and alone and fills(made) and fills(read):
                    yield made, read

    def _changed(self, line: KernelLine, name: str) -> BlockView:
        """Return the buffer that a call changes beside the arguments that it is known to write."""
        found = self._names.get(name)
        if not isinstance(found, BlockView):
            raise refused(f"a call that changes {name}, which is no tensor ({_shortened(line.text)})")
        return found

    def _source(self, kernel: str) -> str:
        """Return the source code of a generated kernel, "" for another one (whose name is "")."""
        if kernel and not self._code.sources.get(kernel):
            raise refused(f"a kernel without source code ({kernel})")
        return self._code.sources.get(kernel, "")

    # -- the mapping of names ----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        thing = self._code.namespace.get(name, _MISSING)
        thing = getattr(builtins, name, _MISSING) if thing is _MISSING else thing
        if thing is _MISSING:
            raise refused(f"a name that is not known ({name})")
        if isinstance(thing, torch.Tensor):
            return self._constant(name, thing)
        return _stand_in(thing, name, self._calls)

    def __setitem__(self, name: str, thing: Any) -> None:
        spec = self._code.specs.get(name)
        if isinstance(thing, _Result) and spec is not None:
            thing = self._adopted(name, thing, spec)
        self._names[name] = thing

    def __delitem__(self, name: str) -> None:
        """Keep the name: a buffer may be mentioned by a later line's effects."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _adopted(self, name: str, result: _Result, spec: TensorSpec) -> BlockView | RandomState:
        """Return what stands for a new tensor that a call returned."""
        if is_random_state(result.call.function, result.position):
            return result.call.states.setdefault(result.position, RandomState())
        known = result.call.results.get(result.position)
        if known is None:
            known = result.call.results[result.position] = _piece(self._new_block(name, spec), spec)
        return known

    def _constant(self, name: str, tensor: torch.Tensor) -> BlockView:
        if name not in self.constants:
            nbytes = tensor.untyped_storage().nbytes()
            self.constants[name] = Block(
                name=f"{self._label}{name}", device=tensor.device, nbytes=nbytes, given=True, constant=tensor
            )
        return piece_of(self.constants[name], tensor)


_MISSING = object()


@contextlib.contextmanager
def _replaying(text: str) -> Iterator[None]:
    """Refuse a line of Inductor's that raises an error while it is replayed."""
    try:
        yield
    except MemplanError:
        raise
    except Exception as error:
        raise refused(
            f"a line that cannot be replayed ({_shortened(text)}): {type(error).__name__}: {error}"
        ) from error


def _shortened(text: str) -> str:
    return text.splitlines()[0][:60]


def _piece(block: Block, spec: TensorSpec) -> BlockView:
    return BlockView(block=block, dtype=spec.dtype, shape=spec.shape, strides=spec.strides, offset=spec.offset)
