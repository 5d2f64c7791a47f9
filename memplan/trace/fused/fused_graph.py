"""Make one `TracedGraph` of both halves of a step that Inductor generated.

An op is a call of a kernel, a storage is a block of Inductor's, and what the forward saves is what the backward takes.
What leaves the step gets bytes of its own, as `passes/own_outputs.py` does for eager's ops.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from memplan.core.graph import GIVEN, Graph, Op, Origin, Phase, Storage, StorageKind, Value
from memplan.core.in_place import with_candidates
from memplan.devices.kinds import HOST
from memplan.torch_inside.graphs import GradAOTOutput, ParamAOTInput
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.fused.code_generation import Halves
from memplan.trace.fused.deferred import ALIGNMENT, AligningKernel, Deferred, DeferredTritonKernel, TunedKernel
from memplan.trace.fused.environment import refused
from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun, RandomState, extent, piece_of
from memplan.trace.graph.build import KIND_OF, binding_of
from memplan.trace.graph.values import read_results
from memplan.trace.passes.nodes import draws, writes_in_place
from memplan.trace.passes.own_outputs import returned_by
from memplan.trace.passes.rewrite import aten
from memplan.trace.traced import (
    Binding,
    GeneratedCall,
    GeneratedKernel,
    KernelCall,
    OpaqueResult,
    Ref,
    Source,
    TracedGraph,
)

_EXTERN = "extern_kernels."
_DIGITS = 12  # of a digest in a target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One call in a phase: a kernel of Inductor's code, or a copy that memplan adds (`run` is None)."""

    phase: Phase
    run: KernelRun | None = None
    source: BlockView | None = None
    target: BlockView | None = None

    @property
    def reads(self) -> tuple[BlockView, ...]:
        """The pieces that it reads."""
        return self.run.reads if self.run is not None else (self.source,) if self.source is not None else ()

    @property
    def writes(self) -> tuple[BlockView, ...]:
        """The pieces that it writes."""
        return self.run.writes if self.run is not None else (self.target,) if self.target is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionKernels:
    """The kernels of a partition that Inductor runs by itself: a graph with the call of each op.

    Everything that they make is planned, and what they return stays to the end. `nodes` are the nodes of the joint
    graph that storages hold, by the storage.
    """

    graph: Graph
    kernels: tuple[KernelCall | GeneratedCall, ...]
    nodes: Mapping[int, str]


