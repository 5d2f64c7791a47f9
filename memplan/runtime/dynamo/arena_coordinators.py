"""`ArenaCoordinators`: the arenas of a backend, one for each thread."""

from __future__ import annotations

import logging
import threading

from torch import fx

from memplan.runtime.dynamo.graph_module import named_class
from memplan.runtime.memory.shared_arena import ArenaCoordinator, PrepareStep

_log = logging.getLogger("memplan")
_SEVERAL = (
    "%s: a step runs several graphs, or several calls of one, before their backward; gradients are outside of the "
    "arena from now on"
)


class ArenaCoordinators:
    """An `ArenaCoordinator` for each thread: threads run at the same time, so they cannot share an arena."""

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self.warned = False  # that so many calls wait that further ones run eagerly
        self._logged = False  # that gradients are outside of the arena from now on
        self._local = threading.local()
        self._prepare = prepare

    def of_this_thread(self) -> ArenaCoordinator:
        """Return the coordinator of the calling thread."""
        if not hasattr(self._local, "coordinator"):
            self._local.coordinator = ArenaCoordinator(self._prepare)
        found: ArenaCoordinator = self._local.coordinator
        return found

    def put_gradients_outside(self, coordinator: ArenaCoordinator, graph: fx.GraphModule) -> None:
        """Have the gradients of all graphs outside of the arena from now on, in the thread of a coordinator."""
        if coordinator.gradients_in_arena and not self._logged:
            self._logged = True
            _log.info(_SEVERAL, named_class(graph).__name__)
        coordinator.gradients_in_arena = False
