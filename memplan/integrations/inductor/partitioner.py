"""`memplan.partitioner`: a partitioner for plain `torch.compile` that keeps the peak of a step within a budget.

Inductor calls it with the joint graph of forward and backward, before it lowers either. The partitioner lowers the
partition that torch would choose, reads what its wrappers allocate, and, where that is too much, lets `memplan.evict`
decide on the kernels of that very program which results are computed again. The next partition is lowered and read
too, until one keeps the budget.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.evict.costs import cost_model
from memplan.evict.measure import measure
from memplan.evict.policies.partition import kept_for_backward, partition
from memplan.evict.workload import Workload
from memplan.integrations.inductor.kernel_graph import KernelStep, kernel_step
from memplan.integrations.inductor.lowering import LoweredStep, lower_step
from memplan.integrations.inductor.raised import through_dynamo
from memplan.integrations.inductor.step_bytes import GivenTensor, StepBytes, step_bytes
from memplan.integrations.inductor.temporaries import Temporaries
from memplan.integrations.inductor.wrapper_lines import read_wrapper
from memplan.planning.fit import make_workload
from memplan.planning.options import Budget, Costs, read_budget, read_size
from memplan.torch_inside.graphs import GradAOTOutput, one_of_each
from memplan.torch_inside.versions import warn_if_newer
from memplan.trace.capture.front_ends import quiet
from memplan.trace.passes.partitions import require_new_values, save_old_values, tag_saved
from memplan.trace.passes.rewrite import storage_key
from memplan.trace.planning import device_costs
from memplan.version import __version__

_log = logging.getLogger("memplan")
COMPILATIONS = 4  # how many partitions are lowered at most
_CLOSE = 0.97  # a partition that needs at least this share of the budget is not improved any more

Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPartition:
    """One partition of a joint graph, and the bytes that the step needs with it.

    `saved` are the names of the nodes that the forward saves for the backward. `seconds` is the time of the step by
    the cost model, None for the partition that torch chooses.
    """

    saved: tuple[str, ...]
    bytes: StepBytes
    seconds: float | None = None


class BudgetPartitioner(CustomPartitionerFn):
    """A partitioner for Inductor that keeps a budget; `memplan.partitioner` makes one.

    Attributes:
        tried: The partitions of the last graph that were lowered, in order; the first is torch's own.
        chosen: The one that was taken; None before a graph was partitioned, and where torch's cache had it.

    Example:
        ```python
        partitioner = memplan.partitioner(budget="8GiB")
        compiled = torch.compile(model, options={"custom_partitioner_fn": partitioner})
        compiled(inputs).backward()
        print(partitioner.chosen.bytes.peak)
        ```
    """

    def __init__(self, *, budget: int | float, reserve: int, costs: Costs | None) -> None:
        self._budget = budget
        self._reserve = reserve
        self._costs = costs
        self.tried: tuple[TriedPartition, ...] = ()
        self.chosen: TriedPartition | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetPartitioner:
        """Return the partitioner itself: Inductor copies its settings, and what was tried is to be seen here."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it anew in another process, without what was tried."""
        return partial(BudgetPartitioner, budget=self._budget, reserve=self._reserve, costs=self._costs), ()

    def uuid(self) -> str:
        """Return what distinguishes this partitioner in the keys of Inductor's caches."""
        said = (__version__, repr(self._budget), self._reserve, repr(self._costs))
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Return the graphs of forward and backward; Inductor calls this.

        Args:
            gm: The joint graph.
            joint_inputs: Its example inputs.
            kwargs: `num_fwd_outputs`, `static_lifetime_input_indices`, and `compiler`, which is not looked at.

        Raises:
            BudgetInfeasible: No partition was found that keeps the budget.
            UnsupportedGraph: Sizes vary from call to call, or Inductor's program cannot be read.
        """
        warn_if_newer()
        joint = _Joint(gm, joint_inputs, kwargs)
        try:
            tried = self._tries(joint)
        except MemplanError as error:
            raise through_dynamo(error) from None
        self.tried = tuple(one for one, _ in tried)
        limit = self._limit(self.tried[0])
        within = [one for one in tried if one[0].bytes.peak + self._reserve <= limit]
        if not within:
            raise through_dynamo(self._infeasible(limit))
        self.chosen, graphs = min(within, key=lambda one: one[0].seconds or 0.0)
        need, first = self.chosen.bytes.peak + self._reserve, self.tried[0].bytes.peak + self._reserve
        _log.info(
            "partitioned: the step needs %s of %s (Inductor's own partition: %s)",
            format_bytes(need),
            format_bytes(limit),
            format_bytes(first),
        )
        return graphs

    def _tries(self, joint: _Joint) -> list[tuple[TriedPartition, Graphs]]:
        """Return the partitions that were lowered, and their graphs."""
        found = [joint.partition(None)]
        first = found[0][0]
        limit = self._limit(first) - self._reserve
        if first.bytes.peak <= limit:
            return found
        step = kernel_step(joint.lowered)
        costs = cost_model(self._costs or device_costs(joint.device))
        order = tuple(range(len(step.graph.ops)))
        workload = make_workload(step.graph, order, costs, joint.alignment)
        plain = measure(workload, workload.plain).peak
        beside = first.bytes.peak - plain  # what the kernels' graph does not show

        def lower(chosen: SavedNodes) -> int:
            found.append(joint.partition(chosen.saved, chosen.seconds))
            return found[-1][0].bytes.peak

        search_partitions(limit, limit - beside, plain, lambda aim: _decide(workload, step, aim), lower)
        return found

    def _limit(self, first: TriedPartition) -> int:
        """Return the most bytes that the step may need."""
        if isinstance(self._budget, float):
            return int(self._budget * (first.bytes.peak + self._reserve))
        return self._budget

    def _infeasible(self, limit: int) -> BudgetInfeasible:
        """Return the error of a budget that no partition keeps."""
        smallest = min(one.bytes.peak for one in self.tried) + self._reserve
        count = len(self.tried)
        what = f"none of {count} partitions keeps {format_bytes(limit)}; the smallest needs {format_bytes(smallest)}"
        hint = f"give at least {smallest} bytes, a smaller batch, or use memplan.compile, which also orders and places"
        return BudgetInfeasible(what, op="", smallest=smallest, where="budget", hint=hint)


def search_partitions(
    limit: int,
    aim: int,
    high: int,
    decide: Callable[[int], SavedNodes | None],
    lower: Callable[[SavedNodes], int],
) -> None:
    """Ask for partitions of kernels' bytes below `high`, and lower each new one, until one is close below `limit`.

    Every answer, also one that was seen before, moves a bound of the next aim to this one. So no aim is asked for
    twice, and the search ends.

    Args:
        limit: The most bytes that the step may need.
        aim: The bytes that the first partition is asked to keep.
        high: Bytes that are known to be too many to aim at.
        decide: Returns what to save so that the kernels keep an aim; None where nothing keeps it.
        lower: Returns the bytes of the step that saves this.
    """
    low, needs = 0, dict[tuple[str, ...], int]()
    aim = max(aim, 1)
    while low < aim < high and len(needs) < COMPILATIONS - 1:
        _log.debug("asks for a partition whose kernels keep %s", format_bytes(aim))
        chosen, nearer = decide(aim), low
        if chosen is not None and chosen.saved not in needs:
            need = needs[chosen.saved] = lower(chosen)
            if limit * _CLOSE <= need <= limit:
                return
            nearer = aim + limit - need
        if chosen is None or needs[chosen.saved] <= limit:
            low = aim
        else:
            high = aim
        if not low < nearer < high:
            if high - low <= high // 64:
                return
            nearer = (low + high) // 2
        aim = nearer


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNodes:
    """The nodes to save, and the seconds of the step by the cost model."""

    saved: tuple[str, ...]
    seconds: float


def _decide(workload: Workload, step: KernelStep, budget: int) -> SavedNodes | None:
    """Return what to save so that the kernels' buffers keep a budget; None where the policy finds nothing."""
    within = workload.within(max(budget, 0))
    try:
        events = partition(within)
    except BudgetInfeasible:
        return None
    nodes = [step.nodes.get(s, ()) for s in kept_for_backward(within, events)]
    return SavedNodes(saved=tuple(sorted({n for one in nodes for n in one})), seconds=measure(within, events).seconds)


