"""Guards of inputs: a call must have the example's layout, or is copied to it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import Arrangement, InputGuards, kind_of_call, require_like, same_constant
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
    for other, message in ((4.0, r"input 'scale': is 4.0, the plan was made for 3.0"), (3, "input 'scale': is 3, ")):
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
    with pytest.raises(InputMismatch, match=r"input 'x': has strides \(1, 3\), the plan was made for \(4, 1\), and"):
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
    with pytest.raises(InputMismatch, match="input 'x': is a Own, which defines its own operations"):
        guards.flatten((_A.as_subclass(Own), _B), {})
    guards.flatten((_A.as_subclass(Plain), _B), {})
    guards.flatten((_A, _B.as_subclass(Disabled)), {})


def test_inputs_are_apart_from_what_the_step_changes() -> None:
    guards = _guards(_Model(), _A, _B)
    changed = {_B.untyped_storage().data_ptr(): "the buffer 'mean'"}
    guards.check_apart([_A, _B.clone()], changed)
    with pytest.raises(InputMismatch, match=r"input 'y': shares its memory with the buffer 'mean', which the step"):
        guards.check_apart([_A, _B], changed)


def _forward(x: int, y: float = 2.0, *, scale: float = 1.0) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((), {"scale": 3.0, "x": 1}, ((1,), {"scale": 3.0})),
        ((1, 2.0), {"scale": 3.0}, ((1,), {"scale": 3.0})),  # a default is left out
        ((1, 5.0), {"scale": 3.0}, ((1,), {"scale": 3.0, "y": 5.0})),
        ((1,), {}, ((1,), {})),  # the default is not what the example has
        ((1,), {"scale": 3.0, "x": 1}, ((1,), {"scale": 3.0, "x": 1})),
    ],
)
def test_arguments_are_given_as_those_of_the_example(args: Any, kwargs: dict[str, Any], found: Any) -> None:
    assert Arrangement(_forward, (1,), {"scale": 3.0}).arranged(args, kwargs) == found
    assert Arrangement(_forward, (1, 2.0), {"scale": 1.0}).arranged((1,), {}) == ((1, 2.0), {"scale": 1.0})


def test_keywords_come_in_any_order_and_defaults_may_be_said() -> None:
    guards = _guards(_Model(), _A, _B, scale=3.0, power=2)
    assert guards.flatten((_A, _B), {"power": 2, "scale": 3.0})[2:] == [3.0, 2]
    guards = _guards(_Model(), _A, _B, scale=3.0)
    assert guards.flatten((_A, _B), {"power": 1, "scale": 3.0})[2:] == [3.0]


def test_a_call_that_is_not_like_the_example_is_refused() -> None:
    example = kind_of_call((_A,), {})
    require_like(example, kind_of_call((_A.clone(),), {}))
    for other, message in (((_B,), r"made for .*\(3, 4\).* called with .*\(4, 2\)"), ((_A, _B), "was made for others")):
        with pytest.raises(InputMismatch, match=message):
            require_like(example, kind_of_call(other, {}))
