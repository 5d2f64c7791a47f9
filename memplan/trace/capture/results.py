"""Find the tensors that a model returns.

That is: which leaves of its result are one tensor, which are views, and which objects hold them.

An object that pytree does not know, such as the cache of a language model of transformers, is returned as its tensors,
and made again from them by each call: an object of the same class with the same attributes. What has no tensor is the
same object in each call, except lists, tuples and dicts.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from memplan.errors import UnsupportedCall
from memplan.torch_inside.graphs import FunctionalTensor, FunctionalTensorMode, PlainAOTOutput
from memplan.trace.passes.nodes import is_view
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


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The recipe that makes an object of its tensors.

    `kind` is its class, `attributes` the structure of its `__dict__`; `constants` are the leaves that are no tensors,
    by position. `required` are the positions among the tensors of those that require a gradient in eager.
    """

    kind: type
    attributes: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    required: frozenset[int]


class ReturnedObject:
    """An object that forward returned, as a node of pytree: its children are its tensors.

    What is made of the node again is not a `ReturnedObject`, but an object like the one that forward returned.
    """

    def __init__(self, returned: object) -> None:
        leaves, attributes = pytree.tree_flatten(with_returned_objects(dict(vars(returned))))
        tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.tensors = [x.detach() for _, x in tensors]
        self.blueprint = Blueprint(
            kind=type(returned),
            attributes=attributes,
            constants=tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)),
            required=frozenset(i for i, (_, x) in enumerate(tensors) if x.requires_grad),
        )


def with_returned_objects(result: Any) -> Any:
    """Return a result in which each object that holds tensors, and that pytree does not know, is a `ReturnedObject`."""
    return pytree.tree_map_only(_is_object_with_tensors, ReturnedObject, result)


def returning_objects(module: nn.Module) -> nn.Module:
    """Let dynamo's module return objects as their tensors."""
    codegen: Any = module.graph._codegen  # type: ignore[union-attr]
    outputs_of = codegen.process_outputs
    codegen.process_outputs = lambda outputs: with_returned_objects(outputs_of(outputs))
    return module


def _is_object_with_tensors(x: object) -> bool:
    """Return whether `x` has attributes, and tensors among them, and is no tensor, module or class itself."""
    return _has_attributes(x) and _holds_a_tensor(x, set())


def _has_attributes(x: object) -> bool:
    return hasattr(x, "__dict__") and not isinstance(x, (torch.Tensor, nn.Module, type)) and not callable(x)


def _holds_a_tensor(x: object, seen: set[int]) -> bool:
    """Return whether a tensor is among the attributes of `x`, or of the objects that these are or hold."""
    if id(x) in seen:
        return False
    seen.add(id(x))
    held: Iterable[Any] = pytree.tree_leaves(dict(vars(x)))
    return any(isinstance(y, torch.Tensor) or (_has_attributes(y) and _holds_a_tensor(y, seen)) for y in held)


def _made(tensors: Iterable[Any], blueprint: Blueprint) -> Any:
    """Return the object of a blueprint with these tensors (or whatever stands for them)."""
    given = iter(_Unplanned.of(x) if i in blueprint.required else x for i, x in enumerate(tensors))
    constants = dict(blueprint.constants)
    count = blueprint.attributes.num_leaves
    leaves = [constants[i] if i in constants else next(given) for i in range(count)]
    made: Any = object.__new__(blueprint.kind)
    vars(made).update(pytree.tree_unflatten(leaves, blueprint.attributes))
    return made


class _Unplanned(torch.autograd.Function):
    """Marks a tensor of a returned object, for which no gradient is planned: a backward through it raises."""

    @staticmethod
    def of(x: Any) -> Any:
        """Return the tensor, which requires a gradient where gradients are recorded, as in eager."""
        if not isinstance(x, torch.Tensor) or not torch.is_grad_enabled():
            return x
        return _Unplanned.apply(torch.empty((), requires_grad=True), x)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedCall(
            "a loss depends on an object that forward returns, such as a cache, for which no gradient is planned",
            hint="return the tensor by itself, or in a tuple, list or dict",
            see="types",
        )


pytree.register_pytree_node(ReturnedObject, lambda x: (x.tensors, x.blueprint), _made)
