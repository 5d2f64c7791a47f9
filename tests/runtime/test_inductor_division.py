"""`divide=` with Inductor's kernels: the loss head runs block by block, its wide tensors never exist whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import memplan
from memplan.core.division import Division
from memplan.core.graph import Phase
from memplan.errors import BudgetInfeasible, InvalidSize, UnsupportedCall
from memplan.trace import capture_call, variants
from memplan.trace.fused.row_division import divide_rows
from memplan.trace.fused.row_parts import BLOCK
from memplan.trace.passes.rewrite import copy_of
from tests.slow import slow

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WIDE = 512


class Language(nn.Module):
    """A model of language with a wide loss head, dropout and tied weights; `shifted`: it predicts the next token."""

    def __init__(self, *, shifted: bool, bias: bool = False) -> None:
        super().__init__()
        self.shifted = shifted
        self.embed, self.norm = nn.Embedding(WIDE, 16), nn.LayerNorm(16)
        self.up, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)
        self.head = nn.Linear(16, WIDE, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        logits = self.head(self.norm(x + self.drop(self.up(x).tanh())))
        if self.shifted:
            logits, tokens = logits[:, :-1], tokens[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _tokens() -> torch.Tensor:
    return torch.randint(WIDE, (8, 12), generator=torch.Generator().manual_seed(0))


def _made(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def _step(call: Any, model: nn.Module, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = call(_tokens())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _widest(plan: memplan.Plan) -> int:
    return max(s.nbytes for s in plan.graph.storages if s.planned)


def _logits(rows: int = 96) -> int:
    return 4 * WIDE * rows


@pytest.mark.slow
@pytest.mark.parametrize(("options", "blocks"), [({"shifted": True}, 4), ({"shifted": False, "bias": True}, 4)])
def test_blocks_lower_what_is_needed_and_compute_the_same(
    options: dict[str, bool], blocks: int, tmp_path: Path
) -> None:
    model = _made(**options)
    twin = copy.deepcopy(model)
    free = memplan.compile(twin, _tokens(), kernels="inductor")
    division = Division(blocks=blocks, sums=True)
    compiled = memplan.compile(model, _tokens(), kernels="inductor", divide=division, sanitize="poison")
    plan = compiled.plan
    assert plan.division is not None
    assert (_widest(free.plan), plan.division.blocks) == (_logits(), blocks)
    assert _widest(plan) <= max(_logits(24), 4 * WIDE * 16)  # a block of logits, or the gradient of the embedding
    assert plan.arena_size < 0.75 * free.plan.arena_size
    for seed in range(2):
        for one, two in zip(_step(compiled, model, seed), _step(free, twin, seed), strict=True):
            torch.testing.assert_close(one, two)  # sums over rows are added up block by block
    plan.save(tmp_path / "plan.json")
    other = copy.deepcopy(model)
    again = memplan.compile(other, _tokens(), kernels="inductor", plan=tmp_path / "plan.json")
    assert again.plan.fingerprint == plan.fingerprint
    assert all(map(torch.equal, _step(again, other, 3), _step(compiled, model, 3)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread: several add the rows of an embedding's gradient in no fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Dividing(CustomGraphPass):
    """Divides the joint graph of plain `torch.compile`."""

    def __call__(self, graph: fx.Graph) -> None:
        divide_rows(graph, Division(blocks=2, sums=True))
        assert any(BLOCK in node.meta for node in graph.nodes)

    def uuid(self) -> str:
        return "divides the rows of a loss head by two"


@pytest.mark.slow
def test_the_bits_are_those_of_inductor_for_the_divided_graph(one_thread: None) -> None:
    model = _made(shifted=True)
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, _tokens(), kernels="inductor", divide=Division(blocks=2, sums=True))
    torch._dynamo.reset()
    reference = torch.compile(twin, options={"joint_custom_pre_pass": _Dividing()})
    for seed in range(2):
        assert all(map(torch.equal, _step(compiled, model, seed), _step(reference, twin, seed)))
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_budget_takes_as_few_blocks_as_it_needs_and_says_what_they_would_bring() -> None:
    model = _made(shifted=True)
    plan = memplan.plan(model, _tokens(), kernels="inductor", gradients="outside")
    budget = plan.arena_size * 2 // 5
    with pytest.raises(BudgetInfeasible, match=r"divide=memplan.Division\(sums=True\) may need less"):
        memplan.plan(model, _tokens(), kernels="inductor", gradients="outside", arena_budget=budget)
    small = memplan.plan(
        model, _tokens(), kernels="inductor", gradients="outside", arena_budget=budget, divide=Division(sums=True)
    )
    assert small.arena_size <= budget
    assert small.division is not None
    assert small.division.blocks is not None
    enough = memplan.plan(
        model, _tokens(), kernels="inductor", gradients="outside", arena_budget=1.0, divide=Division(sums=True)
    )
    assert enough.division is None  # no division without need


def test_one_block_is_none_and_sums_are_for_inductors_kernels() -> None:
    for sums in (True, False):
        with pytest.raises(InvalidSize, match="not a number of blocks"):
            Division(blocks=1, sums=sums)
    for blocks in (None, 4):
        with pytest.raises(UnsupportedCall, match="sums=True is for Inductor's kernels"):
            memplan.plan(_made(shifted=False), _tokens(), divide=Division(blocks=blocks, sums=True))


def test_a_divided_graph_computes_the_same() -> None:
    model = _made(shifted=True)
    module = capture_call(model, _tokens(), kernels="inductor").captured.graph_module
    whole, divided = copy_of(module.graph), copy_of(module.graph)
    divide_rows(divided, Division(blocks=4, sums=True))
    vals = [node.meta["val"] for node in whole.nodes if node.op == "placeholder"]
    given = [torch.randn(v.shape) if v.is_floating_point() else torch.randint(WIDE, v.shape) for v in vals]
    found = []
    for graph in (whole, divided):
        torch.manual_seed(0)
        made = fx.Interpreter(fx.GraphModule(module, graph)).run(*given, enable_io_processing=False)
        found.append([one for one in made if one is not None])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("shifted", "blocks"), [(True, 4), slow(False, 8)])
def test_the_backward_computes_no_block_of_the_head_again(shifted: bool, blocks: int) -> None:
    """torch's partitioner would leave the gradients of the head to the backward, since no result needs them."""
    plan = memplan.plan(
        _made(shifted=shifted), _tokens(), kernels="inductor", divide=Division(blocks=blocks, sums=True)
    )
    wide = {i for i, s in enumerate(plan.graph.storages) if s.nbytes >= 12 * WIDE and s.planned}
    of_head = [op for op in plan.graph.ops if op.origin.module == "head" and wide & set(plan.graph.touched(op))]
    assert of_head
    products = [op for op in plan.graph.ops if "mm" in op.target and op.origin.module == "head"]
    assert {op.phase for op in products} == {Phase.FORWARD}


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"budget": "240KiB"}, 8),
        slow({"arena_budget": "200KiB"}, 8),
        ({"budget": "1GiB"}, None),  # where nothing has to be evicted
        slow({}, None),
        ({"arena_budget": 0.95, "divide": False}, None),
        ({"arena_budget": 0.95, "kernels": "aten"}, None),  # which keep their bits
    ],
)
def test_a_budget_divides_the_head_of_a_step_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], blocks: int | None
) -> None:
    monkeypatch.setattr(variants, "is_accelerator", lambda device: True)
    model = _made(shifted=True)
    plan = memplan.plan(model, _tokens(), **{"kernels": "inductor", **options})
    assert (plan.division and plan.division.blocks) == blocks
    if blocks is not None:
        assert f"{blocks} blocks of rows" in str(plan.report())
