"""Find results that are no values of the graph: numbers, None, and random states that one kernel passes to another.

Fused attention on CUDA returns its random state for its own backward: in the host's memory when it runs eagerly, in the
device's while a CUDA graph is captured (aten/src/ATen/native/transformers/cuda/attention.cu, "Seed and Offset"). A copy
at a planned address would be neither. It also returns sizes as numbers, which are known when it is traced.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_STATES = {"philox_seed", "philox_offset", "rng_state", "unused", "seed", "offset"}  # names in schemas of attention


def is_literal(result: Any) -> bool:
    """Return whether a traced result is known already: None, or a number."""
    return result is None or isinstance(result, (bool, int, float))


def is_mixed(node: fx.Node) -> bool:
    """Return whether some results of a node with several are no plain tensors, so that each is read on its own."""
    results = node.meta["val"]
    return isinstance(results, (tuple, list)) and (any(map(is_literal, results)) or bool(opaque_positions(node)))


def opaque_positions(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of those results of a node that are random states, read by backward kernels only."""
    assert isinstance(node.target, OpOverload)
    named = [i for i in range(len(node.target._schema.returns)) if is_random_state(node.target, i)]
    return tuple(i for i in named if isinstance(node.meta["val"][i], torch.Tensor) and all(_read_by(node, i)))


def is_random_state(target: Any, position: int) -> bool:
    """Return whether a result of an op is a random state, as its schema names it."""
    if not isinstance(target, OpOverload) or position >= len(target._schema.returns):
        return False
    return target._schema.returns[position].name in _STATES


def used_positions(node: fx.Node) -> set[Any]:
    """Return the positions of those results of a node that something reads."""
    return {user.args[1] for user in node.users if user.target is operator.getitem and user.users}


def _read_by(node: fx.Node, position: int) -> list[bool]:
    """Return, for each reader of one result, whether it is a backward kernel."""
    items = [user for user in node.users if user.target is operator.getitem and user.args[1] == position]
    readers = [reader for item in items for reader in item.users]
    return [isinstance(r.target, OpOverload) and r.target._opname.endswith("backward") for r in readers]
