"""A compiled module is called like the model: structures, aliases, input gradients, mutations, modes, mismatches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from memplan.core.choices import Gradients
from memplan.core.plan import SCHEMA_VERSION
from memplan.errors import InputMismatch, InvalidPlan, MemplanError, PlanMismatch
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from memplan.trace import plan as memplan_plan


def _linear(n: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(n, n)


class Structured(nn.Module):
    """Nested inputs, constants, keyword arguments; outputs that are views of outputs, of inputs, of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_one = _linear()
        self.tied_two = nn.Linear(4, 4)
        self.tied_two.weight = self.tied_one.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("count", torch.zeros(4))
        self.count: torch.Tensor

    def forward(self, pair: dict[str, torch.Tensor], flag: bool, *, scale: float = 1.0) -> dict[str, Any]:
        h = self.tied_two(self.tied_one(pair["x"])) + self.frozen(pair["x"]) * scale
        self.count.add_(h.sum(0).detach())
        pair["y"].add_(1)
        return {
            "h": h,
            "flat": h.view(-1),
            "row": h[1],
            "input": pair["x"],
            "flat_input": pair["x"].view(-1),
            "weight": self.tied_one.weight,
            "three": 3,
            "none": None,
            "positive": (h > 0).sum(),
            "constant": torch.tensor([1.0, 2.0]),
        }


def _inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(3, 4), "y": torch.zeros(2)}


def test_structures_aliases_and_mutations_are_those_of_eager() -> None:
    model = Structured()
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, (_inputs(), True), {"scale": 2.0}, sanitize="poison")
    assert model.count.tolist() == [0, 0, 0, 0], "compiling must not change buffers"
    ours, theirs = _inputs(), _inputs()
    for _ in range(2):
        one, two = compiled(ours, True, scale=2.0), eager(theirs, True, scale=2.0)
        assert list(one) == list(two)
        for key in one:
            if isinstance(two[key], torch.Tensor):
                assert torch.equal(one[key], two[key]), key
                assert one[key].requires_grad == two[key].requires_grad, key
            else:
                assert one[key] == two[key]
        assert one["input"] is ours["x"]
        assert one["weight"] is model.tied_one.weight
        assert one["flat"].data_ptr() == one["h"].data_ptr()
        for out in (one, two):
            (out["h"].square().sum() + (out["flat"] * 3).sum() + out["row"].sum() + out["weight"].sum()).backward()
        assert torch.equal(ours["y"], theirs["y"])
        assert torch.equal(model.count, eager.count)
    for (key, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None and q.grad is not None:
            assert torch.allclose(p.grad, q.grad, rtol=1e-6), key


def test_it_is_the_models_parameters_state_and_names() -> None:
    model = Structured()
    compiled = memplan_compile(model, (_inputs(), True))
    assert isinstance(compiled, nn.Module)
    assert dict(compiled.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(p is q for p, q in zip(compiled.parameters(), model.parameters(), strict=True))
    assert compiled.state_dict().keys() == model.state_dict().keys()
    state = {key: torch.full_like(t, 0.5) for key, t in model.state_dict().items()}
    compiled.load_state_dict(state)
    assert torch.equal(compiled(_inputs(), True)["h"], model(_inputs(), True)["h"])


def test_gradients_of_inputs() -> None:
    model = _linear()
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    compiled = memplan_compile(model, (x,))
    compiled(x).square().sum().backward()
    copy.deepcopy(model)(y := x.detach().clone().requires_grad_()).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad, rtol=1e-6)


def test_an_input_that_wants_an_unplanned_gradient_raises() -> None:
    compiled = memplan_compile(_linear(), (torch.randn(2, 4),), on_mismatch="error")
    with pytest.raises(InputMismatch, match="requires a gradient"):
        compiled(torch.randn(2, 4, requires_grad=True))


def test_only_some_outputs_reach_the_loss() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.a, x * self.b

    model, x = Two(), torch.arange(3.0)
    compiled = memplan_compile(model, x)
    compiled(x)[1].sum().backward()
    assert model.b.grad is not None
    assert torch.equal(model.b.grad, x)
    assert model.a.grad is None or not model.a.grad.any()


def test_strides_and_offsets_of_inputs_may_differ() -> None:
    model = _linear()
    compiled = memplan_compile(model, torch.randn(3, 4))
    base = torch.randn(8, 3)
    for x in (base[4:].t(), base.t()[:, 2:6], torch.randn(9, 4)[6:]):
        out = compiled(x)
        assert torch.equal(out, copy.deepcopy(model)(x.contiguous()))
        out.sum().backward()


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((torch.randn(3, 5),), {}, "input 0"),
        ((torch.randn(2, 4),), {}, r"\(2, 4\)"),
        ((torch.randn(3, 4).double(),), {}, "float64"),
        ((torch.randn(3, 4).to("meta"),), {}, "meta"),
        ((torch.randn(3, 4), 1), {}, "positional"),
        ((), {}, "positional"),
        ((), {"inputs": torch.randn(3, 4)}, "keywords inputs"),
        (([1.0],), {}, "leaves|tensor"),
        ((None,), {}, "leaves|tensor"),
    ],
)
def test_a_call_that_differs_names_the_first_difference(args: Any, kwargs: Any, what: str) -> None:
    compiled = memplan_compile(_linear(), torch.randn(3, 4), on_mismatch="error")
    with pytest.raises(InputMismatch, match=what) as caught:
        compiled(*args, **kwargs)
    assert caught.value.hint


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * scale + y
        return result


