"""The part of the callbacks that is the same for all trainers: compiling in place, figures, and plan files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from memplan.core.files import write_atomic
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import UnsupportedCall
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.dynamo.backend import Backend

if TYPE_CHECKING:
    import os

    from memplan.runtime.options import RunKeywords

_log = logging.getLogger("memplan")


class PlannedTraining:
    """The modules that one training run has compiled, and the plans of their graphs.

    Args:
        save_plans: A folder for the plan of each graph (`graph-0.json`, ...), and for the picture of the one with the
            largest total (`largest.html`); None writes none.
        options: The options of `memplan.Backend`: `budget`, `policy`, ...

    Attributes:
        backend: The backend that compiles.

    Example:
        ```python
        training = PlannedTraining(save_plans=None, budget="8GiB")
        training.compile([model])
        ```
    """

    def __init__(self, *, save_plans: str | os.PathLike[str] | None, **options: Unpack[RunKeywords]) -> None:
        self.backend = Backend(**options)
        self._folder = None if save_plans is None else Path(save_plans)
        self._compiled: list[nn.Module] = []
        self._reported = False

    def compile(self, modules: Iterable[nn.Module | None]) -> None:
        """Compile modules in place, as `module.compile(backend=...)`; those that it has compiled already stay so.

        Raises `UnsupportedCall` for a module that `memplan.compile` has made, which has its plan.
        """
        for module in modules:
            if module is None:
                what = "there is no model"
                raise UnsupportedCall(what, where="model", hint="pass the trainer's model", see="not-a-module")
            if isinstance(module, CompiledModule):
                what = "is a module that memplan.compile made, which has its plan already"
                hint = "give the trainer the original model, or leave the callback out"
                raise UnsupportedCall(what, where=type(module).__name__, hint=hint, see="trainers")
            if all(module is not known for known in self._compiled):
                compile_in_place(module, self.backend)
                self._compiled.append(module)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each graph that has run so far; those of one graph are for the shapes that it has seen."""
        return tuple(plan for graph in self.backend.graphs for plan in graph.plans)

    def report(self) -> dict[str, float]:
        """Return the figures of now, bytes and the number of graphs: none before something has run.

        The first time, log the plans, and write them.
        """
        plans = self.plans
        if not plans:
            return {}
        largest = max(plans, key=lambda plan: plan.total)
        if not self._reported:
            self._reported = True
            self.backend.place()
            _log.info("training runs in one arena of %s; graphs: %d", format_bytes(self.backend.arena_size), len(plans))
            for i, plan in enumerate(plans):
                sizes = map(format_bytes, (plan.total, plan.arena_size, plan.max_live))
                _log.info("graph %d, %s: total %s, arena %s by itself, max live %s", i, plan.model, *sizes)
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    plan.save(self._folder / f"graph-{i}.json")
            if self._folder is not None:
                write_atomic(self._folder / "largest.html", largest.to_html())
        figures = {
            "memplan/planned_bytes": float(largest.total),
            "memplan/arena_bytes": float(self.backend.arena_size),
            "memplan/graphs": float(len(self.backend.graphs)),
        }
        device = next((p.device for module in self._compiled for p in module.parameters()), torch.device("cpu"))
        for name in ("allocated", "reserved"):
            peak = getattr(torch.get_device_module(device), f"max_memory_{name}", None)  # the CPU has none
            if peak is not None:
                figures[f"memplan/{name}_bytes"] = float(peak(device))
        return figures


class ShowsPlans:
    """The properties of a callback that show what its training compiles."""

    _training: PlannedTraining

    @property
    def backend(self) -> Backend:
        """The backend that compiles, with its hooks and graphs."""
        return self._training.backend

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the graphs that have run."""
        return self._training.plans


def compile_in_place(module: nn.Module, backend: Callable[..., Any]) -> None:
    """Have the calls of a module run by a backend of `torch.compile`; its class and its attributes stay as they are.

    `nn.Module.compile` does the same, but for the modules of `torch.nn` themselves (`nn.Sequential`), whose code dynamo
    does not read by itself: it leaves those as they are without a word.
    """
    call: Callable[..., Any] = module._call_impl

    def planned_call(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # dynamo counts and limits what it compiles by code object, and plans have its name
    planned_call.__code__ = planned_call.__code__.replace(co_name=type(module).__name__)
    module._compiled_call_impl = torch.compile(planned_call, backend=backend)