class _Joint:
    """A joint graph, which is partitioned and lowered in copies."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[object], options: dict[str, Any]) -> None:
        self.module, self.inputs = module, inputs
        self.options = {key: value for key, value in options.items() if key != "compiler"}
        self.results = int(options["num_fwd_outputs"])
        values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        devices = {value.device for value in values if isinstance(value, torch.Tensor)}
        self.device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        self.alignment = 512 if self.device.type == "cuda" else 1
        self.temporaries = Temporaries()
        self.lowered: LoweredStep

    def partition(self, saved: Sequence[str] | None, seconds: float | None = None) -> tuple[TriedPartition, Graphs]:
        """Return the partition that saves these nodes (None: the one that torch chooses), lowered."""
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
        self.lowered = lower_step(forward, backward, self.results)
        need = bytes_of(self.module.graph, self.lowered, self.temporaries, self.alignment)
        return TriedPartition(saved=self.lowered.saved, bytes=need, seconds=seconds), (forward, backward)


def bytes_of(joint: fx.Graph, lowered: LoweredStep, temporaries: Temporaries, alignment: int = 1) -> StepBytes:
    """Return the bytes of a lowered step, whose joint graph says what goes in and what comes out.

    Example:
        >>> bytes_of(joint.graph, lowered, Temporaries()).peak
    """
    values = {node.name: node.meta.get("val") for node in joint.find_nodes(op="placeholder")}
    forward, backward = (read_wrapper(graph, temporaries) for graph in (lowered.forward, lowered.backward))
    position = {name: i for i, name in enumerate(lowered.returned) if name is not None}
    links = {i: position[name] for i, name in enumerate(lowered.taken) if name in position}
    given_of = {name: i for i, name in enumerate(forward.inputs)}
    tangents = {
        i: value.numel() * value.element_size()
        for i, name in enumerate(lowered.taken)
        if i not in links and name not in given_of and isinstance(value := values.get(name), torch.Tensor)
    }
    return step_bytes(
        forward,
        backward,
        given=[_given(values.get(name)) for name in forward.inputs],
        links=links,
        results=lowered.results,
        tangents=tangents,
        cloned=_cloned(joint, backward.strides, lowered.results),
        alignment=alignment,
    )


def _given(value: Any) -> GivenTensor | None:
    """Return the storage of a tensor that is passed to the step."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return GivenTensor(storage=storage_key(value), nbytes=int(value.untyped_storage().nbytes()))


