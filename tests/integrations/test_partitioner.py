"""`memplan.partitioner`: plain `torch.compile` keeps a budget, with the same numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import memplan
from benchmarks.peak_measure import Step, live_bytes, peak_growth
from benchmarks.zoo import ZOO
from memplan.errors import BudgetInfeasible, InvalidSize, UnsupportedGraph
from memplan.integrations.partitioner import COMPILATIONS, BudgetPartitioner, Decision, search_partitions
from memplan.trace.passes.partitions import TAG
from tests.models import Counted
from tests.slow import slow

TIMES = 16  # the batch of a nano model, so that activations weigh more than gradients


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Start each test without compiled code: where torch's cache has a graph, no partitioner is called."""
    torch._dynamo.reset()
    off = torch._functorch.config.patch(enable_autograd_cache=False)
    with off, torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


class Recorded(CustomPartitionerFn):
    """Torch's partitioner after the given tags are set."""

    def __init__(self, tags: dict[str, Any]) -> None:
        self.tags = tags

    def uuid(self) -> None:
        """Nothing is cached."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Set the tags and partition."""
        kwargs.pop("compiler", None)
        for node in gm.graph.nodes:
            if node.name in self.tags:
                node.meta[TAG] = self.tags[node.name]
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


class Blocks(nn.Module):
    """Blocks whose activations are large beside their weights, with dropout."""

    def __init__(self, width: int = 32, count: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x.square().mean()


def compiled(model: nn.Module, partitioner: CustomPartitionerFn | None) -> Callable[..., Any]:
    torch._dynamo.reset()
    options: Any = {} if partitioner is None else {"custom_partitioner_fn": partitioner}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def step_of(call: Callable[..., Any], model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    def clear() -> None:
        model.zero_grad()

    def run() -> Any:
        clear()
        loss = call(*inputs)
        loss.backward()
        return loss

    return Step(run=run, clear=clear)


def peak_of(step: Step) -> int:
    """The peak of a step measured from outside: what lives before it, and the growth by memory events."""
    step.run()
    step.clear()
    before = live_bytes()
    return before + peak_growth(step)


def gradients(step: Step, model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(5)
    loss: Any = step.run()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _blocks() -> tuple[nn.Module, tuple[Any, ...]]:
    return Blocks(), (torch.randn(512, 32),)


def repeated(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    model, inputs = ZOO[name]("nano")
    return model, tuple(torch.cat([x] * TIMES) for x in inputs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_blocks, slow(partial(repeated, "vit"))])  # benchmarks/fused.py: the other models
def test_peak_within_budget(make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> None:
    model, inputs = make()
    partitioner = memplan.partitioner(budget=0.85)
    step = step_of(compiled(model, partitioner), model, inputs)
    measured = peak_of(step)
    first, chosen = partitioner.tried[0], partitioner.chosen
    assert chosen is not None
    model.zero_grad()
    unused = live_bytes() - chosen.bytes.standing  # buffers that the graph does not use, and other live tensors
    assert chosen.bytes.peak <= 0.85 * first.bytes.peak
    assert measured - unused <= chosen.bytes.peak
    assert measured - unused >= 0.99 * chosen.bytes.peak  # what is counted is what happens


@pytest.mark.slow
def test_bits_are_those_of_inductor_with_the_same_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Blocks(), torch.randn(256, 32)
    tags: dict[str, Any] = {}
    partition = BudgetPartitioner.__call__

    def spying(self: BudgetPartitioner, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = partition(self, gm, joint_inputs, **kwargs)
        for module in (forward, backward):
            tags.update({n.name: n.meta[TAG] for n in module.graph.nodes if TAG in n.meta})
        return forward, backward

    monkeypatch.setattr(BudgetPartitioner, "__call__", spying)
    partitioner = memplan.partitioner(budget="80%")
    ours = gradients(step_of(compiled(model, partitioner), model, (x,)), model)
    assert len(partitioner.tried) > 1
    theirs = gradients(step_of(compiled(model, Recorded(tags)), model, (x,)), model)
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def test_torchs_own_partition_reads_no_buffer_that_has_changed() -> None:
    model, eager = Counted(64), Counted(64)
    partitioner = memplan.partitioner(budget="1GiB")
    for call, own in ((compiled(model, partitioner), model), (eager, eager)):
        call().backward()
        own.zero_grad()
        call().backward()
    assert partitioner.tried == (partitioner.chosen,)
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)


def test_impossible_budget_names_the_smallest_found() -> None:
    model, x = Blocks(count=1), torch.randn(64, 32)
    partitioner = memplan.partitioner(budget="1KiB")
    with pytest.raises(BudgetInfeasible, match="keeps 1") as caught:
        compiled(model, partitioner)(x)
    assert caught.value.smallest == min(one.bytes.peak for one in partitioner.tried)
    assert caught.value.where == "budget"
    assert len(partitioner.tried) <= 4


@given(limit=st.integers(0, 10**12), aim=st.integers(-(10**12), 10**12), high=st.integers(0, 10**12), answers=st.data())
def test_a_search_ends_whatever_the_policy_answers(limit: int, aim: int, high: int, answers: st.DataObject) -> None:
    kept, lowered, asked = st.none() | st.sampled_from("abcdef"), list[str](), list[int]()

    def decide(budget: int) -> Decision | None:
        asked.append(budget)
        assert len(asked) <= 40 + COMPILATIONS  # 10**12 bytes are halved 40 times
        name = answers.draw(kept)
        return None if name is None else ((name,), 0.0)

    def lower(chosen: Decision) -> int:
        lowered.append(*chosen[0])
        return answers.draw(st.integers(0, 10**12))

    search_partitions(limit, aim, high, decide, lower)
    assert len(set(asked)) == len(asked)
    assert len(set(lowered)) == len(lowered) < COMPILATIONS


def test_sizes_that_vary_are_refused() -> None:
    model = Blocks(count=1)
    call = torch.compile(
        model, dynamic=True, fullgraph=True, options={"custom_partitioner_fn": memplan.partitioner(budget=0.9)}
    )
    with pytest.raises(UnsupportedGraph, match="dynamic=False") as caught:
        call(torch.randn(48, 32))
    assert caught.value.see == "partitioner"


def test_identity_and_copies() -> None:
    one, two = memplan.partitioner(budget="1GiB"), memplan.partitioner(budget="2GiB")
    assert one.uuid() != two.uuid()
    assert one.uuid() == memplan.partitioner(budget=1 << 30).uuid() == pickle.loads(pickle.dumps(one)).uuid()
    assert copy.deepcopy(one) is one
    with pytest.raises(InvalidSize, match="smallest"):
        memplan.partitioner(budget="min")
