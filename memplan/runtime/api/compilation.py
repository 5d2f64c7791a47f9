"""`Compilation`: the programs of a compiled module, and how further ones are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memplan.core.plan import Plan
from memplan.errors import InvalidShapes
from memplan.runtime.api.builder import Builder, forget_example
from memplan.runtime.api.select import Selector
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.measurement import Measurement
from memplan.runtime.profiling.profile_guided import ProfileGuide

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan


@dataclass(slots=True, kw_only=True)
class Compilation:
    """A model that was compiled for an example: its programs, and how further ones are made.

    `options` are as they were asked for, and `given` is the plan that was passed; the options of further programs are
    in `builder`. `plan` is the plan of the example, or the symbolic one's for its shapes. `guide` is there while steps
    are measured, and `measurements` are what was measured so far. `backward_on_demand`: as in `Selector`.
    """

    options: CompileOptions
    given: Plan | None
    builder: Builder
    selector: Selector
    plan: Plan
    backward_on_demand: bool
    symbolic: SymbolicPlan | None = None
    guide: ProfileGuide | None = None
    measurements: Sequence[Measurement] = ()

    @property
    def base_options(self) -> CompileOptions:
        """The options of programs that are made again, with the budgets of a given plan."""
        return self.options if self.given is None else self.builder.options

    def measured(self, runner: Runner, current: list[torch.Tensor]) -> tuple[Runner, list[torch.Tensor]]:
        """Return the program of a step and its parameters: another program if enough of this one was measured."""
        guide = self.guide
        if guide is None or runner is not self.selector.main:
            return runner, current
        if guide.runner is not runner:  # it was made anew in a larger arena: what was measured is gone
            self.guide = None
            forget_example(runner)
        elif guide.ready:
            runner = self._advance(guide)
            current = runner.current()
        return runner, current

    def _advance(self, guide: ProfileGuide) -> Runner:
        """Return the runner that the guide chooses, and use it from now on."""
        try:
            runner = self.selector.main = guide.next_runner()
        finally:
            if guide.done:  # no other plan is tried
                self.guide = None
                forget_example(self.selector.main)
        self.plan = runner.plan
        if guide.measurements:
            self.builder.options = replace(self.builder.options, costs=guide.measurements[-1].costs)
        return runner


def compile_example(
    builder: Builder,
    options: CompileOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    backward_on_demand: bool,
    evaluates: bool = False,
    given: Plan | None = None,
) -> Compilation:
    """Return the compilation of an example: its program is built now, and others at their first call.

    `options` are those that `builder` was made with. `backward_on_demand` and `evaluates`: as in `Selector`.
    """
    if options.dynamic_shapes is not None:
        return _compile_shapes(builder, options, args, kwargs, train, backward_on_demand, given)
    guide = None
    if builder.measures:
        main, guide = builder.guided(args, kwargs, train)
    else:
        main = builder.build(args, kwargs, train, given)
    return Compilation(
        options=options,
        given=given,
        builder=builder,
        selector=Selector(builder, main, backward_on_demand=backward_on_demand, evaluates=evaluates),
        plan=main.plan,
        backward_on_demand=backward_on_demand,
        guide=guide,
        measurements=[] if guide is None else guide.measurements,
    )


def _compile_shapes(  # noqa: PLR0917
    builder: Builder,
    options: CompileOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    train: bool,
    backward_on_demand: bool,
    given: Plan | None,
) -> Compilation:
    """Return the compilation for every shape within `dynamic_shapes`."""
    from memplan.runtime.api.shapes import ShapedSelector

    if given is not None:
        hint = "leave plan= out: the symbolic plan is made when compiling"
        raise InvalidShapes("a plan is for one shape", where="plan with dynamic_shapes", hint=hint, see="one-shape")
    selector = ShapedSelector(builder, args, kwargs, train=train, backward_on_demand=backward_on_demand)
    return Compilation(
        options=options,
        given=None,
        builder=builder,
        selector=selector,
        plan=selector.main.plan,
        symbolic=selector.family.plan,
        backward_on_demand=backward_on_demand,
    )
