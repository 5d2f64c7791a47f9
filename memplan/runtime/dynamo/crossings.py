"""Recognises the tensors that the graphs of a model pass to each other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Key = tuple[str, int, int]


class Crossings:
    """The tensors that graphs pass to each other: what one graph returns, another takes.

    A tensor is recognised by its storage, as long as it is alive.
    """

    def __init__(self) -> None:
        self._returned: dict[int, tuple[weakref.ref[torch.Tensor], _Key]] = {}

    def keys_of(self, inputs: Sequence[Any]) -> dict[int, Hashable]:
        """Return, by position, a key of each input: that of the result it is, or of its own storage."""
        found: dict[int, Hashable] = {}
        for i, x in enumerate(inputs):
            if isinstance(x, torch.Tensor):
                address = x.untyped_storage()._cdata
                ref, key = self._returned.get(address, (None, None))
                found[i] = key if ref is not None and ref() is not None else ("input", address)
        return found

    def returned(self, instance: int, result: Any) -> dict[int, Hashable]:
        """Return, by position among the leaves of a result, a key of each tensor, under which later graphs find it."""
        alive = {address: entry for address, entry in self._returned.items() if entry[0]() is not None}
        found: dict[int, Hashable] = {}
        for i, x in enumerate(pytree.tree_leaves(result)):
            if isinstance(x, torch.Tensor):
                found[i] = key = ("result", instance, i)
                alive.setdefault(x.untyped_storage()._cdata, (weakref.ref(x), key))
        self._returned = alive
        return found
