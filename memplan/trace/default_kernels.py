"""Decides which kernels compute a step for which none were asked: Inductor's on accelerators, eager's on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import UnsupportedCall, UnsupportedDevice, UnsupportedGraph
from memplan.planning.options import Device, PlanOptions

_log = logging.getLogger("memplan")
_GENERATED = ("cuda", "xpu")  # devices for which Inductor writes Triton kernels
_Options = TypeVar("_Options", bound=PlanOptions)
_Made = TypeVar("_Made")


def with_kernels(options: _Options, model: nn.Module, inputs: Any, *, given: Plan | None = None) -> _Options:
    """Return the options with kernels: those that were asked for, those of a `given` plan, or the device's default.

    Where Inductor cannot be the default, the log says why eager's kernels run.

    Args:
        options: Those of a call; `kernels` may be None.
        model: The module whose step is planned.
        inputs: Its inputs, in any structure.
        given: The plan that the step will run by.
    """
    if options.kernels is not None:
        return options
    if given is not None:
        return replace(options, kernels="inductor" if given.graph.is_generated else "aten")
    if not _is_on_accelerator(model, inputs, options.device):
        return replace(options, kernels="aten")
    why = "triton is not installed" if find_spec("triton") is None else ""
    if parallelism_of(model) is not None:
        why = "the model is divided among ranks"
    try:
        fused = replace(options, kernels="inductor", falls_back=True)
    except UnsupportedCall as refused:
        why = refused.summary
    if why:
        _say(type(model).__name__, why)
        return replace(options, kernels="aten")
    return fused


def made_by_default(options: _Options, model: str, make: Callable[[_Options], _Made]) -> tuple[_Options, _Made]:
    """Return the options, and what `make` makes of them: with eager's kernels where Inductor's were the default and
    cannot be had, because code cannot be generated, planned or compiled.

    Raises what `make` raises for kernels that were asked for, and for eager's.
    """
    try:
        return options, make(options)
    except (UnsupportedGraph, UnsupportedDevice) as error:
        if not options.falls_back:
            raise
        why = error.summary
    options = replace(options, kernels="aten", falls_back=False)
    made = make(options)
    _say(model, why)
    return options, made


def _say(model: str, why: str) -> None:
    """Log that eager's kernels run on an accelerator, and why."""
    _log.warning("%s runs eager's kernels, which need more memory and time than Inductor's: %s", model, why)


def _is_on_accelerator(model: nn.Module, inputs: Any, device: Device | None) -> bool:
    """Return whether an accelerator for which Inductor writes kernels is the `device`, or has a tensor of the step."""
    if device is not None:
        first = device[0] if isinstance(device, (list, tuple)) and device else device
        return str(first).partition(":")[0] in _GENERATED
    held = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    tensors = chain(held, pytree.tree_leaves(inputs))
    return any(x.device.type in _GENERATED for x in tensors if isinstance(x, torch.Tensor))
