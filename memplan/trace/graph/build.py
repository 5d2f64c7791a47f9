"""Read a captured and lowered fx graph into a `TracedGraph`: ops, values, storages, and what the caller owns.

A storage is an alias class of fake tensors. A node whose results alias its inputs and that changes nothing is a view:
it becomes a value, never an op. A node that only makes uninitialised memory becomes a storage.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from memplan.core.graph import GIVEN, Graph, Op, Origin, Phase, StorageKind
from memplan.devices.kinds import HOST, is_accelerator
from memplan.distributed.ops import group_of
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import (
    BufferAOTInput,
    FakeTensor,
    FunctionalTensor,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.capture.origins import origin_of, place_of
from memplan.trace.graph.values import (
    AliasClasses,
    is_literal,
    is_mixed,
    opaque_positions,
    read_results,
    used_positions,
)
from memplan.trace.optimizer.updates import StateInput
from memplan.trace.passes.nodes import draws, is_check, out_variant, writes_in_place, written_names
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import CHECKPOINT, MEMORY_ONLY, WITHIN, aten, storage_key
from memplan.trace.traced import Binding, KernelCall, OpaqueResult, Ref, Source, TracedGraph

KIND_OF = {
    Source.PARAMETER: StorageKind.PARAMETER,
    Source.BUFFER: StorageKind.PARAMETER,
    Source.STATE: StorageKind.OPTIMIZER_STATE,
    Source.INPUT: StorageKind.INPUT,
    Source.TANGENT: StorageKind.TANGENT,
}
_OVERWRITES = {"copy_", "zero_", "fill_", "bernoulli_", "normal_", "uniform_"}


def build(
    captured: Captured,
    model: str,
    needs: Mapping[Any, frozenset[int]],
    alias_classes: AliasClasses | None = None,
    *,
    gradients_in_arena: bool = False,
) -> TracedGraph:
    """Return the `TracedGraph` of a captured graph, which is read once, in order.

    `needs`: as in `Results`, by descriptor. `alias_classes`: the record of values and storages to fill (None: a new
    one). `gradients_in_arena`: gradients of parameters that kernels can write in place are planned too, and stay in
    the arena to the end of the step. Raises `UnsupportedGraph` with the node that cannot be planned.
    """
    return _FxReader(
        captured, model, needs, alias_classes or AliasClasses(), gradients_in_arena=gradients_in_arena
    ).build()


def _is_gradient_of_parameter(desc: Any) -> bool:
    """Return whether a descriptor is of a parameter's gradient."""
    return isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput)


def written_by_kernel(node: fx.Node) -> bool:
    """Return whether a kernel writes the bytes of `node` in place, rather than returning fresh memory that is then
    copied.
    """
    while node.target is not operator.getitem:
        key = storage_key(node.meta["val"])
        tensors = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
        base = next((n for n in tensors if storage_key(n.meta["val"]) == key), None)
        if base is None:
            assert isinstance(node.target, OpOverload)
            return node.target in MEMORY_ONLY or out_variant(node.target) is not None
        node = base
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return isinstance(source.target, OpOverload) and out_variant(source.target) is not None


def binding_of(captured: Captured, node: fx.Node, before: Sequence[Binding]) -> Binding:
    """Return the binding for a placeholder, by its descriptor, without its value; `before` are the earlier ones."""
    desc = node.meta["desc"]
    if isinstance(desc, ParamAOTInput):
        wants = desc.target in captured.trained
        return Binding(source=Source.PARAMETER, value=-1, name=desc.target, requires_grad=wants)
    if isinstance(desc, BufferAOTInput):
        wants = desc.target in captured.trained
        return Binding(source=Source.BUFFER, value=-1, name=desc.target, requires_grad=wants)
    if isinstance(desc, StateInput):
        return Binding(source=Source.STATE, value=-1, name=desc.target, key=desc.key)
    if isinstance(desc, PlainAOTInput):
        wants = captured.inputs[desc.idx].requires_grad
        return Binding(source=Source.INPUT, value=-1, index=desc.idx, requires_grad=wants)
    if isinstance(desc, TangentAOTInput):
        return Binding(source=Source.TANGENT, value=-1, index=sum(b.source is Source.TANGENT for b in before))
    if "Token" in type(desc).__name__:
        names = {str(user.args[1]) for user in node.users if len(user.args) > 1}
        what = f"an op with side effects: {', '.join(sorted(names))}"
        hint = "use an op without side effects, or call it outside of the model"
        raise UnsupportedGraph(place_of(next(iter(node.users), node)), what, hint, see="op-effects")
    what = f"an input of kind {type(desc).__name__}"
    raise UnsupportedGraph(place_of(node), what, "pass plain, unshared tensors as inputs", see="inputs")


