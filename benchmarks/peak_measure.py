"""Measures the peak of a step from outside: by memory events, and by the resident set of the process.

    python -m benchmarks.peak_measure resident mlp memplan --size nano

Nothing here asks a contender for its own figures. `benchmarks.peak` runs each measurement in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import memplan
from benchmarks.results import Cell
from benchmarks.zoo import EXTRAS, ZOO
from memplan.core.plan import Plan

MODELS = MappingProxyType({**ZOO, **EXTRAS})
WARM_UP = 3  # steps: the first ones compile, fill caches and settle allocators
MMAP_THRESHOLD = 64 << 10  # bytes: the C allocator gives larger blocks back to the system when they are freed
RETURN_MEMORY: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
)  # of the environment in which `resident_growth` is measured
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of allocated bytes: `nbytes` is negative where memory was freed; `time_ns` is the profiler's clock."""

    time_ns: int
    nbytes: int


def memory_events(run: Callable[[], object]) -> list[Event]:
    """Return the allocations and frees of the CPU's memory while `run` runs, in their order.

    The profiler does not report that memory was freed which was allocated while it was off. So run a step under it
    once before the one to be measured: whatever lives from that step to the next is known from then on.

    Args:
        run: The step.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> [event.nbytes for event in memory_events(lambda: torch.empty(16))]
        [64, -64]
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return events_of(profiler)


def events_of(profiler: profile) -> list[Event]:
    """Return the allocations and frees that a profiler has seen, in their order.

    Args:
        profiler: A profiler that has been stopped, with `profile_memory=True`.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ...     kept = torch.empty(16)
        >>> [event.nbytes for event in events_of(profiler)]
        [64]
    """
    found = (event for event in _recorded(profiler) if event.name() == "[memory]")
    return sorted((Event(time_ns=e.start_ns(), nbytes=e.nbytes()) for e in found), key=lambda event: event.time_ns)


def spans_of(profiler: profile, prefix: str) -> list[tuple[int, int]]:
    """Return when the functions ran whose recorded names begin with `prefix`: start and end by the profiler's clock.

    Args:
        profiler: A profiler that has been stopped.
        prefix: How the names begin, as `"Optimizer.step#"`.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ...     sum_ = torch.ones(2) + 1
        >>> len(spans_of(profiler, "aten::add"))
        1
    """
    found = (event for event in _recorded(profiler) if event.name().startswith(prefix))
    return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in found]


def _recorded(profiler: profile) -> Iterable[Any]:
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("the profiler recorded nothing")
    return profiler.profiler.kineto_results.events()


def peak_growth(step: Step) -> int:
    """Return the highest sum of bytes that the second of two steps has allocated and not yet freed."""
    for _ in range(2):
        step.clear()
        events = memory_events(step.run)
    return max(accumulate(event.nbytes for event in events), default=0)


def live_bytes() -> int:
    """Return the bytes of all storages of live tensors on the CPU; bytes that several storages share count once.

    These are parameters, buffers, inputs and gradients, what autograd has saved for a backward that is still to come,
    and whatever a contender keeps between steps, as its arena. Tensors are found by Python's garbage collector, so
    others that only C++ refers to are not seen. Storages that do not own their bytes (views of an arena by address,
    numpy's arrays) do not count: the arena may have been freed.
    """
    gc.collect()
    spans = []
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = [found for found in objects if type(found) in kinds]
    gradients = [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    for found in (*tensors, *gradients, *_saved_by_autograd(tensors)):
        if found.layout is not torch.strided:
            continue
        with suppress(NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
            storage = found.untyped_storage()
            if storage.device.type == "cpu" and storage.data_ptr() and storage.resizable():
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return covered(spans)


def _saved_by_autograd(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what the graphs of these tensors have saved."""
    nodes = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):  # without hooks, such as those of checkpoints
                with suppress(RuntimeError):  # it was freed: the backward has run
                    saved = [one.data for one in pytree.tree_leaves(getattr(node, name))]
                    yield from (one for one in pytree.tree_leaves(saved) if isinstance(one, torch.Tensor))
        before = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(before)
        nodes += before


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many integers the half-open intervals contain together."""
    total, end = 0, 0
    for low, high in sorted(spans):
        total += max(high - max(low, end), 0)
        end = max(end, high)
    return total


def resident_growth(step: Step) -> int:
    """Return by how many bytes the resident set of this process grows at most during one step.

    The process must have been started with `RETURN_MEMORY` in its environment: otherwise the C allocator keeps what
    earlier steps freed, and the set does not grow.
    """
    step.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_high_water_mark()
    before = _status("VmHWM")
    step.run()
    return _status("VmHWM") - before


def reset_high_water_mark() -> None:
    """Set the high-water mark of the resident set of this process to its present size (Linux)."""
    _CLEAR.write_text("5")


def _status(key: str) -> int:
    """Return an entry of the process's status, bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def median_seconds(step: Step, rounds: int) -> float:
    """Return the median of the seconds that a step takes."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def library_bytes(make: Callable[[], object]) -> int:
    """Return the bytes of the tensors that libraries keep for themselves once `make` has made a model of theirs.

    Example:
        >>> library_bytes(lambda: torch.nn.Linear(2, 2))
        0
    """
    make()
    return live_bytes()


def device_bytes(step: Step, apart: int) -> int:
    """Return `live_bytes` without `apart` of libraries, and without the host arena, which is in a CPU's own memory."""
    return live_bytes() - apart - _host_bytes(step)


