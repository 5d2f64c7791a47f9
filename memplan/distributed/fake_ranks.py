"""Ranks that are not there, for plans: a process group whose collectives do nothing, and a model divided among it.

The plan is that of rank 0, whose parts are the largest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from memplan.distributed.local import is_distributed
from memplan.distributed.parallelism import fsdp_modules, reducer_of
from memplan.distributed.whole_copy import copy_structure
from memplan.errors import UnsupportedCall


@contextlib.contextmanager
def fake_ranks(ranks: int | None) -> Iterator[None]:
    """Be rank 0 of a process group of so many ranks, of which no other exists; None: of no group.

    Within a process group of that size, nothing changes.

    Raises:
        UnsupportedCall: This torch has no process groups, or this process is in a group of another size.
    """
    if ranks is None:
        yield
        return
    where = f"ranks={ranks!r}"
    if type(ranks) is not int or ranks < 1:
        raise UnsupportedCall("is no number of ranks", where=where, hint="pass 1 or more", see="fake-ranks")
    if not distributed.is_available():
        raise UnsupportedCall("this torch has no process groups", where=where, hint="install another", see="fake-ranks")
    if distributed.is_initialized():
        here = distributed.get_world_size()
        if here != ranks:
            what = f"this process is one of {here} ranks already"
            hint = "plan in a process of its own, or leave ranks out"
            raise UnsupportedCall(what, where=where, hint=hint, see="fake-ranks")
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def divided(model: nn.Module) -> nn.Module:
    """Return the model as it is divided among ranks, or a copy without data with every parameter divided by rows."""
    if fsdp_modules(model) or reducer_of(model) is not None or any(map(is_distributed, model.parameters())):
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    parts: dict[int, Any] = {}
    device = "cpu"
    for p in model.parameters():
        device = device if p.is_meta else p.device.type
        parts[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
    made = copy_structure(model, parts)
    buffers = [(module, dict(module._buffers)) for module in made.modules()]
    fully_shard(made, mesh=init_device_mesh(device, (distributed.get_world_size(),)))
    for module, before in buffers:
        module._buffers.update(before)
    return made
