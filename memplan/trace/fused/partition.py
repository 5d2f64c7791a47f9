"""Counts the bytes of steps that Inductor runs by itself, by its code for a partition of the joint graph.

`compiled_bytes`: those of `torch.compile(model)`. `memplan.partitioner` tries other partitions by the same `Joint`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memplan.core.graph import StorageKind
from memplan.core.totals import beside_results
from memplan.devices.kinds import HOST, alignment_of, is_accelerator
from memplan.errors import UnsupportedGraph
from memplan.evict.costs import cost_model
from memplan.evict.measure import measure
from memplan.evict.workload import Workload
from memplan.planning.fit import make_workload
from memplan.planning.options import Costs
from memplan.torch_inside.graphs import one_of_each
from memplan.trace.capture.front_ends import quiet
from memplan.trace.fused.code_generation import generate_partition
from memplan.trace.fused.fused_graph import PartitionKernels, PartitionReader
from memplan.trace.kernel_scratch import KernelScratch
from memplan.trace.passes.partitions import require_new_values, save_old_values, tag_saved
from memplan.trace.planning import device_costs

Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of a step on the device.

    `standing` were there before it: parameters, buffers and inputs. `peak` is the peak of the step, everything counted.
    """

    standing: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPartition:
    """One partition of a joint graph, and the bytes that the step needs with it.

    `saved` are the names of the nodes that the forward saves for the backward. `seconds` is the time of the step by
    the cost model, None for the partition that torch chooses.
    """

    saved: tuple[str, ...]
    bytes: StepBytes
    seconds: float | None = None


class Joint:
    """A joint graph, which is partitioned in copies whose code is generated."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[object], options: dict[str, Any]) -> None:
        self.module, self.inputs = module, inputs
        self.options = {key: value for key, value in options.items() if key != "compiler"}
        self.results = int(options["num_fwd_outputs"])
        values = {node.name: node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")}
        _require_numbers(values)
        devices = [value.device for value in values.values() if isinstance(value, torch.Tensor)]
        self.device = next(filter(is_accelerator, devices), torch.device(HOST))
        self.alignment = alignment_of(self.device) if is_accelerator(self.device) else 1
        self.tangents = frozenset(name for name in values if name.startswith("tangents"))
        self.scratch = KernelScratch(device=self.device)
        self.kernels: PartitionKernels

    def partition(self, saved: Sequence[str] | None, seconds: float | None = None) -> tuple[TriedPartition, Graphs]:
        """Return the partition that saves these nodes (None: the one that torch chooses), with its kernels read."""
        with quiet():
            copied = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        one_of_each(copied)
        if saved is None:
            save_old_values(copied.graph)
        else:
            tag_saved(copied.graph, frozenset(saved))
        with functorch_config.patch(activation_memory_budget=1.0):
            forward, backward = min_cut_rematerialization_partition(copied, self.inputs, **self.options)
        require_new_values(self.module.graph, forward.graph, backward.graph)
        with quiet():
            code = generate_partition(self.module.graph, copy.deepcopy(forward), copy.deepcopy(backward), self.results)
            self.kernels = PartitionReader(code).build(self.tangents)
        taken = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        (output,) = forward.graph.find_nodes(op="output")
        kept = tuple(x.name for x in output.args[0][self.results :] if isinstance(x, fx.Node) and x.name in taken)
        return TriedPartition(saved=kept, bytes=self._bytes(), seconds=seconds), (forward, backward)

    def workload(self, costs: Costs | None) -> Workload:
        """Return the kernels of the last partition as a workload without a budget."""
        graph = self.kernels.graph
        model = cost_model(costs or device_costs(self.device))
        return make_workload(graph, tuple(range(len(graph.ops))), model, self.alignment)

    def _bytes(self) -> StepBytes:
        """Return the bytes of the step of the last partition."""
        graph, workload = self.kernels.graph, self.workload(None)
        scratch = beside_results(graph, self.scratch.of_graph(graph, self.kernels.kernels))
        live = measure(workload, workload.plain).live + np.array(scratch, np.int64)
        live[graph.forward_ops :] += graph.bytes_of(StorageKind.TANGENT)
        standing = graph.bytes_of(StorageKind.PARAMETER, StorageKind.CONSTANT)
        return StepBytes(standing=standing, peak=standing + int(live.max(initial=0)))


def _require_numbers(values: Mapping[str, Any]) -> None:
    """Raise `UnsupportedGraph` for inputs whose sizes vary from call to call."""
    for name, value in values.items():
        sizes = tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in sizes):
            what = "its size varies from call to call, so the bytes of a step are not known"
            hint = "compile with torch.compile(model, dynamic=False): each shape is then partitioned for itself"
            raise UnsupportedGraph(name, what, hint, see="partitioner")


class _Counted(BaseException):
    """Ends a compilation whose partition was counted: no kernel is built."""

    def __init__(self, found: StepBytes) -> None:
        self.found = found


class _Counting(CustomPartitionerFn):
    """Counts the bytes of the partition that torch chooses."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> NoReturn:
        raise _Counted(Joint(gm, joint_inputs, kwargs).partition(None)[0].bytes)

    def uuid(self) -> None:
        """Return None: graphs that it partitions are not cached."""


def compiled_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepBytes:
    """Return the bytes of a training step that `torch.compile(model)` runs; the model and its inputs may be fake.

    It compiles as far as the code of forward and backward. It raises what torch raises of a model that is no single
    graph, and what `generate_partition` does.

    Example:
        >>> compiled_bytes(model, (x,), {}).peak
    """
    compiled = torch.compile(model, fullgraph=True, dynamic=False, options={"custom_partitioner_fn": _Counting()})
    try:
        with quiet(), torch.inference_mode(False), torch.enable_grad():
            compiled(*args, **kwargs)
    except _Counted as counted:
        return counted.found
    raise UnsupportedGraph(type(model).__name__, "has no backward to partition", "pass train=False", see="no-gradient")
