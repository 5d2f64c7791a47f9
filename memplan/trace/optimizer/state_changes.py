"""Finds what a recorded step has done to an optimizer's state and to its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.trace.optimizer.fake_copy import FakeCopy
from memplan.trace.optimizer.numbers import (
    Constant,
    Expression,
    Numeral,
    StateNumber,
    Untraceable,
    expression_of,
    is_number,
    items_of,
)
from memplan.trace.optimizer.recorded_update import At, UpdateOp
from memplan.trace.optimizer.surroundings import PLAIN
from memplan.trace.optimizer.update_tape import MAKES, UpdateTape
from memplan.trace.passes.rewrite import storage_key


class StateChanges:
    """The changes of the state of the parameters that it has looked at; the fields are as in `RecordedUpdate`."""

    def __init__(self, tape: UpdateTape) -> None:
        self.tape = tape
        self.initial: dict[tuple[str, str], UpdateOp] = {}
        self.created: dict[tuple[str, str], int] = {}
        self.replaced: list[tuple[int, int]] = []
        self.numbers: list[tuple[str, str, Expression]] = []
        self.keys: dict[str, tuple[tuple[str, Any], ...]] = {}

    @property
    def results(self) -> set[int]:
        """The values that the step leaves in the state."""
        return {*self.created.values(), *(new for _, new in self.replaced)}

    def look_at(self, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Note what has become of the state of a parameter."""
        if not old.keys() <= new.keys():
            raise Untraceable("it removes entries of its state")
        self.keys[name] = tuple((k, None if isinstance(v, torch.Tensor) or is_number(v) else v) for k, v in new.items())
        for key, value in new.items():
            if isinstance(value, torch.Tensor):
                self._look_at_tensor(name, key, value, old.get(key))
            elif is_number(value):
                if expression_of(value) != StateNumber(name, key):
                    self.numbers.append((name, key, expression_of(value)))
            elif key not in old or old[key] is not value:
                if type(value) not in PLAIN:
                    raise Untraceable(f"its state has a {type(value).__name__} ({key!r})")
                self.numbers.append((name, key, Constant(repr(value))))

    def _look_at_tensor(self, name: str, key: str, value: torch.Tensor, old: Any) -> None:
        """Note what has become of a tensor of the state: unchanged, overwritten, or made by the step."""
        if id(value) not in self.tape.value_of:
            raise Untraceable("its state has a tensor that no op made")
        index = self.tape.value_of[id(value)]
        if isinstance(old, torch.Tensor) and self.tape.value_of[id(old)] == index:
            return
        lasting = {
            storage_key(self.tape.tensors[i]) for i, source in self.tape.inputs.items() if source.kind != "gradient"
        }
        if isinstance(old, torch.Tensor):
            if (old.shape, old.dtype, old.device) != (value.shape, value.dtype, value.device):
                raise Untraceable(f"its state {key!r} changes its shape or type")
            self.replaced.append((self.tape.value_of[id(old)], index))
            return
        if storage_key(value) in lasting:
            raise Untraceable(f"its state {key!r} becomes a part of another tensor that stays")
        maker = next((op for op in self.tape.ops if op.results == (index,)), None)
        if maker is not None and maker.target in MAKES and self._from_parameters(maker):
            self.initial[name, key] = maker
        else:
            self.created[name, key] = index

    def _from_parameters(self, op: UpdateOp) -> bool:
        """Return whether an op takes the layout of parameters or gradients alone, and known numbers."""
        leaves = pytree.tree_leaves((op.args, op.kwargs))
        tensors = [self.tape.inputs.get(x.value) for x in leaves if isinstance(x, At)]
        reads = any(isinstance(x, Numeral) and any(items_of(x.expression)) for x in leaves)
        return not reads and all(s is not None and s.kind in ("parameter", "gradient") for s in tensors)


def settings_written(copied: FakeCopy) -> list[tuple[int, str, Expression]]:
    """Return the options that the step changes. Raises `Untraceable` for those that are no numbers."""
    found = []
    for i, (old, new) in enumerate(zip(copied.groups, copied.made.param_groups, strict=True)):
        if old.keys() != new.keys():
            raise Untraceable("it adds options to its groups")
        for key, value in new.items():
            if value is old[key]:
                continue
            if not (is_number(value) or type(value) in (int, float)):
                raise Untraceable(f"it changes its option {key!r}")
            found.append((i, key, expression_of(value)))
    return found
