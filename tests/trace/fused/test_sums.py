"""Sums in Inductor's code that take the bytes of their first summand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.core.graph import Origin
from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun
from memplan.trace.fused.sums import with_sums_in_place


def _view(name: str, offset: int = 0) -> BlockView:
    block = Block(name=name, device=torch.device("cpu"), nbytes=64)
    return BlockView(block=block, dtype=torch.float32, shape=(4, 4), strides=(4, 1), offset=offset)


def _run_sums(name: str, out: BlockView, *args: BlockView) -> KernelRun:
    return KernelRun(
        name=name,
        function=torch.addmm,
        args=args,
        kwargs={"out": out},
        reads=args,
        writes=(out,),
        results={},
        overload=None,
        source="",
        origin=Origin(),
        known=True,
    )


A, B, ONE, TWO, THREE = map(_view, ("a", "b", "one", "two", "three"))
SUM = "extern_kernels.addmm"
MADE = _run_sums("extern_kernels.mm", ONE, A, B)


def _blocks(runs: list[KernelRun], outputs: tuple[Any, ...] = ()) -> list[Block]:
    made, _ = with_sums_in_place(runs, outputs, {A.block, B.block})
    return [run.writes[0].block for run in made]


def test_sums_one_after_another_are_one_block() -> None:
    runs = [MADE, _run_sums(SUM, TWO, ONE, A, B), _run_sums(SUM, THREE, TWO, A, B)]
    made, outputs = with_sums_in_place(runs, (THREE, 3), {A.block, B.block})
    assert [run.kwargs["out"].block for run in made] == [ONE.block] * 3
    assert [run.args[0].block for run in made[1:]] == [ONE.block] * 2
    assert outputs[0].block is ONE.block
    assert outputs[1] == 3


@pytest.mark.parametrize(
    ("runs", "outputs"),
    [
        ([MADE, _run_sums(SUM, TWO, ONE, A, B), _run_sums("extern_kernels.mm", THREE, ONE, A)], ()),  # read later
        ([MADE, _run_sums(SUM, TWO, ONE, A, B)], (ONE,)),  # returned
        ([MADE, _run_sums(SUM, TWO, ONE, ONE.view((4, 4), (1, 4)), B)], ()),  # multiplied too
        ([MADE, _run_sums(SUM, TWO, ONE, ONE, B)], ()),  # multiplied as it is
        ([MADE, _run_sums(SUM, TWO, ONE, A, ONE)], ()),
        ([MADE, _run_sums("extern_kernels.baddbmm", TWO, ONE, A, B)], ()),
        ([MADE, _run_sums(SUM, TWO, ONE.view((4,), (1,)), A, B)], ()),  # a bias
        ([MADE, _run_sums(SUM, TWO, ONE.view((4, 4), (1, 4)), A, B)], ()),  # laid out otherwise
        ([_run_sums(SUM, TWO, A, A, B)], ()),  # given
    ],
)
def test_other_summands_stay_as_they_are(runs: list[KernelRun], outputs: Any) -> None:
    assert _blocks(runs, outputs) == [run.kwargs["out"].block for run in runs]
