"""Find where a node came from: its module path and the model's source line, from fx metadata."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch import fx

from memplan.core.graph import Origin

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\w*)')

_LIBRARIES = ("/torch/nn/", "/memplan/runtime/")  # whose functions call the user's


def origin_of(node: fx.Node) -> Origin:
    """Return a node's module path ("transformer.h.0.attn"), innermost source line outside torch, op and name."""
    return Origin(module=_module(node), source=source_of(node), op=str(node.target), node=node.name)


def _module(node: fx.Node) -> str:
    """Return the module path of a node; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return clean_module_path(path)


def clean_module_path(path: str) -> str:
    """Return dynamo's `L['self'].h[0].attn` as the name in `named_modules`: `h.0.attn`."""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\w+)\]", r".\1\2\3", path)
    path = path.replace(".__dict__", "")
    path = re.sub(r"_modules\.", "", path)
    return re.sub(r"\.+", ".", path).strip(".")


def source_of(node: fx.Node) -> str:
    """Return the innermost source line outside torch: the line of the model that made the tensor."""
    return place_in_user_code(node.meta.get("stack_trace") or "")


def place_in_user_code(trace: str) -> str:
    """Return the innermost line outside torch of a traceback in a text, such as "model.py:12"; "" if it has none."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)]
    if not frames:
        return ""
    file, line = next((frame for frame in reversed(frames) if "/torch/" not in frame[0]), frames[-1])
    return f"{PurePath(file).name}:{line}"


def place_of(node: fx.Node) -> str:
    """Return the node, its module and its source line, as far as known, for an error: "mul in h.0 in model.py:7"."""
    origin = origin_of(node)
    return " in ".join(part for part in (node.name, origin.module, origin.source) if part)


def place_at_end(text: str) -> str:
    """Return the source line in what `place_of` returned, such as "model.py:7"; "" if it has none."""
    last = text.rpartition(" in ")[2]
    return last if re.fullmatch(r"\S+:\d+", last) else ""


def user_of(graph: fx.Graph) -> str:
    """Return the user's function that a dynamo graph was traced from: "forward in model.py:12"; "" if unknown."""
    for node in graph.nodes:
        frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
        outermost = next((f for f in frames if not any(name in f["file"] for name in _LIBRARIES)), None)
        if outermost:
            return f"{outermost['function']} in {PurePath(outermost['file']).name}:{outermost['line']}"
    return ""


def why_it_ends(graph: fx.GraphModule) -> str:
    """Return why dynamo ended a graph, with the place in the model's code: "Data-dependent branching (model.py:12)".

    Returns "" for a graph at whose end the traced function returns.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    frames = [f for f in reason.user_stack if not any(name in f.filename for name in _LIBRARIES)]
    place = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{str(reason.reason).strip().splitlines()[0]}{place}"
