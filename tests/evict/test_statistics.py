"""Running statistics of batch norm: what depends on them is not computed again once they have changed."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import nn

from memplan.evict.apply import apply
from memplan.evict.equivalent import require_equivalent
from memplan.evict.search import DecisionSearch
from memplan.trace import trace
from tests.evict.judge import workload_of


def test_no_pair_of_decisions_gives_back_a_result_with_other_bytes() -> None:
    """A kernel that runs again for one result gives its others back too, unless they would have other bytes by then."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace(model, torch.randn(8, 16), train=True).graph
    search = DecisionSearch(workload_of(graph, budget=1), swaps=False, least=0.0)
    moves = [move for of_storage in search.moves for move in of_storage]
    ways = 0
    for one, two in combinations(moves, 2):
        if one.storage == two.storage:
            continue
        state = search.after(search.start(), one, two)
        if state.area < float("inf"):
            applied = apply(search.workload, search.events(state))
            require_equivalent(graph, applied.graph, applied.sources)
            ways += len(applied.graph.ops) > len(graph.ops)
    assert ways > 100
