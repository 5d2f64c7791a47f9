"""Capture one forward (and backward) of a module as a single functional graph of ATen ops, on fake tensors.

This file and `symbolic_capture.py` call dynamo, export and AOTAutograd. Dynamo reads the Python first (it keeps
activation checkpoint tags); what it cannot read goes through `torch.export`; AOTAutograd then traces the joint graph.
Nothing is computed and no memory of the model's size is allocated.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._guards import detect_fake_mode

from memplan.errors import MemplanError, UnsupportedGraph
from memplan.trace.capture.checkpointed import LostCheckpoint, refusing_checkpoints
from memplan.trace.capture.conjugates import compute_conjugates
from memplan.trace.capture.effects import exporting, faked, refuse_random, require_same_call, settle_side_effects
from memplan.trace.capture.fake_layouts import as_kernels_do, settle_layouts
from memplan.trace.capture.fake_statistics import correct_statistics
from memplan.trace.capture.python_values import Reading, noting_guards, options_of_layers, with_values
from memplan.trace.capture.recurrent import RecurrentAsEager, size_workspaces
from memplan.trace.capture.refusals import require_same_types, require_traceable, unsupported
from memplan.trace.capture.unfinished_collectives import refuse_unfinished
from memplan.trace.passes.error_checks import order_checks
from memplan.trace.passes.overlapping_strides import overlapping_tangents
from memplan.trace.passes.own_outputs import tag_backward
from memplan.trace.passes.rewrite import separate_tangents

_LOST_BY_EXPORT = ("fork_rng", "rng_state", "manual_seed")  # dynamo refuses these; export would leave them out
READINGS = "memplan's readings"  # key of a graph's Python values in its metadata
_IGNORED = "ignore_logging_functions"  # torch's option
_LOGS = ("debug", "info", "warning", "error", "critical", "exception", "log", "info_once", "warning_once")
_OF_INPUT = ("is_input", "alias_of_input")  # AOTAutograd's output types


class NoBackward(UnsupportedGraph):
    """Raised when a model is traced for training and no output of it requires a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A joint graph with AOTAutograd's descriptors on its placeholders and outputs.

    `in_spec` is the pytree of (args, kwargs), `out_spec` that of the module's result; `inputs` are the flattened
    example inputs. For each leaf of the result, `differentiable` says whether eager's leaf requires a gradient, and
    `alias_of` names the placeholder (by position) that it is a view of, or None. `training`: the graph contains the
    backward. `autocast`: the type that autocast casts to, if the model was traced under it. `readings`: the Python
    values that are constants of the graph.
    """

    graph_module: fx.GraphModule
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[Any, ...]
    differentiable: tuple[bool, ...]
    alias_of: tuple[int | None, ...]
    training: bool
    autocast: torch.dtype | None
    readings: tuple[Reading, ...] = ()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    by_dynamo: bool = False,
    device: torch.device | None = None,
) -> Captured:
    """Trace `model(*args, **kwargs)`, with its backward if `train`. Raises `UnsupportedGraph`.

    The model may hold real, fake or meta parameters; meta ones are traced as if they were on the CPU. `by_dynamo`: the
    model is one of dynamo's own graphs, which is read as it is and may have no backward. `device`: trace as if the
    model and its inputs were there.
    """
    require_traceable(model)
    flat, in_spec = pytree.tree_flatten((args, kwargs))
    inputs, traced = flat, model
    if device is not None or _any_meta(model, flat):
        # Meta kernels would trace another attention than the CPU's.
        traced, flat = faked(model, flat, device="cpu" if device is None else str(device))
        args, kwargs = pytree.tree_unflatten(flat, in_spec)
        inputs = flat if device is None else inputs
    with contextlib.ExitStack() as stack:
        prepare(stack, traced, train=train)
        front_ends = (_identity,) if by_dynamo else (_export,) if _is_patched(traced) else (dynamo, _export)
        joint = _capture_joint(stack, traced, args, kwargs, front_ends)
    return captured(model, joint, in_spec, inputs, train=train and not by_dynamo)


def prepare(stack: contextlib.ExitStack, model: nn.Module, *, train: bool) -> None:
    """Enter the contexts that any front end runs under: no other thread traces, nothing is logged, the model is
    restored.
    """
    # Torch marks tracing by flags of the process, which two threads would leave set forever. Dynamo holds this very
    # lock when it calls a backend: a lock of our own could cause a deadlock with it.
    stack.enter_context(compile_lock)
    stack.enter_context(_restoring(model))
    stack.enter_context(quiet())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(train))
    # The backward runs after the `with torch.autocast` of the forward, not within it.
    stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
    if train and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        # cuDNN's LSTM saves a workspace for its backward whose size its fake kernel does not know.
        stack.enter_context(_without_cudnn())


def captured(model: nn.Module, joint: Any, in_spec: pytree.TreeSpec, inputs: Sequence[Any], *, train: bool) -> Captured:
    """Return AOTAutograd's joint graph, corrected, with the flattened example inputs.

    Raises `UnsupportedGraph` if a backward is missing, and for ops that cannot be planned.
    """
    graph_module, out_spec = joint.graph_module, joint.out_spec
    refuse_unfinished(graph_module.graph)
    require_same_types(graph_module.graph)
    order_checks(graph_module.graph)
    tag_backward(graph_module.graph)
    separate_tangents(graph_module.graph)
    _without_assertions(graph_module.graph)
    compute_conjugates(graph_module.graph)
    size_workspaces(graph_module.graph)
    settle_layouts(graph_module.graph)
    correct_statistics(graph_module.graph)
    leaves = joint._aot_state.fw_metadata.output_info
    has_backward = any(n.op == "placeholder" and _is_tangent(n) for n in graph_module.graph.nodes)
    if train and not has_backward:
        raise NoBackward(
            type(model).__name__,
            "computes no output that requires a gradient, so there is no backward to plan",
            "return what is computed from parameters that require gradients (no views of them), or pass train=False",
        )
    return Captured(
        graph_module=graph_module,
        in_spec=in_spec,
        out_spec=out_spec,
        inputs=tuple(inputs),
        differentiable=tuple(leaf.requires_grad for leaf in leaves),
        alias_of=tuple(leaf.base_idx if leaf.output_type.name in _OF_INPUT else None for leaf in leaves),
        training=has_backward,
        autocast=autocast_dtype("cpu") or autocast_dtype("cuda"),
        readings=with_values(graph_module.meta.get(READINGS, ()), model),
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the type that autocast casts to on these devices; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _without_assertions(graph: fx.Graph) -> None:
    """Erase export's assertions on the dtypes of what it converts: the trace has settled them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Turn cuDNN off. `torch.backends.cudnn.flags` would also set other flags."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


