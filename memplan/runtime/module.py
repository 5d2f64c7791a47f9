"""`CompiledModule`: what `memplan.compile` returns. Called, trained and saved like the model that it came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.errors import InputMismatch, MemplanError, PlanMismatch
from memplan.plan import Plan
from memplan.planfile import load
from memplan.runtime.arena import Arena, arena_for
from memplan.runtime.duplicate import rebuild, recipe
from memplan.runtime.graphed import make_recorder
from memplan.runtime.guards import GUARDS, redzone_of
from memplan.runtime.hooks import Hooks
from memplan.runtime.runner import Runner
from memplan.runtime.select import Selector
from memplan.runtime.slots import Structure
from memplan.schedule.legal import require_legal
from memplan.trace import alignment_of, plan_traced, trace
from memplan.trace.follow import require_planned

ON_MISMATCH = ("error", "eager", "replan")
GRADIENTS = ("safe", "owned")


class CompiledModule(nn.Module):
    """A model that runs in one planned arena. Made by `memplan.compile`.

    It shares the parameters, buffers and submodules of the original under the same names: optimizers,
    `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both alike. Calls under
    `torch.no_grad()` and in `eval()` mode run plans of their own, made at the first such call, in the same
    arena. Python attributes (constants, dropout rates) are read when it is compiled. `plan` is the plan that
    training (or, compiled with `train=False`, every call) runs. `hooks` see what its steps do.
    """

    plan: Plan
    hooks: Hooks

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        train: bool | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        budget: Any = None,
        policy: Any = "auto",
        costs: Any = None,
        schedule: Any = "auto",
        solver: Any = "auto",
        time_limit: float | None = None,
        in_place: bool = True,
        gradients: str = "safe",
        guard: str | None = None,
        on_mismatch: str = "error",
        cuda_graph: bool = False,
    ) -> None:
        _check_choice("gradients", gradients, GRADIENTS)
        _check_choice("guard", guard, (None, *GUARDS))
        _check_choice("on_mismatch", on_mismatch, ON_MISMATCH)
        self.__dict__["_original"] = model
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_structure"] = Structure(model)
        self.__dict__["_options"] = {
            **{"budget": budget, "policy": policy, "costs": costs},
            **{"schedule": schedule, "solver": solver, "time_limit": time_limit},
        }
        self.__dict__["_in_place"] = in_place
        self.__dict__["_gradients"] = gradients
        self.__dict__["_guard"] = guard
        self.__dict__["_on_mismatch"] = on_mismatch
        self.__dict__["_cuda_graph"] = cuda_graph
        self.__dict__["_arena"] = None
        self.__dict__["hooks"] = Hooks()
        given = load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        if given is not None and budget is not None:
            hint = "pass one of them: a plan has its budget already"
            raise MemplanError(f"budget={budget!r} beside a plan", where="compile", hint=hint)
        self.__dict__["_given"] = given
        main = self._build(args, kwargs, model.training if train is None else train, given)
        if given is not None and given.eviction is not None:  # other programs keep it too
            self._options["budget"] = given.eviction.budget
        self.__dict__["_selector"] = Selector(self._structure, main, self._build)
        self.__dict__["plan"] = main.plan

    # -- calling -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Raises `InputMismatch` or `StaleActivationsError` rather than be silently wrong."""
        if torch.compiler.is_compiling():  # a part of a model that is being traced: the outer plan holds it all
            return self._original(*args, **kwargs)
        try:
            runner, leaves = self._selector.select(args, kwargs)
        except InputMismatch:
            if self._on_mismatch == "error":
                raise
            if self._on_mismatch == "eager":
                return self._original(*args, **kwargs)
            runner, leaves = self._selector.replan(args, kwargs)
        return runner(leaves, training=runner.traced.training)

    @property
    def pool_bytes(self) -> int:
        """Bytes that CUDA graphs keep in their private pool, beside the arena."""
        graphed = self._selector.main.graphed
        return 0 if graphed is None else int(graphed.recorder.pool_bytes)

    # -- building ----------------------------------------------------------------------------------------

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None = None) -> Runner:
        """Trace, plan and build; everything that can be refused is refused before the arena is allocated."""
        with torch.inference_mode(False):
            return self._build_normally(args, kwargs, train, given)

    def _build_normally(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None) -> Runner:
        require_real(self._original, args, kwargs)
        traced = trace(self._original, args, kwargs, train=train, in_place=self._in_place)
        redzone = redzone_of(self._guard, alignment_of(traced.device))
        if given is None:
            room = 0 if self._arena is None else self._arena.nbytes
            plan = plan_traced(traced, redzone=redzone, room=room, **self._options)
        else:
            require_planned(traced, given)
            require_legal(given.graph, given.schedule.order)
            if given.alignment % alignment_of(traced.device):
                needed = alignment_of(traced.device)
                what = f"the given plan aligns to {given.alignment} bytes, {traced.device} needs {needed}"
                raise PlanMismatch(what, hint="make the plan anew on this kind of device")
            if given.redzone < redzone:
                hint = "pass no plan, or no guard"
                raise InputMismatch(
                    "the given plan has no red zones around its buffers", where="guard='redzone'", hint=hint
                )
            plan = given
        arena = self._arena_for(plan, traced.device)
        recorder = make_recorder(traced.device, self._guard) if self._cuda_graph else None
        owned = self._gradients == "owned"
        return Runner(
            self._structure,
            traced,
            plan,
            arena,
            guard=self._guard,
            owned=owned,
            recorder=recorder,
            hooks=self.hooks,
        )

    def _arena_for(self, plan: Plan, device: torch.device) -> Arena:
        """The module's arena if the plan fits in it (programs take turns), else one of its own."""
        if self._arena is None:
            self.__dict__["_arena"] = arena_for(plan, device)
        arena: Arena = self._arena
        return arena if plan.arena_size <= arena.nbytes else arena_for(plan, device)

    # -- being the model ---------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The mode of the original: both share everything."""
        return bool(self._original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set by `nn.Module.__init__` and `train`; the original has its own."""

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
        """A copy, or what is loaded from a pickle, is compiled again (`duplicate.py`)."""
        options = {
            **self._options,
            **({} if self._given is None else {"plan": self._given, "budget": None}),
            **{"in_place": self._in_place, "gradients": self._gradients},
            **{"guard": self._guard, "on_mismatch": self._on_mismatch, "cuda_graph": self._cuda_graph},
        }
        made = recipe(CompiledModule, self._original, self._selector.main, options, self._selector.main_modes)
        return rebuild, made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def require_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    inputs = [(f"input {i}", x) for i, x in enumerate(pytree.tree_leaves((args, kwargs)))]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *inputs):
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            hint = "memplan.plan needs no real tensors; compile does: materialise the model and its inputs first"
            raise InputMismatch(
                f"a fake or {tensor.device} tensor holds no numbers to compute with", where=name, hint=hint
            )


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise MemplanError(f"{name}={value!r}", hint=f"choose one of: {', '.join(map(repr, choices))}")


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
    schedule: Any = "auto",
    solver: Any = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    gradients: str = "safe",
    guard: str | None = None,
    on_mismatch: str = "error",
    cuda_graph: bool = False,
) -> CompiledModule:
    """Compile `model` to run forward and backward at planned addresses in one preallocated arena.

    `example_inputs` is the tuple of positional arguments (or the only one), `example_kwargs` the others: real
    tensors, with the shapes, dtypes and devices of every later call. `train`: plan forward and backward
    (None: as `model.training` says) or the forward alone. `plan`: a saved plan (or its path) to run instead
    of making one; it must have been made for this very graph. `budget`, `policy`, `costs`, `schedule`, `solver`,
    `time_limit`: as in `memplan.plan`. `in_place`: let results take the bytes of inputs that die there, where the
    kernel allows it. `gradients`: "safe" hands them to autograd; "owned" makes the backward set `.grad` itself, which
    is faster, and has limits: hooks
    on parameters and DistributedDataParallel raise `UnsupportedCall`, and `torch.autograd.grad` and
    `backward(inputs=...)` do not find parameters. `guard`: "poison" or "redzone" checks every
    step (slowly). `on_mismatch`: a call that differs from the example raises ("error"), runs the original
    model ("eager"), or gets a plan of its own ("replan"). `cuda_graph`: record forward and backward as two CUDA graphs
    at the first call, and replay them; inputs are copied in, results copied out (`pool_bytes` lie beside the arena).

    Raises `UnsupportedGraph` before anything is allocated when the model cannot be traced as one graph,
    `PlanMismatch` when `plan` was made for another graph, and what `memplan.load` raises.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    return CompiledModule(
        model,
        args,
        example_kwargs or {},
        train=train,
        plan=plan,
        budget=budget,
        policy=policy,
        costs=costs,
        schedule=schedule,
        solver=solver,
        time_limit=time_limit,
        in_place=in_place,
        gradients=gradients,
        guard=guard,
        on_mismatch=on_mismatch,
        cuda_graph=cuda_graph,
    )
