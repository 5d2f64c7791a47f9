"""The reason, in the store, for which the ranks of a group cannot go on together: one of them left a step alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import distributed

from memplan.errors import CollectiveFailed

AGAIN = "start again in new processes on all ranks"


def store_of(group: Any) -> Any:
    """Return the store in which the ranks of a process group find each other."""
    home: Any = distributed.distributed_c10d
    return home._get_default_store()


def timeout_of(group: Any) -> float:
    """Return the seconds after which a collective of a process group fails."""
    device = next((d for d in group._device_types), torch.device("cpu"))
    return float(group._get_backend(device).options._timeout.total_seconds())


def is_alone(group: Any) -> bool:
    """Return whether there is no other rank in a process group, or none that exists."""
    return group is None or group.size() == 1 or distributed.get_backend(group) == "fake"


def end(group: Any, reason: str) -> None:
    """Let all ranks of a group know why they cannot go on; the first reason stays."""
    with contextlib.suppress(RuntimeError):  # the store is gone with the rank that held it
        store_of(group).compare_set(_key(group), "", reason)
    if distributed.get_backend(group) != "gloo":
        with contextlib.suppress(RuntimeError):
            group.abort()


def reason_of(group: Any) -> str:
    """Return why the ranks of a group cannot go on; "" if nothing is known."""
    with contextlib.suppress(RuntimeError):
        store, key = store_of(group), _key(group)
        return str(store.get(key).decode()) if store.check([key]) else ""
    return ""


def require_going_on(group: Any) -> None:
    """Raise `CollectiveFailed` if the ranks of a group cannot go on together."""
    reason = reason_of(group)
    if reason:
        raise CollectiveFailed(
            f"a collective failed: a rank has left the others: {reason}", where="the process group", hint=AGAIN
        )


def _key(group: Any) -> str:
    return f"memplan/{'-'.join(map(str, distributed.get_process_group_ranks(group)))}/ended"
