"""A compiled module is called like the model: structures, aliases, input gradients, mutations, modes, mismatches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memplan.core.plan import SCHEMA_VERSION
from memplan.errors import InputMismatch, InvalidPlan, PlanMismatch, UnsupportedGraph
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


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ((torch.randn(2, 4),), r"input 0.*\(2, 4\)"),
        ((torch.randn(3, 4).double(),), "float64"),
        ((torch.randn(3, 4).to("meta"),), "meta"),
        ((), "positional"),
        ((None,), "leaves|tensor"),
        ((torch.randn(3, 4, requires_grad=True),), "requires a gradient"),
    ],
)
def test_a_call_that_differs_names_the_first_difference(args: Any, what: str) -> None:
    compiled = memplan_compile(_linear(), torch.randn(3, 4), on_mismatch="error")
    with pytest.raises(InputMismatch, match=what) as caught:
        compiled(*args)
    assert caught.value.hint


def _moody() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))


def test_no_grad_and_eval_use_an_inference_plan() -> None:
    model, x = _moody(), torch.randn(6, 4)
    compiled, eager = memplan_compile(model, x, sanitize="poison"), copy.deepcopy(model)
    for without in (torch.no_grad, torch.inference_mode):
        results = []
        for net in (compiled, eager):
            torch.manual_seed(3)
            net.train()(x).sum().backward()
            with without():
                results.append((net(x), net.eval()(x)))
        assert not model[1].training, "the mode is shared with the original"
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, model.buffers(), eager.buffers()))


def test_inference_while_a_step_is_in_flight_runs_elsewhere() -> None:
    model, x = _linear(), torch.randn(3, 4)
    compiled = memplan_compile(model, torch.randn(3, 4), sanitize="poison")
    out = compiled(x).tanh()
    with torch.no_grad():
        assert torch.equal(compiled(x + 1), model(x + 1))
    wanted = torch.autograd.grad(model(x).tanh().sum(), list(model.parameters()))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), list(model.parameters())), wanted))


def test_compiling_draws_no_random_numbers() -> None:
    model, x = _moody(), torch.randn(6, 4)
    torch.manual_seed(7)
    memplan_compile(model, x)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    model, x = Structured(), _inputs()
    path = tmp_path / "plan.json"
    memplan_plan(model, (x, True)).save(path)
    compiled = memplan_compile(model, (x, True), plan=path)
    assert torch.equal(compiled(_inputs(), True)["h"], copy.deepcopy(model)(_inputs(), True)["h"])


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


@pytest.mark.parametrize("options", [{}, {"budget": "1MiB"}, {"train": False}])
def test_without_an_example_a_model_is_planned_at_its_first_call(options: dict[str, Any]) -> None:
    model = nn.Sequential(_linear(16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    eager, x = copy.deepcopy(model), torch.randn(32, 16)
    compiled = memplan_compile(model, **options)
    with pytest.raises(InputMismatch, match="first call"):
        _ = compiled.plan
    with torch.no_grad():
        assert torch.equal(compiled.eval()(x), eager.eval()(x))
    for net in (compiled, eager):
        torch.manual_seed(1)
        net.train()
        if "train" not in options:
            net(x).sum().backward()
    assert compiled.plan.graph.ops
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(p.grad is q.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
    assert (model[0].weight.grad is None) == ("train" in options)


def test_what_needs_an_example_says_so() -> None:
    model, x = _linear(), torch.randn(2, 4)
    with pytest.raises(InputMismatch, match="needs example inputs"):
        memplan_compile(model, plan=memplan_plan(model, x))
    with pytest.raises(UnsupportedGraph, match="missing a required argument"):
        memplan_compile(model, (), fullgraph=True)
