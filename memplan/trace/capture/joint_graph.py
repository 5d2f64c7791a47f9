"""Capture one forward (and backward) of a module as a single functional graph of ATen ops, on fake tensors.

Dynamo reads the Python (`front_ends.py`), and AOTAutograd traces the joint graph. Nothing is computed and no memory of
the model's size is allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from memplan.errors import MemplanError, UnsupportedGraph
from memplan.torch_inside.dynamo import compile_lock
from memplan.torch_inside.graphs import backward_outside_autocast, joint_graph
from memplan.trace.capture.as_eager import compute_conjugates, correct_statistics, layout_decompositions, settle_layouts
from memplan.trace.capture.checkpoints import note_checkpoints, updates_run_once
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.capture.front_ends import (
    READINGS,
    dynamo,
    meta_of,
    quiet,
    require_own_forward,
)
from memplan.trace.capture.fused_attention import FusedAttention
from memplan.trace.capture.python_values import Reading, with_values
from memplan.trace.capture.recurrent import (
    RecurrentAsEager,
    require_modules_dropout_kept,
    size_workspaces,
)
from memplan.trace.capture.refusals import (
    refuse_unfinished,
    require_same_types,
    require_traceable,
    unsupported,
)
from memplan.trace.capture.results import ResultView, returning_once, views_among
from memplan.trace.passes.nodes import order_checks, overlapping_tangents
from memplan.trace.passes.own_outputs import return_new_values, tag_backward
from memplan.trace.passes.rewrite import separate_tangents

Decompositions = Mapping[Any, Callable[..., Any]]  # ops, and functions that compute them from other ops
_OF_INPUT = ("is_input", "alias_of_input")  # AOTAutograd's output types
_ATTENTION = "memplan's attention"  # key of why attention is not fused, in the metadata
_ONCE = "memplan's results"  # key of the structure of the result, and of what is which tensor in it, in the metadata

_SINGLE_OPS = "attention runs in single ops, which need more memory than a fused kernel"


class NoBackward(UnsupportedGraph):
    """Raised when a model is traced for training and no output of it requires a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A joint graph with AOTAutograd's descriptors on its placeholders and outputs.

    `in_spec` is the pytree of (args, kwargs), `out_spec` that of the module's result; `inputs` are the flattened
    example inputs. The graph returns each tensor of the result once: `leaves` has the output that each leaf of the
    result is. For each output, `differentiable` says whether eager's requires a gradient, `alias_of` names the
    placeholder (by position) that it is a view of, or None, and `views` what it is among the outputs. `training`: the
    graph contains the backward. `autocast`: the type that autocast casts to, if the model was traced under it.
    `readings`: the Python values that are constants of the graph. `warnings`: what the step computes unlike eager, for
    the log. `trained`: the names of the parameters and buffers that required a gradient. `attention`: why attention
    runs in single ops on a GPU; "" where it does not.
    """

    graph_module: fx.GraphModule
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[Any, ...]
    differentiable: tuple[bool, ...]
    alias_of: tuple[int | None, ...]
    leaves: tuple[int, ...]
    views: tuple[ResultView, ...]
    training: bool
    autocast: torch.dtype | None
    readings: tuple[Reading, ...] = ()
    warnings: tuple[str, ...] = ()
    trained: frozenset[str] = frozenset()
    attention: str = ""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    by_dynamo: bool = False,
    device: torch.device | None = None,
    decompositions: Decompositions | None = None,
    sharing: bool = False,
    settle: Callable[[Any], None] | None = None,
) -> Captured:
    """Trace `model(*args, **kwargs)`, with its backward if `train`. Raises `UnsupportedGraph`.

    The model may hold real, fake or meta parameters; meta ones are traced as if they were on the CPU. `by_dynamo`: the
    model is one of dynamo's own graphs, which is read as it is and may have no backward. `device`: trace as if the
    model and its inputs were there. `decompositions`: those of a compiler that will generate the kernels (None: the
    ops are eager's, and so are the layouts of their results). `sharing`: as in `with_fake_tensors`. `settle` is
    called with AOTAutograd's result before its graph is read.
    """
    require_traceable(model)
    flat, in_spec = pytree.tree_flatten((args, kwargs))
    inputs, traced = flat, model
    if device is not None or _any_meta(model, flat):
        # Meta kernels would trace another attention than the CPU's.
        traced, flat = with_fake_tensors(model, flat, device="cpu" if device is None else str(device), sharing=sharing)
        args, kwargs = pytree.tree_unflatten(flat, in_spec)
        inputs = flat if device is None else inputs
    with contextlib.ExitStack() as stack:
        require_modules_dropout_kept(traced)
        prepare(stack, traced, train=train)
        joint = _capture_joint(stack, traced, args, kwargs, by_dynamo=by_dynamo, decompositions=decompositions)
    if settle is not None:
        settle(joint)
    as_eager = decompositions is None
    return captured(model, joint, in_spec, inputs, train=train and not by_dynamo, as_eager=as_eager)


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
    stack.enter_context(backward_outside_autocast())
    if train and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        # cuDNN's LSTM saves a workspace for its backward whose size its fake kernel does not know.
        stack.enter_context(_without_cudnn())


def captured(
    model: nn.Module,
    joint: Any,
    in_spec: pytree.TreeSpec,
    inputs: Sequence[Any],
    *,
    train: bool,
    as_eager: bool = True,
) -> Captured:
    """Return AOTAutograd's joint graph, corrected, with the flattened example inputs.

    `as_eager`: eager's kernels will run, so fake results get the layouts that they have there.

    Raises `UnsupportedGraph` if a backward is missing, and for ops that cannot be planned.
    """
    graph_module = joint.graph_module
    out_spec, repeated = graph_module.meta[_ONCE]
    trained = _trained(model)
    _without_hidden_tangents(graph_module.graph, trained)
    refuse_unfinished(graph_module.graph)
    require_same_types(graph_module.graph)
    order_checks(graph_module.graph)
    tag_backward(graph_module.graph)
    attention = graph_module.meta[_ATTENTION]
    views = views_among(graph_module.graph)
    separate_tangents(graph_module.graph)
    if as_eager:
        compute_conjugates(graph_module.graph)
        size_workspaces(graph_module.graph)
        settle_layouts(graph_module.graph)
        correct_statistics(graph_module.graph)
    outputs = joint._aot_state.fw_metadata.output_info
    has_backward = any(n.op == "placeholder" and n.meta["desc"].is_tangent() for n in graph_module.graph.nodes)
    if train and not has_backward:
        raise NoBackward(
            type(model).__name__,
            "computes no output that requires a gradient, so there is no backward to plan",
            "return what is computed from parameters that require gradients (no views of them), or plan the forward "
            "alone (train=False, --infer)",
            see="no-gradient",
        )
    return Captured(
        graph_module=graph_module,
        in_spec=in_spec,
        out_spec=out_spec,
        inputs=tuple(inputs),
        differentiable=tuple(out.requires_grad for out in outputs),
        alias_of=tuple(out.base_idx if out.output_type.name in _OF_INPUT else None for out in outputs),
        leaves=repeated,
        views=views,
        training=has_backward,
        autocast=autocast_dtype("cpu") or autocast_dtype("cuda"),
        readings=with_values(graph_module.meta.get(READINGS, ()), model),
        warnings=(*(updates_run_once(graph_module.graph) if has_backward else ()), *filter(None, (attention,))),
        trained=trained,
        attention=attention,
    )


def _without_hidden_tangents(graph: fx.Graph, trained: Container[str]) -> None:
    """Erase the gradients that come in for `trained` parameters that forward changes.

    It can change these only where autograd does not see it (`weight.data.clamp_(...)`, an embedding with `max_norm`):
    such a gradient is zero. Other tensors may be changed through autograd, which is then refused.
    """
    for node in graph.find_nodes(op="placeholder"):
        changed = getattr(node.meta["desc"].output, "mutated_input", None) if node.meta["desc"].is_tangent() else None
        if getattr(changed, "target", None) not in trained:
            continue
        for user in list(node.users):
            others = [x for x in user.args if x is not node]
            if user.target is torch.ops.aten.add.Tensor and len(others) == 1 and isinstance(others[0], fx.Node):
                user.replace_all_uses_with(others[0])
                graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)


def _trained(model: nn.Module) -> frozenset[str]:
    """Return the names of all parameters and buffers that require a gradient, each name of shared ones."""
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return frozenset(name for name, tensor in held if tensor.requires_grad)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the type that autocast casts to on these devices; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


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
    """Restore parameters and buffers: AOTAutograd leaves its fake ones in a submodule that has two names.

    Restore the contents of tensors that are plain attributes, too: a forward that writes to one does so while it is
    traced, since a front end takes it for a constant.
    """
    held: list[tuple[Any, Any]] = [(own, dict(own)) for m in model.modules() for own in (m._parameters, m._buffers)]
    plain = [x for m in model.modules() for x in pytree.tree_leaves(_attributes(m)) if type(x) is torch.Tensor]
    real = [x for x in plain if not (x.is_inference() or x.is_meta)]
    contents = [(x, x._version, x.detach().to("cpu", copy=True)) for x in real]
    try:
        yield
    finally:
        for own, before in held:
            own.update(before)
        with torch.no_grad():
            for tensor, version, content in contents:
                if tensor._version != version:
                    tensor.copy_(content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module other than its parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}


def _capture_joint(
    stack: contextlib.ExitStack,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    by_dynamo: bool,
    decompositions: Decompositions | None,
) -> Any:
    """Return AOTAutograd's joint graph of what dynamo reads, or of the model itself if dynamo has read it already."""
    try:
        if not by_dynamo:
            require_own_forward(model)
        module = model if by_dynamo else dynamo(model, args, kwargs)
        joint = export_joint(stack, module, args, kwargs, decompositions)
    except MemplanError:
        raise
    except Exception as error:  # whatever torch raises
        raise unsupported(model, error, own="Observed exception" in str(error)) from error
    joint.graph_module.meta[READINGS] = meta_of(module).get(READINGS, ())
    return joint


def export_joint(
    stack: contextlib.ExitStack,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decompositions: Decompositions | None = None,
) -> Any:
    """Return AOTAutograd's joint graph of a front end's module, which returns each tensor once; no gradient that comes
    in has elements that share bytes.

    AOTAutograd gives the gradient of an output the output's own strides. Those of `unfold` and `as_strided` have no
    room for a gradient for each element. The graph is then traced again with dense gradients, as eager's backward gets.
    `decompositions`: as in `capture`.
    """
    table = layout_decompositions() if decompositions is None else decompositions
    note_checkpoints(module)
    recurrent = RecurrentAsEager() if decompositions is None else contextlib.nullcontext()
    fused = FusedAttention(lay_out=decompositions is not None)
    with recurrent, fused, returning_once(module) as once:
        joint = joint_graph(stack, module, args, kwargs, table, dense_tangents=False)
        if overlapping_tangents(joint.graph_module.graph):
            joint = joint_graph(stack, module, args, kwargs, table, dense_tangents=True)
    return_new_values(joint.graph_module.graph)
    why = ", ".join(fused.reasons)
    joint.graph_module.meta[_ATTENTION] = why and f"{_SINGLE_OPS}: {why}"
    joint.graph_module.meta[_ONCE] = once[-1]
    return joint


def _any_meta(model: nn.Module, flat: list[Any]) -> bool:
    """Return whether the model or its inputs hold meta tensors."""
    tensors = (*model.parameters(), *model.buffers(), *(x for x in flat if isinstance(x, torch.Tensor)))
    return any(t.device.type == "meta" for t in tensors)
