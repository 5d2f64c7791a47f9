"""Gradients that are still in use when the next step begins: `gradients="auto"` and `"added"` have eager's bits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.core.choices import Gradients
from memplan.devices.measure import peak_bytes
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime import CompiledModule, compile
from memplan.runtime.execute import added_gradients
from memplan.runtime.execute.added_gradients import AddedGradients
from tests.models import shared_or_nano
from tests.slow import slow

WAYS = ("auto", "added", "safe")


def test_gradients_that_another_program_left_in_the_arena_move_out_before_it_is_freed() -> None:
    net = _net()
    eager = copy.deepcopy(net)
    compiled = compile(net, torch.randn(8, 16))
    batches = [torch.randn(n, 16) for n in (8, 4, 8)]
    for model in (eager, compiled):
        for x in batches:  # both programs are made, and run
            model.zero_grad()
            model(x).square().mean().backward()
        for x in batches[1:]:  # the other program finds what the first one left
            model(x).square().mean().backward()
        torch.empty(1 << 20).fill_(float("nan"))  # bytes that were freed are used again
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))


def _bytes(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


class Pair:
    """A compiled model and eager's copy of it, which do the same things."""

    def __init__(self, gradients: Any, **options: Any) -> None:
        self.ours = _net()
        self.eager = copy.deepcopy(self.ours)
        self.x = torch.randn(8, 16)
        self.compiled = compile(self.ours, self.x, gradients=gradients, sanitize="poison", **options)

    def both(self, do: Callable[[nn.Module, Callable[[Tensor], Any], Tensor], object]) -> None:
        """Do something with both, and require the same gradients afterwards."""
        do(self.ours, self.compiled, self.x)
        do(self.eager, self.eager, self.x)
        for p, q in zip(self.ours.parameters(), self.eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)


