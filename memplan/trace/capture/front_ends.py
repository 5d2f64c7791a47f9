"""Reads the Python of `forward` into a graph, by dynamo; what torch says about its own internals is kept quiet.

AOTAutograd traces the graph next (`joint_graph.py`). The Python values that dynamo read are in its metadata.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._guards import detect_fake_mode

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.dynamo import read_python, traced_function
from memplan.trace.capture.constant_masks import drop_constant_masks
from memplan.trace.capture.effects import refuse_random, require_same_call, settle_side_effects
from memplan.trace.capture.python_values import readings_of
from memplan.trace.capture.refusals import SEVERAL
from memplan.trace.capture.results import returning_objects


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress this thread's warnings and logs, which are noise to a user of memplan; other threads keep theirs."""
    silence = _Silence()
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(silence)
    every: Any = ("ignore", silence, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, every)
    try:
        yield
    finally:
        silence.active = False  # another thread may have a copy of the filters
        for handler in handlers:
            handler.removeFilter(silence)
        if every in warnings.filters:
            filters = warnings.filters
            filters.remove(every)


class _Silence(logging.Filter):
    """Drops what is logged by the thread that made it; `match` makes it the pattern of a filter of warnings too."""

    def __init__(self) -> None:
        super().__init__()
        self.active = True
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        return not (self.active and record.thread == self._thread)

    def match(self, text: str) -> bool:
        """Return whether a warning that is raised now is ignored."""
        return self.active and threading.get_ident() == self._thread


def _handlers() -> set[logging.Handler]:
    """Return the handlers of all loggers."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    return found | ({logging.lastResort} if logging.lastResort is not None else set())


READINGS = "memplan's readings"  # key of a graph's Python values in its metadata


def dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return dynamo's graph of the model as a module.

    Raises `UnsupportedGraph` for what forward changes beside tensors.
    """
    read = read_python(model, args, kwargs)
    module = read.module
    meta_of(module)[READINGS] = tuple(readings_of(read.guards, read.known, traced_function(model)))
    refuse_random(model, module.graph)
    if drop_constant_masks(module.graph):
        module.recompile()
    _take_real_tensors(module)
    undo = [back for message in read.messages for back in settle_side_effects(model, args, kwargs, message)]
    if not undo:
        return returning_objects(module)
    settled = dynamo(model, args, kwargs)
    require_same_call(model, module, settled, undo)
    return settled


def meta_of(module: nn.Module) -> dict[str, Any]:
    """Return the metadata that front ends attach to a graph."""
    found: dict[str, Any] = getattr(module, "meta", {})
    return found


def _take_real_tensors(module: nn.Module) -> None:
    """Let tensors that a model holds beside parameters and buffers be mixed with fake tensors, as torch 2.13 does."""
    codegen: Any = module.graph._codegen  # type: ignore[union-attr]
    inputs_of = codegen.process_inputs

    def process_inputs(*inputs: Any) -> Any:
        """Allow real tensors in the current fake mode, then process the inputs as before."""
        mode = detect_fake_mode()
        if mode is not None:
            mode.allow_non_fake_inputs = True
        return inputs_of(*inputs)

    codegen.process_inputs = process_inputs


def require_own_forward(model: nn.Module) -> None:
    """Raise `UnsupportedGraph` if forward is another object's function: dynamo would make its parameters constants."""
    forward = vars(model).get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not model:
        what, hint = "its forward was replaced on the object by another function", "define it in the class"
        raise UnsupportedGraph(type(model).__name__, what, f"{hint}; {SEVERAL}", see="graph-breaks")
