"""Refuse activation checkpoints where a front end would lose them.

`torch.export` runs forward as Python and leaves no trace of a checkpoint in its graph; dynamo does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

_ENTRIES = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")  # what `checkpoint()` calls, by name


class LostCheckpoint(Exception):
    """A front end reached a checkpoint that its graph would not show."""

    def __init__(self) -> None:
        super().__init__(
            "torch.utils.checkpoint in a forward that only torch.export can read, whose graph has no checkpoints"
        )


@contextlib.contextmanager
def refusing_checkpoints() -> Iterator[None]:
    """Raise `LostCheckpoint` where this thread enters a checkpoint; other threads are not concerned."""
    ours, before = threading.get_ident(), {name: getattr(torch_checkpoint, name) for name in _ENTRIES}

    class Refused:
        """Stands for an entry of torch's."""

        def __init__(self, entry: Any) -> None:
            self.entry = entry

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._refuse()
            return self.entry(*args, **kwargs)

        def apply(self, *args: Any, **kwargs: Any) -> Any:
            self._refuse()
            return self.entry.apply(*args, **kwargs)

        def _refuse(self) -> None:
            if threading.get_ident() == ours:
                raise LostCheckpoint

    try:
        for name, entry in before.items():
            setattr(torch_checkpoint, name, Refused(entry))
        yield
    finally:
        for name, entry in before.items():
            setattr(torch_checkpoint, name, entry)
