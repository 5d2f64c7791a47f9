"""`memplan.profile`: measures the seconds that each op and each copy of a step takes (Capuchin's measured execution).

The step runs op by op in its arena, several times; the time of an op is the median of its runs, on CUDA between two
events of the device. Ops that would change tensors of the user are not run; they keep the estimate of the roofline
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.devices.generators import forked
from memplan.devices.kinds import is_accelerator, name_of
from memplan.devices.streams import hold_busy, new_event, record
from memplan.errors import InvalidCosts
from memplan.evict.costs import DEVICES, CostModel, signature_of
from memplan.evict.feedback import link_of
from memplan.planning.options import PlanOptions
from memplan.runtime.api.builder import require_real
from memplan.runtime.copies.copies import Direction
from memplan.runtime.execute.program import Program
from memplan.runtime.execute.runner import Runner
from memplan.runtime.execute.trial import TrialMemory, fill_inputs, leaves_users_alone, run_bound, without_autocast
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena, arena_for
from memplan.runtime.profiling.op_timer import PROBES, probe
from memplan.trace import device_costs, plan_traced, trace
from memplan.trace.traced import Source

_SLEEP, _LONGEST = 200_000, 12_800_000  # cycles, about 0.1 and 7 ms: longer than the launch of most ops, and of any


def profile(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    rounds: int = 5,
) -> CostModel:
    """Measure the ops of a step of `model`, and copies to the host and back, on this machine.

    The result also applies to ops of other models that are called with the same shapes; ops that were not measured get
    the estimate for this kind of device.

    Args:
        model: The module to measure. It is not changed.
        example_inputs: A tuple of positional arguments, a dict of keywords (without `example_kwargs`), or the only
            argument: real tensors.
        example_kwargs: The keyword arguments.
        train: Whether to measure forward and backward, or the forward alone. None follows `model.training`.
        rounds: How often each op is measured, after one run to warm up. The call takes about `rounds` steps.

    Returns:
        The measured costs, in seconds and bytes per second, for `costs=` of `memplan.plan` and `memplan.compile`. They
        can be saved (`costs.save(path)`) and loaded (`memplan.load_costs(path)`).

    Raises:
        InvalidCosts: `rounds` is not an int of at least 1.
        UnsupportedGraph: The model cannot be traced as one graph.
        InputMismatch: A parameter, buffer or input is a fake or meta tensor.

    Example:
        ```python
        costs = memplan.profile(model, inputs)
        plan = memplan.plan(model, inputs, budget="50%", costs=costs)
        ```
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise InvalidCosts(f"is {rounds}", where="rounds", hint="measure at least one round")
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    require_real(model, args, kwargs)
    traced = trace(model, args, kwargs, train=train)
    plan = plan_traced(traced, PlanOptions(schedule="traced"))
    runner = Runner(ModuleGuards(model), traced, plan, arena_for(plan, traced.device), sanitize=None)
    seconds = _op_seconds(runner.program, rounds)
    base, apart = DEVICES[device_costs(traced.device)], Arena(PROBES[-1], traced.device)
    graph = traced.graph
    times: dict[str, list[float]] = {}
    for index, taken in seconds.items():
        times.setdefault(signature_of(graph, graph.ops[index]), []).append(taken)
    return replace(
        base,
        name=f"measured on {_device_name(traced.device)}",
        to_host=link_of(probe(apart, Direction.TO_HOST)) or base.to_host,
        to_device=link_of(probe(apart, Direction.TO_DEVICE)) or base.to_device,
        measured={signature: median(found) for signature, found in times.items()},
    )


def _op_seconds(program: Program, rounds: int) -> dict[int, float]:
    """Return the median seconds by op index, for all ops that change no tensor of the user."""
    traced, order = program.traced, program.plan.schedule.order
    names = program.namespace.names
    env = [*(names.get(f"v{index}") for index in range(len(traced.graph.values))), *[None] * traced.opaque_count]
    layout = program.layout
    tensors = {
        i: traced.example_inputs[b.index].detach() for i, b in enumerate(traced.bindings) if b.source is Source.INPUT
    }
    fill_inputs(env, traced, tensors)
    memory = TrialMemory(env, traced.graph, layout, order)
    for index in order:
        memory.before(index)
    found: dict[int, list[float]] = {i: [] for i in order if leaves_users_alone(traced, layout, i)}
    on_device = is_accelerator(traced.device)
    clocks = {index: DeviceClock(traced.device) if on_device else _seconds for index in found}
    with torch.no_grad(), forked(traced.device), without_autocast(traced.device):
        for _ in range(rounds + 1):
            for index, times in found.items():
                times.append(clocks[index](partial(run_bound, program.bound[index], env)))
    return {index: median(times[1:]) for index, times in found.items()}


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


class DeviceClock:
    """Times an op on a device, without its launch: the device is kept busy until the op is launched.

    If it was not, because the launch took longer, the op runs again behind a longer wait. An op that blocks the host
    can never be launched beforehand, and is timed with its launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cycles = device, _SLEEP

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds that `run` takes on the device."""
        while True:
            start, end = (new_event(self._device, timed=True) for _ in range(2))
            holds = self._cycles <= _LONGEST and hold_busy(self._device, self._cycles)
            record(start, self._device)
            run()
            record(end, self._device)
            begun = start.query()
            end.synchronize()
            if not (holds and begun):
                return float(start.elapsed_time(end)) / 1e3
            self._cycles *= 2


def _device_name(device: torch.device) -> str:
    return name_of(device) or f"{device.type}, torch {torch.__version__}"