def _host_bytes(step: Step) -> int:
    return 0 if step.plan is None else step.plan.host_size


def by_events(step: Step, rounds: int, apart: int) -> dict[str, Cell]:
    """Return time, standing bytes, the peak by memory events, and what the contender's plan had predicted.

    `apart` are bytes that are alive and not the step's, as `library_bytes`.
    """
    seconds = median_seconds(step, rounds)
    step.clear()
    standing = device_bytes(step, apart)
    return {
        "ms": seconds * 1e3,
        "standing": standing,
        "peak": standing + peak_growth(step),
        "host": _host_bytes(step) or None,
        "total": None if step.plan is None else step.plan.total,
        "padding": None if step.plan is None else step.plan.padding,
        "limit": None if step.plan is None else limit_of(step.plan),
        "how": step.how,
    }


def by_resident_set(step: Step, rounds: int, apart: int) -> dict[str, Cell]:
    """Return standing bytes, and their sum with the growth of the resident set, the median of `rounds` steps.

    `apart` is that of `by_events`.
    """
    step.clear()
    standing = device_bytes(step, apart)
    growth = statistics.median([resident_growth(step) for _ in range(rounds)])
    return {"standing": standing, "resident": standing + round(growth)}


METHODS = MappingProxyType({"events": by_events, "resident": by_resident_set})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one contender on one model, and print the figures in bytes as JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.peak_measure", description="One contender's peak.")
    parser.add_argument("method", choices=list(METHODS))
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--mode", choices=["training", "inference"], default="training")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    make = partial(MODELS[options.model], options.size)
    apart = library_bytes(make)
    started = time.perf_counter()
    step = CONTENDERS[options.contender].step(*make(), options.mode)
    for _ in range(WARM_UP):
        step.run()
    setup = time.perf_counter() - started
    print(json.dumps(METHODS[options.method](step, options.rounds, apart) | {"setup_s": setup, "pid": os.getpid()}))
    return 0


