"""The options of a compiled step that several ranks must have alike, and those that they cannot have."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import UnsupportedCall

_SAME = ("budget", "arena_budget", "host_budget", "pinned_budget", "reserve", "policy", "checkpoint", "divide")
_SAME_TOO = ("compress", "schedule", "solver", "layout", "time_limit", "in_flight")
_SAME_OF_STEPS = ("clip_grad_norm", "accumulate", "sanitize")
_EAGERLY = ("eager", "passive")


def require_options(options: Any, *, replicated: bool) -> None:
    """Raise `UnsupportedCall` for options with which ranks could not be sure to run the same collectives.

    `replicated`: the model is a `DistributedDataParallel`.
    """
    if options.on_mismatch in _EAGERLY:
        what = "a step by torch alone runs other collectives than a compiled one, for which other ranks would wait"
        _refuse(what, f"on_mismatch={options.on_mismatch!r}", 'leave on_mismatch out, or pass "error"')
    if getattr(options, "allow_unsynchronized", False):
        what = "the model is trained by all ranks together, and a compiled step does that too"
        hint = "leave it out, or pass the module that DistributedDataParallel wraps"
        _refuse(what, "allow_unsynchronized=True", hint)
    if options.measures:
        what = "each rank would measure other costs, and make another plan"
        hint = "measure on one rank, save step.measurement.costs, and pass costs='costs.json' on all"
        _refuse(what, "costs='measure'", hint)
    if options.cuda_graph:
        _refuse("a recorded step of several ranks is not supported", "cuda_graph=True", "leave cuda_graph out")
    if options.device is not None:
        what = "parameters of several ranks stay on the device of each"
        _refuse(what, f"device={options.device!r}", "leave device out, and move the model before it is divided")
    if replicated and options.accumulate > 1:
        what = "sums of gradients would be averaged after each batch, and not once, as under no_sync()"
        _refuse(what, f"accumulate={options.accumulate}", "use fully_shard, or pass the batches as one")


def require_call_options(options: Any) -> None:
    """Raise `UnsupportedCall` for options of `memplan.compile` that a model of several ranks cannot have."""
    require_options(options, replicated=False)
    if options.kernels != "aten":
        hint = "leave kernels out, or compile the blocks within by torch.compile"
        _refuse("a model of several ranks runs the kernels of eager", f"kernels={options.kernels!r}", hint)
    if options.dynamic_shapes is not None:
        what = "a plan of several ranks is for one shape"
        _refuse(what, "dynamic_shapes", "leave it out: other shapes are planned when they come")


def option_lines(options: Any) -> list[str]:
    """Return the options that decide a plan, a line each; functions have other addresses on each rank."""
    values = {name: getattr(options, name) for name in (*_SAME, *_SAME_TOO, *_SAME_OF_STEPS) if hasattr(options, name)}
    return [f"{name}={value!r}" for name, value in values.items() if not callable(value)]


def batch_lines(batch: Any) -> list[str]:
    """Return the layout of each tensor of a batch, a line each."""
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return [f"input {i}: {x.dtype} {tuple(x.shape)}" for i, x in enumerate(leaves)]


def _refuse(what: str, where: str, hint: str) -> None:
    raise UnsupportedCall(what, where=where, hint=hint, see="ranks-refused")
