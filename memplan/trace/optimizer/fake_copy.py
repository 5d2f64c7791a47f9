"""`FakeCopy`: a copy of an optimizer on fake tensors, whose options and state are recorded numbers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from memplan.trace.optimizer.numbers import Setting, StateNumber, Untraceable
from memplan.trace.optimizer.recorded_update import UpdateInput
from memplan.trace.optimizer.surroundings import OWN, PLAIN, is_hooks
from memplan.trace.optimizer.update_tape import UpdateTape


class FakeCopy:
    """A copy of an optimizer, `made`, whose parameters, gradients and state are values of a tape.

    `fakes`: its parameters by `id` of the real ones. `state` and `groups`: the entries and options before it runs, by
    `id` and by number. `names` and `with_gradient`: as in `record_update`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        with_gradient: Collection[str],
        tape: UpdateTape,
    ) -> None:
        self.names, self.with_gradient, self.tape = names, with_gradient, tape
        self.own = optimizer
        self.made, self.fakes = self._copied()
        self.state = {id(p): dict(self.made.state.get(self.fakes[id(p)], {})) for p in self.parameters}
        self.groups = [dict(group) for group in self.made.param_groups]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer itself."""
        return [p for group in self.own.param_groups for p in group["params"]]

    def _copied(self) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
        """Return a copy of the optimizer on fake tensors, and its fake parameters by `id` of the real ones."""
        own = self.own
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
                options["foreach"] = foreach_by_default(group)
            made.param_groups.append(options)
        made.state = defaultdict(dict)
        for p, state in own.state.items():
            if id(p) in fakes:
                made.state[fakes[id(p)]] = {k: self._entry(self.names.get(id(p)), k, v) for k, v in state.items()}
            elif not isinstance(p, torch.Tensor):
                raise Untraceable(f"its state has an entry {p!r} that belongs to no parameter")
        return made, fakes

    def _parameter(self, p: torch.Tensor, fakes: dict[int, torch.Tensor]) -> torch.Tensor:
        name = self.names.get(id(p))
        updated = name in self.with_gradient
        made = self.tape.fake(p, UpdateInput(kind="parameter", name=str(name)) if updated else None)
        made.requires_grad_(p.requires_grad)
        if updated:
            made.grad = self.tape.fake(p, UpdateInput(kind="gradient", name=str(name)))
        fakes[id(p)] = made
        return made

    def _option(self, group: int, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = self.tape.fake(value, UpdateInput(kind="setting", name=str(group), key=key))
            self.tape.shadow(made, value)
            return made
        if type(value) in (int, float):
            return self.tape.number(Setting(group, key), value)
        if type(value) in (tuple, list):
            if any(type(one) not in PLAIN for one in value):
                raise Untraceable(f"its option {key!r} has something else than plain values")
            return type(value)(
                self.tape.number(Setting(group, key, i), one) if type(one) in (int, float) else one
                for i, one in enumerate(value)
            )
        if type(value) in PLAIN:
            return value
        raise Untraceable(f"its option {key!r} is a {type(value).__name__}")

    def _entry(self, name: str | None, key: str, value: Any) -> Any:
        """Return an entry of a parameter's state for the copy."""
        updated = name in self.with_gradient
        if isinstance(value, torch.Tensor):
            made = self.tape.fake(value, UpdateInput(kind="state", name=str(name), key=key) if updated else None)
            if updated:
                self.tape.shadow(made, value)
            return made
        if type(value) in (int, float):
            return self.tape.number(StateNumber(str(name), key), value) if updated else value
        if type(value) in PLAIN:
            return value
        raise Untraceable(f"its state has a {type(value).__name__} ({key!r})")


def _own_copy(key: str, value: Any) -> Any:
    """Return an attribute of the optimizer for its copy, which may change it."""
    if is_hooks(key):
        return copy.copy(value)
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else value


def foreach_by_default(group: Mapping[str, Any]) -> bool:
    """Return what torch chooses where `foreach` and `fused` are None: it looks at the types of the parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])
