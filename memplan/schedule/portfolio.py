"""`auto`: the policies in turn, each mended by cut repair, until an order is proven to be optimal.

Never worse than the traced order, and the traced order itself where none is better. All limits count work,
so that the same graph gets the same schedule on any machine.
"""

from __future__ import annotations

from collections.abc import Callable

from memplan.graph import Graph
from memplan.schedule.base import Schedule
from memplan.schedule.core import Core, Ints, make_core, step_bytes
from memplan.schedule.early_free import early_free_order, late_alloc_order
from memplan.schedule.greedy import greedy_order
from memplan.schedule.lpmf import lpmf_order
from memplan.schedule.propagate import propagate
from memplan.schedule.prover import Prover
from memplan.schedule.repair import repair
from memplan.schedule.reverse_greedy import reverse_greedy_order
from memplan.schedule.search import narrow, widest

_ORDERS: tuple[tuple[str, Callable[[Core], Ints]], ...] = (
    ("traced", lambda core: core.traced),
    ("early_free", early_free_order),
    ("late_alloc", late_alloc_order),
    ("lpmf", lpmf_order),
    ("greedy", greedy_order),
    ("reverse_greedy", reverse_greedy_order),
)
_WIDTHS = (8, 64, 512, 4096)


def portfolio(graph: Graph) -> Schedule:
    """The order that needs the least of all that the policies, repair and a bounded search find."""
    core = make_core(graph)
    prover = Prover(core, _cut_work(core))
    best, name, peak = _listed(core, prover)
    if peak > prover.bound:
        prover.raise_bound(best)
    if peak > prover.bound:
        best, peak, name = _searched(core, prover, best, peak, name)
    return prover.schedule(graph, best, name)


def _listed(core: Core, prover: Prover) -> tuple[Ints, str, int]:
    """The best of the listed orders, as they are and mended; the first of equals."""
    best, name = core.traced, "traced"
    peak = int(step_bytes(core, best).max(initial=0))
    for policy, make in _ORDERS:
        if peak == prover.bound:
            break
        order = make(core)
        for called in (policy, f"{policy} + repair"):
            needs = int(step_bytes(core, order).max())
            if needs < peak:
                best, name, peak = order, called, needs
            if called == policy and needs > prover.bound:
                order = repair(core, order, prover.cut_at)
    return best, name, peak


def _searched(core: Core, prover: Prover, best: Ints, peak: int, name: str) -> tuple[Ints, int, str]:
    """The best order after propagation and ever wider searches, and what they prove."""
    work, cut_work = _search_work(core), _cut_work(core)
    narrower, target = core, 0
    for width in _WIDTHS:
        if peak - 1 != target:
            target = peak - 1
            found = propagate(narrower, best, target, cut_work)
            cut_work = found.left
            if found.core is None:
                prover.searched(peak)
                break
            narrower = found.core
        if work <= 0:
            break
        result = narrow(narrower, best, prover.bound, width=min(width, widest(core)), work=work)
        prover.searched(result.bound)
        work = result.left
        if result.max_live < peak:
            best, name, peak = result.order, "search", result.max_live
        if peak == prover.bound:
            break
    return best, peak, name


def _cut_work(core: Core) -> int:
    return 6_000 * core.n  # 2 to 10 ns each


def _search_work(core: Core) -> int:
    return max(25_000_000, 8_000 * core.n)  # 2 to 20 ns each
