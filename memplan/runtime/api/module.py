"""`CompiledModule`: what `memplan.compile` returns. Called, trained and saved like the model that it came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
from memplan.trace.capture.refusals import keywords_of, require_traceable

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")


class CompiledModule(nn.Module, MeasuredStep):
    """A model that runs in one planned arena. Made by `memplan.compile`.

    It shares the parameters, buffers and submodules of the original under the same names: optimizers, `state_dict`,
    `.train()`, `.eval()` and hooks on parameters work on both alike. Calls under `torch.no_grad()` and in `eval()` mode
    run plans of their own, made at the first such call, in the same arena. Python attributes (constants, dropout rates)
    are constants of a plan, and compared at each call. `plan` is the plan that training (or, compiled with
    `train=False`, every call) runs. With `dynamic_shapes` it is the example's, and `symbolic` the one for all shapes.
    `hooks` see what its steps do.
    """

    plan: Plan
    symbolic: SymbolicPlan | None
    hooks: Hooks
    passive: OnDemandOffload | None
    _builder: Builder
    _said: set[str]

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
        # past nn.Module's own __setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=Hooks(), passive=None, symbolic=None, _asked=options, _given=given, _guide=None)
        self.__dict__.update(_builder=Builder(model, options, self.hooks), _measurements=[], _train=train, _said=set())
        self._compile(args, kwargs, model.training if train is None else train)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Build the program of the example; others are built when they are called."""
        builder = self._builder
        if self._asked.dynamic_shapes is not None:
            self._compile_shapes(args, kwargs, train)
            return
        if builder.measures:
            main, guide = builder.guided(args, kwargs, train)
            self.__dict__.update(_guide=guide, _measurements=[] if guide is None else guide.measurements)
        else:
            main = builder.build(args, kwargs, train, self._given)
        self.__dict__.update(_selector=Selector(builder, main, follows=self._train is None), plan=main.plan)

    def _compile_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Compile for every shape that the options allow (`shapes.py`)."""
        from memplan.runtime.api.shapes import ShapedSelector

        if self._given is not None:
            hint = "leave plan= out: the symbolic plan is made when compiling"
            raise InvalidShapes("a plan is for one shape", where="plan with dynamic_shapes", hint=hint)
        selector = ShapedSelector(self._builder, args, kwargs, train=train, follows=self._train is None)
        self.__dict__.update(_selector=selector, plan=selector.main.plan, symbolic=selector.family.plan)

    # -- calling -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Raises `InputMismatch`, `UnsupportedCall` or `StaleActivationsError`, never wrong results."""
        # a part of a model that is being traced: the outer plan holds it all
        if torch.compiler.is_compiling() and _in_this_thread():
            return self._original(*args, **kwargs)
        if transforms.around() and (refused := transforms.refusal((args, kwargs), self)):
            if self._asked.on_mismatch == "eager":
                return self._original(*args, **kwargs)
            raise refused
        try:
            runner, leaves = self._selector.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            how = self._asked.on_mismatch
            if how == "passive":
                return self._passively(error, args, kwargs)
            if how == "error" or isinstance(error, BudgetInfeasible):
                raise
            if how == "eager":
                return self._original(*args, **kwargs)
            try:
                runner, leaves, current = self._replan(args, kwargs)
            except RunsEagerly as why:
                return self._eagerly(why, args, kwargs)
        except RunsEagerly as why:
            return self._eagerly(why, args, kwargs)
        if self._guide is not None and runner is self._selector.main and self._guide.due:
            runner = self._turn(self._guide)
            current = runner.current()
        return runner(leaves, current, training=runner.traced.training)

    def _replan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """A program for a call that differs from the example, or for a model that is not what it was."""
        try:
            runner, leaves = self._selector.replan(args, kwargs)
            return runner, leaves, runner.current()
        except InputMismatch:  # that program too is of another model
            train = self._selector.main.traced.training
            self.__dict__.update(_builder=Builder(self._original, self._asked, self.hooks), _given=None, _guide=None)
            self._compile(args, kwargs, train)
            runner, leaves = self._selector.select(args, kwargs)
            return runner, leaves, runner.current()

    def _eagerly(self, why: RunsEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original for a call that autograd records, of a module that was compiled in eval mode."""
        if str(why) not in self._said:
            self._said.add(str(why))
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", self.plan.model, why, how)
        return self._original(*args, **kwargs)

    def _passively(self, reason: MemplanError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for which there is no plan, evicting on demand."""
        passive = passive_for(reason, self.plan, self._selector.main.traced.device)
        self.__dict__["passive"] = passive
        run = self._original if passive is None else partial(passive.run, self._original)
        return run(*args, **kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes that CUDA graphs keep in private pools, those of other modes too, beside the arena."""
        return int(self._selector.pool_bytes)

    def _turn(self, guide: ProfileGuide) -> Runner:
        """Run what the guide says from now on."""
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
        """Where its programs take turns."""
        arena = self._builder.arena
        assert arena is not None
        return arena

    # -- being the model ---------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The mode of the original: both share everything."""
        return bool(self._original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set that of the original alone, as Lightning does for each submodule."""
        self._original.training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the mode of the original."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, with its own hooks and extra state."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the original, which is to load into this."""
        return self._original.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or what is loaded from a pickle, is compiled again (`pickling.py`)."""
        options, given = self._builder.options, self._given
        if self._guide is not None:
            options = self._asked
        elif self._measurements:
            given = self.plan
        made = recipe(self._original, self._selector.main, options, given, self._selector.main_modes, self._train)
        return rebuild, (CompiledModule, *made)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it on the original, whose forward is traced, unless it is this module's own."""
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
    """Whether it is this thread that traces, as far as its modes tell: torch's flag is up while any thread exports."""
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

    `example_inputs` is the tuple of positional arguments (or the only one), `example_kwargs` the others: real tensors,
    with the shapes, dtypes and devices of every later call. `train`: plan forward and backward or the forward
    alone. None: as `model.training` says, and in eval mode a call that eager would record gets a program with its
    backward, or runs eagerly while the results of an earlier such call are alive; `train=False`: results have no
    gradients. `plan`: a saved plan (or its path) to run instead of making one; it
    must have been made for this very graph. `budget`, `policy`, `costs`, `schedule`, `solver`, `layout`, `time_limit`:
    as in `memplan.plan`; `costs="measure"` measures the first steps and plans anew from that (`measurements`;
    `memplan/runtime/guided.py` says how many and how often). `in_place`: let results take the bytes of inputs that die
    there, where the kernel allows it. `gradients`: "safe" hands them to autograd; "owned" makes the backward set
    `.grad` itself, which is faster, and has limits: hooks on parameters and DistributedDataParallel raise
    `UnsupportedCall`, and `torch.autograd.grad` and `backward(inputs=...)` do not find parameters; "arena" leaves
    parameters' gradients in the arena until the next call, which takes least memory: what is then still in a `.grad` is
    moved out, and a view, an array or another name that still refers to one raises `StaleActivationsError`; it does not
    go with `budget`, `device`, `cuda_graph` or `dynamic_shapes`. `sanitize`: "poison" or "redzone" checks every step
    (slowly). `on_mismatch`: a call that differs from the example, or of a model that has changed since, raises
    ("error"), runs the original model ("eager"), gets a plan of its own ("replan"), or runs the original model and
    evicts on demand to keep the budget ("passive"; also where another mode's plan would be over it). `cuda_graph`:
    record forward and backward as two CUDA graphs at the first call, and replay them; inputs are copied in, results
    copied out (`pool_bytes` lie beside the arena).
    `dynamic_shapes`: which dimensions of the inputs vary and how far, as `torch.export` takes it; then every shape in
    range runs in one arena, which grows when a shape needs more, and those out of range are a mismatch. `bucketing`:
    `{"seq": 64}` plans sizes of that dimension for the next multiple of 64, so that the arena grows less often and
    shapes between share their offsets; nothing is padded, and results are the same.
    `divide`, `compress`: as in `memplan.plan`.

    `device`: run there ("cuda", "cuda:1"), while the model and all that goes in and comes out stay on the CPU: the
    parameters remain the model's own, and every step copies them, its inputs and its results by planned ops that run
    beside its kernels. Then the arena holds all of it, and so `budget` counts all of it: parameters that do not fit are
    loaded when they are needed, gradients leave when they are made. "cpu" stands in for a device: an arena of its own
    in the CPU's memory, filled by the same plan and the same copies. A sequence of devices (`["cuda:0", "cuda:1"]`, or
    `["cpu:0", "cpu:1"]`) divides the model's blocks among them, an arena on each: forward and backward of a block run
    on one, what another needs is sent there by planned ops. `budget` is then that of each device, or a sequence with
    one for each; nothing is evicted (`policy` stays "auto"). See `plan.devices`.

    Raises `UnsupportedGraph` before anything is allocated when the model cannot be traced as one graph,
    `PlanMismatch` when `plan` was made for another graph or device, `UnsupportedDevice` for a device that is not there
    or a model that is on one already, and what `memplan.load` raises.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
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
    return CompiledModule(model, args, keywords_of(example_kwargs), options=options, train=train, given=given)
