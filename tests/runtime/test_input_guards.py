"""Guards of inputs: a call must have the example's layout, or is copied to it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import InputGuards, same_constant
from memplan.trace import trace


class _Model(nn.Module):
    """Two tensors and numbers."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 2.0, power: int = 1) -> torch.Tensor:
        return (x * scale) @ y**power


class _Writes(nn.Module):
    """Changes its first argument."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x @ y


def _guards(
    model: nn.Module, *args: Any, changes_model: bool = False, forward: Callable[..., Any] | None = None, **kwargs: Any
) -> InputGuards:
    traced = trace(model, args, kwargs, train=any(True for _ in model.parameters()))
    return InputGuards(traced, forward or model.forward, changes_model=changes_model)


def _x(*shape: int) -> torch.Tensor:
    return torch.arange(2.0 * max(1, *shape) * 8)[: torch.Size(shape).numel()].view(shape).clone()


_A, _B = _x(3, 4), _x(4, 2)


def test_constants_are_compared_by_type_and_value() -> None:
    guards = _guards(_Model(), _A, _B, scale=3.0)
    guards.flatten((_A, _B), {"scale": 3.0})
    for other, message in ((4.0, r"input 2: is 4.0, the plan was made for 3.0"), (3, "input 2: is 3, ")):
        with pytest.raises(InputMismatch, match=message):
            guards.flatten((_A, _B), {"scale": other})
    marker = object()
    for one, two, same in (
        (float("nan"), float("nan"), True), (0.0, -0.0, False), (1 + 0j, 1 + 0j, True),
        ("ab", "".join(["a", "b"]), True), ("a", "b", False), (marker, marker, True), (marker, object(), False),
    ):  # fmt: skip
        assert same_constant(one, two) is same


def test_other_strides_are_copied_to_those_of_the_example_unless_the_model_changes_the_input() -> None:
    guards = _guards(_Model(), _A, _B)
    turned = _x(2, 4).t()
    leaves = guards.flatten((_A, turned), {})
    assert leaves[0] is _A
    assert leaves[1].stride() == (2, 1)
    assert torch.equal(leaves[1], turned)
    guards = _guards(_Writes(), _A.clone(), _B)
    guards.flatten((_A, _x(2, 4).t()), {})
    with pytest.raises(InputMismatch, match=r"input 0: has strides \(1, 3\), the plan was made for \(4, 1\), and the"):
        guards.flatten((_x(4, 3).t(), _B), {})


def test_tensors_share_memory_as_those_of_the_example_where_it_matters() -> None:
    square = _x(4, 4)
    apart = _guards(_Model(), _x(4, 4), square)
    apart.flatten((square, square), {})  # nothing is changed: no harm
    changes = _guards(_Model(), _x(4, 4), square, changes_model=True)
    writes = _guards(_Writes(), _x(4, 4), square)
    for guards in (changes, writes):
        guards.flatten((square.clone(), square), {})
        with pytest.raises(InputMismatch, match="inputs: tensors do not share memory as those of the example do"):
            guards.flatten((square, square), {})
    tied = _guards(_Model(), square, square)
    tied.flatten((square, square), {})
    with pytest.raises(InputMismatch, match="do not share memory as those of the example do"):
        tied.flatten((square, square.clone()), {})
    with pytest.raises(InputMismatch, match="do not share memory as those"):  # found where strides are compared too
        changes.flatten((square, square.t()), {})
    empty = _guards(_Model(), _x(0, 4), _x(4, 0), changes_model=True)
    empty.flatten((_x(0, 4), _x(4, 0)), {})


def test_classes_with_operations_of_their_own_are_refused() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__torch_function__(*args, **kwargs)  # type: ignore[no-untyped-call]

    class Plain(torch.Tensor):
        pass

    class Disabled(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    guards = _guards(_Model(), _A, _B)
    with pytest.raises(InputMismatch, match="input 0: is a Own, which defines its own operations"):
        guards.flatten((_A.as_subclass(Own), _B), {})
    guards.flatten((_A.as_subclass(Plain), _B), {})
    guards.flatten((_A, _B.as_subclass(Disabled)), {})


def test_inputs_are_apart_from_what_the_step_changes() -> None:
    guards = _guards(_Model(), _A, _B)
    changed = {_B.untyped_storage().data_ptr(): "the buffer 'mean'"}
    guards.check_apart([_A, _B.clone()], changed)
    with pytest.raises(InputMismatch, match=r"input 1: shares its memory with the buffer 'mean', which the step chang"):
        guards.check_apart([_A, _B], changed)
