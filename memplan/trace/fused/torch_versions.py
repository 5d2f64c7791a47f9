"""Calls what Inductor has under other names, or with other arguments, in torch 2.11, 2.12 and 2.13."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import fx
from torch._guards import TracingContext
from torch._inductor import compile_fx, config
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.codegen import wrapper
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partition(
    joint: fx.GraphModule, inputs: Sequence[object], partitioner: Partitioner, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Run Inductor's passes on a joint graph, and return the graphs that `partitioner` then makes of it.

    Args:
        joint: The graph, which is changed.
        inputs: Its inputs.
        partitioner: Is called with the graph, the inputs, and further keyword arguments.
        **options: The other arguments of Inductor's `partition_fn`.
    """
    if "partitioner_fn_override" in inspect.signature(compile_fx.partition_fn).parameters:
        return compile_fx.partition_fn(joint, inputs, partitioner_fn_override=partitioner, **options)
    with config.patch(custom_partitioner_fn=_Instead(partitioner)):  # before torch 2.13
        return compile_fx.partition_fn(joint, inputs, **options)


class _Instead(CustomPartitionerFn):
    """Partitions by another function; `compiler` is for the function to say."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._partitioner = partitioner

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler", None)
        return self._partitioner(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        """Return None: graphs that it partitions are not cached."""


def compiler_config(graph: fx.GraphModule) -> Any:
    """Return what Inductor's functions for forward and backward take as `compiler_config_extra`."""
    make: Any = compile_fx.create_compiler_config_extra
    given = next(iter(inspect.signature(make).parameters))
    return make(config if given == "config" else graph)


@contextlib.contextmanager
def donating(inputs: Sequence[int]) -> Iterator[None]:
    """Let Inductor's kernels write over these inputs (by position) of the backward that is compiled inside.

    AOTAutograd says so in its metadata, of which nothing else is read for a backward.
    """
    context: Any = TracingContext.get()
    before = context.fw_metadata
    if inputs:
        context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(inputs), static_input_indices=[])
    try:
        yield
    finally:
        context.fw_metadata = before


def loaded_code(compiled: Any) -> ModuleType | None:
    """Return the module with the code of a compiled graph; None if there is none.

    What the compiled graph calls may be a function of torch's around the module's own, which aligns its inputs.
    """
    key = getattr(compiled, "cache_key", None)
    return next((m for m in reversed(PyCodeCache.modules) if key is not None and getattr(m, "key", None) == key), None)


def require_cacheable(graph: fx.GraphModule, inputs: Sequence[Any], settings: Any) -> None:
    """Raise `BypassFxGraphCache` for a graph that Inductor would not cache; before torch 2.13, for any of fixed sizes.

    All sizes are numbers here: there is no environment of shapes that a guard could be for.
    """
    check: Any = FxGraphCache._check_can_cache
    if "require_shape_env" in inspect.signature(check).parameters:
        check(graph, inputs, settings, require_shape_env=False)
    else:
        check(graph)


def lines_named(*names: str) -> tuple[type, ...]:
    """Return those of the kinds of lines that Inductor's wrapper has in this version."""
    return tuple(found for name in names if isinstance(found := getattr(wrapper, name, None), type))
