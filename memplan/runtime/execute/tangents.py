"""`Tangents`: what autograd passes to the backward of a step, as the backward takes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from memplan.planning.caller_side import read_by_elements
from memplan.runtime.execute.held_gradients import Free, note_own
from memplan.runtime.memory.arena import dtype_of
from memplan.trace.traced import Source, TracedGraph


class Tangents:
    """The gradients of a step's results, with which its backward begins.

    Args:
        traced: The step at the places of its plan.
        dropped: As in `Program`: what the backward frees once it was read; None for nothing.

    Attributes:
        passed: The index of the result and the value of each tangent, in the order in which the backward takes them.
    """

    def __init__(self, traced: TracedGraph, dropped: Free | None) -> None:
        of, values = traced.results.tangents, traced.graph.values
        self.passed = [(of.index(b.value), values[b.value]) for b in traced.bound(Source.TANGENT)]
        self._traced, self._dropped = traced, dropped

    @cached_property
    def _spread(self) -> set[int]:
        """The results (indices) whose gradients may be one element, if they are zeros; few steps ask for them."""
        bound = [b.value for b in self._traced.bound(Source.TANGENT)]
        return {self._traced.results.tangents.index(value) for value in read_by_elements(self._traced.graph, bound)}

    def of(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], set[int]]:
        """Return the tangents with the traced strides, and the positions of missing ones, which are zeros.

        Those that are made here are freed once they were read. Zeros that only elementwise ops read are one element.

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
                    note_own(self._dropped, grad)
            made.append(grad)
        return made, missing
