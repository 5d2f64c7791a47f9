"""What forward changes beside tensors: dynamo names it, and a compiled step would silently leave it unchanged.

One kind is harmless: attributes that the first call sets, and every later call sets to the same again (Swin's
shift of its windows). They are set as a call of eager's would set them; all else is refused.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memplan.errors import UnsupportedGraph
from memplan.trace.origins import clean_module_path

_Attributes = dict[tuple[str, str], Any]  # (module path, attribute) -> value


def settle_side_effects(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    """Read dynamo's warning. Sets attributes that settle in one call; raises `UnsupportedGraph` for other effects."""
    if "side effects happened" not in message:
        return
    changed = [source for source in re.findall(r'"(L\[[^"]+)"', message) if "_active_collector" not in source]
    if not changed:
        return
    modules = dict(model.named_modules())
    if all(clean_module_path(source) in modules for source in changed):
        settled = _settled(model, args, kwargs)
        if settled is not None:
            for (path, name), value in settled.items():
                setattr(modules[path], name, value)
            return
    reason = f"forward changes Python state that a compiled step would leave unchanged: {', '.join(changed)}"
    hint = "return the value instead, or keep it in a registered buffer and change that in place (copy_, add_)"
    raise UnsupportedGraph(type(model).__name__, reason, hint)


def _settled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Attributes | None:
    """The attributes that one call changes, if a second one changes nothing; found on fake tensors, on a copy."""
    try:
        twin, (args, kwargs) = faked(model, (args, kwargs))
        before = _attributes(twin)
        states = []
        for _ in range(2):
            with torch.no_grad():
                twin(*args, **kwargs)
            states.append(_attributes(twin))
    except Exception:  # whatever a model does that fake tensors or copies do not take: it is not known to settle
        return None
    once, twice = states
    if once.keys() != twice.keys() or any(not _same(once[key], twice[key]) for key in once):
        return None
    changed = {key: value for key, value in once.items() if key not in before or not _same(before[key], value)}
    return changed if all(_is_plain(value) for value in changed.values()) else None


def faked(model: nn.Module, inputs: Any, device: str | None = None) -> tuple[nn.Module, Any]:
    """A structural copy of a model and its inputs on fake tensors (of `device`, or where they are)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: torch.Tensor) -> torch.Tensor:
        with mode:
            new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or t.device)
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
        else:
            new.requires_grad_(t.requires_grad)
        return new

    memo: dict[int, Any] = {id(tensor): fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo), pytree.tree_map_only(torch.Tensor, fake, inputs)


def _attributes(model: nn.Module) -> _Attributes:
    held = ("_parameters", "_buffers", "_modules")
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in held
    }


def _same(one: Any, two: Any) -> bool:
    return one is two or (_is_plain(one) and type(one) is type(two) and bool(one == two))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
