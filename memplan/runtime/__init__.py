"""The runtime: a plan and a traced step -> a module that runs in exactly that arena.

In the order in which data flows: `arena.py`, `bind.py` and `trial.py` (which callable runs each op),
`codegen.py` and `program.py` (straight-line Python), `slots.py` and `signature.py` (what a call may bring),
`step.py` and `runner.py` (autograd), `module.py` (`compile`). `guards.py` and `measure.py` stand beside.
"""

from __future__ import annotations

from memplan.runtime.module import CompiledModule, compile

__all__ = ["CompiledModule", "compile"]
