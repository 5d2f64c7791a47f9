"""`GraphModuleWithParams`: a graph of dynamo as a module again.

The graphs of dynamo take all tensors as inputs, parameters included. The module has the parameters, so that they are
addresses in the generated code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from memplan.trace.capture.origins import user_of


class GraphModuleWithParams(nn.Module):
    """A graph of dynamo as a module: it keeps some inputs (by position, with names) and is called with the others."""

    def __init__(self, graph: fx.GraphModule, kept: Mapping[int, str], inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self._kept = kept
        for i, name in self._kept.items():
            if isinstance(inputs[i], nn.Parameter):
                self.register_parameter(name, inputs[i])
            else:
                self.register_buffer(name, inputs[i])

    def forward(self, *rest: Any) -> Any:
        """Run the graph with the kept inputs and `rest`; what it is traced into knows the model's lines."""
        given = iter(rest)
        kept = {i: getattr(self, name) for i, name in self._kept.items()}
        inputs = (kept[i] if i in kept else next(given) for i in range(len(rest) + len(kept)))
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.graph).run(*inputs)

    def set_kept(self, inputs: Sequence[Any]) -> list[Any]:
        """Set the parameters and buffers to those among the inputs of a call; return the other inputs."""
        for i, name in self._kept.items():
            (self._parameters if name in self._parameters else self._buffers)[name] = inputs[i]
        return [x for i, x in enumerate(inputs) if i not in self._kept]

    def tensors(self) -> list[Any]:
        """Return the parameters and buffers that it has now."""
        return [*self._parameters.values(), *self._buffers.values()]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether the parameters are those among `inputs`; buffers may be replaced at each call."""
        return all(self._parameters[name] is inputs[i] for i, name in self._kept.items() if name in self._parameters)


def named_class(graph: fx.GraphModule) -> type[GraphModuleWithParams]:
    """Return a subclass of `GraphModuleWithParams` with the name of the user's module, for plans and errors."""
    name = user_of(graph.graph)
    return (
        type(name, (GraphModuleWithParams,), {"__doc__": GraphModuleWithParams.__doc__})
        if name
        else GraphModuleWithParams
    )


def is_kept(x: Any) -> bool:
    """Return whether an input is a leaf parameter or a buffer, whose address rarely changes.

    A tensor that replaces a parameter, as in `torch.func.functional_call`, is an input with a gradient.
    """
    if isinstance(x, nn.Parameter):
        return x.is_leaf
    return getattr(x, "_dynamo_static_input_type", None) is not None and not x.requires_grad
