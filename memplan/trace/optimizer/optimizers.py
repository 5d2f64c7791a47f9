"""The optimizers whose updates are planned: which options they may have, and what state their updates take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from memplan.devices.kinds import HOST, is_accelerator
from memplan.distributed.local import local_tensor
from memplan.errors import UnsupportedGraph

STEP = "step"  # torch's key of a parameter's counter

# Options of a group that decide which update its parameters get (and so does a rate that is a tensor); others are read
# at every step.
DECIDING = (
    *("momentum", "dampening", "amsgrad", "decoupled_weight_decay", "differentiable", "capturable"),
    *("fused", "foreach"),
)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's fused kernels update the parameters: SGD, Adam and AdamW, where nothing asks for others.

    `fused=None` and `foreach=None` leave the choice. The own `step()` of all other optimizers runs after the backward.
    """
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) or has_own_step(optimizer):
        return False
    return all(map(_group_is_fused, optimizer.param_groups))


def _group_is_fused(group: Mapping[str, Any]) -> bool:
    """Return whether the options of a group are those of a fused update."""
    if group.get("fused") is False or group.get("foreach") is not None or isinstance(group["lr"], torch.Tensor):
        return bool(group.get("fused")) and not isinstance(group["lr"], torch.Tensor) and not group.get("capturable")
    others = any(group.get(option) for option in ("differentiable", "capturable", "dampening"))
    return not others and all(p.is_floating_point() for p in group["params"])


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` was replaced on this very optimizer, by other code than torch's learning rate schedulers'.

    Theirs only note that it was called.
    """
    own = vars(optimizer).get("step")
    if own is None:
        return False
    known = getattr(own, "_wrapped_by_lr_sched", False) and own.__globals__["__name__"] == "torch.optim.lr_scheduler"
    return not known or own.__wrapped__ is not type(optimizer).step


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedGraph` for an optimizer whose step computes the loss several times."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needed = any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if needed or hasattr(optimizer, "first_step"):
        raise UnsupportedGraph(
            type(optimizer).__name__,
            "its step needs a closure: it computes the loss several times",
            "use memplan.compile for the model, and call the optimizer as before",
            see="closure",
        )


def keys_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the state tensors that a parameter's update takes, in order."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return (STEP, "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an optimizer whose updates are planned keeps for its parameters, but for its counters."""
    groups = ((g["params"], sum(key != STEP for key in keys_of(optimizer, g))) for g in optimizer.param_groups)
    return sum(p.nbytes * kept for params, kept in groups for p in params if p.requires_grad)


def ensure_state(optimizer: torch.optim.Optimizer, name: str, parameter: torch.Tensor, group: int) -> dict[str, Any]:
    """Return the state of a parameter, created and laid out as the optimizer would at its first step.

    Raises `UnsupportedGraph` if a part of the state is missing, and for a parameter that torch's fused kernels cannot
    update, or would update in wrong places: they walk the memory of a parameter and of its state in order.
    """
    _require_updatable(name, parameter)
    keys = keys_of(optimizer, optimizer.param_groups[group])
    if not keys:
        return {}
    state: dict[str, Any] = optimizer.state[parameter]
    place = parameter.device if is_accelerator(parameter.device) else torch.device(HOST)
    if not state or (keys[0] == "momentum_buffer" and state.get("momentum_buffer") is None):
        for key in keys:
            if key == STEP:
                state[key] = torch.zeros((), dtype=torch.float32, device=place)
            else:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    missing = next((key for key in keys if key not in state), None)
    if missing is not None:
        what = f"the optimizer's state for it has no {missing!r}, which group {group} needs"
        raise UnsupportedGraph(
            name, what, "load a checkpoint made with the same options, or create a new optimizer", see="optimizer-state"
        )
    for key in keys:
        if key != STEP and _places(state[key]) != _places(parameter):
            what = f"has strides {parameter.stride()}, the optimizer's {key!r} of it {state[key].stride()}"
            raise UnsupportedGraph(
                name, what, "lay out that state like the parameter, or create a new optimizer", see="optimizer-state"
            )
    if (
        STEP in keys and place.type != HOST and state[STEP].device != place
    ):  # an optimizer without fused=True keeps it on the CPU
        state[STEP] = state[STEP].to(place)
    return state


def _places(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return where the elements of a tensor lie: size and stride of each dimension of more than one element."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _require_updatable(name: str, parameter: torch.Tensor) -> None:
    """Raise `UnsupportedGraph` for a parameter that torch's fused kernels cannot update."""
    what, hint = "", ""
    if not parameter.is_floating_point():
        what = f"is {parameter.dtype}, which torch's fused updates do not take"
        hint = "keep it as two real parameters"
    elif torch.empty_like(local_tensor(parameter), device="meta").stride() != local_tensor(parameter).stride():
        what, hint = f"has gaps in memory (strides {parameter.stride()})", "make the parameter of a contiguous copy"
    if what:
        raise UnsupportedGraph(name, what, f"{hint}, or use memplan.compile", see="fused-update")
