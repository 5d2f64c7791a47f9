"""`DistributedDataParallel(memplan.compile(model, inputs))`: two processes train as with the model itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import memplan

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo"
)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def _trained(model: nn.Module, rank: int, *, zeroed: bool, **options: Any) -> list[torch.Tensor]:
    """The losses of six steps, the third and the fourth of which accumulate, and the parameters after them."""
    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(6):
        torch.manual_seed(100 * rank + step)
        x = torch.randn(16, 8)

        def backward(x: torch.Tensor = x) -> None:
            losses.append(parallel(x).square().mean())
            losses[-1].backward()

        if step == 2:  # the next step adds to these gradients
            with parallel.no_sync():
                backward()
            continue
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroed)
    return [*(loss.detach() for loss in losses), *(p.detach() for p in model.parameters())]


def _rank(rank: int, folder: str) -> None:
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        found = {
            (as_view, zeroed): _pair(rank, zeroed=zeroed, gradient_as_bucket_view=as_view)
            for as_view in (False, True)
            for zeroed in (False, True)
        }
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        distributed.destroy_process_group()


def _pair(rank: int, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = _net()
    reference = copy.deepcopy(model)
    expected = _trained(reference, rank, **options)
    return expected, _trained(memplan.compile(model, torch.randn(16, 8)), rank, **options)


def _run(main: Callable[..., None], *args: Any) -> None:
    multiprocessing.spawn(main, args=args, nprocs=2)  # type: ignore[attr-defined,no-untyped-call]


@pytest.mark.slow
def test_two_ranks_train_as_with_the_model_itself(tmp_path: Path) -> None:
    _run(_rank, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found in ranks:
        for options, (expected, ours) in found.items():
            assert all(map(torch.equal, ours, expected)), options
    for key, (_, ours) in ranks[0].items():
        assert all(map(torch.equal, ours[6:], ranks[1][key][1][6:])), "the ranks have the same parameters"
        assert not torch.equal(ours[0], ranks[1][key][1][0]), "and different batches"
