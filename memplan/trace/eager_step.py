"""Predicts what eager's forward and backward need: the model itself runs on fake tensors, and their bytes are counted.

What eager keeps alive is decided by Python and autograd: a local variable of `forward` holds a tensor until it
returns, and a trace does not show that. Nothing is computed and no memory of the model's size is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memplan.devices.generators import forked
from memplan.torch_inside.graphs import FakeTensorMode
from memplan.trace.allocations import Allocations, storage_of
from memplan.trace.capture.recurrent import RecurrentAsEager, workspace_bytes
from memplan.trace.capture.results import with_returned_objects
from memplan.trace.kernel_scratch import KernelScratch, SizedCall, call_of, like_tensor
from memplan.trace.meta_model import copied_with

_CPU = torch.device("cpu")
_log = logging.getLogger("memplan")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerBytes:
    """The bytes of an eager step beside its model and inputs: `peak` in forward and backward, and what is `kept` of
    it, gradients and results, when the optimizer runs."""

    peak: int
    kept: int


def eager_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool, scratch: KernelScratch | None
) -> EagerBytes | None:
    """Return what an eager step allocates; None for a model that cannot run on fake tensors.

    Args:
        model: The module, which is copied; its parameters may be real, fake or meta tensors.
        args: Its positional arguments.
        kwargs: Its keywords.
        train: Forward and backward, or the forward alone.
        scratch: What kernels allocate for themselves counts too; None: it is not known.
    """
    with forked(_CPU), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            made = copied_with(model, _fake)
            given = tree_map_only(torch.Tensor, _fake, (args, kwargs))
            return _counted(made, *given, train=train, scratch=scratch)
        except Exception as error:  # whatever the model does with numbers
            _log.debug("%s does not run on fake tensors: %s", type(model).__name__, error)
            return None


def _fake(t: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the CPU like `t`. Another type than torch's own raises `TypeError`."""
    if type(t) not in (torch.Tensor, nn.Parameter):
        raise TypeError(f"a tensor of type {type(t).__name__}")
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made


def _counted(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool, scratch: KernelScratch | None
) -> EagerBytes:
    """Return the bytes of a step on fake tensors."""
    standing = (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs)))
    counted = _Calls(storage_of(t)[0] for t in standing if isinstance(t, torch.Tensor))
    with torch.set_grad_enabled(train):
        with RecurrentAsEager(), counted:
            result = model(*args, **kwargs)
        if train:
            leaves = tree_leaves(with_returned_objects(result))
            roots = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            tangents = [None if t.numel() == 1 else torch.ones_like(t) for t in roots]
            counted.known.update(storage_of(t)[0] for t in tangents if t is not None)  # they count as inputs
            with counted:
                torch.autograd.backward(roots, tangents)
    peak, kept = counted.peak, counted.live
    if scratch is not None:
        scratch.measure(counted.calls)
        peak = max(peak, *(live + scratch.of(call) for call, live in counted.calls.items()), 0)
    return EagerBytes(peak=peak, kept=kept)


class _Calls(Allocations):  # type: ignore[no-untyped-call]
    """Notes the calls of kernels that take memory for themselves, with the most bytes that were alive with one."""

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__(known)
        self.calls: dict[SizedCall, int] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an op; those of oneDNN's recurrent layers have their workspace, which fakes lack."""
        out = func(*args, **kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
            x, weight, recurrent = args[:3]
            shapes = tuple(x.shape), tuple(weight.shape), tuple(recurrent.shape)
            how = tuple(tuple(a) if isinstance(a, list) else a for a in args[7:])
            return (*out[:-1], torch.empty(workspace_bytes(*shapes, x.dtype, how), dtype=torch.uint8))
        return out

    def ran(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a call."""
        call = call_of(func, args, kwargs, like_tensor)
        if call is not None:
            self.calls[call] = max(self.calls.get(call, 0), self.live)