def _step(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    call(x).square().mean().backward()


def _regularized(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    (call(x).square().mean() + sum(p.norm() for p in net.parameters())).backward()


def _zeroed_late(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    loss = call(x).square().mean()
    net.zero_grad()
    loss.backward()


def _zeros(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    net.zero_grad(set_to_none=False)
    call(x).square().mean().backward()


def _one_missing(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    next(net.parameters()).grad = None
    call(x).square().mean().backward()


def _for_one(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    call(x).square().mean().backward(inputs=[next(net.parameters())])


def _apart(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    found = torch.autograd.grad(call(x).sum(), list(net.parameters()))
    for p, g in zip(net.parameters(), found, strict=True):
        p.grad = g if p.grad is None else p.grad + g


def _hooked(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    handle = next(net.parameters()).register_hook(lambda g: g * 3)  # type: ignore[no-untyped-call]
    call(x).square().mean().backward()
    handle.remove()


def _other_layout(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p.t()).t() if p.dim() == 2 else torch.ones_like(p)
    call(x).square().mean().backward()


DOINGS = (_step, _regularized, _zeroed_late, _zeros, _one_missing, _for_one, _apart, _hooked, _other_layout)


def _each_way() -> list[Any]:
    """Whatever is done, with each way; only the default is always fast, and of the others one, in turns."""
    return [
        (do, way) if k in (0, 1 + i % 2) else slow(do, way) for i, do in enumerate(DOINGS) for k, way in enumerate(WAYS)
    ]


@pytest.mark.parametrize(("do", "gradients"), _each_way())
def test_what_is_done_between_accumulating_steps(do: Any, gradients: str) -> None:
    """Whatever a training loop does, gradients that accumulate have eager's bits."""
    pair = Pair(gradients)
    for what in (_step, _step, do, _step, do, do, _step):
        pair.both(what)
    pair.ours.zero_grad()
    pair.eager.zero_grad()
    for what in (_step, do, _step):
        pair.both(what)


@pytest.mark.parametrize("name", ["mlp", "shared", slow("gpt2"), slow("vit"), "resnet", "lstm"])
def test_three_micro_batches(name: str) -> None:
    """Sums over three calls, twice, are those of a program that returns its gradients."""
    model, inputs = shared_or_nano(name)
    other = copy.deepcopy(model)
    ways: tuple[tuple[nn.Module, Gradients], ...] = ((model, "auto"), (other, "safe"))
    pairs = [(m, compile(m, inputs, gradients=how)) for m, how in ways]
    for update in range(2):
        for m, call in pairs:
            m.zero_grad()
            torch.manual_seed(update)
            for _ in range(3):
                call(*inputs).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or (q.grad is not None and torch.equal(p.grad, q.grad))


def _uses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each accumulating backward adds whether it added gradients itself."""
    used: list[bool] = []
    found = AddedGradients.targets

    def targets(self: AddedGradients, *args: Any) -> Any:
        result = found(self, *args)
        used.append(result is not None)
        return result

    monkeypatch.setattr(AddedGradients, "targets", targets)
    return used


def test_it_adds_where_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain accumulation adds in the step's own backward, and keeps the tensors; everything else goes to autograd."""
    used = _uses(monkeypatch)
    pair = Pair("added")
    for what in (_step, _step, _regularized, _hooked, _step, _for_one, _one_missing, _step):
        pair.both(what)
    assert used == [False, True, False, False, True, False, False, True]
    kept = [p.grad for p in pair.ours.parameters()]
    pair.both(_step)
    assert all(p.grad is g for p, g in zip(pair.ours.parameters(), kept, strict=True))


def test_a_build_of_torch_that_hides_its_references_adds_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be seen that nobody else uses a parameter, autograd adds."""
    assert added_gradients._counts_references()
    monkeypatch.setattr(added_gradients, "_counts_references", lambda: False)
    used = _uses(monkeypatch)
    pair = Pair("added")
    pair.both(_step)
    pair.both(_regularized)
    pair.both(_step)
    assert used == [False, False, False]


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what memplan logged."""
    return [r.message for r in caplog.records if r.name == "memplan"]


def test_auto_changes_once(caplog: pytest.LogCaptureFixture) -> None:
    """A `.grad` that is still set moves the gradients outside, for good, with one line of the log."""
    pair = Pair("auto")
    before = pair.compiled.plan
    assert before.outside["gradients"] == 0
    with caplog.at_level(logging.INFO, logger="memplan"):
        for _ in range(4):
            pair.both(_step)
    assert pair.compiled.plan.outside["gradients"] == _bytes(pair.ours)
    changes = [message for message in _said(caplog) if "are still set at the next call" in message]
    assert len(changes) == 1


def test_auto_stays_in_the_arena_where_gradients_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """`zero_grad()` before the call keeps the plan, also with evaluations in between."""
    pair = Pair("auto")
    plan = pair.compiled.plan
    with caplog.at_level(logging.INFO, logger="memplan"):
        for _ in range(3):
            pair.ours.zero_grad()
            pair.eager.zero_grad()
            pair.both(_step)
            values = [p.grad.clone() for p in pair.ours.parameters() if p.grad is not None]
            with torch.no_grad():
                assert torch.equal(pair.compiled(pair.x), pair.eager(pair.x))
            for p, value in zip(pair.ours.parameters(), values, strict=True):
                assert p.grad is not None
                assert torch.equal(p.grad, value)
    assert pair.compiled.plan is plan
    assert not any("still" in message for message in _said(caplog))


def test_modes_survive_the_change() -> None:
    """A change that an evaluation with gradients causes leaves training calls as they were compiled."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    compiled = compile(net, x)
    compiled(x).sum().backward()
    compiled.eval()
    compiled(x).sum().backward()
    compiled.train()
    torch.manual_seed(1)
    ours = compiled(x)
    torch.manual_seed(1)
    assert torch.equal(ours, net(x))


def test_the_old_arena_is_freed() -> None:
    """Nothing holds the first arena after the change, although the last loss is still alive."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    first = compiled._calls.arena
    loss = compiled(x).sum()
    loss.backward()
    compiled(x).sum().backward()
    assert first.memory.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError):
        loss.backward()


class Holder:
    """Something of the user's that keeps a gradient as an attribute."""


def test_names_of_gradients_are_moved() -> None:
    """Lists, attributes, results of autograd.grad and local variables keep their values, and no arena."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    first = compiled._calls.arena
    found = torch.autograd.grad(compiled(x).sum(), list(net.parameters()))
    holder: Any = Holder()
    holder.gradient, local = found[1], found[2]
    wanted = [g.clone() for g in found]
    compiled(x).sum().backward()
    assert all(map(torch.equal, found, wanted))
    assert local is found[2]
    assert first.memory.untyped_storage().nbytes() == 0
    assert compiled.plan.outside["gradients"] == _bytes(net)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda g: g.view(-1),
    "an array": torch.Tensor.numpy,
    "a storage": torch.Tensor.untyped_storage,
}


@pytest.mark.parametrize("name", HOLDS)
def test_an_address_keeps_the_arena(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where something has the address of a gradient, its bytes stay as they are; the next step has another arena."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    first = compiled._calls.arena
    compiled(x).sum().backward()
    gradient = next(net.parameters()).grad
    assert gradient is not None
    kept, wanted = HOLDS[name](gradient), gradient.clone()
    del gradient
    net.zero_grad()
    with caplog.at_level(logging.WARNING, logger="memplan"):
        for _ in range(3):
            compiled(x).square().sum().backward()
    assert "refers to the gradient of '0.weight'" in caplog.text
    now = torch.tensor(kept, dtype=torch.uint8).view(torch.float32) if name == "a storage" else torch.as_tensor(kept)
    assert torch.equal(now.reshape(-1), wanted.reshape(-1))
    assert first.nbytes
    assert sum("keeps an arena" in message for message in _said(caplog)) == 1


def test_an_address_under_a_budget_raises() -> None:
    """Two arenas would break the budget."""
    net, x = _net(), torch.randn(64, 16)
    compiled = compile(net, x, budget=memplan.plan(net, x).total + 2 * _bytes(net))
    compiled(x).sum().backward()
    gradient = next(net.parameters()).grad
    assert gradient is not None
    kept = gradient.numpy()
    del gradient
    net.zero_grad()
    with pytest.raises(StaleActivationsError, match=r"the gradient of '0.weight' is still referred to"):
        compiled(x)
    del kept
    compiled(x).sum().backward()


def test_gradients_still_set_under_a_budget() -> None:
    """Where no plan has room for gradients that stay, the call raises and changes nothing; "added" keeps it."""
    net, x = _net(), torch.randn(64, 16)
    least = memplan.plan(net, x, budget="min").total
    compiled = compile(net, x, budget=least + 512)
    compiled(x).sum().backward()
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with pytest.raises(BudgetInfeasible, match=r"cannot run in|needs"):
        compiled(x)
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
    net.zero_grad()
    compiled(x).sum().backward()
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


def test_gradients_still_set_with_room_in_the_budget() -> None:
    """Where there is room for both at once, the change keeps the budget."""
    net, x = _net(), torch.randn(64, 16)
    budget = memplan.plan(net, x).total + 2 * _bytes(net)
    compiled = compile(net, x, budget=budget)
    for _ in range(3):
        compiled(x).sum().backward()
    assert compiled.plan.outside["gradients"] == _bytes(net)
    assert compiled.plan.eviction is not None
    assert compiled.plan.eviction.budget == budget
    assert compiled.plan.total <= budget


def _peak(compiled: CompiledModule, x: Tensor) -> int:
    """Return the bytes that an accumulating step allocates beside its arena."""
    return peak_bytes([lambda: compiled(x).square().mean().backward()], x.device)[0]


def test_no_second_set_of_gradients() -> None:
    """A step that adds needs room for one gradient at a time; one that returns them allocates all of them."""
    found = {}
    for how in ("added", "safe"):
        net, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), torch.randn(4, 128)
        compiled = compile(net, x, gradients=how)
        for _ in range(2):
            compiled(x).square().mean().backward()
        found[how] = _peak(compiled, x) + compiled.plan.arena_size
    assert found["safe"] - found["added"] > 4 * 128 * 128 * 4


def test_a_plan_says_what_it_is_for() -> None:
    """The total of "added" counts one set of gradients outside, and only one more gradient in its arena."""
    net, x = _net(), torch.randn(8, 16)
    added, safe = (memplan.plan(net, x, gradients=how) for how in ("added", "safe"))
    assert added.outside["gradients"] == safe.outside["gradients"] == _bytes(net)
    assert added.arena_size <= safe.arena_size + 2 * 16 * 16 * 4


class _Product(nn.Module):
    """A model whose parameter `b` is read by the backward, and whose gradients have the shape of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * x).tanh() * self.b


@pytest.mark.parametrize("gradients", WAYS)
def test_a_gradient_that_comes_in_again(gradients: Any) -> None:
    """A `.grad` that is the gradient of the output, too, is read before it is added to."""
    torch.manual_seed(0)
    ours, x = _Product(), torch.randn(4, 4)
    eager = copy.deepcopy(ours)
    for net, call in ((ours, compile(ours, x, gradients=gradients)), (eager, eager)):
        for _ in range(2):
            call(x).sum().backward()
        call(x).backward(net.b.grad)
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_a_parameter_that_was_frozen_gets_nothing() -> None:
    """A parameter that no longer wants a gradient when the backward runs keeps its `.grad`, as in eager."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x, gradients="added")
    compiled(x).sum().backward()
    loss, weight = compiled(x).sum(), next(net.parameters())
    assert weight.grad is not None
    before = weight.grad.clone()
    weight.requires_grad_(False)
    loss.backward()
    assert torch.equal(weight.grad, before)


def test_hooks_see_every_step_that_adds() -> None:
    """Events of the backward come for an accumulating step, too; module hooks run once per call."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    events: list[int] = []
    calls: list[int] = []
    handle = compiled.register_forward_pre_hook(lambda module, args: calls.append(1))
    for _ in range(3):
        compiled(x).sum().backward()
    handle.remove()
    assert len(calls) == 3
    counts = []
    with compiled.hooks.add(lambda event: events.append(event.step)):
        for _ in range(2):
            compiled(x).sum().backward()
            counts.append(len(events))
    assert counts[1] == 2 * counts[0]
    assert max(events) == len(compiled.plan.schedule.order) - 1


def test_gradients_from_elsewhere_are_in_use_too() -> None:
    """A `.grad` outside the arena, set before the first call, means accumulation as well."""
    pair = Pair("auto")
    for net in (pair.ours, pair.eager):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
    pair.both(_zeros)
    assert pair.compiled.plan.outside["gradients"] == _bytes(pair.ours)


def test_an_evaluation_under_a_budget_keeps_it() -> None:
    """Gradients that an evaluation would move beside the arena raise where the budget has no room for both."""
    net, x = _net(), torch.randn(64, 16)
    compiled = compile(net, x, budget=memplan.plan(net, x, budget="min").total + 512)
    compiled(x).sum().backward()
    with torch.no_grad(), pytest.raises(BudgetInfeasible, match=r"cannot run in|needs"):
        compiled(x)
    net.zero_grad()
    with torch.no_grad():
        assert torch.equal(compiled(x), net(x))


def test_a_change_that_fails_is_made_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the model is compiled anew leaves a module that compiles at its next call."""
    from memplan.runtime.api.builder import Builder

    pair = Pair("auto")
    pair.both(_step)
    with monkeypatch.context() as patched:
        patched.setattr(Builder, "build", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pair.compiled(pair.x)
    pair.both(_step)
    assert pair.compiled.plan.outside["gradients"] == _bytes(pair.ours)


def test_a_freed_arena_refuses_steps() -> None:
    """A program that was chosen before the change, by another thread, does not run in freed memory."""
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    old = compiled._calls.selector.main
    compiled(x).sum().backward()
    compiled(x).sum().backward()
    net.zero_grad()
    with pytest.raises(StaleActivationsError, match="compiled anew"):
        old(old.input_guards.flatten((x,), {}), training=True)
