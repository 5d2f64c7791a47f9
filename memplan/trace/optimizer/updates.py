"""Add the optimizer's update to the graph: one fused kernel per parameter, as soon as it may run.

A parameter may be overwritten once its gradient exists and nothing reads its old value any more; its gradient then dies
immediately. This is where a whole step saves memory: gradients do not accumulate. The optimizer itself is not traced
(it would be a dozen nodes per parameter). Its state remains its own, and its hyperparameters are read at every call, so
that schedulers and checkpoints work as usual.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memplan.core.graph import Graph, Op, StorageKind
from memplan.devices.kinds import HOST
from memplan.distributed.local import local_tensor
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import GradAOTOutput, ParamAOTInput
from memplan.trace.optimizer.optimizers import STEP, ensure_state, keys_of
from memplan.trace.passes.nodes import has_effects
from memplan.trace.passes.own_outputs import after_last, returned_by, touching
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value
from memplan.trace.traced import KernelCall, Live, Ref, TracedGraph

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s
LEARNING_RATE = "learning rate"  # key of a tensor that belongs to a group instead of a parameter
GROUP = "group "  # and its number: the name of the holder of an option
UPDATES = (aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_)
_SMALL = 16 << 10  # bytes of a parameter on the CPU


@dataclass(frozen=True, slots=True)
class StateInput:
    """Descriptor of a placeholder: tensor `key` of the state that an update keeps for parameter `target`."""

    target: str
    key: str

    def is_tangent(self) -> bool:
        """Return False: it is no gradient."""
        return False


def append_updates(
    graph: fx.Graph,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip_grad_norm: float | None = None,
    rates_in_memory: bool = False,
    device: torch.device | None = None,
) -> None:
    """Replace the returned gradients of `optimizer`'s parameters by updates; other gradients are dropped.

    `clip_grad_norm` first scales all gradients to that global 2-norm: every update then waits for the last gradient.
    `rates_in_memory`: updates read learning rates from tensors, one for each group, so that a CUDA graph follows a
    schedule of them. `device`: the optimizer's state is traced there, wherever it is. Missing state is created for
    parameters that have a gradient.
    """
    output, results, descs = returned_by(graph)
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    given = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["desc"], ParamAOTInput)]
    parameters = {n.meta["desc"].target: n for n in given}
    gradients = updated_parameters(graph, model, optimizer)
    kept = [(n, d) for n, d in zip(results, descs, strict=True) if not isinstance(d, GradAOTOutput)]
    output.args = (tuple(n for n, _ in kept),)
    output.meta["desc"] = [d for _, d in kept]
    factory = _Updates(graph, optimizer, rates_in_memory=rates_in_memory, device=device)
    if clip_grad_norm is not None:
        gradients = factory.clip(gradients, clip_grad_norm)
    updated = {id(model.get_parameter(name)): name for name in gradients}
    for parameter, group in group_of.items():  # in the order in which the optimizer would create its state
        if name := updated.get(parameter):
            state = ensure_state(optimizer, name, model.get_parameter(name), group)
            factory.update(name, parameters[name], gradients[name], state, group)
    factory.count_steps()
    _drop_dead(graph)


def updated_parameters(graph: fx.Graph, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, fx.Node]:
    """Return the gradients that a captured graph returns for parameters of `optimizer`, by the parameter's name, in the
    order of `model.parameters()`.

    Raises `UnsupportedGraph` if there are none.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    _, results, descs = returned_by(graph)
    gradients: dict[str, fx.Node] = {}
    for node, desc in zip(results, descs, strict=True):
        of = desc.grad_of if isinstance(desc, GradAOTOutput) else None
        if isinstance(of, ParamAOTInput) and isinstance(node, fx.Node) and id(model.get_parameter(of.target)) in own:
            gradients[of.target] = node
    if not gradients:
        raise UnsupportedGraph(
            type(optimizer).__name__,
            "the loss depends on none of its parameters",
            "give the optimizer the parameters of this model",
            see="loss-parameters",
        )
    order = {id(p): i for i, p in enumerate(model.parameters())}
    return dict(sorted(gradients.items(), key=lambda item: order[id(model.get_parameter(item[0]))]))


