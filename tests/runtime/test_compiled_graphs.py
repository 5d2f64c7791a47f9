"""Models and steps that one graph cannot hold: they run as several graphs, with eager's bits and peak."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import memplan
from memplan.errors import BudgetInfeasible, InputMismatch, UnsupportedGraph
from memplan.planning.planfile import check_consistency
from memplan.report.lines import report_markdown
from memplan.runtime import CompiledModule
from memplan.runtime.api.calls_of_several import GraphCalls
from memplan.runtime.api.compile_step import StepThenUpdate
from memplan.runtime.dynamo.backend import Backend
from tests.models import Made
from tests.runtime.test_total_budget import _peak
from tests.slow import slow
from tests.steps import Training, same_tensors

WIDTH, BATCH = 32, 1024
PADDING = 64 * 64  # bytes: what rounding some dozens of buffers up to 64 bytes may add


def _backend(compiled: CompiledModule) -> Backend:
    assert isinstance(compiled._calls, GraphCalls)
    return compiled._calls.graphs.backend


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))


class Checked(nn.Module):
    """A check of labels between two halves, as DeBERTa's and the CTC losses' are: a branch on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _layers(), _layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        if x.amax() > 100:
            raise ValueError("a label is out of range")
        found: torch.Tensor = self.two(hidden) + hidden
        return found


class MaskCache(nn.Module):
    """A mask that is made once and kept as a plain attribute, as in word_language_model of pytorch/examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _layers()
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.ones(len(x), len(x), device=x.device).tril()
        found: torch.Tensor = self.mask @ self.inner(x) / len(x)
        return found


class RunningMean(nn.Module):
    """A buffer that is assigned, and the counter and statistics of batch normalisation."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = _layers(), nn.BatchNorm1d(WIDTH)
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.inner(x))
        self.running = self.running * 0.9 + hidden.detach().mean(0) * 0.1
        return hidden - self.running


def _chosen() -> nn.Module:
    """Rows that `nonzero` chooses."""
    return Made(
        lambda m, x: m.two((h := m.one(x))[torch.nonzero(x[:, 0] > 0).squeeze(1)]).mean() + h.mean(),
        one=_layers(),
        two=_layers(),
    )


