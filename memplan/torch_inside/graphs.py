"""Joint graphs of forward and backward: how AOTAutograd makes them, and what describes their inputs and outputs.

Others take torch's names for these, and for fake tensors, from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch._functorch import config as _config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "SubclassGetAttrAOTInput",
    "SubclassGetAttrAOTOutput",
    "TangentAOTInput",
    "backward_outside_autocast",
    "joint_graph",
    "one_of_each",
    "unset_fake_temporarily",
    "view_ops",
]


def backward_outside_autocast() -> Any:
    """Return a context for tracing: the backward runs after the `with torch.autocast` of the forward, not within it."""
    return _config.patch(backward_pass_autocast="off")


def joint_graph(
    stack: contextlib.ExitStack,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    table: Mapping[Any, Callable[..., Any]],
    *,
    dense_tangents: bool,
) -> Any:
    """Return AOTAutograd's joint graph of a module, with descriptors on its inputs and outputs.

    `table`: decompositions. `dense_tangents`: gradients that come in have no gaps and no overlaps; otherwise they have
    the strides of the outputs.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    # Without `keep_inference_input_mutations`, what both forward and backward write has no value after the forward.
    with _config.patch(guess_tangent_strides_as_outputs=False) if dense_tangents else contextlib.nullcontext():
        return aot_export_joint_with_descriptors(
            stack, module, args, kwargs, decompositions=dict(table), keep_inference_input_mutations=True
        )


def one_of_each(module: fx.GraphModule) -> None:
    """Make what a joint graph computes twice one node, as torch's partitioner does before it chooses what to save."""
    from torch._functorch.compile_utils import fx_graph_cse

    module.graph.eliminate_dead_code()
    if _config.cse:
        module.graph = fx_graph_cse(module.graph)


def view_ops() -> Any:
    """Return the ops that torch's partitioner takes for views."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().view_ops
