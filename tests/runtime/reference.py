"""The reference that every compiled step is held against: FX interpretation of the captured graph, before any pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)

from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.passes.own_outputs import returned_by


class Interpreted:
    """One step of `model` by `fx.Interpreter`: outputs, gradients by parameter name, new values of mutated buffers."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], captured: Captured | None = None) -> None:
        self.captured = captured or capture(model, args, {}, train=True)
        self.model = model

    def run(self, *args: Any) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        graph = self.captured.graph_module.graph
        given = [self._input(n, args) for n in graph.nodes if n.op == "placeholder"]
        with torch._C._AutoDispatchBelowAutograd():  # gradients enabled: oneDNN's LSTM asks
            results = fx.Interpreter(self.captured.graph_module).run(*given, enable_io_processing=False)
        outputs: list[Any] = []
        gradients: dict[str, torch.Tensor] = {}
        mutated: dict[str, torch.Tensor] = {}
        for result, desc in zip(results, returned_by(graph)[2], strict=True):
            if isinstance(desc, GradAOTOutput):
                if isinstance(desc.grad_of, ParamAOTInput) and result is not None:
                    gradients[desc.grad_of.target] = result
            elif isinstance(desc, InputMutationAOTOutput):
                if isinstance(desc.mutated_input, BufferAOTInput):
                    mutated[desc.mutated_input.target] = result
            else:
                outputs.append(result)
        return outputs, gradients, mutated

    def _input(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        desc = node.meta["desc"]
        if isinstance(desc, ParamAOTInput):
            return self.model.get_parameter(desc.target).detach()
        if isinstance(desc, BufferAOTInput):
            return self.model.get_buffer(desc.target)
        if isinstance(desc, PlainAOTInput):
            return args[desc.idx]
        assert isinstance(desc, TangentAOTInput)
        val = node.meta["val"]
        return torch.ones(val.shape, dtype=val.dtype, device=val.device)


def same_gradients(one: nn.Module, two: nn.Module) -> bool:
    """Whether the parameters of two models, in order, have the same gradients bit by bit, or none."""
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(
        p.grad is q.grad is None or (p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad))
        for p, q in pairs
    )


def same_parameters(one: nn.Module, two: nn.Module) -> bool:
    """Whether two models have the same parameters bit by bit, in order."""
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
