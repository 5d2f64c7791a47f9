"""The differences between the releases of torch that memplan runs with, in one place; a newer release is tried.

Names that only some releases have are looked up here, and the lines of Inductor's wrapper are listed here by kind.
Inductor is imported when one of its functions is called.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

KNOWN = ("2.11", "2.12", "2.13", "2.14")  # the releases that memplan was tested with, oldest first
Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

# Lines of Inductor's wrapper that run no kernel, and make, share or drop no memory. Of the devices there is one.
PLAIN_LINES = frozenset(
    {
        *("AssertDivByZeroLine", "AssertSizeStrideLine", "GroupedAssertSizeStrideLine"),
        *("EnterDeviceContextManagerLine", "ExitDeviceContextManagerLine"),
        *("CommentLine", "LineContext", "NullLine"),
    }
)
# Lines that are known, and what they are part of that a plan of generated kernels does not hold.
UNPLANNED_LINES: Mapping[str, str] = {
    "AllocateLine": "a buffer of a collective",
    **dict.fromkeys(("DynamicScalarLine", "SymbolicCallArgLine", "UnbackedSymbolDefsLine"), "a size that varies"),
    **dict.fromkeys(("EnterSubgraphLine", "ExitSubgraphLine", "ConditionalLine", "SwitchLine"), "control flow"),
    **dict.fromkeys(("EnterCudaStreamContextLine", "ExitCudaStreamContextLine"), "streams of the model's own"),
    "EnterDeviceContextManagerWithStreamInfoLine": "streams of the model's own",
    "ExitDeviceContextManagerWithStreamInfoLine": "streams of the model's own",
    **dict.fromkeys(("EnterCudaMemPoolContextLine", "ExitCudaMemPoolContextLine"), "a memory pool of the model's own"),
}


def why_not_planned(line: object) -> str:
    """Return what a line of Inductor's wrapper is part of, for an error; its class and torch's version if unknown.

    Example:
        >>> why_not_planned(SwitchLine(wrapper, node))
        'control flow (SwitchLine)'
    """
    name = type(line).__name__
    known = UNPLANNED_LINES.get(name)
    return f"{known} ({name})" if known else f"a line that is not known ({name}, of torch {torch.__version__})"


def is_newer() -> bool:
    """Return whether the installed torch is of a newer release than those that memplan was tested with."""
    return _release(torch.__version__) > _release(KNOWN[-1])


def warn_if_newer() -> None:
    """Warn, once for a process, where the installed torch is newer: its Inductor is tried."""
    if is_newer():
        _warn_newer(KNOWN[-1])


@functools.cache
def _warn_newer(newest: str) -> None:
    what = f"torch {torch.__version__} is newer than {newest}, the newest release that memplan was tested with."
    warnings.warn(f"{what} Inductor's code is read all the same; what is not known in it is refused.", stacklevel=3)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def compile_limits(**limits: Any) -> dict[str, Any]:
    """Return those of the arguments of `torch.compile` that this torch takes; 2.11 has no limits of recompiles."""
    return {name: value for name, value in limits.items() if name in inspect.signature(torch.compile).parameters}


def accelerators(name: str) -> Any:
    """Return what `torch.accelerator` has under a name, or None: `empty_host_cache` is of torch 2.12."""
    return getattr(torch.accelerator, name, None)


def collective(name: str, before: str) -> Callable[..., Any]:
    """Return a function of torch.distributed by its name, or by the one that it had before torch 2.13."""
    found: Callable[..., Any] = getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
    return found


def reducing_group(mesh_info: Any) -> Any:
    """Return the group that reduces the gradients of an `FSDPParam`; before torch 2.13, the one that gathers."""
    return getattr(mesh_info, "reduce_scatter_process_group", None) or mesh_info.shard_process_group


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
    from torch._inductor import compile_fx, config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    if "partitioner_fn_override" in inspect.signature(compile_fx.partition_fn).parameters:
        return compile_fx.partition_fn(joint, inputs, partitioner_fn_override=partitioner, **options)

    class Instead(CustomPartitionerFn):
        """Partitions by another function; `compiler` is for the function to say."""

        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            kwargs.pop("compiler", None)
            return partitioner(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            """Return None: graphs that it partitions are not cached."""

    with config.patch(custom_partitioner_fn=Instead()):  # before torch 2.13
        return compile_fx.partition_fn(joint, inputs, **options)


def compiler_config(graph: fx.GraphModule) -> Any:
    """Return what Inductor's functions for forward and backward take as `compiler_config_extra`."""
    from torch._inductor import compile_fx, config

    make: Any = compile_fx.create_compiler_config_extra
    given = next(iter(inspect.signature(make).parameters))
    return make(config if given == "config" else graph)


def loaded_code(compiled: Any) -> ModuleType | None:
    """Return the module with the code of a compiled graph; None if there is none.

    What the compiled graph calls may be a function of torch's around the module's own, which aligns its inputs.
    Inductor's own list of modules is emptied where its caches are disabled.
    """
    from torch._inductor.runtime import compile_tasks

    return sys.modules.get(f"{compile_tasks.__name__}.{getattr(compiled, 'cache_key', None)}")


def require_cacheable(graph: fx.GraphModule, inputs: Sequence[Any], settings: Any) -> None:
    """Raise `BypassFxGraphCache` for a graph that Inductor would not cache; before torch 2.13, for any of fixed sizes.

    All sizes are numbers here: there is no environment of shapes that a guard could be for.
    """
    from torch._inductor.codecache import FxGraphCache

    check: Any = FxGraphCache._check_can_cache
    if "require_shape_env" in inspect.signature(check).parameters:
        check(graph, inputs, settings, require_shape_env=False)
    else:
        check(graph)
