"""Compiled steps and calls of several ranks: torch's own bits, ranks that differ, and ranks that die."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

import memplan
from memplan.distributed.fake_ranks import fake_ranks
from tests.distributed import scenarios
from tests.distributed.launcher import Ranks, launch
from tests.distributed.models import EvenGpt, tokens

_MESH = 8  # bytes of the numbers of two ranks, in each mesh


@pytest.mark.slow
def test_two_ranks_train_as_torch_alone_does(tmp_path: Path) -> None:
    """One launch, since each costs seconds: FSDP2 and DDP, budgets, poison, casts, clipping, evaluation between."""
    ranks = launch("trained_alike", str(tmp_path), fresh=True)
    for found in ranks.results:
        assert {case: one["different"] for case, one in found["alike"].items() if one["different"]} == {}
    # A mesh holds the numbers of its ranks; the second rank's parts are padded to the first one's.
    unplanned = {case: one["unplanned"] for case, one in ranks.results[0]["alike"].items()}
    assert {case: over for case, over in unplanned.items() if over > _MESH} == {}, "gloo's copies are in the total"
    assert min(unplanned.values()) < 0, "it is an upper bound where collectives run beside ops"
    first, second = ([(c, one["lines"]) for c, one in found["alike"].items()] for found in ranks.results)
    assert first == second, "all ranks run the same collectives in the same order"
    alike = ranks.results[0]["alike"]
    gathers = 15 + alike["fsdp gpt"]["again"]
    assert alike["fsdp gpt"]["collectives"] == {"gather_parameter": gathers, "reduce_scatter": 15}
    assert alike["fsdp min"]["again"] > alike["fsdp gpt"]["again"]
    assert alike["fsdp min"]["arena"] < alike["fsdp gpt"]["arena"] * 0.7
    assert alike["fsdp min"]["arena"] < alike["fsdp half"]["arena"] < alike["fsdp gpt"]["arena"]
    assert min(alike[case]["early"] for case in ("fsdp min", "fsdp half", "fsdp llama", "fsdp bfloat16", "ddp min")) > 0
    assert alike["fsdp one by one"]["early"] == 0
    apart = 1 + hasattr(FSDPModule, "set_separate_reduce_scatter_group")
    assert list(alike["fsdp two groups"]["groups"].values()) == [1, 1, apart], "gathers beside reductions"
    assert alike["fsdp two groups"]["early"] > 0
    assert alike["ddp tied"]["collectives"] == {"all_reduce": 1}
    assert alike["ddp convolutions"]["collectives"] == {"broadcast": 6, "all_reduce": 2}, "buckets of 1 KiB"
    _require_loaded_elsewhere(ranks.results[0]["saved"], str(tmp_path))
    with fake_ranks(64):
        many = scenarios.shape_of(memplan.plan(scenarios.sharded(EvenGpt()), tokens(0, 0)), 64)
    assert many == ranks.results[0]["planned"], "64 ranks that are not there have the plan of two, but for their parts"
    for found in ranks.results:
        assert found["saved"] == ranks.results[0]["saved"]
        assert found["pipeline"] == [True, True], "GPipe and 1F1B"
        theirs, ours = found["buffers"]
        assert ours == theirs
        assert ours[-3:] == [3.0, 6.0, 6.0], "of rank 0, also where the forward does not read it"
        shapes = found["shapes"]
        assert shapes["alike"], "each rank plans anew, and all agree"
        assert shapes["several"], "with other gathers again"
        assert shapes["left"][0] == shapes["compiled later"][0] == "CollectiveFailed"
    left, leaving = (found["shapes"]["leaves"] for found in ranks.results)
    assert leaving[0] == "InputMismatch"
    assert left[0] == "CollectiveFailed"
    assert "a rank has left the others: rank 1 raised InputMismatch: input 0: is torch.float32 (3, 10)" in left[1]
    between = ranks.results[1]["between"]
    assert between["evaluated"] == [True, True]
    assert between["shorter"]
    assert between["state"]
    assert between["no sync"][0] == between["ddp no sync"][0] == "UnsupportedCall"


def _require_loaded_elsewhere(saved: dict[str, list[float]], folder: str) -> None:
    """Load the checkpoint of two ranks in this process, and on four ranks, which train on as torch does."""
    model = scenarios.mlp()
    optimizer = scenarios.adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a process without ranks
        scenarios.load_checkpoint(model, optimizer, folder)
    assert scenarios.whole_values(model, optimizer) == saved
    for found in launch("loaded_by_four", folder, ranks=4).results:
        assert found["loaded"] == saved
        assert found["different"] == []


def test_ranks_that_differ_raise_together_and_a_dead_rank_is_an_error() -> None:
    ranks = launch("ranks_that_differ", fails=True)
    mine, theirs = ranks.results[0], ranks.results[0]["other"]
    words = {
        "rows under a budget": "input 0: torch.float32 (4, 10)', rank 1 has 'input 0: torch.float32 (6, 10)'",
        "model": "(float32 16x10)', rank 1 has 'gather_parameter gather_model_weight (float32 18x10)'",
        "plan on one rank": "rank 0 has 'plan new', rank 1 has 'plan given'",
        "version": "rank 1 has 'torch 2.12.0'",
    }
    for case, expected in words.items():
        for kind, what in (mine[case], theirs[case]):
            assert kind == "RanksDiffer", ranks.text
            assert expected in what
    assert mine["one fails"][0] == "RanksDiffer"
    assert "rank 1 could not compile: UnsupportedProblem" in mine["one fails"][1]
    assert theirs["one fails"][0] == "UnsupportedProblem"
    assert mine["rows"] == theirs["rows"] == [True, True, True], "two losses, and the parameters after them"
    assert mine["one does not come"] == ["RanksDiffer", "ranks [1] did not compile within 1 s"]
    for found in (mine, theirs):
        assert found["after one alone"][0] == "RanksDiffer", "no answer of the attempt before"
        assert [kind for kind, _ in found["both fail"]] == ["UnsupportedProblem"] * 2
        divided, joined, hooked = (what for _, what in found["late option"])
        assert "has a divide factor of its own" in divided
        assert "is in join()" in joined
        assert "has a communication hook" in hooked
    assert ranks.statuses[1] == -9, "it was killed"
    assert mine["dies"][0] == "CollectiveFailed"
    assert "it failed in the backward, and some parameters may be updated" in mine["dies"][1]
    assert mine["dead"][0] == "CollectiveFailed"
    assert "parameters may be updated" not in mine["dead"][1]


def test_a_launch_ends_when_a_rank_fails_or_hangs() -> None:
    found = launch("fails_and_hangs", ranks=2, fails=True, grace=0.5, module="tests.distributed.bare")
    assert found.statuses == [3, -9]
    assert found.results == [None, None]
    assert "said before it failed" in found.logs[0]
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0, 1\] did not end in time.*said before it hung"):
        launch("hangs", ranks=2, timeout=4, module="tests.distributed.bare")


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Returns what two ranks have found: one launch for two tests, since each costs seconds."""
    return launch("compiled_alike", module="tests.distributed.compiled_calls")


