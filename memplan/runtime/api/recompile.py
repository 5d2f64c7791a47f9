"""Compiles a module once more, because of how it is called or as a copy of it, from the example of the first time.

A call begins while another one waits for its backward; the model has changed; or sizes keep changing. In each case
all programs are made again, by other options or in other memory, and the compilation of before stays as it is if that
fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.compilation import Compilation, compile_example
from memplan.runtime.api.example_leaves import TensorLike, detached, is_made_up, with_tensors
from memplan.runtime.api.mismatch import shapes_of
from memplan.runtime.api.pending_calls import PendingCalls, require_room
from memplan.runtime.api.pickling import Example, example_of, in_modes, modes_by_name
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaInUse
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import CompileOptions
from memplan.trace.capture.joint_graph import NoBackward

_log = logging.getLogger("memplan")
_SEVERAL = (
    "%s: a call begins while another one waits for its backward; from now on each has a program of its own, and "
    "gradients are outside of the arena"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompilation:
    """Compiles a model once more. `modes`: the training flags of submodules, by name, when it was compiled.

    `before` is the compilation of now, `options` are those that `builder` was made with. `call`: the arguments of the
    call that waits for it, which is compiled for where the example is not kept, and cannot be made up.
    """

    before: Compilation
    builder: Builder
    options: CompileOptions
    example: Example
    train: bool
    modes: Mapping[str, bool]
    call: Example

    def run(self) -> Compilation:
        """Return the new compilation."""
        try:
            return self._of_example()
        except InputMismatch as error:
            if error.see != "made-up-example":
                raise
            _log.info("%s: compiled for the call: %s", self.before.plan.model, error.summary)
            return replace(self, example=self.call)._of_example()

    def of_call(self) -> Recompilation:
        """Return what compiles for the call that waits, in the modes of now."""
        return replace(self, example=self.call, modes=_modes_now(self.builder))

    def _of_example(self) -> Compilation:
        on_demand = self.before.backward_on_demand
        with in_modes(self.builder.model, self.modes), compiled_from(self.example) as (args, kwargs):
            made = compile_example(
                self.builder, self.options, args, kwargs, train=self.train, backward_on_demand=on_demand
            )
        made.measurements = made.measurements or self.before.measurements
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOfCompiled:
    """Compiles a copy of a compiled module, of which `modes` were the training flags when it was compiled."""

    model: nn.Module
    hooks: Hooks
    options: CompileOptions
    example: Example
    train: bool | None
    given: Plan | None
    modes: Mapping[str, bool]

    def run(self) -> Compilation:
        """Return the compilation for a first call: one that evaluates alone gets no program with a backward."""
        options = self.options
        evaluates = not torch.is_grad_enabled() or not any(p.requires_grad for p in self.model.parameters())
        fixed = self.train is not None or self.given is not None or options.dynamic_shapes is not None
        if evaluates and not fixed and not options.measures and options.on_mismatch == "replan":
            builder = Builder(self.model, options, self.hooks)
            suppressed = contextlib.suppress(MemplanError)
            with _outside_of_calls(self.model), suppressed, compiled_from(self.example) as (args, kwargs):
                return compile_example(
                    builder, options, args, kwargs, train=False, backward_on_demand=True, evaluates=True
                )
        return self.as_copied()

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CopyOfCompiled:
        """Return what compiles it for the inputs of a call, because its model no longer takes those of the example."""
        options = self.options
        if self.given is not None and self.given.eviction is not None:
            options = options.keeping(self.given)
        example = pytree.tree_map(detached, (args, kwargs))
        return replace(self, options=options, example=example, given=None)

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CopyOfCompiled:
        """Return what compiles it for the inputs of a call instead of made-up ones, if they are like the example."""
        (known, spec), (leaves, other) = pytree.tree_flatten(self.example), pytree.tree_flatten((args, kwargs))
        if not is_made_up(self.example) or spec != other or not all(map(_same_layout, known, leaves)):
            return self
        return replace(self, example=pytree.tree_map(detached, (args, kwargs)))

    def as_copied(self, before: Builder | None = None) -> Compilation:
        """Return the same compilation as that of the module that was copied. `before`: the builder for evaluations."""
        builder = Builder(self.model, self.options, self.hooks)
        if before is not None:
            builder.make_room = before.make_room
        made = compiled_from(self.example)
        with _outside_of_calls(self.model), in_modes(self.model, self.modes), made as (args, kwargs):
            train = self.model.training if self.train is None else self.train
            on_demand = self.train is None
            try:
                return compile_example(
                    *(builder, self.options, args, kwargs),
                    train=train,
                    backward_on_demand=on_demand,
                    given=self.given,
                )
            except NoBackward:  # parameters of the copy were frozen
                if not on_demand or self.given is not None:
                    raise
                return compile_example(builder, self.options, args, kwargs, train=False, backward_on_demand=True)


@contextlib.contextmanager
def compiled_from(example: Example) -> Iterator[Example]:
    """Yield an example with tensors in place of those that were not kept.

    Raises `InputMismatch` if the step fails on these, whose numbers are made up: the example's might have run.
    """
    try:
        yield with_tensors(example)
    except (MemplanError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_made_up(example):
            raise
        what = f"the step fails on made-up numbers in place of the example, which is not kept: {error}"
        hint = "compile the model again, or call it first with inputs like the example"
        raise InputMismatch(what, where="the example", hint=hint, see="made-up-example") from error


@contextlib.contextmanager
def _outside_of_calls(model: nn.Module) -> Iterator[None]:
    """Compile as outside of a call: with gradients enabled, and without autocast."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} | {"cpu"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in devices:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def no_example(model: nn.Module, refused: MemplanError) -> InputMismatch:
    """Return the error of a copy that is asked for its plan, and cannot be compiled for the example of the original."""
    if isinstance(refused, InputMismatch) and refused.see == "made-up-example":
        return refused
    return InputMismatch(
        f"a copy of a compiled module cannot be compiled for the example, as its model was changed: {refused.summary}",
        where=type(model).__name__,
        hint="call it once with inputs that it takes now: it is compiled for them",
        see="other-model",
    )