class _Updates:
    """Makes the nodes of the updates. `steps` are the counters of Adam's."""

    def __init__(
        self,
        graph: fx.Graph,
        optimizer: torch.optim.Optimizer,
        *,
        rates_in_memory: bool,
        device: torch.device | None,
    ) -> None:
        self.graph = graph
        self.mode = fake_mode_of(graph)
        self.optimizer = optimizer
        self.steps: list[fx.Node] = []
        self.rates_in_memory = rates_in_memory
        self.device = device
        self.rates: dict[int, fx.Node] = {}

    def _writer(self, node: fx.Node, before: fx.Node | None = None) -> Rewriter:
        """Return a rewriter whose nodes belong to the backward, whatever node they are made for."""
        writer = Rewriter(self.graph, self.mode, node, before)
        writer.phase = "is_backward"
        return writer

    def clip(self, gradients: Mapping[str, fx.Node], max_norm: float) -> dict[str, fx.Node]:
        """Return the gradients clipped as by `torch.nn.utils.clip_grad_norm_`: norm of norms, coefficient, one product
        each.
        """
        (output,) = self.graph.find_nodes(op="output")
        rw = self._writer(list(gradients.values())[-1], before=output)
        norms = [rw.call(aten.linalg_vector_norm.default, g, 2.0) for g in gradients.values()]
        total = rw.call(aten.linalg_vector_norm.default, rw.call(aten.stack.default, norms), 2.0)
        inverse = rw.call(aten.reciprocal.default, rw.call(aten.add.Tensor, total, _CLIP_EPSILON))
        coefficient = rw.call(aten.clamp_max.default, rw.call(aten.mul.Tensor, inverse, max_norm), 1.0)
        return {name: rw.call(aten.mul.Tensor, g, coefficient) for name, g in gradients.items()}

    def update(self, name: str, parameter: fx.Node, gradient: fx.Node, state: Mapping[str, Any], group: int) -> None:
        """Add one fused kernel after the gradient's definition and the parameter's last reader."""
        place = after_last(self.graph, [*touching(self.graph, gradient), *touching(self.graph, parameter)])
        rw = self._writer(gradient, before=place)
        if value(gradient).stride() != value(parameter).stride():  # the kernel walks both in the same order
            laid_out = rw.scratch(value(parameter))
            rw.call(aten.copy_.default, laid_out, gradient)
            gradient = laid_out
        options = self.optimizer.param_groups[group]
        keys = keys_of(self.optimizer, options)
        inputs = {key: self._state(name, key, state[key]) for key in keys}
        if isinstance(self.optimizer, torch.optim.SGD):
            packet = aten._fused_sgd_
            momentum = [inputs["momentum_buffer"]] if options["momentum"] else []
            args: tuple[Any, ...] = ([parameter], [gradient], momentum)
            live = {
                key: Live(self.optimizer, group, key)
                for key in ("weight_decay", "momentum", "lr", "nesterov", "maximize")
            }
            constants: dict[str, Any] = {"dampening": 0.0, "is_first_step": False}
        else:
            decoupled = isinstance(self.optimizer, torch.optim.AdamW) or options.get("decoupled_weight_decay")
            packet = aten._fused_adamw_ if decoupled else aten._fused_adam_
            self.steps.append(inputs[STEP])
            largest = [inputs["max_exp_avg_sq"]] if options["amsgrad"] else []
            args = ([parameter], [gradient], [inputs["exp_avg"]], [inputs["exp_avg_sq"]], largest, [inputs[STEP]])
            live = {key: Live(self.optimizer, group, key) for key in ("lr", "weight_decay", "eps", "maximize")}
            live |= {f"beta{i + 1}": Live(self.optimizer, group, "betas", i) for i in (0, 1)}
            constants = {"amsgrad": options["amsgrad"]}
        target = packet.default
        if self.rates_in_memory:
            target, constants["lr"] = packet.tensor_lr, self._rate(group, value(parameter))
            del live["lr"]
        node = rw.call(target, *args, **{key: one.value() for key, one in live.items()}, **constants)
        node.meta["live"] = live

    def count_steps(self) -> None:
        """Increment all step counters by one kernel, before the first update."""
        if self.steps:
            first = next(n for n in self.graph.nodes if n.op == "call_function" and "live" in n.meta)
            self._writer(first).call(aten._foreach_add_.Scalar, self.steps, 1)

    def _rate(self, group: int, parameter: torch.Tensor) -> fx.Node:
        """Return the learning rate of a group, as a tensor on the device of its parameters."""
        if group not in self.rates:
            with self.mode:
                rate = torch.empty((), dtype=torch.float32, device=parameter.device)
            self.rates[group] = self._state(f"{GROUP}{group}", LEARNING_RATE, rate)
        return self.rates[group]

    def _state(self, name: str, key: str, tensor: torch.Tensor) -> fx.Node:
        """Add a placeholder for a tensor of the optimizer's state."""
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"{name}_{key}".replace(".", "_").replace(" ", "_"))
        node.meta["desc"] = StateInput(name, key)
        tensor = local_tensor(tensor)
        with self.mode:
            node.meta["val"] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device or tensor.device
            )
        return node


def _drop_dead(graph: fx.Graph) -> None:
    """Erase what only dropped gradients needed; keep nodes with effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not has_effects(node):
            graph.erase_node(node)


def kind_of(kernel: KernelCall, graph: Graph) -> Hashable:
    """Return what the updates of one call must have in common; None for a kernel that is no update.

    That is the kernel, all arguments that are no tensors, and the dtypes and devices of the tensors.
    """
    if kernel.target.overloadpacket not in UPDATES:
        return None
    lists = tuple(tuple(_like(graph, ref) for ref in of) for of in kernel.args)
    return str(kernel.target), tuple(kernel.kwargs.items()), lists


def _like(graph: Graph, ref: Ref) -> tuple[str, str]:
    """Return the dtype and the device of a kernel argument."""
    value = graph.values[ref.value]
    return value.dtype, graph.storages[value.storage].device


def small_updates(traced: TracedGraph) -> dict[int, Hashable]:
    """Return the kinds of the updates (by op) that gain from running together: those that take longer to call than to
    compute. On an accelerator, where a call is a launch and the host has to keep up, these are all.
    """
    most = _SMALL if traced.device.type == HOST else math.inf
    graph, kinds = traced.graph, dict[int, Hashable]()
    for index, kernel in enumerate(traced.kernels):
        kind = kind_of(kernel, graph) if isinstance(kernel, KernelCall) else None
        if kind is not None and _parameter_bytes(graph, graph.ops[index]) <= most:
            kinds[index] = kind
    return kinds


def _parameter_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes of the parameter that an op updates."""
    storages = (graph.storages[s] for s in graph.written(op))
    return sum(s.nbytes for s in storages if s.kind is StorageKind.PARAMETER)
