"""Find the bytes that a node of a functional graph reads, makes and changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memplan.trace.passes.error_checks import is_check
from memplan.trace.passes.randomness import draws
from memplan.trace.passes.rewrite import storage_key


def tensors_of(node: Any) -> list[torch.Tensor]:
    """Return the fake tensors that a node makes (for several nodes: all of them); none for what is no node."""
    if isinstance(node, (list, tuple)):
        return [t for one in node for t in tensors_of(one)]
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    flat = val if isinstance(val, (tuple, list)) else (val,)
    return [t for t in flat if isinstance(t, torch.Tensor)]


def keys_of(node: Any) -> set[int]:
    """Return the storages of these tensors, as `storage_key` names them."""
    return {storage_key(t) for t in tensors_of(node)}


def is_fixed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain strided memory whose sizes are numbers, not symbols."""
    if tensor.layout is not torch.strided:
        return False
    return all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last.

    A fake storage may be larger, by an amount that depends on what was traced before.
    """
    if 0 in tensor.shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.dtype.itemsize


def is_view(node: fx.Node) -> bool:
    """Return whether everything that a node makes are bytes of its arguments, unchanged."""
    return not has_effects(node) and keys_of(node) <= keys_of(node.all_input_nodes)


def has_effects(node: fx.Node) -> bool:
    """Return whether a node writes in place, draws random numbers or only raises: its place in the program must not
    change.
    """
    schema = getattr(node.target, "_schema", None)
    return (
        is_check(node.target)
        or (schema is not None and schema.is_mutable)
        or draws(node.target, node.args, node.kwargs)
    )


def written_in(graph: fx.Graph) -> set[int]:
    """Return the storages that some op of the graph writes in place."""
    found = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
            for a in schema.arguments:
                if a.name in given and a.alias_info is not None and a.alias_info.is_write:
                    found |= keys_of(given[a.name])
    return found
