"""`memplan.compile` of models that several ranks run together: the gradients and bits of torch's own."""

from __future__ import annotations

import pytest
from torch import distributed

from tests.distributed.launcher import launch

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def test_two_ranks_have_the_gradients_of_torch_with_their_own_optimizer() -> None:
    """Training, evaluation and other rows, of FSDP2, DDP and tensor parallelism, with poison and a budget."""
    ranks = launch("compiled_alike", module="tests.distributed.compiled_calls")
    for found in ranks.results:
        assert {case: one["different"] for case, one in found["alike"].items() if one["different"]} == {}
        assert {case: one["different"] for case, one in found["backends"].items() if one["different"]} == {}
        assert all(one["graphs"] for one in found["backends"].values())
        assert found["placed"][0] == "UnsupportedGraph"
        assert "an input of type DTensor" in found["placed"][1]
    alike, refused = ranks.results[0]["alike"], ranks.results[0]["refused"]
    assert alike["fsdp"]["collectives"] == {"gather_parameter": 6 + alike["fsdp"]["again"], "reduce_scatter": 6}
    assert alike["ddp"]["collectives"] == {"broadcast": 6, "all_reduce": 2}
    assert alike["placed"]["collectives"] == {"all_reduce": 1}
    assert refused["waits"][0] == "ArenaInUse", "another call would need the bytes of the one that waits"
    assert refused["twice"][0] == "StaleActivationsError"
    assert "it has collectives, in which the other ranks would not take part" in refused["twice"][1]
    assert refused["no sync"][1].endswith("also under set_requires_gradient_sync(False)")
    assert refused["copied"][0] == "UnsupportedCall"
    assert refused["differ"][0] == "RanksDiffer"