class Masked(nn.Module):
    """A parameter written by a mask, as Wav2Vec2's `masked_spec_embed`: its gradient has no fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _layers(), _layers()
        self.embedding = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        hidden[x[:, 0] > 0.5] = self.embedding.to(hidden.dtype)
        found: torch.Tensor = self.two(hidden)
        return found


def _pruned() -> nn.Module:
    model = _layers()
    prune.random_unstructured(model[0], "weight", amount=0.3)  # type: ignore[no-untyped-call]
    return model


class Featured(nn.Module):
    """A model whose hook keeps what a layer returns, in a list that is an attribute of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _layers()
        self.features: list[torch.Tensor] = []
        self.inner[1].register_forward_hook(lambda module, inputs, output: self.features.append(output.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def _scaled() -> nn.Module:
    """Python's and numpy's random numbers."""
    return Made(
        lambda m, x: m.inner(x) * torch.from_numpy(np.random.rand(WIDTH).astype("float32")) * random.random(),
        inner=_layers(),
    )


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "label check": Checked,
    "mask cache": MaskCache,
    "assigned buffer": RunningMean,
    "nonzero": _chosen,
    "mask writes a parameter": Masked,
    "pruning": _pruned,
    "feature hook": Featured,
    "random numbers": _scaled,
}


FAST = ("label check", "feature hook")  # a branch on data, a Python list


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROGRAMS[name]()


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def _train(model: nn.Module, steps: int = 3) -> list[Any]:
    """Train, evaluate, and return all that a user could see: losses, the state, the evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        optimizer.zero_grad()
        loss = model(_batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    seen += [value.clone() for value in model.state_dict().values()]
    model.eval()
    with torch.no_grad():
        seen.append(model(_batch(9)))
    model.train()
    return seen


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in PROGRAMS])
def test_what_one_graph_cannot_hold_trains_with_the_bits_of_eager(name: str) -> None:
    eager, model = _made(name), _made(name)
    with pytest.raises(UnsupportedGraph):
        memplan.compile(model, _batch(), fullgraph=True)
    compiled = memplan.compile(model, _batch(), sanitize="poison")
    assert isinstance(compiled._calls, GraphCalls)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    assert all(map(torch.equal, eager.state_dict().values(), compiled.state_dict().values()))
    assert same_tensors(_train(compiled), _train(eager))
    if isinstance(eager, Featured):
        assert isinstance(model, Featured)
        assert len(eager.features) == len(model.features) == 4
        assert all(map(torch.equal, eager.features, model.features))


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    features = getattr(model, "features", [])
    features.clear()
    model(x).sum().backward()


# other random numbers are another graph, which is traced and tried in the step
@pytest.mark.parametrize("name", ["label check", *map(slow, ("mask cache", "assigned buffer", "nonzero", "pruning"))])
def test_the_peak_is_not_above_eagers_nor_above_the_plans(name: str) -> None:
    x = _batch()
    eager, compiled = _made(name), memplan.compile(_made(name), x)
    peaks = []
    for model in (eager, compiled):
        for _ in range(8):  # from the second call on, all graphs of the compiled one are in one arena
            _step(model, x)
        model.zero_grad()
        peaks.append(_peak(partial(_step, model, x)))
    arena = _backend(compiled).arena_size
    held = sum(t.nbytes for t in (x, *compiled.parameters(), *compiled.buffers()))
    scaled = 2 * x.nbytes  # the square's gradient is scaled in an op of its own: a result of the hidden size more
    assert peaks[1] + arena <= peaks[0] + scaled + PADDING, f"{peaks[1]} and an arena of {arena}, eager {peaks[0]}"
    assert peaks[1] + arena + held <= compiled.plan.total + PADDING


def _losses(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(_batch(step)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def test_a_budget_holds_for_all_graphs_together() -> None:
    free = memplan.compile(_made("label check"), _batch())
    expected = _losses(free)
    assert len(free.plan.sections) == 2
    alone = max(instance.plan.total for graph in _backend(free).graphs for instance in graph.instances)
    limit = (free.plan.total + alone) // 2
    assert alone < limit < free.plan.total, "each graph on its own keeps it, and both together do not"
    compiled = memplan.compile(_made("label check"), _batch(), budget=limit)
    assert all(map(torch.equal, _losses(compiled), expected))
    plan = compiled.plan
    assert plan.eviction is not None
    assert plan.eviction.budget == limit
    assert plan.total <= limit
    assert plan.evictions
    check_consistency(plan)
    x = _batch()
    held = sum(t.nbytes for t in (x, *compiled.parameters(), *compiled.buffers()))
    compiled.zero_grad()
    assert _peak(partial(_step, compiled, x)) + _backend(compiled).arena_size + held <= limit


@pytest.mark.slow
def test_a_budget_that_all_graphs_together_cannot_keep_is_refused() -> None:
    free = memplan.compile(_made("label check"), _batch())
    _losses(free)
    least = memplan.compile(_made("label check"), _batch(), budget="min")
    _losses(least)
    alone = max(instance.plan.total for graph in _backend(least).graphs for instance in graph.instances)
    assert alone < least.plan.total
    compiled = memplan.compile(_made("label check"), _batch(), budget=(alone + least.plan.total) // 2)
    with pytest.raises(BudgetInfeasible, match="2 graphs of the step need") as caught:
        _losses(compiled)
    assert caught.value.smallest <= 1.05 * least.plan.total  # one that is sure to be kept; "min" may find a smaller one


def test_the_plan_has_a_section_for_each_graph_and_each_parameter_once(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = _made("label check")
    compiled = memplan.compile(model, _batch())
    (record,) = [record for record in caplog.records if record.name == "memplan"]
    assert "Checked is planned as several graphs" in record.message
    assert "Data-dependent branching (test_compiled_graphs.py:" in record.message
    assert compiled.plan.sections == ()
    assert compiled.plan.total == 0
    compiled(_batch()).sum().backward()
    plan = compiled.plan
    assert [section.ends[:25] for section in plan.sections] == ["generic_jump TensorVariab", ""]
    assert plan.outside["parameters"] == sum(p.nbytes for p in model.parameters())
    assert plan.outside["inputs"] == _batch().nbytes
    assert {"0.one.0.weight", "1.two.0.weight"} <= {storage.name for storage in plan.graph.storages}
    check_consistency(plan)
    plan.save(tmp_path / "plan.json")
    assert memplan.load(tmp_path / "plan.json") == plan
    assert "graphs, which share the arena" in report_markdown(plan.report())
    arena = {instance.runner.arena.memory for graph in _backend(compiled).graphs for instance in graph.instances}
    assert [memory.numel() for memory in arena] == [plan.arena_size]


def test_pickles_train_on_their_own() -> None:
    compiled = memplan.compile(_made("label check"), _batch(), on_mismatch="error")
    expected = _losses(compiled)
    made = pickle.loads(pickle.dumps(compiled))
    assert isinstance(made._calls, GraphCalls)
    assert all(map(torch.equal, _losses(made), expected))
    assert not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in compiled.parameters()}
    with pytest.raises(InputMismatch, match="was made for"):
        made(_batch()[:3])


def test_options_that_need_one_graph_refuse() -> None:
    x = _batch()
    with pytest.raises(UnsupportedGraph):
        memplan.compile(_made("label check"), x, device="cpu")
    with pytest.raises(UnsupportedGraph):
        memplan.plan(_made("label check"), x)
    with pytest.raises(UnsupportedGraph, match="forward fails in eager"):
        memplan.compile(_made("label check"), x.double())(x.double())


# -- whole steps -----------------------------------------------------------------------------------------


def _loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("name", "accumulate", "clip"),
    [
        ("label check", 2, 0.1),
        *(slow(name, 1, None) for name in ("mask cache", "assigned buffer", "nonzero", "pruning")),
    ],
)
def test_losses_and_updates_are_eagers(
    name: str, accumulate: int, clip: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"accumulate": accumulate, "clip": clip, "sanitize": "poison"}
    training = Training(_made(name), _adam, _loss, _batch(), eager=_made(name), **how)
    assert isinstance(training.step, StepThenUpdate)
    assert "is planned as several graphs, " in caplog.text
    for call in range(4):
        training.both(_batch(call), seed=call)
        assert training.step.pending == (call + 1) % accumulate
        assert all(p.grad is None for p in training.model.parameters())
    check_consistency(training.step.plan)
    assert training.step.plan.arena_size > 0


@pytest.mark.slow
def test_another_batch_is_planned_too_and_gradients_of_others_stay() -> None:
    training = Training(_made("label check"), _adam, _loss, _batch())
    first = next(training.model.parameters())
    first.grad = torch.full_like(first, 7)
    for rows in (1024, 3):
        assert not training.both(_batch()[:rows], seed=rows).requires_grad
        assert torch.equal(first.grad, torch.full_like(first, 7))


def test_what_needs_one_graph_refuses() -> None:
    model = _made("label check")
    with pytest.raises(UnsupportedGraph, match="cannot be traced as one graph"):
        memplan.compile_step(model, _adam(model), _loss, _batch(), budget=0.9)
    with pytest.raises(UnsupportedGraph, match="needs a closure"):
        memplan.compile_step(model, torch.optim.LBFGS(model.parameters()), _loss, _batch())
    with pytest.raises(UnsupportedGraph, match=rf"returns a tensor of shape \(1024, {WIDTH}\), but a training step"):
        memplan.compile_step(model, _adam(model), lambda out: out, _batch())(_batch())
    strict = memplan.compile_step(model, _adam(model), _loss, _batch(), on_mismatch="error")
    with pytest.raises(InputMismatch, match="was made for"):
        strict(_batch()[:3])
