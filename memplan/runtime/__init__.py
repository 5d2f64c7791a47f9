"""The runtime: a plan and a traced step -> a module that runs in exactly that arena.

In the order in which data flows: `copies.py` (what copies to the host and back), `arena.py`, `bind.py`,
`transfers.py` and `trial.py` (which callable runs each op),
`codegen.py` and `program.py` (straight-line Python), `slots.py` and `signature.py` (what a call may bring),
`step.py` and `runner.py` (autograd), `select.py` and `module.py` (`compile`), `whole_step.py` (`compile_step`).
`guards.py`, `measure.py` and `recorded.py` (`record`) stand beside.
"""

from __future__ import annotations

from memplan.runtime.module import CompiledModule, compile
from memplan.runtime.profiling import profile
from memplan.runtime.recorded import Recording, record
from memplan.runtime.whole_step import CompiledStep, compile_step

__all__ = ["CompiledModule", "CompiledStep", "Recording", "compile", "compile_step", "profile", "record"]
