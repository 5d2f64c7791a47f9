"""Knows what a call of a program returns to its caller (`ResultsOfCall`), and what its backward takes (`Tangents`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.core.graph import Graph, Op
from memplan.runtime.memory.arena import dtype_of, view_within
from memplan.trace.traced import Returned, ReturnKind, Source, TracedGraph

_ELEMENTWISE = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"})


class ResultsOfCall:
    """Assembles the results of the calls of a step.

    Args:
        traced: The step at the places of its plan.
        parameters: The bindings of parameters, buffers and state, in the order in which a call has them.
    """

    def __init__(self, traced: TracedGraph, parameters: Sequence[int]) -> None:
        self._traced, self._parameters = traced, parameters
        self._fresh_at = {value: i for i, value in enumerate(traced.results.fresh)}
        returned = traced.results.returned
        alone = len(returned) == 1 and traced.out_spec.is_leaf()
        self._single = self._fresh_at.get(returned[0].value) if alone else None
        depth: list[int] = []
        for r in returned:
            chain = [r]
            while chain[-1].view_of is not None:
                chain.append(returned[chain[-1].view_of])
            depth.append(len(chain))
        # Views of one tensor are made in the order in which the model made them: autograd adds their gradients in it.
        self._order = sorted(range(len(returned)), key=lambda i: (depth[i], returned[i].value))

    def views_of(self, saved: Sequence[int]) -> list[int]:
        """Return the positions of new results that are views of saved values, and not saved themselves.

        Changing one in place changes the saved tensor.
        """
        storage_of = [v.storage for v in self._traced.graph.values]
        kept = {storage_of[v] for v in saved}
        return [i for v, i in self._fresh_at.items() if storage_of[v] in kept and v not in saved]

    def assemble(self, fresh: Sequence[torch.Tensor], current: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        """Return the model's result: new tensors, and views of them, of inputs or of parameters, known to autograd.

        Args:
            fresh: The new tensors that the step has made.
            current: The parameters, buffers and state of now.
            leaves: Those of the call's arguments.
        """
        if self._single is not None:
            return fresh[self._single]
        t = self._traced
        base: dict[int, Any] = {value: fresh[i] for value, i in self._fresh_at.items()}
        for b in t.bindings:
            if b.source is Source.INPUT:
                base[b.value] = leaves[b.index]
            elif b.tensor is not None:
                base[b.value] = b.tensor
        for position, i in enumerate(self._parameters):
            base[t.bindings[i].value] = current[position]
        made: list[Any] = [None] * len(self._order)
        for i in self._order:
            r = t.results.returned[i]
            if r.kind is ReturnKind.CONSTANT:
                made[i] = r.constant
            else:
                made[i] = self._tensor(r, base, made)
        return pytree.tree_unflatten([made[i] for i in t.results.leaves], t.out_spec)

    def _tensor(self, r: Returned, base: Mapping[int, torch.Tensor], made: Sequence[Any]) -> torch.Tensor:
        """Return an output: what the step or the caller has, or a view of it, or of an output that is `made`."""
        if r.view_of is not None:
            alias = self._alias(made[r.view_of], self._traced.results.returned[r.view_of].value, r.value)
        elif r.value == r.of:
            return base[r.of] if r.differentiable or not base[r.of].requires_grad else base[r.of].detach()
        else:
            alias = self._alias(base[r.of], r.of, r.value)
        return alias.detach() if r.detached or (alias.requires_grad and not r.differentiable) else alias

    def _alias(self, tensor: torch.Tensor, of: int, value: int) -> torch.Tensor:
        one, two = self._traced.graph.values[of], self._traced.graph.values[value]
        if one.dtype != two.dtype:
            return view_within(one, two, tensor.detach())
        return tensor.as_strided(two.shape, two.strides, tensor.storage_offset() + two.offset - one.offset)


class Tangents:
    """The gradients of a step's results, with which its backward begins.

    `traced`: the step at the places of its plan.
    """

    def __init__(self, traced: TracedGraph) -> None:
        of, values = traced.results.tangents, traced.graph.values
        # the index of the result and the value of each, in the order in which the backward takes them
        self.passed = [(of.index(b.value), values[b.value]) for b in traced.bound(Source.TANGENT)]
        self._traced = traced

    @cached_property
    def _spread(self) -> set[int]:
        """The results (indices) whose gradients may be one element, if they are zeros; few steps ask for them."""
        t = self._traced
        given = [b.value for b in t.bound(Source.TANGENT)]
        return {t.results.tangents.index(v) for v in given if all(_spreads(t.graph, op, v) for op in t.graph.ops)}

    def of(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], set[int]]:
        """Return the tangents with the traced strides, and the positions of missing ones, which are zeros.

        Zeros that only elementwise ops read are one element.

        Args:
            gradients: What autograd passes, for each new result of the step.
        """
        made, missing = [], set()
        for position, (i, v) in enumerate(self.passed):
            grad = gradients[i]
            if grad is not None and (grad.is_conj() or grad.is_neg()):
                grad = grad.resolve_conj().resolve_neg()
            if grad is None or grad.stride() != v.strides:
                device = torch.device(self._traced.graph.storages[v.storage].device)
                if grad is None:
                    missing.add(position)
                if grad is None and i in self._spread:
                    grad = torch.zeros((), dtype=dtype_of(v), device=device).expand(v.shape)
                else:
                    laid_out = torch.empty_strided(v.shape, v.strides, dtype=dtype_of(v), device=device)
                    grad = laid_out.zero_() if grad is None else laid_out.copy_(grad)
            made.append(grad)
        return made, missing


def _spreads(graph: Graph, op: Op, given: int) -> bool:
    """Return whether an op does not read a value, or by its elements alone, with the same results for any strides.

    The other operands and the results of such an op are contiguous and of its shape: torch gives results the layout of
    the operands, and one without a layout of its own must not change it.
    """
    whole, touched = graph.values[given], [graph.values[v] for v in (*op.reads, *op.writes)]
    if all(v.storage != whole.storage for v in touched):
        return True
    return (
        op.target in _ELEMENTWISE
        and given not in op.writes
        and all(v is whole for v in touched if v.storage == whole.storage)
        and all(v.shape == whole.shape and v.is_contiguous for v in touched)
    )
