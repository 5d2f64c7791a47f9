"""Sends what an optimizer's `step()` does on fake tensors to an `UpdateTape`: ops, reads of numbers, and `math`."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.trace.optimizer.numbers import FUNCTIONS, is_number, number_of
from memplan.trace.optimizer.update_tape import UpdateTape

_SLOW_FOREACH = torch._C.DispatchKey.CompositeExplicitAutograd
_globals_lock = threading.Lock()


@contextlib.contextmanager
def recorded(kind: type, tape: UpdateTape) -> Iterator[None]:
    """Record what runs within, by methods of the class `kind` on fake tensors of `tape`."""
    with _recorded_functions(kind), tape.mode, _Functions(), _Ops(tape):
        yield


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every op to a tape."""

    def __init__(self, tape: UpdateTape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_"):
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(x.device.type != "cpu" for x in tensors):
                return self._one_by_one(func, args, kwargs)
            with self:  # on the CPU, a foreach kernel is the loop over its lists
                return func._op_dk(_SLOW_FOREACH, *args, **kwargs)
        return self.tape.op(func, args, kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a foreach kernel as one call for each element of its lists, so that each can run early."""
        given = [*args, *kwargs.values()]
        count = next(len(x) for x in given if isinstance(x, (list, tuple)) and isinstance(x[0], torch.Tensor))

        def at(i: int, x: Any) -> Any:
            return [x[i]] if isinstance(x, (list, tuple)) and len(x) == count else x

        made = [
            self.tape.op(func, tuple(at(i, x) for x in args), {k: at(i, x) for k, x in kwargs.items()})
            for i in range(count)
        ]
        return None if made[0] is None else [one for several in made for one in several]


class _Functions(TorchFunctionMode):
    """Sends tensors of a Python number and `item()`, which torch would compute at once, through dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and is_number(args[0]):
            number = args[0]
            default = torch.get_default_dtype() if isinstance(number, float) else torch.int64
            dtype, device = kwargs.get("dtype") or default, kwargs.get("device") or "cpu"
            return torch.full((), number, dtype=dtype, device=device)
        result = func(*args, **kwargs)
        return number_of(result.node) if is_number(result) else result


@contextlib.contextmanager
def _recorded_functions(kind: type) -> Iterator[None]:
    """Let `math`, `max` and `min`, as the methods of an optimizer's classes see them, take recorded numbers."""
    functions = [inspect.unwrap(f) for c in kind.__mro__ for f in vars(c).values() if inspect.isfunction(f)]
    missing = object()
    with _globals_lock:
        found: list[tuple[dict[str, Any], str, Any]] = []
        for names in {id(f.__globals__): f.__globals__ for f in functions}.values():
            of_math = [k for k, v in names.items() if callable(v) and getattr(math, k, missing) is v]
            replaced = {name: FUNCTIONS[name] for name in ("max", "min") if name not in names}
            replaced |= {"math": FUNCTIONS["math"]} if names.get("math") is math else {}
            replaced |= {k: getattr(FUNCTIONS["math"], k) for k in of_math}
            for name, function in replaced.items():
                found.append((names, name, names.get(name, missing)))
                names[name] = function
        try:
            yield
        finally:
            for names, name, value in found:
                if value is missing:
                    del names[name]
                else:
                    names[name] = value