def several_in_flight(before: Compilation, arena: Arena, call: Example) -> tuple[Compilation, PendingCalls]:
    """Compile for several calls in flight, because one begins while another waits for its backward in `arena`."""
    options, main = before.base_options, before.selector.main
    if options.measures:
        options = replace(options, costs=before.builder.options.costs)
    options = replace(options, gradients="outside")
    require_room(options, main.plan, main.arena.nbytes)
    pending = PendingCalls(options, arena)
    made = _again(before, options, call, pending.coordinator).run()
    _log.info(_SEVERAL, before.plan.model)
    return made, pending


def of_changed_model(before: Compilation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
    """Compile a model that has changed for the call in which that was noticed; the arena of before is freed."""
    before.builder.free_arena()
    return _again(before, before.base_options, (args, kwargs), before.builder.coordinator).of_call().run()


def varying_sizes(
    before: Compilation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CompileOptions, Example] | None:
    """Return options and an example for all sizes; None unless sizes are all in which the calls differ."""
    main = before.selector.main
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if before.symbolic is not None or spec != main.traced.in_spec:
        return None
    programs = [r for r in before.selector.programs_of_calls if r.traced.in_spec == spec]
    examples: list[Sequence[Any]] = [*(r.example for r in programs), leaves]
    calls: list[Sequence[Any]] = [pytree.tree_map(_of_one_number, example) for example in examples]
    found = shapes_of(before.builder.model.forward, spec, calls)
    if found is None:
        return None
    base = before.base_options
    try:
        options = replace(base, dynamic_shapes=found[0])
    except MemplanError:
        return None  # another option needs one shape
    chosen = next(example for example, call in zip(examples, calls, strict=True) if call is found[1])
    return options, pytree.tree_unflatten([detached(x) for x in with_tensors(chosen)], spec)


def _of_one_number(x: Any) -> Any:
    """Return a tensor of the same kind and sizes without memory for each of its numbers; a constant unchanged."""
    if not isinstance(x, (torch.Tensor, TensorLike)):
        return x
    return torch.empty(1, dtype=x.dtype, device=x.device).expand(tuple(x.shape)).requires_grad_(x.requires_grad)


def of_all_sizes(before: Compilation, options: CompileOptions, example: Example) -> Compilation | None:
    """Compile for all sizes, by what `varying_sizes` has found; None if that cannot be.

    Raises `ArenaInUse` while something is in flight.
    """
    try:
        before.builder.free_arena()
        made = replace(_again(before, options, example, before.builder.coordinator), example=example).run()
    except ArenaInUse:
        raise
    except MemplanError as error:
        _log.info("%s: no plan for all sizes: %s", before.plan.model, error.summary)
        return None
    what = "%s: sizes keep changing; one plan for all of them: %s"
    _log.info(what, before.plan.model, options.dynamic_shapes)
    return made


def _again(
    before: Compilation, options: CompileOptions, call: Example, coordinator: ArenaCoordinator | None = None
) -> Recompilation:
    """Return what compiles the example of `before` by other options, on the tensors of a call that is like it."""
    main, of = before.selector.main, before.builder
    builder = Builder(of.model, options, of.hooks, coordinator)
    builder.make_room = of.make_room
    return Recompilation(
        before=before,
        builder=builder,
        options=options,
        example=_like_example(main, call) or example_of(main),
        train=main.traced.training,
        modes=before.selector.main_modes_by_name,
        call=pytree.tree_map(detached, call),
    )


def _like_example(main: Runner, call: Example) -> Example | None:
    """Return the arguments of a call as the example that a program was traced with; None if they differ from it."""
    args, kwargs = call
    guards = main.input_guards
    try:
        leaves = guards.flatten(args, kwargs)
    except InputMismatch:
        return None
    pairs = zip(leaves, guards.examples, strict=True)
    if any(x.requires_grad != known.requires_grad for x, known in pairs if isinstance(x, torch.Tensor)):
        return None
    if not guards.are_tied_alike(leaves):
        return None
    example: Example = pytree.tree_unflatten([detached(x) for x in leaves], guards.spec)
    return example


def _same_layout(known: Any, x: Any) -> bool:
    """Return whether a leaf of a call is laid out as that of the example; constants are compared when it is called."""
    if not isinstance(known, (torch.Tensor, TensorLike)) or not isinstance(x, torch.Tensor):
        return not isinstance(known, (torch.Tensor, TensorLike)) and not isinstance(x, torch.Tensor)
    kinds = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in (known, x)]
    return kinds[0] == kinds[1]


def _modes_now(builder: Builder) -> dict[str, bool]:
    """Return the training flags of the submodules of a model, by name."""
    guards = builder.module_guards
    modes = guards.modes()
    return modes_by_name(builder.model, guards.modules, modes)
