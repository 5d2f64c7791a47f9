"""Runs the calls of a compiled module that none of its programs is for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedGraph
from memplan.runtime.api.compilation import Compilation
from memplan.runtime.api.mismatch import UnplannedCalls
from memplan.runtime.api.select import RunsEagerly
from memplan.runtime.api.several_graphs import SeveralGraphs, can_be_several
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, offload_for, run_within
from memplan.runtime.options import CompileOptions
from memplan.trace.capture.refusals import why_it_breaks

_log = logging.getLogger("memplan")
_APART = "%s: a kind of call is planned as several graphs, because one cannot hold it: %s; .plan is that of the others"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Fallbacks:
    """Runs calls that no program is for: as several graphs, or on the original model, as `on_mismatch` says.

    Attributes:
        several: The graphs of calls that one graph cannot hold; None before the first such call.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.
    """

    def __init__(
        self,
        original: nn.Module,
        options: CompileOptions,
        train: bool | None,
        hooks: Hooks,
        give_back_arena: Callable[[], None],
    ) -> None:
        """Make those of a module. `give_back_arena` is called before the original runs: its arena is idle then."""
        self._give_back_arena = give_back_arena
        self.several: SeveralGraphs | None = None
        self.passive: OnDemandOffload | None = None
        self._original, self._options, self._train, self._hooks = original, options, train, hooks
        self._unplanned = UnplannedCalls(original)
        self._warned: set[str] = set()

    def as_several_graphs(  # noqa: PLR0917
        self,
        differs: MemplanError,
        refused: UnsupportedGraph,
        made: Compilation,
        make_way: Callable[[], bool],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run a call that one graph cannot hold: as several graphs if that helps, else without a plan.

        Args:
            differs: How the call differs from the example; `refused` itself if it is in another mode.
            refused: Why one graph cannot hold it.
            made: The programs of other calls.
            make_way: Frees their arena, and returns whether it did.
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.
        """
        options = self._options
        if options.fullgraph and differs is refused:
            raise refused
        several = options.on_mismatch == "replan" and not options.fullgraph and can_be_several(refused, options)
        if not several or not (make_way() or not options.has_budget):
            return self.without_plan(differs, refused, made, args, kwargs)
        if self.several is None:
            _log.warning(_APART, made.plan.model, why_it_breaks(refused))
            self.several = SeveralGraphs(self._original, made.base_options, self._hooks)
            made.builder.make_room = self.several.make_room
        with torch.no_grad() if self._train is False else contextlib.nullcontext():
            return self.several(*args, **kwargs)

    def without_plan(
        self, differs: MemplanError, refused: MemplanError | None, made: Compilation, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run the original for a call, or raise `differs`, as `on_mismatch` says.

        `refused`: why there is no program; None if there are too many.
        """
        how, device = self._options.on_mismatch, made.selector.main.traced.device
        refuses = isinstance(differs, BudgetInfeasible) or differs.see == "no-numbers"
        if how == "error" or (refuses and how != "passive"):
            raise differs
        self._give_back_arena()
        if how == "passive":
            self.passive = offload_for(differs, made.plan, device)
            return run_within(self.passive, self._original, args, kwargs)
        if how == "eager":
            return self._original(*args, **kwargs)
        return self._unplanned.run(differs, refused, made.plan, device, args, kwargs)

    def eagerly(self, why: RunsEagerly, made: Compilation, args: Args, kwargs: Kwargs) -> Any:
        """Run the original, and warn once: the call needs autograd, and the module was compiled in eval mode."""
        if str(why) not in self._warned:
            self._warned.add(str(why))
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", made.plan.model, why, how)
        self._give_back_arena()
        return self._original(*args, **kwargs)

    def uncompiled(self, refused: MemplanError, args: Args, kwargs: Kwargs) -> Any:
        """Run the original of a copy that cannot be compiled since its model was changed, or raise `refused`."""
        options = self._options
        if options.on_mismatch != "eager":
            planned = options.on_mismatch != "replan" or options.fullgraph or options.has_budget
            if planned or refused.see == "no-numbers":
                raise refused
            if "copy" not in self._warned:
                self._warned.add("copy")
                what = "%s: a copy of a compiled module runs eagerly: neither the example nor this call is planned: %s"
                _log.warning(what, type(self._original).__name__, refused.summary)
        return self._original(*args, **kwargs)
