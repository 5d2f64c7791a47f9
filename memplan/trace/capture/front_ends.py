"""The front end that reads the Python of `forward` into a graph: dynamo; what it says about its own internals is
kept quiet.

A front end is a function from a model and the arguments of a call to a module, which AOTAutograd traces next
(`joint_graph.py`). The Python values that it read are in the metadata of the graph.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._guards import detect_fake_mode

from memplan.errors import UnsupportedGraph
from memplan.torch_versions import dynamo_settings
from memplan.trace.capture.checkpoints import gradients_that_eager_lacks
from memplan.trace.capture.effects import refuse_random, require_same_call, settle_side_effects
from memplan.trace.capture.python_values import Reading, recording_guards
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


@contextlib.contextmanager
def tracing_assignments() -> Iterator[None]:
    """Trace assignments to `requires_grad` of intermediates; the caller holds torch's compile lock.

    Other versions of torch, which name the rule for `setattr` otherwise, break the graph there as before.
    """
    from torch._dynamo import variables

    owner: Any = getattr(variables, "SetAttrBuiltinVariable", None)
    rule: Any = getattr(owner, "_call_setattr", None)
    if rule is None:
        yield
        return

    def assigned(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """Trace the method instead of the assignment where the tensor is neither an input nor a parameter."""
        is_flag = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if is_flag and isinstance(obj, variables.TensorVariable) and not obj.source and value.is_python_constant():
            obj.method_requires_grad_(tx, value)
            return variables.ConstantVariable.create(None)
        return rule(self, tx, obj, name, value)

    with mock.patch.object(owner, "_call_setattr", assigned):
        yield


READINGS = "memplan's readings"  # key of a graph's Python values in its metadata
WARNINGS = "memplan's warnings"  # key of what a graph computes unlike eager
_IGNORED = "ignore_logging_functions"  # torch's option
_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # torch's option
_LOGS = ("debug", "info", "warning", "error", "critical", "exception", "log", "info_once", "warning_once")
FrontEnd = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], nn.Module]


def identity(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return the model: the front end for dynamo's own graphs."""
    return model


def dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return dynamo's graph of the model as a module: the front end that reads Python.

    Python state that forward changes inside of an activation checkpoint is treated as outside of one: eager's backward
    changes it once more, which is the same for what settles in one call.

    Raises `UnsupportedGraph` for what forward changes beside tensors.
    """
    if _is_patched(model):
        what = "has a forward that is another object's function, whose parameters would become constants of one graph"
        hint = f"define forward in the model's class; {SEVERAL}"
        raise UnsupportedGraph(type(model).__name__, what, hint, see="graph-breaks")
    try:
        module, readings, said = _read(model, args, kwargs)
    except Exception as error:
        if "side effect" not in str(error) or not dynamo_settings(**{_EFFECTS: True}):
            raise
        module, readings, said = _read(model, args, kwargs, **{_EFFECTS: True})
    meta_of(module)[READINGS] = tuple(readings)
    meta_of(module)[WARNINGS] = gradients_that_eager_lacks(module.graph)  # type: ignore[arg-type]
    _clear_globals(model, module)
    refuse_random(model, module.graph)  # type: ignore[arg-type]
    _take_real_tensors(module)
    undo = [back for message in said for back in settle_side_effects(model, args, kwargs, message)]
    if not undo:
        return returning_objects(module)
    settled = dynamo(model, args, kwargs)
    require_same_call(model, module, settled, undo)
    return settled


def _read(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **config: Any
) -> tuple[nn.Module, list[Reading], list[str]]:
    """Return dynamo's graph of the model, the Python values that it read, and its warnings."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    front: Callable[..., nn.Module] = dynamo_graph_capture_for_export(model)
    with warnings.catch_warnings(record=True) as caught, recording_guards(model) as readings:
        warnings.simplefilter("always")
        with _dynamo_settings(**config), tracing_assignments(), _not_exporting():
            module = front(*args, **kwargs)
    return module, readings, [str(w.message) for w in caught]


@contextlib.contextmanager
def _not_exporting() -> Iterator[None]:
    """Have dynamo trace what a model computes where `torch.compiler.is_exporting()` is False, as it is in eager.

    Models of transformers compute otherwise in an export, by what every runtime can run.
    """
    from torch._dynamo import functional_export
    from torch._dynamo.variables.torch import tracing_state_functions  # where older versions of torch look it up

    compiling = partial(mock.patch.object, torch.compiler, "_is_compiling_flag", True)
    with (
        mock.patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False}),
        mock.patch.object(functional_export, "_compiling_state_context", compiling, create=True),
    ):
        yield


def _dynamo_settings(**config: Any) -> Any:
    """Return the settings under which dynamo forgets earlier traces, and does not trace logging.

    A number that had another value in an earlier trace would otherwise become a variable, without a guard. A compiled
    step does not log what forward logs.
    """
    config |= {"specialize_int": True, "specialize_float": True, "automatic_dynamic_shapes": False}
    ignored = {getattr(logging.Logger, name) for name in _LOGS if hasattr(logging.Logger, name)}
    config |= dynamo_settings(**{_IGNORED: ignored}, allow_rnn=True)
    return torch._dynamo.config.patch(config)


def _clear_globals(model: nn.Module, module: nn.Module) -> None:
    """Remove dynamo's compiled code, and with it the model, from the globals of the function that it traced.

    Only this model's is removed: another thread may have added its own meanwhile.
    """
    from torch._dynamo.convert_frame import get_traced_fn

    get_traced_fn(model)[0].__globals__.pop(meta_of(module).get("backend_id", ""), None)


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


def _is_patched(model: nn.Module) -> bool:
    """Return whether the model's forward is another object's function, whose parameters dynamo would make constants."""
    forward = vars(model).get("forward")
    return forward is not None and getattr(forward, "__self__", None) is not model
