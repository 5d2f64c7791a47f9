"""Measures what an optimizer keeps and allocates, without bytes: those of its state, and the peak of `step()`.

The optimizer's own code runs, so every optimizer of `torch.optim`, and others, are measured alike.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan.distributed.local import largest_part
from memplan.errors import InvalidModel
from memplan.torch_inside.graphs import FakeTensor, FakeTensorMode

Parameters = Iterable[torch.nn.Parameter]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
NONE = "none"
_LEFT_OUT = ("state", "step", "_opt_called")  # attributes that a copy of an optimizer does not share
_HOOKS = {
    f"_optimizer_{which}_{when}_hooks"
    for which in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}
_NUMBER = 8  # bytes: torch makes a tensor of the host of a Python number while an op of the update reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBytes:
    """The needs of an optimizer on the device of its parameters.

    `name` is its class, `state` the bytes that it keeps, `temporaries` the most that `step()` allocates beside them.
    """

    name: str
    state: int
    temporaries: int


def update_bytes(
    optimizer: str | MakeOptimizer, parameters: Parameters, *, foreach: bool, counters: bool = False
) -> UpdateBytes:
    """Return what an optimizer needs for parameters that require gradients.

    Args:
        optimizer: The name of a class in `torch.optim`, "none", or a function from parameters to an optimizer.
        parameters: The parameters, of any device.
        foreach: Update all parameters together where the class can and nothing else is asked for, as torch does on
            accelerators.
        counters: Count what is on the host too: the number of steps of each parameter, and a number in an update.

    Raises:
        InvalidModel: There is no such optimizer, or it cannot update these parameters.
    """
    own = [_with_gradient(p) for p in parameters if p.requires_grad]
    if optimizer == NONE or not own:
        return UpdateBytes(name=NONE, state=0, temporaries=0)
    made = made_optimizer(optimizer, own)
    if foreach:
        for group in made.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    try:
        found = _counted(made)
    except Exception as error:
        raise _failed(made, error) from error
    if not counters:
        return found
    leaves = (x for state in made.state.values() for x in tree_leaves(dict(state)) if isinstance(x, torch.Tensor))
    on_host = sum(dict(storage_of(x) for x in leaves if not x.is_meta).values())
    return replace(found, state=found.state + on_host, temporaries=found.temporaries + _NUMBER)


def bytes_of_updates(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> UpdateBytes | None:
    """Return what an optimizer needs to update those of its parameters that are given, whatever its class.

    A copy of it runs twice on fake tensors, as the first step makes state. Torch's random numbers are as before.

    Args:
        optimizer: The optimizer. Groups that ask for a fused kernel are counted as updated one by one.
        parameters: The parameters of the model.

    Returns:
        The bytes; None if it does not run on fake tensors.
    """
    own = {id(p) for p in parameters if p.requires_grad}
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            made = _copied(optimizer, own)
            for group in made.param_groups:
                if group.get("fused"):
                    group.update(fused=None, foreach=False)
            return _counted(made)
        except Exception:  # whatever an update does with tensors that have no numbers, the real one runs as ever
            return None


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages without bytes, of meta tensors and fake ones, that ops make while it is on.

    `live` is the sum now, `peak` the most; storages in `known` exist already. A number that is read from a tensor is
    0.5, True or 1: there are none.
    """

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(known)
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and count its new results."""
        if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return True if args[0].dtype is torch.bool else 0.5 if args[0].dtype.is_floating_point else 1
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        key, nbytes = storage_of(tensor)
        if key not in self._known:
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor.untyped_storage(), self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _counted(made: torch.optim.Optimizer) -> UpdateBytes:
    """Return what an optimizer of tensors without bytes keeps and allocates: it makes its state when it is made, or in
    a first step.
    """
    step: Any = type(made).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of all optimizers
    updated = [p for group in made.param_groups for p in group["params"]]
    known = [storage_of(x)[0] for p in updated for x in (p, p.grad)]
    leaves = (x for state in made.state.values() for x in tree_leaves(dict(state)))
    held = dict(
        storage_of(x) for x in leaves if isinstance(x, FakeTensor) or (isinstance(x, torch.Tensor) and x.is_meta)
    )
    with _Allocations([*known, *held]) as counted, torch.no_grad():
        step(made)
        live = counted.peak = counted.live
        step(made)
    return UpdateBytes(name=type(made).__name__, state=live + sum(held.values()), temporaries=counted.peak - live)


def _copied(optimizer: torch.optim.Optimizer, updated: Collection[int]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without state and hooks, on copies of those of its parameters with these ids."""
    own = {key: value for key, value in vars(optimizer).items() if key not in _LEFT_OUT}
    own.update({key: type(value)() for key, value in own.items() if key in _HOOKS})
    held = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [x for x in (*held, *tree_leaves(own)) if isinstance(x, torch.Tensor)]
    memo: dict[int, Any] = {id(x): _with_gradient(x, x.device) for x in tensors}
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(copy.deepcopy(own, memo), state=defaultdict(dict))
    for group, real in zip(made.param_groups, optimizer.param_groups, strict=True):
        if "foreach" in real and real["foreach"] is None and not real.get("fused"):
            group["foreach"] = _foreach_by_default(real)
        group["params"] = [memo[id(p)] for p in real["params"] if id(p) in updated]
    return made  # type: ignore[no-any-return]


def _foreach_by_default(group: Mapping[str, Any]) -> bool:
    """Return what torch chooses where `foreach` and `fused` are None: it looks at the types of the parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)[1])


def _with_gradient(x: torch.Tensor, device: torch.device | str = "meta") -> Any:
    """Return a tensor like another, or like the largest part that a rank has; of a parameter, with a gradient."""
    made = torch.empty_like(largest_part(x).detach(), device=device)
    if not isinstance(x, torch.nn.Parameter):
        return made
    made = torch.nn.Parameter(made)
    made.grad = torch.empty_like(made)
    return made


def made_optimizer(optimizer: str | MakeOptimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a name, or that a function makes. Raises `InvalidModel`."""
    make: Any = optimizer
    if isinstance(optimizer, str):
        classes = _classes()
        make = classes.get(optimizer.lower())
        if make is None:
            hint = f"choose one of: {', '.join(cls.__name__ for cls in classes.values())}, or {NONE}"
            raise InvalidModel(f"torch.optim has no {optimizer!r}", where="optimizer", hint=hint)
    try:
        made = make(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"returned an object of type {type(made).__name__}, which is no torch.optim.Optimizer")
    except Exception as error:
        raise _failed(make, error) from error
    return made


def _classes() -> Mapping[str, Any]:
    """Return the optimizers of torch by their names in lower case."""
    found = (value for value in vars(torch.optim).values() if isinstance(value, type))
    own = (value for value in found if issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer)
    return {value.__name__.lower(): value for value in own}


def _failed(optimizer: Any, error: Exception) -> InvalidModel:
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    hint = "name another optimizer, 'none', or pass a function that makes it: lambda parameters: AdamW(parameters)"
    return InvalidModel(f"{name} cannot update these parameters: {first}", where="optimizer", hint=hint)
