"""Sees in the first training steps what the caller of a program keeps of its results, and allocates for a loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memplan.planning.caller_side import CallerSide
from memplan.runtime.execute.loss_profile import LossProfile, loss_profile

_log = logging.getLogger("memplan")
_BACKWARDS = 4  # that are observed: a caller may do something else in its first step


class CallerObserver:
    """Observes the calls of one program. `is_done`: nothing is to be told to it any more."""

    def __init__(self) -> None:
        self._left = _BACKWARDS
        self._losses: list[tuple[LossProfile, int]] = []  # with the bytes of the gradients for the step
        self._returned: list[StorageWeakRef] = []
        self._missing: set[int] | None = None  # of results, in all backwards so far
        self._gradients: dict[StorageWeakRef, int] = {}  # that were set when the forward ended, and their bytes
        self._held = 0  # the most bytes of these that were freed before the backward began

    @property
    def is_done(self) -> bool:
        return self._left <= 0  # threads may count at once

    @property
    def backwards(self) -> int:
        """The backwards that it has seen."""
        return _BACKWARDS - max(self._left, 0)

    def forward_ended(self, results: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Take the tensors that a forward is about to return, and its parameters. They are not kept alive."""
        self._returned = [StorageWeakRef(r.untyped_storage()) for r in results]  # type: ignore[no-untyped-call]
        leaves = (p for p in parameters if p.is_leaf or p.retains_grad)  # for others, torch warns
        gradients = (p.grad for p in leaves if p.grad is not None and _has_bytes(p.grad))
        storages = {storage.data_ptr(): storage for storage in (g.untyped_storage() for g in gradients)}
        self._gradients = {StorageWeakRef(s): s.nbytes() for s in storages.values()}  # type: ignore[no-untyped-call]

    def backward_begins(self, step: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the node of a step in autograd's graph, whose backward begins with these gradients of its results."""
        self._left -= 1
        freed = (nbytes for ref, nbytes in self._gradients.items() if ref.expired())  # type: ignore[no-untyped-call]
        self._held = max(self._held, sum(freed))
        storages = [g.untyped_storage() for g in gradients if g is not None and _has_bytes(g)]
        passed = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        try:
            self._losses.append((loss_profile(step), passed))
        except Exception as error:  # it is a prediction: whatever a node of another library does, the backward runs
            _log.debug("what the loss allocates is not known: %s: %s", type(error).__name__, error)
        missing = {i for i, g in enumerate(gradients) if g is None}
        self._missing = missing if self._missing is None else self._missing & missing

    def side(self, names: Sequence[str], gradients: Mapping[int, str]) -> CallerSide:
        """Return what was seen; `names` are those of the storages of the results, `gradients` of their gradients."""
        freed = [bool(ref.expired()) for ref in self._returned]  # type: ignore[no-untyped-call]
        kept = {name for name, gone in zip(names, freed, strict=False) if not gone}  # none before the first step
        dropped = [i for i, (name, gone) in enumerate(zip(names, freed, strict=False)) if gone and name not in kept]
        losses = (max(profile.peak(dropped) - passed, 0) for profile, passed in self._losses)
        return CallerSide(
            loss=max(losses, default=0),
            held=self._held,
            dropped=frozenset(names[i] for i in dropped),
            missing=frozenset(gradients[i] for i in self._missing or () if i in gradients),
        )


def _has_bytes(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is dense: one that is sparse, or a wrapper, has no storage."""
    return gradient.layout is torch.strided and bool(torch._C._has_storage(gradient))
