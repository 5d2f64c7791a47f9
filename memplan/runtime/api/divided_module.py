"""`DividedModule`, which `memplan.compile` returns for a model that is divided among ranks, or copied to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from memplan.core.plan import Plan
from memplan.distributed.agreement import Agreement
from memplan.distributed.parallelism import Parallelism
from memplan.distributed.step_ranks import ParallelGuards, StepRanks, batch_lines, option_lines, require_call_options
from memplan.errors import InputMismatch, UnsupportedCall
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.api.select import MAX_PROGRAMS, TooManyPrograms
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.options import CompileOptions


class DividedModule(CompiledModule):
    """One rank's part of a model that several ranks run together, in one planned arena. `memplan.compile` makes it.

    It is called like the model of `fully_shard`, `parallelize_module` or `DistributedDataParallel`, whose hooks it does
    not call: their collectives are in its plans. After a backward, the parameters have the gradients that they have
    under torch: a DTensor of this rank's part, or the average over the ranks.

    Example:
        ```python
        compiled = memplan.compile(fully_shard(model), inputs)
        compiled(inputs).square().mean().backward()
        optimizer.step()
        ```
    """

    _guards: ParallelGuards
    _together: StepRanks
    _known: list[tuple[str, ...]]

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parallelism: Parallelism,
        options: CompileOptions,
        train: bool | None = None,
        given: Plan | None = None,
    ) -> None:
        """Compile the model for the example inputs, together with the other ranks."""
        super().__init__(model, options=replace(options, gradients="outside"), train=train, given=given, together=True)
        calls, asked = self._calls, self._calls.options
        with Agreement(parallelism.group) as ranks:
            require_call_options(options)
            guards = ParallelGuards(model)
            calls.compile(args, kwargs)
            main = calls.selector.main
            lines = [f"{key} {version}" for key, version in sorted(main.plan.versions.items())]
            lines += [*option_lines(asked), f"plan {'new' if given is None else 'given'}"]
            lines += batch_lines((args, kwargs)) if options.has_budget else []
            name = ranks.compare([*lines, *parallelism.lines, *_collectives(main)])
        together = StepRanks(parallelism.group)
        together.begin(name, [_collectives(main)])
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(_guards=guards, _together=together, _known=[_collectives(main)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step of this rank, with the arguments of the model, while the other ranks run theirs.

        Args:
            args: The positional arguments: this rank's part of the batch.
            kwargs: The keyword arguments.

        Returns:
            What the model returns.

        Raises:
            InputMismatch: With `on_mismatch="error"`, the call, or the model, differs from what was compiled.
            UnsupportedCall: There are as many programs as are kept, or torch's modules have options that are not
                followed.
            StaleActivationsError: An earlier call waits for its backward.
            CollectiveFailed: Another rank has failed, or left the others.

        Example:
            ```python
            compiled(inputs).sum().backward()
            ```
        """
        transforms.refuse((args, kwargs), self)
        with self._together:
            self._guards.check()
            runner, leaves = self._program(args, kwargs)
            current = runner.current()
            self._agree(runner)
            return runner(leaves, current, training=runner.traced.training)

    @property
    def passive(self) -> None:
        """None: no call of several ranks runs without a plan."""
        return None

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """Return the program of a call, and the leaves that it takes."""
        selector = self._calls.selector
        try:
            return selector.select(args, kwargs)
        except InputMismatch as differs:
            if self._calls.options.on_mismatch != "replan":
                raise
            try:
                return selector.replan(args, kwargs, differs)
            except TooManyPrograms:
                what = f"{differs.what}, and {MAX_PROGRAMS} programs exist already"
                hint = "pad or bucket inputs to a few shapes; a call of several ranks does not run eagerly"
                raise UnsupportedCall(what, where=differs.where, hint=hint, see="ranks-refused") from differs

    def _agree(self, runner: Runner) -> None:
        """Let the ranks agree on a program that runs for the first time, unless its collectives are known."""
        found = _collectives(runner)
        if found not in self._known:
            self._together.agree(found, [*self._known, found])
            self._known.append(found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedCall(
            "a compiled model of several ranks is bound to its process group, and cannot be copied or pickled",
            hint="save its state_dict, or copy the model, and compile the copy on all ranks",
            see="ranks-refused",
        )


def _collectives(runner: Runner) -> tuple[str, ...]:
    """Return the collectives of a program, a line each."""
    return tuple(c.line for c in runner.plan.collectives)
