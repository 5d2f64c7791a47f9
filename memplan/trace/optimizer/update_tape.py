"""`UpdateTape`: the ops that run on fake tensors while an optimizer's `step()` is recorded, and what they read."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from memplan.torch_inside.graphs import FakeTensor, FakeTensorMode
from memplan.trace.optimizer.numbers import (
    Conditions,
    Expression,
    Item,
    Node,
    Numeral,
    Untraceable,
    is_number,
    items_of,
    number_of,
)
from memplan.trace.optimizer.recorded_update import At, UpdateInput, UpdateOp
from memplan.trace.passes.nodes import draws
from memplan.trace.passes.rewrite import aten, storage_key

MAKES = {
    *(aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}  # ops that read no element of their arguments
_AS_TENSOR = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}


class UpdateTape:
    """The values, ops and reads of a recording, in the order in which they come.

    `mode` is that of its fake tensors. `inputs`: where a value comes from that the update takes. `conditions`: what was
    asked of numbers. `known_steps`: the ops and reads on small state alone, which can be computed before a step.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.conditions = Conditions()
        self.value_of: dict[int, int] = {}  # by id of a fake tensor
        self.tensors: list[torch.Tensor] = []  # by value
        self.inputs: dict[int, UpdateInput] = {}
        self.ops: list[UpdateOp] = []
        self.known_steps: list[UpdateOp | Item] = []
        self._aliases: list[torch.Tensor] = []  # they are kept, so that no other tensor gets their id
        self._versions: dict[int, int] = defaultdict(int)  # by storage
        self._reads: list[tuple[int, int, int, int]] = []  # (ops before it, value, storage, version)
        self._stale: set[int] = set()  # reads of tensors that change before the number is used
        self._shadows: dict[int, torch.Tensor] = {}  # by value: small tensors of the state, computed along
        self._unknown: set[int] = set()  # storages whose shadows are wrong

    def fake(self, tensor: torch.Tensor, source: UpdateInput | None) -> torch.Tensor:
        """Return a fake tensor like `tensor`; it is a value of the recording if `source` is given."""
        if tensor.layout is not torch.strided:
            raise Untraceable(f"it has a {tensor.layout} tensor")
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if source is not None:
            self.inputs[self.add(made)] = source
        return made

    def add(self, tensor: torch.Tensor) -> int:
        """Return the value that a fake tensor is: a new one if it is not known."""
        known = self.value_of.get(id(tensor))
        if known is None:
            known = self.value_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return known

    def number(self, expression: Expression, value: float, *, known: bool = True) -> Any:
        """Return a recorded number. `known`: whether it can be computed before the step."""
        return number_of(Node(expression, value, self.conditions, known=known))

    def shadow(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        """Compute along what depends on `fake`, from the number that `tensor` has now, if it has only one."""
        if tensor.numel() == 1 and tensor.device.type == "cpu":
            self._shadows[self.value_of[id(fake)]] = tensor.detach().clone()

    # -- ops ----------------------------------------------------------------------------------------

    def op(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an op, and return its results on fake tensors."""
        if target is aten.lift_fresh.default:
            return self._constant(args[0])
        if target is aten._local_scalar_dense.default:
            return self._read(args[0])
        if target in (aten.detach.default, aten.alias.default):
            return self._alias(target, args[0])
        target = _AS_TENSOR.get(target, target)
        flat, spec = pytree.tree_flatten((args, kwargs))
        recorded = [self._argument(x) for x in flat]
        plain = [x.node.value if is_number(x) else x for x in flat]
        result = target(*(unflat := pytree.tree_unflatten(plain, spec))[0], **unflat[1])
        result = _given_back(target, args, kwargs, result)
        several = result if isinstance(result, (list, tuple)) else [result]
        if not all(isinstance(x, torch.Tensor) for x in several if x is not None):
            raise Untraceable(f"{target} returns something else than tensors")
        known = self._known(target, flat) and all(x is None or (x.numel() == 1 and x.is_cpu) for x in several)
        results = tuple(self.add(x) for x in several if x is not None)
        recorded_args, recorded_kwargs = pytree.tree_unflatten(recorded, spec)
        made = UpdateOp(target=target, args=recorded_args, kwargs=recorded_kwargs, results=results)
        self.ops.append(made)
        written = {storage_key(x) for x in _written(target, args, kwargs)}
        for key in written:
            self._versions[key] += 1
        if known:
            self._compute(made, plain, spec)
        else:
            self._unknown |= written
        return result

    def _alias(self, target: OpOverload, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor: the same value of the recording."""
        made: torch.Tensor = target(tensor)
        self.value_of[id(made)] = self.value_of[id(tensor)]
        self._aliases.append(made)
        return made

    def _argument(self, x: Any) -> Any:
        if is_number(x):
            for item in items_of(x.node.expression):
                _, _, key, version = self._reads[item.number]
                if self._versions[key] != version:
                    self._stale.add(item.number)
            return Numeral(x.node.expression, x.node.value)
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self.value_of:
            raise Untraceable("it uses a tensor that is not in its state or its options")
        return At(self.value_of[id(x)])

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of one element that the update makes from a Python number."""
        if isinstance(tensor, FakeTensor) and id(tensor) in self.value_of:
            return tensor
        if isinstance(tensor, FakeTensor) or tensor.numel() != 1:
            raise Untraceable("it makes a tensor of several Python numbers")
        layout = {"dtype": tensor.dtype, "device": tensor.device}
        with _no_modes():
            number = tensor.item()
        made: torch.Tensor = self.op(aten.full.default, (list(tensor.shape), number), layout)
        return made

    def _read(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor of one element."""
        if id(tensor) not in self.value_of:
            raise Untraceable("it reads a tensor that is not in its state")
        value, key = self.value_of[id(tensor)], storage_key(tensor)
        shadow = self._shadows.get(value) if key not in self._unknown else None
        known = shadow is not None
        number: Any = 1.0 if tensor.is_floating_point() else 1
        if shadow is not None:
            with _no_modes():
                number = shadow.item()
        if type(number) not in (int, float):
            raise Untraceable(f"it reads a {tensor.dtype} tensor as a Python number")
        item = Item(len(self._reads), value)
        self._reads.append((len(self.ops), value, key, self._versions[key]))
        if known:
            self.known_steps.append(item)
        return self.number(item, number, known=known)

    def _known(self, target: OpOverload, flat: list[Any]) -> bool:
        """Return whether the result of an op can be computed before the step: it depends on small state alone."""
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if target in MAKES or tensors:
            small = all(self.value_of[id(x)] in self._shadows and storage_key(x) not in self._unknown for x in tensors)
            return small and all(x.node.known for x in flat if is_number(x))
        return False

    def _compute(self, made: UpdateOp, plain: list[Any], spec: pytree.TreeSpec) -> None:
        """Compute an op on the shadows."""
        real = [self._shadows[self.value_of[id(x)]] if isinstance(x, torch.Tensor) else x for x in plain]
        args, kwargs = pytree.tree_unflatten(real, spec)
        with _no_modes():
            result = made.target(*args, **kwargs)
        several = result if isinstance(result, (list, tuple)) else [result]
        for value, x in zip(made.results, several, strict=True):
            self._shadows.setdefault(value, x)
        self.known_steps.append(made)

    # -- the ops of the program ---------------------------------------------------------------------

    def program(
        self, made_before: Collection[UpdateOp], used: Collection[int]
    ) -> tuple[tuple[UpdateOp, ...], dict[int, int]]:
        """Return the ops of the program, and the value that each number is read from.

        Ops in `made_before`, and those whose results are neither in `used` nor needed by another op, are left out.
        Tensors that change after a number was read from them and before it is used are copied.
        """
        before = {id(op) for op in made_before}
        ops: list[UpdateOp] = []
        read_from = {}
        numbered = sorted((position, number) for number, (position, *_) in enumerate(self._reads))
        for position in range(len(self.ops) + 1):
            while numbered and numbered[0][0] == position:
                number = numbered.pop(0)[1]
                value = self._reads[number][1]
                if number in self._stale:
                    source = At(value)
                    with self.mode:
                        value = self.add(torch.empty_like(self.tensors[value]))
                    ops.append(UpdateOp(target=aten.clone.default, args=(source,), kwargs={}, results=(value,)))
                read_from[number] = value
            if position < len(self.ops) and id(self.ops[position]) not in before:
                ops.append(self.ops[position])
        return _without_dead(ops, read_from, set(used)), read_from


def _without_dead(ops: Sequence[UpdateOp], read_from: Mapping[int, int], used: set[int]) -> tuple[UpdateOp, ...]:
    """Return the ops whose results are used, and those that change something or draw random numbers."""
    kept = []
    for op in reversed(ops):
        if op.target._schema.is_mutable or draws(op.target, op.args, op.kwargs) or not used.isdisjoint(op.results):
            kept.append(op)
            for leaf in pytree.tree_leaves((op.args, op.kwargs)):
                if isinstance(leaf, At):
                    used.add(leaf.value)
                elif isinstance(leaf, Numeral):
                    used |= {read_from[item.number] for item in items_of(leaf.expression)}
    return tuple(reversed(kept))


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """Run ops on real tensors, unseen by a recording and by fake tensors."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


def _given_back(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the result of an op; what it changed in place is the argument itself."""
    schema = target._schema
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    given = {
        frozenset(a.alias_info.before_set): named[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in named
    }
    returns = [r.alias_info for r in schema.returns]
    found = [given.get(frozenset(info.before_set)) if info is not None and info.is_write else None for info in returns]
    if len(found) == 1:
        return result if found[0] is None else found[0]
    if any(one is not None for one in found):
        return tuple(made if one is None else one for made, one in zip(result, found, strict=True))
    return result


def _written(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an op changes."""
    named = {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}
    changed = [
        named[a.name]
        for a in target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in named
    ]
    return [x for x in pytree.tree_leaves(changed) if isinstance(x, torch.Tensor)]
