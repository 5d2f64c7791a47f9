"""Steps on the simulated device, each of which must compute the bits of eager there, whatever order its work runs in.

`python -m tests.device.scenarios LIBRARY NAME` runs one of them in a process of its own and prints a JSON object.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memplan
from benchmarks.zoo import ZOO
from memplan.core.evictions import RELOAD, SEND
from memplan.core.happens_before import follow, require_no_races
from memplan.core.plan import Plan
from memplan.devices.streams import new_event, record
from memplan.errors import BudgetInfeasible
from memplan.planning.options import PlanOptions
from memplan.runtime.copies import Direction, StreamCopies, StreamCopy
from memplan.runtime.execute.runner import Runner
from memplan.runtime.host_lane import HostLane
from memplan.runtime.memory import arena
from memplan.trace import plan_traced, trace, tracing
from memplan.trace.fused import step as generation
from memplan.trace.graph.offload_target import Target, with_host_residents
from memplan.trace.traced import GeneratedCall, GeneratedKernel, TracedGraph
from tests.device.late import NAME, LateDevice, Policy
from tests.models import Made
from tests.runtime.budgets import FAST_LINK, HOST_UPDATES, QUICK, QUICK_RECOMPUTE, plan_of_everything, runner_of
from tests.runtime.late_copies import positions_of_copies

HERE = f"{NAME}:0"  # no torch.device, which has no such name yet
ORDERS = [(Policy.LATE, 0), (Policy.SIDE_FIRST, 0), (Policy.MAIN_FIRST, 0), (Policy.HALF_DONE, 0)]  # and random ones
Bits = list[torch.Tensor]
Step = Callable[[], Bits]


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model of the zoo and its inputs on the simulated device."""
    model, args = ZOO[name]("nano")
    here: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, lambda t: t.to(HERE), args)
    return model.to(HERE), here


