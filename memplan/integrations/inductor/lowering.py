"""Lowers the graphs of forward and backward with Inductor up to the lines of their wrappers; no kernel is built.

This is what Inductor itself does with them afterwards (`torch._inductor.compile_fx`), so that the bytes that it will
allocate are known before anything is compiled. All names of Inductor that are private are used here and in
`wrapper_lines.py` and `kernel_graph.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """Forward and backward as Inductor lowered them, and the names of the values in the graphs that were lowered.

    `returned` are the nodes that the forward returns, those for the caller first (`results` of them); `taken` are the
    placeholders of the backward. A node that is both is a saved value.
    """

    forward: GraphLowering
    backward: GraphLowering
    returned: tuple[str | None, ...]
    taken: tuple[str, ...]
    results: int

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of the nodes that the forward saves for the backward."""
        taken = set(self.taken)
        return tuple(name for name in self.returned[self.results :] if name in taken)


def lower_step(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> LoweredStep:
    """Return both graphs lowered; they stay as they are. `results`: how many values the forward returns to its caller.

    Example:
        >>> lowered = lower_step(*min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=1), 1)
    """
    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    mutated = getattr(metadata, "num_mutated_inp_runtime_indices", 0)
    returned = _outputs(forward)
    inputs = [node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder")]
    with _donated(metadata, None):
        lowered = _lower(forward, inputs, visible=range(mutated, results), backward=False)
    strides = dict(zip(map(_name, returned[results:]), _output_strides(lowered)[results:], strict=True))
    taken = backward.graph.find_nodes(op="placeholder")
    donated = _donated_indices(forward, backward, results)
    with _donated(metadata, donated):
        second = _lower(backward, [_as_saved(n, strides.get(n.name)) for n in taken], visible=(), backward=True)
    return LoweredStep(
        forward=lowered,
        backward=second,
        returned=tuple(map(_name, returned)),
        taken=tuple(node.name for node in taken),
        results=results,
    )


def _lower(module: fx.GraphModule, inputs: list[Any], *, visible: Sequence[int], backward: bool) -> GraphLowering:
    """Return a copy of a graph, lowered, scheduled and written down; as `_InProcessFxCompile.codegen_and_compile`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # constants of the graph are real tensors
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(DebugContext())
        return _lowered(copy.deepcopy(module), inputs, visible=visible, backward=backward)


def _lowered(module: fx.GraphModule, inputs: list[Any], *, visible: Sequence[int], backward: bool) -> GraphLowering:
    """Return a graph, which is changed, lowered."""
    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(output.args[0][i], fx.Node)]
    compile_fx._recursive_record_user_visible_output_idxs(module)
    shape_env = getattr(module, "shape_env", None) or shape_env_from_inputs(inputs)
    view_to_reshape(module)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(mode), compile_fx.get_cuda_device_context(module):
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
    with (
        V.set_fake_mode(mode),
        compile_fx.maybe_disable_comprehensive_padding(inputs),
        compile_fx.maybe_disable_graph_partition(False, False),
    ):
        graph = GraphLowering(
            module,
            example_inputs=inputs,
            shape_env=shape_env,
            is_inference=False,
            is_backward=backward,
            inputs_to_check=(),
        )
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            graph.codegen()
    return graph


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    (output,) = module.graph.find_nodes(op="output")
    found: Sequence[Any] = output.args[0]
    return found


def _name(node: Any) -> str | None:
    return node.name if isinstance(node, fx.Node) else None


def _output_strides(graph: GraphLowering) -> list[tuple[int, ...] | None]:
    """Return the strides that Inductor gives each result; None for what is no tensor."""
    found: list[tuple[int, ...] | None] = []
    for out in graph.graph_outputs:
        has = getattr(out, "has_tensor_output", None)
        found.append(tuple(int(s) for s in out.get_layout().stride) if has is not None and has() else None)
    return found


def _as_saved(node: fx.Node, strides: tuple[int, ...] | None) -> Any:
    """Return the example of a placeholder, with the strides in which the forward saves it."""
    value = node.meta.get("val")
    if strides is None or not isinstance(value, torch.Tensor) or tuple(value.stride()) == strides:
        return value
    return value.as_strided(value.size(), strides)


def _donated_indices(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> list[int]:
    """Return the placeholders (by position) of the backward whose bytes nothing else refers to, as AOTAutograd does."""
    from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs

    if not torch._functorch.config.donated_buffer:
        return []
    given, returned = forward.graph.find_nodes(op="placeholder"), _outputs(forward)
    saved = [node for node in returned[results:] if isinstance(_value(node), torch.Tensor)]
    free = collect_fw_donated_buffer_idxs(
        [_value(node) for node in given],
        [_value(node) for node in returned[:results]],
        [_value(node) for node in _outputs(backward)],
        [_value(node) for node in saved],
    )
    position = {node.name: i for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    return [position[saved[i].name] for i in free if saved[i].name in position]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


@contextlib.contextmanager
def _donated(metadata: Any, indices: list[int] | None) -> Iterator[None]:
    """Tell Inductor which inputs of a backward it may overwrite, as AOTAutograd does before it compiles one."""
    if metadata is None:
        yield
        return
    before, metadata.bw_donated_idxs = metadata.bw_donated_idxs, indices
    try:
        yield
    finally:
        metadata.bw_donated_idxs = before