class _FxReader:
    """Reads one fx graph; `alias_classes` records its values and storages."""

    def __init__(
        self,
        captured: Captured,
        model: str,
        needs: Mapping[Any, frozenset[int]],
        alias_classes: AliasClasses,
        *,
        gradients_in_arena: bool,
    ) -> None:
        self.captured = captured
        self.gradients_in_arena = gradients_in_arena
        self.needs = needs
        self.model = model
        self.graph = captured.graph_module.graph
        self.ops: list[Op] = []
        self.kernels: list[KernelCall] = []
        self.alias_classes = alias_classes
        self.bindings: list[Binding] = []
        self.value_of: dict[fx.Node, int] = {}
        self.bare: set[int] = set()  # storages that nothing has written yet
        self.results_of: dict[fx.Node, tuple[int | None, ...]] = {}
        self.opaque_of: dict[tuple[fx.Node, int], OpaqueResult] = {}
        self.other: dict[fx.Node, Any] = {}  # for a node that is no value: a number, None or `OpaqueResult`

    def build(self) -> TracedGraph:
        """Read every node and return the traced graph."""
        owned = self._caller_owned()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node, owned)
        return self._finish()

    # -- what the caller keeps ---------------------------------------------------------------------------

    def _caller_owned(self) -> dict[int, StorageKind]:
        """Return storage key -> OUTPUT or GRADIENT for everything that the caller holds after the step."""
        _, results, descs = returned_by(self.graph)
        owned: dict[int, StorageKind] = {}
        for node, desc in zip(results, descs, strict=True):
            if isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor):
                if self.gradients_in_arena and _is_gradient_of_parameter(desc) and written_by_kernel(node):
                    continue
                kind = StorageKind.GRADIENT if isinstance(desc, GradAOTOutput) else StorageKind.OUTPUT
                owned.setdefault(storage_key(node.meta["val"]), kind)
        return owned

    # -- where tensors come from -------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        """Add the value and the binding of a placeholder."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise self._unsupported(
                    node, "a size that varies from call to call", "use fixed input shapes", see="inputs"
                )
            return
        binding = binding_of(self.captured, node, self.bindings)
        origin = Origin(module=binding.name, op=binding.source.value, node=node.name)
        storage = self.alias_classes.storage(val, node.name, KIND_OF[binding.source], planned=False, origin=origin)
        self.value_of[node] = self.alias_classes.value(val, node.name, storage)
        self.bindings.append(replace(binding, value=self.value_of[node]))

    def _constant(self, node: fx.Node) -> None:
        """Add the value and the binding of a constant."""
        tensor = getattr(self.captured.graph_module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor):
            if isinstance(tensor, fx.GraphModule):
                what, hint = "control flow inside the graph (a higher-order op)", "avoid torch.cond and scan"
                see = "higher-order"
            else:
                what, hint = (
                    "an object inside the graph that is not a tensor",
                    "draw random numbers without a generator=",
                )
                see = "no-tensor"
            raise self._unsupported(node, what, hint, see=see)
        if isinstance(tensor, FakeTensor) or isinstance(node.meta.get("val"), FunctionalTensor):  # no bytes behind it
            what = "a view of a parameter or an input that tracing took for a constant"
            raise self._unsupported(node, what, "return a copy of it (.clone())", see="views")
        val = node.meta.get("val", tensor)
        origin = replace(origin_of(node), op=GIVEN)
        storage = self.alias_classes.storage(val, node.name, StorageKind.CONSTANT, planned=False, origin=origin)
        self.value_of[node] = self.alias_classes.value(val, node.name, storage)
        self.bindings.append(Binding(source=Source.CONSTANT, value=self.value_of[node], tensor=tensor))

    # -- what runs ---------------------------------------------------------------------------------------

    def _call(self, node: fx.Node, owned: dict[int, StorageKind]) -> None:
        """Add the results of a call as values and, unless it is a view or only makes memory, its op."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            result = self.results_of[source][index]
            if result is not None:
                self.value_of[node] = result
            else:
                self.other[node] = self.opaque_of.get((source, index), node.meta.get("val"))
            return
        if not isinstance(node.target, OpOverload):
            raise self._unsupported(
                node,
                f"{node.target} is not an ATen op",
                "avoid higher-order and symbolic operations",
                see="higher-order",
            )
        results = node.meta["val"]
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        before = len(self.alias_classes.storages)
        skipped: set[Any] = set()
        if is_mixed(node):
            for i in opaque_positions(node):
                self.opaque_of[node, i] = OpaqueResult(len(self.opaque_of))
            skipped = {i for i in range(len(results)) if (node, i) in self.opaque_of or i not in used_positions(node)}
            skipped |= {i for i, r in enumerate(results) if is_literal(r)}
        results = [] if is_check(node.target) else results
        outs = tuple(None if i in skipped else self._result(node, i, r, owned) for i, r in enumerate(results))
        if isinstance(node.meta["val"], (tuple, list)):
            self.results_of[node] = outs
        elif outs and outs[0] is not None:
            self.value_of[node] = outs[0]
        written = written_names(node.target)
        if node.target in MEMORY_ONLY:
            self.bare |= {*range(before, len(self.alias_classes.storages))}
            return
        if not written and len(self.alias_classes.storages) == before and not is_check(node.target):
            return
        self._op(node, written, outs)

    def _storage_of(self, value: int) -> int:
        """Return the storage of a value."""
        return self.alias_classes.values[value].storage

    def _result(self, node: fx.Node, i: int, result: Any, owned: dict[int, StorageKind]) -> int | None:
        """Add a result of a node as a value and return its index; None where there is no result."""
        if result is None:
            return None
        if not isinstance(result, torch.Tensor):
            raise self._unsupported(
                node, f"returns a {type(result).__name__}, known only at run time", "avoid .item()", see="no-tensor"
            )
        name = node.name if i == 0 else f"{node.name}:{i}"
        phase = StorageKind.GRADIENT if is_backward(node) else StorageKind.ACTIVATION
        key = storage_key(result)
        kind = owned.get(key, phase)
        storage = self.alias_classes.storage(result, name, kind, planned=key not in owned, origin=origin_of(node))
        return self.alias_classes.value(result, name, storage)

    def _op(self, node: fx.Node, written: tuple[str, ...], outs: tuple[int | None, ...]) -> None:
        """Add the op of a node, and its kernel call."""
        assert isinstance(node.target, OpOverload)
        read_nodes: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), read_nodes.append)
        reads = [self.value_of[n] for n in dict.fromkeys(read_nodes) if n not in self.other]
        if written:
            names = [a.name for a in node.target._schema.arguments]
            given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            targets: list[fx.Node] = []
            fx.node.map_arg([given[name] for name in written], targets.append)
            writes = [self.value_of[target] for target in targets]
            if any(a.is_out for a in node.target._schema.arguments) or node.target._opname in _OVERWRITES:
                reads = [r for r in reads if r not in writes]
            outs = ()
        else:
            writes = [o for o in outs if o is not None]
        # The op reads its shape only (`torch.empty_like(x).normal_()`), or any bytes will do: this counts as the first
        # write, so that the storage has a step at which it begins.
        begun = [r for r in reads if self._storage_of(r) in self.bare]
        reads = [r for r in reads if r not in begun]
        writes += [b for b in begun if b not in writes]
        self.bare -= {self._storage_of(w) for w in writes}
        device = self.alias_classes.storages[self._storage_of(writes[0])].device if writes else HOST
        self.ops.append(
            Op(
                name=node.name,
                target=str(node.target),
                phase=Phase.BACKWARD if is_backward(node) else Phase.FORWARD,
                reads=tuple(reads),
                writes=tuple(writes),
                direct=bool(written) or is_check(node.target) or writes_in_place(node.target, node.args, device),
                random=draws(node.target, node.args, node.kwargs),
                origin=origin_of(node),
                unrelated=self._unrelated(node, outs),
                checkpoint=node.meta.get(CHECKPOINT, 0),
                within=node.meta.get(WITHIN, ()),
                group=group_of(node.target, node.args),
            )
        )
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self._argument)
        kwargs = {**dict(kwargs), **node.meta.get("live", {})}
        returns_sequence = isinstance(node.meta["val"], (tuple, list))
        opaque_results = tuple((i, opaque.number) for (n, i), opaque in self.opaque_of.items() if n is node)
        self.kernels.append(
            KernelCall(
                target=node.target,
                args=tuple(args),
                kwargs=kwargs,
                outs=outs,
                returns_sequence=returns_sequence,
                opaque_results=opaque_results,
            )
        )

    def _argument(self, node: fx.Node) -> Any:
        """Return what stands for a node in a kernel's arguments."""
        return self.other[node] if node in self.other else Ref(self.value_of[node])

    def _unrelated(self, node: fx.Node, outs: tuple[int | None, ...]) -> tuple[tuple[int, int], ...]:
        """Return pairs of a result and a running statistic of batch norm that it does not depend on.

        In training mode, batch norm reads the running statistics only to compute their next values.
        """
        if node.target is not aten._native_batch_norm_legit_functional.default or node.args[5] is not True:
            return ()
        running = [self.value_of[n] for n in node.args[3:5] if isinstance(n, fx.Node)]
        return tuple((out, statistic) for out in outs[:3] if out is not None for statistic in running)

    def _unsupported(self, node: fx.Node, reason: str, hint: str, *, see: str) -> UnsupportedGraph:
        """Return an error that names the node's place in the model, and the heading `see` that explains it."""
        return UnsupportedGraph(place_of(node), reason, hint, see=see)

    def _finish(self) -> TracedGraph:
        """Return the traced graph, forward ops first."""
        order = sorted(range(len(self.ops)), key=lambda i: self.ops[i].phase is Phase.BACKWARD)  # stable
        made = {self.alias_classes.values[v].storage for op in self.ops for v in op.writes}
        bindings = tuple(replace(b, written=self.alias_classes.values[b.value].storage in made) for b in self.bindings)
        results = read_results(
            self.graph,
            self.value_of,
            self.alias_classes.values,
            bindings,
            made,
            self.captured,
            self.needs,
        )
        return TracedGraph(
            model=self.model,
            graph=Graph(
                ops=tuple(self.ops[i] for i in order),
                values=tuple(self.alias_classes.values),
                storages=self.alias_classes.sized(),
                outputs=results.fresh,
                gradients=results.gradients,
            ),
            kernels=tuple(self.kernels[i] for i in order),
            bindings=bindings,
            results=results,
            in_spec=self.captured.in_spec,
            out_spec=self.captured.out_spec,
            example_inputs=self.captured.inputs,
            training=self.captured.training,
            autocast=self.captured.autocast,
            readings=self.captured.readings,
            attention=self.captured.attention,
            device=self._device(),
        )

    def _device(self) -> torch.device:
        """Return the one device of the planned storages; raise `UnsupportedGraph` for several.

        Where nothing is planned (one op, whose result the caller gets), it is an accelerator that holds any storage.
        """
        planned = sorted({s.device for s in self.alias_classes.storages if s.planned})
        if len(planned) > 1:
            hint = "move the model and its inputs to one device"
            raise UnsupportedGraph(
                self.model, f"computes on several devices: {', '.join(planned)}", hint, see="several-devices"
            )
        others = sorted({s.device for s in self.alias_classes.storages if is_accelerator(torch.device(s.device))})
        return torch.device((*planned, *others, "cpu")[0])
