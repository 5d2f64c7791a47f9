"""A compiled module is called like the model: structures, aliases, mutations, modes, mismatches; what it keeps."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from memplan.core.plan import SCHEMA_VERSION
from memplan.errors import InputMismatch, InvalidPlan, InvalidShapes, MemplanError, PlanMismatch, UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from memplan.trace import plan as memplan_plan
from tests.runtime.reference import same_gradients
from tests.slow import slow


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
        ((torch.randn(2, 4),), r"input 'input'.*\(2, 4\)"),
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


def test_compiling_draws_no_random_numbers() -> None:
    model, x = _moody(), torch.randn(6, 4)
    torch.manual_seed(7)
    memplan_compile(model, x)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


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
    assert same_gradients(model, eager)
    assert (model[0].weight.grad is None) == ("train" in options)


def test_what_needs_an_example_says_so() -> None:
    model, x = _linear(), torch.randn(2, 4)
    with pytest.raises(InputMismatch, match="needs example inputs"):
        memplan_compile(model, plan=memplan_plan(model, x))
    with pytest.raises(UnsupportedGraph, match="missing a required argument"):
        memplan_compile(model, (), fullgraph=True)


def _with_dropout() -> nn.Module:
    """Two layers, with a dropout between them that eval mode leaves out."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).eval()


def _gradients(model: nn.Module, call: Callable[..., torch.Tensor], *batches: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a loss with a term for each batch, all of whose results are alive together."""
    model.zero_grad()
    sum(call(x).square().sum() for x in batches).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options", [{}, slow({"dynamic_shapes": ({0: Dim("n", min=2, max=64)},)})], ids=["one", "varying"]
)
def test_a_term_of_a_loss_keeps_its_gradient(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _with_dropout()
    eager = copy.deepcopy(model)
    x = torch.randn(5, 6)
    compiled = memplan.compile(model, x, sanitize="poison", **options)
    for batches in ([x], [torch.randn(5, 6)], [torch.randn(5, 6) for _ in range(3)]):
        ours, theirs = _gradients(model, compiled, *batches), _gradients(eager, eager, *batches)
        assert len(ours) == len(theirs) == 4
        assert all(map(torch.equal, ours, theirs))


def test_a_loop_that_keeps_its_results_runs(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = _with_dropout()
    compiled, batches = memplan.compile(model, torch.randn(5, 6)), [torch.randn(5, 6) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "memplan"):
        kept = [compiled(x) for x in batches]
        with torch.no_grad():
            assert torch.equal(compiled(batches[0]), model(batches[0])), "while these wait for their backward"
    assert all(torch.equal(y, model(x)) and y.grad_fn is not None for x, y in zip(batches, kept, strict=True))
    said = [r.getMessage() for r in caplog.records if r.name == "memplan"]
    assert [text.count("runs eagerly") for text in said] == [1], "said once"
    sum(y.sum() for y in kept).backward()
    with torch.no_grad():
        assert compiled._calls.programs.select((batches[0],), {})[0] is compiled._calls.programs.main


def test_nothing_is_recorded_that_eager_does_not_record() -> None:
    x = torch.randn(5, 6)
    frozen = memplan.compile(_with_dropout().requires_grad_(False), x)
    assert not frozen(x).requires_grad
    assert len(frozen._calls.programs) == 1, "no program beside the planned one"
    assert frozen(x.clone().requires_grad_()).requires_grad
    asked = memplan.compile(_with_dropout(), x, train=False)
    assert not asked(x).requires_grad, "train=False asks for that"


def test_where_the_backward_cannot_be_planned_the_call_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _with_dropout(), torch.randn(512, 6)
    budget = memplan.compile(model, x, train=False).plan.arena_size + 64
    compiled = memplan.compile(model, x, arena_budget=budget)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    with caplog.at_level(logging.WARNING, "memplan"):
        y = compiled(x)
    assert y.grad_fn is not None
    assert torch.equal(y, model(x))
    assert "cannot be planned with its backward" in caplog.text


Ref = weakref.ref[torch.Tensor]


def _model() -> nn.Module:
    """A table of few words, so that numbers other than the example's may be none of its rows."""
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.ReLU())


def _words(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 5, (rows, 2), generator=torch.Generator().manual_seed(seed))


def _compiled(model: nn.Module, make: Callable[[], torch.Tensor]) -> tuple[memplan.CompiledModule, Ref]:
    x = make()
    made = memplan.compile(model, x)
    return made, weakref.ref(x)


def _alive(refs: Sequence[Ref]) -> list[torch.Tensor]:
    gc.collect()
    return [x for ref in refs if (x := ref()) is not None]


def test_no_program_of_a_module_keeps_the_call_that_it_was_made_for() -> None:
    compiled, example = _compiled(_model(), _words)
    refs = [example]
    x = _words(3)
    refs.append(weakref.ref(x))
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    compiled.eval()(x).sum().backward()
    compiled.zero_grad()
    del x
    assert not _alive(refs)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> tuple[Any, list[Ref]]:
    batch = (_words(rows), torch.zeros(rows, 2, 3))
    made = memplan.compile_step(model, optimizer, nn.functional.mse_loss, batch)
    return made, [weakref.ref(x) for x in batch]


@pytest.mark.parametrize("kind", [torch.optim.SGD, slow(torch.optim.Adadelta)])
def test_no_program_of_a_step_keeps_the_batch_that_it_was_made_for(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = _model()
    reference = copy.deepcopy(model)
    eager = kind(reference.parameters(), lr=0.1)
    step, refs = _step(model, kind(model.parameters(), lr=0.1), 4)
    for rows in (4, 9, 4):  # the first update of Adadelta makes its state; the second size needs a larger arena
        words, target = _words(rows, rows), torch.ones(rows, 2, 3)
        eager.zero_grad()
        loss = nn.functional.mse_loss(reference(words), target)
        torch.autograd.backward(loss)
        eager.step()
        assert torch.equal(loss, step(words, target))
        refs += [weakref.ref(words), weakref.ref(target)]
        del words, target
    assert not _alive(refs)
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


_VARYING = {"input": {0: Dim("batch", min=1, max=16)}}


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"plan": 7}, MemplanError, "plan: is a int"),
        ({"time_limit": "1"}, MemplanError, "time_limit"),
        ({"solver": 5}, MemplanError, "solver"),
        ({"sanitize": torch.ones(3)}, MemplanError, "sanitize="),
        ({"in_place": "no"}, MemplanError, "in_place="),
        ({"device": "cpu:99999"}, MemplanError, "cpu:99999"),
        ({"dynamic_shapes": _VARYING, "bucketing": 5}, InvalidShapes, "bucketing: is a int"),
    ],
    ids=str,
)
def test_by_compile(options: dict[str, Any], kind: type[MemplanError], what: str) -> None:
    with pytest.raises(kind) as error:
        memplan.compile(nn.Linear(3, 3), torch.randn(2, 3), **options)
    assert what in str(error.value)


@pytest.mark.parametrize(
    "options", [*({"accumulate": k} for k in (float("nan"), 1.5, True, "2", None)), {"clip_grad_norm": "1"}], ids=str
)
def test_by_compile_step(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 3)
    batch = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(MemplanError, match=next(iter(options))):
        memplan.compile_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, batch, **options
        )


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "stack"},
        {"costs": "measure", "budget": 0.5},
        {"divide": 4},
        {"compress": "int8"},
        {"gradients": "owned"},
    ],
    ids=str,
)
def test_by_a_backend_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(MemplanError, match=next(iter(options))):
        memplan.Backend(**options)
