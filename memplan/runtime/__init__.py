"""The runtime: a plan and a traced step -> a module that runs in exactly that arena.

In the order in which data flows: `copies.py` (what copies to the host and back: `copy_threads.py`, `copy_streams.py`),
`arena.py`, `kernel_selection.py`, `convolve.py`, `transfers.py` and `trial.py` (which callable runs each op), `codegen.py` and
`program.py` (straight-line Python), `module_state_guards.py`, `input_guards.py` and `layout_guards.py` (what a call may bring), `autograd_step.py` and
`runner.py` (autograd), `builder.py` (trace, plan, assemble), `select.py`, `shapes.py` and `module.py` (`compile`),
`step_builder.py` and `whole_step.py` (`compile_step`). `measurement.py`, `op_timer.py` and `profile_guided.py` measure steps and
plan them anew; `live_bytes.py`, `saved_tensors.py`, `on_demand_offload.py` and `eager_step.py` run what has no plan. `hooks.py` and
`tracker.py` (what a step does, seen while it does it), `sanitizers.py`, `measure.py` and `recorded.py` (`record`) stand
beside.
"""

from __future__ import annotations

from memplan.runtime.api.module import CompiledModule, compile
from memplan.runtime.api.profiling import profile
from memplan.runtime.api.whole_step import CompiledStep, compile_step
from memplan.runtime.debug.hooks import StepEvent
from memplan.runtime.debug.tracker import Tracker
from memplan.runtime.recording.recorded import Recording, install_allocator, record

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
