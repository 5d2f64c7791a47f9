"""What a generated kernel may write over: what it reads at the same index, and nothing reads later."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.virtualized import V

import memplan
from memplan.core.graph import Op, Phase
from memplan.trace.fused.wrapper import Overwriting

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROW, COLUMN = sympy.Symbol("d0"), sympy.Symbol("d1")


def _dep(name: str, index: Any = 8 * ROW + COLUMN, mode: str | None = None) -> MemoryDep:
    return MemoryDep(name, index, (ROW, COLUMN), (sympy.Integer(4), sympy.Integer(8)), mode)


class _Loop:
    """A loop with what is asked of Inductor's: its reads and writes, and its only result."""

    def __init__(self, result: str, *reads: Any, write: Any = None, aliases: tuple[str, ...] = ()) -> None:
        writes = {write or _dep(result)}
        self.read_writes = SimpleNamespace(reads={*reads}, writes=writes, reads_and_writes=lambda: {*reads, *writes})
        out = SimpleNamespace(get_name=lambda: result, get_aliases=lambda: aliases, get_mutations=tuple)
        self.is_template, self.get_outputs = (lambda: False), (lambda: [out])


def _found(
    *kernels: list[list[_Loop]], fixed: tuple[str, ...] = (), changed: tuple[str, ...] = (), elements: Any = None
) -> Any:
    """The pairs of kernels, each of which runs loops that were fused into one, one after another."""
    found: dict[str, tuple[str, ...]] = {}
    overwriting = Overwriting(found)
    scheduler = SimpleNamespace(mutation_real_name=dict.fromkeys(changed, "real"))
    with V.set_graph_handler(SimpleNamespace(never_reuse_buffers={*fixed}, scheduler=scheduler)):  # type: ignore[arg-type]
        for kernel in kernels:
            for fused in kernel:
                overwriting.add(fused, elements)
            overwriting.end()
    return found


def test_a_result_may_lie_over_each_read_at_the_same_index() -> None:
    loop = _Loop("r", _dep("a"), _dep("b"), _dep("row", ROW), StarDep("c"))
    found = _found([[loop]])
    assert {name: {*buffers} for name, buffers in found.items()} == {"r": {"a", "b"}}


@pytest.mark.parametrize(
    "kernel",
    [
        [[_Loop("r", _dep("a"))], [_Loop("s", _dep("a", ROW))]],  # a later loop reads it
        [[_Loop("r", _dep("a")), _Loop("s", _dep("a", ROW))]],  # so does a later one of those that were fused
        [[_Loop("s", _dep("a", ROW)), _Loop("r", _dep("a"))]],  # at another index, row by row
        [[_Loop("r", _dep("a", ROW + 4 * COLUMN))]],  # the loop itself reads another index
        [[_Loop("r", _dep("a"), _dep("a", ROW))]],  # and this one both
        [[_Loop("r", _dep("a"), write=_dep("r", mode="atomic_add"))]],
        [[_Loop("r", _dep("a"), write=_dep("other"))]],
        [[_Loop("r", _dep("a"), write=StarDep("r"))]],
        [[_Loop("r", _dep("a"), aliases=("x",))]],
    ],
)
def test_no_result_lies_over_what_is_read_otherwise(kernel: list[list[_Loop]]) -> None:
    assert "a" not in _found(kernel).get("r", ())


def test_a_result_that_is_smaller_than_the_range_of_its_kernel_has_bytes_of_its_own() -> None:
    """Several threads read an element of it, and Inductor knows of no barrier that they would need."""
    loop = _Loop("r", _dep("a"))
    whole = _dep("r").get_numel()
    assert _found([[loop]], elements=whole) == {"r": ("a",)}
    assert not _found([[loop]], elements=4 * whole)


def test_what_inductor_never_reuses_or_changes_elsewhere_stays() -> None:
    loop = [[_Loop("r", _dep("a"))]]
    assert _found(loop, fixed=("a",)) == _found(loop, fixed=("r",)) == _found(loop, changed=("a",)) == {}


class Head(nn.Module):
    """A loss head whose logits need more than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(8, 8), nn.Linear(8, 512)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.project(x).tanh())
        return nn.functional.cross_entropy(logits, classes)


class NextHead(Head):
    """The head of a language model, whose logits of the last place have no class: their gradient is padded."""

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.project(x.view(4, 64, 8)).tanh())[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, 512), classes.view(4, 64)[:, 1:].reshape(-1))


@pytest.mark.parametrize("kind", [Head, NextHead])
def test_the_gradient_of_logits_takes_their_bytes_and_has_inductors_bits(kind: type[Head]) -> None:
    torch.manual_seed(0)
    model, data = kind(), (torch.randn(256, 8), torch.randint(512, (256,)))
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, data, kernels="inductor")
    logits = 256 * 512 * 4
    assert logits < compiled.plan.arena_size < 1.2 * logits
    assert [op.name for op in compiled.plan.graph.ops if _overwrites(op, compiled.plan, logits)]
    torch._dynamo.reset()
    reference = torch.compile(twin)
    for _ in range(2):
        losses = []
        for call, module in ((compiled, model), (reference, twin)):
            module.zero_grad()
            losses.append(call(*data))
            losses[-1].backward()
        assert torch.equal(*losses)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    torch._dynamo.reset()


def _overwrites(op: Op, plan: memplan.Plan, nbytes: int) -> bool:
    """Whether an op of the backward may write over a tensor of the forward of so many bytes."""
    graph = plan.graph
    sizes = (graph.storages[graph.values[read].storage].nbytes for _, read in op.inplace_candidates)
    return op.phase is Phase.BACKWARD and nbytes in sizes
