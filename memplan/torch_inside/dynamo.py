"""Dynamo: how it reads the Python of a model into a graph, under which settings, and what it guards on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo import convert_frame

compile_lock = convert_frame.compile_lock
_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # torch's option
_LOGS = ("debug", "info", "warning", "error", "critical", "exception", "log", "info_once", "warning_once")


@dataclass(slots=True)
class Read:
    """A model as dynamo has read it: a module with its graph, the warnings, and the guards.

    Of a guard there is its kind and the name of what it guards; `known` are the globals that names begin with. There
    are no guards if this version of torch does not report them.
    """

    module: Any = None
    messages: list[str] = field(default_factory=list)
    guards: list[tuple[str, str]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)


def traced_function(model: nn.Module) -> FunctionType:
    """Return the function that dynamo reads where it traces a model."""
    found: FunctionType = convert_frame.get_traced_fn(model)[0]
    return found


def why_traced_again() -> str:
    """Return why dynamo traces a function again, for the backend that it calls; "" for a first time, or if unknown."""
    context: Any = getattr(torch._dynamo.utils, "get_metrics_context", dict)()  # torch's own names, which may change
    return str(getattr(context, "_metrics", {}).get("recompile_reason") or "").split("\n")[0]


def dynamo_config(**settings: Any) -> Any:
    """Return a context with those of the settings of dynamo that this torch has."""
    return torch._dynamo.config.patch(_known(settings))


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if hasattr(torch._dynamo.config, name)}


def read_python(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read:
    """Return what dynamo reads of `model(*args, **kwargs)`. The caller holds torch's compile lock.

    Python state that forward changes inside of an activation checkpoint is treated as outside of one: eager's backward
    changes it once more, which is the same for what settles in one call.
    """
    try:
        return _read(model, args, kwargs)
    except Exception as error:
        if "side effect" not in str(error) or not _known({_EFFECTS: True}):
            raise
        return _read(model, args, kwargs, **{_EFFECTS: True})


def _read(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any) -> Read:
    """Return what dynamo reads, under these settings.

    It forgets earlier traces: a number that had another value in one would otherwise become a variable, without a
    guard. It does not trace logging: a compiled step does not log what forward logs.
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    settings |= {"specialize_int": True, "specialize_float": True, "automatic_dynamic_shapes": False, "allow_rnn": True}
    settings["ignore_logging_functions"] = {getattr(logging.Logger, n) for n in _LOGS if hasattr(logging.Logger, n)}
    found = Read()
    front: Callable[..., nn.Module] = dynamo_graph_capture_for_export(model)
    with warnings.catch_warnings(record=True) as caught, _recording_guards(model, found):
        warnings.simplefilter("always")
        with dynamo_config(**settings), _tracing_assignments(), _not_exporting():
            found.module = front(*args, **kwargs)
    found.messages = [str(w.message) for w in caught]
    # The compiled code, and with it the model, is among the globals of the function; another thread's stays.
    traced_function(model).__globals__.pop(getattr(found.module, "meta", {}).get("backend_id", ""), None)
    return found


@contextlib.contextmanager
def _recording_guards(model: nn.Module, found: Read) -> Iterator[None]:
    """Note the guards of `model` while dynamo captures it for export."""
    from torch._dynamo import functional_export

    capture: Any = getattr(functional_export, "fullgraph_capture", None)
    if capture is None:
        yield
        return

    def recorded(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Capture as dynamo does, and note its guards."""
        out = capture(function, *args, **kwargs)
        if function is model:  # else another thread exports
            with contextlib.suppress(AttributeError):  # torch's own names, which may change
                made = out.graph_capture_output
                found.guards = [(guard.create_fn_name(), _name_of(guard)) for guard in made.output_graph.guards]
                found.known = made.f_globals
        return out

    with mock.patch.object(functional_export, "fullgraph_capture", recorded):
        yield


def _name_of(guard: Any) -> str:
    return str(guard.name if isinstance(guard.name, str) else guard.name())


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


@contextlib.contextmanager
def _tracing_assignments() -> Iterator[None]:
    """Trace `tensor.requires_grad = True` on what forward computes, as dynamo traces `tensor.requires_grad_()`.

    T5 of transformers does so inside of its activation checkpoints. Other versions of torch, which name the rule for
    `setattr` otherwise, break the graph there as before.
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


def mark_varying(x: torch.Tensor, dim: int, low: int, high: int) -> None:
    """Have dynamo trace a dimension of a tensor as a symbol with this range."""
    torch._dynamo.mark_dynamic(x, dim, min=max(low, 2), max=max(low, 2, min(high, 2**31 - 1)))