class InOrder(nn.Module):
    """What it computes depends on the order of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, given: dict[str, torch.Tensor] | None = None, **more: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(torch.cat([*(given or more).values()], 1))
        return result


def test_another_order_is_another_call_where_the_model_sees_it() -> None:
    model = InOrder()
    x, y = torch.randn(3, 4), torch.zeros(3, 4)
    by_dict, by_name = (
        memplan_compile(model, ({"x": x, "y": y},), on_mismatch="error"),
        memplan_compile(model, (), {"x": x, "y": y}, on_mismatch="error"),
    )
    assert torch.equal(by_dict({"x": x, "y": y}), model(x=x, y=y))
    assert torch.equal(by_name(x=x, y=y), model(x=x, y=y))
    with pytest.raises(InputMismatch, match="order of keys"):
        by_dict({"y": y, "x": x})
    with pytest.raises(InputMismatch, match="order of keys"):
        by_name(y=y, x=x)


@pytest.mark.parametrize("more", [{}, {"scale": 0.5}])
@pytest.mark.parametrize("dynamic", [False, True])
def test_keywords_come_in_any_order(more: dict[str, float], *, dynamic: bool) -> None:
    model = Keywords()
    x, y = torch.randn(3, 4), torch.zeros(3, 4)
    batch = Dim("batch", min=2, max=8)
    shapes = {"x": {0: batch}, "y": {0: batch}} if dynamic else None
    compiled = memplan_compile(model, (), {"x": x, "y": y, **more}, dynamic_shapes=shapes, on_mismatch="error")
    expected = model(x, y, **more)
    assert torch.equal(compiled(x=x, y=y, **more), expected)
    assert torch.equal(compiled(**more, y=y, x=x), expected)
    for kwargs in ({"x": x}, {"x": x, "z": y, **more}, {"x": x, "y": y, "z": y, **more}):
        with pytest.raises(InputMismatch, match="arguments: the call has 0 positional arguments and keywords x"):
            compiled(**kwargs)


def test_a_changed_constant_is_a_mismatch() -> None:
    compiled = memplan_compile(Structured(), (_inputs(), True), on_mismatch="error")
    with pytest.raises(InputMismatch, match="False"):
        compiled(_inputs(), False)


def test_on_mismatch_eager_and_replan() -> None:
    for choice in ("eager", "replan"):
        model = _linear()
        compiled = memplan_compile(model, torch.randn(3, 4), on_mismatch=choice)
        for n in (5, 3, 5):
            x = torch.randn(n, 4)
            out = compiled(x)
            assert torch.equal(out, copy.deepcopy(model)(x))
            model.zero_grad()
            out.sum().backward()
            assert model.bias.grad is not None
            assert model.bias.grad.tolist() == [n] * 4


def test_unknown_options_are_refused() -> None:
    with pytest.raises(MemplanError, match="sanitize"):
        memplan_compile(_linear(), torch.randn(3, 4), sanitize="poisn")  # type: ignore[arg-type]


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.drop(self.linear(x)))
        return out


def test_no_grad_and_eval_use_an_inference_plan() -> None:
    model, x = Moody(), torch.randn(6, 4)
    compiled, eager = memplan_compile(model, x, sanitize="poison"), copy.deepcopy(model)
    for _ in range(2):
        for net in (compiled, eager):
            net.train()
            torch.manual_seed(3)
            net(x).sum().backward()
        compiled.eval()
        eager.eval()
        assert not model.training, "the mode is shared with the original"
        assert not model.drop.training
        with torch.no_grad():
            assert torch.allclose(compiled(x), eager(x), rtol=1e-6)
        compiled.train()
        eager.train()
        with torch.no_grad():
            torch.manual_seed(4)
            one = compiled(x)
            torch.manual_seed(4)
            assert torch.equal(one, eager(x))
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b)


def test_inference_while_a_step_is_in_flight_runs_elsewhere() -> None:
    model, x = _linear(), torch.randn(3, 4)
    compiled = memplan_compile(model, torch.randn(3, 4), sanitize="poison")
    out = compiled(x).tanh()
    with torch.no_grad():
        assert torch.equal(compiled(x + 1), model(x + 1))
    wanted = torch.autograd.grad(model(x).tanh().sum(), list(model.parameters()))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), list(model.parameters())), wanted))


def test_half_switched_modes_raise() -> None:
    model, x = Moody(), torch.randn(6, 4)
    compiled = memplan_compile(model, x, on_mismatch="error")
    model.drop.eval()
    with pytest.raises(InputMismatch, match="training=False") as caught:
        compiled(x)
    assert caught.value.where == "drop"


def test_compiling_draws_no_random_numbers() -> None:
    model, x = Moody(), torch.randn(6, 4)
    torch.manual_seed(7)
    memplan_compile(model, x)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


def test_inference_only(tmp_path: Path) -> None:
    model, x = Moody().eval(), torch.randn(6, 4)
    compiled = memplan_compile(model, x, sanitize="redzone")
    with torch.no_grad():
        out = compiled(x)
    assert torch.allclose(out, model(x), rtol=1e-6)


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    model, x = Structured(), _inputs()
    path = tmp_path / "plan.json"
    memplan_plan(model, (x, True)).save(path)
    compiled = memplan_compile(model, (x, True), plan=path)
    assert torch.equal(compiled(_inputs(), True)["h"], copy.deepcopy(model)(_inputs(), True)["h"])
    compiled.plan.save(path)  # with what the trial run measured
    assert memplan_compile(model, (x, True), plan=path).plan.arena_size == compiled.plan.arena_size


def test_a_plan_for_another_graph_names_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    memplan_plan(_linear(4), torch.randn(3, 4)).save(path)
    with pytest.raises(PlanMismatch, match="primals_1"):
        memplan_compile(_linear(5), torch.randn(3, 5), plan=path)
    path.write_text(path.read_text().replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99'))
    with pytest.raises(InvalidPlan, match="99"):
        memplan_compile(_linear(4), torch.randn(3, 4), plan=path)


def test_fake_and_meta_models_cannot_be_compiled() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(InputMismatch, match="no data"):
        memplan_compile(model, x)
    with pytest.raises(InputMismatch, match="no data"):
        compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda y: y.sum(), x)


class Counting(nn.Module):
    """How many elements are not zero, by a norm: its derivative is that there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted: torch.Tensor = torch.linalg.vector_norm(x * self.weight, 0, dim=1)
        return counted


@pytest.mark.parametrize("gradients", ["outside", "arena"])
def test_a_result_without_gradients_requires_one_as_in_eager(gradients: Gradients) -> None:
    model, x = Counting(), torch.eye(3)
    compiled = memplan_compile(model, x, gradients=gradients)
    for step in (model, compiled):
        result = step(x)
        assert result.requires_grad
        (result + step.weight).sum().backward()  # as a term of a loss
        assert model.weight.grad is not None
        assert model.weight.grad.item() == 3
        assert result.tolist() == [1, 1, 1]
        model.weight.grad = None
    result = compiled(x)
    result.sum().backward()
    assert model.weight.grad is None
