"""Replaying code that Inductor could have written tells what each kernel reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.errors import UnsupportedGraph
from memplan.trace.fused.kernel_runs import (
    Allocation,
    Block,
    BlockView,
    KernelLine,
    Renaming,
    Replay,
    TensorSpec,
    WrittenCode,
    extent,
    piece_of,
)

CPU = torch.device("cpu")


def _spec(*shape: int) -> TensorSpec:
    strides = torch.empty(shape).stride()
    nbytes = 4 * torch.Size(shape).numel()
    return TensorSpec(dtype=torch.float32, device=CPU, shape=shape, strides=strides, offset=0, nbytes=nbytes)


def _given(name: str, *shape: int) -> BlockView:
    return piece_of(Block(name=name, device=CPU, nbytes=4 * torch.Size(shape).numel(), given=True), torch.empty(shape))


def _replay(lines: list[Any], **inputs: BlockView) -> Replay:
    specs = {f"buf{i}": _spec(4, 4) for i in range(6)}
    namespace = {"cpp_fused": lambda *_: None, "torch": torch, "aten": torch.ops.aten, "table": torch.ones(3)}
    code = WrittenCode(lines=lines, inputs=tuple(inputs), specs=specs, namespace=namespace)
    code.sources["cpp_fused"] = "void kernel() {}"
    return Replay(code, inputs)


def _call(text: str, *written: int | str, **options: Any) -> KernelLine:
    return KernelLine(text=text, kernel="cpp_fused", written=frozenset(written), **options)


def test_a_first_write_reads_nothing_and_a_later_one_does() -> None:
    lines = [Allocation(name="buf0"), _call("cpp_fused(x, buf0)", 1), _call("cpp_fused(x, buf0)", 1)]
    first, second = _replay(lines, x=_given("x", 4, 4)).run()
    assert [p.block.name for p in first.reads] == ["x"]
    assert [p.block.name for p in first.writes] == ["buf0"]
    assert [p.block.name for p in second.reads] == ["x", "buf0"]


def test_a_buffer_in_place_of_another_shares_its_block() -> None:
    lines = [
        Allocation(name="buf0"),
        _call("cpp_fused(x, buf0)", 1),
        Renaming(text="buf1 = buf0; del buf0  # reuse"),
        _call("cpp_fused(buf1)", 0),
    ]
    first, second = _replay(lines, x=_given("x", 4, 4)).run()
    assert second.writes[0].block is second.reads[0].block is first.writes[0].block


def test_views_have_their_layout_and_offset() -> None:
    lines = [
        Allocation(name="buf0"),
        Renaming(text="buf1 = reinterpret_tensor(buf0, (2, 4), (4, 1), 8)  # alias"),
        _call("cpp_fused(reinterpret_tensor(x, (16, ), (1, ), 0), buf1)", 1),
    ]
    (run,) = _replay(lines, x=_given("x", 4, 4)).run()
    assert (run.writes[0].shape, run.writes[0].strides, run.writes[0].offset) == ((2, 4), (4, 1), 8)
    assert extent(run.writes[0]) == 64
    assert run.reads[0].shape == (16,)


def test_a_kernel_that_reads_what_it_wrote_itself_reads_nothing_from_before() -> None:
    lines = [
        Allocation(name="buf0"),
        Renaming(text="buf1 = reinterpret_tensor(buf0, (2, 4), (4, 1), 0)  # alias"),
        Renaming(text="buf2 = reinterpret_tensor(buf0, (2, 4), (4, 1), 8)  # alias"),
        _call("cpp_fused(x, buf1, buf2, buf0)", 1, 2),
    ]
    (run,) = _replay(lines, x=_given("x", 4, 4)).run()
    assert [p.block.name for p in run.reads] == ["x"]
    assert [p.offset for p in run.writes] == [0, 8, 0]


def test_results_of_an_op_are_new_blocks_by_position() -> None:
    overload = torch.ops.aten.native_dropout.default
    lines = [
        KernelLine(text="buf3 = torch.ops.aten.native_dropout.default(x, 0.5, True)", overload=overload),
        Renaming(text="buf0 = buf3[0]"),
        Renaming(text="buf1 = buf3[1]"),
        _call("cpp_fused(buf0, buf1, buf2)", 2),
    ]
    replay = _replay([Allocation(name="buf2"), *lines], x=_given("x", 4, 4))
    del replay._code.specs["buf3"]  # a buffer of several tensors has no layout
    first, second = replay.run()
    assert first.overload is overload
    assert {i: p.block.name for i, p in first.results.items()} == {0: "buf0", 1: "buf1"}
    assert first.args[1:] == (0.5, True)
    assert [p.block.name for p in second.reads] == ["buf0", "buf1"]


def test_a_call_of_which_nothing_is_known_may_change_all_of_its_arguments() -> None:
    (run,) = _replay([KernelLine(text="aten.bernoulli_(x, 0.5)", known=False)], x=_given("x", 4, 4)).run()
    assert run.reads == run.writes != ()
    assert not run.known


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (KernelLine(text="cpp_fused(x); cpp_fused(x)"), "2 calls in one line"),
        (KernelLine(text="nothing_of_that_name(x)"), "nothing_of_that_name"),
        (Renaming(text="buf0 = cpp_fused(x)"), "gets a name"),
        (KernelLine(text="cpp_fused(aten.view.dtype(x, torch.float64))"), "another size"),
        (KernelLine(text="cpp_fused(x, changed)", changed=frozenset(("changed",))), "not known"),
        (KernelLine(text="cpp_fused(x)", changed=frozenset(("buf5",))), r"changes buf5, which is no tensor"),
        (KernelLine(text="cpp_fused(x)", kernel="cpp_other"), r"without source code \(cpp_other\)"),
        (KernelLine(text="cpp_fused(x[0])"), r"cannot be replayed \(cpp_fused\(x\[0\]\)\): TypeError"),
    ],
)
def test_code_that_cannot_be_replayed_is_refused(line: Any, words: str) -> None:
    with pytest.raises(UnsupportedGraph, match=words):
        _replay([line], x=_given("x", 4, 4)).run()
