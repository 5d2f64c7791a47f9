"""`kernels="inductor"`: the bits of `torch.compile`, in one arena, with the options that `memplan.compile` has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible, MemplanError, PlanMismatch, UnsupportedCall, UnsupportedGraph
from memplan.runtime import CompiledModule
from tests.models import Counted, Made
from tests.slow import slow

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Block(nn.Module):
    """Embedding, attention, norms, dropout and a loss, with weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.one(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(x.shape)))
        x = x + self.drop(self.down(nn.functional.gelu(self.up(self.two(x)))))
        logits = x @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Convolutions(nn.Module):
    """Convolutions with batch norms, whose statistics the forward changes, pooling and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = nn.functional.max_pool2d(self.norms[0](self.one(x)).relu(), 2)
        b = self.norms[1](self.two(a)).relu()
        logits: torch.Tensor = self.last(torch.cat((a, b), 1).mean((2, 3)))
        return logits


class Aliases(nn.Module):
    """Results that are written into a concatenation, views of it with offsets, and a layout with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 10)
        self.convolution = nn.Conv2d(4, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.one(x).sin(), self.two(x).cos()), 1)
        part = both[:, 3:11].exp()
        image = part.reshape(2, 4, 2, 2).to(memory_format=torch.channels_last)
        seen = self.convolution(image).relu()
        found: torch.Tensor = seen.flatten(1) + part[1:3, 2:].mean(1, keepdim=True)
        return found


def _tokens() -> torch.Tensor:
    return torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))


def _images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


OWN_LAYOUTS: dict[str, Any] = {"layout_optimization": False}  # convolutions in those of the model, as memplan runs them
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "block": (Block, _tokens),
    "convolutions": (Convolutions, _images),
    "aliases": (Aliases, lambda: torch.linspace(-1, 1, 16).view(4, 4)),
}


@pytest.fixture(scope="module", params=[name if name == "block" else slow(name) for name in PAIRS])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[CompiledModule, nn.Module, Any, torch.Tensor]]:
    """A model compiled by memplan, and a copy of it compiled by torch."""
    make, inputs = PAIRS[request.param]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, inputs(), kernels="inductor", on_mismatch="error")
    torch._dynamo.reset()
    yield compiled, twin, torch.compile(twin, options=OWN_LAYOUTS), inputs()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def block() -> tuple[Block, memplan.Plan]:
    torch.manual_seed(0)
    model = Block()
    return model, memplan.plan(model, _tokens(), kernels="inductor", gradients="outside")