class _Kernels:
    """Reads the calls of both halves into ops, values and storages."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.steps = [_Step(phase=Phase.FORWARD, run=run) for run in halves.forward.runs]
        backward = halves.backward
        self.steps += [] if backward is None else [_Step(phase=Phase.BACKWARD, run=run) for run in backward.runs]
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.storage_of: dict[Block, int] = {}
        self.value_of: dict[Any, int] = {}
        self.states: dict[RandomState, OpaqueResult] = {}
        self.callers: set[Block] = set()  # which may be at any address
        self.names: Counter[str] = Counter()

    def _constants(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Add the tensors that the code holds; yield the value and the tensor of each."""
        for half in (self.halves.forward, self.halves.backward):
            for block in () if half is None else half.constants:
                self._add_storage(block, StorageKind.CONSTANT, planned=False, origin=Origin(op=GIVEN))
                assert block.constant is not None
                yield self._value(piece_of(block, block.constant)), block.constant

    def _returned_pieces(self) -> list[Any]:
        """Return what stands for each output of the joint graph: a piece, or a plain value."""
        backward = self.halves.backward
        found = list(self.halves.forward.outputs[: self.halves.returned])
        return found + ([] if backward is None else list(backward.outputs))

    def _make_storages(self, owned: Mapping[Block, StorageKind]) -> None:
        """Add a storage, and a value that spans it, for each block that the step makes."""
        spans = Counter[Block]()
        whole: dict[Block, BlockView] = {}
        for piece in self._all_pieces():
            spans[piece.block] = max(spans[piece.block], extent(piece))
            whole.setdefault(piece.block, piece)
        for step in self.steps:
            origin = step.run.origin if step.run is not None else Origin(op="copy_")
            for piece in step.writes:
                block = piece.block
                if block in self.storage_of:
                    continue
                phase = StorageKind.ACTIVATION if step.phase is Phase.FORWARD else StorageKind.GRADIENT
                nbytes = max(spans[block], block.nbytes)
                kind = owned.get(block, phase)
                self._add_storage(block, kind, planned=block not in owned, origin=origin, nbytes=nbytes)
                first = whole[block]
                if extent(first) < nbytes:
                    elements = nbytes // first.dtype.itemsize
                    first = replace(first, shape=(elements,), strides=(1,), offset=0)
                self._value(first)

    def _all_pieces(self) -> Iterable[BlockView]:
        for step in self.steps:
            yield from step.writes
            yield from step.reads

    def _add_storage(
        self, block: Block, kind: StorageKind, *, planned: bool, origin: Origin, nbytes: int | None = None
    ) -> None:
        self.storage_of[block] = len(self.storages)
        nbytes = block.nbytes if nbytes is None else nbytes
        device, origin = str(block.device), replace(origin, node=block.node or origin.node)
        self.storages.append(
            Storage(name=block.name, nbytes=nbytes, device=device, kind=kind, planned=planned, origin=origin)
        )

    def _value(self, piece: BlockView) -> int:
        """Return the index of the value that stands for a piece."""
        storage = self.storage_of.get(piece.block)
        if storage is None:
            raise refused(f"a kernel that reads {piece.block.name}, which nothing wrote")
        known = self.value_of.get((storage, piece.dtype, piece.shape, piece.strides, piece.offset))
        return self._new_value(piece) if known is None else known

    def _new_value(self, piece: BlockView) -> int:
        """Add a value for a piece, which stands for it from now on unless another one does, and return its index."""
        storage = self.storage_of[piece.block]
        self.value_of.setdefault((storage, piece.dtype, piece.shape, piece.strides, piece.offset), len(self.values))
        count = sum(v.storage == storage for v in self.values)
        self.values.append(
            Value(
                name=piece.block.name if not count else f"{piece.block.name}:{count}",
                storage=storage,
                dtype=str(piece.dtype).removeprefix("torch."),
                shape=piece.shape,
                strides=piece.strides,
                offset=piece.offset,
            )
        )
        return len(self.values) - 1

    def _op(self, step: _Step) -> tuple[Op, KernelCall | GeneratedCall]:
        """Return the op of a step, and its kernel call."""
        kernel, name = self._kernel(step)
        if isinstance(kernel, GeneratedCall):
            target, random, direct = kernel.kernel.name, kernel.kernel.draws, True
        else:
            target, random = str(kernel.target), draws(kernel.target, kernel.args, kernel.kwargs)
            device = str(step.writes[0].block.device) if step.writes else HOST
            direct = not kernel.outs or writes_in_place(kernel.target, kernel.args, device)
        self.names[name] += 1
        op = Op(
            name=name if self.names[name] == 1 else f"{name}:{self.names[name]}",
            target=target,
            phase=step.phase,
            reads=tuple(dict.fromkeys(map(self._value, step.reads))),
            writes=tuple(dict.fromkeys(map(self._value, step.writes))),
            direct=direct,
            random=random,
            origin=step.run.origin if step.run is not None else Origin(op="copy_"),
        )
        return op, kernel

    def _kernel(self, step: _Step) -> tuple[KernelCall | GeneratedCall, str]:
        """Return the kernel call of a step, and a name for its op."""
        run = step.run
        if run is None:
            assert step.source is not None
            assert step.target is not None
            copied = (Ref(self._value(step.target)), Ref(self._value(step.source)))
            return KernelCall(target=aten.copy_.default, args=copied, kwargs={}, outs=()), "copy"
        if run.results:
            return self._functional(run)
        args, kwargs = self._refs((run.args, run.kwargs))
        short = run.name.rsplit(".", 1)[-1]
        short = run.name.split(".")[-2] if run.name.startswith("torch.ops.") else short
        return GeneratedCall(kernel=_generated(self._aligning(_tuned(run))), args=args, kwargs=kwargs), short

    def _aligning(self, run: KernelRun) -> KernelRun:
        """Return a run whose kernel takes the caller's tensors from any address."""
        given = ((i, x) for i, x in enumerate(run.args) if isinstance(x, BlockView) and x.block in self.callers)
        positions = [i for i, x in given if x.offset * x.dtype.itemsize % ALIGNMENT == 0]  # others: it assumes nothing
        function: Any = run.function
        if not positions or not isinstance(function, (DeferredTritonKernel, TunedKernel)):
            return run
        aligning: Any = AligningKernel(function, positions, [i for i in positions if run.args[i] in run.writes])
        return replace(run, function=aligning)

    def _functional(self, run: KernelRun) -> tuple[KernelCall, str]:
        """Return the call of an op that returns new tensors, with its arguments in the order of its schema."""
        overload = run.overload
        if overload is None:
            raise refused(f"{run.name}, which returns new tensors and is no ATen op that is known")
        count = len(overload._schema.returns)
        listed = count == 1 and str(overload._schema.returns[0].type) != "Tensor"
        count = max(run.results) + 1 if listed else count
        args, kwargs = self._refs(_in_order(overload, run.args, run.kwargs))
        outs = tuple(self._value(run.results[i]) if i in run.results else None for i in range(count))
        call = KernelCall(
            target=overload,
            args=args,
            kwargs=kwargs,
            outs=outs,
            returns_sequence=listed or count > 1,
            opaque_results=tuple((i, self._state(state).number) for i, state in run.states.items()),
        )
        return call, str(overload._opname)

    def _refs(self, tree: Any) -> Any:
        def ref(leaf: Any) -> Any:
            if isinstance(leaf, RandomState):
                return self._state(leaf)
            return Ref(self._value(leaf)) if isinstance(leaf, BlockView) else leaf

        return pytree.tree_map(ref, tree, is_leaf=lambda leaf: isinstance(leaf, BlockView))

    def _state(self, state: RandomState) -> OpaqueResult:
        """Return the opaque result that a random state is."""
        return self.states.setdefault(state, OpaqueResult(len(self.states)))

    def _overwritable(self) -> Iterable[tuple[int, int]]:
        """Yield the storages that a kernel makes and those that it may write them over."""
        for step in self.steps:
            for made, read in step.run.overwritable if step.run is not None else ():
                yield self.storage_of[made.block], self.storage_of[read.block]


