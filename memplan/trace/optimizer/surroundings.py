"""Finds what an optimizer's `step()` reads beside its state and its options: attributes, globals and random numbers."""

from __future__ import annotations

import builtins
import contextlib
import dis
import random
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memplan.trace.optimizer.numbers import Untraceable

PLAIN = (bool, int, float, str, type(None))
_CONSTANTS = (
    *(
        *PLAIN,
        complex,
        bytes,
        types.EllipsisType,
        types.GenericAlias,
        types.UnionType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
    *(torch.finfo, torch.iinfo, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.jit.ScriptFunction),
)
_SEQUENCES = (list, set, frozenset)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_HOOKS = {
    f"_optimizer_{which}_{when}_hooks"
    for which in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}
_CHECKS = {"_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"}  # torch does them once
OWN = {"param_groups", "state", "defaults", "step", "_opt_called"}
_KNOWN_ROOTS = {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
_CHANGING = {"time", "datetime", "os", "secrets", "uuid"}  # modules whose functions return something else at each call
_MISSING = object()


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, comparable. Raises `Untraceable` for one that has no plain value."""
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key not in OWN and key not in _HOOKS and key not in _CHECKS:
            found[key] = _comparable(value, f"its attribute {key!r}")
    for key, value in optimizer.defaults.items():
        with contextlib.suppress(Untraceable):
            found[f"defaults {key}"] = _comparable(value, key)
    return found


def is_hooks(key: str) -> bool:
    """Return whether an attribute of an optimizer has torch's hooks."""
    return key in _HOOKS


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` was replaced on this very optimizer, by other code than torch's learning rate schedulers'.

    Theirs only note that it was called.
    """
    own = vars(optimizer).get("step")
    if own is None:
        return False
    known = getattr(own, "_wrapped_by_lr_sched", False) and own.__globals__["__name__"] == "torch.optim.lr_scheduler"
    return not known or own.__wrapped__ is not type(optimizer).step


def _comparable(value: Any, what: str, *, changeable: bool = True) -> Any:
    """Return something that is equal for equal plain values, and for the same functions, classes and modules.

    Raises `Untraceable` for other objects; without `changeable`, for lists, sets and dicts too.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, repr(value)  # 0.0 and -0.0 differ
    if isinstance(value, tuple) or kind is frozenset or (changeable and kind in _SEQUENCES):
        return kind, tuple(_comparable(one, what, changeable=changeable) for one in value)
    if changeable and kind in _MAPPINGS:
        items = [(_comparable(k, what), _comparable(v, what)) for k, v in value.items()]
        return kind, tuple(items), getattr(value, "default_factory", None)
    if isinstance(value, (type, types.FunctionType)) or kind.__module__ == "typing":
        return value
    if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _CHANGING:
        return value
    if isinstance(value, types.BuiltinFunctionType) and value.__module__ not in _CHANGING:
        bound = value.__self__
        if bound is None or isinstance(bound, (type, types.ModuleType)) or bound is random._inst:
            return value
    name = value.__name__ if isinstance(value, types.ModuleType) else f"a {kind.__name__}"
    raise Untraceable(f"{what} is {name}, whose changes cannot be seen")


@dataclass(frozen=True, slots=True)
class _Fact:
    """A global, a class attribute or a variable of an outer function that `step()` reads."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value: Any
    comparable: Any
    what: str


class Surroundings:
    """The globals, class attributes and variables of outer functions that the code of an optimizer's `step()` names.

    Making it raises `Untraceable` for one whose changes cannot be seen. Code of torch, numpy and Python is left out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._facts: list[_Fact] = []
        self._seen: set[Any] = set()
        self._names: set[str] = set()
        self._classes: list[type] = list(type(optimizer).__mro__)
        for value in vars(optimizer).values():
            if isinstance(value, types.FunctionType) and value is not vars(optimizer).get("step"):
                self._follow(value)
        self._add_names({"step", "__getattr__", "__getattribute__", "__setattr__"})

    def changed(self) -> str | None:
        """Return what has changed, or None."""
        for fact in self._facts:
            try:
                same = _comparable(fact.read(), fact.what, changeable=False) == fact.comparable
            except Untraceable:
                same = False
            if not same:
                return fact.what
        return None

    def restore(self) -> None:
        """Give everything its value of the time when this was made."""
        for fact in self._facts:
            if fact.read() is not fact.value:
                fact.write(fact.value)

    def _add_names(self, names: Iterable[str]) -> None:
        """Look up names that code has in the classes that it may mean."""
        new = set(names) - self._names
        self._names |= new
        for kind in list(self._classes):
            self._look_in(kind, new)

    def _add_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if one not in self._classes and not _is_known(one.__module__):
                self._classes.append(one)
                self._look_in(one, self._names)

    def _look_in(self, kind: type, names: Iterable[str]) -> None:
        for name in names:
            value = vars(kind).get(name, _MISSING)
            if value is _MISSING:
                continue
            if isinstance(value, (staticmethod, classmethod)):
                self._follow(value.__func__)
            elif isinstance(value, property):
                self._follow(value.fget)
                self._follow(value.fset)
            elif _is_known(kind.__module__):
                self._follow(value)
            elif not name.startswith("__") or isinstance(value, types.FunctionType):
                what = f"the class attribute {kind.__name__}.{name}"
                self._add(partial(_read, vars(kind), name), partial(setattr, kind, name), value, what)

    def _add(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any, what: str) -> None:
        """Note a value that code reads, and search the code that it is."""
        self._facts.append(_Fact(read, write, value, _comparable(value, what, changeable=False), what))
        if isinstance(value, types.FunctionType):
            self._follow(value)
        elif isinstance(value, type) and not _is_known(value.__module__):
            self._add_class(value)

    def _follow(self, function: Any) -> None:
        """Search a function of Python."""
        if not isinstance(function, types.FunctionType) or function in self._seen:
            return
        self._seen.add(function)
        self._follow(getattr(function, "__wrapped__", None))
        names = set().union(*(code.co_names for code in _codes(function.__code__)))
        if not _is_known(function.__globals__.get("__name__", "")):
            self._search(function, names)
        self._add_names(names)

    def _search(self, function: types.FunctionType, names: set[str]) -> None:
        where = function.__qualname__
        for code in _codes(function.__code__):
            if any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in dis.get_instructions(code)):
                raise Untraceable(f"{where} sets a global")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            _comparable(value, f"a default of {where}", changeable=False)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = partial(getattr, cell, "cell_contents", _MISSING)
            if read() is not _MISSING:
                self._add(read, partial(setattr, cell, "cell_contents"), read(), f"{name!r} in {where}")
        self._look_in_module(function.__globals__, names)

    def _look_in_module(self, variables: dict[str, Any], names: set[str]) -> None:
        key = (id(variables), frozenset(names))
        if key in self._seen:
            return
        self._seen.add(key)
        for name in names:
            value = variables.get(name, _MISSING)
            if value is _MISSING or value is vars(builtins).get(name, _MISSING):
                continue
            self._add(
                partial(_read, variables, name), partial(variables.__setitem__, name), value, f"the global {name!r}"
            )
            if isinstance(value, types.ModuleType) and not _is_known(value.__name__):
                self._look_in_module(vars(value), names)


def _read(variables: Mapping[str, Any], name: str) -> Any:
    return variables.get(name, _MISSING)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return a function's code and that of the functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN_ROOTS


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Give back the random numbers that are drawn inside. Raises `Untraceable` at the end if there are any."""
    numpy = sys.modules.get("numpy")
    ours, torchs = random.getstate(), torch.get_rng_state()
    numpys = None if numpy is None else numpy.random.get_state(legacy=False)
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != ours:
            drawn.append("Python's")
            random.setstate(ours)
        if numpy is not None and repr(numpy.random.get_state(legacy=False)) != repr(numpys):
            drawn.append("numpy's")
            numpy.random.set_state(numpys)
        if not torch.equal(torch.get_rng_state(), torchs):
            drawn.append("torch's")
            torch.set_rng_state(torchs)
    if drawn:
        raise Untraceable(f"it draws from {drawn[0]} random numbers")