def training(
    model: nn.Module, call: Callable[..., Any], args: Sequence[Any], others: Sequence[Any] | None = None
) -> Step:
    """Return a function that runs two training steps, and returns their losses and gradients.

    `others`: the inputs of the second step, where a step that reads what the one before left must show.
    """
    before = {name: t.clone() for name, t in model.state_dict().items()}

    def step() -> Bits:
        model.load_state_dict(before)
        found: Bits = []
        for seed, given in enumerate((args, args if others is None else others)):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = call(*given)
            loss.backward()
            found += [loss.detach().cpu(), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
        return found

    return step


def copied(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a tensor has now, on the host."""
    return t.to("cpu", copy=True)


def same(one: Bits, two: Bits) -> bool:
    """Return whether all bits are equal."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def wrong_orders(
    device: LateDevice, step: Step, expected: Bits, orders: Sequence[tuple[Policy, int]] = ORDERS
) -> list[str]:
    """Return the orders of queued work in which a step has other bits."""
    found = []
    for policy, seed in orders:
        device.run(policy, seed)
        if not same(step(), expected):
            found.append(f"{policy.name} {seed}")
    device.run(Policy.EARLY)
    return found


def _runs(runner: Runner) -> Callable[..., Any]:
    return lambda *given: runner(runner.input_guards.flatten(given, {}), training=True)


def _plans(traced: TracedGraph) -> Iterator[tuple[str, Plan]]:
    yield "plain", plan_traced(traced)
    yield "everything", plan_of_everything(traced)
    for name, policy in (("offload", QUICK), ("recompute", QUICK_RECOMPUTE)):
        try:
            yield name, plan_traced(traced, PlanOptions(arena_budget=0.7, policy=policy, costs=FAST_LINK))
        except BudgetInfeasible as error:
            options = PlanOptions(arena_budget=error.smallest, policy=policy, costs=FAST_LINK)
            yield name, plan_traced(traced, options)


def policies(device: LateDevice, *names: str) -> dict[str, Any]:
    """Plans of several policies: offload, recompute, everything that can be offloaded."""
    found: dict[str, Any] = {"wrong": [], "plans": 0}
    for name in names:
        model, args = example(name)
        expected = training(model, model, args)()
        traced = trace(model, args)
        for kind, plan in _plans(traced):
            step = training(model, _runs(runner_of(model, traced, plan, sanitize=None)), args)
            found["wrong"] += [f"{name} {kind} {order}" for order in wrong_orders(device, step, expected)]
            found["plans"] += 1
    return found


def resident(device: LateDevice) -> dict[str, Any]:
    """A model that stays on the host while its step runs on the device, and on both devices."""
    model, args = ZOO["mlp"]("nano")
    expected = training(model, model, args)()
    found: dict[str, Any] = {"wrong": []}
    for where in (f"{NAME}:1", [f"{NAME}:0", f"{NAME}:1"]):
        quick: dict[str, Any] = {"policy": QUICK} if isinstance(where, str) else {}  # several evict nothing
        compiled = memplan.compile(model, args, device=where, costs=FAST_LINK, **quick)
        step = training(model, compiled, args)
        step()
        before = device.copies_waited
        step()
        found[f"copies that block the host, {where}"] = device.copies_waited - before
        found["wrong"] += [f"{where} {order}" for order in wrong_orders(device, step, expected)]
    found["wrong"] += [f"ahead {order}" for order in wrong_orders(device, *_ahead(model, args))]
    settle = StreamCopies.settle
    StreamCopies.settle = lambda self: None  # type: ignore[method-assign]
    compiled = memplan.compile(model, args, device=HERE, policy=QUICK, costs=FAST_LINK)
    StreamCopies.settle = settle  # type: ignore[method-assign]
    found["seen without settling"] = wrong_orders(device, training(model, compiled, args), expected, ORDERS[:2])
    return found


def _ahead(model: nn.Module, args: Sequence[Any]) -> tuple[Step, Bits]:
    """Return a function that runs three forwards of a model on the host before their backwards, and eager's bits."""
    compiled = memplan.compile(model, args, device=HERE, policy="genoa", gradients="outside")

    def steps(call: Callable[..., Any] = compiled) -> Bits:
        torch.manual_seed(0)
        model.zero_grad()
        losses = [call(*args) * scale for scale in (1, 2, 3)]
        for i in (1, 2, 0):
            losses[i].backward()
        return [copied(p.grad) for p in model.parameters() if p.grad is not None]

    return steps, steps(model)


def _steps(
    late: LateDevice,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    batches: Sequence[tuple[Any, ...]],
    **options: Any,
) -> tuple[Step, Plan]:
    """Return a function that trains from the same start each time, by a step compiled while work runs late."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    late.run(Policy.LATE)
    how: Any = {"policy": QUICK, "costs": FAST_LINK, **options}
    step = memplan.compile_step(model, optimizer, loss_of, batches[0], **how)

    def states() -> Bits:
        return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]

    def steps() -> Bits:
        torch.manual_seed(0)
        model.load_state_dict(before)
        for t in states():
            t.zero_()
        found = [copied(step(*batch)) for batch in batches]
        return [*found, *(copied(t.detach()) for t in (*model.parameters(), *states()))]

    return steps, step.plan


def whole_step(device: LateDevice) -> dict[str, Any]:
    """Training steps, within a budget, after which the optimizer runs; then with it inside, of a model on the host."""
    found: dict[str, Any] = {"wrong": []}
    for where, options in ((HERE, {"arena_budget": 0.8}), ("cpu", {"device": HERE, "budget": "min"})):
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(64, 32, generator=generator).to(where),) for _ in range(3)]
        model, reference = (_layers().to(where) for _ in range(2))
        ours, theirs = (
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False, fused=where != HERE)
            for m in (model, reference)
        )
        steps, _ = _steps(device, model, ours, lambda y: y.square().mean(), batches, **options)
        losses = []
        for (batch,) in batches:
            theirs.zero_grad()
            losses.append(reference(batch).square().mean())
            losses[-1].backward()
            theirs.step()
        momenta = [state["momentum_buffer"] for state in theirs.state.values()]
        expected = [copied(t.detach()) for t in (*losses, *reference.parameters(), *momenta)]
        found["wrong"] += [f"{where} {order}" for order in wrong_orders(device, steps, expected)]
    return found


@contextlib.contextmanager
def generated_kernels() -> Iterator[None]:
    """Have steps with `device=` run the kernels that Inductor generates for the CPU, each queued as an op is."""
    launched: dict[int, Callable[[list[torch.Tensor]], None]] = {}
    numbers = itertools.count()
    library: Any = torch.library
    library = library.Library("late_kernels", "DEF")
    library.define("run(int number, Tensor(a!)[] given) -> ()")
    library.impl("run", lambda number, given: launched.pop(number)(given), "CPU")

    def queued(kernel: GeneratedKernel) -> GeneratedKernel:
        def launch(*args: Any, **kwargs: Any) -> None:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            tensors = [leaves[i] for i in places]

            def run(given: list[torch.Tensor]) -> None:
                for i, tensor in zip(places, given, strict=True):
                    leaves[i] = tensor
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                kernel.ready()(*args, **kwargs)

            number = next(numbers)
            launched[number] = run
            torch.ops.late_kernels.run(number, tensors)

        return replace(kernel, function=launch, later=None)

    def resident(traced: TracedGraph, target: Target) -> TracedGraph:
        kernels = tuple(replace(k, kernel=queued(k.kernel)) if type(k) is GeneratedCall else k for k in traced.kernels)
        return with_host_residents(replace(traced, kernels=kernels), replace(target, device=torch.device(HERE)))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing, "target_of", lambda _: Target(names=(HERE,), device=torch.device("cpu")))
        patched.setattr(generation, "with_host_residents", resident)
        yield


def larger(device: LateDevice, name: str, kernels: str = "aten") -> dict[str, Any]:
    """Whole steps of a model on the host that is larger than the budget, with AdamW: bits of that without one.

    Inductor's kernels must have the bits that they have where no device is named, if nothing is divided into blocks.
    """

    def made(**options: Any) -> tuple[Step, Plan]:
        torch.manual_seed(0)
        model, args = ZOO[name]("nano")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        how: Any = {"kernels": kernels, "divide": None if kernels == "aten" else False, **options}
        return _steps(device, model, optimizer, lambda loss: loss, [args] * 3, **how)

    steps, undivided = made(**({} if kernels == "inductor" else {"device": HERE}))
    expected = steps()
    held = undivided.outside["parameters"] + undivided.outside["optimizer state"]
    found: dict[str, Any] = {"wrong": []}
    for budget in ("min", 3 * held // 4) if kernels == "aten" else ("min",):  # Inductor takes long
        steps, plan = made(device=HERE, budget=budget)
        assert plan.eviction is not None
        reloads = sum(op.target == RELOAD for op in plan.graph.ops)
        found[f"{budget}"] = [plan.on_device, held, reloads, plan.eviction.pinned_budget]
        found["wrong"] += [f"{budget} {order}" for order in wrong_orders(device, steps, expected)]
    return found


def updates_on_host(device: LateDevice) -> dict[str, Any]:
    """Whole steps whose updates run on the host, beside the device; then updates that do not wait for gradients."""
    start = HostLane.start

    def unordered(lane: HostLane, *args: Any, **kwargs: Any) -> None:
        lane._devices = []
        start(lane, *args, **kwargs)

    def made(**options: Any) -> tuple[Step, Plan]:
        torch.manual_seed(0)
        model, args = ZOO["mlp"]("nano")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return _steps(device, model, optimizer, lambda loss: loss, [args] * 3, **options)

    expected, found = made(device=HERE)[0](), dict[str, Any](wrong=[])
    for budget in (None, "min"):
        steps, plan = made(device=HERE, budget=budget, costs=HOST_UPDATES)
        found[f"{budget}"] = plan.graph.updated_on_host
        found["wrong"] += [f"{budget} {order}" for order in wrong_orders(device, steps, expected)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostLane, "start", unordered)
        steps, _ = made(device=HERE, budget="min", costs=HOST_UPDATES)
        found["seen without the order"] = wrong_orders(device, steps, expected)
    return found


def _generated_larger(device: LateDevice, name: str) -> dict[str, Any]:
    with generated_kernels():
        return larger(device, name, "inductor")


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())]).to(HERE)


def _on_streams(model: nn.Module, call: Callable[..., Any], x: torch.Tensor, streams: Sequence[torch.Stream]) -> Step:
    """Return a function that runs steps on one stream after another, none of which waits for the one before."""

    def step() -> Bits:
        ready = torch.accelerator.current_stream(HERE)
        found: Bits = []
        for stream in itertools.islice(itertools.cycle(streams), 6):
            stream.wait_stream(ready)
            with stream:
                call(x).square().mean().backward()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
                model.zero_grad()
        torch.accelerator.synchronize()
        return [gradient.cpu() for gradient in found]

    return step


@contextlib.contextmanager
def _without_order() -> Iterator[None]:
    """Let no step wait for the step before on another stream."""
    ordering = arena.StreamOrdering.__call__
    arena.StreamOrdering.__call__ = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        arena.StreamOrdering.__call__ = ordering  # type: ignore[method-assign]


def streams(device: LateDevice) -> dict[str, Any]:
    """Steps of one module on several streams, with gradients in each place; then without the order of streams."""
    model = _layers()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(HERE)
    used = [torch.Stream(HERE) for _ in range(3)]
    expected = _on_streams(model, model, x, used)()
    found: dict[str, Any] = {"wrong": []}
    for gradients in ("outside", "arena"):
        compiled = memplan.compile(model, x, gradients=gradients)
        step = _on_streams(model, compiled, x, used)
        found["wrong"] += [f"{gradients} {order}" for order in wrong_orders(device, step, expected)]
    found["wrong"] += events_of_the_other_device(device)
    with _without_order():
        unordered = memplan.compile(model, x, gradients="outside")
        unordered._calls.arena.stays = True  # else the allocator knows when a step before is over
        found["seen without the order"] = wrong_orders(device, _on_streams(model, unordered, x, used), expected)
    return found


def events_of_the_other_device(device: LateDevice) -> list[str]:
    """Return what is wrong with an event of a device that is not the current one: it must wait for work there."""
    device.run(Policy.LATE)
    there = torch.device(NAME, 1)
    torch.empty(8, device=there).fill_(1)
    event = new_event(there)
    record(event, there)
    before = event.query()
    torch.accelerator.synchronize(there)
    after = event.query()
    device.run(Policy.EARLY)
    return [] if (before, after) == (False, True) else [f"an event is reached {before=}, {after=}"]


def dropped(device: LateDevice) -> dict[str, Any]:
    """Modules that are deleted while another stream than that of their memory still computes in it: nobody else
    may get the arena. Then with one `record_stream` left out at a time.
    """
    record = torch.Tensor.record_stream
    left_out: int | None = None
    noted: list[int] = []  # the bytes of the tensors that were recorded

    def record_or_not(self: torch.Tensor, stream: torch.Stream) -> None:
        noted.append(self.untyped_storage().nbytes())
        if len(noted) - 1 != left_out:
            record(self, stream)

    def outcome(*, stays: bool = True) -> bool:
        model = _layers()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(HERE)
        compiled = memplan.compile(model, x, train=False)
        compiled._calls.arena.stays = stays  # one that is given back is allocated anew, on the stream that uses it
        sizes = (compiled.plan.arena_size, *(x.nbytes for _ in range(20)))
        with torch.no_grad():
            compiled(x)
        expected = copy.deepcopy(model).cpu()(x.cpu() * 2)
        y, stream = x * 2, torch.Stream(HERE)
        torch.accelerator.synchronize()
        noted.clear()
        with stream, torch.no_grad():
            result = compiled(y)
        del compiled
        gc.collect()
        others = [torch.full((nbytes,), 255, dtype=torch.uint8, device=HERE) for nbytes in (*sizes, *sizes, *noted)]
        torch.accelerator.current_stream(HERE).synchronize()
        stream.synchronize()
        return torch.equal(result.cpu(), expected) and all(bool((t.cpu() == 255).all()) for t in others)

    torch.Tensor.record_stream = record_or_not  # type: ignore[method-assign, assignment]
    found: dict[str, Any] = {"wrong": []}
    device.run(Policy.MAIN_FIRST)
    if not (outcome(stays=False) and outcome()):
        found["wrong"].append("overwritten")
    for left_out, nbytes in enumerate(list(noted)):
        device.run(Policy.MAIN_FIRST)
        found[f"seen without number {left_out}, of {nbytes} bytes"] = not outcome()
    device.run(Policy.EARLY)
    return found


def _leaves_on_the_host() -> Made:
    """A model that returns a result on the host beside one on the device."""
    return Made(lambda m, x: ((y := m.layers(x)).square().mean(), y.detach().cpu()), layers=_layers())


def left_on_host(device: LateDevice) -> dict[str, Any]:
    """A forward that copies a result to the host by itself, within a budget that is kept by copies."""
    model = _leaves_on_the_host()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(HERE)

    def step(call: Callable[..., Any]) -> Bits:
        model.zero_grad()
        loss, left = call(x)
        loss.backward()
        return [loss.detach().cpu(), left, *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]

    expected = step(model)
    compiled = memplan.compile(model, x, arena_budget=0.8, policy=QUICK, gradients="outside")
    return {"wrong": wrong_orders(device, lambda: step(compiled), expected), "evictions": len(compiled.plan.evictions)}


def measured(device: LateDevice) -> dict[str, Any]:
    """Budgets that are kept by the costs that the device shows, and by those that are given."""
    found: dict[str, Any] = {"wrong": [], "costs": [], "seconds": []}
    args = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(HERE),)
    for costs in (None, "a100"):
        model = Made(lambda m, x: m.layers(x).square().mean(), layers=_layers())
        expected = training(model, model, args)()
        compiled = memplan.compile(model, args, arena_budget=0.8, policy=QUICK, gradients="outside", costs=costs)
        found["wrong"] += wrong_orders(device, training(model, compiled, args), expected)
        kept = compiled.plan.eviction
        assert kept is not None
        assert compiled.plan.evictions
        found["costs"].append(kept.costs)
        found["seconds"].append(kept.base_seconds)
    return found


def threads(device: LateDevice) -> dict[str, Any]:
    """Modules of their own in several threads, each on a stream of its own."""
    made = []
    for _ in range(3):
        model = _layers()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(HERE)
        made.append((model, memplan.compile(model, x, gradients="outside"), x, torch.Stream(HERE)))
    expected = _on_streams(made[0][0], made[0][0], made[0][2], [made[0][3]])()
    wrong = []
    for policy, seed in ORDERS:
        device.run(policy, seed)
        results: list[Bits] = [[] for _ in made]

        def work(i: int, results: list[Bits] = results) -> None:
            model, compiled, x, stream = made[i]
            results[i] = _on_streams(model, compiled, x, [stream])()

        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(made))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wrong += [f"thread {i} {policy.name} {seed}" for i, r in enumerate(results) if not same(r, expected)]
    device.run(Policy.EARLY)
    return {"wrong": wrong}


def _another(args: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """Return inputs of the same shapes, with other numbers."""
    torch.manual_seed(seed)

    def changed(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape).to(HERE) if t.is_floating_point() else t.roll(seed + 1, -1)

    found: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, changed, tuple(args))
    return found


def mutations(device: LateDevice) -> dict[str, Any]:
    """Each wait of a plan, and each order of a copy's start, left out in turn: what the check says, and the device."""
    model, args = example("mlp")
    others = _another(args, 1)
    expected = training(model, model, args, others)()
    traced = trace(model, args)

    def make() -> tuple[Runner, Step]:
        runner = runner_of(model, traced, plan_of_everything(traced), sanitize=None)
        return runner, training(model, _runs(runner), args, others)

    return _left_out(device, make, expected, ORDERS)


def mutations_of_two(device: LateDevice) -> dict[str, Any]:
    """Mutations, as above, of a model on the host whose step runs on both devices, with copies between them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(2) for m in (nn.Linear(16, 16), nn.Tanh())])
    x, other = torch.randn(4, 16), torch.randn(4, 16)

    def loss_of(*args: Any) -> torch.Tensor:
        found: torch.Tensor = model(*args).square().mean()
        return found

    expected = training(model, loss_of, (x,), (other,))()

    def make() -> tuple[Runner, Step]:
        compiled = memplan.compile(model, x, device=[f"{NAME}:0", f"{NAME}:1"])
        return compiled._calls.programs.main, training(
            model, lambda *args: compiled(*args).square().mean(), (x,), (other,)
        )

    return _left_out(device, make, expected, ORDERS[:6])


class _OneMissing:
    """Streams of copies of which one wait, the order of one start, or the settling of one phase is left out.

    `kind` says which ("wait", "start", "settle"), `what` is the copy, or the phase: 0 for forwards, 1 for backwards.
    """

    def __init__(self) -> None:
        self._wait, self._start, self._settle = StreamCopy.wait, StreamCopy.start, StreamCopies.settle
        self.leave_out("", None)

        def mutated(method: Callable[..., None]) -> Any:
            def call(*args: Any) -> None:
                method(*args)

            return call

        StreamCopy.wait, StreamCopy.start = mutated(self.wait), mutated(self.start)  # type: ignore[method-assign]
        StreamCopies.settle = mutated(self.settle)  # type: ignore[method-assign]

    def leave_out(self, kind: str, what: Any) -> None:
        """Leave this out from now on; a forward comes next."""
        self._missing = kind, what
        self._phases = itertools.cycle(range(2))

    def wait(self, copy: StreamCopy) -> None:
        if self._missing != ("wait", copy):
            self._wait(copy)
        copy._owner.pending.discard(copy)

    def start(self, copy: StreamCopy, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self._missing != ("start", copy):
            self._start(copy, destination, source)
            return
        devices = dict.fromkeys(t.device for t in (source, destination) if t.device.type == NAME)
        streams = copy._owner.streams(copy._direction, tuple(devices))
        copy._devices = tuple(devices)
        with contextlib.ExitStack() as stack:
            for stream in reversed(streams):
                stack.enter_context(stream)
            destination.copy_(source, non_blocking=True)
        copy._done = copy._done or tuple(torch.Event(one) for one in devices)
        for event, stream in zip(copy._done, streams, strict=True):
            event.record(stream)

    def settle(self, copies: StreamCopies) -> None:
        if self._missing != ("settle", next(self._phases)):
            self._settle(copies)


def _left_out(
    device: LateDevice, make: Callable[[], tuple[Runner, Step]], expected: Bits, orders: Sequence[tuple[Policy, int]]
) -> dict[str, Any]:
    """Return the mutations of a step's copies that the check calls racy, and those that the device shows."""
    missing = _OneMissing()
    runner, step = make()
    plan, copies = runner.plan, runner.program.copies
    require_no_races(plan)
    ops = [plan.graph.ops[index] for index in plan.schedule.order]
    kinds: list[tuple[str, str, Any, dict[str, Any]]] = []
    for planned, (starts, waits) in zip(copies, positions_of_copies(plan), strict=True):
        kinds.append((ops[waits].name, "wait", planned, {"without": {waits}}))
        kinds.append((ops[starts].name, "start", planned, {"unordered": {starts}}))
    if runner.program.last is not None:
        kinds += [(f"settle {n}", "settle", n, {"unsettled": {n, n + 2}}) for n in range(2)]
    racy, seen = [], []
    for name, kind, what, left_out in kinds:
        if follow(plan, **left_out).races:
            racy.append(name)
        missing.leave_out(kind, what)
        if wrong_orders(device, step, expected, orders):
            seen.append(name)
        missing.leave_out("", None)
        torch.accelerator.synchronize()
    directions = {copy._direction for copy in copies if isinstance(copy, StreamCopy)}
    assert {Direction.TO_HOST, Direction.TO_DEVICE} <= directions
    sent = sum(op.target == SEND for op in ops)
    return {"between devices": sent, "left out": len(kinds), "racy": racy, "seen": seen}


def host_reads(device: LateDevice) -> dict[str, Any]:
    """The host reads device memory by its address: the process must end."""
    import ctypes

    tensor = torch.ones(8, device=HERE)
    print("reads", flush=True)
    ctypes.string_at(tensor.data_ptr(), 8)
    return {"wrong": ["the host can read device memory"]}


SCENARIOS: dict[str, Callable[[LateDevice], dict[str, Any]]] = {
    "policies mlp": lambda device: policies(device, "mlp"),
    "policies resnet": lambda device: policies(device, "resnet"),
    "policies gpt2 vit": lambda device: policies(device, "gpt2", "vit"),
    "resident": resident,
    "whole step": whole_step,
    "larger mlp": partial(larger, name="mlp"),
    **{f"larger {name}, generated": partial(_generated_larger, name=name) for name in ("mlp", "gpt2", "llama", "vit")},
    "larger gpt2": partial(larger, name="gpt2"),
    "larger llama": partial(larger, name="llama"),
    "updates on the host": updates_on_host,
    "streams": streams,
    "dropped": dropped,
    "left on the host": left_on_host,
    "measured": measured,
    "threads": threads,
    "mutations": mutations,
    "mutations of two devices": mutations_of_two,
    "host reads": host_reads,
}


def main(library: str, name: str, seeds: str) -> None:
    """Run a scenario, with so many random orders, and print what it found as JSON."""
    torch.set_num_threads(1)
    ORDERS.extend((Policy.RANDOM, seed) for seed in range(1, int(seeds) + 1))
    device = LateDevice(Path(library))
    found = SCENARIOS[name](device)
    device.synchronize()
    found["tasks"] = device.tasks_run
    print(json.dumps(copy.deepcopy(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
