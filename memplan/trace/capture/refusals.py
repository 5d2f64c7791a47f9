"""Refuse models that cannot be traced correctly, and turn torch's errors into ones that users can act on.

Ops that may return before their results have arrived are refused too: collectives, and ops on another stream. Their
`wait` is registered with the storage that torch allocated for the result. A result in the arena would be a copy of
bytes that have not arrived, and the wait for it would wait for nothing.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy

from memplan.errors import UnsupportedGraph
from memplan.trace.capture.origins import place_at_end, place_in_user_code, place_of
from memplan.trace.passes.rewrite import aten

SEVERAL = "or use memplan.compile(model, inputs), without fullgraph=True, which plans the graphs between such places"
_RUNS = "check that model(*example_inputs) runs eagerly"
_DATA_DEPENDENT = (
    *("data-dependent", "unbacked", "guardondatadependent", "dynamicoutputshape", "datadependentoutput", ".item()"),
    "dynamic shape operator",
)
# dynamo's headings for what eager raises too, whatever the model is, with its own words for it
_FAILS = re.compile(
    r"(TypeError when making fake tensor call|failed to bind arguments).*Developer debug context: (?P<words>[^\n]*)",
    re.DOTALL,
)
# "got RuntimeError('a and b must have the same size')", by dynamo, of an op on fake tensors
_FAILED_ON_FAKES = re.compile(
    r"fake tensor.*got \w+\((?P<quote>['\"])(?P<words>.*?)(?P=quote)\)$", re.DOTALL | re.MULTILINE
)
_OF_ONE_TYPE = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default),
    *(aten.addmv.default, aten.dot.default, aten.vdot.default, aten.convolution.default),
}
_NORMALISATIONS = {  # of one type, but for activations in half precision beside parameters in float32
    *(aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
}
_DETAILS = ("Explanation:", "Developer debug context:", "from user code", "File ", "Hint:")
_HALVES = ("float16", "bfloat16")
_BREAKS = {  # headings of refusals of one graph that a graph break, or Python between graphs, resolves
    *("data-dependent", "data-dependent-size", "graph-breaks", "python-state", "first-call", "random-numbers"),
    *("not-a-buffer", "types"),
}
# Headings of what would be wrong, or has nothing to run, in any way.
_WRONG = {"not-a-module", "data-parallel", "sharded", "no-gradient", "example-fails"}


def module_of(model: Any) -> Any:
    """Return the module to plan: the original, if `torch.compile` or memplan has compiled the model.

    Raises `UnsupportedGraph` for what is no module, or has no Python to trace, even in parts.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UnsupportedGraph(
            name, "is not an nn.Module", "pass the model itself, then its inputs", see="not-a-module"
        )
    if isinstance(model, torch.jit.ScriptModule) and (found := _refusal(model)):
        raise UnsupportedGraph(name, *found[:2], see=found[2])
    # its own attribute: a wrapper around it may answer for what it wraps
    original = vars(model).get("_orig_mod") or vars(model).get("_modules", {}).get("_orig_mod")
    return module_of(original) if isinstance(original, nn.Module) else model


def require_traceable(model: Any) -> None:
    """Raise `UnsupportedGraph` for what is no module, and for modules whose call is not their forward on tensors."""
    module_of(model)
    for name, module in model.named_modules():
        found = _refusal(module)
        if found is not None:
            reason, hint, see = found
            raise UnsupportedGraph(type(model).__name__, f"{name or 'the model'} {reason}", hint, see=see)


def _refusal(module: nn.Module) -> tuple[str, str, str] | None:
    """Return why a module cannot be traced, what to do, and the heading that explains it; None if it can."""
    if isinstance(module, torch.jit.ScriptModule):  # it has no Python left, and its parameters are elsewhere
        reason, see = "is a ScriptModule, which cannot be traced", "script-module"
        return reason, "pass the module as it was before torch.jit.script or trace", see
    if isinstance(module, nn.parallel.DistributedDataParallel):
        reason, see = "is a DistributedDataParallel, whose hooks a compiled step would not call", "data-parallel"
        hint = "compile the module first, then wrap it: DistributedDataParallel(memplan.compile(module, inputs))"
        return reason, hint, see
    if type(module).__name__ in ("FSDPModule", "FullyShardedDataParallel") or hasattr(module, "unshard"):
        reason = "is sharded (FSDP), whose parameters are gathered by hooks that a compiled step would not call"
        hint = "shard the model first, then compile each block within: torch.compile(block, backend=memplan.Backend())"
        see = "sharded"
        return reason, hint, see
    if module._backward_hooks or module._backward_pre_hooks:  # they run where autograd enters or leaves a module
        reason, see = "has backward hooks, which a compiled step would not call", "backward-hooks"
        return reason, "remove them, or use hooks on parameters or outputs", see
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    if any(map(is_lazy, held)):
        reason, see = "has parameters whose shapes are not known yet", "lazy-parameters"
        return reason, "call the model once on its inputs, then compile it", see
    return None


