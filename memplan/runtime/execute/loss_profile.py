"""Predicts what a loss outside of a module allocates between its forward and its backward, from autograd's graph.

When the backward of a planned step begins, the caller's part of the graph has run. Its nodes still say which results
they had, how large these were, and which of them they kept; the order of the nodes says when.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

# what makes a node, without "Backward" and its number, by what its result and its gradients take
_VIEWS = frozenset({
    "Alias", "AsStrided", "Detach", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeView", "Unsqueeze", "View", "ViewAsReal",
})  # fmt: skip
_ENLARGED = frozenset({"AsStrided", "Diagonal", "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Unfold"})
_PASSED_ON = (_VIEWS - _ENLARGED) | {"Add", "Clone", "Sum"}  # the gradient is the one that comes, or a view of it
# what the formula of a backward makes on its way, in gradients of its input
_ON_THE_WAY = {
    "Abs": 1, "BinaryCrossEntropy": 2, "BinaryCrossEntropyWithLogits": 1, "Div": 1, "KlDiv": 1, "LinalgVectorNorm": 2,
    "MseLoss": 1, "Norm": 2, "Pow": 2, "SmoothL1Loss": 1, "Xlogy": 1,
}  # fmt: skip
_RESULTS = ("result", "output")  # how the attributes begin that hold a node's own result
_NO_ORDER = 1 << 62  # sequence numbers from here on are of nodes without a place in the order: they add to `.grad`


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that are allocated from one moment until before another one."""

    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProfile:
    """The bytes that a caller had from the end of a forward to the begin of its backward, in moments of its own.

    Attributes:
        own: Its results, those that autograd keeps for it, and gradients, those for the step included.
        outputs: By the number of an output of the step: how long it is needed.
    """

    own: tuple[Held, ...] = ()
    outputs: Mapping[int, Held] = field(default_factory=dict)

    def peak(self, dropped: Collection[int]) -> int:
        """Return the most bytes at once, where the caller drops these outputs as soon as it can, and has the others."""
        held = [*self.own, *(self.outputs[i] for i in dropped if i in self.outputs)]
        change = [0] * (1 + max((one.end for one in held), default=0))
        for one in held:
            change[one.start] += one.nbytes
            change[one.end] -= one.nbytes
        return max(accumulate(change), default=0)


def loss_profile(step: Any) -> LossProfile:
    """Return what the caller had since the forward, whose backward begins now.

    What it allocates without autograd is not seen. Nothing is known where the backward was not begun by
    `torch.autograd`.

    Args:
        step: The node of the step in autograd's graph, while its backward runs.
    """
    nodes = _Nodes(step, _roots(step))
    return LossProfile(own=(*nodes.results(), *nodes.gradients()), outputs=nodes.outputs())


def _roots(step: Any) -> list[Any]:
    """Return the nodes at which the backward began that has come to `step`, in this thread or in one that waits.

    No frame is kept in a variable, whose own frame it may be: what it refers to would live until garbage is collected.
    """
    this = threading.get_ident()
    for thread in (this, *(other for other in sys._current_frames() if other != this)):
        found = _begun_in(sys._current_frames().get(thread))
        if any(node is step for node in _walk(found, step)):
            return found
    return []


def _begun_in(frame: FrameType | None) -> list[Any]:
    """Return the nodes at which a call of the autograd engine began, if a frame or one of its callers is one."""
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return []
    outputs = frame.f_locals.get("t_outputs", ())
    nodes = (getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs)
    return [node for node in nodes if node is not None]


def _walk(roots: Sequence[Any], step: Any) -> Iterator[Any]:
    """Yield each node from the roots down to `step`, this included, that is no older than it."""
    seen: set[Any] = set()
    oldest, todo = step._sequence_nr(), list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen or not oldest <= node._sequence_nr() < _NO_ORDER:
            continue
        seen.add(node)
        yield node
        if node is not step:
            todo += [following for following, _ in node.next_functions]


def _passing_to(step: Any, nodes: Sequence[Any]) -> set[Any]:
    """Return those of the nodes whose gradients come to `step`, this included."""
    before = defaultdict[Any, list[Any]](list)
    for node in nodes:
        for following, _ in node.next_functions if node is not step else ():
            before[following].append(node)
    found, todo = {step}, [step]
    while todo:
        new = [node for node in before[todo.pop()] if node not in found]
        found.update(new)
        todo += new
    return found


def _is_planned(node: Any) -> bool:
    return getattr(getattr(type(node), "_forward_cls", None), "is_planned", False)