def test_two_ranks_have_the_gradients_of_torch_with_their_own_optimizer(ranks: Ranks) -> None:
    """Training, evaluation and other rows, of FSDP2, DDP and tensor parallelism, with poison and a budget."""
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
    assert refused["no sync"][0] == "UnsupportedCall"
    assert refused["copied"][0] == "UnsupportedCall"
    assert refused["differ"][0] == "RanksDiffer"


def test_two_ranks_have_the_bits_of_torchs_tensor_parallelism(ranks: Ranks) -> None:
    """An uneven vocabulary, other optimizers, sums of gradients, and a sequence that is divided, with recomputation."""
    found = _alike([one["steps"] for one in ranks.results])
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
    found = _alike(launch("placed_on_four", ranks=4, module="tests.distributed.tensor_parallelism").results)
    assert found["whole"]["collectives"]["reduce_scatter"] > 8, "of activations, and of a gradient of each parameter"
    assert "all_reduce reduce_model_3_weight (float32 8)" in found["whole"]["lines"]
    gathers = found["min"]["collectives"]["gather_parameter"]
    assert gathers == 8 + found["min"]["again"] > 8
    assert found["min"]["arena"] < found["whole"]["arena"]


def _alike(results: list[Any]) -> dict[str, Any]:
    """Return what the first rank has found, after comparing all ranks with torch and with each other."""
    for found in results:
        assert {case: one["different"] for case, one in found.items() if one["different"]} == {}
        assert [one["lines"] for one in found.values()] == [one["lines"] for one in results[0].values()]
    first: dict[str, Any] = results[0]
    return first
