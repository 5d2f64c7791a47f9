"""Drops attention masks that hide nothing, where the graph computes them from constants alone.

Libraries leave such a mask out in eager, and hand it to `scaled_dot_product_attention` while they are traced. A GPU's
fused kernels take no mask that is an expanded view: attention would run in single ops, and save every product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

_MOST = 1 << 28  # elements of a mask that is computed
_MASK, _DROPOUT, _CAUSAL = 3, 4, 5  # positions among the arguments of `scaled_dot_product_attention`
_NAMES = ("attn_mask", "dropout_p", "is_causal")
_MATRIX = 2  # dimensions
_RANDOM = ("rand", "dropout", "normal", "bernoulli", "multinomial", "empty")  # in names of what is not constant


def drop_constant_masks(graph: fx.Graph) -> int:
    """Replace constant masks of attentions: all true by none, a lower triangle by `is_causal`.

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
        if getattr(node.target, "__name__", "") != "scaled_dot_product_attention":
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
    if found:
        graph.eliminate_dead_code()
    return found


def _kind(mask: fx.Node) -> str:
    """Return "all" for a mask that hides nothing, "causal" for a lower triangle, and "other" for any other one."""
    found = _computed(mask)
    if found is None or found.dtype is not torch.bool or found.dim() < _MATRIX:
        return "other"
    if bool(found.all()):
        return "all"
    triangle = torch.ones(found.shape[-_MATRIX:], dtype=torch.bool).tril()
    return "causal" if triangle.shape[0] == triangle.shape[1] and bool((found == triangle).all()) else "other"


def _computed(mask: fx.Node) -> torch.Tensor | None:
    """Return the numbers of a mask, computed on the CPU; None where it depends on anything but constants."""
    needed: dict[fx.Node, None] = {}
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        name = str(getattr(node.target, "__name__", node.target))
        val = node.meta.get("example_value")
        large = isinstance(val, torch.Tensor) and val.numel() > _MOST
        if node.op not in ("call_function", "call_method") or large or any(word in name for word in _RANDOM):
            return None
        needed[node] = None
        todo += node.all_input_nodes
    made: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        for node in mask.graph.nodes:
            if node not in needed:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            kwargs = {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
            try:
                made[node] = _called(node, args, kwargs)
            except Exception:  # whatever cannot run here alone is no constant
                return None
    found = made[mask]
    return found if isinstance(found, torch.Tensor) else None


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)
