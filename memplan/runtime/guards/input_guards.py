"""Checks the arguments of a call: structure, shapes, dtypes, devices and constants must be those of the example.

An `Arrangement` orders arguments as the example has them. `layout_check` compares tensors by one call of the guards
that dynamo uses for its code; only where that fails are they compared one by one. `kind_of_call` is the key of calls
that can run the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C._dynamo.guards import TensorGuards

from memplan.core.choices import other_choices
from memplan.errors import InputMismatch
from memplan.trace.passes.nodes import may_overlap
from memplan.trace.traced import POSITIONAL, ReturnKind, Source, TracedGraph, named_leaves, parameters_of, without_data


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that takes as many tensors, and says whether they are certain to agree with these.

    Compared are class, shape, strides, dtype, device, dispatch keys and `requires_grad`, in the same state of the
    thread (autocast, inference mode). If it is False, they may still agree: compare them one by one. Tensors are not
    kept alive.
    """
    first: dict[int, int] = {}  # `TensorGuards` does not accept a tensor twice
    pairs = [(i, first.setdefault(id(t), i)) for i, t in enumerate(tensors)]
    twice, single = [(i, j) for i, j in pairs if i != j], [i for i, j in pairs if i == j]
    once = [tensors[i] for i in single]
    check: Callable[..., bool] = TensorGuards(*once, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def check_all(*others: Any) -> bool:
        return all(others[i] is others[j] for i, j in twice) and check(*(others[i] for i in single))

    return check_all if twice else check


CallKind = tuple[str, tuple[Hashable, ...]]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The layout of a tensor, its type, its device and whether it requires a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires a gradient" if self.requires_grad else ""
        return f"{self.dtype} {self.shape} (strides {self.strides}) on {self.device}{grad}"


def kind_of(leaf: Any) -> Hashable:
    """Return the kind of a tensor, the text of a value, or that of its type where an object has no text of its own."""
    if isinstance(leaf, torch.Tensor):
        return TensorKind(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    shown: Any = type(leaf).__repr__
    return str(type(leaf)) if shown is object.__repr__ else repr(leaf)


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
    """Return the structure of a call, and the kind of each of its leaves."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(map(kind_of, leaves))


def require_like(example: CallKind, call: CallKind) -> None:
    """Raise `InputMismatch` unless a call is like the example, for `on_mismatch="error"`."""
    if example != call:
        pairs = zip(example[1], call[1], strict=False)
        what = next((f"was made for {a}, and is called with {b}" for a, b in pairs if a != b), "was made for others")
        raise InputMismatch(f"the plan {what}", where="the call", hint='choose on_mismatch="replan" or "eager"')


class Arrangement:
    """The example's way to give arguments: which of them by position and which by keyword."""

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the signature. `args`, `kwargs`: those of the example."""
        self._count, self._names = len(args), tuple(kwargs)
        parameters = parameters_of(forward)
        self._positions = [name for name, p in parameters.items() if p.kind in POSITIONAL]
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        example = {**dict(zip(self._positions, args, strict=False)), **kwargs}
        defaults = self._defaults.items()
        self._omissible = {name: value for name, value in defaults if name in example and _same(example[name], value)}

    def arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as the example has them; unchanged where that is impossible.

        A default that only one of both gives is added, or left out.
        """
        positions = self._positions
        given = dict(zip(positions, args, strict=False))
        if max(len(args), self._count) > len(positions) or given.keys() & kwargs.keys():
            return args, dict(kwargs)
        given.update(kwargs)
        wanted = [*positions[: self._count], *self._names]
        if any(name not in given and name not in self._omissible for name in wanted):
            return args, dict(kwargs)
        values = {name: given.pop(name) if name in given else self._omissible[name] for name in wanted}
        rest = {name: x for name, x in given.items() if not (name in self._defaults and _same(x, self._defaults[name]))}
        by_name = {name: values[name] for name in self._names}
        return tuple(values[name] for name in positions[: self._count]), {**by_name, **rest}


def _same(one: Any, two: Any) -> bool:
    """Return whether two values are the same object, or the same number or text."""
    simple = type(one) is type(two) and isinstance(one, (bool, int, float, str))
    return one is two or (simple and repr(one) == repr(two))


_OTHERS = other_choices("on_mismatch")


class InputGuards:
    """Compares a call with the traced one and returns the tensors that the program takes."""

    def __init__(self, traced: TracedGraph, forward: Callable[..., Any], *, changes_model: bool) -> None:
        """Prepare the checks. `forward`: the function that takes the arguments; with `**kwargs` it sees their order."""
        self.spec = traced.in_spec
        self.examples = traced.example_inputs
        self.bound = [b.index for b in traced.bound(Source.INPUT)]
        self._unplanned = [b.index for b in traced.bound(Source.INPUT) if traced.training and not b.requires_grad]
        self._written = {b.index for b in traced.bound(Source.INPUT) if b.written}
        values, views = traced.graph.values, [r for r in traced.results.returned if r.kind is ReturnKind.ALIAS]
        storages = {values[r.of].storage for r in views}
        self._returned = {b.index for b in traced.bound(Source.INPUT) if values[b.value].storage in storages}
        tensors = [(i, x) for i, x in enumerate(self.examples) if isinstance(x, torch.Tensor)]
        self._names = dict.fromkeys(self.spec.children()[1].context)
        self._any_order = self._names.keys() <= parameters_of(forward).keys()
        self._count = self.spec.children()[0].num_children
        args, kwargs = pytree.tree_unflatten(list(self.examples), self.spec)
        self._arrangement = Arrangement(forward, args, kwargs)
        self.names = [name for name, _ in named_leaves(args, kwargs, forward)]
        self._same_layout = layout_check(self.examples) if len(tensors) == len(self.examples) else None
        self.tensors = items_getter(self.bound)
        self._expected = [(i, x.shape, x.stride()) for i, x in tensors]
        self._constants = [(i, x) for i, x in enumerate(self.examples) if not isinstance(x, torch.Tensor)]
        self._devices = {i: x.device for i, x in tensors}
        self._ties = _ties(self.examples)
        shared = len(set(self._ties.values())) < len(self._ties)
        self._check_ties = len(tensors) > 1 and (bool(self._written) or changes_model or shared)

    def forget_example(self) -> None:
        """Keep of the example's tensors only what calls are compared with."""
        self.examples = without_data(self.examples)

    def device_of(self, i: int) -> torch.device:
        """Return the device of leaf `i` of the example, a tensor."""
        return self._devices[i]

    def are_tied_alike(self, leaves: Sequence[Any]) -> bool:
        """Return whether tensors share memory as those of the example do."""
        return _ties(leaves) == self._ties

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool = False) -> list[Any]:
        """Return the leaves of a call; `training`: autograd records it.

        Raises `InputMismatch` naming the first difference from the traced call.
        """
        leaves = self.leaves_of(args, kwargs)
        if self._same_layout is not None and self._same_layout(*leaves):
            self.check_ties(leaves)
        else:
            self._lay_out(leaves)
        if training:
            self._require_no_gradients(leaves)
        return leaves

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of a call in the order of the example; keywords of named parameters may be in any order.

        Raises `InputMismatch` for another structure; the leaves themselves are not checked.
        """
        if len(args) != self._count or kwargs.keys() != self._names.keys():
            args, kwargs = self._arrangement.arranged(args, kwargs)
        if self._any_order:
            kwargs = {**{name: kwargs[name] for name in self._names if name in kwargs}, **kwargs}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec:
            what = f"the call has {_describe_call(spec)}, the plan was made for {_describe_call(self.spec)}"
            what += "" if spec.num_leaves != self.spec.num_leaves else "; containers, or the order of keys, differ"
            raise _mismatch("arguments", what)
        return leaves

    def _lay_out(self, leaves: list[Any]) -> None:
        """Replace leaves that have other strides than the example by copies with its strides. Raises as `flatten`."""
        given = leaves if not self._check_ties else list(leaves)
        for i, shape, strides in self._expected:
            x = leaves[i]
            self.check_tensor(i, x, sizes=shape)
            if _overrides_operations(type(x)):
                what = (
                    f"is a {type(x).__name__}, which defines its own operations; the plan was made for a plain tensor"
                )
                raise _mismatch(self.names[i], what)
            if x.stride() != strides:
                leaves[i] = self._with_strides(i, x, strides)
        for i, _ in self._constants:
            self.check_constant(i, leaves[i])
        self.check_ties(given)

    def check_tensor(self, i: int, x: Any, *, sizes: torch.Size | None) -> None:
        """Raise `InputMismatch` unless leaf `i` is like a tensor of the example; `sizes`: None for any."""
        like, device = self.examples[i], self._devices[i]
        if not isinstance(x, torch.Tensor):
            raise _mismatch(self.names[i], f"is a {type(x).__name__}, the plan was made for a tensor")
        same = x.dim() == like.dim() if sizes is None else x.shape == sizes
        if not same or x.dtype is not like.dtype or x.device != device or x.layout is not torch.strided:
            wanted = f"the plan was made for {like.dtype} {tuple(like.shape)} on {device}"
            raise _mismatch(self.names[i], f"is {x.dtype} {tuple(x.shape)} ({x.layout}) on {x.device}, {wanted}")

    def check_constant(self, i: int, leaf: Any) -> None:
        """Raise `InputMismatch` if leaf `i`, which is no tensor, differs from that of the example."""
        constant = self.examples[i]
        if type(leaf) is not type(constant) or not same_constant(leaf, constant):
            raise _mismatch(self.names[i], f"is {leaf!r}, the plan was made for {constant!r}")

    def check_ties(self, leaves: Sequence[Any]) -> None:
        """Raise `InputMismatch` if tensors share memory in another way than those of the example, and it matters."""
        if self._check_ties and _ties(leaves) != self._ties:
            what = "tensors do not share memory as those of the example do"
            raise _mismatch("inputs", what)

    def _with_strides(self, i: int, x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        if i in self._written:
            what = f"has strides {x.stride()}, the plan was made for {strides}, and the model changes it in place"
            raise _mismatch(self.names[i], what)
        if i in self._returned:  # a copy's strides are others, and what changes the result would not change the input
            what = f"has strides {x.stride()}, the plan was made for {strides}, and the model returns a view of it"
            raise _mismatch(self.names[i], what)
        return laid_out(x, strides, self.names[i])

    def _require_no_gradients(self, leaves: list[Any]) -> None:
        """Raise `InputMismatch` if an input requires a gradient that was not traced (it would get none)."""
        for i in self._unplanned:
            if leaves[i].requires_grad:
                raise _mismatch(self.names[i], "requires a gradient, the plan was made for one that does not")

    def check_apart(self, leaves: list[Any], written: Mapping[int, str]) -> None:
        """Raise `InputMismatch` if an input shares memory with a tensor that the step changes.

        `written`: the names of these tensors, by data pointer.
        """
        for i in self.bound:
            what = written.get(leaves[i].untyped_storage().data_ptr())
            if what is not None:
                what = f"shares its memory with {what}, which the step changes"
                hint = f"pass a copy, compile again, or choose {_OTHERS}"
                raise InputMismatch(what, where=self.names[i], hint=hint, see="shared-memory")


def laid_out(x: torch.Tensor, strides: Sequence[int], where: str) -> torch.Tensor:
    """Return a copy of an input with these strides; raise `InputMismatch` if its elements would share bytes."""
    if may_overlap(x.shape, strides):
        what = f"has strides {x.stride()}, the plan was made for {tuple(strides)}, under which elements share bytes"
        hint = "compile with a dense example (x.contiguous()), which any layout is copied to, or choose"
        raise InputMismatch(what, where=where, hint=f"{hint} {_OTHERS}")
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def items_getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that returns the elements at these positions of a sequence."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        return lambda given: (given[positions[0]],)
    return lambda given: ()


def _ties(leaves: Sequence[Any]) -> dict[int, int]:
    """Return for each tensor (by position) the position of the first tensor that shares its memory."""
    first: dict[int, int] = {}
    tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    return {i: first.setdefault(x.untyped_storage().data_ptr() or -i, i) for i, x in tensors}


def _overrides_operations(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor class defines its own `__torch_function__` or `__torch_dispatch__`."""
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
    return function not in plain or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def same_constant(one: Any, two: Any) -> bool:
    """Return whether two values of one type, which are no tensors, are the same constant of a trace."""
    if isinstance(one, (float, complex)):  # NaN is NaN, and -0.0 is not 0.0
        return repr(one) == repr(two)
    return one is two or bool(one == two)


def _mismatch(where: str, what: str) -> InputMismatch:
    hint = f"call it like the example inputs, compile again, or choose {_OTHERS}"
    return InputMismatch(what, where=where, hint=hint)


def _describe_call(spec: pytree.TreeSpec) -> str:
    args, kwargs = spec.children()
    names = f" and keywords {', '.join(map(str, kwargs.context))}" if kwargs.num_children else ""
    return f"{args.num_children} positional arguments{names} ({spec.num_leaves} leaves in all)"


def require_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `InputMismatch` naming the first parameter, buffer or input that is a fake or meta tensor."""
    from memplan.torch_inside.graphs import FakeTensor

    inputs = named_leaves(args, kwargs, model.forward)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *inputs):
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            hint = "memplan.plan needs no real tensors; compile does: materialise the model and its inputs first"
            raise InputMismatch(
                f"a fake or {tensor.device} tensor has no data to compute with",
                where=name,
                hint=hint,
                see="no-numbers",
            )
