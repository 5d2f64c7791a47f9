"""Compiled steps of models that torch's tensor parallelism has placed on ranks, alone and with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from tests.distributed.launcher import launch

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
_SCENARIOS = "tests.distributed.tensor_parallelism"


def test_two_ranks_have_the_bits_of_torchs_tensor_parallelism() -> None:
    """An uneven vocabulary, other optimizers, sums of gradients, and a sequence that is divided, with recomputation."""
    found = _alike("placed_on_two", ranks=2)
    assert found["mlp"]["collectives"] == {"all_reduce": 1}
    columns, sequence = found["columns"], found["sequence min"]
    assert columns["collectives"] == {"all_reduce": 9, "all_gather": 1}
    assert "all_reduce all_reduce_model_blocks_0_o (float32 2x12x32)" in columns["lines"]
    assert sequence["collectives"]["reduce_scatter"] > 0
    assert "all_reduce reduce_model_blocks_0_one_weight (float32 32)" in sequence["lines"]
    assert sequence["arena"] < columns["arena"] * 0.7
    assert sequence["again"] == 0, "what other ranks take part in never runs twice"


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_torchs_two_dimensions() -> None:
    """FSDP2 divides the parts of tensor parallelism again: they are gathered among other ranks than they are used."""
    found = _alike("placed_on_four", ranks=4)
    assert found["whole"]["collectives"]["reduce_scatter"] > 8, "of activations, and of a gradient of each parameter"
    assert "all_reduce reduce_model_3_weight (float32 8)" in found["whole"]["lines"]
    gathers = found["min"]["collectives"]["gather_parameter"]
    assert gathers == 8 + found["min"]["again"] > 8
    assert found["min"]["arena"] < found["whole"]["arena"]


def _alike(scenario: str, *, ranks: int) -> dict[str, Any]:
    """Return what the first rank has found, after comparing all ranks with torch and with each other."""
    results = launch(scenario, ranks=ranks, module=_SCENARIOS).results
    for found in results:
        assert {case: one["different"] for case, one in found.items() if one["different"]} == {}
        assert [one["lines"] for one in found.values()] == [one["lines"] for one in results[0].values()]
    first: dict[str, Any] = results[0]
    return first
