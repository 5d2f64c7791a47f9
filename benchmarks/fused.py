"""Inductor's kernels with and without memplan, beside eager and memplan's ATen kernels: time, peak, first call.

    python -m benchmarks.fused --models gpt2,llama --rounds 15 --keep /tmp/fused.jsonl

Each contender runs in a process of its own, on the CPU with one thread, in turns with the others of its model: the
order rotates from round to round, and a ratio is the median of the ratios of single rounds. Where a process has its
memory changes its time by several per cent, so `--starts` has each contender start anew a few times. Peaks are taken
from outside, by memory events and by the tensors that live between steps. Budgets are shares of the peak of Inductor,
and of the one that torch's knob (`activation_memory_budget`) reaches at .5. Only contenders whose first call is
reported start from empty caches.

`--whole` measures whole training steps with AdamW: the compiled forward and backward with torch's fused update, and
with the optimizer's `step()` compiled by Inductor, Inductor's one graph of forward and backward (`trace_autograd_ops`),
and memplan's step. Numbers are then the loss and the parameters of the first update.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import memplan
from benchmarks.peak_measure import MODELS as ZOO
from benchmarks.peak_measure import WARM_UP, Step, library_bytes, live_bytes, peak_growth
from benchmarks.results import Row, Table, collect, kept_rows, names, parser_of
from benchmarks.zoo import OUTSIDE

MODELS = MappingProxyType({**ZOO, **OUTSIDE})
KNOB = 0.5
TIGHTER = 0.85  # of the peak that the knob reaches
SHARES = (0.85, 0.725)  # of Inductor's peak
SHARES_IN_BLOCKS = (0.7, 0.5)
ENDED = "its process ended"
COLUMNS = {
    "model": "model",
    "contender": "contender",
    "ms": "median ms/step",
    "speed": "inductor's time / time",
    "peak_mb": "peak, MB",
    "peak_ratio": "peak / inductor's",
    "budget_mb": "budget, MB",
    "share": "budget is a share of",
    "first": "first call / inductor's",
    "bits": "bits",
    "kernels": "kernels",
    "failed": "did not run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a contender that is ready: seconds of the first call, peak in bytes, loss and gradients.

    `first` is None where caches were full already. `layouts`: convolutions may have layouts of Inductor's choice.
    `kernels`: those that memplan has chosen; None where it had no choice.
    """

    first: float | None
    peak: int
    numbers: tuple[Any, ...]
    layouts: bool = True
    kernels: str | None = None


Compile = Callable[[nn.Module, tuple[Any, ...], int | None], Callable[..., Any]]