def unsupported(model: nn.Module, error: Exception, *, own: bool = False) -> UnsupportedGraph:
    """Return the front end's error as one sentence and a hint. `own`: the model raised it, as it does in eager."""
    name = type(model).__name__
    failure = _FAILED_ON_FAKES.search(str(error)) or _FAILS.search(str(error))
    if failure is not None:  # eager's own error, within dynamo's traceback
        words = " ".join(failure["words"].replace("\\n", " ").split())
        hint = (
            f"check the shapes and types of the example inputs (a list is one argument; several are a tuple): {_RUNS}"
        )
        if "fake impl" in words or "register_fake" in words or "Meta" in words:
            hint = "register a fake kernel for the op, which gives its shapes without data: torch.library.register_fake"
        return UnsupportedGraph(name, f"forward fails on inputs like the example's: {words}", hint, see="example-fails")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"cannot be traced as one graph: {type(error).__name__}: {lines[0] if lines else 'no message'}"
    details = [line for line in lines[1:] if line.startswith(_DETAILS)]
    text = " ".join([type(error).__name__, *lines]).lower()
    if any(word in text for word in _DATA_DEPENDENT):
        see = "data-dependent"
        hint = (
            "shapes or branches depend on tensor values; compute them outside the model or use a static variant "
            '(for mixtures of experts in transformers: model.set_experts_implementation("batched_mm"))'
            f"; {SEVERAL}"
        )
    elif "entirely functional graph" in text:
        hint, see = "register the tensor that forward changes in place as a buffer of the model", "not-a-buffer"
    elif "refers to a single memory location" in text:
        hint, see = "pass a dense copy of it (.contiguous())", "resized-input"
    elif "not a known type" in text or "unhashable type" in text or "pytree-flattenable" in text:
        see = "types"
        hint = "take and return tensors, tuples, lists or dicts, or register the type (torch.export.register_dataclass)"
        if "cache" in text:
            hint = "set model.config.use_cache = False, which training does not need (transformers)"
    elif "graph break" in text or "unsupported" in text:
        see = "graph-breaks"
        hint = f"take what breaks the graph out of forward (print, logging, .item(), calls into C); {SEVERAL}"
        hint = f"{_RUNS}; then {hint}" if "error when running in eager" in text else hint
    else:
        see = "example-fails" if own or isinstance(error, TypeError) else "graph-breaks"
        hint = f"{_RUNS}; then trace a smaller submodule to find the culprit"
    return UnsupportedGraph(name, "\n  ".join([reason, *details[:4]]), hint, see=see)


def breaks(refused: UnsupportedGraph) -> bool:
    """Return whether a model that was refused as one graph can run as several, with Python between them."""
    return refused.see in _BREAKS


def runs_as_eager(refused: UnsupportedGraph) -> bool:
    """Return whether what was refused may run as eager instead: everything but what would be wrong."""
    return refused.see not in _WRONG


def why_it_breaks(refused: UnsupportedGraph) -> str:
    """Return why one graph cannot hold a model, in one line, with the place in its code where that is known.

    Such as "Data-dependent branching (model.py:12)".
    """
    reason = refused.reason.splitlines()[0].removeprefix("cannot be traced as one graph: ")
    place = place_in_user_code(str(refused.__cause__ or refused))
    return reason.removeprefix("Unsupported: ") + (f" ({place})" if place else "")


def where_it_breaks(refused: UnsupportedGraph) -> str:
    """Return the line of the model that one graph cannot hold, such as "model.py:12"; "" if it is not known."""
    return place_in_user_code(str(refused.__cause__ or "")) or place_at_end(refused.node)


def require_same_types(graph: fx.Graph) -> None:
    """Raise `UnsupportedGraph` for products and norms of several types, which eager refuses and fake tensors do not."""
    for node in graph.nodes:
        if node.target in _OF_ONE_TYPE or node.target in _NORMALISATIONS:
            tensors = [v for n in node.all_input_nodes if isinstance(v := n.meta["val"], torch.Tensor)]
            found = list(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
            mixed = node.target in _NORMALISATIONS and found[0] in _HALVES and set(found[1:]) <= {"float32"}
            if len(found) > 1 and not mixed:
                what = f"forward fails in eager: {node.target} takes one type, and is given {' and '.join(found)}"
                shapes = ", ".join(str(list(t.shape)) for t in tensors)
                hint = "give the example inputs the type of the parameters, x.to(dtype), or run under torch.autocast"
                raise UnsupportedGraph(place_of(node), f"{what} (shapes {shapes})", hint, see="example-fails")


_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_STREAMS = {"ao", "streams"}  # activation offloading, and the streams and events of torch.compile


def refuse_unfinished(graph: fx.Graph) -> None:
    """Raise `UnsupportedGraph` for the first op that may return before its results have arrived."""
    for node in graph.nodes:
        overloads = [target for target in (node.target, *node.args) if isinstance(target, OpOverload)]
        for overload in overloads:  # a higher-order op has it among its arguments
            if overload.namespace in _COLLECTIVES:
                what = f"a collective ({overload}), whose result arrives later: memplan cannot plan it yet"
                hint = (
                    "compile a model of parallelize_module or fully_shard by memplan.compile or compile_step, which "
                    "plan its collectives; keep others outside of what is planned: call them in a function under "
                    "@torch.compiler.disable that waits for the result (wait_tensor), and use "
                    'torch.compile(model, backend="memplan")'
                )
                raise UnsupportedGraph(place_of(node), what, hint, see="collectives")
            if overload.namespace in _STREAMS:
                what = f"an op on another stream ({overload}), whose result arrives later: memplan cannot plan it"
                hint = "leave streams and offloading to memplan: pass budget= to move activations to the host"
                raise UnsupportedGraph(place_of(node), what, hint, see="collectives")