@contextlib.contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers: AOTAutograd leaves its fake ones in a submodule that has two names."""
    held: list[tuple[Any, Any]] = [(own, dict(own)) for m in model.modules() for own in (m._parameters, m._buffers)]
    try:
        yield
    finally:
        for own, before in held:
            own.update(before)


FrontEnd = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], nn.Module]


def _capture_joint(
    stack: contextlib.ExitStack,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    front_ends: tuple[FrontEnd, ...],
) -> Any:
    """Try each front end in turn. If all fail, raise the error that is clearest to the user."""
    complaints: list[Exception] = []
    for front_end in front_ends:
        try:
            module = front_end(model, args, kwargs)
            joint = export_joint(stack, module, args, kwargs)
            joint.graph_module.meta[READINGS] = _meta_of(module).get(READINGS, ())
            return joint
        except MemplanError:
            raise
        except Exception as error:  # whatever a front end raises, the next one may succeed
            complaints.append(error)
            if any(word in str(error) for word in _LOST_BY_EXPORT):
                break
    # Dynamo hides an exception of the model's own behind "Observed exception"; export lets it through.
    hidden = "Observed exception" in str(complaints[0]) and not isinstance(complaints[-1], LostCheckpoint)
    clearest = complaints[-1 if hidden else 0]
    raise unsupported(model, clearest) from clearest


def export_joint(stack: contextlib.ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return AOTAutograd's joint graph of a front end's module; no gradient that comes in has elements that share
    bytes.

    AOTAutograd gives the gradient of an output the output's own strides. Those of `unfold` and `as_strided` have no
    room for a gradient for each element. The graph is then traced again with dense gradients, as eager's backward gets.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with RecurrentAsEager():
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, decompositions=as_kernels_do())
        if overlapping_tangents(joint.graph_module.graph):
            with torch._functorch.config.patch(guess_tangent_strides_as_outputs=False):
                joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, decompositions=as_kernels_do())
    return joint


def _is_patched(model: nn.Module) -> bool:
    """Return whether the model's forward is another object's function, whose parameters dynamo would make constants."""
    forward = vars(model).get("forward")
    return forward is not None and getattr(forward, "__self__", None) is not model


def _identity(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return the model: the front end for dynamo's own graphs."""
    return model


def dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return dynamo's graph of the model as a module: the front end that reads Python.

    Raises `UnsupportedGraph` for what forward changes beside tensors.
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    front: Callable[..., nn.Module] = dynamo_graph_capture_for_export(model)
    with warnings.catch_warnings(record=True) as caught, noting_guards(model) as readings, _as_export_does():
        warnings.simplefilter("always")
        module = front(*args, **kwargs)
    _meta_of(module)[READINGS] = tuple(readings)
    _clear_globals(model, module)
    refuse_random(model, module.graph)  # type: ignore[arg-type]
    _take_real_tensors(module)
    undo = [back for w in caught for back in settle_side_effects(model, args, kwargs, str(w.message))]
    if not undo:
        return module
    settled = dynamo(model, args, kwargs)
    require_same_call(model, module.graph, settled.graph, undo)  # type: ignore[arg-type]
    return settled


def _as_export_does() -> Any:
    """Return the settings under which dynamo forgets earlier traces, and does not trace logging.

    A number that had another value in an earlier trace would otherwise become a variable, without a guard. A compiled
    step does not log what forward logs.
    """
    config: dict[str, Any] = {"specialize_int": True, "specialize_float": True, "automatic_dynamic_shapes": False}
    if hasattr(torch._dynamo.config, _IGNORED):
        config[_IGNORED] = {getattr(logging.Logger, name) for name in _LOGS if hasattr(logging.Logger, name)}
    return torch._dynamo.config.patch(config)


def _clear_globals(model: nn.Module, module: nn.Module) -> None:
    """Remove dynamo's compiled code, and with it the model, from the globals of the function that it traced.

    Only this model's is removed: another thread may have added its own meanwhile.
    """
    from torch._dynamo.convert_frame import get_traced_fn

    get_traced_fn(model)[0].__globals__.pop(_meta_of(module).get("backend_id", ""), None)


def _meta_of(module: nn.Module) -> dict[str, Any]:
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


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Return `torch.export`'s graph of the model as a module: the front end that runs forward as Python."""
    with exporting(model, args, kwargs), RecurrentAsEager(), _without_prints(), refusing_checkpoints():
        module: nn.Module = torch.export.export(model, args, kwargs, strict=False).module(check_guards=False)
    _meta_of(module)[READINGS] = tuple(options_of_layers(model))
    return module


@contextlib.contextmanager
def _without_prints() -> Iterator[None]:
    """Suppress export's print of the graph so far, to stderr, of what it cannot trace; other prints of the process
    remain.
    """
    from torch.export import _trace

    vars(_trace)["print"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(_trace).pop("print", None)


def _any_meta(model: nn.Module, flat: list[Any]) -> bool:
    """Return whether the model or its inputs hold meta tensors."""
    tensors = (*model.parameters(), *model.buffers(), *(x for x in flat if isinstance(x, torch.Tensor)))
    return any(t.device.type == "meta" for t in tensors)


def _is_tangent(node: fx.Node) -> bool:
    """Return whether a placeholder is a gradient that comes in."""
    return bool(node.meta["desc"].is_tangent())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and logs of tracing about its own internals, which are noise to a user of memplan."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