class PartitionReader(_Kernels):
    """Reads a partition that Inductor runs by itself."""

    def build(self, tangents: Collection[str]) -> PartitionKernels:
        """Return its kernels; `tangents` are the inputs, by name, that only come when the backward begins.

        Raises `UnsupportedGraph` for code that cannot be read.
        """
        for name, piece in self.halves.given.items():
            if piece.block not in self.storage_of:
                kind = StorageKind.TANGENT if name in tangents else StorageKind.PARAMETER
                self._add_storage(piece.block, kind, planned=False, origin=Origin(node=name))
        list(self._constants())
        given = set(self.storage_of)
        self._make_storages({})
        calls = [self._op(step) for step in self.steps]
        ends = (piece for piece in self._returned_pieces() if isinstance(piece, BlockView) and piece.block not in given)
        gradients = tuple(dict.fromkeys(map(self._value, ends)))
        graph = Graph(
            ops=tuple(op for op, _ in calls),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=(),
            gradients=gradients,
        )
        return PartitionKernels(
            graph=with_candidates(graph, self._overwritable()),
            kernels=tuple(kernel for _, kernel in calls),
            nodes={i: block.node for block, i in self.storage_of.items() if block not in given and block.node},
        )


class StepReader(_Kernels):
    """Reads a step: the joint graph that was captured, with write-backs, and the code that was generated for a copy.

    `needs`: as in `Results`, by descriptor.
    """

    def __init__(self, captured: Captured, halves: Halves, model: str, needs: Mapping[Any, frozenset[int]]) -> None:
        super().__init__(halves)
        self.captured, self.model, self.needs = captured, model, needs
        self.graph = captured.graph_module.graph
        self.bindings: list[Binding] = []

    def build(self, *, gradients_in_arena: bool, copy_gradients: bool, whole: bool) -> TracedGraph:
        """Return the traced graph.

        Args:
            gradients_in_arena: Parameters' gradients stay in the arena to the end of the step.
            copy_gradients: Each gradient of a parameter is copied out of the arena as soon as it is complete.
            whole: The step uses its gradients itself: they are planned, and not for the caller.
        """
        pieces = self._returned_pieces()
        pieces = self._with_own_bytes(pieces, copy_gradients=copy_gradients, whole=whole)
        self._bind()
        owned = self._owned(pieces, gradients_in_arena=gradients_in_arena, whole=whole)
        self._make_storages(owned)
        ops, kernels = [], []
        for step in self.steps:
            op, kernel = self._op(step)
            ops.append(op)
            kernels.append(kernel)
        return self._finish(ops, kernels, pieces)

    # -- what leaves the step ----------------------------------------------------------------------------

    def _with_own_bytes(self, pieces: list[Any], *, copy_gradients: bool, whole: bool) -> list[Any]:
        """Return the outputs with copies of those that share bytes with something else that outlives the step.

        Gradients of a `whole` step do not, unless they are in bytes that the step is given.
        """
        _, _, descs = returned_by(self.graph)
        tangents = {
            n.meta["desc"].output for n in self.graph.find_nodes(op="placeholder") if n.meta["desc"].is_tangent()
        }
        found, taken = list(pieces), set[Block]()
        for i, (piece, desc) in enumerate(zip(pieces, descs, strict=True)):
            if isinstance(piece, BlockView) and desc in tangents:
                if piece.block.given or piece.block in taken:
                    found[i] = self._copied(piece, Phase.FORWARD)
                taken.add(found[i].block)
        lasting = {p.block for p in found[: self.halves.returned] if isinstance(p, BlockView)}
        lasting |= {p.block for run in self.halves.forward.runs for p in (*run.reads, *run.writes)}
        for i, (piece, desc) in enumerate(zip(pieces, descs, strict=True)):
            if isinstance(piece, BlockView) and isinstance(desc, GradAOTOutput):
                early = copy_gradients and isinstance(desc.grad_of, ParamAOTInput)
                if early or piece.block.given or (piece.block in lasting and not whole):
                    found[i] = self._copied(piece, Phase.BACKWARD, early=early)
                lasting.add(found[i].block)
        return found

    def _copied(self, piece: BlockView, phase: Phase, *, early: bool = False) -> BlockView:
        """Add a copy of a piece, with dense memory of its own, at the end of a phase or as early as possible."""
        n = sum(step.run is None for step in self.steps)
        like = torch.empty_strided(piece.shape, piece.strides, device="meta")
        strides = tuple(torch.empty_like(like).stride())  # dense
        block = Block(name=f"copy_{n}", device=piece.block.device, nbytes=0)
        made = replace(piece, block=block, strides=strides, offset=0)
        touching = [i for i, s in enumerate(self.steps) if any(p.block is piece.block for p in (*s.reads, *s.writes))]
        last = max((i for i, s in enumerate(self.steps) if s.phase is Phase.FORWARD), default=-1)
        at = len(self.steps) if phase is Phase.BACKWARD else last + 1
        if early:
            at = max([last, *touching]) + 1
        self.steps.insert(at, _Step(phase=phase, source=piece, target=made))
        return made

    def _owned(self, pieces: Sequence[Any], *, gradients_in_arena: bool, whole: bool) -> dict[Block, StorageKind]:
        """Return the blocks that the caller holds after the step."""
        _, _, descs = returned_by(self.graph)
        returns = {p.block for s in self.steps if s.run is not None for p in s.run.results.values()}
        owned: dict[Block, StorageKind] = {}
        for piece, desc in zip(pieces, descs, strict=True):
            if not isinstance(piece, BlockView):
                continue
            gradient = isinstance(desc, GradAOTOutput)
            of_parameter = gradient and isinstance(desc.grad_of, ParamAOTInput)
            if (gradient and whole) or (of_parameter and gradients_in_arena and piece.block not in returns):
                continue
            owned.setdefault(piece.block, StorageKind.GRADIENT if gradient else StorageKind.OUTPUT)
        return owned

    # -- values and storages -----------------------------------------------------------------------------

    def _bind(self) -> None:
        """Add the storages, values and bindings of what the step is given."""
        for node in self.graph.find_nodes(op="placeholder"):
            piece = self.halves.given.get(node.name)
            if piece is None:
                continue
            binding = binding_of(self.captured, node, self.bindings)
            origin = Origin(module=binding.name, op=binding.source.value, node=node.name)
            if piece.block not in self.storage_of:
                self._add_storage(piece.block, KIND_OF[binding.source], planned=False, origin=origin)
            self.bindings.append(replace(binding, value=self._new_value(piece)))
            if binding.source in {Source.INPUT, Source.TANGENT}:
                self.callers.add(piece.block)
        for value, tensor in self._constants():
            self.bindings.append(Binding(source=Source.CONSTANT, value=value, tensor=tensor))

    def _finish(
        self, ops: Sequence[Op], kernels: Sequence[KernelCall | GeneratedCall], pieces: Sequence[Any]
    ) -> TracedGraph:
        """Return the traced graph, with what leaves it."""
        made = {self.values[v].storage for op in ops for v in op.writes}
        bindings = tuple(replace(b, written=self.values[b.value].storage in made) for b in self.bindings)
        results, value_of = self._results(pieces)
        read = read_results(results, value_of, self.values, bindings, made, self.captured, self.needs)
        captured = self.captured
        graph = Graph(
            ops=tuple(ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=read.fresh,
            gradients=read.gradients,
        )
        return TracedGraph(
            model=self.model,
            graph=with_candidates(graph, self._overwritable()),
            kernels=tuple(kernels),
            bindings=bindings,
            results=read,
            in_spec=captured.in_spec,
            out_spec=captured.out_spec,
            example_inputs=captured.inputs,
            training=captured.training,
            autocast=captured.autocast,
            readings=captured.readings,
            attention=captured.attention,
            device=self._device(),
        )

    def _device(self) -> torch.device:
        """Return where all tensors of the step are."""
        found = {block.device for block in self.storage_of} or {torch.device(HOST)}
        if len(found) > 1:
            raise refused(f"buffers on {', '.join(sorted(map(str, found)))}")
        return found.pop()

    def _results(self, pieces: Sequence[Any]) -> tuple[fx.Graph, dict[fx.Node, int]]:
        """Return a graph of inputs and outputs only, in which each output is a node of its own, and their values."""
        graph = fx.Graph()
        value_of: dict[fx.Node, int] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            made = graph.placeholder(node.name)
            made.meta = dict(node.meta)
            if node.name in self.halves.given:
                value_of[made] = self._value(self.halves.given[node.name])
        output, _, descs = returned_by(self.graph)
        results: list[Any] = []
        for i, piece in enumerate(pieces):
            if isinstance(piece, RandomState):
                raise refused("a random state of attention among its results")
            if isinstance(piece, BlockView):
                made = graph.call_function(aten.alias.default, name=f"result_{i}")
                value_of[made] = self._value(piece)
                results.append(made)
            else:
                results.append(piece)
        graph.output(tuple(results)).meta.update({**output.meta, "desc": descs})
        return graph, value_of


def _tuned(run: KernelRun) -> KernelRun:
    """Return a run whose Triton kernel is tuned with results of its own, if they may lie over what it reads."""
    over = {made.block for made, _ in run.overwritable}
    blocks = {made.block for made in run.writes}
    given = [(i, x.block) for i, x in enumerate(run.args) if isinstance(x, BlockView)]
    function: Any = run.function
    if not over or not isinstance(function, DeferredTritonKernel):
        return run
    written = [i for i, block in given if block in blocks]
    tuned: Any = TunedKernel(function, [i for i, block in given if block in over], written)
    return replace(run, function=tuned)


def _generated(run: KernelRun) -> GeneratedKernel:
    """Return the kernel of a run that writes into its arguments."""
    name = run.name
    if run.source:
        name = f"inductor.{name}.{hashlib.sha256(run.source.encode()).hexdigest()[:_DIGITS]}"
    elif name.startswith(_EXTERN):
        name = f"aten.{name.removeprefix(_EXTERN)}.out"
    drawing = draws(run.function, run.args, run.kwargs) if isinstance(run.function, OpOverload) else not run.known
    later = run.function if isinstance(run.function, Deferred) else None
    function = None if later is not None else run.function
    return GeneratedKernel(name=name, function=function, later=later, source=run.source, draws=drawing)


def _in_order(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments with all that have a position in it, as eager's traces have them."""
    placed, left = list(args), dict(kwargs)
    for argument in overload._schema.arguments[len(placed) :]:
        if argument.kwarg_only or not left:
            break
        if argument.name in left:
            placed.append(left.pop(argument.name))
        elif argument.has_default_value():
            placed.append(argument.default_value)
        else:
            break
    return tuple(placed), left