def _step(model: Any, x: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """What a step leaves: its result, the gradients and the buffers."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(x)
    out.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"": out.detach().clone(), **gradients, **{name: b.clone() for name, b in model.named_buffers()}}


def _require_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    two = {name.removeprefix("_orig_mod."): tensor for name, tensor in two.items()}
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_result_gradients_and_buffers_are_bitwise_those_of_torch_compile(pair: Any) -> None:
    compiled, _, reference, x = pair
    for seed in range(2):
        _require_equal(_step(compiled, x, seed), _step(reference, x, seed))


def test_the_kernels_are_inductors_and_everything_is_in_one_arena(pair: Any) -> None:
    plan = pair[0].plan
    fused = [op for op in plan.graph.ops if op.target.startswith("inductor.cpp_fused_")]
    assert len(fused) > 4
    assert {op.phase.value for op in fused} == {"forward", "backward"}
    assert any(" + " in op.origin.op for op in fused)
    placed = [op.origin for op in fused if op.phase.value == "forward" and op.origin.source]
    assert placed  # kernels that only change a layout come from nowhere
    assert all(origin.source.startswith("test_inductor_kernels.py:") for origin in placed)
    assert plan.arena_size <= plan.max_live * 1.05


def test_a_plan_for_other_kernels_is_refused(block: tuple[Block, memplan.Plan], tmp_path: Path) -> None:
    model, plan = block
    path = tmp_path / "plan.json"
    plan.save(path)
    compiled = memplan.compile(model, _tokens(), plan=path, kernels="inductor", gradients="outside")
    assert compiled.plan.arena_size == plan.arena_size
    with pytest.raises(PlanMismatch):
        memplan.compile(model, _tokens(), plan=path, kernels="aten", gradients="outside")
    i, op = next((i, op) for i, op in enumerate(plan.graph.ops) if op.target.startswith("inductor."))
    other = replace(op, target=f"{op.target.rsplit('.', 1)[0]}.000000000000")  # other source code
    ops = (*plan.graph.ops[:i], other, *plan.graph.ops[i + 1 :])
    changed = replace(plan, graph=replace(plan.graph, ops=ops))
    with pytest.raises(PlanMismatch, match="000000000000"):
        memplan.compile(model, _tokens(), plan=changed, kernels="inductor", gradients="outside")


@pytest.mark.slow
def test_a_budget_is_kept_by_running_kernels_again_with_the_same_bits(block: tuple[Block, memplan.Plan]) -> None:
    model, free = block
    twins = [copy.deepcopy(model) for _ in range(2)]
    small = memplan.compile(twins[0], _tokens(), kernels="inductor", gradients="outside", arena_budget="min")
    assert small.plan.arena_size < free.arena_size
    assert small.plan.eviction is not None
    assert len(small.plan.graph.ops) > len(free.graph.ops)
    plain = memplan.compile(twins[1], _tokens(), kernels="inductor", gradients="outside")
    _require_equal(_step(small, _tokens(), 1), _step(plain, _tokens(), 1))
    with pytest.raises(BudgetInfeasible):
        memplan.compile(model, _tokens(), kernels="inductor", gradients="outside", arena_budget=64)


@pytest.mark.parametrize("name", ["block", slow("convolutions")])
def test_no_kernel_that_draws_or_changes_a_buffer_runs_twice(name: str) -> None:
    make, inputs = PAIRS[name]
    plan = memplan.plan(
        make(), inputs(), kernels="inductor", gradients="outside", arena_budget="min", policy="recompute"
    )
    given = {i for i, s in enumerate(plan.graph.storages) if s.kind.value in ("parameter", "input")}
    once = [op.target for op in plan.graph.ops if op.random or given & set(plan.graph.written(op))]
    assert once
    assert len(set(once)) == len(once)
    assert len({op.target for op in plan.graph.ops}) < len(plan.graph.ops), "another kernel runs twice"


@pytest.mark.parametrize("gradients", [slow("outside"), "arena"])
def test_gradients_that_inductor_returns_as_views_are_added_up_as_eagers(gradients: Any) -> None:
    """The gradient of `token` is a part of that of `positions`; torch.compile adds to the shared bytes twice."""
    token, positions = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.ones(1, 5, 8))
    model = Made(
        lambda m, x: (torch.cat((m.token.expand(len(x), 1, 8), x), 1) + m.positions).square().mean(),
        token=token,
        positions=positions,
    )
    x = torch.linspace(0, 1, 2 * 4 * 8).view(2, 4, 8)
    eager = copy.deepcopy(model)
    compiled = memplan.compile(model, x, kernels="inductor", gradients=gradients)
    for _ in range(3):
        compiled(x).backward()
        eager(x).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_poisoned_buffers_gradients_outside_and_hooks_change_nothing(block: tuple[Block, memplan.Plan]) -> None:
    model, twin = copy.deepcopy(block[0]), copy.deepcopy(block[0])
    checked = memplan.compile(model, _tokens(), kernels="inductor", sanitize="poison", gradients="outside")
    seen: list[str] = []
    checked.hooks.add(lambda event: seen.append(event.op))
    plain = memplan.compile(twin, _tokens(), kernels="inductor")
    _require_equal(_step(checked, _tokens(), 7), _step(plain, _tokens(), 7))
    assert sum(name.startswith("cpp_fused") for name in seen) > 4


@pytest.mark.slow
def test_inference_and_calls_of_other_shapes_have_torch_compiles_bits() -> None:
    torch.manual_seed(0)
    model = Convolutions().eval()
    compiled = memplan.compile(model, _images(), kernels="inductor", train=False)
    torch._dynamo.reset()
    options = OWN_LAYOUTS
    reference = torch.compile(copy.deepcopy(model), dynamic=False, options=options)
    with torch.no_grad():
        for x in (_images(), _images()[:1]):
            assert torch.equal(compiled(x), reference(x))
    torch._dynamo.reset()


_REFUSED: tuple[dict[str, Any], ...] = (
    {"compress": "int8"},
    {"device": ["cpu:0", "cpu:1"]},
    {"dynamic_shapes": {"tokens": None}},
    {"checkpoint": "plan"},
)


def test_options_that_generated_kernels_do_not_have_are_refused() -> None:
    for options in _REFUSED:
        with pytest.raises(UnsupportedCall) as refused:
            memplan.compile(Block(), _tokens(), kernels="inductor", **options)
        assert refused.value.see == "inductor-options"
    with pytest.raises(MemplanError, match="kernels='triton'"):
        memplan.plan(Block(), _tokens(), kernels="triton")  # type: ignore[call-overload]


def test_inductors_own_error_is_one_sentence_and_memplans_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    from memplan.trace.fused.kernel_runs import Replay

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("no lowering\nfor this")

    x = torch.ones(4)
    uncached = config.patch(fx_graph_cache=False)  # or an earlier run's code is read, and nothing is compiled
    with monkeypatch.context() as patched, uncached:
        patched.setattr(compile_fx, "compile_fx_inner", fails)
        with pytest.raises(UnsupportedGraph, match=r"AssertionError: no lowering\n") as no:
            memplan.plan(_added(), x, kernels="inductor")
    assert no.value.see == "inductor-refuses"
    monkeypatch.setattr(Replay, "outputs", fails)  # a fault of memplan's is no refusal of Inductor's
    with pytest.raises(AssertionError, match="no lowering"):
        memplan.plan(_added(), x, kernels="inductor")


def test_a_backward_has_what_was_computed_from_a_buffer_before_it_changed() -> None:
    model, eager = Counted(4096), Counted(4096)
    compiled = memplan.compile(model, (), kernels="inductor")
    for call, own in ((compiled, model), (eager, eager)):
        for _ in range(2):
            own.zero_grad()
            call().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    assert float(model.count) == float(eager.count) == 2


def _added() -> Any:
    """A model whose backward computes nothing: the gradient is the one that comes in."""
    return Made(lambda m, x: x + m.bias, bias=nn.Parameter(torch.linspace(0, 1, 4)))
