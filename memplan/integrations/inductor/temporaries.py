"""Measures the bytes that kernels of libraries allocate while they run, which no line of a wrapper shows.

Convolutions and attention allocate workspaces of their own. Each distinct call runs once, on throw-away tensors of its
sizes and strides, while nothing of the step is there yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.devices.measure import peak_bytes

_NEVER_RUN = ("_c10d_functional", "c10d")  # collectives, which wait for other processes


class Temporaries:
    """The bytes that kernels need beside their operands and results, by the signature of the call."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, node: Any) -> int:
        """Return the bytes that the kernel of an IR node needs beside its operands and results.

        A kernel that cannot run on made-up numbers is taken to need as much as its operands and results together.
        """
        origin = _origin(node)
        if origin is None or not isinstance(origin.target, OpOverload) or origin.target.namespace in _NEVER_RUN:
            return 0
        leaves, spec = pytree.tree_flatten((origin.args, origin.kwargs))
        examples = _examples(node, leaves)
        key = (origin.target, tuple(map(_described, examples)))
        if key not in self._known:
            self._known[key] = _measured(origin.target, examples, spec)
        return self._known[key]


def _measured(target: OpOverload, examples: Sequence[Any], spec: pytree.TreeSpec) -> int:
    """Return the bytes that a call needs beside its operands and results."""
    kept: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        real = [_real(one) if isinstance(one, torch.Tensor) else one for one in examples]
        tensors = [one for one in real if isinstance(one, torch.Tensor)]
        device = next((t.device for t in tensors), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        args, kwargs = pytree.tree_unflatten(real, spec)
        try:
            target(*args, **kwargs)  # the first call fills caches
            (peak,) = peak_bytes([lambda: kept.append(target(*args, **kwargs))], device)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return sum(t.untyped_storage().nbytes() for t in tensors)
    given = {t.untyped_storage()._cdata for t in tensors}
    made = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in pytree.tree_leaves(kept)
        if isinstance(t, torch.Tensor)
    }
    return max(peak - sum(nbytes for storage, nbytes in made.items() if storage not in given), 0)


def _real(value: torch.Tensor) -> torch.Tensor:
    """Return zeros in the sizes and strides of a fake tensor."""
    sizes, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()


def _origin(node: Any) -> fx.Node | None:
    """Return the node of the lowered graph whose op a kernel runs."""
    found: fx.Node | None = getattr(node, "fx_node", None) or node.get_origin_node()
    if found is None and len(node.get_origins()) == 1:
        (found,) = node.get_origins()
    return found


def _examples(node: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call, with fake tensors in the strides in which the kernel gets them."""
    given = [one for one in getattr(node, "inputs", ()) if isinstance(one, ir.IRNode) and one.has_tensor_output()]
    count = sum(isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor) for leaf in leaves)
    strides = iter([tuple(int(s) for s in one.get_stride()) for one in given] if len(given) == count else ())
    found = []
    for leaf in leaves:
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(leaf, fx.Node) and isinstance(value, torch.Tensor):
            own = next(strides, None)
            if own is not None and len(own) == value.dim() and own != tuple(value.stride()):
                value = value.as_strided(value.size(), own, 0)
        found.append(value)
    return found


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), tuple(value.stride()), str(value.device)
    return repr(value)
