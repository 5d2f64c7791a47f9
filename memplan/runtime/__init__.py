"""The runtime: takes a plan and a traced step, and returns a module that runs in exactly the planned arena.

In: a `Plan` and a `TracedGraph`. Out: a `CompiledModule` or `CompiledStep`. Start at `api/` (what users call), and
`builder.py`, which plans, tries and assembles all programs; `programs.py` keeps them, one for each kind of call (what
happens when the batch size changes). A call goes through `guards/` (is it the step that was planned?) and `execute/`
(autograd, generated code); `memory/` holds the arena, `kernels.py` chooses the callable of each op, `codegen.py`
generates the code of the step. Beside them: `copies.py`, `profiling/`, `debug/`, `recorded.py`, and `dynamo/` (the
torch.compile backend).
"""

from __future__ import annotations

from memplan.runtime.api.compile import compile
from memplan.runtime.api.compile_step import compile_step
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.api.compiled_step import CompiledStep
from memplan.runtime.debug.hooks import StepEvent, Tracker
from memplan.runtime.recorded import Recording, install_allocator, record

__all__ = [
    "CompiledModule",
    "CompiledStep",
    "Recording",
    "StepEvent",
    "Tracker",
    "compile",
    "compile_step",
    "install_allocator",
    "record",
]
