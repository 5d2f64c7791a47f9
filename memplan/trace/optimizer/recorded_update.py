"""`RecordedUpdate`: the ops of one call of an optimizer's `step()`, and what it depends on that they are just these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from memplan.trace.optimizer.numbers import Expression, Item
from memplan.trace.optimizer.surroundings import Surroundings


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


def structure_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides which ops update a parameter with this state: its keys, words, and the types of the rest."""
    return (*state, *map(_option, state.values()))


def has_structure(state: Mapping[str, Any], structure: tuple[Any, ...]) -> bool:
    """Return whether `structure_of(state)` is `structure`, quickly where the state has no words and truth values."""
    return (*state, *map(type, state.values())) == structure or structure_of(state) == structure


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
