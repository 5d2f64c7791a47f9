"""Runs one program with the current parameters, through autograd, and assembles the model's result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import increment_version

from memplan.core.choices import Sanitize
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.distributed.ops import updating
from memplan.errors import UnsupportedCall
from memplan.runtime.debug.hooks import Hook, Hooks
from memplan.runtime.debug.sanitizers import NO_SANITIZERS, Sanitizers, make_poison, make_redzone
from memplan.runtime.execute.autograd_step import reason_against, run_planned
from memplan.runtime.execute.cuda_graphs import CudaGraphProgram, Recorder
from memplan.runtime.execute.gradients import AddedGradients, ArenaGradients
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.program import Functions, build_program
from memplan.runtime.execute.values_of_call import ResultsOfCall, Tangents
from memplan.runtime.guards.input_guards import InputGuards, items_getter
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.guards.parameter_guards import ParameterGuards, PythonValueGuards
from memplan.runtime.kernels import BoundOp
from memplan.runtime.memory.arena import Arena, Memory
from memplan.runtime.memory.idle_arenas import begin_step, end_step
from memplan.trace.graph.remap_to_plan import remap_to_plan
from memplan.trace.traced import Source, TracedGraph


class Runner:
    """Runs a program for a call: takes the leaves of the call and returns the model's result."""

    def __init__(
        self,
        module_guards: ModuleGuards,
        traced: TracedGraph,
        plan: Plan,
        arena: Arena,
        *,
        sanitize: Sanitize | None,
        added: bool = False,
        recorder: Recorder | None = None,
        whole: bool = False,
        bound: tuple[BoundOp, ...] | None = None,
        hooks: Hooks | None = None,
        unused: bool = False,
        input_guards: InputGuards | None = None,
    ) -> None:
        """Build the program of `plan` in `arena`.

        `added`: the graph copies gradients of parameters out, so that they can be added instead. `recorder`: record
        and replay CUDA graphs; `whole`: one graph for the whole step. `bound`: as in `build_program`. `hooks`: the
        hooks that observe the steps. `unused`: no other program runs in this arena, and it need not be locked.
        `input_guards`: those of the same step.
        """
        self._module_guards, self._before_plan = module_guards, traced
        self._options: dict[str, Any] = {"sanitize": sanitize, "added": added, "whole": whole, "hooks": hooks}
        traced = remap_to_plan(traced, plan)  # values now have the places of the plan
        self.traced = traced
        self.device_type = traced.device.type
        self.arena = arena
        self.parameter_guards = ParameterGuards(module_guards, traced)
        self.python_value_guards = PythonValueGuards(module_guards, traced.readings)
        self._written_parameters = [
            j for j, i in enumerate(self.parameter_guards.bindings) if traced.bindings[i].written
        ]
        self.input_guards = input_guards or InputGuards(
            traced,
            module_guards.called.forward,
            changes_model=bool(self._written_parameters),
            named=module_guards.model.forward,
        )
        self._store_written(self.parameter_guards.tensors())
        tensors = dict(zip(self.parameter_guards.bindings, self.parameter_guards.tensors(), strict=True))
        for i, b in enumerate(traced.bindings):
            if b.source is Source.INPUT and bound is None:
                tensors[i] = traced.example_inputs[b.index].detach()
            elif b.tensor is not None:
                tensors[i] = b.tensor
        host = arena.host(plan.host_size)
        begin = module_guards.begin_update if isinstance(module_guards, StepGuards) else None
        built: dict[str, Any] = {"sanitizers": _sanitizers(sanitize, traced, plan, arena, host), "begin_update": begin}
        begin_step(arena, plan.on_device)
        if bound is None:
            with nullcontext() if unused else arena.ownership:
                arena.ownership.require_free("the trial run of another program")
                self.program = build_program(traced, plan, arena, host, tensors, **built)
        else:
            self.program = build_program(traced, plan, arena, host, tensors, bound=bound, **built)
        self.plan = self.program.plan
        self.left_outside = self.program.left_outside
        self.cuda_graphs = None if recorder is None else CudaGraphProgram(self.program, recorder, whole=whole)
        self.forward = self.program.forward if self.cuda_graphs is None else self.cuda_graphs.forward
        self.backward = self.program.backward if self.cuda_graphs is None else self.cuda_graphs.backward
        self._emit: Hook | None = None
        self._op_timer = NO_SANITIZERS
        self._observed: tuple[Hook | None, Sanitizers, Functions] | None = None
        arena.stays = self.cuda_graphs is not None or arena.several
        self._addresses, self.rebound = arena.addresses, 0
        self._prepare_calls()
        self.added = self._find_added_gradients() if added else None
        # Results without any gradient (torch.linalg.vector_norm(x, 0)) require one in eager all the same.
        self._anchored = traced.training and not self._gradient_order
        self.arena_gradients: ArenaGradients | None = None
        self._find_arena_gradients()
        if hooks is not None:
            hooks.attach(self)

    def remade(
        self,
        plan: Plan,
        arena: Arena,
        *,
        module_guards: ModuleGuards | None = None,
    ) -> Runner:
        """Return the same program at the offsets of `plan` in another arena; nothing is tried again.

        `module_guards`: another module of the same graph, whose parameters it uses.
        """
        made = Runner(
            self._module_guards if module_guards is None else module_guards,
            self._before_plan,
            plan,
            arena,
            bound=self.program.bound,
            input_guards=self.input_guards,
            **self._options,
        )
        if made.arena_gradients is not None and self.arena_gradients is not None:
            made.arena_gradients.copied = self.arena_gradients.copied
        return made

    def replanned(self, plan: Plan, arena: Arena) -> Runner:
        """Return a program of the same step by another plan, which is tried first; nothing else uses `arena`."""
        return Runner(self._module_guards, self._before_plan, plan, arena, unused=True, **self._options)

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """The collectives of its plan, a line each."""
        return tuple(c.line for c in self.plan.collectives)

    @property
    def has_parameters(self) -> bool:
        """Whether the backward computes gradients of parameters, and not of inputs alone."""
        return bool(self._wanted_parameters)

    @property
    def as_traced(self) -> TracedGraph:
        """The step before it had a plan."""
        return self._before_plan

    def forget_example(self) -> None:
        """Keep the tensors of the example no longer; no other plan can be tried on them from now on (`replanned`)."""
        self._before_plan, self.traced = self._before_plan.without_data(), self.traced.without_data()
        self.program = replace(self.program, traced=self.traced)
        if self.cuda_graphs is not None:
            self.cuda_graphs.program = self.program
        self.input_guards.forget_example()

    @cached_property
    def _anchors(self) -> tuple[torch.Tensor, ...]:
        """A tensor by which results require a gradient where the step computes none; a whole step never asks for it."""
        return (torch.zeros((), requires_grad=True),) if self._anchored else ()

    @cached_property
    def never_repeats(self) -> str | None:
        """Why the forward of a step cannot run again for another backward; None if it can."""
        return reason_against(self.traced, self.plan.schedule.order, recorded=self.cuda_graphs is not None)

    def require_observable(self) -> None:
        """Raise `UnsupportedCall` if hooks cannot be called."""
        if self.cuda_graphs is not None:
            what = "a recorded step is replayed without Python, so that no hook could be called"
            raise UnsupportedCall(
                what, where="cuda_graph=True", hint="leave cuda_graph out to set hooks", see="cuda-graph"
            )

    def observe(self, emit: Hook | None) -> None:
        """Call `emit` with every event from now on; None runs the plain functions again."""
        self._watch(emit, self._op_timer)

    def time(self, op_timer: Sanitizers) -> None:
        """Call `op_timer` right around each op, inside sanitizers and hooks; `NO_SANITIZERS` stops it."""
        self._watch(self._emit, op_timer)

    @property
    def is_observed(self) -> bool:
        """Whether hooks or timers are called around the ops of a step."""
        return self._emit is not None or self._op_timer is not NO_SANITIZERS

    def _watch(self, emit: Hook | None, op_timer: Sanitizers) -> None:
        self._emit, self._op_timer = emit, op_timer
        if emit is None and op_timer is NO_SANITIZERS:
            self.forward, self.backward = self.program.forward, self.program.backward
            return
        self.require_observable()
        known = self._observed
        if known is None or known[0] != emit or known[1] is not op_timer:
            known = self._observed = (emit, op_timer, self.program.observed(emit, op_timer))
        self.forward, self.backward = known[2]

    def _prepare_calls(self) -> None:
        """Compute once what each call needs: the order of gradients, tangents, watched tensors and results."""
        t = self.traced
        slot_of = {binding: i for i, binding in enumerate(self.parameter_guards.bindings)}
        of = t.results.gradient_of
        ordered = sorted(range(len(of)), key=lambda i: of[i] not in slot_of)  # parameters first, then inputs
        self._gradient_order = ordered
        self._wanted_parameters = [slot_of[of[i]] for i in ordered if of[i] in slot_of]
        self._wanted_inputs = [t.bindings[of[i]].index for i in ordered if of[i] not in slot_of]
        # pick, of the current parameters and buffers, those that get gradients and those that the backward reads
        self.wanted = items_getter(self._wanted_parameters)
        self.watched = items_getter([slot_of[i] for i in sorted(self.program.used_in_backward) if i in slot_of])
        late = self.program.used_in_backward
        self.unwatched = items_getter(  # parameters and buffers that the forward alone reads
            [j for j, i in enumerate(self.parameter_guards.bindings) if not t.bindings[i].written and i not in late]
        )
        self.written = items_getter(self._written_parameters)
        self.draws = any(op.random and op.phase is Phase.FORWARD for op in t.graph.ops)
        self._in_order = items_getter(ordered)
        self._counted = {phase: self._changed_in(phase) for phase in Phase}
        apart = t.without_data()  # the example may be forgotten
        self.tangents = Tangents(apart)
        self._results = ResultsOfCall(apart, self.parameter_guards.bindings)
        self.views_of_saved = self._results.views_of(self.program.saved)

    def _find_added_gradients(self) -> AddedGradients | None:
        """Return the backward that adds to the `.grad` of parameters; None if the step has no backward."""
        gradients = [self.traced.results.gradients[i] for i in self._gradient_order[: len(self._wanted_parameters)]]
        return AddedGradients(self.program, gradients) if gradients and self.cuda_graphs is None else None

    def _find_arena_gradients(self) -> None:
        """Find the gradients that the plan keeps in the arena, at its address of now."""
        t = self.traced
        pairs = zip(self._wanted_parameters, self._gradient_order, strict=False)
        found = [(slot, t.results.gradients[i]) for slot, i in pairs]
        found = [(slot, v) for slot, v in found if t.graph.storages[t.graph.values[v].storage].planned]
        if found:
            slots, values = zip(*found, strict=True)
            copied = self.arena_gradients is not None and self.arena_gradients.copied
            self.arena_gradients = ArenaGradients(self.parameter_guards, slots, values, self.program, copied=copied)

    @cached_property
    def _need(self) -> int:
        return self.plan.on_device

    def take_arena(self) -> None:
        """Have the arena's bytes allocated, if they were given back or are too few, and use them where they are; others
        may be given back for that."""
        begin_step(self.arena, self._need)
        self.arena.fit(self.plan)
        addresses = self.arena.addresses
        if addresses != self._addresses:
            self.program.move()
            if self.cuda_graphs is not None:
                self.cuda_graphs.forget()
            self._find_arena_gradients()
            self.rebound += 1
            self._addresses = addresses  # last: what is interrupted before is done again

    # -- a call ------------------------------------------------------------------------------------------

    def __call__(self, leaves: list[Any], current: list[torch.Tensor] | None = None, *, training: bool) -> Any:
        """Run the forward on checked leaves, with the `current` parameters, and return the model's result.

        `training`: run it through autograd, so that a backward can follow.
        """
        current = self.current() if current is None else current
        if self._written:
            self.input_guards.check_apart(leaves, self._written)
        inputs = self.input_guards.tensors(leaves)
        if training:
            wanted = [leaves[i] for i in self._wanted_inputs] if self._wanted_inputs else ()
            parameters = (
                self.parameter_guards.attached(self._wanted_parameters)
                if self.parameter_guards.distributed
                else self.wanted(current)
            )
            fresh = run_planned(self, inputs, current, *parameters, *wanted, *self._anchors)
        else:
            with self.arena.ownership as ownership, torch.no_grad():
                ownership.begin(keep=False)
                self.take_arena()
                fresh = self.forward(*inputs)[0]
                end_step(self.arena)
            increment_version(self.changed(Phase.FORWARD, inputs, current))
        return self._results.assemble(fresh, current, leaves)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that its CUDA graphs keep in their private pool."""
        return 0 if self.cuda_graphs is None else self.cuda_graphs.recorder.pool_bytes

    def checked(self, leaves: list[Any]) -> list[torch.Tensor]:
        """Return what `current` does for a whole step on checked leaves, which `whole_step` takes.

        Raises `InputMismatch` as `current` does, and for an input that shares memory with what the step changes.
        """
        current = self.current()
        self.input_guards.check_apart(leaves, self._written)
        return current

    def whole_step(self, leaves: list[Any], tangent: torch.Tensor, current: list[torch.Tensor]) -> torch.Tensor:
        """Run forward and backward of a step whose backward updates the parameters; return the loss.

        `tangent` is the gradient of the minimised objective with respect to the loss; `current` are the tensors that
        `checked` returned.
        """
        inputs = self.input_guards.tensors(leaves)
        assert self.backward is not None
        with self.arena.ownership as ownership, torch.no_grad():
            ownership.begin(keep=False)
            self.take_arena()
            if self.cuda_graphs is not None:
                loss = self.cuda_graphs.step(inputs, tangent)
            else:
                loss = self._whole_step(inputs, tangent)
            end_step(self.arena)
        increment_version(tuple(t for phase in Phase for t in self.changed(phase, inputs, current)))
        return loss

    def _whole_step(self, inputs: Sequence[torch.Tensor], tangent: torch.Tensor) -> torch.Tensor:
        """Run forward and backward, and note it if they end in the middle of the update: nothing is copied then."""
        guards = self._module_guards
        assert isinstance(guards, StepGuards)
        assert self.backward is not None
        try:
            (loss,), saved = self.forward(*inputs)
            with updating():
                self.backward(*saved, tangent)
        except BaseException:
            guards.end_update(whole=False)
            with suppress(Exception):  # an update's error would take the place of the first
                self.arena.copies.settle()
            raise
        guards.end_update(whole=True)
        found: torch.Tensor = loss
        return found

    def current(self) -> list[torch.Tensor]:
        """Return the current parameters, buffers and state, after updating the program for those that moved.

        Raises `InputMismatch` for a tensor, or a Python value, that is not as it was traced.
        """
        self.python_value_guards.require_same()
        current, unmoved = self.parameter_guards.look()
        if not unmoved:
            with self.arena.ownership:  # a run in another thread reads its lists of tensors without the GIL
                self._rebind_moved(current)
        return current

    def _rebind_moved(self, current: Sequence[torch.Tensor]) -> None:
        moved = self.parameter_guards.moved(current)
        for i in moved:
            self.program.rebind(self.parameter_guards.bindings[i], current[i])
        if moved:
            if self.cuda_graphs is not None:
                self.cuda_graphs.forget()
            self._store_written(current)

    def _store_written(self, current: Sequence[torch.Tensor]) -> None:
        """Store the names, by data pointer, of the parameters, buffers and state that the step changes."""
        self._written = {}
        for i in self._written_parameters:
            source = self.traced.bindings[self.parameter_guards.bindings[i]].source
            self._written[current[i].untyped_storage().data_ptr()] = (
                f"the {source.value} {self.parameter_guards.names[i]!r}"
            )

    # -- called by autograd ------------------------------------------------------------------------------

    def _changed_in(self, phase: Phase) -> tuple[list[int], list[int]]:
        """Return the positions of the inputs, and of the parameters and buffers, that a phase of the step changes."""
        t = self.traced
        storages = {s for op in t.graph.ops if op.phase is phase for s in t.graph.written(op)}
        changed = {i for i, b in enumerate(t.bindings) if t.graph.values[b.value].storage in storages}
        both = (self.program.inputs, self.parameter_guards.bindings)
        inputs, parameters = ([j for j, i in enumerate(bindings) if i in changed] for bindings in both)
        return inputs, parameters

    def changed(
        self, phase: Phase, inputs: Sequence[torch.Tensor], current: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs, parameters and buffers that a phase of the step changes, whose versions are to be counted,
        as in-place ops do in eager. Tensors of inference mode have none.
        """
        of_inputs, of_parameters = self._counted[phase]
        if not (of_inputs or of_parameters):
            return ()
        tensors = (*(inputs[j] for j in of_inputs), *(current[j] for j in of_parameters))
        return tuple(t for t in tensors if not t.is_inference())

    def in_order(self, gradients: Sequence[torch.Tensor], missing: set[int]) -> Sequence[torch.Tensor | None]:
        """Return the gradients in the order in which `PlannedStep` took its differentiable inputs.

        A gradient is None if it depends only on `missing` tangents (see `Tangents`).
        """
        if self._anchored:
            return (None,)
        if not missing:
            return self._in_order(gradients)
        needs = self.traced.results.needs
        return [None if needs[i] and needs[i] <= missing else gradients[i] for i in self._gradient_order]


def _sanitizers(sanitize: Sanitize | None, traced: TracedGraph, plan: Plan, arena: Arena, host: Memory) -> Sanitizers:
    if sanitize == "poison":
        return make_poison(traced, plan, arena, host)
    if sanitize == "redzone":
        return make_redzone(traced, plan, arena)
    return NO_SANITIZERS
