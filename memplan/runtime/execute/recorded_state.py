"""Runs a recorded update as the optimizer would: when it is valid, and the state that it begins and leaves.

The optimizer's state is its own. What its first step makes is in memory of the step until then (`Pending`), and becomes
the optimizer's state when that step has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.trace.optimizer.numbers import Expression, Item, Numeral, Untraceable, function_of, items_of, source_of
from memplan.trace.optimizer.recorded_update import (
    At,
    RecordedUpdate,
    UpdateOp,
    has_structure,
    options_of,
)
from memplan.trace.optimizer.surroundings import attributes_of

Pending = dict[str, dict[str, Any]]  # by the name of a parameter: its new state


class UpdateRun:
    """A recorded update of one optimizer, ready to be compared, begun and finished."""

    def __init__(self, recorded: RecordedUpdate, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.recorded, self.model, self.optimizer = recorded, model, optimizer
        self._parameter_named = {name: attrgetter(name) for name in recorded.names}
        self._functions: dict[Any, Callable[..., Any]] = {}
        conditions = list(recorded.conditions.items())
        plain = [(e, v) for e, v in conditions if not any(items_of(e))]
        reading = [(e, v) for e, v in conditions if any(items_of(e))]
        self._expected = tuple(v for _, v in plain)
        self._answers = self._function(tuple(e for e, _ in plain))
        self._expected_reading = tuple(v for _, v in reading)
        self._answers_reading = self._function(tuple(e for e, _ in reading)) if reading else None
        written = (*(e for *_, e in recorded.numbers), *(e for *_, e in recorded.settings))
        self._numbers = self._function(written) if written else None
        self._reads = bool(reading) or any(any(items_of(e)) for e in written)
        self._items: dict[int, Any] = {}

    def holds(self) -> bool:
        """Return whether the optimizer's next step is the recorded one."""
        recorded, optimizer = self.recorded, self.optimizer
        if options_of(optimizer) != recorded.options or recorded.surroundings.changed() is not None:
            return False
        try:
            if attributes_of(optimizer) != recorded.attributes:
                return False
        except Untraceable:
            return False
        for name, structure in recorded.structure.items():
            if not has_structure(self._state(name), structure):
                return False
        if self._answers({}) != self._expected:
            return False
        if self._reads:
            self._items = self._read()
        return self._answers_reading is None or self._answers_reading(self._items) == self._expected_reading

    def pending(self) -> Pending:
        """Return memory for the state that the step makes, by parameter."""
        found: Pending = {name: {} for name in self.recorded.names}
        for (name, key), index in self._new():
            layout = self.recorded.layouts[index]
            made = torch.empty_strided(
                layout.shape, layout.stride(), dtype=layout.dtype, device=self.recorded.devices[index]
            )
            found[name][key] = made.zero_()
        return found

    def _new(self) -> list[tuple[tuple[str, str], int]]:
        made = [(where, op.results[0]) for where, op in self.recorded.initial.items()]
        return [*made, *self.recorded.created.items()]

    def begin(self, pending: Pending) -> tuple[Any, ...]:
        """Write the initial values of new state, and return the Python numbers that `finish` takes."""
        with torch.no_grad():
            for (name, key), op in self.recorded.initial.items():
                pending[name][key].copy_(self._run(op, {}))
        return self._numbers(self._items) if self._numbers is not None else ()

    def finish(self, pending: Pending, numbers: Sequence[Any]) -> bool:
        """Put new state and new numbers where the optimizer keeps them; return whether there is new state."""
        values = iter(numbers)
        new_numbers: dict[str, dict[str, Any]] = {}
        for name, key, _ in self.recorded.numbers:
            new_numbers.setdefault(name, {})[key] = next(values)
        for group, key, _ in self.recorded.settings:
            self.optimizer.param_groups[group][key] = next(values)
        new = bool(self.recorded.initial or self.recorded.created)
        for name in self.recorded.names if new else new_numbers:
            state = self.optimizer.state[self.model.get_parameter(name)]
            made = {**pending.get(name, {}), **new_numbers.get(name, {})} if new else new_numbers[name]
            for key, constant in self.recorded.keys[name]:
                if key in made:
                    state[key] = made[key]
                else:
                    state.setdefault(key, constant)
        return new

    # -- numbers -----------------------------------------------------------------------------------------

    def _state(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(self._parameter_named[name](self.model), {})
        return found

    def _kept(self, name: str, key: str) -> Any:
        return self._state(name)[key]

    def _function(self, expressions: tuple[Expression, ...]) -> Callable[..., Any]:
        """Return a function of the numbers that were read (by number) that evaluates all expressions."""
        sources = "".join(f"{source_of(e, lambda item: f'i[{item.number}]')}, " for e in expressions)
        return function_of(f"({sources})", "i", self.optimizer, self._kept)

    def _read(self) -> dict[int, Any]:
        """Return the numbers that the step will read from small tensors of its state, computed on copies."""
        items: dict[int, Any] = {}
        tensors: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for step in self.recorded.known_steps:
                if isinstance(step, Item):
                    items[step.number] = self._tensor(step.value, tensors).item()
                else:
                    result = self._run(step, items, tensors)
                    for index, made in zip(step.results, [result], strict=True):
                        tensors.setdefault(index, made)
        return items

    def _run(
        self, op: UpdateOp, items: Mapping[int, Any], tensors: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run a recorded op: on copies in `tensors`, or on parameters alone."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, At):
                return self._parameter(leaf.value) if tensors is None else self._tensor(leaf.value, tensors)
            if isinstance(leaf, Numeral):
                if leaf.expression not in self._functions:
                    self._functions[leaf.expression] = self._function((leaf.expression,))
                return self._functions[leaf.expression](items)[0]
            return leaf

        args, kwargs = pytree.tree_map(real, (op.args, op.kwargs))
        made: torch.Tensor = op.target(*args, **kwargs)
        return made

    def _parameter(self, value: int) -> torch.Tensor:
        return self.model.get_parameter(self.recorded.inputs[value].name).detach()

    def _tensor(self, value: int, tensors: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the copy of a tensor of the state or the options that the step reads."""
        if value not in tensors:
            source = self.recorded.inputs[value]
            if source.kind == "setting":
                found = self.optimizer.param_groups[int(source.name)][source.key]
            else:
                found = self._state(source.name)[source.key]
            tensors[value] = found.detach().clone()
        return tensors[value]