def _cloned(joint: fx.Graph, strides: Sequence[tuple[int, ...] | None], results: int) -> list[int]:
    """Return the gradients (by position) that autograd copies, because their strides are not their parameter's."""
    (output,) = joint.find_nodes(op="output")
    descs = list(output.meta.get("desc") or ())[results:]
    values = {node.meta.get("desc"): node.meta.get("val") for node in joint.find_nodes(op="placeholder")}
    found = []
    for i, (desc, given) in enumerate(zip(descs, strides, strict=False)):
        value = values.get(desc.grad_of) if isinstance(desc, GradAOTOutput) else None
        if given is None or not isinstance(value, torch.Tensor):
            continue
        sizes = zip(value.shape, value.stride(), given, strict=True)
        if any(n != 1 and one != two for n, one, two in sizes):
            found.append(i)
    return found


def partitioner(budget: Budget, *, reserve: int | str = 0, costs: Costs | None = None) -> BudgetPartitioner:
    """Return a partitioner for plain `torch.compile` that keeps the peak of a training step within a budget.

    Inductor then recomputes by memplan's choice: its kernels, its allocations and its caches stay as they are. The
    peak is everything that is on the device because of the step: parameters, buffers, inputs, saved activations,
    gradients and temporaries. Random numbers are saved, never drawn again, so that a mask of dropout is the same in
    forward and backward. At most four partitions are lowered; no kernel is built for those that are not taken.

    Args:
        budget: The most bytes on the device: a number, a text ("8GiB"), or a share of what Inductor needs with its own
            partition (0.8, "80%").
        reserve: Bytes on the device that the step does not show, such as an optimizer's state.
        costs: The seconds of ops: a `CostModel`, or the name of a device: "a100", "h100", "h200", "cpu". None: the
            nearest one.

    Returns:
        The partitioner, for `torch.compile(model, options={"custom_partitioner_fn": ...})`, or
        `torch._inductor.config.custom_partitioner_fn`.

    Raises:
        InvalidSize: A size has no valid value.
        InvalidCosts: There is no such cost model.
        TorchNotInstalled: torch is not installed.

    Example:
        ```python
        options = {"custom_partitioner_fn": memplan.partitioner(budget="8GiB")}
        compiled = torch.compile(model, options=options)
        ```
    """
    limit = read_budget(budget)
    if limit == "min":
        hint = "give bytes, a text ('8GiB') or a share; the error of a budget that is too small names the smallest"
        raise InvalidSize("a partitioner has no smallest budget to aim at", where="budget", hint=hint)
    if costs is not None:
        cost_model(costs)
    return BudgetPartitioner(budget=limit, reserve=read_size("reserve", reserve), costs=costs)
