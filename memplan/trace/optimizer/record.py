"""Record what an optimizer's `step()` does: its own code runs once, on fake tensors, and its ops are written down.

The optimizer itself, its parameters and its state are not touched: a copy of it has fake parameters, gradients and
state, and recorded numbers (`numbers.py`) for its options. What the recording depends on (the structure of the state,
options that are no numbers, answers of comparisons) is stored, and `runtime/execute/recorded_state.py` compares it
before each step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.errors import UnsupportedGraph
from memplan.trace.optimizer.numbers import (
    FUNCTIONS,
    Conditions,
    Constant,
    Expression,
    Item,
    Node,
    Numeral,
    Setting,
    StateNumber,
    Untraceable,
    expression_of,
    is_number,
    items_of,
    number_of,
    source_of,
)
from memplan.trace.optimizer.surroundings import (
    OWN,
    PLAIN,
    Surroundings,
    attributes_of,
    has_own_step,
    is_hooks,
    random_numbers_kept,
)
from memplan.trace.passes.randomness import draws
from memplan.trace.passes.rewrite import aten, storage_key

_MAKES = {
    *(aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}  # ops that read no element of their arguments
_AS_TENSOR = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}
_SLOW_FOREACH = torch._C.DispatchKey.CompositeExplicitAutograd
_globals_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class At:
    """An argument of a recorded op that is a tensor: value `value`."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOp:
    """A recorded op. Its arguments have `At` for tensors and `Numeral` for numbers; `results` are values."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInput:
    """A tensor that an update takes.

    `kind`: "parameter" or "gradient" (of parameter `name`), "state" (tensor `key` of the state of `name`) or "setting"
    (option `key` of the group with the number `name`).
    """

    kind: str
    name: str
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUpdate:
    """The ops of one call of `optimizer.step()`, and the conditions under which it runs just these.

    `inputs` and `layouts` are by value: where a tensor comes from, and an empty tensor on the device "meta" with its
    layout (`devices` has its device). `initial`: the op that makes a tensor of the state before the first step, which
    depends on no gradient. `created`: (parameter, key) of the state that `ops` make. `replaced`: (value, new value) of
    state to overwrite at the end. `numbers` and `settings`: Python numbers of the state and options to set after the
    step. `keys`: the entries of each parameter's state after the step, in order, None for tensors. `read_from`: the
    value from which a number is read. `known_steps`: the ops and reads on small state alone, in order, which are
    computed before the step where conditions depend on them. `structure`: what each parameter's state must have.
    `signature` is equal for updates with the same ops.
    """

    names: tuple[str, ...]
    inputs: Mapping[int, UpdateInput]
    layouts: Mapping[int, torch.Tensor]
    devices: Mapping[int, torch.device]
    ops: tuple[UpdateOp, ...]
    initial: Mapping[tuple[str, str], UpdateOp]
    created: Mapping[tuple[str, str], int]
    replaced: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[str, str, Expression], ...]
    settings: tuple[tuple[int, str, Expression], ...]
    keys: Mapping[str, tuple[tuple[str, Any], ...]]
    read_from: Mapping[int, int]
    conditions: Mapping[Expression, Any]
    known_steps: tuple[UpdateOp | Item, ...]
    structure: Mapping[str, tuple[Any, ...]]
    options: tuple[Any, ...]
    attributes: Mapping[str, Any]
    surroundings: Surroundings
    signature: str


def record_update(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], with_gradient: Collection[str]
) -> RecordedUpdate:
    """Return what the next `optimizer.step()` does.

    Args:
        optimizer: It stays as it is.
        names: The names of its parameters, by `id`.
        with_gradient: The names of the parameters that have gradients.

    Raises:
        Untraceable: The update depends on something that a program cannot follow.
        UnsupportedGraph: `step()` cannot run without a closure, or raises an error.
    """
    _require_no_closure(optimizer)
    if has_own_step(optimizer):
        raise Untraceable("its step was replaced on this optimizer")
    return _Recording(optimizer, names, with_gradient).run()


def structure_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides which ops update a parameter with this state: its keys, words, and the types of the rest."""
    return (*state, *map(_option, state.values()))


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return the options of all groups that are no numbers, and the types of those that are."""
    return tuple(
        tuple((key, _option(value)) for key, value in group.items() if key not in ("params", "initial_lr"))
        for group in optimizer.param_groups
    )


def _option(value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_option, value))
    return type(value)


@dataclass(slots=True)
class _After:
    """The state of the copy after it has run; the fields are as in `RecordedUpdate`."""

    initial: dict[tuple[str, str], UpdateOp] = field(default_factory=dict)
    created: dict[tuple[str, str], int] = field(default_factory=dict)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[tuple[str, str, Expression]] = field(default_factory=list)
    keys: dict[str, tuple[tuple[str, Any], ...]] = field(default_factory=dict)
    structure: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class _Recording:
    """The copy of an optimizer that runs on fake tensors, and what its ops are."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], with_gradient: Collection[str]
    ) -> None:
        self.optimizer = optimizer
        self.names = names
        self.with_gradient = with_gradient
        self.surroundings = Surroundings(optimizer)
        self.mode = FakeTensorMode()
        self.conditions = Conditions()
        self.value_of: dict[int, int] = {}  # by id of a fake tensor
        self.tensors: list[torch.Tensor] = []  # by value
        self.aliases: list[torch.Tensor] = []  # they are kept, so that no other tensor gets their id
        self.inputs: dict[int, UpdateInput] = {}
        self.ops: list[UpdateOp] = []
        self.versions: dict[int, int] = defaultdict(int)  # by storage
        self.reads: list[tuple[int, int, int, int]] = []  # (ops before it, value, storage, version)
        self.stale: set[int] = set()  # reads of tensors that change before the number is used
        self.shadows: dict[int, torch.Tensor] = {}  # by value: small tensors of the state, computed along
        self.unknown: set[int] = set()  # storages whose shadows are wrong
        self.known_steps: list[UpdateOp | Item] = []

    # -- the copy ----------------------------------------------------------------------------------------

    def run(self) -> RecordedUpdate:
        """Run `step()` on the copy and return what it did."""
        _require_apart(self.optimizer)
        attributes = attributes_of(self.optimizer)
        made, fakes = self._copied()
        self.parameters = {name: fakes[id(p)] for p in self._all() if (name := self.names.get(id(p))) is not None}
        start = {name: storage_key(p) for name, p in self.parameters.items()}
        before = {id(p): dict(made.state.get(fakes[id(p)], {})) for p in self._all()}
        groups = [dict(group) for group in made.param_groups]
        try:
            with (
                random_numbers_kept(),
                torch.inference_mode(False),
                torch.enable_grad(),
                _recorded_functions(type(made)),
                self.mode,
                _Functions(self),
                _Ops(self),
            ):
                type(made).step(made)
        except (Untraceable, UnsupportedGraph):
            raise
        except Exception as error:
            raise _explained(self.optimizer, error) from error
        finally:
            changed = self.surroundings.changed()
            self.surroundings.restore()
        if changed is not None:
            raise Untraceable(f"it changes {changed}")
        if any(storage_key(p) != start[name] for name, p in self.parameters.items()):
            raise Untraceable("it replaces the memory of a parameter (p.data = ...)")
        if attributes_of(made) != attributes:
            raise Untraceable("it changes attributes of its own")
        return self._result(made, fakes, before, groups, attributes)

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _copied(self) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
        """Return a copy of the optimizer on fake tensors, and its fake parameters by `id` of the real ones."""
        own = self.optimizer
        made: Any = object.__new__(type(own))
        for key, value in vars(own).items():
            if key not in OWN:
                made.__dict__[key] = _own_copy(key, value)
        made.defaults = copy.copy(own.defaults)
        fakes: dict[int, torch.Tensor] = {}
        made.param_groups = []
        for i, group in enumerate(own.param_groups):
            options: dict[str, Any] = {k: self._option(i, k, v) for k, v in group.items() if k != "params"}
            options["params"] = [self._parameter(p, fakes) for p in group["params"]]
            if "foreach" in options and options["foreach"] is None and not options.get("fused"):
                options["foreach"] = _foreach_by_default(group)
            made.param_groups.append(options)
        made.state = defaultdict(dict)
        for p, state in own.state.items():
            if id(p) in fakes:
                made.state[fakes[id(p)]] = {k: self._entry(self.names.get(id(p)), k, v) for k, v in state.items()}
            elif not isinstance(p, torch.Tensor):
                raise Untraceable(f"its state has an entry {p!r} that belongs to no parameter")
        return made, fakes

    def _fake(self, tensor: torch.Tensor, source: UpdateInput | None) -> torch.Tensor:
        """Return a fake tensor like `tensor`; it is a value of the recording if `source` is given."""
        if tensor.layout is not torch.strided:
            raise Untraceable(f"it has a {tensor.layout} tensor")
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if source is not None:
            self.inputs[self._add(made)] = source
        return made

    def _add(self, tensor: torch.Tensor) -> int:
        known = self.value_of.get(id(tensor))
        if known is None:
            known = self.value_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return known

    def _parameter(self, p: torch.Tensor, fakes: dict[int, torch.Tensor]) -> torch.Tensor:
        name = self.names.get(id(p))
        updated = name in self.with_gradient
        made = self._fake(p, UpdateInput(kind="parameter", name=str(name)) if updated else None)
        made.requires_grad_(p.requires_grad)
        if updated:
            made.grad = self._fake(p, UpdateInput(kind="gradient", name=str(name)))
        fakes[id(p)] = made
        return made

    def _number(self, expression: Expression, value: float, *, known: bool = True) -> Any:
        return number_of(Node(expression, value, self.conditions, known=known))

    def _option(self, group: int, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = self._fake(value, UpdateInput(kind="setting", name=str(group), key=key))
            self._shadow(made, value)
            return made
        if type(value) in (int, float):
            return self._number(Setting(group, key), value)
        if type(value) in (tuple, list):
            if any(type(one) not in PLAIN for one in value):
                raise Untraceable(f"its option {key!r} has something else than plain values")
            return type(value)(
                self._number(Setting(group, key, i), one) if type(one) in (int, float) else one
                for i, one in enumerate(value)
            )
        if type(value) in PLAIN:
            return value
        raise Untraceable(f"its option {key!r} is a {type(value).__name__}")

    def _entry(self, name: str | None, key: str, value: Any) -> Any:
        """Return an entry of a parameter's state for the copy."""
        updated = name in self.with_gradient
        if isinstance(value, torch.Tensor):
            made = self._fake(value, UpdateInput(kind="state", name=str(name), key=key) if updated else None)
            if updated:
                self._shadow(made, value)
            return made
        if type(value) in (int, float):
            return self._number(StateNumber(str(name), key), value) if updated else value
        if type(value) in PLAIN:
            return value
        raise Untraceable(f"its state has a {type(value).__name__} ({key!r})")

    def _shadow(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.numel() == 1 and tensor.device.type == "cpu":
            self.shadows[self.value_of[id(fake)]] = tensor.detach().clone()

    # -- ops ---------------------------------------------------------------------------------------------

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
        results = tuple(self._add(x) for x in several if x is not None)
        recorded_args, recorded_kwargs = pytree.tree_unflatten(recorded, spec)
        made = UpdateOp(target=target, args=recorded_args, kwargs=recorded_kwargs, results=results)
        self.ops.append(made)
        written = {storage_key(x) for x in _written(target, args, kwargs)}
        for key in written:
            self.versions[key] += 1
        if known:
            self._compute(made, plain, spec)
        else:
            self.unknown |= written
        return result

    def _alias(self, target: OpOverload, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor: the same value of the recording."""
        made: torch.Tensor = target(tensor)
        self.value_of[id(made)] = self.value_of[id(tensor)]
        self.aliases.append(made)
        return made

    def _argument(self, x: Any) -> Any:
        if is_number(x):
            for item in items_of(x.node.expression):
                _, _, key, version = self.reads[item.number]
                if self.versions[key] != version:
                    self.stale.add(item.number)
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
        shadow = self.shadows.get(value) if key not in self.unknown else None
        known = shadow is not None
        number: Any = 1.0 if tensor.is_floating_point() else 1
        if shadow is not None:
            with _no_modes():
                number = shadow.item()
        if type(number) not in (int, float):
            raise Untraceable(f"it reads a {tensor.dtype} tensor as a Python number")
        item = Item(len(self.reads), value)
        self.reads.append((len(self.ops), value, key, self.versions[key]))
        if known:
            self.known_steps.append(item)
        return self._number(item, number, known=known)

    def _known(self, target: OpOverload, flat: list[Any]) -> bool:
        """Return whether the result of an op can be computed before the step: it depends on small state alone."""
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if target in _MAKES or tensors:
            small = all(self.value_of[id(x)] in self.shadows and storage_key(x) not in self.unknown for x in tensors)
            return small and all(x.node.known for x in flat if is_number(x))
        return False

    def _compute(self, made: UpdateOp, plain: list[Any], spec: pytree.TreeSpec) -> None:
        """Compute an op on the shadows."""
        real = [self.shadows[self.value_of[id(x)]] if isinstance(x, torch.Tensor) else x for x in plain]
        args, kwargs = pytree.tree_unflatten(real, spec)
        with _no_modes():
            result = made.target(*args, **kwargs)
        several = result if isinstance(result, (list, tuple)) else [result]
        for value, x in zip(made.results, several, strict=True):
            self.shadows.setdefault(value, x)
        self.known_steps.append(made)

    # -- the result --------------------------------------------------------------------------------------

    def _result(
        self,
        made: torch.optim.Optimizer,
        fakes: Mapping[int, torch.Tensor],
        before: Mapping[int, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        attributes: Mapping[str, Any],
    ) -> RecordedUpdate:
        """Return the recording, after checking what has become of the copy's state and options."""
        after = _After()
        for p in self._all():
            name, old, new = self.names.get(id(p)), before[id(p)], made.state.get(fakes[id(p)], {})
            if name in self.with_gradient and name is not None:
                after.structure[name] = structure_of(self.optimizer.state.get(p, {}))
                self._look_at_state(name, old, new, after)
            elif list(old.items()) != list(new.items()):
                raise Untraceable("it changes the state of a parameter without a gradient")
        parameters = [storage_key(fakes[id(p)]) for p in self._all()]
        kept = [storage_key(x) for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        if len({*parameters, *kept}) < len({*parameters}) + len(kept):
            raise Untraceable("two tensors of its state have memory in common")
        settings = self._settings_written(made, groups)
        for expression in [one for *_, one in (*after.numbers, *settings)]:
            if not all(item in self.known_steps for item in items_of(expression)):
                raise Untraceable("a Python number of its state depends on gradients")
        ops, read_from = self._with_snapshots(after)
        inputs = dict(self.inputs)
        for (name, key), op in after.initial.items():
            inputs[op.results[0]] = UpdateInput(kind="state", name=name, key=key)
        return RecordedUpdate(
            names=tuple(after.structure),
            inputs=inputs,
            layouts={i: _layout(t) for i, t in enumerate(self.tensors)},
            devices={i: t.device for i, t in enumerate(self.tensors)},
            ops=ops,
            initial=after.initial,
            created=after.created,
            replaced=tuple(after.replaced),
            numbers=tuple(after.numbers),
            settings=tuple(settings),
            keys=after.keys,
            read_from=read_from,
            conditions=dict(self.conditions.found),
            known_steps=tuple(self.known_steps),
            structure=after.structure,
            options=options_of(self.optimizer),
            attributes=attributes,
            surroundings=self.surroundings,
            signature=_signature(inputs, ops, read_from, after.created, after.replaced),
        )

    def _look_at_state(self, name: str, old: Mapping[str, Any], new: Mapping[str, Any], after: _After) -> None:
        """Note what has become of the state of a parameter."""
        if not old.keys() <= new.keys():
            raise Untraceable("it removes entries of its state")
        after.keys[name] = tuple(
            (k, None if isinstance(v, torch.Tensor) or is_number(v) else v) for k, v in new.items()
        )
        for key, value in new.items():
            if isinstance(value, torch.Tensor):
                self._look_at_tensor(name, key, value, old.get(key), after)
            elif is_number(value):
                if expression_of(value) != StateNumber(name, key):
                    after.numbers.append((name, key, expression_of(value)))
            elif key not in old or old[key] is not value:
                if type(value) not in PLAIN:
                    raise Untraceable(f"its state has a {type(value).__name__} ({key!r})")
                after.numbers.append((name, key, Constant(repr(value))))

    def _look_at_tensor(self, name: str, key: str, value: torch.Tensor, old: Any, after: _After) -> None:
        """Note what has become of a tensor of the state: unchanged, overwritten, or made by the step."""
        if id(value) not in self.value_of:
            raise Untraceable("its state has a tensor that no op made")
        index = self.value_of[id(value)]
        if isinstance(old, torch.Tensor) and self.value_of[id(old)] == index:
            return
        lasting = {storage_key(self.tensors[i]) for i, source in self.inputs.items() if source.kind != "gradient"}
        if isinstance(old, torch.Tensor):
            if (old.shape, old.dtype, old.device) != (value.shape, value.dtype, value.device):
                raise Untraceable(f"its state {key!r} changes its shape or type")
            after.replaced.append((self.value_of[id(old)], index))
            return
        if storage_key(value) in lasting:
            raise Untraceable(f"its state {key!r} becomes a part of another tensor that stays")
        maker = next((op for op in self.ops if op.results == (index,)), None)
        if maker is not None and maker.target in _MAKES and self._from_parameters(maker):
            after.initial[name, key] = maker
        else:
            after.created[name, key] = index

    def _from_parameters(self, op: UpdateOp) -> bool:
        """Return whether an op takes the layout of parameters or gradients alone, and known numbers."""
        leaves = pytree.tree_leaves((op.args, op.kwargs))
        tensors = [self.inputs.get(x.value) for x in leaves if isinstance(x, At)]
        reads = any(isinstance(x, Numeral) and any(items_of(x.expression)) for x in leaves)
        return not reads and all(s is not None and s.kind in ("parameter", "gradient") for s in tensors)

    def _settings_written(
        self, made: torch.optim.Optimizer, groups: list[dict[str, Any]]
    ) -> list[tuple[int, str, Expression]]:
        """Return the options that the step changes. Raises `Untraceable` for those that are no numbers."""
        found = []
        for i, (old, new) in enumerate(zip(groups, made.param_groups, strict=True)):
            if old.keys() != new.keys():
                raise Untraceable("it adds options to its groups")
            for key, value in new.items():
                if value is old[key]:
                    continue
                if not (is_number(value) or type(value) in (int, float)):
                    raise Untraceable(f"it changes its option {key!r}")
                found.append((i, key, expression_of(value)))
        return found

    def _with_snapshots(self, after: _After) -> tuple[tuple[UpdateOp, ...], dict[int, int]]:
        """Return the ops of the program, and the value that each number is read from.

        Those that make initial state, or results that nothing uses, are left out. Tensors that change after a number
        was read from them and before it is used are copied.
        """
        made_before = {id(op) for op in after.initial.values()}
        ops: list[UpdateOp] = []
        read_from = {}
        numbered = sorted((position, number) for number, (position, *_) in enumerate(self.reads))
        for position in range(len(self.ops) + 1):
            while numbered and numbered[0][0] == position:
                number = numbered.pop(0)[1]
                value = self.reads[number][1]
                if number in self.stale:
                    source = At(value)
                    with self.mode:
                        value = self._add(torch.empty_like(self.tensors[value]))
                    ops.append(UpdateOp(target=aten.clone.default, args=(source,), kwargs={}, results=(value,)))
                read_from[number] = value
            if position < len(self.ops) and id(self.ops[position]) not in made_before:
                ops.append(self.ops[position])
        return _without_dead(ops, read_from, {*after.created.values(), *(new for _, new in after.replaced)}), read_from


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


def _signature(
    inputs: Mapping[int, UpdateInput],
    ops: tuple[UpdateOp, ...],
    read_from: Mapping[int, int],
    created: Mapping[tuple[str, str], int],
    replaced: Iterable[tuple[int, int]],
) -> str:
    """Return a text that is equal for updates with the same ops on the same tensors, however values are numbered."""
    label: dict[int, Any] = {value: (one.kind, one.name, one.key) for value, one in inputs.items()}

    def named(leaf: Any) -> Any:
        if isinstance(leaf, At):
            return ("tensor", label[leaf.value])
        if isinstance(leaf, Numeral):
            return source_of(leaf.expression, lambda item: f"item({label[read_from[item.number]]})")
        return ("plain", leaf)

    lines = []
    for op in ops:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        lines.append((str(op.target), list(map(named, leaves)), str(spec)))
        for value in op.results:
            label.setdefault(value, len(lines))
    ends = [(name, key, label[value]) for (name, key), value in created.items()]
    return repr((lines, ends, [(label[one], label[two]) for one, two in replaced]))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every op to a recording."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

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
        return self.recording.op(func, args, kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a foreach kernel as one call for each element of its lists, so that each can run early."""
        given = [*args, *kwargs.values()]
        count = next(len(x) for x in given if isinstance(x, (list, tuple)) and isinstance(x[0], torch.Tensor))

        def at(i: int, x: Any) -> Any:
            return [x[i]] if isinstance(x, (list, tuple)) and len(x) == count else x

        made = [
            self.recording.op(func, tuple(at(i, x) for x in args), {k: at(i, x) for k, x in kwargs.items()})
            for i in range(count)
        ]
        return None if made[0] is None else [one for several in made for one in several]


class _Functions(TorchFunctionMode):
    """Gives `item()` and tensors of a Python number, which torch would compute at once, to a recording."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

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


def _own_copy(key: str, value: Any) -> Any:
    """Return an attribute of the optimizer for its copy, which may change it."""
    if is_hooks(key):
        return copy.copy(value)
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else value


def _require_apart(optimizer: torch.optim.Optimizer) -> None:
    """Raise `Untraceable` if two tensors of the parameters and the state have memory in common."""
    found: list[tuple[Any, int, int]] = []
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}.values()
    entries = [x for state in optimizer.state.values() if isinstance(state, Mapping) for x in state.values()]
    for x in (*parameters, *entries):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel():
            last = sum((int(size) - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
            start = int(x.storage_offset()) * x.element_size()
            found.append((storage_key(x), start, start + (last + 1) * x.element_size()))
    found.sort(key=lambda one: (str(one[0]), one[1]))
    for (key, _, end), (other, start, _) in itertools.pairwise(found):
        if key == other and start < end:
            raise Untraceable("two tensors of its parameters and its state have memory in common")


def _layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on the device "meta" with the layout of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _foreach_by_default(group: Mapping[str, Any]) -> bool:
    """Return what torch chooses where `foreach` and `fused` are None: it looks at the types of the parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedGraph` for an optimizer whose step computes the loss several times."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needed = any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if needed or hasattr(optimizer, "first_step"):
        raise _needs_closure(optimizer, "it computes the loss several times")


def _needs_closure(optimizer: torch.optim.Optimizer, why: str) -> UnsupportedGraph:
    return UnsupportedGraph(
        type(optimizer).__name__,
        f"its step needs a closure: {why}",
        "use memplan.compile for the model, and call the optimizer as before",
        see="closure",
    )


def _explained(optimizer: torch.optim.Optimizer, error: Exception) -> Exception:
    """Return the error to raise for one of `step()` on fake tensors."""
    words = f"{type(error).__name__}: {error}".splitlines()[0]
    if "closure" in words:
        return _needs_closure(optimizer, words)
    return Untraceable(f"its step() raises on fake tensors: {words}")
