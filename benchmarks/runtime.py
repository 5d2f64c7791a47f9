"""Eager against compiled training steps: time as an interleaved ratio, and peak tensor bytes.

    python -m benchmarks.runtime --models gpt2,llama --size nano --rounds 30

Shared machines are noisy, so nothing compares two times that were measured apart: each round times every
contender once, in turning order, and the ratio is the median over the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import memplan
from benchmarks.results import Cell, Row, Table, collect, kept_rows, names, parser_of
from benchmarks.zoo import ZOO, Example, Size
from memplan.core.units import parse_size

WARM_UP = 3  # steps: the first ones compile, fill caches and settle allocators
SAMPLE_S = 0.02  # seconds that one sample lasts at least, above the clock's and the scheduler's grain
COLUMNS = {
    "model": "model",
    "contender": "contender",
    "ms": "median ms/step",
    "best_ms": "fastest ms/step",
    "speedup": "speed-up",
    "low": "lower quartile",
    "high": "upper quartile",
    "model_mb": "model + inputs, MB",
    "peak_mb": "peak of all tensors, MB",
    "planned_mb": "planned peak, MB",
    "memory_ratio": "peak / eager's",
    "setup_s": "set-up, s",
}
CUDA_COLUMNS = {
    "allocated_mb": "allocated peak, MB",
    "reserved_mb": "reserved peak, MB",
    "pool_mb": "graph pool, MB",
    "max_batch": "max batch",
}
CUDA_NOTES = (
    "The peak of all tensors leaves out what CUDA graphs keep in their pools (graph pool: results, and workspaces of"
    " libraries); the allocated and reserved peaks of the device are those of one step alone, workspaces included.",
)
NOTES = (
    "Speed-up: eager's time divided by the contender's, median of per-round ratios. MB = 10^6 bytes.",
    "Peak: model and inputs, what was allocated before the step (arena), and the highest sum of the profiler's"
    " memory events within one step, gradients included.",
    "Set-up: until the third step is done.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    rows = kept_rows(options.models, options.keep, lambda: _settings(options), partial(_rows, options=options))
    return collect(rows, partial(_table, options=options), options.directory)


def _settings(options: argparse.Namespace) -> str:
    """Return what kept rows must have been measured with."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    what = (options.size, options.rounds, options.threads, *options.contenders, *options.fit, options.capacity)
    return f"{where}, torch {torch.__version__}, {' '.join(map(str, what))}"


def _rows(name: str, options: argparse.Namespace) -> list[dict[str, Cell]]:
    print(f"{name} {options.size} ...", file=sys.stderr, flush=True)
    found = measure(name, options.size, options.contenders, rounds=options.rounds, device=options.device)
    if options.device == "cuda":
        fitted = dict.fromkeys(options.fit, options.capacity)
        ran = [str(row["contender"]) for row in found]
        memory = [cuda_memory(name, options.size, key, fitted.get(key)) for key in ran]
        found = [row | more for row, more in zip(found, memory, strict=True)]
    return found


def _table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    settings: dict[str, Cell] = {"size": options.size, "rounds": options.rounds, "threads": options.threads}
    if options.device == "cuda":
        settings["device"] = torch.cuda.get_device_name()
    return Table(
        name=options.output,
        title=f"Runtime, forward + backward, {options.size} models, {options.device}",
        columns=COLUMNS | (CUDA_COLUMNS if options.device == "cuda" else {}),
        rows=rows,
        settings=settings,
        notes=NOTES + (CUDA_NOTES if options.device == "cuda" else ()),
    )


