"""The calls of models that are several graphs (`GraphCalls`), or that several ranks run together (`RankCalls`)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.distributed.agreement import Agreement
from memplan.distributed.parallelism import Parallelism
from memplan.distributed.step_ranks import ParallelGuards, StepRanks, batch_lines, option_lines, require_call_options
from memplan.errors import InputMismatch, UnsupportedCall
from memplan.runtime.api.module_calls import Args, Kwargs, ModuleCalls
from memplan.runtime.dynamo.backend import SeveralGraphs
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import CallKind, kind_of_call, require_like
from memplan.runtime.options import CompileOptions
from memplan.runtime.programs import TooManyPrograms


class GraphCalls(ModuleCalls):
    """The calls of a model that runs as the graphs into which dynamo breaks it, in one planned arena.

    What lies between the graphs runs as Python, as in eager. Nothing runs when it is made: each graph is planned when
    it is first called, with an arena of its own, and all graphs of a training step are placed in one arena when the
    next step begins. `plan` is their joint plan, with a section for each graph.
    """

    def __init__(self, model: nn.Module, options: CompileOptions, train: bool | None, *, kind: CallKind) -> None:
        super().__init__(model, options, train, kind=kind)
        self.graphs = SeveralGraphs(model, options, self.hooks)

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the graphs of a call."""
        if self.options.on_mismatch == "error":
            assert self.kind is not None
            require_like(self.kind, kind_of_call(args, kwargs))
        with torch.no_grad() if self.train is False else contextlib.nullcontext():
            return self.graphs(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The joint plan of the last complete step, or of the graphs that are known so far."""
        held = (*self._model.named_parameters(), *self._model.named_buffers())
        return self.graphs.backend.joint_plan(self._name, {id(tensor): name for name, tensor in held})

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments with which the calls of a copy of the model are made."""
        return {"options": self.options, "train": self.train, "kind": self.kind}


class RankCalls(ModuleCalls):
    """The calls of one rank's part of a model that several ranks run together, in one planned arena.

    The hooks of `fully_shard`, `parallelize_module` or `DistributedDataParallel` are not called: their collectives are
    in the plans. After a backward, the parameters have the gradients that they have under torch: a DTensor of this
    rank's part, or the average over the ranks. No call runs without a plan.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        train: bool | None,
        *,
        given: Plan | None,
        parallelism: Parallelism,
    ) -> None:
        super().__init__(model, replace(options, gradients="outside"), train, given=given, together=True)
        self._parallelism, self._ranks = parallelism, StepRanks(parallelism.group)
        self._known: list[tuple[str, ...]] = []

    def compile(self, args: Args, kwargs: Kwargs) -> None:
        """Build the program of the example inputs, together with the other ranks."""
        asked = self.options
        with Agreement(self._parallelism.group) as ranks:
            require_call_options(asked)
            self._guards = ParallelGuards(self._model)
            super().compile(args, kwargs)
            versions = self.programs.main.plan.versions
            lines = [f"{key} {version}" for key, version in sorted(versions.items())]
            lines += [*option_lines(asked), f"plan {'new' if self.given is None else 'given'}"]
            lines += batch_lines((args, kwargs)) if asked.has_budget else []
            self._known = [self.programs.main.collectives]
            name = ranks.compare([*lines, *self._parallelism.lines, *self._known[0]])
        self._ranks.begin(name, self._known)

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of this rank, while the other ranks run theirs."""
        with self._ranks:
            self._guards.check()
            runner, leaves = self._program(args, kwargs)
            current = runner.current()
            found = runner.collectives
            if found not in self._known:  # it runs for the first time
                self._ranks.agree(found, [*self._known, found])
                self._known.append(found)
            return runner(leaves, current, training=runner.traced.training)

    def _program(self, args: Args, kwargs: Kwargs) -> tuple[Runner, list[Any]]:
        """Return the program of a call, and the leaves that it takes."""
        try:
            return self.programs.select(args, kwargs)
        except InputMismatch as differs:
            if self.options.on_mismatch != "replan":
                raise
            try:
                return self.programs.replan(args, kwargs, differs)
            except TooManyPrograms as full:
                what = f"{differs.what}, and {full}"
                hint = "pad or bucket inputs to a few shapes; a call of several ranks does not run eagerly"
                raise UnsupportedCall(what, where=differs.where, hint=hint, see="ranks-refused") from differs

    @property
    def settings(self) -> dict[str, Any]:
        """Raises `UnsupportedCall`: there can be no copy."""
        raise UnsupportedCall(
            "a compiled model of several ranks is bound to its process group, and cannot be copied or pickled",
            hint="save its state_dict, or copy the model, and compile the copy on all ranks",
            see="ranks-refused",
        )
