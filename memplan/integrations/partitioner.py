"""`memplan.partitioner`: a partitioner for plain `torch.compile` that keeps the peak of a step within a budget.

Inductor calls it with the joint graph of forward and backward, before it lowers either. The partitioner has the code of
the partition that torch would choose generated, adds up what its kernels allocate, and, where that is too much, lets
`memplan.evict` decide on these kernels which results are computed again. The code of the next partition is generated
too, until one keeps the budget. Inductor's kernels, allocations and caches stay as they are.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError, UnsupportedGraph
from memplan.evict.costs import cost_model
from memplan.evict.measure import measure
from memplan.evict.policies.partition import kept_for_backward, partition
from memplan.evict.workload import Workload
from memplan.planning.options import Budget, Costs, read_budget, read_size
from memplan.torch_inside.versions import warn_if_newer
from memplan.trace.fused.fused_graph import PartitionKernels
from memplan.trace.fused.partition import Graphs, Joint, TriedPartition
from memplan.version import __version__

_log = logging.getLogger("memplan")
COMPILATIONS = 4  # how many partitions are generated at most
_OF_PLANS = ("inductor-code", "inductor-refuses")  # errors whose hints are those of plans
_CLOSE = 0.97  # a partition that needs at least this share of the budget is not improved any more

Decision = tuple[tuple[str, ...], float]  # the nodes to save, and the seconds of the step by the cost model


class BudgetPartitioner(CustomPartitionerFn):
    """A partitioner for Inductor that keeps a budget; `memplan.partitioner` makes one.

    Attributes:
        tried: The partitions of the last graph that were tried, in order; the first is torch's own.
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
        return functools.partial(BudgetPartitioner, budget=self._budget, reserve=self._reserve, costs=self._costs), ()

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
        try:
            tried = self._tries(Joint(gm, joint_inputs, kwargs))
        except MemplanError as error:
            raise _through_dynamo(error) from None
        self.tried = tuple(one for one, _ in tried)
        limit = self._limit(self.tried[0])
        within = [one for one in tried if one[0].bytes.peak + self._reserve <= limit]
        if not within:
            raise _through_dynamo(self._infeasible(limit))
        self.chosen, graphs = min(within, key=lambda one: one[0].seconds or 0.0)
        need, first = self.chosen.bytes.peak + self._reserve, self.tried[0].bytes.peak + self._reserve
        _log.info(
            "partitioned: the step needs %s of %s (Inductor's own partition: %s)",
            format_bytes(need),
            format_bytes(limit),
            format_bytes(first),
        )
        return graphs

    def _tries(self, joint: Joint) -> list[tuple[TriedPartition, Graphs]]:
        """Return the partitions that were tried, and their graphs."""
        found = [joint.partition(None)]
        first = found[0][0]
        limit = self._limit(first) - self._reserve
        if first.bytes.peak <= limit:
            return found
        step, workload = joint.kernels, joint.workload(self._costs)
        plain = measure(workload, workload.plain).peak
        beside = first.bytes.peak - plain  # what the kernels' graph does not show

        def attempt(chosen: Decision) -> int:
            found.append(joint.partition(*chosen))
            return found[-1][0].bytes.peak

        search_partitions(limit, limit - beside, plain, lambda aim: _decide(workload, step, aim), attempt)
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
    decide: Callable[[int], Decision | None],
    attempt: Callable[[Decision], int],
) -> None:
    """Ask for partitions of kernels' bytes below `high`, and try each new one, until one is close below `limit`.

    Every answer, also one that was seen before, moves a bound of the next aim to this one. So no aim is asked for
    twice, and the search ends.

    Args:
        limit: The most bytes that the step may need.
        aim: The bytes that the first partition is asked to keep.
        high: Bytes that are known to be too many to aim at.
        decide: Returns what to save so that the kernels keep an aim; None where nothing keeps it.
        attempt: Returns the bytes of the step that saves this.
    """
    low, needs = 0, dict[tuple[str, ...], int]()
    aim = max(aim, 1)
    while low < aim < high and len(needs) < COMPILATIONS - 1:
        _log.debug("asks for a partition whose kernels keep %s", format_bytes(aim))
        chosen, nearer = decide(aim), low
        if chosen is not None and chosen[0] not in needs:
            need = needs[chosen[0]] = attempt(chosen)
            if limit * _CLOSE <= need <= limit:
                return
            nearer = aim + limit - need
        if chosen is None or needs[chosen[0]] <= limit:
            low = aim
        else:
            high = aim
        if not low < nearer < high:
            if high - low <= high // 64:
                return
            nearer = (low + high) // 2
        aim = nearer


def _decide(workload: Workload, step: PartitionKernels, budget: int) -> Decision | None:
    """Return what to save so that the kernels' buffers keep a budget; None where the policy finds nothing."""
    within = workload.within(max(budget, 0))
    try:
        events = partition(within)
    except BudgetInfeasible:
        return None
    nodes = {step.nodes[s] for s in kept_for_backward(within, events) if s in step.nodes}
    return tuple(sorted(nodes)), measure(within, events).seconds


def _through_dynamo(error: MemplanError) -> MemplanError:
    """Return an error of a kind that dynamo raises to the user as it is, instead of a `BackendCompilerFailed`."""
    if isinstance(error, UnsupportedGraph) and error.see in _OF_PLANS:
        error.see, error.hint = "partitioner", "leave the option custom_partitioner_fn out, or use memplan.compile"
    kind: Any = type(error)
    carried = _kind(kind).__new__(_kind(kind), *error.args)
    carried.__dict__.update(error.__dict__)
    return carried


@functools.cache
def _kind(kind: Any) -> type[MemplanError]:
    """Return a kind of error that is one of dynamo's too, with the same name and attributes."""
    attributes = {"first_useful_frame": None, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, ShortenTraceback), attributes)


def partitioner(budget: Budget, *, reserve: int | str = 0, costs: Costs | None = None) -> BudgetPartitioner:
    """Return a partitioner for plain `torch.compile` that keeps the peak of a training step within a budget.

    Inductor then recomputes by memplan's choice: its kernels, its allocations and its caches stay as they are. The
    peak is everything that is on the device because of the step: parameters, buffers, inputs, saved activations,
    gradients and temporaries. Random numbers are saved, never drawn again, so that a mask of dropout is the same in
    forward and backward. The code of at most four partitions is generated; no kernel is built for the others.

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
