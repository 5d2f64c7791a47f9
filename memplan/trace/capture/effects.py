"""Side effects of forward on Python state, which dynamo reports and a compiled step would silently leave out.

Two kinds are harmless. Attributes that the first call sets and every later call sets to the same value (the shift of
Swin's windows, the problem type in a BERT's configuration) are set here as an eager call would set them. Buffers that
are assigned to themselves (spectral norm's `self._u = normalize(..., out=self._u)`) are changed in place by ops that
are traced. All other side effects are refused.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Container
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from memplan.distributed.local import is_distributed, local_tensor, placed_like
from memplan.distributed.whole_copy import copy_structure
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.dynamo import traced_function
from memplan.torch_inside.graphs import FakeTensorMode
from memplan.trace.capture.origins import clean_module_path

_CODE = (ModuleType, FunctionType, MethodType)  # these have attributes, too
_Attributes = dict[tuple[str, str], Any]  # (module path, attribute) -> value


def settle_side_effects(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> list[Callable[[], None]]:
    """Set the attributes that settle in one call; raise `UnsupportedGraph` for the other effects that dynamo warns of.

    Returns functions that undo each attribute. If there are any, the traced call was the first one, which may differ
    from later ones. The warning `message` ends in a list: of locals (`L['self']._modules['0']`), globals (`G['COUNT']`)
    and sources without a name.
    """
    if "side effects happened" not in message:
        return []
    sources: list[str] = ast.literal_eval(message[message.index("check:") + len("check:") :].strip())
    changed = [source for source in sources if not _is_library_state(model, source)]
    if not changed:
        return []
    modules = dict(model.named_modules())
    inside = all(_is_own(source) and _is_held(clean_module_path(source), modules) for source in changed)
    undo = _settle(model, args, kwargs) if inside else None
    if undo is None:
        raise _changes(model, ", ".join(changed))
    return undo


def require_same_call(model: nn.Module, first: nn.Module, second: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Raise `UnsupportedGraph`, with all attributes restored, if the first call computes what later calls do not."""
    if _computed(first) != _computed(second):
        for back in undo:
            back()
        reason = "forward does something different in its first call, such as an initialisation"
        raise UnsupportedGraph(type(model).__name__, reason, "call the model once, then compile it", see="first-call")


def _computed(module: nn.Module) -> list[Any]:
    """Return what a graph of dynamo's computes, without names, and with the graphs of its checkpoints inside.

    A checkpoint whose function changes Python state returns every tensor that it makes: only what is used counts.
    """
    graph: fx.Graph = module.graph  # type: ignore[assignment]
    found: list[Any] = []
    at: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and not node.users:
            continue
        at[node] = f"%{len(at)}"
        target = getattr(module, node.target, None) if node.op == "get_attr" else None
        given = pytree.tree_map_only(fx.Node, at.get, (node.args, node.kwargs))
        if isinstance(target, fx.GraphModule):
            found.append(_computed(target)[:-1])
        elif node.op == "placeholder":
            found.append(node.op)
        else:
            found.append(f"{node.op} {node.target} {given}")
    return found


def _is_own(source: str) -> bool:
    """Return whether `source` is of the model itself, and not a variable of the functions that it calls (its hooks)."""
    return source.startswith("L[") and "__closure__" not in source


def _is_held(path: str, modules: Container[str]) -> bool:
    """Return whether `path` is a module or an attribute of one, such as its configuration or its buffers."""
    return path in modules or path.rpartition(".")[0] in modules


def _is_library_state(model: nn.Module, source: str) -> bool:
    """Return whether `source` is a global of torch's own modules (a cache of `parametrize`) or of transformers'
    tracing.
    """
    name = source.removeprefix("G['").partition("'")[0]
    held = traced_function(model).__globals__.get(name)
    torchs = isinstance(held, ModuleType) and held.__name__.startswith("torch.")
    return "_active_collector" in source or source.startswith("G['__import_torch_dot_") or torchs


def refuse_random(model: nn.Module, graph: fx.Graph) -> None:
    """Raise `UnsupportedGraph` if Python's `random` draws (dynamo adds an input to its graph for that), or numpy's."""
    if any(str(node.target).startswith("random_value_") for node in graph.find_nodes(op="placeholder")):
        raise _draws(model, "Python's random numbers")
    # dynamo runs numpy's functions in torch, which has a generator of its own
    functions = (getattr(node.target, "f", node.target) for node in graph.nodes if node.op == "call_function")
    if any(str(getattr(f, "__module__", "")).startswith("torch._numpy.random") for f in functions):
        raise _draws(model, "numpy's random numbers")


def _draws(model: nn.Module, which: str) -> UnsupportedGraph:
    """Return the error for random numbers that forward draws outside of torch's kernels."""
    reason = f"forward changes the state of {which}, which a compiled step would leave unchanged"
    hint = "draw random numbers with torch, and seed outside the model, or pass the numbers as an input"
    return UnsupportedGraph(type(model).__name__, reason, hint, see="random-numbers")


