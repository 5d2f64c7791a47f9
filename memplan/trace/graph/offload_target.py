"""Move a traced step to a device while its model and its caller stay on the CPU.

The step is traced on fake tensors of that device. Then everything that the model or the caller holds is marked
host-resident: the plan copies it to the device and back, and kernels see nothing of it. On the CPU, the device is an
arena beside the model's memory, so that the same plans, copies and waits run on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan.devices.kinds import HOST, REFUSED, current_index, device_count
from memplan.errors import UnsupportedDevice, UnsupportedGraph
from memplan.trace.traced import Source, TracedGraph, named_leaves

_ON_CPU = "leave out device=, or leave the model and its inputs on the CPU"
_HINT = "name a device of this machine ('cuda', 'cuda:1'), or 'cpu', which stands in for one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device, or devices, that a step runs on.

    `names`: their names in plans ("cuda:0"; "cpu:0" is an arena beside the model's memory). `device`: torch's name for
    the first of them, on which the step is traced.
    """

    names: tuple[str, ...]
    device: torch.device


def target_of(device: Any) -> Target:
    """Return the target for the device, or the sequence of devices, that the user names. Raises `UnsupportedDevice`."""
    if not isinstance(device, (list, tuple)):
        return _target(device)
    found = [_target(one) for one in device]
    names = tuple(name for one in found for name in one.names)
    if not names:
        raise UnsupportedDevice("names no device", where="device", hint=_HINT, see="device")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnsupportedDevice(f"names {twice} twice", where="device", hint="give each device once", see="device")
    if len({one.device.type for one in found}) > 1:
        raise UnsupportedDevice(
            "names devices of two kinds", where="device", hint="their kernels round differently", see="device"
        )
    return Target(names=names, device=found[0].device)


def _target(device: Any) -> Target:
    """Return the target for one device.

    Raises `UnsupportedDevice` for a device that this machine does not have: torch without CUDA cannot even trace for
    it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedDevice(f"there is no device {device!r}", where="device", hint=_HINT, see="device") from error
    if found.type in REFUSED or found.type == "meta":
        why = REFUSED.get(found.type, "has no memory")
        raise UnsupportedDevice(f"{found.type!r} {why}", where="device", hint=_HINT, see="device")
    index: int = current_index(found.type) if found.index is None else found.index
    if index < 0:  # torch keeps the number in one byte
        raise UnsupportedDevice(f"there is no device {device!r}", where="device", hint=_HINT, see="device")
    name = f"{found.type}:{index}"
    count = device_count(found.type)
    if found.type != HOST and index >= count:
        what = f"this machine has {count or 'no'} {found.type} devices"
        raise UnsupportedDevice(what, where=f"device={device!r}", hint=_HINT, see="device")
    return Target(names=(name,), device=torch.device(HOST if found.type == "cpu" else name))


def require_on_cpu(model: nn.Module, inputs: Any, hint: str = _ON_CPU, see: str = "device") -> None:
    """Raise `UnsupportedDevice`, with a next step, unless the model and its inputs are on the CPU or meta tensors."""
    held = (*model.named_parameters(), *model.named_buffers(), *named_leaves(inputs[0], inputs[1], model.forward))
    for name, tensor in held:
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in (HOST, "meta"):
            raise UnsupportedDevice(f"is on {tensor.device} already", where=name, hint=hint, see=see)


def with_host_residents(traced: TracedGraph, target: Target) -> TracedGraph:
    """Return `traced` (on `target`) with everything that the model and the caller hold marked host-resident."""
    for b in traced.bound(Source.CONSTANT):
        if b.tensor is not None and type(b.tensor) is not torch.Tensor and not isinstance(b.tensor, nn.Parameter):
            hint = "make the tensor a buffer: register_buffer(name, tensor, persistent=False)"
            raise UnsupportedGraph(traced.graph.values[b.value].name, "is a constant without data", hint, see="device")
    storages = tuple(replace(s, device=target.names[0] if s.planned else HOST) for s in traced.graph.storages)
    return replace(traced, graph=replace(traced.graph, storages=storages), device=target.device, runs_on=target.names)
