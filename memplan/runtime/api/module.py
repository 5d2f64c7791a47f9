"""`memplan.compile`, and `CompiledModule`, which it returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, InputMismatch, InvalidShapes, MemplanError
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.pickling import rebuild, recipe
from memplan.runtime.api.select import RunsEagerly, Selector
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.memory.arena import Arena
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, passive_for
from memplan.runtime.options import Options, device_for, given_plan
from memplan.runtime.profile.profile_guided import MeasuredStep, ProfileGuide
from memplan.trace.capture.refusals import require_traceable

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")


class CompiledModule(nn.Module, MeasuredStep):
    """A model that runs in one planned arena. `memplan.compile` makes it.

    It is called, trained and saved like the original, whose parameters, buffers and submodules it shares under the same
    names: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both. Calls under
    `torch.no_grad()` and in `eval()` mode run programs with plans of their own, which are made at the first such call
    and share the arena. Python attributes that `forward` reads (constants, dropout rates) are constants of a plan; each
    call compares them.

    Attributes:
        plan: The plan of training calls (of every call if compiled with `train=False`). With `dynamic_shapes`, the plan
            of the example's shapes.
        symbolic: With `dynamic_shapes`, the plan for all shapes; else None.
        hooks: The hooks that are called with the events of its steps: `hooks.add(function)`.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.

    Example:
        ```python
        compiled = memplan.compile(model, inputs)
        compiled(inputs).sum().backward()
        print(compiled.plan.arena_size)  # bytes
        ```
    """

    plan: Plan
    symbolic: SymbolicPlan | None
    hooks: Hooks
    passive: OnDemandOffload | None
    _builder: Builder
    _warned: set[str]

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        options: Options,
        train: bool | None = None,
        given: Plan | None = None,
    ) -> None:
        require_traceable(model)
        self.__dict__["_original"] = model
        mode = model.training
        super().__init__()
        model.training = mode
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=Hooks(), passive=None, symbolic=None, _requested=options, _given=given, _guide=None)
        self.__dict__.update(
            _builder=Builder(model, options, self.hooks), _measurements=[], _train=train, _warned=set()
        )
        self._compile(args, kwargs, model.training if train is None else train)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Build the program of the example inputs; other programs are built at their first call."""
        builder = self._builder
        if self._requested.dynamic_shapes is not None:
            self._compile_shapes(args, kwargs, train)
            return
        if builder.measures:
            main, guide = builder.guided(args, kwargs, train)
            self.__dict__.update(_guide=guide, _measurements=[] if guide is None else guide.measurements)
        else:
            main = builder.build(args, kwargs, train, self._given)
        self.__dict__.update(_selector=Selector(builder, main, follows=self._train is None), plan=main.plan)

    def _compile_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Compile for every shape within `dynamic_shapes`."""
        from memplan.runtime.api.shapes import ShapedSelector

        if self._given is not None:
            hint = "leave plan= out: the symbolic plan is made when compiling"
            raise InvalidShapes("a plan is for one shape", where="plan with dynamic_shapes", hint=hint, see="one-shape")
        selector = ShapedSelector(self._builder, args, kwargs, train=train, follows=self._train is None)
        self.__dict__.update(_selector=selector, plan=selector.main.plan, symbolic=selector.family.plan)

    # -- calling -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, with the arguments of the original.

        Returns:
            What the original returns.

        Raises:
            InputMismatch: The call, or the model, differs from what was compiled (see `on_mismatch`).
            UnsupportedCall: The call needs what a planned step does not have, such as `torch.func` transforms.
            StaleActivationsError: The arena still holds the activations of a forward whose backward has not run.
        """
        # this module is part of a model that is being traced: the outer plan contains it
        if torch.compiler.is_compiling() and _in_this_thread():
            return self._original(*args, **kwargs)
        if transforms.around() and (refused := transforms.refusal((args, kwargs), self)):
            if self._requested.on_mismatch == "eager":
                return self._original(*args, **kwargs)
            raise refused
        try:
            runner, leaves = self._selector.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            how = self._requested.on_mismatch
            if how == "passive":
                return self._run_on_demand(error, args, kwargs)
            if how == "error" or isinstance(error, BudgetInfeasible):
                raise
            if how == "eager":
                return self._original(*args, **kwargs)
            try:
                runner, leaves, current = self._replan(args, kwargs)
            except RunsEagerly as why:
                return self._run_eagerly(why, args, kwargs)
        except RunsEagerly as why:
            return self._run_eagerly(why, args, kwargs)
        if self._guide is not None and runner is self._selector.main and self._guide.due:
            runner = self._advance(self._guide)
            current = runner.current()
        return runner(leaves, current, training=runner.traced.training)

    def _replan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """Return a program for a call that differs from the example, or for a model that has changed."""
        try:
            runner, leaves = self._selector.replan(args, kwargs)
            return runner, leaves, runner.current()
        except InputMismatch:  # the new program is of another model too: build all programs again
            train = self._selector.main.traced.training
            self.__dict__.update(
                _builder=Builder(self._original, self._requested, self.hooks), _given=None, _guide=None
            )
            self._compile(args, kwargs, train)
            runner, leaves = self._selector.select(args, kwargs)
            return runner, leaves, runner.current()

    def _run_eagerly(self, why: RunsEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original, and warn once: the call needs autograd, and the module was compiled in eval mode."""
        if str(why) not in self._warned:
            self._warned.add(str(why))
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", self.plan.model, why, how)
        return self._original(*args, **kwargs)

    def _run_on_demand(self, reason: MemplanError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that has no plan eagerly, and offload saved activations on demand."""
        passive = passive_for(reason, self.plan, self._selector.main.traced.device)
        self.__dict__["passive"] = passive
        run = self._original if passive is None else partial(passive.run, self._original)
        return run(*args, **kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return int(self._selector.pool_bytes)

    def _advance(self, guide: ProfileGuide) -> Runner:
        """Return the runner that the guide chooses, and use it from now on."""
        try:
            runner = self._selector.main = guide.turn()
        finally:
            if guide.done:
                self.__dict__["_guide"] = None
        self.__dict__["plan"] = runner.plan
        if guide.measurements:
            self._builder.options = replace(self._builder.options, costs=guide.measurements[-1].costs)
        return runner

    @property
    def _arena(self) -> Arena:
        """The arena that its programs share."""
        arena = self._builder.arena
        assert arena is not None
        return arena

    # -- being the model ---------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The training flag of the original."""
        return bool(self._original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the flag of the original alone, without its submodules (Lightning sets each one itself)."""
        self._original.training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the mode of the original and its submodules; return this module."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict` of the original, whose hooks and extra state apply."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` into the original, which shares its parameters with this module."""
        return self._original.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy again: addresses in an arena cannot be copied or pickled."""
        options, given = self._builder.options, self._given
        if self._guide is not None:
            options = self._requested
        elif self._measurements:
            given = self.plan
        made = recipe(self._original, self._selector.main, options, given, self._selector.main_modes, self._train)
        return rebuild, (CompiledModule, *made)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the original, whose forward is traced, unless it is this module's own."""
        own = name in self.__dict__ or hasattr(type(self), name)
        (super().__setattr__ if own else self._original.__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        (super() if name in self.__dict__ else self._original).__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def _in_this_thread() -> bool:
    """Whether this thread is tracing, judged by its dispatch modes: torch's flag is set while any thread exports."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def compile(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    budget: Any = None,
    policy: Any = "auto",
    costs: Any = None,
    divide: Any = None,
    compress: str | None = None,
    schedule: Any = "auto",
    solver: Any = "auto",
    layout: str = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    gradients: str = "safe",
    sanitize: str | None = None,
    on_mismatch: str = "error",
    cuda_graph: bool = False,
    device: Any = None,
    dynamic_shapes: Any = None,
    bucketing: Mapping[str, int] | None = None,
) -> CompiledModule:
    """Compile `model` to run forward and backward at planned addresses in one preallocated arena.

    The options `budget`, `policy`, `costs`, `divide`, `compress`, `schedule`, `solver`, `layout` and `time_limit` are
    those of `memplan.plan`; not all are repeated here.

    Args:
        model: The module to compile. The result shares its parameters, buffers and submodules.
        example_inputs: A tuple of positional arguments, a dict of keywords (without `example_kwargs`), or the only
            argument: real tensors with the shapes, dtypes and devices of every later call.
        example_kwargs: The keyword arguments.
        train: True plans forward and backward. False plans the forward alone; results then have no gradients. None
            follows `model.training`; in eval mode, a call that eager would record then gets a program with a backward,
            or runs eagerly while the results of an earlier such call are alive.
        plan: A saved plan, or its path, to run instead of making one. It must have been made for this very graph, and
            has its budget already.
        budget: The most bytes that the arena may have: an int, a text ("8GiB"), a share of its size without a budget
            (0.5, "50%"), or "min". Saved activations that do not fit are recomputed or offloaded.
        policy: The policy that decides what is evicted.
        costs: The cost model of the policy. "measure" measures the first steps and plans again from the measured
            times, until no better plan is found (`CompiledModule.measurements`).
        divide: As in `memplan.plan`.
        compress: As in `memplan.plan`.
        schedule: The policy that orders the ops.
        solver: The solver that assigns offsets.
        layout: As in `memplan.plan`.
        time_limit: The time limit of the solver, in seconds.
        in_place: Let a result take the bytes of an input that has its last use there, if the kernel allows it.
        gradients: Where the gradients of parameters are. "safe" returns them to autograd. "owned": the backward
            assigns `.grad` itself, which is faster; hooks on parameters and DistributedDataParallel raise
            `UnsupportedCall`, and `torch.autograd.grad` and `backward(inputs=...)` do not find parameters. "arena"
            leaves them in the arena until the next call, which takes the least memory: a `.grad` that is still set then
            is moved out of the arena, and a view, an array or another name that still refers to one raises
            `StaleActivationsError`; it cannot be combined with `budget`, `device`, `cuda_graph` or `dynamic_shapes`.
        sanitize: Check every step, slowly: "poison" fills buffers with NaN before their first write and after their
            last use; "redzone" checks bytes on both sides of every buffer.
        on_mismatch: What happens at a call that differs from the example, or after the model has changed: "error"
            raises, "eager" runs the original model, "replan" makes a plan for such calls, and "passive" runs the
            original model and offloads saved activations on demand to keep the budget (also if the plan of another
            mode would exceed it).
        cuda_graph: Record forward and backward as two CUDA graphs at the first call, and replay them. Inputs are
            copied in and results copied out; `CompiledModule.pool_bytes` are the bytes outside the arena.
        device: Run on this device ("cuda", "cuda:1") while the model, its inputs and its results stay on the CPU. Every
            step copies parameters, inputs and results by planned ops that run beside its kernels. The arena then holds
            all of it, and `budget` counts all of it: parameters that do not fit are loaded when they are needed, and
            gradients are copied out when they are made. "cpu" stands in for a device: a separate arena in the CPU's
            memory with the same plan and the same copies. A sequence (`["cuda:0", "cuda:1"]`, or
            `["cpu:0", "cpu:1"]`) divides the model's blocks among devices, with an arena on each: forward and backward
            of a block run on one device, and planned ops send what another one needs. `budget` is then that of each
            device, or a sequence with one for each; nothing is evicted (`policy` stays "auto"). See `Plan.devices`.
        dynamic_shapes: The dimensions of the inputs that vary, and their ranges, as `torch.export` takes them. Every
            shape in range runs in one arena, which grows if a shape needs more; a shape out of range is a mismatch.
        bucketing: Multiples by dimension: `{"seq": 64}` plans each size of that dimension for the next multiple of 64,
            so that the arena grows less often and the shapes in between share their offsets. Nothing is padded, and
            results are the same.

    Returns:
        The compiled module, called like `model`.

    Raises:
        UnsupportedGraph: The model cannot be traced as one graph; nothing was allocated.
        UnsupportedDevice: The device does not exist, or the model is on a device already.
        UnsupportedCall: The options cannot be combined.
        BudgetInfeasible: No plan keeps the budget; the error names the smallest one that can be kept.
        InputMismatch: A parameter, buffer or input is a fake or meta tensor.
        PlanMismatch: `plan` was made for another graph or device.
        MemplanError: An option has an unknown value. What `memplan.load` raises is raised for `plan`.

    Example:
        ```python
        compiled = memplan.compile(model, inputs, budget="2GiB")
        loss = compiled(inputs).square().mean()
        loss.backward()
        ```
    """
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    given = given_plan(plan, budget)
    options = Options(
        budget=budget,
        policy=policy,
        costs=costs,
        divide=divide,
        compress=compress,
        schedule=schedule,
        solver=solver,
        layout=layout,
        time_limit=time_limit,
        in_place=in_place,
        gradients=gradients,
        sanitize=sanitize,
        on_mismatch=on_mismatch,
        cuda_graph=cuda_graph,
        device=device_for(device, given),
        dynamic_shapes=dynamic_shapes,
        bucketing=bucketing,
    )
    return CompiledModule(model, args, kwargs, options=options, train=train, given=given)