def _changes(model: nn.Module, what: str) -> UnsupportedGraph:
    """Return the error for Python state that forward changes."""
    reason = f"forward changes Python state that a compiled step would leave unchanged: {what}"
    hint = (
        "return the value instead, or keep it in a registered buffer and change that in place (copy_, add_), or use "
        "memplan.compile(model, inputs), without fullgraph=True, which leaves it to Python"
    )
    return UnsupportedGraph(type(model).__name__, reason, hint, see="python-state")


def _settle(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Callable[[], None]] | None:
    """Set the attributes that one call settles; return functions that undo each, or None if a call does more."""
    settled = _settled(model, args, kwargs)
    if settled is None:
        return None
    modules = dict(model.named_modules())
    undo: list[Callable[[], None]] = []
    for (path, name), value in settled.items():
        *names, attribute = name.split(".")
        holder = getattr(modules[path], *names) if names else modules[path]
        if attribute in vars(holder):
            undo.append(partial(setattr, holder, attribute, vars(holder)[attribute]))
        else:
            undo.append(partial(delattr, holder, attribute))
        setattr(holder, attribute, value)
    return undo


def _settled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Attributes | None:
    """Return the attributes that one call changes; None if a call changes more, or if a second call changes them again.

    The calls run on fake tensors, on a copy of the model. A call that replaces a buffer changes more than attributes.
    """
    try:
        twin, given = with_fake_tensors(model, (args, kwargs))
        held = _attributes(model)
        args, kwargs = given
        leaves, spec = pytree.tree_flatten(given)
        before, buffers = _attributes(twin), _buffers(twin)
        states = []
        for _ in range(2):
            with torch.no_grad():
                twin(*args, **kwargs)
            states.append(_attributes(twin))
        if _restored(model, held):  # a function that the copy shares with the model, such as a hook, changed it
            return None
        now, now_spec = pytree.tree_flatten(given)  # the caller's containers are effects too
        if now_spec != spec or any(one is not two for one, two in zip(leaves, now, strict=True)):
            return None
        if any(one is not two for one, two in zip(buffers, _buffers(twin), strict=True)):
            return None
    except Exception:  # a call that fails on fake tensors or on a copy is not known to settle
        return None
    once, twice = states
    if once.keys() != twice.keys() or any(not _same(once[key], twice[key]) for key in once):
        return None
    changed = {key: value for key, value in once.items() if key not in before or not _same(before[key], value)}
    return changed if all(_is_plain(value) for value in changed.values()) else None


def _restored(model: nn.Module, before: _Attributes) -> bool:
    """Give the lists and dicts that the model's attributes are their contents `before` again; return whether any
    attribute had changed.
    """
    now = _attributes(model)
    changed = [key for key, value in now.items() if not _same(before.get(key), value)]
    modules = dict(model.named_modules())
    for path, name in changed:
        *names, attribute = name.split(".")
        holder = vars(getattr(modules[path], *names) if names else modules[path])
        if isinstance(holder[attribute], list):
            holder[attribute][:] = before.get((path, name), [])
        elif isinstance(holder[attribute], dict):
            holder[attribute].clear()
            holder[attribute].update(before.get((path, name), []))
        elif (path, name) in before:
            holder[attribute] = before[path, name]
        else:
            del holder[attribute]
    return bool(changed)


def with_fake_tensors(
    model: nn.Module,
    inputs: Any,
    device: str | None = None,
    *,
    sharing: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Any]:
    """Return a structural copy of a model and its inputs on fake tensors (on `device`, or where they are).

    `dtype`: the type of floating-point tensors there; None keeps theirs. `sharing`: what modules hold beside modules,
    parameters and buffers is the model's own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor laid out like `t`; of a DTensor, one whose part of this rank is fake."""
        part, kind = local_tensor(t), dtype if dtype is not None and t.is_floating_point() else t.dtype
        with mode:
            new = torch.empty_strided(part.shape, part.stride(), dtype=kind, device=device or t.device)
        if is_distributed(t):
            new = placed_like(new, t._spec)  # type: ignore[attr-defined]
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
        else:
            new.requires_grad_(t.requires_grad)
        return new

    memo: dict[int, Any] = {id(tensor): fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copied = copy_structure(model, memo) if sharing else copy.deepcopy(model, memo)
    return copied, pytree.tree_map_only(torch.Tensor, fake, inputs)


def _attributes(model: nn.Module) -> _Attributes:
    """Return the attributes of all modules and of the objects that they hold; of a list or dict, its contents now."""
    held = ("_parameters", "_buffers", "_modules")
    found: _Attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in held or (name == "meta" and isinstance(module, fx.GraphModule)):
                continue
            found[path, name] = _contents(value)
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, type, *_CODE)):
                found |= {(path, f"{name}.{inner}"): _contents(v) for inner, v in vars(value).items()}
    return found


def _contents(value: Any) -> Any:
    """Return the contents of a list or dict; any other value itself."""
    return [*value.items()] if isinstance(value, dict) else [*value] if isinstance(value, list) else value


def _buffers(model: nn.Module) -> list[torch.Tensor | None]:
    """Return the buffers of all modules."""
    return [buffer for module in model.modules() for buffer in module._buffers.values()]


def _same(one: Any, two: Any) -> bool:
    """Return whether two values of an attribute are the same."""
    if type(one) is type(two) and isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return one is two or (_is_plain(one) and type(one) is type(two) and bool(one == two))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, a bool, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
