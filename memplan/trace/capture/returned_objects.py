"""Objects that forward returns and pytree does not know, such as the cache of a language model of transformers.

Such an object is returned as its tensors, and made again from them by each call: an object of the same class with the
same attributes. What has no tensor is the same object in each call, except lists, tuples and dicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memplan.errors import UnsupportedCall


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
