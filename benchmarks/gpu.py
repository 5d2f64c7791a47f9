"""Training steps at real sizes on one GPU: peaks and seconds of memplan beside torch, in one run.

    python -m benchmarks.gpu --models gpt2,bert --contenders eager,compile,memplan,step --output gpu.json

A step is forward, backward and a fused AdamW update. Each contender is a process of its own; all of them prepare side
by side, because a GPU may be there for minutes only, and then run steps in turns. A contender's name is what runs the
step, and its options after "+": `memplan+b0.7`.

Peaks are those of the allocator (`torch.cuda.max_memory_allocated` and `_reserved`), with the optimizer's state; what
the plan says stands beside them. `--tiny --device cpu` rehearses all of it without a GPU, and then there are no peaks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CONTENDERS = "eager,compile,memplan,step,memplan+aten"
_GB = 1e9
_WARM = 25  # steps before anything is measured; with `costs=measure`, plans are made anew meanwhile
_COLUMNS = {
    "alloc": "GB",
    "reserved": "GB reserved",
    "ms": "ms",
    "ratio": "to compile",
    "first_alloc": "GB, first call",
    "first_reserved": "GB reserved, first call",
    "first_s": "s to first step",
    "planned": "GB, plan",
    "overhead": "predicted overhead",
    "evicted": "evictions",
}


# -- one contender, in its own process ---------------------------------------------------------------------


def stepper(contender: str, model: Any, inputs: Sequence[Any], optimizer: Any) -> tuple[Callable[[], Any], Any]:
    """Return what runs a training step and returns its loss, and what memplan made (None for others).

    Args:
        contender: "eager", "compile" (torch.compile), "memplan" (`memplan.compile`) or "step"
            (`memplan.compile_step`), and options after "+": "ckpt" (activation checkpoints per block), "knob0.5"
            (torch's `activation_memory_budget`), "inductor.force_shape_pad=1" (a setting of Inductor's), "b0.7" (a
            budget as a share), "G7.4" (one in GiB), and any option of memplan's as `name=value`; "aten" and "inductor"
            are kernels.
        model: The model with its loss.
        inputs: Its batch.
        optimizer: The optimizer.
    """
    import torch

    base, *options = contender.split("+")
    keywords = dict(keyword for option in options if (keyword := _keyword(option, model)))

    def loop(call: Callable[..., Any]) -> Callable[[], Any]:
        """Return a step of plain training code around a call of the model."""

        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = call(*inputs)
            loss.backward()
            optimizer.step()
            return loss

        return step

    if base == "eager":
        return loop(model), None
    if base == "compile":
        return loop(torch.compile(model, dynamic=False)), None
    import memplan

    if base == "memplan":
        compiled = memplan.compile(model, tuple(inputs), **keywords)
        return loop(compiled), compiled
    if base == "step":
        whole = memplan.compile_step(model, optimizer, lambda loss: loss, tuple(inputs), **keywords)
        return lambda: whole(*inputs), whole
    raise ValueError(f"there is no contender {base!r}")


def _keyword(option: str, model: Any) -> tuple[str, Any] | None:
    """Return the keyword of memplan's that an option of a contender stands for; None for an option of torch, which is
    set."""
    name, _, given = option.partition("=")
    if option == "ckpt":
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return None
    if option.startswith("knob"):
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = float(option[4:])
        return None
    if name.startswith("inductor."):
        import torch._inductor.config as inductor

        setattr(inductor, name.removeprefix("inductor."), bool(int(given)))
        return None
    if option in ("aten", "inductor"):
        return "kernels", option
    if given:
        return name, given
    if option[0] in "bG":
        return "budget", f"{option[1:]}GiB" if option[0] == "G" else float(option[1:])
    raise ValueError(f"there is no option {option!r}")


def child(contender: str, name: str, device: str, *, tiny: bool, steps: int, dump: Path | None) -> None:
    """Prepare one contender, print what it needs as JSON, and run `steps` steps for each line that is read."""
    import torch

    from benchmarks.real_sizes import MODELS

    began, there = time.perf_counter(), device == "cuda"
    torch.manual_seed(0)

    def wait() -> None:
        """Wait for the device."""
        if there:
            torch.cuda.synchronize()

    def peaks(prefix: str = "") -> dict[str, float]:
        """Return the allocator's peaks, in GB."""
        if not there:
            return {}
        taken, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {f"{prefix}alloc": taken / _GB, f"{prefix}reserved": held / _GB}

    model, inputs = MODELS[name](device, tiny=tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step, made = stepper(contender, model, inputs, optimizer)
    losses = [float(step())]
    wait()
    found: dict[str, Any] = {"first_s": time.perf_counter() - began, **peaks("first_")}
    losses += [float(step()) for _ in range(_WARM)]
    if there:
        wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses.append(float(step()))
    wait()
    found |= {**peaks(), "losses": losses}
    if made is not None:
        plan = made.plan
        held = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
        beside = 0 if contender.startswith("step") else held
        kept = plan.eviction
        found["planned"] = (plan.total + beside) / _GB
        found["kernels"] = "inductor" if any(op.target.startswith("inductor.") for op in plan.graph.ops) else "aten"
        if kept is not None:
            found |= {"overhead": kept.overhead, "evicted": len(plan.evictions), "seconds": kept.seconds}
        if dump is not None:
            plan.save(dump / f"{name}-{contender}.json")
            for number, one in enumerate(made.measurements):
                one.plan.save(dump / f"{name}-{contender}-{number}.json")
                one.costs.save(dump / f"{name}-{contender}-{number}.costs.json")
    _say(found)
    for _ in sys.stdin:
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        _say({"ms": (time.perf_counter() - began) / steps * 1e3})


def _say(what: Mapping[str, Any]) -> None:
    sys.__stdout__.write(f"@@{json.dumps(what)}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


# -- all contenders ----------------------------------------------------------------------------------------


class Contender:
    """A process that prepares a contender of a model, and then runs its steps when it is told to."""

    def __init__(self, model: str, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.model, self.name = model, name
        self.result: dict[str, Any] | None = None
        self.times: list[float] = []
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", name, "--models", model]
        command += ["--device", options.device, "--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
        command += [] if options.dump is None else ["--dump", str(options.dump)]
        cache = folder / f"{model}-{name}"
        cache.mkdir()
        self._log = (folder / f"{model}-{name}.log").open("w+")
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, text=True, env={**env, "OMP_NUM_THREADS": "2"}, **pipes)
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                self._lines.put(json.loads(line[2:]))
        self._process.wait()
        self._lines.put({"error": self._end_of_log()})

    def _end_of_log(self) -> str:
        self._log.flush()
        self._log.seek(0)
        lines = [line.rstrip() for line in self._log if line.strip()]
        return "\n".join(lines[-12:])[-1500:] or f"ended with {self._process.returncode}"

    def ready(self, seconds: float) -> bool:
        """Return whether it is prepared, or has failed, within some seconds."""
        if self.result is None:
            with contextlib.suppress(queue.Empty):
                self.result = self._lines.get(timeout=seconds)
        return self.result is not None

    @property
    def failed(self) -> bool:
        """Whether it has not been prepared."""
        return self.result is None or "error" in self.result

    def run(self, seconds: float) -> None:
        """Run its steps once, and keep their time; one that does not answer within some seconds has failed."""
        assert self.result is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            found = self._lines.get(timeout=seconds)
        except (OSError, queue.Empty) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        if "ms" in found:
            self.times.append(found["ms"])
        else:
            self.result["error"] = found["error"]

    def end(self) -> None:
        """End the process."""
        if not self._log.closed:
            self._process.kill()
            self._reader.join()
            for pipe in (self._process.stdin, self._process.stdout, self._log):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not read any more
                        pipe.close()


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of each model: contenders prepare side by side, and run in turns."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="memplan-gpu-"))
    asked = [(model, name) for model in options.models for name in options.contenders]
    asked += [tuple(pair.split(":", 1)) for pair in options.also]
    running: list[Contender] = []
    waiting = list(asked)
    try:
        while time.monotonic() - began < options.ready:
            preparing = sum(not one.ready(0.01) for one in running)
            if not waiting and not preparing:
                break
            free = max(options.parallel - preparing, 0)
            running += [Contender(*pair, options, folder) for pair in waiting[:free]]
            del waiting[:free]
        there = [one for one in running if not one.failed]
        for one in running:  # what is not ready would disturb the others
            if one.failed:
                one.end()
        for turn in range(options.rounds):
            for one in there[turn % max(len(there), 1) :] + there[: turn % max(len(there), 1)]:
                if not one.failed:
                    one.run(60)
        for model in dict.fromkeys(model for model, _ in asked):
            yield {"model": model, "rows": list(_rows([one for one in running if one.model == model]))}
    finally:
        for one in running:
            one.end()


def _rows(contenders: Sequence[Contender]) -> Iterator[dict[str, Any]]:
    times = {one.name: statistics.median(one.times) for one in contenders if one.times}
    for one in contenders:
        found = one.result or {"error": "not ready in time"}
        row = {"contender": one.name, **found}
        if one.name in times:
            row |= {"ms": times[one.name], "all_ms": one.times}
            if "compile" in times:
                row["ratio"] = times[one.name] / times["compile"]
        yield row


def to_markdown(results: Mapping[str, Any]) -> str:
    """Return the tables of a run: one for each model, contenders in rows."""
    said = [f"{results['device']}, torch {results['torch']}, {results['date']}."]
    for of in results["models"]:
        shown = [key for key in _COLUMNS if any(row.get(key) is not None for row in of["rows"])]
        said += ["", f"### {of['model']}", "", f"| | {' | '.join(_COLUMNS[key] for key in shown)} |"]
        said.append(f"|---|{'---:|' * len(shown)}")
        for row in of["rows"]:
            cells = " | ".join(_cell(row.get(key)) for key in shown)
            why = str(row.get("error", "")).strip().splitlines()[:1]
            said.append(f"| {row['contender']}{': ' + why[0][:80] if why else ''} | {cells} |")
    return "\n".join(said) + "\n"


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the results; the exit status is 1 if a contender has failed."""
    import torch

    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "llama1b", "bert", "resnet"])
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=CONTENDERS.split(","))
    parser.add_argument("--also", action="append", default=[], help="one more: MODEL:CONTENDER")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="models of a few kilobytes, to rehearse")
    parser.add_argument("--ready", type=float, default=240, help="seconds after which nothing is waited for")
    parser.add_argument("--parallel", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="that prepare at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each contender in a round")
    parser.add_argument("--dump", type=Path, help="folder where plans are saved")
    parser.add_argument("--output", type=Path, help="JSON file of the results; its tables go beside it as .md")
    options = parser.parse_args(arguments)
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
    if options.child:
        (model,) = options.models
        try:
            child(options.child, model, options.device, tiny=options.tiny, steps=options.steps, dump=options.dump)
        except Exception as error:  # whatever a contender raises is its row
            _say({"error": f"{type(error).__name__}: {error}"[:1500]})
        return 0
    device = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU, as a rehearsal"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "date": str(datetime.date.today())}
    results["models"] = list(measured(options))
    text = to_markdown(results)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(any("error" in row for of in results["models"] for row in of["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
