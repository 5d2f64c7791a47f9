"""The contenders of `benchmarks.fused` on a CUDA device: time, peak and bits.

    python -m benchmarks.fused_cuda --models gpt2,llama --rounds 10 --seconds 150

Each contender prepares itself in a process of its own, all at the same time, because a machine with a GPU may be there
for minutes only; those that are not ready in time are left out. Then one at a time runs its steps, in turns that rotate
from round to round. Times are the host's, from an idle device to an idle device. Peaks are bytes that were asked of
torch's allocator, without the workspaces of cuBLAS. A contender's numbers are those of the second of two equal steps;
`itself` says how much the first differed, since some kernels add up in any order.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks import fused
from benchmarks.fused import CONTENDERS, ENDED, MODELS, bits, in_turns, step_of
from benchmarks.peak_measure import WARM_UP
from benchmarks.results import Row, Table, names, parser_of, write
from memplan.errors import MemplanError

_BEFORE_BITS = ("model", "contender", "ms", "speed", "peak_mb", "peak_ratio", "budget_mb")
COLUMNS = {
    **{key: fused.COLUMNS[key] for key in _BEFORE_BITS},
    "arena_mb": "arena, MB",
    "ready": "ready after, s",
    "bits": fused.COLUMNS["bits"],
    "itself": "off itself",
    "failed": fused.COLUMNS["failed"],
}
CHOSEN = ("eager", "inductor", "memplan", "memplan-inductor", "memplan-inductor 0.85")
_STEPS = 5  # of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a contender that is ready: bytes, seconds, loss and gradients, and how far these vary."""

    peak: int
    arena: int | None
    seconds: float
    numbers: tuple[Any, ...]
    itself: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A contender that prepares itself, or waits for its turns, and the bytes of its budget."""

    process: Any
    turns: Connection
    budget: int | None

    def seconds(self) -> float:
        """Run a turn and return the mean seconds of its steps."""
        self.turns.send(True)
        found: float = self.turns.recv()
        return found


def rows_of(models: Sequence[str], contenders: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """Return the rows of all models: contenders get ready side by side, and then run in turns, one model at a time."""
    waiting: dict[tuple[str, str], Waiting] = {}
    ready: dict[tuple[str, str], Measured] = {}
    failed: dict[tuple[str, str], str] = {}
    ends = time.monotonic() + options.seconds
    later = [(m, c) for m in models for c in contenders if CONTENDERS[c].share is not None]
    for model in models:
        for name in contenders:
            if CONTENDERS[name].share is None:
                waiting[model, name] = _started(model, name, options, None)
    try:
        while time.monotonic() < ends and (later or len(ready) + len(failed) < len(waiting)):
            for key, one in waiting.items():
                if key not in ready and key not in failed and one.turns.poll(0.02):
                    _receive(key, one, ready, failed)
            for model, name in list(later):
                base = CONTENDERS[name].of
                if (model, base) in ready:
                    later.remove((model, name))
                    budget = int(CONTENDERS[name].share * ready[model, base].peak)  # type: ignore[operator]
                    waiting[model, name] = _started(model, name, options, budget)
                elif (model, base) in failed or (model, base) not in waiting:
                    later.remove((model, name))
                    failed[model, name] = f"{base} did not run"
        for key in later + [key for key in waiting if key not in ready and key not in failed]:
            failed[key] = f"not ready after {options.seconds:g} s"
        _end([one for key, one in waiting.items() if key not in ready])
        running = {model: {name: waiting[one, name] for one, name in ready if one == model} for model in models}
        seconds = {model: in_turns(running[model], options.rounds) for model in models if running[model]}
        gone = [(model, name) for model, name in ready if name not in seconds[model]]
        failed |= dict.fromkeys(gone, ENDED)
        ready = {key: one for key, one in ready.items() if key not in gone}
        return [
            _row((model, name), ready, seconds.get(model, {}), failed, waiting)
            for model in models
            for name in contenders
        ]
    finally:
        _end(list(waiting.values()))


def _receive(key: tuple[str, str], one: Waiting, ready: dict[Any, Measured], failed: dict[Any, str]) -> None:
    try:
        found: Measured | str = one.turns.recv()
    except EOFError:
        found = ENDED
    print(f"{' '.join(key)}: {found if isinstance(found, str) else 'ready'}", file=sys.stderr, flush=True)
    if isinstance(found, str):
        failed[key] = found
    else:
        ready[key] = found


def _started(model: str, name: str, options: argparse.Namespace, budget: int | None) -> Waiting:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_turns, args=(theirs, (model, name), options.size, options.device, budget))
    process.daemon = False
    process.start()
    theirs.close()
    return Waiting(process=process, turns=ours, budget=budget)


def _end(some: Sequence[Waiting]) -> None:
    for one in some:
        one.process.kill()
    for one in some:
        one.process.join()


def _take_turns(turns: Connection, key: tuple[str, str], size: str, device: str, budget: int | None) -> None:
    """Prepare a contender, send its figures, and then run steps whenever they are asked for."""
    try:
        step, measured = _ready(*key, size, device, budget)
    except (MemplanError, RuntimeError, TypeError) as error:
        traceback.print_exc()
        turns.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return
    turns.send(measured)
    while turns.recv():
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(_STEPS):
            step.run()
            _synchronize(device)
        turns.send((time.perf_counter() - started) / _STEPS)


def _ready(model: str, name: str, size: str, device: str, budget: int | None) -> tuple[Any, Measured]:
    torch.backends.cudnn.deterministic = True
    contender = CONTENDERS[name]
    began = time.perf_counter()
    torch.zeros(1, device=device)
    before = _bytes(device, "current")
    own, inputs = MODELS[model](size)
    own = own.to(device)
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    step = step_of(contender.compile(own, inputs, budget), own, inputs)
    for _ in range(1 + WARM_UP):
        step.run()
    _settle(step, device)
    workspaces = _workspaces(device)
    step.run()
    _settle(step, device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    step.run()
    _synchronize(device)
    peak = _bytes(device, "peak") - before - workspaces
    first, second = (_numbers(step, own) for _ in range(2))
    _settle(step, device)
    itself = max(float(abs(a - b).max()) for a, b in zip(first, second, strict=True))
    arena = None if step.plan is None else int(step.plan.arena_size)
    seconds = time.perf_counter() - began
    return step, Measured(peak=peak, arena=arena, seconds=seconds, numbers=second, itself=itself)


def _numbers(step: Any, own: torch.nn.Module) -> tuple[Any, ...]:
    torch.manual_seed(7)
    loss = step.run()
    found = (loss, *(p.grad for p in own.parameters() if p.grad is not None))
    return tuple(one.detach().cpu().clone().numpy() for one in found)


def _settle(step: Any, device: str) -> None:
    step.clear()
    gc.collect()
    _synchronize(device)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _bytes(device: str, which: str) -> int:
    return 0 if device == "cpu" else int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def _workspaces(device: str) -> int:
    """Free the workspaces of cuBLAS, and return their bytes; the next step makes them again."""
    held = _bytes(device, "current")
    if device != "cpu":
        torch._C._cuda_clearCublasWorkspaces()
    return held - _bytes(device, "current")


def _row(
    key: tuple[str, str],
    ready: Mapping[Any, Measured],
    seconds: Mapping[str, Sequence[float]],
    failed: Mapping[Any, str],
    waiting: Mapping[Any, Waiting],
) -> Row:
    model, name = key
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "model": model, "contender": name}
    if (model, name) not in ready:
        return {**row, "failed": failed[model, name]}
    one, budget = ready[model, name], waiting[model, name].budget
    row |= {
        "ms": statistics.median(seconds[name]) * 1e3,
        "peak_mb": one.peak / 1e6,
        "budget_mb": None if budget is None else budget / 1e6,
        "arena_mb": None if one.arena is None else one.arena / 1e6,
        "ready": one.seconds,
        "itself": f"{one.itself:.1e}" if one.itself else None,
    }
    against = CONTENDERS[name].against
    if (model, against) in ready:
        row["bits"] = bits(one.numbers, ready[model, against].numbers, against)
    if (model, "inductor") in ready:
        base = zip(seconds["inductor"], seconds[name], strict=True)
        row |= {
            "speed": statistics.median(a / b for a, b in base),
            "peak_ratio": one.peak / ready[model, "inductor"].peak if one.peak else None,
        }
    return row


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device != "cpu" else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    parser = parser_of("fused-cuda", __doc__.splitlines()[0], list(MODELS), ["gpt2", "llama", "bert", "vit", "resnet"])
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=150.0, help="for contenders to get ready")
    parser.add_argument("--contenders", type=names(list(CONTENDERS)), help="comma-separated", default=list(CHOSEN))
    options = parser.parse_args(arguments)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # for each of many processes
    rows = rows_of(options.models, options.contenders, options)
    table = Table(
        name=options.output,
        title=f"Fused kernels, {options.size} models, {_device_name(options.device)}",
        columns=COLUMNS,
        rows=rows,
        settings={"size": options.size, "rounds": options.rounds, "device": _device_name(options.device)},
        notes=(
            "Peak: bytes asked of torch's allocator (parameters, inputs, gradients, arena, all else), without the"
            " workspaces of cuBLAS. MB = 10^6 bytes. cudnn.deterministic is on; TF32 is as torch has it.",
            "Off itself: the largest difference between two equal steps of the contender.",
            f"Command: python -m benchmarks.fused_cuda --models {','.join(options.models)} --size {options.size}"
            f" --rounds {options.rounds}",
        ),
    )
    print(write(table, options.directory).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
