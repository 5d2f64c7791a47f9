"""Refuses whole steps in a process group that do not synchronize ranks, unless the user asks for that.

Ranks that each update their own parameters drift apart. `DistributedDataParallel` averages gradients in hooks in C++,
which a compiled step does not run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

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
