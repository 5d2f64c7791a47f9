"""Refuses whole steps that do not synchronize ranks, and calls inside transforms (`torch.func`, dual tensors).

Ranks that each update their own parameters drift apart. `DistributedDataParallel` averages gradients in hooks in C++,
which a compiled step does not run. Kernels that write to planned addresses have no batching rules and no tangents:
results would be wrong, or zeros.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import forward_ad

from memplan.core.collectives import is_collective
from memplan.core.graph import Graph
from memplan.errors import UnsupportedCall

_HINT = (
    "compile a step of DistributedDataParallel(model), or of a model that fully_shard has divided, "
    "or pass allow_unsynchronized=True where each rank shall train on its own"
)


def require_no_reducer(model: nn.Module) -> None:
    """Raise `UnsupportedCall` if a DistributedDataParallel that is not the model averages a parameter's gradient."""
    if not _in_group():
        return
    held = {id(p) for ddp in _live_reducers() if ddp is not model for p in ddp.parameters()}
    for name, p in model.named_parameters():
        if id(p) in held:
            what = "is held by a DistributedDataParallel, which would not average its gradient in a compiled step"
            raise UnsupportedCall(what, where=name, hint=_HINT, see="ranks")


def require_collective(graphs: Iterable[Graph]) -> None:
    """Raise `UnsupportedCall` if there are several ranks and no program of the step contains a collective."""
    ranks = torch.distributed.get_world_size() if _in_group() else 1
    if ranks > 1 and not any(is_collective(op.target) for graph in graphs for op in graph.ops):
        what = "the step contains no collective, so each rank would train on its own"
        raise UnsupportedCall(what, where=f"a process group of {ranks} ranks", hint=_HINT, see="ranks")


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _live_reducers() -> list[nn.parallel.DistributedDataParallel]:
    """Return all live instances. It compares types, because proxies may give any answer to `isinstance`."""
    kind = nn.parallel.DistributedDataParallel
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def in_ddp() -> bool:
    """Return whether this is a forward inside of DistributedDataParallel, whose reducer waits for autograd's nodes."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def around() -> bool:
    """Return whether a transform may be active around this call. It costs one C call."""
    return active() or forward_ad._current_level >= 0


def refusal(arguments: Any, model: nn.Module) -> UnsupportedCall | None:
    """Return the error for a call of `model` with these arguments; None if no transform applies to them."""
    hint = 'call the original model there; memplan.compile(..., on_mismatch="eager") does'
    if active():
        what = "a planned step cannot run inside torch.func's transforms (grad, vmap, jvp, jacrev, ...)"
        return UnsupportedCall(what, where="the call", hint=hint, see="transforms")
    tensors = [*pytree.tree_leaves(arguments), *model.parameters(), *model.buffers()]
    if any(isinstance(x, torch.Tensor) and _is_dual(x) for x in tensors):
        what = "a planned step has no forward-mode derivative, and one of its tensors is dual"
        return UnsupportedCall(what, where="the call", hint=hint, see="transforms")
    return None


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def refuse(arguments: Any, model: nn.Module) -> None:
    """Raise `UnsupportedCall` if a transform applies to this call."""
    if around() and (refused := refusal(arguments, model)):
        raise refused