def measure(name: str, size: Size, contenders: Sequence[str], *, rounds: int, device: str) -> list[dict[str, Cell]]:
    """One row per contender that runs, the first of which is the reference of all ratios."""
    steps: dict[str, Step] = {}
    setup: dict[str, float] = {}
    static: dict[str, int] = {}
    for contender in contenders:
        torch._dynamo.reset()
        model, inputs = _on(device, ZOO[name](size))
        started = time.perf_counter()
        try:
            step = CONTENDERS[contender](model, inputs)
            for _ in range(WARM_UP):
                step.run()
        except Exception as error:  # of whatever kind: the others are measured all the same
            print(f"{name} {contender}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
            continue
        steps[contender] = step
        setup[contender] = time.perf_counter() - started
        static[contender] = _bytes([*model.parameters(), *model.buffers(), *inputs])
    if not steps:
        return []
    runs = {key: _timed(step.run, device) for key, step in steps.items()}
    times = interleaved(runs, rounds)
    reference = next(iter(steps))
    peaks = {key: static[key] + step.standing + step_peak(step) for key, step in steps.items()}
    return [
        {
            "model": name,
            "contender": key,
            "ms": statistics.median(times[key]) * 1e3,
            "best_ms": min(times[key]) * 1e3,
            **_speedup(times[reference], times[key]),
            "model_mb": static[key] / 1e6,
            "peak_mb": peaks[key] / 1e6,
            "planned_mb": None if (planned := step.planned) is None else planned / 1e6,
            "memory_ratio": peaks[key] / peaks[reference],
            "setup_s": setup[key],
        }
        for key, step in steps.items()
    ]


def interleaved(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step and round of each; the round's first turns, so that no one always follows the same other."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(steps[name]())
    return times


def step_peak(step: Step) -> int:
    """Highest sum of bytes that one step has allocated and not yet freed, from the profiler's memory events."""
    step.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run()
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("the profiler recorded nothing")
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0))


def _timed(run: Callable[[], object], device: str) -> Callable[[], float]:
    """Seconds per step of a sample that lasts long enough to be timed."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else _nothing

    def sample(repeats: int) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        return (time.perf_counter() - started) / repeats

    repeats = max(1, round(SAMPLE_S / sample(1)))
    return lambda: sample(repeats)


def _nothing() -> None:
    """The CPU has nothing to wait for."""


def _speedup(reference: Sequence[float], times: Sequence[float]) -> dict[str, Cell]:
    ratios = [one / other for one, other in zip(reference, times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"speedup": middle, "low": low, "high": high}


def _bytes(tensors: Sequence[object]) -> int:
    """Bytes of the storages behind `tensors`, each once: tied weights share theirs."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _on(device: str, example: Example) -> Example:
    model, inputs = example
    return model.to(device), pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("runtime", "Eager against compiled training steps.", list(ZOO))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each contender")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(),
        help="of torch; 1 keeps the ratios steady where other work shares the cores",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--contenders", type=names(list(CONTENDERS)), default=["eager", "memplan"],
        help="comma-separated; the first is the reference",
    )  # fmt: skip
    parser.add_argument("--capacity", default="8GiB", help="bytes for which the largest batch is looked for (cuda)")
    parser.add_argument(
        "--fit", type=names(list(CONTENDERS)), default=[],
        help="contenders whose largest batch is looked for (cuda)",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, help="a file that keeps each model's rows: a run that was ended goes on")
    return parser.parse_args(arguments)


MOST = 4096  # copies of the example; the search goes no further


