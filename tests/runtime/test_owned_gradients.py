"""`gradients="owned"`: the same `.grad` as autograd's, and an error where something would be skipped."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import MemplanError, UnsupportedCall
from memplan.runtime import CompiledModule, compile
from memplan.runtime.guards.hook_counts import hooks_of_node
from tests.models import shared_or_nano
from tests.slow import slow


def _owned(model: nn.Module, *args: Any) -> CompiledModule:
    return compile(model, args, gradients="owned", sanitize="poison")


@pytest.mark.parametrize("name", ["shared", slow("mlp"), slow("gpt2"), slow("resnet"), slow("lstm")])
def test_same_gradients_as_handed_to_autograd(name: str) -> None:
    model, args = shared_or_nano(name)
    other = copy.deepcopy(model)
    owned, safe = _owned(model, *args), compile(other, args)
    for seed in range(3):
        for compiled in (owned, safe):
            torch.manual_seed(seed)
            compiled(*args).backward()
        for (key, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None and q.grad is not None:
                assert torch.equal(p.grad, q.grad), key
                assert p.grad.is_contiguous() == q.grad.is_contiguous(), key
        if seed == 1:  # accumulated once, then from zero
            for m in (model, other):
                m.zero_grad()


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).tanh(), x * 2


def test_inputs_get_theirs_and_autograd_grad_leaves_parameters_alone() -> None:
    net = TwoResults()
    x = torch.randn(3, 4, requires_grad=True)
    compiled, eager = _owned(net, x), copy.deepcopy(net)
    out, double = compiled(x)
    (ours,) = torch.autograd.grad((out + double).sum(), x)
    (theirs,) = torch.autograd.grad(sum(y.sum() for y in eager(x)), x)
    assert torch.equal(ours, theirs)
    assert net.linear.weight.grad is None
    compiled(x)[1].sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))  # type: ignore[arg-type]
    assert net.linear.weight.grad is None, "it does not depend on the parameters"


def test_gradients_survive_the_next_step_and_release_their_graph() -> None:
    net = nn.Linear(4, 4)
    compiled = _owned(net, torch.randn(3, 4))
    compiled(torch.randn(3, 4)).sum().backward()
    kept = net.weight.grad
    assert kept is not None
    before = kept.clone()
    net.zero_grad()
    compiled(torch.randn(3, 4)).sum().backward()
    assert torch.equal(kept, before)


def test_hooks_raise_before_anything_is_computed() -> None:
    net = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    compiled = _owned(net, x)
    node = torch.autograd.graph.get_gradient_edge(net.weight).node
    registers = (net.weight.register_hook, net.weight.register_post_accumulate_grad_hook)
    for register in (*registers, node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        with pytest.raises(UnsupportedCall, match="weight"):
            compiled(x).sum().backward()
        assert net.bias.grad is None
        handle.remove()
    compiled(x).sum().backward()
    assert net.bias.grad is not None
    with pytest.raises(MemplanError, match="gradients"):
        compile(net, x, gradients="stolen")  # type: ignore[arg-type]


def test_nodes_are_asked_for_hooks_only_when_someone_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask one sets a hook: two modules must not make each other ask for ever."""
    nets, x = [nn.Linear(4, 4) for _ in range(2)], torch.randn(3, 4)
    both = [_owned(net, x) for net in nets]
    asked: list[torch.Tensor] = []

    def asking(parameter: torch.Tensor) -> int:
        asked.append(parameter)
        return hooks_of_node(parameter)

    monkeypatch.setattr("memplan.runtime.guards.hook_counts.hooks_of_node", asking)

    def steps() -> int:
        asked.clear()
        for compiled in both * 2:
            compiled(x).sum().backward()
        return len(asked)

    assert [steps(), steps()] == [4, 0]
    nets[0].register_forward_hook(lambda *_: None).remove()
    assert [steps(), steps()] == [4, 0]


def test_a_parameter_that_comes_with_a_hook_raises() -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    compiled = _owned(net, x)
    other = nn.Parameter(net.weight.detach().clone())
    node = torch.autograd.graph.get_gradient_edge(other).node
    handle = node.register_prehook(lambda *_: None)
    compiled(x).sum().backward()  # the hook is of nobody's business yet
    net.weight = other
    with pytest.raises(UnsupportedCall, match="weight"):
        compiled(x).sum().backward()
    handle.remove()


def _in_parallel() -> list[weakref.ref[nn.Module]]:
    """One refused and one usual step under DistributedDataParallel; returns what must be gone by now."""
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    parallel = nn.parallel.DistributedDataParallel(_owned(net, x))
    with pytest.raises(UnsupportedCall, match="DistributedDataParallel"):
        parallel(x)
    safe = nn.parallel.DistributedDataParallel(compile(net, x))
    safe(x).sum().backward()
    assert net.weight.grad is not None
    return [weakref.ref(parallel), weakref.ref(safe)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_distributed_data_parallel_raises() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        # Reducers must not be the last who hold the process group: they are destroyed under the GIL, gloo's threads are
        # joined in there, and one that is just letting go of an allreduce waits for the GIL (torch 2.13: for ever).
        reducers = _in_parallel()
        gc.collect()
        assert not any(ref() for ref in reducers)
    finally:
        torch.distributed.destroy_process_group()
