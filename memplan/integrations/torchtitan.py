"""A memory policy for torchtitan's graph_trainer, which keeps the peak of a training step within a budget.

graph_trainer traces forward, loss and backward as one graph. Its memory policies tag the nodes of the forward: what the
backward needs is saved, or computed again right before it. Here `memplan.evict` decides, on bytes and seconds of that
graph. The interface is that of `torchtitan/experiments/graph_trainer/memory_policy.py`, read at commit
b5bcd76c66d0acb1a08b176d9639425bc55e0b2a (August 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.core.extras import require_library
from memplan.core.graph import StorageKind
from memplan.core.units import format_bytes
from memplan.devices.kinds import alignment_of
from memplan.errors import BudgetInfeasible, InvalidSize
from memplan.evict.costs import cost_model
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.partition import kept_for_backward, partition
from memplan.evict.workload import Workload
from memplan.evict.workload_limits import floor
from memplan.integrations.fx_step import FxStep, fx_step
from memplan.planning.fit import make_workload
from memplan.planning.options import Budget, Costs, read_budget, read_size
from memplan.trace.passes.partitions import clear_tags, is_collective, tag_saved
from memplan.trace.planning import device_costs

NAME = "memplan"
_EPILOGUE = ("lm_head", "loss")  # modules whose nodes graph_trainer's pass does not compute again

Policy = Callable[..., fx.GraphModule]


def register(budget: Budget, *, reserve: int | str = 0, costs: Costs | None = None) -> Policy:
    """Register the memory policy "memplan" with torchtitan's graph_trainer, and return it.

    Set `config.compile.memory_policy = "memplan"` afterwards; the command line of torchtitan knows its own names only.

    Args:
        budget: The most bytes on each device: a number, a text ("70GiB"), or a share of what the step needs if
            everything is saved (0.5, "50%").
        reserve: Bytes on the device that the graph does not show: the optimizer's state, buffers of collectives.
        costs: The seconds of ops: a `CostModel`, or the name of a device: "a100", "h100", "h200", "cpu". None: the
            nearest one.

    Returns:
        The policy: a function that tags the nodes of a graph module and returns it.

    Raises:
        LibraryNotInstalled: torchtitan is not installed.
        InvalidSize: A size has no valid value.

    Example:
        ```python
        import memplan.integrations.torchtitan

        memplan.integrations.torchtitan.register(budget="70GiB")
        config.compile.memory_policy = "memplan"
        ```
    """
    require_library("torchtitan", where=__name__, install="pip install torchtitan")
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    made: Policy = register_memory_policy(NAME)(MemoryPolicy(budget, reserve=reserve, costs=costs))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedStep:
    """The decision of a policy: the nodes that are saved, and bytes on the device with and without it."""

    saved: tuple[str, ...]
    peak: int
    plain_peak: int


class MemoryPolicy:
    """A memory policy of graph_trainer, for a budget; `register` registers one.

    Attributes:
        chosen: What was decided for the last graph.

    Raises:
        InvalidSize: A size has no valid value.

    Example:
        ```python
        policy = MemoryPolicy("70GiB")
        policy(gm, config=config)
        print(policy.chosen.peak)
        ```
    """

    def __init__(self, budget: Budget, *, reserve: int | str = 0, costs: Costs | None = None) -> None:
        limit = read_budget(budget)
        if limit == "min":
            raise InvalidSize("a memory policy takes no 'min'", where="budget", hint="give bytes, a text or a share")
        self._budget: int | float = limit
        self._reserve = read_size("reserve", reserve)
        self._costs = None if costs is None else cost_model(costs)
        self.chosen: TaggedStep | None = None

    def __call__(self, gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        """Tag the nodes of the forward, and return the module.

        Random results and collectives are saved: their numbers would be others, and they need the other processes.

        Args:
            gm: The graph of forward, loss and backward.
            config: That of the trainer, which is not looked at.

        Raises:
            BudgetInfeasible: Nothing was found that keeps the budget.
            UnsupportedGraph: A size varies from call to call.
        """
        graph = gm.graph
        step = fx_step(graph, is_backward=_is_backward, never_again=_never_again)
        device = _device(step)
        costs = self._costs or cost_model(device_costs(device))
        workload = make_workload(step.graph, tuple(range(len(step.graph.ops))), costs, alignment_of(device))
        beside = step.graph.bytes_of(StorageKind.PARAMETER) + self._reserve
        plain = measure(workload, workload.plain).peak + beside
        limit = int(self._budget * plain) if isinstance(self._budget, float) else self._budget
        within = workload.within(max(limit - beside, 0))
        try:
            events = partition(within)
        except BudgetInfeasible as error:
            raise _infeasible(workload, limit, beside) from error
        kept = kept_for_backward(within, events)
        peak = measure(within, events).peak + beside
        if peak == plain:
            clear_tags(graph)
            saved: tuple[str, ...] = ()
        else:
            names = frozenset(name for s in kept for name in step.nodes.get(s, ()))
            backward = frozenset(node for node in graph.nodes if _is_backward(node))
            saved = tag_saved(graph, names, backward=backward, never_again=_never_again)
        gm.recompile()
        self.chosen = TaggedStep(saved=saved, peak=peak, plain_peak=plain)
        return gm


def _is_backward(node: fx.Node) -> bool:
    """Return whether autograd made a node, as graph_trainer sees it."""
    return bool(node.meta.get("autograd_backward", False))


def _never_again(node: fx.Node) -> bool:
    """Return whether graph_trainer cannot compute a node again."""
    where = str(node.meta.get("custom", {}).get("module_fqn", ""))
    return where.startswith(_EPILOGUE) or is_collective(node)


def _device(step: FxStep) -> torch.device:
    """Return the device on which most of the step's bytes are."""
    sizes: dict[str, int] = {}
    for storage in step.graph.storages:
        sizes[storage.device] = sizes.get(storage.device, 0) + storage.nbytes
    return torch.device(max(sizes, key=lambda name: sizes[name], default="cpu"))


def _infeasible(workload: Workload, limit: int, beside: int) -> BudgetInfeasible:
    """Return the error of a budget that the policy cannot keep, with the smallest that it can."""
    low, high = floor(workload)[0] - 1, measure(workload, workload.plain).peak
    while high - low > max(high // 200, 1):
        middle = (low + high) // 2
        try:
            partition(workload.within(middle), work=0)
            high = middle
        except BudgetInfeasible:
            low = middle
    smallest = high + beside
    what = f"computing again keeps no {format_bytes(limit)}; the smallest found is {format_bytes(smallest)}"
    hint = f"give at least {smallest} bytes, or a smaller batch"
    return BudgetInfeasible(what, op="", smallest=smallest, where="budget", hint=hint)
