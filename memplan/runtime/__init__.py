"""The runtime: a plan and a traced step -> a module that runs in exactly that arena.

In the order in which data flows: `copies.py` (what copies to the host and back: `copy_threads.py`, `copy_streams.py`),
`arena.py`, `bind.py`, `convolve.py`, `transfers.py` and `trial.py` (which callable runs each op), `codegen.py` and
`program.py` (straight-line Python), `slots.py`, `signature.py` and `alike.py` (what a call may bring), `step.py` and
`runner.py` (autograd), `builder.py` (trace, plan, assemble), `select.py`, `shapes.py` and `module.py` (`compile`),
`step_builder.py` and `whole_step.py` (`compile_step`). `measurement.py`, `meter.py` and `guided.py` measure steps and
plan them anew; `living.py`, `saved.py`, `passive.py` and `passive_step.py` run what has no plan. `hooks.py` and
`tracker.py` (what a step does, seen while it does it), `guards.py`, `measure.py` and `recorded.py` (`record`) stand
beside.
"""

from __future__ import annotations

from memplan.runtime.hooks import StepEvent
from memplan.runtime.module import CompiledModule, compile
from memplan.runtime.profiling import profile
from memplan.runtime.recorded import Recording, install_allocator, record
from memplan.runtime.tracker import Tracker
from memplan.runtime.whole_step import CompiledStep, compile_step

__all__ = [
    "CompiledModule",
    "CompiledStep",
    "Recording",
    "StepEvent",
    "Tracker",
    "compile",
    "compile_step",
    "install_allocator",
    "profile",
    "record",
]