def inductor(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """`torch.compile`."""
    return torch.compile(model, fullgraph=True, dynamic=False)


def without_layouts(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """`torch.compile` with convolutions in the layout of their inputs."""
    options: Any = {"layout_optimization": False}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def partitioned(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """`torch.compile` with `memplan.partitioner`."""
    assert budget is not None
    options: Any = {"custom_partitioner_fn": memplan.partitioner(budget=budget)}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def planned(model: nn.Module, inputs: tuple[Any, ...], budget: int | None, **options: Any) -> Callable[..., Any]:
    """`memplan.compile`."""
    return memplan.compile(model, inputs, budget=budget, **options)


def eager(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """PyTorch as it is."""
    return model


FLAT: Literal["inductor without layouts"] = "inductor without layouts"
Reference = Literal[
    "inductor", "inductor without layouts", "eager", "inductor-knob", "inductor + fused AdamW", "eager + fused AdamW"
]
Update = Literal["fused", "compiled", "planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to compile.

    `against` has the numbers that its own are compared with. Its budget is `share` times the peak of `of`. `knob`:
    torch's knob is at `KNOB`. `cold`: it starts from empty caches, so that its first call is comparable. `update`: what
    updates the parameters (torch's fused kernels, a compiled `step()`, or memplan's plan of the whole step); None:
    nothing does. `one_graph`: what is compiled calls `backward` itself, which dynamo traces (`trace_autograd_ops`).
    """

    compile: Compile
    against: Reference
    share: float | None = None
    of: str = "inductor-knob"
    knob: bool = False
    cold: bool = False
    update: Update | None = None
    one_graph: bool = False


_fused = partial(planned, kernels="inductor", policy="recompute")  # the CPU's host copies are in its own memory
_in_blocks = partial(_fused, divide=memplan.Division(sums=True))
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": Contender(compile=eager, against="eager"),
        "inductor": Contender(compile=inductor, against="inductor", cold=True),
        FLAT: Contender(compile=without_layouts, against=FLAT),
        "memplan-inductor": Contender(compile=_fused, against="inductor", cold=True),
        "inductor-knob": Contender(compile=inductor, against="inductor", knob=True),
        "memplan": Contender(compile=planned, against="eager"),
        **{
            f"memplan-inductor {share:.3g}": Contender(compile=_fused, against="inductor", share=share, of="inductor")
            for share in SHARES
        },
        **{
            f"memplan-inductor {share:.3g} in blocks": Contender(
                compile=_in_blocks, against="inductor", share=share, of="inductor"
            )
            for share in SHARES_IN_BLOCKS
        },
        "memplan-inductor at the knob's": Contender(compile=_fused, against="inductor", share=1.0),
        "memplan-inductor tighter": Contender(compile=_fused, against="inductor", share=TIGHTER),
        "memplan-inductor tighter in blocks": Contender(compile=_in_blocks, against="inductor", share=TIGHTER),
        "partitioner at the knob's": Contender(compile=partitioned, against="inductor", share=1.0),
        "partitioner tighter": Contender(compile=partitioned, against="inductor", share=TIGHTER),
    }
)

WHOLE: Mapping[str, Contender] = MappingProxyType(
    {
        "inductor + compiled AdamW": Contender(compile=inductor, against="inductor + fused AdamW", update="compiled"),
        "inductor's graph of both + compiled AdamW": Contender(
            compile=inductor, against="inductor + fused AdamW", update="compiled", one_graph=True
        ),
        "inductor + fused AdamW": Contender(compile=inductor, against="inductor + fused AdamW", update="fused"),
        "eager + fused AdamW": Contender(compile=eager, against="eager + fused AdamW", update="fused"),
        "memplan's step": Contender(compile=eager, against="eager + fused AdamW", update="planned"),
        "memplan's step + inductor": Contender(compile=_fused, against="inductor + fused AdamW", update="planned"),
        **{
            f"memplan's step + inductor {share:.3g}": Contender(
                compile=_fused,
                against="inductor + fused AdamW",
                share=share,
                of="inductor + compiled AdamW",
                update="planned",
            )
            for share in SHARES
        },
    }
)


class Timed(Protocol):
    """A contender that is ready to run."""

    def seconds(self) -> float:
        """Run its turn and return the seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A contender that waits for its turns in a process of its own, and the bytes of its budget."""

    process: Any
    turns: Connection
    measured: Measured
    budget: int | None

    def seconds(self) -> float:
        """Run a step and return its seconds."""
        self.turns.send(True)
        found: float = self.turns.recv()
        return found

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(ConnectionError):  # it has ended already
            self.turns.send(False)
        self.process.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The figures of a contender, the bytes of its budget, and the seconds of its steps."""

    measured: Measured
    budget: int | None
    seconds: tuple[float, ...]

    def after(self, earlier: Finished | None) -> Finished:
        """Return the figures together with those of an earlier start."""
        if earlier is None:
            return self
        measured = replace(earlier.measured, peak=max(earlier.measured.peak, self.measured.peak))
        return replace(earlier, measured=measured, seconds=(*earlier.seconds, *self.seconds))


def rows_of(
    model: str,
    size: str,
    rounds: int,
    *,
    starts: int = 1,
    whole: bool = False,
    warm: bool = False,
    chosen: Sequence[str] | None = None,
) -> list[Row]:
    """Return the rows of one model, all contenders measured in turns.

    `starts`: how often each of them starts, for as many rounds each time; the first time is that of first calls, and a
    peak is the highest. `whole`: those of whole training steps. `warm`: no contender starts from empty caches.
    `chosen`: the contenders to measure; None: all.
    """
    known = WHOLE if whole else CONTENDERS
    contenders = known if chosen is None else {name: known[name] for name in known if name in chosen}
    found: dict[str, Finished] = {}
    failed: dict[str, str] = {}
    for number in range(starts):
        again, missing = _one_start(contenders, model, size, rounds, warm=warm or number > 0)
        failed |= missing
        found = {name: one.after(found.get(name)) for name, one in again.items()}
    against = "inductor + compiled AdamW" if whole else "inductor"
    return [_row(model, name, found, failed, base=against) for name in contenders]


def _one_start(
    contenders: Mapping[str, Contender], model: str, size: str, rounds: int, *, warm: bool
) -> tuple[dict[str, Finished], dict[str, str]]:
    """Start the contenders, and run them in turns; return their figures, and why the others did not run."""
    ready: dict[str, Running] = {}
    failed: dict[str, str] = {}
    try:
        for name, contender in contenders.items():
            print(f"{model} {name} ...", file=sys.stderr, flush=True)
            base = ready.get(contender.of)
            if contender.share is not None and base is None:
                failed[name] = f"{contender.of} did not run"
                continue
            budget = int(contender.share * base.measured.peak) if contender.share is not None and base else None
            started = _started(name, model, size, budget, warm=warm)
            if isinstance(started, str):
                failed[name] = started
            else:
                ready[name] = started
        seconds = in_turns(ready, rounds)
        failed |= dict.fromkeys(ready.keys() - seconds.keys(), ENDED)
        return {
            name: Finished(measured=one.measured, budget=one.budget, seconds=tuple(seconds[name]))
            for name, one in ready.items()
            if name in seconds
        }, failed
    finally:
        for one in ready.values():
            one.end()


def _started(name: str, model: str, size: str, budget: int | None, *, warm: bool) -> Running | str:
    """Start the process of a contender and wait until it is warm; its error, in one line, if it does not run."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_take_turns, args=(theirs, name, model, size, budget), kwargs={"warm": warm}, daemon=False
    )
    process.start()
    theirs.close()
    try:
        found: Measured | str = ours.recv()
    except EOFError:
        found = ENDED
    if isinstance(found, str):
        process.join()
        return found
    return Running(process=process, turns=ours, measured=found, budget=budget)


def _take_turns(turns: Connection, name: str, model: str, size: str, budget: int | None, *, warm: bool = False) -> None:
    """Compile and warm up a contender, send its figures, and then run a step whenever one is asked for."""
    torch.set_num_threads(1)
    contender = {**CONTENDERS, **WHOLE}[name]
    contender = replace(contender, cold=contender.cold and not warm)
    try:
        step, measured = _ready(contender, model, size, budget)
    except (memplan.MemplanError, TypeError) as error:  # an option that this version does not have is a TypeError
        turns.send(str(error).splitlines()[0][:160])
        return
    turns.send(measured)
    while turns.recv():
        started = time.perf_counter()
        step.run()
        turns.send(time.perf_counter() - started)


def _ready(contender: Contender, model: str, size: Any, budget: int | None) -> tuple[Step, Measured]:
    """Compile and warm up a contender, and take its figures but for the time."""
    before = library_bytes(partial(MODELS[model], size))
    own, inputs = MODELS[model](size)
    with contextlib.ExitStack() as stack:
        if contender.knob:
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=KNOB))
        if contender.one_graph:
            stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        if contender.cold:
            stack.enter_context(fresh_cache())
        # copied first: a tensor that is shown as an array is taken for bytes that torch does not own
        initial = [tensor.detach().clone().numpy() for tensor in (*own.parameters(), *own.buffers())]
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3, fused=contender.update != "compiled")
        started = time.perf_counter()
        if contender.update is None:
            step = step_of(contender.compile(own, inputs, budget), own, inputs)
        else:
            step = _whole_step(contender, own, inputs, budget, optimizer)
        step.run()
        first = time.perf_counter() - started
        for _ in range(WARM_UP):
            step.run()
        step.clear()
        peak = live_bytes() - before + peak_growth(step)
    if contender.update is not None:
        _restore(own, optimizer, initial)
    torch.manual_seed(7)
    loss = step.run()
    assert isinstance(loss, Tensor)
    numbers: tuple[Tensor, ...] = (loss, *(p.grad for p in own.parameters() if p.grad is not None))
    if contender.update is not None:
        numbers = (loss, *own.parameters())
    found = tuple(one.detach().clone().numpy() for one in numbers)
    step.clear()
    layouts = getattr(step.plan, "kernels", None) is None  # memplan leaves convolutions in those of the model
    chosen = getattr(step.plan, "kernels", None)
    return step, Measured(
        first=first if contender.cold else None,
        peak=peak,
        numbers=found,
        layouts=layouts,
        kernels=str(chosen).partition(":")[0] if chosen else None,
    )


def step_of(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """Return the step: forward and backward from empty gradients."""

    def clear() -> None:
        module.zero_grad()

    def run() -> object:
        clear()
        loss = call(*inputs)
        loss.backward()
        return loss

    return Step(run=run, clear=clear, plan=getattr(call, "plan", None))


def _whole_step(
    contender: Contender,
    module: nn.Module,
    inputs: tuple[Any, ...],
    budget: int | None,
    optimizer: torch.optim.Optimizer,
) -> Step:
    """Return the step with the update of an optimizer."""
    if contender.update == "planned":
        options: dict[str, Any] = {"kernels": "inductor", "policy": "recompute"} if contender.compile is _fused else {}
        planned: Any = memplan.compile_step(module, optimizer, _itself, inputs, budget=budget, **options)
        return Step(run=lambda: planned(*inputs), clear=module.zero_grad, plan=planned.plan)
    call = contender.compile(_Both(module) if contender.one_graph else module, inputs, budget)
    update: Callable[[], object] = torch.compile(optimizer.step) if contender.update == "compiled" else optimizer.step

    def run() -> object:
        loss = call(*inputs)
        if not contender.one_graph:
            loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return Step(run=run, clear=module.zero_grad)


class _Both(nn.Module):
    """A model's forward, and the backward of the loss that it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Tensor:
        """Return the loss, whose gradients have been added to those of the parameters."""
        loss: Tensor = self.module(*inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _itself(loss: Tensor) -> Tensor:
    return loss


def _restore(module: nn.Module, optimizer: torch.optim.Optimizer, initial: Sequence[Any]) -> None:
    """Set parameters, buffers and the optimizer's state to what they were before the first update."""
    with torch.no_grad():
        for tensor, value in zip((*module.parameters(), *module.buffers()), initial, strict=True):
            tensor.copy_(torch.from_numpy(value))
        for state in optimizer.state.values():
            for entry in state.values():
                entry.zero_()


def in_turns(ready: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round, but for those whose process ends meanwhile."""
    names, found = list(ready), {name: list[float]() for name in ready}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in found:
                try:
                    found[name].append(ready[name].seconds())
                except (EOFError, ConnectionError):
                    del found[name]
    return found


def _row(model: str, name: str, found: Mapping[str, Finished], failed: Mapping[str, str], *, base: str) -> Row:
    """Return the row of one contender, relative to that of the name `base` and to its reference, where these ran."""
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "model": model, "contender": name}
    if name not in found:
        return {**row, "failed": failed[name]}
    contender, own = {**CONTENDERS, **WHOLE}[name], found[name]
    one = own.measured
    against = contender.against if one.layouts or FLAT not in found else FLAT
    against = "eager" if one.kernels == "aten" else against
    row |= {
        "ms": statistics.median(own.seconds) * 1e3,
        "peak_mb": one.peak / 1e6,
        "budget_mb": None if own.budget is None else own.budget / 1e6,
        "share": None if contender.share is None else f"{contender.share:.3g} of {contender.of}'s peak",
        "kernels": one.kernels,
    }
    if against in found:
        row["bits"] = bits(one.numbers, found[against].measured.numbers, against)
    if base in found:
        other = found[base]
        row |= {
            "speed": statistics.median(a / b for a, b in zip(other.seconds, own.seconds, strict=True)),
            "peak_ratio": one.peak / other.measured.peak,
            "first": one.first / other.measured.first if one.first and other.measured.first else None,
        }
    return row


def bits(one: Sequence[Any], other: Sequence[Any], against: str) -> str:
    """Say whether all numbers are equal, or by how much they differ at most."""
    pairs = list(zip(one, other, strict=True))
    if all((a == b).all() for a, b in pairs):
        return f"{against}'s"
    return f"{max(float(abs(a - b).max()) for a, b in pairs):.1e} off {against}'s"


def _table(rows: Sequence[Row], output: str, options: argparse.Namespace) -> Table:
    return Table(
        name=output,
        title=f"Fused kernels{', whole steps' if options.whole else ''}, {options.size} models, cpu",
        columns=COLUMNS,
        rows=rows,
        settings={"size": options.size, "rounds": options.rounds, "starts": options.starts, "threads": 1},
        notes=(
            "Peak: what lives between steps (parameters, buffers, inputs, an arena), and by how much one step exceeds"
            " it, by memory events. MB = 10^6 bytes.",
            f"The knob is activation_memory_budget={KNOB}; tighter is {TIGHTER:.0%} of the peak that it reaches.",
            f"Command: python -m benchmarks.fused {_said(options)}",
        ),
    )


def _said(options: argparse.Namespace) -> str:
    """Return the arguments that say what was measured."""
    said = f"--models {','.join(options.models)} --size {options.size} --rounds {options.rounds}"
    said += f" --starts {options.starts}" if options.starts > 1 else ""
    said += f' --contenders "{",".join(options.contenders)}"' if options.contenders else ""
    return f"{said}{' --whole' if options.whole else ''}{' --warm' if options.warm else ''}"


def _settings(options: argparse.Namespace) -> str:
    """Return what kept rows must have been measured with."""
    what = "whole steps, " if options.whole else ""
    if options.contenders:
        what += f"{','.join(options.contenders)}, "
    return f"{what}{options.size}, {options.starts} times {options.rounds} rounds, torch {torch.__version__}"


def _batches(options: argparse.Namespace) -> Iterator[Sequence[Row]]:
    """Yield the rows of each model."""
    measure = partial(
        rows_of,
        size=options.size,
        rounds=options.rounds,
        starts=options.starts,
        whole=options.whole,
        warm=options.warm,
        chosen=options.contenders,
    )
    return kept_rows(options.models, options.keep, lambda: _settings(options), measure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    parser = parser_of("fused", __doc__.splitlines()[0], list(MODELS), ["gpt2", "llama", "bert", "vit", "resnet"])
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=1, help="how often each contender starts, for as many rounds")
    parser.add_argument("--contenders", type=names([*CONTENDERS, *WHOLE]), help="comma-separated; none named: all")
    parser.add_argument("--whole", action="store_true", help="measure whole training steps")
    parser.add_argument("--warm", action="store_true", help="start from full caches: first calls are not compared")
    parser.add_argument("--keep", type=Path, help="a file that keeps each model's rows: a run that was ended goes on")
    options = parser.parse_args(arguments)
    known = WHOLE if options.whole else CONTENDERS
    if options.starts < 1 or options.rounds < 1:
        parser.error("--starts and --rounds are at least 1")
    if others := [name for name in options.contenders or () if name not in known]:
        parser.error(f"{', '.join(others)}: {'not of whole steps' if options.whole else 'only with --whole'}")
    torch.set_num_threads(1)
    return collect(_batches(options), partial(_table, output=options.output, options=options), options.directory)


if __name__ == "__main__":
    sys.exit(main())
