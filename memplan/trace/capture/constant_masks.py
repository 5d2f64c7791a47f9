"""Drops attention masks that hide nothing, where the graph computes them from constants alone.

Libraries leave such a mask out in eager, and hand it to `scaled_dot_product_attention` while they are traced. A GPU's
fused kernels take no mask that is an expanded view: attention would run in single ops, and save every product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

_ATTENTION = "scaled_dot_product_attention"
_MOST = 1 << 26  # elements of what is computed for a mask
_MASK = 3  # the position of the mask among the arguments of an attention
_NAMES = ("attn_mask", "dropout_p", "is_causal")
_MATRIX = 2  # dimensions
_VIEW_NAMES = """
    getitem view reshape expand expand_as unsqueeze squeeze transpose permute flatten unflatten narrow select chunk
    split to bool type contiguous
"""
_NEW_NAMES = """
    arange ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like
    eq ne lt le gt ge add sub mul and_ or_ xor invert logical_and logical_or logical_not
    bitwise_and bitwise_or bitwise_not diff cumsum tril triu clone repeat where
"""
# Functions, methods and operators, by name without underscores around it: those whose result may be a view of an
# argument, those whose result is new, and what else may read a mask, or the positions that it is made of.
_VIEWS, _NEW = frozenset(_VIEW_NAMES.split()), frozenset(_NEW_NAMES.split())
_READERS = frozenset(("embedding", "float", "matmul", "size", "dim", "numel"))


def drop_constant_masks(graph: fx.Graph) -> int:
    """Replace constant masks of attentions: all true by none, a lower triangle by `is_causal`.

    A mask is constant if known functions that change nothing make it of constants, and nothing writes to it.

    Args:
        graph: A graph of dynamo's, which is changed.

    Returns:
        The number of attentions that have no mask any more.

    Example:
        >>> drop_constant_masks(module.graph)
        24
    """
    known: dict[fx.Node, str] = {}
    found = 0
    for node in graph.nodes:
        if _name(node) != _ATTENTION:
            continue
        options = dict(zip(_NAMES, node.args[_MASK:], strict=False)) | dict(node.kwargs)
        mask = options.get("attn_mask")
        if not isinstance(mask, fx.Node) or options.get("is_causal", False) is not False:
            continue
        kind = known[mask] = known.get(mask) or _kind(mask)
        if kind != "other":
            options |= {"attn_mask": None, "is_causal": kind == "causal"}
            node.args, node.kwargs = node.args[:_MASK], options
            found += 1
    return found


def _kind(mask: fx.Node) -> str:
    """Return "all" for a mask that hides nothing, "causal" for a lower triangle, and "other" for any other one."""
    made = _made_of_constants(mask)
    if made is None or _may_change(made):
        return "other"
    try:
        found = _computed(mask, made).cpu()
    except Exception:  # whatever cannot run here alone is no constant
        return "other"
    if found.dtype is not torch.bool or found.dim() < _MATRIX:
        return "other"
    if bool(found.all()):
        return "all"
    triangle = torch.ones(found.shape[-_MATRIX:], dtype=torch.bool).tril()
    return "causal" if triangle.shape[0] == triangle.shape[1] and bool((found == triangle).all()) else "other"


def _name(node: fx.Node) -> str:
    """Return the name of what a node calls: "eq" for a method `__eq__`, too; "" for what is no call."""
    if node.op not in ("call_function", "call_method"):
        return ""
    name = str(getattr(node.target, "__name__", node.target))
    return name.strip("_") if name.startswith("__") else name


def _made_of_constants(mask: fx.Node) -> set[fx.Node] | None:
    """Return the nodes that make a mask, itself too; None where it depends on anything but constants."""
    needed: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        val = node.meta.get("example_value")
        large = isinstance(val, torch.Tensor) and val.numel() > _MOST
        if large or _name(node) not in _VIEWS | _NEW or not _is_pure(node):
            return None
        needed.add(node)
        todo += node.all_input_nodes
    return needed


def _is_pure(node: fx.Node) -> bool:
    """Return whether a call of a known function writes to none of its arguments."""
    return "out" not in node.kwargs and "inplace" not in node.kwargs


def _may_change(made: Iterable[fx.Node]) -> bool:
    """Return whether something may write to what these nodes make, or to views of it."""
    todo, seen = list(made), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            name = _name(user)
            if name == _ATTENTION or (name in _NEW | _READERS and _is_pure(user)):
                continue
            if name not in _VIEWS or not _is_pure(user):
                return True
            todo.append(user)
    return False


def _computed(mask: fx.Node, needed: set[fx.Node]) -> torch.Tensor:
    """Return the numbers of a mask, computed on the CPU."""
    made: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        for node in mask.graph.nodes:
            if node not in needed:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            kwargs = {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
            function: Any = node.target
            made[node] = (
                getattr(args[0], function)(*args[1:], **kwargs)
                if node.op == "call_method"
                else function(*args, **kwargs)
            )
    found: torch.Tensor = made[mask]
    return found
