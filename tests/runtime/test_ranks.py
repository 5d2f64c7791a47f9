"""Process groups: whole steps train ranks apart only where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

import memplan
from memplan.errors import UnsupportedCall

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process is the first of some ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield request.param
    finally:
        distributed.destroy_process_group()


def _step(model: nn.Module, *, allow_unsynchronized: bool = False) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 3), torch.randn(2, 3)
    step = memplan.compile_step(
        model, optimizer, nn.functional.mse_loss, batch, allow_unsynchronized=allow_unsynchronized
    )
    return step(*batch)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_step_without_a_collective_is_refused(group: int) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UnsupportedCall, match=f"a process group of {group} ranks: the step contains no collective"):
        _step(model)
    assert _step(model, allow_unsynchronized=True).isfinite()


@pytest.mark.parametrize("group", [1], indirect=True)
def test_one_rank_needs_no_collective(group: int) -> None:
    assert _step(nn.Linear(3, 3)).isfinite()


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_parameters_of_a_reducer_are_refused(group: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedCall, match=r"0\.weight: is held by a DistributedDataParallel"):
        _step(ddp.module)
    assert _step(ddp.module, allow_unsynchronized=True).isfinite()
    if group == 1:
        assert _step(nn.Linear(3, 3)).isfinite(), "another model is none of its business"
