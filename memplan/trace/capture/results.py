"""The tensors that a model returns: which leaves of its result are one tensor, and which are views of one another."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from memplan.trace.passes.aliasing import is_view
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import aten

Once = tuple[pytree.TreeSpec, tuple[int, ...]]  # the structure of a result, and the output that each leaf is


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultView:
    """An output as one among all: a view of output `of` (None: of none), by way of `detach()` or not.

    `used`: the forward computes something from it, or from views of it.
    """

    of: int | None = None
    detached: bool = False
    used: bool = False


@contextlib.contextmanager
def returning_once(module: nn.Module) -> Iterator[list[Once]]:
    """Let a front end's module return each tensor of its result once, and no structure; yields what each call returned.

    A tensor that is returned twice is one output, with one gradient, in everything that follows. Pieces of a tensor
    (`split`) are views of it where the tensor, or a piece by another op, is returned too, and not tensors of their own.
    """
    found: list[Once] = []
    several: list[torch.Tensor] = []
    of_several = torch._functionalize_is_multi_output_view  # type: ignore[attr-defined]

    def is_piece(x: torch.Tensor) -> bool:
        """Return whether AOTAutograd may take an output for a tensor of its own: others in its bytes are of its op."""
        return of_several(x) and not any(x is one for one in several)

    def once(of: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns the outputs of `of`."""

        def outputs(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            leaves, spec = pytree.tree_flatten(of(*args, **kwargs))
            keys = [id(x) if isinstance(x, torch.Tensor) else (i,) for i, x in enumerate(leaves)]
            first = dict(zip(reversed(keys), reversed(leaves), strict=True))
            number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
            found.append((spec, tuple(number[key] for key in keys)))
            several.extend(_by_several_ops(outputs := [first[key] for key in number]))
            return tuple(outputs)

        return outputs

    holder: Any = module
    name = "forward"
    if isinstance(module, fx.GraphModule):  # which AOTAutograd interprets
        holder, name = module.graph._codegen, "process_outputs"
    held: dict[str, Any] = vars(holder)
    before = dict(held)
    held[name] = once(getattr(holder, name))
    try:
        with mock.patch.object(torch, "_functionalize_is_multi_output_view", is_piece):
            yield found
    finally:
        held.pop(name)
        held.update({name: before[name]} if name in before else {})


def _by_several_ops(outputs: list[Any]) -> list[torch.Tensor]:
    """Return those outputs of a trace (as AOTAutograd wraps them) whose bytes are also returned by another op."""
    traced = [x for x in outputs if isinstance(x, FunctionalTensor) and x.requires_grad]
    weak: Callable[[Any], StorageWeakRef] = StorageWeakRef
    made_by = defaultdict[StorageWeakRef, set[Any]](set)
    with FunctionalTensorMode():  # reading `grad_fn` after a change in place makes it anew
        for x in traced:
            made_by[weak(x.untyped_storage())].add(x.grad_fn)
    return [x.elem for x in traced if len(made_by[weak(x.untyped_storage())]) > 1]


def views_among(graph: fx.Graph) -> tuple[ResultView, ...]:
    """Return what each output of the model is among them, by the views that a functional graph makes."""
    _, results, descs = returned_by(graph)
    outputs = [node for node, desc in zip(results, descs, strict=True) if isinstance(desc, PlainAOTOutput)]
    number = {node: i for i, node in reversed(list(enumerate(outputs))) if isinstance(node, fx.Node)}
    return tuple(_view(node, number) for node in outputs)


def _view(output: Any, number: dict[Any, int]) -> ResultView:
    """Return what an output is; `number` has the outputs."""
    node: Any = output
    used, detached = isinstance(node, fx.Node) and _is_used(node), False
    while isinstance(node, fx.Node) and node.op == "call_function" and is_view(node):
        detached = detached or node.target is aten.detach.default
        node = node.args[0]
        of = number.get(node)
        if of is not None:
            return ResultView(of=of, detached=detached, used=used)
    return ResultView(detached=detached, used=used)


def _is_used(node: fx.Node) -> bool:
    """Return whether the forward computes something from a node or a view of it."""
    readers = [n for n in node.users if n.op != "output" and not is_backward(n) and n.target is not aten.detach.default]
    return any(_is_used(n) if is_view(n) else True for n in readers)