class _Nodes:
    """The nodes of the caller between a step and what ran after it, in the order of the forward.

    Moments are numbered: the forward of each node, and then the backward of each in reverse order. All these nodes pass
    gradients on to the step, so that their backward has run.
    """

    def __init__(self, step: Any, roots: Sequence[Any]) -> None:
        found = list(_walk(roots, step))
        later = [node._sequence_nr() for node in found if _is_planned(node) and node is not step]
        newest = min(later, default=_NO_ORDER)  # what ran after another step belongs to that one
        passing = _passing_to(step, found)
        own = [n for n in found if n in passing and not _is_planned(n) and n._sequence_nr() < newest]
        self.order = sorted(own, key=lambda node: node._sequence_nr())
        self._step, self._at = step, {node: i for i, node in enumerate(self.order)}
        self._end = 2 * len(self.order)

    def _backward(self, node: Any) -> int:
        return self._end - 1 - self._at[node]

    def results(self) -> Iterator[Held]:
        """Yield the results of the forward: alive until the last node that takes them, or keeps them, has run."""
        for i, node in enumerate(self.order):
            yield Held(start=i, end=self._ends[node, None], nbytes=0 if _kind(node) in _VIEWS else _nbytes(node))
            taken = node.next_functions[0][0] if node.next_functions else None
            if getattr(node, "_saved_reduction", 0):  # a loss that is reduced is made whole first
                yield Held(start=i, end=i + 1, nbytes=0 if taken is None else _nbytes(taken))

    def outputs(self) -> dict[int, Held]:
        """Return how long the outputs of the step are needed that the caller takes; it drops others at once."""
        of = ((index, end) for (node, index), end in self._ends.items() if node is self._step and index is not None)
        return {index: Held(start=0, end=end, nbytes=_nbytes(self._step, index)) for index, end in of}

    @cached_property
    def _ends(self) -> dict[tuple[Any, int | None], int]:
        """The moments from which results of nodes are not needed, and outputs of the step: (the step, their number)."""
        ends: dict[tuple[Any, int | None], int] = {(node, None): i + 1 for node, i in self._at.items()}
        for i, node in enumerate(self.order):
            keeps_result, keeps_inputs = _kept(node)
            if keeps_result:
                self._extend(ends, (node, 0), self._backward(node) + 1)
            for edge in node.next_functions:
                self._extend(ends, edge, self._backward(node) + 1 if keeps_inputs else i + 1)
        return ends

    def _extend(self, ends: dict[tuple[Any, int | None], int], edge: tuple[Any, int], end: int) -> None:
        """Keep a result until `end`, and that of which it is a view."""
        node, index = edge
        while node in self._at:
            ends[node, None] = max(ends[node, None], end)
            if _kind(node) not in _VIEWS or not node.next_functions:
                return
            node, index = node.next_functions[0]
        if node is self._step:
            ends[node, index] = max(ends.get((node, index), 0), end)

    def gradients(self) -> Iterator[Held]:
        """Yield the gradients: alive from the backward that makes them until the one that takes them has run."""
        for node in self.order:
            made = self._backward(node)
            passes = _kind(node) in _PASSED_ON
            sizes = [_nbytes(*edge) for edge in node.next_functions if edge[0] is not None]
            yield Held(start=made, end=made + 1, nbytes=_ON_THE_WAY.get(_kind(node), 0) * max(sizes, default=0))
            for taken, index in node.next_functions:
                if taken is self._step or taken in self._at:
                    end = self._end if taken is self._step else self._backward(taken) + 1
                    yield Held(start=made, end=end, nbytes=0 if passes else _nbytes(taken, index))


def _kind(node: Any) -> str:
    """Return what makes a node: "View" of "ViewBackward0"."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _kept(node: Any) -> tuple[bool, bool]:
    """Return whether a node kept its result for the backward, which has run, and whether it kept what it took."""
    if isinstance(node, BackwardCFunction):  # of a user's own function, which does not say what it has kept
        return True, True
    kind: Any = type(node)
    kept = [name for name in _attributes(kind) if _was_kept(node, name)]
    own = [name.removeprefix("_saved_").startswith(_RESULTS) for name in kept]
    return any(own), not all(own)


@cache
def _attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _was_kept(node: Any, name: str) -> bool:
    """Return whether an attribute was a tensor: they are freed once the backward has run, and reading them raises."""
    try:
        found = getattr(node, name)
    except RuntimeError:
        return True
    return isinstance(found, torch.Tensor)


def _nbytes(node: Any, index: int | None = None) -> int:
    """Return the bytes of the results of a node, or of one of them."""
    made = node._input_metadata if index is None else node._input_metadata[index : index + 1]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in made if not one.is_nested_tensor)