def cuda_memory(name: str, size: Size, contender: str, capacity: str | None) -> dict[str, Cell]:
    """Peaks of a step of the plain example, and how many examples fit `capacity` ("8GiB"), if one is given.

    The search for the largest batch prepares the contender a dozen times: for compilers that takes minutes.
    """
    step = _fresh(name, size, contender, 1)
    torch.cuda.reset_peak_memory_stats()
    step.clear()
    step.run()
    torch.cuda.synchronize()
    found: dict[str, Cell] = {
        "allocated_mb": torch.cuda.max_memory_allocated() / 1e6,
        "reserved_mb": torch.cuda.max_memory_reserved() / 1e6,
        "pool_mb": None if step.pool is None else step.pool() / 1e6,
    }
    del step
    if capacity is None:
        return found
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(parse_size(capacity) / total, 1.0))
    try:
        found["max_batch"] = largest(lambda copies: _runs(name, size, contender, copies))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        _release()
    return found


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if none does, `MOST` at most; what fits a larger one fits a smaller one."""
    if not fits(1):
        return 0
    low = 1
    while low < MOST and fits(2 * low):
        low *= 2
    if low >= MOST:
        return MOST
    high = 2 * low  # does not fit
    while high - low > max(1, low // 32):  # to 3 %
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _runs(name: str, size: Size, contender: str, copies: int) -> bool:
    try:
        step = _fresh(name, size, contender, copies)
        step.run()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _fresh(name: str, size: Size, contender: str, copies: int) -> Step:
    """The contender's step after it has settled, alone on the device."""
    _release()
    model, inputs = ZOO[name](size)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t] * copies).to("cuda"), inputs)
    step = CONTENDERS[contender](model.to("cuda"), inputs)
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()
    return step


def _release() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that anybody used
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is ready to run.

    `run` does one forward and backward from empty gradients; `clear` empties them. `standing` is
    what it allocated beforehand for its intermediates, in bytes (an arena); `planned` is the predicted peak of
    everything, in bytes, where there is one. `pool` tells the bytes that CUDA graphs keep beside the arena.
    """

    run: Callable[[], object]
    clear: Callable[[], None]
    standing: int = 0
    planned: int | None = None
    pool: Callable[[], int] | None = None


Contender = Callable[[nn.Module, tuple[Any, ...]], Step]


def _step(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    **more: Any,
) -> Step:
    parameters = list(model.parameters())

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    def run() -> object:
        clear()
        loss = call(*inputs)
        loss.backward()
        return loss

    return Step(run=run, clear=clear, **more)


def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """PyTorch as it is."""
    return _step(model, model, inputs)


def torch_compile(backend: Any, model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`torch.compile` with a backend, one full graph."""
    return _step(model, torch.compile(model, backend=backend, fullgraph=True, **options), inputs)


def planned(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`memplan.compile`: every intermediate at its planned address."""
    compiled = memplan.compile(model, inputs, **options)
    return _step(
        model,
        compiled,
        inputs,
        standing=compiled.plan.arena_size,
        planned=compiled.plan.total,
        pool=lambda: compiled.pool_bytes,
    )


def eager_step(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """PyTorch as it is, with the fused optimizer: forward, backward, update."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def run() -> object:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        return loss

    return Step(run=run, clear=optimizer.zero_grad)


def planned_step(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`memplan.compile_step` with the same optimizer: forward, backward and updates in one arena."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memplan.compile_step(model, optimizer, _loss_itself, inputs, **options)
    planned = step.plan.total - step.plan.outside["optimizer state"]  # which no contender counts
    return Step(
        run=partial(step, *inputs),
        clear=optimizer.zero_grad,
        standing=step.plan.arena_size,
        planned=planned,
        pool=lambda: step.pool_bytes,
    )


def _loss_itself(loss: torch.Tensor) -> torch.Tensor:
    return loss


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": eager,
        "memplan": planned,
        "memplan-outside": partial(planned, gradients="outside"),
        "memplan-arena": partial(planned, gradients="arena"),
        "memplan-graph": partial(planned, cuda_graph=True),
        "memplan-backend": partial(torch_compile, memplan.Backend()),
        "eager-step": eager_step,
        "memplan-step": planned_step,
        "memplan-step-graph": partial(planned_step, cuda_graph=True),
        "aot_eager": partial(torch_compile, "aot_eager"),
        "inductor": partial(torch_compile, "inductor"),
        "inductor-graph": partial(torch_compile, "inductor", mode="reduce-overhead"),
    }
)


if __name__ == "__main__":
    sys.exit(main())
