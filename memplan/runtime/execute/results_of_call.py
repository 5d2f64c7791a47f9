"""`ResultsOfCall`: makes what the model returns of the tensors that a program has made for a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.runtime.memory.arena import view_within
from memplan.trace.traced import ReturnKind, Source, TracedGraph


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
        results = []
        for r in t.results.returned:
            if r.kind is ReturnKind.CONSTANT:
                results.append(r.constant)
            else:
                alias = base[r.of] if r.value == r.of else self._alias(base[r.of], r.of, r.value)
                results.append(alias if r.differentiable or not alias.requires_grad else alias.detach())
        return pytree.tree_unflatten(results, t.out_spec)

    def _alias(self, tensor: torch.Tensor, of: int, value: int) -> torch.Tensor:
        one, two = self._traced.graph.values[of], self._traced.graph.values[value]
        if one.dtype != two.dtype:
            return view_within(one, two, tensor.detach())
        if (one.shape, one.strides, one.offset) == (two.shape, two.strides, two.offset):
            return tensor
        return tensor.as_strided(two.shape, two.strides, tensor.storage_offset() + two.offset - one.offset)