Mode = Literal["training", "inference"]
BUDGETS = ("80", "60", "50", "40", "30", "min")  # percent of eager's predicted total
POLICIES = ("recompute", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is ready to run, and what its contender predicts.

    `run` does one step from empty gradients: forward and backward, or the forward alone for inference. `clear` empties
    the gradients. `plan` is memplan's plan. `how` says how blocks were checkpointed.
    """

    run: Callable[[], object]
    clear: Callable[[], None]
    plan: Plan | None = None
    how: str | None = None


Call = Callable[..., Any]
Compile = Callable[[nn.Module, tuple[Any, ...], Mode], tuple[Call, Plan | None]]


def eager(model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> tuple[Call, None]:
    """PyTorch as it is."""
    return model, None


def inductor(
    model: nn.Module, inputs: tuple[Any, ...], mode: Mode, *, activation_memory_budget: float | None = None
) -> tuple[Call, None]:
    """`torch.compile` with its default backend. The memory budget is set for the whole process, which is its own."""
    if activation_memory_budget is not None:
        functorch_config.activation_memory_budget = activation_memory_budget
    return torch.compile(model, fullgraph=True), None


def planned(model: nn.Module, inputs: tuple[Any, ...], mode: Mode, **options: Any) -> tuple[Call, Plan]:
    """`memplan.compile`."""
    compiled = memplan.compile(model, inputs, train=mode == "training", **options)
    return compiled, compiled.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to run a step: how the model is compiled, and whether its blocks are checkpointed before.

    `modes` are those in which it differs from the other contenders.
    """

    compile: Compile
    checkpointed: bool = False
    modes: tuple[Mode, ...] = ("training",)

    def step(self, model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> Step:
        """Return the step of `model`, which is put into training or evaluation mode, ready to run."""
        model.train(model.training and mode == "training")
        how = checkpoint_blocks(model) if self.checkpointed else None
        call, plan = self.compile(model, inputs, mode)
        parameters = list(model.parameters())

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        def train() -> object:
            clear()
            loss = call(*inputs)
            loss.backward()
            return loss

        def infer() -> object:
            with torch.no_grad():
                return call(*inputs)

        return Step(run=train if mode == "training" else infer, clear=clear, plan=plan, how=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A whole training step with fused AdamW: forward, backward and update, by eager or by one program of memplan."""

    planned: bool
    modes: tuple[Mode, ...] = ("training",)

    def step(self, model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> Step:
        """Return the step of `model`, which is in training mode, ready to run."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def clear() -> None:
            optimizer.zero_grad(set_to_none=True)

        if self.planned:
            compiled = memplan.compile_step(model, optimizer, lambda loss: loss, inputs)
            return Step(run=lambda: compiled(*inputs), clear=clear, plan=compiled.plan)

        def train() -> object:
            clear()
            loss = model(*inputs)
            loss.backward()
            optimizer.step()
            return loss

        return Step(run=train, clear=clear)


def limit_of(plan: Plan) -> int | None:
    """Return the bytes that a plan's total may have; None without such a limit."""
    return None if plan.eviction is None else plan.eviction.budget


def _budgeted(budget: str, policy: str) -> Contender:
    asked = budget if budget == "min" else f"{budget}%"
    return Contender(compile=partial(planned, budget=asked, policy=policy))


_BOTH: tuple[Mode, ...] = ("training", "inference")
CONTENDERS: Mapping[str, Contender | WholeStep] = MappingProxyType(
    {
        "eager": Contender(compile=eager, modes=_BOTH),
        "eager+checkpoint": Contender(compile=eager, checkpointed=True),
        "inductor": Contender(compile=inductor, modes=_BOTH),
        "inductor+checkpoint": Contender(compile=inductor, checkpointed=True),
        **{
            f"inductor-{share}": Contender(compile=partial(inductor, activation_memory_budget=share))
            for share in (0.5, 0.25, 0.1)
        },
        "memplan": Contender(compile=planned, modes=_BOTH),
        "memplan-outside": Contender(compile=partial(planned, gradients="outside")),
        "memplan-arena": Contender(compile=partial(planned, gradients="arena")),
        "memplan+checkpoint": Contender(compile=planned, checkpointed=True),
        "eager-step": WholeStep(planned=False),
        "memplan-step": WholeStep(planned=True),
        **{f"memplan-{budget}-{policy}": _budgeted(budget, policy) for policy in POLICIES for budget in BUDGETS},
    }
)


class Checkpointed(nn.Module):
    """A module whose calls keep only their arguments for the backward, which runs the call a second time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for the same arguments."""
        return checkpoint(self.module, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module) -> str:
    """Checkpoint each block of `model`, in place; returns how, for people to read.

    Models of transformers and diffusers have a method for it. In other models, the blocks are the members of the
    longest `nn.ModuleList` or `nn.Sequential`, the first one of several.

    Raises:
        ValueError: The model has neither such a method nor such a container.
    """
    for part in model.modules():
        if getattr(part, "supports_gradient_checkpointing", False) is True:  # a model of transformers
            part.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            return "gradient_checkpointing_enable()"
        if getattr(part, "_supports_gradient_checkpointing", False) is True:  # a model of diffusers
            part.enable_gradient_checkpointing()  # type: ignore[operator]
            return "enable_gradient_checkpointing()"
    named = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    if not named:
        raise ValueError(f"{type(model).__name__} has no blocks: no ModuleList and no Sequential")
    name, blocks = max(named, key=lambda pair: len(pair[1]))
    for index, block in enumerate(blocks):
        blocks[index] = Checkpointed(block)
    return f"checkpoint of each of {len(blocks)} members of {name or 'the model'}"


if __name__ == "__main__":
    sys.exit(main())
